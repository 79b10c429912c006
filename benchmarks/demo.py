"""Measure `bertlab demo` from outside: wall time, seconds to its first step, peak memory, and its loss.

python benchmarks/demo.py [--rounds 3] [options of bertlab demo]
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from sides import common_parser, environment, processor, spread, write_result

import bertlab
from bertlab.core.devices import describe_device


def run_demo(folder: Path, arguments: list[str], threads: int) -> dict[str, float]:
    "Run the demo once and read its output line by line."
    command = [sys.executable, "-m", "bertlab.cli", "demo", "--output", str(folder), *arguments]
    env, start, first_step = (
        environment(threads) | {"PYTHONUNBUFFERED": "1"},
        time.perf_counter(),
        None,
    )
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    for line in process.stdout:
        print("   ", line, end="", flush=True)
        if first_step is None and line.startswith("step 1/"):
            first_step = time.perf_counter() - start
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the demo ended with status {os.waitstatus_to_exitcode(status)}")
    metrics = json.loads((folder / "metrics.json").read_text())
    names = ("val_loss", "unigram_entropy", "nats_below_unigram", "tokens_per_second")
    return {
        "seconds": time.perf_counter() - start,
        "seconds_to_first_step": first_step,
        "peak_resident_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        **{name: metrics[name] for name in (*names, "train_seconds", "steps", "tokens")},
    }


def main() -> None:
    parser = common_parser(__doc__, "demo", rounds=3)
    options, arguments = parser.parse_known_args()
    if options.quick:
        options.rounds, size = 1, "--steps 5 --hidden-size 64 --vocab-size 600 --max-documents 500"
        arguments += size.split()
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            run_demo(Path(folder, str(n)), arguments, options.threads)
            for n in range(options.rounds)
        ]
    medians = {name: spread(run[name] for run in runs)["median"] for name in runs[0]}
    content = {
        "measured": time.strftime("%Y-%m-%d"),
        "bertlab": bertlab.__version__,
        "processor": processor(),
        "cores": os.cpu_count(),
        "device": str(describe_device()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "demo_arguments": arguments,
        "median": medians,
        "runs": runs,
    }
    write_result(options, content)
    print(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
