"What a run says about its speed and its memory is counted right, and costs it no bit."

import csv
import json
import math
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from test_training import CONFIG, Texts, equal, train

from bertlab.train.checkpoints import TrainingCheckpoint
from bertlab.train.resume import latest_checkpoint
from bertlab.train.histograms import WeightHistograms
from bertlab.train.history import Clock, History, ProgressBar, json_lines_alone, paused
from bertlab.model.config import BertLabConfig
from bertlab.train.modules import PretrainingModule
from bertlab.train.monitors import LOGGERS, MemoryMonitor, PeriodicCallback, Throughput
from bertlab.train.monitors import build_loggers
from bertlab.train.previews import FillMaskPreview
from bertlab.train.monitors import get_progress, peak_flops_of, squared_document_lengths
from bertlab.train.steps import num_devices
from bertlab.train.trainer import make_trainer, seed_everything


def tiny():
    return PretrainingModule(CONFIG, scheduler_warmup_steps=1)


def lengths_by_hand(rows):
    return [row.count(document) for row in rows for document in set(row) - {0}]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 6), min_size=6, max_size=6), min_size=1, max_size=4))
def test_squared_lengths_are_those_counted_by_hand(rows):
    expected = sum(length**2 for length in lengths_by_hand(rows))
    assert squared_document_lengths(torch.tensor(rows)) == expected


class Recorded(Throughput):
    "Keeps what each look reads."

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.looks = []  # step, tokens, positions, squared lengths, labels, seconds

    def observe(self, trainer, pl_module):
        row = super().observe(trainer, pl_module)
        self.looks.append((trainer.global_step, *self._window[-1]))
        return row


@pytest.mark.parametrize("window", [1, 2])
def test_throughput_counts_tokens_positions_and_labels(window):
    monitor = Recorded(every_n_steps=3)
    train(Texts(), 9, [monitor], accumulate_grad_batches=window)
    batches, config = list(Texts().train_dataloader()), BertLabConfig(**CONFIG)
    assert [look[0] for look in monitor.looks] == [1, 3, 6, 9]
    for before, after in zip(monitor.looks, monitor.looks[1:]):
        _, tokens, positions, squares, labels, seconds = np.subtract(after, before)
        seen = batches[before[0] * window : after[0] * window]
        lengths = lengths_by_hand([row for b in seen for row in b["attention_mask"].tolist()])
        assert tokens == sum(lengths) and squares == sum(n * n for n in lengths)
        assert positions == sum(b["input_ids"].numel() for b in seen) > tokens
        assert labels == sum(int((b["labels"] != -100).sum()) for b in seen) and seconds > 0
    rows = monitor.rows
    assert [row["step"] for row in rows] == [3, 6, 9] and "mfu" not in rows[0], "a CPU has no peak"
    _, tokens, positions, squares, labels, seconds = np.subtract(
        monitor.looks[-1], monitor.looks[0]
    )
    assert rows[-1]["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert rows[-1]["positions_per_second"] == pytest.approx(positions / seconds)
    cost = config.flops_per_token(squares / tokens, labels / tokens)
    assert rows[-1]["flops_per_token"] == pytest.approx(cost)


@pytest.mark.parametrize("tensor, context, labels", [(2, 1, 4), (1, 2, 2)])
def test_rows_that_processes_share_count_once(tensor, context, labels):
    monitor = Throughput()
    monitor._tokens, monitor._counts = 8, torch.tensor([8, 64, labels])
    strategy = SimpleNamespace(
        root_device="cpu", tensor=tensor, reduce=lambda mine, reduce_op: 2 * mine,
        sharers=lambda processes: tensor * context)  # fmt: skip
    totals = monitor._read(SimpleNamespace(strategy=strategy, world_size=2))
    assert totals.tolist() == [8, 8, 64, 4]  # each process has the whole row


def test_one_process_that_drives_several_devices_is_compared_with_the_peak_of_all():
    many = SimpleNamespace(
        strategy=SimpleNamespace(mesh=SimpleNamespace(size=lambda: 8)), world_size=1
    )
    assert num_devices(many) == 8  # as a TPU's process does
    assert num_devices(SimpleNamespace(strategy=SimpleNamespace(), world_size=4)) == 4


def test_the_window_slides_over_the_last_steps_only():
    monitor = Recorded(every_n_steps=2, window_steps=4, device_peak_flops=1e12)
    train(Texts(), 12, [monitor])
    _, tokens, _, _, _, seconds = np.subtract(monitor.looks[-1], monitor.looks[-3])
    row = monitor.rows[-1]
    assert row["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert row["mfu"] == pytest.approx(row["flops_per_token"] * tokens / seconds / 1e12)
    assert monitor.peak == (1e12, "given")


def test_a_module_that_cannot_count_operations_still_has_a_speed():
    monitor = Throughput(every_n_steps=2)
    seed_everything(0)
    module = tiny()
    module.num_flops_per_token = None
    make_trainer(4, callbacks=[monitor], accelerator="cpu").fit(module, Texts())
    assert set(monitor.rows[-1]) == {"step", "tokens_per_second", "positions_per_second"}


def test_a_peak_may_be_measured():
    flops, source = peak_flops_of("measured", torch.device("cpu"), "32-true")
    assert flops > 1e8 and "measured" in source


def test_memory_is_that_of_the_process_so_far():
    monitor = MemoryMonitor(every_n_steps=2)
    train(Texts(), 4, [monitor])
    first, second = (row["cpu_peak_bytes"] for row in monitor.rows)
    assert 2**20 < first <= second


def test_a_run_that_is_watched_ends_with_the_same_bits(tmp_path):
    weights, record = train(Texts(), 8, val_check_steps=4)
    watched = [Throughput(2, device_peak_flops="measured"), MemoryMonitor(2)]
    again, seen = train(
        Texts(), 8, watched, val_check_steps=4, logger=build_loggers(["csv"], tmp_path)
    )
    assert equal(weights, again)
    np.testing.assert_array_equal(record.column("train_loss"), seen.column("train_loss"))


def test_values_reach_the_logger_at_their_own_steps_and_the_callback_metrics(tmp_path):
    monitor = Throughput(every_n_steps=3)
    [logger] = build_loggers(["csv"], tmp_path, "trial")
    seed_everything(0)
    trainer = make_trainer(
        7, callbacks=[monitor], accelerator="cpu", logger=logger
    )  # logs every 50
    trainer.fit(tiny(), Texts())
    assert trainer.callback_metrics["tokens_per_second"].item() == pytest.approx(
        monitor.rows[-1]["tokens_per_second"], rel=1e-6)  # fmt: skip
    with open(Path(logger.log_dir) / "metrics.csv") as f:
        rows = [row for row in csv.DictReader(f) if row.get("tokens_per_second")]
    assert [int(row["step"]) for row in rows] == [3, 6]
    assert float(rows[1]["flops_per_token"]) == pytest.approx(monitor.rows[1]["flops_per_token"])


def test_rows_go_on_after_a_resume_and_speed_is_of_the_new_session_alone(tmp_path):
    path = tmp_path / "last.ckpt"
    train(Texts(), 6, [Recorded(2), MemoryMonitor(2), TrainingCheckpoint(path)])
    monitor, memory = Recorded(2), MemoryMonitor(2)
    train(Texts(), 12, [monitor, memory, TrainingCheckpoint(path)], path)
    assert [row["step"] for row in monitor.rows] == [2, 4, 6, 8, 10, 12]
    assert [row["step"] for row in memory.rows] == [2, 4, 6, 8, 10, 12]
    assert [look[0] for look in monitor.looks] == [7, 8, 10, 12]


def test_loggers_get_the_names_of_files_without_their_directories(tmp_path):
    loggers, module = build_loggers(["csv", "tensorboard"], tmp_path / "logs", ""), tiny()
    (tmp_path / "mine").mkdir()
    module.save_hyperparameters(
        {"model": str(tmp_path / "mine"), "more": [{"at": tmp_path / "mine"}]}
    )
    make_trainer(2, "32-true", "cpu", logger=loggers).fit(module, Texts())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"/mine" in path.read_bytes() for path in files if path.name == "hparams.yaml")
    assert not [path for path in files if str(tmp_path).encode() in path.read_bytes()]
    assert module.hparams.model == str(tmp_path / "mine")


def test_secrets_reach_neither_loggers_nor_checkpoints(tmp_path):
    module = tiny()
    module.save_hyperparameters({"api_key": "wq7Lx2", "hub": {"url": "https://me:wq7Lx2@host/x"}})
    loggers = build_loggers(["csv", "tensorboard"], tmp_path / "logs", "")
    saving = TrainingCheckpoint(tmp_path / "checkpoints", models=tmp_path / "models")
    make_trainer(2, "32-true", "cpu", logger=loggers, callbacks=[saving]).fit(module, Texts())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"hparams.yaml", "step-00000002.ckpt"} <= {path.name for path in files}
    assert not [path for path in files if b"wq7Lx2" in path.read_bytes()]
    assert module.hparams.api_key == "wq7Lx2"


def test_each_session_has_a_log_of_its_own_for_all_loggers(tmp_path):
    pytest.importorskip("tensorboard")
    for session in range(2):
        loggers = build_loggers(["csv", "tensorboard"], tmp_path, "")
        train(Texts(), 3, [Throughput(every_n_steps=1)], logger=loggers)
        directory = tmp_path / f"version_{session}"
        assert {Path(logger.log_dir) for logger in loggers} == {directory}
        assert (directory / "metrics.csv").exists() and list(directory.glob("events.*"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["version_0", "version_1"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_logger_is_named_with_its_extra(name, tmp_path, monkeypatch):
    class Missing(LOGGERS[name]):
        def __init__(self, **options):
            raise ModuleNotFoundError("Neither this nor that is available")

    monkeypatch.setitem(LOGGERS, name, Missing)
    with pytest.raises(
        ImportError, match=rf"^logger '{name}' needs {name}: pip install .*\[loggers\]"
    ):
        build_loggers([name], tmp_path)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_rates_of_all_groups_reach_the_loggers(optimizer, tmp_path):
    options = {"log_momentum": True, "log_weight_decay": True}
    watching = [LearningRateMonitor(**options), History()]
    with pytest.raises(ValueError, match="LearningRateMonitor.*run.loggers"):
        make_trainer(3, "32-true", "cpu", callbacks=watching)
    module, [logger] = (
        PretrainingModule(CONFIG, optimizer_class=optimizer),
        build_loggers(["csv"], tmp_path),
    )
    make_trainer(3, "32-true", "cpu", callbacks=watching, logger=logger, log_every_n_steps=1).fit(
        module, Texts()
    )
    groups = [f"lr-{type(module.optimizers().optimizer).__name__}/{name}"
              for name in ("hidden", "decay", "no_decay")[optimizer == "adamw":]]  # fmt: skip
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row[groups[0]]]
    assert len(rows) == 3
    for group in groups:
        assert all(float(row[group]) == module.hparams.learning_rate for row in rows)
        assert watching[1].column(group) == pytest.approx(watching[0].lrs[group])


class FakeTrackio(ModuleType):
    "What trackio's interface does with tables and histograms: its run keeps them."

    context_vars = SimpleNamespace(current_run=SimpleNamespace(get=lambda: None))

    def __init__(self):
        super().__init__("trackio")
        self.__spec__, self.rows = ModuleSpec("trackio", None), []

    def init(self, *names, **options):
        log = lambda values, step: self.rows.append((step, values))
        return SimpleNamespace(log=log, finish=lambda: None)

    def Table(self, columns, data):
        return data

    def Histogram(self, np_histogram):
        return np_histogram


def test_previews_and_histograms_reach_every_logger(tmp_path, monkeypatch):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setitem(sys.modules, "trackio", trackio := FakeTrackio())
    loggers = build_loggers(["csv", "tensorboard", "trackio"], tmp_path, "")
    data = Texts()
    text = f"{data.tokenizer.convert_ids_to_tokens(9)} [MASK]"
    watching = [
        FillMaskPreview([text], data.tokenizer, 2, quiet=True),
        WeightHistograms(["*.qkv.weight"], 2),
    ]
    train(data, 4, watching, logger=loggers)
    name = "weight/model.encoder.blocks.0.attention.qkv.weight"
    tables = [
        (step, values["FillMaskPreview"])
        for step, values in trackio.rows
        if "FillMaskPreview" in values
    ]
    assert [step for step, _ in tables] == [0, 2, 4] and tables[0][1][0][0].startswith(text)
    counts = [values[name][0].sum() for _, values in trackio.rows if name in values]
    assert counts == [48 * 16] * 3, "all weights are counted"
    written = events.EventAccumulator(loggers[1].log_dir, {events.HISTOGRAMS: 0}).Reload()
    assert (
        len(written.Histograms(name)) == 3
        and "FillMaskPreview/text_summary" in written.Tags()["tensors"]
    )
    with open(Path(loggers[0].log_dir) / "metrics.csv") as file:
        assert len([row for row in csv.DictReader(file) if row[f"{name}/norm"]]) == 3


def test_unknown_names_are_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="'mlflow'.*csv, tensorboard, wandb, trackio"):
        build_loggers(["mlflow"], tmp_path)
    with pytest.raises(ValueError, match="'fancy'.*auto, plain, json, none"):
        get_progress("fancy", History())


def test_trackio_continues_the_run_of_a_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "boards"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage
    from trackio.utils import TRACKIO_DIR

    assert TRACKIO_DIR.is_relative_to(tmp_path), "imported before: another test took it"
    for name in ("first", "first", "second"):
        loggers = build_loggers(["csv", "trackio"], tmp_path / name / "logs", "")
        train(Texts(), 3, [Throughput(every_n_steps=1)], logger=loggers)
    runs = sorted(SQLiteStorage.get_runs("bertlab"))
    assert [run.rpartition("-")[0] for run in runs] == ["first", "second"]
    for run, sessions in zip(runs, (2, 1)):
        rows = SQLiteStorage.get_logs("bertlab", run)
        assert [row["step"] for row in rows if "tokens_per_second" in row] == [2, 3] * sessions


def test_paused_stops_running_clocks_and_starts_only_those_again():
    clock, stopped = Clock(), Clock()
    trainer = SimpleNamespace(callbacks=[clock, Callback(), stopped])
    clock.start()
    with pytest.raises(KeyError), paused(trainer):
        with paused(trainer):
            pass
        assert clock.elapsed() == clock.elapsed()
        raise KeyError
    assert clock.elapsed() < clock.elapsed() and stopped.elapsed() == 0


class Probe(Callback):
    "Notes whether clocks stand still where no training goes on."

    def __init__(self, *clocks):
        self.clocks, self.stopped = clocks, []

    def look(self, *_, **__):
        self.stopped += [clock.elapsed() == clock.elapsed() for clock in self.clocks]

    on_validation_batch_start = on_save_checkpoint = on_fit_end = look

    def on_train_batch_end(self, trainer, *_):
        with paused(trainer):
            self.look()


@pytest.mark.parametrize("trainer_class", ["bertlab", "lightning"])
def test_no_clock_counts_a_pause(trainer_class, tmp_path):
    history, throughput = History(), Throughput(1)
    probe = Probe(history, throughput)
    callbacks = [history, throughput, probe, TrainingCheckpoint(tmp_path / "last.ckpt", 1),
                 ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)]  # fmt: skip
    if trainer_class == "bertlab":
        trainer = make_trainer(3, "32-true", "cpu", val_check_steps=1, callbacks=callbacks)
    else:
        trainer = L.Trainer(max_steps=3, accelerator="cpu", callbacks=callbacks, logger=False,
                            limit_val_batches=1, val_check_interval=1, check_val_every_n_epoch=None,
                            num_sanity_val_steps=0, enable_progress_bar=False)  # fmt: skip
    seed_everything(0)
    trainer.fit(tiny(), Texts())
    assert all(probe.stopped) and len(probe.stopped) >= 2 * (3 * 4 + 1)
    assert history.totals()[1] > 0 < throughput.elapsed()


def test_the_sanity_check_is_no_validation_of_the_run():
    _, history = train(Texts(), 4, num_sanity_val_steps=1, val_check_steps=2)
    assert [row["step"] for row in history.validation] == [2, 4]


class LogsMore(PretrainingModule):
    def training_step(self, batch, batch_idx):
        self.log("mine", float(batch_idx))
        if batch_idx % 2 == 0:
            self.log("rare", float(batch_idx))
        self.log("mean", float(batch_idx), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_):
        self.log("at_end", float(self.trainer.global_step))

    def on_validation_epoch_end(self):
        super().on_validation_epoch_end()
        self.log("my_score", self.trainer.global_step + 0.5)


class LogsToo(Callback):
    def on_train_batch_end(self, trainer, *_):
        self.log("of_callback", float(trainer.global_step))


def test_every_logged_number_is_a_column_of_the_history(tmp_path):
    path, no = tmp_path / "checkpoints", math.nan
    expected = {
        "mine": [0, 1, 2, 3, 4, 5], "rare": [0, no, 2, no, 4, no],
        "at_end": [1, 2, 3, 4, 5, 6], "of_callback": [1, 2, 3, 4, 5, 6],
        "mean": [no, no, no, 1.5, no, 4.5],  # of each session's batches
    }  # fmt: skip
    for steps, resumed in ((4, None), (6, path)):
        history = History()
        history.path = tmp_path / "history.csv"
        callbacks = [history, LogsToo(), Throughput(2), TrainingCheckpoint(path, 2)]
        trainer = make_trainer(steps, "32-true", "cpu", callbacks=callbacks, val_check_steps=2)
        resumed = resumed and latest_checkpoint(resumed)
        trainer.fit(LogsMore(CONFIG), Texts(), ckpt_path=resumed)
        history.save()
    with open(history.path, newline="") as file:
        rows = list(csv.DictReader(file))
    for name, values in expected.items():
        np.testing.assert_array_equal(history.column(name), values)
        written = [float(row[name] or math.nan) for row in rows]
        np.testing.assert_array_equal(written, values)
    assert np.isfinite(history.column("tokens_per_second")).tolist() == [False, True] * 3
    assert list(rows[0])[:6] == list(History.COLUMNS)
    assert [row["my_score"] for row in history.validation] == [2.5, 4.5, 6.5]
    assert all("val_loss" in row for row in history.validation)
    with pytest.raises(ValueError, match="'loss'.*train_loss"):
        history.column("loss")


def test_plain_progress_prints_lines_with_the_validation_loss(capsys):
    history = History()
    bar = get_progress("plain", history)
    trainer = make_trainer(4, "32-true", "cpu", val_check_steps=2, callbacks=[history, *bar])
    trainer.fit(tiny(), Texts())
    lines = capsys.readouterr().out
    assert "step 4/4: loss" in lines and "tokens/s" in lines
    for row in history.validation:
        assert f"step {row['step']}/4: validation loss {row['val_loss']:.3f}" in lines
    assert get_progress("none", history) == []


def test_progress_in_json_is_one_object_a_line(capsys):
    history = History()
    bar = get_progress("json", history)
    trainer = make_trainer(4, "32-true", "cpu", val_check_steps=2, callbacks=[history, *bar])
    with json_lines_alone():
        print("for people")
        trainer.fit(LogsMore(CONFIG), Texts())
    printed = capsys.readouterr()
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert "for people" in printed.err and {line["max_steps"] for line in lines} == {4}
    assert [line["event"] for line in lines if line["event"] != "step"] == ["validation"] * 2 + [
        "end"
    ]
    last = [line for line in lines if line["event"] == "step"][-1]
    assert last["step"] == 4 and last["mine"] == 3 and last["seconds_left"] == 0
    assert last["train_loss"] == history.rows[-1]["train_loss"]
    validations = [line for line in lines if line["event"] == "validation"]
    assert [(v["step"], v["val_loss"]) for v in validations] == [
        (row["step"], row["val_loss"]) for row in history.validation
    ]
    bar[0].show(trainer, {"event": "step", "train_loss": math.nan, "seconds_left": math.inf})
    values = json.loads(capsys.readouterr().out)
    assert values["train_loss"] is None and values["seconds_left"] is None


def test_a_bar_moves_on_a_terminal_and_changes_no_bit(monkeypatch, capsys):
    weights, _ = train(Texts(), 4)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    seed_everything(0)
    history, module = History(), PretrainingModule(
        {**CONFIG, "embedding_dropout": 0.1, "mlp_dropout": 0.1}, learning_rate=3e-3, scheduler_warmup_steps=3)  # fmt: skip
    make_trainer(4, "32-true", "cpu", callbacks=[history, ProgressBar(history)]).fit(
        module, Texts()
    )
    assert equal(weights, module.model.state_dict()) and "4/4" in capsys.readouterr().err


def test_throughput_counts_batches_without_labels_too():
    monitor, trainer = Throughput(), make_trainer(1, accelerator="cpu")
    monitor.on_train_start(trainer, None)
    batch = {"attention_mask": torch.tensor([[1, 1, 2, 0]])}
    monitor.on_train_batch_end(trainer, None, None, batch, 0)
    assert monitor._read(trainer).tolist() == [3, 4, 5, 0]


class Steps(PeriodicCallback):
    def observe(self, trainer, pl_module):
        return {"seen": float(trainer.global_step)}


@pytest.mark.parametrize("options, steps", [
    ({}, [2, 4]), ({"at_start": True}, [0, 2, 4]), ({"at_end": True}, [2, 4, 5]),
])  # fmt: skip
def test_a_periodic_callback_observes_when_it_says(options, steps, tmp_path):
    callback, path = Steps(2, **options), tmp_path / "last.ckpt"
    train(Texts(), 5, [callback, TrainingCheckpoint(path, 3)])
    assert [row["step"] for row in callback.rows] == [row["seen"] for row in callback.rows] == steps
    resumed = Steps(2, **options)
    train(Texts(), 7, [resumed], path)
    later = [6, 7] if "at_end" in options else [6]
    assert [row["step"] for row in resumed.rows] == [*steps, *later]
