"What an operation costs is counted by hand here; a training step lets the host run ahead."

import json
import math
import runpy
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from lightning.pytorch.callbacks import Callback

from bertlab.train.history import History
from bertlab.model.config import modernbert_tiny
from bertlab.data.module import PretrainingDataModule
from bertlab.train.stopping import NonFiniteGuard, SpikeGuard, TokenLimit
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.train.modules import PretrainingModule
from bertlab.explorers.profiling import (
    HostReadCounter,
    LayerPoint,
    Roofline,
    host_reads,
    kind_of_work,
)
from bertlab.explorers.profiling import (
    measure_roofline,
    profile_step,
    record_operations,
    seconds_by_kind,
)
from bertlab.train.trainer import make_trainer

SHAPE = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
)


def only(operations):
    (operation,) = operations
    return operation


def test_products_are_counted_in_operations_and_bytes():
    a, b = torch.randn(6, 5), torch.randn(5, 4)
    found = only(record_operations(lambda: a @ b))
    assert (found.name, found.flops, found.bytes_moved) == ("mm", 2 * 6 * 5 * 4, 4 * (30 + 20 + 24))
    half = only(record_operations(lambda: a.T, repeats=2) + record_operations(lambda: a.bfloat16()))
    assert (
        half.bytes_moved == 30 * 4 + 30 * 2
    )  # a cast reads four bytes and writes two; a view moves nothing


def test_a_lookup_moves_the_rows_it_takes_and_not_the_table():
    table, ids = torch.randn(1000, 8), torch.tensor([3, 5])
    assert only(record_operations(lambda: F.embedding(ids, table))).bytes_moved == 2 * (2 * 8 * 4)
    expanded = torch.ones(1, 8).expand(1000, 8)  # 32 bytes of memory, whatever its shape
    assert only(record_operations(lambda: expanded + 1)).bytes_moved == 32 + 1000 * 8 * 4


def test_indexing_moves_the_rows_it_takes_and_not_the_table():
    table, ids = torch.randn(1000, 8), torch.tensor([3, 5])
    assert only(record_operations(lambda: table[ids])).bytes_moved == 2 * (2 * 8 * 4)


@pytest.mark.parametrize("kind", ["layer of torch", "ours"])
def test_inference_mode_is_counted_like_no_grad_part_by_part(kind):
    from torch.utils.flop_counter import FlopCounterMode

    if kind == "ours":
        ids = torch.randint(64, (2, 8))
        model = BertLabForMaskedLM(modernbert_tiny(**SHAPE)).eval()
        forward = lambda: model(ids)  # noqa: E731
    else:
        layer, x = (
            torch.nn.TransformerEncoderLayer(32, 2, 48, batch_first=True),
            torch.randn(2, 8, 32),
        )
        model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        forward = lambda: model(x)  # noqa: E731

    def under(mode):
        with mode():
            forward()

    with_grad, told = record_operations(forward), {}
    for mode in (torch.no_grad, torch.inference_mode):
        found = record_operations(lambda: under(mode))
        told[mode] = sum(o.flops for o in found)
        assert {"addmm", "mm"} & {o.name for o in found} and not {"linear", "matmul"} & {
            o.name for o in found
        }
        assert {o.layer for o in found} >= {o.layer for o in with_grad}
        assert told[mode] == pytest.approx(
            sum(o.flops for o in with_grad), rel=0.02
        )  # but for a copy here and there
    with FlopCounterMode(display=False) as counter:
        forward()
    assert told[torch.no_grad] > counter.get_total_flops() > 0.5 * told[torch.no_grad]
    assert torch.backends.mha.get_fastpath_enabled()


def test_fused_attention_on_a_cpu_is_counted_like_its_products():
    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    found = record_operations(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward())
    fused = {o.backward: o.flops for o in found if "attention" in o.name}
    products = 2 * 2 * 3 * 16 * 16 * 8  # one product of all queries and keys
    assert fused == {False: 2 * products, True: 5 * products}  # the backward pass repeats the first


def test_operations_know_their_layer_and_the_backward_pass():
    model = BertLabForMaskedLM(modernbert_tiny(**SHAPE)).train()
    ids = torch.randint(64, (2, 8))
    found = record_operations(lambda: model(ids, labels=ids).loss.backward())
    layers = {o.layer.partition(".")[2] for o in found if not o.backward}
    assert {
        "encoder.blocks.0.attention.qkv",
        "encoder.blocks.1.mlp.down_proj",
        "encoder.embeddings.tokens",
    } <= layers
    forward = sum(o.flops for o in found if o.name in ("mm", "addmm") and not o.backward)
    backward = sum(o.flops for o in found if o.name in ("mm", "addmm") and o.backward)
    assert backward == 2 * forward  # each product has two in the backward pass


def test_a_step_that_does_other_work_each_time_is_refused():
    sizes = iter(range(9))
    with pytest.raises(ValueError, match="fixed shape"):
        record_operations(lambda: [torch.ones(2) + 1 for _ in range(next(sizes))], repeats=3)


def test_flex_attention_is_recorded_as_its_products():
    model = BertLabForMaskedLM(modernbert_tiny(**SHAPE, attn_implementation="flex")).eval()
    ids = torch.randint(64, (2, 8))
    with torch.no_grad():
        found = [o for o in record_operations(lambda: model(ids)) if "flex" in o.name]
    assert len(found) == 2 and all(
        o.flops == 2 * 2 * 2 * 2 * 8 * 8 * 16 for o in found
    )  # of two rows, two heads of 16


@pytest.mark.parametrize("wait, name", [
    (lambda x: torch.bincount(x), "bincount"), (lambda x: torch.repeat_interleave(x, x), "repeat_interleave"),
    (lambda x: x.index_put_((x > 1,), torch.ones(2, dtype=torch.long)), "index_put_"),
])  # fmt: skip
def test_what_waits_for_a_count_is_counted(wait, name):
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
    "name, kind",
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
def test_operations_are_sorted_into_kinds(name, kind):
    assert kind_of_work(name) == kind


def test_seconds_of_a_kind_add_up_and_the_longest_comes_first():
    found = seconds_by_kind([("mul", 1.0), ("mm", 2.0), ("addmm", 0.5), ("add_", 0.25)])
    assert list(found.items()) == [("products", 2.5), ("arithmetic", 1.25)]


def test_a_profile_names_the_work_counts_it_and_says_what_is_read():
    a = torch.randn(400, 400)
    found = profile_step(lambda: (a @ a).relu().sum().item(), repeats=9)
    assert min(found.parts["products"], found.parts["activations"], found.seconds) > 0
    assert list(found.parts.values()) == sorted(found.parts.values(), reverse=True)
    assert (
        4 <= found.num_operations <= 30
    )  # four and what they call, in one step; in nine it is nine times as many
    assert found.reads == {
        "_local_scalar_dense": 1
    } and "host reads: 1 x _local_scalar_dense" in str(found)


def test_the_roof_is_the_lower_of_two_ceilings():
    roofline = Roofline([], peak_flops=100.0, bandwidth=10.0, device="cpu")
    assert [roofline.roof(i) for i in (1, 10, 50)] == [10, 100, 100]
    assert roofline.waits_for(LayerPoint("norm", 9.0, 1, 1.0)) == "memory"
    assert roofline.waits_for(LayerPoint("MLP", 110.0, 10, 1.0)) == "products"


def test_layers_of_all_blocks_are_one_point_of_the_roofline():
    model = BertLabForMaskedLM(modernbert_tiny(**SHAPE))
    ids = torch.randint(64, (2, 8))
    points = measure_roofline(lambda: model(ids, labels=ids).loss.backward(), repeats=1).points
    alone = measure_roofline(lambda: model(ids, labels=ids), repeats=1).points
    seed = 1  # the gradient of the loss by itself, written before the backward pass begins
    assert sum(p.flops for p in points) == sum(p.flops for p in alone) + seed
    found = {p.layer: p for p in points}
    flops, tokens = 2 * 16 * 32 * 96, 16  # one block's: 16 tokens, 32 numbers in, 3 x 32 out
    assert found["encoder.blocks[i].attention.qkv"].flops == 2 * flops
    assert found["encoder.embeddings.tokens"].bytes_moved == 2 * tokens * 32 * 4


# --- the host runs ahead --------------------------------------------------------------------------


def test_whatever_makes_the_host_wait_is_found():
    x, mask = torch.arange(4.0), torch.tensor([True, False, True, False])
    assert host_reads(lambda: x.sum().item()) == {"_local_scalar_dense": 1}
    assert host_reads(lambda: mask.nonzero()) == {"nonzero": 1}
    assert host_reads(lambda: (x[mask], x[mask.long()])) == {"index": 1}
    assert host_reads(lambda: 1 if x.sum() > 0 else 0)  # truth is a number, too
    assert host_reads(lambda: torch.where(mask, x, 0.0).cumsum(0)) == {}


def test_the_host_waits_for_the_same_in_inference_mode():
    x = torch.arange(4.0)

    def step():
        with torch.inference_mode():
            torch.where(x > 2), x.repeat_interleave(2), x.sum().item()

    assert host_reads(step) == {"nonzero": 1, "_local_scalar_dense": 1}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_reads_are_found_inside_of_compiled_parts_and_around_flex_attention():
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
        self.counter = HostReadCounter().__enter__()

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


class Counting(TokenLimit):
    "Counts tokens in every step and never asks for the sum, which the limit itself does once in many steps."

    def spent(self, trainer, pl_module):
        return None


@pytest.mark.parametrize("objective", ["mlm", "enhanced_mlm", "diffusion"])
def test_a_training_step_with_all_that_watches_it_reads_nothing_back(
    material, objective, monkeypatch
):
    for user in ("model.heads", "train.steps"):
        monkeypatch.setattr(
            f"bertlab.{user}.allows_dynamic_shapes", lambda values: False
        )  # as on a device
    watchers = [
        NonFiniteGuard(),
        SpikeGuard(),
        Counting("1B"),
        History(fetch_every=100),
        ReadsInside(),
    ]
    small_run(material, watchers, objective=objective, precision="bf16-mixed", accelerator="cpu")
    assert watchers[-1].reads == [{}] * 6


def test_what_a_watcher_reads_is_counted(material):
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
def test_a_training_step_on_a_gpu_never_waits_and_its_losses_are_finite(material, kernel):
    model = dict(compile_model=True, model_kwargs={"attn_implementation": kernel})
    history = History(fetch_every=100)
    # Guards judge on the device, and read their verdicts once in ten steps.
    callbacks = [history, NonFiniteGuard(), SpikeGuard(), NoWaiting()]
    try:
        small_run(material, callbacks, 256, model=model, accelerator="gpu", precision="bf16-mixed")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    history.fetch()
    assert len(history.record.column("loss")) == 6 and all(
        map(math.isfinite, history.record.column("loss"))
    )


@pytest.mark.gpu
def test_batches_for_a_gpu_wait_in_pinned_memory(material):
    texts, tokenizer = material
    data = PretrainingDataModule(texts, tokenizer, max_sequence_length=64, train_batch_size=4)
    data.setup()
    assert all(tensor.is_pinned() for tensor in next(iter(data.train_dataloader())).values())


def test_the_benchmark_for_gpus_runs_its_whole_path_on_a_cpu(
    material, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        "bertlab.data.corpus.embedded_corpus", lambda *_, **__: material[0]
    )  # read once, above
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "gpu.py",
            "--small",
            "--rounds",
            "1",
            "--losses",
            "2",
            "--output",
            str(tmp_path / "gpu.json"),
        ],
    )
    monkeypatch.setattr(
        sys, "path", [p for p in sys.path if "benchmarks" not in p]
    )  # it stands alone
    runpy.run_path(str(ROOT / "benchmarks" / "gpu.py"), run_name="__main__")
    found = json.loads((tmp_path / "gpu.json").read_text())
    for shape in ("BERT-base", "ModernBERT-base"):
        ours, theirs = found["shapes"][shape]["bertlab"], found["shapes"][shape]["transformers"]
        # A text as small as this one leaves some rows half full.
        assert ours["real_share"] > max(0.75, 2 * theirs["real_share"])
        # On a CPU the loss takes labels out by a mask, and its gradient is put back by the same one.
        assert ours["host_waits"].keys() <= {"index", "index_put"}
        assert (
            ours["mfu"] > 0 and math.isfinite(ours["last_loss"]) and ours["times_transformers"] > 0
        )
        # The cost of a token is 6 x the weights of the matrices it meets and a little for attention.
        assert ours["flops_per_token"] > 6 * 2 * (64 * 64 * 4 + 2 * 64 * 96)
    narrow, bert = (
        found["shapes"]["BERT-base"]["bertlab, stream in 16 bits"],
        found["shapes"]["BERT-base"],
    )
    assert (
        narrow["last_loss"]
        != bert["bertlab"]["last_loss"]
        == pytest.approx(narrow["last_loss"], rel=0.01)
    )
    assert bert["transformers, grouped"]["real_share"] == bert["bertlab"]["real_share"]
    assert len(found["ceiling_flops"]) == 3  # before, and behind either shape
    assert (
        "bertlab, stream in 16 bits" not in found["shapes"]["ModernBERT-base"]
    )  # its stream is a sum that grows
    wide, thin = found["stream"]["held_out_loss"].values()
    assert len(set(wide)) == 3 and wide == pytest.approx(thin, rel=0.01) and wide != thin
    assert found["track"]["steps"] > 0 and found["track"]["validation_loss"] < math.log(
        1024
    )  # less than it began with
    assert [(one["least"], one["side"]) for one in found["verdicts"]] == [
        (least, side) for least in (0.45, 2.0) for side in ("bertlab", "bertlab, stream in 16 bits")
    ]
    for one, side in zip(found["verdicts"], ("bertlab", "bertlab, stream in 16 bits")):
        assert one["value"] == found["shapes"]["BERT-base"][side]["mfu"] and one["reached"] == (
            one["value"] >= 0.45
        )
    assert capsys.readouterr().out.count("reached (tiny shapes") == 4


def test_sides_that_were_left_out_have_no_verdict(capsys):
    gpu = runpy.run_path(str(ROOT / "benchmarks" / "gpu.py"))
    theirs, ours = {"tokens_per_second": 1.0, "mfu": 0.5}, {"mfu": 0.5, "times_transformers": None}
    assert gpu["judge"]({"transformers": theirs}, False) == []
    assert [one["reached"] for one in gpu["judge"]({"bertlab": ours}, False)] == [True]
    assert capsys.readouterr().out.count("not measured") == 4 + 3
