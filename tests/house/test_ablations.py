"The ablations' arms are what they say, a rate is tuned until it stands between two worse ones, and tricks begin as they should."

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import ablations  # noqa: E402
import tricks  # noqa: E402

from bertlab.cli.speedrun import TRACKS, speedrun_config  # noqa: E402
from bertlab.model.config import modernbert_tiny  # noqa: E402
from bertlab.model.heads import BertLabForMaskedLM  # noqa: E402

SHAPE = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = [tricks.ZeroOutputs, tricks.SoftCapped, tricks.ScaledScores, tricks.EmbeddingSkips, tricks.ValueEmbeddings,
          tricks.BranchScales]  # fmt: skip


def batch():
    ids_BL = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids_BL, "attention_mask": torch.tensor([[1] * 7 + [2] * 5, [1] * 10 + [0] * 2]), "labels": ids_BL}


@pytest.mark.parametrize("kind", MODELS)
def test_every_part_of_a_trick_learns(kind):
    torch.manual_seed(0)
    model, plain = kind(modernbert_tiny(**SHAPE)), BertLabForMaskedLM(modernbert_tiny(**SHAPE))
    more = {name for name, _ in model.named_parameters()} - {name for name, _ in plain.named_parameters()}
    model(**batch()).loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
    still = [name for name in more if not model.get_parameter(name).grad.abs().sum() > 0]
    closed = [name for name in still if not name.startswith("values.")]  # a table opens once its share has moved
    assert not closed
    assert kind in (tricks.ZeroOutputs, tricks.SoftCapped) or more


@pytest.mark.parametrize("kind", [tricks.EmbeddingSkips, tricks.ValueEmbeddings, tricks.ScaledScores])
def test_a_trick_that_begins_closed_computes_what_the_plain_model_does(kind):
    torch.manual_seed(0)
    plain = BertLabForMaskedLM(modernbert_tiny(**SHAPE))
    model = kind(modernbert_tiny(**SHAPE))
    model.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(model(**batch()).loss, plain(**batch()).loss)


def test_zero_outputs_hand_the_embedding_on_and_caps_hold():
    torch.manual_seed(0)
    rows = {name: value for name, value in batch().items() if name != "labels"}
    model = tricks.ZeroOutputs(modernbert_tiny(**SHAPE)).eval()
    states = model(**rows, output_hidden_states=True).hidden_states
    torch.testing.assert_close(states[1], states[0])
    assert all(block.mlp_end_norm.factor_D.eq(0.1).all() for block in
               tricks.BranchScales(modernbert_tiny(**SHAPE)).encoder.blocks)  # fmt: skip
    capped = tricks.SoftCapped(modernbert_tiny(**SHAPE, initializer_range=5.0)).eval()
    assert capped(**rows).logits.abs().max() <= tricks.CappedHead.cap


def test_every_arm_is_a_configuration_of_the_laptop_track(tmp_path):
    for name, arm in ablations.ARMS.items():
        config = speedrun_config(TRACKS["laptop"], arm.recipe, tmp_path / "run", 0)
        assert name == "control" or arm.recipe or (arm.warmup, arm.cooldown) != (0.05, 0.3), name
        assert arm.tokens_per_step == (config["data"]["train_batch_size"] * config["data"]["max_sequence_length"]) / 2048, name


def test_recipes_are_laid_over_each_other_and_callbacks_put_together():
    found = ablations.joined({"model": {"a": 1}, "trainer": {"callbacks": [1]}}, {"model": {"b": 2}, "trainer": {"callbacks": [2]}})
    assert found == {"model": {"a": 1, "b": 2}, "trainer": {"callbacks": [1, 2]}}


@pytest.mark.parametrize("best, asked", [(2e-3, 3), (4e-3, 4), (16e-3, 6), (0.25e-3, 6)])
def test_a_rate_is_tuned_until_it_stands_between_two_worse_ones(best, asked):
    table = ablations.Table.__new__(ablations.Table)
    table.options, rates = argparse.Namespace(quick=False, steps=10), set()

    def ask(cases):
        rates.update(case["rate"] for case in cases)
        return [{"bits_per_byte": abs(case["rate"] - best)} for case in cases]

    table.ask = ask
    assert table.tuned("control", None) == pytest.approx(best)
    assert len(rates) == asked and min(rates) < best < max(rates)


def test_a_gain_is_of_seeds_side_by_side():
    runs = lambda *bits: [{"bits_per_byte": one, "loss": 2 * one} for one in bits]  # noqa: E731
    found = ablations.gain(runs(2.0, 3.0), runs(1.5, 2.9))
    assert found == pytest.approx({"mean": 0.3, "least": 0.1, "most": 0.5, "nats": 0.6})


@pytest.mark.parametrize("loss, kept", [(2.0005, True), (2.1, False)])
def test_runs_of_another_machine_are_laid_aside_and_not_lost(tmp_path, monkeypatch, loss, kept):
    path, run = tmp_path / "ablations.json", {"arm": "control", "rate": 1e-3, "seed": 0, "steps": 4, "quick": True, "loss": 2.0}
    path.write_text(json.dumps({"what": "old", "arms": {"gone": 1}, "runs": [run], "costs": []}))
    monkeypatch.setattr(ablations, "train_once", lambda case: {**case, "loss": loss})
    table = ablations.Table(argparse.Namespace(output=path, fresh=False, workers=1))
    table.check_control()
    assert table.found == {"runs": [run] * kept, "costs": []}
    assert (tmp_path / "ablations.before.json").exists() != kept
    table.write(arms={})
    assert json.loads(path.read_text())["arms"] == {}
