"Longer rows: angles as transformers has them, tables by hand, equal scores after saving."

import copy
import math

import pytest
import torch
import transformers

from bertlab.model.config import bert_tiny, modernbert_tiny, roberta_base
from bertlab.model.context import (
    CONTEXT_METHODS,
    _context_config,
    extend_context,
)
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import from_huggingface, save_model
from bertlab.model.layers import rope_frequencies

SIZE = dict(
    vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
)
SHAPES = {"bert": bert_tiny(**SIZE, max_position_embeddings=12),
          "roberta": roberta_base(**SIZE, max_position_embeddings=12, pad_token_id=1),
          "modernbert": modernbert_tiny(**SIZE, max_position_embeddings=12, local_attention=4)}  # fmt: skip
PAIRS = [(shape, how) for how, method_type in CONTEXT_METHODS.items() for shape in SHAPES
         if (method_type == "rope") == (shape == "modernbert")]  # fmt: skip


def build(shape):
    torch.manual_seed(0)
    return BertLabForMaskedLM(copy.deepcopy(SHAPES[shape])).eval()


@pytest.mark.parametrize("shape, how", PAIRS)
def test_transformers_scores_a_longer_model_equally(shape, how, tmp_path):
    longer = extend_context(build(shape), 40, how, 5000.0 if how == "base" else None)
    save_model(longer, None, tmp_path)
    reference = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert type(reference).__module__.startswith("transformers")
    ids = torch.randint(5, 60, (2, 40))
    torch.testing.assert_close(reference(ids).logits, longer(ids).logits, rtol=0, atol=1e-5)
    back = from_huggingface(tmp_path)
    torch.testing.assert_close(back(ids).logits, longer(ids).logits, rtol=0, atol=1e-5)
    assert back.config.max_position_embeddings == 40


@pytest.mark.parametrize("stretch", [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "attention_factor": 1.0},
])  # fmt: skip
def test_stretched_angles_are_those_of_transformers(stretch):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.ModernBertConfig(
        hidden_size=128, num_attention_heads=2, num_hidden_layers=2,
        rope_parameters={"full_attention": {"rope_theta": 10_000.0, **stretch},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}})  # fmt: skip
    want, scale = ROPE_INIT_FUNCTIONS[stretch["rope_type"]](config, layer_type="full_attention")
    got, result = rope_frequencies(64, 10_000.0, stretch)
    torch.testing.assert_close(got, want)
    assert math.isclose(result, scale)


def test_a_table_is_repeated_or_interpolated():
    model = build("roberta")
    table = model.encoder.embeddings.positions.weight
    assert len(table) == 14
    again = extend_context(model, 30, "repeat").encoder.embeddings.positions.weight
    assert (
        len(again) == 32 and torch.equal(again[:14], table) and torch.equal(again[14:26], table[2:])
    )
    between = extend_context(model, 23, "interpolate").encoder.embeddings.positions.weight
    assert torch.equal(between[:2], table[:2])
    torch.testing.assert_close(between[2::2], table[2:])
    torch.testing.assert_close(between[3], (table[2] + table[3]) / 2)


@pytest.mark.parametrize("shape, length, how, theta, word", [
    ("bert", 40, "yarn", None, "learned"), ("modernbert", 40, "repeat", None, "rope"), ("bert", 12, "repeat", None, "12"),
    ("modernbert", 40, "base", None, "theta"), ("modernbert", 40, "ntk", 5.0, "theta"),
    ("modernbert", 40, "yarrn", None, "yarn"),
])  # fmt: skip
def test_a_method_that_does_not_fit_is_refused(shape, length, how, theta, word):
    with pytest.raises(ValueError, match=word):
        _context_config(SHAPES[shape], length, how, theta)


def test_ntk_needs_more_than_one_rotated_pair():
    config = modernbert_tiny(**{**SIZE, "num_attention_heads": 16})
    with pytest.raises(ValueError, match="how='ntk'.*got 2.*yarn"):
        _context_config(config, 600, "ntk")
    assert _context_config(config, 600, "linear").rope_scaling
