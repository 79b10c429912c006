"The wheel has what a user needs: it installs and imports without the repository."

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow
PACKAGE = ROOT / "bertlab"
MODULES = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
DATA = {
    path.relative_to(PACKAGE).as_posix()
    for path in PACKAGE.rglob("*")
    if path.is_file() and path.suffix not in (".py", ".pyc")
}


def run(*command, **options) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=300, **options
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    "The wheel, made from the source distribution, made from a copy of the sources, all offline."
    source, out = tmp_path_factory.mktemp("source") / "copy", tmp_path_factory.mktemp("dist")
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, source / name)
    for name in ("bertlab", "nbs", "tests", "scripts"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignore, symlinks=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    return {"wheel": next(out.glob("*.whl")), "sdist": next(out.glob("*.tar.gz"))}


@pytest.fixture(scope="module")
def clean(built, tmp_path_factory) -> Path:
    "The Python of an environment that has the wheel and its dependencies, and cannot see the repository."
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    install = ["install", "--quiet", "--no-deps", "--no-index", built["wheel"]]
    run(sys.executable, "-m", "pip", "--python", python, *install)
    # Packages of this environment, but not its .pth files: those of an editable install stay unread.
    target = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"
    ).stdout.strip()
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(target) / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    return python


def without_pythonpath() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def test_the_wheel_holds_the_package_and_nothing_else(built):
    names = set(zipfile.ZipFile(built["wheel"]).namelist())
    package = {name for name in names if ".dist-info/" not in name}
    assert package == {f"bertlab/{name}" for name in MODULES | DATA}


def test_the_source_distribution_can_be_built_from(built):
    names = {name.partition("/")[2] for name in tarfile.open(built["sdist"]).getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert {f"bertlab/{name}" for name in MODULES | DATA} <= names
    assert not any(name.startswith("nbs/") for name in names)


def test_every_module_imports_from_the_installed_wheel(clean, tmp_path):
    code = """
import importlib, pathlib, bertlab
folder = pathlib.Path(bertlab.__file__).parent
for path in sorted(folder.rglob("*.py")):
    if path.name == "__main__.py":  # it is the program: an import would run it
        print(path)
        continue
    parts = ["bertlab", *path.relative_to(folder).with_suffix("").parts]
    print(importlib.import_module(".".join(part for part in parts if part != "__init__")).__file__)
"""
    out = run(clean, "-c", code, cwd=tmp_path, env=without_pythonpath()).stdout.splitlines()
    inside = clean.parent.parent
    assert all(Path(line).is_relative_to(inside) for line in out)
    assert {line.rpartition("/bertlab/")[2] for line in out} == MODULES


def test_the_installed_command_answers(clean, tmp_path):
    command = clean.parent / "bertlab"
    options = {"cwd": tmp_path, "env": without_pythonpath()}
    assert "demo" in run(command, "--help", **options).stdout
    version = run(
        clean, "-c", "import bertlab; print(bertlab.__version__)", **options
    ).stdout.strip()
    assert version in run(command, "--version", **options).stdout
    shipped = run(command, "pretrain", "--config", "colab-gpu", "--print_config", **options)
    assert "train_dataset_name_or_path: Salesforce/wikitext" in shipped.stdout
