"Names: of ours from a table, of a user's own from a file."

import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from bertlab.core import names
from bertlab.core.names import check_choice, check_minimum, check_options, check_range
from bertlab.core.names import did_you_mean, import_object, look_up, parameter_comments, resolve

TABLE = {"adamw": 1, "Lion": 2}


@pytest.fixture()
def folder(tmp_path, monkeypatch):
    "The current directory: a fresh folder with a file of the user's."
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_parts.py").write_text("import os\nclass Collator:\n    pass\nSIZE = 3\n")
    (tmp_path / "broken_part.py").write_text("1 / 0\n")
    (tmp_path / "needy_part.py").write_text("import a_missing_library\n")
    yield tmp_path
    for name in ("own_parts", "broken_part", "needy_part"):
        sys.modules.pop(name, None)


def test_a_misspelt_name_suggests_the_nearest():
    assert look_up("adamw", TABLE, "optimizer_class") == 1
    with pytest.raises(ValueError, match="optimizer_class='lino'.*did you mean 'Lion'.*adamw"):
        look_up("lino", TABLE, "optimizer_class")
    with pytest.raises(ValueError, match="optimizer_class=None"):
        look_up(None, TABLE, "optimizer_class")


def test_nothing_is_suggested_without_a_similar_name():
    assert did_you_mean("zebra", TABLE) == "" and did_you_mean("x", []) == ""


def test_a_class_is_imported_from_the_current_directory(folder):
    cls = import_object("own_parts.Collator", "collator")
    assert cls.__name__ == "Collator" and cls.__module__ == "own_parts"


def test_a_class_is_imported_from_a_package(folder):
    (folder / "own_package").mkdir()
    (folder / "own_package" / "inner.py").write_text("def schedule(step): return step\n")
    assert import_object("own_package.inner.schedule", "schedule")(3) == 3
    layer = import_object("torch.nn.Identity", "layer", (torch.nn.Module,))
    assert layer is torch.nn.Identity


@pytest.mark.parametrize("bases", [(), (torch.nn.Module,)])
@pytest.mark.parametrize(
    "name",
    ["torch.utils.collect_env.run", "os.system", "builtins.eval", "subprocess.run"],
)
def test_functions_of_installed_packages_are_refused(bases, name):
    with pytest.raises(ValueError, match=name):
        import_object(name, "schedule", bases)


def test_own_functions_are_accepted_where_a_class_would_do(folder):
    (folder / "own_schedule.py").write_text("def constant(step): return 1.0\n")
    schedule = resolve("own_schedule.constant", {}, "schedule", (torch.nn.Module,))
    assert schedule(3) == 1.0


@pytest.mark.parametrize(
    "name, word",
    [
        ("Collator", "dotted name"),
        ("own_parts.", "dotted name"),
        ("own_parts.py.Collator", "ModuleNotFoundError"),
        ("own-parts.Collator", "dotted name"),
        ("own_part.Collator", "did you mean 'own_parts'"),
        ("own_parts.Colator", "did you mean 'Collator'"),
        ("own_parts.SIZE", "SIZE"),
        ("broken_part.Collator", "ZeroDivisionError"),
        ("needy_part.Collator", "a_missing_library"),
    ],
)
def test_a_wrong_dotted_name_is_explained(folder, name, word):
    with pytest.raises(ValueError) as error:
        import_object(name, "collator")
    assert word in str(error.value) and name in str(error.value) and "collator" in str(error.value)


def test_a_file_named_like_a_module_is_refused(folder):
    (folder / "json.py").write_text("class Reader: pass\n")
    with pytest.raises(ValueError, match="rename"):
        import_object("json.Reader", "collator")


def test_a_spawned_worker_unpacks_an_own_class(folder):
    code = (
        "import sys\nsys.path = [p for p in sys.path if p]\n"  # as under an installed command
        "from multiprocessing import get_context\nfrom bertlab.core.names import import_object\n"
        "if __name__ == '__main__':\n"
        "    own = import_object('own_parts.Collator', 'collator')\n"
        "    with get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(isinstance, (own(), own)))\n"
    )
    (folder / "script").mkdir()
    (folder / "script" / "main.py").write_text(code)
    run = subprocess.run(
        [sys.executable, "script/main.py"], capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert run.stdout.strip() == "True", run.stderr


def test_resolve_takes_names_and_classes(folder):
    assert resolve("adamw", TABLE, "optimizer_class") == 1
    assert resolve("own_parts.Collator", TABLE, "optimizer_class").__name__ == "Collator"
    assert resolve(dict, TABLE, "optimizer_class") is dict
    for wrong in (3, None, "adamv"):
        with pytest.raises(ValueError, match="optimizer_class.*adamw"):
            resolve(wrong, TABLE, "optimizer_class")


# ---- checks of options ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "check, words",
    [
        (lambda: check_choice("overflow", "trunkate", ["split", "truncate"]), "overflow.*truncate"),
        (lambda: check_range("dropout", 1.5, 0, 1), r"dropout=1.5.*\[0, 1\]"),
        (lambda: check_range("dropout", float("nan"), 0, 1), "dropout=nan"),
        (lambda: check_range("rate", 0, 0, 1, exclude_low=True), r"rate=0.*\(0, 1\]"),
        (lambda: check_range("share", 1, 0, 1, exclude_high=True), r"share=1.*\[0, 1\)"),
        (lambda: check_minimum(SimpleNamespace(seed=-1), seed=0), "seed=-1"),
        (lambda: check_options(look_up, {"tabel": 1}, "kwargs"), "kwargs.*'tabel'.*'table'"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(check, words):
    with pytest.raises(ValueError, match=words):
        check()


def test_good_options_pass():
    check_choice("overflow", "split", ["split", "truncate"])
    check_range("dropout", 0, 0, 1)
    check_range("limit", None, 0)
    check_minimum(SimpleNamespace(seed=0, steps=None), seed=0, steps=1)
    check_options(look_up, {"table": {}}, "kwargs")


@dataclass
class Base:
    seed: int = 0  # of the weights


@dataclass
class Config(Base):
    "A configuration."

    # above
    rate: float = 1e-3  # the peak
    names: tuple = (
        "a",
        "b",
    )  # in their order
    plain: int = 1
    hidden = 3  # not a field


def test_comments_at_parameters_are_read():
    assert parameter_comments(Config) == {
        "seed": "of the weights",
        "rate": "above the peak",
        "names": "in their order",
        "plain": "",
    }
    assert parameter_comments(names.look_up)["argument"] == 'for messages: "optimizer_class"'
