"""The engine: loss as sum and count, exact resume, whole checkpoints."""

import math
import multiprocessing
import os
import select
import signal
import sys
import time
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from ranks import run_on_ranks

from bertlab.train.checkpoints import SIGNALS, TrainingCheckpoint, TrainingInterrupted
from bertlab.train.resume import latest_checkpoint
from bertlab.train.history import History
from bertlab.data.loaders import EpochBatches, _leave_group, filled_batches
from bertlab.data.module import PretrainingDataModule
from bertlab.train.modules import PretrainingModule
from bertlab.train.stopping import NonFiniteGuard
from bertlab.train.steps import check_scaler, validation_metrics
from bertlab.train.trainer import HalfPrecisionFloatTargets, make_trainer, seed_everything

CONFIG = dict(
    vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, max_position_embeddings=64,
)  # fmt: skip


def word_tokenizer(words):
    "A tokenizer that takes whole words, the same in every process."
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(words))]
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    special = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), names))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


class Texts(PretrainingDataModule):
    "Packed rows of made-up sentences, without a corpus."

    def __init__(self, batch_size=4, num_workers=0, num_texts=300, phases=None, **collator_options):
        rng = np.random.default_rng(0)
        words = ["".join(rng.choice(list("abcdefgh"), rng.integers(2, 6))) for _ in range(150)]
        texts = [" ".join(rng.choice(words, rng.integers(2, 30))) for _ in range(num_texts)]
        super().__init__(
            None, word_tokenizer(words), max_sequence_length=32, num_workers=num_workers, num_shards=1,
            train_batch_size=batch_size, val_batch_size=batch_size, phases=phases,
            collator_kwargs=collator_options)  # fmt: skip
        self.set_datasets(texts, texts[:41])
        self.setup()


def train(data, steps, callbacks=(), ckpt_path=None, seed=0, dropout=0.1, **options):
    "Train a tiny encoder with dropout in float32; return its weights and its history."
    seed_everything(seed)
    history = History()
    config = {**CONFIG, "embedding_dropout": dropout, "mlp_dropout": dropout}
    module = PretrainingModule(config, learning_rate=3e-3, scheduler_warmup_steps=3)
    options = {"precision": "32-true", "accelerator": "cpu", **options}
    trainer = make_trainer(steps, callbacks=[history, *callbacks], **options)
    ckpt_path = ckpt_path and (latest_checkpoint(ckpt_path) or ckpt_path)
    try:
        trainer.fit(module, data, ckpt_path=ckpt_path)
    except TrainingInterrupted:
        pass
    return {k: v.clone() for k, v in module.model.state_dict().items()}, history


def equal(a, b):
    return all(torch.equal(a[key], b[key]) for key in a)


class Stop(TrainingCheckpoint):
    "A checkpoint that is asked to stop, as by Ctrl-C, during one step."

    def __init__(self, path, at_step, signal_number=signal.SIGINT, **options):
        super().__init__(path, **options)
        self.at_step, self.number = at_step, signal_number

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.at_step - 1 and not self.stop_requested:
            os.kill(os.getpid(), self.number)


def test_accumulating_over_micro_batches_equals_the_one_big_batch():
    uninterrupted, _ = train(Texts(batch_size=8), 5, dropout=0.0)
    parts, _ = train(Texts(batch_size=1), 5, dropout=0.0, accumulate_grad_batches=8)
    for key in uninterrupted:
        torch.testing.assert_close(parts[key], uninterrupted[key], atol=1e-5, rtol=1e-4)


def test_a_run_that_broke_off_leaves_nothing_to_the_next():
    class Breaks(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            raise KeyError("broken off")

    def first_loss(module):
        history = History()
        trainer = make_trainer(1, "32-true", "cpu", callbacks=[history], skip_nonfinite=False)
        trainer.fit(module, Texts())
        return history.column("train_loss")[0]

    seed_everything(0)
    module = PretrainingModule(CONFIG, scheduler_warmup_steps=0)
    with pytest.raises(KeyError):  # in the first of two micro-batches: no weight has moved
        make_trainer(1, "32-true", "cpu", callbacks=[Breaks()], accumulate_grad_batches=2).fit(
            module, Texts(batch_size=8)
        )
    module.skipped = torch.tensor(True)  # the word of a guard that is not there any more
    seed_everything(0)
    assert first_loss(module) == first_loss(PretrainingModule(CONFIG, scheduler_warmup_steps=0))
    assert module.skipped is None


def test_the_logged_loss_is_that_of_all_labels_of_the_window():
    _, uninterrupted = train(Texts(batch_size=8), 3, dropout=0.0)
    _, parts = train(Texts(batch_size=2), 3, dropout=0.0, accumulate_grad_batches=4)
    np.testing.assert_allclose(
        parts.column("train_loss"), uninterrupted.column("train_loss"), rtol=1e-5
    )
    np.testing.assert_array_equal(parts.column("tokens"), uninterrupted.column("tokens"))


def assert_resumes(reference, make_data, steps, stop, **options):
    "Compare a run that `stop` interrupts, and that is resumed, with the run that nothing stopped."
    train(make_data(), steps, [stop], **options)
    directory = stop.directory
    assert directory.exists()
    weights, history = train(
        make_data(), steps, [TrainingCheckpoint(directory)], directory, seed=77, **options
    )
    for name in ("train_loss", "learning_rate"):
        np.testing.assert_array_equal(history.column(name), reference[1].column(name))
    assert history.validation == reference[1].validation and equal(weights, reference[0])
    return history


@pytest.fixture(scope="module")
def undisturbed():
    return train(Texts(), 15, val_check_steps=6)


# 43 rows, 11 batches an epoch: steps around the end of the epoch (11, 12) and the validation (6).
@pytest.mark.parametrize(
    "stop_at, signal_number", zip([1, 5, 6, 7, 10, 11, 12, 14], SIGNALS * 2, strict=True)
)
def test_a_run_stopped_at_any_step_and_resumed_is_bit_identical(
    undisturbed, tmp_path, stop_at, signal_number
):
    stop = Stop(tmp_path / "last.ckpt", stop_at, signal_number, every_n_steps=1000)
    assert_resumes(undisturbed, Texts, 15, stop, val_check_steps=6)


@pytest.mark.parametrize("workers, window", [(2, 1), (0, 3)])
def test_resume_is_exact_with_workers_and_inside_accumulation(tmp_path, workers, window):
    make = partial(Texts, num_workers=workers)
    options = {"accumulate_grad_batches": window, "val_check_steps": 4}
    assert_resumes(train(make(), 9, **options), make, 9, Stop(tmp_path, 5), **options)


class Stuck:
    "A collator that sends its run a signal, and then waits, when it makes its n-th batch."

    def __init__(self, collator, n):
        self.collator, self.n, self.process = collator, n, os.getpid()

    def __call__(self, rows):
        self.n -= 1
        if self.n == 0:
            os.kill(self.process, signal.SIGTERM)
            time.sleep(100)
        return self.collator(rows)


@pytest.fixture(scope="module")
def whole_runs():
    return {window: train(Texts(), 12, accumulate_grad_batches=window) for window in (1, 2)}


# Batches before the first step, within an epoch, after its end, within a step, in validation.
@pytest.mark.parametrize(
    "n, window, options, saved",
    [(1, 1, {}, 0), (5, 1, {}, 4), (12, 1, {}, 11), (7, 2, {}, 3), (8, 2, {}, 3), (2, 2, {}, 0),
     (10, 1, {"val_check_steps": 8}, 8), (18, 2, {"val_check_steps": 8}, 8)],
)  # fmt: skip
def test_a_run_that_waits_for_data_is_saved_and_ends(
    tmp_path, monkeypatch, whole_runs, n, window, options, saved
):
    monkeypatch.setattr("bertlab.train.checkpoints.DATA_SECONDS", 0.2)
    data, before = Texts(), signal.getsignal(signal.SIGALRM)
    data.collator, data.prepare_data = Stuck(data.collator, n), lambda: None
    options |= {"accumulate_grad_batches": window}
    train(data, 12, [TrainingCheckpoint(tmp_path)], **options)
    assert signal.getsignal(signal.SIGALRM) == before
    checkpoints = [path.name for path in tmp_path.iterdir()]
    assert checkpoints == [f"step-{saved:08}.ckpt"]
    resumed, again = train(
        Texts(), 12, [TrainingCheckpoint(tmp_path)], tmp_path, seed=77, **options
    )
    weights, record = whole_runs[window]
    np.testing.assert_array_equal(again.column("train_loss"), record.column("train_loss"))
    assert equal(weights, resumed)


def test_a_run_ends_though_its_worker_hangs(tmp_path, monkeypatch, whole_runs):
    monkeypatch.setattr("bertlab.train.checkpoints.DATA_SECONDS", 0.2)
    data = Texts(num_workers=1)
    data.collator, data.prepare_data = Stuck(data.collator, 1), lambda: None
    train(data, 12, [TrainingCheckpoint(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000.ckpt"]
    resumed, _ = train(Texts(), 12, [TrainingCheckpoint(tmp_path)], tmp_path, seed=77)
    assert equal(whole_runs[1][0], resumed)


def test_signals_are_given_back_after_training(tmp_path):
    before = [signal.getsignal(signal_number) for signal_number in SIGNALS]
    train(Texts(), 4, [TrainingCheckpoint(tmp_path / "last.ckpt")])
    assert [signal.getsignal(signal_number) for signal_number in SIGNALS] == before
    train(Texts(), 4, [Stop(tmp_path / "stopped.ckpt", 2)])
    assert [signal.getsignal(signal_number) for signal_number in SIGNALS] == before


def test_a_run_under_nohup_continues_without_its_terminal(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        weights, record = train(Texts(), 4, [Stop(tmp_path / "last.ckpt", 2, signal.SIGHUP)])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert record.rows[-1]["step"] == 4


def assert_worker_ends_with(run: int, reads: int, writes: int) -> None:
    "Kill a process, and wait until its worker, which holds `writes` too, has closed it."
    os.close(writes)
    assert os.read(reads, 5) == b"begun"
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    assert select.select([reads], [], [], 60)[0] and os.read(reads, 1) == b"", "it still lives"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends orphans on Linux alone")
def test_a_killed_process_leaves_no_workers():
    reads, writes = os.pipe()
    if not (parent := os.fork()):
        if not os.fork():
            _leave_group(0)
            os.write(writes, b"begun")
        time.sleep(300)
        os._exit(0)
    assert_worker_ends_with(parent, reads, writes)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends orphans on Linux alone")
def test_a_killed_process_leaves_no_workers_of_a_fork_server():
    reads, writes = os.pipe()
    alive, held = os.pipe()  # as multiprocessing has it: ends when the run does
    if not (run := os.fork()):
        os.close(writes)
        time.sleep(300)
        os._exit(0)
    os.close(held)
    if not (worker := os.fork()):  # whose parent is not the run
        parent = multiprocessing.process._ParentProcess("run", run, alive)
        multiprocessing.process._parent_process = parent
        _leave_group(0)
        os.write(writes, b"begun")
        time.sleep(300)
        os._exit(0)
    assert_worker_ends_with(run, reads, writes)
    os.waitpid(worker, 0)


def test_rows_are_dealt_once_and_processes_never_share_one():
    data = Texts()
    for world_size in (1, 2, 3):
        loaders = [EpochBatches(data.train_dataset, None, 4, rank=r, world_size=world_size)
                   for r in range(world_size)]  # fmt: skip
        assert len({len(loader) for loader in loaders}) == 1
        keys = [key for loader in loaders for b in range(len(loader)) for key in loader.keys(3, b)]
        assert len(set(keys)) == len(keys) and {epoch for epoch, _ in keys} == {3}
        assert len(data.train_dataset) - len(keys) < 4 * world_size
        dealt = [
            i for r in range(world_size) for b in filled_batches(41, 4, r, world_size) for i in b
        ]
        assert sorted(i for i in dealt if i >= 0) == list(range(41))


def test_validation_counts_each_label_once_whatever_the_batch_size():
    losses = []
    for batch_size in (3, 8, 64):
        data = Texts(batch_size=batch_size, seed=4)
        seed_everything(1)
        module = PretrainingModule(CONFIG)
        trainer = make_trainer(1, "32-true", accelerator="cpu", val_check_steps=1)
        losses.append(trainer.validate(module, data, verbose=False)[0]["val_loss"])
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


def test_float16_gradients_are_unscaled_before_they_are_clipped():
    from lightning.pytorch.plugins import MixedPrecision

    _, exact = train(Texts(), 4, dropout=0.0)
    # float16 sums overflow at the first scales: those steps are skipped and the scale halves.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    plugin.precision = "16-mixed"
    _, half = train(Texts(), 4, dropout=0.0, precision=None, plugins=[plugin])
    np.testing.assert_allclose(
        half.column("gradient_norm"), exact.column("gradient_norm"), rtol=0.05
    )


def test_sophia_is_refused_under_float16():
    from lightning.pytorch.plugins import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    plugin.precision = "16-mixed"
    module = PretrainingModule(CONFIG, learning_rate=3e-3, optimizer_class="sophiah")
    trainer = make_trainer(2, precision=None, accelerator="cpu", plugins=[plugin])
    with pytest.raises(ValueError, match="precision='16-mixed'.*sophiah"):
        trainer.fit(module, Texts())
    assert trainer.global_step == 0
    check_scaler(plugin, creates_graph=False)  # any other optimizer may train so
    check_scaler(MixedPrecision("bf16-mixed", "cpu"), creates_graph=True)


def four_steps(batch_size, processes, path):
    "What each of so many processes does."
    weights, record = train(Texts(batch_size=batch_size), 4, dropout=0.0, devices=processes,
                            strategy="ddp" if processes == 2 else "auto", val_check_steps=2)  # fmt: skip
    if os.environ["RANK"] == "0":
        torch.save((weights, record.column("train_loss"), record.validation), path)


def test_two_processes_give_the_loss_and_the_weights_of_one(tmp_path):
    results = []
    for batch_size, processes in ((8, 1), (4, 2)):
        out = tmp_path / f"{processes}.pt"
        run_on_ranks(four_steps, batch_size, processes, str(out), count=processes)
        results.append(torch.load(out, weights_only=False))
    (single, losses, validation), (two, losses_2, validation_2) = results
    np.testing.assert_allclose(losses_2, losses, rtol=1e-5)
    np.testing.assert_allclose(
        [v["val_loss"] for v in validation_2], [v["val_loss"] for v in validation], rtol=1e-5
    )
    for key in single:
        torch.testing.assert_close(two[key], single[key], atol=2e-5, rtol=1e-3)


def test_only_a_kernel_makes_a_notebook(monkeypatch):
    import types

    import IPython  # noqa: F401
    import ipykernel  # noqa: F401

    from bertlab.train.history import in_notebook

    assert not in_notebook(), "an import of ipykernel is no notebook"
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert in_notebook()


def test_the_data_module_reads_a_users_file(tmp_path):
    from bertlab.data.module import PretrainingDataModule

    words = [f"word{i}" for i in range(40)]
    rows = [" ".join(words[i % 40 :] + words[: i % 40]) + f" {i}" for i in range(200)]
    (tmp_path / "t.csv").write_text("body\n" + "\n".join(rows) + "\n")
    data = PretrainingDataModule(
        str(tmp_path / "t.csv"), word_tokenizer(words), text_column="body", max_sequence_length=64,
        train_batch_size=4, data_kwargs={"max_documents": 60},
    )  # fmt: skip
    data.setup()
    documents = (
        data.train_dataset.describe()["documents"] + data.val_dataset.describe()["documents"]
    )
    assert 0 < documents <= 60


def test_a_trainer_without_fit_validation_can_validate():
    data, history = Texts(), History()
    seed_everything(0)
    module = PretrainingModule(CONFIG, scheduler_warmup_steps=1)
    trainer = make_trainer(2, "32-true", "cpu", callbacks=[history])
    (before,) = trainer.validate(module, data, verbose=False)
    trainer.fit(module, data)
    assert history.validation == [], "fit left validation out"
    (after,) = trainer.validate(module, data, verbose=False)
    (tested,) = trainer.validate(module, data, verbose=False)
    assert after["val_loss"] != before["val_loss"] and tested == after


@pytest.mark.parametrize("options, words", [
    (dict(limit_val_batches=-1), "limit_val_batches"), (dict(accumulate_grad_batches=-2), "accumulate_grad_batches"),
    (dict(overfit_batches=-0.5), "overfit_batches"), (dict(max_steps=0), "max_steps"),
])  # fmt: skip
def test_a_trainer_of_impossible_options_is_a_value_error_of_one_line(options, words):
    with pytest.raises(ValueError, match=words) as refused:
        make_trainer(**{"max_steps": 1, **options})
    assert "\n" not in str(refused.value)


def test_variables_of_the_environment_reach_a_trainer_as_they_reach_lightnings(monkeypatch):
    monkeypatch.setenv("PL_TRAINER_LOG_EVERY_N_STEPS", "7")
    monkeypatch.setenv("PL_TRAINER_LIMIT_TRAIN_BATCHES", "3")
    trainer = make_trainer(1, "32-true", "cpu")
    assert (trainer.log_every_n_steps, trainer.limit_train_batches) == (7, 3)
    assert make_trainer(1, "32-true", "cpu", limit_train_batches=5).limit_train_batches == 5, (
        "what is said wins"
    )


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_weights_in_16_bits_leave_float_targets_alone(precision):
    numbers = torch.tensor([1906.25, 1911.25, 70_000.0])
    batch = {name: numbers for name in ("labels", "loss_weights", "token_shares", "teacher_scores")}
    convert = (
        make_trainer(1, precision, "cpu", plugins=[]).precision_plugin.convert_input
        if precision[0] == "b"
        else (HalfPrecisionFloatTargets(precision).convert_input)
    )  # a CPU has no float16
    for result in (convert(batch), convert([batch])[0]):
        assert all(torch.equal(result[name], numbers) for name in batch)
    converted = convert({"inputs_embeds": numbers, "input_ids": torch.tensor([3])})
    assert (
        converted["inputs_embeds"].dtype
        == HalfPrecisionFloatTargets(precision)._desired_input_dtype
    )
    assert converted["input_ids"].dtype == torch.int64 and convert("a text") == "a text"


def test_metrics_are_not_rounded_to_16_bits():
    sums = torch.tensor([[800.0, 200, 40, 160, 900]], dtype=torch.float64)
    want = validation_metrics(sums)
    torch.set_default_dtype(torch.bfloat16)
    try:
        result = validation_metrics(sums)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {name: float(value) for name, value in result.items()} == {
        name: float(value) for name, value in want.items()
    }
    assert float(result["val_bits_per_byte"]) == 800 / 900 / math.log(2)
    assert float(result["val_perplexity"]) == pytest.approx(math.exp(4), rel=1e-7)


def test_a_strategy_that_divides_weights_computes_in_float32_where_a_gpu_has_no_bfloat16(
    monkeypatch,
):
    monkeypatch.setattr(
        "bertlab.train.trainer.default_precision", lambda variant: ("16-mixed", "older than Ampere")
    )
    with pytest.warns(UserWarning, match="computes in float32"):
        assert make_trainer(1, accelerator="cpu", strategy="fsdp").precision == "32-true"
    monkeypatch.setattr("bertlab.train.trainer.check_device", lambda *requested: "cuda")
    with pytest.raises(ValueError, match="16-mixed.*precision='32-true'.*strategy='ddp'"):
        make_trainer(1, "16-mixed", strategy="tensor:2", devices=2)


def test_a_batch_without_labels_changes_no_weight():
    guard, history, data = NonFiniteGuard(), History(), Texts()
    module = PretrainingModule(CONFIG)
    batch = dict(next(iter(data.train_dataloader())))
    batch["labels"] = torch.full_like(batch["labels"], -100)
    trainer = make_trainer(2, "32-true", accelerator="cpu", callbacks=[history, guard])
    module.configure_model()
    before = {k: v.clone() for k, v in module.model.state_dict().items()}
    trainer.fit(module, torch.utils.data.DataLoader([batch, batch], batch_size=None))
    assert equal(before, module.model.state_dict())
    assert guard.num_skipped == 0 and np.isnan(history.column("train_loss")).all()


def test_training_step_returns_the_mean_loss_without_a_trainer():
    module, batch = PretrainingModule(CONFIG), next(iter(Texts().train_dataloader()))
    module.configure_model()
    loss, parts = module.training_step(batch, 0), module.label_loss(batch)
    torch.testing.assert_close(loss, parts.loss_sum / parts.num_labels)
    assert module(**batch).loss_sum is not None


def stalled_run(folder):
    "What each of two processes does: both wait for the sixth batch, within a step, and are stopped."
    from bertlab.train import checkpoints

    checkpoints.DATA_SECONDS = 1
    options = {"devices": 2, "strategy": "ddp", "accumulate_grad_batches": 2}
    data = Texts(batch_size=2)
    data.collator, data.prepare_data = Stuck(data.collator, 6), lambda: None
    train(data, 12, [TrainingCheckpoint(f"{folder}/stalled")], **options)
    uninterrupted, record = train(Texts(batch_size=2), 12, **options)
    series = [TrainingCheckpoint(f"{folder}/stalled")]
    resumed, again = train(Texts(batch_size=2), 12, series, f"{folder}/stalled", seed=7, **options)
    assert equal(uninterrupted, resumed)
    np.testing.assert_array_equal(again.column("train_loss"), record.column("train_loss"))


def test_processes_that_wait_for_data_are_saved_and_end(tmp_path):
    run_on_ranks(stalled_run, str(tmp_path))
    names = {path.name for path in (tmp_path / "stalled").iterdir()}
    assert "step-00000002.ckpt" in names
