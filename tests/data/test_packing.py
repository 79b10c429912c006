"Packing: no token lost, no row too full, the same for the same seed and epoch."

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from bertlab.data.packing import (
    EpochShuffle,
    PackedDataset,
    PackingPlan,
    TokenizedDocuments,
    build_rows,
    mark_context,
    pack_best_fit,
    split_into_windows,
)
from bertlab.data import tokens as tokens_module

PAD, CLS, SEP = 0, 1, 2
SPECIAL = {"pad_token_id": PAD, "cls_token_id": CLS, "sep_token_id": SEP}
many = settings(max_examples=100, deadline=None, derandomize=True)


@st.composite
def lengths_and_capacity(draw):
    capacity = draw(st.integers(1, 60))
    return draw(st.lists(st.integers(0, capacity), max_size=60)), capacity


@st.composite
def corpora(draw):
    "Documents whose tokens are all different, so that each can be followed."
    lengths = draw(st.lists(st.integers(0, 40), max_size=25))
    ends = np.cumsum([0, *lengths]) + 10
    return [list(range(a, b)) for a, b in zip(ends, ends[1:])], draw(st.integers(3, 30))


def slow_best_fit(lengths, capacity):
    "One document at a time, looking at every row: the definition, not the trick."
    rows, space = [], []
    for document in sorted(range(len(lengths)), key=lambda d: (-lengths[d], d)):
        if lengths[document] == 0:
            continue
        fits = [(space[r], r) for r in range(len(rows)) if space[r] >= lengths[document]]
        if not fits:
            rows.append([])
            space.append(capacity)
            fits = [(capacity, len(rows) - 1)]
        row = min(fits)[1]
        rows[row].append(document)
        space[row] -= lengths[document]
    return rows


def lay(rows, capacity, **special):
    "Rows of pieces, as `build_rows` takes them: end to end."
    laid = TokenizedDocuments.from_sequences(ids for pieces in rows for ids in pieces)
    return build_rows(laid.tokens, (laid.offsets[:-1], laid.offsets[1:]), list(map(len, rows)), capacity,
                      **special)  # fmt: skip


def documents_of(row):
    "Take a row apart again: ordinary tokens by document number."
    ids, numbers = row["input_ids"], row["attention_mask"]
    return [ids[numbers == n].tolist() for n in range(1, numbers.max(initial=0) + 1)]


@many
@given(lengths_and_capacity())
def test_plan_agrees_row_by_row_with_a_slow_reference(case):
    lengths, capacity = case
    plan = pack_best_fit(lengths, capacity)
    assert [plan[r].tolist() for r in range(len(plan))] == slow_best_fit(lengths, capacity)
    assert plan.num_empty == lengths.count(0)


def test_among_equally_full_rows_the_first_opened_wins():
    # 27 leaves 8 in row 0, 23 leaves 12 in row 1; 11 makes row 1 the first with 1 left, then 7
    # makes row 0 the second. The last document fits both and goes to row 0.
    plan = pack_best_fit([27, 23, 11, 7, 1], 35)
    assert [plan[r].tolist() for r in range(len(plan))] == [[0, 3, 4], [1, 2]]


@many
@given(lengths_and_capacity())
def test_no_row_overflows_and_every_document_is_placed_once(case):
    lengths, capacity = case
    plan = pack_best_fit(lengths, capacity)
    placed = [plan[r].tolist() for r in range(len(plan))]
    assert all(0 < sum(lengths[d] for d in row) <= capacity for row in placed)
    assert sorted(sum(placed, [])) == [d for d, n in enumerate(lengths) if n]


@pytest.mark.parametrize("lengths, capacity", [([3, 9], 8), ([-1], 8), ([1], 0)])
def test_impossible_lengths_are_refused(lengths, capacity):
    with pytest.raises(ValueError, match="capacity"):
        pack_best_fit(lengths, capacity)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mean, capacity", [(134, 512), (560, 1024)])
def test_log_normal_documents_fill_rows_to_99_5_percent(mean, capacity, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(mean) - 0.5, 1.0, 20_000).astype(int) + 1
    documents = TokenizedDocuments(np.zeros(lengths.sum(), np.int32), np.cumsum([0, *lengths]))
    assert PackedDataset(documents, capacity, **SPECIAL).efficiency >= 0.995


@many
@given(corpora())
def test_rows_number_documents_and_restart_positions(case):
    documents, capacity = case
    dataset = PackedDataset(documents, capacity, **SPECIAL)
    for index in range(len(dataset)):
        row = dataset[index]
        expected = [
            (id, document, position)
            for document, ids in enumerate(documents_of(row), 1)
            for position, id in enumerate(ids)
        ]
        expected += [(PAD, 0, 0)] * (capacity - len(expected))
        arrays = row["input_ids"], row["attention_mask"], row["position_ids"]
        assert all(array.dtype == np.int64 and array.shape == (capacity,) for array in arrays)
        assert list(zip(*(array.tolist() for array in arrays))) == expected


@many
@given(corpora())
def test_only_documents_longer_than_a_row_are_split_and_in_order(case):
    documents, capacity = case
    dataset = PackedDataset(documents, capacity, **SPECIAL)
    pieces = sorted(ids[1:-1] for i in range(len(dataset)) for ids in documents_of(dataset[i]))
    room = capacity - 2
    cut = [d[at : at + room] for d in documents for at in range(0, len(d), room)]
    assert pieces == sorted(cut)
    assert dataset.describe()["long_documents"] == sum(len(d) > room for d in documents)


@many
@given(st.lists(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5), st.integers(0, 5)), max_size=4),
                min_size=1, max_size=4), st.integers(0, 2), st.integers(0, 1), st.integers(0, 1))  # fmt: skip
def test_marks_of_many_rows_are_those_of_each_document_by_itself(rows, spare, before, after):
    capacity = max(1, spare + max(sum(size + before + after for size, _, _ in row) for row in rows))
    special = {
        "pad_token_id": 0,
        "cls_token_id": 1 if before else None,
        "sep_token_id": 2 if after else None,
    }
    block = lay([[[7] * size for size, _, _ in row] for row in rows], capacity, **special)
    contexts = [context for row in rows for _, *context in row]
    expected = []
    for row in rows:
        marks = []
        for size, before_it, right in row:
            free = [before_it <= n < size - right for n in range(size)]
            marks += [1] * before + [int(not is_free) for is_free in free] + [1] * after
        expected.append(marks + [1] * (capacity - len(marks)))
    marked = mark_context(block, np.array(contexts).reshape(-1, 2), before, after)
    assert marked["special_tokens_mask"].tolist() == expected
    assert "special_tokens_mask" not in block


def test_overlapping_windows_label_each_token_once():
    from bertlab.data.collators import MaskedLanguageModelingCollator

    documents = [list(range(10, 60)), list(range(60, 70))]
    dataset = PackedDataset(documents, 16, **SPECIAL, stride=6)
    collator = MaskedLanguageModelingCollator(
        PAD, 3, 100, mlm_probability=1.0, special_token_ids=[PAD, CLS, SEP, 3]
    )
    batch = collator([dataset[index] for index in range(len(dataset))])
    labels = batch["labels"][batch["labels"] != -100].tolist()
    assert sorted(labels) == list(range(10, 70))


@many
@given(lengths_and_capacity(), st.integers(0, 5))
def test_an_epoch_keeps_every_row_as_full_as_it_was_planned(case, epoch):
    lengths, capacity = np.array(case[0], np.int64), case[1]
    plan = pack_best_fit(lengths, capacity)
    order = EpochShuffle(plan, lengths)(epoch)
    sums = lambda p: sorted(int(lengths[p[row]].sum()) for row in range(len(p)))  # noqa: E731
    assert sums(order) == sums(plan)
    assert sorted(order.members.tolist()) == np.flatnonzero(lengths).tolist()


@pytest.mark.parametrize("num_documents", [400, 4000])
def test_documents_rarely_meet_the_same_neighbours_again(num_documents):
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(np.log(134) - 0.5, 1.0, num_documents).astype(int) + 1, 512)
    order = EpochShuffle(pack_best_fit(lengths, 512), lengths)
    pairs = []
    for epoch in (0, 1):
        members = [order(epoch)[row].tolist() for row in range(len(order.plan))]
        pairs.append({(a, b) for row in members for a in row for b in row if a < b})
    assert len(pairs[0] & pairs[1]) < 0.25 * len(pairs[0])
    if num_documents > 1000:
        assert len(pairs[0] & pairs[1]) < 0.02 * len(pairs[0])


def words(num_documents=200, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(10, 999, n) for n in rng.integers(1, 40, num_documents)]


def rows_of(dataset, epoch):
    return [dataset[epoch, index]["input_ids"].tolist() for index in range(len(dataset))]


def test_the_same_seed_and_epoch_repeat_and_others_differ():
    first, same = (PackedDataset(words(), 64, **SPECIAL, seed=5) for _ in range(2))
    second = PackedDataset(words(), 64, **SPECIAL, seed=6)
    assert rows_of(first, 3) == rows_of(same, 3)
    assert rows_of(first, 3) != rows_of(first, 4)
    assert rows_of(first, 3) != rows_of(second, 3)
    rows_of(first, 0)
    assert rows_of(first, 3) == rows_of(same, 3), "the epoch that was read before must not matter"


def test_set_epoch_gives_lone_indices_an_epoch():
    dataset = PackedDataset(words(), 64, **SPECIAL)
    dataset.set_epoch(3)
    assert [dataset[i]["input_ids"].tolist() for i in range(len(dataset))] == rows_of(dataset, 3)
    assert dataset[5]["epoch"] == 3 and dataset[1, 5]["epoch"] == 1


def read_epochs(rows):
    return [int(row["epoch"]) for row in rows]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_that_persist_hear_of_the_next_epoch(start):
    dataset = PackedDataset(words(), 64, **SPECIAL)
    loader = DataLoader(
        dataset,
        4,
        num_workers=1,
        collate_fn=read_epochs,
        persistent_workers=True,
        multiprocessing_context=start,
    )
    for epoch in (0, 1, 5):
        dataset.set_epoch(epoch)
        assert {document for batch in loader for document in batch} == {epoch}


def test_without_shuffling_all_epochs_are_the_plan():
    dataset = PackedDataset(words(), 64, **SPECIAL, shuffle=False)
    assert rows_of(dataset, 0) == rows_of(dataset, 7)
    longest = max(words(), key=len)
    assert rows_of(dataset, 0)[0][1 : len(longest) + 1] == longest.tolist()


class InOrder(PackedDataset):
    "Documents of one page are next to each other, and share rows."

    shuffle_documents = False

    def plan_rows(self, lengths):
        offsets, room = [0], self.capacity
        for window, length in enumerate(lengths.tolist()):
            if length > room:
                offsets.append(window)
                room = self.capacity
            room -= length
        return PackingPlan(np.arange(len(lengths)), np.array([*offsets, len(lengths)]), 0)


def test_rows_that_a_subclass_plans_may_stay_together():
    dataset = InOrder(words(), 64, **SPECIAL, seed=5)
    planned = rows_of(InOrder(words(), 64, **SPECIAL, shuffle=False), 0)
    first, second = (rows_of(dataset, epoch) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == sorted(planned), "neighbours were parted"
    assert len({str(rows) for rows in (first, second, planned)}) == 3
    assert rows_of(pickle.loads(pickle.dumps(dataset)), 1) == second


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 40), max_size=60), st.booleans(), st.booleans())
def test_every_token_comes_once_in_an_epoch_of_many_blocks(lengths, shuffle, packing):
    ends = np.cumsum([0, *lengths]) + 10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens_module, "BLOCK_DOCUMENTS", 3)
        documents = TokenizedDocuments.from_sequences(map(range, ends, ends[1:]))
        assert documents.num_blocks == -(-len(lengths) // 3)
        dataset = PackedDataset(documents, 16, **SPECIAL, shuffle=shuffle, packing=packing)
        for epoch in (0, 1):
            rows = [dataset[epoch, index] for index in range(len(dataset))]
            ids = np.concatenate([np.empty(0, int), *(row["input_ids"] for row in rows)])
            assert sorted(ids[ids >= 10]) == list(range(10, ends[-1]))
            assert len({(row["epoch"], row["index"]) for row in rows}) == len(rows)
        again = pickle.loads(pickle.dumps(dataset))
        for index in range(0, len(dataset), 5):
            assert np.array_equal(again[1, index]["input_ids"], dataset[1, index]["input_ids"])


def test_no_documents_give_no_rows():
    for documents in ([], [[]]):
        dataset = PackedDataset(documents, 8, **SPECIAL)
        assert len(dataset) == 0 and dataset.efficiency == 0
        assert "0 rows" in dataset.report()


def test_a_row_that_is_given_too_much_is_named():
    with pytest.raises(ValueError, match="row 1 has 4 positions, its documents need 5"):
        lay([[[5]], [[6, 7], [8]]], 4, pad_token_id=0, sep_token_id=2)


@pytest.mark.parametrize("make, words", [
    (lambda: PackedDataset([[1]], 2, **SPECIAL), ["below 0"]),
    (lambda: split_into_windows([0, 3], 2, "wrap"), ["overflow", "wrap"]),
    (lambda: PackedDataset([[1]], 8, **SPECIAL, stride=6), ["stride=6", "below 6"]),
    (lambda: PackedDataset([[1]], 8, **SPECIAL, stride=2, overflow="truncate"), ["stride=2", "truncate"]),
])  # fmt: skip
def test_options_that_cannot_be_are_named(make, words):
    with pytest.raises(ValueError) as error:
        make()
    assert all(word in str(error.value) for word in words)


def test_truncate_left_keeps_the_end_of_a_document():
    windows = split_into_windows([0, 10, 13, 13], room=4, overflow="truncate_left")
    assert list(zip(windows.starts.tolist(), windows.stops.tolist())) == [(6, 10), (10, 13)]
    assert (windows.num_cut_tokens, windows.num_long, windows.num_empty) == (6, 1, 1)
    with pytest.raises(ValueError, match="overflow.*'cut'"):
        split_into_windows([0, 10], room=4, overflow="cut")
