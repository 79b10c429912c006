"""Every notebook runs from top to bottom in a process of its own, and every folded solution is right.

What trains for long is run shorter, with the values that the metadata of cells name, and without the hidden cells that
are about the full run (scripts/hidden.py). `make test-all` runs these notebooks at full length too.
"""

import ast
import ctypes
import json
import multiprocessing
import os
import re
import shlex
import signal
import sys
from multiprocessing import forkserver
from pathlib import Path

import hidden
import pytest
import sync
from forks import forked

ROOT = Path(__file__).parents[2]  # a worker imports this file alone
TIMEOUT = 600  # seconds a notebook; most take a few
LONGEST = (
    1800  # at full length, of which the final project takes ten minutes of two cores that it shares
)
NOTEBOOKS = sync.notebooks(ROOT)
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent ends


def solutions(text: str) -> list[str]:
    "The Python in the folded parts of a Markdown cell."
    folded = re.findall(r"<details>.*?</details>", text, re.DOTALL)
    return [code for part in folded for code in re.findall(r"```python\n(.*?)```", part, re.DOTALL)]


def functions(source: str) -> dict[str, int]:
    "Return the functions that a cell defines, each with its number of required arguments."
    try:
        nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    except SyntaxError:  # a cell with magics
        return {}
    return {node.name: len(node.args.args) - len(node.args.defaults) for node in nodes}


def with_solutions(notebook: dict) -> tuple[dict, set[str]]:
    """Return the notebook with its folded solutions as cells, and the checks without a solution.

    An exercise's check is a function `check_NAME` that returns "not attempted" or "right"; the solution
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


def run_command(shell, command: str) -> None:
    "Run a cell's `!bertlab ...` in this process, because a program of its own imports for seconds."
    from bertlab.cli.main import main

    program, *words = shlex.split(command.replace("\\\n", " "))
    assert program == "bertlab", command
    shell.user_ns["_exit_code"] = main(words)


# A process of its own for each, forked from one that has done the imports: they take longer than most notebooks.
def run_here(path: str, flags: str, output: str) -> None:
    "Run a notebook with nbdev's test runner in this process, what it prints going to a file."
    os.setsid()  # so that a notebook that hangs is ended with all that it started
    if sys.platform == "linux":  # and so that none outlives tests that were killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(ROOT)
    sys.path.append(str(ROOT / "benchmarks"))  # two pages of the course race
    # What the notebook itself starts is started in the usual way, or by the server that this process comes from.
    multiprocessing.set_start_method(None, force=True)
    if forkserver._forkserver._forkserver_address and sys.version_info < (
        3,
        14,
    ):  # then only the first may ask it
        forkserver._forkserver.ensure_running = lambda: None
    with open(output, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from execnb import shell
    from IPython.core import pylabtools
    from nbdev.test import nbdev_test

    # A result is formatted once, not for the screen and again for the notebook, and a figure is drawn once, without
    # its margins and pixels: nobody looks at them.
    def draw(figure, *_, **__):
        figure.set_layout_engine("none")
        figure.draw_without_rendering()

    shell.CaptureShell.system = run_command
    shell._CustDisplayHook.compute_format_data = lambda hook, result: ({}, {})
    pylabtools.print_figure = draw
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
def test_a_notebook_runs_and_its_solutions_are_right(path, tmp_path):
    check_notebook(path, tmp_path, hidden.shortened)


LONG = [path for path in NOTEBOOKS if '"quick": [' in path.read_text(encoding="utf-8")]


@pytest.mark.slow
@pytest.mark.timeout(LONGEST + 60)
@pytest.mark.parametrize("path", LONG, ids=name_of)
def test_a_notebook_runs_at_full_length(path, tmp_path):
    check_notebook(path, tmp_path, timeout=LONGEST)


SOURCE = """from bertlab.course.progress import claim, recorded
SIZES = (2, 4, 8)  # of a model  # quick: SIZES = (2, 4)
loss = fit(max_steps=500, seed=0)  # quick: max_steps=9
for size in SIZES:
    claim(size < 9)  # quick: pass
claim(loss < 3)
loss"""


def test_comments_and_claims_are_hidden_and_run_shorter():
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "execution_count": None}
    cells = hidden.hide([{**cell, "source": SOURCE}])
    once = json.dumps(cells)
    assert json.dumps(hidden.hide(cells)) == once
    page, *claims = [sync.source_of(cell) for cell in cells]
    assert page == (
        "from bertlab.course.progress import recorded\nSIZES = (2, 4, 8)  # of a model\n"
        "loss = fit(max_steps=500, seed=0)\nloss"
    )
    assert [text.partition("import claim\n\n")[2] for text in claims] == [
        "claim(loss < 3)", "for size in SIZES:\n    claim(size < 9)"]  # fmt: skip
    assert all(text.startswith("#| hide\n") for text in claims)
    quick = [sync.source_of(cell) for cell in hidden.shortened({"cells": cells})["cells"]]
    assert quick[0].splitlines()[1:3] == ["SIZES = (2, 4)", "loss = fit(max_steps=9, seed=0)"]
    assert quick[1:] == claims[:1]


EXERCISE = """def double(x):
    raise NotImplementedError

def check_double():
    try: got = double(2)
    except NotImplementedError: return "not attempted"
    return "right" if got == 4 else "twice, not squared"

check_double()"""


FOLDED = "<details>\n\n```python\ndef double(x):\n    return {}\n```\n</details>"


def small_notebook(solution: str) -> dict:
    cells = [("code", EXERCISE), ("markdown", solution), ("code", "#| slow\n1 / 0")]
    code = {"outputs": [], "execution_count": None}
    cells = [
        {"cell_type": cell_type, "source": source, "metadata": {}, "id": f"cell{index}"}
        | (code if cell_type == "code" else {})
        for index, (cell_type, source) in enumerate(cells)
    ]
    kernel = {"display_name": "python3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


@pytest.mark.parametrize(
    "answer, flags, passes", [("2 * x", "", True), ("x ** 3", "", False), ("2 * x", "slow", False)]
)
def test_a_wrong_solution_or_a_failing_cell_fails(answer, flags, passes, tmp_path):
    notebook, unsolved = with_solutions(small_notebook(FOLDED.format(answer)))
    status, printed = run(tmp_path / "small.ipynb", notebook, flags)
    assert unsolved == set() and (status == 0) == passes, printed


def test_a_check_without_a_solution_is_reported():
    assert with_solutions(small_notebook("<details>think</details>"))[1] == {"check_double"}
