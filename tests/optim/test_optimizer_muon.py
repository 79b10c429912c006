"Muon on hidden matrices with AdamW on the rest: one optimizer to everyone who holds it."

import copy
import io

import pytest
import torch
from torch import nn

from bertlab.optim.groups import parameter_groups
from bertlab.optim.muon import QUINTIC, MuonWithAdamW, BatchedMuon, orthogonalize
from bertlab.optim.optimizers import get_optimizer
from bertlab.optim.schedulers import get_scheduler

OPTIONS = {"lr": 0.05, "momentum": 0.8, "betas": (0.8, 0.9)}


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 6), nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6))


def mixed(model: nn.Module, **options) -> MuonWithAdamW:
    groups = parameter_groups(model, weight_decay=0.1, split_hidden=True)
    return get_optimizer("muon", groups, {**OPTIONS, **options})


def backward(model: nn.Module, step: int) -> torch.Tensor:
    ids = torch.randint(9, (20,), generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    loss = (model(ids) - model[0].weight.detach()[ids.roll(1)]).square().mean()
    loss.backward()
    return loss


def run(model, optimizer, scheduler, start, stop) -> list[float]:
    losses = []
    for step in range(start, stop):
        losses.append(backward(model, step).item())
        optimizer.step()
        scheduler.step()
    return losses


@pytest.mark.parametrize("fused", [None, True, False])
def test_each_parameter_has_its_own_optimizers_update(fused, monkeypatch):
    monkeypatch.setattr(
        "bertlab.optim.muon.cpu_multiplies_bfloat16", lambda: True
    )  # as torch's own
    together, apart = small_model(), small_model()
    kernel = {} if fused is None else {"fused": fused}
    optimizer = mixed(together, **kernel)
    hidden = [apart[2].weight, apart[3].weight]
    plain = [p for name, p in apart.named_parameters() if p.ndim == 1]
    optimizers = (
        torch.optim.Muon(hidden, lr=0.05, momentum=0.8, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": [apart[0].weight], "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
            lr=0.05, betas=(0.8, 0.9),
        ),
    )  # fmt: skip
    for step in range(5):
        backward(together, step)
        backward(apart, step)
        optimizer.step()
        for second in optimizers:
            second.step()
    for combined, separate in zip(together.parameters(), apart.parameters()):
        torch.testing.assert_close(combined, separate, rtol=1e-5, atol=1e-6)


def test_a_schedule_moves_both_rates_and_the_update_follows():
    model = small_model()
    optimizer = mixed(model)
    scheduler = get_scheduler(optimizer, warmup_steps=5)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01] * 3)
    run(model, optimizer, scheduler, 0, 2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.03] * 3)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(model.state_dict())
    backward(model, 9)
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_loaded_state_continues_bit_for_bit():
    model = small_model()
    optimizer = mixed(model)
    scheduler = get_scheduler(optimizer, warmup_steps=5)
    run(model, optimizer, scheduler, 0, 4)
    buffer = io.BytesIO()
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torch.save({key: part.state_dict() for key, part in parts.items()}, buffer)
    expected = run(model, optimizer, scheduler, 4, 9)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    second = small_model()
    again = mixed(second)
    follow = get_scheduler(again, warmup_steps=5)
    for key, part in {"model": second, "optimizer": again, "scheduler": follow}.items():
        part.load_state_dict(saved[key])
    assert run(second, again, follow, 4, 9) == expected


def test_copies_update_their_own_weights():
    model = small_model()
    optimizer = mixed(model)
    backward(model, 0)
    optimizer.step()
    for duplicate in (copy.deepcopy, through_pickle):
        second, again = duplicate((model, optimizer))
        before = copy.deepcopy(model.state_dict())
        backward(second, 1)
        again.step()
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        assert not any(torch.equal(p, before[name]) for name, p in second.named_parameters())


def through_pickle(pair):
    buffer = io.BytesIO()
    torch.save(pair, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_wrong_groups_are_named():
    with pytest.raises(ValueError, match="hidden=True or hidden=False"):
        MuonWithAdamW([{"params": [nn.Parameter(torch.zeros(2, 2))]}])
    with pytest.raises(ValueError, match="muon updates matrices only"):
        get_optimizer("muon", [{"params": [nn.Parameter(torch.zeros(2))], "hidden": True}])
    with pytest.raises(ValueError, match="muon has no 'nesterof'; it takes lr.*ns_steps"):
        mixed(small_model(), nesterof=True)


# --- matrices together, and processors without bfloat16 -----------------------------------------


def by_decomposition(matrix: torch.Tensor) -> torch.Tensor:
    "The quintic's rounds on the singular values alone."
    U, sigma, V = torch.linalg.svd(matrix.double(), full_matrices=False)
    sigma = sigma / sigma.norm()
    a, b, c = QUINTIC
    for _ in range(5):
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return U @ sigma.diag() @ V


@pytest.mark.parametrize("shape", [(6, 6), (8, 3), (3, 8), (1, 5), (16, 40)])
def test_batched_matrices_equal_single_ones(shape):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    together = orthogonalize(matrices, dtype=torch.float32)
    for matrix, result in zip(matrices, together):
        torch.testing.assert_close(
            result, orthogonalize(matrix, dtype=torch.float32), rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(result.double(), by_decomposition(matrix), rtol=0, atol=1e-5)


def test_zeros_stay_zero():
    assert not orthogonalize(torch.zeros(2, 3, 4)).any()
    assert not orthogonalize(torch.zeros(2, 3, 4), dtype=torch.float32).any()
    assert not orthogonalize(torch.zeros(2, 3, 8), dtype=torch.float32).any()


@pytest.mark.parametrize(("able", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_without_bfloat16_iterates_in_float32(monkeypatch, able, dtype):
    monkeypatch.setattr("bertlab.optim.muon.cpu_multiplies_bfloat16", lambda: able)
    assert orthogonalize(torch.randn(4, 4)).dtype == dtype


def test_parameters_without_gradients_are_unchanged():
    first, second, third = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))
    optimizer = BatchedMuon([{"params": [first, second, third]}], lr=0.1, weight_decay=0.0)
    first.grad, third.grad = torch.randn(4, 4), torch.randn(4, 4)
    before = second.detach().clone()
    optimizer.step()
    assert (
        torch.equal(second, before) and second not in optimizer.state and third in optimizer.state
    )


@pytest.mark.parametrize("option, value", [
    ("ns_steps", 0), ("momentum", 1.5), ("momentum", float("nan")), ("lr", -0.1), ("weight_decay", -1),
    ("adjust_lr_fn", "adam"),
])  # fmt: skip
def test_wrong_options_are_named_with_their_value(option, value):
    for build in (
        lambda options: mixed(small_model(), **options),
        lambda options: BatchedMuon([nn.Parameter(torch.zeros(2, 2))], **options),
    ):
        with pytest.raises(ValueError, match=f"{option}={value!r}"):
            build({option: value})
