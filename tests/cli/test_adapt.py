"Models that are made of others are used as those were, and no directory is overwritten."

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

import bertlab.cli.adapt as adapting
from bertlab.cli import vocabularies
from bertlab.cli.adapt import average, lengthen
from bertlab.cli.vocabularies import extend, transplant, trim
from bertlab.core.files import RUN_FILE
from bertlab.data.tokenizers import load_tokenizer, train_tokenizer
from bertlab.embeddings.bi_encoder import BiEncoder, read_st_config
from bertlab.finetuning.predictions import load_predictor
from bertlab.finetuning.task import TASK_FILE
from bertlab.model.config import modernbert_tiny
from bertlab.model.encoder import BertLabModel
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import read_sentence_transformers_files, save_model
from bertlab.model.task_heads import BertLabForSequenceClassification, BertLabForSpanClassification
from bertlab.train.averages import save_average
from bertlab.train.initialization import load_encoder
from bertlab.train.model_cards import push_model

WORDS = [f"w{i}" for i in range(30)]
TEXT = "\n".join(" ".join(WORDS[(7 * i + j) % 30] for j in range(9)) for i in range(20))
TOKENIZER = train_tokenizer([TEXT], 45)


def shape(seed=0, **options):
    torch.manual_seed(seed)
    return modernbert_tiny(vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                           num_attention_heads=2, max_position_embeddings=32, local_attention=8, **options)  # fmt: skip


def save_bi_encoder(directory, *options):
    return BiEncoder(BertLabModel(shape()), TOKENIZER, *options, max_sequence_length=12).save(
        directory
    )


@pytest.fixture
def finetuned(tmp_path):
    "A classifier that reads two columns and 12 tokens of them."
    model = BertLabForSequenceClassification(shape())
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    directory = save_model(model, TOKENIZER, tmp_path / "finetuned")
    columns = {"text": "text", "text_pair": "hint"}
    task = {"task": "classification", "columns": columns, "max_sequence_length": 12}
    (directory / TASK_FILE).write_text(json.dumps(task))
    return directory


def derive(directory, folder):
    "The directories that each command makes of a model."
    (folder / "text.txt").write_text(TEXT)
    source, text = str(directory), str(folder / "text.txt")
    lengthen(source, 64, "keep", output=str(folder / "longer"))
    transplant(source, source, str(folder / "same"))
    trim(source, str(folder / "trimmed"), text)
    extend(source, str(folder / "extended"), text, 3, min_count=1)
    shutil.copytree(directory, folder / "copy")
    average([source, str(folder / "copy")], str(folder / "mean"))
    return [folder / name for name in ("longer", "same", "trimmed", "extended", "mean")]


def test_a_derived_classifier_predicts_as_before(finetuned, tmp_path):
    texts = TEXT.split("\n")
    rows = [{"text": text, "hint": hint} for text, hint in zip(texts[:6], texts[6:])]
    expected = load_predictor(finetuned).predict(rows).rows
    for directory in derive(finetuned, tmp_path):
        predictor = load_predictor(directory)
        assert predictor.columns == {"text": "text", "text_pair": "hint"}, directory.name
        assert predictor.max_sequence_length == 12, directory.name
        if directory.name == "extended":  # its new vectors change the answers
            continue
        for answer, before in zip(predictor.predict(rows).rows, expected):
            probability = pytest.approx(before["probability"], abs=1e-5)
            assert answer == {**before, "probability": probability}, directory.name


def test_a_derived_bi_encoder_pools_as_before(tmp_path):
    directory, texts = save_bi_encoder(tmp_path / "vectors", "cls", False), TEXT.split("\n")[:4]
    expected = torch.as_tensor(BiEncoder.load(directory).encode(texts))
    for derived in derive(directory, tmp_path):
        assert read_st_config(derived) == read_st_config(directory), derived.name
        if derived.name != "extended":
            vectors = torch.as_tensor(BiEncoder.load(derived).encode(texts))
            torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("command", ["average", "lengthen", "extend", "trim", "transplant", "push"])
def test_a_module_that_cannot_be_copied_is_refused_early(command, tmp_path, monkeypatch):
    directory, output = save_bi_encoder(tmp_path / "vectors"), str(tmp_path / "new")
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    modules = json.loads((directory / "modules.json").read_text())
    (directory / "modules.json").write_text(json.dumps([*modules[:2], dense, *modules[2:]]))
    (directory / "2_Dense").mkdir()
    sizes = {"in_features": 32, "out_features": 16}
    (directory / "2_Dense" / "config.json").write_text(json.dumps(sizes))
    save_file({"linear.weight": torch.ones(16, 32)}, directory / "2_Dense" / "model.safetensors")
    for module in (adapting, vocabularies):
        monkeypatch.setattr(module, "load_encoder", lambda *_: pytest.fail("it began"))
    source = str(directory)
    calls = {"average": lambda: average([source, str(shutil.copytree(directory, tmp_path / "copy"))], output),
             "lengthen": lambda: lengthen(source, 64, output=output),
             "extend": lambda: extend(source, output), "trim": lambda: trim(source, output),
             "transplant": lambda: transplant(source, source, output),
             "push": lambda: push_model(directory, "me/vectors", dry_run=True)}  # fmt: skip
    with pytest.raises(ValueError, match="Dense in '2_Dense'"):
        calls[command]()
    assert not (tmp_path / "new").exists()


def test_pooling_of_sentence_transformers_alone_is_kept(tmp_path):
    directory = save_bi_encoder(tmp_path / "vectors")
    pooling = {"pooling_mode_max_tokens": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    lengthen(str(directory), 64, "keep", output=str(tmp_path / "longer"))
    modules = read_sentence_transformers_files(tmp_path / "longer")
    assert modules == read_sentence_transformers_files(directory) and modules["pooling"] == ["max"]


def test_models_of_different_vectors_have_no_mean(tmp_path):
    first = save_bi_encoder(tmp_path / "first")
    for options, part in ((("cls",), "cls"), (("mean", False), "Normalize")):
        second = save_bi_encoder(tmp_path / part, *options)
        with pytest.raises(ValueError, match=part):
            save_average([first, second], tmp_path / "x")
    plain = save_model(BertLabModel(shape()), TOKENIZER, tmp_path / "plain")
    save_average([first, plain], tmp_path / "mean")  # an encoder and what was trained from it
    assert read_st_config(tmp_path / "mean") == read_st_config(first)


def test_an_average_is_the_mean_of_its_models(tmp_path):
    for seed in range(2):
        save_model(BertLabForMaskedLM(shape(seed)), None, tmp_path / f"{seed}")
    average([str(tmp_path / "0"), str(tmp_path / "1")], str(tmp_path / "mean"))
    embedding = lambda name: load_encoder(tmp_path / name).get_input_embeddings().weight
    torch.testing.assert_close(embedding("mean"), (embedding("0") + embedding("1")) / 2)


def test_a_mean_of_runs_is_a_model_alone(tmp_path):
    runs = [save_bi_encoder(tmp_path / name) for name in ("first", "second")]
    model_files = {path.name for path in runs[0].iterdir()}
    for name in (RUN_FILE, "checkpoints/step-1/state.pt", "models/step-1/config.json", "logs/a.csv",
                 "previous-1/run.yaml", "metrics.json"):  # fmt: skip
        for run in runs:
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_text("{}")
    average([*map(str, runs)], str(tmp_path / "mean"))
    assert {path.name for path in (tmp_path / "mean").iterdir()} == model_files | {"average.json"}


def test_a_longer_model_names_its_lengths(finetuned, tmp_path):
    assert "cut at 12 tokens" in lengthen(str(finetuned), 64, output=str(tmp_path / "longer"))
    lengthen(str(finetuned), 10, "base", 1e5, output=str(tmp_path / "base"))  # for shorter rows
    assert load_tokenizer(tmp_path / "base").model_max_length == 32
    assert load_encoder(tmp_path / "base").config.max_position_embeddings == 32


@pytest.mark.parametrize("positions, how", [("alibi", "keep"), ("none", "keep"), ("rope", "yarn")])
def test_lengthening_follows_the_positions(positions, how, tmp_path):
    model = BertLabModel(shape(attention_positions=positions))
    directory = save_model(model, TOKENIZER, tmp_path / "short")
    assert f"({how})" in lengthen(str(directory), 64, output=str(tmp_path / "long"))
    assert load_encoder(tmp_path / "long").config.max_position_embeddings == 64


def test_a_damaged_tokenizer_is_not_left_out(finetuned, tmp_path):
    (finetuned / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer"):
        lengthen(str(finetuned), 64, output=str(tmp_path / "longer"))
    assert not (tmp_path / "longer").exists()
    for path in finetuned.glob("tokenizer*"):
        path.unlink()
    lengthen(str(finetuned), 64, output=str(tmp_path / "longer"))  # a model alone


def test_an_output_that_appears_meanwhile_stays(finetuned, tmp_path, monkeypatch):
    output = tmp_path / "longer"

    def save_meanwhile(*arguments):
        output.mkdir()
        (output / "thesis.txt").write_text("x")
        return save_model(*arguments)

    monkeypatch.setattr(adapting, "save_model", save_meanwhile)
    with pytest.raises(FileExistsError, match="longer-"):
        lengthen(str(finetuned), 64, output=str(output))
    assert [path.name for path in output.iterdir()] == ["thesis.txt"]
    (rescued,) = tmp_path.glob("longer-*")
    assert (rescued / "config.json").exists()


@pytest.mark.parametrize("options, part", [
    ({"directories": []}, "directories"), ({"how": "best"}, "how='best'"), ({"how": "greedy"}, "how='greedy'"),
    ({"output": "a"}, "exists"), ({"directories": ["a"]}, "1 model"), ({"directories": ["a", "none"]}, "none"),
    ({"directories": ["run"], "last": 1}, "last=1"), ({"directories": ["run"]}, "1 finished seeds"),
])  # fmt: skip
def test_a_wrong_average_is_refused(tmp_path, monkeypatch, options, part):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        save_model(BertLabForMaskedLM(shape()), None, tmp_path / name)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.yaml").write_text("command: finetune\n")
    (tmp_path / "run" / "metrics.json").write_text('{"seeds": [0]}')
    with pytest.raises(ValueError, match=part):
        average(**{"directories": ["a", "b"], "output": "mean", **options})
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize("head, options", [
    (BertLabForSequenceClassification, {"norm": "rms"}), (BertLabForSpanClassification, {}),
])  # fmt: skip
def test_derived_models_keep_a_head_of_our_own_class(head, options, tmp_path):
    directory = save_model(head(shape(**options)), TOKENIZER, tmp_path / "model")
    for derived in (directory, *derive(directory, tmp_path)):
        assert type(load_encoder(derived)) is head, derived.name
    assert BiEncoder.load(directory).encode(["w1 w2"]).shape == (1, 32)
