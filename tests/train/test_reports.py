"The page that a run leaves: true numbers, every reason to stop, nothing of the machine's folders."

import csv
import json
from types import SimpleNamespace

import numpy as np
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
from bertlab.train.reports import (
    RunReport, cost_facts, data_facts, environment, final_metrics, is_finished, markdown_table, parameter_counts,
    report_sections, stop_reason,
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


def run(directory, *more, steps=4, objective="mlm"):
    module, data = parts(objective)
    seed_everything(0)
    history = History()
    trainer = make_trainer(
        steps,
        "32-true",
        val_check_steps=2,
        callbacks=[history, *more, RunReport(directory, history, "model: {a: 1}")],
    )
    trainer.fit(module, data)
    return trainer, module, data


@pytest.mark.parametrize("objective", ["mlm", "diffusion"])
def test_a_report_holds_configuration_data_model_cost_validation_guards_and_numbers(
    tmp_path, objective
):
    trainer, module, data = run(tmp_path, NonFiniteGuard(), SpikeGuard(), objective=objective)
    text = (tmp_path / "report.md").read_text()
    for title in (
        "Result",
        "Curves",
        "Validation",
        "Model",
        "Data",
        "Cost",
        "Guards",
        "Environment",
        "Configuration",
    ):
        assert f"\n## {title}\n" in text
    assert (
        "model: {a: 1}" in text and "| SpikeGuard | 0 |" in text and environment()["torch"] in text
    )
    total = sum(p.numel() for p in module.model.parameters())
    assert f"| total | {total:,} |" in text
    assert "flops_per_token" in text and f"{len(data.train_dataset)} " in text
    assert text.count("\n| 2 |") == 1 and text.count("\n| 4 |") == 1  # a row for each validation
    assert str(tmp_path) not in text
    assert {p.name for p in tmp_path.iterdir()} == {
        "report.md",
        "metrics.json",
        "history.csv",
        "loss.png",
    }


def test_the_file_by_which_a_run_counts_as_written_comes_last(tmp_path):
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


def test_the_context_of_a_token_is_the_length_of_its_own_document():
    module, data = parts()
    data.set_datasets(["the cat", "the cat sat on a mat"], ["the cat"])
    data.setup()
    batch = next(iter(data.val_dataloader()))
    facts = cost_facts(module, data.train_dataset, batch)
    # 4 and 8 positions with [CLS] and [SEP]: (4 * 4 + 8 * 8) / 12.
    assert facts["mean_context"] == pytest.approx(80 / 12)
    labels = (batch["labels"] != -100).sum() / (batch["attention_mask"] > 0).sum()
    assert facts["label_rate"] == pytest.approx(float(labels))


def test_data_facts_count_documents_and_tokens_of_each_set():
    _, data = parts()
    data.setup()
    train, validation = data_facts(data)
    assert train["documents"] == 60 and validation["documents"] == 7
    assert train["tokens"] == sum(len(text.split()) for text in TEXTS)
    assert validation["tokens"] == sum(len(text.split()) for text in TEXTS[:7])


def test_a_stream_has_a_row_that_counts_nothing():
    _, data = parts()
    data.setup()
    stream = SimpleNamespace(streaming=True, train_dataset=iter(()), val_datasets=data.val_datasets)
    train, validation = data_facts(stream)
    assert (
        train["set"] == "train" and "stream" in train["documents"] and validation["documents"] == 7
    )


def test_a_report_names_the_device_of_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "describe_device", lambda device_type=None: f"the {device_type}")
    run(tmp_path)
    assert "| device | the cpu |" in (tmp_path / "report.md").read_text()
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    with open(tmp_path / "history.csv", newline="") as file:
        tokens = [float(row["tokens"]) for row in csv.DictReader(file)]
    assert tokens[-1] == metrics["tokens"] and metrics["devices"] == 1


@pytest.mark.parametrize("objective, plain, unit", [
    ("mlm", False, "nats per masked token"), ("diffusion", False, "nats per token that may be masked"),
    ("diffusion", True, "nats per masked token")])  # fmt: skip
def test_the_picture_of_the_loss_says_what_it_is_divided_by(
    tmp_path, monkeypatch, objective, plain, unit
):
    drawn, draw = [], reports.plot_loss
    monkeypatch.setattr(
        reports,
        "plot_loss",
        lambda *given, **options: drawn.append(draw(*given, **options)) or drawn[-1],
    )
    trainer, module, _ = run(tmp_path, objective=objective)
    module.hparams["plain_mean"] = plain
    trainer.callbacks[1].write(trainer, module)
    assert drawn[-1].axes[0].get_ylabel() == f"loss ({unit})"


def test_a_validation_on_another_text_or_of_a_checkpoint_is_in_no_report_of_the_run(tmp_path):
    trainer, module, data = run(tmp_path / "run")
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    _, other = parts()
    other.set_datasets(TEXTS, TEXTS[:3])
    trainer.validate(module, other, verbose=False)
    trainer.validate(module, other.val_dataloader(), verbose=False)
    assert trainer.datamodule is other
    trainer.validate(
        module, data, ckpt_path=tmp_path / "last.ckpt", weights_only=True, verbose=False
    )
    trainer.validate(module, other.val_dataloader(), verbose=False)
    assert trainer.datamodule is data, "Lightning leaves it where loaders are given"
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
    found = trainer.validate(module, data.val_dataloader(), verbose=False)[0]
    assert json.loads((tmp_path / "metrics.json").read_text())["val_loss"] == pytest.approx(
        found["val_loss"]
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
def test_a_run_that_breaks_off_still_leaves_its_report_and_says_why(tmp_path, error, words):
    with pytest.raises(type(error)):
        run(tmp_path, Trouble(error))
    text = (tmp_path / "report.md").read_text()
    assert "Ended after step 2" in text and words in text and "secret" not in text
    assert words in json.loads((tmp_path / "metrics.json").read_text())["stopped"]


class Asks(Callback):
    "Asks the trainer to stop after the second step."

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step == 2


def test_a_callback_that_asked_for_the_end_is_named_or_at_least_known(tmp_path):
    trainer, _, _ = run(tmp_path, Asks(), steps=9)
    assert stop_reason(trainer) == "a callback stopped it" and trainer.global_step == 2
    trainer, _, _ = run(tmp_path, EarlyStopping("val_loss", min_delta=100.0, patience=1), steps=9)
    said = stop_reason(trainer)  # older versions of Lightning say nothing
    assert trainer.global_step == 4 and ("a callback" in said or "val_loss did not improve" in said)
    monitor = TrainingMonitor()
    trainer, _, _ = run(tmp_path, monitor)
    assert stop_reason(trainer) == "its last step was reached" and monitor.reason is None
    monitor.reason = "its stop button was pressed"
    assert stop_reason(trainer) == monitor.reason


@pytest.mark.parametrize("metrics, whole", [
    ({}, False), ({"steps": 3}, False), ({"steps": 4}, False), ({"steps": 4, "validated_step": 4}, True),
    ({"steps": 4, "validated_step": 2}, False), ({"steps": 4, "validated_step": None}, False),
    ({"steps": 4, "validated_step": 4, "stopped": "stopped by a signal, and saved"}, False),
    ({"steps": 4, "validated_step": 4, "stopped": "an error: OSError"}, False),
])  # fmt: skip
def test_a_run_is_whole_where_its_last_weights_were_validated_and_nothing_broke_it_off(
    metrics, whole
):
    assert is_finished(metrics, 4, validates=True) is whole
    if "validated_step" in metrics and "stopped" not in metrics:
        assert is_finished(metrics, 4, validates=False)


def test_validating_the_final_weights_updates_the_report_and_nothing_else_does(tmp_path):
    trainer, module, data = run(tmp_path, steps=3)  # validated after step 2, not after 3
    stale = json.loads((tmp_path / "metrics.json").read_text())
    found = trainer.validate(module, data, verbose=False)[0]
    fresh = json.loads((tmp_path / "metrics.json").read_text())
    assert fresh["val_loss"] == pytest.approx(found["val_loss"]) != stale["val_loss"]
    assert fresh["steps"] == stale["steps"] == 3 and (
        stale["validated_step"],
        fresh["validated_step"],
    ) == (2, 3)


def test_final_numbers_come_from_the_last_row_and_an_empty_run_has_none():
    record = History()
    assert set(final_metrics(record)) == {"peak_memory_bytes"}
    record.rows = [{"step": 2.0, "train_loss": 5.0, "tokens": 300, "seconds": 4.0}]
    record.validation = [{"step": 2, "val_loss": 5.5}]
    metrics = final_metrics(record)
    assert (
        metrics["steps"],
        metrics["tokens"],
        metrics["tokens_per_second"],
        metrics["val_loss"],
    ) == (2, 300, 75, 5.5)
    assert final_metrics(record, {"val_loss": 5.0})["val_loss"] == 5.0


def test_a_table_escapes_bars_and_aligns_numbers():
    assert markdown_table([]) == "none"
    lines = markdown_table(
        [{"a|": "x|y", "n": 1234567, "f": 0.00012345, "big": 1.5e9}]
    ).splitlines()
    assert lines[1].split(" | ")[1] == "---:" and lines[2].split(" | ")[1] == "1,234,567"
    assert r"x\|y" in lines[2] and "0.0001234" in lines[2] and "1.500e+09" in lines[2]


def test_rows_of_a_table_may_have_other_keys_than_the_first():
    lines = markdown_table([{"step": 2, "gone": 1.5}, {"step": 4, "new": "x"}]).splitlines()
    assert lines == [
        "| step | gone | new |",
        "| ---: | ---: | --- |",
        "| 2 | 1.5 |  |",
        "| 4 |  | x |",
    ]


def test_a_long_history_of_validations_is_thinned_evenly_and_keeps_both_ends(tmp_path):
    trainer, module, _ = run(tmp_path)
    record = History()
    for number, kept in ((5, 5), (1000, 20)):
        record.validation = [{"step": i, "val_loss": 1.0} for i in range(number)]
        table = report_sections(trainer, module, {}, record, "")["Validation"].splitlines()[2:]
        steps = [int(line.split("|")[1].replace(",", "")) for line in table]
        assert len(steps) == kept and steps[0] == 0 and steps[-1] == number - 1
        assert np.ptp(np.diff(steps)) <= 1


def test_the_parts_of_a_model_that_is_partly_frozen_add_up_to_what_is_trained():
    module, _ = parts("mlm")
    module.configure_model()
    whole = parameter_counts(module.model)
    frozen = [p for name, p in module.model.named_parameters() if "embeddings" in name]
    for one in frozen:
        one.requires_grad_(False)
    counts = parameter_counts(module.model)
    still = -sum(p.numel() for p in frozen)
    assert still < 0 and counts == {**whole, "frozen": still, "total": whole["total"] + still}
    assert "other" not in counts and sum(counts.values()) == 2 * counts["total"]
