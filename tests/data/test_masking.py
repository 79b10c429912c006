"Draws by address, whole words, spans and budgets, each against an implementation of its own."

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.data.collators import MaskedLanguageModelingCollator
from bertlab.data.masking import (
    ACT,
    CHOOSE,
    REPLACE,
    ROUND,
    SPAN,
    MaskingConfig,
    label_bound,
    draw_span_lengths,
    counter_uniform,
    continuation_mask,
    word_starts,
    row_rng_keys,
    mask_tokens,
    rank_in_documents,
)
from bertlab.data.rows import Vocabulary
from bertlab.data.tokenizers import train_tokenizer

many = settings(max_examples=100, deadline=None, derandomize=True)
V = Vocabulary(40, pad_token_id=39, mask_token_id=0, special_token_ids=(7, 8))
CONTINUES = np.arange(40) % 3 == 1  # 1, 4, 10, 13, ...; 7 would, but it is special
WAYS = [
    ("bernoulli", "token"),
    ("exact", "token"),
    ("bernoulli", "word"),
    ("exact", "word"),
    ("exact", "span"),
]


@st.composite
def rows_of_documents(draw):
    "Rows of up to 5 documents, with special tokens anywhere, and padding anywhere between them."
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    size, length = draw(st.integers(1, 4)), draw(st.integers(1, 60))
    ids_BL = rng.integers(0, 39, (size, length))
    ids_BL[rng.random(ids_BL.shape) < 0.05] = 7
    documents_BL = np.sort(rng.integers(1, 6, (size, length)), axis=1)
    documents_BL[rng.random(ids_BL.shape) < draw(st.sampled_from([0, 0, 0.1]))] = 0
    return {"input_ids": ids_BL, "attention_mask": documents_BL}


addresses_of = lambda rows, epoch=0: (
    [epoch] * len(rows["input_ids"]),
    range(len(rows["input_ids"])),
)


def is_ordinary(rows, row, column):
    return rows["attention_mask"][row, column] > 0 and rows["input_ids"][row, column] not in (
        0,
        7,
        8,
        39,
    )


def words_of(rows, row):
    "The words of a row, token by token: (document, run, columns); a run has no gap."
    words, run = [], 0
    for column in range(rows["input_ids"].shape[1]):
        if not is_ordinary(rows, row, column):
            run += 1
            continue
        document = rows["attention_mask"][row, column]
        goes_on = words and words[-1][1] == run and words[-1][0] == document
        if not goes_on:
            run += 1
        if goes_on and CONTINUES[rows["input_ids"][row, column]]:
            words[-1][2].append(column)
        else:
            words.append((document, run, [column]))
    return words


@many
@given(rows_of_documents())
def test_words_are_found_as_by_reading_token_by_token(rows):
    ids, documents = rows["input_ids"], rows["attention_mask"]
    ordinary = np.array(
        [[is_ordinary(rows, r, c) for c in range(ids.shape[1])] for r in range(len(ids))]
    )
    starts = word_starts(ids, documents, ordinary, CONTINUES)
    for row in range(len(ids)):
        for _, _, columns in words_of(rows, row):
            assert (starts[row, columns] == columns[0]).all()
    alone = word_starts(ids, documents, ordinary, None)
    assert (alone == np.arange(ids.shape[1])).all()


def simulate(rows, row, key, p, unit):
    "What is chosen in a row, drawn word by word and span by span until the budget is spent."
    draw = lambda counter, purpose: float(counter_uniform(key, np.array([counter]), purpose)[0])
    words, chosen = words_of(rows, row), set()
    for document in {word[0] for word in words}:
        mine = [word for word in words if word[0] == document]
        budget = p * sum(len(word[2]) for word in mine)
        spent, rounding = 0, draw(document, ROUND)
        for first in sorted(range(len(mine)), key=lambda n: draw(mine[n][2][0], CHOOSE)):
            reach = 1
            if unit == "span":
                shares = np.cumsum(0.8 ** np.arange(10)) / np.sum(0.8 ** np.arange(10))
                reach += int(np.searchsorted(shares, draw(mine[first][2][0], SPAN), side="right"))
            for word in mine[first : first + reach]:
                if word[1] != mine[first][1] or set(word[2]) <= chosen:
                    continue
                if spent + rounding * len(word[2]) < budget:
                    chosen |= set(word[2])
                spent += len(word[2])
    return chosen


@many
@given(
    rows_of_documents(), st.sampled_from(["word", "span"]), st.sampled_from([0.1, 0.3, 0.7, 1.0])
)
def test_words_and_spans_are_chosen_until_the_budget_is_spent(rows, unit, p):
    rule = MaskingConfig(p, selection="exact", unit=unit, seed=3, max_predictions=1000)
    labels = mask_tokens(rows, addresses_of(rows), V, rule, True, CONTINUES)["labels"]
    keys = row_rng_keys(3, *addresses_of(rows))
    for row in range(len(labels)):
        assert set(np.flatnonzero(labels[row] >= 0)) == simulate(
            rows, row, keys[row : row + 1], p, unit
        )


@many
@given(rows_of_documents(), st.sampled_from(WAYS), st.sampled_from([None, 3, 9]), st.integers(0, 2))
def test_a_word_is_hidden_whole_or_not_at_all(rows, way, bound, promise):
    selection, unit = way
    if unit == "token":
        return
    rule = MaskingConfig(
        0.4,
        selection=selection,
        unit=unit,
        max_predictions=bound or 1000,
        min_labels_per_document=promise if bound is None else 0,
    )
    labels = mask_tokens(rows, addresses_of(rows), V, rule, True, CONTINUES)["labels"]
    for row in range(len(labels)):
        for _, _, columns in words_of(rows, row):
            assert len(set((labels[row, columns] >= 0).tolist())) == 1


@many
@given(
    rows_of_documents(), st.sampled_from(WAYS), st.sampled_from([0.15, 0.5, 1.0]), st.integers(0, 9)
)
def test_special_tokens_and_padding_are_never_masked(rows, way, p, seed):
    rule = MaskingConfig(p, 0.2, 0.8, way[0], unit=way[1], seed=seed)
    out = mask_tokens(rows, addresses_of(rows), V, rule, True, CONTINUES)
    for (row, column), now in np.ndenumerate(out["input_ids"]):
        before = rows["input_ids"][row, column]
        if out["labels"][row, column] == -100:
            assert now == before
        else:
            assert is_ordinary(rows, row, column) and out["labels"][row, column] == before
            assert now not in (7, 8, 39)


@many
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=40),
    st.sampled_from(WAYS),
    st.integers(1, 5),
    st.booleans(),
)
def test_guaranteed_labels_fit_the_default_bound(sizes, way, promise, cut):
    "Documents of a few words, each between two special tokens, one after the other in a row of 96."
    ids, documents = [], []
    for index, size in enumerate(sizes, start=1):
        ids += [7, *[9 if cut or n == 0 else 10 for n in range(size)], 8]
        documents += [index] * (size + 2)
    rows = {
        name: np.array([(values + [0] * 96)[:96]])
        for name, values in (("input_ids", ids), ("attention_mask", documents))
    }
    rule = MaskingConfig(0.05, selection=way[0], unit=way[1], min_labels_per_document=promise)
    out = mask_tokens(rows, ([0], [len(ids)]), V, rule, True, CONTINUES)
    for index in range(1, len(sizes) + 1):
        words = (rows["attention_mask"] == index) & np.isin(rows["input_ids"], (9, 10))
        assert (out["labels"][words] >= 0).sum() >= min(promise, words.sum())
    assert out["label_positions"].shape[1] == label_bound(0.05, 96, *way, promise)


def one_document(length, ids=None):
    ids = np.full(length, 9) if ids is None else ids
    return {"input_ids": np.tile(ids, (4000, 1)), "attention_mask": np.ones((4000, length), int)}


@pytest.mark.parametrize("selection, unit", WAYS)
@pytest.mark.parametrize("p", [0.1, 0.3])
def test_the_masked_share_does_not_depend_on_the_unit(selection, unit, p):
    # Words of 1, 2 and 4 tokens: 9 begins a word, 10 goes on.
    rows = one_document(14, np.array([9, 9, 10, 9, 10, 10, 10] * 2))
    rule = MaskingConfig(p, selection=selection, unit=unit, max_predictions=14)
    chosen = mask_tokens(rows, addresses_of(rows), V, rule, True, CONTINUES)["labels"] >= 0
    counts = chosen.sum(1)
    band = 5 * counts.std() / math.sqrt(len(counts)) + 1e-9  # five standard errors
    assert abs(counts.mean() - 14 * p) < band
    if selection == "exact":
        assert abs(counts - 14 * p).max() < 4  # less than the longest word away
    if (selection, unit) == ("bernoulli", "word"):
        assert abs(chosen.mean(0) - p).max() < 5 * math.sqrt(p * (1 - p) / 4000)


def test_span_lengths_follow_the_cut_geometric_law():
    # Joshi et al. (2020), sec. 3.1: p = 0.2, at most 10, a mean of 3.8.
    lengths = draw_span_lengths((np.arange(100_000) + 0.5) / 100_000, MaskingConfig())
    law = 0.8 ** np.arange(10) / np.sum(0.8 ** np.arange(10))
    np.testing.assert_allclose(np.bincount(lengths, minlength=11)[1:] / 100_000, law, atol=2e-5)
    assert lengths.mean() == pytest.approx(3.8, abs=0.01)
    short = MaskingConfig(span_stop_prob=1.0)
    assert (draw_span_lengths(np.array([0.0, 0.999999]), short) == 1).all()
    assert draw_span_lengths(np.array([1 - 2.0**-53]), MaskingConfig())[0] == 10


def test_a_word_too_many_is_dropped_whole_and_counted():
    # Ten words of three tokens, all chosen; seven labels fit, so two words do.
    rows = {
        name: values[:200] for name, values in one_document(30, np.array([9, 10, 10] * 10)).items()
    }
    rule = MaskingConfig(1.0, unit="word", max_predictions=7)
    out = mask_tokens(rows, addresses_of(rows), V, rule, True, CONTINUES)
    assert ((out["labels"] >= 0).sum(1) == 6).all() and (out["num_dropped_labels"] == 24).all()
    promised = MaskingConfig(1.0, unit="word", max_predictions=2, min_labels_per_document=1)
    out = mask_tokens(rows, addresses_of(rows), V, promised, True, CONTINUES)
    assert ((out["labels"] >= 0).sum(1) == 2).all(), "a promise is kept by a part of a word"


# --- draws ----------------------------------------------------------------------------------------


def test_draws_depend_on_their_address_alone():
    keys = row_rng_keys(3, [1, 2], [5, 2**64 - 1])
    long = counter_uniform(keys[:, None], np.arange(9), CHOOSE)
    assert (counter_uniform(keys[:, None], np.arange(4), CHOOSE) == long[:, :4]).all()
    assert (row_rng_keys(3, [2], [2**64 - 1]) == keys[1:]).all()
    assert counter_uniform(keys[1:], np.array([6]), CHOOSE)[0] == long[1, 6]
    alternatives = [
        counter_uniform(row_rng_keys(seed, [epoch], [index])[:, None], np.arange(9), purpose)
        for seed in (3, 2**70)
        for epoch in (1, 2)
        for index in (5, 6)
        for purpose in range(7)
    ]
    assert len(np.unique(alternatives)) == 9 * len(alternatives)


def test_draws_are_uniform_and_independent():
    draws = np.stack(
        [
            counter_uniform(
                row_rng_keys(0, [0] * 300, range(300))[:, None], np.arange(200), purpose
            )
            for purpose in (CHOOSE, ACT)
        ]
    )
    size = draws[0].size
    for values in draws:
        counts = np.histogram(values, 64, (0, 1))[0]
        chi2 = ((counts - size / 64) ** 2 / (size / 64)).sum()
        assert abs(chi2 - 63) < 5 * math.sqrt(2 * 63)
    pairs = {
        "positions": (draws[0][:, 1:], draws[0][:, :-1]),
        "rows": (draws[0][1:], draws[0][:-1]),
        "purposes": (draws[0], draws[1]),
        "next but": (draws[0][:, 8:], draws[1][:, :-8]),
    }
    for name, (a, b) in pairs.items():
        correlation = np.corrcoef(a.ravel(), b.ravel())[0, 1]
        assert abs(correlation) < 5 / math.sqrt(a.size), name


def test_ranks_agree_with_sorting_each_document():
    rng = np.random.default_rng(0)
    draws, members = rng.integers(0, 9, (3, 50)) / 9, rng.integers(0, 7, (3, 50))
    ranks = rank_in_documents(draws, members)
    for row in range(3):
        for document in range(1, 7):
            columns = np.flatnonzero(members[row] == document)
            order = sorted(columns, key=lambda i: (draws[row, i], i))
            assert [ranks[row, i] for i in order] == list(range(len(columns)))


def test_a_row_too_long_to_rank_is_refused():
    rows = {name: np.ones((1, 2**17 + 1), dtype=int) for name in ("input_ids", "attention_mask")}
    with pytest.raises(ValueError, match="131073 positions is too long to rank"):
        mask_tokens(rows, ([0], [0]), V, MaskingConfig(selection="exact"))


# --- words of real tokenizers ---------------------------------------------------------------------

TEXTS = [
    "the unbelievable cat sat on the mat",
    "a cat and an unbeliever",
    "mats sat unbelievably",
] * 3


def trained(model, trainer, pre_tokenizer, decoder=None):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizer
    inner.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    )


def tokenizer_of(algorithm):
    from tokenizers import models, pre_tokenizers, trainers

    options = {"special_tokens": ["[PAD]", "[UNK]", "[MASK]"], "show_progress": False}
    if algorithm == "WordPiece":
        trainer = trainers.WordPieceTrainer(vocab_size=40, **options)
        return trained(models.WordPiece(unk_token="[UNK]"), trainer, pre_tokenizers.Whitespace())
    if algorithm == "byte-level BPE":
        trainer = trainers.BpeTrainer(
            vocab_size=50, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options
        )
        return trained(models.BPE(), trainer, pre_tokenizers.ByteLevel(add_prefix_space=False))
    if algorithm == "Metaspace":
        trainer = trainers.UnigramTrainer(vocab_size=40, unk_token="[UNK]", **options)
        return trained(models.Unigram(), trainer, pre_tokenizers.Metaspace())
    trainer = trainers.WordLevelTrainer(**options)
    return trained(models.WordLevel(unk_token="[UNK]"), trainer, pre_tokenizers.Whitespace())


@pytest.mark.parametrize("algorithm", ["WordPiece", "byte-level BPE", "Metaspace"])
def test_words_found_by_id_are_what_stands_between_spaces(algorithm):
    tokenizer = tokenizer_of(algorithm)
    continues = continuation_mask(tokenizer)
    for text in TEXTS[:3]:
        out = tokenizer(text, return_offsets_mapping=True)
        ids = np.array([out["input_ids"]])
        starts = word_starts(ids, np.ones_like(ids), np.ones(ids.shape, bool), continues)[0]
        begins = {match.start() for match in re.finditer(r"\S+", text)}
        # An offset may include the space before its word.
        spelled = {
            first + (text[first] == " ")
            for first, _ in np.array(out["offset_mapping"])[np.unique(starts)]
        }
        assert spelled == begins
        assert len(np.unique(starts)) == len(text.split()) < len(starts)


def test_whole_words_need_marks_in_the_vocabulary():
    with pytest.raises(ValueError, match="no token begins with one of .* continues_word"):
        MaskedLanguageModelingCollator.from_tokenizer(tokenizer_of("WordLevel"), unit="word")
    table = [False] * len(tokenizer_of("WordLevel"))
    collate = MaskedLanguageModelingCollator.from_tokenizer(
        tokenizer_of("WordLevel"), unit="word", continues_word=table, max_sequence_length=16
    )
    assert (collate(TEXTS)["labels"] >= 0).any()


# --- beside transformers --------------------------------------------------------------------------


ALWAYS_MASK = {
    "mask_replace_prob": 1.0,
    "random_replace_prob": 0.0,
}  # all that theirs has for words


def theirs_with(monkeypatch, draws, whole_word_mask, tokenizer, features):
    "DataCollatorForLanguageModeling with its coins and random words taken from these draws."
    from transformers import DataCollatorForLanguageModeling

    collate = DataCollatorForLanguageModeling(
        tokenizer,
        mlm_probability=0.3,
        whole_word_mask=whole_word_mask,
        **(ALWAYS_MASK if whole_word_mask else {}),
    )
    coins = iter([draws["choose"], draws["mask"], draws["swap"]])
    toss = lambda matrix, generator=None: (torch.from_numpy(next(coins)) < matrix.double()).float()
    monkeypatch.setattr(torch, "bernoulli", toss)
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.from_numpy(draws["words"]))
    try:
        return collate(features)
    finally:
        monkeypatch.undo()


@pytest.mark.parametrize("unit", ["token", "word"])
def test_equal_draws_give_the_batches_of_transformers(monkeypatch, unit):
    tokenizer = tokenizer_of("WordPiece")
    full = unit == "word"
    collate = MaskedLanguageModelingCollator.from_tokenizer(
        tokenizer,
        unit=unit,
        max_sequence_length=64,
        pad_to_multiple_of=1,
        seed=4,
        **(ALWAYS_MASK if full else {}),
    )
    out = tokenizer(TEXTS, return_offsets_mapping=full, return_special_tokens_mask=True)
    features = [
        {name: out[name][n] for name in out if name != "token_type_ids"} for n in range(len(TEXTS))
    ]
    rows = [
        {"input_ids": row["input_ids"], "epoch": 0, "index": n} for n, row in enumerate(features)
    ]
    result = collate(rows)
    keys = row_rng_keys(4, [0] * len(rows), range(len(rows)))[:, None]
    columns = np.arange(result["input_ids"].shape[1])
    acts, words = counter_uniform(keys, columns, ACT), collate.vocabulary.ordinary_ids
    draws = {
        "choose": counter_uniform(keys, columns, CHOOSE),
        "mask": acts,
        "swap": (acts - 0.8) / 0.2,  # their second coin is tossed among what was not masked
        "words": words[(counter_uniform(keys, columns, REPLACE) * len(words)).astype(int)],
    }
    if full:  # their collator pads offsets by itself only for slow tokenizers
        width = len(columns)
        for row in features:
            row["offset_mapping"] = row["offset_mapping"] + [(0, 0)] * (
                width - len(row["offset_mapping"])
            )
    reference = theirs_with(monkeypatch, draws, full, tokenizer, features)
    assert torch.equal(result["labels"], reference["labels"])
    assert torch.equal(result["input_ids"], reference["input_ids"])
    assert (result["labels"] >= 0).sum() > 10


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "unit, selection", [("word", "bernoulli"), ("word", "exact"), ("span", "exact")]
)
def test_text_without_spaces_has_labels_in_whatever_script(algorithm, unit, selection):
    draw = np.random.default_rng(0)
    texts = ["".join(draw.choice(list("ACGT"), 600)) for _ in range(24)]
    tokenizer = train_tokenizer(texts, 400 if algorithm == "bpe" else 200, kind=algorithm)
    created = tokenizer(texts, truncation=True, max_length=128, return_tensors="np")
    rows = {name: created[name] for name in ("input_ids", "attention_mask")}
    vocabulary = Vocabulary(len(tokenizer), 0, tokenizer.mask_token_id, tokenizer.all_special_ids)
    out = mask_tokens(
        rows,
        ([0] * 24, range(24)),
        vocabulary,
        MaskingConfig(unit=unit, selection=selection),
        continues_V=continuation_mask(tokenizer),
    )
    share = (out["labels"] >= 0).sum() / (24 * 126)
    assert 0.2 < share < 0.4  # 24 x 32 words of 4 pieces: five standard deviations are 0.08
