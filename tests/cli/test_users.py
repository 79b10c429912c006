"What a new user types: bare commands, wrong inputs, tables without a header, parts of one's own."

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bertlab.cli.main import main
from bertlab.cli.commands import COMMANDS
from bertlab.cli.parser import parse
from called import config_of  # noqa: E402

SMALL = ["--model.model_config_kwargs={hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, "
         "intermediate_size: 32}", "--run.vocab_size", "120", "--data.max_sequence_length", "32",
         "--trainer.accelerator", "cpu", "--run.progress", "none"]  # fmt: skip
TOPICS = {"sports": "sport game team win goal match player coach league cup",
          "business": "market stock price bank profit trade share firm deal growth",
          "science": "moon star planet orbit probe laser atom cell gene virus"}  # fmt: skip


def rows(count: int, seed: int = 0, share: float = 0.6) -> list[tuple[str, str]]:  # label, text
    "Sentences whose words say their label, among words that do not."
    draw, everything = random.Random(seed), " ".join(TOPICS.values()).split()
    found = []
    for _ in range(count):
        label = draw.choice(list(TOPICS))
        words = [
            draw.choice(TOPICS[label].split() if draw.random() < share else everything)
            for _ in range(12)
        ]
        found.append((label, " ".join(words)))
    return found


@pytest.fixture
def place(tmp_path, monkeypatch) -> Iterator[Path]:
    "A directory to work in, with files as users have them."
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    labelled = rows(240)
    Path("own.csv").write_text("title,label\n" + "".join(f"{t},{label}\n" for label, t in labelled))
    # AG News's own form: a label from 1, a title, a description, all in quotes, and no header.
    numbers = {label: n for n, label in enumerate(TOPICS, 1)}
    Path("ag.csv").write_text(
        "".join(f'"{numbers[k]}","{t[:9]}, now","{t}"\n' for k, t in labelled)
    )
    Path("own.txt").write_text("".join(f"{t}.\n" for _, t in labelled))
    Path("utf16.txt").write_text("".join(f"{t}.\n" for _, t in labelled), encoding="utf-16")
    Path("utf16le.txt").write_bytes("".join(f"{t}.\n" for _, t in labelled).encode("utf-16-le"))
    Path("latin.txt").write_bytes("Größe und Maß\n".encode("latin1") * 9)
    Path("binary.txt").write_bytes(random.Random(0).randbytes(4000))
    Path("empty.txt").write_text("")
    Path("empty.csv").write_text("")
    Path("surplus.csv").write_text("title,label\nfine,a\nGoals, goals,b\nfine,b\n")
    Path("bad.yaml").write_text("model:\n  learning_rate: [1\n")
    Path("list.yaml").write_text("- a\n")
    Path("typo.yaml").write_text("model:\n  lerning_rate: 0.1\n")
    Path("empty").mkdir()
    Path("run", "models", "step-20").mkdir(parents=True)
    Path("run", "run.yaml").write_text("{}\n")
    Path("mine.py").write_text("class MyCollator: pass\n")
    yield tmp_path
    for name in ("mine", "own_parts"):  # a later test may have files of these names
        sys.modules.pop(name, None)


def said(capsys, *words: str) -> str:
    "The one line that a mistake gets."
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


# --- wrong inputs, answered before anything heavy is imported -------------------------------------

WRONG = [  # words, and parts of the answer: what it is about, and what to do
    (["pretrain", "nowhere.txt"], ["nowhere.txt", "does not exist"]),
    (["pretrain", "utf16.txt"], ["utf16.txt line", "UTF-16", "iconv -f utf-16"]),
    (["pretrain", "utf16le.txt"], ["utf16le.txt line 1", "UTF-16"]),
    (["pretrain", "latin.txt"], ["latin.txt line 1", "latin-1"]),
    (["pretrain", "binary.txt"], ["binary.txt line 1", "binary", "text file"]),
    (["pretrain", "empty.txt"], ["empty.txt"]),
    (["pretrain", "empty.csv"], ["empty.csv"]),
    (["pretrain", "empty"], ["directory empty has no file to read"]),
    (["pretrain", "own.csv"], ["'text'", "['title', 'label']"]),
    (["pretrain", "own.csv", "--data.text_column", "tittle"], ["did you mean 'title'"]),
    (["pretrain", "ag.csv", "--data.text_column", "Description"], ["'Description'", "header: false"]),
    (["pretrain", "ag.csv", "--data.text_column", "3"], ["header: false", "by their numbers"]),
    (["pretrain", "--config", "bad.yaml"], ["bad.yaml", "line 3"]),
    (["pretrain", "--config", "list.yaml"], ["list.yaml must be a mapping", "list"]),
    (["pretrain", "--config", "typo.yaml"], ["typo.yaml", "did you mean 'model.learning_rate'"]),
    (["pretrain", "--config", "binary.txt"], ["binary.txt", "UTF-8"]),
    (["pretrain", "--config", "empty"], ["empty"]),
    (["pretrain", "--trainer.max_step", "5"], ["did you mean 'trainer.max_steps'"]),
    (["pretrain", "--trainer.max_steps", "five"], ["trainer.max_steps", "int", "'five'"]),
    (["pretrain", "--model.scheduler_cooldown_kind", "inverse_sqrt"], ["did you mean 'inverse-sqrt'"]),
    (["pretrain", "--run.shape", "modernbert_tyni"], ["did you mean 'modernbert_tiny'"]),
    (["pretrain", "own.txt", "--data.collator", "mien.MyCollator"], ["mien.MyCollator", "'mine'"]),
    (["pretrain", "own.txt", "--trainer.callbacks", "nofile.Watch"], ["nofile.Watch"]),
    (["pretrain", "own.txt", "--model.pretrained_model_name_or_path", "empty"], ["empty"]),
    (["pretrain", "own.txt", "--model.pretrained_model_name_or_path", "./nowhere"], ["./nowhere"]),
    (["pretrain", "own.txt", "--model.pretrained_model_name_or_path", "own.csv"], ["own.csv"]),
    (["pretrain", "own.txt", "--model.pretrained_model_name_or_path", "run"], ["run"]),
    (["pretrain", "own.txt", "--run.output", "own.txt"], ["own.txt is a file", "name a directory"]),
    (["pretrain", "own.txt", "--run.output", "own.txt/x"], ["own.txt is a file"]),
    (["finetune", "--data.dataset_name_or_path", "nowhere.csv"], ["nowhere.csv"]),
    (["finetune", "--model.pretrained_model_name_or_path", "run"], ["run"]),
    (["predict", "empty", "own.csv"], ["empty"]),
    (["predict", "run", "nowhere.csv"], ["run"]),
    (["predict", "./nowhere", "own.csv"], ["./nowhere"]),
    (["predict"], ["directory is missing"]),
    (["demo", "--data", "utf16.txt"], ["iconv -f utf-16"]),
    (["demo", "--dta", "own.txt"], ["did you mean 'data'"]),
    (["demo", "--level", "all"], ["level", "'all'", "stdlib, installed"]),
    (["distill", "bad.yaml"], ["bad.yaml", "line 3"]),
    (["fill-mask"], ["directory is missing"]),
]  # fmt: skip


def test_a_wrong_input_is_one_line_that_names_it(place):
    # One process for all of them: what one imports would stay there for the next.
    program = (
        "import contextlib, io, json, sys\n"
        "from bertlab.cli.main import main\n"
        "found = []\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    told = io.StringIO()\n"
        "    with contextlib.redirect_stderr(told):\n"
        "        code = main(words)\n"
        "    found.append([code, told.getvalue()])\n"
        "print(json.dumps(found))\n"
    )
    command = [sys.executable, "-c", program, json.dumps([words for words, _ in WRONG])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place)
    assert done.returncode == 0, done.stderr
    for (words, parts), (code, told) in zip(WRONG, json.loads(done.stdout), strict=True):
        assert code == 2 and told.count("\n") == 1 and told.startswith(f"bertlab {words[0]}: "), (
            told
        )
        assert all(part in told for part in parts), told
        assert not any(part in told for part in ("Errno", "Traceback", "<unicode", "NoneType"))
    assert not list(place.glob("bertlab-*"))  # nothing was begun


@pytest.mark.parametrize("words, parts", [
    (["--data.collator_kwargs.mlm_prob", "0.2"], ["collator_kwargs", "'mlm_prob'", "'mlm_probability'"]),
    (["--data.collator", "mine.MyCollator"], ["collator='mine.MyCollator'", "bertlab.Collator"]),
    (["--data.collator", "mine.MyColator"], ["collator='mine.MyColator'", "did you mean 'MyCollator'"]),
    (["--model.objective", "mine.MyCollator"], ["objective='mine.MyCollator'", "collator"]),
    (["--trainer.callbacks", "EarlyStoping"], ["did you mean 'EarlyStopping'", "my_file.EarlyStoping"]),
    (["--run.val_every_steps", "0"], ["run.val_every_steps=0", "1 or more"]),
    (["--run.checkpoint_every_steps", "0"], ["run.checkpoint_every_steps=0"]),
    (["--run.time_limit", "2x"], ["run.time_limit", "'2x'", "2h30m"]),
    (["--run.max_tokens", "many"], ["run.max_tokens", "'many'"]),
    (["--data.max_sequence_length", "3"], ["max_sequence_length=3", "8 or more"]),
    (["--data.train_batch_size", "0"], ["train_batch_size=0"]),
    (["--model.model_config_kwargs.norm", "mine.MyCollator"], ["norm 'mine.MyCollator'", "torch.nn.Module"]),
    (["--run.shape", "bert_tiny", "--model.pretrained_model_name_or_path", "somebody/bert"], ["run.shape", "bert_tiny"]),
])  # fmt: skip
def test_a_wrong_value_is_named_before_a_file_is_written(place, capsys, words, parts):
    told = said(capsys, "pretrain", "own.txt", *SMALL, *words)
    assert all(part in told for part in parts), told
    assert not (place / "bertlab-run").exists()


# --- a surplus cell, and rows to leave out --------------------------------------------------------


def test_a_surplus_cell_is_named_with_its_line(place, capsys):
    words = ["surplus.csv", "--data.text_column", "title", *SMALL]
    told = said(capsys, "pretrain", *words)
    assert all(
        part in told
        for part in ("surplus.csv line 3", "3 cells", "row has 2", "quotes", 'on_error="skip"')
    )
    told = said(
        capsys,
        "finetune",
        "--data.dataset_name_or_path",
        "surplus.csv",
        "--data.text_column",
        "title",
        SMALL[0],
    )
    assert "surplus.csv line 3" in told and 'bad_rows="skip"' in told and "on_error" not in told
    from bertlab.data.corpus import load_corpus

    corpus = load_corpus("surplus.csv", "title", on_error="skip", validation_fraction=0)
    assert corpus.train_texts == ["fine"] and any("left out" in note for note in corpus.notes)


# --- tables without a header ----------------------------------------------------------------------


def test_every_command_reads_tables_without_a_header(place, capsys):
    by_number = ["--data.text_column", "3", "--data.header", "false"]
    assert (
        main(
            [
                "pretrain",
                "ag.csv",
                *by_number,
                *SMALL,
                "--trainer.max_steps",
                "2",
                "--run.output",
                "p",
            ]
        )
        == 0
    )
    assert "240 documents" not in (told := capsys.readouterr().out) and "train:" in told
    assert main(["validate", "p", "--data.train_dataset_name_or_path", "ag.csv", *by_number]) == 0
    assert main(["demo", "--data", "ag.csv", "--text-column", "3", "--header", "false", "--steps", "2", "--hidden-size",
                 "16", "--num-hidden-layers", "1", "--vocab-size", "120", "--output", "d"]) == 0  # fmt: skip
    capsys.readouterr()
    model = sorted(Path("p/models").glob("step-*"))[-1]
    assert main(["finetune", "--data.dataset_name_or_path", "ag.csv", *by_number, "--data.label_column", "1",
                 "--model.pretrained_model_name_or_path", str(model), "--run.num_epochs", "1", "--run.output", "f",
                 "--data.max_sequence_length", "32"]) == 0  # fmt: skip
    report = capsys.readouterr().out
    assert "240" in report or "216" in report  # no row was taken for a header
    Path("new.csv").write_text('"?","a, b","goal match player"\n"?","c, d","atom cell gene"\n')
    assert main(["predict", "f", "new.csv", "--text-column", "3", "--header", "false"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 2 and all(
        {"1", "2", "3"} & {str(value) for value in one.values()} for one in found
    ), found


# --- a bare run -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start, width, rate",
    [
        ("new", 768, 5e-4),
        ("new", 192, 2e-3),
        ("new", 32, 3e-3),
        ("continued", 768, 2e-4),
        ("continued", 192, 8e-4),
        ("finetuning", 768, 5e-5),
        ("finetuning", 384, 2e-4),
        ("finetuning", 96, 1e-3),
        ("adapter", 384, 1e-3),
    ],
)
def test_the_default_rate_follows_width_and_start(start, width, rate):
    from bertlab.train.modules import default_learning_rate

    assert default_learning_rate(width, start) == pytest.approx(rate)


def test_a_run_has_a_shape_for_its_device_and_records_its_name(place):
    from called import resumed_config

    from bertlab.train.run import Run, build_pretraining, default_shape

    words = ["own.txt", "--trainer.accelerator", "cpu", "--run.vocab_size", "60"]
    run = Run(resumed_config("pretrain", words), build_pretraining)
    assert run.module.config.hidden_size == 192 and "shape: modernbert_tiny" in run.text
    assert default_shape(None, None, "cuda", 128)[0] == "modernbert_base"
    assert default_shape(None, {"hidden_size": 32}, "cpu", 128) == (None, {"hidden_size": 32})
    name, settings = default_shape(None, {"norm": "rms", "num_hidden_layers": 2}, "cpu", 128)
    assert (name, settings["hidden_size"], settings["num_hidden_layers"]) == (
        "modernbert_tiny",
        192,
        2,
    )
    settings = default_shape("bert_tiny", {"hidden_size": 32}, "cpu", 4096)[1]
    assert (settings["hidden_size"], settings["max_position_embeddings"]) == (32, 4096)
    assert "vocab_size" not in settings
    Path("first.yaml").write_text(run.text)
    again = resumed_config("pretrain", ["--config", "first.yaml", "--run.shape", "bert_tiny"])
    assert Run(again, build_pretraining).module.config.hidden_size == 128


def test_several_texts_can_be_given():
    config = config_of("pretrain", ["a.txt", "b.txt"])
    assert config["data"]["train_dataset_name_or_path"] == [
        "a.txt",
        "b.txt",
    ]
    asked = parse(COMMANDS["fill-mask"], ["model", "[MASK]", "a: [MASK]"]).config
    assert asked["texts"] == ["[MASK]", "a: [MASK]"]  # texts, not YAML


def test_a_bare_run_beats_the_unigram_baseline(place, capsys):
    "The shape and the length are small here; rate, warmup and everything else are what nobody gave."
    Path("clear.txt").write_text(
        "".join(f"{text}.\n" for _, text in rows(300, share=1))
    )  # a topic a line
    assert (
        main(
            ["pretrain", "clear.txt", *SMALL, "--trainer.max_steps", "150", "--run.output", "bare"]
        )
        == 0
    )
    told = capsys.readouterr().out
    line = float(told.partition("unigram baseline")[2].split()[0])
    metrics = json.loads(Path("bare/metrics.json").read_text())
    assert 3 < line < 5
    assert metrics["val_loss"] < line - 0.2


# --- parts of one's own ---------------------------------------------------------------------------

OWN = """
import bertlab
import torch
from torch import nn
from lightning.pytorch.callbacks import Callback

seen = []


class MyCollator(bertlab.MaskedLanguageModelingCollator):
    objective = "my_words"

    def compute_labels(self, batch):
        seen.append("collator")
        return super().compute_labels(batch)


class MyOptimizer(torch.optim.SGD):
    def step(self, closure=None):
        seen.append("optimizer")
        return super().step(closure)


def my_schedule(step):
    seen.append("schedule")
    return 1 / (1 + step)


class MyCallback(Callback):
    def on_train_end(self, trainer, module):
        seen.append("callback")


class MyNorm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, x):
        seen.append("norm")
        return self.weight * nn.functional.normalize(x, dim=-1) * x.shape[-1] ** 0.5


class MyModel(bertlab.BertLabForMaskedLM):
    def forward(self, *args, **kwargs):
        seen.append("objective")
        return super().forward(*args, **kwargs)
"""


def test_own_parts_of_each_kind_are_used(place, capsys):
    (place / "own_parts.py").write_text(OWN)
    words = ["own.txt", *SMALL, "--data.collator", "own_parts.MyCollator", "--model.optimizer_class",
             "own_parts.MyOptimizer", "--model.schedule", "own_parts.my_schedule", "--trainer.callbacks",
             "own_parts.MyCallback", "--model.model_config_kwargs.norm", "own_parts.MyNorm", "--model.objective",
             "own_parts.MyModel", "--run.output", "own"]  # fmt: skip
    assert main(["pretrain", *words, "--trainer.max_steps", "2"]) == 0, capsys.readouterr().err
    import own_parts

    assert {"collator", "optimizer", "schedule", "callback", "norm", "objective"} <= set(
        own_parts.seen
    )
    # It goes on, and is validated, with the same parts.
    assert main(["pretrain", "--resume", "own", "--trainer.max_steps", "3"]) == 0, (
        capsys.readouterr().err
    )
    assert main(["validate", "own"]) == 0, capsys.readouterr().err


def test_a_model_directory_cannot_name_code_to_import(place):
    from bertlab.model.config import BertLabConfig

    (place / "evil.py").write_text("open('ran', 'w').close()\nclass Norm: pass\n")
    (place / "theirs").mkdir()
    (place / "theirs" / "config.json").write_text(
        json.dumps({"model_type": "bertlab", "norm": "evil.Norm"})
    )
    with pytest.raises(ValueError, match="evil.Norm.*register_layer"):
        BertLabConfig.from_pretrained(place / "theirs")
    assert not (place / "ran").exists()


# --- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_help(command):
    options, shown = COMMANDS[command].options, COMMANDS[command].help()
    assert [name for name, option in options.items() if not option.help.strip()] == []
    for name in options:
        assert f"--{name} " in shown


def test_help_of_a_public_name_shows_its_comments():
    import inspect

    import bertlab

    for name in bertlab._PLACES:
        told = inspect.getdoc(getattr(bertlab, name))
        assert all(
            parameter in told for parameter in inspect.signature(getattr(bertlab, name)).parameters
        ), name


# --- fine-tuning a user's own rows ----------------------------------------------------------------


def test_finetuning_from_random_weights_has_baselines(place, capsys):
    Path("own.csv").write_text(Path("own.csv").read_text() + f"{'goal ' * 40},sports\n" * 3)
    assert main(["finetune", "--data.dataset_name_or_path", "own.csv", "--data.text_column", "title", SMALL[0],
                 "--data.vocab_size", "120", "--data.max_sequence_length", "24", "--run.num_epochs", "2",
                 "--model.learning_rate", "3e-3", "--run.output", "f", "--trainer.accelerator", "cpu"]) == 0  # fmt: skip
    told = capsys.readouterr().out
    assert "epoch 1" in told and "epoch 2" in told  # a line after each, with its scores
    line = next(line for line in told.splitlines() if line.startswith("epoch 1"))
    assert "accuracy" in line and " s" in line, line
    assert "truncated" in told or "cut" in told
    assert "majority" in told and "bag of words" in told.lower().replace("-", " ")
    metrics = json.loads(Path("f/metrics.json").read_text())
    words = metrics["baselines"]
    assert max(words["majority"].values()) < 0.6 < max(max(b.values()) for b in words.values())
    assert Path("f/tokenizer/tokenizer.json").exists()


# --- what is piped in and out ---------------------------------------------------------------------


def test_a_stream_with_workers_ends(place):
    "Forked workers hang where TOKENIZERS_PARALLELISM=true; the suite sets it, users do not."
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    stream = ["--data.streaming", "true", "--data.num_workers", "2", "--trainer.max_steps", "2"]
    ended = subprocess.run(
        [sys.executable, "-m", "bertlab.cli", "pretrain", "own.txt", *SMALL, *stream],
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
