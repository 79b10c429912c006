"What is no encoder with weights and its tokenizer is refused by every command before a text is read."

import json
from pathlib import Path

import pytest
import torch
import transformers

from bertlab.cli.main import main
from bertlab.data.tokenizers import train_tokenizer

SIZES = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 16, "max_position_embeddings": 32, "pad_token_id": 0}  # fmt: skip
T5 = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
KINDS = (  # directories of the fixture, and a part of what the message says about each
    ("no-such-model", "no-such-model"),
    ("remote_code", "Python code"),
    ("decoder", "left to right"),
    ("encoder_decoder", "decoder"),
    ("vision", "token ids"),
    ("no_weights", "model.safetensors"),
    ("other_weights", "not fit"),
    ("other_tokenizer", "vocab_size"),
)
COMMANDS = {  # words, and the option that names the model; predict reads one with a head for a task
    "pretrain bad.txt --model.pretrained_model_name_or_path MODEL": "pretrained_model_name_or_path",
    "finetune bad.csv --model.pretrained_model_name_or_path MODEL": "pretrained_model_name_or_path",
    "embed finetune bad.csv --model.pretrained_model_name_or_path MODEL": "pretrained_model_name_or_path",
    "embed encode MODEL bad.txt": "model",
    "validate --model.pretrained_model_name_or_path MODEL --data.train_dataset_name_or_path bad.txt": "pretrained_model_name_or_path",
    "fill-mask MODEL [MASK]": "directory",
    "predict task/MODEL bad.csv": "directory",
    "export MODEL --text bad.txt": "directory",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    "A directory for each kind of KINDS, and texts that nothing can read."
    folder = tmp_path_factory.mktemp("models")
    make_models(folder, "MaskedLM")
    make_models(folder / "task", "SequenceClassification")
    for name in ("bad.txt", "bad.csv"):
        (folder / name).write_bytes(b"text,label\n\xff\xfe\x00\x00\x80\n")
    return folder


def make_models(folder: Path, head: str) -> None:
    tokenizer = train_tokenizer(["the red apple is on a green tree"] * 9, 60)
    torch.manual_seed(0)
    sound = getattr(transformers, f"BertFor{head}")(transformers.BertConfig(**SIZES))
    configs = {
        "decoder": transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2),
        "encoder_decoder": transformers.T5Config(**T5),
        "vision": transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                         intermediate_size=16, image_size=8, patch_size=4),
    }  # fmt: skip
    for name in ("remote_code", "no_weights", "other_weights", "other_tokenizer"):
        sound.save_pretrained(folder / name)
    for name, config in configs.items():
        transformers.AutoModel.from_config(config).save_pretrained(folder / name)
    remote = {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}
    content = json.dumps({"model_type": "mine", "auto_map": remote})
    (folder / "remote_code" / "config.json").write_text(content)
    (folder / "no_weights" / "model.safetensors").unlink()
    other = getattr(transformers, f"MPNetFor{head}")(transformers.MPNetConfig(**SIZES))
    other.save_pretrained(folder / "other")
    (folder / "other" / "model.safetensors").replace(folder / "other_weights" / "model.safetensors")
    for path in folder.glob("*/config.json"):
        tokenizer.save_pretrained(path.parent)
    train_tokenizer([f"word{n}" for n in range(300)], 200).save_pretrained(
        folder / "other_tokenizer"
    )


@pytest.mark.parametrize("kind, part", KINDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_bad_model_is_one_line_before_texts_are_read(
    models, capsys, monkeypatch, command, kind, part
):
    if command.startswith("export"):
        pytest.importorskip("onnxruntime")
    monkeypatch.chdir(models)
    before = {*models.iterdir()}
    assert main(command.replace("MODEL", kind).split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    assert COMMANDS[command] in captured.err and kind in captured.err and part in captured.err
    assert {*models.iterdir()} == before  # no run was begun
