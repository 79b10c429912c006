"""Data modules: every parameter does its thing, processes share fairly, mistakes are named early."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from test_training import CONFIG, word_tokenizer

from bertlab.data.collators import MaskedDiffusionCollator, MaskedLanguageModelingCollator
from bertlab.data.loaders import BlankRows, EpochBatches, eval_loader, worker_error
from bertlab.data.module import PretrainingDataConfig, PretrainingDataModule
from bertlab.data.packing import PackedDataset
from bertlab.data.rows import Collator
from bertlab.data.tokens import TokenizedDocuments, finish_dataset, write_part
from bertlab.train.modules import PretrainingModule
from bertlab.train.trainer import make_trainer

WORDS = [f"w{i}" for i in range(90)]
TOKENIZER = word_tokenizer(WORDS)
SPECIAL = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3}


def make_texts(count=200, seed=0, longest=30):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(3, longest))) for _ in range(count)]


def write_lines(path, texts):
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return str(path)


def make_module(source, **options):
    options = {"max_sequence_length": 32, "train_batch_size": 4, "val_batch_size": 4, **options}
    return PretrainingDataModule(source, TOKENIZER, **options)


def set_up(source, **options):
    data = make_module(source, **options)
    data.prepare_data()
    data.setup()
    return data


def take(loader, count):
    "The next batches; not one more, as `zip` would take."
    iterator = iter(loader)
    return [next(iterator) for _ in range(count)]


def texts_of(dataset):
    "The texts of a dataset's documents, sorted."
    return sorted(TOKENIZER.decode(document) for document in dataset.documents)


def original_ids(batch):
    "A batch's ids before they were masked."
    return torch.where(batch["labels"] >= 0, batch["labels"], batch["input_ids"])


def test_every_document_is_trained_on_or_held_out(tmp_path):
    texts = make_texts()
    data = set_up(write_lines(tmp_path / "a.txt", texts))
    train, held = texts_of(data.train_dataset), texts_of(data.val_dataset)
    assert sorted(train + held) == sorted(set(texts)) and not set(train) & set(held)
    assert 0.05 < len(held) / len(texts) < 0.15
    assert "held out" in data.describe()


def test_with_a_validation_set_nothing_is_held_out(tmp_path):
    texts, validation_texts = make_texts(80), make_texts(50, seed=1)
    train, val = (
        write_lines(tmp_path / "a.txt", texts),
        write_lines(tmp_path / "b.txt", validation_texts),
    )
    data = set_up(train, val_dataset_name_or_path=val)
    assert texts_of(data.train_dataset) == sorted(set(texts))
    assert texts_of(data.val_dataset) == sorted(set(validation_texts))
    assert "held out" not in data.describe()


def test_splits_and_slices_are_taken(tmp_path):
    path = write_lines(tmp_path / "a.txt", make_texts(100))
    slices = ["train[80:90]", "train[90:]"]
    data = set_up(path, train_split="train[:80]", val_split=slices)
    sizes = [len(d.documents) for d in (data.train_dataset, *data.val_datasets)]
    assert sizes == [80, 10, 10]


def test_splits_pair_with_sets():
    def pairs(names, splits):
        options = {"val_dataset_name_or_path": names, "val_split": splits}
        _, sources = PretrainingDataConfig("t.txt", TOKENIZER, **options).sources()
        return [(source.origin, source.reading.split) for source in sources]

    assert pairs("a", ["x", "y"]) == [("a", "x"), ("a", "y")]
    assert pairs(["a", "b"], "x") == [("a", "x"), ("b", "x")]
    assert pairs(["a", "b"], ["x", "y"]) == [("a", "x"), ("b", "y")]
    with pytest.raises(ValueError, match="val_split names 3 splits for 2"):
        pairs(["a", "b"], ["x", "y", "z"])


@pytest.mark.parametrize("form", ["texts", "dataset", "ids", "tokens"])
def test_set_datasets_takes_what_is_in_memory(form):
    datasets = pytest.importorskip("datasets")
    texts, held = make_texts(100), make_texts(20, seed=5)
    ids = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in texts]
    value = {"texts": texts, "dataset": datasets.Dataset.from_dict({"text": texts}), "ids": ids,
             "tokens": TokenizedDocuments.from_sequences(ids)}[form]  # fmt: skip
    data = make_module(None)
    data.set_datasets(value, held)
    data.setup()
    assert texts_of(data.train_dataset) == sorted(texts) and texts_of(data.val_dataset) == sorted(
        held
    )
    alone = make_module(None)
    alone.set_datasets(value)
    alone.setup()
    parts = texts_of(alone.train_dataset), texts_of(alone.val_dataset)
    assert sorted(parts[0] + parts[1]) == sorted(texts) and 5 <= len(parts[1]) <= 15


def test_a_table_in_memory_may_be_the_source():
    pandas = pytest.importorskip("pandas")
    texts = make_texts(40)
    data = make_module(pandas.DataFrame({"text": texts}))
    data.prepare_data()
    data.setup()
    assert sorted(texts_of(data.train_dataset) + texts_of(data.val_dataset)) == sorted(texts)


def test_what_is_in_memory_is_no_stream():
    data = make_module("a.txt", streaming=True)
    with pytest.raises(ValueError, match="streaming reads files or hub datasets"):
        data.set_datasets(make_texts(9))


def test_a_dataset_without_the_column_lists_those_it_has():
    datasets = pytest.importorskip("datasets")
    with pytest.raises(ValueError, match="text.*'body', 'title'"):
        make_module(None).set_datasets(datasets.Dataset.from_dict({"body": ["a"], "title": ["b"]}))


def test_a_row_without_a_text_is_named_where_the_others_have_one():
    with pytest.raises(ValueError, match="given row 2 is of type NoneType"):
        make_module(None).set_datasets(["a text", None, "another"])
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ValueError, match="given row 1 is of type NoneType"):
        make_module(None).set_datasets(pandas.DataFrame({"text": [None, None]}))
    make_module(None).set_datasets(pandas.Series(make_texts(3)))


def test_token_ids_with_special_tokens_are_refused():
    data, (cls, sep) = make_module(None), (TOKENIZER.cls_token_id, TOKENIZER.sep_token_id)
    bare = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in make_texts(20)]
    data.set_datasets([[cls, *ids, sep] for ids in bare])
    with pytest.raises(ValueError, match="add_special_tokens=False"):
        data.setup()
    data = make_module(None)  # with padding="max_length", some rows of which are full
    longest = max(map(len, bare)) + 2
    data.set_datasets(
        [[cls, *ids, sep, *[TOKENIZER.pad_token_id] * (longest - len(ids) - 2)] for ids in bare]
    )
    with pytest.raises(ValueError, match="without padding"):
        data.setup()


def test_what_one_source_trains_on_is_not_held_out_of_another(tmp_path):
    shared, separate = make_texts(60, seed=1), [make_texts(n, seed=n) for n in (40, 300)]
    (tmp_path / "many").mkdir()
    for n in range(len(shared) + 40):
        write_lines(tmp_path / "many" / f"{n}.txt", [(separate[0] + shared)[n]])
    another = write_lines(tmp_path / "one.txt", separate[1] + shared)
    data = set_up([str(tmp_path / "many"), another])
    trained, held = texts_of(data.train_dataset), texts_of(data.val_dataset)
    assert held and not set(held) & set(trained)
    alone = set_up(another)
    assert texts_of(alone.val_dataset), "a source alone is as it was"


def test_weights_set_shares_and_repetition_is_capped(tmp_path):
    a, b = write_lines(tmp_path / "a.txt", make_texts(300)), write_lines(tmp_path / "b.txt", [
        text.upper().replace("W", "w") + " w1 w1" for text in make_texts(300, seed=3)])  # fmt: skip
    options = {"mixture_weights": {a: 3, b: 1}}
    data = set_up([a, b], val_dataset_name_or_path=a, data_kwargs=options)
    mixed = data.train_dataset
    assert mixed.shares[a] == 0.75 and mixed.tokens[a] <= mixed.sizes[a]
    twice = set_up([a, b], val_dataset_name_or_path=a,
                   data_kwargs={"mixture_weights": [9, 1], "max_repetition": 2})  # fmt: skip
    mixed = twice.train_dataset
    assert 1.9 < mixed.tokens[a] / mixed.sizes[a] <= 2
    assert f"{a}: 90.0%" in twice.describe()
    rows = data.train_dataset
    epochs = [{tuple(rows[e, i]["input_ids"]) for i in range(len(rows))} for e in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]


def test_the_cache_is_written_once_and_then_mapped(tmp_path, monkeypatch):
    path, cache = write_lines(tmp_path / "a.txt", make_texts()), tmp_path / "cache"
    first = set_up(path, cache_dir=cache)
    assert len(list(cache.glob("*/tokens.json"))) == 2
    monkeypatch.setattr(
        "bertlab.data.module.DataSource.corpus", None
    )  # reading the text again would fail
    second = set_up(path, cache_dir=cache)
    assert texts_of(first.train_dataset) == texts_of(second.train_dataset)


@pytest.mark.parametrize("streaming", [False, True])
def test_without_packing_a_row_is_one_document(tmp_path, streaming):
    texts = make_texts(100)
    path = write_lines(tmp_path / "a.txt", texts)
    data = set_up(path, packing=False, streaming=streaming, val_dataset_name_or_path=path)
    batches = take(data.train_dataloader(), 25)
    ids = torch.cat([original_ids(b) for b in batches])
    masks = torch.cat([b["attention_mask"] for b in batches])
    assert ids.shape[1] == 32 and masks.max() == 1
    assert sorted(TOKENIZER.decode(r[m > 0][1:-1]) for r, m in zip(ids, masks)) == sorted(texts)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "num_rows, fill, num_seen",
    [(50, False, 48), (50, True, 50), (50, None, 50), (801, None, 800)],
)
def test_an_epoch_has_each_row_once(num_rows, fill, num_seen, world_size):
    rows = PackedDataset([np.full(20, 5 + n) for n in range(num_rows)], 32, **SPECIAL)
    loaders = [EpochBatches(BlankRows(rows), list, 8 // world_size, rank=r, world_size=world_size, fill=fill)
               for r in range(world_size)]  # fmt: skip
    for _ in range(2):
        shares = [list(loader) for loader in loaders]
        assert len({len(batches) for batches in shares}) == 1
        batches = [batch for share in shares for batch in share]
        assert all(len(batch) == 8 // world_size for batch in batches)
        ids = [row["input_ids"][1] for b in batches for row in b if row["attention_mask"].any()]
        assert len(set(ids)) == len(ids) == num_seen


@pytest.mark.parametrize("packing", [False, True])
def test_a_blank_row_has_no_label(tmp_path, packing):
    path = write_lines(tmp_path / "a.txt", make_texts(41))
    data = set_up(path, packing=packing, packing_pad_to_budget=True, train_batch_size=64)
    (batch,) = list(data.train_dataloader())
    blank = (batch["attention_mask"] == 0).all(1)
    assert len(blank) == 64 and blank.sum() == 64 - len(data.train_dataset)
    assert (batch["labels"][blank] == -100).all() and (batch["input_ids"][blank] == 0).all()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_processes_read_disjoint_rows_of_a_stream(tmp_path, num_workers):
    texts = [f"w{n} w{n} " + text for n, text in enumerate(make_texts(80))]
    data = make_module(write_lines(tmp_path / "a.txt", texts), streaming=True, num_workers=num_workers,
                       val_dataset_name_or_path=str(tmp_path / "a.txt"))  # fmt: skip
    data.setup()
    shares = []
    for rank in (0, 1):
        data.data_parallel_rank = lambda: {"rank": rank, "world_size": 2}  # noqa: B023
        rows = [
            tuple(r.tolist()) for b in take(data.train_dataloader(), 5) for r in original_ids(b)
        ]
        shares.append(rows)
    data.data_parallel_rank = lambda: {"rank": 0, "world_size": 1}
    alone = {tuple(r.tolist()) for b in take(data.train_dataloader(), 10) for r in original_ids(b)}
    assert len(set(shares[0])) == len(set(shares[1])) == 20 and not set(shares[0]) & set(shares[1])
    assert set(shares[0]) | set(shares[1]) == alone


def read_pass(data):
    "The texts of the first pass of a stream."
    texts = []
    for row in data.train_dataloader().stream:
        if row["epoch"]:
            return texts
        texts += row_texts(row)


def row_texts(row):
    numbers = range(1, row["attention_mask"].max() + 1)
    pieces = [row["input_ids"][row["attention_mask"] == n] for n in numbers]
    return [TOKENIZER.decode(piece, skip_special_tokens=True) for piece in pieces]


def test_a_stream_reads_all_that_is_not_held_out(tmp_path):
    texts = make_texts(100)
    data = set_up(write_lines(tmp_path / "a.txt", texts), streaming=True)
    held = texts_of(data.val_dataset)
    assert len(held) == 10 and sorted(read_pass(data) + held) == sorted(texts)
    assert "first documents of the stream" in data.describe()


def test_streams_are_mixed_by_rates(tmp_path):
    a = write_lines(tmp_path / "a.txt", ["w1 w2 w3"] * 400)
    b = write_lines(tmp_path / "b.txt", ["w4 w5 w6"] * 400)
    data = set_up(
        [a, b], streaming=True, data_kwargs={"mixture_weights": [3, 1], "buffer_size": 900}
    )
    ids = torch.cat([original_ids(batch).flatten() for batch in take(data.train_dataloader(), 20)])
    share = (ids == TOKENIZER.convert_tokens_to_ids("w1")).sum() / (
        (ids == TOKENIZER.convert_tokens_to_ids("w1")).sum()
        + (ids == TOKENIZER.convert_tokens_to_ids("w4")).sum()
    )
    assert 0.7 < share < 0.8


@pytest.mark.parametrize(
    "fraction, held", [(0.1, 10), (0.4, 40), (0.6, 60), (0.7, 70), (0.9, 90), (0, 0)]
)
@pytest.mark.parametrize("form", ["ids", "stream"])
def test_the_share_that_is_asked_for_is_held_out(tmp_path, form, fraction, held):
    texts, options = make_texts(100), {"data_kwargs": {"validation_fraction": fraction}}
    if form == "ids":
        data = make_module(None, **options)
        data.set_datasets(
            [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in texts]
        )
        data.setup()
        assert len(data.train_dataset.documents) == 100 - held
    else:
        data = set_up(write_lines(tmp_path / "a.txt", texts), streaming=True, **options)
        assert len(read_pass(data)) == 100 - held
    assert sum(len(part.documents) for part in data.val_datasets) == held


def write_shards(path, texts):
    "Tokens in several blocks, as `bertlab tokenize` leaves them."
    ids = TOKENIZER(texts, add_special_tokens=False).input_ids
    batches = ((np.array(document, np.int32), np.array([len(document)])) for document in ids)
    write_part(path, 0, batches, "key", file_tokens=70)
    finish_dataset(path, 1)
    return str(path)


def texts_in(rows):
    "The texts of a dataset's rows, sorted."
    return sorted(text for n in range(len(rows)) for text in row_texts(rows[n]))


@pytest.mark.parametrize("sizes, options", [
    ([103], {}), ([103, 87, 45], {}), ([103, 87], {"data_kwargs": {"mixture_weights": [1, 1]}}),
    ([23], {"objective": "diffusion", "max_ends": 4}), ([103, 87], {"objective": "diffusion", "max_ends": 4}),
])  # fmt: skip
def test_shards_train_on_nothing_that_they_validate_on(tmp_path, sizes, options):
    texts = [[f"w{k} w{n % 90} w{n // 90}" for n in range(size)] for k, size in enumerate(sizes)]
    data = set_up(
        [write_shards(tmp_path / str(k), shard_texts) for k, shard_texts in enumerate(texts)],
        **options,
    )
    mixed, every = (
        "data_kwargs" in options,
        sorted(text for shard_texts in texts for text in shard_texts),
    )
    rows = data.train_dataset.datasets if mixed else [data.train_dataset]
    read = sorted(text for dataset in rows for text in texts_in(dataset))
    held = texts_in(data.val_dataset)
    assert len(held) == sum(size // 10 for size in sizes) and sorted(read + held) == every


TWO = {"train_dataset_name_or_path": ["a.txt", "b.txt"]}
MISTAKES = [
    ({"max_sequence_length": 4}, ["max_sequence_length", "4"]),
    ({"train_batch_size": 0}, ["train_batch_size", "0"]),
    ({"num_workers": -1}, ["num_workers", "-1"]),
    ({"pretrained_tokenizer_name_or_path": None}, ["pretrained_tokenizer_name_or_path"]),
    ({"objective": "mml"}, ["objective", "mml", "mlm"]),
    ({"collator_kwargs": {"mlm_probabilty": 0.2}}, ["mlm_probabilty", "mlm_probability"]),
    ({"data_kwargs": {"max_document": 9}}, ["max_document", "max_documents"]),
    ({"data_kwargs": {"sample_by": "words"}}, ["sample_by", "words"]),
    ({"data_kwargs": {"on_error": "ignore"}}, ["on_error", "ignore"]),
    ({"data_kwargs": {"min_chars": 0}}, ["min_chars", "0"]),
    ({"data_kwargs": {"validation_fraction": 1.5}}, ["validation_fraction", "1.5"]),
    ({"data_kwargs": {"overflow": "cut"}}, ["overflow", "cut"]),
    ({"max_sequence_length": 32, "data_kwargs": {"stride": 30}}, ["stride=30", "below 30"]),
    ({"data_kwargs": {"length_mixture": {0: 1}}}, ["length_mixture", "{0: 1}"]),
    ({"data_kwargs": {"mixture_weights": [1]}}, ["mixture_weights", "list"]),
    ({"data_kwargs": {"budget_tokens": 9}}, ["budget_tokens", "mixture_weights"]),
    (
        {**TWO, "data_kwargs": {"mixture_weights": [1, 1], "max_repetition": 0}},
        ["max_repetition", "0"],
    ),
    ({"streaming": True, "train_dataset_name_or_path": None}, ["streaming"]),
    ({"streaming": True, "data_kwargs": {"buffer_size": 0}}, ["buffer_size", "0"]),
    (
        {"streaming": True, "data_kwargs": {"length_mixture": {4: 1}}},
        ["length_mixture", "streaming"],
    ),
    ({"max_ends": 3}, ["max_ends=3", "diffusion"]),
    ({"prompt_column": "question"}, ["prompt_column", "diffusion", "max_ends"]),
]


@pytest.mark.parametrize("change, words", MISTAKES)
def test_a_mistake_is_named_before_anything_is_read(change, words):
    options = {
        "train_dataset_name_or_path": "nowhere.txt",
        "pretrained_tokenizer_name_or_path": TOKENIZER,
    }
    with pytest.raises(ValueError) as error:
        PretrainingDataModule(**{**options, **change})
    assert all(word in str(error.value) for word in words)


def test_a_missing_column_or_file_or_split_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("body,title\n" + "w1 w2,x\n" * 30, encoding="utf-8")
    with pytest.raises(ValueError, match="text_column.*'text'.*'body'.*'title'"):
        set_up(str(tmp_path / "a.csv"))
    with pytest.raises(ValueError, match="does not exist"):
        set_up(str(tmp_path / "none.txt"))
    with pytest.raises(ValueError, match="validation"):
        set_up(str(tmp_path / "a.csv"), text_column="body", val_split="validation")


def test_a_cache_inside_its_source_is_refused(tmp_path):
    write_lines(tmp_path / "a.txt", make_texts(20))
    with pytest.raises(ValueError, match="cache_dir .* is inside of"):
        make_module(str(tmp_path), cache_dir=tmp_path / "cache")
    make_module(str(tmp_path / "a.txt"), cache_dir=tmp_path / "cache")


def test_a_batch_larger_than_an_epoch_is_refused(tmp_path):
    path = write_lines(tmp_path / "a.txt", make_texts(40))
    with pytest.raises(ValueError, match="more than the"):
        set_up(path, train_batch_size=500).train_dataloader()
    data = set_up(path, streaming=True)
    data.trainer = type("Trainer", (), {"max_steps": -1, "global_rank": 0, "world_size": 1})()
    with pytest.raises(ValueError, match="give max_steps"):
        data.train_dataloader()


class Reversed(MaskedLanguageModelingCollator):
    "A collator of a user's own."


class CountTokens(Collator):
    "All that a collator must have."

    def compute_labels(self, batch):
        return {"labels": (batch["attention_mask"] > 0).sum(1)}


def test_a_collator_is_a_class_or_a_dotted_name(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.txt", make_texts(60))
    data = set_up(path, objective=CountTokens, packing=False, seed=3)
    assert (data.collator.seed, data.collator.epoch) == (3, 0)  # for what it draws
    (batch,) = take(data.train_dataloader(), 1)
    assert batch["labels"].tolist() == (batch["attention_mask"] > 0).sum(1).tolist()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_collators.py").write_text(
        "from bertlab.data.collators import MaskedDiffusionCollator\n\n"
        "class Mine(MaskedDiffusionCollator):\n    pass\n")  # fmt: skip
    objectives = {make_module(path, objective=value).objective: value
                  for value in ("mlm", Reversed, CountTokens, "my_collators.Mine")}  # fmt: skip
    assert set(objectives) == {"mlm", None, "diffusion"}
    with pytest.raises(ValueError, match="objective.*my_collators.*Mne"):
        make_module(path, objective="my_collators.Mne")
    with pytest.raises(ValueError, match="objective=.*dict.*bertlab.Collator"):
        make_module(path, objective=dict)


def test_a_built_collator_is_refused():
    built = MaskedLanguageModelingCollator.from_tokenizer(TOKENIZER)
    for collator in (built, built.compute_labels):
        with pytest.raises(ValueError, match="collator=.*collator_kwargs"):
            make_module(["a cat"], collator=collator)


class Ends(MaskedLanguageModelingCollator):
    objective = "ends"  # of which no model of ours knows


class Counts(CountTokens):
    objective = "counts"


class Noisy(MaskedDiffusionCollator):
    objective = "noisy"


def test_a_collator_must_fit_the_objective():
    assert make_module(["a cat"], collator=Ends).objective == "mlm"
    assert make_module(["a cat"], collator=Noisy, objective="diffusion").objective == "diffusion"
    assert make_module(["a cat"], collator=Counts, objective="counts").objective == "counts"
    assert make_module(["a cat"], objective=Ends).objective == "ends"  # nobody has named a model's
    for collator in (MaskedDiffusionCollator,):
        with pytest.raises(
            ValueError, match=f"{collator.__name__} makes batches for .*objective is 'mlm'"
        ):
            make_module(["a cat"], collator=collator)


def test_a_tokenizer_is_trained_on_the_training_texts(tmp_path):
    texts = make_texts(100)
    path = write_lines(tmp_path / "a.txt", texts)
    planned, streamed = make_module(path), make_module(path, streaming=True)
    streamed.setup()
    assert sorted(streamed.training_texts() + texts_of(streamed.val_dataset)) == sorted(texts)
    planned.setup()
    assert sorted(planned.training_texts()) == texts_of(planned.train_dataset)


def test_only_training_documents_are_cut_to_lengths(tmp_path):
    path = write_lines(tmp_path / "text.txt", make_texts())
    plain, cut = (
        set_up(path, data_kwargs=kwargs) for kwargs in ({}, {"length_mixture": {4: 0.5, 12: 0.5}})
    )
    documents, pieces = plain.train_dataset.documents, cut.train_dataset.documents
    assert (
        np.array_equal(documents.tokens, pieces.tokens)
        and np.diff(pieces.offsets).max() <= 12 < np.diff(documents.offsets).max()
    )
    assert np.array_equal(plain.val_dataset.documents.offsets, cut.val_dataset.documents.offsets)
    retained = set_up(
        path, data_kwargs={"length_mixture": {4: 0.5, 12: 0.5}}, cache_dir=tmp_path / "cache"
    ).train_dataset.documents
    assert np.array_equal(retained.tokens, pieces.tokens) and np.array_equal(
        retained.offsets, pieces.offsets
    )


def test_what_reading_left_out_is_told(tmp_path):
    texts = make_texts(60)
    data = set_up(
        write_lines(tmp_path / "a.txt", [*texts, *texts[:7]]), data_kwargs={"sample_by": "line"}
    )
    description = data.describe(num_rows=1)
    assert re.search(r"a\.txt: 7 documents left out: duplicates", description) and re.search(
        r"a\.txt: 1 file with one document per line: a", description
    )


# ---- workers --------------------------------------------------------------------------------------


class Trouble(torch.utils.data.Dataset):
    "Rows whose second one is in trouble."

    def __init__(self, trouble):
        self.trouble = trouble

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 1:
            self.trouble()
        return {"environment": os.environ.get("TOKENIZERS_PARALLELISM")}


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)


def refuse():
    raise ValueError("the column 'a' is empty")


def test_the_error_of_a_worker_is_one_line():
    with pytest.raises(ChildProcessError, match=r"process \d+.*num_workers"):
        list(eval_loader(Trouble(kill_myself), list, 1, num_workers=1))
    with pytest.raises(ValueError, match="^the column 'a' is empty$"):
        list(eval_loader(Trouble(refuse), list, 1, num_workers=1))


class Unshared(torch.Tensor):
    "A tensor for which there is no shared memory."

    def share_memory_(self):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space")


def collate_unshared(rows):
    return {"ids": torch.zeros(1).as_subclass(Unshared)}


def test_missing_shared_memory_ends_a_run():
    loader = eval_loader(Trouble(list), collate_unshared, 1, num_workers=1)
    with pytest.raises(OSError, match="num_workers") as raised:
        list(loader)
    assert raised.value.filename == "/dev/shm"
    bus_error = (
        "DataLoader worker (pid 1) is killed by signal: Bus error. ... out of shared memory."
    )
    assert worker_error(RuntimeError(bus_error)).filename == "/dev/shm"
    assert (
        worker_error(OSError(28, "No space left on device")).filename == "/dev/shm"
    )  # a semaphore
    assert worker_error(OSError(28, "No space left on device", "a.txt")) is None
    assert worker_error(RuntimeError("CUDA out of memory")) is None


def test_queues_without_shared_memory_end_in_its_name(monkeypatch):
    def fail():
        raise OSError(28, "No space left on device")  # of a semaphore, which names no file

    monkeypatch.setattr(multiprocessing, "Queue", fail)
    with pytest.raises(OSError, match="num_workers") as raised:
        list(eval_loader(Trouble(list), list, 1, num_workers=1))
    assert raised.value.filename == "/dev/shm"


@pytest.mark.parametrize("value", [None, "true"])
def test_workers_use_no_threads_of_the_tokenizers(monkeypatch, value):
    "With threads a forked worker hangs, or warns; users set the variable or not."
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    if value is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", value)
    rows = [row for batch in eval_loader(Trouble(list), list, 1, num_workers=1) for row in batch]
    assert rows == [{"environment": "false"}] * 4
    assert os.environ.get("TOKENIZERS_PARALLELISM") == value


def mask_by_torch(rows, share=0.5):
    "A collator in torch's style."
    assert all(type(values) is torch.Tensor for row in rows for values in row.values())
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    is_chosen = (torch.rand(batch["input_ids"].shape) < share) & (batch["attention_mask"] > 0)
    labels = batch["input_ids"].masked_fill(~is_chosen, -100)
    ids = batch["input_ids"].masked_fill(is_chosen, TOKENIZER.mask_token_id)
    return {**batch, "input_ids": ids, "labels": labels}


def test_a_function_collates_tensors_alike_in_workers_and_after_a_stop(tmp_path):
    path = write_lines(tmp_path / "a.txt", make_texts(100))
    make = lambda workers: set_up(
        path, collator=mask_by_torch, collator_kwargs={"share": 0.2}, num_workers=workers
    ).train_dataloader()
    expected = take(make(0), 7)
    real = sum((batch["attention_mask"] > 0).sum() for batch in expected)
    assert abs(sum((b["labels"] >= 0).sum() for b in expected) / real - 0.2) < 0.05
    resumed = make(0)
    resumed.load_state_dict({**resumed.state_dict(), "delivered": 3})
    for batches, first in ((take(make(2), 7), 0), (take(resumed, 4), 3)):
        for batch, another in zip(batches, expected[first:], strict=True):
            assert all(torch.equal(batch[name], another[name]) for name in another)


@pytest.mark.parametrize("packing", [True, False])
def test_a_collator_of_transformers_can_be_trained_on(tmp_path, packing):
    from transformers import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(TOKENIZER, mlm_probability=0.3)
    path = write_lines(tmp_path / "a.txt", make_texts(40))
    data = set_up(path, collator=collator, packing=packing)
    make_trainer(2, "32-true", "cpu", val_check_steps=1).fit(PretrainingModule(CONFIG), data)
    (batch,) = take(data.train_dataloader(), 1)
    assert type(batch) is dict and (batch["labels"] >= 0).any()
    with pytest.raises(ValueError, match="collator_kwargs.*shre"):
        make_module(path, collator=mask_by_torch, collator_kwargs={"shre": 0.2})


@pytest.mark.slow  # it imports in a new Python
def test_workers_of_a_fork_server_have_imported_the_run():
    code = """
import multiprocessing
from bertlab.data.loaders import eval_loader
multiprocessing.set_start_method("forkserver")
next(iter(eval_loader([{"row": 0}], list, 1, num_workers=1)))
said = "import sys; print('LOADED', 'bertlab.train.run' in sys.modules)"
worker = multiprocessing.Process(target=exec, args=(said,))
worker.start()
worker.join()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "LOADED True" in done.stdout, done.stderr
