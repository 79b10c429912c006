"The ablations' arms are what they say, a rate is tuned until it stands between two worse ones, and tricks begin as they should."

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import ablations  # noqa: E402
import tricks  # noqa: E402
from speedrun import TRACKS, race_config  # noqa: E402

from bertlab.model.config import modernbert_tiny  # noqa: E402
from bertlab.model.heads import BertLabForMaskedLM  # noqa: E402

SHAPE = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
MODELS = [tricks.ZeroOutputs, tricks.SoftCapped, tricks.ScaledScores, tricks.EmbeddingSkips, tricks.ValueEmbeddings,
          tricks.BranchScales]  # fmt: skip


def batch():
    ids_BL = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    return {
        "input_ids": ids_BL,
        "attention_mask": torch.tensor([[1] * 7 + [2] * 5, [1] * 10 + [0] * 2]),
        "labels": ids_BL,
    }


@pytest.mark.parametrize("kind", MODELS)
def test_every_part_of_a_trick_learns(kind):
    torch.manual_seed(0)
    model, plain = kind(modernbert_tiny(**SHAPE)), BertLabForMaskedLM(modernbert_tiny(**SHAPE))
    more = {name for name, _ in model.named_parameters()} - {
        name for name, _ in plain.named_parameters()
    }
    model(**batch()).loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
    still = [name for name in more if not model.get_parameter(name).grad.abs().sum() > 0]
    closed = [
        name for name in still if not name.startswith("values.")
    ]  # a table opens once its share has moved
    assert not closed
    assert kind in (tricks.ZeroOutputs, tricks.SoftCapped) or more


@pytest.mark.parametrize(
    "kind", [tricks.EmbeddingSkips, tricks.ValueEmbeddings, tricks.ScaledScores]
)
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
    assert all(block.post_mlp_norm.factor_D.eq(0.1).all() for block in
               tricks.BranchScales(modernbert_tiny(**SHAPE)).encoder.blocks)  # fmt: skip
    capped = tricks.SoftCapped(modernbert_tiny(**SHAPE, initializer_range=5.0)).eval()
    assert capped(**rows).logits.abs().max() <= tricks.CappedHead.cap


RECORD = str(Path(ablations.__file__).parent / "records" / "muon_two_layers.yaml")


@pytest.mark.parametrize("on", [None, RECORD])
def test_every_arm_is_a_configuration_of_the_laptop_track(on, tmp_path):
    control = ablations.control_of(on)
    assert "control" in ablations.arms_on(on)
    for name in ablations.arms_on(on):
        arm = ablations.ARMS[name]
        config = race_config(
            TRACKS["laptop"], ablations.joined(control.recipe, arm.recipe), tmp_path / "run", 0
        )
        assert (
            name == "control"
            or arm.recipe
            or arm.shares
            or arm.kl_weight
            or arm.warmup
            or arm.cooldown
        ), name
        rows = config["data"]["train_batch_size"] * config["data"]["max_sequence_length"] / 2048
        assert arm.tokens_per_step == (2 / 3 if name == "growing batch" else rows), name
        plain = race_config(TRACKS["laptop"], control.recipe, tmp_path / "run", 0)
        assert (
            name == "control"
            or config != plain
            or arm.shares
            or arm.kl_weight
            or arm.warmup
            or arm.cooldown
        ), f"{name} changes nothing"


def test_a_recipe_that_leaves_its_rate_or_steps_out_is_answered(tmp_path):
    recipe = tmp_path / "half.yaml"
    recipe.write_text("model: {learning_rate: 0.001}\ntrainer: {max_steps: 10}\n")
    with pytest.raises(
        ValueError, match="half.yaml.*model.scheduler_warmup_steps, model.scheduler_cooldown_steps"
    ):
        ablations.control_of(str(recipe))
    recipe.write_text(
        "model: {learning_rate: 0.001, scheduler_warmup_steps: 1, scheduler_cooldown_steps: 2}\n"
    )
    with pytest.raises(ValueError, match="trainer.max_steps"):
        ablations.control_of(str(recipe))


def test_a_teacher_belongs_to_its_control():
    assert (
        len({ablations.teacher_of(quick, on) for quick in (True, False) for on in (None, RECORD)})
        == 4
    )


def test_the_batch_doubles_at_half_of_the_tokens():
    trainer = argparse.Namespace(max_steps=660, accumulate_grad_batches=1, world_size=1, global_step=0, val_check_batch=1,
                                 check_val_every_n_epoch=None, fit_loop=argparse.Namespace(batch_idx=0, total_batch_idx=0),
                                 strategy=argparse.Namespace(handles_gradient_accumulation=False))  # fmt: skip
    doubling = tricks.DoublingBatch()
    doubling.on_train_start(trainer, None)
    sizes = [doubling.warmup(step) for step in range(660)]
    assert sizes == [1] * 440 + [2] * 220 and sum(sizes[:440]) == sum(sizes[440:])


def test_the_control_is_the_first_demo_halved_or_the_recipe_in_a_file():
    first, record = ablations.control_of(None), ablations.control_of(RECORD)
    assert (first.steps, first.recipe) == (440, {})
    assert record.steps == 560 and record.rates == (6e-3, 1.2e-2, 2.4e-2) and record.cooldown == 0.5
    assert "learning_rate" not in record.recipe["model"]
    assert "muon" in ablations.arms_on(None) and "muon" not in ablations.arms_on(RECORD)
    assert "adamw" in ablations.arms_on(RECORD) and "adamw" not in ablations.arms_on(None)


def test_recipes_are_laid_over_each_other_and_callbacks_put_together():
    found = ablations.joined(
        {"model": {"a": 1}, "trainer": {"callbacks": [1]}},
        {"model": {"b": 2}, "trainer": {"callbacks": [2]}},
    )
    assert found == {"model": {"a": 1, "b": 2}, "trainer": {"callbacks": [1, 2]}}


@pytest.mark.parametrize("best, asked", [(2e-3, 3), (4e-3, 4), (16e-3, 6), (0.25e-3, 6)])
def test_a_rate_is_tuned_until_it_stands_between_two_worse_ones(best, asked):
    table = ablations.Table.__new__(ablations.Table)
    table.options, table.here, rates = argparse.Namespace(quick=False, steps=10, on=None), 0, set()

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
    found = ablations.gain(
        runs(2.0, 3.0, 4.0), runs(1.5, 2.9), paired=False
    )  # with the mean, 3, of all of the control's
    assert found == pytest.approx({"mean": 0.8, "least": 0.1, "most": 1.5, "nats": 1.6})


def table_of(shared: float, own: float, num_control: int) -> dict:
    "What 12 arms of no worth and one that is worth 0.2 come to; `shared` is what a seed does to all arms alike."
    draw = torch.Generator().manual_seed(0)
    of_seed = shared * torch.randn(num_control, generator=draw)
    arms = {"control": (0.0, num_control), **{f"arm {i}": (0.2 * (i == 0), 3) for i in range(13)}}
    runs = [{"arm": name, "rate": 1.0, "seed": seed, "steps": 4, "machine": 0,
             "bits_per_byte": (bits := 2 - gain + of_seed[seed].item() + own * torch.randn((), generator=draw).item()), "loss": bits}
            for name, (gain, seeds) in arms.items() for seed in range(seeds)]  # fmt: skip
    rows = {name: {"rate": 1.0, "control_rate": 1.0, "machine": 0} for name in arms}
    return {"machines": [{}], "runs": runs, "arms": rows}


@pytest.mark.parametrize(
    "shared, num_control, paired", [(0.1, 3, True), (0.1, 9, True), (0.0, 9, False)]
)
def test_seeds_are_compared_side_by_side_where_that_makes_gains_surer(shared, num_control, paired):
    found = table_of(shared, 0.02, num_control)
    ablations.settle(found, 4)
    (scatter,) = found["scatter"]
    assert scatter["paired"] is paired and scatter["control_runs"] == num_control
    ends = {name: row["equal_tokens"] for name, row in found["arms"].items() if name != "control"}
    half = (ends["arm 1"]["high"] - ends["arm 1"]["low"]) / 2
    assert half == pytest.approx(2 * 0.02 * (2 / 3 if paired else 1 / 3 + 1 / 9) ** 0.5, rel=0.25)
    assert (
        sum(
            not end["low"] < (0.2 if name == "arm 0" else 0) < end["high"]
            for name, end in ends.items()
        )
        <= 1
    )
    assert ends["arm 0"]["low"] > 0.1


def test_runs_of_what_an_arm_was_before_do_not_count():
    found = table_of(0.0, 0.02, 3)
    ablations.settle(found, 4)
    gained = found["arms"]["arm 0"]["equal_tokens"]["mean"]
    old = [
        {**run, "digest": "old", "bits_per_byte": 9.0}
        for run in found["runs"]
        if run["arm"] == "arm 0"
    ]
    found["runs"] += old  # behind the others, so that they would take their places
    found["arms"]["arm 0"]["digest"] = "new"
    ablations.settle(found, 4)
    assert found["arms"]["arm 0"]["equal_tokens"]["mean"] == gained


def test_two_arms_do_not_say_how_much_runs_scatter():
    found = table_of(0.0, 0.02, 3)
    found["arms"] = {name: found["arms"][name] for name in ("control", "arm 0", "arm 1")}
    ablations.settle(found, 4)
    assert found["scatter"] == [None] and "equal_tokens" not in found["arms"]["arm 0"]


def test_an_arm_that_has_changed_is_another_and_a_new_trick_leaves_the_others_as_they_are(
    monkeypatch, tmp_path
):
    def digests():
        ablations.digest.cache_clear()
        return {
            name: ablations.digest(name, None)
            for name in ("control", "mask 0.4", "muon, polar", "muon, rows alike")
        }

    first = digests()
    assert len(set(first.values())) == 4
    source = (Path(ablations.__file__).parent / "tricks.py").read_text()
    monkeypatch.setattr(ablations, "__file__", str(tmp_path / "ablations.py"))
    (tmp_path / "tricks.py").write_text(source + "\n\nclass Another:\n    pass\n")
    assert digests() == first
    (tmp_path / "tricks.py").write_text(
        source.replace("SAFETY = 1.01", "SAFETY = 1.02")
    )  # what polar's function reads
    changed = digests()
    assert {name for name in first if changed[name] != first[name]} == {"muon, polar"}
    monkeypatch.setitem(
        ablations.ARMS,
        "mask 0.4",
        ablations.Arm("40 % hidden", ablations.masks(mlm_probability=0.9)),
    )
    assert {name for name, one in digests().items() if changed[name] != one} == {"mask 0.4"}
    ablations.digest.cache_clear()


def test_a_run_of_an_arm_that_has_changed_is_made_anew(tmp_path):
    table = opened(tmp_path / "ablations.json")
    case = table.case("mask 0.4", 1e-3, 0)
    assert case["digest"] == ablations.digest("mask 0.4", None)
    without = {name: value for name, value in case.items() if name != "digest"}
    table.found["runs"] = [{**without, "digest": "another", "loss": 1.0}]
    assert table.known(case) is None
    table.found["runs"] = [{**without, "loss": 2.0}]  # of a time without digests
    assert table.known(case)["loss"] == 2.0


@pytest.mark.parametrize("words, said", [
    (["--steps", "20"], "other steps or fewer seeds"), (["--seeds", "1"], "other steps or fewer seeds"),
    (["--steps", "20", "--output", "FULL"], "holds runs of 440 steps, not 20"),
])  # fmt: skip
def test_a_smaller_measurement_does_not_replace_rows_of_the_full_one(
    words, said, tmp_path, monkeypatch, capsys
):
    full = tmp_path / "full.json"
    full.write_text(
        json.dumps(
            {"steps": 440, "machines": [{}], "runs": [{"arm": "control"}], "costs": [], "arms": {}}
        )
    )
    monkeypatch.setattr(
        sys, "argv", ["ablations.py", *[str(full) if word == "FULL" else word for word in words]]
    )
    with pytest.raises(SystemExit):
        ablations.main()
    assert said in capsys.readouterr().err
    assert json.loads(full.read_text())["steps"] == 440


def test_a_recipe_is_read_from_wherever_the_script_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ablations.control_of("benchmarks/records/muon_two_layers.yaml").steps == 560


def test_a_row_that_is_made_again_keeps_what_was_timed(tmp_path, monkeypatch):
    table = opened(tmp_path / "ablations.json", seeds=2)
    monkeypatch.setattr(table, "ask", lambda cases: [
        {**case, "loss": 1.5, "bits_per_byte": 1.5, "plain": True, "parameters": 7} for case in cases])  # fmt: skip
    control = [{"loss": 2.0, "bits_per_byte": 2.0, "rate": 1e-3}] * 2
    timed = {"cost": 1.5, "steps": 3, "equal_seconds": {"mean": 0.1}}
    for rate, more, kept in (
        (2e-3, {}, True),
        (4e-3, {}, False),
        (2e-3, {"digest": "another"}, False),
    ):
        table.found["arms"]["muon"] = {
            "machine": 0,
            "rate": rate,
            "control_rate": 1e-3,
            **timed,
            **more,
        }
        table.at_equal_tokens("muon", 2e-3, control)
        row = table.found["arms"]["muon"]
        assert row["rate"] == 2e-3 and ({name: row.get(name) for name in timed} == timed) is kept


def opened(path: Path, **options) -> ablations.Table:
    return ablations.Table(argparse.Namespace(**{"output": path, "fresh": False, "workers": 1, "on": None, "steps": 4,
                                                 "quick": True, "seeds": 3, **options}))  # fmt: skip


@pytest.mark.parametrize("loss, here", [(2.0005, 0), (2.1, 1)])
def test_runs_of_another_machine_stay_and_a_control_of_its_own_begins_beside_them(
    tmp_path, monkeypatch, loss, here
):
    path, run = (
        tmp_path / "ablations.json",
        {"arm": "control", "rate": 1e-3, "seed": 0, "steps": 4, "quick": True, "loss": 2.0},
    )
    rows = {"gone": {"rate": 1.0}, "control": {"rate": 1e-3}, "muon": {"rate": 2e-3}}
    path.write_text(
        json.dumps(
            {
                "what": "old",
                "machine": {"processor": "old"},
                "arms": rows,
                "runs": [run],
                "costs": [],
            }
        )
    )
    monkeypatch.setattr(ablations, "train_once", lambda case: {**case, "loss": loss})
    table = opened(path)
    table.find_place()
    assert table.here == here and len(table.found["machines"]) == 1 + here
    assert (
        table.found["runs"] == [{**run, "machine": 0}]
        and table.found["arms"]["muon"]["machine"] == 0
    )
    assert table.missing(["control", "muon", "rows 8"]) == [
        "control",
        *["muon"] * (1 - here),
        "rows 8",
    ]
    case = table.case("control", 1e-3, 0)
    assert (table.known(case) is None) == bool(here)  # its own control is run again there
    table.write()
    written = json.loads(path.read_text())
    assert written["machine"] == {"processor": "old"} and written["machines"][0] == {
        "processor": "old"
    }
    assert list(written["arms"]) == ["control", "muon"]  # an arm that there is no more has no row
    assert written["arms"]["muon"]["control_rate"] == 1e-3
    assert written["steps"] == 4 and written["of"] == len(ablations.arms_on(None))
    again = opened(path)
    again.find_place()  # the second place has no run yet, and is not kept beside a third
    assert again.here == here and len(again.found["machines"]) == 1 + here


def test_a_second_place_is_found_again_by_its_control(tmp_path, monkeypatch):
    path = tmp_path / "ablations.json"
    runs = [
        {
            "arm": "control",
            "rate": 1e-3,
            "seed": 0,
            "steps": 4,
            "quick": True,
            "machine": n,
            "loss": 2.0 + n,
        }
        for n in (0, 1)
    ]
    path.write_text(
        json.dumps(
            {
                "machines": [{"processor": "a"}, {"processor": "b"}],
                "arms": {},
                "runs": runs,
                "costs": [],
            }
        )
    )
    asked = []
    monkeypatch.setattr(
        ablations, "train_once", lambda case: asked.append(case["machine"]) or {**case, "loss": 3.0}
    )
    table = opened(path)
    table.find_place()
    assert (asked, table.here, len(table.found["machines"])) == ([0, 1], 1, 2)
    assert table.known(table.case("control", 1e-3, 0)) == runs[1]


def test_arms_are_judged_side_by_side_and_each_row_is_written_as_soon_as_it_is_there(
    tmp_path, monkeypatch
):
    path = tmp_path / "ablations.json"
    table = ablations.Table(
        argparse.Namespace(
            output=path, fresh=True, workers=1, on=None, steps=4, seeds=2, quick=True
        )
    )
    loss = {"control": 2.0, "muon": 1.5, "rows 8": 1.9}
    monkeypatch.setattr(table, "ask", lambda cases: [
        {**case, "loss": loss[case["arm"]], "bits_per_byte": loss[case["arm"]], "plain": True, "parameters": 7}
        for case in cases])  # fmt: skip
    control = table.seeds("control", 1e-3)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(table.at_equal_tokens, ["rows 8", "muon"], [1e-3, 2e-3], [control] * 2))
    rows = json.loads(path.read_text())["arms"]
    assert list(rows) == [name for name in ablations.ARMS if name in rows] == ["muon", "rows 8"]
    assert (
        rows["muon"]["equal_tokens"]["mean"] == pytest.approx(0.5) and rows["muon"]["rate"] == 2e-3
    )


@pytest.mark.parametrize("cost, steps", [(0.5, 8), (2.0, 2)])
def test_equal_seconds_are_the_steps_that_the_control_would_take_them_for(
    tmp_path, monkeypatch, cost, steps
):
    path = tmp_path / "ablations.json"
    table = opened(path, seeds=2)
    table.found["arms"]["muon"] = {"rate": 2e-3, "machine": 0, "equal_tokens": {"mean": 0.1}}
    asked = []
    monkeypatch.setattr(table, "ask", lambda cases: asked.extend(cases) or [
        {**case, "loss": 1.0, "bits_per_byte": 1.5} for case in cases])  # fmt: skip
    control = [{"loss": 2.0, "bits_per_byte": 2.0}] * 2
    table.at_equal_seconds("muon", cost, control)
    assert [(case["steps"], case["rate"], case["seed"]) for case in asked] == [
        (steps, 2e-3, 0),
        (steps, 2e-3, 1),
    ]
    row = json.loads(path.read_text())["arms"]["muon"]
    assert (row["cost"], row["steps"], row["equal_seconds"]["mean"]) == (cost, steps, 0.5)
    assert row["equal_tokens"] == {"mean": 0.1} and "timed" not in row  # the first stays


def test_a_step_that_costs_the_same_gains_in_seconds_what_it_gains_in_tokens(tmp_path, monkeypatch):
    table = opened(tmp_path / "ablations.json", seeds=2)
    table.found["arms"]["muon"] = {"rate": 2e-3, "machine": 3, "equal_tokens": {"mean": 0.1}}
    monkeypatch.setattr(table, "ask", lambda cases: pytest.fail("the runs of equal tokens say it"))
    table.at_equal_seconds("muon", 1.02, [{"loss": 2.0, "bits_per_byte": 2.0, "rate": 1e-3}] * 2)
    row = table.found["arms"]["muon"]
    assert (row["cost"], row["steps"], row["equal_seconds"]) == (
        1.02,
        4,
        {"mean": 0.1},
    ) and "timed" not in row


@pytest.mark.parametrize("alone", [False, True])
def test_an_arm_of_another_place_is_timed_here_beside_the_control_of_this_place(
    tmp_path, monkeypatch, alone
):
    table = opened(tmp_path / "ablations.json", seeds=3)
    found = table.found
    found |= table_of(0.0, 0.02, 3)
    found["machines"], table.here = [{}, {}], 1
    here = [
        {**run, "machine": 1, "rate": 3.0 if run["arm"] == "control" else 2.0}
        for run in found["runs"]
    ]
    found["runs"] += here
    theirs = {name for name in found["arms"] if name != "control"}
    if alone:  # one arm cannot say how much runs scatter there, but three that are timed there can
        for name in ("arm 1", "arm 2", "arm 3"):
            found["arms"][name] |= {
                "steps": 2,
                "equal_seconds": {},
                "timed": {"machine": 1, "control_rate": 3.0},
            }
            found["runs"] += [
                {**run, "steps": 2, "rate": 1.0} for run in here if run["arm"] == name
            ]
    else:
        found["arms"] |= {f"{name} too": {**found["arms"][name], "machine": 1, "rate": 2.0, "control_rate": 3.0}
                          for name in theirs}  # fmt: skip
        found["runs"] += [
            {**run, "arm": f"{run['arm']} too"} for run in here if run["arm"] in theirs
        ]
    ablations.settle(found, 4)
    assert None not in found["scatter"]
    before = dict(found["arms"]["arm 0"])
    monkeypatch.setattr(
        ablations, "ARMS", {**ablations.ARMS, **dict.fromkeys(found["arms"], ablations.Arm(""))}
    )
    control = [run for run in here if run["arm"] == "control"]
    made = [{"arm": "arm 0", "rate": 1.0, "seed": seed, "steps": 2, "machine": 1, "bits_per_byte": 1.5, "loss": 1.5}
            for seed in range(3)]  # fmt: skip
    monkeypatch.setattr(table, "ask", lambda cases: found["runs"].extend(made) or made)
    assert "arm 0" in table.untimed([*found["arms"]]) and "arm 0 too" not in table.untimed(
        [*found["arms"]]
    )
    table.at_equal_seconds("arm 0", 2.0, control)
    row = found["arms"]["arm 0"]
    assert {name: row[name] for name in before} == before  # nothing of the place where it was tuned
    assert row["timed"] == {"machine": 1, "control_rate": 3.0} and row["steps"] == 2
    level = sum(run["bits_per_byte"] for run in control) / 3
    assert row["equal_seconds"]["mean"] == pytest.approx(level - 1.5)
    assert 0 < row["equal_seconds"]["mean"] - row["equal_seconds"]["low"] < 0.1
    assert "arm 0" not in table.untimed([*found["arms"]])
    table.here = 0  # where it was tuned, and is timed now: what stood there of the other place goes
    table.at_equal_seconds(
        "arm 0",
        1.0,
        [run for run in found["runs"] if run["arm"] == "control" and run["machine"] == 0],
    )
    assert "timed" not in row and row["equal_seconds"] == row["equal_tokens"]
    row["digest"] = "of what it was before"
    del row["equal_seconds"]
    assert "arm 0" not in table.untimed([*found["arms"]])


def test_of_places_of_one_processor_that_of_this_precision_is_tried_first(tmp_path, monkeypatch):
    path, mine = tmp_path / "ablations.json", ablations.machine(1)
    runs = [
        {
            "arm": "control",
            "rate": 1e-3,
            "seed": 0,
            "steps": 4,
            "quick": True,
            "machine": n,
            "loss": 2.0,
        }
        for n in (0, 1)
    ]
    places = [
        {"processor": mine["processor"], "computes_in": one}
        for one in ("another", mine["computes_in"])
    ]
    path.write_text(json.dumps({"machines": places, "arms": {}, "runs": runs, "costs": []}))
    monkeypatch.setattr(ablations, "train_once", lambda case: {**case, "loss": 2.0})
    table = opened(path)
    table.find_place()
    assert table.here == 1


def test_the_place_of_this_kind_of_processor_is_tried_first(tmp_path, monkeypatch):
    path = tmp_path / "ablations.json"
    runs = [
        {
            "arm": "control",
            "rate": 1e-3,
            "seed": 0,
            "steps": 4,
            "quick": True,
            "machine": n,
            "loss": 2.0,
        }
        for n in (0, 1)
    ]
    mine = ablations.machine(1)["processor"]
    path.write_text(
        json.dumps(
            {
                "machines": [{"processor": "b"}, {"processor": mine}],
                "arms": {},
                "runs": runs,
                "costs": [],
            }
        )
    )
    asked = []
    monkeypatch.setattr(
        ablations, "train_once", lambda case: asked.append(case["machine"]) or {**case, "loss": 2.0}
    )
    table = opened(path)
    table.find_place()
    assert (asked, table.here) == ([1], 1)


def test_the_best_polynomials_bring_singular_values_closer_to_one_than_muons_do():
    from bertlab.optim.muon import orthogonalize

    torch.manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(40, 40))
    right, _ = torch.linalg.qr(torch.randn(40, 40))
    values = torch.logspace(-2.2, 0, 40)
    matrix = left @ torch.diag(values / values.norm()) @ right
    off = {
        kind: (torch.linalg.svdvals(kind(matrix, 5).float()) - 1).abs().max().item()
        for kind in (tricks.polar, orthogonalize)
    }
    assert off[tricks.polar] < 0.2 < off[orthogonalize]
    last = tricks.polar_rounds(7)[-1]
    assert last == pytest.approx(
        (15 / 8, -10 / 8, 3 / 8), abs=1e-3
    )  # the limit is Newton and Schulz' own


@pytest.mark.parametrize("kind", [tricks.PolarMuon, tricks.NorMuon])
def test_muons_relatives_move_as_much_as_muon_and_go_on_from_a_checkpoint(kind):
    def moved(optimizer_class, stop_at=None):
        torch.manual_seed(0)
        matrices = [torch.nn.Parameter(torch.randn(8, 16)) for _ in range(2)]
        start = [matrix.detach().clone() for matrix in matrices]
        make = lambda: optimizer_class(
            [{"params": matrices, "hidden": True}], lr=0.1, weight_decay=0.0
        )  # noqa: E731
        optimizer = make()
        for step in range(3):
            if step == stop_at:
                state = optimizer.state_dict()
                optimizer = make()
                optimizer.load_state_dict(state)
            draw = torch.Generator().manual_seed(step)
            for matrix in matrices:
                matrix.grad = torch.randn(8, 16, generator=draw)
            optimizer.step()
        return [a.detach() - b for a, b in zip(matrices, start)]

    from bertlab.optim.muon import MuonWithAdamW

    ours, theirs = moved(kind), moved(MuonWithAdamW)
    for a, b in zip(ours, theirs):
        assert 0.8 < a.norm() / b.norm() < 1.25 and not torch.allclose(a, b, atol=1e-3)
    for a, b in zip(moved(kind, stop_at=2), ours):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "kind, rows, parts",
    [
        (tricks.MuonOfParts, 24, 3),
        (tricks.MuonOfAllParts, 24, 3),
        (tricks.MuonOfAllParts, 32, 2),
        (tricks.MuonOfParts, 32, 1),
    ],
)
def test_parts_of_a_matrix_move_as_matrices_of_their_own(kind, rows, parts):
    from bertlab.optim.muon import MuonWithAdamW

    def moved(optimizer_class, count):
        torch.manual_seed(0)
        starts = torch.randn(2, rows, 8).reshape(2 * count, rows // count, 8)
        matrices = [torch.nn.Parameter(start.clone()) for start in starts]
        optimizer = optimizer_class(
            [{"params": matrices, "hidden": True}], lr=0.1, weight_decay=0.01
        )
        for step in range(3):
            grads = torch.randn(2, rows, 8, generator=torch.Generator().manual_seed(step))
            for matrix, grad in zip(matrices, grads.reshape(starts.shape)):
                matrix.grad = grad.clone()
            optimizer.step()
        return torch.stack([matrix.detach() for matrix in matrices]).reshape(2, rows, 8)

    ours = moved(kind, 1)
    torch.testing.assert_close(ours, moved(MuonWithAdamW, parts), atol=2e-3, rtol=2e-3)
    if parts > 1:
        assert not torch.allclose(ours, moved(MuonWithAdamW, 1), atol=1e-2)


def test_short_rows_are_the_same_tokens_and_labels_in_rows_half_as_long():
    trainer = argparse.Namespace(global_step=0, max_steps=10)
    ids_BL = torch.arange(32).view(2, 16)
    labels_BL = torch.where(ids_BL % 5 == 0, ids_BL, -100)
    given = {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL), "position_ids": torch.arange(16).expand(2, 16),
             "labels": labels_BL, "label_positions": torch.zeros(2, 4, dtype=torch.long),
             "num_dropped_labels": torch.tensor([1, 2])}  # fmt: skip
    short = dict(given)
    tricks.ShortRowsFirst(8, 0.5).on_train_batch_start(trainer, None, short, 0)
    assert (
        short["input_ids"].shape == short["labels"].shape == (4, 8)
        and short["num_dropped_labels"].sum() == 3
    )
    found = short["labels"].gather(1, short["label_positions"])
    assert sorted(found[found != -100].tolist()) == labels_BL[labels_BL != -100].tolist()
    later = dict(given)
    trainer.global_step = 5
    tricks.ShortRowsFirst(8, 0.5).on_train_batch_start(trainer, None, later, 0)
    assert later["input_ids"].shape == (2, 16)


def test_a_model_that_grows_computes_with_its_first_blocks_and_ends_whole():
    torch.manual_seed(0)
    model = BertLabForMaskedLM(modernbert_tiny(**{**SHAPE, "num_hidden_layers": 4})).eval()
    names = [name for name, _ in model.named_parameters()]
    module, trainer = (
        argparse.Namespace(model=model),
        argparse.Namespace(global_step=0, max_steps=10),
    )
    growing = tricks.GrowingDepth(2, 0.5)
    growing.on_train_start(trainer, module)
    growing.on_train_batch_start(trainer, module, None, 0)
    assert len(model.encoder.blocks) == 2
    assert (
        model(**{name: value for name, value in batch().items() if name != "labels"})
        .logits.isfinite()
        .all()
    )
    with pytest.raises(ValueError, match="before the model had grown"):
        growing.on_train_end(trainer, module)
    trainer.global_step = 5
    growing.on_train_batch_start(trainer, module, None, 5)
    growing.on_train_end(trainer, module)
    assert [name for name, _ in model.named_parameters()] == names
    for name, weight in model.encoder.blocks[1].named_parameters():
        assert torch.equal(model.encoder.blocks[3].get_parameter(name), weight), name


def test_the_first_epoch_goes_from_frequent_tokens_to_rare_ones_and_later_ones_do_not():
    from bertlab.data.packing import PackedDataset

    documents = [[5] * 6, [40 + i for i in range(6)], [5, 5, 5, 6, 6, 6], [5, 5, 6, 6, 50, 51]] * 5
    dataset = PackedDataset(documents, 6, pad_token_id=0, seed=3)
    keys = [(epoch, index) for epoch in (0, 1) for index in range(len(dataset))]
    before = [row["input_ids"].tolist() for row in dataset.build(keys)]
    trainer = argparse.Namespace(datamodule=argparse.Namespace(train_dataset=dataset))
    tricks.EasyFirst().on_fit_start(
        trainer, argparse.Namespace(config=argparse.Namespace(vocab_size=60))
    )
    after = [row["input_ids"].tolist() for row in dataset.build(keys)]
    half = len(dataset)
    assert sorted(after[:half]) == sorted(before[:half]) and after[half:] == before[half:]
    assert after[:5] == [[5] * 6] * 5 and all(row[0] == 40 for row in after[half - 5 : half])
