"""`bertlab demo` as its user runs it: a program in a terminal, and the directory that it leaves."""

import csv
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from programs import Program, bertlab

# Small enough for seconds, long enough to get well below the unigram line.
SMALL = (
    "--steps 260 --hidden-size 64 --num-hidden-layers 2 --vocab-size 600 --max-sequence-length 64 "
    "--batch-size 16 --learning-rate 6e-3 --precision 32-true --max-documents 3000"
).split()


def demo(*arguments, cwd=None):
    "Run the program to its end."
    return bertlab("demo", *arguments, cwd=cwd)


def losses(directory):
    with open(directory / "history.csv", newline="") as f:
        return [(row["step"], row["train_loss"]) for row in csv.DictReader(f)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    "A small run that went through, and what it printed."
    directory = tmp_path_factory.mktemp("demo") / "run"
    result = demo("--output", directory, *SMALL)
    assert result.returncode == 0, result.stderr
    return directory, result.stdout


def test_the_loss_falls_below_the_unigram_line(finished):
    metrics = json.loads((finished[0] / "metrics.json").read_text())
    assert metrics["validation_loss"] < metrics["unigram_entropy"] - 0.2
    assert metrics["steps"] == 260 and metrics["tokens"] > 260 * 16 * 64 * 0.98
    assert metrics["seconds"] > 0 and metrics["tokens_per_second"] > 0


def test_the_directory_holds_all_that_is_promised(finished):
    names = {p.name for p in finished[0].iterdir()}
    assert names >= {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "metrics.json", "history.csv", "loss.png", "run.yaml", "checkpoints",
    }  # fmt: skip
    assert (finished[0] / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_transformers_opens_the_model_where_bertlab_cannot_be_imported(finished, tmp_path):
    code = (
        "import sys; sys.modules['bertlab'] = None\n"  # any import of it raises
        "from transformers import pipeline, AutoModelForMaskedLM\n"
        "fill = pipeline('fill-mask', sys.argv[1])\n"
        "answers = fill('Return the [MASK] of the object.', top_k=5)\n"
        "assert len(answers) == 5 and 0 < sum(a['score'] for a in answers) <= 1\n"
        "print(type(fill.model).__name__)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", code, finished[0]], capture_output=True, text=True, cwd=tmp_path,
        env=environment, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "ModernBertForMaskedLM"


def test_a_finished_run_is_refused_and_untouched(finished):
    before = {p: p.stat().st_mtime_ns for p in finished[0].rglob("*")}
    result = demo("--output", finished[0], *SMALL)
    assert result.returncode == 2 and "--resume" in result.stderr and "--overwrite" in result.stderr
    assert {p: p.stat().st_mtime_ns for p in finished[0].rglob("*")} == before


def test_resuming_a_finished_run_changes_no_result(finished):
    before = json.loads((finished[0] / "metrics.json").read_text())
    result = demo("--resume", "--output", finished[0])
    assert result.returncode == 0, result.stderr
    after = json.loads((finished[0] / "metrics.json").read_text())
    same = ("validation_loss", "unigram_entropy", "steps", "tokens")
    assert {k: before[k] for k in same} == {k: after[k] for k in same}


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    "A shorter run on a text of its own, which validates in no time; and the words that make it."
    folder = tmp_path_factory.mktemp("short")
    lines = [
        f"Number {i} is {'odd' if i % 2 else 'even'}, and {i * 7 % 97} follows it here."
        for i in range(3000)
    ]
    (folder / "text.txt").write_text("\n".join(lines))
    words = ["--data", folder / "text.txt", *SMALL, "--steps", 150]
    result = demo("--output", folder / "run", *words)
    assert result.returncode == 0, result.stderr
    return folder / "run", words


def test_the_saved_recipe_makes_the_same_run_again(short, tmp_path):
    result = demo("--config", short[0] / "run.yaml", "--output", tmp_path / "again")
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "again") == losses(short[0])


def run_until(directory, words, step, then):
    "Start the run, wait for its checkpoint at a step or later, send a signal, return its end."
    program = Program(["demo", "--output", directory, *words])
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and program.poll() is None:
        if step(directory):
            program.send_signal(then)
            break
        time.sleep(0.02)
    ended = program.wait(timeout=200)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.slow  # after the first step it is quick to see
def test_ctrl_c_before_the_first_step_loses_nothing(short, tmp_path):
    directory = tmp_path / "run"
    started = lambda d: (d / "tokenizer" / "tokenizer.json").exists()
    status, printed, errors = run_until(directory, short[1], started, signal.SIGINT)
    # Before the first step there is nothing to save, after it a checkpoint; both resume.
    assert status == 130 and "Traceback" not in errors
    result = demo("--resume", "--output", directory)
    assert result.returncode == 0, result.stderr
    assert losses(directory) == losses(short[0])


def test_ctrl_c_during_training_says_how_to_go_on(short, tmp_path):
    directory = tmp_path / "run"
    saved = lambda d: bool(list(d.glob("checkpoints/step-*.ckpt")))
    status, printed, errors = run_until(directory, short[1], saved, signal.SIGINT)
    assert status == 130 and "--resume" in printed and "Traceback" not in errors
    assert (directory / "model.safetensors").exists(), "a stopped run can be looked at"
    result = demo("--resume", "--output", directory)
    assert result.returncode == 0, result.stderr
    assert losses(directory) == losses(short[0])


def test_a_killed_run_goes_on_from_its_last_checkpoint_to_the_same_bits(short, tmp_path):
    directory = tmp_path / "run"
    saved = lambda d: bool(list(d.glob("checkpoints/step-*.ckpt")))
    status, _, _ = run_until(directory, short[1], saved, signal.SIGKILL)
    assert status == -signal.SIGKILL
    result = demo("--resume", "--output", directory)
    assert result.returncode == 0, result.stderr
    assert losses(directory) == losses(short[0])


def test_overwrite_moves_the_earlier_run_aside(finished, tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "run.yaml").write_text("recipe: {steps: 1}\n")
    (directory / "model.safetensors").write_bytes(b"precious")
    text = tmp_path / "text.txt"
    text.write_text(
        "\n".join(f"Sentence number {i} says that {i * 7} is a number." for i in range(400))
    )
    result = demo("--overwrite", "--output", directory, "--data", text, *SMALL, "--steps", 3)
    assert result.returncode == 0, result.stderr
    assert (directory / "previous-1" / "model.safetensors").read_bytes() == b"precious"
    assert json.loads((directory / "metrics.json").read_text())["steps"] == 3
    assert "it was:" in result.stdout, "gaps are cut from the user's own text"


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    "Inputs that cannot work."
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


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--data", "missing.txt"], ["missing.txt"]),
        (["--data", "empty.txt"], ["empty.txt"]),
        (["--data", "blank.txt"], ["blank.txt"]),
        (["--data", "latin.txt"], ["latin.txt", "utf-8"]),
        (["--data", "table.csv"], ["text", "title", "body"]),
        (["--data", "table.csv", "--text-column", "words"], ["words", "title", "body"]),
        (["--data", "nothing"], ["nothing"]),
        (["--max-sequence-length", "7"], ["max_sequence_length", "8"]),
        (["--vocab-size", "5"], ["vocab_size", "5"]),
        (["--vocab-size", "20"], ["vocab_size"]),
        (["--batch-size", "100000"], ["batch_size", "rows"]),
        (["--tokenizer", "no/such-tokenizer"], ["no/such-tokenizer"]),
        (["--output", "taken"], ["taken", "thesis.tex"]),
        (["--output", "file"], ["file"]),
        (["--resume"], ["run.yaml"]),
        (["--resume", "--steps", "5"], ["run.yaml"]),
        (["--config", "odd.yaml"], ["odd.yaml", "stepps", "did you mean 'steps'"]),
        (["--stepps", "5"], ["stepps", "did you mean 'steps'"]),
        (["--config", "missing.yaml"], ["missing.yaml"]),
        (["--steps", "many"], ["steps", "many"]),
        (["--mlm-probability", "0"], ["mlm_probability"]),
        (["--level", "everything"], ["level", "stdlib", "installed"]),
    ],
)
def test_a_mistake_gets_one_line_and_nothing_is_made(bad, arguments, named):
    before = sorted(bad.rglob("*"))
    result = demo(*arguments, cwd=bad)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1 and result.stdout.count("step ") == 0, result.stderr
    assert all(name in result.stderr for name in named), result.stderr
    assert sorted(bad.rglob("*")) == before, "something was made or lost"


def test_validate_measures_the_demos_directory_as_the_demo_did(finished):
    found = bertlab("validate", finished[0], "--trainer.precision", "32-true")
    assert found.returncode == 0, found.stderr
    metrics = json.loads((finished[0] / "metrics.json").read_text())
    assert json.loads(found.stdout)[0]["loss"] == pytest.approx(
        metrics["validation_loss"], rel=1e-4
    )


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_a_word_whose_token_holds_the_space_before_it_can_be_hidden(kind):
    from bertlab.cli.demo import gaps_in
    from bertlab.data.tokenizers import train_tokenizer

    text = "the bird sees cat the bird ."
    # Unigram learns only what occurs in two different words.
    texts = [text, text.replace("cat", "cats")] * 20
    tokenizer = train_tokenizer(texts, 300 if kind == "bpe" else 60, kind=kind)
    assert gaps_in([text], tokenizer) == [("the bird sees [MASK] the bird .", "cat")]


def test_a_resume_with_other_text_is_refused(finished, tmp_path):
    directory, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text(
        "\n".join(f"Sentence number {i} says that {i * 7} is a number." for i in range(400))
    )
    result = demo("--output", directory, "--data", text, *SMALL, "--steps", 3)
    assert result.returncode == 0, result.stderr
    text.write_text(text.read_text().replace("number", "figure"))
    result = demo("--resume", "--output", directory)
    assert result.returncode == 2 and "not the one" in result.stderr


@pytest.mark.gpu
def test_the_demo_runs_on_a_gpu_in_its_own_precision(tmp_path):
    small = [word for word in SMALL if word not in ("--precision", "32-true")]
    result = demo("--output", tmp_path / "run", *small)
    assert result.returncode == 0, result.stderr
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert "CPU" not in result.stdout.splitlines()[0]
    assert metrics["validation_loss"] < metrics["unigram_entropy"]
