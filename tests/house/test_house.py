"The house's own rules: layers, generated files, light imports, one public address, style of notebooks."

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import lint
import pytest
import sync
import yaml
from conftest import ROOT

NOTEBOOKS = sync.notebooks(ROOT)
MODULES = sorted(
    path for path in (ROOT / "bertlab").glob("*/*.py") if not path.name.startswith("_")
)
# A chapter imports only the chapters that stand here beside it.
MAY_IMPORT = {
    "core": set(),
    "data": {"core"},
    "model": {"core", "data"},
    "optim": {"core"},
    "train": {"core", "data", "model", "optim"},
    "finetuning": {"core", "data", "model", "optim", "train"},
    "embeddings": {"core", "data", "model", "optim", "train"},
    "explorers": {"core", "data", "model", "optim", "train", "embeddings"},
    "cli": {"core", "data", "model", "optim", "train", "finetuning", "embeddings", "explorers"},
    "course": {"core"},
}
WITHOUT_LIGHTNING = {"core", "model", "optim"}
# What the command reads before it knows that it must train.
LIGHT = {"data.readers", "data.documents", "data.sources", "data.corpus", "data.tokenizers"}
NOT_FOR_USERS = {"nbdev", "fastcore", "execnb"}


def id_of(path: Path) -> str:
    "A notebook's or module's chapter and name."
    return f"{path.parent.name}/{path.stem}"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_files(root: Path) -> list[Path]:
    "Every text file of the project, generated or not."
    kinds = {
        ".py",
        ".ipynb",
        ".md",
        ".toml",
        ".ini",
        ".yml",
        ".css",
        ".txt",
        ".sh",
        ".cfg",
        ".json",
        ".yaml",
        "",
    }
    skip = re.compile(
        r"^(\.git|\.venv.*|\..*cache|\.hypothesis|_proc|_docs|build|dist|.*\.egg-info|__pycache__|bertlab-demo.*|lightning_logs|nbdev\.yml)$"
    )
    found = []
    for path in root.rglob("*"):
        inside = path.relative_to(root).parts
        if path.is_file() and path.suffix in kinds and not any(map(skip.match, inside)):
            found.append(path)
    return found


# --- chapters -------------------------------------------------------------------------------------


def numbers() -> dict[str, int]:
    "The number of the notebook that exports to each module, by `chapter.module`."
    found = {}
    for path in NOTEBOOKS:
        match = re.search(r"#\|\s*default_exp\s+([\w.]+)", path.read_text(encoding="utf-8"))
        if match:
            found[match[1]] = int(re.match(r"\d\d", path.name)[0])
    return found


def imports_of(source: str, chapter: str = "") -> list[tuple[str, bool]]:
    """Every module that a source imports, and whether it does so inside a function.

    Ours are named `bertlab.chapter.module`, however they are imported; `chapter` is where the source stands.
    """
    found = []

    def visit(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                above = {0: "", 1: f"bertlab.{chapter}", 2: "bertlab"}[child.level]
                base = ".".join(filter(None, (above, child.module)))
                # `from bertlab.data import packing` names a module, `from bertlab.data.packing import x` none.
                whole = base.split(".")[0] == "bertlab" and base.count(".") < 2
                names = [f"{base}.{alias.name}" for alias in child.names] if whole else [base]
                found.extend((name, inside) for name in names)
            elif isinstance(child, ast.Attribute) and getattr(child.value, "id", None) == "bertlab":
                found.append(
                    (f"bertlab.{child.attr}", inside)
                )  # the lazy names of the package count as imports
            function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            visit(child, inside or function)

    visit(ast.parse(source), False)
    return found


def broken_chapters(module: str, source: str, number_of: dict[str, int]) -> list[str]:
    "The imports of one module, `chapter.name`, that the architecture forbids."
    chapter, problems = module.partition(".")[0], []
    for name, inside in imports_of(source, chapter):
        top = name.split(".")[0]
        if top == "bertlab":
            target = ".".join(name.split(".")[1:3])
            if target in {"", "__version__", "__file__"}:
                continue
            if target not in number_of:
                problems.append(f"imports {name}, which no notebook exports to")
            elif (other := target.partition(".")[0]) == chapter:
                # A command imports its work when it is called; the work knows the table of commands.
                called = module == "cli.commands" and inside
                if number_of[target] >= number_of[module] and not called:
                    problems.append(
                        f"number {number_of[module]} imports {target}, number {number_of[target]}"
                    )
            elif other not in MAY_IMPORT[chapter]:
                problems.append(
                    f"{chapter} imports {target}; it may import {sorted(MAY_IMPORT[chapter])}"
                )
        if top in {"lightning", "pytorch_lightning"} and chapter in WITHOUT_LIGHTNING:
            problems.append(
                f"{chapter} imports {name}; Lightning is not for {sorted(WITHOUT_LIGHTNING)}"
            )
        if top == "torch_xla" and not (inside and module == "train.xla"):
            problems.append(f"{module} imports {name}; only inside functions of train.xla")
        if top in {"torch", "transformers", "lightning", "datasets"} and module == "core.plots":
            problems.append(f"plots imports {name}; it knows arrays only")
        if top in {"torch", "transformers", "datasets"} and module in LIGHT and not inside:
            problems.append(f"{module} imports {name} at its top; only inside functions")
        if top in NOT_FOR_USERS:
            problems.append(f"imports {name}, which users of the package do not have")
    return problems


@pytest.mark.parametrize("path", MODULES, ids=id_of)
def test_a_module_imports_only_chapters_to_its_left_and_lower_numbers(path):
    module = f"{path.parent.name}.{path.stem}"
    assert broken_chapters(module, path.read_text(encoding="utf-8"), numbers()) == []


SMALL_HOUSE = {"core.plots": 3, "data.corpus": 4, "data.packing": 10, "data.module": 16, "model.config": 1,
               "train.modules": 2, "train.xla": 5, "train.trainer": 14}  # fmt: skip


@pytest.mark.parametrize(
    "module, source, word",
    [
        ("data.packing", "from ..train.trainer import make_trainer", "data imports train.trainer"),
        (
            "data.packing",
            "from bertlab.train.trainer import make_trainer",
            "data imports train.trainer",
        ),
        ("data.packing", "def f():\n    from ..train import trainer", "data imports train.trainer"),
        ("data.packing", "import bertlab.data.packing", "number 10 imports data.packing"),
        ("data.packing", "from .module import x", "number 10 imports data.module, number 16"),
        ("data.packing", "from . import module", "number 10 imports data.module, number 16"),
        ("data.packing", "from .nowhere import x", "no notebook exports to"),
        ("data.packing", "import bertlab\nbertlab.SomeClass()", "no notebook exports to"),
        ("model.config", "import lightning as L", "Lightning is not for"),
        ("train.xla", "import torch_xla", "only inside functions"),
        ("data.packing", "def f():\n    import torch_xla.core.xla_model", "only inside functions"),
        ("core.plots", "def f():\n    import torch", "arrays only"),
        ("data.corpus", "from transformers import AutoTokenizer", "only inside functions"),
        ("data.corpus", "if True:\n    import torch", "only inside functions"),
        ("data.packing", "from fastcore.all import *", "users of the package"),
    ],
)
def test_a_forbidden_import_is_found(module, source, word):
    assert any(word in problem for problem in broken_chapters(module, source, SMALL_HOUSE))


def test_allowed_imports_pass():
    source = (
        "import bertlab\nbertlab.__version__\nimport lightning\nfrom ..data.corpus import x\n"
        "from bertlab.core import plots\nfrom .modules import y"
    )
    assert broken_chapters("train.trainer", source, SMALL_HOUSE) == []
    assert broken_chapters("train.xla", "def f():\n    import torch_xla", SMALL_HOUSE) == []


def test_every_module_comes_from_one_notebook_in_the_folder_of_its_chapter():
    made = {}
    for path in NOTEBOOKS:
        for name in re.findall(r"#\|\s*default_exp\s+([\w.]+)", path.read_text("utf-8")):
            folder = path.relative_to(ROOT / "nbs").parts[0]
            assert name not in made and name.partition(".")[0] == folder, path
            made[name] = path
    assert sorted(made) == sorted(f"{path.parent.name}.{path.stem}" for path in MODULES)
    assert {name.partition(".")[0] for name in made} == set(sync.PACKAGES)


def test_numbers_are_unique_within_a_chapter():
    for chapter in sync.CHAPTERS:
        found = [path.name[:2] for path in (ROOT / "nbs" / chapter).glob("[0-9]*.ipynb")]
        assert sorted(found) == sorted(set(found)), chapter


# --- names ----------------------------------------------------------------------------------------


def in_fresh_python(code: str) -> str:
    "What a piece of code prints in an interpreter of its own."
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_name_loads_from_the_package_and_says_what_it_is():
    code = """
import importlib, json, bertlab
places = bertlab._PLACES
wrong = [n for n, m in places.items() if getattr(bertlab, n) is not getattr(importlib.import_module(f"bertlab.{m}"), n)]
undocumented = [n for n in places if not (getattr(bertlab, n).__doc__ or "").strip()]
listed = sum(len(names.split()) for names in bertlab._FACE.values())
chapters = [getattr(bertlab, name).__name__ for name in bertlab._CHAPTERS]
print(json.dumps([listed, len(places), wrong, undocumented, chapters, dir(bertlab)]))
"""
    listed, count, wrong, undocumented, chapters, shown = json.loads(
        in_fresh_python(code).splitlines()[-1]
    )
    assert listed == count, "a name is listed twice"
    assert 100 <= count <= 140 and (wrong, undocumented) == ([], [])
    assert chapters == [f"bertlab.{name}" for name in sync.CHAPTERS]
    assert shown == sorted(shown) and {"PretrainingModule", "embedded_corpus", "data"} <= set(shown)
    assert len(shown) == count + len(chapters) + 1


def test_an_unknown_name_is_an_attribute_error_that_suggests_a_known_one():
    import bertlab

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = bertlab.no_such_name
    with pytest.raises(AttributeError, match="did you mean PretrainingModule"):
        _ = bertlab.PretrainingModul


HEAVY = {
    "torch",
    "transformers",
    "lightning",
    "datasets",
    "matplotlib",
    "numpy",
    "pandas",
    "IPython",
}


def heavy_after(code: str, *arguments: str) -> set[str]:
    "The heavy packages that are loaded after a piece of code ran in a fresh interpreter."
    code += "\nimport sys; print('LOADED', *sys.modules)"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return HEAVY & set(done.stdout.partition("LOADED")[2].split())


def test_import_bertlab_loads_nothing_heavy():
    assert heavy_after("import bertlab, sys; dir(bertlab)") == set()


@pytest.mark.parametrize(
    "chapter",
    ["core", "data", "model", "optim", "train", "finetuning", "embeddings", "explorers", "cli"],
)
def test_the_front_page_of_a_chapter_lists_the_parts_that_it_has(chapter):
    sys.path.insert(0, str(ROOT / "scripts"))
    from chapter_map import part_table, read_parts

    cells = json.loads((ROOT / f"nbs/{chapter}/index.ipynb").read_text(encoding="utf-8"))["cells"]
    shown = ["".join(out["data"]["text/markdown"]) for cell in cells if cell["cell_type"] == "code"
             for out in cell["outputs"] if "text/markdown" in out.get("data", {})]  # fmt: skip
    assert shown == [part_table(read_parts(ROOT / "bertlab" / chapter))]


def test_a_citation_names_the_version_and_the_licence_that_are_here():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert f"version = {cited['version']}\n" in (ROOT / "settings.ini").read_text(encoding="utf-8")
    assert cited["authors"] == [{"name": "The bertlab authors"}]
    assert f'license = "{cited["license"]}"' in (ROOT / "pyproject.toml").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("arguments", [("--help",), ("demo", "--help"), ("--version",)])
def test_asking_the_command_for_help_loads_nothing_heavy(arguments):
    code = """
import sys
from bertlab.cli.main import main
try:
    code = main()
except SystemExit as stop:
    code = stop.code
assert not code, code
"""
    assert heavy_after(code, *arguments) == set()


# --- generated files ------------------------------------------------------------------------------


def test_generated_files_are_in_step_with_the_notebooks(tree):
    before = {path: path.read_bytes() for path in text_files(tree)}
    run_sync(tree)
    after = {path: path.read_bytes() for path in text_files(tree)}
    changed = [name for name in before.keys() | after if before.get(name) != after.get(name)]
    assert changed == [], "run `make sync`"


def test_a_module_that_a_person_wrote_is_not_removed(tree):
    mine, old = tree / "bertlab/data/mine.py", tree / "bertlab/data/old.py"
    mine.write_text("x = 1\n")
    before = {path: path.read_bytes() for path in text_files(tree)}
    with pytest.raises(SystemExit, match="bertlab/data/mine.py is written by hand"):
        sync.sync(tree)
    assert {path: path.read_bytes() for path in text_files(tree)} == before
    mine.unlink()
    old.write_text("# AUTOGENERATED! DO NOT EDIT! File to edit: ../../nbs/data/99_old.ipynb.\n")
    run_sync(tree)
    assert not old.exists()


def run_sync(tree: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/sync.py"], cwd=tree, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_the_public_address_stands_in_settings_alone(tree):
    old = sync.Address.read(tree)
    settings = (tree / "settings.ini").read_text(encoding="utf-8")
    for key, value in {"user": "somebody", "repo": "elsewhere", "branch": "trunk"}.items():
        settings = re.sub(rf"^{key} = .*$", f"{key} = {value}", settings, flags=re.MULTILINE)
    (tree / "settings.ini").write_text(settings, encoding="utf-8")
    run_sync(tree)

    # Not one place keeps the old address, so each was generated ...
    traces = [
        old.git_url,
        old.site_url,
        f"{old.user}/{old.repo}/blob",
        f"{old.user}/{old.repo}.git",
    ]
    left = [
        f"{path.relative_to(tree)}: {trace}"
        for path in text_files(tree)
        for trace in traces
        if trace.removeprefix("https://") in path.read_text(encoding="utf-8")
    ]
    assert left == []
    # ... and each notebook, the README and the package's metadata follow to the new one.
    for path in sync.notebooks(tree):
        text = path.read_text(encoding="utf-8")
        page = f"https://colab.research.google.com/github/somebody/elsewhere/blob/trunk/{path.relative_to(tree)}"
        if lint.page_type(path) != "index":
            assert f"[Open in Colab]({page})" in text, path
        assert "git+https://github.com/somebody/elsewhere@trunk" in text, path
    readme = (tree / "README.md").read_text(encoding="utf-8")
    assert "github.com/somebody/elsewhere" in readme
    assert (
        'Homepage = "https://github.com/somebody/elsewhere"'
        in (tree / "pyproject.toml").read_text()
    )


def test_an_empty_place_is_filled_and_a_filled_one_is_filled_anew():
    first = sync.Address("a", "b", "main", "https://github.com/a/b", "https://a.github.io/b")
    second = sync.Address("c", "d", "dev", "https://github.com/c/d", "https://c.github.io/d")
    empty = (
        "[Open in Colab](colab), [Documentation](site), [Source](source), [Issues](issues)\n"
        '```\npip install "bertlab @ git+ADDRESS"\ngit clone ADDRESS\ncd REPO\nmake demo\n```\n'
        "[another page](10_corpus.ipynb)"
    )
    page = "https://colab.research.google.com/github/c/d/blob/dev/nbs/x.ipynb"
    wanted = (
        f"[Open in Colab]({page}), [Documentation](https://c.github.io/d), "
        "[Source](https://github.com/c/d), [Issues](https://github.com/c/d/issues)\n"
        '```\npip install "bertlab @ git+https://github.com/c/d@dev"\n'
        "git clone https://github.com/c/d\ncd d\nmake demo\n```\n"
        "[another page](10_corpus.ipynb)"
    )
    assert sync.fill(empty, second, "nbs/x.ipynb") == wanted
    assert sync.fill(sync.fill(empty, first, "nbs/x.ipynb"), second, "nbs/x.ipynb") == wanted


def test_the_readme_is_the_index_without_its_hidden_cells(tmp_path):
    def code(source, *outputs):
        return {"cell_type": "code", "source": source, "outputs": list(outputs)}

    cells = [
        {
            "cell_type": "markdown",
            "source": "# Title\n[page](10_x.ipynb#y) [up](../LICENSE) [far](https://a.b)",
        },
        code("#| hide\nsecret = 1"),
        code(
            "#| fig-alt: 'x'\n1 + 1", {"output_type": "execute_result", "data": {"text/plain": "2"}}
        ),
        code(
            '#| fig-alt: "A dot"\ndraw()',
            {
                "output_type": "display_data",
                "data": {"image/png": "AAAA", "text/plain": "<Figure>"},
            },
        ),
        code(
            "print('a\\n```')",
            {"output_type": "stream", "name": "stdout", "text": ["a\n", "```\n"]},
        ),
    ]
    (tmp_path / "nbs").mkdir()
    (tmp_path / "nbs/index.ipynb").write_text(json.dumps({"cells": cells}))
    files = sync.readme(tmp_path)
    text = files.pop("README.md").decode()
    assert files == {"README_files/figure_1.png": b"\0\0\0"}
    assert "[page](nbs/10_x.ipynb#y) [up](LICENSE) [far](https://a.b)" in text
    assert "secret" not in text and "#|" not in text
    assert "```python\n1 + 1\n```\n\n```text\n2\n```\n" in text
    assert "![A dot](README_files/figure_1.png)" in text and "<Figure>" not in text
    assert "````text\na\n```\n````" in text


# --- style ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=id_of)
def test_a_notebook_keeps_the_house_style(path):
    assert lint.lint(path) == []


def good_notebook() -> dict:
    "A small notebook that the lint accepts."

    def markdown(text):
        return {"cell_type": "markdown", "source": text, "metadata": {}}

    def code(text, *outputs):
        return {
            "cell_type": "code",
            "source": text,
            "metadata": {},
            "outputs": list(outputs),
            "execution_count": None,
        }

    def shown(value="2"):
        return {
            "output_type": "execute_result",
            "data": {"text/plain": value},
            "execution_count": None,
        }

    figure = {"output_type": "display_data", "data": {"image/png": "AAAA"}, "metadata": {}}
    cells = [
        code("#| default_exp x"),
        markdown(
            "# Title\n> What it is.\n\n**You can now** a. **Before**: b. **Takes** 1 minute. [Open in Colab](c)"
        ),
        code(f"#| hide\n#| eval: false\n{sync.SETUP_MARK}"),
        code("#| export\nimport os"),
        markdown("## Why\n\nBecause."),
        code("#| export\ndef f():\n    return os.sep"),
        code("f()", shown()),
        markdown("More."),
        code('#| fig-alt: "One"\ndraw()', figure),
        code('#| fig-alt: "Two"\ndraw()', figure),
        markdown("## What goes wrong\n\nThis."),
        code("check()", shown("'not attempted'")),
        markdown(
            "## Exercises\n\n1. a\n2. b\n\n<details>s</details>\n\n3. c\n\n## Recap\n\nRecall: a? b? c?"
        ),
        markdown("**References** A (2020)."),
    ]
    for number, cell in enumerate(cells):
        cell["id"] = str(number)
    kernel = {"display_name": "python3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def lint_of(notebook: dict, folder: Path) -> list[str]:
    path = folder / "10_x.ipynb"
    path.write_text(json.dumps(notebook))
    return lint.lint(path)


def test_the_lint_accepts_a_good_notebook(tmp_path):
    notebook = good_notebook()
    notebook["cells"][11]["source"] = 'def check():\n    return "not attempted"\ncheck()'
    assert lint_of(notebook, tmp_path) == []


HEAD = "#| export\n"
FAULTS = {
    "nothing displayed": (6, {"outputs": []}, "displays nothing"),
    "no alternative text": (8, {"source": "draw()"}, "without alternative text"),
    "a claim refuted": (6, {"outputs": [{"output_type": "stream", "text": lint.NOT_HERE + " x"}]}, "a claim of the page"),
    "an error left": (6, {"outputs": [{"output_type": "error"}]}, "ends in an error"),
    "an execution number": (6, {"execution_count": 3}, "is not clean"),
    "a machine's path in code": (6, {"source": "open('/ho" "me/ann/x')"}, "path of one machine"),
    "a machine's path in an output": (
        6, {"outputs": [{"output_type": "stream", "text": "saved to /ro" "ot/x"}]}, "path of one machine"
    ),
    "a registry": (4, {"source": "see https://py" "pi.org/project/x"}, "names the registry"),
    "no subtitle": (1, {"source": "# Title\n\n[Open in Colab](c)"}, "`> what it is about`"),
    "a second title": (4, {"source": "# Again"}, "one heading of the first level"),
    "no set-up cell": (2, {"source": "#| hide\nx = 1"}, "no hidden set-up cell"),
    "an id twice": (4, {"id": "0"}, "an id of its own"),
    "two exercises": (12, {"source": "## Exercises\n1. a\n2. b\n## Recap\nRecall: a? b? c?"}, "fewer than 3 numbered"),
    "two questions": (12, {"source": "## Exercises\n1. a\n2. b\n3. c\n## Recap\nRecall: a? b?"}, "three recall"),
    "no failure": (10, {"source": "## Something else"}, "What goes wrong"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_lint_finds(fault, tmp_path):
    number, change, word = FAULTS[fault]
    notebook = good_notebook()
    notebook["cells"][number].update(change)
    assert any(word in problem for problem in lint_of(notebook, tmp_path))


def test_no_file_names_a_registry_or_a_path_of_one_machine():
    found = []
    for path in text_files(ROOT):
        text = path.read_text(encoding="utf-8")
        for pattern in (lint.REGISTRY, lint.MACHINE_PATH):
            found += [f"{name_of(path)}: {match[0]}" for match in pattern.finditer(text)]
    assert found == []


# --- packaging ------------------------------------------------------------------------------------


def requirements() -> tuple[set[str], dict[str, set[str]]]:
    "Names in pyproject.toml: of the dependencies, and of each extra."
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

    def names(block: str) -> set[str]:
        return {
            name.lower().replace("_", "-")
            for name in re.findall(r'^\s*"([A-Za-z][\w-]*)', block, re.MULTILINE)
        }

    runtime = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)[1]
    extras_text = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = {m[1]: names(m[2].replace("[", "\n").replace(", ", "\n"))
              for m in re.finditer(r"^(\w+) = \[(.*?)\]$", extras_text, re.MULTILINE | re.DOTALL)}  # fmt: skip
    return names(runtime), extras


PACKAGE_OF = {
    "yaml": "pyyaml",
    "IPython": "ipython",
    "PIL": "pillow",
    "torch_xla": "torch-xla",
    "mpl_toolkits": "matplotlib",
    "sklearn": "scikit-learn",
    "streaming": "streaming-community",
    "google": "protobuf",
}
# In an extra; flash-attn is taken where somebody has built it; ipython comes with ipywidgets.
ELSEWHERE = {"torch-xla", "pytorch-optimizer", "triton", "flash-attn", "ipython", "datatrove", "loguru", "streaming-community",
             "mteb", "optuna", "peft", "ray", "wandb", "sentence-transformers", "onnx", "onnxruntime", "protobuf", "trackio"}  # fmt: skip


def test_declared_dependencies_are_those_that_the_package_imports():
    imported = set()
    for path in MODULES:
        for name, _ in imports_of(path.read_text(encoding="utf-8")):
            top = name.split(".")[0]
            if top and top not in sys.stdlib_module_names and top != "bertlab":
                imported.add(PACKAGE_OF.get(top, top.replace("_", "-")))
    runtime, extras = requirements()
    assert {"dev", "docs", "gpu", "tpu", "optimizers"} <= set(extras)
    assert imported - runtime - ELSEWHERE == set(), "imported but not declared"
    assert runtime - imported == set(), "declared but not imported"


def test_the_constraints_name_every_direct_requirement_once_for_each_python():
    from packaging.requirements import Requirement

    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and line[0] != "#"
    ]
    parsed = [Requirement(line) for line in lines]
    runtime, extras = requirements()
    for python in ("3.10", "3.11", "3.12", "3.13"):
        active = [
            r for r in parsed if r.marker is None or r.marker.evaluate({"python_version": python})
        ]
        names = [r.name for r in active]
        assert len(names) == len(set(names)), f"a package twice for Python {python}"
        assert (runtime | extras["dev"] | extras["docs"]) - {"bertlab", "docs"} - set(
            names
        ) == set(), python
        assert {str(r.specifier) for r in active if r.name == "torch"} == {"==2.13.0"}
