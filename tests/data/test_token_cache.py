"Tokens are found again only for the same texts and tokenizer; a cut or changed file is built anew; errors come early."

import errno
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.data import cache as token_cache
from bertlab.data.diffusion import encode_pairs
from bertlab.data.rows import encode_rows
from bertlab.data.supervised import SequenceClassificationCollator
from bertlab.data.tokenizers import hide_special_pieces, tokenize_plain, train_tokenizer
from bertlab.data.packing import PackedDataset
from bertlab.data.cache import (
    BatchEncoder,
    check_cache_directory,
    encode_batches,
    hash_tokenizer,
    serialize_tokenizer,
)
from bertlab.data.cache import text_batches, tokenize_documents
from bertlab.data.shards import CacheError, StaleTokens, load_tokens

TEXTS = [f"Document {i} says [MASK] and {'more ' * (i % 7)}[SEP], {i}." for i in range(50)] + [
    "",
    "Ünï ☃",
    " ",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 3, 300)


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(token_cache, "BATCH_TEXTS", 4)


def expected(tokenizer, texts) -> list[list[int]]:
    "What transformers itself gives."
    return tokenizer(texts, add_special_tokens=False, split_special_tokens=True).input_ids


def rows(documents) -> list[list[int]]:
    return [document.tolist() for document in documents]


def file_of(directory: Path) -> Path:
    (path,) = directory.glob("*.tokens/*.shard")
    return path


@pytest.mark.parametrize("num_proc", [1, 3])
@pytest.mark.parametrize("stored", [False, True])
def test_tokens_are_those_of_the_tokenizer_and_marks_in_texts_are_words(
    tokenizer, tmp_path, small_batches, num_proc, stored
):
    cache_dir = tmp_path / "deep" / "cache" if stored else None
    documents = tokenize_documents(TEXTS, tokenizer, cache_dir=cache_dir, num_proc=num_proc)
    assert rows(documents) == expected(tokenizer, TEXTS)
    assert not set(tokenizer.all_special_ids) - {tokenizer.unk_token_id} & set(
        np.asarray(documents.tokens).tolist()
    )
    assert documents.offsets.dtype == np.int64


@pytest.mark.parametrize("texts", [[], ["", " "]])
def test_nothing_to_tokenize_is_no_error(tokenizer, tmp_path, texts):
    for cache_dir in (None, tmp_path, tmp_path):
        documents = tokenize_documents(texts, tokenizer, cache_dir=cache_dir)
        assert rows(documents) == [[] for _ in texts]


def test_ids_get_two_bytes_where_they_fit_and_four_where_not(tokenizer, tmp_path):
    assert tokenize_documents(["a"], tokenizer, cache_dir=tmp_path).tokens.dtype == np.uint16
    large = pickle.loads(pickle.dumps(tokenizer))
    large.add_tokens([f"word{i}" for i in range(2**16)])
    documents = tokenize_documents(["word65535"], large, cache_dir=tmp_path)
    assert documents.tokens.dtype == np.int32
    assert (
        rows(documents) == [[large.convert_tokens_to_ids("word65535")]]
        and documents.tokens[0] > 2**16
    )


def test_a_hit_reads_the_file_and_tokenizes_nothing(tokenizer, tmp_path, monkeypatch):
    first = tokenize_documents(TEXTS, tokenizer, cache_dir=tmp_path)
    monkeypatch.setattr(token_cache, "encode_batches", lambda *a: pytest.fail("tokenized again"))
    for texts in (TEXTS, tuple(TEXTS), iter(TEXTS), (text for text in TEXTS)):
        again = tokenize_documents(texts, tokenizer, cache_dir=tmp_path)
        assert again.path == first.path and rows(again) == rows(first)


@pytest.mark.parametrize(
    "texts", [TEXTS[:-1], TEXTS[::-1], [*TEXTS, ""], [TEXTS[0] + TEXTS[1], "", *TEXTS[2:]]]
)
def test_other_texts_another_order_or_other_borders_are_another_file(tokenizer, tmp_path, texts):
    first = tokenize_documents(TEXTS, tokenizer, cache_dir=tmp_path)
    second = tokenize_documents(texts, tokenizer, cache_dir=tmp_path)
    assert first.path != second.path and rows(second) == expected(tokenizer, texts)


def changed_tokenizers(tokenizer) -> dict:
    copy = lambda: pickle.loads(pickle.dumps(tokenizer))  # noqa: E731
    changed = {
        "vocabulary": train_tokenizer(TEXTS[:20], 300),
        "case": train_tokenizer(TEXTS * 3, 300, lowercase=False),
    }
    changed["added token"] = copy()
    changed["added token"].add_tokens(["says"])
    changed["special token"] = copy()
    changed["special token"].add_special_tokens({"mask_token": "[HIDE]"})
    changed["words"] = copy()
    from tokenizers import pre_tokenizers

    changed["words"].backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return changed


def test_a_changed_tokenizer_never_reads_a_stale_cache(tokenizer, tmp_path):
    first = tokenize_documents(TEXTS, tokenizer, cache_dir=tmp_path)
    keys = {hash_tokenizer(tokenizer)}
    for what, other in changed_tokenizers(tokenizer).items():
        keys.add(hash_tokenizer(other))
        documents = tokenize_documents(TEXTS, other, cache_dir=tmp_path)
        assert documents.path != first.path, what
        assert rows(documents) == expected(other, TEXTS), what
    assert len(keys) == 6


def test_what_a_call_leaves_behind_in_a_tokenizer_changes_neither_key_nor_tokens(
    tokenizer, tmp_path
):
    used = pickle.loads(pickle.dumps(tokenizer))
    used(TEXTS, truncation=True, max_length=3, padding="max_length")
    assert hash_tokenizer(used) == hash_tokenizer(tokenizer)
    assert rows(tokenize_documents(TEXTS, used)) == expected(tokenizer, TEXTS)


def test_a_key_of_the_caller_saves_reading_and_keeps_tokenizers_apart(tokenizer, tmp_path):
    first = tokenize_documents(
        iter(TEXTS), tokenizer, cache_dir=tmp_path, content_key="files of today"
    )

    def unread():
        pytest.fail("read")
        yield

    again = tokenize_documents(
        unread(), tokenizer, cache_dir=tmp_path, content_key="files of today"
    )
    assert again.path == first.path
    assert (
        tokenize_documents(TEXTS[:2], tokenizer, cache_dir=tmp_path, content_key="of tomorrow").path
        != first.path
    )
    other = changed_tokenizers(tokenizer)["case"]
    assert (
        tokenize_documents(TEXTS, other, cache_dir=tmp_path, content_key="files of today").path
        != first.path
    )


DAMAGE = {
    "empty": lambda data: b"",
    "header cut": lambda data: data[:100],
    "half": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\0",
    "magic": lambda data: b"x" + data[1:],
    "header": lambda data: data.replace(b"uint16", b"uint15"),
    "token": lambda data: data[:520] + bytes([data[520] ^ 1]) + data[521:],
    "offset": lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
    "text": lambda data: b"something else",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_cut_or_changed_file_is_noticed_and_built_anew_with_a_warning(
    tokenizer, tmp_path, damage
):
    tokenize_documents(TEXTS, tokenizer, cache_dir=tmp_path)
    path = file_of(tmp_path)
    data = path.read_bytes()
    assert damage(data) != data
    path.write_bytes(damage(data))
    with pytest.raises(StaleTokens, match=path.name):
        load_tokens(path.parent).verify()
    with pytest.warns(UserWarning, match="built anew"):
        documents = tokenize_documents(TEXTS, tokenizer, cache_dir=tmp_path)
    assert rows(documents) == expected(tokenizer, TEXTS) and path.read_bytes() == data


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_no_single_changed_byte_goes_unnoticed(tokenizer, tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("bytes")
    place = tokenize_documents(TEXTS[:5], tokenizer, cache_dir=directory, num_proc=1).path
    read = ["manifest.json", "part-00000-0000.shard", *(p.name for p in place.glob("blocks-*"))]
    path = place / data.draw(st.sampled_from(read))
    whole = bytearray(path.read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    before = path.read_bytes()
    path.write_bytes(whole)
    try:
        opened = load_tokens(place)
        opened.verify()
    except StaleTokens:
        return
    # White space of the manifest carries nothing; padding neither.
    assert (
        path.suffix != ".npy" and rows(opened) == expected(tokenizer, TEXTS[:5]) and before != whole
    )


def test_a_file_under_the_name_of_another_is_not_taken_for_it(tokenizer, tmp_path):
    one = tokenize_documents(TEXTS[:3], tokenizer, cache_dir=tmp_path / "a")
    two = tokenize_documents(TEXTS, tokenizer, cache_dir=tmp_path / "b")
    shutil.copytree(one.path, two.path, dirs_exist_ok=True)
    with pytest.warns(UserWarning, match="other text"):
        assert len(tokenize_documents(TEXTS, tokenizer, cache_dir=tmp_path / "b")) == len(TEXTS)


def test_stored_documents_are_packed_and_travel_to_a_worker_as_a_path(tokenizer, tmp_path):
    documents = tokenize_documents(TEXTS * 20, tokenizer, cache_dir=tmp_path)
    assert isinstance(documents.tokens[3:5].base, np.memmap)
    sent = pickle.dumps(documents)
    assert len(sent) < 2000 and rows(pickle.loads(sent)) == rows(documents)
    packed = PackedDataset(documents, 64, pad_token_id=0, cls_token_id=2, sep_token_id=3)
    assert (
        pickle.loads(pickle.dumps(packed))[3]["input_ids"].tolist()
        == packed[3]["input_ids"].tolist()
    )


# --- the directory --------------------------------------------------------------------------------


def lazily(texts):
    "Texts, and what was read of them."
    seen = []
    return (seen.append(text) or text for text in texts), seen


def test_a_directory_that_cannot_be_written_is_refused_before_a_text_is_read(tokenizer, tmp_path):
    (tmp_path / "file").write_text("no directory")
    texts, seen = lazily(TEXTS)
    with pytest.raises(CacheError) as error:
        tokenize_documents(texts, tokenizer, cache_dir=tmp_path / "file" / "cache")
    assert isinstance(error.value, ValueError) and isinstance(error.value, OSError)
    assert (
        "cache_dir" in str(error.value)
        and str(tmp_path) in str(error.value)
        and "\n" not in str(error.value)
    )
    assert not seen


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user"
)
def test_a_directory_without_permission_is_refused_for_a_user_who_is_not_root(tmp_path):
    (tmp_path / "cache").mkdir(mode=0o755)
    code = """
    import sys
    from bertlab.data.cache import CacheError, check_cache_directory
    import os
    os.setuid(65534)
    try: check_cache_directory("cache")
    except CacheError as error: print(error)
    """
    code = textwrap.dedent(code)
    tmp_path.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert "cache_dir cache cannot be written (Permission denied)" in done.stdout, done.stderr


def test_too_little_space_is_refused_before_anything_is_tokenized(tokenizer, tmp_path, monkeypatch):
    full = type("usage", (), {"free": 100})
    monkeypatch.setattr(token_cache.shutil, "disk_usage", lambda directory: full)
    monkeypatch.setattr(token_cache, "encode_batches", lambda *a: pytest.fail("tokenized"))
    with pytest.raises(CacheError, match="free some, or choose another"):
        tokenize_documents(TEXTS, tokenizer, cache_dir=tmp_path)
    check_cache_directory(tmp_path, 100)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_while_writing_is_named_and_leaves_nothing_behind(
    tokenizer, tmp_path, monkeypatch
):
    def encode_batches(*arguments):
        yield np.zeros(4, np.int32), np.array([4])
        raise OSError(errno.ENOSPC, "No space left on device")  # as a write would

    monkeypatch.setattr(token_cache, "encode_batches", encode_batches)
    with pytest.raises(CacheError, match="has no space left") as error:
        tokenize_documents(TEXTS, tokenizer, cache_dir=tmp_path)
    assert str(tmp_path) in str(error.value) and not list(tmp_path.iterdir())


def test_a_build_that_fails_leaves_neither_a_cache_nor_a_temporary_file(tokenizer, tmp_path):
    def broken():
        yield from TEXTS
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError):
        tokenize_documents(broken(), tokenizer, cache_dir=tmp_path, content_key="x")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_cleared_away_when_it_is_old(tokenizer, tmp_path):
    path = tokenize_documents(TEXTS, tokenizer, cache_dir=tmp_path).path
    old, new = (path / f".part-00000-0000.shard.{n}.tmp" for n in (1, 2))
    for left in (old, new):
        left.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    (path / "manifest.json").unlink()
    tokenize_documents(TEXTS, tokenizer, cache_dir=tmp_path)
    assert not old.exists() and new.exists()


def test_processes_that_build_at_once_both_get_whole_tokens(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    code = f"""
    from bertlab.data.tokenizers import load_tokenizer
    from bertlab.data.cache import tokenize_documents
    import numpy as np
    tokenizer = load_tokenizer({str(tmp_path / "tokenizer")!r})
    texts = [f"Document {{i}} of many, many." for i in range(3000)]
    for round in range(6):
        documents = tokenize_documents(texts[: 3000 - round], tokenizer, cache_dir="cache", num_proc=1)
        assert len(documents) == 3000 - round and np.asarray(documents.tokens).sum() > 0
    print(documents.path.name, int(np.asarray(documents.tokens).sum()))
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = {process.communicate(timeout=120)[0] for process in started}
    assert len(outputs) == 1 and all(process.returncode == 0 for process in started)
    assert (
        len(list((tmp_path / "cache").glob("*.tokens")))
        == 6
        == len(list((tmp_path / "cache").iterdir()))
    )


def test_of_processes_that_want_the_same_tokens_one_makes_them_and_the_others_wait(
    tmp_path, tokenizer
):
    "So do the processes of a run, of which each asks for its tokens."
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    code = f"""
    import sys, time
    from pathlib import Path
    from bertlab.data import cache
    from bertlab.data.tokenizers import load_tokenizer
    encode = cache.encode_batches
    def slowly(*arguments):
        Path(f"made-{{sys.argv[1]}}").touch()
        time.sleep(1)
        yield from encode(*arguments)
    cache.encode_batches = slowly
    tokenizer = load_tokenizer({str(tmp_path / "tokenizer")!r})
    Path(f"ready-{{sys.argv[1]}}").touch()
    while len(list(Path().glob("ready-*"))) < 2:
        time.sleep(0.01)
    documents = cache.tokenize_documents(["some words"] * 50, tokenizer, cache_dir="cache", num_proc=1)
    print(len(documents), len(documents.tokens))
    """
    command, environment = (
        [sys.executable, "-c", textwrap.dedent(code)],
        {**os.environ, "PYTHONPATH": str(ROOT)},
    )
    started = [
        subprocess.Popen(
            [*command, str(n)], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )
        for n in range(2)
    ]
    outputs = {process.communicate(timeout=120)[0] for process in started}
    assert (
        len(outputs) == 1
        and outputs.pop().startswith("50 ")
        and all(process.returncode == 0 for process in started)
    )
    assert len(list(tmp_path.glob("made-*"))) == 1 == len(list((tmp_path / "cache").iterdir()))


@pytest.mark.parametrize("said, alone, together", [
    ({}, 8, 8), ({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, 8, 2), ({"WORLD_SIZE": "4"}, 8, 8),
    ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, 8, 4), ({"LOCAL_WORLD_SIZE": "16"}, 8, 1),
])  # fmt: skip
def test_processes_that_all_tokenize_share_the_cores_and_who_works_for_all_takes_them(
    tokenizer, tmp_path, monkeypatch, said, alone, together
):
    asked = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(
        token_cache,
        "encode_batches",
        lambda batches, encoder, num_proc: asked.append(num_proc) or map(encoder, batches),
    )
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    tokenize_documents(TEXTS, tokenizer)
    tokenize_documents(TEXTS, tokenizer, cache_dir=tmp_path)
    assert asked == [together, alone]


def test_where_processes_are_spawned_only_who_asks_for_some_gets_them(tokenizer, monkeypatch):
    asked = []
    monkeypatch.setattr(token_cache, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(
        token_cache,
        "encode_batches",
        lambda batches, encoder, num_proc: asked.append(num_proc) or map(encoder, batches),
    )
    for options in ({}, {"num_proc": 3}):
        tokenize_documents(TEXTS, tokenizer, **options)
    assert asked == [1, 3], "a script without a guard would be run again by each process"


class Dying(BatchEncoder):
    def __call__(self, texts):
        os._exit(1)


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_process_that_dies_is_one_sentence_that_says_what_to_do(
    tokenizer, monkeypatch, small_batches, platform
):
    monkeypatch.setattr(token_cache, "sys", SimpleNamespace(platform=platform))
    forked = multiprocessing.get_context("fork")
    monkeypatch.setattr(
        token_cache, "multiprocessing", SimpleNamespace(get_context=lambda kind: forked)
    )
    with pytest.raises(ValueError, match="num_proc=1") as told:
        list(encode_batches(text_batches(TEXTS), Dying(serialize_tokenizer(tokenizer)), 2))
    assert ('if __name__ == "__main__":' in str(told.value)) == (platform == "darwin")


# --- reading, processes, progress -----------------------------------------------------------------


def test_batches_read_no_further_than_they_must(small_batches):
    texts, seen = lazily(f"text {i}" for i in range(10**9))
    assert next(text_batches(texts)) == [f"text {i}" for i in range(4)] and len(seen) == 4


def test_only_a_few_batches_are_in_memory_at_once(tokenizer, small_batches):
    texts, seen = lazily(f"text {i}" for i in range(400))
    encoder = token_cache.Encoder(token_cache.serialize_tokenizer(tokenizer))
    encoded = token_cache.encode_batches(text_batches(texts), encoder, 2)
    next(encoded)
    assert len(seen) <= 5 * 4
    assert sum(len(lengths) for _, lengths in encoded) == 396


@pytest.mark.parametrize("texts, words", [
    ("one string", "list"), (["a", None], "texts[1] is NoneType"), (["a", b"b"], "texts[1] is bytes"), ([["a"]], "texts[0] is list"),
])  # fmt: skip
@pytest.mark.parametrize("stored", [False, True])
def test_what_is_no_text_is_named(tokenizer, tmp_path, texts, words, stored):
    with pytest.raises(ValueError) as error:
        tokenize_documents(texts, tokenizer, cache_dir=tmp_path if stored else None)
    assert words in str(error.value)


def test_other_mistakes_get_one_line(tokenizer):
    with pytest.raises(ValueError, match="num_proc must be 1 or more"):
        tokenize_documents(TEXTS, tokenizer, num_proc=0)
    with pytest.raises(ValueError, match="backend_tokenizer"):
        tokenize_documents(TEXTS, object())


def test_the_bar_is_quiet_unless_it_is_asked_for(tokenizer, capfd):
    tokenize_documents(TEXTS, tokenizer)
    assert capfd.readouterr().err == ""
    tokenize_documents(TEXTS, tokenizer, progress=True)
    assert "tokenizing" in capfd.readouterr().err


def test_a_process_that_has_used_threads_forks_without_a_warning(
    tokenizer, monkeypatch, small_batches, capfd
):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    expected(tokenizer, TEXTS)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of Python 3.12, for any fork beside threads
        documents = tokenize_documents(TEXTS, tokenizer, num_proc=2)
    assert rows(documents) == expected(tokenizer, TEXTS)
    assert "fork" not in capfd.readouterr().err and os.environ["TOKENIZERS_PARALLELISM"] == "true"


def test_two_readings_in_processes_may_end_in_any_order(tokenizer, monkeypatch, small_batches):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    encoder = BatchEncoder(serialize_tokenizer(tokenizer))
    one, two = (encode_batches(text_batches(TEXTS), encoder, 2) for _ in range(2))
    next(one), next(two)
    assert len(list(one)) == len(list(two)) and "TOKENIZERS_PARALLELISM" not in os.environ


@pytest.mark.parametrize("num_proc", [1, 2])
def test_the_first_batch_comes_before_the_text_has_been_read(tokenizer, num_proc):
    taken = []
    texts = (taken.append(n) or [f"text {n}"] for n in range(50))
    batches = token_cache.encode_batches(
        texts, token_cache.Encoder(token_cache.serialize_tokenizer(tokenizer)), num_proc
    )
    next(batches)
    assert len(taken) <= 2 * num_proc + 1
    assert 1 + sum(1 for _ in batches) == len(taken) == 50


def test_encoding_leaves_the_heap_of_the_process_alone_and_no_thread_behind(tokenizer, monkeypatch):
    before, seen = threading.active_count(), []
    encoder = token_cache.Encoder(token_cache.serialize_tokenizer(tokenizer))
    encode = encoder.encode
    monkeypatch.setattr(
        encoder, "encode", lambda texts: seen.append(threading.current_thread()) or encode(texts)
    )
    ids, lengths = encoder(TEXTS[:3])
    assert seen != [threading.main_thread()] and threading.active_count() == before
    assert ids.tolist() == sum(expected(tokenizer, TEXTS[:3]), []) and len(lengths) == 3
    with pytest.raises(TypeError):  # what goes wrong there is raised here
        encoder([3])


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


def test_special_tokens_that_are_pieces_of_the_model_are_words_too_where_a_text_says_them():
    tokenizer = sentencepiece_form()
    texts = ["<s> ab </s>", "a<mask>b", "<pad> <unk>", "ab <name> ab z"]
    switched = tokenizer(texts, add_special_tokens=False, split_special_tokens=True).input_ids
    assert {0, 2, 23} & {id for ids in switched for id in ids}, (
        "else there would be nothing to mend"
    )
    ids, lengths = BatchEncoder(serialize_tokenizer(tokenizer))(texts)
    found = [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]
    special = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    assert not special & {*ids.tolist()}
    assert [tokenizer.decode(some) for some in found[:3]] == texts[:3]
    assert (
        found[3] == tokenizer(texts[3], add_special_tokens=False).input_ids
    )  # no special token in it, one that is added
    assert len(tokenizer) - 1 in found[3] and tokenizer.unk_token_id in found[3]
    assert tokenizer("<mask>", add_special_tokens=False).input_ids == [
        tokenizer.mask_token_id
    ]  # the tokenizer is as it was


def test_so_they_are_in_rows_of_text_of_labels_and_of_prompts_with_their_answers():
    from tokenizers.processors import RobertaProcessing

    tokenizer, says = sentencepiece_form(), "ab </s> a<mask>b"
    tokenizer.backend_tokenizer.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0))
    inner = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    collate = SequenceClassificationCollator.from_tokenizer(
        tokenizer, label_column=None, num_labels=2
    )
    for row in (
        encode_rows([says], "text", tokenizer, 40)[0]["input_ids"],
        collate.encode([{"text": says}])[0]["input_ids"],
    ):
        assert not inner & {*row[1:-1]} and tokenizer.decode(row[1:-1]) == says
        assert [row[0], row[-1]] == [
            tokenizer.cls_token_id,
            tokenizer.sep_token_id,
        ]  # the frame stays
    row = encode_pairs(tokenizer, ["ab <s> e"], [says], max_ends=1)[0]
    end = row.index(tokenizer.sep_token_id)
    assert (tokenizer.decode(row[:end]), tokenizer.decode(row[end + 1 : -1])) == (says, "ab <s> e")
    tokenizer.add_tokens(["new"])  # after a first call
    assert (
        tokenizer.convert_tokens_to_ids("new")
        in encode_rows(["ab new"], "text", tokenizer, 40)[0]["input_ids"]
    )


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_reading_plainly_is_a_call_with_its_switch_for_tokenizers_without_the_hole(kind):
    one, says = train_tokenizer(TEXTS, 400, kind=kind), [*TEXTS[:20], "[CLS] of a [MASK]"]
    how = {"truncation": True, "max_length": 9, "return_offsets_mapping": True}
    plain, switched = tokenize_plain(one, says, **how), one(says, split_special_tokens=True, **how)
    assert dict(plain) == dict(switched)
    assert [plain.word_ids(n) for n in range(len(says))] == [
        switched.word_ids(n) for n in range(len(says))
    ]


def test_other_tokenizers_are_copied_as_they_are(tokenizer):
    for one in (tokenizer, train_tokenizer(TEXTS, 300, kind="bpe")):
        assert hide_special_pieces(serialize_tokenizer(one)) == serialize_tokenizer(one)
