"`bertlab embed`: from a table of pairs to an answer, resumable, with one line for every mistake."

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from embedding_cases import draw_pairs, small_config, small_tokenizer

from bertlab.cli.embed import load_bi_encoder
from bertlab.cli.main import main
from bertlab.cli.commands import COMMANDS
from bertlab.finetuning.models import save_predictor
from bertlab.finetuning.predictions import load_predictor
from bertlab.model.config import BertLabConfig
from bertlab.model.task_heads import BertLabForSequenceClassification


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A folder with pairs, texts, a configuration, and the model that was trained by it."
    folder = tmp_path_factory.mktemp("embed")
    pairs = draw_pairs(120)
    rows = [{"query": q, "positive": p} for q, p in zip(pairs.queries, pairs.positives)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "texts").mkdir()
    (folder / "texts/a.txt").write_text("\n".join(pairs.positives))
    small_tokenizer().save_pretrained(folder / "tokenizer")
    config = {
        "model": {"model_config_kwargs": {k: v for k, v in small_config().items() if k.startswith(("hidden_size", "inter", "num_"))},
                  "pretrained_tokenizer_name_or_path": str(folder / "tokenizer"), "learning_rate": 3e-3, "gradcache_rows": 4},
        "data": {"dataset_name_or_path": str(folder / "pairs.jsonl"), "max_sequence_length": 16, "train_batch_size": 16},
        "trainer": {"max_steps": 8}, "run": {"output": str(folder / "run"), "progress": "none"},
    }  # fmt: skip
    (folder / "embed.yaml").write_text(yaml.safe_dump(config))
    assert main(["embed", "finetune", "--config", str(folder / "embed.yaml")]) == 0
    return folder


@pytest.fixture(scope="module")
def reranker(folder):
    torch.manual_seed(0)
    config = BertLabConfig(**small_config(), num_labels=1, problem_type="regression")
    model = BertLabForSequenceClassification(config)
    return save_predictor(model, folder / "reranker", small_tokenizer())


def run(capsys, *words):
    "The exit status, standard output and standard error of `bertlab embed`."
    status = main(["embed", *map(str, words)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def succeed(capsys, *words):
    status, printed, errors = run(capsys, *words)
    assert status == 0, errors
    return printed


def refuse(capsys, *words):
    "The one line of a mistake."
    status, _, errors = run(capsys, *words)
    assert status == 2 and errors.count("\n") == 1, errors
    return errors


def finetune_words(folder, output, *more):
    return ["finetune", "--config", folder / "embed.yaml", "--run.output", output, *more]


def hits_of(printed):
    return [json.loads(line) for line in printed.splitlines()]


def write_pairs(path, pairs):
    rows = [{"query": query, "positive": positive} for query, positive in pairs]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_run_leaves_model_configuration_and_numbers(folder):
    metrics = json.loads((folder / "run/metrics.json").read_text())
    assert metrics.keys() >= {"val_loss", "val_mrr", "val_recall_10", "train_loss"}
    assert all(0 < values["val_mrr"] <= 1 for values in metrics["baselines"].values())
    assert yaml.safe_load((folder / "run/run.yaml").read_text())["trainer"]["max_steps"] == 8
    names = {path.name for path in (folder / "run").iterdir()}
    assert names >= {"modules.json", "model.safetensors", "tokenizer.json"}


def test_a_finished_run_resumes_further(folder, capsys, tmp_path):
    output = tmp_path / "again"
    assert "already holds a run" in refuse(capsys, "finetune", "--config", folder / "embed.yaml")
    succeed(capsys, *finetune_words(folder, output, "--trainer.max_steps", "4"))
    metrics = json.loads((output / "metrics.json").read_text())
    succeed(capsys, "finetune", "--resume", output)  # has nothing to do
    assert json.loads((output / "metrics.json").read_text()) == metrics
    succeed(capsys, "finetune", "--resume", output, "--trainer.max_steps", "8")
    assert json.loads((output / "metrics.json").read_text())["val_loss"] != metrics["val_loss"]


@pytest.mark.parametrize("limit, steps", [([], 1), (["--run.time_limit", "1h"], 3)])
def test_a_run_ends_with_its_budget_or_a_limit(folder, capsys, tmp_path, limit, steps):
    clock = [
        "--model.schedule",
        "time_budget",
        "--model.scheduler_kwargs.budget",
        "0.001s",
        "--trainer.max_steps",
        "3",
    ]
    succeed(capsys, *finetune_words(folder, tmp_path / "timed", *clock, *limit))
    assert [int(path.stem[5:]) for path in (tmp_path / "timed").glob("checkpoints/*.ckpt")] == [
        steps
    ]
    assert (tmp_path / "timed" / "model.safetensors").exists()


@pytest.mark.parametrize("words, part", [
    (("--model.pooling", "cls"), "pooling"), (("--data.shuffle_train", "false"), "shuffle"),
    (("--data.dataset_name_or_path", "reversed.jsonl"), "pairs"), (("damage",), ".ckpt"),
])  # fmt: skip
def test_a_resume_of_another_run_is_refused(folder, capsys, tmp_path, monkeypatch, words, part):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / "run", "run")
    lines = (folder / "pairs.jsonl").read_text().splitlines()
    Path("reversed.jsonl").write_text("\n".join(lines[::-1]))
    if words == ("damage",):
        [path] = Path("run/checkpoints").iterdir()
        path.write_bytes(path.read_bytes()[:-30])
        words = ()
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    status, _, errors = run(
        capsys, "finetune", "--resume", "run", "--trainer.max_steps", "12", *words
    )
    assert status == 2 and part in errors and "Traceback" not in errors
    assert before == {path: path.read_bytes() for path in before}


def test_a_batch_that_memory_does_not_hold_is_encoded_in_parts(
    folder, capsys, tmp_path, monkeypatch
):
    words = "--model.gradcache_rows", "null", "--trainer.max_steps", "2"
    printed = succeed(capsys, *finetune_words(folder, tmp_path / "whole", *words))
    assert "gradcache_rows" not in printed
    monkeypatch.setattr("bertlab.embeddings.module.available_memory_bytes", lambda: 1 << 16)
    printed = succeed(capsys, *finetune_words(folder, tmp_path / "parts", *words))
    assert "gradcache_rows: 1, because the activations of 16 pairs" in printed
    options = yaml.safe_load((tmp_path / "parts/run.yaml").read_text())
    assert options["model"]["gradcache_rows"] == 1  # for a resume on another machine


@pytest.mark.parametrize(
    "norm, prefix", [("layer", ": "), ("rms", ": import bertlab.model.huggingface, then ")]
)
def test_the_last_line_tells_how_to_load(folder, capsys, tmp_path, norm, prefix):
    words = ["--trainer.max_steps", "1", "--model.model_config_kwargs.norm", norm]
    printed = succeed(capsys, *finetune_words(folder, tmp_path / "new", *words))
    expected = f"{prefix}load it with SentenceTransformer('{tmp_path / 'new'}')"
    assert expected in printed.splitlines()[-1]


@pytest.mark.parametrize("name", ["v.npy", "v.parquet"])
def test_texts_become_vectors_in_a_file(folder, capsys, tmp_path, name):
    words = [
        "encode",
        folder / "run",
        folder / "texts",
        "--output",
        tmp_path / name,
        "--width",
        "8",
    ]
    assert "120 texts" in succeed(capsys, *words)
    if name == "v.npy":
        assert np.load(tmp_path / name).shape == (120, 8)
    assert "exists" in refuse(capsys, *words)


@pytest.mark.parametrize("name", ["v.npy", "v.parquet"])
def test_blank_texts_are_counted(folder, capsys, tmp_path, name):
    (tmp_path / "some.txt").write_text("alpha beta\n\ngamma\n" + "delta\n" * 40)
    words = ["encode", folder / "run", tmp_path / "some.txt", "--output", tmp_path / name]
    printed = succeed(capsys, *words)
    assert "42 texts" in printed and "1 blank texts" in printed
    if name == "v.npy":
        assert np.flatnonzero(~np.load(tmp_path / name).any(1)).tolist() == [1]


@pytest.mark.parametrize("indexed", [True, False])
def test_a_query_finds_its_text(folder, capsys, tmp_path, indexed):
    source = folder / "texts"
    if indexed:
        source = tmp_path / "index"
        succeed(capsys, "encode", folder / "run", folder / "texts", "--output", source)
    query = (folder / "texts/a.txt").read_text().splitlines()[7]
    hits = hits_of(
        succeed(capsys, "search", folder / "run", source, "--top_k", "2", query, "--as_json")
    )
    assert hits[0]["text"] == query and hits[0]["source"] == "a.txt:8" and len(hits) == 2
    assert hits[0]["score"] == pytest.approx(1, abs=1e-4)


def test_paths_may_begin_at_the_home_directory(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(folder / "run", tmp_path / "model")
    succeed(capsys, "encode", "~/model", folder / "texts", "--output=~/index")
    succeed(capsys, "search", "~/model", "~/index", "alpha")
    words = ["--data", folder / "pairs.jsonl", "--baselines", "false", "--output", "~/numbers.json"]
    succeed(capsys, "evaluate", "~/model", *words)
    assert (tmp_path / "index/store.json").exists() and (tmp_path / "numbers.json").exists()


def test_malformed_rows_are_skipped_and_counted(folder, capsys, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "alpha beta"}\n{"text":\n{"text": "gamma"}\n')
    words = folder / "run", tmp_path / "bad.jsonl"
    assert "line 2" in refuse(capsys, "encode", *words, "--output", tmp_path / "v.npy")
    (tmp_path / "bad.bin").write_bytes(b"")
    skip = "--on_error", "skip"
    printed = succeed(capsys, "encode", *words, "--output", tmp_path / "v.npy", *skip)
    assert "2 texts" in printed and "1 malformed rows" in printed
    _, printed, errors = run(capsys, "search", *words, "alpha beta", *skip, "--as_json")
    assert len(hits_of(printed)) == 2 and "1 malformed rows" in errors
    (tmp_path / "bare.csv").write_text("alpha beta,x\ngamma,y\n")
    columns = ["--header", "false", "--text_column", "1", "--top_k", "1", "--as_json"]
    [hit] = hits_of(
        succeed(capsys, "search", folder / "run", tmp_path / "bare.csv", "gamma", *columns)
    )
    assert hit["text"] == "gamma"


def test_files_of_another_encoding_are_read(folder, capsys, tmp_path):
    "By every command: their words are those of the same file in UTF-8."
    rows = ["query;positive", *(f"süß {n};Käse {n}" for n in range(40))]
    for name, encoding in (("u.csv", "utf-8"), ("l.csv", "cp1252")):
        (tmp_path / name).write_bytes("\n".join(rows).encode(encoding))
    search = "search", folder / "run", tmp_path / "l.csv", "Käse 7", "--text_column", "positive"
    assert "cp1252" in refuse(capsys, *search)
    latin = "--encoding", "cp1252"
    [hit] = hits_of(succeed(capsys, *search, *latin, "--top_k", "1", "--as_json"))
    assert "Käse" in hit["text"]
    for command, options in (
        ("encode", ["--text_column", "positive", "--output"]),
        ("evaluate", ["--baselines", "false", "--output"]),
    ):
        outputs = []
        for name, more in (("u.csv", ()), ("l.csv", latin)):
            source = [tmp_path / name] if command == "encode" else ["--data", tmp_path / name]
            output = tmp_path / f"{name}{'.npy' if command == 'encode' else '.json'}"
            succeed(capsys, command, folder / "run", *source, *options, output, *more)
            outputs.append(output.read_bytes())
        assert outputs[0] == outputs[1]
    data = tmp_path / "l.csv", "--data.max_sequence_length", "16", "--trainer.max_steps", "1"
    words = finetune_words(folder, tmp_path / "new", "--data.dataset_name_or_path", *data)
    assert "cp1252" in refuse(capsys, *words)
    assert "40 pairs" in succeed(capsys, *words, *latin, "--data.validation_fraction", "0")


def change_model(folder, tmp_path, **options):
    "A copy of the model with other options of sentence-transformers."
    shutil.copytree(folder / "run", tmp_path / "model")
    path = tmp_path / "model/config_sentence_transformers.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}))
    return tmp_path / "model"


def test_prompts_come_before_texts_and_queries(folder, capsys, tmp_path):
    prompts = {"query": "alpha beta: ", "passage": "gamma: "}
    model, texts = change_model(folder, tmp_path, prompts=prompts), folder / "texts"
    assert "'gamma: '" in succeed(capsys, "encode", model, texts, "--output", tmp_path / "index")
    for side, is_shown in (("query", True), ("none", False)):
        words = ["--output", tmp_path / f"{side}.npy", "--prompt", side]
        assert ("'alpha beta: '" in succeed(capsys, "encode", model, texts, *words)) == is_shown
    assert "passage" in refuse(capsys, "encode", model, texts, "--prompt", "passage")
    plain = load_bi_encoder(str(folder / "run"))
    for source in (tmp_path / "index", texts):
        words = ["search", model, source, "red house", "--as_json", "--top_k", "1"]
        [hit] = hits_of(succeed(capsys, *words))
        vectors = plain.encode(["alpha beta: red house", "gamma: " + hit["text"]])
        assert hit["score"] == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-4)


def test_an_unknown_similarity_is_refused_early(folder, capsys, tmp_path):
    model = change_model(folder, tmp_path, similarity_fn_name="manhattan")
    for words in (
        ["search", model, folder / "texts", "x"],
        ["evaluate", model, "--data", folder / "pairs.jsonl"],
    ):
        assert "'manhattan'" in refuse(capsys, *words)


def test_an_index_is_searched_as_it_was_encoded(folder, capsys, tmp_path):
    words = ["--max_sequence_length", "4", "--pooling", "cls", "--output", tmp_path / "index"]
    succeed(capsys, "encode", folder / "run", folder / "texts", *words)
    query = (folder / "texts/a.txt").read_text().splitlines()[7]
    hits = hits_of(
        succeed(capsys, "search", folder / "run", tmp_path / "index", query, "--as_json")
    )
    assert query in [hit["text"] for hit in hits if hit["score"] > 1 - 1e-4]


BASELINES = ["model", "hybrid", "BM25", "TF-IDF", "mean of word vectors"]
DIFFERENCES = ["model - BM25", "hybrid - BM25"]


def test_an_evaluation_writes_intervals(folder, capsys, reranker, tmp_path):
    words = ["--data", folder / "pairs.jsonl", "--output", tmp_path / "numbers.json"]
    words += ["--reranker", reranker, "--rerank_k", "7", "--other", folder / "run"]
    printed = succeed(capsys, "evaluate", folder / "run", *words)
    numbers = json.loads((tmp_path / "numbers.json").read_text())["data"]
    assert numbers.keys() >= {*BASELINES, *DIFFERENCES, "reranked", "reranked - other"}
    intervals = [interval for values in numbers.values() for interval in values.values()]
    assert all(low <= mean <= high for mean, low, high in intervals)
    assert {*numbers["model - other"]["mrr_10"]} == {0.0}
    means = [numbers[name]["recall_10"][0] for name in ("model", "BM25", "model - BM25")]
    assert means[0] - means[1] == pytest.approx(means[2])
    assert all(re.search(f"^{name} ", printed, re.MULTILINE) for name in numbers)


@pytest.mark.parametrize("pairs", [
    [("where is the red house", "the house is in the north")], [("红色房子", "北方的房子"), ("谁", "没有人")],
])  # fmt: skip
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_an_evaluation_on_few_pairs_has_its_baselines(folder, capsys, tmp_path, pairs):
    path = write_pairs(tmp_path / "few.jsonl", pairs)
    printed = succeed(capsys, "evaluate", folder / "run", "--data", path).splitlines()
    names = [re.split("  |:", line)[0] for line in printed[2:] if line]
    assert names == BASELINES + DIFFERENCES


MISTAKES = [
    ("search ./no/model {texts} x", "./no/model"), ("search {run} no/folder x", "no/folder"),
    ("search {run} {texts} ''", "queries"), ("search {run} {texts} x --top_k 0", "top_k"),
    ("encode {run} {texts} --widht 3", "width"), ("encode {run} {texts} --output {texts}/v.npy", "inside of"),
    ("search {run} {texts} x --reranker {run}", "reranker"), ("evaluate {run} --other ./no/model", "./no/model"),
    ("mine {pairs} {run} --num_negatives 0", "num_negatives=0"), ("mine {pairs} {run} --range_min 3 --range_max 2", "range_max=2"),
    ("mine {pairs} {run} --cross_encoder {run}", "reranker"), ("mine {pairs} {run} --output {pairs}", "already exists"),
    ("{new} --data.teacher {run} --model.distillation kl", "two texts"),
    ("evaluate {run} --task docstrings", "docstring"), ("evaluate {run} --data {pairs} --output {pairs}", "already exists"),
    ("finetune --data.dataset_name_or_path {pairs}", "model_config_kwargs"),
    ("{new} --data.dataset_name_or_path no.jsonl", "no.jsonl"), ("{new} --trainer.devices 2", "trainer.devices"),
    ("{new} --trainer.limit_train_batches 1.5", "limit_train_batches"), ("{new} --trainer.limit_val_batches 0", "limit_val_batches=0"),
    ("{new} --trainer.max_steps 0", "max_steps=0"), ("{new} --trainer.accumulate_grad_batches 0", "accumulate_grad_batches=0"),
    ("{new} --model.optimizer_kwargs.weight_decay 0.1", "weight_decay=0.1"), ("{new} --model.freeze 99", "freeze"),
    ("{new} --model.matryoshka_dims '[64]'", "matryoshka_dims"), ("{new} --data.max_sequence_length 10000", "max_sequence_length=10000"),
    ("{new} --model.parameter_overrides '*.nothing: {{lr: 1.0}}'", "nothing"),
    ("{new} --model.model_config_kwargs null --model.pretrained_model_name_or_path {run} --run.output {run} --overwrite", "--overwrite"),
]  # fmt: skip


@pytest.mark.parametrize("line, part", MISTAKES)
def test_a_mistake_is_one_line_that_names_it(folder, capsys, monkeypatch, tmp_path, line, part):
    monkeypatch.chdir(tmp_path)
    paths = {"run": folder / "run", "texts": folder / "texts", "pairs": folder / "pairs.jsonl",
             "new": f"finetune --config {folder / 'embed.yaml'} --run.output new"}  # fmt: skip
    if line.startswith("mine"):
        pytest.importorskip("sentence_transformers")
    assert part in refuse(capsys, *shlex.split(line.format(**paths)))
    assert not list(tmp_path.iterdir()) and not list((folder / "texts").glob("v*"))


def test_one_of_several_processes_is_refused(folder, capsys, monkeypatch, tmp_path):
    launched = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert "torchrun has started 2" in refuse(capsys, *finetune_words(folder, tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_the_family_lists_its_commands(capsys):
    printed = succeed(capsys, "--help")
    assert all(name in printed for name in COMMANDS if name.startswith("embed "))
    assert main(["embed"]) == 2 and main(["embed", "serach", "x"]) == 2
    assert "embed search" in capsys.readouterr().err


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_reranker_orders_the_hits_of_a_search(folder, capsys, reranker, hybrid):
    words = ["--as_json", "--reranker", reranker, "--top_k", "4", "--rerank_k", "9"]
    words += ["--hybrid"] * hybrid
    printed = succeed(capsys, "search", folder / "run", folder / "texts", "alpha beta", *words)
    hits = hits_of(printed)
    rows = [{"text": "alpha beta", "text_pair": hit["text"]} for hit in hits]
    scores = load_predictor(reranker).scores(rows, text_column=["text", "text_pair"])
    assert len(hits) == 4 and [hit["score"] for hit in hits] == pytest.approx(scores, abs=1e-5)
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("module, words", [
    ("sentence_transformers", "mine {pairs} {run}"), ("mteb", "evaluate {run} --mteb NFCorpus"),
])  # fmt: skip
def test_a_missing_extra_is_one_line(module, words, folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    paths = {"run": folder / "run", "pairs": folder / "pairs.jsonl"}
    assert "[embeddings]" in refuse(capsys, *shlex.split(words.format(**paths)))


def test_mined_negatives_are_trained_on_with_a_teacher(folder, capsys, reranker, tmp_path):
    pytest.importorskip("sentence_transformers")
    words = ["--output", tmp_path / "mined.jsonl", "--num_negatives", "2"]
    words += ["--cross_encoder", reranker, "--max_score", "9"]
    printed = succeed(capsys, "mine", folder / "pairs.jsonl", folder / "run", *words)
    rows = hits_of((tmp_path / "mined.jsonl").read_text())
    assert len(rows) == 120 and "120 pairs, 240 negatives" in printed
    assert all(row["positive"] not in (row["negative_1"], row["negative_2"]) for row in rows)
    assert "already exists" in refuse(
        capsys, "mine", folder / "pairs.jsonl", folder / "run", *words
    )
    labeled = [*words, "--labeled", "--output", tmp_path / "labeled.jsonl"]
    succeed(capsys, "mine", folder / "pairs.jsonl", folder / "run", *labeled)
    labels = [row["label"] for row in hits_of((tmp_path / "labeled.jsonl").read_text())]
    assert labels == [1, 0, 0] * 120
    words = ["--trainer.max_steps", "1", "--data.dataset_name_or_path", tmp_path / "mined.jsonl"]
    words += ["--data.teacher", reranker]
    assert "model.distillation" in refuse(capsys, *finetune_words(folder, tmp_path / "new", *words))
    words += ["--model.distillation", "margin_mse"]
    assert "2 negatives a pair" in succeed(
        capsys, *finetune_words(folder, tmp_path / "new", *words)
    )
    assert "val_distillation" in json.loads((tmp_path / "new/metrics.json").read_text())
