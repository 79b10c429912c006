"""Make the site: stage the notebooks with nbdev into _proc, check them, render with Quarto into _docs.

    python scripts/docs.py

Without Quarto everything up to the rendering still happens, and the last line says how to get it.
The staging is nbdev's own, notebook by notebook; nbdev's command is not used, because it would try
to install Quarto and would drop what the title cell holds after the title.
"""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from sync import Address, directives, notebooks, source_of  # noqa: E402

NBDEV_YML = """\
# Written by scripts/docs.py from settings.ini.
project:
  output-dir: _docs
website:
  title: "{title}"
  description: "{description}"
  site-url: "{site}"
  repo-url: "{repo}"
  repo-branch: "{branch}"
  repo-subdir: nbs
"""
GET_QUARTO = """\
Quarto is not installed, so nothing was rendered; all that comes before it passed.
To get it: an installer from https://quarto.org/docs/get-started, or .venv/bin/python -m pip install quarto-cli
Then run `make docs` again."""


def split_title(cells: list) -> list:
    "Give what follows the title and subtitle a cell of its own: nbdev turns the title's cell into front matter."
    from execnb.nbio import mk_cell

    for number, cell in enumerate(cells):
        if cell.cell_type == "markdown" and cell.source.startswith("# "):
            lines = cell.source.splitlines()
            end = 2 if len(lines) > 1 and lines[1].startswith(">") else 1
            cell.set_source("\n".join(lines[:end]))
            return [*cells[: number + 1], mk_cell("\n".join(lines[end:]).strip(), "markdown"), *cells[number + 1 :]]
    return cells


@lru_cache(maxsize=1)  # a notebook asks for all its names, and parsing takes longer than all else
def definitions(code: str) -> dict[str, ast.AST]:
    "Functions and classes by name; of two with one name, the outer or the first."
    found = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.setdefault(node.name, node)
    return found


def signature_of(name: str, code: str) -> tuple[str, bool]:
    "A function's or class's head as written, fields and comments included; whether fields make the class."
    lines, node = code.splitlines(), definitions(code).get(name)
    if node is None:
        return "", False
    if not isinstance(node, ast.ClassDef):
        return "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1]), False
    makes_itself = any(isinstance(n, ast.FunctionDef) and n.name == "__init__" for n in node.body)
    fields = [] if makes_itself else [n for n in node.body if isinstance(n, ast.AnnAssign)]
    bases = ", ".join(map(ast.unparse, node.bases))
    text = [f"class {name}({bases}):" if bases else f"class {name}:"]
    for field in fields:
        text += lines[field.lineno - 1 : field.end_lineno]
    return "\n".join(text), bool(fields)


def renderer(code: str) -> type:
    """nbdev's renderer of show_doc, but for what it shows badly or not at all; `code` is what the notebook exports.

    Where fields make a class (dataclasses, configurations) they are shown with their comments. Where nbdev fails,
    on an annotation in quotes or an inherited `__init__` that cannot be read, the head is shown as it is written.
    """
    from nbdev.showdoc import BasicMarkdownRenderer

    class Renderer(BasicMarkdownRenderer):
        def __init__(self, sym, name: str | None = None, title_level: int = 3):
            head, has_fields = signature_of(sym.__name__, code)
            try:
                super().__init__(sym, name=name, title_level=title_level)
            except Exception:
                if not head:
                    raise
                self.sym, self.nm, self.fn, self.title_level = sym, name or sym.__qualname__, sym.__name__, title_level
                self.docs, has_fields = inspect.cleandoc(sym.__doc__ or ""), True
            if has_fields:
                self.dm = head

    return Renderer


WIDGET = "application/vnd.jupyter.widget-view+json"
STATIC = {"text/html", "image/png", "image/svg+xml"}


def prefer_static(notebook) -> None:
    "Leave a widget's static form alone on the page: the live one needs a kernel, and scripts from elsewhere."
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if WIDGET in output.get("data", {}) and STATIC & output["data"].keys():
                del output["data"][WIDGET]
    notebook.metadata.pop("widgets", None)


def stage_notebook(source: Path, target: Path) -> None:
    "nbdev's page of a notebook: front matter, show_doc, links; hidden and exported cells gone."
    import nbdev.showdoc
    from execnb.nbio import read_nb, write_nb
    from nbdev.processors import FilterDefaults

    notebook = read_nb(source)
    exports = [cell.source for cell in notebook.cells if "export" in directives(cell.source)]
    notebook.cells = split_title(notebook.cells)
    # For this notebook only: the next one's renderer builds on nbdev's own class, not on this one.
    page_renderer = renderer("\n\n".join(exports))
    try:
        with patch.object(nbdev.showdoc, "BasicMarkdownRenderer", page_renderer):
            FilterDefaults()(notebook)
    except Exception as error:
        sys.exit(f"{source.relative_to(ROOT)} cannot be staged: {error}\n{error.__cause__ or ''}")
    prefer_static(notebook)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_nb(notebook, target)


def stage() -> Path:
    "Stage everything in nbs/ to _proc/, with the generated configuration and the API page."
    os.chdir(ROOT)
    os.environ["IN_TEST"] = "1"  # as nbdev sets it while staging
    warnings.filterwarnings("ignore", "Found cells containing imports")  # scripts/lint.py says it better
    from nbdev.config import get_config

    address, config = Address.read(ROOT), get_config()
    values = {"site": address.site_url, "repo": address.git_url, "branch": address.branch}
    (ROOT / "nbs/nbdev.yml").write_text(
        NBDEV_YML.format(title=config.title, description=config.description, **values)
    )
    staged = ROOT / "_proc"
    shutil.rmtree(staged, ignore_errors=True)
    for path in notebooks(ROOT):
        stage_notebook(path, staged / path.relative_to(ROOT / "nbs"))
    for path in (ROOT / "nbs").rglob("*"):
        relative = path.relative_to(ROOT / "nbs")
        hidden = any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
        if path.is_file() and path.suffix != ".ipynb" and not hidden:
            (staged / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, staged / relative)  # follows the link to _quarto.yml
    (staged / "api.qmd").write_text(api_page(), encoding="utf-8")
    return staged


def public_symbols() -> dict[str, list[str]]:
    "The public functions and classes of each module, in the order of nbdev's index."
    from bertlab._modidx import d

    found = {}
    for module, symbols in d["syms"].items():
        names = [key.removeprefix(f"{module}.") for key in symbols]
        found[module] = [name for name in names if "." not in name and not name.startswith("_")]
    return found


def notebook_of(module: str) -> str:
    "The notebook, relative to nbs/, that exports to a module."
    head = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")[:2000]
    return re.search(r"File to edit: (?:\.\./)+nbs/(\S+\.ipynb)", head)[1]


def api_page() -> str:
    "Every public name, with the first line of its docstring and a link to where it is explained."
    import bertlab

    parts = ["---", "title: API", "description: Every public name, and where it is explained.", "---", ""]
    parts += ["Each name is imported from its module; those in bold from `bertlab` itself, too.", ""]
    modules = {module: names for module, names in public_symbols().items() if names}
    for module, names in sorted(modules.items(), key=lambda item: notebook_of(item[0])):
        page = notebook_of(module)
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        documented = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        parts += [f"## [{module}]({page})", "", ast.get_docstring(tree) or "", "", "| name | |", "|---|---|"]
        for name in sorted(names, key=str.lower):
            first = (ast.get_docstring(documented[name]) or "").split("\n")[0].replace("|", "\\|")
            mark = "**" if bertlab._PLACES.get(name) == module.removeprefix("bertlab.") else ""
            parts.append(f"| {mark}[`{name}`]({page}#{name.lower()}){mark} | {first} |")
        parts.append("")
    return "\n".join(parts)


# --- checks ---------------------------------------------------------------------------------------


def read_page(path: Path) -> SimpleNamespace:
    "A staged page: its front matter, its Markdown, its code cells, its headings' anchors."
    if path.suffix == ".qmd":
        _, front, text = path.read_text(encoding="utf-8").split("---\n", 2)
        return SimpleNamespace(front=yaml.safe_load(front), text=text, code=[], anchors=anchors(text))
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    front = source_of(cells[0]).strip().strip("-") if cells and cells[0]["cell_type"] == "raw" else ""
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    shown = ["".join(o.get("data", {}).get("text/markdown", "")) for cell in code for o in cell["outputs"]]
    text = "\n\n".join([*(source_of(cell) for cell in cells if cell["cell_type"] == "markdown"), *shown])
    return SimpleNamespace(front=yaml.safe_load(front) or {}, text=text, code=code, anchors=anchors(text))


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^(```+).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(text: str) -> set[str]:
    "The identifiers that Pandoc gives to the headings of a text."
    found = set()
    fenced_out = re.sub(r"^(```+).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*$", fenced_out, flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        plain = re.sub(r"[^\w\s.-]", "", plain).strip().lower()
        found.add(re.sub(r"^[^a-z]+", "", re.sub(r"\s+", "-", plain)) or "section")
    return found


def links(text: str) -> list[str]:
    return re.findall(r"(?<!\\)\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", without_code(text))


def check_links(name: str, page: SimpleNamespace, pages: dict, outputs: dict, staged: Path, site: str) -> list[str]:
    "Internal links that lead nowhere; those to the site's own address, which nbdev writes, are internal."
    problems = []
    for link in links(page.text):
        target, _, anchor = link.partition("#")
        if target.startswith(site + "/"):
            found = outputs.get(target.removeprefix(site + "/"))
        elif re.match(r"[a-z]+:", target):
            continue
        else:
            path = Path(os.path.normpath(Path(name).parent / target)).as_posix() if target else name
            found = path if path in pages or (staged / path).is_file() else None
        if found is None:
            problems.append(f"{name}: the link {link} leads nowhere")
        elif anchor and found in pages and anchor not in pages[found].anchors:
            problems.append(f"{name}: {found} has no heading for #{anchor}")
    return problems


def check_figures(name: str, page: SimpleNamespace) -> list[str]:
    "Figures without alternative text, pictures from elsewhere, widgets that need a kernel."
    problems = []
    for cell in page.code:
        if any(WIDGET in output.get("data", {}) for output in cell["outputs"]):
            head = source_of(cell).splitlines()[-1]
            problems.append(f"{name}: a widget has no static form (text/html or image/png beside it): {head}")
        has_picture = any(kind.startswith("image/") for o in cell["outputs"] for kind in o.get("data", {}))
        if has_picture and not directives(source_of(cell)).get("fig-alt"):
            head = source_of(cell).splitlines()[0]
            problems.append(f'{name}: a figure has no alternative text (#| fig-alt: "..."): {head}')
    for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)", without_code(page.text)):
        if not alt.strip():
            problems.append(f"{name}: the picture {target} has no alternative text")
        if target.startswith("http"):
            problems.append(f"{name}: the picture {target} is fetched from elsewhere")
    return problems


def entries(node: object) -> list[str]:
    "Every page that a part of the sidebar or the navigation bar names."
    if isinstance(node, str):
        return [node]
    if isinstance(node, list):
        return [name for item in node for name in entries(item)]
    if isinstance(node, dict):
        named = [node["href"]] if "href" in node else []
        return named + entries(node.get("contents", [])) + entries(node.get("left", []))
    return []


def check_navigation(pages: dict, staged: Path) -> list[str]:
    "Entries of the sidebar and the bar that lead nowhere, and pages that the sidebar misses."
    config = {}
    for name in ("_quarto.yml", "nbdev.yml", "sidebar.yml"):
        loaded = yaml.safe_load((staged / name).read_text(encoding="utf-8"))
        config[name] = loaded.get("website", {})
    listed = entries(config["sidebar.yml"]["sidebar"])
    named = listed + entries(config["_quarto.yml"].get("navbar", {}))
    problems = [f"the navigation names {name}, which is not there" for name in named if name not in pages]
    problems += [f"the sidebar lacks {name}" for name in pages if name not in listed]
    return problems + [f"the sidebar names {name} twice" for name in set(listed) if listed.count(name) > 1]


def check_documented(pages: dict) -> list[str]:
    "Public names without show_doc on their notebook's page."
    problems = []
    for module, names in public_symbols().items():
        page = notebook_of(module)
        problems += [
            f"{page}: no show_doc for {module}.{name}" for name in names if name.lower() not in pages[page].anchors
        ]
    return problems


def check(staged: Path) -> list[str]:
    "Everything that is wrong with the staged site; an empty list if nothing is."
    found = sorted([*staged.rglob("*.ipynb"), *staged.rglob("*.qmd")])
    pages = {path.relative_to(staged).as_posix(): read_page(path) for path in found}
    problems, outputs = [], {}
    for name, page in pages.items():
        for key in ("title", "description"):
            if not page.front.get(key):
                problems.append(f"{name}: the page has no {key}: `# Title`, then a line `> description`")
        if extra := set(page.front) - {"title", "description", "output-file"}:
            problems.append(f"{name}: lines of the title's cell became front matter: {sorted(extra)}")
        output = Path(name).with_name(page.front.get("output-file", Path(name).stem + ".html")).as_posix()
        if output in outputs:
            problems.append(f"{name} and {outputs[output]} both render to {output}")
        outputs[output] = name
        if name.endswith(".ipynb") and "[Open in Colab](https:" not in page.text:
            problems.append(f"{name}: no link to Colab; write [Open in Colab](colab) and run `make sync`")
        problems += check_figures(name, page)
    site = Address.read(ROOT).site_url
    for name, page in pages.items():
        problems += check_links(name, page, pages, outputs, staged, site)
    return problems + check_navigation(pages, staged) + check_documented(pages)


def find_quarto() -> str | None:
    "The program quarto: beside this Python, where `pip install quarto-cli` puts it, or on the PATH."
    beside = shutil.which("quarto", path=str(Path(sys.executable).parent))
    return beside or shutil.which("quarto")


def render(staged: Path) -> None:
    "Render the staged pages with Quarto, and put the site in _docs."
    if subprocess.run([find_quarto(), "render", "--no-execute"], cwd=staged).returncode:
        sys.exit("quarto could not render the site")
    missing = [name for name in ("index.html", "api.html") if not (staged / "_docs" / name).is_file()]
    if missing:
        sys.exit(f"quarto rendered no {' and no '.join(missing)}")
    shutil.rmtree(ROOT / "_docs", ignore_errors=True)
    shutil.move(staged / "_docs", ROOT / "_docs")
    print("The site is in _docs; open _docs/index.html")


def main() -> None:
    staged = stage()
    problems = check(staged)
    if problems:
        sys.exit("The site is not in order:\n" + "\n".join(f"  {problem}" for problem in problems))
    count = len(list(staged.rglob("*.ipynb")))
    print(f"{count} notebooks staged in _proc: front matter, links, sidebar, show_doc and figures are in order")
    if find_quarto():
        render(staged)
    else:
        print(GET_QUARTO)


if __name__ == "__main__":
    main()
