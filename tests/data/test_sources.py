"Every format, packed or not, gives the same documents; streams resume exactly; malformed rows are named or counted."

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import threading
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.data.corpus import load_corpus
from bertlab.data.documents import hash_files, parse_split, slice_bounds
from bertlab.data.module import _split_options
from bertlab.data.readers import ReadOptions
from bertlab.data.sources import (
    SourceNotFound,
    TextStream,
    check_not_inside,
    expand_sources,
    iter_documents,
    list_files,
    read_column,
)

TEXTS = [
    f"Sentence number {i},\nwith a break, a “quote” and a \u2028 separator." for i in range(23)
]


def packed(data: bytes, suffix: str) -> bytes:
    import pyarrow

    how = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, "": lambda data: data}
    how[".zst"] = lambda data: pyarrow.compress(data, codec="zstd", asbytes=True)
    return how[suffix](data)


def content(file_format: str) -> bytes:
    "TEXTS in a format, written by other hands than ours."
    import pyarrow
    from pyarrow import parquet

    table, stream = pyarrow.table({"id": range(len(TEXTS)), "text": TEXTS}), io.BytesIO()
    if file_format in (".csv", ".tsv"):
        lines = io.StringIO()
        writer = csv.writer(lines, delimiter="\t" if file_format == ".tsv" else ",")
        writer.writerows([["id", "text"], *enumerate(TEXTS)])
        return lines.getvalue().encode()
    if file_format == ".json":
        return json.dumps([{"text": text} for text in TEXTS], indent=1).encode()
    if file_format in (".jsonl", ".ndjson"):
        return "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS).encode()
    if file_format == ".parquet":
        parquet.write_table(table, stream, row_group_size=5)
    elif file_format == ".arrow":
        with pyarrow.ipc.new_file(stream, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    elif file_format == ".stream.arrow":
        with pyarrow.ipc.new_stream(stream, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    else:
        return "\n\n".join(TEXTS).encode()
    return stream.getvalue()


KINDS = [
    ".txt",
    ".csv",
    ".tsv",
    ".json",
    ".jsonl",
    ".ndjson",
    ".parquet",
    ".arrow",
    ".stream.arrow",
]
SUFFIXES = ["", ".gz", ".bz2", ".xz", ".zst"]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    "A directory with each format in each packing."
    root = tmp_path_factory.mktemp("shelf")
    for file_format, suffix in itertools.product(KINDS, SUFFIXES):
        (root / f"a{file_format}{suffix}").write_bytes(packed(content(file_format), suffix))
    return root


def texts_of(source, column="text", **options) -> list[str]:
    return [document.text for document in iter_documents(source, ReadOptions(column, **options))]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("file_format", KINDS)
def test_every_format_packed_or_not_gives_the_same_documents(shelf, file_format, suffix):
    path = str(shelf / f"a{file_format}{suffix}")
    assert texts_of(path) == TEXTS == list(TextStream(path))


def test_a_directory_of_all_kinds_is_one_source(shelf):
    assert (
        texts_of(str(shelf)) == list(TextStream(str(shelf))) == TEXTS * len(KINDS) * len(SUFFIXES)
    )
    assert texts_of(str(shelf), file_format="arrow") == TEXTS * 2 * len(SUFFIXES)


@pytest.mark.parametrize("file_format", KINDS)
@pytest.mark.parametrize("suffix", ["", ".xz"])
def test_a_stream_resumes_at_the_very_next_document(shelf, file_format, suffix):
    path = [str(shelf / f"a{file_format}{suffix}"), str(shelf / "a.jsonl")]
    for stop in range(2 * len(TEXTS) + 1):
        stream, resumed = TextStream(path), TextStream(path)
        head = list(itertools.islice(stream, stop))
        resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        assert head + list(resumed) == TEXTS * 2, stop


def test_a_stream_that_came_to_its_end_begins_anew(shelf):
    stream = TextStream(str(shelf / "a.csv"))
    assert list(stream) == list(stream) == TEXTS


def test_a_saved_dataset_is_streamed_sliced_and_resumed(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    name = str(tmp_path / "saved")
    assert list(TextStream(name)) == TEXTS
    stream, resumed = TextStream(name, split="train[5:]"), TextStream(name, split="train[5:]")
    head = list(itertools.islice(stream, 4))
    resumed.load_state_dict(stream.state_dict())
    assert head + list(resumed) == TEXTS[5:]
    assert texts_of(name, split="train[:20%]") == TEXTS[:5]  # 4.6, rounded
    assert (
        list(itertools.islice(stream, 3)) == TEXTS[9:12]
    )  # a second iteration goes on where the first stopped


@pytest.mark.parametrize("column", ["Text", "text", "TEXT", "2", "-1", 2])
def test_a_column_of_a_dataset_is_named_in_any_case_or_by_number(tmp_path, column):
    import datasets

    datasets.Dataset.from_dict({"id": list(range(len(TEXTS))), "Text": TEXTS}).save_to_disk(
        tmp_path / "saved"
    )
    name = str(tmp_path / "saved")
    assert list(TextStream(name, column)) == TEXTS
    assert texts_of(name, column) == TEXTS
    with pytest.raises(ValueError, match="numbered from 1 to 2"):
        texts_of(name, "3")


def test_a_directory_in_hub_form_is_streamed_by_its_card(
    tmp_path,
):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_bytes(content(".jsonl"))
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/train.jsonl\n---\n"
    )
    name = str(tmp_path)
    assert list(TextStream(name, split="train[3:9]")) == TEXTS[3:9]
    stream, resumed = TextStream(name), TextStream(name)
    head = list(itertools.islice(stream, 7))
    resumed.load_state_dict(stream.state_dict())
    assert head + list(resumed) == TEXTS
    assert texts_of(name, split="train[-10%:]") == TEXTS[-2:]
    with pytest.raises(ValueError, match="length of the dataset"):
        list(TextStream(name, split="train[:10%]"))


@given(st.integers(0, 300), st.integers(-120, 120), st.integers(-120, 120), st.booleans())
@settings(derandomize=True, deadline=None)
def test_slices_mean_what_python_means(count, begin, stop, percent):
    if percent:
        first, last = slice_bounds(f"{begin}%", f"{stop}%", count)
        begin, stop = round(begin * count / 100), round(stop * count / 100)
        if "-" in f"{begin}" or "-" in f"{stop}" or not count:
            return  # -0 % of something is its beginning in numbers, and its end in words
    else:
        first, last = slice_bounds(str(begin), str(stop), count)
    assert list(range(count))[first : max(first, last)] == list(range(count))[begin:stop]


@pytest.mark.parametrize("split, expected", [
    ("train[:3]", slice(3)), ("train[100:]", slice(100, None)), ("train[20:10]", slice(0, 0)), ("train[2:5]", slice(2, 5)),
    ("train[:10%]", slice(2)), ("train[-3:]", slice(-3, None)), ("train[90%:]", slice(21, None)), ("train", slice(None)),
])  # fmt: skip
def test_a_slice_of_a_file_is_a_slice_of_its_documents(shelf, split, expected):
    assert texts_of(str(shelf / "a.csv.gz"), split=split) == TEXTS[expected]


@pytest.mark.parametrize("split", ["train[", "train[1:2:3]", "train[a:b]", "", "train[:10%"])
def test_a_split_that_is_none_is_refused(split):
    with pytest.raises(ValueError, match="train"):
        parse_split(split)


def test_several_sources_and_patterns_make_one_corpus(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("\n".join(f"{name} says {i}" for i in range(20)))
    pattern, single = str(tmp_path / "[ab].txt"), tmp_path / "c.txt"
    corpus = load_corpus([pattern, single], validation_fraction=0.3, sample_by="line")
    assert len(corpus.train) + len(corpus.validation) == 60
    assert expand_sources(pattern) == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    odd = tmp_path / "[1].txt"
    odd.write_text("a name with brackets")
    assert texts_of(str(odd)) == ["a name with brackets"]
    with pytest.raises(SourceNotFound, match="matches no file"):
        expand_sources(str(tmp_path / "*.csv"))
    with pytest.raises(ValueError, match="empty list"):
        load_corpus([])
    with pytest.raises(SourceNotFound, match="missing.txt"):
        load_corpus([single, tmp_path / "missing.txt"])


def test_a_format_can_be_named_where_the_suffix_does_not_say_it(tmp_path):
    (tmp_path / "dump").write_bytes(content(".jsonl"))
    (tmp_path / "notes.md").write_bytes(content(".csv"))
    assert texts_of(str(tmp_path / "dump"), file_format="json") == TEXTS
    assert list(TextStream(str(tmp_path / "notes.md"), file_format="csv")) == TEXTS
    for call in (load_corpus, lambda path, file_format: TextStream(path, file_format=file_format)):
        with pytest.raises(ValueError, match="file_format.*xml"):
            call(tmp_path / "dump", file_format="xml")
    with pytest.raises(ValueError, match="file_format='csv'"):
        load_corpus(file_format="csv")


# --- malformed rows -------------------------------------------------------------------------------

# content, what is left, the line that is named, how many
MALFORMED = {
    "a.jsonl": (b'{"text": "a"}\noops\n{"text": "b"}\n[1]\n{"no": 1}\n{"text": null}\n{"text": "c"}\n', "abc", "line 2", 4),
    "a.csv": (b'id,text\n1,"a"\n2\n3,"b"\n4,"x"y\n5,"c"\n', "abc", "line 3", 2),
    "b.csv": (b'text\na\n"open\nb\nc\n', "abc", "line 3", 1),
    "a.txt": (b"a\n\xff\xfe\nb\n\xe9\nc\n", "abc", "line 2", 2),
    "a.json": (b'[{"text": "a"}, {"text": 7}, {"text": "b"}, 3, {"text": "c"}]', "abc", "row 2", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("suffix", ["", ".bz2"])
def test_a_malformed_line_is_named_or_counted(tmp_path, name, suffix):
    data, num_left_out, line, count = MALFORMED[name]
    path = tmp_path / (name + suffix)
    path.write_bytes(packed(data, suffix))
    for read in (texts_of, lambda path: list(TextStream(path))):
        with pytest.raises(ValueError) as error:
            read(str(path))
        assert f"{path} {line}" in str(error.value) and "\n" not in str(error.value)
    corpus = load_corpus(path, on_error="skip", validation_fraction=0)
    assert corpus.train_texts == list(num_left_out)
    assert f"{count} malformed rows, left out; the first: {path} {line}" in corpus.describe()
    stream = TextStream(str(path), on_error="skip")
    with pytest.warns(UserWarning, match="malformed rows are left out; the first") as warned:
        assert [list(stream), list(stream)] == 2 * [list(num_left_out)]
    assert len(warned) == 1 and f"{path} {line}" in str(warned[0].message), (
        "a stream is asked for no notes"
    )


@pytest.mark.parametrize(
    "name", ["a.txt.zst", "a.txt.xz", "a.txt.bz2", "a.csv.gz", "a.parquet.gz", "a.arrow"]
)
def test_a_truncated_file_is_named_even_with_on_error_skip(shelf, tmp_path, name):
    path = tmp_path / name
    path.write_bytes((shelf / name).read_bytes()[:-20])
    with pytest.raises(ValueError) as error:
        texts_of(str(path), on_error="skip")
    assert name in str(error.value) and "\n" not in str(error.value)


# --- memory, keys and states ----------------------------------------------------------------------


def test_a_state_of_other_files_is_refused(shelf):
    stream = TextStream([str(shelf / "a.txt"), str(shelf / "a.csv")])
    with pytest.raises(ValueError, match="2 files"):
        TextStream(str(shelf / "a.txt")).load_state_dict(stream.state_dict())
    with pytest.raises(ValueError, match="hub"):
        TextStream(str(shelf / "a.txt"), split="test")


def test_a_state_of_a_changed_file_is_refused(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("\n".join(f"line {n} of {name}" for n in range(9)))
    stream = TextStream(str(tmp_path), sample_by="line")
    read = iter(stream)
    for _ in range(11):  # two of the second file
        next(read)
    state = stream.state_dict()
    resumed = TextStream(str(tmp_path), sample_by="line")
    resumed.load_state_dict(state)
    assert next(iter(resumed)) == "line 2 of b.txt"
    (tmp_path / "b.txt").write_text("line 1 of b.txt, the others were no good")
    with pytest.raises(ValueError, match="b.txt .*bytes"):
        TextStream(str(tmp_path), sample_by="line").load_state_dict(state)
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    with pytest.raises(ValueError, match="b.txt .*c.txt"):
        TextStream(str(tmp_path), sample_by="line").load_state_dict(state)


def test_the_key_of_files_is_their_content_order_and_reading(tmp_path):
    for name, text in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "")):
        (tmp_path / name).write_text(text)
    a, b, c, d = (tmp_path / name for name in "abcd")
    assert hash_files([a]) == hash_files([b])
    keys = [hash_files(files, **how) for files, how in (
        ([a], {}), ([c], {}), ([a, c], {}), ([c, a], {}), ([a, d], {}), ([a], {"sample_by": "auto"}),
    )]  # fmt: skip
    assert len(set(keys)) == len(keys)


def linked_tree(folder: Path) -> Path:
    "Text in a directory, and behind links: to one elsewhere, twice to the same, to itself and upwards."
    for name in ("set/near", "far/deep", "set/.hidden", "other"):
        (folder / name).mkdir(parents=True)
    for name in ("set/near/a", "far/b", "far/deep/c", "set/.hidden/d", "e", "other/f"):
        (folder / f"{name}.txt").write_text(f"Text of {name}.\n")
    links = {"set/link": "far", "set/same": "far", "set/z": "far/deep", "set/again": "set/near", "set/up": ".",
             "set/near/self": "set/near", "far/back": "set", "far/on": "other"}  # fmt: skip
    for link, target in links.items():
        (folder / link).symlink_to(folder / target)
    (folder / "set" / "broken").symlink_to(folder / "nothing")
    return folder / "set"


def test_links_are_followed_and_nothing_is_read_twice(tmp_path):
    root, notes = linked_tree(tmp_path), Counter()
    sources = [document.source for document in iter_documents(str(root), notes=notes)]
    assert sources == [
        "link/b.txt:1",
        "link/deep/c.txt:1",
        "link/on/f.txt:1",
        "near/a.txt:1",
    ]
    assert list(TextStream(str(root))) == texts_of(str(root))


def test_odd_directories_are_read_and_the_rest_is_counted(tmp_path, monkeypatch):
    for name in ("a.txt", "._a.txt", ".ipynb_checkpoints/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("One.\n")
    (tmp_path / "state.json").write_text('{"text": "Two."}\n')  # not of `datasets`
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")
    Path(odd).write_text("Three.\n")
    notes = Counter()
    documents = list(iter_documents(str(tmp_path), notes=notes))
    assert [document.text for document in documents] == ["One.", "Three.", "Two."]
    "".join([*notes, *(document.source for document in documents)]).encode()  # can be printed
    assert sum(count for note, count in notes.items() if "links" in note) == 1
    assert list(TextStream(odd)) == ["Three."]
    denied = PermissionError(13, "Permission denied", str(tmp_path / "shut"))
    monkeypatch.setattr(os, "scandir", lambda path: (_ for _ in ()).throw(denied))
    with pytest.raises(ValueError, match="shut"):
        list_files(tmp_path)


def test_pipes_are_read_once_or_refused(tmp_path):
    os.mkfifo(path := tmp_path / "a")

    def read(function):
        writer = threading.Thread(target=path.write_text, args=("a\nb\nc\nd\n",))
        writer.start()
        try:
            return function()
        finally:
            writer.join()

    assert read(lambda: load_corpus(path, validation_fraction=0).train_texts) == [*"abcd"]
    assert read(lambda: texts_of(str(path), split="train[50%:]")) == ["c", "d"]
    with pytest.raises(ValueError, match=f"{path} is a pipe"):
        TextStream(path)


@pytest.mark.parametrize("data", [{"text": ["a"]}, "a text", [__file__]])
def test_names_are_not_taken_for_texts(data):
    with pytest.raises(ValueError, match="texts"):
        list(read_column(data))


def test_tables_in_memory_give_their_column():
    import datasets
    import pandas as pd
    import pyarrow as pa

    columns = {"n": [1, 2], "text": ["a", "b"]}
    tables = pd.DataFrame(columns), datasets.Dataset.from_dict(columns), pa.table(columns)
    assert [list(read_column(table)) for table in tables] == 3 * [["a", "b"]]
    assert list(read_column(["a", "b"])) == ["a", "b"]


def test_a_directory_above_another_that_is_linked_is_still_read(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "far" / "b.txt").write_text("One.\n")
    (tmp_path / "far" / "deep" / "c.txt").write_text("Two.\n")
    (tmp_path / "set" / "1").symlink_to(tmp_path / "far" / "deep")
    (tmp_path / "set" / "2").symlink_to(tmp_path / "far")
    names = [path.relative_to(tmp_path).as_posix() for path in list_files(tmp_path / "set")]
    assert names == ["set/1/c.txt", "set/2/b.txt"]


def test_files_are_sorted_by_path_without_hidden_ones(tmp_path):
    for name in ("b/x.txt", "b.txt", "a/z/y.txt", "a/z.txt", "B/q.txt", "a-b/r.txt", ".h/s.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    expected = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    assert list_files(tmp_path) == [path for path in expected if ".h" not in path.parts]


def test_output_must_not_be_inside_a_linked_directory(tmp_path):
    root = linked_tree(tmp_path)
    with pytest.raises(ValueError, match="output .* is inside of"):
        check_not_inside(tmp_path / "far" / "out", [root], "output")
    check_not_inside(tmp_path / "out", [root], "output")


def test_options_of_load_dataset_are_passed_on(tmp_path, monkeypatch):
    card = "---\nconfigs:\n"
    for config, texts in {"low": ["one", "two"], "high": ["three"]}.items():
        (tmp_path / config).mkdir()
        lines = "\n".join(json.dumps({"text": text}) for text in texts)
        (tmp_path / config / "train.jsonl").write_text(lines)
        card += f"- config_name: {config}\n  data_files: {config}/*.jsonl\n"
    (tmp_path / "README.md").write_text(card + "---\n")
    (tmp_path / "low" / "more.jsonl").write_text('{"text": "four"}')

    def read(source, **options):
        (reading,) = _split_options(options, ReadOptions)
        texts = [document.text for document in iter_documents(str(source), reading)]
        assert texts == list(TextStream(str(source), **asdict(reading)))
        return sorted(texts)

    assert read(tmp_path, name="high") == ["three"]
    assert read(tmp_path, name="low", revision="main") == ["four", "one", "two"]
    (tmp_path / "README.md").unlink()
    assert read(tmp_path) == ["four", "one", "three", "two"]
    assert read(tmp_path, data_files="low/train*") == ["one", "two"]
    assert read(tmp_path, data_dir="high") == ["three"]
    files = {"train": str(tmp_path / "low" / "more.jsonl")}
    assert read("json", data_files=files) == ["four"]
    with pytest.raises(ValueError, match="data_files.*low"):
        read(tmp_path / "low" / "more.jsonl", data_files="low/train*")
    with pytest.raises(ValueError, match="data_kwargs.*streaming"):
        _split_options({"streaming": True}, ReadOptions)
