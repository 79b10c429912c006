"""A run on XLA is the run on a CPU: the same numbers, from one program that is made once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip(
    "torch_xla", reason="needs torch_xla, in an environment of its own: make test-xla"
)

from host_device import stand_in
from lightning.pytorch.callbacks import Callback
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from bertlab.train.checkpoints import TrainingCheckpoint
from bertlab.train.resume import latest_checkpoint
from bertlab.train.history import History
from bertlab.data.module import PretrainingDataModule
from bertlab.train.stopping import NonFiniteGuard, SpikeGuard
from bertlab.model.heads import sample_half_of_pairs
from bertlab.train.modules import PretrainingModule
from bertlab.train.trainer import make_trainer, seed_everything
from bertlab.train.xla import CompileRecorder

stand_in()
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CONFIG = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
              num_attention_heads=2, max_position_embeddings=32)  # fmt: skip


def letters_tokenizer():
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    special = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), names))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def texts(count=61):  # of 1 to 39 tokens; rows hold 30 between [CLS] and [SEP]
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(list(LETTERS), rng.integers(1, 40))) for _ in range(count)]


def train(accelerator, steps, callbacks=(), ckpt_path=None, dropout=0.0, data=None, module=None, precision="32-true",
          **options):  # fmt: skip
    "Train a tiny encoder as a user does; return its history, the counts after each batch, and the module."
    seed_everything(0)
    data = {"max_sequence_length": 32, "train_batch_size": 4, "val_batch_size": 4, **(data or {})}
    rows = PretrainingDataModule(None, letters_tokenizer(), **data)
    rows.set_datasets(texts(), texts(20))
    module = PretrainingModule({**CONFIG, "hidden_dropout": dropout}, learning_rate=5e-3, scheduler_warmup_steps=2,
                               **(module or {}))  # fmt: skip
    history, recorder = History(), CompileRecorder()
    watching = [recorder] if accelerator == "tpu" else []
    trainer = make_trainer(
        steps, precision, accelerator, callbacks=[history, *watching, *callbacks],
        skip_nonfinite=False, **options,  # a test adds the guard itself, to see what it costs
    )  # fmt: skip
    ckpt_path = ckpt_path and latest_checkpoint(ckpt_path)
    trainer.fit(module, rows, ckpt_path=ckpt_path, weights_only=False)
    return history, recorder.counts, module


def test_twenty_steps_equal_those_of_a_plain_cpu_and_nothing_falls_back_to_the_host():
    xla, counts, _ = train("tpu", 20)
    cpu, _, _ = train("cpu", 20)
    np.testing.assert_allclose(
        xla.column("train_loss"), cpu.column("train_loss"), atol=1e-4, rtol=0
    )
    np.testing.assert_allclose(
        xla.column("gradient_norm"), cpu.column("gradient_norm"), atol=1e-3, rtol=0
    )
    assert counts[-1].fallbacks == counts[0].fallbacks == {}
    # A history is fetched at steps 10 and 20; no step between reads a number.
    assert (
        len({c.host_reads for c in counts[:9]}) == 1
        and len({c.host_reads for c in counts[9:19]}) == 1
    )
    # The first fetch may leave a program behind; from there on there is nothing new.
    assert len({c.compilations for c in counts[11:]}) == 1


@pytest.mark.parametrize("packing", [True, False])
def test_three_epochs_of_documents_of_all_lengths_make_no_new_program(packing):
    steps = 45  # 10 packed or 15 single batches are an epoch
    schedule = {"scheduler_training_kind": "cosine", "scheduler_training_decay": 0.2, "scheduler_cooldown_steps": 10,
                "weight_decay": 0.01}  # fmt: skip
    record, counts, _ = train(
        "tpu", steps, val_check_steps=10, data={"packing": packing}, module=schedule
    )
    assert len(set(record.column("learning_rate"))) > 30
    assert len(record.validation) == 4 and np.isfinite(record.column("train_loss")).all()
    # Warm: an epoch, two fetches and two validations (at 10 and 20), and the steps after them.
    assert len({c.compilations for c in counts[21:]}) == 1, [c.compilations for c in counts]
    assert counts[-1].fallbacks == {}


def test_a_rate_that_has_come_to_zero_makes_one_new_program_and_no_more():
    schedule = {
        "scheduler_training_kind": "linear",
        "scheduler_training_steps": 12,
        "scheduler_training_decay": 0.0,
    }
    record, counts, _ = train("tpu", 24, module=schedule)
    rate, made = record.column("learning_rate"), np.array([c.compilations for c in counts])
    assert (rate[:14] > 0).all() and not rate[14:].any()
    assert (
        made[13] == made[12] and made[14] == made[13] + 1 and made[-1] <= made[14] + 1
    )  # the last: a fetch


def test_a_run_that_was_stopped_goes_on_as_if_nothing_had_been(tmp_path):
    whole, _, _ = train("tpu", 8, dropout=0.2)
    dry, _, _ = train("tpu", 8)
    train("tpu", 4, [TrainingCheckpoint(tmp_path / "half", 4)], dropout=0.2)
    rest, counts, _ = train("tpu", 8, ckpt_path=tmp_path / "half", dropout=0.2)
    assert not np.array_equal(
        whole.column("train_loss"), dry.column("train_loss")
    )  # dropout draws numbers
    np.testing.assert_array_equal(rest.column("train_loss"), whole.column("train_loss"))
    assert len({c.host_reads for c in counts}) == 1  # Adam's step count stays where reading is free


def test_a_checkpoint_of_xla_goes_on_where_there_is_no_xla(tmp_path):
    whole, _, _ = train("tpu", 6)
    train("tpu", 3, [TrainingCheckpoint(tmp_path / "half", 3)])
    tensors = []
    saved = torch.load(latest_checkpoint(tmp_path / "half"), weights_only=False)
    walk = lambda x: [walk(y) for y in (x.values() if isinstance(x, dict) else x)] if isinstance(
        x, (dict, list, tuple)) else tensors.append(x)  # fmt: skip
    walk(saved)
    assert {t.device.type for t in tensors if isinstance(t, torch.Tensor)} == {"cpu"}
    rest, _, _ = train("cpu", 6, ckpt_path=tmp_path / "half")
    np.testing.assert_allclose(
        rest.column("train_loss"), whole.column("train_loss"), atol=1e-4, rtol=0
    )


def test_micro_batches_and_validation_equal_those_of_a_cpu():
    options = dict(accumulate_grad_batches=3, val_check_steps=3, limit_val_batches=3)
    xla, counts, _ = train("tpu", 6, **options)
    cpu, _, _ = train("cpu", 6, **options)
    np.testing.assert_allclose(
        xla.column("train_loss"), cpu.column("train_loss"), atol=1e-4, rtol=0
    )
    for ours, theirs in zip(xla.validation, cpu.validation, strict=True):
        assert ours["val_loss"] == pytest.approx(theirs["val_loss"], abs=1e-4)
    assert counts[-1].compilations == counts[12].compilations


@pytest.mark.parametrize("objective", ["diffusion", "enhanced_mlm"])
def test_every_objective_gives_the_losses_of_a_cpu(objective):
    options = dict(data={"objective": objective}, module={"objective": objective})
    xla, counts, _ = train("tpu", 4, **options)
    cpu, _, _ = train("cpu", 4, **options)
    np.testing.assert_allclose(
        xla.column("train_loss"), cpu.column("train_loss"), atol=1e-4, rtol=0
    )
    assert counts[-1].fallbacks == {} and counts[-1].compilations == counts[1].compilations


def test_coins_fall_on_xla_as_on_a_cpu():
    keys = torch.tensor([0, 5, -7, 2**63 - 1, -(2**63)])
    assert torch.equal(
        sample_half_of_pairs(keys.to("xla"), 130).cpu(), sample_half_of_pairs(keys, 130)
    )


class ProductTypes(Callback):
    "Note the type in which the encoder multiplies."

    def on_train_start(self, trainer, pl_module) -> None:
        qkv = pl_module.model.encoder.blocks[0].attention.qkv
        qkv.register_forward_hook(lambda module, inputs, out: self.__dict__.update(dtype=out.dtype))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_sixteen_bits_are_sixteen_bits(precision):
    exact, _, _ = train("tpu", 4)
    types = ProductTypes()
    half, _, module = train("tpu", 4, [types], precision=precision)
    assert types.dtype == torch.bfloat16
    weight = module.model.encoder.blocks[0].attention.qkv.weight
    assert weight.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    assert not np.array_equal(half.column("train_loss"), exact.column("train_loss"))
    np.testing.assert_allclose(half.column("train_loss"), exact.column("train_loss"), rtol=0.01)


class Poison(Callback):
    "Spoil the gradients of some steps, and keep the weights and moments after each."

    def __init__(self, *steps):
        self.steps, self.kept = steps, []

    def on_after_backward(self, trainer, pl_module) -> None:
        if trainer.global_step in self.steps:
            for p in pl_module.parameters():
                p.grad.fill_(float("nan"))

    def on_train_batch_end(self, trainer, *_) -> None:
        state = trainer.optimizers[0].state
        self.kept.append(
            [
                x.detach().cpu()
                for p in state
                for x in (p, state[p]["exp_avg"], state[p]["exp_avg_sq"])
            ]
        )


def test_a_guard_keeps_spoiled_steps_away_from_the_weights_and_nobody_waits_for_its_verdict():
    poison = Poison(0, 3)
    record, _, _ = train("tpu", 5, [NonFiniteGuard(), poison])
    assert np.flatnonzero(~np.isfinite(record.column("gradient_norm"))).tolist() == [0, 3]
    assert not any(x.any() for x in poison.kept[0][1:3])  # moments of the very first step: nothing
    for before, after in zip(poison.kept[2], poison.kept[3], strict=True):
        assert torch.equal(before, after)
    assert all(x.isfinite().all() for kept in poison.kept for x in kept)
    assert not torch.equal(poison.kept[3][0], poison.kept[4][0])
    guard = NonFiniteGuard(max_in_a_row=50)
    _, counts, _ = train("tpu", 24, [guard, SpikeGuard()])
    assert len({c.host_reads for c in counts[:9]}) == 1
    # After the tenth step history and guards read, and the next two steps start from that.
    assert (
        len({c.compilations for c in counts[3:9]})
        == len({c.compilations for c in counts[11:]})
        == 1
    )


def test_checkpointed_activations_are_refused_by_name():
    with pytest.raises(ValueError, match="gradient_checkpointing"):
        train("tpu", 1, module={"gradient_checkpointing": True, "scheduler_warmup_kind": "linear"})


def test_two_devices_share_each_batch_and_give_the_losses_of_one():
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    script = Path(__file__).with_name("two_devices.py")
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["sharding"].startswith("{devices=[2,1]")
    np.testing.assert_allclose(said["xla"], said["cpu"], atol=1e-4, rtol=0)
    assert len(set(said["compilations"][3:])) == 1
    assert "3 rows" in said["errors"][0] and "multiple" in said["errors"][0]
    assert "devices=3" in said["errors"][1] and "2" in said["errors"][1]
