"A card says what is known, refuses what the hub would, and a push is one commit to a stand-in of the hub."

import base64
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData

from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.config import modernbert_tiny
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model
from bertlab.train.model_cards import (
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
            {"val_loss": 2.5, "val_bits_per_byte": 1.5, "tokens": 12345, "train_seconds": 3600.0}
        )
    )
    return tmp_path / "my-run"


def place_of(run):
    return run / "models" / "best"


def test_a_card_holds_data_recipe_measures_limits_machine_and_energy(run):
    text = make_card(
        place_of(run), CardConfig(license="mit", language=["en", "de"], base_model="some/model")
    )
    for said in (
        "poems/",
        "12,345",
        "1.5",
        "max_steps: 10",
        "H100",
        "1.00 h",
        "2.21 kWh",
        "## Limits",
    ):
        assert said in text, said  # 1.58 x 2 devices x 0.7 kW x 1 h
    config = json.loads((place_of(run) / "config.json").read_text())
    assert f"vocabulary: {config['vocab_size']}" in text


def test_energy_is_that_of_all_nodes_and_of_the_devices_that_were_counted(run):
    configuration, metrics = (
        yaml.safe_load((run / "run.yaml").read_text()),
        json.loads((run / "metrics.json").read_text()),
    )
    configuration["trainer"] |= {"num_nodes": 3}
    (run / "run.yaml").write_text(yaml.safe_dump(configuration))
    assert "devices: 6\n" in make_card(place_of(run))
    configuration["trainer"]["devices"] = "auto"  # how many those were, only the run has known
    (run / "run.yaml").write_text(yaml.safe_dump(configuration))
    (run / "metrics.json").write_text(json.dumps({**metrics, "devices": 24}))
    assert "devices: 24\n" in make_card(place_of(run))


def test_a_card_of_an_earlier_step_names_the_tokens_of_that_step_and_the_time_of_the_run(run):
    metrics = json.loads((run / "metrics.json").read_text())
    (run / "metrics.json").write_text(json.dumps({**metrics, "steps": 20, "tokens": 2000}))
    card = make_card(place_of(run))
    assert "weights of step: 10 of 20" in card and "tokens seen: unknown" in card, (
        "2,000 are those of step 20"
    )
    assert (
        "training time of the whole run: 1.00 h" in card
        and "validation and saving come on top" in card
    )
    # Earlier versions wrote the tokens of one process.
    (run / "history.csv").write_text(
        "step,loss,tokens\n5.0,3.0,200.0\n10.0,2.8,600.0\n20.0,2.5,1000.0\n"
    )
    assert "tokens seen: 1,200\n" in make_card(place_of(run))


def test_the_block_goes_through_the_hubs_own_class_and_comes_back(run):
    text = make_card(place_of(run), CardConfig(name="Cats", license="mit"))
    card = ModelCard(text)
    assert isinstance(card.data, ModelCardData)
    assert card.data.pipeline_tag == "fill-mask" and card.data.library_name == "transformers"
    found = {one.metric_type: one.metric_value for one in card.data.eval_results}
    assert found == {"loss": 2.5, "bits_per_byte": 1.5} and card.data.model_name == "Cats"
    assert check_card(text) == yaml.safe_load(card.data.to_yaml())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "2.5"])
def test_what_is_no_finite_number_is_no_measure(run, value):
    (run / "metrics.json").write_text(json.dumps({"val_loss": value}))
    assert "model-index" not in check_card(make_card(place_of(run)))


def test_a_model_without_its_run_says_what_is_unknown(run, tmp_path):
    alone = tmp_path / "elsewhere" / "a" / "b"
    alone.parent.mkdir(parents=True)
    place_of(run).rename(alone)
    assert make_card(alone).count("unknown") >= 4


@pytest.mark.parametrize("device, watts, kwh", [
    ("NVIDIA H100 80GB HBM3", None, 1.106), ("NVIDIA H100 PCIe", None, 0.553), ("Tesla V100-SXM2-16GB", None, 0.474),
    ("some CPU", None, None), ("some CPU", 100, 0.158),
])  # fmt: skip
def test_energy_is_power_times_time_times_overhead(device, watts, kwh):
    got = estimate_energy(device, 3600, watts=watts)
    assert got is None if kwh is None else got == pytest.approx(kwh)


@pytest.mark.parametrize("options, words", [
    ({"language": "English"}, ["language", "English"]), ({"license": "MIT License"}, ["license", "MIT License"]),
    ({"datasets": "my texts"}, ["datasets", "my texts"]), ({"watts": 0}, ["watts", "0"]),
])  # fmt: skip
def test_a_choice_that_the_hub_would_refuse_is_named(options, words):
    with pytest.raises(ValueError) as caught:
        CardConfig(**options)
    assert all(word in str(caught.value) for word in words)


def test_a_card_that_is_there_is_kept_unless_asked(run):
    path = write_card(place_of(run))
    path.write_text("mine")
    with pytest.raises(ValueError, match="README.md is there"):
        write_card(place_of(run))
    assert path.read_text() == "mine"
    with pytest.raises(ValueError, match="must begin with a block"):
        push_model(place_of(run), "me/model", dry_run=True)
    assert write_card(place_of(run), overwrite=True).read_text().startswith("---\n")


class Hub(BaseHTTPRequestHandler):
    "As much of the hub's interface as a push asks for; keeps what it is sent."

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
        return self.answer({"error": f"nobody knows {self.path}"}, 404)


@pytest.fixture()
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.commits, server.refuses = [], [], False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


def push(hub, *words, token="hf_test"):
    "The command in a process of its own, because the hub's client reads its address when it is imported."
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_OFFLINE": "0",
                   "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}  # fmt: skip
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        environment.pop(name, None)
    return subprocess.run([sys.executable, "-m", "bertlab.cli.main", "push", *map(str, words)], env=environment,
                          capture_output=True, text=True, timeout=120)  # fmt: skip


def test_a_push_of_a_run_is_one_commit_that_holds_its_best_model_and_the_card(run, hub):
    done = push(hub, run, "me/cats", "--license", "mit", "--language", "en")
    assert done.returncode == 0, done.stderr
    (commit,) = hub.commits
    there = {path.name: path.read_bytes() for path in place_of(run).iterdir()}
    assert {name: content for name, content in commit.items() if name != "README.md"} == {
        name: there[name] for name in commit if name != "README.md"
    }
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(commit)
    assert check_card(commit["README.md"].decode())["license"] == "mit"
    assert all(token == "Bearer hf_test" for path, token in hub.asked if "/commit/" in path)
    assert "/me/cats/commit/" in done.stdout


def test_a_hub_that_refuses_is_one_sentence_and_a_dry_run_asks_nobody(run, hub):
    done = push(hub, run, "me/cats", "--dry_run")
    assert done.returncode == 0 and not hub.asked and "nothing was sent" in done.stdout
    hub.refuses = True
    done = push(hub, run, "me/cats")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "me/cats" in done.stderr
    assert not hub.commits


def test_what_says_how_a_model_is_used_is_pushed_with_it(run):
    from bertlab.finetuning.task import TASK_FILE
    from bertlab.train.model_directories import SENTENCE_TRANSFORMERS_FILES

    place = place_of(run)
    assert (
        TASK_FILE in SENTENCE_TRANSFORMERS_FILES
        and push_model(place, "me/cats", dry_run=True)["files"].count(TASK_FILE) == 0
    )
    for name in SENTENCE_TRANSFORMERS_FILES:
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("[]" if name == "modules.json" else "{}")
    assert set(SENTENCE_TRANSFORMERS_FILES) <= set(
        push_model(place, "me/cats", dry_run=True)["files"]
    ), "with their folders"


def write_seeds(run, monitor, runs, best_seed=7):
    "metrics.json as `bertlab finetune` leaves it, of seeds 7, 8, ..."
    names = list(runs[0])
    over = lambda how: {name: how([one[name] for one in runs]) for name in names}  # noqa: E731
    (run / "metrics.json").write_text(json.dumps({
        "monitor": monitor, "seeds": [7 + n for n in range(len(runs))], "runs": runs, "best_seed": best_seed,
        "mean": over(statistics.mean), "deviation": over(statistics.stdev) if len(runs) > 1 else {}}))  # fmt: skip


def test_a_card_of_a_finetuned_model_names_its_rows_and_the_numbers_of_the_seed_that_was_written(
    run,
):
    place = place_of(run)
    (run / "run.yaml").write_text(yaml.safe_dump({
        "command": "finetune", "data": {"dataset_name_or_path": "patients.csv"},
        "model": {"pretrained_model_name_or_path": "my-run"}, "run": {"task": None}}))  # fmt: skip
    write_seeds(run, "val_accuracy", [{"val_accuracy": 0.5}, {"val_accuracy": 0.75}], best_seed=8)
    card = make_card(place)
    assert "text: patients.csv" in card and "began with: my-run" in card
    assert (
        "accuracy: 0.75 (mean of 2 seeds 0.625, standard deviation 0.18)" in card
        and "the weights of seed 8" in card
    )
    assert (
        "rows of the validation split, by whose val_accuracy the weights and seed were chosen"
        in card
    )
    assert {one.metric_value for one in ModelCard(card).data.eval_results} == {0.75}
    assert "embedded corpus" not in card
    (run / "run.yaml").write_text(
        yaml.safe_dump(
            {
                "command": "finetune",
                "data": {"dataset_name_or_path": None},
                "run": {"task": "docstring-area"},
            }
        )
    )
    assert "text: docstring-area" in make_card(place)


def test_a_card_of_an_older_step_states_what_was_measured_of_it(run):
    metrics = run / "metrics.json"
    metrics.write_text(
        json.dumps({**json.loads(metrics.read_text()), "steps": 20, "val_loss": 9.0})
    )
    text = make_card(run / "models" / "best")
    assert (
        "weights of step: 10 of 20" in text
        and "nats per label: 2.5" in text
        and "bits per byte" not in text
        and "9.0" not in text
    )
    metrics.write_text(json.dumps({**json.loads(metrics.read_text()), "steps": 10}))
    assert "weights of step" not in make_card(run / "models" / "best")


def test_a_card_does_not_state_a_validation_of_other_weights_than_the_last(run):
    metrics = run / "metrics.json"
    metrics.write_text(
        json.dumps(
            {**json.loads(metrics.read_text()), "steps": 10, "validated_step": 8, "val_loss": 9.0}
        )
    )
    text = make_card(place_of(run))
    assert (
        "nats per label: 2.5" in text
        and "9" not in text[text.index("## Measures") : text.index("## Limits")]
    )
    assert "weights of step" not in text


def test_a_card_of_what_was_made_of_a_run_has_none_of_its_numbers(run):
    for name in ("mean", "long"):
        shutil.copytree(place_of(run), run / name, ignore=lambda *_: ["trainer_state.json"])
    note = run / "mean" / "average.json"
    note.write_text(
        json.dumps(
            {
                "average_of": ["/data/me/my-run/models/step-00000010", "step-00000020"],
                "how": "mean of weights",
            }
        )
    )
    for name in ("mean", "long"):
        text = make_card(run / name)
        assert f"# my-run-{name}\n" in text and "poems/" in text and "tokens seen: unknown" in text
        assert (
            "nats per label" not in text and "bits per byte" not in text and "/data/me" not in text
        )
        assert ("mean of: step-00000010, step-00000020" in text) == (name == "mean")
    note.write_text(
        json.dumps({"average_of": ["seed-0", "seed-1"], "monitor": "val_accuracy", "value": 0.75})
    )
    text = make_card(run / "mean")
    assert (
        "- accuracy: 0.75\n" in text
        and "mean of: seed-0, seed-1" in text
        and "by whose val_accuracy the weights were chosen" in text
    )


def test_a_card_of_a_stage_states_what_was_measured_of_it_and_all_texts_up_to_it(run):
    out = run.parent / "out"
    for number, tokens in ((1, 1000), (2, 234)):
        shutil.copytree(
            place_of(run),
            out / f"stage-{number}" / "model",
            ignore=lambda *_: ["trainer_state.json"],
        )
        (out / f"stage-{number}" / "model" / "stage.json").write_text(json.dumps(
            {"steps": 5, "tokens": tokens, "step": 5, "val_loss": number + 0.5, "val_bits_per_byte": 1.25}))  # fmt: skip
    (out / "run.yaml").write_text(yaml.safe_dump({"stages": [
        {"data": {"train_dataset_name_or_path": "old.txt"}, "module": {"pretrained_model_name_or_path": "some/model"}},
        {"data": {}}, {"data": {"train_dataset_name_or_path": "later.txt"}}]}))  # fmt: skip
    first, second = (make_card(out / f"stage-{number}" / "model") for number in (1, 2))
    assert (
        "nats per label: 1.5" in first
        and "nats per label: 2.5" in second
        and "bits per byte: 1.25" in second
    )
    assert (
        "# out-stage-2\n" in second
        and "text: old.txt; then the embedded corpus\n" in second
        and "began with: some/model" in second
    )
    assert (
        "tokens seen: 1,000" in first
        and "tokens seen: 1,234" in second
        and "text: old.txt\n" in first
    )
    (out / "stage-1" / "model" / "stage.json").unlink()
    assert "tokens seen: unknown" in make_card(out / "stage-2" / "model")
    alone = shutil.copytree(out / "stage-2" / "model", run.parent / "alone")
    assert "nats per label: 2.5" in make_card(alone)


def test_a_card_reads_the_names_that_the_demo_writes(run):
    (run / "metrics.json").write_text(
        json.dumps({"validation_loss": 2.25, "validation_accuracy": 0.5, "train_seconds": 3600.0})
    )
    (run / "run.yaml").write_text(
        yaml.safe_dump({"command": "demo", "record": {"corpus": "python-docs"}})
    )
    text = make_card(place_of(run))
    assert (
        "nats per label: 2.25" in text and "accuracy: 0.5" in text and "text: python-docs" in text
    )


def test_what_a_push_says_beside_a_card_that_is_there_is_refused_unless_it_stands_in_it(run):
    place = place_of(run)
    write_card(place, CardConfig(license="mit", description="A cat's model."))
    for options, words in (
        ({"license": "apache-2.0"}, "license"),
        ({"language": "en", "watts": 3.0}, "language, watts"),
    ):
        with pytest.raises(
            ValueError, match=f"README.md is sent as it is, and does not say {words}: .*--overwrite"
        ):
            push_model(place, "me/cats", CardConfig(**options), dry_run=True)
    for choices in (CardConfig(), CardConfig(license="mit", description="A cat's model.")):
        assert push_model(place, "me/cats", choices, dry_run=True)["commit"] is None


def test_a_push_may_say_again_what_a_card_was_made_with_or_says_as_a_list(run):
    place = place_of(run)
    pushed = lambda **options: (
        push_model(place, "me/cats", CardConfig(**options), dry_run=True)["commit"] is None
    )  # noqa: E731
    write_card(
        place,
        CardConfig(watts=300.0, language="en", datasets=["me/mice"], base_model="me/kittens"),
    )
    for _ in range(2):
        assert pushed(watts=300.0) and pushed(
            language=["en"], datasets="me/mice", base_model="me/kittens"
        )
        for options, word in (
            ({"watts": 30.0}, "watts"),
            ({"language": ["en", "de"]}, "language"),
            ({"datasets": "me/rats"}, "datasets"),
        ):
            with pytest.raises(ValueError, match=f"does not say {word}: "):
                pushed(**options)
        text = (place / "README.md").read_text()
        (place / "README.md").write_text(
            text.replace("\nlanguage: en\n", "\nlanguage:\n- en\n")
        )  # as a person writes it
    (run / "metrics.json").write_text("{}")  # without a time of training watts say nothing
    assert pushed(watts=30.0)


def test_a_card_states_what_the_test_split_says_where_there_is_one(run):
    write_seeds(
        run,
        "val_accuracy",
        [{"val_accuracy": 0.9, "test_accuracy": 0.75, "val_loss": 0.2, "test_loss": 0.5}],
    )
    card = make_card(place_of(run))
    assert (
        "- accuracy: 0.75\n" in card
        and "rows of the test split, by which nothing was chosen" in card
    )
    assert "seeds" not in card[card.index("## Measures") : card.index("## Limits")]
    found = {
        one.metric_type: (one.dataset_split, one.metric_value)
        for one in ModelCard(card).data.eval_results
    }
    assert found == {"accuracy": ("test", 0.75), "loss": ("test", 0.5)}


@pytest.mark.parametrize("monitor, word", [
    ("val_f1", "F1 of answers: 0.5"), ("val_mcc", "Matthews correlation: 0.5"), ("val_entity_f1", "F1 of entities: 0.5"),
    ("val_span_f1", "F1 of spans: 0.5"), ("val_f1_micro", "f1 micro: 0.5"),
])  # fmt: skip
def test_a_card_states_the_number_by_which_the_weights_were_chosen(run, monitor, word):
    write_seeds(run, monitor, [{"val_loss": 1.0, monitor: 0.5}])
    assert f"- {word}\n" in make_card(place_of(run))


def test_the_loss_of_a_regression_is_no_number_of_nats(run):
    config = place_of(run) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "problem_type": "regression"}))
    write_seeds(run, "val_spearman", [{"val_loss": 3.0, "val_pearson": 0.25, "val_spearman": 0.5}])
    card = make_card(place_of(run))
    assert (
        "- squared error: 3\n" in card
        and "- Spearman correlation: 0.5\n" in card
        and "nats" not in card
    )


def test_a_card_of_text_vectors_says_how_often_the_right_text_was_found(run):
    (run / "metrics.json").write_text(
        json.dumps({"val_loss": 1.0, "val_mrr": 0.5, "val_recall_10": 0.75})
    )
    card = make_card(place_of(run))
    assert "- mean reciprocal rank: 0.5\n" in card and "- recall at 10: 0.75\n" in card


@pytest.mark.parametrize(
    "damage",
    [
        {"best_seed": 3},
        {"seeds": None},
        {"runs": [None]},
        {"runs": []},
        {"runs": [{"val_accuracy": None}]},
    ],
)
def test_numbers_that_are_of_no_seed_or_undefined_are_no_measures(run, damage):
    write_seeds(run, "val_accuracy", [{"val_accuracy": 0.5}])
    (run / "metrics.json").write_text(
        json.dumps(json.loads((run / "metrics.json").read_text()) | damage)
    )
    assert "model-index" not in check_card(make_card(place_of(run)))
