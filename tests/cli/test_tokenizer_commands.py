"`bertlab tokenizer`: what cannot be done is said before any work."

import pytest

from bertlab.cli import vocabularies
from bertlab.cli.main import main


def refused(command: list[str], monkeypatch, capsys) -> str:
    "The one line of a command that was refused before it read a text or a tokenizer."
    for name in ("read_text", "load_tokenizer"):
        monkeypatch.setattr(vocabularies, name, lambda *_, **__: pytest.fail("it began"))
    assert main(["tokenizer", *command]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bertlab")]
    return line


@pytest.mark.parametrize("output, said", [("folder", "is there already"), ("text.txt", "is there already"),
                                          ("text.txt/measures.json", "text.txt is a file")])  # fmt: skip
def test_a_comparison_that_cannot_be_written_is_refused_first(output, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.txt").write_text("a text")
    line = refused(["compare", str(tmp_path), "--output", str(tmp_path / output)], monkeypatch, capsys)
    assert output in line and said in line and (tmp_path / "text.txt").read_text() == "a text"


def test_a_comparison_makes_the_folders_of_its_file(tmp_path, monkeypatch):
    vocabularies.train(None, str(tmp_path / "tokenizer"), vocab_size=300)
    monkeypatch.setattr(vocabularies, "read_text", lambda *_, **__: ["a text"])
    found = vocabularies.compare([str(tmp_path / "tokenizer")], output=str(tmp_path / "new" / "measures.json"))
    assert (tmp_path / "new" / "measures.json").is_file() and len(found) == 1


def test_a_tokenizer_without_room_for_a_word_is_refused_before_its_text_is_read(tmp_path, monkeypatch, capsys):
    line = refused(["train", "--output", str(tmp_path / "new"), "--model_max_length", "0"], monkeypatch, capsys)
    assert "model_max_length must be 3 or more" in line and not (tmp_path / "new").exists()
