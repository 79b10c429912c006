"The record of solved exercises: its path, damaged files, and what is recorded."

import json

import numpy as np
import pytest

from bertlab.course import progress as module
from bertlab.course.progress import NOT_HERE, claim, progress, progress_path, record_check, recorded


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "progress.json"
    monkeypatch.setenv("BERTLAB_PROGRESS", str(path))
    return path


def test_a_variable_moves_the_record_or_turns_it_off(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("BERTLAB_PROGRESS", raising=False)
    assert progress_path() == tmp_path / ".local/share/bertlab/progress.json"
    monkeypatch.setenv("BERTLAB_PROGRESS", "~/mine.json")
    assert progress_path() == tmp_path / "mine.json"
    monkeypatch.setenv("BERTLAB_PROGRESS", "OFF")
    assert progress_path() is None and progress() == {} and not record_check("a", "b")


def test_recording_keeps_the_entries_before(file):
    assert progress() == {} and not file.parent.exists()
    assert record_check("course/puzzles", "near") and record_check("course/puzzles", "rise")
    assert record_check("course/optimizers", "nesterov")
    assert {page: set(checks) for page, checks in progress().items()} == {
        "course/puzzles": {"near", "rise"}, "course/optimizers": {"nesterov"}}  # fmt: skip
    assert [path.name for path in file.parent.iterdir()] == ["progress.json"], (
        "no temporary file is left"
    )


def test_the_first_day_stays(file):
    record_check("page", "check")
    content = json.loads(file.read_text())
    content["passed"]["page"]["check"] = "2020-02-29"
    file.write_text(json.dumps(content))
    assert record_check("page", "check") and progress()["page"]["check"] == "2020-02-29"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"passed": [1]}', '{"passed": {"a": 3}}', "\xff"]
)
def test_a_damaged_file_is_a_warning_and_stays(text, file):
    file.parent.mkdir()
    file.write_bytes(text.encode("latin-1"))
    with pytest.warns(UserWarning, match="progress.json"):
        assert progress() == {}
    with pytest.warns(UserWarning, match="progress.json"):
        assert record_check("page", "check") is False
    assert file.read_bytes() == text.encode("latin-1")


def test_an_unwritable_record_is_a_warning(file):
    file.parent.write_text("a file, where a folder should be")
    with pytest.warns(UserWarning, match="BERTLAB_PROGRESS"):
        assert record_check("page", "check") is False


@recorded("page")
def check_it(answer, *, loud=False):
    "Check it."
    return answer


@pytest.mark.parametrize("verdict", ["not attempted", "wrong", None, True, ["right"]])
def test_only_a_right_answer_is_recorded(verdict, file):
    assert check_it(verdict) == verdict and progress() == {}


def test_colab_uses_drive(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("BERTLAB_PROGRESS", raising=False)
    monkeypatch.setenv("COLAB_RELEASE_TAG", "x")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(module, "DRIVE", tmp_path / "MyDrive")
    assert record_check("page", "one") and "drive.mount" in capsys.readouterr().out
    (tmp_path / "MyDrive").mkdir()
    assert progress_path() == tmp_path / "MyDrive/bertlab/progress.json"
    assert record_check("page", "two") and capsys.readouterr().out == ""


def test_the_own_test_of_a_page_is_not_recorded(file):
    @recorded("page")
    def check_twice(answer):
        return "right" if answer(2) == 4 else "wrong"

    def solved(x):
        return 2 * x

    def twice(x):
        return 2 * x

    assert check_twice(solved) == "right" and progress() == {}
    assert check_twice(twice) == "right" and list(progress()["page"]) == ["twice"]


def test_a_false_claim_is_reported(monkeypatch, capsys):
    monkeypatch.delenv("BERTLAB_CLAIMS")
    assert claim(1 < 2, "so it is") is None and claim([1]) is None and capsys.readouterr().out == ""
    claim(2 < 1, "it is not")
    claim(np.array([2]) < 1)
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) == 2
        and all(line.startswith(NOT_HERE) for line in lines)
        and "it is not" in lines[0]
    )
    monkeypatch.setenv("BERTLAB_CLAIMS", "strict")
    assert claim(1 < 2) is None
    with pytest.raises(AssertionError, match="it is not"):
        claim(2 < 1, "it is not")
