"Answers: scored as SQuAD's and MLQA's scripts do, and cut out of windows to the character."

import re
import string
import unicodedata
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.data.tokenizers import train_tokenizer
from bertlab.finetuning.answers import (
    Answer,
    QuestionAnswering,
    choose_answer,
    _normalize_answer,
    rank_answers,
    score_answer,
)


ANSWERS = [  # answer, gold ones, exact match, F1; worked by hand
    ("The Eiffel Tower!", ["Eiffel Tower"], 1, 1),
    ("eiffel   tower in Paris", ["Eiffel Tower"], 0, 2 * 2 / (4 + 2)),
    ("in 1889", ["1889", "the year 1889", "March 1889"], 0, 2 * 1 / (2 + 1)),
    (
        "to be or not to be",
        ["to be to be to be"],
        0,
        2 * 4 / (6 + 6),
    ),  # "to" and "be" count twice each
    ("", [], 1, 1),  # SQuAD 2.0: unanswerable, and nothing was answered
    ("Paris", [], 0, 0),
    ("", ["Paris"], 0, 0),
    ("the", ["Paris"], 0, 0),  # nothing is left of the answer
    ("Paris", ["the", "Paris"], 1, 1),  # a gold answer of nothing but an article is none
    ("a theatre", ["theatre"], 1, 1),  # "the" within a word stays
    ("U.S.A", ["USA"], 1, 1),
    ("well-known", ["well known"], 0, 0),  # punctuation goes without leaving a space
    ("an é", ["É"], 1, 1),
]


@pytest.mark.parametrize("answer, golds, exact, overlap", ANSWERS)
def test_answers_by_hand(answer, golds, exact, overlap):
    for score, expected in (("exact_match", exact), ("f1", overlap)):
        assert score_answer(answer, golds, score) == pytest.approx(expected)


@given(
    *[
        st.text(
            alphabet=st.one_of(st.characters(max_codepoint=127), st.sampled_from("a the,.-'")),
            max_size=20,
        )
    ]
    * 2
)
@settings(derandomize=True, deadline=None, max_examples=300)
def test_answers_in_ascii_score_as_squads_formula(answer, gold):
    def words(text):
        bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", bare).split()

    answer_words, gold_words = words(answer), words(gold)
    same = (Counter(answer_words) & Counter(gold_words)).total()
    overlap = (
        2 * same / (len(answer_words) + len(gold_words))
        if answer_words and gold_words
        else float(answer_words == gold_words)
    )
    assert _normalize_answer(answer) == " ".join(answer_words)
    assert score_answer(answer, [gold], "exact_match") == float(answer_words == gold_words)
    assert score_answer(answer, [gold]) == overlap


@given(*[st.text(alphabet="北京市1b9 ,。《》、·(", max_size=12)] * 2)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_answers_in_chinese_score_as_in_mlqa(answer, gold):
    "Punctuation of category P goes; an ideograph is a token, and what stands between ideographs is cut at spaces."

    def tokens(text):  # noqa: E306
        bare = "".join(c for c in text.lower() if not unicodedata.category(c).startswith("P"))
        return "".join(f" {c} " if "\u4e00" <= c <= "\u9fa5" else c for c in bare).split()

    answer_tokens, gold_tokens = tokens(answer), tokens(gold)
    assert score_answer(answer, [gold], "exact_match") == float(answer_tokens == gold_tokens)
    same = (Counter(answer_tokens) & Counter(gold_tokens)).total()
    assert score_answer(answer, [gold]) == pytest.approx(
        2 * same / (len(answer_tokens) + len(gold_tokens))
        if answer_tokens and gold_tokens
        else float(answer_tokens == gold_tokens)
    )


@pytest.mark.parametrize("answer, gold, exact, overlap", [
    ("北京市朝阳区", "北京市朝阳", 0, 2 * 5 / (6 + 5)),
    ("《红楼梦》", "红楼梦。", 1, 1),
    ("القاهرة،", "القاهرة", 1, 1),
    ("दिल्ली।", "दिल्ली", 1, 1),
    ("น้ำ", "นำ", 0, 2 * 1 / (2 + 2)),  # a letter with another mark is another letter; sara am is the same
    ("thành phố à", "thành phố á", 0, 2 * 2 / (3 + 3)),
    ("x a̱", "x the̱", 0, 2 * 1 / (2 + 2)),  # no composed form: the mark makes them no articles
    ("a x̄", "x̄", 1, 1),
    ("“Paris”", "Paris", 1, 1),
])  # fmt: skip
def test_answers_of_other_scripts_by_hand(answer, gold, exact, overlap):
    for form in ("NFC", "NFD"):
        normalized = unicodedata.normalize(form, answer)
        assert score_answer(normalized, [gold], "exact_match") == exact, form
        assert score_answer(normalized, [gold]) == pytest.approx(overlap), form


def window(start, end, length=6):
    logits = np.full((2, length), -1.0)
    logits[0, start] = logits[1, end] = 3.0
    return logits


OFFSETS = np.array([[-1, -1], [0, 2], [3, 5], [6, 8], [9, 11], [-1, -1]])


def test_windows_in_any_order_give_one_answer_a_question():
    rows = [{"context": "ab cd ef gh", "answers": {"text": [gold]}} for gold in ("cd ef", "gh")]
    parts = [(window(2, 3), 0), (window(4, 4) / 9, 0), (window(4, 4), 1), (window(0, 0), -1)]
    for order in (parts, parts[::-1]):
        task = QuestionAnswering()
        metric = task.metric(rows)
        for logits, example in order:
            ends = {name: torch.tensor(x)[None] for name, x in zip(task.outputs, logits)}
            batch = {"offsets": torch.tensor(OFFSETS)[None], "example_index": torch.tensor([example]),
                     "attention_mask": torch.ones(1, 6, dtype=torch.int64)}  # fmt: skip
            metric.update(*task.for_metric(ends, batch))
        assert metric.compute() == {"exact_match": 1, "f1": 1}


def test_the_most_doubtful_window_decides_about_no_answer():
    logits = [window(0, 0), window(2, 3)]
    starts, ends = zip(*logits)
    ranked = rank_answers(starts, ends, [OFFSETS] * 2, [0, 0], ["ab cd ef gh"])[0]
    assert choose_answer(ranked).text == "cd ef"
    assert next(answer.score for answer in ranked if not answer.text) == -2.0


def test_the_threshold_decides_between_an_answer_and_none():
    answers = [Answer("", 5.0, 0, 0), Answer("fox", 4.0, 2, 5)]
    assert [choose_answer(answers, t).text for t in (0.0, 0.99, 1.0, float("inf"))] == [
        "",
        "",
        "fox",
        "fox",
    ]
    assert choose_answer(answers[::-1], -2).text == "" and choose_answer(answers[:1], 3).text == ""


@pytest.mark.parametrize("model_type", ["wordpiece", "bpe", "unigram"])
def test_an_answer_begins_with_its_first_letter(model_type):
    context = "The capital of France is  Paris ."
    tokenizer = train_tokenizer([context] * 9 + ["Paris Parisian"] * 90, 300, kind=model_type)
    encoded = tokenizer(context, add_special_tokens=False, return_offsets_mapping=True)
    offsets = [(-1, -1), *encoded["offset_mapping"]]
    score = [
        1.0 if context[a:b].strip() == "Paris" else 5.0 if not context[a:b].strip() else 0.0
        for a, b in offsets[1:]
    ]
    ranked = rank_answers(
        [[-9, *score]], [[-9, *score]], [np.array(offsets)], [0], [context], max_answer_tokens=1
    )[0]
    assert ranked[0] == ("Paris", 2.0, 26, 31) and all(
        candidate.text == candidate.text.strip() for candidate in ranked
    )
