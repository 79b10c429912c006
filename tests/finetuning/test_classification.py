"Texts: scores are scikit-learn's and scipy's, labels have names, and a bag of words is an opponent."

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sk

from bertlab.finetuning.classification import Classification, MultiLabelClassification, Regression
from bertlab.finetuning.classification import classification_metrics, multilabel_metrics
from bertlab.finetuning.task import LabelNames, get_task, load_task, save_task

BATCHES = settings(derandomize=True, deadline=None, max_examples=25)


def values_of(metrics) -> dict[str, float]:
    return {name: value.item() for name, value in metrics.compute().items()}


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


@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=40),
)
@BATCHES
@pytest.mark.filterwarnings("ignore")  # scikit-learn warns about labels that do not occur
def test_label_scores_are_scikit_learns(num_labels, pairs):
    predicted, true = np.array(pairs).T % num_labels
    metrics = classification_metrics(num_labels)
    metrics.update(torch.from_numpy(predicted), torch.from_numpy(true))
    assert values_of(metrics) == pytest.approx(sklearn_scores(true, predicted), abs=1e-6)


@pytest.mark.filterwarnings("ignore:A single label")
@pytest.mark.parametrize(
    "true, predicted", [([1, 1], [1, 1]), ([1, 1], [0, 0]), ([0, 1], [1, 1]), ([2], [2])]
)
def test_where_nothing_varies_the_correlation_is_0_as_in_scikit_learn(true, predicted):
    metrics = classification_metrics(3)
    metrics.update(torch.tensor(predicted), torch.tensor(true))
    assert values_of(metrics)["mcc"] == 0 == sk.matthews_corrcoef(true, predicted)


def test_a_label_that_never_occurs_does_not_lower_a_macro_mean():
    true = [0, 0, 1, 1]
    metrics = classification_metrics(4)  # labels 2 and 3 are neither true nor predicted
    metrics.update(torch.tensor(true), torch.tensor(true))
    assert values_of(metrics)["f1_macro"] == 1 == sk.f1_score(true, true, average="macro")


def test_decisions_are_scikit_learns_even_if_all_logits_lie_between_0_and_1():
    true = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 0]])
    logits = np.array([[0.3, -0.2, 0.1], [0.2, 0.4, -0.1], [0.1, 0.2, -0.3], [-0.5, -0.1, -0.2]])
    for scores in (logits, np.abs(logits)):  # the second could be mistaken for probabilities
        metrics = multilabel_metrics(3)
        for row in range(4):  # one text a batch: what decides must not depend on the batch
            metrics.update(
                torch.from_numpy(scores[row : row + 1] > 0).long(),
                torch.from_numpy(true[row : row + 1]),
            )
        expected = sklearn_scores(true, (scores > 0).astype(int))
        assert values_of(metrics) == pytest.approx(expected, abs=1e-6)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=3, max_size=30))
@BATCHES
@pytest.mark.filterwarnings("ignore")
def test_correlations_are_scipys_with_ties(pairs):
    predicted, gold = np.array(pairs, dtype=float).T
    if len(set(predicted)) < 2 or len(set(gold)) < 2:
        return
    rows, answers = [{"label": x} for x in gold], [{"predicted_value": x} for x in predicted]
    scores = Regression(num_labels=1).score(rows, answers)
    assert scores["pearson"] == pytest.approx(stats.pearsonr(predicted, gold)[0], abs=1e-5)
    assert scores["spearman"] == pytest.approx(stats.spearmanr(predicted, gold)[0], abs=1e-5)


def test_rows_without_any_decision_are_not_judged():
    task = MultiLabelClassification(LabelNames(("a", "b"), ("a", "b")))
    batch = {"labels": torch.tensor([[1.0, -100.0], [0.0, 1.0], [-100.0, -100.0]])}
    output = {"logits": torch.tensor([[2.0, -1.0], [1.0, 1.0], [1.0, 1.0]])}
    metrics = task.metric([])
    metrics.update(*task.for_metric(output, batch))
    values = values_of(metrics)
    assert values["accuracy"] == 0.5 and values["recall_macro"] == 1
    assert values["f1_micro"] == pytest.approx(2 * 2 / (2 * 2 + 1))  # 2 hits and a false alarm


# --- labels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels, names, ids", [
    (["b", "a", "b"], ("a", "b"), [1, 0, 1]), ([3, 1, 1], ("1", "3"), [1, 0, 0]),
])  # fmt: skip
def test_ids_are_sorted_labels(labels, names, ids):
    task = Classification()
    task.learn_labels(labels)
    assert task.labels.names == names
    assert [task.label_ids(task.name_label(label)) for label in labels] == ids


@pytest.mark.parametrize("labels, task_cls, expected", [
    (["a", "b"], Classification, ["a", "b"]), ([1, 2], Classification, ["1", "2"]),
    ([1.0, 0.0], Classification, ["1", "0"]), (np.float32([1, 0]), Classification, ["1", "0"]),
    ([True, False], Classification, ["True", "False"]), (torch.tensor([3, 4]), Classification, ["3", "4"]),
    ([0.5, 1.0], Regression, [0.5, 1.0]), (np.float16([0.5, 1]), Regression, [0.5, 1.0]),
    ([["a"], []], MultiLabelClassification, [["a"], []]), ([{"b", "a"}, {"b"}], MultiLabelClassification, [["a", "b"], ["b"]]),
    ([["spam", "ad"], "spam"], MultiLabelClassification, [["spam", "ad"], ["spam"]]), ([["ad"], "ad"], MultiLabelClassification, [["ad"], ["ad"]]),
    ([{"ad": 1, "new": 0}, {"ad": 1, "new": True}], MultiLabelClassification, [["ad"], ["ad", "new"]]),
    ([Decimal("0.5"), Fraction(1)], Regression, [0.5, 1.0]), ([Decimal("2.0"), 1], Classification, ["2", "1"]),
    (np.array([[1, 0], [0, 1]]), MultiLabelClassification, [["LABEL_0"], ["LABEL_1"]]),
])  # fmt: skip
def test_labels_of_any_class_say_what_they_are_for(labels, task_cls, expected):
    rows = [{"text": "a", "label": label} for label in labels]
    columns = {"text": "text", "label": "label"}
    labels = [Classification().read(row, columns)["label"] for row in rows]
    task = Classification().resolve(labels)
    assert type(task) is task_cls and task.problem_type in task.label_rule
    task.learn_labels(labels)
    assert [task.name_label(label) for label in labels] == expected


@pytest.mark.parametrize("label", [
    {"name": "a"}, None, " ", float("nan"), [None], pd.NA, Decimal("nan"), b"a", 3j, [object()],
])  # fmt: skip
def test_what_is_no_label_is_refused(label):
    with pytest.raises(ValueError, match="'label'"):
        Classification().read({"text": "a", "label": label}, {"text": "text", "label": "label"})


@pytest.mark.parametrize("labels, names, message", [
    (["a", 1], None, "'a'"), ([1, 2], ["x", "y", "z"], "3 names"),
    ([1, 2, 3], ["x", "y"], "2 names"), ([-100], None, "no row"), (["a", "a"], None, "'a'"),
])  # fmt: skip
def test_labels_that_cannot_be_named_are_refused(labels, names, message):
    with pytest.raises(ValueError, match=message):
        Classification().learn_labels(labels, names)


def test_users_names_are_for_ids_from_0_for_sorted_numbers_or_by_mapping():
    cases = [(["x", "y"], [0, 1], 1), (["x", "y"], [3, 7], 7), ({"7": "y", "3": "x"}, [3, 7], 7)]
    for names, labels, value in cases:
        assert LabelNames.from_user(names, labels).name(value) == "y"
        assert LabelNames.from_user(names, labels).names == ("x", "y")


def test_names_by_id_may_come_in_any_order():
    assert (
        LabelNames.from_ids({"10": "k", **{n: str(n) for n in reversed(range(10))}}).names[10]
        == "k"
    )
    assert LabelNames.from_ids(["b", "a"]).names == ("b", "a")
    with pytest.raises(ValueError, match="id2label"):
        LabelNames.from_ids({1: "a", 2: "b"})


def test_lists_of_0_and_1_are_marks_and_lists_of_names_are_names():
    task = MultiLabelClassification()
    task.learn_labels([[1, 0], [0, 1]], ["x", "y"])
    assert task.name_label([0, 1]) == ["y"] and task.label_ids(["y"]) == [0, 1]
    with pytest.raises(ValueError, match=r"\[2, 0\]"):
        task.name_label([2, 0])
    names_task = MultiLabelClassification()
    names_task.learn_labels([["b"], ["a", "b"]])
    assert names_task.label_ids(names_task.name_label(["b"])) == [0, 1]


def test_baselines_beat_the_majority():
    rows = [{"text": f"{word} {n}", "label": label} for n in range(20) for word, label in
            (("saw", "tool"), ("drill", "tool"), ("fig", "fruit"))]  # fmt: skip
    task = Classification()
    task.learn_labels([row["label"] for row in rows])
    scores = [task.score(rows, m(rows)) for m in (lambda r: task.majority(rows, r),
                                                  lambda r: task.baseline(rows, rows[:9], r))]  # fmt: skip
    assert scores[0]["accuracy"] == pytest.approx(2 / 3) and scores[1]["accuracy"] == 1


def test_a_task_is_found_by_name_class_and_dotted_name(tmp_path):
    assert type(get_task("classification", "regression")) is Regression
    assert type(get_task("bertlab.finetuning.classification.Regression")) is Regression
    for name, problem, message in (("tagging", None, "task='tagging'"), ("classification", "rank", "rank"),
                                   ("token_classification", "regression", "regression")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            get_task(name, problem)
    save_task(get_task("question_answering"), tmp_path, {"question": "q", "context": "c"}, 64)
    content = load_task(tmp_path)
    assert (
        content["columns"] == {"question": "q", "context": "c"}
        and content["settings"]["max_answer_tokens"] == 30
    )
    (tmp_path / "task.json").write_text("{}")
    with pytest.raises(ValueError, match="task.json is damaged"):
        load_task(tmp_path)
    assert load_task(tmp_path / "none") == {}
