"Histograms describe weights and gradients, whatever they look like."

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from test_training import Texts, equal, train

from bertlab.train.checkpoints import TrainingCheckpoint
from bertlab.train.histograms import WeightHistograms, match_parameters
from bertlab.train.histograms import read_histograms, _log_histogram, tensor_histogram


def test_a_histogram_is_what_one_counts_by_hand():
    h = tensor_histogram(torch.tensor([[0.0, 1.0], [0.0, -3.0]]), 7, "w", "weight", 4)
    assert (h.step, h.name, h.kind) == (7, "w", "weight")
    assert h.counts.tolist() == [1, 0, 0, 3] and h.edges.tolist() == [-3, -2, -1, 0, 1]
    assert (h.mean, h.max_abs, h.zero_share, h.num_not_finite) == (-0.5, 3.0, 0.5, 0)
    assert h.norm == pytest.approx(10**0.5) and h.std == pytest.approx((10 / 4 - 0.25) ** 0.5)


@pytest.mark.parametrize("values, finite", [
    ([float("nan"), 1.0, float("inf"), float("-inf")], 1), ([float("nan")] * 3, 0), ([2.0, 2.0], 2), ([0.0], 1),
    ([3e38, -3e38], 2)])  # fmt: skip
def test_broken_and_constant_tensors_are_counted(values, finite):
    h = tensor_histogram(torch.tensor(values), 0, "w", "weight", 8)
    assert h.counts.sum() == finite and h.num_not_finite == len(values) - finite
    assert np.isfinite([h.mean, h.std, h.norm, h.max_abs, *h.edges]).all()


def test_16_bit_tensors_are_counted():
    h = tensor_histogram(torch.tensor([1.0, -1.0], dtype=torch.bfloat16), 0, "w", "weight", 2)
    assert h.counts.tolist() == [1, 1] and h.norm == pytest.approx(2**0.5)


def test_patterns_choose_names_also_of_compiled_layers():
    layers = {"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)}
    layers["a"] = torch.compile(layers["a"], backend="eager")
    matches = match_parameters(torch.nn.ModuleDict(layers), ["b.*", "*.bias"])
    assert list(matches) == ["a.bias", "b.weight", "b.bias"]


def test_a_pattern_without_a_match_is_refused_before_the_first_step():
    with pytest.raises(ValueError, match=r"'\*\.nothing'"):
        train(Texts(), 4, [WeightHistograms(["*.nothing"])])


def test_gradients_are_divided_by_the_labels_and_clipped():
    clipped, free = WeightHistograms(["*"], 3), WeightHistograms(["*"], 3)
    _, record = train(Texts(), 3, [clipped], dropout=0.0, gradient_clip_val=0.25)
    train(Texts(), 3, [free], dropout=0.0, gradient_clip_val=None)
    norms = [
        np.linalg.norm([h.norm for h in callback.histograms if (h.kind, h.step) == ("gradient", 3)])
        for callback in (clipped, free)
    ]
    assert norms[0] == pytest.approx(0.25, rel=1e-4)
    assert record.column("gradient_norm")[2] > 0.25, "else nothing was clipped"
    assert 0.25 < norms[1] < 100, "a sum over labels, or one scaled down, would be far off"


def test_a_norm_within_the_limit_costs_no_pass_over_the_gradients(monkeypatch):
    calls, clip = [], torch.nn.utils.clip_grads_with_norm_
    monkeypatch.setattr(
        torch.nn.utils, "clip_grads_with_norm_", lambda *args: calls.append(args[1:]) or clip(*args)
    )
    within, _ = train(Texts(), 4, gradient_clip_val=1e9)
    assert not calls
    free, _ = train(Texts(), 4, gradient_clip_val=None)
    assert equal(within, free)
    train(Texts(), 4, gradient_clip_val=1e-3)
    assert len(calls) == 4


def test_weights_are_recorded_before_the_first_step_and_every_n(tmp_path):
    callback = WeightHistograms(["*.bias", "*norm*"], 2, path=tmp_path / "h.npz")
    train(Texts(), 7, [callback])
    assert {(h.step, h.kind) for h in callback.histograms} == {
        (0, "weight"), *((step, tensor_type) for step in (2, 4, 6) for tensor_type in ("weight", "gradient"))
    }  # fmt: skip
    read = read_histograms(tmp_path / "h.npz")
    assert len(read) == len(callback.histograms) > 0
    for histogram, logged in zip(callback.histograms, read):
        for key, value in vars(histogram).items():
            np.testing.assert_array_equal(getattr(logged, key), value)
            assert type(getattr(logged, key)) is type(value), key


def test_histograms_and_bits_survive_a_resume(tmp_path):
    path, make = tmp_path / "last.ckpt", lambda: WeightHistograms(["*norm*"], 2)
    weights, _ = train(Texts(), 8)
    straight, resumed = make(), make()
    watched, _ = train(Texts(), 8, [straight])
    train(Texts(), 4, [make(), TrainingCheckpoint(path)])
    continued, _ = train(Texts(), 8, [resumed, TrainingCheckpoint(path)], path)
    assert equal(weights, watched) and equal(weights, continued)
    for a, b in zip(straight.histograms, resumed.histograms, strict=True):
        assert (a.step, a.name, a.kind) == (b.step, b.name, b.kind)
        np.testing.assert_array_equal(a.counts, b.counts)


def test_tensorboard_gets_the_sums_of_the_values(monkeypatch):
    calls = []

    class Writer:
        def add_histogram_raw(self, tag, **numbers):
            calls.append((tag, numbers))

    monkeypatch.setattr(TensorBoardLogger, "experiment", Writer())
    logger = TensorBoardLogger.__new__(TensorBoardLogger)
    h = tensor_histogram(torch.tensor([1.0, 2.0, -4.0]), 3, "w", "weight", 5)
    _log_histogram(logger, h)
    ((tag, numbers),) = calls
    assert tag == "weight/w" and numbers["bucket_counts"] == h.counts.tolist()
    assert numbers["bucket_limits"] == h.edges[1:].tolist() and numbers["num"] == 3
    assert numbers["sum"] == pytest.approx(-1) and numbers["sum_squares"] == pytest.approx(21)
    assert (numbers["min"], numbers["max"], numbers["global_step"]) == (-4, 2, 3)
