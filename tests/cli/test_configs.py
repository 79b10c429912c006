"The configurations in bertlab/configs/: every name in them is read, and the small ones train."

import json
from pathlib import Path

import pytest
import yaml
from test_training import word_tokenizer

from bertlab.model.huggingface import saved_as, save_model
from bertlab.core.files import find_model_directory
from bertlab.train.run import complete_config, default_shape, resolve_config
from called import pretrain, resumed_config  # noqa: E402
from bertlab.model.config import BertLabConfig, bert_base, modernbert_base, modernbert_large
from bertlab.data.module import PretrainingDataModule
from bertlab.train.modules import PretrainingModule

ROOT = Path(__file__).parents[2]
EVERY = sorted((ROOT / "bertlab/configs").glob("*.yaml"))
CONFIGS = [
    path
    for path in EVERY
    if path.stem not in ("kl-two-stage", "longer-rows", "search")
    and not path.stem.startswith("finetune")
]
SHAPE = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=1)
WORDS = "the cat sat on a mat and the dog ran to the door of a red house near the sea".split()


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_is_read_whole_and_can_be_built(path, tmp_path):
    words = [
        "--config",
        str(path),
        "--run.output",
        str(tmp_path / "run"),
        "--trainer.accelerator",
        "cpu",
    ]  # wherever this runs
    config = resolve_config(complete_config(resumed_config("pretrain", words)))
    data, model = config["data"], config["model"]
    PretrainingModule(**{**model, "pretrained_model_name_or_path": None})
    options = {
        **data,
        "objective": model["objective"],
        "pretrained_tokenizer_name_or_path": word_tokenizer(WORDS),
    }
    PretrainingDataModule(**options).collator_cls.from_tokenizer(  # the names inside the *_kwargs
        options["pretrained_tokenizer_name_or_path"],
        max_sequence_length=data["max_sequence_length"],
        **data["collator_kwargs"],
    )
    positions = (model["model_config_kwargs"] or {}).get("max_position_embeddings", 8192)
    assert data["max_sequence_length"] <= positions
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_says_what_it_costs_and_where_its_numbers_are_from(path):
    text = path.read_text()
    for words in ("What it costs:", "Where the numbers come from:", "bertlab"):
        assert words in text
    model = read(path)["model"]
    assert (
        model["scheduler_warmup_steps"] + model["scheduler_cooldown_steps"]
        <= read(path)["trainer"]["max_steps"]
    )


@pytest.mark.parametrize(
    "name, preset",
    [
        ("bert-base", bert_base),
        ("several-nodes", modernbert_large),
        ("modernbert-base", modernbert_base),
        ("large-gpu", modernbert_base),
    ],
)
def test_a_published_shape_is_the_one_that_its_preset_builds(name, preset):
    config = read(next(path for path in CONFIGS if path.stem == name))
    _, settings = default_shape(
        config["run"].get("shape"),
        config["model"].get("model_config_kwargs"),
        "cpu",
        config["data"]["max_sequence_length"],
    )
    assert BertLabConfig(**settings).to_dict() == preset().to_dict()


def test_the_laptop_takes_the_recipe_that_won_at_ten_minutes():
    table = json.loads((ROOT / "benchmarks/results/final_project.json").read_text())["recipes"]
    worst = {name: max(seed["nats"][0] for seed in one["seeds"]) for name, one in table.items()}
    won, ours = (
        table[min(worst, key=worst.get)]["recipe"],
        read(ROOT / "bertlab/configs" / "laptop.yaml"),
    )
    for name, value in won["model"].items():
        if not name.startswith("scheduler_"):  # as long as its schedule is, this one is not
            held = ours["model"][name]
            assert held == value if not isinstance(value, dict) else value.items() <= held.items()
    assert won["data"]["collator_kwargs"].items() <= ours["data"]["collator_kwargs"].items()


def test_the_steps_of_the_papers_follow_from_their_tokens():
    by_name = {path.stem: read(path) for path in CONFIGS}
    modern = by_name["modernbert-base"]
    assert int(modern["run"]["batch_tokens"]) == 4608 * 1024
    assert modern["trainer"]["max_steps"] == 1_719_000_000_000 // (4608 * 1024)
    bert = by_name["bert-base"]
    assert bert["run"]["batch_tokens"] == 256 * 512
    assert (
        bert["model"]["scheduler_warmup_steps"] + bert["model"]["scheduler_cooldown_steps"]
        == 1_000_000
    )


def write_texts(path: Path) -> str:
    path.write_text("".join(" ".join(WORDS[i % 7 :] + WORDS[: i % 11]) + "\n" for i in range(77)))
    return str(path)


def test_the_laptop_trains_on_a_small_text(tmp_path):
    path = next(path for path in CONFIGS if path.stem == "laptop")
    words = [
        "--config",
        str(path),
        "--run.output",
        str(tmp_path / "run"),
        "--trainer.max_steps",
        "2",
        "--data.train_dataset_name_or_path",
        write_texts(tmp_path / "t.txt"),
        "--run.vocab_size",
        "60",
        "--model.scheduler_warmup_steps",
        "1",
        "--model.scheduler_cooldown_steps",
        "1",
        "--data.train_batch_size",
        "4",
    ]
    words += [f"--model.model_config_kwargs.{key}={value}" for key, value in SHAPE.items()]
    metrics = pretrain(words)
    assert metrics["steps"] == 2 and metrics["val_loss"] > 0
    assert (tmp_path / "run" / "previews.jsonl").exists()


def test_domain_adaptation_goes_on_from_a_directory_that_stands_for_a_hub_name(tmp_path):
    tokenizer = word_tokenizer(WORDS)
    module = PretrainingModule({**SHAPE, "max_position_embeddings": 512}, None, tokenizer)
    module.configure_model()
    known = tmp_path / "published"
    save_model(module.model, tokenizer, known)
    assert "ModernBert" in saved_as(module.model)
    path = next(path for path in CONFIGS if path.stem == "domain-adaptation")
    words = [
        "--config",
        str(path),
        "--run.output",
        str(tmp_path / "run"),
        "--trainer.max_steps",
        "2",
        "--data.train_dataset_name_or_path",
        write_texts(tmp_path / "t.txt"),
        "--model.pretrained_model_name_or_path",
        str(known),
        "--trainer.accumulate_grad_batches",
        "1",
        "--data.train_batch_size",
        "1",
        "--data.max_sequence_length",
        "64",
        "--model.scheduler_warmup_steps",
        "1",
        "--model.scheduler_cooldown_steps",
        "1",
    ]
    assert pretrain(words)["steps"] == 2
    adapted = find_model_directory(tmp_path / "run")
    before, after = (
        yaml.safe_load((place / "config.json").read_text()) for place in (known, adapted)
    )
    assert before["hidden_size"] == after["hidden_size"] == 16 and after["architectures"] == [
        "ModernBertForMaskedLM"
    ]
