"`make docs` up to the rendering, and the rendering with a stand-in for Quarto."

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import docs
import landing
import pytest
import reference
import sync
import yaml
from conftest import ROOT
from versions import tomllib

pytestmark = pytest.mark.slow
NOTEBOOKS = [docs.RENAMED.get(name, name) for name in
             (path.relative_to(ROOT / "nbs").as_posix() for path in sync.notebooks(ROOT))]  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    "A copy of the project in which `make docs` ran once, without Quarto."
    copy = tmp_path_factory.mktemp("site") / "copy"
    copy.mkdir()
    sync.copy_sources(ROOT, copy)
    done = make_docs(copy)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
    assert "quarto.org" in done.stdout and "pip install quarto-cli" in done.stdout
    return copy


def make_docs(copy: Path, python: Path | str = sys.executable) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PATH": ""}  # no Quarto, even where there is one
    if python != sys.executable:  # what is beside this test must not be seen
        environment.pop("PYTHONPATH", None)
    command = [str(python), "scripts/docs.py"]
    return subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=400
    )


def closure(names: list[str]) -> set[str]:  # of distributions
    "What is installed of these, with all that they need here."
    from importlib.metadata import PackageNotFoundError, distribution

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found, waiting = set(), [Requirement(name) for name in names]
    seen = set()
    while waiting:
        one = waiting.pop()
        name, key = (
            canonicalize_name(one.name),
            (canonicalize_name(one.name), frozenset(one.extras)),
        )
        if key in seen:
            continue
        seen.add(key)
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:  # what a platform or the build of torch does not need
            continue
        found.add(name)
        for need in map(Requirement, needs):
            if need.marker is None or any(
                need.marker.evaluate({"extra": extra}) for extra in ("", *one.extras)
            ):
                waiting.append(need)
    return found


def docs_alone(folder: Path) -> Path:  # its Python
    "An environment that has bertlab's dependencies and the docs extra, as they are here, and nothing else."
    import venv
    from importlib.metadata import distribution

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    target = Path(
        subprocess.run(
            [python, "-c", ask], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    for name in closure([*project["dependencies"], *project["optional-dependencies"]["docs"]]):
        here = distribution(name)
        for top in {
            file.parts[0] for file in here.files or () if file.parts[0] not in ("..", "__pycache__")
        }:
            link = target / top
            if not link.exists():
                link.symlink_to(here.locate_file(top))
    return python


def test_the_site_is_staged_in_an_environment_with_the_docs_extra_alone(tmp_path):
    "What a notebook imports while it is staged must be there where the site's workflow installs `.[docs]`."
    python = docs_alone(tmp_path / "alone")
    absent = "import importlib.util as u; print([n for n in {!r} if u.find_spec(n)])"
    for names, there in (
        (["nbdev", "torch", "lightning"], True),
        (["pytest", "bitsandbytes", "hypothesis"], False),
    ):
        said = subprocess.run(
            [python, "-c", absent.format(names)], capture_output=True, text=True, check=True
        ).stdout
        assert said.strip() == str(names if there else [])
    copy = tmp_path / "copy"
    copy.mkdir()
    sync.copy_sources(ROOT, copy)
    done = make_docs(copy, python)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
    staged = {
        path.relative_to(copy / "_proc").as_posix() for path in (copy / "_proc").rglob("*.ipynb")
    }
    assert staged == set(NOTEBOOKS)


def staged_text(site: Path, name: str) -> str:
    cells = json.loads((site / "_proc" / name).read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(sync.source_of(cell) for cell in cells)


def test_every_notebook_is_staged_with_its_badge_and_all_of_its_first_cell(site):
    found = {
        path.relative_to(site / "_proc").as_posix() for path in (site / "_proc").rglob("*.ipynb")
    }
    assert found == set(NOTEBOOKS)
    for name in NOTEBOOKS:
        text = staged_text(site, name)
        assert "[Open in Colab](https://colab.research.google.com/" in text, name
        if re.match(r"\d\d_", Path(name).name):
            assert "**You can now**" in text and "**Takes**" in text, name


def test_hidden_and_exported_cells_do_not_reach_the_site(site):
    for name in NOTEBOOKS:
        cells = json.loads((site / "_proc" / name).read_text(encoding="utf-8"))["cells"]
        heads = [
            sync.directives(sync.source_of(cell)) for cell in cells if cell["cell_type"] == "code"
        ]
        assert not [head for head in heads if {"hide", "export", "default_exp"} & head.keys()], name


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


def test_the_configuration_is_one_file_at_the_top_and_no_setting_is_written_twice():
    link = ROOT / "nbs/_quarto.yml"
    assert link.is_symlink() and link.resolve() == ROOT / "_quarto.yml"
    config = yaml.safe_load(link.read_text())
    assert config["metadata-files"] == ["nbdev.yml", "sidebar.yml"]
    assert not {"title", "site-url", "repo-url"} & config["website"].keys()  # from settings.ini


def qmd(site: Path, name: str) -> str:
    return (site / "_proc" / name).read_text(encoding="utf-8")


def test_the_reference_has_every_public_name_every_command_and_every_key(site):
    for module, names in docs.public_symbols().items():
        chapter = module.split(".")[1]
        text = qmd(site, f"reference/api/{chapter}.qmd")
        for name in names:
            assert (
                f"[`{name}`](../../{docs.notebook_of(module)}#{reference.anchor(name)})" in text
            ), name
    for name, command in reference.commands().items():
        text = qmd(site, reference.command_file(name))
        for key in command.options():
            last = key.lstrip("*")
            assert (
                last in text
                or last.rpartition(".")[2].upper() in text
                or command.titles.get(last, "?") in text
            ), key
    for name in reference.configured():
        text = qmd(site, reference.settings_file(name))
        rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \| .*\|$", text, flags=re.MULTILINE)
        assert rows == [key.rpartition(".")[2] for key in reference.commands()[name].options()]


def test_a_signature_is_shown_as_it_is_written(site):
    for name in NOTEBOOKS:
        for head in re.findall(
            r"^### .*\.name\}\n\n```python\n(.*?)^```", staged_text(site, name), re.M | re.S
        ):
            assert "__main__." not in head and "](" not in head, (name, head)
            assert not re.search(r"\(\*args, \*\*kwargs\)", head), (name, head)
    shown = staged_text(site, "model/03_attention.ipynb")
    assert (
        "documents_BL: Tensor,  # 0 for padding, 1, 2, ... for the document a token belongs to"
        in shown
    )
    assert '<details class="code"><summary>Code</summary>' in shown


def test_names_are_linked_outside_code_alone_and_never_a_common_word():
    shown = {
        module.notebook: {reference.anchor(name) for name in module.found}
        for module in reference.modules().values()
    }
    link = lambda text: reference.add_links(text, "train/13_trainer.ipynb", shown)
    assert (
        link("see `pack_best_fit`")
        == "see [`pack_best_fit`](../data/11_packing.ipynb#pack_best_fit)"
    )
    assert link("see `make_trainer()`") == "see [`make_trainer()`](#make_trainer)"
    for same in ("to `fit`, to `overlap`, to `share`", "```python\n`pack_best_fit`\n```", "# The `pack_best_fit`",
                 "[the `pack_best_fit` of old](x.md)", "`` `pack_best_fit` ``", "`no_such_name`"):  # fmt: skip
        assert link(same) == same


def test_a_list_behind_a_line_of_text_becomes_a_list():
    assert (
        reference.separate_lists("**You can** -\n- run\n- walk") == "**You can** -\n\n- run\n- walk"
    )
    for same in ("- one\n- two", "```\ntext\n- no list\n```", "a\n\n1. b\n2. c", "a - b\nc"):
        assert reference.separate_lists(same) == same


def test_figures_of_the_first_page_are_those_of_the_benchmarks(site):
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


QUESTIONS = {
    "resume": "guides/resume.html", "save model": "guides/save_and_share.html", "gpu": "guides/devices.html",
    "pack_best_fit": "data/packing.html", "own text": "guides/own_text.html", "csv": "guides/finetune_csv.html",
    "fine-tune": "guides/finetune_csv.html", "masked diffusion": "data/diffusion.html", "tpu": "guides/devices.html",
    "learning rate schedule": "optim/schedulers.html", "onnx": "train/export.html",
    "train a tokenizer": "data/tokenizers.html", "long documents": "guides/long_documents.html",
    "several machines": "guides/several_machines.html", "question answering": "walkthroughs/where_is_the_answer.html",
    "lora": "model/adapters.html", "muon": "optim/muon.html", "loss does not fall": "guides/diagnose.html",
    "transformers trainer": "guides/migrate.html", "several gpus": "guides/several_machines.html",
    "document_mask": "model/attention.html",
}  # fmt: skip
ASK = """
const fs = require("node:fs"), vm = require("node:vm");
vm.runInThisContext(fs.readFileSync(process.argv[1], "utf8"));
const { entries, questions } = JSON.parse(fs.readFileSync(0, "utf8")), finder = new globalThis.Fuse();
for (const entry of entries) finder.add(entry);
const pages = (question) => [...new Set(finder.search(question).map((found) => found.item.href.split("#")[0]))];
console.log(JSON.stringify(questions.map((question) => pages(question).slice(0, 3))));
"""


@pytest.mark.skipif(
    shutil.which("node") is None, reason="needs node, which runs the search outside of a browser"
)
def test_the_search_answers_twenty_questions(site):
    asked = json.dumps(
        {"entries": landing.search_entries(site / "_proc"), "questions": list(QUESTIONS)}
    )
    command = ["node", "-e", ASK, str(site / "_proc/site/find.js")]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = dict(zip(QUESTIONS, json.loads(done.stdout), strict=True))
    assert len(found) >= 20
    assert {
        question: pages for question, pages in found.items() if QUESTIONS[question] not in pages
    } == {}


def test_the_search_leaves_code_outputs_and_imports_out(site):
    for entry in landing.search_entries(site / "_proc"):
        assert "```" not in entry["text"] and "import numpy as np" not in entry["text"], entry[
            "href"
        ]


def test_a_rendered_page_is_mended():
    text = """<script src="https://cdn.example/x.js" integrity="a"></script><main><pre><code>x</code></pre>
<table class="caption-top table"><tr><td>1</td></tr></table></main>"""
    mended = landing.mend(text)
    assert "<script" not in mended and '<pre tabindex="0">' in mended
    assert '<div class="scrolls" tabindex="0" role="region" aria-label="Table"><table' in mended


def test_a_heading_does_not_share_the_identifier_of_a_name():
    text = "## Compare\n\n```python\n# compare\n```\n### compare {#compare .name}\n## Compare it"
    wanted = "## Compare {#about-compare}\n\n```python\n# compare\n```\n### compare {#compare .name}\n## Compare it"
    assert docs.part_headings(text, {"compare"}) == wanted
    assert docs.part_headings(text, {"other"}) == text


def test_a_figure_is_shown_at_the_size_it_says_or_at_its_own():
    import base64
    import io
    from types import SimpleNamespace

    from PIL import Image

    Image.new("RGB", (30, 20)).save(drawn := io.BytesIO(), format="png")
    png = base64.b64encode(drawn.getvalue()).decode()
    outputs = [
        {"data": {"image/png": png}, "metadata": said}
        for said in ({}, {"image/png": {"width": 15, "height": 10}})
    ]
    docs.give_sizes(SimpleNamespace(cells=[{"outputs": outputs}]))
    assert [one["metadata"]["image/png"] for one in outputs] == [
        {"width": 30, "height": 20},
        {"width": 15, "height": 10},
    ]


def broken(site: Path, change) -> list[str]:
    "What the checks say after a change to the staged pages; the pages are put back."
    staged = site / "_proc"
    before = {path: path.read_bytes() for path in staged.rglob("*") if path.is_file()}
    try:
        change(staged)
        return docs.check(staged)
    finally:
        for path, content in before.items():
            path.write_bytes(content)
        for path in staged.rglob("*"):
            if path.is_file() and path not in before:
                path.unlink()


def test_the_staged_site_is_in_order(site):
    assert broken(site, lambda staged: None) == []


def edit(name: str, old: str, new: str):
    def change(staged: Path) -> None:
        path = staged / name
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{name} holds no {old!r}"
        path.write_text(text.replace(old, new), encoding="utf-8")

    return change


def add_markdown(text: str):
    def change(staged: Path) -> None:
        path = staged / "overview.ipynb"
        notebook = json.loads(path.read_text(encoding="utf-8"))
        notebook["cells"].append(
            {"cell_type": "markdown", "metadata": {}, "id": "new", "source": text}
        )
        path.write_text(json.dumps(notebook), encoding="utf-8")

    return change


def add_output(kind: str):
    def change(staged: Path) -> None:
        path = staged / "overview.ipynb"
        notebook = json.loads(path.read_text(encoding="utf-8"))
        output = {"output_type": "display_data", "data": {kind: "AAAA"}, "metadata": {}}
        cell = {
            "cell_type": "code",
            "metadata": {},
            "id": "new",
            "execution_count": None,
            "source": "draw()",
        }
        notebook["cells"].append({**cell, "outputs": [output]})
        path.write_text(json.dumps(notebook), encoding="utf-8")

    return change


def remove_show_doc(staged: Path) -> None:
    path = staged / "model/01_config.ipynb"
    notebook = json.loads(path.read_text(encoding="utf-8"))
    notebook["cells"] = [cell for cell in notebook["cells"] if ".name}" not in sync.source_of(cell)]
    path.write_text(json.dumps(notebook), encoding="utf-8")


CHANGES = {
    "a link to no page": (
        add_markdown("[x](no_such_page.ipynb)"),
        "no_such_page.ipynb leads nowhere",
    ),
    "a link to no heading": (
        add_markdown("[x](model/01_config.ipynb#nowhere)"),
        "no heading for #nowhere",
    ),
    "a link on the page itself": (add_markdown("[x](#nowhere)"), "no heading for #nowhere"),
    "a page that the sidebar misses": (
        edit("sidebar.yml", "href: overview.ipynb", "href: api.qmd"),
        "the sidebar lacks overview.ipynb",
    ),
    "a sidebar entry without a page": (
        edit("sidebar.yml", "model/01_config.ipynb", "model/01_gone.ipynb"),
        "names model/01_gone.ipynb",
    ),
    "no badge": (edit("overview.ipynb", "[Open in Colab](", "[Open it]("), "no link to Colab"),
    "no title": (edit("overview.ipynb", "title: ", "headline: "), "the page has no title"),
    "a figure without text": (add_output("image/png"), "no alternative text"),
    "a widget alone": (add_output(docs.WIDGET), "a widget has no static form"),
    "a picture without text": (add_markdown("![](x.png)"), "no alternative text"),
    "a picture from elsewhere": (
        add_markdown("![x](https://example.com/x.png)"),
        "fetched from elsewhere",
    ),
    "a name without show_doc": (remove_show_doc, "no show_doc for bertlab.model.config."),
}


@pytest.mark.parametrize("fault", CHANGES)
def test_the_check_finds(fault, site):
    change, word = CHANGES[fault]
    assert any(word in problem for problem in broken(site, change))


def test_a_name_that_is_nowhere_is_named(site):
    code = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
    sources = [
        "#| default_exp bad",
        "#| export\ndef no_such_name(): pass",
        "show_doc(no_such_name)",
    ]
    cells = [{**code, "id": str(number), "source": source} for number, source in enumerate(sources)]
    (site / "bad.ipynb").write_text(
        json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    )
    script = "import docs; docs.stage_notebook(docs.ROOT / 'bad.ipynb', 'bad.ipynb')"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, 'scripts'); {script}"]
    done = subprocess.run(command, cwd=site, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "bad.ipynb cannot be staged" in done.stderr
    assert "no_such_name" in done.stderr


def test_a_widget_leaves_its_static_form_on_the_page():
    from execnb.nbio import dict2nb

    data = {docs.WIDGET: {"model_id": "1"}, "text/html": "<p>static</p>", "text/plain": "Box()"}
    cell = {
        "cell_type": "code",
        "metadata": {},
        "id": "a",
        "source": "box",
        "execution_count": None,
    }
    output = {
        "output_type": "execute_result",
        "data": data,
        "metadata": {},
        "execution_count": None,
    }
    notebook = dict2nb(
        {"cells": [{**cell, "outputs": [output]}], "metadata": {"widgets": {"state": {}}}}
    )
    docs.prefer_static(notebook)
    assert set(notebook.cells[0].outputs[0].data) == {"text/html", "text/plain"}
    assert "widgets" not in notebook.metadata


CODE = """
@dataclass
class Run(Base):
    "What a run needs."

    steps: int  # optimizer steps
    rate: float = 1e-3  # the peak

def plan(
    run: "Later",  # named before it is there
) -> None:
    "Say what will happen."

class Box(Odd):
    "A box."

    def __init__(self, size=3):  # of the box
        self.size = size
"""


@pytest.mark.parametrize(
    "name, shown",
    [
        (
            "Run",
            "@dataclass\nclass Run(Base):\n    steps: int  # optimizer steps\n    rate: float = 1e-3  # the peak",
        ),
        ("plan", 'def plan(\n    run: "Later",  # named before it is there\n) -> None:'),
        ("Box", "class Box(Odd):\n    def __init__(self, size=3):  # of the box"),
    ],
)
def test_a_head_is_what_is_written(name, shown):
    import ast

    node = next(node for node in ast.parse(CODE).body if node.name == name)
    assert reference.head_of(node, CODE.splitlines()) == shown


def test_quarto_is_found_beside_python_where_pip_puts_it(tmp_path, monkeypatch):
    beside = tmp_path / "environment/bin/quarto"
    beside.parent.mkdir(parents=True)
    beside.write_text("#!/bin/sh\n")
    beside.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(docs.sys, "executable", str(beside.with_name("python")))
    assert docs.find_quarto() == str(beside)
    monkeypatch.setattr(docs.sys, "executable", str(tmp_path / "python"))
    assert docs.find_quarto() is None


QUARTO = """#!{python}
import pathlib, sys
assert sys.argv[1] == "render" and pathlib.Path("_quarto.yml").is_file()
out = pathlib.Path("_docs")
out.mkdir()
for name in ("index.html", "api.html")[: {pages}]:
    (out / name).write_text("page")
print({said!r}, file=sys.stderr)
sys.exit({code})
"""
WARNED = "\r[  7/214] data/02_readers.ipynb\n\x1b[33mWARNING: Unable to resolve link target: no.ipynb\x1b[39m"


@pytest.mark.parametrize("pages, code, said, message", [
    (2, 0, "Output created: a page about WARNING signs", None), (1, 0, "", "no api.html"), (2, 1, "", "could not render"),
    (2, 0, WARNED, r"warned:\n  data/02_readers.ipynb: WARNING: Unable to resolve"),
])  # fmt: skip
def test_with_quarto_the_site_is_rendered_into_docs(
    site, tmp_path, monkeypatch, pages, code, said, message
):
    fake, staged = tmp_path / "quarto", tmp_path / "_proc"
    fake.write_text(QUARTO.format(python=sys.executable, pages=pages, code=code, said=said))
    fake.chmod(0o755)
    shutil.copytree(site / "_proc", staged)
    (tmp_path / "_docs").mkdir()
    (tmp_path / "_docs/old.html").write_text("old")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(docs.sys, "executable", "/nowhere/python")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    if message:
        with pytest.raises(SystemExit, match=message):
            docs.render(staged)
        assert (tmp_path / "_docs/old.html").exists(), "the last good site is kept"
    else:
        docs.render(staged)
        assert {path.name for path in (tmp_path / "_docs").iterdir()} == {
            "index.html",
            "api.html",
            "search.json",
        }


@pytest.mark.parametrize("line, found", [
    ("\x1b[33mWARN: The following string was found in the document: x\x1b[39m", True), ("WARNING (filters/main.lua:3) x", True),
    ("[WARNING] Could not convert TeX math", True), ("  warning-free: true", False), ("[ 12/214] data/warnings.ipynb", False),
])  # fmt: skip
def test_a_warning_of_quarto_or_pandoc_is_found(line, found):
    assert len(list(docs.find_warnings(["[ 1/214] index.qmd", line]))) == found


def test_the_site_says_which_version_it_documents(tmp_path, monkeypatch):
    git = lambda *words: subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], cwd=tmp_path,
                                        check=True, capture_output=True, text=True).stdout.strip()  # fmt: skip
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    described = lambda: docs.described_version("1.2.3", "https://example.com/r")
    assert described() == "bertlab 1.2.3"  # an archive without a history
    git("init", "--quiet")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "--quiet", "-m", "first")
    commit = git("rev-parse", "HEAD")
    at = f"[{commit[:7]}](https://example.com/r/commit/{commit})"
    assert described() == f"bertlab 1.2.3 in development ({at})"
    git("tag", "v1.2.3")
    assert described() == f"bertlab 1.2.3 ({at})"
    (tmp_path / "file").write_text("b")
    assert described() == f"bertlab 1.2.3 in development ({at}, with changes)"


def configured(key: str) -> str:
    import configparser

    settings = configparser.ConfigParser()
    settings.read(ROOT / "settings.ini")
    return settings["DEFAULT"][key]


def test_every_page_names_its_version_and_the_others(site):
    version = configured("version")
    footer = yaml.safe_load((site / "_proc/nbdev.yml").read_text())["website"]["page-footer"]
    assert footer["left"].startswith(f"bertlab {version}")
    assert footer["right"][0]["href"] == f"{sync.Address.read(ROOT).git_url}/releases"
