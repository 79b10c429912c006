"ONNX files compute what torch and transformers compute, and a failed export leaves nothing behind."

import copy
import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys

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
from bertlab.model.task_heads import BertLabForSequenceClassification, BertLabForSpanClassification
from bertlab.model.vocabulary import trim_vocabulary
from bertlab.train import export as exporting
from bertlab.train.export import (
    FILES,
    MAX_LOSS,
    OUTPUTS,
    REPORT,
    SCRIPT,
    InspectableMaskedLM,
    OnnxModel,
    check_exportable,
    compare_with_torch,
    describe_export,
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
    options = {"texts": TEXTS, "float16": True}
    export_model(folder / "model", folder / "exported", list(OUTPUTS), **options)
    return folder


def rows(tokenizer, texts):
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    return encoded["input_ids"], encoded["attention_mask"]


def run(exported, ids, mask, **inputs):
    return exported.run(input_ids=ids, attention_mask=mask, **inputs)


def theirs_of(export_dir):
    "The same weights in transformers' own class, which shares no line with the exported module."
    directory = export_dir / "model"
    model = transformers.BertForMaskedLM.from_pretrained(directory, attn_implementation="eager")
    return model.eval()


@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS[1:4], TEXTS[8:20]], ids=["1", "3", "12"])
def test_float_files_equal_transformers_for_any_shape(export_dir, tokenizer, texts):
    ids, mask = rows(tokenizer, texts)
    positions = torch.tensor([[1, 3]] * len(texts))
    exported = OnnxModel.load(export_dir / "exported", "float32")
    results = run(exported, ids, mask, positions=positions)
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


@pytest.mark.parametrize("precision", FILES["onnx"])
def test_attention_ignores_padding_and_the_last_lens_is_the_answer(
    export_dir, tokenizer, precision
):
    ids, mask = (t.numpy() for t in rows(tokenizer, [TEXTS[0], TEXTS[8]]))
    exported = OnnxModel.load(export_dir / "exported", precision)
    results = run(exported, ids, mask, positions=[[2], [4]])
    atol = 1e-5 if precision != "float16" else 5e-3
    np.testing.assert_allclose(results["attentions"].sum(-1), 1, atol=atol)
    length = int(mask[0].sum())
    assert length < mask.shape[1] and results["attentions"][0, :, :, :length, length:].max() == 0
    answers = results["logits"][[0, 1], [2, 4]]
    np.testing.assert_allclose(results["lens"][:, -1, 0], answers, atol=10 * atol)


def test_masks_are_filled_as_torch_fills_them(export_dir, tokenizer):
    texts = ["the red [MASK] sees the dog.", "the [MASK] likes the [MASK]."]
    answers = OnnxModel.load(export_dir / "exported", "float32").fill_mask(texts, 4)
    reference = fill_masks(theirs_of(export_dir), tokenizer, texts, 4)
    assert [len(masks) for masks in answers] == [1, 2]
    for guesses, expected in zip(sum(answers, []), sum(reference, [])):
        assert [word for word, _ in guesses] == [word for word, _ in expected]
        np.testing.assert_allclose([p for _, p in guesses], [p for _, p in expected], atol=1e-4)


def test_weights_over_the_limit_of_protobuf_are_beside_their_file(
    export_dir, tokenizer, monkeypatch
):
    monkeypatch.setattr("bertlab.train.export._PROTO_LIMIT", 1000)
    output = export_dir / "large"
    report = export_model(export_dir / "model", output, texts=TEXTS, float16=True)
    names = {name for file in FILES["onnx"].values() for name in (file, f"{file}_data")}
    assert {f"onnx/{path.name}" for path in (output / "onnx").iterdir()} == names
    ids, mask = rows(tokenizer, TEXTS[:3])
    for precision in FILES["onnx"]:
        path = output / FILES["onnx"][precision]
        size = path.stat().st_size + path.with_name(f"{path.name}_data").stat().st_size
        assert report["files"][FILES["onnx"][precision]]["bytes"] == size
        usual, large = (
            run(OnnxModel.load(folder, precision), ids, mask)["logits"]
            for folder in (export_dir / "exported", output)
        )
        np.testing.assert_allclose(large, usual, atol=5e-3 if precision == "float16" else 1e-5)
    path.with_name(f"{path.name}_data").unlink()
    with pytest.raises(ValueError, match=r"model_fp16\.onnx_data"):
        OnnxModel.load(output, "float16")


def test_the_report_states_what_an_independent_count_finds(export_dir, tokenizer):
    report = json.loads((export_dir / "exported/export.json").read_text())
    assert list(report["files"]) == list(FILES["onnx"].values())
    for name, row in report["files"].items():
        content = (export_dir / "exported" / name).read_bytes()
        assert row["bytes"] == len(content) and row["sha256"] == hashlib.sha256(content).hexdigest()
    batches, model = example_batches(tokenizer, TEXTS, 64), theirs_of(export_dir)
    exported, guesses, labels = OnnxModel.load(export_dir / "exported", "int8"), [], []
    for batch in batches:
        masked, rows = batch["labels"] != -100, [batch["input_ids"], batch["attention_mask"]]
        with torch.no_grad():
            expected = model(*map(torch.from_numpy, rows)).logits.numpy()
        sides = run(exported, *rows)["logits"], expected
        guesses.append([logits[masked].argmax(-1) for logits in sides])
        labels.append(batch["labels"][masked])
    (ours, theirs), labels = np.concatenate(guesses, axis=1), np.concatenate(labels)
    row = report["files"][FILES["onnx"]["int8"]]
    assert report["predictions"] == len(labels)
    assert row["agreement"] == pytest.approx((ours == theirs).mean()) and row["agreement"] > 0.7
    assert row["scores"] == pytest.approx([(ours == labels).mean(), (theirs == labels).mean()])
    assert row["lost"] == pytest.approx(max(0, row["scores"][1] - row["scores"][0]))
    assert row["difference"]["logits"] > 0
    assert report["files"][FILES["onnx"]["float32"]]["difference"]["logits"] < 1e-4


def test_masked_examples_spare_special_tokens_and_padding(tokenizer):
    special = set(tokenizer.all_special_ids)
    for batch in example_batches(tokenizer, [*TEXTS, "dog"], 16, 5):
        ids, labels, masked = batch["input_ids"], batch["labels"], batch["labels"] != -100
        assert ids.shape[1] <= 16
        assert masked.any(1).all() and not (masked & (batch["attention_mask"] == 0)).any()
        assert not special & set(labels[masked].tolist())
        assert (ids[masked] == tokenizer.mask_token_id).all()


def test_a_file_that_loses_points_is_named_and_not_the_default(export_dir, tmp_path):
    shutil.copytree(export_dir / "exported", tmp_path / "out")
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    row = report["files"][FILES["onnx"]["int8"]]
    for lost, precision in ((MAX_LOSS - 0.001, "int8"), (MAX_LOSS + 0.001, "float32")):
        row["lost"] = lost
        (tmp_path / "out" / REPORT).write_text(json.dumps(report))
        assert (
            OnnxModel.load(tmp_path / "out").path.name
            == FILES["onnx"][precision].rpartition("/")[2]
        )
        lines = [line for line in describe_export(report).splitlines() if "more than 2" in line]
        assert [FILES["onnx"]["int8"] in line for line in lines] == [True] * (
            precision == "float32"
        )


# ---- other tasks and families ---------------------------------------------------------------------


# What a user has who installed onnxruntime and tokenizers alone.
BARE = """import runpy, sys
sys.modules |= dict.fromkeys(("torch", "bertlab", "transformers"))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")"""


def run_script(directory, *words):
    command = [sys.executable, "-I", "-c", BARE, directory / SCRIPT, *words]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=directory.parent)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def model_of(kind, tokenizer):
    "A model with random weights for a task: of our encoder, or of a family of transformers."
    torch.manual_seed(0)
    task, _, family = kind.partition(" of ")
    settings = {"num_labels": 1 if task == "regression" else 2 if task == "answers" else 3}
    if task == "labels":
        settings["problem_type"] = "multi_label_classification"
    if family == "ours":
        ours = {"spans": BertLabForSpanClassification}
        model = ours.get(task, BertLabForSequenceClassification)
        return model(bert_tiny(vocab_size=len(tokenizer), type_vocab_size=2, **SHAPE, **settings))
    heads = {"answers": "QuestionAnswering", "tags": "TokenClassification", "words": "MaskedLM"}
    config = transformers.AutoConfig.for_model(
        family, **FOREIGN[family](len(tokenizer)), **settings
    )
    auto = getattr(transformers, f"AutoModelFor{heads.get(task, 'SequenceClassification')}")
    return auto.from_config(config)


FOREIGN = {
    "distilbert": lambda size: dict(vocab_size=size, dim=32, hidden_dim=48, n_layers=1, n_heads=2),
    "deberta-v2": lambda size: dict(vocab_size=size, relative_attention=True, pos_att_type=["p2c", "c2p"],
                                    **{**SHAPE, "num_hidden_layers": 1}),
    "mpnet": lambda size: dict(vocab_size=size, **{**SHAPE, "num_hidden_layers": 1}),
    "xlm": lambda size: dict(n_words=size, emb_dim=32, n_layers=1, n_heads=2, max_position_embeddings=64),
    "flaubert": lambda size: dict(n_words=size, emb_dim=32, n_layers=1, n_heads=2, max_position_embeddings=64),
}  # fmt: skip


def expected_answer(task, model, tokenizer, words):
    "What the script prints, by transformers and by the definition of the task."
    row = tokenizer(*words, return_tensors="pt", return_offsets_mapping=True)
    offsets, names = row.pop("offset_mapping")[0].tolist(), model.config.id2label
    ids = row["input_ids"][0]
    with torch.no_grad():
        out = model(**row)
    if task == "answers":
        cells = {(a, b): float(out.start_logits[0, a] + out.end_logits[0, b])
                 for a in range(len(ids)) for b in range(a, len(ids))
                 if row.sequence_ids(0)[a] == row.sequence_ids(0)[b] == 1}  # fmt: skip
        first, last = max(cells, key=cells.get)
        return words[1][offsets[first][0] : offsets[last][1]]
    logits = out.logits[0]
    if task == "words":
        best = logits[ids == tokenizer.mask_token_id].topk(5).indices.tolist()
        return [[tokenizer.decode([token]) for token in tokens] for tokens in best]
    if task == "tags":
        tags = zip(tokenizer.convert_ids_to_tokens(ids), logits.argmax(-1).tolist())
        return [[token, names[tag]] for token, tag in tags][1:-1]
    if task == "spans":
        spans = (logits > 0).nonzero().tolist()
        return [[names[n], words[0][offsets[a][0] : offsets[b][1]]] for n, a, b in spans]
    if task == "regression":
        return pytest.approx(float(logits[0]), abs=1e-4)
    shares = logits.sigmoid() if task == "labels" else logits.softmax(-1)
    return pytest.approx(dict(zip(names.values(), shares.tolist())), abs=1e-4)


TASKS = {
    "pairs of ours": ["the red bird", "a blue fish sees the dog"],
    "spans of ours": ["the red bird sees a fish ."],
    "answers of distilbert": ["who sees the dog", "a blue fish sees the dog ."],
    "words of xlm": ["the red [MASK] likes the [MASK] ."],
    "labels of ours": ["the red bird"],
    "regression of mpnet": ["the red bird", "a fish"],
    "tags of deberta-v2": ["the red bird sees a fish ."],
    "answers of flaubert": ["who sees the dog", "a blue fish sees the dog ."],
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (n > 2)) for n, k in enumerate(TASKS)]
)
def test_scripts_answer_as_transformers_does_without_torch(kind, tokenizer, tmp_path):
    task, words = kind.partition(" of ")[0], TASKS[kind]
    tokenizer = copy.deepcopy(tokenizer)
    if kind == "pairs of ours":  # whose tokens say which text they belong to
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    model = model_of(kind, tokenizer).eval()
    if kind == "pairs of ours":
        with torch.no_grad():  # so that the segments matter
            model.encoder.embeddings.segments.weight.mul_(20)
    model = load_model(save_model(model, tokenizer, tmp_path / "model")).model
    texts = [*zip(TEXTS, TEXTS[1:])] if len(words) == 2 else TEXTS
    report = export_model(tmp_path / "model", tmp_path / "out", texts=texts, int8=False)
    assert max(report["files"][FILES["onnx"]["float32"]]["difference"].values()) < 1e-4
    assert run_script(tmp_path / "out", *words) == expected_answer(task, model, tokenizer, words)
    results = OnnxModel.load(tmp_path / "out")(words[:1], words[1:] or None)
    assert [*results] == report["outputs"]
    card = (tmp_path / "out/README.md").read_text()
    assert check_card(card) and FILES["onnx"]["float32"] in card
    (command,) = re.findall(r"`python (run_onnx\.py .*)`", card)
    assert run_script(tmp_path / "out", *shlex.split(command)[1:]) is not None


def test_bi_encoders_give_vectors_and_rerankers_scores(tokenizer, tmp_path):
    torch.manual_seed(0)
    encoder = BertLabModel(bert_tiny(vocab_size=len(tokenizer), **SHAPE))
    model = BiEncoder(encoder.eval(), tokenizer, max_sequence_length=10)
    model.save(tmp_path / "model")
    export_model(tmp_path / "model", tmp_path / "out", texts=TEXTS, int8=False)
    vectors = OnnxModel.load(tmp_path / "out")(TEXTS[:9])["sentence_embedding"]
    np.testing.assert_allclose(vectors, model.encode(TEXTS[:9]), atol=1e-5)
    long = " ".join(TEXTS[:9])  # is cut
    np.testing.assert_allclose(
        run_script(tmp_path / "out", long), model.encode([long])[0], atol=1e-5
    )
    assert (tmp_path / "out" / "1_Pooling" / "config.json").is_file()


def test_a_reranker_of_sentence_transformers_is_not_pooled(tokenizer, tmp_path):
    head = BertLabForSequenceClassification(
        bert_tiny(vocab_size=len(tokenizer), num_labels=1, **SHAPE)
    )
    save_model(head.eval(), tokenizer, tmp_path / "model")
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.Transformer"}
    (tmp_path / "model/modules.json").write_text(json.dumps([module]))  # as version 6 writes it
    assert check_exportable(tmp_path / "model") == "ForSequenceClassification"


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
    results = run(exported, ids, mask)
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
    config = {"architectures": name and [name], "model_type": "bert"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=name or "without a head"):
        check_exportable(tmp_path)


def test_a_model_that_onnx_cannot_express_is_named(export_dir, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("export failed\n\n(details)") from TypeError("no such operator")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(ValueError, match="^a bertlab model .* ONNX: no such operator$"):
        export_model(export_dir / "model", tmp_path / "new", texts=TEXTS)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_is_named(export_dir, monkeypatch):
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"onnxruntime.*\[onnx\]"):
        export_model(export_dir / "model", export_dir / "new")


@pytest.fixture
def exported_before(export_dir, monkeypatch):
    "Take the file that was exported already, which saves seconds."

    def use(directory):
        for name, file in (("export_onnx", "float32"), ("quantize_int8", "int8")):
            path = directory / "exported" / FILES["onnx"][file]
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
    exported = OnnxModel.load(export_dir / "exported", "float32")
    compute = exported.run

    def spoil(**arrays):
        results = compute(**arrays)
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
        (lambda model: run(model, [[1, 10**6]], [[1, 1]]), "shape"),
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
