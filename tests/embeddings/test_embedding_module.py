"The embedding module keeps the contracts of training: sums, resume, rates, guards, and what it saves."

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from embedding_cases import (
    WORDS,
    draw_pairs,
    fit,
    small_data,
    small_config,
    small_module,
    small_tokenizer,
    weights_of,
)
from lightning.pytorch.callbacks import Callback
from safetensors import safe_open
from scipy.stats import spearmanr
from torch.nn import functional as F

from bertlab.data.tokenizers import train_tokenizer
from bertlab.embeddings.bi_encoder import ST_DEFAULTS, BiEncoder
from bertlab.embeddings.module import EmbeddingModule
from bertlab.embeddings.pairs import EmbeddingDataModule
from bertlab.optim.groups import main_param_group
from bertlab.train.checkpoints import TrainingCheckpoint
from bertlab.train.resume import check_resume, latest_checkpoint, check_same_run, run_fingerprint
from bertlab.train.history import History
from bertlab.train.trainer import make_trainer, seed_everything


def test_training_finds_the_documents_of_held_out_queries():
    data, module = small_data(draw_pairs(300), batch=32), small_module()
    trainer = fit(module, data, 40, val_check_steps=20)
    logged_values = {k: float(v) for k, v in trainer.callback_metrics.items()}
    held = len(data.pairs["validation"])
    assert logged_values["val_recall_10"] > 3 * 10 / held and logged_values["val_loss"] < math.log(
        16
    )
    assert 0 <= logged_values["val_mean_cosine"] < 0.7 and 0 < logged_values["val_mrr"] <= 1


def overlap(query, document):
    "Share of a query's words that a document has."
    words = {*query.split()} & {*WORDS}
    return len(words & {*document.split()}) / len(words)


def test_scored_pairs_are_ordered_by_similarity():
    pairs = draw_pairs(160)
    shifted = [*pairs.positives[80:], *pairs.positives[:80]]
    positives = [p if n % 2 else s for n, (p, s) in enumerate(zip(pairs.positives, shifted))]
    rows = [
        {"sentence1": q, "sentence2": p, "score": overlap(q, p)}
        for q, p in zip(pairs.queries, positives)
    ]
    data, module = small_data(batch=32), small_module()
    data.set_datasets(rows[:120], rows[120:])
    metrics = fit(module, data, 40, val_check_steps=40).callback_metrics
    held_out = data.pairs["validation"]
    first, second = (module.model.encode(texts) for texts in (held_out.queries, held_out.positives))
    cosines, scores = (first * second).sum(1), [score for [score] in held_out.scores]
    expected = spearmanr(cosines, scores).statistic
    assert float(metrics["val_spearman"]) == pytest.approx(expected, abs=1e-5) and expected > 0.5
    assert "val_mrr" not in metrics


def test_a_small_model_learns_the_vectors_of_a_larger_one():
    texts = draw_pairs(120).texts()
    word_vectors = np.random.default_rng(0).normal(size=(len(WORDS), 64))
    vectors = [sum(word_vectors[WORDS.index(w)] for w in t.split() if w in WORDS) for t in texts]
    data, module = small_data(batch=32), small_module()
    data.set_datasets([{"text": t, "vector": v.tolist()} for t, v in zip(texts, vectors)])
    losses = History()
    fit(module, data, 60, val_check_steps=30, callbacks=[losses])
    first, last = losses.column("train_loss")[0], losses.validation[-1]["val_loss"]
    assert first > 0.6 > 0.3 > last, "one minus the cosine of both vectors"


def test_ranks_of_a_split_are_those_among_its_different_answers():
    train, held = draw_pairs(16, seed=1), draw_pairs(20)
    held = replace(
        held, positives=[held.positives[n // 5 * 5] for n in range(20)]
    )  # each answers five queries
    data, module = small_data(), small_module()
    data.set_datasets(train, held)
    values = fit(module, data, 1, val_check_steps=1).callback_metrics
    answers = held.positives[::5]
    cosines = module.model.encode(held.queries) @ module.model.encode(answers).T
    ranks = [
        1 + sum(row[n] >= row[position // 5] for n in range(4) if n != position // 5)
        for position, row in enumerate(cosines)
    ]
    assert max(ranks) > 1, "else nothing is compared"
    assert float(values["val_mrr"]) == pytest.approx(
        np.mean([1 / rank for rank in ranks]), rel=1e-5
    )
    assert float(values["val_recall_10"]) == 1, "there are but four answers"


def test_a_step_is_the_gradient_of_the_mean_over_queries():
    data, module = small_data(), small_module(optimizer_class="sgd", learning_rate=0.1, weight_decay=0.0,
                                              scheduler_warmup_steps=0, scheduler_training_decay=1.0)  # fmt: skip
    data.setup()
    batch = next(iter(data.train_dataloader()))
    before = [p.detach().clone() for p in module.parameters()]
    q, d = module.eval().embed(batch)
    loss = F.cross_entropy(q.vectors_ND @ d.vectors_ND.T / 0.05, torch.arange(8))
    grads = torch.autograd.grad(loss, list(module.parameters()))
    data.batches = None
    fit(module, data, 1)
    for p, old, grad in zip(module.parameters(), before, grads):
        torch.testing.assert_close(p.detach(), old - 0.1 * grad, atol=1e-5, rtol=1e-4)


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, *args):
        trainer.should_stop = trainer.global_step >= self.step


def test_a_run_that_was_stopped_goes_on_bit_by_bit(tmp_path):
    def run(stop_at, seed=0, checkpoint=None):
        keeper, history = (
            TrainingCheckpoint(tmp_path / f"{stop_at}-{seed}", every_n_steps=100),
            History(),
        )
        module, data = (
            small_module(seed, dropout=0.2, gradcache_rows=2, learn_temperature=True),
            small_data(draw_pairs(61)),
        )
        callbacks = [history, keeper, StopAt(stop_at)]
        trainer = make_trainer(8, "32-true", accelerator="cpu", callbacks=callbacks)
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
        return weights_of(module), history.column("train_loss")

    uninterrupted, losses = run(8)
    run(3)
    resumed, later = run(
        8, seed=1, checkpoint=tmp_path / "3-0" / "step-00000003.ckpt"
    )  # other first weights, which must not matter
    assert torch.equal(uninterrupted, resumed)
    assert list(later)[-5:] == list(losses)[-5:]


@pytest.mark.parametrize("options", [
    {"temperature": 0.1}, {"symmetric": True}, {"matryoshka_dims": [8]}, {"distillation": "kl"},
    {"false_negative_margin": 0.1}, {"pooling": "cls"},
])  # fmt: skip
def test_what_makes_the_loss_is_part_of_the_run(options):
    saved = run_fingerprint(small_module(matryoshka_dims=[8, 16]), None)
    same = small_module(matryoshka_dims=[8, 16], gradcache_rows=2, learning_rate=1.0)
    check_same_run("run.ckpt", saved, run_fingerprint(same, None))
    changed = run_fingerprint(small_module(**{"matryoshka_dims": [8, 16], **options}), None)
    with pytest.raises(ValueError, match=f"{[*options][0]} is .* there"):
        check_same_run("run.ckpt", saved, changed)


def test_layer_decay_lowers_rates_layer_by_layer():
    module, data = (
        small_module(layer_decay=0.5, learning_rate=0.08, learn_temperature=True),
        small_data(),
    )
    trainer = fit(module, data, 1)
    names = {id(p): name for name, p in module.named_parameters()}
    rates = {
        names[id(p)]: (g["initial_lr"], g["weight_decay"])
        for g in trainer.optimizers[0].param_groups
        for p in g["params"]
    }
    by_layer = {
        "blocks.1.mlp": 0.08,
        "blocks.0.mlp": 0.04,
        "embeddings.tokens": 0.02,
        "log_temperature": 0.08,
    }
    for part, rate in by_layer.items():
        assert all(r == pytest.approx(rate) for name, (r, _) in rates.items() if part in name), part
    assert rates["log_temperature"][1] == 0
    logged = main_param_group(trainer.optimizers[0].param_groups)["initial_lr"]
    assert logged == 0.08, "not that of the layer whose group comes first"


def test_the_learnt_temperature_moves_and_stays_within_its_bounds():
    module = small_module(learn_temperature=True, learning_rate=0.05)
    fit(module, small_data(draw_pairs(64)), 5)
    assert abs(module.temperature().item() - 0.05) > 1e-3
    with torch.no_grad():
        module.log_temperature.fill_(-100)
    assert module.temperature().item() == pytest.approx(0.005)
    with pytest.raises(ValueError, match="temperature=2.0"):
        small_module(learn_temperature=True, temperature=2.0)


def test_the_teacher_s_scores_reach_the_gradient_and_are_logged():
    pairs = draw_pairs(64, negatives=2, scores=True)
    weights = {}
    for weight in (0.0, 5.0):
        module = small_module(distillation="kl", distillation_weight=weight)
        trainer = fit(module, small_data(pairs), 2, val_check_steps=2)
        weights[weight] = weights_of(module)
        assert {"train_distillation", "val_distillation"} <= trainer.callback_metrics.keys()
    assert (weights[0.0] - weights[5.0]).abs().max() > 1e-4
    with pytest.raises(ValueError, match="scores_column"):
        fit(small_module(distillation="kl"), small_data(), 1)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    "The directory of a bi-encoder that has learned a little."
    module = small_module()
    fit(module, small_data(), 2)
    return module.save(tmp_path_factory.mktemp("base") / "model")


def adapted(base, adapter="lora", **options):
    pytest.importorskip("peft", reason="needs peft")
    seed_everything(0)
    options = {"learning_rate": 1e-2, "adapter": adapter, "gradcache_rows": 2} | options
    module = EmbeddingModule(str(base), **options)
    module.configure_model()
    return module


@pytest.mark.parametrize("adapter, part", [({"type": "lora", "r": 2}, "lora_"), ("dora", "lora_")])
def test_an_adapter_trains_and_the_encoder_below_stays(base, adapter, part):
    module = adapted(base, adapter)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    fit(module, small_data(), 3)
    moved = {n for n, p in module.named_parameters() if not torch.equal(p, before[n])}
    assert moved and all(part in name for name in moved)


@pytest.mark.parametrize(
    "source, options, rate", [("new", {}, 3e-3), ("base", {}, 1e-3), ("base", {"adapter": "lora"}, 2e-3), ("base", {"learning_rate": 7e-5}, 7e-5)]
)  # fmt: skip
def test_the_rate_follows_where_weights_come_from(base, source, options, rate):
    if "adapter" in options:
        pytest.importorskip("peft", reason="needs peft")
    origin = {"model_config_kwargs": small_config()} if source == "new" else {"pretrained_model_name_or_path": str(base)}  # fmt: skip
    tokenizer = {"pretrained_tokenizer_name_or_path": small_tokenizer()}
    module = EmbeddingModule(**origin, **tokenizer, **options)
    module.configure_model()
    assert module.hparams.learning_rate == pytest.approx(rate), "the largest ones, at width 32"


def test_a_saved_adapter_is_merged_and_kept(base, tmp_path):
    from bertlab.embeddings.bi_encoder import BiEncoder

    module = adapted(base)
    fit(module, small_data(), 3)
    written = module.save(tmp_path / "written")
    texts = ["alpha beta", "gamma north south"]
    first, last = BiEncoder.load(base).encode(texts), module.model.encode(texts)
    assert (
        np.abs(BiEncoder.load(written).encode(texts) - last).max()
        < 1e-5
        < np.abs(first - last).max()
    )
    settings = json.loads((written / "adapter/adapter_config.json").read_text())
    assert (
        settings["base_model_name_or_path"] == str(base)
        and (written / "adapter/adapter_model.safetensors").is_file()
    )
    assert not any("lora" in name for name in safe_open(written / "model.safetensors", "pt").keys())


def test_a_run_with_an_adapter_goes_on_bit_by_bit(base, tmp_path):
    def run(stop_at, checkpoint=None):
        keeper = TrainingCheckpoint(tmp_path / str(stop_at), every_n_steps=100)
        module, data = (
            adapted(base, {"type": "lora", "r": 2, "lora_dropout": 0.2}),
            small_data(draw_pairs(64)),
        )
        if checkpoint:
            assert check_resume(checkpoint, module, data, 6) == 3
        trainer = make_trainer(6, "32-true", accelerator="cpu", callbacks=[keeper, StopAt(stop_at)])
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
        return weights_of(module)

    uninterrupted = run(6)
    run(3)
    early, late = (latest_checkpoint(tmp_path / name) for name in ("3", "6"))
    assert torch.equal(uninterrupted, run(6, checkpoint=early))
    again = EmbeddingModule.load_from_checkpoint(
        late, pretrained_tokenizer_name_or_path=small_tokenizer()
    )
    assert torch.equal(weights_of(again), uninterrupted)
    with pytest.raises(ValueError, match="adapter is .* there and 'dora' here"):
        check_resume(early, adapted(base, "dora"), small_data(draw_pairs(64)), 6)
    with pytest.raises(ValueError, match="training pairs"):
        check_resume(early, adapted(base, {"type": "lora", "r": 2, "lora_dropout": 0.2}),
                     small_data(draw_pairs(64, seed=1)), 6)  # fmt: skip


def test_a_saved_module_loads_again(tmp_path):
    from bertlab.embeddings.bi_encoder import BiEncoder

    module = small_module(pooling="cls")
    fit(module, small_data(), 2)
    module.save(tmp_path / "first")
    again = EmbeddingModule(str(tmp_path / "first"))
    again.configure_model()
    assert again.model.pooling == "cls" and again.model.max_sequence_length == 16
    vectors = [
        m.encode(["alpha beta", "gamma"])
        for m in (module.model, again.model, BiEncoder.load(tmp_path / "first"))
    ]
    assert (
        np.abs(vectors[0] - vectors[1]).max() < 1e-6
        and np.abs(vectors[0] - vectors[2]).max() < 1e-6
    )


@pytest.mark.parametrize("built_first", [True, False])
def test_rows_fit_an_encoder_of_few_positions(built_first):
    short = EmbeddingModule(model_config_kwargs={**small_config(), "max_position_embeddings": 32},
                            pretrained_tokenizer_name_or_path=small_tokenizer())  # fmt: skip
    if built_first:
        short.configure_model()
    data = small_data(row_length=None)
    before = data.resume_identity()["row_length"]
    fit(short, data, 1)
    assert next(iter(data.train_dataloader()))["input_ids"].shape[1] == 32
    assert data.resume_identity()["row_length"] == before  # a run that was stopped is the same run
    with pytest.raises(ValueError, match="row_length=48"):
        fit(short, small_data(row_length=48), 1)
    long = EmbeddingDataModule(small_tokenizer(), max_sequence_length=40, train_batch_size=8)
    long.set_datasets(draw_pairs())
    with pytest.raises(ValueError, match="max_sequence_length"):
        fit(short, long, 1)


def test_a_new_module_is_called_with_ids_alone():
    first, ids = small_module().model.eval(), torch.tensor([[2, 5, 6, 3], [2, 7, 8, 3]])
    module = EmbeddingModule(None, first.tokenizer, small_config(), weight_decay=None,
                             optimizer_class=None, scheduler_warmup_kind=None).eval()  # fmt: skip
    vectors_ND = module(input_ids=ids, labels=torch.arange(2))
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    torch.testing.assert_close(vectors_ND, module.model(rows))
    assert (module.hparams.optimizer_class, module.hparams.weight_decay) == ("adamw", 0.01)


@pytest.mark.parametrize("length, expected", [(24, 24), (10, 16)])  # pairs are cut at 16
def test_short_pairs_do_not_shorten_the_model(tmp_path, length, expected):
    first = small_module().model
    source = BiEncoder(first.encoder, first.tokenizer, max_sequence_length=length)
    source.save(tmp_path / "first")
    module = EmbeddingModule(str(tmp_path / "first"))
    fit(module, small_data(), 1).save_checkpoint(tmp_path / "x.ckpt")
    saved = BiEncoder.load(module.save(tmp_path / "trained"))
    beside = BiEncoder.load(tmp_path / "x")
    np.testing.assert_array_equal(saved.encode(["alpha beta"]), beside.encode(["alpha beta"]))
    assert beside.max_sequence_length == expected
    alone = EmbeddingModule.load_from_checkpoint(
        tmp_path / "x.ckpt", pretrained_tokenizer_name_or_path=small_tokenizer()
    )
    assert saved.max_sequence_length == alone.model.max_sequence_length == expected
    fit(alone, small_data(), 1)
    assert alone.model.max_sequence_length == expected


def test_a_checkpoint_brings_prompts_and_the_comparison_back(tmp_path):
    first, st_options = (
        small_module().model,
        {"prompts": {"query": "alpha: "}, "similarity_fn_name": "dot"},
    )
    BiEncoder(first.encoder, first.tokenizer, st_config=st_options).save(tmp_path / "first")
    module = EmbeddingModule(str(tmp_path / "first"))
    with pytest.warns(UserWarning, match="'alpha: '"):
        trainer = fit(module, small_data(), 1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    load = lambda: EmbeddingModule.load_from_checkpoint(
        tmp_path / "x.ckpt", pretrained_tokenizer_name_or_path=small_tokenizer()
    )  # noqa: E731
    saved = BiEncoder.load(load().save(tmp_path / "again"))
    assert (
        saved.st_config
        == module.model.st_config
        == {**ST_DEFAULTS, **st_options, "matryoshka_dims": []}
    )


@pytest.mark.parametrize(
    "name, normalize, expected",
    [("dot", True, "dot"), ("dot", False, "cosine"), ("manhattan", True, "cosine")],
)
def test_training_sets_the_similarity_to_cosine(tmp_path, name, normalize, expected):
    first = small_module().model
    options = {"normalize": normalize, "st_config": {"similarity_fn_name": name}}
    BiEncoder(first.encoder, first.tokenizer, **options).save(tmp_path / "first")
    module = EmbeddingModule(str(tmp_path / "first"))
    module.configure_model()
    assert module.model.similarity_fn_name == expected


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_validation_loss_ignores_contrastive_weight(weight):
    pairs = draw_pairs(64, negatives=2, scores=True)
    module = small_module(distillation="kl", contrastive_weight=weight)
    logged_values = make_trainer(1, "32-true", accelerator="cpu").validate(
        module, small_data(pairs), verbose=False
    )[0]
    usual = make_trainer(1, "32-true", accelerator="cpu").validate(
        small_module(), small_data(pairs), verbose=False
    )[0]
    assert (
        logged_values["val_loss"] == pytest.approx(usual["val_loss"])
        and logged_values["val_loss"] > 0.1
    )


@pytest.mark.parametrize("options, word", [
    ({"freeze": 99}, "freeze"), ({"matryoshka_dims": [64]}, "matryoshka_dims"), ({"parameter_overrides": {"*.nothing": {"lr": 1.0}}}, "nothing"),
    ({"adapter": {"type": "lora", "target_modules": ["nothing"]}}, "nothing"), ({"adapter": "lara"}, "adapter"),
])  # fmt: skip
def test_options_must_fit_the_model(options, word):
    if word == "nothing" and "adapter" in options:
        pytest.importorskip("peft", reason="needs peft")
    source = {"pretrained_tokenizer_name_or_path": small_tokenizer()}
    with pytest.raises(ValueError, match=word):
        EmbeddingModule(model_config_kwargs=small_config(), **source, **options).build_model()


@pytest.mark.parametrize("options, word", [
    ({"temperature": 0.0}, "temperature"),
    ({"learning_rate": float("inf")}, "learning_rate=inf"), ({"optimizer_kwargs": {"lr": 1}}, "learning_rate"),
    ({"layer_decay": 1.5}, "layer_decay"), ({"distillation": "mse"}, "distillation"), ({"contrastive_weight": 0.0}, "contrastive_weight"),
    ({"matryoshka_dims": [4, 4]}, "matryoshka_dims"), ({"false_negative_margin": 3.0}, "false_negative_margin=3.0"),
    ({"pooling": "sum"}, "pooling='sum'"), ({"gradcache_rows": 0}, "gradcache_rows=0"), ({"schedule": "no_file.f"}, "schedule='no_file.f'"),
    ({"scheduler_warmup_kind": "lineer"}, "scheduler_warmup_kind='lineer'"), ({"scheduler_cooldown_steps": -3}, "scheduler_cooldown_steps .*-3"),
    ({"scheduler_training_decay": 2.0}, "scheduler_training_decay=2.0"), ({"scheduler_kwargs": {"foo": 1}}, "'foo'"),
    ({"optimizer_kwargs": {"bates": 1}}, "'bates'"), ({"optimizer_kwargs": {"betas": [2, 3]}}, "betas"),
    ({"compile_model": "fast"}, "compile_model='fast'"),
    ({"model_config_kwargs": {"hidden_size": 8}, "pretrained_model_name_or_path": "a"}, "model_config_kwargs"),
])  # fmt: skip
def test_wrong_options_are_refused_at_once(options, word):
    with pytest.raises(ValueError, match=word):
        EmbeddingModule(**options)


def test_mismatched_parts_are_refused():
    with pytest.raises(ValueError, match="tokenizer"):
        EmbeddingModule(model_config_kwargs=small_config()).configure_model()
    with pytest.raises(ValueError, match="matryoshka_dims"):
        small_module(matryoshka_dims=[32])
    mismatched = EmbeddingModule(model_config_kwargs={**small_config(), "vocab_size": len(small_tokenizer())},
                            pretrained_tokenizer_name_or_path=small_tokenizer())  # fmt: skip
    seed_everything(0)
    data = small_data()
    data.tokenizer = train_tokenizer(["a quite different text with other words in it " * 3], 120)
    with pytest.raises(ValueError, match="another tokenizer"):
        fit(mismatched, data, 1)


@pytest.mark.parametrize(
    "lacks, word", [("scores", r"scores .scores_column"), ("negatives", "negatives")]
)
def test_distillation_needs_scores_and_negatives(lacks, word):
    train, held = (
        draw_pairs(40, negatives=1, scores=True),
        draw_pairs(16, negatives=1, scores=True, seed=1),
    )
    held = replace(held, scores=None) if lacks == "scores" else replace(
        held, negatives=[[] for _ in held.negatives], scores=[[1.0] for _ in held.scores])  # fmt: skip
    data, module = small_data(train), small_module(distillation="kl")
    data.set_datasets(train, held)
    with pytest.raises(ValueError, match=f"distillation='kl'.*validation have no {word}"):
        fit(module, data, 2, val_check_steps=1)


def test_any_encoder_of_transformers_is_trained_saved_and_resumed(tmp_path):
    from transformers import AutoConfig, AutoModel

    tokenizer = small_tokenizer()
    config = AutoConfig.for_model(
        "mpnet", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(tmp_path / "first")
    tokenizer.save_pretrained(tmp_path / "first")
    module, data = EmbeddingModule(str(tmp_path / "first"), learning_rate=1e-3), small_data()
    fit(module, data, 3, val_check_steps=3)
    assert not data.collator.packing and not module.model.packs
    texts = ["alpha beta", "gamma delta epsilon"]
    saved = BiEncoder.load(module.save(tmp_path / "saved"))
    np.testing.assert_allclose(saved.encode(texts), module.model.encode(texts), atol=1e-6)
    assert type(saved.encoder).__name__ == "MPNetModel"
