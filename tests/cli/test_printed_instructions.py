"What commands print as the next step is run, word by word, in a process that knows nothing else."

import ast
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml
from programs import users_environment
from test_users import draw_rows

from bertlab.cli.commands import COMMANDS

PACKAGE = Path(__file__).parents[2] / "bertlab"
# What a user puts in place of the words in capitals.
PLACES = {"FILE": "own.csv", "FOLDER": "folder", "QUERY": "'a goal for the team'"}
SHAPE = "{hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32%s}"
COMMON = ["--trainer.accelerator", "cpu", "--run.progress", "none", "--data.train_batch_size", "8"]
QUICK = [*COMMON[:4], "--trainer.max_steps", "2"]
# Ends a command as Ctrl-C does, after its first step.
HALT = """
import os, signal
from lightning.pytorch.callbacks import Callback

class Halt(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 1:
            os.kill(os.getpid(), signal.SIGINT)
"""
START = """
import contextlib, io, json, sys
from bertlab.cli.main import main
for words, status in json.load(sys.stdin):
    if words[0] == "demo":  # has no callbacks
        import lightning, unittest.mock
        stopped = unittest.mock.patch.object(lightning.Trainer, "fit", side_effect=KeyboardInterrupt)
    else:
        stopped = contextlib.nullcontext()
    with stopped:
        got = main(words)
    assert got == status, (words, got)
"""
RUN = """
import contextlib, io, json, shlex, subprocess, sys
import transformers
from sentence_transformers import SentenceTransformer
errors = {}
for kind, text, more in json.loads(sys.stdin.read()):
    try:
        if kind == "python":
            exec(text)
        elif kind == "script":
            subprocess.run([sys.executable, *shlex.split(text)], check=True, capture_output=True)
        else:
            from bertlab.cli.main import main
            with contextlib.redirect_stdout(io.StringIO()):
                status = main([*shlex.split(text)[1:], *more])
            assert status == 0, f"exit status {status}"
    except BaseException as error:
        errors[text] = f"{type(error).__name__}: {error}"[:300]
print("RESULT" + json.dumps(errors))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> tuple[Path, str]:
    "A folder with what some commands wrote, and what they printed."
    folder = tmp_path_factory.mktemp("printed")
    rows = draw_rows(160)
    (folder / "own.csv").write_text("text,label\n" + "".join(f"{t},{k}\n" for k, t in rows))
    (folder / "own.txt").write_text("".join(f"{text}.\n" for _, text in rows))
    (folder / "halt.py").write_text(HALT)
    (folder / "folder").mkdir()
    (folder / "folder" / "a.txt").write_text("\n".join(text for _, text in rows[:20]))
    pairs = [{"query": t[:20], "positive": t} for _, t in rows]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    answers = [{"question": "what is it", "context": text, "answers": {
        "text": [text.split()[0]], "answer_start": [0]}} for _, text in rows]  # fmt: skip
    (folder / "answers.jsonl").write_text("\n".join(map(json.dumps, answers)))
    shape = yaml.safe_load(SHAPE % "")
    stage = {"model": {"model_config_kwargs": shape}, "run": {"progress": "none"},
             "data": {"train_dataset_name_or_path": "own.txt", "max_sequence_length": 32, "train_batch_size": 4,
                      "pretrained_tokenizer_name_or_path": "a tokenizer"},
             "trainer": {"max_steps": 3, "accelerator": "cpu", "callbacks": ["halt.Halt"]}}  # fmt: skip
    stages = [{"model": {"learning_rate": 1e-3}}]
    (folder / "stages.yaml").write_text(yaml.safe_dump({**stage, "stages": stages}))
    search = {"trials": 1, "ranges": {"model.learning_rate": [1e-3]}}
    (folder / "a search.yaml").write_text(yaml.safe_dump({**stage, "search": search}))
    return folder, run_commands(folder)


def run_commands(folder: Path) -> str:
    "Run commands that say what to do next, in one process. Names have blanks, as a user's may."
    shapes = {"a ": SHAPE % "", "own ": SHAPE % ", norm: rms"}
    tokenizer = ["--data.pretrained_tokenizer_name_or_path", "a tokenizer"]
    embedding = ["--model.pretrained_tokenizer_name_or_path", "a tokenizer"]
    short = ["--trainer.limit_train_batches", "2", "--run.num_epochs", "1"]
    halt = ["--trainer.callbacks", "halt.Halt"]

    def train(command: str, file: str, output: str, *more: str, own: str = "a ") -> list[str]:
        of_model = embedding if command == "embed finetune" else tokenizer
        return [*command.split(), file, "--run.output", own + output,
                "--model.model_config_kwargs", shapes[own], *of_model, *COMMON, *more]  # fmt: skip

    pretrain = partial(train, "pretrain", "own.txt")
    tokens = ["tokenize", "own.txt", "--output", "a dataset", "--tokenizer", "a tokenizer"]
    steps, length = QUICK[-2:], ["--data.max_sequence_length", "32"]
    done = [
        ["tokenizer", "train", "own.txt", "--output", "a tokenizer", "--vocab_size", "120"],
        tokens,
        train("finetune", "answers.jsonl", "answers", "--model.task", "question_answering", *short),
        *(train("finetune", "own.csv", "classes", *short, own=own) for own in shapes),
        *(train("embed finetune", "pairs.jsonl", "vectors", *steps, own=own) for own in shapes),
        ["export", "a classes", "--output", "an export", "--text", "own.txt", "--int8", "false"],
        ["export", "a answers", "--output", "asked", "--int8", "false"],
    ]
    stopped = [
        pretrain("run", "--trainer.max_steps", "3", *length, *halt),
        train("finetune", "own.csv", "stop", "--run.num_epochs", "1", *halt),
        train("embed finetune", "pairs.jsonl", "pause", "--trainer.max_steps", "3", *halt),
        ["distill", "stages.yaml", "--output", "two stages"],
        ["tune", "a search.yaml", "--output", "a tune"],
        ["demo", "--data", "own.txt", "--batch_size", "4", "--steps", "2", "--output", "a demo"],
    ]
    refused = [["predict", "a classes", "own.csv", "--backend", "onnx", "--precision", "int8"]]
    commands = [(words, 0) for words in done] + [(words, 130) for words in stopped]
    commands += [(words, 2) for words in refused]
    done = subprocess.run([sys.executable, "-c", START], input=json.dumps(commands), text=True,
                          cwd=folder, env=users_environment(), capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


def instructions(text: str) -> list[tuple[str, str, list[str]]]:  # kind, words, what is added
    "Collect what the lines of an output tell a user to run."
    collected = []
    call = r"(?:SentenceTransformer|transformers\.pipeline|bertlab\.OnnxModel\.load)\(.*?\)"
    python = rf"(?:(import [\w.]+), then load it with )?({call}(?:\(\[.*?\]\))?)(?:, or:|$)"
    for line in text.splitlines():
        for first, expression in re.findall(python, line):
            first = "import bertlab" if expression.startswith("bertlab.") else first
            collected.append(("python", f"{first}; {expression}".removeprefix("; "), []))
        for script in re.findall(r"ask it: python (\S.*)$", line):
            collected.append(("script", script, []))
        begin = "or: |ask it: |use it: |continue with |that has it: |^  "
        for command in re.findall(rf"(?:{begin})(bertlab [a-z].*)$", line):
            for place, value in PLACES.items():
                value = "answers.jsonl" if place == "FILE" and "answers" in command else value
                command = command.replace(place, value)
            shape = ["--model.model_config_kwargs", SHAPE % "", "--run.output", "next", *QUICK,
                     "--data.train_batch_size", "8", "--data.max_sequence_length", "32"]  # fmt: skip
            is_begun = "pretrain" in command and "--resume" not in command
            collected.append(("command", command, shape if is_begun else []))
    # Those without `import bertlab` first: it would hide that one is missing.
    return sorted(collected, key=lambda item: (item[0] == "command", "import" in item[1]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_printed_instruction_can_be_run(printed):
    folder, text = printed
    collected = instructions(text)
    assert sum(kind == "python" for kind, *_ in collected) >= 4, text
    assert sum(kind == "script" for kind, *_ in collected) == 2, text
    assert sum(kind == "command" for kind, *_ in collected) >= 13, text
    done = subprocess.run([sys.executable, "-c", RUN], input=json.dumps(collected), text=True,
                          cwd=folder, env=users_environment(), capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.rpartition("RESULT")[2]) == {}, done.stderr[-2000:]
    for name in ("a run", "a pause"):  # which were stopped after one step
        assert json.loads((folder / name / "metrics.json").read_text())["steps"] == 3


def messages(path: Path) -> list[str]:
    "Collect the texts of a module that are no docstrings; what is filled in is a hole."
    tree, docstrings = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(node.value)
    texts, inner = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            inner |= {*ast.walk(node)}
            texts.append("".join(parts))
    texts += [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)
              and isinstance(node.value, str) and node not in docstrings | inner]  # fmt: skip
    return texts


def test_commands_in_messages_exist():
    "In every message of the package: the command is one, and so is each option behind it."
    families = {name.split()[0] for name in COMMANDS}
    named = set()
    for path in PACKAGE.rglob("*.py"):
        for text in messages(path):
            for words in re.findall(r"\bbertlab ((?:[a-z-]+ ?)+)((?: ?--[\w.]+)*)", text):
                first, *rest = words[0].split()
                if first not in families:
                    continue  # a sentence about bertlab
                named.add(first)
                name = f"{first} {rest[0]}" if first not in COMMANDS and rest else first
                assert name in COMMANDS, f"{path.name}: {text}"
                for option in re.findall(r"--([\w.]+)", words[1]):
                    assert option in {"overwrite", "resume"} | {*COMMANDS[name].options}, text
    assert {"pretrain", "predict", "lengthen", "tokenizer", "card"} <= named


SETTING = re.compile(
    r"--([a-z][a-z0-9_.]*[a-z0-9])|(?<![\w./])((?:model|data|run|trainer)\.[a-z0-9_.]*[a-z0-9_])(?![(\w])"
)
# Flags of every command and of other programs, files, and attributes of Lightning's trainer.
NO_SETTINGS = set("help version config print_config shm project run.yaml model.safetensors.index.json "
                  "trainer.predict trainer.validate trainer.callback_metrics".split())  # fmt: skip


def test_settings_that_messages_and_docstrings_name_exist():
    settings = {key for command in COMMANDS.values() for key in [*command.options, *command.keys]}
    settings |= NO_SETTINGS | {key.rpartition(".")[2] for key in settings if "." in key}
    named = {}
    for path in PACKAGE.rglob("[a-z]*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for match in SETTING.finditer(node.value):
                    named[match[1] or match[2]] = f"{path.name}:{node.lineno}"
    is_setting = lambda name: name in settings or name.rpartition(".")[0] in settings  # a key of it
    assert len(named) > 50
    assert {name: place for name, place in named.items() if not is_setting(name)} == {}
