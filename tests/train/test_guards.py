"Guards: what refuses a step, and what a run looks like that had bad batches in it."

import csv
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_on_ranks

from bertlab.train.checkpoints import TrainingCheckpoint
from bertlab.train.resume import latest_checkpoint
from bertlab.train.history import History
from bertlab.train.stopping import NonFiniteGuard, SpikeGuard, spike_limits
from bertlab.model.losses import LossSums
from bertlab.optim.optimizers import get_optimizer
from bertlab.train.steps import TrainingModule, _can_flag, skip_step
from bertlab.train.trainer import make_trainer

NAN, INF = float("nan"), float("inf")


class Line(TrainingModule):
    "A linear model whose loss is that of a sum and a count; a batch brings its own factor."

    def __init__(self, make_optimizer=None, width=4):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(width, 1)
        self.make_optimizer = make_optimizer or (lambda weights: torch.optim.SGD(weights, lr=0.05))

    def label_loss(self, batch):
        loss_BL = (self.layer(batch["x"])[..., 0] - 1).square() * batch["factor"][:, None]
        zero = torch.zeros(())
        return LossSums(loss_BL.sum(), torch.tensor(loss_BL.numel()), zero, zero)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.layer(batch["x"]) - 1).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


class Numbered:
    "Batch i is a function of i; some are multiplied by a factor, such as NaN. It can be resumed."

    def __init__(self, numbers, factors=None, rank=0, width=4):
        self.numbers, self.factors, self.rank = list(numbers), factors or {}, rank
        self.width, self.delivered = width, 0

    def __len__(self):
        return len(self.numbers)

    def __iter__(self):
        start = self.delivered if self.delivered < len(self.numbers) else 0
        for position in range(start, len(self.numbers)):
            self.delivered, i = position + 1, self.numbers[position]
            x = torch.randn(
                2, 6, self.width, generator=torch.Generator().manual_seed(7 * i + self.rank)
            )
            mask = torch.ones(2, 6, dtype=torch.long)
            mask[0, 4 - self.rank :] = 0  # 10 real tokens of 12; 9 in a second process
            factor = torch.full((2,), float(self.factors.get(i, 1.0)))
            labels = torch.full((2, 6), -100)
            yield {"x": x, "attention_mask": mask, "factor": factor, "labels": labels}

    def state_dict(self):
        return {"delivered": self.delivered}

    def load_state_dict(self, state):
        self.delivered = state["delivered"]


def fit(steps, loader, callbacks=(), make_optimizer=None, ckpt_path=None, val=None, **options):
    "Train the line; return module, history and trainer."
    module, history = Line(make_optimizer), History()
    options = {"skip_nonfinite": False, **options}  # the guards are those of `callbacks`
    trainer = make_trainer(steps, "32-true", "cpu", callbacks=[history, *callbacks], **options)
    ckpt_path = ckpt_path and (latest_checkpoint(ckpt_path) or ckpt_path)
    trainer.fit(module, loader, val, ckpt_path=ckpt_path)
    return module, history, trainer


def same_weights(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


OPTIMIZERS = {
    "sgd with momentum": lambda w: torch.optim.SGD(w, lr=0.05, momentum=0.9),
    "adamw": lambda w: torch.optim.AdamW(w, lr=0.05, weight_decay=0.1),
    "adamw fused": lambda w: torch.optim.AdamW(w, lr=0.05, weight_decay=0.1, fused=True),
    "rmsprop": lambda w: torch.optim.RMSprop(w, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bad_batches_leave_no_trace_in_the_run(name):
    bad = {0: NAN, 5: INF, 6: NAN, 11: -INF}
    without, _, _ = fit(16, Numbered(i for i in range(20) if i not in bad), (), OPTIMIZERS[name])
    for guard in (NonFiniteGuard(), SpikeGuard(min_steps=2)):
        guarded, record, _ = fit(20, Numbered(range(20), bad), [guard], OPTIMIZERS[name])
        assert same_weights(without, guarded) and guard.num_skipped == 4
        assert not np.isfinite(record.column("train_loss")[[0, 5, 6, 11]]).any()
    unguarded, _, _ = fit(20, Numbered(range(20), bad), (), OPTIMIZERS[name])
    assert not any(p.isfinite().all() for p in unguarded.parameters()), "the control must fail"


def test_a_trainer_skips_nan_steps_unless_told_not_to():
    bad = {3: NAN}
    without, _, _ = fit(9, Numbered(i for i in range(10) if i not in bad))
    guarded, record, trainer = fit(10, Numbered(range(10), bad), skip_nonfinite=True)
    assert same_weights(without, guarded) and record.column("skipped_nonfinite")[-1] == 1
    mine = NonFiniteGuard(3)
    _, _, trainer = fit(10, Numbered(range(10), bad), [mine], skip_nonfinite=True)
    assert [c for c in trainer.callbacks if isinstance(c, NonFiniteGuard)] == [mine]


@pytest.mark.parametrize("build", [
    lambda w: get_optimizer("sgd", w, {"lr": 0.1, "momentum": 0.9}),
    lambda w: get_optimizer("muon", [{"params": w, "hidden": False}], {"lr": 0.1}),  # its inner AdamW is fused
], ids=["sgd", "muon"])  # fmt: skip
def test_a_refused_first_step_leaves_no_momentum(build):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = build([weight])
    weight.grad = torch.full((4,), NAN)
    skip_step(optimizer, torch.tensor(True))
    optimizer.step()
    assert torch.equal(weight.detach(), torch.ones(4))
    weight.grad = torch.ones(4)
    skip_step(optimizer, torch.tensor(False))
    optimizer.step()
    assert weight.isfinite().all() and (weight < 1).all() and len(set(weight.tolist())) == 1


class Labelled(Line):
    "A batch whose factor is 0 has no label."

    def label_loss(self, batch):
        sums = super().label_loss(batch)
        return sums._replace(num_labels=sums.num_labels * (batch["factor"][0] != 0))

    validation_step = TrainingModule.validation_step


class Logged(CSVLogger):
    def __init__(self):
        super().__init__(save_dir="unused")
        self.values = []

    def log_metrics(self, metrics, step=None):
        self.values += metrics.values()

    def save(self):
        pass


def test_batches_without_a_label_leave_no_trace_in_the_run():
    empty, logger = {i: 0.0 for i in range(60) if i % 3 != 1 or i > 50}, Logged()
    guards = lambda: [NonFiniteGuard(2), SpikeGuard(window=8, min_steps=4)]  # noqa: E731

    def train(numbers, factors, **options):
        module, record = Labelled(OPTIMIZERS["adamw"]), History()
        judges = guards()
        trainer = make_trainer(len(numbers), "32-true", "cpu", callbacks=[record, *judges],
                               **options)  # fmt: skip
        trainer.fit(module, Numbered(numbers, factors), Numbered(range(2), {0: 0.0, 1: 0.0}))
        return module, record, [judge.num_skipped for judge in judges]

    without, usual, _ = train([i for i in range(60) if i not in empty], {})
    module, record, skipped = train(range(60), empty, logger=logger, val_check_steps=30,
                                    log_every_n_steps=1)  # fmt: skip
    assert same_weights(without, module) and skipped == [0, 0]
    losses = record.column("train_loss")
    assert np.flatnonzero(np.isnan(losses)).tolist() == list(empty)
    np.testing.assert_array_equal(losses[~np.isnan(losses)], usual.column("train_loss"))
    assert record.validation == [{"step": 30}, {"step": 60}], "no label, no loss"
    assert np.isfinite(logger.values).all() and len(logger.values) > 60


@pytest.mark.parametrize("use", ["validate", "test", "predict"])
def test_a_model_that_is_not_finite_has_no_scores(use):
    module = Labelled()
    module.layer.bias.data.fill_(NAN)
    with pytest.raises(ValueError, match=r"not finite.*layer\.bias"):
        getattr(make_trainer(1, "32-true", "cpu", val_check_steps=1), use)(module, Numbered([0]))


def test_a_gradient_that_overflows_is_refused_though_its_loss_is_finite():
    # loss = factor x ...: finite; the gradient's square sum overflows float32.
    module, record, _ = fit(6, Numbered(range(6), {2: 1e25}), [guard := NonFiniteGuard()])
    assert np.isfinite(record.column("train_loss")).all() and guard.num_skipped == 1
    assert record.column("gradient_norm")[2] == INF


def test_a_bad_micro_batch_spoils_its_window_and_no_other():
    good = [i for i in range(24) if not 8 <= i < 12]
    without, _, _ = fit(5, Numbered(good), accumulate_grad_batches=4)
    guarded, _, trainer = fit(6, Numbered(range(24), {9: NAN}), [guard := NonFiniteGuard()],
                              accumulate_grad_batches=4)  # fmt: skip
    assert same_weights(without, guarded) and guard.num_skipped == 1 and trainer.global_step == 6


def test_too_many_bad_steps_in_a_row_stop_the_run(tmp_path, capsys):
    path, bad = tmp_path / "last.ckpt", {i: NAN for i in range(7, 100)}
    before, _, _ = fit(7, Numbered(range(7)))
    guard = NonFiniteGuard(max_in_a_row=5)
    module, _, trainer = fit(100, Numbered(range(100), bad), [guard, TrainingCheckpoint(path)])
    # The first look that finds five: 7 good steps, then bad ones up to a multiple of five.
    assert trainer.global_step == 15 and guard.num_skipped == 8 and same_weights(before, module)
    assert guard.reason.startswith("8 steps in a row") and "learning_rate" in guard.reason
    assert capsys.readouterr().out.count("stopping after step 15") == 1
    assert torch.load(latest_checkpoint(path), weights_only=True)["global_step"] == 15
    # Resumed on sound data it goes on; what was counted stays counted.
    again = NonFiniteGuard(max_in_a_row=5)
    _, _, trainer = fit(22, Numbered(range(100)), [again], ckpt_path=path)
    assert trainer.global_step == 22 and again.reason is None and again.num_skipped == 8


def test_bad_steps_that_are_not_in_a_row_do_not_stop_the_run():
    bad = {i: NAN for i in range(60) if i % 4}
    _, _, trainer = fit(60, Numbered(range(60), bad), [guard := NonFiniteGuard(max_in_a_row=4)])
    assert trainer.global_step == 60 and guard.num_skipped == 45 and guard.reason is None


def test_limits_are_mean_and_deviation_of_logarithms():
    values = torch.tensor([[1.0, 2.0, 3.0, 6.0, 0.0, 0.0], [5.0, 5.0, 5.0, 5.0, 0.0, 0.0]])
    limits = spike_limits(values, torch.tensor(4), min_steps=3, sigmas=2.0, factors=(1.2, 4.0))
    logs = np.log([1, 2, 3, 6])
    np.testing.assert_allclose(
        limits, [np.exp(np.mean(logs) + 2 * np.std(logs, ddof=1)), 20], rtol=1e-5
    )
    assert spike_limits(values, torch.tensor(2), 3, 2.0, (1.2, 4.0)).tolist() == [INF, INF]
    assert spike_limits(values, torch.tensor(3), 3, 2.0, (1.2, 4.0)).isfinite().all()


def judged(guard, losses, norms=None):
    norms = np.ones(len(losses)) if norms is None else norms
    return [bool(guard.should_skip(torch.tensor(a), torch.tensor(b)))
            for a, b in zip(np.float32(losses), np.float32(norms))]  # fmt: skip


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(2, 12), st.integers(0, 10), st.integers(0, 2**16), st.floats(1.0, 5.0))
def test_the_ring_agrees_with_a_list(window, extra, seed, sigmas):
    rng, min_steps = np.random.default_rng(seed), max(2, window // 2)
    losses, norms = rng.exponential(1.0, (2, 30 + extra)) ** 3
    losses[rng.random(len(losses)) < 0.1] = NAN
    ring_values, expected = [], []
    for now in np.float32(list(zip(losses, norms))):
        limits = np.array([INF, INF])
        if len(ring_values) >= min_steps:
            last = np.log(np.maximum(np.array(ring_values[-window:], dtype=np.float64), 1e-12))
            limits = np.exp(
                last.mean(0) + np.maximum(sigmas * last.std(0, ddof=1), np.log([1.2, 4]))
            )
        expected.append(not (now < limits).all())
        if np.isfinite(now).all():
            ring_values.append(np.minimum(now, limits))
    guard = SpikeGuard(window, min_steps, sigmas)
    assert judged(guard, losses, norms) == expected and guard.num_skipped == sum(expected)


def test_a_spike_is_refused_and_a_dip_is_not():
    rng = np.random.default_rng(0)
    calm = lambda: 3 + 0.1 * rng.standard_normal(70)  # noqa: E731
    for losses, norms, expected in (([4.0], [3.0], True), ([3.0], [13.0], True), ([3.0], [11.0], False),
                                    ([3.3], [3.3], False), ([0.1], [0.1], False)):  # fmt: skip
        guard = SpikeGuard()
        verdicts = judged(guard, [*calm(), *losses], [*calm(), *norms])
        assert verdicts == [False] * 70 + [expected]


def test_nothing_is_refused_before_min_steps_are_known():
    rng = np.random.default_rng(0)
    losses = 3 + 0.01 * rng.standard_normal(64)
    losses[30] = 50.0
    assert not any(judged(SpikeGuard(), losses))


@pytest.fixture(scope="module")
def calm_runs():
    "Losses and gradient norms of real runs like the demo, smaller and larger, in which nothing went wrong."
    with np.load(Path(__file__).parent / "calm_runs.npz") as runs:
        return {name: runs[name].astype(np.float32) for name in runs.files}


def test_no_healthy_step_of_ten_thousand_recorded_ones_is_refused(calm_runs):
    assert sum(losses.size for losses, _ in calm_runs.values()) > 10_000
    for losses, norms in calm_runs.values():
        assert not any(judged(SpikeGuard(), losses, norms))


@pytest.mark.parametrize("spread", [0.1, 0.5])
def test_no_healthy_step_of_a_long_tail_is_refused(spread):
    rng, t = np.random.default_rng(0), np.arange(4_000)
    losses = 3 + 5 * np.exp(-t / 1500) + 0.05 * rng.standard_normal(len(t))
    norms = np.exp(spread * rng.standard_normal(len(t))) * (0.3 + np.exp(-t / 500))
    assert not any(judged(SpikeGuard(), losses, norms))


def test_spikes_among_recorded_steps_are_refused_and_no_other_step(calm_runs):
    for losses, norms in calm_runs.values():
        losses, norms = losses.copy(), norms.copy()
        spikes = np.arange(190, len(losses), 97)  # after the first fall of the loss
        losses[spikes[::2]] *= 3.0
        norms[spikes[1::2]] *= 10.0
        assert np.flatnonzero(judged(SpikeGuard(), losses, norms)).tolist() == spikes.tolist()


def test_a_skipped_step_is_printed_and_logged(tmp_path, capsys):
    from bertlab.train.monitors import build_loggers

    slow = lambda w: torch.optim.SGD(w, lr=0.01)  # noqa: E731
    bad, guards = {30: NAN, 80: 1e4, 83: 1e4}, [SpikeGuard(), NonFiniteGuard(50)]
    fit(99, Numbered(range(100), bad), guards, slow, logger=build_loggers(["csv"], tmp_path))
    message = [line for line in capsys.readouterr().out.splitlines() if "skipped by" in line]
    assert [line.split(":")[0] for line in message] == [
        "step 31 skipped by SpikeGuard", "step 31 skipped by NonFiniteGuard",
        "step 81 skipped by SpikeGuard", "step 84 skipped by SpikeGuard"]  # fmt: skip
    assert "loss nan" in message[0] and "gradient norm" in message[2] and "limit" in message[2]
    (path,) = tmp_path.rglob("metrics.csv")
    with open(path) as file:
        last = [row for row in csv.DictReader(file) if row["step"]][-1]
    # Lightning writes every fiftieth step: the bad ones are not among them, their count is.
    assert float(last["skipped_spikes"]) == 3 - 2 * (int(last["step"]) < 80), last
    assert float(last["skipped_nonfinite"]) == 1


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_non_finite_value_does_not_enter_the_window(bad):
    rng = np.random.default_rng(0)
    losses = 3 + 0.1 * rng.standard_normal(80)
    losses[70:75] = bad
    guard = SpikeGuard()
    verdicts = judged(guard, losses)
    assert verdicts == [70 <= i < 75 for i in range(80)]
    assert guard.recent.values_2W.isfinite().all() and guard.recent.num_seen == 75


def test_one_huge_spike_does_not_hide_the_next():
    rng = np.random.default_rng(0)
    losses = 3 + 0.1 * rng.standard_normal(120)
    spikes = [70, 80, 85, 90, 95, 100]
    losses[spikes] = [1e6, 6.0, 6.0, 6.0, 6.0, 6.0]
    assert [i for i, bad in enumerate(judged(SpikeGuard(), losses)) if bad] == spikes


def test_a_level_that_lasts_is_accepted_in_the_end():
    rng = np.random.default_rng(0)
    losses = 3 + 0.1 * rng.standard_normal(200)
    losses[100:] += 7
    refused = [i for i, bad in enumerate(judged(SpikeGuard(), losses)) if bad]
    assert refused[0] == 100 and len(refused) < 64 and max(refused) < 170
    alike = [2.0] * 100 + [5.0] * 150  # no spread at all
    assert not judged(SpikeGuard(), alike)[-1]


def test_both_guards_agree_with_each_alone_and_a_nan_is_counted_in_a_row():
    slow = lambda w: torch.optim.SGD(w, lr=0.01)  # noqa: E731
    guards = [SpikeGuard(), NonFiniteGuard(3)]
    _, record, trainer = fit(90, Numbered(range(90), {70: 1e4, 75: NAN}), guards, slow)
    assert [guard.num_skipped for guard in guards] == [2, 1]


def test_counts_and_histories_survive_a_resume(tmp_path):
    make = lambda: [SpikeGuard(), NonFiniteGuard()]  # noqa: E731
    slow = lambda w: torch.optim.AdamW(w, lr=0.01, fused=True)  # noqa: E731
    loader = lambda: Numbered(range(90), {70: 1e4, 71: NAN, 75: 1e4, 80: 1e4})  # noqa: E731
    uninterrupted, record, _ = fit(90, loader(), guards := make(), slow)
    for stop_at in (40, 71, 76):
        path = tmp_path / str(stop_at)
        fit(stop_at, loader(), [*make(), TrainingCheckpoint(path)], slow)
        resumed, again, _ = fit(90, loader(), later := make(), slow, path)
        assert same_weights(uninterrupted, resumed)
        assert [g.num_skipped for g in guards] == [g.num_skipped for g in later] == [4, 1]
        assert torch.equal(guards[0].recent.values_2W, later[0].recent.values_2W)
        np.testing.assert_array_equal(record.column("train_loss"), again.column("train_loss"))


def test_another_window_after_a_resume_starts_afresh():
    guard, another = SpikeGuard(8, 4), SpikeGuard(16, 4)
    judged(guard, [1.0, 2.0, 1.0, 2.0, 90.0])
    another.load_state_dict(guard.state_dict())
    assert another.num_skipped == 1 and another.recent.num_seen == 0
    assert not any(judged(another, [1.0, 2.0, 1.0, 90.0]))


def test_a_verdict_is_a_tensor_of_the_same_shape_whatever_the_data():
    guard = SpikeGuard(4, 2)
    for loss in (1.0, 1.0, 9.0, NAN, 1.0):
        for judge in (guard, NonFiniteGuard()):
            verdict = judge.should_skip(torch.tensor(loss, requires_grad=True), torch.tensor(1.0))
            assert verdict.dtype == torch.bool and verdict.shape == () and not verdict.requires_grad


@pytest.mark.parametrize(("make", "words"), [
    (lambda: NonFiniteGuard(0), "max_in_a_row"),
    (lambda: SpikeGuard(window=10, min_steps=11), "min_steps=11"),
    (lambda: SpikeGuard(min_steps=1), "min_steps=1"),
    (lambda: SpikeGuard(sigmas=0), "sigmas"),
    (lambda: SpikeGuard(loss_factor=1.0), "loss_factor=1.0"),
    (lambda: SpikeGuard(norm_factor=0.5), "norm_factor=0.5"),
])  # fmt: skip
def test_a_guard_that_cannot_work_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def with_one_bad_rank(folder):
    "What each of two processes does: the second one meets bad batches."
    rank = int(os.environ["RANK"])
    bad = {5: NAN, 70: 1e4, **{i: NAN for i in range(90, 200)}} if rank == 1 else {}
    guards = [NonFiniteGuard(4), SpikeGuard()]
    slow = lambda w: torch.optim.AdamW(w, lr=0.01, fused=True)
    module, record, trainer = fit(
        200, Numbered(range(200), bad, rank), guards, slow, devices=2, strategy="ddp"
    )
    torch.save(
        (
            torch.cat([p.detach().flatten() for p in module.parameters()]),
            trainer.global_step,
            [g.num_skipped for g in guards],
            guards[0].reason,
            record.column("tokens").tolist(),
        ),
        f"{folder}/{rank}.pt",
    )


def test_two_processes_decide_alike_about_one_bad_batch(tmp_path):
    run_on_ranks(with_one_bad_rank, str(tmp_path))
    guard_1, two = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1))
    assert torch.equal(guard_1[0], two[0]) and guard_1[0].isfinite().all()
    assert (
        guard_1[1:] == two[1:]
        and guard_1[1] == 96
        and guard_1[2] == [7, 8]
        and "6 steps" in guard_1[3]
    )
    assert guard_1[4] == [19 * step for step in range(1, 97)], "tokens of both processes"


def test_fused_kernels_that_read_no_flag_are_given_none():
    "Apple's take no notice of `found_inf`, so that a step they were to skip would be taken."

    def flagged(device):
        group = {"fused": True, "params": [torch.nn.Parameter(torch.ones(2, device=device))]}
        return _can_flag(SimpleNamespace(_step_supports_amp_scaling=True, param_groups=[group]))

    assert flagged("cpu") and not flagged("meta")
