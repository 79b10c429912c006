"What one part leaves for another when somebody uses them from Python: trainers with limits, second runs, own classes, copies."

import copy
import os
import pickle
import signal
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from test_modules import SHAPE, TEXTS, TOKENIZER, WORDS, data_of, fit, module_of
from test_training import word_tokenizer

from bertlab.data.loaders import EpochBatches, eval_loader
from bertlab.data.module import PretrainingDataModule
from bertlab.data.packing import PackedDataset
from bertlab.model.heads import BertLabForCausalLM
from bertlab.model.config import BertLabConfig
from bertlab.train.checkpoints import TrainingCheckpoint, TrainingInterrupted, saved_models
from bertlab.train.checkpoints import _validates_after_batch
from bertlab.train.resume import latest_checkpoint, run_fingerprint
from bertlab.train.modules import PretrainingModule
from bertlab.train.steps import plain_options
from bertlab.train.trainer import make_trainer

QUIET = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)


class Halved(torch.optim.SGD):
    "Somebody's own optimizer."


def falling(step):
    return 1 / (1 + step)


def test_module_and_data_with_other_words_are_refused():
    another = word_tokenizer([f"x{word}" for word in WORDS])  # as many words, others
    assert len(another) == len(TOKENIZER)
    data = PretrainingDataModule(None, another, max_sequence_length=32, train_batch_size=8)
    data.set_datasets(TEXTS[40:], TEXTS[:40])
    with pytest.raises(
        ValueError,
        match="the data module has another tokenizer: the id of '.*' is .* there and .* here",
    ):
        fit(module_of(), data, 3)
    same = copy.deepcopy(TOKENIZER)  # another object with the same words is no other tokenizer
    data = PretrainingDataModule(
        None, same, max_sequence_length=32, train_batch_size=8, val_batch_size=8
    )
    data.set_datasets(TEXTS[40:], TEXTS[:40])
    fit(module_of(), data, 3)


def rows_of():
    documents = [np.arange(5, 5 + n) for n in np.random.default_rng(0).integers(3, 30, 260)]
    return PackedDataset(documents, 32, pad_token_id=0, cls_token_id=2, sep_token_id=3)


def told(trainer: SimpleNamespace | None):
    return EpochBatches(
        rows_of(), lambda rows: [(row["epoch"], row["index"]) for row in rows], 4
    ).fit_to(trainer)


def trainer_of(limit, overfit=0, epoch=0):
    return SimpleNamespace(limit_train_batches=limit, overfit_batches=overfit, current_epoch=epoch)


@pytest.mark.parametrize("limit", [0.5, 7])
def test_limited_epochs_are_equally_long_and_leave_nothing_out(limit):
    full = told(None)
    expected = int(len(full) * limit) if isinstance(limit, float) else limit
    loader = told(trainer_of(limit))
    epochs = [list(loader) for _ in range(5)]
    assert [len(epoch) for epoch in epochs] == [expected] * 5
    plain = [batch for _ in range(5) for batch in full]
    assert [batch for epoch in epochs for batch in epoch] == plain[: 5 * expected]


def test_overfitting_repeats_the_same_batches_with_the_same_masks():
    loader = told(trainer_of(3, overfit=3))
    first, second = list(loader), list(loader)
    assert first == second and len(first) == 3 and first != list(told(trainer_of(3)))[1:]


def test_a_new_loader_begins_where_its_trainer_is():
    resumed = told(None)
    list(resumed), list(resumed)
    assert next(iter(told(trainer_of(1.0, epoch=2)))) == next(iter(resumed))
    short = told(trainer_of(5))
    list(short), list(short)
    assert next(iter(told(trainer_of(5, epoch=2)))) == next(iter(short))


def test_a_trainer_with_a_limit_counts_the_epochs_that_it_promises():
    module, data = module_of(), data_of()
    trainer = L.Trainer(max_epochs=3, limit_train_batches=0.5, enable_checkpointing=False, **QUIET)
    trainer.fit(module, data)
    assert (
        trainer.global_step
        == 3 * trainer.num_training_batches
        == trainer.estimated_stepping_batches
    )
    assert trainer.num_training_batches == len(data.batches) // 2


@pytest.mark.parametrize("saves", [False, True])
def test_stop_in_a_notebook_ends_in_one_line(tmp_path, monkeypatch, saves):
    monkeypatch.setattr("bertlab.train.trainer.in_notebook", lambda: True)
    best = ModelCheckpoint(tmp_path, "best", monitor="val_loss", save_weights_only=True)
    press = LambdaCallback(on_train_batch_end=lambda *_: signal.raise_signal(signal.SIGINT))
    trainer = make_trainer(
        4, "32-true", "cpu", callbacks=[press, best][: 1 + saves], val_check_steps=1
    )
    before = signal.getsignal(signal.SIGINT)
    if saves:  # after the first validation
        press.on_train_batch_end = lambda *_: (
            trainer.global_step == 2 and signal.raise_signal(signal.SIGINT)
        )
    with pytest.raises(TrainingInterrupted) as stopped:
        trainer.fit(module_of(), data_of())
    (line,) = stopped.value._render_traceback_()
    assert f"step {1 + saves};" in line and (str(tmp_path / "best.ckpt") in line) == saves
    assert signal.getsignal(signal.SIGINT) is before


def test_a_module_that_has_validated_can_be_copied_and_pickled():
    module = module_of(optimizer_class="splus", learning_rate=0.1)
    trainer, _ = fit(module, data_of(), 2)
    module.trainer = None
    twin = copy.deepcopy(module)
    assert all(
        torch.equal(a, b) for a, b in zip(twin.state_dict().values(), module.state_dict().values())
    )
    pickle.dumps(module._averaged)


def test_a_run_after_a_broken_validation_has_its_own_weights():
    module, data = module_of(optimizer_class="splus", learning_rate=0.1), data_of()
    score, module.update_metrics = (
        module.update_metrics,
        lambda *_: (_ for _ in ()).throw(MemoryError()),
    )
    with pytest.raises(MemoryError):
        fit(module, data, 2)
    averaged = copy.deepcopy(module.model.state_dict())
    module.update_metrics = score
    module.on_fit_start()
    after = module.model.state_dict()
    assert any(
        not torch.equal(averaged[name], after[name]) for name in averaged
    )  # the raw ones are back
    fit(module, data, 2)


def test_weights_of_16_bits_are_warned_about_once(recwarn):
    for precision in ("32-true", "bf16-mixed"):
        fit(module_of(), data_of(), 2, precision=precision)
    messages = lambda: [str(w.message) for w in recwarn if "float32" in str(w.message)]  # noqa: E731
    assert not messages()
    module = module_of(learning_rate=5e-4)
    fit(module, data_of(), 2, precision="bf16-true")
    (message,) = messages()
    assert "bfloat16" in message and "0.002" in message and "'bf16-mixed'" in message
    gains = {n: p for n, p in module.named_parameters() if n.endswith("norm.weight")}
    assert gains and all((p == 1).all() for p in gains.values()), "what the warning is about"


def test_numbers_of_numpy_and_paths_are_plain_in_a_checkpoint(tmp_path):
    module = module_of(learning_rate=np.float64(3e-3), weight_decay=np.float32(0.5))
    trainer, _ = fit(module, data_of(), 2)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["hyper_parameters"]
    assert type(saved["learning_rate"]) is float and saved["weight_decay"] == 0.5
    plain = plain_options({"a": [Path("x"), np.int64(3)], "b": {"c": (np.float64(1.5),)}, "optimizer_class": Halved,
                           "schedule": lambda step: 1.0}, {"optimizer_class": "adamw", "schedule": None})  # fmt: skip
    assert plain == {
        "a": ["x", 3],
        "b": {"c": (1.5,)},
        "optimizer_class": f"{__name__}.Halved",
        "schedule": None,
    }
    assert type(plain["a"][1]) is int
    nested = plain_options(
        {
            "kwargs": {
                "lr_lambda": falling,
                "other": lambda step: 1.0,
                "each": [falling, lambda step: 1.0],
                "n": 1,
            }
        }
    )
    assert nested == {
        "kwargs": {
            "lr_lambda": f"{__name__}.falling",
            "each": [f"{__name__}.falling", None],
            "n": 1,
        }
    }


@pytest.mark.parametrize(
    "function, name", [(falling, f"{__name__}.falling"), (lambda step: 1 / (1 + step), None)]
)
def test_a_function_in_a_schedule_leaves_a_usable_checkpoint(function, name, tmp_path):
    def run(steps, path=None):
        module = module_of(
            learning_rate=1e-3,
            schedule=torch.optim.lr_scheduler.LambdaLR,
            scheduler_kwargs={"lr_lambda": function},
        )
        trainer = make_trainer(
            steps, "32-true", accelerator="cpu", callbacks=[TrainingCheckpoint(tmp_path, 2)]
        )
        trainer.fit(module, data_of(), ckpt_path=path)
        return trainer.optimizers[0].param_groups[0]["lr"]

    run(2)
    path = latest_checkpoint(tmp_path)
    saved = torch.load(path, weights_only=True)["hyper_parameters"]
    assert (
        saved["schedule"] == "torch.optim.lr_scheduler.LambdaLR"
        and (saved.get("scheduler_kwargs") or {}).get("lr_lambda") == name
    )
    assert run(4, path) == pytest.approx(1e-3 * falling(4))
    PretrainingModule.load_from_checkpoint(path, pretrained_tokenizer_name_or_path=TOKENIZER)


def test_what_a_subclass_hands_on_is_what_is_trained_with():
    class Steady(PretrainingModule):
        def __init__(self, optimizer_kwargs=None, **options):
            super().__init__(
                optimizer_kwargs={"betas": (0.5, 0.5), **(optimizer_kwargs or {})}, **options
            )

    module = Steady(
        model_config_kwargs=SHAPE, pretrained_tokenizer_name_or_path=TOKENIZER, learning_rate=1e-3
    )
    trainer, _ = fit(module, data_of(), 1)
    assert trainer.optimizers[0].param_groups[0]["betas"] == (0.5, 0.5)


def test_a_subclass_with_more_parts_writes_its_directories(tmp_path):
    class Projected(PretrainingModule):
        def __init__(self, **options):
            super().__init__(**options)
            self.projection = torch.nn.Linear(2, 2)

    torch.manual_seed(0)
    module = Projected(
        model_config_kwargs=SHAPE, pretrained_tokenizer_name_or_path=TOKENIZER, learning_rate=1e-3
    )
    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    L.Trainer(max_steps=1, callbacks=[keeper], limit_val_batches=0, **QUIET).fit(module, data_of())
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()]


def test_the_causal_twin_is_stretched_as_its_encoder_is():
    torch.manual_seed(0)
    stretch = {"rope_type": "linear", "factor": 4.0}
    models = [BertLabForCausalLM(BertLabConfig(**{**SHAPE, "vocab_size": 60, "initializer_range": 0.5, "rope_scaling": factor})).eval()
              for factor in (None, stretch)]  # fmt: skip
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(5, 60, (1, 16))
    plain, stretched = (model(ids).logits for model in models)
    assert torch.allclose(plain[:, 0], stretched[:, 0], atol=1e-6) and not torch.allclose(
        plain, stretched, atol=1e-6
    )


def test_no_validation_follows_without_validation_rows(tmp_path):
    module, data = module_of(), data_of(val=[])
    models = TrainingCheckpoint(tmp_path / "run", 2, keep_last=9, models=tmp_path / "models")
    trainer = make_trainer(6, "32-true", accelerator="cpu", val_check_steps=2, callbacks=[models])
    trainer.fit(module, data)
    states = saved_models(tmp_path / "models").values()
    assert [state["global_step"] for state in states] == [2, 4, 6]
    assert not _validates_after_batch(trainer)


def test_what_an_override_says_besides_a_rate_is_part_of_a_runs_identity():
    def known(**options):
        return run_fingerprint(module_of(parameter_overrides={"*norm*": options}), None)[
            "parameter_overrides"
        ]

    assert known(lr=1e-3) == known(lr=1e-4) == {} and known(weight_decay=0.1, lr=1.0) == {
        "*norm*": {"weight_decay": 0.1}
    }
    assert "packing_pad_to_budget" in run_fingerprint(module_of(), data_of())


class Groups(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return os.getpgid(0)


def test_a_loaders_worker_is_in_no_process_group_of_its_run():
    groups = [group for batch in eval_loader(Groups(), list, 1, 2) for group in batch]
    assert len(groups) == 2 and os.getpgid(0) not in groups


def test_an_own_optimizer_that_cannot_be_named_is_left_to_the_reader_of_the_checkpoint(tmp_path):
    class Local(torch.optim.SGD):
        pass

    trainer, _ = fit(
        module_of(optimizer_class=Local, optimizer_kwargs={"momentum": 0.9}), data_of(), 3
    )
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["hyper_parameters"]
    assert saved.get("optimizer_class", "adamw") == "adamw"
