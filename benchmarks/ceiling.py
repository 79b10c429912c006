"""How fast could a step be, if it were nothing but its matrix products?

    python benchmarks/ceiling.py [--models short small base] [--precisions fp32 bf16] [--rounds 3] [--quick]

A step of `bertlab pretrain` (BERT with dropout, full rows) is run once while every matrix product is written down:
its shapes, strides and type, forward, backward and in the optimizer. Then the same products are made again, in the
same order and with the same threads, on numbers that lie ready, and nothing else. What that takes is a floor: a step
of these products cannot be shorter, whatever is done to all the rest. Beside it stand the step itself and one of
Trainer on grouped rows with as many tokens, and so how many times Trainer's rate is to be had at most.

The floor is that of this library of products (MKL or oneDNN as torch calls them) on this processor, not of its
instructions: small matrices are multiplied more slowly than large ones.
"""

import json
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path

import torch
from pretraining import PRECISIONS, SHAPES, measure as measure_side, our_side, shared_text
from sides import Ledger, alternate, common_parser, fingerprint, machine, spread, write_result
from torch.utils._python_dispatch import TorchDispatchMode

import bertlab

SECONDS = 3  # of the products alone, before the step's steps and after


def room_for(tensor: torch.Tensor) -> torch.Tensor:
    "Small random numbers of the same shape, strides and type."
    length = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    return (0.02 * torch.randn(length)).to(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class Products(TorchDispatchMode):
    "Writes down the matrix products of what runs under it, and makes them again."

    KINDS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default,
             torch.ops.aten.baddbmm.default}  # fmt: skip

    def __init__(self):
        super().__init__()
        self.calls, self.rooms = [], {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in self.KINDS:
            inputs = []
            for place, x in enumerate(args):
                if isinstance(x, torch.Tensor):
                    key = place, x.shape, x.stride(), x.dtype
                    if key not in self.rooms:
                        with torch.utils._python_dispatch._disable_current_modes():
                            self.rooms[key] = room_for(x)
                    x = self.rooms[key]
                inputs.append(x)
            self.calls.append((op, inputs, kwargs or {}))
        return op(*args, **(kwargs or {}))

    def flops(self) -> int:
        "Two for each number of a product and each step along the axis that goes."
        return sum(2 * left.numel() * right.shape[-1] for _, (*_, left, right), _ in self.calls)

    def seconds(self) -> float:
        "What all of them take, once more and nothing else."
        start = time.perf_counter()
        with torch.no_grad():
            for op, inputs, options in self.calls:
                op(*inputs, **options)
        return time.perf_counter() - start

    def timed(self) -> list[float]:
        "Again and again for some seconds."
        self.seconds()
        found, end = [], time.perf_counter() + SECONDS
        while not found or time.perf_counter() < end:
            found.append(self.seconds())
        return found


def measure(case: dict) -> dict:
    "A step of ours with its products alone before and after it, or one of Trainer."
    if case["side"] != "ours":
        found = measure_side(case)
        return {
            "step_seconds": found["wall_seconds"] / found["steps"],
            "tokens_per_second": found["tokens_per_second"],
        }
    corpus, tokenizer = shared_text(SHAPES[case["model"]][3], case["documents"], Path(case["kept"]))
    with tempfile.TemporaryDirectory() as folder:
        with Products() as products:
            our_side(
                {**case, "steps": 1, "warm": 0, "warmup": 0}, corpus, tokenizer, f"{folder}/written"
            )
        alone = products.timed()
        found, _ = our_side(case, corpus, tokenizer, f"{folder}/timed")
        alone += products.timed()
    step, floor = found["wall_seconds"] / found["steps"], statistics.median(alone)
    return {"step_seconds": step, "products_seconds": floor, "share": floor / step, "products": len(products.calls),
            "gflops": products.flops() / 1e9, "gflops_per_second": products.flops() / 1e9 / floor,
            "tokens_per_second": found["tokens_per_second"], "tokens_per_second_at_most": found["tokens_per_second"] * step / floor}  # fmt: skip


def shown(found: dict) -> str:
    step = f"{1e3 * found['step_seconds']:7,.0f} ms a step, {found['tokens_per_second']:8,.0f} tokens/s"
    if "share" not in found:
        return step
    return (
        f"{step}; products alone {1e3 * found['products_seconds']:,.0f} ms ({found['share']:.0%})"
    )


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "ceiling", rounds=3)
    parser.add_argument(
        "--models", nargs="+", default=["short", "small", "base"], choices=list(SHAPES)
    )
    parser.add_argument(
        "--precisions",
        nargs="+",
        default=["fp32", "bf16"],
        choices=[p for p in PRECISIONS if p != "auto"],
    )
    parser.add_argument("--documents", type=int, help="of the corpus (default: all)")
    options = parser.parse_args()
    if options.case:
        return print(json.dumps(measure(json.loads(options.case))))
    steps, warm = 8, 2
    if options.quick:
        options.models, options.precisions, options.rounds, options.documents = (
            ["tiny"],
            ["fp32"],
            1,
            600,
        )
        steps, warm = 2, 1
    place, ledger = (
        machine(options.threads),
        Ledger(options.kept / "ceiling", fingerprint(__file__), options.fresh),
    )
    rows = []
    for model, precision in product(options.models, options.precisions):
        shared_text(
            SHAPES[model][3], options.documents, options.kept
        )  # before the children need it
        few = {"base": 3}.get(model, steps)
        case = {"model": model, "kind": "bert", "steps": few + warm, "warm": warm, "seconds": 0, "seed": 0, "warmup": few,
                "documents": options.documents, "kept": str(options.kept), "precision": precision}  # fmt: skip
        print(f"{model}, {precision}", flush=True)
        runs = alternate(__file__, {side: {**case, "side": side} for side in ("ours", "grouped")}, options.rounds,
                         options.threads, ledger, shown)  # fmt: skip
        pairs = list(zip(runs["ours"], runs["grouped"], strict=True))
        rows.append({
            "model": model, "precision": precision, "products": runs["ours"][0]["products"],
            **{name: spread(run[name] for run in runs["ours"]) for name in
               ("gflops", "gflops_per_second", "step_seconds", "products_seconds", "share")},
            "over_grouped": spread(a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs),
            "over_grouped_at_most": spread(a["tokens_per_second_at_most"] / b["tokens_per_second"] for a, b in pairs),
            "runs": runs})  # fmt: skip
    write_result(options.output, {"what": __doc__.splitlines()[0], "bertlab": bertlab.__version__, "machine": place,
                                  "rows": rows})  # fmt: skip


if __name__ == "__main__":
    main()
