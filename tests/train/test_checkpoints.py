"""Model directories and checkpoint series: written whole, kept by rule, refused by name."""

import json
import math
import logging
import os
import random
import signal
import tempfile
import zipfile
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

from bertlab.train.history import History
from bertlab.train.model_directories import (
    ModelDirectories,
    read_state,
    rebuild,
    saved_models,
    full_state_dict,
    atomic_directory,
)
from bertlab.model.config import bert_tiny, modernbert_tiny, roberta_base
from bertlab.data.collators import MaskedLanguageModelingCollator
from bertlab.data.module import PretrainingDataModule
from bertlab.model.huggingface import save_model
from bertlab.model.heads import (
    BertLabForEnhancedMaskedLM,
    BertLabForMaskedDiffusion,
    BertLabForMaskedLM,
)
from bertlab.train.modules import PretrainingModule
from bertlab.train.checkpoints import (
    TrainingCheckpoint,
    RNGState,
    RunCheckpoint,
    AtomicCheckpointIO,
    check_resume,
    latest_checkpoint,
    rng_state,
    read_checkpoint,
    check_same_run,
    run_fingerprint,
    set_rng_state,
)
from bertlab.optim.budgets import BatchSizeWarmup
from bertlab.train.histograms import WeightHistograms
from bertlab.train.monitors import MemoryMonitor, Throughput, get_progress
from bertlab.train.previews import FillMaskPreview
from bertlab.train.batch_size import BatchSizeScheduler
from bertlab.train.stopping import NonFiniteGuard, SpikeGuard, TimeLimit
from bertlab.train.trainer import make_trainer

WORDS = [f"w{i}" for i in range(80)]
SHAPE = dict(vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=2, max_position_embeddings=64)  # fmt: skip


def names(directory):
    return sorted(path.name for path in Path(directory).iterdir())


# ---- directories that are whole or not there ------------------------------------------------------


def killed_at_rename(place, nth):
    "Write a directory in a process of its own, which dies before its n-th rename."
    child = os.fork()
    if child == 0:
        real, calls = Path.rename, []

        def deadly(self, target):
            calls.append(target)
            if len(calls) == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, target)

        Path.rename = deadly
        with atomic_directory(place) as inside:
            (inside / "new").write_text("new")
        os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("existed, nth", [(False, 1), (True, 1), (True, 2)])
def test_a_kill_before_a_rename_leaves_the_old_directory(tmp_path, existed, nth):
    path = tmp_path / "step-00000004"
    if existed:
        with atomic_directory(path) as inside:
            (inside / "old").write_text("old")
    assert killed_at_rename(path, nth) == signal.SIGKILL
    assert any(name.startswith(".") for name in names(tmp_path))
    train(Texts(), 3, [ModelDirectories(tmp_path, None, 9)])
    left = [name for name in names(tmp_path) if name != "step-00000003"]
    assert left == (["step-00000004"] if existed else [])
    assert not existed or names(path) == ["old"]


# ---- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"mode": "low"},
                                     {"every_n_steps": 0}])  # fmt: skip
def test_a_wrong_number_is_named(tmp_path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ModelDirectories(tmp_path, None, **{"every_n_steps": 1, **options})


# ---- what is written ------------------------------------------------------------------------------


def lively(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) / 10)
    return model.eval()


@pytest.mark.parametrize("make, kind", [
    (lambda: BertLabForMaskedLM(modernbert_tiny(**SHAPE)), "ModernBertForMaskedLM"),
    (lambda: BertLabForMaskedLM(bert_tiny(**SHAPE)), "BertForMaskedLM"),
    (lambda: BertLabForMaskedLM(roberta_base(**SHAPE, pad_token_id=1)), "RobertaForMaskedLM"),
    (lambda: BertLabForMaskedDiffusion(modernbert_tiny(**SHAPE)), "ModernBertForMaskedLM"),
    (lambda: BertLabForMaskedLM(modernbert_tiny(**SHAPE, qk_norm=True)), "BertLabForMaskedLM"),
    (lambda: BertLabForEnhancedMaskedLM(modernbert_tiny(**SHAPE)), "BertLabForEnhancedMaskedLM"),
])  # fmt: skip
def test_a_model_is_written_as_what_it_can_be_and_scores_alike(tmp_path, make, kind):
    model = lively(make())
    before = model.config.to_dict()
    save_model(model, None, tmp_path)
    assert model.config.to_dict() == before
    again = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert type(again).__name__ == kind
    ids = torch.arange(5, 25)[None]
    mask = torch.ones_like(ids)
    with torch.no_grad():
        want, got = model(ids, mask).logits, again(ids, attention_mask=mask).logits
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_a_run_leaves_its_last_and_best_models_and_is_not_changed_by_them(tmp_path):
    tokenizer = word_tokenizer(WORDS)
    weights, record = train(Texts(), 11, val_check_steps=4)
    callback = ModelDirectories(tmp_path, tokenizer, every_n_steps=5, keep_last=2)
    again, kept = train(Texts(), 11, [callback], val_check_steps=4)
    assert equal(weights, again), "writing models has changed the run"
    assert kept.validation == record.validation
    # Due: 5 and 10; validated at 4 and 8; the end is 11.
    losses = {v["step"]: v["val_loss"] for v in record.validation}
    best = min(losses, key=losses.get)
    assert names(tmp_path) == ["best", "step-00000010", "step-00000011"]
    state = read_state(tmp_path / "best")
    assert (state["global_step"], state["best_metric"]) == (best, losses[best])
    last = AutoModelForMaskedLM.from_pretrained(tmp_path / "step-00000011").state_dict()
    assert torch.equal(last["model.embeddings.tok_embeddings.weight"],
                       weights["encoder.embeddings.tokens.weight"])  # fmt: skip
    assert json.loads((tmp_path / "best" / "config.json").read_text())["mask_token_id"] == 4


def best_after(directory, steps, value=None, mode="min", **options):
    "The step of `best` after a run of some steps, whose validation has this value."

    class Logs(PretrainingModule):
        def on_validation_epoch_end(self):
            super().on_validation_epoch_end()
            self.log("mine", value)

    models = ModelDirectories(directory, None, 100, keep_last=1, monitor="mine", mode=mode)
    options = {"val_check_steps": steps, "limit_val_batches": 1, **options}
    trainer = make_trainer(steps, "32-true", "cpu", callbacks=[models], **options)
    trainer.fit(Logs(CONFIG), Texts())
    assert [s["global_step"] for s in saved_models(directory).values()] == [steps]
    state = read_state(directory / "best")
    return None if state is None else state["global_step"]


@pytest.mark.parametrize("mode, values, best", [
    ("min", [0.5, 0.4, 0.6], [1, 2, 2]), ("max", [0.5, 0.4, 0.6], [1, 1, 3]),
    ("min", [math.nan, 0.4, math.inf], [None, 2, 2]),
])  # fmt: skip
def test_the_best_model_is_replaced_by_a_better_one(tmp_path, mode, values, best):
    steps = [best_after(tmp_path, n, value, mode) for n, value in enumerate(values, 1)]
    assert steps == best


def test_a_value_of_another_validation_is_forgotten(tmp_path, capsys):
    assert best_after(tmp_path, 1, 0.1) == best_after(tmp_path, 2, 0.2) == 1
    assert best_after(tmp_path, 3, 0.2, limit_val_batches=2) == 3
    assert "another text" in capsys.readouterr().out


def test_the_averaged_weights_are_written_where_a_module_has_some(tmp_path):
    from contextlib import contextmanager

    class Averaged(PretrainingModule):
        @contextmanager
        def evaluation_weights(self):
            bias = self.model.head.bias
            kept = bias.detach().clone()
            with torch.no_grad():
                bias.fill_(7.0)
            yield
            with torch.no_grad():
                bias.copy_(kept)

    trainer = make_trainer(2, "32-true", accelerator="cpu",
                           callbacks=[ModelDirectories(tmp_path, None, every_n_steps=2)])  # fmt: skip
    module = Averaged(CONFIG, scheduler_warmup_steps=1)
    trainer.fit(module, Texts())
    written = AutoModelForMaskedLM.from_pretrained(tmp_path / "step-00000002").state_dict()
    assert (written["decoder.bias"] == 7).all() and (module.model.head.bias != 7).any()


def test_mistakes_are_named_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    steps = []

    class Count(History):
        def on_train_batch_start(self, *args):
            steps.append(1)

    def fit(callback, **options):
        trainer = make_trainer(
            2, "32-true", accelerator="cpu", callbacks=[Count(), callback], **options
        )
        trainer.fit(PretrainingModule(CONFIG, scheduler_warmup_steps=1), Texts())

    too_many = word_tokenizer([f"x{i}" for i in range(300)])
    for callback, message in [
        (
            ModelDirectories(tmp_path / "file" / "models", None, 2),
            "file/models cannot be written to",
        ),
        (
            TrainingCheckpoint(tmp_path / "file" / "checkpoints"),
            "file/checkpoints cannot be written to",
        ),
        (
            ModelDirectories(tmp_path / "m", too_many, 2),
            "304.*vocab_size is 256",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            fit(callback)
    assert not steps
    with pytest.raises(ValueError, match="monitor='loss' is not logged; choose one of .*val_loss"):
        fit(ModelDirectories(tmp_path / "m", None, 2, monitor="loss"), val_check_steps=1)


# ---- a series of checkpoints ----------------------------------------------------------------------


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
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(folder, how, capsys):
    newest = folder / "step-00000010.ckpt"
    damage(newest, how)
    before = names(folder)
    assert latest_checkpoint(folder) == folder / "step-00000008.ckpt"
    said = capsys.readouterr().err.strip()
    assert str(newest) in said and len(said.splitlines()) == 1
    assert names(folder) == before, "nothing is deleted"
    with pytest.raises(ValueError, match="step-00000010.ckpt is damaged"):
        read_checkpoint(newest)


def test_a_flipped_bit_is_not_noticed_by_torch_alone(folder):
    path = folder / "step-00000010.ckpt"
    damage(path, "flipped")
    torch.load(path, weights_only=False)  # loads: this is why checksums are compared


def test_where_no_checkpoint_loads_a_run_does_not_begin_anew_over_them(folder):
    assert latest_checkpoint(folder / "nowhere") is None
    for path in folder.iterdir():
        damage(path, "half")
    with pytest.raises(
        ValueError,
        match="no checkpoint in .* loads.*step-00000010.ckpt is damaged",
    ) as caught:
        latest_checkpoint(folder)
    assert "\n" not in str(caught.value)
    torch.save({"weights": torch.ones(2)}, folder / "step-00000099.ckpt")
    with pytest.raises(ValueError, match="step-00000099.ckpt has no global_step"):
        latest_checkpoint(folder)


def test_first_shards_that_were_cut_off_in_writing_are_passed_by(tmp_path, capsys):
    place = tmp_path / "step-00000002.ckpt"
    place.mkdir()
    (place / "__0_0.distcp").write_bytes(b"half")
    assert latest_checkpoint(tmp_path) is None and "incomplete" in capsys.readouterr().err
    for name in (".metadata", "meta.pt"):
        (place / name).write_bytes(b"not what it is called")
    with pytest.raises(ValueError, match="meta.pt is damaged"):
        latest_checkpoint(tmp_path)


def test_a_run_goes_on_from_the_one_before_a_damaged_one(folder):
    damage(folder / "step-00000010.ckpt", "half")
    weights, record = train(Texts(), 14)
    found = latest_checkpoint(folder)
    resumed, again = train(
        Texts(), 14, [TrainingCheckpoint(folder, every_n_steps=3)], found, seed=5
    )
    np.testing.assert_array_equal(again.column("train_loss"), record.column("train_loss"))
    assert equal(weights, resumed) and latest_checkpoint(folder) == folder / "step-00000014.ckpt"


def test_a_damaged_later_step_does_not_push_out_good_ones(folder):
    damage(folder / "step-00000010.ckpt", "half")
    train(Texts(), 9, [TrainingCheckpoint(folder, every_n_steps=99, keep_last=1)],
          folder / "step-00000008.ckpt")  # fmt: skip
    assert names(folder) == ["step-00000009.ckpt", "step-00000010.ckpt"]
    assert latest_checkpoint(folder) == folder / "step-00000009.ckpt"


def test_what_a_killed_write_left_is_removed_by_the_next_run(tmp_path):
    (tmp_path / ".step-00000004.ckpt.123.tmp").write_bytes(b"half")
    (tmp_path / ".other.tmp").write_bytes(b"not ours")
    train(Texts(), 3, [TrainingCheckpoint(tmp_path, every_n_steps=3)])
    assert names(tmp_path) == [".other.tmp", "step-00000003.ckpt"]


def test_writing_a_checkpoint_says_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        train(Texts(), 3, [TrainingCheckpoint(tmp_path, every_n_steps=1)])
    assert not [said.getMessage() for said in caplog.records if "weights_only" in said.getMessage()]


def test_a_checkpoint_is_written_beside_its_place_and_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.setattr(
        tempfile, "tempdir", str(tmp_path / "nowhere")
    )  # a small or full one is as good as none
    train(Texts(), 3, [Keeps(Path("x")), TrainingCheckpoint(tmp_path / "run", every_n_steps=3)])
    assert names(tmp_path / "run") == ["step-00000003.ckpt"]


def test_a_checkpoint_that_does_not_fit_on_the_drive_is_named_and_leaves_nothing(tmp_path):
    resource = pytest.importorskip("resource")
    path, before = tmp_path / "step-00000003.ckpt", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError) as refused:
            AtomicCheckpointIO().save_checkpoint({"weight": torch.zeros(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused.value.filename == str(path) and str(path) in str(refused.value)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")]
)
def test_a_drive_that_a_checkpoint_has_just_filled_does_not_end_the_run(
    tmp_path, monkeypatch, error
):
    save, written = torch.save, []

    def fills(content, file, *more):
        if written:
            raise error
        written.append(save(content, file, *more))

    monkeypatch.setattr(torch, "save", fills)
    AtomicCheckpointIO().save_checkpoint(
        {"callbacks": {"Keeps": {"kept": 1}}, "state_dict": {}}, tmp_path / "a.ckpt"
    )
    assert names(tmp_path) == ["a.ckpt"]


def test_a_file_with_code_in_it_is_refused_unless_it_is_trusted(folder):
    state = torch.load(folder / "step-00000006.ckpt")
    torch.save({**state, "callback": Path("x")}, folder / "step-00000012.ckpt")
    with pytest.raises(ValueError, match="holds pathlib.* which safe loading refuses"):
        read_checkpoint(folder / "step-00000012.ckpt")
    assert latest_checkpoint(folder).name == "step-00000010.ckpt"
    assert latest_checkpoint(folder, weights_only=False).name == "step-00000012.ckpt"


def test_a_checkpoint_of_a_run_with_every_callback_holds_only_what_safe_loading_takes(tmp_path):
    tokenizer, history = word_tokenizer(WORDS), History()
    watching = [history, *get_progress("plain", history), NonFiniteGuard(), SpikeGuard(), TimeLimit("1h"),
                Throughput(2), MemoryMonitor(2),
                WeightHistograms(["*.weight"], 2), FillMaskPreview(["w1 [MASK] w2"], tokenizer, 2),
                ModelDirectories(tmp_path / "models", tokenizer, 4),
                TrainingCheckpoint(tmp_path / "checkpoints", every_n_steps=4)]  # fmt: skip
    trainer = make_trainer(4, "32-true", "cpu", callbacks=watching, val_check_steps=2)
    module = PretrainingModule(CONFIG, scheduler_warmup_steps=1)
    trainer.fit(module, Texts())
    path = tmp_path / "checkpoints" / "step-00000004.ckpt"
    state = torch.load(path, weights_only=True)  # plain torch, nothing allowed besides
    assert len(state["callbacks"]) >= 8
    again = PretrainingModule.load_from_checkpoint(path, weights_only=True)
    again.configure_model()
    assert again.hparams["scheduler_warmup_steps"] == 1


class Keeps(Callback):
    "Somebody's callback, with whatever it was given in its state."

    def __init__(self, kept=None):
        self.kept = kept

    def state_dict(self):
        return {"kept": self.kept}

    def load_state_dict(self, state):
        self.kept = state["kept"]


def test_a_number_of_numpy_in_a_callbacks_state_is_read_by_whoever_accepts_the_file(
    tmp_path, capsys
):
    train(Texts(), 4, [Keeps(np.float64(2.5)), TrainingCheckpoint(tmp_path, 4)])
    assert "safe loading" not in capsys.readouterr().out
    keeper = Keeps()
    train(Texts(), 5, [keeper, TrainingCheckpoint(tmp_path, 4)], latest_checkpoint(tmp_path))
    assert keeper.kept == 2.5 and (tmp_path / "step-00000005.ckpt").exists()


def test_generators_go_on_as_they_were_through_a_file(tmp_path):
    draw = lambda: (random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item())  # noqa: E731
    draw()  # NumPy keeps the second of two normal numbers
    torch.save(rng_state(), tmp_path / "states.pt")
    want = draw()
    set_rng_state(torch.load(tmp_path / "states.pt", weights_only=True))
    assert draw() == want


@pytest.mark.parametrize("kept, world, sharers, found", [
    (1, 2, 2, [0, 0]), (2, 2, 2, [0, 0]), (2, 4, 4, [0, 0, 0, 0]), (4, 4, 2, [0, 0, 2, 2]), (2, 4, 2, [0, 0, 0, 0]),
    (2, 2, 1, [0, 1]), (1, 2, 1, [0, 0]), (4, 2, 1, [0, 1]), (3, 5, 1, [0, 1, 2, 0, 1]),
])  # fmt: skip
def test_who_computes_a_layer_together_goes_on_with_one_generator_and_nobody_begins_anew(
    monkeypatch, kept, world, sharers, found
):
    states, put_back = list(range(kept)), []
    monkeypatch.setattr("bertlab.train.checkpoints.set_rng_state", put_back.append)
    for rank in range(world):
        trainer = SimpleNamespace(global_rank=rank, strategy=SimpleNamespace(tensor=sharers))
        callback = RNGState()
        callback.on_load_checkpoint(trainer, None, {"rng_state": states})
        callback.on_train_start(trainer, None)
    assert put_back == found


def test_the_generator_of_an_apple_gpu_goes_on_too(monkeypatch):
    apple = torch.Generator().manual_seed(5)  # a pretended one
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.mps.get_rng_state", apple.get_state)
    monkeypatch.setattr("torch.mps.set_rng_state", apple.set_state)
    states, draw = rng_state(), lambda: torch.rand(1, generator=apple).item()
    want = draw()
    set_rng_state(states)
    assert draw() == want
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    set_rng_state(states)  # a run may go on elsewhere
    assert "mps" not in rng_state()


def test_a_run_on_the_cpu_leaves_a_gpu_that_is_there_alone(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda: pytest.fail("CUDA would begin here"))
    assert "cuda" not in rng_state()


class Trap:
    "What a hostile file holds: a call that whoever loads it makes."

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("way", ["read_checkpoint", "latest_checkpoint", "fit", "validate"])
def test_a_hostile_checkpoint_runs_no_code_and_is_refused_in_one_sentence(
    folder, tmp_path_factory, way
):
    sprung = tmp_path_factory.mktemp("trap") / "sprung"
    path = folder / "step-00000012.ckpt"
    torch.save({**torch.load(folder / "step-00000010.ckpt"), "trap": Trap(sprung)}, path)
    module = PretrainingModule(CONFIG, scheduler_warmup_steps=1)
    trainer = make_trainer(14, "32-true", accelerator="cpu", val_check_steps=1)
    if way == "latest_checkpoint":
        assert latest_checkpoint(folder) == folder / "step-00000010.ckpt"
    else:
        ways = {
            "read_checkpoint": lambda: read_checkpoint(path),
            "fit": lambda: trainer.fit(module, Texts(), ckpt_path=path),
            "validate": lambda: trainer.validate(module, Texts(), ckpt_path=path, verbose=False),
        }
        with pytest.raises(
            ValueError, match="step-00000012.ckpt holds .*mkdir, which safe loading"
        ) as caught:
            ways[way]()
        assert "\n" not in str(caught.value)
    assert not sprung.exists()


@pytest.mark.parametrize("how", ["half", "flipped", "empty"])
def test_a_damaged_checkpoint_given_to_fit_is_one_sentence(folder, how):
    path = folder / "step-00000010.ckpt"
    damage(path, how)
    trainer = make_trainer(14, "32-true", accelerator="cpu")
    with pytest.raises(ValueError, match="step-00000010.ckpt is damaged") as caught:
        trainer.fit(PretrainingModule(CONFIG, scheduler_warmup_steps=1), Texts(), ckpt_path=path)
    assert "\n" not in str(caught.value)


# ---- is it the same run? --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
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
        return PretrainingModule(
            {**CONFIG, **changes.pop("shape", {})}, scheduler_warmup_steps=1, **changes
        )

    trainer = make_trainer(4, "32-true", accelerator="cpu",
                           callbacks=[TrainingCheckpoint(folder / "checkpoints", every_n_steps=4)])  # fmt: skip
    trainer.fit(make_module(), make_data())
    return folder / "checkpoints" / "step-00000004.ckpt", make_data, make_module


def test_the_same_run_is_let_through_and_its_model_is_not_built(begun):
    path, make_data, make_module = begun
    module = make_module()
    assert check_resume(path, module, make_data(), 8) == 4 and module.model is None
    assert check_resume(path, module, make_data(num_workers=2), -1) == 4
    assert check_resume(path, make_module(learning_rate=1e-3), make_data(val_batch_size=2), 5) == 4
    assert check_resume(path, make_module(loss_kwargs={"chunk_size": 8}), make_data(), 5) == 4


class Shy(MaskedLanguageModelingCollator):
    "Somebody's own collator, for an objective that bertlab has."


class Momentum(torch.optim.SGD):
    "Somebody's own optimizer."


def momentum(params, lr):
    return torch.optim.SGD(params, lr, momentum=0.9)


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
    ({}, {"shape": {"hidden_activation": "silu"}}, "hidden_activation is"),
    ({}, {"optimizer_class": "lion"}, "optimizer_class is 'adamw' there and 'lion' here"),
    ({}, {"loss_kwargs": {"z_weight": 0.01}}, "z_weight is 0.0 there and 0.01 here"),
    ({}, {"loss_kwargs": {"label_smoothing": 0.1}}, "label_smoothing is 0.0 there and 0.1 here"),
    ({"collator": Shy}, {}, "collator is None there and 'test_checkpoints.Shy' here"),
    ({}, {"weight_decay": 0.1}, "weight_decay is .* there and 0.1 here"),
    ({}, {"optimizer_kwargs": {"betas": [0.9, 0.5]}}, "optimizer_kwargs is None there and"),
])  # fmt: skip
def test_another_run_is_refused_in_one_line_before_anything_is_built(begun, data, module, message):
    path, make_data, make_module = begun
    other = make_module(**module)
    with pytest.raises(ValueError, match=message) as caught:
        check_resume(path, other, make_data(**data), 8)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value) and other.model is None


def test_a_module_that_is_loaded_from_a_checkpoint_goes_on_as_the_run_that_wrote_it(
    begun, tmp_path
):
    _, make_data, make_module = begun

    def fit(module, steps, path=None):
        trainer = make_trainer(
            steps, "32-true", accelerator="cpu", callbacks=[TrainingCheckpoint(tmp_path, 2)]
        )
        trainer.fit(module, make_data(), ckpt_path=path)
        return trainer.global_step

    fit(make_module(optimizer_class=Momentum), 2)
    path = latest_checkpoint(tmp_path)
    assert fit(PretrainingModule.load_from_checkpoint(path), 3, path) == 3


def test_a_changed_length_is_announced_with_the_rate_and_so_is_the_jump(tmp_path, begun, capsys):
    _, make_data, make_module = begun
    cooling = {"learning_rate": 1e-3, "scheduler_cooldown_steps": 6}

    def fit(steps, path=None):
        trainer = make_trainer(steps, "32-true", accelerator="cpu",
                               callbacks=[TrainingCheckpoint(tmp_path, every_n_steps=8)])  # fmt: skip
        trainer.fit(make_module(**cooling), make_data(), ckpt_path=path)

    fit(8)
    path = latest_checkpoint(tmp_path)
    assert check_resume(path, make_module(**cooling), make_data(), 8 + 12) == 8
    (said,) = capsys.readouterr().out.strip().splitlines()
    assert "max_steps was 8" in said and "is 20 now" in said and "step 8" in said
    fit(20, path)
    assert "the learning rate goes from 0 to 0.001 at step 8" in capsys.readouterr().out
    for old in tmp_path.iterdir():
        old.unlink()
    fit(12)  # with a checkpoint at step 8; as long as planned, there is nothing to announce
    capsys.readouterr()
    path = tmp_path / "step-00000008.ckpt"
    assert check_resume(path, make_module(**cooling), make_data(), 12) == 8
    fit(12, path)
    assert "learning rate" not in capsys.readouterr().out


def test_the_rate_that_is_announced_is_the_run_s_and_not_that_of_an_override(
    tmp_path, begun, capsys
):
    _, make_data, make_module = begun
    options = {"learning_rate": 1e-3, "parameter_overrides": {"*embeddings*": {"lr": 1e-5}}}

    def fit(steps, path=None, **more):
        series = TrainingCheckpoint(tmp_path, every_n_steps=4)
        trainer = make_trainer(steps, "32-true", accelerator="cpu", callbacks=[series])
        trainer.fit(make_module(**{**options, **more}), make_data(), ckpt_path=path)

    fit(4)
    path = latest_checkpoint(tmp_path)
    check_resume(path, make_module(**options), make_data(), 8)
    assert "max_steps was 4" in capsys.readouterr().out
    fit(6, path, learning_rate=2e-3)
    assert "the learning rate goes from 0.001 to 0.002 at step 4" in capsys.readouterr().out


@pytest.mark.parametrize("max_steps", [1, 3, 4])
def test_steps_that_are_already_passed_are_refused(begun, max_steps):
    path, make_data, make_module = begun
    with pytest.raises(ValueError, match=f"max_steps={max_steps} is already passed.* at step 4"):
        check_resume(path, make_module(), make_data(), max_steps)


def test_a_checkpoint_that_is_not_there_or_not_writable_is_refused(begun, tmp_path, monkeypatch):
    path, make_data, make_module = begun
    with pytest.raises(ValueError, match="none.ckpt does not exist"):
        check_resume(tmp_path / "none.ckpt", make_module(), make_data(), 8)
    (tmp_path / "half").mkdir()
    with pytest.raises(ValueError, match="not a complete"):
        check_resume(tmp_path / "half", make_module(), make_data(), 8)

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(ValueError, match="cannot be written to .Permission denied"):
        check_resume(path, make_module(), make_data(), 8)


def test_lightning_refuses_another_run_even_where_nobody_asked(begun):
    path, make_data, make_module = begun
    trainer = make_trainer(8, "32-true", accelerator="cpu",
                           callbacks=[TrainingCheckpoint(path.parent, every_n_steps=4)])  # fmt: skip
    with pytest.raises(ValueError, match="cannot resume .*seed is 0 there and 1 here"):
        trainer.fit(make_module(), make_data(seed=1), ckpt_path=path)


def test_another_number_of_rows_in_a_step_is_another_run_unless_a_callback_steers_it(begun):
    path, make_data, make_module = begun

    def go_on(accumulate, *more):
        callbacks = [*more, TrainingCheckpoint(path.parent, every_n_steps=99)]
        trainer = make_trainer(
            4, "32-true", accelerator="cpu", callbacks=callbacks, accumulate_grad_batches=accumulate
        )
        trainer.fit(make_module(), make_data(), ckpt_path=path)

    with pytest.raises(ValueError, match="accumulate_grad_batches is 1 there and 4 here"):
        go_on(4)
    go_on(1)
    kept = read_checkpoint(path)["fingerprint"]
    assert kept["accumulate_grad_batches"] == 1
    steered = BatchSizeScheduler(BatchSizeWarmup(1, 4, 10_000, tokens_per_micro_batch=128))
    series = TrainingCheckpoint(path.parent)
    make_trainer(1, "32-true", accelerator="cpu", callbacks=[steered, series]).fit(
        make_module(), make_data()
    )
    assert (
        "accumulate_grad_batches"
        not in read_checkpoint(path.parent / "step-00000001.ckpt")["fingerprint"]
    )


class StepRows(Callback):
    "Hashes of the rows of each step, of their losses, and when there was a validation."

    def __init__(self):
        self.rows, self.losses, self.validated = {}, {}, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        seen = self.rows.setdefault(trainer.global_step, set())
        real = [n for n, row in enumerate(batch["attention_mask"]) if row.any()]
        seen |= {
            hash((batch["input_ids"][n].numpy().tobytes(), batch["labels"][n].numpy().tobytes()))
            for n in real
        }

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if "train_loss" in trainer.callback_metrics:  # of the last whole step
            self.losses[trainer.global_step - 1] = trainer.callback_metrics["train_loss"].item()

    def on_validation_end(self, trainer, pl_module):
        self.validated.append(trainer.global_step)


@pytest.mark.parametrize("stop", [3, 13])  # in the first epoch of 11 steps, and in the second
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("rows, window", [(2, 4), (8, 1), (1, 8)])
def test_a_run_goes_on_in_micro_batches_of_another_size_with_the_same_steps(
    begun, tmp_path, rows, window, streaming, stop
):
    _, make_data, make_module = begun
    more = {"streaming": True} if streaming else {"packing_pad_to_budget": True}

    def fit(folder, rows, window, path=None):
        watch, series = StepRows(), TrainingCheckpoint(folder, every_n_steps=stop, keep_last=99)
        trainer = make_trainer(16, "32-true", accelerator="cpu", callbacks=[watch, series], accumulate_grad_batches=window,
                               val_check_steps=5)  # fmt: skip
        data, module = make_data(train_batch_size=rows, **more), make_module()
        torch.manual_seed(0)
        if path:
            assert (
                check_resume(
                    path,
                    make_module(),
                    make_data(train_batch_size=rows, **more),
                    16,
                    trainer=trainer,
                )
                == stop
            )
        trainer.fit(module, data, ckpt_path=path)
        return watch, trainer

    whole, trainer = fit(tmp_path / "whole", 4, 2)
    if not streaming:
        assert len(trainer.datamodule.batches) == 22
    later, trainer = fit(
        tmp_path / "later", rows, window, tmp_path / "whole" / f"step-{stop:08}.ckpt"
    )
    assert trainer.global_step == 16 and sorted(later.rows) == list(range(stop, 16))
    assert later.validated == [step for step in whole.validated if step > stop] != []
    # The end of a pass over a stream has as many blank rows as its last round needs, and the next one begins there.
    same = range(stop, 10 if streaming and stop < 10 else 16)
    assert [later.rows[step] for step in same] == [whole.rows[step] for step in same]
    assert [later.losses[step] for step in same] == pytest.approx(
        [whole.losses[step] for step in same], abs=2e-5
    )


def test_an_epoch_that_was_over_begins_anew_in_smaller_micro_batches(begun, tmp_path):
    _, make_data, make_module = begun

    def fit(folder, steps, rows, window, path=None):
        watch, series = StepRows(), TrainingCheckpoint(folder, every_n_steps=10)
        trainer = make_trainer(
            steps,
            "32-true",
            accelerator="cpu",
            callbacks=[watch, series],
            accumulate_grad_batches=window,
        )
        trainer.fit(make_module(), make_data(train_batch_size=rows), ckpt_path=path)
        return watch, trainer

    _, trainer = fit(tmp_path / "whole", 10, 8, 1)
    assert (
        len(trainer.datamodule.batches) == 10 and trainer.datamodule.batches.delivered == 10
    )  # the epoch's last
    rest = len(trainer.datamodule.train_dataset) - 80
    assert rest // 2, "smaller batches have one more in an epoch"
    later, trainer = fit(tmp_path / "later", 13, 2, 4, tmp_path / "whole" / "step-00000010.ckpt")
    straight, _ = fit(tmp_path / "straight", 20, 2, 4)
    second = 10 + bool(rest // 2)  # the step with which the second epoch begins there
    assert [later.rows[10 + n] for n in range(3)] == [straight.rows[second + n] for n in range(3)]
    assert all(len(later.rows[10 + n]) == 8 for n in range(3))


def test_a_checkpoint_that_does_not_know_its_place_in_rows_goes_on_in_its_own_micro_batches_alone(
    begun,
):
    path, make_data, make_module = begun
    now = run_fingerprint(make_module(), make_data(train_batch_size=2)) | {
        "processes": 1,
        "accumulate_grad_batches": 2,
    }
    kept = run_fingerprint(make_module(), make_data()) | {
        "processes": 1,
        "accumulate_grad_batches": 1,
    }
    check_same_run("run.ckpt", kept, now)
    del kept["other micro-batches"]
    with pytest.raises(
        ValueError, match="train_batch_size is 4 there and 2 here; accumulate_grad_batches"
    ):
        check_same_run("run.ckpt", kept, now)


@pytest.mark.parametrize("rows, window", [(2, 4), (8, 1)])
def test_a_run_over_several_files_goes_on_in_micro_batches_of_another_size_with_the_same_steps(
    begun, tmp_path, rows, window
):
    "Lanes take turns by the batches of the run's beginning, so it was refused."
    _, make_data, make_module = begun
    (tmp_path / "own").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "own" / f"{name}.txt").write_text(
            "\n".join(f"w{n} w{n % 7} w{n % 11}" for n in range(80))
        )

    def fit(folder, rows, window, path=None):
        data = lambda: PretrainingDataModule(str(tmp_path / "own"), make_data().tokenizer, max_sequence_length=32,  # noqa: E731
                                             train_batch_size=rows, streaming=True)  # fmt: skip
        watch, series = StepRows(), TrainingCheckpoint(folder, every_n_steps=3, keep_last=99)
        trainer = make_trainer(
            8,
            "32-true",
            accelerator="cpu",
            callbacks=[watch, series],
            accumulate_grad_batches=window,
        )
        torch.manual_seed(0)
        if path:
            assert check_resume(path, make_module(), data(), 8, trainer=trainer) == 3
        trainer.fit(make_module(), data(), ckpt_path=path)
        return watch, trainer

    whole, trainer = fit(tmp_path / "whole", 4, 2)
    assert trainer.datamodule.batches.stream.num_shards == 3
    later, _ = fit(tmp_path / "later", rows, window, tmp_path / "whole" / "step-00000003.ckpt")
    assert sorted(later.rows) == list(range(3, 8))
    assert [later.rows[step] for step in range(3, 8)] == [whole.rows[step] for step in range(3, 8)]
    assert [later.losses[step] for step in range(3, 8)] == pytest.approx(
        [whole.losses[step] for step in range(3, 8)], abs=2e-5
    )


def test_a_place_that_batches_cannot_take_is_refused_before_anything_is_written(begun, tmp_path):
    _, make_data, make_module = begun

    def parts(rows, window):
        trainer = make_trainer(4, "32-true", accelerator="cpu", callbacks=[TrainingCheckpoint(tmp_path / "run", 2)],
                               accumulate_grad_batches=window, limit_train_batches=4)  # fmt: skip
        return make_module(), make_data(train_batch_size=rows), trainer

    module, data, trainer = parts(4, 1)
    trainer.fit(module, data)
    module, data, trainer = parts(2, 2)
    with pytest.raises(ValueError, match="limit_train_batches counts.*resume with batches of 4"):
        check_resume(tmp_path / "run" / "step-00000002.ckpt", module, data, 4, trainer=trainer)


def test_rows_that_make_no_whole_rounds_of_another_size_are_refused(begun):
    _, make_data, _ = begun
    before, after = make_data(train_batch_size=2), make_data(train_batch_size=4)
    for data in (before, after):
        data.prepare_data()
        data.setup("fit")
    state = {**before.train_dataloader().state_dict(), "delivered": 3}
    with pytest.raises(ValueError, match="after 6 rows.*resume with batches of 2"):
        after.train_dataloader().load_state_dict(state)
    loader = after.train_dataloader()
    loader.load_state_dict(
        {**state, "delivered": len(before.batches) + 4}
    )  # the second epoch's fifth batch
    assert loader.delivered == len(loader) + 2


def test_a_checkpoint_without_a_fingerprint_is_only_asked_for_its_step(begun, tmp_path):
    _, make_data, make_module = begun
    path = tmp_path / "last.ckpt"
    train(Texts(), 3, [RunCheckpoint(path)])
    assert check_resume(path, make_module(), make_data(), 8) == 3


def test_a_fingerprint_is_plain_and_knows_a_stream_by_its_sources(begun):
    _, make_data, make_module = begun
    stream = run_fingerprint(make_module(), make_data(streaming=True))
    assert json.loads(json.dumps(stream)) == stream
    assert stream["training text"] != run_fingerprint(
        make_module(), make_data("other.txt", streaming=True))["training text"]  # fmt: skip


def test_texts_in_memory_that_are_mixed_otherwise_are_another_run(begun):
    path, _, make_module = begun
    files = [str(path.parents[1] / name) for name in ("text.txt", "other.txt")]
    facts = [run_fingerprint(make_module(), PretrainingDataModule(
        files, word_tokenizer(WORDS), data_kwargs={"mixture_weights": rates})) for rates in ([1, 1], [1, 2])]  # fmt: skip
    with pytest.raises(ValueError, match="mixture_weights is"):
        check_same_run("run.ckpt", *facts)


def mine(parameters, **options):
    return torch.optim.SGD(parameters, lr=options["lr"])


# ---- spread over processes ------------------------------------------------------------------------


def gather_in_process():
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = lively(BertLabForMaskedLM(modernbert_tiny(**SHAPE)))
    want = {name: weight.clone() for name, weight in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    assert model.head.bias.to_local().numel() == SHAPE["vocab_size"] // 2
    got = full_state_dict(model)
    assert rank or got.keys() == want.keys() and equal(got, want)
    assert rank or equal(rebuild(model, got).state_dict(), want)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_a_model_spread_over_two_processes_is_gathered_whole():
    run_on_ranks(gather_in_process)


def test_an_ordinary_model_is_copied_and_not_shared():
    model = BertLabForMaskedLM(modernbert_tiny(**SHAPE))
    taken = full_state_dict(model)
    with torch.no_grad():
        model.head.bias.fill_(3.0)
    assert (taken["head.bias"] == 0).all()


def test_a_collator_of_ones_own_and_the_weights_of_diffusion_are_part_of_the_run(begun):
    _, make_data, make_module = begun
    by_class, by_name = (
        run_fingerprint(make_module(), make_data(collator=collator))
        for collator in (Shy, "test_checkpoints.Shy")
    )
    assert by_class == by_name
    with pytest.raises(ValueError, match="collator is 'test_checkpoints.Shy' there and None here"):
        check_same_run("run.ckpt", by_class, run_fingerprint(make_module(), make_data()))
    weighted, plain = (
        run_fingerprint(make_module(objective="diffusion", plain_mean=plain), None)
        for plain in (False, True)
    )
    with pytest.raises(ValueError, match="plain_mean is False there and True here"):
        check_same_run("run.ckpt", weighted, plain)


@pytest.mark.parametrize("changed", [{"mixture_weights": [0.4, 0.6]}, {"max_repetition": 2}])
def test_a_stream_that_is_mixed_otherwise_is_another_run(begun, changed):
    path, _, make_module = begun
    files = [str(path.parents[1] / name) for name in ("text.txt", "other.txt")]

    def fingerprint(**options):
        data = PretrainingDataModule(
            files, word_tokenizer(WORDS), max_sequence_length=32, train_batch_size=4,
            streaming=True, data_kwargs={"mixture_weights": [0.5, 0.5], **options})  # fmt: skip
        return run_fingerprint(make_module(), data)

    with pytest.raises(ValueError, match=next(iter(changed))):
        check_same_run("run.ckpt", fingerprint(), fingerprint(**changed))
    # A broken row that is left out from now on was never read.
    check_same_run("run.ckpt", fingerprint(), fingerprint(on_error="skip"))
