"Tasks made from this Python: true labels, splits without leaks, and baselines that are what they say."

import ast
import functools
import io
import keyword
import re
import tokenize
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.finetuning import baselines
from bertlab.finetuning.baselines import (
    AnswerWords,
    bag_of_words_baseline,
    compute_baselines,
    describe_draw,
    majority_baseline,
    own_task,
    score_predictions,
    score_spans,
    tag_words,
)
from bertlab.data.tokenizers import train_tokenizer
from bertlab.data.documents import (
    Document,
    normalized_words,
    ngram_overlap,
    split_words,
    word_pattern,
)
from bertlab.finetuning.data import FinetuningDataModule
from bertlab.data.supervised import read_answers
from bertlab.finetuning.tasks import (
    AREAS,
    SHARES,
    BUILTIN_DATASETS,
    BuiltinDataset,
    area_rows,
    describe_dataset,
    divide_rows,
    load_builtin_dataset,
    module_of,
    place_group,
    question_rows,
    row_text,
    thin_out,
)
from bertlab.model.config import BertLabConfig
from bertlab.model.task_heads import text_loss
from bertlab.finetuning.tasks import (
    ask_about,
    clip,
    label_code,
    label_words,
    list_entry,
    parse_functions,
    stdlib_functions,
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


def test_a_function_is_known_by_its_place_its_defaults_and_its_documentation():
    code = 'class A:\n    @staticmethod\n    def f(x, /, y=(1, 2), *rest, key=None, must, **more):\n        "Say."\n'
    function = parsed(code)
    assert (function.source, function.name, function.doc) == ("m:A.f", "f", "Say.")
    assert function.parameters == (("x", None), ("y", "(1, 2)"), ("key", "None"), ("must", None))
    assert function.code.startswith("    def f(") and function.names == {"A", "f"}


def test_functions_inside_branches_and_functions_are_found():
    code = "if True:\n    def a():\n        async def b(): pass\nelse:\n    def c(): pass\n"
    assert {f.source for f in parse_functions(code, "m")} == {"m:a", "m:a.b", "m:c"}


def test_form_feeds_do_not_shift_the_code_of_a_function():
    code = "x = 1\n\x0c\ndef f():\n    return 'f'\n"
    assert parsed(code).code == "def f():\n    return 'f'\n"


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
    assert " ".join(f"{word}/{kind}" for word, kind in labelled) == expected


def test_words_in_strings_are_strings_and_the_docstring_is_left_out():
    labelled = kinds_of('def f():\n    """Doc of f."""\n    return "if x" + f"{f}"\n')
    assert (
        ("if", "string") in labelled
        and ("Doc", "string") not in labelled
        and ("return", "keyword") in labelled
    )


def test_a_method_is_read_as_it_stands_even_with_a_string_left_of_it():
    code = '    def f(self):\n        return """a\nb""", self\n'
    labelled = kinds_of(code)
    assert labelled[0] == ("def", "keyword") and labelled[-1] == ("self", "parameter")
    assert ("b", "string") in labelled and ("if", "keyword") not in labelled


def test_keywords_and_numbers_are_those_of_the_tokenizer():
    "Counted anew from the tokens, for a hundred functions of the library."
    checked = 0
    for function in stdlib_functions()[:150]:
        if not function.code.isascii() or function.code[:1].isspace() or function.doc:
            continue
        tokens = list(tokenize.generate_tokens(io.StringIO(function.code).readline))
        words, kinds = label_code(function.code)
        keywords = [
            t.string for t in tokens if t.type == tokenize.NAME and keyword.iskeyword(t.string)
        ]
        assert [w for w, k in zip(words, kinds) if k == "keyword"] == keywords
        numbers = [t.string for t in tokens if t.type == tokenize.NUMBER]
        assert [w for w, k in zip(words, kinds) if k == "number"] == numbers
        declared = [n.arg for n in ast.walk(ast.parse(function.code)) if isinstance(n, ast.arg)]
        assert Counter(declared) <= Counter(w for w, k in zip(words, kinds) if k == "parameter")
        checked += 1
    assert checked > 5


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


def test_questions_have_the_answers_that_stand_in_the_line():
    code = 'def f(a, b="x=1", x=1):\n    "Count the things. Returns their number, or raises KeyError if none."\n'
    assert asked(code) == {
        "What is the default of a in f?": None,
        "What is the default of b in f?": "'x=1'",
        "What is the default of x in f?": "1",
        "What does f do?": "Count the things",
        "What does f return?": "their number",
        "Which exception does f raise?": "KeyError",
    }


def test_a_default_is_found_behind_its_own_name_and_not_inside_another():
    function = parsed('def f(b="x=1", ax=1, x=1):\n    "Do."\n')
    line = list_entry(function)[0]
    assert line.startswith("f(b='x=1', ax=1, x=1)")
    spans = [span for kind, _, span in ask_about(function) if kind == "default"]
    assert spans == [(4, 9), (14, 15), (19, 20)]


def test_nothing_is_asked_where_the_documentation_is_not_plain():
    "It speaks of returning, but the pattern does not see what: neither an answer nor none is right."
    questions = asked('def f():\n    "Whatever is returned, an Exception is too"\n')
    assert questions == {}


@many
@given(st.text(max_size=40), st.integers(1, 40))
def test_clipping_keeps_the_beginning(text, size):
    clipped = clip(text, size)
    assert text.startswith(clipped) and len(clipped) <= size
    assert clipped == text or text[len(clipped)] == " " or not clipped


# Splits


@many
@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.text("xyz ", max_size=12)), max_size=40),
    st.integers(0, 5),
)
def test_groups_stay_together_and_nothing_comes_twice(pairs, seed):
    rows = [{"text": text, "source": f"{group}:f{n}"} for n, (group, text) in enumerate(pairs)]
    splits, dropped = divide_rows(rows, seed, SMALL, module_of)
    kept = [row for part in splits.values() for row in part]
    groups = [{module_of(row["source"]) for row in part} for part in splits.values()]
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert len({normalized_words(row["text"]) for row in kept}) == len(kept)
    assert len(kept) + dropped.total() == len(rows)


def test_a_text_half_of_which_is_in_training_is_not_asked_about():
    common = "one two three four five six seven eight nine ten eleven twelve"
    rows = [{"text": f"{common} {group}", "source": f"{group}:f"} for group in map(str, range(40))]
    splits, dropped = divide_rows(rows, 0, SMALL, module_of)
    assert splits["train"] and not splits["validation"] and not splits["test"]
    assert dropped["half or more stands in a training row"] == 40 - len(splits["train"])


def test_a_new_module_moves_no_other_and_a_seed_moves_many():
    places = [place_group(f"m{n}") for n in range(300)]
    assert places == [place_group(f"m{n}") for n in range(300)]
    moved = sum(place != place_group(f"m{n}", 1) for n, place in enumerate(places))
    assert moved > 90 and set(places) == set(SHARES)


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
        task.kind,
        tokenizer,
        max_sequence_length=task.max_sequence_length,
        collator_kwargs={"doc_stride": 16} if task.kind.startswith("q") else None,
    )
    data.set_datasets(**task.splits)
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert set(data.id2label.values()) == set(task.label_names)
    assert batch["input_ids"].shape[1] <= task.max_sequence_length
    labels = batch["start_positions" if task.kind.startswith("q") else "labels"]
    assert (labels >= 0).any()


# The tasks


def test_areas_share_no_module_and_no_text_names_one():
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
    shown = " ".join(row["text"] for row in area_rows(hide_names=False, max_per_area=60)).lower()
    assert any(name in shown for name in names)


def test_every_answer_stands_at_its_place_and_no_answer_is_right_too_often():
    rows = question_rows()
    answered = 0
    for number, row in enumerate(rows):
        spans = read_answers(
            row, "answers", row["context"], number
        )  # raises where the place is wrong
        assert len(spans) == len(row["answers"]["text"]) <= 1
        answered += len(spans)
        name = row["question"].removesuffix("?").split()[-1 if row["kind"] == "default" else -2]
        assert f"{name}(" in row["context"]
    assert 0.5 < answered / len(rows) < 0.95
    texts = Counter(row["answers"]["text"][0] if row["answers"]["text"] else "" for row in rows)
    assert texts.most_common(1)[0][1] < 0.35 * len(rows)


def test_thinning_counts_against_the_other_answers():
    row = lambda n, text: {"question": str(n), "context": "", "kind": "k",
                           "answers": {"text": [text] if text else []}}  # fmt: skip
    rows = (
        [row(n, "None") for n in range(100)]
        + [row(100 + n, "") for n in range(40)]
        + [row(999, "x")] * 1
    )
    kept = Counter(tuple(r["answers"]["text"]) for r in thin_out(rows, 0.5))
    assert kept == {
        ("None",): 20,
        (): 40,
        ("x",): 1,
    }  # 41 others halved; 101 halved is more than there are


@pytest.mark.parametrize(
    "wrong", [{"name": "docstrings"}, {"name": "doc-words", "sizes": {"dev": 3}}]
)
def test_a_wrong_name_is_answered_by_the_known_ones(wrong):
    with pytest.raises(ValueError, match="docstring-area|validation"):
        load_builtin_dataset(**wrong)


def test_a_task_describes_itself():
    text = describe_dataset(small("docstring-area"))
    assert "PSF" in text and "windows" in text and "train 250" in text


# Scores and baselines


def test_predictions_of_another_length_are_refused():
    rows = [{"text": "x", "label": label} for label in "aab"]
    with pytest.raises(ValueError, match="predictions must be 3"):
        score_predictions(task_of("classification", rows, rows, ("a", "b")), ["a"])


def task_of(kind: str, train: list[dict], test: list[dict], labels=()) -> BuiltinDataset:
    columns = ("question", "answers") if kind.startswith("q") else ("text", "label")
    return BuiltinDataset("t", kind, "", *columns, labels, "f1", train, train, test)


def test_the_majority_is_the_most_frequent_label_and_an_answer_only_where_it_stands():
    rows = [{"text": "x", "label": label} for label in "aab"]
    assert majority_baseline(task_of("classification", rows, rows)).predictions == ["a"] * 3
    tags = [{"text": ["x", "y"], "label": ["n", "v"]}, {"text": ["z"], "label": ["v"]}]
    assert majority_baseline(task_of("token_classification", tags, tags)).predictions == [
        ["v", "v"],
        ["v"],
    ]
    say = lambda context, *texts: {
        "question": "What?",
        "context": context,
        "answers": {"text": list(texts), "answer_start": [context.find(text) for text in texts]},
    }
    rows = [say("x=None", "None"), say("y=None", "None"), say("z")]
    made = majority_baseline(task_of("question_answering", rows, rows))
    assert made.predictions == ["None", "None", ""] and made.scores["exact_match"] == 1


def test_a_table_knows_words_then_shapes_then_nothing():
    train = [{"text": ["if", "Foo", "if", "if", "9"], "label": ["k", "c", "k", "v", "n"]}]
    test = [{"text": ["if", "Bar", "77", "--"], "label": ["k"] * 4}]
    assert tag_words(task_of("token_classification", train, test)) == [["k", "c", "n", "k"]]


def test_spans_stay_in_their_line_and_within_the_longest_answer():
    row = {
        "question": "What is the default of x in f?",
        "context": "f(x=1): a b\ng(y): c",
        "answers": {"text": ["1"], "answer_start": [4]},
    }
    features, spans = score_spans(row, AnswerWords([row]), max_words=3)
    texts = [row["context"][slice(*span)] for span in spans]
    assert features.shape == (3, len(spans)) and len(set(spans)) == len(spans)
    assert not any("\n" in text for text in texts) and {"1", "x=1", "a b", "c"} <= set(texts)
    assert "(x=1" not in texts  # four pieces
    own = features[0]
    assert texts[own.argmax()] == "1"


def test_spans_are_those_of_a_loop_over_words_in_its_order():
    row = {
        "question": "where is b ?",
        "context": "a b .\n\nc d e f\ng",
        "answers": {"text": ["d e"], "answer_start": [9]},
    }
    features, spans = score_spans(row, AnswerWords([row]), max_words=2, reach=1)
    texts = ["a", "a b", "b", "b .", ".", "c", "c d", "d", "d e", "e", "e f", "f", "g"]
    assert [row["context"][slice(*span)] for span in spans] == texts
    near = features[1] / max(features[1])  # only b is asked for, next to a and to the full stop
    assert near.tolist() == [1, 0, 0, 0, 1, *[0] * 8]


def test_a_bag_of_words_counts_letters_where_no_spaces_are_written():
    draw = np.random.default_rng(0)
    filler = lambda n: "".join(
        draw.choice(list("天地人大小上下左右中国朋友今明昨早晚来去")) for _ in range(n)
    )  # noqa: E731

    def rows(count):  # noqa: E306
        nouns = {"food": "饭", "sport": "球"}
        return [
            {"text": f"{filler(6)}{nouns[label]}{filler(5)},{filler(4)}。", "label": label}
            for label in draw.choice([*nouns], count).tolist()
        ]

    task = BuiltinDataset(
        "zh",
        "classification",
        "",
        "text",
        "label",
        ("food", "sport"),
        "accuracy",
        rows(120),
        rows(40),
        rows(60),
    )
    assert (
        bag_of_words_baseline(task).scores["accuracy"]
        > 0.95
        > 0.8
        > majority_baseline(task).scores["accuracy"]
    )
    row = {
        "question": "首都是哪里?",
        "context": "我们的首都是北京。",
        "answers": {"text": ["北京"], "answer_start": [6]},
    }
    spans = [
        row["context"][slice(*span)]
        for span in score_spans(row, AnswerWords([row]), max_words=2)[1]
    ]
    assert "北京" in spans and "京。" in spans and not any(len(span) > 2 for span in spans)


@pytest.mark.parametrize("name", NAMES)
def test_words_of_the_tasks_own_rows_are_what_they_were(name):
    "So that baselines of English text keep their scores."

    def texts_in(value):  # noqa: E306
        if isinstance(value, str):
            yield value
        for part in (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, (list, tuple))
            else ()
        ):
            yield from texts_in(part)

    for text in texts_in([small(name).train, small(name).validation, small(name).test]):
        assert (
            split_words(text, signs=True)
            == [m[0] for m in word_pattern(signs=True).finditer(text)]
            == re.findall(r"\w+|[^\w\s]", text)
        )


def test_the_question_baseline_scores_a_text_once_whatever_the_threshold(monkeypatch):
    asked, score = [], baselines.score_answer
    monkeypatch.setattr(baselines, "score_answer", lambda *pair: asked.append(pair) or score(*pair))
    task = small("api-questions")
    baselines.answer_questions(task)
    assert len(asked) == (1 + 9) * len(task.validation), "no answer, and the best of nine mixes"


@pytest.mark.parametrize("name", NAMES)
def test_a_bag_of_words_beats_the_majority_and_does_not_look_at_test_labels(name):
    task = small(name)
    bag = bag_of_words_baseline(task)
    assert bag.scores[task.metric] > majority_baseline(task).scores[task.metric] + 0.05
    assert len(bag.predictions) == len(task.test) and all(
        0 <= score <= 1 for score in bag.scores.values()
    )
    blind = [{**row, task.label_column: task.test[0][task.label_column]} for row in task.test]
    if task.kind == "token_classification":
        blind = [{**row, "label": ["word"] * len(row["text"])} for row in task.test]
    again = bag_of_words_baseline(BuiltinDataset(**{**vars(task), "test": blind}))
    assert again.predictions == bag.predictions


# On one's own rows


def own_data(kind, rows, **options):
    tokenizer = train_tokenizer(["red fish blue dog one two is a what where"] * 9, 80)
    data = FinetuningDataModule(kind, tokenizer, max_sequence_length=32, **options)
    data.set_datasets(
        train=rows,
        val=rows[:10],
        test=[{**row, "label": -1} for row in rows[:4]] if kind == "classification" else None,
    )
    data.setup()
    return data


@pytest.mark.parametrize("names", [["cat", "dog"], [0, 1]])
def test_a_row_without_a_label_is_no_class_of_its_own(names):
    rows = [{"text": "red fish" if i % 2 else "blue dog", "label": names[i % 2]} for i in range(20)]
    data = own_data("classification", [{"text": "one two", "label": -100}, *rows])
    task = own_task(data)
    assert [len(split) for split in (task.train, task.validation, task.test)] == [20, 9, 9]
    found = compute_baselines(data)["bag of words"]
    assert set(found.values()) == {1.0} and "val_f1_macro" in found


def test_a_change_of_minus_hundred_per_cent_is_a_number_for_baselines_and_models_alike():
    change = {"red": -100.0, "blue": 20.0, "one": 0.0, "two": 80.0}
    rows = [{"text": f"{word} fish", "label": value} for word, value in change.items()] * 6
    data = own_data("classification", rows)
    task = own_task(data)
    assert [row["label"] for row in task.test] == [row["label"] for row in rows[:10]]
    said = [change[row["text"].split()[0]] for row in task.test]
    assert score_predictions(task, said) == pytest.approx({"pearson": 1, "spearman": 1}), (
        "no prediction is blotted out"
    )
    batch, real = next(iter(data.val_dataloader())), 10
    config = BertLabConfig(num_labels=1, problem_type="regression", vocab_size=80)
    total, count = text_loss(
        config,
        torch.zeros(len(batch["labels"]), 1),
        batch["labels"],
        batch["attention_mask"].any(1),
    )
    assert count == real and total == sum(value**2 for value in said)


def test_of_many_rows_some_are_drawn_by_lot_because_files_are_sorted_by_label():
    rows = [{"text": "red fish", "label": "fish"}] * 60 + [
        {"text": "blue dog", "label": "dog"}
    ] * 40
    data = FinetuningDataModule("classification", vocab_size=40, max_sequence_length=32)
    data.set_datasets(train=rows[40:], val=rows[40:], test=rows)
    data.setup()
    task = own_task(data, max_rows=50)
    labels = [row["label"] for row in task.test]
    assert len(labels) == 50 and 10 < labels.count("dog") < 30, "the first fifty are all fish"
    assert labels == sorted(labels, reverse=True), "in the order of the file"
    assert own_task(data, 50) == task, "the same lots each time"
    assert own_task(data, 100).test == own_task(data).test and len(own_task(data).test) == 100
    assert describe_draw(data, 50) == (
        "baselines take 50 of 60 train rows, 50 of 60 validation rows, 50 of 100 test rows, "
        "drawn by lot"
    )
    assert (
        describe_draw(data, 60) == "baselines take 60 of 100 test rows, drawn by lot"
        and describe_draw(data) == ""
    )
    assert compute_baselines(data, 50)["majority"]["test_accuracy"] == pytest.approx(
        labels.count("dog") / 50
    )


def test_pairs_of_texts_with_names_get_both_opponents_by_the_metrics_of_the_module():
    rows = [
        {"a": "red fish" if i % 3 else "blue dog", "b": "one", "label": "fish" if i % 3 else "dog"}
        for i in range(30)
    ]
    data = own_data("classification", rows, text_column=["a", "b"])
    assert own_task(data).train[0] == {"text": "blue dog one", "label": "dog"}
    found = compute_baselines(data)
    assert (
        found["majority"]["val_accuracy"] == pytest.approx(0.6)
        and found["bag of words"]["val_accuracy"] == 1
    )
    assert {"val_f1_macro", "val_mcc"} <= set(found["majority"])


def test_several_labels_and_numbers_get_both_opponents():
    rows = [
        {
            "text": "red fish" if i % 2 else "blue dog is",
            "label": ["red", "fish"] if i % 2 else ["dog"],
        }
        for i in range(30)
    ]
    data = FinetuningDataModule("classification", vocab_size=40, max_sequence_length=32)
    data.set_datasets(train=rows, val=rows[:10])
    data.setup()
    assert compute_baselines(data)["bag of words"]["val_f1_micro"] == 1
    rows = [{"text": "red fish " * (i % 4) + "dog", "label": float(i % 4)} for i in range(40)]
    data = FinetuningDataModule("classification", vocab_size=40, max_sequence_length=32)
    data.set_datasets(train=rows, val=rows[:10])
    data.setup()
    found = compute_baselines(data)
    assert found["bag of words"]["val_spearman"] > 0.8 and found["majority"] == {}, (
        "a constant has no correlation"
    )


def test_tags_in_iob2_are_scored_as_entities_and_words_without_a_label_are_left_out():
    rows = [
        {"text": ["red", "fish", "is", "a", "dog"], "label": ["B-X", "I-X", "O", -100, "B-Y"]}
        for _ in range(12)
    ]
    data = own_data("token_classification", rows)
    assert own_task(data).train[0] == {
        "text": ["red", "fish", "is", "dog"],
        "label": ["B-X", "I-X", "O", "B-Y"],
    }
    assert compute_baselines(data)["bag of words"]["val_entity_f1"] == 1


def test_questions_of_ones_own_get_both_opponents():
    answer = lambda word: [{"text": word, "answer_start": 5}]  # noqa: E731
    rows = [
        {"question": "what is a dog", "context": f"a is {word} dog", "answers": answer(word)}
        for word in ["red", "one", "two"] * 4
    ]
    data = own_data("question_answering", rows, collator_kwargs={"doc_stride": 4})
    assert set(compute_baselines(data)) == {"majority", "bag of words"}
    assert 0 < compute_baselines(data)["majority"]["val_exact_match"] < 1


def test_a_single_validation_row_leaves_both_opponents_of_numbers_without_a_score():
    rows = [{"text": "red fish " * (i % 4) + "dog", "label": float(i % 4)} for i in range(20)]
    data = FinetuningDataModule("classification", vocab_size=40, max_sequence_length=32)
    data.set_datasets(train=rows, val=rows[:1])
    data.setup()
    assert compute_baselines(data) == {"majority": {}, "bag of words": {}}


def test_a_sentence_without_a_label_on_any_word_is_no_obstacle():
    known = {"text": ["red", "fish"], "label": ["ADJ", "NOUN"]}
    data = own_data(
        "token_classification", [{"text": ["a", "dog"], "label": [-100, -100]}, *[known] * 11]
    )
    assert compute_baselines(data)["bag of words"]["val_accuracy"] == 1


def test_models_and_opponents_are_judged_by_the_same_words_of_texts_that_are_longer_than_a_row():
    rows = [
        {
            "text": ["red", "fish", "is", "a", "dog"] * n,
            "label": ["B-X", "I-X", "O", "O", "B-Y"] * n,
        }
        for n in (1, 9, 14)
    ]
    data = own_data("token_classification", rows * 4)
    task, names = own_task(data), data.labels.names
    judged = [
        [names[one] for one in row["labels"].tolist() if one >= 0]
        for row in data.datasets["validation"].rows
    ]
    assert [row["label"] for row in task.test] == judged and len(judged) > 10
    assert sum(map(len, judged)) == sum(len(row["label"]) for row in (rows * 4)[:10]), "every word"
    assert len(task.train) == 12 and {row["text"][-1] for row in task.train} == {"dog"}, (
        "opponents learn from whole texts"
    )


def many_labels(num_labels: int, several: bool) -> BuiltinDataset:
    "Each label has two words of its own among others that all share."
    rng = np.random.default_rng(0)

    def rows(num: int) -> list[dict]:
        labels = [f"label{n % num_labels}" for n in range(num)]
        common = rng.integers(0, 900, (num, 6))
        texts = [
            f"{one}a {one}b " + " ".join(f"word{n}" for n in words)
            for one, words in zip(labels, common)
        ]
        return [
            {"text": text, "label": [one] if several else one} for text, one in zip(texts, labels)
        ]

    names = tuple(f"label{n}" for n in range(num_labels))
    problem = "multi_label_classification" if several else None
    return BuiltinDataset(
        "many",
        "classification",
        "",
        "text",
        "label",
        names,
        "f1_macro",
        rows(6 * num_labels),
        rows(num_labels),
        rows(num_labels),
        problem_type=problem,
    )


@pytest.mark.parametrize("several", [False, True])
def test_of_very_many_labels_a_bag_of_words_learns_by_a_few_passes_and_is_the_same_each_time(
    several, monkeypatch
):
    from sklearn.linear_model import LogisticRegression

    task = many_labels(300 if not several else 60, several)
    monkeypatch.setattr(baselines, "_MOST_WEIGHTS", 40_000)
    refuse = lambda *_, **__: pytest.fail("the minimum of so many weights takes minutes")
    monkeypatch.setattr(LogisticRegression, "fit", refuse)
    found, again = bag_of_words_baseline(task), bag_of_words_baseline(task)
    assert found == again and found.scores["accuracy" if not several else "f1_micro"] > 0.9


def test_with_few_labels_the_regression_goes_to_its_minimum(monkeypatch):
    from sklearn.linear_model import SGDClassifier

    monkeypatch.setattr(
        SGDClassifier, "fit", lambda *_, **__: pytest.fail("there is time for the minimum")
    )
    assert bag_of_words_baseline(many_labels(12, False)).scores["accuracy"] > 0.9
