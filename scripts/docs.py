"""Build the site: stage the notebooks with nbdev in _proc, check them, render them with Quarto into _docs.

    python scripts/docs.py                        without a live model
    python scripts/docs.py --model DIRECTORY      with the model of a run in its live pages
    python scripts/docs.py --train                with a model that `bertlab demo` trains in build/site-model

Without --model the site uses build/site-model if it exists. Without Quarto everything but the rendering is done.
Staging is nbdev's, but no cell is run: names are documented from the package's source (scripts/reference.py).
"""

import argparse
import ast
import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import joins  # noqa: E402
import landing  # noqa: E402
import reference  # noqa: E402
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
  navbar:
    right:
      - text: "{number}"
        menu:
          - text: Changelog
            href: changelog.qmd
          - text: Other versions
            href: {repo}/releases
      - icon: github
        href: {repo}
        aria-label: GitHub
  page-footer:
    left: "{version}, Apache-2.0"
    right:
      - text: Cite
        href: cite.qmd
      - text: llms.txt
        href: llms.txt
"""
GET_QUARTO = (
    "Quarto is missing, so nothing was rendered: run .venv/bin/python -m pip install quarto-cli, or get it from "
    "https://quarto.org/docs/get-started, and run `make docs` again"
)


def git(*words: str) -> str:
    "Return the output of git; empty outside a checkout."
    command = ["git", "-C", str(ROOT), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def described_version(version: str, repo: str) -> str:
    "Return the version and commit that the site documents, as Markdown."
    top = git("rev-parse", "--show-toplevel")
    commit = git("rev-parse", "HEAD") if top and Path(top).resolve() == ROOT.resolve() else ""
    if not commit:
        return f"bertlab {version}"
    released = {version, f"v{version}"} & set(git("tag", "--points-at", "HEAD").split())
    changed = ", with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    at = f"[{commit[:7]}]({repo}/commit/{commit}){changed}"
    return (
        f"bertlab {version} ({at})"
        if released and not changed
        else f"bertlab {version} in development ({at})"
    )


def split_title(cells: list) -> list:
    "Split the title from the rest of its cell, because nbdev turns that cell into front matter."
    from execnb.nbio import mk_cell

    for index, cell in enumerate(cells):
        if cell.cell_type == "markdown" and cell.source.startswith("# "):
            lines = cell.source.splitlines()
            end = 2 if len(lines) > 1 and lines[1].startswith(">") else 1
            cell.set_source("\n".join(lines[:end]))
            return [
                *cells[: index + 1],
                mk_cell("\n".join(lines[end:]).strip(), "markdown"),
                *cells[index + 1 :],
            ]
    return cells


def png_size(data: str) -> dict[str, int]:  # base64
    "Return the width and height of a PNG from its header."
    head = base64.b64decode(data[:32])
    return {
        "width": int.from_bytes(head[16:20], "big"),
        "height": int.from_bytes(head[20:24], "big"),
    }


def give_sizes(notebook) -> None:
    "Set the display size of each figure, so that the page does not move while it loads."
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if png := "".join(output.get("data", {}).get("image/png", "")):
                metadata = output.setdefault("metadata", {})
                metadata["image/png"] = {**png_size(png), **metadata.get("image/png", {})}


def fold_imports(notebook) -> None:
    "Fold the first code cell of a page if it imports: what the page is about comes first."
    code = [c for c in notebook.cells if c.cell_type == "code" and not shown_name(c.source)]
    if code and re.search(r"^(?:import|from) ", code[0].source, flags=re.MULTILINE):
        if "code-fold" not in directives(code[0].source):
            code[
                0
            ].source = f'#| code-fold: true\n#| code-summary: "Imports"\n{code[0].source.lstrip()}'


def leave_out_checks(notebook) -> None:
    """Leave the function that checks an answer, and its call, out of the cell of an exercise that is not solved.

    A page of the site runs nothing, and what the check compares with gives the answer away.
    """
    for cell in notebook.cells:
        if cell.cell_type != "code" or "raise NotImplementedError" not in cell.source:
            continue
        lines = cell.source.split("\n")
        nodes = ast.parse(re.sub(r"^[%!].*", "pass", cell.source, flags=re.MULTILINE)).body
        checks = {node.name for node in nodes if getattr(node, "name", "").startswith("check_")}
        is_call = lambda node: (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and getattr(node.value.func, "id", "") in checks
        )
        calls = [node for node in nodes if is_call(node)]
        if not calls:
            continue
        for node in reversed(nodes):
            if node in calls or getattr(node, "name", "") in checks:
                first = min([node, *getattr(node, "decorator_list", [])], key=lambda n: n.lineno)
                del lines[first.lineno - 1 : node.end_lineno]
        source = re.sub(r"\n{3,}", "\n\n\n", "\n".join(lines)).strip()
        cell.source = f"{source}\n\n# The notebook checks your answer."
        cell.outputs = []


def process(notebook) -> None:
    "Run nbdev's processors except those that execute cells or drop what `terminal` reads."
    from nbdev.processors import FilterDefaults, add_links, clean_magics, exec_show_docs

    class Still(FilterDefaults):
        def base_procs(self) -> list:
            left_out = (add_links, clean_magics, exec_show_docs)
            return [proc for proc in super().base_procs() if proc not in left_out]

    Still()(notebook)


def shown_name(source: str) -> str | None:
    "Return the name that a cell documents, or None."
    match = re.search(r"^show_doc\(([\w.]+)", source, flags=re.MULTILINE)
    return match[1] if match else None


def part_headings(text: str, explained: set[str]) -> str:
    "Give a heading that equals a documented name another identifier."

    def own(match: re.Match) -> str:
        heading = match[0]
        same = not heading.endswith("}") and reference.anchors(heading) & explained
        return f"{heading} {{#about-{same.pop()}}}" if same else heading

    return reference.outside_fences(
        text, lambda part: re.sub(r"^#{1,6} .*\S", own, part, flags=re.MULTILINE)
    )


def stage_notebook(source: Path, name: str):
    "Return a notebook as nbdev processes it, with a `show_doc` cell for each exported name."
    from execnb.nbio import read_nb

    notebook = read_nb(source)
    notebook.cells = split_title(notebook.cells)
    try:
        process(notebook)
    except Exception as error:
        sys.exit(f"{name} cannot be staged: {error}\n{error.__cause__ or ''}")
    is_note = lambda cell: cell.source.startswith("<!-- WARNING: THIS FILE WAS AUTOGENERATED")
    notebook.cells = [cell for cell in notebook.cells if not is_note(cell)]
    fold_imports(notebook)
    leave_out_checks(notebook)
    give_sizes(notebook)
    for cell in notebook.cells:
        cell.metadata.pop("quick", None)  # how the tests run it
    return notebook


def terminal(cell) -> str | None:
    "Return a cell that runs a shell command or writes a file as Markdown; None for another cell."
    marks = directives(cell.source) if cell.cell_type == "code" else {}
    source = re.sub(r"\A(?:#\|.*\n)+", "", cell.source).strip()
    if cell.cell_type != "code" or not source.startswith(("!", "%%writefile ")):
        return None
    if not source.startswith("!"):
        file, _, content = source.removeprefix("%%writefile ").partition("\n")
        return f'```{{.{Path(file).suffix[1:]} filename="{file.strip()}"}}\n{content}\n```'
    printed = "".join("".join(output.get("text", "")) for output in cell.get("outputs", []))
    text = f"```{{.sh .terminal}}\n{source[1:]}\n```"
    if printed.strip() and marks.get("output") != "false":
        text += f"\n\n```{{.text .printed}}\n{printed.rstrip()}\n```"
    return text


def shown_names(notebook) -> list[str]:
    "Return the names that a staged notebook documents."
    symbols = (shown_name(cell.source) for cell in notebook.cells if cell.cell_type == "code")
    return [symbol for symbol in symbols if symbol]


def document_names(notebook, name: str, explained: dict[str, set[str]]) -> None:
    "Put documentation in place of the `show_doc` cells of a staged notebook, and links into its text."
    from execnb.nbio import mk_cell

    address = Address.read(ROOT)
    code_at = f"{address.git_url}/blob/{address.branch}"
    for index, cell in enumerate(notebook.cells):
        symbol = shown_name(cell.source) if cell.cell_type == "code" else None
        if symbol is not None:
            definition = reference.find(symbol, name)
            if definition is None:
                sys.exit(
                    f"{name} cannot be staged: show_doc({symbol}) names nothing in bertlab; run `make sync`"
                )
            text = reference.document(definition, code_at, name, explained)
            cell = notebook.cells[index] = mk_cell(text, "markdown")
        elif text := terminal(cell):
            notebook.cells[index] = mk_cell(text, "markdown")
        elif cell.cell_type == "markdown":
            cell.source = reference.separate_lists(cell.source)
        if cell.cell_type == "markdown":
            cell.source = part_headings(cell.source, explained[name])
            cell.source = reference.add_links(cell.source, name, explained)


# The site has its own first page; the README's notebook is the overview.
RENAMED = {"index.ipynb": "overview.ipynb"}


def stage(model: Path | None = None) -> Path:
    "Stage nbs/ in _proc/, with the configuration and the generated pages."
    from execnb.nbio import write_nb
    from nbdev.config import get_config

    os.chdir(ROOT)
    address, config = Address.read(ROOT), get_config()
    version = described_version(config.version, address.git_url)
    values = {
        "site": address.site_url,
        "repo": address.git_url,
        "branch": address.branch,
        "version": version,
        "number": config.version,
    }
    (ROOT / "nbs/nbdev.yml").write_text(
        NBDEV_YML.format(title=config.title, description=config.description, **values)
    )
    staged = ROOT / "_proc"
    shutil.rmtree(staged, ignore_errors=True)
    pages = {}
    for path in notebooks(ROOT):
        name = path.relative_to(ROOT / "nbs").as_posix()
        pages[name] = stage_notebook(path, name)
    explained = {
        name: set(map(reference.anchor, shown_names(page))) for name, page in pages.items()
    }
    explained |= dict.fromkeys(joins.LEFT_OUT, set())
    for name in pages.keys() - set(joins.LEFT_OUT):
        document_names(pages[name], name, explained)
    code_at = f"{address.git_url}/blob/{address.branch}/nbs"
    pages, moved = joins.join(pages, {name: f"{code_at}/{name}" for name in joins.LEFT_OUT})
    for name, notebook in pages.items():
        if name in RENAMED:  # with another address, too
            head = re.sub(r"^output-file: .*\n", "", notebook.cells[0].source, flags=re.MULTILINE)
            notebook.cells[0].source = re.sub("^title: .*", "title: Overview", head, flags=re.M)
        target = staged / RENAMED.get(name, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_nb(notebook, target)
    for path in (ROOT / "nbs").rglob("*"):
        relative = path.relative_to(ROOT / "nbs")
        hidden = any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
        if path.is_file() and path.suffix != ".ipynb" and not hidden:
            (staged / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, staged / relative)  # follows the link to _quarto.yml
    live = landing.export_live(model, staged / "live") if model else None
    texts = {**reference.pages(explained), **landing.pages(live, ROOT)}
    for name, text in texts.items():
        (staged / name).parent.mkdir(parents=True, exist_ok=True)
        (staged / name).write_text(moved.links(text, name, name), encoding="utf-8")
    bars = yaml.safe_load((staged / "sidebar.yml").read_text(encoding="utf-8"))
    for bar in bars["website"]["sidebar"]:
        bar["contents"] = joins.kept_entries(bar["contents"], moved)
    bars["website"]["sidebar"][-1]["contents"][:0] = reference.sidebar()
    (staged / "sidebar.yml").write_text(yaml.safe_dump(bars, sort_keys=False), encoding="utf-8")
    (staged / "llms.txt").write_text(
        landing.llms(staged, bars["website"]["sidebar"]), encoding="utf-8"
    )
    return staged


# --- checks ---------------------------------------------------------------------------------------


def read_page(path: Path) -> SimpleNamespace:
    "Return front matter, Markdown, code cells and anchors of a staged page."
    if path.suffix == ".qmd":
        _, front, text = path.read_text(encoding="utf-8").split("---\n", 2)
        return SimpleNamespace(
            front=yaml.safe_load(front), text=text, code=[], anchors=reference.anchors(text)
        )
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    front = (
        source_of(cells[0]).strip().strip("-") if cells and cells[0]["cell_type"] == "raw" else ""
    )
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    displayed = [
        "".join(o.get("data", {}).get("text/markdown", ""))
        for cell in code
        for o in cell["outputs"]
    ]
    text = "\n\n".join(
        [*(source_of(cell) for cell in cells if cell["cell_type"] == "markdown"), *displayed]
    )
    return SimpleNamespace(
        front=yaml.safe_load(front) or {}, text=text, code=code, anchors=reference.anchors(text)
    )


def without_code(text: str) -> str:
    return re.sub(
        r"`[^`\n]*`", "", re.sub(r"^(```+).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    )


def links(text: str) -> list[str]:
    return re.findall(r"(?<!\\)\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", without_code(text))


def check_links(
    name: str, page: SimpleNamespace, pages: dict, outputs: dict, staged: Path, site: str
) -> list[str]:
    "Return the internal links without a target."
    problems = []
    for link in links(page.text):
        target, _, anchor = link.partition("#")
        if target.startswith(site + "/"):
            page_name = outputs.get(target.removeprefix(site + "/"))
        elif re.match(r"[a-z]+:", target):
            continue
        else:
            path = Path(os.path.normpath(Path(name).parent / target)).as_posix() if target else name
            page_name = path if path in pages or (staged / path).is_file() else None
        if page_name is None:
            problems.append(f"{name}: the link {link} leads nowhere")
        elif anchor and page_name in pages and anchor not in pages[page_name].anchors:
            problems.append(f"{name}: {page_name} has no heading for #{anchor}")
    return problems


def entries(node: object) -> list[str]:
    "Return every page in a part of the sidebar or navigation bar."
    if isinstance(node, str):
        return [node]
    if isinstance(node, list):
        return [name for item in node for name in entries(item)]
    if isinstance(node, dict):
        hrefs = [node["href"]] if "href" in node else []
        return hrefs + entries(node.get("contents", [])) + entries(node.get("left", []))
    return []


def check_navigation(pages: dict, staged: Path) -> list[str]:
    "Return navigation entries without a page, and pages missing from the sidebar."
    config = {}
    for name in ("_quarto.yml", "nbdev.yml", "sidebar.yml"):
        loaded = yaml.safe_load((staged / name).read_text(encoding="utf-8"))
        config[name] = loaded.get("website", {})
    listed = [name for bar in config["sidebar.yml"]["sidebar"] for name in entries(bar)]
    targets = listed + entries(config["_quarto.yml"].get("navbar", {}))
    problems = [
        f"the navigation names {name}, which is not there" for name in targets if name not in pages
    ]
    problems += [
        f"the sidebar lacks {name}"
        for name in pages
        if name not in (*listed, "index.qmd", "404.qmd")
    ]
    return problems + [
        f"the sidebar names {name} twice" for name in set(listed) if listed.count(name) > 1
    ]


FRONT = {"title", "description", "output-file", "toc", "page-layout", "search", "css", "sidebar", "pagetitle",
         "include-after-body", "body-classes", "repo-actions"}  # fmt: skip


def check(staged: Path) -> list[str]:
    "Return the problems of the staged site."
    paths = sorted([*staged.rglob("*.ipynb"), *staged.rglob("*.qmd")])
    pages = {path.relative_to(staged).as_posix(): read_page(path) for path in paths}
    problems, outputs = [], {}
    for name, page in pages.items():
        for key in ("title", "description"):
            if not page.front.get(key):
                problems.append(
                    f"{name}: the page has no {key}: `# Title`, then a line `> description`"
                )
        if extra := set(page.front) - FRONT:
            problems.append(
                f"{name}: lines of the title's cell became front matter: {sorted(extra)}"
            )
        output = (
            Path(name)
            .with_name(page.front.get("output-file", Path(name).stem + ".html"))
            .as_posix()
        )
        if output in outputs:
            problems.append(f"{name} and {outputs[output]} both render to {output}")
        outputs[output] = name
        is_index = re.fullmatch(r"\w+/index\.ipynb", name)  # a list of modules, not a lesson
        if name.endswith(".ipynb") and not is_index and "[Open in Colab](https:" not in page.text:
            problems.append(
                f"{name}: no link to Colab; write [Open in Colab](colab) and run `make sync`"
            )
    named = {}
    for name, page in pages.items():
        other = named.setdefault(page.front.get("title"), name)
        if other != name:
            problems.append(f"{name} and {other} have the same title, {page.front.get('title')!r}")
    site = Address.read(ROOT).site_url
    for name, page in pages.items():
        problems += check_links(name, page, pages, outputs, staged, site)
    return problems + check_navigation(pages, staged)


def find_quarto() -> str | None:
    "Find quarto in this environment (`pip install quarto-cli`) or on the PATH."
    in_environment = shutil.which("quarto", path=str(Path(sys.executable).parent))
    return in_environment or shutil.which("quarto")


PAGE_LINE = re.compile(r"\[\s*\d+/\d+\]\s+(\S+)")
WARNING = re.compile(r"\[?WARN(?:ING)?\b")


def find_warnings(lines: Iterable[str]) -> Iterator[str]:
    "Yield the warnings of Quarto and Pandoc, each with its page."
    page = "before the first page"
    for line in lines:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", line).strip()
        if at := PAGE_LINE.match(plain):
            page = at[1]
        elif WARNING.match(plain):
            yield f"{page}: {plain}"


def render(staged: Path) -> None:
    "Render the staged pages with Quarto into _docs; a warning is a failure."
    command, lines = [find_quarto(), "render", "--no-execute"], []
    with subprocess.Popen(command, cwd=staged, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          encoding="utf-8", errors="replace") as running:  # fmt: skip
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if running.returncode:
        sys.exit("quarto could not render the site")
    if warnings := list(find_warnings(lines)):
        sys.exit("quarto warned:\n" + "\n".join(f"  {warning}" for warning in warnings))
    missing = [
        name for name in ("index.html", "api.html") if not (staged / "_docs" / name).is_file()
    ]
    if missing:
        sys.exit(f"quarto rendered no {' and no '.join(missing)}")
    landing.finish(staged / "_docs", staged)
    shutil.rmtree(ROOT / "_docs", ignore_errors=True)
    shutil.move(staged / "_docs", ROOT / "_docs")
    print("The site is in _docs; open _docs/index.html")


SITE_MODEL = ROOT / "build/site-model"


def model_for_site(directory: str | None, train: bool) -> Path | None:
    "Return the model for the live pages: the named one, or build/site-model."
    if directory and train:
        sys.exit("--model names a model that is there, and --train makes one: choose")
    if directory:
        if not any((Path(directory) / file).is_file() for file in ("config.json", "page.json")):
            sys.exit(
                f"--model {directory} holds no config.json: name the directory of a run, or of its web page"
            )
        return Path(directory).resolve()
    if train and not (SITE_MODEL / "metrics.json").is_file():
        command = "import sys; from bertlab.cli.main import main; sys.exit(main(sys.argv[1:]))"
        # Deeper than the demo's own, whose two layers learn fastest: the page shows what layers do.
        how = ["--resume"] if SITE_MODEL.is_dir() else ["--num_hidden_layers", "4"]
        words = ["demo", "--output", str(SITE_MODEL), *how]
        if subprocess.run([sys.executable, "-c", command, *words], cwd=ROOT).returncode:
            sys.exit("the site's model could not be trained")
    return SITE_MODEL if (SITE_MODEL / "metrics.json").is_file() else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="directory of a run, or of its web page (bertlab export --to web)"
    )
    parser.add_argument(
        "--train", action="store_true", help="train that model first, where there is none"
    )
    options = parser.parse_args()
    model = model_for_site(options.model, options.train)
    staged = stage(model)
    problems = check(staged)
    if problems:
        sys.exit("The site has problems:\n" + "\n".join(f"  {problem}" for problem in problems))
    count = len(list(staged.rglob("*.ipynb")))
    print(f"{count} notebooks staged in _proc: front matter, links and sidebar are in order")
    if model is None:
        print("No model lives in the pages: --train makes one, --model DIRECTORY takes one")
    if find_quarto():
        render(staged)
    else:
        print(GET_QUARTO)


if __name__ == "__main__":
    main()
