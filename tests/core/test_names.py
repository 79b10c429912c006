"Names: of ours from a table, of a user's own from a file."

import subprocess
import sys

import pytest

from bertlab.core.names import did_you_mean, import_object, resolve, look_up

TABLE = {"adamw": 1, "Lion": 2}


@pytest.fixture()
def folder(tmp_path, monkeypatch):
    "The current directory: a fresh folder with a file of the user's."
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_parts.py").write_text("import os\nclass Collator:\n    pass\nSIZE = 3\n")
    (tmp_path / "broken_part.py").write_text("1 / 0\n")
    (tmp_path / "needy_part.py").write_text("import a_library_that_nobody_has\n")
    yield tmp_path
    for name in ("own_parts", "broken_part", "needy_part"):
        sys.modules.pop(name, None)


def test_a_known_name_is_looked_up_and_a_slip_is_answered_with_the_nearest():
    assert look_up("adamw", TABLE, "optimizer_class") == 1
    with pytest.raises(ValueError, match="optimizer_class='lino'.*did you mean 'Lion'.*adamw"):
        look_up("lino", TABLE, "optimizer_class")
    with pytest.raises(ValueError, match="optimizer_class=None"):
        look_up(None, TABLE, "optimizer_class")


def test_nothing_is_suggested_where_nothing_is_near():
    assert did_you_mean("zebra", TABLE) == "" and did_you_mean("x", []) == ""


def test_an_own_class_is_found_in_the_current_directory(folder):
    found = import_object("own_parts.Collator", "collator")
    assert found.__name__ == "Collator" and found.__module__ == "own_parts"


def test_an_own_class_is_found_in_a_package_and_in_an_installed_module(folder):
    (folder / "own_package").mkdir()
    (folder / "own_package" / "inner.py").write_text("def schedule(step): return step\n")
    assert import_object("own_package.inner.schedule", "schedule")(3) == 3
    assert import_object("torch.nn.Identity", "callback").__name__ == "Identity"


@pytest.mark.parametrize(
    "name, said",
    [
        ("Collator", "dotted name"),
        ("own_parts.", "dotted name"),
        ("own_parts.py.Collator", "no module"),
        ("own-parts.Collator", "dotted name"),
        ("own_part.Collator", "did you mean 'own_parts'"),
        ("own_parts.Colator", "did you mean 'Collator'"),
        ("own_parts.SIZE", "int"),
        ("broken_part.Collator", "ZeroDivisionError"),
        ("needy_part.Collator", "a_library_that_nobody_has"),
    ],
)
def test_an_own_class_that_is_not_there_is_answered_in_one_sentence(folder, name, said):
    with pytest.raises(ValueError) as error:
        import_object(name, "collator")
    assert said in str(error.value) and name in str(error.value) and "collator" in str(error.value)


def test_a_file_named_like_a_loaded_module_is_not_mistaken_for_it(folder):
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


def test_a_part_is_given_by_our_name_by_an_own_name_or_as_it_is(folder):
    assert resolve("adamw", TABLE, "optimizer_class") == 1
    assert resolve("own_parts.Collator", TABLE, "optimizer_class").__name__ == "Collator"
    assert resolve(dict, TABLE, "optimizer_class") is dict
    for wrong in (3, None, "adamv"):
        with pytest.raises(ValueError, match="optimizer_class.*adamw"):
            resolve(wrong, TABLE, "optimizer_class")
