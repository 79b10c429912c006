"""Run the core of the suite with the lowest, or with the newest, versions that pyproject.toml allows.

    python scripts/versions.py lowest                        Python 3.10 and the lower bounds
    python scripts/versions.py newest --python python3.13    what an installation gets today
    python scripts/versions.py lowest --plan                 say what would be installed and run
    python scripts/versions.py newest -- -k packing -x       what follows -- goes to pytest

The bounds are those of the dependencies and of the extras in EXTRAS; those of the other extras are not tried.
Each has an environment of its own, .venv-lowest and .venv-newest, which is kept; --fresh makes it anew.
--cpu takes torch's build without CUDA. uv resolves and installs, because pip cannot look for the lowest.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = {"lowest": "3.10", "newest": "3.13"}
RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
EXTRAS = ("optimizers",)
# What the tests need besides. It says nothing about what bertlab needs, so each has it new.
TOOLS = ("accelerate>=1.1,<2", "hypothesis>=6.100", "ipykernel>=6.29", "packaging", "pyflakes>=3.2", "pytest>=8",
         "pytest-timeout>=2.3", "pytest-xdist>=3.6", "scipy>=1.11", "seqeval>=1.2.2", "setuptools>=77", "tensorboard>=2.15",
         "tomli; python_version < '3.11'")  # fmt: skip
CORE = ("tests/core", "tests/data", "tests/model", "tests/optim", "tests/train/test_training.py",
        "tests/train/test_modules.py", "tests/train/test_resume.py", "tests/train/test_checkpoints.py",
        "tests/finetuning/test_finetuning.py", "tests/finetuning/test_task_models.py",
        "tests/finetuning/test_predictions.py", "tests/cli/test_options.py", "tests/cli/test_commands.py",
        "tests/house/test_hostile_files.py")  # fmt: skip


def direct(project: dict) -> dict[str, Requirement]:  # name -> what pyproject.toml asks for
    "The requirements that a user's installation has, with the extras that the core is tested with."
    asked = [
        *project["dependencies"],
        *(one for extra in EXTRAS for one in project["optional-dependencies"][extra]),
    ]
    return {canonicalize_name(Requirement(one).name): Requirement(one) for one in asked}


def lower_bound(requirement: Requirement) -> Version | None:  # None: it has none
    "The version that a requirement begins with."
    found = [
        Version(one.version.removesuffix(".*"))
        for one in requirement.specifier
        if one.operator in (">=", "==", "~=")
    ]
    return max(found, default=None)


def read_lock(text: str) -> dict[str, Version]:
    "The versions in what `uv pip compile` wrote."
    pairs = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", text, re.MULTILINE)
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def compare(
    asked: dict[str, Requirement], locked: dict[str, Version]
) -> list[str]:  # lines for a person
    """Say what each direct requirement has become. Raises `SystemExit` where one is missing or does not fit.

    A bound that no release has is not wrong, but worth a line: the release above it is what was tried.
    """
    lines = []
    for name, requirement in sorted(asked.items()):
        if name not in locked:
            sys.exit(f"versions: {name} is asked for and was not resolved")
        if not requirement.specifier.contains(locked[name].public, prereleases=True):
            sys.exit(f"versions: {name} {locked[name]} does not fit {requirement.specifier}")
        low = lower_bound(requirement)
        note = (
            "" if low is None or low == Version(locked[name].public) else f"   (the bound is {low})"
        )
        lines.append(f"{name:<20} {locked[name]}{note}")
    return lines


def find_uv() -> str:
    "uv, on the path or beside this Python."
    beside = Path(sys.executable).with_name("uv")
    found = shutil.which("uv") or (str(beside) if beside.exists() else None)
    if found is None:
        sys.exit(f"versions: uv is not installed; to get it: {sys.executable} -m pip install uv")
    return found


def run(*command: str, **options) -> None:
    "Run a step; a step that fails ends everything with its exit status."
    done = subprocess.run(command, cwd=ROOT, **options)
    if done.returncode:
        sys.exit(done.returncode)


def prepare(
    which: str, python: str, cpu: bool, fresh: bool, plan: bool
) -> Path:  # the environment's Python
    "Resolve, show and install."
    uv, place = find_uv(), ROOT / f".venv-{which}"
    interpreter, lock = place / "bin" / "python", place / "versions.txt"
    backend = ["--torch-backend", "cpu"] if cpu else []
    if fresh and not plan:
        shutil.rmtree(place, ignore_errors=True)
    if not interpreter.exists():
        run(uv, "venv", "--quiet", "--python", python, str(place))
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    run(uv, "pip", "compile", "--upgrade", "--quiet", "--no-header", "--no-annotate", "--resolution", RESOLUTIONS[which],
        "--python", str(interpreter), *backend, *extras, "--output-file", str(lock), "pyproject.toml",
        stdout=subprocess.DEVNULL)  # fmt: skip
    asked = direct(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"])
    print("\n".join(compare(asked, read_lock(lock.read_text(encoding="utf-8")))), flush=True)
    if not plan:
        run(uv, "pip", "install", "--quiet", "--python", str(interpreter), *backend, "--constraint", str(lock),
            "--requirement", str(lock), *TOOLS)  # fmt: skip
    return interpreter


def main(words: list[str]) -> None:
    end = words.index("--") if "--" in words else len(words)
    own, theirs = words[:end], words[end + 1 :]
    parser = argparse.ArgumentParser(prog="versions.py", description=__doc__.partition("\n")[0])
    parser.add_argument("which", choices=sorted(PYTHONS))
    parser.add_argument(
        "--python", help="interpreter or version; default: 3.10 for lowest, 3.13 for newest"
    )
    parser.add_argument("--cpu", action="store_true", help="torch without CUDA")
    parser.add_argument("--fresh", action="store_true", help="make the environment anew")
    parser.add_argument(
        "--plan", action="store_true", help="resolve and say, but install and run nothing"
    )
    asked = parser.parse_args(own)
    python = prepare(
        asked.which, asked.python or PYTHONS[asked.which], asked.cpu, asked.fresh, asked.plan
    )
    command = [str(python), "-m", "pytest", "-m", "not slow", *theirs, *CORE]
    print(" ".join(["python", *command[1:]]), flush=True)
    if not asked.plan:
        run(*command, env={**os.environ, "PYTHONPATH": str(ROOT)})


if __name__ == "__main__":
    main(sys.argv[1:])
