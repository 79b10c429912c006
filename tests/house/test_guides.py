"Guides: their order in the sidebar, and migrations of no more lines, whose tables cannot go stale."

import ast
import inspect
import json
import re

import pytest
import sync
from conftest import ROOT
from hidden import is_hidden

GUIDES = [path for path in sync.notebooks(ROOT) if path.parent.name == "guides"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def test_the_sidebar_lists_every_guide_in_order():
    names = [path.relative_to(ROOT / "nbs").as_posix() for path in GUIDES]
    assert sync.guide_pages(["index.ipynb", "guides/zebra.ipynb", *reversed(names)]) == [
        *(f"guides/{name}.ipynb" for name in sync.GUIDES), "guides/zebra.ipynb"]  # fmt: skip
    section = sync.sidebar(ROOT).partition("title: Guides")[2].partition("title:")[0]
    assert re.findall(r"guides/(\w+)\.ipynb", section) == list(sync.GUIDES)


def parsed(cell: dict) -> ast.Module:
    "Parse a code cell without its commands."
    text = re.sub(r"^(\s*)[!%](?:.*\\\n)*.*", r"\1pass", source(cell), flags=re.MULTILINE)
    return ast.parse("" if source(cell).startswith("%%") else text)


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_a_guide_calls_no_function_of_a_hidden_cell(path):
    hidden, called = set(), set()
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code" and is_hidden(cell):
            hidden |= {node.name for node in parsed(cell).body if hasattr(node, "name")}
        elif cell["cell_type"] == "code":
            called |= {node.id for node in ast.walk(parsed(cell)) if isinstance(node, ast.Name)}
    assert not hidden & called


def code_lines(cell: dict) -> list[str]:
    "The lines of a code cell, or of the block in a Markdown cell, without blank ones and comments."
    text = source(cell)
    if cell["cell_type"] == "markdown":
        text = re.search(r"```\w+\n(.*?)```", text, re.DOTALL)[1]
    return [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def migrations() -> list[tuple[str, dict, dict]]:  # name of the page, the original, ours
    "The cells of the guides to migration that are tagged, in pairs."
    pairs = []
    for name in ("migrate", "migrate_transformers"):
        cells = json.loads((ROOT / f"nbs/guides/{name}.ipynb").read_text(encoding="utf-8"))["cells"]
        tagged = {
            tag: [cell for cell in cells if tag in cell["metadata"].get("tags", ())]
            for tag in ("original", "ours")
        }
        pairs += [(name, *pair) for pair in zip(*tagged.values(), strict=True)]
    return pairs


def test_every_system_has_a_migration_of_no_more_lines():
    pairs = migrations()
    originals = "".join(source(original) for _, original, _ in pairs)
    for name in ("bertblocks.training", "BertBlocksPretrainingModule(", "class Bert(", "NumpyFSLDatasetConfig",
                 "TrainingArguments(", "KLDivergence|config.optimization.kl", "transformers.Trainer(",
                 "run_mlm.py", "SentenceTransformerTrainer("):  # fmt: skip
        assert any(part in originals for part in name.split("|")), name
    assert len(pairs) == 9
    for name, original, ours in pairs:
        assert 0 < len(code_lines(ours)) <= len(code_lines(original)), (name, source(ours))


def test_the_table_of_migration_has_the_defaults():
    import bertlab

    cells = json.loads((ROOT / "nbs/guides/migrate.ipynb").read_text(encoding="utf-8"))["cells"]
    tables = ["".join(out["data"]["text/markdown"]) for cell in cells if cell["cell_type"] == "code"
             for out in cell["outputs"] if "text/markdown" in out.get("data", {})]  # fmt: skip
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in tables[0].splitlines()[2:]]
    listed = {}
    for where, parameter, reference, here, why, back in rows:
        name = parameter.strip("`")
        default = inspect.signature(getattr(bertlab, where)).parameters[name].default
        assert here == repr(default) and reference != here and len(why) > 20, (where, name)
        if back.startswith("`"):  # the argument that gives the old behaviour
            argument = re.fullmatch(rf"`{name}=(.+)`", back)
            assert argument and ast.literal_eval(argument[1]) == ast.literal_eval(reference), back
        listed[where, name] = reference
    # The first cell of data holds the reference's defaults; the table lists exactly those that differ.
    data = next(source(cell) for cell in cells if source(cell).startswith("BERTBLOCKS_DEFAULTS = "))
    names: dict = {"bertlab": bertlab, "inspect": inspect}
    exec(data.rpartition("\n")[0], names)
    differ = {(where, name) for where, defaults in names["BERTBLOCKS_DEFAULTS"].items() for name, reference in defaults.items()
              if names["default_here"](where, name) != reference}  # fmt: skip
    assert set(listed) == differ and len(listed) >= 10
