"The race runs, its recipes can be read, and the table says what the logs say."

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "benchmarks" / "records").glob("*.yaml"))
RESULTS = ROOT / "benchmarks" / "results" / "records"
LOGS = sorted(RESULTS.rglob("*.log.json"))

sys.path.insert(0, str(ROOT / "benchmarks"))
from speedrun import TRACKS, arrived, load_recipe, race_config, recipe_sha256  # noqa: E402


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def run(script: str, *words: str) -> str:
    command = [sys.executable, ROOT / "benchmarks" / script, *words, "--quick"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_makes_a_configuration(path, tmp_path):
    assert path.read_text(encoding="utf-8").startswith("# "), "the table shows the first line"
    config = race_config(TRACKS["laptop"], load_recipe(path), tmp_path, seed=1)
    phases = config["model"]["scheduler_warmup_steps"] + config["model"]["scheduler_cooldown_steps"]
    assert phases < config["trainer"]["max_steps"]


@pytest.mark.parametrize("text, name", [
    ("model: {objective: causal}", "model.objective"),
    ("run: {output: there}", "run.output"),
    ("modle: {learning_rate: 1}", "modle"),
])  # fmt: skip
def test_a_recipe_cannot_change_the_track(text, name, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match=name):
        load_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize("path", LOGS, ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_log_agrees_with_its_recipe_and_the_table(path):
    log, name = read(path), path.name.partition(".")[0]
    assert log["recipe"] == load_recipe(ROOT / "benchmarks" / "records" / f"{name}.yaml")
    assert recipe_sha256(log["recipe"]) == log["recipe_sha256"]
    row = read(path.with_name("laptop.json"))["rows"][name]
    assert row["losses"] == [attempt["validation_loss"] for attempt in log["attempts"]]
    seconds = [attempt["train_seconds"] for attempt in log["attempts"]]
    assert row["seconds"] == pytest.approx(seconds, abs=0.01)


def test_the_record_arrived_and_the_control_did_not():
    for record in ("muon_two_layers", "without_bfloat16/muon_wide_batch"):
        log = read(RESULTS / f"{record}.log.json")
        assert all(arrived(log, attempt) for attempt in log["attempts"])
    control = read(RESULTS / "first_demo_in_half.log.json")
    assert not any(arrived(control, attempt) for attempt in control["attempts"])


def test_a_quick_race_and_its_score(tmp_path):
    run("speedrun.py", "race", "--output", str(tmp_path / "race"))
    log = read(tmp_path / "race" / "log.json")
    assert [attempt["steps"] for attempt in log["attempts"]] == [2]
    scored = run("speedrun.py", "score", str(tmp_path / "race" / "seed-0"))
    assert f"{log['attempts'][0]['validation_loss']:.3f} nats" in scored


@pytest.mark.slow
def test_all_recipes_run_in_turns(tmp_path):
    run("records.py", "--rounds", "1", "--only", "muon_two_layers", "--kept", str(tmp_path), "--threads", "1",
        "--output", str(tmp_path / "laptop.json"))  # fmt: skip
    assert list(read(tmp_path / "laptop.json")["rows"]) == ["first_demo", "muon_two_layers"]
