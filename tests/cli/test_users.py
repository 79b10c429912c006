"What a new user types: bare commands, wrong inputs, tables without a header, parts of one's own."

import inspect
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import bertlab
from bertlab.cli.main import main
from bertlab.cli.commands import COMMANDS
from bertlab.cli.parser import parse
from called import config_of  # noqa: E402
from programs import bertlab as program, users_environment

SMALL = ["--model.model_config_kwargs={hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, "
         "intermediate_size: 32}", "--run.vocab_size", "120", "--data.max_sequence_length", "32",
         "--trainer.accelerator", "cpu", "--run.progress", "none"]  # fmt: skip
TOPICS = {"sports": "sport game team win goal match player coach league cup",
          "business": "market stock price bank profit trade share firm deal growth",
          "science": "moon star planet orbit probe laser atom cell gene virus"}  # fmt: skip


def draw_rows(count: int, seed: int = 0, share: float = 0.6) -> list[tuple[str, str]]:
    "Labels, and sentences whose words tell them among words that do not."
    generator, words = random.Random(seed), " ".join(TOPICS.values()).split()

    def sentence(label: str) -> str:
        telling = TOPICS[label].split()
        draws = (telling if generator.random() < share else words for _ in range(12))
        return " ".join(generator.choice(choices) for choices in draws)

    return [(label, sentence(label)) for label in generator.choices(list(TOPICS), k=count)]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    "A directory to work in, with files as users have them."
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    labelled = draw_rows(240)
    Path("own.csv").write_text("title,label\n" + "".join(f"{t},{label}\n" for label, t in labelled))
    # AG News's own form: a label from 1, a title, a description, all in quotes, and no header.
    numbers = {label: n for n, label in enumerate(TOPICS, 1)}
    Path("ag.csv").write_text(
        "".join(f'"{numbers[k]}","{t[:9]}, now","{t}"\n' for k, t in labelled)
    )
    Path("own.txt").write_text("".join(f"{t}.\n" for _, t in labelled))
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
    Path("notes").mkdir()
    Path("notes", "a.txt").write_text("a")
    Path("run", "models", "step-20").mkdir(parents=True)
    Path("run", "run.yaml").write_text("{}\n")
    Path("mine.py").write_text("class MyCollator: pass\n")
    yield tmp_path
    for name in ("mine", "own_parts"):  # a later test may have files of these names
        sys.modules.pop(name, None)


def refuse(capsys, *words: str) -> str:
    "The one line that a mistake gets."
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


# --- wrong inputs, answered before anything heavy is imported -------------------------------------

WRONG = [  # words, and parts of the answer: what it is about, and what to do
    (["pretrain", "nowhere.txt"], ["nowhere.txt", "does not exist"]),
    (["pretrain", "utf16le.txt"], ["utf16le.txt line 1", "utf_16_le"]),
    (["pretrain", "latin.txt"], ["latin.txt line 1", "cp1252"]),
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
    (["pretrain", "--model.scheduler_cooldown_kind", "1_sqrt"], ["did you mean '1-sqrt'"]),
    (["pretrain", "--run.shape", "modernbert_tyni"], ["did you mean 'modernbert_tiny'"]),
    (["pretrain", "own.txt", "--data.collator", "mien.MyCollator"], ["mien.MyCollator", "'mine'"]),
    (["pretrain", "own.txt", "--trainer.callbacks", "nofile.Watch"], ["nofile.Watch"]),
    (["pretrain", "own.txt", "--model.pretrained_model_name_or_path", "empty"], ["has no model", "nothing"]),
    (["finetune", "own.csv", "--model.pretrained_model_name_or_path", "notes"], ["has no model", "only a.txt"]),
    (["pretrain", "own.txt", "--model.pretrained_model_name_or_path", "./nowhere"], ["./nowhere"]),
    (["pretrain", "own.txt", "--model.pretrained_model_name_or_path", "own.csv"], ["own.csv"]),
    (["pretrain", "own.txt", "--model.pretrained_model_name_or_path", "run"], ["run"]),
    (["pretrain", "own.txt", "--run.output", "own.txt"], ["own.txt", "is a file"]),
    (["pretrain", "own.txt", "--run.output", "own.txt/x"], ["own.txt", "is a file"]),
    (["finetune", "--data.dataset_name_or_path", "nowhere.csv"], ["nowhere.csv"]),
    (["finetune", "--model.pretrained_model_name_or_path", "run"], ["run"]),
    (["predict", "empty", "own.csv"], ["empty"]),
    (["predict", "run", "nowhere.csv"], ["nowhere.csv"]),
    (["predict", "./nowhere", "own.csv"], ["./nowhere"]),
    (["predict"], ["directory is missing"]),
    (["demo", "--data", "utf16le.txt"], ["utf16le.txt", "utf_16_le"]),
    (["demo", "--dta", "own.txt"], ["did you mean 'data'"]),
    (["demo", "--level", "all"], ["level", "'all'", "stdlib, installed"]),
    (["distill", "bad.yaml"], ["bad.yaml", "line 3"]),
    (["fill-mask"], ["directory is missing"]),
    (["pretrain", "surplus.csv", "--model.learning_rate", "-1"], ["learning_rate=-1.0"]),
    (["finetune", "surplus.csv", "--model.learning_rate", "-1"], ["learning_rate=-1.0"]),
    (["embed", "finetune", "surplus.csv", "--model.learning_rate", "-1"], ["learning_rate=-1.0"]),
    (["finetune", "surplus.csv", "--model.warmup_steps", "-3"], ["warmup_steps=-3"]),
    (["pretrain", "surplus.csv", "--model.adapter", "lora"], ["adapter='lora'", "pretrained_model_name_or_path"]),
    (["finetune", "surplus.csv", "--model.adapter", "lorra"], ["adapter='lorra'", "lora"]),
    (["embed", "finetune", "surplus.csv", "--model.model_config_kwargs", "{}", "--model.adapter", "lorra"], ["adapter='lorra'"]),
    (["finetune", "surplus.csv", "--trainer.strategy", "fsdp"], ["trainer.strategy='fsdp'", "leave it out"]),
    (["embed", "finetune", "surplus.csv", "--trainer.strategy", "context:1"], ["trainer.strategy='context:1'"]),
    (["pretrain", "own.txt", "--trainer.devices", "two"], ["devices"]),
]  # fmt: skip


MODELS = [  # words of every command that opens a model
    ["pretrain", "own.txt", "--model.pretrained_model_name_or_path", "MODEL"],
    ["pretrain", "own.txt", "--model.reference_model_name_or_path", "MODEL"],
    ["finetune", "own.csv", "--model.pretrained_model_name_or_path", "MODEL"],
    ["embed", "finetune", "own.csv", "--model.pretrained_model_name_or_path", "MODEL"],
    ["predict", "MODEL", "own.csv"],
    ["fill-mask", "MODEL", "a [MASK]"],
    ["write", "MODEL", "a"],
    ["distill", "stages.yaml"],
    ["tune", "search.yaml"],
    ["tokenizer", "extend", "MODEL", "out", "--text", "own.txt"],
    ["tokenizer", "trim", "MODEL", "out", "--text", "own.txt"],
    ["tokenizer", "transplant", "MODEL", "run", "out"],
    ["card", "MODEL"],
    ["push", "MODEL", "me/model"],
    ["export", "MODEL"],
    ["average", "MODEL"],
    ["lengthen", "MODEL", "--length", "64"],
    ["embed", "encode", "MODEL", "own.txt"],
    ["embed", "mine", "own.csv", "MODEL"],
    ["embed", "search", "MODEL", "own.txt", "a"],
    ["embed", "evaluate", "MODEL"],
]


@pytest.mark.parametrize("path", ["run/gone", "./gone", "~/gone", "a/b/c", "a\\b"])
def test_a_missing_model_is_refused_before_imports(folder, capsys, monkeypatch, path):
    monkeypatch.setattr("bertlab.cli.main._import_part", pytest.fail)
    options = f"model: {{pretrained_model_name_or_path: '{path}'}}"
    Path("stages.yaml").write_text(f"stages: [{{{options}}}]")
    Path("search.yaml").write_text(options)
    for words in MODELS:
        message = refuse(capsys, *[path if word == "MODEL" else word for word in words])
        assert path in message.replace("\\\\", "\\")


def test_a_wrong_input_is_one_line_that_names_it(folder, capsys):
    missing = []
    for words, parts in WRONG:
        message = refuse(capsys, *words)
        assert message.startswith(f"bertlab {words[0]}")
        missing += [(words, part, message) for part in parts if part not in message]
        assert not any(part in message for part in ("Errno", "Traceback", "<unicode", "NoneType"))
    assert not missing
    assert not list(folder.glob("bertlab-*"))  # nothing was begun


@pytest.mark.parametrize("words, parts", [
    (["--data.collator_kwargs.mlm_prob", "0.2"], ["collator_kwargs", "'mlm_prob'", "'mlm_probability'"]),
    (["--data.collator", "mine.MyCollator"], ["collator='mine.MyCollator'", "bertlab.Collator"]),
    (["--data.collator", "mine.MyColator"], ["collator='mine.MyColator'", "did you mean 'MyCollator'"]),
    (["--model.objective", "mine.MyCollator"], ["objective='mine.MyCollator'", "collator"]),
    (["--trainer.callbacks", "[{class: mine.MyCollator}]"], ["trainer.callbacks", "mine.MyCollator", "class_path"]),
    (["--trainer.callbacks", "DeviceStatsMonitor"], ["DeviceStatsMonitor", "run.loggers"]),
    (["--trainer.callbacks", "EarlyStoping"], ["did you mean 'EarlyStopping'", "my_file.EarlyStoping"]),
    (["--run.val_every_steps", "0"], ["run.val_every_steps=0", "1 or more"]),
    (["--run.checkpoint_every_steps", "0"], ["run.checkpoint_every_steps=0"]),
    (["--run.time_limit", "2x"], ["run.time_limit", "'2x'", "2h30m"]),
    (["--run.max_tokens", "many"], ["run.max_tokens", "'many'"]),
    (["--data.max_sequence_length", "3"], ["max_sequence_length=3", "8 or more"]),
    (["--data.train_batch_size", "0"], ["train_batch_size=0"]),
    (["--run.shape", "bert_tiny", "--model.pretrained_model_name_or_path", "somebody/bert"], ["run.shape", "bert_tiny"]),
    (["--model.model_config_kwargs.norm", "mine.MyCollator"], ["norm=", "torch.nn.Module"]),
    (["--model.adapter", "dora", "--model.adapter.r", "4"], ["model.adapter.r", "'dora'"]),
])  # fmt: skip
def test_a_wrong_value_is_named_before_a_file_is_written(folder, capsys, words, parts):
    message = refuse(capsys, "pretrain", "own.txt", *SMALL, *words)
    assert all(part in message for part in parts), message
    assert not (folder / "bertlab-run").exists()


# --- a surplus cell, and rows to leave out --------------------------------------------------------


def test_a_surplus_cell_is_named_with_its_line(folder, capsys):
    message = refuse(capsys, "pretrain", "surplus.csv", "--data.text_column", "title", *SMALL)
    assert all(part in message for part in ("surplus.csv line 3", "3 cells", 'on_error="skip"'))
    words = ["--data.dataset_name_or_path", "surplus.csv", "--data.text_column", "title", SMALL[0]]
    message = refuse(capsys, "finetune", *words)
    assert "surplus.csv line 3" in message and "skip" in message


# --- tables without a header ----------------------------------------------------------------------


def test_every_command_reads_tables_without_a_header(folder, capsys):
    by_number = ["--data.text_column", "3", "--data.header", "false"]
    words = ["ag.csv", *by_number, *SMALL, "--trainer.max_steps", "2", "--run.output", "p"]
    assert main(["pretrain", *words]) == 0
    assert "240 documents" not in capsys.readouterr().out
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
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(answers) == 2
    assert all({"1", "2", "3"} & {str(value) for value in answer.values()} for answer in answers)


# --- a bare run -----------------------------------------------------------------------------------


def test_a_run_has_a_shape_for_its_device_and_records_its_name(folder):
    from called import resumed_config

    from bertlab.train.run import Run, build_pretraining, default_shape

    words = ["own.txt", "--trainer.accelerator", "cpu", "--run.vocab_size", "60"]
    run = Run(resumed_config("pretrain", words), build_pretraining)
    assert (
        run.module.config.hidden_size == 192 and run.recorded["run"]["shape"] == "modernbert_tiny"
    )
    assert default_shape(None, None, "cuda", 128)[0] == "modernbert_base"
    assert default_shape(None, {"hidden_size": 32}, "cpu", 128) == (None, {"hidden_size": 32})
    name, settings = default_shape(None, {"norm": "rms", "num_hidden_layers": 2}, "cpu", 128)
    assert name == "modernbert_tiny" and settings["num_hidden_layers"] == 2
    settings = default_shape("bert_tiny", {"hidden_size": 32}, "cpu", 4096)[1]
    assert settings["hidden_size"] == 32 and settings["max_position_embeddings"] == 4096
    assert "vocab_size" not in settings
    Path("first.yaml").write_text(yaml.safe_dump(run.recorded))
    again = resumed_config("pretrain", ["--config", "first.yaml", "--run.shape", "bert_tiny"])
    assert Run(again, build_pretraining).module.config.hidden_size == 128


def test_several_texts_can_be_named():
    config = config_of("pretrain", ["a.txt", "b.txt"])
    assert config["data"]["train_dataset_name_or_path"] == ["a.txt", "b.txt"]
    config = parse(COMMANDS["fill-mask"], ["model", "[MASK]", "a: [MASK]"]).config
    assert config["texts"] == ["[MASK]", "a: [MASK]"]  # texts, not YAML


def test_a_bare_run_beats_the_unigram_baseline(folder, capsys):
    lines = (f"{text}.\n" for _, text in draw_rows(300, share=1))  # a topic a line
    Path("clear.txt").write_text("".join(lines))
    words = ["clear.txt", *SMALL, "--trainer.max_steps", "150", "--run.output", "bare"]
    assert main(["pretrain", *words]) == 0
    baseline = float(capsys.readouterr().out.partition("unigram baseline")[2].split()[0])
    metrics = json.loads(Path("bare/metrics.json").read_text())
    assert 3 < baseline < 5 and metrics["val_loss"] < baseline - 0.2


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


def test_own_parts_of_each_kind_are_used(folder, capsys):
    (folder / "own_parts.py").write_text(OWN)
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
    ended = program("validate", "own", cwd=folder)  # in a process that has not imported them
    assert ended.returncode == 0, ended.stderr
    last = json.loads(Path("own/metrics.json").read_text())["val_loss"]
    assert json.loads(ended.stdout)[0]["loss"] == pytest.approx(last, rel=1e-3)


def test_a_model_directory_cannot_name_code_to_import(folder):
    from bertlab.model.config import BertLabConfig

    (folder / "evil.py").write_text("open('ran', 'w').close()\nclass Norm: pass\n")
    (folder / "theirs").mkdir()
    (folder / "theirs" / "config.json").write_text(
        json.dumps({"model_type": "bertlab", "norm": "evil.Norm"})
    )
    with pytest.raises(ValueError, match="evil.Norm.*register_layer"):
        BertLabConfig.from_pretrained(folder / "theirs")
    assert not (folder / "ran").exists()


# --- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_help(command):
    options, help_text = COMMANDS[command].options, COMMANDS[command].help()
    assert [name for name, option in options.items() if not option.help.strip()] == []
    for name in options:
        assert f"--{name} " in help_text


def test_help_of_a_public_name_shows_its_parameters():
    for name in bertlab._PLACES:
        public = getattr(bertlab, name)
        text = inspect.getdoc(public)
        assert all(parameter in text for parameter in inspect.signature(public).parameters), name


# --- fine-tuning a user's own rows ----------------------------------------------------------------


def test_finetuning_from_random_weights_has_baselines(folder, capsys):
    Path("own.csv").write_text(Path("own.csv").read_text() + f"{'goal ' * 40},sports\n" * 3)
    assert main(["finetune", "--data.dataset_name_or_path", "own.csv", "--data.text_column", "title", SMALL[0],
                 "--data.vocab_size", "120", "--data.max_sequence_length", "24", "--run.num_epochs", "2",
                 "--model.learning_rate", "3e-3", "--run.output", "f", "--trainer.accelerator", "cpu"]) == 0  # fmt: skip
    printed = capsys.readouterr().out
    assert "epoch 2" in printed and "majority" in printed
    baselines = json.loads(Path("f/metrics.json").read_text())["baselines"]
    best = max(max(values.values()) for values in baselines.values())
    assert max(baselines["majority"].values()) < 0.6 < best
    assert Path("f/tokenizer/tokenizer.json").exists()


# --- what is piped in and out ---------------------------------------------------------------------


def test_a_stream_with_workers_ends(folder):
    "Forked workers hang where TOKENIZERS_PARALLELISM=true; the suite sets it, users do not."
    stream = ["--data.streaming", "true", "--data.num_workers", "2", "--trainer.max_steps", "2"]
    result = subprocess.run(
        [sys.executable, "-m", "bertlab.cli", "pretrain", "own.txt", *SMALL, *stream],
        env=users_environment() | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("rate, is_told", [("1e-9", True), ("1e-2", False)])
def test_a_pretraining_that_learns_nothing_is_told(folder, capsys, rate, is_told):
    shape = "{hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 48}"
    words = ["pretrain", "own.txt", "--trainer.max_steps", "80", "--trainer.accelerator", "cpu",
             "--data.max_sequence_length", "64", "--run.vocab_size", "300", "--model.learning_rate", rate,
             "--model.model_config_kwargs", shape, "--trainer.precision", "32-true"]  # fmt: skip
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert ("the loss has hardly moved" in printed) == is_told
    assert ("is not below the unigram baseline" in printed) == is_told
