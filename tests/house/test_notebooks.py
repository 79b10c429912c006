"""Every notebook runs from top to bottom in a process of its own, and every folded solution is right.

What trains for long is run shorter: a line that ends in `# quick: steps=20` takes that value here (`SIZES = (2, 4)`, with
spaces, for a whole statement), one that ends in `# quick: pass` (a claim about the long run) is left out. `make test-all`
runs these notebooks at full length too.
"""

import ast
import json
import multiprocessing
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import sync
from conftest import ROOT
from forks import forked

TIMEOUT = 600  # seconds a notebook; most take a few
LONGEST = (
    1800  # at full length, of which the final project takes ten minutes of two cores that it shares
)
NOTEBOOKS = sync.notebooks(ROOT)


def solutions(text: str) -> list[str]:
    "The Python in the folded parts of a Markdown cell."
    folded = re.findall(r"<details>.*?</details>", text, re.DOTALL)
    return [code for part in folded for code in re.findall(r"```python\n(.*?)```", part, re.DOTALL)]


def functions(source: str) -> dict[str, int]:
    "The functions that a cell defines, each with the number of arguments that it cannot do without."
    try:
        found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    except SyntaxError:  # a cell with magics
        return {}
    return {node.name: len(node.args.args) - len(node.args.defaults) for node in found}


def with_solutions(notebook: dict) -> tuple[dict, set[str]]:
    """The notebook with each folded solution run where it stands, and the checks that stay unsolved.

    An exercise's check is a function `check_NAME` that answers "not attempted" or "right"; the solution
    defines NAME, and the check finds it by its name or gets it as its argument.
    """
    cells, checks = [], {}
    for cell in notebook["cells"]:
        cells.append(cell)
        source = sync.source_of(cell)
        if cell["cell_type"] == "code" and "not attempted" in source:
            checks |= {
                name: n for name, n in functions(source).items() if name.startswith("check_")
            }
        if cell["cell_type"] != "markdown":
            continue
        for solution in solutions(source):
            asserts = []
            for name in functions(solution).keys() & {
                check.removeprefix("check_") for check in checks
            }:
                call = f"check_{name}({name if checks.pop(f'check_{name}') else ''})"
                asserts.append(f"assert {call} == 'right', {call}")
            code = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
            cells.append(
                {**code, "id": f"solution{len(cells)}", "source": "\n".join([solution, *asserts])}
            )
    return {**notebook, "cells": cells}, set(checks)


QUICK = re.compile(r"^(?P<line>.*\S)\s+# quick: (?P<change>.+?)\s*$")


def quick_line(line: str) -> str:
    "A line with the change that its comment asks for."
    found = QUICK.match(line)
    if found is None:
        return line
    if found["change"] == "pass":
        return line[: len(line) - len(line.lstrip())] + "pass"
    name, _, value = found["change"].partition("=")
    if name.endswith(" "):  # a statement of its own, whatever its value is made of
        changed, count = re.subn(rf"^(\s*{name.strip()} =) .*$", rf"\g<1>{value}", found["line"])
        assert count == 1, f"`{name}` is not what {line!r} sets"
        return changed
    changed, count = re.subn(
        rf"\b{name}(\s*)=(\s*)[^\s,()]+", rf"{name}\g<1>=\g<2>{value}", found["line"]
    )
    assert count == 1, f"`{name}` is not set once in {line!r}"
    return changed


def shortened(notebook: dict) -> dict:
    "The notebook with what its comments ask of a quick run."
    cells = []
    for cell in notebook["cells"]:
        source = sync.source_of(cell)
        if cell["cell_type"] == "code" and "# quick:" in source:
            cell = {**cell, "source": "\n".join(map(quick_line, source.split("\n")))}
        cells.append(cell)
    return {**notebook, "cells": cells}


# A process of its own for each, forked from one that has done the imports: they take longer than most notebooks.
def run_here(path: str, flags: str, output: str) -> None:
    "Run a notebook with nbdev's test runner in this process, what it prints going to a file."
    os.setsid()  # so that a notebook that hangs is ended with all that it started
    os.chdir(ROOT)
    sys.path.append(str(ROOT / "benchmarks"))  # two pages of the course race
    multiprocessing.set_start_method(
        None, force=True
    )  # the usual one for what the notebook itself starts
    with open(output, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from execnb import shell
    from nbdev.test import nbdev_test

    # A result is formatted once, not for the screen and again for the notebook: figures take long to draw.
    shell._CustDisplayHook.compute_format_data = lambda hook, result: ({}, {})
    nbdev_test.__wrapped__(path, flags, n_workers=0)


def run(path: Path, notebook: dict, flags: str = "", timeout: float = TIMEOUT) -> tuple[int, str]:
    "Run a notebook from a folder where it may leave files; its exit status and what it printed."
    path.write_text(json.dumps(notebook), encoding="utf-8")
    output = path.with_suffix(".log")
    process = forked(run_here, (str(path), flags, str(output)))
    process.start()
    process.join(timeout)
    printed = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        pytest.fail(f"still running after {timeout} s\n{printed[-6000:]}")
    return process.exitcode, printed


def check_notebook(
    path: Path, tmp_path: Path, change=lambda notebook: notebook, timeout: float = TIMEOUT
) -> None:
    notebook, unsolved = with_solutions(json.loads(path.read_text(encoding="utf-8")))
    assert unsolved == set(), "no folded solution defines the function that these checks are for"
    notebook = change(notebook)
    status, printed = run(tmp_path / path.name, notebook, timeout=timeout)
    assert status == 0, printed[-8000:]
    assert "Success." in printed, "nbdev found nothing to run"


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_the_notebook_runs_and_its_solutions_are_right(path, tmp_path):
    check_notebook(path, tmp_path, shortened)


LONG = [path for path in NOTEBOOKS if "# quick:" in path.read_text(encoding="utf-8")]


@pytest.mark.slow
@pytest.mark.timeout(LONGEST + 60)
@pytest.mark.parametrize("path", LONG, ids=name_of)
def test_a_notebook_that_trains_holds_at_full_length(path, tmp_path):
    check_notebook(path, tmp_path, timeout=LONGEST)


@pytest.mark.parametrize(
    "line, quick",
    [
        ("steps = 300  # quick: steps=20", "steps = 20"),
        ("fit(max_steps=500, seed=0)  # quick: max_steps=9", "fit(max_steps=9, seed=0)"),
        ("    assert loss < line  # quick: pass", "    pass"),
        ("SIZES = (2, 4, 8)  # quick: SIZES = (2, 4)", "SIZES = (2, 4)"),
        ("steps = 300  # a quick look", "steps = 300  # a quick look"),
    ],
)
def test_a_quick_run_changes_what_the_comment_names(line, quick):
    assert quick_line(line) == quick


def test_a_quick_run_that_changes_nothing_is_found():
    with pytest.raises(AssertionError, match="num_steps"):
        quick_line("steps = 300  # quick: num_steps=20")


EXERCISE = """def double(x):
    raise NotImplementedError

def check_double():
    try: got = double(2)
    except NotImplementedError: return "not attempted"
    return "right" if got == 4 else "twice, not squared"

check_double()"""


def small(*cells: tuple[str, str]) -> dict:
    made = []
    for number, (kind, source) in enumerate(cells):
        cell = {"cell_type": kind, "source": source, "metadata": {}, "id": str(number)}
        made.append({**cell, "outputs": [], "execution_count": None} if kind == "code" else cell)
    kernel = {"display_name": "python3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


ASKED = EXERCISE.replace("def check_double():", "def check_double(double):").replace(
    "\ncheck_double()", "\ncheck_double(double)"
)


@pytest.mark.parametrize(
    "exercise, answer, passes, flags",
    [
        (EXERCISE, "2 * x", True, ""),
        (ASKED, "2 * x", True, ""),
        (EXERCISE, "x ** 3", False, ""),
        (ASKED, "x ** 3", False, ""),
        (EXERCISE, "2 * x", False, "slow"),
    ],
)
def test_a_wrong_solution_or_a_failing_cell_is_found(exercise, answer, passes, flags, tmp_path):
    folded = f"<details><summary>Solution</summary>\n\n```python\ndef double(x):\n    return {answer}\n```\n</details>"
    failing = [
        ("code", "#| eval: false\n1 / 0"),
        ("code", "#| slow\n1 / 0"),
    ]  # neither runs without its flag
    notebook, unsolved = with_solutions(small(("code", exercise), ("markdown", folded), *failing))
    assert unsolved == set()
    status, printed = run(tmp_path / "small.ipynb", notebook, flags)
    assert (status == 0) == passes, printed


def test_a_check_without_a_solution_is_found():
    _, unsolved = with_solutions(
        small(("code", EXERCISE), ("markdown", "<details>think</details>"))
    )
    assert unsolved == {"check_double"}
