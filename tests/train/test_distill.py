"A frozen reference: the divergence, the gradient it changes, resumes that keep it, and runs in stages."

import math
import os
import signal
from dataclasses import replace

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from forks import forked
from lightning.pytorch.callbacks import Callback
from test_modules import SHAPE, TEXTS, TOKENIZER, data_of, fit, module_of
from test_training import word_tokenizer
from torch.nn import functional as F

from bertlab.train.history import History
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model
from bertlab.train.model_directories import full_state_dict, atomic_directory
from bertlab.train.distill import (
    DistillationModule,
    check_same_words,
    state_dict_hash,
    kl_divergence,
    load_reference,
)
from bertlab.train.modules import PretrainingModule
from bertlab.train.objectives import OBJECTIVES
from bertlab.train.checkpoints import TrainingCheckpoint
from bertlab.train.stages import Stage, _prepare, load_stages, run_stages
from bertlab.train.trainer import make_trainer, seed_everything

OBJECTIVE_NAMES = ["mlm", "diffusion", "enhanced_mlm"]
CPU = {"accelerator": "cpu", "precision": "32-true"}


def save(module, place):
    "What a stage leaves behind."
    module.configure_model()
    with atomic_directory(place) as inside:
        save_model(module.model.eval(), TOKENIZER, inside)
    return str(place)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    "A model for each objective, other than the one that `distilled` begins with."
    place = tmp_path_factory.mktemp("references")
    return {name: save(module_of(name, seed=7), place / name) for name in OBJECTIVE_NAMES}


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
    ours = torch.zeros(1, 2, requires_grad=True)  # a half each
    theirs = torch.tensor([[math.log(3.0), 0.0]])  # three quarters and a quarter
    divergence = kl_divergence(ours, theirs, torch.tensor([0]))
    assert divergence.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    divergence.backward()
    torch.testing.assert_close(ours.grad, torch.tensor([[0.5 - 0.75, 0.5 - 0.25]]))  # p - p_ref


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 40), st.sampled_from([0.5, 1.0, 3.0])
)
def test_the_divergence_is_that_of_torch_in_two_ways(seed, num_labels, vocab_size, temperature):
    g = torch.Generator().manual_seed(seed)
    ours, theirs = torch.randn(2, num_labels, vocab_size, generator=g, dtype=torch.float64) * 3
    labels = torch.zeros(num_labels, dtype=torch.int64)
    got = kl_divergence(ours, theirs, labels, temperature)
    soft, target = (ours / temperature).log_softmax(-1), (theirs / temperature).log_softmax(-1)
    wanted = F.kl_div(soft, target, reduction="sum", log_target=True) * temperature**2
    torch.testing.assert_close(got, wanted)
    p, q = (torch.distributions.Categorical(logits=x / temperature) for x in (theirs, ours))
    torch.testing.assert_close(got, torch.distributions.kl_divergence(p, q).sum() * temperature**2)
    assert got >= -1e-12


def test_equal_answers_cost_nothing_and_pull_nowhere():
    ours = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    divergence = kl_divergence(
        ours, ours.detach() + 4.0, torch.arange(6)
    )  # a shift is no other answer
    divergence.backward()
    assert abs(divergence.item()) < 1e-12 and ours.grad.abs().max() < 1e-12


def test_positions_without_a_label_count_for_nothing_and_weights_weigh():
    torch.manual_seed(0)
    ours, theirs = torch.randn(2, 4, 7)
    labels = torch.tensor([3, -100, 0, -100])
    one, two = (kl_divergence(ours[[i]], theirs[[i]], labels[[i]]) for i in (0, 2))
    torch.testing.assert_close(kl_divergence(ours, theirs, labels), one + two)
    weights = torch.tensor([2.0, 5.0, 0.5, 5.0])
    torch.testing.assert_close(
        kl_divergence(ours, theirs, labels, weights=weights), 2 * one + two / 2
    )


def test_a_high_temperature_compares_centred_scores_and_keeps_its_size():
    # Hinton et al. 2015, eq. 4: with the square of T, the limit is half the mean squared difference.
    torch.manual_seed(1)
    ours, theirs = torch.randn(2, 1, 5, dtype=torch.float64)
    off = (ours - ours.mean()) - (theirs - theirs.mean())
    got = kl_divergence(ours, theirs, torch.tensor([0]), temperature=1e4)
    assert got.item() == pytest.approx(off.square().mean().item() / 2, rel=1e-3)


def test_half_precision_scores_are_compared_in_float32():
    torch.manual_seed(2)
    ours, theirs = torch.randn(2, 3, 400).bfloat16()
    got = kl_divergence(ours, theirs, torch.zeros(3, dtype=torch.int64))
    assert got.dtype == torch.float32
    wanted = kl_divergence(ours.double(), theirs.double(), torch.zeros(3, dtype=torch.int64))
    assert got.item() == pytest.approx(wanted.item(), rel=1e-5)


# --- the gradient ---------------------------------------------------------------------------------


def cosine(a, b):
    return (a @ b / a.norm() / b.norm()).item()


def test_the_reference_changes_the_direction_of_the_gradient(references):
    plain, _ = gradient(distilled(references["mlm"], kl_weight=0.0), data_of())
    anchored, logged = gradient(distilled(references["mlm"], kl_weight=20.0), data_of())
    assert logged["train_kl"] > 0
    assert cosine(plain, anchored) < 0.9  # a difference of two losses would give exactly 1


def test_the_gradient_is_that_of_loss_plus_weighted_divergence(references):
    "Against a plain computation of both terms on the same batch."
    anchored, logged = gradient(
        distilled(references["mlm"], kl_weight=2.0, temperature=2.0), data_of()
    )
    module, batch = distilled(references["mlm"]), first_batch()
    module.configure_model()
    teacher = load_reference(references["mlm"], "mlm", len(TOKENIZER))
    inputs = {k: batch[k] for k in ("input_ids", "attention_mask", "position_ids")}
    ours, theirs = (m(**inputs).logits[batch["labels"] != -100] for m in (module.model, teacher))
    truth = batch["labels"][batch["labels"] != -100]
    divergence = (
        F.kl_div((ours / 2).log_softmax(-1), (theirs / 2).softmax(-1), reduction="batchmean") * 4
    )
    (F.cross_entropy(ours, truth) + 2.0 * divergence).backward()
    wanted = torch.cat([p.grad.flatten() for p in module.model.parameters()]).double()
    assert cosine(anchored, wanted) == pytest.approx(1, abs=1e-6)
    assert logged["gradient_norm"].item() == pytest.approx(wanted.norm().item(), rel=1e-4)
    assert logged["train_kl"].item() == pytest.approx(
        divergence.item(), rel=1e-4
    )  # without its weight
    assert logged["train_loss"].item() == pytest.approx(
        F.cross_entropy(ours, truth).item(), rel=1e-5
    )


@pytest.mark.parametrize("objective", OBJECTIVE_NAMES)
def test_a_model_that_is_its_own_reference_feels_nothing(references, objective):
    "Also where coins decide what a token may see: both models toss the same ones."
    options = {"model_config_kwargs": None, "pretrained_model_name_or_path": references[objective]}
    plain, _ = gradient(
        distilled(references[objective], objective, kl_weight=0.0, **options), data_of(objective)
    )
    anchored, logged = gradient(
        distilled(references[objective], objective, **options), data_of(objective)
    )
    assert abs(logged["train_kl"].item()) < 1e-6
    torch.testing.assert_close(anchored, plain, atol=1e-6 * plain.abs().max().item(), rtol=1e-4)


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
    _, ours = fit(module, data_of(), 3)
    _, plain = fit(module_of(scheduler_warmup_steps=0), data_of(), 3)
    assert ours.column("train_loss").tolist() == plain.column("train_loss").tolist()
    assert "val_kl" not in ours.validation[-1]


def test_a_rule_that_keeps_no_scores_does_not_keep_the_reference_from_being_compared(references):
    found = []
    for rule in ({}, {"loss_only": True}):
        module = distilled(references["mlm"], loss_kwargs=rule)
        module.configure_model()
        found.append(gradient(module, data_of()))
    torch.testing.assert_close(*found)


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
    kept = torch.load(tmp_path / "here.ckpt", weights_only=False)
    assert (
        kept["reference_hash"] == before and kept["state_dict"].keys() == plain.state_dict().keys()
    )


def test_the_reference_takes_the_precision_of_the_model(references):
    module = distilled(references["mlm"])
    fit(module, data_of(), 2, precision="bf16-true")
    assert {p.dtype for p in module._reference[0].parameters()} == {torch.bfloat16}


def test_who_asks_before_training_starts_finds_the_reference_where_the_model_is(references):
    module, data = distilled(references["mlm"]), data_of()
    seen = []

    class Asks(
        Callback
    ):  # as `EvaluatorCallback` and `CompileAhead` do: before the module's own hook
        def on_train_start(self, trainer, pl_module):
            pl_module.label_loss(next(iter(data.train_dataloader())))
            seen.extend(p.dtype for p in pl_module._reference[0].parameters())

    make_trainer(1, callbacks=[Asks()], **{**CPU, "precision": "bf16-true"}).fit(module, data)
    assert set(seen) == {torch.bfloat16}


def test_validation_reports_both_and_its_loss_is_that_of_a_plain_run(references):
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
            ours, theirs = (
                m(**inputs).logits[keep].log_softmax(-1)
                for m in (module.model.eval(), module._reference[0])
            )
            total += F.kl_div(ours, theirs, reduction="sum", log_target=True).item()
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


def test_a_reference_whose_ids_mean_other_words_is_refused(references):
    others = word_tokenizer(
        ["zebra", *sorted(set(TOKENIZER.get_vocab()) - set(TOKENIZER.all_special_tokens))[1:]]
    )
    assert len(others) == len(TOKENIZER)
    refused(["another tokenizer", "id"], check_same_words, references["mlm"], others)
    check_same_words(references["mlm"], TOKENIZER)
    check_same_words(references["mlm"], None)


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


def test_a_resume_goes_on_with_the_same_reference_bit_for_bit_and_with_no_other(
    references, tmp_path
):
    whole, losses = run(references["mlm"], tmp_path / "whole", 6)
    run(references["mlm"], tmp_path / "parts", 4)
    again, resumed = run(
        references["mlm"], tmp_path / "parts", 6, tmp_path / "parts" / "step-00000002.ckpt"
    )
    assert losses == resumed and all(torch.equal(whole[name], again[name]) for name in whole)
    moved = save(module_of(seed=8), tmp_path / "moved")
    refused(
        ["another reference", "put the original back"],
        run,
        moved,
        tmp_path / "parts",
        8,
        tmp_path / "parts" / "step-00000006.ckpt",
    )


def test_a_hash_of_weights_sees_one_bit_one_name_and_one_shape():
    layers = [torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)]
    layers[1].load_state_dict(layers[0].state_dict())
    assert state_dict_hash(layers[0]) == state_dict_hash(layers[1])
    with torch.no_grad():
        layers[1].bias[0] = torch.nextafter(layers[1].bias[0], torch.tensor(9.0))
    assert state_dict_hash(layers[0]) != state_dict_hash(layers[1])
    flat, named = torch.nn.Module(), torch.nn.Module()
    flat.register_buffer("a", torch.zeros(4))
    named.register_buffer("a", torch.zeros(2, 2))
    assert state_dict_hash(flat) != state_dict_hash(named)


# --- stages ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(TEXTS))
    return str(path)


def stages_of(text, **later):
    data = {"train_dataset_name_or_path": text, "max_sequence_length": 32, "train_batch_size": 4,
            "val_batch_size": 16}  # fmt: skip
    first = {
        "model_config_kwargs": {**SHAPE, "mlp_dropout": 0.2, "vocab_size": 160},
        "learning_rate": 3e-3,
        "scheduler_warmup_steps": 2,
    }
    second = {
        "kl_weight": 0.5,
        "learning_rate": 1e-3,
        "scheduler_warmup_steps": 0,
        **later.pop("module", {}),
    }
    trainer = {**CPU, "accumulate_grad_batches": 2}
    return [Stage(steps=5, data=data, module=first, trainer=trainer, checkpoint_every_steps=2),
            Stage(**{"tokens": 32 * 8 * 4 + 7, "data": data, "module": second, "trainer": trainer, "reference": "previous",
                     "checkpoint_every_steps": 2, **later})]  # fmt: skip


def weights_in(place):
    from safetensors.torch import load_file

    return load_file(place / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    torch.set_num_threads(
        1
    )  # as in the processes below: sums of two threads differ in the last digit
    output = tmp_path_factory.mktemp("stages") / "out"
    return output, run_stages(stages_of(text), output, progress=False)


def test_each_stage_keeps_its_own_budget_and_begins_where_the_last_one_ended(finished, text):
    output, summaries = finished
    assert [summary["steps"] for summary in summaries] == [5, 4]  # 1,031 tokens: four steps of 256
    assert "val_kl" not in summaries[0] and summaries[1]["val_kl"] > 0
    second = torch.load(
        output / "stage-2" / "checkpoints" / "step-00000002.ckpt", weights_only=False
    )
    first = load_reference(
        output / "stage-1" / "model", "mlm", second["model_config"]["vocab_size"]
    )
    assert second["reference_hash"] == state_dict_hash(first)
    assert second["model_config"]["mlp_dropout"] == 0.2  # the shape went through the directory
    first, last = weights_in(output / "stage-1"), weights_in(output / "stage-2")
    apart = max((first[name] - last[name]).abs().max().item() for name in first)
    assert 0 < apart < 4.5e-3  # four steps of AdamW at no more than 1e-3


def test_a_finished_stage_is_not_run_again(finished, text):
    output, summaries = finished
    before = {
        path: path.stat().st_mtime_ns for path in output.glob("stage-*/**/*") if path.is_file()
    }
    assert run_stages(stages_of(text), output, resume=True, progress=False) == summaries
    assert before == {
        path: path.stat().st_mtime_ns for path in output.glob("stage-*/**/*") if path.is_file()
    }


def test_another_plan_another_run_and_a_run_that_is_there_are_refused(finished, text, tmp_path):
    output, _ = finished
    refused(["already holds a run"], run_stages, stages_of(text), output)
    refused(
        ["stage 2", "module", "0.7"],
        run_stages,
        stages_of(text, module={"kl_weight": 0.7}),
        output,
        resume=True,
    )
    refused(["stage 2"], run_stages, stages_of(text)[:1], output, resume=True)
    refused(["nothing to resume"], run_stages, stages_of(text), tmp_path / "new", resume=True)
    alone = stages_of(text)[1:]
    refused(["stage 1", "reference"], run_stages, alone, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("schedule", ["time_budget", "bertlab.optim.budgets.TimeBudgetLR"])
def test_a_schedule_that_ends_by_the_clock_is_refused_in_a_stage(text, tmp_path, schedule):
    clock = {
        "schedule": schedule,
        "scheduler_kwargs": {"budget": "1h"},
        "scheduler_warmup_steps": None,
    }
    refused(
        ["stage 2", "budget='1h'", "schedule in steps"],
        run_stages,
        stages_of(text, module=clock),
        tmp_path / "out",
    )
    assert not (tmp_path / "out").exists()


def test_a_stage_can_be_added_to_a_finished_run(finished, text, tmp_path):
    import shutil

    shutil.copytree(finished[0], tmp_path / "out")
    more = [*stages_of(text), stages_of(text, steps=1, tokens=None)[1]]
    assert [
        s["steps"] for s in run_stages(more, tmp_path / "out", resume=True, progress=False)
    ] == [5, 4, 1]


def test_a_mistake_that_shows_when_stage_2_begins_is_mended_at_a_resume_and_stage_1_is_not_run_again(
    text, tmp_path
):
    first, second = stages_of(text, steps=1, tokens=None)
    first, output = replace(first, steps=2), tmp_path / "out"
    wrong = replace(second, data={**second.data, "train_batch_size": 9999})
    with pytest.raises((ValueError, RuntimeError), match="9999"):
        run_stages([first, wrong], output, progress=False)
    before = (output / "stage-1" / "model" / "model.safetensors").stat().st_mtime_ns
    refused(
        ["stage 1", "had steps=2", "put it back"],
        run_stages,
        [replace(first, steps=3), second],
        output,
        resume=True,
    )
    longer = replace(second, module={**second.module, "kl_weight": 0.0, "model_config_kwargs": {"max_position_embeddings": 96}},
                     data={**second.data, "max_sequence_length": 80})  # fmt: skip
    for module, reader in (
        (second.module, "model"),
        ({**longer.module, "kl_weight": 0.1}, "reference"),
    ):
        refused(
            ["stage 2", f"the {reader}'s max_position_embeddings 64"],
            run_stages,
            [first, replace(longer, module=module)],
            output,
            resume=True,
        )
    assert [
        one["steps"] for one in run_stages([first, longer], output, resume=True, progress=False)
    ] == [2, 1]
    assert (output / "stage-1" / "model" / "model.safetensors").stat().st_mtime_ns == before
    assert load_stages(output / "run.yaml")[1].data["max_sequence_length"] == 80
    refused(["stage 2", "had", "put it back"], run_stages, [first, second], output, resume=True)


def test_a_plan_in_which_nothing_is_trained_is_the_same_or_begins_anew(text, tmp_path):
    output, stages = tmp_path / "out", stages_of(text, steps=1, tokens=None)
    _prepare(stages, output, False, False)
    later = [stages[0], replace(stages[1], steps=2)]
    refused(
        ["stage 2", "overwrite", "nothing is trained yet"], _prepare, later, output, True, False
    )
    (output / "stage-1" / "checkpoints").mkdir(parents=True)
    (output / "stage-1" / "checkpoints" / "step-00000001.ckpt").touch()
    _prepare(later, output, True, False)
    assert load_stages(output / "run.yaml") == later


class OwnModel(BertLabForMaskedLM):
    "An objective of one's own."


def test_a_stage_takes_a_model_of_ones_own_as_its_objective(text, tmp_path, monkeypatch):
    own = f"{OwnModel.__module__}.{OwnModel.__qualname__}"
    monkeypatch.setitem(OBJECTIVES, own, OwnModel)  # which other tests shall not find there
    first, second = (
        replace(stage, steps=3, tokens=None, module={**stage.module, "objective": own})
        for stage in stages_of(text)
    )
    assert len(run_stages([first, second], tmp_path / "out", progress=False)) == 2
    named = replace(first, module={**first.module, "objective": OwnModel})
    _prepare([named], tmp_path / "named", False, False)
    assert load_stages(tmp_path / "named" / "run.yaml")[0].module["objective"] == own


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


class Death(Callback):
    def __init__(self, at):
        self.at = at

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        stage = 2 if isinstance(pl_module, DistillationModule) else 1
        if (stage, trainer.fit_loop.total_batch_idx) == self.at:
            kill()


def dying_run(text, output, how, at):
    "Train all stages, or die at a moment: a micro-batch of a stage, or before or while a model is written."
    import bertlab.train.stages as here

    torch.set_num_threads(1)
    if how == "batch":
        real = here.make_trainer
        here.make_trainer = lambda steps, callbacks, **options: real(
            steps, callbacks=[*callbacks, Death(at)], **options
        )
    elif how == "model":

        def half(model, tokenizer, directory):
            model.config.save_pretrained(directory)
            kill()

        here.save_model = half
    elif how == "whole":
        here.full_state_dict = lambda model: kill()
    run_stages(stages_of(text), output, resume=(output / "run.yaml").exists(), progress=False)


@pytest.mark.parametrize("asked", [False, None, True])
def test_the_reference_is_compiled_where_the_model_is_and_nowhere_else(references, asked):
    module = distilled(references["mlm"], compile_model=asked)
    module.configure_model()  # on a CPU: None compiles nothing
    compiled = [
        model.encoder.compiled_blocks is not None for model in (module.model, *module._reference)
    ]
    assert compiled == [asked is True] * 2


def test_killed_anywhere_and_run_again_the_stages_end_with_the_same_weights(
    finished, text, tmp_path
):
    for how, at, code in (("batch", (1, 5), -9), ("whole", None, -9), ("model", None, -9), ("batch", (2, 3), -9),
                          ("batch", (2, 7), -9), ("model", None, -9), ("none", None, 0)):  # fmt: skip
        process = forked(dying_run, (text, tmp_path / "out", how, at))
        process.start()
        process.join(120)
        assert process.exitcode == code
    for stage in ("stage-1", "stage-2"):
        wanted, got = weights_in(finished[0] / stage), weights_in(tmp_path / "out" / stage)
        assert wanted.keys() == got.keys() and all(
            torch.equal(wanted[name], got[name]) for name in wanted
        )
        assert (finished[0] / stage / "model" / "stage.json").read_text() == (
            tmp_path / "out" / stage / "model" / "stage.json"
        ).read_text()
    assert {path.name for path in (tmp_path / "out").glob("**/.*")} <= {".lock"}


def test_one_stage_with_a_named_reference_is_distillation(references, text, tmp_path):
    module = {
        "model_config_kwargs": {**SHAPE, "num_hidden_layers": 1},
        "kl_weight": 2.0,
        "scheduler_warmup_steps": 0,
    }
    stage = stages_of(text, steps=2, tokens=None, reference=references["mlm"])[1]
    stage = Stage(
        steps=2, data=stage.data, trainer=stage.trainer, module=module, reference=references["mlm"]
    )
    (summary,) = run_stages([stage], tmp_path / "out", progress=False)
    assert summary["val_kl"] > 0
    assert not (tmp_path / "out" / "tokenizer").exists()  # that of the reference was taken


def test_averages_are_what_a_stage_leaves_even_where_it_only_had_to_be_written(text, tmp_path):
    averaging = {
        "optimizer_class": "splus",
        "scheduler_warmup_steps": 0,
        "model_config_kwargs": {**SHAPE, "vocab_size": 160},
    }
    stage = Stage(steps=4, data=stages_of(text)[0].data, trainer=CPU, module=averaging)
    run_stages([stage], tmp_path / "out", progress=False)
    there = tmp_path / "out" / "stage-1"
    wanted = weights_in(there)
    (there / "model").rename(tmp_path / "aside")
    run_stages([stage], tmp_path / "out", resume=True, progress=False)
    assert all(torch.equal(wanted[name], value) for name, value in weights_in(there).items())


def test_a_stage_that_something_stopped_is_not_taken_for_finished(text, tmp_path, monkeypatch):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step == 2

    import bertlab.train.stages as here

    real = here.make_trainer
    monkeypatch.setattr(
        here,
        "make_trainer",
        lambda steps, callbacks, **options: real(steps, callbacks=[*callbacks, Stop()], **options),
    )
    with pytest.raises(RuntimeError, match="stopped at step 2 of 5"):
        run_stages(stages_of(text), tmp_path / "out", progress=False)
    assert not (tmp_path / "out" / "stage-1" / "model").exists()


@pytest.mark.parametrize("options, words", [
    ({}, ["tokens", "steps"]), ({"steps": 5, "tokens": 4}, ["either"]), ({"steps": 0}, ["less than one step"]),
    ({"tokens": "1K"}, ["1K", "4,096"]), ({"tokens": "2h"}, ["tokens='2h'"]),
    ({"steps": 1, "data": {"bacth": 3}}, ["data has no option 'bacth'", "train_batch_size"]),
    ({"steps": 1, "trainer": {"max_steps": 3}}, ["max_steps", "leave it out"]),
    ({"steps": 1, "data": {"objective": "mlm"}}, ["module decides"]),
    ({"steps": 1, "data": [3]}, ["data must map"]),
])  # fmt: skip
def test_a_stage_that_cannot_be_meant_is_refused(options, words):
    refused(words, Stage, **options)


@pytest.mark.parametrize("later, words", [
    ({"data": {"train_dataset_name_or_path": "missing.txt"}}, ["stage 2", "'missing.txt'", "does not exist"]),
    ({"data": {"packing": True, "max_sequence_length": 4}}, ["stage 2", "max_sequence_length"]),
    ({"module": {"optimizer_class": "adamww"}}, ["stage 2", "adamww"]),
    ({"module": {"learning_rate": -1.0}}, ["stage 2", "learning_rate", "-1.0"]),
    ({"module": {"scheduler_warmup_steps": 9}}, ["stage 2", "warmup_steps=9"]),
    ({"module": {"kl_weight": -1.0}}, ["stage 2", "kl_weight", "-1.0"]),
    ({"reference": "./no-such-teacher"}, ["stage 2", "no-such-teacher"]),
    ({"reference": "nobody-here/no-such-teacher"}, ["stage 2", "'nobody-here/no-such-teacher' cannot be loaded"]),
    ({"module": {"pretrained_model_name_or_path": "elsewhere"}}, ["stage 2", "'elsewhere'", "leave it out"]),
    ({"data": {"max_sequence_length": 128}}, ["stage 2", "max_sequence_length=128", "max_position_embeddings 64", "lower it"]),
    ({"module": {"model_config_kwargs": {"mlp_dropuot": 0.1}}}, ["stage 2", "mlp_dropuot", "did you mean 'mlp_dropout'"]),
    ({"module": {"model_config_kwargs": {"intermediate_size": 8}}}, ["stage 2", "intermediate_size", "leave no place", "stage before"]),
    ({"module": {"model_config_kwargs": {"num_hidden_layers": 1}}}, ["stage 2", "num_hidden_layers", "leave no place"]),
])  # fmt: skip
def test_what_cannot_work_in_a_later_stage_is_said_before_the_first_is_trained(
    text, tmp_path, later, words
):
    data = {**stages_of(text)[0].data, **later.get("data", {})}
    second = {"scheduler_warmup_steps": 0, **later.get("module", {})}
    stages = [
        stages_of(text)[0],
        Stage(steps=4, data=data, module=second, reference=later.get("reference", "previous")),
    ]
    refused(words, run_stages, stages, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_processes_that_share_rows_are_not_paid_for_twice(text):
    data = {"train_batch_size": 8, "max_sequence_length": 128}
    per_step = {strategy: Stage(tokens="100K", data=data, trainer={
        "accelerator": "cpu", "devices": 2, "strategy": strategy}).tokens_per_step()
        for strategy in ("ddp", "fsdp", "tensor:2", "context:2")}  # fmt: skip
    assert per_step == {"ddp": 2048, "fsdp": 2048, "tensor:2": 1024, "context:2": 1024}


def test_a_file_of_stages_is_read_and_its_mistakes_are_named(tmp_path, text):
    path = tmp_path / "stages.yaml"
    for content, words in (
        ("stages: [{steps: 3, rate: 1}]", ["stage 1", "no rate", "checkpoint_every_steps"]),
        ("stages: [{steps: 3}, {steps: 3, module: {lr: 1}}]", ["stage 2", "no option 'lr'", "learning_rate"]),
        ("stages: []", ["one or more"]), ("steps: 3", ["stages"]), ("stages: {a: 1}", ["list"]), ("stages: [3]", ["stage 1", "mapping"]),
        ("stages: [", ["not valid YAML"]), ("{stages: [{steps: 3}], seed: 4}", ["nothing else"]),
    ):  # fmt: skip
        path.write_text(content)
        refused(["stages.yaml", *words], load_stages, path)
    refused(["cannot be read"], load_stages, tmp_path / "none.yaml")
    path.write_text(
        "stages:\n- tokens: 10K\n  data: {train_batch_size: 2, max_sequence_length: 64}\n  trainer: {accumulate_grad_batches: 3}\n"
    )
    (stage,) = load_stages(path)
    assert stage.tokens_per_step() == 2 * 64 * 3 and stage.num_steps() == 26


def test_what_a_run_wrote_down_is_the_plan_again(finished, text):
    assert load_stages(finished[0] / "run.yaml") == stages_of(text)


def test_the_configuration_in_the_repository_is_two_stages_with_a_penalty():
    from conftest import ROOT

    first, second = load_stages(ROOT / "configs" / "kl-two-stage.yaml")
    assert (
        first.reference is None
        and second.reference == "previous"
        and second.module["kl_weight"] > 0
    )
    assert yaml.safe_load((ROOT / "configs" / "kl-two-stage.yaml").read_text())


def test_stages_of_diffusion_train_their_tokenizer_by_their_own_rules_and_are_known_to_end(
    tmp_path,
):
    from bertlab.cli.write import was_taught_ends
    from bertlab.train.stages import _shared_tokenizer

    (tmp_path / "text.txt").write_text("\n".join(f"the cat {n} sat on a mat" for n in range(60)))
    data = {
        "train_dataset_name_or_path": str(tmp_path / "text.txt"),
        "max_sequence_length": 32,
        "max_ends": 4,
    }
    stage = Stage(
        steps=2,
        data=data,
        module={"objective": "diffusion", "model_config_kwargs": {"vocab_size": 64}},
    )
    assert len(_shared_tokenizer([stage], tmp_path / "run")) <= 64
    for stages, taught in (
        ([{"data": {}}, {"data": data}], True),
        ([{"data": {}}], False),
        (["bent", 3], False),
        ("bent", False),
    ):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({"stages": stages}))
        (tmp_path / "stage-2" / "model").mkdir(parents=True, exist_ok=True)
        assert was_taught_ends(tmp_path / "stage-2" / "model") is taught
