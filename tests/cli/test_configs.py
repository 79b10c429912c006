"The configurations in bertlab/configs/: every name in them is read, and the small ones train."

import json
from pathlib import Path

import pytest
import yaml
from test_training import word_tokenizer

from bertlab.optim.schedulers import Schedule
from bertlab.cli.commands import COMMANDS
from bertlab.cli.parser import parse
from bertlab.model.huggingface import saved_as, save_model
from bertlab.core.files import find_model_directory
from bertlab.train.run import build_objects, complete_config, default_shape, resolve_config
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
    # With two layers, since transformers 5.15 cannot express a ModernBERT whose layers are all alike.
    shape = {**SHAPE, "num_hidden_layers": 2, "max_position_embeddings": 512}
    module = PretrainingModule(shape, None, tokenizer)
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
        yaml.safe_load((directory / "config.json").read_text()) for directory in (known, adapted)
    )
    assert before["hidden_size"] == after["hidden_size"] == 16 and after["architectures"] == [
        "ModernBertForMaskedLM"
    ]


# Files for BertBlocks: of our writing, in the shape of those of its repository.

TOKENIZER = "${data.init_args.pretrained_tokenizer_name_or_path}"
MODEL = {
    "pretrained_tokenizer_name_or_path": TOKENIZER,
    "learning_rate": 1e-3,
    "scheduler_warmup_steps": 2,
    "compile_model": False,
    "objective": "${data.init_args.objective}",
    "model_config_kwargs": {
        "num_blocks": 1, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
        "norm_kind": "both", "actv_fn": "leakyrelu", "block_pos_enc_kind": "rope",
        "max_sequence_length": "${data.init_args.max_sequence_length}",
    },
}  # fmt: skip
DATA = {
    "pretrained_tokenizer_name_or_path": "tokenizer",
    "train_dataset_name_or_path": "t.txt",
    "objective": "mlm",
    "max_sequence_length": 32,
    "train_batch_size": 8,
}
TRAINER = {"max_epochs": 2, "accelerator": "cpu", "default_root_dir": "runs/${seed_everything}"}


def bertblocks(model=MODEL, data=DATA, trainer=TRAINER, kind="Pretraining", **sections) -> dict:
    path = f"bertblocks.training.modules.BertBlocks{kind}"
    content = {"seed_everything": 7, "trainer": trainer, "ckpt_path": None, **sections}
    for section, name, options in (("model", "Module", model), ("data", "DataModule", data)):
        if options is not None:
            content[section] = {"class_path": path + name, "init_args": options}
    return json.loads(json.dumps(content))


def parsed(tmp_path, *contents, command="pretrain", words=()):
    files = []
    for number, content in enumerate(contents):
        path = tmp_path / f"theirs-{number}.yaml"
        path.write_text(yaml.safe_dump(content))
        files += ["--config", str(path)]
    return parse(COMMANDS[command], [*files, *words])


def test_a_file_for_bertblocks_trains_for_its_epochs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    word_tokenizer(WORDS).save_pretrained("tokenizer")
    write_texts(tmp_path / "t.txt")
    Path("theirs.yaml").write_text(yaml.safe_dump(bertblocks()))
    metrics = pretrain(["--config", "theirs.yaml", "--run.report", "true"])
    printed = capsys.readouterr()
    assert "one text a row" in printed.out and "head_type='mlp'" in printed.err
    history = [row.split(",") for row in Path("runs/7/history.csv").read_text().splitlines()[1:]]
    rates = [float(row[2]) for row in history if row[2]]
    assert metrics["steps"] == len(rates) > 4 and metrics["steps"] % 2 == 0
    # Linear from 0.1 of the peak, which is reached after two steps, and constant.
    assert rates[:3] == pytest.approx([0.55e-3, 1e-3, 1e-3]) and rates[-1] == pytest.approx(1e-3)
    config = json.loads((find_model_directory("runs/7") / "config.json").read_text())
    assert config["norm_position"] == "pre_and_post" and config["norm"] == "rms"
    assert config["mlp"] == "plain" and config["hidden_dropout"] == 0.1
    assert config["hidden_activation"] == "torch.nn.LeakyReLU"
    assert config["max_position_embeddings"] == 32 and config["global_rope_theta"] == 10_000


@pytest.mark.parametrize("theirs, ours", [
    ({"block_pos_enc_kind": "learned"}, {"embedding_positions": "learned", "attention_positions": "none"}),
    ({"pos_emb_kind": "sinusoidal"}, {"embedding_positions": "sinusoidal", "attention_positions": "none"}),
    ({"emb_pos_enc_kind": "learned", "block_pos_enc_kind": None},
     {"embedding_positions": "learned", "attention_positions": "none"}),
    ({"block_pos_enc_kind": "rope", "block_pos_enc_kwargs": {"base_global": 9e4, "rope_dim": 4}},
     {"global_rope_theta": 9e4, "local_rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    ({"pos_emb_kind": "rope", "pos_emb_kwargs": {"rope_theta": 8e4, "local_attn_rope_theta": 9e3}},
     {"global_rope_theta": 8e4, "local_rope_theta": 9e3}),
    ({"local_attention": [16, 16], "global_attention_every_n_layers": 3},
     {"local_attention": 32, "global_attention_every_n_layers": 3}),
    ({"local_attention": [-1, -1], "global_attention_every_n_layers": 0},
     {"global_attention_every_n_layers": 1}),
    ({"norm_fn": "dynamictanh", "norm_kind": "post"}, {"norm": "dynamic_tanh", "embedding_norm": True}),
    ({"norm_fn": "group", "norm_params": {"group_size": 4}}, {"norm": "group", "norm_groups": 4}),
    ({"norm_kind": "pre", "residual_first_layer": True}, {"embedding_norm": True}),
    ({"norm_kind": "pre"}, {"embedding_norm": False, "norm_bias": False}),
    ({"mlp_type": "glu", "mlp_in_bias": False, "mlp_out_bias": False}, {"mlp": "glu", "mlp_bias": False}),
    ({"attention_gate": "elementwise", "num_kv_heads": 1}, {"output_gate": "element", "num_key_value_heads": 1}),
    ({"add_token_type_emb": True, "type_vocab_size": 2}, {"type_vocab_size": 2}),
    ({"initializer_kind": "kaiming_normal"}, {"initialization": "kaiming"}),
    ({"actv_fn": "selu", "attn_dropout_prob": 0.2}, {"hidden_activation": "torch.nn.SELU", "attention_dropout": 0.2}),
])  # fmt: skip
def test_bertblocks_names_describe_the_same_model(theirs, ours, tmp_path):
    settings = {**MODEL["model_config_kwargs"], **theirs}
    config = parsed(tmp_path, bertblocks({**MODEL, "model_config_kwargs": settings})).config
    shape = config["model"]["model_config_kwargs"]
    assert ours.items() <= shape.items()
    keywords = PretrainingModule({"vocab_size": 60, **shape}).config
    assert keywords.num_hidden_layers == 1 and keywords.num_params() > 0


def test_bertblocks_keywords_build_our_config():
    theirs = BertLabConfig(hidden_size=16, num_attention_heads=2, num_blocks=2, norm_kind="both",
                           mlp_type="mlp", block_pos_enc_kind="alibi", attn_dropout_prob=0.2)  # fmt: skip
    ours = BertLabConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=2, mlp="plain",
                         norm_position="pre_and_post", attention_positions="alibi",
                         attention_dropout=0.2)  # fmt: skip
    assert theirs.to_dict() == ours.to_dict()
    with pytest.warns(UserWarning, match="norm_scaling"):
        BertLabConfig(num_blocks=2, norm_scaling=True)


def test_names_of_bertblocks_first_versions_are_read(tmp_path):
    model = {
        "pretrained_tokenizer_name_or_path": "tokenizer",
        "warmup_steps": 9,
        "warmup_decay": 0.2,
    }
    data = {"dataset_name_or_path": "t.txt", "data_split": "train", "mlm_probability": 0.2,
            "pretokenized": False, "pretrained_tokenizer_name_or_path": "tokenizer"}  # fmt: skip
    result = parsed(tmp_path, bertblocks(model, data))
    config = result.config
    assert config["model"]["scheduler_warmup_steps"] == 9
    assert config["model"]["scheduler_warmup_decay"] == 0.2
    assert config["data"]["train_dataset_name_or_path"] == "t.txt"
    assert config["data"]["train_split"] == "train"
    assert config["data"]["collator_kwargs"] == {"mlm_probability": 0.2}
    # What a file leaves out is as in BertBlocks and Lightning, and not as here.
    assert config["model"]["learning_rate"] == 1e-5 and config["data"]["packing"] is False
    assert config["data"]["max_sequence_length"] == 512 and config["run"]["recipe"] == "reference"
    assert config["trainer"]["gradient_clip_val"] is None and config["trainer"]["max_epochs"] == 2
    assert config["model"]["model_config_kwargs"]["num_hidden_layers"] == 12


UNSUPPORTED = {
    "model": {
        "learning_rate_decay": 0.99,
        "objective": "multitask_mlm",
        "optimizer_kwargs": {"lr": 0.1, "weight_decay": 0.1},
        "model_kwargs": {"masking_strategy": "window", "bow_loss_weight": 1.0, "isotropy_loss_weight": 1.0},
        "model_config_kwargs": {
            "vocab_size": 60, "pad_token_id": 1, "mask_token_id": 3, "model_type": "bert",
            "unpad_align_to": 64, "add_timestep_emb": True, "norm_scaling": True, "norm_qk": True,
            "initializer_gain": 2.0, "head_type": "glu", "attention_gate": "headwise",
            "include_final_norm": False, "emb_pos_enc_kwargs": {"base": 1}, "num_classes": 7,
            "problem_type": "multi_label_classification", "mlp_type": "linear", "mlp_out_bias": False,
            "initializer_kind": "fan_in", "norm_params": {"alpha": 0.8}, "local_attention": [8, 4],
            "global_attention_every_n_layers": 0, "block_pos_enc_kind": "learned_alibi",
        },
    },
    "data": {
        "split_char": ".", "split_len": 9, "pretokenized": True, "packing_buffer_size": 99,
        "packing_lookahead": 9, "held_out_val_size": 9, "val_streaming": True,
        "val_data_kwargs": {"name": "x"}, "collator_kwargs": {"mask_token_id": 3},
    },
    "trainer": {"enable_checkpointing": False},
}  # fmt: skip


def test_each_setting_without_a_counterpart_has_one_line(tmp_path):
    content = bertblocks(UNSUPPORTED["model"], UNSUPPORTED["data"], UNSUPPORTED["trainer"])
    notes = parsed(tmp_path, content).notes
    given = [name for section in UNSUPPORTED.values() for name, value in section.items()
             if not name.endswith("_kwargs") or name == "val_data_kwargs"]  # fmt: skip
    nested = [f"{option}.{name}" for section in UNSUPPORTED.values()
              for option, values in section.items() if isinstance(values, dict) and option != "val_data_kwargs"
              for name in values]  # fmt: skip
    for name in given + nested:
        lines = [note for note in notes if f".{name}=" in note]
        assert len(lines) == 1 and "\n" not in lines[0], (name, lines)
    assert all(" is not given: " in note or "theirs-0.yaml: " in note for note in notes)


def test_rates_of_a_schedule_become_factors_of_the_peak(tmp_path):
    model = {**MODEL, "scheduler_training_kind": "exponential", "scheduler_training_steps": 100,
             "scheduler_training_decay": 0.99, "scheduler_cooldown_kind": "cosine",
             "scheduler_cooldown_steps": 9, "scheduler_cooldown_decay": 1e-4}  # fmt: skip
    result = parsed(tmp_path, bertblocks(model))
    assert result.config["model"]["scheduler_training_decay"] == pytest.approx(0.99**100)
    assert result.config["model"]["scheduler_cooldown_decay"] == pytest.approx(0.1)  # of 1e-3
    assert sum("_decay=" in note for note in result.notes) == 2


def test_files_for_bertblocks_may_refer_to_each_other(tmp_path):
    trainer = {
        "max_steps": 50,
        "callbacks": [
            {"class_path": "bertblocks.training.callbacks.HuggingFaceModelCheckpoint",
             "init_args": {"every_n_train_steps": 10, "save_top_k": 3, "save_last": True}},
            {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"},
        ],
        "logger": {"class_path": "bertblocks.training.loggers.WandbLogger", "init_args": {"project": "p"}},
    }  # fmt: skip
    data = {**DATA, "data_kwargs": {"name": "sample", "revision": "v1", "max_documents": 9}}
    result = parsed(
        tmp_path,
        {"trainer": trainer},
        bertblocks(None, data, {}),
        bertblocks(data=None, trainer={}),
        words=["--model.learning_rate", "0.002"],
    )
    config = result.config
    assert config["trainer"]["max_steps"] == 50 and config["model"]["learning_rate"] == 0.002
    assert config["model"]["pretrained_tokenizer_name_or_path"] == "tokenizer"
    assert config["run"]["checkpoint_every_steps"] == 10 and config["run"]["keep_last"] == 3
    assert [c["class_path"] for c in config["trainer"]["callbacks"]] == [
        "lightning.pytorch.callbacks.LearningRateMonitor"
    ]
    assert config["trainer"]["logger"]["class_path"] == "lightning.pytorch.loggers.WandbLogger"
    assert config["data"]["data_kwargs"] == {
        "config_name": "sample", "load_dataset_kwargs": {"revision": "v1"}, "max_documents": 9,
    }  # fmt: skip


def test_a_fine_tuning_file_for_bertblocks_is_read(tmp_path):
    model = {"task": "${data.init_args.task}", "pretrained_model_name_or_path": "model",
             "warmup_ratio": 0.1, "scheduler_type": "linear"}  # fmt: skip
    data = {"task": "token_classification", "dataset_name_or_path": "rows.csv",
            "pretrained_tokenizer_name_or_path": "model", "label_column": "tags"}  # fmt: skip
    trainer = {"max_epochs": 4, "val_check_interval": 0.5, "max_steps": None}
    result = parsed(tmp_path, bertblocks(model, data, trainer, "Finetuning"), command="finetune")
    config = result.config
    assert config["model"]["task"] == "token_classification" and config["run"]["num_epochs"] == 4
    assert config["run"]["seeds"] == [7] and config["data"]["label_column"] == "tags"
    assert config["model"]["learning_rate"] == 1e-5 and config["model"]["warmup_ratio"] == 0.1
    assert [n for n in result.notes if "val_check_interval=0.5" in n]


@pytest.mark.parametrize("content, command, words", [
    (bertblocks(kind="Finetuning"), "pretrain", ["BertBlocksFinetuningModule", "bertlab finetune"]),
    (bertblocks(), "finetune", ["BertBlocksPretrainingModule", "bertlab pretrain"]),
    (bertblocks({**MODEL, "learning_rat": 1}), "pretrain", ["model.learning_rat"]),
    (bertblocks(data={**DATA, "shufle": True}), "pretrain", ["data.shufle"]),
    (bertblocks(trainer={"max_epoch": 1}), "pretrain", ["trainer.max_epoch"]),
    (bertblocks(data=None), "pretrain", ["${data.init_args.", "another --config"]),
    (bertblocks(optimizer={"class_path": "torch.optim.SGD"}), "pretrain", ["optimizer"]),
    ({"model": {"class_path": "other.Module"}}, "pretrain", ["other.Module"]),
])  # fmt: skip
def test_a_wrong_file_for_bertblocks_is_refused(content, command, words, tmp_path):
    with pytest.raises(ValueError) as error:
        parsed(tmp_path, content, command=command)
    assert all(word in str(error.value) for word in [*words, "theirs-0.yaml"])


@pytest.mark.parametrize("setting", [{"num_block": 2}, {"norm_fn": "batch"}, {"actv_fn": "mish"}])
def test_an_unknown_name_of_a_model_is_refused(setting, tmp_path):
    settings = {**MODEL["model_config_kwargs"], **setting}
    config = parsed(tmp_path, bertblocks({**MODEL, "model_config_kwargs": settings})).config
    with pytest.raises(ValueError) as error:
        PretrainingModule({"vocab_size": 60, **config["model"]["model_config_kwargs"]})
    assert str([*setting.values()][0]) in str(error.value) or "num_block" in str(error.value)


def test_a_callback_that_lightning_refuses_is_named():
    with pytest.raises(ValueError, match="save_top_k=3"):
        build_objects({"class_path": "ModelCheckpoint", "init_args": {"save_top_k": 3}})


def test_epochs_have_a_schedule_over_the_whole_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    word_tokenizer(WORDS).save_pretrained("tokenizer")
    write_texts(tmp_path / "t.txt")
    schedule = {"scheduler_training_kind": "linear", "scheduler_training_decay": 0.5,
                "scheduler_cooldown_steps": "25%", "scheduler_warmup_steps": 0}  # fmt: skip
    Path("theirs.yaml").write_text(yaml.safe_dump(bertblocks({**MODEL, **schedule})))
    steps = pretrain(["--config", "theirs.yaml"])["steps"]
    history = [row.split(",") for row in Path("runs/7/history.csv").read_text().splitlines()[1:]]
    rates = [float(row[2]) / 1e-3 for row in history if row[2]]
    expected = Schedule(
        training_kind="linear", training_decay=0.5, cooldown_steps="25%", total_steps=steps
    )
    assert rates == pytest.approx(expected.curve(), rel=1e-5) and rates[-1] < 0.5
