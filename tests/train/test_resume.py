"""Killed without warning and resumed: the batches are those of the run that nobody disturbed."""

import hashlib
import multiprocessing
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import forked
from lightning.pytorch.callbacks import Callback
from test_training import CONFIG, word_tokenizer

from bertlab.train.checkpoints import TrainingCheckpoint
from bertlab.train.resume import latest_checkpoint
from bertlab.data.module import PretrainingDataModule
from bertlab.train.modules import PretrainingModule
from bertlab.train.trainer import make_trainer, seed_everything

STEPS, EVERY = 24, 4  # optimizer steps of a run, and between two checkpoints
WORDS = [f"w{i}" for i in range(80)]
PHASES = {8: {"mlm_probability": 0.15}, "80%": {"max_sequence_length": 64}}
MODES = {
    "map-style, no workers": {"num_workers": 0},
    "map-style, two workers": {"num_workers": 2},
    "stream, no workers": {"num_workers": 0, "streaming": True},
    "stream, two workers": {"num_workers": 2, "streaming": True},
    "phases, two workers": {"num_workers": 2, "phases": PHASES},
    "phases of a stream": {"phases": PHASES, "streaming": True},
}


class BatchLog(Callback):
    "Write a hash of every batch that a step consumes; die at the beginning of a given step."

    def __init__(self, path, die_at=None):
        self.path, self.die_at = path, die_at

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        digest = hashlib.blake2b(digest_size=8)
        for name in ("input_ids", "labels", "attention_mask"):
            digest.update(batch[name].numpy().tobytes())
        rank = trainer.global_rank
        with open(
            f"{self.path}.{rank}", "a"
        ) as file:  # a line is written by one call, or not at all
            file.write(f"{trainer.global_step} {digest.hexdigest()}\n")
        if trainer.global_step == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)


def run(folder, log, options, die_at=None, checkpoint=True, trainer_options=None):
    "Train a tiny model on the text in the folder, from its checkpoint if there is one."
    torch.set_num_threads(1)
    multiprocessing.set_start_method(None, force=True)  # the usual one, for the workers
    seed_everything(0)
    directory = Path(folder, "checkpoints")
    data = PretrainingDataModule(
        str(Path(folder, "text.txt")), word_tokenizer(WORDS), max_sequence_length=32,
        train_batch_size=4, val_batch_size=8, **options)  # fmt: skip
    callbacks = [BatchLog(Path(folder, log), die_at)]
    callbacks += [TrainingCheckpoint(directory, every_n_steps=EVERY)] if checkpoint else []
    trainer = make_trainer(STEPS, "32-true", accelerator="cpu", val_check_steps=10,
                           callbacks=callbacks, **(trainer_options or {}))  # fmt: skip
    module = PretrainingModule({**CONFIG, "num_hidden_layers": 1}, learning_rate=1e-3,
                              scheduler_warmup_steps=3)  # fmt: skip
    trainer.fit(module, data, ckpt_path=latest_checkpoint(directory) if checkpoint else None)


def read_log(path):
    "The hashes of each step, in all sessions."
    hashes = {}
    for line in Path(path).read_text().splitlines():
        step, digest = line.split()
        hashes.setdefault(int(step), set()).add(digest)
    return hashes


def in_process(*arguments):  # the exit code
    "Run in a clean process that has imported everything already."
    process = forked(run, arguments)
    process.start()
    process.join(120)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


def write_text(folder, index=150):
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(WORDS, rng.integers(3, 40))) for _ in range(index)]
    Path(folder, "text.txt").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("mode", MODES)
def test_a_run_killed_at_random_steps_sees_the_batches_of_an_undisturbed_one(mode, tmp_path):
    write_text(tmp_path)
    options = MODES[mode]
    assert in_process(tmp_path, "whole", options, None, False) == 0
    # An epoch has about 19 batches: one death lies in the first, the other about its end.
    first, second = random.Random(mode).randint(5, 12), random.Random(mode).randint(17, 22)
    for die_at in (first, second):
        assert in_process(tmp_path, "killed", options, die_at) == -signal.SIGKILL
    assert in_process(tmp_path, "killed", options) == 0
    uninterrupted, killed = read_log(tmp_path / "whole.0"), read_log(tmp_path / "killed.0")
    assert sorted(uninterrupted) == list(range(STEPS)) and all(
        len(h) == 1 for h in uninterrupted.values()
    )
    assert len(set.union(*uninterrupted.values())) == STEPS, "no batch comes twice"
    assert killed == uninterrupted


def test_two_processes_that_were_killed_see_the_batches_of_two_undisturbed_ones(tmp_path):
    write_text(tmp_path)
    together = {"devices": 2, "strategy": "ddp_fork"}
    assert in_process(tmp_path, "whole", {}, None, False, together) == 0
    assert in_process(tmp_path, "killed", {}, 6, True, together) != 0
    assert in_process(tmp_path, "killed", {}, None, True, together) == 0
    logs = {}
    for rank in (0, 1):
        uninterrupted, killed = (
            read_log(tmp_path / f"{name}.{rank}") for name in ("whole", "killed")
        )
        assert killed == uninterrupted and len(uninterrupted) == STEPS
        logs[rank] = set.union(*uninterrupted.values())
    assert not logs[0] & logs[1]
