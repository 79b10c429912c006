"One reader for each kind of table: rows by their lines, columns by name or number, with a header or without."

import csv
import io
import json
import os
import threading

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
from bertlab.data.sources import TextStream
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
        begun = [next(reader)[1] for _ in range(stop)]
        saved = Position(**json.loads(json.dumps(vars(position))))
        assert begun + [row for _, row in read_rows(path, position=saved)] == ROWS
    labelled = read_labelled([path])
    assert list(labelled) == ROWS and labelled["text"] == TEXTS


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_a_delimiter_is_given_and_its_lack_is_suspected(delimiter, tmp_path):
    (tmp_path / "a.csv").write_text(as_csv([[*ROWS[0]], *NEWS], delimiter=delimiter))
    assert texts_of(tmp_path / "a.csv", delimiter=delimiter) == TEXTS
    with pytest.raises(ValueError, match="a.csv.*delimiter"):
        texts_of(tmp_path / "a.csv")


def test_an_encoding_is_given_and_its_lack_is_named(tmp_path):
    for name in ("a.txt", "a.csv"):
        (tmp_path / name).write_bytes("text\nGrüße\n".encode("latin-1"))
        assert texts_of(tmp_path / name, encoding="latin-1", sample_by="line")[-1] == "Grüße"
        with pytest.raises(ValueError, match=f"{name} line 2.*0xfc.*encoding"):
            texts_of(tmp_path / name)
    for encoding in ("utf-16", "utf-16-le"):
        (tmp_path / "a.txt").write_bytes("text\nGrüße\n".encode(encoding))
        with pytest.raises(ValueError, match="a.txt.*UTF-16"):
            texts_of(tmp_path / "a.txt", on_error="skip")


@pytest.mark.parametrize("sample_by, expected", [
    ("line", ["a", "b", "", "c"]), ("paragraph", ["a\nb", "c"]), ("document", ["a\nb\n\nc"]),
    ("auto", ["a\nb", "c"]),
])  # fmt: skip
def test_a_text_is_cut_by_line_paragraph_or_not_at_all(sample_by, expected, tmp_path):
    (tmp_path / "a.txt").write_text("a\nb\n\nc\n")
    assert texts_of(tmp_path / "a.txt", sample_by=sample_by) == expected


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
    for number in (0, 3, -3):
        with pytest.raises(ValueError, match=f"text_column={number}.*1 to 2"):
            resolve_column(number, ["year", "text"])


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
    for number, _, end, _ in lines:
        rest = list(read_lines(path, position=Position(offset=end, line=number)))
        assert rest == lines[number:]


@pytest.mark.parametrize("value", [None, 3, "\ud83d"])
def test_a_cell_without_text_is_refused_by_its_address(value):
    with pytest.raises(ValueError, match="a.csv line 3: column 'text'"):
        text_of({"text": value}, "text", "a.csv line 3")


@pytest.mark.parametrize("options", [
    {"on_error": "ignore"}, {"sample_by": "lines"}, {"file_format": "xml"}, {"delimiter": ";;"},
    {"delimiter": '"'}, {"encoding": "latin-99"}, {"encoding": "utf-16"},
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
