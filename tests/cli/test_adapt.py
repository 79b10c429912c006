"Models that are made of others are used as those were, and nothing that appears meanwhile gives way to them."

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from test_training import word_tokenizer

import bertlab.cli.adapt as adapting
from bertlab.cli import vocabularies
from bertlab.cli.adapt import average, lengthen
from bertlab.cli.vocabularies import extend, transplant, trim
from bertlab.data.tokenizers import load_tokenizer, train_tokenizer
from bertlab.embeddings.bi_encoder import BiEncoder, read_st_config
from bertlab.finetuning.predictions import load_predictor
from bertlab.finetuning.task import TASK_FILE
from bertlab.model.config import modernbert_tiny
from bertlab.model.encoder import BertLabModel
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model
from bertlab.model.task_heads import BertLabForSequenceClassification, BertLabForSpanClassification
from bertlab.train.averages import save_average
from bertlab.train.model_cards import push_model
from bertlab.model.huggingface import read_sentence_transformers_files
from bertlab.train.initialization import load_encoder

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
    reading = {
        "task": "classification",
        "columns": {"text": "text", "text_pair": "hint"},
        "max_sequence_length": 12,
    }
    (place / TASK_FILE).write_text(json.dumps(reading))
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
    want = load_predictor(finetuned).predict(rows).rows
    for place in make_others(finetuned, tmp_path):
        predictor = load_predictor(place)
        assert predictor.columns == {"text": "text", "text_pair": "hint"}, place.name
        assert predictor.max_sequence_length == 12, place.name
        if place.name != "extended":
            for one, other in zip(predictor.predict(rows).rows, want):
                assert one == {
                    **other,
                    "probability": pytest.approx(other["probability"], abs=1e-5),
                }, place.name


def test_what_is_made_of_a_model_of_text_vectors_pools_as_it_did(tmp_path):
    tokenizer = train_tokenizer([TEXT], 45)
    (tmp_path / "text.txt").write_text(TEXT)
    model = BiEncoder(
        BertLabModel(shape(tokenizer)), tokenizer, "cls", normalize=False, max_sequence_length=12
    ).eval()
    place, texts = model.save(tmp_path / "vectors"), TEXT.split("\n")[:4]
    for other in make_others(place, tmp_path):
        assert read_st_config(other) == read_st_config(place), other.name
        if other.name != "extended":
            found = BiEncoder.load(other).encode(texts)
            torch.testing.assert_close(
                torch.as_tensor(found), torch.as_tensor(model.encode(texts)), atol=1e-5, rtol=0
            )


def with_module(place, number, name, path):
    "A model of text vectors with another module behind number - 1 others, as sentence-transformers writes it."
    modules = json.loads((place / "modules.json").read_text())
    modules.insert(
        number,
        {
            "idx": number,
            "name": str(number),
            "path": path,
            "type": f"sentence_transformers.models.{name}",
        },
    )
    (place / "modules.json").write_text(json.dumps(modules))
    (place / path).mkdir(exist_ok=True)
    (place / path / "config.json").write_text(json.dumps({"in_features": 32, "out_features": 16}))
    save_file({"linear.weight": torch.ones(16, 32)}, place / path / "model.safetensors")
    return place


@pytest.mark.parametrize("command", ["average", "lengthen", "extend", "trim", "transplant", "push"])
def test_a_model_with_a_module_that_would_stay_behind_is_refused_before_any_work(
    command, tmp_path, monkeypatch
):
    tokenizer = train_tokenizer([TEXT], 45)
    model = BiEncoder(BertLabModel(shape(tokenizer)), tokenizer, max_sequence_length=12)
    place, new = (
        with_module(model.save(tmp_path / "vectors"), 2, "Dense", "2_Dense"),
        str(tmp_path / "new"),
    )
    for where in (adapting, vocabularies):
        monkeypatch.setattr(where, "load_encoder", lambda *_: pytest.fail("it began"))
    calls = {"average": lambda: average([str(place), str(shutil.copytree(place, tmp_path / "copy"))], new),
             "lengthen": lambda: lengthen(str(place), 64, output=new),
             "extend": lambda: extend(str(place), new), "trim": lambda: trim(str(place), new),
             "transplant": lambda: transplant(str(place), str(place), new),
             "push": lambda: push_model(place, "me/vectors", dry_run=True)}  # fmt: skip
    with pytest.raises(
        ValueError, match="has the module Dense in '2_Dense', .*sentence-transformers"
    ) as told:
        calls[command]()
    assert "\n" not in str(told.value) and not (tmp_path / "new").exists()


def test_what_only_sentence_transformers_can_pool_is_carried_along(tmp_path):
    "bertlab has no maximum, and what is made of such a model keeps it."
    tokenizer = train_tokenizer([TEXT], 45)
    place = BiEncoder(BertLabModel(shape(tokenizer)), tokenizer, max_sequence_length=12).save(
        tmp_path / "vectors"
    )
    (place / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    lengthen(str(place), 64, "keep", output=str(tmp_path / "longer"))
    assert read_sentence_transformers_files(tmp_path / "longer") == read_sentence_transformers_files(place) == {
        "modules": ["Transformer", "Pooling", "Normalize"], "pooling": ["max"]}  # fmt: skip
    (place / "modules.json").write_text("[1]")
    with pytest.raises(ValueError, match="modules.json is damaged"):
        lengthen(str(place), 64, "keep", output=str(tmp_path / "new"))


def test_models_that_make_vectors_in_two_ways_have_no_mean(tmp_path):
    tokenizer = train_tokenizer([TEXT], 45)

    def put(name, *how):
        return BiEncoder(
            BertLabModel(shape(tokenizer)), tokenizer, *how, max_sequence_length=12
        ).save(tmp_path / name)

    first, same = put("first"), put("same")
    for other, said in (
        (put("cls", "cls"), "pooling.*cls"),
        (put("long", "mean", False), "modules.*Normalize"),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            save_average([first, other], tmp_path / "x")
        assert str(first) in str(caught.value) and str(other) in str(caught.value)
    # Later versions of sentence-transformers name the pooling, which is the same one.
    (same / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    save_average([first, same], tmp_path / "mean")
    plain = save_model(BertLabModel(shape(tokenizer)), tokenizer, tmp_path / "plain")
    save_average([first, plain], tmp_path / "between")  # an encoder and what was trained from it
    assert read_st_config(tmp_path / "between") == read_st_config(first)


def test_a_longer_model_says_what_it_reads(finetuned, tmp_path):
    assert "cut at 12 tokens" in lengthen(str(finetuned), 64, output=str(tmp_path / "longer"))
    said = lengthen(
        str(finetuned), 10, "base", 1e5, output=str(tmp_path / "base")
    )  # a new base for shorter rows
    assert said.startswith("32 -> 32 ") and load_tokenizer(tmp_path / "base").model_max_length == 32
    assert load_encoder(tmp_path / "base").config.max_position_embeddings == 32


@pytest.mark.parametrize("positions, way", [("alibi", "keep"), ("none", "keep"), ("rope", "yarn")])
def test_a_model_is_made_longer_as_its_positions_allow_where_nobody_says_how(
    positions, way, tmp_path
):
    tokenizer = train_tokenizer([TEXT], 45)
    config = shape(tokenizer)
    config.attention_positions = positions
    save_model(BertLabModel(config), tokenizer, tmp_path / "short")
    assert f"positions ({way})" in lengthen(
        str(tmp_path / "short"), 64, output=str(tmp_path / "long")
    )
    assert load_encoder(tmp_path / "long").config.max_position_embeddings == 64


def test_a_damaged_tokenizer_is_not_left_out_without_a_word(finetuned, tmp_path):
    (finetuned / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer"):
        lengthen(str(finetuned), 64, output=str(tmp_path / "longer"))
    assert not (tmp_path / "longer").exists()
    for path in finetuned.glob("tokenizer*"):
        path.unlink()
    lengthen(str(finetuned), 64, output=str(tmp_path / "longer"))  # a model alone


def test_what_appears_at_the_output_while_a_command_works_stays(tmp_path, monkeypatch):
    place = save_model(
        BertLabForMaskedLM(shape(WORDS * 2)), word_tokenizer(WORDS), tmp_path / "model"
    )
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


@pytest.mark.parametrize(
    "head, options",
    [(BertLabForSequenceClassification, {"norm": "rms"}), (BertLabForSpanClassification, {})],
)
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
