"A preview of a model in training leaves no trace in the run."

import io
import json
import os
import pickle
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from test_training import CONFIG, Texts, equal, train, word_tokenizer
from ranks import run_on_ranks
from stop_at import StopAt

from bertlab.train.checkpoints import TrainingCheckpoint, rng_state
from bertlab.train.histograms import WeightHistograms
from bertlab.train.history import History
from bertlab.model.mask_filling import fill_mask
from bertlab.train.modules import PretrainingModule, compile_model
from bertlab.train.monitors import MemoryMonitor, Throughput, inspecting
from bertlab.train.previews import CompileAhead, DiffusionPreview, FillMaskPreview
from bertlab.train.trainer import make_trainer, seed_everything

RNG = np.random.default_rng(0)
WORDS = ["".join(RNG.choice(list("abcdefgh"), RNG.integers(2, 6))) for _ in range(150)]  # of Texts
TOKENIZER = word_tokenizer(WORDS)
ONE, TWO = f"{WORDS[0]} [MASK] {WORDS[1]}", f"{WORDS[2]} [MASK] [MASK]"


def tiny(**options):
    return PretrainingModule({**CONFIG, "embedding_dropout": 0.1}, learning_rate=3e-3,
                             scheduler_warmup_steps=2, **options)  # fmt: skip


def fit(steps, *callbacks, module=None, data=None):
    seed_everything(0)
    module = module or tiny()
    trainer = make_trainer(steps, "32-true", "cpu", callbacks=callbacks)
    trainer.fit(module, data or Texts())
    return trainer, module


def generator_states():
    states = rng_state()
    name, keys, *remaining = states["numpy"]
    return states["python"], (name, keys.tolist(), *remaining), states["torch"].tolist()


class Draws(Callback):
    "Keeps the state of all generators after each batch."

    def __init__(self):
        self.states = []

    def on_train_batch_end(self, *_):
        self.states.append(generator_states())


def test_previews_and_compiling_ahead_keep_the_bits():
    plain, watched = Draws(), Draws()
    weights, record = train(Texts(), 9, [plain], val_check_steps=3)
    fill, writer = FillMaskPreview([ONE, TWO], TOKENIZER, 2), DiffusionPreview([TWO], TOKENIZER, 3)
    callbacks = [watched, CompileAhead(), fill, writer]
    again, seen = train(Texts(), 9, callbacks, val_check_steps=3)
    assert equal(weights, again) and plain.states == watched.states
    np.testing.assert_array_equal(record.column("train_loss"), seen.column("train_loss"))
    assert record.validation == seen.validation
    assert [row["step"] for row in fill.rows] == [0, 2, 4, 6, 8, 9]
    assert [row["step"] for row in writer.rows] == [0, 3, 6, 9]


def test_a_resumed_run_keeps_its_bits_and_its_previews(tmp_path):
    path = tmp_path / "last.ckpt"
    make = lambda: FillMaskPreview([ONE], TOKENIZER, 3, path=tmp_path / "p.jsonl")
    weights, _ = train(Texts(), 13)  # an epoch has 10 batches
    train(Texts(), 7, [CompileAhead(), make(), TrainingCheckpoint(path)])
    preview = make()
    resumed, _ = train(
        Texts(), 13, [CompileAhead(), preview, TrainingCheckpoint(path)], path, seed=5
    )
    assert equal(weights, resumed)
    assert [row["step"] for row in preview.rows] == [0, 3, 6, 7, 9, 12, 13]
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [row["step"] for row in preview.rows]
    assert rows[0]["texts"] == [ONE]


def test_a_preview_is_shown_once_where_a_limit_ends_the_run(tmp_path):
    path = tmp_path / "last.ckpt"
    for checkpoint in (None, path):  # a resume takes no step
        preview = FillMaskPreview([ONE], TOKENIZER, 40)
        callbacks = [StopAt(1), preview, TrainingCheckpoint(path, every_n_steps=1)]
        train(Texts(), 30, callbacks, checkpoint)
        assert [row["step"] for row in preview.rows] == [0, 1]


class Graphs(Callback):
    "A stand-in for a compiler, which counts graphs; their number after each batch."

    def __init__(self):
        self.count, self.seen = 0, []

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward

    def on_train_batch_end(self, *_):
        self.seen.append(self.count)


def test_a_preview_compiles_nothing():
    graphs = []
    for callbacks in ([], [CompileAhead(), FillMaskPreview([ONE, TWO], TOKENIZER, 2)]):
        torch._dynamo.reset()
        backend, module = Graphs(), tiny()
        module.configure_model()
        compile_model(module.model, backend=backend)
        fit(4, *callbacks, backend, module=module)
        graphs.append(backend.seen)
    torch._dynamo.reset()
    assert graphs[0] == graphs[1] and graphs[0][0] > 0


def test_an_answer_is_that_of_the_finished_model_without_dropout():
    preview = FillMaskPreview([ONE, TWO], TOKENIZER, 100, top_k=7)
    _, module = fit(3, preview)
    [expected] = fill_mask(module.model.eval(), TOKENIZER, [ONE], 7)
    (answer,), gaps = preview.rows[-1]["answers"]
    assert [word for word, _ in answer] == [word for word, _ in expected] and len(gaps) == 2
    np.testing.assert_allclose([p for _, p in answer], [p for _, p in expected], rtol=1e-5)
    steps, p = preview.probability(answer[0][0])
    assert steps.tolist() == [0, 3] and p[-1] == pytest.approx(answer[0][1])
    assert np.isnan(preview.probability("no such word")[1]).all()


def test_averaged_weights_answer_where_there_are_any():
    class Zeroed(PretrainingModule):
        @contextmanager
        def evaluation_weights(self):
            weights = [p.detach().clone() for p in self.model.parameters()]
            with torch.no_grad():
                torch._foreach_zero_(list(self.model.parameters()))
                yield
                torch._foreach_copy_(list(self.model.parameters()), weights)

    preview = FillMaskPreview([ONE], TOKENIZER, 2, top_k=3)
    fit(2, preview, module=Zeroed(CONFIG, scheduler_warmup_steps=0))
    ((answer,),) = preview.rows[-1]["answers"]
    assert np.allclose([p for _, p in answer], 1 / 256), "zero weights know nothing"


def test_a_diffusion_preview_fills_every_gap_and_keeps_the_rest():
    preview = DiffusionPreview([TWO, ONE], TOKENIZER, 2, num_steps=3)
    fit(4, preview)
    for row in preview.rows:
        first, second = (answer.split() for answer in row["answers"])
        assert len(first) == len(second) == 3 and "[MASK]" not in first + second
        assert first[0] == WORDS[2] and second[::2] == [WORDS[0], WORDS[1]]


class Never(Callback):
    def on_train_batch_start(self, *_):
        raise AssertionError("training has begun")


@pytest.mark.parametrize("make, fragment", [
    (lambda: FillMaskPreview(["no gap"], TOKENIZER), "no gap"),
    (lambda: DiffusionPreview([" ".join([ONE] * 40)], TOKENIZER), "shorten it"),
    (lambda: FillMaskPreview([ONE], TOKENIZER, 0), "every_n_steps=0"),
    (lambda: DiffusionPreview([ONE], TOKENIZER, sampler="best"), "sampler='best'"),
    (lambda: FillMaskPreview([ONE]), "tokenizer="),
])  # fmt: skip
def test_mistakes_are_named_before_the_first_step(make, fragment):
    data = Texts()
    data.setup("fit")
    with pytest.raises(ValueError, match=fragment):
        fit(3, make(), Never(), data=data.train_dataloader())  # a loader has no tokenizer


def test_answers_are_printed_unless_a_preview_is_quiet(capsys):
    for quiet in (False, True):
        preview = FillMaskPreview([ONE], TOKENIZER, 2, quiet=quiet)
        fit(2, preview)
        assert (ONE in capsys.readouterr().out) != quiet and len(preview.rows) == 2


def test_a_letter_that_the_screen_lacks_ends_no_run(monkeypatch):
    class Odd(FillMaskPreview):
        def describe(self, answers):
            return ["\u7b2c"]

    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding="ascii"))
    fit(2, Odd([ONE], TOKENIZER, 2))
    assert printed.getvalue().decode("ascii").count("\\u7b2c") == 2


def test_tokens_that_read_alike_are_one_word_of_a_preview():
    preview = FillMaskPreview([ONE], TOKENIZER)
    preview.rows = [{"step": 0, "answers": [[[["the", 0.25], ["a", 0.125], ["the", 0.125]]]]},
                    {"step": 2, "answers": [[[["a", 0.5], ["b", 0.25]]]]}]  # fmt: skip
    steps, p = preview.probability("the")
    assert steps.tolist() == [0, 2] and p[0] == 0.375 and np.isnan(p[1])


def test_inspecting_restores_generators_and_modes():
    module, trainer = tiny(), make_trainer(1, "32-true", "cpu")
    module.configure_model()
    module.train()
    module.model.encoder.eval()  # frozen
    modes, states = [m.training for m in module.modules()], generator_states()
    with inspecting(trainer, module):
        assert not any(m.training for m in module.modules()) and not torch.is_grad_enabled()
        torch.rand(1), np.random.rand()
    assert [m.training for m in module.modules()] == modes and generator_states() == states


# ---- two processes ---------------------------------------------------------------------------------


class Recorded(Throughput):
    "Keeps what each look reads: tokens, positions, ..."

    def __init__(self, *args):
        super().__init__(*args)
        self.looks = []

    def _read(self, trainer):
        self.looks.append(super()._read(trainer))
        return self.looks[-1]


def worker(folder):
    results = {}
    for strategy in ("ddp", "fsdp"):
        for is_watched in (False, True):
            seed_everything(0)
            preview = FillMaskPreview([ONE], TOKENIZER, 2, path=folder / "p.jsonl")
            speed, histograms, history = Recorded(2), WeightHistograms(["*"], 2), History()
            watchers = [CompileAhead(), preview, DiffusionPreview([TWO], TOKENIZER, 2), speed,
                        MemoryMonitor(2), histograms]  # fmt: skip
            callbacks = [history, *watchers[: 6 * is_watched]]
            trainer = make_trainer(4, "32-true", "cpu", 2, callbacks, strategy=strategy)
            trainer.fit(tiny(), Texts())
            results[strategy, is_watched] = {
                "losses": history.column("train_loss"),
                "rows": preview.rows,
                "looks": np.array(speed.looks),
                "norms": [(h.name, h.kind, h.norm) for h in histograms.histograms if h.step == 4],
            }
    Path(folder, f"{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(results))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run_on_ranks(worker, folder)
    return [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(2)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_are_watched_without_a_trace(ranks, strategy):
    plain, watched = (ranks[0][strategy, is_watched] for is_watched in (False, True))
    np.testing.assert_array_equal(plain["losses"], watched["losses"])
    assert [row["step"] for row in watched["rows"]] == [0, 2, 4]
    assert watched["rows"] == ranks[1][strategy, True]["rows"]


def test_sharded_weights_look_like_copied_ones(ranks):
    ddp, fsdp = (ranks[0][strategy, True] for strategy in ("ddp", "fsdp"))
    assert [row[:2] for row in ddp["norms"]] == [row[:2] for row in fsdp["norms"]] != []
    norms = [[row[2] for row in result["norms"]] for result in (ddp, fsdp)]
    np.testing.assert_allclose(*norms, rtol=1e-3)
    answers = [
        [p for row in result["rows"] for _, p in row["answers"][0][0]] for result in (ddp, fsdp)
    ]
    np.testing.assert_allclose(*answers, rtol=1e-3)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_count_the_tokens_of_both(ranks, strategy):
    first, second = (result[strategy, True]["looks"] for result in ranks)
    np.testing.assert_array_equal(first, second)
    batches = list(Texts().train_dataloader())  # rows are dealt in turns: two batches a step
    tokens = [int((batch["attention_mask"] > 0).sum()) for batch in batches[:8]]
    assert first[:, 0].tolist() == [sum(tokens[: 2 * step]) for step in (1, 2, 4)]  # steps 1, 2, 4
    assert first[:, 1].tolist() == [2 * step * 4 * 32 for step in (1, 2, 4)]
