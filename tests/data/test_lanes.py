"Lanes: rows do not depend on readers, every token comes once in a pass, and each reader reads its own files."

import json
import math
import warnings
from itertools import islice
from math import gcd
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.data.module import PretrainingDataModule, _even_lanes
from bertlab.data.streaming import LanedStream, PackedStream, StreamLoader
from bertlab.data.tokenizers import train_tokenizer
from bertlab.train.checkpoints import check_same_run, run_fingerprint
from bertlab.train.modules import PretrainingModule

SPECIAL = dict(pad_token_id=0, shuffle_buffer=3, buffer_size=5)
LANES = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=12), min_size=1, max_size=6)


class Source(list):
    "Documents that say when they are read."

    def __init__(self, documents):
        super().__init__(documents)
        self.opened = 0

    def __iter__(self):
        self.opened += 1
        return super().__iter__()


def sources(lanes: list[list[int]]) -> list[Source]:
    "Documents whose tokens are all different, from 10 on."
    first, found = 10, []
    for lengths in lanes:
        found.append(Source([]))
        for length in lengths:
            found[-1].append(np.arange(first, first + length))
            first += length
    return found


def collate(rows):
    return [(row["epoch"], row["index"], row["input_ids"].tolist()) for row in rows]


def batches(lanes, number, block, state=None, workers=0, **who):
    stream = LanedStream(lanes, 16, **SPECIAL, block_size=block, **who)
    loader = StreamLoader(stream, collate, workers, snapshot_every=2, endless=True)
    if state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return list(islice(iter(loader), number)), loader


@given(LANES, st.integers(1, 4), st.integers(1, 3), st.integers(0, 5))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_any_number_of_readers_deals_out_the_rows_of_one(lanes, world, block, seed):
    alone, _ = batches(sources(lanes), 24, block, seed=seed)
    found = [
        batches(sources(lanes), 24 // world, block, rank=rank, world_size=world, seed=seed)[0]
        for rank in range(world)
    ]
    assert [batch for turn in zip(*found) for batch in turn] == alone[: 24 // world * world]


@given(LANES, st.integers(1, 6))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_a_reader_opens_the_lanes_of_its_own_share_alone(lanes, world):
    for rank in range(world):
        own = sources(lanes)
        _, loader = batches(own, 2 * len(lanes), 1, rank=rank, world_size=world)
        share = gcd(world, len(lanes))
        assert loader.stream.share(world) == share
        assert {n for n, source in enumerate(own) if source.opened} == {
            n for n in range(len(lanes)) if n % share == rank % share
        }


@given(LANES, st.sampled_from([1, 2, 3]))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_every_token_of_a_lane_comes_once_in_a_pass_and_no_address_twice(lanes, block):
    own = sources(lanes)
    rows = [row for batch in batches(own, 150, block)[0] for row in batch]
    assert len({(epoch, index) for epoch, index, _ in rows}) == len(rows)
    for number, source in enumerate(own):
        passes = {}
        for epoch, index, ids in rows:
            if index % len(lanes) == number:
                passes.setdefault(epoch, []).extend(i for i in ids if i)
        whole = sorted(token for document in source for token in document.tolist())
        for tokens in [passes[p] for p in sorted(passes)][:-1]:
            assert sorted(tokens) == whole


@given(
    LANES,
    st.integers(1, 3),
    st.sampled_from([(1, 2), (2, 1), (2, 4), (4, 2), (3, 1), (2, 2)]),
    st.integers(1, 4),
)
@settings(deadline=None, max_examples=50, derandomize=True)
def test_a_stopped_stream_goes_on_at_another_number_of_processes(lanes, block, worlds, rounds):
    before, after = worlds
    stop = rounds * before * after  # blocks in all: a multiple of both
    alone, _ = batches(sources(lanes), stop + 12, block)
    states = []
    for rank in range(before):
        _, loader = batches(sources(lanes), stop // before, block, rank=rank, world_size=before)
        states.append(loader.state_dict())
    first = LanedStream(
        sources(lanes),
        16,
        **SPECIAL,
        block_size=block,
        world_size=before,
        gather=lambda state: states,
    )
    gathered = first.gather_states(states[0])
    for state in (
        gathered,
        states[0],
    ):  # of all processes, or of the first alone: others' lanes are read again
        found = [
            batches(sources(lanes), 12 // after, block, state, rank=rank, world_size=after)[0]
            for rank in range(after)
        ]
        assert [batch for turn in zip(*found) for batch in turn] == alone[stop : stop + 12]


def rows_of(found):
    "What processes were given, in the order of the stream."
    return [row for turn in zip(*found) for batch in turn for row in batch]


@given(
    LANES,
    st.sampled_from([(4, 1), (1, 4), (3, 2), (2, 6), (6, 4)]),
    st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)]),
)
@settings(deadline=None, max_examples=50, derandomize=True)
def test_a_stopped_stream_goes_on_in_batches_of_another_size_with_the_same_rows(
    lanes, sizes, worlds
):
    "There, and back again: then the rows of one turn lie with several processes."
    stop = math.lcm(sizes[0] * worlds[0], sizes[1] * worlds[1])  # rows in all: a multiple of both
    alone = rows_of([batches(sources(lanes), 3 * stop // sizes[0], sizes[0])[0]])
    state = None
    for stage, (size, world) in enumerate(
        [(sizes[0], worlds[0]), (sizes[1], worlds[1]), (sizes[0], worlds[0])]
    ):
        parts = [
            batches(sources(lanes), stop // size // world, size, state, rank=rank, world_size=world)
            for rank in range(world)
        ]
        assert rows_of([found for found, _ in parts]) == alone[stage * stop : (stage + 1) * stop]
        states = [loader.state_dict() for _, loader in parts]
        stream = LanedStream(
            sources(lanes),
            16,
            **SPECIAL,
            block_size=size,
            world_size=world,
            gather=lambda state: states,
        )
        state = stream.gather_states(states[0])


def test_workers_go_on_in_batches_of_another_size():
    lanes = [[3, 9, 14, 2, 7]] * 3
    alone = rows_of([batches(sources(lanes), 20, 4)[0]])
    found, loader = batches(sources(lanes), 7, 4, workers=2)
    found, later = rows_of([found]), batches(sources(lanes), 9, 2, loader.state_dict(), workers=2)
    last, _ = batches(sources(lanes), 3, 10, {**later[1].state_dict(), "delivered": 40}, workers=1)
    assert found + rows_of([later[0]]) == alone[:46] and rows_of([last]) == alone[40:70]


def test_workers_change_nothing_and_resume_in_the_middle():
    lanes = [[3, 9, 14, 2, 7]] * 4
    alone, _ = batches(sources(lanes), 20, 2)
    found, loader = batches(sources(lanes), 13, 2, workers=2)
    assert found == alone[:13]
    assert batches(sources(lanes), 7, 2, loader.state_dict(), workers=3)[0] == alone[13:]
    assert loader.describe()["rows"] > 0


def test_what_cannot_go_on_is_named():
    _, loader = batches(sources([[5], [6]]), 2, 2)
    state = loader.state_dict()
    for change, words in (
        ({"block_size": 3}, "batches of 2"),
        ({"lanes": sources([[5]] * 3)}, "num_lanes=2.* data_kwargs lanes=2"),
    ):
        options = {"lanes": sources([[5], [6]]), "block_size": 2} | change
        with pytest.raises(ValueError, match=words):
            LanedStream(capacity=16, **SPECIAL, **options).load_state_dict(state)
    one = PackedStream(sources([[5, 6]])[0], 16, **SPECIAL)
    with pytest.raises(ValueError, match="num_lanes=2, and this one has none"):
        one.load_state_dict(state)
    with pytest.raises(ValueError, match="resume with data_kwargs lanes=1"):
        LanedStream(sources([[5], [6]]), 16, **SPECIAL).load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="lanes is empty"):
        LanedStream([], 16, **SPECIAL)
    with pytest.raises(ValueError, match="lane 1 .* no document"):
        batches([Source([np.arange(3)]), Source([])], 4, 1)


def test_a_stream_of_files_is_shared_out_holds_out_and_says_what_does_not_divide(tmp_path):
    texts = [[f"file {n} says line {i} of {n * i}" for i in range(60)] for n in range(4)]
    for n, lines in enumerate(texts):
        (tmp_path / f"{n}.txt").write_text("\n".join(lines))
    tokenizer = train_tokenizer([line for lines in texts for line in lines], 300)
    make = lambda **options: PretrainingDataModule(str(tmp_path), tokenizer, streaming=True, max_sequence_length=32,  # noqa: E731
                                                   train_batch_size=2, **options)  # fmt: skip
    data = make()
    data.setup("fit")
    assert len(data.stream_lanes) == 4 and data.val_dataset.describe()["documents"] == 24
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == (2, 32)
    held = {line for lines in texts for number, line in enumerate(lines) if number % 10 == 9}
    assert not held & set(data.training_texts()) and len(data.training_texts()) == 216
    uneven = make(num_workers=3)
    uneven.setup("fit")
    with pytest.warns(UserWarning, match="4 lanes .* 3 readers .* reads 1/1"):
        uneven.train_dataloader()
    even = make(num_workers=2, data_kwargs={"lanes": 2})
    even.setup("fit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        even.train_dataloader()
    with pytest.raises(ValueError, match="lanes=9"):
        make(data_kwargs={"lanes": 9}).training_texts()


def test_processes_that_tokenize_are_refused_for_lanes_which_workers_share(tmp_path):
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text("".join(f"text {n} {i}\n" for i in range(60)))
    tokenizer = train_tokenizer(["text 0 1 2 3 4 5"], 60)
    make = lambda **options: PretrainingDataModule(
        str(tmp_path), tokenizer, streaming=True, num_shards=2, **options
    )  # noqa: E731
    with pytest.raises(ValueError, match="num_shards=2 .* in 3 lanes, .* set num_workers"):
        make().training_texts()
    with pytest.raises(ValueError, match="lanes=1 reads all files as one stream"):
        make().setup()
    one = make(data_kwargs={"lanes": 1})
    one.setup()
    assert one.stream_tokens().num_proc == 2 and sum(1 for _ in one.stream_tokens()) == 162


def test_no_lane_trains_on_a_copy_of_what_another_holds_out(tmp_path):
    texts = [[f"file {n} says line {i} of {n * i}" for i in range(60)] for n in range(3)]
    texts[1][30], texts[2][0] = texts[0][9], texts[0][19]
    tokenizer = train_tokenizer([line for lines in texts for line in lines], 300)
    for n, lines in enumerate(texts):
        (tmp_path / f"{n}.txt").write_text("\n".join(lines))
    data = PretrainingDataModule(str(tmp_path), tokenizer, streaming=True, max_sequence_length=32)
    with pytest.warns(
        UserWarning, match="2 of 18 held-out documents stand in the training text, too"
    ):
        data.setup()
    held = {tuple(ids.tolist()) for ids in data.val_dataset.documents}
    read = {tuple(ids.tolist()) for lane in data.stream_lanes for ids in data._lane_tokens(lane)}
    assert len(held) == 16 and not held & read


@pytest.mark.parametrize("sizes, lanes", [
    ([50, 50, 50], [[0], [1], [2]]),
    ([50, 1, 50, 50], [[0, 1], [2], [3]]),  # a README beside a text: not read fifty times as often
    ([50, 0, 40], [[0], [2]]),  # an empty file is no lane
    ([10, 20, 10, 10, 50], [[0, 1, 2, 3], [4]]),
    ([1000, 1, 1], []), ([9], []),  # one stream of all
    ([3] * 130, [list(range(n, 130, 64)) for n in range(64)]),
    ([50] * 6 + [10], [[0, 6], [1], [2], [3], [4], [5]]),
])  # fmt: skip
def test_lanes_are_about_equally_long_unless_their_number_was_given(tmp_path, sizes, lanes):
    for n, size in enumerate(sizes):
        (tmp_path / f"{n:03}.txt").write_text("w" * size)
    data = PretrainingDataModule(str(tmp_path), "none", streaming=True)
    assert [[int(name[-7:-4]) for name in lane] for lane in data.stream_lanes] == lanes
    if len(sizes) > 1:
        asked = PretrainingDataModule(
            str(tmp_path), "none", streaming=True, data_kwargs={"lanes": 2}
        )
        assert [len(lane) for lane in asked.stream_lanes] == [-(-len(sizes) // 2), len(sizes) // 2]


@pytest.mark.parametrize("sizes, readers, share", [
    ([50] * 15 + [10], 8, 8), ([50] * 31 + [10], 16, 16), ([50] * 63 + [10], 32, 32), ([50] * 7 + [10], 4, 4),
    ([45, 53, 61, 69, 77, 84, 92, 100], 8, 4), ([50] * 15, 15, 15), ([1000] * 8 + [1] * 100, 8, 8),
])  # fmt: skip
def test_files_of_which_the_last_is_short_are_divided_among_the_usual_numbers_of_readers(
    sizes, readers, share
):
    "Of fifteen lanes each of eight processes would read and tokenize all."

    class Sized(type(Path())):
        def stat(self):
            return SimpleNamespace(st_size=sizes[int(self.name)])

    lanes = _even_lanes([Sized(str(n)) for n in range(len(sizes))])
    assert sorted(int(file.name) for lane in lanes for file in lane) == list(range(len(sizes)))
    assert gcd(len(lanes), readers) == share
    loads = [sum(sizes[int(file.name)] for file in lane) for lane in lanes]
    assert max(loads) <= 2 * min(loads)
    assert sum(abs(load / sum(loads) - 1 / len(loads)) for load in loads) / 2 <= 0.1 or len(
        lanes
    ) == len(sizes)


def test_a_run_over_lanes_goes_on_by_their_number_and_files_and_not_by_what_was_asked_for(tmp_path):
    "An earlier run was told to resume with lanes=3, and then refused for having another data_kwargs."
    (tmp_path / "own").mkdir()
    for n in range(3):
        (tmp_path / "own" / f"{n}.txt").write_text("w" * 50)

    def facts(**options):
        made = PretrainingDataModule(
            str(tmp_path / "own"), "none", streaming=True, data_kwargs=options
        )
        return run_fingerprint(PretrainingModule(), made)

    kept = facts()
    assert kept["lanes"] == 3
    check_same_run("run.ckpt", kept, facts(lanes=3))
    older = {name: value for name, value in kept.items() if "lanes" not in name} | {
        "data_kwargs": {"lanes": None, "mix_lengths": None}
    }
    for options in ({}, {"lanes": 3}, {"lanes": 2}):  # of these the place in the stream knows
        check_same_run("run.ckpt", older, facts(**options))
    with pytest.raises(ValueError, match="lanes is 3 there and 2 here"):
        check_same_run("run.ckpt", kept, facts(lanes=2))
    (tmp_path / "own" / "2.txt").rename(tmp_path / "own" / "00.txt")
    with pytest.raises(ValueError, match="files of the lanes is"):
        check_same_run("run.ckpt", kept, facts())


def test_lanes_that_were_dealt_in_another_way_are_refused_before_a_row_is_read(
    tmp_path, monkeypatch
):
    "For a time an earlier version dealt files to any number of lanes by their sizes."
    for n in range(4):
        (tmp_path / f"{n}.txt").write_text(
            "".join(f"text {n} {i}\n" for i in range(40 if n else 20))
        )
    tokenizer = train_tokenizer(["text 0 1 2 3 4 5 6 7 8 9"], 60)
    monkeypatch.setattr(
        "bertlab.data.cache.BATCH_TEXTS", 5
    )  # places within a file come with a batch of texts
    options = dict(streaming=True, train_batch_size=1, max_sequence_length=16)

    def opened(lanes=None, **more):
        data = PretrainingDataModule(
            str(tmp_path),
            tokenizer,
            data_kwargs={"lanes": 3, "buffer_size": 2, "shuffle_buffer": 1},
            **options,
        )
        if lanes is not None:
            data.stream_lanes = [[str(tmp_path / f"{n}.txt") for n in lane] for lane in lanes]
        data.setup()
        return data.train_dataloader()

    begun = opened([[0, 1], [2], [3]])
    list(islice(iter(begun), 18))
    state = json.loads(json.dumps(begun.state_dict()))
    with pytest.raises(
        ValueError,
        match="lane 2 of 3 has other files than it had: .*stood in 2.txt .*an earlier version dealt them",
    ):
        opened().load_state_dict(state)  # which deals [0, 3], [1] and [2]
    again = opened([[0, 1], [2], [3]])
    again.load_state_dict(state)
    assert [batch["input_ids"].tolist() for batch in islice(iter(again), 9)] == [
        batch["input_ids"].tolist() for batch in islice(iter(begun), 9)
    ]


def test_a_stream_whose_lanes_are_too_short_to_hold_anything_out_says_so(tmp_path):
    for n in range(6):
        (tmp_path / f"{n}.txt").write_text("".join(f"text {n} {i}\n" for i in range(5)))
    tokenizer = train_tokenizer(["text 0 1 2 3 4 5"], 60)
    with pytest.warns(
        UserWarning, match="nothing is held out .*each lane .*set data_kwargs lanes to 1"
    ):
        PretrainingDataModule(str(tmp_path), tokenizer, streaming=True).setup()
    one = PretrainingDataModule(str(tmp_path), tokenizer, streaming=True, data_kwargs={"lanes": 1})
    one.setup()
    assert len(one.val_dataset.documents) == 3
