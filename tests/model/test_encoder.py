"The encoder and its masked-LM head: shapes, packed documents, losses, counts, refusals."

import itertools
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM

import model_cases
from model_cases import lively, same_start_for_every_test  # noqa: F401

from bertlab.model.attention import (
    ATTENTION_KERNELS,
    AttentionKernel,
    AttentionMaskSpec,
    attend,
    document_position_ids,
    make_varlen_metadata,
)
from bertlab.model.config import (
    BertLabConfig,
    training_flops_per_token,
    matmul_parameters,
)
from bertlab.model.encoder import BertLabModel
from bertlab.model.heads import BertLabForMaskedLM

small = partial(model_cases.small, num_hidden_layers=4)  # global, local, local, global
TOLERANCE = dict(rtol=0, atol=1e-5)
L = 12


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


# ---- packed = alone (contract 3) -------------------------------------------------------------


def one_by_one(q, k, v, metadata, dropout):
    "The variable-length kernel needs CUDA; this one runs each document of its row by itself."
    parts = []
    for a, b in itertools.pairwise(metadata.cu_lengths.tolist()):
        alone = AttentionMaskSpec(torch.ones(1, b - a), metadata.window, metadata.slopes_H)
        parts.append(attend(*(t[:, :, a:b] for t in (q, k, v)), alone, "eager", dropout))
    return torch.cat(parts, 2) if parts else q


@pytest.fixture
def varlen_anywhere(monkeypatch):
    monkeypatch.setitem(
        ATTENTION_KERNELS, "varlen", AttentionKernel(make_varlen_metadata, one_by_one, unpads=True)
    )


TRAINING_KERNELS = ["eager", "sdpa", "varlen"]  # flex trains on CUDA only


def logits_and_gradients(model, ids, documents, weights, positions=None):
    "Return logits and the gradient of their weighted sum."
    model.zero_grad()
    logits = model(ids, documents, positions).logits
    (logits * weights).sum().backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return logits.detach(), gradients


def check_packed_equals_alone(model, ids, documents, lengths, positions=None):
    "Compare rows of packed documents with the documents run one by one: logits and gradients."
    weights = torch.randn(*ids.shape, 50, generator=torch.Generator().manual_seed(1)) / L
    weights = weights * (documents > 0)[..., None]
    packed, gradients = logits_and_gradients(model, ids, documents, weights, positions)
    assert packed.isfinite().all()
    sums = [torch.zeros_like(g) for g in gradients]
    for row, numbers in enumerate(lengths):
        for end, n in zip(itertools.accumulate(numbers), numbers):
            at = slice(row, row + 1), slice(end - n, end)
            alone, alone_gradients = logits_and_gradients(model, ids[at], None, weights[at])
            torch.testing.assert_close(packed[at], alone, **TOLERANCE)
            sums = [a + g for a, g in zip(sums, alone_gradients)]
    for got, want in zip(gradients, sums):  # over all tokens: some are larger than 1
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


POSITIONS = {  # and with each, something else that could let documents meet
    "rope": {},
    "rope_without_windows": dict(global_attention_every_n_layers=1),
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
def test_without_the_document_mask_the_comparison_fails(kernel, varlen_anywhere):
    model = lively(BertLabForMaskedLM(small(attn_implementation=kernel)))
    positions, one_document = document_position_ids(DOCUMENTS[:1]), torch.ones_like(DOCUMENTS[:1])
    with pytest.raises(AssertionError, match="not close"):
        lengths = [ROWS["three_documents"]]
        check_packed_equals_alone(model, some_ids(1, L), one_document, lengths, positions)


@pytest.mark.parametrize("kernel", TRAINING_KERNELS)
def test_a_batch_with_a_row_of_padding_only_has_no_nan_anywhere(kernel, varlen_anywhere):
    model = lively(BertLabForMaskedLM(small(attn_implementation=kernel))).train()
    labels = torch.where(DOCUMENTS > 0, some_ids(5, L), -100)
    out = model(some_ids(5, L), DOCUMENTS, labels=labels)
    out.loss.backward()
    assert out.logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_unpadded_layers_see_tokens_only(varlen_anywhere):
    model, shapes = lively(BertLabForMaskedLM(small(attn_implementation="varlen"))), []
    model.encoder.blocks[1].mlp.register_forward_hook(
        lambda module, inputs, output: shapes.append(inputs[0].shape)
    )
    out = model.encoder(some_ids(5, L), DOCUMENTS, output_hidden_states=True)
    assert shapes == [(1, int((DOCUMENTS > 0).sum()), 16)]
    assert out.last_hidden_state.shape == (5, L, 16) and len(out.hidden_states) == 5
    assert all((x[DOCUMENTS == 0] == 0).all() for x in out.hidden_states)


@pytest.mark.parametrize("settings", [{}, dict(attention_positions="alibi", qk_norm=True)])
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


@pytest.mark.parametrize("in_fp32, dtype", [(True, torch.float32), (False, torch.bfloat16)])
def test_a_post_norm_stream_may_have_the_precision_of_products(in_fp32, dtype):
    shape = dict(norm_position="post", embedding_dropout=0.0, hidden_dropout=0.0)
    model, dtypes = BertLabForMaskedLM(small(**shape, residual_in_fp32=in_fp32)).eval(), []
    for block in model.encoder.blocks[1:]:  # the embedding is in float32
        hook = lambda module, inputs: dtypes.append(inputs[0].dtype)
        block.post_mlp_norm.register_forward_pre_hook(hook)
    exact = model(some_ids(2, L)).logits
    assert {*dtypes} == {torch.float32}
    dtypes.clear()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(some_ids(2, L)).logits.float()
    assert {*dtypes} == {dtype}
    assert (rounded - exact).abs().mean() < 0.1 * exact.abs().mean()


# ---- what a forward pass takes and returns ---------------------------------------------------


def test_inputs_embeds_give_the_same_scores_and_a_gradient():
    encoder = lively(BertLabModel(small(embedding_positions="learned", type_vocab_size=2)))
    ids, segments = some_ids(5, L), some_ids(5, L) % 2
    vectors = encoder.get_input_embeddings()(ids).detach().requires_grad_()
    got = encoder(inputs_embeds=vectors, attention_mask=DOCUMENTS, token_type_ids=segments)
    want = encoder(ids, DOCUMENTS, token_type_ids=segments).last_hidden_state
    assert torch.equal(got.last_hidden_state, want)
    got.last_hidden_state[0, 0].sum().backward()
    moved = vectors.grad.abs().amax(-1) > 0
    assert moved[0, :5].all() and not moved[0, 5:].any() and not moved[1:].any()


def test_hidden_states_are_the_inputs_of_blocks_and_the_output():
    model, ids, states = lively(BertLabModel(small())), some_ids(2, L), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0]))
    out = model(ids, DOCUMENTS[:2], output_hidden_states=True)
    for state, want in zip(out.hidden_states, [*states, out.last_hidden_state], strict=True):
        assert torch.equal(state, want)
    assert model(ids).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == 5


@pytest.mark.parametrize("kernel", ["eager", "auto"])
def test_attention_weights_stay_in_documents_and_windows(kernel):
    model = lively(BertLabModel(small(attn_implementation=kernel, num_key_value_heads=1)))
    out = model(some_ids(5, L), DOCUMENTS, output_attentions=True)
    assert [tuple(w.shape) for w in out.attentions] == [(5, 2, L, L)] * 4
    same = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None]) & (DOCUMENTS > 0)[:, None]
    near = (torch.arange(L)[:, None] - torch.arange(L)).abs() <= 2
    for weights, layer_type in zip(out.attentions, model.config.layer_types):
        real = weights.transpose(1, 2)[DOCUMENTS > 0]  # (tokens, H, L)
        visible = (same if layer_type == "full_attention" else same & near)[DOCUMENTS > 0]
        torch.testing.assert_close(real.sum(-1), torch.ones(real.shape[:2]))
        assert (real.amin(1)[visible] > 0).all() and (real.amax(1)[~visible] == 0).all()
    plain = model(some_ids(5, L), DOCUMENTS).last_hidden_state
    torch.testing.assert_close(out.last_hidden_state, plain)


# ---- which kernel ----------------------------------------------------------------------------


@pytest.mark.parametrize("share", [dict(sequence_shard=object()), dict(local_heads=slice(0, 1))])
def test_processes_that_share_a_model_take_sdpa(share, monkeypatch):
    monkeypatch.setattr("bertlab.model.encoder.device_capability", lambda device: (9, 0))
    config = small(hidden_size=64, num_attention_heads=2, attn_implementation="auto")
    model, gpu = BertLabModel(config).bfloat16(), torch.device("cuda")
    assert model.attention_kernel(gpu, 512)[0] in ("varlen", "flex")
    model.__dict__.update(share)
    assert model.attention_kernel(gpu, 512)[0] == "sdpa"


def test_the_default_kernel_on_a_cpu_is_the_faster_one():
    cpu, model = torch.device("cpu"), BertLabForMaskedLM(small(attention_dropout=0.1)).train()
    assert model.config._attn_implementation == "sdpa"  # by transformers
    choose = model.encoder.attention_kernel
    assert choose(cpu, L)[0] == "eager"
    model.eval()
    assert choose(cpu, L)[0] == "sdpa"
    with torch.autocast("cpu", torch.bfloat16):
        assert choose(cpu, L)[0] == "eager" and choose(cpu, 4096)[0] == "sdpa"
    assert choose(torch.device("mps"), L)[0] == "sdpa"


@pytest.mark.parametrize("settings, options, message", [
    (dict(attn_implementation="varlen"), {}, "varlen.*CUDA.*'eager' or 'sdpa'"),
    (dict(attn_implementation="flex"), {}, "flex.*backward.*no_grad"),
    ({}, dict(output_attentions=True), "never stores the weights"),
])  # fmt: skip
def test_a_kernel_that_cannot_run_is_refused_at_the_call(settings, options, message):
    model = BertLabForMaskedLM(small(**settings)).train()
    with pytest.raises(ValueError, match=message):
        model(some_ids(1, 4), **options)


# ---- the head (contracts 4 and 5) ------------------------------------------------------------


def labelled():
    "Return ids, labels at five positions of each row, and seven positions: two are spare."
    ids, labels = some_ids(2, L), torch.full((2, L), -100)
    positions = torch.tensor([[0, 2, 3, 7, 11, 1, 1], [1, 4, 5, 6, 10, 0, 0]])
    rows = torch.arange(2)[:, None]
    labels[rows, positions[:, :5]] = ids[rows, positions[:, :5]]
    return ids, labels, positions


@pytest.mark.parametrize("kernel", ["sdpa", "varlen"])
def test_a_batch_of_padding_has_a_loss_of_0(kernel, varlen_anywhere):
    model = lively(BertLabForMaskedLM(small(attn_implementation=kernel)))
    none, labels = torch.zeros(2, L, dtype=torch.long), torch.full((2, L), -100)
    out = model(some_ids(2, L), none, labels=labels, label_positions=none[:, :3])
    out.loss.backward()
    assert out.loss == 0 and out.logits.shape == (2, 3, 50) and out.logits.isfinite().all()


def gather_rows(values, positions):
    return torch.stack([value[where] for value, where in zip(values, positions)])


# ---- at home in transformers -----------------------------------------------------------------


def test_a_tied_decoder_follows_a_replaced_embedding():
    model, ids = lively(BertLabForMaskedLM(small())), some_ids(1, L)
    assert not any("decoder" in name for name, _ in model.named_parameters())
    table = model.get_input_embeddings()
    table.weight = torch.nn.Parameter(table.weight.detach() * 2)  # as a move to XLA does
    x = model.head.norm(F.gelu(model.head.dense(model.encoder(ids).last_hidden_state)))
    torch.testing.assert_close(model(ids).logits, x @ table.weight.T + model.head.bias)


@pytest.mark.parametrize("tied", [True, False])
def test_saving_and_loading_loses_nothing(tmp_path, tied):
    config = small(tie_word_embeddings=tied, mask_token_id=4, local_rope_theta=500.0)
    model, ids = lively(BertLabForMaskedLM(config)), some_ids(1, L)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(loaded) is BertLabForMaskedLM
    settings = loaded.config.to_diff_dict()
    added = {name: settings[name] for name in ("architectures", "dtype")}
    assert settings == model.config.to_diff_dict() | added
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    "positions, kernel",
    [("rope", "sdpa"), ("alibi", "eager"), ("learned_and_rope", "auto")],
)  # fmt: skip
def test_one_graph_serves_all_documents(positions, kernel):
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


@pytest.mark.parametrize("initialization", ["megatron", "xavier"])
@pytest.mark.parametrize("mlp", ["glu", "plain"])
def test_deepnorm_scales_values_outputs_and_mlps_alone(mlp, initialization):
    shape = dict(vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, mlp=mlp, norm_position="post", output_gate="element")  # fmt: skip
    deep = BertLabForMaskedLM(BertLabConfig(**shape, norm="deep", initialization=initialization))
    # "megatron" shrinks what "deep" shrinks, and nothing is shrunk twice.
    base = "truncated_normal" if initialization == "megatron" else initialization
    plain = BertLabForMaskedLM(BertLabConfig(**shape, initialization=base))

    def widths(model):
        block = model.encoder.blocks[1]
        qkv, up_proj = block.attention.qkv.weight, block.mlp.up_proj.weight
        smaller = (
            qkv[-32:],
            block.attention.out_proj.weight,
            up_proj[:96],
            block.mlp.down_proj.weight,
        )
        alike = qkv[:-32], block.attention.gate.weight, model.get_input_embeddings().weight
        parts = (*smaller, *alike, *([up_proj[96:]] if mlp == "glu" else []))
        return torch.stack([part.std() for part in parts])

    ratios = widths(deep) / widths(plain)
    want = torch.tensor([0.5] * 4 + [1.0] * (len(ratios) - 4))
    torch.testing.assert_close(ratios, want, rtol=0.06, atol=0)


@pytest.mark.parametrize("initialization", ["megatron", "xavier"])
def test_only_missing_weights_of_a_layer_are_initialized(tmp_path, initialization):
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
        reference, result = (getattr(model.blocks[1].attention, part) for model in (encoder, again))
        assert torch.equal(result.weight, reference.weight) and (result.bias == 0).all()


@pytest.mark.parametrize("key_heads, gate, mlp", [(2, "element", "glu"), (8, "head", "plain")])
def test_xavier_uses_the_fans_of_each_part_of_a_matrix(key_heads, gate, mlp):
    D, I, keys = 128, 320, 16 * key_heads
    config = small(hidden_size=D, intermediate_size=I, num_attention_heads=8, num_key_value_heads=key_heads, mlp=mlp,
                   output_gate=gate, initialization="xavier", num_hidden_layers=2)  # fmt: skip
    block = BertLabModel(config).blocks[1]
    attention, mlp = block.attention, block.mlp
    parts = [*attention.qkv.weight.split((D, keys, keys)), *mlp.up_proj.weight.split(I)]
    for part in (*parts, attention.out_proj.weight, attention.gate.weight, mlp.down_proj.weight):
        # The standard error of a width is 1 / sqrt(2 n) of it: 2.2 % for the 1,024 of a gate.
        assert part.std().item() == pytest.approx((2 / sum(part.shape)) ** 0.5, rel=0.09)


# ---- counts ----------------------------------------------------------------------------------


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
    dense, sparse = (training_flops_per_token(config, 100, rate) for rate in (1.0, 0.25))
    spared = 6 * 0.75 * (16 * 16 + matmul_parameters(config)["MLP"])  # of the last layer
    difference = sum(dense.values()) - sum(sparse.values())
    assert difference == pytest.approx(spared + 0.75 * dense["head"])
    assert dense["scores"] == 12 * 16 * (100 + 5 + 5 + 100)
    assert training_flops_per_token(config, 3, 1.0)["scores"] == 12 * 16 * 3 * 4


# ---- what is expected alone ----------------------------------------------------------------------


OUTPUT_POSITIONS = torch.tensor([[0, 3, 8, 11], [2, 4, 5, 9], [1, 0, 11, 7]])  # some at padding


@pytest.mark.parametrize("kernel", TRAINING_KERNELS)
@pytest.mark.parametrize("settings", [
    {}, dict(norm="deep", norm_position="post"), dict(output_gate="head", num_hidden_layers=1),
    dict(attention_positions="alibi", norm_position="pre_and_post"),
], ids=str)  # fmt: skip
def test_output_positions_have_the_vectors_of_the_full_pass(settings, kernel, varlen_anywhere):
    model = lively(BertLabModel(small(attn_implementation=kernel, **settings))).double()
    documents, positions, results = DOCUMENTS[[0, 1, 3]], OUTPUT_POSITIONS, []
    ids, real = some_ids(3, L), documents.gather(1, positions) != 0
    for output_positions in (None, positions):
        x = model(ids, documents, output_positions=output_positions).last_hidden_state
        x = gather_rows(x, positions) if output_positions is None else x
        assert x.shape == (3, 4, 16) and x.isfinite().all()
        model.zero_grad()
        (x[real] * torch.arange(16)).sum().backward()
        results.append((x[real].detach(), [p.grad.clone() for p in model.parameters()]))
    off = 1e-5 if kernel == "eager" else 1e-9  # its weights are computed in float32
    torch.testing.assert_close(*results, rtol=off, atol=off)


def test_the_last_block_computes_output_positions_alone():
    model, lengths = BertLabModel(small()), []
    for block in model.blocks:
        hook = lambda module, inputs: lengths.append(inputs[0].shape[1])
        block.mlp.register_forward_pre_hook(hook)
    model(some_ids(3, L), output_positions=OUTPUT_POSITIONS)
    assert lengths == [L, L, L, 4]


def test_hidden_states_and_attentions_are_of_all_positions():
    model = lively(BertLabModel(small(attn_implementation="eager")))
    ids, options = some_ids(3, L), dict(output_hidden_states=True, output_attentions=True)
    full = model(ids, **options)
    fewer = model(ids, **options, output_positions=OUTPUT_POSITIONS)
    want = gather_rows(full.last_hidden_state, OUTPUT_POSITIONS)
    torch.testing.assert_close(fewer.last_hidden_state, want)
    torch.testing.assert_close(fewer.hidden_states, full.hidden_states)
    torch.testing.assert_close(fewer.attentions, full.attentions)


# ---- refusals --------------------------------------------------------------------------------


def test_the_model_checks_a_changed_configuration():
    config = small()
    config.num_attention_heads = 3
    with pytest.raises(ValueError, match="num_attention_heads=3"):
        BertLabForMaskedLM(config)


@pytest.mark.parametrize("arguments, words", [
    (dict(input_ids=(4,)), "input_ids"), (dict(input_ids=(1, 513)), "513.*512"),
    (dict(input_ids=(2, 4), attention_mask=(2, 5)), "attention_mask.*2, 4.*2, 5"),
    (dict(input_ids=(2, 4), token_type_ids=(2, 3)), "token_type_ids.*2, 4.*2, 3"),
    (dict(input_ids=(2, 4), inputs_embeds=(2, 4, 16)), "input_ids or inputs_embeds"),
    (dict(inputs_embeds=(2, 4, 8)), "inputs_embeds.*16.*2, 4, 8"),
])  # fmt: skip
def test_inputs_of_a_wrong_shape_are_named(arguments, words):
    tensors = {name: torch.ones(shape).long() for name, shape in arguments.items()}
    with pytest.raises(ValueError, match=words):
        BertLabModel(small())(**tensors)


@pytest.mark.parametrize("requested", ["sdpa", "auto"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_pass_without_gradients_drops_the_same_numbers(requested, autocast):
    "Gradient caching and reentrant checkpoints compute a pass under no_grad and then again."
    model = BertLabModel(small(attention_dropout=0.3, attn_implementation=requested)).train()
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
