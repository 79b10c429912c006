"Limits: what ends a run, after which step, and what a resume makes of it."

import os
import time
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from test_guards import Line, Numbered, fit, same_weights
from ranks import run_on_ranks
from stop_at import StopAt

from bertlab.optim.budgets import BatchSizeWarmup, TimeBudgetLR
from bertlab.train import history, stopping
from bertlab.train.checkpoints import TrainingCheckpoint
from bertlab.train.resume import latest_checkpoint
from bertlab.train.history import History, ProgressBar
from bertlab.train.config import RunConfig
from bertlab.train.batch_size import BatchSizeScheduler
from bertlab.train.stopping import TimeLimit
from bertlab.train.trainer import make_trainer


class Watch:
    "A clock that stands still until it is set."

    now = 100.0

    def __call__(self):
        return self.now


def set_clocks(watch):
    for part in (history, stopping):
        part.time = SimpleNamespace(perf_counter=watch)


@pytest.fixture(autouse=True)
def real_clocks():
    yield
    for part in (history, stopping):
        part.time = time


class Wind(Callback):
    "Set a watch forward with each batch, and with each validation."

    def __init__(self, watch, seconds, validation_seconds=0):
        set_clocks(watch)
        self.watch, self.seconds, self.validation_seconds = watch, seconds, validation_seconds

    def on_train_batch_start(self, *_):
        self.watch.now += self.seconds

    def on_validation_batch_start(self, *_):
        self.watch.now += self.validation_seconds


def slow(weights):
    return torch.optim.SGD(weights, lr=0.01)


def test_time_ends_the_run_after_a_whole_step(tmp_path):
    path = tmp_path / "last.ckpt"
    _, _, trainer = fit(50, Numbered(range(200)), [TimeLimit("1m30s"), Wind(Watch(), 7), TrainingCheckpoint(path)],
                        accumulate_grad_batches=4)  # fmt: skip
    assert trainer.global_step == 4, "12 batches are 84 seconds, 13 are 91: step 4 is under way"
    assert torch.load(latest_checkpoint(path), weights_only=True)["global_step"] == 4


def test_time_counts_over_all_sessions(tmp_path):
    path, steps = tmp_path / "last.ckpt", []
    for limit in (3, 3, 10):
        watch = Watch()  # a new process: its clock starts elsewhere
        watch.now += 1000 * limit
        callbacks = [TimeLimit(limit), Wind(watch, 1), TrainingCheckpoint(path)]
        _, _, trainer = fit(18, Numbered(range(200)), callbacks, ckpt_path=path if path.exists() else None)  # fmt: skip
        steps.append(trainer.global_step)
    assert steps == [3, 3, 10]


def test_validation_takes_no_time_from_a_budget(tmp_path):
    class Timed(Line):
        def configure_optimizers(self):
            schedule = TimeBudgetLR(optimizer := super().configure_optimizers(), 60, base=1.0)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    callbacks = [record := history.History(), TimeLimit(60, 2), Wind(Watch(), 1, 26)]
    make_trainer(-1, "32-true", "cpu", callbacks=callbacks, val_check_steps=10**6).fit(
        Timed(), Numbered(range(200)), Numbered(range(1))
    )
    # Half time and the end: another one would take more than a tenth of the budget.
    assert len(record.rows) == 60 and [row["step"] for row in record.validation] == [30, 60]
    factors = [min(1, 4 * (1 - second / 60)) for second in range(60)]
    np.testing.assert_allclose(record.column("learning_rate"), np.multiply(0.05, factors))


@pytest.mark.parametrize(
    "epochs, expected", [(2, ["step 10/10: ", "0:00 left"]), (-1, ["step 3: "])]
)
def test_a_trainer_that_counts_epochs_has_a_last_step(epochs, expected, capsys):
    class Enough(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = epochs < 0 and trainer.global_step == 3

    record = History()
    L.Trainer(accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False, enable_checkpointing=False,
              enable_model_summary=False, callbacks=[record, ProgressBar(record, 0.0, plain=True), Enough()]
              ).fit(Line(), Numbered(range(5)))  # fmt: skip
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert all(words in lines[-1] for words in expected) and (" left" in lines[-1]) == (epochs > 0)


def test_a_stopped_run_resumes_bit_identically(tmp_path):
    path, val = tmp_path / "last.ckpt", Numbered(range(500, 503))
    adam = lambda w: torch.optim.AdamW(w, lr=0.02)  # noqa: E731
    uninterrupted, record, _ = fit(30, Numbered(range(60)), (), adam, val=val, val_check_steps=4,
                           accumulate_grad_batches=2)  # fmt: skip
    for step in (7, 8):  # between two validations, and at one
        fit(30, Numbered(range(60)), [StopAt(step), TrainingCheckpoint(path)], adam, val=val,
            val_check_steps=4, accumulate_grad_batches=2)  # fmt: skip
        assert torch.load(latest_checkpoint(path), weights_only=True)["global_step"] == step
        resumed, again, _ = fit(30, Numbered(range(60)), (), adam, path, val, val_check_steps=4,
                                accumulate_grad_batches=2)  # fmt: skip
        assert same_weights(uninterrupted, resumed)
        np.testing.assert_array_equal(record.column("train_loss"), again.column("train_loss"))
        in_turn = [v for v in again.validation if v["step"] % 4 == 0]
        assert in_turn == record.validation


@pytest.mark.parametrize("limit", ["10B", 0])
def test_a_wrong_time_limit_is_refused(limit):
    with pytest.raises(ValueError, match=f"limit.*{limit}"):
        TimeLimit(limit)


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_clip_that_leads_uphill_is_refused(value):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with pytest.raises(ValueError, match=f"gradient_clip_val={value}"):
        make_trainer(1, "32-true", "cpu", gradient_clip_val=value)
    trainer = L.Trainer(accelerator="cpu", max_steps=1, gradient_clip_val=value, **quiet)
    with pytest.raises(ValueError, match=f"gradient_clip_val={value}"):
        trainer.fit(Line(), Numbered([0]))


@pytest.mark.parametrize("name", ["stop_above", "stop_below"])
def test_a_loss_to_stop_at_is_a_number(name):
    with pytest.raises(ValueError, match=f"run.{name}=nan"):
        RunConfig(**{name: float("nan")})


def window_weights(sizes, numbers, lr=0.05):
    "The line after plain steps over windows of so many batches, written as a loop."
    line, batches = Line(), iter(Numbered(numbers))
    sgd = torch.optim.SGD(line.parameters(), lr=lr, momentum=0.9)
    for size in sizes:
        rows = [next(batches) for _ in range(size)]
        x = torch.cat([row["x"] for row in rows])
        sgd.zero_grad()
        loss = (line.layer(x)[..., 0] - 1).square().mean()
        loss.backward()
        sgd.step()
    return line


WARMUP = BatchSizeWarmup(1, 4, 120, tokens_per_micro_batch=10)
MOMENTUM = lambda w: torch.optim.SGD(w, lr=0.05, momentum=0.9)  # noqa: E731


def assert_windows(sizes, numbers, batches):
    "Compare a run with the steps on windows of these sizes, taken by hand."
    module, record, trainer = fit(len(sizes), Numbered(numbers), [BatchSizeScheduler(WARMUP)],
                                  MOMENTUM, gradient_clip_val=None)  # fmt: skip
    np.testing.assert_array_equal(
        np.diff(record.column("tokens"), prepend=0), np.multiply(sizes, 10)
    )
    for p, q in zip(module.parameters(), window_weights(sizes, batches).parameters()):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)
    assert trainer.accumulate_grad_batches == 1


def test_windows_grow_and_are_never_cut():
    sizes = [WARMUP(step) for step in range(16)]
    assert sizes == sorted(sizes) and set(sizes) == {1, 2, 3, 4} and sizes.count(3) > 1
    assert_windows(sizes, range(80), range(80))


def test_a_step_ends_with_the_epoch():
    sizes, remaining = [], 7
    for step in range(14):
        size = min(WARMUP(step), remaining)
        sizes.append(size)
        remaining = remaining - size or 7
    assert_windows(sizes, range(7), [i % 7 for i in range(sum(sizes))])


def test_how_the_batch_grows_can_be_said_in_yaml(tmp_path):
    from bertlab.train.run import trainer_options

    options = {"min_size": 1, "max_size": 4, "warmup_tokens": 120, "tokens_per_micro_batch": 10}
    (growing,) = trainer_options(
        {"callbacks": [{"class_path": "BatchSizeScheduler", "init_args": {"warmup": options}}]}
    )["callbacks"]
    assert [growing.warmup(step) for step in range(16)] == [WARMUP(step) for step in range(16)]
    with pytest.raises(TypeError, match="min_sizes"):
        BatchSizeScheduler({**options, "min_sizes": 1})


def test_validation_counts_steps_while_the_batch_grows():
    val = Numbered(range(500, 502))
    _, record, _ = fit(
        16, Numbered(range(80)), [BatchSizeScheduler(WARMUP)], MOMENTUM, val=val, val_check_steps=4
    )
    assert [v["step"] for v in record.validation] == [4, 8, 12, 16]


def test_a_resume_keeps_to_the_windows(tmp_path):
    def grow(steps, *callbacks, path=None):
        callbacks, val = [BatchSizeScheduler(WARMUP), *callbacks], Numbered(range(500, 502))
        loader = Numbered(range(80))
        return fit(steps, loader, callbacks, MOMENTUM, path, val=val, val_check_steps=4)

    uninterrupted, record, _ = grow(16)
    for stop_at in (1, 4, 7, 8, 11):
        path = tmp_path / str(stop_at)
        grow(stop_at, TrainingCheckpoint(path))
        resumed, again, _ = grow(16, path=path)
        assert same_weights(uninterrupted, resumed) and again.validation == record.validation
        for name in ("train_loss", "tokens"):
            np.testing.assert_array_equal(record.column(name), again.column(name))


def test_checkpoints_fall_on_the_ends_of_growing_windows(tmp_path):
    seen = []

    class Noted(TrainingCheckpoint):
        def save(self, trainer, *arguments):
            seen.append((trainer.global_step, int(record.totals()[0])))
            super().save(trainer, *arguments)

    record = History()
    callbacks = [record, BatchSizeScheduler(WARMUP), Noted(tmp_path / "last.ckpt", every_n_steps=3)]
    make_trainer(12, "32-true", "cpu", callbacks=callbacks).fit(Line(MOMENTUM), Numbered(range(80)))
    ends = np.cumsum([WARMUP(step) * 10 for step in range(12)])
    assert seen == [(step, ends[step - 1]) for step in (3, 6, 9, 12)]


def test_a_growth_that_would_not_be_followed_is_refused():
    with pytest.raises(ValueError, match="accumulate_grad_batches=1"):
        fit(2, Numbered(range(9)), [BatchSizeScheduler(WARMUP)], accumulate_grad_batches=2)
    with pytest.raises(ValueError, match="world_size=1"):
        fit(2, Numbered(range(9)), [BatchSizeScheduler(BatchSizeWarmup(1, 4, 120, 10, 2))])


def with_two_clocks(folder):
    "What each of two processes does: the second one's clock is the fast one."
    rank, watch, steps = int(os.environ["RANK"]), Watch(), []

    def run(steps_at_most, callbacks, retained=None):
        data = Numbered(range(200), rank=rank)
        module, _, trainer = fit(
            steps_at_most, data, callbacks, slow, retained, devices=2, strategy="ddp"
        )
        steps.append(trainer.global_step)
        return module

    run(50, [TimeLimit(45), Wind(watch, 10 if rank else 1)])
    set_clocks(time.perf_counter)
    module = run(12, [BatchSizeScheduler(BatchSizeWarmup(1, 4, 240, 10, 2))])
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    torch.save((steps, weights), f"{folder}/{rank}.pt")


def test_two_processes_stop_at_the_same_step(tmp_path):
    run_on_ranks(with_two_clocks, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first[0] == second[0] and torch.equal(first[1], second[1])
    assert first[0][0] < 50 and first[0][1] == 12
