"ONNX files compute what torch and transformers compute, and a failed export leaves nothing behind."

import hashlib
import json
import re
import shutil

import numpy as np
import pytest
import torch
import transformers

pytest.importorskip("onnxruntime")

from bertlab.data.tokenizers import train_tokenizer
from bertlab.embeddings.bi_encoder import BiEncoder
from bertlab.model.config import bert_tiny, modernbert_tiny, neobert, roberta_base
from bertlab.model.encoder import BertLabModel
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import load_model, save_model
from bertlab.model.mask_filling import fill_masks
from bertlab.model.task_heads import BertLabForSequenceClassification
from bertlab.model.vocabulary import trim_vocabulary
from bertlab.train import export as exporting
from bertlab.train.export import (
    FILES,
    OUTPUTS,
    InspectableMaskedLM,
    OnnxModel,
    check_exportable,
    compare_with_torch,
    example_batches,
    export_model,
    export_onnx,
    quantize_int8,
)
from bertlab.train.model_cards import check_card

pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = "red green blue bird cat dog fish sees finds likes the a and is".split()
TEXTS = [" ".join(np.random.default_rng(n).choice(WORDS, 4 + n % 9)) + "." for n in range(60)]
SHAPE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3,
             max_position_embeddings=64)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 90)


def make_model(tokenizer, config=bert_tiny, **settings):
    torch.manual_seed(0)
    return BertLabForMaskedLM(config(vocab_size=len(tokenizer), **{**SHAPE, **settings})).eval()


@pytest.fixture(scope="module")
def export_dir(tokenizer, tmp_path_factory):
    "A BERT that transformers opens, exported with all outputs."
    folder = tmp_path_factory.mktemp("export")
    save_model(make_model(tokenizer), tokenizer, folder / "model", family="bert")
    export_model(folder / "model", folder / "exported", list(OUTPUTS), texts=TEXTS)
    return folder


def rows(tokenizer, texts):
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    return encoded["input_ids"], encoded["attention_mask"]


def theirs_of(export_dir):
    "The same weights in transformers' own class, which shares no line with the exported module."
    directory = export_dir / "model"
    model = transformers.BertForMaskedLM.from_pretrained(directory, attn_implementation="eager")
    return model.eval()


@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS[1:4], TEXTS[8:20]], ids=["1", "3", "12"])
def test_float_files_equal_transformers_for_any_shape(export_dir, tokenizer, texts):
    ids, mask = rows(tokenizer, texts)
    positions = torch.tensor([[1, 3]] * len(texts))
    exported = OnnxModel.load(export_dir / "exported", "fp32")
    results = exported.run(ids.numpy(), mask.numpy(), positions.numpy())
    model = theirs_of(export_dir)
    with torch.no_grad():
        expected = model(ids, mask, output_attentions=True, output_hidden_states=True)
        lens = torch.stack([model.cls(state)[:, [1, 3]] for state in expected.hidden_states], 1)
    real = mask.bool().numpy()
    np.testing.assert_allclose(results["logits"][real], expected.logits.numpy()[real], atol=2e-4)
    np.testing.assert_allclose(results["lens"], lens.numpy(), atol=2e-4)
    attentions = np.moveaxis(torch.stack(expected.attentions, 1).numpy(), 3, 1)
    np.testing.assert_allclose(
        np.moveaxis(results["attentions"], 3, 1)[real], attentions[real], atol=1e-5
    )


@pytest.mark.parametrize("precision", FILES)
def test_attention_ignores_padding_and_the_last_lens_is_the_answer(
    export_dir, tokenizer, precision
):
    ids, mask = (t.numpy() for t in rows(tokenizer, [TEXTS[0], TEXTS[8]]))
    exported = OnnxModel.load(export_dir / "exported", precision)
    results = exported.run(ids, mask, np.array([[2], [4]]))
    np.testing.assert_allclose(results["attentions"].sum(-1), 1, atol=1e-5)
    length = int(mask[0].sum())
    assert length < mask.shape[1] and results["attentions"][0, :, :, :length, length:].max() == 0
    answers = results["logits"][[0, 1], [2, 4]]
    np.testing.assert_allclose(results["lens"][:, -1, 0], answers, atol=1e-4)


def test_masks_are_filled_as_torch_fills_them(export_dir, tokenizer):
    texts = ["the red [MASK] sees the dog.", "the [MASK] likes the [MASK]."]
    answers = OnnxModel.load(export_dir / "exported", "fp32").fill_mask(texts, 4)
    reference = fill_masks(theirs_of(export_dir), tokenizer, texts, 4)
    assert [len(masks) for masks in answers] == [1, 2]
    for guesses, expected in zip(sum(answers, []), sum(reference, [])):
        assert [word for word, _ in guesses] == [word for word, _ in expected]
        np.testing.assert_allclose([p for _, p in guesses], [p for _, p in expected], atol=1e-4)


def test_the_report_states_what_an_independent_count_finds(export_dir, tokenizer):
    report = json.loads((export_dir / "exported/export.json").read_text())
    assert list(report["files"]) == list(FILES.values())
    for name, row in report["files"].items():
        content = (export_dir / "exported" / name).read_bytes()
        assert row["bytes"] == len(content) and row["sha256"] == hashlib.sha256(content).hexdigest()
    batches, model = example_batches(tokenizer, TEXTS, 64), theirs_of(export_dir)
    assert report["predictions"] == sum(int(batch.masked.sum()) for batch in batches)
    exported, same = OnnxModel.load(export_dir / "exported", "int8"), 0
    for batch in batches:
        logits = exported.run(batch.input_ids, batch.attention_mask)["logits"]
        with torch.no_grad():
            expected = model(*map(torch.from_numpy, (batch.input_ids, batch.attention_mask))).logits
        same += int((logits.argmax(-1) == expected.numpy().argmax(-1))[batch.masked].sum())
    row = report["files"][FILES["int8"]]
    assert row["agreement"] == pytest.approx(same / report["predictions"])
    assert row["agreement"] > 0.7 and row["difference"]["logits"] > 0
    assert report["files"][FILES["fp32"]]["difference"]["logits"] < 1e-4


def test_masked_examples_spare_special_tokens_and_padding(tokenizer):
    special = set(tokenizer.all_special_ids)
    for batch in example_batches(tokenizer, [*TEXTS, "dog"], 16, 5):
        assert batch.input_ids.shape[1] <= 16
        assert batch.masked.any(1).all() and not (batch.masked & (batch.attention_mask == 0)).any()
        assert not special & set(batch.labels[batch.masked].tolist())
        assert (batch.input_ids[batch.masked] == tokenizer.mask_token_id).all()
        assert (batch.input_ids == batch.labels)[~batch.masked].all()


# ---- other tasks and families ---------------------------------------------------------------------


def save_task_model(task_name, tokenizer, directory):
    "A model of a task with random weights in a directory, and transformers' class that opens it."
    torch.manual_seed(0)
    vocabulary, labels = len(tokenizer), dict(num_labels=3)
    if task_name == "bertlab":
        save_model(
            BertLabForSequenceClassification(bert_tiny(vocab_size=vocabulary, **SHAPE, **labels)),
            tokenizer,
            directory,
        )
        return transformers.AutoModelForSequenceClassification
    if task_name == "distilbert":
        config = transformers.DistilBertConfig(
            vocab_size=vocabulary, dim=32, hidden_dim=48, n_layers=1, n_heads=2
        )
        model, auto = transformers.DistilBertForQuestionAnswering(config), "QuestionAnswering"
    else:
        shape = {**SHAPE, "num_hidden_layers": 1, "pos_att_type": ["p2c", "c2p"]}
        config = transformers.DebertaV2Config(
            vocab_size=vocabulary, relative_attention=True, **shape, **labels
        )
        model, auto = transformers.DebertaV2ForTokenClassification(config), "TokenClassification"
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return getattr(transformers, f"AutoModelFor{auto}")


@pytest.mark.parametrize(
    "task_name", ["bertlab", "distilbert", pytest.param("deberta-v2", marks=pytest.mark.slow)]
)
def test_tasks_of_any_family_equal_transformers(
    task_name, tokenizer, tmp_path, monkeypatch, capsys
):
    auto = save_task_model(task_name, tokenizer, tmp_path / "model")
    export_model(tmp_path / "model", tmp_path / "out", texts=TEXTS, int8=False)
    model = auto.from_pretrained(tmp_path / "model").eval()
    results = OnnxModel.load(tmp_path / "out", "fp32")(TEXTS[20:27])
    ids, mask = rows(tokenizer, TEXTS[20:27])
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask)
    for name, values in results.items():
        expected_values = expected[name].numpy()
        chosen = mask.bool().numpy() if values.shape[1:2] == ids.shape[1:] else ...
        np.testing.assert_allclose(values[chosen], expected_values[chosen], atol=1e-4)
    card = (tmp_path / "out/README.md").read_text()
    assert check_card(card) and FILES["fp32"] in card
    monkeypatch.chdir(tmp_path / "out")
    exec(re.findall(r"```python\n(.*?)```", card, re.DOTALL)[-1], {})  # the script on the card
    if task_name == "bertlab":
        assert len(re.findall(r"-?\d+\.\d+", capsys.readouterr().out)) == 3  # one score a label


def test_the_vectors_of_a_bi_encoder_are_exported(tokenizer, tmp_path):
    torch.manual_seed(0)
    encoder = BertLabModel(bert_tiny(vocab_size=len(tokenizer), **SHAPE))
    model = BiEncoder(encoder.eval(), tokenizer)
    model.save(tmp_path / "model")
    export_model(tmp_path / "model", tmp_path / "out", texts=TEXTS, int8=False)
    vectors = OnnxModel.load(tmp_path / "out")(TEXTS[:9])["sentence_embedding"]
    np.testing.assert_allclose(vectors, model.encode(TEXTS[:9]), atol=1e-5)
    assert (tmp_path / "out" / "1_Pooling" / "config.json").is_file()


OWN = {
    "ALiBi, shared keys, gates": (modernbert_tiny, dict(norm="rms", attention_positions="alibi", num_key_value_heads=2,
                                                        output_gate="head", qk_norm=True)),
    "ModernBERT with a window": (modernbert_tiny, dict(local_attention=4, global_attention_every_n_layers=2)),
    "RoBERTa": (roberta_base, {}),
    "NeoBERT": (neobert, {}),
    "BERT of 12 layers": (bert_tiny, dict(num_hidden_layers=12, initializer_range=0.1)),
    "deep norm, head of its own": (bert_tiny, dict(norm="deep", tie_word_embeddings=False)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name[:5] != "ALiBi")) for name in OWN]
)
def test_models_that_transformers_lacks_are_exported_too(name, tokenizer, tmp_path):
    config, settings = OWN[name]
    model = make_model(tokenizer, config, **settings)
    export_onnx(InspectableMaskedLM(model), tmp_path / "model.onnx")
    exported = OnnxModel(tmp_path / "model.onnx", tokenizer)
    ids, mask = rows(tokenizer, TEXTS[3:10])
    results = exported.run(ids.numpy(), mask.numpy())
    model.config._attn_implementation = "sdpa"  # another kernel than the one that was exported
    with torch.no_grad():
        expected = model(ids, mask).logits.numpy()
    real = mask.bool().numpy()
    tolerance = 1e-3 * np.abs(expected).max()
    np.testing.assert_allclose(results["logits"][real], expected[real], atol=tolerance)
    np.testing.assert_allclose(results["lens"][:, -1, 0], results["logits"][:, 0], atol=1e-3)
    quantize_int8(tmp_path / "model.onnx", tmp_path / "small.onnx")
    content, small = ((tmp_path / f"{name}.onnx").read_bytes() for name in ("model", "small"))
    assert len(small) < 0.75 * len(content)
    assert b".py" not in content + small, "the file names sources of this machine"


# ---- mistakes and failures ------------------------------------------------------------------------


@pytest.mark.parametrize("source, target, fragment", [
    ("headless", "new", "BertModel"), ("model", "exported", "exists"), ("nothing", "new", "config.json"),
])  # fmt: skip
def test_mistakes_are_named_before_weights_are_read(
    export_dir, tokenizer, monkeypatch, source, target, fragment
):
    if not (export_dir / "headless").exists():
        headless = BertLabModel(bert_tiny(vocab_size=len(tokenizer), **SHAPE))
        save_model(headless, tokenizer, export_dir / "headless")
        (export_dir / "nothing").mkdir()
    monkeypatch.setattr(exporting, "load_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=fragment):
        export_model(export_dir / source, export_dir / target)
    assert not (export_dir / "new").exists()


def test_unknown_outputs_are_named(export_dir):
    with pytest.raises(ValueError, match="outputs='looks'"):
        export_model(export_dir / "model", export_dir / "new", ["logits", "looks"])


@pytest.mark.parametrize("name", ["BertLabForEnhancedMaskedLM", "BertForMultipleChoice", None])
def test_a_head_without_an_export_is_named(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": name and [name]}))
    with pytest.raises(ValueError, match=name or "nothing"):
        check_exportable(tmp_path)


def test_a_missing_extra_is_named(export_dir, monkeypatch):
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="export"):
        export_model(export_dir / "model", export_dir / "new")


@pytest.fixture
def exported_before(export_dir, monkeypatch):
    "Take the file that was exported already, which saves seconds."

    def use(directory):
        for name, file in (("export_onnx", "fp32"), ("quantize_int8", "int8")):
            path = directory / "exported" / FILES[file]
            monkeypatch.setattr(exporting, name, lambda _, to, path=path: shutil.copy(path, to))

    use(export_dir)
    return use


def change_bias(monkeypatch, index, change):
    "Let the model in torch differ from the exported one in one bias."
    load = exporting.load_exportable

    def changed(*args):
        module = load(*args)
        with torch.no_grad():
            module.model.head.bias[index] += change
        return module

    monkeypatch.setattr(exporting, "load_exportable", changed)


def test_a_failed_step_leaves_nothing_behind(export_dir, tmp_path, monkeypatch, exported_before):
    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(exporting, "quantize_int8", fail)
    with pytest.raises(OSError, match="no space"):
        export_model(export_dir / "model", tmp_path / "new", list(OUTPUTS), texts=TEXTS)
    assert list(tmp_path.iterdir()) == []


def test_a_float_file_that_differs_is_not_written(
    export_dir, tmp_path, monkeypatch, exported_before
):
    change_bias(monkeypatch, 7, 0.5)
    with pytest.raises(ValueError, match="differ from torch"):
        export_model(export_dir / "model", tmp_path / "new", list(OUTPUTS), texts=TEXTS)
    assert list(tmp_path.iterdir()) == []


def test_spare_vocabulary_rows_hide_no_difference(
    export_dir, tokenizer, tmp_path, monkeypatch, exported_before
):
    monkeypatch.undo()
    model = load_model(export_dir / "model").model
    trimmed, fewer = trim_vocabulary(model, tokenizer, TEXTS[:20])
    assert trimmed.config.vocab_size > len(fewer), "there is no spare row to test with"
    save_model(trimmed, fewer, tmp_path / "model", family="bert")
    export_model(tmp_path / "model", tmp_path / "exported", texts=TEXTS[:20], int8=False)
    for index, change in ((7, 0.5), (-1, 1e4)):  # a row that is used, and a spare one
        exported_before(tmp_path)
        change_bias(monkeypatch, index, change)
        with pytest.raises(ValueError, match="differ from torch"):
            export_model(tmp_path / "model", tmp_path / "new", texts=TEXTS[:20], int8=False)
        monkeypatch.undo()


def test_a_quantized_file_that_returns_nan_is_not_written(
    export_dir, tmp_path, monkeypatch, exported_before
):
    import onnx

    def spoil(source, target):
        model = onnx.load(source)
        for tensor in model.graph.initializer:
            if "bias" in tensor.name and tensor.data_type == onnx.TensorProto.FLOAT:
                values = onnx.numpy_helper.to_array(tensor) * np.float32(np.nan)
                tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
        onnx.save(model, target)

    monkeypatch.setattr(exporting, "quantize_int8", spoil)
    with pytest.raises(ValueError, match="model_quantized.onnx.*int8=False"):
        export_model(export_dir / "model", tmp_path / "new", list(OUTPUTS), texts=TEXTS)
    assert list(tmp_path.iterdir()) == []


def test_nan_counts_as_a_difference(export_dir, tokenizer, monkeypatch):
    exported = OnnxModel.load(export_dir / "exported", "fp32")
    compute = exported.run

    def spoil(*arrays):
        results = compute(*arrays)
        for values in results.values():
            values.flat[3] = np.nan
        return results

    monkeypatch.setattr(exported, "run", spoil)
    module = InspectableMaskedLM(make_model(tokenizer))
    differences = compare_with_torch(exported, module, example_batches(tokenizer, TEXTS, 64))
    assert all(np.isnan(value) for value in differences["difference"].values())


@pytest.mark.parametrize(
    "call, fragment",
    [
        (lambda model: model.fill_mask(["the [MASK] " + "dog " * 80]), "64"),
        (lambda model: model.fill_mask(["the dog."]), r"\[MASK\]"),
        (lambda model: model.run(np.array([[1, 10**6]]), np.ones((1, 2))), "shape"),
        (lambda model: OnnxModel.load(model.path.parents[1], "int4"), "precision='int4'"),
    ],
)
def test_wrong_input_is_named(export_dir, call, fragment):
    with pytest.raises(ValueError, match=fragment):
        call(OnnxModel.load(export_dir / "exported"))


def test_an_existing_card_is_kept_before_the_measurements(export_dir, tmp_path, exported_before):
    shutil.copytree(export_dir / "model", tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("# My notes\nNo card.\n")
    options = {"outputs": list(OUTPUTS), "texts": TEXTS, "int8": False, "name": "mine"}
    export_model(tmp_path / "model", tmp_path / "out", **options)
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("# My notes\nNo card.\n\n## ONNX")
    assert json.loads((tmp_path / "out" / "export.json").read_text())["model"] == "mine"
