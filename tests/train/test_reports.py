"The page that a run leaves: true numbers, every reason to stop, nothing of the machine's folders."

import csv
import json
import re

import pytest
from lightning.pytorch.callbacks import Callback, EarlyStopping
from test_training import word_tokenizer

from bertlab.explorers.training_monitor import TrainingMonitor
from bertlab.train import reports
from bertlab.train.checkpoints import TrainingInterrupted
from bertlab.train.history import History
from bertlab.data.module import PretrainingDataModule
from bertlab.train.stopping import NonFiniteGuard, SpikeGuard
from bertlab.train.modules import PretrainingModule
from bertlab.train.monitors import Throughput
from bertlab.train.reports import (
    RunReport, data_facts, environment, _final_metrics, is_finished, markdown_table, parameter_counts,
    _report_sections, stop_reason,
)  # fmt: skip
from bertlab.train.trainer import make_trainer, seed_everything

WORDS = "the cat sat on a mat and the dog ran to the door of a red house near the sea".split()
TEXTS = [" ".join(WORDS[i % 7 :] + WORDS[: i % 5]) for i in range(60)]
SHAPE = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=1,
             max_position_embeddings=64)  # fmt: skip


def parts(objective="mlm"):
    tokenizer = word_tokenizer(WORDS)
    data = PretrainingDataModule(
        None, tokenizer, objective, 32, train_batch_size=4, val_batch_size=4
    )
    data.set_datasets(TEXTS, TEXTS[:7])
    return PretrainingModule(SHAPE, None, tokenizer, objective, scheduler_warmup_steps=1), data


def run(directory, *extra, steps=4, objective="mlm"):
    module, data = parts(objective)
    seed_everything(0)
    history = History()
    trainer = make_trainer(
        steps,
        "32-true",
        val_check_steps=2,
        callbacks=[history, *extra, RunReport(directory, history, "model: {a: 1}")],
    )
    trainer.fit(module, data)
    return trainer, module, data


@pytest.mark.parametrize("objective", ["mlm", "diffusion"])
def test_a_report_has_a_section_for_each_question(tmp_path, objective):
    callbacks = [NonFiniteGuard(), SpikeGuard(), Throughput(1)]
    trainer, module, data = run(tmp_path, *callbacks, objective=objective)
    text = (tmp_path / "report.md").read_text()
    titles = "Result Curves Validation Model Data Cost Guards Environment Configuration".split()
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == titles
    total = sum(p.numel() for p in module.model.parameters())
    for words in ("model: {a: 1}", "| SpikeGuard | 0 |", environment()["torch"], "flops_per_token",
                  f"| total | {total:,} |", f"{len(data.train_dataset)} "):  # fmt: skip
        assert words in text
    assert text.count("\n| 2 |") == 1 and text.count("\n| 4 |") == 1  # a row for each validation
    assert str(tmp_path) not in text
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"report.md", "metrics.json", "history.csv", "loss.png"}


def test_metrics_are_written_last(tmp_path):
    (tmp_path / "metrics.json").mkdir()  # stands in the way
    with pytest.raises(OSError):
        run(tmp_path)
    assert {"report.md", "history.csv", "loss.png"} < {path.name for path in tmp_path.iterdir()}


def test_parts_of_a_model_add_up_to_it_whatever_the_objective():
    for objective in ("mlm", "enhanced_mlm", "diffusion"):
        module, _ = parts(objective)
        module.configure_model()
        counts = parameter_counts(module.model)
        total = counts.pop("total")
        assert total == sum(counts.values()) == sum(p.numel() for p in module.model.parameters())


def test_data_facts_count_documents_and_tokens_of_each_set():
    _, data = parts()
    data.setup()
    train, validation = data_facts(data)
    assert train["documents"] == 60 and validation["documents"] == 7
    assert train["tokens"] == sum(len(text.split()) for text in TEXTS)
    assert validation["tokens"] == sum(len(text.split()) for text in TEXTS[:7])


def test_a_report_names_the_device_of_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "describe_device", lambda device_type=None: f"the {device_type}")
    run(tmp_path)
    assert "| device | the cpu |" in (tmp_path / "report.md").read_text()
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    with open(tmp_path / "history.csv", newline="") as file:
        tokens = [float(row["tokens"]) for row in csv.DictReader(file)]
    assert tokens[-1] == metrics["tokens"] and metrics["devices"] == 1


def test_only_the_runs_own_validation_changes_its_report(tmp_path):
    trainer, module, data = run(tmp_path / "run")
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    _, second = parts()
    second.set_datasets(TEXTS, TEXTS[:3])
    trainer.validate(module, second, verbose=False)
    trainer.validate(
        module, data, ckpt_path=tmp_path / "last.ckpt", weights_only=True, verbose=False
    )
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    (tmp_path / "run" / "metrics.json").unlink()
    trainer.validate(module, data, verbose=False)
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["validated_step"] == 4


def test_a_run_on_loaders_is_validated_on_loaders(tmp_path):
    module, data = parts()
    data.setup()
    history = History()
    trainer = make_trainer(2, "32-true", callbacks=[history, RunReport(tmp_path, history)])
    trainer.fit(module, data.train_dataloader())
    assert "val_loss" not in json.loads((tmp_path / "metrics.json").read_text())
    metrics_now = trainer.validate(module, data.val_dataloader(), verbose=False)[0]
    assert json.loads((tmp_path / "metrics.json").read_text())["val_loss"] == pytest.approx(
        metrics_now["val_loss"]
    )


class Trouble(NonFiniteGuard):
    "Raises what it is given after the second step."

    def __init__(self, error):
        super().__init__()
        self.error = error

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            raise self.error


@pytest.mark.parametrize(
    "error, words",
    [(TrainingInterrupted(2), "by a signal"), (RuntimeError("secret/path"), "RuntimeError")],
)
def test_a_run_that_breaks_off_leaves_its_report(tmp_path, error, words):
    with pytest.raises(type(error)):
        run(tmp_path, Trouble(error))
    text = (tmp_path / "report.md").read_text()
    assert "Ended after step 2" in text and words in text and "secret" not in text
    assert words in json.loads((tmp_path / "metrics.json").read_text())["stopped"]


class Asks(Callback):
    "Asks the trainer to stop after the second step."

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step == 2


def test_the_callback_that_ended_a_run_is_named(tmp_path):
    trainer, _, _ = run(tmp_path, Asks(), steps=9)
    assert stop_reason(trainer) == "a callback stopped it" and trainer.global_step == 2
    trainer, _, _ = run(tmp_path, EarlyStopping("val_loss", min_delta=100.0, patience=1), steps=9)
    reason = stop_reason(trainer)  # older versions of Lightning say nothing
    assert trainer.global_step == 4 and (
        "a callback" in reason or "val_loss did not improve" in reason
    )
    monitor = TrainingMonitor()
    trainer, _, _ = run(tmp_path, monitor)
    assert stop_reason(trainer) == "its last step was reached" and monitor.reason is None
    monitor.reason = "its stop button was pressed"
    assert stop_reason(trainer) == monitor.reason


@pytest.mark.parametrize("metrics, full", [
    ({}, False), ({"steps": 3}, False), ({"steps": 4}, False), ({"steps": 4, "validated_step": 4}, True),
    ({"steps": 4, "validated_step": 2}, False), ({"steps": 4, "validated_step": None}, False),
    ({"steps": 4, "validated_step": 4, "stopped": "stopped by a signal, and saved"}, False),
    ({"steps": 4, "validated_step": 4, "stopped": "an error: OSError"}, False),
])  # fmt: skip
def test_a_run_is_finished_once_its_last_weights_are_validated(metrics, full):
    assert is_finished(metrics, 4, validates=True) is full
    if "validated_step" in metrics and "stopped" not in metrics:
        assert is_finished(metrics, 4, validates=False)


def test_validating_the_final_weights_updates_the_report(tmp_path):
    trainer, module, data = run(tmp_path, steps=3)  # validated after step 2, not after 3
    stale = json.loads((tmp_path / "metrics.json").read_text())
    metrics_now = trainer.validate(module, data, verbose=False)[0]
    fresh = json.loads((tmp_path / "metrics.json").read_text())
    assert fresh["val_loss"] == pytest.approx(metrics_now["val_loss"]) != stale["val_loss"]
    assert fresh["steps"] == stale["steps"] == 3 and (
        stale["validated_step"],
        fresh["validated_step"],
    ) == (2, 3)


def test_final_metrics_come_from_the_last_row():
    record = History()
    assert set(_final_metrics(record)) == {"peak_memory_bytes"}
    record.rows = [{"step": 2.0, "train_loss": 5.0, "tokens": 300, "seconds": 4.0}]
    record.validation = [{"step": 2, "val_loss": 5.5}]
    metrics = _final_metrics(record)
    assert (
        metrics["steps"],
        metrics["tokens"],
        metrics["tokens_per_second"],
        metrics["val_loss"],
    ) == (2, 300, 75, 5.5)
    assert _final_metrics(record, {"val_loss": 5.0})["val_loss"] == 5.0


def test_a_table_takes_rows_of_any_keys():
    assert markdown_table([]) == "none"
    rows = [{"a|": "x|y", "n": 1234567}, {"n": 0.00012345}, {"n": 1.5e9}]
    assert markdown_table(rows).splitlines() == [
        "| a| | n |", "| --- | --- |", r"| x\|y | 1,234,567 |", "|  | 0.0001234 |", "|  | 1.500e+09 |"
    ]  # fmt: skip


@pytest.mark.parametrize("count", [5, 1000])
def test_a_long_history_of_validations_is_thinned(tmp_path, count):
    trainer, module, _ = run(tmp_path)
    history = History()
    history.validation = [{"step": step, "val_loss": 1.0} for step in range(count)]
    table = _report_sections(trainer, module, {}, history, "")["Validation"].splitlines()[2:]
    steps = [int(line.split("|")[1].replace(",", "")) for line in table]
    assert len(steps) == min(count, 20) and steps[-1] == count - 1
    assert len({b - a for a, b in zip(steps, steps[1:])}) == 1


def test_frozen_weights_are_taken_off_the_total():
    module, _ = parts("mlm")
    module.configure_model()
    before = parameter_counts(module.model)
    frozen = [p for name, p in module.model.named_parameters() if "embeddings" in name]
    for weight in frozen:
        weight.requires_grad_(False)
    num_frozen = sum(p.numel() for p in frozen)
    total = before["total"] - num_frozen
    assert parameter_counts(module.model) == {**before, "frozen": -num_frozen, "total": total}
