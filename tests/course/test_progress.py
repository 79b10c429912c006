"The record of solved exercises: where it lies, what it survives, and that nothing depends on it."

import json
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from bertlab.course import progress as module
from bertlab.course.progress import NOT_HERE, claim, progress, progress_path, record_check, recorded


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "progress.json"
    monkeypatch.setenv("BERTLAB_PROGRESS", str(path))
    return path


@pytest.mark.parametrize(
    "system, variables, wanted",
    [
        ("linux", {}, ".local/share/bertlab/progress.json"),
        ("linux", {"XDG_DATA_HOME": "{home}/else"}, "else/bertlab/progress.json"),
        ("linux", {"XDG_DATA_HOME": "relative"}, ".local/share/bertlab/progress.json"),
        ("darwin", {}, "Library/Application Support/bertlab/progress.json"),
        ("win32", {}, "AppData/Local/bertlab/progress.json"),
        ("win32", {"LOCALAPPDATA": "{home}/L"}, "L/bertlab/progress.json"),
        ("linux", {"BERTLAB_PROGRESS": "{home}/mine.json"}, "mine.json"),
        ("linux", {"BERTLAB_PROGRESS": "~/mine.json"}, "mine.json"),
    ],
)
def test_the_file_lies_where_the_system_keeps_data_of_programs(
    system, variables, wanted, tmp_path, monkeypatch
):
    for name in ("BERTLAB_PROGRESS", "XDG_DATA_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", system)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(home=tmp_path))
    assert progress_path() == tmp_path / wanted


def test_nothing_is_written_when_turned_off(monkeypatch):
    monkeypatch.setenv("BERTLAB_PROGRESS", "OFF")
    assert progress_path() is None and progress() == {} and not record_check("a", "b")

    def homeless():
        raise RuntimeError("no home")

    monkeypatch.delenv("BERTLAB_PROGRESS")
    monkeypatch.setattr(Path, "home", homeless)
    assert progress_path() is None and not record_check("a", "b")


def test_reading_creates_nothing_and_recording_keeps_what_is_there(file):
    assert progress() == {} and not file.parent.exists()
    assert record_check("course/puzzles", "near") and record_check("course/puzzles", "rise")
    assert record_check("walkthroughs/02_optimizers", "nesterov")
    assert {page: set(checks) for page, checks in progress().items()} == {
        "course/puzzles": {"near", "rise"}, "walkthroughs/02_optimizers": {"nesterov"}}  # fmt: skip
    assert [path.name for path in file.parent.iterdir()] == ["progress.json"], (
        "no temporary file is left"
    )


def test_the_first_day_stays(file):
    record_check("page", "check")
    content = json.loads(file.read_text())
    content["passed"]["page"]["check"] = "2020-02-29"
    file.write_text(json.dumps(content))
    assert record_check("page", "check") and progress()["page"]["check"] == "2020-02-29"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": 1}', '{"format": 2, "passed": {}}',
                                  '{"format": 1, "passed": [1]}', '{"format": 1, "passed": {"a": 3}}', "\xff"])  # fmt: skip
def test_a_damaged_file_is_a_warning_and_stays_as_it_is(text, file):
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
    "What it says."
    return answer


@pytest.mark.parametrize("verdict", ["not attempted", "wrong", None, True, ["right"]])
def test_only_a_right_answer_is_recorded(verdict, file):
    assert check_it(verdict) == verdict and progress() == {}


def test_a_recorded_check_is_the_same_function(file):
    assert check_it("right", loud=True) == "right" and list(progress()["page"]) == ["it"]
    assert check_it.__name__ == "check_it" and check_it.__doc__ == "What it says."


def test_an_error_of_the_reader_passes_through_a_recorded_check(file):
    @recorded("page")
    def check_error():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        check_error()
    assert progress() == {}


def test_colab_uses_drive_or_warns_once(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("BERTLAB_PROGRESS", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("COLAB_RELEASE_TAG", "x")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(module, "DRIVE", tmp_path / "MyDrive")
    monkeypatch.setattr(module, "_told_colab", [])
    record_check("page", "one")
    record_check("page", "two")
    assert capsys.readouterr().out.count("Drive") >= 1 and progress_path().is_relative_to(
        tmp_path / ".local"
    )
    record_check("page", "three")
    assert capsys.readouterr().out == ""
    (tmp_path / "MyDrive").mkdir()
    assert progress_path() == tmp_path / "MyDrive/bertlab/progress.json"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert record_check("page", "four") and list(progress()["page"]) == ["four"]


def test_the_tests_themselves_leave_the_readers_file_alone():
    assert os.environ["BERTLAB_PROGRESS"] == "off"


def test_a_page_that_tests_its_own_check_is_not_the_readers_work(file):
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
    told = capsys.readouterr().out.splitlines()
    assert (
        len(told) == 2
        and all(line.startswith(NOT_HERE) for line in told)
        and "it is not" in told[0]
    )
    monkeypatch.setenv("BERTLAB_CLAIMS", "strict")
    assert claim(1 < 2) is None
    with pytest.raises(AssertionError, match="it is not"):
        claim(2 < 1, "it is not")
