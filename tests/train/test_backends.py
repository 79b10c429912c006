"Converted models give torch's answers, and what a backend lacks is named."

import gc
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from forks import forked

pytest.importorskip("openvino")

from bertlab.cli.main import main
from bertlab.cli.models import fill_mask
from bertlab.core.devices import default_precision
from bertlab.data.rows import compute_by_length, padded_batches, run_batches
from bertlab.data.tokenizers import train_tokenizer
from bertlab.embeddings.bi_encoder import BiEncoder
from bertlab.finetuning.predictions import load_predictor
from bertlab.model.config import bert_tiny
from bertlab.model.encoder import BertLabModel
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model
from bertlab.model.task_heads import BertLabForSequenceClassification
from bertlab.train import backends
from bertlab.train import export as exporting
from bertlab.train.backends import choose_precision, open_model
from bertlab.train.export import FILES, export_model

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


def open_bi_encoder(directory, load=None, precision="float32"):
    return open_model(directory, load, ["last_hidden_state"], "openvino", precision)


def test_a_conversion_is_kept_until_the_weights_change(directory, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    BiEncoder.load(directory, "openvino")
    open_bi_encoder(directory)  # load is not called
    os.utime(directory / "model.safetensors", ns=(1, 1))
    with pytest.raises(ZeroDivisionError):
        open_bi_encoder(directory, lambda: 1 / 0)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):  # of another version
        patch.setattr(backends, "version", lambda name: "0.1")
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
    precision = "bf16-mixed" if bfloat16 else "32-true"
    monkeypatch.setattr(backends, "default_precision", lambda device: (precision, ""))
    monkeypatch.setattr(backends, "num_devices", lambda device: 0)
    monkeypatch.setattr(backends, "cpu_multiplies_int8", lambda: int8)
    assert choose_precision(backend, "auto", exported) == expected
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("backend, precision, named", [
    ("tensorflow", "float32", "tensorflow"), ("torch", "int8", "int8"), ("onnx", "bfloat16", "onnx"),
    ("openvino", "float64", "float64"), ("openvino", "bfloat16", "AVX512"),
    ("openvino", "int8", "--calibration"), ("onnx", "int8", "bertlab export"),
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
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"\[openvino\]"):
        BiEncoder.load(directory, "openvino")


@pytest.fixture(scope="module")
def exported(directory, tmp_path_factory):
    "Directories of an export by backend, and their reports."
    pytest.importorskip("nncf")
    folder, reports = tmp_path_factory.mktemp("exported"), {}
    for to in ("openvino", "onnx"):
        options = {"to": to, "calibration": TEXTS * 2 if to == "openvino" else None}
        reports[to] = export_model(directory, folder / to, texts=TEXTS, **options)
    return folder, reports


@pytest.mark.parametrize("backend", ["openvino", "onnx"])
def test_int8_files_give_vectors_close_to_those_of_torch(directory, exported, backend):
    folder, reports = exported
    expected = BiEncoder.load(directory).encode(TEXTS)
    small = FILES[backend]["int8"]
    row = reports[backend]["files"][small]
    nearest = []
    for precision in ("float32", "int8"):
        vectors = BiEncoder.load(folder / backend, backend, precision).encode(
            TEXTS, batch_tokens=64
        )
        scores = vectors @ vectors.T - 9 * np.eye(len(TEXTS))
        nearest.append(np.argsort(-scores, axis=1)[:, :10])
        assert (vectors * expected).sum(1).min() > (1 - 1e-5 if precision == "float32" else 0.98)
    kept = np.mean([len({*a} & {*b}) / 10 for a, b in zip(*nearest)])
    assert row["overlap"] == pytest.approx(kept, abs=0.1) and 0.5 < kept
    assert row["lost"] == pytest.approx(1 - row["agreement"], abs=1e-6) and row["lost"] < 0.02
    assert row["texts_per_second"] > 0
    assert row["bytes"] >= (folder / backend / small).stat().st_size


OPEN_WITH_OPTIMUM = """
import json, sys
import numpy as np
from optimum import intel, onnxruntime
from sentence_transformers import SentenceTransformer
folder, name, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
exact = {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}}
if name == "bi-encoder":
    for backend, file, options in (
        ("openvino", "openvino_model.xml", exact), ("onnx", "model.onnx", {}),
        ("openvino", "openvino_model_qint8_quantized.xml", exact), ("onnx", "model_quantized.onnx", {}),
    ):
        settings = {"file_name": file, **options}
        model = SentenceTransformer(f"{folder}/{backend}", backend=backend, model_kwargs=settings)
        np.savez(f"{folder}/{file}.npz", sentence_embedding=model.encode(texts))
else:
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/onnx")
    rows = tokenizer(texts, texts[::-1], padding=True, return_tensors="np")
    openvino = getattr(intel, f"OVModelFor{name}").from_pretrained(
        f"{folder}/openvino", subfolder="openvino", **exact
    )
    onnx = getattr(onnxruntime, f"ORTModelFor{name}").from_pretrained(f"{folder}/onnx")
    for model, file in ((openvino, "openvino_model.xml"), (onnx, "model.onnx")):
        np.savez(f"{folder}/{file}.npz", **model(**rows))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bi-encoder", "SequenceClassification", "TokenClassification",
                                  "QuestionAnswering", "MaskedLM"])  # fmt: skip
def test_optimum_opens_exported_directories(directory, exported, tokenizer, tmp_path, name):
    "BERTLAB_OPTIMUM names a Python with optimum, which needs an older transformers than bertlab."
    if not (python := os.environ.get("BERTLAB_OPTIMUM")):
        pytest.skip("BERTLAB_OPTIMUM is not set")
    folder = exported[0]
    if name == "bi-encoder":
        expected, real = {"sentence_embedding": BiEncoder.load(directory).encode(TEXTS)}, ...
    else:
        folder, model = tmp_path, tmp_path / "model"
        config = transformers.BertConfig(vocab_size=len(tokenizer), **SHAPE)
        module = getattr(transformers, f"BertFor{name}")(config).eval()
        module.save_pretrained(model)
        tokenizer.save_pretrained(model)
        for to in ("openvino", "onnx"):
            export_model(model, folder / to, to=to, int8=False)
        rows = tokenizer(TEXTS, TEXTS[::-1], padding=True, return_tensors="pt")
        with torch.no_grad():
            expected = {key: value.numpy() for key, value in module(**rows).items()}
        real = ... if name == "SequenceClassification" else rows["attention_mask"].numpy() > 0
    subprocess.run(
        [python, "-c", OPEN_WITH_OPTIMUM, str(folder), name, json.dumps(TEXTS)],
        check=True, env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    files = [*folder.glob("*.npz")]
    assert len(files) == (4 if name == "bi-encoder" else 2)
    for file in files:
        results, tolerance = np.load(file), 0.2 if "quantized" in file.name else 1e-4
        for key, values in expected.items():
            assert np.abs(results[key] - values)[real].max() < tolerance


def test_a_graph_of_openvino_writes_out_no_scores(exported):
    import openvino

    model = openvino.Core().read_model(exported[0] / "openvino" / FILES["openvino"]["float32"])
    operations = [node.get_type_name() for node in model.get_ops()]
    assert operations.count("ScaledDotProductAttention") == SHAPE["num_hidden_layers"]
    assert "Softmax" not in operations


def _interrupt_after_use(path):
    "Use a file twice, and then be interrupted. The first one opened is the first to go."
    opened = [exporting.ExportedFile(path) for _ in range(2)]
    while opened:
        opened.pop(0)
        gc.collect()
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.raise_signal(signal.SIGINT)


def test_a_signal_after_openvino_kills_no_process(exported):
    path = exported[0] / "openvino" / FILES["openvino"]["float32"]
    process = forked(_interrupt_after_use, (path,))
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("backend", ["torch", "onnx"])
def test_an_exported_directory_names_its_backend(exported, backend):
    with pytest.raises(ValueError, match="openvino has no weights.*backend='openvino'"):
        BiEncoder.load(exported[0] / "openvino", backend)


def test_an_export_that_loses_too_much_is_not_written(directory, exported, monkeypatch, tmp_path):
    def copy(precision):  # which saves seconds
        source = exported[0] / "openvino" / FILES["openvino"][precision]

        def write(_, path, *rows):
            for ending in (".xml", ".bin"):
                shutil.copy(source.with_suffix(ending), Path(path).with_suffix(ending))

        return write

    monkeypatch.setattr(exporting, "export_openvino", copy("float32"))
    monkeypatch.setattr(exporting, "quantize_openvino", copy("int8"))
    scores = iter([0.9, 0.9, 0.87, 0.9, 0.9, 0.87])
    options = {"to": "openvino", "calibration": TEXTS, "score": lambda model: next(scores)}
    with pytest.raises(ValueError, match=r"3\.0 points of score.*max_loss=0\.02"):
        export_model(directory, tmp_path / "out", max_loss=0.02, **options)
    assert not (tmp_path / "out").exists()
    report = export_model(directory, tmp_path / "out", max_loss=0.05, **options)
    row = report["files"][FILES["openvino"]["int8"]]
    assert row["scores"] == [0.87, 0.9] and row["lost"] == pytest.approx(0.03)
    assert report["predictions"] == 8  # a fifth of the calibration is held out


@pytest.mark.parametrize("texts, named", [
    ([], "0 texts"), (TEXTS[:9], "9 texts"), (["правительство приняло закон"] * 12, "language"),
    (["zzz qqq"] * 12, "language"),
])  # fmt: skip
def test_text_that_cannot_calibrate_is_refused(directory, tmp_path, texts, named):
    with pytest.raises(ValueError, match=f"calibration.*{named}"):
        export_model(directory, tmp_path / "out", to="openvino", calibration=texts)
    assert not (tmp_path / "out").exists()


def test_an_int8_file_older_than_its_weights_is_left_out(directory, capsys):
    path = directory / FILES["openvino"]["int8"]
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.utime(path, ns=(0, 0))
    with pytest.raises(ValueError, match=f"{path.name} is older"):
        open_bi_encoder(directory, precision="int8")
    expected = BiEncoder.load(directory).encode(TEXTS)
    for precision in ("float32", "auto"):
        model = BiEncoder.load(directory, "openvino", precision)
        assert "int8" not in model.encoder.precision
        assert np.abs(model.encode(TEXTS) - expected).max() < 0.05
        assert ("is older" in capsys.readouterr().err) == (precision == "auto")
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


@pytest.mark.parametrize("batch_size", [None, 5])
def test_padded_batches_hold_each_text_once_within_the_limit(batch_size):
    lengths = np.random.default_rng(0).integers(1, 90, 200)
    plan = list(padded_batches(lengths, 80, batch_size))
    assert sorted(n for members, _ in plan for n in members) == list(range(200))
    for members, longest in plan:
        assert longest == lengths[members].max() and len(members) <= (batch_size or 200)
        assert len(members) == 1 or len(members) * longest <= 80


@pytest.mark.parametrize("num_threads", [1, 3])
def test_any_number_of_rows_come_back_in_order_and_few_are_held(num_threads):
    drawn = 0

    def rows():
        nonlocal drawn
        for drawn in range(1, 2001):
            yield "x" * (drawn % 37), drawn

    def compute(texts, longest):
        assert longest == max(len(text) for text, _ in texts)
        return [-number for _, number in texts]

    results = compute_by_length(rows(), lambda row: len(row[0]), compute, num_threads, window=100)
    for number, result in enumerate(results, 1):
        assert result == -number and drawn - number <= 100 * (2 * num_threads + 1)
    assert number == 2000


@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_texts_are_encoded_as_they_come(directory, backend):
    model, drawn = BiEncoder.load(directory, backend), []
    stream = (drawn.append(text) or text for text in TEXTS * 50)
    vectors = model.encode_stream(stream, window=20)
    first = next(vectors)
    assert len(drawn) == 2000  # texts are tokenized in blocks of that many
    expected = model.encode(TEXTS)
    assert np.abs(first - expected[0]).max() < 1e-5
    for number, vector in enumerate(vectors, 1):
        assert np.abs(vector - expected[number % len(TEXTS)]).max() < 1e-5
    assert number == 50 * len(TEXTS) - 1


def test_the_command_encodes_with_a_backend(directory, tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    for backend in ("torch", "openvino"):
        output = tmp_path / f"{backend}.npy"
        options = ["--output", str(output), "--backend", backend]
        assert main(["embed", "encode", str(directory), str(tmp_path / "texts.txt"), *options]) == 0
    first, second = (np.load(tmp_path / f"{b}.npy") for b in ("torch", "openvino"))
    assert first.shape == second.shape and np.abs(first - second).max() < 1e-5
