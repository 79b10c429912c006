"Pairs are read from any table, duplicates are found, and the order is a function of seed and epoch."

import json

import numpy as np
import pytest
import torch
from embedding_cases import WORDS, draw_pairs, fit, small_data, small_module, small_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.data.loaders import OrderedRows
from bertlab.embeddings.pairs import (
    EmbeddingDataModule,
    PairDataset,
    clean_pairs,
    group_texts,
    hold_out_pairs,
    read_pairs,
    score_pairs,
)

ROWS = [{"query": "how far", "positive": "two miles", "negative": ["red", "blue"]},
        {"query": "how long", "positive": "an hour", "negative": ["green"]}]  # fmt: skip


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif path.suffix == ".csv":
        cell = lambda v: json.dumps(v).replace('"', '""') if isinstance(v, list) else v  # noqa: E731
        path.write_text(
            "\n".join(
                [",".join(rows[0]), *(",".join(f'"{cell(v)}"' for v in r.values()) for r in rows)]
            )
        )
    elif path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_every_kind_of_table_gives_the_same_pairs(tmp_path, suffix):
    pairs = read_pairs(write(tmp_path / f"pairs{suffix}", ROWS))
    assert pairs.queries == ["how far", "how long"] and pairs.positives == ["two miles", "an hour"]
    assert pairs.negatives == [["red", "blue"], ["green"]] and pairs.scores is None


def test_columns_have_their_usual_names_or_given_ones(tmp_path):
    rows = [{"anchor": "a", "answer": "b", "wrong": "c", "worse": "d"}]
    path = write(tmp_path / "x.jsonl", rows)
    assert read_pairs(path).positives == ["b"]
    pairs = read_pairs(
        path, query_column="wrong", positive_column="worse", negative_column=["anchor", "answer"]
    )
    assert (pairs.queries, pairs.positives, pairs.negatives) == (["c"], ["d"], [["a", "b"]])


@pytest.mark.parametrize("cell, expected", [
    ("[1] See the appendix.", ["[1] See the appendix."]), ("[2019]", ["[2019]"]), ("[MASK] token", ["[MASK] token"]), ("[] (Pdb) n", ["[] (Pdb) n"]),
    ('["c", "d"]', ["c", "d"]), ("[]", []), ("", []), (["[1] c", "d"], ["[1] c", "d"]),
])  # fmt: skip
def test_a_negative_may_begin_with_a_bracket(cell, expected):
    assert read_pairs([{"query": "a", "positive": "b", "negative": cell}]).negatives == [expected]


def test_columns_may_be_numbers(tmp_path):
    path = write(tmp_path / "x.csv", [{"ask": "a", "say": "b", "not": "c"}])
    pairs = read_pairs(path, query_column="1", positive_column=-1)
    assert pairs.queries == ["a"] and pairs.positives == ["c"]


def pair(**columns):
    return {"query": "a", "positive": "b", **columns}


BAD_ROWS = [
    (pair(positive=""), "'positive'"), (pair(query=None), "'query'"), (pair(positive=3), "'positive'.*3"),
    (pair(negative=["c", " "]), "'negative'"), (pair(negative="['c', 'd']"), "'c'"), (pair(negative="[null]"), "'negative'"),
    (pair(scores=[1.0, 2.0]), "2 scores"), (pair(negative="c", scores="[NaN, 0.1]"), "'scores'.*nan"), (pair(scores="0.9, 0.1"), "0.9, 0.1"),
]  # fmt: skip


@pytest.mark.parametrize("row, words", BAD_ROWS)
def test_a_bad_row_is_named_by_its_line_or_left_out(tmp_path, row, words):
    good = {"query": "q", "positive": "p"} | ({"scores": [1.0]} if "scores" in row else {})
    path = write(tmp_path / "bad.jsonl", [good, row])
    with pytest.raises(ValueError, match=f"line 2.*{words}"):
        read_pairs(path)
    pairs = read_pairs(path, on_error="skip")
    assert pairs.queries == ["q"] and sum(pairs.notes.values()) == 1


def labelled(column, *values, **columns):
    "Rows of two sentences that differ in a label."
    names = columns or {"first": "sentence1", "second": "sentence2"}
    return [
        {names["first"]: "a b", names["second"]: f"b {n}", column: value}
        for n, value in enumerate(values)
    ]


@pytest.mark.parametrize("rows, options, words", [
    ([pair()], {"positive_column": "asnwer"}, "positive_column.*'asnwer'"), ([{"x": "1"}], {}, "query_column.*'x'"),
    ([pair()], {"file_format": "jsom"}, "file_format.*'jsom'"), ([pair(positive="a")], {}, "no pair"),
    (labelled("label", "same", "other"), {}, "row 0.*'label'.*'same'"), (labelled("score", 0.5, None), {}, "row 1.*'score'.*None"),
    (labelled("label", 0, 2, first="premise", second="hypothesis"), {}, "'label'.*class"),
    ([pair(negative="c", label=1), pair(negative="d", label=0)], {}, "'label'.*negatives"),
    ([{"text": "a", "vector": [1, 2]}, {"text": "b", "vector": [1]}], {}, "vectors.*1"), ([{"text": "a", "label": 1}], {}, "positive_column"),
])  # fmt: skip
def test_tables_that_hold_no_pairs_are_refused(rows, options, words):
    with pytest.raises(ValueError, match=words):
        read_pairs(rows, **options)


@pytest.mark.parametrize(
    "column", ["label", "score", "Similarity", "relevance", "target", "relevant", "is_duplicate"]
)
def test_labels_that_differ_are_similarities(tmp_path, column):
    path = write(tmp_path / "x.csv", labelled(column, "1", "0.0"))
    pairs = read_pairs(path)
    assert pairs.scores == [[1.0], [0.0]] and pairs.has_similarities
    assert any(repr(column) in note for note in pairs.notes)
    assert read_pairs(path, scores_column="").scores is None
    assert read_pairs(labelled(column, "same", "same")).scores is None, "says nothing"
    assert read_pairs(labelled("grade", 3, 1), scores_column="grade").scores == [[3.0], [1.0]]
    skipped = read_pairs(labelled(column, 1, "?", 0), on_error="skip")
    assert skipped.scores == [[1.0], [0.0]]


@pytest.mark.parametrize("names", [
    ["negative_1", "negative_2"], ["negative1", "negative2"], ["neg", "hard_negatives"], ["Negative_1", "negative_10"],
])  # fmt: skip
def test_numbered_columns_hold_negatives(names):
    cells = [["c", "d"], ["c", ""], [None, float("nan")]]
    rows = [pair(query=f"q{n}", **dict(zip(names, values))) for n, values in enumerate(cells)]
    assert read_pairs(rows).negatives == [["c", "d"], ["c"], []]


@pytest.mark.parametrize("names", [
    ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question", "context"), ("question1", "question2"),
    ("Anchor", "Positive"), ("query", "passage"),
])  # fmt: skip
def test_usual_names_are_found(names):
    pairs = read_pairs([{"id": 7, **dict(zip(names, ("a", "b")))}])
    assert (pairs.queries, pairs.positives) == (["a"], ["b"])


def test_a_dataframe_is_read():
    frame = pytest.importorskip("pandas").DataFrame({"query": ["a", "c"], "positive": ["b", "d"]})
    assert read_pairs(frame).positives == ["b", "d"]


def test_texts_with_vectors_are_projected_to_the_student():
    vectors = np.random.default_rng(0).normal(size=(40, 48)) * np.linspace(2, 0, 48)
    texts = [f"{a} {b}" for a, b in zip(WORDS, WORDS[1:])] + ["alpha chi", "psi beta"]
    data = small_data(batch=8)
    rows = [{"text": text, "vector": list(v)} for text, v in zip(texts, vectors)]
    data.set_datasets(rows)
    module = small_module()
    fit(module, data, 1)
    batch = next(iter(data.train_dataloader()))
    assert batch["teacher_vectors"].shape == (8, 32) and len(batch["text_order"]) == 8
    numbers = [texts.index(text) for text in data.pairs["train"].queries]
    products, original = (
        v @ v.T for v in (data.datasets["train"].targets["teacher_vectors"][:-1], vectors[numbers])
    )
    assert np.corrcoef(products.ravel(), original.ravel())[0, 1] > 0.98


@pytest.mark.parametrize("options, words", [
    ({"train_batch_size": 1}, "train_batch_size=1"), ({"row_length": 8}, "row_length=8"), ({"num_negatives": -1}, "num_negatives=-1"),
    ({"validation_fraction": 1.0}, "validation_fraction=1.0"),
])  # fmt: skip
def test_wrong_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        EmbeddingDataModule(small_tokenizer(), **{"max_sequence_length": 16, **options})


def test_cleaning_merges_repeated_pairs_and_drops_answers():
    pairs = PairDataset(["a", "a", "b", "c"], ["A", "A", "A", "c"], [["B", "x"], ["x", "y", "z"], ["a", "y"], []],
                    [[1, 0.5, 0.1], [1, 0.7, 0.2, 0.3], [1, 0.9, 0.2], [1]])  # fmt: skip
    cleaned = clean_pairs(pairs)
    assert cleaned.queries == ["a", "b"] and cleaned.negatives == [["B", "x", "y", "z"], ["y"]]
    assert cleaned.scores == [[1, 0.5, 0.1, 0.2, 0.3], [1, 0.2]]
    assert sorted(cleaned.notes.values()) == [1, 1, 1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(10, 19)), min_size=1, max_size=25))
def test_groups_are_the_connected_texts(edges):
    pairs = PairDataset([str(a) for a, _ in edges], [str(b) for _, b in edges], [[] for _ in edges])
    groups = group_texts(pairs)
    reach = {text: {text} for text in groups}  # by spreading, until nothing changes
    for _ in groups:
        for a, b in edges:
            both = reach[str(a)] | reach[str(b)]
            for text in both:
                reach[text] = both
    for member in groups:
        for rival in groups:
            assert (groups[member] == groups[rival]) == (rival in reach[member])


def test_no_text_stands_on_both_sides_of_a_split():
    rng = np.random.default_rng(0)
    pairs = PairDataset(
        [f"q{n}" for n in rng.integers(0, 60, 90)],
        [f"p{n}" for n in range(90)],
        [[] for _ in range(90)],
    )
    train, held = hold_out_pairs(pairs, 0.2, seed=1)
    assert not set(train.texts()) & set(held.texts()) and len(train) + len(held) == 90
    assert 10 <= len(held) <= 45
    with pytest.raises(ValueError, match="too few"):
        hold_out_pairs(PairDataset(["a", "a"], ["b", "c"], [[], []]), 0.5)


def test_texts_of_held_out_pairs_are_no_negatives():
    negatives_N = [[f"p{(n + 1) % 40}", f"q{(n + 2) % 40}", f"x{n}"] for n in range(40)]
    scores = [[1.0, n + 0.1, n + 0.2, n + 0.3] for n in range(40)]
    pairs = PairDataset(
        [f"q{n}" for n in range(40)], [f"p{n}" for n in range(40)], negatives_N, scores
    )
    train, held = hold_out_pairs(pairs, 0.25)
    out = {*held.queries, *held.positives}
    assert (
        len(held) == 10
        and not out & set(train.texts())
        and held.negatives == [negatives_N[int(q[1:])] for q in held.queries]
    )
    for query, negatives, values in zip(train.queries, train.negatives, train.scores):
        n = int(query[1:])
        remaining = [k for k, text in enumerate(negatives_N[n]) if text not in out]
        assert negatives == [negatives_N[n][k] for k in remaining]
        assert values == [1.0, *(scores[n][1 + k] for k in remaining)]
    assert [*train.notes.values()] == [3 * 30 - sum(map(len, train.negatives))]


def test_a_batch_holds_each_text_where_it_says():
    data = small_data(draw_pairs(40, negatives=2))
    data.setup()
    rows = OrderedRows(data.datasets["train"])
    batch = data.collator([rows[0, n] for n in range(4)] + [rows[0, -1]])
    slots = [
        (r, d)
        for r in range(len(batch["attention_mask"]))
        for d in range(1, int(batch["attention_mask"][r].max()) + 1)
    ]
    tokenizer, order = small_tokenizer(), rows.order(0)
    pairs = data.pairs["train"]
    expected_texts = (
        [pairs.queries[n] for n in order[:4]]
        + [None]
        + [pairs.positives[n] for n in order[:4]]
        + [None]
    )
    expected_texts += [text for n in order[:4] for text in pairs.negatives[n]] + [None, None]
    assert batch["text_numbers"].tolist() == [
        -1 if text is None else pairs.texts().index(text) for text in expected_texts
    ]
    for slot, text, group in zip(
        batch["text_order"].tolist(), expected_texts, batch["groups"].tolist(), strict=True
    ):
        row, document = slots[slot]
        ids = batch["input_ids"][row][batch["attention_mask"][row] == document].tolist()
        assert (group == -1) == (text is None)
        if text is not None:
            assert ids == tokenizer(text)["input_ids"]
    assert batch["labels"].tolist() == [0, 1, 2, 3, -100]
    assert (batch["groups"][:4] == batch["groups"][5:9]).all()


def test_missing_negatives_are_blanks():
    data = small_data(PairDataset(["one two", "three four"] * 4, [f"five {n}" for n in range(8)],
                              [["red", "blue"] if n % 2 else ["green"] for n in range(8)]), batch=2)  # fmt: skip
    data.fraction = 0
    data.setup()
    batch = data.collator([data.datasets["train"][n] for n in range(8)])
    assert batch["groups"][16:].view(8, 2).lt(0).tolist() == [
        [False, bool(n % 2 == 0)] for n in range(8)
    ]


def test_the_order_is_a_function_of_seed_and_epoch():
    data = small_data(draw_pairs(60), batch=8)  # 45 train, so the last batch is ragged
    data.setup()
    loader = data.train_dataloader()
    seen = [batch for _ in range(2) for batch in loader]  # two epochs
    resumed = data.train_dataloader()
    resumed.load_state_dict({**loader.state_dict(), "delivered": 4})
    for expected, batch in zip(seen[4:6], resumed, strict=True):
        assert torch.equal(batch["input_ids"], expected["input_ids"])
    orders = []
    for epoch in (seen[:6], seen[6:]):
        queries = [n for b in epoch for n in b["text_numbers"][:8].tolist() if n >= 0]
        assert len(queries) == len({*queries}) == 45 and len(epoch[-1]["labels"]) == 8
        orders.append(queries)
    assert orders[0] != orders[1]


def test_texts_are_cut_and_counted():
    data = EmbeddingDataModule(small_tokenizer(), max_sequence_length=5, validation_fraction=0)
    data.set_datasets(
        [
            {"query": "alpha", "positive": "one two three four five six seven"},
            {"query": "beta", "positive": "two"},
        ]
    )
    data.setup()
    assert data.num_cut == 1 and max(map(len, data.datasets["train"].ids)) == 5
    assert "cut" in data.describe()


def test_a_teacher_scores_each_positive_and_its_negatives():
    pairs = read_pairs(ROWS)
    scored = score_pairs(pairs, lambda texts: np.array([len(a) + 100 * len(b) for a, b in texts]))
    assert scored.scores == [[907, 307, 407], [708, 508]]
    with pytest.raises(ValueError, match="negatives"):
        score_pairs(draw_pairs(3), len)
