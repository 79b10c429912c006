"Mixtures of rows meet their shares, and no row comes twice before all have come once."

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.data.mixing import (
    InterleavedTurns,
    MixedDataset,
    MixtureOptions,
    allocate_tokens,
    normalize_weights,
)
from bertlab.data.packing import PackedDataset

SPECIAL = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}


def make_source(num_documents, first_id, longest=60, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, num_documents)
    return PackedDataset([rng.integers(first_id, first_id + 50, n) for n in lengths], 64, **SPECIAL)


@pytest.fixture(scope="module")
def sources():
    return {"a": make_source(1500, 10), "b": make_source(200, 100, 200), "c": make_source(90, 200)}


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0.05, 10), min_size=2, max_size=5), st.data())
def test_an_allocation_keeps_shares_and_limits(weights, data):
    names = [f"s{n}" for n in range(len(weights))]
    sizes = {name: data.draw(st.integers(1000, 10**6)) for name in names}
    repeats = {name: data.draw(st.floats(0.5, 4)) for name in names}
    shares = normalize_weights(weights, names)
    allocated = allocate_tokens(shares, sizes, repeats)
    total = sum(allocated.values())
    used = {name: allocated[name] / (sizes[name] * repeats[name]) for name in names}
    assert 0.99 < max(used.values()) <= 1 + 1e-6
    assert all(abs(allocated[name] - shares[name] * total) < 1 + len(names) for name in names)
    with pytest.raises(ValueError, match="the largest budget"):
        allocate_tokens(shares, sizes, repeats, budget_tokens=2 * total + 9)


def test_an_epoch_has_the_shares_of_tokens(sources):
    weights = {"a": 5, "b": 3, "c": 2}
    mixture = MixedDataset(sources, weights, max_repetition={"a": 1, "b": 4, "c": 4})
    rows = [mixture[1, index] for index in range(len(mixture))]
    ids = np.concatenate([row["input_ids"] for row in rows])
    counts = [((ids >= low) & (ids < low + 50)).sum() for low in (10, 100, 200)]
    assert np.abs(np.array(counts) / sum(counts) - [0.5, 0.3, 0.2]).max() < 0.01


def test_no_row_comes_twice_before_all_have_come(sources):
    mixture = MixedDataset(sources, [1, 1, 1], max_repetition=3)
    visits = [mixture.locate(epoch, index) for epoch in range(3) for index in range(len(mixture))]
    for source_index, dataset in enumerate(sources.values()):
        addresses = [address for source, address in visits if source == source_index]
        assert len(set(addresses)) == len(addresses)
        last = max(epoch for epoch, _ in addresses)
        assert sorted(a for a in addresses if a[0] < last) == [
            (epoch, row) for epoch in range(last) for row in range(len(dataset))
        ]


def test_rows_have_the_address_of_the_mixture_and_are_repeatable(sources):
    mixture = MixedDataset(sources, [2, 1, 1])
    keys = [(2, index) for index in range(len(mixture))]
    rows = [mixture[key] for key in keys]
    assert [(row["epoch"], row["index"]) for row in rows] == keys
    again = MixedDataset(sources, [2, 1, 1])
    for key in keys[::7]:
        assert np.array_equal(again[key]["input_ids"], rows[key[1]]["input_ids"])
    order = lambda dataset, epoch: [dataset.locate(epoch, n)[0] for n in range(len(dataset))]
    assert order(mixture, 0) != order(mixture, 1)
    fixed = MixedDataset(sources, [2, 1, 1], shuffle=False)
    assert order(fixed, 0) == order(fixed, 1)
    with pytest.raises(IndexError):
        mixture[len(mixture)]


def test_the_report_says_how_often_each_source_is_read(sources):
    mixture = MixedDataset(sources, {"a": 1, "b": 1, "c": 2}, max_repetition=4)
    assert mixture.tokens["c"] / mixture.sizes["c"] == pytest.approx(4, abs=0.01)
    assert "c: 50.0%" in mixture.report() and "(4.00 times)" in mixture.report()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 5000))
def test_turns_follow_from_their_number(weights, turn):
    shares = np.array(weights) / sum(weights)
    turns = InterleavedTurns(shares)
    located = [turns(t) for t in range(2500)]
    seen = np.zeros(len(shares), int)
    for source_index, (source, addresses) in enumerate(located, 1):
        assert addresses == seen[source]
        seen[source] += 1
        if source_index <= 1000:
            assert np.abs(seen - shares * source_index).max() < 2
    assert turns(turn)[0] == turns(turn + 1000)[0]


@pytest.mark.parametrize("options, words", [
    ({"max_repetition": 0}, ["max_repetition", "0"]),
    ({"mixture_weights": [1, 2], "max_repetition": {"a": -1}}, ["max_repetition", "-1"]),
    ({"mixture_weights": [1, 2], "budget_tokens": 0}, ["budget_tokens", "0"]),
    ({"budget_tokens": 9}, ["budget_tokens", "mixture_weights"]),
])  # fmt: skip
def test_options_that_cannot_be_are_named(options, words):
    with pytest.raises(ValueError) as error:
        MixtureOptions(**options)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("weights, options, words", [
    ([1, 2], {}, ["mixture_weights", "a, b, c"]),
    ({"a": 1, "b": 1, "d": 1}, {}, ["'d'", "a, b, c"]),
    ([1, 1, 0], {}, ["'c'", "above 0"]),
    ([1, 1, 1], {"budget_tokens": 10**9}, ["budget_tokens=1,000,000,000", "'c'"]),
])  # fmt: skip
def test_mixtures_that_cannot_be_are_named(sources, weights, options, words):
    with pytest.raises(ValueError) as error:
        MixedDataset(sources, weights, **options)
    assert all(word in str(error.value) for word in words)


def test_lengths_are_those_of_the_built_rows(sources):
    for rows in (*sources.values(), MixedDataset(sources, [1, 1, 1], max_repetition=3)):
        for epoch, indices in ((0, range(9)), (2, [7, 0, 20])):
            built = [int((rows[epoch, index]["attention_mask"] > 0).sum()) for index in indices]
            assert rows.row_lengths(epoch, indices).tolist() == built
