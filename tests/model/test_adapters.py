"Adapters: nothing changes at first, they learn alone, they merge exactly, and plain peft opens what is written."

import copy

import pytest
import torch

pytest.importorskip("peft")

from bertlab.model.adapters import (  # noqa: E402
    add_adapter, freeze_weights, layer_depths, save_adapter,
)  # fmt: skip
from bertlab.model.config import bert_tiny, modernbert_tiny, roberta_base  # noqa: E402
from bertlab.model.heads import BertLabForMaskedLM  # noqa: E402
from bertlab.model.huggingface import merged_copy, save_model, to_huggingface  # noqa: E402
from bertlab.model.task_heads import BertLabForSequenceClassification  # noqa: E402
from bertlab.optim.groups import parameter_groups  # noqa: E402
from bertlab.optim.optimizers import get_optimizer  # noqa: E402

SIZE = dict(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=32)  # fmt: skip
SHAPES = {
    "bert": bert_tiny(**SIZE),
    "modernbert": modernbert_tiny(**SIZE),
    "roberta": roberta_base(**SIZE, pad_token_id=1),
    "ours alone": modernbert_tiny(**SIZE, qk_norm=True),
}
IDS = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(0))


def build(shape="modernbert", head=BertLabForMaskedLM, **extra):
    torch.manual_seed(0)
    config = copy.deepcopy(SHAPES[shape])
    for name, value in extra.items():
        setattr(config, name, value)
    return head(config).eval()


def perturb(model):
    "Let every free weight be somewhere else."
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("num_layers", [2, 12])  # peft shortens 20 targets or more
@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_an_adapter_starts_neutral_trains_alone_and_merges(adapter, num_layers):
    model = build(num_hidden_layers=num_layers)
    before, old = model(IDS).logits, copy.deepcopy(model.state_dict())
    trained = add_adapter(model, adapter)
    torch.testing.assert_close(model(IDS).logits, before)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name not in trained)
        if name not in trained:
            assert torch.equal(parameter, old[name.replace("base_layer.", "")])
    logits = model(IDS).logits
    merged = merged_copy(model)
    assert set(merged.state_dict()) == set(old)
    torch.testing.assert_close(merged(IDS).logits, logits, rtol=0, atol=1e-5)
    assert torch.equal(model(IDS).logits, logits)  # the model itself stays as it was


def test_an_old_torchao_does_not_matter(monkeypatch):
    def refuse():
        raise ImportError("Found an incompatible version of torchao")

    monkeypatch.setattr("peft.tuners.lora.torchao.is_torchao_available", refuse)
    model = build(tie_word_embeddings=False)
    add_adapter(model, {"target_modules": ["qkv", "embeddings.tokens"]})
    logits = perturb(model)(IDS).logits
    torch.testing.assert_close(merged_copy(model)(IDS).logits, logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_layers", [2, 12])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_merged_model_is_written_with_equal_scores(shape, num_layers, tmp_path):
    import transformers

    model = build(shape, num_hidden_layers=num_layers)
    add_adapter(model, "lora")
    perturb(model)
    save_model(model, None, tmp_path)
    reference = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert type(reference).__module__.startswith("transformers") == (shape != "ours alone")
    torch.testing.assert_close(reference(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("adapter", ["lora", "dora", "rslora"])
@pytest.mark.parametrize("shape", ["bert", "modernbert", "roberta"])
@pytest.mark.parametrize("num_layers", [2, 12])
def test_plain_peft_opens_it_on_plain_transformers(num_layers, shape, adapter, tmp_path):
    from peft import PeftModel

    model = build(shape, num_hidden_layers=num_layers)
    reference = to_huggingface(model)
    add_adapter(model, adapter)
    perturb(model)
    save_adapter(model, tmp_path)
    reference = PeftModel.from_pretrained(reference, tmp_path).eval()
    torch.testing.assert_close(reference(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)


PARTS = [["tokens", "head"], ["embeddings"], ["head.bias"], ["head.dense.weight"]]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_plain_peft_opens_parts_trained_in_full(shape, parts, tied, tmp_path):
    from peft import PeftModel

    model = build(shape, tie_word_embeddings=tied)
    original = copy.deepcopy(model)
    base = original if shape == "ours alone" else to_huggingface(model)
    add_adapter(model, {"modules_to_save": parts})
    perturb(model)
    save_adapter(model, tmp_path)
    opened = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    torch.testing.assert_close(opened(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        opened.merge_and_unload()(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5
    )


def test_adapter_and_model_have_directories_of_their_own(tmp_path):
    model = build()
    add_adapter(model)
    save_adapter(model, tmp_path / "a")
    with pytest.raises(ValueError, match="holds an adapter.*a/adapter"):
        save_model(model, None, tmp_path / "a")
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    save_model(model, None, tmp_path / "m")
    with pytest.raises(ValueError, match="holds a model.*m/adapter"):
        save_adapter(model, tmp_path / "m")
    assert not (tmp_path / "m" / "adapter_config.json").exists()


WRONG = {
    "lora": lambda: add_adapter(build(), "lorra"),
    "rank": lambda: add_adapter(build(), {"type": "lora", "rank": 2}),
    "pissa": lambda: add_adapter(build(), {"init_lora_weights": "pissa_niter_4"}),
    "qvk": lambda: add_adapter(build(), {"target_modules": ["qvk"]}),
    "modules_to_save 'nope'": lambda: add_adapter(build(), {"modules_to_save": ["nope"]}),
    "freeze.*3": lambda: freeze_weights(build(), 3),
    "nothing": lambda: freeze_weights(build(), ["head.*", "nothing.*"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings_are_named(name):
    with pytest.raises(ValueError, match=name):
        WRONG[name]()


@pytest.mark.parametrize("shape", ["bert", "modernbert"])
def test_the_head_of_a_task_goes_along(shape, tmp_path):
    from peft import PeftModel

    model = build(shape, BertLabForSequenceClassification, num_labels=3)
    reference = to_huggingface(model)
    trained = add_adapter(model, "lora", ["task_head"])
    assert any(name.startswith("task_head.classifier") for name in trained)
    perturb(model)
    torch.testing.assert_close(merged_copy(model)(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
    save_adapter(model, tmp_path)
    opened = PeftModel.from_pretrained(reference, tmp_path).eval()
    torch.testing.assert_close(opened(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("freeze, free", [
    ("embeddings", {"blocks.0", "blocks.1", "final_norm", "head"}),
    (1, {"blocks.1", "final_norm", "head"}),
    ("encoder", {"head"}),
    (["*.attention.*", "head.*"], {"embeddings", "blocks.0.mlp", "blocks.1.mlp", "final_norm",
                                   "blocks.0.pre_mlp_norm", "blocks.1.pre_mlp_norm",
                                   "blocks.1.pre_attention_norm"}),
])  # fmt: skip
def test_frozen_weights_get_no_gradient_and_no_state(freeze, free):
    model = build()
    frozen = freeze_weights(model, freeze)
    trained = [n.removeprefix("encoder.") for n, p in model.named_parameters() if p.requires_grad]
    assert {part for part in free for n in trained if n.startswith(part)} == free
    assert all(any(n.startswith(part) for part in free) for n in trained)
    optimizer = get_optimizer("adamw", parameter_groups(model), {"lr": 1e-3})
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name in frozen) == (parameter not in optimizer.state)


@pytest.mark.parametrize("family", ["DistilBert", "DebertaV2"])
def test_depths_of_other_encoders_are_counted_by_blocks(family):
    import transformers

    sizes = dict(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForTokenClassification")(config)
    depths = layer_depths(model)
    assert depths["classifier.weight"] == 3 and set(depths.values()) == {0, 1, 2, 3}
    assert {depths[name] for name in freeze_weights(model, 1)} == {0, 1}
    shared = transformers.AlbertModel(transformers.AlbertConfig(**sizes, embedding_size=16))
    with pytest.raises(ValueError, match="Albert"):
        layer_depths(shared)
