"Token ids in memory, in a cache and on disk are the same; copies of held-out documents are never trained on."

import pickle
import random
import tracemalloc
from collections import Counter

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from bertlab.data import tokens as module
from bertlab.data.diffusion import encode_pairs
from bertlab.data.packing import PackedDataset
from bertlab.data.readers import ReadOptions
from bertlab.data.tokenize import Part, read_part
from bertlab.data.collators import MaskedLanguageModelingCollator
from bertlab.data.tokenizers import tokenize_plain, train_tokenizer
from bertlab.data.tokens import (
    BatchEncoder,
    StaleTokens,
    TokenizedDocuments,
    count_documents,
    cut_to_lengths,
    finish_dataset,
    iter_blocks,
    load_tokens,
    part_record,
    serialize_tokenizer,
    split_held_out,
    tokenize_documents,
    write_part,
)

TEXTS = [f"text {n} has {n % 7} words or more of [MASK] and café" for n in range(300)]
SPECIAL = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 200)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_TOKENS", 60)
    monkeypatch.setattr(module, "BLOCK_DOCUMENTS", 20)


def make_batches(lengths, seed=0):
    "All documents as one batch, with their ids."
    lengths = np.array(lengths, dtype=np.int64)
    ids = np.random.default_rng(seed).integers(5, 60_000, lengths.sum()).astype(np.int32)
    return ids, [(ids, lengths)]


def write(directory, lengths, parts=2, **options):
    "Write the same documents as every part; the ids of one."
    ids, batches = make_batches(lengths)
    for part in range(parts):
        write_part(directory, part, batches, key=f"key {part}", **options)
    finish_dataset(directory, parts, options.get("dtype", "int32"))
    return ids


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 12), st.data())
def test_blocks_do_not_depend_on_batches(lengths, block_tokens, data):
    ids, batches = make_batches(lengths)
    expected = list(iter_blocks(batches, block_tokens))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=4)))
    starts = np.append(0, np.cumsum(lengths)).astype(int)
    parts = [(ids[starts[a] : starts[b]], np.array(lengths[a:b], np.int64))
             for a, b in zip([0, *cuts], [*cuts, len(lengths)])]  # fmt: skip
    blocks = list(iter_blocks(parts, block_tokens))
    assert len(expected) == len(blocks)
    for block, expected_block in zip(blocks, expected):
        assert all(np.array_equal(a, b) for a, b in zip(block, expected_block))
    if expected:
        assert np.array_equal(np.concatenate([block[0] for block in expected]), ids)


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_datasets_opens_what_is_written(tmp_path, small_blocks, dtype):
    lengths = np.random.default_rng(1).integers(0, 20, 100)
    ids = write(tmp_path, lengths, dtype=dtype, file_tokens=200)
    opened = datasets.load_from_disk(str(tmp_path))
    assert np.concatenate([row["input_ids"] for row in opened]).tolist() == [*ids, *ids]
    stored = load_tokens(tmp_path)
    assert stored.num_blocks > 5 and len(stored) == 200 and stored.tokens.dtype == dtype
    assert np.array_equal(stored.tokens, np.tile(ids, 2))
    assert np.array_equal(np.diff(stored.offsets), np.tile(lengths, 2))
    assert stored[101].tolist() == opened[101]["input_ids"]
    assert stored[-1].tolist() == opened[199]["input_ids"]


def test_a_part_with_another_key_is_written_again(tmp_path):
    write(tmp_path, [3, 4])
    ids, batches = make_batches([5], seed=9)
    assert part_record(tmp_path, 0, "other") is None
    write_part(tmp_path, 0, batches, "other")
    finish_dataset(tmp_path, 1)
    assert np.array_equal(load_tokens(tmp_path).tokens, ids)
    assert len(list(tmp_path.glob("data-*.arrow"))) == 1


def test_a_cut_file_is_named_when_it_is_opened(tmp_path):
    write(tmp_path, [30] * 50)
    path = next(tmp_path.glob("data-*.arrow"))
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(StaleTokens, match=str(tmp_path)):
        load_tokens(tmp_path)


def test_a_dataset_of_a_user_is_read_without_a_copy():
    dataset = datasets.Dataset.from_dict({"input_ids": [[5, 6], [], [7], [8, 9]]})
    documents = TokenizedDocuments.from_dataset(dataset)
    assert [ids.tolist() for ids in documents] == [[5, 6], [], [7], [8, 9]]
    values = dataset.data.column("input_ids").chunks[0].values.to_numpy()
    assert np.shares_memory(values, documents.tokens)
    chosen = TokenizedDocuments.from_dataset(dataset.select([3, 0]))
    assert [ids.tolist() for ids in chosen] == [[8, 9], [5, 6]]


def test_rows_are_equal_in_memory_and_on_disk(tmp_path, small_blocks):
    lengths = np.random.default_rng(2).integers(0, 30, 150)
    ids = write(tmp_path, lengths, parts=1)
    memory = TokenizedDocuments(ids, np.append(0, np.cumsum(lengths)))
    rows = [
        PackedDataset(documents, 32, **SPECIAL) for documents in (load_tokens(tmp_path), memory)
    ]
    assert len(rows[0]) == len(rows[1]) and rows[0].documents.num_blocks > 5
    for key in [(epoch, index) for epoch in range(2) for index in range(len(rows[0]))]:
        memory_row, another = (dataset[key] for dataset in rows)
        assert all(np.array_equal(memory_row[name], another[name]) for name in memory_row)
    again = PackedDataset(load_tokens(tmp_path), 32, **SPECIAL)  # from the file of counts
    assert again.describe() == rows[0].describe() and list(tmp_path.glob("counts-*.npy"))


def test_what_goes_to_a_worker_is_a_path(tmp_path):
    write(tmp_path, [50] * 2000)
    stored = split_held_out(load_tokens(tmp_path), 0.1)[0]
    data = pickle.dumps(stored)
    again = pickle.loads(data)
    assert len(data) < 50_000 and np.array_equal(again.tokens, stored.tokens)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(5, 7), max_size=3), min_size=1, max_size=40),
       st.floats(0, 0.9), st.lists(st.lists(st.integers(5, 7), max_size=3), max_size=10))  # fmt: skip
def test_no_copy_of_a_held_out_document_is_trained_on(documents, fraction, extra):
    stored = TokenizedDocuments.from_sequences(documents)
    train, held_out = split_held_out(stored, fraction)
    keys = {ids.tobytes() for ids in held_out}
    assert len(held_out) == min(int(fraction * len(stored) + 1e-6), len(keys))
    assert not keys & {ids.tobytes() for ids in train}
    assert sorted(ids.tobytes() for ids in stored if ids.tobytes() not in keys) == sorted(
        ids.tobytes() for ids in train
    )
    joined = TokenizedDocuments.concatenate([train, TokenizedDocuments.from_sequences(extra)])
    assert [ids.tolist() for ids in joined] == [ids.tolist() for ids in train] + extra


def test_joined_documents_stay_on_disk(tmp_path, small_blocks):
    ids = write(tmp_path, [5] * 30, parts=1)
    memory = TokenizedDocuments.from_sequences([[7, 8]])
    joined = TokenizedDocuments.concatenate([load_tokens(tmp_path), memory])
    assert len(joined) == 31 and np.array_equal(joined.tokens, [*ids, 7, 8])
    assert joined[30].tolist() == [7, 8]


@pytest.mark.parametrize("stored", [False, True])
def test_tokens_are_those_of_the_tokenizer(tokenizer, tmp_path, stored):
    documents = tokenize_documents(TEXTS, tokenizer, cache_dir=tmp_path if stored else None)
    expected = tokenizer(TEXTS, add_special_tokens=False, split_special_tokens=True).input_ids
    assert [ids.tolist() for ids in documents] == expected
    assert tokenizer.mask_token_id not in documents.tokens


@pytest.mark.parametrize("texts", [[], ["", " "]])
@pytest.mark.parametrize("stored", [False, True])
def test_texts_without_tokens_are_documents(tokenizer, tmp_path, texts, stored):
    documents = tokenize_documents(texts, tokenizer, cache_dir=tmp_path if stored else None)
    assert len(documents) == len(texts) and not len(documents.tokens)


def test_a_second_call_tokenizes_nothing(tokenizer, tmp_path, monkeypatch):
    first = tokenize_documents(iter(TEXTS), tokenizer, cache_dir=tmp_path)
    monkeypatch.setattr(module, "BatchEncoder", None)
    again = tokenize_documents(TEXTS, tokenizer, cache_dir=tmp_path)
    assert np.array_equal(first.tokens, again.tokens)


@pytest.mark.parametrize("change", ["text", "order", "borders", "tokenizer", "key"])
def test_another_content_is_another_file(tokenizer, tmp_path, change):
    tokenize_documents(["a b", "c"], tokenizer, cache_dir=tmp_path)
    texts = {"text": ["a b", "d"], "order": ["c", "a b"], "borders": ["a", "bc"]}
    another = train_tokenizer(TEXTS, 210) if change == "tokenizer" else tokenizer
    key = "given" if change == "key" else None
    tokenize_documents(
        texts.get(change, ["a b", "c"]), another, cache_dir=tmp_path, content_key=key
    )
    assert len(list(tmp_path.iterdir())) == 2


def test_a_killed_call_goes_on_after_its_files(tokenizer, tmp_path, small_blocks, monkeypatch):
    monkeypatch.setattr(module.write_part, "__defaults__", ("int32", 100, None))
    plain, texts = tokenize_documents(TEXTS, tokenizer), []

    def until(n):
        for text in TEXTS[:n]:
            texts.append(text)
            yield text
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "BATCH_TEXTS", 10)
    with pytest.raises(KeyboardInterrupt):
        tokenize_documents(until(200), tokenizer, cache_dir=tmp_path, content_key="key")
    (directory,) = tmp_path.iterdir()
    done = count_documents(part_record(directory, 0, is_finished=False))
    assert 150 < done <= 200 and part_record(directory, 0) is None
    calls = []
    encode = module._encode_texts

    def recording(texts, *remaining):
        calls.extend(texts)
        return encode(calls, *remaining)

    monkeypatch.setattr(module, "_encode_texts", recording)
    cached = tokenize_documents(iter(TEXTS), tokenizer, cache_dir=tmp_path, content_key="key")
    assert calls == TEXTS[done:] and np.array_equal(cached.tokens, plain.tokens)
    files = part_record(directory, 0)["files"]
    assert len(files) > 10 and max(file["tokens"] for file in files) <= 100


def test_a_damaged_cache_is_built_again(tokenizer, tmp_path):
    first = tokenize_documents(TEXTS, tokenizer, cache_dir=tmp_path).tokens.copy()
    path = next(tmp_path.glob("*/data-*.arrow"))
    data = path.read_bytes()
    path.unlink()  # the old file stays mapped
    path.write_bytes(data[:-300])
    with pytest.warns(UserWarning, match="built again"):
        again = tokenize_documents(TEXTS, tokenizer, cache_dir=tmp_path)
    assert np.array_equal(again.tokens, first)


@pytest.mark.parametrize("texts, words", [
    ("one text", ["one string"]),
    ([3], ["texts[0]", "int"]),
    (["a", None], ["texts[1]", "NoneType"]),
])  # fmt: skip
def test_what_is_no_text_is_named(tokenizer, texts, words):
    with pytest.raises(ValueError) as error:
        tokenize_documents(texts, tokenizer)
    assert all(word in str(error.value) for word in words)


def test_a_directory_that_cannot_be_written_is_named(tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cache_dir .*file"):
        tokenize_documents((1 / 0 for _ in "a"), tokenizer, cache_dir=tmp_path / "file" / "x")


@pytest.mark.parametrize("document, words", [
    ([[1, 2]], ["document 0", "flat"]),
    ([1.5], ["document 0", "float"]),
    ([-1], ["document 0"]),
])  # fmt: skip
def test_a_document_that_is_no_ids_is_named(document, words):
    with pytest.raises(ValueError) as error:
        TokenizedDocuments.from_sequences([document])
    assert all(word in str(error.value) for word in words)


def test_cutting_to_lengths_keeps_every_token_in_order():
    documents = TokenizedDocuments.from_sequences([range(12)] * 2000 + [[]])
    pieces = cut_to_lengths(documents, {3: 0.75, 12: 0.25})
    lengths = np.diff(pieces.offsets)
    assert np.array_equal(pieces.tokens, documents.tokens)
    assert set(lengths.tolist()) == {0, 3, 12} and abs((lengths == 12).sum() / 2000 - 0.25) < 0.03
    assert np.array_equal(pieces.offsets, cut_to_lengths(documents, {3: 0.75, 12: 0.25}).offsets)


def sentencepiece_form():
    "A Unigram tokenizer in XLM-R's form: special tokens are entries with score 0, and one is added that is none."
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [
        (piece, -5.0 - n / 10) for n, piece in enumerate(["▁", *"abcdeknmpsu<>/", "▁mask", "ab"])
    ] + [("<mask>", 0.0)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=3))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_tokens([AddedToken("<name>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", cls_token="<s>", sep_token="</s>",
                                   pad_token="<pad>", unk_token="<unk>", mask_token="<mask>")  # fmt: skip


def test_special_tokens_that_are_pieces_are_unknown_in_a_text():
    tokenizer = sentencepiece_form()
    texts = ["<s> ab </s>", "a<mask>b", "<pad> <unk>", "ab <name> ab z"]
    switched = tokenizer(texts, add_special_tokens=False, split_special_tokens=True).input_ids
    special = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    assert special & {id for ids in switched for id in ids}, "else there is nothing to test"
    ids, lengths = BatchEncoder(serialize_tokenizer(tokenizer))(texts)
    parts = [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]
    assert not special & {*ids.tolist()}
    plain = tokenize_plain(tokenizer, texts, add_special_tokens=False)["input_ids"]
    assert parts == plain
    assert parts[3] == tokenizer(texts[3], add_special_tokens=False).input_ids
    assert len(tokenizer) - 1 in parts[3], "an added token that is not special stays"


def test_so_they_are_in_rows_of_text_and_prompts():
    from tokenizers.processors import RobertaProcessing

    tokenizer, text = sentencepiece_form(), "ab </s> a<mask>b"
    tokenizer.backend_tokenizer.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0))
    special = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    collator = MaskedLanguageModelingCollator.from_tokenizer(tokenizer)
    ids = collator.encode([text])[0]["input_ids"]
    assert not special & {*ids[1:-1]} and tokenizer.decode(ids[1:-1]) == "ab <unk> a<unk>b"
    assert [ids[0], ids[-1]] == [tokenizer.cls_token_id, tokenizer.sep_token_id]
    (pair,), (length,) = encode_pairs(tokenizer, ["ab <s> e"], [text], max_ends=1)
    assert tokenizer.decode(pair[: length - 1]) == "ab <unk> a<unk>b"
    assert tokenizer.decode(pair[length:-1]) == "ab <unk> e"


@pytest.mark.parametrize("model", ["WordLevel", "WordPiece", "BPE"])
def test_special_tokens_that_are_words_are_unknown_in_a_text(model):
    "Tokenizers that cut at spaces and look whole words up."
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    roles = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "mask")}
    vocabulary = {word: n for n, word in enumerate([*roles.values(), "cat", "?"])}
    options = {"merges": [], "ignore_merges": True} if model == "BPE" else {"unk_token": "[UNK]"}
    backend = Tokenizer(getattr(models, model)(vocabulary, **options))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **roles)
    encoder = BatchEncoder(serialize_tokenizer(tokenizer))
    for ids in (
        encoder(["cat [MASK] [PAD]"])[0],
        tokenize_plain(tokenizer, "cat [MASK] [PAD]").input_ids,
    ):
        assert list(ids)[0] == 3 and not {0, 2} & {*map(int, ids)} and len(ids) == 3


def test_a_text_is_not_cut_where_tokens_cross_spaces():
    from tokenizers import Tokenizer, models, trainers

    backend = Tokenizer(models.BPE(unk_token="?"))  # no words: merges cross spaces
    text = " ".join(random.Random(0).choices(["ab", "cd", "abcd", "the"], k=60_000))
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=["?"], show_progress=False)
    backend.train_from_iterator([text[:5000]], trainer)
    assert any(" " in piece.strip() for piece in backend.get_vocab())
    encoder = BatchEncoder(backend.to_str())
    assert encoder([text])[0].tolist() == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe", "unigram"])
def test_a_long_line_is_encoded_in_pieces_with_its_own_ids(algorithm, monkeypatch):
    words = "a cat, sleeps on the (river) at 12 ".split(" ")
    draw = random.Random(0)
    text = " ".join(draw.choices([*words, "  \n", "naïve"], k=200_000)) + "\nthe end"
    tokenizer = train_tokenizer([text[:5000]], 300, kind=algorithm)
    encoder, sizes = BatchEncoder(serialize_tokenizer(tokenizer)), []
    expected = encoder.backend.encode(text, add_special_tokens=False).ids
    backend = encoder.backend

    class Watched:
        def encode_batch_fast(self, texts, **options):
            sizes.append(sum(map(len, texts)))
            return backend.encode_batch_fast(texts, **options)

    encoder.backend = Watched()
    ids, lengths = encoder(["a cat", text, "", "on"])
    start = int(lengths[0])
    assert ids[start : start + lengths[1]].tolist() == expected and sum(lengths) == len(ids)
    assert list(lengths[[0, 2, 3]]) == [len(encoder(["a cat"])[0]), 0, len(encoder(["on"])[0])]
    assert max(sizes) < 5 * 2**17 < len(text)


def test_a_long_line_costs_its_bytes_its_text_and_no_more(tmp_path):
    backend = Tokenizer(WordLevel({"[UNK]": 0, "word": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = WhitespaceSplit()
    encoder, peaks = BatchEncoder(backend.to_str()), {}
    for size in (150_000, 350_000):  # words, of 5 bytes
        path = tmp_path / f"{size}.txt"
        path.write_text("word " * size + "\n")
        tracemalloc.start()
        (text,) = read_part(Part((str(path),), stamps=(1,)), ReadOptions(), Counter())
        read = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        ids, _ = encoder([text])
        peaks[size] = read, tracemalloc.get_traced_memory()[1] - len(text)
        tracemalloc.stop()
        assert len(ids) == size
    reading, encoding = (np.subtract(peaks[350_000], peaks[150_000]) / 200_000).tolist()
    assert reading < 10.5 and encoding < 3  # bytes for a word
