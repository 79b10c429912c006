"`PretrainingModule`: objectives, continued encoders, z-loss, optimizers with wishes of their own, and what is refused."

import json
import math
import shutil
from contextlib import nullcontext

import lightning as L
import numpy as np
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_file
from test_training import CONFIG, word_tokenizer
from tokenizers import Tokenizer

from bertlab.model import encoder, heads
from bertlab.train.history import History
from bertlab.data.module import PretrainingDataModule
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.config import BertLabConfig, matmul_parameters
from bertlab.model.heads import BertLabForMaskedLM, head_and_loss
from bertlab.model.huggingface import save_model
from bertlab.model.losses import LossConfig
from bertlab.model.generation import generate
from bertlab.optim.budgets import TimeBudgetLR
from bertlab.train import modules
from bertlab.train.modules import (
    PretrainingModule,
    compile_model,
    resolve_compile,
)
from bertlab.train.initialization import load_encoder
from bertlab.train.objectives import OBJECTIVES
from bertlab.train.modules import clock_budget, default_learning_rate
from bertlab.train.steps import optimizer_averages, _label_bytes, skip_step, validation_metrics
from bertlab.train.trainer import make_trainer

RNG = np.random.default_rng(0)
WORDS = ["".join(RNG.choice(list("abcdefgh"), RNG.integers(2, 6))) for _ in range(150)]
TEXTS = [" ".join(RNG.choice(WORDS, RNG.integers(2, 30))) for _ in range(200)]
TOKENIZER = word_tokenizer(WORDS)
SHAPE = {**{k: v for k, v in CONFIG.items() if k != "vocab_size"}}


def data_of(objective="mlm", train=TEXTS[40:], val=TEXTS[:40], **options):
    options = {"max_sequence_length": 32, "train_batch_size": 8, "val_batch_size": 8, **options}
    data = PretrainingDataModule(None, TOKENIZER, objective=objective, **options)
    data.set_datasets(train, val)
    return data


def module_of(objective="mlm", seed=0, **options):
    torch.manual_seed(seed)
    options = {
        "learning_rate": 3e-3,
        "scheduler_warmup_steps": 2,
        "model_config_kwargs": SHAPE,
        **options,
    }
    return PretrainingModule(
        objective=objective, pretrained_tokenizer_name_or_path=TOKENIZER, **options
    )


def fit(module, data, steps=6, **options):
    history = History()
    options = {"precision": "32-true", "accelerator": "cpu", "val_check_steps": steps, **options}
    trainer = make_trainer(steps, callbacks=[history], **options)
    trainer.fit(module, data)
    return trainer, history


@pytest.mark.parametrize("objective", ["mlm", "diffusion", "enhanced_mlm"])
def test_each_objective_trains_and_reports_its_metrics(objective):
    trainer, record = fit(module_of(objective), data_of(objective))
    last = record.validation[-1]
    assert np.isfinite(record.column("train_loss")).all()
    assert 0 <= last["val_accuracy"] <= 1
    assert last["val_perplexity"] == pytest.approx(math.exp(last["val_loss"]), rel=1e-5)
    # Letters a to h and short words: a uniform guess over 150 words costs about 2 bits per byte.
    assert 1.0 < last["val_bits_per_byte"] < 3.0


def test_bytes_of_masked_words_and_of_a_bound():
    bytes_V = torch.tensor([0.0, 3.0, 5.0, 7.0, 0.0])  # padding, three words, [MASK]
    batch = {
        "input_ids": torch.tensor([[1, 4, 3, 0]]),
        "labels": torch.tensor([[-100, 2, -100, -100]]),
    }
    assert _label_bytes(batch, bytes_V) == 5
    assert _label_bytes({**batch, "loss_weights": torch.ones(1, 4)}, bytes_V) == 3 + 5 + 7
    assert _label_bytes({**batch, "label_positions": torch.tensor([[1, 0]])}, bytes_V) == 5


def test_a_validation_smooths_nothing():
    losses = []
    for smoothing in (0.0, 0.3):
        torch.manual_seed(0)
        module = module_of(loss_kwargs={"label_smoothing": smoothing})
        module.configure_model()
        batch = {
            "input_ids": (ids := torch.arange(5, 21).view(2, 8)),
            "attention_mask": torch.ones_like(ids),
            "labels": ids,
        }
        for mode in (True, False):
            module.model.train(mode), module.train(mode)
            losses.append(float(module.label_loss(batch).loss_sum))
    (trained, plain), (smooth, judged) = losses[:2], losses[2:]
    assert plain == judged and trained != smooth


def test_z_loss_is_reported_apart_from_the_loss():
    plain, record = fit(module_of(scheduler_warmup_steps=0), data_of(), 1)
    weighted, with_z = fit(
        module_of(scheduler_warmup_steps=0, loss_kwargs={"z_weight": 0.5}), data_of(), 1
    )
    np.testing.assert_array_equal(record.column("train_loss"), with_z.column("train_loss"))
    assert "train_z_loss" not in plain.callback_metrics
    # log(vocabulary)^2 / 2 of an untrained model, nats squared
    assert weighted.callback_metrics["train_z_loss"].item() == pytest.approx(
        math.log(len(TOKENIZER)) ** 2 / 2, rel=0.1
    )
    assert record.column("gradient_norm")[0] != with_z.column("gradient_norm")[0]


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
@pytest.mark.parametrize(
    "headless, objective", [(False, "mlm"), (True, "mlm"), (False, "diffusion")]
)
def test_an_encoder_of_transformers_continues(tmp_path, family, headless, objective):
    small = dict(vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                 num_attention_heads=2, max_position_embeddings=64, pad_token_id=0)  # fmt: skip
    name = {"bert": "Bert", "roberta": "Roberta", "modernbert": "ModernBert"}[family]
    extra = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    config = getattr(transformers, f"{name}Config")(
        **small, **(extra if family == "modernbert" else {})
    )
    torch.manual_seed(0)
    reference = getattr(transformers, f"{name}{'Model' if headless else 'ForMaskedLM'}")(
        config
    ).eval()
    reference.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    module = PretrainingModule(pretrained_model_name_or_path=str(tmp_path), objective=objective, learning_rate=1e-3,
                               scheduler_warmup_steps=2)  # fmt: skip
    module.configure_model()
    batch = TOKENIZER(TEXTS[0], return_tensors="pt")
    keys = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with torch.no_grad():
        if headless:
            result, expected = module.model.eval().encoder(**keys)[0], reference(**keys)[0]
        else:
            result, expected = module.model.eval()(**keys).logits, reference(**keys).logits
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-4)
    module.model.train()
    _, record = fit(module, data_of(objective), 3)
    assert np.isfinite(record.column("train_loss")).all()
    if objective == "diffusion":
        (text,) = generate(
            module.model.eval(), TOKENIZER, [f"{WORDS[0]} [MASK] {WORDS[1]}"], seed=1
        )
        assert text.startswith(WORDS[0]) and text.endswith(WORDS[1]) and "[MASK]" not in text


def test_another_objective_continues_and_names_new_weights(tmp_path, caplog):
    path = published(tmp_path)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        later = PretrainingModule(pretrained_model_name_or_path=path, objective="enhanced_mlm")
    assert "decoder" in caplog.text and later.describe_missing_keys() in caplog.text
    source = load_encoder(path).state_dict()
    weights = later.model.state_dict()
    assert all(torch.equal(source[name], weights[name]) for name in source)
    assert set(later.missing_keys) == weights.keys() - source.keys()
    diffusion = PretrainingModule(pretrained_model_name_or_path=path, objective="diffusion")
    assert diffusion.missing_keys == [] and diffusion.describe_missing_keys() == ""


def test_sophia_gets_the_graph_of_the_gradient():
    module = module_of(
        optimizer_class="sophiah", learning_rate=1e-3, optimizer_kwargs={"update_period": 2}
    )
    trainer, record = fit(module, data_of(), 4, accumulate_grad_batches=2)
    state = next(iter(trainer.optimizers[0].state.values()))
    assert np.isfinite(record.column("train_loss")).all() and any("hessian" in key for key in state)


@pytest.mark.parametrize("mode", [True, {"mode": "selected_modules", "modules": ["*.mlp"]}])
def test_sophia_sees_the_same_curvature_when_recomputing(mode):
    def trained(checkpointing):
        module = module_of(optimizer_class="sophiah", learning_rate=1e-3, gradient_checkpointing=checkpointing,
                           optimizer_kwargs={"update_period": 2})  # fmt: skip
        trainer, _ = fit(module, data_of(), 3)
        hessians = [state["hessian"] for state in trainer.optimizers[0].state.values()]
        assert any(hessian.abs().max() > 0 for hessian in hessians)
        return [*module.model.state_dict().values(), *hessians]

    assert all(torch.equal(a, b) for a, b in zip(trained(False), trained(mode), strict=True))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])  # the second has a fused optimizer
def test_gradients_are_clipped_by_value_in_every_precision(precision):
    class Largest(L.Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            seen.extend(g.abs().max().item() for g in grads)

    seen = []
    trainer = make_trainer(2, precision, "cpu", callbacks=[History(), Largest()], gradient_clip_val=1e-4,
                           gradient_clip_algorithm="value")  # fmt: skip
    trainer.fit(module_of(optimizer_kwargs={"fused": precision != "32-true"}), data_of())
    assert max(seen) == pytest.approx(1e-4)


def test_validation_sees_the_average_of_splus():
    module, seen = module_of(optimizer_class="splus", learning_rate=0.1), {}

    class Look(History):
        def on_validation_batch_start(self, trainer, pl_module, *args):
            seen["validation"] = pl_module.model.head.dense.weight.detach().clone()

        def on_validation_end(self, trainer, pl_module):
            seen["after"] = pl_module.model.head.dense.weight.detach().clone()

        def on_validation_start(self, trainer, pl_module):
            seen["before"] = pl_module.model.head.dense.weight.detach().clone()

    trainer = make_trainer(4, "32-true", "cpu", callbacks=[Look()], val_check_steps=4)
    trainer.fit(module, data_of())
    assert torch.equal(seen["before"], seen["after"])
    assert (seen["validation"] - seen["before"]).abs().max() > 1e-4
    with optimizer_averages(trainer.optimizers), optimizer_averages(trainer.optimizers):  # nests
        assert torch.equal(module.model.head.dense.weight, seen["validation"])
    assert torch.equal(module.model.head.dense.weight, seen["after"])


def test_averages_follow_their_weights_before_they_are_swapped():
    class Averaging(torch.optim.SGD):
        def eval(self):
            state = self.state[weight]
            self.devices = {name: tensor.device.type for name, tensor in state.items()}

        def train(self):
            pass

    weight = torch.nn.Parameter(torch.ones(2, device="meta"))
    optimizer = Averaging([weight], lr=0.1)
    # As Lightning leaves them when a fit has ended, and weights go back to their device.
    optimizer.state[weight] = {
        "ema": torch.zeros(2), "step": torch.tensor(3.0), "sides": torch.zeros(3, 3)
    }  # fmt: skip
    with optimizer_averages([optimizer]):
        pass
    assert optimizer.devices == {"ema": "meta", "step": "cpu", "sides": "cpu"}


@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_step_leaves_weights_and_moments_alone(fused):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    weight.grad = torch.ones(3)
    optimizer.step()
    before = weight.detach().clone(), optimizer.state[weight]["exp_avg"].clone()
    weight.grad = torch.full((3,), float("nan"))
    skip_step(optimizer, torch.tensor(True))
    optimizer.step()
    assert torch.equal(weight, before[0]) and torch.equal(
        optimizer.state[weight]["exp_avg"], before[1]
    )
    weight.grad = torch.ones(3)
    skip_step(optimizer, torch.tensor(False))
    optimizer.step()
    assert not torch.equal(weight, before[0])


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_guards_see_the_loss_of_the_whole_batch_and_can_refuse(optimizer):
    class Guard(L.Callback):
        def should_skip(self, loss, norm):
            self.losses.append(loss.item())
            return torch.tensor(len(self.losses) == 2)

        def after_step(self, pl_module):
            self.skips.append(bool(pl_module.skipped))

        def on_train_batch_end(self, trainer, pl_module, *args):
            self.weights.append(pl_module.model.head.dense.weight.detach().clone())

    guard, history = Guard(), History()
    guard.losses, guard.skips, guard.weights = [], [], []
    module = module_of(optimizer_class=optimizer)
    make_trainer(3, "32-true", "cpu", callbacks=[history, guard]).fit(module, data_of())
    assert guard.skips == [False, True, False] and module.skipped is not None
    first, second, third = guard.weights
    assert torch.equal(first, second) and not torch.equal(second, third)
    np.testing.assert_allclose(guard.losses, history.column("train_loss"), rtol=1e-6)


def test_validation_metrics_divide_once_over_all_sets():
    metrics = validation_metrics(torch.tensor([[800.0, 200, 40, 160, 0], [45.0, 9, 2, 9, 0]]))
    assert metrics["val_loss"] == 845 / 209 and metrics["val_accuracy"].item() == pytest.approx(
        42 / 169
    )
    assert (
        metrics["val_loss_0"] == 4
        and metrics["val_loss_1"] == 5
        and "val_bits_per_byte" not in metrics
    )


@pytest.mark.parametrize("options, words", [
    ({"objective": "clm"}, ["objective", "'clm'", "mlm"]),
    ({"loss_kwargs": {"z_weight": -1}}, ["z_weight"]),
    ({"model_config_kwargs": {"hidden_size": 30, "num_attention_heads": 4}}, ["hidden_size"]),
    ({"model_config_kwargs": {"vocab_size": 10}}, ["vocab_size=10", str(len(TOKENIZER))]),
    ({"model_config_kwargs": 1e-4}, ["model_config_kwargs", "0.0001"]),
    ({"gradient_checkpointing": "sometimes"}, ["sometimes"]),
    ({"gradient_checkpointing": {"mode": "budget", "budget": 0.5}, "compile_model": False}, ["compile"]),
    ({"model_kwargs": {"attention": "fast"}}, ["attention"]),
    ({"pretrained_tokenizer_name_or_path": "no/where/at/all"}, ["no/where/at/all"]),
    ({"learning_rate": -1.0}, ["learning_rate", "-1.0"]),
    ({"optimizer_class": "sophiah", "gradient_checkpointing": "selected_ops"}, ["sophiah", "selected_modules"]),
    ({"optimizer_class": "sophiah", "compile_model": True}, ["compile_model=True", "sophiah"]),
    ({"optimizer_class": "adamv"}, ["optimizer_class", "adamv", "adamw"]),
    ({"schedule": "wsd"}, ["schedule", "wsd", "time_budget"]),
])  # fmt: skip
def test_a_mistake_is_named_when_the_module_is_made(options, words):
    usual = {"pretrained_tokenizer_name_or_path": TOKENIZER, "model_config_kwargs": SHAPE}
    with pytest.raises(ValueError) as caught:
        PretrainingModule(**{**usual, **options})
    assert all(word in str(caught.value) for word in words)


def test_the_compiled_loss_is_the_plain_one(monkeypatch):
    runs = []

    def backend(graph, inputs):
        runs.append(graph)
        return graph.forward

    model, rule = (
        BertLabForMaskedLM(BertLabConfig(**{**SHAPE, "vocab_size": 50})),
        LossConfig(loss_only=True),
    )
    monkeypatch.setattr(heads, "allows_dynamic_shapes", lambda values: False)  # as on a GPU
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 50, (3, 8), generator=g)
    labels = ids.masked_fill(torch.rand(3, 8, generator=g) < 0.7, -100)

    def run(rule):
        model.zero_grad()
        out = model(ids, labels=labels, loss_config=rule)
        out.loss.backward()
        return [out.loss.detach(), out.num_labels, *(p.grad.clone() for p in model.parameters())]

    want = run(rule)
    model.__dict__["compiled_head"] = torch.compile(head_and_loss, backend=backend)
    for a, b in zip(run(rule), want):
        torch.testing.assert_close(a, b)
    assert len(runs) == 1
    for another in (LossConfig(), LossConfig(loss_only=True, chunk_size=4)):
        for a, b in zip(run(another), want):
            torch.testing.assert_close(a, b)
    assert len(runs) == 1 and model(ids, labels=labels).logits is not None


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
def test_a_compiled_step_on_a_gpu_is_that_of_the_plain_one(kernel):
    g = torch.Generator().manual_seed(0)
    rows = torch.zeros(4, 256, dtype=torch.long)
    for row, lengths in zip(rows, ([100, 156], [256], [30, 1, 200], [5])):
        row[: sum(lengths)] = torch.arange(1, len(lengths) + 1).repeat_interleave(
            torch.tensor(lengths)
        )
    ids = torch.randint(5, 50, rows.shape, generator=g) * (rows > 0)
    labels = ids.masked_fill((torch.rand(rows.shape, generator=g) < 0.8) | (rows == 0), -100)
    batch = {"input_ids": ids.cuda(), "attention_mask": rows.cuda(), "labels": labels.cuda()}
    result = []
    for compiled in (False, True):
        torch.manual_seed(0)
        config = BertLabConfig(**{**SHAPE, "vocab_size": 50, "hidden_size": 64, "num_attention_heads": 2,
                                  "max_position_embeddings": 256},
                               attn_implementation=kernel)  # fmt: skip
        model = BertLabForMaskedLM(config).cuda().train()
        if compiled:
            compile_model(model)
        loss = model(**batch, loss_config=LossConfig(loss_only=True)).loss
        loss.backward()
        result.append([loss.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*result):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    "requested, device, options",
    [
        (None, CPU, None),
        (None, GPU, {}),
        (False, GPU, None),
        (True, CPU, {}),
        ("reduce-overhead", GPU, {"mode": "reduce-overhead", "dynamic": False}),
        ({"dynamic": False}, CPU, {"dynamic": False}),
    ],
)
def test_compile_model_is_yes_no_a_mode_or_options(requested, device, options):
    assert resolve_compile(requested, device) == options


def test_a_compiled_program_makes_no_rotary_angles():
    "The compiler would make them anew wherever they are used, for each layer and head."
    graphs = []

    def noted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    config = BertLabConfig(**{**SHAPE, "num_hidden_layers": 3}, vocab_size=50, local_attention=8, global_attention_every_n_layers=2,
                           global_rope_theta=1e5, local_rope_theta=1e3, attn_implementation="sdpa",
                           rope_scaling={"rope_type": "linear", "factor": 2.0})  # fmt: skip
    model = BertLabForMaskedLM(config).eval()
    ids = torch.randint(5, 50, (2, 32), generator=torch.Generator().manual_seed(0))
    rows = torch.ones_like(ids).cumsum(1) // 20 + 1
    plain = model.encoder(ids, attention_mask=rows).last_hidden_state
    torch._dynamo.reset()
    compile_model(model, backend=noted)
    result = model.encoder(ids, attention_mask=rows).last_hidden_state
    torch.testing.assert_close(result, plain, rtol=0, atol=0)
    (graph,) = graphs
    assert not [node for node in graph.graph.nodes if str(node.target) in ("cos", "sin")]


def test_compiled_parts_run_as_they_are_on_another_device():
    graphs = []
    noted = lambda graph, inputs: graphs.append(graph) or graph.forward
    model = module_of().build_fresh()
    compile_model(model, backend=noted)
    weight, x, labels = torch.ones(9, 4), torch.ones(2, 4), torch.tensor([1, 3])
    head = lambda x, weight: x @ weight.mT
    sums = [
        model.compiled_head(
            head, weight.to(family), x.to(family), labels.to(family), LossConfig()
        ).loss_sum
        for family in ("meta", "cpu", "meta")
    ]
    assert len(graphs) == 1 and sums[1].item() == pytest.approx(2 * math.log(9))


def test_compiled_layers_choose_a_kernel_of_static_shapes(monkeypatch):
    settings = []
    monkeypatch.setattr(
        encoder, "choose_kernel", lambda setting: settings.append(setting) or ("sdpa", "")
    )
    module = module_of(model_kwargs={"attn_implementation": "auto"})
    module.configure_model()
    module.model(torch.ones(1, 8, dtype=torch.long))
    compile_model(module.model, backend="eager")
    module.model(torch.ones(1, 8, dtype=torch.long))
    assert [setting.compiled for setting in settings] == [False, True]


@pytest.mark.parametrize("requested, want", [
    ({}, "auto"),
    (dict(model_kwargs={"attn_implementation": "eager"}), "eager"),
    (dict(model_config_kwargs={**SHAPE, "attn_implementation": "flex"}), "flex"),
    (dict(optimizer_class="sophiah"), "sdpa"),  # the others know no second derivative
    (dict(compile_model=False), "sdpa"),  # slower so, on an H100
    (dict(compile_model=False, model_kwargs={"attn_implementation": "auto"}), "auto"),
])  # fmt: skip
def test_the_kernel_is_left_to_the_device(requested, want, tmp_path):
    module = module_of(**requested)
    module.configure_model()
    assert module.model.config._attn_implementation == want
    module.model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert not [key for key in saved if "attn" in key]  # another machine chooses anew


def test_flops_count_real_context_and_the_sparse_head():
    module = module_of()
    near, far = module.num_flops_per_token(8, 0.15), module.num_flops_per_token(16, 0.15)
    dense = module.num_flops_per_token(8, 1.0)
    module.configure_model()
    assert module.num_flops_per_token(seq_len=8) == module.model.num_flops_per_token(8)
    assert near < module.num_flops_per_token(8) < dense, "0.3 of the tokens, if nothing is said"
    hidden, vocab, layers = 16, len(TOKENIZER), 2
    # The window of 64 on each side is wider than both contexts, so every layer sees all of it.
    assert far - near == pytest.approx(12 * hidden * 8 * layers)
    head = hidden * hidden + vocab * hidden
    last = hidden * hidden + matmul_parameters(module.config)["MLP"]  # behind the last attention
    assert dense - near == pytest.approx(6 * 0.85 * (head + last))


@pytest.mark.parametrize("requested, within", [
    (dict(freeze="embeddings"), 1e-9),
    (dict(freeze=1), 1e-9),
    (dict(freeze=2), 1e-9),
    (dict(freeze="encoder"), 0.03),  # the tied table is frozen, and the way back to the head's first matrix is counted
    (dict(freeze=["*.mlp.*"]), 1e-9),
    (dict(freeze=1, model_config_kwargs={**SHAPE, "norm_position": "post"}), 1e-9),
    (dict(freeze="embeddings", model_config_kwargs={**SHAPE, "embedding_norm": False}), 1e-9),
    (dict(adapter={"type": "lora", "r": 2}), 0.1),  # what the adapter costs forward is left out
    (dict(objective="enhanced_mlm"), 0.35),  # it multiplies all pairs of tokens, and half of them are of use
], ids=str)  # fmt: skip
def test_flops_leave_out_what_is_frozen(requested, within):
    from torch.utils.flop_counter import FlopCounterMode

    module = module_of(**requested)
    everything = module.num_flops_per_token(8, 1.0)
    module.configure_model()
    model, ids = module.model, torch.arange(16).view(2, 8) + 5
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    assert module.num_flops_per_token(8, 1.0) == pytest.approx(
        counter.get_total_flops() / 16, rel=within
    )
    assert (module.num_flops_per_token(8, 1.0) < 0.95 * everything) == (
        "objective" not in requested
    )


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_the_size_of_every_model_is_known_unbuilt(objective):
    module = module_of(objective=objective)
    drawn = torch.get_rng_state()
    num_params = module.num_params()
    assert torch.equal(torch.get_rng_state(), drawn), "a look at the size changes no run"
    module.configure_model()
    assert num_params == sum(parameter.numel() for parameter in module.model.parameters())


@pytest.mark.parametrize(
    "warmup, kwargs, peak_at",
    [("50%", {}, 5), ("2560 tokens", {"tokens_per_step": 256}, 10)],
)
def test_a_schedule_may_be_given_in_shares_or_tokens(warmup, kwargs, peak_at):
    module = module_of(
        scheduler_warmup_steps=warmup, scheduler_kwargs=kwargs, scheduler_cooldown_steps=0
    )
    _, record = fit(module, data_of(), 10)
    rates = record.column("learning_rate")
    assert rates[peak_at - 1] == pytest.approx(3e-3) and rates[peak_at - 2] < 3e-3


@pytest.mark.parametrize(
    "overrides", [{"*embeddings*": {"lr": 1e-5}}, {"*embeddings*": {"lr": 0.01}}]
)
def test_the_logged_rate_is_not_that_of_an_override(overrides):
    module = module_of(parameter_overrides=overrides, scheduler_warmup_steps=0)
    trainer, record = fit(module, data_of(), 2)
    first = trainer.optimizers[0].param_groups[0]
    assert "embeddings" in first["name"] and first["lr"] != 3e-3, "the override comes first"
    assert record.column("learning_rate").tolist() == pytest.approx([3e-3, 3e-3])


def test_an_option_that_has_a_name_is_refused_among_scheduler_kwargs():
    with pytest.raises(ValueError, match="cooldown_decay=0.1: set scheduler_cooldown_decay"):
        module_of(scheduler_kwargs={"cooldown_decay": 0.1})


def own_optimizer(groups, lr):
    "A user's own optimizer."
    return torch.optim.SGD(groups, lr)


@pytest.mark.parametrize("optimizer_class", ["adamw", "test_modules.own_optimizer"])
@pytest.mark.parametrize("option, value", [("lr", 0.1), ("weight_decay", 0.3)])
def test_rate_and_decay_are_refused_among_optimizer_kwargs(optimizer_class, option, value):
    with pytest.raises(ValueError, match=f"optimizer_kwargs has {option}={value}"):
        module_of(optimizer_class=optimizer_class, optimizer_kwargs={option: value})


def test_weights_under_other_names_are_loaded_by_a_mapping(tmp_path):
    path = published(tmp_path)
    weights = load_encoder(path).state_dict()
    renamed = {
        name.replace("encoder.blocks", "encoder.stack"): w.clone() for name, w in weights.items()
    }
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    later = PretrainingModule(None, path, load_key_mapping={"encoder.blocks.*": "encoder.stack.*"})
    assert all(torch.equal(weights[name], w) for name, w in later.model.state_dict().items())


def with_words(words):
    "The tokenizer of this file with other words at some ids: {id: word}."
    state = json.loads(TOKENIZER.backend_tokenizer.to_str())
    names = {id: word for word, id in state["model"]["vocab"].items()} | words
    state["model"]["vocab"] = {word: id for id, word in names.items() if word is not None}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)),
                                                **TOKENIZER.special_tokens_map)  # fmt: skip


LAST = len(TOKENIZER) - 1


def published(path, tokenizer=TOKENIZER, rows=len(TOKENIZER), **settings):
    "A model with its tokenizer, as somebody else has written it."
    module = module_of(model_config_kwargs={**SHAPE, "vocab_size": rows, **settings})
    module.configure_model()
    module.model.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("tokenizer, words", [
    (word_tokenizer(["aaaa", *WORDS[:-1]]), ["here", "there"]),  # most words have moved by one
    (word_tokenizer([word.upper() for word in WORDS]), ["id 5 is", "here", "there"]),  # no word in common
    (with_words({LAST + 1: "more"}), [f"{LAST + 2} ids", f"vocab_size={LAST + 1}", "extend"]),
], ids=["moved", "apart", "larger"])  # fmt: skip
def test_a_tokenizer_with_other_ids_is_refused_before_loading(
    tokenizer, words, tmp_path, monkeypatch
):
    path = published(tmp_path)
    monkeypatch.setattr(
        modules, "initialize_model", lambda *_: pytest.fail("its weights were read")
    )
    with pytest.raises(ValueError) as refused:
        PretrainingModule(None, path, tokenizer)
    assert all(word in str(refused.value) for word in [path, "tokenizer transplant", *words])


@pytest.mark.parametrize("tokenizer", [
    TOKENIZER, None, with_words({LAST: None}), with_words({LAST + 1: "more"}), with_words({7: "renamed", LAST: "anew"}),
], ids=["same", "its own", "smaller", "larger", "renamed"])  # fmt: skip
def test_a_tokenizer_may_have_fewer_or_more_tokens(tokenizer, tmp_path):
    path = published(tmp_path, rows=len(TOKENIZER) + 3)
    module = PretrainingModule(
        pretrained_model_name_or_path=path, pretrained_tokenizer_name_or_path=tokenizer
    )
    assert module.config.vocab_size == len(TOKENIZER) + 3


def test_special_ids_are_those_of_the_tokenizer(tmp_path):
    "Diffusion counts by them which tokens could have been hidden."
    path = published(tmp_path, cls_token_id=9, sep_token_id=None, pad_token_id=8)
    module = PretrainingModule(pretrained_model_name_or_path=path)
    for name in ("pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id"):
        assert getattr(module.config, name) == getattr(TOKENIZER, name)
    module = PretrainingModule({"cls_token_id": 9}, pretrained_model_name_or_path=path)
    assert module.config.cls_token_id == 9, "somebody has said so"


def test_a_roberta_continues_under_another_padding(tmp_path):
    tokenizer = train_tokenizer(TEXTS, 100)  # which pads with id 0, and RoBERTa counts on from 1
    config = transformers.RobertaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=66, type_vocab_size=1, initializer_range=0.2)  # fmt: skip
    transformers.RobertaForMaskedLM(config).save_pretrained(tmp_path / "theirs")
    module = PretrainingModule(
        pretrained_model_name_or_path=tmp_path / "theirs",
        pretrained_tokenizer_name_or_path=tokenizer,
    )
    assert (module.config.pad_token_id, module.config.position_offset) == (
        tokenizer.pad_token_id,
        2,
    )
    model = module.model.eval()
    save_model(model, tokenizer, tmp_path / "written")
    reference = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "written").eval()
    batch = tokenizer(
        ["\u2603 a \u2603 b c", "d"], padding=True, return_tensors="pt"
    )  # [UNK] has id 1
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        result, expected = (
            reference(**batch).logits[mask],
            model(batch["input_ids"], batch["attention_mask"]).logits[mask],
        )
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-4)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    path, mapping = published(tmp_path), {"head.dense.weight": "head.dense.weight"}
    for options in ({}, {"load_key_mapping": mapping}):
        with pytest.raises(ValueError, match="do not fit: .*mlp.up_proj.weight") as refused:
            PretrainingModule({"intermediate_size": 48}, path, **options)
        assert "attn_implementation" not in str(refused.value)  # which nobody gave
    with pytest.raises(ValueError, match="head.norm.weight"):  # no setting is to blame
        PretrainingModule(
            None, path, load_key_mapping={"head.norm.weight": "encoder.embeddings.tokens.weight"}
        )


@pytest.mark.parametrize("family, changed, lost", [
    ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, "head.decoder"),
    ({}, {"num_hidden_layers": 1}, "encoder.blocks.1."),
    ({"attention_bias": True}, {"attention_bias": False, "attention_dropout": 0.1}, "qkv.bias"),
], ids=["untied", "layers", "biases"])  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"objective": "diffusion"}], ids=["mlm", "diffusion"])
def test_settings_do_not_throw_trained_weights_away(family, changed, lost, options, tmp_path):
    path = published(tmp_path, num_hidden_layers=2, **family)
    with pytest.raises(ValueError, match=f"would drop .*{lost}") as refused:
        PretrainingModule(changed, path, **options)
    assert next(iter(changed)) in str(refused.value)


@pytest.mark.parametrize(
    "setting", [True, "selected_ops", {"mode": "selected_blocks", "interval": 2}]
)
def test_activation_checkpointing_changes_no_loss(setting):
    dropout = {**SHAPE, "hidden_dropout": 0.1}
    _, plain = fit(module_of(model_config_kwargs=dropout), data_of(), 3)
    _, less = fit(
        module_of(model_config_kwargs=dropout, gradient_checkpointing=setting), data_of(), 3
    )
    np.testing.assert_array_equal(plain.column("train_loss"), less.column("train_loss"))


# --- what follows from the run, and what is refused before it ----------------------------------------


def test_rate_and_warmup_follow_from_the_weights_and_the_length(tmp_path):
    new = module_of(learning_rate=None)
    assert new.hparams.learning_rate == min(3e-3, 5e-4 * 768 / new.config.hidden_size)
    continued = PretrainingModule(None, published(tmp_path))
    rate = default_learning_rate(SHAPE["hidden_size"], "continued")
    assert continued.hparams.learning_rate == continued.options.learning_rate == rate
    _, history = fit(module_of(scheduler_warmup_steps=None), data_of(), 50)
    rates = history.column("learning_rate")
    assert (rates == rates.max()).argmax() == 2, "the third of 50 updates has the peak: 6 %"
    assert rates[-1] == rates.max()


@pytest.mark.parametrize(
    "result, reference", [("diffusion", "mlm"), ("mlm", "enhanced_mlm"), ("causal", "mlm")]
)
def test_module_and_data_of_two_objectives_are_refused(result, reference):
    data = data_of(reference)
    with pytest.raises(ValueError, match=f"{reference!r}.*{result!r}"):
        fit(module_of(result), data)
    data.setup("fit")
    with pytest.raises(ValueError, match=f"{reference!r}.*{result!r}"):
        make_trainer(2, "32-true", "cpu").fit(module_of(result), data.train_dataloader())


def test_a_key_of_the_batch_that_no_model_takes_is_named():
    data, module = data_of(), module_of()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    module.configure_model()
    with pytest.raises(ValueError, match="sentiment.*BertLabForMaskedLM"):
        module.label_loss({**batch, "sentiment": torch.zeros(8)})
    assert module.label_loss(batch).num_labels > 0  # bookkeeping of the collator is no such key


def test_bytes_are_counted_exactly_in_16_bits():
    bytes_V = torch.tensor([0.0, 3.0, 7.0], dtype=torch.float16)
    ids = torch.full((203, 127), 2)
    for extra, values_V in (
        ({}, bytes_V),
        ({"loss_weights": ids}, bytes_V.bfloat16()),
    ):  # more than float16 holds
        assert (
            _label_bytes({"input_ids": ids, "labels": ids, **extra}, values_V).item()
            == 7 * ids.numel()
        )


# --- one's own parts ------------------------------------------------------------------------------------


def test_own_optimizer_schedule_and_overrides_reach_the_run():
    def half(step):
        return 0.5

    module = module_of(optimizer_class=torch.optim.NAdam, schedule=half, learning_rate=0.01,
                       parameter_overrides={"*embed*": {"lr": 0.001}})  # fmt: skip
    trainer, record = fit(module, data_of(), 2)
    assert type(trainer.optimizers[0]) is torch.optim.NAdam
    rates = {round(group["initial_lr"], 6) for group in trainer.optimizers[0].param_groups}
    assert rates == {0.01, 0.001} and record.column("learning_rate")[0] == pytest.approx(0.005), (
        "half of its own peak"
    )
    timed = module_of(schedule="time_budget", scheduler_kwargs={"budget": "1h"})
    trainer, _ = fit(timed, data_of(), 2)
    assert type(trainer.lr_scheduler_configs[0].scheduler).__name__ == "TimeBudgetLR"


@pytest.mark.parametrize("schedule, budget", [
    ("time_budget", "1h"), (TimeBudgetLR, "1h"), ("bertlab.optim.budgets.TimeBudgetLR", "1h"),
    (None, None), (lambda step: 0.5, None), ("torch.optim.lr_scheduler.LinearLR", None),
])  # fmt: skip
def test_the_budget_of_a_schedule_is_known(schedule, budget):
    assert clock_budget({"schedule": schedule, "scheduler_kwargs": {"budget": "1h"}}) == budget


# --- what is kept ---------------------------------------------------------------------------------------


def test_the_test_split_is_scored_with_averaged_weights():
    module, data = module_of(optimizer_class="splus", learning_rate=0.1), data_of()
    trainer, record = fit(module, data, 4)
    (tested,) = trainer.test(module, data.val_dataloader(), verbose=False)
    assert tested["test_loss"] == pytest.approx(record.validation[-1]["val_loss"], rel=1e-6)
    module.evaluation_weights = nullcontext
    (raw,) = trainer.test(module, data.val_dataloader(), verbose=False)
    assert abs(raw["test_loss"] - tested["test_loss"]) > 1e-4


@pytest.mark.parametrize("optimizer", ["adamw", torch.optim.NAdam])
def test_a_checkpoint_loads_without_what_the_run_began_with(tmp_path, optimizer):
    module = PretrainingModule(
        None, published(tmp_path / "start"), TOKENIZER, optimizer_class=optimizer
    )
    trainer, _ = fit(module, data_of(), 2)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    shutil.rmtree(tmp_path / "start")
    torch.load(tmp_path / "run.ckpt", weights_only=True)
    loaded = PretrainingModule.load_from_checkpoint(tmp_path / "run.ckpt")
    expected, weights = module.state_dict(), loaded.state_dict()
    assert expected.keys() == weights.keys()
    assert all(torch.equal(expected[name], weights[name]) for name in expected)
    assert loaded.hparams.learning_rate == module.hparams.learning_rate


@pytest.mark.parametrize("saved", [True, False])
def test_a_plain_trainer_leaves_a_directory_beside_each_checkpoint(tmp_path, saved):
    def train(*callbacks):
        torch.manual_seed(1)
        shape = {**SHAPE, "mlp_dropout": 0.3}
        module, history = module_of(save_directories=saved, model_config_kwargs=shape), History()
        trainer = L.Trainer(max_steps=4, accelerator="cpu", logger=False, enable_progress_bar=False,
                            enable_checkpointing=bool(callbacks), callbacks=[history, *callbacks],
                            limit_val_batches=0)  # fmt: skip
        trainer.fit(module, data_of())
        return module, history.column("train_loss")

    keeper = ModelCheckpoint(
        tmp_path, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max"
    )
    module, losses = train(keeper)
    checkpoints = sorted(path.stem for path in tmp_path.glob("*.ckpt"))
    directories = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    assert [path.name for path in directories] == (checkpoints if saved else [])
    assert len(checkpoints) == 2
    if saved:
        reference = transformers.AutoModelForMaskedLM.from_pretrained(directories[-1]).eval()
        batch = TOKENIZER(TEXTS[0], return_tensors="pt")
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        result = module.model.eval()(**inputs).logits
        torch.testing.assert_close(reference(**inputs).logits, result, atol=1e-5, rtol=1e-4)
        np.testing.assert_array_equal(losses, train()[1])  # no generator was moved


def test_lightnings_checkpoints_in_shards_have_no_directories(tmp_path):
    module, callbacks = module_of(), [ModelCheckpoint(tmp_path)]
    module.trainer = make_trainer(1, "32-true", "cpu", strategy="fsdp-shards", callbacks=callbacks)
    with pytest.warns(UserWarning, match="in shards .*models=DIRECTORY"):
        module.on_save_checkpoint({})


class Renaming(PretrainingModule):
    "Leaves the head's bias out of checkpoints, and renames the rest."

    def state_dict_to_save(self, state_dict):
        return {f"my_{name}": w for name, w in state_dict.items() if name != "model.head.bias"}

    def state_dict_to_load(self, state_dict):
        renamed = {name.removeprefix("my_"): weight for name, weight in state_dict.items()}
        return {**self.state_dict(), **renamed}


def test_every_saved_checkpoint_brings_a_model_directory(tmp_path):
    torch.manual_seed(0)
    module = Renaming(SHAPE, None, TOKENIZER, learning_rate=3e-3)
    trainer, _ = fit(module, data_of(), 2)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.json").write_text("{}")
    for name in ("x.ckpt", "no_ending", "loss=2.31", "x.ckpt"):
        trainer.save_checkpoint(tmp_path / name)
    with pytest.warns(UserWarning, match="mine.* is there"):
        trainer.save_checkpoint(tmp_path / "mine.ckpt")
    module.save_directories = False
    trainer.save_checkpoint(tmp_path / "without.ckpt")
    directories = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert directories == {"x", "no_ending-model", "loss=2.31-model", "mine"}
    assert [path.name for path in mine.iterdir()] == ["config.json"]
    inputs = {"input_ids": TOKENIZER(TEXTS[0], return_tensors="pt")["input_ids"]}
    result = module.eval()(**inputs).logits
    reference = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "x").eval()
    torch.testing.assert_close(reference(**inputs).logits, result, atol=1e-5, rtol=1e-4)
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
    assert all(name.startswith("my_model.") for name in saved) and len(saved) > 5
    loaded = Renaming.load_from_checkpoint(tmp_path / "x.ckpt").state_dict()
    assert all(torch.equal(loaded[name.removeprefix("my_")], saved[name]) for name in saved)
    trainer.strategy.remove_checkpoint(tmp_path / "x.ckpt")
    trainer.strategy.remove_checkpoint(tmp_path / "mine.ckpt")
    assert mine.is_dir() and not (tmp_path / "x").exists()


def test_a_module_is_called_and_predicts_before_any_training():
    ids = torch.tensor(TOKENIZER(TEXTS[:2], padding=True)["input_ids"])
    module = module_of().eval()
    output = module(input_ids=ids, labels=ids)
    model = module.model(input_ids=ids, labels=ids)
    assert output.loss == model.loss and torch.equal(output.logits, model.logits)
    loader = torch.utils.data.DataLoader([{"input_ids": row} for row in ids], 1)
    for loaders, num_sets in ((loader, 1), ([loader, loader], 2)):
        predicted = make_trainer(1, "32-true", "cpu").predict(module, loaders)
        sets = [predicted] if num_sets == 1 else predicted
        assert [len(outputs) for outputs in sets] == [2] * num_sets
        torch.testing.assert_close(torch.cat([x.logits for x in sets[-1]]), output.logits)


@pytest.mark.parametrize("index", [-1, 0])
def test_labels_of_another_index_count_nowhere(index):
    data, losses = data_of(), []
    data.setup()
    batch = next(iter(data.train_dataloader()))
    marked = {**batch, "labels": batch["labels"].masked_fill(batch["labels"] == -100, index)}
    for rows, options in ((batch, {}), (marked, {"label_ignore_index": index})):
        module, history = module_of(**options), History()
        losses.append([module.eval()(**rows).loss.item()])
        trainer = make_trainer(2, "32-true", "cpu", callbacks=[history], val_check_steps=2)
        loader = torch.utils.data.DataLoader([rows] * 2, batch_size=None)
        trainer.fit(module, loader, loader)
        losses[-1] += [history.rows[0]["train_loss"], history.validation[0]["val_loss"]]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "hidden_size, total_steps, optimizer, rate",
    [
        (768, 200, "adamw", 7.5e-5),
        (768, 400, "adamw", 3.75e-5),
        (768, math.inf, "adamw", 1.875e-5),
        (192, 100, "adamw", 1.2e-3),
        (192, 2, "adamw", 2.4e-3),
        (192, 200, "lion", 2.8e-4),
    ],
)
def test_fewer_steps_of_fine_tuning_take_a_higher_rate(hidden_size, total_steps, optimizer, rate):
    default = default_learning_rate(hidden_size, "finetuning", optimizer, total_steps)
    assert default == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize(
    "hidden_size, total_steps, factor",
    [(192, 10**5, 2), (192, 1000, 2), (256, 250, 4), (384, 62.5, 8), (384, 20, 8), (384, 0, 8)],
)
def test_fewer_steps_take_a_higher_rate_of_muon(hidden_size, total_steps, factor):
    rate = default_learning_rate(hidden_size, "new", "muon", total_steps)
    assert rate == pytest.approx(factor * 5e-4 * 768 / hidden_size)
    assert (
        default_learning_rate(hidden_size, "new", "adamw", total_steps) == 5e-4 * 768 / hidden_size
    )


@pytest.mark.parametrize("budget, total_steps", [(None, 40), ("1m", math.inf), (None, math.inf)])
def test_the_default_rate_follows_the_length_of_the_run(budget, total_steps):
    options = {"schedule": "time_budget", "scheduler_kwargs": {"budget": budget}} if budget else {}
    module = module_of(optimizer_class="muon", learning_rate=None, **options)
    module.total_steps = lambda: total_steps
    module.configure_model()
    steps = 60 if budget else total_steps  # as if a step took a second
    rate = default_learning_rate(SHAPE["hidden_size"], "new", "muon", steps)
    assert module.configure_optimizers()["optimizer"].param_groups[0]["initial_lr"] == rate
    assert module.hparams.learning_rate == module.hparams_initial["learning_rate"] == rate


def test_a_tuned_rate_is_not_replaced_by_the_default():
    module = module_of(optimizer_class="muon", learning_rate=None)
    module.total_steps = lambda: 40
    module.configure_model()
    module.hparams.learning_rate = 0.123  # as Lightning's tuner does
    assert module.configure_optimizers()["optimizer"].param_groups[0]["initial_lr"] == 0.123


def test_a_default_rate_is_of_the_optimizers_scale(recwarn):
    def rate_of(name, rate=None):
        return module_of(optimizer_class=name, learning_rate=rate).hparams.learning_rate

    default = default_learning_rate(SHAPE["hidden_size"])
    assert rate_of("adamw") == rate_of("muon") / 4 == rate_of(torch.optim.NAdam) == default == 3e-3
    assert rate_of("lion") == pytest.approx(default / 5) and rate_of("sgd", 0.3) == 0.3
    assert not [warning for warning in recwarn if "learning_rate" in str(warning.message)]
    with pytest.warns(UserWarning, match="is a rate of AdamW.*sgd have another scale"):
        rate_of("sgd")
