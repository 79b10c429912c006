"""What of XLA can be had without it: clear refusals, and counters read right. The rest is in tests/xla."""

import sys
import types
import warnings
from importlib.util import find_spec

import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment

from bertlab.train.checkpoints import AtomicCheckpointIO
from bertlab.model.heads import sample_half_of_pairs, logical_shift_right
from bertlab.train.trainer import make_trainer
from bertlab.train.xla import (
    CompileRecorder,
    warn_on_new_shapes,
    zero_skipped_gradients,
    split_rows,
    restore_skipped,
    xla_counts,
    xla_trainer_options,
)

without_xla = pytest.mark.skipif(
    find_spec("torch_xla") is not None, reason="torch_xla is installed here"
)


@without_xla
def test_a_tpu_without_torch_xla_is_refused_in_one_line_that_says_what_to_install():
    with pytest.raises(ValueError, match=r"bertlab-encoders\[tpu\]") as refused:
        make_trainer(1, accelerator="tpu")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("options", "word"), [
    ({"precision": "16-mixed"}, "bf16-mixed"),
    ({"precision": "32-true", "strategy": "ddp"}, "devices='auto'"),
])  # fmt: skip
def test_what_a_tpu_cannot_do_is_refused_before_torch_xla_is_asked(options, word):
    with pytest.raises(ValueError, match=word) as refused:
        xla_trainer_options(**options)
    assert str(next(v for v in reversed(options.values()))) in str(refused.value)


def test_rows_that_cannot_be_shared_are_refused():
    mesh = types.SimpleNamespace(size=lambda: 4)
    with pytest.raises(ValueError, match="6 rows of labels cannot be split over 4"):
        split_rows({"labels": torch.zeros(6, 8)}, mesh)


def test_a_loader_that_never_settles_on_a_shape_is_warned_of_once():
    shapes = set()
    arrive = lambda length: warn_on_new_shapes(shapes, {"input_ids": torch.zeros(4, length)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (8, 16, 8, 24, 16):
            arrive(length)
    with pytest.warns(UserWarning, match="4 shapes.*fixed_shapes=True"):
        arrive(32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrive(40)


@pytest.fixture
def counters(monkeypatch):
    "torch_xla's own, as its debug module names them."
    counts = {"aten::nonzero": 3, "aten::_local_scalar_dense": 7, "xla::add": 900, "MarkStep": 12}
    metrics = types.ModuleType("torch_xla.debug.metrics")
    metrics.metric_data = {"CompileTime": (5, 1e9, ()), "ExecuteTime": (40, 1e9, ())}.get
    metrics.counter_names, metrics.counter_value = lambda: list(counts), counts.get
    modules = {
        "torch_xla": types.ModuleType("torch_xla"),
        "torch_xla.debug": types.ModuleType("torch_xla.debug"),
    }
    modules["torch_xla.debug"].metrics = metrics
    for name, module in {**modules, "torch_xla.debug.metrics": metrics}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return counts, metrics


def test_a_number_read_by_python_is_no_operation_that_fell_back(counters):
    assert xla_counts() == (5, 40, 7, {"aten::nonzero": 3})


def test_nothing_counted_yet_is_zero(counters):
    counts, metrics = counters
    counts.clear()
    metrics.metric_data = {}.get
    assert xla_counts() == (0, 0, 0, {})


def test_a_recorder_keeps_a_count_of_each_batch(counters):
    recorder = CompileRecorder()
    for programs in (4, 4, 9):
        counters[1].metric_data = {"CompileTime": (programs, 0.0, ())}.get
        recorder.on_train_batch_end(None, None, None, None, 0)
    assert [c.compilations for c in recorder.counts] == [4, 4, 9]


def test_bits_move_right_as_in_a_number_without_a_sign():
    bits = torch.tensor([0, 1, -1, -5, 2**63 - 1, -(2**63), -0x123456789ABCDEF0])
    for places in (0, 1, 30, 31, 63):
        expected = [(word % 2**64) >> places for word in bits.tolist()]
        assert [word % 2**64 for word in logical_shift_right(bits, places).tolist()] == expected


def test_coins_do_not_hang_on_how_a_device_shifts_a_negative_number(monkeypatch):
    keys = torch.tensor([3, -4, 2**62])
    expected = sample_half_of_pairs(keys, 70)

    def towards_zero(bits, places):  # XLA divides by a power of two, and drops the fraction
        return torch.div(bits, 2**places, rounding_mode="trunc")

    monkeypatch.setattr(torch.Tensor, "__rshift__", towards_zero)
    assert torch.equal(sample_half_of_pairs(keys, 70), expected)


@pytest.mark.parametrize("make", [
    lambda weight: torch.optim.AdamW([weight], lr=0.1),
    lambda weight: torch.optim.SGD([weight], lr=0.1, momentum=0.9),
])  # fmt: skip
def test_a_refused_step_changes_neither_weights_nor_moments_also_where_it_is_the_first(make):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = make(weight)

    def step(gradient, skipped):
        weight.grad = torch.full((3,), gradient)
        before = zero_skipped_gradients(optimizer, torch.tensor(skipped))
        optimizer.step()
        restore_skipped(optimizer, torch.tensor(skipped), before)
        moments = [
            v.clone() for k, v in optimizer.state[weight].items() if k != "step" and v is not None
        ]
        return [weight.detach().clone(), *moments]

    first = step(float("nan"), True)
    assert torch.equal(first[0], torch.ones(3)) and not any(moment.any() for moment in first[1:])
    second, third = step(1.0, False), step(float("inf"), True)
    assert not torch.equal(first[0], second[0])
    assert all(map(torch.equal, second, third))


class Bucket(TorchCheckpointIO):
    "Somebody's own way of writing checkpoints."


def test_plugins_of_the_user_stand_beside_ours_unless_they_are_of_the_same_kind():
    writer = lambda **options: make_trainer(1, accelerator="cpu", **options).strategy.checkpoint_io
    for plugins in (None, [], LightningEnvironment(), [LightningEnvironment()]):
        assert type(writer(plugins=plugins)) is AtomicCheckpointIO
    plugin: CheckpointIO = Bucket()
    assert (
        writer(plugins=plugin) is plugin
        and writer(plugins=[LightningEnvironment(), plugin]) is plugin
    )
    half = MixedPrecision("bf16-mixed", "cpu")
    trainer = make_trainer(1, accelerator="cpu", plugins=[half])
    assert trainer.precision_plugin is half
    assert type(trainer.strategy.checkpoint_io) is AtomicCheckpointIO
