"Packed rows in plain transformers models: every document is computed as if it were alone."

import subprocess
import sys

import numpy as np
import pytest
import torch
from bertlab.data.collators import MaskedLanguageModelingCollator
from bertlab.data.plain_models import FAMILIES, PlainModelCollator, block_mask
from bertlab.data.packing import PackedDataset
from bertlab.data.streaming import PackedStream

VOCABULARY, PAD, CLS, SEP, MASK = 60, 1, 2, 3, 4
SPECIAL = {"pad_token_id": PAD, "cls_token_id": CLS, "sep_token_id": SEP}
EXACT = [
    (family, kernel) for family in ("bert", "roberta", "modernbert") for kernel in ("sdpa", "eager")
]


def build_model(family, kernel="sdpa", **changes):
    "A tiny random model without dropout; three layers, of which ModernBERT's last two see a window."
    from transformers import AutoConfig, AutoModelForMaskedLM

    sizes = dict(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
                 intermediate_size=24, pad_token_id=PAD, max_position_embeddings=48)  # fmt: skip
    if family == "modernbert":
        sizes |= dict(local_attention=6, global_attn_every_n_layers=3, bos_token_id=None, eos_token_id=None,
                      cls_token_id=CLS, sep_token_id=SEP)  # fmt: skip
    else:
        sizes |= dict(
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            bos_token_id=CLS,
            eos_token_id=SEP,
        )
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(sizes | changes))
    model = AutoModelForMaskedLM.from_config(config, attn_implementation=kernel)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # large enough for a leak to show
    return model


def build_collator(**options):
    options = {"special_token_ids": [PAD, CLS, SEP, MASK], "max_sequence_length": 32, **options}
    return MaskedLanguageModelingCollator(PAD, MASK, VOCABULARY, **options)


def documents(num=24, seed=0, longest=22):
    rng = np.random.default_rng(seed)
    return [rng.integers(5, VOCABULARY, n) for n in rng.integers(1, longest, num)]


def packed_batch(model, **options):
    dataset = PackedDataset(documents(), 32, **SPECIAL)
    rows = [dataset[index] for index in range(len(dataset))]
    return rows, PlainModelCollator(build_collator(**options), model)(rows)


def alone(rows, batch):
    "Each document of a batch by itself: its place, and ids and labels as a batch of one."
    for row_number, row in enumerate(rows):
        for document in range(1, row["attention_mask"].max() + 1):
            position = (
                row_number,
                torch.from_numpy(np.flatnonzero(row["attention_mask"] == document)),
            )
            yield position, batch["input_ids"][position][None], batch["labels"][position][None]


def total_loss(logits, labels):
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )


@pytest.mark.parametrize("family, kernel", EXACT)
def test_packed_logits_and_gradients_equal_those_alone(family, kernel):
    model = build_model(family, kernel)
    rows, batch = packed_batch(model)
    assert (batch["labels"] != -100).sum() > 20
    labels = batch.pop("labels")
    logits = model(**batch).logits
    total_loss(logits, labels).backward()
    packed = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    for position, ids, own_labels in alone(rows, {**batch, "labels": labels}):
        own_logits = model(input_ids=ids).logits
        torch.testing.assert_close(logits[position][None], own_logits, atol=1e-5, rtol=1e-5)
        total_loss(own_logits, own_labels).backward()
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max().clamp(min=1)
        torch.testing.assert_close(
            packed[name] / scale, parameter.grad / scale, atol=1e-5, rtol=1e-5
        )


def test_the_mask_keeps_its_dtype_under_autocast():
    model = build_model("bert", "eager")
    _, batch = packed_batch(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(**batch).loss.isfinite()
    assert batch["attention_mask"].dtype == torch.float32


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
def test_positions_and_an_ordinary_mask_leak(family):
    "Were this not so, the test above would prove nothing."
    model = build_model(family)
    rows, batch = packed_batch(model)
    ordinary = torch.from_numpy(np.stack([row["attention_mask"] > 0 for row in rows])).long()
    leaky = model(
        batch["input_ids"], attention_mask=ordinary, position_ids=batch["position_ids"]
    ).logits
    gaps = [
        abs(leaky[position] - model(input_ids=ids).logits[0]).max().item()
        for position, ids, _ in alone(rows, batch)
    ]
    assert max(gaps) > 1e-3  # a hundred times the tolerance


def test_the_window_of_modernbert_is_inside_the_document():
    documents_BL = torch.tensor([[1, 1, 1, 1, 2, 2, 0]])
    near = block_mask(documents_BL, window=1)[0, 0].int().tolist()
    assert near == [
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [0, 1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],  # padding sees padding: a query that sees nothing may give NaN
    ]


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "camembert"])
def test_roberta_positions_begin_after_the_padding_id(family):
    assert FAMILIES[family] == "after padding"
    model = build_model(family)
    row = {"input_ids": [CLS, 9, SEP, CLS, SEP, PAD], "attention_mask": [1, 1, 1, 2, 2, 0],
           "position_ids": [0, 1, 2, 0, 1, 0], "epoch": 0, "index": 0}  # fmt: skip
    batch = PlainModelCollator(build_collator(), model)([row])
    assert batch["position_ids"].tolist() == [[2, 3, 4, 2, 3, PAD]]  # PAD is 1 here


def test_other_kernels_and_models_are_refused_by_name():
    model = build_model("bert")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="attn_implementation 'flex_attention'.*'eager', 'sdpa'"):
        PlainModelCollator(build_collator(), model)
    model.config.model_type = "deberta"
    with pytest.raises(ValueError, match="model_type 'deberta'.*bert.*modernbert"):
        PlainModelCollator(build_collator(), model)


def test_a_document_longer_than_the_model_is_refused():
    model = build_model("roberta", max_position_embeddings=24)  # 22 tokens
    with pytest.raises(ValueError, match="reaches position 24.*0 to 23"):
        PlainModelCollator(build_collator(), model)(
            [PackedDataset([np.arange(5, 26)], 32, **SPECIAL)[0]]  # 21 tokens and two special ones
        )
    PlainModelCollator(build_collator(), model)(
        [PackedDataset([np.arange(5, 25)], 32, **SPECIAL)[0]]
    )


def test_rows_that_lost_their_address_are_refused():
    row = PackedDataset(documents(), 32, **SPECIAL)[0]
    del row["index"]
    with pytest.raises(ValueError, match="remove_unused_columns=False"):
        PlainModelCollator(build_collator(), build_model("bert"))([row])


def test_rows_without_packing_are_one_document_each():
    model = build_model("bert")
    batch = PlainModelCollator(build_collator(), model)(
        [{"input_ids": [CLS, 9, 8, SEP]}, {"input_ids": [CLS, SEP]}]
    )
    assert batch["attention_mask"].shape == (2, 1, 32, 32)
    assert batch["position_ids"][:, :5].tolist() == [[0, 1, 2, 3, 0], [0, 1, 0, 0, 0]]
    assert model(**batch).loss.isfinite() or (batch["labels"] == -100).all()


def train(model, dataset, tmp_path, **options):
    from transformers import Trainer, TrainingArguments

    seen = []

    class Recording(PlainModelCollator):
        def __call__(self, rows):
            seen.extend((int(row["epoch"]), int(row["index"])) for row in rows)
            return super().__call__(rows)

    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, learning_rate=0.1, report_to=[], use_cpu=True,
        save_strategy="no", logging_steps=1, disable_tqdm=True, remove_unused_columns=False, **options,
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, train_dataset=dataset, data_collator=Recording(build_collator(), model)
    )
    trainer.train()
    return seen, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
def test_transformers_trainer_trains_on_packed_rows(family, tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    same = [np.full(n, 7) for n in (5, 9, 13)] * 8  # one word: soon learned
    dataset = PackedDataset(same, 32, **SPECIAL)
    model = build_model(family)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    seen, losses = train(model, dataset, tmp_path, num_train_epochs=6)
    assert losses[-1] < losses[0] / 2
    assert sorted(set(seen)) == [
        (epoch, index) for epoch in range(6) for index in range(len(dataset))
    ]


@pytest.mark.parametrize("processes, seedable", [(1, True), (2, False)])
def test_loaders_of_several_processes_set_the_epoch(processes, seedable):
    accelerate = pytest.importorskip(
        "accelerate.data_loader", reason="transformers' Trainer needs accelerate"
    )
    dataset = PackedDataset(documents(), 32, **SPECIAL)
    loader = accelerate.prepare_data_loader(
        torch.utils.data.DataLoader(dataset, 2, shuffle=True, collate_fn=list), num_processes=processes, process_index=0,
        put_on_device=False, use_seedable_sampler=seedable)  # fmt: skip
    loader.set_epoch(3)
    assert dataset[0]["epoch"] == 3


def test_transformers_trainer_takes_a_stream(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    stream = PackedStream([documents(200)], 32, **SPECIAL, buffer_size=500)
    seen, losses = train(build_model("bert"), stream, tmp_path, max_steps=5)
    assert seen[:20] == [(0, index) for index in range(20)] and np.isfinite(losses).all()


@pytest.mark.parametrize("retained, label_name, reported", [
    (None, False, True),  # all that our collator makes
    (("input_ids", "attention_mask", "labels"), True, True),  # as transformers' collators
    (("input_ids", "attention_mask", "labels"), False, False),
])  # fmt: skip
def test_trainer_evaluates_our_models_with_named_labels(retained, label_name, reported, tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from bertlab.model.config import modernbert_tiny
    from bertlab.model.heads import BertLabForMaskedLM

    hidden, collator = {}, build_collator()

    class Epochs(TrainerCallback):
        def on_epoch_begin(self, arguments, state, control, **_):
            collator.epoch = int(state.epoch)

    def collate(rows):
        batch = collator(rows)
        hidden.setdefault(collator.epoch, []).append(sorted((batch["labels"] != -100).tolist()))
        return {name: batch[name] for name in retained or batch}

    rows = [{"input_ids": [CLS, *range(7, 7 + n), SEP]} for n in (8, 9, 10, 11)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_train_epochs=2, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, remove_unused_columns=False, label_names=["labels"] if label_name else None)  # fmt: skip
    model = BertLabForMaskedLM(modernbert_tiny(vocab_size=64))
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=collate,
        callbacks=[Epochs()],
    )
    trainer.train()
    assert hidden[0][0] != hidden[1][0]
    assert ("eval_loss" in trainer.evaluate()) == reported


def test_packing_and_streaming_need_no_lightning():
    code = (
        "import sys, bertlab.data.packing, bertlab.data.streaming, bertlab.data.plain_models;"
        "heavy = {'lightning', 'transformers', 'datasets', 'bertlab.model.encoder', 'bertlab.train.modules'};"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
