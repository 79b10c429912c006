"Masked language modeling: the right tokens, at the right rate, the same wherever it runs."

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from bertlab.data.collators import MaskedLanguageModelingCollator, get_collator_cls
from bertlab.data.rows import Collator, RowError
from bertlab.data.masking import label_bound
from bertlab.data.packing import PackedDataset
from bertlab.data.rows import document_positions

many = settings(max_examples=100, deadline=None, derandomize=True)
IGNORE_INDEX = -100


@st.composite
def packed_batches(draw):
    "A random vocabulary with random special ids, and packed rows of random documents over it."
    size = draw(st.integers(5, 60))
    ids = draw(st.permutations(range(size)))
    pad, mask, cls, sep = ids[:4]
    extra = draw(st.integers(0, size - 5))
    special, words = ids[: 4 + extra], ids[4 + extra :]
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=8))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    documents = [rng.choice(words if rng.random() < 0.7 else ids, n) for n in lengths]
    capacity = draw(st.integers(3, 40))
    dataset = PackedDataset(
        documents,
        capacity,
        pad_token_id=pad,
        cls_token_id=cls,
        sep_token_id=sep,
        seed=draw(st.integers(0, 5)),
    )
    epoch = draw(st.integers(0, 3))
    rows = [dataset[epoch, index] for index in range(len(dataset))]
    return rows, dict(
        pad_token_id=pad,
        mask_token_id=mask,
        vocab_size=size,
        special_token_ids=special,
        continues_word=rng.random(size) < 0.5,
    )


WAYS = [
    ("bernoulli", "token"),
    ("exact", "token"),
    ("bernoulli", "word"),
    ("exact", "word"),
    ("exact", "span"),
]
ways = st.sampled_from([{"selection": selection, "unit": unit} for selection, unit in WAYS])


rules = st.builds(
    lambda way, rest: {**way, **rest},
    ways,
    st.fixed_dictionaries(
        {
            "mlm_probability": st.sampled_from([0.05, 0.15, 0.3, 0.5, 1.0]),
            "min_labels_per_document": st.integers(0, 2),
            "max_predictions": st.sampled_from([None, 1, 4, 100]),
            "seed": st.integers(0, 2**70),
            **{
                "mask_replace_prob": st.sampled_from([0.0, 0.5]),
                "random_replace_prob": st.sampled_from([0.0, 0.5]),
            },
        }
    ),
)


def stack(rows, name):
    return torch.tensor(np.array([row[name] for row in rows]))


def ordinary(rows, vocabulary):
    special = torch.tensor(list(vocabulary["special_token_ids"]))
    return (stack(rows, "attention_mask") > 0) & ~torch.isin(stack(rows, "input_ids"), special)


def documents_of(rows, vocabulary):
    "Where the ordinary tokens of each document are: (row, columns)."
    may = ordinary(rows, vocabulary).numpy()
    for row_index, row in enumerate(rows):
        for document in range(1, row["attention_mask"].max() + 1):
            columns = np.flatnonzero((row["attention_mask"] == document) & may[row_index])
            if len(columns):
                yield row_index, columns


@many
@given(packed_batches(), rules)
def test_labels_are_the_original_ids_of_chosen_tokens(case, rule):
    rows, vocabulary = case
    batch = MaskedLanguageModelingCollator(**vocabulary, **rule)(rows)
    before, chosen = stack(rows, "input_ids"), batch["labels"] != IGNORE_INDEX
    assert (batch["labels"][chosen] == before[chosen]).all()
    assert (batch["input_ids"][~chosen] == before[~chosen]).all()
    for name in ("attention_mask", "position_ids"):
        assert (batch[name] == stack(rows, name)).all()
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


@many
@given(packed_batches(), rules)
def test_label_positions_list_labels_first_and_in_order(case, rule):
    rows, vocabulary = case
    batch = MaskedLanguageModelingCollator(**vocabulary, **rule)(rows)
    assert batch["label_positions"].shape[0] == len(rows)
    for labels, positions in zip(batch["labels"], batch["label_positions"]):
        chosen = (labels != IGNORE_INDEX).nonzero().flatten().tolist()
        assert positions[: len(chosen)].tolist() == chosen
        assert (labels[positions[len(chosen) :]] == IGNORE_INDEX).all()
        assert len(set(positions.tolist())) == len(positions)


@many
@given(packed_batches(), st.integers(0, 2**70), ways)
def test_a_row_is_masked_alike_in_any_company(case, seed, way):
    rows, vocabulary = case
    collate = MaskedLanguageModelingCollator(
        **vocabulary, seed=seed, **way, min_labels_per_document=1, max_predictions=6
    )
    together, reverse = collate(rows), collate(rows[::-1])
    for row_index, row in enumerate(rows):
        alone = collate([row])
        for name, values in alone.items():
            assert (values[0] == together[name][row_index]).all()
            assert (values[0] == reverse[name][-1 - row_index]).all()


@many
@given(packed_batches(), rules)
def test_exact_selection_rounds_each_document_up_or_down(case, rule):
    rows, vocabulary = case
    rule = {**rule, "selection": "exact", "max_predictions": 100, "min_labels_per_document": 0}
    vocabulary = {**vocabulary, "continues_word": [False] * vocabulary["vocab_size"]}
    labels = MaskedLanguageModelingCollator(**vocabulary, **rule)(rows)["labels"].numpy()
    for row, columns in documents_of(rows, vocabulary):
        share, count = rule["mlm_probability"] * len(columns), (labels[row, columns] >= 0).sum()
        assert math.floor(share + 1e-9) <= count <= math.ceil(share - 1e-9)


@many
@given(packed_batches(), rules, st.integers(1, 6))
def test_excess_labels_are_dropped_unmasked_and_counted(case, rule, bound):
    rows, vocabulary = case
    wide, narrow = (
        MaskedLanguageModelingCollator(**vocabulary, **{**rule, "max_predictions": m})
        for m in (100, bound)
    )
    all_of_them, narrow_batch = wide(rows), narrow(rows)
    had, has = ((batch["labels"] != IGNORE_INDEX) for batch in (all_of_them, narrow_batch))
    assert (has <= had).all() and (has.sum(1) <= bound).all()
    assert (narrow_batch["num_dropped_labels"] == had.sum(1) - has.sum(1)).all()
    excess = (had.sum(1) - bound).clamp(min=0)
    if rule["unit"] == "token":
        assert (narrow_batch["num_dropped_labels"] == excess).all()
    assert (narrow_batch["num_dropped_labels"] >= excess).all()
    assert (narrow_batch["num_dropped_labels"][excess == 0] == 0).all()
    dropped = had & ~has
    assert (narrow_batch["input_ids"][dropped] == stack(rows, "input_ids")[dropped]).all()
    assert (narrow_batch["input_ids"][has] == all_of_them["input_ids"][has]).all()


def test_promised_labels_are_dropped_last():
    # Three documents of 20, 20 and 1 words, all chosen; only 3 labels fit.
    numbers = [1] * 20 + [2] * 20 + [3]
    rows = [dict(built([7] * 41, numbers), epoch=0, index=i) for i in range(50)]
    collate = plain(mlm_probability=1.0, max_predictions=3, min_labels_per_document=1)
    chosen = collate(rows)["labels"] != IGNORE_INDEX
    assert all(sorted(np.array(numbers)[row].tolist()) == [1, 2, 3] for row in chosen.numpy())


def plain(**options):
    return MaskedLanguageModelingCollator(0, 1, 30, special_token_ids=[0, 1, 2, 3], **options)


def built(ids, numbers=None):
    numbers = np.array(numbers or [1] * len(ids))
    return {
        "input_ids": np.array(ids),
        "attention_mask": numbers,
        "position_ids": document_positions(numbers[None])[0],
    }


def big_batch(**options):
    "About 100,000 words: the collator's answer, what went in, and which of it were words."
    rng = np.random.default_rng(1)
    dataset = PackedDataset(
        [rng.integers(4, 30, n) for n in rng.integers(1, 200, 1000)],
        128,
        pad_token_id=0,
        cls_token_id=2,
        sep_token_id=3,
    )
    rows = [dataset[index] for index in range(len(dataset))]
    before = stack(rows, "input_ids")
    return plain(max_predictions=128, **options)(rows), before, before >= 4


def in_band(count, trials, probability):
    "Within five standard deviations: a right collator fails less than once in a million."
    return abs(count - trials * probability) < 5 * math.sqrt(trials * probability) + 1


@pytest.mark.parametrize("selection", ["bernoulli", "exact"])
@pytest.mark.parametrize("probability", [0.02, 0.15, 0.3, 0.85])
def test_the_share_of_chosen_words_is_the_one_asked_for(selection, probability):
    batch, _, words = big_batch(mlm_probability=probability, selection=selection)
    assert in_band(int((batch["labels"] != IGNORE_INDEX).sum()), int(words.sum()), probability)


@pytest.mark.parametrize(
    "mask, random", [(0.8, 0.1), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.5, 0.5)]
)
def test_chosen_tokens_are_masked_replaced_and_kept_by_share(mask, random):
    batch, before, _ = big_batch(mask_replace_prob=mask, random_replace_prob=random)
    chosen = batch["labels"] != IGNORE_INDEX
    now, then = batch["input_ids"][chosen], before[chosen]
    total = len(now)
    assert in_band(int((now == 1).sum()), total, mask)
    same = 1 - mask - random + random / 26  # a random word is the same word once in 26
    assert in_band(int((now == then).sum()), total, same)


def test_random_words_are_uniform_over_the_ordinary_vocabulary():
    batch, _, _ = big_batch(mask_replace_prob=0.0, random_replace_prob=1.0)
    drawn = batch["input_ids"][batch["labels"] != IGNORE_INDEX]
    counts = torch.bincount(drawn, minlength=30)
    assert counts[:4].sum() == 0
    assert all(in_band(int(n), len(drawn), 1 / 26) for n in counts[4:])


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_any_number_of_workers_gives_the_same_batches(workers):
    rng = np.random.default_rng(0)
    documents = [rng.integers(4, 30, n) for n in rng.integers(1, 60, 60)]
    dataset = PackedDataset(documents, 64, pad_token_id=0, cls_token_id=2, sep_token_id=3)
    keys = [[(1, index) for index in range(start, start + 4)] for start in range(0, 16, 4)]
    expected = [plain()([dataset[key] for key in batch]) for batch in keys]
    loader = DataLoader(dataset, batch_sampler=keys, collate_fn=plain(), num_workers=workers)
    for got, want in zip(loader, expected, strict=True):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_rows_without_an_index_are_keyed_by_their_tokens():
    rows = [list(range(4, 28)), list(range(5, 29)), [9] * 12]
    collate = plain(max_sequence_length=32)
    together, alone = collate(rows), collate(rows[2:])
    assert torch.equal(together["labels"][2], alone["labels"][0])
    positions = [
        (labels != IGNORE_INDEX).nonzero().flatten().tolist() for labels in together["labels"][:2]
    ]
    assert positions[0] != positions[1]
    collate.epoch = 1
    assert not torch.equal(collate(rows)["labels"], together["labels"])
    wide = plain(max_sequence_length=64)(rows)
    assert torch.equal(wide["labels"][:, :32], together["labels"])


def test_lists_arrays_and_tensors_are_padded_alike():
    ids = [[2, 5, 6, 3], [2, 7, 3]]
    forms = [
        ids,
        [np.array(row) for row in ids],
        [torch.tensor(row) for row in ids],
        [{"input_ids": row} for row in ids],
        [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids],
    ]
    batches = [plain(max_sequence_length=6)(form) for form in forms]
    for batch in batches:
        assert all(torch.equal(batch[name], batches[0][name]) for name in batch)
    assert batches[0]["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]]
    assert batches[0]["position_ids"].tolist() == [[0, 1, 2, 3, 0, 0], [0, 1, 2, 0, 0, 0]]
    assert (batches[0]["input_ids"][0, 4:] == 0).all()


@pytest.mark.parametrize("longest, width", [(1, 8), (8, 8), (9, 16), (20, 20)])
def test_padding_rounds_up_and_stops_at_the_maximum(longest, width):
    collate = plain(max_sequence_length=20, pad_to_multiple_of=8)
    batch = collate([[5] * longest, [5]])
    assert batch["input_ids"].shape == (2, width)


def test_dynamic_shapes_drop_no_label():
    collate = plain(mlm_probability=0.5, max_sequence_length=512, pad_to_multiple_of=8)
    batch = collate([[5] * n for n in (100, 60, 3)])
    most = int((batch["labels"] != IGNORE_INDEX).sum(1).max())
    assert batch["label_positions"].shape == (3, 8 * math.ceil(most / 8))
    assert batch["num_dropped_labels"].sum() == 0


def test_static_shapes_do_not_depend_on_the_data():
    collate = plain(max_sequence_length=64)
    shapes = {
        tuple((name, tuple(t.shape)) for name, t in collate([row, row]).items())
        for row in ([5], [2, 3], [5] * 64, [])
    }
    assert len(shapes) == 1


def test_a_row_of_padding_alone_has_no_label():
    blank = {
        name: np.zeros(16, np.int64) for name in ("input_ids", "attention_mask", "position_ids")
    }
    for selection in ("bernoulli", "exact"):
        batch = plain(mlm_probability=1.0, selection=selection, min_labels_per_document=1)([blank])
        assert (batch["labels"] == IGNORE_INDEX).all() and (batch["input_ids"] == 0).all()


def test_special_tokens_mask_of_a_row_protects_its_tokens():
    row = {"input_ids": [9, 9, 9, 9], "special_tokens_mask": [1, 0, 0, 1]}
    labels = plain(mlm_probability=1.0, max_sequence_length=5)([row])["labels"]
    assert labels.tolist() == [[IGNORE_INDEX, 9, 9, IGNORE_INDEX, IGNORE_INDEX]]


def test_the_default_bound_is_rarely_exceeded():
    assert label_bound(0.3, 512) == 200  # 153.6 + 4 x 10.37, rounded up to eights
    assert label_bound(0.3, 512, "exact") == 168  # 153.6 + 4 x 2.83
    assert label_bound(1.0, 512) == 512 and label_bound(0.3, 4) == 4
    for selection in ("bernoulli", "exact"):
        rows = [
            dict(built([7] * 512, np.repeat(range(1, 9), 64).tolist()), epoch=0, index=i)
            for i in range(300)
        ]
        assert plain(selection=selection)(rows)["num_dropped_labels"].sum() == 0


def word_tokenizer(mask_token="[MASK]"):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    names = [*special, *"the cat sat on mat".split()]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token=mask_token,
    )


def test_text_is_tokenized_truncated_and_masked():
    collate = MaskedLanguageModelingCollator.from_tokenizer(
        word_tokenizer(),
        max_sequence_length=6,
        mlm_probability=1.0,
        mask_replace_prob=1.0,
        random_replace_prob=0.0,
    )
    rows = [{"text": "the cat"}, {"text": "the cat sat on the mat"}, "a cat"]
    batch = collate(rows)
    #  [CLS] the cat [SEP]; [CLS] the cat sat on [SEP]; [CLS] [UNK] cat [SEP]
    assert batch["input_ids"].tolist() == [
        [2, 4, 4, 3, 0, 0],
        [2, 4, 4, 4, 4, 3],
        [2, 1, 4, 3, 0, 0],
    ]
    assert batch["labels"][1].tolist() == [IGNORE_INDEX, 5, 6, 7, 8, IGNORE_INDEX]
    assert torch.equal(pickle.loads(pickle.dumps(collate))(rows)["labels"], batch["labels"])


def test_a_text_that_says_a_special_token_means_the_word():
    collate = MaskedLanguageModelingCollator.from_tokenizer(word_tokenizer(), mlm_probability=1.0, mask_replace_prob=1.0,
                                                            random_replace_prob=0.0)  # fmt: skip
    batch = collate(["the [MASK] sat [SEP] on"])
    length = int((batch["attention_mask"] == 1).sum())
    ids, labels = (batch[name][0, :length].tolist() for name in ("input_ids", "labels"))
    assert (
        ids[-1] == 3 and 3 not in ids[1:-1]
    )  # one document to its end, "[", "SEP", "]" among its words
    assert [label for label in labels if label != IGNORE_INDEX] == [
        5,
        7,
        8,
    ]  # what this vocabulary knows


class Lengths(Collator):
    def compute_labels(self, batch):
        return {"labels": torch.tensor(batch["labels"])}


def test_another_objective_reads_the_label_column():
    collate = Lengths(0, 1, 30, label_column="stars", max_sequence_length=4, special_token_ids=[2])
    rows = [{"input_ids": [5, 6], "stars": 4}, {"input_ids": [7], "stars": 1}]
    assert collate(rows)["labels"].tolist() == [4, 1]
    with pytest.raises(ValueError, match="row 1.*'stars'"):
        collate([rows[0], {"input_ids": [7]}])


@pytest.mark.parametrize("options", [
    {"mlm_probability": 0}, {"mlm_probability": 1.1}, {"mlm_probability": float("nan")},
    {"random_replace_prob": 0.3, "mask_replace_prob": 0.8}, {"random_replace_prob": -0.1},
    {"selection": "all"}, {"unit": "letter"}, {"unit": "span"}, {"unit": "word"},
    {"continues_word": [True] * 29, "unit": "word"}, {"span_stop_prob": 0}, {"max_span_length": 0},
    {"max_predictions": 0}, {"min_labels_per_document": -1}, {"seed": -1},
    {"max_sequence_length": 0}, {"pad_to_multiple_of": 0},
])  # fmt: skip
def test_a_wrong_option_is_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        plain(**options)


@pytest.mark.parametrize("rows, row, words", [
    ([[5], {"body": "x"}], 1, "'text'.*body"), ([{"text": None}], 0, "'text'"),
    ([{"text": "x"}], 0, "tokenizer"), ([[5], [5, 31]], 1, "31 at position 1.*30"),
    ([[-1]], 0, "-1"),
    ([{"input_ids": [5, 5], "attention_mask": [1]}], 0, "attention_mask"),
    ([[5] * 9], 0, "9 tokens.*max_sequence_length=8"), ([built([5]), built([5, 6])], 1, "2.*1"),
    ([{"input_ids": [5], "index": 1}, {"input_ids": [5]}], 1, "'index'"),
])  # fmt: skip
def test_a_wrong_row_is_refused_by_its_number(rows, row, words):
    with pytest.raises(RowError, match=f"row {row}: .*{words}"):
        plain(max_sequence_length=8)(rows)


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="empty"):
        plain()([])


def test_a_vocabulary_must_hold_its_special_tokens_and_a_word():
    with pytest.raises(ValueError, match="special id 9 is outside the vocabulary of 9"):
        MaskedLanguageModelingCollator(0, 9, 9, special_token_ids=[0])


def test_a_tokenizer_without_a_mask_token_is_refused():
    with pytest.raises(ValueError, match="mask_token_id is None: the tokenizer has no mask token"):
        MaskedLanguageModelingCollator.from_tokenizer(word_tokenizer(mask_token=None))


def test_collators_are_found_by_name():
    assert get_collator_cls("mlm") is MaskedLanguageModelingCollator
    with pytest.raises(ValueError, match="objective='clm' is unknown.*choose one of mlm"):
        get_collator_cls("clm")
