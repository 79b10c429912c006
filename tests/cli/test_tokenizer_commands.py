"`bertlab tokenizer`: what cannot be done is said before any work."

from contextlib import nullcontext

import pytest

from bertlab.cli import vocabularies
from bertlab.cli.main import main
from bertlab.data.tokenizers import load_tokenizer
from bertlab.model.config import bert_tiny
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model
from bertlab.train.initialization import config_from_tokenizer


def refused(command: list[str], monkeypatch, capsys) -> str:
    "The one line of a command that was refused before it read a text or a tokenizer."
    for name in ("read_text", "load_tokenizer"):
        monkeypatch.setattr(vocabularies, name, lambda *_, **__: pytest.fail("it began"))
    assert main(["tokenizer", *command]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bertlab")]
    return line


@pytest.mark.parametrize("output, part", [("folder", "already exists"), ("text.txt", "already exists"),
                                          ("text.txt/measures.json", "text.txt is a file")])  # fmt: skip
def test_a_comparison_that_cannot_be_written_is_refused_first(
    output, part, tmp_path, monkeypatch, capsys
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.txt").write_text("a text")
    line = refused(
        ["compare", str(tmp_path), "--output", str(tmp_path / output)], monkeypatch, capsys
    )
    assert output in line and part in line and (tmp_path / "text.txt").read_text() == "a text"


def test_a_comparison_makes_the_folders_of_its_file(tmp_path, monkeypatch):
    vocabularies.train(None, str(tmp_path / "tokenizer"), vocab_size=300)
    monkeypatch.setattr(vocabularies, "read_text", lambda *_, **__: ["a text"])
    found = vocabularies.compare(
        [str(tmp_path / "tokenizer")], output=str(tmp_path / "new" / "measures.json")
    )
    assert (tmp_path / "new" / "measures.json").is_file() and len(found) == 1


@pytest.mark.parametrize("positions", [64, 128])
def test_a_comparison_notes_shorter_rows(positions, tmp_path, capsys):
    tokenizer = load_tokenizer(
        vocabularies.train(None, str(tmp_path / "tokenizer"), vocab_size=300)
    )
    config = bert_tiny(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1,
                       max_position_embeddings=positions, **config_from_tokenizer(tokenizer, {}))  # fmt: skip
    save_model(BertLabForMaskedLM(config), tokenizer, tmp_path / "model")
    (tmp_path / "text.txt").write_text("a text of a few words and letters\n" * 40)
    capsys.readouterr()
    measures = vocabularies.compare(
        [str(tmp_path / "model"), str(tmp_path / "tokenizer")], str(tmp_path / "text.txt")
    )
    assert measures[str(tmp_path / "model")]["bits_per_byte"] > 0
    notes = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("|")]
    assert len(notes) == (positions < 128) and all("rows of 64 tokens" in line for line in notes)


def test_a_tokenizer_without_room_for_a_word_is_refused(tmp_path, monkeypatch, capsys):
    line = refused(
        ["train", "--output", str(tmp_path / "new"), "--model_max_length", "0"], monkeypatch, capsys
    )
    assert "model_max_length=0" in line and not (tmp_path / "new").exists()


def test_a_comparison_names_a_tokenizer_that_changes_the_text(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("나는 학교에 갑니다 그리고 집에 옵니다\n" * 40)
    for name, strip in (("kept", None), ("stripped", True)):
        with pytest.warns(UserWarning) if strip is None else nullcontext():
            vocabularies.train(
                [str(tmp_path / "text.txt")], str(tmp_path / name), strip_accents=strip
            )
    capsys.readouterr()
    vocabularies.compare(
        [str(tmp_path / "kept"), str(tmp_path / "stripped")], str(tmp_path / "text.txt")
    )
    (note,) = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("|")]
    assert "2.31" in note and "do not compare" in note
