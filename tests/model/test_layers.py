"Layers against independent formulas: positions, norms, MLPs, and how weights begin."

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from model_cases import same_start_for_every_test  # noqa: F401

from bertlab.model.config import modernbert_tiny
from bertlab.model.layers import (
    ACTIVATIONS,
    NORMS,
    GLU,
    MLP,
    alibi_slopes,
    deepnorm_alpha,
    deepnorm_beta,
    apply_dropout,
    init_linear_,
    rope_cos_sin,
    apply_rope,
    sinusoidal_positions,
)

TOLERANCE = dict(rtol=0, atol=1e-5)


# ---- positions -------------------------------------------------------------------------------


def test_sinusoids_by_formula():
    table = sinusoidal_positions(torch.arange(200)[None], 12)
    assert table.dtype == torch.float32 and table.shape == (1, 200, 12)
    for p in (0, 1, 7, 199):
        for i in range(6):
            angle = p / 10000 ** (2 * i / 12)
            assert table[0, p, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-5)
            assert table[0, p, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-5)


@pytest.mark.parametrize("num_heads", range(1, 33))
def test_alibi_slopes_equal_bloom(num_heads):
    mask = torch.ones(1, 2)
    reference = build_alibi_tensor(mask, num_heads, torch.float32)[
        :, 0, 1
    ]  # slope times position 1
    torch.testing.assert_close(alibi_slopes(num_heads), reference)


@given(
    rotary=st.integers(1, 4), unrotated=st.integers(0, 5), theta=st.sampled_from([10.0, 1e4, 1.6e5])
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_rope_rotates_pairs_as_complex_numbers(rotary, unrotated, theta):
    R = 2 * rotary
    x = torch.randn(2, 3, 4, R + unrotated)
    positions = torch.tensor([[0, 1, 500], [9, 2, 0]])
    got = apply_rope(x, rope_cos_sin(positions, R, theta))
    for b in range(2):
        for position in range(3):
            p = positions[b, position].item()
            pairs = x[b, position, :, :rotary].numpy() + 1j * x[b, position, :, rotary:R].numpy()
            pairs = pairs * np.exp(1j * p * theta ** (-2 * np.arange(rotary) / R))
            want = np.concatenate((pairs.real, pairs.imag), axis=-1)
            np.testing.assert_allclose(got[b, position, :, :R].numpy(), want, atol=2e-4)
    assert torch.equal(got[..., R:], x[..., R:])


def test_rope_keeps_half_precision():
    x = torch.randn(1, 5, 3, 8).bfloat16()
    got = apply_rope(x, rope_cos_sin(torch.arange(5)[None], 4, 100.0))
    assert got.dtype == torch.bfloat16 and torch.equal(got[..., 4:], x[..., 4:])


# ---- norms -----------------------------------------------------------------------------------


def some_norm(name: str, bias: bool) -> torch.nn.Module:
    "A norm over 24 numbers whose weights have moved away from their start."
    position = "post" if name == "deep" else "pre"
    config = modernbert_tiny(
        hidden_size=24,
        norm=name,
        norm_bias=bias,
        norm_groups=4,
        norm_position=position,
        norm_eps=1e-3,
    )
    norm = NORMS[name](config)
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(0.3 * torch.randn(p.shape))
    return norm


def by_formula(name: str, x: np.ndarray, slope: float) -> np.ndarray:
    "One token's vector, normed in float64, before scale and bias."
    if name in ("layer", "deep"):
        return (x - x.mean()) / math.sqrt(((x - x.mean()) ** 2).mean() + 1e-3)
    if name == "rms":
        return x / math.sqrt((x**2).mean() + 1e-3)
    if name == "group":
        return np.concatenate([by_formula("layer", part, slope) for part in np.split(x, 4)])
    return np.tanh(slope * x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_equals_its_formula(name, bias):
    norm, x = some_norm(name, bias), 2 * torch.randn(3, 5, 24) + 1
    got = norm(x).detach()
    slope = norm.slope.item() if name == "dynamic_tanh" else 0.0
    for b in range(3):
        for position in range(5):
            want = by_formula(name, x[b, position].double().numpy(), slope)
            want = want * norm.weight.detach().double().numpy()
            if bias:
                want = want + norm.bias.detach().double().numpy()
            np.testing.assert_allclose(got[b, position].numpy(), want, atol=1e-5)


def test_deepnorm_by_hand():
    assert deepnorm_alpha(8) == pytest.approx(2.0)  # 16 ** (1/4)
    assert deepnorm_beta(2) == pytest.approx(0.5)  # 16 ** (-1/4)
    assert deepnorm_alpha(12) == pytest.approx(2.2134, abs=1e-4)
    assert deepnorm_beta(12) == pytest.approx(0.3195, abs=1e-4)


# ---- MLPs ------------------------------------------------------------------------------------

THEIR_NAMES = {"relu_squared": "relu2"}  # the others share transformers' names


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_equals_transformers(name):
    x = torch.linspace(-6, 6, 101)
    torch.testing.assert_close(
        ACTIVATIONS[name](x), ACT2FN[THEIR_NAMES.get(name, name)](x), **TOLERANCE
    )


@pytest.mark.parametrize("bias", [True, False])
def test_a_plain_mlp_by_hand(bias):
    mlp, x = MLP(3, 5, "tanh", bias=bias), torch.randn(2, 4, 3)
    b1, b2 = (mlp.up_proj.bias, mlp.down_proj.bias) if bias else (0, 0)
    want = torch.tanh(x @ mlp.up_proj.weight.T + b1) @ mlp.down_proj.weight.T + b2
    torch.testing.assert_close(mlp(x), want, **TOLERANCE)


@pytest.mark.parametrize("bias", [True, False])
def test_a_gated_mlp_by_hand(bias):
    mlp, x = GLU(3, 5, "silu", bias=bias), torch.randn(2, 4, 3)
    inner = x @ mlp.up_proj.weight.T + (mlp.up_proj.bias if bias else 0)
    value, gate = inner[..., :5], inner[..., 5:]
    want = (value / (1 + torch.exp(-value)) * gate) @ mlp.down_proj.weight.T
    torch.testing.assert_close(mlp(x), want + (mlp.down_proj.bias if bias else 0), **TOLERANCE)


@pytest.mark.parametrize("rate", [0.01, 0.5])
def test_numbers_are_dropped_independently_of_each_other(rate):
    all_ones = torch.ones(2**18)
    dropped = apply_dropout(all_ones, rate)
    survives = (dropped != 0).double()
    noise = (rate * (1 - rate) / len(all_ones)) ** 0.5
    assert abs(survives.mean() - (1 - rate)) < 5 * noise
    assert abs(dropped.double().mean() - 1) < 5 * noise / (1 - rate)
    assert dropped[dropped != 0].unique().numel() == 1
    scale = 10 * (1 - rate) * (rate * (2 - rate) / len(all_ones)) ** 0.5
    for distance in (1, 2, 3, 4, 8):  # four come from one draw
        pairs = (survives[distance:] * survives[:-distance]).mean()
        assert abs(pairs - (1 - rate) ** 2) < scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropping_preserves_type_shape_and_gradient(dtype):
    for x in (torch.randn(3, 5, 7), torch.randn(4, 6).T, torch.randn(0, 3), torch.tensor(2.0)):
        x = x.to(dtype).requires_grad_()
        y = apply_dropout(x, 0.3)
        assert y.shape == x.shape and y.dtype == dtype
        (gradient,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(gradient * x, y)


# ---- how weights begin -----------------------------------------------------------------------


def start(name: str, narrow: bool = False, **overrides) -> torch.Tensor:
    "A matrix from 300 to 700 numbers, as it begins in a model of 8 layers."
    config = modernbert_tiny(
        initialization=name, num_hidden_layers=8, **{"initializer_range": 0.03, **overrides}
    )
    return init_linear_(torch.empty(700, 300), config, narrow)


def cut_std(cutoff: float) -> float:
    "The standard deviation of a unit normal without its tails, in closed form."
    density = math.exp(-(cutoff**2) / 2) / math.sqrt(2 * math.pi)
    return math.sqrt(1 - 2 * cutoff * density / math.erf(cutoff / math.sqrt(2)))


@pytest.mark.parametrize(
    "name, narrow, want",
    [
        ("truncated_normal", True, 0.03 * cut_std(2)),
        ("megatron", False, 0.03 * cut_std(2)),
        ("megatron", True, 0.03 * cut_std(2) / 4),  # the root of 2 * 8 layers
        ("kaiming", True, math.sqrt(2 / 300)),
        ("xavier", True, math.sqrt(2 / 1000)),
    ],
)
def test_a_matrix_begins_as_wide_as_its_initialization_says(name, narrow, want):
    weight = start(name, narrow)
    # 210,000 draws: the standard error of the width is 0.15 %, of the mean 0.2 % of the width.
    assert weight.std().item() == pytest.approx(want, rel=0.01)
    assert abs(weight.mean().item()) < 0.01 * want


def test_tails_are_cut_where_the_configuration_says():
    weight = start("megatron", initializer_cutoff_factor=1.0)
    assert 0.0299 < weight.abs().max().item() <= 0.03
    assert weight.std().item() == pytest.approx(0.03 * cut_std(1), rel=0.01)
    narrow = start("megatron", True)
    assert narrow.abs().max().item() <= 2 * 0.03 / 4
