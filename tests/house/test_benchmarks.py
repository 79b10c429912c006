"The benchmarks run at tiny sizes and write their results."

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import sides  # noqa: E402
import suite  # noqa: E402


def run(name, *words):
    command = [sys.executable, ROOT / "benchmarks" / f"{name}.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=sides.environment(1))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*suite.MINUTES, "gpu", "retrieval"])
def test_a_benchmark_runs_at_tiny_sizes(name, tmp_path):
    run(name, "--quick", "--output", tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text())["bertlab"]


@pytest.mark.slow
def test_a_race_runs_at_tiny_sizes(tmp_path):
    run("speedrun", "race", "--quick", "--output", tmp_path / "race")
    assert json.loads((tmp_path / "race" / "log.json").read_text())


@pytest.mark.slow
def test_the_table_of_families_holds_for_two(tmp_path):
    "One family on packed rows and one on padded ones: every use works."
    run("families", "--quick", "--output", tmp_path / "result.json")
    table = json.loads((tmp_path / "result.json").read_text())
    assert table["bert"].pop("rows") == "packed" and "mpnet" in table["mpnet"].pop("rows")
    assert {use for row in table.values() for use in row.values()} == {"yes"}
    assert len(table["bert"]) == len(table["mpnet"]) == 7


def test_a_ratio_compares_the_runs_of_one_round():
    our_runs, other_runs = [
        [{"rate": rate} for rate in rates] for rates in ([2.0, 30.0, 8.0], [1, 10, 2])
    ]
    assert sides.ratios(our_runs, other_runs, "rate") == {"median": 3.0, "min": 2.0, "max": 4.0}
