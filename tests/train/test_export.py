"""ONNX files: the same numbers as torch and as transformers, and nothing left behind where an export fails."""

import hashlib
import json

import numpy as np
import pytest
import torch
import transformers

pytest.importorskip("onnxruntime")

from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.config import bert_tiny, modernbert_tiny, neobert, roberta_base
from bertlab.model.encoder import BertLabModel
from bertlab.model.mask_filling import fill_masks
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model
from bertlab.model.vocabulary import trim_vocabulary
from bertlab.train import export as exporting
from bertlab.train.export import (
    OnnxModel,
    check_exportable,
    compare_with_torch,
    export_model,
    masked_examples,
    quantize_int8,
    export_onnx,
)
from bertlab.train.model_cards import check_card
from bertlab.train.modules import load_encoder

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
def place(tokenizer, tmp_path_factory):
    "A BERT that plain transformers opens, exported with everything that a file can carry."
    folder = tmp_path_factory.mktemp("export")
    save_model(make_model(tokenizer), tokenizer, folder / "model", family="bert")
    export_model(folder / "model", folder / "exported", list(exporting.PARTS), texts=TEXTS)
    return folder


def rows(tokenizer, texts):
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    return encoded["input_ids"], encoded["attention_mask"]


def theirs_of(place):
    "The same weights in transformers' own class, which shares no line with the exported module."
    return transformers.BertForMaskedLM.from_pretrained(
        place / "model", attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize(
    "texts", [TEXTS[:1], TEXTS[1:4], TEXTS[8:20]], ids=["one row", "three", "twelve"]
)
def test_a_file_of_floats_answers_as_transformers_does_for_rows_of_any_shape(
    place, tokenizer, texts
):
    ids, mask = rows(tokenizer, texts)
    positions = torch.tensor([[1, 3]] * len(texts))
    found = OnnxModel.load(place / "exported", "fp32").run(
        ids.numpy(), mask.numpy(), positions.numpy()
    )
    model = theirs_of(place)
    with torch.no_grad():
        wanted = model(ids, mask, output_attentions=True, output_hidden_states=True)
        lens = torch.stack([model.cls(state)[:, [1, 3]] for state in wanted.hidden_states], 1)
    real = mask.bool().numpy()
    np.testing.assert_allclose(found["logits"][real], wanted.logits.numpy()[real], atol=2e-4)
    np.testing.assert_allclose(found["lens"], lens.numpy(), atol=2e-4)
    attentions = torch.stack(wanted.attentions, 1).numpy()
    np.testing.assert_allclose(np.moveaxis(found["attentions"], 3, 1)[real], np.moveaxis(attentions, 3, 1)[real],
                               atol=1e-5)  # fmt: skip


def test_attention_sums_to_one_and_leaves_padding_alone_and_the_last_lens_is_the_answer(
    place, tokenizer
):
    ids, mask = (t.numpy() for t in rows(tokenizer, [TEXTS[0], TEXTS[8]]))
    for precision in ("fp32", "int8"):
        found = OnnxModel.load(place / "exported", precision).run(ids, mask, np.array([[2], [4]]))
        looks = found["attentions"]
        np.testing.assert_allclose(looks.sum(-1), 1, atol=1e-5)
        short = int(mask[0].sum())
        assert short < mask.shape[1] and looks[0, :, :, :short, short:].max() == 0
        np.testing.assert_allclose(
            found["lens"][:, -1, 0], found["logits"][[0, 1], [2, 4]], atol=1e-4
        )


def test_gaps_are_filled_as_torch_fills_them(place, tokenizer):
    texts = ["the red [MASK] sees the dog.", "the [MASK] likes the [MASK]."]
    found = OnnxModel.load(place / "exported", "fp32").fill(texts, 4)
    wanted = fill_masks(theirs_of(place), tokenizer, texts, 4)
    assert [len(gaps) for gaps in found] == [1, 2]
    for ours, theirs in zip(sum(found, []), sum(wanted, [])):
        assert [word for word, _ in ours] == [word for word, _ in theirs]
        np.testing.assert_allclose([p for _, p in ours], [p for _, p in theirs], atol=1e-4)


def test_the_report_states_what_an_independent_count_finds(place, tokenizer):
    report = json.loads((place / "exported/export.json").read_text())
    assert set(report["files"]) == {"model.onnx", "model_int8.onnx"}
    for name, row in report["files"].items():
        content = (place / "exported" / name).read_bytes()
        assert row["bytes"] == len(content) and row["sha256"] == hashlib.sha256(content).hexdigest()
    batches, model = masked_examples(tokenizer, TEXTS, 64), theirs_of(place)
    assert report["gaps"] == sum(int(batch.gaps.sum()) for batch in batches)
    small, same, largest = OnnxModel.load(place / "exported", "int8"), 0, 0.0
    for batch in batches:
        got = small.run(batch.input_ids, batch.attention_mask)["logits"]
        with torch.no_grad():
            wanted = model(
                torch.from_numpy(batch.input_ids), torch.from_numpy(batch.attention_mask)
            ).logits.numpy()
        same += int((got.argmax(-1) == wanted.argmax(-1))[batch.gaps].sum())
        largest = max(largest, np.abs(got - wanted)[batch.attention_mask == 1].max())
    row = report["files"]["model_int8.onnx"]
    assert row["same_best_guess"] == pytest.approx(same / report["gaps"])
    assert row["largest_logit_difference"] == pytest.approx(largest, rel=1e-2)
    assert 0 < row["largest_logit_difference"] and row["same_best_guess"] > 0.7
    assert report["files"]["model.onnx"]["largest_logit_difference"] < 1e-3


def test_the_card_beside_the_files_is_valid_and_states_the_measurements(place):
    text = (place / "exported/README.md").read_text()
    check_card(text)
    row = json.loads((place / "exported/export.json").read_text())["files"]["model_int8.onnx"]
    assert f"{row['same_best_guess']:.1%}" in text and "model_int8.onnx" in text


def test_gaps_to_check_with_spare_special_tokens_and_padding(tokenizer):
    special = set(tokenizer.all_special_ids)
    for batch in masked_examples(tokenizer, [*TEXTS, "", "dog"], 16, 5):
        assert batch.input_ids.shape[1] <= 16
        assert batch.gaps.any(1).all() and not (batch.gaps & (batch.attention_mask == 0)).any()
        assert not special & set(batch.answers[batch.gaps].tolist())
        assert (batch.input_ids[batch.gaps] == tokenizer.mask_token_id).all()
        assert (batch.input_ids == batch.answers)[~batch.gaps].all()


OWN = {
    "ALiBi, shared keys, gates": (modernbert_tiny, dict(norm="rms", attention_positions="alibi", num_key_value_heads=2,
                                                        output_gate="head", qk_norm=True)),
    "ModernBERT with a window": (modernbert_tiny, dict(local_attention=4, global_attention_every_n_layers=2)),
    "RoBERTa": (roberta_base, {}),
    "NeoBERT": (neobert, {}),
    "deep norm, head of its own": (bert_tiny, dict(norm="deep", tie_word_embeddings=False)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name[:5] != "ALiBi")) for name in OWN]
)
def test_models_that_transformers_does_not_have_are_exported_too(name, tokenizer, tmp_path):
    config, settings = OWN[name]
    model = make_model(tokenizer, config, **settings)
    export_onnx(model, tmp_path / "model.onnx", list(exporting.PARTS))
    exported = OnnxModel(tmp_path / "model.onnx", tokenizer)
    ids, mask = rows(tokenizer, TEXTS[3:10])
    found = exported.run(ids.numpy(), mask.numpy())
    model.config._attn_implementation = "sdpa"  # another kernel than the one that was exported
    with torch.no_grad():
        wanted = model(ids, mask).logits.numpy()
    real = mask.bool().numpy()
    np.testing.assert_allclose(
        found["logits"][real], wanted[real], atol=1e-3 * np.abs(wanted).max()
    )
    np.testing.assert_allclose(found["attentions"].sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(found["lens"][:, -1, 0], found["logits"][:, 0], atol=1e-3)
    quantize_int8(tmp_path / "model.onnx", tmp_path / "small.onnx")
    assert (tmp_path / "small.onnx").stat().st_size < 0.75 * (
        tmp_path / "model.onnx"
    ).stat().st_size
    for path in (tmp_path / "model.onnx", tmp_path / "small.onnx"):
        assert b".py" not in path.read_bytes(), (
            "the file names sources of the machine that wrote it"
        )


def test_what_cannot_be_exported_is_refused_before_a_weight_is_read(
    place, tokenizer, tmp_path, monkeypatch
):
    def never(*arguments, **options):
        raise AssertionError("work was started")

    for name in ("load_encoder", "load_tokenizer", "held_out_texts"):
        monkeypatch.setattr(exporting, name, never)
    save_model(
        BertLabModel(bert_tiny(vocab_size=len(tokenizer), **SHAPE)),
        tokenizer,
        tmp_path / "headless",
    )
    (tmp_path / "file").write_text("")
    new = tmp_path / "new"
    cases = {
        "BertModel": lambda: export_model(tmp_path / "headless", new),
        "there already": lambda: export_model(place / "model", place / "exported"),
        "a file": lambda: export_model(place / "model", tmp_path / "file/below"),
        "parts": lambda: export_model(place / "model", new, ["attentions"]),
        "'looks'": lambda: export_model(place / "model", new, ["logits", "looks"]),
        "config.json": lambda: export_model(tmp_path, new),
    }
    for word, work in cases.items():
        with pytest.raises(ValueError, match=word):
            work()
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="export"):
        export_model(place / "model", new)
    assert not new.exists()


@pytest.mark.parametrize(
    "name", ["BertForSequenceClassification", "BertLabForEnhancedMaskedLM", "nothing", None]
)
def test_a_head_that_guesses_no_words_is_refused_by_its_name(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": name and [name]}))
    with pytest.raises(ValueError, match=name or "nothing"):
        check_exportable(tmp_path)


def test_a_step_that_fails_leaves_nothing_behind(place, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(exporting, "quantize_int8", fail)
    with pytest.raises(OSError, match="no space"):
        export_model(place / "model", tmp_path / "new", texts=TEXTS)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_floats_that_differs_from_torch_is_not_written(place, tmp_path, monkeypatch):
    write = exporting.export_onnx

    def write_another(model, path, parts):
        with torch.no_grad():
            model.head.bias[7] += 0.5
        write(model, path, parts)
        with torch.no_grad():
            model.head.bias[7] -= 0.5

    monkeypatch.setattr(exporting, "export_onnx", write_another)
    with pytest.raises(ValueError, match="differs from torch"):
        export_model(place / "model", tmp_path / "new", texts=TEXTS)
    assert list(tmp_path.iterdir()) == []


def test_spare_rows_of_a_vocabulary_neither_excuse_a_difference_nor_are_one(
    place, tokenizer, tmp_path, monkeypatch
):
    trimmed, fewer = trim_vocabulary(load_encoder(place / "model"), tokenizer, TEXTS[:20])
    assert trimmed.config.vocab_size > len(fewer), "there is no spare row to test with"
    save_model(trimmed, fewer, tmp_path / "model", family="bert")
    report = export_model(tmp_path / "model", tmp_path / "good", texts=TEXTS[:20])
    assert all(0 < row["largest_logit_difference"] < 100 for row in report["files"].values())
    write = exporting.export_onnx

    def write_with(row, change):
        def write_another(model, path, parts):
            with torch.no_grad():
                model.head.bias[row] += change
            write(model, path, parts)
            with torch.no_grad():
                model.head.bias[row] -= change

        return write_another

    for row, change in (
        (7, 0.5),
        (-1, 1e4),
    ):  # an entry that is said; a spare row that could be said now
        monkeypatch.setattr(exporting, "export_onnx", write_with(row, change))
        with pytest.raises(ValueError, match="differs from torch"):
            export_model(tmp_path / "model", tmp_path / "new", texts=TEXTS[:20], int8=False)


def test_a_file_of_bytes_that_gives_no_number_is_not_written(place, tmp_path, monkeypatch):
    def write_spoilt(source, target):
        model = load_encoder(place / "model").eval()
        with torch.no_grad():
            model.head.bias[7] = torch.nan
        exporting.export_onnx(model, target)

    monkeypatch.setattr(exporting, "quantize_int8", write_spoilt)
    with pytest.raises(ValueError, match="model_int8.onnx gives nan nats.*int8=False"):
        export_model(place / "model", tmp_path / "new", texts=TEXTS)
    assert list(tmp_path.iterdir()) == []
    export_model(place / "model", tmp_path / "new", texts=TEXTS, int8=False)  # as it says
    assert not (tmp_path / "new" / "model_int8.onnx").exists()


def test_a_score_that_is_no_number_is_no_agreement(place, tokenizer):
    exported, batches = (
        OnnxModel.load(place / "exported", "fp32"),
        masked_examples(tokenizer, TEXTS, 64),
    )
    compute = exported.run

    def spoil(*rows):
        found = compute(*rows)
        for values in found.values():
            values.flat[3] = np.nan
        return found

    exported.run = spoil
    found = compare_with_torch(exported, make_model(tokenizer), batches)
    assert all(
        np.isnan(found[f"largest_{part}_difference"]) for part in ("logit", "attentions", "lens")
    )


def test_the_report_names_the_directory_however_it_was_given(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place / "model")
    for given, name, wanted in ((".", None, "model"), ("../model/.", "mine", "mine")):
        export_model(given, tmp_path / wanted, texts=TEXTS[:8], int8=False, name=name)
        assert json.loads((tmp_path / wanted / "export.json").read_text())["model"] == wanted


def test_rows_that_a_model_cannot_read_are_refused(place):
    exported = OnnxModel.load(place / "exported")
    assert exported.path.name == "model_int8.onnx"
    with pytest.raises(ValueError, match="64"):
        exported.fill(["the [MASK] " + "dog " * 80])
    with pytest.raises(ValueError, match=r"\[MASK\]"):
        exported.fill(["the dog."])
    with pytest.raises(ValueError, match="shape"):
        exported.run(np.array([[1, 10**6]]), np.ones((1, 2)))
    with pytest.raises(ValueError, match="int4"):
        OnnxModel.load(place / "exported", "int4")
    with pytest.raises(ValueError, match="model.onnx"):
        OnnxModel.load(place / "model", "fp32")


def test_a_readme_of_ones_own_stays_in_front_of_what_was_measured(place, tmp_path):
    import shutil

    shutil.copytree(place / "model", tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("# My notes\nNo card at all.\n")
    export_model(tmp_path / "model", tmp_path / "out", texts=TEXTS, int8=False)
    assert (
        (tmp_path / "out" / "README.md")
        .read_text()
        .startswith("# My notes\nNo card at all.\n\n## As ONNX")
    )


@pytest.mark.parametrize("count", [0, -1])
def test_no_guess_at_all_is_a_mistake(place, count):
    with pytest.raises(ValueError, match="top_k must be 1 or more"):
        OnnxModel.load(place / "exported").fill(["the [MASK]"], count)
