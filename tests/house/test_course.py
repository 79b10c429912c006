"""The course's pages are on its map, are linked with each other, and their checks tell right from wrong."""

import ast
import json
import re
import sys
from inspect import signature

import numpy as np
import pytest
import sync
import torch
from conftest import ROOT
from test_notebooks import solutions
from wrong_answers import MORE_WRONG

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
def test_a_lesson_says_at_both_ends_what_comes_before_and_after(path):
    prose = prose_of(path)
    for end in (prose[0], prose[-1]):
        assert "**Before**" in end and re.search(r"\*\*Next\*\*: \[[^\]]+\]\([^)]+\.ipynb\)", end)
    assert "(glossary.ipynb)" in prose[0] and "(notation.ipynb)" in prose[0]


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_every_question_of_a_lesson_has_a_folded_answer(path):
    text = "\n".join(prose_of(path))
    exercises, recall = text.partition("## Exercises")[2].partition("## Recap")[::2]
    asked = len(re.findall(r"^\d+\. \*(?:Predict|Implement|Investigate)", exercises, re.MULTILINE))
    assert asked >= 3 and exercises.count("<details>") == asked
    questions, answers = recall.partition("Recall:")[2].split("<details>")[:2]
    count = lambda part: len(re.findall(r"^\d+\. ", part, re.MULTILINE))
    assert count(questions) == count(answers) >= 3


def is_import(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def defines(node: ast.stmt) -> bool:
    "Functions, and constants in capitals."
    named = (
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]).strip("()").replace(", ", "").isupper()
    )
    return isinstance(node, ast.FunctionDef) or named


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
        wanted = any(name in source for name in needed)
        body = [
            node for node in ast.parse(source).body if is_import(node) or wanted and defines(node)
        ]
        exec(compile(ast.Module(body, []), str(path), "exec"), space)
    return space, "\n".join(code for text in prose_of(path) for code in solutions(text))


MASK_AFTER = """def masked_weights(q, k, real):
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1)
    return weights * real[:, None, :]"""
MASK_QUERIES = """def masked_weights(q, k, real):
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1)
    return weights * real[:, :, None]"""
HEARS_ITSELF = """def find_number(names, numbers):
    keys = F.one_hot(names, len(NAMES)).float()
    weights = (100 * keys @ keys[numbers == HIDDEN][0]).softmax(-1)
    return (weights @ numbers.float()).round()"""
WHISPERS = """def find_number(names, numbers):
    keys = 0.1 * F.one_hot(names, len(NAMES)).float()
    values = F.one_hot(numbers, NUMBERS + 1).float()
    query = F.one_hot(names[numbers == HIDDEN][0], len(NAMES)).float()
    return ((keys @ query).softmax(-1) @ values)[:NUMBERS].argmax()"""
ONE_CALL = """def gradients(forget):
    a, b = (torch.zeros((), requires_grad=True) for _ in range(2))
    (a * words_N + b - chars_N).square().mean().backward()
    return a.grad.item()"""
NEVER_FORGETS = """def gradients(forget):
    a, b = (torch.zeros((), requires_grad=True) for _ in range(2))
    for _ in range(2):
        (a * words_N + b - chars_N).square().mean().backward()
    return a.grad.item()"""
FREQUENT = """def likeliest_pair(words):
    pairs = Counter()
    for pieces, times in words.items():
        for pair in zip(pieces, pieces[1:]): pairs[pair] += times
    return min(pairs, key=lambda pair: (-pairs[pair], pair))"""
ONE_EACH = """def likeliest_pair(words):
    parts = Counter(piece for pieces in words for piece in pieces)
    pairs = Counter(pair for pieces in words for pair in zip(pieces, pieces[1:]))
    return min(pairs, key=lambda pair: (-pairs[pair] / (parts[pair[0]] * parts[pair[1]]), pair))"""
THE_FIRST = """def likeliest_pair(words):
    parts, pairs = Counter(), Counter()
    for pieces, times in words.items():
        for piece in pieces: parts[piece] += times
        for pair in zip(pieces, pieces[1:]): pairs[pair] += times
    return max(pairs, key=lambda pair: pairs[pair] / (parts[pair[0]] * parts[pair[1]]))"""
BY_LETTERS = """def price(nats, pieces):
    return sum(nats) / math.log(2) / len("".join(pieces))"""
MEAN_OF_RATES = """def price(nats, pieces):
    return np.mean([cost / math.log(2) / len(piece.encode()) for cost, piece in zip(nats, pieces)])"""
PIECES = "02_from_letters_to_pieces"
CARDS = ("NAMES, NUMBERS, CARDS", "def find_number")


WRONG = [
    (
        "01_inside_the_encoder",
        "masked_weights",
        ("def attend(", "def masked_weights"),
        MASK_AFTER,
        "before the softmax",
    ),
    (
        "01_inside_the_encoder",
        "masked_weights",
        ("def attend(", "def masked_weights"),
        MASK_QUERIES,
        "queries",
    ),
    ("01_inside_the_encoder", "find_number", CARDS, HEARS_ITSELF, "hears itself"),
    ("torch_refresher", "gradients", ("def gradients",), ONE_CALL, "add up"),
    ("torch_refresher", "gradients", ("def gradients",), NEVER_FORGETS, "must be gone"),
    ("01_inside_the_encoder", "find_number", CARDS, WHISPERS, "loud"),
    (PIECES, "likeliest_pair", ("def likeliest_pair",), FREQUENT, "divide by its parts"),
    (PIECES, "likeliest_pair", ("def likeliest_pair",), ONE_EACH, "as often as it occurs"),
    (PIECES, "likeliest_pair", ("def likeliest_pair",), THE_FIRST, "the pair that sorts first"),
    (PIECES, "price", ("def price",), BY_LETTERS, "two bytes each"),
    (PIECES, "price", ("def price",), MEAN_OF_RATES, "add up first"),
    *MORE_WRONG,
]


@pytest.mark.parametrize("page, exercise, needed, wrong, hint", WRONG)
def test_a_check_knows_the_right_answer_and_names_the_mistake_of_a_wrong_one(
    page, exercise, needed, wrong, hint
):
    space, answers = load(page, *needed)
    words_N, chars_N = (
        torch.tensor([0.2, 0.5, 0.9]),
        torch.tensor([1.5, 3.0, 6.0]),
    )  # what the refresher measures
    space |= {"words_N": words_N, "chars_N": chars_N, "by_hand": (-2 * chars_N * words_N).mean()}
    check = space[f"check_{exercise}"]
    said = lambda: check(
        *[space[exercise]] * len(signature(check).parameters)
    )  # some find the answer by its name
    assert said() == "not attempted"
    exec(answers, space)
    assert said() == "right"
    exec(wrong, space)
    assert hint in said()


SINGLE = [
    (PIECES, "price", "return float(np.float32(sum(nats) / math.log(2) / len(''.join(pieces).encode())))"),
    ("walkthroughs/07_writing_by_unmasking", "broken_share", "return np.float32(np.abs(joint - np.outer(joint.sum(1), joint.sum(0))).sum() / 2)"),
]  # fmt: skip


@pytest.mark.parametrize("page, exercise, body", SINGLE)
def test_a_right_answer_of_single_precision_is_right(page, exercise, body):
    space, _ = load(page, f"def {exercise}")
    check = space[f"check_{exercise}"]
    arguments = ", ".join(signature(space[exercise]).parameters)
    exec(f"def {exercise}({arguments}):\n    {body}", space)
    assert check(space[exercise]) == "right"


CHECKED = [*sorted(COURSE.glob("*.ipynb")), *sorted((ROOT / "nbs/walkthroughs").glob("*.ipynb"))]


def key_of(path) -> str:
    "The name of a page in the record of what is solved."
    return path.relative_to(ROOT / "nbs").with_suffix("").as_posix()


def checks_of(path) -> list[str]:
    code = "\n".join(sync.source_of(cell) for cell in cells_of(path) if cell["cell_type"] == "code")
    return re.findall(r"^def check_(\w+)", code, re.MULTILINE)


@pytest.mark.parametrize("path", CHECKED, ids=key_of)
def test_every_check_is_remembered_under_the_name_of_its_page(path):
    code = "\n".join(sync.source_of(cell) for cell in cells_of(path) if cell["cell_type"] == "code")
    recorded = re.findall(r'^@recorded\("([^"]+)"\)\ndef check_(\w+)', code, re.MULTILINE)
    assert recorded == [(key_of(path), name) for name in checks_of(path)]


def test_the_map_knows_every_page_and_how_many_checks_it_has():
    source = next(
        sync.source_of(cell)
        for cell in cells_of(COURSE / "index.ipynb")
        if "CHECKS = {" in sync.source_of(cell)
    )
    known = next(ast.literal_eval(node.value) for node in ast.parse(source).body
                 if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CHECKS")  # fmt: skip
    for page, count in known.values():
        path = ROOT / "nbs" / f"{page}.ipynb"
        assert count == (len(PUZZLES) if page == "course/puzzles" else len(checks_of(path))), page
    assert {key_of(path) for path in COURSE.glob("*.ipynb") if checks_of(path)} <= {
        page for page, _ in known.values()
    }


def test_the_table_of_the_final_project_says_which_seed_the_clock_ended():
    result = json.loads((ROOT / "benchmarks/results/final_project.json").read_text())
    source = next(
        sync.source_of(cell)
        for cell in cells_of(COURSE / "final_project.ipynb")
        if "def reference_table" in sync.source_of(cell)
    )
    body = [
        node
        for node in ast.parse(source).body
        if getattr(node, "name", "") in ("verdict_of", "reference_table")
    ]
    exec(
        compile(ast.Module(body, []), "final_project", "exec"),
        space := {"np": np, "claim": lambda *_: None},
    )
    for found in result["recipes"].values():
        for one in found["seeds"]:
            one["steps"] = (
                4321
                if found["recipe"]["trainer"]["max_steps"] > 4321 and one["seed"] == 1
                else one["planned_steps"]
            )
    table = space["reference_table"](result)
    assert (
        "The clock ended seed 1 of *record* after 4,321 steps" in table
        and table.count("The clock ended") == 1
    )
    planned = result["recipes"]["record"]["recipe"]["trainer"]["max_steps"]
    assert f"| {planned:,} |" in table and "4,321 |" not in table


def test_every_check_is_tried_with_two_wrong_answers():
    tried = [(page if "/" in page else f"course/{page}", exercise) for page, exercise, *_ in WRONG]
    for path in sorted([*COURSE.glob("*.ipynb"), *(ROOT / "nbs/walkthroughs").glob("*.ipynb")]):
        for check in checks_of(path):
            if (
                check == "project"
            ):  # it is the judge of the final project, which the tests of the race try
                continue
            assert tried.count((key_of(path), check.removeprefix("check_"))) >= 2, (
                path.stem,
                check,
            )
