"Muon on hidden matrices with AdamW on the rest: one optimizer to everyone who holds it."

import copy
import io

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

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
    others = (
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
        for other in others:
            other.step()
    for ours, theirs in zip(together.parameters(), apart.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


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
    other = small_model()
    again = mixed(other)
    follow = get_scheduler(again, warmup_steps=5)
    for key, part in {"model": other, "optimizer": again, "scheduler": follow}.items():
        part.load_state_dict(saved[key])
    assert run(other, again, follow, 4, 9) == expected


def test_copies_update_their_own_weights():
    model = small_model()
    optimizer = mixed(model)
    backward(model, 0)
    optimizer.step()
    for duplicate in (copy.deepcopy, through_pickle):
        other, again = duplicate((model, optimizer))
        before = copy.deepcopy(model.state_dict())
        backward(other, 1)
        again.step()
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        assert not any(torch.equal(p, before[name]) for name, p in other.named_parameters())


def through_pickle(pair):
    buffer = io.BytesIO()
    torch.save(pair, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_a_closure_is_called_once_with_gradients_on():
    model, calls = small_model(), []

    def closure():
        calls.append(torch.is_grad_enabled())
        return backward(model, 0)

    loss = mixed(model).step(closure)
    assert calls == [True] and loss.item() > 0


def test_a_group_added_later_is_updated():
    model, late = small_model(), nn.Linear(3, 3, bias=False)
    optimizer = mixed(model)
    optimizer.add_param_group({"params": late.parameters(), "hidden": True})
    before, late.weight.grad = late.weight.detach().clone(), torch.eye(3)
    optimizer.step()
    assert "momentum_buffer" in optimizer.state[late.weight] and not torch.equal(
        before, late.weight
    )
    assert optimizer.param_groups[-1]["momentum"] == 0.8, "with the options it was built with"


def test_wrong_groups_are_named():
    with pytest.raises(ValueError, match="hidden=True or hidden=False"):
        MuonWithAdamW([{"params": [nn.Parameter(torch.zeros(2, 2))]}])
    with pytest.raises(ValueError, match="muon updates matrices only"):
        get_optimizer("muon", [{"params": [nn.Parameter(torch.zeros(2))], "hidden": True}])
    with pytest.raises(ValueError, match="muon has no 'nesterof'; it takes lr.*ns_steps"):
        mixed(small_model(), nesterof=True)


@pytest.mark.parametrize("hidden", [True, False])
def test_one_kind_of_group_is_enough(hidden):
    weight = nn.Parameter(torch.eye(3))
    weight.grad = torch.ones(3, 3)
    get_optimizer("muon", [{"params": [weight], "hidden": hidden}], {"lr": 0.1}).step()
    assert not torch.equal(weight.detach(), torch.eye(3))


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = small_model()

    def configure_optimizers(self):
        optimizer = mixed(self.model)
        scheduler = get_scheduler(optimizer, warmup_steps=4)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def training_step(self, batch, index):
        draw = torch.Generator().manual_seed(self.global_step)  # a plain loader is not resumed
        return (self.model(torch.randint(9, (8,), generator=draw)) - 1).square().mean()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(8, 1), batch_size=1)


def test_lightning_trains_saves_and_resumes_with_it(tmp_path):
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    uninterrupted = Module()
    saving = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1)
    L.Trainer(max_steps=7, callbacks=[saving], gradient_clip_val=1.0, **quiet).fit(uninterrupted)
    resumed = Module()
    trainer = L.Trainer(max_steps=7, enable_checkpointing=False, gradient_clip_val=1.0, **quiet)
    trainer.fit(resumed, ckpt_path=next(tmp_path.glob("*step=3*")))
    assert type(trainer.optimizers[0]) is MuonWithAdamW
    states = (module.model.state_dict() for module in (uninterrupted, resumed))
    assert all(torch.equal(a, b) for a, b in zip(*(state.values() for state in states)))


# --- matrices together, and processors without bfloat16 -----------------------------------------


def by_decomposition(matrix: torch.Tensor) -> torch.Tensor:
    "The quintic's rounds on the singular values alone."
    U, sigma, V = torch.linalg.svd(matrix.double(), full_matrices=False)
    sigma = sigma / sigma.norm()
    a, b, c = QUINTIC
    for _ in range(5):
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return U @ sigma.diag() @ V


@pytest.mark.parametrize("shape", [(6, 6), (8, 3), (3, 8), (1, 5)])
def test_batched_matrices_equal_single_ones(shape):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    together = orthogonalize(matrices, dtype=torch.float32)
    for matrix, result in zip(matrices, together):
        torch.testing.assert_close(
            result, orthogonalize(matrix, dtype=torch.float32), rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(result.double(), by_decomposition(matrix), rtol=0, atol=1e-5)


def newton_schulz(matrix: torch.Tensor, ns_steps: int) -> torch.Tensor:
    "The rounds as they are defined, on the matrix itself."
    X, (a, b, c) = matrix / matrix.norm(), QUINTIC
    for _ in range(ns_steps):
        gram = X @ X.mT
        X = a * X + (b * gram + c * gram @ gram) @ X
    return X


@pytest.mark.parametrize("ns_steps", [0, 1, 2, 5, 8])
@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (16, 24), (16, 23), (16, 16)])
def test_the_gram_matrix_gives_the_same_iteration(shape, ns_steps):
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    expected = newton_schulz(matrix.double(), ns_steps)
    torch.testing.assert_close(
        orthogonalize(matrix, ns_steps, torch.float32).double(), expected, rtol=0, atol=2e-5
    )
    torch.testing.assert_close(
        orthogonalize(matrix, ns_steps, torch.float64), expected, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("least", [1e-2, 1e-4, 1e-6, 0.0])
def test_small_singular_values_survive_in_float32(least):
    draw = torch.Generator().manual_seed(2)
    left, _ = torch.linalg.qr(torch.randn(24, 24, generator=draw, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(96, 24, generator=draw, dtype=torch.float64))
    sigma = torch.full((24,), least, dtype=torch.float64)
    sigma[0] = 1.0
    matrix = left @ sigma.diag() @ right.mT
    result, expected = (
        orthogonalize(matrix.float(), dtype=torch.float32).double(),
        newton_schulz(matrix, 5),
    )
    assert (result - expected).norm() < 2e-3 * expected.norm()


@pytest.mark.parametrize("ns_steps", [6, 9, 12, 20])
def test_many_steps_without_full_rank_stay_bounded(ns_steps):
    draw = torch.Generator().manual_seed(3)
    matrix = torch.randn(24, 8, generator=draw) @ torch.randn(8, 96, generator=draw)
    values = torch.linalg.svdvals(orthogonalize(matrix, ns_steps, torch.float32))
    assert 0.65 < values[7] and values[0] < 1.25


def test_half_precision_does_not_use_the_gram_matrix(monkeypatch):
    monkeypatch.setattr("bertlab.optim.muon._gram_newton_schulz", None)
    assert orthogonalize(torch.randn(4, 16), dtype=torch.bfloat16).shape == (4, 16)
    with pytest.raises(TypeError):
        orthogonalize(torch.randn(4, 16), dtype=torch.float32)


def test_zeros_stay_zero():
    assert not orthogonalize(torch.zeros(2, 3, 4)).any()
    assert not orthogonalize(torch.zeros(2, 3, 4), dtype=torch.float32).any()
    assert not orthogonalize(torch.zeros(2, 3, 8), dtype=torch.float32).any()


@pytest.mark.parametrize(("able", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_without_bfloat16_iterates_in_float32(monkeypatch, able, dtype):
    monkeypatch.setattr("bertlab.optim.muon.cpu_multiplies_bfloat16", lambda: able)
    assert orthogonalize(torch.randn(4, 4)).dtype == dtype


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)]
)
def test_a_gpu_without_bfloat16_iterates_in_float32(monkeypatch, capability, dtype):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: capability)
    with FakeTensorMode():  # knows a device that is not there
        assert orthogonalize(torch.zeros(4, 4, device="cuda")).dtype == dtype


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
    ("ns_steps", "five"), ("ns_steps", 0), ("ns_steps", 2.5), ("ns_steps", True), ("momentum", 1.5),
    ("momentum", -0.1), ("momentum", "high"), ("momentum", float("nan")), ("lr", -0.1),
    ("weight_decay", -1), ("adjust_lr_fn", "adam"),
])  # fmt: skip
def test_wrong_options_are_named_with_their_value(option, value):
    for build in (
        lambda options: mixed(small_model(), **options),
        lambda options: BatchedMuon([nn.Parameter(torch.zeros(2, 2))], **options),
    ):
        with pytest.raises(ValueError, match=f"{option}={value!r}"):
            build({option: value})


def test_the_rate_may_be_a_tensor():
    weight = nn.Parameter(torch.eye(3))
    weight.grad = torch.ones(3, 3)
    BatchedMuon([weight], lr=torch.tensor(0.1), momentum=0.0, weight_decay=0, ns_steps=1).step()
    assert not torch.equal(weight.detach(), torch.eye(3))
