"Streaming: rows of a corpus that is never seen whole, the same for any number of processes and workers."

import json
import subprocess
import sys
import tracemalloc
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from bertlab.data.packing import PackedDataset, split_into_windows
from bertlab.data.streaming import (
    BestFitBuffer,
    PackedStream,
    StreamLoader,
    StreamWindow,
    cut_document,
    read_written_ids,
    write_ids,
)
from hypothesis import given, settings
from hypothesis import strategies as st

PAD, CLS, SEP = 0, 1, 2
SPECIAL = {"pad_token_id": PAD, "cls_token_id": CLS, "sep_token_id": SEP}
many = settings(max_examples=150, deadline=None, derandomize=True)


@st.composite
def streams(draw):
    "Documents whose tokens are all different, and options of every kind."
    lengths = draw(st.lists(st.integers(0, 40), max_size=40))
    ends = np.cumsum([0, *lengths]) + 10
    documents = [list(range(a, b)) for a, b in zip(ends, ends[1:])]
    capacity = draw(st.integers(3, 30))
    overflow = draw(st.sampled_from(["split", "truncate"]))
    options = {
        "capacity": capacity,
        "overflow": overflow,
        "overlap": draw(st.integers(0, capacity - 3)) if overflow == "split" else 0,
        "buffer_size": draw(st.integers(1, 20)),
        "shuffle_buffer": draw(st.integers(0, 10)),
        "seed": draw(st.integers(0, 3)),
        "block_size": draw(st.integers(1, 4)),
    }
    return documents, options


def documents_of(row):
    ids, numbers = row["input_ids"], row["attention_mask"]
    return [ids[numbers == n].tolist() for n in range(1, numbers.max(initial=0) + 1)]


def plain(row):
    return {
        name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()
    }


def rows_of(documents, options, **more):
    return [plain(row) for row in PackedStream(documents, **SPECIAL, **{**options, **more})]


def identity(rows):
    return [plain(row) for row in rows]


@many
@given(streams(), st.integers(1, 4))
def test_every_token_is_a_label_once_or_counted_as_cut(case, world_size):
    documents, options = case
    seen, repeated, num_rows, account = Counter(), 0, [], None
    for rank in range(world_size):
        stream = PackedStream(documents, **SPECIAL, **options, rank=rank, world_size=world_size)
        rows = list(stream)
        num_rows.append(len(rows))
        for row in rows:
            assert len(row["input_ids"]) == options["capacity"]
            for ids in documents_of(row):
                assert ids[0] == CLS and ids[-1] == SEP and len(ids) > 2
            free = row.get("special_tokens_mask", np.isin(row["input_ids"], [PAD, CLS, SEP]))
            seen.update(row["input_ids"][free == 0].tolist())
            repeated += int((np.isin(row["input_ids"], [PAD, CLS, SEP]) < free).sum())
        account = stream.describe()
    assert len(set(num_rows)) == 1 and num_rows[0] % options["block_size"] == 0
    room = options["capacity"] - 2
    if options["overflow"] == "truncate":
        documents = [document[:room] for document in documents]
    assert seen == Counter(token for document in documents for token in document)
    assert (account["tokens"], account["repeated_tokens"]) == (seen.total(), repeated)
    assert (
        account["rows"]
        <= num_rows[0] * world_size
        < account["rows"] + world_size * options["block_size"]
    )


@many
@given(streams(), st.integers(1, 4))
def test_ranks_share_out_the_rows_of_one_process_block_by_block(case, world_size):
    documents, options = case
    shares = [
        rows_of(documents, options, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    size = options["block_size"]
    blocks = [share[at : at + size] for at in range(0, len(shares[0]), size) for share in shares]
    together, alone = sum(blocks, []), rows_of(documents, options)
    assert together[: len(alone)] == alone
    assert all(sum(row["attention_mask"]) == 0 for row in together[len(alone) :]), (
        "only blank rows beyond"
    )
    assert [row["index"] for row in together] == list(range(len(together)))


@many
@given(streams(), st.data())
def test_resuming_after_any_row_gives_the_rest(case, data):
    documents, options = case
    expected = rows_of(documents, options)
    stopped_at = data.draw(st.integers(0, len(expected)))
    stream = PackedStream(documents, **SPECIAL, **options)
    iterator = iter(stream)
    head = [plain(next(iterator)) for _ in range(stopped_at)]
    state = json.loads(json.dumps(stream.state_dict()))
    again = PackedStream(documents, **SPECIAL, **options)
    again.load_state_dict(state)
    assert again.describe() == stream.describe()
    assert head + identity(again) == expected
    assert again.describe()["documents"] == len(documents)
    assert [plain(row) for row in again] == expected, "the next iteration begins at the beginning"


@many
@given(streams())
def test_windows_of_a_stream_are_those_of_the_plan(case):
    documents, options = case
    room, how = options["capacity"] - 2, (options["overflow"], options["overlap"])
    planned = split_into_windows(np.cumsum([0, *map(len, documents)]), room, *how)
    flat = np.array([token for document in documents for token in document])
    windows = [window for ids in documents for window in cut_document(np.array(ids), room, *how)]
    assert [w.ids.tolist() for w in windows] == [
        flat[a:b].tolist() for a, b in zip(planned.starts, planned.stops)
    ]
    assert [(w.left, w.right) for w in windows] == [
        tuple(ends) for ends in planned.contexts.tolist()
    ]


@many
@given(streams(), st.integers(0, 3))
def test_the_same_seed_and_epoch_repeat(case, epoch):
    documents, options = case
    first, second = (PackedStream(documents, **SPECIAL, **options) for _ in range(2))
    list(second)
    for stream in (first, second):
        stream.set_epoch(epoch)
    rows = identity(first)
    assert rows == identity(second) and all(row["epoch"] == epoch for row in rows)


def words(num=300, seed=0, longest=40):
    rng = np.random.default_rng(seed)
    return [rng.integers(10, 999, n).tolist() for n in rng.integers(1, longest, num)]


def stream_of(source, **options):
    defaults = {"capacity": 48, "buffer_size": 40, "shuffle_buffer": 20, "block_size": 4}
    return PackedStream(source, **{**SPECIAL, **defaults, **options})


def test_another_epoch_or_seed_gives_other_rows():
    def shared(seed, epoch):  # rows of two documents or more, whatever their order
        stream = stream_of(words(longest=20), seed=seed)
        stream.set_epoch(epoch)
        return {
            tuple(sorted(row["input_ids"].tolist()))
            for row in stream
            if row["attention_mask"].max() > 1
        }

    first, next_epoch, other_seed = shared(0, 0), shared(0, 1), shared(1, 0)
    assert len(first) > 50 and len(first & next_epoch) < 5 and len(first & other_seed) < 5


def windows(*lengths):
    return [StreamWindow(np.full(n, number)) for number, n in enumerate(lengths)]


def filled(lengths, capacity):
    "Numbers of the windows in each row, in the order in which they were taken."
    buffer, rows = BestFitBuffer(capacity), []
    for window in windows(*lengths):
        buffer.push(window)
    while buffer:
        rows.append([int(window.ids[0]) for window in buffer.fill_row()])
    return rows


def test_rows_of_a_case_worked_out_by_hand():
    # 4 is the oldest and leaves 6: nothing has 6, so a pair that makes 6 is looked for: 5 + 1.
    # Then 3 is the oldest and leaves 7, which is there. 2 is left over.
    assert filled([4, 1, 3, 5, 7, 2], 10) == [[0, 3, 1], [2, 4], [5]]


def test_a_pair_needs_two_windows():
    # 6 leaves 4. One window of 2 is no pair of 2 + 2; the longest that fits is taken, 3.
    assert filled([6, 2, 3], 10) == [[0, 2], [1]]
    assert filled([6, 2, 3, 2], 10) == [[0, 1, 3], [2]]


def test_of_equal_windows_the_oldest_goes_first_and_none_waits_for_ever():
    assert filled([5, 5, 5, 5], 10) == [[0, 1], [2, 3]]
    # A window that fits nothing well leaves when it is the oldest.
    assert filled([6, 9, 6, 4, 6, 4], 10)[1] == [1]


def test_a_small_stream_is_packed_as_the_plan():
    documents = words(30)
    planned = PackedDataset(documents, 48, **SPECIAL, shuffle=False)
    streamed = list(stream_of(documents, shuffle_buffer=0, block_size=1))
    assert len(streamed) == len(planned)
    assert all(
        (row["input_ids"] == planned[index]["input_ids"]).all()
        for index, row in enumerate(streamed)
    )


@pytest.mark.parametrize("mean, capacity", [(134, 512), (560, 1024)])
def test_log_normal_documents_fill_rows_to_more_than_99_5_percent(mean, capacity):
    lengths = np.random.default_rng(0).lognormal(np.log(mean) - 0.5, 1.0, 10_000).astype(int) + 1
    stream = stream_of(
        lambda epoch: (np.zeros(n, np.int32) for n in lengths), capacity=capacity, buffer_size=1000
    )
    for _ in stream:
        pass
    assert stream.describe()["efficiency"] >= 0.995


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_workers_change_nothing_and_resume_in_the_middle(num_workers):
    expected = list(StreamLoader(stream_of(words()), identity))
    batches, head = StreamLoader(stream_of(words()), identity, num_workers, snapshot_every=3), []
    for batch in batches:
        head.append(batch)
        if len(head) == 17:
            break
    state = json.loads(json.dumps(batches.state_dict()))
    assert head == expected[:17]
    resumed = StreamLoader(stream_of(words()), identity, (num_workers + 1) % 3)
    resumed.load_state_dict(state)
    assert list(resumed) == expected[17:]
    assert resumed.state_dict()["epoch"] == 1 and resumed.state_dict()["delivered"] == 0
    assert list(batches) == expected[17:], "the loader itself goes on as well"


def test_the_state_of_rank_0_resumes_every_rank_and_another_number_of_them():
    options = {"rank": 0, "world_size": 2}
    first = StreamLoader(stream_of(words(), **options), identity)
    for number, _ in enumerate(first, start=1):
        if number == 6:
            break
    alone = list(StreamLoader(stream_of(words()), identity))
    for world_size in (1, 2, 3, 4):
        rest = []
        for rank in range(world_size):
            batches = StreamLoader(stream_of(words(), rank=rank, world_size=world_size), identity)
            batches.load_state_dict(first.state_dict())
            rest.append(list(batches))
        together = [batch for round_ in zip(*rest) for batch in round_]
        assert together[: len(alone) - 12] == alone[12:], f"{world_size} processes"


def test_states_that_cannot_be_shared_out_are_refused():
    options = {"block_size": 4, "world_size": 2}
    last = stream_of(words(), rank=1, **options)
    iterator = iter(last)
    for stop in (2, 3):  # rank 1 has rows 4, 5, 6 and 7, so it has packed past row 2 by then
        [next(iterator) for _ in range(stop)]
        other = stream_of(words(), rank=0, **options)
        other.load_state_dict(last.state_dict())
        if stop == 2:
            with pytest.raises(
                ValueError, match="past row 2, the next one of rank 0: .* by rank 0"
            ):
                next(iter(other))
    with pytest.raises(ValueError, match="resume with world_size=2"):
        stream_of(words(), world_size=3).load_state_dict(last.state_dict())


class Counting:
    "A source with a state of its own; counts what is read."

    def __init__(self, documents):
        self.documents, self.place, self.epoch, self.num_read = documents, 0, None, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]

    def __iter__(self):
        while self.place < len(self.documents):
            self.place += 1
            self.num_read += 1
            yield {"input_ids": self.documents[self.place - 1], "other": "column"}


def test_a_source_with_a_state_is_not_read_again():
    expected = rows_of(words(), {"capacity": 48})
    stream = PackedStream(Counting(words()), 48, **SPECIAL, buffer_size=40, shuffle_buffer=20)
    expected = rows_of(words(), {"capacity": 48, "buffer_size": 40, "shuffle_buffer": 20})
    iterator = iter(stream)
    head = [plain(next(iterator)) for _ in range(60)]
    source = Counting(words())
    resumed = PackedStream(source, 48, **SPECIAL, buffer_size=40, shuffle_buffer=20)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert head + identity(resumed) == expected
    assert source.num_read == len(words()) - stream.packer.reader.num_read and source.epoch == 0


@pytest.mark.parametrize("kind", ["plain", "mapped", "shuffled"])
def test_datasets_streams_resume_and_are_not_shared_out_to_workers(kind):
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"input_ids": words()}).to_iterable_dataset(num_shards=4)
    if kind == "mapped":
        stream = stream.map(
            lambda batch: {"input_ids": [ids[::-1] for ids in batch["input_ids"]]},
            batched=True,
            batch_size=32,
        )
    if kind == "shuffled":
        stream = stream.shuffle(seed=1, buffer_size=30)
    expected = list(StreamLoader(stream_of(list(stream)), identity))
    for num_workers in (0, 2):
        batches = StreamLoader(stream_of(stream), identity, num_workers, snapshot_every=2)
        head = list(islice(batches, 11))
        state = json.loads(json.dumps(batches.state_dict()))
        assert (state["packer"]["reader"]["source"] is None) == (kind == "shuffled")
        resumed = StreamLoader(stream_of(stream), identity)
        resumed.load_state_dict(state)
        assert head + list(resumed) == expected, f"{num_workers} workers"


def test_of_equally_long_windows_the_one_that_is_delivered_leaves_the_buffer():
    "Rows of the last windows are planned at once, and the plan takes equal ones in another order than the buffer."
    documents = [[1] * 17, [2] * 14, [3] * 14, [4] * 2, [5] * 2]
    whole = [
        row["input_ids"].tolist()
        for row in PackedStream(documents, 30, pad_token_id=0, shuffle_buffer=0)
    ]
    for stop in range(1, len(whole) + 1):
        stream = PackedStream(documents, 30, pad_token_id=0, shuffle_buffer=0)
        head = [row["input_ids"].tolist() for row in islice(stream, stop)]
        resumed = PackedStream(documents, 30, pad_token_id=0, shuffle_buffer=0)
        resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        assert head + [row["input_ids"].tolist() for row in resumed] == whole, stop


def test_a_stream_without_an_end_is_packed_as_it_comes():
    def endless(epoch):
        rng = np.random.default_rng(epoch)
        while True:
            yield rng.integers(10, 99, rng.integers(1, 40))

    stream = stream_of(endless)
    rows = list(islice(stream, 500))
    assert len(rows) == 500 and stream.describe()["efficiency"] > 0.97


def test_memory_does_not_grow_with_the_stream():
    def peak(num_documents):
        source = lambda epoch: (np.full(5 + i % 30, 7) for i in range(num_documents))  # noqa: E731
        stream = stream_of(source, buffer_size=200, shuffle_buffer=100)
        for _ in zip(range(10), stream):
            pass
        tracemalloc.start()
        for _ in stream:
            pass
        return tracemalloc.get_traced_memory()[1], tracemalloc.stop()

    (small, _), (large, _) = peak(2_000), peak(20_000)
    assert large < small * 1.2 + 50_000


def test_a_document_of_a_million_tokens_waits_outside_the_buffer():
    stream = stream_of([np.arange(10, 10**6)], buffer_size=5, shuffle_buffer=0)
    next(iter(stream))
    assert len(stream.packer.buffer) <= 5
    assert stream.describe()["long_documents"] == 1


def test_a_stream_of_nothing_gives_no_rows():
    for source in ([], [[], []]):
        assert list(stream_of(source)) == []
    assert "0 rows" in stream_of([]).report()


def test_torch_and_numpy_documents_are_read():
    documents = words(20)
    expected = [plain(row) for row in stream_of(documents)]
    assert [plain(row) for row in stream_of([torch.tensor(ids) for ids in documents])] == expected
    assert [
        plain(row) for row in stream_of([{"input_ids": np.array(ids)} for ids in documents])
    ] == expected


@pytest.mark.parametrize(
    "change, words_of_the_message",
    [
        ({"source": iter([[1]])}, "list_iterator, which cannot be read again: pass a list"),
        ({"source": 3}, "source is int"),
        ({"buffer_size": 0}, "buffer_size must be 1 or more, got 0"),
        ({"shuffle_buffer": -1}, "shuffle_buffer must be 0 or more, got -1"),
        ({"block_size": 0}, "block_size must be 1 or more"),
        ({"rank": 2, "world_size": 2}, "rank must be below world_size 2, got 2"),
        ({"capacity": 2}, "room must be 1 or more, got 0"),
        ({"overlap": 46}, "overlap must be 0 or more and below 46"),
        ({"overlap": 3, "overflow": "truncate"}, "overlap is 3"),
    ],
)
def test_users_mistakes_name_the_argument(change, words_of_the_message):
    options = {"source": [[1]], "capacity": 48, **change}
    with pytest.raises(ValueError, match=words_of_the_message):
        PackedStream(**options, **SPECIAL)


@pytest.mark.parametrize(
    "document, message",
    [
        ("a text", "document 1 .*tokenize the stream"),
        ({"text": "a"}, r"no input_ids, only \['text'\]"),
        ([[1]], "shape"),
    ],
)
def test_a_document_that_is_not_tokenized_is_named(document, message):
    with pytest.raises(ValueError, match=message):
        list(stream_of([[5, 6], document]))


def test_streaming_imports_without_lightning():
    code = "import sys, bertlab.data.streaming; sys.exit('lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class Rewinding:
    "A source that, like many, stands at its beginning again once it has ended."

    def __init__(self, documents):
        self.documents, self.place = documents, 0

    def reset(self):
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]

    def __iter__(self):
        while self.place < len(self.documents):
            self.place += 1
            yield self.documents[self.place - 1]
        self.place = 0


def test_a_resume_while_the_buffer_empties_reads_nothing_twice():
    documents = [[100 + i] * 5 for i in range(40)]
    make = lambda: PackedStream(
        Rewinding(documents), 16, pad_token_id=0, buffer_size=30, shuffle_buffer=8
    )
    whole = [row["input_ids"].tolist() for row in make()]
    for stop in range(len(whole)):
        first, second = make(), make()
        rows = [row["input_ids"].tolist() for _, row in zip(range(stop), first)]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rows += [row["input_ids"].tolist() for row in second]
        assert rows == whole, stop


def test_an_epoch_begins_at_the_beginning_of_a_source_that_was_left_in_the_middle():
    documents = [[100 + i] * 5 for i in range(40)]
    source = Rewinding(documents)
    next(iter(source))
    stream = PackedStream(source, 16, pad_token_id=0, buffer_size=30, shuffle_buffer=8)
    seen = {token for row in stream for token in row["input_ids"].tolist()} - {0}
    assert seen == {100 + i for i in range(40)}


def as_earlier(state):
    "A packer's state as earlier versions wrote it: every waiting token is a number in a list."
    windows = lambda form: [
        [ids.tolist(), *ends] for ids, ends in zip(read_written_ids(form), form["ends"])
    ]  # noqa: E731
    waiting = [ids.tolist() for ids in read_written_ids(state["reader"]["waiting"])]
    reader = {**state["reader"], "waiting": waiting}
    return {
        **state,
        "reader": reader,
        "waiting": windows(state["waiting"]),
        "pending": windows(state["pending"]),
    }


@pytest.mark.parametrize("largest", [60_000, 3_000_000])
def test_a_state_of_an_earlier_version_gives_the_same_rows_and_writes_the_same_state(largest):
    lots = np.random.default_rng(0)
    documents = [lots.integers(3, largest, n).tolist() for n in lots.integers(0, 90, 200)]
    options = dict(capacity=40, overlap=4, buffer_size=20, shuffle_buffer=30)
    stream, again, earlier = (PackedStream(documents, **SPECIAL, **options) for _ in range(3))
    list(islice(stream, 50))
    state = stream.state_dict()
    again.load_state_dict(json.loads(json.dumps(state)))
    earlier.load_state_dict({**state, "packer": as_earlier(state["packer"])})
    rest = [list(islice(iter(one), 30)) for one in (again, earlier)]
    assert identity(rest[0]) == identity(rest[1]) and again.state_dict() == earlier.state_dict()


def numbers_in(state):
    several = (
        state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    )
    return sum(map(numbers_in, several)) if several else isinstance(state, int)


def test_a_state_of_many_waiting_tokens_is_small_and_quick_to_load_safely(tmp_path):
    documents = [np.full(1000, n % 50_000) for n in range(600)]
    stream = PackedStream(documents, 256, **SPECIAL)
    list(islice(stream, 10))
    state = stream.state_dict()
    assert numbers_in(state) < 10_000  # and not 600,000, each an object of its own
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    assert (tmp_path / "state.pt").stat().st_size < 2_000_000
    assert [ids.tolist() for ids in read_written_ids(write_ids([]))] == []
    assert [
        ids.tolist()
        for ids in read_written_ids(write_ids([np.array([], np.int32), np.array([70_000])]))
    ] == [[], [70_000]]
