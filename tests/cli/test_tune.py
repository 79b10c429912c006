"A search of settings goes on after a kill; a mistake in its file costs nothing."

import json
import math
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from test_training import word_tokenizer

pytest.importorskip("optuna")

import bertlab.cli.tune as tuning  # noqa: E402
from bertlab.cli.main import main  # noqa: E402
from bertlab.cli.tune import read_search, read_trials, tune  # noqa: E402
from bertlab.core.serialization import load_json  # noqa: E402
from bertlab.train.checkpoints import TrainingInterrupted  # noqa: E402

ROOT = Path(__file__).parents[2]
WORDS = [f"w{i}" for i in range(30)]


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "text.txt").write_text(
        "\n".join(" ".join(WORDS[(s + i) % 30] for i in range(12)) for s in range(120))
    )
    word_tokenizer(WORDS).save_pretrained(tmp_path / "tokenizer")
    content = {
        "model": {"model_config_kwargs": dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                              num_attention_heads=1, max_position_embeddings=32)},
        "data": {"train_dataset_name_or_path": str(tmp_path / "text.txt"), "max_sequence_length": 32,
                 "train_batch_size": 4, "pretrained_tokenizer_name_or_path": str(tmp_path / "tokenizer")},
        "trainer": {"max_steps": 4, "accelerator": "cpu", "precision": "32-true"},
        "run": {"val_every_steps": 2, "models": False, "measure_every_steps": 0, "report": False},
        "search": {"trials": 2, "ranges": {"model.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True},
                                           "model.optimizer_class": ["adamw", "lion"]}},
    }  # fmt: skip
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(content))
    return path, content


def test_the_search_in_configs_is_one_that_the_command_reads():
    search, content = read_search(ROOT / "bertlab/configs" / "search.yaml")
    assert set(search.ranges) == {"model.learning_rate", "model.optimizer_class"}
    assert content["data"]["collator_kwargs"] == {"mlm_probability": 0.3}


def test_a_search_ends_with_a_configuration_that_is_read(plan, tmp_path):
    from called import config_of

    from bertlab.core.serialization import load_yaml

    tune(str(plan[0]), str(tmp_path / "search"))
    assert len(read_trials(tmp_path / "search")) == 2
    config = config_of("pretrain", [], load_yaml(tmp_path / "search" / "best.yaml"))
    assert config["model"]["model_config_kwargs"]["hidden_size"] == 16


WRONG = [
    ({"ranges": {}}, "ranges"),
    ({"ranges": {"model.learning_rat": [1, 2]}}, "learning_rate"),
    ({"ranges": {"model.learning_rate": {"low": 2, "high": 1}}}, "low"),
    ({"ranges": {"model.learning_rate": {"low": 0, "high": 1, "log": True}}}, "log"),
    ({"ranges": {"model.learning_rate": {"low": 0.1, "high": 0.2, "step": 0}}}, "step"),
    ({"ranges": {"model.learning_rate": {"low": 0, "hihg": 1}}}, "high"),
    ({"ranges": {"data.train_batch_size": {"low": 8, "high": 32.5}}}, "train_batch_size"),
    ({"ranges": {"data.collator_kwargs.mlm_probability": [0.15, 0.3]}}, "mlm_probability"),
    ({"ranges": {"run.output": ["a", "b"]}}, "run.output"),
    ({"ranges": {"resume": ["a", "b"]}}, "resume"),
    ({"trials": 0}, "trials=0"),
    ({"trials": "many"}, "many"),
    ({"seed": -1}, "seed=-1"),
    ({"command": "distill"}, "distill"),
    ({"metrics": "val_loss"}, "metric"),
]


@pytest.mark.parametrize("change, part", WRONG)
def test_a_wrong_search_is_refused(change, part, plan, tmp_path, capsys):
    path, content = plan
    path.write_text(yaml.safe_dump({**content, "search": {**content["search"], **change}}))
    assert main(["tune", str(path), "--output", str(tmp_path / "search")]) == 2
    assert part in capsys.readouterr().err and not (tmp_path / "search").exists()


def failing(*errors):
    "A trial in place of the true one, which fails as it is told to."
    seen, queue = [], list(errors)

    def run_trial(search, config, trial):
        seen.append(Path(config["run"]["output"]).name)
        error = queue.pop(0) if queue else None
        if error is not None:
            raise error
        return trial.params["model.learning_rate"], False

    return run_trial, seen


def test_a_killed_search_repeats_the_interrupted_trial(plan, tmp_path, monkeypatch):
    run_trial, seen = failing(None, KeyboardInterrupt())
    monkeypatch.setattr(tuning, "run_trial", run_trial)
    with pytest.raises(KeyboardInterrupt):
        tune(str(plan[0]), str(tmp_path / "search"))
    params = read_trials(tmp_path / "search")[1]["params"]
    tune(str(plan[0]), str(tmp_path / "search"), resume=True)
    trials = read_trials(tmp_path / "search")
    assert [trial["state"] for trial in trials] == ["complete", "fail", "complete"]
    assert trials[2]["params"] == params and seen == ["trial-000", "trial-001", "trial-001"]


def test_a_stopped_search_says_how_to_continue(plan, tmp_path, monkeypatch, capsys):
    run_trial, _ = failing(None, TrainingInterrupted(3, "there"))
    monkeypatch.setattr(tuning, "run_trial", run_trial)
    words = ["tune", str(plan[0]), "--output", str(tmp_path / "search")]
    assert main(words) == 130
    assert f"bertlab {shlex.join(words)} --resume" in capsys.readouterr().err


def test_a_failed_trial_leaves_its_reason(plan, tmp_path, monkeypatch):
    errors = None, ValueError("no batch is so large"), torch.OutOfMemoryError("no memory"), None
    run_trial, seen = failing(*errors)
    monkeypatch.setattr(tuning, "run_trial", run_trial)
    table = tune(str(plan[0]), str(tmp_path / "search"))
    trials = read_trials(tmp_path / "search")
    assert [trial["state"] for trial in trials] == ["complete", "fail", "fail", "complete"]
    assert [trial["reason"] for trial in trials][1:3] == ["no batch is so large", "no memory"]
    assert "no batch is so large" in table and len(set(seen)) == 4


@pytest.mark.parametrize(
    "errors", [[ValueError("no text")], [None, *[ValueError("too large")] * 3]]
)
def test_failures_end_a_search(errors, plan, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "run_trial", failing(*errors)[0])
    with pytest.raises(ValueError, match=str(errors[-1])):
        tune(str(plan[0]), str(tmp_path / "search"), trials=9)


def test_another_file_does_not_resume_a_search(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "run_trial", failing()[0])
    path, content = plan
    tune(str(path), str(tmp_path / "search"))
    content["trainer"]["max_steps"] = 8
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match="plan.yaml"):
        tune(str(path), str(tmp_path / "search"), trials=3, resume=True)


def test_a_pruned_trial_ends_early(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(
        tuning._optuna().trial.Trial, "should_prune", lambda trial: trial.number == 1
    )
    tune(str(plan[0]), str(tmp_path / "search"))
    trials = read_trials(tmp_path / "search")
    assert [trial["state"] for trial in trials] == ["complete", "pruned"]


@pytest.mark.parametrize("metric, direction", [("val_loss", "minimize"), ("val_loss_1", "minimize"),
                                               ("val_bits_per_byte", "minimize"), ("val_accuracy", "maximize")])  # fmt: skip
def test_the_direction_follows_the_metric(metric, direction):
    assert tuning._direction_of(metric) == direction


def test_an_undefined_metric_is_not_the_best(plan, tmp_path, monkeypatch):
    values = iter([math.nan, 0.25])
    monkeypatch.setattr(tuning, "run_trial", lambda *_: (next(values), False))
    tune(str(plan[0]), str(tmp_path / "search"))
    trials = [(trial["state"], trial["value"]) for trial in read_trials(tmp_path / "search")]
    assert trials == [("pruned", None), ("complete", 0.25)]


def test_the_last_model_is_ranked_by_its_validation(plan, tmp_path):
    path, content = plan
    del content["search"]
    content["run"] |= {
        "models": True,
        "report": True,
        "val_every_steps": 3,
        "output": str(tmp_path / "run"),
    }
    content["trainer"]["max_steps"] = 5
    content["model"]["learning_rate"] = 3e-2
    path.write_text(yaml.safe_dump(content))
    assert main(["pretrain", "--config", str(path)]) == 0
    history = (tmp_path / "run" / "metrics.json").read_text()
    state = load_json(tmp_path / "run" / "models" / "best" / "trainer_state.json")
    assert state["best_metric"] <= json.loads(history)["val_loss"] + 1e-6
