"""A recipe is typed, checked when built, and read back whole or not at all."""

from dataclasses import asdict

import pytest

import yaml

import bertlab.core.devices
from bertlab.cli.demo import Recipe, demo_config, load_recipe, settle_steps
from bertlab.core.devices import Device


@pytest.mark.parametrize(
    "choices, named",
    [
        ({"max_sequence_length": 7}, "max_sequence_length"),
        ({"vocab_size": 5}, "vocab_size"),
        ({"steps": 0}, "steps"),
        ({"mlm_probability": 0}, "mlm_probability"),
        ({"mlm_probability": 1.5}, "mlm_probability"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"weight_decay": -1}, "weight_decay"),
        (
            {"warmup_fraction": 0.8, "cooldown_fraction": 0.3},
            "warmup_fraction and cooldown_fraction",
        ),
        ({"level": "everything"}, "level"),
        ({"precision": "fp8"}, "precision"),
        ({"optimizer": "sgd"}, "optimizer=.sgd."),
        ({"hidden_size": 13}, "hidden_size"),
        ({"hidden_size": 100}, "hidden_size"),
    ],
)
def test_a_wrong_choice_is_named(choices, named):
    with pytest.raises(ValueError, match=named):
        Recipe(**choices)


def test_a_recipe_comes_back_from_its_file(tmp_path):
    recipe = Recipe(data="größe.txt", learning_rate=1e-3, max_documents=7, seed=5)
    content = {
        "recipe": asdict(recipe),
        "record": {"corpus_sha256": "ab"},
        "model": {"objective": "mlm"},
    }
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(content, allow_unicode=True), encoding="utf-8"
    )
    assert load_recipe(tmp_path / "run.yaml") == (recipe, {"corpus_sha256": "ab"})


def test_yaml_without_a_dot_in_the_exponent_is_still_a_number(tmp_path):
    (tmp_path / "r.yaml").write_text("learning_rate: 2e-3\n")
    assert load_recipe(tmp_path / "r.yaml")[0].learning_rate == 2e-3


@pytest.mark.parametrize("text", ["- a\n- b\n", "learning_rat: 1\n", "steps: [1\n", "\x00", ""])
def test_a_file_that_is_no_recipe_is_refused_by_name(tmp_path, text):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ValueError, match="r.yaml"):
        load_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize("kind, here, asked, steps", [
    ("cpu", "32-true", "auto", 600), ("cpu", "bf16-mixed", "auto", 1000), ("cpu", "bf16-mixed", "32-true", 600),
    ("cpu", "32-true", "bf16-mixed", 1000), ("mps", "32-true", "auto", 1000), ("cuda", "16-mixed", "auto", 1000),
])  # fmt: skip
def test_a_cpu_without_bfloat16_makes_fewer_steps_where_nobody_says_how_many(
    monkeypatch, kind, here, asked, steps
):
    monkeypatch.setattr(
        bertlab.core.devices, "describe_device", lambda: Device(kind, "this", 0, here, "why")
    )
    assert settle_steps(Recipe(precision=asked)).steps == steps
    assert settle_steps(Recipe(precision=asked, steps=7)).steps == 7
    config = demo_config(Recipe(precision=asked), "run")
    assert (
        config["trainer"]["max_steps"] == steps
        and config["model"]["scheduler_cooldown_steps"] == 0.3 * steps
    )
