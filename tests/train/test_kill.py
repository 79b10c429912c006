"""SIGKILL at any moment: what is resumed ends with the loss curve that nobody interrupted, bit for bit."""

import csv
import multiprocessing
import os
import random
import signal
import time
from functools import partial

import numpy as np
import pytest
import torch
from forks import forked
from lightning.pytorch.callbacks import Callback
from test_training import CONFIG, word_tokenizer

from bertlab.train.history import History
from bertlab.core.serialization import load_json
from bertlab.train.checkpoints import STATE_FILE, TrainingCheckpoint
from bertlab.data.module import PretrainingDataModule
from bertlab.train.modules import PretrainingModule
from bertlab.train.resume import check_resume, latest_checkpoint
from bertlab.train.trainer import make_trainer, seed_everything

STEPS, EVERY, WINDOW = 18, 3, 2  # optimizer steps, those between checkpoints, micro-batches in one
WORDS = [f"w{i}" for i in range(80)]
PHASES = {6: {"mlm_probability": 0.15}, "80%": {"max_sequence_length": 64}}
MODES = {  # options of the data, and how often the run dies
    "rows and coins, no workers": ({"num_workers": 0, "objective": "enhanced_mlm"}, 4),
    "rows, two workers": ({"num_workers": 2}, 2),
    "stream, two workers": ({"num_workers": 2, "streaming": True}, 2),
    "phases, two workers": ({"num_workers": 2, "phases": PHASES}, 1),
    "phases of a stream": ({"phases": PHASES, "streaming": True}, 1),
}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Deaths(Callback):
    "Tell how far the run is, and die at the beginning of a given micro-batch."

    def __init__(self, position, at=None):
        self.position, self.at = position, at

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.position.write_text(str(trainer.fit_loop.total_batch_idx))
        if trainer.fit_loop.total_batch_idx == self.at:
            die()


def die_while_writing(nth):
    "Leave half of the n-th checkpoint that is written, under its temporary name."
    real, seen = os.fsync, []

    def half(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(".tmp") and ".ckpt." in path:
            seen.append(path)
            if len(seen) == nth:
                os.truncate(path, os.path.getsize(path) // 2)
                die()
        real(descriptor)

    os.fsync = half


def die_while_saving_a_model(nth):
    "Die with the configuration on disk and the weights not yet."
    from transformers import PreTrainedModel

    real, seen = PreTrainedModel.save_pretrained, []

    def half(self, directory, **options):
        seen.append(directory)
        if len(seen) == nth:
            self.config.save_pretrained(directory)
            die()
        real(self, directory, **options)

    PreTrainedModel.save_pretrained = half


def run(folder, text, options, kill=None, at=None, **trainer_options):
    "Train to the end or to death, from the newest checkpoint that is there."
    torch.set_num_threads(1)
    multiprocessing.set_start_method(None, force=True)  # the usual one, for the workers
    if kill in globals():
        globals()[kill](at)
    folder.mkdir(exist_ok=True)
    result = latest_checkpoint(folder / "checkpoints")
    seed_everything(
        0 if result is None else time.time_ns() % 2**31
    )  # a checkpoint must not need it
    tokenizer = word_tokenizer(WORDS)
    options = {"objective": "mlm", **options}
    data = PretrainingDataModule(str(text), tokenizer, max_sequence_length=32, train_batch_size=4,
                                 val_batch_size=8, **options)  # fmt: skip
    shape = {**CONFIG, "num_hidden_layers": 1, "embedding_dropout": 0.1, "mlp_dropout": 0.1}
    module = PretrainingModule(shape, objective=options["objective"], learning_rate=3e-3,
                               scheduler_warmup_steps=3)  # fmt: skip
    history = History()
    callbacks = [history, Deaths(folder / "position", at if kill == "step" else None),
                 TrainingCheckpoint(folder / "checkpoints", EVERY, 2, folder / "models")]  # fmt: skip
    trainer = make_trainer(STEPS, "32-true", accelerator="cpu", val_check_steps=4, callbacks=callbacks,
                           accumulate_grad_batches=WINDOW, **trainer_options)  # fmt: skip
    if result is not None:
        check_resume(result, module, data, STEPS)
    trainer.fit(module, data, ckpt_path=result)
    history.write_csv(folder / "history.csv")
    torch.save((module.state_dict(), history.validation), folder / "end.pt")


@pytest.fixture(scope="module")
def start():
    "Start a run in a clean process that has imported everything already."

    def start(*arguments, **options):
        process = forked(partial(run, **options), arguments)
        process.start()
        return process

    return start


def exit_code(process):
    process.join()  # pytest ends a test that hangs
    return process.exitcode


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(WORDS, rng.integers(3, 40))) for _ in range(150)]
    path.write_text("\n".join(lines) + "\n")
    return path


def curve(folder):
    "The history without seconds, as it was written: all digits."
    with open(folder / "history.csv", newline="") as file:
        header, *rows = csv.reader(file)
    seconds = header.index("seconds")
    return [row[:seconds] + row[seconds + 1 :] for row in (header, *rows)]


def same_end(uninterrupted, killed):
    (weights, validation), (again, validated) = (
        torch.load(folder / "end.pt", weights_only=False) for folder in (uninterrupted, killed))  # fmt: skip
    assert validated == validation and all(torch.equal(again[k], weights[k]) for k in weights)
    for part in ("models", "checkpoints"):
        names = [
            sorted(p.name for p in (folder / part).iterdir()) for folder in (uninterrupted, killed)
        ]
        assert names[0] == names[1], "something was left over, or is missing"
    best = [
        load_json(folder / "models" / "best" / STATE_FILE) for folder in (uninterrupted, killed)
    ]
    assert best[0] == best[1]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_killed_again_and_again_ends_as_the_undisturbed_one(mode, tmp_path, text, start):
    draw, (options, num_deaths) = random.Random(mode), MODES[mode]
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    assert exit_code(start(uninterrupted, text, options)) == 0
    deaths = [
        ("step", draw.randint(7, 14)),  # a micro-batch, inside a window or between two
        ("die_while_writing", draw.randint(1, 2)),
        ("die_while_saving_a_model", 1),
        ("step", draw.randint(26, 34)),
    ]
    for kill, at in deaths[:num_deaths]:
        assert exit_code(start(killed, text, options, kill, at)) == -signal.SIGKILL
    assert exit_code(start(killed, text, options)) == 0
    assert len(curve(uninterrupted)) == STEPS + 1 and curve(killed) == curve(uninterrupted)
    same_end(uninterrupted, killed)


def test_two_processes_that_were_killed_end_as_undisturbed_ones(tmp_path, text, start):
    together = partial(start, text=text, options={}, devices=2, strategy="ddp_fork")
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    assert exit_code(together(uninterrupted)) == 0
    assert exit_code(together(killed, kill="step", at=16)) != 0
    assert exit_code(together(killed)) == 0
    first, second = (
        torch.load(latest_checkpoint(folder / "checkpoints")) for folder in (uninterrupted, killed)
    )
    assert first["global_step"] == second["global_step"] == STEPS
    weights, again = first["state_dict"], second["state_dict"]
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_a_run_killed_at_random_moments_ends_as_the_undisturbed_one(tmp_path, text, start):
    draw = random.Random(7)
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    assert exit_code(start(uninterrupted, text, {})) == 0
    for _ in range(3):
        process, position = start(killed, text, {}), killed / "position"
        position.unlink(missing_ok=True)
        wait_for = draw.randint(1, 12)  # micro-batches of this session
        seen, deadline = set(), time.monotonic() + 60
        while process.is_alive() and len(seen) < wait_for and time.monotonic() < deadline:
            seen |= {position.read_text()} if position.exists() else set()
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.02))
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        assert exit_code(process) in (-signal.SIGKILL, 0)
    assert (killed / "end.pt").exists() or exit_code(start(killed, text, {})) == 0
    assert curve(killed) == curve(uninterrupted)
    same_end(uninterrupted, killed)


def test_the_comparison_would_see_a_lost_generator(tmp_path, text, start):
    "The control: a checkpoint without its generators gives another curve."
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    assert exit_code(start(uninterrupted, text, {})) == 0
    assert exit_code(start(killed, text, {}, "step", 20)) == -signal.SIGKILL
    path = latest_checkpoint(killed / "checkpoints")
    state = torch.load(path)
    del state["rng_state"]
    torch.save(state, path)
    assert exit_code(start(killed, text, {})) == 0
    same = [a == b for a, b in zip(curve(uninterrupted), curve(killed))]
    assert all(same[: state["global_step"] + 1]) and not any(same[state["global_step"] + 1 :])
