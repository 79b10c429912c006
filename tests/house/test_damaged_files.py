"""Damaged and untrusted files run no code, change nothing, and are refused in one line.

Each case damages one file of something that works: a model, a checkpoint, a configuration, an ONNX file.
"""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bertlab.cli.main import main
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.config import modernbert_tiny
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model
from bertlab.train.initialization import load_encoder

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = ["".join(random.Random(n).choices("abcdefgh", k=2 + n % 4)) for n in range(120)]
TEXTS = [" ".join(random.Random(n).choices(WORDS, k=12)) + "." for n in range(80)]
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


class Trap:
    "Creates a directory when it is unpickled."

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def pretrain_arguments(folder):
    options = {
        "--data.train_dataset_name_or_path": folder / "text.txt",
        "--data.max_sequence_length": 32,
        "--data.train_batch_size": 4,
        "--model.model_config_kwargs": json.dumps(SHAPE),
        "--run.vocab_size": 200,
        "--trainer.max_steps": 4,
        "--trainer.accelerator": "cpu",
        "--trainer.precision": "32-true",
        "--run.progress": "none",
        "--run.output": folder / "run",
    }
    return ["pretrain", *(str(word) for pair in options.items() for word in pair)]


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    "A model with its tokenizer, a text, and a finished run."
    folder = tmp_path_factory.mktemp("intact")
    tokenizer = train_tokenizer(TEXTS, 200)
    torch.manual_seed(0)
    config = modernbert_tiny(vocab_size=len(tokenizer), **SHAPE)
    save_model(BertLabForMaskedLM(config), tokenizer, folder / "model")
    (folder / "text.txt").write_text("\n".join(TEXTS) + "\n")
    assert main(pretrain_arguments(folder)) == 0
    return folder


@pytest.fixture
def folder(intact, tmp_path):
    return Path(shutil.copytree(intact, tmp_path / "copy", symlinks=True))


def files_in(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal_of(capfd, *arguments):
    "Run the program and return its last line of errors; it must exit with status 2."
    capfd.readouterr()
    assert main(list(map(str, arguments))) == 2
    errors = capfd.readouterr().err.strip()
    assert "Traceback" not in errors
    return errors.splitlines()[-1]


def set_nan(model):
    weights = {name: w.clone() for name, w in load_file(model / "model.safetensors").items()}
    next(iter(weights.values())).view(-1)[0] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def pickled(model):
    state = {**load_file(model / "model.safetensors"), "trap": Trap(model / "executed")}
    (model / "model.safetensors").unlink()
    torch.save(state, model / "pytorch_model.bin")


def with_code(model):
    code = f"import os; os.mkdir({str(model / 'executed')!r})"
    (model / "strange.py").write_text(code)
    classes = {"AutoConfig": "strange.Config", "AutoModelForMaskedLM": "strange.Model"}
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": classes}
    (model / "config.json").write_text(json.dumps(config))


def truncate(path, size):
    path.write_bytes(path.read_bytes()[:size])


MODELS = {
    "truncated weights": lambda model: truncate(model / "model.safetensors", 5000),
    "NaN in the weights": set_nan,
    "a pickle with code": pickled,
    "code beside the model": with_code,
}


@pytest.mark.parametrize("damage", MODELS)
def test_a_damaged_model_is_refused_in_one_line(damage, folder, capfd):
    model = folder / "model"
    load_encoder(str(model))
    MODELS[damage](model)
    before = files_in(folder)
    with pytest.raises((ValueError, OSError)):
        load_encoder(str(model))
    refusal_of(capfd, "fill-mask", model, "a [MASK] c")
    assert files_in(folder) == before and not (model / "executed").exists()


def checkpoints(folder):
    return sorted((folder / "run" / "checkpoints").glob("*.ckpt"))


CHECKPOINTS = {
    "code": lambda path: torch.save({"trap": Trap(path.parent / "executed")}, path),
    "truncated": lambda path: truncate(path, 5000),
    "text": lambda path: path.write_text("weights"),
}


@pytest.mark.parametrize("damage", CHECKPOINTS)
def test_a_run_does_not_resume_from_damaged_checkpoints(damage, folder, capfd):
    for path in checkpoints(folder):
        CHECKPOINTS[damage](path)
    before = files_in(folder)
    refusal_of(capfd, "pretrain", "--resume", folder / "run", "--trainer.max_steps", "6")
    assert not (folder / "run" / "checkpoints" / "executed").exists()
    assert {path: before[path] for path in files_in(folder)} == before


CONFIGS = {
    "an object of Python": "model: !!python/object/apply:os.mkdir ['EXECUTED']",
    "a function as a callback": "trainer: {callbacks: [{class_path: os.mkdir, init_args: "
    "{path: EXECUTED}}]}",
}


@pytest.mark.parametrize("damage", CONFIGS)
def test_a_damaged_configuration_is_refused_in_one_line(damage, folder, capfd):
    path = folder / "config.yaml"
    path.write_text(CONFIGS[damage].replace("EXECUTED", str(folder / "executed")))
    arguments = pretrain_arguments(folder)
    arguments[arguments.index("--run.output") + 1] = str(folder / "new")
    refusal_of(capfd, *arguments, "--config", path)
    assert not (folder / "executed").exists() and not (folder / "new").exists()


def test_saving_over_a_link_leaves_its_target(folder):
    target, model = folder / "precious", folder / "model"
    encoder = load_encoder(str(model))
    target.write_text("mine")
    (model / "config.json").unlink()
    (model / "config.json").symlink_to(target)
    save_model(encoder, train_tokenizer(TEXTS, 200), model)
    assert target.read_text() == "mine" and not (model / "config.json").is_symlink()


def test_an_onnx_file_does_not_read_files_elsewhere(folder):
    onnx = pytest.importorskip("onnx")
    from bertlab.train.export import OnnxModel

    assert main(["export", str(folder / "model"), "--output", str(folder / "onnx")]) == 0
    path = folder / "onnx" / "onnx" / "model.onnx"
    graph = onnx.load(path)
    (folder / "secret").write_bytes(b"\0" * 10**6)
    weight = graph.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="../secret")
    path.write_bytes(graph.SerializeToString())
    with pytest.raises((ValueError, OSError)):
        OnnxModel.load(folder / "onnx", "float32")
