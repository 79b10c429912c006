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
from test_training import CONFIG, word_tokenizer
from tokenizers import Tokenizer
from torch.nn.attention import SDPBackend, sdpa_kernel

from bertlab.model import encoder, heads
from bertlab.train.history import History
from bertlab.data.module import PretrainingDataModule
from bertlab.data.tokenizers import train_tokenizer
from bertlab.train.checkpoints import TrainingCheckpoint
from bertlab.model.activation_checkpointing import checkpoint_activations
from bertlab.model.config import BertLabConfig, bert_base, matmul_parameters
from bertlab.model.heads import BertLabForEnhancedMaskedLM, BertLabForMaskedLM, head_and_loss
from bertlab.model.huggingface import save_model
from bertlab.model.losses import LossSums, LossConfig
from bertlab.model.losses import token_bytes
from bertlab.model.generation import generate
from bertlab.optim.budgets import TimeBudgetLR
from bertlab.train import modules
from bertlab.train.modules import (
    PretrainingModule,
    compile_model,
    resolve_compile,
    build_optimizer,
)
from bertlab.train.initialization import unused_weights
from bertlab.train.objectives import OBJECTIVES
from bertlab.train.modules import clock_budget, default_learning_rate
from bertlab.train.steps import optimizer_averages, label_bytes, skip_step, validation_metrics
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


class SaveAt(L.Callback):
    "Save a checkpoint behind a step."

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit(module, data, steps=6, **options):
    history = History()
    options = {"precision": "32-true", "accelerator": "cpu", "val_check_steps": steps, **options}
    trainer = make_trainer(steps, callbacks=[history], **options)
    trainer.fit(module, data)
    return trainer, history


@pytest.mark.parametrize("objective", ["mlm", "diffusion", "enhanced_mlm"])
def test_each_objective_trains_and_reports_what_its_loss_means(objective):
    trainer, record = fit(module_of(objective), data_of(objective))
    last = record.validation[-1]
    assert np.isfinite(record.column("train_loss")).all()
    assert 0 <= last["val_accuracy"] <= 1
    assert last["val_perplexity"] == pytest.approx(math.exp(last["val_loss"]), rel=1e-5)
    # Letters a to h and short words: a uniform guess over 150 words costs about 2 bits per byte.
    assert 1.0 < last["val_bits_per_byte"] < 3.0


def test_bits_per_byte_of_masked_words_count_the_masked_bytes_and_of_a_bound_all_bytes():
    bytes_V = torch.tensor([0.0, 3.0, 5.0, 7.0, 0.0])  # padding, three words, [MASK]
    batch = {
        "input_ids": torch.tensor([[1, 4, 3, 0]]),
        "labels": torch.tensor([[-100, 2, -100, -100]]),
    }
    assert label_bytes(batch, bytes_V) == 5
    assert label_bytes({**batch, "loss_weights": torch.ones(1, 4)}, bytes_V) == 3 + 5 + 7
    positions = {**batch, "label_positions": torch.tensor([[1, 0]])}
    assert label_bytes(positions, bytes_V) == 5


def test_token_bytes_add_up_to_the_text_without_its_spaces_whatever_the_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = "naïve café 東京 tests\nrun quickly"
    wanted = len("".join(text.split()).encode())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([text] * 3, trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["[PAD]"]))  # fmt: skip
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
    bytes_V = token_bytes(fast, len(fast) + 5)
    assert bytes_V[fast(text)["input_ids"]].sum() == wanted
    assert bytes_V[fast.pad_token_id] == 0 and bytes_V[-5:].sum() == 0
    assert token_bytes(TOKENIZER, len(TOKENIZER))[TOKENIZER.convert_tokens_to_ids(WORDS[0])] == len(
        WORDS[0]
    )


def test_a_validation_smooths_nothing_so_that_losses_compare():
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


def test_z_loss_is_followed_and_reported_apart_from_the_loss():
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


def test_accumulated_z_loss_is_that_of_the_whole_batch():
    losses = {}
    for rows, window in ((8, 1), (2, 4)):
        trainer, _ = fit(module_of(scheduler_warmup_steps=0, loss_kwargs={"z_weight": 0.5}), data_of(train_batch_size=rows), 1,
                         accumulate_grad_batches=window)  # fmt: skip
        losses[rows] = trainer.callback_metrics["train_z_loss"].item()
    assert losses[2] == pytest.approx(losses[8], rel=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
@pytest.mark.parametrize(
    "headless, objective", [(False, "mlm"), (True, "mlm"), (False, "diffusion")]
)
def test_an_encoder_of_transformers_goes_on_from_its_own_weights(
    tmp_path, kind, headless, objective
):
    small = dict(vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                 num_attention_heads=2, max_position_embeddings=64, pad_token_id=0)  # fmt: skip
    name = {"bert": "Bert", "roberta": "Roberta", "modernbert": "ModernBert"}[kind]
    extra = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    config = getattr(transformers, f"{name}Config")(
        **small, **(extra if kind == "modernbert" else {})
    )
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{name}{'Model' if headless else 'ForMaskedLM'}")(config).eval()
    theirs.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    module = PretrainingModule(pretrained_model_name_or_path=str(tmp_path), objective=objective, learning_rate=1e-3,
                               scheduler_warmup_steps=2)  # fmt: skip
    module.configure_model()
    batch = TOKENIZER(TEXTS[0], return_tensors="pt")
    keys = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with torch.no_grad():
        if headless:
            ours, expected = module.model.eval().encoder(**keys)[0], theirs(**keys)[0]
        else:
            ours, expected = module.model.eval()(**keys).logits, theirs(**keys).logits
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    module.model.train()
    _, record = fit(module, data_of(objective), 3)
    assert np.isfinite(record.column("train_loss")).all()
    if objective == "diffusion":
        (text,) = generate(
            module.model.eval(), TOKENIZER, [f"{WORDS[0]} [MASK] {WORDS[1]}"], seed=1
        )
        assert text.startswith(WORDS[0]) and text.endswith(WORDS[1]) and "[MASK]" not in text


def test_a_model_of_one_objective_goes_on_with_another_and_says_what_is_fresh(tmp_path, caplog):
    first = module_of()
    first.configure_model()
    first.model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        later = PretrainingModule(
            pretrained_model_name_or_path=str(tmp_path), objective="enhanced_mlm"
        )
    assert "decoder" in caplog.text and "has no weights for" in caplog.text
    assert later.describe_missing_keys() in caplog.text
    old, new = first.model.state_dict(), later.model.state_dict()
    assert (
        all(torch.equal(old[name], new[name]) for name in old)
        and set(later.missing_keys) == new.keys() - old.keys()
    )
    caplog.clear()
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        PretrainingModule(pretrained_model_name_or_path=str(tmp_path), objective="diffusion")
    assert (
        "has no weights" not in caplog.text
        and first.missing_keys == []
        and first.describe_missing_keys() == ""
    )


def test_sophia_gets_the_graph_of_the_gradient_in_the_steps_that_need_it_and_trains():
    module = module_of(
        optimizer_class="sophiah", learning_rate=1e-3, optimizer_kwargs={"update_period": 2}
    )
    trainer, record = fit(module, data_of(), 4, accumulate_grad_batches=2)
    state = next(iter(trainer.optimizers[0].state.values()))
    assert np.isfinite(record.column("train_loss")).all() and any("hessian" in key for key in state)


@pytest.mark.parametrize("mode", [True, {"mode": "selected_blocks", "interval": 2},
                                  {"mode": "selected_modules", "modules": ["*.mlp"]}])  # fmt: skip
def test_sophia_looks_at_the_same_curvature_through_recomputed_activations(mode):
    def trained(checkpointing):
        module = module_of(optimizer_class="sophiah", learning_rate=1e-3, gradient_checkpointing=checkpointing,
                           optimizer_kwargs={"update_period": 2})  # fmt: skip
        trainer, _ = fit(module, data_of(), 3)
        hessians = [state["hessian"] for state in trainer.optimizers[0].state.values()]
        assert any(hessian.abs().max() > 0 for hessian in hessians)
        return [*module.model.state_dict().values(), *hessians]

    assert all(
        torch.equal(one, other) for one, other in zip(trained(False), trained(mode), strict=True)
    )


@pytest.mark.filterwarnings("ignore")  # the compiler's, of what it is about to refuse
def test_what_sophia_is_refused_would_really_fail():
    "The day that one of these works, the refusal goes."
    ids = torch.randint(5, 50, (2, 8))

    def second_derivative(change):
        model = BertLabForMaskedLM(BertLabConfig(**{**SHAPE, "vocab_size": 50})).train()
        change(model)
        with sdpa_kernel(SDPBackend.MATH):
            loss = model(ids, labels=ids).loss
        weights = list(model.parameters())
        slopes = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        torch.autograd.grad(
            sum(s.sum() for s in slopes if s is not None), weights, allow_unused=True
        )

    second_derivative(lambda model: checkpoint_activations(model, "full"))
    with pytest.raises(
        RuntimeError, match="backward once|is invalid for input"
    ):  # torch 2.9 stumbles sooner
        second_derivative(lambda model: checkpoint_activations(model, "selected_ops"))
    with pytest.raises(RuntimeError, match="double backward|create_graph"):
        second_derivative(lambda model: compile_model(model, backend="aot_eager"))


def test_on_a_gpu_all_is_compiled_but_what_differentiates_its_gradient():
    gpu = torch.device("cuda")
    assert resolve_compile(None, gpu) == {} and resolve_compile(None, gpu, "sophiah") is None
    assert resolve_compile(None, torch.device("cpu")) is None


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


def test_validation_sees_the_average_of_splus_and_training_goes_on_with_its_own_weights():
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


def test_averages_that_a_trainer_left_on_the_host_follow_their_weights_before_they_are_swapped():
    far, here = (torch.nn.Parameter(torch.ones(2, device=device)) for device in ("meta", "cpu"))

    class Averaging(torch.optim.SGD):
        devices = None

        def eval(self):
            self.devices = {
                p: {name: t.device.type for name, t in s.items()} for p, s in self.state.items()
            }

        def train(self):
            pass

    optimizer = Averaging([{"params": [far]}, {"params": [here]}], lr=0.1)
    for p in (
        far,
        here,
    ):  # as Lightning leaves them when a fit has ended, and weights go back to their device
        optimizer.state[p] = {
            "ema": torch.zeros(2),
            "step": torch.tensor(3.0),
            "sides": torch.zeros(3, 3),
        }
    with optimizer_averages([optimizer]):
        pass
    assert optimizer.devices[far] == {"ema": "meta", "step": "cpu", "sides": "cpu"}
    assert set(optimizer.devices[here].values()) == {"cpu"}


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
def test_guards_are_asked_with_the_loss_and_norm_of_the_whole_batch_and_can_refuse(optimizer):
    from lightning.pytorch.callbacks import Callback

    class Guard(Callback):
        def __init__(self):
            self.asked, self.told = [], []

        def should_skip(self, loss, norm):
            self.asked.append((loss.item(), norm.item()))
            return torch.tensor(len(self.asked) == 2)

        def after_step(self, skipped):
            self.told.append(bool(skipped))

    class Weights(Callback):
        def __init__(self):
            self.kept = []

        def on_train_batch_end(self, trainer, pl_module, *args):
            self.kept.append(pl_module.model.head.dense.weight.detach().clone())

    guard, weights, history = Guard(), Weights(), History()
    module = module_of(optimizer_class=optimizer)
    make_trainer(3, "32-true", "cpu", callbacks=[history, guard, weights]).fit(module, data_of())
    assert guard.told == [False, True, False] and module.skipped is not None
    assert torch.equal(weights.kept[0], weights.kept[1]) and not torch.equal(
        weights.kept[1], weights.kept[2]
    )
    np.testing.assert_allclose([a[0] for a in guard.asked], history.column("train_loss"), rtol=1e-6)


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
    ({"gradient_checkpointing": "sometimes"}, ["sometimes"]),
    ({"model_kwargs": {"attention": "fast"}}, ["attention"]),
    ({"pretrained_tokenizer_name_or_path": "no/where/at/all"}, ["no/where/at/all"]),
])  # fmt: skip
def test_a_mistake_is_named_when_the_module_is_made(options, words):
    options = {
        "pretrained_tokenizer_name_or_path": TOKENIZER,
        "model_config_kwargs": SHAPE,
        **options,
    }
    with pytest.raises(ValueError) as caught:
        PretrainingModule(**options)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_an_objective_and_a_shape_that_do_not_fit_the_weights_are_refused(tmp_path):
    first = module_of()
    first.configure_model()
    first.model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="do not fit"):
        PretrainingModule({"intermediate_size": 48}, str(tmp_path))


def test_the_compiled_path_gives_the_loss_of_the_plain_one():
    plain, compiled = module_of(), module_of(compile_model=True)
    data = data_of()
    data.setup()
    batch = next(iter(data.train_dataloader()))
    losses = []
    for module in (plain, compiled):
        torch.manual_seed(0)
        module.configure_model()
        parts = module.label_loss(batch)
        assert isinstance(parts, LossSums)
        losses.append(parts.loss_sum)
    assert "compiled_blocks" in vars(compiled.model.encoder)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-4)


def test_the_compiled_loss_is_the_plain_one_and_scores_that_are_wanted_stay_outside(monkeypatch):
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
    for other in (LossConfig(), LossConfig(loss_only=True, chunk_size=4)):
        for a, b in zip(run(other), want):
            torch.testing.assert_close(a, b)
    assert len(runs) == 1 and model(ids, labels=labels).logits is not None


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
def test_a_compiled_step_on_a_gpu_has_the_loss_and_the_gradient_of_the_plain_one(kernel):
    g = torch.Generator().manual_seed(0)
    rows = torch.zeros(4, 256, dtype=torch.long)
    for row, lengths in zip(rows, ([100, 156], [256], [30, 1, 200], [5])):
        row[: sum(lengths)] = torch.arange(1, len(lengths) + 1).repeat_interleave(
            torch.tensor(lengths)
        )
    ids = torch.randint(5, 50, rows.shape, generator=g) * (rows > 0)
    labels = ids.masked_fill((torch.rand(rows.shape, generator=g) < 0.8) | (rows == 0), -100)
    batch = {"input_ids": ids.cuda(), "attention_mask": rows.cuda(), "labels": labels.cuda()}
    found = []
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
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("trained", [False, True])
def test_compiled_flex_attention_without_gradients_is_that_of_the_plain_kernel(trained):
    "A batch of another size makes a graph of its own, whose tables of blocks torch may lay out as it likes."
    config = {
        **SHAPE,
        "vocab_size": 50,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
    }
    model, plain = (BertLabForMaskedLM(BertLabConfig(**config, attn_implementation=kernel)).cuda()
                    for kernel in ("flex", "sdpa"))  # fmt: skip
    compile_model(model)
    g = torch.Generator().manual_seed(0)
    for rows in (32, 16, 5):
        ids = torch.randint(5, 50, (rows, 256), generator=g).cuda()
        ends = torch.randint(20, 120, (rows, 2), generator=g).cumsum(1)
        numbers = ((torch.arange(256)[None, :, None] >= ends[:, None]).sum(-1) + 1).cuda()
        if trained and rows == 32:
            model(
                ids, attention_mask=numbers, labels=ids, loss_config=LossConfig(loss_only=True)
            ).loss.backward()
        plain.load_state_dict(model.state_dict())
        with torch.no_grad():
            found, want = (
                m.encoder(ids, attention_mask=numbers).last_hidden_state for m in (model, plain)
            )
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_compiled_stream_in_16_bits_keeps_the_loss_and_the_direction_of_the_gradient():
    ids = torch.randint(5, 50, (4, 256), generator=torch.Generator().manual_seed(0)).cuda()
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids).cumsum(1) // 100 + 1,
        "labels": ids,
    }
    found = {}
    for in_fp32 in (True, False):
        torch.manual_seed(0)
        config = bert_base(vocab_size=50, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=2,
                           embedding_dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0,
                           residual_in_fp32=in_fp32)  # fmt: skip
        model = BertLabForMaskedLM(config).cuda().train()
        compile_model(model)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch, loss_config=LossConfig(loss_only=True)).loss
        loss.backward()
        found[in_fp32] = loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])
    assert not torch.equal(found[False][1], found[True][1])
    assert found[False][0] == pytest.approx(found[True][0], rel=0.005)
    assert torch.cosine_similarity(found[False][1], found[True][1], dim=0) > 0.995


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    "asked, device, options",
    [
        (None, CPU, None),
        (None, GPU, {}),
        (False, GPU, None),
        (True, CPU, {}),
        ("reduce-overhead", GPU, {"mode": "reduce-overhead", "dynamic": False}),
        ({"dynamic": False}, CPU, {"dynamic": False}),
    ],
)
def test_compile_model_is_yes_no_a_mode_or_options(asked, device, options):
    assert resolve_compile(asked, device) == options


def test_compiling_twice_is_refused():
    with pytest.raises(ValueError, match="compile_model=True: XLA compiles"):
        resolve_compile(True, torch.device("xla"))


def test_a_compiled_program_takes_the_angles_of_rotary_positions_and_makes_none():
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
    found = model.encoder(ids, attention_mask=rows).last_hidden_state
    torch.testing.assert_close(found, plain, rtol=0, atol=0)
    (graph,) = graphs
    assert not [node for node in graph.graph.nodes if str(node.target) in ("cos", "sin")]


def test_layers_that_are_compiled_choose_a_kernel_of_static_shapes(monkeypatch):
    seen = []
    monkeypatch.setattr(
        encoder, "choose_kernel", lambda setting: seen.append(setting) or ("sdpa", "")
    )
    module = module_of(model_kwargs={"attn_implementation": "auto"})
    module.configure_model()
    module.model(torch.ones(1, 8, dtype=torch.long))
    compile_model(module.model, backend="eager")
    module.model(torch.ones(1, 8, dtype=torch.long))
    assert [setting.compiled for setting in seen] == [False, True]


@pytest.mark.parametrize("asked, want", [
    ({}, "auto"),
    (dict(model_kwargs={"attn_implementation": "eager"}), "eager"),
    (dict(model_config_kwargs={**SHAPE, "attn_implementation": "flex"}), "flex"),
    (dict(optimizer_class="sophiah"), "sdpa"),  # the others know no second derivative
    (dict(compile_model=False), "sdpa"),  # slower so, on an H100
    (dict(compile_model=False, model_kwargs={"attn_implementation": "auto"}), "auto"),
])  # fmt: skip
def test_a_module_leaves_the_choice_of_a_kernel_to_the_device(asked, want, tmp_path):
    module = module_of(**asked)
    module.configure_model()
    assert module.model.config._attn_implementation == want
    module.model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert not [key for key in saved if "attn" in key]  # another machine chooses anew


def test_flops_count_real_context_and_the_sparse_head():
    module = module_of()
    one, far = module.num_flops_per_token(8, 0.15), module.num_flops_per_token(16, 0.15)
    dense = module.num_flops_per_token(8, 1.0)
    hidden, vocab, layers = 16, len(TOKENIZER), 2
    # The window of 64 on each side is wider than both contexts, so every layer sees all of it.
    assert far - one == pytest.approx(12 * hidden * 8 * layers)
    head = hidden * hidden + vocab * hidden
    last = hidden * hidden + matmul_parameters(module.config)["MLP"]  # behind the last attention
    assert dense - one == pytest.approx(6 * 0.85 * (head + last))


@pytest.mark.parametrize("asked, within", [
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
def test_flops_leave_out_what_is_frozen(asked, within):
    from torch.utils.flop_counter import FlopCounterMode

    module = module_of(**asked)
    everything = module.num_flops_per_token(8, 1.0)
    module.configure_model()
    model, ids = module.model, torch.arange(16).view(2, 8) + 5
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    assert module.num_flops_per_token(8, 1.0) == pytest.approx(
        counter.get_total_flops() / 16, rel=within
    )
    assert (module.num_flops_per_token(8, 1.0) < 0.95 * everything) == ("objective" not in asked)


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_the_size_of_every_objectives_model_is_known_before_it_is_built(objective):
    module = module_of(objective=objective)
    drawn = torch.get_rng_state()
    told = module.num_params()
    assert torch.equal(torch.get_rng_state(), drawn), "a look at the size changes no run"
    module.configure_model()
    assert told == sum(parameter.numel() for parameter in module.model.parameters())


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
def test_the_rate_that_is_logged_is_the_run_s_and_not_that_of_an_override(overrides):
    module = module_of(parameter_overrides=overrides, scheduler_warmup_steps=0)
    trainer, record = fit(module, data_of(), 2)
    first = trainer.optimizers[0].param_groups[0]
    assert "embeddings" in first["name"] and first["lr"] != 3e-3, "the override comes first"
    assert record.column("learning_rate").tolist() == pytest.approx([3e-3, 3e-3])


@pytest.mark.parametrize("options, words", [
    ({"scheduler_kwargs": {"total_steps": 9}}, ["scheduler_kwargs has total_steps=9", "max_steps"]),
    ({"schedule": "time_budget", "scheduler_kwargs": {"budget": "1h", "total_steps": 9}}, ["total_steps=9", "max_steps"]),
    ({"scheduler_kwargs": {"cooldown_decay": 0.1}}, ["cooldown_decay=0.1", "scheduler_cooldown_decay"]),
])  # fmt: skip
def test_an_option_with_a_place_of_its_own_is_refused_where_nobody_would_read_it(options, words):
    module = module_of(**options)
    module.configure_model()
    with pytest.raises(ValueError) as caught:
        build_optimizer(module.model, module.hparams, 10)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def own_optimizer(groups, lr):
    "A user's own optimizer."
    return torch.optim.SGD(groups, lr)


@pytest.mark.parametrize("optimizer_class", ["adamw", own_optimizer, "test_modules.own_optimizer"])
@pytest.mark.parametrize("option, value", [("lr", 0.1), ("weight_decay", 0.3)])
def test_rate_and_decay_are_refused_among_optimizer_kwargs(optimizer_class, option, value):
    module = module_of(optimizer_class=optimizer_class, optimizer_kwargs={option: value})
    module.configure_model()
    with pytest.raises(ValueError, match=f"optimizer_kwargs has {option}={value}"):
        build_optimizer(module.model, module.hparams, 10)


def test_weights_under_other_names_go_on_by_a_mapping(tmp_path):
    from safetensors.torch import load_file, save_file

    first = module_of()
    first.configure_model()
    first.model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("encoder.blocks", "encoder.stack"): weight for name, weight in weights.items()
    }
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    later = PretrainingModule(pretrained_model_name_or_path=str(tmp_path),
                              load_key_mapping={"encoder.blocks.*": "encoder.stack.*"})  # fmt: skip
    old, new = first.model.state_dict(), later.model.state_dict()
    assert all(torch.equal(old[name], new[name]) for name in old)


def with_words(words):
    "The tokenizer of this file with other words at some ids: {id: word}."
    state = json.loads(TOKENIZER.backend_tokenizer.to_str())
    names = {id: word for word, id in state["model"]["vocab"].items()} | words
    state["model"]["vocab"] = {word: id for id, word in names.items() if word is not None}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)),
                                                **TOKENIZER.special_tokens_map)  # fmt: skip


LAST = len(TOKENIZER) - 1


def published(place, tokenizer=TOKENIZER, rows=len(TOKENIZER), **settings):
    "A model with its tokenizer, as somebody else has written it."
    module = module_of(model_config_kwargs={**SHAPE, "vocab_size": rows, **settings})
    module.configure_model()
    module.model.save_pretrained(place)
    if tokenizer is not None:
        tokenizer.save_pretrained(place)
    return str(place)


@pytest.mark.parametrize("tokenizer, words", [
    (word_tokenizer(["aaaa", *WORDS[:-1]]), ["is id", "here", "there"]),  # most words have moved by one
    (word_tokenizer([word.upper() for word in WORDS]), ["id 5 is", "here", "there"]),  # no word in common
    (with_words({LAST + 1: "more"}), [f"{LAST + 2} ids", f"vocab_size={LAST + 1}", "extend"]),
], ids=["moved", "apart", "larger"])  # fmt: skip
@pytest.mark.parametrize("later", ["cpu", "meta"])
def test_a_model_does_not_go_on_under_a_tokenizer_whose_ids_are_other_pieces(
    tokenizer, words, later, tmp_path, monkeypatch
):
    place = published(tmp_path)
    monkeypatch.setattr(
        modules, "initialize_model", lambda *_: pytest.fail("its weights were read")
    )
    words = [word for word in words if word != "is id"] + [place, "bertlab tokenizer transplant"]
    with pytest.raises(ValueError) as told, torch.device(later):
        PretrainingModule(
            pretrained_model_name_or_path=place, pretrained_tokenizer_name_or_path=tokenizer
        )
    assert all(word in str(told.value) for word in words) and "\n" not in str(told.value)
    assert "model_config_kwargs" not in str(told.value), "nobody gave it a size"


@pytest.mark.parametrize("tokenizer", [
    TOKENIZER, None, with_words({LAST: None}), with_words({LAST + 1: "more"}), with_words({7: "renamed", LAST: "anew"}),
], ids=["same", "its own", "smaller", "larger", "renamed"])  # fmt: skip
def test_a_model_goes_on_with_fewer_or_more_pieces_where_each_has_its_row(tokenizer, tmp_path):
    place = published(tmp_path, rows=len(TOKENIZER) + 3)
    module = PretrainingModule(
        pretrained_model_name_or_path=place, pretrained_tokenizer_name_or_path=tokenizer
    )
    assert module.config.vocab_size == len(TOKENIZER) + 3


def test_weights_alone_go_on_under_any_tokenizer_that_has_rows(tmp_path):
    place = published(tmp_path, tokenizer=None)
    other = word_tokenizer([word.upper() for word in WORDS])
    PretrainingModule(pretrained_model_name_or_path=place, pretrained_tokenizer_name_or_path=other)
    with pytest.raises(ValueError, match="the tokenizer that it was trained with"):
        PretrainingModule(
            pretrained_model_name_or_path=place,
            pretrained_tokenizer_name_or_path=with_words({LAST + 1: "more"}),
        )


def test_special_ids_of_a_continued_model_are_those_of_its_tokenizer(tmp_path):
    "Diffusion counts by them which tokens could have been hidden."
    place = published(tmp_path, cls_token_id=9, sep_token_id=None, pad_token_id=8)
    module = PretrainingModule(pretrained_model_name_or_path=place)
    for name in ("pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id"):
        assert getattr(module.config, name) == getattr(TOKENIZER, name)
    module = PretrainingModule({"cls_token_id": 9}, pretrained_model_name_or_path=place)
    assert module.config.cls_token_id == 9, "somebody has said so"


def test_a_roberta_under_another_padding_goes_on_and_is_written_as_what_counts_alike(tmp_path):
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
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "written").eval()
    batch = tokenizer(
        ["\u2603 a \u2603 b c", "d"], padding=True, return_tensors="pt"
    )  # [UNK] has id 1
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        found, expected = (
            theirs(**batch).logits[mask],
            model(batch["input_ids"], batch["attention_mask"]).logits[mask],
        )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_weights_that_do_not_fit_are_refused_by_a_mapping_as_without_one(tmp_path):
    place, mapping = published(tmp_path), {"head.dense.weight": "head.dense.weight"}
    for options in ({}, {"load_key_mapping": mapping}):
        with pytest.raises(ValueError, match="do not fit: .*mlp.up_proj.weight") as told:
            PretrainingModule({"intermediate_size": 48}, place, **options)
        assert "\n" not in str(told.value)
    with pytest.raises(ValueError, match="head.norm.weight"):  # no setting is to blame
        PretrainingModule(
            None, place, load_key_mapping={"head.norm.weight": "encoder.embeddings.tokens.weight"}
        )


@pytest.mark.parametrize("kind, told, lost", [
    ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, "head.decoder"),
    ({}, {"num_hidden_layers": 1}, "encoder.blocks.1."),
    ({"attention_bias": True}, {"attention_bias": False, "attention_dropout": 0.1}, "qkv.bias"),
], ids=["untied", "layers", "biases"])  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"load_key_mapping": {"head.dense.weight": "head.dense.weight"}}, {"objective": "diffusion"}],
                         ids=["plain", "mapped", "diffusion"])  # fmt: skip
@pytest.mark.parametrize("later", ["cpu", "meta"])
def test_settings_do_not_throw_trained_weights_away(kind, told, lost, options, later, tmp_path):
    place = published(tmp_path, num_hidden_layers=2, **kind)
    with (
        pytest.raises(ValueError, match=f"would drop .*{lost}") as refused,
        torch.device(later),
    ):
        PretrainingModule(told, place, **options)
    assert next(iter(told)) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("later", ["cpu", "meta"])
def test_what_another_objective_or_no_head_leaves_behind_is_no_loss(later, tmp_path):
    torch.manual_seed(0)
    enhanced = BertLabForEnhancedMaskedLM(
        BertLabConfig(**{**CONFIG, "vocab_size": len(TOKENIZER), "decoder_bias": True})
    )
    enhanced.save_pretrained(tmp_path / "enhanced")
    enhanced.encoder.save_pretrained(tmp_path / "headless")
    for name, settings in (
        ("enhanced", {"mlp_dropout": 0.1}),
        ("headless", {"decoder_bias": False}),
    ):
        TOKENIZER.save_pretrained(tmp_path / name)
        state = torch.get_rng_state()
        assert (
            unused_weights(
                tmp_path / name,
                "mlm",
                enhanced.config,
                BertLabConfig(**{**enhanced.config.to_diff_dict(), **settings}),
            )
            == []
        )
        assert torch.equal(state, torch.get_rng_state()), "looking draws no numbers"
        with torch.device(later):
            module = PretrainingModule(settings, str(tmp_path / name))
        assert bool(module.missing_keys) == (name == "headless")


def test_float8_and_a_budget_say_what_they_need(tmp_path):
    module = module_of(float8="tensorwise")
    with pytest.raises((ValueError, ImportError), match="float8"):
        module.configure_model()
    with pytest.raises(ValueError, match="compile"):
        module_of(gradient_checkpointing={"mode": "budget", "budget": 0.5}, compile_model=False)


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


def test_rate_and_warmup_follow_from_where_the_weights_come_from_and_from_the_runs_length(tmp_path):
    usual = {"learning_rate": None, "scheduler_warmup_steps": None}
    fresh = module_of(**usual)
    fresh.configure_model()
    fresh.model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    continued = PretrainingModule(pretrained_model_name_or_path=str(tmp_path))
    assert continued.hparams.learning_rate == default_learning_rate(
        SHAPE["hidden_size"], "continued"
    )
    assert fresh.hparams.learning_rate == min(3e-3, 5e-4 * 768 / fresh.config.hidden_size), (
        "narrower is faster"
    )
    _, record = fit(module_of(scheduler_warmup_steps=None), data_of(), 50)
    rates = record.column("learning_rate")
    assert (rates == rates.max()).argmax() == 2, "the third of 50 updates has the peak: 6 %"
    assert rates[-1] == rates.max()


@pytest.mark.parametrize("options, words", [
    ({"model_config_kwargs": 1e-4}, ["model_config_kwargs", "0.0001"]),
    ({"learning_rate": -1.0}, ["learning_rate", "-1.0"]),
    ({"optimizer_class": "sophiah", "gradient_checkpointing": "selected_ops"}, ["sophiah", "selected_modules"]),
    ({"optimizer_class": "sophiah", "gradient_checkpointing": {"mode": "budget", "budget": 0.5}},
     ["sophiah", "selected_blocks"]),
    ({"optimizer_class": "sophiah", "compile_model": True}, ["compile_model=True", "sophiah", "compile_model=False"]),
    ({"optimizer_class": "adamv"}, ["optimizer_class", "adamv", "adamw"]),
    ({"schedule": "wsd"}, ["schedule", "wsd", "time_budget"]),
    ({"plain_mean": True}, ["plain_mean", "diffusion", "mlm"]),
])  # fmt: skip
def test_a_setting_that_cannot_be_is_one_sentence_when_the_module_is_made(options, words):
    with pytest.raises(ValueError) as caught:
        module_of(**options)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


@pytest.mark.parametrize("ours, theirs", [("diffusion", "mlm"), ("mlm", "diffusion"), ("enhanced_mlm", "mlm"),
                                          ("mlm", "enhanced_mlm"), ("diffusion", "enhanced_mlm")])  # fmt: skip
def test_module_and_data_of_two_objectives_are_refused_at_fit_with_a_data_module_and_without(
    ours, theirs
):
    data = data_of(theirs)
    with pytest.raises(ValueError, match=f"{theirs!r}.*{ours!r}"):
        fit(module_of(ours), data)
    data.setup("fit")
    trainer = make_trainer(2, "32-true", "cpu")
    with pytest.raises(ValueError, match=f"{theirs!r}.*{ours!r}"):
        trainer.fit(module_of(ours), data.train_dataloader())


def test_a_key_of_the_batch_that_no_model_takes_is_named():
    data, module = data_of(), module_of()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    module.configure_model()
    with pytest.raises(ValueError, match="sentiment.*BertLabForMaskedLM"):
        module.label_loss({**batch, "sentiment": torch.zeros(8)})
    assert module.label_loss(batch).num_labels > 0  # bookkeeping of the collator is no such key


def test_diffusion_can_be_followed_as_a_plain_mean_over_its_labels():
    batch = None
    sums = {}
    for plain in (False, True):
        module, data = module_of("diffusion", plain_mean=plain), data_of("diffusion")
        data.setup("fit")
        batch = next(iter(data.train_dataloader()))
        torch.manual_seed(0)
        module.configure_model()
        sums[plain] = module.label_loss(batch)
    assert sums[True].num_labels == (batch["labels"] != -100).sum() < sums[False].num_labels
    weights = batch["loss_weights"][batch["labels"] != -100]
    assert weights.min() < weights.max() and sums[True].loss_sum != sums[False].loss_sum


def test_bits_per_byte_of_a_plain_mean_are_of_what_is_hidden():
    found = {}
    for plain in (False, True):
        options = {"plain_mean": plain, "learning_rate": 0.0}  # of an untrained model
        found[plain] = fit(module_of("diffusion", **options), data_of("diffusion"), 2)[
            1
        ].validation[-1]
    # Words cost alike, hidden or not; the bound is wider, for it weighs few labels by 1 / t.
    bits = [found[plain]["val_bits_per_byte"] / found[plain]["val_loss"] for plain in (True, False)]
    assert bits[0] == pytest.approx(bits[1], rel=0.1)


def test_bytes_are_counted_exactly_in_16_bits():
    bytes_V = torch.tensor([0.0, 3.0, 7.0], dtype=torch.float16)
    ids = torch.full((203, 127), 2)
    for more, values_V in (
        ({}, bytes_V),
        ({"loss_weights": ids}, bytes_V.bfloat16()),
    ):  # more than float16 holds
        assert (
            label_bytes({"input_ids": ids, "labels": ids, **more}, values_V).item()
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


@pytest.mark.parametrize("held, factor", [(0, 1.0), (5, 0.25)])
def test_an_own_schedule_gets_its_options_also_where_a_phase_has_one_of_that_name(held, factor):
    def steady(step, warmup_steps=3):
        return 0.25 if step < warmup_steps else 1.0

    module = module_of(schedule=steady, scheduler_kwargs={"warmup_steps": held})
    _, record = fit(module, data_of(), 1)
    assert record.column("learning_rate")[0] == pytest.approx(factor * module.hparams.learning_rate)


@pytest.mark.parametrize("schedule, budget", [("time_budget", "1h"), (TimeBudgetLR, "1h"), ("bertlab.optim.budgets.TimeBudgetLR", "1h"),
                                              (None, None), (lambda step: 0.5, None), ("torch.optim.lr_scheduler.LinearLR", None)])  # fmt: skip
def test_the_budget_of_a_schedule_is_known_however_the_schedule_is_named(schedule, budget):
    assert clock_budget({"schedule": schedule, "scheduler_kwargs": {"budget": "1h"}}) == budget
    assert clock_budget({"schedule": schedule, "scheduler_kwargs": None}) is None


def test_a_run_in_epochs_that_is_cut_off_within_one_goes_on_with_its_next_rows(tmp_path):
    kept = {"max_epochs": 2, "precision": "32-true", "accelerator": "cpu"}
    whole, record = fit(module_of(), data_of(), 1000, val_check_steps=None, **kept)
    total = whole.global_step
    assert total > 6 and total % 2 == 0
    saving = SaveAt(total // 2 + 2, tmp_path / "cut.ckpt")
    make_trainer(1000, callbacks=[saving], **kept).fit(module_of(), data_of())
    history = History()
    rest = make_trainer(1000, callbacks=[history], **kept)
    rest.fit(module_of(seed=1), data_of(), ckpt_path=saving.path, weights_only=True)
    assert rest.global_step == total
    assert (
        history.column("train_loss").tolist()
        == record.column("train_loss")[-(total // 2 - 2) :].tolist()
    )


# --- what is kept ---------------------------------------------------------------------------------------


def test_the_test_split_is_scored_with_the_averaged_weights_that_validation_uses():
    module, data = module_of(optimizer_class="splus", learning_rate=0.1), data_of()
    trainer, record = fit(module, data, 4)
    (tested,) = trainer.test(module, data.val_dataloader(), verbose=False)
    assert tested["test_loss"] == pytest.approx(record.validation[-1]["val_loss"], rel=1e-6)
    module.evaluation_weights = nullcontext
    (raw,) = trainer.test(module, data.val_dataloader(), verbose=False)
    assert abs(raw["test_loss"] - tested["test_loss"]) > 1e-4


@pytest.mark.parametrize("optimizer", ["adamw", torch.optim.NAdam])
def test_a_checkpoint_loads_with_weights_only_and_without_what_the_run_began_with(
    tmp_path, optimizer
):
    first = module_of()
    first.configure_model()
    first.model.save_pretrained(tmp_path / "start")
    TOKENIZER.save_pretrained(tmp_path / "start")
    module = PretrainingModule(pretrained_model_name_or_path=tmp_path / "start", optimizer_class=optimizer,
                               pretrained_tokenizer_name_or_path=TOKENIZER)  # fmt: skip
    trainer, _ = fit(module, data_of(), 2)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    shutil.rmtree(tmp_path / "start")
    torch.load(tmp_path / "run.ckpt", weights_only=True)
    loaded = PretrainingModule.load_from_checkpoint(tmp_path / "run.ckpt")
    ours, theirs = module.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )
    assert loaded.hparams.learning_rate == module.hparams.learning_rate


def test_a_series_beside_a_modelcheckpoint_removes_its_own_directories_and_no_other(tmp_path):
    keeper = ModelCheckpoint(tmp_path / "best", every_n_train_steps=1, save_top_k=-1)
    series = TrainingCheckpoint(tmp_path / "series", every_n_steps=1, keep_last=2)
    make_trainer(4, "32-true", "cpu", callbacks=[History(), keeper, series]).fit(
        module_of(), data_of()
    )
    names = sorted(path.name for path in (tmp_path / "series").iterdir())
    assert names == ["step-00000003", "step-00000003.ckpt", "step-00000004", "step-00000004.ckpt"]
    assert len([path for path in (tmp_path / "best").iterdir() if path.is_dir()]) == 4


@pytest.mark.parametrize("wanted", [True, False])
def test_a_plain_trainer_leaves_a_directory_for_transformers_beside_each_checkpoint(
    tmp_path, wanted
):
    def train(keep, **options):
        torch.manual_seed(1)
        module, history = module_of(save_directories=wanted, **options), History()
        keeper = [
            ModelCheckpoint(
                tmp_path, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max"
            )
        ] * keep
        trainer = L.Trainer(max_steps=4, accelerator="cpu", logger=False, enable_progress_bar=False,
                            enable_checkpointing=bool(keep), callbacks=[history, *keeper], limit_val_batches=0)  # fmt: skip
        trainer.fit(module, data_of())
        return module, history.column("train_loss")

    dropout = {"model_config_kwargs": {**SHAPE, "mlp_dropout": 0.3}}
    module, losses = train(1, **dropout)
    kept = sorted(path.name for path in tmp_path.glob("*.ckpt"))
    assert len(kept) == 2
    directories = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert directories == ([name.removesuffix(".ckpt") for name in kept] if wanted else [])
    if wanted:
        theirs = transformers.AutoModelForMaskedLM.from_pretrained(
            tmp_path / directories[-1]
        ).eval()
        batch = TOKENIZER(TEXTS[0], return_tensors="pt")
        keys = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        torch.testing.assert_close(
            theirs(**keys).logits, module.model.eval()(**keys).logits, atol=1e-5, rtol=1e-4
        )
        np.testing.assert_array_equal(losses, train(0, **dropout)[1])  # no generator was moved


def test_checkpoints_in_shards_have_no_directories_beside_them_and_the_run_says_so(
    tmp_path, recwarn
):
    for more, words in (
        ([], ["models=DIRECTORY"]),
        ([TrainingCheckpoint(tmp_path, models=tmp_path)], []),
    ):
        module = module_of()
        module.trainer = make_trainer(
            1,
            "32-true",
            "cpu",
            strategy="fsdp-shards",
            callbacks=[ModelCheckpoint(tmp_path), *more],
        )
        module.setup("fit")
        said = [str(one.message) for one in recwarn.list if "in shards" in str(one.message)]
        assert len(said) == len(words) and all(word in line for line, word in zip(said, words))
        recwarn.clear()


def test_a_bert_whose_configuration_names_no_ends_takes_them_from_its_tokenizer(tmp_path):
    "Masked diffusion divides by what may be hidden: [CLS] and [SEP] are none of it."
    from transformers import BertConfig, BertForMaskedLM

    from bertlab.data.tokenizers import train_tokenizer

    tokenizer = train_tokenizer(["the cat sat on the mat"] * 3, 60)
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                               num_attention_heads=1, max_position_embeddings=32)).save_pretrained(tmp_path)  # fmt: skip
    tokenizer.save_pretrained(tmp_path)
    module = PretrainingModule(pretrained_model_name_or_path=str(tmp_path), objective="diffusion")
    for config in (module.config, module.model.config):
        assert (config.cls_token_id, config.sep_token_id) == (
            tokenizer.cls_token_id,
            tokenizer.sep_token_id,
        )


def test_a_default_rate_is_of_the_optimizers_scale_or_a_warning_asks_for_one(recwarn):
    rate_of = lambda name, rate=None: (
        module_of(optimizer_class=name, learning_rate=rate).hparams.learning_rate
    )  # noqa: E731
    rates = {name: rate_of(name) for name in ("adamw", "muon", "lion", torch.optim.NAdam)}
    assert (
        rates["adamw"]
        == rates["muon"]
        == rates[torch.optim.NAdam]
        == default_learning_rate(SHAPE["hidden_size"])
    )
    assert rates["lion"] == pytest.approx(rates["adamw"] / 5)
    assert rate_of("sgd", 0.3) == 0.3
    assert not [one for one in recwarn if "learning_rate" in str(one.message)]
    with pytest.warns(
        UserWarning,
        match=r"learning_rate=\S+ is a rate of AdamW.*sgd have another scale: set learning_rate",
    ):
        rate_of("sgd")
    with pytest.warns(
        UserWarning, match="galore have another scale"
    ):  # 0.01 in its paper, of a hidden matrix
        rate_of("galore")
