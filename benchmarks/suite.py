"""Every benchmark in order, as `make bench` runs them: unattended, and going on where it stopped.

    python benchmarks/suite.py [--quick] [--only pretraining scaling] [--folder build/benchmarks/results]

The results of this machine lie in build/benchmarks/results; those of the project, in benchmarks/results, stay as
they are unless --folder names them. Prints what is ahead with its time, then each benchmark's own lines, and
at the end targets and verdicts.
A benchmark that was finished on this machine, with the code and the versions of libraries as they are now, is
not run again, unless `--fresh` is given; one that was interrupted keeps what its finished processes have
measured. A benchmark that fails is named at the end, and the others run all the same; only then is the exit
status not 0.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from sides import KEPT, RESULTS, environment, fingerprint, say

from bertlab.core.files import atomic_write

HERE = Path(__file__).resolve().parent
DEMO = KEPT.parent / "demo"  # the directory of `bertlab demo` that a part reads


@dataclass(frozen=True)
class Part:
    "A benchmark of the suite."

    name: str
    minutes: float  # on two cores that do nothing else
    quick: tuple[str, ...] | None = ("--quick",)  # its flags in a quick suite; None: left out there
    flags: tuple[str, ...] = ()  # its flags otherwise
    resumes: bool = False  # does it take the flags of `sides`?
    forgets: bool = False  # does it take --fresh alone of these?
    result: str | None = None  # the file's name, where it is another
    measured_by: str | None = None  # likewise the script's
    reads: tuple[str, ...] = ()  # what else of this folder it depends on, beside what it imports

    @property
    def script(self) -> Path:
        return HERE / f"{self.measured_by or self.name}.py"

    def output(self, folder: Path) -> Path:
        return folder / f"{self.result or self.name}.json"


_SHORT = ("--kinds", "bert", "--seconds", "0", "--no-picture")  # rates alone, of one architecture

PARTS = (
    Part("startup", 3, resumes=True),
    Part("demo", 8, None),
    Part("collators", 2, ("--repeats", "1")),
    Part("packing", 2, ("--documents", "2000")),
    Part("data", 3, ("--documents", "600", "--repeats", "1")),
    Part("delivery", 3, resumes=True),
    Part("heads", 3, None),
    Part("checkpointing", 7, None),
    Part("memory", 4, resumes=True),
    Part("estimate", 8, resumes=True),
    Part("adapters", 40, resumes=True),
    Part("context", 40, resumes=True),
    Part("bare_pretraining", 45, resumes=True),
    Part("vocabulary", 45, resumes=True),
    Part("writing", 35, resumes=True),
    Part("kills", 25),
    Part("shards", 20),
    Part("overhead", 5, ("--steps", "12", "--rounds", "1")),
    Part("finetuning_trainer", 10, resumes=True),
    Part("embeddings", 30, None, (str(DEMO),), resumes=True),
    Part("scaling", 25, resumes=True),
    Part("final_project", 140, resumes=True),
    Part("pretraining", 75, resumes=True),
    Part(
        "pretraining_busy",
        15,
        None,
        (*_SHORT, "--models", "short", "--precisions", "fp32", "--busy", "1", "2"),
        resumes=True,
        measured_by="pretraining",
    ),
    Part(
        "pretraining_share",
        20,
        None,
        (*_SHORT, "--models", "small", "base", "--precisions", "fp32", "bf16"),
        resumes=True,
        measured_by="pretraining",
    ),
    Part("ceiling", 30, resumes=True),
    Part("half_hour", 130, resumes=True),
    Part("records", 25, resumes=True, result="records/laptop", reads=("records/*.yaml",)),
    Part("minutes", 110, resumes=True),
    Part("ablations", 900, forgets=True, reads=("tricks.py",)),
)


def command(part: Part, options: argparse.Namespace) -> list[str]:
    "What is run for a benchmark."
    words = [sys.executable, str(part.script), *(part.quick if options.quick else part.flags),
             "--output", str(part.output(options.folder))]  # fmt: skip
    if part.resumes:
        words += ["--kept", str(options.kept), "--threads", str(options.threads)] if options.threads else [
            "--kept", str(options.kept)]  # fmt: skip
    return words + ["--fresh"] * (options.fresh and (part.resumes or part.forgets))


def stamp(part: Part, words: list[str]) -> str:
    "What a finished benchmark is known by: its code, where it ran, and its flags."
    flags = [word for word in words[2:] if word != "--fresh"]
    read = [file for pattern in part.reads for file in sorted(HERE.glob(pattern))]
    return json.dumps([fingerprint(part.script, *read), flags])


def chosen(options: argparse.Namespace) -> list[Part]:
    "The benchmarks that were asked for, in order."
    parts = [part for part in PARTS if not options.only or part.name in options.only]
    return [part for part in parts if not options.quick or part.quick is not None]


def plan(
    parts: list[Part], done: dict[str, str], words: dict[str, list[str]], quick: bool
) -> list[Part]:
    "Print what is ahead, and return it."
    ahead = [part for part in parts if done.get(part.name) != stamp(part, words[part.name])]
    for part in parts:
        about = "" if quick else f"about {part.minutes:g} minutes"
        print(f"  {part.name:20} {about if part in ahead else 'done with this code, here'}")
    if not quick:
        print(
            f"  in all               about {sum(part.minutes for part in ahead) / 60:.1f} hours",
            flush=True,
        )
    return ahead


def judgements(parts: list[Part], folder: Path) -> list[dict]:
    "The verdicts of some parts, each with its part's name."
    paths = {part.name: part.output(folder) for part in parts}
    found = {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name, path in paths.items()
        if path.exists()
    }
    return [
        one | {"what": f"{name}: {one['what']}"}
        for name, result in found.items()
        if isinstance(result, dict)
        for one in result.get("judged", [])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that everything runs"
    )
    parser.add_argument(
        "--only", nargs="+", choices=[part.name for part in PARTS], help="these alone"
    )
    parser.add_argument("--threads", type=int, help="of each side (default: all)")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument(
        "--folder", type=Path, help="of the results (default: results in --kept; quick there)"
    )
    parser.add_argument("--kept", type=Path, default=KEPT, help="where figures wait for the end")
    parser.add_argument(
        "--plan", action="store_true", help="say what would be run, and how long it takes"
    )
    options = parser.parse_args()
    slow = [part.name for part in PARTS if options.quick and part.quick is None]
    if asked := [name for name in slow if name in (options.only or ())]:
        parser.error(
            f"there is no quick way to run {', '.join(asked)}: leave --quick out, or name others after --only"
        )
    options.folder = options.folder or options.kept / ("quick" if options.quick else "results")
    if options.quick and options.folder.resolve() == RESULTS.resolve():
        parser.error(
            f"--quick measures tiny sizes, and {options.folder} holds the full results: choose another --folder"
        )
    options.kept.mkdir(parents=True, exist_ok=True)
    book = options.kept / ("quick.json" if options.quick else "finished.json")
    done = json.loads(book.read_text()) if book.exists() and not options.fresh else {}
    parts = chosen(options)
    words = {part.name: command(part, options) for part in parts}
    ahead, failed = plan(parts, done, words, options.quick), []
    if slow and not options.only:
        print(f"  left out, for want of a quick way: {', '.join(slow)}", flush=True)
    for part in [] if options.plan else ahead:
        print(f"\n== {part.name}", flush=True)
        start, begun_with = (
            time.perf_counter(),
            stamp(part, words[part.name]),
        )  # the code may change meanwhile
        if str(DEMO) in words[part.name] and not (DEMO / "metrics.json").exists():
            subprocess.run(
                [sys.executable, "-m", "bertlab.cli.main", "demo", "--output", str(DEMO)],
                check=True,
            )
        code = subprocess.run(
            words[part.name], env=environment(options.threads) if options.threads else None
        )
        if code.returncode:
            failed.append(part.name)
            continue
        done[part.name] = begun_with
        with atomic_write(book) as temporary:
            temporary.write_text(json.dumps(done, indent=1), encoding="utf-8")
        print(f"== {part.name} took {(time.perf_counter() - start) / 60:.1f} minutes", flush=True)
    print()
    say(judgements([part for part in parts if part.name in done], options.folder))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
