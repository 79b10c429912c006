"""Build the reference pages of names, commands and settings from the package's source.

Nothing of the package is run except the table of commands, which imports nothing heavy. A signature is shown as
written, with the comments of its parameters, and its code is folded below it. That code is put in after the
rendering: it is a fifth of all words, and Quarto would process and index it.
"""

import ast
import html
import itertools
import json
import posixpath
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
class Parameter:
    "A parameter or field, or what is returned."

    name: str
    type: str
    default: str
    meaning: str  # its comment


@dataclass
class Definition:
    "A function, class or method and its source."

    module: str
    name: str  # Class.method for a method
    parameters: list[Parameter]
    returns: Parameter | None
    bases: list[str]  # of a class
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


def comment_of(lines: list[str], node: ast.AST, begin: int) -> str:
    "Return the comment at the end of a node's line, or else the one above its first line."
    rest = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
    if match := re.fullmatch(r"[\s,:)]*#\s*(.*)", rest):
        return match[1].strip()
    above = []
    for line in reversed(lines[: begin - 1]):
        if not line.strip().startswith("#"):
            break
        above.insert(0, line.strip().lstrip("# "))
    return " ".join(above)


def parameters_of(node: ast.AST, lines: list[str]) -> list[Parameter]:
    "Return the parameters of a function, or the fields or `__init__` parameters of a class."
    if isinstance(node, ast.ClassDef):
        makes = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
        if makes:
            return parameters_of(makes[0], lines)
        rows = [(n.target, n.annotation, n.value) for n in fields]
    else:
        names = node.args
        positional = [*names.posonlyargs, *names.args]
        missing = [None] * (len(positional) - len(names.defaults))
        pairs = list(zip(positional, [*missing, *names.defaults], strict=True))
        pairs += [(names.vararg, None)] if names.vararg else []
        pairs += zip(names.kwonlyargs, names.kw_defaults, strict=True)
        pairs += [(names.kwarg, None)] if names.kwarg else []
        rows = [
            (arg, arg.annotation, value) for arg, value in pairs if arg.arg not in ("self", "cls")
        ]
    stars = {} if isinstance(node, ast.ClassDef) else {node.args.vararg: "*", node.args.kwarg: "**"}
    text = lambda part: "" if part is None else ast.unparse(part)
    parameters = []
    for target, annotation, value in rows:
        name = target.id if isinstance(target, ast.Name) else target.arg
        # A comment above belongs to a parameter only if nothing is in front of it on its line.
        begin = target.lineno if lines[target.lineno - 1].lstrip(" *").startswith(name) else 1
        comment = comment_of(lines, value or annotation or target, begin)
        parameters.append(
            Parameter(stars.get(target, "") + name, text(annotation), text(value), comment)
        )
    return parameters


def returned(node: ast.AST, lines: list[str]) -> Parameter | None:
    "Return the type of what a function returns, with its comment; None for nothing."
    annotation = getattr(node, "returns", None)
    if annotation is None or ast.unparse(annotation) == "None":
        return None
    return Parameter("", ast.unparse(annotation), "", comment_of(lines, annotation, 1))


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
                parameters_of(node, lines),
                returned(node, lines),
                [ast.unparse(base) for base in getattr(node, "bases", [])],
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


def all_parameters(definition: Definition, page: str) -> list[Parameter]:
    "Return the parameters of a definition, with those that it takes from its bases."
    rows = {}
    if not re.search(r"^    def __init__\b", definition.source, flags=re.MULTILINE):
        for base in filter(None, (find(base, page) for base in definition.bases)):
            rows |= {row.name: row for row in all_parameters(base, page)}
    return [*(rows | {row.name: row for row in definition.parameters}).values()]


def linked_type(text: str, page: str, explained: dict[str, set[str]]) -> str:
    "Return a type as code for a table, its names of bertlab as links."
    if not text:
        return ""
    parts = re.split(r"([A-Za-z_][\w.]*)", text)
    links = {name: target for name in parts[1::2] if (target := address_of(name, page, explained))}
    if not links:
        return code_in_table(text)
    escaped = lambda part: html.escape(part).replace("|", "&#124;").replace("*", "&#42;")
    shown = (
        f'<a href="{links[part]}">{part}</a>' if part in links else escaped(part) for part in parts
    )
    return f"<code>{''.join(shown)}</code>"  # fmt: skip


def method_lines(definition: Definition, page: str, explained: dict[str, set[str]]) -> list[str]:
    "Return the table of a class's public methods, and the line of those that it inherits."
    found = modules()[definition.module].found
    prefix = f"{definition.name}."
    own = [
        name for name in found if name.startswith(prefix) and name.count(".") == prefix.count(".")
    ]
    own = [
        name for name in own if found[name].doc and not name.removeprefix(prefix).startswith("_")
    ]
    lines = []
    if own:
        lines += ["| method | what it does |", "|:--|:-----|"]
        for name in own:
            is_explained = anchor(name) in explained.get(page, ())
            last = f"`{name.removeprefix(prefix)}`"
            linked = f"[{last}](#{anchor(name)})" if is_explained else last
            lines.append(f"| {linked} | {cell(first_line(found[name].doc))} |")
        lines.append("")
    for base in definition.bases:
        target = address_of(base, page, explained)
        parent = find(base, page) if target else None
        inherited = [name.partition(".")[2] for name in modules()[parent.module].found
                     if re.match(rf"{re.escape(base)}\.[a-z]", name)] if parent else []  # fmt: skip
        inherited = [name for name in inherited if f"{prefix}{name}" not in own]
        if target:
            names = ", ".join(f"`{name}`" for name in inherited)
            lines += [f"Inherits from [`{base}`]({target}){': ' + names if names else ''}.", ""]
    return lines


def document(
    definition: Definition, source_url: str, page: str, explained: dict[str, set[str]]
) -> str:
    """Return the documentation of a name as Markdown: its docstring, parameters, methods, and a place for its code.

    A helper has no tables: its parameters and methods are read in its code, each with its comment.
    """
    parts = [f"### {definition.name} {{#{anchor(definition.name)} .name}}", ""]
    if definition.doc.strip():
        parts += [separate_lists(definition.doc.strip()), ""]
    is_helper = not is_public(modules()[definition.module], definition.name)
    passed = re.search(r"(\w+)\(\*args, \*\*options\)", definition.source)
    config = address_of(passed[1], page, explained) if passed else None
    if config:
        parts += [f"It takes a [`{passed[1]}`]({config}), or its fields as keywords.", ""]
    elif not is_helper and (parameters := all_parameters(definition, page)):
        parts += ["| parameter | type | default | meaning |", "|:--|:--|:--|:-----|"]
        for row in parameters:
            shown = code_in_table(row.default) if row.default else ""
            parts.append(
                f"| `{row.name}` | {linked_type(row.type, page, explained)} | {shown} | {cell(row.meaning)} |"
            )
        parts.append("")
    if not is_helper and (result := definition.returns):
        meaning = f": {result.meaning}" if result.meaning else ""
        parts += [f"Returns {linked_type(result.type, page, explained)}{meaning}.", ""]
    parts += [] if is_helper else method_lines(definition, page, explained)
    url = f"{source_url}/{definition.module.replace('.', '/')}.py#L{definition.line}"
    parts.append(
        f'<details class="code" data-name="{definition.module}:{definition.name}" data-url="{url}"></details>'
    )
    return "\n".join(parts)


CODE_PLACE = re.compile(
    r'<details class="code" data-name="([\w.]+):([\w.]+)" data-url="([^"]+)">\s*</details>'
)


def put_code(text: str, shown) -> str:
    "Put the code of names into a page, each as `shown` writes it from its source."

    def block(match: re.Match) -> str:
        module, name, url = match.groups()
        summary = "Code" if is_public(modules()[module], name) else "Signature and code"
        return (
            f'<details class="code"><summary>{summary}</summary>\n\n{shown(modules()[module].found[name].source)}\n\n'
            f'<p><a href="{url}">In the repository</a></p>\n\n</details>'
        )

    return CODE_PLACE.sub(block, text)


# Pandoc's classes of highlighted code, by the tokens of Pygments; the first that fits counts.
CLASSES = (
    ("Comment", "co"), ("Literal.String.Doc", "co"), ("Literal.String", "st"), ("Literal.Number.Float", "fl"),
    ("Literal.Number", "dv"), ("Keyword.Constant", "va"), ("Keyword.Namespace", "im"), ("Keyword", "cf"),
    ("Operator.Word", "kw"), ("Operator", "op"), ("Name.Builtin.Pseudo", "va"), ("Name.Builtin", "bu"),
    ("Name.Decorator", "at"), ("Name.Exception", "pp"),
)  # fmt: skip


def highlighted(source: str) -> str:
    "Return Python code as HTML, with the classes and the button that Pandoc and Quarto give it."
    from pygments.lexers import PythonLexer

    pieces = []
    for token, text in PythonLexer().get_tokens(source):
        kind = str(token).removeprefix("Token.")
        name = next((name for prefix, name in CLASSES if kind.startswith(prefix)), "")
        name = "kw" if kind == "Keyword" and text in ("class", "def", "lambda") else name
        pieces.append((name, html.escape(text, quote=False)))
    lines = [""]
    for name, group in itertools.groupby(pieces, key=lambda piece: piece[0]):
        for number, part in enumerate("".join(text for _, text in group).split("\n")):
            lines += [""] if number else []
            lines[-1] += f'<span class="{name}">{part}</span>' if name and part else part
    code = "\n".join(f"<span>{line}</span>" for line in lines).removesuffix("\n<span></span>")
    return (
        '<div class="code-copy-outer-scaffold"><div class="sourceCode"><pre tabindex="0" class="sourceCode python'
        f' code-with-copy"><code class="sourceCode python">{code}</code></pre></div>'
        '<button title="Copy to Clipboard" class="code-copy-button"><i class="bi"></i></button></div>'
    )


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


def anchors(text: str) -> set[str]:
    "Return the identifiers that Pandoc gives to the headings of a text."
    identifiers = set()
    fenced_out = re.sub(r"^(```+).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*$", fenced_out, flags=re.MULTILINE):
        if explicit := re.search(r"\{#([\w.:-]+)[^}]*\}$", heading):
            identifiers.add(explicit[1])
            continue
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        plain = re.sub(r"[^\w\s.-]", "", plain).strip().lower()
        identifiers.add(re.sub(r"^[^a-z]+", "", re.sub(r"\s+", "-", plain)) or "section")
    return identifiers


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


def address_of(name: str, page: str, explained: dict[str, set[str]]) -> str | None:
    "Return the address of a name's documentation relative to a page; None if no page explains it."
    where = places().get(name)
    if where is None or where[1] not in explained.get(where[0], ()):
        return None
    folder = posixpath.dirname(page) or "."
    return ("" if where[0] == page else posixpath.relpath(where[0], folder)) + f"#{where[1]}"


def add_links(text: str, page: str, explained: dict[str, set[str]]) -> str:
    "Link names in the prose of a page to their documentation, outside code, links and headings."

    def link(match: re.Match) -> str:
        is_name = telling(match[1]) or match[2]
        target = address_of(match[1], page, explained) if is_name else None
        return f"[{match[0]}]({target})" if target else match[0]

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
<p class="filter" hidden><label>Show rows with <input type="search" data-filters="table" autocomplete="off"></label>
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


def linked_name(module: Module, name: str, top: str, explained: dict[str, set[str]]) -> str:
    "Return a name as code, with a link to its documentation; `top` leads to the root of the site."
    is_explained = anchor(name) in explained.get(module.notebook, ())
    target = f"{top}{module.notebook}#{anchor(name)}"
    return f"[`{name}`]({target})" if is_explained else f"`{name}`"


def name_table(
    names: list[tuple[Module, str]], top: str, explained: dict[str, set[str]]
) -> list[str]:
    "Return a table of names, each with the first line of its docstring; `top` leads to the root of the site."
    lines = ["| name | what it is |", "|:---|:-------|"]
    for module, name in names:
        linked = linked_name(module, name, top, explained)
        lines.append(f"| {linked} | {cell(first_line(module.found[name].doc))} |")
    return [*lines, ""]


def is_public(module: Module, name: str) -> bool:
    "Return whether a name can be imported from `bertlab` itself."
    import bertlab

    return bertlab._PLACES.get(name) == module.name.removeprefix("bertlab.")


def names_of(chapter: str) -> list[tuple[Module, str]]:
    "Return the names of a chapter by module and alphabet."
    members = [m for m in modules().values() if m.notebook.startswith(f"{chapter}/")]
    return [(m, name) for m in members for name in sorted(m.public, key=str.lower)]


def names_page(explained: dict[str, set[str]]) -> str:
    "Return the page with every name that is not in `bertlab` itself, module by module."
    parts = front(
        "Names by module", "What the public names are made of; import these from their modules."
    )
    parts += ["[All parts](../parts.ipynb) says what each module is for.", "", FILTER]
    for chapter, (title, _) in CHAPTERS.items():
        parts += [f"# {title} {{#{chapter}}}", "", "| module | names |", "|:---|:-------|"]
        for module, named in itertools.groupby(names_of(chapter), key=lambda pair: pair[0]):
            others = [
                linked_name(*pair, "../", explained) for pair in named if not is_public(*pair)
            ]
            if others:
                parts.append(f"| [{module.name}](../{module.notebook}) | {', '.join(others)} |")
        parts.append("")
    return "\n".join(parts)


def reference_page(explained: dict[str, set[str]]) -> str:
    "Return the first page of the reference: the commands, and the names of `bertlab` itself."
    parts = front("Reference", "Every command of the program, and every name of the package.")
    parts += [
        FILTER,
        "## Commands",
        "",
        "Each command answers `--help`; follow its link for its options.",
        "",
    ]
    parts += ["| command | what it does |", "|:---|:-------|"]
    for name, command in commands().items():
        parts.append(f"| [`bertlab {name}`]({command_address(name)}) | {cell(command.about)} |")
    parts += ["", "## Public names {#public}", "", "`from bertlab import pack_best_fit` imports such a name. What they are "
              "made of is listed [by module](reference/names.qmd).", ""]  # fmt: skip
    for chapter, (title, sentence) in CHAPTERS.items():
        if public := [n for n in names_of(chapter) if is_public(*n)]:
            parts += [
                f"### {title}: {sentence} {{#{chapter}}}",
                "",
                *name_table(public, "", explained),
            ]
    return "\n".join(parts)


def commands() -> dict:
    from bertlab.cli.commands import COMMANDS

    return COMMANDS


# The pages of commands: a title, a description, and the commands that people use together.
COMMAND_PAGES = {
    "pretrain": ("Commands: pretrain", "Pretrain an encoder: demo, pretrain, validate, distill, tokenize, tune.",
                 ("pretrain", "validate", "distill", "demo", "tokenize", "tune")),
    "finetune": ("Commands: fine-tune", "Fine-tune on labels, and predict.", ("finetune", "predict")),
    "embed": ("Commands: embed", "Train and use text-embedding models.",
              ("embed finetune", "embed encode", "embed mine", "embed search", "embed app", "embed evaluate")),
    "tokenizer": ("Commands: tokenizers", "Train, compare and change tokenizers.",
                  ("tokenizer train", "tokenizer compare", "tokenizer extend", "tokenizer trim", "tokenizer transplant")),
    "models": ("Commands: models", "Try, describe, publish, export and change a trained model.",
               ("fill-mask", "write", "card", "push", "export", "average", "lengthen", "devices")),
}  # fmt: skip


def slug(name: str) -> str:
    return name.replace(" ", "-")


def command_file(name: str) -> str:
    "Return the page on which a command is."
    page = next(page for page, (_, _, names) in COMMAND_PAGES.items() if name in names)
    return f"reference/commands/{page}.qmd"


def command_address(name: str) -> str:
    return f"{command_file(name)}#{slug(name)}"


def code_in_table(text: str) -> str:
    "Format code in a table cell."
    if "|" not in text and "`" not in text:
        return f"`{text}`"
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


# Commands whose options are those of another: listed once, with that one.
SAME_OPTIONS = {"validate": "pretrain", "distill": "pretrain"}


def option_anchor(name: str, key: str) -> str:
    return f"option-{slug(name)}-{key.replace('.', '-')}"


def own_options(name: str) -> dict:
    "Return the options of a command that are listed with it."
    shared = commands()[SAME_OPTIONS[name]].options if name in SAME_OPTIONS else {}
    return {key: option for key, option in commands()[name].options.items() if key not in shared}


def command_lines(name: str) -> list[str]:
    "Return a command in Markdown: its usage, and a table of its options by section."
    from bertlab.cli.parser import type_name

    command = commands()[name]
    usage = re.sub(r"\s+", " ", command.help().partition("usage: ")[2].partition("\n\n")[0])
    about = re.sub(r"\s+", " ", command.about)
    parts = [f"# bertlab {name} {{#{slug(name)}}}", "", f"{about[0].upper()}{about[1:]}.", ""]
    parts += ["```sh", f"$ {usage}", "```", ""]
    options, by_section = own_options(name), {}
    if set(command.sections) - {""}:
        parts += ["Each option is a key of a configuration file, too: `--data.seed 1` is `seed: 1` in the section "
                  f"`data` of the file that `bertlab {name} --config FILE` reads.", ""]  # fmt: skip
    if name in SAME_OPTIONS:
        other = SAME_OPTIONS[name]
        parts += [f"It takes the options of [`bertlab {other}`](#{slug(other)})"
                  + (", and these:" if options else "."), ""]  # fmt: skip
    for key, option in options.items():
        by_section.setdefault(key.rpartition(".")[0], []).append((key, option))
    for section, rows in by_section.items():
        parts += [f"## {section} {{#{slug(name)}-{section}}}", ""] if section else []
        parts += ["| option | type | default | meaning |", "|:--|:--|:--|:-----|"]
        for key, option in rows:
            default = "required" if option.required else code_in_table(json.dumps(option.default))
            kind = code_in_table(type_name(option.type))
            parts.append(
                f"| [`--{key}`]{{#{option_anchor(name, key)}}} | {kind} | {default} | {cell(option.help)} |"
            )
        parts.append("")
    return parts


def command_page(page: str) -> str:
    "Return a page of commands."
    title, description, names = COMMAND_PAGES[page]
    parts = [*front(title, description), FILTER]
    return "\n".join([*parts, *(line for name in names for line in command_lines(name))])


def search_entries() -> list[dict]:
    "Return an entry of the site's search for each command, and for each option of each."
    entries = []

    def add(address: str, title: str, section: str, text: str) -> None:
        entries.append({"objectID": address, "href": address, "title": title, "section": section, "text": text,
                        "crumbs": ["Reference", "Commands"]})  # fmt: skip

    for name, command in commands().items():
        page = Path(command_file(name)).with_suffix(".html").as_posix()
        add(f"{page}#{slug(name)}", f"bertlab {name}", "", command.about)
        for key, option in own_options(name).items():
            add(f"{page}#{option_anchor(name, key)}", f"--{key}", f"bertlab {name}", option.help)
    return entries


def pages(explained: dict[str, set[str]]) -> dict[str, str]:
    "Return all pages of the reference by file."
    texts = {"api.qmd": reference_page(explained), "reference/names.qmd": names_page(explained)}
    return texts | {f"reference/commands/{page}.qmd": command_page(page) for page in COMMAND_PAGES}


def sidebar() -> list[str]:
    "Return the sidebar entries of the reference; each has its page's title."
    commands_pages = [f"reference/commands/{page}.qmd" for page in COMMAND_PAGES]
    return ["api.qmd", *commands_pages, "reference/names.qmd"]
