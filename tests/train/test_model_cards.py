"A card shows the scores of its own weights; a push is one commit, here to a local stand-in for the hub."

import base64
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants
from programs import Ended, bertlab

from bertlab.cli.main import main
from bertlab.core.serialization import load_yaml, save_run_file
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.config import modernbert_tiny
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model
from bertlab.train.model_cards import (
    SENTENCE_TRANSFORMERS_FILES,
    CardConfig,
    check_card,
    estimate_energy,
    make_card,
    push_model,
    write_card,
)


@pytest.fixture()
def run(tmp_path):
    "A run with one model, as `bertlab pretrain` leaves it."
    tokenizer = train_tokenizer(["the cat sat on the mat"] * 3, 60)
    torch.manual_seed(0)
    model = BertLabForMaskedLM(modernbert_tiny(
        vocab_size=len(tokenizer), hidden_size=16, num_attention_heads=2, intermediate_size=24, num_hidden_layers=1,
        max_position_embeddings=32, local_attention=8))  # fmt: skip
    best = tmp_path / "my-run" / "models" / "best"
    best.mkdir(parents=True)
    save_model(model, tokenizer, best)
    (best / "trainer_state.json").write_text('{"global_step": 10, "best_metric": 2.5}')
    (tmp_path / "my-run" / "run.yaml").write_text(yaml.safe_dump({
        "data": {"train_dataset_name_or_path": "poems/"}, "trainer": {"devices": 2, "max_steps": 10},
        "record": {"device": "NVIDIA H100 80GB HBM3, 79.1 GiB; bf16-mixed"}}))  # fmt: skip
    (tmp_path / "my-run" / "metrics.json").write_text(
        json.dumps(
            {
                "val_loss": 2.5,
                "val_bits_per_byte": 1.5,
                "tokens": 12345,
                "train_seconds": 3600.0,
                "unigram_entropy": 4.25,
            }
        )
    )
    return tmp_path / "my-run"


def model_of(run):
    return run / "models" / "best"


def change(path, **entries):
    "Update a file of JSON or YAML."
    content = yaml.safe_load(path.read_text())
    path.write_text(json.dumps({**content, **entries}))  # JSON is YAML


def scores(card):
    return {result.metric_type: result.metric_value for result in ModelCard(card).data.eval_results}


def test_a_card_has_data_recipe_scores_limits_and_energy(run):
    choices = CardConfig(name="Cats", license="mit", language=["en", "de"], base_model="some/model")
    card = make_card(model_of(run), choices)
    # 1.58 x 2 devices x 0.7 kW x 1 h
    for text in (
        "poems/",
        "ignore the input: 4.25",
        "12,345",
        "max_steps: 10",
        "H100",
        "1.00 h",
        "2.21 kWh",
        "## Limits",
    ):
        assert text in card, text
    data = ModelCard(card).data
    assert (data.pipeline_tag, data.library_name) == ("fill-mask", "transformers")
    assert (data.model_name, data.license, data.base_model) == ("Cats", "mit", "some/model")
    assert scores(card) == {"loss": 2.5, "bits_per_byte": 1.5}
    assert check_card(card)["language"] == ["en", "de"]


def test_a_card_names_no_absolute_path(run):
    change(run / "run.yaml", data={"train_dataset_name_or_path": "/data/secret/poems.txt"})
    card = make_card(model_of(run))
    assert "poems.txt" in card and "/data" not in card and "secret" not in card


def test_a_relative_path_that_is_gone_is_no_hub_name(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models", "mine").mkdir(parents=True)
    config = load_yaml(run / "run.yaml")
    config["model"] = {**config.get("model", {}), "pretrained_model_name_or_path": "models/mine"}
    save_run_file(run, config)
    shutil.rmtree("models")
    assert ModelCard(make_card(model_of(run))).data.base_model is None


@pytest.mark.parametrize(
    "trainer, metrics, devices",
    [
        ({"num_nodes": 3, "devices": 2}, {}, 6),
        ({"num_nodes": 3, "devices": "auto"}, {"devices": 24}, 24),
    ],
)
def test_energy_counts_the_devices_of_all_nodes(run, trainer, metrics, devices):
    change(run / "run.yaml", trainer=trainer)
    change(run / "metrics.json", **metrics)
    assert f"- devices: {devices}\n" in make_card(model_of(run))


@pytest.mark.parametrize("device, watts, kwh", [
    ("NVIDIA H100 80GB HBM3", None, 1.106), ("NVIDIA H100 PCIe", None, 0.553), ("Tesla V100-SXM2-16GB", None, 0.474),
    ("some CPU", None, None), ("some CPU", 100, 0.158),
])  # fmt: skip
def test_energy_is_power_times_time_times_overhead(device, watts, kwh):
    energy = estimate_energy(device, 3600, watts=watts)
    assert energy is None if kwh is None else energy == pytest.approx(kwh)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "2.5", True])
def test_only_finite_numbers_are_scores(run, value):
    (run / "metrics.json").write_text(json.dumps({"val_loss": value}))
    assert "model-index" not in make_card(model_of(run))


def test_a_model_without_its_run_is_mostly_unknown(run, tmp_path):
    alone = shutil.copytree(model_of(run), tmp_path / "elsewhere" / "a" / "b")
    assert make_card(alone).count("unknown") >= 4


def test_an_earlier_checkpoint_shows_its_own_loss_alone(run):
    change(run / "metrics.json", steps=20, tokens=2000, val_loss=9.0)
    card = make_card(model_of(run))
    assert scores(card) == {"loss": 2.5}
    assert "step: 10 of 20" in card and "tokens seen: unknown" in card
    change(run / "metrics.json", steps=10, validated_step=8)
    assert scores(make_card(model_of(run))) == {"loss": 2.5}


def test_a_derived_model_has_none_of_the_scores_of_its_run(run):
    for name in ("mean", "long"):
        shutil.copytree(model_of(run), run / name, ignore=lambda *_: ["trainer_state.json"])
    note = {"average_of": ["/data/me/my-run/models/step-10", "step-20"]}
    (run / "mean" / "average.json").write_text(json.dumps(note))
    for name in ("mean", "long"):
        card = make_card(run / name)
        assert f"# my-run-{name}\n" in card and "poems/" in card and "/data/me" not in card
        assert "model-index" not in card
    assert "average of: step-10, step-20" in make_card(run / "mean")
    change(run / "mean" / "average.json", monitor="val_accuracy", value=0.75)
    assert scores(make_card(run / "mean")) == {"accuracy": 0.75}


def test_the_demos_metrics_are_read(run):
    (run / "metrics.json").write_text(json.dumps({"validation_loss": 2.25}))
    (run / "run.yaml").write_text(
        json.dumps({"command": "demo", "record": {"corpus": "python-docs"}})
    )
    card = make_card(model_of(run))
    assert scores(card) == {"loss": 2.25} and "text: python-docs" in card


# ---- fine-tuning: several seeds and splits --------------------------------------------------------


def write_seeds(run, monitor, runs, **entries):
    "metrics.json as `bertlab finetune` writes it, of seeds 7, 8, ..."
    seeds = [7 + index for index in range(len(runs))]
    content = {"monitor": monitor, "seeds": seeds, "runs": runs, "best_seed": seeds[-1]}
    (run / "metrics.json").write_text(json.dumps(content | entries))
    (run / "run.yaml").write_text(json.dumps({
        "command": "finetune", "data": {"dataset_name_or_path": "patients.csv"},
        "model": {"pretrained_model_name_or_path": "my-run"}}))  # fmt: skip


def test_a_finetuned_card_shows_the_seed_that_was_saved(run):
    write_seeds(run, "val_accuracy", [{"val_accuracy": 0.5}, {"val_accuracy": 0.75}],
                mean={"val_accuracy": 0.625}, deviation={"val_accuracy": 0.18})  # fmt: skip
    card = make_card(model_of(run))
    assert scores(card) == {"accuracy": 0.75}
    assert "mean of 2 seeds 0.625, standard deviation 0.18" in card and "seed 8" in card
    assert "patients.csv" in card and "initialized from: my-run" in card


def test_the_test_split_is_shown_where_there_is_one(run):
    metrics = {"val_accuracy": 0.9, "test_accuracy": 0.75, "val_loss": 0.2, "test_loss": 0.5}
    write_seeds(run, "val_accuracy", [metrics])
    card = make_card(model_of(run))
    assert scores(card) == {"accuracy": 0.75, "loss": 0.5} and "test split" in card
    assert {result.dataset_split for result in ModelCard(card).data.eval_results} == {"test"}


def test_the_monitored_metric_is_always_shown(run):
    write_seeds(run, "val_f1_micro", [{"val_loss": 1.0, "val_f1_micro": 0.5}])
    assert scores(make_card(model_of(run))) == {"loss": 1.0, "f1_micro": 0.5}


def test_a_regression_loss_is_a_squared_error(run):
    change(model_of(run) / "config.json", problem_type="regression")
    write_seeds(run, "val_spearman", [{"val_loss": 3.0, "val_spearman": 0.5}])
    card = make_card(model_of(run))
    assert "squared error: 3\n" in card and "nats" not in card


@pytest.mark.parametrize(
    "damage", [{"best_seed": 3}, {"seeds": None}, {"runs": [None]}, {"runs": []}]
)
def test_metrics_without_the_saved_seed_give_no_scores(run, damage):
    write_seeds(run, "val_accuracy", [{"val_accuracy": 0.5}])
    change(run / "metrics.json", **damage)
    assert "model-index" not in make_card(model_of(run))


# ---- writing and pushing --------------------------------------------------------------------------


def test_a_card_of_text_vectors_names_base_data_and_baselines(run):
    directory = model_of(run)
    (directory / "modules.json").write_text("[]")
    change(run / "run.yaml", command="embed finetune", data={"dataset_name_or_path": "owner/pairs"},
           model={"pretrained_model_name_or_path": "owner/base"})  # fmt: skip
    change(run / "metrics.json", val_mrr=0.5, baselines={"BM25": {"val_mrr": 0.25}})
    text = make_card(directory)
    data = check_card(text)
    assert data["pipeline_tag"] == "sentence-similarity" and data["base_model"] == "owner/base"
    assert (
        data["library_name"] == "sentence-transformers" and "sentence-transformers" in data["tags"]
    )
    assert data["datasets"] == "owner/pairs" and "reciprocal rank of BM25: 0.25" in text
    change(run / "run.yaml", model={"pretrained_model_name_or_path": "/models/of-me/model"})
    assert "base_model" not in check_card(make_card(directory))


def test_power_must_be_positive():
    with pytest.raises(ValueError, match="watts=0"):
        CardConfig(watts=0)


def test_an_existing_card_is_kept_unless_asked(run):
    path = write_card(model_of(run))
    path.write_text("mine")
    with pytest.raises(ValueError, match="README.md exists"):
        write_card(model_of(run))
    assert path.read_text() == "mine"
    assert check_card(write_card(model_of(run), overwrite=True).read_text())


@pytest.mark.parametrize(
    "text", ["mine", "---\nlicense: [mit\n---\n", "---\nmodel-index: 3\n---\n"]
)
def test_a_card_that_the_hub_cannot_read_is_not_pushed(run, text):
    (model_of(run) / "README.md").write_text(text)
    with pytest.raises(ValueError):
        push_model(model_of(run), "me/model", dry_run=True)


def test_card_options_beside_an_existing_card_are_refused(run):
    write_card(model_of(run), CardConfig(license="mit"))
    with pytest.raises(ValueError, match="README.md"):
        push_model(model_of(run), "me/cats", CardConfig(license="apache-2.0"), dry_run=True)
    assert push_model(model_of(run), "me/cats", dry_run=True)["commit"] is None


def test_sentence_transformers_files_are_pushed_and_links_are_not(run, tmp_path):
    directory = model_of(run)
    for name in SENTENCE_TRANSFORMERS_FILES:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("[]" if name == "modules.json" else "{}")
    (tmp_path / "secret.json").write_text("{}")
    (directory / "vocab.json").symlink_to(tmp_path / "secret.json")
    (directory / "1_Pooling").rename(tmp_path / "pooling")
    (directory / "1_Pooling").symlink_to(tmp_path / "pooling")
    files = push_model(directory, "me/cats", dry_run=True)["files"]
    pushed = {name for name in SENTENCE_TRANSFORMERS_FILES if not name.startswith("1_Pooling")}
    assert pushed <= set(files) and not {"vocab.json", "1_Pooling/config.json"} & set(files)
    (directory / "README.md").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ValueError, match="README.md is a link"):
        push_model(directory, "me/cats", dry_run=True)


class Hub(BaseHTTPRequestHandler):
    "The part of the hub's interface that a push uses; it keeps what it receives."

    def log_message(self, *_):
        pass

    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({"error": "not found"}, 404)

    def do_POST(self):
        hub = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.asked.append((self.path, self.headers.get("Authorization")))
        if hub.refuses:
            return self.answer({"error": "you may not"}, 403)
        if self.path == "/api/repos/create":
            return self.answer(
                {
                    "url": f"http://127.0.0.1:{hub.server_port}/me/{json.loads(body)['name']}",
                    "name": json.loads(body)["name"],
                }
            )
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for f in json.loads(body)["files"]]  # fmt: skip
            return self.answer({"files": files})
        if "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            hub.commits.append({line["value"]["path"]: base64.b64decode(line["value"]["content"])
                                for line in lines if line["key"] == "file"})  # fmt: skip
            return self.answer(
                {
                    "success": True,
                    "commitOid": "0" * 40,
                    "hookOutput": "",
                    "commitUrl": f"http://127.0.0.1:{hub.server_port}/me/cats/commit/{'0' * 40}",
                }
            )
        return self.answer({"error": f"unknown path {self.path}"}, 404)


@pytest.fixture()
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.commits, server.refuses = [], [], False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


@pytest.fixture()
def push(hub, monkeypatch, capsys):
    "The command, with the hub's client set to this hub: it reads its settings at import."
    for name, value in {"ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_OFFLINE": False,
                        "HF_HUB_DISABLE_XET": True}.items():  # fmt: skip
        monkeypatch.setattr(constants, name, value)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setenv("HF_ENDPOINT", constants.ENDPOINT)

    def run_push(*words):
        status = main(["push", *map(str, words)])
        printed = capsys.readouterr()
        return Ended(status, printed.out, printed.err)

    return run_push


def test_a_push_is_one_commit_of_the_best_model_and_its_card(run, hub, push):
    change(model_of(run) / "config.json", _name_or_path=str(run / "base"))
    before = json.loads((model_of(run) / "config.json").read_text())
    done = push(run, "me/cats", "--license", "mit", "--language", "en")
    assert done.returncode == 0, done.stderr
    (commit,) = hub.commits
    assert check_card(commit.pop("README.md").decode())["license"] == "mit"
    assert json.loads(commit.pop("config.json")) == {**before, "_name_or_path": "base"}
    assert {"model.safetensors", "tokenizer.json"} <= set(commit)
    for name, content in commit.items():
        assert content == (model_of(run) / name).read_bytes()
    assert all(token == "Bearer hf_test" for path, token in hub.asked if "/commit/" in path)
    size = (model_of(run) / "model.safetensors").stat().st_size
    assert f"{size:,} bytes  model.safetensors" in done.stdout
    assert "/me/cats/commit/" in done.stdout


def test_a_dry_run_sends_nothing_and_a_refusal_is_one_line(run, hub, push):
    done = bertlab("push", run, "me/cats", "--dry_run")  # offline, where each request is an error
    assert done.returncode == 0 and "nothing was sent" in done.stdout
    hub.refuses = True
    done = push(run, "me/cats")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "me/cats" in done.stderr
    assert not hub.commits
