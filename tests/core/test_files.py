"Files are replaced atomically, and no run overwrites another."

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from bertlab.core.files import (
    RUN_FILE,
    atomic_directory,
    atomic_write,
    check_new_output,
    check_run_directory,
    lock_directory,
    prepare_run_directory,
    recover_directory,
    write_json,
)
from bertlab.core.serialization import load_json


def names(directory):
    return sorted(path.name for path in directory.iterdir())


# ---- files ----------------------------------------------------------------------------------------


def test_an_error_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and names(tmp_path) == ["a.txt"]


def fork(work) -> int:
    "Run a function in a forked process; return the wait status."
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def kill_at(n, work, events=("os.rename", "os.remove", "os.rmdir")) -> bool:
    "Kill a process at its n-th file operation; False if it has fewer."

    def begin():
        counts = iter(range(1, n + 1))

        def watch(event, arguments):
            if event in events and next(counts) == n:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        work()

    return os.WIFSIGNALED(fork(begin))


def write_file(path, content):
    with atomic_write(path) as temporary:
        temporary.write_text(content)


@pytest.mark.parametrize("write", [write_file, lambda path, content: write_model(path, content)])
def test_a_killed_writer_leaves_the_old_content_alone(tmp_path, write):
    path = tmp_path / "a[1]"
    write(path, "old")
    assert kill_at(1, lambda: write(path, "new"))
    assert len(names(tmp_path)) == 2 and content_of(path) == "old"
    write(path, "newer")
    assert names(tmp_path) == ["a[1]"] and content_of(path) == "newer"


@pytest.mark.parametrize("write", [write_file, lambda path, content: write_model(path, content)])
def test_a_writer_spares_the_temporary_files_of_another(tmp_path, write):
    (tmp_path / ".a.mine.tmp").write_text("another program's")
    living = atomic_write if write is write_file else atomic_directory
    with living(tmp_path / "a") as temporary:
        fork(lambda: write(tmp_path / "a", "other"))
        assert temporary.exists() and content_of(tmp_path / "a") == "other"
        (temporary / "weights" if temporary.is_dir() else temporary).write_text("mine")
    assert content_of(tmp_path / "a") == "mine" and names(tmp_path) == [".a.mine.tmp", "a"]


def fail(error, cause=None):
    raise error from cause


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("errors", [(FULL,), (RuntimeError("stream failed"), FULL),
                                    (RuntimeError("I/O error: No space left on device"),)])  # fmt: skip
def test_a_full_disk_names_the_file(tmp_path, errors):
    for write in (atomic_write, atomic_directory):
        with pytest.raises(OSError) as raised, write(tmp_path / "model"):
            fail(*errors)
        assert raised.value.filename == str(tmp_path / "model") and not names(tmp_path)
        assert raised.value.errno == errno.ENOSPC


def test_permissions_are_the_old_files_or_the_usual_ones(tmp_path):
    (old := tmp_path / "secret").write_text("old")
    old.chmod(0o600)
    (usual := tmp_path / "usual").write_text("x")
    for path in (old, tmp_path / "new"):
        with atomic_write(path) as temporary:
            temporary.write_text("new")
    assert old.read_text() == "new" and old.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new").stat().st_mode == usual.stat().st_mode


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path):
    write_json(tmp_path / "m.json", {"a": [1.5, float("nan")], "b": {"c": float("inf")}})
    assert json.loads((tmp_path / "m.json").read_text()) == {"a": [1.5, None], "b": {"c": None}}


def test_json_holds_names_that_are_not_utf8(tmp_path):
    name = os.fsdecode(b"caf\xe9 \xc3\xa9.txt")
    write_json(tmp_path / "m.json", {"source": name})
    assert load_json(tmp_path / "m.json") == {"source": name}


# ---- directories ----------------------------------------------------------------------------------


def write_model(directory, content, **options):
    with atomic_directory(directory, **options) as temporary:
        (temporary / "weights").write_text(content)


def content_of(path):
    return (path / "weights" if path.is_dir() else path).read_text()


def test_a_directory_appears_complete_or_not_at_all(tmp_path):
    with pytest.raises(RuntimeError), atomic_directory(tmp_path / "a") as temporary:
        (temporary / "one").write_text("1")
        raise RuntimeError
    assert names(tmp_path) == []
    write_model(tmp_path / "a", "1")
    assert names(tmp_path / "a") == ["weights"] and names(tmp_path) == ["a"]


@pytest.mark.parametrize("keep", [True, False])
def test_user_files_stay_only_with_keep(tmp_path, keep):
    directory = tmp_path / "model"
    write_model(directory, "old")
    directory.chmod(0o750)
    (directory / "figures" / "more").mkdir(parents=True)
    (directory / "figures" / "more" / "a.txt").write_text("mine")
    (directory / "stale").write_text("old")
    (directory / "link").symlink_to("weights")
    write_model(directory, "new", keep=keep, without=["stale"])
    user_files = ["figures", "link"] if keep else []
    assert (
        names(directory) == [*user_files, "weights"]
        and (directory / "weights").read_text() == "new"
    )
    assert not keep or (directory / "figures/more/a.txt").read_text() == "mine"
    assert directory.stat().st_mode & 0o777 == 0o750 and names(tmp_path) == ["model"]


def test_a_link_to_a_directory_stays_a_link(tmp_path):
    write_model(tmp_path / "model", "old")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    write_model(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "model/weights").read_text() == "new"


def test_a_kill_at_any_step_loses_neither_model_nor_user_files(tmp_path):
    is_killed, n = True, 0
    while is_killed:
        n += 1
        directory = tmp_path / f"{n}" / "model"
        write_model(directory, "old")
        (directory / "NOTES.md").write_text("mine")
        is_killed = kill_at(n, lambda: write_model(directory, "new", keep=True))  # noqa: B023
        recover_directory(directory)
        assert (directory / "NOTES.md").read_text() == "mine"
        assert (directory / "weights").read_text() in ("old", "new")
        write_model(directory, "new", keep=True)
        assert names(directory) == ["NOTES.md", "weights"] and names(directory.parent) == ["model"]
    assert n > 4


def test_a_directory_created_in_the_meantime_stays(tmp_path):
    path = tmp_path / "model"
    with pytest.raises(FileExistsError) as refused, atomic_directory(path, new=True) as temporary:
        (temporary / "weights").write_text("new")
        path.mkdir()
        (path / "thesis.txt").write_text("x")
    (rescued,) = tmp_path.glob("model-*")
    assert names(path) == ["thesis.txt"] and names(rescued) == ["weights"]
    assert len(names(tmp_path)) == 2 and str(rescued) in str(refused.value)


# ---- run directories ------------------------------------------------------------------------------


def test_overwriting_keeps_every_earlier_run(tmp_path):
    for n in range(3):
        (tmp_path / RUN_FILE).write_text(f"steps: {n}\n")
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "mine.txt").write_text(str(n))
        prepare_run_directory(tmp_path, overwrite=True)
    notes = [(tmp_path / f"previous-{n + 1}" / "notes" / "mine.txt").read_text() for n in range(3)]
    assert notes == ["0", "1", "2"] and not (tmp_path / RUN_FILE).exists()


def test_a_run_stopped_before_its_first_step_blocks_nothing(tmp_path):
    for name in (RUN_FILE, "tokenizer/tokenizer.json", "logs/version_0/hparams.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    prepare_run_directory(tmp_path)
    (tmp_path / "history.csv").write_text("")
    with pytest.raises(ValueError, match="already holds a run"):
        prepare_run_directory(tmp_path)


@pytest.mark.parametrize("flags", [{"overwrite": True}, {}])
def test_overwriting_that_was_killed_is_completed_by_the_next_call(tmp_path, flags):
    is_killed, n = True, 0
    while is_killed:
        n += 1
        run = tmp_path / f"{n}"
        run.mkdir()
        for name in ("checkpoint", RUN_FILE, "tokenizer"):
            (run / name).write_text("old")
        is_killed = kill_at(
            n, lambda: prepare_run_directory(run, overwrite=True), ("shutil.move", "os.rename")  # noqa: B023
        )  # fmt: skip
        is_begun = not (run / "checkpoint").exists()
        prepare_run_directory(run, **flags if is_begun else {"overwrite": True})
        assert names(run / "previous-1") == ["checkpoint", RUN_FILE, "tokenizer"]
        assert not {*names(run)} - {"previous-1", ".lock"}
    assert n > 4


@pytest.mark.parametrize(
    "present, flags, word",
    [
        ("metrics.json run.yaml", {}, "--resume.*--overwrite"),
        ("metrics.json run.yaml", {"flags": "pass --resume, or "}, "pass --resume, or choose"),
        ("run.yaml", {"resume": True, "overwrite": True}, "exclude"),
        ("thesis.tex", {}, "thesis.tex"),
        ("thesis.tex", {"overwrite": True}, "thesis.tex"),
        ("thesis.tex", {"resume": True}, "nothing to resume"),
        ("", {"resume": True}, "nothing to resume"),
    ],
)
def test_runs_that_would_lose_files_are_refused(tmp_path, present, flags, word):
    for name in present.split():
        (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=word):
        check_run_directory(tmp_path, **flags)
    assert names(tmp_path) == present.split()


def test_a_run_can_be_resumed_or_overwritten(tmp_path):
    (tmp_path / RUN_FILE).write_text("steps: 1\n")
    check_run_directory(tmp_path, resume=True)
    check_run_directory(tmp_path, overwrite=True)
    check_run_directory(tmp_path / "new")
    check_run_directory(tmp_path)  # nothing was saved yet


def test_outputs_must_be_free_and_in_a_directory(tmp_path):
    (tmp_path / "taken").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("taken", "link", "taken/new"):
        with pytest.raises(ValueError, match="taken|link"):
            check_new_output(tmp_path / name)
    with pytest.raises(ValueError, match="taken is a file"):
        check_run_directory(tmp_path / "taken")
    check_new_output(tmp_path / "folder/new")
    assert not (tmp_path / "folder").exists()


# ---- locks ----------------------------------------------------------------------------------------

PROGRAM = """import sys, time
from bertlab.core.files import check_run_directory, lock_directory
try:
    check_run_directory(sys.argv[1])
    with lock_directory(sys.argv[1]):
        print("locked", flush=True)
        if "wait" in sys.argv:
            time.sleep(60)
except ValueError as error:
    print(error)
"""


def start(*words, **env) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *map(str, words)], stdout=subprocess.PIPE, text=True,
                            env={**os.environ, **env})  # fmt: skip


def output(*words, **env) -> str:
    return start(*words, **env).communicate(timeout=60)[0].strip()


def test_a_locked_directory_is_refused_until_its_process_ends(tmp_path):
    run = tmp_path / "run"
    first = start(run, "wait")
    try:
        assert first.stdout.readline() == "locked\n"
        for directory in (run, os.path.relpath(run)):
            assert "another command is at work in" in output(directory)
            with pytest.raises(ValueError, match="another command is at work in"):
                check_run_directory(directory)
        assert output(tmp_path / "other") == "locked"
        for name in ("LOCAL_RANK", "RANK", "NODE_RANK", "SLURM_PROCID"):
            assert output(run, **{name: "1"}) == "locked"  # another process of the same run
    finally:
        first.kill()
        first.wait()
    assert output(run) == "locked"


@pytest.mark.parametrize("change", ["rename", "replace"])
def test_a_directory_that_is_renamed_gets_no_more_files(tmp_path, change):
    run = tmp_path / "run"
    with lock_directory(run):
        write_file(run / "models/a", "1")
        run.rename(tmp_path / "other")
        if change == "replace":
            run.mkdir()
        for write in (write_file, write_model):
            with pytest.raises(OSError, match=f"{run} was renamed"):
                write(run / "models/b", "2")
        assert run.exists() == (change == "replace")
    write_file(run / "models/b", "2")


def test_a_process_may_lock_its_own_directory_again(tmp_path):
    with lock_directory(tmp_path):
        check_run_directory(tmp_path)
        with lock_directory(tmp_path):
            pass
        assert "another command" in output(tmp_path)
    assert output(tmp_path) == "locked"
