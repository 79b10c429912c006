"""Build the reference pages of names, commands and settings from the package's source.

Nothing of the package is run except the table of commands, which imports nothing heavy. A signature is shown as
written, with the comments of its parameters, and its code is folded below it.
"""

import ast
import re
import sys
import textwrap
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from sync import CHAPTERS, PACKAGES  # noqa: E402


@dataclass
class Definition:
    "A function, class or method and its source."

    module: str
    name: str  # Class.method for a method
    head: str  # as it is written, comments included
    doc: str
    source: str
    line: int


@dataclass
class Module:
    "A module of the package, its notebook, and its definitions."

    name: str
    notebook: str  # relative to nbs/
    doc: str
    found: dict[str, Definition] = field(default_factory=dict)

    @property
    def public(self) -> list[str]:
        return [name for name in self.found if "." not in name and not name.startswith("_")]


def head_of(node: ast.AST, lines: list[str]) -> str:
    "Return the signature as written; for a class with its fields or `__init__`."
    if not isinstance(node, ast.ClassDef):
        begin = min([node.lineno, *(part.lineno for part in node.decorator_list)])
        head = "\n".join(lines[begin - 1 : body_begin(node) - 1]).rstrip()
        return textwrap.dedent(head)
    bases = ", ".join(map(ast.unparse, [*node.bases, *(key.value for key in node.keywords)]))
    text = [f"@{ast.unparse(part)}" for part in node.decorator_list]
    text.append(f"class {node.name}({bases}):" if bases else f"class {node.name}:")
    makes = next(
        (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None
    )
    if makes:
        text.append(textwrap.indent(head_of(makes, lines), "    "))
    else:
        for part in node.body:
            if isinstance(part, ast.AnnAssign):
                text.append(textwrap.dedent("\n".join(lines[part.lineno - 1 : part.end_lineno])))
                text[-1] = textwrap.indent(text[-1], "    ")
    return "\n".join(text)


def body_begin(node: ast.FunctionDef) -> int:
    "Return the first line of the body of a function."
    first = node.body[0]
    return first.lineno if first.lineno > node.lineno else first.lineno + 1


def read_module(path: Path) -> Module | None:
    "Return the definitions of a module; None if no notebook exports it."
    text = path.read_text(encoding="utf-8")
    match = re.search(r"File to edit: (?:\.\./)+nbs/(\S+\.ipynb)", text[:2000])
    if not match:
        return None
    tree, lines = ast.parse(text), text.splitlines()
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    module = Module(name, match[1], ast.get_docstring(tree) or "")

    def add(node: ast.AST, prefix: str = "") -> None:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        full_name = f"{prefix}{node.name}"
        module.found.setdefault(
            full_name,
            Definition(
                name,
                full_name,
                head_of(node, lines),
                ast.get_docstring(node) or "",
                source,
                node.lineno,
            ),
        )
        if isinstance(node, ast.ClassDef):
            for inside in node.body:
                add(inside, f"{full_name}.")

    for node in tree.body:
        add(node)
    return module


@lru_cache(maxsize=1)
def modules() -> dict[str, Module]:
    "Return the modules in the order of their notebooks."
    order = list(PACKAGES)
    read = filter(None, map(read_module, sorted((ROOT / "bertlab").rglob("*.py"))))
    in_chapters = [module for module in read if module.notebook.split("/")[0] in order]
    key = lambda module: (order.index(module.notebook.split("/")[0]), module.notebook)
    return {module.name: module for module in sorted(in_chapters, key=key)}


def find(name: str, notebook: str) -> Definition | None:
    "Find a definition by name: first in the module of the page, then in any."
    of_page = [module for module in modules().values() if module.notebook == notebook]
    for module in [*of_page, *modules().values()]:
        if name in module.found:
            return module.found[name]
    return None


def anchor(name: str) -> str:
    "Return the identifier that Pandoc gives to a heading of this name."
    return re.sub(r"^[^a-z]+", "", name.lower())


def document(definition: Definition, source_url: str) -> str:
    "Return the documentation of a name as Markdown."
    doc = definition.doc.strip()
    url = f"{source_url}/{definition.module.replace('.', '/')}.py#L{definition.line}"
    parts = [
        f"### {definition.name} {{#{anchor(definition.name)} .name}}",
        "",
        "```python",
        definition.head,
        "```",
        "",
    ]
    if doc:
        parts += [separate_lists(doc), ""]
    parts += ["<details class=\"code\"><summary>Code</summary>", "", "```python", definition.source, "```", "",
              f"[In the repository]({url})", "", "</details>"]  # fmt: skip
    return "\n".join(parts)


# --- Markdown of notebooks as the site's Markdown -------------------------------------------------


def outside_fences(text: str, change) -> str:
    "Apply a change to the parts of a text outside code fences."
    parts = re.split(r"(^(`{3,}).*?^\2[^\n]*$)", text, flags=re.MULTILINE | re.DOTALL)
    # Each fence gives two groups: the whole, and its mark.
    return "".join(
        part if index % 3 == 1 else change(part)
        for index, part in enumerate(parts)
        if index % 3 < 2
    )


LIST_ITEM = r"(?:[-*+]|\d+[.)])\s+\S"


def separate_lists(text: str) -> str:
    "Put an empty line before a list that directly follows a paragraph, as Pandoc requires."
    pattern = re.compile(rf"^(?!\s*{LIST_ITEM})(\S[^\n]*)\n(?={LIST_ITEM})", flags=re.MULTILINE)
    return outside_fences(text, lambda part: pattern.sub(r"\1\n\n", part))


def telling(name: str) -> bool:
    "Return whether a word can only be a name in code."
    return (
        "_" in name.strip("_")
        or "." in name
        or bool(re.search(r"[a-z][A-Z]|^[A-Z][a-z]+[A-Z]|^[A-Z]{2,}[a-z]", name))
    )


@lru_cache(maxsize=1)
def places() -> dict[str, tuple[str, str]]:
    "Return page and anchor of each unambiguous name."
    targets: dict[str, set[tuple[str, str]]] = {}
    for module in modules().values():
        for name in module.public:
            targets.setdefault(name, set()).add((module.notebook, anchor(name)))
            targets.setdefault(f"bertlab.{name}", set()).add((module.notebook, anchor(name)))
            targets.setdefault(f"{module.name}.{name}", set()).add((module.notebook, anchor(name)))
    return {name: next(iter(where)) for name, where in targets.items() if len(where) == 1}


SPAN = re.compile(r"(?<![`\\])`([A-Za-z_][\w.]*)(\(\))?`(?!`)")
LINK = re.compile(
    r"(``.+?``|!?\[(?:[^\[\]]|\[[^\]]*\])*\]\([^)]*\)|^#{1,6} .*$|<[^>]+>)", flags=re.MULTILINE
)


def add_links(text: str, page: str, explained: dict[str, set[str]]) -> str:
    "Link names in the prose of a page to their documentation, outside code, links and headings."
    import posixpath

    def link(match: re.Match) -> str:
        name = match[1]
        where = places().get(name)
        if (
            where is None
            or not (telling(name) or match[2])
            or where[1] not in explained.get(where[0], ())
        ):
            return match[0]
        target = (
            "" if where[0] == page else posixpath.relpath(where[0], posixpath.dirname(page) or ".")
        )
        return f"[{match[0]}]({target}#{where[1]})"

    def change(part: str) -> str:
        pieces = LINK.split(part)
        return "".join(
            piece if index % 2 else SPAN.sub(link, piece) for index, piece in enumerate(pieces)
        )

    return outside_fences(text, change)


# --- generated pages ------------------------------------------------------------------------------


def front(title: str, description: str, **options: str) -> list[str]:
    quoted = lambda text: '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    options = {"repo_actions": "false", **options}  # what is made has no file to edit
    extra = [f"{key.replace('_', '-')}: {value}" for key, value in options.items()]
    return [
        "---",
        f"title: {quoted(title)}",
        f"description: {quoted(description)}",
        *extra,
        "---",
        "",
    ]


def cell(text: object) -> str:
    "Escape text for a Markdown table."
    return re.sub(r"\s+", " ", str(text)).replace("|", "\\|").replace("<", "&lt;").strip()


def first_line(doc: str) -> str:
    return doc.split("\n")[0]


FILTER = """\
```{=html}
<p class="filter" hidden><label>Show names with <input type="search" data-filters="table" autocomplete="off"></label>
<span role="status"></span></p>
<script>
"use strict";
addEventListener("DOMContentLoaded", () => {
  const place = document.querySelector(".filter"), box = place.querySelector("input");
  place.hidden = false;
  box.addEventListener("input", () => {
    const wanted = box.value.trim().toLowerCase();
    let count = 0;
    for (const row of document.querySelectorAll("main tbody tr")) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
      count += !row.hidden;
    }
    place.querySelector("[role=status]").textContent = wanted ? `${count} found` : "";
  });
});
</script>
```
"""


def api_page(chapter: str, explained: dict[str, set[str]]) -> str:
    "Return the page with the public names of a chapter."
    import bertlab

    title, sentence = CHAPTERS[chapter]
    parts = front(f"Names of bertlab.{chapter}", f"{title}: {sentence}.")
    parts += [
        "Names in bold can be had from `bertlab` itself, too: `bertlab.make_trainer`, for example.",
        "",
        FILTER,
    ]
    for module in modules().values():
        if not module.notebook.startswith(f"{chapter}/") or not module.public:
            continue
        page = f"../../{module.notebook}"
        parts += [
            f"## {module.name} {{#{module.name.replace('.', '-')}}}",
            "",
            f"{module.doc} [Explained]({page})",
            "",
        ]
        parts += ["| name | what it is |", "|:---|:-------|"]
        for name in sorted(module.public, key=str.lower):
            mark = "**" if bertlab._PLACES.get(name) == module.name.removeprefix("bertlab.") else ""
            is_explained = anchor(name) in explained.get(module.notebook, ())
            linked = f"[`{name}`]({page}#{anchor(name)})" if is_explained else f"`{name}`"
            parts.append(f"| {mark}{linked}{mark} | {cell(first_line(module.found[name].doc))} |")
        parts.append("")
    return "\n".join(parts)


def api_index() -> str:
    "Return the page with the chapters of the package."
    parts = front("Names in Python", "Every public name of the package, a page for each chapter.")
    parts += ["| chapter | what it is for | names |", "|:---|:-------|---:|"]
    for chapter, (_, sentence) in CHAPTERS.items():
        count = sum(
            len(m.public) for m in modules().values() if m.notebook.startswith(f"{chapter}/")
        )
        parts.append(f"| [bertlab.{chapter}](reference/api/{chapter}.qmd) | {sentence} | {count} |")
    return "\n".join([*parts, ""])


def commands() -> dict:
    from bertlab.cli.commands import COMMANDS

    return COMMANDS


def command_file(name: str) -> str:
    return f"reference/commands/{name.replace(' ', '-')}.qmd"


def command_page(name: str) -> str:
    "Return the page of a command, from its `--help`."
    import os
    from unittest.mock import patch

    command = commands()[name]
    with patch.dict(os.environ, {"COLUMNS": "88"}):
        text = command.help()
    about = re.sub(r"\s+", " ", command.about)
    parts = front(f"bertlab {name}", f"{about[0].upper()}{about[1:]}.")
    parts += ["```text", text.rstrip(), "```", ""]
    return "\n".join(parts)


def commands_index() -> str:
    parts = front("Commands", "What the program bertlab can do, with a page for each command.")
    parts += ["Each command answers `--help`; the pages below are made from it.", ""]
    parts += ["| command | what it does |", "|:---|:-------|"]
    for name, command in commands().items():
        target = command_file(name).removeprefix("reference/commands/")
        parts.append(f"| [`bertlab {name}`]({target}) | {cell(command.about)} |")
    return "\n".join([*parts, ""])


def code_in_table(text: str) -> str:
    "Format code in a table cell."
    import html

    if "|" not in text:
        return f"`{text}`"
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def shown_default(value: object) -> str:
    import json

    return code_in_table(json.dumps(value))


def settings_page(name: str) -> str:
    "Return the page with every key of the configuration of a command."
    from bertlab.cli.parser import type_name

    command = commands()[name]
    parts = front(f"Settings of bertlab {name}", f"Every key of a configuration file for bertlab {name}, "
                  "with its default and what it means.")  # fmt: skip
    parts += [f"A file for `bertlab {name} --config FILE` holds sections, and in each of them any of these keys. "
              "On the command line a key is a flag: `--section.key value`.", "", FILTER]  # fmt: skip
    section = None
    for key, option in command.options.items():
        here, _, last = key.rpartition(".")
        if here != section:
            section = here
            parts += ["", f"## {section or 'Top of the file'} {{#{section or 'top'}}}", ""]
            parts += ["| key | type | default | meaning |", "|:--|:--|:--|:-----|"]
        default = "required" if option.required else shown_default(option.default)
        meaning = cell(option.help)
        parts.append(
            f"| `{last}` | {code_in_table(type_name(option.type))} | {default} | {meaning} |"
        )
    return "\n".join([*parts, ""])


def configured() -> list[str]:
    "Return the commands that read configuration files."
    return [name for name, command in commands().items() if set(command.sections) - {""}]


def settings_file(name: str) -> str:
    return f"reference/settings/{name.replace(' ', '-')}.qmd"


def pages(explained: dict[str, set[str]]) -> dict[str, str]:
    "Return all pages of the reference by file."
    texts = {"api.qmd": api_index(), "reference/commands/index.qmd": commands_index()}
    texts |= {command_file(name): command_page(name) for name in commands()}
    texts |= {settings_file(name): settings_page(name) for name in configured()}
    texts |= {f"reference/api/{chapter}.qmd": api_page(chapter, explained) for chapter in CHAPTERS}
    return texts


def sidebar() -> list[dict]:
    "Return the sidebar entries of the reference."
    titled = lambda file, text: {"href": file, "text": text}
    return [
        {"section": "Commands", "href": "reference/commands/index.qmd",
         "contents": [titled(command_file(name), name) for name in commands()]},
        {"section": "Settings of a file", "contents": [titled(settings_file(name), name) for name in configured()]},
        {"section": "Names in Python", "href": "api.qmd",
         "contents": [titled(f"reference/api/{chapter}.qmd", chapter) for chapter in CHAPTERS]},
    ]  # fmt: skip
