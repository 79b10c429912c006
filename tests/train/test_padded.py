"Models that bertlab's encoder cannot express are pretrained as their own class, on padded rows."

import json

import pytest
import torch
import transformers

from bertlab.cli.models import fill_mask
from bertlab.data.loaders import EpochBatches, RowsByLength
from bertlab.data.module import PretrainingDataModule
from bertlab.data.packing import PackedDataset
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.heads import predict_tokens
from bertlab.model.huggingface import save_model
from bertlab.model.losses import LossConfig
from bertlab.train.checkpoints import TrainingCheckpoint
from bertlab.train.modules import PretrainingModule
from bertlab.train.trainer import make_trainer, seed_everything

pytestmark = pytest.mark.filterwarnings("ignore")
PLAIN = {"precision": "32-true", "accelerator": "cpu"}
WORDS = "the red apple is on a green tree near our old house and falls when wind blows".split()
TEXTS = [" ".join(WORDS[i % 9 : i % 9 + 1 + i % 8]) for i in range(80)]
TOKENIZER = train_tokenizer(TEXTS, 200)
SIZES = {"vocab_size": len(TOKENIZER), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 48, "max_position_embeddings": 40}  # fmt: skip
FAMILIES = {
    "DebertaV2": {
        "relative_attention": True,
        "position_buckets": 8,
        "pos_att_type": ["p2c", "c2p"],
    },
    "Electra": {"embedding_size": 16},
    "MPNet": {},
    "Albert": {"embedding_size": 16},
}


@pytest.fixture
def source(request, tmp_path):
    family = getattr(request, "param", "MPNet")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **SIZES, **FAMILIES[family], pad_token_id=TOKENIZER.pad_token_id
    )
    getattr(transformers, f"{family}ForMaskedLM")(config).save_pretrained(tmp_path / "source")
    TOKENIZER.save_pretrained(tmp_path / "source")
    return str(tmp_path / "source")


def module_of(source, **options):
    return PretrainingModule(
        pretrained_model_name_or_path=source, **{"learning_rate": 3e-3, **options}
    )


def data_of(**options):
    data = PretrainingDataModule(
        None, TOKENIZER, **{"max_sequence_length": 32, "train_batch_size": 8, **options}
    )
    data.set_datasets(TEXTS, TEXTS[:10])
    return data


def weights(module):
    return {name: w.detach().clone() for name, w in module.model.state_dict().items()}


@pytest.mark.parametrize("source", FAMILIES, indirect=True)
def test_a_family_is_trained_and_saved_as_itself(source, tmp_path):
    module, data = module_of(source), data_of()
    before = weights(module)
    make_trainer(4, **PLAIN).fit(module, data)
    assert module.padded_because and not data.packing and module.model.training
    assert any(not torch.equal(w, before[name]) for name, w in weights(module).items())
    save_model(module.model, TOKENIZER, tmp_path / "saved")
    types = [
        json.loads((tmp_path / d / "config.json").read_text())["model_type"]
        for d in ("source", "saved")
    ]
    assert types[0] == types[1]
    reopened = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "saved").eval()
    batch = TOKENIZER(TEXTS[:6], return_tensors="pt", padding=True)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        result, reference = (m(**inputs).logits[real] for m in (module.model.eval(), reopened))
    torch.testing.assert_close(result, reference, rtol=0, atol=1e-5)


def test_loss_and_gradient_are_those_of_transformers(source):
    module, data = module_of(source), data_of()
    module.eval()
    data.settle_packing(module.padded_because)
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert batch["attention_mask"].any(0).all() and batch["attention_mask"].max() == 1
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    module.model(**inputs).loss.backward()
    want = {
        name: p.grad.clone() for name, p in module.model.named_parameters() if p.grad is not None
    }
    module.model.zero_grad()
    sums = predict_tokens(module.model, module.model_inputs(batch), LossConfig(loss_only=True))
    sums.loss.backward()
    assert int(sums.num_labels) == int((batch["labels"] != -100).sum())
    for name, parameter in module.model.named_parameters():
        if name in want:
            torch.testing.assert_close(parameter.grad, want[name], rtol=1e-4, atol=1e-6)


def test_a_blank_row_changes_nothing(source):
    model = module_of(source).model.eval()
    ids = torch.randint(5, len(TOKENIZER), (3, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[2] = 0
    labels = ids.masked_fill(mask == 0, -100)
    uninterrupted = predict_tokens(
        model, {"input_ids": ids, "attention_mask": mask, "labels": labels}
    )
    alone = predict_tokens(model, {"input_ids": ids[:2], "labels": labels[:2]})
    torch.testing.assert_close(uninterrupted.loss_sum, alone.loss_sum)
    uninterrupted.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_two_micro_batches_are_one_batch(source):
    ends = []
    for micro, accumulate in ((8, 1), (4, 2)):
        seed_everything(0)
        # Rows in the order of the texts: a batch of 8 holds the rows of two of 4.
        module, data = (
            module_of(
                source,
                model_config_kwargs={
                    "hidden_dropout_prob": 0.0,
                    "attention_probs_dropout_prob": 0.0,
                },
            ),
            data_of(train_batch_size=micro, shuffle=False),
        )
        make_trainer(2, accumulate_grad_batches=accumulate, **PLAIN).fit(module, data)
        ends.append(weights(module))
    for name, weight in ends[0].items():
        torch.testing.assert_close(weight, ends[1][name], rtol=1e-4, atol=1e-5)


def test_a_resumed_run_ends_as_an_uninterrupted_one(source, tmp_path):
    ends = []
    for start in (None, tmp_path / "checkpoints" / "step-00000003.ckpt"):
        seed_everything(0 if start is None else 9)
        checkpoint = TrainingCheckpoint(tmp_path / "checkpoints", every_n_steps=3, keep_last=9)
        module = module_of(source)
        trainer = make_trainer(6, callbacks=[checkpoint], **PLAIN)
        trainer.fit(module, data_of(), ckpt_path=start, weights_only=False)
        ends.append(weights(module))
    for name, weight in ends[0].items():
        assert torch.equal(weight, ends[1][name]), name


def test_a_checkpoint_opens_without_its_source(source, tmp_path):
    module, trainer = module_of(source), make_trainer(1, **PLAIN)
    trainer.fit(module, data_of())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = PretrainingModule.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    assert type(again.model) is type(module.model) and again.padded_because
    for name, weight in weights(module).items():
        assert torch.equal(weight, again.model.state_dict()[name]), name


def test_diffusion_scores_a_padded_model(source):
    module, data = module_of(source, objective="diffusion"), data_of(objective="diffusion")
    trainer = make_trainer(2, **PLAIN)
    trainer.fit(module, data)
    assert trainer.callback_metrics["train_loss"].isfinite()


@pytest.mark.parametrize(
    "module_options, data_options, names",
    [
        ({}, {"packing": True}, ["packing=True", "mpnet"]),
        ({"objective": "enhanced_mlm"}, {}, ["enhanced_mlm", "mpnet"]),
        ({"model_config_kwargs": {"mlp_dropout": 0.1}}, {}, ["model_config_kwargs", "mlp_dropout"]),
    ],
)
def test_what_needs_bertlabs_encoder_is_refused(source, module_options, data_options, names):
    with pytest.raises(ValueError) as caught:
        make_trainer(1, **PLAIN).fit(module_of(source, **module_options), data_of(**data_options))
    assert all(name in str(caught.value) for name in names)


# --- batches of similar length --------------------------------------------------------------------


def batches_of(rank=0, world_size=1, num_workers=0, delivered=0, batch_size=4):
    documents = [list(range(5, 6 + n * 7 % 23)) for n in range(130)]
    rows = PackedDataset(documents, 32, pad_token_id=0, packing=False)
    key = lambda batch: [(row["epoch"], row["index"], len(row["input_ids"])) for row in batch]
    grouped = RowsByLength(rows, batch_size * world_size)
    batches = EpochBatches(grouped, key, batch_size, num_workers, rank, world_size)
    batches.delivered = delivered
    return batches


def test_batches_by_length_hold_each_row_once():
    batches = batches_of()
    for epoch in (0, 1):
        rows = [row for batch in batches for row in batch]
        assert len({index for _, index, _ in rows}) == len(rows) == 128
        assert {e for e, _, _ in rows} == {epoch}
    spreads = [max(n for *_, n in batch) - min(n for *_, n in batch) for batch in batches]
    assert max(spreads) <= 2


@pytest.mark.parametrize("num_workers, delivered", [(2, 0), (0, 7), (2, 7)])
def test_batches_by_length_depend_on_no_worker_and_no_stop(num_workers, delivered):
    uninterrupted = list(batches_of())
    assert (
        list(batches_of(num_workers=num_workers, delivered=delivered)) == uninterrupted[delivered:]
    )


def test_two_processes_share_the_batches_of_one():
    parts = [list(batches_of(rank, 2, batch_size=4)) for rank in (0, 1)]
    uninterrupted = list(batches_of(batch_size=8))
    assert [a + b for a, b in zip(*parts, strict=True)] == uninterrupted


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_grouped_by_length_and_resumed(workers, tmp_path):
    texts = [" ".join(WORDS[:1] * (1 + 7 * i % 30)) for i in range(96)]
    for n, name in enumerate("ab"):
        (tmp_path / f"{name}.txt").write_text("\n".join(texts[n::2]))

    def loader():
        data = PretrainingDataModule(
            [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], TOKENIZER, max_sequence_length=32,
            train_batch_size=8, streaming=True, num_workers=workers, num_shards=2, sample_by="line",
            data_kwargs={"buffer_size": 2400}, val_dataset_name_or_path=str(tmp_path / "a.txt"),
        )  # fmt: skip
        data.settle_packing("it is of another family")
        data.setup()
        return data.train_dataloader()

    first, lengths, sizes = loader(), [], []
    batches, states = iter(first), []
    for _ in range(12):  # a pass
        batch = next(batches)
        states.append(first.state_dict())
        lengths += batch["attention_mask"].sum(1).tolist()
        sizes.append(batch["input_ids"].numel())
    want = sorted(len(TOKENIZER(text).input_ids) for text in texts)
    assert sorted(lengths) == want  # each row once
    assert sum(want) / sum(sizes) > 0.7 > sum(want) / (32 * 96)  # real tokens, of those computed
    again = loader()
    again.load_state_dict(states[4])
    resumed = iter(again)
    for step in range(5, 12):
        assert next(resumed)["attention_mask"].sum(1).tolist() == lengths[8 * step : 8 * step + 8]


@pytest.mark.parametrize("width", [16, 32])  # padded, and packed
def test_electra_fills_masks_as_transformers(width, tmp_path):
    torch.manual_seed(0)
    config = transformers.ElectraConfig(**SIZES, embedding_size=width, initializer_range=0.3)
    model = transformers.ElectraForMaskedLM(config).eval()
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    texts = ["the red [MASK] is on a tree", "an [MASK] house [MASK]"]
    answers = fill_mask(tmp_path, texts, 5)
    for text, masks in zip(texts, answers, strict=True):
        batch = TOKENIZER(text, return_tensors="pt")
        with torch.no_grad():
            logits = model(batch["input_ids"]).logits[batch["input_ids"] == TOKENIZER.mask_token_id]
        for guesses, row in zip(masks, logits.softmax(-1), strict=True):
            values, ids = row.topk(5)
            assert [word for word, _ in guesses] == [TOKENIZER.decode([i]).strip() for i in ids]
            assert [p for _, p in guesses] == pytest.approx(values.tolist(), abs=1e-5)
