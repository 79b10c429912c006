"""Processes that compute one model together (tensor parallel), or one row (context parallel), take the step of one."""

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch.distributed.device_mesh import init_device_mesh
from test_parallel import (
    CONFIG,
    LENGTH,
    MOST,
    ROWS,
    Batches,
    Losses,
    assert_same_step,
    batch_of,
)

from bertlab.data.corpus import embedded_corpus
from bertlab.data.module import PretrainingDataModule
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.activation_checkpointing import checkpoint_activations
from bertlab.model.config import BertLabConfig
from bertlab.model.context_parallel import deal_labels, share_rows
from bertlab.model.losses import LossConfig
from bertlab.train.checkpoints import TrainingCheckpoint
from bertlab.train.resume import latest_checkpoint
from bertlab.train.modules import PretrainingModule
from bertlab.train.objectives import OBJECTIVES
from bertlab.train.parallel import (
    FullyShardedStrategy,
    apply_tp,
    broadcast_weights,
    _check_tensor_parallel,
    full_state_dict,
    get_strategy,
    _reorder_rows,
    shard_order,
    _original_orders,
)
from bertlab.train.steps import full_tensor
from bertlab.train.stopping import NonFiniteGuard, SpikeGuard
from bertlab.train.trainer import make_trainer, seed_everything

FOUR = {**CONFIG, "num_attention_heads": 4}
VARIANTS = {  # of the configuration; the vocabulary of 101 words divides into 51 and 50
    "plain": {},
    "grouped heads, norms of heads, a gate": dict(num_key_value_heads=2, qk_norm=True, output_gate="element"),
    "a gate per head, biases, an own decoder": dict(output_gate="head", attention_bias=True, mlp_bias=True, decoder_bias=True,
                                                    tie_word_embeddings=False),
    "alibi": dict(attention_positions="alibi"),
    "local layers": dict(local_attention=8, global_attention_every_n_layers=2),
    "learned positions, plain layers": dict(attention_positions="none", embedding_positions="learned", mlp="plain",
                                            attention_bias=True, norm_position="post", decoder_bias=True),
}  # fmt: skip
QUICK = ["grouped heads, norms of heads, a gate", "alibi"]
RULES = {
    "all terms": LossConfig(label_smoothing=0.1, z_weight=1e-2),
    "in chunks": LossConfig(z_weight=1e-2, chunk_size=5, loss_only=True),
    "only the loss": LossConfig(loss_only=True),
}


def make(name, objective="mlm", seed=0):
    torch.manual_seed(seed)
    return OBJECTIVES[objective](BertLabConfig(**{**FOUR, **VARIANTS[name]})).train()


def batch_for(objective, *numbers):
    batch = batch_of(*numbers)
    if objective == "enhanced_mlm":
        batch["row_keys"] = torch.arange(len(numbers)) * 7919 + 5
    if objective == "diffusion":
        weights = torch.linspace(1, 3, LENGTH).expand(len(numbers), -1)
        batch["loss_weights"] = weights * (batch["labels"] != -100)
    return batch


def parts_of(model, batch, rule):
    out = model(**batch, loss_config=rule)
    (out.loss_sum + out.z_loss).backward()
    sums = [
        out.loss_sum,
        out.z_loss,
        out.num_labels,
        out.num_labels * 0 if rule.loss_only else out.num_correct,
    ]
    return torch.stack([s.detach().double() for s in sums])


def gradients(model):
    full = {name: full_tensor(p.grad).clone() for name, p in model.named_parameters()
            if p.grad is not None}  # fmt: skip
    return _reorder_rows(full, _original_orders(model))


def apart(name, way, objective="mlm", rule=LossConfig(), labels=True, recomputed=None):
    "Largest differences of sums and of gradients between a whole model and one that two processes share."
    rank, size = dist.get_rank(), dist.get_world_size()
    batch, results = batch_for(objective, 5, 9, 11), []
    if not labels:  # that is, none of them
        batch["labels"] = torch.full_like(batch["labels"], -100)
    if name == "no positions of labels":
        name = "plain"
        del batch["label_positions"]
    for shared in (False, True):
        model = make(
            name, objective, seed=rank if shared and way == "tensor" else 0
        )  # process 0's weights count
        if recomputed:
            checkpoint_activations(model, recomputed)
        if shared and way == "tensor":
            broadcast_weights(model)
            apply_tp(model, init_device_mesh("cpu", (size,)))
        if shared and way == "context":
            share_rows(model, dist.group.WORLD)
        dealt_labels = (
            deal_labels(batch, rank, size, (0, 1, 2)) if shared and way == "context" else batch
        )
        sums = parts_of(model, dealt_labels, rule)
        grads = gradients(model)
        if shared and way == "context":  # each has its labels' part
            for t in (sums, *grads.values()):
                dist.all_reduce(t)
        results.append((sums, grads))
    (sums, grads), (sums_2, grads_2) = results
    assert grads.keys() == grads_2.keys()
    return {"sums": (sums_2 - sums).abs().max().item(), "size": sums[0].item(),
            "gradients": max((grads_2[k] - g).abs().max().item() for k, g in grads.items())}  # fmt: skip


def scores(way):
    "Scores of a model that predicts, of all and of this process's model; and what a row of odd length gives."
    full, shared = (make("plain").eval() for _ in range(2))
    if way == "tensor":
        apply_tp(shared, init_device_mesh("cpu", (2,)))
    else:
        share_rows(shared, dist.group.WORLD)
    batch = {
        k: v
        for k, v in batch_of(5, 9).items()
        if k in ("input_ids", "attention_mask", "position_ids")
    }
    odd = {k: v[:, :23] for k, v in batch.items()}
    with torch.no_grad():
        return [(full(**b).logits - shared(**b).logits).abs().max().item() for b in (batch, odd)]


class Shared(Batches):
    "The batches of a run in which neighbours read the same rows."

    def __init__(self, size, sharers):
        super().__init__(size)
        self.rank, self.world = self.rank // sharers, self.world // sharers


class Recorded(PretrainingModule):
    def configure_gradient_clipping(self, optimizer, *args, **kwargs):
        self.gradients = gradients(self.model)
        super().configure_gradient_clipping(optimizer, *args, **kwargs)


def run(
    strategy="auto",
    sharers=1,
    steps=2,
    size=None,
    resume=None,
    callbacks=(),
    seed=0,
    validate=False,
    clip=0.05,
    **module,
):
    "Train on this process's share, with a clip that always bites."
    seed_everything(seed)
    world = int(os.environ.get("WORLD_SIZE", 1))
    batches = Shared(size or ROWS // (world // sharers), sharers)
    more = {"val_check_steps": 1, "limit_val_batches": 2} if validate else {}
    options = {
        "learning_rate": 3e-3,
        "scheduler_warmup_steps": 0,
        "optimizer_kwargs": {"eps": 1e-5},
        **module,
    }
    one, losses = Recorded(FOUR, **options), Losses()
    accumulate = ROWS // (batches.size * batches.world)
    trainer = make_trainer(steps, "32-true", "cpu", world, [losses, *callbacks], gradient_clip_val=clip,
                           accumulate_grad_batches=accumulate, strategy=strategy, **more)  # fmt: skip
    trainer.fit(
        one,
        batches,
        Shared(batches.size, sharers) if validate else None,
        ckpt_path=resume and latest_checkpoint(resume),
        weights_only=False,
    )
    values = lambda name: float(trainer.callback_metrics.get(name, np.nan))  # noqa: E731
    return {"losses": losses.column("train_loss"), "norms": losses.column("gradient_norm"), "gradients": one.gradients,
            "weights": full_state_dict(one.model), "val": values("val_loss"),
            "accuracy": values("val_accuracy"), "skipped": values("skipped"),
            "held": sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in one.parameters())}  # fmt: skip


def guarded(strategy, sharers):
    "What a run does whose second step has a gradient that is not finite, in one process alone."

    class Poisoned(Recorded):
        def on_before_optimizer_step(self, optimizer):
            if (
                self.trainer.global_step == 1
                and self.trainer.global_rank == self.trainer.world_size - 1
            ):
                p = self.model.encoder.blocks[0].mlp.up_proj.weight
                (p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad).fill_(float("nan"))
            super().on_before_optimizer_step(optimizer)

    seed_everything(0)
    world = int(os.environ.get("WORLD_SIZE", 1))
    batches, retained = Shared(ROWS // (world // sharers), sharers), []
    guard, module = NonFiniteGuard(), Poisoned(FOUR, learning_rate=3e-3, scheduler_warmup_steps=0)

    class Watch(Losses):
        def on_train_batch_end(self, trainer, pl_module, *args):
            retained.append({k: v.clone() for k, v in full_state_dict(pl_module.model).items()})

    trainer = make_trainer(
        3, "32-true", "cpu", world, [guard, SpikeGuard(), Watch()], strategy=strategy
    )
    trainer.fit(module, batches)
    return {"skipped": guard.num_skipped, "weights": retained}


def directory_run(folder, strategy, sharers):
    "A run on real data with checkpoints and directories; the loss of each step."
    seed_everything(0)
    world = int(os.environ.get("WORLD_SIZE", 1))
    corpus = embedded_corpus()
    tokenizer = train_tokenizer(corpus.train_texts[:200], vocab_size=301)
    rows = 16 // (world // sharers)
    data = PretrainingDataModule(
        None, tokenizer, max_sequence_length=32, train_batch_size=rows, val_batch_size=rows
    )
    data.set_datasets(corpus.train_texts[:200])
    shape = {**FOUR, "vocab_size": 301}
    module, losses = PretrainingModule(shape, pretrained_tokenizer_name_or_path=tokenizer), Losses()
    watchers = [losses, TrainingCheckpoint(folder / "run", 2, models=folder / "models")]
    trainer = make_trainer(
        4, "32-true", "cpu", world, watchers, val_check_steps=2, strategy=strategy
    )
    trainer.fit(module, data)
    return {"losses": losses.column("train_loss"), "val": float(trainer.callback_metrics["val_loss"]),
            "accuracy": float(trainer.callback_metrics["val_accuracy"])}  # fmt: skip


def refusals():
    messages = {}
    for name, strategy, module in (
        ("heads", "tensor", PretrainingModule({**FOUR, "num_attention_heads": 1})),
        ("units", "tensor", PretrainingModule({**FOUR, "intermediate_size": 49})),
        ("dropout", "tensor", PretrainingModule({**FOUR, "attention_dropout": 0.1})),
        ("optimizer", "tensor", PretrainingModule(FOUR, optimizer_class="muon")),
        (
            "activation",
            "tensor",
            PretrainingModule({**FOUR, "hidden_activation": "torch.nn.PReLU"}),
        ),
        ("compile", "tensor", PretrainingModule(FOUR, compile_model=True)),
        ("compile rows", "context", PretrainingModule(FOUR, compile_model=True)),
        ("processes", "tensor:3", PretrainingModule(FOUR)),
    ):
        try:
            make_trainer(1, "32-true", "cpu", 2, strategy=strategy).fit(module, Shared(8, 2))
        except ValueError as error:
            messages[name] = str(error)
    return messages


def worker(folder):
    "What each of the two processes does: the quick set."
    seed_everything(0)
    results = {}
    for way in ("tensor", "context"):
        results[way] = run(way, 2, validate=True, callbacks=[TrainingCheckpoint(folder / way)])
        results[f"{way} variants"] = {name: apart(name, way) for name in QUICK}
        results[f"{way} rules"] = {"all terms": apart("plain", way, rule=RULES["all terms"])}
        results[f"{way} of one"] = run(way, 2, steps=4, seed=99, resume=folder / "one")
        results[f"{way} of one"]["next draw"] = torch.rand(()).item()  # by which units are dropped
    torch.save(results, folder / f"result-{os.environ['RANK']}.pt")


def slow_worker(folder):
    "The rest of it."
    seed_everything(0)
    results = {"refused": refusals()}
    for way in ("tensor", "context"):
        results[f"{way} in micro-batches"] = run(way, 2, size=4)
        results[f"{way} variants"] = {
            name: apart(name, way) for name in [*VARIANTS, "no positions of labels"]
        }
        results[f"{way} rules"] = {
            name: apart("plain", way, rule=rule) for name, rule in RULES.items()
        }
        results[f"{way} objectives"] = {
            objective: apart("plain", way, objective)
            for objective in OBJECTIVES
            if objective != "causal"
        }
        results[f"{way} without labels"] = apart("plain", way, labels=False)
        results[f"{way} recomputed"] = {
            mode: apart("plain", way, recomputed=mode) for mode in ("full", "selected_ops")
        }
        results[f"{way} scores"] = scores(way)
        results[f"{way} guarded"] = guarded(way, 2)
        results[f"{way} directory"] = directory_run(folder / f"directory {way}", way, 2)
    torch.save(results, folder / f"slow-{os.environ['RANK']}.pt")


def on_ranks(work, folder, name, count=2):
    "What each process has found."
    run_on_ranks(work, folder, count=count, timeout=400)
    return [torch.load(folder / f"{name}-{r}.pt", weights_only=False) for r in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def single(folder):
    "One process that does all by itself; its checkpoint is there before others start."
    return {
        "run": run(validate=True, callbacks=[TrainingCheckpoint(folder / "one")]),
        "longer": run(steps=4),
    }


@pytest.fixture(scope="module")
def results(folder, single):
    return on_ranks(worker, folder, "result")


@pytest.fixture(scope="module")
def slow_results(folder, single):
    return on_ranks(slow_worker, folder, "slow")


WAYS = pytest.mark.parametrize("way", ["tensor", "context"])


def assert_alike(result, tolerance=2e-5):
    assert result["sums"] < 1e-4 and result["gradients"] < tolerance and result["size"] > 10


@WAYS
@pytest.mark.parametrize("variant", QUICK)
def test_sharing_changes_no_sum_and_no_gradient(results, way, variant):
    for result in results:
        assert_alike(result[f"{way} variants"][variant])
        assert_alike(result[f"{way} rules"]["all terms"])


def test_processes_that_share_layers_go_on_from_one_process_with_one_generator(results):
    first, second = (result["tensor of one"]["next draw"] for result in results)
    assert first == second


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize("variant", [*VARIANTS, "no positions of labels"])
def test_sharing_changes_no_sum_and_no_gradient_of(slow_results, way, variant):
    for result in slow_results:
        assert_alike(result[f"{way} variants"][variant])


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize("rule", RULES)
def test_every_term_of_the_loss_is_that_of_the_whole_vocabulary(slow_results, way, rule):
    for result in slow_results:
        assert_alike(result[f"{way} rules"][rule])


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize(
    "objective", [objective for objective in OBJECTIVES if objective != "causal"]
)
def test_every_objective_can_be_shared(slow_results, way, objective):
    for result in slow_results:
        assert_alike(result[f"{way} objectives"][objective], 5e-5)


@pytest.mark.slow
@WAYS
def test_a_batch_without_any_label_is_no_exception(slow_results, way):
    result = slow_results[0][f"{way} without labels"]
    assert result["sums"] == result["gradients"] == 0


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize("mode", ["full", "selected_ops"])
def test_a_backward_pass_that_computes_anew_meets_the_others_again(slow_results, way, mode):
    assert_alike(slow_results[0][f"{way} recomputed"][mode])


@pytest.mark.slow
@WAYS
def test_a_shared_model_predicts_all_words_for_rows_of_any_length(slow_results, way):
    for result in slow_results:
        assert max(result[f"{way} scores"]) < 1e-5


@WAYS
def test_two_processes_take_the_clipped_step_of_one(results, single, way):
    assert_same_step(results[0][way], single["run"])
    np.testing.assert_allclose(results[0][way]["val"], single["run"]["val"], rtol=1e-6)
    assert results[0][way]["accuracy"] == pytest.approx(single["run"]["accuracy"], abs=1e-6)
    assert min(single["run"]["norms"]) > 0.05, "the clip bites"


@pytest.mark.slow
@WAYS
def test_micro_batches_are_added_up(slow_results, single, way):
    assert_same_step(slow_results[0][f"{way} in micro-batches"], single["run"])


def test_tensor_parallel_splits_attention_and_mlp(results):
    layers = make("plain").encoder.blocks.named_parameters()
    shared = sum(p.numel() for name, p in layers if "norm" not in name)
    held = [result["tensor"]["held"] for result in results]
    assert held == [BertLabConfig(**FOUR).num_params() - shared // 2] * 2


@pytest.mark.slow
@WAYS
def test_a_step_that_is_not_finite_in_one_process_is_skipped_in_all(slow_results, way):
    for result in slow_results:
        assert result[f"{way} guarded"]["skipped"] == 1
    first, second, third = slow_results[0][f"{way} guarded"]["weights"]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(second[name], third[name]) for name in first)


@WAYS
def test_a_checkpoint_is_the_one_of_one_process(results, single, folder, way):
    result, reference = (
        torch.load(latest_checkpoint(folder / name), weights_only=False) for name in (way, "one")
    )
    assert result["state_dict"].keys() == reference["state_dict"].keys()
    for name, weight in reference["state_dict"].items():
        torch.testing.assert_close(result["state_dict"][name], weight, atol=1e-6, rtol=0)
    alone = run(steps=4, seed=99, resume=folder / way)
    np.testing.assert_allclose(alone["losses"], single["longer"]["losses"][2:], rtol=1e-5)


@WAYS
def test_a_run_of_one_process_goes_on_in_two(results, single, way):
    result, straight = results[0][f"{way} of one"], single["longer"]
    np.testing.assert_allclose(result["losses"], straight["losses"][2:], rtol=1e-5)
    for name, weight in straight["weights"].items():
        torch.testing.assert_close(result["weights"][name], weight, atol=2e-6, rtol=0)


@pytest.mark.slow
@WAYS
def test_real_data_and_a_directory_for_transformers(slow_results, folder, way):
    from transformers import pipeline

    alone = directory_run(folder / f"alone {way}", "auto", 1)
    result = slow_results[0][f"{way} directory"]
    np.testing.assert_allclose(result["losses"], alone["losses"], rtol=1e-5)
    assert result["val"] == pytest.approx(alone["val"], rel=1e-6) and result[
        "accuracy"
    ] == pytest.approx(alone["accuracy"])
    messages = [pipeline("fill-mask", str(folder / path / "models" / "step-00000004"))("The [MASK] is a value.")
            for path in (f"directory {way}", f"alone {way}")]  # fmt: skip
    assert [w["token"] for w in messages[0]] == [w["token"] for w in messages[1]]


@pytest.mark.slow
@pytest.mark.parametrize("name, words", [
    ("heads", ("tensor_parallel_size=2", "num_attention_heads=1")), ("units", ("intermediate_size=49",)),
    ("dropout", ("attention_dropout=0.1",)), ("activation", ("torch.nn.PReLU", "fsdp")), ("optimizer", ("muon", "adamw")),
    ("compile", ("compile_model",)), ("compile rows", ("compile_model",)), ("processes", ("3", "2 process"))])  # fmt: skip
def test_what_cannot_be_shared_is_refused_in_one_sentence(slow_results, name, words):
    for result in slow_results:
        assert (
            all(word in result["refused"][name] for word in words)
            and "\n" not in result["refused"][name]
        )


@pytest.mark.parametrize("sections, ranks", [((8,), 2), ((8, 4, 4), 4), ((3, 6), 3)])
def test_reordered_rows_return_to_their_places(sections, ranks):
    rows = torch.randn(sum(sections), 3)
    order = shard_order(sections, ranks)
    restored = _reorder_rows({"w": rows[order]}, {"w": order.argsort()})
    assert torch.equal(restored["w"], rows)


def test_heads_stay_with_the_keys_that_they_share():
    # 4 heads of queries, 2 of keys and values, a row each: q0 q1 q2 q3 k0 k1 v0 v1
    assert shard_order((4, 2, 2), 2).view(2, 4)[1].tolist() == [2, 3, 5, 7]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("objective", ["mlm", "diffusion"])
@pytest.mark.parametrize("positions", [True, False])
def test_every_label_is_dealt_to_one_process(size, objective, positions):
    batch = batch_for(objective, *range(12))
    if not positions:
        del batch["label_positions"]
    dealt = [deal_labels(batch, rank, size, (0, 1, 2)) for rank in range(size)]
    owned = torch.stack([d["labels"] != -100 for d in dealt])
    assert torch.equal(owned.sum(0), (batch["labels"] != -100).long())
    for d, dealt_labels in zip(dealt, owned):
        assert torch.equal(d["labels"][dealt_labels], batch["labels"][dealt_labels])
        scored = d["labels"].gather(1, d["label_positions"])
        assert (scored != -100).sum() == dealt_labels.sum(), "each is at one of the positions, once"
        assert d["label_positions"].shape == (12, -(-(MOST if positions else LENGTH) // size))
    if objective == "diffusion":
        ordinary = (batch["attention_mask"] > 0) & ~torch.isin(
            batch["input_ids"], torch.tensor([0, 1, 2])
        )
        assert torch.equal(sum(d["token_shares"] for d in dealt), ordinary.float())


def test_sizes_are_checked_where_the_processes_are_counted():
    mesh = FullyShardedStrategy(tensor_parallel_size=2, context_parallel_size=2)
    assert mesh.mesh_sizes(8) == (2, 2, 1) and mesh.sharers(8) == 4
    assert get_strategy("tensor").mesh_sizes(4) == (4, 1, 1) and get_strategy(
        "context:2"
    ).mesh_sizes(4) == (1, 2, 1)
    with pytest.raises(ValueError, match="6 process"):
        mesh.mesh_sizes(6)
    with pytest.raises(ValueError, match="tensor_parallel_size=0"):
        FullyShardedStrategy(tensor_parallel_size=0).mesh_sizes(2)
    with pytest.raises(ValueError, match="save_distributed_checkpoint"):
        FullyShardedStrategy(tensor_parallel_size=2, save_distributed_checkpoint=True)
    with pytest.raises(ValueError, match="max_sequence_length=33"):
        get_strategy("context").check(2, row_length=33)
    with pytest.raises(ValueError, match="num_key_value_heads=2"):
        _check_tensor_parallel(BertLabConfig(**{**FOUR, "num_key_value_heads": 2}), 4)


# --- meshes of 2 x 2 ----------------------------------------------------------------------------


def mesh_worker(folder):
    results = {}
    for name, options in {
        "tensor x shards": dict(tensor_parallel_size=2), "context x shards": dict(context_parallel_size=2),
        "tensor x context": dict(tensor_parallel_size=2, context_parallel_size=2), "replicas x shards": dict(replicas=2),
    }.items():  # fmt: skip
        sharers = FullyShardedStrategy(**options).sharers(4)
        path = folder / name.replace(" ", "")
        results[name] = run(
            FullyShardedStrategy(**options),
            sharers,
            validate=True,
            callbacks=[TrainingCheckpoint(path)],
        )
        results[f"{name} resumed"] = run(
            FullyShardedStrategy(**options), sharers, steps=4, seed=99, resume=path
        )
    results["guarded"] = guarded(FullyShardedStrategy(tensor_parallel_size=2), 2)
    torch.save(results, folder / f"mesh-{os.environ['RANK']}.pt")


@pytest.fixture(scope="module")
def meshes(folder, single):
    return on_ranks(mesh_worker, folder, "mesh", 4)


MESHES = ["tensor x shards", "context x shards", "tensor x context", "replicas x shards"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_of_2_by_2_takes_the_clipped_step_of_one(meshes, single, mesh):
    assert_same_step(meshes[0][mesh], single["run"])
    np.testing.assert_allclose(meshes[0][mesh]["val"], single["run"]["val"], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_writes_the_checkpoint_of_one_process_and_goes_on_from_it(
    meshes, single, folder, mesh
):
    straight = single["longer"]["losses"][2:]
    np.testing.assert_allclose(meshes[0][f"{mesh} resumed"]["losses"], straight, rtol=1e-5)
    alone = run(steps=4, seed=99, resume=folder / mesh.replace(" ", ""))
    np.testing.assert_allclose(alone["losses"], straight, rtol=1e-5)


@pytest.mark.slow
def test_a_mesh_skips_the_step_that_one_process_cannot_take(meshes):
    assert all(result["guarded"]["skipped"] == 1 for result in meshes)
    first, second, third = meshes[0]["guarded"]["weights"]
    assert all(torch.equal(first[name], second[name]) for name in first)
