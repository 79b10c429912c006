"A frozen reference: the divergence, the gradient it changes, resumes that keep it, and runs in stages."

import math

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback
from test_modules import SHAPE, TOKENIZER, data_of, fit, module_of
from test_training import word_tokenizer
from torch.nn import functional as F

from bertlab.train.history import History
from bertlab.model.huggingface import save_model
from bertlab.core.files import atomic_directory
from bertlab.train.parallel import full_state_dict
from bertlab.train.distill import (
    DistillationModule,
    _check_same_words,
    state_dict_hash,
    kl_divergence,
    load_reference,
)
from bertlab.train.modules import PretrainingModule
from bertlab.train.checkpoints import TrainingCheckpoint
from bertlab.train.trainer import make_trainer, seed_everything

OBJECTIVE_NAMES = ["mlm", "diffusion", "enhanced_mlm"]
CPU = {"accelerator": "cpu", "precision": "32-true"}


def save(module, path):
    "What a stage leaves behind."
    module.configure_model()
    with atomic_directory(path) as inside:
        save_model(module.model.eval(), TOKENIZER, inside)
    return str(path)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    "A model for each objective, other than the one that `distilled` begins with."
    path = tmp_path_factory.mktemp("references")
    return {name: save(module_of(name, seed=7), path / name) for name in OBJECTIVE_NAMES}


def distilled(reference, objective="mlm", seed=0, **options):
    torch.manual_seed(seed)
    options = {"learning_rate": 3e-3, "scheduler_warmup_steps": 0, "kl_weight": 0.5,
               "model_config_kwargs": SHAPE, **options}  # fmt: skip
    return DistillationModule(
        reference_model_name_or_path=reference,
        objective=objective,
        pretrained_tokenizer_name_or_path=TOKENIZER,
        **options,
    )


def first_batch(objective="mlm", **options):
    data = data_of(objective, **options)
    data.setup("fit")
    return next(iter(data.train_dataloader()))


class Gradients(Callback):
    "Keep the gradient of the first step, and what was logged with it."

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.kept = {name: p.grad.clone() for name, p in pl_module.model.named_parameters()}

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.logged = dict(trainer.callback_metrics)


def gradient(module, data, **options):
    "The gradient of one step on one batch: the module divides after this hook, so a scale is left."
    seen = Gradients()
    make_trainer(1, callbacks=[seen], gradient_clip_val=None, **CPU, **options).fit(module, data)
    return torch.cat([g.flatten() for g in seen.kept.values()]).double(), seen.logged


# --- the divergence -------------------------------------------------------------------------------


def test_two_words_by_hand():
    result = torch.zeros(1, 2, requires_grad=True)  # a half each
    reference = torch.tensor([[math.log(3.0), 0.0]])  # three quarters and a quarter
    divergence = kl_divergence(result, reference, torch.tensor([0]))
    assert divergence.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    divergence.backward()
    torch.testing.assert_close(result.grad, torch.tensor([[0.5 - 0.75, 0.5 - 0.25]]))  # p - p_ref


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 40), st.sampled_from([0.5, 1.0, 3.0])
)
def test_the_divergence_is_that_of_torch_in_two_ways(seed, num_labels, vocab_size, temperature):
    g = torch.Generator().manual_seed(seed)
    result, reference = torch.randn(2, num_labels, vocab_size, generator=g, dtype=torch.float64) * 3
    labels = torch.zeros(num_labels, dtype=torch.int64)
    got = kl_divergence(result, reference, labels, temperature)
    soft, target = (result / temperature).log_softmax(-1), (reference / temperature).log_softmax(-1)
    expected = F.kl_div(soft, target, reduction="sum", log_target=True) * temperature**2
    torch.testing.assert_close(got, expected)
    p, q = (torch.distributions.Categorical(logits=x / temperature) for x in (reference, result))
    torch.testing.assert_close(got, torch.distributions.kl_divergence(p, q).sum() * temperature**2)
    assert got >= -1e-12


def test_equal_answers_cost_nothing_and_pull_nowhere():
    result = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    divergence = kl_divergence(
        result, result.detach() + 4.0, torch.arange(6)
    )  # a shift is no other answer
    divergence.backward()
    assert abs(divergence.item()) < 1e-12 and result.grad.abs().max() < 1e-12


def test_half_precision_scores_are_compared_in_float32():
    torch.manual_seed(2)
    result, reference = torch.randn(2, 3, 400).bfloat16()
    got = kl_divergence(result, reference, torch.zeros(3, dtype=torch.int64))
    assert got.dtype == torch.float32
    expected = kl_divergence(result.double(), reference.double(), torch.zeros(3, dtype=torch.int64))
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)


# --- the gradient ---------------------------------------------------------------------------------


def cosine(a, b):
    return (a @ b / a.norm() / b.norm()).item()


def test_the_reference_changes_the_direction_of_the_gradient(references):
    plain, _ = gradient(distilled(references["mlm"], kl_weight=0.0), data_of())
    anchored, logged = gradient(distilled(references["mlm"], kl_weight=20.0), data_of())
    assert logged["train_kl"] > 0
    assert cosine(plain, anchored) < 0.9  # a difference of two losses would give exactly 1


def test_the_gradient_is_that_of_loss_plus_divergence(references):
    "Against a plain computation of both terms on the same batch."
    anchored, logged = gradient(
        distilled(references["mlm"], kl_weight=2.0, temperature=2.0), data_of()
    )
    module, batch = distilled(references["mlm"]), first_batch()
    module.configure_model()
    teacher = load_reference(references["mlm"], "mlm", len(TOKENIZER)).model
    inputs = {k: batch[k] for k in ("input_ids", "attention_mask", "position_ids")}
    result, reference = (
        m(**inputs).logits[batch["labels"] != -100] for m in (module.model, teacher)
    )
    truth = batch["labels"][batch["labels"] != -100]
    divergence = (
        F.kl_div((result / 2).log_softmax(-1), (reference / 2).softmax(-1), reduction="batchmean")
        * 4
    )
    (F.cross_entropy(result, truth) + 2.0 * divergence).backward()
    expected = torch.cat([p.grad.flatten() for p in module.model.parameters()]).double()
    assert cosine(anchored, expected) == pytest.approx(1, abs=1e-6)
    assert logged["gradient_norm"].item() == pytest.approx(expected.norm().item(), rel=1e-4)
    assert logged["train_kl"].item() == pytest.approx(
        divergence.item(), rel=1e-4
    )  # without its weight
    assert logged["train_loss"].item() == pytest.approx(
        F.cross_entropy(result, truth).item(), rel=1e-5
    )


@pytest.mark.parametrize("objective", OBJECTIVE_NAMES)
def test_four_small_batches_give_the_penalty_of_one_large_one(references, objective):
    seen = {}
    for rows, window in ((8, 1), (2, 4)):
        module = distilled(references[objective], objective)
        g, logged = gradient(
            module, data_of(objective, train_batch_size=rows), accumulate_grad_batches=window
        )
        seen[rows] = g, logged["train_kl"], logged["train_loss"], logged["gradient_norm"]
    assert cosine(seen[2][0], seen[8][0]) == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(seen[2][1:], seen[8][1:], atol=1e-6, rtol=1e-5)


def test_of_diffusion_the_divergence_is_weighed_as_the_loss_is(references):
    module, batch = distilled(references["diffusion"], "diffusion"), first_batch("diffusion")
    module.configure_model()
    module.label_loss(batch)
    weighed = module.divergence.item()
    module.label_loss({**batch, "loss_weights": 3 * batch["loss_weights"]})
    assert module.divergence.item() == pytest.approx(3 * weighed, rel=1e-5)


def test_without_weight_the_reference_is_not_even_read_and_the_run_is_the_plain_one():
    module = distilled("no/such/place", kl_weight=0.0, learning_rate=3e-3)
    _, result = fit(module, data_of(), 3)
    _, plain = fit(module_of(scheduler_warmup_steps=0), data_of(), 3)
    assert result.column("train_loss").tolist() == plain.column("train_loss").tolist()
    assert "val_kl" not in result.validation[-1]


def test_a_rule_that_keeps_no_scores_does_not_keep_the_reference_from_being_compared(references):
    kinds_seen = []
    for rule in ({}, {"loss_only": True}):
        module = distilled(references["mlm"], loss_kwargs=rule)
        module.configure_model()
        kinds_seen.append(gradient(module, data_of()))
    torch.testing.assert_close(*kinds_seen)


def test_model_and_reference_run_once_for_each_batch(references):
    module, calls = distilled(references["mlm"]), []
    module.configure_model()
    module.model.register_forward_hook(lambda *_: calls.append("model"))
    module._reference[0].register_forward_hook(lambda *_: calls.append("reference"))
    gradient(module, data_of())
    assert calls == ["model", "reference"]


# --- frozen, and nowhere to be found --------------------------------------------------------------


def test_the_reference_is_frozen_and_in_no_list_of_weights(references, tmp_path):
    module = distilled(references["mlm"], model_config_kwargs={**SHAPE, "mlp_dropout": 0.3})
    plain = PretrainingModule(
        {**SHAPE, "mlp_dropout": 0.3}, pretrained_tokenizer_name_or_path=TOKENIZER
    )
    before = state_dict_hash(module._reference[0])
    trainer, _ = fit(module, data_of(), 3)
    plain.configure_model()
    reference = module._reference[0]
    assert state_dict_hash(reference) == before == module.reference_hash
    assert not reference.training and not any(p.requires_grad for p in reference.parameters())
    assert module.state_dict().keys() == plain.state_dict().keys()
    trained = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert not trained & {id(p) for p in reference.parameters()}
    assert not {id(p) for p in module.parameters()} & {id(p) for p in reference.parameters()}
    trainer.save_checkpoint(tmp_path / "here.ckpt")
    retained = torch.load(tmp_path / "here.ckpt", weights_only=False)
    assert (
        retained["reference_hash"] == before
        and retained["state_dict"].keys() == plain.state_dict().keys()
    )


def test_the_reference_takes_the_precision_of_the_model(references):
    module = distilled(references["mlm"])
    fit(module, data_of(), 2, precision="bf16-true")
    assert {p.dtype for p in module._reference[0].parameters()} == {torch.bfloat16}


def test_validation_reports_loss_and_divergence(references):
    data = data_of()
    module = distilled(references["mlm"])
    module.configure_model()
    trainer = make_trainer(1, val_check_steps=1, **CPU)
    metrics = trainer.validate(module, data, verbose=False)[0]
    plain = module_of()
    plain.configure_model()
    plain.model.load_state_dict(module.model.state_dict())
    assert (
        metrics["val_loss"]
        == make_trainer(1, val_check_steps=1, **CPU).validate(plain, data, verbose=False)[0][
            "val_loss"
        ]
    )
    total = count = 0
    with torch.no_grad():
        for batch in data.val_dataloader():
            inputs = {k: batch[k] for k in ("input_ids", "attention_mask", "position_ids")}
            keep = batch["labels"] != -100
            result, reference = (
                m(**inputs).logits[keep].log_softmax(-1)
                for m in (module.model.eval(), module._reference[0])
            )
            total += F.kl_div(result, reference, reduction="sum", log_target=True).item()
            count += keep.sum().item()
    assert metrics["val_kl"] == pytest.approx(total / count, rel=1e-4)


def test_a_student_comes_closer_to_its_teacher(references):
    module = distilled(
        references["mlm"], kl_weight=5.0, model_config_kwargs={**SHAPE, "num_hidden_layers": 1}
    )
    _, record = fit(module, data_of(), 12, val_check_steps=6)
    assert record.validation[-1]["val_kl"] < record.validation[0]["val_kl"]


# --- refused --------------------------------------------------------------------------------------


def refused(words, function, *args, **kwargs):
    with pytest.raises(ValueError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_reference_of_another_vocabulary_head_or_objective_is_refused(references, tmp_path):
    refused(
        ["145", "200", "vocab_size"],
        distilled,
        references["mlm"],
        model_config_kwargs={**SHAPE, "vocab_size": 200},
    )
    refused(["enhanced_mlm", "decoder"], distilled, references["mlm"], "enhanced_mlm")
    bare = module_of(seed=3)
    bare.configure_model()
    bare.model.encoder.save_pretrained(tmp_path / "bare")
    refused(["head"], distilled, str(tmp_path / "bare"))


def test_a_teacher_of_another_family_brings_padded_rows(tmp_path):
    "The divergence equals that of each row computed by transformers alone."
    config = transformers.MPNetConfig(vocab_size=len(TOKENIZER), hidden_size=16, num_hidden_layers=1,
                                      num_attention_heads=2, intermediate_size=24,
                                      max_position_embeddings=80)  # fmt: skip
    transformers.MPNetForMaskedLM(config).save_pretrained(tmp_path / "mpnet")
    module, data = distilled(str(tmp_path / "mpnet"), temperature=2.0), data_of()
    teacher = transformers.MPNetForMaskedLM.from_pretrained(tmp_path / "mpnet").eval()
    data.settle_packing(module.rows_padded_because)
    module.configure_model()
    data.setup()
    batch, module = next(iter(data.train_dataloader())), module.eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    labelled, module.trainer = batch["labels"] != -100, None
    with torch.no_grad():
        module.label_loss(batch)
        ours, theirs = (m(**inputs).logits[labelled] / 2 for m in (module.model, teacher))
        want = F.kl_div(ours.log_softmax(-1), theirs.softmax(-1), reduction="sum") * 4
    torch.testing.assert_close(module.divergence, want)
    assert batch["attention_mask"].max() == 1 and "mpnet" in module.rows_padded_because
    logged = gradient(distilled(str(tmp_path / "mpnet")), data_of())[1]
    assert logged["train_kl"].isfinite()
    refused(["enhanced_mlm", "mpnet"], distilled, str(tmp_path / "mpnet"), "enhanced_mlm")


def test_a_reference_whose_ids_mean_other_words_is_refused(references):
    other_words = word_tokenizer(
        ["zebra", *sorted(set(TOKENIZER.get_vocab()) - set(TOKENIZER.all_special_tokens))[1:]]
    )
    assert len(other_words) == len(TOKENIZER)
    refused(["another tokenizer", "id"], _check_same_words, references["mlm"], other_words)
    _check_same_words(references["mlm"], TOKENIZER)
    _check_same_words(references["mlm"], None)


def test_weights_without_a_tokenizer_are_a_reference_too(tmp_path):
    module = module_of(seed=5)
    module.configure_model()
    module.model.save_pretrained(tmp_path / "weights")
    assert distilled(str(tmp_path / "weights")).reference_hash


@pytest.mark.parametrize("options, words", [
    ({"kl_weight": -1.0}, ["kl_weight"]), ({"kl_weight": float("nan")}, ["kl_weight"]),
    ({"temperature": 0.0}, ["temperature"]), ({"temperature": float("inf")}, ["temperature"]),
    ({"loss_kwargs": {"chunk_size": 8}}, ["chunk_size", "kl_weight=0"]),
])  # fmt: skip
def test_numbers_that_cannot_be_meant_are_refused(references, options, words):
    refused(words, distilled, references["mlm"], **options)


# --- resume ---------------------------------------------------------------------------------------


def run(reference, folder, steps, resume=None):
    seed_everything(3 if resume is None else 99)
    module = distilled(
        reference, seed=torch.initial_seed() % 7, model_config_kwargs={**SHAPE, "mlp_dropout": 0.2}
    )
    history = History()
    trainer = make_trainer(steps, callbacks=[history, TrainingCheckpoint(folder, 2)], **CPU)
    trainer.fit(module, data_of(), ckpt_path=resume, weights_only=False)
    return full_state_dict(module.model), history.column("train_loss").tolist()


def test_a_resume_needs_the_same_reference(references, tmp_path):
    uninterrupted, losses = run(references["mlm"], tmp_path / "whole", 6)
    run(references["mlm"], tmp_path / "parts", 4)
    again, resumed = run(
        references["mlm"], tmp_path / "parts", 6, tmp_path / "parts" / "step-00000002.ckpt"
    )
    assert losses == resumed and all(
        torch.equal(uninterrupted[name], again[name]) for name in uninterrupted
    )
    moved = save(module_of(seed=8), tmp_path / "moved")
    refused(
        ["another reference", "put the original back"],
        run,
        moved,
        tmp_path / "parts",
        8,
        tmp_path / "parts" / "step-00000006.ckpt",
    )


def test_a_hash_sees_one_bit_one_name_and_one_shape():
    layers = [torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)]
    layers[1].load_state_dict(layers[0].state_dict())
    assert state_dict_hash(layers[0]) == state_dict_hash(layers[1])
    with torch.no_grad():
        layers[1].bias[0] = torch.nextafter(layers[1].bias[0], torch.tensor(9.0))
    assert state_dict_hash(layers[0]) != state_dict_hash(layers[1])
    flat, renamed = torch.nn.Module(), torch.nn.Module()
    flat.register_buffer("a", torch.zeros(4))
    renamed.register_buffer("a", torch.zeros(2, 2))
    assert state_dict_hash(flat) != state_dict_hash(renamed)


@pytest.mark.parametrize("requested", [False, None, True])
def test_the_reference_is_compiled_where_the_model_is_and_nowhere_else(references, requested):
    module = distilled(references["mlm"], compile_model=requested)
    module.configure_model()  # on a CPU: None compiles nothing
    compiled = [
        model.encoder.compiled_blocks is not None for model in (module.model, *module._reference)
    ]
    assert compiled == [requested is True] * 2
