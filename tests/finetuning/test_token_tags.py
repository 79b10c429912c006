"Words: entities are seqeval's, each word is judged once, and a table knows words and shapes."

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval import metrics as seq

from bertlab.data.tokenizers import train_tokenizer
from bertlab.finetuning.task import count_long
from bertlab.finetuning.task import LabelNames
from bertlab.finetuning.tokens import TagScores, TokenClassification, entity_scores, entity_spans
from bertlab.finetuning.tokens import _find_scheme, _word_shape

NAMES = ["B-LOC", "I-LOC", "O", "B-PER", "I-PER"]
SCHEMES = {
    "IOB": "BI",
    "IO": "I",
    "BIOES": "BIES",
    "BILOU": None,
    "suffix": "BI",
}  # marks besides O; seqeval knows BIOES by the same rules, and BILOU by other letters
sentence = st.lists(st.tuples(*[st.integers(0, 8)] * 2), min_size=1, max_size=12)


def scheme_names(name):
    marks = SCHEMES[name] or "BIES"
    return ["O", *(f"{mark}-{entity}" for mark in marks for entity in ("LOC", "PER"))]


@pytest.mark.parametrize("name", SCHEMES)
@given(sentences=st.lists(sentence, min_size=1, max_size=4))
@settings(derandomize=True, deadline=None, max_examples=30)
@pytest.mark.filterwarnings("ignore")  # seqeval warns where nothing is found
def test_entity_scores_are_seqevals(name, sentences):
    known = scheme_names(name)
    names = [[[known[pair[i] % len(known)] for pair in row] for row in sentences] for i in (0, 1)]
    if not any(label != "O" for part in names for row in part for label in row):
        return
    options = {"zero_division": 0}
    write = {
        "BILOU": lambda label: {"E": "L", "S": "U"}.get(label[0], label[0]) + label[1:],
        "suffix": lambda label: "-".join(reversed(label.split("-"))),
    }.get(name, str)
    true, predicted = ([[write(label) for label in row] for row in part] for part in names)
    scheme = _find_scheme([write(label) for label in known])
    scores = entity_scores(predicted, true, scheme)
    expected = {
        "entity_precision": seq.precision_score(*names, **options),
        "entity_recall": seq.recall_score(*names, **options),
        "entity_f1": seq.f1_score(*names, **options),
        "entity_f1_macro": seq.f1_score(*names, average="macro", **options),
    }
    assert {k: v.item() for k, v in scores.items()} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "names", [["NOUN", "VERB", "O"], ["B-A", "I-A"], ["O"], ["O", "B-A", "LOC"]]
)
def test_tags_that_mark_no_entities_have_no_scheme(names):
    assert _find_scheme(names) is None


@pytest.mark.parametrize("labels, spans", [
    ("B-A I-A O B-A", [(0, 2, "A"), (3, 4, "A")]), ("I-A I-B", [(0, 1, "A"), (1, 2, "B")]),
    ("B-A B-A", [(0, 1, "A"), (1, 2, "A")]), ("B I O", [(0, 2, "")]), ("B-A-B I-A-B", [(0, 2, "A-B")]), ("O", []),
])  # fmt: skip
def test_entities_by_hand(labels, spans):
    assert entity_spans(labels.split()) == spans


def judged(predicted, labels, documents, **columns):
    "The score of entities, batch by batch."
    task, metric = TokenClassification(LabelNames(tuple(NAMES), tuple(NAMES))), TagScores(NAMES)
    for n in range(len(predicted)):
        batch = {
            "labels": torch.tensor([labels[n]]),
            "attention_mask": torch.tensor([documents[n]]),
        }
        batch |= {name: torch.tensor([values[n]]) for name, values in columns.items()}
        logits = torch.eye(len(NAMES))[torch.tensor([predicted[n]])]
        metric.update(*task.for_metric({"logits": logits}, batch))
    return metric.compute()["entity_f1"].item()


def test_sub_words_and_padding_are_as_if_absent():
    assert judged([[0, 2, 1, 3, 2]], [[0, -100, 1, -100, 2]], [[1, 1, 1, 1, 0]]) == 1


def test_packed_documents_are_judged_each_by_itself():  # else the two would be one entity
    assert judged([[0, 1, 3]], [[0, 1, 1]], [[1, 1, 2]]) == pytest.approx(0.5)


def test_an_entity_on_both_sides_of_a_cut_is_one():
    pieces = {"example_index": [4, 4], "first_word": [2, 0]}  # in any order
    labels, documents = [[1, 2, -100], [2, 0, 1]], [[1, 1, 0], [1, 1, 1]]
    assert judged([[1, 2, 2], [2, 0, 1]], labels, documents, **pieces) == 1
    shortened = [[2, 2, 2], [2, 0, 1]]  # its last word is wrong
    assert judged(shortened, labels, documents, **pieces) == 0


def test_a_table_knows_words_then_shapes_then_all():
    task = TokenClassification()
    train = [{"text": ["saw", "Oslo", "Rome", "saw"], "label": ["tool", "city", "city", "tool"]}]
    task.learn_labels([row["label"] for row in train])
    rows = [{"text": ["saw", "Lima", "...."], "label": ["tool", "city", "tool"]}]
    assert task.baseline(train, train, rows)[0]["predicted_tags"] == ["tool", "city", "tool"]
    assert _word_shape("HTTPServer2") == "Xx9"


@pytest.mark.parametrize("row, message", [
    ({"text": ["a"], "label": ["X", "Y"]}, "each of 1 words"), ({"text": [], "label": []}, "'text'"),
    ({"text": ["a"], "label": [None]}, "no label"), ({"text": "['a' 'b']", "label": ["X"]}, "JSON"),
    ({"text": ["a"], "label": "X Y"}, "'label'"), (["a"], "dict"),
])  # fmt: skip
def test_a_bad_row_is_refused(row, message):
    with pytest.raises(ValueError, match=message):
        TokenClassification().read(row, {"text": "text", "label": "label"})


def test_every_word_of_a_long_text_is_in_one_piece():
    task, words = TokenClassification(), ["saw", "file", "drill"] * 9
    rows = [{"text": words, "label": ["a", "b", "c"] * 9}, {"text": ["saw"], "label": ["a"]}]
    task.learn_labels([row["label"] for row in rows])
    collator = task.make_collator(train_tokenizer([" ".join(words)] * 9, 60), 12)
    pieces = task.encode(rows, collator, whole=True)
    labels = [[i for i in p["labels"] if i >= 0] for p in pieces if p["example_index"] == 0]
    assert len(labels) > 1 and np.concatenate(labels).tolist() == [0, 1, 2] * 9
    assert count_long(pieces) == 1
    outputs = [{"logits": np.eye(3)[np.maximum(p["labels"], 0)]} for p in pieces]
    decoded = task.decode(rows, pieces, outputs)
    assert [row["predicted_tags"] for row in decoded] == [row["label"] for row in rows]
