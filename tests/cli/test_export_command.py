"`bertlab export` as its user types it."

import json

import pytest

pytest.importorskip("onnxruntime")

import numpy as np
import torch

from bertlab.cli import main as program
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.config import modernbert_tiny
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = "red green blue bird cat dog fish sees finds likes the a and is".split()
TEXTS = [" ".join(np.random.default_rng(n).choice(WORDS, 4 + n % 9)) + "." for n in range(60)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    tokenizer = train_tokenizer(TEXTS, 90)
    torch.manual_seed(0)
    save_model(BertLabForMaskedLM(modernbert_tiny(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48,
                                                  num_hidden_layers=1, num_attention_heads=2)),
               tokenizer, folder / "model")  # fmt: skip
    (folder / "text.txt").write_text("\n".join(TEXTS))
    return folder


def answer(capfd, *words):
    capfd.readouterr()
    status = program.main(["export", *map(str, words)])
    said = capfd.readouterr()
    return status, said.out, said.err.strip()


def test_files_are_written_and_their_cost_is_said(place, tmp_path, capfd):
    status, said, _ = answer(capfd, place / "model", "--output", tmp_path / "out", "--text", place / "text.txt",
                             "--outputs", "[logits, attentions]")  # fmt: skip
    assert status == 0
    report = json.loads((tmp_path / "out/export.json").read_text())
    assert report["outputs"] == ["logits", "attentions"]
    for name, row in report["files"].items():
        assert (tmp_path / "out" / name).stat().st_size == row["bytes"]
        assert name in said and f"{row['agreement']:.1%}" in said


@pytest.mark.parametrize("words, word", [
    (("{place}/nowhere",), "nowhere"),
    (("{place}/model", "--to", "tflite"), "tflite"),
    (("{place}/model", "--output", "{place}/text.txt"), "text.txt"),
    (("{place}/model", "--outputs", "[looks]"), "looks"),
    (("{place}/model", "--packages", "x"), "--to web"),
    (("{place}/model", "--to", "web", "--int8", "false"), "int8"),
    (("{place}/model", "--to", "web", "--examples", "no gap"), "no gap"),
    (("{place}/model", "--text", "{place}/missing.txt"), "missing.txt"),
    (("{place}",), "no config.json"),
    (("{place}/model", "--too", "web"), "too"),
])  # fmt: skip
def test_a_mistake_is_one_line_and_writes_nothing(place, tmp_path, monkeypatch, capfd, words, word):
    monkeypatch.chdir(tmp_path)
    status, _, line = answer(capfd, *(one.format(place=place) for one in words))
    assert status == 2 and word in line and "\n" not in line
    assert list(tmp_path.iterdir()) == []
