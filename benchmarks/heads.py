"""Peak memory of a training step: dense head, sparse head, sparse head in chunks.

    python benchmarks/heads.py [--runs 3] [--output FILE]

Each step runs in a process of its own, once for the head alone and once for a small model. Two
figures are written for each: the most resident memory of the whole process, as the operating
system counts it, and how far that is above what the process held before the step (Python, torch,
weights and batch). Medians over runs that take turns. The sparse head alone
has a target, and a verdict is written beside it.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from sides import BenchmarkParser, judge, machine, write_result

import bertlab
from bertlab.model.config import modernbert_tiny
from bertlab.core.devices import describe_device, peak_memory_bytes
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.losses import LossConfig

ROWS, LENGTH, VOCABULARY, LABELS, CHUNK = 12, 512, 30_522, 0.15, 128
SHAPE = dict(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=192, num_attention_heads=2,
             num_hidden_layers=2)  # fmt: skip
PARTS, WAYS = ("head", "model"), ("dense", "sparse", "sparse_in_chunks")
TARGET = 1 / 3  # of the dense head's peak


def resident_bytes() -> int:
    "What this process holds now."
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no VmRSS in /proc/self/status: this benchmark needs Linux")


def measure_step(part: str, way: str) -> dict[str, float]:
    "Forward, backward and optimizer step, in this process."
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = BertLabForMaskedLM(modernbert_tiny(**SHAPE)).train()
    ids_BL = torch.randint(VOCABULARY, (ROWS, LENGTH))
    positions_BM = torch.rand(ROWS, LENGTH).argsort(1)[:, : int(LABELS * LENGTH)]
    labels_BL = torch.full_like(ids_BL, -100).scatter(
        1, positions_BM, ids_BL.gather(1, positions_BM)
    )
    rule = LossConfig(chunk_size=CHUNK if way == "sparse_in_chunks" else None)
    positions_BM = None if way == "dense" else positions_BM
    weights = model.head.parameters() if part == "head" else model.parameters()
    weights = {*weights, model.get_input_embeddings().weight}  # the decoder is tied to it
    optimizer = torch.optim.SGD(weights, lr=0.1)
    x_BLD = torch.randn(ROWS, LENGTH, SHAPE["hidden_size"], requires_grad=True)
    before, start = resident_bytes(), time.perf_counter()
    if part == "head":
        # Only the sums: a name for the scores would keep them through the backward pass.
        loss = model.score(x_BLD, labels_BL, positions_BM, rule)[1].mean()
    else:
        loss = model(ids_BL, labels=labels_BL, label_positions=positions_BM, loss_config=rule).loss
    loss.backward()
    optimizer.step()
    peak = peak_memory_bytes()
    return {"peak_resident_bytes": peak, "bytes_above_start": peak - before,
            "seconds": time.perf_counter() - start, "loss": loss.item()}  # fmt: skip


def run_case(part: str, way: str) -> dict[str, float]:
    "The same in a fresh process: the highest water of another case must not count."
    command = [sys.executable, __file__, "--case", part, way]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def summary(runs: dict[str, list[dict]], place: dict) -> dict:
    "Medians of the runs so far, and what they are of the dense head's."
    median, shares = {}, {}
    for case, figures in runs.items():
        median[case] = {k: statistics.median(f[k] for f in figures) for k in figures[0]}
        dense = median[case.partition(", ")[0] + ", dense"]
        shares[case] = {k: round(median[case][k] / dense[k], 3) for k in dense if k != "loss"}
    judged = judge("peak memory, sparse head over dense head",
                   shares["head, sparse"]["peak_resident_bytes"], at_most=TARGET)  # fmt: skip
    return {
        "what": __doc__.splitlines()[0], "bertlab": bertlab.__version__, "machine": place,
        "device": str(describe_device()), "rows": ROWS, "row_length": LENGTH, "label_share": LABELS,
        "chunk_size": CHUNK, **SHAPE, "judged": [judged], "share_of_dense": shares, "median": median, "runs": runs,
    }  # fmt: skip


def main() -> None:
    parser = BenchmarkParser("heads", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="processes for each case (default: 3)")
    parser.add_argument(
        "--case", nargs=2, metavar=("PART", "WAY"), help="one step, in this process"
    )
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure_step(*options.case)))
        return
    cases = [(part, way) for part in PARTS for way in WAYS]
    place = machine(threads=1)
    runs = {", ".join(case): [] for case in cases}
    for number in range(options.runs):
        for case in cases:
            figures = run_case(*case)
            runs[", ".join(case)].append(figures)
            print(f"run {number + 1}: {', '.join(case):23}"
                  f"{figures['peak_resident_bytes'] / 2**20:7.0f} MiB in all,"
                  f"{figures['bytes_above_start'] / 2**20:7.0f} MiB of the step,"
                  f"{figures['seconds']:7.2f} s", flush=True)  # fmt: skip
        write_result(options.output, summary(runs, place), whole=number + 1 == options.runs)


if __name__ == "__main__":
    main()
