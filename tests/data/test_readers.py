"One reader for each kind of table: rows by their lines, columns by name or number, with a header or without."

import csv
import gzip
import io
import json
import os
import random
import re
import textwrap
import threading
import zipfile
from collections import Counter

import numpy as np
import datasets
import pyarrow
import pytest
from pyarrow import parquet

from bertlab.data.readers import (
    READERS,
    ErrorHandler,
    Position,
    ReadOptions,
    read_lines,
    read_rows,
    resolve_column,
    text_of,
)
from bertlab.data.sources import TextStream, dataset_rows, iter_documents
from bertlab.finetuning.files import read_labelled

ROWS = [
    {"label": str(1 + i % 3), "title": f"Title {i}", "text": f'He said, of {i}:\n"wait"'}
    for i in range(5)
]
NEWS = [list(row.values()) for row in ROWS]
TEXTS = [row["text"] for row in ROWS]
NAMES = "a.csv", "a.jsonl", "a.json", "a.parquet", "a.arrow"


def as_csv(rows, **options) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n", **options).writerows(rows)
    return stream.getvalue()


@pytest.fixture
def shelf(tmp_path):
    "The same rows in each form, and as a table without a header."
    (tmp_path / "a.csv").write_text(as_csv([[*ROWS[0]], *NEWS]))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "a.json").write_text(json.dumps({"version": "1", "data": ROWS}))
    parquet.write_table(table := pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    (tmp_path / "news.csv").write_text(as_csv(NEWS))
    return tmp_path


def texts_of(path, column="text", handle=None, **options):
    rows = read_rows(path, ReadOptions(column, **options), handle=handle, columns=[column])
    return [row[column] for _, row in rows]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_rows_and_resumes_anywhere(name, shelf):
    path = shelf / name
    assert [row for _, row in read_rows(path)] == ROWS
    for column in ("text", "TEXT", 3, "3", -1):
        assert texts_of(path, column) == TEXTS
    for stop in range(1, 5):
        reader = read_rows(path, position=(position := Position()))
        first_rows = [next(reader)[1] for _ in range(stop)]
        saved = Position(**json.loads(json.dumps(vars(position))))
        assert first_rows + [row for _, row in read_rows(path, position=saved)] == ROWS
    labelled = read_labelled([path])
    assert list(labelled) == ROWS and labelled["text"] == TEXTS


# what a table is made of: name, content, texts, how it was read
WILD = [
    ("a.csv", 'text;n\n"a; b";1,5\nc;2\n', ["a; b", "c"], "cells between ';'"),
    ("a.csv", "n\ttext\n1\ta, b\n2\tc\n", ["a, b", "c"], r"cells between '\t'"),
    ("a.tsv", "n|text\n1|a\tb\n2|c\n", ["a\tb", "c"], "cells between '|'"),
    ("a.tsv", 'text\tn\n"a" b\t1\n"c\t2\nd\t3\n', ['"a" b', '"c', "d"], "no quotes"),
    ("a.csv", "text,n\n'a, b',1\n'c',2\n", ["a, b", "c"], "quotes"),
    ("a.csv", 'text,n\n"a",1\n"b\n""c""",2\n', ["a", 'b\n"c"'], None),
    ("a.csv", 'text,n\n"a",1\n"b"x,2\n"c",3\n', ["a", "c"], None),
]


@pytest.mark.parametrize("name, content, expected, how", WILD)
def test_a_table_is_read_as_its_beginning_says(name, content, expected, how, tmp_path):
    (tmp_path / name).write_text(content)
    assert texts_of(tmp_path / name, handle=lambda error: None) == expected
    notes = Counter()
    list(iter_documents(str(tmp_path), ReadOptions(on_error="skip"), notes))
    relevant_notes = [note for note in notes if "cells" in note]
    assert (
        not relevant_notes
        if how is None
        else how in relevant_notes[0] and name in relevant_notes[0]
    )


@pytest.mark.parametrize(
    "delimiter, quotechar", [(";", "'"), ("\t", '"'), ("|", "~"), ("\\t", '"')]
)
def test_delimiter_and_quotes_can_be_given(delimiter, quotechar, tmp_path):
    form = {"delimiter": delimiter.replace("\\t", "\t"), "quotechar": quotechar}
    (tmp_path / "a.csv").write_text(as_csv([[*ROWS[0]], *NEWS], **form))
    assert texts_of(tmp_path / "a.csv", delimiter=delimiter, quotechar=quotechar) == TEXTS
    (tmp_path / "b.csv").write_text('text,n\n"a",1\n')
    assert texts_of(tmp_path / "b.csv", quotechar="") == ['"a"']


def test_rows_of_json_need_no_suffix_and_a_zip_of_one_file_no_unpacking(tmp_path):
    lines = '{"text": "a cat"}\n{"text": "sleeps"}\n'
    (tmp_path / "63").write_text(lines)  # as a pipe is called
    (tmp_path / "64").write_text('{"body": "no such column"}\n')
    for name, members in ("a.jsonl.zip", ["x.jsonl"]), ("b.zip", ["x"]), ("c.zip", ["x", "y"]):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for member in members:
                archive.writestr(member, lines)
    for name in ("63", "a.jsonl.zip", "b.zip"):
        assert texts_of(tmp_path / name) == ["a cat", "sleeps"]
    assert texts_of(tmp_path / "64") == ['{"body": "no such column"}']
    with pytest.raises(ValueError, match="c.zip holds 2 files"):
        texts_of(tmp_path / "c.zip")


def test_a_guess_from_few_letters_says_so(tmp_path):
    path = tmp_path / "a.txt"
    for letters, is_sure in ("Grüße", False), ("Łódź, święty żołnierz, być człowiekiem " * 9, True):
        path.write_bytes(f"{letters}\nand more\n".encode("cp1250"))
        with pytest.raises(ValueError, match="probably .* or ") as caught:
            texts_of(path)
        assert ("few letters" in str(caught.value)) != is_sure


ENCODED = {
    "cp1252": "Grüße aus München, schöne Straße", "gb18030": "今天天气很好，我们去公园散步吧。",
    "cp932": "今日は天気がいいから散歩しましょう。", "cp1251": "Сегодня хорошая погода, пойдём в парк.",
    "utf_16_le": "A cat sleeps.", "utf_32_be": "A cat sleeps.",
}  # fmt: skip


@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("name", ["a.txt", "a.csv.gz"])
def test_an_encoding_is_named_and_can_be_given(name, encoding, tmp_path):
    path = tmp_path / name
    data = f'text\n"{ENCODED[encoding]}"\n'.encode(encoding)
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    [*_, text] = texts_of(path, encoding=encoding, sample_by="line")
    assert text.strip('"') == ENCODED[encoding]
    with pytest.raises(ValueError, match=f"{name} line.*encoding='{encoding}'"):
        texts_of(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_a_byte_order_mark_names_the_encoding_and_resumes(encoding, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("ä\nb\r\n\nc".encode(encoding))
    assert texts_of(path) == texts_of(path, encoding="utf-8") == ["ä\nb", "c"]
    read = read_rows(path, position=(position := Position()))
    next(read)
    assert [row["text"] for _, row in read_rows(path, position=Position(**vars(position)))] == ["c"]


@pytest.mark.parametrize("content, sample_by, expected", [
    ("a\nb\n\nc\n", "line", ["a", "b", "", "c"]), ("a\nb\n\nc\n", "document", ["a\nb\n\nc"]),
    ("a\r\nb\r\n", "auto", ["a", "b"]), ("a\nb\n\nc\n\n\n \nd\n", "auto", ["a\nb", "c", "d"]),
    ("\ufeffa\nb\n", "paragraph", ["a\nb"]), ("a\u2028b\nc\x0cd\n", "auto", ["a\u2028b", "c\x0cd"]),
    ("a\n" * 99 + "\nb", "auto", [*"a" * 99, "", "b"]), ("", "auto", []),
])  # fmt: skip
def test_a_text_is_cut_by_line_paragraph_or_not_at_all(content, sample_by, expected, tmp_path):
    (tmp_path / "a.txt").write_bytes(content.encode())
    assert texts_of(tmp_path / "a.txt", sample_by=sample_by) == expected


def wrapped(num_paragraphs, indent="", gap=""):
    words = "the old man went down to the river and sat there until it was nearly dark".split()
    draw = random.Random(0)
    texts = (" ".join(draw.choices(words, k=draw.randint(60, 90))) for _ in range(num_paragraphs))
    return gap.join(textwrap.fill(t, 64, initial_indent=indent) + "\n" for t in texts)


LAYOUTS = {
    "indented": (wrapped(30, indent="   "), 30, "paragraph.*indented line"),
    "short last lines": (wrapped(30), 30, "paragraph.*short line"),
    "blank lines": (wrapped(30, gap="\n"), 30, "paragraph"),
    "sentences": ("".join(f"{'The cat sleeps. ' * (1 + n % 7)}\n" for n in range(40)), 40, "line"),
    "words": ("cat\n" * 40, 40, "line"),
    "numbers": ("0.125 0.250 0.375 0.500 0.625 0.750\n" * 40, 40, "line"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrapped_lines_are_paragraphs_and_the_way_is_told(layout, tmp_path):
    content, count, how = LAYOUTS[layout]
    (tmp_path / "a.txt").write_text(content)
    notes = Counter()
    texts = [d.text for d in iter_documents(str(tmp_path / "a.txt"), notes=notes)]
    assert [" ".join(t.split()) for t in texts] == [
        " ".join(t.split()) for t in texts_of(tmp_path / "a.txt", sample_by="auto")
    ]
    # A paragraph whose last line is full by chance is not told from the next one.
    assert abs(len(texts) - count) <= 3 * (layout == "short last lines")
    assert "".join("".join(texts).split()) == "".join(content.split())
    assert re.search(how, next(iter(notes))) and "a.txt" in next(iter(notes))


def test_a_pipe_is_read_once(tmp_path):
    os.mkfifo(path := tmp_path / "pipe.jsonl")
    content = "".join(json.dumps(row) + "\n" for row in ROWS)
    writer = threading.Thread(target=path.write_text, args=(content,))
    writer.start()
    assert texts_of(path) == TEXTS
    writer.join()


def read_shouting(file, options, mark="!"):
    for line in file.lines():
        file.position.line = line.number
        yield f"line {line.number}", {"text": line.text.upper() + mark}


def test_a_users_reader_is_one_of_the_table(tmp_path, monkeypatch):
    monkeypatch.setitem(READERS, "shouting", read_shouting)
    (tmp_path / "a.x").write_text("a\nb\n")
    options = {"file_format": "shouting", "reader_kwargs": {"mark": "?"}}
    assert texts_of(tmp_path / "a.x", **options) == ["A?", "B?"]
    assert list(TextStream(tmp_path / "a.x", **options)) == ["A?", "B?"]


@pytest.mark.parametrize("column", ["1", "text", "3"])
def test_a_missing_header_is_suspected(column, tmp_path):
    (tmp_path / "news.csv").write_text(
        '3,"Wall St. Bears","Short-sellers are seeing green again, said Reuters."\n1,Oslo,Votes.\n'
    )
    with pytest.raises(ValueError, match="news.csv.*text_column.*'3'.*header=False"):
        texts_of(tmp_path / "news.csv", column)


def test_names_that_are_names_are_not_suspected():
    assert resolve_column("year", ["year", "text"]) == "year"
    assert resolve_column("2", ["1", "2", "3"]) == "2", "columns that are called by their numbers"
    with pytest.raises(ValueError, match="did you mean 'text'") as error:
        resolve_column("txet", ["year", "text"])
    assert "header" not in str(error.value)
    for line_number in (0, 3, -3):
        with pytest.raises(ValueError, match=f"text_column={line_number}.*1 to 2"):
            resolve_column(line_number, ["year", "text"])


def test_a_comma_outside_of_quotes_does_not_cut_the_text(tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n1,Well, well\n2,fine\n3\n4,good,,\n")
    left_out = []
    assert texts_of(tmp_path / "a.csv", handle=left_out.append) == ["fine", None, "good"]
    assert "line 2 has 3 cells" in str(left_out[0]) and len(left_out) == 1


@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_a_cell_keeps_the_ends_of_its_lines(tmp_path, end):
    rows = [
        ["text", "n"],
        ["Dear Ms\r\nAnna,\r\nhello", "1"],
        ["two\nlines", "2"],
        ["old\rmac", "3"],
    ]
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file, lineterminator=end, quoting=csv.QUOTE_ALL).writerows(rows)
    assert [[row["text"], row["n"]] for _, row in read_rows(tmp_path / "a.csv")] == rows[1:]


def test_many_open_quotes_do_not_exhaust_the_stack(tmp_path):
    (tmp_path / "a.csv").write_text("text\n" + 'fine\n"a"b\n' * 3000)
    left_out = []
    assert texts_of(tmp_path / "a.csv", handle=left_out.append) == ["fine"] * 3000
    assert len(left_out) == 3000


def test_lines_know_their_line_ends_and_bytes(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffä\r\nb\rc\n\nd".encode())
    lines = list(read_lines(path))
    assert [line[:2] for line in lines] == [(1, "ä"), (2, "b"), (3, "c"), (4, ""), (5, "d")]
    assert [line.line_end for line in lines] == ["\r\n", "\r", "\n", "\n", ""]
    for line_number, _, end, _ in lines:
        remaining = list(read_lines(path, position=Position(offset=end, line=line_number)))
        assert remaining == lines[line_number:]


def test_odd_columns_are_read_and_odd_cells_handed_over(tmp_path):
    buffers = [None, pyarrow.py_buffer(np.int32([0, 1, 2, 3])), pyarrow.py_buffer(b"a\xffc")]
    bad = pyarrow.StringArray.from_buffers(3, *buffers[1:])
    far = pyarrow.array([2**31 - 1, 0, 1], pyarrow.date32())
    table = pyarrow.table([bad, far, bad], names=["text", "when", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        errors = []
        assert texts_of(tmp_path / name, -1, errors.append) == ["a", "c"]
        assert len(errors) == 1 and f"{name} row 2" in str(errors[0])
        rows = [
            row
            for _, row in read_rows(
                tmp_path / name, ReadOptions(on_error="skip"), handle=errors.append
            )
        ]
        assert [list(row) for row in rows] == 2 * [["text", "when", "text.2"]]
        assert isinstance(rows[0]["when"], str) and rows[1]["when"].year == 1970
        with pytest.raises(ValueError, match=f"{name}.*'text'"):
            texts_of(tmp_path / name)
    (tmp_path / "a.csv").write_text("text,text\na,b\n")
    assert texts_of(tmp_path / "a.csv", 2) == ["b"]
    with pytest.raises(ValueError, match="a.csv.*'text'.*number"):
        texts_of(tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text('{"text": "a", "n": %s}\n' % ("9" * 5000))
    assert next(read_rows(tmp_path / "a.jsonl"))[1] == {"text": "a", "n": "9" * 5000}


@pytest.mark.parametrize("value", [None, 3, "\ud83d"])
def test_a_cell_without_text_is_refused_by_its_address(value):
    with pytest.raises(ValueError, match="a.csv line 3: column 'text'"):
        text_of({"text": value}, "text", "a.csv line 3")


@pytest.mark.parametrize("options", [
    {"on_error": "ignore"}, {"sample_by": "lines"}, {"file_format": "xml"}, {"delimiter": ";;"},
    {"delimiter": '"'}, {"quotechar": "''"}, {"encoding": "latin-99"},
])  # fmt: skip
def test_a_wrong_option_is_refused_by_name_and_value(options):
    [(name, value)] = options.items()
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        ReadOptions(**options)


def test_malformed_rows_are_counted_under_the_first_message():
    handle = ErrorHandler("skip")
    for n in range(3):
        handle(ValueError(f"row {n} is bad"))
    [(note, count)] = handle.notes.items()
    assert count == 3 and "row 0 is bad" in note


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".jsonl"])
@pytest.mark.parametrize("column, expected", [
    ("text", ["one cat", "two"]),  # of one column alone
    ("document.text", ["one cat", "two"]),
    ("chat.said.body", ["hi you\nwho is it", "no"]),
    ("lines", ["a line\nand more", "b"]),
    ("words", ["a cat", "dogs"]),
])  # fmt: skip
def test_text_within_columns_is_found(tmp_path, suffix, column, expected):
    rows = [
        {"id": 1, "document": {"title": "t", "text": "one cat"}, "lines": ["a line", "and more"],
         "chat": [{"who": "x", "said": {"body": b}} for b in ("hi you", "who is it")], "words": ["a", "cat"]},
        {"id": 2, "document": {"title": "u", "text": "two"}, "lines": ["b"],
         "chat": [{"who": "y", "said": {"body": "no"}}], "words": ["dogs"]},
    ]  # fmt: skip
    path = tmp_path / f"a{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        table = pyarrow.Table.from_pylist(rows)
        if suffix == ".parquet":
            parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
    options = ReadOptions(column)
    assert [document.text for document in iter_documents(path, options)] == expected
    data = datasets.Dataset.from_list(rows)
    names = [column]
    assert [text_of(row, column, "") for _, row in dataset_rows(data, "d", names)] == expected
    for wrong, words in (
        ("document", ["document.text"]),
        ("body2", ["chat.said.body"]),
        ("id", ["int"]),
    ):
        with pytest.raises(ValueError) as error:
            list(iter_documents(path, ReadOptions(wrong)))
        assert all(word in str(error.value) for word in (wrong, *words))
