"Every family: the same outputs in both directions, and a reason for what cannot be converted."

import copy
import json

import pytest
import torch
import transformers

from bertlab.model.families import FAMILIES
from bertlab.model.huggingface import from_huggingface, load_model, save_model
from bertlab.model.huggingface import stored_head, to_huggingface
from bertlab.model.loading import load_state_dict
from bertlab.model.task_heads import BertLabForTokenClassification

B, L, V = 3, 16, 50
SIZES = dict(vocab_size=V, num_hidden_layers=2, num_attention_heads=2, hidden_size=16)
OUTPUTS = ("last_hidden_state", "pooler_output", "logits", "start_logits", "end_logits")
PADDED_TABLES = ("tokens.weight", "positions.weight")  # transformers freezes the padding's row
PAIRS = [(name, head) for name, family in FAMILIES.items() for head in family.heads]


def theirs(name, head, **changes):
    torch.manual_seed(0)
    family = FAMILIES[name]
    inner = {"distilbert": dict(hidden_dim=24)}.get(name, dict(intermediate_size=24))
    settings = {"electra": dict(embedding_size=16), "eurobert": dict(bos_token_id=2, eos_token_id=3, mask_token_id=4),
            "modernbert": dict(local_attention=6, cls_token_id=2, bos_token_id=2, sep_token_id=3,
                               eos_token_id=3)}.get(name, {})  # fmt: skip
    labels = dict(num_labels=3) if head.endswith("Classification") else {}
    pad = {"pad_token_id": 1 if family.counts_from_padding else 0}
    model = family.get_class(head)(
        family.get_class("Config")(**SIZES, **inner, **settings, **labels, **pad, **changes)
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape))
    return model.eval()


def rows(pad):
    ids = torch.randint(5, V, (B, L), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(B, L, dtype=torch.long)
    mask[1, 9:], mask[2, 1:] = 0, 0
    return ids.masked_fill(mask == 0, pad), mask


@pytest.mark.parametrize("name, head", PAIRS)
def test_outputs_are_equal_in_both_directions(name, head):
    original = theirs(name, head)
    ids, mask = rows(original.config.pad_token_id)
    result = from_huggingface(original)
    back = to_huggingface(result)
    assert type(back) is type(original) and result.config.family == name
    with torch.no_grad():
        want, got, again = (model(ids, attention_mask=mask) for model in (original, result, back))
    for key in OUTPUTS:
        if key in want:
            real = mask.bool() if want[key].shape[:2] == mask.shape else slice(None)
            torch.testing.assert_close(got[key][real], want[key][real], rtol=0, atol=1e-5)
            torch.testing.assert_close(again[key][real], want[key][real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name, head", PAIRS)
def test_gradients_in_training_equal_those_of_transformers(name, head):
    original = theirs(name, head)
    for part in [original.config, *original.modules()]:  # no dropout, under any of its names
        for setting, value in vars(part).items():
            if "drop" in setting and isinstance(value, float) or setting == "p":
                setattr(part, setting, 0.0)
    ours = from_huggingface(original).train()
    ids, mask = rows(original.config.pad_token_id)
    factors = torch.randn(B, L, max(V, 16), generator=torch.Generator().manual_seed(2))
    for model in (original.train(), ours):
        out = model(ids, attention_mask=mask)
        values = [out[key] for key in OUTPUTS if out.get(key) is not None]
        real = [value[mask.bool()] if value.shape[:2] == mask.shape else value for value in values]
        sum((v * factors.flatten()[: v.numel()].view(v.shape)).sum() for v in real).backward()
    want = copy.deepcopy(ours)
    with torch.no_grad():
        for weight in want.parameters():
            weight.zero_()
    gradients = {n: p.grad for n, p in original.named_parameters() if p.grad is not None}
    load_state_dict(want, gradients, strict=False)  # by the names of the family
    pad = original.config.pad_token_id
    for (key, weight), expected in zip(ours.named_parameters(), want.parameters()):
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if key.endswith(PADDED_TABLES[: 1 + FAMILIES[name].counts_from_padding]):
            gradient[pad] = expected.data[pad] = 0
        torch.testing.assert_close(gradient, expected.data, rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_directory_keeps_its_family(name, tmp_path):
    head = "ForMaskedLM" if "ForMaskedLM" in FAMILIES[name].heads else "Model"
    theirs(name, head).save_pretrained(tmp_path / "a")
    loaded = load_model(tmp_path / "a")
    assert loaded.padded_because is None and loaded.new_weights == []
    save_model(loaded.model, None, tmp_path / "b")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "b").model_type == name


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForTokenClassification"])
def test_other_encoders_keep_their_own_class(head, tmp_path):
    config = transformers.DebertaV2Config(**SIZES, intermediate_size=24, pad_token_id=0)
    model = getattr(transformers, f"DebertaV2{head}")(config).eval()
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, head)
    assert "deberta-v2" in loaded.padded_because and type(loaded.model) is type(model)
    ids, mask = rows(0)
    with torch.no_grad():
        assert torch.equal(loaded.model(ids, mask)[0], model(ids, mask)[0])


@pytest.mark.parametrize("name", ["bert", "modernbert", "distilbert"])
def test_a_new_head_is_the_only_new_part(name, tmp_path):
    theirs(name, "ForMaskedLM").save_pretrained(tmp_path)
    loaded = load_model(tmp_path, "ForTokenClassification", {"num_labels": 4})
    assert type(loaded.model) is BertLabForTokenClassification
    assert loaded.new_weights == ["task_head.classifier.bias", "task_head.classifier.weight"]
    assert loaded.model.config.num_labels == 4


def test_a_head_without_a_place_is_padded(tmp_path):
    theirs("eurobert", "ForMaskedLM").save_pretrained(tmp_path)
    loaded = load_model(tmp_path, "ForSequenceClassification", {"num_labels": 2})
    assert type(loaded.model) is transformers.EuroBertForSequenceClassification
    assert "ForSequenceClassification" in loaded.padded_because


def test_each_of_distilberts_dropouts_is_read():
    model = theirs("distilbert", "ForSequenceClassification", seq_classif_dropout=0.3)
    config = from_huggingface(model).config
    assert (config.classifier_dropout, config.hidden_dropout) == (0.3, 0.1)
    assert to_huggingface(from_huggingface(model)).config.dropout == 0.1


def test_missing_weights_of_an_encoder_are_an_error(tmp_path):
    model = theirs("bert", "ForMaskedLM")
    state = {k: w for k, w in model.state_dict().items() if "layer.1.output.dense" not in k}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match="blocks.1.mlp.down_proj"):
        load_model(tmp_path)


def test_a_pretraining_model_of_bert_is_a_masked_lm(tmp_path):
    model = transformers.BertForPreTraining(theirs("bert", "Model").config).eval()
    model.save_pretrained(tmp_path)
    ids, loaded = rows(0)[0], load_model(tmp_path)
    with torch.no_grad():
        want = model(ids).prediction_logits
        torch.testing.assert_close(loaded.model(ids).logits, want, rtol=0, atol=1e-5)


def test_a_pretraining_model_of_another_family_is_a_masked_lm(tmp_path):
    config = transformers.AlbertConfig(
        **SIZES, intermediate_size=24, embedding_size=8, pad_token_id=0
    )
    model = transformers.AlbertForPreTraining(config).eval()
    model.save_pretrained(tmp_path)
    ids, loaded = rows(0)[0], load_model(tmp_path)
    assert loaded.new_weights == []
    with torch.no_grad():
        want = model(ids).prediction_logits
        torch.testing.assert_close(loaded.model(ids).logits, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name, head", [("XLMWithLMHeadModel", "ForMaskedLM"),
                                        ("XLMForQuestionAnsweringSimple", "ForQuestionAnswering"),
                                        ("XLMModel", "Model")])  # fmt: skip
def test_a_head_is_found_under_any_name(name, head):
    assert stored_head(transformers.XLMConfig(architectures=[name])) == head


NO_ENCODERS = {
    "decoder": (transformers.GPT2Config, "gpt2"),
    "encoder and decoder": (transformers.T5Config, "t5"),
    "vision": (transformers.ViTConfig, "vit"),
    "audio": (transformers.Wav2Vec2Config, "wav2vec2"),
    "vision and text": (transformers.CLIPConfig, "clip"),
}


@pytest.mark.parametrize("architecture", NO_ENCODERS)
def test_what_is_no_encoder_is_refused(architecture, tmp_path):
    config_class, name = NO_ENCODERS[architecture]
    config_class().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=name) as caught:
        load_model(tmp_path, "Model")
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def damage(directory, architecture):
    config = json.loads((directory / "config.json").read_text())
    if architecture == "no weights":
        (directory / "model.safetensors").unlink()
    elif architecture == "weights of another family":
        theirs("bert", "ForMaskedLM").save_pretrained(directory / "bert")
        (directory / "bert/model.safetensors").replace(directory / "model.safetensors")
    else:
        config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForTokenClassification"])
@pytest.mark.parametrize(
    "architecture", ["no weights", "weights of another family", "code of its own"]
)
def test_a_damaged_directory_is_refused(architecture, head, tmp_path):
    config = transformers.MPNetConfig(**SIZES, intermediate_size=24)
    transformers.MPNetForMaskedLM(config).save_pretrained(tmp_path)
    damage(tmp_path, architecture)
    with pytest.raises(ValueError) as caught:
        load_model(tmp_path, head)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
