"The shapes of BERT, RoBERTa and ModernBERT in our words and back, and the names of their weights."

import pytest
import transformers
from transformers import BertConfig, ModernBertConfig, RobertaConfig

from bertlab.model.config import BertLabConfig, bert_base, bert_tiny, modernbert_base, modernbert_tiny, roberta_base
from bertlab.model.families import (
    bertlab_config,
    find_kind,
    huggingface_config,
    key_table,
    their_class,
    their_names,
    unread_settings,
)

HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def there_and_back(config: BertLabConfig, kind: str, head: str = "ForMaskedLM") -> BertLabConfig:
    return bertlab_config(huggingface_config(config, kind, head))


# ---- what transformers ships ----------------------------------------------------------------------


def test_the_published_shapes_are_our_presets():
    bert = bertlab_config(BertConfig())
    assert bert.to_diff_dict() == {**bert_base().to_diff_dict(), "pad_token_id": 0}
    ours = bertlab_config(RobertaConfig(max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5))
    special = dict(pad_token_id=1, cls_token_id=0, sep_token_id=2)
    assert ours.to_diff_dict() == roberta_base(**special).to_diff_dict()
    special = dict(pad_token_id=50283, cls_token_id=50281, sep_token_id=50282, classifier_pooling="cls")
    assert bertlab_config(ModernBertConfig()).to_diff_dict() == modernbert_base(**special).to_diff_dict()


@pytest.mark.parametrize(
    "theirs",
    [
        BertConfig(hidden_act="relu", layer_norm_eps=1e-6, hidden_dropout_prob=0.2, classifier_dropout=0.4),
        BertConfig(type_vocab_size=5, attention_probs_dropout_prob=0.0, tie_word_embeddings=False, bos_token_id=7),
        BertConfig(num_labels=5, problem_type="regression", pad_token_id=None, max_position_embeddings=77),
        BertConfig(id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1}, hidden_act="relu2"),
        RobertaConfig(pad_token_id=4, hidden_act="silu", eos_token_id=9),
        RobertaConfig(pad_token_id=0, max_position_embeddings=33, hidden_act="quick_gelu"),
        ModernBertConfig(norm_bias=True, attention_bias=True, mlp_bias=True, classifier_bias=True),
        ModernBertConfig(decoder_bias=False, classifier_activation="relu", classifier_dropout=0.2),
        ModernBertConfig(classifier_pooling="mean", hidden_activation="relu2", classifier_activation="gelu"),
        ModernBertConfig(global_attn_every_n_layers=1, local_attention=7, initializer_cutoff_factor=3.0),
    ],
    ids=lambda c: str({k: v for k, v in c.to_diff_dict().items() if k in c.__annotations__})[:60],
)
@pytest.mark.parametrize("head", HEADS)
def test_their_settings_survive_the_trip(theirs, head):
    back = huggingface_config(bertlab_config(theirs), theirs.model_type, head)
    want = theirs.to_diff_dict()
    want.pop("global_attn_every_n_layers", None)  # said again in layer_types
    assert back.to_diff_dict() == want


@pytest.mark.parametrize(
    "theirs, name",
    [
        (BertConfig(is_decoder=True), "is_decoder=True"),
        (BertConfig(add_cross_attention=True), "add_cross_attention=True"),
        (BertConfig(position_embedding_type="relative_key"), "position_embedding_type='relative_key'"),
        (BertConfig(hidden_act="gelu_new"), "hidden_act='gelu_new'"),
        (RobertaConfig(is_decoder=True), "is_decoder=True"),
        (RobertaConfig(pad_token_id=None), "pad_token_id=None"),
        (RobertaConfig(position_embedding_type="relative_key_query"), "position_embedding_type"),
        (ModernBertConfig(classifier_activation="gelu_new"), "classifier_activation='gelu_new'"),
        (ModernBertConfig(layer_types=["sliding_attention"] * 22), "layer_types"),
        (ModernBertConfig(layer_types=["full_attention"] * 3 + ["sliding_attention"] * 19), "layer_types"),
        (ModernBertConfig(bos_token_id=3), "bos_token_id=3"),
        (ModernBertConfig(sparse_prediction=True), "sparse_prediction=True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_we_have_no_words_for_is_refused_by_name(theirs, name):
    with pytest.raises(ValueError, match=name):
        bertlab_config(theirs)


def test_scaled_rotary_positions_are_refused():
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 160000.0}
    near = {"rope_type": "default", "rope_theta": 10000.0}
    theirs = ModernBertConfig(rope_parameters={"full_attention": rope, "sliding_attention": near})
    with pytest.raises(ValueError, match="rope_parameters"):
        bertlab_config(theirs)


def test_an_unsupported_kind_lists_the_supported_ones():
    for other in (transformers.ElectraConfig(), transformers.XLMRobertaConfig(), modernbert_tiny()):
        with pytest.raises(ValueError, match=f"{other.model_type}.*supported are bert, roberta, modernbert"):
            find_kind(other)


def test_settings_of_decoders_alone_do_not_stop_an_encoder():
    assert bertlab_config(BertConfig(use_cache=False)).to_diff_dict() == bertlab_config(BertConfig()).to_diff_dict()


# ---- what bertlab ships ---------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    "config, kind",
    [
        (bert_tiny(), "bert"),
        (bert_tiny(embedding_dropout=0.3, mlp_dropout=0.2, initialization="kaiming", norm_groups=4), "bert"),
        (bert_tiny(mask_token_id=103, cls_token_id=101, sep_token_id=102, pad_token_id=0), "bert"),
        (bert_tiny(local_attention=6, rope_share=0.5, num_key_value_heads=2, classifier_dropout=0.3), "bert"),
        (bert_tiny(head_activation="gelu", num_labels=7), "bert"),
        (roberta_base(pad_token_id=1, tie_word_embeddings=False), "roberta"),
        (roberta_base(position_offset=1, pad_token_id=0, mask_token_id=5), "roberta"),
        (modernbert_tiny(), "modernbert"),
        (modernbert_tiny(global_attention_every_n_layers=9, num_key_value_heads=3), "modernbert"),
        (modernbert_tiny(head_activation="silu", norm_bias=True, hidden_dropout=0.2), "modernbert"),
        (modernbert_tiny(num_hidden_layers=1, problem_type="regression"), "modernbert"),
    ],
)
def test_our_settings_survive_the_trip_and_a_file(config, kind, head, tmp_path):
    assert there_and_back(config, kind, head).to_diff_dict() == config.to_diff_dict()
    huggingface_config(config, kind, head).save_pretrained(tmp_path)
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(again) is their_class(kind, "Config")
    read = bertlab_config(again).to_diff_dict()
    assert {**read, "transformers_version": 0} == {**config.to_diff_dict(), "transformers_version": 0}


@pytest.mark.parametrize(
    "config, kind, name",
    [
        (bert_tiny(norm="rms"), "bert", "norm='rms'"),
        (bert_tiny(norm="deep"), "bert", "norm='deep'"),
        (bert_tiny(norm_position="pre_and_post"), "bert", "norm_position"),
        (bert_tiny(mlp="glu"), "bert", "mlp='glu'"),
        (bert_tiny(mlp_bias=False), "bert", "mlp_bias=False"),
        (bert_tiny(decoder_bias=False), "bert", "decoder_bias"),
        (bert_tiny(head_activation="relu"), "bert", "head_activation='relu'"),
        (bert_tiny(embedding_norm=False), "bert", "embedding_norm"),
        (bert_tiny(attention_positions="alibi"), "bert", "attention_positions"),
        (bert_tiny(num_key_value_heads=1), "bert", "num_key_value_heads=1"),
        (bert_tiny(global_attention_every_n_layers=2), "bert", "global_attention_every_n_layers=2"),
        (roberta_base(), "roberta", "pad_token_id=None"),
        (roberta_base(pad_token_id=5), "roberta", "pad_token_id=5.*can only be 1"),
        (roberta_base(pad_token_id=1, hidden_activation="relu"), "roberta", "head_activation=None"),
        (bert_tiny(), "modernbert", "attention_positions='none'"),
        (modernbert_tiny(qk_norm=True), "modernbert", "qk_norm=True"),
        (modernbert_tiny(output_gate="head"), "modernbert", "output_gate='head'"),
        (modernbert_tiny(rope_share=0.5), "modernbert", "rope_share=0.5"),
        (modernbert_tiny(type_vocab_size=2), "modernbert", "type_vocab_size=2"),
        (modernbert_tiny(embedding_positions="sinusoidal"), "modernbert", "embedding_positions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_they_have_no_words_for_is_refused_by_name(config, kind, name):
    with pytest.raises(ValueError, match=name):
        huggingface_config(config, kind, "ForMaskedLM")


def test_a_setting_is_refused_only_where_the_head_reads_it():
    mean = bert_tiny(classifier_pooling="mean")
    assert there_and_back(mean, "bert", "ForTokenClassification").classifier_pooling == "mean"
    with pytest.raises(ValueError, match="classifier_pooling='mean'"):
        huggingface_config(mean, "bert", "ForSequenceClassification")
    with pytest.raises(ValueError, match="classifier_head='prediction'"):
        huggingface_config(bert_tiny(classifier_head="prediction"), "bert", "ForTokenClassification")
    assert "decoder_bias" in unread_settings(mean, "Model") - unread_settings(mean, "ForMaskedLM")


def test_settings_that_are_said_in_their_words_are_not_said_twice():
    assert not hasattr(huggingface_config(bert_tiny(pad_token_id=0), "bert", "ForMaskedLM"), "bertlab")
    carried = huggingface_config(bert_tiny(mlp_dropout=0.2), "bert", "ForMaskedLM")
    assert carried.bertlab == {"mlp_dropout": 0.2}


# ---- names ----------------------------------------------------------------------------------------


def test_the_number_of_a_block_is_kept_and_an_unknown_weight_is_refused():
    table = key_table("bert", "ForMaskedLM")
    assert their_names("encoder.blocks.11.mlp.expand.bias", table) == ["bert.encoder.layer.11.intermediate.dense.bias"]
    start = "bert.encoder.layer.3.attention.self"
    assert their_names("encoder.blocks.3.attention.qkv.weight", table) == [
        f"{start}.{part}.weight" for part in ("query", "key", "value")
    ]
    for unknown in ("encoder.blocks.0.attention.q_norm.weight", "head", "blocks.0.mlp.expand.weight"):
        with pytest.raises(ValueError, match=unknown):
            their_names(unknown, table)
