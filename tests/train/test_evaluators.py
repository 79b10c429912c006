"EvaluatorCallback measure what they say, at their pace, and change nothing of the run that they watch."

import json
import time

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from stop_at import StopAt

from bertlab.data.module import PretrainingDataModule
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.mask_filling import fill_mask
from bertlab.train.checkpoints import TrainingCheckpoint, TrainingInterrupted
from bertlab.train.resume import latest_checkpoint
from bertlab.train.evaluators import (
    EvalBatchSpec,
    Evaluator,
    EvaluatorCallback,
    FillMaskEvaluator,
    LossEvaluator,
    ProbeEvaluator,
)
from bertlab.train.evaluators import build_evaluator
from bertlab.train.history import Clock, History
from bertlab.train.monitors import Throughput
from bertlab.train.modules import PretrainingModule
from bertlab.train.trainer import make_trainer

TEXTS = [f"the {noun} {verb} the {other} ." for noun in ("cat", "dog", "cow") for verb in ("sees", "hears", "likes")
         for other in ("bird", "fish", "hen", "fox")]  # fmt: skip
SHAPE = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 100)


def run(tokenizer, evaluators, steps=6, more=(), kept=None, **options):
    L.seed_everything(0, verbose=False)
    module = PretrainingModule(
        model_config_kwargs=SHAPE, pretrained_tokenizer_name_or_path=tokenizer
    )
    data = PretrainingDataModule(None, tokenizer, max_sequence_length=32, train_batch_size=4)
    data.set_datasets(TEXTS, TEXTS[:6])
    history = History()
    callback = EvaluatorCallback(evaluators, quiet=True)
    trainer = make_trainer(
        steps, callbacks=[history, callback, *more], **{"precision": "32-true", **options}
    )
    kept = kept and latest_checkpoint(kept)
    trainer.fit(module, data, ckpt_path=kept, weights_only=True)
    return module, data, history, callback, trainer


def test_a_named_set_has_the_loss_of_a_validation_over_the_same_rows(tokenizer):
    for spec in ({"rows": 5}, {"tokens": 64}, {"rows": 3, "fixed": False}):
        module, data, history, callback, trainer = run(
            tokenizer, [LossEvaluator("held", TEXTS[:6], batch=spec)]
        )
        found = trainer.validate(module, data, verbose=False)[0]
        last = callback.rows[-1]
        for name in ("loss", "accuracy", "perplexity", "bits_per_byte"):
            assert last[name] == pytest.approx(found[f"val_{name}"], rel=1e-5), (spec, name)
        assert history.evaluations == callback.rows


def test_numbers_of_a_named_set_are_not_rounded_where_a_run_computes_in_16_bits(tokenizer):
    *_, callback, _ = run(
        tokenizer,
        [LossEvaluator("held", TEXTS[:6])],
        steps=1,
        precision="bf16-true",
        accelerator="cpu",
    )
    last = callback.rows[-1]
    assert last["perplexity"] == pytest.approx(np.exp(last["loss"]), rel=1e-6)


def test_asking_changes_no_loss_of_the_run(tokenizer, tmp_path):
    (tmp_path / "facts.tsv").write_text("the cat [MASK] the bird .\tsees|hears|likes\n")
    table = "text,label\n" + "".join(f"{text},{number % 2}\n" for number, text in enumerate(TEXTS))
    (tmp_path / "table.csv").write_text(table)
    asked = [LossEvaluator("a", TEXTS[:4], every_n_steps=2), ProbeEvaluator("b", tmp_path / "table.csv", every_n_steps=3),
             FillMaskEvaluator("c", tmp_path / "facts.tsv", every_n_steps=1, at_start=False)]  # fmt: skip
    with_, without = run(tokenizer, asked), run(tokenizer, [])
    assert np.array_equal(with_[2].column("train_loss"), without[2].column("train_loss"))
    steps = {name: with_[3].column(name, "accuracy")[0].tolist() for name in "abc"}
    assert steps == {"a": [0, 2, 4, 6], "b": [0, 3, 6], "c": [1, 2, 3, 4, 5, 6]}


@pytest.mark.parametrize("early", [{"more": [StopAt(3)]}, {"max_epochs": 2}])
def test_a_run_that_ends_before_its_last_number_is_asked_once_at_its_end(
    tokenizer, tmp_path, early
):
    make, path = lambda: [LossEvaluator("a", TEXTS[:4], every_n_steps=40)], tmp_path / "last.ckpt"
    early = {
        "steps": 50,
        **early,
        "more": [*early.get("more", []), TrainingCheckpoint(path, every_n_steps=1)],
    }
    *_, callback, trainer = run(tokenizer, make(), **early)
    assert 1 < trainer.global_step < 40
    assert callback.column("a", "loss")[0].tolist() == [0, trainer.global_step]
    # The newest checkpoint is older than the last answer, and a resume has not one step left.
    *_, again, resumed = run(tokenizer, make(), kept=path, **early)
    assert resumed.global_step == trainer.global_step and again.rows == callback.rows


def test_a_run_that_is_interrupted_is_not_asked(tokenizer):
    asked = []

    class Steps(Evaluator):
        def evaluate(self, module):
            asked.append(module.global_step)
            return {"none": 0.0}

    class Stop(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3:
                raise TrainingInterrupted(3)

    with pytest.raises(TrainingInterrupted):
        run(tokenizer, [Steps("steps", every_n_steps=2)], more=[Stop()])
    assert asked == [0, 2]


def test_a_probe_reads_a_label_off_the_vectors_and_not_off_noise(tokenizer, tmp_path):
    rows = [(text, text.split()[1]) for text in TEXTS * 3]
    (tmp_path / "nouns.csv").write_text("text,label\n" + "".join(f"{t},{l}\n" for t, l in rows))
    lots = np.random.default_rng(0)
    (tmp_path / "noise.csv").write_text(
        "text,label\n" + "".join(f"{t},{lots.integers(2)}\n" for t, _ in rows)
    )
    module, data, *_ = run(tokenizer, [])
    found = {}
    for name in ("nouns", "noise"):
        probe = ProbeEvaluator(name, tmp_path / f"{name}.csv")
        probe.setup(tokenizer, data.collator, 32)
        with torch.no_grad():
            found[name] = probe.evaluate(module.eval())["accuracy"]
    assert found["nouns"] > 0.95 and found["noise"] < 0.8


@pytest.mark.parametrize("duration, texts", [(None, 40), (1, 8), ("600 tokens", 16)])
def test_a_probe_of_a_sorted_table_reads_rows_by_lot_and_no_row_without_a_label(
    tokenizer, tmp_path, duration, texts
):
    rows = [(TEXTS[i % 36], label) for label in ("a", "b") for i in range(20)] + [
        (TEXTS[0], ""),
        (TEXTS[1], " "),
    ] * 3
    (tmp_path / "sorted.csv").write_text(
        "text,label\n" + "".join(f"{text},{label}\n" for text, label in rows)
    )
    module, data, *_ = run(tokenizer, [])
    probe = ProbeEvaluator("p", tmp_path / "sorted.csv", batch={"rows": 8}, duration=duration)
    probe.setup(tokenizer, data.collator, 32)
    assert len(probe.texts) == len(probe.labels) == texts and set(probe.labels.tolist()) == {0, 1}
    with torch.no_grad():
        assert 0 <= probe.evaluate(module.eval())["accuracy"] <= 1


def test_a_probe_whose_duration_leaves_one_label_is_refused_before_the_first_step(
    tokenizer, tmp_path
):
    (tmp_path / "rare.csv").write_text(
        "text,label\n" + "".join(f"{text},{text == TEXTS[0]}\n" for text in TEXTS)
    )
    probe = ProbeEvaluator("p", tmp_path / "rare.csv", batch={"rows": 2}, duration=1)
    with pytest.raises(ValueError, match="duration"):
        probe.setup(tokenizer, None, 32)


def test_a_probe_has_the_same_answer_where_weights_are_divided(tokenizer, tmp_path):
    (tmp_path / "nouns.csv").write_text(
        "text,label\n" + "".join(f"{text},{text.split()[1]}\n" for text in TEXTS)
    )
    vectors = {}

    class Seen(ProbeEvaluator):
        def vectors(self, module):
            return vectors.setdefault(strategy, super().vectors(module))

    for strategy in ("auto", "fsdp"):  # in one process; at the start, so before any step
        run(
            tokenizer,
            [Seen("p", tmp_path / "nouns.csv")],
            steps=1,
            accelerator="cpu",
            devices=1,
            strategy=strategy,
        )
    np.testing.assert_allclose(vectors["fsdp"], vectors["auto"], atol=1e-5)


def test_a_probe_takes_the_means_of_16_bit_vectors_in_more(tokenizer, tmp_path):
    (tmp_path / "nouns.csv").write_text(
        "text,label\n" + "".join(f"{text},{text.split()[1]}\n" for text in TEXTS)
    )
    module, data, *_ = run(tokenizer, [])
    probe = ProbeEvaluator("p", tmp_path / "nouns.csv")
    probe.setup(tokenizer, data.collator, 32)
    module.model.bfloat16().eval()
    with torch.no_grad():
        found = torch.tensor(probe.vectors(module))
    assert found.dtype == torch.float32 and not found.equal(found.bfloat16().float())


def test_a_probe_leaves_out_rows_without_a_text_and_refuses_what_is_none(tokenizer, tmp_path):
    rows = [{"text": text, "label": n % 2} for n, text in enumerate([*TEXTS, None, "  "])]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    probe = ProbeEvaluator("p", tmp_path / "a.jsonl")
    probe.setup(tokenizer, None, 32)
    assert probe.texts == TEXTS
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"text": 7, "label": 0}])
    )
    with pytest.raises(ValueError, match="p: text of .*b.jsonl is 7"):
        ProbeEvaluator("p", tmp_path / "b.jsonl").setup(tokenizer, None, 32)


def test_what_is_asked_is_no_training_time_on_any_clock(tokenizer):
    stood = []

    class Slow(Evaluator):
        def evaluate(self, module):
            clocks = [one for one in module.trainer.callbacks if isinstance(one, Clock)]
            before = [one.elapsed() for one in clocks]
            time.sleep(0.1)
            stood.append(len(clocks) == 2 and before == [one.elapsed() for one in clocks])
            return {"steps": 0.0}

    _, _, history, *_ = run(
        tokenizer, [Slow("slow", every_n_steps=2)], more=[Throughput(every_n_steps=1)], steps=6
    )
    assert stood.count(True) == len(stood) >= 3 and history.totals()[1] > 0


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])  # bpe marks the space before a word
def test_gaps_are_right_where_the_best_guess_is_one_of_the_words(kind, tmp_path):
    tokenizer = train_tokenizer(TEXTS * 5, 320 if kind == "bpe" else 100, kind=kind)
    (tmp_path / "facts.tsv").write_text(
        "the cat [MASK] the bird .\tsees\n\nthe [MASK] sees the fox .\tcat | dog|cow\n"
    )
    module, data, *_ = run(tokenizer, [])
    found = {}
    for top_k in (1, len(tokenizer)):
        one = FillMaskEvaluator("facts", tmp_path / "facts.tsv", top_k=top_k)
        one.setup(tokenizer, data.collator, 32)
        found |= one.evaluate(module.eval())
    assert found[f"top_{len(tokenizer)}"] == 1.0 and found["accuracy"] == found["top_1"]
    best = [answers[0][0] for answers in fill_mask(module.model, tokenizer, one.texts, top_k=1)]
    assert found["accuracy"] == ((best[0] == "sees") + (best[1] in ("cat", "dog", "cow"))) / 2


@pytest.mark.parametrize(
    "duration, batches", [(None, 3), (1, 1), (2, 2), ("64 tokens", 1), ("130 tokens", 2)]
)
def test_a_duration_ends_an_evaluation(tokenizer, duration, batches):
    one = LossEvaluator("a", TEXTS, batch={"rows": 2}, duration=duration)
    data = PretrainingDataModule(None, tokenizer, max_sequence_length=32)
    data.set_datasets(TEXTS)
    data.setup()
    one.setup(tokenizer, data.collator, 32)
    found = list(one.batches())
    assert all(len(batch["input_ids"]) == 2 for batch in found)
    assert len(found) == (batches if duration is not None else -(-len(one.rows) // 2))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: build_evaluator({"kind": "los", "name": "a"}), "did you mean 'loss'"),
        (lambda: build_evaluator({"kind": "loss", "name": "a", "surce": 1}), "surce|source"),
        (lambda: EvalBatchSpec(rows=1, tokens=2), "rows=1"),
        (lambda: EvalBatchSpec(rows=0), "rows must be 1"),
        (lambda: EvalBatchSpec(tokens=8).num_rows(32), "tokens=8"),
        (lambda: LossEvaluator("a/b", []), "without /"),
        (lambda: LossEvaluator("a", [], every_n_steps=0), "every_n_steps"),
        (lambda: LossEvaluator("a", [], duration=0), "duration"),
        (lambda: ProbeEvaluator("a", "x.csv", test_fraction=1.0), "test_fraction"),
        (lambda: EvaluatorCallback([LossEvaluator("a", []), LossEvaluator("a", [])]), "'a'"),
    ],
)
def test_mistakes_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    "line",
    ["no gap\tword", "one [MASK] only", "two [MASK] [MASK]\tword", "the [MASK]\tunheardofword"],
)
def test_a_file_of_gaps_is_refused_by_line(tokenizer, tmp_path, line):
    (tmp_path / "a.tsv").write_text(f"the [MASK] sees .\tcat\n{line}\n")
    with pytest.raises(ValueError, match="line 2"):
        FillMaskEvaluator("a", tmp_path / "a.tsv").setup(tokenizer, None, 32)


def test_a_users_own_evaluator_is_asked(tokenizer):
    class Norm(Evaluator):
        def evaluate(self, module):
            return {"norm": float(sum(p.norm() for p in module.parameters()))}

    *_, callback, _ = run(tokenizer, [Norm("norm", every_n_steps=3)])
    steps, values = callback.column("norm", "norm")
    assert steps.tolist() == [0, 3, 6] and (values > 0).all() and len(set(values.tolist())) == 3


@pytest.mark.parametrize("options, said", [
    ({"batch": {"tokens": 8}}, "tokens=8"), ({"batch": {"tokens": "8 rows"}}, "batch: tokens"),
    ({"duration": "3 batches"}, "duration"), ({"top_k": 0}, "top_k"), ({"top_k": 2.5}, "top_k"),
])  # fmt: skip
def test_what_an_evaluator_cannot_do_is_refused_before_the_first_step(
    tokenizer, tmp_path, options, said
):
    (tmp_path / "a.tsv").write_text("the [MASK] sees .\tcat\n")
    with pytest.raises(ValueError, match=said):
        FillMaskEvaluator("a", tmp_path / "a.tsv", at_start=False, **options).setup(
            tokenizer, None, 32
        )
