"Rounding by hand is torch's; what a format loses is counted before a run loses it."

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.explorers.precision import (
    FLOAT_FORMATS,
    count_lost,
    get_format,
    largest_loss_scale,
    round_to,
)

IN_TORCH = ["float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn"]
any_float32 = st.floats(width=32, allow_nan=False)


@pytest.mark.parametrize("name", IN_TORCH)
def test_the_figures_of_a_format_are_torchs(name):
    f, info = get_format(name), torch.finfo(getattr(torch, name))
    assert (f.largest, f.smallest_normal, f.epsilon) == (info.max, info.tiny, info.eps)
    assert 1 + f.exponent_bits + f.mantissa_bits == info.bits
    assert (
        f.smallest
        == torch.tensor(1, dtype=getattr(torch, f"int{info.bits}"))
        .view(getattr(torch, name))
        .double()
    )


@pytest.mark.parametrize("name", IN_TORCH)
@settings(derandomize=True, deadline=None, max_examples=150)
@given(values=st.lists(any_float32, min_size=1, max_size=20))
def test_rounding_by_hand_is_torchs_cast(name, values):
    x = torch.tensor(values, dtype=torch.float32)
    if not get_format(name).has_infinity:  # over the edge versions of torch differ
        x = x[x.abs() <= get_format(name).largest]
    assert torch.equal(round_to(x, name), x.to(getattr(torch, name)).double())


def test_ties_go_to_the_even_neighbour_and_the_edges_are_right():
    # bfloat16 has 1, 1 + 1/128, 1 + 2/128 in a row: in the middle the even mantissa wins.
    x = torch.tensor([1 + 1 / 256, 1 + 3 / 256, -(1 + 1 / 256), 0.0])
    assert round_to(x, "bfloat16").tolist() == [1.0, 1 + 2 / 128, -1.0, 0.0]
    # float16 ends at 65504; half a step more is infinite. Its smallest number is 2**-24, half of it is 0.
    x = torch.tensor([65519.0, 65520.0, -1e30, 2.0**-24, 2.0**-25, 1.01 * 2.0**-25])
    assert round_to(x, "float16").tolist() == [
        65504.0,
        math.inf,
        -math.inf,
        2.0**-24,
        0.0,
        2.0**-24,
    ]
    assert round_to(torch.tensor([math.inf, -math.inf]), "bfloat16").tolist() == [
        math.inf,
        -math.inf,
    ]
    assert round_to(torch.tensor([math.nan]), "float16").isnan().all()
    assert round_to(torch.tensor([448.0, 1e6]), "float8_e4m3fn").isnan().tolist() == [False, True]


def test_tensor_cores_float32_has_float16s_digits_and_float32s_range():
    x = torch.tensor([1 + 2.0**-10, 1 + 2.0**-12, 1e30])
    rounded = round_to(x, "tfloat32")
    assert rounded[:2].tolist() == [1 + 2.0**-10, 1.0] and rounded[2].isfinite()


def test_lost_numbers_are_shares_of_those_that_are_not_zero():
    # By hand: 0 does not count; of five others one vanishes, one is coarse, one overflows.
    gradients = [torch.tensor([0.0, 1.0, -2.0]), torch.tensor([[1e-9, 1e-6, -1e5]])]
    assert count_lost(gradients, "float16") == pytest.approx((0.2, 0.2, 0.2))
    assert count_lost(gradients, "bfloat16") == (0, 0, 0)
    assert count_lost(gradients, "float16", scale=2.0**10) == pytest.approx((0, 0.2, 0.2))
    assert count_lost([], "float16") == count_lost([torch.zeros(3)], "float16") == (0, 0, 0)


def test_the_largest_scale_overflows_nothing_and_twice_the_headroom_does():
    gradients = [torch.tensor([0.3, -0.011]), torch.tensor([[1e-7]])]
    scale = largest_loss_scale(gradients, headroom=1.0)
    assert math.log2(scale) == int(math.log2(scale))
    assert (
        count_lost(gradients, "float16", scale).overflow
        == 0
        < count_lost(gradients, "float16", 2 * scale).overflow
    )
    assert largest_loss_scale(gradients) == scale / 16


def test_frozen_weights_have_no_gradient_and_are_left_out():
    frozen, gradients = [None, torch.zeros(0)], [torch.tensor([0.3, 1e-9])]
    assert count_lost([*frozen, *gradients], "float16") == count_lost(gradients, "float16")
    assert largest_loss_scale([*frozen, *gradients]) == largest_loss_scale(gradients)


NAN, ONE = torch.tensor([math.nan]), torch.ones(1)


@pytest.mark.parametrize(
    "gradients",
    [[], [None], [torch.zeros(2)], [torch.tensor([math.inf])], [NAN], [NAN, ONE], [ONE, NAN]],
)
def test_without_a_finite_gradient_there_is_no_scale(gradients):
    with pytest.raises(ValueError, match="backward"):
        largest_loss_scale(gradients)


def test_an_unknown_format_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=", ".join(FLOAT_FORMATS)):
        round_to(torch.ones(1), "float4")
