"The pages of the course are on its map and linked with each other, and their checks tell right from wrong."

import ast
import json
import re
import sys
from inspect import signature

import pytest
import sync
import torch
from conftest import ROOT
from test_notebooks import solutions
from wrong_answers import WRONG_ANSWERS

from bertlab.course.puzzles import PUZZLES

COURSE = ROOT / "nbs/course"
sys.path.append(str(ROOT / "benchmarks"))  # two pages import the race
LESSONS = sorted(COURSE.glob("[0-9][0-9]_*.ipynb"))


def cells_of(path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def prose_of(path) -> list[str]:
    return [sync.source_of(cell) for cell in cells_of(path) if cell["cell_type"] == "markdown"]


def test_every_page_of_the_course_is_on_the_map():
    linked = set(
        re.findall(
            r"\]\((?:\.\./walkthroughs/)?([\w.]+\.ipynb)\)",
            "\n".join(prose_of(COURSE / "index.ipynb")),
        )
    )
    pages = {path.name for path in COURSE.glob("*.ipynb")} - {"index.ipynb"}
    assert pages <= linked, f"not on the map: {pages - linked}"


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_links_the_pages_before_and_after(path):
    prose = prose_of(path)
    for end in (prose[0], prose[-1]):
        assert "**Before**" in end and re.search(r"\*\*Next\*\*: \[[^\]]+\]\([^)]+\.ipynb\)", end)
    assert "(glossary.ipynb)" in prose[0] and "(notation.ipynb)" in prose[0]


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_every_question_of_a_lesson_has_a_folded_answer(path):
    text = "\n".join(prose_of(path))
    exercises, recall = text.partition("## Exercises")[2].partition("## Recap")[::2]
    exercise_count = len(
        re.findall(r"^\d+\. \*(?:Predict|Implement|Investigate)", exercises, re.MULTILINE)
    )
    assert exercise_count >= 3 and exercises.count("<details>") == exercise_count
    questions, answers = recall.partition("Recall:")[2].split("<details>")[:2]
    count = lambda part: len(re.findall(r"^\d+\. ", part, re.MULTILINE))
    assert count(questions) == count(answers) >= 3


def is_import(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def defines(node: ast.stmt) -> bool:
    "Functions, and constants in capitals."
    names = (
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]).strip("()").replace(", ", "").isupper()
    )
    return isinstance(node, ast.FunctionDef) or names


def load(page: str, *needed: str) -> tuple[dict, str]:
    "What the cells with these definitions define, and the folded solutions of the page."
    path = (ROOT / "nbs" if "/" in page else COURSE) / f"{page}.ipynb"
    space = dict.fromkeys(
        ("train_rows", "tuning", "held_out", "track")
    )  # which functions of the pages have as defaults
    for cell in cells_of(path):
        source = sync.source_of(cell)
        if cell["cell_type"] != "code" or "eval: false" in source:
            continue
        is_needed = any(name in source for name in needed)
        body = [
            node
            for node in ast.parse(source).body
            if is_import(node) or is_needed and defines(node)
        ]
        exec(compile(ast.Module(body, []), str(path), "exec"), space)
    return space, "\n".join(code for text in prose_of(path) for code in solutions(text))


@pytest.mark.parametrize("page, exercise, needed, wrong, message", WRONG_ANSWERS)
def test_a_check_accepts_the_solution_and_names_a_mistake(page, exercise, needed, wrong, message):
    space, answers = load(page, *needed)
    words_N, chars_N = torch.tensor([0.2, 0.5, 0.9]), torch.tensor([1.5, 3.0, 6.0])
    space |= {"words_N": words_N, "chars_N": chars_N, "by_hand": (-2 * chars_N * words_N).mean()}
    check = space[f"check_{exercise}"]
    # Some checks get the answer as an argument, others find it by its name.
    verdict = lambda: check(*[space[exercise]] * len(signature(check).parameters))
    assert verdict() == "not attempted"
    exec(answers, space)
    assert verdict() == "right"
    exec(wrong, space)
    assert message in verdict()


CHECKED = [*sorted(COURSE.glob("*.ipynb")), *sorted((ROOT / "nbs/walkthroughs").glob("*.ipynb"))]


def key_of(path) -> str:
    "The name of a page in the record of what is solved."
    return path.relative_to(ROOT / "nbs").with_suffix("").as_posix()


def checks_of(path) -> list[str]:
    code = "\n".join(sync.source_of(cell) for cell in cells_of(path) if cell["cell_type"] == "code")
    return re.findall(r"^def check_(\w+)", code, re.MULTILINE)


@pytest.mark.parametrize("path", CHECKED, ids=key_of)
def test_every_check_is_recorded_under_its_page(path):
    code = "\n".join(sync.source_of(cell) for cell in cells_of(path) if cell["cell_type"] == "code")
    recorded = re.findall(r'^@recorded\("([^"]+)"\)\ndef check_(\w+)', code, re.MULTILINE)
    assert recorded == [(key_of(path), name) for name in checks_of(path)]


def test_the_map_counts_the_checks_of_every_page():
    source = next(
        sync.source_of(cell)
        for cell in cells_of(COURSE / "index.ipynb")
        if "CHECKS = {" in sync.source_of(cell)
    )
    counts = next(ast.literal_eval(node.value) for node in ast.parse(source).body
                 if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CHECKS")  # fmt: skip
    for page, count in counts.values():
        path = ROOT / "nbs" / f"{page}.ipynb"
        assert count == (len(PUZZLES) if page == "course/puzzles" else len(checks_of(path))), page
    assert {key_of(path) for path in COURSE.glob("*.ipynb") if checks_of(path)} <= {
        page for page, _ in counts.values()
    }
