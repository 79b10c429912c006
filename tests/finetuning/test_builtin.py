"Tasks made from this Python: true labels, splits without leaks, and baselines that are what they say."

import functools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.finetuning.baselines import compute_baselines, dataset_baselines
from bertlab.data.tokenizers import train_tokenizer
from bertlab.data.documents import (
    Document,
    normalized_words,
    ngram_overlap,
)
from bertlab.finetuning.data import FinetuningDataModule
from bertlab.data.supervised import read_answers
from bertlab.finetuning.builtin import (
    AREAS,
    SHARES,
    BUILTIN_DATASETS,
    BuiltinDataset,
    area_rows,
    divide_rows,
    load_builtin_dataset,
    module_of,
    question_rows,
    row_text,
)
from bertlab.finetuning.builtin import (
    ask_about,
    label_code,
    label_words,
    list_entry,
    parse_functions,
)

many = settings(max_examples=60, deadline=None, derandomize=True)
SMALL = {"train": 250, "validation": 60, "test": 80}
NAMES = sorted(BUILTIN_DATASETS)


@functools.cache
def small(name: str, seed: int = 0) -> BuiltinDataset:
    options = {"max_functions": 500} if name == "code-tokens" else {}
    return load_builtin_dataset(name, seed, SMALL, **options)


def splits_of(task: BuiltinDataset) -> dict[str, list[dict]]:
    return {split: getattr(task, split) for split in SHARES}


# What the teachers say


def parsed(code: str):
    [function] = parse_functions(code, "m")
    return function


def test_a_function_has_path_defaults_and_documentation():
    code = 'class A:\n    @staticmethod\n    def f(x, /, y=(1, 2), *rest, key=None, must, **more):\n        "Say."\n'
    function = parsed(code)
    assert (function.source, function.name, function.doc) == ("m:A.f", "f", "Say.")
    assert function.parameters == (("x", None), ("y", "(1, 2)"), ("key", "None"), ("must", None))
    assert function.code.startswith("    def f(") and function.names == {"A", "f"}


def kinds_of(code: str) -> list[tuple[str, str]]:
    return list(zip(*label_code(code)))


def test_names_are_told_apart_by_what_they_do():
    labelled = kinds_of("def f(a, b=1):\n    c = g(a).h\n    return c.k(a=b)  # c\n")
    expected = (
        "def/keyword f/function (/operator a/parameter ,/operator b/parameter =/operator 1/number )/operator :/operator "
        "c/variable =/operator g/function (/operator a/parameter )/operator ./operator h/attribute "
        "return/keyword c/variable ./operator k/function (/operator a/argument =/operator b/parameter )/operator "
        "#/comment c/comment"
    )
    assert " ".join(f"{word}/{label}" for word, label in labelled) == expected


def test_words_in_strings_are_strings():
    labelled = kinds_of('def f():\n    """Doc of f."""\n    return "if x" + f"{f}"\n')
    assert (
        ("if", "string") in labelled
        and ("Doc", "string") not in labelled
        and ("return", "keyword") in labelled
    )


def test_words_of_documentation_follow_the_signature():
    function = parsed(
        'def load(path, a=1):\n    "Load a path or a Path. Raise ValueError, open the list."\n'
    )
    labelled = dict(zip(*label_words(function)))
    assert labelled["path"] == "parameter" and labelled["ValueError"] == labelled["load"] == "name"
    assert labelled["a"] == labelled["Path"] == labelled["open"] == labelled["list"] == "word"


def asked(code: str) -> dict[str, str | None]:
    function = parsed(code)
    line = list_entry(function)[0]
    return {
        question: line[slice(*span)] if span else None for _, question, span in ask_about(function)
    }


def test_questions_have_the_answers_of_the_line():
    code = 'def f(a, b="x=1", x=1):\n    "Count the things. Returns their number, or raises KeyError if none."\n'
    assert asked(code) == {
        "What is the default of a in f?": None,
        "What is the default of b in f?": "'x=1'",
        "What is the default of x in f?": "1",
        "What does f do?": "Count the things",
        "What does f return?": "their number",
        "Which exception does f raise?": "KeyError",
    }


# Splits


@many
@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.text("xyz ", max_size=12)), max_size=40),
    st.integers(0, 5),
)
def test_groups_stay_together_and_nothing_comes_twice(pairs, seed):
    rows = [{"text": text, "source": f"{group}:f{n}"} for n, (group, text) in enumerate(pairs)]
    splits, dropped = divide_rows(rows, seed, SMALL, module_of)
    all_rows = [row for part in splits.values() for row in part]
    groups = [{module_of(row["source"]) for row in part} for part in splits.values()]
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert len({normalized_words(row["text"]) for row in all_rows}) == len(all_rows)
    assert len(all_rows) + dropped.total() == len(rows)


def test_twins_of_training_rows_are_left_out():
    common = "one two three four five six seven eight nine ten eleven twelve"
    rows = [{"text": f"{common} {group}", "source": f"{group}:f"} for group in map(str, range(40))]
    splits, dropped = divide_rows(rows, 0, SMALL, module_of)
    assert splits["train"] and not splits["validation"] and not splits["test"]
    assert dropped["half or more is in a training row"] == 40 - len(splits["train"])


@pytest.mark.parametrize("name", NAMES)
def test_no_group_and_no_text_is_in_two_splits(name):
    task, group = small(name), BUILTIN_DATASETS[name].group_of
    splits = splits_of(task)
    assert all(len(rows) >= 30 for rows in splits.values())
    groups = [{group(row["source"]) for row in rows} for rows in splits.values()]
    assert sum(map(len, groups)) == len(set().union(*groups))
    as_documents = [[Document(row_text(row), "") for row in rows] for rows in splits.values()]
    for held_out in as_documents[1:]:
        assert max(ngram_overlap(held_out, as_documents[0])) < 0.5


@pytest.mark.parametrize("name", NAMES)
def test_a_task_is_a_function_of_its_seed(name):
    options = {"max_functions": 500} if name == "code-tokens" else {}
    assert load_builtin_dataset(name, 0, SMALL, **options).test == small(name).test
    assert small(name, 1).test != small(name).test


@pytest.mark.parametrize("name", NAMES)
def test_the_data_module_takes_a_task_as_it_is(name):
    task = small(name)
    tokenizer = train_tokenizer([row_text(row) for row in task.train], 600)
    data = FinetuningDataModule(
        task.task,
        tokenizer,
        max_sequence_length=task.max_sequence_length,
        collator_kwargs={"doc_stride": 16} if task.task.startswith("q") else None,
    )
    data.set_datasets(**task.splits)
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert set(data.id2label.values()) == set(task.label_names)
    assert batch["input_ids"].shape[1] <= task.max_sequence_length
    labels = batch["start_positions" if task.task.startswith("q") else "labels"]
    assert (labels >= 0).any()


# The tasks


def test_no_text_names_an_area():
    modules = [module for names in AREAS.values() for module in names.split()]
    assert (
        len(modules) == len(set(modules)) == len(" ".join(AREAS.values()).split())
        and len(AREAS) == 12
    )
    names = {"asyncio", "tkinter", "email", "unittest", "json", "urllib"}
    for row in area_rows(max_per_area=60):
        words = {
            word
            for part in row["text"].lower().split("_")
            for word in normalized_words(part).split()
        }
        assert not words & names
    joined = " ".join(row["text"] for row in area_rows(hide_names=False, max_per_area=60)).lower()
    assert any(name in joined for name in names)


def test_answers_are_in_place_and_none_is_too_frequent():
    rows = question_rows()
    answered = 0
    for row in rows:
        spans = read_answers(row, "answers", row["context"])  # raises for a wrong position
        assert len(spans) == len(row["answers"]["text"]) <= 1
        answered += len(spans)
        name = row["question"].removesuffix("?").split()[-1 if row["kind"] == "default" else -2]
        assert f"{name}(" in row["context"]
    assert 0.5 < answered / len(rows) < 0.95
    texts = Counter(row["answers"]["text"][0] if row["answers"]["text"] else "" for row in rows)
    assert texts.most_common(1)[0][1] < 0.35 * len(rows)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"name": "docstrings"}, "name='docstrings'"),
        ({"name": "doc-words", "sizes": {"dev": 3}}, "sizes='dev'"),
    ],
)
def test_wrong_names_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        load_builtin_dataset(**wrong)


# Scores and baselines


def test_a_data_module_has_the_baselines_of_its_rows():
    dataset = small("docstring-area")
    data = FinetuningDataModule("classification", max_sequence_length=32, vocab_size=300)
    data.set_datasets(**dataset.splits)
    data.setup()
    computed, expected = compute_baselines(data), dataset_baselines(dataset)
    for name, baseline in expected.items():
        assert computed[name] == {f"test_{k}": v for k, v in baseline.scores.items()}
    drawn = compute_baselines(data, max_rows=60)
    assert drawn != computed and drawn == compute_baselines(data, max_rows=60)
