"`bertlab export` as its user types it."

import json
import shutil

import pytest

pytest.importorskip("onnxruntime")

import numpy as np
import torch

from bertlab.cli import main as program
from bertlab.cli.export import _read_labelled
from bertlab.data.tokenizers import train_tokenizer
from bertlab.embeddings.bi_encoder import BiEncoder
from bertlab.finetuning.predictions import load_predictor, predict_file
from bertlab.finetuning.task import save_task
from bertlab.model.config import modernbert_tiny
from bertlab.model.encoder import BertLabModel
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model
from bertlab.model.task_heads import BertLabForSequenceClassification

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = "red green blue bird cat dog fish sees finds likes the a and is".split()
TEXTS = [" ".join(np.random.default_rng(n).choice(WORDS, 4 + n % 9)) + "." for n in range(60)]
NEIGHBOURS = [*zip(TEXTS, TEXTS[1:])]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    tokenizer = train_tokenizer(TEXTS, 90)
    torch.manual_seed(0)
    shape = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                 num_attention_heads=2, initializer_range=0.3)  # fmt: skip
    save_model(BertLabForMaskedLM(modernbert_tiny(**shape)), tokenizer, folder / "model")
    pairs = BertLabForSequenceClassification(modernbert_tiny(**shape, num_labels=2))
    save_model(pairs.eval(), tokenizer, folder / "pairs")
    BiEncoder(BertLabModel(modernbert_tiny(**shape)).eval(), tokenizer).save(folder / "vectors")
    (folder / "text.txt").write_text("\n".join(TEXTS))
    (folder / "empty.txt").write_text("\n\n")
    lines = [f"{a},{b},LABEL_{n % 2}" for n, (a, b) in enumerate(zip(TEXTS, TEXTS[1:]))]
    (folder / "pairs.csv").write_text("\n".join(["text,text_pair,label", *lines]))
    (folder / "unlabelled.csv").write_text("text,text_pair\na,b\n")
    lines = [json.dumps({"query": a, "positive": b}) for a, b in zip(TEXTS, TEXTS[1:])]
    (folder / "queries.jsonl").write_text("\n".join(lines))
    (folder / "hollow").mkdir()
    (folder / "hollow/config.json").write_text((folder / "model/config.json").read_text())
    return folder


def answer(capfd, *words):
    capfd.readouterr()
    status = program.main(["export", *map(str, words)])
    captured = capfd.readouterr()
    return status, captured.out, captured.err.strip()


def test_files_are_written_and_their_cost_is_said(place, tmp_path, capfd):
    status, printed, _ = answer(capfd, place / "model", "--output", tmp_path / "out", "--text", place / "text.txt",
                             "--outputs", "[logits, attentions]")  # fmt: skip
    assert status == 0
    report = json.loads((tmp_path / "out/export.json").read_text())
    assert report["outputs"] == ["logits", "attentions"]
    for name, row in report["files"].items():
        assert (tmp_path / "out" / name).stat().st_size == row["bytes"]
        assert name in printed and f"{row['agreement']:.1%}" in printed


def test_files_are_scored_on_labelled_pairs(place, tmp_path, capfd):
    status, said, _ = answer(
        capfd, place / "pairs", "--output", tmp_path / "out", "--data", place / "pairs.csv"
    )
    assert status == 0
    predictions = predict_file(load_predictor(place / "pairs"), place / "pairs.csv")[1]
    rows = json.loads((tmp_path / "out/export.json").read_text())["files"]
    large, small = rows["onnx/model.onnx"], rows["onnx/model_quantized.onnx"]
    accuracy = pytest.approx(predictions.scores["accuracy"])
    assert large["scores"] == [accuracy, accuracy] and small["scores"][1] == accuracy
    assert ("loses" in said) == (small["lost"] > 0.02)
    assert f"score {small['scores'][0]:.4f}" in said


@pytest.mark.slow
def test_vectors_are_scored_by_retrieval(place, tmp_path, capfd):
    words = ["--output", tmp_path / "out", "--data", place / "queries.jsonl", "--float16", "true"]
    status, said, _ = answer(capfd, place / "vectors", *words)
    rows = json.loads((tmp_path / "out/export.json").read_text())["files"]
    assert status == 0 and len(rows) == 3
    for row in rows.values():
        assert row["scores"] == pytest.approx([row["scores"][1]] * 2, abs=0.05)


@pytest.mark.parametrize("words, word", [
    (("{place}/hollow",), "model.safetensors"),
    (("{place}/model", "--text", "{place}/empty.txt"), "empty"),
    (("{place}/pairs", "--data", "{place}/unlabelled.csv"), "unlabelled.csv"),
    (("{place}/pairs", "--data", "{place}/nothing.csv"), "nothing.csv"),
    (("{place}/model", "--data", "{place}/pairs.csv"), "no head"),
    (("{place}/model", "--to", "web", "--data", "{place}/pairs.csv"), "data"),
    (("{place}/nowhere",), "nowhere"),
    (("{place}/model", "--to", "tflite"), "tflite"),
    (("{place}/model", "--calibration", "{place}/text.txt"), "--to openvino"),
    (("{place}/model", "--to", "openvino", "--int8"), "--calibration"),
    (("{place}/model", "--to", "openvino", "--float16"), "float16"),
    (("{place}/model", "--max_loss", "2"), "max_loss"),
    (("{place}/model", "--output", "{place}/text.txt"), "text.txt"),
    (("{place}/model", "--outputs", "[looks]"), "looks"),
    (("{place}/model", "--packages", "x"), "--to web"),
    (("{place}/model", "--to", "web", "--int8", "false"), "int8"),
    (("{place}/model", "--to", "web", "--examples", "no gap"), "no gap"),
    (("{place}/model", "--text", "{place}/missing.txt"), "missing.txt"),
    (("{place}",), "config.json"),
    (("{place}/model", "--too", "web"), "too"),
])  # fmt: skip
def test_a_mistake_is_one_line_and_writes_nothing(place, tmp_path, monkeypatch, capfd, words, word):
    monkeypatch.chdir(tmp_path)
    status, _, line = answer(capfd, *(one.format(place=place) for one in words))
    assert status == 2 and word in line and "\n" not in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("encoding", ["cp1252", "utf-8"])  # of the file; training's was cp1252
def test_labelled_files_are_read_as_in_training(encoding, place, tmp_path, capfd):
    predictor = load_predictor(place / "pairs")
    shutil.copytree(place / "pairs", tmp_path / "model")
    columns = {"text": "1", "text_pair": "2", "label": "3"}
    reader = {"delimiter": ";", "encoding": "cp1252", "header": False}
    save_task(predictor.task, tmp_path / "model", columns, 32, reader)
    (tmp_path / "model/run.yaml").write_text("data: {file_format: csv}")
    rows = [(f"{a} caf\xe9", f"{b}, {a}", f"LABEL_{n % 2}") for n, (a, b) in enumerate(NEIGHBOURS)]
    data = tmp_path / "pairs.data"  # a name that says nothing
    data.write_bytes("\n".join(map(";".join, rows)).encode(encoding))
    words = [tmp_path / "model", "--output", tmp_path / "out", "--data", data, "--int8", "false"]
    assert answer(capfd, *words)[0] == 0
    row = json.loads((tmp_path / "out/export.json").read_text())["files"]["onnx/model.onnx"]
    predictions = predictor.predict([{"text": a, "text_pair": b} for a, b, _ in rows]).rows
    matches = [row["predicted_label"] == label for row, (*_, label) in zip(predictions, rows)]
    assert row["scores"] == pytest.approx([np.mean(matches)] * 2)


def test_pairs_are_read_as_in_training(place, tmp_path):
    shutil.copytree(place / "vectors", tmp_path / "model")
    trained = {"query_column": "frage", "positive_column": "3", "header": True,
               "reader_kwargs": {"delimiter": ";", "encoding": "cp1252"}}  # fmt: skip
    (tmp_path / "model/run.yaml").write_text(json.dumps({"data": trained}))
    rows = [f"{a} caf\xe9;query;{b}" for a, b in NEIGHBOURS]
    (tmp_path / "pairs.csv").write_bytes("\n".join(["frage;x;y", *rows]).encode("cp1252"))
    texts, _ = _read_labelled(str(tmp_path / "model"), str(tmp_path / "pairs.csv"), {})
    assert texts == [f"{a} caf\xe9" for a, _ in NEIGHBOURS]
