"The word head and the three models around it: masked, diffused, rebuilt."

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM

from model_cases import lively, same_start_for_every_test, small  # noqa: F401

from bertlab.model.heads import (
    BertLabForEnhancedMaskedLM,
    BertLabForMaskedDiffusion,
    BertLabForMaskedLM,
    MaskedLMHead,
    _count_maskable,
    sample_half_of_pairs,
    splitmix64,
)
from bertlab.model.losses import LossConfig

TOLERANCE = dict(rtol=0, atol=1e-5)
V, B, L = 50, 4, 12
MODELS = [BertLabForMaskedLM, BertLabForEnhancedMaskedLM]
DOCUMENTS = torch.tensor([[1] * 5 + [2] * 4 + [3] * 3, [1] + [2] * 6 + [3] + [0] * 4, [1] * 12,
                          [1] * 2 + [0] * 10])  # fmt: skip
KEYS = torch.tensor([5, -3, 2**62, 0])
VARIANTS = {
    "default": {},
    "untied": dict(tie_word_embeddings=False, decoder_bias=False),
    "learned": dict(embedding_positions="learned", attention_positions="none"),
    "sinusoidal": dict(embedding_positions="sinusoidal", attention_positions="none"),
    "alibi": dict(attention_positions="alibi"),
    "gated": dict(output_gate="element", qk_norm=True, num_key_value_heads=1),
    "post": dict(norm="deep", norm_position="post"),
    "no_norm": dict(norm_position="none", embedding_norm=False),
}


def some_batch(seed=0, rate=0.4):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, V, (B, L), generator=g)
    chosen = (torch.rand(B, L, generator=g) < rate) & (DOCUMENTS != 0)
    labels = ids.masked_fill(~chosen, -100)
    at = (labels == -100).int().argsort(dim=1, stable=True)[:, : int(chosen.sum(1).max())]
    return dict(input_ids=ids, attention_mask=DOCUMENTS, labels=labels), at


def keyed(model) -> dict:
    return dict(row_keys=KEYS) if isinstance(model, BertLabForEnhancedMaskedLM) else {}


def gradients(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# ---- the head --------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_dense_activation_norm_decoder(tied):
    head = lively(
        MaskedLMHead(small(tie_word_embeddings=tied, head_activation="relu", head_bias=True))
    )
    x, embedding = torch.randn(3, 16), torch.randn(V, 16)
    h = F.relu(x @ head.dense.weight.T + head.dense.bias)
    h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    decoder = embedding if tied else head.decoder
    torch.testing.assert_close(head(x, embedding), h * head.norm.weight @ decoder.T + head.bias)


@pytest.mark.parametrize("cls", MODELS)
@pytest.mark.parametrize("variant", ["default", "untied"])
def test_the_decoder_follows_a_resized_vocabulary(cls, variant):
    model = lively(cls(small(**VARIANTS[variant])))
    batch, _ = some_batch()
    batch["input_ids"] = batch["input_ids"].clamp(max=V - 7)  # ids that survive the second resize
    before = model(**batch, **keyed(model)).logits
    model.resize_token_embeddings(V + 6)
    after = model(**batch, **keyed(model)).logits
    assert after.shape[-1] == V + 6 == model.config.vocab_size
    torch.testing.assert_close(after[..., :V], before, **TOLERANCE)
    model.resize_token_embeddings(V - 6)
    smaller = model(**batch | dict(labels=None), **keyed(model)).logits
    torch.testing.assert_close(smaller, before[..., : V - 6], **TOLERANCE)


# ---- sparse, dense, chunked ------------------------------------------------------------------


@pytest.mark.parametrize("cls", MODELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_sparse_and_chunked_losses_equal_the_dense_ones(cls, variant):
    model = lively(cls(small(**VARIANTS[variant])))
    batch, positions = some_batch()
    ways = [(LossConfig(0.1, 1e-3), None), (LossConfig(0.1, 1e-3), positions),
            (LossConfig(0.1, 1e-3, chunk_size=3), positions)]  # fmt: skip
    outputs, slopes = [], []
    for loss_config, at in ways:
        model.zero_grad()
        out = model(**batch, loss_config=loss_config, label_positions=at, **keyed(model))
        out.loss.backward()
        outputs.append(out)
        slopes.append(gradients(model))
    dense, sparse, chunked = outputs
    for out, slope in zip(outputs[1:], slopes[1:]):
        for name in ("loss", "loss_sum", "z_loss"):
            torch.testing.assert_close(out[name], dense[name], rtol=1e-6, atol=1e-6)
        assert out.num_labels == dense.num_labels and out.num_correct == dense.num_correct
        torch.testing.assert_close(slope, slopes[0], rtol=1e-5, atol=2e-6)
    assert sparse.logits.shape == (B, positions.shape[1], V) and chunked.logits is None


@pytest.mark.parametrize("cls", MODELS)
@pytest.mark.parametrize("is_dynamic", [True, False])  # as on a CPU, or elsewhere
def test_a_training_step_may_ask_for_the_loss_alone(cls, is_dynamic, monkeypatch):
    model = lively(cls(small()))
    (batch, _), counts = some_batch(), []
    monkeypatch.setattr("bertlab.model.heads.allows_dynamic_shapes", lambda values: is_dynamic)
    count = lambda module, inputs: counts.append(inputs[0][..., 0].numel())
    model.head.dense.register_forward_pre_hook(count)
    slopes, outputs = [], []
    for loss_only in (False, True):
        model.zero_grad()
        config = LossConfig(0.1, 1e-3, loss_only=loss_only)
        outputs.append(model(**batch, loss_config=config, **keyed(model)))
        outputs[-1].loss.backward()
        slopes.append(gradients(model))
    assert outputs[1].logits is outputs[1].num_correct is None
    labelled = (batch["labels"] != -100).sum()
    assert counts == [B * L, labelled if is_dynamic else B * L]
    torch.testing.assert_close(outputs[1].loss, outputs[0].loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("cls", MODELS)
def test_the_loss_is_the_mean_of_the_sums_beside_it(cls):
    model = lively(cls(small()))
    batch, _ = some_batch()
    out = model(**batch, **keyed(model), loss_config=LossConfig(z_weight=0.1))
    torch.testing.assert_close(out.loss, (out.loss_sum + out.z_loss) / out.num_labels)
    assert out.num_labels == (batch["labels"] != -100).sum()
    right = (out.logits.argmax(-1) == batch["labels"]).sum()
    assert out.num_correct == right


# ---- at home in transformers -----------------------------------------------------------------


@pytest.mark.parametrize("cls", [*MODELS, BertLabForMaskedDiffusion])
def test_the_auto_class_brings_back_the_class_that_was_saved(cls, tmp_path):
    model = lively(cls(small(**VARIANTS["untied"])))
    model.save_pretrained(tmp_path)
    again, info = AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is cls and not info["missing_keys"] and not info["unexpected_keys"]
    batch, _ = some_batch()
    want, got = (m.eval()(**batch, **keyed(m)).logits for m in (model, again))
    assert torch.equal(want, got)


@pytest.mark.parametrize("cls", MODELS)
def test_new_documents_do_not_recompile_a_step(cls):
    model, counter = cls(small()).train(), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    batch, positions = some_batch()
    options = dict(label_positions=positions, return_dict=True, **keyed(model))
    for shift in (0, 1):
        compiled(**batch | dict(attention_mask=DOCUMENTS.roll(shift, 0)), **options)
    assert counter.frame_count == 1


# ---- masked diffusion ------------------------------------------------------------------------


def test_the_bound_is_the_weighted_sum_over_all_maskable_tokens():
    model = lively(BertLabForMaskedDiffusion(small(cls_token_id=2, sep_token_id=3, pad_token_id=0)))
    batch, positions = some_batch()
    batch["input_ids"][0, 0], batch["input_ids"][0, 4] = 2, 3
    batch["labels"][0, 0] = batch["labels"][0, 4] = -100
    labels = batch["labels"]
    weights = torch.where(labels != -100, 1 / torch.rand(B, 1).clamp(0.1), 0.0)
    out = model(**batch, loss_weights=weights)
    log_p = out.logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    num_tokens = 12 + 8 + 12 + 2 - 2  # documents' tokens, less one [CLS] and one [SEP]
    assert out.num_labels == num_tokens
    torch.testing.assert_close(out.loss, -(weights * log_p).sum() / num_tokens)
    options = dict(label_positions=positions, loss_config=LossConfig(chunk_size=4))
    sparse = model(**batch, loss_weights=weights, **options)
    torch.testing.assert_close(sparse.loss, out.loss)
    assert sparse.num_labels == num_tokens


def test_a_mask_token_counts_as_the_token_that_it_hides():
    ids = torch.tensor([[2, 9, 4, 3, 0]])
    config = small(cls_token_id=2, sep_token_id=3, pad_token_id=0, mask_token_id=4)
    documents = torch.tensor([[1, 1, 1, 1, 0]])
    assert _count_maskable(ids, documents, config) == 2
    assert _count_maskable(ids, documents, small()) == 4  # nothing is known to be special
    assert _count_maskable(None, documents, config) == 4


# ---- enhanced: coins -------------------------------------------------------------------------


def test_scrambling_follows_splitmix_from_seed_zero():
    "The generator's first three outputs from seed 0, as published with Java's and others' ports."
    golden = 0x9E3779B97F4A7C15
    states = [(golden * n) % 2**64 for n in (1, 2, 3)]
    signed = torch.tensor([s - 2**64 if s >= 2**63 else s for s in states])
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [b % 2**64 for b in splitmix64(signed).tolist()] == expected


# ---- enhanced: the model ---------------------------------------------------------------------


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "post"])
def test_a_token_is_rebuilt_from_sampled_tokens_alone(variant):
    "By the gradient: exactly these encoder vectors have a part in it, and never its own."
    model = lively(BertLabForEnhancedMaskedLM(small(**VARIANTS[variant])))
    x = torch.randn(B, L, 16, requires_grad=True)
    y, _ = model.vectors_to_score(x, DOCUMENTS, None, None, KEYS)
    same = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None]) & (DOCUMENTS != 0)[:, None]
    want = same & sample_half_of_pairs(KEYS, L) & ~torch.eye(L, dtype=torch.bool)
    for position in range(L):
        (slope,) = torch.autograd.grad((y[:, position] ** 2).sum(), x, retain_graph=True)
        assert torch.equal(slope.abs().sum(-1) > 0, want[:, position])


def test_coins_belong_to_the_key_of_a_row():
    model = lively(BertLabForEnhancedMaskedLM(small()))
    ids, order = some_batch()[0]["input_ids"], torch.tensor([2, 0, 3, 1])
    logits = model(ids, DOCUMENTS, row_keys=KEYS).logits
    moved = model(ids[order], DOCUMENTS[order], row_keys=KEYS[order]).logits
    longer = model(F.pad(ids, (0, 9)), F.pad(DOCUMENTS, (0, 9)), row_keys=KEYS).logits
    torch.testing.assert_close(moved, logits[order], **TOLERANCE)
    torch.testing.assert_close(longer[:, :L], logits, **TOLERANCE)


def test_row_keys_decide_in_training():
    model = lively(BertLabForEnhancedMaskedLM(small())).train()
    batch, _ = some_batch()
    loss = lambda **extra: model(**batch, **extra).loss.item()
    assert loss(row_keys=KEYS) == loss(row_keys=KEYS) != loss(row_keys=KEYS + 1)
    torch.manual_seed(3)
    first, second = loss(), loss()
    torch.manual_seed(3)
    assert loss() == first != second
