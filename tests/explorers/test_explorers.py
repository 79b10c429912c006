"The explorers' own arithmetic: printed lines make the drawn schedule, updates are measured, controls are controls."

import gc
import json
import math
import os
import re
import subprocess
import sys
import time
import weakref
from types import SimpleNamespace

import ipywidgets
import numpy as np
import pytest
import torch
import yaml
import zmq
from conftest import ROOT
from explorer_cases import CASES, SETUP, find_widgets
from hypothesis import given, settings
from hypothesis import strategies as st
from jupyter_client import KernelManager
from jupyter_client.session import Session

import bertlab.explorers.training_monitor as training_monitor
from bertlab.train.checkpoints import RunCheckpoint
from bertlab.train.history import History
from bertlab.cli.main import main
from bertlab.model.config import modernbert_tiny
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.explorers.models import (
    attention_browser,
    attention_maps,
    embedding_map,
    find_token,
    nearest_tokens,
    pca_plane,
    shuffle_words,
    spread_labels,
    untrained_twin,
)
from bertlab.train.modules import PretrainingModule, build_optimizer
from bertlab.train.reports import stop_reason
from bertlab.explorers.optimizers import (
    OptimizerRun,
    UpdateRecorder,
    load_runs,
    mean_curve,
    optimizer_race,
    race_html,
)
from bertlab.explorers.optimizers import save_runs
from bertlab.explorers.schedules import (
    design_schedule,
    full_rate_steps,
    phase_options,
    rate_designer,
    schedule_python,
    schedule_yaml,
    yaml_number,
)
from bertlab.optim.schedulers import SCHEDULE_KINDS, Schedule
from bertlab.train.trainer import make_trainer
from bertlab.explorers.training_monitor import (
    MonitorPanel,
    TrainingMonitor,
    WidgetMail,
    monitor_curves,
)
from bertlab.explorers.widgets import downsample

MINE = ("schedule_designer", "optimizer_race", "attention_browser", "embedding_map")


@pytest.fixture(scope="module")
def room() -> dict:
    "A tokenizer and small models, as the browser tests have them."
    room: dict = {}
    exec(SETUP, room)
    return room


def control(explorer, description):
    return next(
        one for one in find_widgets(explorer) if getattr(one, "description", "") == description
    )


# Schedule designer


def rates_of(scheduler, num_steps: int) -> list[float]:
    rates = []
    for _ in range(num_steps):
        rates.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


designs = st.fixed_dictionaries(
    {
        "warmup_kind": st.sampled_from(SCHEDULE_KINDS["warmup"]),
        "warmup_steps": st.integers(0, 9),
        "warmup_decay": st.sampled_from([0.25, 0.01]),
        "training_kind": st.sampled_from(["linear", "cosine", "exponential"]),
        "training_steps": st.sampled_from([-1, 5]),
        "training_decay": st.sampled_from([1.0, 0.3]),
        "cooldown_kind": st.sampled_from(["linear", "inverse-sqrt", "cosine", "exponential"]),
        "cooldown_steps": st.integers(1, 9),
        "cooldown_decay": st.sampled_from([0.1, 0.001]),
    }
)


def test_fractions_and_tokens_are_drawn():
    schedule = Schedule(warmup_steps=0.1, cooldown_steps=0.2, total_steps=1000)
    options = phase_options(schedule)
    assert (options["warmup_steps"], options["cooldown_steps"]) == (100, 200)
    assert "warmup_steps: 100" in schedule_yaml(schedule, 1000, 1e-3)
    explorer = rate_designer(1000, 1e-3, warmup_steps=0.1, cooldown_steps=0.2)
    assert (
        control(explorer, "warmup updates").value == 100
        and control(explorer, "cooldown updates").value == 200
    )


@settings(derandomize=True, deadline=None, max_examples=25)
@given(phases=designs, peak=st.sampled_from([1e-5, 3e-4, 1.5e-07, 0.1, 1]))
def test_the_printed_python_makes_the_drawn_schedule(phases, peak):
    schedule = Schedule(**phases, total_steps=25)
    names = {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)}
    exec(schedule_python(schedule, 25, peak), names)
    np.testing.assert_allclose(
        rates_of(names["scheduler"], 28), [peak * schedule(n) for n in range(28)], rtol=1e-12
    )


@settings(derandomize=True, deadline=None, max_examples=8)
@given(phases=designs, peak=st.sampled_from([1e-5, 3e-4, 1.5e-07, 0.1]))
def test_the_printed_yaml_makes_the_drawn_schedule_in_the_module(phases, peak):
    schedule = Schedule(**phases, total_steps=25)
    config = yaml.safe_load(schedule_yaml(schedule, 25, peak))
    shape = modernbert_tiny(vocab_size=50, num_hidden_layers=1, hidden_size=16, intermediate_size=16,
                            num_attention_heads=1).to_diff_dict()  # fmt: skip
    module = PretrainingModule(shape, **config["model"])
    module.configure_model()
    made = build_optimizer(module.model, module.hparams, config["trainer"]["max_steps"])
    rates = rates_of(made["lr_scheduler"]["scheduler"], 25)
    np.testing.assert_allclose(rates, [peak * schedule(n) for n in range(25)], rtol=1e-12)


@pytest.mark.filterwarnings("ignore")
def test_the_printed_yaml_is_a_configuration_of_the_command(tmp_path, capsys):
    schedule = Schedule(
        warmup_steps=3, cooldown_kind="inverse-sqrt", cooldown_steps=5, total_steps=20
    )
    (tmp_path / "design.yaml").write_text(schedule_yaml(schedule, 20, 1e-5))
    assert main(["pretrain", "--config", str(tmp_path / "design.yaml"), "--print_config"]) == 0
    read = yaml.safe_load(capsys.readouterr().out)
    made = {name: read["model"][f"scheduler_{name}"] for name in phase_options(schedule)}
    assert made == phase_options(schedule) and made["cooldown_kind"] == "inverse-sqrt"
    assert read["model"]["learning_rate"] == 1e-5 and read["trainer"]["max_steps"] == 20


@pytest.mark.parametrize("value", [1e-5, 1e-16, 2.5e-07, 1e22, 0.1, 0.0, 3, 1_000_000])
def test_a_number_in_yaml_comes_back_as_the_same_number(value):
    read = yaml.safe_load(f"x: {yaml_number(value)}")["x"]
    assert read == value and not isinstance(read, str)


def test_the_area_is_a_sum_by_hand_and_a_sample_of_it_on_long_runs():
    # 1/4 + 2/4 + 3/4 + 1, five flat ones, then 1, 3/4, 1/2, 1/4.
    assert full_rate_steps(
        Schedule(warmup_steps=4, cooldown_steps=4, total_steps=13), 13
    ) == pytest.approx(10)
    long = {"warmup_steps": 40_000, "cooldown_steps": 160_000, "total_steps": 1_000_000}
    linear = 40_001 / 2 + 800_000 + 160_001 / 2
    assert full_rate_steps(Schedule(**long), 1_000_000) == pytest.approx(linear, abs=1000)


def test_the_boxes_hold_the_drawn_design():
    designer = rate_designer(num_steps=400, learning_rate=1e-5, warmup_steps=30, cooldown_steps=70)
    boxes = [control(designer, name) for name in ("YAML", "Python")]
    control(designer, "cooldown updates").value = 100
    read = yaml.safe_load(boxes[0].value)
    assert (
        read["model"]["scheduler_cooldown_steps"] == 100 and read["model"]["learning_rate"] == 1e-5
    )
    assert "cooldown_steps=100," in boxes[1].value and "total_steps=400," in boxes[1].value
    control(designer, "run (updates)").value = 90
    assert [box.value for box in boxes] == ["", ""] and 'role="alert"' in designer.children[
        -1
    ].value
    control(designer, "run (updates)").value = 130
    assert boxes[0].value.endswith("max_steps: 130")


def test_sliders_reach_as_far_as_the_run_that_is_typed():
    designer = rate_designer(num_steps=100)
    control(designer, "run (updates)").value = 5000
    assert (
        control(designer, "warmup updates").max == control(designer, "cooldown updates").max == 5000
    )
    control(designer, "run (updates)").value = -3
    assert control(designer, "cooldown updates").value == 20  # a typing error moves no slider


# Optimizer replay


def test_an_update_is_measured_by_its_size_and_its_singular_values():
    run, matrix = OptimizerRun("hand", 1.0, 0), torch.zeros(2, 3)
    watch = UpdateRecorder(run, matrix, every=2)
    matrix += torch.tensor([[3.0, 0, 0], [0, 0, 0]])  # in place, as optimizers do
    watch.look(matrix)
    matrix += torch.tensor([[0.0, 2, 0], [1, 0, 0]])
    watch.look(matrix)
    assert run.update_sizes == [
        pytest.approx(math.sqrt(9 / 6), rel=1e-3),
        pytest.approx(math.sqrt(5 / 6), rel=1e-3),
    ]
    assert run.spectra == {1: [3, 0], 2: [2, 1]}


def test_a_small_update_of_float16_is_measured():
    run = OptimizerRun("rule", 0.1, 0)
    matrix = torch.zeros(4, 4, dtype=torch.float16)
    watch = UpdateRecorder(run, matrix)
    watch.look(matrix + 1e-4)
    assert run.update_sizes == [pytest.approx(1e-4, rel=1e-2)]


def test_saved_runs_load_again(tmp_path):
    matrix = torch.zeros(2, 2)
    wild = OptimizerRun("wild", 9.0, 0, losses=[4.0, None])
    watch = UpdateRecorder(wild, matrix, every=1)
    for step in (1.0, math.inf):
        matrix += step
        watch.look(matrix)
    tame = OptimizerRun("tame", 0.1, 0, [4.0, 3.0], [0.1, 0.1], {1: [1.0, 0.5]})
    save_runs([wild, tame], tmp_path / "runs.json")
    assert load_runs(tmp_path / "runs.json") == [wild, tame]
    assert "Infinity" not in (tmp_path / "runs.json").read_text() and list(wild.spectra) == [1]
    race = optimizer_race([wild, tame])
    control(race, "update").value = 2
    said = race.children[-1].value
    assert "diverged" in said and "not finite" in said and "3.000" in said and "a bug" not in said


def test_a_mean_over_seeds_ends_where_one_of_them_has_no_loss():
    seeds = [OptimizerRun("x", 1, s, [float(s)] * 3 + [None], [1.0, 2.0, 3.0, 4.0]) for s in (1, 3)]
    at, loss = mean_curve(seeds, "losses")
    assert at.tolist() == [1, 2, 3, 4] and loss[:3].tolist() == [2, 2, 2] and math.isnan(loss[3])
    assert mean_curve(seeds, "update_sizes", points=2)[1].tolist() == [1, 4]


def test_unequal_seeds_end_at_the_shortest():
    long = OptimizerRun(
        "slow", 0.1, 0, [4.0, 3.0, 2.0, 1.0], [0.4, 0.3, 0.2, 0.1], {2: [1.0, 0.9], 4: [1.0, 0.1]}
    )
    short, other = (
        OptimizerRun("slow", 0.1, 1, [4.0, 2.0], [0.4, 0.3]),
        OptimizerRun("full", 0.1, 0, [5.0] * 4, [0.5] * 4),
    )
    race = optimizer_race([long, short, other])
    control(race, "update").value = 4
    said = race.children[-1].value
    assert (
        "<td style='padding:0 .8em'>2.500</td>" in said and "3.00e-01" in said and "2 of 2" in said
    )  # of update 2
    assert "5.000" in said and 'role="alert"' not in race.static_html


@pytest.mark.parametrize("rule", ["update", "num_points"])
def test_a_rule_may_have_any_name(rule):
    race = optimizer_race([OptimizerRun(rule, 0.1, 0, [4.0, 3.0], [0.1, 0.1], {1: [1.0]})])
    control(race, "update").value = 2
    assert "3.000" in race.children[-1].value
    box = next(
        one
        for one in find_widgets(race)
        if getattr(one, "description", "") == rule and one.value is True
    )
    box.value = False
    assert "choose at least one rule" in race.children[-1].value


@pytest.mark.parametrize(
    "runs", [[], [OptimizerRun("x", 1, 0)], [OptimizerRun("x", 1, 0, [1.0], [])]]
)
def test_recordings_that_cannot_be_replayed_are_refused(runs):
    with pytest.raises(ValueError, match="record"):
        optimizer_race(runs)


def test_a_stopped_run_shows_its_last_update():
    long = OptimizerRun("a", 0.1, 0, [4.0] * 100, [0.1] * 100, {1: [1.0, 0.5], 90: [1.0, 0.9]})
    short = OptimizerRun("b", 0.1, 0, [3.0] * 20, [0.1] * 20, {1: [1.0, 0.2], 20: [1.0, 0.3]})
    drawn = race_html([long, short], 100, ["a", "b"])
    assert (
        re.search(r">b, update 20</td><td[^>]*>0.1</td><td[^>]*>3.000<", drawn)
        and ">a</td>" in drawn
    )
    assert drawn.count("b, update 20</text>") == 1  # in the legend of the singular values alone
    assert "update 20" not in race_html([long, short], 20, ["a", "b"]).replace(
        "<caption>update 20", ""
    ).replace("values at update 20", "")


def test_recordings_of_a_run_that_diverged_can_be_read_again(tmp_path):
    run = OptimizerRun(
        "x", 1.0, 0, [2.0, math.nan, math.inf, None], [0.1, math.nan, 0.3, None], {1: [1.0]}
    )
    save_runs([run], tmp_path / "runs.json")
    [found] = load_runs(tmp_path / "runs.json")
    assert found.losses == [2.0, None, None, None] and found.update_sizes == [0.1, None, 0.3, None]
    assert found.spectra == {1: [1.0]} and "nan" in str(run.losses)  # the user's own is left alone


def test_a_race_of_wide_matrices_still_fits_on_a_page():
    values = np.linspace(1, 0.1, 768).tolist()
    runs = [
        OptimizerRun(f"rule{n}", 1, s, [1.0] * 5000, [0.1] * 5000, {1: values})
        for n in range(5)
        for s in (0, 1)
    ]
    assert len(optimizer_race(runs).static_html) < 150_000


# Attention browser and embedding map


def test_attention_maps_equal_the_eager_kernel(room):
    model, tokenizer = room["small_model"](5).train(), room["tokenizer"]
    model.base_model.config._attn_implementation = "sdpa"
    before, state = json.dumps(model.config.to_dict(), default=str), torch.get_rng_state()
    tokens, weights = attention_maps(model, tokenizer, "the name of the string")
    assert weights.shape == (2, 2, len(tokens), len(tokens)) and tokens[0] == "[CLS]"
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert model.training and json.dumps(model.config.to_dict(), default=str) == before
    assert (torch.get_rng_state() == state).all()
    assert model.base_model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        model.base_model.config._attn_implementation = "eager"
        batch = tokenizer("the name of the string", return_tensors="pt")
        out = model.eval().base_model(
            batch["input_ids"], batch["attention_mask"], output_attentions=True
        )
    np.testing.assert_allclose(weights, torch.stack(out.attentions)[:, 0].numpy(), atol=1e-6)
    assert np.abs(weights - 1 / len(tokens)).max() > 1e-3


def test_a_part_at_rest_stays_at_rest(room):
    model = room["small_model"](5).train()
    model.base_model.blocks[0].eval()
    attention_maps(model, room["tokenizer"], "the name of")
    assert model.training and not model.base_model.blocks[0].training


def test_a_transformers_bert_can_be_browsed_too(room):
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    small = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    model = BertModel(BertConfig(vocab_size=len(room["tokenizer"]), **small)).eval()
    text = "the name of the string"
    tokens, weights = attention_maps(model, room["tokenizer"], text)
    plain = BertModel._from_config(model.config, attn_implementation="eager").eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        out = plain(**room["tokenizer"](text, return_tensors="pt"), output_attentions=True)
    np.testing.assert_allclose(weights, torch.stack(out.attentions)[:, 0].numpy(), atol=1e-6)


def test_a_causal_twin_is_shown_as_it_reads_and_never_looks_ahead(room):
    from bertlab.model.heads import BertLabForCausalLM

    torch.manual_seed(0)
    model = BertLabForCausalLM(room["small_model"](5).config).eval()
    tokens, weights = attention_maps(model, room["tokenizer"], "the name of the string")
    assert weights.shape == (2, 2, len(tokens), len(tokens)) and np.triu(weights, 1).max() == 0
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


def test_attention_without_a_weight_for_each_pair_is_refused(room):
    from transformers import LongformerConfig, LongformerForMaskedLM

    small = dict(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        attention_window=4,
    )
    model = LongformerForMaskedLM(
        LongformerConfig(vocab_size=len(room["tokenizer"]), **small)
    ).eval()
    with pytest.raises(ValueError, match="LongformerForMaskedLM gives no weight to each pair"):
        attention_maps(
            model, room["tokenizer"], "the name of the string and the length of the name"
        )


def test_wrong_models_are_refused(room):
    import copy

    from bertlab.embeddings.bi_encoder import BiEncoder

    model, tokenizer = room["small_model"](5), room["tokenizer"]
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["zebra"])
    attention_maps(model, larger, "the name of")
    with pytest.raises(ValueError, match=f"tokenizer has ids up to {len(larger) - 1}"):
        attention_browser(model, larger, "the zebra")
    inside = BiEncoder(model.base_model, tokenizer)
    for explorer, text in ((attention_browser, "the name of"), (embedding_map, ["the"])):
        with pytest.raises(ValueError, match="BiEncoder must be a model .* .encoder"):
            explorer(inside, tokenizer, text)
        explorer(inside.encoder, tokenizer, text).close()


def test_a_twin_is_on_the_cpu_whatever_the_default_device_is(room):
    with torch.device("meta"):  # as a GPU would be
        other = untrained_twin(room["small_model"](1))
    assert {p.device.type for p in other.parameters()} == {"cpu"}
    same = untrained_twin(room["small_model"](1))
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), same.parameters()))


def test_a_twin_has_new_weights(room):
    model = room["small_model"](1)
    state = torch.get_rng_state()
    one, same, other = (untrained_twin(model, seed) for seed in (0, 0, 1))
    assert (torch.get_rng_state() == state).all() and type(one) is BertLabForMaskedLM
    key = "encoder.blocks.0.attention.qkv.weight"
    weights = [m.state_dict()[key] for m in (model, one, same, other)]
    assert weights[1].shape == weights[0].shape and torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[1], weights[3]) and not torch.equal(weights[1], weights[0])


def test_shuffled_words_are_the_same_words_and_the_same_each_time():
    text = "one two three four five six seven"
    assert sorted(shuffle_words(text).split()) == sorted(text.split())
    assert shuffle_words(text) == shuffle_words(text) != text
    assert shuffle_words("") == "" and shuffle_words("one") == "one"


def test_neighbours_and_plane_agree_with_svd():
    table = np.random.default_rng(0).normal(size=(40, 7)) * [5, 3, 1, 1, 1, 1, 1] + 10
    centred = table - table.mean(0)
    cosines = {i: centred[i] @ centred[3] / np.linalg.norm(centred[i]) / np.linalg.norm(centred[3])
               for i in range(40) if i != 3}  # fmt: skip
    wanted = sorted(cosines, key=cosines.get, reverse=True)[:6]
    got = nearest_tokens(table, 3, 6)
    assert [i for i, _ in got] == wanted
    np.testing.assert_allclose([c for _, c in got], [cosines[i] for i in wanted])
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    places, share = pca_plane(table)[:2]
    for k in (0, 1):
        by_hand = left[:, k] * values[k]
        assert (
            min(np.abs(places[:, k] - by_hand).max(), np.abs(places[:, k] + by_hand).max()) < 1e-9
        )
    assert share == pytest.approx((values[:2] ** 2).sum() / (values**2).sum())


def test_a_table_longer_than_the_vocabulary_is_cut(room):
    tokenizer = room["tokenizer"]
    config = room["small_model"](0).config
    config.vocab_size = len(tokenizer) + 50
    torch.manual_seed(0)
    model = BertLabForMaskedLM(config)
    with torch.no_grad():  # the padding would be the nearest of all
        table = model.get_input_embeddings().weight
        table[len(tokenizer) :] = table[tokenizer.convert_tokens_to_ids("the")]
    shown = embedding_map(model, tokenizer, ["the"]).children[-1].value
    assert "nearest to <bdi>the</bdi>:" in shown and " 1.00" not in shown and "None" not in shown


def test_gaps_in_token_ids_are_allowed(room):
    from bertlab.data.vocabularies import tokenizer_state, with_tokenizer_state

    state = tokenizer_state(room["tokenizer"])
    moved = {piece: id + 3 * (id >= 50) for piece, id in state["model"]["vocab"].items()}
    state["model"]["vocab"] = moved
    tokenizer, last = with_tokenizer_state(room["tokenizer"], state), max(moved, key=moved.get)
    config = room["small_model"](0).config
    config.vocab_size = moved[last] + 1
    torch.manual_seed(0)
    model = BertLabForMaskedLM(config)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table[50:53] = table[moved["the"]] = table[
            moved[last]
        ]  # the nearest but one may be no entry
    shown = embedding_map(model, tokenizer, ["the", last])
    assert (
        f"nearest to <bdi>the</bdi>: <bdi>{last}</bdi> 1.00" in shown.children[-1].value
        and "None" not in shown.children[-1].value
    )
    with pytest.raises(ValueError, match=f"ids up to {moved[last]}.*vocab_size is 1500"):
        embedding_map(room["small_model"](0), tokenizer, ["the"])


def test_labels_do_not_cover_each_other():
    places = spread_labels(np.array([[10.0, 50.0], [12, 51], [11, 49], [300, 50]]))
    assert places[3].tolist() == [300, 50] and places[2].tolist() == [11, 49]
    near = sorted(places[:3, 1])
    assert np.diff(near).min() >= 12


def test_a_word_that_is_no_token_is_told_by_its_pieces(room):
    tokenizer = room["tokenizer"]
    assert find_token(tokenizer, " the ") == tokenizer.get_vocab()["the"]
    for word, said in (
        ("", "type a token"),
        ("<b>", "its pieces are"),
        ("thethethe", "not in the vocabulary"),
    ):
        with pytest.raises(ValueError, match=said):
            find_token(tokenizer, word)


# All of them


@pytest.mark.parametrize("name", MINE)
def test_a_turned_control_redraws_in_less_than_a_second(room, name):
    exec(CASES[name].source, room)
    explorer, seconds = room["explorer"], []
    for one in list(find_widgets(explorer)):
        if (
            hasattr(one, "min")
            and hasattr(one, "max")
            and getattr(one, "description", "") != "play"
        ):
            for value in (one.max, one.min):
                start = time.process_time()  # of this process: others may keep the machine busy
                one.value = value
                seconds.append(time.process_time() - start)
    assert seconds and sorted(seconds)[len(seconds) // 2] < 0.5 and max(seconds) < 1
    assert "a bug in this explorer" not in explorer.children[-1].value


@pytest.mark.parametrize("name", ["stepper", "fill_mask_box", "attention_browser"])
def test_a_closed_explorer_frees_its_model(room, name):
    own, models = dict(room), []
    own["small_model"] = lambda seed: models.append(room["small_model"](seed)) or models[-1]
    exec(CASES[name].source, own)
    kept, models = own.pop("explorer"), [weakref.ref(model) for model in models]
    gc.collect()
    assert all(model() is not None for model in models)
    kept.close()
    kept.close()  # a second time is no mistake
    gc.collect()
    assert [model() for model in models] == [None] * len(models) and kept.children


@pytest.mark.parametrize("name", ["schedule_designer", "optimizer_race", "packing_visualiser"])
def test_close_closes_nested_widgets_and_links(room, name, monkeypatch):
    links, jslink = [], ipywidgets.jslink
    monkeypatch.setattr(
        ipywidgets, "jslink", lambda *ends: links.append(jslink(*ends)) or links[-1]
    )
    exec(CASES[name].source, room)
    widgets = [*find_widgets(room["explorer"]), *links]
    assert len(links) == (name != "schedule_designer") and all(
        one.comm is not None for one in widgets
    )
    room["explorer"].close()
    assert [one for one in widgets if one.comm is not None] == []


def test_explorers_of_one_model_are_independent(room):
    model, texts = room["small_model"](3), ("the name of the string", "a list of names")
    first, second = (attention_browser(model, room["tokenizer"], text) for text in texts)
    before, shown = second._repr_mimebundle_(), second.children[-1].value
    first.close()
    assert second._repr_mimebundle_() == before and second.children[-1].value == shown
    control(second, "layer").value = 1
    assert "this model, layer 1, head 0" in second.children[-1].value != shown
    again = attention_browser(model, room["tokenizer"], texts[0])
    assert again.static_html == first.static_html and again.comm is not None


# Training monitor


class Kernel:
    "The sockets and handlers of a kernel, and a page that writes into them."

    def __init__(self):
        context = zmq.Context.instance()
        self.page, inbox = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self.page.bind(f"inproc://test-{id(self)}")
        inbox.connect(f"inproc://test-{id(self)}")
        self.session, self.shell_stream = Session(key=b"secret"), SimpleNamespace(socket=inbox)
        self.log, self.later = [], []
        self.shell_handlers = {"comm_msg": self.handle, "comm_info_request": self.handle_later}

    def handle(self, stream, addresses, message):
        assert stream is self.shell_stream
        self.log.append(message["content"]["n"])

    async def handle_later(self, stream, addresses, message):
        self.handle(stream, addresses, message)

    def get_parent(self, channel):
        return {"header": {"msg_id": "cell"}}

    def _publish_status(self, status, channel, parent):
        self.log.append((status, parent["header"]["msg_id"] == "cell"))

    def schedule_dispatch(self, dispatch, parts):
        assert dispatch == self.dispatch_shell
        self.later.append(
            self.session.deserialize(self.session.feed_identities(parts, copy=False)[1], copy=False)
        )

    def dispatch_shell(self, parts):
        raise AssertionError("nothing but widgets may be handled inside a cell")

    def say(self, kind, n):
        self.session.send(self.page, kind, {"n": n})


def test_only_widget_messages_are_handled_in_a_cell():
    kernel = Kernel()
    mail = WidgetMail(kernel)
    assert mail.answer() == 0 and kernel.log == []
    for kind, n in (
        ("comm_msg", 1),
        ("execute_request", 2),
        ("comm_info_request", 3),
        ("execute_request", 4),
    ):
        kernel.say(kind, n)
    assert mail.answer() == 2
    own = [
        ("busy", False),
        0,
        ("idle", False),
        ("busy", True),
    ]  # its own status, then that of the cell
    assert kernel.log == [
        *(1 if entry == 0 else entry for entry in own),
        *(3 if entry == 0 else entry for entry in own),
    ]
    assert [message["content"]["n"] for message in kernel.later] == [2, 4]
    assert mail.answer() == 0


def test_a_message_that_is_forged_is_left_to_the_kernel():
    kernel = Kernel()
    kernel.schedule_dispatch = lambda dispatch, parts: kernel.later.append(parts)
    Session(key=b"another").send(kernel.page, "comm_msg", {"n": 1})
    kernel.say("comm_msg", 2)
    assert WidgetMail(kernel).answer() == 1 and len(kernel.later) == 1
    assert [entry for entry in kernel.log if entry in (1, 2)] == [2]


IN_A_KERNEL = """
import os, time, ipywidgets
from bertlab.explorers.training_monitor import open_mail

button, heard = ipywidgets.Button(), []
button.on_click(lambda _: 1 / 0)  # somebody else's handler; its bug must not end a run
button.on_click(lambda _: heard.append("a click"))
print(button.comm.comm_id)
"""
TRAINS = """
mail, end = open_mail(), time.monotonic() + 20
while not heard and time.monotonic() < end:
    mail.answer()
    time.sleep(0.01)
print("inside the cell:", heard)
"""


@pytest.mark.filterwarnings("ignore")
def test_a_real_kernel_handles_a_click_in_a_cell():
    manager = KernelManager()
    manager.start_kernel(env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(60)

        def read(number: str) -> str:
            "Read what a cell prints until it is done."
            text = ""
            while True:
                message = client.get_iopub_msg(timeout=60)
                if message["parent_header"].get("msg_id") != number:
                    continue
                text += (
                    message["content"].get("text", "") if message["msg_type"] == "stream" else ""
                )
                if message["content"].get("execution_state") == "idle":
                    return text

        comm = read(client.execute(IN_A_KERNEL)).split()[-1]
        training, waiting = client.execute(TRAINS), client.execute("print('the next cell')")
        click = {"comm_id": comm, "data": {"method": "custom", "content": {"event": "click"}}}
        client.shell_channel.send(client.session.msg("comm_msg", click))
        assert "inside the cell: ['a click']" in read(training)
        assert "the next cell" in read(waiting)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_curves_keep_the_last_row_and_speed_is_work_over_time():
    values = [(n, 3.0, 1e-3, float("nan"), 100 * n, n / 2) for n in range(1, 2001)]
    rows = [dict(zip(History.COLUMNS, row)) for row in values]
    curves = monitor_curves(rows)
    assert all(len(x) == 150 and x[-1] == 2000 for x, _ in curves.values())
    assert curves["tokens per second"][1][1:] == pytest.approx([200] * 149)
    assert downsample(1, 150).tolist() == [0] and downsample(3, 150).tolist() == [0, 1, 2]
    drawn = training_monitor.monitor_html(rows, 3000)  # no finite norm: three charts and a message
    assert (
        "step 2,000 of 3,000" in drawn
        and drawn.count("<svg") == 3
        and drawn.count('role="alert"') == 1
    )
    one = training_monitor.monitor_html(rows[:1], -1)
    assert "tokens per second:" not in one and "step 1:" in one


class TinyData(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        ids = torch.randint(5, 50, (8,), generator=torch.Generator().manual_seed(i))
        return {
            "input_ids": ids,
            "attention_mask": torch.ones(8, dtype=torch.long),
            "labels": ids.clone(),
        }


def train(callbacks, max_steps, seed=0, **options):
    torch.manual_seed(seed)
    shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    config = modernbert_tiny(vocab_size=50, pad_token_id=0, **shape)
    module = PretrainingModule(config.to_diff_dict(), learning_rate=1e-2, scheduler_warmup_steps=0)
    trainer = make_trainer(max_steps, "32-true", "cpu", callbacks=callbacks, **options)
    trainer.fit(module, torch.utils.data.DataLoader(TinyData(), batch_size=2))
    return trainer


@pytest.fixture
def notebook(monkeypatch):
    "As if a notebook ran this; gives what was displayed."
    displayed = []
    handle = SimpleNamespace(update=lambda shown: displayed.append(shown.static_html))
    monkeypatch.setattr(training_monitor, "in_notebook", lambda: True)
    monkeypatch.setattr(training_monitor, "open_mail", lambda: SimpleNamespace(answer=lambda: 0))
    monkeypatch.setattr(
        "IPython.display.display", lambda shown, display_id: displayed.append(shown) or handle
    )
    return displayed


class Breaks(History):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 3:
            raise KeyError("boom")


class Finger(History):
    "Clicks the button of a monitor after so many batches."

    def __init__(self, monitor, batches):
        super().__init__(fetch_every=1)
        self.monitor, self.batches = monitor, batches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.batches -= 1
        if self.batches == 0:
            self.monitor.panel.button.click()


@pytest.mark.filterwarnings("ignore")
def test_the_button_ends_a_run_after_a_step(notebook, tmp_path):
    monitor = TrainingMonitor(checkpoint=tmp_path / "stopped.ckpt")
    finger = Finger(monitor, 5)  # the second of the two batches of step 3 is the sixth
    regular = RunCheckpoint(tmp_path / "run.ckpt", every_n_steps=100)
    trainer = train([finger, monitor, regular], 20, accumulate_grad_batches=2)
    assert (
        trainer.global_step == monitor.stopped_at == 3
        and stop_reason(trainer) == "its stop button was pressed"
    )
    for name in ("stopped", "run"):
        assert torch.load(tmp_path / f"{name}.ckpt", weights_only=False)["global_step"] == 3
    plain = History(fetch_every=1)
    train([plain], 3, accumulate_grad_batches=2)
    assert (monitor.column("train_loss") == plain.column("train_loss")).all()
    assert len(notebook) == 2 and "step 3 of 20" in notebook[-1] and "<svg" in notebook[-1]
    assert (
        monitor.panel.button.disabled and "stopped after step 3" in monitor.panel.button.description
    )


@pytest.mark.filterwarnings("ignore")
def test_a_monitor_can_be_used_again_and_starts_its_curves_anew(notebook):
    monitor = TrainingMonitor()
    for _ in range(2):
        trainer = train([monitor], 4)
        assert trainer.global_step == 4 and monitor.stopped_at is None
        assert monitor.column("step").tolist() == [1, 2, 3, 4]
    assert "finished" in monitor.panel.button.description


@pytest.mark.filterwarnings("ignore")
def test_a_monitor_restarts_after_an_error(
    notebook,
):
    monitor = TrainingMonitor(every_seconds=1e9)
    with pytest.raises(KeyError, match="boom"):
        train([monitor, Breaks()], 6)
    train([monitor], 4)
    steps, tokens = (monitor.column(name).tolist() for name in ("step", "tokens"))
    assert steps == [1, 2, 3, 4] and tokens == [tokens[0] * n for n in (1, 2, 3, 4)]
    panel = monitor.panel
    monitor.on_exception(None, None, ValueError("of another call"))
    assert "finished" in panel.button.description and "broke off" not in panel.drawing.value


@pytest.mark.filterwarnings("ignore")
def test_outside_a_notebook_it_records_and_shows_nothing(monkeypatch, capsys):
    monkeypatch.setattr("IPython.display.display", lambda *a, **k: pytest.fail("displayed"))
    monitor = TrainingMonitor()
    assert train([monitor], 3).global_step == 3
    assert monitor.panel is None and len(monitor.rows) == 3 and training_monitor.open_mail() is None
    assert "widget" not in capsys.readouterr().out.lower()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kernel", [SimpleNamespace(), SimpleNamespace(shell_stream=None), None])
def test_an_unknown_kernel_gets_a_hint(monkeypatch, kernel):
    if kernel is None:  # of ipykernel 6, but without a way to say that it is busy
        kernel = SimpleNamespace(**{name: getattr(Kernel(), name) for name in ("shell_stream", "schedule_dispatch",
                                                                              "dispatch_shell", "session")})  # fmt: skip
    shown = []
    monkeypatch.setitem(
        sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=kernel))
    )
    monkeypatch.setattr(MonitorPanel, "show", lambda panel: shown.append(panel))
    assert training_monitor.open_mail() is None
    monitor = TrainingMonitor()
    assert train([monitor], 3).global_step == 3 and shown == [monitor.panel]
    texts = [one.value for one in find_widgets(monitor.panel.explorer) if hasattr(one, "value")]
    assert "interrupt the kernel" in texts[0] and texts[-1].count("<svg") == 4
    assert len(MonitorPanel().explorer.children) == 2  # no such line where clicks are heard


@pytest.mark.filterwarnings("ignore")
def test_a_click_during_validation_is_heard_there(notebook):
    heard = []
    monitor = TrainingMonitor()
    monitor.on_validation_batch_end(None, None, None, None, 0)  # of a validation without training
    monitor.on_train_start(SimpleNamespace(global_step=0, strategy=None, world_size=1), None)
    monitor._mail = SimpleNamespace(answer=lambda: heard.append("click"))
    monitor.on_validation_batch_end(None, None, None, None, 0)
    assert heard == ["click"]


@pytest.mark.filterwarnings("ignore")
def test_a_run_of_several_processes_is_recorded_and_not_drawn(notebook):
    monitor = TrainingMonitor()
    monitor.on_train_start(SimpleNamespace(global_step=0, strategy=None, world_size=2), None)
    assert monitor.panel is None and notebook == []


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_breaks_off_leaves_its_curves_and_says_so(notebook):
    monitor = TrainingMonitor()
    with pytest.raises(KeyError, match="boom"):
        train([monitor, Breaks()], 6)
    assert "broke off: KeyError" in notebook[-1] and monitor.panel.button.disabled


def test_watching_costs_less_than_one_percent_of_a_step(notebook):
    def share() -> float:
        monitor, inside = TrainingMonitor(), 0.0
        logged = {
            "train_loss": torch.tensor(3.0),
            "learning_rate": torch.tensor(1e-3),
            "gradient_norm": torch.ones(()),
        }
        trainer = SimpleNamespace(
            global_step=0, strategy=None, world_size=1, callback_metrics=logged, max_steps=100
        )
        batch = {"attention_mask": torch.ones(16, 512, dtype=torch.long)}
        monitor.on_train_start(trainer, None)
        for trainer.global_step in range(1, 16):
            monitor.on_train_batch_start(trainer, None, batch, 0)
            time.sleep(0.1)  # a small model's step on a CPU
            start = time.perf_counter()
            monitor.on_train_batch_end(trainer, None, None, batch, 0)
            inside += time.perf_counter() - start
        return inside / 1.5

    # Other work on this machine only adds: one of three is enough.
    assert any(share() < 0.01 for _ in range(3))


def test_drawings_keep_to_their_share_however_slow_they_are(notebook, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(training_monitor, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def slow(*args, **values):
        now[0] += 2.0
        return "drawn"

    monkeypatch.setattr(training_monitor, "draw_or_alert", slow)
    monitor = TrainingMonitor()
    trainer = SimpleNamespace(global_step=0, strategy=None, world_size=1, max_steps=-1)
    monitor.on_train_start(trainer, None)
    monitor.draw(trainer)
    assert monitor._next == 102 + 2.0 / training_monitor.DRAWING_SHARE


@pytest.mark.parametrize("pause", [0, -1, float("nan")])
def test_a_pause_of_nothing_is_refused(pause):
    with pytest.raises(ValueError, match="every_seconds must be above 0"):
        TrainingMonitor(every_seconds=pause)


def test_what_explorers_are_asked_wrongly_is_a_sentence():
    with pytest.raises(
        ValueError, match="unknown argument 'warmup_step'; known are .*warmup_steps"
    ):
        design_schedule(100, 1e-3, warmup_step=5)
    with pytest.raises(ValueError, match="unknown argument 'total_steps'"):
        design_schedule(100, 1e-3, total_steps=5)
    with pytest.raises(ValueError, match="no run is of 'lion'"):
        race_html([], 3, ["lion"])
