"""A recipe is typed, checked when built, and read back whole or not at all."""

from dataclasses import asdict

import pytest

import yaml

from bertlab.cli.demo import Recipe, load_recipe


@pytest.mark.parametrize(
    "choices, named",
    [
        ({"max_sequence_length": 7}, "max_sequence_length must be 8 or more"),
        ({"vocab_size": 5}, "vocab_size must be 6 or more"),
        ({"steps": 0}, "steps"),
        ({"steps": 2.5}, "steps must be int"),
        ({"steps": True}, "steps must be int"),
        ({"steps": None}, "steps must be int"),
        ({"batch_size": "x"}, "batch_size must be int"),
        ({"mlm_probability": 0}, "mlm_probability"),
        ({"mlm_probability": 1.5}, "mlm_probability"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": "fast"}, "learning_rate must be float"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"warmup_fraction": 0.8, "cooldown_fraction": 0.3}, "warmup_fraction and cooldown_fraction"),
        ({"data": 3}, "data must be str"),
        ({"streaming": "yes"}, "streaming must be bool"),
        ({"level": "everything"}, "level"),
        ({"precision": "fp8"}, "precision"),
        ({"hidden_size": 13}, "hidden_size"),
        ({"hidden_size": 100}, "hidden_size"),
    ],
)
def test_a_wrong_choice_is_named(choices, named):
    with pytest.raises(ValueError, match=named):
        Recipe(**choices)


def test_text_from_a_shell_becomes_numbers():
    recipe = Recipe(steps="20", learning_rate="2e-3", max_documents="50")
    assert (recipe.steps, recipe.learning_rate, recipe.max_documents) == (20, 2e-3, 50)


def test_a_recipe_comes_back_from_its_file(tmp_path):
    recipe = Recipe(data="größe.txt", learning_rate=1e-3, max_documents=7, seed=5)
    content = {"recipe": asdict(recipe), "record": {"corpus_sha256": "ab"}, "model": {"objective": "mlm"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    assert load_recipe(tmp_path / "run.yaml") == (recipe, {"corpus_sha256": "ab"})


def test_yaml_without_a_dot_in_the_exponent_is_still_a_number(tmp_path):
    (tmp_path / "r.yaml").write_text("learning_rate: 2e-3\n")
    assert load_recipe(tmp_path / "r.yaml")[0].learning_rate == 2e-3


@pytest.mark.parametrize("text", ["- a\n- b\n", "learning_rat: 1\n", "steps: [1\n", "\x00", ""])
def test_a_file_that_is_no_recipe_is_refused_by_name(tmp_path, text):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ValueError, match="r.yaml"):
        load_recipe(tmp_path / "r.yaml")
