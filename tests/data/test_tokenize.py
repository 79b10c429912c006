"Text becomes the same shards on any number of processes; what is stopped goes on; what is asked for wrongly is named."

import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT
from test_files import fork, kill_at

from bertlab.core import files
from bertlab.core.files import atomic_write, lock_directory
from bertlab.data import tokenize as module
from bertlab.data.tokens import load_tokens
from bertlab.data.readers import ReadOptions
from bertlab.data.tokenize import find_parts, read_part, tokenize_dataset
from bertlab.data.tokenizers import load_tokenizer, train_tokenizer

SLURM = {"time": "01:00:00", "partition": "cpu"}
TEXTS = [f"Document {n} tells of {n * 7 % 50} things, " + "and more " * (n % 9) for n in range(600)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    "Five files of lines, and a tokenizer."
    folder = tmp_path_factory.mktemp("text")
    train_tokenizer(TEXTS, 300).save_pretrained(folder / "tokenizer")
    (folder / "text").mkdir()
    for n in range(5):
        lines = [json.dumps({"text": text_line}) for text_line in TEXTS[n * 120 : (n + 1) * 120]]
        (folder / "text" / f"{n}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", (8_000, 9_000))
    monkeypatch.setattr(module, "PART_ROWS", 50)


def expected(folder, texts=TEXTS) -> list[list[int]]:
    return load_tokenizer(folder / "tokenizer")(texts, add_special_tokens=False).input_ids


def made(folder, output, source="text", **options):
    return tokenize_dataset(
        str(folder / source), folder / "tokenizer", output, progress=False, **options
    )


def files_of(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(directory).glob("*.arrow")}


def test_any_number_of_processes_writes_the_same_bytes(text, tmp_path):
    manifests = [made(text, tmp_path / str(n), num_proc=n) for n in (1, 2, 7)]
    assert manifests[0] == manifests[1] == manifests[2] and manifests[0]["parts"] == 5
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2") == files_of(tmp_path / "7")
    assert [d.tolist() for d in load_tokens(tmp_path / "2")] == expected(text)


def test_other_text_is_refused_or_appended(text, tmp_path, monkeypatch):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.txt").write_text("One more line.\nAnd another.\n")
    out = tmp_path / "out"
    first = made(text, out)
    monkeypatch.setattr(module, "_run_locally", lambda *a: pytest.fail("tokenized again"))
    assert made(text, out) == first
    monkeypatch.undo()
    with pytest.raises(ValueError, match="--append"):
        tokenize_dataset(str(tmp_path / "more"), text / "tokenizer", out)
    before = files_of(out)
    appended = tokenize_dataset(str(tmp_path / "more"), text / "tokenizer", out, append=True)
    again = tokenize_dataset(str(tmp_path / "more"), text / "tokenizer", out, append=True)
    assert appended == again and before.items() < files_of(out).items()
    assert [d.tolist() for d in load_tokens(out)][-2:] == expected(
        text, ["One more line.", "And another."]
    )
    train_tokenizer(TEXTS[:50], 200).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="another tokenizer"):
        tokenize_dataset(str(text / "text" / "0.jsonl"), tmp_path / "other", out, append=True)
    anew = tokenize_dataset(str(tmp_path / "more"), text / "tokenizer", out, overwrite=True)
    assert anew["documents"] == 2 and len(files_of(out)) == 1


def write_parquet(folder: Path) -> None:
    "Two files as datatrove and `datasets` write them: text, id, metadata."
    import pyarrow
    from pyarrow import parquet

    (folder / "data").mkdir(parents=True)
    for n in range(2):
        shard_texts = TEXTS[n * 60 : (n + 1) * 60]
        table = {
            "text": shard_texts,
            "id": [f"{n}/{i}" for i in range(60)],
            "metadata": [{"url": "x"}] * 60,
        }
        parquet.write_table(
            pyarrow.table(table), folder / "data" / f"train-{n:05d}-of-00002.parquet"
        )


def test_layouts_of_others_are_read(text, tmp_path):
    import datasets

    write_parquet(tmp_path / "hub")
    tokenize_dataset(str(tmp_path / "hub"), text / "tokenizer", tmp_path / "a")
    assert [ids.tolist() for ids in load_tokens(tmp_path / "a")] == expected(text, TEXTS[:120])
    datasets.Dataset.from_dict({"text": TEXTS[:130]}).save_to_disk(tmp_path / "saved")
    assert len(find_parts(str(tmp_path / "saved"))) == 3
    tokenize_dataset(str(tmp_path / "saved"), text / "tokenizer", tmp_path / "b", num_proc=2)
    assert [ids.tolist() for ids in load_tokens(tmp_path / "b")] == expected(text, TEXTS[:130])


@pytest.mark.parametrize("column", ["Text", "text", "2"])
def test_a_dataset_column_is_named_in_any_case_or_by_number(text, tmp_path, column):
    import datasets

    texts = [*TEXTS[:60], None, *TEXTS[60:80]]
    datasets.Dataset.from_dict({"id": list(range(81)), "Text": texts}).save_to_disk(
        tmp_path / "saved"
    )
    options = dict(text_column=column, num_proc=1, progress=False)
    with pytest.raises(ValueError, match="row 61: column .* is null.*skip"):
        tokenize_dataset(str(tmp_path / "saved"), text / "tokenizer", tmp_path / "a", **options)
    result = tokenize_dataset(
        str(tmp_path / "saved"), text / "tokenizer", tmp_path / "b", on_error="skip", **options
    )
    assert [d.tolist() for d in load_tokens(tmp_path / "b")] == expected(text, TEXTS[:80])
    assert list(result["notes"].values()) == [1]


def test_filters_leave_out_what_they_say_also_after_a_stop(text, tmp_path, monkeypatch):
    (tmp_path / "my_own_filter.py").write_text(
        "def keep(text):\n    return 'and more' not in text\n"
    )
    monkeypatch.chdir(tmp_path)
    result = made(text, tmp_path / "out", filters=["my_own_filter.keep"], num_proc=1)
    retained = [text_line for text_line in TEXTS if "and more" not in text_line]
    assert [d.tolist() for d in load_tokens(tmp_path / "out")] == expected(text, retained)
    assert result["notes"] == {"left out by my_own_filter.keep": len(TEXTS) - len(retained)}
    pytest.importorskip("datatrove")
    short = made(text, tmp_path / "gopher", filters=["gopher_quality"], num_proc=2)
    assert short["documents"] + short["notes"].get("left out by gopher_quality", 0) == len(TEXTS)


def test_near_duplicates_across_parts_are_left_out_but_for_one(text, tmp_path):
    pytest.importorskip("datatrove")
    lots = random.Random(0)
    words = [
        "".join(lots.choices("abcdefghij", k=6)) for _ in range(500)
    ]  # numbers would be made equal
    originals = [" ".join(lots.choices(words, k=80)) for _ in range(30)]
    copies = [text_line + " end" for text_line in originals[:12]]
    (tmp_path / "text").mkdir()
    for n, shard_texts in enumerate((originals[:15], originals[15:], copies)):
        (tmp_path / "text" / f"{n}.txt").write_text("\n".join(shard_texts) + "\n")
    result = tokenize_dataset(
        str(tmp_path / "text"),
        text / "tokenizer",
        tmp_path / "out",
        near_duplicates=True,
        num_proc=2,
    )
    assert result["notes"]["left out as near duplicates"] == 12 and result["documents"] == 30


FAKE_SBATCH = """#!/bin/bash
# Runs each task of the array at once, as a cluster would, and says the job's number.
script="${@: -1}"
array=$(grep -oE -- '--array=[0-9]+-[0-9]+' "$script" | grep -oE '[0-9]+-[0-9]+')
for n in $(seq ${array%-*} ${array#*-}); do SLURM_ARRAY_TASK_ID=$n SLURM_JOB_ID=1 SLURM_NODELIST=localhost bash "$script" >> "$(dirname "$0")/log" 2>&1; done
echo "Submitted batch job $$"
"""


@pytest.mark.slow
def test_a_slurm_cluster_gives_the_same_shards(text, tmp_path, monkeypatch):
    pytest.importorskip("datatrove")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(FAKE_SBATCH)
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    srun = '#!/bin/bash\nshift 3  # -l -n 1\nexec "$@"\n'
    for name, script in (
        ("srun", srun),
        ("scontrol", "#!/bin/bash\necho localhost\n"),
    ):  # show hostnames LIST
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    queued = made(text, tmp_path / "slurm", executor="slurm", executor_options=SLURM)
    made(text, tmp_path / "local", num_proc=1)
    assert queued["queued"] == 5
    assert files_of(tmp_path / "slurm") == files_of(tmp_path / "local"), (
        tmp_path / "bin" / "log"
    ).read_text()[-2000:]
    assert len(load_tokens(tmp_path / "slurm")) == len(TEXTS)


def test_a_ray_cluster_s_job_is_done_when_it_returns(text, tmp_path, monkeypatch):
    ray = pytest.importorskip("datatrove.executor.ray")
    from datatrove.executor import LocalPipelineExecutor

    class FakeRay(LocalPipelineExecutor):
        "Like datatrove's for Ray, it returns when all tasks have ended, well or not."

        def run(self):
            for rank in range(self.tasks):
                with contextlib.suppress(ValueError):
                    self._run_for_rank(rank)

    monkeypatch.setattr(ray, "RayPipelineExecutor", FakeRay)
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    out, tokenize_part = tmp_path / "out", module.tokenize_part

    def fail_once(job, part):
        if part == 2 and not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise ValueError("a disk was away")
        tokenize_part(job, part)

    monkeypatch.setattr(module, "tokenize_part", fail_once)
    with pytest.raises(ChildProcessError, match="1 of 5 tasks.*tokens.*logs"):
        made(text, out, executor="ray")
    assert made(text, out, executor="ray")["documents"] == len(TEXTS)
    made(text, tmp_path / "local", num_proc=1)
    assert files_of(out) == files_of(tmp_path / "local")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"filters": ["gofer_quality"]}, "did you mean 'gopher_quality'"),
        ({"executor": "cloud"}, "executor='cloud'"),
        ({"num_proc": 0}, "num_proc=0"),
        ({"file_tokens": 0}, "file_tokens=0"),
        ({"file_format": "pdf"}, "file_format"),
        ({"on_error": "maybe"}, "on_error"),
        ({"sample_by": "words"}, "sample_by.*'words'"),
        ({"split": "train[:1%]"}, "split"),
        ({"config_name": "en"}, "config_name"),
        ({"append": True, "overwrite": True}, "append"),
        ({"executor": "slurm"}, "time and partition"),
        (
            {"executor": "slurm", "executor_options": {**SLURM, "nodes": 2}},
            "executor_options.*nodes",
        ),
        ({"executor": "slurm", "executor_options": SLURM}, "sbatch"),
        (
            {"executor": "ray", "executor_options": {"time": 9, "qos": "low"}},
            "executor_options.*qos",
        ),
        ({"executor": "ray"}, r"bertlab-encoders\[ray\]"),
        ({"near_duplicates": True, "executor_options": {"tasks": 2}}, "executor_options.*tasks"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(text, tmp_path, monkeypatch, options, words):
    if {"executor", "near_duplicates"} & options.keys():
        pytest.importorskip("datatrove")
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=words):
        made(text, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_place_with_other_files_is_left_alone(text, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    for options in ({}, {"overwrite": True}):
        with pytest.raises(ValueError, match="thesis.txt"):
            made(text, tmp_path, **options)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_overwrite_moves_tokens_and_tokenizer_aside(text, tmp_path):
    out = tmp_path / "out"
    made(text, out)
    train_tokenizer(TEXTS[:50], 200).save_pretrained(tmp_path / "other")
    before = {
        path.relative_to(out): path.read_bytes() for path in out.rglob("[!.]*") if path.is_file()
    }
    for _ in range(2):
        tokenize_dataset(
            str(text / "text" / "0.jsonl"), tmp_path / "other", out, overwrite=True, progress=False
        )
    moved = out / "previous-1"
    assert {
        path.relative_to(moved): path.read_bytes() for path in moved.rglob("*") if path.is_file()
    } == before
    assert [d.tolist() for d in load_tokens(moved)] == expected(text)
    assert [len(load_tokens(output_dir)) for output_dir in (out, out / "previous-2")] == [120, 120]
    tokenize_dataset(
        str(text / "text" / "1.jsonl"), tmp_path / "other", out, append=True, progress=False
    )
    assert len(load_tokens(out)) == 240


def test_an_id_outside_the_vocabulary_is_refused(text, tmp_path, monkeypatch):
    from bertlab.data.module import PretrainingDataModule

    made(text, tmp_path / "out")
    monkeypatch.setattr("bertlab.data.module.tokenizer_fingerprint", lambda _: made_by)
    made_by = load_tokens(tmp_path / "out").info["tokenizer"]

    def first_batch(vocab_size):
        reader = train_tokenizer(TEXTS, vocab_size)
        data = PretrainingDataModule(str(tmp_path / "out"), reader, max_sequence_length=32)
        data.setup("fit")
        return next(iter(data.train_dataloader()))

    assert len(first_batch(300)["input_ids"])
    with pytest.raises(ValueError, match="outside the vocabulary of 120"):
        first_batch(120)


@pytest.mark.parametrize("suffix", [".jsonl", ".txt", ".csv", ".json"])
def test_every_text_of_a_large_file_is_in_one_part(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(module, "PART_BYTES", (1000, 9_000))
    lines = {
        ".jsonl": [json.dumps({"text": text}) for text in TEXTS],
        ".json": [json.dumps([{"text": text} for text in TEXTS])],
        ".txt": TEXTS,
        ".csv": ["text", *(f'"{text}"' for text in TEXTS)],
    }[suffix]
    (tmp_path / f"a{suffix}").write_text("\n".join(lines) + "\n")
    parts = find_parts(str(tmp_path))
    texts = [text for part in parts for text in read_part(part, ReadOptions(), Counter())]
    assert texts == [text.strip() if suffix == ".csv" else text for text in TEXTS] or texts == TEXTS
    assert (len(parts) > 10) == (suffix in (".jsonl", ".txt"))


def test_what_was_read_and_how_is_told(text, tmp_path):
    (tmp_path / "in").mkdir()
    for name, content in ("a.txt", "one\ntwo\n"), ("b.txt", "p\n\nq\n\nr\n"), ("c.exe", "x"):
        (tmp_path / "in" / name).write_text(content)
    for append in (False, True):
        result = tokenize_dataset(
            str(tmp_path / "in"), text / "tokenizer", tmp_path / "out", append=append, num_proc=1
        )
        assert result["notes"] == {
            "file with one document per line: a.txt": 1,
            "file with one document per paragraph: b.txt": 1,
            "files of other kinds, not read (1 .exe)": 1,
        }


def test_an_error_in_a_later_part_says_where_it_begins(tmp_path):
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[400] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"after byte [\d,]+: .*a.jsonl line"):
        for part in find_parts(str(tmp_path)):
            list(read_part(part, ReadOptions(), Counter()))


def test_a_worker_that_dies_is_named_and_no_part_is_lost(text, tmp_path, monkeypatch):
    def die(directory, part, *options):
        if part == 3:
            time.sleep(0.5)
            with atomic_write(tmp_path / "out/data-half-00003-0000.arrow") as half:
                half.write_bytes(b"some of it")
                os.kill(os.getpid(), signal.SIGKILL)
        return write_part(directory, part, *options)

    write_part = module.write_part
    monkeypatch.setattr(module, "write_part", die)
    with pytest.raises(ValueError, match="has died"):
        made(text, tmp_path / "out", num_proc=2)
    monkeypatch.undo()
    monkeypatch.setattr(module, "PART_BYTES", (8_000, 9_000))
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.arrow")}
    assert before
    made(text, tmp_path / "out", num_proc=2)
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.arrow")}
    assert before.items() <= after.items() and len(after) == 5


@pytest.mark.parametrize("name, encoding", [
    ("a.jsonl.gz", "utf-8"), ("a.txt", "utf-16"), ("a.jsonl", "utf-8"),
])  # fmt: skip
def test_parts_hold_every_document_where_bytes_are_not_those_of_the_text(
    name, encoding, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "PART_BYTES", (1000, 2000))
    draw = random.Random(0)
    texts = [f"{draw.random()} 今天" for _ in range(300)]
    lines = [json.dumps({"text": text}) if "json" in name else text for text in texts]
    data = "\n".join(lines).encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    parts = module.find_parts(str(tmp_path / name))
    read = [text for part in parts for text in module.read_part(part, ReadOptions(), Counter())]
    assert read == texts and (len(parts) > 1) == (name == "a.jsonl")


def test_a_command_killed_at_any_file_goes_on(text, tmp_path):
    out, n, is_killed = tmp_path / "out", 0, True
    make = lambda: made(text, out, num_proc=1, file_tokens=500)
    while is_killed:
        n += 5
        before = files_of(out)
        is_killed = kill_at(n, make, ["os.rename"])
        assert before.items() <= files_of(out).items()
    assert n > 15 and [d.tolist() for d in load_tokens(out)] == expected(text)
    assert all(name.startswith("data-") for name in files_of(out)) and len(files_of(out)) > 10
    assert not [path for path in out.iterdir() if path.name.endswith(".tmp")]


KILLS = int(
    os.environ.get("BERTLAB_KILLS", 5)
)  # as many as you have patience for; 50 once, in benchmarks/kills.py


def run_killed(text: Path, output: Path, seed: int) -> None:
    "A command that is killed after a while, then run to its end."
    command = [sys.executable, "-m", "bertlab.cli", "tokenize", str(text / "text"), "--tokenizer", str(text / "tokenizer"),
               "--output", str(output), "--num_proc", "2", "--file_tokens", "500"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.time() + 120
    while not list(output.glob("part-*")) and process.poll() is None and time.time() < deadline:
        time.sleep(0.005)
    time.sleep(random.Random(seed).random() * 0.3)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(KILLS))
def test_a_killed_command_goes_on(text, tmp_path, seed):
    run_killed(text, tmp_path / "out", seed)
    stored = load_tokens(tmp_path / "out")
    assert [d.tolist() for d in stored] == expected(text)


def test_a_second_job_in_the_directory_is_refused(text, tmp_path):
    (tmp_path / "more.txt").write_text("One more line.\n")
    options = dict(progress=False, append=True)
    append = lambda: tokenize_dataset(
        str(tmp_path / "more.txt"), text / "tokenizer", tmp_path / "out", **options
    )
    made(text, tmp_path / "out", num_proc=1)

    def second():
        files._held.clear()  # as in another program
        with pytest.raises(ValueError, match="another command is at work"):
            append()

    with lock_directory(tmp_path / "out"):
        assert fork(second) == 0
    assert append()["documents"] == len(TEXTS) + 1


def test_a_queued_job_keeps_others_out_of_its_directory(text, tmp_path, monkeypatch):
    pytest.importorskip("datatrove")
    monkeypatch.setattr(module, "run_stages", lambda *_, **__: None)  # a cluster that is busy
    monkeypatch.setattr(module.shutil, "which", lambda name: name)
    out = tmp_path / "out"
    for _ in range(2):
        assert made(text, out, executor="slurm", executor_options=SLURM)["queued"] == 5
    with pytest.raises(ValueError, match="another job .*steps"):
        made(text, out, "text/0.jsonl", append=True)
