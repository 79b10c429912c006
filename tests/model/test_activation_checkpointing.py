"Activation checkpointing: the same losses and gradients, dropout included, with less in memory."

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from torch._functorch import config as partitioning
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy

import model_cases

from bertlab.model.activation_checkpointing import (
    MemoryTracker,
    checkpoint_activations,
    _save_matmuls,
    parse_checkpointing,
)
from bertlab.model.encoder import run_blocks
from bertlab.model.heads import (
    BertLabForEnhancedMaskedLM,
    BertLabForMaskedLM,
)
from bertlab.model.losses import LossConfig

V, B, L = 50, 4, 24
MODELS = [BertLabForMaskedLM, BertLabForEnhancedMaskedLM]
EAGER_MODES = {  # all but `budget`, which a compiler has to carry out
    "full": {},
    "selected_blocks": {"interval": 2},
    "selected_modules": {"modules": ["*.mlp", "head"]},
    "selected_ops": {},
}
DROPOUT = dict(embedding_dropout=0.1, attention_dropout=0.2, mlp_dropout=0.1)
small = partial(model_cases.small, num_hidden_layers=4, **DROPOUT)
lively = lambda model: model_cases.lively(model).train()
COMPILER = "aot_eager_decomp_partition"  # inductor's partitioning without its C++


@pytest.fixture(autouse=True)
def same_start_for_every_test():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    partitioning.activation_memory_budget = 1.0


def some_batch() -> dict:
    ids = torch.randint(5, V, (B, L))
    documents = torch.ones(B, L, dtype=torch.int64)
    documents[0, 9:], documents[1, 15:] = 2, 0  # two documents in a row; padding
    return dict(
        input_ids=ids, attention_mask=documents, labels=ids.masked_fill(documents == 0, -100)
    )


def step(model, batch, seed=7, **options) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    "Return loss, gradient, bytes saved for the backward pass, bytes at the peak."
    model.zero_grad()
    torch.manual_seed(seed)
    with MemoryTracker() as tracker:
        loss = model(**batch, **options).loss
        saved = tracker.now
        loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return loss.detach(), gradient, saved, max(tracker.history)


# ---- same numbers, less memory ---------------------------------------------------------------


@pytest.mark.parametrize("mode", EAGER_MODES)
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("cls", MODELS)
def test_recomputed_gradients_are_bit_identical_and_save_less(cls, kernel, mode):
    model, batch = lively(cls(small(attn_implementation=kernel))), some_batch()
    loss, gradient, saved, peak = step(model, batch)
    names = set(model.state_dict())
    checkpoint_activations(model, mode, **EAGER_MODES[mode])
    again, gradient_again, less, lower = step(model, batch)
    assert torch.equal(loss, again) and torch.equal(gradient, gradient_again)
    assert less < 0.9 * saved and lower < peak
    assert set(model.state_dict()) == names


def test_checkpointing_leaves_the_random_stream_alone():
    model, batch, states = lively(BertLabForMaskedLM(small())), some_batch(), []
    for mode, options in {None: {}, **EAGER_MODES}.items():
        checkpoint_activations(model, mode, **options)
        step(model, batch, loss_config=LossConfig(chunk_size=10))
        states.append(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


# ---- which modules run twice -----------------------------------------------------------------


def count_runs(model, batch) -> Counter:
    "Count how often each MLP ran in a step."
    counts, handles = Counter(), []
    for name, module in model.named_modules():
        if name.endswith("mlp"):
            # What is inside a module that is repeated runs its hooks again.
            count = lambda *_, name=name: counts.update([name])
            handles.append(module.up_proj.register_forward_pre_hook(count))
    step(model, batch)
    for handle in handles:
        handle.remove()
    return counts


def test_globs_choose_the_outermost_modules_with_a_forward():
    model = BertLabForMaskedLM(small())
    choose = lambda *modules: checkpoint_activations(
        model, "selected_modules", modules=list(modules)
    )
    assert choose("*.mlp") == [f"encoder.blocks.{i}.mlp" for i in range(4)]
    assert choose("encoder.blocks*") == [f"encoder.blocks.{i}" for i in range(4)]
    assert choose("*") == ["encoder", "head"]
    assert choose("*.[02].attention", "head") == [
        "encoder.blocks.0.attention", "encoder.blocks.2.attention", "head"]  # fmt: skip


def test_the_last_call_decides_and_none_saves_everything_again():
    model, batch = lively(BertLabForMaskedLM(small(**dict.fromkeys(DROPOUT, 0.0)))), some_batch()
    *_, saved, _ = step(model, batch)
    checkpoint_activations(model, "budget", budget=0.5)
    checkpoint_activations(model, "selected_modules", modules=["encoder"])
    checkpoint_activations(model, "full")
    assert count_runs(model, batch)["encoder.blocks.1.mlp"] == 2
    assert checkpoint_activations(model, None) == []
    assert partitioning.activation_memory_budget == 1.0
    assert step(model, batch)[2] == saved and "forward" not in vars(model.encoder)


@pytest.mark.parametrize("mode", EAGER_MODES)
def test_evaluation_repeats_nothing(mode):
    model = lively(BertLabForMaskedLM(small()))
    checkpoint_activations(model, mode, **EAGER_MODES[mode])
    assert set(count_runs(model.eval(), some_batch()).values()) == {1}


# ---- operations ------------------------------------------------------------------------------


def test_only_products_and_attention_without_dropout_are_saved():
    a, b, scores = torch.zeros(2, 9, 4), torch.zeros(2, 4, 9), torch.zeros(2, 9, 9)
    aten, flex = torch.ops.aten, torch.ops.higher_order.flex_attention
    flash = aten._scaled_dot_product_flash_attention.default
    calls = [
        (aten.mm.default, (a[0], b[0]), True), (aten.addmm.default, (a[0], a[0], b[0]), True),
        (aten.bmm.default, (scores, a), True), (aten.bmm.default, (a, b), False),
        (flash, (a, a, a), True), (flash, (a, a, a, 0.1), False), (flex, (a, a, a), True),
        (aten.gelu.default, (a,), False),
    ]  # fmt: skip
    for op, arguments, is_saved in calls:
        decision = _save_matmuls(None, op, *arguments)
        assert (decision is CheckpointPolicy.MUST_SAVE) == is_saved, op


# ---- compiled --------------------------------------------------------------------------------


def saved_by_autograd(model, batch) -> tuple[torch.Tensor, torch.Tensor, int]:
    "Return loss, gradient, and the bytes that autograd saves without weights, compiled or not."
    model.zero_grad()
    torch.manual_seed(7)
    weights, saved = {p.untyped_storage()._cdata for p in model.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return loss.detach(), gradient, sum(saved.values())


def test_a_compiled_encoder_in_one_graph_repeats_its_dropout():
    results, batch = {}, some_batch()
    model = lively(BertLabForMaskedLM(small(num_hidden_layers=2, attn_implementation="eager")))
    for mode in (None, "full", "selected_ops"):
        torch._dynamo.reset()
        twin = copy.deepcopy(model)
        checkpoint_activations(twin, mode)
        twin.encoder.compile(backend=COMPILER, fullgraph=True)
        results[mode] = saved_by_autograd(twin, batch)
    for mode in ("full", "selected_ops"):
        torch.testing.assert_close(results[mode][:2], results[None][:2], rtol=0, atol=1e-6)
        assert results[mode][2] < 0.95 * results[None][2], mode


def test_a_compiled_budget_changes_no_gradient():
    model = lively(BertLabForMaskedLM(small(num_hidden_layers=2, **dict.fromkeys(DROPOUT, 0.0))))
    batch, results = some_batch(), []
    for budget in (1, 0.5, 0):
        torch._dynamo.reset()
        twin = copy.deepcopy(model)
        checkpoint_activations(twin, "budget", budget=budget)
        compiled = torch.compile(run_blocks, backend=COMPILER, fullgraph=True)
        twin.encoder.__dict__["compiled_blocks"] = compiled  # the blocks alone, as in training
        results.append(saved_by_autograd(twin, batch))
    for result in results:
        torch.testing.assert_close(result[:2], results[0][:2], rtol=0, atol=1e-6)
    assert results[2][2] < results[1][2] < results[0][2]


# ---- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [
    3, "half", {"interval": 2}, "selected_blocks", {"mode": "selected_blocks", "interval": 0},
    {"mode": "full", "interval": 2}, {"mode": "budget", "budget": 1.5},
])  # fmt: skip
def test_a_wrong_setting_is_named(setting):
    with pytest.raises(ValueError) as refusal:
        parse_checkpointing(setting)
    assert f"gradient_checkpointing={setting!r}" in str(refusal.value)


@pytest.mark.parametrize("options", [dict(compiled=False), dict(needs_create_graph=True)])
def test_a_budget_needs_a_compiler_and_one_backward_pass(options):
    setting = {"mode": "budget", "budget": 0.5}
    assert parse_checkpointing(setting, compiled=True) == ("budget", {"budget": 0.5})
    with pytest.raises(ValueError, match="gradient_checkpointing"):
        parse_checkpointing(setting, **options)


# ---- the ledger ------------------------------------------------------------------------------


def test_the_tracker_counts_live_storages_once():
    source = torch.zeros(100)
    with MemoryTracker() as tracker:
        a = source + 1  # 400 bytes
        views = a.view(10, 10).t(), source[:50]  # nothing new
        b = a.double()  # 800
        del a
        assert tracker.now == 1200  # a view holds it
        del views
        assert tracker.now == 800
        b.add_(1)
        del b
    assert tracker.now == 0 and max(tracker.history) == 1200


# ---- a second derivative --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["full", "selected_modules"])
def test_recomputing_leaves_the_curvature_alone(mode):
    ids = torch.randint(5, V, (2, 16))
    model = BertLabForMaskedLM(small(num_hidden_layers=3, attention_dropout=0.0)).train()

    def curvature():  # as SophiaH uses it: fused attention has no second derivative
        torch.manual_seed(1)
        with sdpa_kernel(SDPBackend.MATH):
            loss = model(ids, labels=ids).loss
        weights = list(model.parameters())
        slopes = torch.autograd.grad(loss, weights, create_graph=True)
        return torch.autograd.grad(sum(slope.sum() for slope in slopes), weights)

    want = curvature()
    checkpoint_activations(model, mode, **EAGER_MODES[mode])
    assert all(map(torch.equal, curvature(), want))
