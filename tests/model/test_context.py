"Longer rows: angles as transformers has them, tables by hand, equal scores after saving."

import copy
import math

import numpy as np
import pytest
import torch
import transformers

from bertlab.data.packing import TokenizedDocuments
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.config import BertLabConfig, bert_tiny, modernbert_tiny, roberta_base
from bertlab.model.context import (
    CONTEXT_METHODS,
    context_config,
    extend_context,
    loss_by_position,
    needle_test,
)
from bertlab.model.heads import BertLabForMaskedLM, TokenPredictionOutput
from bertlab.model.huggingface import from_huggingface, save_model
from bertlab.model.layers import rope_frequencies

SIZE = dict(
    vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
)
SHAPES = {"bert": bert_tiny(**SIZE, max_position_embeddings=12),
          "roberta": roberta_base(**SIZE, max_position_embeddings=12, pad_token_id=1),
          "modernbert": modernbert_tiny(**SIZE, max_position_embeddings=12, local_attention=4)}  # fmt: skip
PAIRS = [(shape, how) for how, kind in CONTEXT_METHODS.items() for shape in SHAPES
         if (kind == "rope") == (shape == "modernbert")]  # fmt: skip


def build(shape):
    torch.manual_seed(0)
    return BertLabForMaskedLM(copy.deepcopy(SHAPES[shape])).eval()


@pytest.mark.parametrize("shape, how", PAIRS)
def test_a_longer_model_is_saved_and_plain_transformers_gives_equal_scores(shape, how, tmp_path):
    longer = extend_context(build(shape), 40, how, 5000.0 if how == "base" else None)
    save_model(longer, None, tmp_path)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__module__.startswith("transformers")
    ids = torch.randint(5, 60, (2, 40))
    torch.testing.assert_close(theirs(ids).logits, longer(ids).logits, rtol=0, atol=1e-5)
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
    got, ours = rope_frequencies(64, 10_000.0, stretch)
    torch.testing.assert_close(got, want)
    assert math.isclose(ours, scale)


def test_a_table_is_repeated_or_interpolated_and_what_stands_in_front_of_it_stays():
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
def test_a_way_that_does_not_fit_is_refused(shape, length, how, theta, word):
    with pytest.raises(ValueError, match=word):
        context_config(SHAPES[shape], length, how, theta)


def test_one_pair_that_is_turned_cannot_be_slowed_down_by_ntk():
    config = modernbert_tiny(**{**SIZE, "num_attention_heads": 16})
    with pytest.raises(ValueError, match="how='ntk'.*rotary_dim=2 .*yarn"):
        context_config(config, 600, "ntk")
    assert context_config(config, 600, "linear").rope_scaling


def test_an_adapter_is_to_be_merged_first():
    pytest.importorskip("peft")
    from bertlab.model.adapters import add_adapter
    from bertlab.model.huggingface import merged_copy

    model = build("modernbert")
    add_adapter(model, "lora")
    with pytest.raises(ValueError, match="merged_copy"):
        extend_context(model, 40)
    assert extend_context(merged_copy(model), 40).config.max_position_embeddings == 40


@pytest.mark.parametrize("stretch", [
    {"rope_type": "dynamic", "factor": 2}, {"rope_type": "linear"}, {"rope_type": "linear", "factor": 0.5}, "yarn",
    {"rope_type": "linear", "factor": 2, "beta_fast": 3},
])  # fmt: skip
def test_a_stretch_that_cannot_be_is_refused(stretch):
    with pytest.raises(ValueError, match="rope_scaling"):
        BertLabConfig(rope_scaling=stretch)


def test_loss_by_position_counts_positions_and_lengths_within_documents():
    model = build("modernbert")
    mask = torch.tensor([[1, 1, 1, 2, 2, 0]])
    labels = torch.tensor([[7, -100, 8, 9, 10, -100]])
    ids = torch.tensor([[7, 11, 8, 9, 10, 0]])
    found = loss_by_position(model, [{"input_ids": ids, "attention_mask": mask, "labels": labels}])
    logits = model(ids, attention_mask=mask).logits[0]
    loss = (
        torch.nn.functional.cross_entropy(logits, labels[0], reduction="none")
        .double()
        .detach()
        .numpy()
    )
    assert found["position_count"][:4].tolist() == [2, 1, 1, 0] and found["length_count"][
        :4
    ].tolist() == [0, 0, 2, 2]
    np.testing.assert_allclose(
        found["position_loss"][:3], [loss[0] + loss[3], loss[4], loss[2]], rtol=1e-5
    )
    np.testing.assert_allclose(
        found["length_loss"][2:4], [loss[3] + loss[4], loss[0] + loss[2]], rtol=1e-5
    )


HAY = ["apple banana cherry orange stone river house garden"] * 20
READER = train_tokenizer(["the secret word is apple ."] + HAY, vocab_size=120)


def reader(on="cpu"):
    config = modernbert_tiny(**{**SIZE, "vocab_size": len(READER)}, max_position_embeddings=64)
    return BertLabForMaskedLM(config).to(on).train()


def test_a_model_that_reads_the_needle_gains_by_it_and_trains_on_afterwards(monkeypatch):
    model, named, sides = (
        reader(),
        READER.encode("the secret word is", add_special_tokens=False),
        [],
    )

    def read(ids_BL, label_positions):  # 5 for what stands behind the first "the secret word is"
        assert not model.training and label_positions.shape == (3, 1)
        assert (ids_BL.gather(1, label_positions) == READER.mask_token_id).all()
        places = ids_BL.unfold(1, len(named), 1).eq(torch.tensor(named)).all(-1).int().argmax(1)
        words_B1 = ids_BL.gather(1, places[:, None] + len(named))
        sides.append(words_B1)
        return TokenPredictionOutput(logits=5 * torch.eye(len(READER))[words_B1])

    monkeypatch.setattr(model, "forward", read)
    lines = needle_test(model, READER, HAY, [32, 40], [0.0, 1.0], num_rows=3, seed=1)
    for line, right_B1, other_B1 in zip(lines, sides[::2], sides[1::2], strict=True):
        share = (right_B1 != other_B1).float().mean().item()
        assert line["hits"] == 1 and line["gain"] == pytest.approx(5 * share)
    assert model.training


def test_needles_are_sent_to_the_model_s_device(monkeypatch):
    model = reader("meta")  # which stands for any other than the CPU

    def blind(ids_BL, label_positions):
        assert ids_BL.device == label_positions.device == model.device
        return TokenPredictionOutput(logits=torch.zeros(len(ids_BL), 1, len(READER)))

    monkeypatch.setattr(model, "forward", blind)
    assert needle_test(model, READER, HAY, [32], [0.5], num_rows=2)[0]["gain"] == 0
