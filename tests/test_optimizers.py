"Optimizers: steps by hand, resuming, and which parameter decays."

import copy
import io
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from bertlab.optimizers import OPTIMIZERS, get_optimizer, parameter_groups, parameter_table

NOTEBOOK = Path(__file__).parent.parent / "nbs/31_optimizers.ipynb"
# What lowers the least-squares loss below well: each optimizer has its own idea of a rate.
OPTIONS = {
    "adafactor": {"lr": 0.3},
    "adagrad": {"lr": 0.5},
    "adam": {"lr": 0.1},
    "adamw": {"lr": 0.1, "weight_decay": 0.01},
    "muon": {"lr": 0.1, "weight_decay": 0.0},
    "rmsprop": {"lr": 0.02},
    "sgd": {"lr": 0.1, "momentum": 0.9},
}


class Regression:
    "Least squares: inputs times a known matrix; a batch depends on the step alone."

    def __init__(self, name: str, weight: torch.Tensor | None = None):
        self.target = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
        self.weight = nn.Parameter(torch.zeros(4, 3) if weight is None else weight.clone())
        self.optimizer = get_optimizer(name, [self.weight], OPTIONS[name])

    def steps(self, start: int, stop: int) -> list[float]:
        losses = []
        for step in range(start, stop):
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
            loss = (x @ (self.weight - self.target)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_lowers_a_least_squares_loss(name):
    losses = Regression(name).steps(0, 100)
    assert sum(losses[-10:]) < 0.1 * sum(losses[:10]), losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_saved_optimizer_goes_on_bit_for_bit(name):
    whole = Regression(name)
    expected = whole.steps(0, 30)
    first = Regression(name)
    assert first.steps(0, 17) == expected[:17]
    buffer = io.BytesIO()
    torch.save(first.optimizer.state_dict(), buffer)
    buffer.seek(0)
    second = Regression(name, first.weight.detach())
    second.optimizer.load_state_dict(torch.load(buffer, weights_only=True))
    assert second.steps(17, 30) == expected[17:]
    assert torch.equal(second.weight, whole.weight)


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


def test_fused_kernels_are_used_where_the_class_and_the_device_have_them():
    weight = [nn.Parameter(torch.zeros(2))]
    assert get_optimizer("adamw", weight, {"lr": 0.1}).defaults["fused"] is True
    assert get_optimizer("adamw", iter(weight), {"fused": False}).defaults["fused"] is False
    assert get_optimizer("adamw", weight, {"foreach": True}).defaults["fused"] is None
    assert "fused" not in get_optimizer("rmsprop", weight).defaults
    elsewhere = [nn.Parameter(torch.zeros(2, device="meta"))]
    assert get_optimizer("adamw", weight + elsewhere).defaults["fused"] is None


def test_fused_and_plain_adamw_agree():
    torch.manual_seed(0)
    fused, plain = (nn.Parameter(torch.ones(50)) for _ in range(2))
    optimizers = [get_optimizer("adamw", [p], {"fused": f}) for p, f in ((fused, True), (plain, False))]
    for _ in range(20):
        fused.grad = torch.randn(50)
        plain.grad = fused.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)


def test_groups_given_as_generators_are_read_whole():
    model = nn.Linear(3, 2)
    optimizer = get_optimizer("adamw", [{"params": model.parameters(), "weight_decay": 0.5}], {"lr": 0.1})
    assert len(optimizer.param_groups[0]["params"]) == 2
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_the_callers_options_and_groups_are_left_as_they_were():
    options, groups = {"lr": 0.1}, parameter_groups(nn.Linear(3, 2))
    before = copy.copy(groups[0])
    get_optimizer("adamw", groups, options)
    assert options == {"lr": 0.1} and groups[0].keys() == before.keys()


@pytest.mark.parametrize("name", ["lion", "AdamW", "", "sophiah"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError) as error:
        get_optimizer(name, [nn.Parameter(torch.zeros(2))])
    assert "optimizer_name" in str(error.value) and repr(name) in str(error.value)
    assert all(known in str(error.value) for known in OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_unknown_option_is_named_with_what_the_optimizer_takes(name):
    with pytest.raises(ValueError, match=f"{name} has no 'learning_rate'; it takes lr"):
        get_optimizer(name, [nn.Parameter(torch.zeros(2, 2))], {"learning_rate": 0.1})


def test_muon_refuses_vectors_before_any_update():
    with pytest.raises(ValueError, match="muon moves matrices only"):
        get_optimizer("muon", nn.Linear(3, 2).parameters())


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


def test_each_trainable_parameter_is_in_one_group_once_even_when_tied():
    model = Odd()
    members = [id(p) for group in parameter_groups(model) for p in group["params"]]
    assert sorted(members) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert len(members) == len(set(members))


def test_embeddings_can_be_spared_whichever_name_of_a_tied_matrix_comes_first():
    model = Odd()
    decayed, spared = parameter_groups(model, decay_embeddings=False)
    assert names_in(model, decayed) == {"hidden.weight"}
    assert "decoder.weight" in names_in(model, spared)


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


def test_an_empty_group_is_not_made():
    (group,) = parameter_groups(nn.Linear(3, 2, bias=False))
    assert group["name"] == "decay"
    (group,) = parameter_groups(nn.LayerNorm(3))
    assert group["name"] == "no_decay"


def test_a_model_without_trainable_parameters_and_a_negative_decay_are_answered():
    with pytest.raises(ValueError, match="requires a gradient"):
        parameter_groups(nn.Linear(3, 2).requires_grad_(False))
    with pytest.raises(ValueError, match="weight_decay must be 0 or more, got -0.1"):
        parameter_groups(nn.Linear(3, 2), weight_decay=-0.1)


def test_the_table_has_a_line_for_each_parameter_and_shows_ties_and_frozen_ones():
    model = Odd()
    lines = parameter_table(model, parameter_groups(model, weight_decay=0.3)).splitlines()[1:]
    assert len(lines) == len(list(model.parameters()))
    by_name = {line.split("  ")[-1].strip(): line for line in lines}
    assert by_name["decoder.weight = embeddings.weight"].startswith("decay (0.3)")
    assert "11x8" in by_name["decoder.weight = embeddings.weight"]
    assert by_name["scale"].startswith("no_decay (0)")
    assert by_name["frozen.weight"].startswith("frozen")


def test_the_table_tells_the_truth_about_groups_made_by_hand():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight], "weight_decay": 0.25}])
    lines = parameter_table(model, optimizer.param_groups).splitlines()
    assert lines[1].startswith("0 (0.25)") and lines[2].startswith("left out")


def test_the_folded_solution_passes_its_check():
    cells = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]]
    exercise = next(text for text in cells if "def check_rmsprop" in text)
    folded = next(text for text in cells if "<summary>Solution</summary>" in text)
    names = {"torch": torch, "nn": nn}
    exec(exercise, names)
    assert names["check_rmsprop"]() == "not attempted"
    exec(folded.split("```python")[1].split("```")[0], names)
    assert names["check_rmsprop"]() == "right"
