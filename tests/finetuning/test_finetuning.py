"Fine-tuning end to end: what is trained, what is scored, and what is refused before anything is."

import functools
import os
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from ranks import run_on_ranks
from transformers import AutoModelForSequenceClassification

from bertlab.model.config import modernbert_tiny
from bertlab.data.tokenizers import train_tokenizer
from bertlab.finetuning.module import FinetuningModule, finetuning_schedule
from bertlab.finetuning.data import FinetuningDataModule
from bertlab.finetuning.classification import balanced_class_weights, _binary_cross_entropy_sums
from bertlab.finetuning.classification import cross_entropy_sums
from bertlab.finetuning.runs import finetune
from bertlab.train.history import History
from bertlab.train.trainer import make_trainer, seed_everything

warnings.filterwarnings("ignore", module="lightning")
pytestmark = pytest.mark.filterwarnings("ignore")
FRUIT, TOOLS = ["apple", "pear", "plum", "fig"], ["saw", "hammer", "drill", "file"]
PLACES = ["oslo", "rome"]


@functools.cache
def tokenizer():
    words = " ".join(FRUIT + TOOLS + PLACES + ["the", "is", "in", "here", "where", "what"])
    return train_tokenizer([words] * 30, 120)


CONFIG = modernbert_tiny(
    vocab_size=120, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
).to_diff_dict()


def texts_of(n, seed=0, kind="class"):
    rng, rows = np.random.default_rng(seed), []
    for _ in range(n):
        fruit = rng.random() < 0.5
        words = ["the", *rng.choice(FRUIT if fruit else TOOLS, rng.integers(1, 6)), "is", "here"]
        label = {"class": "fruit" if fruit else "tool", "tags": ["fruit", "known"] if fruit else ["known"],
                 "number": float(len(words)) / 4}[kind]  # fmt: skip
        rows.append({"text": " ".join(words), "label": label})
    return rows


def tagged(n, seed=0):
    rng, rows = np.random.default_rng(seed), []
    for _ in range(n):
        words = ["the", str(rng.choice(FRUIT)), "is", "in", *rng.choice(PLACES, rng.integers(1, 3))]
        tags = ["O", "B-FRUIT", "O", "O", "B-PLACE", *["I-PLACE"] * (len(words) - 5)]
        rows.append({"text": list(map(str, words)), "label": tags})
    return rows


def asked(n, seed=0, unanswerable=False):
    rng, rows = np.random.default_rng(seed), []
    for i in range(n):
        city, thing = str(rng.choice(PLACES)), str(rng.choice(TOOLS))
        context = f"the {thing} is in {city} " + "the file is here " * int(rng.integers(0, 6))
        answers = (
            []
            if unanswerable and i % 3 == 0
            else [{"text": city, "answer_start": context.find(city)}]
        )
        rows.append({"question": "where is the " + thing, "context": context, "answers": answers})
    return rows


MAKE = {"classification": texts_of, "token_classification": tagged, "question_answering": asked}


def data_for(task="classification", train=None, val=None, test=None, **options):
    windows = (
        {"max_sequence_length": 16, "collator_kwargs": {"doc_stride": 4}}
        if task == "question_answering"
        else {}
    )
    options = {
        "max_sequence_length": 32,
        "train_batch_size": 8,
        "val_batch_size": 8,
        "test_batch_size": 8,
        **windows,
        **options,
    }
    data = FinetuningDataModule(task, tokenizer(), **options)
    make = MAKE[task]
    # The last batch of an epoch is ragged.
    data.set_datasets(train or make(45), val or make(19, 1), test or make(11, 2))
    return data


def module_for(task="classification", **options):
    options = {"model_config_kwargs": CONFIG, "learning_rate": 3e-3, **options}
    return FinetuningModule(task, **options)


def fit(module, data, steps=30, seed=0, **options):
    seed_everything(seed)
    options = {"precision": "32-true", "accelerator": "cpu", "val_check_steps": steps, **options}
    trainer = make_trainer(steps, **options)
    trainer.fit(module, data)
    return trainer


def predict(module, loader):
    module.eval()
    with torch.no_grad():
        return [module.predict_step(batch, i) for i, batch in enumerate(loader)]


def logged(trainer):
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


def weights(module):
    return {k: v.detach().clone() for k, v in module.model.state_dict().items()}


# --- each task learns -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task, options, data_options, metric",
    [
        ("classification", {}, {}, "accuracy"),
        ("classification", {}, {"train": texts_of(48, kind="tags"), "val": texts_of(19, 1, "tags"), "test": texts_of(5, 2, "tags")}, "f1_micro"),
        ("token_classification", {}, {}, "entity_f1"),
        ("token_classification", {}, {"packing": True}, "entity_f1"),
        ("question_answering", {"learning_rate": 1e-2}, {}, "exact_match"),
    ],
)  # fmt: skip
def test_each_task_is_learned(task, options, data_options, metric):
    module, data = module_for(task, **options), data_for(task, **data_options)
    trainer = fit(module, data, 60)
    values = logged(trainer)
    assert values[f"val_{metric}"] > 0.9, values
    assert f"val_{metric}" == module.monitor or task == "question_answering"
    tested = trainer.test(module, data, verbose=False)[0]
    assert tested[f"test_{metric}"] > 0.9 and {k[5:] for k in tested} == {
        k[4:] for k in values if k.startswith("val_")
    }


def test_a_number_is_learned():
    rows = [texts_of(n, seed, "number") for seed, n in enumerate((96, 19, 5))]
    module, data = (
        module_for(learning_rate=1e-2),
        data_for(train=rows[0], val=rows[1], test=rows[2]),
    )
    values = logged(fit(module, data, 80))
    assert module.task.problem_type == "regression" and module.task.num_labels == 1
    assert values["val_pearson"] > 0.8 and module.monitor == "val_spearman"
    predicted = torch.cat([batch["logits"] for batch in predict(module, data.val_dataloader())])
    truth = np.array([row["label"] for row in rows[1]])
    assert len(predicted) == 19
    np.testing.assert_allclose(
        values["val_loss"], np.mean((predicted[:, 0].numpy() - truth) ** 2), rtol=1e-4
    )


# --- one batch or many ----------------------------------------------------------------------------


@pytest.mark.parametrize("task, options", [
    ("classification", {}), ("classification", {"class_weights": [1.0, 0.2]}), ("token_classification", {}),
    ("question_answering", {}),
])  # fmt: skip
def test_accumulated_batches_equal_one_large_batch(task, options):
    runs = []
    for size, window in ((8, 1), (2, 4)):
        module, data = (
            module_for(task, optimizer_class="sgd", **options),
            data_for(task, train=MAKE[task](21), train_batch_size=size, shuffle_train=False),
        )
        fit(module, data, 3, accumulate_grad_batches=window)
        runs.append(weights(module))
    for key in runs[0]:
        torch.testing.assert_close(runs[1][key], runs[0][key], atol=1e-6, rtol=1e-4)


def processed(task, **options):
    module, data = (
        module_for(task, optimizer_class="sgd"),
        data_for(task, train=MAKE[task](29), shuffle_train=False, **options),
    )
    return module, data


def process(folder):
    warnings.filterwarnings("ignore")
    for task in TWO:
        module, data = processed(task, train_batch_size=4, val_batch_size=4)
        trainer = fit(module, data, 4, devices=2, strategy="ddp")
        torch.save((weights(module), logged(trainer)), f"{folder}/{task}-{os.environ['RANK']}.pt")


TWO = ("classification", "question_answering")


def test_two_processes_train_and_score_as_one(tmp_path):
    run_on_ranks(process, str(tmp_path))
    for task in TWO:
        module, data = processed(task)
        values = logged(fit(module, data, 4))
        for rank in range(2):
            logits, scores = torch.load(tmp_path / f"{task}-{rank}.pt")
            for key, weight in weights(module).items():
                torch.testing.assert_close(logits[key], weight, atol=1e-6, rtol=1e-4)
            for name, value in values.items():
                assert scores[name] == pytest.approx(value, abs=1e-5), name


# --- what moves, and how fast ---------------------------------------------------------------------


@pytest.mark.parametrize("num_layers, num_frozen", [(2, 1), (12, 10)])
def test_only_frozen_weights_stay(num_layers, num_frozen):
    config = {**CONFIG, "num_hidden_layers": num_layers}
    module, data = module_for(freeze_layers=num_frozen, model_config_kwargs=config), data_for()
    blocks = tuple(f"encoder.blocks.{block}." for block in range(num_frozen))
    start = {}

    class Remember(Callback):
        def on_train_start(self, trainer, pl_module):
            start.update(weights(pl_module))

    fit(module, data, 5, callbacks=[Remember()])
    moved = {key for key, weight in weights(module).items() if not torch.equal(weight, start[key])}
    still = start.keys() - moved
    assert (
        still
        == set(module.frozen)
        == {key for key in start if key.startswith(("encoder.embeddings.", *blocks))}
    )


@pytest.mark.parametrize("num_layers", [2, 12])
def test_a_layer_moves_by_its_own_rate(num_layers):
    "With sign descent every weight moves by its rate, so rates can be read off the weights."
    module, data = (
        module_for(
            layer_decay=0.5,
            optimizer_class="lion",
            weight_decay=0.0,
            learning_rate=2**-8,
            model_config_kwargs={**CONFIG, "num_hidden_layers": num_layers},
        ),
        data_for(),
    )
    start = {}

    class Remember(Callback):
        def on_train_start(self, trainer, pl_module):
            start.update(weights(pl_module))

    trainer = fit(module, data, 1, callbacks=[Remember()])
    moved = {
        key: (weight - start[key]).abs().max().item() for key, weight in weights(module).items()
    }
    depth = {
        "encoder.embeddings": num_layers + 1,
        **{f"encoder.blocks.{n}": num_layers - n for n in range(num_layers)},
        "encoder.final_norm": 0,
        "task_head": 0,
    }
    for key, distance in moved.items():
        below = next(n for part, n in depth.items() if key.startswith(part + "."))
        assert distance == pytest.approx(2**-8 * 0.5**below, rel=1e-3), key
    assert logged(trainer)["learning_rate"] == 2**-8  # the head's is the one that is logged


# --- schedules ------------------------------------------------------------------------------------


def rates(name, warmup, total, options=None):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, seen = finetuning_schedule(optimizer, name, warmup, total, options), []
    for _ in range(int(total)):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_schedules_are_what_their_names_say():
    np.testing.assert_allclose(rates("linear", 2, 6), [0, 0.5, 1, 0.75, 0.5, 0.25])
    np.testing.assert_allclose(
        rates("cosine", 0, 4), [1, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2]
    )
    np.testing.assert_allclose(
        rates("polynomial", 0, 4, {"power": 2.0, "lr_end": 1e-9}),
        [1, 9 / 16, 4 / 16, 1 / 16],
        atol=1e-6,
    )
    for name in ("constant", None):
        np.testing.assert_allclose(
            rates(name, 2, 5), [0, 0.5, 1, 1, 1]
        )  # transformers' would not warm up


def rates_of(module):
    "The learning rate of each of five steps."
    seen, watch = [], Callback()
    watch.on_train_batch_start = lambda trainer, *_: seen.append(
        trainer.optimizers[0].param_groups[0]["lr"]
    )
    make_trainer(5, precision="32-true", accelerator="cpu", callbacks=[watch]).fit(
        module, data_for()
    )
    return seen


class Halved(torch.optim.lr_scheduler.StepLR):
    def __init__(self, optimizer, every=1):
        super().__init__(optimizer, every, 0.5)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_users_schedule_is_a_class_or_its_dotted_name(by_name):
    schedule = "test_finetuning.Halved" if by_name else Halved
    module = module_for(scheduler_type=schedule, scheduler_kwargs={"every": 2}, learning_rate=1.0)
    assert rates_of(module) == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_the_default_schedule_wastes_no_step():
    module = module_for(learning_rate=None, num_labels=2)
    module.configure_model()
    built = module.build_optimizer(15)
    factors = [built["lr_scheduler"]["scheduler"].schedule(step) for step in range(16)]
    assert factors == pytest.approx([1 / 2, 1, *(n / 13 for n in range(13, -1, -1))])
    assert module.build_optimizer(1)["lr_scheduler"]["scheduler"].get_last_lr()[0] > 0


# --- class weights --------------------------------------------------------------------------------


def test_balanced_weights_are_sklearns():
    from sklearn.utils.class_weight import compute_class_weight

    labels = ["a"] * 7 + ["b"] * 2 + ["c"]
    expected = compute_class_weight("balanced", classes=np.array(["a", "b", "c"]), y=labels)
    np.testing.assert_allclose(balanced_class_weights({"a": 7, "b": 2, "c": 1}), expected)
    assert balanced_class_weights({"a": 8, "b": 2}, 10) == [0.25, 4.0]
    with pytest.raises(ValueError, match="'b'"):
        balanced_class_weights({"a": 8, "b": 10}, 10)


def test_weighted_losses_are_torchs():
    torch.manual_seed(0)
    logits, weights_C = torch.randn(6, 3), torch.tensor([0.2, 1.0, 5.0])
    labels = torch.tensor([0, 2, -100, 1, 1, 0])
    total, count = cross_entropy_sums(logits, labels, weights_C)
    torch.testing.assert_close(
        total / count, torch.nn.functional.cross_entropy(logits, labels, weights_C)
    )
    label_rows = torch.randint(0, 2, (6, 3)).float()
    total, count = _binary_cross_entropy_sums(logits, label_rows, weights_C)
    torch.testing.assert_close(
        total / count,
        torch.nn.functional.binary_cross_entropy_with_logits(
            logits, label_rows, pos_weight=weights_C
        ),
    )
    blank = label_rows.clone()
    blank[2] = -100
    total, count = _binary_cross_entropy_sums(logits, blank, weights_C)
    indices = [0, 1, 3, 4, 5]
    assert count == 15
    torch.testing.assert_close(
        total / count,
        torch.nn.functional.binary_cross_entropy_with_logits(
            logits[indices], label_rows[indices], pos_weight=weights_C
        ),
    )


@pytest.mark.parametrize("task_name", ["class", "tags"])
def test_class_weights_are_not_in_the_loss_of_a_split(task_name):
    rows = [texts_of(n, seed, task_name) for seed, n in enumerate((48, 19, 11))]
    losses = []
    for weights_C in (None, [1.0, 7.0]):
        module, data = (
            module_for(class_weights=weights_C, learning_rate=0.0),
            data_for(train=rows[0], val=rows[1], test=rows[2]),
        )
        trainer = fit(module, data, 1)
        batch = next(iter(data.val_dataloader()))
        learned = module.label_loss(batch).mean().item()
        losses.append(
            (
                logged(trainer)["val_loss"],
                trainer.test(module, data, verbose=False)[0]["test_loss"],
                learned,
            )
        )
    assert losses[0][:2] == losses[1][:2] and losses[0][2] != pytest.approx(losses[1][2])


# --- checkpoints ----------------------------------------------------------------------------------


def test_a_checkpoint_loads_without_data_or_first_weights(tmp_path):
    module, data = module_for(reinit_layers=1, class_weights="balanced"), data_for()
    trainer = fit(module, data, 2)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    loaded = FinetuningModule.load_from_checkpoint(tmp_path / "run.ckpt", weights_only=False)
    for key, weight in weights(module).items():
        assert torch.equal(weight, loaded.model.state_dict()[key])
    assert (
        loaded.config.id2label == {0: "fruit", 1: "tool"}
        and loaded.task.labels.names == module.task.labels.names
    )
    batch = next(iter(data.val_dataloader()))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run").eval()
    output = module.eval()(**inputs, labels=batch["labels"])
    torch.testing.assert_close(theirs(**inputs).logits, output.logits, atol=1e-5, rtol=1e-4)
    assert output.loss > 0 and theirs.config.id2label == {0: "fruit", 1: "tool"}


@pytest.mark.parametrize("task, targets", [
    ("classification", {"labels": torch.tensor([0, 1])}),
    ("token_classification", {"labels": torch.tensor([[0, 1, -100], [1, 1, 0]])}),
    ("question_answering", {"start_positions": torch.tensor([1, 0]), "end_positions": torch.tensor([2, 0])}),
])  # fmt: skip
def test_a_new_module_is_called_as_models_of_transformers_are(task, targets):
    shape = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    labels = {} if task == "question_answering" else {"num_labels": 2}
    module = FinetuningModule(task, model_config_kwargs=shape, weight_decay=None,
                              optimizer_class=None, warmup_steps=None, **labels)  # fmt: skip
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    output, names = module.eval()(input_ids=ids, **targets), module.task.outputs
    model = module.model(input_ids=ids)
    assert all(torch.equal(output[name], model[name]) for name in names)
    if task == "token_classification":
        expected = torch.nn.functional.cross_entropy(model.logits.mT, targets["labels"])
        assert output.loss.item() == pytest.approx(expected.item())
    loader = torch.utils.data.DataLoader([{"input_ids": row} for row in ids], 2)
    trainer = make_trainer(1, "32-true", "cpu")
    for predicted in (trainer.predict(module, loader), trainer.predict(module, [loader] * 2)[1]):
        torch.testing.assert_close(predicted[0][names[0]], model[names[0]])
    assert module.hparams.weight_decay == 0.01 and module.hparams.optimizer_class == "adamw"


class SaveAt(Callback):
    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("cut", [4])
def test_a_run_stopped_within_an_epoch_continues_its_rows(tmp_path, cut):
    ends, seen, path = [], [], tmp_path / "cut.ckpt"
    for start in (None, path):
        seed_everything(0 if start is None else 9)
        data, rows = data_for(), []
        callback = SaveAt(cut, path)
        callback.on_train_batch_start = lambda trainer, module, batch, batch_idx, rows=rows: (
            rows.append(batch["input_ids"].tolist())
        )
        if start is not None:
            callback.step = -1
        module = module_for(
            scheduler_type="linear",
            layer_decay=0.8,
            freeze_layers=0,
            model_kwargs={"mlp_dropout": 0.1},
        )
        trainer = make_trainer(
            100, max_epochs=3, precision="32-true", accelerator="cpu", callbacks=[callback]
        )
        trainer.fit(module, data, ckpt_path=start, weights_only=False)
        ends.append(weights(module)), seen.append(rows)
    assert 3 < len(seen[0]) and len(seen[0]) % 3 == 0 and len(seen[0]) // 3 not in (1, cut), (
        "within an epoch"
    )
    assert seen[1] == seen[0][cut:]
    for key, weight in ends[0].items():
        assert torch.equal(weight, ends[1][key]), key


@pytest.mark.parametrize("schedule", ["linear", "polynomial"])
def test_a_resume_uses_its_own_rate(tmp_path, schedule):
    rates, path = {}, tmp_path / "half.ckpt"
    for start, rate in ((None, 1e-3), (path, 1e-4)):
        module, history = (
            module_for(scheduler_type=schedule, learning_rate=rate, layer_decay=0.8),
            History(),
        )
        callbacks = [history, SaveAt(4, path)] if start is None else [history]
        trainer = make_trainer(8, precision="32-true", accelerator="cpu", callbacks=callbacks)
        trainer.fit(module, data_for(), ckpt_path=start, weights_only=False)
        rates[rate] = history.column("learning_rate")[-4:]
    assert rates[1e-4] == pytest.approx(rates[1e-3] / 10, abs=1e-7), (
        "polynomial ends at 1e-7, whatever its peak"
    )


# --- refused before training ----------------------------------------------------------------------


def small(**changes):
    return {"model_config_kwargs": {**CONFIG, **changes}}


@pytest.mark.parametrize("options, words", [
    ({"num_labels": 3}, "num_labels=3"), ({"id2label": ["a", "b"]}, "'fruit', 'tool'"), ({"problem_type": "regression"}, "problem_type='regression'"),
    ({"class_weights": [1.0, 2.0, 3.0]}, "class_weights"), ({"class_weights": [1.0, 0.0]}, "class_weights"), ({"class_weights": "equal"}, "'equal'"),
    ({"freeze_layers": 3}, "freeze_layers=3"), ({"reinit_layers": 3}, "reinit_layers.*3"), ({"model_kwargs": {"hidden_size": 8}}, "'hidden_size'"),
    ({"task": "ner"}, "task='ner'"), ({"scheduler_type": "step"}, "scheduler_type='step'"), ({"warmup_ratio": 1.0}, "warmup_ratio=1.0"),
    ({"learning_rate": -1.0}, "learning_rate=-1.0"), ({"weight_decay": float("nan")}, "weight_decay=nan"), ({"warmup_steps": -3}, "warmup_steps=-3"),
    ({"warmup_ratio": 0.1, "warmup_steps": 3}, "warmup_steps=3"),
    ({"scheduler_type": Halved, "warmup_steps": 3}, "warmup_steps=3"), ({"layer_decay": 0.0}, "layer_decay=0.0"),
    ({"task": "token_classification", "problem_type": "regression"}, "'regression'"), ({"task": "token_classification"}, "'token_classification'"),
    (small(vocab_size=50), "vocab_size is 50"), (small(max_position_embeddings=4), "max_position_embeddings"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_before_a_step(options, words):
    with pytest.raises(ValueError, match=words):
        fit(FinetuningModule(**{"task": "classification", **small(), **options}), data_for(), 1)


@pytest.mark.parametrize("options, words", [
    ({"class_weights": [1.0, 0.0]}, "class_weights"), ({"class_weights": "equal"}, "'equal'"), ({"layer_decay": 2.0}, "layer_decay=2.0"),
    ({"task": "regression", "class_weights": "balanced"}, "class_weights"), ({"optimizer_kwargs": {"bates": 1}}, "'bates'"),
    ({"scheduler_kwargs": {"foo": 1}}, "'foo'"), ({"scheduler_type": "cosine", "scheduler_kwargs": {"foo": 1}}, "'foo'"),
])  # fmt: skip
def test_wrong_options_are_refused_at_once(options, words):
    with pytest.raises(ValueError, match=words):
        FinetuningModule(**{"task": "classification", **small(), **options})


@pytest.mark.parametrize("options, words", [
    ({"freeze_layers": 3}, "freeze_layers=3"), ({"freeze_layers": "blocks*"}, "freeze_layers.*'blocks"),
    ({"reinit_layers": -1}, "reinit_layers=-1"), ({"model_kwargs": {"hidden_size": 8}}, "'hidden_size'"),
    ({"model_config_kwargs": None, "pretrained_model_name_or_path": "no/model"}, "no/model"),
])  # fmt: skip
def test_a_model_is_checked_before_rows_are_read(options, words, tmp_path):
    module = FinetuningModule(**{"task": "classification", **small(), **options})
    with pytest.raises(ValueError, match=words):
        finetune(module, None, tmp_path)  # there are no rows


def test_padding_ends_at_the_positions_of_the_model(monkeypatch):
    "Texts of 17 to 20 tokens; the next multiple of 8 is 24."
    monkeypatch.setattr("bertlab.data.rows.num_devices", lambda device: 1)
    rows = [{"text": " ".join(["apple"] * n), "label": "ab"[n % 2]} for n in (15, 16, 17, 18) * 4]
    data, short = (
        data_for(train=rows, val=rows, test=rows),
        {**CONFIG, "max_position_embeddings": 20},
    )
    trainer = fit(FinetuningModule("classification", model_config_kwargs=short), data, 2)
    assert trainer.global_step == 2 and "val_loss" in trainer.callback_metrics
    assert {batch["input_ids"].shape[1] for batch in data.train_dataloader()} == {20}


class Own(torch.optim.SGD):
    "Somebody's optimizer."


@pytest.mark.parametrize(
    "options", [{"optimizer_class": Own}, {"scheduler_type": lambda step: 1.0}]
)
def test_users_parts_leave_a_safely_loadable_checkpoint(options, tmp_path):
    module = module_for(**options)
    fit(module, data_for(), 3).save_checkpoint(tmp_path / "own.ckpt")
    hparams = torch.load(tmp_path / "own.ckpt", weights_only=True)["hyper_parameters"]
    assert hparams["optimizer_class"] == (
        f"{__name__}.Own" if "optimizer_class" in options else "adamw"
    )
    loaded = FinetuningModule.load_from_checkpoint(tmp_path / "own.ckpt")
    for before, after in zip(module.model.parameters(), loaded.model.parameters()):
        assert torch.equal(before, after)


def test_a_trained_module_refuses_other_label_ids():
    from bertlab.finetuning.predictions import evaluate

    module = module_for()
    trainer = fit(module, data_for(), 3)
    reordered = data_for(label_names=["tool", "fruit"])
    with pytest.raises(
        ValueError,
        match="id2label=.*'fruit', 'tool'.*'tool', 'fruit'",
    ):
        trainer.validate(module, reordered, verbose=False)
    reordered.setup("validate")
    with pytest.raises(ValueError, match="'fruit', 'tool'"):
        evaluate(module, reordered)
    trainer.validate(module, data_for(label_names=["fruit", "tool"]), verbose=False)
    assert module.task.labels.names == ("fruit", "tool")
