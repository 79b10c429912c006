"The configuration: groups of settings, counts before building, presets, refusals."

import copy
import pickle
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    BertConfig,
    BertForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)
from torch.utils.flop_counter import FlopCounterMode
from transformers.configuration_utils import PretrainedConfig

from bertlab.model.config import (
    CHOICES,
    SPECIAL_TOKEN_IDS,
    BertLabConfig,
    bert_base,
    bert_large,
    bert_tiny,
    training_flops_per_token,
    count_parameters,
    modernbert_base,
    modernbert_large,
    modernbert_tiny,
    neobert,
    roberta_base,
)
from bertlab.model.heads import BertLabForMaskedLM

PRESETS = (
    modernbert_tiny,
    modernbert_base,
    modernbert_large,
    bert_tiny,
    bert_base,
    bert_large,
    roberta_base,
    neobert,
)
OWN = [
    field.name
    for field in fields(BertLabConfig)
    if field.name not in {f.name for f in fields(PretrainedConfig)}
]
# Every setting away from its default, and all of them together a model that can be built.
OTHER = dict(
    vocab_size=50, hidden_size=24, max_position_embeddings=16, embedding_positions="learned",
    position_offset=2, type_vocab_size=3, embedding_norm=False, embedding_dropout=0.1,
    tie_word_embeddings=False, head_activation="relu", head_bias=True, decoder_bias=False,
    classifier_pooling="cls", classifier_head="tanh", mlm_head="linear", classifier_dropout=0.1, pad_token_id=0,
    cls_token_id=2, sep_token_id=3, mask_token_id=4, num_attention_heads=6, num_key_value_heads=3,
    attention_positions="alibi", global_rope_theta=500.0, local_rope_theta=100.0, partial_rotary_factor=0.5,
    rope_scaling={"rope_type": "linear", "factor": 2.0}, is_causal=True, family="bert", global_attention_every_n_layers=2, local_attention=6, attention_bias=True, qk_norm=True,
    output_gate="head", attention_dropout=0.1, num_hidden_layers=3, intermediate_size=20,
    mlp="plain", hidden_activation="silu", mlp_bias=True, mlp_dropout=0.1, hidden_dropout=0.1,
    norm="deep", norm_position="post", norm_bias=True, residual_in_fp32=False, norm_eps=1e-6, norm_groups=4,
    initialization="xavier", initializer_range=0.05, initializer_cutoff_factor=3.0,
)  # fmt: skip


SWITCHES = [name for name, value in OTHER.items() if isinstance(value, bool)]


def small(**overrides) -> BertLabConfig:
    shape = dict(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=20,
        num_attention_heads=6,
        num_hidden_layers=4,
    )
    return modernbert_tiny(**{**shape, "local_attention": 4, **overrides})


def built(config: BertLabConfig) -> BertLabForMaskedLM:
    "The model's shapes without its memory."
    with torch.device("meta"):
        return BertLabForMaskedLM(config)


def size(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# ---- settings ---------------------------------------------------------------------------------


def test_every_setting_survives_a_file_a_copy_and_a_pickle(tmp_path):
    assert sorted(OTHER) == sorted(OWN) and modernbert_base() == BertLabConfig()
    config, default = BertLabConfig(**OTHER), BertLabConfig()
    assert all(getattr(config, name) != getattr(default, name) for name in OWN)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    for restored in (loaded, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert type(restored) is BertLabConfig
        assert {name: getattr(restored, name) for name in OWN} == OTHER
        assert restored.to_diff_dict() == config.to_diff_dict()


@pytest.mark.parametrize("every, want", [(1, "ffff"), (2, "fsfs"), (3, "fssf"), (5, "fsss")])
def test_layer_types_by_hand(every, want):
    layer_types = small(global_attention_every_n_layers=every).layer_types
    assert "".join(layer_type[0] for layer_type in layer_types) == want


def test_sizes_that_follow_by_hand():
    config = small(num_key_value_heads=2, local_attention=7, partial_rotary_factor=0.5)
    assert (config.head_dim, config.num_kv_heads, config.window, config.rotary_dim) == (
        4,
        2,
        3,
        2,
    )
    assert small().num_kv_heads == 6


# ---- presets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.__name__)
def test_a_preset_predicts_the_size_of_the_model_that_is_built(preset):
    assert preset().num_params() == size(built(preset()))


LARGE = dict(hidden_size=1024, num_attention_heads=16)


@pytest.mark.parametrize("preset, model, config", [
    (bert_base, BertForMaskedLM, BertConfig()),
    (bert_large, BertForMaskedLM, BertConfig(**LARGE, num_hidden_layers=24, intermediate_size=4096)),
    (roberta_base, RobertaForMaskedLM, RobertaConfig(
        vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5)),
    (modernbert_large, ModernBertForMaskedLM, ModernBertConfig(
        **LARGE, num_hidden_layers=28, intermediate_size=2624)),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_a_preset_has_the_size_that_transformers_builds(preset, model, config):
    with torch.device("meta"):
        assert preset().num_params() == size(model(config))
    assert preset().num_attention_heads == config.num_attention_heads


def test_neobert_by_the_numbers_of_its_paper():
    table, layer = 30522 * 768, 4 * 768**2 + 3 * 768 * 2048 + 2 * 768
    published = 2 * table + 30522 + 28 * layer + 768  # its head is the decoder and its bias
    assert neobert().num_params() == published
    assert 240e6 < published < 255e6  # "250M"


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.__name__)
def test_a_preset_can_be_overridden(preset):
    config = preset(vocab_size=77, num_attention_heads=1, num_hidden_layers=1, mask_token_id=4)
    assert (config.vocab_size, config.num_attention_heads, config.num_hidden_layers) == (77, 1, 1)
    assert config.mask_token_id == 4
    assert all(getattr(preset(), name) is None for name in SPECIAL_TOKEN_IDS)
    with pytest.raises(ValueError, match="hiden_size.*hidden_size"):
        preset(hiden_size=64)


# ---- counts ----------------------------------------------------------------------------------

shapes = st.fixed_dictionaries(
    dict(
        vocab_size=st.integers(1, 60),
        max_position_embeddings=st.integers(1, 9),
        position_offset=st.integers(0, 3),
        type_vocab_size=st.integers(0, 3),
        intermediate_size=st.integers(1, 30),
        num_hidden_layers=st.integers(1, 4),
        num_key_value_heads=st.sampled_from([None, 1, 2, 3, 6]),
        norm=st.sampled_from(["layer", "rms", "group", "dynamic_tanh"]),
        **{name: st.sampled_from(CHOICES[name]) for name in CHOICES if name != "norm"},
        **{name: st.booleans() for name in SWITCHES if name != "residual_in_fp32"},
    )
)


@given(shapes)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_parts_of_the_count_are_the_parts_of_any_model(shape):
    config = small(**shape)
    parts = dict.fromkeys(count_parameters(config), 0)
    for name, p in built(config).named_parameters():
        if "attention." in name:
            key = "attention"
        elif "norm" in name:
            key = "norms"
        else:
            key = "MLP" if ".mlp." in name else "embedding" if "embeddings." in name else "head"
        parts[key] += p.numel()
    assert count_parameters(config) == parts
    assert config.num_params() == sum(parts.values())


@pytest.mark.parametrize("shape", [
    dict(), dict(output_gate="head"), dict(output_gate="element", num_key_value_heads=1),
    dict(mlp="plain", norm_position="post", attention_positions="none", embedding_positions="learned"),
    dict(tie_word_embeddings=False, attention_bias=True, mlp_bias=True, qk_norm=True),
], ids=str)  # fmt: skip
def test_flops_equal_what_torch_counts_for_a_dense_head(shape):
    config = small(attn_implementation="eager", global_attention_every_n_layers=1, **shape)
    ids = torch.arange(16).view(2, 8)
    with FlopCounterMode(display=False) as counter:
        BertLabForMaskedLM(config)(ids, labels=ids).loss.backward()
    assert counter.get_total_flops() / 16 == config.flops_per_token(mean_context=8, label_rate=1.0)


@pytest.mark.parametrize("mean_context, label_rate", [(0.5, 0.3), (8, 1.5), (8, -0.1)])
def test_costs_are_of_contexts_and_rates(mean_context, label_rate):
    with pytest.raises(ValueError, match="mean_context=0.5|label_rate="):
        training_flops_per_token(small(), mean_context, label_rate)


# ---- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value", [(name, value) for name in CHOICES for value in CHOICES[name]]
)
def test_every_choice_builds_a_model(name, value):
    norm_options = {"norm_position": "post"} if value == "deep" else {}
    model = BertLabForMaskedLM(small(**{name: value}, **norm_options))
    assert model(torch.arange(5)[None]).logits.isfinite().all()


@pytest.mark.parametrize("shape", [
    dict(hidden_size=25), dict(partial_rotary_factor=0.75), dict(partial_rotary_factor=1.5),
    dict(num_key_value_heads=4), dict(global_attention_every_n_layers=0), dict(local_attention=1),
    dict(norm="deep"), dict(norm_groups=5, norm="group"), dict(norm_eps=float("nan")),
    dict(residual_in_fp32=False), dict(hidden_dropout=1.0), dict(mask_token_id=50), dict(rotary=True),
    dict(rope_scaling={"rope_type": "linear"}), dict(rope_scaling={"rope_type": "ntk"}),
    *({name: "unheard_of"} for name in CHOICES),
])  # fmt: skip
def test_settings_that_do_not_fit_are_named(shape):
    with pytest.raises(ValueError) as refusal:
        small(**shape)
    assert next(iter(shape)) in str(refusal.value)


OTHER_NAMES = dict(num_blocks=3, norm_fn="rms", norm_kind="post", actv_fn="silu",
                   mlp_type="plain", max_sequence_length=77)  # fmt: skip


def test_bertblocks_names_are_understood(tmp_path):
    config = BertLabConfig(**OTHER_NAMES)
    assert {name: getattr(config, name) for name in OTHER_NAMES} == OTHER_NAMES
    assert (config.num_hidden_layers, config.norm, config.mlp) == (3, "rms", "plain")
    config.save_pretrained(tmp_path)
    assert BertLabConfig.from_pretrained(tmp_path).to_diff_dict() == config.to_diff_dict()
    with pytest.raises(ValueError, match="norm_kind|norm_position"):
        BertLabConfig(norm_kind="behind")
