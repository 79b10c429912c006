"Losses as sums and counts: by hand, in parts, at positions, in chunks; and what they are worth."

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bertlab.model.losses import (
    LossConfig,
    bits_per_byte,
    masked_lm_loss,
    perplexity,
    sum_losses_chunked,
    sum_losses,
    token_bytes,
    unigram_counts,
    unigram_entropy,
    z_loss,
)

EXACT = dict(rtol=0, atol=1e-6)
V, D = 11, 6


def some_case(num: int, seed: int, unlabelled: float = 0.3):
    "Vectors, labels (some without), weights and a decoder."
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(V, (num,), generator=g)
    labels[torch.rand(num, generator=g) < unlabelled] = -100
    weights = 0.5 + torch.rand(num, generator=g)
    return torch.randn(num, D, generator=g), labels, weights, torch.randn(V, D, generator=g)


def losses_one_by_one(logits, labels, smoothing=0.0):
    "The definition in plain Python, in float64."
    out = []
    for row, label in zip(logits.double().tolist(), labels.tolist()):
        if label == -100:
            out.append(0.0)
            continue
        top = max(row)
        log_z = top + math.log(sum(math.exp(x - top) for x in row))
        target = [smoothing / len(row) + (1 - smoothing) * (v == label) for v in range(len(row))]
        out.append(-sum(q * (x - log_z) for q, x in zip(target, row)))
    return out


# ---- sum and count ---------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_sum_is_that_of_the_definition(smoothing, weighted):
    x, labels, weights, decoder = some_case(20, seed=1)
    logits = x @ decoder.T
    loss_sum, count = masked_lm_loss(logits, labels, weights if weighted else None, smoothing)
    each = losses_one_by_one(logits, labels, smoothing)
    factors = weights.tolist() if weighted else [1.0] * 20
    assert loss_sum.item() == pytest.approx(sum(a * b for a, b in zip(each, factors)), rel=1e-5)
    assert count.item() == sum(label != -100 for label in labels.tolist()) < 20


def test_positions_without_a_label_get_no_gradient():
    x, labels, weights, decoder = some_case(12, seed=2)
    logits = (x @ decoder.T).requires_grad_()
    sum_losses(logits, labels, LossConfig(0.1, 0.1), weights).mean().backward()
    silent = logits.grad.abs().sum(-1) == 0
    assert torch.equal(silent, labels == -100)


def test_a_batch_without_labels_has_no_loss():
    logits = torch.randn(3, V, requires_grad=True)
    parts = sum_losses(logits, torch.full((3,), -100), LossConfig(0.1, 0.1))
    parts.mean().backward()
    assert [part.item() for part in parts] == [0, 0, 0, 0] and parts.mean() == 0
    assert (logits.grad == 0).all()


def test_half_precision_sums_do_not_stop_growing():
    logits = torch.zeros(70_000, 2, dtype=torch.float16)
    loss_sum, _ = masked_lm_loss(logits, torch.zeros(70_000, dtype=torch.long))
    assert loss_sum.dtype == torch.float32
    assert loss_sum.item() == pytest.approx(70_000 * math.log(2), rel=1e-4)


# ---- smoothing and z -------------------------------------------------------------------------


def test_z_loss_is_the_squared_log_of_the_denominator():
    logits = torch.tensor([[0.0, 0.0], [1.0, 2.0], [5.0, 5.0]])
    expected = math.log(2) ** 2 + math.log(math.e + math.e**2) ** 2
    assert z_loss(logits, torch.tensor([0, 1, -100])).item() == pytest.approx(expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_loss_keeps_one_copy_of_the_scores_for_its_gradient(smoothing):
    logits, labels, saved = torch.randn(50, 400, requires_grad=True), torch.randint(400, (50,)), {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        saved[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        masked_lm_loss(logits, labels, None, smoothing)
    assert sum(saved.values()) < 1.1 * logits.numel() * logits.element_size()


@pytest.mark.parametrize("options", [dict(label_smoothing=1.0), dict(label_smoothing=-0.1), dict(z_weight=-1e-4),
                                     dict(z_weight=float("nan")), dict(chunk_size=0)])  # fmt: skip
def test_options_out_of_range_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        LossConfig(**options)


# ---- only where there is a label ---------------------------------------------------------------


# ---- never all at once -----------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    num=st.integers(1, 23), size=st.integers(1, 30), seed=st.integers(0, 999),
    smoothing=st.sampled_from([0.0, 0.1]), z=st.sampled_from([0.0, 1e-2]), weighted=st.booleans(),
)  # fmt: skip
def test_chunks_have_the_loss_and_gradients_of_the_whole(num, size, seed, smoothing, z, weighted):
    x, labels, weights, decoder = some_case(num, seed)
    x.requires_grad_(), decoder.requires_grad_()
    weights = weights if weighted else None
    head, config = (lambda t: t @ decoder.T), LossConfig(smoothing, z, chunk_size=size)
    both = (
        sum_losses(head(x), labels, config, weights),
        sum_losses_chunked(head, x, labels, config, weights),
    )
    for full, chunked in zip(*both):
        torch.testing.assert_close(chunked, full, rtol=1e-6, atol=1e-6)
    grads = [torch.autograd.grad(parts.mean(), (x, decoder)) for parts in both]
    for full, chunked in zip(*grads):
        torch.testing.assert_close(chunked, full, **EXACT)


# ---- what a loss is worth ------------------------------------------------------------------------


def test_entropy_of_two_one_one_is_one_and_a_half_bits():
    assert unigram_entropy(torch.tensor([2, 0, 1, 1])) == pytest.approx(1.5 * math.log(2))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30).filter(any), st.randoms())
def test_no_constant_beats_the_entropy(counts, random):
    p = np.array(counts) / sum(counts)
    entropy = unigram_entropy(torch.tensor(counts))
    seen = np.count_nonzero(counts)
    assert 0 <= entropy <= math.log(seen) + 1e-12
    q = np.array([random.random() + 1e-3 for _ in counts])
    assert -(p * np.log(q / q.sum())).sum() >= entropy - 1e-12


def test_special_tokens_and_ignored_labels_are_not_counted():
    batch = torch.tensor([[0, 5, 3, 3, 1], [0, 4, 1, 2, 2]])
    assert unigram_counts(batch, 6, excluded_ids=[0, 1, 2]).tolist() == [0, 0, 0, 2, 1, 1]
    labels = torch.tensor([[-100, 5, -100], [-100, -100, -100]])
    assert unigram_counts(labels, 6).tolist() == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("ids, excluded, name", [([6], (), "ids"), ([-1], (), "-1"), ([1], (6,), "excluded_ids")])  # fmt: skip
def test_ids_outside_the_vocabulary_are_named(ids, excluded, name):
    with pytest.raises(ValueError, match=name):
        unigram_counts(torch.tensor(ids), 6, excluded)


def test_perplexity_of_a_uniform_guess_is_the_number_of_choices():
    assert perplexity(math.log(30_522)) == pytest.approx(30_522)
    assert perplexity(0.0) == 1.0
    assert perplexity(1e4) == math.inf


ENDS = models.BPE({"the</w>": 0, "c": 1, "at</w>": 2, "##": 3}, [], end_of_word_suffix="</w>")
OTHER = models.WordPiece({"ca": 0, "@@t": 1, "ét": 2, "[UNK]": 3}, unk_token="[UNK]",
                         continuing_subword_prefix="@@")  # fmt: skip
USUAL = models.WordPiece({"ca": 0, "##t": 1, "##é": 2, "[UNK]": 3}, unk_token="[UNK]")
# Neither of these has a prefix for pieces inside words: "##" is text.
PIECES = models.Unigram(
    [("##", -1.0), ("##a", -1.0), ("\u2581##", -1.0), ("<0x0A>", -1.0)], unk_id=0
)
WORDS = models.WordLevel({"##": 0, "##a": 1, "a": 2, "[UNK]": 3}, unk_token="[UNK]")


@pytest.mark.parametrize("model, sizes", [
    (ENDS, [3, 1, 2, 2]), (OTHER, [2, 1, 3, 5]), (USUAL, [2, 1, 2, 5]), (PIECES, [2, 3, 2, 1]),
    (WORDS, [2, 3, 1, 5]),
])  # fmt: skip
def test_bytes_of_tokens_by_hand(model, sizes):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))
    assert token_bytes(tokenizer, 4).tolist() == sizes


def test_bytes_of_byte_level_and_added_tokens_by_hand():
    inner = Tokenizer(models.BPE({"\u0120a": 0, "\u00c3\u00a9": 1}, []))  # a space with a; é
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.add_tokens([AddedToken("été"), AddedToken("naïve")])
    assert token_bytes(tokenizer, 5).tolist() == [1, 2, 5, 6, 0]


def test_bits_per_byte_by_hand():
    # Four tokens at two bits each, over the five bytes of "héla".
    assert bits_per_byte(4 * math.log(4), len("héla".encode())) == pytest.approx(8 / 5)
    with pytest.raises(ValueError, match="num_bytes"):
        bits_per_byte(1.0, 0)
