"The encoder and its masked-LM head: shapes, packed documents, losses, counts, refusals."

import copy
import itertools
import json
import logging
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, ModernBertConfig, ModernBertForMaskedLM

import bertlab.model.attention
import bertlab.model.encoder
from bertlab.model.attention import (
    ATTENTION_KERNELS,
    AttentionKernel,
    AttentionMaskSpec,
    attend,
    document_position_ids,
    make_varlen_metadata,
)
from bertlab.model.config import (
    ACTIVATION_NAMES,
    BertLabConfig,
    bert_tiny,
    training_flops_per_token,
    matmul_parameters,
    count_parameters,
    modernbert_base,
    modernbert_tiny,
)
from bertlab.model.encoder import BertLabModel
from bertlab.model.heads import BertLabForCausalLM
from bertlab.model.heads import BertLabForEnhancedMaskedLM, BertLabForMaskedLM
from bertlab.model.layers import gather_positions
from bertlab.model.losses import masked_lm_loss, mean_loss
from bertlab.model.layers import ACTIVATIONS, GLU, trunc_normal_, rope_cos_sin, apply_rope

torch.set_num_threads(1)
TOLERANCE = dict(rtol=0, atol=1e-5)
L = 12


def small(**overrides) -> BertLabConfig:
    "Four layers (global, local, local, global) whose windows are narrower than the rows."
    shape = dict(vocab_size=50, hidden_size=16, intermediate_size=20, num_attention_heads=2)
    return modernbert_tiny(**{**shape, "local_attention": 4, **overrides})


@pytest.fixture(autouse=True)
def same_start_for_every_test():
    torch.manual_seed(0)


def lively(model: torch.nn.Module) -> torch.nn.Module:
    "Move every weight well away from its start, norms and biases too, so that nothing hides."
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.12 * torch.randn(p.shape))
    return model.eval()


def some_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 50, shape, generator=torch.Generator().manual_seed(seed))


# Rows of document lengths; what is missing to L is padding.
ROWS = {
    "three_documents": [5, 4, 3],
    "single_tokens": [1, 7, 1],
    "one_full_document": [12],
    "padded": [6, 3],
    "padding_only": [],
}
DOCUMENTS = torch.tensor(
    [
        [d for d, n in enumerate(ns, 1) for _ in range(n)] + [0] * (L - sum(ns))
        for ns in ROWS.values()
    ]
)


# ---- layers ----------------------------------------------------------------------------------


def test_rotated_scores_depend_on_the_distance_alone():
    q, k = torch.randn(
        2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    at = lambda x, p: apply_rope(x, rope_cos_sin(torch.tensor([[p]]), 8, 100.0))
    near, far = ((at(q, p) * at(k, p + 3)).sum() for p in (2, 40))
    torch.testing.assert_close(near, far, rtol=0, atol=1e-4)
    assert (near - (at(q, 2) * at(k, 6)).sum()).abs() > 1e-3


def test_first_pair_turns_by_one_radian_a_position():
    x = torch.tensor([[[1.0, 0.0, 0.0, 0.0]]])  # K = 4: pairs (0, 2) and (1, 3)
    turned = apply_rope(x, rope_cos_sin(torch.tensor([[2]]), 4, 10.0))[0, 0]
    want = [torch.tensor(2.0).cos(), 0.0, torch.tensor(2.0).sin(), 0.0]
    torch.testing.assert_close(turned, torch.tensor(want))


def test_gated_mlp_multiplies_the_activated_half_by_the_other():
    mlp = GLU(1, 1, "relu")
    with torch.no_grad():
        mlp.up_proj.weight.copy_(torch.tensor([[2.0], [-3.0]]))
        mlp.down_proj.weight.fill_(10.0)
    assert mlp(torch.tensor([[1.0], [-1.0]])).flatten().tolist() == [-60.0, 0.0]


def test_truncated_start_has_no_tail():
    w = trunc_normal_(torch.empty(400, 400), 0.02)
    assert w.abs().max() <= 0.04 and 0.016 < w.std() < 0.019


def test_out_projections_start_smaller_and_everything_else_at_the_given_width():
    config = small(vocab_size=500, hidden_size=128, intermediate_size=256, initializer_range=0.02)
    model = BertLabForMaskedLM(config)
    block = model.encoder.blocks[1]
    wide = [model.get_input_embeddings(), block.attention.qkv, block.mlp.up_proj]
    narrow = [block.attention.out_proj, block.mlp.down_proj, model.head.dense]
    for module, cut in [(m, 0.04) for m in wide] + [(m, 0.04 / 8**0.5) for m in narrow]:
        assert 0.9 * cut < module.weight.abs().max() <= cut
    assert (block.pre_mlp_norm.weight == 1).all() and (model.head.bias == 0).all()


def test_weights_missing_from_a_checkpoint_start_like_those_of_a_new_model(tmp_path):
    encoder = BertLabModel(small(hidden_size=128, intermediate_size=256, initializer_range=0.02))
    lively(encoder).save_pretrained(tmp_path)
    model = BertLabForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(
        model.encoder.blocks[1].mlp.up_proj.weight, encoder.blocks[1].mlp.up_proj.weight
    )
    assert 0.9 * 0.04 / 8**0.5 < model.head.dense.weight.abs().max() <= 0.04 / 8**0.5
    assert (model.head.bias == 0).all() and (model.head.norm.weight == 1).all()


def test_names_of_activations_agree_between_configuration_and_layers():
    assert tuple(ACTIVATIONS) == ACTIVATION_NAMES


# ---- packed = alone (contract 3) -------------------------------------------------------------


def one_by_one(q, k, v, stretches, dropout):
    "The variable-length kernel needs CUDA; this one runs each document of its row by itself."
    parts = []
    for a, b in itertools.pairwise(stretches.cu_lengths.tolist()):
        alone = AttentionMaskSpec(torch.ones(1, b - a), stretches.window, stretches.slopes_H)
        parts.append(attend(*(t[:, :, a:b] for t in (q, k, v)), alone, "eager", dropout))
    return torch.cat(parts, 2) if parts else q


@pytest.fixture
def varlen_anywhere(monkeypatch):
    monkeypatch.setitem(
        ATTENTION_KERNELS, "varlen", AttentionKernel(make_varlen_metadata, one_by_one, unpads=True)
    )


TRAINING_KERNELS = ["eager", "sdpa", "varlen"]  # flex trains on CUDA only


def logits_and_gradients(model, ids, documents, weights, positions=None):
    "Weighted sum of the logits -> its gradient, so that every logit has a say of its own."
    model.zero_grad()
    logits = model(ids, documents, positions).logits
    (logits * weights).sum().backward()
    return logits.detach(), [
        torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()
    ]


def check_packed_equals_alone(model, ids, documents, lengths, positions=None):
    "Compare rows of packed documents with the documents run one by one: logits and gradients."
    weights = torch.randn(*ids.shape, 50, generator=torch.Generator().manual_seed(1)) / L
    real = documents > 0
    packed, gradients = logits_and_gradients(
        model, ids, documents, weights * real[..., None], positions
    )
    assert packed.isfinite().all()
    alone_gradients = [torch.zeros_like(g) for g in gradients]
    for row, ns in enumerate(lengths):
        ends = list(itertools.accumulate(ns))
        for at in (slice(end - n, end) for n, end in zip(ns, ends)):
            one = slice(row, row + 1)
            alone, grads = logits_and_gradients(model, ids[one, at], None, weights[one, at])
            torch.testing.assert_close(packed[one, at], alone, **TOLERANCE)
            alone_gradients = [a + g for a, g in zip(alone_gradients, grads)]
    for got, want in zip(
        gradients, alone_gradients
    ):  # sums over all tokens: some are larger than 1
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", TRAINING_KERNELS)
@pytest.mark.parametrize(
    "every", [1, 3, 4], ids=["global_layers", "mixed_layers", "mostly_windows"]
)
@pytest.mark.parametrize("row", range(len(ROWS)), ids=ROWS)
def test_packed_documents_are_computed_as_if_alone(row, every, kernel, varlen_anywhere):
    config = small(global_attention_every_n_layers=every, attn_implementation=kernel)
    model, one = lively(BertLabForMaskedLM(config)), slice(row, row + 1)
    check_packed_equals_alone(
        model, some_ids(1, L, seed=row), DOCUMENTS[one], list(ROWS.values())[one]
    )


POSITIONS = {  # and with each, something else that could let documents meet
    "rope": {},
    "partial_rope": dict(partial_rotary_factor=0.5, num_key_value_heads=1, norm="rms"),
    "alibi": dict(attention_positions="alibi", output_gate="element", mlp="plain"),
    "learned": dict(embedding_positions="learned", attention_positions="none", norm_position="post",
                    attention_bias=True, type_vocab_size=2, norm_bias=True),
    "sinusoidal": dict(embedding_positions="sinusoidal", attention_positions="none", norm="dynamic_tanh"),
    "none": dict(attention_positions="none", qk_norm=True, norm="group", norm_groups=4),
    "learned_and_rope": dict(embedding_positions="learned", qk_norm=True, output_gate="head",
                             norm="deep", norm_position="post"),
}  # fmt: skip


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("kernel", TRAINING_KERNELS)
def test_packed_equals_alone_for_every_kernel_and_position(kernel, positions, varlen_anywhere):
    config = small(attn_implementation=kernel, num_hidden_layers=3, **POSITIONS[positions])
    model = lively(BertLabForMaskedLM(config))
    check_packed_equals_alone(model, some_ids(5, L), DOCUMENTS, ROWS.values())


@pytest.mark.parametrize("positions", POSITIONS)
def test_flex_equals_the_plain_kernel_for_every_position(positions):
    model = lively(BertLabForMaskedLM(small(num_hidden_layers=3, **POSITIONS[positions])))
    logits = {}
    for kernel in ("eager", "flex"):
        model.set_attn_implementation(kernel)
        with torch.no_grad():
            logits[kernel] = model(some_ids(5, L), DOCUMENTS).logits[DOCUMENTS > 0]
    torch.testing.assert_close(logits["flex"], logits["eager"], **TOLERANCE)


@pytest.mark.parametrize("kernel", TRAINING_KERNELS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_without_the_document_mask_the_comparison_fails(kernel, positions, varlen_anywhere):
    config = small(attn_implementation=kernel, num_hidden_layers=3, **POSITIONS[positions])
    model, ids, restarted = (
        lively(BertLabForMaskedLM(config)),
        some_ids(1, L),
        document_position_ids(DOCUMENTS[:1]),
    )
    one_document = torch.ones_like(DOCUMENTS[:1])
    with pytest.raises(AssertionError, match="not close"):
        check_packed_equals_alone(model, ids, one_document, [ROWS["three_documents"]], restarted)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_a_mask_that_forgets_documents_is_noticed(kernel, monkeypatch):
    def forgetful(documents, window=None, queries=slice(None), causal=False):
        return (documents != 0)[:, None, None, :].expand(-1, -1, documents.shape[1], -1)

    model, ids = lively(BertLabForMaskedLM(small(attn_implementation=kernel))), some_ids(1, L)
    restarted = document_position_ids(DOCUMENTS[:1])
    monkeypatch.setattr(bertlab.model.attention, "document_mask", forgetful)
    with pytest.raises(AssertionError, match="not close"):
        check_packed_equals_alone(model, ids, DOCUMENTS[:1], [ROWS["three_documents"]], restarted)


@pytest.mark.parametrize("kernel", TRAINING_KERNELS)
def test_a_batch_with_a_row_of_padding_only_has_no_nan_anywhere(kernel, varlen_anywhere):
    model = lively(BertLabForMaskedLM(small(attn_implementation=kernel))).train()
    labels = torch.where(DOCUMENTS > 0, some_ids(5, L), -100)
    out = model(some_ids(5, L), DOCUMENTS, labels=labels)
    out.loss.backward()
    assert out.logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_unpadded_layers_see_tokens_only(varlen_anywhere):
    model, seen = lively(BertLabForMaskedLM(small(attn_implementation="varlen"))), []
    model.encoder.blocks[1].mlp.register_forward_hook(
        lambda m, args, out: seen.append(args[0].shape)
    )
    out = model.encoder(some_ids(5, L), DOCUMENTS, output_hidden_states=True)
    assert seen == [(1, int((DOCUMENTS > 0).sum()), 16)]
    assert out.last_hidden_state.shape == (5, L, 16) and len(out.hidden_states) == 5
    assert all((x[DOCUMENTS == 0] == 0).all() for x in out.hidden_states)


def test_packed_documents_do_not_see_each_other():
    model, ids = lively(BertLabForMaskedLM(small())), some_ids(1, L)
    documents = DOCUMENTS[:1]
    changed = ids.clone()
    changed[0, 2] += 1  # in document 1, positions 0 to 4
    before, after = model(ids, documents).logits[0], model(changed, documents).logits[0]
    assert not torch.allclose(before[:5], after[:5], atol=1e-3)
    assert torch.equal(before[5:], after[5:])


def test_given_restarted_positions_equal_none():
    model, ids = lively(BertLabForMaskedLM(small())), some_ids(5, L)
    given_positions = model(ids, DOCUMENTS, document_position_ids(DOCUMENTS)).logits
    assert torch.equal(model(ids, DOCUMENTS).logits, given_positions)


def test_zero_one_mask_equals_rows_cut_to_their_length_on_either_side():
    model, ids = lively(BertLabForMaskedLM(small())), some_ids(2, L)
    mask = torch.ones(2, L, dtype=torch.long)
    mask[0, 9:], mask[1, :4] = 0, 0
    logits = model(ids, mask).logits
    torch.testing.assert_close(logits[0, :9], model(ids[:1, :9]).logits[0], **TOLERANCE)
    torch.testing.assert_close(logits[1, 4:], model(ids[1:, 4:]).logits[0], **TOLERANCE)
    torch.testing.assert_close(model(ids, mask.bool()).logits, logits)


@pytest.mark.parametrize("settings", [{}, dict(attention_positions="alibi"), dict(qk_norm=True)])
def test_bfloat16_autocast_stays_close_and_finite(settings, varlen_anywhere):
    model, ids = lively(BertLabForMaskedLM(small(**settings))), some_ids(5, L)
    exact = model(ids, DOCUMENTS).logits
    for kernel in TRAINING_KERNELS:
        model.config._attn_implementation = kernel
        with torch.autocast("cpu", torch.bfloat16):
            out = model(ids, DOCUMENTS, labels=ids)
        assert out.loss.dtype == torch.float32 and out.logits.isfinite().all()
        error = (out.logits.float() - exact)[DOCUMENTS > 0].abs().mean()
        assert error < 0.05 * exact[DOCUMENTS > 0].abs().mean()


@pytest.mark.parametrize(
    "kind", [BertLabForMaskedLM, BertLabForCausalLM, BertLabForEnhancedMaskedLM]
)
def test_a_post_norm_stream_may_be_as_precise_as_the_products(kind):
    "In float32 nothing changes; under autocast sums are made in bfloat16, and what the model says stays close."
    shape = dict(norm_position="post", embedding_dropout=0.0, hidden_dropout=0.0)
    ids, documents = torch.randint(50, (2, L)), torch.tensor([[1] * 5 + [2] * 7, [1] * 9 + [0] * 3])
    weights, found, types = lively(kind(small(**shape))).state_dict(), {}, {}
    for in_fp32, autocast in itertools.product((True, False), (True, False)):
        model = kind(small(**shape, residual_in_fp32=in_fp32)).eval()
        model.load_state_dict(weights)
        sums = types[in_fp32, autocast] = []
        for name, norm in model.named_modules():
            if "post_" in name:
                norm.register_forward_pre_hook(
                    lambda _, inputs, sums=sums: sums.append(inputs[0].dtype)
                )
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(ids, documents, labels=ids.masked_fill(documents == 0, -100))
        out.loss.backward()
        found[in_fp32, autocast] = torch.cat(
            [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        )
    f32, half = torch.float32, torch.bfloat16
    assert len(types[False, True]) == 8 + 2 * (kind is BertLabForEnhancedMaskedLM)
    # The embedding is in float32, so it enters the first sum.
    assert types[False, True][0] == f32 and set(types[False, True][1:]) == {half}
    assert set(types[False, False]) == set(types[True, False]) == {f32}
    assert torch.equal(found[False, False], found[True, False])
    far = {
        in_fp32: 1 - F.cosine_similarity(found[in_fp32, True], found[True, False], dim=0)
        for in_fp32 in (True, False)
    }
    assert 0 < far[True] < far[False] < 0.02  # one more rounding costs something, and little


def test_kernels_get_queries_keys_and_values_of_one_type_under_autocast(monkeypatch):
    types = []

    def look(q, k, v, scoring, dropout):
        types.append({q.dtype, k.dtype, v.dtype})
        return v

    monkeypatch.setitem(ATTENTION_KERNELS, "look", AttentionKernel(lambda pattern: None, look))
    model = lively(BertLabForMaskedLM(small(qk_norm=True)))
    for block in model.encoder.blocks:  # some devices run norms in float32
        for norm in (block.attention.q_norm, block.attention.k_norm):
            norm.register_forward_hook(lambda module, args, out: out.float())
    model.config._attn_implementation_internal = "look"
    with torch.autocast("cpu", torch.bfloat16):
        model(some_ids(1, L))
    assert types == [{torch.bfloat16}] * 4


# ---- what a forward pass takes and returns ---------------------------------------------------


def test_vectors_in_place_of_ids_give_the_same_scores_and_a_gradient():
    encoder = lively(BertLabModel(small(embedding_positions="learned", type_vocab_size=2)))
    ids, segments = some_ids(5, L), some_ids(5, L) % 2
    vectors = encoder.get_input_embeddings()(ids).detach().requires_grad_()
    got = encoder(inputs_embeds=vectors, attention_mask=DOCUMENTS, token_type_ids=segments)
    want = encoder(ids, DOCUMENTS, token_type_ids=segments).last_hidden_state
    assert torch.equal(got.last_hidden_state, want)
    got.last_hidden_state[0, 0].sum().backward()
    moved = vectors.grad.abs().amax(-1) > 0
    assert moved[0, :5].all() and not moved[0, 5:].any() and not moved[1:].any()


def test_hidden_states_are_what_enters_each_block_and_what_leaves_the_last():
    model = lively(BertLabModel(small()))
    ids, inputs = some_ids(2, L), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
    out = model(ids, DOCUMENTS[:2], output_hidden_states=True)
    assert len(out.hidden_states) == 5 and torch.equal(out.hidden_states[-1], out.last_hidden_state)
    assert all(torch.equal(a, b) for a, b in zip(out.hidden_states, inputs))
    assert model(ids).hidden_states is None
    model.config.output_hidden_states = True
    assert (
        len(model(ids).hidden_states) == 5
        and model(ids, output_hidden_states=False).hidden_states is None
    )


@pytest.mark.parametrize("kernel", ["eager", "auto"])
def test_attention_weights_are_shares_inside_documents_and_windows(kernel):
    model = lively(BertLabModel(small(attn_implementation=kernel, num_key_value_heads=1)))
    out = model(some_ids(5, L), DOCUMENTS, output_attentions=True)
    assert [tuple(w.shape) for w in out.attentions] == [(5, 2, L, L)] * 4
    same = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None]) & (DOCUMENTS > 0)[:, None]
    near = (torch.arange(L)[:, None] - torch.arange(L)).abs() <= 2
    for weights, kind in zip(out.attentions, model.config.layer_types):
        real = weights.transpose(1, 2)[DOCUMENTS > 0]  # (tokens, H, L)
        seen = (same if kind == "full_attention" else same & near)[DOCUMENTS > 0]
        torch.testing.assert_close(real.sum(-1), torch.ones(real.shape[:2]))
        assert (real.amin(1)[seen] > 0).all() and (real.amax(1)[~seen] == 0).all()
    torch.testing.assert_close(
        out.last_hidden_state, model(some_ids(5, L), DOCUMENTS).last_hidden_state
    )


def test_attention_weights_of_a_fused_kernel_are_refused_with_the_way_out():
    model = BertLabModel(small(attn_implementation="sdpa"))
    with pytest.raises(ValueError, match="output_attentions.*attn_implementation='eager'"):
        model(some_ids(1, 4), output_attentions=True)


@pytest.mark.parametrize("kernel", TRAINING_KERNELS)
def test_gradient_checkpointing_changes_no_gradient_and_runs_blocks_twice(kernel, varlen_anywhere):
    model, ids = (
        lively(BertLabForMaskedLM(small(attn_implementation=kernel))).train(),
        some_ids(5, L),
    )
    runs, gradients = [], []
    model.encoder.blocks[2].mlp.register_forward_pre_hook(lambda *args: runs.append(1))
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, DOCUMENTS, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert len(runs) == 3
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


# ---- which kernel ----------------------------------------------------------------------------


def test_every_kernel_can_be_chosen_later_and_the_bare_encoder_obeys():
    for model in (BertLabModel(small()), BertLabForMaskedLM(small()).encoder):
        for name in ("eager", "auto", "flex", "varlen", "flex_attention", "sdpa"):
            model.set_attn_implementation(name)
            assert model.config._attn_implementation == name
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        assert model.attention_kernel(torch.device("cpu"), L)[0] == "flex"


def test_auto_says_what_it_picked_once_and_follows_autocast(caplog):
    model, ids = BertLabForMaskedLM(small(attn_implementation="auto")), some_ids(1, L)
    caplog.set_level(logging.INFO, "bertlab.model.encoder")
    model(ids), model(ids)
    assert [r.message for r in caplog.records] == [
        "attention kernel sdpa (exact and fused on every device)"
    ]
    with torch.autocast("cpu", torch.bfloat16):
        model(ids)
        name, reason = model.encoder.attention_kernel(torch.device("cpu"), L)
    assert name == "eager" and "bfloat16" in reason
    assert len(caplog.records) == 2 and "eager" in caplog.records[1].message
    BertLabModel(small())(ids)
    assert len(caplog.records) == 2  # who asks for nothing special is told nothing


@pytest.mark.parametrize("share", [dict(sequence_shard=object()), dict(local_heads=slice(0, 1))])
def test_processes_that_share_a_model_take_the_kernel_that_was_tried_there(share, monkeypatch):
    monkeypatch.setattr("bertlab.model.encoder.device_capability", lambda device: (9, 0))
    config = small(hidden_size=64, num_attention_heads=2, attn_implementation="auto")
    model, gpu = BertLabModel(config).bfloat16(), torch.device("cuda")
    assert model.attention_kernel(gpu, 512)[0] in ("varlen", "flex")
    model.__dict__.update(share)
    assert model.attention_kernel(gpu, 512)[0] == "sdpa"


def test_on_a_cpu_the_kernel_that_nobody_asked_for_is_the_one_that_trains_faster():
    cpu, model = torch.device("cpu"), BertLabForMaskedLM(small(attention_dropout=0.1)).train()
    assert model.config._attn_implementation == "sdpa"  # by transformers
    choose = model.encoder.attention_kernel
    assert choose(cpu, L)[0] == "eager"
    model.eval()
    assert choose(cpu, L)[0] == "sdpa"
    with torch.autocast("cpu", torch.bfloat16):
        assert choose(cpu, L)[0] == "eager" and choose(cpu, 4096)[0] == "sdpa"
        with torch.no_grad():
            assert choose(cpu, L)[0] == "sdpa"  # twice as fast without a backward pass
    assert choose(torch.device("mps"), L)[0] == "sdpa"
    with pytest.raises(ValueError, match="never stores the weights"):
        model(some_ids(1, L), output_attentions=True)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(attn_implementation="varlen"), "varlen.*CUDA.*'eager' or 'sdpa'"),
        (dict(attn_implementation="flex"), "flex.*backward.*no_grad"),
        (dict(attn_implementation="flex", attention_dropout=0.1), "attention_dropout 0.1"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused_at_the_call(settings, message):
    model = BertLabForMaskedLM(small(**settings)).train()
    with pytest.raises(ValueError, match=message):
        model(some_ids(1, 4))


def test_dropout_bars_flex_only_while_training():
    model = BertLabForMaskedLM(small(attn_implementation="flex", attention_dropout=0.1)).eval()
    with torch.no_grad():
        assert model(some_ids(1, 4)).logits.isfinite().all()


def test_a_model_of_others_refuses_our_kernels_in_words():
    config = ModernBertConfig(
        vocab_size=50, hidden_size=16, intermediate_size=20, num_attention_heads=2, num_hidden_layers=1,
        pad_token_id=0, cls_token_id=0, sep_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs = ModernBertForMaskedLM._from_config(config, attn_implementation="varlen")
    with pytest.raises(ValueError, match="no bertlab model.*'sdpa'"):
        theirs(some_ids(1, 4))


# ---- the head (contracts 4 and 5) ------------------------------------------------------------


def labelled():
    "Ids, labels at five places of each row, and seven positions: two of them are spare."
    ids, labels = some_ids(2, L), torch.full((2, L), -100)
    positions = torch.tensor([[0, 2, 3, 7, 11, 1, 1], [1, 4, 5, 6, 10, 0, 0]])
    rows = torch.arange(2)[:, None]
    labels[rows, positions[:, :5]] = ids[rows, positions[:, :5]]
    return ids, labels, positions


def test_head_at_label_positions_equals_the_dense_head_in_loss_and_gradient():
    model = lively(BertLabForMaskedLM(small()))
    ids, labels, positions = labelled()
    dense = model(ids, labels=labels)
    dense.loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    sparse = model(ids, labels=labels, label_positions=positions)
    sparse.loss.backward()
    assert sparse.logits.shape == (2, 7, 50)  # as many as there are positions, not labels
    torch.testing.assert_close(sparse.loss, dense.loss, **TOLERANCE)
    torch.testing.assert_close(sparse.logits, gather_rows(dense.logits, positions), **TOLERANCE)
    for p, want in zip(model.parameters(), gradients):
        torch.testing.assert_close(p.grad, want, **TOLERANCE)


@pytest.mark.parametrize("kernel", ["sdpa", "varlen"])
def test_a_batch_of_padding_alone_has_a_loss_of_0_at_label_positions_too(kernel, varlen_anywhere):
    model = lively(BertLabForMaskedLM(small(attn_implementation=kernel)))
    asked = dict(attention_mask=torch.zeros(2, L, dtype=torch.long), labels=torch.full((2, L), -100),
                 label_positions=torch.zeros(2, 3, dtype=torch.long))  # fmt: skip
    found = model(some_ids(2, L), **asked)
    found.loss.backward()
    assert found.loss == 0 and found.logits.shape == (2, 3, 50) and found.logits.isfinite().all()


def gather_rows(values, positions):
    return torch.stack([value[where] for value, where in zip(values, positions)])


def test_gather_positions_equals_indexing_row_by_row():
    _, labels, positions = labelled()
    x = torch.randn(2, L, 3)
    assert torch.equal(gather_positions(labels, positions), gather_rows(labels, positions))
    assert torch.equal(gather_positions(x, positions), gather_rows(x, positions))


def test_loss_is_a_sum_and_a_count_by_hand():
    logits = torch.tensor([[[0.0, 0.0], [1.0, -1.0]], [[5.0, 0.0], [9.0, 9.0]]])
    loss_sum, count = masked_lm_loss(logits, torch.tensor([[0, 1], [-100, -100]]))
    want = torch.log(torch.tensor(2.0)) + torch.log1p(torch.exp(torch.tensor(2.0)))
    assert count == 2
    torch.testing.assert_close(loss_sum, want)


def test_mean_loss_of_the_model_counts_labels_and_not_rows():
    model, (ids, labels, _) = lively(BertLabForMaskedLM(small())), labelled()
    labels[0, 3:] = -100
    out = model(ids, labels=labels)
    want = F.cross_entropy(out.logits[labels != -100], labels[labels != -100])
    torch.testing.assert_close(out.loss, want)


def test_no_label_at_all_gives_zero_and_a_gradient_of_zero():
    model, ids = lively(BertLabForMaskedLM(small())), some_ids(2, L)
    none = torch.full((2, L), -100)
    loss_sum, count = masked_lm_loss(model(ids).logits, none)
    assert (loss_sum, count) == (0, 0)
    loss = model(ids, labels=none).loss
    loss.backward()
    assert loss == 0 and all((p.grad == 0).all() for p in model.parameters())
    assert mean_loss(loss_sum, count) == 0


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.zeros(70_000, 2, dtype=torch.bfloat16)  # ln 2 each; bfloat16 stops at 256
    loss_sum, count = masked_lm_loss(logits, torch.zeros(70_000, dtype=torch.long))
    assert loss_sum.dtype == torch.float32 and count == 70_000
    assert abs(float(loss_sum) / 70_000 - 0.693147) < 1e-4


# ---- at home in transformers -----------------------------------------------------------------


def test_tied_decoder_follows_the_embedding_even_when_its_object_is_replaced():
    model, ids = lively(BertLabForMaskedLM(small())), some_ids(1, L)
    assert not any("decoder" in name for name, _ in model.named_parameters())
    x = model.encoder(ids).last_hidden_state
    table = model.get_input_embeddings()
    table.weight = torch.nn.Parameter(table.weight.detach() * 2)  # as a move to XLA does
    h = model.head.norm(F.gelu(model.head.dense(x)))
    want = h @ table.weight.T + model.head.bias
    torch.testing.assert_close(model.head(x, model.get_input_embeddings().weight), want)
    torch.testing.assert_close(
        model(ids).logits[..., 0], (model.head.norm(F.gelu(model.head.dense(
            model.encoder(ids).last_hidden_state))) @ table.weight[0]) + model.head.bias[0]
    )  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_saving_and_loading_loses_nothing(tmp_path, tied):
    config = small(tie_word_embeddings=tied, mask_token_id=4, local_rope_theta=500.0)
    model, ids = lively(BertLabForMaskedLM(config)), some_ids(1, L)
    model.save_pretrained(tmp_path)
    again = BertLabForMaskedLM.from_pretrained(tmp_path)
    auto = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(auto) is BertLabForMaskedLM
    for loaded in (again, auto):
        assert loaded.config.to_diff_dict() == model.config.to_diff_dict() | {
            k: loaded.config.to_diff_dict()[k] for k in ("architectures", "dtype")
        }
        assert loaded.state_dict().keys() == model.state_dict().keys()
        assert all(
            torch.equal(a, b)
            for a, b in zip(loaded.state_dict().values(), model.state_dict().values())
        )
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_encoder_alone_loads_from_the_directory_of_a_whole_model(tmp_path):
    model, ids = lively(BertLabForMaskedLM(small())), some_ids(1, L)
    model.save_pretrained(tmp_path)
    encoder = BertLabModel.from_pretrained(tmp_path)
    assert torch.equal(encoder(ids).last_hidden_state, model.encoder(ids).last_hidden_state)


def test_state_dict_loads_strictly_into_a_fresh_model():
    model, ids = lively(BertLabForMaskedLM(small())), some_ids(1, L)
    other = BertLabForMaskedLM(small()).eval()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(other(ids).logits, model(ids).logits)


def test_output_of_a_tokenizer_is_accepted_and_a_tuple_can_be_asked_for():
    model = lively(BertLabForMaskedLM(small()))
    batch = {"input_ids": some_ids(1, 4), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    logits = model(**batch, token_type_ids=torch.zeros(1, 4, dtype=torch.long)).logits
    assert torch.equal(logits, model(**batch, return_dict=False)[0])


@pytest.mark.parametrize("tied", [True, False])
def test_more_and_fewer_token_embeddings_leave_the_old_scores_alone(tied):
    model, ids = lively(BertLabForMaskedLM(small(tie_word_embeddings=tied))), some_ids(1, L)
    before = model(ids).logits
    model.resize_token_embeddings(60)
    grown = model(ids).logits
    assert grown.shape[-1] == 60 and model.config.vocab_size == 60
    torch.testing.assert_close(grown[..., :50], before)
    model.resize_token_embeddings(50)
    torch.testing.assert_close(model(ids).logits, before)


def test_auto_class_finds_the_model_in_a_fresh_process_that_imported_heads(tmp_path):
    BertLabForMaskedLM(small()).save_pretrained(tmp_path)
    code = (
        "import sys, bertlab.model.heads; from transformers import AutoModelForMaskedLM as A; "
        "print(type(A.from_pretrained(sys.argv[1])).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert done.stdout.strip() == "BertLabForMaskedLM", done.stderr


@pytest.mark.parametrize(
    "positions, kernel",
    [("rope", "sdpa"), ("rope", "eager"), ("rope", "auto"), ("alibi", "sdpa"), ("learned", "eager"),
     ("learned_and_rope", "auto")],
)  # fmt: skip
def test_whole_graph_is_traced_without_a_break_and_not_again_for_other_documents(positions, kernel):
    model = lively(BertLabForMaskedLM(small(attn_implementation=kernel, **POSITIONS[positions])))
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    ids, labels, positions = labelled()
    for documents in (DOCUMENTS[:2], DOCUMENTS[2:4], DOCUMENTS[3:]):
        want = model(ids, documents, labels=labels, label_positions=positions).loss
        got = compiled(ids, documents, labels=labels, label_positions=positions).loss
        torch.testing.assert_close(got, want)
    assert counter.frame_count == 1


def test_flex_is_traced_into_the_same_graph():
    model, ids = lively(BertLabForMaskedLM(small(attn_implementation="flex"))), some_ids(2, L)
    torch._dynamo.reset()
    counter = CompileCounter()
    whole = Version(torch.__version__) >= Version(
        "2.11"
    )  # torch 2.9 breaks the graph where the blocks are written
    compiled = torch.compile(model, backend=counter, fullgraph=whole)
    with torch.no_grad():
        for documents in (DOCUMENTS[:2], DOCUMENTS[2:4]):
            torch.testing.assert_close(
                compiled(ids, documents).logits, model(ids, documents).logits
            )
    assert counter.frame_count == 1 or not whole


def test_weights_are_saved_as_safetensors(tmp_path):
    BertLabModel(small()).save_pretrained(tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("initialization", ["megatron", "xavier"])
@pytest.mark.parametrize("mlp", ["glu", "plain"])
def test_deepnorm_begins_values_outputs_and_mlps_smaller_and_queries_keys_and_gates_not(
    mlp, initialization
):
    shape = dict(vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, mlp=mlp, norm_position="post", output_gate="element")  # fmt: skip
    torch.manual_seed(0)
    deep = BertLabForMaskedLM(BertLabConfig(**shape, norm="deep", initialization=initialization))
    base = (
        "truncated_normal" if initialization == "megatron" else initialization
    )  # nothing is shrunk twice
    plain = BertLabForMaskedLM(BertLabConfig(**shape, initialization=base))
    ratio = lambda part: (part(deep).std() / part(plain).std()).item()
    block = lambda model: model.encoder.blocks[1]
    smaller = {
        "values": lambda m: block(m).attention.qkv.weight[-32:],
        "output": lambda m: block(m).attention.out_proj.weight,
        "expand": lambda m: block(m).mlp.up_proj.weight[:96],
        "contract": lambda m: block(m).mlp.down_proj.weight,
    }
    alike = {
        "queries and keys": lambda m: block(m).attention.qkv.weight[:-32],
        "gate": lambda m: block(m).attention.gate.weight,
        "tokens": lambda m: m.get_input_embeddings().weight,
    }
    if mlp == "glu":
        alike["gate of the MLP"] = lambda m: block(m).mlp.up_proj.weight[96:]
    if initialization == "xavier":
        alike["dense of the head"] = lambda m: m.head.dense.weight
    assert {name: ratio(part) for name, part in smaller.items()} == pytest.approx(
        dict.fromkeys(smaller, 0.5), rel=0.06
    )
    assert {name: ratio(part) for name, part in alike.items()} == pytest.approx(
        dict.fromkeys(alike, 1.0), rel=0.06
    )


@pytest.mark.parametrize("initialization", ["megatron", "xavier"])
def test_what_a_checkpoint_brings_is_not_begun_again_where_its_neighbour_is_missing(
    tmp_path, initialization
):
    settings = dict(
        norm="deep", norm_position="post", attention_bias=True, initialization=initialization
    )
    encoder = lively(BertLabModel(small(**settings)))
    state = {
        k: v
        for k, v in encoder.state_dict().items()
        if not k.endswith(("out_proj.bias", "qkv.bias"))
    }
    encoder.save_pretrained(tmp_path, state_dict=state)
    again = BertLabModel.from_pretrained(tmp_path)
    for part in ("out_proj", "qkv"):
        theirs, ours = (getattr(model.blocks[1].attention, part) for model in (encoder, again))
        assert torch.equal(ours.weight, theirs.weight) and (ours.bias == 0).all()


@pytest.mark.parametrize(
    "key_heads, gate, mlp", [(8, "none", "glu"), (2, "element", "glu"), (2, "head", "plain")]
)
def test_xavier_begins_each_map_of_a_fused_matrix_by_its_own_fans(key_heads, gate, mlp):
    D, I, keys = 128, 320, 16 * key_heads
    config = small(hidden_size=D, intermediate_size=I, num_attention_heads=8, num_key_value_heads=key_heads, mlp=mlp,
                   output_gate=gate, initialization="xavier", num_hidden_layers=2)  # fmt: skip
    block = BertLabModel(config).blocks[1]
    q, k, v = block.attention.qkv.weight.split((D, keys, keys))
    maps = {
        "queries": q,
        "keys": k,
        "values": v,
        "out": block.attention.out_proj.weight,
        "contract": block.mlp.down_proj.weight,
    }
    maps |= {f"expand {i}": part for i, part in enumerate(block.mlp.up_proj.weight.split(I))}
    maps |= {} if gate == "none" else {"gate": block.attention.gate.weight}
    for name, part in maps.items():
        # The standard error of a width is 1 / sqrt(2 n) of it: 1.1 % for 4,096 numbers, 2.2 % for the 1,024 of a gate.
        assert part.std().item() == pytest.approx((2 / sum(part.shape)) ** 0.5, rel=0.09), name


@pytest.mark.parametrize("norm", ["layer", "deep"])
@pytest.mark.parametrize("initialization", ["megatron", "truncated_normal", "kaiming", "xavier"])
def test_maps_in_one_matrix_change_the_start_of_xavier_alone(monkeypatch, initialization, norm):
    config = small(
        norm=norm,
        norm_position="post",
        num_key_value_heads=1,
        output_gate="head",
        initialization=initialization,
    )

    def start():
        torch.manual_seed(0)
        return {**BertLabForMaskedLM(config).state_dict(), "next": torch.rand(3)}

    begin, now = bertlab.model.encoder.init_linear_, start()
    monkeypatch.setattr(
        bertlab.model.encoder,
        "init_linear_",
        lambda weight, c, narrow, parts: begin(weight, c, narrow),
    )
    differ = {name for name, weight in start().items() if not torch.equal(weight, now[name])}
    if initialization != "xavier":
        assert not differ
    else:
        assert {
            "encoder.blocks.0.attention.qkv.weight",
            "encoder.blocks.0.mlp.up_proj.weight",
        } <= differ


# ---- counts ----------------------------------------------------------------------------------


shapes = st.fixed_dictionaries(
    dict(
        vocab_size=st.integers(1, 60),
        num_attention_heads=st.integers(1, 4),
        head_dim=st.integers(1, 4),
        intermediate_size=st.integers(1, 30),
        num_hidden_layers=st.integers(1, 5),
        global_attention_every_n_layers=st.integers(1, 5),
        tie_word_embeddings=st.booleans(),
    )
)


@given(shapes)
@settings(max_examples=40, deadline=None)
def test_predicted_number_of_weights_equals_the_built_model(shape):
    shape["hidden_size"] = shape["num_attention_heads"] * 2 * shape.pop("head_dim")
    config = BertLabConfig(**shape)
    model = BertLabForMaskedLM(config)
    assert config.num_params() == sum(p.numel() for p in model.parameters())
    ids = torch.zeros(1, 3, dtype=torch.long)
    assert model(ids).logits.shape == (1, 3, config.vocab_size)


def test_base_preset_counts_as_many_weights_as_transformers_builds():
    with torch.device("meta"):
        theirs = ModernBertForMaskedLM(ModernBertConfig())
    assert modernbert_base().num_params() == sum(p.numel() for p in theirs.parameters())


def test_parts_of_the_count_are_the_parts_of_the_model():
    config = small(tie_word_embeddings=False)
    built = dict.fromkeys(count_parameters(config), 0)
    for name, p in BertLabForMaskedLM(config).named_parameters():
        key = "norms" if "norm" in name else "embedding" if "tokens" in name else "head"
        key = "attention" if ".attention." in name else "MLP" if ".mlp." in name else key
        built[key] += p.numel()
    assert count_parameters(config) == built


def test_flops_equal_what_torch_counts_for_one_document_and_a_dense_head():
    from torch.utils.flop_counter import FlopCounterMode

    config = small(attn_implementation="eager", global_attention_every_n_layers=1)
    model = BertLabForMaskedLM(config)
    with FlopCounterMode(display=False) as counter:
        model(some_ids(2, L), labels=some_ids(2, L)).loss.backward()
    got = counter.get_total_flops() / (2 * L)
    assert got == pytest.approx(config.flops_per_token(mean_context=L, label_rate=1.0))


def test_flops_equal_what_torch_counts_where_few_are_predicted():
    from torch.utils.flop_counter import FlopCounterMode

    config = small(attn_implementation="eager", global_attention_every_n_layers=1)
    model, places = BertLabForMaskedLM(config), torch.arange(0, L, 4).expand(2, -1)
    with FlopCounterMode(display=False) as counter:
        model(some_ids(2, L), labels=some_ids(2, L), label_positions=places).loss.backward()
    got = counter.get_total_flops() / (2 * L)
    assert got == pytest.approx(config.flops_per_token(mean_context=L, label_rate=1 / 4))


def test_windows_and_rare_labels_make_a_token_cheaper():
    config = small()  # windows of 2 to each side: 5 tokens
    dense, sparse = (
        training_flops_per_token(config, 100, 1.0),
        training_flops_per_token(config, 100, 0.25),
    )
    spared = 6 * 0.75 * (16 * 16 + matmul_parameters(config)["MLP"])  # of the last layer
    assert sum(dense.values()) - sum(sparse.values()) == pytest.approx(
        spared + 0.75 * dense["head"]
    )
    assert dense["scores"] == 12 * 16 * (100 + 5 + 5 + 100)
    assert sparse["head"] == dense["head"] / 4
    assert training_flops_per_token(config, 3, 1.0)["scores"] == 12 * 16 * 3 * 4


# ---- what is wanted alone ----------------------------------------------------------------------


WANTED = torch.tensor(
    [[0, 3, 8, 11], [2, 4, 5, 9], [1, 0, 11, 7]]
)  # of a row some at padding, maybe


@pytest.mark.parametrize("kernel", TRAINING_KERNELS)
@pytest.mark.parametrize(
    "settings",
    [{}, dict(norm_position="post"), dict(norm="deep", norm_position="post"), dict(output_gate="head"),
     dict(num_hidden_layers=1), dict(attention_positions="alibi"), dict(norm_position="pre_and_post")],
    ids=str,
)  # fmt: skip
def test_wanted_vectors_and_their_gradients_are_those_of_the_whole(
    settings, kernel, varlen_anywhere
):
    model = lively(BertLabModel(small(attn_implementation=kernel, **settings))).double()
    ids, real = some_ids(*DOCUMENTS.shape), DOCUMENTS.gather(1, WANTED[: len(DOCUMENTS)]) != 0
    wanted = WANTED[: len(DOCUMENTS)]
    found = []
    for fewer in (None, wanted):
        x = model(ids, DOCUMENTS, output_positions=fewer).last_hidden_state
        x = gather_rows(x, wanted) if fewer is None else x
        assert x.shape == (*wanted.shape, 16) and x.isfinite().all()
        model.zero_grad()
        (x[real] * torch.arange(16)).sum().backward()
        found.append((x[real].detach(), [p.grad.clone() for p in model.parameters()]))
    off = 1e-5 if kernel == "eager" else 1e-9  # its shares are made in float32
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=off, atol=off)


def test_the_last_block_works_for_what_is_wanted_alone():
    model, seen = BertLabModel(small()), []
    for block in model.blocks:
        block.mlp.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[1]))
    model(some_ids(3, L), output_positions=WANTED)
    assert seen == [L, L, L, 4]


def test_whoever_reads_states_gets_all_of_them():
    model = lively(BertLabModel(small(attn_implementation="eager"))).eval()
    ids = some_ids(3, L)
    whole = model(ids, output_hidden_states=True, output_attentions=True)
    fewer = model(ids, output_hidden_states=True, output_attentions=True, output_positions=WANTED)
    torch.testing.assert_close(
        fewer.last_hidden_state, gather_rows(whole.last_hidden_state, WANTED)
    )
    torch.testing.assert_close(fewer.hidden_states, whole.hidden_states)
    torch.testing.assert_close(fewer.attentions, whole.attentions)
    alone = model(ids, output_attentions=True, output_positions=WANTED)
    torch.testing.assert_close(alone.attentions, whole.attentions)


def test_wanting_everything_in_another_order_is_answered_in_that_order():
    model, ids = lively(BertLabModel(small())).eval(), some_ids(2, L)
    backwards = torch.arange(L).flip(0).expand(2, -1)
    found = model(ids, output_positions=backwards).last_hidden_state
    torch.testing.assert_close(found, model(ids).last_hidden_state.flip(1))


def test_checkpointed_blocks_know_what_is_wanted():
    model, ids = lively(BertLabModel(small())).train(), some_ids(3, L)
    plain = model(ids, output_positions=WANTED).last_hidden_state
    model.gradient_checkpointing_enable()
    again = model(ids, output_positions=WANTED).last_hidden_state
    torch.testing.assert_close(again, plain)


# ---- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting, message",
    [
        (dict(hidden_size=100, num_attention_heads=3), "hidden_size 100.*3 heads.*fit"),
        (dict(hidden_size=15, num_attention_heads=3), "even"),
        (dict(hidden_size=15, num_attention_heads=2), "make hidden_size even"),
        (dict(hidden_size=-16), "hidden_size.*-16"),
        (dict(hidden_size="16"), "hidden_size.*'16'"),
        (dict(num_hidden_layers=True), "num_hidden_layers"),
        (dict(num_hidden_layers=0), "num_hidden_layers"),
        (dict(vocab_size=0), "vocab_size"),
        (dict(local_attention=1), "local_attention.*2 or more"),
        (dict(local_attention=-4), "local_attention"),
        (dict(global_attention_every_n_layers=0), "global_attention_every_n_layers"),
        (dict(max_position_embeddings=0), "max_position_embeddings"),
        (dict(norm_eps=0.0), "norm_eps"),
        (dict(initializer_range=float("nan")), "initializer_range"),
        (dict(local_rope_theta=-1.0), "local_rope_theta"),
        (dict(mlp_dropout=1.0), "mlp_dropout.*share"),
        (dict(attention_dropout=-0.1), "attention_dropout"),
        (dict(tie_word_embeddings="no"), "tie_word_embeddings"),
        (dict(hidden_activation="gelo"), "gelo.*gelu, gelu_pytorch_tanh, .*relu, .*silu"),
        (dict(mask_token_id=50), "mask_token_id.*49.*50"),
        (dict(hiden_size=16), "hiden_size.*hidden_size"),
        (dict(rotary=True), "rotary"),
    ],
)
def test_configuration_that_cannot_be_built_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        small(**setting)


def test_configuration_changed_after_it_was_built_is_checked_by_the_model():
    config = small()
    config.num_attention_heads = 3
    with pytest.raises(ValueError, match="3 heads"):
        BertLabForMaskedLM(config)


def test_two_configurations_that_differ_are_not_equal_and_survive_json():
    assert small() == small() and small() != small(local_attention=8)
    again = BertLabConfig.from_dict(json.loads(small(norm_eps=1e-4).to_json_string()))
    assert again.to_diff_dict() == small(norm_eps=1e-4).to_diff_dict()


@pytest.mark.parametrize(
    "ids, mask, message",
    [
        ((4,), None, r"input_ids.*\(B, L\)"),
        ((1, 513), None, "513.*max_position_embeddings.*512"),
        ((1, 4), (1, 5), "attention_mask.*1, 4.*1, 5"),
        ((1, 4), (1, 4, 4), "attention_mask"),
    ],
)
def test_inputs_of_a_wrong_shape_are_refused(ids, mask, message):
    model = BertLabForMaskedLM(small())
    with pytest.raises(ValueError, match=message):
        model(some_ids(*ids), None if mask is None else torch.ones(mask, dtype=torch.long))


def test_other_inputs_of_a_wrong_shape_are_refused_by_name():
    model, ids = BertLabModel(small()), some_ids(2, 4)
    vectors = torch.zeros(2, 4, 16)
    for arguments, message in [
        (dict(input_ids=ids, position_ids=torch.zeros(2, 5)), "position_ids.*2, 4.*2, 5"),
        (dict(input_ids=ids, position_ids=torch.zeros(4)), "position_ids.*restart"),
        (dict(input_ids=ids, token_type_ids=ids[:, :3]), "token_type_ids.*2, 4.*2, 3"),
        (dict(input_ids=ids, inputs_embeds=vectors), "either input_ids or inputs_embeds"),
        (dict(), "either input_ids or inputs_embeds"),
        (dict(inputs_embeds=vectors[..., :8]), "inputs_embeds.*hidden_size 16.*2, 4, 8"),
        (dict(inputs_embeds=vectors[0]), "inputs_embeds.*4, 16"),
        (dict(input_ids=vectors[0]), "input_ids.*integers.*float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(**arguments)
    assert model(ids, position_ids=torch.arange(4)[None]).last_hidden_state.shape == (2, 4, 16)


def test_rows_beyond_a_learned_table_are_refused_with_another_way_out():
    with pytest.raises(ValueError, match="max_position_embeddings 512.*longer table.*learned"):
        BertLabModel(bert_tiny(vocab_size=50))(some_ids(1, 513))


def test_configuration_module_does_not_import_models():
    code = "import sys, bertlab.model.config; print('transformers.modeling_utils' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("asked", ["sdpa", "auto", "eager"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_first_pass_without_gradients_drops_what_the_second_drops(asked, autocast):
    "Gradient caching and reentrant checkpoints compute a pass under no_grad and then again."
    model = BertLabModel(small(attention_dropout=0.3, attn_implementation=asked)).train()
    ids = torch.arange(5, 35).view(2, 15)
    passes = []
    for gradients in (False, True):
        torch.manual_seed(1)
        with (
            torch.set_grad_enabled(gradients),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            passes.append(model(input_ids=ids).last_hidden_state.detach())
    assert torch.equal(*passes)
