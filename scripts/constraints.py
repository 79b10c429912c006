"""Write constraints.txt: the versions that a fresh install gets today, for each supported Python.

    python scripts/constraints.py python3.11 python3.10 python3.12 python3.13
    python scripts/constraints.py --keep python3.11 ...      what stands there stays; only what is missing comes in

Each interpreter resolves the runtime dependencies and the `dev` extra without installing them.
The first one leads: the others take its versions where they can, so that few lines need a marker.
torch is pinned by hand and resolved without its CUDA packages, which no constraint should force
on anybody.
"""

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
TORCH_NEEDS = [
    "filelock",
    "typing-extensions",
    "setuptools",
    "sympy",
    "networkx",
    "jinja2",
    "fsspec",
]
HEADER = """\
# The versions that were tested together, for Python 3.10 to 3.13. Written by scripts/constraints.py.
# `make demo` and `make test` install under it; a user's own project need not.
# torch is the release whose CPU build was tested; its CUDA packages follow from it and are not listed.
"""


def stand_in_for_torch(folder: Path) -> Path:
    "A wheel that has torch's name and needs, so that resolving downloads no gigabytes."
    wheel = folder / f"torch-{TORCH}+standin-py3-none-any.whl"
    info = f"torch-{TORCH}+standin.dist-info"
    needs = "".join(f"Requires-Dist: {name}\n" for name in TORCH_NEEDS)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: torch\nVersion: {TORCH}+standin\n{needs}",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def runs_on(metadata: dict, python: str) -> bool:
    "Whether a release takes the first Python of a minor version, which long-lived systems keep."
    return SpecifierSet(metadata.get("requires_python") or "").contains(python)


def minor_version(python: str) -> str:
    "3.11 of an interpreter."
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run(
        [python, "-c", ask], check=True, capture_output=True, text=True
    ).stdout.strip()


def resolve(
    python: str,  # an interpreter's name or path
    folder: Path,  # where its scratch environment goes
    lead: dict[str, str],  # versions to take where this Python can
) -> tuple[str, dict[str, str]]:  # its minor version, and {name: version}
    "What pip would install for one interpreter."
    folder.mkdir()
    version = minor_version(python)
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    pip = [str(folder / "venv/bin/python"), "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", "--upgrade", "pip"], check=True)
    report, wishes, bounds = folder / "report.json", folder / "lead.txt", folder / "bounds.txt"
    bounds.touch()
    command = [
        *pip,
        "install",
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--report",
        str(report),
    ]
    command += [f"{ROOT}[dev]", str(stand_in_for_torch(folder))]
    wishes.write_text(
        "".join(f"{name}=={number}\n" for name, number in lead.items() if name != "torch")
    )
    command += ["--constraint", str(bounds)]
    while True:
        if (
            not lead
            or subprocess.run(
                [*command, "--constraint", str(wishes)], capture_output=True
            ).returncode
        ):
            subprocess.run(command, check=True)
        items = json.loads(report.read_text())["install"]
        late = [item["metadata"] for item in items if not runs_on(item["metadata"], f"{version}.0")]
        if not late:
            break
        with open(bounds, "a") as file:
            file.writelines(f"{release['name']}<{release['version']}\n" for release in late)
    found = {}
    for item in items:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        found[name] = item["metadata"]["version"]
    del found["bertlab"]
    found["torch"] = TORCH
    print(f"Python {version}: {len(found)} packages")
    return version, found


def marker(same: list[str], pythons: list[str]) -> str:
    "The environment marker of a run of neighbouring Pythons, given all of them in order."
    if same == pythons[: len(same)]:
        return f"python_version <= '{same[-1]}'"
    if same == pythons[-len(same) :]:
        return f"python_version >= '{same[0]}'"
    return " or ".join(f"python_version == '{python}'" for python in same)


def merge(resolved: dict[str, dict[str, str]]) -> list[str]:
    "One line a package, or one for each run of Pythons that agree on a version."
    pythons = sorted(resolved, key=lambda text: tuple(map(int, text.split("."))))
    lines = []
    for name in sorted(set().union(*resolved.values())):
        versions = {python: resolved[python].get(name) for python in pythons}
        distinct = dict.fromkeys(filter(None, versions.values()))
        for version in distinct:
            same = [python for python in pythons if versions[python] == version]
            lines.append(
                f"{name}=={version}" + (f" ; {marker(same, pythons)}" if len(distinct) > 1 else "")
            )
    return lines


def standing(python: str) -> dict[str, str]:
    "The versions in constraints.txt for one minor version of Python."
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and line[0] != "#"
    ]
    found = [Requirement(line) for line in lines]
    return {one.name: next(iter(one.specifier)).version for one in found
            if one.marker is None or one.marker.evaluate({"python_version": python})}  # fmt: skip


def main(words: list[str]) -> None:
    keep, interpreters = "--keep" in words, [word for word in words if word != "--keep"]
    if not interpreters:
        sys.exit(
            "usage: python scripts/constraints.py [--keep] PYTHON...   (one interpreter for each version)"
        )
    resolved: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as name:
        for number, python in enumerate(interpreters):
            lead = standing(minor_version(python)) if keep else next(iter(resolved.values()), {})
            version, found = resolve(python, Path(name) / str(number), lead)
            resolved[version] = found
    new = ROOT / "constraints.txt.tmp"
    new.write_text(HEADER + "\n".join(merge(resolved)) + "\n")
    new.replace(ROOT / "constraints.txt")


if __name__ == "__main__":
    main(sys.argv[1:])
