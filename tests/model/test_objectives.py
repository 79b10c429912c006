"Each pretraining objective from rows to gradient: what its collator returns is what its model takes."

import numpy as np
import pytest
import torch

from bertlab.data.collators import get_collator_cls
from bertlab.model.config import BertLabConfig
from bertlab.model.heads import (
    BertLabForCausalLM,
    BertLabForEnhancedMaskedLM,
    BertLabForMaskedDiffusion,
    BertLabForMaskedLM,
)
from bertlab.data.packing import PackedDataset

PAD, CLS, SEP, MASK = range(4)
SIZE = 40
MODELS = {
    "mlm": BertLabForMaskedLM,
    "diffusion": BertLabForMaskedDiffusion,
    "enhanced_mlm": BertLabForEnhancedMaskedLM,
    "causal": BertLabForCausalLM,  # on the rows of enhanced_mlm, where nothing is masked
}


def rows(num=6, length=32):
    rng = np.random.default_rng(0)
    documents = [rng.integers(4, SIZE, size) for size in rng.integers(1, 25, 40)]
    dataset = PackedDataset(documents, length, pad_token_id=PAD, cls_token_id=CLS, sep_token_id=SEP)
    return [dataset[0, i] for i in range(num)]


def batch_of(objective, examples):
    collator = get_collator_cls(objective.replace("causal", "enhanced_mlm"))(
        PAD, MASK, SIZE, max_sequence_length=32, special_token_ids=[CLS, SEP]
    )
    return collator(examples)


def model_of(objective, dtype=torch.float64):
    torch.manual_seed(0)
    config = BertLabConfig(
        vocab_size=SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, local_attention=8, pad_token_id=PAD, cls_token_id=CLS, sep_token_id=SEP,
        mask_token_id=MASK,
    )  # fmt: skip
    return MODELS[objective](config).to(dtype).eval()


@pytest.mark.parametrize("objective", MODELS)
def test_a_collators_batch_trains_its_objective(objective):
    model, batch = model_of(objective).train(), batch_of(objective, rows())
    optimizer, losses = torch.optim.Adam(model.parameters(), 0.01), []
    for _ in range(40):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.isfinite(losses).all() and losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize("objective", MODELS)
def test_sum_and_count_of_two_halves_are_those_of_the_batch(objective):
    # Rows draw by their own address, so a row's loss does not depend on the rows beside it.
    model, examples = model_of(objective).train(), rows()
    full = model(**(batch_of(objective, examples)))
    parts = [model(**(batch_of(objective, half))) for half in (examples[:2], examples[2:])]
    for name in ("loss_sum", "num_labels"):
        total = sum(getattr(part, name).double() for part in parts)
        torch.testing.assert_close(total, getattr(full, name).double(), rtol=1e-9, atol=1e-9)


def test_enhanced_rows_sample_by_row_and_epoch():
    model, examples = model_of("enhanced_mlm").train(), rows()
    batch = batch_of("enhanced_mlm", examples)
    alone = batch_of("enhanced_mlm", examples[3:4])
    positions = batch["label_positions"].shape[1]
    assert alone["label_positions"].shape[1] == positions, "the bound of labels is static"
    torch.testing.assert_close(model(**batch).logits[3:4], model(**alone).logits)
    later = batch_of("enhanced_mlm", [{**row, "epoch": 1} for row in examples[3:4]])
    assert torch.equal(later["input_ids"], alone["input_ids"])
    assert (model(**later).logits - model(**alone).logits).abs().max() > 1e-3
