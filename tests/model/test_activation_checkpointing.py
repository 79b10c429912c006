"Activation checkpointing: the same losses and gradients, dropout included, with less in memory."

import copy
from functools import partial

import pytest
import torch
from torch._functorch import config as partitioning
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from bertlab.model.activation_checkpointing import (
    MemoryTracker,
    checkpoint_activations,
    save_matmuls,
    parse_checkpointing,
)
from bertlab.model.attention import ATTENTION_KERNELS, AttentionKernel, make_varlen_metadata
from bertlab.model.config import BertLabConfig, modernbert_tiny
from bertlab.model.encoder import run_blocks
from bertlab.model.heads import (
    BertLabForEnhancedMaskedLM,
    BertLabForMaskedDiffusion,
    BertLabForMaskedLM,
)
from bertlab.model.losses import LossConfig

torch.set_num_threads(1)
V, B, L = 50, 4, 24
MODELS = [BertLabForMaskedLM, BertLabForMaskedDiffusion, BertLabForEnhancedMaskedLM]
EAGER_MODES = {  # all but `budget`, which a compiler has to carry out
    "full": {},
    "selected_blocks": {"interval": 2},
    "selected_modules": {"modules": ["*.mlp", "head"]},
    "selected_ops": {},
}
DROPOUT = dict(embedding_dropout=0.1, attention_dropout=0.2, mlp_dropout=0.1)
COMPILER = "aot_eager_decomp_partition"  # inductor's partitioning without its C++


@pytest.fixture(autouse=True)
def same_start_for_every_test():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    partitioning.activation_memory_budget = 1.0


def small(**overrides) -> BertLabConfig:
    shape = dict(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=4,
        num_attention_heads=2,
    )
    return modernbert_tiny(**{**shape, "local_attention": 4, **DROPOUT, **overrides})


def lively(model):
    "Move every weight well away from its start, so that nothing hides."
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.12 * torch.randn(p.shape))
    return model.train()


def some_batch() -> dict:
    ids = torch.randint(5, V, (B, L))
    documents = torch.ones(B, L, dtype=torch.int64)
    documents[0, 9:], documents[1, 15:] = 2, 0  # two documents in a row; padding
    return dict(
        input_ids=ids, attention_mask=documents, labels=ids.masked_fill(documents == 0, -100)
    )


def step(model, batch, seed=7, **more) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    "Loss, gradient, bytes kept for the backward pass, bytes at the peak."
    model.zero_grad()
    torch.manual_seed(seed)
    with MemoryTracker() as ledger:
        loss = model(**batch, **more).loss
        kept = ledger.now
        loss.backward()
    return (
        loss.detach(),
        torch.cat([p.grad.flatten() for p in model.parameters()]),
        kept,
        max(ledger.history),
    )


# ---- same numbers, less memory ---------------------------------------------------------------


@pytest.mark.parametrize("mode", EAGER_MODES)
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("cls", MODELS)
def test_recomputed_gradients_are_bit_identical_and_keep_less(cls, kernel, mode):
    model, batch = lively(cls(small(attn_implementation=kernel))), some_batch()
    loss, gradient, kept, peak = step(model, batch)
    names = set(model.state_dict())
    again, gradient_again, less, lower = step(model, batch)
    assert torch.equal(gradient, gradient_again) and (less, lower) == (
        kept,
        peak,
    )  # the ledger is exact
    checkpoint_activations(model, mode, **EAGER_MODES[mode])
    again, gradient_again, less, lower = step(model, batch)
    assert torch.equal(loss, again) and torch.equal(gradient, gradient_again)
    assert less < 0.9 * kept and lower < peak
    assert set(model.state_dict()) == names


def one_by_one(q, k, v, stretches, dropout=0.0):
    "What the varlen kernel computes, document by document, on any device."
    ends = stretches.cu_lengths.tolist()
    parts = []
    for start, end in zip(ends, ends[1:]):
        distance = (torch.arange(end - start)[:, None] - torch.arange(end - start)).abs()
        near = distance <= (stretches.window or end)
        scores = (q[:, :, start:end] @ k[:, :, start:end].mT).masked_fill(~near, -1e9)
        parts.append(torch.dropout(scores.softmax(-1), dropout, True) @ v[:, :, start:end])
    return torch.cat(parts, 2)


@pytest.mark.parametrize("mode", EAGER_MODES)
def test_unpadded_rows_and_a_head_in_chunks_come_out_the_same(mode, monkeypatch):
    monkeypatch.setitem(
        ATTENTION_KERNELS, "varlen", AttentionKernel(make_varlen_metadata, one_by_one, unpads=True)
    )
    model, batch = lively(BertLabForMaskedLM(small(attn_implementation="varlen"))), some_batch()
    chunked = dict(loss_config=LossConfig(chunk_size=10))
    loss, gradient, kept, _ = step(model, batch, **chunked)
    checkpoint_activations(model, mode, **EAGER_MODES[mode])
    again, gradient_again, less, _ = step(model, batch, **chunked)
    assert torch.equal(loss, again) and torch.equal(gradient, gradient_again) and less < kept


def test_checkpointing_leaves_the_random_stream_alone():
    model, batch, states = lively(BertLabForMaskedLM(small())), some_batch(), []
    for mode, options in {None: {}, **EAGER_MODES}.items():
        checkpoint_activations(model, mode, **options)
        step(model, batch)
        states.append(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


# ---- which modules run twice -----------------------------------------------------------------


def count_runs(model, batch) -> dict[str, int]:
    "How often each block, MLP and head ran in a step."
    counts, handles = {}, []
    for name, module in model.named_modules():
        if name.endswith(("mlp", "head")) or name.rpartition(".")[2].isdigit():

            def note(module, args, name=name):
                counts[name] = counts.get(name, 0) + 1

            # Blocks are repeated below their hooks; what is inside them runs hooks again.
            handles.append(
                (
                    module.pre_mlp_norm if hasattr(module, "pre_mlp_norm") else module
                ).register_forward_pre_hook(note)
            )
    step(model, batch)
    [handle.remove() for handle in handles]
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


def test_the_last_call_decides_and_none_keeps_everything_again():
    model, batch = lively(BertLabForMaskedLM(small(**dict.fromkeys(DROPOUT, 0.0)))), some_batch()
    *_, kept, _ = step(model, batch)
    checkpoint_activations(model, "budget", budget=0.5)
    checkpoint_activations(model, "selected_modules", modules=["encoder"])
    checkpoint_activations(model, "full")
    assert count_runs(model, batch)["encoder.blocks.1"] == 2
    assert checkpoint_activations(model, None) == []
    assert partitioning.activation_memory_budget == 1.0
    assert step(model, batch)[2] == kept and "forward" not in vars(model.encoder)


@pytest.mark.parametrize("mode", EAGER_MODES)
def test_evaluation_repeats_nothing(mode):
    model = lively(BertLabForMaskedLM(small()))
    checkpoint_activations(model, mode, **EAGER_MODES[mode])
    assert set(count_runs(model.eval(), some_batch()).values()) == {1}


# ---- operations ------------------------------------------------------------------------------


@torch.library.custom_op("bertlab_tests::flash_attn_stand_in", mutates_args=())
def noisy(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    return x * (torch.rand(x.shape) >= dropout_p) if dropout_p else x.clone()


noisy.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward((output != 0).to(output.dtype)))  # fmt: skip


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_repeated_attention_does_not_shift_later_dropout(rate):
    weight = torch.randn(8, 8, requires_grad=True)

    def block(x):
        return torch.dropout((noisy(x @ weight, rate) * x).tanh(), 0.5, True) ** 2

    gradients, x = [], torch.randn(6, 8, requires_grad=True)
    for run in (block, partial(checkpoint, block, use_reentrant=False, context_fn=partial(
            create_selective_checkpoint_contexts, save_matmuls))):  # fmt: skip
        torch.manual_seed(0)
        gradients.append(torch.autograd.grad(run(x).sum(), (x, weight)))
    assert all(map(torch.equal, *gradients))


def test_only_products_and_attention_are_kept():
    a, b, scores = torch.zeros(2, 9, 4), torch.zeros(2, 4, 9), torch.zeros(2, 9, 9)
    aten = torch.ops.aten
    flash = aten._scaled_dot_product_flash_attention.default
    decide = lambda op, *args, **kwargs: (
        save_matmuls(None, op, *args, **kwargs) is CheckpointPolicy.MUST_SAVE
    )
    assert decide(aten.mm.default, a[0], b[0]) and decide(aten.addmm.default, a[0], a[0], b[0])
    assert decide(aten.bmm.default, scores, a) and not decide(aten.bmm.default, a, b)
    assert (
        decide(flash, a, a, a) and decide(flash, a, a, a, 0.0) and not decide(flash, a, a, a, 0.1)
    )
    assert not decide(flash, a, a, a, dropout_p=0.1)
    assert decide(torch.ops.higher_order.flex_attention, a, a, a)
    assert not decide(aten.gelu.default, a) and not decide(
        aten.native_layer_norm.default, a, [4], None, None, 1e-5
    )


# ---- compiled --------------------------------------------------------------------------------


def kept_by_autograd(model, batch) -> tuple[torch.Tensor, torch.Tensor, int]:
    "Loss, gradient, and the bytes that autograd keeps, weights aside: a compiled graph counts too."
    model.zero_grad()
    torch.manual_seed(7)
    own, kept = {p.untyped_storage()._cdata for p in model.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss
    loss.backward()
    return (
        loss.detach(),
        torch.cat([p.grad.flatten() for p in model.parameters()]),
        sum(kept.values()),
    )


def test_a_compiled_encoder_in_one_graph_repeats_its_dropout():
    result, batch = {}, some_batch()
    model = lively(BertLabForMaskedLM(small(num_hidden_layers=2, attn_implementation="eager")))
    for mode in (None, "full", "selected_modules", "selected_ops"):
        torch._dynamo.reset()
        twin = copy.deepcopy(model)
        checkpoint_activations(twin, mode, **EAGER_MODES.get(mode, {}))
        twin.encoder.compile(backend=COMPILER, fullgraph=True)
        result[mode] = kept_by_autograd(twin, batch)
    for mode in ("full", "selected_modules", "selected_ops"):
        torch.testing.assert_close(result[mode][:2], result[None][:2], rtol=0, atol=1e-6)
        assert result[mode][2] < 0.95 * result[None][2], mode


def test_a_compiled_budget_changes_no_gradient():
    model = lively(BertLabForMaskedLM(small(num_hidden_layers=2, **dict.fromkeys(DROPOUT, 0.0))))
    batch, result = some_batch(), {}
    for budget in (None, 0.5, 0):
        torch._dynamo.reset()
        twin = copy.deepcopy(model)
        if budget is not None:
            checkpoint_activations(twin, "budget", budget=budget)
        compiled = torch.compile(run_blocks, backend=COMPILER, fullgraph=True)
        twin.encoder.__dict__["compiled_blocks"] = compiled  # the layers alone, as in training
        result[budget] = kept_by_autograd(twin, batch)
    for loss, gradient, _ in result.values():
        torch.testing.assert_close((loss, gradient), result[None][:2], rtol=0, atol=1e-6)
    assert result[0][2] < result[0.5][2] < result[None][2]


def test_a_budget_without_a_compiler_is_refused():
    model, batch = lively(BertLabForMaskedLM(small(**dict.fromkeys(DROPOUT, 0.0)))), some_batch()
    checkpoint_activations(model, "budget", budget=0.5)
    with pytest.raises(ValueError, match="budget.*compile_model=True.*selected_ops"):
        model(**batch)
    model.eval()(**batch)
    with torch.no_grad():
        model.train()(**batch)


# ---- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting, meaning",
    [
        (False, (None, {})),
        (None, (None, {})),
        (True, ("full", {})),
        ("full", ("full", {})),
        ("selected_ops", ("selected_ops", {})),
        ({"mode": "selected_blocks", "interval": 3}, ("selected_blocks", {"interval": 3})),
        (
            {"mode": "selected_modules", "modules": ["a", "*.b"]},
            ("selected_modules", {"modules": ["a", "*.b"]}),
        ),
        ({"mode": "budget", "budget": 0}, ("budget", {"budget": 0})),
    ],
)
def test_settings_are_read(setting, meaning):
    assert parse_checkpointing(setting) == meaning


@pytest.mark.parametrize("setting", [
    3, "half", ["full"], {"interval": 2}, {"mode": ["full"]}, "selected_blocks",
    {"mode": "selected_blocks", "interval": 0}, {"mode": "selected_blocks", "interval": True},
    {"mode": "selected_blocks", "interval": 2.0}, {"mode": "full", "interval": 2},
    {"mode": "selected_modules", "modules": "*.mlp"}, {"mode": "selected_modules", "modules": []},
    {"mode": "selected_modules", "modules": ["a", 1]}, {"mode": "budget", "budget": 1.5},
    {"mode": "budget", "budget": float("nan")}, {"mode": "budget", "budget": False},
    {"mode": "budget", "budget": 0.5, "interval": 2},
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


def test_the_ledger_counts_live_storages_once():
    given = torch.zeros(100)
    with MemoryTracker() as ledger:
        a = given + 1  # 400 bytes
        views = a.view(10, 10).t(), given[:50]  # nothing new
        b = a.double()  # 800
        del a
        assert ledger.now == 1200  # a view holds it
        del views
        assert ledger.now == 800
        b.add_(1)
        del b
    assert ledger.now == 0 and max(ledger.history) == 1200


# ---- a second derivative --------------------------------------------------------------------------


@pytest.mark.parametrize("mode, options", [("full", {}), ("selected_blocks", dict(interval=2)),
                                           ("selected_modules", dict(modules=["*.attention"]))])  # fmt: skip
def test_recomputing_leaves_the_curvature_alone(mode, options):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def curvature(model):  # as SophiaH asks for it: fused attention has no second derivative
        torch.manual_seed(1)
        with sdpa_kernel(SDPBackend.MATH):
            loss = model(ids, labels=ids).loss
        weights = list(model.parameters())
        slopes = torch.autograd.grad(loss, weights, create_graph=True)
        return torch.autograd.grad(sum(slope.sum() for slope in slopes), weights)

    torch.manual_seed(0)
    shape = dict(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=20,
        num_attention_heads=2,
        num_hidden_layers=3,
    )
    model, ids = (
        BertLabForMaskedLM(modernbert_tiny(**shape, mlp_dropout=0.1)).train(),
        torch.randint(5, 50, (2, 16)),
    )
    want = curvature(model)
    checkpoint_activations(model, mode, **options)
    assert all(torch.equal(got, one) for got, one in zip(curvature(model), want))
