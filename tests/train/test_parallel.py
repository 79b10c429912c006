"""Several processes give the step of one; a batch in tokens is split exactly."""

import os
from datetime import timedelta
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from transformers import BertConfig, BertForMaskedLM
from ranks import run_on_ranks

from bertlab.cli.commands import COMMANDS
from bertlab.model.activation_checkpointing import checkpoint_activations
from bertlab.train.checkpoints import TrainingCheckpoint
from bertlab.train.resume import latest_checkpoint, read_checkpoint
from bertlab.model.config import BertLabConfig
from bertlab.train.modules import PretrainingModule
from bertlab.train.objectives import OBJECTIVES
from bertlab.train.parallel import (
    num_processes,
    full_state_dict,
    STRATEGIES,
    get_strategy,
    apply_fsdp,
    split_batch_tokens,
)
from bertlab.train.steps import full_tensor
from bertlab.train.trainer import make_trainer, seed_everything

CONFIG = dict(
    vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=2, max_position_embeddings=32,
)  # fmt: skip
ROWS, LENGTH, MOST = 16, 24, 12  # rows of a batch, positions of a row, labels of a row at most


def row(i):
    "Row i: 0 to 12 labels, so that micro-batches and processes differ, some having none at all."
    rng = np.random.default_rng(i)
    ids = rng.integers(5, 101, LENGTH)
    positions = np.zeros(MOST, dtype=np.int64)  # position 0 is a spare: it never has a label
    labels = np.full(LENGTH, -100)
    hidden = rng.permutation(np.arange(1, LENGTH))[: 0 if i % ROWS < 4 else i * 7 % (MOST + 1)]
    positions[: len(hidden)], labels[hidden] = hidden, ids[hidden]
    ids[hidden] = 4
    document = np.where(np.arange(LENGTH) < 10 + i % 9, 1, 2)
    places = np.where(document == 1, np.arange(LENGTH), np.arange(LENGTH) - 10 - i % 9)
    return dict(input_ids=ids, attention_mask=document, position_ids=places, labels=labels,
                label_positions=positions)  # fmt: skip


class Batches:
    "Steps of 16 rows, cut into micro-batches and dealt to processes."

    def __init__(self, size):
        self.size, self.taken = size, 0
        self.rank, self.world = (
            int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1))
        )

    def __len__(self):
        return 1000

    def __iter__(self):
        for n in range(self.taken, 1000):
            self.taken = n + 1
            first = (n * self.world + self.rank) * self.size
            rows = [row(i) for i in range(first, first + self.size)]
            yield {k: torch.from_numpy(np.stack([r[k] for r in rows])) for k in rows[0]}

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


def held_bytes(module, optimizer):
    "Bytes of weights, gradients and moments in this process, its own shards alone."
    local = lambda t: t.to_local() if hasattr(t, "to_local") else t  # noqa: E731
    count = lambda tensors: sum(local(t).nbytes for t in tensors)  # noqa: E731
    weights = list(module.parameters())
    moments = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
    gradients = [p.grad for p in weights if p.grad is not None]
    return {"weights": count(weights), "gradients": count(gradients), "moments": count(moments)}


class Recorded(PretrainingModule):
    "Keeps the divided gradients of each step, as they are before clipping."

    def configure_gradient_clipping(self, optimizer, *args, **kwargs):
        self.gradients = {k: full_tensor(p.grad).clone() for k, p in self.model.named_parameters()
                          if p.grad is not None}  # fmt: skip
        self.held = held_bytes(self, optimizer)
        super().configure_gradient_clipping(optimizer, *args, **kwargs)


class Losses(L.Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, *args):
        if not trainer.fit_loop.epoch_loop._should_accumulate():
            self.values.append({k: v.item() for k, v in trainer.callback_metrics.items()})

    def column(self, name):
        return np.array([step[name] for step in self.values])


class RefuseAll(L.Callback):
    def should_skip(self, loss, norm):
        return torch.tensor(True)


def run(size, accumulate=1, steps=2, strategy="auto", seed=0, dropout=0.0, resume=None, callbacks=(),
        validate=False):  # fmt: skip
    "Train on this process's share; return all that is to be compared."
    seed_everything(seed)
    config = {**CONFIG, "embedding_dropout": dropout, "mlp_dropout": dropout}
    # Where a gradient is nearly 0, Adam would show its last bits: a larger eps does not.
    module = Recorded(config, learning_rate=3e-3, scheduler_warmup_steps=0,
                      optimizer_kwargs={"eps": 1e-5})  # fmt: skip
    losses, batches = Losses(), Batches(size)
    rows = size * batches.world
    extra = {"val_check_steps": 1, "limit_val_batches": 2 * ROWS // rows} if validate else {}
    trainer = make_trainer(steps, "32-true", "cpu", batches.world, [losses, *callbacks],
                           accumulate_grad_batches=accumulate, strategy=strategy, **extra)  # fmt: skip
    trainer.fit(module, batches, Batches(size) if validate else None, ckpt_path=resume and latest_checkpoint(resume),
                weights_only=False)  # fmt: skip
    held = held_bytes(module, trainer.optimizers[0])
    return {"losses": losses.column("train_loss"), "norms": losses.column("gradient_norm"),
            "gradients": module.gradients, "logits": probe(module.model), "held": held,
            "held in the step": module.held, "weights": full_state_dict(module.model),
            "val_loss": trainer.callback_metrics.get("val_loss")}  # fmt: skip


def batch_of(*numbers):
    return {k: torch.from_numpy(np.stack([row(i)[k] for i in numbers])) for k in row(0)}


@torch.no_grad()
def probe(model):
    "Scores of four rows."
    names = ("input_ids", "attention_mask", "position_ids")
    return model.eval()(**{k: batch_of(4, 5, 6, 7)[k] for k in names}).logits


def apart(make, mode=None, **options):
    "Largest difference of the gradients of a model and of the same model in shares."
    results = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = make()
        if mode is not None:
            checkpoint_activations(model, *mode)
        if sharded:
            apply_fsdp(model, init_device_mesh("cpu", (2,)), **options)
        batch = batch_of(5, 9)
        if isinstance(model, BertForMaskedLM):
            batch = {k: batch[k] for k in ("input_ids", "labels", "position_ids")}
        model.train()(**batch).loss.backward()
        results.append({k: full_tensor(p.grad).float() for k, p in model.named_parameters()})
    return {k: (results[1][k] - results[0][k]).abs().max().item() for k in results[0]}


class Loose(PretrainingModule):
    def __init__(self):
        super().__init__(CONFIG)
        self.temperature = torch.nn.Parameter(torch.ones(()))


def sharded_variants():
    config, tiny = BertLabConfig(**CONFIG), {**CONFIG, "max_position_embeddings": LENGTH}
    makers = {name: partial(cls, config) for name, cls in OBJECTIVES.items()}
    makers["tied"] = partial(BertForMaskedLM, BertConfig(**tiny, hidden_dropout_prob=0.0,
                                                         attention_probs_dropout_prob=0.0))  # fmt: skip
    variants = {name: apart(make) for name, make in makers.items()}
    for mode in ("full", "selected_ops"):
        variants[mode] = apart(makers["mlm"], (mode,))
    variants["bfloat16"] = apart(makers["mlm"], param_dtype=torch.bfloat16)
    return variants


def worker(folder):
    "What each of the two processes does."
    checkpoint = lambda name: [TrainingCheckpoint(folder / name)]
    results = {
        "ddp": run(4, 2, strategy="ddp"),
        "fsdp": run(2, 4, strategy="fsdp", validate=True),
        "other seeds": run(
            8, strategy="fsdp", seed=int(os.environ["RANK"]), callbacks=checkpoint("one")
        ),
        "refused": run(8, strategy="fsdp", callbacks=[RefuseAll()]),
    }
    for strategy in ("ddp", "fsdp"):
        options = {"dropout": 0.1, "strategy": strategy}
        results[f"{strategy} straight"] = run(8, steps=6, **options)
        run(8, steps=3, callbacks=checkpoint(f"{strategy} half"), **options)
        results[f"{strategy} resumed"] = run(
            8, steps=6, seed=99, resume=folder / f"{strategy} half", **options
        )
    results["variants"] = sharded_variants()
    try:
        make_trainer(1, "32-true", "cpu", 2, strategy="fsdp").fit(Loose(), Batches(8))
    except ValueError as error:
        results["loose"] = str(error)
    torch.save(results, folder / f"{os.environ['RANK']}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def results(folder):
    "Of process 0, of process 1, and of one process that takes the whole batch."
    run_on_ranks(worker, folder)
    single = run(ROWS, validate=True)
    return *(torch.load(folder / f"{r}.pt", weights_only=False) for r in range(2)), single


def assert_same_step(got, single):
    "Loss, norm, gradient after division and before clipping, and weights after the steps."
    np.testing.assert_allclose(got["losses"], single["losses"], rtol=1e-6)
    np.testing.assert_allclose(got["norms"], single["norms"], rtol=1e-5)
    assert got["gradients"].keys() == single["gradients"].keys()
    for name, gradient in single["gradients"].items():
        torch.testing.assert_close(got["gradients"][name], gradient, atol=1e-6, rtol=0)
    for name, weight in single["weights"].items():
        torch.testing.assert_close(got["weights"][name], weight, atol=1e-6, rtol=0)


def test_the_rows_of_this_file_are_uneven():
    labels = (batch_of(*range(ROWS))["labels"] != -100).sum(1)
    assert labels.tolist()[:4] == [0] * 4 and len(labels.unique()) > 8
    assert labels[:8].sum() < 0.6 * labels[8:].sum()


def test_accumulating_over_8_gives_the_step_of_one_batch(results):
    assert_same_step(run(2, 8), results[2])


def test_ddp_over_2_processes_gives_the_step_of_one_batch(results):
    assert_same_step(results[0]["ddp"], results[2])


def test_fsdp2_over_2_processes_gives_the_step_of_one_batch(results):
    assert_same_step(results[0]["fsdp"], results[2])
    torch.testing.assert_close(
        results[0]["fsdp"]["val_loss"], results[2]["val_loss"], rtol=1e-6, atol=0
    )


def test_under_fsdp2_each_process_holds_half_of_everything(results):
    whole_bytes = results[2]["held in the step"]
    assert results[0]["ddp"]["held in the step"] == whole_bytes
    assert whole_bytes["moments"] == 2 * whole_bytes["weights"] == 2 * whole_bytes["gradients"]
    shares = [results[r]["fsdp"]["held in the step"] for r in range(2)]
    for strategy, whole_size in whole_bytes.items():
        assert shares[0][strategy] + shares[1][strategy] == whole_size
        assert abs(shares[0][strategy] - shares[1][strategy]) < 0.02 * whole_size


def test_a_validation_leaves_no_weight_whole(results):
    for r in range(2):
        retained = results[r]["fsdp"]
        assert retained["held"]["weights"] == retained["held in the step"]["weights"]


def test_fsdp2_begins_with_the_weights_of_process_0(results):
    assert_same_step(results[0]["other seeds"], results[2])


def test_a_refused_step_moves_nothing_under_fsdp2(results):
    seed_everything(0)
    module = PretrainingModule(CONFIG)
    module.configure_model()
    for name, weight in module.model.state_dict().items():
        assert torch.equal(results[0]["refused"]["weights"][name], weight)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_resume_on_2_processes_is_bit_identical(results, strategy):
    straight, resumed = results[0][f"{strategy} straight"], results[0][f"{strategy} resumed"]
    np.testing.assert_array_equal(resumed["losses"], straight["losses"][3:])
    for name, weight in straight["weights"].items():
        assert torch.equal(resumed["weights"][name], weight)


def test_one_process_reads_the_checkpoint_of_fsdp2(results, folder):
    state = torch.load(latest_checkpoint(folder / "one"), weights_only=False)["state_dict"]
    module = PretrainingModule(CONFIG)
    module.configure_model()
    module.load_state_dict(state)
    expected = results[0]["other seeds"]["logits"]
    torch.testing.assert_close(probe(module.model), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(probe(module.model), results[2]["logits"], atol=1e-6, rtol=0)


def test_one_process_goes_on_with_a_run_of_fsdp2(results, folder):
    resumed = run(ROWS, steps=4, seed=99, resume=folder / "one")
    straight = run(ROWS, steps=4)
    np.testing.assert_allclose(resumed["losses"], straight["losses"][2:], rtol=1e-6)
    for name, weight in straight["weights"].items():
        torch.testing.assert_close(resumed["weights"][name], weight, atol=1e-6, rtol=0)


@pytest.mark.parametrize("variant", [*OBJECTIVES, "tied", "full", "selected_ops"])
def test_sharding_changes_no_gradient_of(results, variant):
    assert max(results[0]["variants"][variant].values()) < 1e-6


def test_gathering_in_bfloat16_rounds_and_keeps_gradients_in_float32(results):
    largest = max(results[0]["variants"]["bfloat16"].values())
    assert 1e-6 < largest < 0.05


def test_a_weight_of_the_module_itself_is_refused_by_name(results):
    assert "temperature" in results[0]["loose"] and "ddp" in results[0]["loose"]


def test_a_batch_in_tokens_is_split_as_worked_out_by_hand():
    assert split_batch_tokens(65_536, 8_192, 128) == (64, 8)
    assert split_batch_tokens(65_536, 8_192, 128, world_size=4) == (64, 2)
    assert split_batch_tokens("512K", "16K", 128, world_size=8) == (125, 4)
    assert split_batch_tokens("1.024M tokens", None, 512, world_size=2) == (1000, 1)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(*[st.integers(1, 40)] * 4)
def test_what_was_put_together_is_split_again(rows, accumulate, length, world_size):
    batch = rows * accumulate * length * world_size
    assert split_batch_tokens(batch, rows * length, length, world_size) == (rows, accumulate)


@pytest.mark.parametrize("sizes, fragment", [
    (("1M", None, 512, 8), "batch_tokens=1M.*999,424 and 1,003,520"), ((0, None, 128), "batch_tokens=0"),
    (("2h", None, 128), "batch_tokens='2h'"), (("64K", "7K", 128), "microbatch_tokens=7K.*500 rows"),
    ((65_536, 3 * 128, 128), "microbatch_tokens=384.*512 rows"), ((4096, 0, 128), "microbatch_tokens=0"),
])  # fmt: skip
def test_sizes_that_do_not_divide_are_refused(sizes, fragment):
    with pytest.raises(ValueError, match=fragment):
        split_batch_tokens(*sizes)


def test_processes_are_counted_as_lightning_counts_them():
    assert num_processes({}) == 1
    assert num_processes({"devices": 3, "num_nodes": 2}) == 6
    assert num_processes({"devices": "auto", "accelerator": "cpu", "strategy": "fsdp"}) == 1
    assert num_processes({"devices": "2", "accelerator": "cpu"}) == 2
    assert num_processes({"devices": 8, "accelerator": "gpu"}) == 8  # also where there is none
    assert num_processes({"devices": 8, "accelerator": "tpu"}) == 1


@pytest.mark.parametrize("answer", [None, True])  # Lightning says None, whatever `fit` was told
def test_a_hostile_checkpoint_runs_no_code(tmp_path, monkeypatch, answer):
    from test_checkpoints import Trap

    path, sprung = tmp_path / "run.ckpt", tmp_path / "sprung"
    torch.save({"state_dict": {}, "global_step": 1, "trap": Trap(sprung)}, path)
    strategy = get_strategy("fsdp")
    monkeypatch.setattr(strategy, "broadcast", lambda value, src=0: value)  # there is one process
    with pytest.raises(ValueError, match="which safe loading refuses"):
        strategy.load_checkpoint(path, weights_only=answer)
    assert not sprung.exists()
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match="is damaged or cut short"):
        strategy.load_checkpoint(path, weights_only=answer)


def test_a_number_of_numpy_beside_shards_is_read(tmp_path, monkeypatch):
    path = tmp_path / "run.ckpt"
    path.mkdir()
    (path / ".metadata").write_bytes(b"")
    torch.save({"global_step": 1, "kept": np.float64(2.5)}, path / "meta.pt")
    assert read_checkpoint(path)["kept"] == 2.5
    read = lambda self, path, weights_only: torch.load(path / "meta.pt", weights_only=weights_only)  # noqa: E731
    monkeypatch.setattr(ModelParallelStrategy, "load_checkpoint", read)  # as Lightning's begins
    strategy = get_strategy("fsdp-shards")
    strategy.tensor, strategy.broadcast = 1, lambda value, src=0: value
    assert strategy.load_checkpoint(path)["kept"] == 2.5


@pytest.mark.parametrize("name", [*STRATEGIES, "tensor:2"])
def test_a_strategy_is_in_the_help_and_takes_a_timeout(name):
    strategy = get_strategy(name, "90m")
    assert strategy == "auto" or strategy._timeout == timedelta(hours=1.5)
    assert name.partition(":")[0] in COMMANDS["pretrain"].help()
    with pytest.raises(ValueError, match="collective_timeout=0.0"):
        get_strategy(name, "0s")


def test_an_unknown_strategy_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="zero.*auto, ddp, fsdp"):
        make_trainer(1, accelerator="cpu", strategy="zero")
    assert get_strategy("ddp_spawn") == "ddp_spawn" and get_strategy("auto") == "auto"
    given = get_strategy("fsdp")
    assert get_strategy(given) is given
