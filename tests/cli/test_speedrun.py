"What a race holds fixed, whom it refuses, and what a forged log gives away."

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from bertlab.cli import speedrun as races
from bertlab.cli.main import main
from bertlab.cli.speedrun import TRACKS, Judge, arrived, check_log, load_speedrun, recipe_sha256
from bertlab.cli.speedrun import (
    format_speedrun,
    measure_target,
    not_compared,
    seconds_before,
    speedrun,
)
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.config import modernbert_tiny
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model
from bertlab.optim.budgets import TimeBudgetSchedule


@pytest.fixture(scope="module")
def corpus():
    return TRACKS["laptop"].text()


@pytest.fixture(scope="module")
def small(corpus):
    "A track for seconds, under the name `small`."
    track = replace(
        TRACKS["laptop"], name="small", target=6.3, vocab_size=400, max_sequence_length=64
    )
    TRACKS["small"] = track
    yield track
    del TRACKS["small"]


SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
RECIPE = {
    "model": {"model_config_kwargs": SHAPE, "learning_rate": 1e-2, "scheduler_warmup_steps": 1,
              "scheduler_cooldown_steps": 3},
    "trainer": {"max_steps": 5, "precision": "32-true"}, "data": {"collator_kwargs": {"mlm_probability": 0.15}},
}  # fmt: skip


@pytest.mark.parametrize(
    "recipe, named",
    [
        ({"data": {"train_dataset_name_or_path": "mine.txt"}}, ["data.train_dataset_name_or_path"]),
        ({"data": {"val_split": "test"}}, ["data.val_split"]),
        (
            {"data": {"pretrained_tokenizer_name_or_path": "x"}},
            ["data.pretrained_tokenizer_name_or_path"],
        ),
        ({"data": {"data_kwargs": {"level": "installed"}}}, ["data.data_kwargs.level"]),
        ({"data": {"data_kwargs": {"validation_fraction": 0}}}, ["validation_fraction"]),
        ({"trainer": {"accelerator": "cuda"}}, ["trainer.accelerator"]),
        ({"trainer": {"overfit_batches": 0.5}}, ["trainer.overfit_batches"]),
        ({"trainer": {"fast_dev_run": True}}, ["trainer.fast_dev_run"]),
        ({"trainer": {"barebones": True}}, ["trainer.barebones"]),
        ({"run": {"output": "elsewhere"}}, ["run.output"]),
        ({"model": {"objective": "diffusion"}}, ["model.objective"]),
        ({"modle": {}}, ["modle", "did you mean 'model'"]),
        ({"model": {"learning_rat": 1.0}}, ["learning_rat", "did you mean"]),
        ({"model": 3}, ["model", "mapping"]),
        ({"model": {"learning_rate": "fast"}}, ["learning_rate", "fast"]),
    ],
)
def test_a_recipe_that_touches_what_the_track_fixes_is_refused_by_name(recipe, named, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(recipe))
    with pytest.raises(ValueError) as found:
        load_speedrun(path)
    assert all(name in str(found.value) for name in [*named, "mine.yaml"]), found.value


def test_the_recipe_for_a_gpus_hour_follows_the_clock_for_the_hour_of_its_track():
    track, recipe = (
        TRACKS["gpu-hour"],
        load_speedrun(Path(__file__).parents[2] / "benchmarks" / "gpu_hour.yaml"),
    )
    model = races.speedrun_config(track, recipe, "out", 0)["model"]
    assert model["schedule"] == "time_budget" and model["compile_model"] is True
    assert TimeBudgetSchedule(**model["scheduler_kwargs"]).seconds == track.seconds == 3600
    assert (model["scheduler_warmup_steps"], model["scheduler_cooldown_steps"]) == (
        None,
        0,
    )  # phases would be refused


def test_the_demo_itself_is_the_empty_recipe():
    assert load_speedrun(None) == {}
    config = races.speedrun_config(TRACKS["laptop"], {}, "out", seed=7)
    assert config["trainer"]["max_steps"] == 880 and config["seed_everything"] == 7
    assert config["model"]["learning_rate"] == 2e-3 and config["run"]["output"] == "out"


def test_a_recipe_changes_entries_of_a_mapping_and_leaves_the_others():
    config = races.speedrun_config(
        TRACKS["laptop"], {"model": {"model_config_kwargs": {"num_hidden_layers": 2}}}, "o", 0
    )
    shape = config["model"]["model_config_kwargs"]
    assert shape["num_hidden_layers"] == 2 and shape["hidden_size"] == 192


def test_a_recipe_that_begins_with_a_model_takes_its_shape_and_not_the_demos():
    named = {"pretrained_model_name_or_path": "somewhere"}
    config = lambda **more: races.speedrun_config(
        TRACKS["laptop"], {"model": {**named, **more}}, "o", 0
    )["model"]  # noqa: E731
    assert config()["model_config_kwargs"] is None
    assert config(model_config_kwargs={"embedding_dropout": 0.1})["model_config_kwargs"] == {
        "embedding_dropout": 0.1
    }


@pytest.mark.parametrize("record", [None, {}, {"corpus_sha256": "other", "corpus": "my text"}])
def test_a_model_that_may_have_read_the_held_out_text_is_refused(record, tmp_path):
    if record is not None:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({"record": record}))
        (tmp_path / "metrics.json").write_text('{"train_seconds": 5}')
    with pytest.raises(ValueError, match="pretrained_model_name_or_path"):
        seconds_before(tmp_path, "this")


def test_the_text_of_the_nearest_run_counts_also_where_it_has_no_numbers_yet(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"record": {"corpus_sha256": "this"}}))
    (tmp_path / "metrics.json").write_text('{"train_seconds": 61.5}')
    inner = tmp_path / "more"
    inner.mkdir()
    for sha, message in (("other", "not the text of this track"), ("this", "may begin")):
        (inner / "run.yaml").write_text(yaml.safe_dump({"record": {"corpus_sha256": sha}}))
        with pytest.raises(ValueError, match=message):
            seconds_before(inner, "this")
    assert races.seconds_of_run(inner, "this") is None, (
        "the seconds of the run around it are not its own"
    )


def test_the_seconds_of_the_model_that_a_recipe_begins_with_count(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"record": {"corpus_sha256": "this"}}))
    (tmp_path / "metrics.json").write_text('{"train_seconds": 61.5}')
    (tmp_path / "models" / "step-5").mkdir(parents=True)
    assert seconds_before(tmp_path / "models" / "step-5", "this") == 61.5


def test_a_home_directory_is_written_with_a_tilde_as_in_pretrain(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model = tmp_path / "demo"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "run.yaml").write_text(yaml.safe_dump({"record": {"corpus_sha256": "this"}}))
    (model / "metrics.json").write_text('{"train_seconds": 5}')
    assert seconds_before("~/demo", "this") == 5
    recipe = {"model": {"pretrained_model_name_or_path": "~/demo"}}
    config = races.speedrun_config(TRACKS["laptop"], recipe, "o", 0)
    assert config["model"]["pretrained_model_name_or_path"] == str(model), (
        "the model is read from there"
    )
    assert recipe["model"]["pretrained_model_name_or_path"] == "~/demo", (
        "a log does not name anybody's home"
    )


def test_the_judge_hides_the_same_tokens_for_every_recipe_with_the_same_tokenizer(small, corpus):
    tokenizer = train_tokenizer(corpus.train_texts, small.vocab_size)
    first = Judge(small, corpus, tokenizer)
    assert first.sha256() == Judge(small, corpus, tokenizer).sha256()
    assert first.sha256() != Judge(replace(small, mlm_probability=0.2), corpus, tokenizer).sha256()
    shown = next(iter(first.data.val_dataloader()))
    share = (shown["labels"] != -100).sum() / (shown["attention_mask"] > 0).sum()
    assert abs(share - 0.3) < 0.02


def test_the_judge_asks_all_of_its_rows_whatever_the_run_has_left_out(small, corpus):
    judge = Judge(small, corpus, train_tokenizer(corpus.train_texts, small.vocab_size))
    trainer = SimpleNamespace(
        limit_val_batches=3, validate=lambda *_, **__: [{"limit": trainer.limit_val_batches}]
    )
    assert judge.score(None, trainer) == {"limit": 1.0}


def test_a_race_measures_the_device_of_its_track_and_no_other_of_the_machine(monkeypatch):
    from bertlab.core import devices

    asked = []
    monkeypatch.setattr(
        devices, "num_devices", lambda kind: int(kind in ("mps", "cpu"))
    )  # a MacBook
    monkeypatch.setattr(
        devices, "benchmark_matmul", lambda kind, device: asked.append(device) or 1e9
    )
    machine = races.measure_machine("32-true", TRACKS["laptop"].accelerator)
    assert asked == ["cpu"] and machine["device"].startswith("CPU")
    assert races._precision(TRACKS["laptop"], {}) == devices.default_precision("cpu")[0]


def test_the_record_of_a_run_names_the_device_that_it_asks_for(monkeypatch, tmp_path):
    from bertlab.cli import pretrain as runs
    from bertlab.core import devices

    noted = []
    monkeypatch.setattr(
        devices, "num_devices", lambda kind: int(kind in ("mps", "cpu"))
    )  # a MacBook
    monkeypatch.setattr(
        runs, "Run", lambda config, resume, overwrite, notes: noted.append(notes) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        runs.pretrain(["--trainer.accelerator", "cpu", "--run.output", str(tmp_path / "run")])
    assert noted[0]["record"]["device"].startswith("CPU")


def attempt(seed=0, loss=4.2, **changes):
    loss = loss + seed / 100
    made = {"seed": seed, "validation_loss": loss, "validation_accuracy": 0.3, "bits_per_byte": loss * 1.8 / 4.25,
            "train_seconds": 100.0, "steps": 400, "tokens": 800_000, "matmul_flops": 2e11,
            "curve": [[200, 50.0, 5.0], [400, 100.0, 4.3]]}  # fmt: skip
    return {**made, **changes}


def log_of(*attempts, recipe=None, hidden="a"):
    recipe = recipe or {"model": {"learning_rate": 1e-3}}
    return {"format": 1, "track": "laptop", "recipe": recipe, "recipe_sha256": recipe_sha256(recipe),
            "text": "Python's documentation (stdlib)", "text_sha256": "s", "hidden_sha256": hidden, "machine": {},
            "target": {"nats": 4.25, "bits_per_byte": 1.8, "hidden_sha256": "a"},
            "attempts": list(attempts)}  # fmt: skip


def in_ten_minutes(seconds):
    "A change of a log: it is of the track whose only rule is its time, and seed 2 took so long."

    def change(log):
        log.update(
            track="ten-minutes", target={"nats": None, "bits_per_byte": None, "hidden_sha256": "a"}
        )
        log["attempts"][2].update(
            train_seconds=seconds, curve=[[200, seconds / 2, 5.0], [400, seconds, 4.3]]
        )

    return change


def in_attempt(name, value):
    "A change of a log: seed 1 has another number."
    return lambda log: log["attempts"][1].update({name: value})


def with_recipe(recipe):
    "A change of a log: another recipe, with its own hash."
    return lambda log: log.update(recipe=recipe, recipe_sha256=recipe_sha256(recipe))


def with_seeds(*seeds):
    "A change of a log: its attempts have other seeds."
    return lambda log: [one.update(seed=seed) for one, seed in zip(log["attempts"], seeds)]


def in_a_tenth_of_the_time(log):
    "A change of a log: all of its seconds are divided by ten."
    for one in log["attempts"]:
        one.update(
            train_seconds=one["train_seconds"] / 10,
            curve=[[n, x / 10, y] for n, x, y in one["curve"]],
        )


def copied(change):
    "A change of a log: seed 2 is seed 0, with another number."

    def forge(log):
        first = log["attempts"][0]
        first["curve"] = [[40 * n, 10.0 * n, 6 - n / 7] for n in range(1, 11)]
        log["attempts"][2] = {**copy.deepcopy(first), "seed": 2}
        change(log["attempts"][2])

    return forge


def test_an_honest_log_passes():
    assert check_log(log_of(attempt(0), attempt(1), attempt(2))) == []
    log = log_of(attempt(0), attempt(1), attempt(2))
    in_ten_minutes(604.0)(log)  # the step under way may end
    assert check_log(log) == []


def of_large_batches(log):
    "A change of a log: rows for a machine of many cores, which the squares that are measured do not keep busy."
    with_recipe({"data": {"train_batch_size": 512}})(log)
    for one in log["attempts"]:
        one["tokens"] *= 32


@pytest.mark.parametrize("change", [
    lambda log: [with_recipe({"model": {"freeze": "embeddings"}})(log), in_a_tenth_of_the_time(log)],
    lambda log: [with_recipe({"model": {"model_config_kwargs": {"mlp": "my_file.Own"}}})(log), in_a_tenth_of_the_time(log)],
    lambda log: [with_recipe({"model": {"model_config_kwargs": None}})(log), in_a_tenth_of_the_time(log)],
    lambda log: [with_recipe({"data": {"packing": False}})(log), *(one.update(tokens=90_000) for one in log["attempts"])],
    in_attempt("matmul_flops", 1e10),  # other work had the machine while it was measured
    of_large_batches,
    lambda log: [with_seeds(2, 0, 1)(log), log["attempts"].append(attempt(3, 4.21))],  # as a race that was resumed
    lambda log: log["attempts"][1].update(validation_loss=4.2, bits_per_byte=4.2 * 1.8 / 4.25, validation_accuracy=0.31),
])  # fmt: skip
def test_a_bound_leaves_room_for_what_an_honest_run_may_be(change):
    log = copy.deepcopy(log_of(attempt(0), attempt(1), attempt(2)))
    log["attempts"][0]["curve"][0][2] = 5.1
    change(log)
    assert check_log(log) == []


@pytest.mark.parametrize("seeds, said", [((7, 40, 113), "; a record needs the seeds 0, 1, 2"), ((0, 1), "; a record needs"),
                                         ((1, 2, 0), "every seed arrived\n")])  # fmt: skip
def test_the_verdict_says_which_seeds_a_record_needs(seeds, said):
    assert said in format_speedrun(log_of(*(attempt(seed, 4.0 - seed / 100) for seed in seeds)))


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda log: log["recipe"]["model"].update(learning_rate=1.0), "recipe was changed"),
        (lambda log: log["attempts"][1].update(train_seconds=30.0), "seed 1"),
        (lambda log: log["attempts"][1].update(validation_loss=4.3), "seed 1 did not arrive"),
        (in_attempt("seed", 0), "needs the seeds 0, 1, 2 and so on, none left out; it has [0, 0, 2]"),
        (lambda log: log["attempts"].pop(), "needs the seeds 0, 1, 2 and so on, none left out; it has [0, 1]"),
        (with_seeds(7, 40, 113), "needs the seeds 0, 1, 2 and so on, none left out; it has [7, 40, 113]"),
        (with_seeds(0, 1, 3), "it has [0, 1, 3]"),
        (lambda log: log["attempts"][2].update(curve=[]), "curve of seed 2"),
        (lambda log: log["attempts"][2]["curve"].reverse(), "curve of seed 2"),
        (lambda log: log["attempts"][0].update(matmul_flops=0), "measured rate"),
        (lambda log: log["target"].update(nats=9.0), "target"),
        (lambda log: log.update(track="downhill"), "downhill"),
        (lambda log: log.update(format=2), "format"),
        (in_ten_minutes(36_000.0), "seed 2 trained for 36000 s, and the track allows 600 s"),
        (with_recipe({"data": {"train_dataset_name_or_path": "held_out.txt"}}), "data.train_dataset_name_or_path"),
        (with_recipe({"x": 1}), "its recipe is refused"),
        (with_recipe([1]), "its recipe is refused"),
        (lambda log: log.update(text="my own text"), "its text is 'my own text'"),
        (lambda log: log["attempts"][2].update(curve=[[400, 100.0, 4.3]]), "curve of seed 2 is a single point"),
        (lambda log: log["attempts"][2]["curve"][0].__setitem__(1, -5.0), "curve of seed 2"),
        (lambda log: log["attempts"][2]["curve"][0].__setitem__(1, float("nan")), "curve of seed 2"),
        *((in_attempt(name, value), f"seed 1 has {name} {value}") for name, value in (
            ("validation_loss", -3.0), ("validation_loss", float("nan")), ("bits_per_byte", 0.0),
            ("validation_accuracy", 7.0), ("train_seconds", -5.0), ("tokens", 0), ("steps", 0), ("steps", 0.5))),
        (in_attempt("matmul_flops", float("inf")), "measured rate"),
        (in_attempt("seed", 0.5), "seed 0.5 is no whole number"),
        (in_attempt("seed", -7), "seed -7 is no whole number"),
        (lambda log: (in_ten_minutes(600.0)(log), in_attempt("validation_loss", float("nan"))(log)), "did not arrive"),
        (in_attempt("bits_per_byte", 0.5), "seed 1 has 0.1188 bits per byte for each nat"),
        (lambda log: (in_ten_minutes(600.0)(log), in_attempt("bits_per_byte", 0.5)(log)), "seed 1 has 0.1188 bits"),
        (lambda log: log.update(hidden_sha256="b"), "its recipe has the tokenizer of the track"),
        (with_recipe({"run": {"vocab_size": 512}}), "its recipe has a tokenizer of its own"),
        (with_recipe({"run": {"tokenizer_kind": "bpe"}}), "its recipe has a tokenizer of its own"),
        (lambda log: log["attempts"].__setitem__(2, {**log["attempts"][0], "seed": 2}), "seeds 0 and 2 have equal losses"),
        (with_recipe({"trainer": {"max_steps": 399}}), "seed 0 has made 400 steps, and its recipe 399"),
        (in_attempt("tokens", 399), "seed 1 has 399 tokens"),
        (in_attempt("tokens", 400 * 16 * 128 + 1), "seed 1 has 819201 tokens"),
        (lambda log: log.update(needs={"model": {"train_seconds": 101.0}}), "seed 0 trained for 100.0 s, less than the 101.0 s"),
        (in_a_tenth_of_the_time, "seed 0 trained for 10 s, and the matrix products of its recipe alone take 37 s"),
        (in_attempt("tokens", 400), "seed 1 has 400 tokens, which 400 steps"),
        (in_attempt("validation_accuracy", 0.0), "seed 1 has validation_accuracy 0.0, and with a loss of 4.210 go 1.48%"),
        (copied(lambda one: one["curve"][3].__setitem__(2, 5.5)), "seeds 0 and 2 have equal losses"),
        (copied(lambda one: one.update(validation_loss=4.24, bits_per_byte=4.24 * 1.8 / 4.25)), "seeds 0 and 2 have equal"),
    ],
)  # fmt: skip
def test_a_forged_log_is_found_out(change, named):
    log = copy.deepcopy(log_of(attempt(0), attempt(1), attempt(2)))
    change(log)
    assert any(named in wrong for wrong in check_log(log)), check_log(log)


def test_text_and_target_are_compared_where_this_python_has_the_text_and_else_it_is_said(
    small, monkeypatch
):
    track = replace(small, name="few", max_documents=600)
    monkeypatch.setitem(TRACKS, "few", track)
    corpus = track.text()
    target = measure_target(track, corpus)
    bits = target["bits_per_byte"] - 0.1
    attempts = [
        attempt(seed, loss=4.2, tokens=400_000, bits_per_byte=bits * (1 + seed / 420))
        for seed in range(3)
    ]
    log = {
        **log_of(*attempts, recipe={"run": {"vocab_size": 500}}, hidden="b"),
        "track": "few",
        "text_sha256": corpus.sha256,
        "target": target,
    }
    assert check_log(log) == [] and not_compared(log) == ""
    forged = {**log, "target": {**target, "bits_per_byte": 99.0}}
    assert check_log(forged) == [
        f"the target of 99.0 bits per byte is not the track's {target['bits_per_byte']:.4f}"
    ]
    assert "hidden tokens" in check_log({**log, "target": {**target, "hidden_sha256": "b"}})[0]
    other = {**log, "text_sha256": "0" * 64}  # as of another Python
    assert check_log(other) == [] and "000000000000" in not_compared(other)
    monkeypatch.setitem(TRACKS, "few", replace(track, source="somebody/text"))
    assert "somebody/text" in check_log(log)[0]
    assert check_log({**log, "text": "somebody/text"}) == [] and "somebody/text" in not_compared(
        log
    )


def test_a_recipe_has_one_hash_before_and_behind_a_log():
    recipe = {
        "trainer": {
            "callbacks": [{"class_path": "my_file.Own", "init_args": {"at": {2: "a", 10: "b"}}}]
        }
    }
    assert recipe_sha256(recipe) == recipe_sha256(json.loads(json.dumps(recipe)))


def test_what_a_recipe_names_and_a_log_does_not_hold_is_said():
    first = {
        "model": {"pretrained_model_name_or_path": "race/earlier", "optimizer_class": "my_file.Own"}
    }
    log = log_of(attempt(0), attempt(1), attempt(2), recipe=first)
    assert check_log(log) == [], "earlier logs have no hashes"
    said = not_compared(log)
    assert (
        "race/earlier, which the log does not hold (no hash is known)" in said
        and "names my_file.Own" in said
    )
    needs = {"model": {"train_seconds": 5.0, "sha256": "ab" * 32}, "code": {"my_file": "cd" * 32}}
    said = not_compared({**log, "needs": needs})
    assert "(sha256 abababababab)" in said and "(sha256 cdcdcdcdcdcd)" in said
    ours = {"model": {"optimizer_class": "torch.optim.AdamW"}}
    assert "torch" not in not_compared(log_of(attempt(0), recipe=ours)), (
        "what is installed has a version"
    )


def test_a_folder_that_python_would_not_import_is_no_code_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"bertlab/__init__.py": "bertlab.train.optimizers.Lion", "torch/notes.py": "torch.optim.AdamW",
             "my_package/__init__.py": "my_package.Own", "my_folder/parts.py": "my_folder.parts.Own"}  # fmt: skip
    for file, name in names.items():
        Path(file).parent.mkdir()
        Path(file).write_text("raise RuntimeError('nobody imports this here')\n")
        log = log_of(attempt(0), recipe={"model": {"optimizer_class": name}})
        assert (name in not_compared(log)) is name.startswith("my_"), name


def test_the_lowest_loss_is_told_in_bits_per_byte_too():
    log = log_of(attempt(0), attempt(1), attempt(2))
    in_ten_minutes(600.0)(log)
    assert "reached 4.220 nats, 1.7873 bits per byte\n" in format_speedrun(log)
    assert "1.7873 bits per byte (a tokenizer of its own" in format_speedrun(
        {**log, "hidden_sha256": "b"}
    )


def test_a_log_of_no_attempt_is_one_sentence():
    with pytest.raises(ValueError, match="holds no attempt"):
        format_speedrun(log_of())


@pytest.mark.parametrize("text, said", [("", "not JSON"), ("[]", "must hold a dict"), ("{}", "no log of a speedrun"),
                                         ('{"format": 1}', "no log of a speedrun"), ("\x00", "not JSON")])  # fmt: skip
def test_what_is_no_log_is_one_sentence(text, said, tmp_path):
    path = tmp_path / "log.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        check_log(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="no log of a speedrun"):
        check_log([1])


@pytest.mark.parametrize("change, said", [
    (lambda log: log.update(attempts=[{}]), "attempt 1 needs a number as seed"),
    (lambda log: log.update(attempts={}), "attempts"),
    (lambda log: log["attempts"][1].update(train_seconds="1"), "attempt 2 needs a number as train_seconds"),
    (lambda log: log["attempts"][2].pop("curve"), "attempt 3 needs a curve"),
    (lambda log: log["attempts"][0]["curve"].append([1]), "attempt 1 needs a curve"),
    (lambda log: log["target"].update(bits_per_byte=None), "target"),
    (lambda log: log.update(target=4.25), "target"),
    (lambda log: log["attempts"][1].update(tokens=10**400), "attempt 2 needs a number as tokens"),
])  # fmt: skip
def test_a_log_that_lacks_a_number_is_one_sentence(change, said):
    log = copy.deepcopy(log_of(attempt(0), attempt(1), attempt(2)))
    change(log)
    with pytest.raises(ValueError, match=f"no log of a speedrun: .*{said}"):
        check_log(log)


def test_a_run_has_the_time_that_the_model_it_begins_with_has_left(tmp_path):
    track = TRACKS["ten-minutes"]
    limit = lambda spent: races.speedrun_config(track, {}, "out", 0, spent)["run"]["time_limit"]  # noqa: E731
    assert limit(0.0) == 600 and limit(61.5) == 538.5
    assert races.speedrun_config(TRACKS["laptop"], {}, "out", 0, 61.5)["run"]["time_limit"] is None
    with pytest.raises(ValueError, match="600 s, and the track 'ten-minutes' allows 600 s"):
        limit(600.0)
    # It is refused before anything is made.
    corpus, model = track.text(), tmp_path / "model"
    model.mkdir()
    (model / "run.yaml").write_text(yaml.safe_dump({"record": {"corpus_sha256": corpus.sha256}}))
    (model / "metrics.json").write_text('{"train_seconds": 700}')
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump({"model": {"pretrained_model_name_or_path": str(model)}})
    )
    with pytest.raises(ValueError, match="allows 600 s"):
        speedrun(tmp_path / "mine.yaml", "ten-minutes", str(tmp_path / "race"))
    assert not (tmp_path / "race").exists()


def test_another_vocabulary_is_compared_in_bits_per_byte():
    low_nats = attempt(loss=3.0, bits_per_byte=1.9)
    assert arrived(log_of(low_nats), low_nats), "the same tokens: nats decide"
    assert not arrived(log_of(low_nats, hidden="b"), low_nats), "other tokens: bits per byte decide"
    high_nats = attempt(loss=5.0, bits_per_byte=1.7)
    assert arrived(log_of(high_nats, hidden="b"), high_nats)


def test_a_race_that_is_resumed_runs_the_seeds_that_are_missing(small, tmp_path):
    recipe, place = tmp_path / "recipe.yaml", tmp_path / "race"
    recipe.write_text(yaml.safe_dump(RECIPE))
    first = speedrun(recipe, "small", str(place), seeds=[0])
    kept = (place / "seed-0" / "attempt.json").read_bytes()
    log = speedrun(recipe, "small", str(place), seeds=[0, 1], resume=True)
    assert (place / "seed-0" / "attempt.json").read_bytes() == kept, (
        "a finished seed is not run again"
    )
    assert json.loads((place / "log.json").read_text()) == json.loads(json.dumps(log))
    assert [one["seed"] for one in log["attempts"]] == [0, 1] and log["attempts"][0]["steps"] == 5
    # Other masks in training, the track's own in judging.
    assert log["hidden_sha256"] == log["target"]["hidden_sha256"]
    assert first["attempts"][0]["validation_loss"] != log["attempts"][1]["validation_loss"]
    with pytest.raises(ValueError, match="another attempt"):
        speedrun(None, "small", str(place), resume=True)
    with pytest.raises(ValueError, match="--resume"):
        speedrun(recipe, "small", str(place))
    # A later recipe may begin with this model, and pays for its seconds.
    before = seconds_before(place / "seed-0", log["text_sha256"])
    assert before == pytest.approx(log["attempts"][0]["train_seconds"])


@pytest.fixture
def quick(small, monkeypatch):
    "A track of few documents, on which the losses of seeds are made up: seeds below 2 do not arrive."

    def run(track, said, home, seed, corpus):
        home.mkdir(parents=True, exist_ok=True)
        loss = 7.0 if seed < 2 else 6.0 if seed < 9 else float("nan")
        gaps = "gaps" if seed < 20 else "others"
        return races.Attempt(
            seed, loss, 0.1, 0.8 * loss, 10.0, 2, 99, 1e9, [(1, 5.0, loss), (2, 10.0, loss)]
        ), gaps

    monkeypatch.setitem(TRACKS, "quick", replace(small, name="quick", max_documents=600))
    monkeypatch.setattr(races, "run_seed", run)
    monkeypatch.setattr(races, "measure_machine", lambda precision, accelerator: {})
    return lambda place, *seeds, recipe=None, **more: speedrun(
        recipe, "quick", str(place), seeds=seeds or None, **more
    )


def test_seeds_that_were_asked_other_gaps_are_in_no_log_together(quick, tmp_path):
    quick(tmp_path / "race", 2)
    with pytest.raises(ValueError, match="seed 20 of .* was asked other gaps"):
        quick(tmp_path / "race", 20, resume=True)


def test_a_log_has_hashes_of_what_its_recipe_names_and_a_race_does_not_go_on_with_others(
    quick, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(races, "_check_run", lambda *_: None)
    model = tmp_path / "earlier"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    sha256 = TRACKS["quick"].text().sha256
    (model / "run.yaml").write_text(yaml.safe_dump({"record": {"corpus_sha256": sha256}}))
    (model / "metrics.json").write_text('{"train_seconds": 2.5}')
    for file in ("my_file.py", "my_folder/parts.py", "bertlab/__init__.py", "torch/notes.py"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text("raise RuntimeError('nobody imports this here')\n")
    callbacks = [
        {"class_path": name}
        for name in ("my_folder.parts.Own", "bertlab.train.history.History", "torch.nn.Module")
    ]
    Path("r.yaml").write_text(yaml.safe_dump({"model": {"pretrained_model_name_or_path": "earlier", "optimizer_class": "my_file.Own"},
                                              "trainer": {"callbacks": callbacks}}))  # fmt: skip
    log = quick(tmp_path / "race", 2, recipe="r.yaml")
    assert log["needs"]["model"]["train_seconds"] == 2.5 and list(log["needs"]["code"]) == [
        "my_file",
        "my_folder",
    ]
    assert log["needs"]["code"]["my_file"][:12] in not_compared(log) and "earlier" in not_compared(
        log
    )
    quick(tmp_path / "race", resume=True, recipe="r.yaml")
    for path in (Path("my_file.py"), Path("my_folder/parts.py"), model / "model.safetensors"):
        kept = path.read_bytes()
        path.write_bytes(kept + b"#")
        with pytest.raises(ValueError, match="other weights or other code"):
            quick(tmp_path / "race", resume=True, recipe="r.yaml")
        path.write_bytes(kept)


def save_start(place, tokenizer, corpus):
    "A model to begin with, and a recipe that does."
    shape = modernbert_tiny(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                            num_attention_heads=1, pad_token_id=tokenizer.pad_token_id)  # fmt: skip
    save_model(BertLabForMaskedLM(shape), tokenizer, place / "model")
    (place / "model" / "run.yaml").write_text(
        yaml.safe_dump({"record": {"corpus_sha256": corpus.sha256}})
    )
    (place / "model" / "metrics.json").write_text('{"train_seconds": 2.5}')
    (place / "r.yaml").write_text(
        yaml.safe_dump({"model": {"pretrained_model_name_or_path": str(place / "model")}})
    )
    return place / "r.yaml"


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_a_race_begins_with_a_model_whose_tokenizer_the_text_of_the_track_gives(
    kind, quick, tmp_path
):
    corpus = TRACKS["quick"].text()
    recipe = save_start(tmp_path, train_tokenizer(corpus.train_texts, 420, kind=kind), corpus)
    assert quick(tmp_path / "race", 2, recipe=recipe)["needs"]["model"]["train_seconds"] == 2.5


@pytest.mark.parametrize("texts, size", [(lambda corpus: corpus.validation_texts, 420),  # it knows what is held out
                                         (lambda _: ["a, b. c"] * 60, 18)])  # nearly all is [UNK]  # fmt: skip
def test_a_race_does_not_begin_with_a_model_of_any_other_tokenizer(texts, size, quick, tmp_path):
    corpus = TRACKS["quick"].text()
    recipe = save_start(tmp_path, train_tokenizer(texts(corpus), size), corpus)
    with pytest.raises(
        ValueError, match="pretrained_model_name_or_path=.*model' has a tokenizer of .* entries"
    ):
        quick(tmp_path / "race", 2, recipe=recipe)
    assert not (tmp_path / "race").exists()


def test_a_race_does_not_move_the_model_aside_that_its_recipe_begins_with(
    quick, tmp_path, monkeypatch
):
    monkeypatch.setattr(races, "_check_run", lambda *_: None)
    race = tmp_path / "race"
    quick(race, 2)
    (race / "seed-2" / "run.yaml").write_text(
        yaml.safe_dump({"record": {"corpus_sha256": TRACKS["quick"].text().sha256}})
    )
    (race / "seed-2" / "metrics.json").write_text('{"train_seconds": 2.5}')
    (tmp_path / "r.yaml").write_text(
        yaml.safe_dump({"model": {"pretrained_model_name_or_path": str(race / "seed-2")}})
    )
    before = {path: path.read_bytes() for path in race.rglob("*") if path.is_file()}
    with pytest.raises(
        ValueError, match="seed-2 is what the run begins with.* choose another --output"
    ):
        quick(race, 2, recipe=tmp_path / "r.yaml", overwrite=True)
    assert before == {path: path.read_bytes() for path in race.rglob("*") if path.is_file()}
    assert not quick(race, 9, overwrite=True)["needs"], (
        "a recipe that begins with nothing moves all of it"
    )
    assert (race / "previous-1" / "seed-2").is_dir()


def test_a_race_that_is_resumed_keeps_the_seeds_that_did_not_arrive(quick, tmp_path):
    race = tmp_path / "race"
    quick(race, 0, 1, 2)
    log = quick(race, 2, 3, 4, resume=True)
    assert [one["seed"] for one in log["attempts"]] == [0, 1, 2, 3, 4]
    assert "seed 0 did not arrive" in check_log(race / "log.json")
    assert len(quick(race, resume=True)["attempts"]) == 5, "without --seeds, those of the race"
    # Directories of before run.yaml named the seeds: what lies there counts.
    said = yaml.safe_load((race / "run.yaml").read_text())
    assert said["speedrun"].pop("seeds") == [0, 1, 2, 3, 4] and said["speedrun"].pop("text_sha256")
    (race / "run.yaml").write_text(yaml.safe_dump(said))
    assert [one["seed"] for one in quick(race, 3, 4, 5, resume=True)["attempts"]] == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]


def test_a_race_is_not_resumed_on_another_text_or_in_another_commands_directory(
    quick, tmp_path, monkeypatch
):
    race = tmp_path / "race"
    quick(race, 2)
    monkeypatch.setitem(TRACKS, "quick", replace(TRACKS["quick"], max_documents=700))
    with pytest.raises(ValueError, match="another text"):
        quick(race, resume=True)
    (race / "run.yaml").write_text("command: pretrain\n")
    with pytest.raises(ValueError, match="not that of a speedrun"):
        quick(race, resume=True)


@pytest.mark.parametrize("seeds", [[], [1, 1], [0.5], [-1], [2**32], [True]])
def test_seeds_that_no_run_can_have_are_refused_before_anything_is_made(seeds, tmp_path):
    with pytest.raises(ValueError, match="seeds"):
        speedrun(None, "laptop", str(tmp_path / "race"), seeds=seeds)
    assert not (tmp_path / "race").exists()


def test_a_seed_that_ends_in_nan_is_in_the_log_and_has_not_arrived(quick, tmp_path):
    log = quick(tmp_path / "race", 2, 9)
    assert quick(tmp_path / "race", resume=True)["attempts"][1]["seed"] == 9, "it is read again"
    assert "1 of 2 seeds did not arrive" in format_speedrun(log)
    assert "seed 9 did not arrive" in check_log(tmp_path / "race" / "log.json")
    free = {**log, "target": dict.fromkeys(log["target"])}  # a track whose lowest loss wins
    assert "reached nan nats" in format_speedrun(free) and not arrived(free, log["attempts"][1])


def few_positions(number):
    return {**RECIPE, "model": {**RECIPE["model"], "model_config_kwargs": {**SHAPE, "max_position_embeddings": number}},
            "data": {"max_sequence_length": 32}}  # fmt: skip


def test_a_model_that_cannot_read_the_judges_rows_is_refused_before_anything_is_made(
    small, tmp_path, monkeypatch
):
    track = replace(small, max_documents=600)  # rows of 64 tokens
    monkeypatch.setitem(TRACKS, "small", track)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(few_positions(32)))
    with pytest.raises(ValueError, match="max_position_embeddings.* have 64"):
        speedrun(tmp_path / "mine.yaml", "small", str(tmp_path / "race"), seeds=[0])
    with pytest.raises(ValueError, match="max_position_embeddings.* have 64"):
        races.run_seed(track, few_positions(32), tmp_path / "run", 0, track.text())
    assert not (tmp_path / "race").exists() and not (tmp_path / "run").exists()


def test_the_model_that_is_judged_is_written_before(small, tmp_path, monkeypatch):
    track = replace(small, max_documents=600)
    monkeypatch.setitem(TRACKS, "small", track)
    averaged = {**RECIPE, "run": {"average": 0.9}}
    attempt, _ = races.run_seed(track, averaged, tmp_path / "averaged", 0, track.text())
    score = races.score_model(tmp_path / "averaged", "small", track.text())
    assert score.nats[0] == pytest.approx(attempt.validation_loss, abs=1e-4), (
        "the averages were written"
    )
    monkeypatch.setattr(Judge, "score", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        races.run_seed(track, RECIPE, tmp_path / "run", 0, track.text())
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_bigger_vocabulary_gets_other_gaps(small, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "run": {"vocab_size": 500}}))
    log = speedrun(recipe, "small", str(tmp_path / "race"), seeds=[0])
    assert log["hidden_sha256"] != log["target"]["hidden_sha256"]


def test_the_command_refuses_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("data: {streaming: true}\n")
    for words in (
        ["mine.yaml"],
        ["missing.yaml"],
        ["--track", "uphill"],
        ["--seeds", "[1, 1]"],
        ["--check", "none"],
    ):
        assert main(["speedrun", *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml"], "nothing is made"


@pytest.mark.parametrize("words, named", [
    (["--check", "log.json", "mine.yaml"], "--check .*recipe"),
    (["--check", "log.json", "--track", "laptop", "--output", "there"], "--check .*--output, --track"),
    (["--check", "log.json", "--score", "model"], "--check .*--score"),
    (["--check", "log.json", "--resume"], "--check .*--resume"),
    (["--score", "model", "--track", "laptop", "--seeds", "[0]", "--overwrite"], "--score .*--overwrite, --seeds$"),
])  # fmt: skip
def test_an_option_that_a_use_would_ignore_is_refused(words, named, capsys):
    assert main(["speedrun", *words]) == 2
    assert re.search(named, capsys.readouterr().err.strip())


def test_the_command_says_what_its_check_has_not_compared(tmp_path, capsys):
    log = tmp_path / "log.json"
    log.write_text(json.dumps(log_of(attempt(0), attempt(1), attempt(2))))
    assert main(["speedrun", "--check", str(log)]) == 0
    assert (
        "nothing that does not fit; its text and its target were not compared"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("number", [0, 1, 199, 200, 201, 560, 599, 600, 601])
def test_a_thinned_curve_ends_where_the_run_ended(number):
    curve = [(step, step / 2, 4.0) for step in range(1, number + 1)]
    kept = races._thinned(curve)
    assert len(kept) <= races.CURVE_POINTS and kept[-1:] == curve[-1:]
    assert kept == sorted(kept) and (number > races.CURVE_POINTS or kept == curve)
