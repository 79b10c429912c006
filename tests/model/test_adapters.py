"Adapters: nothing changes at first, they learn alone, they merge exactly, and plain peft opens what is written."

import copy

import pytest
import torch

pytest.importorskip("peft")

from bertlab.model.adapters import (  # noqa: E402
    add_adapter, freeze_weights, layer_depths, linear_layers, make_peft_config, save_adapter,
)  # fmt: skip
from bertlab.model.config import bert_tiny, modernbert_tiny, roberta_base  # noqa: E402
from bertlab.model.heads import BertLabForMaskedLM  # noqa: E402
from bertlab.model.huggingface import merged_copy, save_model, to_huggingface  # noqa: E402
from bertlab.model.task_heads import BertLabForSequenceClassification  # noqa: E402
from bertlab.optim.groups import parameter_groups  # noqa: E402
from bertlab.optim.optimizers import get_optimizer, optimizer_state_bytes  # noqa: E402

SIZE = dict(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=32)  # fmt: skip
SHAPES = {
    "bert": bert_tiny(**SIZE),
    "modernbert": modernbert_tiny(**SIZE),
    "roberta": roberta_base(**SIZE, pad_token_id=1),
    "ours alone": modernbert_tiny(**SIZE, qk_norm=True),
}
IDS = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(0))


def build(shape="modernbert", head=BertLabForMaskedLM, **more):
    torch.manual_seed(0)
    config = copy.deepcopy(SHAPES[shape])
    for name, value in more.items():
        setattr(config, name, value)
    return head(config).eval()


def move(model):
    "Let every free weight be somewhere else."
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


ADAPTERS = ("lora", "rslora", "dora", "ia3", "loha", "lokr", "oft")


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_starts_neutral_trains_alone_and_merges(kind):
    model = build()
    before, old = model(IDS).logits, copy.deepcopy(model.state_dict())
    options = {"oft_block_size": 8} if kind == "oft" else {"r": 8} if kind == "lora" else {}
    moving = add_adapter(model, {"type": kind, **options})
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
        assert (parameter.grad is None) == (name not in moving)
    for name, weight in model.state_dict().items():
        if name not in moving and (plain := name.replace("base_layer.", "")) in old:
            assert torch.equal(weight, old[plain])
    trained = model(IDS).logits
    merged = merged_copy(model)
    assert set(merged.state_dict()) == set(old)
    torch.testing.assert_close(merged(IDS).logits, trained, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        model(IDS).logits, trained, rtol=0, atol=0
    )  # the model itself stays as it was


@pytest.mark.parametrize("shape", SHAPES)
def test_a_merged_model_is_written_with_equal_scores(shape, tmp_path):
    import transformers

    model = build(shape)
    add_adapter(model, "lora")
    move(model)
    save_model(model, None, tmp_path)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__module__.startswith("transformers") == (shape != "ours alone")
    torch.testing.assert_close(theirs(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "dora", "rslora"])
@pytest.mark.parametrize("shape", ["bert", "modernbert", "roberta"])
@pytest.mark.parametrize("num_layers", [2, 12])  # peft shortens 20 targets or more
def test_plain_peft_opens_it_on_plain_transformers(num_layers, shape, kind, tmp_path):
    "Where one of theirs is three of ours in one (BERT's query, key, value), for those that can be split."
    from peft import PeftModel

    model = build(shape, num_hidden_layers=num_layers)
    theirs = to_huggingface(model)
    add_adapter(model, kind)
    move(model)
    save_adapter(model, tmp_path)
    theirs = PeftModel.from_pretrained(theirs, tmp_path).eval()
    torch.testing.assert_close(theirs(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["loha", "ia3"])
def test_other_types_are_saved_for_our_own_class(kind, tmp_path):
    from peft import PeftModel

    model = build("bert")
    ours = copy.deepcopy(model)
    add_adapter(model, kind)
    move(model)
    save_adapter(model, tmp_path)
    assert (
        len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
    )  # weights are not for their owner alone
    opened = PeftModel.from_pretrained(ours, tmp_path).eval()
    torch.testing.assert_close(opened(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)


PARTS = [
    ["embeddings.tokens"],
    ["tokens", "head"],
    ["embeddings"],
    ["head"],
    ["head.bias"],
    ["head.dense.weight"],
]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_plain_peft_opens_parts_trained_in_full(shape, parts, tied, tmp_path):
    from peft import PeftModel

    model = build(shape, tie_word_embeddings=tied)
    fresh = copy.deepcopy(model)
    base = fresh if shape == "ours alone" else to_huggingface(model)
    add_adapter(model, {"modules_to_save": parts})
    move(model)
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
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    save_model(model, None, tmp_path / "m")
    before = sorted(path.name for path in (tmp_path / "m").iterdir())
    with pytest.raises(ValueError, match="holds a model.*m/adapter"):
        save_adapter(model, tmp_path / "m")
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == before
    save_adapter(model, tmp_path / "m" / "adapter")
    save_model(model, None, tmp_path / "m")


@pytest.mark.parametrize("part", ["nope", "mlp.up_proj"])
def test_an_impossible_part_leaves_the_model_as_it_was(part):
    model = build()
    with pytest.raises(ValueError, match=f"modules_to_save '{part}'"):
        add_adapter(model, {"modules_to_save": [part]})
    assert add_adapter(model, "lora"), "the second try is the first one"


@pytest.mark.parametrize("shape", ["bert", "modernbert"])
def test_the_head_of_a_task_goes_along(shape, tmp_path):
    from peft import PeftModel

    model = build(shape, BertLabForSequenceClassification, num_labels=3)
    theirs = to_huggingface(model)
    moving = add_adapter(model, "lora", ["task_head"])
    assert any(name.startswith("task_head.classifier") for name in moving)
    move(model)
    torch.testing.assert_close(merged_copy(model)(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
    save_adapter(model, tmp_path)
    opened = PeftModel.from_pretrained(theirs, tmp_path).eval()
    torch.testing.assert_close(opened(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("setting, word", [
    ("lorra", "lora"), ({"type": "lora", "rank": 2}, "rank"), (7, "7"),
    ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"), ({"bias": "lora_only"}, "bias='lora_only'"),
])  # fmt: skip
def test_a_setting_that_cannot_be_is_refused(setting, word):
    with pytest.raises(ValueError, match=word):
        make_peft_config(setting)


def test_layers_are_named_by_end_or_pattern():
    model = build()
    assert linear_layers(model, ["qkv"]) == [f"encoder.blocks.{i}.attention.qkv" for i in (0, 1)]
    assert linear_layers(model, "*.blocks.1.mlp.*") == [
        f"encoder.blocks.1.mlp.{n}" for n in ("up_proj", "down_proj")
    ]
    assert len(linear_layers(model)) == 8
    with pytest.raises(ValueError, match="qvk"):
        add_adapter(model, {"target_modules": ["qvk"]})


@pytest.mark.parametrize("freeze, free", [
    ("embeddings", {"blocks.0", "blocks.1", "final_norm", "head"}),
    (1, {"blocks.1", "final_norm", "head"}),
    ("encoder", {"head"}),
    (["*.attention.*", "head.*"], {"embeddings", "blocks.0.mlp", "blocks.1.mlp", "blocks.0.pre_mlp_norm",
                                   "blocks.1.pre_mlp_norm", "blocks.1.pre_attention_norm",
                                   "final_norm"}),
])  # fmt: skip
def test_frozen_weights_get_no_gradient_and_no_state(freeze, free):
    model = build()
    frozen = freeze_weights(model, freeze)
    moving = [n.removeprefix("encoder.") for n, p in model.named_parameters() if p.requires_grad]
    assert {part for part in free for n in moving if n.startswith(part)} == free
    assert all(any(n.startswith(part) for part in free) for n in moving)
    optimizer = get_optimizer("adamw", parameter_groups(model), {"lr": 1e-3})
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name in frozen) == (parameter not in optimizer.state)
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert 8 * numbers <= optimizer_state_bytes(optimizer) <= 8 * numbers + 8 * len(moving)


@pytest.mark.parametrize("freeze", [3, -1, 1.0, True, "nothing.*", ["head.*", "hed.*"]])
def test_a_freeze_that_cannot_be_is_refused(freeze):
    with pytest.raises(ValueError, match="freeze"):
        freeze_weights(build(), freeze)


def test_depths_of_other_encoders_are_counted_by_their_blocks():
    import transformers

    for family in ("DistilBert", "DebertaV2", "MPNet"):
        config = getattr(transformers, f"{family}Config")(
            vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
        )
        model = getattr(transformers, f"{family}ForTokenClassification")(config)
        depths = layer_depths(model)
        assert depths["classifier.weight"] == 3 and set(depths.values()) == {0, 1, 2, 3}
        assert len({p for p, d in depths.items() if d == 1}) == len(
            {p for p, d in depths.items() if d == 2}
        )
        frozen = freeze_weights(model, 1)
        assert {depths[name] for name in frozen} == {0, 1}
    albert = transformers.AlbertModel(
        transformers.AlbertConfig(vocab_size=40, embedding_size=16, hidden_size=16,
                                  num_attention_heads=2, num_hidden_layers=3)
    )  # fmt: skip
    with pytest.raises(ValueError, match="Albert"):
        layer_depths(albert)
