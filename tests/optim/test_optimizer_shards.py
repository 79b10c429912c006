"What the table says of FSDP2, tried on two processes."

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from ranks import run_on_ranks

from bertlab.optim.groups import parameter_groups
from bertlab.optim.optimizers import OPTIMIZERS, get_optimizer

OPTIONS = {"galore": {"rank": 8, "update_proj_gap": 2}, "sgd": {"lr": 0.3, "momentum": 0.9}}


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Embedding(20, 16), nn.Linear(16, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 20)
    return nn.Sequential(*layers)


def train(name: str, model: nn.Module) -> nn.Module:
    ids = torch.arange(20)
    groups = parameter_groups(model, split_hidden=name in ("muon", "galore"))
    optimizer = get_optimizer(name, groups, {"lr": 0.01, **OPTIONS.get(name, {})})
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids), ids.roll(1)).backward()
        optimizer.step()
    return model


def outcome(name: str) -> str:
    sharded = build()
    fully_shard(sharded[1])
    fully_shard(sharded)
    try:
        train(name, sharded)
    except ValueError as error:
        return str(error)
    pairs = zip(train(name, build()).parameters(), sharded.parameters())
    # Muon multiplies in bfloat16: the order of its sums shows.
    far = max((a - b.full_tensor()).abs().max().item() for a, b in pairs if isinstance(b, DTensor))
    return f"equal {name}" if far < (2e-3 if name == "muon" else 1e-5) else f"off by {far} {name}"


def worker(path: str) -> None:
    dist.init_process_group("gloo")
    outcomes = {name: outcome(name) for name in OPTIMIZERS}
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(outcomes))
    dist.destroy_process_group()


def test_under_fsdp2_each_optimizer_does_what_the_table_says(tmp_path):
    "Those with a yes give the weights of one process; those with a no say so before any update."
    run_on_ranks(worker, str(tmp_path / "outcomes.json"))
    results = json.loads((tmp_path / "outcomes.json").read_text())
    for name, facts in OPTIMIZERS.items():
        if facts.fsdp:
            assert results[name] == f"equal {name}"
        elif (
            facts.needs_create_graph
        ):  # refused wherever there are several processes, sharded or not
            assert "on a single process" in results[name], results[name]
        else:
            assert (
                "does not run under FSDP2" in results[name] and facts.fsdp_note in results[name]
            ), results[name]
