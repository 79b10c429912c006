"The race's recipes can be read, their logs can be checked, and the table says what the logs say."

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bertlab.cli.speedrun import TRACKS, arrived, check_log, load_speedrun, recipe_sha256, speedrun_config

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "benchmarks" / "records").glob("*.yaml"))
RESULTS = ROOT / "benchmarks" / "results" / "records"


def log_of(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.log.json").read_text(encoding="utf-8"))


def test_the_base_of_all_recipes_is_the_first_demo():
    assert load_speedrun(ROOT / "benchmarks" / "records" / "first_demo.yaml") == {}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_is_and_makes_a_run(path, tmp_path):
    assert path.read_text(encoding="utf-8").startswith("# "), "the table shows the first line"
    config = speedrun_config(TRACKS["laptop"], load_speedrun(path), tmp_path, seed=1)
    phases = config["model"]["scheduler_warmup_steps"] + config["model"]["scheduler_cooldown_steps"]
    assert phases < config["trainer"]["max_steps"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_log_is_of_the_recipe_that_lies_beside_it_and_the_table_says_what_it_says(path):
    log = log_of(path.stem)
    assert log["recipe"] == load_speedrun(path) and recipe_sha256(log["recipe"]) == log["recipe_sha256"]
    row = json.loads((RESULTS / "laptop.json").read_text(encoding="utf-8"))["rows"][path.stem]
    assert row["losses"] == [one["validation_loss"] for one in log["attempts"]]
    assert row["seconds"] == [pytest.approx(one["train_seconds"], abs=0.01) for one in log["attempts"]]


def test_the_record_stands_up_to_its_check_and_the_control_does_not_arrive():
    assert check_log(log_of("muon_two_layers")) == []
    control = log_of("first_demo_in_half")
    assert not any(arrived(control, one) for one in control["attempts"])


@pytest.mark.slow
def test_all_recipes_run_in_turns(tmp_path):
    script = ROOT / "benchmarks" / "records.py"
    words = ["--quick", "--rounds", "1", "--only", "muon_two_layers", "--kept", str(tmp_path), "--threads", "1",
             "--output", str(tmp_path / "laptop.json")]  # fmt: skip
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "laptop.json").read_text())["rows"]
    assert list(rows) == ["first_demo", "muon_two_layers"] and rows["first_demo"]["share_of_base"] == [1.0]
    log = json.loads((tmp_path / "muon_two_layers.log.json").read_text())
    assert check_log(log) == ["a record needs three different seeds; it has [0]", "seed 0 did not arrive"]
