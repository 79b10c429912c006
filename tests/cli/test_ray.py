"""A `bertlab pretrain` on Ray's workers is the same run: equal losses, deaths, resumes, and mistakes before it begins.

What needs Ray is skipped where Ray is missing; the extra `ray` brings it.
"""

import csv
import os
import random
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from bertlab.cli.commands import COMMANDS
from bertlab.cli.parser import parse
from called import pretrain  # noqa: E402
from bertlab.cli.ray import count_places, launch_of, ray_strategy, train_on_ray
from bertlab.train.parallel import FullyShardedStrategy

WITH_RAY = find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not WITH_RAY, reason="needs Ray: the extra `ray`")
STEPS = 8
MODEL = "{hidden_size: 32, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2}"


def words_of(output: str, *more: str) -> list[str]:
    "A run of 8 rows a step, over all processes."
    return ["text.txt", "--model.model_config_kwargs", MODEL, "--data.max_sequence_length", "64", "--run.batch_tokens", "512",
            "--trainer.max_steps", str(STEPS), "--trainer.accelerator", "cpu", "--trainer.precision", "32-true",
            "--run.vocab_size", "300", "--run.progress", "none", "--run.checkpoint_every_steps", "2", "--run.keep_last", "9",
            "--run.val_every_steps", "6", "--run.measure_every_steps", "0", "--run.output", output, *more]  # fmt: skip


def write_text(path: Path) -> None:
    lots = random.Random(0)
    words = ["".join(lots.choices("abcdefghij", k=5)) for _ in range(80)]
    path.write_text(
        "\n".join(" ".join(lots.choices(words, k=lots.randint(5, 40))) for _ in range(301)) + "\n"
    )


def losses(output: str) -> list[float]:
    with open(f"{output}/history.csv") as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file)]


# --- without Ray ----------------------------------------------------------------------------------


@pytest.mark.parametrize("machines, per_worker, places", [
    ([{"CPU": 6}] * 3, {"CPU": 4}, 3),  # 18 CPUs together would be four workers
    ([{"CPU": 6}] * 3, {"CPU": 7}, 0),
    ([{"CPU": 64, "GPU": 8}, {"CPU": 64}], {"CPU": 4, "GPU": 1}, 8),  # the second machine has no GPU
    ([{"CPU": 8, "GPU": 8}], {"CPU": 4, "GPU": 1}, 2),
    ([{"CPU": 2.0, "memory": 1e9}], {"CPU": 1, "GPU": 0}, 2),
    ([], {"CPU": 1}, 0),
])  # fmt: skip
def test_a_worker_lies_on_one_machine(machines, per_worker, places):
    assert count_places(machines, per_worker) == places


def test_a_worker_that_takes_nothing_is_refused():
    with pytest.raises(ValueError, match="resources_per_worker"):
        count_places([{"CPU": 4}], {"CPU": 0, "GPU": 0})


def test_a_worker_knows_its_place_and_unequal_machines_are_refused():
    launch = launch_of(5, [4] * 8)
    assert (launch.rank, launch.world_size, launch.num_nodes, launch.devices) == (5, 8, 2, 4)
    with pytest.raises(ValueError, match="num_workers=5.*STRICT_SPREAD"):
        launch_of(0, [4, 4, 4, 4, 1])


def test_sharded_strategies_stay_ours_and_what_starts_processes_is_refused():
    assert isinstance(ray_strategy("fsdp"), FullyShardedStrategy)
    assert ray_strategy("tensor:2").mesh_sizes(4) == (2, 1, 1)
    for strategy in ("ddp_spawn", "deepspeed"):
        with pytest.raises(ValueError, match=f"trainer.strategy='{strategy}'"):
            ray_strategy(strategy)


@pytest.mark.parametrize("words, options, parts", [
    ([], {"num_workers": 0}, ["num_workers", "0"]),
    ([], {"cpus_per_worker": 0}, ["cpus_per_worker", "0"]),
    ([], {"max_failures": -2}, ["max_failures", "-2"]),
    (["--trainer.max_step", "3"], {}, ["trainer.max_step", "max_steps"]),
    (["--trainer.accelerator", "tpu"], {}, ["trainer.accelerator", "tpu"]),
    (["--estimate"], {}, ["--estimate"]),
    (["--run.output", "old"], {}, ["old", "--resume", "--overwrite"]),
    (["--run.output", "file"], {}, ["file"]),
    ([], {"resume": True}, ["run", "resume"]),
])  # fmt: skip
def test_a_mistake_is_one_sentence_before_ray_is_imported(
    tmp_path, monkeypatch, words, options, parts
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it would be an ImportError
    write_text(Path("text.txt"))
    Path("old").mkdir()
    Path("old/run.yaml").write_text("{}\n")
    Path("old/metrics.json").write_text("{}\n")
    Path("file").touch()
    with pytest.raises(ValueError) as refused:
        train_on_ray(words_of("run", *words), **options)
    assert all(part in str(refused.value) for part in parts) and not Path("run").exists()


@pytest.mark.skipif(WITH_RAY, reason="Ray is installed")
def test_without_ray_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(Path("text.txt"))
    with pytest.raises(ImportError, match=r"bertlab-encoders\[ray\]"):
        train_on_ray(words_of("run"))
    assert not Path("run").exists()


# --- with Ray -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    "A local Ray of two CPUs, in a directory with a text and the run of one process."
    import ray

    def start(tries: int = 3) -> None:
        "Ray gives itself half a minute to start, which is short on a busy machine."
        try:
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False,
                     runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
                     _system_config={"worker_niceness": 0})  # fmt: skip  # else everything else comes first
        except Exception as error:
            if "timed out" not in str(error) or tries == 1:
                raise
            start(tries - 1)

    folder, before = tmp_path_factory.mktemp("ray"), os.getcwd()
    os.chdir(folder)
    write_text(Path("text.txt"))
    pretrain(words_of("one"))
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    start()
    yield folder
    ray.shutdown()
    os.chdir(before)


@pytest.fixture(scope="module")
def calm(cluster) -> str:
    "A run of two workers that nothing happens to."
    metrics = train_on_ray(words_of("calm"), num_workers=2)
    assert metrics["steps"] == STEPS
    return "calm"


@needs_ray
@pytest.mark.slow
def test_two_workers_have_the_losses_of_one_process(calm):
    assert len(losses(calm)) == STEPS and losses(calm) == pytest.approx(losses("one"), abs=2e-5)
    assert {path.name for path in Path(calm).iterdir()} == {
        path.name for path in Path("one").iterdir()
    }
    config = yaml.safe_load(Path(calm, "run.yaml").read_text())
    assert (
        config["trainer"]["devices"],
        config["trainer"]["num_nodes"],
        config["data"]["train_batch_size"],
    ) == (2, 1, 4)


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp-shards", "tensor"])
def test_strategies_of_ours_have_the_losses_of_one_process_on_ray(cluster, strategy):
    assert (
        train_on_ray(words_of(strategy, "--trainer.strategy", strategy), num_workers=2)["steps"]
        == STEPS
    )
    assert losses(strategy) == pytest.approx(losses("one"), abs=2e-5)


DEATHS = """
import os, signal
from pathlib import Path
from lightning.pytorch.callbacks import Callback

class DieTwice(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for rank, step in ((1, 1), (0, 5)):  # before the first checkpoint, and after
            note = Path(f"died-{step}")
            if (trainer.global_rank, trainer.global_step) == (rank, step) and not note.exists():
                note.touch()
                os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_ray
@pytest.mark.slow
def test_workers_die_and_the_run_goes_on_bit_by_bit_and_is_overwritten_once(calm):
    Path("deaths.py").write_text(DEATHS)
    Path("killed").mkdir()
    Path("killed/run.yaml").write_text("old: true\n")
    metrics = train_on_ray(
        words_of("killed", "--trainer.callbacks", "deaths.DieTwice"), overwrite=True, max_failures=2
    )
    assert Path("died-1").exists() and Path("died-5").exists() and metrics["steps"] == STEPS
    assert losses("killed") == losses(calm)
    assert [path.name for path in Path("killed").glob("previous-*")] == ["previous-1"], (
        "attempts after a death go on"
    )
    assert Path("killed/previous-1/run.yaml").read_text() == "old: true\n"


@needs_ray
@pytest.mark.slow
def test_more_deaths_than_allowed_end_the_run_and_one_process_goes_on(calm):
    from ray.train import TrainingFailedError

    Path("deaths.py").write_text(DEATHS.replace("died-", "gone-").replace("(1, 1)", "(0, 5)"))
    with pytest.raises(TrainingFailedError):
        train_on_ray(words_of("ended", "--trainer.callbacks", "deaths.DieTwice"), max_failures=0)
    assert Path("gone-5").exists() and Path("ended/checkpoints/step-00000004.ckpt").exists()
    metrics = pretrain(["--trainer.devices", "1"], resume="ended")
    assert metrics["steps"] == STEPS and losses("ended") == pytest.approx(losses(calm), abs=2e-5)


@needs_ray
@pytest.mark.slow
def test_ray_goes_on_where_one_process_stopped(cluster):
    shutil.copytree("one", "on")
    for newer in ("step-00000006.ckpt", "step-00000008.ckpt"):
        Path("on/checkpoints", newer).unlink()
    assert train_on_ray(resume="on", num_workers=2)["steps"] == STEPS
    assert losses("on") == pytest.approx(losses("one"), abs=2e-5)


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("words, options, parts", [
    ([], {"num_workers": 3}, ["num_workers=3", "1 CPU", "places for 2"]),
    ([], {"num_workers": 2, "cpus_per_worker": 2}, ["num_workers=2", "2 CPU", "places for 1"]),
    (["--trainer.accelerator", "gpu"], {"num_workers": 1}, ["1 GPU", "places for 0"]),
    (["--trainer.strategy", "ddp_spawn"], {}, ["trainer.strategy='ddp_spawn'"]),
    (["--trainer.strategy", "{class_path: ray.train.lightning.RayFSDPStrategy}"], {}, ["RayFSDPStrategy", "FSDP2"]),
    (["--data.train_dataset_name_or_path", "nowhere.txt"], {}, ["nowhere.txt"]),  # which the workers find
    (["--run.batch_tokens", "500"], {}, ["batch_tokens=500", "512"]),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_a_file_is_written(cluster, words, options, parts):
    with pytest.raises(ValueError) as refused:
        train_on_ray(words_of("refused", *words), **options)
    assert all(part in str(refused.value) for part in parts) and not Path("refused").exists()


# --- files for other launchers --------------------------------------------------------------------

FAKE_SRUN = """#!/bin/bash
printf '%s\\n' "$@" > "$PLACE/words"
"""


def run_script(script: str, directory: Path, **environment: str) -> list[str]:
    "Run a script in bash with programs of ours in place of the launchers; the words that these were given."
    for name in ("srun", "torchrun"):
        (directory / name).write_text(FAKE_SRUN)
        (directory / name).chmod(0o755)
    paths = f"{directory}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", script, "script", "--config", "bertlab/configs/several-nodes.yaml"], cwd=ROOT,
                          env={**os.environ, "PATH": paths, "PLACE": str(directory), **environment}, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return (directory / "words").read_text().splitlines()


@pytest.mark.parametrize("name", ["slurm.sh", "skypilot.yaml"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_launcher_s_file_starts_a_run_and_goes_on_with_one_that_is_there(
    tmp_path, monkeypatch, name, resume
):
    monkeypatch.chdir(
        ROOT
    )  # the cluster, where there is one, stands in its own directory to the end
    file, output = ROOT / "bertlab/configs/launchers" / name, tmp_path / "my run"
    environment = {"OUTPUT": str(output)}
    script = file.read_text()
    if name.endswith(".yaml"):
        task = yaml.safe_load(script)
        assert {"num_nodes", "resources", "workdir", "envs", "setup", "run"} <= task.keys()
        environment = {**task["envs"], "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
                       "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", **environment}  # fmt: skip
        script = task["run"].replace("mountpoint -q /shared", "true")
    else:
        assert "#SBATCH --ntasks-per-node=8" in script and "#SBATCH --signal=TERM@" in script
    if resume:
        output.mkdir()
        (output / "run.yaml").write_text("{}\n")
    words = run_script(script, tmp_path, **environment)
    parsed = parse(COMMANDS["pretrain"], words[words.index("pretrain") + 1 :])
    assert parsed.config["run"]["output"] == str(output) and bool(parsed.config["resume"]) == resume
    assert (
        parsed.config["trainer"]["num_nodes"] == 2
        and parsed.config["trainer"]["strategy"] == "fsdp"
    )
