"Models that are made of others are used as those were, and nothing that appears meanwhile gives way to them."

import json
import shutil

import pytest
import torch
from test_training import word_tokenizer

import bertlab.cli.adapt as adapting
from bertlab.cli.adapt import average, lengthen
from bertlab.cli.vocabularies import extend, transplant, trim
from bertlab.data.tokenizers import load_tokenizer, train_tokenizer
from bertlab.embeddings.bi_encoder import BiEncoder, read_layout
from bertlab.finetuning.data import READING
from bertlab.finetuning.predictions import load_predictor, predict_rows
from bertlab.model.config import modernbert_tiny
from bertlab.model.encoder import BertLabModel
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model
from bertlab.model.task_heads import BertLabForSequenceClassification, BertLabForSpanClassification
from bertlab.train.modules import load_encoder

WORDS = [f"w{i}" for i in range(30)]
TEXT = "\n".join(" ".join(WORDS[(7 * i + j) % 30] for j in range(9)) for i in range(20))


def shape(tokenizer):
    torch.manual_seed(0)
    return modernbert_tiny(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                           num_attention_heads=2, max_position_embeddings=32, local_attention=8)  # fmt: skip


@pytest.fixture
def finetuned(tmp_path):
    "A classifier that reads two columns and 12 tokens of them."
    tokenizer = train_tokenizer([TEXT], 45)
    model = BertLabForSequenceClassification(shape(tokenizer))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    place = save_model(model, tokenizer, tmp_path / "finetuned")
    reading = {"task": "classification", "text_columns": ["text", "hint"], "max_sequence_length": 12}
    (place / READING).write_text(json.dumps(reading))
    (tmp_path / "text.txt").write_text(TEXT)
    return place


def make_others(place, home):
    "What each command makes of a model: its directory."
    text = str(home / "text.txt")
    lengthen(str(place), 64, "keep", output=str(home / "longer"))
    transplant(str(place), str(place), str(home / "same"))
    trim(str(place), str(home / "trimmed"), text)
    extend(str(place), str(home / "extended"), text, 3, min_count=1)
    shutil.copytree(place, home / "copy")
    average([str(place), str(home / "copy")], str(home / "mean"))
    return [home / name for name in ("longer", "same", "trimmed", "extended", "mean")]


def test_what_is_made_of_a_finetuned_model_predicts_as_it_did(finetuned, tmp_path):
    "Two columns, cut at 12 tokens: the same inputs, and so the same answers, but where vectors are new (extend)."
    texts = TEXT.split("\n")
    rows = [{"text": one, "hint": other} for one, other in zip(texts[:6], texts[6:])]
    want = predict_rows(load_predictor(finetuned), rows).rows
    for place in make_others(finetuned, tmp_path):
        predictor = load_predictor(place)
        assert (predictor.text_columns, predictor.max_sequence_length) == (("text", "hint"), 12), place.name
        if place.name != "extended":
            for one, other in zip(predict_rows(predictor, rows).rows, want):
                assert one == {**other, "probability": pytest.approx(other["probability"], abs=1e-5)}, place.name


def test_what_is_made_of_a_model_of_text_vectors_pools_as_it_did(tmp_path):
    tokenizer = train_tokenizer([TEXT], 45)
    (tmp_path / "text.txt").write_text(TEXT)
    model = BiEncoder(BertLabModel(shape(tokenizer)), tokenizer, "cls", normalize=False, max_sequence_length=12).eval()
    place, texts = model.save(tmp_path / "vectors"), TEXT.split("\n")[:4]
    for other in make_others(place, tmp_path):
        assert read_layout(other) == read_layout(place), other.name
        if other.name != "extended":
            found = BiEncoder.load(other).encode(texts)
            torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(model.encode(texts)), atol=1e-5, rtol=0)


def test_a_longer_model_says_what_it_reads(finetuned, tmp_path):
    assert "cut at 12 tokens" in lengthen(str(finetuned), 64, output=str(tmp_path / "longer"))
    said = lengthen(str(finetuned), 10, "base", 1e5, output=str(tmp_path / "base"))  # a new base for shorter rows
    assert said.startswith("32 -> 32 ") and load_tokenizer(tmp_path / "base").model_max_length == 32
    assert load_encoder(tmp_path / "base").config.max_position_embeddings == 32


def test_a_damaged_tokenizer_is_not_left_out_without_a_word(finetuned, tmp_path):
    (finetuned / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer"):
        lengthen(str(finetuned), 64, output=str(tmp_path / "longer"))
    assert not (tmp_path / "longer").exists()
    for path in finetuned.glob("tokenizer*"):
        path.unlink()
    lengthen(str(finetuned), 64, output=str(tmp_path / "longer"))  # a model alone


def test_what_appears_at_the_output_while_a_command_works_stays(tmp_path, monkeypatch):
    place = save_model(BertLabForMaskedLM(shape(WORDS * 2)), word_tokenizer(WORDS), tmp_path / "model")
    output = tmp_path / "longer"

    def meanwhile(*arguments):
        output.mkdir()
        (output / "thesis.txt").write_text("x")
        return save_model(*arguments)

    monkeypatch.setattr(adapting, "save_model", meanwhile)
    with pytest.raises(ValueError, match="in the meantime"):
        lengthen(str(place), 64, output=str(output))
    assert [path.name for path in output.iterdir()] == ["thesis.txt"]
    (beside,) = tmp_path.glob("longer-*")
    assert load_encoder(beside).config.max_position_embeddings == 64


@pytest.mark.parametrize("last", [1, -7, 0])
def test_an_option_of_other_runs_is_refused_for_a_finetuning_run(tmp_path, last):
    (tmp_path / "run.yaml").write_text("command: finetune\n")
    with pytest.raises(ValueError, match=f"last={last}"):
        average([str(tmp_path)], str(tmp_path / "mean"), last=last)


def test_an_average_of_nothing_or_of_unfinished_seeds_is_refused(tmp_path):
    with pytest.raises(ValueError, match="directories"):
        average([], str(tmp_path / "mean"))
    (tmp_path / "run.yaml").write_text("command: finetune\n")
    (tmp_path / "metrics.json").write_text('{"seeds": [0]}')
    for seed in range(2):
        (tmp_path / f"seed-{seed}").mkdir()
        (tmp_path / f"seed-{seed}" / "best.ckpt").write_bytes(b"")
    with pytest.raises(ValueError, match="1 finished seeds, and seed-1 unfinished"):
        average([str(tmp_path)], str(tmp_path / "mean"))


@pytest.mark.parametrize("head, options", [(BertLabForSequenceClassification, {"norm": "rms"}), (BertLabForSpanClassification, {})])
def test_a_finetuned_model_in_our_own_class_is_read_with_its_head(head, options, tmp_path):
    tokenizer = train_tokenizer([TEXT], 45)
    config = shape(tokenizer)
    for name, value in options.items():
        setattr(config, name, value)
    place = save_model(head(config), tokenizer, tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    loaded = load_encoder(place)
    assert type(loaded) is head
    for other in make_others(place, tmp_path):
        assert type(load_encoder(other)) is head, other.name
    assert BiEncoder.load(place).encode(["w1 w2"]).shape == (1, 32)
