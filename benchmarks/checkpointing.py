"""Peak memory and step time of each mode of activation checkpointing.

    python benchmarks/checkpointing.py [--runs 3] [--output FILE]

Each case runs in a process of its own: a step for memory, then more steps for time. Two figures of
memory are written: the most resident memory of the process above what it held before the step, as
the operating system counts it, and the peak of live bytes that the ledger counts, which does not
depend on an allocator. Of compiled cases, what autograd keeps between the passes: a ledger cannot
look into a compiled graph, and the compiler's own memory hides the step's; they run once, since
compiling takes long. Time is the processor's. Medians over runs that take turns. Losses must agree
with the control's, or the benchmark ends. Nothing else here passes or fails.
"""

import json
import statistics
import subprocess
import sys
import time

import torch
from heads import resident_bytes
from sides import BenchmarkParser, machine, write_result

import bertlab
from bertlab.model.activation_checkpointing import (
    MemoryTracker,
    checkpoint_activations,
    parse_checkpointing,
)
from bertlab.model.config import modernbert_tiny
from bertlab.core.devices import describe_device, peak_memory_bytes
from bertlab.model.encoder import run_blocks
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.losses import LossConfig
from bertlab.core.plots import BLUE, ORANGE, new_axes

ROWS, LENGTH, LABELS, CHUNK, STEPS = 4, 512, 0.15, 128, 3
SHAPE = dict(vocab_size=8192, hidden_size=256, intermediate_size=384, num_attention_heads=4,
             num_hidden_layers=4)  # fmt: skip
DROPOUT = dict(embedding_dropout=0.1, attention_dropout=0.1, mlp_dropout=0.1)
CASES = {  # a compiler on a budget repeats no dropout, so it has a control of its own
    "keep everything": False,
    "full": True,
    "every 2nd block": {"mode": "selected_blocks", "interval": 2},
    "MLPs": {"mode": "selected_modules", "modules": ["*.mlp"]},
    "operations": "selected_ops",
    "compiled, keep everything": False,
    "compiled, budget 0.5": {"mode": "budget", "budget": 0.5},
    "compiled, budget 0": {"mode": "budget", "budget": 0},
}


def measure(case: str) -> dict[str, float]:
    "Steps of one mode, in this process."
    torch.manual_seed(0)
    torch.set_num_threads(1)
    compiled = case.startswith("compiled")
    model = BertLabForMaskedLM(modernbert_tiny(**SHAPE, **({} if compiled else DROPOUT))).train()
    mode, options = parse_checkpointing(CASES[case], compiled)
    checkpoint_activations(model, mode, **options)
    ids_BL = torch.randint(SHAPE["vocab_size"], (ROWS, LENGTH))
    positions_BM = torch.rand(ROWS, LENGTH).argsort(1)[:, : int(LABELS * LENGTH)]
    labels_BL = torch.full_like(ids_BL, -100).scatter(
        1, positions_BM, ids_BL.gather(1, positions_BM)
    )
    rule = LossConfig(chunk_size=CHUNK)  # else the head's scores are the peak

    def step(rows: int = ROWS) -> float:
        torch.manual_seed(1)
        loss = model(ids_BL[:rows], labels=labels_BL[:rows], label_positions=positions_BM[:rows],
                     loss_config=rule).loss  # fmt: skip
        loss.backward()
        model.zero_grad(set_to_none=False)
        return loss.item()

    figures = {}
    if compiled:
        model.encoder.__dict__["compiled_blocks"] = torch.compile(run_blocks, dynamic=False)
        figures["loss"] = step()  # compiles; its peak is of the compiler, too
    else:
        step(1)  # gradients and kernels are there
        before = resident_bytes()
        figures["loss"] = step()
        figures["bytes_above_start"] = peak_memory_bytes() - before
        with MemoryTracker() as ledger:
            step()
        figures["live_bytes"] = max(ledger.history)
    if compiled:
        own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes() * (storage.data_ptr() not in own)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            step()
        figures["kept_bytes"] = sum(kept.values())
    times = []
    for _ in range(STEPS):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return figures | {"seconds": statistics.median(times)}


def run_case(case: str) -> dict[str, float]:
    "The same in a fresh process: the highest water of another case must not count."
    command = [sys.executable, __file__, "--case", case]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def control_of(case: str) -> str:
    return "compiled, keep everything" if case.startswith("compiled") else "keep everything"


def summary(runs: dict[str, list[dict]], place: dict) -> dict:
    "Medians of the runs so far, and what they are of the control's."
    median = {case: {k: statistics.median(f[k] for f in figures) for k in figures[0]}
              for case, figures in runs.items() if figures}  # fmt: skip
    shares = {}
    for case, figures in median.items():
        control = median[control_of(case)]
        if abs(figures["loss"] - control["loss"]) > 1e-6:
            raise SystemExit(
                f"{case}: loss {figures['loss']} is not the control's {control['loss']}"
            )
        shares[case] = {k: round(figures[k] / control[k], 3) for k in figures if k != "loss"}
    return {
        "what": __doc__.splitlines()[0], "bertlab": bertlab.__version__, "machine": place,
        "device": str(describe_device()), "rows": ROWS, "row_length": LENGTH,
        "label_share": LABELS, "chunk_size": CHUNK, "steps": STEPS, **SHAPE, **DROPOUT,
        "share_of_control": shares, "median": median, "runs": runs,
    }  # fmt: skip


def draw(result: dict):
    "Memory and processor time of each mode, as shares of the step that keeps everything."
    figure, axes = new_axes("share of a step that keeps everything", "", size=(7, 4))
    for place, (mode, shares) in enumerate(result["share_of_control"].items()):
        memory = shares.get("live_bytes", shares.get("kept_bytes"))
        for what, shift, value, colour in (("peak of live bytes (compiled: bytes kept)", -0.2, memory, BLUE),
                                           ("processor time", 0.2, shares["seconds"], ORANGE)):  # fmt: skip
            axes.barh(
                place + shift, value, height=0.4, color=colour, label=what if place == 0 else None
            )
            axes.annotate(f"{value:.2f}", (value, place + shift), xytext=(3, 0), va="center",
                          textcoords="offset points", fontsize=8)  # fmt: skip
    axes.set_yticks(range(len(result["share_of_control"])), list(result["share_of_control"]))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.08 * axes.get_xlim()[1])
    axes.axvline(1, color="0.3", linewidth=0.8)
    axes.set_title(f"{result['machine']['processor']}, one thread", fontsize=9)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=2)
    return figure


def main() -> None:
    parser = BenchmarkParser("checkpointing", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="processes for each case (default: 3)")
    parser.add_argument("--case", choices=CASES, metavar="CASE", help="one case, in this process")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case)))
        return
    place = machine(threads=1)
    runs = {case: [] for case in CASES}
    for number in range(options.runs):
        for case in CASES:
            if number and case.startswith("compiled"):
                continue
            runs[case].append(run_case(case))
            shown = {k: v / 2**20 if "bytes" in k else v
                     for k, v in runs[case][-1].items()}  # fmt: skip
            print(
                f"run {number + 1}: {case:26}",
                {k: round(v, 3) for k, v in shown.items()},
                flush=True,
            )
        write_result(options.output, summary(runs, place), draw, whole=number + 1 == options.runs)


if __name__ == "__main__":
    main()
