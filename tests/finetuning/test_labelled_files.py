"Files with labels are read by their own rules, and a mistake is named by its line."

import threading
import os
import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.finetuning.files import (
    choose_reader,
    find_files,
    guess_format,
    read_labelled,
    split_called,
)

CONLLU = """\
# sent_id = a-1
# text = Vámonos al mar.
1-2\tVámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tVamos\tir\tVERB\tV\tMood=Imp\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\t_\t_\t1\tobj\t_\t_
3-4\tal\t_\t_\t_\t_\t_\t_\t_\t_
3\ta\ta\tADP\tE\t_\t5\tcase\t_\t_
4\tel\tel\tDET\tD\t_\t5\tdet\t_\t_
4.1\tgran\tgrande\tADJ\tA\t_\t_\t_\t5:amod\t_
5\tmar\tmar\tNOUN\tN\t_\t1\tobl\t_\tSpaceAfter=No
6\t.\t.\tPUNCT\tF\t_\t1\tpunct\t_\t_

# sent_id = a-2
1\tNew York\tNew York\tPROPN\tN\t_\t0\troot\t_\t_
"""

CONLL = """\
-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O
# NN B-NP O

-DOCSTART- -X- -X- O

Peter NNP B-NP B-PER
"""


def save(path, text: str):
    path.write_text(text, encoding="utf-8")
    return path


def rows_of(path, file_format=None, **options):
    return read_labelled([path], file_format, **options)


# --- CoNLL-U --------------------------------------------------------------------------------------


def test_words_are_read_without_ranges_and_empty_nodes(tmp_path):
    rows = rows_of(save(tmp_path / "a.conllu", CONLLU))
    assert rows["FORM"] == [["Vamos", "nos", "a", "el", "mar", "."], ["New York"]]
    assert rows["UPOS"][0] == ["VERB", "PRON", "ADP", "DET", "NOUN", "PUNCT"]
    assert rows["DEPREL"][0] == ["root", "obj", "case", "det", "obl", "punct"]
    assert rows[0]["text"] == "Vámonos al mar." and rows[1]["sent_id"] == "a-2"
    assert rows.places == ["a.conllu line 1", "a.conllu line 13"]


def test_crlf_a_bom_and_compression_change_nothing(tmp_path):
    expected = rows_of(save(tmp_path / "a.conllu", CONLLU))
    (tmp_path / "b.conllu").write_bytes(("\ufeff" + CONLLU.replace("\n", "\r\n")).encode())
    (tmp_path / "c.conllu.gz").write_bytes(gzip.compress(CONLLU.encode()))
    for name in ("b.conllu", "c.conllu.gz"):
        assert rows_of(tmp_path / name).rows == expected.rows


words = st.lists(
    st.text(
        st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp", "Zs"]),
        min_size=1,
        max_size=6,
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(words, min_size=1, max_size=5))
def test_any_words_come_back_as_they_were_written(tmp_path_factory, sentences):
    path = tmp_path_factory.mktemp("words") / "a.conllu"
    lines = [
        "".join(f"{i}\t{word}\t_\tX" + "\t_" * 6 + "\n" for i, word in enumerate(sentence, 1))
        for sentence in sentences
    ]
    path.write_bytes("\n".join(lines).encode())
    assert rows_of(path)["FORM"] == sentences


# --- CoNLL-2003 -----------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [" ", "\t"])
def test_docstart_is_no_word_and_a_hash_is_one(separator, tmp_path):
    rows = rows_of(save(tmp_path / "eng.testa", CONLL.replace(" ", separator)), "conll2003")
    assert rows["word"] == [["EU", "rejects", "#"], ["Peter"]]
    assert rows["ner"] == [["B-ORG", "O", "O"], ["B-PER"]] and rows["pos"][0][2] == "NN"
    assert rows.places[0] == "eng.testa line 3"


def test_other_spaces_stay_in_their_word(tmp_path):
    path = save(tmp_path / "a.conll", "10\u00a0000 O\neuros  O \n\n北\u3000京 B-LOC\n")
    assert rows_of(path)["word"] == [["10\u00a0000", "euros"], ["北\u3000京"]]
    assert rows_of(path)["tag"] == [["O", "O"], ["B-LOC"]]


# --- SQuAD ----------------------------------------------------------------------------------------


def squad(*questions, context="a b a") -> dict:
    rows = [{"id": str(i), "question": "q?", **question} for i, question in enumerate(questions)]
    return {
        "version": "v2.0",
        "data": [{"title": "T", "paragraphs": [{"context": context, "qas": rows}]}],
    }


def test_questions_are_taken_out_of_their_paragraphs(tmp_path):
    content = squad(
        {"answers": [{"text": "a", "answer_start": 4}], "is_impossible": False},
        {"answers": [], "is_impossible": True},
    )
    content["data"] += squad(
        {"id": "z", "answers": [{"text": "x", "answer_start": 0}]}, context="x"
    )["data"]
    rows = rows_of(save(tmp_path / "dev.json", json.dumps(content)))
    assert rows["answers"] == [
        {"text": ["a"], "answer_start": [4]},
        {"text": [], "answer_start": []},
        {"text": ["x"], "answer_start": [0]},
    ]
    assert (
        rows["id"] == ["0", "1", "z"]
        and rows["context"] == ["a b a", "a b a", "x"]
        and rows["title"] == ["T"] * 3
    )
    assert rows.places[2] == "dev.json question 3"


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, text, words, good_rows", [
    ("a.conllu", CONLLU.replace("nos\tnosotros\tPRON\t_", "nos nosotros PRON _"), "a.conllu line 5.*7 columns", 1),
    ("a.conll", CONLL.replace("VBZ B-VP O", "B-VP O"), "a.conll line 4.*3 columns", 1),
    ("a.csv", "text,label\na,b,c\nd,e\n", "a.csv line 2", 1),
    ("a.jsonl", '{"text": "a"}\n{"text"\n', "a.jsonl line 2", 1),
    ("a.json", json.dumps(squad({"answers": []}, {"answers": [{"text": "a"}]})), "question 2.*answer_start", 1),
])  # fmt: skip
def test_a_bad_row_is_named_or_left_out(name, text, words, good_rows, tmp_path):
    path, errors = save(tmp_path / name, text), []
    with pytest.raises(ValueError, match=words):
        rows_of(path)
    assert len(rows_of(path, on_error=errors.append)) == good_rows and len(errors) == 1


# --- cells --------------------------------------------------------------------------------------


CELLS = [
    (["1", "2", "nan", ""], [1, 2, None, None]),
    (["0.5", "2", "high"], [0.5, 2, "high"]),  # the word is a mistake among fractions
    (["1", "2", "many"], ["1", "2", "many"]),  # a name among whole numbers may be meant
    (["NA", "null", " "], ["NA", "null", None]),
    (['["a", "b"]', "[]", ""], [["a", "b"], [], None]),
    (["['a', \"isn't\"]", "[]"], [["a", "isn't"], []]),  # as pandas writes lists
    (["-1", "1e3", ".5", "007.5"], [-1, 1000.0, 0.5, 7.5]),
    (["007", "7", "12"], ["007", "7", "12"]),  # codes are no numbers
]


@pytest.mark.parametrize("cells, expected", CELLS)
def test_cells_are_numbers_lists_or_names(cells, expected):
    assert list(map(choose_reader(cells), cells)) == expected


@pytest.mark.parametrize("cell", ["['a' 'b']", "[0 1]", "[x]"])
def test_other_lists_in_a_table_are_refused(cell):
    with pytest.raises(ValueError, match="list"):
        choose_reader([cell])(cell)


# --- which format, which split --------------------------------------------------------------------


@pytest.mark.parametrize("name, text, expected", [
    ("a.conllu", "", "conllu"), ("a.txt", CONLLU, "conllu"), ("a.txt", CONLL, "conll2003"), ("a.bio", "", "conll2003"),
    ("a.tsv", "text\tlabel\nx\ty\n", "csv"), ("a.txt", "Just a text.\n\nAnd more of it.\n", None), ("eng.testb", CONLL, "conll2003"),
    ("a.json", json.dumps(squad({"answers": []})), "squad"), ("a.json", '[{"text": "paragraphs"}]', "json"),
])  # fmt: skip
def test_a_format_is_known_by_name_or_contents(name, text, expected, tmp_path):
    assert guess_format(save(tmp_path / name, text)) == expected


NAMES = {"dev": "validation", "val.csv": "validation", "en_ewt-ud-test.conllu": "test", "eng.testa": "validation",
         "train-v2.0.json": "train", "latest.csv": None, "contest": None}  # fmt: skip


def test_split_names_are_understood_as_words():
    assert {name: split_called(name) for name in NAMES} == NAMES


def test_a_directory_gives_files_by_split_or_for_training(tmp_path):
    for name in ("en-train.conllu", "en-dev.conllu", "notes.txt", ".train.conllu", "other.conllu"):
        save(tmp_path / name, CONLLU if name.endswith("u") else "words of mine")
    splits = {"train": [tmp_path / "en-train.conllu"], "validation": [tmp_path / "en-dev.conllu"]}
    assert find_files(tmp_path) == splits
    assert find_files({"train": str(tmp_path / "a.csv"), "dev": []}).keys() == splits.keys()
    for name in splits.values():
        name[0].unlink()
    assert find_files(tmp_path) == {"train": [tmp_path / "other.conllu"]}


def test_a_pipe_is_opened_once(tmp_path):
    os.mkfifo(path := tmp_path / "pipe.json")
    writer = threading.Thread(target=path.write_text, args=('[{"text": "a", "label": "b"}]',))
    writer.start()
    assert list(read_labelled([path])) == [{"text": "a", "label": "b"}]
    writer.join()
