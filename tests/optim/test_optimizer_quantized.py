"8-bit states: which library, on which device, what is saved, and what happens where it does not work."

import inspect
import io
import sys
import warnings

import pytest
import torch
from torch import nn

from bertlab.optim.optimizers import OPTIMIZERS, get_optimizer, optimizer_state_bytes
from bertlab.optim.schedulers import get_scheduler

EIGHT_BIT = [name for name, facts in OPTIMIZERS.items() if facts.eight_bit]
OPTIONS = {"adagrad": {"lr": 0.02}, "adam": {"lr": 0.01}, "adamw": {"lr": 0.01}, "lion": {"lr": 0.003},
           "rmsprop": {"lr": 0.002}, "sgd": {"lr": 3.0, "momentum": 0.9}}  # fmt: skip


class LeastSquares:
    "As large as 8-bit states need it: 64 x 128 weights; a batch depends on the step alone."

    def __init__(self, name: str, quantized: bool = True, weight: torch.Tensor | None = None):
        draw = torch.Generator().manual_seed(1)
        self.target = 0.1 * torch.randn(64, 128, generator=draw)
        self.weight = nn.Parameter(torch.zeros(64, 128) if weight is None else weight.clone())
        self.optimizer = get_optimizer(name, [self.weight], OPTIONS[name], quantized=quantized)
        self.scheduler = get_scheduler(self.optimizer, warmup_steps=4)

    def steps(self, start: int, stop: int) -> list[float]:
        losses = []
        for step in range(start, stop):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
            loss = (x @ (self.weight - self.target)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


@pytest.fixture
def bitsandbytes(monkeypatch):
    pytest.importorskip("bitsandbytes")


@pytest.fixture
def torchao(monkeypatch):
    "torchao alone, with its compiled update run as it is written."
    pytest.importorskip("torchao.optim")
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def check_that_it_learns_in_8_bit(name):
    small, full = LeastSquares(name), LeastSquares(name, quantized=False)
    in_8_bits, full_precision = small.steps(0, 40), full.steps(0, 40)
    assert in_8_bits[-1] < 0.3 * in_8_bits[0], in_8_bits
    assert abs(in_8_bits[-1] - full_precision[-1]) < 0.1 * full_precision[0], (
        "and much as in full precision"
    )
    # A byte a value instead of 4, and a scale of 4 bytes for 256 of them; a map of 256 numbers each.
    assert (
        optimizer_state_bytes(small.optimizer)
        < 0.27 * optimizer_state_bytes(full.optimizer) + 2 * 1024
    )


def check_that_it_goes_on(name):
    uninterrupted, first = LeastSquares(name), LeastSquares(name)
    expected = uninterrupted.steps(0, 12)
    assert first.steps(0, 7) == expected[:7]
    buffer = io.BytesIO()
    torch.save([first.optimizer.state_dict(), first.scheduler.state_dict()], buffer)
    buffer.seek(0)
    optimizer_state, scheduler_state = torch.load(buffer, weights_only=True)
    second = LeastSquares(name, weight=first.weight.detach())
    second.optimizer.load_state_dict(optimizer_state)
    second.scheduler.load_state_dict(scheduler_state)
    assert second.steps(7, 12) == expected[7:]


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_8_bit_states_learn_and_take_a_quarter_of_the_memory(name, bitsandbytes):
    check_that_it_learns_in_8_bit(name)


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_8_bit_states_go_on_bit_for_bit_after_loading(name, bitsandbytes):
    check_that_it_goes_on(name)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_torchao_learns_and_goes_on_with_a_schedule_that_sets_plain_numbers(name, torchao):
    assert type(LeastSquares(name).optimizer).__module__.startswith("torchao")
    check_that_it_learns_in_8_bit(name)
    check_that_it_goes_on(name)


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - set(EIGHT_BIT)))
def test_without_an_8_bit_version_it_warns_and_is_the_same_optimizer(name):
    with pytest.warns(UserWarning, match=f"no 8-bit {name} on cpu .*full precision"):
        warned = get_optimizer(name, [nn.Parameter(torch.zeros(2, 2))], quantized=True)
    assert type(warned).__name__ == OPTIMIZERS[name].class_name


class Broken(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("no kernel for this device\nand a long trace")


class Idle(torch.optim.SGD):
    def step(self, closure=None):
        "A kernel that does nothing."


@pytest.mark.parametrize(
    "error_type, reason",
    [
        (Broken, "no kernel for this device"),
        (Idle, "its step does not move the weights"),
        (torch.optim.SGD, "its states are not 8-bit"),
    ],
)
def test_a_probe_step_that_fails_leads_to_full_precision(monkeypatch, error_type, reason):
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(sys.modules["bitsandbytes"].optim, "SGD8bit", error_type)
    with pytest.warns(UserWarning, match=rf"bitsandbytes: {reason}\); its states stay"):
        optimizer = get_optimizer(
            "sgd", [nn.Parameter(torch.zeros(2))], {"lr": 0.1, "momentum": 0.9}, quantized=True
        )
    assert type(optimizer) is torch.optim.SGD


# Every option that an 8-bit class and its namesake have in common, away from its default.
TRIED = {"betas": (0.5, 0.75), "eps": 0.1, "alpha": 0.5, "momentum": 0.9, "dampening": 0.5, "nesterov": True,
         "centered": True, "amsgrad": True, "lr_decay": 0.5, "initial_accumulator_value": 1.0}  # fmt: skip


@pytest.mark.filterwarnings("ignore:quantized=True")  # what is passed over says so
@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("name", EIGHT_BIT)
def test_with_any_option_8_bits_move_the_weights_as_full_precision_does(name, decay, bitsandbytes):
    plain = get_optimizer(name, [nn.Parameter(torch.zeros(2))]).defaults
    base = {"lr": 0.01, **({"momentum": 0.9} if name == "sgd" else {})}
    result = inspect.signature(
        getattr(sys.modules["bitsandbytes"].optim, OPTIMIZERS[name].eight_bit[0].split(".")[-1])
    )
    for extra in (
        {},
        *({key: TRIED[key]} for key in TRIED if key in plain and key in result.parameters),
    ):
        ends = []
        for quantized in (True, False):
            weight = nn.Parameter(torch.ones(64, 128))
            optimizer = get_optimizer(
                name, [{"params": [weight], "weight_decay": decay}], base | extra, quantized
            )
            for step in range(3):
                weight.grad = torch.randn(64, 128, generator=torch.Generator().manual_seed(step))
                optimizer.step()
            ends.append(weight.detach() - 1)
        in_8_bits, full_precision = ends
        assert (in_8_bits - full_precision).norm() < 0.06 * full_precision.norm(), (name, extra)


@pytest.mark.parametrize("name, options, requested", [
    ("adam", {"weight_decay": 0.1}, "adam's weight_decay=0.1"), ("rmsprop", {"momentum": 0.9}, "rmsprop's momentum=0.9"),
    ("sgd", {"momentum": 0.9, "nesterov": True}, "sgd's nesterov=True"),
    ("sgd", {"momentum": 0.9, "dampening": 0.1}, "sgd's dampening=0.1"),
])  # fmt: skip
def test_an_option_that_bitsandbytes_does_not_follow_keeps_full_precision(
    name, options, requested, bitsandbytes, monkeypatch
):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.warns(
        UserWarning, match=f"bitsandbytes does not support {requested}.*full precision"
    ):
        optimizer = get_optimizer(
            name, [nn.Parameter(torch.zeros(64, 128))], {"lr": 0.1, **options}, quantized=True
        )
    assert type(optimizer).__module__.startswith("torch.optim")


def test_groups_keep_their_rate_and_decay_in_8_bit(bitsandbytes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights = [nn.Parameter(torch.ones(64, 128)) for _ in range(2)]
        groups = [
            {"params": weights[:1], "weight_decay": 0.5},
            {"params": weights[1:], "lr": 0.2, "weight_decay": 0.0},
        ]
        optimizer = get_optimizer("adamw", groups, {"lr": 0.1}, quantized=True)
    for weight in weights:
        weight.grad = torch.zeros(64, 128)
    optimizer.step()
    torch.testing.assert_close(weights[0].detach(), torch.full((64, 128), 0.95))
    torch.testing.assert_close(weights[1].detach(), torch.ones(64, 128))
