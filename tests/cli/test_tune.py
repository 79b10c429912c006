"A search of settings goes on after a kill; a mistake in its file costs nothing; averages and longer models on demand."

import copy
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from test_training import word_tokenizer

pytest.importorskip("optuna")

import bertlab.cli.tune as tuning  # noqa: E402
from bertlab.cli.adapt import average, lengthen  # noqa: E402
from bertlab.cli.main import main  # noqa: E402
from bertlab.cli.tune import read_search, read_trials, tune  # noqa: E402
from bertlab.model.config import bert_tiny  # noqa: E402
from bertlab.model.heads import BertLabForMaskedLM  # noqa: E402
from bertlab.model.huggingface import save_model  # noqa: E402
from bertlab.train.checkpoints import RunInterrupted  # noqa: E402
from bertlab.train.modules import load_encoder  # noqa: E402

WORDS = [f"w{i}" for i in range(30)]


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(" ".join(WORDS[(s + i) % 30] for i in range(12)) for s in range(120)))
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


def test_a_killed_search_asks_again_for_the_trial_that_was_under_way(plan, tmp_path, monkeypatch):
    "The values are made up here: what is searched stands in other tests."
    asked = []

    def run_trial(search, content, trial, output):
        asked.append((Path(output).name, dict(trial.params)))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return trial.params["model.learning_rate"], False

    monkeypatch.setattr(tuning, "run_trial", run_trial)
    with pytest.raises(KeyboardInterrupt):
        tune(str(plan[0]), str(tmp_path / "search"), trials=3)
    assert [trial["state"] for trial in read_trials(tmp_path / "search")] == ["complete", "running"]
    table = tune(str(plan[0]), str(tmp_path / "search"), trials=3, resume=True)
    assert asked[1] == asked[2] and len(asked) == 4  # the same directory, the same settings
    best = yaml.safe_load((tmp_path / "search" / "best.yaml").read_text())
    lowest = min(params["model.learning_rate"] for _, params in asked)
    assert best["model"]["learning_rate"] == pytest.approx(lowest) and table.count("complete") == 3


def test_a_search_that_a_signal_stops_says_how_to_go_on(plan, tmp_path, monkeypatch, capsys):
    def run_trial(*_):
        raise RunInterrupted(3, "its directory")

    monkeypatch.setattr(tuning, "run_trial", run_trial)
    words = ["tune", str(plan[0]), "--output", str(tmp_path / "search")]
    assert main(words) == 130
    assert f"bertlab {shlex.join(words)} --resume" in capsys.readouterr().out


def test_a_search_trains_and_ends_with_a_configuration_that_is_read(plan, tmp_path):
    from bertlab.cli.options import COMMANDS, read_yaml

    tune(str(plan[0]), str(tmp_path / "search"))
    assert len(read_trials(tmp_path / "search")) == 2
    config = COMMANDS["pretrain"].parse([], read_yaml(tmp_path / "search" / "best.yaml")).config
    assert config["model"]["model_config_kwargs"]["hidden_size"] == 16


@pytest.mark.parametrize("ranges, word", [
    ({}, "ranges"), ({"model.learning_rat": [1, 2]}, "learning_rate"), ({"model.learning_rate": [1.0]}, "two"),
    ({"model.learning_rate": {"low": 2, "high": 1}}, "low"),
    ({"model.learning_rate": {"low": 0, "high": 1, "log": True}}, "log"),
    ({"model.learning_rate": {"low": 0.1, "high": 0.2, "log": "no"}}, "log must be true or false.*'no'"),
    ({"model.learning_rate": {"low": 0.1, "high": 0.2, "step": 0}}, "step must be a number above 0"),
    ({"model.learning_rate": {"low": 0.1, "high": 0.2, "step": "a"}}, "step must be a number above 0"),
    ({"data.train_batch_size": {"low": 1, "high": 8, "step": 0.5}}, "step must be whole"),
    ({"model.learning_rate": {"low": 0, "hihg": 1}}, "high"), ({"run.output": ["a", "b"]}, "run.output"),
])  # fmt: skip
def test_ranges_that_cannot_be_are_refused(ranges, word, plan):
    path, content = plan
    path.write_text(yaml.safe_dump({**content, "search": {"ranges": ranges}}))
    with pytest.raises(ValueError, match=word):
        read_search(path)


@pytest.mark.parametrize("said", [
    {"metric": 3}, {"metric": ""}, {"seed": "x"}, {"seed": -1}, {"seed": 0.5}, {"prune": "no"}, {"trials": 0}, {"trials": True},
])  # fmt: skip
def test_a_search_with_a_setting_of_another_kind_is_refused(said, plan):
    path, content = plan
    path.write_text(yaml.safe_dump({**content, "search": {**content["search"], **said}}))
    with pytest.raises(ValueError, match=f"search.{next(iter(said))} must be"):
        read_search(path)


@pytest.mark.parametrize("trials", [0, -3, 1.5])
def test_trials_below_one_are_refused_before_anything_is_written(trials, plan, tmp_path):
    with pytest.raises(ValueError, match=f"trials must be 1 or more, got {trials}"):
        tune(str(plan[0]), str(tmp_path / "search"), trials=trials)
    assert not (tmp_path / "search").exists()


def test_a_search_that_took_a_text_for_true_goes_on_once_its_file_says_so(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "run_trial", lambda *_: (1.0, False))
    path, content = plan
    tune(str(path), str(tmp_path / "search"))
    marker, kept = tmp_path / "search" / "run.yaml", copy.deepcopy(content)
    kept["search"] |= {"prune": "no", "command": "pretrain", "metric": None, "seed": 0}
    kept["search"]["ranges"]["model.learning_rate"]["log"] = "yes"
    marker.write_text(yaml.safe_dump(kept))  # as an earlier version left it
    tune(str(path), str(tmp_path / "search"), trials=3, resume=True)
    assert len(read_trials(tmp_path / "search")) == 3


def test_another_file_does_not_go_on_with_a_search(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "run_trial", lambda *_: (1.0, False))
    path, content = plan
    tune(str(path), str(tmp_path / "search"))
    content["trainer"]["max_steps"] = 5
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match="trainer"):
        tune(str(path), str(tmp_path / "search"), trials=3, resume=True)


def test_models_are_averaged_and_lengthened_by_command(tmp_path):
    for seed in range(2):
        torch.manual_seed(seed)
        model = BertLabForMaskedLM(bert_tiny(vocab_size=40, num_hidden_layers=1, max_position_embeddings=16))
        save_model(model, None, tmp_path / f"{seed}")
    average([str(tmp_path / "0"), str(tmp_path / "1")], str(tmp_path / "mean"))
    tables = [load_encoder(tmp_path / name).get_input_embeddings().weight for name in ("0", "1", "mean")]
    torch.testing.assert_close(tables[2], (tables[0] + tables[1]) / 2)
    lengthen(str(tmp_path / "mean"), 40, output=str(tmp_path / "longer"))
    assert load_encoder(tmp_path / "longer").config.max_position_embeddings == 40
    for work in (lambda: average([str(tmp_path / "0")], str(tmp_path / "x")),
                 lambda: average([str(tmp_path / "0"), str(tmp_path / "1")], str(tmp_path / "mean")),
                 lambda: average([str(tmp_path / "0"), str(tmp_path / "1")], str(tmp_path / "x"), "greedy"),
                 lambda: lengthen(str(tmp_path / "0"), 8, output=str(tmp_path / "x"))):  # fmt: skip
        with pytest.raises(ValueError):
            work()
