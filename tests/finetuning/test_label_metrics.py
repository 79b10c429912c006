"Scores of labels and numbers: scikit-learn's and scipy's, whatever is ignored and however the data is cut."

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sk

from bertlab.finetuning.metrics import score_decisions, score_labels, score_values

BATCHES = settings(derandomize=True, deadline=None, max_examples=25)


def sklearn_scores(true, predicted) -> dict[str, float]:
    "scikit-learn's defaults: a macro mean is over the labels that are predicted or true."
    macro = {"average": "macro", "zero_division": 0}
    return {
        "accuracy": sk.accuracy_score(true, predicted),
        "f1_macro": sk.f1_score(true, predicted, **macro),
        "f1_micro": sk.f1_score(true, predicted, average="micro", zero_division=0),
        "precision_macro": sk.precision_score(true, predicted, **macro),
        "recall_macro": sk.recall_score(true, predicted, **macro),
        "mcc": sk.matthews_corrcoef(true.ravel(), predicted.ravel()),
    }


def values_of(metrics) -> dict[str, float]:
    return {name: metric.compute().item() for name, metric in metrics.items()}


def feed(metrics, preds, target) -> None:
    for metric in metrics.values():
        metric.update(preds, target)


@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=40),
)
@BATCHES
@pytest.mark.filterwarnings("ignore")  # scikit-learn warns about labels that do not occur
def test_label_scores_are_scikit_learns(num_labels, pairs):
    predicted, true = np.array(pairs).T % num_labels
    metrics = score_labels(num_labels)
    feed(metrics, torch.from_numpy(predicted), torch.from_numpy(true))
    assert values_of(metrics) == pytest.approx(sklearn_scores(true, predicted), abs=1e-6)


@pytest.mark.filterwarnings("ignore:A single label")
@pytest.mark.parametrize(
    "true, predicted", [([1, 1], [1, 1]), ([1, 1], [0, 0]), ([0, 1], [1, 1]), ([2], [2])]
)
def test_where_nothing_varies_the_correlation_is_0_as_in_scikit_learn(true, predicted):
    metrics = score_labels(3)
    feed(metrics, torch.tensor(predicted), torch.tensor(true))
    assert metrics["mcc"].compute() == 0 == sk.matthews_corrcoef(true, predicted)


def test_a_label_that_never_occurs_does_not_lower_a_macro_mean():
    true = [0, 0, 1, 1]
    metrics = score_labels(4)  # labels 2 and 3 are neither true nor predicted
    feed(metrics, torch.tensor(true), torch.tensor(true))
    assert metrics["f1_macro"].compute() == 1 == sk.f1_score(true, true, average="macro")


def test_the_correlation_stays_exact_where_float32_would_not():
    confusion = np.array([[4_000_000, 3_000], [2_000, 70]])  # products of order 1e13
    metrics = score_labels(2)
    metrics["mcc"].metric.confmat += torch.from_numpy(confusion)
    (tn, fp), (fn, tp) = confusion.astype(object)
    expected = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    metrics["mcc"].metric._update_count = 1
    assert metrics["mcc"].compute().item() == pytest.approx(expected, rel=1e-5)


def test_scores_of_tokens_are_those_of_the_labelled_tokens_alone():
    draw = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(4, 7, 3, generator=draw), torch.randint(3, (4, 7), generator=draw)
    ignored = torch.rand(4, 7, generator=draw) < 0.4
    target = labels.masked_fill(ignored, -100)
    scores[ignored] *= -1e4  # what stands at an ignored place must not matter
    metrics = score_labels(3)
    feed(metrics, scores, target)
    expected = sklearn_scores(labels[~ignored].numpy(), scores.argmax(-1)[~ignored].numpy())
    assert values_of(metrics) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scores_may_have_any_precision(dtype):
    metrics = score_labels(2)
    feed(metrics, torch.tensor([[2.0, 1.0], [0.0, 3.0]], dtype=dtype), torch.tensor([0, 0]))
    assert metrics["accuracy"].compute() == 0.5


def test_decisions_are_scikit_learns_even_if_all_logits_lie_between_0_and_1():
    true = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 0]])
    logits = np.array([[0.3, -0.2, 0.1], [0.2, 0.4, -0.1], [0.1, 0.2, -0.3], [-0.5, -0.1, -0.2]])
    for scores in (logits, np.abs(logits)):  # the second could be mistaken for probabilities
        metrics = score_decisions(3)
        for row in range(4):  # one text a batch: what decides must not depend on the batch
            feed(
                metrics,
                torch.from_numpy(scores[row : row + 1]),
                torch.from_numpy(true[row : row + 1]),
            )
        expected = sklearn_scores(true, (scores > 0).astype(int))
        assert values_of(metrics) == pytest.approx(expected, abs=1e-6)


def test_ignored_decisions_and_rows_count_for_nothing():
    # By hand. Asked: (1, 1) right, (0, 1) wrong, (1, 1) right; the last row asks for nothing.
    target = torch.tensor([[1.0, -100.0], [0.0, 1.0], [-100.0, -100.0]])
    decided = torch.tensor([[1, 0], [1, 1], [1, 1]])
    metrics = score_decisions(2)
    feed(metrics, decided, target)
    values = values_of(metrics)
    assert (
        values["accuracy"] == 0.5
    )  # the first text's only question is right; the second has a wrong one
    assert values["f1_micro"] == pytest.approx(
        2 * 2 / (2 * 2 + 1)
    )  # 2 hits, 1 false alarm, no miss
    assert values["precision_macro"] == pytest.approx((1 / 2 + 1) / 2)
    assert values["recall_macro"] == 1
    assert values["mcc"] == pytest.approx(sk.matthews_corrcoef([1, 0, 1], [1, 1, 1]))


def test_a_label_that_nobody_has_scores_0_among_decisions_as_in_scikit_learn():
    true = np.array([[1, 0], [1, 0]])
    metrics = score_decisions(2)
    feed(metrics, torch.from_numpy(true), torch.from_numpy(true))
    assert (
        metrics["f1_macro"].compute()
        == 0.5
        == sk.f1_score(true, true, average="macro", zero_division=0)
    )


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=3, max_size=30))
@BATCHES
@pytest.mark.filterwarnings("ignore")  # scipy warns about constants
def test_correlations_are_scipys_with_ties(pairs):
    predicted, true = np.array(pairs, dtype=np.float64).T
    metrics = score_values()
    feed(metrics, torch.from_numpy(predicted)[:, None], torch.from_numpy(true))
    expected = {
        "pearson": stats.pearsonr(predicted, true).statistic,
        "spearman": stats.spearmanr(predicted, true).statistic,
    }
    assert values_of(metrics) == pytest.approx(expected, abs=1e-6, nan_ok=True)


def test_correlations_far_from_zero():
    true = torch.tensor([2001.0, 2003.0, 2002.0, 2008.0])
    predicted = torch.tensor([2000.5, 2003.5, 2004.0, 2006.0])
    metrics = score_values()
    feed(metrics, predicted[:2], true[:2])
    feed(metrics, predicted[2:], true[2:])
    assert metrics["pearson"].compute().item() == pytest.approx(
        stats.pearsonr(predicted.numpy(), true.numpy()).statistic, abs=1e-6
    )
    assert metrics["spearman"].compute().item() == pytest.approx(
        0.8
    )  # ranks 1 2 3 4 and 1 3 2 4, 1 - 6 * 2 / 60


def test_a_change_of_minus_hundred_per_cent_is_a_number_to_correlate():
    true, predicted = torch.tensor([-100.0, 0.0, 50.0, 10.0]), torch.tensor([30.0, 10.0, 20.0, 0.0])
    metrics = score_values()
    feed(metrics, predicted, true)
    assert metrics["pearson"].compute().item() == pytest.approx(
        stats.pearsonr(predicted.numpy(), true.numpy()).statistic, abs=1e-6
    )
    assert metrics["spearman"].compute().item() == pytest.approx(
        stats.spearmanr(predicted.numpy(), true.numpy()).statistic, abs=1e-6
    )


@pytest.mark.parametrize("wrong", [1, 4])
def test_correlations_of_predictions_that_are_no_numbers_are_undefined(wrong):
    predicted = torch.tensor([1.0, 2.0, 3.0, 4.0])
    predicted[:wrong] = torch.nan
    metrics = score_values()
    feed(metrics, predicted, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert all(np.isnan(value) for value in values_of(metrics).values()), (
        "in their order they would have a rank each"
    )
    metrics = score_values()
    feed(metrics, torch.tensor([1.0, torch.inf, 3.0]), torch.tensor([1.0, 3.0, 2.0]))
    assert metrics["spearman"].compute() == 1, "what is too large still has a place"


def test_accumulation_gives_the_score_of_everything_and_a_reset_forgets():
    draw = torch.Generator().manual_seed(1)
    scores, target = torch.randn(50, 4, generator=draw), torch.randint(4, (50,), generator=draw)
    whole, parts = score_labels(4), score_labels(4)
    feed(whole, scores, target)
    feed(parts, scores.flip(0), target)
    for metric in parts.values():
        metric.reset()
    for start, stop in ((0, 1), (1, 30), (30, 30), (30, 50)):  # the third is empty
        for metric in parts.values():
            metric.update(scores[start:stop], target[start:stop])
    assert values_of(parts) == pytest.approx(values_of(whole), abs=1e-6)


def test_forward_answers_for_the_batch_and_accumulates():
    metric = score_labels(2)["accuracy"]
    assert metric(torch.tensor([0, 1]), torch.tensor([0, 1])) == 1
    assert metric(torch.tensor([0, 1]), torch.tensor([1, 0])) == 0
    assert math.isnan(metric(torch.tensor([0]), torch.tensor([-100])))
    assert metric.compute() == 0.5


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_batches_without_a_label_do_not_crash():
    for metrics, preds, target in (
        (score_labels(3), torch.randn(2, 3), torch.tensor([-100, -100])),
        (score_labels(3), torch.randn(0, 5, 3), torch.empty(0, 5, dtype=torch.int64)),
        (score_decisions(3), torch.randn(0, 3), torch.empty(0, 3)),
        (score_decisions(3), torch.randn(1, 3), torch.full((1, 3), -100)),
    ):
        feed(metrics, preds, target)
        assert set(values_of(metrics).values()) == {0.0}
    for batches in ([], [(torch.empty(0), torch.empty(0))], [(torch.ones(1), torch.ones(1))]):
        metrics = score_values()
        for batch in batches:
            feed(metrics, *batch)
        assert all(map(math.isnan, values_of(metrics).values()))


def test_metrics_can_be_sent_to_another_process():
    metrics = {**score_labels(3), **score_decisions(3), **score_values()}
    assert set(pickle.loads(pickle.dumps(metrics))) == set(metrics)


@pytest.mark.parametrize(
    "metrics, preds, target, words",
    [
        (score_labels(3), [[0.1, 0.2, 0.3]], [3], "target must lie in 0 ... 2.*num_labels"),
        (score_labels(3), [3], [0], "preds must lie in 0 ... 2"),
        (score_labels(3), [[0.1, 0.2]], [1], "preds must be scores of shape .1, 3."),
        (score_labels(3), [0.2], [1], "preds must be scores"),
        (score_labels(3), [1, 1], [1], "labels of shape .1,."),
        (score_labels(3), [1], [-1], "target must lie"),
        (score_decisions(3), [[1.0, 2.0]], [[1, 0]], "num_labels=3"),
        (score_decisions(2), [[1.0, 2.0]], [[1.0, 0.5]], "target must hold 0, 1 or -100"),
        (score_decisions(2), [[1, 2]], [[1, 0]], "preds must hold 0, 1"),
        (score_values(), [1.0, 2.0], [1.0], "preds and target must pair up"),
    ],
)
def test_what_does_not_fit_is_answered(metrics, preds, target, words):
    for metric in metrics.values():
        with pytest.raises(ValueError, match=words):
            metric.update(torch.tensor(preds), torch.tensor(target))
