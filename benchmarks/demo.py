"""Measure `bertlab demo` from outside, as its user meets it, and write what was measured.

    python benchmarks/demo.py [--runs 3] [--output FILE] [options of bertlab demo]

Start-up: `import bertlab` and `bertlab --help`, medians of several fresh processes. The demo: wall
time of the whole program, seconds until its first step is shown, and peak resident memory as the
operating system counts it. Nothing here passes or fails; the figures are written with the machine.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from sides import BenchmarkParser, processor, write_result

import bertlab
from bertlab.core.devices import describe_device

TARGETS = {  # what the demo is meant to reach on two CPU cores
    "seconds": "under 180",
    "seconds_to_first_step": "under 15",
    "peak_resident_bytes": "under 2 GB (2e9)",
    "nats_below_unigram": "1.5 or more",
    "import_seconds": "under 0.2",
    "help_seconds": "under 1",
}


def seconds(command: list[str], repeats: int) -> list[float]:
    "Wall time of fresh processes; the first, which warms the file cache, is not counted."
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return times[1:]


def run_demo(directory: Path, arguments: list[str]) -> dict[str, float]:
    "One run of the demo, watched line by line."
    command = [
        sys.executable,
        "-m",
        "bertlab.cli.main",
        "demo",
        "--output",
        str(directory),
        *arguments,
    ]
    start, first_step = time.perf_counter(), None
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    for line in process.stdout:
        print("   ", line, end="", flush=True)
        if first_step is None and line.startswith("step 1/"):
            first_step = time.perf_counter() - start
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the demo ended with status {os.waitstatus_to_exitcode(status)}")
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2)
    metrics = json.loads((directory / "metrics.json").read_text())
    return {
        "seconds": time.perf_counter() - start,
        "seconds_to_first_step": first_step,
        "peak_resident_bytes": usage.ru_maxrss * unit,
        **{k: metrics[k] for k in ("validation_loss", "unigram_entropy", "nats_below_unigram",
                                   "tokens_per_second", "train_seconds", "steps", "tokens")},
    }  # fmt: skip


def main() -> None:
    parser = BenchmarkParser("demo", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="whole demos (default: 3)")
    arguments, demo_arguments = parser.parse_known_args()
    python = sys.executable
    bare = seconds([python, "-c", "pass"], 9)
    imported = seconds([python, "-c", "import bertlab"], 9)
    help_ = seconds([python, "-m", "bertlab.cli.main", "--help"], 9)
    with tempfile.TemporaryDirectory() as folder:
        runs = [run_demo(Path(folder) / str(i), demo_arguments) for i in range(arguments.runs)]
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    medians["import_seconds"] = statistics.median(imported) - statistics.median(bare)
    medians["help_seconds"] = statistics.median(help_)
    result = {
        "measured": time.strftime("%Y-%m-%d"), "bertlab": bertlab.__version__,
        "processor": processor(), "cores": os.cpu_count(), "device": str(describe_device()),
        "system": platform.platform(), "python": platform.python_version(),
        "torch": str(torch.__version__), "demo_arguments": demo_arguments,
        "median": medians, "targets": TARGETS, "runs": runs,
        "import_seconds": [i - statistics.median(bare) for i in imported], "help_seconds": help_,
    }  # fmt: skip
    write_result(arguments.output, result)
    print(json.dumps(medians, indent=2))


if __name__ == "__main__":
    main()
