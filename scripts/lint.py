"""Check notebooks against the style of the project: frame, figures, clean outputs, nothing of one machine.

python scripts/lint.py [NOTEBOOK...]      all of nbs/ by default
python scripts/lint.py --names            warn about vague names and long functions in bertlab/ and scripts/
"""

import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from sync import CHAPTERS, SETUP_MARK, directives, is_setup, notebooks, source_of  # noqa: E402

MAX_NOTEBOOK_BYTES = 1_000_000
MIN_FIGURES, MIN_EXERCISES = {"library": 1, "lesson": 2}, 3
MAX_FUNCTION_LINES = 60
# Names that do not say what a variable holds.
VAGUE = set(
    "found one ones kind number said place known kept whole made given asked own others other rest some "
    "several what wanted taken began begun behind beside further more named shown left told theirs ours it "
    "them nobody somebody".split()
)
# Folders that exist on one machine only, and hosts of package registries.
MACHINE_PATH = re.compile(
    r"(?<![\w.~/])/(?:root|home|Users|work|mnt|tmp|opt|var|usr/local)/[\w.-]+|[A-Z]:\\Users"
)
REGISTRY = re.compile(
    r"\b(?:pypi|files\.pythonhosted|registry\.npmjs|deb\.debian|download\.pytorch)\.org\b"
)
NOT_HERE = (
    "Not so in this run:"  # as `bertlab.course.progress.claim` begins, which this need not import
)
ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")


def page_type(path: Path) -> str:
    "library, lesson, guide, index or page."
    if path.name == "index.ipynb" and path.parent.name in CHAPTERS:
        return "index"
    if path.parent.name == "guides":
        return "guide"
    if not re.match(r"\d\d_", path.name):
        return "page"
    return "lesson" if path.parent.name == "course" else "library"


def code_lines(cell: dict) -> list[str]:
    "The lines of a code cell without its directives and without blank ends."
    lines = [line for line in source_of(cell).splitlines() if not re.match(r"\s*#\|", line)]
    return "\n".join(lines).strip("\n").splitlines()


def visible(cell: dict) -> bool:
    return (
        cell["cell_type"] == "code"
        and not {"hide", "default_exp"} & directives(source_of(cell)).keys()
    )


def exported(cell: dict) -> bool:
    return cell["cell_type"] == "code" and bool(
        {"export", "exports", "exporti"} & directives(source_of(cell)).keys()
    )


def statements(cell: dict) -> list[ast.stmt]:
    "The statements of a code cell; none where it holds magics."
    try:
        return ast.parse("\n".join(code_lines(cell))).body
    except SyntaxError:
        return []


def imports_only(cell: dict) -> bool:
    return all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in statements(cell))


def output_text(cell: dict) -> str:
    "Everything in the outputs that is text."
    parts = []
    for output in cell.get("outputs", []):
        parts.append("".join(output.get("text", "")))
        data = output.get("data", {})
        parts += ["".join(value) for mime, value in data.items() if mime.startswith("text/")]
    return "\n".join(parts)


def is_silent(cell: dict) -> bool:
    "Whether a visible lesson cell that ran displays nothing."
    marks = directives(source_of(cell))
    ran = marks.get("eval") != "false" and not {"slow", "gpu", "tpu"} & marks.keys()
    return (
        visible(cell)
        and ran
        and not exported(cell)
        and not imports_only(cell)
        and not cell["outputs"]
    )


def shown_next(cells: list[dict]) -> bool:
    "Whether the next cell, hidden ones aside, is code that displays something: then the silent one prepares it."
    cells = [c for c in cells if c["cell_type"] != "code" or visible(c) or c["outputs"]]
    return bool(cells) and cells[0]["cell_type"] == "code" and bool(cells[0]["outputs"])


def lint_cells(cells: list[dict]) -> list[str]:
    "Return the problems of single cells, each named by its first line."
    problems = []
    explains_claims = any("def claim(" in source_of(cell) for cell in cells)
    for index, cell in enumerate(cells):
        source = source_of(cell)
        lines = code_lines(cell) if cell["cell_type"] == "code" else []
        head = f"cell {index} ({next(iter(lines or source.splitlines()), '')[:50]!r})"
        if MACHINE_PATH.search(source) or MACHINE_PATH.search(output_text(cell)):
            match = MACHINE_PATH.search(source) or MACHINE_PATH.search(output_text(cell))
            problems.append(f"{head}: {match[0]} is a path of one machine")
        if match := REGISTRY.search(source) or REGISTRY.search(output_text(cell)):
            problems.append(f"{head}: names the registry {match[0]}")
        if cell["cell_type"] == "markdown":
            continue
        if cell["cell_type"] != "code":
            continue
        if is_setup(source):
            continue
        marks = directives(source)
        if any(output["output_type"] == "error" for output in cell["outputs"]):
            problems.append(f"{head}: ends in an error; catch it and show the message")
        if cell.get("execution_count") is not None or ADDRESS.search(output_text(cell)):
            problems.append(f"{head}: is not clean; run `make sync`")
        if NOT_HERE in output_text(cell) and not explains_claims:
            problems.append(f"{head}: a claim of the page does not hold in its own outputs")
        if visible(cell) and not explains_claims and re.search(r"\bclaim\(|# quick: ", source):
            problems.append(
                f"{head}: `claim(` or `# quick:`, which only the tests need; put it where `make sync` hides it"
            )
        if is_silent(cell) and not shown_next(cells[index + 1 :]):
            problems.append(
                f"{head}: displays nothing; end it in a value or a figure, then execute the notebook"
            )
        pictures = [
            o for o in cell["outputs"] if any(key.startswith("image/") for key in o.get("data", {}))
        ]
        if pictures and "hide" not in marks and not marks.get("fig-alt"):
            problems.append(
                f'{head}: a figure without alternative text; begin with #| fig-alt: "..."'
            )
    return problems


def lint_guide(text: str) -> list[str]:
    "Check what every guide must have: begin, end, a command, what goes wrong, where to go next."
    required = {
        "**You have**": "what the reader starts with",
        "**You get**": "what the reader ends with",
        "**Takes**": "minutes",
    }
    problems = [f"no {word} ({meaning})" for word, meaning in required.items() if word not in text]
    for part in ("What goes wrong", "Next"):
        if f"\n## {part}\n" not in f"{text}\n":
            problems.append(f"no part `## {part}`")
    if not re.search(r"^```sh\n(?:.*\n)*?bertlab ", text, re.MULTILINE):
        problems.append("no command: a block of ```sh with a line `bertlab ...`")
    return problems


def lint_frame(cells: list[dict], page: str) -> list[str]:
    "What every notebook must have: title, contract, set-up cell, exercises, recap, references."
    problems = []
    markdown = [source_of(cell) for cell in cells if cell["cell_type"] == "markdown"]
    code = [source_of(cell) for cell in cells if cell["cell_type"] == "code"]
    text = "\n\n".join(markdown)
    title = markdown[0] if markdown else ""
    if not re.match(r"# \S.*\n> \S", title):
        problems.append(
            "the first text cell must begin with `# Title` and a line `> what it is about`"
        )
    if (
        sum(len(re.findall(r"^# \S", part, re.MULTILINE)) for part in map(strip_fences, markdown))
        != 1
    ):
        problems.append("there must be one heading of the first level")
    if page != "index" and not re.search(r"\[Open in Colab\]\([^)]+\)", text):
        problems.append("no [Open in Colab](colab)")
    if not any(map(is_setup, code)):
        problems.append(f"no hidden set-up cell (#| hide, #| eval: false, {SETUP_MARK})")
    if page == "guide":
        return problems + lint_guide(text)
    if page in ("page", "index"):
        return problems
    exports = any("export" in directives(source) for source in code)
    if exports and not re.match(r"#\|\s*default_exp \w+(?:\.\w+)?", code[0]):
        problems.append("the first cell must be #| default_exp")
    required = {
        "You can now": "goals",
        "Before": "prerequisites",
        "Takes": "measured minutes and megabytes",
    }
    for word, meaning in required.items():
        if f"**{word}**" not in text:
            problems.append(f"no **{word}** ({meaning})")
    for heading in ("Exercises", "Recap", "What goes wrong"):
        if not re.search(rf"^##+ {heading}", text, re.MULTILINE | re.IGNORECASE):
            problems.append(f"no part `## {heading}`")
    exercises = text.partition("## Exercises")[2].partition("## Recap")[0]
    if len(re.findall(r"^\d+\. ", exercises, re.MULTILINE)) < MIN_EXERCISES:
        problems.append(f"fewer than {MIN_EXERCISES} numbered exercises")
    if "<details>" not in exercises:
        problems.append("no folded solution (<details>)")
    if "not attempted" not in "\n".join(code):
        problems.append('no check function that says "not attempted"')
    if "Recall" not in text or text.partition("Recall")[2].count("?") < 3:
        problems.append("fewer than three recall questions after `Recall`")
    if "**References**" not in text and "## References" not in text:
        problems.append("no **References**")
    return problems


def strip_fences(text: str) -> str:
    return re.sub(r"^(```+).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)


def lint_figures(cells: list[dict], page: str) -> list[str]:
    "Too few figures."
    with_picture = [
        c for c in cells if any("image/png" in o.get("data", {}) for o in c.get("outputs", []))
    ]
    least = MIN_FIGURES.get(page, 0)
    if len([cell for cell in with_picture if visible(cell)]) < least:
        return [f"{len(with_picture)} figures, {least} at least"]
    return []


def lint(path: Path) -> list[str]:
    "Everything that is wrong with a notebook; an empty list if nothing is."
    raw = path.read_text(encoding="utf-8")
    notebook, page = json.loads(raw), page_type(path)
    cells, problems = notebook["cells"], []
    if len(raw.encode()) > MAX_NOTEBOOK_BYTES:
        problems.append(f"{len(raw.encode()):,} bytes, {MAX_NOTEBOOK_BYTES:,} at most")
    kernel = {"display_name": "python3", "language": "python", "name": "python3"}
    if notebook["metadata"].get("kernelspec") != kernel:
        problems.append(f"the kernelspec must be {kernel}")
    ids = [cell.get("id") for cell in cells]
    if None in ids or len(set(ids)) != len(ids):
        problems.append("each cell needs an id of its own")
    return problems + lint_frame(cells, page) + lint_cells(cells) + lint_figures(cells, page)


def bound_names(tree: ast.AST) -> list[tuple[int, str]]:
    "Return every variable and parameter of a module with its line."
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append((node.lineno, node.id))
        elif isinstance(node, ast.arg):
            names.append((node.lineno, node.arg))
    return names


def warn_about_names(paths: list[Path]) -> list[str]:
    "Return warnings about vague names and long functions, and the share of vague names."
    warnings, count, vague = [], 0, 0
    for path in paths:
        tree, name = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(ROOT)
        names = bound_names(tree)
        matches = [(line, word) for line, word in names if word in VAGUE]
        count, vague = count + len(names), vague + len(matches)
        warnings += [f"{name}:{line}: {word} does not say what it holds" for line, word in matches]
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if (length := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES:
                    warnings.append(f"{name}:{node.lineno}: {node.name} has {length} lines")
    share = vague / max(1, count)
    return [*warnings, f"{vague:,} of {count:,} names are vague: {share:.1%} (1% is healthy)"]


def main(arguments: list[str]) -> None:
    if arguments == ["--names"]:
        folders = (ROOT / "bertlab", ROOT / "scripts", ROOT / "benchmarks")
        paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
        print("\n".join(warn_about_names([path for path in paths if path.name != "_modidx.py"])))
        return
    problems = {path: lint(path) for path in map(Path, arguments or notebooks(ROOT))}
    for path, messages in problems.items():
        print(f"{path}: {'in order' if not messages else ''}")
        print("".join(f"  {message}\n" for message in messages), end="")
    sys.exit(any(problems.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
