"What a run says about its speed and its memory is counted right, and costs it no bit."

import csv
import json
import time
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from test_training import CONFIG, Texts, equal, train

from bertlab.train.checkpoints import TrainingCheckpoint
from bertlab.train.history import Clock, History, ProgressBar, paused
from bertlab.model.config import BertLabConfig, matmul_parameters
from bertlab.core.devices import peak_memory_bytes, resident_memory_bytes
from bertlab.train.modules import PretrainingModule
from bertlab.train.monitors import FlopsCounter, MemoryMonitor, PeriodicCallback, Throughput
from bertlab.train.monitors import (
    document_length_counts,
    peak_flops_of,
    build_loggers,
    get_progress,
)
from bertlab.train.steps import num_devices
from bertlab.train.trainer import make_trainer, seed_everything


def tiny():
    return PretrainingModule(CONFIG, scheduler_warmup_steps=1)


def lengths_by_hand(rows):
    "How often each length occurs, by counting in plain Python."
    counts = [0] * (len(rows[0]) + 1)
    for row in rows:
        for document in set(row) - {0}:
            counts[row.count(document)] += 1
    return counts


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 6), min_size=6, max_size=6), min_size=1, max_size=4))
def test_documents_are_counted_by_their_length(rows):
    assert document_length_counts(torch.tensor(rows)).tolist() == lengths_by_hand(rows)


@pytest.mark.parametrize(
    "row, expected",
    [
        ([0, 0, 0], [0, 0, 0, 0]),
        ([1, 1, 1], [0, 0, 0, 1]),
        ([1, 1, 0], [0, 0, 1, 0]),
        ([1, 2, 3], [0, 3, 0, 0]),
    ],
)
def test_blank_rows_and_ordinary_masks_are_counted_too(row, expected):
    assert document_length_counts(torch.tensor([row])).tolist() == expected
    assert (
        document_length_counts(
            torch.tensor([row]).bool().int() if max(row) < 2 else torch.tensor([row])
        ).tolist()
        == expected
    )


def test_a_batch_costs_what_its_documents_cost_one_by_one():
    config = BertLabConfig(**CONFIG, local_attention=8)  # documents longer than the window are in
    lengths, labels = [3, 30, 9, 9], 7
    counts = np.bincount(lengths, minlength=33)
    alone = sum(n * config.flops_per_token(n, 0) for n in lengths)
    D, V = config.hidden_size, config.vocab_size
    last = (
        D * D + matmul_parameters(config)["MLP"]
    )  # of the last block, what its attention hands on
    head = labels * 6 * (D * D + V * D + last)  # by hand: each matrix, forward and backward
    assert FlopsCounter(config.flops_per_token).total(counts, labels) == pytest.approx(alone + head)
    mean = sum(n * n for n in lengths) / sum(lengths)
    by_mean = sum(lengths) * config.flops_per_token(mean, labels / sum(lengths))
    assert by_mean > alone + head, "a window of the mean is more than the mean of the windows"


def test_without_windows_the_mean_context_gives_the_same_cost():
    config = BertLabConfig(**CONFIG, global_attention_every_n_layers=1)
    lengths, labels = [1, 30, 12], 5
    mean = sum(n * n for n in lengths) / sum(lengths)
    expected = sum(lengths) * config.flops_per_token(mean, labels / sum(lengths))
    cost = FlopsCounter(config.flops_per_token)
    for size in (31, 64, 31):  # the rows of a run may change their length
        assert cost.total(np.bincount(lengths, minlength=size), labels) == pytest.approx(expected)


class Recorded(Throughput):
    "Keeps the totals of every look."

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.looks = []  # step, seconds, tokens, positions, operations

    def observe(self, trainer, pl_module):
        row = super().observe(trainer, pl_module)
        self.looks.append((trainer.global_step, *self._window[-1]))
        return row


def first_batches(number, **options):
    "The batches of a run from its start."
    out = []
    loader = Texts(**options).train_dataloader()
    while len(out) < number:
        out += list(loader)
    return out[:number]


@pytest.mark.parametrize("window", [1, 2])
def test_throughput_counts_tokens_positions_and_operations(window):
    monitor = Recorded(every_n_steps=3)
    train(Texts(), 9, [monitor], accumulate_grad_batches=window)
    batches, config = first_batches(9 * window), BertLabConfig(**CONFIG)
    assert [look[0] for look in monitor.looks] == [1, 3, 6, 9]
    per_label = config.flops_per_token(1, 1) - config.flops_per_token(1, 0)
    for before, after in zip(monitor.looks, monitor.looks[1:]):
        _, seconds, tokens, positions, flops = np.subtract(after, before)
        seen = batches[before[0] * window : after[0] * window]
        assert tokens == sum(int((b["attention_mask"] > 0).sum()) for b in seen)
        assert positions == sum(b["input_ids"].numel() for b in seen) > tokens
        masks = [row for b in seen for row in b["attention_mask"].tolist()]
        lengths = [row.count(document) for row in masks for document in set(row) - {0}]
        labels = sum(int((b["labels"] != -100).sum()) for b in seen)
        cost = sum(n * config.flops_per_token(n, 0) for n in lengths) + labels * per_label
        assert flops == pytest.approx(cost, rel=1e-5) and seconds > 0
    rows = monitor.rows
    assert [row["step"] for row in rows] == [3, 6, 9] and "mfu" not in rows[0], "a CPU has no peak"
    _, seconds, tokens, positions, flops = np.subtract(monitor.looks[-1], monitor.looks[0])
    assert rows[-1]["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert rows[-1]["positions_per_second"] == pytest.approx(positions / seconds)
    assert rows[-1]["flops_per_token"] == pytest.approx(flops / tokens)


def test_rows_that_processes_share_count_once():
    config = BertLabConfig(**CONFIG)

    def totals(tensor, context, labels):  # of 2 processes, each with the whole row
        monitor = Throughput()
        monitor._flops = FlopsCounter(config.flops_per_token)
        monitor._counts = {8: torch.bincount(torch.tensor([8]))}
        monitor._tokens, monitor._num_labels, monitor._positions = 8, labels, 8
        strategy = SimpleNamespace(
            root_device="cpu", tensor=tensor, reduce=lambda mine, reduce_op: 2 * mine,
            sharers=lambda processes: tensor * context)  # fmt: skip
        return monitor._read(SimpleNamespace(strategy=strategy, world_size=2))

    expected = FlopsCounter(config.flops_per_token).total(np.bincount([8]), 4)  # 4 labels
    for sums in (totals(2, 1, labels=4), totals(1, 2, labels=2)):
        assert sums.tolist() == pytest.approx([8, 8, expected])


def test_one_process_that_drives_several_devices_is_compared_with_the_peak_of_all():
    many = SimpleNamespace(
        strategy=SimpleNamespace(mesh=SimpleNamespace(size=lambda: 8)), world_size=1
    )
    assert num_devices(many) == 8  # as a TPU's process does
    assert num_devices(SimpleNamespace(strategy=SimpleNamespace(), world_size=4)) == 4


def test_the_window_slides_over_the_last_steps_only():
    monitor = Recorded(every_n_steps=2, window_steps=4, device_peak_flops=1e12)
    train(Texts(), 12, [monitor])
    _, seconds, tokens, _, flops = np.subtract(monitor.looks[-1], monitor.looks[-3])
    assert monitor.rows[-1]["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert monitor.rows[-1]["mfu"] == pytest.approx(flops / seconds / 1e12)
    assert monitor.peak == (1e12, "given")


def test_a_module_that_cannot_count_operations_still_has_a_speed():
    monitor = Throughput(every_n_steps=2)
    seed_everything(0)
    module = tiny()
    module.num_flops_per_token = None
    make_trainer(4, callbacks=[monitor], accelerator="cpu").fit(module, Texts())
    assert set(monitor.rows[-1]) == {"step", "tokens_per_second", "positions_per_second"}


def test_a_peak_may_be_measured_and_nonsense_is_refused():
    flops, source = peak_flops_of("measured", torch.device("cpu"), "32-true")
    assert flops > 1e8 and "measured" in source
    with pytest.raises(ValueError, match="device_peak_flops.*'fast'"):
        peak_flops_of("fast", torch.device("cpu"), "32-true")
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="every_n_steps"):
            Throughput(every_n_steps=wrong)


def held(num_bytes):
    "Memory of the system itself: what numpy frees stays with a process that trains on a CPU."
    block = np.frombuffer(mmap(-1, num_bytes), np.uint8)
    block[:] = 1
    return block


class Allocates(Callback):
    "Holds 120 MiB for a moment, during one step."

    def __init__(self, at_step):
        self.at_step = at_step

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == self.at_step - 1:
            held(120 * 2**20)


def test_a_peak_inside_a_step_is_seen_in_its_interval_and_in_no_later_one():
    if resident_memory_bytes() is None:
        pytest.skip("resident memory is read from Linux's /proc")
    monitor = MemoryMonitor(every_n_steps=2)
    # The mark of the whole process must rise, so go above what earlier tests reached.
    gap = held(max(0, peak_memory_bytes() - resident_memory_bytes()) + 2**20)
    train(Texts(), 8, [Allocates(4), monitor])
    del gap
    peaks = {row["step"]: row["cpu_peak_bytes"] for row in monitor.rows}
    assert sorted(peaks) == [2, 4, 6, 8]
    assert peaks[4] - peaks[2] > 90 * 2**20 and peaks[4] - peaks[6] > 90 * 2**20


def test_a_run_that_is_watched_ends_with_the_same_bits(tmp_path):
    weights, record = train(Texts(), 8, val_check_steps=4)
    watched = [Throughput(2, device_peak_flops="measured"), MemoryMonitor(2)]
    again, seen = train(
        Texts(), 8, watched, val_check_steps=4, logger=build_loggers("csv", tmp_path)
    )
    assert equal(weights, again)
    np.testing.assert_array_equal(record.column("train_loss"), seen.column("train_loss"))


def test_values_reach_the_logger_at_their_own_steps_and_the_callback_metrics(tmp_path):
    monitor = Throughput(every_n_steps=3)
    logger = build_loggers("csv", tmp_path, "trial")
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


@pytest.mark.parametrize("name, kind", [("csv", CSVLogger)])
def test_a_logger_has_a_name(name, kind, tmp_path):
    assert isinstance(build_loggers(name, tmp_path), kind)
    several = build_loggers([name, name], tmp_path, version="a")
    assert [type(logger) for logger in several] == [kind, kind] and several[0].version == "a"


def test_a_second_session_does_not_delete_the_log_of_the_first(tmp_path):
    for _ in range(2):
        train(Texts(), 4, [Throughput(1)], logger=build_loggers("csv", tmp_path))
    assert len(list(tmp_path.rglob("metrics.csv"))) == 2


def test_an_unknown_logger_or_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("bertlab.train.monitors.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="'wandb' needs wandb"):
        build_loggers("wandb", tmp_path)
    with pytest.raises(ImportError, match="'tensorboard' needs tensorboard"):
        build_loggers(["csv", "tensorboard"], tmp_path)
    with pytest.raises(ValueError, match="'mlflow'.*csv, tensorboard, wandb, trackio"):
        build_loggers("mlflow", tmp_path)
    with pytest.raises(ValueError, match="'fancy'.*auto, plain, none"):
        get_progress("fancy", History())


def test_loggers_asked_for_together_share_one_directory_and_each_session_has_its_own(tmp_path):
    pytest.importorskip("tensorboard")
    for session in range(2):
        loggers = build_loggers(["csv", "tensorboard"], tmp_path, "")
        train(Texts(), 3, [Throughput(every_n_steps=1)], logger=loggers)
        place = tmp_path / f"version_{session}"
        assert {Path(logger.log_dir) for logger in loggers} == {place}
        assert (place / "metrics.csv").exists() and list(place.glob("events.*"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["version_0", "version_1"]


def test_trackio_gets_the_numbers_and_a_run_that_goes_on_stays_one_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "boards"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage
    from trackio.utils import TRACKIO_DIR

    assert TRACKIO_DIR.is_relative_to(tmp_path), "imported before: another test took it"
    for _ in range(2):  # the second goes on where the first stopped, in the same directory
        train(
            Texts(),
            3,
            [Throughput(every_n_steps=1)],
            logger=build_loggers("trackio", tmp_path / "first" / "logs", ""),
        )
    train(
        Texts(),
        3,
        [Throughput(every_n_steps=1)],
        logger=build_loggers(["csv", "trackio"], tmp_path / "second" / "logs", ""),
    )
    runs = SQLiteStorage.get_runs("bertlab")
    assert sorted(run.rpartition("-")[0] for run in runs) == ["first", "second"]
    for run, sessions in zip(sorted(runs), (2, 1)):
        rows = SQLiteStorage.get_logs("bertlab", run)
        assert [row["step"] for row in rows if "tokens_per_second" in row] == [2, 3] * sessions
        assert (
            json.loads((tmp_path / run.rpartition("-")[0] / "logs" / "trackio.json").read_text())[
                "run"
            ]
            == run
        )


class SlowValidation(Callback):
    def on_validation_batch_start(self, *arguments, **options):
        time.sleep(0.2)


class SlowSaving(Callback):
    def on_save_checkpoint(self, *_):
        time.sleep(0.2)


class Pauses(Callback):
    def on_train_batch_end(self, trainer, *_):
        with paused(trainer):
            time.sleep(0.2)


def test_paused_stops_running_clocks_and_starts_only_those_again():
    clock, stopped = Clock(), Clock()
    trainer = SimpleNamespace(callbacks=[clock, Callback(), stopped])
    clock.start()
    with pytest.raises(KeyError), paused(trainer):
        with paused(trainer):
            pass
        before = clock.elapsed()
        time.sleep(0.05)
        assert clock.elapsed() == before
        raise KeyError
    time.sleep(0.05)
    assert clock.elapsed() >= before + 0.05 and stopped.elapsed() == 0


@pytest.mark.parametrize("pause", ["checkpoint", "lightning's checkpoint", "validation", "paused"])
@pytest.mark.parametrize("trainer_of", ["bertlab", "lightning"])
def test_no_clock_counts_a_pause(pause, trainer_of, tmp_path):
    parts = {"checkpoint": [TrainingCheckpoint(tmp_path / "last.ckpt", every_n_steps=1), SlowSaving()],
             "lightning's checkpoint": [ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1), SlowSaving()],
             "validation": [SlowValidation()], "paused": [Pauses()]}  # fmt: skip
    history, throughput = History(), Throughput(1)
    callbacks = [history, throughput, *parts[pause]]
    if trainer_of == "bertlab":
        steps = 1 if pause == "validation" else None
        trainer = make_trainer(10, "32-true", "cpu", val_check_steps=steps, callbacks=callbacks)
    else:
        batches = 1 if pause == "validation" else 0
        trainer = L.Trainer(max_steps=10, accelerator="cpu", callbacks=callbacks, logger=False,
                            limit_val_batches=batches, val_check_interval=1, check_val_every_n_epoch=None,
                            num_sanity_val_steps=0, enable_progress_bar=False)  # fmt: skip
    seed_everything(0)
    begin = time.perf_counter()
    trainer.fit(tiny(), Texts())
    most = time.perf_counter() - begin - 10 * 0.2
    for clock in (history, throughput):
        assert 0 < clock.elapsed() < most
    before = history.elapsed()
    time.sleep(0.05)
    assert history.elapsed() == before, "training is over"


def test_the_sanity_check_is_no_validation_of_the_run():
    _, history = train(Texts(), 4, num_sanity_val_steps=1, val_check_steps=2)
    assert [row["step"] for row in history.validation] == [2, 4]


class LogsMore(PretrainingModule):
    def training_step(self, batch, batch_idx):
        self.log("mine", float(batch_idx))
        return super().training_step(batch, batch_idx)


def test_every_logged_number_is_a_column_of_the_history(tmp_path):
    history = History()
    trainer = make_trainer(3, "32-true", "cpu", callbacks=[history], val_check_steps=3)
    trainer.fit(LogsMore(CONFIG), Texts())
    assert history.column("mine").tolist() == [0, 1, 2] and "val_loss" in history.validation[0]
    history.write_csv(tmp_path / "history.csv")
    with open(tmp_path / "history.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:6] == list(History.COLUMNS) and float(rows[2]["mine"]) == 2
    with pytest.raises(ValueError, match="'loss'.*train_loss"):
        history.column("loss")


def test_tokens_of_earlier_sessions_are_those_of_all_their_processes(monkeypatch):
    history, batch = History(), {"attention_mask": torch.ones(1, 8)}
    history.load_state_dict(
        {"rows": [], "validation": [], "evaluations": [], "tokens": 100, "seconds": 1.0}
    )
    monkeypatch.setattr("bertlab.train.history.data_parallel_size", lambda trainer: 2)
    trainer = SimpleNamespace(global_step=1, callback_metrics={})
    history.on_train_start(trainer, None)
    history.on_train_batch_end(trainer, None, None, batch, 0)  # inside an accumulation window
    assert history.totals()[0] == history.state_dict()["tokens"] == 116


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
    monitor, config = Throughput(), BertLabConfig(**CONFIG)
    trainer = make_trainer(1, accelerator="cpu")
    monitor.on_fit_start(trainer, SimpleNamespace(num_flops_per_token=config.flops_per_token))
    monitor.on_train_start(trainer, None)
    batch = {"attention_mask": torch.tensor([[1, 1, 2, 0]])}
    monitor.on_train_batch_end(trainer, None, None, batch, 0)
    tokens, positions, flops = monitor._read(trainer)
    assert (tokens, positions) == (3, 4)
    cost = 2 * config.flops_per_token(2, 0) + config.flops_per_token(1, 0)
    assert flops == pytest.approx(cost, rel=1e-6)


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
