"Limits: what ends a run, after which step, and what a resume makes of it."

import os
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from test_guards import Line, Numbered, fit, same_weights
from ranks import run_on_ranks
from stop_at import StopAt

from bertlab.optim.budgets import BatchSizeWarmup
from bertlab.train.checkpoints import TrainingCheckpoint
from bertlab.train.resume import latest_checkpoint
from bertlab.train.history import History, ProgressBar
from bertlab.train.batch_size import BatchSizeScheduler
from bertlab.train.stopping import TimeLimit
from bertlab.train.trainer import make_trainer


class Watch:
    "A clock that stands still until it is set."

    now = 100.0

    def __call__(self):
        return self.now


TIMER = "lightning.pytorch.callbacks.timer.time"


class Wind(History):
    "Set a watch forward by `seconds` with each batch."

    def __init__(self, watch, seconds):
        super().__init__()
        self.watch, self.seconds = watch, seconds

    state_key = "wind"

    def on_train_batch_start(self, *arguments):
        super().on_train_batch_start(*arguments)
        self.watch.now += self.seconds


def slow(weights):
    return torch.optim.SGD(weights, lr=0.01)


def test_time_ends_the_run_after_a_whole_step(tmp_path, monkeypatch):
    watch, path = Watch(), tmp_path / "last.ckpt"
    monkeypatch.setattr(TIMER, SimpleNamespace(monotonic=watch))
    _, _, trainer = fit(50, Numbered(range(200)), [Wind(watch, 7), TimeLimit("1m30s"), TrainingCheckpoint(path)],
                        accumulate_grad_batches=4)  # fmt: skip
    assert trainer.global_step == 4, "12 batches are 84 seconds, 13 are 91: step 4 is under way"
    assert torch.load(latest_checkpoint(path), weights_only=True)["global_step"] == 4


def test_time_counts_over_all_sessions(tmp_path, monkeypatch):
    path, steps = tmp_path / "last.ckpt", []
    for limit in (3, 3, 10):
        watch = Watch()  # a new process: its clock starts elsewhere
        watch.now += 1000 * limit
        monkeypatch.setattr(TIMER, SimpleNamespace(monotonic=watch))
        callbacks = [Wind(watch, 1), TimeLimit(limit), TrainingCheckpoint(path)]
        _, _, trainer = fit(18, Numbered(range(200)), callbacks, ckpt_path=path if path.exists() else None)  # fmt: skip
        steps.append(trainer.global_step)
    assert steps == [3, 3, 10]


@pytest.mark.parametrize(
    "epochs, expected", [(2, ["step 10/10: ", "0:00 left"]), (-1, ["step 3: "])]
)
def test_a_trainer_that_counts_epochs_has_a_last_step(epochs, expected, capsys):
    class Enough(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = epochs < 0 and trainer.global_step == 3

    history = History()
    L.Trainer(accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False, enable_checkpointing=False,
              enable_model_summary=False, callbacks=[history, ProgressBar(history, 0.0, plain=True), Enough()]
              ).fit(Line(), Numbered(range(5)))  # fmt: skip
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert all(words in lines[-1] for words in expected) and (" left" in lines[-1]) == (epochs > 0)


def test_a_stopped_run_resumes_bit_identically(tmp_path):
    path, val = tmp_path / "last.ckpt", Numbered(range(500, 503))
    adam = lambda w: torch.optim.AdamW(w, lr=0.02)  # noqa: E731
    whole, record, _ = fit(30, Numbered(range(60)), (), adam, val=val, val_check_steps=4,
                           accumulate_grad_batches=2)  # fmt: skip
    for step in (7, 8):  # between two validations, and at one
        fit(30, Numbered(range(60)), [StopAt(step), TrainingCheckpoint(path)], adam, val=val,
            val_check_steps=4, accumulate_grad_batches=2)  # fmt: skip
        assert torch.load(latest_checkpoint(path), weights_only=True)["global_step"] == step
        resumed, again, _ = fit(30, Numbered(range(60)), (), adam, path, val, val_check_steps=4,
                                accumulate_grad_batches=2)  # fmt: skip
        assert same_weights(whole, resumed)
        np.testing.assert_array_equal(record.column("train_loss"), again.column("train_loss"))
        in_turn = [v for v in again.validation if v["step"] % 4 == 0]
        assert in_turn == record.validation


@pytest.mark.parametrize("limit", ["10B", 0])
def test_a_wrong_time_limit_is_refused(limit):
    with pytest.raises(ValueError, match=f"limit.*{limit}"):
        TimeLimit(limit)


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


def test_windows_grow_and_are_never_cut():
    sizes = [WARMUP(step) for step in range(16)]
    assert sizes == sorted(sizes) and set(sizes) == {1, 2, 3, 4} and sizes.count(3) > 1
    module, record, trainer = fit(16, Numbered(range(80)), [BatchSizeScheduler(WARMUP)], MOMENTUM,
                                  gradient_clip_val=None)  # fmt: skip
    np.testing.assert_array_equal(
        np.diff(record.column("tokens"), prepend=0), np.multiply(sizes, 10)
    )
    for p, q in zip(module.parameters(), window_weights(sizes, range(80)).parameters()):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)
    assert trainer.accumulate_grad_batches == 1


def test_a_step_ends_with_the_epoch():
    sizes, left = [], 7
    for step in range(14):
        size = min(WARMUP(step), left)
        sizes.append(size)
        left = left - size or 7
    module, record, _ = fit(14, Numbered(range(7)), [BatchSizeScheduler(WARMUP)], MOMENTUM,
                            gradient_clip_val=None)  # fmt: skip
    np.testing.assert_array_equal(
        np.diff(record.column("tokens"), prepend=0), np.multiply(sizes, 10)
    )
    plain = window_weights(sizes, [i % 7 for i in range(sum(sizes))])
    for p, q in zip(module.parameters(), plain.parameters()):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)


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


@pytest.mark.parametrize("stop_at", [1, 4, 7, 8, 11])
def test_a_resume_keeps_to_the_windows(tmp_path, stop_at):
    path, val = tmp_path / "last.ckpt", Numbered(range(500, 502))
    options = dict(val=val, val_check_steps=4)
    whole, record, _ = fit(
        16, Numbered(range(80)), [BatchSizeScheduler(WARMUP)], MOMENTUM, **options
    )
    stops = [BatchSizeScheduler(WARMUP), TrainingCheckpoint(path)]
    fit(stop_at, Numbered(range(80)), stops, MOMENTUM, **options)
    resumed, again, _ = fit(
        16, Numbered(range(80)), [BatchSizeScheduler(WARMUP)], MOMENTUM, path, **options
    )
    assert same_weights(whole, resumed) and again.validation == record.validation
    np.testing.assert_array_equal(record.column("train_loss"), again.column("train_loss"))
    np.testing.assert_array_equal(record.column("tokens"), again.column("tokens"))


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
    from lightning.pytorch.callbacks import timer

    rank, watch, steps = int(os.environ["RANK"]), Watch(), []

    def run(steps_at_most, callbacks, kept=None):
        data = Numbered(range(200), rank=rank)
        module, _, trainer = fit(
            steps_at_most, data, callbacks, slow, kept, devices=2, strategy="ddp"
        )
        steps.append(trainer.global_step)
        return module

    timer.time = SimpleNamespace(monotonic=watch)
    run(50, [Wind(watch, 10 if rank else 1), TimeLimit(45)])
    module = run(12, [BatchSizeScheduler(BatchSizeWarmup(1, 4, 240, 10, 2))])
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    torch.save((steps, weights), f"{folder}/{rank}.pt")


def test_two_processes_stop_at_the_same_step(tmp_path):
    run_on_ranks(with_two_clocks, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first[0] == second[0] and torch.equal(first[1], second[1])
    assert first[0][0] < 50 and first[0][1] == 12
