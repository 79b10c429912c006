"Runs that end badly: what they save, what they say, and what the same command does next."

import json
import signal
import sys

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from test_training import word_tokenizer

from bertlab.cli.main import run_command
from bertlab.core.files import check_run_directory
from bertlab.core.serialization import load_json
from bertlab.train.checkpoints import TrainingInterrupted, TrainingStopped
from bertlab.train.history import print_line
from bertlab.train.run import Run, build_pretraining

WORDS = [f"w{i}" for i in range(40)]
SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
         "max_position_embeddings": 32}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(WORDS, rng.integers(3, 40))) for _ in range(80)]
    (directory / "text.txt").write_text("\n".join(lines) + "\n")
    word_tokenizer(WORDS).save_pretrained(directory / "words")
    return directory


@pytest.fixture
def make_run(text, tmp_path):
    def make(steps=8, callbacks=(), resume=False, model=None, **run):
        model = {"model_config_kwargs": SHAPE, "compile_model": False, **(model or {})}
        model["pretrained_tokenizer_name_or_path"] = str(text / "words")
        data = {"train_dataset_name_or_path": str(text / "text.txt"), "max_sequence_length": 32,
                "train_batch_size": 4}  # fmt: skip
        run = {
            "output": str(tmp_path / "run"),
            "progress": "none",
            "checkpoint_every_steps": 2,
            **run,
        }
        trainer = {"max_steps": steps, "accelerator": "cpu", "precision": "32-true",
                   "limit_val_batches": 1}  # fmt: skip
        prepared_run = Run({"model": model, "data": data, "trainer": trainer, "run": run},
                   build_pretraining, resume)  # fmt: skip
        prepared_run.trainer.callbacks[1:1] = callbacks
        prepared_run.prepare()
        return prepared_run

    return make


class At(Callback):
    "Calls a function at the end of a step."

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == self.step:
            self.act(pl_module)


def poison(module):
    with torch.no_grad():
        next(module.parameters())[0] = torch.nan


def test_weights_that_are_not_finite_replace_no_checkpoint(make_run, tmp_path):
    run = make_run(callbacks=[At(5, poison)], keep_last=1, skip_nonfinite=False)
    with pytest.raises(TrainingStopped, match="step 6.*step-00000004.ckpt"):
        run.fit()
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000004.ckpt"]
    assert (tmp_path / "run/models/step-00000004/model.safetensors").exists()
    assert "not finite" in load_json(tmp_path / "run/metrics.json")["stopped"]


@pytest.mark.parametrize("options, model, reason", [
    ({"stop_above": 0.1, "val_every_steps": 2}, {}, "val_loss"),
    ({"skip_spikes": False}, {"learning_rate": 1e30, "scheduler_warmup_steps": 0}, "not finite"),
])  # fmt: skip
def test_a_run_that_a_guard_ends_is_saved_and_fails(
    make_run, tmp_path, options, model, reason, capsys
):
    run = make_run(40, model=model, **options)
    assert run_command("pretrain", run.fit) == 4
    assert reason in capsys.readouterr().err
    saved = load_json(tmp_path / "run/metrics.json")
    assert (tmp_path / f"run/checkpoints/step-{saved['steps']:08}.ckpt").exists()


def test_a_run_without_a_reader_is_saved_and_fails(make_run, tmp_path, monkeypatch):
    class Gone:
        encoding = "utf-8"

        def write(self, text):
            raise BrokenPipeError

        flush = fileno = write

    monkeypatch.setattr("bertlab.train.history.os.dup2", lambda *_: None)
    monkeypatch.setattr(Gone, "fileno", lambda self: 1)

    def say(_):
        monkeypatch.setattr(sys, "stdout", Gone())
        print_line("a line that nobody reads")
        monkeypatch.undo()

    run = make_run(callbacks=[At(3, say)])
    assert run_command("pretrain", run.fit) == 130
    assert (tmp_path / "run/checkpoints/step-00000003.ckpt").exists()
    with monkeypatch.context() as patched, pytest.raises(BrokenPipeError):
        patched.setattr(sys, "stdout", Gone())
        print_line("no run is in progress")


def test_a_stopped_run_names_its_best_weights(make_run, tmp_path):
    run = make_run(
        callbacks=[At(3, lambda _: signal.raise_signal(signal.SIGINT))], val_every_steps=2
    )
    with pytest.raises(TrainingInterrupted) as stopped:
        run.fit()
    (line,) = stopped.value._render_traceback_()  # all that a notebook shows
    assert "step 3" in line and str(tmp_path / "run/models/best") in line


def contents(directory):
    return {
        p: p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file() and p.name != ".lock"
    }


def test_a_finished_run_may_be_resumed_and_stays_as_it_is(make_run, tmp_path, capsys):
    first = make_run(4).fit()
    before = contents(tmp_path / "run")
    capsys.readouterr()
    again = make_run(4, resume=True)
    assert "is finished" in capsys.readouterr().out
    assert again.fit() == first and contents(tmp_path / "run") == before
    assert make_run(6, resume=True).fit()["steps"] == 6


@pytest.mark.parametrize("damage, message", [
    ("moments", "optimizer_states"), ("shards", "strategy='fsdp-shards'"), ("weights", "size mismatch"),
])  # fmt: skip
def test_a_failed_resume_writes_nothing(make_run, tmp_path, damage, message):
    make_run(4).fit()
    path = tmp_path / "run/checkpoints/step-00000004.ckpt"
    state = torch.load(path, weights_only=False)
    if damage == "moments":
        del state["optimizer_states"]
    elif damage == "weights":
        name = next(iter(state["state_dict"]))
        state["state_dict"][name] = torch.zeros(2, 3)
    path.unlink()
    if damage == "shards":
        path.mkdir()
        path = path / "meta.pt"
    torch.save(state, path)
    before = contents(tmp_path / "run")
    with pytest.raises((ValueError, RuntimeError), match=message):
        make_run(6, resume=True, val_every_steps=3).fit()
    assert contents(tmp_path / "run") == before


def test_a_resume_without_checkpoints_says_so(make_run, tmp_path, capsys):
    make_run(2).fit()
    for path in (tmp_path / "run/checkpoints").iterdir():
        path.unlink()
    capsys.readouterr()
    (tmp_path / "run/metrics.json").unlink()
    assert make_run(2, resume=True).checkpoint is None
    assert "has no checkpoint: the run begins at step 1" in capsys.readouterr().out


def test_an_optimizer_with_averages_is_refused_before_a_file(make_run, tmp_path):
    model = {"optimizer_class": "pytorch_optimizer.ScheduleFreeAdamW"}
    with pytest.raises(ValueError, match="ema_decay=0.9.*ScheduleFreeAdamW"):
        make_run(2, model=model, ema_decay=0.9)
    assert not (tmp_path / "run").exists()


def test_a_run_that_saved_nothing_does_not_block_the_next(make_run, tmp_path, monkeypatch):
    run = make_run(2, validate_first=True)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run.module, "validation_step", interrupted)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run.fit()
    assert make_run(2).fit()["steps"] == 2
    with pytest.raises(ValueError, match="already holds a run"):
        check_run_directory(tmp_path / "run")


def test_checkpoints_hold_no_copy_of_the_history(make_run, tmp_path):
    run = make_run(6, callbacks=[At(5, lambda _: signal.raise_signal(signal.SIGINT))])
    with pytest.raises(TrainingInterrupted):
        run.fit()
    state = torch.load(tmp_path / "run/checkpoints/step-00000005.ckpt", weights_only=False)
    assert state["callbacks"]["History"]["rows"] == 5
    with open(tmp_path / "run/history.csv", "a") as file:
        file.write("6,0.1")  # a session that was killed
    resumed = make_run(6, resume=True)
    resumed.fit()
    assert resumed.history.column("step").tolist() == [1, 2, 3, 4, 5, 6]
    assert resumed.history.rows[:5] == run.history.rows
    lines = (tmp_path / "run/history.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", *(f"{n}.0" for n in range(1, 7))]


def test_metrics_are_json_without_nan(make_run, tmp_path):
    run = make_run(2)
    run.parts.facts = {"unigram_loss": float("nan")}
    run.fit()
    json.loads((tmp_path / "run/metrics.json").read_text(), parse_constant=pytest.fail)
