"""A rehearsal in Colab's environment: its versions, its kernel and `%pip`, and what a reader runs there.

`sh scripts/colab.sh` makes .venv-colab from the versions of scripts/colab.txt. A session is an empty environment
on top of it, which shows what a set-up cell adds.
"""

import json
import os
import re
import shutil
import subprocess
from importlib.metadata import distributions
from pathlib import Path

import pytest
import spine
import sync
from conftest import ROOT
from hidden import shortened
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

from test_notebooks import LONGEST, TIMEOUT, name_of, with_solutions

COLAB = ROOT / ".venv-colab"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (COLAB / ".colab").is_file(), reason="needs .venv-colab: sh scripts/colab.sh"
    ),
]
NOTEBOOKS = [
    path
    for path in sync.notebooks(ROOT)
    if path.parent.name in ("course", "guides") or path == ROOT / "nbs/index.ipynb"
]
# Pages that train with the library, each on a task of its own.
AT_FULL_LENGTH = ("three_minutes", "optimizers", "words_and_pieces", "head_start", "where_is_the_answer",
                  "one_sentence_one_vector", "writing_by_unmasking")  # fmt: skip
# What the tests set and a reader does not have.
OF_TESTS = {"IN_TEST", "MPLBACKEND", "PYTHONPATH", "TOKENIZERS_PARALLELISM", "VIRTUAL_ENV"}


class Session:
    "A session of Colab: a kernel in an empty environment on top of `.venv-colab`."

    def __init__(self, folder: Path):
        self.folder, self.project = folder, folder / "project"
        shutil.copytree(ROOT / "bertlab", self.project / "bertlab")
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, self.project)
        venv = folder / "venv"
        subprocess.run([COLAB / "bin/python", "-m", "venv", "--without-pip", venv], check=True)
        (self.preinstalled,) = COLAB.glob("lib/python3.*/site-packages")
        (self.installed,) = venv.glob("lib/python3.*/site-packages")
        (self.installed / "colab.pth").write_text(f"{self.preinstalled}\n")
        kernel = folder / "kernels/colab"
        kernel.mkdir(parents=True)
        argv = [
            str(venv / "bin/python"),
            "-Xfrozen_modules=off",
            "-m",
            "ipykernel_launcher",
            "-f",
            "{connection_file}",
        ]
        spec = {"argv": argv, "display_name": "Colab", "language": "python"}
        (kernel / "kernel.json").write_text(json.dumps(spec))

    def added(self) -> set[str]:
        "Return the names of the packages that the session has beyond Colab's or instead of them."
        return {dist.name.lower() for dist in distributions(path=[str(self.installed)])}

    def run(self, cells: list[dict], timeout: float) -> list[dict]:
        "Execute code cells in a new kernel. Raises nbclient's `CellExecutionError`."
        import nbformat  # here, because it takes seconds
        from nbclient import NotebookClient

        specs = KernelSpecManager(kernel_dirs=[str(self.folder / "kernels")])
        manager = AsyncKernelManager(kernel_name="colab", kernel_spec_manager=specs)
        notebook = nbformat.from_dict(
            {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        )
        environment = {name: value for name, value in os.environ.items() if name not in OF_TESTS}
        environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "COLAB_RELEASE_TAG": "rehearsal"}
        environment["PATH"] = f"{self.folder}/venv/bin{os.pathsep}{os.environ['PATH']}"
        client = NotebookClient(notebook, km=manager, timeout=timeout)
        return client.execute(cwd=str(self.folder), env=environment).cells


def cells_of(page: Path, project: Path, change=lambda notebook: notebook) -> list[dict]:
    "Return what a reader runs: the set-up cell, from this project, and all but the slow cells."
    notebook, _ = with_solutions(json.loads(page.read_text(encoding="utf-8")))
    cells = []
    for cell in change(notebook)["cells"]:
        source = sync.source_of(cell)
        # A script that a page fetches is this project's, too.
        source = re.sub(r"https://raw\.githubusercontent\.com(/\w+){3}", ROOT.as_uri(), source)
        if sync.is_setup(source):
            repository = r'(?<=%pip install ")([\w-]+(?:\[[a-z,]+\])?)[^"]*'
            source = re.sub(repository, rf"\1 @ {project.as_uri()}", source)
        elif re.search(r"^#\| (slow|gpu|tpu|eval: false)", source, re.MULTILINE):
            continue
        cells.append({**cell, "source": source})
    return cells


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> Session:
    return Session(tmp_path_factory.mktemp("colab"))


def setup_of(page: Path, project: Path) -> dict:
    "Return the set-up cell of a page."
    cells = cells_of(page, project)
    return next(cell for cell in cells if sync.is_setup(sync.source_of(cell)))


def printed_by(cells: list[dict]) -> str:
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


def test_the_setup_cell_replaces_nothing_in_colab(session):
    setup = setup_of(ROOT / "nbs/index.ipynb", session.project)
    pandas = {**setup, "source": "import pandas, pyarrow", "id": "pandas"}  # as Colab's kernel does
    cells = session.run([pandas, setup], TIMEOUT)
    assert {"bertlab-encoders", "lightning"} <= session.added()
    preinstalled = {dist.name.lower() for dist in distributions(path=[str(session.preinstalled)])}
    assert not session.added() & preinstalled
    printed = printed_by(cells)
    assert not re.search(r"ERROR|Attempting uninstall|Restart the session", printed), printed
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    errors = [output["text"] for output in outputs if output.get("name") == "stderr"]
    assert [text for text in errors if not sync.NOISE.search(text)] == []


def test_the_setup_cell_copes_with_what_a_session_holds(tmp_path):
    session = Session(tmp_path)
    (session.installed / "bertlab").mkdir()  # of the other project that is called so
    (session.installed / "bertlab/__init__.py").write_text("")
    metadata = session.installed / "bertlab-0.0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bertlab\nVersion: 0.0.1\n")
    setup = setup_of(ROOT / "nbs/data/18_tokenize.ipynb", session.project)
    older = "import pandas, pyarrow\npyarrow.__version__ = '17.0.0'"
    pandas = {**setup, "source": older, "id": "pandas"}
    printed = printed_by(session.run([pandas, setup], TIMEOUT))
    assert {"bertlab-encoders", "datatrove", "loguru"} <= session.added()
    assert "Successfully installed" in printed  # pip is heard, so Colab can offer a restart
    assert "Restart the session" in printed and "pyarrow 17.0.0 (now 18.1.0)" in printed


@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.parametrize("page", NOTEBOOKS, ids=name_of)
def test_a_page_runs_in_colab(page, session):
    session.run(cells_of(page, session.project, shortened), TIMEOUT)


@pytest.mark.timeout(LONGEST + 60)
@pytest.mark.parametrize(
    "page", [page for page in NOTEBOOKS if spine.name_of(page.stem) in AT_FULL_LENGTH], ids=name_of
)
def test_a_page_runs_at_full_length_in_colab(page, session):
    session.run(cells_of(page, session.project), LONGEST)
