"BERT, RoBERTa and ModernBERT in and out: settings, names, weights, and the directory that loads without bertlab."

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertForPreTraining,
    BertLMHeadModel,
    BertModel,
    ElectraConfig,
    ElectraForMaskedLM,
    ModernBertForMaskedLM,
    PreTrainedTokenizerFast,
)

from bertlab.model.config import (
    BertLabConfig,
    bert_base,
    bert_tiny,
    modernbert_base,
    modernbert_tiny,
    roberta_base,
)
from bertlab.data.tokenizers import load_tokenizer
from bertlab.model.context import extend_context
from bertlab.model.huggingface import (
    ARCHITECTURES,
    BertLabModelWithPooler,
    from_huggingface,
    merged_copy,
    save_model,
    saved_as,
    to_huggingface,
)
from bertlab.model.families import (
    FAMILIES,
    key_table,
    their_names,
    to_bertlab_config,
    to_family_config,
    unused_settings,
)
from bertlab.model.encoder import BertLabModel
from bertlab.model.heads import (
    BertLabForEnhancedMaskedLM,
    BertLabForMaskedLM,
)
from bertlab.model.task_heads import BertLabForQuestionAnswering

torch.set_num_threads(1)
TOLERANCE = dict(rtol=0, atol=1e-5)
B, L, V = 4, 24, 50
SHAPE = dict(vocab_size=V, hidden_size=16, intermediate_size=20, num_attention_heads=2)
SPECIAL = dict(pad_token_id=0, cls_token_id=2, bos_token_id=2, sep_token_id=3, eos_token_id=3)
OTHERS = {  # what makes each kind differ from its defaults
    "bert": dict(num_hidden_layers=3, max_position_embeddings=L),
    "roberta": dict(num_hidden_layers=3, max_position_embeddings=L + 2),
    "modernbert": dict(num_hidden_layers=7, local_attention=6, **SPECIAL),
}
MODEL_KINDS = list(OTHERS)


@pytest.fixture(autouse=True)
def same_start_for_every_test():
    torch.manual_seed(0)


def lively(model):
    "Move every weight away from its start, norms and biases too, so that nothing hides."
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return model.eval()


def ours(**overrides) -> BertLabForMaskedLM:
    return lively(
        BertLabForMaskedLM(modernbert_tiny(**{**SHAPE, "local_attention": 6, **overrides}))
    )


def theirs(kind="modernbert", head="ForMaskedLM", **overrides):
    labels = dict(num_labels=3) if head.endswith("Classification") else {}
    config = FAMILIES[kind].get_class("Config")(**{**SHAPE, **OTHERS[kind], **labels, **overrides})
    return lively(FAMILIES[kind].get_class(head)(config))


def padded_rows(pad=0):
    "Ids and a 0/1 mask: no padding, right, left, one token."
    ids = torch.randint(5, V, (B, L), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(B, L, dtype=torch.long)
    mask[1, 15:], mask[2, :9], mask[3, 1:] = 0, 0, 0
    return ids.masked_fill(mask == 0, pad), mask


def batches(kind, pad=None):
    "The same rows for their model and for ours; BERT must be told where a left-padded text begins."
    ids, mask = padded_rows({"roberta": 1}.get(kind, 0) if pad is None else pad)
    batch = dict(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    if kind != "bert":
        return batch, batch
    batch["token_type_ids"] = torch.randint(
        0, 2, (B, L), generator=torch.Generator().manual_seed(2)
    )
    return {**batch, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}, batch


def assert_same_outputs(want, got, mask, skip_pooled=()):
    assert set(want) == set(got)
    for name in want:
        pairs = (
            zip(want[name], got[name], strict=True)
            if name == "hidden_states"
            else [(want[name], got[name])]
        )
        for a, b in pairs:
            if a.shape[:2] == mask.shape:
                a, b = a[mask.bool()], b[mask.bool()]
            else:  # one vector a row
                rows = [i for i in range(len(a)) if i not in skip_pooled]
                a, b = a[rows], b[rows]
            torch.testing.assert_close(b, a, **TOLERANCE)


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + [f"w{i}" for i in range(V - 5)]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")
    names["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]  # as BERT's
    return PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]", **names)


def there_and_back(config: BertLabConfig, kind: str, head: str = "ForMaskedLM") -> BertLabConfig:
    return to_bertlab_config(to_family_config(config, kind, head))


# ---- settings: what transformers ships ----------------------------------------------------------------------


def test_the_published_shapes_are_our_presets():
    bert = to_bertlab_config(transformers.BertConfig())
    assert bert.to_diff_dict() == bert_base(pad_token_id=0, family="bert").to_diff_dict()
    ours = to_bertlab_config(
        transformers.RobertaConfig(
            max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5
        )
    )
    special = dict(pad_token_id=1, cls_token_id=0, sep_token_id=2, family="roberta")
    assert ours.to_diff_dict() == roberta_base(**special).to_diff_dict()
    special = dict(
        pad_token_id=50283,
        cls_token_id=50281,
        sep_token_id=50282,
        classifier_pooling="cls",
        family="modernbert",
    )
    assert (
        to_bertlab_config(transformers.ModernBertConfig()).to_diff_dict()
        == modernbert_base(**special).to_diff_dict()
    )


@pytest.mark.parametrize(
    "theirs",
    [
        transformers.BertConfig(
            hidden_act="relu", layer_norm_eps=1e-6, hidden_dropout_prob=0.2, classifier_dropout=0.4
        ),
        transformers.BertConfig(
            type_vocab_size=5,
            attention_probs_dropout_prob=0.0,
            tie_word_embeddings=False,
            bos_token_id=7,
        ),
        transformers.BertConfig(
            num_labels=5, problem_type="regression", pad_token_id=None, max_position_embeddings=77
        ),
        transformers.BertConfig(
            id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1}, hidden_act="relu2"
        ),
        transformers.RobertaConfig(pad_token_id=4, hidden_act="silu", eos_token_id=9),
        transformers.RobertaConfig(
            pad_token_id=0, max_position_embeddings=33, hidden_act="quick_gelu"
        ),
        transformers.ModernBertConfig(
            norm_bias=True, attention_bias=True, mlp_bias=True, classifier_bias=True
        ),
        transformers.ModernBertConfig(
            decoder_bias=False, classifier_activation="relu", classifier_dropout=0.2
        ),
        transformers.ModernBertConfig(
            classifier_pooling="mean", hidden_activation="relu2", classifier_activation="gelu"
        ),
        transformers.ModernBertConfig(
            global_attn_every_n_layers=1, local_attention=7, initializer_cutoff_factor=3.0
        ),
    ],
    ids=lambda c: str({k: v for k, v in c.to_diff_dict().items() if k in c.__annotations__})[:60],
)
@pytest.mark.parametrize("head", ARCHITECTURES)
def test_their_settings_survive_the_trip(theirs, head):
    back = to_family_config(to_bertlab_config(theirs), theirs.model_type, head)
    want = theirs.to_diff_dict()
    want.pop("global_attn_every_n_layers", None)  # said again in layer_types
    assert back.to_diff_dict() == want


@pytest.mark.parametrize(
    "theirs, name",
    [
        (transformers.BertConfig(is_decoder=True), "is_decoder=True"),
        (transformers.BertConfig(add_cross_attention=True), "add_cross_attention=True"),
        (
            transformers.BertConfig(position_embedding_type="relative_key"),
            "position_embedding_type='relative_key'",
        ),
        (transformers.BertConfig(hidden_act="gelu_new"), "gelu_new"),
        (transformers.RobertaConfig(is_decoder=True), "is_decoder=True"),
        (transformers.RobertaConfig(pad_token_id=None), "pad_token_id=None"),
        (
            transformers.RobertaConfig(position_embedding_type="relative_key_query"),
            "position_embedding_type",
        ),
        (
            transformers.ModernBertConfig(classifier_activation="gelu_new"),
            "gelu_new",
        ),
        (transformers.ModernBertConfig(layer_types=["sliding_attention"] * 22), "layer_types"),
        (
            transformers.ModernBertConfig(
                layer_types=["full_attention"] * 3 + ["sliding_attention"] * 19
            ),
            "layer_types",
        ),
        (transformers.ModernBertConfig(bos_token_id=3), "token_id="),
        (transformers.ModernBertConfig(sparse_prediction=True), "sparse_prediction=True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_we_have_no_words_for_is_refused_by_name(theirs, name):
    with pytest.raises(ValueError, match=name):
        to_bertlab_config(theirs)


def test_what_no_family_has_is_refused_by_name():
    with pytest.raises(ValueError, match="deberta-v2.*supported are bert, roberta"):
        to_bertlab_config(transformers.DebertaV2Config())
    with pytest.raises(ValueError, match="_size="):
        to_bertlab_config(transformers.ElectraConfig())
    with pytest.raises(ValueError, match="ForSequenceClassification"):
        to_bertlab_config(transformers.EuroBertConfig(), "ForSequenceClassification")


# ---- settings: what bertlab ships ---------------------------------------------------------------------------


@pytest.mark.parametrize("head", ARCHITECTURES)
@pytest.mark.parametrize(
    "config, kind",
    [
        (bert_tiny(), "bert"),
        (
            bert_tiny(
                embedding_dropout=0.3, mlp_dropout=0.2, initialization="kaiming", norm_groups=4
            ),
            "bert",
        ),
        (bert_tiny(mask_token_id=103, cls_token_id=101, sep_token_id=102, pad_token_id=0), "bert"),
        (
            bert_tiny(
                local_attention=6,
                partial_rotary_factor=0.5,
                num_key_value_heads=2,
                classifier_dropout=0.3,
            ),
            "bert",
        ),
        (bert_tiny(head_activation="gelu", num_labels=7), "bert"),
        (bert_tiny(residual_in_fp32=False), "bert"),
        (roberta_base(pad_token_id=1, tie_word_embeddings=False), "roberta"),
        (roberta_base(position_offset=1, pad_token_id=0, mask_token_id=5), "roberta"),
        (modernbert_tiny(), "modernbert"),
        (modernbert_tiny(global_attention_every_n_layers=9, num_key_value_heads=3), "modernbert"),
        (modernbert_tiny(head_activation="silu", norm_bias=True, hidden_dropout=0.2), "modernbert"),
        (modernbert_tiny(num_hidden_layers=1, problem_type="regression"), "modernbert"),
    ],
)
def test_our_settings_survive_the_trip_and_a_file(config, kind, head, tmp_path):
    config.family = kind
    assert there_and_back(config, kind, head).to_diff_dict() == config.to_diff_dict()
    to_family_config(config, kind, head).save_pretrained(tmp_path)
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(again) is FAMILIES[kind].get_class("Config")
    read = to_bertlab_config(again).to_diff_dict()
    assert {**read, "transformers_version": 0} == {
        **config.to_diff_dict(),
        "transformers_version": 0,
    }


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
        (roberta_base(pad_token_id=5), "roberta", "pad_token_id=5.*is 1"),
        (roberta_base(pad_token_id=1, hidden_activation="relu"), "roberta", "head_activation=None"),
        (bert_tiny(), "modernbert", "attention_positions='none'"),
        (modernbert_tiny(qk_norm=True), "modernbert", "qk_norm=True"),
        (modernbert_tiny(output_gate="head"), "modernbert", "output_gate='head'"),
        (modernbert_tiny(partial_rotary_factor=0.5), "modernbert", "partial_rotary_factor=0.5"),
        (modernbert_tiny(type_vocab_size=2), "modernbert", "type_vocab_size=2"),
        (modernbert_tiny(embedding_positions="sinusoidal"), "modernbert", "embedding_positions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_they_have_no_words_for_is_refused_by_name(config, kind, name):
    with pytest.raises(ValueError, match=name):
        to_family_config(config, kind, "ForMaskedLM")


def test_a_setting_is_refused_only_where_the_head_reads_it():
    mean = bert_tiny(classifier_pooling="mean")
    assert there_and_back(mean, "bert", "ForTokenClassification").classifier_pooling == "mean"
    with pytest.raises(ValueError, match="classifier_pooling='mean'"):
        to_family_config(mean, "bert", "ForSequenceClassification")
    with pytest.raises(ValueError, match="classifier_head='prediction'"):
        to_family_config(bert_tiny(classifier_head="prediction"), "bert", "ForTokenClassification")
    assert "decoder_bias" in unused_settings(mean, "Model") - unused_settings(mean, "ForMaskedLM")


# ---- names ----------------------------------------------------------------------------------------


def test_names_of_weights_by_hand():
    table = key_table("bert", "ForMaskedLM")
    assert their_names("encoder.blocks.11.mlp.up_proj.bias", table) == [
        "bert.encoder.layer.11.intermediate.dense.bias"
    ]
    start = "bert.encoder.layer.3.attention.self"
    assert their_names("encoder.blocks.3.attention.qkv.weight", table) == [
        f"{start}.{part}.weight" for part in ("query", "key", "value")
    ]
    for unknown in (
        "encoder.blocks.0.attention.q_norm.weight",
        "head",
        "blocks.0.mlp.up_proj.weight",
    ):
        with pytest.raises(KeyError):
            their_names(unknown, table)


# ---- parity and round trip ---------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ARCHITECTURES)
@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_every_head_computes_the_same_and_comes_back_whole(kind, head, tied):
    original = theirs(kind, head, tie_word_embeddings=tied)
    copy = from_huggingface(original)
    batch, own = batches(kind)
    mask = batch["attention_mask"]
    # transformers takes place 0 of a row for its first token, also where that is padding (row 2).
    pooled_at_padding = {"skip_pooled": (2,)}
    with torch.no_grad():
        want = original(**batch)
        assert_same_outputs(want, copy(**own), mask, **pooled_at_padding)
        back = to_huggingface(copy)
        assert_same_outputs(want, back(**batch), mask)
        single = {k: v[:1] if torch.is_tensor(v) else v for k, v in own.items()}
        assert_same_outputs(original(**single), copy(**single), mask[:1])
    assert type(back) is type(original)
    assert back.config.to_diff_dict() == original.config.to_diff_dict()
    state = back.state_dict()
    assert state.keys() == original.state_dict().keys()
    for name, weight in original.state_dict().items():
        if not tied and name in ("cls.predictions.bias", "lm_head.bias"):
            continue  # untied: a copy beside the bias, which no forward pass reads
        assert torch.equal(state[name], weight), name
    again = from_huggingface(back)
    assert again.config.to_diff_dict() == copy.config.to_diff_dict()
    assert all(torch.equal(again.state_dict()[k], w) for k, w in copy.state_dict().items())


@pytest.mark.parametrize(
    "overrides",
    [
        dict(local_attention=2),  # one neighbour on each side
        dict(local_attention=7),  # an odd window is rounded down
        dict(local_attention=128),  # wider than the row
        dict(global_attn_every_n_layers=1),
        dict(num_hidden_layers=1),
        dict(num_hidden_layers=2, global_attn_every_n_layers=5),
        dict(hidden_activation="silu", classifier_activation="silu"),
        dict(global_rope_theta=500.0, local_rope_theta=50.0),
        dict(norm_bias=True, attention_bias=True),
        dict(mlp_bias=True, classifier_bias=True, classifier_activation="relu"),
        dict(decoder_bias=False),
        dict(classifier_pooling="mean"),
    ],
    ids=str,
)
@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification"])
def test_modernbert_with_other_settings_computes_the_same(overrides, head):
    original = theirs("modernbert", head, **overrides)
    copy, (batch, own) = from_huggingface(original), batches("modernbert")
    with torch.no_grad():
        want, mask = original(**batch), batch["attention_mask"]
        by_first = overrides.get("classifier_pooling") != "mean"
        assert_same_outputs(want, copy(**own), mask, skip_pooled=(2,) if by_first else ())
        assert torch.equal(to_huggingface(copy)(**batch).logits[0], want.logits[0])


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_gradients_equal_those_of_transformers(kind):
    original = theirs(kind)
    copy, (batch, own) = from_huggingface(original), batches(kind)
    labels = torch.where(batch["attention_mask"] > 0, batch["input_ids"].roll(1), -100)
    original(**batch, labels=labels).loss.backward()
    copy(**own, labels=labels).loss.backward()
    gradients = {name: p.grad for name, p in copy.named_parameters()}
    known = {name: p.grad for name, p in original.named_parameters()}
    if kind != "modernbert":  # a tied bias has its gradient under its second name
        stem = {"bert": "cls.predictions", "roberta": "lm_head"}[kind]
        known[f"{stem}.decoder.bias"] = known.pop(f"{stem}.bias")
    pad = original.config.pad_token_id
    table = key_table(kind, "ForMaskedLM")
    for name in gradients:
        want = torch.cat([known[their] for their in their_names(name, table)])
        if name.endswith(("tokens.weight", "positions.weight")):  # theirs freeze the padding's row
            want, gradients[name] = (
                torch.cat((g[:pad], g[pad + 1 :])) for g in (want, gradients[name])
            )
        torch.testing.assert_close(gradients[name], want, **TOLERANCE)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("head", ARCHITECTURES)
def test_a_roberta_with_another_padding_is_written_as_a_bert(head, adapted, tmp_path):
    "Its [UNK] has the id 1, which RoBERTa in transformers takes for padding when it counts positions."
    model = from_huggingface(theirs("roberta", head))
    if adapted:
        adapters = pytest.importorskip("bertlab.model.adapters")
        lively(adapters.add_adapter(model, "lora") and model)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    settings, own = model.config.to_dict(), tokenizer()
    save_model(model, own, tmp_path)
    assert model.config.to_dict() == settings
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in before.items())
    again = FAMILIES["bert"].get_class(head).from_pretrained(tmp_path).eval()
    said = [
        getattr(again.config, f"{name}_token_id") for name in ("pad", "bos", "eos", "cls", "sep")
    ]
    assert said == [own.pad_token_id, 2, 3, 2, 3]
    ids, mask = padded_rows()
    ids[0, 3:6], mask[2] = 1, 1  # their BERT numbers from the start of the row
    ids[2, :9] = 7
    with torch.no_grad():
        want, got = model(ids, mask), again(ids, attention_mask=mask)
    assert_same_outputs({k: v for k, v in want.items() if v is not None}, got, mask)
    assert type(again).__name__ in saved_as(model, tokenizer=own)
    assert "padding id is 0" in saved_as(model, tokenizer=own)
    back = from_huggingface(tmp_path)
    assert back.config.position_offset == 0 and back.config.max_position_embeddings == L


def test_family_roberta_refuses_another_padding(tmp_path):
    model = from_huggingface(theirs("roberta"))
    with pytest.raises(ValueError, match="id 1, and the tokenizer's is 0: leave family out"):
        save_model(model, tokenizer(), tmp_path / "a", family="roberta")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_converted_model_packs_exactly(kind):
    original, (ids, _) = theirs(kind), padded_rows(1)
    copy, ids = from_huggingface(original), ids[:1].clamp(min=5)
    documents = torch.tensor([[1] * 7 + [2] * 1 + [3] * 14 + [0] * 2])
    packed = copy(ids, documents).logits
    for begin, end in ((0, 7), (7, 8), (8, 22)):
        alone = original(input_ids=ids[:, begin:end]).logits
        torch.testing.assert_close(packed[:, begin:end], alone, **TOLERANCE)
    leaking = copy(ids, documents.clamp(max=1)).logits  # without document numbers
    assert (leaking - packed)[:, :22].abs().max() > 1e-2


def test_packed_rows_equal_transformers_with_explicit_masks():
    copy = ours()
    original, ids = to_huggingface(copy), padded_rows()[0]
    documents = torch.tensor([[1] * 7 + [2] * 16 + [3] * 1] * B)
    positions = torch.tensor([[*range(7), *range(16), 0]] * B)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    near = (torch.arange(L)[:, None] - torch.arange(L)).abs() <= 3
    masks = {"full_attention": same, "sliding_attention": same & near}
    want = original(input_ids=ids, attention_mask=masks, position_ids=positions).logits
    torch.testing.assert_close(copy(ids, documents).logits, want, **TOLERANCE)


# ---- weights that must not get lost ---------------------------------------------------------------


@pytest.mark.parametrize("copied", [to_huggingface, merged_copy])
def test_a_copy_shares_no_memory_with_its_original(copied):
    model = ours()
    copy = copied(model)
    before = {name: weight.clone() for name, weight in copy.state_dict().items()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(7)
    assert all(torch.equal(weight, before[name]) for name, weight in copy.state_dict().items())


def test_a_decoder_that_claims_to_be_tied_and_is_not_is_refused():
    original = theirs("bert", tie_word_embeddings=False)
    original.config.tie_word_embeddings = True
    with pytest.raises(ValueError, match="1 unexpected .cls.predictions.decoder.weight"):
        from_huggingface(original)


def test_a_weight_missing_or_left_over_is_named():
    original = theirs("bert")
    original.register_parameter("adapter", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match=r"1 unexpected \(adapter\)"):
        from_huggingface(original)
    original = theirs("bert")
    del original.bert.encoder.layer[1].attention.self.key.bias
    with pytest.raises(ValueError, match=r"1 missing \(encoder.blocks.1.attention.qkv.bias\)"):
        from_huggingface(original)


def test_a_pooler_is_kept_where_there_is_one():
    config = theirs("bert").config
    for pooler in (True, False):
        original = lively(BertModel(config, add_pooling_layer=pooler))
        copy = from_huggingface(original)
        assert type(copy) is (BertLabModelWithPooler if pooler else BertLabModel)
        assert to_huggingface(copy).state_dict().keys() == original.state_dict().keys()
    assert to_huggingface(BertLabModel(bert_tiny(**SHAPE))).pooler is None


def test_a_pooled_model_can_be_saved_and_packed(tmp_path):
    model = lively(BertLabModelWithPooler(bert_tiny(**SHAPE)))
    model.save_pretrained(tmp_path)
    ids, mask = padded_rows()
    again = BertLabModelWithPooler.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids, mask).pooler_output, model(ids, mask).pooler_output)
    assert torch.equal(model(ids, mask, return_dict=False)[1], model(ids, mask).pooler_output)


# ---- what is requested for ----------------------------------------------------------------------------


def test_models_without_a_counterpart_are_refused(tmp_path):
    electra = ElectraForMaskedLM(ElectraConfig(**SHAPE, num_hidden_layers=1, embedding_size=8))
    electra.save_pretrained(tmp_path / "electra")
    for source in (electra, tmp_path / "electra"):
        with pytest.raises(ValueError, match="_size="):
            from_huggingface(source)
    for cls in (BertForPreTraining, BertLMHeadModel):
        with pytest.raises(ValueError, match="head that no family has"):
            from_huggingface(cls(theirs("bert").config))
    with pytest.raises(ValueError, match="head that no family has"):
        to_huggingface(BertLabForEnhancedMaskedLM(modernbert_tiny(**SHAPE)))
    with pytest.raises(ValueError, match="family 'bort' is unknown; choose one of bert"):
        to_huggingface(ours(), "bort")
    with pytest.raises(ValueError, match="num_labels=3"):
        to_huggingface(BertLabForQuestionAnswering(bert_tiny(**SHAPE, num_labels=3)))


@pytest.mark.parametrize(
    "head", ["ForMaskedLM", "Model", "ForPreTraining", "ForSequenceClassification"]
)
@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_without_a_named_class_the_weights_tell_of_the_head(kind, head, tmp_path):
    if head == "ForPreTraining" and kind != "bert":
        return  # a head of BERT alone
    original = lively(FAMILIES[kind].get_class(head)(theirs(kind).config)).eval()
    original.save_pretrained(tmp_path)
    rewrite_config(tmp_path, architectures="gone")
    result, ids = from_huggingface(tmp_path), torch.randint(5, V, (2, 8))
    if head in ("ForMaskedLM", "ForPreTraining"):
        logits = (
            original(ids).prediction_logits if head == "ForPreTraining" else original(ids).logits
        )
        torch.testing.assert_close(result(ids).logits, logits, **TOLERANCE)
    else:
        assert isinstance(result, BertLabModel)


# ---- the directory ---------------------------------------------------------------------------

READER = """
import json, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "bertlab": raise ImportError("bertlab is not installed here")
sys.meta_path.insert(0, Refuse())
try: import bertlab
except ImportError: pass
else: raise SystemExit("bertlab is there")
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1])
batch = tokenizer(["w1 w2 [MASK] w4", "w7 [MASK]"], padding=True, return_tensors="pt")
with torch.no_grad(): logits = model(**batch).logits
best = pipeline("fill-mask", sys.argv[1])("w1 w2 [MASK] w4", top_k=3)
print(json.dumps(dict(
    kind=type(model).__name__, keys=sorted(batch), logits=logits.tolist(),
    best=[(b["token_str"], b["score"]) for b in best],
)))
"""


def read_elsewhere(directory) -> dict:
    "What plain transformers finds in a directory, in a process that cannot import bertlab."
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", READER, str(directory)],
        capture_output=True, text=True, cwd=directory, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    model, directory = ours(), tmp_path_factory.mktemp("saved") / "new" / "model"
    assert save_model(model, tokenizer(), directory) == directory
    return model, directory


def test_a_directory_loads_without_bertlab(saved):
    model, directory = saved
    result = read_elsewhere(directory)
    assert result["kind"] == "ModernBertForMaskedLM"
    assert result["keys"] == ["attention_mask", "input_ids"]
    batch = tokenizer()(["w1 w2 [MASK] w4", "w7 [MASK]"], padding=True, return_tensors="pt")
    assert "token_type_ids" in batch  # our model takes them, ModernBERT has none
    real = batch["attention_mask"].bool()
    logits = model(**batch).logits
    torch.testing.assert_close(torch.tensor(result["logits"])[real], logits[real], **TOLERANCE)
    top = logits[0, 3].softmax(-1).topk(3)
    names = [tokenizer().decode([i]) for i in top.indices]
    assert [word for word, _ in result["best"]] == names
    scores = torch.tensor([score for _, score in result["best"]])
    torch.testing.assert_close(scores, top.values, **TOLERANCE)


def test_saving_leaves_the_owner_everything_as_it_was(saved, tmp_path):
    model, own = ours().train(), tokenizer()
    before = list(own.model_input_names)
    (tmp_path / "notes.txt").write_text("mine")
    save_model(model, own, tmp_path)
    assert own.model_input_names == before and model.training
    assert model.config.mask_token_id is None
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in saved[1].iterdir()} | {
        "notes.txt"
    }


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_weights_are_read_by_whoever_reads_the_other_files(mask, mode, tmp_path):
    before = os.umask(mask)
    try:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "notes.txt").write_text("mine")
        for place in (tmp_path / "new", tmp_path / "run"):
            save_model(ours(), tokenizer(), place)
    finally:
        os.umask(before)
    files = [*tmp_path.glob("*/model.safetensors"), *tmp_path.glob("*/config.json")]
    modes = {path: path.stat().st_mode & 0o777 for path in files}
    assert set(modes.values()) == {mode} and len(modes) == 4


@pytest.mark.parametrize(
    "said, ends",
    [
        (8192, [L, 2 * L, 3 * L]),
        (10**30, [L, 2 * L, 3 * L]),
        (L, [L, 2 * L, 3 * L]),
        (7, [7, 7, 7]),
    ],
)
def test_a_tokenizer_is_as_long_as_its_model_or_as_chosen(said, ends, tmp_path):
    model, written = ours(max_position_embeddings=L), tokenizer()
    written.model_max_length = said
    for number in (1, 2, 3, 1):  # the last one: made shorter again
        longer = model if number == 1 else extend_context(model, number * L, "yarn")
        place = save_model(longer, written, tmp_path / str(number))
        again = transformers.AutoTokenizer.from_pretrained(place)
        assert again.model_max_length == ends[number - 1]
        assert (
            again(" ".join(["w7"] * 4 * L), truncation=True, return_tensors="pt").input_ids.shape[1]
            == ends[number - 1]
        )
        written = load_tokenizer(place)
    written.model_max_length = 9
    for number in (2, 3):
        place = save_model(extend_context(model, number * L, "yarn"), written, tmp_path / "chosen")
        written = load_tokenizer(place)
        assert written.model_max_length == 9


def test_saving_that_fails_keeps_the_files_that_were_there(saved, tmp_path, monkeypatch):
    save_model(ours(), tokenizer(), tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    monkeypatch.setattr(ModernBertForMaskedLM, "save_pretrained", half_a_save)
    with pytest.raises(OSError, match="disk"):
        save_model(ours(), tokenizer(), tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


OLDER = {  # of a tokenizer that transformers 4 wrote
    "special_tokens_map.json": json.dumps({"pad_token": "<pad>", "mask_token": "<mask>", "cls_token": "<s>"}),
    "added_tokens.json": json.dumps({"<new>": V + 7}), "vocab.txt": "a\nb", "vocab.json": "{}", "merges.txt": "",
    "spiece.model": "", "tokenizer.model": "",
}  # fmt: skip


@pytest.mark.parametrize("place", ["a model", "a run"])
def test_no_file_of_an_older_tokenizer_stays_beside_a_new_one(place, tmp_path):
    for name, content in OLDER.items():
        (tmp_path / name).write_text(content)
    if place == "a model":
        (tmp_path / "config.json").write_text("{}")
    save_model(ours(), None, tmp_path)
    assert OLDER.keys() <= {path.name for path in tmp_path.iterdir()}, (
        "without a tokenizer nothing is replaced"
    )
    if place == "a run":
        (tmp_path / "config.json").unlink()
    save_model(ours(), tokenizer(), tmp_path)
    held = {path.name for path in tmp_path.iterdir()}
    assert held == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again.get_vocab() == tokenizer().get_vocab() and again.mask_token == "[MASK]"


def half_a_save(self, directory):
    with open(os.path.join(directory, "model.safetensors"), "wb") as f:
        f.write(b"half")
    raise OSError("no space left on the disk")


def test_a_wrong_tokenizer_is_refused_before_writing(tmp_path):
    with pytest.raises(ValueError, match="49.*vocab_size is 40"):
        save_model(ours(vocab_size=40), tokenizer(), tmp_path / "a")
    maskless = tokenizer()
    maskless.mask_token = None
    with pytest.raises(ValueError, match="mask token"):
        save_model(ours(), maskless, tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        save_model(ours(), tokenizer(), tmp_path / "file")
    assert not (tmp_path / "a").exists()


# ---- models that no family can say ----------------------------------------------------------------

OWN = {  # shapes without a place elsewhere, and the setting that says so
    "rms": (dict(norm="rms"), "norm='rms'"),
    "alibi": (dict(attention_positions="alibi"), "attention_positions='alibi'"),
    "shared keys": (dict(num_key_value_heads=1), "num_key_value_heads=1"),
}
OWN_HEADS = [*ARCHITECTURES.values(), BertLabForEnhancedMaskedLM]


@pytest.mark.parametrize(
    "shape, head",
    [
        *((name, ARCHITECTURES["ForMaskedLM"]) for name in OWN),
        *(("rms", head) for head in OWN_HEADS),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_model_without_a_family_keeps_its_class(shape, head, tmp_path):
    settings, word = OWN[shape]
    model = lively(head(modernbert_tiny(**SHAPE, **settings)))
    place = save_model(model, tokenizer(), tmp_path / "model")
    settings = json.loads((place / "config.json").read_text())
    assert (settings["model_type"], settings["architectures"]) == ("bertlab", [head.__name__])
    assert (settings["mask_token_id"], model.config.mask_token_id) == (4, None)
    again = head.from_pretrained(place).eval()
    assert all(
        torch.equal(again.state_dict()[name], weight) for name, weight in model.state_dict().items()
    )
    line = saved_as(model)
    assert head.__name__ in line and (word in line or "no family has" in line)


def test_an_impossible_family_is_refused_before_writing(tmp_path):
    model = BertLabForMaskedLM(modernbert_tiny(**SHAPE, norm="rms"))
    with pytest.raises(ValueError, match="norm='rms' has no place in a modernbert model"):
        save_model(model, tokenizer(), tmp_path / "a", family="modernbert")
    assert not (tmp_path / "a").exists()


def test_a_classifier_needs_no_mask_token(tmp_path):
    maskless = tokenizer()
    maskless.mask_token = None
    model = ARCHITECTURES["ForSequenceClassification"](modernbert_tiny(**SHAPE))
    assert (save_model(model, maskless, tmp_path / "a") / "model.safetensors").exists()


# ---- directories of strangers ---------------------------------------------------------------------


class Trap:
    "Runs code when it is unpickled."

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (self.place,)


def rewrite_config(place, **changes):
    settings = json.loads((place / "config.json").read_text())
    settings = {name: value for name, value in {**settings, **changes}.items() if value != "gone"}
    (place / "config.json").write_text(json.dumps(settings))


def cut(place, file, share):
    path = place / file
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def put_pickle(place):
    (place / "model.safetensors").unlink()
    torch.save(
        {"bert.x": torch.ones(1), "trap": Trap(str(place / "was run"))}, place / "pytorch_model.bin"
    )


def put_index(place, file):
    (place / "model.safetensors").rename(place.parent / "outside.safetensors")
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))


def put_code(place):
    (place / "strange.py").write_text(f"import os; os.mkdir({str(place / 'was run')!r})")
    rewrite_config(
        place, model_type="strange", auto_map={"AutoConfig": "strange.C", "AutoModel": "strange.M"}
    )


STRANGE = {  # what is wrong with a directory: what makes it so
    "half a config": lambda place: cut(place, "config.json", 0.5),
    "a config without a kind": lambda place: rewrite_config(place, model_type="gone", architectures="gone"),
    "code beside the model": put_code,
    "a shape that cannot be": lambda place: rewrite_config(place, num_attention_heads=3),
    "a shape of another model": lambda place: rewrite_config(place, hidden_size=32),
    "half of the weights": lambda place: cut(place, "model.safetensors", 0.5),
    "no weights": lambda place: (place / "model.safetensors").unlink(),
    "a pickle that runs code": put_pickle,
    "an index of what is not there": lambda place: put_index(place, "nowhere.safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", STRANGE)
def test_a_damaged_directory_runs_nothing(wrong, tmp_path):
    place = tmp_path / "model"
    theirs("bert").save_pretrained(place)
    STRANGE[wrong](place)
    with pytest.raises(ValueError) as caught:
        from_huggingface(place)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert not (place / "was run").exists()
