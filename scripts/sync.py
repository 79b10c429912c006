"""Write everything that is generated from the notebooks and settings.ini: run `python scripts/sync.py`.

The public address is in settings.ini alone. From there it is written into each notebook
(the link `[Open in Colab](colab)`, the links and commands in `PLACES`, the hidden set-up cell),
into README.md, which is nbs/index.ipynb as Markdown, and into pyproject.toml's [project.urls].
The course's titles, links and map are written from nbs/course/spine.toml, the sidebar of the site from there and
from the notebooks' names.
"""

import base64
import configparser
import json
import os
import posixpath
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import hidden
import spine

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SETUP_MARK = "# setup"
# The chapters in reading order: folders of nbs/ and bertlab/, section titles, and what each teaches.
CHAPTERS = {
    "core": ("Core", "files, durations, names, devices and plots"),
    "data": ("Data", "from a text on disk to a masked batch"),
    "model": ("Model", "from token ids to a loss, one document at a time"),
    "optim": ("Optimization", "how each weight is updated, and when"),
    "train": ("Training", "a training loop that survives interruptions"),
    "finetuning": ("Fine-tuning", "from a checkpoint and labels to a score with its baselines"),
    "embeddings": ("Embeddings", "one text, one vector, and search"),
    "explorers": ("Explorers", "interactive views of data, models and runs"),
    "cli": ("Command line", "every command as a plain function"),
}
# With the package of the course, which has no public names.
PACKAGES = {**CHAPTERS, "course": ("Course", "checks of puzzles and exercises")}
# Pages about the whole package, listed before the chapters.
PAGES = ("parts.ipynb", "training_path.ipynb", "extending.ipynb")
# Guides in the order of the sidebar; others follow them.
GUIDES = ("install", "own_text", "configurations", "own_tokenizer", "resume", "finetune_csv", "named_entities",
          "continue_model", "save_and_share", "serve", "search", "sentence_transformers", "long_documents", "devices",
          "out_of_memory", "several_machines", "diagnose", "migrate", "migrate_transformers", "own_parts",
          "faq")  # fmt: skip
# Between these two lines of nbs/course/index.ipynb is the map; in nbs/index.ipynb the course's pages.
MAP_BEGIN, MAP_END = "<!-- course: written by scripts/sync.py -->", "<!-- end of course -->"
CHECKS_BEGIN, CHECKS_END = "# checks: written by scripts/sync.py", "# end of checks"
# Between these two lines of nbs/parts.ipynb is the table of all parts.
PARTS_BEGIN, PARTS_END = "<!-- parts: written by scripts/sync.py -->", "<!-- end of parts -->"
# The same for nbs/encoders.ipynb, and its columns: names of benchmarks/families.py, and titles.
ENCODERS_BEGIN, ENCODERS_END = (
    "<!-- encoders: written by scripts/sync.py -->",
    "<!-- end of encoders -->",
)
USES = {"rows": "rows", "fill mask": "masks", "classification": "texts", "tokens": "tags", "answers": "answers",
        "embeddings": "vectors", "lora": "LoRA", "pretraining": "pretraining", "onnx": "ONNX"}  # fmt: skip


@dataclass(frozen=True)
class Address:
    "The public address of the project, read from settings.ini."

    user: str
    repo: str
    branch: str
    git_url: str
    site_url: str
    pip_name: str
    version: str
    install_from: str

    @classmethod
    def read(cls, root: Path) -> "Address":
        config = configparser.ConfigParser()
        config.read(root / "settings.ini", encoding="utf-8")
        d = config["DEFAULT"]
        site_url = d["doc_host"] + d["doc_baseurl"]
        names = ("pip_name", "version", "install_from")
        return cls(d["user"], d["repo"], d["branch"], d["git_url"], site_url, *map(d.get, names))

    def colab(self, notebook: str) -> str:
        "Return the page on Colab of a notebook, given its path in the repository."
        return f"https://colab.research.google.com/github/{self.user}/{self.repo}/blob/{self.branch}/{notebook}"

    def requirement(self, extras: str = "") -> str:
        "Return what `pip install` takes, with extras such as `[export]`."
        wheel = f"{self.pip_name.replace('-', '_')}-{self.version}-py3-none-any.whl"
        sources = {
            "git": f" @ git+{self.git_url}@{self.branch}",
            "wheel": f" @ {self.git_url}/releases/download/v{self.version}/{wheel}",
            "index": "",
        }
        return f"{self.pip_name}{extras}{sources[self.install_from]}"


# Where Markdown may name the address: a pattern, and what it is replaced by.
PLACES = [
    (r"\[Open in Colab\]\([^)]*\)", lambda a, nb: f"[Open in Colab]({a.colab(nb)})"),  # (colab)
    (
        r"\[Documentation\]\((?:site|https?:[^)]*)\)",
        lambda a, nb: f"[Documentation]({a.site_url})",
    ),  # (site)
    (r"\[Source\]\((?:source|https?:[^)]*)\)", lambda a, nb: f"[Source]({a.git_url})"),  # (source)
    (
        r"\[Issues\]\((?:issues|https?:[^)]*)\)",
        lambda a, nb: f"[Issues]({a.git_url}/issues)",
    ),  # (issues)
    (
        r"git clone (?:ADDRESS|https?:\S+)",
        lambda a, nb: f"git clone {a.git_url}",
    ),  # git clone ADDRESS
    (r"(?<=\ncd )(?:REPO|\S+)(?=\nmake )", lambda a, nb: a.repo),  # cd REPO, before a line of make
]


# pip install "bertlab[EXTRAS]" in Markdown, and the constant from which the package makes its hints.
REQUIREMENT = re.compile(r'(?<=pip install ")bertlab[\w-]*(\[[a-z,]+\])?(?: @ [^"]*)?(?=")')
CONSTANT = re.compile(r'(?<=^REQUIREMENT = ")[^"]*(?=")', re.MULTILINE)


def fill(text: str, address: Address, notebook: str) -> str:
    "Fill the address into Markdown."
    for pattern, value in PLACES:
        text = re.sub(pattern, lambda match, value=value: value(address, notebook), text)
    return REQUIREMENT.sub(lambda match: address.requirement(match[1] or ""), text)


# What a page says that it needs beyond bertlab itself.
NEEDED_EXTRAS = re.compile(r'needs? `pip install "bertlab[\w-]*(\[[a-z,]+\])[^"]*"`')


def extra_packages(root: Path, extras: str) -> list[str]:
    "Return the names of the packages that extras such as `[export]` bring."
    listed = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = listed["optional-dependencies"]
    names = [name for extra in re.findall(r"\w+", extras) for name in requirements[extra]]
    return [re.match(r"[\w-]+", name)[0] for name in names]


def setup_source(root: Path, address: Address, extras: str = "") -> str:
    """Return the hidden cell that installs what is missing, as on Colab.

    It asks for the distribution by name, since another package is called `bertlab` on the index,
    and lets pip print, since Colab offers to restart the session according to what pip prints.
    """
    needed = [address.pip_name, *extra_packages(root, extras)]
    return "\n".join(
        [
            "#| hide",
            "#| eval: false",
            SETUP_MARK,
            "from importlib.metadata import PackageNotFoundError, version",
            "",
            "try:",
            *(f'    version("{name}")' for name in needed),
            "except PackageNotFoundError:",
            f'    %pip install "{address.requirement(extras)}"',
            "from bertlab.core.devices import prepare_session",
            "",
            "prepare_session()",
        ]
    )


def is_setup(source: str) -> bool:
    lines = [line.strip() for line in source.splitlines()]
    return SETUP_MARK in lines and "#| hide" in lines and "#| eval: false" in lines


def write_whole(path: Path, content: str | bytes) -> None:
    "Write a file atomically, and only if its content changes."
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".tmp")
    new.write_bytes(data)
    os.replace(new, path)


def notebooks(root: Path) -> list[Path]:
    paths = (root / "nbs").rglob("*.ipynb")
    return sorted(
        path for path in paths if not any(part[0] in "._" for part in path.relative_to(root).parts)
    )


def as_notebook(notebook: dict) -> str:
    return json.dumps(notebook, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def source_of(cell: dict) -> str:
    return "".join(cell["source"])


WIDGET = "application/vnd.jupyter.widget-view+json"
STATIC = {"text/html", "image/png", "image/svg+xml"}
# Warnings of installed packages, which differ from machine to machine.
NOISE = re.compile(r"site-packages|torch/distributed/|gemm_4bit")


# A progress bar of tqdm: 12%|███ | 3/25, or 90doc [00:00, 1487.12doc/s].
BAR = re.compile(r"\d% ?\|[#\d█▉▊▋▌▍▎▏ ]*\||\[\d[\d:]*(?:<[\d:?]+)?, +[^\]]*/s")


def as_terminal(text: str) -> str:
    "Return what a terminal shows of a printed text in the end, without progress bars."
    lines = text.replace("\r\n", "\n").split("\n")
    shown = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    return "\n".join(line for line in shown if not BAR.search(line))


def clean_outputs(path: Path) -> None:
    """Keep what a reader without a kernel needs: static forms of widgets, compact figures, and what commands print.

    Live widgets, progress bars and warnings of other packages are removed; figures are stored at the size that the page shows.
    """
    from bertlab.core.plots import compact_png

    notebook = json.loads(path.read_text(encoding="utf-8"))
    notebook["metadata"].pop("widgets", None)
    for cell in notebook["cells"]:
        outputs = cell.get("outputs", [])
        printed = "".join("".join(output.get("text", "")) for output in outputs)
        if printed != as_terminal(printed) and re.search("^!", source_of(cell), re.MULTILINE):
            lines = as_terminal(printed).splitlines(keepends=True)
            outputs = cell["outputs"] = [{**outputs[0], "text": lines}]
        for output in outputs:
            data = output.get("data", {})
            if data.keys() & STATIC:
                data.pop(WIDGET, None)
            if png := "".join(data.get("image/png", "")):
                shown = output["metadata"].pop("image/png", {})
                small = compact_png(base64.b64decode(png), shown.get("width"))
                data["image/png"] = base64.b64encode(small).decode()
        if outputs:
            cell["outputs"] = [
                output
                for output in outputs
                if WIDGET not in output.get("data", {})
                and not "".join(output.get("data", {}).get("text/html", "")).startswith("<progress")
                and not (output.get("name") == "stderr" and NOISE.search("".join(output["text"])))
            ]
    write_whole(path, as_notebook(notebook))


def sync_notebook(path: Path, root: Path, address: Address) -> None:
    "Fill the address into one notebook, in nbdev_clean's format."
    notebook = json.loads(path.read_text(encoding="utf-8"))
    name = path.relative_to(root).as_posix()
    matches = (
        NEEDED_EXTRAS.search(source_of(cell))
        for cell in notebook["cells"]
        if cell["cell_type"] == "markdown"
    )
    extras = next((match[1] for match in matches if match), "")
    for cell in notebook["cells"]:
        old = new = source_of(cell)
        if cell["cell_type"] == "markdown":
            new = fill(old, address, name)
        elif is_setup(old):
            new = setup_source(root, address, extras)
        else:
            new = CONSTANT.sub(lambda _: address.requirement("{extras}"), old)
        if new != old:
            cell["source"] = new.splitlines(keepends=True)
        for output in cell.get("outputs", []):
            if "text" in output:  # a message that names the command to install with
                printed = fill("".join(output["text"]), address, name)
                output["text"] = printed.splitlines(keepends=True)
    notebook["cells"] = hidden.hide(notebook["cells"])
    write_whole(path, as_notebook(notebook))


def sync_urls(root: Path, address: Address) -> None:
    "Write [project.urls] of pyproject.toml."
    path = root / "pyproject.toml"
    urls = {
        "Homepage": address.git_url,
        "Documentation": address.site_url,
        "Issues": f"{address.git_url}/issues",
        "Changelog": f"{address.git_url}/blob/{address.branch}/CHANGELOG.md",
    }
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    pattern = r"(?<=^\[project\.urls\]\n)(?:\w+ = .*\n)*"
    new, count = re.subn(
        pattern, lambda _: lines, path.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    if count != 1:
        sys.exit("pyproject.toml needs one [project.urls] section")
    write_whole(path, new)


def directives(source: str) -> dict[str, str]:
    "Return the `#| name: value` lines at the top of a code cell."
    marks = {}
    for line in source.splitlines():
        match = re.match(r"\s*#\|\s*([\w-]+):?\s*(.*)", line)
        if match:
            marks[match[1]] = match[2].strip().strip('"')
        elif line.strip():
            break
    return marks


def fenced(text: str, language: str = "") -> str:
    fence = "````" if "```" in text else "```"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def output_markdown(output: dict, alt: str, picture: str) -> tuple[str, dict[str, bytes]]:
    "Return an output as Markdown, with the picture files that it needs."
    if output["output_type"] == "stream":
        return fenced("".join(output["text"]), "text"), {}
    data = output.get("data", {})
    if "image/png" in data:
        return f"![{alt}]({picture})\n", {picture: base64.b64decode("".join(data["image/png"]))}
    if "text/markdown" in data:
        return "".join(data["text/markdown"]).rstrip() + "\n", {}
    if "text/plain" in data:
        return fenced("".join(data["text/plain"]), "text"), {}
    return "", {}


def relative_to_top(text: str) -> str:
    "Rewrite the links of a page in nbs/ as links from the root of the repository."

    def move(match: re.Match) -> str:
        target = match[2]
        if re.match(r"[a-z]+:|#|/", target):
            return match[0]
        return f"{match[1]}({posixpath.normpath(posixpath.join('nbs', target))})"

    return re.sub(r"(!?\[[^\]]*\])\(([^)\s]+)\)", move, text)


def readme(root: Path) -> dict[str, bytes]:
    "Return README.md and its pictures: nbs/index.ipynb without hidden cells and directives."
    notebook = json.loads((root / "nbs/index.ipynb").read_text(encoding="utf-8"))
    parts, files = ["<!-- Written by scripts/sync.py from nbs/index.ipynb: edit that. -->\n"], {}
    for cell in notebook["cells"]:
        source = source_of(cell)
        if cell["cell_type"] == "markdown":
            parts.append(relative_to_top(source).rstrip() + "\n")
            continue
        marks = directives(source)
        if cell["cell_type"] != "code" or {"hide", "default_exp"} & marks.keys():
            continue
        code = "\n".join(line for line in source.splitlines() if not line.startswith("#|"))
        if marks.get("echo") != "false" and code.strip():
            parts.append(fenced(code, "python"))
        for output in cell["outputs"]:
            picture = f"README_files/figure_{len(files) + 1}.png"
            text, pictures = output_markdown(output, marks.get("fig-alt", ""), picture)
            parts.append(text)
            files.update(pictures)
    files["README.md"] = "\n".join(part for part in parts if part).encode()
    return files


def pages_of(chapter: str, names: list[str]) -> list[str]:
    "Return the pages of a chapter: its index, then its parts by number."
    members = [name for name in names if name.startswith(f"{chapter}/")]
    return sorted(members, key=lambda name: (name != f"{chapter}/index.ipynb", name))


def course_pages(root: Path, names: list[str]) -> list[str]:
    "Return the pages of the course: its index, the pages of the list, and those of its checks."
    pages = ["course/index.ipynb", *(f"course/{page.file}" for page in spine.read(root))]
    return pages + [name for name in names if name.startswith("course/checks/")]


def guide_pages(names: list[str]) -> list[str]:
    "Return the guides among some pages, in the order of GUIDES."
    order = {f"guides/{name}.ipynb": position for position, name in enumerate(GUIDES)}
    return sorted(
        (name for name in names if name.startswith("guides/")),
        key=lambda name: (order.get(name, 99), name),
    )


def title_of(path: Path) -> str:
    "Return the first-level heading of a notebook."
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "markdown" and (match := re.match(r"# (.+)", source_of(cell))):
            return match[1].strip()
    sys.exit(f"{path} has no title: begin its first text cell with `# Title`")


def parts_table(root: Path) -> str:
    "Return a Markdown table of the chapters with links to their parts."
    names = [path.relative_to(root / "nbs").as_posix() for path in notebooks(root)]
    lines = ["| chapter | what it teaches | its parts, in reading order |", "|---|---|---|"]
    for chapter, (_, sentence) in CHAPTERS.items():
        pages = pages_of(chapter, names)
        links = {name: f"[{title_of(root / 'nbs' / name)}]({name})" for name in pages}
        index = f"{chapter}/index.ipynb"
        head = f"[{chapter}]({index})" if index in links else chapter
        parts = ", ".join(link for name, link in links.items() if name != index)
        lines.append(f"| **{head}** | {sentence} | {parts} |")
    return "\n".join(lines)


def encoders_table(root: Path) -> str:
    "Return a Markdown table of what each family can be used for, and a list of why not."
    families = json.loads((root / "benchmarks/results/families.json").read_text(encoding="utf-8"))
    lines = [f"| family | {' | '.join(USES.values())} |", "|---" * (1 + len(USES)) + "|"]
    reasons: dict[str, int] = {}
    for family, row in families.items():
        cells = [row["rows"] if row["rows"] == "packed" else "padded"]
        for use in list(USES)[1:]:
            reason = row.get(use, "–")  # not tried
            is_number = reason not in ("yes", "–")
            number = reasons.setdefault(reason, len(reasons) + 1) if is_number else None
            cells.append(f"no ({number})" if number else reason)
        lines.append(f"| `{family}` | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items())]
    return "\n".join(lines)


def sync_table(root: Path, page: str, begin: str, end: str, table: str) -> None:
    "Write a table between two marks of a page."
    path = root / page
    notebook = json.loads(path.read_text(encoding="utf-8"))
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    total = 0
    for cell in notebook["cells"]:
        new, count = pattern.subn(lambda _: f"{begin}\n{table}\n{end}", source_of(cell))
        if count:
            cell["source"], total = new.splitlines(keepends=True), total + count
    if total != 1:
        sys.exit(f"{page} must hold {begin} and {end} once; found {total}")
    write_whole(path, as_notebook(notebook))


def sync_course(root: Path) -> None:
    "Write all that follows from the list of the course's pages."
    folder, pages = root / spine.FOLDER, spine.read(root)
    spine.renumber(root, pages)
    texts, counts = {}, {}
    for page in pages:
        notebook = json.loads((folder / page.file).read_text(encoding="utf-8"))
        prose = [cell for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
        filled = spine.fill([source_of(cell) for cell in prose], pages, page)
        for cell, source in zip(prose, filled):
            cell["source"] = source.splitlines(keepends=True)
        texts[page.name] = filled[0]
        code = "\n".join(source_of(c) for c in notebook["cells"] if c["cell_type"] == "code")
        counts[page.name] = len(re.findall(r"^@recorded\(", code, re.MULTILINE))
        write_whole(folder / page.file, as_notebook(notebook))
    sync_table(root, "nbs/course/index.ipynb", MAP_BEGIN, MAP_END, spine.course_map(pages, texts))
    sync_table(root, "nbs/index.ipynb", MAP_BEGIN, MAP_END, spine.summary(pages))
    checks = "".join(
        f'    "{p.name}": ("{p.title}", {counts[p.name]}),\n' for p in pages if counts[p.name]
    )
    sync_table(root, "nbs/course/index.ipynb", CHECKS_BEGIN, CHECKS_END, f"CHECKS = {{\n{checks}}}")


def sidebar(root: Path) -> str:
    "Return the sidebars of the site's four sections; scripts/docs.py adds the reference."
    names = [path.relative_to(root / "nbs").as_posix() for path in notebooks(root)]
    lines = ["# Written by scripts/sync.py from the notebooks' names.", "website:", "  sidebar:"]

    def bar(identifier: str, title: str) -> None:
        lines.extend([f"    - id: {identifier}", f"      title: {title}"])
        lines.extend(["      style: docked", "      collapse-level: 1", "      contents:"])

    def entries(members: list[str], depth: int = 8) -> None:
        lines.extend(f"{' ' * depth}- {name}" for name in members)

    def section(title: str, members: list[str]) -> None:
        index = members[0] if members[0].endswith("/index.ipynb") else None
        lines.append(f"        - section: {title}")
        if index:
            lines.append(f"          href: {index}")
        lines.append("          contents:")
        entries(members[1:] if index else members, 12)

    bar("guides", "Guides")
    entries(guide_pages(names))
    bar("course", "Course")
    section("Course", course_pages(root, names))
    bar("how", "How it works")
    entries(["glass.qmd", *(name for name in PAGES if name in names)])
    for chapter, (title, _) in CHAPTERS.items():
        if members := pages_of(chapter, names):
            section(title, members)
    bar("benchmarks", "Benchmarks")
    measured = ["benchmarks.ipynb", "measurements.ipynb", "experiments.ipynb", "encoders.ipynb"]
    entries([name for name in measured if name in names])
    bar("reference", "Reference")
    # The page at nbs/index.ipynb is the README; the site begins with a page of its own.
    others = ("index.ipynb", *PAGES, *measured)
    pages = [name for name in names if name not in others and "/" not in name]
    entries(["overview.ipynb", *pages, "changelog.qmd", "cite.qmd"])
    return "\n".join(lines) + "\n"


def package_files(root: Path) -> dict[str, str]:
    """Return the package's files that no notebook exports and that follow from `bertlab/__init__.py`.

    A chapter's `__init__.py` imports its parts on first use, so that `bertlab.data.packing.best_fit_decreasing`
    works after `import bertlab`; the stubs (`.pyi`) tell editors and type checkers what is there.
    """
    space: dict = {"__name__": "bertlab"}
    exec((root / "bertlab/__init__.py").read_text(encoding="utf-8"), space)
    stub = ["# Written by scripts/sync.py from _FACE in __init__.py.", ""]
    stub += [f"from . import {name} as {name}" for name in space["_CHAPTERS"]]
    for module, names in space["_FACE"].items():
        stub += [f"from .{module} import {name} as {name}" for name in names.split()]
    files = {"bertlab/__init__.pyi": "\n".join([*stub, "", "__version__: str", ""])}
    modules = [
        module for module, _ in sorted(modules_made(root).items(), key=lambda item: item[1].name)
    ]
    for chapter, (_, sentence) in PACKAGES.items():
        parts = [module.partition(".")[2] for module in modules if module.startswith(f"{chapter}.")]
        listed = "".join(f'    "{part}",\n' for part in parts)
        files[f"bertlab/{chapter}/__init__.py"] = (
            f'"{sentence[0].upper()}{sentence[1:]}."\n\n# Written by scripts/sync.py from the notebooks\' names.\n'
            f"from .. import _lazy_parts\n\n__getattr__, __dir__ = _lazy_parts(__name__, (\n{listed}))\n"
        )
        imports = "".join(f"from . import {part} as {part}\n" for part in parts)
        files[f"bertlab/{chapter}/__init__.pyi"] = (
            f"# Written by scripts/sync.py from the notebooks' names.\n\n{imports}"
        )
    return files


def modules_made(root: Path) -> dict[str, Path]:
    "Return the notebook of each exported module, by `chapter.name`."
    notebook_of = {}
    for path in notebooks(root):
        for name in re.findall(r"#\|\s*default_exp\s+([\w.]+)", path.read_text(encoding="utf-8")):
            notebook_of[name] = path
    return notebook_of


def modules_without_notebook(root: Path) -> tuple[list[Path], list[Path]]:
    "Return the modules without a notebook: those exported earlier, and those written by hand."
    exported = modules_made(root)
    paths = [path for path in sorted((root / "bertlab").rglob("[!_]*.py"))
             if ".".join(path.relative_to(root / "bertlab").with_suffix("").parts) not in exported]  # fmt: skip
    by_hand = [
        path
        for path in paths
        if "# AUTOGENERATED! DO NOT EDIT!" not in path.read_text(encoding="utf-8")
    ]
    return [path for path in paths if path not in by_hand], by_hand


def export_and_clean(root: Path) -> None:
    "Run nbdev's export and clean, and remove modules whose notebook is gone."
    os.environ.pop("IN_TEST", None)  # nbdev exports nothing where this is set
    os.chdir(root)
    from nbdev.clean import nbdev_clean
    from nbdev.doclinks import nbdev_export

    for path in modules_without_notebook(root)[0]:
        print(f"removed {path.relative_to(root)}: no notebook exports to it")
        path.unlink()
    nbdev_export.__wrapped__()
    nbdev_clean.__wrapped__()


def sync(root: Path) -> None:
    address = Address.read(root)
    if by_hand := modules_without_notebook(root)[1]:
        sys.exit(f"{by_hand[0].relative_to(root)} is written by hand, and the package is exported from notebooks: "
                 "move its code into one, or the file to another place")  # fmt: skip
    sync_course(root)
    sync_table(root, "nbs/parts.ipynb", PARTS_BEGIN, PARTS_END, parts_table(root))
    sync_table(root, "nbs/encoders.ipynb", ENCODERS_BEGIN, ENCODERS_END, encoders_table(root))
    for path in notebooks(root):
        sync_notebook(path, root, address)
    export_and_clean(root)
    for path in notebooks(root):
        clean_outputs(path)
    files = readme(root)
    for path in (root / "README_files").glob("*"):
        if path.relative_to(root).as_posix() not in files:
            path.unlink()
    for name, content in files.items():
        write_whole(root / name, content)
    sync_urls(root, address)
    guide = root / "CONTRIBUTING.md"
    write_whole(guide, fill(guide.read_text(encoding="utf-8"), address, ""))
    write_whole(root / "nbs/sidebar.yml", sidebar(root))
    for name, text in package_files(root).items():
        write_whole(root / name, text)


if __name__ == "__main__":
    sync(Path(__file__).resolve().parent.parent)
