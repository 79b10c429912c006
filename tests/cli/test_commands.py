"`bertlab pretrain`, `validate` and `fill-mask`: one line for every mistake, and a run that can be read and resumed."

import csv
import json
import logging
import os
import re
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from scipy.stats import spearmanr

from bertlab.cli.main import main, silence_libraries
from bertlab.core.files import find_model_directory
from called import pretrain, resumed_config, validate  # noqa: E402
from programs import Program
from bertlab.data.module import PretrainingDataModule
from bertlab.train import run as run_module
from bertlab.data.tokenizers import train_tokenizer
from bertlab.finetuning.predictions import load_predictor
from bertlab.train.export import check_exportable
from bertlab.train.modules import default_learning_rate
from bertlab.train.resume import latest_checkpoint
from bertlab.train.parallel import LaunchInfo
from bertlab.train.run import Run, build_pretraining, complete_config, resolve_config

CONFIG = {
    "model": {"model_config_kwargs": dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                          num_attention_heads=1, max_position_embeddings=64),
              "scheduler_warmup_steps": 1, "learning_rate": 0.01},
    "data": {"max_sequence_length": 32, "train_batch_size": 4, "val_batch_size": 4},
    "trainer": {"max_steps": 4, "precision": "32-true"},
    "run": {"vocab_size": 60, "val_every_steps": 2, "checkpoint_every_steps": 2, "progress": "none"},
}  # fmt: skip
WEIGHTS = "model.safetensors"
WORDS = "the cat sat on a mat and the dog ran to the door of a red house near the sea".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    "A folder with a text, a configuration, and a run of four steps."
    folder = tmp_path_factory.mktemp("commands")
    (folder / "text.txt").write_text(
        "".join(" ".join(WORDS[i % 7 :] + WORDS[: i % 5]) + "\n" for i in range(120))
    )
    config = {
        **CONFIG,
        "data": {**CONFIG["data"], "train_dataset_name_or_path": str(folder / "text.txt")},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    pretrain(["--config", str(folder / "tiny.yaml"), "--run.output", str(folder / "run")])
    return folder


@pytest.fixture
def words(folder, tmp_path) -> list[str]:
    "The words of a run of its own."
    return ["--config", str(folder / "tiny.yaml"), "--run.output", str(tmp_path / "run")]


def refuse(capsys, *line: str) -> str:
    "The one line with which the program refuses, in this process."
    status = main(list(line))
    message = capsys.readouterr().err.strip()
    assert status == 2 and "\n" not in message, (status, message)
    return message


@pytest.fixture
def no_text(monkeypatch):
    "Fail where a text is read."
    for name in ("prepare_data", "training_texts"):
        monkeypatch.setattr(PretrainingDataModule, name, lambda self: pytest.fail("too late"))


def weights(directory: Path) -> dict:
    state = torch.load(latest_checkpoint(directory / "checkpoints"))
    return state["state_dict"]


def test_a_run_leaves_models_checkpoints_and_numbers(folder):
    run = folder / "run"
    names = {path.name for path in run.iterdir()}
    assert names >= {"run.yaml", "tokenizer", "models", "checkpoints", "metrics.json", "history.csv", "loss.png",
                     "report.md"}  # fmt: skip
    saved = yaml.safe_load((run / "run.yaml").read_text())
    assert saved["model"]["learning_rate"] == 0.01 and saved["model"]["weight_decay"] == 0.001
    assert saved["trainer"]["max_steps"] == 4 and saved["run"]["skip_spikes"] is True
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["steps"] == 4 and metrics["val_loss"] > 0 and metrics["val_bits_per_byte"] > 0
    assert (run / "history.csv").read_text().count("\n") == 5
    assert {path.name for path in run.rglob(".*")} <= {".lock", ".directories.json"}


def test_the_saved_configuration_gives_the_same_run_again(folder, tmp_path):
    again = tmp_path / "again"
    pretrain(["--config", str(folder / "run" / "run.yaml"), "--run.output", str(again)])
    first, second = weights(folder / "run"), weights(again)
    assert all(torch.equal(first[name], second[name]) for name in first)


def resolved(words) -> dict:
    "The configuration of a run, with what follows from it."
    return resolve_config(complete_config(resumed_config("pretrain", words)))


def built(words) -> Run:
    "A run whose parts are built; nothing is written."
    return Run(resumed_config("pretrain", words), build_pretraining)


CHOSEN = ("optimizer_class", "weight_decay", "scheduler_cooldown_steps", "schedule")


@pytest.mark.parametrize("flags, chosen", [
    ([], ["muon", 0.05, "25%", None]),
    (["--run.max_tokens", "1M"], ["muon", 0.05, "25%", None]),
    (["--run.recipe", "reference"], ["adamw", 0.001, 0, None]),
    (["--model.optimizer_class", "adamw"], ["adamw", 0.001, "25%", None]),
    (["--model.learning_rate", "1e-3"], ["adamw", 0.001, "25%", None]),
    (["--model.optimizer_class", "muon", "--model.weight_decay", "0"], ["muon", 0, "25%", None]),
    (["--model.scheduler_cooldown_steps", "0"], ["muon", 0.05, 0, None]),
    (["--model.schedule", "my.schedule"], ["muon", 0.05, 0, "my.schedule"]),
    (["--trainer.max_steps", "-1"], ["muon", 0.05, 0, None]),
    (["--minutes", "10"], ["muon", 0.05, 0, None]),
    (["--run.time_limit", "10m"], ["muon", 0.05, "25%", None]),
    (["--trainer.strategy", "tensor:2"], ["adamw", 0.001, "25%", None]),
    (["--model.pretrained_model_name_or_path", "there"], ["adamw", 0.001, 0, None]),
])  # fmt: skip
def test_the_recipe_follows_the_budget_and_what_is_named_wins(flags, chosen):
    model = complete_config(resumed_config("pretrain", flags))["model"]
    assert [model[name] for name in CHOSEN] == chosen


def test_minutes_are_the_budget_of_the_clock():
    config = resolved(["--minutes", "10"])
    assert config["model"]["schedule"] == "time_budget" and config["trainer"]["max_steps"] == -1
    assert config["model"]["scheduler_kwargs"] == {
        "budget": "10.0m", "base": 1.0, "fall": 0.25, "warmup_steps": 20,
    }  # fmt: skip


def learning_rates(directory: Path) -> list[float]:
    with open(directory / "history.csv") as file:
        return [float(row["learning_rate"]) for row in csv.DictReader(file)]


def test_a_run_without_an_end_is_finished_with_a_cooldown(words, tmp_path, capsys):
    stop = ["--trainer.max_steps", "-1", "--run.stop_above", "0.1"]  # after the first validation
    main(["pretrain", *words, *stop])
    assert "--model.scheduler_cooldown_steps 25%" in capsys.readouterr().out
    finish = ["--trainer.max_steps", "6", "--model.scheduler_cooldown_steps", "50%"]
    main(["pretrain", "--resume", str(tmp_path / "run"), *finish, "--run.stop_above", "null"])
    assert learning_rates(tmp_path / "run") == pytest.approx(
        [0.01, 0.01, 0.01, 0.01, 0.02 / 3, 0.01 / 3]
    )


def test_a_longer_run_keeps_the_default_rate(words, tmp_path, capsys):
    words += ["--model.learning_rate", "null", "--model.scheduler_cooldown_steps", "0"]
    first = built([*words, "--trainer.max_steps", "400"]).module
    assert first.hparams.learning_rate == default_learning_rate(16, "new", "muon", 400)
    pretrain(words)
    rate = default_learning_rate(16, "new", "muon", 4)
    assert f"muon, rate {rate:.3g}" in capsys.readouterr().out
    pretrain(["--resume", str(tmp_path / "run"), "--trainer.max_steps", "6"])
    assert learning_rates(tmp_path / "run") == pytest.approx([rate] * 6)
    assert f"muon, rate {rate:.3g}" in capsys.readouterr().out


def test_batch_tokens_decide_rows_and_accumulation(words, capsys, tmp_path):
    tokens = ["--run.batch_tokens", "512", "--run.microbatch_tokens", "128"]
    # 512 / 32 = 16 rows; 4 at once.
    for processes, window in ((1, 4), (2, 2), (4, 1)):
        config = resolved([*words, *tokens, "--trainer.devices", processes])
        assert config["data"]["train_batch_size"] == config["data"]["val_batch_size"] == 4
        assert config["trainer"]["accumulate_grad_batches"] == window
    message = refuse(capsys, "pretrain", *words, *tokens, "--data.train_batch_size", "5")
    assert "train_batch_size=5" in message
    # A launcher's processes are not recorded: a resume may have others.
    launch = LaunchInfo("torchrun", rank=0, world_size=2, num_nodes=1)
    run = Run(resumed_config("pretrain", [*words, *tokens]), build_pretraining, launch=launch)
    recorded = run.recorded
    assert run.trainer.accumulate_grad_batches == 2 and recorded["trainer"]["devices"] == 1
    assert recorded["trainer"]["accumulate_grad_batches"] == 1


def test_max_tokens_set_the_steps(words, capsys):
    config = resolved([*words, "--run.max_tokens", "1280", "--trainer.max_steps", "null"])
    assert config["trainer"]["max_steps"] == 10  # of 4 rows of 32
    assert "max_steps=4" in refuse(capsys, "pretrain", *words, "--run.max_tokens", "1280")
    few = ["--run.max_tokens", "100", "--trainer.max_steps", "null"]
    assert "run.max_tokens=100" in refuse(capsys, "pretrain", *words, *few)


def test_case_and_documents_are_plain_options(words, tmp_path):
    pairs = (f"Die Katze {i} sitzt lange da.\nEin Hund {i} bellt sehr laut.\n" for i in range(40))
    (tmp_path / "a.txt").write_text("\n".join(pairs))
    runs = [built([str(tmp_path / "a.txt"), *words[:2], "--output", str(tmp_path / "x"), *flags])
            for flags in ([], ["--cased", "--sample_by", "line"])]  # fmt: skip
    assert ["K" in run.tokenizer.get_vocab()
            for run in runs] == [False, True]  # fmt: skip
    counts = [int(re.search(r"train: (\d+) documents", run.describe())[1]) for run in runs]
    assert counts[1] == 2 * counts[0]


def test_null_disables_clipping_alone(words):
    nulls = ["--trainer.gradient_clip_val", "null", "--trainer.precision", "null"]
    trainer = built([*words, *nulls]).trainer
    assert trainer.gradient_clip_val is None and built(words).trainer.gradient_clip_val == 1.0
    assert trainer.num_sanity_val_steps == 0 and trainer.loggers == []


def test_what_the_device_lacks_is_refused_early(words, tmp_path, capsys, no_text):
    assert "float8" in refuse(capsys, "pretrain", *words, "--model.float8", "tensorwise")
    if not torch.cuda.is_available():
        assert "gpu" in refuse(capsys, "pretrain", *words, "--trainer.accelerator", "gpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("optimizer, option, value, part", [
    ("adamw", "freeze", "99", "freeze=99"),
    ("adamw", "freeze", "[foo]", "freeze: 'foo' matches no weight"),
    ("adamw", "parameter_overrides", '{"*blocks.7.*": {lr: 1.0e-4}}', "'*blocks.7.*'"),
    ("adamw", "parameter_overrides", '{"*blocks.0.*": {rate: 1.0e-4}}', "'rate'"),
    ("adamw", "parameter_overrides", '{"*blocks.0.mlp*": {hidden: false}}', "hidden is for muon and galore"),
    ("adamw", "optimizer_kwargs", "{weight_decay: 0.1}", "weight_decay=0.1"),
    ("adamw", "optimizer_kwargs", "{lr: 0.1}", "set learning_rate"),
    ("adamw", "optimizer_kwargs", "{betas: 0.9}", "'betas': 0.9"),
    ("adamw", "optimizer_kwargs", "{betas: [0.9]}", "'betas': [0.9]"),
    ("adamw", "optimizer_kwargs", "{eps: small}", "'eps': 'small'"),
    ("shampoo", "optimizer_kwargs", "{preconditioning_compute_steps: 0}", "preconditioning_compute_steps must be positive"),
    ("muon", "optimizer_kwargs", "{ns_steps: five}", "'ns_steps': 'five'"),
    ("adamw", "scheduler_kwargs", "{total_steps: 50}", "scheduler_kwargs has total_steps=50"),
    ("adamw", "scheduler_kwargs", "{warmup_kind: cosine}", "warmup_kind='cosine'"),
])  # fmt: skip
def test_a_wrong_option_is_refused_before_the_text_is_read(
    words, tmp_path, capsys, no_text, optimizer, option, value, part
):
    message = refuse(
        capsys, "pretrain", *words, "--model.optimizer_class", optimizer, f"--model.{option}", value
    )
    assert part in message and not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [
    ["--model.parameter_overrides", '{"*blocks.1.*": {lr: 1.0e-4}}'],
    ["--model.parameter_overrides", '{"*decoder*": {lr: 1.0e-4}}', "--model.objective", "enhanced_mlm"],
    ["--model.parameter_overrides", '{"*blocks.1.mlp*": {hidden: false}}', "--model.optimizer_class", "muon"],
    ["--model.parameter_overrides", '{"*blocks.1.*": {lr: 1.0e-4}}', "--model.freeze", "1"],
])  # fmt: skip
def test_patterns_are_matched_on_the_model_of_the_run(words, options):
    built([*words, "--model.model_config_kwargs.num_hidden_layers", "2", *options])


def test_parts_that_a_continued_model_lacks_are_refused(folder, words, tmp_path, capsys):
    model = [
        "--model.pretrained_model_name_or_path",
        str(find_model_directory(folder / "run")),
        "--model.model_config_kwargs",
        "null",
    ]
    for option, value, part in (
        ("freeze", "99", "freeze=99"),
        ("parameter_overrides", '{"*blocks.1.*": {lr: 1.0e-4}}', "'*blocks.1.*' matches"),
    ):
        assert part in refuse(capsys, "pretrain", *words, *model, f"--model.{option}", value)
    assert not (tmp_path / "run").exists()
    overrides = '{"*lora_*": {weight_decay: 0.0}}'
    built([*words, *model, "--model.adapter", "lora", "--model.parameter_overrides", overrides])
    run = built(
        [
            *words,
            *model,
            "--model.parameter_overrides",
            '{"*blocks.0.*": {lr: 1.0e-4}}',
            "--model.freeze",
            "embeddings",
        ]
    )
    assert all(p.requires_grad for p in run.module.model.parameters()), (
        "the check has a model of its own"
    )


def test_a_continued_model_is_validated_first(folder, words, tmp_path, capsys):
    model = find_model_directory(folder / "run")
    pretrain(
        [
            *words,
            "--model.pretrained_model_name_or_path",
            str(model),
            "--model.model_config_kwargs",
            "null",
        ]
    )
    assert "before step 1: val_loss" in capsys.readouterr().out
    report = (tmp_path / "run" / "report.md").read_text()
    first = json.loads((model / "trainer_state.json").read_text())["best_metric"]
    assert f"{first:.4g}"[:4] in report


@pytest.mark.parametrize("command", ["pretrain", "--estimate", "validate"])
def test_a_foreign_tokenizer_is_refused_early(
    folder, words, tmp_path, capsys, monkeypatch, command
):
    model, other = find_model_directory(folder / "run"), tmp_path / "other"
    train_tokenizer(["w v u t s r q p o n m l k j i h g f e d c b a"], 40).save_pretrained(other)
    monkeypatch.setattr(PretrainingDataModule, "prepare_data", lambda self: pytest.fail("too late"))
    options = ["--model.model_config_kwargs", "null", "--model.pretrained_model_name_or_path", str(model),
               "--data.pretrained_tokenizer_name_or_path", str(other)]  # fmt: skip
    leading = [command] if command.startswith("--") else []
    message = refuse(
        capsys, "validate" if command == "validate" else "pretrain", *words, *options, *leading
    )
    assert (
        "was trained with another tokenizer" in message
        and "bertlab tokenizer transplant" in message
    )
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_has_the_weights_of_a_whole_one(folder, words, tmp_path):
    run = tmp_path / "run"
    pretrain([*words, "--trainer.max_steps", "2"])
    assert latest_checkpoint(run / "checkpoints").name == "step-00000002.ckpt"
    pretrain(["--trainer.max_steps", "4"], resume=str(run))  # its own run.yaml says the rest
    straight, resumed = weights(folder / "run"), weights(run)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert yaml.safe_load((run / "run.yaml").read_text())["trainer"]["max_steps"] == 4
    assert (run / "history.csv").read_text().count("\n") == 5


def test_a_run_killed_after_its_last_step_is_completed(words, tmp_path):
    whole, run = pretrain(words), tmp_path / "run"
    steps = [row.split(",")[:2] for row in (run / "history.csv").read_text().splitlines()]
    for name in ("metrics.json", "report.md"):
        (run / name).unlink()
    weights = load_file(find_model_directory(run) / "model.safetensors")
    with pytest.raises(ValueError, match="already passed"):
        pretrain(["--trainer.max_steps", "3"], resume=str(run))
    again = pretrain([], resume=str(run))
    assert again["steps"] == whole["steps"] and again["val_loss"] == whole["val_loss"]
    assert [row.split(",")[:2] for row in (run / "history.csv").read_text().splitlines()] == steps
    kept = load_file(find_model_directory(run) / "model.safetensors")
    assert all(kept[name].equal(weight) for name, weight in weights.items())


def test_a_run_may_validate_on_no_batches(words, tmp_path, capsys):
    metrics = pretrain([*words, "--trainer.limit_val_batches", "0", "--run.validate_first", "true"])
    assert metrics["steps"] == 4 and "val_loss" not in metrics
    capsys.readouterr()
    assert "limit_val_batches=0" in refuse(capsys, "validate", str(tmp_path / "run"))


def test_a_run_without_a_report_returns_its_validation(words, tmp_path):
    found = pretrain([*words, "--run.report", "false"])
    assert found["val_loss"] > 0 and not (tmp_path / "run" / "metrics.json").exists()


@pytest.mark.parametrize("options, part", [
    (["--config", "YAML:trainer: {max_step: 3}"], "did you mean 'trainer.max_steps'"),
    (["--config", "YAML:model: {model_config_kwargs: {hiden_size: 3}}"], "did you mean 'hidden_size'"),
    (["--model.loss_kwargs.z_wait", "0.1"], "z_wait"),
    (["--model.optimizer_kwargs.beta", "0.1"], "beta"),
    (["--model.optimizer_class", "adamv"], "adamw"),
    (["--model.objective", "clm"], "mlm"),
    (["--model.scheduler_warmup_steps", "9"], "warmup"),
    (["--trainer.max_steps", "0"], "max_steps"),
    (["--run.loggers", "[paper]"], "tensorboard"),
    (["--run.time_limit", "soon"], "soon"),
    (["--run.peak_flops", "high"], "measured"),
    (["--run.preview_sentences", "[no gap]"], "[MASK]"),
    (["--data.data_kwargs.linse", "documents"], "linse"),
    (["--data.collator_kwargs.mlm_probabilty", "0.2"], "mlm_probabilty"),
    (["--data.train_batch_size", "9999"], "9999"),
    (["--data.pretrained_tokenizer_name_or_path", "a", "--model.pretrained_tokenizer_name_or_path", "b"], "name one"),
    (["--resume"], "nothing to resume"),
    (["--trainer.accumulate_grad_batches", "0"], "accumulate_grad_batches=0"),
    (["--trainer.logger", "csv"], "--run.loggers [csv]"),
    (["--trainer.profiler", "simpl"], "profiler"),
    (["--trainer.limit_train_batches", "1.5"], "limit_train_batches"),
    (["--trainer.gradient_clip_algorithm", "foo"], "foo"),
    (["--trainer.enable_checkpointing", "false"], "enable_checkpointing"),
])  # fmt: skip
def test_a_mistake_is_one_line_without_a_directory(words, tmp_path, capsys, options, part):
    for i, word in enumerate(options):
        if word.startswith("YAML:"):
            (tmp_path / "wrong.yaml").write_text(word[5:])
            options = [*options[:i], str(tmp_path / "wrong.yaml"), *options[i + 1 :]]
    assert part in refuse(capsys, "pretrain", *words, *options)
    assert not (tmp_path / "run").exists()


def test_an_output_in_use_is_refused_early(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "resolve_tokenizer", lambda *_: pytest.fail("too late"))
    config = ["--config", str(folder / "tiny.yaml"), "--run.output"]
    assert "--resume" in refuse(capsys, "pretrain", *config, str(folder / "run"))
    assert "is a file" in refuse(capsys, "pretrain", *config, str(folder / "text.txt" / "run"))
    allowed = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and allowed(path, mode))
    assert "may not be written to" in refuse(capsys, "pretrain", *config, str(tmp_path / "run"))


def test_tokens_of_tokenize_are_trained_on(folder, words, tmp_path, capsys):
    shards = str(tmp_path / "shards")
    assert main(["tokenize", str(folder / "text.txt"), "--tokenizer", str(folder / "run" / "tokenizer"),
                 "--output", shards]) == 0  # fmt: skip
    printed = capsys.readouterr().out.split("bertlab ")[-1].split()
    assert printed == ["pretrain", "--data.train_dataset_name_or_path", shards]
    assert (
        main(
            [
                *printed,
                *words,
                "--trainer.max_steps",
                "1",
                "--data.val_dataset_name_or_path",
                shards,
            ]
        )
        == 0
    )
    assert "120 documents" in capsys.readouterr().out
    options = ["--run.output", str(tmp_path / "other"), "--data.streaming", "true"]
    assert "leave streaming out" in refuse(capsys, *printed, *words, *options)


def test_overwrite_moves_a_run_and_trains_a_tokenizer(folder, words, tmp_path):
    pretrain([*words, "--run.vocab_size", "40"])
    pretrain([*words, "--trainer.max_steps", "2"], overwrite=True)
    run = tmp_path / "run"
    sizes = [len(json.loads((home / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"])
             for home in (run / "previous-1", run)]  # fmt: skip
    assert sizes[0] <= 40 < sizes[1]


def test_a_run_does_not_move_its_own_beginning(folder, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run, symlinks=True)
    begin = ["--config", str(folder / "tiny.yaml"), "--model.model_config_kwargs", "null", "--run.output", str(run),
             "--model.pretrained_model_name_or_path", str(run / "models" / "best"), "--overwrite"]  # fmt: skip
    assert "--overwrite would move it aside" in refuse(capsys, "pretrain", *begin)
    assert not (run / "previous-1").exists() and (run / "models" / "best" / "config.json").exists()


def test_validate_agrees_with_the_run(folder, capsys):
    capsys.readouterr()
    assert (
        main(["validate", "--run.output", str(folder / "run"), "--data.val_batch_size", "3"]) == 0
    )
    [row] = json.loads(capsys.readouterr().out)
    best = find_model_directory(folder / "run")
    state = json.loads((best / "trainer_state.json").read_text())
    assert row["loss"] == pytest.approx(state["best_metric"], rel=1e-5) and row["model"] == str(
        best
    )
    assert set(row) >= {"perplexity", "accuracy", "bits_per_byte"}
    assert json.loads((folder / "run" / "validation.json").read_text()) == [row]


def test_sources_of_callbacks_are_checked_early(folder, tmp_path):
    evaluators = "[{kind: fill_mask, name: facts, source: %s, every_n_steps: 2}]" % (
        tmp_path / "none.tsv"
    )
    words = ["--config", str(folder / "tiny.yaml"), "--run.output", str(tmp_path / "run")]
    with pytest.raises(ValueError, match="none.tsv"):
        pretrain([*words, "--run.evaluators", evaluators])
    checked = [
        "--model.pretrained_model_name_or_path",
        str(find_model_directory(folder / "run")),
        "--model.model_config_kwargs",
        "null",
    ]
    with pytest.raises(ValueError, match="'qvk"):
        pretrain([*words, *checked, "--run.histograms", "['qvk*']"])


def test_validate_has_a_row_for_each_set(folder, tmp_path):
    (tmp_path / "other.txt").write_text("a red house near the sea\n" * 30)
    model = find_model_directory(folder / "run")
    rows = validate(["--config", str(folder / "tiny.yaml"), "--run.output", str(tmp_path / "v"),
                     "--model.pretrained_model_name_or_path", str(model), "--data.val_dataset_name_or_path",
                     f"[{folder / 'text.txt'}, {tmp_path / 'other.txt'}]"])  # fmt: skip
    assert len(rows) == 2 and "other.txt" in rows[1]["set"] and rows[0]["loss"] != rows[1]["loss"]


def test_fill_mask_agrees_with_transformers(folder, capsys):
    from transformers import pipeline

    best = str(folder / "run" / "models" / "best")
    expected = pipeline("fill-mask", model=best, top_k=3)("the [MASK] sat on a mat")
    capsys.readouterr()
    assert (
        main(
            [
                "fill-mask",
                str(folder / "run"),
                "the [MASK] sat on a mat",
                "a [MASK] [MASK]",
                "--top_k",
                "3",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "the [MASK] sat on a mat" and len(printed) == 5
    assert [guess.split()[0] for guess in printed[1].strip().split(", ")] == [
        t["token_str"].strip() for t in expected
    ]


def test_fill_mask_refuses_in_one_line(folder, capsys, tmp_path, monkeypatch):
    run = str(folder / "run")
    assert "no such file or directory" in refuse(
        capsys, "fill-mask", str(tmp_path / "none"), "x [MASK]"
    )
    assert "[MASK]" in refuse(capsys, "fill-mask", run, "no gap")
    assert "config.json" in refuse(capsys, "fill-mask", str(tmp_path), "x [MASK]")
    assert "top_k" in refuse(capsys, "fill-mask", run, "x [MASK]", "--top_k", "0")
    monkeypatch.setattr(sys, "stdin", open(os.devnull))
    assert "texts" in refuse(capsys, "fill-mask", run)


def test_a_run_is_accepted_wherever_a_model_is(folder, words, tmp_path, capsys):
    run, best = str(folder / "run"), load_file(find_model_directory(folder / "run") / WEIGHTS)
    text, model = str(folder / "text.txt"), ["--model.pretrained_model_name_or_path", run]
    for command in (
        ["embed", "encode", run, text, "--output", str(tmp_path / "vectors.npy")],
        ["tokenizer", "transplant", run, run, "--output", str(tmp_path / "other")],
        ["lengthen", run, "--length", "96", "--output", str(tmp_path / "longer")],
    ):
        assert main(command) == 0, (command, capsys.readouterr().err)
    [table] = [weight for name, weight in best.items() if "embeddings.tok" in name]
    other = load_file(tmp_path / "other" / WEIGHTS)
    assert any(torch.equal(weight, table) for weight in other.values())
    options = ["--model.model_config_kwargs", "null", "--model.reference_model_name_or_path", run]
    module = built([*words, *model, *options, "--model.kl_weight", "1"]).module
    module.configure_model()
    assert torch.equal(module.model.encoder.embeddings.tokens.weight, table)
    check_exportable(run)
    with pytest.raises(ValueError, match="run holds .* no head for a task"):
        load_predictor(run)


def test_warnings_are_one_line_without_their_source(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with warnings.catch_warnings():
        silence_libraries()
        with warnings.catch_warnings(record=True) as shown:
            spearmanr([1, 2, 3], [1, 1, 1])
    assert not shown
    text = warnings.formatwarning("a note\nof two lines", UserWarning, "file.py", 3, "source")
    assert text == "bertlab: a note of two lines\n"
    # A kernel that is not installed, which peft looks for; CUDA's compiler without a GPU, as in Colab.
    for name in ("bitsandbytes.backends.cpu.ops", "torch.utils.cpp_extension"):
        assert not logging.getLogger(name).isEnabledFor(logging.WARNING)


def test_validate_takes_a_bare_model(folder, tmp_path, capsys):
    shutil.copytree(find_model_directory(folder / "run"), tmp_path / "model")
    words = [str(tmp_path / "model"), "--data.train_dataset_name_or_path", str(folder / "text.txt"),
             "--data.max_sequence_length", "32", "--data.val_batch_size", "1"]  # fmt: skip
    [row] = validate(words)
    assert row["loss"] > 0 and row["model"] == str(tmp_path / "model")
    [part] = validate(
        [*words, "--trainer.limit_val_batches", "1", "--trainer.precision", "bf16-mixed"]
    )
    assert part["loss"] != row["loss"]
    assert "/none" in refuse(capsys, "validate", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="precision"):
        validate([*words, "--trainer.precision", "half"])


STAGES = """
model: {model_config_kwargs: {hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 1},
        scheduler_warmup_steps: 1}
data: {train_dataset_name_or_path: TEXT, max_sequence_length: 32, train_batch_size: 4}
run: {vocab_size: 60, progress: none}
stages:
- trainer: {max_steps: 3}
- trainer: {max_steps: 2}
  model: {reference_model_name_or_path: previous}
"""


def test_distill_runs_resumes_and_overwrites(folder, tmp_path, capsys):
    (tmp_path / "s.yaml").write_text(STAGES.replace("TEXT", str(folder / "text.txt")))
    words = ["distill", str(tmp_path / "s.yaml"), "--output", str(tmp_path / "run")]
    assert main([*words, "--run.time_limit", "0.001s"]) == 4
    assert "stage 1 stopped" in capsys.readouterr().err
    previews = ["--run.preview_sentences", '["the [MASK] sat"]', "--run.stop_above", "1e9"]
    assert main([*words, "--resume", *previews]) == 0
    assert "stage 2: " in capsys.readouterr().out
    assert find_model_directory(tmp_path / "run").parts[-3] == "stage-2"
    assert list((tmp_path / "run").rglob("previews.jsonl"))
    assert "--overwrite" in refuse(capsys, *words)
    assert main([*words, "--overwrite"]) == 0
    assert (tmp_path / "run" / "previous-1" / "stage-1").is_dir()


def test_distill_refuses_a_wrong_file(capsys, tmp_path):
    (tmp_path / "s.yaml").write_text("stages: [{tokns: 3}]\n")
    assert "tokns" in refuse(capsys, "distill", str(tmp_path / "s.yaml"))
    assert "missing.yaml" in refuse(capsys, "distill", "missing.yaml")
    assert main(["devices"]) == 0
    printed = capsys.readouterr().out
    assert "device  " in printed and ("32-true" in printed or "16-mixed" in printed)


def test_all_callbacks_can_be_enabled(words, tmp_path):
    pretrain(
        [
            *words,
            "--run.loggers",
            "[csv]",
            "--run.preview_sentences",
            '["the [MASK] sat"]',
            "--run.histograms",
            '["*.embeddings.*weight"]',
            "--run.time_limit",
            "1h",
            "--run.stop_above",
            "1e9",
            "--run.measure_every_steps",
            "1",
            "--run.peak_flops",
            "1e12",
            "--run.compile_ahead",
            "true",
            "--trainer.callbacks+=LearningRateMonitor",
        ]
    )
    run = tmp_path / "run"
    assert list((run / "logs").rglob("metrics.csv")) and (run / "histograms.npz").exists()
    assert json.loads((run / "previews.jsonl").read_text().splitlines()[0])["texts"] == [
        "the [MASK] sat"
    ]
    report = (run / "report.md").read_text()
    assert "mfu" in report and "NonFiniteGuard" in report


def test_ctrl_c_saves_and_the_run_can_be_resumed(words, tmp_path):
    run = tmp_path / "run"
    program = Program(["pretrain", *words, "--trainer.max_steps", "100000",
                       "--run.val_every_steps", "1000000", "--run.progress", "plain"])  # fmt: skip
    while program.poll() is None and "\nstep " not in program.printed.read_text():
        time.sleep(0.02)
    program.send_signal(signal.SIGINT)
    ended = program.wait(timeout=120)
    assert ended.returncode == 130, ended.stderr
    assert f"bertlab pretrain --resume {run}" in ended.stderr
    step = int(latest_checkpoint(run / "checkpoints").stem[5:])
    assert "a signal" in (run / "report.md").read_text()
    assert pretrain(["--trainer.max_steps", str(step + 2)], resume=str(run))["steps"] == step + 2


def test_a_model_of_a_run_is_validated_on_its_text(folder, tmp_path):
    shutil.copytree(folder / "run", tmp_path / "run")
    [row] = validate([str(tmp_path / "run")])
    [model] = validate([str(tmp_path / "run" / "models" / "best")])
    assert (
        model["set"] == row["set"] == "held out of the training text"
        and model["loss"] == row["loss"]
    )
    shutil.copytree(find_model_directory(folder / "run"), tmp_path / "alone")
    [alone] = validate([str(tmp_path / "alone"), "--data.train_dataset_name_or_path", str(folder / "text.txt"),
                        "--data.max_sequence_length", "32", "--data.val_batch_size", "1"])  # fmt: skip
    assert alone["set"] == f"held out of {folder / 'text.txt'}"


def test_a_run_is_validated_with_its_own_tokenizer(folder, tmp_path):
    texts = (folder / "text.txt").read_text().splitlines()
    train_tokenizer(texts, 60).save_pretrained(tmp_path / "tok")
    words = ["--config", str(folder / "tiny.yaml"), "--run.output", str(tmp_path / "run"),
             "--data.pretrained_tokenizer_name_or_path", str(tmp_path / "tok")]  # fmt: skip
    pretrain(words)
    [before] = validate([str(tmp_path / "run")])
    shutil.rmtree(tmp_path / "tok")
    [after] = validate([str(tmp_path / "run")])
    assert after["loss"] == before["loss"]


def test_wrong_sizes_and_directories_are_refused_early(
    folder, words, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        "bertlab.data.module.tokenize_documents", lambda *_, **__: pytest.fail("it began")
    )
    assert "max_position_embeddings 64" in refuse(
        capsys, "pretrain", *words, "--data.max_sequence_length", "96"
    )
    (tmp_path / "texts").mkdir()
    shutil.copy(folder / "text.txt", tmp_path / "texts")
    assert "all files of which are read" in refuse(
        capsys, "pretrain", "--config", str(folder / "tiny.yaml"), "--data.train_dataset_name_or_path",
        str(tmp_path / "texts"), "--run.output", str(tmp_path / "texts" / "run"))  # fmt: skip
    assert "is inside of" in refuse(capsys, "tokenize", str(tmp_path / "texts"), "--tokenizer", str(folder / "run" / "tokenizer"),
                                  "--output", str(tmp_path / "texts" / "tokens"))  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_a_tilde_is_expanded_in_outputs(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = resumed_config(
        "pretrain", ["--config", str(folder / "tiny.yaml"), "--run.output", "~/runs/first"]
    )
    assert config["run"]["output"] == str(tmp_path / "runs" / "first")
    shutil.copytree(folder / "run", tmp_path / "kept")
    assert find_model_directory("~/kept") == find_model_directory(tmp_path / "kept")


def test_the_model_can_set_the_vocabulary_size(words):
    size = ["--run.vocab_size", "4096", "--model.model_config_kwargs.vocab_size", "70"]
    run = built([*words, *size])
    assert len(run.tokenizer) <= 70 and run.module.config.vocab_size == 70
