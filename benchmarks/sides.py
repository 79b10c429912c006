"""Shared by the benchmarks: each measurement in a fresh process, sides in turns, ratios within a round.

Sides take turns in the order A B B A, so that a machine that warms up or is busy for a while treats
them alike. A ratio compares neighbours in time; the median, minimum and maximum are reported. Figures
are kept in build/benchmarks as soon as they are measured: an interrupted benchmark continues where it
stopped while the code and the machine are the same, and `--fresh` starts again.
"""

import argparse
import hashlib
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

from bertlab.core.files import atomic_write
from bertlab.core.plots import compact_png

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "benchmarks"


def processor() -> str:
    "Return the processor's name."
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine(threads: int) -> dict:
    "Describe the machine and the versions that figures depend on."
    from bertlab.core.devices import describe_device

    names = ("torch", "lightning", "transformers", "datasets", "tokenizers")
    return {
        "measured": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "computes_in": describe_device().precision,
        "threads": threads,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "load_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }


def fingerprint() -> str:
    "Hash the package, the benchmarks and the machine: figures of other code are not mixed in."
    digest = hashlib.sha256(f"{processor()} {os.cpu_count()} {version('torch')}".encode())
    for folder in (ROOT / "bertlab", ROOT / "benchmarks"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Ledger:
    "Figures that were measured already, by case."

    def __init__(self, name: str, fresh: bool = False):
        self.path, self.code, self.figures = BUILD / f"{name}.figures.json", fingerprint(), {}
        if not fresh and self.path.exists():
            saved = json.loads(self.path.read_text(encoding="utf-8"))
            self.figures = saved["figures"] if saved["code"] == self.code else {}

    def get(self, key: str, measure: Callable[[], dict]) -> dict:
        "Return the figures of a case; measure and save them if they are missing."
        if key not in self.figures:
            self.figures[key] = measure()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.path) as temporary:
                content = {"code": self.code, "figures": self.figures}
                Path(temporary).write_text(json.dumps(content, indent=1), encoding="utf-8")
        return self.figures[key]


def environment(threads: int) -> dict[str, str]:
    "Return the environment of every child: the same threads, no network, no progress bars."
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }


def run_child(script: str, case: dict, threads: int) -> dict:
    "Measure a case in a fresh process, which prints its figures as its last line."
    command = [sys.executable, script, "--case", json.dumps(case)]
    done = subprocess.run(command, env=environment(threads), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{Path(script).name} {case} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def in_turns(names: Iterable[str], rounds: int) -> list[tuple[int, str]]:
    "Return (round, name) in the order A B B A."
    names = list(names)
    return [(n, name) for n in range(rounds) for name in (names if n % 2 == 0 else names[::-1])]


def alternate(
    script: str,
    cases: dict[str, dict],  # by the name of a side
    options: argparse.Namespace,  # of `common_parser`
    ledger: Ledger,
    show: Callable[[dict], str] = str,
    threads: int | None = None,  # None: options.threads
) -> dict[str, list[dict]]:  # figures by side, one for each round
    "Measure all sides in turns."
    threads, runs = threads or options.threads, {name: [] for name in cases}
    for n, name in in_turns(cases, options.rounds):
        case = {**cases[name], "round": n}
        key = json.dumps([name, case, threads], sort_keys=True)
        figures = ledger.get(key, lambda: run_child(script, case, threads))  # noqa: B023
        print(f"  {n + 1}/{options.rounds} {name:44} {show(figures)}", flush=True)
        runs[name].append(figures)
    return runs


def spread(values: Iterable[float]) -> dict[str, float]:
    "Return median, minimum and maximum."
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def spreads(runs: dict[str, list[dict]]) -> dict[str, dict]:
    "Return the spread of every figure of every side."
    return {
        side: {name: spread(run[name] for run in figures) for name in figures[0]}
        for side, figures in runs.items()
    }


def ratios(runs: list[dict], base_runs: list[dict], figure: str) -> dict[str, float]:
    "Return the spread of ours over theirs, round by round."
    return spread(a[figure] / b[figure] for a, b in zip(runs, base_runs, strict=True))


def write_result(options: argparse.Namespace, result: dict, draw: Callable | None = None) -> None:
    "Write the result as JSON, and a picture beside it."
    path = options.output
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        Path(temporary).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if draw is not None:
        with atomic_write(path.with_suffix(".png")) as temporary:
            draw(result).savefig(drawn := io.BytesIO(), format="png", dpi=110, bbox_inches="tight")
            temporary.write_bytes(compact_png(drawn.getvalue()))
    print(f"written to {path}")


def common_parser(description: str, name: str, rounds: int) -> argparse.ArgumentParser:
    "Return a parser with the options that all benchmarks take."
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=rounds, help=f"turns of each side (default: {rounds})")
    add("--threads", type=int, default=os.cpu_count(), help="of each side (default: all cores)")
    add("--quick", action="store_true", help="tiny sizes, to check that it runs")
    add("--fresh", action="store_true", help="forget what an earlier run has measured")
    add("--output", type=Path, default=BUILD / "results" / f"{name}.json", help="JSON file")
    add("--case", type=json.loads, help=argparse.SUPPRESS)  # one case, in this process
    return parser
