"Histograms say what weights and gradients look like, whatever they look like, and stay small."

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from test_training import CONFIG, Texts, equal, train

from bertlab.train.checkpoints import TrainingCheckpoint
from bertlab.train.histograms import (
    thin,
    WeightHistograms,
    histogram_grid,
    match_parameters,
)
from bertlab.train.histograms import read_histograms, log_histogram, tensor_histogram
from bertlab.train.modules import PretrainingModule


def test_a_summary_is_what_one_counts_by_hand():
    s = tensor_histogram(torch.tensor([[0.0, 1.0], [0.0, -3.0]]), 7, "w", "weight", 4)
    assert (s.step, s.name, s.kind) == (7, "w", "weight")
    assert s.counts.tolist() == [1, 0, 0, 3] and s.edges.tolist() == [-3, -2, -1, 0, 1]
    assert (s.mean, s.max_abs, s.zero_share, s.num_not_finite) == (-0.5, 3.0, 0.5, 0)
    assert s.norm == pytest.approx(10**0.5) and s.std == pytest.approx((10 / 4 - 0.25) ** 0.5)


@pytest.mark.parametrize("values, finite", [
    ([float("nan"), 1.0, float("inf"), float("-inf")], 1), ([float("nan")] * 3, 0), ([2.0, 2.0], 2), ([0.0], 1),
    ([3e38, -3e38], 2)])  # fmt: skip
def test_broken_and_constant_tensors_are_counted_without_an_error(values, finite):
    s = tensor_histogram(torch.tensor(values), 0, "w", "weight", 8)
    assert s.counts.sum() == finite and s.num_not_finite == len(values) - finite
    assert np.isfinite([s.mean, s.std, s.norm, s.max_abs, *s.edges]).all()


def test_sixteen_bits_are_counted_as_the_numbers_they_are():
    s = tensor_histogram(torch.tensor([1.0, -1.0], dtype=torch.bfloat16), 0, "w", "weight", 2)
    assert s.counts.tolist() == [1, 1] and s.norm == pytest.approx(2**0.5)


def test_patterns_choose_names_and_a_pattern_without_a_match_is_refused():
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    assert list(match_parameters(module, ["b.*", "*.bias"])) == ["a.bias", "b.weight", "b.bias"]
    with pytest.raises(ValueError, match=r"'c\.\*'.*a\.weight"):
        match_parameters(module, ["a.*", "c.*"])
    for wrong in ("*.weight", []):
        with pytest.raises(ValueError, match="list of globs"):
            WeightHistograms(wrong)
    with pytest.raises(ValueError, match="bins=0"):
        WeightHistograms(["*"], bins=0)


def test_what_a_compiler_adds_to_names_is_no_part_of_them():
    compiled = torch.nn.ModuleDict({"a": torch.compile(torch.nn.Linear(2, 2), backend="eager")})
    assert list(match_parameters(compiled, ["a.weight"])) == ["a.weight"]


def test_a_pattern_is_refused_before_the_first_step():
    with pytest.raises(ValueError, match="nothing"):
        train(Texts(), 4, [WeightHistograms(["*.nothing"])])


@pytest.mark.parametrize("max_steps, offered", [(4, 3), (4, 4), (4, 5), (4, 100), (1, 9), (8, 64)])
def test_recordings_stay_few_and_evenly_spaced_from_the_first(max_steps, offered):
    records, stride = {}, 1
    for recording in range(offered):
        if recording % stride == 0:
            records[10 * recording] = []
            stride = thin(records, stride, max_steps)
    steps = list(records)
    assert steps[0] == 0 and len(steps) <= max_steps and len(set(np.diff(steps))) <= 1
    if offered > max_steps > 1:
        assert len(steps) > max_steps // 2, "no more is dropped than must be"


def test_gradients_are_those_the_optimizer_saw_divided_by_the_labels_and_clipped():
    clipped, free = WeightHistograms(["*"], 3), WeightHistograms(["*"], 3)
    _, record = train(Texts(), 3, [clipped], dropout=0.0, gradient_clip_val=0.25)
    train(Texts(), 3, [free], dropout=0.0, gradient_clip_val=None)
    whole = {}
    for name, callback in (("clipped", clipped), ("free", free)):
        gradients = [s.norm for s in callback.histograms if s.kind == "gradient" and s.step == 3]
        assert len(gradients) == len(
            [s for s in callback.histograms if s.kind == "weight" and s.step == 3]
        )
        whole[name] = np.linalg.norm(gradients)
    assert whole["clipped"] == pytest.approx(0.25, rel=1e-4)
    assert record.column("gradient_norm")[2] > 0.25, "else nothing was clipped"
    assert 0.25 < whole["free"] < 100, "a sum over labels, or one scaled down, would be far off"


def test_a_norm_within_the_limit_costs_no_pass_over_the_gradients(monkeypatch):
    asked, clip = [], torch.nn.utils.clip_grads_with_norm_
    monkeypatch.setattr(
        torch.nn.utils, "clip_grads_with_norm_", lambda *args: asked.append(args[1:]) or clip(*args)
    )
    far, _ = train(Texts(), 4, gradient_clip_val=1e9)
    assert not asked
    free, _ = train(Texts(), 4, gradient_clip_val=None)
    assert all(torch.equal(a, b) for a, b in zip(far.values(), free.values()))
    train(Texts(), 4, gradient_clip_val=1e-3)
    assert len(asked) == 4


def test_weights_are_recorded_before_the_first_step_and_then_every_n(tmp_path):
    callback = WeightHistograms(["*.bias", "*norm*"], 2, path=tmp_path / "h.npz")
    train(Texts(), 7, [callback])
    assert sorted(callback.records) == [0, 2, 4, 6]
    assert {s.kind for s in callback.records[0]} == {"weight"}
    assert {s.kind for s in callback.records[2]} == {"weight", "gradient"}
    read = read_histograms(tmp_path / "h.npz")
    assert len(read) == len(callback.histograms) > 0
    for ours, theirs in zip(callback.histograms, read):
        for key, value in vars(ours).items():
            np.testing.assert_array_equal(getattr(theirs, key), value)
            assert type(getattr(theirs, key)) is type(value), key
    assert [p.name for p in tmp_path.iterdir()] == ["h.npz"]


def test_records_and_bits_survive_a_resume(tmp_path):
    path, make = tmp_path / "last.ckpt", lambda: WeightHistograms(["*norm*"], 2)
    weights, _ = train(Texts(), 8)
    whole, parts = make(), make()
    watched, _ = train(Texts(), 8, [whole])
    train(Texts(), 4, [make(), TrainingCheckpoint(path)])
    resumed, _ = train(Texts(), 8, [parts, TrainingCheckpoint(path)], path)
    assert equal(weights, watched) and equal(weights, resumed)
    assert list(parts.records) == [0, 2, 4, 6, 8]
    for a, b in zip(whole.histograms, parts.histograms):
        np.testing.assert_array_equal(a.counts, b.counts)


def test_a_grid_keeps_every_number_and_its_place():
    rng = np.random.default_rng(0)
    tensors = [rng.normal(0, scale, 4000) for scale in (1.0, 0.1)]
    summaries = [
        tensor_histogram(torch.tensor(t), i, "w", "weight", 64) for i, t in enumerate(tensors)
    ]
    steps, edges, shares = histogram_grid(summaries, "w", bins=40)
    assert steps.tolist() == [0, 1] and shares.shape == (2, 40) and len(edges) == 41
    np.testing.assert_allclose(shares.sum(1), 1)
    for row, tensor in zip(shares, tensors):
        exact = np.histogram(tensor, edges)[0] / len(tensor)
        assert np.abs(np.cumsum(row) - np.cumsum(exact)).max() < 0.05
    with pytest.raises(ValueError, match=r"'v'.*w \(weight\)"):
        histogram_grid(summaries, "v")


class Writer:
    def __init__(self):
        self.calls = []

    def add_histogram_raw(self, tag, **numbers):
        self.calls.append((tag, numbers))


class StandIn(TensorBoardLogger):
    "TensorBoard's logger without TensorBoard."

    def __init__(self):
        self.writer = Writer()

    experiment = property(lambda self: self.writer)
    name = version = save_dir = property(lambda self: "x")

    def __getattr__(self, key):
        return {"_save_dir": "x"}.get(key)

    log_dir = property(lambda self: "x")

    def log_metrics(self, *args, **options):
        "Nothing."

    log_hyperparams = log_graph = finalize = save = after_save_checkpoint = log_metrics


def test_tensorboard_gets_the_same_counts(tmp_path):
    logger, callback = StandIn(), WeightHistograms(["*norm*"], 2)
    train(Texts(), 4, [callback], logger=logger)
    assert len(logger.writer.calls) == len(callback.histograms) > 0
    tag, numbers = logger.writer.calls[-1]
    last = callback.histograms[-1]
    assert tag == f"{last.kind}/{last.name}" and numbers["bucket_counts"] == last.counts.tolist()
    assert (
        numbers["bucket_limits"] == last.edges[1:].tolist() and numbers["num"] == last.counts.sum()
    )


def test_sums_for_tensorboard_are_those_of_the_numbers():
    logger, values = StandIn(), torch.tensor([1.0, 2.0, -4.0])
    log_histogram(logger, tensor_histogram(values, 3, "w", "weight", 5))
    ((_, numbers),) = logger.writer.calls
    assert numbers["sum"] == pytest.approx(-1) and numbers["sum_squares"] == pytest.approx(21)
    assert (numbers["min"], numbers["max"], numbers["global_step"]) == (-4, 2, 3)


def test_names_of_the_model_match_what_the_documentation_shows():
    module = PretrainingModule(CONFIG)
    module.configure_model()
    assert match_parameters(module, ["*.weight", "*norm*"])
