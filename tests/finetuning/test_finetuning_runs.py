"A whole run: it stops early, goes back to its best weights, and says what chance does to it."

import math
import shutil

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from test_finetuning import CONFIG, FRUIT, PLACES, TOOLS, data_for, fit, module_for, predict
from test_finetuning import texts_of, tokenizer, weights

from bertlab.data.tokenizers import load_tokenizer
from bertlab.finetuning import runs
from bertlab.finetuning.data import FinetuningDataModule
from bertlab.finetuning.module import FinetuningModule
from bertlab.finetuning.runs import LearningCheck, SeedResults, compare_with_baselines
from bertlab.finetuning.runs import finetune, fit_probe, prepare
from bertlab.train.checkpoints import TrainingCheckpoint, TrainingInterrupted
from bertlab.train.resume import latest_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")
PLAIN = {"precision": "32-true", "accelerator": "cpu"}


def test_the_best_weights_are_those_of_the_best_validation(tmp_path):
    "A rate so high that scores jump up and down: the last weights are not the best."
    module, data = module_for(learning_rate=0.3, optimizer_class="sgd"), data_for()
    run = finetune(module, data, tmp_path, num_epochs=8, monitor="val_loss", **PLAIN)
    losses = {point["step"]: point["val_loss"] for point in run.record.validation}
    assert len(losses) == 8 and list(losses) == [6 * n for n in range(1, 9)]
    assert run.best_step == min(losses, key=losses.get)
    assert run.metrics["val_loss"] == pytest.approx(losses[run.best_step], rel=1e-5)
    saved = torch.load(tmp_path / "best.ckpt", weights_only=False)["state_dict"]
    for key, weight in weights(module).items():
        assert torch.equal(saved[f"model.{key}"], weight)
    logits = torch.cat([batch["logits"] for batch in predict(module, data.val_dataloader())])
    assert len(logits) == 19 and "test_accuracy" in run.metrics


def test_a_run_without_gains_stops_early(tmp_path):
    module, data = module_for(learning_rate=0.0), data_for()
    run = finetune(module, data, tmp_path, num_epochs=9, patience=2, **PLAIN)
    assert run.stopped_early and len(run.record.validation) == 3 and run.best_step == 6
    full = finetune(module_for(learning_rate=0.0), data, tmp_path / "full", num_epochs=3, **PLAIN)
    assert not full.stopped_early and len(full.record.validation) == 3


class StopAfter(Callback):
    "Ask a run to stop after a step, as a signal does; with None, in the validation that ends it."

    def __init__(self, series, step=None):
        self.series, self.step = series, step

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.series.stop_requested |= trainer.global_step == self.step

    def on_validation_end(self, trainer, pl_module):
        self.series.stop_requested |= self.step is None and trainer.current_epoch == 1


def test_a_strategy_that_divides_weights_is_refused_before_a_step(tmp_path):
    options = PLAIN | {"strategy": "fsdp"}
    with pytest.raises(ValueError, match="strategy='fsdp'.*ddp"):
        finetune(module_for(), data_for(), tmp_path, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_run_whose_patience_was_spent_takes_no_step_when_it_goes_on(tmp_path, interrupted):
    "It was killed behind its training, or stopped by a signal in the validation that ended it."
    series, options = (
        TrainingCheckpoint(tmp_path / "checkpoints"),
        {"num_epochs": 9, "patience": 1, **PLAIN},
    )
    module = lambda: module_for(learning_rate=0.0)
    if interrupted:
        with pytest.raises(TrainingInterrupted):
            finetune(
                module(), data_for(), tmp_path, callbacks=[StopAfter(series), series], **options
            )
    else:
        assert finetune(module(), data_for(), tmp_path, callbacks=[series], **options).stopped_early
    best = (tmp_path / "best.ckpt").stat().st_mtime_ns
    run = finetune(module(), data_for(), tmp_path, callbacks=[TrainingCheckpoint(series.directory)],
                   checkpoint=latest_checkpoint(series.directory), **options)  # fmt: skip
    assert run.stopped_early and run.best_step == 6 and run.record.column("step")[-1] == 12
    assert (tmp_path / "best.ckpt").stat().st_mtime_ns == best
    assert latest_checkpoint(series.directory).name == "step-00000012.ckpt"


def test_averaged_weights_are_the_ones_that_are_kept(tmp_path):
    "SPlus validates on an average of its weights: that average must be what a run ends with."
    module, data = module_for(optimizer_class="splus", learning_rate=0.05), data_for()
    run = finetune(module, data, tmp_path, num_epochs=3, monitor="val_loss", **PLAIN)
    best = next(point for point in run.record.validation if point["step"] == run.best_step)
    assert run.metrics["val_loss"] == pytest.approx(best["val_loss"], rel=1e-5)


def test_mean_and_deviation_are_those_of_the_sample():
    results = SeedResults((0, 1, 2), ({"f1": 0.5}, {"f1": 0.7}, {"f1": 0.9}))
    assert results.mean() == {"f1": pytest.approx(0.7)}
    assert results.deviation() == {"f1": pytest.approx(np.sqrt(0.08 / 2))}
    assert "0.700" in results.table() and "0.200" in results.table()
    baselines = {"majority": {"f1": 0.25}}
    head, line = results.table(baselines).splitlines()
    assert head.split() == "mean std seed 0 seed 1 seed 2 majority".split()
    assert line.split() == "f1 0.700 0.200 0.500 0.700 0.900 0.250".split()


class Burst(FinetuningModule):
    "Its third step has an infinite loss, and a gradient of NaN."

    def label_loss(self, batch):
        parts = super().label_loss(batch)
        return (
            parts._replace(loss_sum=parts.loss_sum * math.inf)
            if self.trainer.global_step == 2
            else parts
        )


def test_a_step_that_is_not_finite_is_left_out_of_a_run(tmp_path):
    module = Burst("classification", model_config_kwargs=CONFIG, learning_rate=3e-3)
    run = finetune(module, data_for(), tmp_path, num_epochs=2, **PLAIN)
    assert all(weight.isfinite().all() for weight in weights(module).values())
    assert (
        math.isfinite(run.metrics["val_loss"])
        and not run.stopped_early
        and run.record.column("step")[-1] == 12
    )


def test_a_ruined_model_has_no_score_and_is_not_the_best(tmp_path):
    "It says the first label of everything, and the first label is the right one of all validation rows."

    class Ruin(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            if trainer.global_step == 20:
                for parameter in pl_module.parameters():
                    parameter.data.fill_(math.nan)

    rows = texts_of(200)
    fruits, tools = ([row for row in rows if row["label"] == label] for label in ("fruit", "tool"))
    val = [{**row, "label": "fruit"} for row in fruits[8:20] + tools[40:47]]
    data = data_for(train=tools[:40] + fruits[:40], val=val, test=val)
    run = finetune(module_for(), data, tmp_path, num_epochs=2, callbacks=[Ruin()], **PLAIN)
    first, ruined = run.record.validation
    assert first["val_accuracy"] < 1 and run.best_step == first["step"] == 10
    assert run.metrics["val_accuracy"] == first["val_accuracy"]
    assert ruined == {"step": 20}, "numbers that are not finite are not recorded"


def test_the_best_weights_of_a_run_that_was_moved_stay_the_best(tmp_path):
    def made(directory):
        return runs.BestCheckpoint(directory, "val_loss")

    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "best.ckpt").write_text("weights")
    old = made(tmp_path / "old")
    old.best_model_path, old.best_model_score = (
        str(tmp_path / "old" / "best.ckpt"),
        torch.tensor(0.5),
    )
    old.best_k_models, old.kth_best_model_path, old.kth_value = (
        {old.best_model_path: torch.tensor(0.5)},
        old.best_model_path,
        torch.tensor(0.5),
    )
    state = old.state_dict()
    shutil.move(tmp_path / "old", tmp_path / "new")
    new = made(tmp_path / "new")
    new.load_state_dict(state)
    moved = str(tmp_path / "new" / "best.ckpt")
    assert new.best_model_path == new.kth_best_model_path == moved and new.best_k_models == {
        moved: torch.tensor(0.5)
    }
    elsewhere = made(tmp_path / "elsewhere")  # to which nobody has brought the weights
    elsewhere.load_state_dict(state)
    assert elsewhere.best_model_path == state["best_model_path"]


def test_a_pretrained_model_brings_its_tokenizer_in_python_too(tmp_path):
    finetune(module_for(), data_for(), tmp_path / "run", num_epochs=1, **PLAIN).save_predictor(
        tmp_path / "model"
    )
    source, rows = (
        load_tokenizer(tmp_path / "model"),
        {"train": texts_of(48, 0), "val": texts_of(12, 1)},
    )
    bare = FinetuningDataModule("classification", max_sequence_length=16)
    bare.set_datasets(**rows)
    module = FinetuningModule("classification", str(tmp_path / "model"))
    prepare(module, bare)
    assert bare.tokenizer.get_vocab() == source.get_vocab()
    untrained = FinetuningDataModule("classification", max_sequence_length=16, vocab_size=60)
    untrained.set_datasets(**rows)
    untrained.setup()
    with pytest.raises(ValueError, match="tokenizer"):
        finetune(
            FinetuningModule("classification", str(tmp_path / "model")),
            untrained,
            tmp_path / "other",
            num_epochs=1,
            **PLAIN,
        )


@pytest.mark.parametrize("options, monitor, words", [
    ({"class_weights": [1.0, 2.0, 3.0]}, None, "class_weights=.*2 numbers"), ({"num_labels": 5}, None, "num_labels=5"),
    ({"id2label": {0: "x", 1: "y", 2: "z"}}, None, "id2label=.*'z'"), ({}, "val_bleu", "monitor.*val_bleu"),
])  # fmt: skip
def test_options_meet_the_labels_before_rows_are_tokenized(options, monitor, words):
    data = data_for()
    data.setup = lambda stage=None: pytest.fail("the rows were tokenized")
    with pytest.raises(ValueError, match=words):
        prepare(module_for(**options), data, monitor)


# --- few labels, and runs that learn nothing ------------------------------------------------------


def three_kinds(n, seed):
    rng, words = np.random.default_rng(seed), {"fruit": FRUIT, "tool": TOOLS, "place": PLACES}
    labels = [["fruit", "tool", "place"][i % 3] for i in range(n)]
    return [{"text": f"the {rng.choice(words[label])} is here", "label": label} for label in labels]


def test_a_probe_is_the_best_last_layer_for_frozen_vectors(tmp_path):
    from sklearn.linear_model import LogisticRegression
    from transformers import pipeline

    data, module = data_for(train=three_kinds(48, 0), val=three_kinds(12, 1)), module_for()
    prepare(module, data)
    module.configure_model()
    before = {k: v.clone() for k, v in module.model.state_dict().items() if "task_head" not in k}
    fit_probe(module, data, penalties=(0.05,))
    after = module.model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    layer, inputs = module.model.task_head.classifier, []
    layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    batch = data.collator(data.datasets["train"].rows)
    with torch.no_grad():
        shares = module(**batch).logits.softmax(-1)
    features = (inputs[0] - inputs[0].mean(0)) / inputs[0].std(0)
    sklearns = LogisticRegression(C=1 / (2 * 0.05 * 48), max_iter=1000, tol=1e-8)
    expected = sklearns.fit(features, batch["labels"]).predict_proba(features)
    np.testing.assert_allclose(shares, expected, atol=2e-3)
    result = finetune(module_for(), data, tmp_path / "run", method="probe", accelerator="cpu")
    assert result.metrics["val_accuracy"] > 0.9 and not result.record.rows
    classify = pipeline(
        "text-classification", str(result.save_predictor(tmp_path / "model")), device="cpu"
    )
    assert classify("the saw is here")[0]["label"] == "tool"


@pytest.mark.parametrize("options, message", [
    ({"method": "zero-shot"}, "zero-shot"), ({"method": "probe", "task": "token_classification"}, "token_classification"),
])  # fmt: skip
def test_a_method_that_does_not_fit_is_refused(tmp_path, options, message):
    task = options.pop("task", "classification")
    with pytest.raises(ValueError, match=message):
        finetune(module_for(task), data_for(task), tmp_path, **options)


@pytest.mark.parametrize("learning_rate, proposed", [
    (1e-9, "1e-08"), (2e-5, "2e-04"), (1e-2, None),  # above the default there is no better rate
])  # fmt: skip
def test_a_loss_that_does_not_move_is_said_once(learning_rate, proposed):
    lines: list[str] = []
    module = module_for(learning_rate=learning_rate)
    check = LearningCheck(lines.append)
    check.find = lambda losses, module: "has hardly moved"
    fit(module, data_for(), 40, callbacks=[check])
    assert len(lines) == 1
    assert ("learning_rate=" in lines[0]) == (proposed is not None)
    if proposed:
        assert f"learning_rate={proposed} " in lines[0]
        assert float(proposed) <= module.default_rate(40)


def falling(start, end, num_steps=60):
    return end + (start - end) * torch.exp(-torch.arange(num_steps) / 4.0)


@pytest.mark.parametrize("losses, is_told", [
    (torch.full((60,), 3.0), True),  # it has not moved
    (falling(3.0, math.log(2)), True),  # it fell to the entropy of two equal labels, and stays
    (falling(3.0, 0.2), False),  # it is below
    (torch.linspace(3.0, 1.0, 60), False),  # it still falls
])  # fmt: skip
def test_a_loss_of_a_constant_prediction_is_no_learning(losses, is_told):
    check = LearningCheck()
    check.labels.extend([torch.tensor([0, 1, -100])] * 40)
    assert bool(check.find(losses, None)) == is_told
    check.labels.clear()  # nothing is known of the labels of a regression
    assert bool(check.find(losses, None)) == bool((losses == 3).all())


@pytest.mark.parametrize("learning_rate, num_lines", [(1e-9, 1), (3e-3, 0)])
def test_a_run_that_learns_is_told_nothing(learning_rate, num_lines):
    lines: list[str] = []
    module = module_for(learning_rate=learning_rate)
    fit(module, data_for(), 40, callbacks=[LearningCheck(lines.append)])
    assert len(lines) == num_lines


def test_a_model_below_a_baseline_is_told():
    baselines = {"majority": {"val_f1": 0.2}, "bag of words": {"val_f1": 0.8}}
    hparams = {
        "pretrained_model_name_or_path": None,
        "learning_rate": 1e-4,
        "task": "classification",
    }
    advice = lambda f1, *method: compare_with_baselines(
        "val_f1", {"val_f1": f1}, baselines, hparams, *method
    )
    assert (
        advice(0.9) == "" and "bag of words" in advice(0.5) and "bag of words" in advice(math.nan)
    )
    assert compare_with_baselines("val_loss", {"val_loss": 1.0}, baselines, hparams) == ""
    assert "method=probe" in advice(0.5) and "method=probe" not in advice(0.5, "probe")
    metrics = {"val_spearman": 0.04}
    majority = {"majority": {"val_spearman": 0.0}}
    assert "chance" in compare_with_baselines("val_spearman", metrics, majority, hparams)
    hparams["task"] = "question_answering"
    assert "probe" not in advice(0.5)


class LastWeights(Callback):
    "Copy the weights after the last step."

    def on_train_end(self, trainer, pl_module):
        self.weights = {k: v.clone() for k, v in pl_module.state_dict().items()}


def without_validation(train=None, **options):
    data = FinetuningDataModule("classification", tokenizer(), max_sequence_length=32,
                                validation_fraction=0, train_batch_size=8, **options)  # fmt: skip
    data.set_datasets(train or three_kinds(45, 0))
    return data


def test_without_validation_the_last_weights_are_kept(tmp_path):
    "And all rows are trained on, also by a run that was stopped."
    last, data = LastWeights(), without_validation()
    result = finetune(module_for(), data, tmp_path, callbacks=[last], num_epochs=2, **PLAIN)
    assert len(data.datasets["train"]) == 45 and "validation" not in data.datasets
    assert result.best_step == 12 and result.metrics == {} and not result.record.validation
    state = result.module.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in last.weights.items())
    series = TrainingCheckpoint(tmp_path / "checkpoints")
    with pytest.raises(TrainingInterrupted):
        finetune(module_for(), without_validation(), tmp_path / "stopped", num_epochs=2,
                 callbacks=[StopAfter(series, 8), series], **PLAIN)  # fmt: skip
    resumed = finetune(module_for(), without_validation(), tmp_path / "stopped", num_epochs=2,
                       checkpoint=latest_checkpoint(series.directory), **PLAIN)  # fmt: skip
    again = resumed.module.state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in last.weights.items())


def test_a_probe_needs_no_validation(tmp_path):
    data = without_validation(three_kinds(48, 0))
    data.set_datasets(three_kinds(48, 0), test=three_kinds(24, 1))
    result = finetune(module_for(), data, tmp_path, method="probe", accelerator="cpu")
    assert [*result.metrics][0].startswith("test_") and result.metrics["test_accuracy"] > 0.9


@pytest.mark.parametrize("options", [{"monitor": "val_loss"}, {"patience": 2}])
def test_what_needs_validation_is_refused_without(tmp_path, options):
    [(name, value)] = options.items()
    with pytest.raises(ValueError, match=f"{name}='?{value}'? needs rows to validate on"):
        finetune(module_for(), without_validation(), tmp_path, **options, **PLAIN)
