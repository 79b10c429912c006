"The script that tries the lowest and the newest versions: what it asks for, what it runs, how it fails."

import os
import subprocess
import sys
from pathlib import Path

import pytest
import versions
import yaml
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.version import Version
from versions import tomllib

LOCK = """\
# a comment
alpha==1.2.0
beta-two==3.0.post1 ; python_version < '3.11'
torch==2.9.0+cpu
    # via nothing
"""
PROJECT = {"dependencies": ["alpha>=1.2", "Beta_Two>=2,<4"], "optional-dependencies": {
    "optimizers": ["torch==2.9.*"], "loggers": ["gamma>=9"]}}  # fmt: skip


def test_what_is_asked_for_is_what_an_installation_has():
    asked = versions.direct(PROJECT)
    assert sorted(asked) == ["alpha", "beta-two", "torch"]
    assert {name: versions.lower_bound(one) for name, one in asked.items()} == {
        "alpha": Version("1.2"), "beta-two": Version("2"), "torch": Version("2.9")}  # fmt: skip
    assert versions.lower_bound(Requirement("x<3")) is None


def test_every_direct_dependency_of_ours_has_a_lower_bound():
    asked = versions.direct(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
    assert len(asked) > 12 and not [
        name for name, one in asked.items() if versions.lower_bound(one) is None
    ]


def test_the_lock_is_compared_with_what_was_asked():
    lines = versions.compare(versions.direct(PROJECT), versions.read_lock(LOCK))
    assert [line.split()[:2] for line in lines] == [
        ["alpha", "1.2.0"],
        ["beta-two", "3.0.post1"],
        ["torch", "2.9.0+cpu"],
    ]
    assert "bound" not in lines[0] and "the bound is 2" in lines[1] and "bound" not in lines[2]


@pytest.mark.parametrize("lock, name", [
    (LOCK.replace("alpha==1.2.0\n", ""), "alpha"), (LOCK.replace("1.2.0", "1.1"), "alpha"),
    (LOCK.replace("2.9.0+cpu", "2.10.0"), "torch")])  # fmt: skip
def test_a_resolution_that_does_not_fit_is_refused_by_name(lock, name):
    with pytest.raises(SystemExit, match=name):
        versions.compare(versions.direct(PROJECT), versions.read_lock(lock))


def test_every_file_of_the_core_is_there_and_each_chapter_is_in_it():
    assert not [path for path in versions.CORE if not (ROOT / path).exists()]
    assert {Path(path).parts[1] for path in versions.CORE} >= {
        "core",
        "data",
        "model",
        "optim",
        "train",
        "finetuning",
        "cli",
    }


STAND_IN = """#!/bin/sh
echo "uv $*" >> "$CALLS"
case "$1" in
    venv)
        shift; for place in "$@"; do :; done
        mkdir -p "$place/bin"
        printf '#!/bin/sh\\necho "python $*" >> "$CALLS"\\nexit ${STATUS:-0}\\n' > "$place/bin/python"
        chmod +x "$place/bin/python" ;;
    pip)
        if [ "$2" = compile ]; then
            while [ "$1" != --output-file ]; do shift; done
            cat "$LOCK" > "$2"
        fi ;;
esac
"""


@pytest.fixture
def asked(tmp_path):
    "Runs the script in a copy of what it reads, with a stand-in for uv that writes down what it is told."
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "versions.py").write_text((ROOT / "scripts/versions.py").read_text())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    wanted = versions.direct(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
    (tmp_path / "lock").write_text(
        "".join(f"{name}=={versions.lower_bound(one)}\n" for name, one in wanted.items())
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").write_text(STAND_IN)
    (tmp_path / "bin" / "uv").chmod(0o755)

    def run(*words, status=0, path=str(tmp_path / "bin")):
        own = Path(sys.executable).with_name("uv")
        if own.exists() and not Path(path).exists():
            pytest.skip("uv lies beside this Python, and would be taken")
        environment = {**os.environ, "CALLS": str(tmp_path / "calls"), "LOCK": str(tmp_path / "lock"),
                       "STATUS": str(status), "PATH": f"{path}:/usr/bin:/bin"}  # fmt: skip
        done = subprocess.run([sys.executable, "scripts/versions.py", *words], cwd=tmp_path, env=environment,
                              capture_output=True, text=True, timeout=60)  # fmt: skip
        calls = tmp_path / "calls"
        return done, calls.read_text().splitlines() if calls.exists() else []

    return run


@pytest.mark.parametrize(
    "which, resolution, python",
    [("lowest", "lowest-direct", "3.10"), ("newest", "highest", "3.13")],
)
def test_the_core_is_run_with_what_was_resolved(asked, which, resolution, python):
    done, calls = asked(which, "--cpu", "--", "-k", "packing")
    assert done.returncode == 0, done.stderr
    assert f"--python {python}" in calls[0] and f".venv-{which}" in calls[0]
    assert "--upgrade" in calls[1]  # else what an earlier call resolved would stay
    assert (
        f"--resolution {resolution}" in calls[1]
        and "--torch-backend cpu" in calls[1]
        and "--extra optimizers" in calls[1]
    )
    assert "pip install" in calls[2] and "--constraint" in calls[2] and "pytest>=8" in calls[2]
    assert calls[3].startswith("python -m pytest -m not slow -k packing tests/core")
    assert "torch" in done.stdout and calls[4:] == []


def test_a_plan_resolves_and_runs_nothing(asked):
    done, calls = asked("lowest", "--plan")
    assert done.returncode == 0 and not [
        call for call in calls if "install" in call or call.startswith("python")
    ]
    assert "tests/core" in done.stdout


def test_the_failure_of_a_test_is_that_of_the_script(asked):
    assert asked("newest", status=3)[0].returncode == 3


def test_without_uv_the_script_says_how_to_get_it(asked):
    done, _ = asked("newest", path="/nowhere")
    assert (
        done.returncode == 1 and "pip install uv" in done.stderr and "\n" not in done.stderr.strip()
    )


def test_the_workflow_runs_the_script_by_the_week_and_by_hand():
    workflow = yaml.safe_load((ROOT / ".github/workflows/versions.yml").read_text())
    assert {"schedule", "workflow_dispatch"} == set(workflow[True])  # YAML 1.1 reads `on` so
    matrix = {
        one["versions"]: one["python"]
        for one in workflow["jobs"]["core"]["strategy"]["matrix"]["include"]
    }
    assert matrix == versions.PYTHONS
    assert any(
        "scripts/versions.py ${{ matrix.versions }}" in step.get("run", "")
        for step in workflow["jobs"]["core"]["steps"]
    )
