"The encoder and its masked-LM head: shapes, packed documents, losses, counts, refusals."

import copy
import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, ModernBertConfig, ModernBertForMaskedLM

from bertlab.attention import KERNELS, attend, document_mask, restart_positions
from bertlab.config import (
    ACTIVATION_NAMES,
    BertLabConfig,
    count_flops,
    count_weights,
    modernbert_base,
    modernbert_tiny,
)
from bertlab.encoder import BertLabModel
from bertlab.heads import BertLabForMaskedLM, gather_positions, masked_lm_loss, mean_loss
from bertlab.layers import ACTIVATIONS, GatedMLP, init_truncated_, rotary_table, rotate

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
    [[d for d, n in enumerate(ns, 1) for _ in range(n)] + [0] * (L - sum(ns)) for ns in ROWS.values()]
)


# ---- masks and positions ---------------------------------------------------------------------


def test_document_mask_is_equal_numbers_that_are_not_zero():
    mask = document_mask(torch.tensor([[1, 1, 2, 0]]))
    want = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert mask.dtype == torch.bool and mask.shape == (1, 1, 4, 4)
    assert mask[0, 0].int().tolist() == want


def test_window_reaches_equally_far_to_both_sides_and_stays_inside_documents():
    mask = document_mask(torch.tensor([[1, 1, 1, 1, 2]]), window=1)[0, 0].int().tolist()
    assert mask == [
        [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]
    ]  # fmt: skip


def test_positions_restart_in_each_document_and_ignore_padding_on_either_side():
    documents = torch.tensor([[1, 1, 1, 2, 3, 3, 0], [0, 0, 1, 1, 1, 1, 1]])
    want = [[0, 1, 2, 0, 0, 1, 0], [0, 0, 0, 1, 2, 3, 4]]
    assert restart_positions(documents).tolist() == want


@given(st.lists(st.integers(1, 6), max_size=6), st.integers(0, 4))
@settings(max_examples=50, deadline=None)
def test_positions_equal_counting_by_hand(lengths, padding):
    documents = [d for d, n in enumerate(lengths, 1) for _ in range(n)] + [0] * (padding + 1)
    want = [i for n in lengths for i in range(n)] + [0] * (padding + 1)
    assert restart_positions(torch.tensor([documents])).tolist() == [want]


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_kernel_equals_softmax_written_out_for_one_query_at_a_time(kernel):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, 2, L, 8, generator=generator) for _ in range(3))
    mask = document_mask(DOCUMENTS, window=3)
    got = attend(q, k, v, mask, kernel)
    for row in range(5):
        for i in range(L):
            seen = mask[row, 0, i].nonzero()[:, 0].tolist()
            want = torch.zeros(2, 8)
            if seen:
                scores = (q[row, :, None, i] * k[row][:, seen]).sum(-1) / 8**0.5
                want = (scores.softmax(-1)[..., None] * v[row][:, seen]).sum(1)
            torch.testing.assert_close(got[row, :, i], want, **TOLERANCE)


def test_attention_refuses_a_float_mask_and_lists_the_kernels_it_knows():
    x = torch.randn(1, 1, 2, 2)
    with pytest.raises(ValueError, match="bool"):
        attend(x, x, x, torch.ones(1, 1, 2, 2))
    with pytest.raises(ValueError, match="eager, sdpa"):
        attend(x, x, x, torch.ones(1, 1, 2, 2, dtype=torch.bool), "fast")


# ---- layers ----------------------------------------------------------------------------------


def test_rotated_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    at = lambda x, p: rotate(x, rotary_table(torch.tensor([[p]]), 8, 100.0))
    near, far = ((at(q, p) * at(k, p + 3)).sum() for p in (2, 40))
    torch.testing.assert_close(near, far, rtol=0, atol=1e-4)
    assert (near - (at(q, 2) * at(k, 6)).sum()).abs() > 1e-3


def test_first_pair_turns_by_one_radian_a_position():
    x = torch.tensor([[[1.0, 0.0, 0.0, 0.0]]])  # K = 4: pairs (0, 2) and (1, 3)
    turned = rotate(x, rotary_table(torch.tensor([[2]]), 4, 10.0))[0, 0]
    want = [torch.tensor(2.0).cos(), 0.0, torch.tensor(2.0).sin(), 0.0]
    torch.testing.assert_close(turned, torch.tensor(want))


def test_gated_mlp_multiplies_the_activated_half_by_the_other():
    mlp = GatedMLP(1, 1, "relu")
    with torch.no_grad():
        mlp.expand.weight.copy_(torch.tensor([[2.0], [-3.0]]))
        mlp.contract.weight.fill_(10.0)
    assert mlp(torch.tensor([[1.0], [-1.0]])).flatten().tolist() == [-60.0, 0.0]


def test_truncated_start_has_no_tail():
    w = init_truncated_(torch.empty(400, 400), 0.02)
    assert w.abs().max() <= 0.04 and 0.016 < w.std() < 0.019


def test_out_projections_start_smaller_and_everything_else_at_the_given_width():
    config = small(vocab_size=500, hidden_size=128, intermediate_size=256, initializer_range=0.02)
    model = BertLabForMaskedLM(config)
    block = model.encoder.blocks[1]
    wide = [model.get_input_embeddings(), block.attention.qkv, block.mlp.expand]
    narrow = [block.attention.out, block.mlp.contract, model.head.dense]
    for module, cut in [(m, 0.04) for m in wide] + [(m, 0.04 / 8**0.5) for m in narrow]:
        assert 0.9 * cut < module.weight.abs().max() <= cut
    assert (block.mlp_norm.weight == 1).all() and (model.head.bias == 0).all()


def test_weights_missing_from_a_checkpoint_start_like_those_of_a_new_model(tmp_path):
    encoder = BertLabModel(small(hidden_size=128, intermediate_size=256, initializer_range=0.02))
    lively(encoder).save_pretrained(tmp_path)
    model = BertLabForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(model.encoder.blocks[1].mlp.expand.weight, encoder.blocks[1].mlp.expand.weight)
    assert 0.9 * 0.04 / 8**0.5 < model.head.dense.weight.abs().max() <= 0.04 / 8**0.5
    assert (model.head.bias == 0).all() and (model.head.norm.weight == 1).all()


def test_names_of_activations_agree_between_configuration_and_layers():
    assert tuple(ACTIVATIONS) == ACTIVATION_NAMES


# ---- packed = alone (contract 3) -------------------------------------------------------------


def logits_and_gradients(model, ids, documents, weights):
    "Weighted sum of the logits -> its gradient, so that every logit has a say of its own."
    model.zero_grad()
    logits = model(ids, documents).logits
    (logits * weights).sum().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("every", [1, 3, 4], ids=["global_layers", "mixed_layers", "mostly_windows"])
@pytest.mark.parametrize("row", range(len(ROWS)), ids=ROWS)
def test_packed_documents_are_computed_as_if_alone(row, every, kernel):
    config = small(global_attention_every_n_layers=every, attn_implementation=kernel)
    model = lively(BertLabForMaskedLM(config))
    ids, documents = some_ids(1, L, seed=row), DOCUMENTS[row : row + 1]
    weights = torch.randn(1, L, 50, generator=torch.Generator().manual_seed(row)) / L
    real = documents > 0
    packed, gradients = logits_and_gradients(model, ids, documents, weights * real[..., None])
    alone_gradients, start = [torch.zeros_like(g) for g in gradients], 0
    for length in list(ROWS.values())[row]:
        at = slice(start, start + length)
        alone, grads = logits_and_gradients(model, ids[:, at], None, weights[:, at])
        torch.testing.assert_close(packed[:, at], alone, **TOLERANCE)
        alone_gradients = [a + g for a, g in zip(alone_gradients, grads)]
        start += length
    assert packed.isfinite().all()
    for got, want in zip(gradients, alone_gradients):
        torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_batch_with_a_row_of_padding_only_has_no_nan_anywhere(kernel):
    model = lively(BertLabForMaskedLM(small(attn_implementation=kernel))).train()
    labels = torch.where(DOCUMENTS > 0, some_ids(5, L), -100)
    out = model(some_ids(5, L), DOCUMENTS, labels=labels)
    out.loss.backward()
    assert out.logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


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
    given_positions = model(ids, DOCUMENTS, restart_positions(DOCUMENTS)).logits
    assert torch.equal(model(ids, DOCUMENTS).logits, given_positions)


def test_zero_one_mask_equals_rows_cut_to_their_length_on_either_side():
    model, ids = lively(BertLabForMaskedLM(small())), some_ids(2, L)
    mask = torch.ones(2, L, dtype=torch.long)
    mask[0, 9:], mask[1, :4] = 0, 0
    logits = model(ids, mask).logits
    torch.testing.assert_close(logits[0, :9], model(ids[:1, :9]).logits[0], **TOLERANCE)
    torch.testing.assert_close(logits[1, 4:], model(ids[1:, 4:]).logits[0], **TOLERANCE)
    torch.testing.assert_close(model(ids, mask.bool()).logits, logits)


def test_bfloat16_autocast_stays_close_and_finite():
    model, ids = lively(BertLabForMaskedLM(small())), some_ids(5, L)
    exact = model(ids, DOCUMENTS).logits
    for kernel in KERNELS:
        model.config._attn_implementation = kernel
        with torch.autocast("cpu", torch.bfloat16):
            out = model(ids, DOCUMENTS, labels=ids)
        assert out.loss.dtype == torch.float32 and out.logits.isfinite().all()
        error = (out.logits.float() - exact)[DOCUMENTS > 0].abs().mean()
        assert error < 0.05 * exact[DOCUMENTS > 0].abs().mean()


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
        assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values()))
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
        "import sys, bertlab.heads; from transformers import AutoModelForMaskedLM as A; "
        "print(type(A.from_pretrained(sys.argv[1])).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert done.stdout.strip() == "BertLabForMaskedLM", done.stderr


def test_whole_graph_is_traced_without_a_break_and_not_again_for_other_documents():
    model = lively(BertLabForMaskedLM(small()))
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    ids, labels, positions = labelled()
    for documents in (DOCUMENTS[:2], DOCUMENTS[2:4]):
        want = model(ids, documents, labels=labels, label_positions=positions).loss
        got = compiled(ids, documents, labels=labels, label_positions=positions).loss
        torch.testing.assert_close(got, want)
    assert counter.frame_count == 1


# ---- counts ----------------------------------------------------------------------------------


shapes = st.fixed_dictionaries(
    dict(
        vocab_size=st.integers(1, 60),
        num_attention_heads=st.integers(1, 4),
        head_size=st.integers(1, 4),
        intermediate_size=st.integers(1, 30),
        num_hidden_layers=st.integers(1, 5),
        global_attention_every_n_layers=st.integers(1, 5),
        tie_word_embeddings=st.booleans(),
    )
)


@given(shapes)
@settings(max_examples=40, deadline=None)
def test_predicted_number_of_weights_equals_the_built_model(shape):
    shape["hidden_size"] = shape["num_attention_heads"] * 2 * shape.pop("head_size")
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
    built = dict.fromkeys(count_weights(config), 0)
    for name, p in BertLabForMaskedLM(config).named_parameters():
        key = "norms" if "norm" in name else "embedding" if "tokens" in name else "head"
        key = "attention" if ".attention." in name else "MLP" if ".mlp." in name else key
        built[key] += p.numel()
    assert count_weights(config) == built


def test_flops_equal_what_torch_counts_for_one_document_and_a_dense_head():
    from torch.utils.flop_counter import FlopCounterMode

    config = small(attn_implementation="eager", global_attention_every_n_layers=1)
    model = BertLabForMaskedLM(config)
    with FlopCounterMode(display=False) as counter:
        model(some_ids(2, L), labels=some_ids(2, L)).loss.backward()
    got = counter.get_total_flops() / (2 * L)
    assert got == pytest.approx(config.flops_per_token(mean_context=L, label_rate=1.0))


def test_windows_and_rare_labels_make_a_token_cheaper():
    config = small()  # windows of 2 to each side: 5 tokens
    dense, sparse = count_flops(config, 100, 1.0), count_flops(config, 100, 0.25)
    assert dense["scores"] == 12 * 16 * (100 + 5 + 5 + 100)
    assert sparse["head"] == dense["head"] / 4
    assert count_flops(config, 3, 1.0)["scores"] == 12 * 16 * 3 * 4


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
        (dict(hidden_activation="gelo"), "gelo.*gelu, gelu_pytorch_tanh, relu, silu"),
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


def test_configuration_module_does_not_import_models():
    code = "import sys, bertlab.config; print('transformers.modeling_utils' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
