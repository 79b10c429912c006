"A search of settings goes on after a kill; a mistake in its file costs nothing; averages and longer models on demand."

import copy
import math
import os
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from test_training import word_tokenizer

pytest.importorskip("optuna")

import bertlab.cli.tune as tuning  # noqa: E402
from bertlab.cli.adapt import average, lengthen  # noqa: E402
from bertlab.cli.main import main  # noqa: E402
from bertlab.cli.tune import PruningCallback, read_search, read_trials, tune  # noqa: E402
from bertlab.core.serialization import load_json  # noqa: E402
from bertlab.model.config import bert_tiny  # noqa: E402
from bertlab.model.heads import BertLabForMaskedLM  # noqa: E402
from bertlab.model.huggingface import save_model  # noqa: E402
from bertlab.train.checkpoints import TrainingInterrupted  # noqa: E402
from bertlab.train.history import History  # noqa: E402
from bertlab.train.modules import load_encoder  # noqa: E402

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


def test_what_validation_asks_for_is_no_range(plan):
    path, content = plan
    content["search"]["ranges"] = {"data.collator_kwargs.mlm_probability": [0.15, 0.3]}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match="mlm_probability.*validation.*does not compare"):
        read_search(path)


def test_the_search_in_configs_is_one_that_the_command_reads():
    search, content = read_search(ROOT / "configs" / "search.yaml")
    assert set(search.ranges) == {"model.learning_rate", "model.optimizer_class"}
    assert content["data"]["collator_kwargs"] == {"mlm_probability": 0.3}


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
        raise TrainingInterrupted(3, "its directory")

    monkeypatch.setattr(tuning, "run_trial", run_trial)
    words = ["tune", str(plan[0]), "--output", str(tmp_path / "search")]
    assert main(words) == 130
    assert f"bertlab {shlex.join(words)} --resume" in capsys.readouterr().out


def test_a_search_trains_and_ends_with_a_configuration_that_is_read(plan, tmp_path):
    from bertlab.cli.options import COMMANDS, load_yaml

    tune(str(plan[0]), str(tmp_path / "search"))
    assert len(read_trials(tmp_path / "search")) == 2
    config = COMMANDS["pretrain"].parse([], load_yaml(tmp_path / "search" / "best.yaml")).config
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
    ({"resume": ["a", "b"]}, "'resume' is no parameter"), ({3: [1, 2]}, "got 3"), ({"model.weight_decay": [None, 0.1]}, "ranges: model.weight_decay"),
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


def test_a_search_that_took_a_text_for_true_goes_on_once_its_file_says_so(
    plan, tmp_path, monkeypatch
):
    monkeypatch.setattr(tuning, "run_trial", lambda *_: (1.0, False))
    path, content = plan
    tune(str(path), str(tmp_path / "search"))
    marker, kept = tmp_path / "search" / "run.yaml", copy.deepcopy(content)
    kept["search"] |= {"prune": "no", "command": "pretrain", "metric": None, "seed": 0}
    kept["search"]["ranges"]["model.learning_rate"]["log"] = "yes"
    marker.write_text(yaml.safe_dump(kept))  # as an earlier version left it
    tune(str(path), str(tmp_path / "search"), trials=3, resume=True)
    assert len(read_trials(tmp_path / "search")) == 3


def failing(*errors):
    "What takes the place of `run_trial`: None is a trial that goes well. And what it was asked for."
    asked = []

    def run_trial(search, content, trial, output):
        asked.append(Path(output).name)
        if (error := errors[len(asked) - 1] if len(asked) <= len(errors) else None) is not None:
            raise error
        return 1.0, False

    return run_trial, asked


def test_a_trial_that_fails_leaves_its_reason_and_the_search_goes_on(plan, tmp_path, monkeypatch):
    errors = (
        None,
        ValueError("no batch\nis so large"),
        torch.OutOfMemoryError("CUDA out of memory"),
        None,
        ValueError("again"),
    )
    run_trial, asked = failing(*errors)
    monkeypatch.setattr(tuning, "run_trial", run_trial)
    table = tune(str(plan[0]), str(tmp_path / "search"), trials=2)
    assert [trial["state"] for trial in read_trials(tmp_path / "search")] == [
        "complete",
        "fail",
        "fail",
        "complete",
    ]
    assert [trial["reason"] for trial in read_trials(tmp_path / "search")][1:3] == [
        "no batch is so large",
        "CUDA out of memory",
    ]
    assert (
        "no batch is so large" in table
        and "out of memory" in (tmp_path / "search" / "trials.txt").read_text()
    )
    tune(str(plan[0]), str(tmp_path / "search"), trials=3, resume=True)
    assert asked == [f"trial-{number:03}" for number in range(6)]  # none of them twice


def test_a_failure_before_any_trial_came_to_its_end_ends_a_search(plan, tmp_path, monkeypatch):
    run_trial, asked = failing(ValueError("no such text"))
    monkeypatch.setattr(tuning, "run_trial", run_trial)
    with pytest.raises(ValueError, match="trial 0 has failed: no such text"):
        tune(str(plan[0]), str(tmp_path / "search"))
    assert "no such text" in (tmp_path / "search" / "trials.txt").read_text()
    tune(str(plan[0]), str(tmp_path / "search"), resume=True)
    assert asked == ["trial-000", "trial-001", "trial-002"]


def test_the_third_failure_in_a_row_ends_a_search_that_has_a_best(plan, tmp_path, monkeypatch):
    bad = ValueError("too large")
    run_trial, asked = failing(None, bad, bad, None, bad, bad, bad)
    monkeypatch.setattr(tuning, "run_trial", run_trial)
    with pytest.raises(ValueError, match="three trials in a row have failed: too large"):
        tune(str(plan[0]), str(tmp_path / "search"), trials=3)
    assert len(asked) == 7 and (tmp_path / "search" / "best.yaml").exists()
    tune(str(plan[0]), str(tmp_path / "search"), trials=3, resume=True)
    assert asked[7:] == ["trial-007"]


def test_a_search_of_before_its_values_were_tried_goes_on(plan, tmp_path, monkeypatch):
    path, content = plan
    content["search"]["ranges"]["model.weight_decay"] = [0.1, "lots"]
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match="lots"):
        tune(str(path), str(tmp_path / "search"))
    run_trial, asked = failing(None, KeyboardInterrupt(), ValueError("under way, and wrong"))
    monkeypatch.setattr(tuning, "run_trial", run_trial)
    with monkeypatch.context() as before:
        before.setattr(tuning, "check_values", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            tune(str(path), str(tmp_path / "search"))
    tune(str(path), str(tmp_path / "search"), resume=True)
    assert asked == ["trial-000", "trial-001", "trial-001", "trial-003"]


HEADS, WIDTH = (
    f"model.model_config_kwargs.{name}" for name in ("num_attention_heads", "hidden_size")
)


@pytest.mark.parametrize("ranges, word", [
    ({"model.optimizer_class": ["adamw", "adamww"]}, "adamww"), ({"model.weight_decay": [0.1, "lots"]}, "lots"),
    ({"data.train_batch_size": {"low": 8, "high": 32.5}}, "32.5"),
    ({"data.train_batch_size": {"low": 8.0, "high": 32.0}}, "train_batch_size.*whole low"),
    ({"data.train_batch_size": {"low": 1, "high": 8, "step": 16}}, "step beyond high"),
    ({HEADS: [1, 3]}, f"{HEADS} can never be 3"), ({HEADS: [3, 5]}, "no trial.*split into 3 heads"),
    ({"data.train_batch_size": {"low": 0, "high": 3}}, "train_batch_size can never be 0"),
])  # fmt: skip
def test_values_that_no_trial_can_have_are_refused_before_anything_is_written(
    ranges, word, plan, tmp_path
):
    path, content = plan
    path.write_text(
        yaml.safe_dump(
            {**content, "search": {"ranges": {"model.learning_rate": [1e-3, 1e-2], **ranges}}}
        )
    )
    with pytest.raises(ValueError, match=word):
        tune(str(path), str(tmp_path / "search"))
    assert not (tmp_path / "search").exists()


def test_a_value_that_is_right_with_some_of_the_others_is_searched(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "run_trial", lambda *_: (1.0, False))
    path, content = plan
    path.write_text(
        yaml.safe_dump(
            {**content, "search": {"trials": 2, "ranges": {WIDTH: [16, 48], HEADS: [1, 3]}}}
        )
    )
    tune(str(path), str(tmp_path / "search"))
    assert len(read_trials(tmp_path / "search")) == 2


@pytest.fixture
def finetuning_plan(plan, tmp_path):
    (tmp_path / "rows.csv").write_text(
        "text,label\n" + "\n".join(f"w{n % 30} w{n % 7},{n % 2}" for n in range(40))
    )
    content = {
        "model": {"model_config_kwargs": plan[1]["model"]["model_config_kwargs"]},
        "data": {"dataset_name_or_path": str(tmp_path / "rows.csv"), "pretrained_tokenizer_name_or_path": str(tmp_path / "tokenizer")},
        "trainer": {"accelerator": "cpu", "precision": "32-true"},
        "search": {"command": "finetune", "trials": 2, "ranges": {"model.learning_rate": [1e-3, 1e-2]}},
    }  # fmt: skip
    path = tmp_path / "finetuning.yaml"
    path.write_text(yaml.safe_dump(content))
    return path, content


@pytest.mark.parametrize("ranges, word", [
    ({HEADS: [1, 3]}, f"{HEADS} can never be 3"), ({"model.warmup_ratio": [0.1, 1.5]}, "warmup_ratio can never be 1.5"),
    ({"run.num_epochs": {"low": 0, "high": 3}}, "num_epochs can never be 0"),
])  # fmt: skip
def test_values_that_no_finetuning_can_have_are_refused_before_anything_is_written(
    ranges, word, finetuning_plan, tmp_path
):
    path, content = finetuning_plan
    path.write_text(yaml.safe_dump({**content, "search": {**content["search"], "ranges": ranges}}))
    with pytest.raises(ValueError, match=word):
        tune(str(path), str(tmp_path / "search"))
    assert not (tmp_path / "search").exists()


def test_a_metric_that_finetuning_does_not_have_is_refused_before_it_trains(
    finetuning_plan, tmp_path, monkeypatch
):
    path, content = finetuning_plan
    path.write_text(
        yaml.safe_dump({**content, "search": {**content["search"], "metric": "val_f1"}})
    )
    monkeypatch.setattr(tuning.FinetuningRun, "fit", lambda *_: pytest.fail("it was trained"))
    with pytest.raises(ValueError, match="'val_f1' is none of .*val_accuracy"):
        tune(str(path), str(tmp_path / "search"))


@pytest.mark.parametrize("metric", [None, "val_mcc"])
def test_a_metric_that_is_undefined_is_never_the_best(
    metric, finetuning_plan, tmp_path, monkeypatch
):
    "metrics.json has null for it."
    path, content = finetuning_plan
    path.write_text(yaml.safe_dump({**content, "search": {**content["search"], "metric": metric}}))
    found = iter([None, 0.25])
    monkeypatch.setattr(
        tuning.FinetuningRun,
        "fit",
        lambda *_: {"mean": dict.fromkeys(("val_accuracy", "val_mcc"), next(found))},
    )
    tune(str(path), str(tmp_path / "search"))
    assert [(trial["state"], trial["value"]) for trial in read_trials(tmp_path / "search")] == [
        ("pruned", None),
        ("complete", 0.25),
    ]


def told_of(search):
    "What each trial told optuna: by step, or by number of validation."
    journal = tuning._open_journal(search)
    return [
        trial.intermediate_values
        for trial in tuning._optuna().load_study(study_name="search", storage=journal).trials
    ]


@pytest.mark.parametrize("seeds", [[0], [3, 4]])
def test_a_finetuning_trial_that_is_behind_ends_early_and_its_other_seeds_are_not_run(
    seeds, finetuning_plan, tmp_path, monkeypatch
):
    path, content = finetuning_plan
    content["run"] = {"num_epochs": 3, "seeds": seeds, "baselines": False}
    content["search"]["ranges"]["data.train_batch_size"] = [
        8,
        16,
    ]  # other steps, the same number of validations
    path.write_text(yaml.safe_dump(content))
    monkeypatch.setattr(
        tuning._optuna().trial.Trial, "should_prune", lambda trial: trial.number == 1
    )
    tune(str(path), str(tmp_path / "search"))
    assert [trial["state"] for trial in read_trials(tmp_path / "search")] == ["complete", "pruned"]
    assert [list(told) for told in told_of(tmp_path / "search")] == [[1, 2, 3], [1]]
    of_runs = [
        load_json(tmp_path / "search" / f"trial-00{n}" / "metrics.json")["seeds"] for n in (0, 1)
    ]
    assert of_runs == [seeds, seeds[:1]]


def test_a_search_that_shall_not_prune_ends_no_trial(finetuning_plan, tmp_path, monkeypatch):
    path, content = finetuning_plan
    path.write_text(
        yaml.safe_dump(
            {
                **content,
                "run": {"baselines": False},
                "search": {**content["search"], "prune": False, "trials": 1},
            }
        )
    )
    monkeypatch.setattr(tuning._optuna().trial.Trial, "should_prune", lambda _: True)
    tune(str(path), str(tmp_path / "search"))
    assert [trial["state"] for trial in read_trials(tmp_path / "search")] == ["complete"]
    assert [list(told) for told in told_of(tmp_path / "search")] == [[1, 2, 3]]


class Told:
    "As much of a trial of optuna as is told something."

    def __init__(self, **user_attrs):
        self.user_attrs, self.values = user_attrs, {}

    def report(self, value, step):
        self.values[step] = value

    def should_prune(self):
        return False

    def set_user_attr(self, name, value):
        self.user_attrs[name] = value


def validated(watch, *found):
    "Have a run whose validations were these, and one before its first step, tell the trial; whether it shall stop."
    history = History()
    history.validation += [
        {"step": 0, "val_loss": 0.1},
        *({"step": 10 * n, **values} for n, values in enumerate(found, 1)),
    ]
    trainer = SimpleNamespace(state=SimpleNamespace(fn="fit"), sanity_checking=False, callbacks=[history], should_stop=False,
                              callback_metrics=found[-1])  # fmt: skip
    watch.on_validation_end(trainer, None)
    return trainer.should_stop


def test_a_metric_that_is_undefined_for_now_is_not_told_while_the_loss_is_a_number():
    found = (
        {"val_mcc": math.nan, "val_loss": 0.5},
        {"val_mcc": 0.25, "val_loss": 0.5},
        {"val_mcc": math.nan, "val_loss": math.nan},
    )
    trial = Told()
    validated(PruningCallback(trial, "val_mcc", True), *found)
    assert list(trial.values) == [20, 30] and trial.values[20] == 0.25


def test_a_trial_that_goes_on_after_a_kill_tells_what_it_had_told_and_stays_ended():
    found = [{"val_loss": loss} for loss in (3.0, 2.0, 1.0)]
    trial = Told()
    watch = PruningCallback(trial, "val_loss", True, by_number=True)
    assert not validated(watch, *found[:2]) and trial.values == {1: 3.0, 2: 2.0}
    assert not validated(watch, *found) and trial.values == {1: 3.0, 2: 2.0, 3: 1.0}
    watch = PruningCallback(Told(pruned=True), "val_loss", True)
    assert watch.pruned and validated(watch, *found) and "ended this trial early" in watch.reason


def test_a_search_remembers_that_the_trial_under_way_was_to_be_ended(plan, tmp_path, monkeypatch):
    asked = []

    def run_trial(search, content, trial, output):
        asked.append(trial.user_attrs.get("pruned"))
        trial.set_user_attr("pruned", True)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return 1.0, False

    monkeypatch.setattr(tuning, "run_trial", run_trial)
    with pytest.raises(KeyboardInterrupt):
        tune(str(plan[0]), str(tmp_path / "search"))
    tune(str(plan[0]), str(tmp_path / "search"), resume=True)
    assert asked == [None, True, None]


@pytest.mark.parametrize("change, word", [
    ({"search": {"metric": "train_loss"}}, "'train_loss' is none of .*val_loss"), ({"trainer": {"limit_val_batches": 0}}, "validation"),
])  # fmt: skip
def test_a_search_by_what_no_validation_says_ends_with_its_first_trial(
    change, word, plan, tmp_path
):
    path, content = plan
    for part, options in change.items():
        content[part] |= options
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=word):
        tune(str(path), str(tmp_path / "search"))


def test_the_loss_of_one_of_several_validation_sets_is_the_better_the_less(
    plan, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        tuning, "run_trial", lambda search, content, trial, output: (float(trial.number), False)
    )
    path, content = plan
    path.write_text(
        yaml.safe_dump({**content, "search": {**content["search"], "metric": "val_loss_1"}})
    )
    assert tune(str(path), str(tmp_path / "search")).splitlines()[1].startswith("0 ")


def test_a_search_that_was_killed_while_it_wrote_goes_on(plan, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # a lock that names a place from here says nothing from elsewhere
    monkeypatch.setattr(tuning, "run_trial", lambda *_: (1.0, False))
    tune(str(plan[0]), "search")
    with open("search/study.log", "a") as file:
        file.write('{"op_code": 4, "wor')
    os.symlink("search/study.log", "search/study.log.lock")
    assert len(read_trials("search")) == 2
    tune(str(plan[0]), "search", trials=3, resume=True)
    assert [trial["state"] for trial in read_trials("search")] == ["complete"] * 3
    assert "study.log: its last entry was not whole" in capsys.readouterr().out


def test_a_journal_that_is_damaged_in_its_middle_is_named_with_the_line(
    plan, tmp_path, monkeypatch
):
    monkeypatch.setattr(tuning, "run_trial", lambda *_: (1.0, False))
    tune(str(plan[0]), str(tmp_path / "search"))
    lines = (tmp_path / "search" / "study.log").read_text().splitlines(True)
    (tmp_path / "search" / "study.log").write_text(
        "".join([*lines[:3], '{"op_code": 4, "wor', *lines[3:]])
    )
    for work in (
        lambda: read_trials(tmp_path / "search"),
        lambda: tune(str(plan[0]), str(tmp_path / "search"), resume=True),
    ):
        with pytest.raises(ValueError, match="study.log is damaged in line 4"):
            work()


def test_a_search_whose_journal_was_cut_does_not_go_on_with_a_run_of_other_settings(
    plan, tmp_path, monkeypatch
):
    asked = []

    def run_trial(search, content, trial, output):
        asked.append(output.name)
        output.mkdir()
        return 1.0, False

    monkeypatch.setattr(tuning, "run_trial", run_trial)
    tune(str(plan[0]), str(tmp_path / "search"))
    (tmp_path / "search" / "study.log").unlink()
    tune(str(plan[0]), str(tmp_path / "search"), resume=True)
    assert asked == ["trial-000", "trial-001", "trial-000-1", "trial-001-1"]


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
        model = BertLabForMaskedLM(
            bert_tiny(vocab_size=40, num_hidden_layers=1, max_position_embeddings=16)
        )
        save_model(model, None, tmp_path / f"{seed}")
    average([str(tmp_path / "0"), str(tmp_path / "1")], str(tmp_path / "mean"))
    tables = [
        load_encoder(tmp_path / name).get_input_embeddings().weight for name in ("0", "1", "mean")
    ]
    torch.testing.assert_close(tables[2], (tables[0] + tables[1]) / 2)
    lengthen(str(tmp_path / "mean"), 40, output=str(tmp_path / "longer"))
    assert load_encoder(tmp_path / "longer").config.max_position_embeddings == 40
    for work in (lambda: average([str(tmp_path / "0")], str(tmp_path / "x")),
                 lambda: average([str(tmp_path / "0"), str(tmp_path / "1")], str(tmp_path / "mean")),
                 lambda: average([str(tmp_path / "0"), str(tmp_path / "1")], str(tmp_path / "x"), "greedy"),
                 lambda: lengthen(str(tmp_path / "0"), 8, output=str(tmp_path / "x"))):  # fmt: skip
        with pytest.raises(ValueError):
            work()


@pytest.mark.parametrize(
    "name, values",
    [("run.vocab_size", [64, 128]), ("model.pretrained_model_name_or_path", ["a", "b"])],
)
def test_vocabularies_are_searched_by_what_compares_over_them(name, values, plan):
    path, content = plan
    content["search"]["ranges"] = {name: values}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=f"{name} changes what a token is.*val_bits_per_byte"):
        read_search(path)
    content["search"]["metric"] = "val_bits_per_byte"
    path.write_text(yaml.safe_dump(content))
    assert set(read_search(path)[0].ranges) == {name}
    content["search"]["ranges"] = {"model.plain_mean": [True, False]}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match="plain_mean"):
        read_search(path)


def test_a_search_over_several_processes_is_refused_before_anything_is_written(
    plan, tmp_path, monkeypatch
):
    path, content = plan
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "RANK": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="runs its trials in one process, and 2 are asked for"):
        tune(str(path), str(tmp_path / "search"))
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name)
    content["trainer"]["devices"] = 2
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match="leave out trainer.devices"):
        tune(str(path), str(tmp_path / "search"))
    assert not (tmp_path / "search").exists()


def test_the_model_of_the_last_step_is_ranked_by_the_validation_behind_it(plan, tmp_path):
    path, content = plan
    del content["search"]
    content["run"] |= {"models": True, "val_every_steps": 3, "output": str(tmp_path / "run")}
    content["trainer"]["max_steps"] = 5
    content["model"]["learning_rate"] = 3e-2
    path.write_text(yaml.safe_dump(content))
    assert main(["pretrain", "--config", str(path)]) == 0
    markers = {
        one.name: load_json(one / "bertlab-model.json")["value"]
        for one in (tmp_path / "run" / "models").glob("step-*")
    }
    assert markers["step-00000005"] is not None
    best = min(markers, key=markers.get)
    assert (tmp_path / "run" / "models" / "best").resolve().name == best
