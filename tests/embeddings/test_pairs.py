"Pairs are read from any table, duplicates are found, and the order is a function of seed and epoch."

import json

import numpy as np
import pytest
import torch
from embedding_cases import draw_pairs, small_data, small_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.embeddings.pairs import (
    EmbeddingDataModule,
    PairDataset,
    clean_pairs,
    group_texts,
    hold_out_pairs,
    read_pairs,
)
from bertlab.train.checkpoints import check_same_run, run_fingerprint

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


def test_a_hub_dataset_is_read_by_its_name(tmp_path):
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert read_pairs(tmp_path / "saved").negatives == [["red", "blue"], ["green"]]
    assert read_pairs(tmp_path / "saved", split="train[:1]").queries == ["how far"]


def test_columns_have_their_usual_names_or_the_given_ones(tmp_path):
    rows = [{"anchor": "a", "answer": "b", "wrong": "c", "worse": "d"}]
    path = write(tmp_path / "x.jsonl", rows)
    assert read_pairs(path).positives == ["b"]
    pairs = read_pairs(
        path, query_column="wrong", positive_column="worse", negative_column=["anchor", "answer"]
    )
    assert (pairs.queries, pairs.positives, pairs.negatives) == (["c"], ["d"], [["a", "b"]])
    with pytest.raises(ValueError, match="positive_column"):
        read_pairs(path, positive_column="asnwer")
    with pytest.raises(ValueError, match="query_column.*'x', 'y'"):
        read_pairs([{"x": "1", "y": "2"}])


def test_column_numbers_refer_to_the_first_row(
    tmp_path,
):
    "Query and answer changed places where an object had its keys the other way round."
    rows = [
        {"ask": "a", "say": "b", "not": "c"},
        {"say": "e", "not": "f", "ask": "d"},
        {"say": "h", "ask": "g"},
    ]
    path = write(tmp_path / "x.jsonl", rows)
    turned = write(
        tmp_path / "y.jsonl", [{"say": "two", "ask": "one"}, {"ask": "three", "say": "four"}]
    )
    for source in (path, rows):
        pairs = read_pairs(source, query_column="1", positive_column=2, negative_column=-1)
        assert (pairs.queries, pairs.positives, pairs.negatives) == (
            ["a", "d", "g"],
            ["b", "e", "h"],
            [["c"], ["f"], []],
        )
    pairs = read_pairs([path, turned], query_column=1, positive_column=2)
    assert pairs.queries[3:] == ["two", "four"], "each file counts its own columns"
    write(path, [*rows, {"ask": "i"}])
    with pytest.raises(ValueError, match="line 4: the column 'say' is empty"):
        read_pairs(path, query_column=1, positive_column=2)


@pytest.mark.parametrize("row, word", [({"query": "a", "positive": ""}, "positive"), ({"query": None, "positive": "b"}, "query"),
                                       ({"query": "a", "positive": 3}, "not text"),
                                       ({"query": "a", "positive": "b", "negative": ["c", " "]}, "negative"),
                                       ({"query": "a", "positive": "b", "scores": [1.0, 2.0]}, "scores")])  # fmt: skip
def test_a_bad_row_is_named_by_its_line_or_left_out_and_counted(tmp_path, row, word):
    good = {"query": "q", "positive": "p"} | ({"scores": [1.0]} if "scores" in row else {})
    path = write(tmp_path / "bad.jsonl", [good, row])
    with pytest.raises(ValueError, match="line 2") as error:
        read_pairs(path)
    assert word in str(error.value)
    pairs = read_pairs(path, on_error="skip")
    assert pairs.queries == ["q"] and sum(pairs.notes.values()) == 1


@pytest.mark.parametrize("cell, expected", [
    ("[1] See the appendix.", ["[1] See the appendix."]), ("[2019]", ["[2019]"]), ("[MASK] token", ["[MASK] token"]),
    ('["c", "d"]', ["c", "d"]), ("[]", []), ("", []), (["[1] c", "d"], ["[1] c", "d"]),
])  # fmt: skip
def test_a_negative_may_begin_with_a_bracket(cell, expected):
    assert read_pairs([{"query": "a", "positive": "b", "negative": cell}]).negatives == [expected]


@pytest.mark.parametrize("cell", ["['c', 'd']", '["c", "d', '["c", 3]', "[null]"])
def test_a_list_of_negatives_that_is_broken_is_no_text(cell):
    with pytest.raises(ValueError, match="row 0: the (list|column)"):
        read_pairs([{"query": "a", "positive": "b", "negative": cell}])


@pytest.mark.parametrize(
    "scores", [[float("nan"), 0.1], [1.0, float("inf")], "[NaN, 0.1]", "[1.0, null]", "0.9, 0.1"]
)
def test_a_score_that_is_no_finite_number_is_refused(scores):
    row = {"query": "a", "positive": "b", "negative": "c", "scores": scores}
    with pytest.raises(ValueError, match="row 0: the column 'scores' holds .* finite number"):
        read_pairs([row])


def test_cleaning_drops_repeated_pairs_and_answers():
    pairs = PairDataset(["a", "a", "b", "c"], ["A", "A", "A", "c"], [["B", "x"], ["B", "x"], ["a", "y"], []],
                    [[1, 0.5, 0.1], [1, 0.5, 0.1], [1, 0.9, 0.2], [1]])  # fmt: skip
    found = clean_pairs(pairs)
    assert found.queries == ["a", "b"] and found.negatives == [["B", "x"], ["y"]]
    assert found.scores == [[1, 0.5, 0.1], [1, 0.2]]
    assert sorted(found.notes.values()) == [1, 1, 1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(10, 19)), min_size=1, max_size=25))
def test_groups_are_the_connected_parts_of_the_graph_of_pairs(edges):
    pairs = PairDataset([str(a) for a, _ in edges], [str(b) for _, b in edges], [[] for _ in edges])
    groups = group_texts(pairs)
    reach = {text: {text} for text in groups}  # by spreading, until nothing changes
    for _ in groups:
        for a, b in edges:
            both = reach[str(a)] | reach[str(b)]
            for text in both:
                reach[text] = both
    for one in groups:
        for other in groups:
            assert (groups[one] == groups[other]) == (other in reach[one])


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


def test_no_text_of_a_held_out_pair_is_trained_on_as_a_negative():
    others = [[f"p{(n + 1) % 40}", f"q{(n + 2) % 40}", f"x{n}"] for n in range(40)]
    scores = [[1.0, n + 0.1, n + 0.2, n + 0.3] for n in range(40)]
    pairs = PairDataset([f"q{n}" for n in range(40)], [f"p{n}" for n in range(40)], others, scores)
    train, held = hold_out_pairs(pairs, 0.25)
    out = {*held.queries, *held.positives}
    assert (
        len(held) == 10
        and not out & set(train.texts())
        and held.negatives == [others[int(q[1:])] for q in held.queries]
    )
    for query, own, values in zip(train.queries, train.negatives, train.scores):
        n = int(query[1:])
        kept = [k for k, text in enumerate(others[n]) if text not in out]
        assert own == [others[n][k] for k in kept] and values == [
            1.0,
            *(scores[n][1 + k] for k in kept),
        ]
    assert (
        [*train.notes.values()] == [3 * 30 - sum(map(len, train.negatives))]
        and "held-out" in [*train.notes][0]
        and not pairs.notes
    )
    data = small_data(pairs)
    data.setup()
    assert "held-out pairs, left out" in data.describe()


def test_pairs_of_texts_with_themselves_alone_are_no_pairs(tmp_path):
    rows = [{"query": text, "positive": text} for text in ("one", "two", "one")]
    with pytest.raises(ValueError, match="x.jsonl has no pair of two different texts"):
        read_pairs(write(tmp_path / "x.jsonl", rows))
    nothing = clean_pairs(PairDataset(["one"], ["one"], [[]]))
    with pytest.raises(ValueError, match="too few"):
        hold_out_pairs(nothing, 0.5)
    data = EmbeddingDataModule(small_tokenizer(), validation_fraction=0)
    data.set_datasets(nothing)
    with pytest.raises(ValueError, match="no pair"):
        data.setup()


def test_the_order_is_part_of_the_run():
    kept, now = (
        run_fingerprint(None, small_data(shuffle_train=shuffle)) for shuffle in (True, False)
    )
    with pytest.raises(ValueError, match="shuffle is True there and False here"):
        check_same_run("run.ckpt", kept, now)


def test_a_batch_holds_each_text_where_it_says():
    data = small_data(draw_pairs(40, negatives=2))
    data.setup()
    rows = data.datasets["train"]
    batch = data.collator([rows[0, n] for n in range(4)] + [rows[-1]])
    slots = [
        (r, d)
        for r in range(len(batch["attention_mask"]))
        for d in range(1, int(batch["attention_mask"][r].max()) + 1)
    ]
    tokenizer, order = small_tokenizer(), rows.order(0)
    pairs = data.pairs["train"]
    wanted = (
        [pairs.queries[n] for n in order[:4]]
        + [None]
        + [pairs.positives[n] for n in order[:4]]
        + [None]
    )
    wanted += [text for n in order[:4] for text in pairs.negatives[n]] + [None, None]
    assert batch["text_numbers"].tolist() == [
        -1 if text is None else pairs.texts().index(text) for text in wanted
    ]
    for slot, text, group in zip(
        batch["text_order"].tolist(), wanted, batch["groups"].tolist(), strict=True
    ):
        row, number = slots[slot]
        ids = batch["input_ids"][row][batch["attention_mask"][row] == number].tolist()
        assert (group == -1) == (text is None)
        if text is not None:
            assert ids == tokenizer(text)["input_ids"]
    assert batch["labels"].tolist() == [0, 1, 2, 3, -100]
    assert (batch["groups"][:4] == batch["groups"][5:9]).all()


def test_a_pair_with_fewer_negatives_has_blanks_in_their_place():
    data = small_data(PairDataset(["one two", "three four"] * 4, [f"five {n}" for n in range(8)],
                              [["red", "blue"] if n % 2 else ["green"] for n in range(8)]), batch=2)  # fmt: skip
    data.fraction = 0
    data.setup()
    batch = data.collator([data.datasets["train"][n] for n in range(8)])
    assert batch["groups"][16:].view(8, 2).lt(0).tolist() == [
        [False, bool(n % 2 == 0)] for n in range(8)
    ]


def test_the_order_is_a_function_of_seed_and_epoch():
    data = small_data(draw_pairs(64), batch=8)
    data.setup()
    loader = data.train_dataloader()
    seen = [batch["input_ids"] for _ in range(2) for batch in loader]  # two epochs
    resumed = data.train_dataloader()
    resumed.load_state_dict({**loader.state_dict(), "delivered": 4})
    for expected, batch in zip(seen[4:6], resumed):
        assert torch.equal(batch["input_ids"], expected)
    orders = [data.datasets["train"].order(epoch).tolist() for epoch in range(2)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_processes_get_disjoint_pairs_that_together_are_the_batch():
    data = small_data(draw_pairs(64), batch=8)
    data.setup()
    from bertlab.data.loaders import EpochBatches

    rows = data.datasets["train"]
    keys = [EpochBatches(rows, data.collator, 4, rank=r, world_size=2).keys(0, 1) for r in range(2)]
    assert keys[0] + keys[1] == EpochBatches(rows, data.collator, 8).keys(0, 1)


def test_no_call_of_the_tokenizer_holds_the_whole_data(monkeypatch):
    data, sizes = small_data(draw_pairs(1500, negatives=1)), []
    kind = type(data.tokenizer)
    tokenize = kind.__call__

    def watch(tokenizer, texts, **options):
        sizes.append(len(texts))
        return tokenize(tokenizer, texts, **options)

    monkeypatch.setattr(kind, "__call__", watch)
    data.setup()
    assert sum(sizes) > 4000 and max(sizes) <= 2000
    rows, texts = data.datasets["train"], data.pairs["train"].texts()
    for n in (0, 1999, 2000, len(texts) - 1):
        assert (
            rows.ids[n].tolist()
            == small_tokenizer()(texts[n], truncation=True, max_length=16)["input_ids"]
        )
    assert data.num_cut == sum(
        len(ids) > 16
        for split in data.pairs.values()
        for ids in small_tokenizer()(split.texts())["input_ids"]
    )


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


@pytest.mark.parametrize(
    "options, word",
    [
        ({"train_batch_size": 1}, "train_batch_size"),
        ({"row_length": 8}, "row_length"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"num_negatives": -1}, "num_negatives"),
    ],
)
def test_options_that_cannot_be_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        EmbeddingDataModule(small_tokenizer(), **{"max_sequence_length": 16, **options})


@pytest.mark.parametrize("name", ["label", "score", "is_duplicate"])
def test_pairs_that_somebody_has_judged_are_not_all_right_answers(name, tmp_path):
    rows = [
        {"sentence1": "a b", "sentence2": "b a", name: 1},
        {"sentence1": "c d", "sentence2": "e f", name: 0},
    ]
    path = write(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(ValueError, match=f"column '{name}'.*query_column"):
        read_pairs(path)
    assert len(read_pairs(path, query_column="sentence1", positive_column="sentence2")) == 2
    assert len(read_pairs([{**row, name: 1} for row in rows])) == 2, "one value says nothing"


def test_a_flag_that_may_be_a_list_is_not_said_twice():
    from bertlab.cli.commands import COMMANDS
    from bertlab.cli.parser import parse

    for name in ("dataset_name_or_path", "negative_column"):
        with pytest.raises(ValueError, match="given twice"):
            parse(COMMANDS["embed finetune"], [f"--data.{name}", "a", f"--data.{name}", "b"])


def test_what_is_said_of_reading_holds_for_rows_that_are_brought(tmp_path):
    data = small_data(on_error="skip")
    data.set_datasets([*ROWS, {"query": "", "positive": None}])
    assert data.pairs["train"].queries == ["how far", "how long"]
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "a.jsonl", ROWS)
    with pytest.raises(ValueError, match="file_format must be one of"):
        read_pairs(folder, file_format="jsom")
    with pytest.raises(ValueError, match="leave out config_name='en'"):
        read_pairs(folder / "a.jsonl", config_name="en")
