"""Models that two processes make in shares, FSDP2's options, and rows of 8,192 tokens: all equal to one process."""

import gc
import itertools
import os

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from test_parallel import CONFIG, ROWS, assert_same_step, run
from test_shared_models import FOUR, Shared

from bertlab.data.corpus import embedded_corpus
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.config import BertLabConfig
from bertlab.model.context_parallel import deal_labels, share_rows
from bertlab.model.encoder import BertLabPreTrainedModel
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model
from bertlab.model.tensor_parallel import find_cuts
from bertlab.train.checkpoints import RunCheckpoint
from bertlab.train.modules import PretrainingModule
from bertlab.train.parallel import FullyShardedStrategy, gather_weights
from bertlab.train.trainer import make_trainer, seed_everything

DEEP = {**CONFIG, "num_hidden_layers": 5}  # groups of 2 leave a block over
# 6 million weights, of which no part has more than a fortieth.
LARGE = dict(
    vocab_size=101,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=24,
    num_attention_heads=4,
)
OPTIONS = {
    "pairs of blocks": dict(blocks_per_group=2), "all blocks at once": dict(blocks_per_group=99),
    "one ahead": dict(prefetch_blocks=1), "pairs, two ahead": dict(blocks_per_group=2, prefetch_blocks=2),
    "more ahead than there are": dict(prefetch_blocks=99), "blocks kept whole": dict(reshard_after_forward=False, prefetch_blocks=1),
    "sums in float32": dict(reduce_dtype="float32"), "sums in bfloat16": dict(reduce_dtype="bfloat16"),
}  # fmt: skip
EXACT = [name for name in OPTIONS if name != "sums in bfloat16"]


class Start(L.Callback):
    "The weights with which a run begins, and what of them this process holds."

    def on_train_start(self, trainer, module):
        self.held = sum(local(p).nbytes for p in module.parameters())
        self.meta = any(p.is_meta for p in module.parameters())
        several = int(os.environ.get("WORLD_SIZE", 1)) > 1
        self.weights = gather_weights(module.model) if several else {
            name: weight.clone() for name, weight in module.model.state_dict().items()}  # fmt: skip


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def bytes_of_tensors():
    "Of all numbers that lie in this process's memory, each storage once."
    plain = (torch.Tensor, torch.nn.Parameter)
    storages = (
        one.untyped_storage()
        for one in gc.get_objects()
        if type(one) in plain and one.device.type == "cpu"
    )
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def begin(
    strategy="auto",
    sharers=1,
    seed=0,
    source=None,
    resume=None,
    config=FOUR,
    size=None,
    callbacks=(),
    steps=2,
):
    "How a run begins, and its first losses."
    seed_everything(seed)
    world = int(os.environ.get("WORLD_SIZE", 1))
    start, losses, batches = Start(), [], Shared(size or ROWS // (world // sharers), sharers)
    options = dict(learning_rate=3e-3, scheduler_warmup_steps=0, optimizer_kwargs={"eps": 1e-5})
    if source is None:
        module = PretrainingModule(config, **options)
    else:
        with torch.device("meta"):
            module = PretrainingModule(pretrained_model_name_or_path=str(source), **options)
        assert all(weight.is_meta for weight in module.model.parameters())

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            losses.append(trainer.callback_metrics["train_loss"].item())

    trainer = make_trainer(
        steps, "32-true", "cpu", world, [start, Losses(), *callbacks], strategy=strategy
    )
    trainer.fit(module, batches, ckpt_path=resume, weights_only=False)
    whole = bool(find_cuts(module.model)) or world == 1
    return {
        "start": start.weights,
        "losses": losses,
        "held": start.held,
        "meta": start.meta,
        "whole": whole,
    }


def memory(whole: bool) -> dict:
    "The most bytes of tensors that a process has while it makes its share of a large model, and at the end."
    seed_everything(0)
    strategy = FullyShardedStrategy()
    strategy.fills_shares = not whole  # whole: as every process did before
    start, module, found, calls = Start(), PretrainingModule(LARGE), [], itertools.count(1)
    init_weights, before = BertLabPreTrainedModel._init_weights, bytes_of_tensors()

    def watched(model, part):
        init_weights(model, part)
        if next(calls) % 40 == 39:  # looking takes a while
            found.append(bytes_of_tensors() - before)

    BertLabPreTrainedModel._init_weights = watched
    try:
        make_trainer(1, "32-true", "cpu", 2, [start], strategy=strategy).fit(module, Shared(1, 2))
    finally:
        BertLabPreTrainedModel._init_weights = init_weights
    return {"most": max(found), "samples": len(found), "held": start.held}


def whole_worker(folder):
    torch.save(memory(True), folder / f"whole-{os.environ['RANK']}.pt")


def worker(folder):
    rank = int(os.environ["RANK"])
    results = {"memory": memory(False)}
    for name, strategy, sharers in (
        ("fsdp", "fsdp", 1),
        ("tensor", "tensor", 2),
        ("context", "context", 2),
    ):
        results[name] = begin(strategy, sharers)
        results[f"{name} of a directory"] = begin(
            strategy, sharers, source=folder / "model", seed=7
        )
    results["other seeds"] = begin("fsdp", seed=rank)
    results["resumed"] = begin("fsdp", seed=5, resume=folder / "one.ckpt", steps=4)
    results["options"] = {}
    for name in ("pairs, two ahead", "sums in bfloat16"):
        results["options"][name] = run(8, strategy=FullyShardedStrategy(**OPTIONS[name]))
    torch.save(results, folder / f"quick-{rank}.pt")


def slow_worker(folder):
    import test_parallel

    rank = int(os.environ["RANK"])
    results, test_parallel.CONFIG = {}, DEEP
    results["options"] = {
        name: run(8, strategy=FullyShardedStrategy(**options), steps=3)
        for name, options in OPTIONS.items()
    }
    results["long rows"] = long_rows(True)
    torch.save(results, folder / f"slow-{rank}.pt")


def on_ranks(work, folder, name):
    run_on_ranks(work, folder, timeout=600)
    return [torch.load(folder / f"{name}-{r}.pt", weights_only=False) for r in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A directory with a model, and the checkpoint of a run of one process."
    folder = tmp_path_factory.mktemp("shares")
    torch.manual_seed(11)
    tokenizer = train_tokenizer(embedded_corpus().train_texts[:20], vocab_size=101)
    save_model(BertLabForMaskedLM(BertLabConfig(**FOUR)), tokenizer, folder / "model")
    begin(callbacks=[RunCheckpoint(folder / "one.ckpt")])
    return folder


@pytest.fixture(scope="module")
def results(folder):
    return on_ranks(worker, folder, "quick")


@pytest.fixture(scope="module")
def more(folder):
    return on_ranks(slow_worker, folder, "slow")


def assert_same_start(found, one):
    assert not found["meta"] and found["start"].keys() == one["start"].keys()
    assert all(torch.equal(found["start"][name], weight) for name, weight in one["start"].items())
    np.testing.assert_allclose(found["losses"], one["losses"], rtol=2e-6)


@pytest.mark.parametrize("way", ["fsdp", "tensor", "context"])
def test_two_processes_begin_with_the_weights_of_one_to_the_last_bit(results, way):
    one = begin()
    assert_same_start(results[0][way], one)
    held = [result[way]["held"] for result in results]
    assert max(held) < 0.6 * sum(w.nbytes for w in one["start"].values())


@pytest.mark.parametrize("way", ["fsdp", "tensor", "context"])
def test_a_directory_is_read_in_shares_as_it_is_read_whole(results, folder, way):
    assert_same_start(results[0][f"{way} of a directory"], begin(source=folder / "model", seed=7))


def test_process_0_says_where_the_generator_stood(results):
    assert_same_start(results[0]["other seeds"], begin())


def test_a_run_goes_on_from_a_checkpoint_of_one_process(results):
    straight = begin(steps=4)["losses"]
    np.testing.assert_allclose(results[0]["resumed"]["losses"], straight[2:], rtol=1e-5)


def test_no_process_ever_has_the_whole_model(results):
    whole = BertLabConfig(**LARGE).num_params() * 4
    for result in results:
        found = result["memory"]
        assert found["samples"] > 5 and found["held"] < 0.51 * whole
        assert found["held"] <= found["most"] + 0.05 * whole and found["most"] < 0.6 * whole, found


@pytest.mark.slow
def test_a_process_that_builds_all_of_it_has_the_whole_model(folder):
    whole = BertLabConfig(**LARGE).num_params() * 4
    for found in on_ranks(whole_worker, folder, "whole"):
        assert found["most"] > 0.9 * whole, "the measure sees it"


def test_groups_and_prefetching_change_no_step(results):
    assert_same_step(results[0]["options"]["pairs, two ahead"], run(ROWS))


def assert_rounded_step(got, one):
    """Sums of gradients in bfloat16 keep 8 bits: a relative error of 2^-9 for each term and for their sum.

    The loss of the first step has no gradient in it yet, so it is exact.
    """
    np.testing.assert_allclose(got["losses"][0], one["losses"][0], rtol=1e-6)
    np.testing.assert_allclose(got["losses"], one["losses"], rtol=2e-3)
    np.testing.assert_allclose(got["norms"][0], one["norms"][0], rtol=2**-7)
    apart = [(got["gradients"][name] - gradient).norm() / gradient.norm() for name, gradient in one["gradients"].items()
             if gradient.norm() > 1e-4]  # fmt: skip
    assert 1e-4 < max(apart) < 0.05, "rounded, and not more than that"


def test_gradients_that_travel_in_bfloat16_are_rounded_and_no_more(results):
    assert_rounded_step(results[0]["options"]["sums in bfloat16"], run(ROWS))


@pytest.fixture(scope="module")
def deep():
    import test_parallel

    usual, test_parallel.CONFIG = test_parallel.CONFIG, DEEP
    try:
        return run(ROWS, steps=3)
    finally:
        test_parallel.CONFIG = usual


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_options_that_say_when_and_to_whom_change_no_step(more, deep, name):
    assert_same_step(more[0]["options"][name], deep)


@pytest.mark.slow
def test_three_steps_of_rounded_sums(more, deep):
    assert_rounded_step(more[0]["options"]["sums in bfloat16"], deep)


# --- rows of 8,192 tokens -------------------------------------------------------------------------

LONG = dict(vocab_size=101, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=1,
            max_position_embeddings=8192, local_attention=128, global_attention_every_n_layers=2)  # fmt: skip
LENGTHS = (
    3000,
    2500,
    7,
    1,
    2000,
    600,
)  # the second is on both sides of the cut at 4,096; 84 places are padding


def long_batch():
    lots = np.random.default_rng(3)
    number = np.repeat(np.arange(1, len(LENGTHS) + 1), LENGTHS)
    documents = np.pad(number, (0, 8192 - len(number)))
    positions = np.pad(np.concatenate([np.arange(n) for n in LENGTHS]), (0, 8192 - len(number)))
    ids = np.where(documents > 0, lots.integers(5, 101, 8192), 0)
    places = np.sort(lots.permutation(np.arange(1, len(number)))[:800])
    labels = np.full(8192, -100)
    labels[places], ids[places] = ids[places], 4
    batch = dict(
        input_ids=ids,
        attention_mask=documents,
        position_ids=positions,
        labels=labels,
        label_positions=places,
    )
    return {name: torch.from_numpy(values)[None] for name, values in batch.items()}


def long_rows(shared: bool) -> dict:
    torch.manual_seed(0)
    model, batch = BertLabForMaskedLM(BertLabConfig(**LONG)).train(), long_batch()
    if shared:
        share_rows(model, dist.group.WORLD)
        batch = deal_labels(batch, dist.get_rank(), 2, (0, 1, 2))
    out = model(**batch)
    out.loss_sum.backward()
    found = {"loss": out.loss_sum.detach().double(), "labels": out.num_labels.double(),
             **{name: p.grad.double() for name, p in model.named_parameters()}}  # fmt: skip
    if shared:
        for tensor in found.values():
            dist.all_reduce(tensor)
    return found


@pytest.mark.slow
def test_a_row_of_8192_tokens_over_two_processes_has_the_loss_and_the_gradient_of_one(more):
    one, found = long_rows(False), more[0]["long rows"]
    assert found["labels"] == one["labels"] == 800
    torch.testing.assert_close(found["loss"], one["loss"], rtol=1e-6, atol=0)
    for name, gradient in one.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=0, atol=2e-5 * max(1.0, gradient.abs().max().item())
        )


def test_documents_of_the_long_row_lie_on_both_sides_of_the_cut():
    documents = long_batch()["attention_mask"][0]
    assert (
        documents.shape == (8192,)
        and documents[4095] == documents[4096] == 2
        and (documents == 0).sum() == 84
    )
