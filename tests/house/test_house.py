"Layers of the package, generated files, light imports, one public address, style of notebooks."

import ast
import importlib
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
# The chapters that a chapter may import.
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


SUFFIXES = set(".py .ipynb .md .toml .ini .yml .css .txt .sh .cfg .json .yaml".split()) | {""}
SKIPPED = re.compile(
    r"^(\.git|\.venv.*|\..*cache|\.hypothesis|_proc|_docs|build|dist|.*\.egg-info|__pycache__|bertlab-demo.*|lightning_logs|nbdev\.yml)$"
)


def text_files(root: Path) -> list[Path]:
    "Return every text file of the project, generated or not."
    return [
        path
        for path in root.rglob("*")
        if path.is_file()
        and path.suffix in SUFFIXES
        and not any(map(SKIPPED.match, path.relative_to(root).parts))
    ]


# --- chapters -------------------------------------------------------------------------------------


def notebook_numbers() -> dict[str, int]:
    "Return the number of the notebook of each module, by `chapter.module`."
    return {name: int(path.name[:2]) for name, path in sync.modules_made(ROOT).items()}


def imports_of(source: str, chapter: str = "") -> list[tuple[str, bool]]:
    """Return every module that a source imports, and whether it does so inside a function.

    Ours are named `bertlab.chapter.module`, however they are imported; `chapter` is that of the source.
    """
    imports = []

    def visit(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                imports.extend((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                package = {0: "", 1: f"bertlab.{chapter}", 2: "bertlab"}[child.level]
                base = ".".join(filter(None, (package, child.module)))
                # `from bertlab.data import packing` names a module, `from bertlab.data.packing import x` none.
                is_chapter = base.split(".")[0] == "bertlab" and base.count(".") < 2
                names = [f"{base}.{alias.name}" for alias in child.names] if is_chapter else [base]
                imports.extend((name, inside) for name in names)
            function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            visit(child, inside or function)

    visit(ast.parse(source), False)
    return imports


def forbidden_imports(module: str, source: str, number_of: dict[str, int]) -> list[str]:
    "Return the imports of one module, `chapter.name`, that the architecture forbids."
    chapter, problems = module.partition(".")[0], []
    for name, inside in imports_of(source, chapter):
        top = name.split(".")[0]
        target = ".".join(name.split(".")[1:3]) if top == "bertlab" else ""
        if target in number_of:
            another = target.partition(".")[0]
            called = module == "cli.commands" and inside  # a command imports its work when it runs
            is_later = another == chapter and number_of[target] >= number_of[module] and not called
            if is_later or another not in {chapter} | MAY_IMPORT[chapter]:
                problems.append(name)
        elif target not in {"", "__version__", "__file__"}:
            problems.append(name)
        if (
            (top == "lightning" and chapter in WITHOUT_LIGHTNING)
            or (top == "torch_xla" and not (inside and module in {"core.devices", "train.xla"}))
            or (top in {"torch", "transformers", "datasets"} and module in LIGHT and not inside)
            or (top in {"torch", "transformers", "datasets"} and module == "core.plots")
            or top in NOT_FOR_USERS
        ):
            problems.append(name)
    return problems


@pytest.mark.parametrize("path", MODULES, ids=id_of)
def test_a_module_imports_earlier_chapters_and_lower_numbers(path):
    module = f"{path.parent.name}.{path.stem}"
    assert forbidden_imports(module, path.read_text(encoding="utf-8"), notebook_numbers()) == []


@pytest.mark.parametrize(
    "module, source",
    [
        ("data.packing", "def f():\n    from ..train import trainer"),
        ("data.packing", "from . import module"),
        ("data.packing", "from .nowhere import x"),
        ("model.config", "import lightning as L"),
        ("train.xla", "import torch_xla"),
        ("data.corpus", "if True:\n    import torch"),
        ("data.packing", "from fastcore.all import *"),
    ],
)
def test_a_forbidden_import_is_reported(module, source):
    assert forbidden_imports(module, source, notebook_numbers())


def test_every_module_has_one_notebook_in_its_chapter():
    notebook_of = sync.modules_made(ROOT)
    for name, path in notebook_of.items():
        assert name.partition(".")[0] == path.relative_to(ROOT / "nbs").parts[0], path
    assert sorted(notebook_of) == sorted(f"{path.parent.name}.{path.stem}" for path in MODULES)
    for chapter in sync.CHAPTERS:
        numbers = [path.name[:2] for path in (ROOT / "nbs" / chapter).glob("[0-9]*.ipynb")]
        assert len(numbers) == len(set(numbers)), chapter


# --- names ----------------------------------------------------------------------------------------


def in_new_python(code: str, *arguments: str) -> str:
    "Return what a piece of code prints in an interpreter of its own."
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_name_loads_and_has_a_docstring():
    import bertlab

    for name, module in bertlab._PLACES.items():
        loaded = getattr(bertlab, name)
        assert loaded is getattr(importlib.import_module(f"bertlab.{module}"), name)
        assert (loaded.__doc__ or "").strip(), name
    count, chapters = len(bertlab._PLACES), [getattr(bertlab, name) for name in bertlab._CHAPTERS]
    assert 100 <= count == sum(len(names.split()) for names in bertlab._FACE.values()) <= 140
    assert [chapter.__name__ for chapter in chapters] == [
        f"bertlab.{name}" for name in sync.CHAPTERS
    ]
    assert dir(bertlab) == sorted(dir(bertlab)) and len(dir(bertlab)) == count + len(chapters) + 1


def test_an_unknown_name_suggests_a_public_one():
    import bertlab

    with pytest.raises(AttributeError, match="PretrainingModule"):
        _ = bertlab.PretrainingModul


HEAVY = set("torch transformers lightning datasets matplotlib numpy pandas IPython".split())
PRINT_MODULES = "\nimport sys; print('LOADED', *sys.modules)"
COMMAND = """
from bertlab.cli.main import main
try:
    code = main()
except SystemExit as stop:
    code = stop.code
assert not code, code
"""


@pytest.mark.parametrize(
    "code, arguments",
    [
        ("import bertlab; dir(bertlab)", ()),
        (COMMAND, ("--help",)),
        (COMMAND, ("demo", "--help")),
        (COMMAND, ("--version",)),
    ],
)
def test_imports_and_help_load_nothing_heavy(code, arguments):
    printed = in_new_python(code + PRINT_MODULES, *arguments)
    assert HEAVY & set(printed.partition("LOADED")[2].split()) == set()


@pytest.mark.parametrize("chapter", sync.CHAPTERS)
def test_the_index_of_a_chapter_lists_its_modules(chapter):
    from chapter_map import part_table, read_parts

    cells = json.loads((ROOT / f"nbs/{chapter}/index.ipynb").read_text(encoding="utf-8"))["cells"]
    tables = ["".join(out["data"]["text/markdown"]) for cell in cells if cell["cell_type"] == "code"
              for out in cell["outputs"] if "text/markdown" in out.get("data", {})]  # fmt: skip
    assert tables == [part_table(read_parts(ROOT / "bertlab" / chapter))]


def test_the_citation_has_version_and_license():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert f"version = {citation['version']}\n" in (ROOT / "settings.ini").read_text("utf-8")
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text("utf-8")


# --- generated files ------------------------------------------------------------------------------


def test_generated_files_match_the_notebooks(tree):
    before = {path: path.read_bytes() for path in text_files(tree)}
    run_sync(tree)
    after = {path: path.read_bytes() for path in text_files(tree)}
    changed = [name for name in before.keys() | after if before.get(name) != after.get(name)]
    assert changed == [], "run `make sync`"


def test_a_module_written_by_hand_is_not_removed(tree):
    by_hand, old = tree / "bertlab/data/mine.py", tree / "bertlab/data/old.py"
    by_hand.write_text("x = 1\n")
    before = {path: path.read_bytes() for path in text_files(tree)}
    with pytest.raises(SystemExit, match="bertlab/data/mine.py is written by hand"):
        sync.sync(tree)
    assert {path: path.read_bytes() for path in text_files(tree)} == before
    by_hand.unlink()
    old.write_text("# AUTOGENERATED! DO NOT EDIT! File to edit: ../../nbs/data/99_old.ipynb.\n")
    run_sync(tree)
    assert not old.exists()


def run_sync(tree: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/sync.py"], cwd=tree, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_the_public_address_is_read_from_settings_alone(tree):
    old = sync.Address.read(tree)
    settings = (tree / "settings.ini").read_text(encoding="utf-8")
    for key, value in {
        "user": "somebody",
        "repo": "elsewhere",
        "branch": "trunk",
        "pip_name": "other",
    }.items():
        settings = re.sub(rf"^{key} = .*$", f"{key} = {value}", settings, flags=re.MULTILINE)
    (tree / "settings.ini").write_text(settings, encoding="utf-8")
    run_sync(tree)

    traces = [
        old.git_url,
        old.site_url,
        f"{old.user}/{old.repo}/blob",
        f"{old.user}/{old.repo}.git",
        f'install "{old.pip_name}',
    ]
    leftovers = [
        f"{path.relative_to(tree)}: {trace}"
        for path in text_files(tree)
        for trace in traces
        if trace.removeprefix("https://") in path.read_text(encoding="utf-8")
    ]
    assert leftovers == []
    for path in sync.notebooks(tree):
        text = path.read_text(encoding="utf-8")
        page = f"https://colab.research.google.com/github/somebody/elsewhere/blob/trunk/{path.relative_to(tree)}"
        if lint.page_type(path) != "index":
            assert f"[Open in Colab]({page})" in text, path
        assert (
            "other @ git+https://github.com/somebody/elsewhere@trunk" in text or "other[" in text
        ), path
    readme = (tree / "README.md").read_text(encoding="utf-8")
    assert "github.com/somebody/elsewhere" in readme
    assert (
        'Homepage = "https://github.com/somebody/elsewhere"'
        in (tree / "pyproject.toml").read_text()
    )


def test_outputs_are_stored_for_readers_without_a_kernel(tmp_path):
    import base64
    import io

    from PIL import Image

    Image.new("RGB", (1280, 720), "white").save(drawn := io.BytesIO(), format="png")
    png = {"image/png": base64.b64encode(drawn.getvalue()).decode()}
    widget = {sync.WIDGET: {"model_id": "a"}}
    outputs = [
        {"output_type": "display_data", "data": data, "metadata": {"image/png": {"width": 640}}}
        for data in (png, {**widget, "text/html": "<p>"}, {**widget, "text/plain": "50%|"})
    ]
    outputs.append({"output_type": "stream", "name": "stderr", "text": "/site-packages/x.py: old"})
    path = tmp_path / "page.ipynb"
    path.write_text(json.dumps({"cells": [{"outputs": outputs}], "metadata": {"widgets": {}}}))
    sync.clean_outputs(path)
    notebook = json.loads(path.read_text())
    figure, static = notebook["cells"][0]["outputs"]
    small = io.BytesIO(base64.b64decode(figure["data"]["image/png"]))
    assert Image.open(small).size == (640, 360) and notebook["metadata"] == {}
    assert static["data"] == {"text/html": "<p>"}


def test_a_command_is_stored_as_a_terminal_shows_it(tmp_path):
    texts = [
        "\rreading: 0doc [00:00, ?doc/s]\rreading: 9doc [00:00, 11.93doc/s]\r\n",
        "\r 50%|███  | 1/2 [00:00<00:01, 1.5it/s]\rloss  1.5\r\n",
        "99.0% full, [CLS] of 12/s\r\n",
    ]
    outputs = [{"output_type": "stream", "name": "stdout", "text": [text]} for text in texts]
    path = tmp_path / "page.ipynb"
    cells = [{"cell_type": "code", "outputs": outputs, "source": ["!bertlab demo"]}]
    path.write_text(json.dumps({"cells": cells, "metadata": {}}))
    sync.clean_outputs(path)
    (output,) = json.loads(path.read_text())["cells"][0]["outputs"]
    assert output["text"] == ["loss  1.5\n", "99.0% full, [CLS] of 12/s\n"]


# --- style ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=id_of)
def test_a_notebook_follows_the_style(path):
    assert lint.lint(path) == []


OUTPUT = {"output_type": "stream", "name": "stdout", "text": "/".join(("", "root", "x"))}
FAULTS = {
    "displays nothing": {"outputs": []},
    "ends in an error": {"outputs": [{"output_type": "error"}]},
    "is not clean": {"execution_count": 3},
    "path of one machine": {"outputs": [OUTPUT]},
    "names the registry": {"source": ".".join(("see https://pypi", "org"))},
    "no hidden set-up cell": {"source": "1"},
    "an id of its own": {"id": None},
}


@pytest.mark.parametrize("message", FAULTS)
def test_the_lint_reports_a_fault_of_a_page(message, tmp_path):
    page = ROOT / "nbs/core/02_durations.ipynb"
    notebook = json.loads(page.read_text(encoding="utf-8"))
    is_setup = lambda cell: sync.is_setup(sync.source_of(cell))
    lesson = lambda cell: cell.get("outputs") and not lint.exported(cell)
    find = is_setup if "set-up" in message else lesson
    next(cell for cell in reversed(notebook["cells"]) if find(cell)).update(FAULTS[message])
    (tmp_path / page.name).write_text(json.dumps(notebook))
    assert any(message in problem for problem in lint.lint(tmp_path / page.name))


def test_no_file_names_a_registry_or_a_path_of_one_machine():
    matches = [
        f"{name_of(path)}: {match[0]}"
        for path in text_files(ROOT)
        for pattern in (lint.REGISTRY, lint.MACHINE_PATH)
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]
    assert matches == []


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
# In an extra; flash-attn is used where it is installed; ipython comes with ipywidgets.
ELSEWHERE = {"torch-xla", "pytorch-optimizer", "triton", "flash-attn", "ipython", "datatrove", "loguru", "streaming-community",
             "mteb", "optuna", "peft", "ray", "wandb", "sentence-transformers", "onnx", "onnx-ir", "onnxruntime", "openvino", "nncf", "protobuf", "pypdf", "trackio"}  # fmt: skip


INDIRECT = {"jinja2"}  # huggingface_hub fills the template of a model card with it


def test_declared_dependencies_match_the_imports():
    imported = set()
    for path in MODULES:
        for name, _ in imports_of(path.read_text(encoding="utf-8")):
            top = name.split(".")[0]
            if top and top not in sys.stdlib_module_names and top != "bertlab":
                imported.add(PACKAGE_OF.get(top, top.replace("_", "-")))
    runtime, extras = requirements()
    assert {"dev", "docs", "gpu", "tpu", "optimizers"} <= set(extras)
    assert imported - runtime - ELSEWHERE == set(), "imported but not declared"
    assert runtime - imported == INDIRECT, "declared but not imported"
