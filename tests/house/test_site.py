"`make docs` up to the rendering, and the rendering with a stand-in for Quarto."

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import docs
import joins
import landing
import pytest
import reference
import sync
import yaml
from conftest import ROOT

pytestmark = pytest.mark.slow
SOURCES = [path.relative_to(ROOT / "nbs").as_posix() for path in sync.notebooks(ROOT)]
PART_OF = {name: names[0] for _, _, names in joins.GROUPS for name in names}
# The pages that are made of notebooks, each with its sources.
NOTEBOOKS: dict[str, list[str]] = {}
for source in SOURCES:
    if source not in joins.LEFT_OUT:
        page = PART_OF.get(source, source)
        NOTEBOOKS.setdefault(docs.RENAMED.get(page, page), []).append(source)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    "A copy of the project in which `make docs` ran once, without Quarto."
    copy = tmp_path_factory.mktemp("site") / "copy"
    names = [
        "settings.ini",
        "pyproject.toml",
        "README.md",
        "_quarto.yml",
        "CHANGELOG.md",
        "CITATION.cff",
    ]
    names += ["nbs", "bertlab", "scripts", "benchmarks"]
    copy.mkdir()
    for name in names:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
            shutil.copytree(ROOT / name, copy / name, ignore=ignore, symlinks=True)
        else:
            shutil.copy2(ROOT / name, copy / name)
    done = make_docs(copy)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
    assert "quarto.org" in done.stdout and "pip install quarto-cli" in done.stdout
    return copy


def make_docs(copy: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PATH": ""}  # no Quarto, even where there is one
    command = [sys.executable, "scripts/docs.py"]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)


def staged_text(site: Path, name: str) -> str:
    cells = json.loads((site / "_proc" / name).read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(sync.source_of(cell) for cell in cells)


def test_every_notebook_is_staged_with_its_first_cell(site):
    staged = site / "_proc"
    paths = {path.relative_to(staged).as_posix() for path in staged.rglob("*.ipynb")}
    assert paths == set(NOTEBOOKS)
    for name, sources in NOTEBOOKS.items():
        text = staged_text(site, name)
        for source in sources:
            if Path(source).parent.name not in sync.CHAPTERS or Path(source).name != "index.ipynb":
                assert re.search(rf"\[Open in Colab\]\(https:\S+/{source}\)", text), source
        numbered = sum(bool(re.match(r"\d\d_", Path(source).name)) for source in sources)
        assert text.count("**You can now**") >= numbered and text.count("**Takes**") >= numbered


def test_there_are_at_most_170_pages(site):
    staged = site / "_proc"
    assert len([*staged.rglob("*.ipynb"), *staged.rglob("*.qmd")]) <= 170


def test_groups_name_notebooks_once_and_of_one_folder():
    names = [name for _, _, group in joins.GROUPS[1:] for name in group]
    assert len(names) == len(set(names)) and set(names) | set(joins.LEFT_OUT) <= set(SOURCES)
    assert all(len({Path(name).parent for name in group}) == 1 for _, _, group in joins.GROUPS[1:])


def test_links_lead_to_the_part_of_a_joined_page():
    moved = joins.Moved({"c/left.ipynb": "https://example.org/left"})
    moved.places |= {
        "a/one.ipynb": ("a/one.ipynb", {"": "part-one"}),
        "a/two.ipynb": ("a/one.ipynb", {"": "part-two", "recap": "recap-two"}),
        "b/three.ipynb": ("a/one.ipynb", {"": "part-three"}),
    }
    expected = {
        ("../a/two.ipynb", "b/x.ipynb", "b/x.ipynb"): "../a/one.ipynb#part-two",
        ("../a/two.ipynb#recap", "b/x.ipynb", "b/x.ipynb"): "../a/one.ipynb#recap-two",
        ("../a/two.ipynb#name", "b/x.ipynb", "b/x.ipynb"): "../a/one.ipynb#name",
        ("#recap", "a/two.ipynb", "a/one.ipynb"): "#recap-two",
        ("one.ipynb", "a/two.ipynb", "a/one.ipynb"): "#part-one",
        ("x.ipynb", "b/three.ipynb", "a/one.ipynb"): "../b/x.ipynb",
        ("../c/left.ipynb#x", "b/x.ipynb", "b/x.ipynb"): "https://example.org/left",
        ("x.ipynb#recap", "b/y.ipynb", "b/y.ipynb"): "x.ipynb#recap",
    }
    assert {key: moved.target(*key) for key in expected} == expected
    text = '[a](one.ipynb) <a href="one.ipynb">a</a>\n```\n[a](one.ipynb)\n```\n'
    assert moved.links(text, "a/x.ipynb", "a/x.ipynb") == (
        '[a](one.ipynb#part-one) <a href="one.ipynb#part-one">a</a>\n```\n[a](one.ipynb)\n```\n'
    )


def test_parts_of_a_page_have_identifiers_of_their_own():
    taken: set[str] = set()
    joins.rename_anchors("## Recap\n### fit {#fit .name}", taken, "one")
    text, renamed = joins.rename_anchors("## Recap\n## Recap\n### fit {#fit .name}", taken, "two")
    assert text == "## Recap {#recap-two}\n## Recap {#recap-two-2}\n### fit {#fit-two .name}"
    assert renamed == {"recap": "recap-two", "fit": "fit-two"}


def test_hidden_and_exported_cells_do_not_reach_the_site(site):
    for name in NOTEBOOKS:
        cells = json.loads((site / "_proc" / name).read_text(encoding="utf-8"))["cells"]
        heads = [
            sync.directives(sync.source_of(cell)) for cell in cells if cell["cell_type"] == "code"
        ]
        assert not [head for head in heads if {"hide", "export", "default_exp"} & head.keys()], name


def test_no_page_begins_with_open_imports(site):
    for name in NOTEBOOKS:
        cells = json.loads((site / "_proc" / name).read_text(encoding="utf-8"))["cells"]
        code = [sync.source_of(cell) for cell in cells if cell["cell_type"] == "code"]
        if code and re.search(r"^(?:import|from) ", code[0], re.MULTILINE):
            assert sync.directives(code[0])["code-fold"] in ("true", "show"), name


def test_the_picture_of_a_shared_link_exists(site):
    website = yaml.safe_load((site / "_proc/_quarto.yml").read_text())["website"]
    image = website["open-graph"]["image"]
    # Without the slash, Quarto takes it from the folder of each page.
    assert image.startswith("/") and (site / "_proc" / image[1:]).is_file()
    assert website["twitter-card"]["card-style"] == "summary_large_image"
    # Without one, Quarto takes the first figure of each page, and its text, in which a % is a warning.
    assert website["twitter-card"]["image"] == image


def test_the_site_loads_nothing_from_elsewhere(site):
    config = yaml.safe_load((site / "_proc/_quarto.yml").read_text())
    html = config["format"]["html"]
    themes = {name for pair in html["theme"].values() for name in pair}
    assert themes == {"default", "site/light.scss", "site/dark.scss"}  # others fetch fonts
    assert html["html-math-method"] == "mathml" and html["code-overflow"] == "scroll"
    assert config["website"]["search"] is True
    remote = re.compile(
        r"@import|url\(\s*[\"']?(?:https?:)?//|<script[^>]*src=|<link[^>]*href=.https?:"
    )
    for path in [
        *(site / "_proc").rglob("*.css"),
        *(site / "_proc").rglob("*.scss"),
        *(site / "_proc").rglob("*.yml"),
    ]:
        assert not remote.search(path.read_text()), path
    for name in NOTEBOOKS:
        assert not re.search(r"<(?:script|img|iframe)[^>]*src=.https?:", staged_text(site, name)), (
            name
        )


def qmd(site: Path, name: str) -> str:
    return (site / "_proc" / name).read_text(encoding="utf-8")


def test_the_reference_has_every_name_command_and_key(site):
    for module in reference.modules().values():
        chapter = module.name.split(".")[1]
        if chapter not in sync.CHAPTERS:  # the checks of the course are no reference
            continue
        page = PART_OF.get(module.notebook, module.notebook)
        for name in module.public:
            public = reference.is_public(module, name)
            text = qmd(site, "api.qmd" if public else "reference/names.qmd")
            top = "" if public else "../"
            assert f"[`{name}`]({top}{page}#{reference.anchor(name)}" in text, name
    entries = {entry["href"] for entry in reference.search_entries()}
    for name, command in reference.commands().items():
        listed = reference.SAME_OPTIONS.get(name, name)
        for key in command.options:
            page = name if key in reference.own_options(name) else listed
            anchor = reference.option_anchor(page, key)
            assert f"[`--{key}`]{{#{anchor}}}" in qmd(site, reference.command_file(page)), key
            assert reference.command_file(page).replace(".qmd", f".html#{anchor}") in entries


def test_a_name_is_documented_by_its_docstring_first(site):
    displayed = staged_text(site, "model/03_attention.ipynb")
    _, _, entry = displayed.partition("### document_mask ")
    entry = entry.partition("\n### ")[0]
    order = [
        entry.index(part)
        for part in ("Let tokens attend", "| parameter |", '<details class="code"')
    ]
    assert order == sorted(order)
    assert "| `documents_BL` | `Tensor` |  | 0 for padding, 1, 2, ... for the document" in entry


def test_a_helper_shows_its_parameters_in_its_code(site):
    _, _, entry = staged_text(site, "data/12_packing.ipynb").partition("### split_into_windows ")
    entry = entry.partition("\n### ")[0]
    assert "| parameter |" not in entry and "# document d is tokens" not in entry
    shown = reference.put_code(entry, reference.highlighted)
    assert "Signature and code" in shown and "# document d is tokens[offsets" in shown
    assert '<span class="kw">def</span> split_into_windows(' in shown
    assert "/bertlab/data/packing.py#L" in shown and "data-name" not in shown


def test_the_site_shows_no_check_of_an_exercise(site):
    for name in NOTEBOOKS:
        cells = json.loads((site / "_proc" / name).read_text(encoding="utf-8"))["cells"]
        for cell in cells:
            if cell["cell_type"] == "code" and "NotImplementedError" in sync.source_of(cell):
                assert not re.search(r"^def check_", sync.source_of(cell), re.MULTILINE), name
    _, _, exercise = staged_text(site, "data/12_packing.ipynb").partition("def overlapping(")
    assert "# The notebook checks your answer." in exercise


def test_no_output_colours_its_text(site):
    for name in NOTEBOOKS:
        for cell in json.loads((site / "_proc" / name).read_text(encoding="utf-8"))["cells"]:
            for output in cell.get("outputs", []):
                shown = "".join(output.get("data", {}).get("text/html", ""))
                for style in re.findall(r'style="([^"]*)"', shown):
                    # No colour of our figures has enough contrast both on white and in the dark.
                    assert "background" in style or not re.search(r"(?<![-\w])color:#", style), name


def test_names_are_linked_outside_code():
    explained = {
        module.notebook: {reference.anchor(name) for name in module.found}
        for module in reference.modules().values()
    }
    link = lambda text: reference.add_links(text, "train/19_trainer.ipynb", explained)
    assert (
        link("see `pack_best_fit`")
        == "see [`pack_best_fit`](../data/12_packing.ipynb#pack_best_fit)"
    )
    assert link("see `make_trainer()`") == "see [`make_trainer()`](#make_trainer)"
    for text in (
        "to `fit`, to `overlap`",
        "```python\n`pack_best_fit`\n```",
        "# The `pack_best_fit`",
        "`no_such_name`",
    ):
        assert link(text) == text


def test_the_first_page_shows_measured_figures(site):
    text = qmd(site, "index.qmd")
    demo = json.loads((ROOT / "benchmarks/results/demo.json").read_text())
    assert f"{demo['median']['seconds']:.0f} s" in text and demo["processor"] in text
    assert (
        text.count('class="figure"') == 3
        and "git clone" in text
        and "pip install" in text
        and "colab" in text
    )
    assert "data-live" not in text  # no model was named


def test_llms_txt_names_every_page(site):
    text = qmd(site, "llms.txt")
    for path in [*(site / "_proc").rglob("*.ipynb"), *(site / "_proc").rglob("*.qmd")]:
        if path.name not in ("index.qmd", "404.qmd"):
            assert f"[{landing.head_of_page(path)['title']}](" in text, path


def test_addresses_in_the_package_and_readme_lead_to_a_page(site):
    staged = site / "_proc"
    outputs = {
        Path(landing.output_of(path.relative_to(staged).as_posix(), landing.head_of_page(path)))
        for path in [*staged.rglob("*.ipynb"), *staged.rglob("*.qmd")]
    }
    address = re.compile(re.escape(sync.Address.read(ROOT).site_url) + r"/([\w/.-]+\w)")
    texts = [*ROOT.glob("*.md"), ROOT / "CITATION.cff", ROOT / "pyproject.toml"]
    texts += [
        path for path in (ROOT / "bertlab").rglob("*") if path.suffix in (".py", ".html", ".js")
    ]
    named = {name: path for path in texts for name in address.findall(path.read_text("utf-8"))}
    assert "glass.html" in named, "the exported web page links to the site"
    gone = {
        name: path for name, path in named.items() if Path(name).with_suffix(".html") not in outputs
    }
    assert not gone


QUESTIONS = {
    "install": "guides/install", "how do I install bertlab": "guides/install", "extras": "guides/install",
    "requirements": "guides/install", "FAQ": "guides/faq", "help": "guides/faq", "cite": "cite", "bibtex": "cite",
    "out of memory": "guides/out_of_memory", "OOM": "guides/out_of_memory",
    "CUDA out of memory": "guides/out_of_memory", "ready configurations": "guides/configurations",
    "yaml config": "guides/configurations", "config file": "guides/configurations",
    "NER": "guides/named_entities", "named entity recognition": "guides/named_entities",
    "train a tokenizer": "guides/own_tokenizer", "text classification": "guides/finetune_csv", "fine-tune": "guides/finetune_csv",
    "sentiment": "guides/finetune_csv", "inference": "guides/serve", "quantization": "guides/serve",
    "deploy": "guides/serve", "checkpoint": "guides/resume", "resume a run": "guides/resume",
    "continue training": "guides/resume", "domain adaptation": "guides/continue_model",
    "train on my text": "guides/own_text", "my own text": "guides/own_text", "semantic search": "guides/search",
    "sentence embeddings": "guides/search", "RAG": "guides/search", "long documents": "guides/long_documents",
    "GPU": "guides/devices", "TPU": "guides/devices", "slurm": "guides/several_machines",
    "multi gpu": "guides/several_machines", "loss is nan": "guides/diagnose", "push to the hub": "guides/save_and_share",
    "transformers Trainer": "guides/migrate_transformers", "custom collator": "guides/own_parts",
    "muon": "optim/muon", "learning rate schedule": "optim/",
}  # fmt: skip


def check_answers(ask: Callable[[list[str]], list[list[str]]]) -> None:
    "Check what the search finds: a function from queries to the addresses of their results."
    answers = ask(list(QUESTIONS))
    missing = {query: found[:4] for (query, expected), found in zip(QUESTIONS.items(), answers, strict=True)
               if not any(href.startswith(expected) for href in found[:4])}  # fmt: skip
    entries = {entry["href"]: entry["title"] for entry in reference.search_entries()
               if entry["title"].startswith("--")}  # fmt: skip
    titles = sorted(set(entries.values()))
    names = titles + [title.rpartition(".")[2] for title in titles]  # with and without section
    missing |= {name: found[:3] for name, found in zip(names, ask(names), strict=True)
                if not any(entries.get(href, "").endswith(name) for href in found[:3])}  # fmt: skip
    parts = {entry["title"]: entry["href"] for entry in joins.search_entries(ROOT)}
    missing |= {title: found[:4] for title, found in zip(parts, ask(list(parts)), strict=True)
                if parts[title] not in found[:4]}  # fmt: skip
    assert not missing


def staged_entries(staged: Path) -> Iterator[dict]:
    "Yield the entries of the search as Quarto writes them: one for a page, and one for each part."
    for path in sorted([*staged.rglob("*.ipynb"), *staged.rglob("*.qmd")]):
        head = landing.head_of_page(path)
        href = landing.output_of(path.relative_to(staged).as_posix(), head)
        if href.startswith("reference/commands/"):
            continue  # their commands and options have entries of their own
        text = re.sub(
            '<details class="code">.*?</details>', "", landing.as_markdown(path), flags=re.S
        )
        parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
        for number, (section, text) in enumerate(zip(["", *parts[1::2]], parts[::2], strict=True)):
            anchor = f"#part-{number}" * bool(section)
            yield {"href": href + anchor, "title": head["title"], "section": section, "text": text}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js, which runs the search")
def test_search_answers_questions_and_knows_every_option(site, tmp_path):
    parts = joins.search_entries(ROOT)
    docs = [*staged_entries(site / "_proc"), *reference.search_entries(), *parts]
    (tmp_path / "docs.json").write_text(json.dumps(docs), encoding="utf-8")
    script = (
        (ROOT / "nbs/site/search.js").read_text(encoding="utf-8")
        + """
const [docs, queries] = [process.argv[2], 0].map((file) => JSON.parse(require("fs").readFileSync(file)));
console.log(JSON.stringify(queries.map((query) => siteSearch(query, docs, 8).map(({ item }) => item.href))));
"""
    )
    (tmp_path / "search.js").write_text(script, encoding="utf-8")
    command = ["node", tmp_path / "search.js", tmp_path / "docs.json"]

    def ask(queries: list[str]) -> list[list[str]]:
        done = subprocess.run(command, input=json.dumps(queries), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    check_answers(ask)


def test_a_rendered_page_loads_nothing_and_scrolls():
    text = """<script src="https://cdn.example/x.js" integrity="a"></script><main><pre><code>x</code></pre>
<table class="caption-top table"><tr><td>1</td></tr></table></main>"""
    mended = landing.mend(text)
    assert "<script" not in mended and '<pre tabindex="0">' in mended
    assert '<div class="scrolls" tabindex="0" role="region" aria-label="Table"><table' in mended
    assert 'class="scrolls stacks"' in landing.mend("<main><table><th>option</th></table></main>")


def test_a_style_keeps_the_rules_that_pages_use():
    css = '@charset "UTF-8";a,.used,.gone b{color:red}.gone{x:y}@media print{.gone{x:y}}@media all{.used:not(.gone){x:y}}'
    assert landing.shorten_style(css, {"used"}) == (
        '@charset "UTF-8";a,.used{color:red}@media all{.used:not(.gone){x:y}}'
    )


def edit(name: str, old: str, new: str):
    def change(staged: Path) -> None:
        path = staged / name
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{name} has no {old!r}"
        path.write_text(text.replace(old, new), encoding="utf-8")

    return change


CHANGES = {
    "no_such_page.ipynb leads nowhere": edit("api.qmd", "## Commands", "[x](no_such_page.ipynb)\n"),
    "no heading for #nowhere": edit(
        "api.qmd", "## Commands", "[x](model/01_config.ipynb#nowhere)\n"
    ),
    "the sidebar lacks overview.ipynb": edit("sidebar.yml", "- overview.ipynb", "- api.qmd"),
    "names model/01_gone.ipynb": edit(
        "sidebar.yml", "model/01_config.ipynb", "model/01_gone.ipynb"
    ),
    "no link to Colab": edit("overview.ipynb", "[Open in Colab](", "[Open it]("),
    "the page has no title": edit("overview.ipynb", "title: ", "headline: "),
}


@pytest.mark.parametrize("problem", CHANGES)
def test_the_check_reports_a_problem(problem, site, tmp_path):
    staged = tmp_path / "_proc"
    shutil.copytree(site / "_proc", staged)
    assert docs.check(staged) == []
    CHANGES[problem](staged)
    assert any(problem in message for message in docs.check(staged))


CODE = """
@dataclass
class Run(Base):
    "What a run needs."

    # Optimizer steps.
    steps: int
    rate: float = 1e-3  # the peak

def plan(
    run: "Later",  # named before it is there
    *parts: int, quiet: bool = False,
) -> str:  # what will happen
    "Say what will happen."

# %% of a cell
def line(text: str):
    pass

class Box(Odd):
    "A box."

    def __init__(self, size=3):  # of the box
        self.size = size
"""


@pytest.mark.parametrize(
    "name, expected",
    [
        ("Run", ["steps int  Optimizer steps.", "rate float 0.001 the peak"]),
        ("line", ["text str  "]),
        ("plan", ["run 'Later'  named before it is there", "*parts int  ", "quiet bool False "]),
        ("Box", ["size  3 of the box"]),
    ],
)
def test_parameters_have_their_comments(name, expected):
    import ast

    lines = CODE.splitlines()
    node = next(node for node in ast.parse(CODE).body if node.name == name)
    rows = reference.parameters_of(node, lines)
    assert [f"{row.name} {row.type} {row.default} {row.meaning}" for row in rows] == expected
    if name == "plan":
        assert reference.returned(node, lines).meaning == "what will happen"


QUARTO = """#!{python}
import pathlib, sys
assert sys.argv[1] == "render" and pathlib.Path("_quarto.yml").is_file()
out = pathlib.Path("_docs")
out.mkdir()
for name in ("index.html", "api.html")[: {pages}]:
    (out / name).write_text("page")
print({printed!r}, file=sys.stderr)
sys.exit({code})
"""
WARNING = "[  7/214] data/02_readers.ipynb\nWARNING: Unable to resolve link target: no.ipynb"


@pytest.mark.parametrize("pages, code, printed, message", [
    (2, 0, "", None), (1, 0, "", "no api.html"), (2, 1, "", "could not render"), (2, 0, WARNING, "data/02_readers.ipynb"),
])  # fmt: skip
def test_quarto_renders_the_site_into_docs(
    site, tmp_path, monkeypatch, pages, code, printed, message
):
    fake, staged = tmp_path / "quarto", tmp_path / "_proc"
    fake.write_text(QUARTO.format(python=sys.executable, pages=pages, code=code, printed=printed))
    fake.chmod(0o755)
    shutil.copytree(site / "_proc", staged)
    (tmp_path / "_docs").mkdir()
    (tmp_path / "_docs/old.html").write_text("old")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(docs.sys, "executable", "/nowhere/python")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(landing, "finish", lambda *_: None)  # works on what the real Quarto writes
    if message:
        with pytest.raises(SystemExit, match=message):
            docs.render(staged)
        assert (tmp_path / "_docs/old.html").exists(), "the last good site is kept"
    else:
        docs.render(staged)
        assert {path.name for path in (tmp_path / "_docs").iterdir()} == {"index.html", "api.html"}
