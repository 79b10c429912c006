"Optimizers: steps by hand, kernels, and which parameter decays."

import copy

import pytest
import torch
from torch import nn

from bertlab.optim.groups import main_param_group, parameter_groups, parameter_table
from bertlab.optim.optimizers import OPTIMIZERS, get_optimizer
from bertlab.optim.schedulers import get_scheduler


def with_gradient(values: list[float], gradient: list[float]) -> nn.Parameter:
    parameter = nn.Parameter(torch.tensor(values, dtype=torch.float64))
    parameter.grad = torch.tensor(gradient, dtype=torch.float64)
    return parameter


def test_two_sgd_steps_by_hand():
    weight = with_gradient([1.0, -2.0], [0.5, 1.0])
    optimizer = get_optimizer("sgd", [weight], {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2})
    optimizer.step()
    # g = 0.5 + 0.2 * 1 = 0.7 and 1 + 0.2 * -2 = 0.6; the momentum starts as g.
    assert weight.tolist() == pytest.approx([1 - 0.07, -2 - 0.06])
    optimizer.step()
    # g = 0.5 + 0.2 * 0.93 = 0.686, m = 0.9 * 0.7 + 0.686; g = 1 - 0.2 * 2.06 = 0.588, m = 0.54 + 0.588.
    assert weight.tolist() == pytest.approx([0.93 - 0.1316, -2.06 - 0.1128])


def test_two_adamw_steps_by_hand():
    weight = with_gradient([1.0, -2.0], [0.5, -3.0])
    options = {"lr": 0.1, "betas": (0.5, 0.75), "eps": 0.0, "weight_decay": 0.2}
    optimizer = get_optimizer("adamw", [weight], options)
    optimizer.step()
    # Shrunk by 1 - 0.1 * 0.2, then a first step of exactly lr against the gradient's sign.
    assert weight.tolist() == pytest.approx([0.98 - 0.1, -1.96 + 0.1])
    weight.grad = torch.tensor([1.0, 3.0], dtype=torch.float64)
    optimizer.step()
    # m = 0.5 * 0.25 + 0.5 = 0.625, over 1 - 0.5^2; v = 0.75 * 0.0625 + 0.25 = 0.296875, over 1 - 0.75^2.
    first = 0.98 * 0.88 - 0.1 * (0.625 / 0.75) / (0.296875 / 0.4375) ** 0.5
    # m = 0.5 * -1.5 + 1.5 = 0.75, v = 0.75 * 2.25 + 2.25 = 3.9375.
    second = 0.98 * -1.86 - 0.1 * (0.75 / 0.75) / (3.9375 / 0.4375) ** 0.5
    assert weight.tolist() == pytest.approx([first, second])


def test_two_lion_steps_by_hand():
    weight = with_gradient([1.0, -2.0], [0.5, -3.0])
    options = {"lr": 0.1, "betas": (0.5, 0.75), "weight_decay": 0.2}
    optimizer = get_optimizer("lion", [weight], options)
    optimizer.step()
    # Shrunk by 1 - 0.1 * 0.2, then a step of lr against the sign; m = 0.25 * g.
    assert weight.tolist() == pytest.approx([0.98 - 0.1, -1.96 + 0.1])
    weight.grad = torch.tensor([-0.1, 0.5], dtype=torch.float64)
    optimizer.step()
    # Signs of 0.5 * 0.125 - 0.5 * 0.1 > 0 and of 0.5 * -0.75 + 0.5 * 0.5 < 0: the past outweighs g.
    assert weight.tolist() == pytest.approx([0.98 * 0.88 - 0.1, 0.98 * -1.86 + 0.1])


@pytest.mark.parametrize("size", [1.0, 20.0])  # norms of some 5 and 100
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"grad_averaging": False}])
def test_lamb_steps_as_it_was_published_with_corrected_moments_in_the_ratio(options, size):
    "You et al. 2020, algorithm 2, whose decay stands in the ratio; without averages it stays out."
    torch.manual_seed(0)
    weight, decay = (
        nn.Parameter(size * torch.randn(6, 4, dtype=torch.float64)),
        0.3 if "grad_averaging" not in options else 0.0,
    )
    settings = {"lr": 0.1, "weight_decay": decay, **options}
    optimizer = get_optimizer("lamb", [weight], settings)
    expected, m, v = weight.detach().clone(), 0.0, 0.0
    for t in range(1, 9):
        weight.grad = torch.randn(6, 4, dtype=torch.float64)
        m, v = 0.9 * m + 0.1 * weight.grad, 0.999 * v + 0.001 * weight.grad**2
        r = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + decay * expected
        expected = expected - 0.1 * expected.norm() / r.norm() * r
        optimizer.step()
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-5, atol=1e-5)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999), "the betas that were asked for"


@pytest.mark.parametrize("foreach", [True, False])
def test_biases_and_gains_have_no_ratio_in_lamb_and_move_as_adam_moves_them(foreach):
    "The authors' code leaves out of the ratio what it leaves out of decay; a bias begins at 0."
    torch.manual_seed(0)
    starts = [torch.zeros(5), torch.ones(5), torch.tensor(2.0), torch.randn(5, 3)]
    result, reference = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    lamb = get_optimizer("lamb", result, {"lr": 0.02, "foreach": foreach})
    adam = torch.optim.Adam(reference, 0.02, eps=1e-6)
    for _ in range(10):
        for parameter, partner in zip(result, reference):
            parameter.grad = torch.randn(parameter.shape)
            partner.grad = parameter.grad.clone()
        lamb.step()
        adam.step()
    for parameter, partner in zip(result[:3], reference[:3]):
        torch.testing.assert_close(parameter, partner, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(result[3], reference[3], rtol=0.01, atol=0.01), (
        "a matrix has the ratio"
    )
    assert not lamb.param_groups[0]["adam"]


@pytest.mark.parametrize("option", ["rectify", "fixed_decay"])
def test_a_decay_that_lamb_would_leave_out_of_the_ratio_anyway_is_not_lost(option):
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = get_optimizer("lamb", [weight], {"lr": 0.01, "weight_decay": 0.5, option: True})
    weight.grad = torch.zeros(4, 4)
    optimizer.step()
    assert (
        weight.tolist()
        == [[pytest.approx(0.5 if option == "fixed_decay" else 1 - 0.01 * 0.5)] * 4] * 4
    )


def muon_direction(gradient: torch.Tensor) -> torch.Tensor:
    "Five rounds of the quintic on the singular values themselves, not on the matrix."
    left_vectors, values, right = torch.linalg.svd(gradient.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left_vectors @ torch.diag(values) @ right


def test_two_muon_steps_by_hand():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 4))
    first, second = torch.randn(6, 4), torch.randn(6, 4)
    options = {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.5, "nesterov": True}
    optimizer = get_optimizer("muon", [weight], options)
    rate = 0.1 * (6 / 4) ** 0.5  # tall matrices move further
    # The running mean m starts at 0; Nesterov's step looks ahead to 0.2 g + 0.8 m.
    m = 0.2 * first
    expected = 0.95 * weight.detach().double() - rate * muon_direction(0.2 * first + 0.8 * m)
    weight.grad = first.clone()
    optimizer.step()
    torch.testing.assert_close(weight.detach().double(), expected, rtol=0, atol=0.004)
    m = 0.8 * m + 0.2 * second
    expected = 0.95 * expected - rate * muon_direction(0.2 * second + 0.8 * m)
    weight.grad = second.clone()
    optimizer.step()
    torch.testing.assert_close(weight.detach().double(), expected, rtol=0, atol=0.008)


def test_fused_kernels_are_used_where_the_class_and_the_device_have_them():
    weight = [nn.Parameter(torch.zeros(2))]
    assert get_optimizer("adamw", weight, {"lr": 0.1}).defaults["fused"] is True
    assert get_optimizer("adamw", iter(weight), {"fused": False}).defaults["fused"] is False
    assert get_optimizer("adamw", weight, {"foreach": True}).defaults["fused"] is None
    assert "fused" not in get_optimizer("rmsprop", weight).defaults
    elsewhere = [nn.Parameter(torch.zeros(2, device="meta"))]
    assert get_optimizer("adamw", weight + elsewhere).defaults["fused"] is None


def test_groups_given_as_generators_are_read_whole():
    model = nn.Linear(3, 2)
    optimizer = get_optimizer(
        "adamw", [{"params": model.parameters(), "weight_decay": 0.5}], {"lr": 0.1}
    )
    assert len(optimizer.param_groups[0]["params"]) == 2
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_the_callers_options_and_groups_are_left_as_they_were():
    options, groups = {"lr": 0.1}, parameter_groups(nn.Linear(3, 2))
    before = copy.copy(groups[0])
    get_optimizer("adamw", groups, options)
    assert options == {"lr": 0.1} and groups[0].keys() == before.keys()


@pytest.mark.parametrize("name", ["lions", "AdamW", "", "sophia"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError) as error:
        get_optimizer(name, [nn.Parameter(torch.zeros(2))])
    assert "optimizer_name" in str(error.value) and repr(name) in str(error.value)
    assert all(expected in str(error.value) for expected in OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_unknown_option_is_named_with_what_the_optimizer_takes(name):
    with pytest.raises(ValueError, match=f"{name} has no 'learning_rate'; it takes lr"):
        get_optimizer(name, [nn.Parameter(torch.zeros(2, 2))], {"learning_rate": 0.1})


class Odd(nn.Module):
    "A model with everything that is easy to sort wrongly."

    class RMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain_HK = nn.Parameter(torch.ones(2, 4))  # two-dimensional, and yet a norm's

    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(8, 11)  # met before the embedding that it is tied to
        self.embeddings = nn.Embedding(11, 8)
        self.decoder.weight = self.embeddings.weight
        self.hidden = nn.Linear(8, 8)
        self.twin = self.hidden  # one module under two names
        self.layer_norm, self.batch_norm = nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.head_norm = self.RMSNorm()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.vector = nn.Parameter(torch.ones(8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)


def names_in(model: nn.Module, group: dict) -> set[str]:
    members = {id(parameter) for parameter in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in members}


def test_matrices_and_embeddings_decay_and_nothing_else():
    model = Odd()
    decayed, spared = parameter_groups(model, weight_decay=0.3)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    assert names_in(model, decayed) == {"decoder.weight", "hidden.weight"}
    assert names_in(model, spared) == {
        "scale", "vector", "decoder.bias", "hidden.bias", "layer_norm.weight", "layer_norm.bias",
        "batch_norm.weight", "batch_norm.bias", "head_norm.gain_HK",
    }  # fmt: skip


def test_spared_parameters_stay_where_they_are_without_a_gradient():
    model = Odd()
    optimizer = get_optimizer("adamw", parameter_groups(model, weight_decay=0.5), {"lr": 0.1})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"decoder.weight", "hidden.weight"}
    torch.testing.assert_close(model.hidden.weight, before["hidden.weight"] * (1 - 0.1 * 0.5))


def test_a_model_without_trainable_parameters_and_a_negative_decay_are_answered():
    with pytest.raises(ValueError, match="requires a gradient"):
        parameter_groups(nn.Linear(3, 2).requires_grad_(False))
    with pytest.raises(ValueError, match="weight_decay=-0.1"):
        parameter_groups(nn.Linear(3, 2), weight_decay=-0.1)


RATES = {"hidden.*": {"lr": 0.5}, "*.bias": {"lr": 0.25, "weight_decay": 0.125}}


def test_overrides_set_rate_and_decay_and_the_later_pattern_wins():
    model = Odd()
    groups = {group["name"]: group for group in parameter_groups(model, 0.3, overrides=RATES)}
    assert set(groups) == {
        "decay",
        "decay: hidden.*",
        "no_decay",
        "no_decay: hidden.*: *.bias",
        "no_decay: *.bias",
    }
    assert names_in(model, groups["decay: hidden.*"]) == {"hidden.weight"}
    assert (groups["decay: hidden.*"]["lr"], groups["decay: hidden.*"]["weight_decay"]) == (
        0.5,
        0.3,
    )
    both = groups["no_decay: hidden.*: *.bias"]
    assert names_in(model, both) == {"hidden.bias"} and (both["lr"], both["weight_decay"]) == (
        0.25,
        0.125,
    )
    assert "lr" not in groups["decay"], "the optimizer's own rate"


def test_an_overridden_rate_and_decay_are_what_the_update_uses():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = parameter_groups(model, 0.1, overrides={"1.*": {"lr": 0.5, "weight_decay": 0.4}})
    optimizer = get_optimizer("sgd", groups, {"lr": 0.1})
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    factors = (1 - 0.1 * 0.1, 1.0, 1 - 0.5 * 0.4, 1 - 0.5 * 0.4)
    for parameter, start, factor in zip(model.parameters(), before, factors):
        torch.testing.assert_close(parameter.detach(), factor * start)


@pytest.mark.parametrize("overrides, rate", [
    ({}, 0.1), ({"hidden.*": {"lr": 0.001}}, 0.1), ({"hidden.*": {"lr": 0.5}}, 0.1), ({"*": {"lr": 0.02}}, 0.02),
    ({"*": {"weight_decay": 0.5}, "hidden.*": {"lr": 0.001}}, 0.1), ({"*": {"weight_decay": 0.5}}, 0.1),
])  # fmt: skip
def test_the_rate_of_a_run_is_that_of_a_group_without_an_override_wherever_it_stands(
    overrides, rate
):
    optimizer = get_optimizer("adamw", parameter_groups(Odd(), overrides=overrides), {"lr": 0.1})
    saved = optimizer.state_dict()["param_groups"]
    assert main_param_group(optimizer.param_groups)["lr"] == main_param_group(saved)["lr"] == rate
    get_scheduler(optimizer, warmup_steps=10)
    assert main_param_group(optimizer.param_groups)["lr"] == pytest.approx(rate / 10)
    assert main_param_group([{"params": [], "lr": 0.3}])["lr"] == 0.3, (
        "groups made by hand have no names"
    )


def test_a_pattern_matches_a_tied_matrix_by_either_name():
    for pattern in ("embeddings.*", "decoder.weight"):
        model = Odd()
        groups = parameter_groups(model, overrides={pattern: {"lr": 0.5}})
        (special,) = [group for group in groups if "lr" in group]
        assert names_in(model, special) == {"decoder.weight"}


@pytest.mark.parametrize("overrides, answer", [
    ({"hiden.*": {"lr": 0.1}}, r"'hiden\.\*' matches no"), ({"frozen.*": {"lr": 0.1}}, "no trainable parameter"),
    ({"hidden.*": {"rate": 0.1}}, "'rate' is unknown"), ({"hidden.*": {"lr": -0.1}}, "lr=-0.1"),
    ({"hidden.*": {"weight_decay": float("nan")}}, "weight_decay=nan"),
    ({"hidden.*": {"hidden": False}}, "hidden is for muon and galore"),
])  # fmt: skip
def test_a_wrong_override_is_named(overrides, answer):
    with pytest.raises(ValueError, match=answer):
        parameter_groups(Odd(), overrides=overrides)


def test_hidden_matrices_go_apart_and_no_embedding_head_or_vector_with_them():
    model = nn.ModuleDict(
        {"body": Odd(), "classifier": nn.Linear(8, 3), "conv": nn.Conv1d(2, 2, 3)}
    )
    hidden, decayed, spared = parameter_groups(model, 0.3, split_hidden=True)
    assert names_in(model, hidden) == {"body.hidden.weight"}
    assert names_in(model, decayed) == {"body.decoder.weight", "classifier.weight", "conv.weight"}
    assert (hidden["hidden"], decayed["hidden"], spared["hidden"]) == (True, False, False)
    assert (hidden["weight_decay"], decayed["weight_decay"], spared["weight_decay"]) == (
        0.3,
        0.3,
        0.0,
    )


def test_a_matrix_can_be_moved_in_and_out_of_the_hidden_ones_but_a_vector_cannot():
    model = Odd()
    moves = {"decoder.weight": {"hidden": True}, "hidden.weight": {"hidden": False}}
    groups = parameter_groups(model, split_hidden=True, overrides=moves)
    inside = set().union(*(names_in(model, group) for group in groups if group["hidden"]))
    assert inside == {"decoder.weight"}
    with pytest.raises(ValueError, match="hidden=True is for matrices"):
        parameter_groups(model, split_hidden=True, overrides={"hidden.*": {"hidden": True}})


def test_the_table_has_a_line_for_each_parameter_and_shows_ties_and_frozen_ones():
    model = Odd()
    lines = parameter_table(model, parameter_groups(model, weight_decay=0.3)).splitlines()[1:]
    assert len(lines) == len(list(model.parameters()))
    by_name = {line.split("  ")[-1].strip(): line for line in lines}
    assert by_name["decoder.weight = embeddings.weight"].startswith("decay (0.3)")
    assert "11x8" in by_name["decoder.weight = embeddings.weight"]
    assert by_name["scale"].startswith("no_decay (0)")
    assert by_name["frozen.weight"].startswith("frozen")
