"Growing a model by tiling: every weight a copy, heads whole, functions kept, impossible pairs refused."

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from bertlab.model.config import BertLabConfig, modernbert_tiny
from bertlab.model.growth import (
    check_growth,
    grow,
    layer_map,
    tile_indices,
)
from bertlab.model.heads import (
    BertLabForEnhancedMaskedLM,
    BertLabForMaskedLM,
)
from bertlab.model.task_heads import (
    BertLabForQuestionAnswering,
    BertLabForSequenceClassification,
    BertLabForTokenClassification,
)

V = 40


def shape(**overrides) -> BertLabConfig:
    "Two layers, two heads of four."
    sizes = dict(
        vocab_size=V, hidden_size=8, intermediate_size=6, num_attention_heads=2, num_hidden_layers=2
    )
    return modernbert_tiny(
        **{**sizes, "max_position_embeddings": 16, "local_attention": 4, **overrides}
    )


def lively(config: BertLabConfig, cls=BertLabForMaskedLM):
    "Every weight away from its start, so that no two are equal by chance."
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    return model


def some_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, V, (3, 12), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[1] * 12, [1] * 5 + [2] * 7, [1] * 6 + [0] * 6])
    return {"input_ids": ids, "attention_mask": documents}


def real(logits: torch.Tensor) -> torch.Tensor:
    return logits[some_batch()["attention_mask"] > 0]


VARIANTS = {
    "modernbert": {},
    "bert": dict(norm_position="post", mlp="plain", embedding_positions="learned", attention_positions="none",
                 attention_bias=True, mlp_bias=True, norm_bias=True, head_bias=True, type_vocab_size=2),
    "rms_untied": dict(norm="rms", tie_word_embeddings=False, embedding_norm=False, decoder_bias=False),
    "tanh_head_gate": dict(norm="dynamic_tanh", output_gate="head", norm_position="pre_and_post", norm_bias=True),
    "element_gate_qk_norm": dict(output_gate="element", qk_norm=True, mlp_bias=True),
    "deep": dict(norm="deep", norm_position="post", hidden_activation="silu", partial_rotary_factor=0.5),
    "grouped": dict(num_attention_heads=4, hidden_size=16, num_key_value_heads=2, attention_bias=True),
}  # fmt: skip


def doubled(variant: dict, **overrides) -> BertLabConfig:
    "Twice as wide in every way; heads keep their size."
    small = shape(**variant)
    wide = dict(hidden_size=2 * small.hidden_size, intermediate_size=2 * small.intermediate_size,
                num_attention_heads=2 * small.num_attention_heads)  # fmt: skip
    if small.num_key_value_heads:
        wide["num_key_value_heads"] = 2 * small.num_key_value_heads
    return shape(**{**variant, **wide, **overrides})


@pytest.mark.parametrize(
    "size, source, expected",
    [
        (8, [1, 2, 3], [2, 3, 1, 2, 3, 1, 2, 3]),  # the original is places 2 to 4
        (5, [1, 2, 3], [3, 1, 2, 3, 1]),
        (4, [1, 2, 3], [1, 2, 3, 1]),  # an odd difference leans to the left
        (3, [1, 2, 3], [1, 2, 3]),
        (4, [1, 2], [2, 1, 2, 1]),
        (3, [1], [1, 1, 1]),
    ],
)
def test_the_source_stands_in_the_centre_and_wraps_around(size, source, expected):
    assert torch.tensor(source)[tile_indices(size, len(source))].tolist() == expected


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.integers(1, 40), st.integers(0, 80))
def test_layers_keep_their_order_and_repeat_evenly(num_source, extra):
    layers = layer_map(num_source + extra, num_source)
    counts = torch.tensor(layers).bincount(minlength=num_source)
    assert layers == sorted(layers) and len(layers) == num_source + extra
    assert counts.min() >= 1 and counts.max() - counts.min() <= 1


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_an_equal_configuration_gives_the_identical_model(variant):
    model = lively(shape(**variant))
    same = dict(grow(model, shape(**variant), rescale=True).named_parameters())
    for name, weight in model.named_parameters():
        assert torch.equal(weight, same[name]) and weight.data_ptr() != same[name].data_ptr()


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_doubled_widths_compute_the_same_function_when_rescaled(variant):
    model = lively(shape(**variant))
    larger = grow(model, doubled(variant), rescale=True)
    assert sum(p.numel() for p in larger.parameters()) == larger.config.num_params()
    before, after = (real(m(**some_batch()).logits) for m in (model, larger))
    assert_close(after, before, rtol=0, atol=2e-5)
    raw = real(grow(model, doubled(variant))(**some_batch()).logits)
    assert (raw - before).abs().max() > 0.1  # the comparison can fail


@pytest.mark.parametrize("variant", ["modernbert", "bert"])
@pytest.mark.parametrize("cls", [BertLabForSequenceClassification, BertLabForTokenClassification])
def test_every_head_grows_with_its_encoder(cls, variant):
    task = dict(classifier_head="tanh") if variant == "bert" else {}
    variant = {**VARIANTS[variant], **task}
    model = lively(shape(**variant), cls)
    larger = grow(model, doubled(variant), rescale=True)
    before, after = (m(**some_batch()).logits for m in (model, larger))
    if cls is BertLabForTokenClassification:
        before, after = real(before), real(after)
    assert type(larger) is cls
    assert_close(after, before, rtol=0, atol=2e-5)


@pytest.mark.parametrize("cls", [BertLabForEnhancedMaskedLM, BertLabForQuestionAnswering])
def test_every_weight_of_the_other_heads_has_axes(cls):
    larger = grow(lively(shape(), cls), doubled({}, num_hidden_layers=3), rescale=True)
    assert all(p.isfinite().all() for p in larger.parameters())


@pytest.mark.parametrize("width_factor, inner", [(2, 12), (3, 7)])
def test_each_tile_of_each_matrix_is_its_source(width_factor, inner):
    model, width = lively(shape()), 8 * width_factor
    config = shape(hidden_size=width, num_attention_heads=2 * width_factor, intermediate_size=inner)
    larger = grow(model, config)
    stream = [(j - (width - 8) // 2) % 8 for j in range(width)]
    units = [(j - (inner - 6) // 2) % 6 for j in range(inner)]
    old, new = model.encoder, larger.encoder
    tokens = old.embeddings.tokens.weight[:, stream]
    assert torch.equal(new.embeddings.tokens.weight, tokens)
    assert torch.equal(new.final_norm.weight, old.final_norm.weight[stream])
    for block, source in zip(new.blocks, old.blocks, strict=True):
        value, gate = source.mlp.up_proj.weight.chunk(2)
        rows = torch.cat((value[units], gate[units]))[:, stream]
        assert torch.equal(block.mlp.up_proj.weight, rows)
        assert torch.equal(
            block.mlp.down_proj.weight, source.mlp.down_proj.weight[stream][:, units]
        )


@pytest.mark.parametrize("sources", [[0, 0, 0, 1, 1], [0] * 6 + [1] * 6], ids=len)
def test_layers_of_a_deeper_model_are_copies(sources):
    model = lively(shape())
    larger = grow(model, shape(num_hidden_layers=len(sources)))
    for i, block in enumerate(larger.encoder.blocks):
        source = dict(model.encoder.blocks[sources[i]].named_parameters())
        for name, weight in block.named_parameters():
            if name in source:
                assert torch.equal(weight, source[name]), (i, name)
            else:
                assert name == "pre_attention_norm.weight" and (weight == 1).all()
                assert i > 0 and sources[i] == 0, "only the first layer has no such norm"


def test_jitter_is_relative_noise_on_matrices():
    model = lively(shape(hidden_size=32, num_attention_heads=8))
    config = shape(hidden_size=64, num_attention_heads=16)
    plain, noisy, again = (
        dict(grow(model, config, jitter=jitter).named_parameters()) for jitter in (0, 0.1, 0.1)
    )
    for name, weight in plain.items():
        assert torch.equal(noisy[name], again[name])
        assert torch.equal(noisy[name], weight) == (weight.dim() < 2)
    name = "encoder.blocks.0.attention.qkv.weight"
    noise = (noisy[name] / plain[name] - 1).flatten()
    # 12,288 numbers: mean within 4 standard errors of 0, deviation within 5 % of 0.1
    assert noise.mean().abs() < 4 * 0.1 / noise.numel() ** 0.5
    assert noise.std().item() == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("changes, name", [
    ({"hidden_size": 4, "num_attention_heads": 1}, "hidden_size=4"),
    ({"num_hidden_layers": 1}, "num_hidden_layers=1"),
    ({"hidden_size": 16}, "num_attention_heads=2"),
    ({"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}, "num_key_value_heads=2"),
    ({"vocab_size": V + 1}, f"vocab_size={V + 1} must be {V}"), ({"norm": "rms"}, "norm='rms'"),
    ({"mlp": "plain"}, "mlp='plain'"), ({"num_labels": 5}, "num_labels=5"),
])  # fmt: skip
def test_a_target_that_tiling_cannot_reach_is_named(changes, name):
    with pytest.raises(ValueError, match=name):
        check_growth(shape(), shape(**changes))


def test_names_of_labels_are_those_of_the_model():
    names = {"id2label": {0: "neg", 1: "pos"}, "label2id": {"neg": 0, "pos": 1}}
    model = lively(shape(**names), BertLabForSequenceClassification)
    config = grow(model, doubled({}, id2label={0: "pos", 1: "neg"})).config
    assert (config.id2label, config.label2id) == (names["id2label"], names["label2id"])
