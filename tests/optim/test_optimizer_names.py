"Each of the fifteen optimizers: it lowers losses, goes on after loading, and refuses what it cannot do."

import io
import sys

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bertlab.model.config import BertLabConfig
from bertlab.optim.groups import parameter_groups
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.losses import masked_lm_loss
from bertlab.optim.optimizers import (
    OPTIMIZERS,
    backward_options,
    get_optimizer,
)

HIDDEN_APART = {"muon", "galore"}
# Rates for the encoder of width 32 below; each optimizer has its own idea of a rate.
OPTIONS = {
    "adafactor": {"lr": 0.03},
    "adagrad": {"lr": 0.05},
    "adam": {"lr": 0.005},
    "adamw": {"lr": 0.005},
    "galore": {"lr": 0.005, "rank": 8, "update_proj_gap": 5, "scale": 1.0},
    "lamb": {"lr": 0.05},
    "lars": {"lr": 10.0},
    "lion": {"lr": 0.002},
    "muon": {"lr": 0.005},
    "rmsprop": {"lr": 0.002},
    "sgd": {"lr": 0.3, "momentum": 0.9},
    "shampoo": {"lr": 0.1},
    "soap": {"lr": 0.005},
    "sophiah": {"lr": 0.2, "update_period": 4},
    "splus": {"lr": 0.2, "inverse_steps": 5},
}
# And for the least squares below, whose only matrix starts at 0: ratios of norms need a start.
SQUARES = {
    "adafactor": {"lr": 0.3}, "adagrad": {"lr": 0.5}, "adam": {"lr": 0.1}, "adamw": {"lr": 0.1},
    "galore": {"lr": 0.1, "rank": 2, "update_proj_gap": 3, "scale": 1.0}, "lamb": {"lr": 0.1},
    "lars": {"lr": 50.0}, "lion": {"lr": 0.03}, "muon": {"lr": 0.1, "weight_decay": 0.0},
    "rmsprop": {"lr": 0.02}, "sgd": {"lr": 0.1, "momentum": 0.9}, "shampoo": {"lr": 0.5},
    "soap": {"lr": 0.1}, "sophiah": {"lr": 1.0, "update_period": 2, "p": 0.1},
    "splus": {"lr": 0.3, "inverse_steps": 4},
}  # fmt: skip


class LeastSquares:
    "Inputs times a known matrix; batches, and SophiaH's noise, depend on the step alone."

    def __init__(self, name: str, weight: torch.Tensor | None = None):
        draw = torch.Generator().manual_seed(1)
        self.target = torch.randn(4, 3, generator=draw)
        start = 0.3 * torch.randn(4, 3, generator=draw) if weight is None else weight
        self.weight = nn.Parameter(start.clone())
        self.optimizer = get_optimizer(name, [self.weight], SQUARES[name])

    def steps(self, start: int, stop: int) -> list[float]:
        losses = []
        for step in range(start, stop):
            torch.manual_seed(step)
            loss = (torch.randn(16, 4) @ (self.weight - self.target)).square().mean()
            self.optimizer.zero_grad()
            loss.backward(**backward_options(self.optimizer))
            self.optimizer.step()
            losses.append(loss.item())
        return losses


class Encoder:
    "Fill the gaps of one fixed batch with a tiny encoder."

    def __init__(self, name: str, weights: dict | None = None):
        torch.manual_seed(0)
        config = BertLabConfig(
            vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=48, max_position_embeddings=16,
        )  # fmt: skip
        self.model = BertLabForMaskedLM(config)
        if weights:
            self.model.load_state_dict(weights)
        draw = torch.Generator().manual_seed(1)
        self.ids_BL = torch.randint(5, 60, (8, 12), generator=draw)
        self.positions_BM = torch.arange(1, 12, 3).expand(8, -1)
        groups = parameter_groups(self.model, split_hidden=name in HIDDEN_APART)
        self.optimizer = get_optimizer(name, groups, OPTIONS[name])

    def steps(self, start: int, stop: int) -> list[float]:
        losses = []
        for step in range(start, stop):
            torch.manual_seed(step)
            self.optimizer.zero_grad()
            # SophiaH differentiates twice, which the flash kernel cannot.
            with sdpa_kernel(SDPBackend.MATH):
                logits = self.model(self.ids_BL, label_positions=self.positions_BM).logits
                loss, count = masked_lm_loss(logits, self.ids_BL.gather(1, self.positions_BM))
                (loss / count).backward(**backward_options(self.optimizer))
            self.optimizer.step()
            losses.append((loss / count).item())
        return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_lowers_a_least_squares_loss(name):
    losses = LeastSquares(name).steps(0, 100)
    assert sum(losses[-10:]) < 0.1 * sum(losses[:10]), losses


@pytest.mark.parametrize("task", [LeastSquares, Encoder])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_saved_optimizer_continues_bit_for_bit(name, task):
    "Through torch.save, and with `weights_only`, which runs no code from the file."
    uninterrupted, first = task(name), task(name)
    expected = uninterrupted.steps(0, 12)
    assert first.steps(0, 7) == expected[:7]
    buffer = io.BytesIO()
    weights = first.weight.detach() if task is LeastSquares else first.model.state_dict()
    torch.save({"weights": weights, "optimizer": first.optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    second = task(name, saved["weights"])
    second.optimizer.load_state_dict(saved["optimizer"])
    assert second.steps(7, 12) == expected[7:]


def test_an_embedding_is_never_projected_by_galore_nor_made_orthogonal_by_muon():
    for name, mark in (("galore", "projector"), ("muon", "momentum_buffer")):
        task = Encoder(name)
        task.steps(0, 1)
        marked = {n for n, p in task.model.named_parameters() if mark in task.optimizer.state[p]}
        assert marked and not any("tokens" in n or "norm" in n or "bias" in n for n in marked)
        assert any(n.endswith("qkv.weight") for n in marked)


def test_galore_keeps_its_moments_in_the_low_rank_space():
    weight = nn.Parameter(torch.randn(12, 20))
    weight.grad = torch.randn(12, 20)
    optimizer = get_optimizer("galore", [weight], {"lr": 0.1, "rank": 3})
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].shape == (3, 20)


def test_sophiah_without_the_graph_says_which_call_makes_it():
    task = LeastSquares("sophiah")
    task.weight.grad = torch.ones(4, 3)
    with pytest.raises(RuntimeError, match=r"loss.backward\(\*\*backward_options\(optimizer\)\)"):
        task.optimizer.step()


def test_sophiah_asks_for_the_graph_only_when_it_looks_at_the_curvature():
    task, requested = LeastSquares("sophiah"), []
    for step in range(5):
        requested.append(bool(backward_options(task.optimizer)))
        task.steps(step, step + 1)
        assert not task.weight.grad.requires_grad, "the graph is let go of"
    assert requested == [True, False, True, False, True]
    assert not backward_options(LeastSquares("adamw").optimizer)


def test_sophiah_estimates_the_diagonal_of_the_hessian():
    "Of sum(c w^2) it is 2c; with noise of +1 and -1 the estimate is exact."
    weight, c = nn.Parameter(torch.ones(2, 2)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    options = {"betas": (0.9, 0.0), "hessian_distribution": "rademacher"}
    optimizer = get_optimizer("sophiah", [weight], options)
    (c * weight**2).sum().backward(**backward_options(optimizer))
    optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["hessian_moment"], 2 * c)


def test_a_missing_library_is_an_import_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(
        ImportError, match=r"optimizer \'lion\' needs.*pip install .*\[optimizers\]"
    ):
        get_optimizer("lion", [nn.Parameter(torch.zeros(2))])
    assert get_optimizer("adamw", [nn.Parameter(torch.zeros(2))])  # torch's own need nothing more


def test_no_parameters_at_all_are_answered():
    used_up = iter([])
    with pytest.raises(ValueError, match="params has no parameter"):
        get_optimizer("adamw", used_up)


class Mine(torch.optim.SGD):
    "An optimizer of a user."


def test_a_users_own_optimizer_is_a_class_a_function_or_its_name(monkeypatch, tmp_path):
    (tmp_path / "my_optimizers.py").write_text(
        "import torch\nclass Slow(torch.optim.SGD):\n    def __init__(self, params, lr=0.1, slowness=2):\n"
        "        super().__init__(params, lr / slowness)\n"
    )
    monkeypatch.chdir(tmp_path)
    weight = [nn.Parameter(torch.zeros(2))]
    assert type(get_optimizer(Mine, weight, {"lr": 0.3})) is Mine
    assert (
        get_optimizer(lambda groups, lr: Mine(groups, lr), weight, {"lr": 0.3}).param_groups[0][
            "lr"
        ]
        == 0.3
    )
    fragment = get_optimizer("my_optimizers.Slow", weight, {"lr": 1.0, "slowness": 4})
    assert fragment.param_groups[0]["lr"] == 0.25
    with pytest.raises(ValueError, match="'slow'.*slowness"):
        get_optimizer("my_optimizers.Slow", weight, {"slow": 4})
    with pytest.raises(ValueError, match="Fast"):
        get_optimizer("my_optimizers.Fast", weight)
    with pytest.raises(ValueError, match="quantized=True"):
        get_optimizer(Mine, weight, {"lr": 0.1}, quantized=True)


@pytest.mark.parametrize("name, options, answer", [
    ("adamw", {"betas": 0.9}, "adamw"), ("adamw", {"betas": [0.9]}, "adamw"), ("muon", {"betas": 1}, "muon"),
    ("shampoo", {"preconditioning_compute_steps": 0}, "preconditioning_compute_steps"),
    ("shampoo", {"momentum": 0.9}, "shampoo's momentum must be 0, got 0.9"),
])  # fmt: skip
def test_a_wrong_option_is_named(name, options, answer):
    groups = [
        {"params": [nn.Parameter(torch.zeros(2, 2))]},
        {"params": [nn.Parameter(torch.zeros(2))]},
    ]
    if name in HIDDEN_APART:
        groups = [{**group, "hidden": hidden} for group, hidden in zip(groups, (True, False))]
    with pytest.raises(ValueError, match=answer):
        get_optimizer(name, groups, options)


def test_another_way_of_orthogonalising_takes_the_place_of_muons():
    from bertlab.optim.muon import MuonWithAdamW, BatchedMuon

    class Signs(BatchedMuon):
        def orthogonalize_updates(self, updates, parameters, group):
            return updates.sign()

    class Own(MuonWithAdamW):
        hidden_class = Signs

    torch.manual_seed(0)
    matrix = nn.Parameter(torch.randn(3, 4))
    before, grad = matrix.detach().clone(), torch.randn(3, 4)
    optimizer = Own([{"params": [matrix], "hidden": True}], lr=0.1, weight_decay=0.0)
    copied = io.BytesIO()
    torch.save(optimizer.state_dict(), copied)
    for step in range(2):
        matrix.grad = grad.clone()
        optimizer.step()
    torch.testing.assert_close(matrix.detach(), before - 2 * 0.1 * 0.2 * 2 * grad.sign())
