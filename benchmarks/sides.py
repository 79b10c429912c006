"""What the benchmarks that compare two sides share: fresh processes in turns, ratios, whole files.

Each measurement runs in a process of its own, a child of this one, with the same number of threads.
Sides take turns as A B B A, so that a machine that warms up or is busy for a while treats them alike.
A ratio is formed within a round, of neighbours in time; reported are its median, least and most.

Every child's figures are kept in build/benchmarks/ as soon as they are there. A benchmark that was
interrupted goes on where it stopped, as long as the code, the machine and the versions of Python, torch
and the other libraries are the same; `--fresh` begins anew.
"""

import argparse
import ast
import contextlib
import hashlib
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

GIVEN = dict(os.environ)  # before `import bertlab` adds what it asks of OpenMP

from PIL import Image  # noqa: E402

from bertlab.core.files import atomic_write  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
RESULTS, KEPT = ROOT / "benchmarks" / "results", ROOT / "build" / "benchmarks"


def first_core(name: str) -> str | None:
    "What the system says of its first core under a name, where it says so."
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith(name))
    except (OSError, StopIteration, IndexError):
        return None


def processor() -> str:
    "The processor's name where the system tells it."
    return first_core("model name") or platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    "Of Python and of the libraries that figures depend on."
    from importlib.metadata import version

    names = ("torch", "lightning", "transformers", "datasets", "tokenizers")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def machine(threads: int) -> dict:
    "Where something was measured, and with what."
    from bertlab.core.devices import describe_device

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "measured": time.strftime("%Y-%m-%d"), "processor": processor(), "cores": os.cpu_count(),
        "computes_in": describe_device().precision, "threads": threads, "memory_bytes": memory, "system": platform.platform(),
        "load_at_start": os.getloadavg()[0], **versions(),
    }  # fmt: skip


def with_imports(files: Iterable[str | Path]) -> list[Path]:
    "Files, the scripts beside them that they import, and what those import."
    found, ahead = set(), [Path(file).resolve() for file in files]
    while ahead:
        if (file := ahead.pop()) in found:
            continue
        found.add(file)
        for node in ast.walk(ast.parse(file.read_bytes())) if file.suffix == ".py" else ():
            names = (
                [node.module]
                if isinstance(node, ast.ImportFrom)
                else [one.name for one in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            beside = (file.with_name(f"{name}.py") for name in names)
            ahead += [other for other in beside if other.is_file()]
    return sorted(found)


def fingerprint(*files: str | Path) -> str:
    """A hash of the package, of a benchmark with what it takes from others, and of where it runs.

    So figures of other code, of another machine or of other versions are not mixed in. Processors of one name may
    have other instructions, so these count, too.
    """
    code = hash_of([*sorted((ROOT / "bertlab").rglob("*.py")), *with_imports([__file__, *files])])
    instructions = first_core("flags") or first_core("Features")  # of x86, of ARM
    where = [processor(), instructions, os.cpu_count(), versions()]
    return hashlib.sha256(json.dumps([code, where]).encode()).hexdigest()[:16]


def hash_of(places: Iterable[Path]) -> str:
    "A hash of what is in some files, one after the other, and in all files of directories."
    whole = hashlib.sha256()
    for place in places:
        for file in sorted(filter(Path.is_file, place.rglob("*"))) if place.is_dir() else [place]:
            whole.update(file.read_bytes())
    return whole.hexdigest()[:16]


class Ledger:
    "Figures of children, written whole after each."

    def __init__(self, path: str | Path, code: str, fresh: bool = False):
        self.path, self.code, self.figures = Path(path).with_suffix(".figures.json"), code, {}
        self.lock = threading.Lock()
        if not fresh and self.path.exists():
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            self.figures = kept["figures"] if kept["code"] == code else {}

    def ask(self, key: str, measure: Callable[[], dict]) -> tuple[dict, bool]:
        "Figures under a key and whether they were there; measured now if not. Several may ask at once."
        if key in self.figures:
            return self.figures[key], True
        found = measure()
        with self.lock:
            self.figures[key] = found
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.path) as temporary:
                text = json.dumps({"code": self.code, "figures": self.figures}, indent=1)
                temporary.write_text(text, encoding="utf-8")
        return found, False


def environment(threads: int) -> dict[str, str]:
    "The same for every child: so many threads, no network, no bars."
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}  # fmt: skip


def run_child(script: str | Path, case: dict, threads: int) -> dict:
    """One case in a fresh process, which prints its figures as the last line.

    Ours waits as `import bertlab` asks OpenMP to; a side without bertlab does not.
    """
    command = [sys.executable, str(script), "--case", json.dumps(case)]
    env = environment(threads)
    if case.get("side", "ours") != "ours" and "GOMP_SPINCOUNT" not in GIVEN:
        env.pop("GOMP_SPINCOUNT", None)
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{Path(script).name} {case} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def busy_loops(number: int):
    "Other programs that want a core each, until the end of the block or of this process."
    loop = "import os; me = os.getppid()\nwhile os.getppid() == me: pass"
    others = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(number)]
    try:
        yield others
    finally:
        for other in others:
            other.kill()
            other.wait()


def in_turns(names: Iterable[str], rounds: int) -> list[tuple[int, str]]:
    "A B B A ...: who is measured when, as (round, name)."
    names = list(names)
    return [(n, name) for n in range(rounds) for name in (names if n % 2 == 0 else names[::-1])]


def alternate(
    script: str | Path,
    cases: dict[str, dict],  # by the name of a side
    rounds: int,
    threads: int,
    ledger: Ledger,
    show: Callable[[dict], str] = lambda figures: "",
    at_once: int = 1,  # children that run side by side, where their speed is not compared
) -> dict[str, list[dict]]:  # figures by side, a dict for each round
    "Measure all sides in turns."

    def measure(turn: tuple[int, str]) -> dict:
        (number, name), case = turn, {**cases[turn[1]], "round": turn[0]}
        key = json.dumps([case, threads], sort_keys=True)
        try:
            figures, known = ledger.ask(key, lambda: run_child(script, case, threads))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # none of the turns behind begins
            raise
        print(f"  {number + 1}/{rounds} {name:44} {show(figures)}{' (kept)' * known}", flush=True)
        return figures

    turns, runs = in_turns(cases, rounds), {name: [] for name in cases}
    with ThreadPoolExecutor(at_once) as pool:
        for (_, name), figures in zip(turns, pool.map(measure, turns)):
            runs[name].append(figures)
    return runs


def spread(values: Iterable[float]) -> dict[str, float]:
    "Median, least and most."
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(ours: list[dict], theirs: list[dict], figure: str) -> dict[str, float]:
    "How many times theirs ours is, round by round."
    return spread(a[figure] / b[figure] for a, b in zip(ours, theirs, strict=True))


def judge(
    what: str, measured: float, at_least: float | None = None, at_most: float | None = None
) -> dict:
    "A target beside what was measured. Nothing ends because of it."
    passed = (at_least is None or measured >= at_least) and (at_most is None or measured <= at_most)
    bounds = {"at_least": at_least, "at_most": at_most}
    return {"what": what, **{k: v for k, v in bounds.items() if v is not None}, "measured": measured,
            "passed": passed}  # fmt: skip


def say(judgements: list[dict]) -> None:
    "Print targets, measured figures and verdicts."
    for one in judgements:
        bound = f">= {one['at_least']:g}" if "at_least" in one else f"<= {one['at_most']:g}"
        print(
            f"{'pass' if one['passed'] else 'MISS'}  {one['measured']:8.2f}  {bound:8}  {one['what']}"
        )


def write_result(
    output: str | Path | None,
    result: dict,
    draw: Callable | None = None,  # of a whole result
    whole: bool = True,  # False: what there is so far
) -> None:
    """The JSON file and the picture beside it, each whole; nothing where no file was chosen.

    What there is so far goes into FILE.part.json, until the whole result removes that: a benchmark that is stopped
    leaves an earlier result as it was.
    """
    if output is None:
        return
    output = Path(output)
    part = output.with_suffix(".part.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(output if whole else part) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if not whole:
        return print(f"so far: {part}", flush=True)
    part.unlink(missing_ok=True)
    if draw is not None:
        with atomic_write(output.with_suffix(".png")) as temporary:
            draw(result).savefig(drawn := io.BytesIO(), format="png", dpi=110, bbox_inches="tight")
            # Few colours, a third of the bytes: the page of all benchmarks carries its pictures.
            Image.open(drawn).convert("RGB").quantize(128).save(temporary, "PNG", optimize=True)
    print(f"written to {output}")


# Options that say how figures come about and where they go, not what is measured.
HOW = ("output", "kept", "fresh", "threads", "case", "quick", "at_once", "no_picture")


def measures_less(value: Any, default: Any) -> bool:
    "Whether an option leaves out something that is measured without it, or asks for something else."
    if isinstance(default, (list, tuple)):
        return not set(default) <= set(value)
    if isinstance(default, int) and not isinstance(default, bool):
        return value < default
    return value != default


class BenchmarkParser(argparse.ArgumentParser):
    """A parser that keeps all but a whole measurement away from the file with the full result.

    Without `--output` a quick run writes beside the figures that are kept, and a part or a rehearsal nowhere.
    Options that are `free` may have any value. What a call leaves out by one that is `merged` stays in the file.
    """

    def __init__(self, name: str, free: Iterable[str] = (), merged: Iterable[str] = (),
                 otherwise: str = "nowhere for a part or a rehearsal", **options):  # fmt: skip
        super().__init__(**options)
        self.name, self.free, self.merged = name, {*HOW, *free}, set(merged)
        self.add_argument(
            "--output", type=Path, help=f"(default: {name}.json in results, {otherwise})"
        )

    def leaves_out(self, name: str, value: Any) -> bool:
        "Whether an option makes a measurement that the full result is not to be replaced with."
        if name in self.merged and (isinstance(value, list) or not value):
            return False
        return name not in self.free and measures_less(value, self.get_default(name))

    def parse_known_args(self, *words, **options) -> tuple[argparse.Namespace, list[str]]:
        "Choose the file where none was given; exit with a message where a quick run names the full one."
        (read, rest), full = (
            super().parse_known_args(*words, **options),
            RESULTS / f"{self.name}.json",
        )
        quick = getattr(read, "quick", False)
        if quick and read.output is None:
            read.output = getattr(read, "kept", KEPT) / "quick" / full.name
        elif quick and read.output.resolve() == full.resolve():
            self.error(
                f"--quick measures tiny sizes, and {read.output} holds the full result: choose another --output"
            )
        elif read.output is None and (
            rest or any(self.leaves_out(*one) for one in vars(read).items())
        ):
            print("a part or a rehearsal: nothing is written without --output", flush=True)
        elif read.output is None:
            read.output = full
        return read, rest


def common_parser(description: str, name: str, rounds: int, **options) -> BenchmarkParser:
    "The flags that all benchmarks of two sides take."
    parser = BenchmarkParser(name, description=description, **options)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"turns (default: {rounds})")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="of each side (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument(
        "--fresh", action="store_true", help="forget what an earlier run has measured"
    )
    parser.add_argument("--kept", type=Path, default=KEPT, help="where figures wait for the end")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # JSON: one case, in this process
    return parser
