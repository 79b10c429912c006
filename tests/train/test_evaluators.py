"Evaluators measure what they say, at their intervals, and change nothing of the run."

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
from bertlab.train.evaluators import EvalBatchSpec, Evaluator, build_evaluator
from bertlab.train.evaluators import FillMaskEvaluator, LossEvaluator, ProbeEvaluator
from bertlab.train.history import History
from bertlab.train.monitors import Throughput
from bertlab.train.modules import PretrainingModule
from bertlab.train.resume import latest_checkpoint
from bertlab.train.trainer import make_trainer

TEXTS = [f"the {noun} {verb} the {another} ." for noun in ("cat", "dog", "cow") for verb in ("sees", "hears", "likes")
         for another in ("bird", "fish", "hen", "fox")]  # fmt: skip
SHAPE = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 100)


def run(tokenizer, *callbacks, steps=6, checkpoint=None, **options):
    L.seed_everything(0, verbose=False)
    module = PretrainingModule(
        model_config_kwargs=SHAPE, pretrained_tokenizer_name_or_path=tokenizer
    )
    data = PretrainingDataModule(None, tokenizer, max_sequence_length=32, train_batch_size=4)
    data.set_datasets(TEXTS, TEXTS[:6])
    history = History()
    options = {"precision": "32-true", "accelerator": "cpu", **options}
    trainer = make_trainer(steps, callbacks=[history, *callbacks], **options)
    checkpoint = checkpoint and latest_checkpoint(checkpoint)
    trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    return module, data, history, trainer


def write_table(path, rows):
    path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    return path


def prepared(evaluator, tokenizer, collator=None):
    evaluator.prepare(tokenizer, collator, 32)
    return evaluator


@torch.no_grad()
def evaluate(evaluator, module):
    return evaluator.evaluate(module.eval())


@pytest.mark.parametrize("batch", [{"rows": 5}, {"tokens": 64}])
def test_a_named_set_has_the_loss_of_a_validation_over_its_rows(tokenizer, batch):
    evaluator = LossEvaluator("held", TEXTS[:6], batch=batch)
    module, data, history, trainer = run(tokenizer, evaluator)
    expected = trainer.validate(module, data, verbose=False)[0]
    for name in ("loss", "accuracy", "perplexity", "bits_per_byte"):
        assert evaluator.rows[-1][name] == pytest.approx(expected[f"val_{name}"], rel=1e-5), name
    assert history.evaluations == evaluator.rows


def test_metrics_are_not_rounded_where_a_run_computes_in_16_bits(tokenizer):
    evaluator = LossEvaluator("held", TEXTS[:6])
    run(tokenizer, evaluator, steps=1, precision="bf16-true")
    last = evaluator.rows[-1]
    assert last["perplexity"] == pytest.approx(np.exp(last["loss"]), rel=1e-6)


def test_evaluators_change_no_loss_of_the_run(tokenizer, tmp_path):
    (tmp_path / "facts.tsv").write_text("the cat [MASK] the bird .\tsees|hears|likes\n")
    table = write_table(tmp_path / "t.csv", [(text, n % 2) for n, text in enumerate(TEXTS)])
    evaluators = [LossEvaluator("a", TEXTS[:4], every_n_steps=2), ProbeEvaluator("b", table, every_n_steps=3),
                  FillMaskEvaluator("c", tmp_path / "facts.tsv", every_n_steps=1, at_start=False)]  # fmt: skip
    losses = [run(tokenizer, *callbacks)[2].column("train_loss") for callbacks in (evaluators, [])]
    assert np.array_equal(*losses)
    steps = [evaluator.column("accuracy")[0].tolist() for evaluator in evaluators]
    assert steps == [[0, 2, 4, 6], [0, 3, 6], [1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("options", [{"stop": 3}, {"max_epochs": 2}])
def test_a_run_that_ends_early_is_evaluated_once_at_its_end(tokenizer, tmp_path, options):
    path, stop = tmp_path / "checkpoints", options.pop("stop", 50)
    for checkpoint in (None, path):  # the checkpoint is older than the last row
        evaluator = LossEvaluator("a", TEXTS[:4], every_n_steps=40)
        callbacks = [evaluator, StopAt(stop), TrainingCheckpoint(path, every_n_steps=1)]
        *_, trainer = run(tokenizer, *callbacks, steps=50, checkpoint=checkpoint, **options)
        assert 1 < trainer.global_step < 40
        assert evaluator.column("loss")[0].tolist() == [0, trainer.global_step]


class Norm(Evaluator):
    def evaluate(self, module):
        clocks = [c for c in module.trainer.callbacks if isinstance(c, (History, Throughput))]
        self.running = [clock for clock in clocks if clock._since is not None]
        return {"norm": float(sum(p.norm() for p in module.parameters()))}


def test_a_users_own_evaluator_stops_all_clocks(tokenizer):
    norm = Norm("norm", every_n_steps=3)
    run(tokenizer, norm, Throughput(every_n_steps=1))
    steps, values = norm.column("norm")
    assert steps.tolist() == [0, 3, 6] and len(set(values.tolist())) == 3 and norm.running == []


def test_an_interrupted_run_is_not_evaluated(tokenizer):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3:
                raise TrainingInterrupted(3)

    norm = Norm("norm", every_n_steps=2)
    with pytest.raises(TrainingInterrupted):
        run(tokenizer, norm, Stop())
    assert norm.column("norm")[0].tolist() == [0, 2]


def test_a_probe_reads_a_label_off_the_vectors_and_not_off_noise(tokenizer, tmp_path):
    rng, module = np.random.default_rng(0), run(tokenizer)[0]
    tables = {"nouns": [(text, text.split()[1]) for text in TEXTS * 3],
              "noise": [(text, rng.integers(2)) for text in TEXTS * 3]}  # fmt: skip
    accuracy = {}
    for name, rows in tables.items():
        probe = ProbeEvaluator(name, write_table(tmp_path / f"{name}.csv", rows))
        accuracy[name] = evaluate(prepared(probe, tokenizer), module)["accuracy"]
    assert accuracy["nouns"] > 0.95 and accuracy["noise"] < 0.8


@pytest.mark.parametrize("duration, texts", [(None, 40), (1, 8), ("600 tokens", 16)])
def test_a_probe_samples_rows_that_have_a_text_and_a_label(tokenizer, tmp_path, duration, texts):
    rows = [(TEXTS[i % 36], label) for label in ("a", "b") for i in range(20)]
    table = write_table(tmp_path / "sorted.csv", [*rows, (TEXTS[0], ""), ("", "a"), (" ", "b")])
    probe = prepared(ProbeEvaluator("p", table, batch={"rows": 8}, duration=duration), tokenizer)
    assert len(probe.texts) == len(probe.labels) == texts and set(probe.labels) == {"a", "b"}


def test_a_probe_has_the_same_vectors_where_weights_are_sharded(tokenizer, tmp_path):
    vectors = {}

    class Seen(ProbeEvaluator):
        def vectors(self, module):
            return vectors.setdefault(strategy, super().vectors(module))

    table = write_table(tmp_path / "nouns.csv", [(text, text.split()[1]) for text in TEXTS])
    for strategy in ("auto", "fsdp"):  # in one process; at the start, so before any step
        run(tokenizer, Seen("p", table), steps=1, devices=1, strategy=strategy)
    np.testing.assert_allclose(vectors["fsdp"], vectors["auto"], atol=1e-5)


@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe"])  # bpe marks the space before a word
def test_a_gap_is_right_where_the_best_guess_is_one_of_the_words(algorithm, tmp_path):
    tokenizer = train_tokenizer(TEXTS * 5, 320 if algorithm == "bpe" else 100, kind=algorithm)
    lines = "the cat [MASK] the bird .\tsees\n\nthe [MASK] sees the fox .\tcat | dog|cow\n"
    (tmp_path / "facts.tsv").write_text(lines)
    module, metrics = run(tokenizer)[0], {}
    for top_k in (1, len(tokenizer)):
        evaluator = FillMaskEvaluator("facts", tmp_path / "facts.tsv", top_k=top_k)
        metrics |= evaluate(prepared(evaluator, tokenizer), module)
    assert metrics[f"top_{len(tokenizer)}"] == 1.0 and metrics["accuracy"] == metrics["top_1"]
    best = [
        guesses[0][0] for guesses in fill_mask(module.model, tokenizer, evaluator.texts, top_k=1)
    ]
    assert metrics["accuracy"] == ((best[0] == "sees") + (best[1] in ("cat", "dog", "cow"))) / 2


@pytest.mark.parametrize(
    "duration, batches", [(None, None), (1, 1), (2, 2), ("64 tokens", 1), ("130 tokens", 2)]
)
def test_a_duration_ends_an_evaluation(tokenizer, duration, batches):
    data = run(tokenizer, steps=1)[1]
    evaluator = LossEvaluator("a", TEXTS, batch={"rows": 2}, duration=duration)
    sizes = [len(b["input_ids"]) for b in prepared(evaluator, tokenizer, data.collator).batches()]
    assert sizes == [2] * (batches or -(-len(evaluator.dataset) // 2))


def gaps(line):
    def prepare(tokenizer, path):
        (path / "a.tsv").write_text(f"the [MASK] sees .\tcat\n{line}\n")
        prepared(FillMaskEvaluator("a", path / "a.tsv"), tokenizer)

    return prepare


def one_label(tokenizer, path):
    table = write_table(path / "a.csv", [(text, text == TEXTS[0]) for text in TEXTS])
    prepared(ProbeEvaluator("p", table, batch={"rows": 2}, duration=1), tokenizer)


@pytest.mark.parametrize("make, fragment", [
    (lambda *_: build_evaluator({"kind": "los", "name": "a"}), "'los'.*did you mean 'loss'"),
    (lambda *_: build_evaluator({"kind": "loss", "name": "a", "surce": 1}), "surce|source"),
    (lambda *_: LossEvaluator("a", [], every_n_steps=0), "every_n_steps=0"),
    (lambda *_: FillMaskEvaluator("a", "", top_k=0), "top_k=0"),
    (lambda t, _: prepared(Evaluator("a", {"tokens": "8 rows"}), t), "batch: tokens='8 rows'"),
    (lambda t, _: prepared(Evaluator("a", duration="3 batches"), t), "duration='3 batches'"),
    (gaps("no gap\tword"), "line 2"), (gaps("one [MASK] only"), "line 2"),
    (gaps("two [MASK] [MASK]\tword"), "line 2"), (gaps("the [MASK]\tunheardofword"), "line 2"),
    (one_label, "p: 2 rows of .*a.csv"),
])  # fmt: skip
def test_mistakes_are_named_before_the_first_step(tokenizer, tmp_path, make, fragment):
    with pytest.raises(ValueError, match=fragment):
        make(tokenizer, tmp_path)


def test_a_batch_in_tokens_has_a_row_at_least():
    assert [EvalBatchSpec(tokens="4K").num_rows(n) for n in (128, 8000)] == [31, 1]
