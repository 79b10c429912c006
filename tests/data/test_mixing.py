"Shares are met, nothing repeats beyond its cap, an epoch is a function of its number, and a stream resumes exactly."

import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.data.mixing import (
    JoinedTokens,
    MixedStream,
    divide_budget,
    mix_documents,
    proportional_rates,
)
from bertlab.data.packing import PackedDataset, TokenizedDocuments
from bertlab.data.sources import TextStream

SETTINGS = settings(derandomize=True, deadline=None, max_examples=120)


def documents_of(lengths, first_id: int = 1000) -> TokenizedDocuments:
    "Each document repeats one id, by which it is known."
    ids = (np.full(length, first_id + number) for number, length in enumerate(lengths))
    return TokenizedDocuments.from_sequences(ids)


lengths = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any)
cases = st.lists(st.tuples(lengths, st.floats(0.05, 1), st.floats(0.3, 4)), min_size=1, max_size=4)


def named(case):
    sources = {
        f"s{i}": documents_of(lengths, 1000 * (i + 1)) for i, (lengths, _, _) in enumerate(case)
    }
    rates = {f"s{i}": rate for i, (_, rate, _) in enumerate(case)}
    caps = {f"s{i}": cap for i, (_, _, cap) in enumerate(case)}
    return sources, rates, caps


@given(cases, st.integers(0, 5), st.integers(0, 3), st.floats(0.05, 1))
@SETTINGS
def test_shares_are_met_to_within_one_document_and_no_document_exceeds_its_cap(
    case, epoch, seed, part
):
    sources, rates, caps = named(case)
    largest = min(
        caps[n] * len(sources[n].tokens) * sum(rates.values()) / rates[n] for n in sources
    )
    budget = max(1, int(largest * part))
    try:
        mixed = mix_documents(
            sources, rates, budget_tokens=budget, max_repetition=caps, seed=seed, epoch=epoch
        )
    except ValueError:
        assert (
            budget >= int(largest) or min(caps.values()) < 1
        )  # nothing but rounding may refuse it
        return
    for number, name in enumerate(sources):
        own = mixed.documents[mixed.sources == number]
        lengths = np.diff(sources[name].offsets)
        asked = budget * rates[name] / sum(rates.values())
        assert abs(lengths[own].sum() - asked) <= lengths.max() + 1
        assert max(Counter(own.tolist()).values(), default=0) <= math.ceil(caps[name])
        share = mixed.describe()[name]
        assert share["tokens"] == lengths[own].sum() and share["documents"] == len(own)
        assert share["repetitions"] == share["tokens"] / lengths.sum()


@given(cases, st.integers(0, 3))
@SETTINGS
def test_a_mixture_reads_like_its_documents_one_by_one(case, epoch):
    sources, rates, _ = named(case)
    mixed = mix_documents(sources, rates, max_repetition=2, epoch=epoch)
    names = list(sources)
    for place, (source, document) in enumerate(zip(mixed.sources, mixed.documents)):
        assert mixed[place].tolist() == sources[names[source]][document].tolist()
    assert mixed.tokens[:].tolist() == [int(token) for document in mixed for token in document]
    assert len(mixed.tokens) == mixed.offsets[-1]


def test_the_same_seed_and_epoch_repeat_and_others_differ():
    sources = {"a": documents_of([3] * 200), "b": documents_of([5] * 100, 5000)}

    def mix(**options):
        mixed = mix_documents(sources, {"a": 1, "b": 1}, budget_tokens=300, **options)
        return list(zip(mixed.sources.tolist(), mixed.documents.tolist()))

    assert mix(seed=1, epoch=2) == mix(seed=1, epoch=2)
    sets = [frozenset(mix(seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len(set(sets)) == len(sets)


@given(st.lists(st.integers(1, 9), min_size=5, max_size=40), st.floats(0.1, 2.5), st.integers(1, 9))
@SETTINGS
def test_over_epochs_every_document_comes_equally_often(lengths, passes, num_epochs):
    source = {"a": documents_of(lengths)}
    budget = max(1, int(passes * sum(lengths)))
    mixed = [
        mix_documents(source, {"a": 1}, budget_tokens=budget, max_repetition=3, epoch=e)
        for e in range(num_epochs)
    ]
    times = np.bincount(np.concatenate([m.documents for m in mixed]), minlength=len(lengths))
    assert times.max() - times.min() <= 1


def test_without_a_budget_the_scarcest_source_is_read_as_often_as_it_may():
    sources = {"large": documents_of([10] * 100), "small": documents_of([10] * 4, 5000)}
    mixed = mix_documents(
        sources, {"large": 3, "small": 1}, max_repetition={"large": 1, "small": 5}
    )
    assert mixed.describe()["small"]["tokens"] == 200 and mixed.describe()["large"]["tokens"] == 600
    assert [round(share.obtained, 9) for share in mixed.shares] == [0.75, 0.25]
    assert (
        "small: 25.0% of the tokens (asked 25.0%), 20 documents, 200 of 40 tokens, read 5.00 times"
        in mixed.report()
    )


def test_rates_that_cannot_be_met_name_the_largest_budget_and_it_works():
    sources = {"large": documents_of([10] * 100), "small": documents_of([10] * 4, 5000)}
    rates = {"large": 1, "small": 1}
    with pytest.raises(ValueError, match="'small'.*largest budget is 160") as error:
        mix_documents(sources, rates, budget_tokens=161, max_repetition=2)
    assert "on_shortage='scale'" in str(error.value)
    assert len(mix_documents(sources, rates, budget_tokens=160, max_repetition=2).tokens) == 160
    scaled = mix_documents(sources, rates, budget_tokens=500, max_repetition=2, on_shortage="scale")
    assert (
        scaled.describe()["small"]["tokens"] == 80 and scaled.describe()["large"]["tokens"] == 420
    )
    assert scaled.shares[1].asked == 0.5 and scaled.shares[1].obtained == 80 / 500
    all_there_is = mix_documents(sources, rates, budget_tokens=10**6, on_shortage="scale")
    assert len(all_there_is.tokens) == 1040


def test_scaling_keeps_the_proportions_of_those_that_have_enough():
    wanted = divide_budget(
        {"a": 0.5, "b": 0.25, "c": 0.25}, {"a": 100, "b": 10**6, "c": 10**6}, 1100, "scale"
    )
    assert wanted == {"a": 100, "b": 500, "c": 500}


@given(
    st.dictionaries(
        st.sampled_from("abcde"), st.tuples(st.floats(0.01, 1), st.integers(1, 1000)), min_size=1
    ),
    st.integers(1, 4000),
)
@SETTINGS
def test_a_scaled_budget_is_used_up_unless_all_sources_are(case, budget):
    total = sum(rate for rate, _ in case.values())
    limits = {name: limit for name, (_, limit) in case.items()}
    wanted = divide_budget(
        {name: rate / total for name, (rate, _) in case.items()}, limits, budget, "scale"
    )
    assert all(0 <= wanted[name] <= limits[name] for name in case)
    assert sum(wanted.values()) == min(budget, sum(limits.values()))


def test_a_part_of_a_source_stays_the_same_part_in_every_epoch():
    sources = {"a": documents_of([2] * 50), "b": documents_of([2] * 50, 5000)}

    def drawn(epoch, names="ab"):
        chosen = {name: sources[name] for name in names}
        mixed = mix_documents(
            chosen,
            dict.fromkeys(names, 1),
            max_source_fraction={"a": 0.2},
            max_repetition=3,
            epoch=epoch,
        )
        return set(mixed.documents[mixed.sources == 0].tolist())

    assert len(drawn(0)) == 10 and drawn(0) == drawn(7) == drawn(0, "a")


@pytest.mark.parametrize("overflow", ["truncate", "truncate_left"])
def test_rates_are_of_what_rows_keep_where_they_cut_documents_off(overflow):
    sources = {"books": documents_of([3000] * 50), "posts": documents_of([30] * 400, 5000)}
    special = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
    for epoch in (0, 3):
        mixed = mix_documents(sources, {"books": 1, "posts": 1}, epoch=epoch, room=126)
        packed = PackedDataset(mixed, 128, overflow=overflow, **special)
        found = np.concatenate([packed[n]["input_ids"] for n in range(len(packed))])
        books = ((found >= 1000) & (found < 5000)).sum() / (found > 2).sum()
        assert abs(books - 0.5) < 0.01
        share = mixed.describe()["books"]
        assert (
            share["obtained"] == pytest.approx(books)
            and share["tokens"] == 126 * share["documents"]
        )
        assert share["available"] == 50 * 126 and len(mixed[int(np.argmin(mixed.sources))]) == 3000
    with pytest.raises(ValueError, match="room must be 1 or more"):
        mix_documents(sources, {"books": 1, "posts": 1}, room=0)


def test_a_mixture_is_packed_without_a_copy_and_each_of_its_tokens_is_delivered():
    sources = {"a": documents_of([7, 0, 40, 3]), "b": documents_of([5] * 20, 5000)}
    mixed = mix_documents(sources, {"a": 1, "b": 1}, max_repetition=3)
    packed = PackedDataset(mixed, 16, pad_token_id=0, cls_token_id=1, sep_token_id=2)
    assert packed.documents is mixed
    assert np.shares_memory(mixed[0], sources["ab"[mixed.sources[0]]].tokens)
    delivered = Counter(
        int(t) for i in range(len(packed)) for t in packed[3, i]["input_ids"] if t > 2
    )
    assert delivered == Counter(mixed.tokens[:].tolist())


def test_joined_tokens_refuse_what_they_cannot_do():
    joined = JoinedTokens([np.arange(4)], np.array([0]), np.array([0]), np.array([0, 4]))
    assert joined[2:2].tolist() == [] and joined[-2:].tolist() == [2, 3]
    with pytest.raises(ValueError, match="steps of 1"):
        joined[::2]
    with pytest.raises(ValueError, match="mode must be 'clip', got 'wrap'"):
        joined.take(np.arange(2), mode="wrap")


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=9),
       st.integers(0, 10**6))  # fmt: skip
def test_joined_tokens_are_read_like_one_array(stretches, seed):
    arrays = [np.arange(30, dtype=np.int32) + 100 * n for n in range(3)]
    sources, starts, sizes = np.array([*stretches, (0, 3, 1)]).T
    joined = JoinedTokens(arrays, sources, starts, np.cumsum([0, *sizes]))
    flat = np.concatenate(
        [arrays[s][a : a + n] for s, a, n in zip(sources, starts, sizes, strict=True)]
    )
    rng = np.random.default_rng(seed)
    begin, end = sorted(rng.integers(0, len(flat) + 1, 2))
    assert len(joined) == len(flat) and np.array_equal(joined[begin:end], flat[begin:end])
    assert (
        np.array_equal(np.asarray(joined), flat) and np.asarray(joined, np.int64).dtype == np.int64
    )
    places = rng.integers(-3, len(flat) + 3, (2, 7))
    assert np.array_equal(joined.take(places, mode="clip"), flat.take(places, mode="clip"))


@pytest.mark.parametrize("options, words", [
    ({"rates": {"a": 1}}, "same names"), ({"rates": {"a": 1, "b": 1, "c": 1}}, "['c']"), ({"rates": {"a": 0, "b": 0}}, "all rates are 0"),
    ({"rates": {"a": -1, "b": 1}}, "rates['a']"), ({"rates": {"a": math.nan, "b": 1}}, "nan"), ({"max_repetition": 0}, "max_repetition of 'a'"),
    ({"max_repetition": {"a": 1}}, "['b']"), ({"budget_tokens": 0}, "budget_tokens"), ({"on_shortage": "ignore"}, "'ignore'"),
    ({"max_source_fraction": 1.5}, "max_source_fraction of 'a'"), ({"epoch": -1}, "epoch"), ({"rates": {"a": 1, "b": 1}, "empty": True}, "'b' holds no token"),
])  # fmt: skip
def test_mistakes_are_named(options, words):
    empty = options.pop("empty", False)
    sources = {"a": documents_of([5] * 9), "b": documents_of([] if empty else [5])}
    with pytest.raises(ValueError) as error:
        mix_documents(sources, **{"rates": {"a": 1, "b": 1}, **options})
    assert words in str(error.value)


def test_a_source_with_rate_zero_is_left_out_even_if_it_is_empty():
    mixed = mix_documents({"a": documents_of([5] * 9), "b": documents_of([])}, {"a": 1, "b": 0})
    assert [share.name for share in mixed.shares] == ["a"] and len(mixed) == 9


def test_temperature_goes_from_natural_to_even_proportions():
    sizes = {"a": 900, "b": 100}
    assert proportional_rates(sizes) == pytest.approx({"a": 0.9, "b": 0.1})
    assert proportional_rates(sizes, 2) == pytest.approx(
        {"a": 0.75, "b": 0.25}
    )  # square roots are 30 and 10
    assert proportional_rates(sizes, 1e9) == pytest.approx({"a": 0.5, "b": 0.5})
    assert proportional_rates({"a": 10**12, "b": 1}, 0.01) == pytest.approx({"a": 1, "b": 0})
    for wrong in ((sizes, 0), ({"a": 0}, 1)):
        with pytest.raises(ValueError):
            proportional_rates(*wrong)


# --- streams --------------------------------------------------------------------------------------

texts = st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=30)


@given(
    st.lists(st.tuples(texts, st.floats(0.1, 1), st.integers(1, 3)), min_size=1, max_size=4),
    st.integers(0, 60),
)
@SETTINGS
def test_no_stream_is_ahead_by_more_than_an_item_or_read_too_often_and_all_resume(case, stop):
    def stream():
        streams = {
            f"s{i}": [f"{i}{text}" for text in texts] for i, (texts, _, _) in enumerate(case)
        }
        rates = {f"s{i}": rate for i, (_, rate, _) in enumerate(case)}
        return MixedStream(
            streams, rates, max_repetition={f"s{i}": cap for i, (_, _, cap) in enumerate(case)}
        )

    whole, total = list(stream()), sum(rate for _, rate, _ in case)
    given_ = Counter()
    for text in whole:
        given_[int(text[0])] += len(text)
        for i, (_, rate, _) in enumerate(case):
            assert (
                given_[i] - rate / total * given_.total() <= 11
            )  # the longest item and its number
    for i, (texts, _, cap) in enumerate(case):
        assert sum(text[0] == str(i) for text in whole) <= cap * len(texts)
    assert any(
        sum(text[0] == str(i) for text in whole) == cap * len(texts)
        for i, (texts, _, cap) in enumerate(case)
    )
    stop = min(stop, len(whole))
    stopped, resumed = stream(), stream()
    head = list(itertools.islice(stopped, stop))
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert head + list(resumed) == whole
    assert list(stopped) == whole[stop:] and list(stopped) == whole  # from where it is; then anew


def test_streams_of_files_resume_by_their_own_place(tmp_path):
    for name, count in (("a", 40), ("b", 7)):
        (tmp_path / f"{name}.txt").write_text("\n".join(f"{name} line {i}" for i in range(count)))

    def stream():
        files = {
            name: TextStream(str(tmp_path / f"{name}.txt"), lines="documents") for name in "ab"
        }
        return MixedStream(files, {"a": 1, "b": 1}, max_repetition={"a": 1, "b": math.inf})

    whole = list(stream())
    assert (
        sum(text[0] == "a" for text in whole) == 40
        and abs(sum(text[0] == "b" for text in whole) - 40) <= 6
    )
    for stop in range(len(whole) + 1):
        stopped, resumed = stream(), stream()
        head = list(itertools.islice(stopped, stop))
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        assert head + list(resumed) == whole, stop


def test_stream_mistakes_are_named():
    with pytest.raises(ValueError, match="'b' is empty"):
        list(MixedStream({"a": ["x"], "b": []}, {"a": 1, "b": 1}))
    with pytest.raises(ValueError, match="second time"):
        list(MixedStream({"a": iter(["x"]), "b": ["y"] * 9}, {"a": 1, "b": 1}, max_repetition=2))
    with pytest.raises(ValueError, match="max_repetition of 'a'"):
        MixedStream({"a": ["x"]}, {"a": 1}, max_repetition=0)
    for part in (2.9, 0.5, {"a": 1.5}, math.nan):
        with pytest.raises(ValueError, match="max_repetition"):
            MixedStream({"a": ["x"]}, {"a": 1}, max_repetition=part)
    for whole in (2, 2.0, math.inf):
        MixedStream({"a": ["x"]}, {"a": 1}, max_repetition=whole)
    state = MixedStream({"a": ["x"]}, {"a": 1}).state_dict()
    with pytest.raises(ValueError, match="the state is of the streams"):
        MixedStream({"b": ["x"]}, {"b": 1}).load_state_dict(state)


def test_rows_with_columns_are_measured_by_what_the_user_says_and_never_by_their_number_of_columns():
    streams = {"a": [{"text": "x" * 100}] * 2, "b": [{"text": "y"}] * 200}
    with pytest.raises(
        ValueError, match=r"stream 'a' gives rows of the columns \['text'\].*size_of=lambda row"
    ):
        list(MixedStream(streams, {"a": 1, "b": 1}))
    measured = MixedStream(streams, {"a": 1, "b": 1}, size_of=lambda row: len(row["text"]))
    taken = Counter("".join(row["text"] for row in measured))
    assert taken == {"x": 200, "y": 200}


class Resumable:
    "A stream that goes on where it was left, until it is reset."

    def __init__(self, items):
        self.items, self.place = items, 0

    def reset(self):
        self.place = 0

    def __iter__(self):
        while self.place < len(self.items):
            self.place += 1
            yield self.items[self.place - 1]
        self.place = 0


def test_a_second_reading_of_a_mixture_equals_the_first_though_a_stream_was_left_in_the_middle():
    mixture = MixedStream(
        {"a": Resumable(["a1", "a2"]), "b": Resumable([f"b{i}" for i in range(9)])},
        {"a": 1, "b": 1},
    )
    with pytest.warns(UserWarning, match="before 'b' was read to its end"):
        first = list(mixture)
    with pytest.warns(UserWarning, match="max_repetition of 'a' .now 1."):
        second = list(mixture)
    assert first == second and "b8" not in first and "b0" in second


@pytest.mark.parametrize(
    "b, caps", [(["b1", "b2"], 1), (["b1"], 3), ([f"b{i}" for i in range(5)], {"a": 9, "b": 1})]
)
def test_a_mixture_that_leaves_no_rest_unread_ends_without_a_word(recwarn, b, caps):
    "Of streams that end at the same item, of one that was read before, and of a small one that comes as often as it must."
    mixture = MixedStream({"a": ["a1", "a2"], "b": b}, {"a": 1, "b": 1}, max_repetition=caps)
    assert set(mixture) == {"a1", "a2", *b} and not recwarn.list


def test_a_cap_for_what_is_no_source_is_refused_by_each_that_takes_caps():
    sources = {"a": documents_of([5, 5]), "b": documents_of([5])}
    for options in (
        {"max_repetition": {"a": 2, "b": 2, "c": 2}},
        {"max_source_fraction": {"bb": 0.5}},
    ):
        with pytest.raises(ValueError, match="which are no sources: a, b"):
            mix_documents(sources, {"a": 1, "b": 1}, **options)
    with pytest.raises(ValueError, match=r"max_repetition names \['c'\]"):
        MixedStream(
            {"a": ["x"], "b": ["y"]}, {"a": 1, "b": 1}, max_repetition={"a": 1, "b": 1, "c": 1}
        )
