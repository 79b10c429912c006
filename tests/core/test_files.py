"""Files are whole or untouched, and no run lands on another."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bertlab.cli.main import join_family, main
from bertlab.cli.options import COMMANDS
from bertlab.core import files
from bertlab.core.files import (
    RUN_FILE,
    check_output_file,
    check_run_directory,
    directories_kept,
    prepare_run_directory,
    atomic_directory,
    atomic_write,
)

needs_locks = pytest.mark.skipif(files._fcntl is None, reason="needs fcntl, which Windows lacks")


def test_an_error_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_written_again_keeps_its_permissions(tmp_path):
    (path := tmp_path / "secret").write_text("old")
    path.chmod(0o600)
    with atomic_write(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o600


def test_a_drive_without_permissions_takes_a_file_again(tmp_path, monkeypatch):
    (path := tmp_path / "a.txt").write_text("old")
    monkeypatch.setattr(
        "shutil.copymode", lambda *_: (_ for _ in ()).throw(PermissionError("no such thing here"))
    )
    with atomic_write(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"


def test_a_place_that_may_not_be_looked_into_is_refused_in_a_line(tmp_path, monkeypatch):
    def closed(self):
        raise PermissionError(f"13: {self}")

    monkeypatch.setattr(Path, "exists", closed)
    monkeypatch.setattr(Path, "is_dir", closed)
    monkeypatch.setattr(
        os.path, "exists", lambda path: not str(path).startswith(f"{tmp_path}{os.sep}")
    )
    monkeypatch.setattr(os, "access", lambda *_: False)
    for check in (check_run_directory, check_output_file):
        with pytest.raises(ValueError, match="cannot be written to; choose another directory"):
            check(tmp_path / "closed" / "run")


def test_what_a_kill_left_behind_a_link_is_put_back(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "model")
    (tmp_path / ".model.replaced").mkdir()
    (tmp_path / ".model.replaced" / "mine.txt").write_text("mine")
    with atomic_directory(tmp_path / "link", keep=True) as temporary:
        (temporary / "new.txt").write_text("new")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["mine.txt", "new.txt"]
    assert (tmp_path / "link").is_symlink()


@needs_locks
def test_windows_writes_directories_too(tmp_path, monkeypatch):
    "It opens no directory, and flushes what is open for writing alone."
    flags = lambda file: files._fcntl.fcntl(file, files._fcntl.F_GETFL) & os.O_ACCMODE  # noqa: E731
    opened, flushed, seen = os.open, os.fsync, []

    def open_(path, *rest, **more):
        if (
            os.path.isdir(path) and sys._getframe(1).f_code.co_filename == files.__file__
        ):  # no rmtree, which may on Linux
            raise PermissionError(13, "Permission denied")
        return opened(path, *rest, **more)

    def fsync(file):
        if flags(file) == os.O_RDONLY:
            raise OSError(9, "Bad file descriptor")
        seen.append(file)
        flushed(file)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(files, "sys", SimpleNamespace(platform="win32"), raising=False)
    monkeypatch.setattr(files, "_exchange", lambda *_: False)
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path).stat().st_mode & 0o200
    )  # root may write anywhere
    for content in ("old", "new"):
        with atomic_directory(tmp_path / "model") as place:
            (place / "weights").write_text(content)
            (place / "read only").write_text(content)
            (place / "read only").chmod(0o400)
            (place / "adapter").mkdir()
        assert (tmp_path / "model/weights").read_text() == content
    assert len(seen) == 2 and [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts the open files of Linux")
def test_a_disk_that_fails_leaves_no_file_open(tmp_path, monkeypatch):
    monkeypatch.setattr(
        os, "fsync", lambda file: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    )
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError), atomic_directory(tmp_path / "model") as place:
        (place / "weights").write_text("new")
    assert len(os.listdir("/proc/self/fd")) == before and not list(tmp_path.iterdir())


def test_a_kill_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    code = (
        "import os, signal, sys\nfrom bertlab.core.files import atomic_write\n"
        "with atomic_write(sys.argv[1]) as t:\n"
        "    t.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    status = subprocess.run([sys.executable, "-c", code, path]).returncode
    assert status == -signal.SIGKILL and path.read_text() == "old"


def test_written_files_have_the_usual_permissions(tmp_path):
    with atomic_write(tmp_path / "a") as temporary:
        temporary.write_text("x")
    (tmp_path / "b").write_text("x")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_run_is_refused_where_one_is_unless_resumed_or_overwritten(tmp_path):
    (tmp_path / RUN_FILE).write_text("steps: 1\n")
    with pytest.raises(ValueError, match="--resume.*--overwrite"):
        check_run_directory(tmp_path)
    check_run_directory(tmp_path, resume=True)
    check_run_directory(tmp_path, overwrite=True)


def test_overwriting_keeps_every_earlier_file(tmp_path):
    for n in range(3):
        (tmp_path / RUN_FILE).write_text(f"steps: {n}\n")
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "mine.txt").write_text(str(n))
        prepare_run_directory(tmp_path, overwrite=True)
    kept = [(tmp_path / f"previous-{n + 1}" / "notes" / "mine.txt").read_text() for n in range(3)]
    assert kept == ["0", "1", "2"] and not (tmp_path / RUN_FILE).exists()


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
def test_somebody_elses_files_are_never_touched(tmp_path, flags):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError):
        prepare_run_directory(tmp_path, **flags)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_resume_is_not_offered_where_nothing_can_be_resumed(tmp_path):
    (tmp_path / RUN_FILE).write_text("")
    with pytest.raises(ValueError, match="--overwrite") as refused:
        check_run_directory(tmp_path, can_resume=False, option="--run.output")
    assert "--resume" not in str(refused.value) and "another --run.output" in str(refused.value)


@pytest.mark.parametrize("words", [
    ["tokenizer", "train", "--output", "DIR"], ["tokenizer", "extend", "model", "DIR"], ["tokenizer", "trim", "model", "DIR"],
    ["tokenizer", "transplant", "model", "tokenizer", "DIR"], ["tune", "plan.yaml", "--output", "DIR"], ["demo", "--output", "DIR"],
])  # fmt: skip
def test_a_command_that_finds_a_run_in_its_place_offers_only_flags_that_it_has(
    words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RUN_FILE).write_text("")
    (tmp_path / "plan.yaml").write_text("")
    assert main([word.replace("DIR", "run") for word in words]) == 2
    said, command = capsys.readouterr().err, COMMANDS[join_family(words)[0]]
    assert "run already holds a run" in said and "another --output" in said
    assert ("--overwrite" in said, "--resume" in said) == (
        bool(command.overwrite),
        bool(command.resume),
    )


PROGRAM = """import os, sys, time
from bertlab.core.files import check_run_directory, directories_kept, prepare_run_directory
try:
    with directories_kept():
        prepare_run_directory(sys.argv[1], resume="resume" in sys.argv)
        open(os.path.join(sys.argv[1], "run.yaml"), "a").close()
        if "fork" in sys.argv and os.fork() == 0:
            sys.stdout.close(), time.sleep(20), os._exit(0)
        print("at work", flush=True)
        if "wait" in sys.argv:
            time.sleep(60)
except ValueError as error:
    print(error)
"""


def begin(*words, **env) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *map(str, words)], stdout=subprocess.PIPE, text=True,
                            env={**os.environ, **env})  # fmt: skip


def said(*words, **env) -> str:
    return begin(*words, **env).communicate(timeout=60)[0].strip()


@needs_locks
def test_a_directory_that_a_command_works_in_is_refused_until_that_command_ends(tmp_path):
    place = tmp_path / "run"
    first = begin(place, "wait")
    try:
        assert first.stdout.readline() == "at work\n"
        for directory in (place, os.path.relpath(place)):
            assert "another command is at work in" in said(directory, "resume")
            with pytest.raises(ValueError, match="another command is at work in"):
                check_run_directory(directory, resume=True)
        assert said(place / "inside") == "at work"  # another place is another's
        for name in (
            "LOCAL_RANK",
            "RANK",
            "NODE_RANK",
            "SLURM_PROCID",
        ):  # another process of the same command
            assert said(place, "resume", **{name: "1"}) == "at work"
    finally:
        first.kill()
        first.wait()
    assert said(place, "resume") == "at work"


@needs_locks
def test_a_worker_that_outlives_its_command_keeps_nobody_out(tmp_path):
    place = tmp_path / "run"
    first = begin(place, "wait", "fork")
    assert first.stdout.readline() == "at work\n"
    first.kill()
    first.wait()
    assert said(place, "resume") == "at work"


@needs_locks
def test_places_inside_a_kept_directory_take_no_lock_of_their_own(tmp_path):
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    with directories_kept():
        for place in (tmp_path / "run", tmp_path / "run" / "seed-0", tmp_path / "run" / "seed-1"):
            prepare_run_directory(place)
        (tmp_path / "run" / RUN_FILE).touch()
        assert len(files._kept) == 1
        with directories_kept():  # a command within a command
            prepare_run_directory(tmp_path / "run", resume=True)
        assert len(files._kept) == 1
    assert not files._kept and (before is None or len(os.listdir("/proc/self/fd")) == before)
    prepare_run_directory(tmp_path / "other")  # in Python nobody is kept out
    assert not files._kept


def test_a_drive_without_locks_keeps_nobody_out(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(files, "_fcntl", SimpleNamespace(flock=refuse, LOCK_EX=2, LOCK_NB=4))
    with directories_kept():
        prepare_run_directory(tmp_path / "run")
    monkeypatch.setattr(files, "_fcntl", None)
    with directories_kept():
        prepare_run_directory(tmp_path / "another")


@needs_locks
def test_one_process_of_several_keeps_the_directory_of_all(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with directories_kept():
        prepare_run_directory(tmp_path / "run")
        assert not files._kept


def test_every_command_keeps_its_directory(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("bertlab.cli.main._run", lambda words: seen.append(files._keeping))
    main(["pretrain"])
    assert seen == [True] and not files._keeping


def test_a_file_in_the_directorys_place_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        check_run_directory(tmp_path / "out")


def test_a_new_file_needs_a_free_name_in_a_directory(tmp_path):
    (tmp_path / "taken").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for name, word in (
        ("taken", "there already"),
        ("link", "there already"),
        ("taken/new", "taken is a file"),
    ):
        with pytest.raises(ValueError, match=word):
            check_output_file(tmp_path / name)
    check_output_file(tmp_path / "folder/new")
    assert not (tmp_path / "folder").exists()


def test_resume_and_overwrite_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match="exclude"):
        check_run_directory(tmp_path, resume=True, overwrite=True)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="permissions"):
        prepare_run_directory(tmp_path)


def test_what_appears_in_a_new_place_in_the_meantime_stays(tmp_path):
    "A directory, a file or a link to nowhere: what was written lies beside it, whole, and the message says where."
    for put in (lambda: (place.mkdir(), (place / "thesis.txt").write_text("x")), lambda: place.write_text("x"),
                lambda: place.symlink_to("nowhere")):  # fmt: skip
        home = tmp_path / str(len(list(tmp_path.iterdir())))
        place = home / "model"
        with (
            pytest.raises(ValueError, match="in the meantime") as told,
            atomic_directory(place, new=True) as inside,
        ):
            (inside / "weights").write_text("new")
            put()
        (beside,) = home.glob("model-*")
        assert str(beside) in str(told.value) and (beside / "weights").read_text() == "new"
        assert {path.name for path in home.iterdir()} == {"model", beside.name}
        assert (
            place.is_symlink()
            or [*(place.iterdir() if place.is_dir() else [place])][0].read_text() == "x"
        )


def test_two_who_write_to_one_new_place_leave_each_other_alone(tmp_path):
    with (
        pytest.raises(ValueError, match="in the meantime"),
        atomic_directory(tmp_path / "a", new=True) as one,
    ):
        (one / "one").write_text("1")
        with atomic_directory(tmp_path / "a", new=True) as other:
            (other / "two").write_text("2")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["two"]
    assert len(list(tmp_path.iterdir())) == 2 and len(list(tmp_path.glob("a-*/one"))) == 1


def test_links_of_a_logger_and_of_earlier_runs_do_not_stop_a_resume(tmp_path):
    (tmp_path / "outside").write_text("x")
    run = tmp_path / "run"
    for place in ("logs/wandb/run-1/logs", "previous-1/logs", "checkpoints"):
        (run / place).mkdir(parents=True)
    (run / RUN_FILE).write_text("")
    for place in ("logs/wandb/run-1/logs/debug-core.log", "previous-1/logs/x"):
        (run / place).symlink_to(tmp_path / "outside")
    check_run_directory(run, resume=True)
    for place in ("logs/metrics.csv", "checkpoints/wandb", "logs/wandb2"):
        (run / place).symlink_to(tmp_path / "outside")
        with pytest.raises(ValueError, match="leads out of"):
            check_run_directory(run, resume=True)
        (run / place).unlink()
