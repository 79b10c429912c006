"What editors and type checkers see of the public face."

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

# What a user types on the first day; each comment is a type that the checker must find.
SCRIPT = """
import bertlab

corpus = bertlab.embedded_corpus()
tokenizer = bertlab.train_tokenizer(corpus.train_texts, vocab_size=4096)
data = bertlab.PretrainingDataModule(corpus, tokenizer, train_batch_size=16)
config = bertlab.modernbert_tiny(vocab_size=4096)
module = bertlab.PretrainingModule(config.to_diff_dict(), learning_rate=2e-3)
trainer = bertlab.make_trainer(max_steps=20)
trainer.fit(module, data)
reveal_type(corpus)
reveal_type(data)
reveal_type(module)
reveal_type(trainer)
reveal_type(bertlab.data.packing.best_fit_decreasing)
"""
TYPES = [
    "Corpus",
    "PretrainingDataModule",
    "PretrainingModule",
    "Trainer",
    "(counts: list[int], capacity: int | None",
]


def check_types(tmp_path: Path, script: str) -> list[dict]:
    "Return the diagnostics of pyright for a script."
    path = tmp_path / "script.py"
    path.write_text(script)
    settings = {"extraPaths": [str(ROOT)], "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
        str(path),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    return json.loads(done.stdout)["generalDiagnostics"]


@pytest.mark.slow
def test_a_type_checker_knows_every_public_name(tmp_path):
    import bertlab

    names = "\n".join(f"reveal_type(bertlab.{name})" for name in bertlab._PLACES)
    mistakes = "bertlab.PretrainingModul()\nbertlab.make_trainer(max_step=1)\n"
    diagnostics = check_types(tmp_path, f"{SCRIPT}{names}\n{mistakes}")
    messages = {
        level: [entry["message"] for entry in diagnostics if entry["severity"] == level]
        for level in ("error", "information")
    }
    first, second = messages["error"]
    assert "PretrainingModul" in first and "max_step" in second
    revealed = messages["information"]
    assert all(name in message for name, message in zip(TYPES, revealed))
    assert not [message for message in revealed if "Unknown" in message.removesuffix('"')[-9:]]


def test_the_stubs_list_the_public_names():
    import bertlab

    stub = (ROOT / "bertlab/__init__.pyi").read_text(encoding="utf-8")
    for name, module in bertlab._PLACES.items():
        assert f"from .{module} import {name} as {name}\n" in stub
    assert (ROOT / "bertlab/py.typed").exists()


@pytest.mark.parametrize("before, after", [(None, "1000"), ("7", "7")])
def test_waiting_threads_spin_briefly_by_default(before, after):
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment |= {"GOMP_SPINCOUNT": before} if before else {}
    command = [sys.executable, "-c", "import os, bertlab; print(os.environ['GOMP_SPINCOUNT'])"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == after
