"Limits: what ends a run, after which step, and what a resume makes of it."

import os

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from test_guards import NAN, Line, Numbered, fit, same_weights
from ranks import run_on_ranks

from bertlab.optim.budgets import BatchSizeWarmup
from bertlab.train.checkpoints import RunCheckpoint
from bertlab.train.history import History, ProgressBar
from bertlab.train.stopping import (
    BatchSizeScheduler,
    LossBound,
    LossInterval,
    NonFiniteGuard,
    RunningLoss,
)
from bertlab.train.stopping import TimeLimit, TokenLimit
from bertlab.train.trainer import make_trainer


class Watch:
    "A clock that stands still until it is set."

    now = 100.0

    def __call__(self):
        return self.now


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


def test_time_is_over_after_the_step_under_way(tmp_path, capsys):
    watch, path = Watch(), tmp_path / "last.ckpt"
    limit = TimeLimit("1m30s", clock=watch)
    _, _, trainer = fit(50, Numbered(range(200)), [Wind(watch, 7), limit, RunCheckpoint(path)],
                        accumulate_grad_batches=4)  # fmt: skip
    assert trainer.global_step == 4, "12 batches are 84 seconds, 13 are 91: step 4 is under way"
    assert limit.reason == "90 seconds of all sessions are over (limit='1m30s')"
    assert f"stopping after step 4: {limit.reason}" in capsys.readouterr().out
    assert torch.load(path, weights_only=True)["global_step"] == 4


@pytest.mark.parametrize(("per_session", "steps"), [(False, [3, 3, 10]), (True, [3, 6, 16])])
def test_time_counts_over_all_sessions_or_in_each(tmp_path, per_session, steps):
    path, got = tmp_path / "last.ckpt", []
    for limit in (3, 3, 10):
        watch = Watch()  # a new process: its clock starts elsewhere
        watch.now += 1000 * limit
        callbacks = [Wind(watch, 1), TimeLimit(limit, per_session, watch), RunCheckpoint(path)]
        kept = path if path.exists() else None
        _, _, trainer = fit(18, Numbered(range(200)), callbacks, ckpt_path=kept)
        got.append(trainer.global_step)
    assert got == steps


@pytest.mark.parametrize(
    "epochs, said", [(2, ["step 10/10: ", "0:00 left"]), (-1, ["step 3/-1: "])]
)
def test_a_trainer_that_counts_epochs_has_a_last_step_or_no_time_left(epochs, said, capsys):
    class Enough(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = epochs < 0 and trainer.global_step == 3

    history = History()
    L.Trainer(accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False, enable_checkpointing=False,
              enable_model_summary=False, callbacks=[history, ProgressBar(history, 0.0, plain=True), Enough()]
              ).fit(Line(), Numbered(range(5)))  # fmt: skip
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert all(words in lines[-1] for words in said) and (" left" in lines[-1]) == (epochs > 0)


def test_two_time_limits_stand_side_by_side(tmp_path):
    limits = [TimeLimit("1d"), TimeLimit("2h30m", per_session=True)]
    path = tmp_path / "last.ckpt"
    fit(3, Numbered(range(9)), [*limits, RunCheckpoint(path)])
    keys = [k for k in torch.load(path, weights_only=True)["callbacks"] if "TimeLimit" in k]
    assert len(keys) == 2 and [limit.seconds for limit in limits] == [86_400, 9_000]


@pytest.mark.parametrize("window", [1, 3])
def test_tokens_end_the_run_at_the_first_step_that_has_them(window):
    # A batch has 10 real tokens of 12 positions.
    for wanted in (1, 40, 41, 300, 995):
        limit = TokenLimit(wanted)
        _, record, trainer = fit(200, Numbered(range(400)), [limit], slow,
                                 accumulate_grad_batches=window)  # fmt: skip
        assert trainer.global_step == -(-wanted // (10 * window)) and limit.num_tokens() >= wanted
        assert f"{wanted:,} were asked" in limit.reason


def test_tokens_are_counted_to_the_end_of_a_run_that_nothing_stops():
    _, _, trainer = fit(7, Numbered(range(400)), [limit := TokenLimit("1B")], slow)
    assert trainer.global_step == 7 and limit.num_tokens() == 70 and limit.reason is None


def test_few_looks_find_the_end():
    looks = []

    class Counted(TokenLimit):
        def num_tokens(self):
            looks.append(1)
            return super().num_tokens()

    _, _, trainer = fit(600, Numbered(range(600)), [Counted("5k tokens")], slow)
    assert trainer.global_step == 500 and len(looks) < 20


def test_tokens_count_over_a_resume(tmp_path):
    path = tmp_path / "last.ckpt"
    fit(7, Numbered(range(100)), [TokenLimit(220), RunCheckpoint(path)], slow)
    limit = TokenLimit(220)
    resumed, _, trainer = fit(50, Numbered(range(100)), [limit, RunCheckpoint(path)], slow, path)
    assert trainer.global_step == 22 and limit.num_tokens() == 220
    whole, _, _ = fit(22, Numbered(range(100)), (), slow)
    assert same_weights(whole, resumed)
    # Nothing is left: not one more step.
    after, _, trainer = fit(50, Numbered(range(100)), [again := TokenLimit(220)], slow, path)
    assert trainer.global_step == 22 and again.reason and same_weights(after, resumed)


def test_a_stop_goes_on_bit_identically_even_where_it_validated_out_of_turn(tmp_path):
    path, val = tmp_path / "last.ckpt", Numbered(range(500, 503))
    adam = lambda w: torch.optim.AdamW(w, lr=0.02)  # noqa: E731
    whole, record, _ = fit(30, Numbered(range(60)), (), adam, val=val, val_check_steps=4,
                           accumulate_grad_batches=2)  # fmt: skip
    for tokens in (7 * 20, 8 * 20):  # between two validations, and at one
        fit(30, Numbered(range(60)), [TokenLimit(tokens), RunCheckpoint(path)], adam, val=val,
            val_check_steps=4, accumulate_grad_batches=2)  # fmt: skip
        assert torch.load(path, weights_only=True)["global_step"] == tokens // 20
        resumed, again, _ = fit(30, Numbered(range(60)), (), adam, path, val, val_check_steps=4,
                                accumulate_grad_batches=2)  # fmt: skip
        assert same_weights(whole, resumed)
        np.testing.assert_array_equal(record.column("train_loss"), again.column("train_loss"))
        in_turn = [v for v in again.validation if v["step"] % 4 == 0]
        assert in_turn == record.validation


def test_min_steps_of_the_trainer_come_first():
    # min_steps alone makes Lightning want a whole epoch, too.
    for minimum, last in (({"min_steps": 9, "min_epochs": 0}, 9), ({"min_steps": 9}, 20)):
        _, _, trainer = fit(50, Numbered(range(20)), [limit := TokenLimit(30)], **minimum)
        assert trainer.global_step == last and limit.reason


def test_the_running_loss_is_the_mean_of_the_last_accepted_steps():
    running, losses = RunningLoss(4), [8.0, 4.0, 3.0, 1.0, 6.0]
    for loss in losses[:3]:
        running.add(torch.tensor(loss))
    assert running.value is None
    running.add(torch.tensor(99.0), torch.tensor(True))  # skipped
    running.add(torch.tensor(1.0), torch.tensor(False))
    assert running.value == 4.0
    running.add(torch.tensor(6.0))
    assert running.value == (4.0 + 3.0 + 1.0 + 6.0) / 4


def test_a_target_that_is_reached_ends_the_run():
    _, free, _ = fit(200, Numbered(range(200)))
    target = float(free.column("train_loss")[60:80].mean())
    bound = LossBound(below=target, smooth_steps=5)
    _, record, trainer = fit(200, Numbered(range(200)), [bound])
    assert 10 <= trainer.global_step < 100 and trainer.global_step % 10 == 0
    assert "target is reached" in bound.reason
    np.testing.assert_array_equal(
        record.column("train_loss"), free.column("train_loss")[: trainer.global_step]
    )


def test_a_run_that_diverges_ends_and_a_nan_is_divergence():
    fast = lambda w: torch.optim.SGD(w, lr=0.9)  # noqa: E731
    bound = LossBound(above=50.0, smooth_steps=10)
    _, record, trainer = fit(100, Numbered(range(100)), [bound], fast, gradient_clip_val=None)
    assert trainer.global_step < 100 and "diverges" in bound.reason
    bound = LossBound(above=50.0, smooth_steps=5)
    _, _, trainer = fit(100, Numbered(range(100), {31: NAN}), [bound])
    assert trainer.global_step == 40 and "nan" in bound.reason


def test_a_skipped_step_is_not_in_the_running_loss():
    bad = {31: NAN, 33: NAN}
    bound = LossBound(above=50.0, smooth_steps=5)
    _, _, trainer = fit(60, Numbered(range(60), bad), [NonFiniteGuard(), bound])
    assert trainer.global_step == 60 and bound.reason is None


def test_the_running_loss_survives_a_resume(tmp_path):
    path, make = tmp_path / "last.ckpt", lambda: LossBound(below=-1.0, smooth_steps=30)
    whole = make()
    fit(47, Numbered(range(60)), [whole])
    fit(23, Numbered(range(60)), [make(), RunCheckpoint(path)])
    fit(47, Numbered(range(60)), [resumed := make()], ckpt_path=path)
    assert torch.equal(whole.running.values_N, resumed.running.values_N)
    assert whole.running.value == resumed.running.value and resumed.running.num_seen == 47


def test_a_bound_can_look_at_the_validation():
    val = Numbered(range(500, 503))
    bound = LossBound(below=0.5, monitor="val_loss")
    _, record, trainer = fit(200, Numbered(range(200)), [bound], val=val, val_check_steps=5)
    values = [v["val_loss"] for v in record.validation]
    assert values[-1] < 0.5 and all(v >= 0.5 for v in values[:-1])
    assert trainer.global_step == 5 * len(values) and bound.reason.startswith("val_loss")
    with pytest.raises(ValueError, match="val_los.*logged are.*val_loss"):
        fit(
            20,
            Numbered(range(20)),
            [LossBound(below=0.5, monitor="val_los")],
            val=val,
            val_check_steps=5,
        )


@pytest.mark.parametrize(("make", "words"), [
    (lambda: TimeLimit("10B"), "a time"),
    (lambda: TimeLimit(0), "more than 0"),
    (lambda: TokenLimit("2h"), "must be tokens"),
    (lambda: TokenLimit(0), "1 token"),
    (lambda: LossBound(), "below"),
    (lambda: LossBound(below=2.0, above=1.0), "below=2.0"),
    (lambda: LossInterval(below=NAN, above=1.0), "below=nan"),
    (lambda: LossBound(below=1.0, smooth_steps=0), "smooth_steps"),
])  # fmt: skip
def test_a_limit_that_makes_no_sense_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


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


def test_a_step_ends_with_the_epoch_and_the_next_begins_at_the_next():
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
    stops = [BatchSizeScheduler(WARMUP), RunCheckpoint(path)]
    fit(stop_at, Numbered(range(80)), stops, MOMENTUM, **options)
    resumed, again, _ = fit(
        16, Numbered(range(80)), [BatchSizeScheduler(WARMUP)], MOMENTUM, path, **options
    )
    assert same_weights(whole, resumed) and again.validation == record.validation
    np.testing.assert_array_equal(record.column("train_loss"), again.column("train_loss"))
    np.testing.assert_array_equal(record.column("tokens"), again.column("tokens"))


def test_periodic_checkpoints_fall_on_the_ends_of_growing_windows(tmp_path):
    seen = []

    class Noted(RunCheckpoint):
        def save(self, trainer):
            seen.append((trainer.global_step, int(record.totals()[0])))
            super().save(trainer)

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
    rank, watch, steps, path = int(os.environ["RANK"]), Watch(), [], f"{folder}/last.ckpt"

    def run(steps_at_most, callbacks, kept=None):
        data = Numbered(range(200), rank=rank)
        module, _, trainer = fit(
            steps_at_most, data, callbacks, slow, kept, devices=2, strategy="ddp"
        )
        steps.append(trainer.global_step)
        return module

    run(50, [Wind(watch, 10 if rank else 1), TimeLimit(45, clock=watch)])
    run(50, [TokenLimit(205), RunCheckpoint(path)])
    limit = TokenLimit(415)
    run(50, [limit], path)
    run(50, [LossBound(below=1.6, smooth_steps=5)])
    module = run(12, [BatchSizeScheduler(BatchSizeWarmup(1, 4, 240, 10, 2))])
    torch.save(
        (steps, limit.num_tokens(), torch.cat([p.detach().flatten() for p in module.parameters()])),
        f"{folder}/{rank}.pt",
    )


def test_two_processes_stop_at_the_same_step(tmp_path):
    run_on_ranks(with_two_clocks, str(tmp_path))
    one, two = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert one[:2] == two[:2] and torch.equal(one[2], two[2])
    # Rank 1's clock is the fast one; a step has 20 tokens of both; 205 and 415 are not whole steps.
    assert one[0][:3] == [5, 11, 21] and one[0][3] < 50 and one[0][4] == 12 and one[1] == 420
