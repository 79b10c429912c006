"One reader for each kind of table: rows by their lines, columns by name or number, with a header or without."

import csv
import io
import json

import pyarrow
import pytest
from pyarrow import parquet

from bertlab.data.readers import (
    Place,
    read_arrow,
    read_csv,
    read_json,
    read_parquet,
    read_texts,
    resolve_column,
)
from bertlab.data.sources import TextStream, iter_documents
from bertlab.finetuning.files import read_labelled

ROWS = [
    {"label": str(1 + i % 3), "title": f"Title {i}", "text": f'He said, of {i}:\n"wait"'}
    for i in range(5)
]
NEWS = [list(row.values()) for row in ROWS]


def as_csv(rows) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
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


READERS = {
    "a.csv": read_csv,
    "a.jsonl": read_json,
    "a.json": read_json,
    "a.parquet": read_parquet,
    "a.arrow": read_arrow,
}


@pytest.mark.parametrize("name", READERS)
def test_every_kind_gives_the_same_rows_columns_by_name_or_number_and_goes_on_anywhere(name, shelf):
    rows = list(READERS[name](shelf / name))
    assert [row for _, row in rows] == ROWS
    for asked in ("text", "TEXT", 3, "3", -1):
        assert [row[asked] for _, row in READERS[name](shelf / name, columns=[asked])] == [
            row["text"] for row in ROWS
        ]
        assert [text for _, text in read_texts(shelf / name, asked)] == [
            row["text"] for row in ROWS
        ]
    reader = READERS[name](shelf / name, place=(place := Place()))
    begun = [next(reader)[1] for _ in range(2)]
    assert (
        begun + [row for _, row in READERS[name](shelf / name, place=Place(**vars(place)))] == ROWS
    )


def test_labelled_files_and_plain_text_read_the_same_rows(shelf):
    for name in READERS:
        labelled = read_labelled([shelf / name])
        assert list(labelled) == ROWS and labelled["text"] == [
            text for _, text in read_texts(shelf / name, "text")
        ]
    assert read_labelled([shelf / "a.csv"]).places[:2] == ["a.csv line 2", "a.csv line 4"]


def test_a_table_without_a_header_is_read_by_numbers_everywhere(shelf):
    path, texts = shelf / "news.csv", [row["text"] for row in ROWS]
    assert [row for _, row in read_csv(path, header=False)] == [
        dict(zip("123", row)) for row in NEWS
    ]
    assert [
        document.text for document in iter_documents(str(path), "3", "auto", {}, header=False)
    ] == texts
    stream = TextStream(str(path), "3", header=False)
    begun = [next(iter(stream))]
    resumed = TextStream(str(path), "3", header=False)
    resumed.load_state_dict(stream.state_dict())
    assert begun + list(resumed) == texts
    labelled = read_labelled([path], header=False)
    assert len(labelled) == 5 and labelled.columns == ["1", "2", "3"]


@pytest.mark.parametrize("column", ["1", "text", "3"])
def test_a_missing_header_is_suspected_where_names_look_like_data(column, tmp_path):
    (tmp_path / "news.csv").write_text(
        '3,"Wall St. Bears","Short-sellers are seeing green again, said Reuters."\n1,Oslo,Votes.\n'
    )
    with pytest.raises(
        ValueError,
        match=r"news.csv: text_column.*'3' looks like data.*header=False \(header: false\)",
    ):
        list(read_texts(tmp_path / "news.csv", column))


def test_names_that_are_names_are_not_suspected():
    assert resolve_column("year", ["year", "text"]) == "year"
    assert resolve_column("2", ["1", "2", "3"]) == "2", "columns that are called by their numbers"
    with pytest.raises(ValueError, match="did you mean 'text'") as error:
        resolve_column("txet", ["year", "text"])
    assert "header" not in str(error.value)
    for number in (0, 3, -3):
        with pytest.raises(ValueError, match="from 1 to 2"):
            resolve_column(number, ["year", "text"])


def test_a_comma_outside_of_quotes_is_an_error_and_does_not_cut_the_text(tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n1,Well, well\n2,fine\n3\n4,good,,\n")
    left_out = []
    assert [text for _, text in read_texts(tmp_path / "a.csv", "text", left_out.append)] == [
        "fine",
        "good",
    ]
    assert "line 2 has 3 cells, the header has 2" in str(
        left_out[0]
    ) and "line 4: column 'text' is null" in str(left_out[1])


def test_rows_of_json_lines_may_hold_a_list_called_data(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"data": [1], "text": "a"}\n{"data": [2], "text": "b"}\n')
    assert [text for _, text in read_texts(tmp_path / "a.jsonl", "text")] == ["a", "b"]


def test_a_columns_number_counts_in_the_first_object_of_a_file_of_json_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"id": 1, "text": "a"}\n{"text": "b", "url": "http://x"}\n{"url": "y", "id": 2}\n{"text": "c"}\n'
    )
    left_out = []
    assert [text for _, text in read_texts(tmp_path / "a.jsonl", 2, left_out.append)] == [
        "a",
        "b",
        "c",
    ]
    assert len(left_out) == 1 and "line 3" in str(left_out[0]) and "text" in str(left_out[0])


@pytest.mark.parametrize("name, kept_apart", [("a.jsonl", "\n"), ("a.json", ",")])
def test_a_columns_number_counts_in_the_first_object_after_a_resume_too(tmp_path, name, kept_apart):
    "A stream that is stopped and goes on trained on the ids from there on."
    rows = [
        {"id": "0"},
        *(
            {"id": f"id {n}", "text": f"text {n}"}
            if n % 2
            else {"text": f"text {n}", "id": f"id {n}"}
            for n in range(1, 9)
        ),
    ]
    lines = kept_apart.join(map(json.dumps, rows))
    (tmp_path / name).write_text(f"[{lines}]" if kept_apart == "," else lines)
    with pytest.warns(
        UserWarning, match="columns are numbered from 1 to 1"
    ):  # the first object has no second column
        whole = list(TextStream(str(tmp_path / name), text_column="2", on_error="skip"))
    assert whole == [f"text {n}" for n in range(1, 9)]
    for stop in range(1, 8):
        stream, resumed = (
            TextStream(str(tmp_path / name), text_column="2", on_error="skip") for _ in range(2)
        )
        with pytest.warns(UserWarning):
            begun = [text for _, text in zip(range(stop), stream)]
        resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        assert begun + list(resumed) == whole


def test_a_cell_keeps_the_ends_of_its_lines(tmp_path):
    "Spans count characters: one that is lost in each line moves all that follow."
    import csv

    rows = [
        ["text", "n"],
        ["Dear Ms\r\nAnna,\r\nhello", "1"],
        ["two\nlines", "2"],
        ["old\rmac", "3"],
    ]
    for end in ("\r\n", "\n"):
        with open(tmp_path / "a.csv", "w", newline="") as file:
            csv.writer(file, lineterminator=end, quoting=csv.QUOTE_ALL).writerows(rows)
        assert [[row["text"], row["n"]] for _, row in read_csv(tmp_path / "a.csv")] == rows[1:]
