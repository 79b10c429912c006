"""Checkpoints and the model directories beside them: complete, few, and of the same run."""

import json
import logging
import math
import os
import random
import signal
import zipfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from ranks import run_on_ranks
from test_training import CONFIG, Texts, equal, train, word_tokenizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForMaskedLM

from bertlab.core.files import atomic_directory
from bertlab.core.serialization import load_json
from bertlab.data.collators import MaskedLanguageModelingCollator
from bertlab.data.module import PretrainingDataModule
from bertlab.model.config import bert_tiny, modernbert_tiny, roberta_base
from bertlab.model.heads import (
    BertLabForEnhancedMaskedLM,
    BertLabForMaskedDiffusion,
    BertLabForMaskedLM,
)
from bertlab.model.huggingface import merged_copy, save_model
from bertlab.optim.budgets import BatchSizeWarmup
from bertlab.train.batch_size import BatchSizeScheduler
from bertlab.train.checkpoints import (
    STATE_FILE,
    AtomicCheckpointIO,
    RNGState,
    TrainingCheckpoint,
    rng_state,
    saved_models,
    set_rng_state,
)
from bertlab.train.histograms import WeightHistograms
from bertlab.train.history import History
from bertlab.train.modules import PretrainingModule
from bertlab.train.monitors import MemoryMonitor, Throughput, get_progress
from bertlab.train.parallel import full_state_dict
from bertlab.train.previews import FillMaskPreview
from bertlab.train.resume import (
    check_resume,
    check_same_run,
    latest_checkpoint,
    read_checkpoint,
    run_fingerprint,
)
from bertlab.train.stopping import NonFiniteGuard, SpikeGuard, TimeLimit
from bertlab.train.trainer import make_trainer

WORDS = [f"w{i}" for i in range(80)]
SHAPE = dict(vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=2, max_position_embeddings=64)  # fmt: skip
CPU = dict(precision="32-true", accelerator="cpu")


def names(directory):
    return sorted(path.name for path in Path(directory).iterdir())


def small_module(**options):
    return PretrainingModule(CONFIG, scheduler_warmup_steps=1, **options)


# ---- what a killed run leaves ---------------------------------------------------------------------


def killed_at_rename(path, nth):
    "Write a directory in a process of its own, which dies before its n-th rename."
    child = os.fork()
    if child == 0:
        rename, calls = Path.rename, []

        def deadly(self, target):
            calls.append(target)
            if len(calls) == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return rename(self, target)

        Path.rename = deadly
        with atomic_directory(path) as inside:
            (inside / "new").write_text("new")
        os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("existed, nth", [(False, 1), (True, 1), (True, 2)])
def test_a_kill_while_a_model_is_written_leaves_the_old_one(tmp_path, existed, nth):
    path, checkpoints = tmp_path / "models" / "step-00000004", tmp_path / "checkpoints"
    path.parent.mkdir()
    if existed:
        with atomic_directory(path) as inside:
            (inside / "old").write_text("old")
    assert killed_at_rename(path, nth) == signal.SIGKILL
    assert any(name.startswith(".") for name in names(path.parent))
    checkpoints.mkdir()
    (checkpoints / ".step-00000004.ckpt.0123456789abcdef.tmp").write_bytes(b"half")
    (checkpoints / ".other.tmp").write_bytes(b"not ours")
    train(Texts(), 3, [TrainingCheckpoint(checkpoints, 9, models=path.parent)])
    assert names(checkpoints) == [".other.tmp", "step-00000003.ckpt"]
    remaining = [name for name in names(path.parent) if name != "step-00000003"]
    assert remaining == (["step-00000004"] if existed else [])
    assert not existed or names(path) == ["old"]


# ---- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"mode": "low"}, {"every_n_steps": 0}])
def test_a_wrong_option_is_named(tmp_path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        TrainingCheckpoint(tmp_path, **options)


def randomized(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) / 10)
    return model.eval()


@pytest.mark.parametrize("make, class_name", [
    (lambda: BertLabForMaskedLM(modernbert_tiny(**SHAPE)), "ModernBertForMaskedLM"),
    (lambda: BertLabForMaskedLM(bert_tiny(**SHAPE)), "BertForMaskedLM"),
    (lambda: BertLabForMaskedLM(roberta_base(**SHAPE, pad_token_id=1)), "RobertaForMaskedLM"),
    (lambda: BertLabForMaskedDiffusion(modernbert_tiny(**SHAPE)), "ModernBertForMaskedLM"),
    (lambda: BertLabForMaskedLM(modernbert_tiny(**SHAPE, qk_norm=True)), "BertLabForMaskedLM"),
    (lambda: BertLabForEnhancedMaskedLM(modernbert_tiny(**SHAPE)), "BertLabForEnhancedMaskedLM"),
])  # fmt: skip
def test_a_model_is_written_as_what_it_can_be(tmp_path, make, class_name):
    model = randomized(make())
    before = model.config.to_dict()
    save_model(model, None, tmp_path)
    assert model.config.to_dict() == before
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert type(loaded).__name__ == class_name
    ids = torch.arange(5, 25)[None]
    mask = torch.ones_like(ids)
    with torch.no_grad():
        expected, actual = model(ids, mask).logits, loaded(ids, attention_mask=mask).logits
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


def test_saving_leaves_the_last_and_best_models_and_no_trace(tmp_path):
    weights, plain = train(Texts(), 11, val_check_steps=4)
    saving = TrainingCheckpoint(tmp_path / "run", 5, keep_last=2, models=tmp_path / "models")
    saved_weights, saved = train(Texts(), 11, [saving], val_check_steps=4)
    assert equal(weights, saved_weights), "writing models has changed the run"
    assert saved.validation == plain.validation
    # Due: 5 and 10; validated at 4 and 8; the end is 11.
    losses = {row["step"]: row["val_loss"] for row in plain.validation}
    best = min(losses, key=losses.get)
    steps = ["step-00000010", "step-00000011"]
    assert names(tmp_path / "models") == ["best", *steps]
    assert names(tmp_path / "run") == [f"{step}.ckpt" for step in steps]
    state = load_json(tmp_path / "models" / "best" / STATE_FILE)
    assert state == {"global_step": best, "best_metric": losses[best], "monitor": "val_loss",
                     "validation": ["given texts"]}  # fmt: skip
    last = AutoModelForMaskedLM.from_pretrained(tmp_path / "models" / steps[1]).state_dict()
    assert torch.equal(last["model.embeddings.tok_embeddings.weight"],
                       weights["encoder.embeddings.tokens.weight"])  # fmt: skip


@pytest.mark.parametrize("mode, values, best", [
    ("min", [0.5, 0.4, 0.6], [1, 2, 2]), ("max", [0.5, 0.4, 0.6], [1, 1, 3]),
    ("min", [math.nan, 0.4, math.inf], [None, 2, 2]),
])  # fmt: skip
def test_the_best_model_is_replaced_by_a_better_one(tmp_path, mode, values, best):
    "Also by that of a resumed session, which knows the value of the one before."

    class Logs(PretrainingModule):
        def on_validation_epoch_end(self):
            super().on_validation_epoch_end()
            self.log("mine", values[self.global_step - 1])

    for steps, expected in enumerate(best, 1):
        saving = TrainingCheckpoint(
            tmp_path / "run", 100, 1, tmp_path / "models", monitor="mine", mode=mode
        )
        options = {"val_check_steps": 1, "limit_val_batches": 1, **CPU}
        trainer = make_trainer(steps, callbacks=[saving], **options)
        trainer.fit(Logs(CONFIG), Texts(), ckpt_path=latest_checkpoint(tmp_path / "run"))
        states = saved_models(tmp_path / "models").values()
        assert [state["global_step"] for state in states] == [steps]
        path = tmp_path / "models" / "best" / STATE_FILE
        assert (load_json(path)["global_step"] if path.exists() else None) == expected


def test_averaged_weights_are_written_where_a_module_has_some(tmp_path):
    class Averaged(PretrainingModule):
        @contextmanager
        def evaluation_weights(self):
            bias = self.model.head.bias
            saved = bias.detach().clone()
            with torch.no_grad():
                bias.fill_(7.0)
            yield
            with torch.no_grad():
                bias.copy_(saved)

    saving = TrainingCheckpoint(tmp_path / "run", 2, models=tmp_path)
    module = Averaged(CONFIG, scheduler_warmup_steps=1)
    make_trainer(2, callbacks=[saving], **CPU).fit(module, Texts())
    written = AutoModelForMaskedLM.from_pretrained(tmp_path / "step-00000002").state_dict()
    assert (written["decoder.bias"] == 7).all() and (module.model.head.bias != 7).any()


def test_mistakes_are_named_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    history = History()

    def fit(callback, **options):
        make_trainer(2, callbacks=[history, callback], **options, **CPU).fit(
            small_module(), Texts()
        )

    for callback in (
        TrainingCheckpoint(tmp_path / "file" / "run"),
        TrainingCheckpoint(tmp_path / "run", models=tmp_path / "file" / "run"),
    ):
        with pytest.raises(ValueError, match="file/run cannot be written"):
            fit(callback)
    assert not history.rows
    with pytest.raises(ValueError, match="monitor='loss' is not logged; choose one of .*val_loss"):
        fit(TrainingCheckpoint(tmp_path, models=tmp_path, monitor="loss"), val_check_steps=1)


def gather_in_process():
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = randomized(BertLabForMaskedLM(modernbert_tiny(**SHAPE)))
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    assert model.head.bias.to_local().numel() == SHAPE["vocab_size"] // 2
    gathered = full_state_dict(model)
    assert rank or gathered.keys() == expected.keys() and equal(gathered, expected)
    assert rank or equal(merged_copy(model, gathered).state_dict(), expected)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_a_model_spread_over_two_processes_is_gathered():
    run_on_ranks(gather_in_process)


def test_an_ordinary_model_is_copied_and_not_shared():
    model = BertLabForMaskedLM(modernbert_tiny(**SHAPE))
    copied = full_state_dict(model)
    with torch.no_grad():
        model.head.bias.fill_(3.0)
    assert (copied["head.bias"] == 0).all()


# ---- files of checkpoints -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    "The last three checkpoints of a run of 10 steps, at 6, 8 and 10."
    folder = tmp_path_factory.mktemp("series")
    train(Texts(), 10, [TrainingCheckpoint(folder, every_n_steps=2)])
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def folder(series, tmp_path):
    for name, content in series.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_the_last_checkpoints_are_kept(series):
    assert list(series) == [f"step-{n:08}.ckpt" for n in (6, 8, 10)]


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "flipped":
        with zipfile.ZipFile(path) as archive:
            tensors = [part for part in archive.infolist() if "/data/" in part.filename]
        largest = max(tensors, key=lambda part: part.file_size)
        content[largest.header_offset + 200 + largest.file_size // 2] ^= 1
    path.write_bytes({"empty": b"", "half": content[: len(content) // 2],
                      "short": content[:-1], "other": b"not a checkpoint"}.get(how, bytes(content)))  # fmt: skip


@pytest.mark.parametrize("how", ["empty", "half", "short", "flipped", "other"])
def test_a_damaged_checkpoint_is_named_and_passed_by(folder, how, capsys):
    newest = folder / "step-00000010.ckpt"
    damage(newest, how)
    if how == "flipped":
        torch.load(newest, weights_only=False)  # torch compares no checksums
    before = names(folder)
    assert latest_checkpoint(folder) == folder / "step-00000008.ckpt"
    message = capsys.readouterr().err.strip()
    assert str(newest) in message and len(message.splitlines()) == 1
    assert names(folder) == before, "nothing is deleted"
    message = f"step-00000010.ckpt is {'empty' if how == 'empty' else 'damaged'}"
    with pytest.raises(ValueError, match=message):
        read_checkpoint(newest)
    with pytest.raises(ValueError, match=message):
        make_trainer(14, **CPU).fit(small_module(), Texts(), ckpt_path=newest)


def test_no_run_begins_over_checkpoints_that_do_not_load(folder):
    assert latest_checkpoint(folder / "nowhere") is None
    for path in folder.iterdir():
        damage(path, "half")
    with pytest.raises(ValueError, match="no checkpoint in .* loads.*step-00000010.ckpt"):
        latest_checkpoint(folder)
    torch.save({"weights": torch.ones(2)}, folder / "step-00000099.ckpt")
    with pytest.raises(ValueError, match="step-00000099.ckpt has no global_step"):
        latest_checkpoint(folder)


def test_shards_that_were_cut_off_in_writing_are_passed_by(tmp_path, capsys):
    path = tmp_path / "step-00000002.ckpt"
    path.mkdir()
    (path / "__0_0.distcp").write_bytes(b"half")
    assert latest_checkpoint(tmp_path) is None and "incomplete" in capsys.readouterr().err
    with pytest.raises(ValueError, match="meta.pt does not exist"):
        read_checkpoint(path)
    (path / "meta.pt").write_bytes(b"not what it is called")
    with pytest.raises(ValueError, match="meta.pt is damaged"):
        latest_checkpoint(tmp_path)


def test_a_run_continues_from_the_one_before_a_damaged_one(folder):
    damage(folder / "step-00000010.ckpt", "half")
    weights, straight = train(Texts(), 14)
    saving, path = TrainingCheckpoint(folder, every_n_steps=3), latest_checkpoint(folder)
    resumed, history = train(Texts(), 14, [saving], path, seed=5)
    np.testing.assert_array_equal(history.column("train_loss"), straight.column("train_loss"))
    assert equal(weights, resumed) and latest_checkpoint(folder) == folder / "step-00000014.ckpt"


def test_a_damaged_later_step_does_not_push_out_good_ones(folder):
    damage(folder / "step-00000010.ckpt", "half")
    saving = TrainingCheckpoint(folder, every_n_steps=99, keep_last=1)
    train(Texts(), 9, [saving], folder / "step-00000008.ckpt")
    assert names(folder) == ["step-00000009.ckpt", "step-00000010.ckpt"]
    assert latest_checkpoint(folder) == folder / "step-00000009.ckpt"


def test_writing_a_checkpoint_prints_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        train(Texts(), 3, [TrainingCheckpoint(tmp_path, every_n_steps=1)])
    assert not [r.getMessage() for r in caplog.records if "weights_only" in r.getMessage()]


def test_a_full_drive_is_named_and_nothing_is_left(tmp_path):
    resource = pytest.importorskip("resource")
    path, before = tmp_path / "step-00000003.ckpt", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError) as refused:
            AtomicCheckpointIO().save_checkpoint({"weight": torch.zeros(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused.value.filename == str(path) and names(tmp_path) == []


def test_a_checkpoint_with_every_callback_loads_safely(tmp_path):
    tokenizer, history = word_tokenizer(WORDS), History()
    watching = [history, *get_progress("plain", history), NonFiniteGuard(), SpikeGuard(), TimeLimit("1h"),
                Throughput(2), MemoryMonitor(2), WeightHistograms(["*.weight"], 2),
                FillMaskPreview(["w1 [MASK] w2"], tokenizer, 2),
                TrainingCheckpoint(tmp_path, every_n_steps=4, models=tmp_path / "models")]  # fmt: skip
    make_trainer(4, callbacks=watching, val_check_steps=2, **CPU).fit(small_module(), Texts())
    path = tmp_path / "step-00000004.ckpt"
    state = torch.load(path, weights_only=True)  # plain torch, nothing allowed besides
    assert len(state["callbacks"]) >= 8
    loaded = PretrainingModule.load_from_checkpoint(path, weights_only=True)
    loaded.configure_model()
    assert loaded.hparams["scheduler_warmup_steps"] == 1


class Keeps(Callback):
    "A user's callback with a number of NumPy in its state."

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_a_number_of_numpy_in_a_callbacks_state_is_read(tmp_path):
    train(Texts(), 4, [Keeps(np.float64(2.5)), TrainingCheckpoint(tmp_path, 4)])
    resumed = Keeps()
    train(Texts(), 5, [resumed, TrainingCheckpoint(tmp_path, 4)], tmp_path)
    assert resumed.value == 2.5 and (tmp_path / "step-00000005.ckpt").exists()


class Trap:
    "What a hostile file holds: a call that loading makes."

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("way", ["read_checkpoint", "latest_checkpoint", "fit", "validate"])
def test_a_hostile_checkpoint_runs_no_code(folder, tmp_path_factory, way):
    sprung = tmp_path_factory.mktemp("trap") / "sprung"
    path = folder / "step-00000012.ckpt"
    torch.save({**torch.load(folder / "step-00000010.ckpt"), "trap": Trap(sprung)}, path)
    module, trainer = small_module(), make_trainer(14, val_check_steps=1, **CPU)
    if way == "latest_checkpoint":
        assert latest_checkpoint(folder) == folder / "step-00000010.ckpt"
    else:
        ways = {
            "read_checkpoint": lambda: read_checkpoint(path),
            "fit": lambda: trainer.fit(module, Texts(), ckpt_path=path),
            "validate": lambda: trainer.validate(module, Texts(), ckpt_path=path, verbose=False),
        }
        with pytest.raises(ValueError, match="step-00000012.ckpt holds .*mkdir"):
            ways[way]()
    assert not sprung.exists()


# ---- generators -----------------------------------------------------------------------------------


def test_generators_continue_as_they_were_through_a_file(tmp_path):
    draw = lambda: (random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item())  # noqa: E731
    draw()  # NumPy keeps the second of two normal numbers
    torch.save(rng_state(), tmp_path / "states.pt")
    expected = draw()
    set_rng_state(torch.load(tmp_path / "states.pt", weights_only=True))
    assert draw() == expected


@pytest.mark.parametrize("saved, world, sharers, restored", [
    (1, 2, 2, [0, 0]), (2, 4, 4, [0, 0, 0, 0]), (4, 4, 2, [0, 0, 2, 2]), (2, 4, 2, [0, 0, 0, 0]),
    (2, 2, 1, [0, 1]), (1, 2, 1, [0, 0]), (4, 2, 1, [0, 1]), (3, 5, 1, [0, 1, 2, 0, 1]),
])  # fmt: skip
def test_processes_of_one_layer_share_a_generator(monkeypatch, saved, world, sharers, restored):
    put_back = []
    monkeypatch.setattr("bertlab.train.checkpoints.set_rng_state", put_back.append)
    for rank in range(world):
        trainer = SimpleNamespace(global_rank=rank, strategy=SimpleNamespace(tensor=sharers))
        callback = RNGState()
        callback.on_load_checkpoint(trainer, None, {"rng_state": list(range(saved))})
        callback.on_train_start(trainer, None)
    assert put_back == restored


def test_a_run_on_the_cpu_leaves_a_gpu_alone(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda: pytest.fail("CUDA would begin here"))
    assert "cuda" not in rng_state()


# ---- is it the same run? --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    "A run of 4 steps on a text file, and how to make its parts again."
    folder = tmp_path_factory.mktemp("begun")
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(WORDS, rng.integers(3, 40))) for _ in range(120)]
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    (folder / "other.txt").write_text("\n".join([*lines[:-1], "w1 w1 w1"]) + "\n")

    def make_data(name="text.txt", words=WORDS, length=32, **options):
        return PretrainingDataModule(str(folder / name), word_tokenizer(words),
                                     max_sequence_length=length, **{"train_batch_size": 4, **options})  # fmt: skip

    def make_module(**changes):
        shape = {**CONFIG, **changes.pop("shape", {})}
        return PretrainingModule(shape, scheduler_warmup_steps=1, **changes)

    saving = TrainingCheckpoint(folder / "checkpoints", every_n_steps=4)
    make_trainer(4, callbacks=[saving], **CPU).fit(make_module(), make_data())
    return folder / "checkpoints" / "step-00000004.ckpt", make_data, make_module


def test_the_same_run_may_continue_and_its_model_is_not_built(started):
    path, make_data, make_module = started
    module = make_module()
    assert check_resume(path, module, make_data(), 8) == 4 and module.model is None
    assert check_resume(path, module, make_data(num_workers=2), -1) == 4
    assert check_resume(path, make_module(learning_rate=1e-3), make_data(val_batch_size=2), 5) == 4
    assert check_resume(path, make_module(loss_kwargs={"chunk_size": 8}), make_data(), 5) == 4


class Shy(MaskedLanguageModelingCollator):
    "A user's own collator, for an objective that bertlab has."


class Momentum(torch.optim.SGD):
    "A user's own optimizer."


@pytest.mark.parametrize("data, module, message", [
    ({"words": WORDS[:-1] + ["other"]}, {}, "tokenizer is"),
    ({"name": "other.txt"}, {}, "training text is"),
    ({"length": 48}, {}, "max_sequence_length is 32 there and 48 here"),
    ({"train_batch_size": 5}, {}, "train_batch_size is 4 there and 5 here"),
    ({"packing": False}, {}, "packing is True there and False here"),
    ({"seed": 1}, {}, "seed is 0 there and 1 here"),
    ({"objective": "diffusion"}, {}, "objective of the data is 'mlm' there and 'diffusion' here"),
    ({}, {"objective": "diffusion"}, "objective is 'mlm' there and 'diffusion' here"),
    ({}, {"shape": {"hidden_size": 32}}, "hidden_size is 16 there and 32 here"),
    ({}, {"optimizer_class": "lion"}, "optimizer_class is 'adamw' there and 'lion' here"),
    ({}, {"loss_kwargs": {"z_weight": 0.01}}, "z_weight is 0.0 there and 0.01 here"),
    ({}, {"loss_kwargs": {"label_smoothing": 0.1}}, "label_smoothing is 0.0 there and 0.1 here"),
    ({"collator": Shy}, {}, "collator is None there and 'test_checkpoints.Shy' here"),
    ({}, {"weight_decay": 0.1}, "weight_decay is .* there and 0.1 here"),
    ({}, {"optimizer_kwargs": {"betas": [0.9, 0.5]}}, "optimizer_kwargs is None there and"),
])  # fmt: skip
def test_another_run_is_refused_before_anything_is_built(started, data, module, message):
    path, make_data, make_module = started
    another = make_module(**module)
    with pytest.raises(ValueError, match=message) as caught:
        check_resume(path, another, make_data(**data), 8)
    assert str(path) in str(caught.value) and another.model is None


def test_lightning_refuses_another_run_without_check_resume(started):
    path, make_data, make_module = started
    trainer = make_trainer(8, callbacks=[TrainingCheckpoint(path.parent)], **CPU)
    with pytest.raises(ValueError, match="cannot resume .*seed is 0 there and 1 here"):
        trainer.fit(make_module(), make_data(seed=1), ckpt_path=path)


def test_a_module_loaded_from_a_checkpoint_continues_its_run(started, tmp_path):
    _, make_data, make_module = started

    def fit(module, steps, path=None):
        trainer = make_trainer(steps, callbacks=[TrainingCheckpoint(tmp_path, 2)], **CPU)
        trainer.fit(module, make_data(), ckpt_path=path)
        return trainer.global_step

    fit(make_module(optimizer_class=Momentum), 2)
    path = latest_checkpoint(tmp_path)
    assert fit(PretrainingModule.load_from_checkpoint(path), 3, path) == 3


def test_a_changed_length_is_announced(started, capsys):
    path, make_data, make_module = started
    assert check_resume(path, make_module(), make_data(), 4 + 12) == 4
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert all(part in line for part in ("max_steps was 4", "is 16 now", "step 4"))


def test_a_checkpoint_that_cannot_be_continued_is_refused(started, tmp_path):
    path, make_data, make_module = started
    for max_steps in (1, 4):
        with pytest.raises(ValueError, match=f"max_steps={max_steps} is already passed.* step 4"):
            check_resume(path, make_module(), make_data(), max_steps)
    with pytest.raises(ValueError, match="none.ckpt does not exist"):
        check_resume(tmp_path / "none.ckpt", make_module(), make_data(), 8)


def test_other_rows_in_a_step_are_another_run_unless_steered(started):
    path, make_data, make_module = started
    trainer = make_trainer(
        8, callbacks=[TrainingCheckpoint(path.parent)], accumulate_grad_batches=4, **CPU
    )
    with pytest.raises(ValueError, match="accumulate_grad_batches is 1 there and 4 here"):
        check_resume(path, make_module(), make_data(), 8, trainer=trainer)
    steered = BatchSizeScheduler(BatchSizeWarmup(1, 4, 10_000, tokens_per_micro_batch=128))
    trainer = make_trainer(8, callbacks=[steered], **CPU)
    assert "accumulate_grad_batches" not in run_fingerprint(make_module(), None, trainer)


class StepRows(Callback):
    "Hashes of the rows of each step, of their losses, and when there was a validation."

    def __init__(self):
        self.rows, self.losses, self.validated = {}, {}, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        rows = self.rows.setdefault(trainer.global_step, set())
        for row_index, row in enumerate(batch["attention_mask"]):
            if row.any():
                parts = (
                    batch[name][row_index].numpy().tobytes() for name in ("input_ids", "labels")
                )
                rows.add(hash(tuple(parts)))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if "train_loss" in trainer.callback_metrics:  # of the last complete step
            self.losses[trainer.global_step - 1] = trainer.callback_metrics["train_loss"].item()

    def on_validation_end(self, trainer, pl_module):
        self.validated.append(trainer.global_step)


def fit_in_steps(folder, steps, make_module, make_data, rows, window, path=None, **options):
    "Fit with micro-batches of some rows; return what each step took, and the trainer."
    watch, every = StepRows(), options.pop("every", 10)
    callbacks = [watch, TrainingCheckpoint(folder, every_n_steps=every, keep_last=99)]
    options = {"accumulate_grad_batches": window, **CPU, **options}
    trainer = make_trainer(steps, callbacks=callbacks, **options)
    torch.manual_seed(0)
    if path:
        check_resume(path, make_module(), make_data(train_batch_size=rows), steps, trainer)
    trainer.fit(make_module(), make_data(train_batch_size=rows), ckpt_path=path)
    return watch, trainer


def assert_same_steps(uninterrupted, later, steps):
    assert [later.rows[step] for step in steps] == [uninterrupted.rows[step] for step in steps]
    assert [later.losses[step] for step in steps] == pytest.approx(
        [uninterrupted.losses[step] for step in steps], abs=2e-5
    )


@pytest.fixture(scope="module", params=[False, True], ids=["rows", "stream"])
def undisturbed(request, started, tmp_path_factory):
    "A run of 16 steps of two micro-batches of 4 rows: its folder, what it took, and its parts."
    _, make_data, make_module = started
    extra = {"streaming": True} if request.param else {"packing_pad_to_budget": True}
    parts = make_module, partial(make_data, **extra)
    folder = tmp_path_factory.mktemp("undisturbed")
    watch, trainer = fit_in_steps(folder, 16, *parts, 4, 2, every=3, val_check_steps=5)
    assert request.param or len(trainer.datamodule.batches) == 22
    return folder, watch, parts


@pytest.mark.parametrize("stop", [3, 12])  # in the first epoch of 11 steps, and in the second
@pytest.mark.parametrize("rows, window", [(2, 4), (8, 1)])
def test_micro_batches_of_another_size_make_the_same_steps(
    undisturbed, tmp_path, rows, window, stop
):
    folder, uninterrupted, parts = undisturbed
    path = folder / f"step-{stop:08}.ckpt"
    later, trainer = fit_in_steps(tmp_path, 16, *parts, rows, window, path, val_check_steps=5)
    assert trainer.global_step == 16 and sorted(later.rows) == list(range(stop, 16))
    assert later.validated == [step for step in uninterrupted.validated if step > stop] != []
    # A stream fills its last round with blank rows, and the next pass begins after it.
    streaming = trainer.datamodule.streaming
    assert_same_steps(uninterrupted, later, range(stop, 10 if streaming and stop < 10 else 16))


def test_an_epoch_that_was_over_begins_anew_in_smaller_batches(started, tmp_path):
    _, make_data, make_module = started
    parts = make_module, lambda **options: make_data(packing_pad_to_budget=False, **options)
    _, trainer = fit_in_steps(tmp_path / "whole", 10, *parts, 8, 1)
    batches = trainer.datamodule.batches
    assert len(batches) == batches.delivered == 10  # the epoch's last
    remaining = len(trainer.datamodule.train_dataset) - 80
    assert remaining // 2, "smaller batches have one more in an epoch"
    path = tmp_path / "whole" / "step-00000010.ckpt"
    later, _ = fit_in_steps(tmp_path / "later", 13, *parts, 2, 4, path)
    straight, _ = fit_in_steps(tmp_path / "straight", 20, *parts, 2, 4)
    second = 10 + bool(remaining // 2)  # the step with which the second epoch begins there
    assert [later.rows[10 + n] for n in range(3)] == [straight.rows[second + n] for n in range(3)]
    assert all(len(later.rows[10 + n]) == 8 for n in range(3))


def test_several_files_continue_in_micro_batches_of_another_size(started, tmp_path):
    _, make_data, make_module = started
    (tmp_path / "own").mkdir()
    for name in ("a", "b", "c"):
        lines = (f"w{n} w{n % 7} w{n % 11}" for n in range(80))
        (tmp_path / "own" / f"{name}.txt").write_text("\n".join(lines))
    parts = make_module, lambda **options: make_data(tmp_path / "own", streaming=True, **options)
    uninterrupted, trainer = fit_in_steps(tmp_path / "whole", 8, *parts, 4, 2, every=3)
    assert trainer.datamodule.batches.stream.num_shards == 3
    path = tmp_path / "whole" / "step-00000003.ckpt"
    later, _ = fit_in_steps(tmp_path / "later", 8, *parts, 2, 4, path, every=3)
    assert sorted(later.rows) == list(range(3, 8))
    assert_same_steps(uninterrupted, later, range(3, 8))


def test_positions_that_other_batches_cannot_take_are_refused(started, tmp_path):
    _, make_data, make_module = started

    def parts(rows, window):
        saving = TrainingCheckpoint(tmp_path, 2)
        options = {"accumulate_grad_batches": window, "limit_train_batches": 4, **CPU}
        trainer = make_trainer(4, callbacks=[saving], **options)
        return make_module(), make_data(train_batch_size=rows), trainer

    module, data, trainer = parts(4, 1)
    trainer.fit(module, data)
    module, data, trainer = parts(2, 2)
    with pytest.raises(ValueError, match="limit_train_batches counts.*resume with batches of 4"):
        check_resume(tmp_path / "step-00000002.ckpt", module, data, 4, trainer=trainer)


def test_rows_that_make_no_full_batches_of_another_size_are_refused(started):
    _, make_data, _ = started
    before, after = make_data(train_batch_size=2), make_data(train_batch_size=4)
    for data in (before, after):
        data.prepare_data()
        data.setup("fit")
    state = {**before.train_dataloader().state_dict(), "delivered": 3}
    with pytest.raises(ValueError, match="after 6 rows.*resume with batches of 2"):
        after.train_dataloader().load_state_dict(state)
    loader = after.train_dataloader()
    loader.load_state_dict({**state, "delivered": len(before.batches) + 4})  # of the second epoch
    assert loader.delivered == len(loader) + 2


def test_a_checkpoint_without_a_fingerprint_is_asked_for_its_step_alone(started, tmp_path):
    path, make_data, make_module = started
    state = torch.load(path)
    del state["fingerprint"]
    torch.save(state, tmp_path / "last.ckpt")
    assert check_resume(tmp_path / "last.ckpt", make_module(), make_data(seed=1), 8) == 4


# ---- fingerprints ---------------------------------------------------------------------------------


def test_a_fingerprint_is_plain_and_knows_a_stream_by_its_sources(started):
    _, make_data, make_module = started
    stream = run_fingerprint(make_module(), make_data(streaming=True))
    assert json.loads(json.dumps(stream)) == stream
    assert stream["training text"] != run_fingerprint(
        make_module(), make_data("other.txt", streaming=True))["training text"]  # fmt: skip


def test_a_collator_is_known_by_class_and_by_name(started):
    _, make_data, make_module = started
    by_class, by_name = (
        run_fingerprint(make_module(), make_data(collator=collator))
        for collator in (Shy, "test_checkpoints.Shy")
    )
    assert by_class == by_name


@pytest.mark.parametrize("streaming, options, changed", [
    (False, {"mixture_weights": [1, 1]}, {"mixture_weights": [1, 2]}),
    (True, {"mixture_weights": [0.5, 0.5]}, {"mixture_weights": [0.4, 0.6]}),
    (True, {"mixture_weights": [0.5, 0.5]}, {"max_repetition": 2}),
])  # fmt: skip
def test_texts_that_are_mixed_otherwise_are_another_run(started, streaming, options, changed):
    path, _, make_module = started
    files = [str(path.parents[1] / name) for name in ("text.txt", "other.txt")]

    def fingerprint(**changes):
        data = PretrainingDataModule(files, word_tokenizer(WORDS), train_batch_size=4,
                                     streaming=streaming, data_kwargs={**options, **changes})  # fmt: skip
        return run_fingerprint(make_module(), data)

    with pytest.raises(ValueError, match=next(iter(changed))):
        check_same_run("run.ckpt", fingerprint(), fingerprint(**changed))
    # A broken row that is left out from now on was never read.
    check_same_run("run.ckpt", fingerprint(), fingerprint(on_error="skip"))
