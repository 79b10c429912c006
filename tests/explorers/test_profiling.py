"A profile names the work of a step; a training step never waits for the device."

import math

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from bertlab.data.module import PretrainingDataModule
from bertlab.explorers.profiling import (
    _HostReadCounter,
    host_reads,
    kind_of_work,
    profile_step,
    seconds_by_kind,
)
from bertlab.model.config import modernbert_tiny
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.train.history import History
from bertlab.train.modules import PretrainingModule
from bertlab.train.stopping import NonFiniteGuard, SpikeGuard
from bertlab.train.trainer import make_trainer

SHAPE = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
)


@pytest.mark.parametrize("wait, name", [
    (lambda x: torch.bincount(x), "bincount"), (lambda x: torch.repeat_interleave(x, x), "repeat_interleave"),
    (lambda x: x.index_put_((x > 1,), torch.ones(2, dtype=torch.long)), "index_put_"),
])  # fmt: skip
def test_reads_of_counts_are_counted(wait, name):
    x = torch.tensor([1, 2, 3])
    assert host_reads(lambda: wait(x)) == {name: 1}
    assert (
        host_reads(lambda: x.index_put_((x > 1,), torch.tensor(0))) == {}
    )  # one number needs no count
    assert (
        host_reads(
            lambda: torch.repeat_interleave(x, torch.ones(3, dtype=torch.long), output_size=3)
        )
        == {}
    )


@pytest.mark.parametrize(
    "name, category",
    [
        ("aten::addmm", "products"),
        ("mm", "products"),
        ("_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::_softmax", "attention"),
        ("aten::_log_softmax", "loss"),
        ("aten::native_layer_norm_backward", "norms"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::gelu_backward", "activations"),
        ("aten::index_select", "lookups"),
        ("aten::copy_", "copies"),
        ("aten::mul", "arithmetic"),
        ("aten::view", "bookkeeping"),
        ("squeeze_", "bookkeeping"),
        ("triton_poi_fused_add_3", "compiled"),
        ("autograd::engine::evaluate_function: MmBackward0", "bookkeeping"),
        ("MmBackward0", "bookkeeping"),
    ],
)
def test_operations_are_sorted_into_kinds(name, category):
    assert kind_of_work(name) == category


def test_seconds_of_a_kind_add_up():
    seconds = seconds_by_kind([("mul", 1.0), ("mm", 2.0), ("addmm", 0.5), ("add_", 0.25)])
    assert list(seconds.items()) == [("products", 2.5), ("arithmetic", 1.25)]


def test_a_profile_names_the_work_and_the_host_reads():
    a = torch.randn(400, 400)
    profile = profile_step(lambda: (a @ a).relu().sum().item(), repeats=9)
    assert min(profile.parts["products"], profile.parts["activations"], profile.seconds) > 0
    assert list(profile.parts.values()) == sorted(profile.parts.values(), reverse=True)
    assert (
        4 <= profile.num_operations <= 30
    )  # four and what they call, in one step; in nine it is nine times as many
    assert profile.reads == {
        "_local_scalar_dense": 1
    } and "host reads: 1 x _local_scalar_dense" in str(profile)


# --- the host runs ahead --------------------------------------------------------------------------


def test_whatever_makes_the_host_wait_is_reported():
    x, mask = torch.arange(4.0), torch.tensor([True, False, True, False])
    assert host_reads(lambda: x.sum().item()) == {"_local_scalar_dense": 1}
    assert host_reads(lambda: mask.nonzero()) == {"nonzero": 1}
    assert host_reads(lambda: (x[mask], x[mask.long()])) == {"index": 1}
    assert host_reads(lambda: 1 if x.sum() > 0 else 0)  # truth is a number, too
    assert host_reads(lambda: torch.where(mask, x, 0.0).cumsum(0)) == {}


def test_inference_mode_has_the_same_host_reads():
    x = torch.arange(4.0)

    def step():
        with torch.inference_mode():
            torch.where(x > 2), x.repeat_interleave(2), x.sum().item()

    assert host_reads(step) == {"nonzero": 1, "_local_scalar_dense": 1}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_host_reads_see_compiled_code():
    ids, documents = torch.randint(64, (2, 32)), torch.ones(2, 32, dtype=torch.long)
    model = BertLabForMaskedLM(modernbert_tiny(**SHAPE, attn_implementation="flex")).eval()
    with torch.no_grad():
        assert host_reads(lambda: model(ids, documents)) == {}
    hidden = torch.compile(lambda x: x * x.sum().item())
    assert host_reads(lambda: hidden(torch.ones(3))) == {"_local_scalar_dense": 1}


class ReadsInside(Callback):
    "Counts what the host reads from the arrival of a batch to the end of its step, and what callbacks before it read."

    def __init__(self):
        self.reads = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.counter = _HostReadCounter().__enter__()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.counter.__exit__(None, None, None)
        self.reads.append(dict(self.counter.reads))


def small_run(material, callbacks, row_length=64, objective="mlm", model=None, **options):
    texts, tokenizer = material
    shape = {name: value for name, value in SHAPE.items() if name != "vocab_size"}
    module = PretrainingModule(
        shape, None, tokenizer, objective, scheduler_warmup_steps=2, **(model or {})
    )
    data = PretrainingDataModule(texts, tokenizer, objective, row_length, train_batch_size=4)
    make_trainer(6, callbacks=callbacks, **options).fit(module, data)


@pytest.fixture(scope="module")
def material():
    from bertlab.data.corpus import embedded_corpus
    from bertlab.data.tokenizers import train_tokenizer

    corpus = embedded_corpus(max_documents=200)
    return corpus, train_tokenizer(corpus.train_texts, 400)


@pytest.mark.parametrize("objective", ["mlm", "enhanced_mlm", "diffusion"])
def test_a_watched_training_step_never_waits(material, objective, monkeypatch):
    for user in ("model.heads", "train.steps"):
        monkeypatch.setattr(
            f"bertlab.{user}.allows_dynamic_shapes", lambda values: False
        )  # as on a device
    watchers = [
        NonFiniteGuard(),
        SpikeGuard(),
        History(fetch_every=100),
        ReadsInside(),
    ]
    small_run(material, watchers, objective=objective, precision="bf16-mixed", accelerator="cpu")
    assert watchers[-1].reads == [{}] * 6


def test_the_reads_of_a_callback_are_counted(material):
    watchers = [History(fetch_every=1), ReadsInside()]
    small_run(material, watchers, precision="32-true", accelerator="cpu")
    assert all(reads["_local_scalar_dense"] for reads in watchers[-1].reads)


class NoWaiting(Callback):
    "From the third step on, an operation that makes the host wait for the GPU is an error."

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("error" if batch_idx >= 2 else "default")

    def on_exception(self, trainer, pl_module, exception):
        torch.cuda.set_sync_debug_mode(
            "default"
        )  # or what cleans up fails, too, and hides the place

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("default")  # logs and loggers may wait, every so many steps


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["auto", "flex", "sdpa"])
def test_a_training_step_on_a_gpu_never_waits(material, kernel):
    model = dict(compile_model=True, model_kwargs={"attn_implementation": kernel})
    history = History(fetch_every=100)
    # Guards judge on the device, and read their verdicts once in ten steps.
    callbacks = [history, NonFiniteGuard(), SpikeGuard(), NoWaiting()]
    try:
        small_run(material, callbacks, 256, model=model, accelerator="gpu", precision="bf16-mixed")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    history.fetch()
    assert len(history.column("train_loss")) == 6 and all(
        map(math.isfinite, history.column("train_loss"))
    )


@pytest.mark.gpu
def test_batches_for_a_gpu_wait_in_pinned_memory(material):
    texts, tokenizer = material
    data = PretrainingDataModule(texts, tokenizer, max_sequence_length=64, train_batch_size=4)
    data.setup()
    assert all(tensor.is_pinned() for tensor in next(iter(data.train_dataloader())).values())
