"""What only the tests need, kept out of a page's visible cells; `python scripts/sync.py` moves it there.

- A line that ends in `# quick: steps=20` (one value) or `# quick: SIZES = (2, 4)` (with spaces, the whole statement)
  loses the comment. The cell's metadata keeps the change under `quick`, for tests that run the page shorter.
- A statement `claim(...)`, or a loop of such statements, moves into a hidden cell after its own. If it ends in
  `# quick: pass`, since it is about the full run alone, then the short run leaves that cell out.
"""

import ast
import re

COMMENT = re.compile(r"[ \t]+# quick: (?P<change>.+?)[ \t]*$", re.MULTILINE)
PASS = "pass"
IMPORT = "from bertlab.course.progress import claim"
FOLDED = {"jupyter": {"source_hidden": True}, "cellView": "form"}  # in JupyterLab, on Colab


def source_of(cell: dict) -> str:
    return "".join(cell["source"])


def is_hidden(cell: dict) -> bool:
    return bool(re.search(r"^#\| hide$", source_of(cell), re.MULTILINE))


def changed(source: str, change: str) -> str:
    "Return a cell's source with one value or statement changed."
    name, _, value = change.partition("=")
    if name.endswith(" "):
        pattern, new = rf"^(\s*{re.escape(name.strip())} =) .*$", rf"\g<1>{value}"
    else:
        pattern, new = rf"\b{name}(\s*)=(\s*)[^\s,()]+", rf"{name}\g<1>=\g<2>{value}"
    source, count = re.subn(pattern, new, source, flags=re.MULTILINE)
    assert count == 1, f"`{change}` must set one value in this cell, and sets {count}:\n{source}"
    return source


def shortened(notebook: dict) -> dict:
    "Return the notebook as the quick tests run it."
    cells = []
    for cell in notebook["cells"]:
        changes = cell["metadata"].get("quick", [])
        if PASS in changes:
            continue
        source = source_of(cell)
        for change in changes:
            source = changed(source, change)
        cells.append({**cell, "source": source})
    return {**notebook, "cells": cells}


def is_claim(node: ast.stmt) -> bool:
    "Whether a statement is a claim, or a loop of claims."
    if isinstance(node, ast.For):
        return all(map(is_claim, node.body))
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and getattr(node.value.func, "id", "") == "claim"
    )


def without_claims(source: str) -> tuple[str, dict[bool, str]]:
    "Return a source without its claims, and the claims: those of the full run under True, others under False."
    lines, claims = source.split("\n"), {False: [], True: []}
    for node in reversed(ast.parse(re.sub(r"^%.*", "pass", source, flags=re.MULTILINE)).body):
        taken = lines[node.lineno - 1 : node.end_lineno]
        text = "\n".join(taken)
        full_only = COMMENT.search(text) is not None and COMMENT.search(text)["change"] == PASS
        if is_claim(node) or full_only and node.end_lineno == node.lineno:
            claims[full_only].insert(0, COMMENT.sub("", text))
            del lines[node.lineno - 1 : node.end_lineno]
    return "\n".join(lines).strip("\n"), {
        key: "\n".join(value) for key, value in claims.items() if value
    }


def claim_cell(cell: dict, text: str, full_only: bool) -> dict:
    "Return the hidden cell that follows a cell with its claims; it runs where that one does."
    marks = re.findall(r"^#\| (?:slow|gpu|tpu|eval: false)$", source_of(cell), re.MULTILINE)
    needed = [IMPORT, ""] if "claim(" in text else []
    source = "\n".join(["#| hide", *marks, *needed, text])
    return {
        "cell_type": "code",
        "id": f"{cell['id']}-{'full' if full_only else 'claims'}",
        "metadata": {**FOLDED, **({"quick": [PASS]} if full_only else {})},
        "outputs": [],
        "execution_count": None,
        "source": source.splitlines(keepends=True),
    }


def without_import(source: str) -> str:
    "Return a source that does not import `claim`."
    source = re.sub(rf"^{IMPORT}$\n?", "", source, flags=re.MULTILINE)
    return re.sub(rf"^{IMPORT}, ", IMPORT.removesuffix("claim"), source, flags=re.MULTILINE)


def hide(cells: list[dict]) -> list[dict]:
    "Return the cells of a page, what only the tests need being hidden."
    result, marks = [], r"\bclaim\b|# quick: "
    if any("def claim(" in source_of(cell) for cell in cells):  # the page that explains it
        marks = "# quick: "
    for cell in cells:
        source, claims = source_of(cell), {}
        if cell["cell_type"] == "code" and re.search(marks, source):
            if not is_hidden(cell):
                source, claims = without_claims(without_import(source))
            if changes := [match["change"] for match in COMMENT.finditer(source)]:
                source = COMMENT.sub("", source)
                cell["metadata"]["quick"] = [*cell["metadata"].get("quick", []), *changes]
            cell["source"] = source.splitlines(keepends=True)
        if source.strip():
            result.append(cell)
        result += [claim_cell(cell, text, full_only) for full_only, text in claims.items()]
    return result
