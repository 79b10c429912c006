"""Every directory that bertlab writes opens in transformers 4.57, with the same ids and outputs.

transformers 4 is installed once into a folder of its own, and read by a process that sees it first.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import read_directories
import torch
import transformers

from bertlab.data.tokenizers import load_tokenizer, save_tokenizer, train_tokenizer
from bertlab.embeddings.bi_encoder import BiEncoder
from bertlab.finetuning.models import save_predictor
from bertlab.model.families import FAMILIES
from bertlab.model.huggingface import load_model, save_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
FOLDER = Path(
    os.environ.get("BERTLAB_TRANSFORMERS_4") or Path(tempfile.gettempdir(), "transformers-4.57")
)
PACKAGES = ("transformers==4.57.*", "huggingface_hub>=0.34,<1", "tokenizers>=0.22,<0.23.1",
            "sentence-transformers>=5,<5.2", "datasets>=4,<4.5")  # fmt: skip
HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
# Settings that differ from the defaults: a default would hide a name that nobody reads.
MODERNBERT = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "local_attention": 8,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}
NEW = {"eurobert", "gte", "jina_embeddings_v3", "nomic_bert"}  # transformers 4.57 has none of them
# transformers 5 no longer ties the head of LUKE, and its tokenizer writes one file instead of three.
OTHERS = {"luke-ForMaskedLM"}


@pytest.fixture(scope="module")
def families():
    "The benchmark that knows how to build a small model of each family."
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import families
    finally:
        sys.path.pop(0)
    return families


@pytest.fixture(scope="module")
def transformers_4() -> Path:
    "The folder with transformers 4, installed if it is missing."
    if not (FOLDER / "transformers").is_dir():
        pip = [sys.executable, "-m", "pip"] if find_spec("pip") else ["uv", "pip"]
        command = [*pip, "install", "-q", "--no-deps", "--target", str(FOLDER), *PACKAGES]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        except (OSError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"transformers 4.57 cannot be installed: {error}")
        if done.returncode:
            pytest.skip(f"transformers 4.57 cannot be installed: {done.stderr.strip()[-200:]}")
    return FOLDER


def differences(root: Path, transformers_4: Path, out: Path) -> dict[str, str]:
    "Read all directories with both versions, and return what differs by more than 1e-5."
    here = read_directories.read_all(root)
    environment = {**os.environ, "PYTHONPATH": str(transformers_4), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, read_directories.__file__, str(root), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result = torch.load(out, weights_only=False)
    assert result["version"].startswith("4.57") and transformers.__version__ >= "5"
    there = result["results"]
    assert here.keys() == there.keys()
    return {
        f"{name}: {key}": f"{there[name].get(key)} in 4.57, {here[name].get(key)} here"
        for name in here
        for key in here[name].keys() | there[name].keys()
        if not are_equal(here[name].get(key), there[name].get(key))
    }


def are_equal(a, b) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and bool((a - b).abs().max() <= 1e-5)
    return type(a) is type(b) and a == b


def write_family(families, family: str, root: Path, source: Path) -> None:
    "Write everything that bertlab writes of a model of one family."
    tokenizer = families.make_tokenizer(family)
    families.make_directory(family, tokenizer, source)
    heads = HEADS if family in FAMILIES else HEADS[:1]
    if family != "canine":  # which has no head over words
        save_model(
            load_model(source, "ForMaskedLM").model, tokenizer, root / f"{family}-ForMaskedLM"
        )
    for head in heads:
        settings = {} if head == "ForQuestionAnswering" else {"num_labels": 3}
        model = load_model(source, head, settings).model
        save_predictor(model, root / f"{family}-{head}", tokenizer)
    model = load_model(source, HEADS[0], {"num_labels": 1, "problem_type": "regression"}).model
    save_predictor(model, root / f"{family}-reranker", tokenizer)
    BiEncoder.load(source).save(root / f"{family}-embedder")


def test_models_open_with_equal_outputs(families, transformers_4, tmp_path, monkeypatch):
    monkeypatch.setitem(families.FAMILIES, "modernbert", MODERNBERT)
    for family in families.FAMILIES.keys() - NEW:
        write_family(families, family, tmp_path / "models", tmp_path / "sources" / family)
    config = json.loads((tmp_path / "models/modernbert-embedder/config.json").read_text())
    assert config["model_type"] == "modernbert"  # 4.57 has no class of ours
    different = differences(tmp_path / "models", transformers_4, tmp_path / "out.pt")
    assert {
        name: line for name, line in different.items() if name.split(":")[0] not in OTHERS
    } == {}


def pieces(tokenizer, special: list[str]) -> list[tuple[str, float]]:
    "The vocabulary of a Unigram tokenizer, with other special tokens."
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    return [(token, 0.0) for token in special] + [
        (piece, score) for piece, score in vocabulary if not piece.startswith("[")
    ]


def merges(tokenizer, special: list[str]) -> dict:
    "The vocabulary and the merges of a BPE tokenizer, with other special tokens."
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = [*special, *(token for token in model["vocab"] if not token.startswith("["))]
    return {"vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [tuple(pair) for pair in model["merges"]]}  # fmt: skip


ALBERT = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
UNIGRAM = {
    "XLMRobertaTokenizer": ["<s>", "<pad>", "</s>", "<unk>"],
    "CamembertTokenizer": ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED"],
    "AlbertTokenizer": ALBERT,
    "DebertaV2Tokenizer": ["[PAD]", "[CLS]", "[SEP]", "[UNK]"],
    "BigBirdTokenizer": ["<pad>", "<s>", "</s>", "<unk>", "[CLS]", "[SEP]", "[MASK]"],
    "FNetTokenizer": ALBERT,
}
BPE = {"RobertaTokenizer": ROBERTA,
       "DebertaTokenizer": ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]}  # fmt: skip
WORDPIECE = {
    **dict.fromkeys(("BertTokenizer", "DistilBertTokenizer", "ConvBertTokenizer"), ()),
    "MPNetTokenizer": ("<s>", "<pad>", "</s>", "<unk>", "[UNK]", "<mask>"),
    "FunnelTokenizer": ("<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "<s>", "</s>"),
}


def test_tokenizers_give_the_same_ids(families, transformers_4, tmp_path):
    local = {algorithm: train_tokenizer(families.TEXTS, 300, kind=algorithm, model_max_length=64)
           for algorithm in ("wordpiece", "unigram", "bpe")}  # fmt: skip
    built = {}
    for name, special in UNIGRAM.items():
        built[name] = getattr(transformers, name)(vocab=pieces(local["unigram"], special))
    for name, special in BPE.items():
        built[name] = getattr(transformers, name)(**merges(local["bpe"], special))
    words = [*local["wordpiece"].get_vocab()]
    for name, special in WORDPIECE.items():
        tokens = [*special, *(word for word in words if not special or not word.startswith("["))]
        built[name] = getattr(transformers, name)(vocab={t: i for i, t in enumerate(tokens)})
    for algorithm, tokenizer in local.items():
        built[algorithm] = tokenizer
        save_tokenizer(tokenizer, tmp_path / "extra")
        built[f"{algorithm}-special"] = load_tokenizer(tmp_path / "extra")
        built[f"{algorithm}-special"].add_special_tokens({"extra_special_tokens": ["<extra_a>"]})
        built[f"{algorithm}-more"] = load_tokenizer(tmp_path / "extra")
        built[f"{algorithm}-more"].add_tokens(["<extra_b>", "apple"])
    for name, tokenizer in built.items():
        save_tokenizer(tokenizer, tmp_path / "tokenizers" / name)
    assert differences(tmp_path / "tokenizers", transformers_4, tmp_path / "out.pt") == {}
