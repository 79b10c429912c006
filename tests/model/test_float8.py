"Float8: which layers, which devices, and products that round as the formats say."

import copy
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bertlab.model.activation_checkpointing import checkpoint_activations
from bertlab.model.config import BertLabConfig, modernbert_tiny
from bertlab.model.float8 import (
    FLOAT8_RECIPES,
    check_float8_device,
    convert_to_float8,
    float8_layers,
)
from bertlab.model.heads import BertLabForEnhancedMaskedLM, BertLabForMaskedLM

torch.set_num_threads(1)
needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="needs torchao: the quantized extra"
)
needs_no_torchao = pytest.mark.skipif(
    find_spec("torchao") is not None, reason="torchao is installed"
)


@pytest.fixture(autouse=True)
def same_start_for_every_test():
    torch.manual_seed(0)


def small(**overrides) -> BertLabConfig:
    shape = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return modernbert_tiny(**{**shape, **overrides})


def lively(model):
    "Weights away from their start, so that rounding has something to do."
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return model.train()


def loss_and_gradient(model, ids):
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


class StandIn:
    "What convert_to_float8 asks of torchao, which is no dependency: it writes down what it was requested."

    def __init__(self):
        self.requested = []

    def module(self):
        from dataclasses import dataclass

        @dataclass(frozen=True)
        class Config:
            recipe: str = "tensorwise"
            emulate: bool = False
            pad_inner_dim: bool = False

            @staticmethod
            def from_recipe_name(name):
                return Config(name)

        def convert(model, *, module_filter_fn, config):
            names = [
                n
                for n, m in model.named_modules()
                if isinstance(m, nn.Linear) and module_filter_fn(m, n)
            ]
            self.requested.append((names, config))

        return SimpleNamespace(Float8LinearConfig=Config, convert_to_float8_training=convert)


@pytest.fixture
def stand_in(monkeypatch):
    result = StandIn()
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torchao.float8", result.module())
    return result


def on_a_card(monkeypatch, capability, name="NVIDIA Test"):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)


# ---- which layers ----------------------------------------------------------------------------


def test_all_products_of_the_blocks_and_nothing_else():
    names = float8_layers(BertLabForEnhancedMaskedLM(small(num_hidden_layers=1)))
    parts = ["attention.qkv", "attention.out_proj", "mlp.up_proj", "mlp.down_proj"]
    assert sorted(names) == sorted(
        f"{block}.{part}" for block in ("encoder.blocks.0", "decoder") for part in parts
    )


def test_layers_whose_sizes_are_no_multiples_of_sixteen_stay():
    gated = float8_layers(
        BertLabForMaskedLM(small(num_hidden_layers=1, output_gate="head"))
    )  # 2 heads: 32 -> 2
    assert (
        "encoder.blocks.0.attention.gate" not in gated
        and "encoder.blocks.0.attention.out_proj" in gated
    )
    odd = float8_layers(BertLabForMaskedLM(small(num_hidden_layers=1, intermediate_size=40)))
    # 40 units make an expansion to 80 = 5 x 16; only the way back from 40 does not fit
    assert "encoder.blocks.0.mlp.up_proj" in odd and "encoder.blocks.0.mlp.down_proj" not in odd


def test_a_model_without_a_fitting_layer_is_refused():
    with pytest.raises(ValueError, match="multiples of 16.*hidden_size"):
        float8_layers(BertLabForMaskedLM(small(hidden_size=36, intermediate_size=40)))


# ---- which device ----------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "mps", "meta", torch.device("cpu")])
def test_devices_without_float8_products_are_named(device):
    with pytest.raises(
        ValueError, match=f"capability 8.9.*this is {device}.*bf16-mixed.*emulate=True"
    ):
        check_float8_device(device)


@pytest.mark.parametrize(
    "capability, has_it",
    [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)],
)
def test_cards_have_float8_from_capability_8_9(capability, has_it, monkeypatch):
    on_a_card(monkeypatch, capability)
    if has_it:
        check_float8_device("cuda")
    else:
        with pytest.raises(ValueError, match=rf"NVIDIA Test \(capability 8\.{capability[1]}\)"):
            check_float8_device("cuda:0")


# ---- conversion ------------------------------------------------------------------------------


def test_mistakes_are_answered_before_torchao_is_asked(stand_in):
    model = BertLabForMaskedLM(small())
    with pytest.raises(
        ValueError, match="recipe 'fast' is unknown; choose one of tensorwise, rowwise"
    ):
        convert_to_float8(model, "fast", emulate=True)
    with pytest.raises(ValueError, match="this is cpu"):
        convert_to_float8(model)
    with pytest.raises(ValueError, match="this is mps"):
        convert_to_float8(model, device="mps")
    assert stand_in.requested == []


@needs_no_torchao
def test_a_missing_torchao_is_named_with_its_extra(monkeypatch):
    with pytest.raises(ImportError, match=r'torchao: pip install "bertlab\[quantized\]"'):
        convert_to_float8(BertLabForMaskedLM(small()), emulate=True)
    on_a_card(monkeypatch, (9, 0))
    with pytest.raises(ImportError, match="quantized"):
        convert_to_float8(BertLabForMaskedLM(small()), device="cuda")


def test_torchao_gets_recipe_layers_and_padding(stand_in, monkeypatch):
    model = BertLabForMaskedLM(small(output_gate="head"))
    on_a_card(monkeypatch, (9, 0))
    names = convert_to_float8(model, "rowwise", device="cuda")
    ((requested, config),) = stand_in.requested
    assert sorted(requested) == sorted(names) == sorted(float8_layers(model))
    assert (config.recipe, config.emulate, config.pad_inner_dim) == ("rowwise", False, True)
    convert_to_float8(model, emulate=True)  # on the CPU that the weights are on
    assert stand_in.requested[1][1].emulate


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
    result = []
    for emulate in (False, True):
        model = copy.deepcopy(plain)
        assert len(convert_to_float8(model, emulate=emulate)) == 8
        with torch.autocast("cuda", torch.bfloat16):
            result.append(loss_and_gradient(model, ids))
    assert (result[0][0] - result[1][0]).abs() < 0.02 * result[1][0]
    assert torch.cosine_similarity(result[0][1], result[1][1], dim=0) > 0.98
