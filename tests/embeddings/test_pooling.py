"Texts that share a row have the vectors and gradients that they have alone."

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.embeddings.pooling import (
    POOLINGS,
    cls_pool,
    mean_pool,
    pack_for_encoder,
    document_index,
)
from bertlab.model.config import bert_tiny, modernbert_tiny
from bertlab.model.encoder import BertLabModel

PAD = 0
SMALL = dict(
    vocab_size=60,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    pad_token_id=PAD,
)


def draw_texts(seed, count=20, longest=16):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 60, n).tolist() for n in rng.integers(1, longest + 1, count)]


def as_tensors(batch):
    return {name: torch.as_tensor(value) for name, value in batch.items()}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=7), min_size=1, max_size=12),
    st.booleans(),
)
def test_every_token_of_every_text_stands_once_in_its_own_order(texts, packing):
    batch = pack_for_encoder(texts, 7, PAD, packing)
    documents, ids = batch["attention_mask"], batch["input_ids"]
    rows = [
        (row, document)
        for row in range(len(documents))
        for document in range(1, documents[row].max() + 1)
    ]
    members = [rows[slot] for slot in batch["text_order"]]
    for text, (row, document) in zip(texts, members):
        there = documents[row] == document
        assert ids[row][there].tolist() == text
        assert batch["position_ids"][row][there].tolist() == list(range(len(text)))
    assert (ids[documents == 0] == PAD).all() and len(rows) == len(texts)


@pytest.mark.parametrize("how", POOLINGS)
@pytest.mark.parametrize("make_config", [modernbert_tiny, bert_tiny])
def test_packed_equals_alone(how, make_config):
    torch.manual_seed(0)
    encoder, texts = BertLabModel(make_config(**SMALL)).eval(), draw_texts(1)
    weights = torch.randn(len(texts), 32)

    batch = as_tensors(pack_for_encoder(texts, 24, PAD))
    states = encoder(
        batch["input_ids"], batch["attention_mask"], batch["position_ids"]
    ).last_hidden_state
    together = POOLINGS[how](states, *document_index(batch["attention_mask"]))[batch["text_order"]]
    (together * weights).sum().backward()
    packed = [p.grad.clone() for p in encoder.parameters() if p.grad is not None]

    encoder.zero_grad()
    hidden = [encoder(torch.tensor([text])).last_hidden_state[0] for text in texts]
    alone = torch.stack([h.mean(0) if how == "mean" else h[0] for h in hidden])
    (alone * weights).sum().backward()
    assert len(batch["input_ids"]) < len(texts) / 1.5, "nothing was packed"
    torch.testing.assert_close(together, alone, atol=2e-6, rtol=1e-5)
    single = [p.grad for p in encoder.parameters() if p.grad is not None]
    scale = max(g.abs().max().item() for g in single)
    for packed_vector, single_vector in zip(packed, single):
        torch.testing.assert_close(packed_vector, single_vector, atol=2e-6 * scale, rtol=1e-4)


def test_padding_has_no_effect():
    documents = torch.tensor([[1, 1, 2, 0], [1, 0, 0, 0]])
    slots, count = document_index(documents)
    for pool in (mean_pool, cls_pool):
        states = torch.randn(2, 4, 3)
        states[documents == 0] = float("inf")
        states.requires_grad_()
        vectors = pool(states, slots, count)
        assert torch.isfinite(vectors).all() and vectors.shape == (3, 3)
        vectors.sum().backward()
        assert (states.grad[documents == 0] == 0).all() and torch.isfinite(states.grad).all()


def test_sums_of_sixteen_bit_states_keep_their_digits():
    states = torch.full((1, 4001, 1), 1.0, dtype=torch.bfloat16)
    documents = torch.ones(1, 4001, dtype=torch.int64)
    assert (
        mean_pool(states, *document_index(documents)).item() == 1.0
    )  # a sum in bfloat16 stops at 256


def test_texts_are_numbered_row_by_row():
    slots, count = document_index(torch.tensor([[1, 2, 0], [0, 0, 0], [1, 1, 2]]))
    assert slots.tolist() == [[0, 1, 4], [4, 4, 4], [2, 2, 3]] and count == 4
    assert (
        document_index(torch.tensor([[1, 2, 0], [0, 0, 0], [1, 1, 2]]), 4)[0].tolist()
        == slots.tolist()
    )


@pytest.mark.parametrize("packing", [True, False])
def test_an_empty_or_a_too_long_text_is_named(packing):
    with pytest.raises(ValueError, match="text 1"):
        pack_for_encoder([[1], [], [2]], 4, PAD, packing)
    with pytest.raises(ValueError, match="5"):
        pack_for_encoder([[1], [1, 2, 3, 4, 5]], 4, PAD, packing)
