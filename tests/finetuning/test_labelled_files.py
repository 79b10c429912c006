"Files with labels are read by their own rules, and a mistake is named by its line."

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.data.rows import IGNORE_INDEX
from bertlab.finetuning.task import LabelNames
from bertlab.finetuning.files import (
    choose_reader,
    find_split_files,
    guess_format,
    load_hub,
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


def test_words_are_read_and_ranges_and_empty_nodes_are_none(tmp_path):
    rows = rows_of(save(tmp_path / "a.conllu", CONLLU))
    assert rows["FORM"] == [["Vamos", "nos", "a", "el", "mar", "."], ["New York"]]
    assert rows["UPOS"][0] == ["VERB", "PRON", "ADP", "DET", "NOUN", "PUNCT"]
    assert rows["DEPREL"][0] == ["root", "obj", "case", "det", "obl", "punct"]
    assert rows[0]["text"] == "Vámonos al mar." and rows[1]["sent_id"] == "a-2"
    assert rows.places == ["a.conllu line 1", "a.conllu line 13"]


def test_an_underscore_is_no_tag_where_tags_may_be_unknown_and_a_value_elsewhere(tmp_path):
    row = rows_of(save(tmp_path / "a.conllu", CONLLU))[0]
    assert row["XPOS"] == ["V", IGNORE_INDEX, "E", "D", "N", "F"] and row["FEATS"][1] == "_"
    assert LabelNames.from_data(row["XPOS"]).names == ("D", "E", "F", "N", "V")


def test_joined_words_have_the_form_of_their_token_and_all_labels(tmp_path):
    row = rows_of(save(tmp_path / "a.conllu", CONLLU), multiword="join")[0]
    assert row["FORM"] == ["Vámonos", "al", "mar", "."]
    assert row["UPOS"] == ["VERB+PRON", "ADP+DET", "NOUN", "PUNCT"]


def test_crlf_a_byte_order_mark_and_a_packed_file_change_nothing(tmp_path):
    expected = rows_of(save(tmp_path / "a.conllu", CONLLU))
    (tmp_path / "b.conllu").write_bytes(("\ufeff" + CONLLU.replace("\n", "\r\n")).encode())
    (tmp_path / "c.conllu.gz").write_bytes(gzip.compress(CONLLU.encode()))
    for name in ("b.conllu", "c.conllu.gz"):
        assert rows_of(tmp_path / name).rows == expected.rows


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("nos\tnosotros\tPRON\t_", "nos nosotros PRON _", "line 5 has 7 columns"),
        ("\n5\tmar", "\n6\tmar", "line 10 has the ID 6, where 5 is next"),
        ("\n3\ta", "\nx\ta", "line 7 has the ID 'x'"),
        ("3-4\tal", "7-8\tal", "line 1: .*words that are missing"),
    ],
)
def test_a_broken_sentence_is_named_by_line_and_can_be_left_out(old, new, words, tmp_path):
    path, errors = save(tmp_path / "a.conllu", CONLLU.replace(old, new)), []
    with pytest.raises(ValueError, match=words):
        rows_of(path)
    left = rows_of(path, on_error=errors.append)
    assert left["FORM"] == [["New York"]] and len(errors) == 1


def test_an_unknown_reader_option_is_refused(tmp_path):
    path = save(tmp_path / "a.conllu", CONLLU)
    with pytest.raises(ValueError, match="multiword"):
        rows_of(path, multiword="cut")
    with pytest.raises(ValueError, match="delimiter"):
        rows_of(path, delimiter=",")


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
def test_docstart_lines_are_no_words_and_a_hash_is_one(separator, tmp_path):
    rows = rows_of(save(tmp_path / "eng.testa", CONLL.replace(" ", separator)), "conll2003")
    assert rows["word"] == [["EU", "rejects", "#"], ["Peter"]]
    assert rows["ner"] == [["B-ORG", "O", "O"], ["B-PER"]] and rows["pos"][0][2] == "NN"
    assert rows.places[0] == "eng.testa line 3"


def test_two_columns_are_words_and_tags(tmp_path):
    rows = rows_of(save(tmp_path / "a.bio", "New York\tB-LOC\nis\tO\n\nBonn\tB-LOC\n"))
    assert rows.rows == [
        {"word": ["New York", "is"], "tag": ["B-LOC", "O"]},
        {"word": ["Bonn"], "tag": ["B-LOC"]},
    ]


def test_a_space_that_does_not_break_and_one_of_an_ideograph_s_width_stay_in_their_word(tmp_path):
    path = save(tmp_path / "a.conll", "10\u00a0000 O\neuros  O \n\n北\u3000京 B-LOC\n")
    assert rows_of(path)["word"] == [["10\u00a0000", "euros"], ["北\u3000京"]]
    assert rows_of(path)["tag"] == [["O", "O"], ["B-LOC"]]


@pytest.mark.parametrize("lines", [
    "北京\u3000B-LOC\n好\u3000O\n", "北京\u00a0B-LOC\n好 \u00a0O\n", "北京 \u00a0B-LOC\n好 \u00a0O\n", "北京\tB-LOC\u00a0\n好\tO \n",
    " 北京 B-LOC\u00a0\n好  O\u3000\n"])  # fmt: skip
def test_labels_have_no_space_of_any_kind_and_wide_spaces_part_columns_where_nothing_else_does(
    lines, tmp_path
):
    rows = rows_of(save(tmp_path / "a.conll", lines))
    assert rows.rows == [{"word": ["北京", "好"], "tag": ["B-LOC", "O"]}]


def test_a_wide_space_may_be_a_word(tmp_path):
    rows = rows_of(save(tmp_path / "a.conll", "\u3000 O\n北 B-LOC\n"))
    assert rows.rows == [{"word": ["\u3000", "北"], "tag": ["O", "B-LOC"]}]


def test_a_line_with_other_columns_is_named(tmp_path):
    path, errors = save(tmp_path / "a.conll", CONLL.replace("VBZ B-VP O", "B-VP O")), []
    with pytest.raises(ValueError, match="a.conll line 4 has 3 columns, the first word has 4"):
        rows_of(path)
    assert rows_of(path, on_error=errors.append)["word"] == [["Peter"]] and len(errors) == 1


# --- SQuAD ----------------------------------------------------------------------------------------


def squad(*questions, context="a b a") -> dict:
    made = [{"id": str(i), "question": "q?", **question} for i, question in enumerate(questions)]
    return {
        "version": "v2.0",
        "data": [{"title": "T", "paragraphs": [{"context": context, "qas": made}]}],
    }


def test_questions_are_taken_out_of_their_paragraphs(tmp_path):
    whole = squad(
        {"answers": [{"text": "a", "answer_start": 4}], "is_impossible": False},
        {"answers": [], "is_impossible": True},
    )
    whole["data"] += squad({"id": "z", "answers": [{"text": "x", "answer_start": 0}]}, context="x")[
        "data"
    ]
    rows = rows_of(save(tmp_path / "dev.json", json.dumps(whole)))
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


@pytest.mark.parametrize(
    "question, words",
    [
        ({"answers": [{"text": "a"}]}, "answer_start"),
        ({"answers": [{"text": "a", "answer_start": 0}], "is_impossible": True}, "is_impossible"),
        ({"id": "0", "answers": []}, "id '0' of another"),
    ],
)
def test_a_question_that_cannot_be_read_is_named_by_number(question, words, tmp_path):
    path = save(tmp_path / "dev.json", json.dumps(squad({"answers": []}, question)))
    with pytest.raises(ValueError, match=f"question 2.*{words}"):
        rows_of(path)


def test_json_that_is_no_squad_says_so(tmp_path):
    with pytest.raises(ValueError, match="SQuAD"):
        rows_of(save(tmp_path / "a.json", "[1]"), "squad")
    with pytest.raises(ValueError, match="a.json is not JSON"):
        rows_of(save(tmp_path / "a.json", "{"), "squad")


# --- tables ---------------------------------------------------------------------------------------


def test_a_row_of_a_table_knows_its_first_line(tmp_path):
    path = save(tmp_path / "a.csv", 'text,label\n"two\nlines",x\n\nlast,y\n')
    rows = rows_of(path)
    assert rows.places == ["a.csv line 2", "a.csv line 5"] and rows["text"] == [
        "two\nlines",
        "last",
    ]


def test_a_row_with_too_many_cells_is_named_and_may_be_left_out(tmp_path):
    path, errors = save(tmp_path / "a.csv", "text,label\na,b,c\nd,e\n"), []
    with pytest.raises(ValueError, match="a.csv line 2 has 3 cells, the header has 2"):
        rows_of(path)
    assert rows_of(path, on_error=errors.append)["text"] == ["d"] and len(errors) == 1
    with pytest.raises(ValueError, match="names a column twice"):
        rows_of(save(path, "a,a\n1,2\n"))


@pytest.mark.parametrize(
    "text",
    [
        '{"text": "a"}\n\n{"text": "b"}\n',
        '[{"text": "a"}, {"text": "b"}]',
        '{"version": "1", "data": [{"text": "a"}, {"text": "b"}]}',
    ],
)
def test_json_is_lines_a_list_or_a_list_called_data(text, tmp_path):
    assert rows_of(save(tmp_path / "a.json", text))["text"] == ["a", "b"]


def test_a_broken_line_of_json_is_named_and_may_be_left_out(tmp_path):
    path, errors = save(tmp_path / "a.jsonl", '{"text": "a"}\n{"text"\n7\n'), []
    with pytest.raises(ValueError, match="a.jsonl line 2 is not JSON"):
        rows_of(path)
    assert len(rows_of(path, on_error=errors.append)) == 1 and len(errors) == 2


@pytest.mark.parametrize(
    "cells, expected",
    [
        (["1", "2", "nan", ""], [1, 2, None, None]),
        (["0.5", "2", "high"], [0.5, 2, "high"]),  # the word is a mistake among fractions
        (["0.5", "1.5", "high"], [0.5, 1.5, "high"]),
        (["1", "2", "many"], ["1", "2", "many"]),  # a name among whole numbers may be meant
        (["NA", "null", " "], ["NA", "null", None]),
        (['["a", "b"]', "[]", ""], [["a", "b"], [], None]),
        (["['a', \"isn't\"]", "[]"], [["a", "isn't"], []]),  # as pandas writes lists
        (
            ["['a' 'b']", "[0 1]"],
            ["['a' 'b']", "[0 1]"],
        ),  # arrays stay texts, which are refused later
        (["[{1, 2}]", "['" + "[" * 300], ["[{1, 2}]", "['" + "[" * 300]),
        (["-1", "1e3"], [-1, 1000.0]),
        (["1_0"], ["1_0"]),
        (["007", "7", "0101", "12"], ["007", "7", "0101", "12"]),  # codes are no numbers
        (["+1", "-1"], ["+1", "-1"]),
        (["0", "-1", " 12 "], [0, -1, 12]),
        (["007.5", "7"], [7.5, 7]),  # amounts are
    ],
)
def test_cells_are_numbers_lists_or_names(cells, expected):
    assert list(map(choose_reader(cells), cells)) == expected


# --- which format, which split --------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("a.conllu", "", "conllu"),
        ("a.txt", CONLLU, "conllu"),
        ("a.txt", CONLL, "conll2003"),
        ("a.tsv", "word\tO\nword\tO\n\nword\tO\n", "conll2003"),
        ("a.tsv", "text\tlabel\nx\ty\n", "tsv"),
        ("a.txt", "Just a text.\n\nAnd more of it.\n", None),
        ("a.json", json.dumps(squad({"answers": []})), "squad"),
        ("a.json", '[{"text": "paragraphs"}]', "json"),
        ("eng.testb", CONLL, "conll2003"),
    ],
)
def test_a_format_is_known_by_name_and_contents(name, text, expected, tmp_path):
    assert guess_format(save(tmp_path / name, text)) == expected


@pytest.mark.parametrize(
    "name, split",
    [
        ("dev", "validation"),
        ("val.csv", "validation"),
        ("en_ewt-ud-test.conllu", "test"),
        ("eng.testa", "validation"),
        ("train-v2.0.json", "train"),
        ("latest.csv", None),
        ("contest", None),
    ],
)
def test_split_names_are_understood_as_words(name, split):
    assert split_called(name) == split


def test_a_directory_gives_files_by_split_and_ignores_the_rest(tmp_path):
    for name in (
        "en-train.conllu",
        "en-dev.conllu",
        "notes.txt",
        "README.md",
        ".train.conllu",
        "other.conllu",
    ):
        save(tmp_path / name, CONLLU if name.endswith("u") else "words of mine")
    found = find_split_files(tmp_path)
    assert {split: [path.name for path in paths] for split, paths in found.items()} == {
        "train": ["en-train.conllu"],
        "validation": ["en-dev.conllu"],
    }


def test_a_directory_without_split_names_is_for_training_and_files_may_be_named_by_split(tmp_path):
    for name in ("a.csv", "b.csv"):
        save(tmp_path / name, f"text,label\n{name},x\n")
    assert read_labelled(find_split_files(tmp_path)["train"])["text"] == ["a.csv", "b.csv"]
    assert find_split_files(
        {"train": str(tmp_path / "a.csv"), "dev": tmp_path / "b.csv"}
    ).keys() == {"train", "validation"}


def test_an_unknown_format_lists_the_known(tmp_path):
    with pytest.raises(ValueError, match="csv.*conllu.*squad"):
        rows_of(save(tmp_path / "a.txt", "text"))


# --- answers --------------------------------------------------------------------------------------


def test_a_paragraph_without_a_context_is_said_to_lack_it(tmp_path):
    whole = squad({"answers": []})
    whole["data"][0]["paragraphs"][0]["text"] = whole["data"][0]["paragraphs"][0].pop("context")
    with pytest.raises(
        ValueError, match=r"has no 'context'; .* those of its paragraph \['qas', 'text'\]"
    ):
        rows_of(save(tmp_path / "a.json", json.dumps(whole)), "squad")


def test_a_file_has_no_configurations(tmp_path):
    path = save(tmp_path / "a.csv", "text,label\na,b\n")
    with pytest.raises(
        ValueError, match="is a file, and dataset_config_name='en' is for datasets of a hub"
    ):
        load_hub(str(path), "en")
