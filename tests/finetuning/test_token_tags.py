"Words: entities are seqeval's, each word is judged once, and a table knows words and shapes."

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval import metrics as seq

from bertlab.data.tokenizers import train_tokenizer
from bertlab.finetuning.task import count_long
from bertlab.finetuning.tokens import (
    EntityF1,
    TokenClassification,
    iob2_spans,
    split_documents,
    word_shape,
)

NAMES = ["B-LOC", "I-LOC", "O", "B-PER", "I-PER"]
sentence = st.lists(st.tuples(*[st.integers(0, 4)] * 2), min_size=1, max_size=12)


def ids_of(rows, filler=-100):
    width = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])


@given(st.lists(sentence, min_size=1, max_size=4))
@settings(derandomize=True, deadline=None, max_examples=60)
@pytest.mark.filterwarnings("ignore")  # seqeval warns where nothing is found
def test_entity_scores_are_seqevals(sentences):
    true, predicted = ([[pair[i] for pair in row] for row in sentences] for i in (0, 1))
    metric = EntityF1(NAMES)
    metric.update(ids_of(predicted, 2), ids_of(true))
    names = [[[NAMES[i] for i in row] for row in part] for part in (true, predicted)]
    if not any(name != "O" for part in names for row in part for name in row):
        return
    options = {"zero_division": 0}
    expected = {
        "entity_precision": seq.precision_score(*names, **options),
        "entity_recall": seq.recall_score(*names, **options),
        "entity_f1": seq.f1_score(*names, **options),
        "entity_f1_macro": seq.f1_score(*names, average="macro", **options),
    }
    found = {name: value.item() for name, value in metric.compute().items()}
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("labels, spans", [
    ("B-A I-A O B-A", [(0, 2, "A"), (3, 4, "A")]), ("I-A I-B", [(0, 1, "A"), (1, 2, "B")]),
    ("B-A B-A", [(0, 1, "A"), (1, 2, "A")]), ("B I O", [(0, 2, "")]), ("B-A-B I-A-B", [(0, 2, "A-B")]), ("O", []),
])  # fmt: skip
def test_entities_by_hand(labels, spans):
    assert iob2_spans(labels.split()) == spans


def test_sub_words_and_padding_are_as_if_absent():
    plain, cut = EntityF1(NAMES), EntityF1(NAMES)
    plain.update(torch.tensor([[0, 1, 2]]), torch.tensor([[0, 1, 2]]))
    cut.update(torch.tensor([[0, 2, 1, 3, 2]]), torch.tensor([[0, -100, 1, -100, 2]]))
    assert cut.compute() == plain.compute()


def test_packed_documents_are_judged_each_by_itself():
    rows = split_documents(torch.tensor([[0, 1, 1, 2]]), torch.tensor([[1, 1, 2, 0]]), -100)
    assert rows.tolist() == [[0, 1, -100, -100], [-100, -100, 1, -100]]


def test_a_table_knows_words_then_shapes_then_all():
    task = TokenClassification()
    train = [{"text": ["saw", "Oslo", "Rome", "saw"], "label": ["tool", "city", "city", "tool"]}]
    task.learn_labels([row["label"] for row in train])
    rows = [{"text": ["saw", "Lima", "...."], "label": ["tool", "city", "tool"]}]
    assert task.baseline(train, train, rows)[0]["predicted_tags"] == ["tool", "city", "tool"]
    assert word_shape("HTTPServer2") == "Xx9"


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
