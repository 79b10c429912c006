"From labelled data of many forms to batches: no row twice, no row lost, the same again after a stop."

import csv
import functools
import json
from types import SimpleNamespace

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.data.tokenizers import train_tokenizer
from bertlab.finetuning.data import FinetuningDataModule, hold_out_texts, usual_columns
from bertlab.finetuning.files import Table
from bertlab.finetuning.task import get_task

many = settings(max_examples=100, deadline=None, derandomize=True)


@functools.cache
def tokenizer():
    return train_tokenizer([f"text number {i} is good or bad" for i in range(60)], 80)


def rows_of(n: int, labels=("bad", "good")) -> list[dict]:
    return [
        {"text": f"text number {i} " + "is good " * (i % 7), "label": labels[i % len(labels)]}
        for i in range(n)
    ]


def module(task="classification", source=None, **options):
    options = {
        "max_sequence_length": 64,
        "train_batch_size": 4,
        "val_batch_size": 4,
        "test_batch_size": 4,
        **options,
    }
    return FinetuningDataModule(task, tokenizer(), source, **options)


def given_rows(train, val=None, test=None, task="classification", **options):
    data = module(task, **options)
    data.set_datasets(train=train, val=val, test=test)
    data.setup()
    return data


def texts(batch) -> list[str]:
    return [
        tokenizer().decode(ids[mask > 0], skip_special_tokens=True)
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"])
    ]


# --- where data comes from ------------------------------------------------------------------------


def write(path, rows):
    if path.suffix in (".csv", ".tsv"):
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_a_file_of_any_kind_gives_the_same_batches(suffix, tmp_path):
    rows = rows_of(20, ("NA", "null"))  # words that a table's reader would take for nothing
    write(tmp_path / f"rows.{suffix}", rows)
    from_file = module(source=str(tmp_path / f"rows.{suffix}"))
    from_file.setup()
    in_memory = given_rows(rows)
    assert from_file.id2label == {0: "NA", 1: "null"}
    for batch, expected in zip(from_file.train_dataloader(), in_memory.train_dataloader()):
        assert all(torch.equal(batch[name], expected[name]) for name in expected)


def test_a_directory_in_hub_form_has_configs(tmp_path):
    for config, n in {"short": 6, "long": 10}.items():
        (tmp_path / config).mkdir()
        write(tmp_path / config / "train.jsonl", rows_of(n, (1, 0)))
    configs = "".join(f"- config_name: {c}\n  data_files: {c}/*.jsonl\n" for c in ("short", "long"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    data = module(source=str(tmp_path), dataset_config_name="long", validation_fraction=0.2)
    data.setup()
    assert len(data.rows["train"]) + len(data.rows["validation"]) == 10
    assert data.label2id == {"0": 0, "1": 1} and data.num_labels == 2


def test_a_saved_dataset_keeps_its_label_names(tmp_path):
    import datasets

    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["up", "down", "never"]),
        }
    )
    rows = datasets.Dataset.from_list(rows_of(10, (0, 1)), features=features)
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(str(tmp_path / "saved"))
    data = module(source=str(tmp_path / "saved"))
    data.setup()
    assert data.id2label == {0: "up", 1: "down", 2: "never"}, (
        "a label of the list may be missing in the rows"
    )


def test_slices_take_the_rows_that_they_name(tmp_path):
    write(tmp_path / "train.csv", rows_of(20))
    data = module(
        source=str(tmp_path),
        train_split="train[:50%]",
        val_split="train[15:]",
        test_split="train[10:12]+train[:1]",
    )
    data.setup()
    text = lambda split: [row["text"] for row in data.rows[split]]
    every = [row["text"] for row in rows_of(20)]
    assert (
        text("train") == every[:10]
        and text("validation") == every[15:]
        and text("test") == every[10:12] + every[:1]
    )


def as_splits(rows):
    import datasets

    return datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})


@pytest.mark.parametrize("make", [list, pandas.DataFrame, pyarrow.Table.from_pylist, as_splits])
def test_rows_in_memory_are_read_like_a_file(make, tmp_path):
    rows = rows_of(20)
    write(tmp_path / "rows.csv", rows)
    from_file, in_memory = (module(source=s) for s in (str(tmp_path / "rows.csv"), make(rows)))
    sliced = module(source=make(rows), train_split="train[:5]")
    for data in (from_file, in_memory, sliced):
        data.prepare_data()
        data.setup()
    assert from_file.rows["train"].rows == in_memory.rows["train"].rows and len(in_memory.rows) == 2
    assert sum(map(len, sliced.rows.values())) == 5


@pytest.mark.parametrize("rows", ["a text", {"text": ["a"], "label": ["b"]}])
def test_what_iterates_over_names_is_no_rows(rows):
    with pytest.raises(ValueError, match="train rows are a"):
        given_rows(rows)


COLUMNS = [
    ("classification", {"Premise": "a text", "Hypothesis": "a text", "gold": 1, "Label": "x"}, "Premise Hypothesis Label"),
    ("regression", {"sentence1": "a text", "sentence2": "a text", "score": 0.5}, "sentence1 sentence2 score"),
    ("classification", {"id": 1, "review": "a text", "stars": 4}, "review None stars"),
    ("token_classification", {"tokens": ["text"], "ner_tags": ["X"]}, "tokens ner_tags"),
    ("token_classification", {"words": ["text"], "upos": ["X"]}, "words upos"),
    ("question_answering", {"question": "a", "context": "text", "answers": []}, "question context answers"),
    ("span_classification", {"text": "a text", "entities": []}, "text entities"),
]  # fmt: skip


@pytest.mark.parametrize("task, row, expected", COLUMNS)
def test_usual_columns_are_found(task, row, expected):
    columns = usual_columns(get_task(task), Table.of([row], "train"))
    assert [str(name) for name in columns.values()] == [
        *expected.split()[:-1], *["None"] * (len(columns) - len(expected.split())), expected.split()[-1],
    ]  # fmt: skip


def test_a_named_text_is_no_pair():
    rows = [{"sentence1": f"text {n}", "sentence2": "good", "label": n % 2} for n in range(8)]
    assert given_rows(rows, rows[:2]).columns["text_pair"] == "sentence2"
    data = given_rows(rows, rows[:2], text_column="sentence1")
    assert data.columns["text_pair"] is None and "sentence1 -> label" in data.describe()


# --- what is held out -----------------------------------------------------------------------------


def test_a_missing_validation_split_is_held_out_by_seed():
    rows = rows_of(40)
    data = given_rows(rows, seed=3)
    held = [row["text"] for row in data.rows["validation"]]
    assert len(held) == 4 and not set(held) & {row["text"] for row in data.rows["train"]}
    assert held == [row["text"] for row in given_rows(rows, seed=3).rows["validation"]]
    assert held != [row["text"] for row in given_rows(rows, seed=4).rows["validation"]]
    assert "4 of 40 training rows are held out, by seed 3" in data.describe()


def test_questions_on_one_context_stay_together():
    rows = [question(i, f"Context {i % 5} is good.") for i in range(30)]
    data = given_rows(
        rows, task="question_answering", validation_fraction=0.2, collator_kwargs={"doc_stride": 4}
    )
    sides = [{row["context"] for row in data.rows[split]} for split in ("train", "validation")]
    assert len(sides[1]) == 1 and not sides[0] & sides[1]


@many
@given(st.lists(st.integers(0, 8), min_size=2, max_size=40), st.integers(0, 5))
def test_no_text_is_in_both_parts(texts, seed):
    try:
        train_rows, held = hold_out_texts(texts, 0.2, seed)
    except ValueError:
        assert max(map(texts.count, texts)) > len(texts) / 2
        return
    assert sorted(train_rows + held) == list(range(len(texts))) and held and train_rows
    assert not {texts[i] for i in train_rows} & {texts[i] for i in held}


# --- labels ---------------------------------------------------------------------------------------

STARS = ["one", "two", "three", "four", "five"]
TAGS = [["O", "B", "I"], ["B", "I", "O"], ["O", "O", "O"]]
# labels of the rows, options, names by id, labels of the first batch
LABELS = [
    ([0.5, 2.5], {}, [], [0.5, 2.5]),
    ([["b", "a"], ["c"]], {}, ["a", "b", "c"], [[1, 1, 0], [0, 0, 1]]),
    ([5, 4, 3, 2, 1], {"label_names": STARS}, STARS, [4, 3, 2, 1]),
    ([1, 2, 0], {"label_names": ["x", "y", "z"]}, ["x", "y", "z"], [1, 2, 0]),
    ([1, 4], {"label_names": {"1": "low", "4": "high"}}, ["low", "high"], [0, 1]),
    ([[0, 0, 1], [1, 0, 0]], {"label_names": STARS[:3]}, STARS[:3], [[0, 0, 1], [1, 0, 0]]),
    ([[0], [1, 2]], {"label_names": STARS[:3]}, STARS[:3], [[1, 0, 0], [0, 1, 1]]),
    ([3, 1, 2], {"collator_kwargs": {"problem_type": "regression"}}, [], [3, 1, 2]),
]


@pytest.mark.parametrize("labels, options, names, ids", LABELS)
def test_labels_become_ids_or_numbers(labels, options, names, ids):
    data = given_rows(rows_of(20, labels), rows_of(len(labels), labels), **options)
    assert [*data.id2label.values()] == names
    assert next(iter(data.val_dataloader()))["labels"][: len(ids)].tolist() == ids


@pytest.mark.parametrize("labels, names, ids", [
    (TAGS, ["B", "I", "O"], [-100, 2, 0, 1, -100]), ([[-100, 7, 7]], ["7"], [-100, -100, 0, 0, -100]),
])  # fmt: skip
def test_labels_of_words_become_ids_and_minus_100_stays(labels, names, ids):
    rows = [{"text": ["text", "is", "good"], "label": tags} for tags in labels] * 3
    data = given_rows(rows, rows, task="token_classification")
    assert [*data.id2label.values()] == names
    assert next(iter(data.val_dataloader()))["labels"][0][:5].tolist() == ids


def test_columns_of_0_and_1_are_several_labels():
    rows = [{"text": f"text {i}", "x": i % 2, "y": 1} for i in range(8)]
    data = given_rows(rows, rows[:2], label_column=["x", "y"])
    assert data.count_labels("train") == {"x": 4, "y": 8}
    assert next(iter(data.val_dataloader()))["labels"][:2].tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize(
    "test", [[{"text": "text is good"}], [{"text": "text is good", "label": -1}]]
)
@pytest.mark.parametrize(
    "labels",
    [("bad", "good"), (["b", "a"], ["c"]), ([0, 1], [1, 1]), (0.5, 2.5)],
    ids=["one", "several", "marks", "amounts"],
)
def test_a_test_split_may_have_no_labels(labels, test):
    data = given_rows(rows_of(8, labels), rows_of(2, labels), test)
    batch = next(iter(data.test_dataloader()))
    assert "labels" not in batch and texts(batch)[0] == "text is good"
    assert not any(data.count_labels("test").values()) and "test: 1 examples" in data.describe()


# --- mistakes -------------------------------------------------------------------------------------


WRONG = [
    ({"task": "translation"}, "'translation'"), ({"text_column": ["a", "b", "c"]}, "text_column"), ({"packing": True}, "packing"),
    ({"bad_rows": "drop"}, "bad_rows"), ({"label_names": ["x", "x"]}, "label_names"), ({"validation_fraction": 1.0}, "validation_fraction"),
    ({"file_format": "xml"}, "xml"), ({"val_split": "dev[:3]"}, "'dev'"),
    ({"test_split": "test[:1]"}, "'test'"), ({"text_column": "txet"}, "'txet'"), ({"label_column": 5}, "label_column=5"),
    ({"source": "no/such/path"}, "no/such/path"), ({"source": None}, "dataset_name_or_path"), ({"max_sequence_length": 2}, "max_sequence_length"),
]  # fmt: skip


@pytest.mark.parametrize("options, words", WRONG, ids=[words for _, words in WRONG])
def test_wrong_options_are_named(options, words, tmp_path):
    write(tmp_path / "train.csv", rows_of(6))
    with pytest.raises(ValueError, match=words):
        module(**{"source": str(tmp_path), **options}).setup()


@pytest.mark.parametrize("train, val, words", [
    (1, None, "'bad'"), (8, [{"text": "good", "label": -100}], "validation split"), (4, [{"text": "", "label": "bad"}], "no row is good"), (8, [{"text": "good", "label": "ugly"}], "'ugly'"),
])  # fmt: skip
def test_rows_that_nothing_is_learned_from_are_refused(train, val, words):
    with pytest.raises(ValueError, match=words):
        given_rows(rows_of(train), val, bad_rows="skip")


# --- batches --------------------------------------------------------------------------------------


def epoch_of(data, epoch=0, rank=0, world_size=1):
    data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size)
    loader = data.train_dataloader()
    loader.load_state_dict(loader.state_dict() | {"delivered": epoch * len(loader)})
    return [batch for batch, _ in zip(loader, range(len(loader)))]


def test_an_epoch_reads_each_row_once_and_the_next_in_another_order():
    data = given_rows(rows_of(40), rows_of(2))
    first, again, second = (
        [text for batch in epoch_of(data, epoch) for text in texts(batch)] for epoch in (0, 0, 1)
    )
    assert first == again != second
    assert sorted(first) == sorted(second) and len(set(first)) == 40


@pytest.mark.parametrize(("num_gpus", "multiple"), [(0, 1), (1, 8)])
def test_batches_of_similar_length_have_less_padding(monkeypatch, num_gpus, multiple):
    monkeypatch.setattr("bertlab.data.rows.num_devices", lambda device: num_gpus)
    rng = np.random.default_rng(0)
    rows = [{"text": "good " * n, "label": "ab"[n % 2]} for n in rng.integers(1, 50, 400)]
    data = given_rows(rows, rows[:2])
    padding = lambda batches: (
        1
        - sum(b["attention_mask"].sum() for b in batches)
        / sum(b["attention_mask"].numel() for b in batches)
    )
    grouped = epoch_of(data)
    data.shuffle_train = False
    assert padding(grouped) < padding(epoch_of(data)) / 3
    widths = [batch["input_ids"].shape[1] for batch in grouped]
    assert widths != sorted(widths) and np.gcd.reduce([w for w in widths if w < 64]) == multiple


def test_fewer_rows_than_a_batch_are_one_batch():
    data = given_rows(rows_of(6), rows_of(2), train_batch_size=32)
    (batch,) = epoch_of(data)
    assert len(batch["labels"]) == 6 and batch["attention_mask"].any(1).all()


@pytest.mark.parametrize("world_size", [3])
def test_ranks_read_each_row_once_in_equally_many_batches(world_size):
    data = given_rows(rows_of(50), rows_of(11))
    ranks = [epoch_of(data, 1, rank, world_size) for rank in range(world_size)]
    assert [len(batches) for batches in ranks] == [5] * world_size
    read = [text for batches in ranks for batch in batches for text in texts(batch) if text]
    assert sorted(read) == sorted(row["text"].strip() for row in rows_of(50))
    seen = []
    for rank in range(world_size):
        data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size)
        batches = list(data.val_dataloader())
        assert len(batches) == -(-11 // (4 * world_size)) and all(
            len(batch["labels"]) == 4 for batch in batches
        )
        for batch in batches:
            blank = batch["attention_mask"].sum(1) == 0
            assert (batch["labels"][blank] == -100).all() and (batch["labels"][~blank] >= 0).all()
            seen += [text for text, empty in zip(texts(batch), blank) if not empty]
    assert sorted(seen) == sorted(row["text"].strip() for row in rows_of(11))


def question(i: int, context: str) -> dict:
    answers = {"text": ["good"], "answer_start": [context.index("good")]}
    return {"question": f"text number {i} ?", "context": context, "answers": answers}


# --- formats --------------------------------------------------------------------------------------


def conllu(*sentences: str) -> str:
    "Words and tags as in `good/ADJ is/AUX`."
    pairs = [[word.split("/") for word in sentence.split()] for sentence in sentences]
    return "\n".join(
        "".join(
            f"{i}\t{word}\t_\t{tag}\t{tag.lower()}" + "\t_" * 5 + "\n"
            for i, (word, tag) in enumerate(words, 1)
        )
        for words in pairs
    )


TAGGED = [f"text/NOUN is/AUX {word}/ADJ {i}/NUM" for i in range(6) for word in ("good", "bad")]


def save(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def tagger(source, **options):
    data = module("token_classification", str(source), **options)
    data.setup()
    return data


@pytest.mark.parametrize("column", [None, "XPOS", "xpos", 5, "5", -6])
def test_columns_of_conllu_are_named_or_counted(column, tmp_path):
    for name, sentences in {"train": TAGGED, "dev": TAGGED[:2]}.items():
        save(tmp_path / f"x-ud-{name}.conllu", conllu(*sentences))
    data = tagger(tmp_path, label_column=column)
    assert {split: len(rows) for split, rows in data.datasets.items()} == {
        "train": 12,
        "validation": 2,
    }
    names = [*data.id2label.values()]
    assert names == (
        ["ADJ", "AUX", "NOUN", "NUM"] if column is None else ["adj", "aux", "noun", "num"]
    )
    assert next(iter(data.val_dataloader()))["labels"][0][:6].tolist() == [-100, 2, 1, 0, 3, -100]


def test_files_by_split_and_a_format_by_name(tmp_path):
    train, dev = (
        save(tmp_path / f"{name}.dat", "text;label\n" + f"{name} is good;1\ntext is bad;0\n" * 3)
        for name in ("one", "two")
    )
    data = module(
        source={"train": train, "dev": dev}, file_format="csv", reader_kwargs={"delimiter": ";"}
    )
    data.setup()
    assert data.label2id == {"0": 0, "1": 1} and data.rows["validation"][0]["text"] == "two is good"


# --- bad rows -------------------------------------------------------------------------------------


def test_a_bad_line_is_named_even_if_it_is_held_out(tmp_path):
    good = "".join(f'"text {i},\nis good",{i / 4}\n' for i in range(6))
    path = save(
        tmp_path / "a.csv", "text,label\n" + good + "number,high\n" + good.replace("text", "number")
    )
    with pytest.raises(ValueError, match="^a.csv line 14: .*'high'"):
        module(source=path).setup()
    data = module(source=path, bad_rows="skip")
    data.setup()
    assert sum(map(len, data.rows.values())) == 12 and "a.csv line 14" in data.describe()


# --- packing --------------------------------------------------------------------------------------


def test_packed_rows_hold_each_sentence_once_with_its_labels():
    rng = np.random.default_rng(0)
    rows = [
        {"text": ["text", str(i)] + ["good"] * int(n), "label": ["A", "B"] + ["C"] * int(n)}
        for i, n in enumerate(rng.integers(0, 20, 40))
    ]
    plain, packed = (
        given_rows(rows, rows[:3], task="token_classification", packing=p, train_batch_size=1)
        for p in (False, True)
    )
    content = lambda ids, labels: (tuple(ids.tolist()), tuple(labels.tolist()))
    expected = sorted(
        content(row["input_ids"], row["labels"]) for row in plain.datasets["train"].rows
    )
    found, shapes = [], set()
    for batch in packed.train_dataloader():
        shapes.add(tuple(batch["input_ids"].shape))
        ids, mask, labels, places = (
            batch[k][0] for k in ("input_ids", "attention_mask", "labels", "position_ids")
        )
        for document in range(1, int(mask.max()) + 1):
            found.append(content(ids[mask == document], labels[mask == document]))
            assert places[mask == document].tolist() == list(range(int((mask == document).sum())))
        assert (labels[mask == 0] == -100).all()
    assert sorted(found) == expected and shapes == {(1, 64)} and len(packed.datasets["train"]) < 15
    assert len(packed.datasets["validation"]) == 3, (
        "predictions are by sentence, and so are these rows"
    )


# --- what a user is told --------------------------------------------------------------------------


def test_describe_counts_rows_labels_and_shared_texts():
    data = FinetuningDataModule("classification", max_sequence_length=64, vocab_size=60)
    data.set_datasets(rows_of(12, ("bad", "bad", "good")), rows_of(3))
    data.setup()  # trains a tokenizer
    assert len(data.tokenizer) <= 60 and data.texts()[0] == rows_of(1)[0]["text"]
    text = data.describe(num_rows=1)
    parts = (
        "train: 12 examples, 12 rows",
        "bad: 8 (67%)",
        "good: 4 (33%)",
        "3 rows have a text",
        "| [CLS]",
    )
    assert all(part in text for part in parts), text


def test_of_many_labels_the_commonest_are_described():
    rows = rows_of(75, [f"label {n}" for n in range(25)]) + rows_of(1, ["label 7"])
    text = given_rows(rows, rows).describe()
    assert text.count("  label ") == 10 and "  label 7: 4 (5%)" in text
    assert text.count("  20 other labels: 3 each") == 2


def test_texts_that_are_cut_are_counted_and_said():
    rows = [
        {"text": "good " * n, "label": "ab"[n % 2]} for n in (3, 4, 61, 62, 63, 90)
    ]  # 62 words and two special tokens fit
    data = given_rows(rows, rows[:2])
    assert data.num_cut == {"train": 2, "validation": 0}
    assert "2 texts have more than max_sequence_length=64 tokens" in data.describe()
    tags = [{"text": ["good"] * n, "label": ["A"] * n} for n in (3, 62, 63)]
    assert given_rows(tags, tags[:1], task="token_classification").num_cut["train"] == 1


@pytest.mark.parametrize("row, message", [
    ({"text": "x"}, "'label'"), ({"text": " ", "label": "bad"}, "'text'"), ("good", "'good'"), ({"text": "x", "label": "ugly"}, "'ugly'"),
])  # fmt: skip
def test_a_bad_row_is_named_or_counted(row, message):
    rows = [*rows_of(4), row]
    with pytest.raises(ValueError, match=f"validation row 4.*{message}"):
        given_rows(rows_of(8), rows)
    data = given_rows(rows_of(8), rows, bad_rows="skip")
    assert len(data.rows["validation"]) == 4 and "validation: 1 rows left out" in data.describe()


def test_long_tagged_texts_are_read_whole_in_validation():
    rows = [{"text": ["text", "is", "good"] * 8, "label": ["A", "B", "C"] * 8}] * 5
    data = given_rows(rows, rows[:2], [{"text": row["text"]} for row in rows[:2]], task="token_classification",
                      max_sequence_length=16)  # fmt: skip
    counts = {
        s: sum(int((r["labels"] >= 0).sum()) for r in data.datasets[s].rows)
        for s in ("train", "validation")
    }
    assert counts["validation"] == 48 and counts["train"] < 5 * 24
    assert len(data.datasets["test"]) == 2 and data.num_cut == {
        "train": 5,
        "validation": 2,
        "test": 2,
    }
    assert "labels are lost" in data.describe() and "they are read in pieces" in data.describe()
