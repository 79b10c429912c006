"Shards hold every token once and in order, whoever wrote them; a kill costs a shard; rows are planned block by block."

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.data import shards
from bertlab.data.module import EpochBatches, PretrainingDataModule, build_packed_dataset
from bertlab.data.packing import PackedDataset, TokenizedDocuments
from bertlab.data.shards import BlockedDataset, StaleTokens, block_edges, finish_shards, load_tokens
from bertlab.data.shards import part_record, read_header, write_part
from bertlab.data.tokenizers import train_tokenizer

EDGES = dict(pad_token_id=0, cls_token_id=2, sep_token_id=3)
# Lengths of the documents of each part; a part may be empty, and so may a document.
PARTS = st.lists(st.lists(st.integers(0, 30), max_size=25), min_size=1, max_size=5)


def documents_of(parts: list[list[int]]) -> list[list[np.ndarray]]:
    "Documents whose tokens are all different: 10, 11, 12, ..."
    found, first = [], 10
    for lengths in parts:
        found.append([])
        for length in lengths:
            found[-1].append(np.arange(first, first + length, dtype=np.int32))
            first += length
    return found


def encoder(documents: list[np.ndarray], batch: int, stop_after: int | None = None):
    "What `write_part` asks for its batches; it dies after so many of them."

    def encode(first):
        for count, n in enumerate(range(first, len(documents), batch)):
            if count == stop_after:
                raise KeyboardInterrupt
            some = documents[n : n + batch]
            yield np.concatenate(some), np.array([len(d) for d in some])

    return encode


def write(directory, parts, order=None, batch=3, dtype="int32", **sizes):
    "All parts, in an order; then the manifest."
    for part in range(len(parts)) if order is None else order:
        write_part(directory, part, encoder(parts[part], batch), "key", dtype, **sizes)
    return finish_shards(directory, len(parts), "key")


SIZES = dict(shard_tokens=60, block_tokens=20)


@given(PARTS, st.randoms(use_true_random=False), st.integers(1, 9), st.integers(1, 9))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_order_and_bytes_do_not_depend_on_who_wrote_in_which_batches(
    tmp_path_factory, parts, lots, one, two
):
    first, second = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    documents, order = documents_of(parts), list(range(len(parts)))
    lots.shuffle(order)
    assert write(first, documents, batch=one, **SIZES) == write(
        second, documents, order, batch=two, **SIZES
    )
    for path in first.iterdir():
        assert (second / path.name).read_bytes() == path.read_bytes()
    stored, flat = load_tokens(first), [d.tolist() for part in documents for d in part]
    assert [d.tolist() for d in stored] == flat and len(stored) == len(flat)
    assert np.asarray(stored.tokens).tolist() == [t for d in flat for t in d]
    assert np.asarray(stored.offsets).tolist() == np.cumsum([0, *map(len, flat)]).tolist()


@given(PARTS, st.data())
@settings(deadline=None, max_examples=60, derandomize=True)
def test_reading_anywhere_is_what_one_array_gives(tmp_path_factory, parts, data):
    directory = tmp_path_factory.mktemp("read")
    documents = documents_of(parts)
    write(directory, documents, **SIZES)
    stored = pickle.loads(pickle.dumps(load_tokens(directory)))
    whole = np.concatenate([d for part in documents for d in part] or [np.empty(0, np.int32)])
    begin, end = (data.draw(st.integers(-5, len(whole) + 5)) for _ in range(2))
    assert np.array_equal(stored.tokens[begin:end], whole[begin:end])
    positions = np.array(data.draw(st.lists(st.integers(-3, len(whole) + 3), max_size=9)), np.int64)
    if len(whole):
        assert np.array_equal(stored.tokens.take(positions), whole.take(positions, mode="clip"))
        with pytest.raises(IndexError):
            stored.tokens[len(whole)]


@given(PARTS, st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=6))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_a_writer_that_dies_anywhere_costs_nothing_that_was_whole(tmp_path_factory, parts, deaths):
    whole, killed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("killed")
    documents = documents_of(parts)
    manifest = write(whole, documents, **SIZES)
    for part, batches in deaths:
        if part < len(parts):
            before = {p.name: p.stat().st_mtime_ns for p in killed.glob("*.shard")}
            try:
                write_part(killed, part, encoder(documents[part], 3, batches), "key", **SIZES)
            except KeyboardInterrupt:
                assert part_record(killed, part) is None
            after = {p.name: p.stat().st_mtime_ns for p in killed.glob("*.shard")}
            assert before.items() <= after.items(), "a whole shard was written again"
    assert write(killed, documents, **SIZES) == manifest
    assert not list(killed.glob(".*")), "temporary files are cleared away"


def test_an_unfinished_directory_is_named_and_appending_rewrites_nothing(tmp_path):
    documents = documents_of([[9] * 20, [8] * 30, [7] * 10])
    write_part(tmp_path, 0, encoder(documents[0], 4), "key", **SIZES)
    with pytest.raises(FileNotFoundError, match="not finished"):
        load_tokens(tmp_path)
    with pytest.raises(ValueError, match="1 of 2 parts .*the first is 1"):
        finish_shards(tmp_path, 2, "key")
    finish_shards(tmp_path, 1, "key")
    old = load_tokens(tmp_path)
    times = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("*.shard")}
    write(tmp_path, documents, **SIZES)
    assert {
        n: t
        for n, t in ((p.name, p.stat().st_mtime_ns) for p in tmp_path.glob("*.shard"))
        if n in times
    } == times
    assert [d.tolist() for d in old] == [d.tolist() for d in documents[0]], (
        "who reads the old manifest goes on"
    )
    assert len(load_tokens(tmp_path)) == 60


def test_a_part_of_another_key_is_written_anew(tmp_path):
    one, two = documents_of([[5] * 9])[0], documents_of([[6] * 9])[0]
    write_part(tmp_path, 0, encoder(one, 2), "monday", **SIZES)
    write_part(tmp_path, 0, encoder(two, 2), "tuesday", **SIZES)
    finish_shards(tmp_path, 1, "tuesday")
    assert [d.tolist() for d in load_tokens(tmp_path)] == [d.tolist() for d in two]
    with pytest.raises(StaleTokens, match="other text"):
        load_tokens(tmp_path, "monday")


def test_only_the_blocks_that_are_read_are_checked_and_a_bad_one_is_named(tmp_path):
    documents = documents_of([[10] * 40])
    write(tmp_path, documents, **SIZES)
    path = sorted(tmp_path.glob("*.shard"))[-1]
    data = bytearray(path.read_bytes())
    data[shards.HEADER_BYTES + 1] ^= 1
    path.write_bytes(data)
    stored = load_tokens(tmp_path)
    assert stored[0].tolist() == documents[0][0].tolist() and stored.store.checked[0].sum() == 1
    with pytest.raises(StaleTokens, match=path.name):
        stored[int(stored.store.begins[-2, 1])]
    with pytest.raises(StaleTokens, match=path.name):
        stored.verify()
    path.unlink()
    with pytest.raises(StaleTokens, match="missing"):
        load_tokens(tmp_path).verify()


def test_ids_beyond_two_bytes_are_not_cut_to_two(tmp_path):
    with pytest.raises(ValueError, match="uint16 does not hold all ids from 7 to 65543"):
        write_part(
            tmp_path,
            0,
            lambda first: iter([(np.array([7, 65_543]), np.array([2]))]),
            "key",
            "uint16",
        )


def test_ids_beyond_two_bytes_survive(tmp_path):
    ids = np.array([70_000, 5, 65_536], np.int32)
    write_part(tmp_path, 0, lambda first: iter([(ids, np.array([3]))]), "key", "int32")
    finish_shards(tmp_path, 1, "key")
    assert load_tokens(tmp_path)[0].tolist() == ids.tolist()
    assert read_header(tmp_path / "part-00000-0000.shard")["dtype"] == "int32"


# --- rows ------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=60),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_every_token_stands_in_an_epoch_once(tmp_path_factory, lengths, mixed, shuffle, packing):
    directory = tmp_path_factory.mktemp("rows")
    documents = documents_of([lengths])
    write(directory, documents, **SIZES)
    rows = BlockedDataset(
        load_tokens(directory),
        16,
        packing=packing,
        shuffle=shuffle,
        mixed_blocks=mixed,
        seed=3,
        **EDGES,
    )
    for epoch in (0, 5):
        seen, found = [], rows.build([(epoch, i) for i in range(len(rows))])
        for index, row in enumerate(found):
            seen += row["input_ids"][row["input_ids"] > 9].tolist()
            assert (row["epoch"], row["index"]) == (epoch, index)
        assert sorted(seen) == list(range(10, 10 + sum(lengths)))
    assert rows.describe()["tokens"] == sum(lengths) and rows.describe()["documents"] == len(
        lengths
    )


@given(
    st.lists(st.integers(1, 40), min_size=40, max_size=90),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 30),
)
@settings(deadline=None, max_examples=25, derandomize=True)
def test_ranks_share_out_an_epoch_and_resume_at_another_number(
    tmp_path_factory, lengths, batch, world, seed
):
    directory = tmp_path_factory.mktemp("ranks")
    write(directory, documents_of([lengths]), **SIZES)
    make = lambda: BlockedDataset(load_tokens(directory), 16, mixed_blocks=2, seed=seed, **EDGES)  # noqa: E731
    collate = lambda rows: [(row["epoch"], row["index"], row["input_ids"].tolist()) for row in rows]  # noqa: E731
    if len(make()) < batch * world * 3:
        return
    alone = [row for batch_ in EpochBatches(make(), collate, batch) for row in batch_]
    ranks = [
        list(EpochBatches(make(), collate, batch, rank=r, world_size=world)) for r in range(world)
    ]
    dealt = [row for round_ in zip(*ranks) for batch_ in round_ for row in batch_]
    assert dealt == alone[: len(dealt)] and len(alone) - len(dealt) < batch * world
    resumed = EpochBatches(make(), collate, batch, rank=0, world_size=1)
    resumed.load_state_dict({"delivered": world})  # one round of `world` ranks
    assert next(iter(resumed)) == [row for row in alone[world * batch : (world + 1) * batch]]


def test_memory_and_disk_give_the_same_rows_and_workers_too(tmp_path, monkeypatch):
    monkeypatch.setattr(block_edges, "__defaults__", (500, 10_000))
    texts = [f"document {n} " + "word " * (n % 30) for n in range(400)]
    tokenizer = train_tokenizer(texts, 300)
    ids = [np.array(i, np.int32) for i in tokenizer(texts, add_special_tokens=False).input_ids]
    write_part(tmp_path, 0, encoder(ids, 7), "key", block_tokens=500, shard_tokens=1200)
    finish_shards(tmp_path, 1, "key")
    one, two = (
        build_packed_dataset(d, tokenizer, 32)
        for d in (load_tokens(tmp_path), TokenizedDocuments.from_sequences(ids))
    )
    assert (
        isinstance(one, BlockedDataset) and isinstance(two, BlockedDataset) and len(one.counts) > 4
    )
    for key in ((0, 0), (3, len(one) - 1)):
        assert one[key]["input_ids"].tolist() == two[key]["input_ids"].tolist()
    collate = lambda rows: [row["input_ids"].tolist() for row in rows]  # noqa: E731
    assert list(EpochBatches(one, collate, 8)) == list(EpochBatches(two, collate, 8, num_workers=2))
    assert one.efficiency > 0.95 * PackedDataset(ids, 32, **EDGES).efficiency


def test_rows_counted_once_are_read_again_and_a_place_to_read_only_is_no_error(
    tmp_path, monkeypatch
):
    write(tmp_path, documents_of([[9] * 200]), **SIZES)
    first = BlockedDataset(load_tokens(tmp_path), 16, **EDGES)
    monkeypatch.setattr(shards, "count_block", lambda *a: pytest.fail("counted again"))
    assert np.array_equal(BlockedDataset(load_tokens(tmp_path), 16, **EDGES).counts, first.counts)
    monkeypatch.undo()
    monkeypatch.setattr(
        shards, "atomic_write", lambda path: (_ for _ in ()).throw(OSError("read-only"))
    )
    assert len(BlockedDataset(load_tokens(tmp_path), 24, **EDGES))


def test_a_run_trains_on_shards_and_holds_some_out(tmp_path):
    texts = [f"document {n} says hello number {n * 7}." for n in range(300)]
    tokenizer = train_tokenizer(texts, 300)
    ids = [np.array(i, np.int32) for i in tokenizer(texts, add_special_tokens=False).input_ids]
    write_part(tmp_path, 0, encoder(ids, 50), "key")
    finish_shards(tmp_path, 1, "key")
    data = PretrainingDataModule(str(tmp_path), tokenizer, max_sequence_length=32)
    data.setup("fit")
    count = lambda rows: rows.describe()["tokens"]  # noqa: E731
    assert count(data.train_dataset) + count(data.val_dataset) == sum(map(len, ids))
    assert data.val_dataset.describe()["documents"] == 30 and len(
        next(iter(data.train_dataloader()))["input_ids"]
    )
    finish_shards(tmp_path, 1, "key", {"tokenizer": "of another one"})
    with pytest.raises(ValueError, match="another tokenizer"):
        PretrainingDataModule(str(tmp_path), tokenizer).setup("fit")
    with pytest.raises(ValueError, match="no text"):
        PretrainingDataModule(str(tmp_path), "later").training_texts()


def test_small_shards_beside_another_source_keep_what_is_held_out_of_them(tmp_path):
    texts = [f"document {n} says hello number {n * 7}." for n in range(300)]
    tokenizer = train_tokenizer(texts, 300)
    for name, own in (("a", texts[:200]), ("b", texts[200:])):
        ids = [np.array(i, np.int32) for i in tokenizer(own, add_special_tokens=False).input_ids]
        write_part(tmp_path / name, 0, encoder(ids, 50), name)
        finish_shards(tmp_path / name, 1, name)
    data = PretrainingDataModule(
        [str(tmp_path / "a"), str(tmp_path / "b")], tokenizer, max_sequence_length=32
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none of them is training text
        data.setup("fit")
    assert data.val_dataset.describe()["documents"] == 30


# --- kills -----------------------------------------------------------------------------------------

WRITER = """
import sys, numpy as np
from bertlab.data.shards import write_part
def encode(first):
    for n in range(first, 4000, 10):
        numbers = np.arange(n, min(n + 10, 4000))
        lengths = numbers % 13
        yield np.repeat(numbers, lengths).astype(np.int32), lengths
for part in map(int, sys.argv[2:]):
    write_part(sys.argv[1], part, encode, "key", shard_tokens=2000, block_tokens=500)
"""


def kill_writers(directory, times: int, seed: int) -> int:
    "Two writers on four parts, killed at random points; how many died in the middle."
    lots, died = random.Random(seed), 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for attempt in range(times + 1):
        started = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(WRITER), str(directory), *parts], env=environment)
                   for parts in (("0", "2"), ("1", "3"))]  # fmt: skip
        if attempt < times:
            # Importing takes a while; the interesting time is when files appear.
            before, deadline = len(list(directory.glob("*"))), time.time() + 60
            while (
                len(list(directory.glob("*"))) == before
                and any(p.poll() is None for p in started)
                and time.time() < deadline
            ):
                time.sleep(0.001)
            time.sleep(lots.random() * 0.02)
            for process in started:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                    died += 1
        codes = [process.wait(60) for process in started]
    assert codes == [0, 0]
    return died


def check_killed(directory) -> None:
    finish_shards(directory, 4, "key")
    stored = load_tokens(directory)
    stored.verify()
    lengths = np.tile(np.arange(4000) % 13, 4)
    assert np.array_equal(np.diff(stored.offsets), lengths)
    assert np.array_equal(
        np.asarray(stored.tokens), np.repeat(np.tile(np.arange(4000), 4), lengths)
    )
    assert json.loads((directory / "manifest.json").read_text())["documents"] == 16_000


def test_three_kills_lose_nothing(tmp_path):
    assert kill_writers(tmp_path, 3, seed=0) >= 2
    check_killed(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_fifty_kills_lose_nothing(tmp_path, seed):
    kill_writers(tmp_path, 5, seed)
    check_killed(tmp_path)
