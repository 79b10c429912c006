"What explorers compute: printed lines make the drawn schedule, updates are measured, attention is right."

import gc
import json
import math
import os
import subprocess
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT
from explorer_cases import CASES, find_widgets, make_room
from hypothesis import given, settings
from hypothesis import strategies as st
from jupyter_client import KernelManager

import bertlab.explorers.training_monitor as training_monitor
from bertlab.cli.main import main
from bertlab.explorers.models import (
    attention_browser,
    attention_maps,
    embedding_map,
    nearest_tokens,
    untrained_twin,
)
from bertlab.explorers.optimizers import (
    OptimizerRun,
    UpdateRecorder,
    mean_curve,
    optimizer_race,
)
from bertlab.explorers.schedules import (
    _phase_options,
    rate_designer,
    schedule_python,
    schedule_yaml,
)
from bertlab.explorers.training_monitor import (
    TrainingMonitor,
    monitor_curves,
)
from bertlab.explorers.widgets import downsample
from bertlab.model.config import modernbert_tiny
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.optim.schedulers import SCHEDULE_KINDS, Schedule
from bertlab.train.checkpoints import TrainingCheckpoint
from bertlab.train.history import History
from bertlab.train.modules import PretrainingModule
from bertlab.train.reports import stop_reason
from bertlab.train.trainer import make_trainer


@pytest.fixture(scope="module")
def room() -> dict:
    return make_room()


def control(explorer, description):
    return next(
        widget
        for widget in find_widgets(explorer)
        if getattr(widget, "description", "") == description
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
        "cooldown_kind": st.sampled_from(["linear", "1-sqrt", "cosine", "exponential"]),
        "cooldown_steps": st.integers(1, 9),
        "cooldown_decay": st.sampled_from([0.1, 0.001]),
    }
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


@pytest.mark.filterwarnings("ignore")
def test_the_printed_yaml_is_a_configuration_of_the_command(tmp_path, capsys):
    schedule = Schedule(warmup_steps=3, cooldown_kind="1-sqrt", cooldown_steps=5, total_steps=20)
    (tmp_path / "design.yaml").write_text(schedule_yaml(schedule, 20, 1e-5))
    assert main(["pretrain", "--config", str(tmp_path / "design.yaml"), "--print_config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    options = {name: config["model"][f"scheduler_{name}"] for name in _phase_options(schedule)}
    assert options == _phase_options(schedule) and options["cooldown_kind"] == "1-sqrt"
    assert config["model"]["learning_rate"] == 1e-5 and config["trainer"]["max_steps"] == 20


def test_the_boxes_hold_the_drawn_design():
    designer = rate_designer(num_steps=400, learning_rate=1e-5, warmup_steps=30, cooldown_steps=70)
    boxes = [control(designer, name) for name in ("YAML", "Python")]
    control(designer, "cooldown updates").value = 100
    config = yaml.safe_load(boxes[0].value)
    assert (
        config["model"]["scheduler_cooldown_steps"] == 100
        and config["model"]["learning_rate"] == 1e-5
    )
    assert "cooldown_steps=100," in boxes[1].value and "total_steps=400," in boxes[1].value
    control(designer, "run (updates)").value = 90
    assert [box.value for box in boxes] == ["", ""] and 'role="alert"' in designer.children[
        -1
    ].value
    control(designer, "run (updates)").value = 130
    assert boxes[0].value.endswith("max_steps: 130")


# Optimizer replay


def test_an_update_has_a_size_and_singular_values():
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


def test_a_race_shows_a_run_that_diverged():
    matrix = torch.zeros(2, 2)
    wild = OptimizerRun("wild", 9.0, 0, losses=[4.0, None])
    watch = UpdateRecorder(wild, matrix, every=1)
    for step in (1.0, math.inf):
        matrix += step
        watch.look(matrix)
    tame = OptimizerRun("tame", 0.1, 0, [4.0, 3.0], [0.1, 0.1], {1: [1.0, 0.5]})
    race = optimizer_race([wild, tame])
    control(race, "update").value = 2
    drawn = race.children[-1].value
    assert (
        "diverged" in drawn and "not finite" in drawn and "3.000" in drawn and "a bug" not in drawn
    )


def test_a_mean_ends_at_a_seed_without_a_loss():
    seeds = [OptimizerRun("x", 1, s, [float(s)] * 3 + [None], [1.0, 2.0, 3.0, 4.0]) for s in (1, 3)]
    at, loss = mean_curve(seeds, "losses")
    assert at.tolist() == [1, 2, 3, 4] and loss[:3].tolist() == [2, 2, 2] and math.isnan(loss[3])
    assert mean_curve(seeds, "update_sizes", points=2)[1].tolist() == [1, 4]


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


def test_a_twin_has_new_weights(room):
    model = room["small_model"](1)
    state = torch.get_rng_state()
    twin, same, another = (untrained_twin(model, seed) for seed in (0, 0, 1))
    assert (torch.get_rng_state() == state).all() and type(twin) is BertLabForMaskedLM
    key = "encoder.blocks.0.attention.qkv.weight"
    weights = [m.state_dict()[key] for m in (model, twin, same, another)]
    assert weights[1].shape == weights[0].shape and torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[1], weights[3]) and not torch.equal(weights[1], weights[0])


def test_neighbours_are_those_of_the_cosine():
    table = np.random.default_rng(0).normal(size=(40, 7)) * [5, 3, 1, 1, 1, 1, 1] + 10
    centred = table - table.mean(0)
    cosines = {i: centred[i] @ centred[3] / np.linalg.norm(centred[i]) / np.linalg.norm(centred[3])
               for i in range(40) if i != 3}  # fmt: skip
    expected = sorted(cosines, key=cosines.get, reverse=True)[:6]
    neighbours = nearest_tokens(table, 3, 6)
    assert [i for i, _ in neighbours] == expected
    np.testing.assert_allclose([c for _, c in neighbours], [cosines[i] for i in expected])


# All of them


@pytest.mark.parametrize("name", ["stepper", "fill_mask_box", "attention_browser"])
def test_a_closed_explorer_frees_its_model(room, name):
    names, models = dict(room), []
    names["small_model"] = lambda seed: models.append(room["small_model"](seed)) or models[-1]
    exec(CASES[name].source, names)
    explorer, models = names.pop("explorer"), [weakref.ref(model) for model in models]
    gc.collect()
    assert all(model() is not None for model in models)
    explorer.close()
    explorer.close()  # a second time does nothing
    gc.collect()
    assert [model() for model in models] == [None] * len(models) and explorer.children


# Training monitor


IN_A_KERNEL = """
import os, time, ipywidgets
from bertlab.explorers.training_monitor import open_mail

button, heard = ipywidgets.Button(), []
button.on_click(lambda _: 1 / 0)  # the bug of another handler must not end a run
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

        def read(index: str) -> str:
            "Read what a cell prints until it is done."
            text = ""
            while True:
                message = client.get_iopub_msg(timeout=60)
                if message["parent_header"].get("msg_id") != index:
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


def test_curves_keep_the_last_row_and_the_speed():
    values = [(n, 3.0, 1e-3, float("nan"), 100 * n, n / 2) for n in range(1, 2001)]
    rows = [dict(zip(History.COLUMNS, row)) for row in values]
    curves = monitor_curves(rows)
    assert all(len(x) == 150 and x[-1] == 2000 for x, _ in curves.values())
    assert curves["tokens per second"][1][1:] == pytest.approx([200] * 149)
    assert downsample(1, 150).tolist() == [0] and downsample(3, 150).tolist() == [0, 1, 2]
    drawn = training_monitor._monitor_html(rows, 3000)  # no finite norm: three charts and a message
    assert (
        "step 2,000 of 3,000" in drawn
        and drawn.count("<svg") == 3
        and drawn.count('role="alert"') == 1
    )
    item = training_monitor._monitor_html(rows[:1], -1)
    assert "tokens per second:" not in item and "step 1:" in item


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
    handle = SimpleNamespace(update=lambda visible: displayed.append(visible.static_html))
    monkeypatch.setattr(training_monitor, "in_notebook", lambda: True)
    monkeypatch.setattr(training_monitor, "open_mail", lambda: SimpleNamespace(answer=lambda: 0))
    monkeypatch.setattr(
        "IPython.display.display", lambda visible, display_id: displayed.append(visible) or handle
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
    regular = TrainingCheckpoint(tmp_path / "run", every_n_steps=100)
    trainer = train([finger, monitor, regular], 20, accumulate_grad_batches=2)
    assert (
        trainer.global_step == monitor.stopped_at == 3
        and stop_reason(trainer) == "its stop button was pressed"
    )
    for path in (tmp_path / "stopped.ckpt", tmp_path / "run" / "step-00000003.ckpt"):
        assert torch.load(path, weights_only=False)["global_step"] == 3
    plain = History(fetch_every=1)
    train([plain], 3, accumulate_grad_batches=2)
    assert (monitor.column("train_loss") == plain.column("train_loss")).all()
    assert len(notebook) == 2 and "step 3 of 20" in notebook[-1] and "<svg" in notebook[-1]
    assert (
        monitor.panel.button.disabled and "stopped after step 3" in monitor.panel.button.description
    )


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
def test_a_monitor_records_outside_a_notebook(monkeypatch, capsys):
    monkeypatch.setattr("IPython.display.display", lambda *a, **k: pytest.fail("displayed"))
    monitor = TrainingMonitor()
    assert train([monitor], 3).global_step == 3
    assert monitor.panel is None and len(monitor.rows) == 3 and training_monitor.open_mail() is None
    assert "widget" not in capsys.readouterr().out.lower()


@pytest.mark.filterwarnings("ignore")
def test_a_failed_run_keeps_its_curves(notebook):
    monitor = TrainingMonitor()
    with pytest.raises(KeyError, match="boom"):
        train([monitor, Breaks()], 6)
    assert "broke off: KeyError" in notebook[-1] and monitor.panel.button.disabled
