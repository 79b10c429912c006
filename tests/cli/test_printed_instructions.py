"What commands print as the next step is run, word by word, in a process that knows nothing else."

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import users_environment
from test_users import draw_rows

from bertlab.cli.commands import COMMANDS

PACKAGE = Path(__file__).parents[2] / "bertlab"
# What a user puts in place of the words in capitals.
PLACES = {"FILE": "own.csv", "FOLDER": "folder", "QUERY": "'a goal for the team'"}
SHAPE = "{hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32%s}"
QUICK = ["--trainer.accelerator", "cpu", "--run.progress", "none", "--trainer.max_steps", "2"]
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
    (folder / "folder").mkdir()
    (folder / "folder" / "a.txt").write_text("\n".join(text for _, text in rows[:20]))
    pairs = [{"query": t[:20], "positive": t} for _, t in rows]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    answers = [{"question": "what is it", "context": text, "answers": {
        "text": [text.split()[0]], "answer_start": [0]}} for _, text in rows]  # fmt: skip
    (folder / "answers.jsonl").write_text("\n".join(map(json.dumps, answers)))
    return folder, run_commands(folder)


def run_commands(folder: Path) -> str:
    "Run commands that say what to do next, in one process."
    shapes = {"": SHAPE % "", "own-": SHAPE % ", norm: rms"}
    common = [
        "--trainer.accelerator",
        "cpu",
        "--run.progress",
        "none",
        "--data.train_batch_size",
        "8",
    ]

    def finetune(
        file: str, output: str, *more: str, part: str = "data", own: str = ""
    ) -> list[str]:
        return ["finetune", file, "--run.output", own + output, "--model.model_config_kwargs",
                shapes[own], f"--{part}.pretrained_tokenizer_name_or_path", "tokenizer",
                *common, *more]  # fmt: skip

    short, steps = ["--trainer.limit_train_batches", "2", "--run.num_epochs", "1"], QUICK[-2:]
    commands = [
        ["tokenizer", "train", "own.txt", "--output", "tokenizer", "--vocab_size", "120"],
        ["tokenize", "own.txt", "--output", "tokens", "--tokenizer", "tokenizer"],
        finetune("answers.jsonl", "answers", "--model.task", "question_answering", *short),
        *(finetune("own.csv", "classes", *short, own=own) for own in shapes),
        *(
            ["embed", *finetune("pairs.jsonl", "vectors", *steps, part="model", own=own)]
            for own in shapes
        ),
        ["export", "classes", "--output", "onnx", "--text", "own.txt", "--int8", "false"],
    ]
    script = (
        "import json, sys\nfrom bertlab.cli.main import main\n"
        "for words in json.load(sys.stdin):\n    assert main(words) == 0, words\n"
    )
    done = subprocess.run([sys.executable, "-c", script], input=json.dumps(commands), text=True,
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
        for command in re.findall(r"(?:or: |ask it: |^  )(bertlab [a-z].*)$", line):
            for place, value in PLACES.items():
                value = "answers.jsonl" if place == "FILE" and "answers" in command else value
                command = command.replace(place, value)
            shape = ["--model.model_config_kwargs", SHAPE % "", "--run.output", "next", *QUICK,
                     "--data.train_batch_size", "8", "--data.max_sequence_length", "32"]  # fmt: skip
            collected.append(("command", command, shape if "pretrain" in command else []))
    # Those without `import bertlab` first: it would hide that one is missing.
    return sorted(collected, key=lambda item: (item[0] == "command", "import" in item[1]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_printed_instruction_can_be_run(printed):
    folder, text = printed
    collected = instructions(text)
    assert sum(kind == "python" for kind, *_ in collected) >= 4, text
    assert sum(kind == "script" for kind, *_ in collected) == 1, text
    assert sum(kind == "command" for kind, *_ in collected) >= 6, text
    done = subprocess.run([sys.executable, "-c", RUN], input=json.dumps(collected), text=True,
                          cwd=folder, env=users_environment(), capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.rpartition("RESULT")[2]) == {}, done.stderr[-2000:]


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
