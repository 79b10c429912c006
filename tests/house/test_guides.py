"Guides: their frame, their place in the sidebar, and a table of migration that cannot go stale."

import ast
import inspect
import json
import re

import lint
import pytest
import sync
from conftest import ROOT

GUIDES = [path for path in sync.notebooks(ROOT) if path.parent.name == "guides"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def test_the_sidebar_has_every_guide_in_the_order_of_its_list():
    names = [path.relative_to(ROOT / "nbs").as_posix() for path in GUIDES]
    assert sync.guide_pages(["index.ipynb", "guides/zebra.ipynb", *reversed(names)]) == [
        *(f"guides/{name}.ipynb" for name in sync.GUIDES), "guides/zebra.ipynb"]  # fmt: skip
    section = sync.sidebar(ROOT).partition("title: Guides")[2].partition("title:")[0]
    assert re.findall(r"guides/(\w+)\.ipynb", section) == list(sync.GUIDES)


FRAME = [
    ("markdown", "# Resume\n> On it goes.\n\n**You have** a run. **You get** the rest. **Takes** a minute. "
                 "[Open in Colab](colab)"),
    ("code", "#| hide\n#| eval: false\n# setup"),
    ("markdown", "## The command\n\n```sh\n# first\nbertlab pretrain --resume my-run\n```"),
    ("markdown", "## What goes wrong\n\nMuch."),
    ("markdown", "## Next\n\nMore."),
]  # fmt: skip


def frame(left_out: str = "", put: str = "") -> list[str]:
    cells = [
        {"cell_type": kind, "source": text.replace(left_out, put) if left_out else text}
        for kind, text in FRAME
    ]
    return lint.lint_frame(cells, "guide")


def test_a_guide_has_a_recipe_s_frame():
    assert lint.page_type(ROOT / "nbs/guides/resume.ipynb") == "guide"
    assert frame() == []
    for part in ("> On it goes.", "**You have**", "**You get**", "**Takes**", "[Open in Colab](colab)", "# setup",
                 "bertlab pretrain", "## What goes wrong", "## Next"):  # fmt: skip
        assert len(frame(part)) == 1, part


def test_a_guide_s_figure_has_alternative_text():
    picture = [{"output_type": "display_data", "data": {"image/png": "x"}, "metadata": {}}]
    cell = {"cell_type": "code", "source": "figure", "outputs": picture, "execution_count": None}
    assert any("alternative text" in problem for problem in lint.lint_cells([cell]))


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_a_guide_is_in_order(path):
    assert lint.lint(path) == []


def test_the_table_of_migration_says_what_the_signatures_say():
    import bertlab

    cells = json.loads((ROOT / "nbs/guides/migrate.ipynb").read_text(encoding="utf-8"))["cells"]
    shown = ["".join(out["data"]["text/markdown"]) for cell in cells if cell["cell_type"] == "code"
             for out in cell["outputs"] if "text/markdown" in out.get("data", {})]  # fmt: skip
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in shown[0].splitlines()[2:]]
    told = {}
    for where, parameter, theirs, here, why, back in rows:
        name = parameter.strip("`")
        default = inspect.signature(getattr(bertlab, where)).parameters[name].default
        assert here == repr(default) and theirs != here and len(why) > 20, (where, name)
        if back.startswith("`"):  # what gives the old behaviour is an argument that there is
            given = re.fullmatch(rf"`{name}=(.+)`", back)
            assert given and ast.literal_eval(given[1]) == ast.literal_eval(theirs), back
        told[where, name] = theirs
    # The reference's defaults, in the page's own first cell of data: all that differ are told, and no other.
    data = next(source(cell) for cell in cells if source(cell).startswith("THEIRS = "))
    names: dict = {"bertlab": bertlab, "inspect": inspect}
    exec(data.rpartition("\n")[0], names)
    differ = {(where, name) for where, known in names["THEIRS"].items() for name, theirs in known.items()
              if names["default_here"](where, name) != theirs}  # fmt: skip
    assert set(told) == differ and len(told) >= 10
