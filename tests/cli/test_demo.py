"`bertlab demo`: a run in minutes, the directory that it leaves, and what a resume continues."

import csv
import json
import signal
import time
from contextlib import redirect_stdout
from io import StringIO

import pytest
from programs import Program
from transformers import AutoModelForMaskedLM

import bertlab.core.devices
from bertlab.cli.commands import COMMANDS
from bertlab.cli.demo import DemoConfig, gaps_in, pretraining_config, _settle_steps
from bertlab.cli.main import main
from bertlab.cli.parser import parse
from bertlab.core.devices import Device
from bertlab.data.tokenizers import train_tokenizer

SMALL = (
    "--hidden-size 64 --num-hidden-layers 2 --vocab-size 600 --max-sequence-length 64 "
    "--batch-size 16 --learning-rate 6e-3 --precision 32-true --max-documents 3000"
).split()


def demo(*words):
    "The exit status of `bertlab demo`, and what it printed."
    with redirect_stdout(StringIO()) as printed:
        status = main(["demo", *map(str, words)])
    return status, printed.getvalue()


def losses(directory):
    with open(directory / "history.csv", newline="") as file:
        return [(row["step"], row["train_loss"]) for row in csv.DictReader(file)]


def metrics_of(directory):
    return json.loads((directory / "metrics.json").read_text())


def write_text(path, count=1500):
    lines = [
        f"Number {i} is {'odd' if i % 2 else 'even'}, and {i * 7 % 97} follows it here."
        for i in range(count)
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    "A finished run on a text of its own, and the words that made it."
    folder = tmp_path_factory.mktemp("demo")
    words = ["--data", write_text(folder / "text.txt"), *SMALL, "--steps", 60]
    status, printed = demo("--output", folder / "run", *words)
    assert status == 0 and "it was:" in printed, "gaps are cut from the user's own text"
    return folder / "run", words


def test_the_loss_falls_below_the_unigram_entropy(finished):
    metrics = metrics_of(finished[0])
    assert metrics["val_loss"] < metrics["unigram_entropy"] - 0.2
    assert metrics["steps"] == 60 and 0.8 < metrics["tokens"] / (60 * 16 * 64) <= 1
    assert metrics["seconds"] > 0 and metrics["tokens_per_second"] > 0


def test_the_directory_holds_model_numbers_and_recipe(finished):
    names = {path.name for path in finished[0].iterdir()}
    assert names >= {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "metrics.json", "history.csv", "loss.png", "run.yaml", "checkpoints",
    }  # fmt: skip
    assert (finished[0] / "loss.png").read_bytes().startswith(b"\x89PNG")
    again = parse(COMMANDS["demo"], ["--config", str(finished[0] / "run.yaml")]).overrides
    assert again["steps"] == 60 and again["data"] == str(finished[1][1])


def test_a_finished_run_is_refused_and_untouched(finished, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished[0].rglob("*")}
    assert demo("--output", finished[0], *finished[1])[0] == 2
    assert "--resume" in (message := capsys.readouterr().err) and "--overwrite" in message
    assert {path: path.stat().st_mtime_ns for path in finished[0].rglob("*")} == before


def test_resuming_a_finished_run_changes_no_result(finished):
    before = metrics_of(finished[0])
    assert demo("--resume", "--output", finished[0])[0] == 0
    names = ("val_loss", "unigram_entropy", "steps", "tokens")
    assert all(metrics_of(finished[0])[name] == before[name] for name in names)


def test_a_stopped_run_resumes_to_the_same_bits(finished, tmp_path):
    directory = tmp_path / "run"
    program = Program(["demo", "--output", directory, *finished[1]])
    while program.poll() is None and "/60: " not in program.printed.read_text():
        time.sleep(0.02)
    program.send_signal(signal.SIGINT)
    result = program.wait(timeout=400)
    assert result.returncode == 130 and "--resume" in result.stderr
    assert 0 < len(losses(directory)) < 60, "it stopped halfway"
    model = AutoModelForMaskedLM.from_pretrained(directory)  # a stopped run can be looked at
    assert type(model).__name__ == "ModernBertForMaskedLM"
    assert demo("--resume", "--output", directory)[0] == 0
    assert losses(directory) == losses(finished[0])


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    "A folder of inputs that cannot work."
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty.txt").write_text("")
    (folder / "blank.txt").write_text(" \n\n \n")
    (folder / "latin.txt").write_bytes("café au lait, s'il vous plaît\n".encode("latin-1") * 99)
    (folder / "table.csv").write_text("title,body\n" + "A,some words here\n" * 99)
    (folder / "nothing").mkdir()
    (folder / "taken").mkdir()
    (folder / "taken" / "thesis.tex").write_text("years of work")
    (folder / "file").write_text("")
    (folder / "odd.yaml").write_text("stepps: 10\n")
    return folder


@pytest.mark.parametrize("words, parts", [
    (["--data", "missing.txt"], ["missing.txt"]), (["--data", "empty.txt"], ["empty.txt"]),
    (["--data", "blank.txt"], ["blank.txt"]), (["--data", "latin.txt"], ["latin.txt", "utf-8"]),
    (["--data", "table.csv"], ["text", "title", "body"]), (["--data", "nothing"], ["nothing"]),
    (["--data", "table.csv", "--text-column", "words"], ["words", "title", "body"]),
    (["--max-sequence-length", "7"], ["max_sequence_length", "8"]), (["--vocab-size", "20"], ["vocab_size"]),
    (["--batch-size", "100000"], ["batch_size", "rows"]), (["--tokenizer", "no/such-tokenizer"], ["no/such-tokenizer"]),
    (["--output", "taken"], ["taken", "thesis.tex"]), (["--output", "file"], ["file"]),
    (["--resume", "--steps", "5"], ["run.yaml"]), (["--config", "odd.yaml"], ["odd.yaml", "'stepps'", "'steps'"]),
    (["--config", "missing.yaml"], ["missing.yaml"]), (["--steps", "many"], ["steps", "many"]),
    (["--mlm-probability", "0"], ["mlm_probability"]), (["--level", "everything"], ["level", "stdlib", "installed"]),
    (["--learning-rate", "nan"], ["learning_rate"]), (["--optimizer", "sgd"], ["optimizer", "sgd"]),
    (["--warmup-fraction", "0.8", "--cooldown-fraction", "0.3"], ["warmup"]), (["--precision", "fp8"], ["fp8"]),
])  # fmt: skip
def test_a_mistake_is_one_line_and_leaves_nothing(bad, monkeypatch, capsys, words, parts):
    monkeypatch.chdir(bad)
    before = sorted(bad.rglob("*"))
    status, _ = demo(*words, *(["--max-documents", "500"] if "--data" not in words else []))
    message = capsys.readouterr().err
    assert status == 2 and message.count("\n") == 1, message
    assert all(part in message for part in parts), message
    assert sorted(bad.rglob("*")) == before, "something was made or lost"


def test_validate_agrees_with_the_demo(finished, capsys):
    assert main(["validate", str(finished[0]), "--trainer.precision", "32-true"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["loss"] == pytest.approx(metrics_of(finished[0])["val_loss"], rel=1e-4)


@pytest.mark.parametrize("tokenizer_type", ["wordpiece", "bpe", "unigram"])
def test_a_token_with_its_space_can_be_hidden(tokenizer_type):
    text = "the bird sees cat the bird ."
    # Unigram learns only what occurs in two different words.
    texts = [text, text.replace("cat", "cats")] * 20
    tokenizer = train_tokenizer(texts, 300 if tokenizer_type == "bpe" else 60, kind=tokenizer_type)
    assert gaps_in([text], tokenizer) == [("the bird sees [MASK] the bird .", "cat")]


@pytest.mark.parametrize("device, native, precision, steps", [
    ("cpu", "32-true", "auto", 600), ("cpu", "bf16-mixed", "auto", 1000), ("cpu", "bf16-mixed", "32-true", 600),
    ("cpu", "32-true", "bf16-mixed", 1000), ("cuda", "16-mixed", "auto", 1000),
])  # fmt: skip
def test_a_slow_cpu_takes_fewer_steps(monkeypatch, device, native, precision, steps):
    described = Device(device, "this", 0, native, "why")
    monkeypatch.setattr(bertlab.core.devices, "describe_device", lambda: described)
    assert _settle_steps(DemoConfig(precision=precision, steps=7)).steps == 7
    config = pretraining_config(DemoConfig(precision=precision), "run")
    assert config["trainer"]["max_steps"] == steps
    assert config["model"]["scheduler_cooldown_steps"] == 0.3 * steps


@pytest.mark.gpu
def test_the_demo_runs_on_a_gpu_in_its_own_precision(tmp_path):
    words = [word for word in SMALL if word not in ("--precision", "32-true")]
    status, printed = demo("--output", tmp_path / "run", *words, "--steps", 260)
    metrics = metrics_of(tmp_path / "run")
    assert status == 0 and "CPU" not in printed.splitlines()[0]
    assert metrics["val_loss"] < metrics["unigram_entropy"]
