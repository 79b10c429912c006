"`torchrun -m bertlab.cli pretrain` and the same under SLURM's variables are one run: equal losses, kills, resumes."

import contextlib
import csv
import io
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from forks import forked
from programs import bertlab
from ranks import run_on_ranks

from bertlab.data.loaders import eval_loader
from bertlab.data.tokenizers import load_tokenizer
from bertlab.train.parallel import detect_launcher, apply_launcher, started_by_first
from bertlab.train.trainer import make_trainer

ROWS = 8  # of an optimizer step, over all processes


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    "A text whose rows no number of processes divides, and the run of one process."
    folder = tmp_path_factory.mktemp("launched")
    lots = random.Random(0)
    words = ["".join(lots.choices("abcdefghij", k=5)) for _ in range(80)]
    text = "\n".join(" ".join(lots.choices(words, k=lots.randint(5, 40))) for _ in range(301))
    (folder / "text.txt").write_text(text + "\n")
    assert bertlab(*words_of("one", ROWS, 8)[2:], cwd=folder).returncode == 0
    return folder


def words_of(output: str, rows: int, steps: int, *extra: str) -> list[str]:
    model = "{hidden_size: 32, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2}"
    return ["-m", "bertlab.cli", "pretrain", "--model.model_config_kwargs", model, "--data.train_dataset_name_or_path", "text.txt",
            "--run.recipe", "reference", "--data.max_sequence_length", "64", "--data.train_batch_size", str(rows), "--trainer.max_steps", str(steps),
            "--trainer.accelerator", "cpu", "--trainer.precision", "32-true", "--run.vocab_size", "300", "--run.progress", "none",
            "--run.checkpoint_every_steps", "2", "--run.keep_last", "9", "--run.val_every_steps", "6", "--run.measure_every_steps",
            "0", "--run.output", output, *extra]  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(
    folder: Path, output: str, processes: int, *extra: str, steps: int = 8, rows: int | None = None
) -> subprocess.Popen:
    "One process without a launcher (0), or so many of torchrun."
    command_words = words_of(output, rows or ROWS // max(1, processes), steps, *extra)
    launcher = ["--standalone", f"--nproc-per-node={processes}"]  # at a free port
    command = (
        [sys.executable, "-m", "torch.distributed.run", *launcher, *command_words]
        if processes
        else [sys.executable, *command_words]
    )
    return subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            start_new_session=True)  # fmt: skip


def run(
    folder: Path, output: str, processes: int, *extra: str, **options
) -> subprocess.CompletedProcess:
    process = start(folder, output, processes, *extra, **options)
    output_text = process.communicate(timeout=300)[0]
    return subprocess.CompletedProcess(process.args, process.returncode, output_text)


def losses(folder: Path, output: str) -> list[float]:
    with open(folder / output / "history.csv") as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file)]


def token_counts(folder: Path, output: str) -> list[float]:
    with open(folder / output / "history.csv") as file:
        return [float(row["tokens"]) for row in csv.DictReader(file)]


def same(folder: Path, output: str, tolerance: float = 2e-5) -> None:
    single, result = losses(folder, "one"), losses(folder, output)
    assert len(single) == len(result) == 8
    assert result == pytest.approx(single, abs=tolerance)
    assert token_counts(folder, output) == token_counts(folder, "one"), "of all processes"


def on_a_rank(words: list[str], folder: str) -> None:
    "Run the command in this process, and write its exit status and errors."
    from bertlab.cli.main import main

    os.chdir(folder)
    rank = os.environ["RANK"]
    with (
        open(f"output-{rank}", "w") as output,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        status = main(words)
    Path(f"status-{rank}").write_text(f"{status} {errors.getvalue()}")


def test_two_processes_have_the_losses_of_one(prepared):
    "With the variables of torchrun; the slow tests start torchrun itself."
    run_on_ranks(on_a_rank, words_of("ddp", ROWS // 2, 8)[2:], str(prepared))
    same(prepared, "ddp")
    outputs = [(prepared / f"output-{rank}").read_text() for rank in range(2)]
    counts = [output.count("peak_memory_bytes") for output in outputs]
    assert counts == [1, 0], "the first process speaks for all"


@pytest.mark.slow
def test_two_processes_of_torchrun_have_the_losses_of_one(prepared):
    done = run(prepared, "torchrun", 2)
    assert done.returncode == 0, done.stdout[-3000:]
    same(prepared, "torchrun")
    assert done.stdout.count("peak_memory_bytes") == 1, "the first process speaks for all"


def test_launchers_are_read_from_their_variables():
    for environment in ({"PATH": "/bin", "LOCAL_RANK": "0"}, {"SLURM_NTASKS": "4"},
                        {"SLURM_STEP_NUM_TASKS": "1"}):  # fmt: skip
        assert detect_launcher(environment) is None
    launch = detect_launcher(
        {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    )
    assert (launch.devices, launch.num_nodes, launch.rank) == (4, 2, 5)


def launched(monkeypatch, launcher: str, world: int, nodes: int = 1):
    "Variables of a launcher in this process."
    for name in (
        "TORCHELASTIC_RUN_ID",
        "LOCAL_RANK",
        "RANK",
        "SLURM_JOB_NAME",
        "SLURM_STEP_NUM_TASKS",
    ):
        monkeypatch.delenv(name, raising=False)
    torchrun = {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": 0,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world // nodes,
    }
    slurm = {"SLURM_NTASKS": world, "SLURM_NNODES": nodes, "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0,
             "SLURM_STEP_NUM_TASKS": world}  # fmt: skip
    for name, value in (torchrun if launcher == "torchrun" else slurm).items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("launch, options, expected", [
    (("torchrun", 8, 2), {}, {"devices": 4, "num_nodes": 2}),
    (("torchrun", 8), {"devices": 1, "num_nodes": 1, "strategy": "ddp"}, {"devices": 8, "num_nodes": 1, "strategy": "ddp"}),
    (("torchrun", 2), {"devices": "auto"}, {"devices": 2, "num_nodes": 1}),
    (("torchrun", 2), {"devices": [2, 3]}, {"devices": [2, 3], "num_nodes": 1}),
    (("torchrun", 8), {"devices": 8, "num_nodes": 2}, {"devices": 8, "num_nodes": 1}),
    (("SLURM", 4, 2), {"num_nodes": 2}, {"devices": 2, "num_nodes": 2}),
    (("SLURM", 1), {"devices": 4}, {"devices": 4}),  # one task with four GPUs, which starts the other three
])  # fmt: skip
def test_a_launcher_says_how_many_processes_there_are(monkeypatch, launch, options, expected):
    launched(monkeypatch, *launch)
    assert apply_launcher(options) == expected


@pytest.mark.parametrize("launcher, devices", [("torchrun", 8), ("SLURM", 4)])
def test_other_devices_than_the_launchers_are_refused(monkeypatch, launcher, devices):
    launched(monkeypatch, launcher, 2)
    with pytest.raises(ValueError, match=f"devices={devices}.*devices=2"):
        apply_launcher({"devices": devices})


def test_a_process_that_the_first_one_starts_takes_the_tokenizer_that_is_written(
    tmp_path, monkeypatch
):
    from called import config_of, pretrain

    from bertlab.train.run import Run, build_pretraining

    launched(monkeypatch, "SLURM", 1)
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"some words and {n} more\n" for n in range(60)))
    words = words_of("run", 4, 1)[3:]
    pretrain(words)
    monkeypatch.setattr(
        "bertlab.train.run.train_tokenizer", lambda *a, **k: pytest.fail("it was trained again")
    )
    monkeypatch.setenv("LOCAL_RANK", "1")
    run = Run(config_of("pretrain", words), build_pretraining, overwrite=True)
    assert len(run.tokenizer) == len(load_tokenizer("run/tokenizer"))
    monkeypatch.setenv("RANK", "1")
    assert not started_by_first(), "this launcher starts all of them at once"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp-shards"])
def test_fsdp2_has_the_losses_of_one(prepared, strategy):
    done = run(prepared, strategy, 2, "--trainer.strategy", strategy)
    assert done.returncode == 0, done.stdout[-3000:]
    same(prepared, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tensor", "context"])
def test_processes_that_share_rows_have_the_losses_of_one(prepared, strategy):
    done = run(prepared, strategy, 2, "--trainer.strategy", strategy, rows=ROWS)
    assert done.returncode == 0, done.stdout[-3000:]
    same(prepared, strategy)
    for newer in ("step-00000006.ckpt", "step-00000008.ckpt"):
        (prepared / strategy / "checkpoints" / newer).unlink()
    done = run(
        prepared, strategy, 0, "--resume", "--trainer.strategy", "auto", "--trainer.devices", "1"
    )  # where 2 stopped, 1 goes on
    assert done.returncode == 0, done.stdout[-3000:]
    same(prepared, strategy)


@pytest.mark.parametrize("extra, words", [
    (["--trainer.strategy", "tensor", "--trainer.devices", "3"], ["tensor_parallel_size=3", "num_attention_heads=2"]),
    (["--trainer.strategy", "tensor:2", "--trainer.devices", "3"], ["3 process"]),
    (["--trainer.strategy", "tensor", "--trainer.devices", "2", "--model.optimizer_class", "muon"], ["muon", "adamw"]),
    (["--trainer.strategy", "context", "--trainer.devices", "3"], ["max_sequence_length=64", "context_parallel_size=3"]),
    (["--trainer.strategy", "tensors"], ["tensors", "tensor", "context"]),
    (["--trainer.strategy", "fsdp", "--trainer.precision", "64-true"], ["precision='64-true'", "precision='32-true'"]),
])  # fmt: skip
def test_a_run_that_processes_cannot_share_is_refused_before_it_begins(
    tmp_path, monkeypatch, extra, words
):
    from called import pretrain

    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some words\n" * 50)
    with pytest.raises(ValueError) as refused:
        pretrain(words_of("run", 4, 2, *extra)[3:])
    assert all(word in str(refused.value) for word in words) and not Path("run").exists()


@pytest.mark.slow
def test_two_nodes_of_slurm_have_the_losses_of_one(prepared):
    port = free_port()
    started = []
    for rank in range(2):
        slurm = {"SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_PROCID": str(rank),
                 "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank), "SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "bert",
                 "SLURM_NODELIST": "127.0.0.1", "SLURM_JOB_NODELIST": "127.0.0.1", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(port), "SLURM_STEP_NUM_TASKS": "2"}  # fmt: skip
        command = [sys.executable, *words_of("slurm", ROWS // 2, 8)]
        started.append(subprocess.Popen(command, cwd=prepared, env={**ENVIRONMENT, **slurm}, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True))  # fmt: skip
    output_text = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], (
        output_text[0][-2000:] + output_text[1][-2000:]
    )
    same(prepared, "slurm")


@pytest.mark.slow
def test_one_task_of_slurm_starts_the_processes_of_its_devices_and_has_the_losses_of_one(prepared):
    slurm = {"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
             "SLURM_NODEID": "0", "SLURM_JOB_ID": "79", "SLURM_JOB_NAME": "bert", "SLURM_NODELIST": "127.0.0.1"}  # fmt: skip
    command = [sys.executable, *words_of("task", ROWS // 2, 8, "--trainer.devices", "2")]
    done = subprocess.run(
        command,
        cwd=prepared,
        env={**ENVIRONMENT, **slurm},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("peak_memory_bytes") == 1, "the first process speaks for all"
    same(prepared, "task")


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_in_two_and_in_smaller_micro_batches(prepared):
    shutil.copytree(prepared / "one", prepared / "smaller")
    for newer in ("step-00000006.ckpt", "step-00000008.ckpt"):
        (prepared / "smaller" / "checkpoints" / newer).unlink()
    done = run(
        prepared, "smaller", 2, "--resume", "--trainer.accumulate_grad_batches", "2", rows=ROWS // 4
    )
    assert done.returncode == 0, done.stdout[-3000:]
    same(prepared, "smaller")


@pytest.fixture(scope="module")
def halfway(prepared):
    "A run of two processes that stopped after 4 of 8 steps, with a distributed checkpoint."
    done = run(prepared, "whole", 2, "--trainer.strategy", "fsdp-shards")
    assert done.returncode == 0, done.stdout[-3000:]
    for newer in ("step-00000006.ckpt", "step-00000008.ckpt"):
        shutil.rmtree(prepared / "whole" / "checkpoints" / newer)
    return prepared / "whole"


def test_ranks_of_another_strategy_leave_a_run_as_it_was(tmp_path):
    lines = [f"{n} words and {n * 7 % 30} more of them\n" for n in range(90)]
    (tmp_path / "text.txt").write_text("".join(lines))
    words = words_of("run", ROWS // 2, 2, "--trainer.strategy", "fsdp-shards")[2:]
    run_on_ranks(on_a_rank, words, str(tmp_path))
    assert (tmp_path / "status-0").read_text().startswith("0 ")
    names = ("history.csv", "metrics.json", "report.md", "run.yaml")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in names}
    resumed = words_of("run", ROWS // 2, 4, "--trainer.strategy", "auto", "--resume")[2:]
    run_on_ranks(on_a_rank, resumed, str(tmp_path))
    status, _, errors = (tmp_path / "status-0").read_text().partition(" ")
    assert status == "2" and "strategy='fsdp-shards'" in errors and errors.count("\n") == 1
    assert {name: (tmp_path / "run" / name).read_bytes() for name in names} == before


def wait_for_data(folder: str) -> None:
    "Start a rank as the first process does, which reads with a worker; then wait."
    multiprocessing.set_start_method(None, force=True)  # the usual one
    if os.fork() == 0:
        os.environ["LOCAL_RANK"] = "1"
        for name in ("RANK", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS"):
            os.environ.pop(name, None)
        make_trainer(1, accelerator="cpu", logger=False)
        loader = eval_loader([{"row": n} for n in range(9)], list, 1, num_workers=1)
        batches = iter(loader)
        next(batches)
        numbers = [os.getpid(), *(worker.pid for worker in multiprocessing.active_children())]
        Path(folder, "new").write_text(" ".join(map(str, numbers)))
        Path(folder, "new").rename(Path(folder, "processes"))
    signal.pause()


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, and nobody has asked


def wait_until(condition, seconds: float = 120) -> None:
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells children of a death")
def test_a_killed_first_process_leaves_no_rank_and_no_worker(tmp_path):
    first = forked(wait_for_data, (str(tmp_path),))
    first.start()
    try:
        wait_until((tmp_path / "processes").exists)
        numbers = list(map(int, (tmp_path / "processes").read_text().split()))
        assert len(numbers) == 2 and all(map(is_running, numbers))
    finally:
        first.kill()
        first.join()
    wait_until(lambda: not any(map(is_running, numbers)))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_distributed_checkpoint_goes_on_with_any_number_of_processes(
    prepared, halfway, processes
):
    shutil.copytree(halfway, prepared / f"on-{processes}")
    done = run(
        prepared, f"on-{processes}", processes, "--trainer.strategy", "fsdp-shards", "--resume"
    )
    assert done.returncode == 0, done.stdout[-3000:]
    same(prepared, f"on-{processes}")


@pytest.mark.slow
def test_stages_on_two_devices_have_the_losses_of_one(prepared):
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 2, "vocab_size": 300}  # fmt: skip
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    losses = {}
    for name, launcher in ((1, []), (2, []), ("torchrun", torchrun)):
        devices = {} if launcher else {"devices": name}  # a launcher knows
        rows = ROWS if name == 1 else ROWS // 2
        stages = [{"model": {"model_config_kwargs": shape}},
                  {"model": {"reference_model_name_or_path": "previous"}}]  # fmt: skip
        shared = {
            "data": {
                "train_dataset_name_or_path": "text.txt",
                "max_sequence_length": 64,
                "train_batch_size": rows,
            },
            "trainer": {"accelerator": "cpu", "precision": "32-true", "max_steps": 3, **devices},
        }
        (prepared / "stages.yaml").write_text(yaml.safe_dump({**shared, "stages": stages}))
        output = f"stages-{name}"
        done = subprocess.run(
            [sys.executable, *launcher, "-m", "bertlab.cli", "distill", "stages.yaml", "--output", output],
            cwd=prepared, env=ENVIRONMENT, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        losses[name] = []
        for process_id in (1, 2):
            with open(prepared / output / f"stage-{process_id}" / "history.csv") as file:
                losses[name] += [float(row["train_loss"]) for row in csv.DictReader(file)]
    assert len(losses[1]) == 6
    assert losses[2] == pytest.approx(losses[1], abs=2e-5)
    assert losses["torchrun"] == pytest.approx(losses[1], abs=2e-5)


def child_of(process: subprocess.Popen) -> list[int]:
    "The workers of torchrun."
    result = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(process_id) for process_id in result]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("BERTLAB_KILLS", 3))))
def test_one_process_is_killed_and_the_run_goes_on_bit_by_bit(prepared, seed):
    output, lots = f"killed-{seed}", random.Random(seed)
    assert run(prepared, f"calm-{seed}", 2).returncode == 0
    process = start(prepared, output, 2)
    deadline = time.time() + 120
    while (
        not list((prepared / output / "checkpoints").glob("step-*"))
        and time.time() < deadline
        and process.poll() is None
    ):
        time.sleep(0.01)
    time.sleep(lots.random() * 0.2)
    victims = child_of(process) if process.poll() is None else []
    if victims:
        os.kill(lots.choice(victims), signal.SIGKILL)
    process.communicate(timeout=120)  # the others do not wait for it
    done = run(prepared, output, 2, "--resume")
    if "already passed" in done.stdout:  # it was killed after its last step
        return
    assert done.returncode == 0, done.stdout[-3000:]
    assert losses(prepared, output) == losses(prepared, f"calm-{seed}")


@pytest.mark.slow
def test_a_process_without_launcher_to_end_it_says_one_sentence_and_ends(prepared):
    "Under SLURM's variables nobody ends the others: the one that is left must notice."
    port, started = free_port(), []
    for rank in range(2):
        slurm = {"SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_PROCID": str(rank),
                 "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank), "SLURM_JOB_ID": "78", "SLURM_JOB_NAME": "bert",
                 "SLURM_NODELIST": "127.0.0.1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                 "SLURM_STEP_NUM_TASKS": "2"}  # fmt: skip
        command = [sys.executable, *words_of("lost", ROWS // 2, 4000)]
        started.append(subprocess.Popen(command, cwd=prepared, env={**ENVIRONMENT, **slurm}, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True))  # fmt: skip
    deadline = time.time() + 120
    while not list((prepared / "lost" / "checkpoints").glob("step-*")) and time.time() < deadline:
        time.sleep(0.05)
    started[1].kill()
    errors = started[0].communicate(timeout=90)[1]
    started[1].wait(10)
    assert started[0].returncode == 3, errors[-2000:]
    assert "another process of the run died" in errors and "Traceback" not in errors, errors[-2000:]
