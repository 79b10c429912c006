"The race's recipes can be read, their logs can be checked, and the table says what the logs say."

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bertlab.cli.speedrun import (
    TRACKS,
    arrived,
    check_log,
    load_speedrun,
    recipe_sha256,
    speedrun_config,
)

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "benchmarks" / "records").glob("*.yaml"))
RESULTS = ROOT / "benchmarks" / "results" / "records"

sys.path.insert(0, str(ROOT / "benchmarks"))
import records  # noqa: E402
import sides  # noqa: E402


SLOWER = RESULTS / "without_bfloat16"  # the same track on another kind of processor
LOGS = sorted(RESULTS.rglob("*.log.json"))


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_base_of_all_recipes_is_the_first_demo():
    assert load_speedrun(ROOT / "benchmarks" / "records" / "first_demo.yaml") == {}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_is_and_makes_a_run(path, tmp_path):
    assert path.read_text(encoding="utf-8").startswith("# "), "the table shows the first line"
    config = speedrun_config(TRACKS["laptop"], load_speedrun(path), tmp_path, seed=1)
    phases = config["model"]["scheduler_warmup_steps"] + config["model"]["scheduler_cooldown_steps"]
    assert phases < config["trainer"]["max_steps"]


def test_every_recipe_has_raced_on_some_kind_of_processor():
    assert {path.stem for path in RECIPES} == {path.name.partition(".")[0] for path in LOGS}


@pytest.mark.parametrize("path", LOGS, ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_log_is_of_its_recipe_and_the_table_beside_it_says_what_it_says(path):
    log, name = read(path), path.name.partition(".")[0]
    assert log["recipe"] == load_speedrun(ROOT / "benchmarks" / "records" / f"{name}.yaml")
    assert recipe_sha256(log["recipe"]) == log["recipe_sha256"]
    row = read(path.with_name("laptop.json"))["rows"][name]
    assert row["losses"] == [one["validation_loss"] for one in log["attempts"]]
    assert row["seconds"] == [
        pytest.approx(one["train_seconds"], abs=0.01) for one in log["attempts"]
    ]


def test_the_record_stands_up_to_its_check_and_the_control_does_not_arrive():
    for record in (RESULTS / "muon_two_layers.log.json", SLOWER / "muon_wide_batch.log.json"):
        assert check_log(read(record)) == []
    for path in LOGS:
        assert not [wrong for wrong in check_log(path) if "did not arrive" not in wrong], path
    control = read(RESULTS / "first_demo_in_half.log.json")
    assert not any(arrived(control, one) for one in control["attempts"])


@pytest.fixture
def race(tmp_path, monkeypatch):
    "Run records.py on recipes and results of its own: how often a child was asked, and the losses in the table."
    asked = []

    def child(_, case, threads):
        asked.append(case)
        loss = 4 + case["recipe"].get("model", {}).get("learning_rate", 0)
        run = {
            "seed": case["round"],
            "validation_loss": loss,
            "bits_per_byte": 3.0,
            "train_seconds": 60.0,
            "steps": 10,
        }
        return {"recipe": case["recipe"], "attempts": [run]}

    def main(*words):
        asked.clear()
        monkeypatch.setattr(sys, "argv", ["records.py", "--kept", str(tmp_path / "kept"), *words])
        records.main()
        table = json.loads((tmp_path / "results" / "records" / "laptop.json").read_text())
        return len(asked), {name: row["losses"] for name, row in table["rows"].items()}

    monkeypatch.setattr(sides, "run_child", child)
    for module in (records, sides):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(records, "RECIPES", tmp_path)
    (tmp_path / "first_demo.yaml").write_text("{}\n")
    (tmp_path / "idea.yaml").write_text("model: {learning_rate: 0.25}\n")
    return main


def test_a_recipe_that_has_changed_runs_anew_and_the_others_are_kept(race, tmp_path):
    losses = {"first_demo": [4, 4, 4], "idea": [4.25, 4.25, 4.25]}
    assert race() == (6, losses) and race() == (0, losses)
    (tmp_path / "idea.yaml").write_text("model: {learning_rate: 0.5}\n")
    assert race() == (3, {**losses, "idea": [4.5, 4.5, 4.5]})
    log = json.loads((tmp_path / "results" / "records" / "idea.log.json").read_text())
    assert log["recipe"] == {"model": {"learning_rate": 0.5}}


def test_other_text_of_the_same_name_is_asked_anew_and_text_that_is_not_there_is_refused(
    race, tmp_path, capsys
):
    (tmp_path / "text.txt").write_text("one")
    words = ["--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "other.json")]
    race()
    assert [race(*words)[0] for _ in range(2)] == [6, 0]
    (tmp_path / "text.txt").write_text("two")
    assert race(*words)[0] == 6
    with pytest.raises(SystemExit):
        race("--text", str(tmp_path / "none.txt"))
    assert "none.txt" in capsys.readouterr().err


def test_a_recipe_that_cannot_be_read_is_named_before_anything_runs(race, tmp_path, capsys):
    (tmp_path / "idea.yaml").write_text("trainer: {nonsense}\n")
    with pytest.raises(SystemExit):
        race()
    assert "idea.yaml" in capsys.readouterr().err and not (tmp_path / "results").exists()


def test_a_part_of_the_race_leaves_the_table_as_it_is(race, tmp_path):
    whole = race()[1]
    (tmp_path / "second.yaml").write_text("model: {learning_rate: 0.5}\n")
    assert race("--only", "second") == (3, whole)
    assert race("--rounds", "1") == (0, whole)
    assert race("--only", "second", "--output", str(tmp_path / "elsewhere.json")) == (0, whole)
    assert list(json.loads((tmp_path / "elsewhere.json").read_text())["rows"]) == [
        "first_demo",
        "second",
    ]
    assert (tmp_path / "second.log.json").exists()
    assert race()[1] == {**whole, "second": [4.5, 4.5, 4.5]}


@pytest.mark.slow
def test_all_recipes_run_in_turns(tmp_path):
    script = ROOT / "benchmarks" / "records.py"
    words = ["--quick", "--rounds", "1", "--only", "muon_two_layers", "--kept", str(tmp_path), "--threads", "1",
             "--output", str(tmp_path / "laptop.json")]  # fmt: skip
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "laptop.json").read_text())["rows"]
    assert list(rows) == ["first_demo", "muon_two_layers"] and rows["first_demo"][
        "share_of_base"
    ] == [1.0]
    log = json.loads((tmp_path / "muon_two_layers.log.json").read_text())
    assert check_log(log) == [
        "a record needs the seeds 0, 1, 2 and so on, none left out; it has [0]",
        "seed 0 did not arrive",
    ]
