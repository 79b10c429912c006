"The pages of the course are on its map and linked with each other, and their checks tell right from wrong."

import ast
import json
import re
import sys
from inspect import signature

import pytest
import spine
import sync
import torch
from conftest import ROOT
from test_notebooks import solutions
from wrong_answers import WRONG_ANSWERS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COURSE = ROOT / "nbs/course"
sys.path.append(str(ROOT / "benchmarks"))  # two pages import the race
LESSONS = sorted(COURSE.glob("[0-9][0-9]_*.ipynb"))
LINK = r"\[(?P<text>[^\]]+)\]\((?P<file>[\w./]+\.ipynb)\)"


def cells_of(path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def prose_of(path) -> list[str]:
    return [sync.source_of(cell) for cell in cells_of(path) if cell["cell_type"] == "markdown"]


def title_of(path) -> str:
    return re.match(r"# (.+)", prose_of(path)[0])[1]


def entries() -> list[dict]:
    return tomllib.loads((COURSE / "spine.toml").read_text(encoding="utf-8"))["page"]


def test_the_list_names_every_page_in_an_order_that_respects_needs():
    listed = entries()
    names = [entry["name"] for entry in listed]
    numbered = [entry for entry in listed if not entry.get("aside")]
    expected = {
        f"{n:02d}_{entry['name']}": f"{n}. {entry['title']}" for n, entry in enumerate(numbered, 1)
    }
    expected |= {entry["name"]: entry["title"] for entry in listed if entry.get("aside")}
    pages = [path for path in COURSE.glob("*.ipynb") if path.stem != "index"]
    assert {path.stem: title_of(path) for path in pages} == expected
    for index, entry in enumerate(listed):
        assert set(entry.get("needs", ())) <= set(names[:index]), entry["name"]


def test_the_next_links_lead_through_all_numbered_pages():
    for path, following in zip(LESSONS, LESSONS[1:]):
        prose = prose_of(path)
        for text in (prose[0], prose[-1]):
            link = re.search(rf"\*\*Next\*\*: {LINK}", text)
            assert (link["file"], link["text"]) == (following.name, title_of(following)), path.name
        assert f"**Previous**: [{title_of(path)}]({path.name})" in prose_of(following)[-1]
        assert "**Before**" in prose[0]


def numbered_links(text: str) -> list[str]:
    return [name for name in re.findall(r"[(/ ](\d\d_\w+\.ipynb)", text)]


def test_map_sidebar_and_readme_have_the_pages_in_order():
    names = [path.name for path in LESSONS]
    course_map = next(text for text in prose_of(COURSE / "index.ipynb") if "course-map" in text)
    rows = re.findall(rf"^\d+\. {LINK}", course_map, re.MULTILINE)
    assert [file for _, file in rows] == names
    assert [f"{n}. {text}" for n, (text, _) in enumerate(rows, 1)] == list(map(title_of, LESSONS))
    asides = re.findall(rf"^ *- {LINK}", course_map, re.MULTILINE)
    assert {file for _, file in asides} == {
        f"{e['name']}.ipynb" for e in entries() if e.get("aside")
    }
    section = sync.sidebar(ROOT).partition("title: Course")[2].partition("- id: how")[0]
    assert numbered_links(section.partition("course/checks")[0]) == names
    assert (
        numbered_links(
            (ROOT / "README.md").read_text(encoding="utf-8").partition("The pages of the course")[2]
        )
        == names
    )


def test_a_page_that_changes_its_place_is_renamed_with_its_links(tmp_path):
    course, library = tmp_path / "nbs/course", tmp_path / "nbs/optim"
    course.mkdir(parents=True)
    library.mkdir()
    (course / "01_a.ipynb").write_text("[b](02_b.ipynb)")
    (course / "02_b.ipynb").write_text("[a](../course/01_a.ipynb) [other](../optim/01_a.ipynb)")
    (library / "01_a.ipynb").write_text("[here](01_a.ipynb) [there](../course/01_a.ipynb)")
    page = lambda name, number: spine.Page(name, name, "", number)
    spine.renumber(tmp_path, [page("b", 1), page("a", 2)])
    assert (course / "02_a.ipynb").read_text() == "[b](01_b.ipynb)"
    assert (
        course / "01_b.ipynb"
    ).read_text() == "[a](../course/02_a.ipynb) [other](../optim/01_a.ipynb)"
    assert (
        library / "01_a.ipynb"
    ).read_text() == "[here](01_a.ipynb) [there](../course/02_a.ipynb)"
    with pytest.raises(SystemExit, match="differ in a"):
        spine.renumber(tmp_path, [page("b", 1)])


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_long_lesson_says_where_to_stop(path):
    text = "\n".join(prose_of(path))
    assert len(text.split()) < 4000 or text.count("> **You can stop here.**") == 1


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_links_glossary_and_notation(path):
    first = prose_of(path)[0]
    assert "(glossary.ipynb)" in first and "(notation.ipynb)" in first


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
    path = next(path for path in COURSE.glob("*.ipynb") if spine.name_of(path.stem) == page)
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


def key_of(path) -> str:
    "The name of a page in the record of what is solved, which outlives its number."
    return f"course/{spine.name_of(path.stem)}"


def checks_of(path) -> list[str]:
    code = "\n".join(sync.source_of(cell) for cell in cells_of(path) if cell["cell_type"] == "code")
    return re.findall(r"^def check_(\w+)", code, re.MULTILINE)


@pytest.mark.parametrize("path", sorted(COURSE.glob("*.ipynb")), ids=key_of)
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
    expected = {spine.name_of(path.stem): len(checks_of(path)) for path in COURSE.glob("*.ipynb")}
    assert {name: count for name, (_, count) in counts.items()} == {
        n: c for n, c in expected.items() if c
    }
