"Float8: which layers, which devices, and products that round as the formats say."

import copy
from importlib.util import find_spec

import pytest
import torch

import model_cases
from model_cases import same_start_for_every_test  # noqa: F401

from bertlab.model.activation_checkpointing import checkpoint_activations
from bertlab.model.config import BertLabConfig, modernbert_tiny
from bertlab.model.float8 import (
    FLOAT8_RECIPES,
    check_float8_device,
    convert_to_float8,
    float8_layers,
)
from bertlab.model.heads import BertLabForEnhancedMaskedLM, BertLabForMaskedLM

lively = lambda model: model_cases.lively(model).train()
needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="needs torchao: the quantized extra"
)
needs_no_torchao = pytest.mark.skipif(
    find_spec("torchao") is not None, reason="torchao is installed"
)


def small(**overrides) -> BertLabConfig:
    shape = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return modernbert_tiny(**{**shape, **overrides})


def loss_and_gradient(model, ids):
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


# ---- which layers ----------------------------------------------------------------------------


def test_all_products_of_the_blocks_and_nothing_else():
    model = BertLabForEnhancedMaskedLM(small(num_hidden_layers=1))
    parts = {"attention.qkv", "attention.out_proj", "mlp.up_proj", "mlp.down_proj"}
    names = {f"{block}.{part}" for block in ("encoder.blocks.0", "decoder") for part in parts}
    assert {*float8_layers(model)} == names
    skipped = {"decoder.mlp.down_proj", "encoder.blocks.0.mlp.down_proj"}
    assert {*float8_layers(model, ["*.down_proj"])} == names - skipped


def test_layers_whose_sizes_are_no_multiples_of_sixteen_stay():
    config = small(num_hidden_layers=1, output_gate="head", intermediate_size=40)
    names = float8_layers(BertLabForMaskedLM(config))  # the gate has 2 rows, up_proj 80 = 5 x 16
    parts = {name.removeprefix("encoder.blocks.0.") for name in names}
    assert parts == {"attention.qkv", "attention.out_proj", "mlp.up_proj"}


# ---- which device ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "capability, has_float8", [((8, 6), False), ((8, 9), True), ((9, 0), True)]
)
def test_gpus_have_float8_from_capability_8_9(capability, has_float8, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Test")
    if has_float8:
        check_float8_device("cuda")
    else:
        with pytest.raises(ValueError, match=r"NVIDIA Test \(capability 8\.6\)"):
            check_float8_device("cuda:0")


@pytest.mark.parametrize("options, name", [
    (dict(recipe="fast", emulate=True), "recipe='fast'"), (dict(), "this is cpu"),
    (dict(device="mps"), "this is mps"), (dict(skip=["*"], emulate=True), "multiples of 16"),
])  # fmt: skip
def test_wrong_float8_options_are_named(options, name):
    with pytest.raises(ValueError, match=name):
        convert_to_float8(BertLabForMaskedLM(small()), **options)


# ---- conversion ------------------------------------------------------------------------------


@needs_no_torchao
def test_a_missing_torchao_is_named_with_its_extra():
    with pytest.raises(ImportError, match=r"bertlab-encoders\[quantized\]"):
        convert_to_float8(BertLabForMaskedLM(small()), emulate=True)


@needs_torchao
@pytest.mark.parametrize("recipe", FLOAT8_RECIPES)
def test_emulated_products_are_close_and_recompute(recipe):
    plain = lively(BertLabForMaskedLM(small()))
    ids = torch.randint(64, (3, 17))  # 51 tokens: no multiple of 16
    loss, gradient = loss_and_gradient(plain, ids)
    model = copy.deepcopy(plain)
    convert_to_float8(model, recipe, emulate=True)
    assert model.state_dict().keys() == plain.state_dict().keys()
    rounded, rounded_gradient = loss_and_gradient(model, ids)
    assert 0 < abs(rounded - loss) < 0.05 * loss
    assert 0.9 < torch.cosine_similarity(rounded_gradient, gradient, dim=0) < 0.99999
    for mode in ("full", "selected_ops"):
        checkpoint_activations(model, mode)
        again, again_gradient = loss_and_gradient(model, ids)
        assert torch.equal(again, rounded) and torch.equal(again_gradient, rounded_gradient)


@needs_torchao
@pytest.mark.gpu
def test_a_gpu_multiplies_in_float8_as_the_rehearsal_says():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of capability 8.9")
    plain = lively(BertLabForMaskedLM(small())).cuda()
    ids = torch.randint(64, (3, 17), device="cuda")
    results = []
    for emulate in (False, True):
        model = copy.deepcopy(plain)
        assert len(convert_to_float8(model, emulate=emulate)) == 8
        with torch.autocast("cuda", torch.bfloat16):
            results.append(loss_and_gradient(model, ids))
    assert (results[0][0] - results[1][0]).abs() < 0.02 * results[1][0]
    assert torch.cosine_similarity(results[0][1], results[1][1], dim=0) > 0.98
