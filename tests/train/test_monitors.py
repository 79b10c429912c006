"What a run says about its speed and its memory is counted right, and costs it no bit."

import csv
import json
import math
import time
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from test_training import CONFIG, Texts, equal, train

import bertlab.train.history as module_of_progress
from bertlab.train.checkpoints import RunCheckpoint
from bertlab.train.history import Clock, History, RunProgress, RunRecord, paused
from bertlab.model.config import BertLabConfig, matmul_parameters
from bertlab.core.devices import peak_memory_bytes, resident_memory_bytes
from bertlab.train.model_directories import ModelDirectories
from bertlab.train.modules import PretrainingModule
from bertlab.train.monitors import MemoryMonitor, FlopsCounter, Throughput
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


class Kept(Throughput):
    "Keeps every interval that it took."

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.intervals = []

    def take(self, trainer):
        self.intervals.append(super().take(trainer))
        return self.intervals[-1]


def first_batches(number, **options):
    "The batches of a run from its start."
    out = []
    loader = Texts(**options).train_dataloader()
    while len(out) < number:
        out += list(loader)
    return out[:number]


@pytest.mark.parametrize("window", [1, 2])
def test_tokens_positions_and_operations_of_an_interval_are_those_of_its_batches(window):
    monitor = Kept(every_n_steps=3)
    train(Texts(), 9, [monitor], accumulate_grad_batches=window)
    batches = first_batches(9 * window)
    config = BertLabConfig(**CONFIG)
    assert [i.steps for i in monitor.intervals] == [1, 2, 3, 3]
    for interval, start, end in zip(monitor.intervals[1:], (1, 3, 6), (3, 6, 9)):
        seen = batches[start * window : end * window]
        assert interval.tokens == sum(int((b["attention_mask"] > 0).sum()) for b in seen)
        assert interval.positions == sum(b["input_ids"].numel() for b in seen) > interval.tokens
        lengths = [
            row.count(d)
            for b in seen
            for row in b["attention_mask"].tolist()
            for d in set(row) - {0}
        ]
        labels = sum(int((b["labels"] != -100).sum()) for b in seen)
        cost = sum(n * config.flops_per_token(n, 0) for n in lengths)
        cost += labels * (config.flops_per_token(1, 1) - config.flops_per_token(1, 0))
        assert interval.flops == pytest.approx(cost, rel=1e-5) and interval.seconds > 0
    rows = monitor.rows
    assert [row["step"] for row in rows] == [3, 6, 9] and "mfu" not in rows[0], "a CPU has no peak"
    total = [sum(column) for column in zip(*monitor.intervals[1:])]
    assert rows[-1]["tokens_per_second"] == pytest.approx(total[2] / total[1])
    assert rows[-1]["positions_per_second"] == pytest.approx(total[3] / total[1])
    assert rows[-1]["flops_per_token"] == pytest.approx(total[4] / total[2])


def test_a_row_that_processes_share_counts_once_and_so_do_its_labels():
    def operations(tensor, context, labels):  # of 2 processes, each with the whole row
        monitor = Throughput()
        monitor._flops, monitor._last = (
            FlopsCounter(BertLabConfig(**CONFIG).flops_per_token),
            (0.0, 0),
        )
        monitor._counts, monitor._tokens, monitor._num_labels = (
            {8: torch.bincount(torch.tensor([8]))},
            8,
            labels,
        )
        monitor._positions = 8
        strategy = SimpleNamespace(
            root_device="cpu", tensor=tensor, reduce=lambda mine, reduce_op: 2 * mine
        )
        trainer = SimpleNamespace(strategy=strategy, world_size=2, global_step=1,
                                  distributed_sampler_kwargs={"num_replicas": 2 // (tensor * context)})  # fmt: skip
        return monitor.take(trainer)

    shared, dealt = operations(2, 1, labels=4), operations(1, 2, labels=2)  # 4 labels in the row
    assert shared.tokens == dealt.tokens == 8 and shared.positions == dealt.positions == 8
    assert dealt.flops == shared.flops == pytest.approx(FlopsCounter(BertLabConfig(**CONFIG).flops_per_token).total(
        np.bincount([8]), 4))  # fmt: skip


def test_one_process_that_drives_several_devices_is_compared_with_the_peak_of_all():
    many = SimpleNamespace(
        strategy=SimpleNamespace(mesh=SimpleNamespace(size=lambda: 8)), world_size=1
    )
    assert num_devices(many) == 8  # as a TPU's process does
    assert num_devices(SimpleNamespace(strategy=SimpleNamespace(), world_size=4)) == 4


def test_the_window_slides_over_the_last_steps_only():
    monitor = Kept(every_n_steps=2, window_steps=4, device_peak_flops=1e12)
    train(Texts(), 12, [monitor])
    last = monitor.intervals[-2:]
    tokens, seconds, flops = (
        sum(getattr(i, key) for i in last) for key in ("tokens", "seconds", "flops")
    )
    assert monitor.rows[-1]["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert monitor.rows[-1]["mfu"] == pytest.approx(flops / seconds / 1e12)
    assert monitor.peak == (1e12, "given")


def test_validation_is_no_training_time():
    class SlowValidation(Callback):
        def on_validation_end(self, trainer, pl_module):
            time.sleep(0.5)

    monitor, start = Kept(every_n_steps=2), time.perf_counter()
    train(Texts(), 6, [monitor, SlowValidation()], val_check_steps=2)
    whole = time.perf_counter() - start
    assert sum(i.seconds for i in monitor.intervals) < whole - 1.0, "two of three are in between"


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
    with pytest.raises(ValueError, match="'measured' or None, got 'fast'"):
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
    np.testing.assert_array_equal(record.column("loss"), seen.column("loss"))


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
    train(Texts(), 6, [Kept(2), MemoryMonitor(2), RunCheckpoint(path)])
    monitor, memory = Kept(2), MemoryMonitor(2)
    train(Texts(), 12, [monitor, memory, RunCheckpoint(path)], path)
    assert [row["step"] for row in monitor.rows] == [2, 4, 6, 8, 10, 12]
    assert [row["step"] for row in memory.rows] == [2, 4, 6, 8, 10, 12]
    assert [i.steps for i in monitor.intervals] == [1, 1, 2, 2]


@pytest.mark.parametrize("name, kind", [("csv", CSVLogger)])
def test_a_logger_has_a_name(name, kind, tmp_path):
    assert isinstance(build_loggers(name, tmp_path), kind)
    several = build_loggers([name, name], tmp_path, version="a")
    assert [type(logger) for logger in several] == [kind, kind] and several[0].version == "a"


def test_a_second_session_does_not_delete_the_log_of_the_first(tmp_path):
    for _ in range(2):
        train(Texts(), 4, [Throughput(1)], logger=build_loggers("csv", tmp_path))
    assert len(list(tmp_path.rglob("metrics.csv"))) == 2


def test_a_logger_without_its_package_or_without_a_name_we_know_is_one_clear_line(
    monkeypatch, tmp_path
):
    monkeypatch.setattr("bertlab.train.monitors.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="'wandb' needs the package wandb: pip install wandb"):
        build_loggers("wandb", tmp_path)
    with pytest.raises(ImportError, match="'tensorboard' needs the package tensorboard"):
        build_loggers(["csv", "tensorboard"], tmp_path)
    with pytest.raises(
        ValueError, match="'mlflow' is unknown; choose one of csv, tensorboard, wandb, trackio"
    ):
        build_loggers("mlflow", tmp_path)
    with pytest.raises(ImportError, match="needs the package rich"):
        get_progress("rich")


def test_progress_has_a_name_and_says_what_it_needs():
    history = History()
    kinds = {
        "auto": RunProgress,
        "plain": RunProgress,
        "tqdm": TQDMProgressBar,
        "rich": RichProgressBar,
    }
    assert {name: type(get_progress(name, history)[0]) for name in kinds} == kinds
    assert get_progress("none") == []
    with pytest.raises(ValueError, match="reads a History"):
        get_progress("plain")
    with pytest.raises(ValueError, match="'fancy' is unknown; choose one of auto, tqdm"):
        get_progress("fancy")


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
        time.sleep(0.05)


class SlowSaving(Callback):
    def on_save_checkpoint(self, *_):
        time.sleep(0.2)


class Pauses(Callback):
    "Does something else than training behind each batch."

    def on_train_batch_end(self, trainer, *_):
        with paused(trainer):
            time.sleep(0.2)


def test_a_call_stops_the_clocks_at_once_and_the_end_of_a_with_lets_those_go_on_that_it_has_stopped():
    clock, still = Clock(), Clock()
    trainer = SimpleNamespace(callbacks=[clock, Callback(), still])
    clock.go_on()
    paused(trainer)  # as a callback that says no `with`
    time.sleep(0.2)
    assert clock.totals()[1] < 0.2
    clock.go_on()
    with pytest.raises(KeyError), paused(trainer):
        with paused(trainer):
            pass
        before = clock.totals()[1]
        time.sleep(0.05)
        assert clock.totals()[1] == before, "the inner one goes on with what it has stopped alone"
        raise KeyError
    time.sleep(0.05)
    assert clock.totals()[1] >= before + 0.05 and still.totals()[1] == 0


class SlowModels(ModelDirectories):
    def _put(self, *_):
        time.sleep(0.2)


@pytest.mark.parametrize(
    "pause", ["checkpoint", "lightning's checkpoint", "validation", "question", "model"]
)
def test_waiting_for_a_batch_is_on_every_clock_whatever_comes_before_it_and_the_pause_is_on_none(
    pause, tmp_path, monkeypatch
):
    parts = {"checkpoint": [RunCheckpoint(tmp_path / "last.ckpt", every_n_steps=1), SlowSaving()],
             "lightning's checkpoint": [ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1), SlowSaving()],
             "validation": [SlowValidation()], "question": [Pauses()], "model": [SlowModels(tmp_path, None, 1)]}  # fmt: skip
    data, history, throughput = Texts(), History(), Throughput(1)
    quick = type(data.collator).__call__
    monkeypatch.setattr(
        type(data.collator), "__call__", lambda *given: [time.sleep(0.05), quick(*given)][1]
    )
    seed_everything(0)
    trainer = make_trainer(11, "32-true", "cpu", val_check_steps=1 if pause == "validation" else None,
                           callbacks=[history, throughput, *parts[pause]])  # fmt: skip
    begun = time.perf_counter()
    trainer.fit(tiny(), data)
    most = (
        time.perf_counter()
        - begun
        - 11 * (trainer.num_val_batches[0] * 0.05 if pause == "validation" else 0.2)
    )
    for clock in (history, throughput):
        assert 10 * 0.05 <= clock.totals()[1] < most, "the first batch is there before the clock"
    seconds = clock.totals()[1]
    time.sleep(0.1)
    assert clock.totals()[1] == seconds == pytest.approx(history.totals()[1], abs=0.2), (
        "training is over"
    )


def test_the_sanity_check_is_no_validation_of_the_run():
    _, record = train(Texts(), 4, num_sanity_val_steps=1, val_check_steps=2)
    assert [found["step"] for found in record.validation] == [2, 4]


def test_the_tokens_of_a_written_history_are_those_of_all_processes(tmp_path):
    record = RunRecord()
    record.rows = [(1, 6.9, 5e-4, 1.2, 310, 0.4), (2, 6.8, 5e-4, 1.2, 620, 0.8)]
    record.write_csv(tmp_path / "history.csv", readers=8)
    with open(tmp_path / "history.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["tokens"]) for row in rows] == [2480, 4960] and [
        row["seconds"] for row in rows
    ] == ["0.4", "0.8"]


def test_validations_are_part_of_the_time_left_and_show_how_far_they_are(capsys):
    left, history = {}, History()

    class Estimates(RunProgress):
        def on_train_batch_end(self, trainer, *arguments):
            super().on_train_batch_end(trainer, *arguments)
            left[trainer.global_step] = time.perf_counter(), self.seconds_left(trainer)

    seed_everything(0)
    progress = Estimates(history, every_seconds=0.02, plain=True)
    trainer = make_trainer(20, "32-true", "cpu", val_check_steps=5,
                           callbacks=[history, progress, SlowValidation()])  # fmt: skip
    trainer.fit(tiny(), Texts(batch_size=2))
    end, said = time.perf_counter(), capsys.readouterr().out
    batches = trainer.num_val_batches[0]
    at, estimate = left[
        7
    ]  # one validation is measured; two more lie before the last step, and one at it
    validations = 3 * batches * 0.05
    assert estimate > validations and estimate == pytest.approx(end - at, rel=0.5)
    assert f"validating, batch 2 of {batches}" in said


class Silent(PretrainingModule):
    "It validates and logs nothing."

    def validation_step(self, *_):
        pass

    on_validation_epoch_end = validation_step


def test_validating_alone_shows_how_far_it_is_and_in_the_end_what_it_found(capsys):
    for module in (tiny(), Silent(CONFIG, scheduler_warmup_steps=1)):
        history = History()
        trainer = make_trainer(
            1,
            "32-true",
            "cpu",
            val_check_steps=1,
            callbacks=[history, RunProgress(history, 0.01, plain=True), SlowValidation()],
        )
        found = trainer.validate(module, Texts(batch_size=2), verbose=False)
        said = capsys.readouterr().out
        assert "validating, batch 1 of" in said
        end = f"validation loss {found[0]['val_loss']:.3f}" if found[0] else "validated"
        assert said.splitlines()[-1] == f"step 0/1: {end}"


def shown_in(display, monkeypatch, pause, sets=1):
    "What six steps with a validation after every third one show on a display of this name, and their history."
    shown, history, data = [], History(), Texts()
    data.val_datasets *= sets

    class Screen(getattr(module_of_progress, display)):
        def __init__(self):
            pass

        def show(self, step, max_steps, text):
            shown.append((step, text))

        close = __init__

    class Paced(RunProgress):
        def _open(self, trainer):
            super()._open(trainer)
            self._pause = pause

    monkeypatch.setattr(module_of_progress, display, Screen)
    monkeypatch.setattr(module_of_progress, "in_notebook", lambda: display == "NotebookBar")
    monkeypatch.setattr("sys.stderr.isatty", lambda: display == "TerminalBar", raising=False)
    seed_everything(0)
    make_trainer(6, "32-true", "cpu", val_check_steps=3,
                 callbacks=[history, Paced(history), SlowValidation()]).fit(tiny(), data)  # fmt: skip
    return shown, history.record


@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("display", ["NotebookBar", "TerminalBar", "LogLines"])
def test_behind_a_validation_the_run_is_shown_again_with_what_was_found(display, sets, monkeypatch):
    shown, record = shown_in(
        display, monkeypatch, 0.04, sets
    )  # a batch of a validation takes 0.05 s
    for step, found in zip((3, 6), record.validation, strict=True):
        texts, end = (
            [text for at, text in shown if at == step],
            f"validation loss {found['val_loss']:.3f}",
        )
        assert any("validating, batch" in text for text in texts)
        loss = f"loss {record.column('loss')[step - 1]:.3f}, rate"
        if display == "LogLines":  # each line stays, so none says again what another said
            assert texts[-1] == end and sum(text.startswith(loss) for text in texts) <= 1
        else:
            assert texts[-1].startswith(loss) and texts[-1].endswith(f" left, {end}")
    assert shown[-1][0] == 6 and len(set(shown)) == len(shown)


def test_a_log_stays_short_where_validations_are_shorter_than_its_pause(monkeypatch):
    shown, record = shown_in("LogLines", monkeypatch, math.inf)
    assert [step for step, _ in shown] == [1, 6, 6] and len(record.validation) == 2
    assert shown[-1][1] == f"validation loss {record.validation[-1]['val_loss']:.3f}"


@pytest.mark.parametrize("name", ["tqdm", "rich"])
def test_lightnings_own_bars_show_the_run_and_change_no_bit(name, capsys):
    weights, _ = train(Texts(), 4)
    again, _ = train(Texts(), 4, get_progress(name), enable_progress_bar=True)
    shown = capsys.readouterr()
    assert equal(weights, again) and "4/" in shown.out + shown.err


def test_plain_progress_prints_lines_also_where_a_bar_could_move(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    history = History()
    seed_everything(0)
    make_trainer(3, callbacks=[history, *get_progress("plain", history)], accelerator="cpu").fit(
        tiny(), Texts())  # fmt: skip
    assert "step 3/3: loss" in capsys.readouterr().out


def test_throughput_counts_batches_without_labels_too():
    counter, trainer = Throughput(), make_trainer(1, accelerator="cpu")
    config = BertLabConfig(**CONFIG)
    counter.on_fit_start(trainer, SimpleNamespace(num_flops_per_token=config.flops_per_token))
    counter.on_train_start(trainer, None)
    counter.on_train_batch_start(trainer, None, None, 0)
    counter.on_train_batch_end(
        trainer, None, None, {"attention_mask": torch.tensor([[1, 1, 2, 0]])}, 0
    )
    taken = counter.take(trainer)
    assert (taken.tokens, taken.positions) == (3, 4)
    cost = 2 * config.flops_per_token(2, 0) + config.flops_per_token(1, 0)
    assert taken.flops == pytest.approx(cost, rel=1e-6)
