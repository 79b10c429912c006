"Converted models give torch's answers, and what a backend lacks is named."

import os

import numpy as np
import pytest
import torch

pytest.importorskip("openvino")

from bertlab.cli.main import main
from bertlab.cli.models import fill_mask
from bertlab.core.devices import default_precision
from bertlab.data.tokenizers import train_tokenizer
from bertlab.embeddings.bi_encoder import BiEncoder
from bertlab.finetuning.predictions import load_predictor
from bertlab.model.config import bert_tiny
from bertlab.model.encoder import BertLabModel
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model
from bertlab.model.task_heads import BertLabForSequenceClassification
from bertlab.train import backends
from bertlab.train.backends import choose_precision, open_model, padded_batches, run_batches

pytestmark = pytest.mark.filterwarnings("ignore")

HAS_BFLOAT16 = default_precision("cpu")[0] == "bf16-mixed"
WORDS = "red green blue bird cat dog fish sees finds likes the a and is".split()
TEXTS = [" ".join(np.random.default_rng(n).choice(WORDS, 2 + n % 11)) for n in range(40)]
SHAPE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             initializer_range=0.3, max_position_embeddings=64)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 90)


def build(cls, tokenizer, **settings):
    torch.manual_seed(0)
    return cls(bert_tiny(vocab_size=len(tokenizer), **{**SHAPE, **settings})).eval()


@pytest.fixture(scope="module")
def directory(tokenizer, tmp_path_factory):
    return BiEncoder(build(BertLabModel, tokenizer), tokenizer).save(tmp_path_factory.mktemp("bi"))


@pytest.mark.parametrize("backend, precision, tolerance", [
    ("torch", "bfloat16", 0.05), ("openvino", "float32", 1e-5), ("openvino", "bfloat16", 0.05),
    ("onnx", "float32", 1e-5),
])  # fmt: skip
def test_vectors_are_those_of_torch_in_float32(directory, backend, precision, tolerance):
    if backend == "onnx":
        pytest.importorskip("onnxruntime")
    if precision == "bfloat16" and not HAS_BFLOAT16:
        pytest.skip("this processor has no bfloat16")
    expected = BiEncoder.load(directory).encode(TEXTS)
    model = BiEncoder.load(directory, backend, precision)
    vectors = model.encode(TEXTS, batch_tokens=64)
    assert vectors.dtype == np.float32 and np.abs(vectors - expected).max() < tolerance
    alone = np.concatenate([model.encode([text]) for text in TEXTS[:5]])
    assert np.abs(vectors[:5] - alone).max() < tolerance


def test_labels_and_words_are_those_of_torch(tokenizer, tmp_path):
    classifier = build(
        BertLabForSequenceClassification, tokenizer, num_hidden_layers=1, num_labels=3
    )
    save_model(classifier, tokenizer, tmp_path / "classifier")
    first, second = (
        load_predictor(tmp_path / "classifier", None, b) for b in ("torch", "openvino")
    )
    pairs = (p.predict(TEXTS, all_probabilities=True, batch_size=7).rows for p in (first, second))
    for expected, row in zip(*pairs, strict=True):
        assert row["predicted_label"] == expected["predicted_label"]
        assert row["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-5)
    save_model(
        build(BertLabForMaskedLM, tokenizer, num_hidden_layers=1), tokenizer, tmp_path / "mlm"
    )
    texts = ["the [MASK] sees a [MASK] fish", "red [MASK]"]
    answers = [fill_mask(tmp_path / "mlm", texts, 3, b) for b in ("torch", "openvino")]
    for expected, masks in zip(*answers, strict=True):
        for guesses, others in zip(expected, masks, strict=True):
            assert [word for word, _ in guesses] == [word for word, _ in others]
            assert np.allclose([p for _, p in guesses], [p for _, p in others], atol=1e-5)


def open_bi_encoder(directory, load=None):
    return open_model(directory, load, ["last_hidden_state"], "openvino")


def test_a_conversion_is_kept_until_the_weights_change(directory, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    BiEncoder.load(directory, "openvino")
    open_bi_encoder(directory)  # load is not called
    os.utime(directory / "model.safetensors", ns=(1, 1))
    with pytest.raises(ZeroDivisionError):
        open_bi_encoder(directory, lambda: 1 / 0)
    (inside,) = (directory / ".bertlab").glob("openvino-*")
    (inside / "key.json").write_text("{")  # damaged: as if there were none
    writes = backends.atomic_directory

    def write(folder):  # as in a read-only directory
        if folder.is_relative_to(directory):
            raise PermissionError(folder)
        return writes(folder)

    monkeypatch.setattr(backends, "atomic_directory", write)
    BiEncoder.load(directory, "openvino")
    open_bi_encoder(directory)
    (file,) = (tmp_path / "cache").rglob("*.xml")
    file.write_text("no model")
    with pytest.raises(ValueError, match=file.name):
        open_bi_encoder(directory)


@pytest.mark.parametrize("bfloat16, int8, exported, backend, expected", [
    (True, True, True, "openvino", "int8"), (True, False, True, "openvino", "bfloat16"),
    (True, True, False, "openvino", "bfloat16"), (False, False, True, "openvino", "float32"),
    (True, True, True, "torch", "bfloat16"), (True, True, False, "onnx", "float32"),
])  # fmt: skip
def test_auto_is_the_fastest_in_hardware(
    monkeypatch, capsys, bfloat16, int8, exported, backend, expected
):
    answer = ("bf16-mixed" if bfloat16 else "32-true", "")
    monkeypatch.setattr(backends, "default_precision", lambda device: answer)
    monkeypatch.setattr(backends, "cpu_multiplies_int8", lambda: int8)
    assert choose_precision(backend, "auto", exported) == expected
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("backend, precision, named", [
    ("tensorflow", "float32", "tensorflow"), ("torch", "int8", "int8"), ("onnx", "bfloat16", "onnx"),
    ("openvino", "float64", "float64"), ("openvino", "bfloat16", "AVX512"),
    ("openvino", "int8", "exporter"), ("onnx", "int8", "bertlab export"),
])  # fmt: skip
def test_what_a_backend_lacks_is_named(directory, monkeypatch, backend, precision, named):
    monkeypatch.setattr(backends, "default_precision", lambda device: ("32-true", ""))
    with pytest.raises(ValueError, match=named):
        BiEncoder.load(directory, backend, precision)


def test_a_missing_extra_and_an_operator_without_a_rule_are_named(directory, monkeypatch, tmp_path):
    import openvino

    def fail(program):
        assert os.environ["CI"] == "true"  # else it sends counts to its makers
        raise RuntimeError("Summary:\n-- No conversion rule found for operations: aten::mT\n")

    module = backends.TupleOutputs(BertLabModel(bert_tiny(vocab_size=90, **SHAPE)), ["input_ids"], [
        "last_hidden_state"])  # fmt: skip
    monkeypatch.setattr(torch.export, "export", lambda *args, **options: None)
    monkeypatch.setattr(openvino, "convert_model", fail)
    with pytest.raises(ValueError, match="aten::mT"):
        backends.export_openvino(module, tmp_path / "model.xml")
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"\[openvino\]"):
        BiEncoder.load(directory, "openvino")


def test_an_exported_file_older_than_its_weights_is_named(directory, monkeypatch):
    path = directory / backends.EXPORTED["openvino"]["int8"]
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.utime(path, ns=(0, 0))
    with pytest.raises(ValueError, match="older"):
        open_bi_encoder(directory)
    path.unlink()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_batches_come_back_in_order_and_few_are_held(num_threads):
    drawn = 0

    def batches():
        nonlocal drawn
        for drawn in range(1, 41):
            yield drawn

    for number, result in enumerate(run_batches(lambda n: -n, batches(), num_threads), 1):
        assert result == -number
        assert drawn - number <= 2 * num_threads


def test_padded_batches_hold_each_text_once_within_the_limit():
    lengths = np.random.default_rng(0).integers(1, 90, 200)
    plan = list(padded_batches(lengths, 80))
    assert sorted(n for members, _ in plan for n in members) == list(range(200))
    for members, longest in plan:
        assert longest == lengths[members].max()
        assert len(members) == 1 or len(members) * longest <= 80


def test_the_command_encodes_with_a_backend(directory, tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    for backend in ("torch", "openvino"):
        output = tmp_path / f"{backend}.npy"
        options = ["--output", str(output), "--backend", backend]
        assert main(["embed", "encode", str(directory), str(tmp_path / "texts.txt"), *options]) == 0
    first, second = (np.load(tmp_path / f"{b}.npy") for b in ("torch", "openvino"))
    assert first.shape == second.shape and np.abs(first - second).max() < 1e-5
