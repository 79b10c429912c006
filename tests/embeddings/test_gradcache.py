"Gradient caching gives the loss and the gradient of the one big batch: packed, with dropout, on two processes."

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from embedding_cases import draw_pairs, small_data, small_module
from lightning.pytorch.callbacks import Callback
from torch.nn import functional as F
from ranks import run_on_ranks

from bertlab.embeddings.gradcache import (
    encode_with_gradcache,
    all_gather,
    all_gather_with_grad,
    chunk_batch,
)


def first_batch(data, rows=32):
    data.setup()
    return data.collator([data.datasets["train"][n] for n in range(rows)])


def loss_and_gradient(module, batch, gradcache_rows, seed=None):
    "Of all weights, in one vector; the loss is a sum over queries."
    module.hparams["gradcache_rows"] = gradcache_rows
    module.zero_grad()
    if seed is not None:
        torch.manual_seed(seed)
    loss = module.label_loss(batch).loss_sum
    loss.backward()
    after = torch.rand(1).item()
    return (
        loss.item(),
        torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]),
        after,
    )


def relative(left, right):
    return ((left - right).norm() / right.norm()).item()


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"learn_temperature": True, "symmetric": True, "matryoshka_dims": [8]}]
)
def test_chunks_have_loss_and_gradient_of_the_one_big_batch(packing, options):
    data = small_data(draw_pairs(60, negatives=1), packing=packing)
    module = small_module(**options).eval()
    batch = first_batch(data)
    full_loss, grad, _ = loss_and_gradient(module, batch, None)
    for gradcache_rows in (1, 3, 1000):
        loss, cached, _ = loss_and_gradient(module, batch, gradcache_rows)
        assert loss == pytest.approx(full_loss, rel=1e-6)
        assert relative(cached, grad) < 1e-6
    if options:
        assert module.log_temperature.grad.abs() > 1e-4


def test_dropout_is_replayed_chunk_by_chunk():
    module, data = small_module(dropout=0.3).double().train(), small_data()
    batch = first_batch(data)

    def kept(seed):
        "The same chunks with all activations kept: what caching must equal."
        module.zero_grad()
        torch.manual_seed(seed)
        rows = {k: batch[k] for k in ("input_ids", "attention_mask", "position_ids")}
        vectors = encode_with_gradcache(
            module.model._pool_rows, chunk_batch(rows, 2), cached=False
        )[batch["text_order"]]
        q, d = (
            type(e)(v, e.groups_N)
            for e, v in zip(
                module.embed(batch), F.normalize(vectors, dim=1).split(len(vectors) // 2)
            )
        )
        torch.manual_seed(99)
        loss = module.score_pairs(q, d, batch).loss_sum
        module.zero_grad()
        loss.backward()
        return loss.item(), torch.cat(
            [p.grad.flatten() for p in module.parameters() if p.grad is not None]
        )

    loss, cached, _ = loss_and_gradient(module, batch, 2, seed=5)
    expected, grad = kept(5)
    assert loss == pytest.approx(expected, rel=1e-12) and relative(cached, grad) < 1e-11
    _, other_gradient, _ = loss_and_gradient(module, batch, 2, seed=6)
    assert relative(other_gradient, grad) > 1e-2, (
        "dropout does nothing here, so the test would show nothing"
    )


def test_only_one_chunk_s_activations_live_at_a_time():
    module, data = small_module().train(), small_data(draw_pairs(60), packing=False)
    batch = first_batch(data, 32)

    def held(gradcache_rows):
        module.hparams["gradcache_rows"], storages = gradcache_rows, {}

        def keep(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            module.label_loss(batch)
        return sum(storages.values())

    assert held(2) < held(None) / 10


def test_a_batch_of_unequal_tensors_and_no_rows_are_refused():
    with pytest.raises(ValueError, match="gradcache_rows"):
        chunk_batch({"a": torch.zeros(2, 1)}, 0)
    with pytest.raises(ValueError, match="equally many rows"):
        chunk_batch({"a": torch.zeros(2, 1), "b": torch.zeros(3)}, 1)
    assert [len(c["a"]) for c in chunk_batch({"a": torch.zeros(5, 1)}, 2)] == [2, 2, 1]
    left = torch.ones(2, 3)
    assert all_gather_with_grad(left) is left and all_gather(left) is left


# --- two processes --------------------------------------------------------------------------------


def _gathered(directory: str) -> None:
    "A loss of everybody's vectors, by one of two processes."
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    vectors = torch.arange(6, dtype=torch.float64).view(2, 3) + 10 * rank
    vectors.requires_grad_()
    together = all_gather_with_grad(vectors)
    loss = (together * (rank + 1)).square().sum()  # the two losses differ
    loss.backward()
    numbers = all_gather(torch.tensor([rank, rank + 5]))
    torch.save(
        {"together": together.detach(), "grad": vectors.grad, "numbers": numbers},
        f"{directory}/{rank}.pt",
    )
    torch.distributed.destroy_process_group()


def test_a_gathered_vector_gets_the_gradient_of_all_processes(tmp_path):
    run_on_ranks(_gathered, str(tmp_path))
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    everything = torch.cat(
        [torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3) + 10]
    ).double()
    for rank, left in enumerate(results):
        assert torch.equal(left["together"], everything) and left["numbers"].tolist() == [
            0,
            5,
            1,
            6,
        ]
        mine = everything[2 * rank : 2 * rank + 2]
        torch.testing.assert_close(left["grad"], 2 * mine * (1 + 4))  # d/dv of v^2 + (2 v)^2


class FirstGradient(Callback):
    "What the optimizer gets in the first step."

    results = None

    def on_train_start(self, trainer, pl_module) -> None:
        def keep(optimizer, args, kwargs):
            if self.results is None:
                self.results = torch.cat(
                    [p.grad.flatten().clone() for p in pl_module.parameters() if p.grad is not None]
                )

        trainer.optimizers[0].register_step_post_hook(
            keep
        )  # Lightning computes the gradient inside of the step


def _data_with_shared_answers(batch: int):
    "Pairs to train on, and held-out ones of which three queries each have the same answer."
    data = small_data(draw_pairs(54, negatives=1), batch=batch)
    data.read()
    held = data.pairs["validation"]
    data.pairs["validation"] = replace(
        held, positives=[held.positives[n // 3 * 3] for n in range(len(held))]
    )
    return data


def _trained(directory: str, options: dict) -> None:
    from embedding_cases import fit, weights_of
    from lightning.pytorch.strategies import DDPStrategy

    module, data = small_module(**options), _data_with_shared_answers(8)
    first = FirstGradient()
    fit(
        module,
        data,
        3,
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        val_check_steps=3,
        callbacks=[first],
    )
    if os.environ["RANK"] == "0":
        values = {k: float(v) for k, v in module.trainer.callback_metrics.items()}
        torch.save((weights_of(module), values, first.results), f"{directory}/two.pt")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"gradcache_rows": 3, "learn_temperature": True}, {"symmetric": True}]
)
def test_two_processes_train_as_one_with_the_whole_batch(tmp_path, options):
    from embedding_cases import fit, weights_of

    run_on_ranks(_trained, str(tmp_path), options)
    right, logged, gradient = torch.load(tmp_path / "two.pt")
    # One process of 16 pairs sees the same pairs in the same order as two of 8.
    module, first = small_module(**options | {"gradcache_rows": None}), FirstGradient()
    data = _data_with_shared_answers(16)
    trainer = fit(module, data, 3, val_check_steps=3, callbacks=[first])
    assert relative(gradient, first.results) < 1e-6
    assert (weights_of(module) - right).abs().max() < 2e-5
    assert logged["train_loss"] == pytest.approx(
        float(trainer.callback_metrics["train_loss"]), rel=1e-5
    )
    assert logged["val_mrr"] == pytest.approx(float(trainer.callback_metrics["val_mrr"]), rel=1e-3)
    assert np.isfinite(logged["val_loss"])
