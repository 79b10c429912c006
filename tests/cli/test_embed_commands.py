"`bertlab embed`: from a table of pairs to an answer, resumable, with one line for every mistake."

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from embedding_cases import WORDS, draw_pairs, small_config, small_tokenizer

from bertlab.cli.embed import load_bi_encoder
from bertlab.cli.main import main
from bertlab.cli.commands import COMMANDS
from bertlab.embeddings.bi_encoder import BiEncoder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    "A folder with pairs, texts, a configuration, and the model that was trained by it."
    place = tmp_path_factory.mktemp("embed")
    pairs = draw_pairs(120)
    rows = [{"query": q, "positive": p} for q, p in zip(pairs.queries, pairs.positives)]
    (place / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (place / "texts").mkdir()
    (place / "texts/a.txt").write_text("\n".join(pairs.positives))
    small_tokenizer().save_pretrained(place / "tokenizer")
    config = {
        "model": {"model_config_kwargs": {k: v for k, v in small_config().items() if k.startswith(("hidden_size", "inter", "num_"))},
                  "pretrained_tokenizer_name_or_path": str(place / "tokenizer"), "learning_rate": 3e-3, "gradcache_rows": 4},
        "data": {"dataset_name_or_path": str(place / "pairs.jsonl"), "max_sequence_length": 16, "train_batch_size": 16},
        "trainer": {"max_steps": 8}, "run": {"output": str(place / "run"), "progress": "none"},
    }  # fmt: skip
    (place / "embed.yaml").write_text(yaml.safe_dump(config))
    assert main(["embed", "finetune", "--config", str(place / "embed.yaml")]) == 0
    return place


def run(capsys, *words):
    status = main(["embed", *map(str, words)])
    found = capsys.readouterr()
    return status, found.out, found.err


def test_a_run_leaves_a_model_its_configuration_and_its_numbers(place):
    numbers = json.loads((place / "run/metrics.json").read_text())
    assert {"val_loss", "val_mrr", "val_recall_10", "train_loss"} <= numbers.keys()
    assert yaml.safe_load((place / "run/run.yaml").read_text())["trainer"]["max_steps"] == 8
    assert {"modules.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in (place / "run").iterdir()
    }


def test_a_finished_run_resumes_further_and_is_not_overwritten_by_accident(place, capsys, tmp_path):
    config = str(place / "embed.yaml")
    status, _, error = run(capsys, "finetune", "--config", config)
    assert status == 2 and "already holds a run" in error and error.count("\n") == 1
    output = tmp_path / "again"
    assert (
        run(
            capsys,
            "finetune",
            "--config",
            config,
            "--run.output",
            output,
            "--trainer.max_steps",
            "4",
        )[0]
        == 0
    )
    first = json.loads((output / "metrics.json").read_text())
    status, _, error = run(capsys, "finetune", "--resume", output, "--trainer.max_steps", "8")
    assert status == 0, error
    assert json.loads((output / "metrics.json").read_text())["val_loss"] != first["val_loss"]


@pytest.mark.parametrize(
    "limit, steps",
    [(None, 1), ("1h", 3)],
)
def test_a_run_ends_with_the_budget_of_its_schedule_or_a_limit(
    place, capsys, tmp_path, limit, steps
):
    clock = ["--model.schedule", "time_budget", "--model.scheduler_kwargs", "{budget: 0.001s}", "--trainer.max_steps", "3",
             *([] if limit is None else ["--run.time_limit", limit])]  # fmt: skip
    status, told, error = run(
        capsys,
        "finetune",
        "--config",
        place / "embed.yaml",
        "--run.output",
        tmp_path / "timed",
        *clock,
    )
    assert status == 0, error
    kept = [int(path.stem[5:]) for path in (tmp_path / "timed").glob("checkpoints/*.ckpt")]
    assert kept == [steps] * (steps > 0) and (tmp_path / "timed" / "model.safetensors").exists()


def test_a_run_does_not_begin_anew_where_its_checkpoint_is_damaged(place, capsys, tmp_path):
    shutil.copytree(place / "run", tmp_path / "run")
    (path,) = (tmp_path / "run/checkpoints").iterdir()
    path.write_bytes(path.read_bytes()[:-30])
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    status, _, error = run(
        capsys, "finetune", "--resume", tmp_path / "run", "--trainer.max_steps", "12"
    )
    assert status == 2 and str(path) in error and "Traceback" not in error
    assert before == {
        path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()
    }


def test_a_run_does_not_go_on_with_other_pairs_or_past_its_end(place, capsys, tmp_path):
    output, pairs = tmp_path / "run", tmp_path / "pairs.jsonl"
    pairs.write_text((place / "pairs.jsonl").read_text())
    words = ["finetune", "--config", place / "embed.yaml", "--run.output", output, "--data.dataset_name_or_path", pairs,
             "--trainer.max_steps", "4"]  # fmt: skip
    assert run(capsys, *words)[0] == 0
    status, _, error = run(capsys, "finetune", "--resume", output, "--trainer.max_steps", "4")
    assert status == 2 and "max_steps=4 is already passed" in error
    kept = (output / "model.safetensors").read_bytes()
    pairs.write_text("\n".join(pairs.read_text().splitlines()[::-1]))
    status, _, error = run(capsys, "finetune", "--resume", output, "--trainer.max_steps", "8")
    assert status == 2 and "training pairs" in error and error.count("\n") == 1
    assert (output / "model.safetensors").read_bytes() == kept


@pytest.mark.parametrize(
    "words, said",
    [
        (("--model.pooling", "cls"), "pooling is 'mean' there and 'cls' here"),
        (("--data.shuffle_train", "false"), "shuffle is True there and False here"),
    ],
)
def test_a_run_does_not_go_on_with_another_pooling_or_order(place, capsys, words, said):
    kept = (place / "run/1_Pooling/config.json").read_bytes()
    status, _, error = run(
        capsys, "finetune", "--resume", place / "run", "--trainer.max_steps", "12", *words
    )
    assert status == 2 and said in error and error.count("\n") == 1
    assert (place / "run/1_Pooling/config.json").read_bytes() == kept


@pytest.mark.parametrize(
    "norm, how", [("layer", ": load it with"), ("rms", ": import bertlab, then load it with")]
)
def test_the_last_line_says_how_the_model_is_loaded(place, capsys, tmp_path, norm, how):
    shape = {
        k: v for k, v in small_config().items() if k.startswith(("hidden_size", "inter", "num_"))
    }
    status, said, error = run(capsys, "finetune", "--config", place / "embed.yaml", "--run.output", tmp_path / "new", "--trainer.max_steps", "1",
                              "--model.model_config_kwargs", json.dumps({**shape, "norm": norm}))  # fmt: skip
    assert (
        status == 0 and f"{how} SentenceTransformer('{tmp_path / 'new'}')" in said.splitlines()[-1]
    ), error


@pytest.mark.parametrize("output", ["v.npy", "v.parquet"])
def test_texts_become_vectors_in_a_file(place, capsys, tmp_path, output):
    status, said, error = run(
        capsys,
        "encode",
        place / "run",
        place / "texts",
        "--output",
        tmp_path / output,
        "--width",
        "8",
    )
    assert status == 0 and "120 texts" in said, error
    if output == "v.npy":
        assert np.load(tmp_path / output).shape == (120, 8)
    status, _, error = run(
        capsys, "encode", place / "run", place / "texts", "--output", tmp_path / output
    )
    assert status == 2 and "exists" in error


@pytest.mark.parametrize(
    "output, became", [("v.npy", "which have rows of zeros"), ("v.parquet", "left out")]
)
def test_blank_texts_are_counted_at_the_end(place, capsys, tmp_path, output, became):
    (tmp_path / "some.txt").write_text("alpha beta\n\ngamma\n" + "delta\n" * 40)
    status, said, error = run(
        capsys, "encode", place / "run", tmp_path / "some.txt", "--output", tmp_path / output
    )
    assert status == 0 and "42 texts" in said and f"1 blank texts, {became}" in said, error
    if output == "v.npy":
        assert np.flatnonzero(~np.load(tmp_path / output).any(1)).tolist() == [1], (
            "as the file's second line"
        )


@pytest.mark.parametrize("indexed", [True, False])
def test_a_query_finds_its_text_in_an_index_and_in_a_folder(place, capsys, tmp_path, indexed):
    where = place / "texts"
    if indexed:
        where = tmp_path / "index"
        assert run(capsys, "encode", place / "run", place / "texts", "--output", where)[0] == 0
    query = (place / "texts/a.txt").read_text().splitlines()[7]
    status, said, error = run(
        capsys, "search", place / "run", where, query, "--top_k", "2", "--as_json"
    )
    assert status == 0, error
    hits = [json.loads(line) for line in said.splitlines()]
    assert hits[0]["text"] == query and hits[0]["source"] == "a.txt:8" and len(hits) == 2
    assert hits[0]["score"] == pytest.approx(1, abs=1e-4)


def test_paths_may_begin_at_the_home_directory(place, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(place / "run", tmp_path / "model")
    status, said, error = run(capsys, "encode", "~/model", place / "texts", "--output=~/index")
    assert status == 0 and (tmp_path / "index/store.json").exists(), error
    assert run(capsys, "search", "~/model", "~/index", "alpha")[0] == 0
    assert (
        run(
            capsys,
            "evaluate",
            "~/model",
            "--data",
            place / "pairs.jsonl",
            "--baselines",
            "false",
            "--output",
            "~/numbers.json",
        )[0]
        == 0
    )
    assert (tmp_path / "numbers.json").exists()


def test_malformed_rows_are_left_out_and_counted_where_that_is_asked(place, capsys, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "alpha beta"}\n{"text":\n{"text": "gamma"}\n')
    words = place / "run", tmp_path / "bad.jsonl"
    status, _, error = run(capsys, "encode", *words, "--output", tmp_path / "v.npy")
    assert status == 2 and "line 2" in error
    status, said, error = run(
        capsys, "encode", *words, "--output", tmp_path / "v.npy", "--on_error", "skip"
    )
    assert status == 0 and "2 texts" in said and "1 malformed rows, left out" in said, error
    status, said, error = run(
        capsys, "search", *words, "alpha beta", "--on_error", "skip", "--as_json"
    )
    assert (
        status == 0
        and len([json.loads(line) for line in said.splitlines()]) == 2
        and "1 malformed rows" in error
    )
    (tmp_path / "bare.csv").write_text("alpha beta,x\ngamma,y\n")
    status, said, error = run(capsys, "search", place / "run", tmp_path / "bare.csv", "gamma", "--header", "false", "--text_column", "1",
                              "--top_k", "1", "--as_json")  # fmt: skip
    assert status == 0 and json.loads(said)["text"] == "gamma", error


def test_prompts_of_a_model_stand_before_texts_and_queries_and_are_named(place, capsys, tmp_path):
    shutil.copytree(place / "run", tmp_path / "model")
    path = tmp_path / "model/config_sentence_transformers.json"
    prompts = {"query": "alpha beta: ", "passage": "gamma: "}
    path.write_text(json.dumps({**json.loads(path.read_text()), "prompts": prompts}))
    status, said, error = run(
        capsys, "encode", tmp_path / "model", place / "texts", "--output", tmp_path / "index"
    )
    assert status == 0 and "the model's prompt 'gamma: '" in said, error
    for side, expected in (
        ("query", "prompt 'alpha beta: ' (otherwise: --prompt document or --prompt none)"),
        ("none", ""),
    ):
        status, said, error = run(
            capsys,
            "encode",
            tmp_path / "model",
            place / "texts",
            "--output",
            tmp_path / f"{side}.npy",
            "--prompt",
            side,
        )
        assert status == 0 and expected in said and ("before each" in said) == (side == "query"), (
            error
        )
    status, _, error = run(
        capsys, "encode", tmp_path / "model", place / "texts", "--prompt", "passage"
    )
    assert status == 2 and "passage" in error
    status, said, error = run(capsys, "encode", place / "run", place / "texts", "--output", tmp_path / "none.npy", "--prompt", "query",
                              "--overwrite")  # fmt: skip
    assert status == 0 and "the model has no prompt for queries" in said, error
    for where in (tmp_path / "index", place / "texts"):
        status, said, error = run(
            capsys, "search", tmp_path / "model", where, "red house", "--as_json", "--top_k", "1"
        )
        assert status == 0, error
        hit, plain = json.loads(said), load_bi_encoder(str(place / "run"))
        one, two = plain.encode(["alpha beta: red house", "gamma: " + hit["text"]])
        assert hit["score"] == pytest.approx(float(one @ two), abs=1e-4)


def test_a_comparison_that_is_not_computed_is_refused_before_anything_is_encoded(
    place, capsys, tmp_path
):
    shutil.copytree(place / "run", tmp_path / "model")
    path = tmp_path / "model/config_sentence_transformers.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "similarity_fn_name": "manhattan"}))
    for words in (
        ("search", tmp_path / "model", place / "texts", "x"),
        ("evaluate", tmp_path / "model", "--data", place / "pairs.jsonl"),
    ):
        status, _, error = run(capsys, *words)
        assert status == 2 and "'manhattan'" in error and error.count("\n") == 1


def test_an_index_is_searched_as_it_was_encoded(place, capsys, tmp_path):
    words = ["--max_sequence_length", "4", "--pooling", "cls"]
    assert (
        run(
            capsys, "encode", place / "run", place / "texts", "--output", tmp_path / "index", *words
        )[0]
        == 0
    )
    query = (place / "texts/a.txt").read_text().splitlines()[7]
    status, said, error = run(
        capsys, "search", place / "run", tmp_path / "index", query, "--as_json"
    )
    assert status == 0, error
    best = [hit for hit in map(json.loads, said.splitlines()) if hit["score"] > 1 - 1e-4]
    assert query in [hit["text"] for hit in best]


def test_an_evaluation_has_the_baselines_in_its_table(place, capsys, tmp_path):
    status, said, error = run(capsys, "evaluate", place / "run", "--data", place / "pairs.jsonl",
                              "--output", tmp_path / "numbers.json")  # fmt: skip
    assert status == 0, error
    numbers = json.loads((tmp_path / "numbers.json").read_text())["data"]
    assert list(numbers) == ["model", "BM25", "TF-IDF", "mean of word vectors"]
    assert all(low <= mean <= high for one in numbers.values() for mean, low, high in one.values())
    assert "BM25" in said


SMALL = {
    "one": [("where is the red house", "the house is in the north")],
    "three": [("red house", "a house in the north"), ("blue door", "the door of it"), ("who", "nobody at all")],
    "unspaced": [("红色房子", "北方的房子"), ("蓝色的门", "它的门"), ("谁", "没有人")],
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_an_evaluation_on_few_pairs_has_its_baselines(place, capsys, tmp_path, name):
    (tmp_path / "few.jsonl").write_text(
        "\n".join(json.dumps({"query": q, "positive": p}) for q, p in SMALL[name])
    )
    status, said, error = run(capsys, "evaluate", place / "run", "--data", tmp_path / "few.jsonl")
    assert status == 0, error
    rows = [line.split("  ")[0] for line in said.splitlines()[2:]]
    assert rows == ["model", "BM25", "TF-IDF", "mean of word vectors"]


@pytest.mark.parametrize("words", [("encode", "{texts}", "--output", "v.npy"), ("search", "{texts}", "x"),
                                   ("evaluate", "--data", "{pairs}", "--baselines", "false")])  # fmt: skip
def test_a_model_may_be_named_as_the_hub_names_it(place, capsys, monkeypatch, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    load, asked = BiEncoder.load, []

    def load_from_hub(name, **options):
        asked.append(name)
        return load(place / "run", **options)

    monkeypatch.setattr(BiEncoder, "load", load_from_hub)
    named = {"texts": place / "texts", "pairs": place / "pairs.jsonl"}
    command, *rest = (word.format(**named) for word in words)
    status, _, error = run(capsys, command, "somebody/vectors", *rest)
    assert status == 0 and asked == ["somebody/vectors"], error


MISTAKES = {
    "no model": (("search", "./no/model", "{texts}", "x"), "./no/model"),
    "no place": (("search", "{run}", "no/folder", "x"), "no/folder"),
    "no query": (("search", "{run}", "{texts}", ""), "queries"),
    "no pairs": (("finetune", "--model.model_config_kwargs", "{{}}", "--run.output", "new", "--model.pretrained_tokenizer_name_or_path",
                  "{tokenizer}", "--data.dataset_name_or_path", "no.jsonl"), "no.jsonl"),
    "nothing to start from": (("finetune", "--data.dataset_name_or_path", "{pairs}", "--run.output", "new"), "model_config_kwargs"),
    "two processes": (("finetune", "--config", "{config}", "--run.output", "new", "--trainer.devices", "2"), "trainer.devices"),
    "two machines": (("finetune", "--config", "{config}", "--run.output", "new", "--trainer.num_nodes", "2"), "num_nodes make 2"),
    "half a batch too many": (("finetune", "--config", "{config}", "--run.output", "new", "--trainer.limit_train_batches", "1.5"),
                              "limit_train_batches"),
    "no batch a step": (("finetune", "--config", "{config}", "--run.output", "new", "--trainer.accumulate_grad_batches", "0"),
                        "accumulate_grad_batches=0"),
    "no validation batch": (("finetune", "--config", "{config}", "--run.output", "new", "--trainer.limit_val_batches", "0"),
                            "limit_val_batches=0"),
    "a decay among other options": (("finetune", "--config", "{config}", "--run.output", "new", "--model.optimizer_kwargs",
                                     "{{weight_decay: 0.1}}"), "weight_decay=0.1"),
    "more blocks than there are": (("finetune", "--config", "{config}", "--run.output", "new", "--model.freeze", "99"), "freeze"),
    "a prefix that is none": (("finetune", "--config", "{config}", "--run.output", "new", "--model.matryoshka_dims", "[64]"), "matryoshka_dims"),
    "texts that are too long": (("finetune", "--config", "{config}", "--run.output", "new", "--data.max_sequence_length", "10000"),
                                "max_sequence_length=10000"),
    "overrides of nothing": (("finetune", "--config", "{config}", "--run.output", "new", "--model.parameter_overrides",
                              "{{'*.nothing': {{lr: 1.0}}}}"), "nothing"),
    "an adapter of nothing": (("finetune", "--model.pretrained_model_name_or_path", "{run}", "--data.dataset_name_or_path", "{pairs}",
                               "--run.output", "new", "--model.adapter", "{{type: lora, target_modules: [nothing]}}"), "nothing"),
    "an unknown flag": (("encode", "{run}", "{texts}", "--widht", "3"), "width"),
    "an unknown task": (("evaluate", "{run}", "--task", "docstrings"), "docstring"),
    "a table as output": (("evaluate", "{run}", "--data", "{pairs}", "--output", "{pairs}"), "already exists"),
    "no hits": (("search", "{run}", "no/folder", "x", "--top_k", "0"), "top_k"),
    "no such command": (("serach", "x"), "search"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_that_names_it(place, capsys, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words, expected = MISTAKES[name]
    named = {"run": place / "run", "texts": place / "texts", "pairs": place / "pairs.jsonl", "tokenizer": place / "tokenizer",
             "config": place / "embed.yaml"}  # fmt: skip
    status, _, error = run(capsys, *(word.format(**named) for word in words))
    assert status == 2 and expected in error
    assert name == "no such command" or error.count("\n") == 1, error
    assert not list(tmp_path.iterdir())


def test_one_of_several_processes_of_a_launcher_is_refused(place, capsys, monkeypatch, tmp_path):
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    status, _, error = run(
        capsys, "finetune", "--config", place / "embed.yaml", "--run.output", tmp_path / "new"
    )
    assert status == 2 and "torchrun has started 2" in error and not (tmp_path / "new").exists()


def test_the_family_lists_its_commands(capsys):
    status, said, _ = run(capsys, "--help")
    assert status == 0 and all(name in said for name in COMMANDS if name.startswith("embed "))
    assert main(["embed"]) == 2
    assert len(WORDS) > 20


def test_what_would_be_read_as_text_or_moved_aside_is_refused_before_work(place, capsys, tmp_path):
    status, _, error = run(
        capsys, "encode", place / "run", place / "texts", "--output", place / "texts/vectors.npy"
    )
    assert status == 2 and "is inside of" in error and not list((place / "texts").glob("*vectors*"))
    config = str(place / "embed.yaml")
    status, _, error = run(capsys, "finetune", "--config", config, "--overwrite", "--model.model_config_kwargs", "null",
                           "--model.pretrained_model_name_or_path", place / "run")  # fmt: skip
    assert (
        status == 2
        and "--overwrite would move it aside" in error
        and (place / "run/config.json").exists()
    )


@pytest.mark.parametrize("there, taken", [(["cuda", "mps"], "cuda"), (["mps"], "mps"), ([], "cpu")])
def test_a_model_goes_to_the_device_that_training_would_take(monkeypatch, there, taken):
    monkeypatch.setattr("bertlab.cli.embed.num_devices", lambda kind: int(kind in [*there, "cpu"]))
    monkeypatch.setattr(
        BiEncoder, "load", lambda *_, **__: SimpleNamespace(to=lambda device: device)
    )
    assert load_bi_encoder("someone/some-model") == taken


def test_no_steps_are_no_training(place, capsys, tmp_path):
    words = [
        "finetune",
        "--config",
        place / "embed.yaml",
        "--run.output",
        tmp_path / "new",
        "--trainer.max_steps",
        "0",
    ]
    status, _, error = run(capsys, *words)
    assert status == 2 and "max_steps=0" in error and error.count("\n") == 1


def test_a_reranker_orders_the_hits_of_a_search(place, capsys, tmp_path):
    from bertlab.finetuning.models import save_predictor
    from bertlab.finetuning.predictions import load_predictor
    from bertlab.model.config import BertLabConfig
    from bertlab.model.task_heads import BertLabForSequenceClassification

    torch.manual_seed(0)
    config = BertLabConfig(**small_config(), num_labels=1, problem_type="regression")
    model = BertLabForSequenceClassification(config)
    save_predictor(model, tmp_path / "pairs", small_tokenizer())
    words = (
        "search",
        place / "run",
        place / "texts",
        "alpha beta",
        "--as_json",
        "--reranker",
        tmp_path / "pairs",
    )
    status, said, error = run(capsys, *words, "--top_k", "4", "--rerank_k", "9")
    assert status == 0, error
    hits = [json.loads(line) for line in said.splitlines()]
    rows = [{"text": "alpha beta", "text_pair": hit["text"]} for hit in hits]
    scores = load_predictor(tmp_path / "pairs").scores(rows, text_column=["text", "text_pair"])
    assert len(hits) == 4 and [hit["score"] for hit in hits] == pytest.approx(scores, abs=1e-5)
    assert scores == sorted(scores, reverse=True)


def test_mined_negatives_are_written_as_a_table(place, capsys, tmp_path):
    pytest.importorskip("sentence_transformers")
    output = tmp_path / "mined.jsonl"
    words = "mine", place / "pairs.jsonl", place / "run", "--output", output, "--num_negatives", "2"
    status, _, error = run(capsys, *words)
    assert status == 0, error
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert rows and all(1 <= len(row["negative"]) <= 2 for row in rows)
    assert all(row["positive"] not in row["negative"] for row in rows)
