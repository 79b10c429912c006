"Streams: rows do not depend on who reads them, each token comes once in a pass, and a stop loses nothing."

import json
from itertools import islice

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from bertlab.data.collators import MaskedLanguageModelingCollator
from bertlab.data.loaders import StreamLoader
from bertlab.data.packing import PackedDataset
from bertlab.data.sources import TextStream
from bertlab.data.streaming import PackedStream, has_exact_state, split_into_shards
from bertlab.data.tokenizers import train_tokenizer

SPECIAL = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}


def make_documents(count, seed=0, longest=40):
    "Ids that each come once."
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest, count)
    return np.split(np.arange(lengths.sum()) + 10 + 10**6 * seed, np.cumsum(lengths)[:-1])


def make_stream(num_shards=2, **options):
    shards = [make_documents(60 + 20 * n, seed=n) for n in range(num_shards)]
    return PackedStream(shards, 32, **{**SPECIAL, "buffer_size": 300, **options})


def make_loader(num_workers=0, num_shards=2, **options):
    return StreamLoader(make_stream(num_shards, **options), keys_and_ids, num_workers)


def keys_and_ids(rows):
    return [(row["epoch"], row["index"], row["input_ids"].tolist()) for row in rows]


def take(loader, count):
    return list(islice(iter(loader), count))


def copied(state):
    return json.loads(json.dumps(state))


@settings(deadline=None, max_examples=25)
@given(st.sampled_from([1, 3, 5]), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_processes_share_out_the_rows_of_one(num_shards, world_size, batch_size):
    alone = [batch for batch in take(make_loader(0, num_shards, batch_size=batch_size), 24)]
    for rank in range(world_size):
        loader = make_loader(0, num_shards, batch_size=batch_size, rank=rank, world_size=world_size)
        assert take(loader, 24 // world_size) == alone[rank::world_size]


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_change_nothing_and_resume(num_shards, num_workers):
    expected = take(make_loader(0, num_shards, batch_size=2), 40)
    loader = make_loader(num_workers, num_shards, batch_size=2)
    batches = iter(loader)
    assert [next(batches) for _ in range(23)] == expected[:23]
    state = copied(loader.state_dict())
    for another in (0, 2):
        again = make_loader(another, num_shards, batch_size=2)
        again.load_state_dict(state)
        assert take(again, 17) == expected[23:]


@settings(deadline=None, max_examples=25)
@given(st.sampled_from([1, 2, 3]), st.lists(st.integers(0, 25), min_size=1, max_size=3),
       st.booleans(), st.sampled_from([100, 700, 10**6]))  # fmt: skip
def test_a_stream_that_is_stopped_anywhere_goes_on(num_shards, stops, shuffle, buffer_size):
    options = {"shuffle": shuffle, "buffer_size": buffer_size, "batch_size": 2}
    expected = take(make_loader(0, num_shards, **options), sum(stops) + 10)
    loader, seen = make_loader(0, num_shards, **options), []
    for stop in stops:
        seen += take(loader, stop)
        state = copied(loader.state_dict())
        loader = make_loader(0, num_shards, **options)
        loader.load_state_dict(state)
    assert seen + take(loader, 10) == expected


@pytest.mark.parametrize("buffer_size", [100, 10**6])
def test_each_token_comes_once_in_a_pass(buffer_size):
    stream = make_stream(2, buffer_size=buffer_size)
    passes, addresses = {}, set()
    for row in islice(stream, 400):
        shard = row["index"] % 2
        ids = row["input_ids"][row["input_ids"] >= 10]
        passes.setdefault((shard, row["epoch"]), []).extend(ids.tolist())
        addresses.add((row["epoch"], row["index"]))
    assert len(addresses) == 400
    for shard in range(2):
        tokens = np.concatenate(stream.shards[shard]).tolist()
        last = max(epoch for another, epoch in passes if another == shard)
        assert last >= 2
        for epoch in range(last):
            assert sorted(passes[shard, epoch]) == tokens
    assert passes[0, 0] != passes[0, 1]


def test_another_number_of_processes_and_batches_goes_on():
    expected = take(make_loader(0, 3, batch_size=2), 60)
    loaders = [make_loader(0, 3, batch_size=2, rank=rank, world_size=2) for rank in range(2)]
    for loader in loaders:
        take(loader, 9)
    loaders[0].gather = lambda state: [loader.stream.state_dict() for loader in loaders]
    state = copied(loaders[0].state_dict())
    four = make_loader(0, 3, batch_size=4, rank=0, world_size=1)
    four.load_state_dict(state)
    rows = [row for batch in take(four, 8) for row in batch]
    assert rows == [row for batch in expected[18:34] for row in batch]
    with pytest.raises(ValueError, match="world_size=2 and batches of 2"):
        make_loader(0, 3, batch_size=5).load_state_dict(state)
    with pytest.raises(ValueError, match="num_shards=3"):
        make_loader(0, 2, batch_size=2).load_state_dict(state)


@pytest.mark.parametrize("num_shards, world_size", [(4, 2), (6, 3), (3, 2)])
def test_a_reader_opens_the_shards_of_its_share_alone(num_shards, world_size):
    opened = set()

    def source(count):
        return lambda epoch: (opened.add(count), iter(make_documents(50, count)))[1]

    stream = PackedStream([source(n) for n in range(num_shards)], 32, **SPECIAL, world_size=world_size,
                          rank=1)  # fmt: skip
    list(islice(stream, 100))
    assert len(opened) == num_shards // stream.share(world_size)


def test_mixtures_keep_their_shares_and_resume():
    mixture = {"mixture": [(0.7, 1), (0.3, 2)], "batch_size": 2}
    loader = make_loader(0, 3, **mixture)
    batches = take(loader, 500)
    shards = [index % 3 for batch in batches for _, index, _ in batch]
    assert np.bincount(shards).tolist() == [700, 150, 150]
    again = make_loader(0, 3, **mixture)
    again.load_state_dict(copied(loader.state_dict()))
    assert take(again, 20) == take(make_loader(0, 3, **mixture), 520)[500:]


@pytest.mark.parametrize("source_type", ["list", "function", "text", "plain", "mapped", "shuffled",
                                  "concatenated", "interleaved", "in memory"])  # fmt: skip
def test_every_kind_of_source_resumes(tmp_path, source_type):
    words = [f"w{n}" for n in range(200)]
    documents = [[5 + n] * (1 + n % 9) for n in range(200)]
    texts = [" ".join([word] * (1 + n % 9)) for n, word in enumerate(words)]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    tokenizer = train_tokenizer(texts, 600) if source_type == "text" else None
    plain = datasets.Dataset.from_dict({"input_ids": documents})
    streamed = plain.to_iterable_dataset(num_shards=4)

    def make():
        source = {
            "list": lambda: documents,
            "function": lambda: lambda epoch: iter(documents[epoch:]),
            "text": lambda: TextStream(str(tmp_path / "a.txt"), sample_by="line"),
            "plain": lambda: streamed,
            "mapped": lambda: streamed.map(lambda row: {"input_ids": row["input_ids"] + [4]}),
            "shuffled": lambda: streamed.shuffle(seed=3, buffer_size=17),
            "concatenated": lambda: datasets.concatenate_datasets(
                [streamed, streamed.shuffle(seed=3, buffer_size=17)]
            ),
            "interleaved": lambda: datasets.interleave_datasets([streamed, streamed.skip(20)]),
            "in memory": lambda: plain,
        }[source_type]()
        stream = PackedStream(
            [source], 32, **SPECIAL, tokenizer=tokenizer, buffer_size=150, batch_size=2
        )
        return StreamLoader(stream, keys_and_ids)

    expected = take(make(), 60)
    assert expected[-1][0][0] >= 1
    for stop in (1, 13, 31, 44):
        loader = make()
        take(loader, stop)
        again = make()
        again.load_state_dict(copied(loader.state_dict()))
        assert take(again, 60 - stop) == expected[stop:]


@pytest.mark.parametrize("source_type", ["text", "plain", "mapped", "in memory"])
def test_two_readers_of_one_source_do_not_disturb_each_other(tmp_path, source_type):
    documents = [[5 + n] * (1 + n % 9) for n in range(200)]
    path = tmp_path / "a.txt"
    path.write_text("\n".join(f"w{n} " * (1 + n % 9) for n in range(200)))
    plain = datasets.Dataset.from_dict({"input_ids": documents})
    streamed = plain.to_iterable_dataset(num_shards=4)
    source = {
        "text": lambda: TextStream(str(path), sample_by="line"),
        "plain": lambda: streamed,
        "mapped": lambda: streamed.map(lambda row: {"input_ids": row["input_ids"] + [4]}),
        "in memory": lambda: plain,
    }[source_type]()
    tokenizer = train_tokenizer(path.read_text().splitlines(), 600)

    def make():
        options = {"tokenizer": tokenizer, "buffer_size": 150, "batch_size": 2}
        return StreamLoader(PackedStream([source], 32, **SPECIAL, **options), keys_and_ids)

    expected = take(make(), 60)
    stopped = make()
    first = iter(stopped)
    assert [next(first) for _ in range(13)] == expected[:13]
    resumed = make()
    resumed.load_state_dict(copied(stopped.state_dict()))
    second = iter(resumed)
    for batch in expected[13:53]:
        assert next(first) == next(second) == batch
    for reader in (stopped, resumed):
        again = make()
        again.load_state_dict(copied(reader.state_dict()))
        assert take(again, 7) == expected[53:]


def test_a_shuffle_buffer_has_no_exact_state():
    plain = datasets.Dataset.from_dict({"input_ids": [[5]] * 20}).to_iterable_dataset()
    shuffled = plain.shuffle(buffer_size=5)
    has_state = Version(datasets.__version__) >= Version("4.8")  # before, it is of another row
    assert has_exact_state(plain) == has_exact_state(plain.map(lambda row: row)) == has_state
    for source in (shuffled, shuffled.map(lambda row: row), datasets.concatenate_datasets([plain, shuffled]),
                   datasets.interleave_datasets([plain, shuffled]), [1, 2]):  # fmt: skip
        assert not has_exact_state(source)


def test_rows_are_as_full_as_a_plan():
    documents = [
        np.zeros(n, int) for n in np.random.default_rng(0).lognormal(4.4, 1, 4000).astype(int) + 1
    ]
    stream = PackedStream([documents], 512, **SPECIAL, buffer_size=250_000)
    rows = [row for row in islice(stream, 700) if not row["epoch"]]
    filled = np.mean([np.mean(row["attention_mask"] > 0) for row in rows])
    assert filled > 0.995 and PackedDataset(documents, 512, **SPECIAL).efficiency > 0.995


def test_a_collator_takes_the_rows():
    collator = MaskedLanguageModelingCollator(0, 3, 10**7, special_token_ids=[1, 2])
    batch = next(iter(StreamLoader(make_stream(batch_size=4), collator, 1)))
    assert batch["input_ids"].shape == (4, 32) and batch["labels"].dtype == torch.int64


def test_held_out_texts_are_passed_over():
    from bertlab.data.documents import stable_hash

    texts = [f"text number {n}" for n in range(50)] * 2
    tokenizer = train_tokenizer(texts, 200)
    held_out = frozenset(map(stable_hash, texts[:10]))
    stream = PackedStream([texts], 32, **SPECIAL, tokenizer=tokenizer, held_out=held_out)
    rows = [row for row in islice(stream, 200) if row["epoch"] == 0]
    documents = sum(int(row["attention_mask"].max()) for row in rows)
    assert documents == 80


@pytest.mark.parametrize("sizes, count", [
    ([100] * 8, 8),
    ([100] * 100, 64),
    ([1000, 10, 10], 1),
    ([100, 60, 60, 100], 4),
    ([300, 100, 100, 100], 2),
])  # fmt: skip
def test_shards_are_about_equally_large(tmp_path, sizes, count):
    files = [tmp_path / f"{n:03}.txt" for n in range(len(sizes))]
    for file, size in zip(files, sizes):
        file.write_text("a" * size)
    shards = split_into_shards(files)
    assert len(shards) == count and sorted(file for shard in shards for file in shard) == files
    assert len(split_into_shards(files, 2)) == 2
    with pytest.raises(ValueError, match="num_shards=101"):
        split_into_shards(files, 101)


@pytest.mark.parametrize("change, words", [
    ({"shards": [iter([[5]])]}, ["shards", "read again"]),
])  # fmt: skip
def test_streams_that_cannot_be_are_named(change, words):
    with pytest.raises(ValueError) as error:
        PackedStream(**{"shards": [[[5]]], "capacity": 8, **SPECIAL, **change})
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("document, words", [
    ("some text", ["tokenizer"]),
    ([0.5], ["document 1", "float"]),
    ([], ["shard 0", "no document"]),
])  # fmt: skip
def test_documents_that_cannot_be_are_named(document, words):
    with pytest.raises(ValueError) as error:
        next(iter(PackedStream([[document]], 8, **SPECIAL)))
    assert all(word in str(error.value) for word in words)
