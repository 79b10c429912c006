"Masked diffusion: times that spread over any run of rows, weights that add up to the bound."

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_collators import ordinary, packed_batches, stack

from bertlab.data.collators import (
    EnhancedMaskedLanguageModelingCollator,
    MaskedDiffusionCollator,
    get_collator_cls,
)
from bertlab.data.diffusion import DiffusionConfig, sample_times, mask_probability, noise_batch
from bertlab.data.rows import Vocabulary
from bertlab.train.steps import _label_bytes

many = settings(max_examples=100, deadline=None, derandomize=True)
IGNORE_INDEX = -100


# Which ids continue a word is nothing to diffusion.
batches = packed_batches().map(
    lambda drawn: (drawn[0], {k: v for k, v in drawn[1].items() if k != "continues_word"})
)
rules = st.fixed_dictionaries(
    {
        "num_steps": st.sampled_from([1, 2, 10, 1000]),
        "sampling_eps": st.sampled_from([0.0, 0.001, 0.1, 0.9]),
        "noise_eps": st.sampled_from([0.0, 0.001, 0.3]),
        "min_masked": st.sampled_from([None, 0, 1, 3]),
        "max_masked": st.sampled_from([None, 3, 8]),
        "max_predictions": st.sampled_from([None, 2, 50]),
        "seed": st.integers(0, 2**70),
    }
)


@many
@given(batches, rules)
def test_only_ordinary_tokens_are_hidden_labelled_and_weighed(case, rule):
    rows, vocabulary = case
    batch = MaskedDiffusionCollator(**vocabulary, **rule)(rows)
    before, may, chosen = (
        stack(rows, "input_ids"),
        ordinary(rows, vocabulary),
        batch["labels"] != IGNORE_INDEX,
    )
    assert not (chosen & ~may).any()
    assert (batch["labels"][chosen] == before[chosen]).all()
    hidden = may & (batch["input_ids"] != before)
    assert (hidden | ~chosen).all() and (
        hidden.sum(1) - chosen.sum(1) == batch["num_dropped_labels"]
    ).all()
    assert (batch["input_ids"][hidden] == vocabulary["mask_token_id"]).all()
    assert (batch["input_ids"][~hidden] == before[~hidden]).all()
    assert torch.equal(batch.get("original_ids", before), before)
    assert batch["loss_weights"].dtype == torch.float32
    assert (batch["loss_weights"][~chosen] == 0).all() and (
        batch["loss_weights"][chosen] >= 1
    ).all()
    is_labelled = batch["labels"].gather(1, batch["label_positions"]) != IGNORE_INDEX
    assert (is_labelled.sum(1) == chosen.sum(1)).all()


@many
@given(batches, rules)
def test_a_document_has_one_time_within_its_limits(case, rule):
    rows, vocabulary = case
    rule = {**rule, "max_predictions": None}
    batch, may = MaskedDiffusionCollator(**vocabulary, **rule)(rows), ordinary(rows, vocabulary)
    documents, chosen = stack(rows, "attention_mask"), batch["labels"] != IGNORE_INDEX
    for row in range(len(rows)):
        for document in range(1, int(documents[row].max()) + 1):
            mine = may[row] & (documents[row] == document)
            count, weights = (
                int((chosen[row] & mine).sum()),
                batch["loss_weights"][row][chosen[row] & mine],
            )
            assert len(set(weights.tolist())) <= 1
            assert count >= min(rule["min_masked"] or 0, int(mine.sum()))
            assert count <= (rule["max_masked"] or 1000)
            for weight in set(weights.double().tolist()):
                assert rule["sampling_eps"] < 1 / weight + 1e-6 and weight >= 1
                assert abs(rule["num_steps"] / weight - round(rule["num_steps"] / weight)) < 1e-3


@many
@given(batches, rules)
def test_a_row_is_noised_alike_in_any_company(case, rule):
    rows, vocabulary = case
    collate = MaskedDiffusionCollator(**vocabulary, **rule)
    together = collate(rows[::-1])
    for row_index, row in enumerate(rows):
        for name, values in collate([row]).items():
            assert torch.equal(values[0], together[name][-1 - row_index])


def times_of(rows, documents=1, rule=DiffusionConfig(sampling_eps=0.0, num_steps=2**40), epoch=0):
    return sample_times(([epoch] * len(rows), rows), np.arange(1, documents + 1)[None], rule)


@pytest.mark.parametrize("first", [0, 7, 10**9, 2**64 - 300])
@pytest.mark.parametrize("size", [2, 8, 32, 256])
def test_any_run_of_rows_spreads_its_times(first, size):
    # Points of a golden rotation leave gaps of at most (phi + 1) / n: three-distance theorem.
    times = np.sort(times_of(range(first, first + size)).ravel())
    gaps = np.diff(np.append(times, times[0] + 1))
    assert gaps.max() < 2.62 / size and gaps.min() > 0.3 / size


def test_times_are_uniform_over_epochs_and_seeds():
    rule = DiffusionConfig(num_steps=2**40)
    times = [sample_times(([epoch], [3]), np.array([[2]]), rule)[0, 0] for epoch in range(4000)]
    counts = np.histogram(times, 20, (0.1, 1.0))[0]
    assert counts.sum() == 4000
    assert ((counts - 200) ** 2 / 200).sum() < 19 + 5 * math.sqrt(2 * 19)  # chi-square, 19 degrees
    assert abs(np.corrcoef(times[1:], times[:-1])[0, 1]) < 5 / math.sqrt(4000)


def test_times_stand_on_the_grid_of_steps():
    assert set(times_of(range(500), rule=DiffusionConfig(4, 0.0)).ravel()) == {0.25, 0.5, 0.75, 1.0}
    assert set(times_of(range(500), rule=DiffusionConfig(4, 0.5)).ravel()) == {0.75, 1.0}
    assert set(times_of(range(50), rule=DiffusionConfig(1)).ravel()) == {1.0}
    every = times_of(range(100_000), rule=DiffusionConfig(10, 0.0)).ravel()
    np.testing.assert_allclose(
        np.bincount((every * 10).round().astype(int))[1:] / 1e5, 0.1, atol=1e-4
    )


V = Vocabulary(20, pad_token_id=0, mask_token_id=1, special_token_ids=(2, 3))


def noised(rule, num_rows=4000, length=32):
    "Rows of four documents, with a special token in each."
    documents = np.tile(np.repeat(np.arange(1, 5), length // 4), (num_rows, 1))
    ids = np.where(np.arange(length) % (length // 4) == 0, 2, 9) * np.ones((num_rows, 1), int)
    addresses = [0] * num_rows, range(num_rows)
    batch = noise_batch({"input_ids": ids, "attention_mask": documents}, addresses, V, rule)
    return batch, sample_times(addresses, documents, rule), ids == 9


def test_as_much_is_hidden_as_the_schedule_says():
    rule = DiffusionConfig(noise_eps=0.2)
    batch, times, words = noised(rule)
    share = 0.8 * times[words]
    np.testing.assert_allclose(share, mask_probability(times[words], 0.2))
    hidden = (batch["labels"] >= 0)[words]
    for low in np.arange(0.1, 0.9, 0.1):
        near = (share >= low) & (share < low + 0.1)
        if near.any():
            # Tokens are independent given their time.
            error = hidden[near].sum() - share[near].sum()
            assert abs(error) < 5 * math.sqrt((share[near] * (1 - share[near])).sum())


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("sampling_eps", [0.0, 0.1, 0.5])
def test_a_token_weighs_one_on_average_from_whatever_time_on(schedule, sampling_eps):
    batch, _, words = noised(
        DiffusionConfig(noise_eps=0.0, sampling_eps=sampling_eps, schedule=schedule)
    )
    sums = batch["loss_weights"].sum(1) / words.sum(1)
    # The grid of 1,000 times rounds them up: less than 0.002 of the sum.
    assert abs(sums.mean() - 1) < 5 * sums.std() / math.sqrt(len(sums)) + 0.002


def test_the_bound_of_letters_without_order_is_their_entropy():
    # Independent letters with known frequencies: -log p(x) is the entropy, and so is the bound.
    rng = np.random.default_rng(0)
    law = np.array([0.5, 0.25, 0.125, 0.125])
    ids = 4 + rng.choice(4, (4000, 64), p=law)
    batch = noise_batch(
        {"input_ids": ids, "attention_mask": np.ones_like(ids)},
        ([0] * 4000, range(4000)),
        V,
        DiffusionConfig(noise_eps=0.0, sampling_eps=0.001),
    )
    losses = -np.log2(law[np.maximum(batch["labels"] - 4, 0)])  # bits; of no weight off the labels
    bound = (batch["loss_weights"] * losses).sum(1) / 64
    assert abs(bound.mean() - 1.75) < 5 * bound.std() / math.sqrt(4000)


@pytest.mark.parametrize(
    "options", [{}, {"min_masked": 20}, {"schedule": "cosine"}, {"end_token_id": 2}]
)
@pytest.mark.parametrize("limit", [16, 5, 1])
def test_a_limit_on_labels_leaves_the_bound_where_it_is(limit, options):
    "A hidden token costs more, the more of its row is hidden, and the further right it stands: so it must stay hidden."
    sums, hidden = [], []
    for most in (None, limit):
        batch, _, words = noised(DiffusionConfig(**options, max_predictions=most))
        hidden.append(batch["input_ids"] == V.mask_token_id)
        costs = 1 + hidden[-1].sum(1, keepdims=True) / 8 + np.arange(32) / 16
        sums.append((batch["loss_weights"] * costs).sum(1) / words.sum(1))
        assert (batch["labels"] >= 0).sum(1).max() <= (most or 32)
    assert np.array_equal(*hidden), "what is hidden does not depend on how much is asked"
    apart = sums[1] - sums[0]
    assert apart.std() > 0 and abs(apart.mean()) < 5 * apart.std() / math.sqrt(len(apart))


def test_bits_per_byte_count_hidden_tokens_without_a_label():
    bytes_V = torch.arange(20.0).masked_fill(torch.arange(20) < 4, 0)  # special tokens have no text
    counts = []
    for most in (None, 3):
        collate = MaskedDiffusionCollator(
            0, 1, 20, special_token_ids=[0, 1, 2, 3], max_sequence_length=40, max_predictions=most
        )
        counts.append(float(_label_bytes(collate([list(range(4, 20)) * 2]), bytes_V)))
    assert counts == [2 * sum(range(4, 20))] * 2


@pytest.mark.parametrize("options", [
    {"num_steps": 0}, {"sampling_eps": 1}, {"noise_eps": -0.1}, {"min_masked": -1},
    {"max_masked": 0}, {"min_masked": 5, "max_masked": 4}, {"seed": -1},
])  # fmt: skip
def test_a_wrong_option_is_refused_by_name(options):
    [name, *_] = options
    with pytest.raises(ValueError, match=f"{name}.*{options[name]}"):
        MaskedDiffusionCollator(0, 1, 20, special_token_ids=[2], **options)


def test_enhanced_masking_hides_nothing_and_asks_for_every_word():
    collate = EnhancedMaskedLanguageModelingCollator(
        0, 1, 20, special_token_ids=[0, 1, 2], max_sequence_length=6
    )
    batch = collate([[2, 9, 1, 10], {"input_ids": [11, 12], "special_tokens_mask": [0, 1]}])
    assert batch["input_ids"].tolist() == [[2, 9, 1, 10, 0, 0], [11, 12, 0, 0, 0, 0]]
    none = IGNORE_INDEX
    assert batch["labels"].tolist() == [[none, 9, none, 10, none, none], [11] + [none] * 5]
    assert batch["label_positions"].shape == (2, 6)
    assert batch["label_positions"][:, :2].tolist() == [[1, 3], [0, 1]]
    assert batch["num_dropped_labels"].tolist() == [0, 0]


@pytest.mark.parametrize("objective", ["mlm", "enhanced_mlm", "diffusion"])
def test_pretraining_objectives_share_the_keys_that_a_step_reads(objective):
    options = {"special_token_ids": [0, 1, 2], "max_sequence_length": 8}
    batch = get_collator_cls(objective)(0, 1, 20, **options)([[9, 10, 11], [12]])
    assert {"input_ids", "attention_mask", "position_ids", "labels", "label_positions"} <= set(
        batch
    )
    assert all(values.shape[0] == 2 for values in batch.values())
