"Whoever looks at a model in training leaves no trace in it."

import io
import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from test_training import CONFIG, Texts, equal, train, word_tokenizer
from torch.utils.data import DataLoader
from ranks import run_on_ranks
from stop_at import StopAt

from bertlab.train.checkpoints import TrainingCheckpoint, rng_state
from bertlab.train.history import History
from bertlab.model.mask_filling import fill_mask
from bertlab.train.modules import PretrainingModule, compile_model
from bertlab.train.previews import (
    CompileAhead,
    DiffusionPreview,
    FillMaskPreview,
    compile_ahead,
    peek,
)
from bertlab.train.monitors import inspecting
from bertlab.train.trainer import make_trainer, seed_everything

RNG = np.random.default_rng(0)
WORDS = ["".join(RNG.choice(list("abcdefgh"), RNG.integers(2, 6))) for _ in range(150)]  # of Texts
TOKENIZER = word_tokenizer(WORDS)
ONE, TWO = f"{WORDS[0]} [MASK] {WORDS[1]}", f"{WORDS[2]} [MASK] [MASK]"


def tiny(**options):
    return PretrainingModule({**CONFIG, "embedding_dropout": 0.1}, learning_rate=3e-3,
                             scheduler_warmup_steps=2, **options)  # fmt: skip


def states_now():
    "The generators' states as plain numbers."
    states = rng_state()
    kind, keys, *rest = states["numpy"]
    return states["python"], (kind, keys.tolist(), *rest), states["torch"].tolist()


class Draws(Callback):
    "Keeps the state of all generators before each batch."

    def __init__(self):
        self.states = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.states.append(states_now())


def test_a_run_with_previews_and_compiled_ahead_has_the_same_bits(tmp_path):
    plain, watched = Draws(), Draws()
    weights, record = train(Texts(), 9, [plain], val_check_steps=3)
    looks = [
        CompileAhead(),
        FillMaskPreview([ONE, TWO], TOKENIZER, 2),
        DiffusionPreview([TWO], TOKENIZER, 3),
    ]
    again, seen = train(Texts(), 9, [watched, *looks], val_check_steps=3)
    assert equal(weights, again) and plain.states == watched.states
    np.testing.assert_array_equal(record.column("train_loss"), seen.column("train_loss"))
    assert record.validation == seen.validation
    assert [e["step"] for e in looks[1].rows] == [0, 2, 4, 6, 8, 9]
    assert [e["step"] for e in looks[2].rows] == [0, 3, 6, 9]
    assert set(looks[0].seconds) == {"train", "train_again", "validation", "validation_again"}


def test_a_resumed_run_that_compiles_ahead_goes_on_with_the_very_next_batch(tmp_path):
    path, make = (
        tmp_path / "last.ckpt",
        lambda: FillMaskPreview([ONE], TOKENIZER, 3, path=tmp_path / "p.jsonl"),
    )
    weights, _ = train(Texts(), 13)  # an epoch has 10 batches
    train(Texts(), 7, [CompileAhead(), make(), TrainingCheckpoint(path)])
    preview = make()
    resumed, _ = train(
        Texts(), 13, [CompileAhead(), preview, TrainingCheckpoint(path)], path, seed=5
    )
    assert equal(weights, resumed)
    assert [e["step"] for e in preview.rows] == [0, 3, 6, 7, 9, 12, 13]
    rows = [json.loads(line) for line in Path(tmp_path, "p.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [e["step"] for e in preview.rows] and rows[0]["texts"] == [
        ONE
    ]


def test_a_preview_looks_once_at_the_end_of_a_run_that_a_limit_ends(tmp_path):
    path, looks = tmp_path / "last.ckpt", []
    for kept in (
        None,
        path,
    ):  # a resume has no step left, and its checkpoint is older than the look
        looks.append(FillMaskPreview([ONE], TOKENIZER, 40))
        stops = [StopAt(1), looks[-1], TrainingCheckpoint(path, every_n_steps=1)]
        train(Texts(), 30, stops, kept)
        assert [entry["step"] for entry in looks[-1].rows] == [0, 1]


class Counted:
    "A stand-in for a compiler, which counts graphs and changes nothing."

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def test_a_preview_compiles_nothing_and_what_was_compiled_ahead_is_not_compiled_again():
    graphs = {}
    for name, callbacks in {
        "plain": [],
        "ahead": [CompileAhead(), FillMaskPreview([ONE, TWO], TOKENIZER, 2)],
    }.items():
        torch._dynamo.reset()
        counted = Counted()
        seed_everything(0)
        module = tiny()
        module.configure_model()
        compile_model(module.model, backend=counted)
        marks = Marks(counted)
        make_trainer(5, "32-true", "cpu", callbacks=[*callbacks, marks], val_check_steps=2).fit(
            module, Texts()
        )
        graphs[name] = marks.seen
    torch._dynamo.reset()
    assert graphs["plain"][0] == 0 < graphs["plain"][-1]
    assert graphs["ahead"] == [graphs["plain"][-1]] * len(graphs["plain"]), "all of it came first"


class Marks(Callback):
    def __init__(self, counted):
        self.counted, self.seen = counted, []

    def on_train_batch_start(self, *_):
        self.seen.append(self.counted.graphs)


def test_an_answer_is_that_of_the_finished_model_without_dropout():
    preview = FillMaskPreview([ONE, TWO], TOKENIZER, 100, top_k=7)
    seed_everything(0)
    module = tiny()
    make_trainer(3, "32-true", "cpu", callbacks=[preview]).fit(module, Texts())
    [expected] = fill_mask(module.model.eval(), TOKENIZER, [ONE], 7)
    (got,), two = preview.rows[-1]["answers"]
    assert [w for w, _ in got] == [w for w, _ in expected] and len(two) == 2
    np.testing.assert_allclose([p for _, p in got], [p for _, p in expected], rtol=1e-5)
    steps, p = preview.probability(got[0][0])
    assert steps.tolist() == [0, 3] and p[-1] == pytest.approx(got[0][1])
    assert np.isnan(preview.probability("no such word")[1]).all()


def test_averaged_weights_answer_where_the_optimizer_keeps_them():
    class Swapped(PretrainingModule):
        inside = 0

        def evaluation_weights(self):
            from contextlib import contextmanager

            @contextmanager
            def swap():
                Swapped.inside += 1
                bias = (
                    self.model.head.decoder_bias
                    if hasattr(self.model.head, "decoder_bias")
                    else None
                )
                kept = [p.detach().clone() for p in self.model.parameters()]
                with torch.no_grad():
                    for p in self.model.parameters():
                        p.zero_()
                yield bias
                with torch.no_grad():
                    for p, k in zip(self.model.parameters(), kept):
                        p.copy_(k)

            return swap()

    preview = FillMaskPreview([ONE], TOKENIZER, 2, top_k=3)
    module = Swapped(CONFIG, scheduler_warmup_steps=0)
    make_trainer(2, "32-true", "cpu", callbacks=[preview]).fit(module, Texts())
    ((got,),) = preview.rows[-1]["answers"]
    assert Swapped.inside == 2 and np.allclose([p for _, p in got], 1 / 256), (
        "zero weights know nothing"
    )


def test_a_diffusion_preview_fills_every_gap_and_keeps_the_rest():
    preview = DiffusionPreview([TWO, ONE], TOKENIZER, 2, num_steps=3)
    seed_everything(0)
    module = tiny(objective="mlm")
    make_trainer(4, "32-true", "cpu", callbacks=[preview]).fit(module, Texts())
    for entry in preview.rows:
        first, second = (answer.split() for answer in entry["answers"])
        assert len(first) == len(second) == 3 and "[MASK]" not in first + second
        assert first[0] == WORDS[2] and second[::2] == [WORDS[0], WORDS[1]]


@pytest.mark.parametrize("make, message", [
    (lambda: FillMaskPreview(["no gap"], TOKENIZER), "must hold"),
    (lambda: FillMaskPreview(ONE, TOKENIZER), "list of one or more strings"),
    (lambda: DiffusionPreview([" ".join([ONE] * 40)], TOKENIZER), "shorten it"),
    (lambda: FillMaskPreview([ONE], TOKENIZER, 0), "every_n_steps"),
])  # fmt: skip
def test_a_mistake_is_told_before_the_first_step(make, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(3, accelerator="cpu", callbacks=[make(), Never()]).fit(tiny(), Texts())


def test_a_preview_that_finds_no_tokenizer_is_refused_before_the_first_step():
    data = Texts()
    data.setup("fit")
    trainer = make_trainer(3, accelerator="cpu", callbacks=[FillMaskPreview([ONE]), Never()])
    with pytest.raises(ValueError, match="tokenizer="):
        trainer.fit(tiny(), data.train_dataloader())  # loaders alone know no tokenizer


class Never(Callback):
    def on_train_batch_start(self, *_):
        raise AssertionError("training has begun")


def test_answers_are_printed_unless_a_preview_is_quiet(capsys):
    for quiet in (False, True):
        preview = FillMaskPreview([ONE], TOKENIZER, 2, quiet=quiet)
        make_trainer(2, "32-true", "cpu", callbacks=[preview]).fit(tiny(), Texts())
        assert (ONE in capsys.readouterr().out) != quiet and len(preview.rows) == 2


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252"])
def test_a_letter_that_the_screen_lacks_ends_no_run(encoding, monkeypatch):
    class Odd(FillMaskPreview):
        def describe(self, answers):
            return ["\u7b2c é ”"]

    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding=encoding))
    trainer = make_trainer(2, "32-true", "cpu", callbacks=[Odd([ONE], TOKENIZER, 2)])
    trainer.fit(tiny(), Texts())
    assert (
        trainer.global_step == 2 and printed.getvalue().decode(encoding).count("\n  \\u7b2c ") == 2
    )


def test_tokens_that_read_alike_are_one_word_of_a_preview():
    preview = FillMaskPreview([ONE], TOKENIZER)
    preview.rows = [{"step": 0, "answers": [[[["the", 0.25], ["a", 0.125], ["the", 0.125]]]]},
                       {"step": 2, "answers": [[[["a", 0.5], ["b", 0.25]]]]}]  # fmt: skip
    steps, found = preview.probability("the")
    assert steps.tolist() == [0, 2] and found[0] == 0.375 and np.isnan(found[1])


def test_inspecting_restores_generators_and_modes():
    module, trainer = tiny(), make_trainer(1, "32-true", "cpu")
    module.configure_model()
    module.train()
    module.model.encoder.eval()  # frozen by somebody
    modes, states = [m.training for m in module.modules()], states_now()
    with inspecting(trainer, module):
        assert not any(m.training for m in module.modules()) and not torch.is_grad_enabled()
        torch.rand(1), np.random.rand()
    assert [m.training for m in module.modules()] == modes and states_now() == states


@pytest.mark.parametrize("num_workers", [0, 1])
def test_peeking_gives_the_next_batch_and_does_not_take_it(num_workers):
    loader, expected = (
        Texts(num_workers=num_workers).train_dataloader(),
        list(Texts().train_dataloader()),
    )
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    seen = peek(loader)
    assert torch.equal(seen["input_ids"], expected[3]["input_ids"])
    assert torch.equal(next(iter(loader))["input_ids"], expected[3]["input_ids"])


def test_peeking_into_a_plain_loader_leaves_its_generator_alone():
    make = lambda: DataLoader(
        range(20), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    plain, peeked = make(), make()
    peek(peeked)
    assert [b.tolist() for b in plain] == [b.tolist() for b in peeked]
    with pytest.raises(ValueError, match="several loaders"):
        peek({"a": plain})


def test_compile_ahead_refuses_a_module_that_it_cannot_run():
    with pytest.raises(ValueError, match="Linear has no label_loss"):
        compile_ahead(torch.nn.Linear(2, 2), {})


def test_compiling_ahead_is_refused_where_it_would_do_nothing():
    on_tpu = SimpleNamespace(label_loss=None, device=torch.device("xla"))
    with pytest.raises(ValueError, match="nothing on a TPU; set compile_ahead=False"):
        compile_ahead(on_tpu, {})


def two(folder):
    "What each of two processes does: looks at a run whose weights are copied, then spread."
    from bertlab.train.histograms import WeightHistograms
    from bertlab.train.monitors import MemoryMonitor, Throughput

    class Recorded(Throughput):
        looks = ()

        def observe(self, trainer, pl_module):
            row = super().observe(trainer, pl_module)
            self.looks = (*self.looks, self._window[-1])
            return row

    results = {}
    for strategy in ("ddp", "fsdp"):
        for watched in (False, True):
            seed_everything(0)
            preview, speed = (
                FillMaskPreview([ONE], TOKENIZER, 2, path=folder / "p.jsonl"),
                Recorded(2),
            )
            shapes = WeightHistograms(["*"], 2)
            looks = [
                CompileAhead(),
                preview,
                DiffusionPreview([TWO], TOKENIZER, 2),
                speed,
                MemoryMonitor(2),
                shapes,
            ]
            history = History()
            trainer = make_trainer(
                4, "32-true", "cpu", 2, [history, *looks[: 6 * watched]], strategy=strategy
            )
            trainer.fit(tiny(), Texts())
            norms = [(s.name, s.kind, s.norm) for s in shapes.histograms if s.step == 4]
            results[strategy, watched] = (
                history.column("train_loss"),
                preview.rows,
                np.diff(speed.looks, axis=0).tolist() if watched else [],
                norms,
            )
    Path(folder, f"{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(results))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run_on_ranks(two, folder)
    return [pickle.loads(Path(folder, f"{r}.pickle").read_bytes()) for r in range(2)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_are_looked_at_without_a_trace_and_the_first_one_keeps(ranks, strategy):
    plain, watched = (ranks[0][strategy, w] for w in (False, True))
    np.testing.assert_array_equal(plain[0], watched[0])
    assert [e["step"] for e in watched[1]] == [0, 2, 4] and ranks[1][strategy, True][1] == []
    assert watched[2] and not ranks[1][strategy, True][3], "the first process keeps histograms"
    for key in ("answers",):
        (((ours, *_),),) = [e[key][0] for e in watched[1][-1:]]
        assert 0 < ours[1] < 1


def test_spread_weights_look_like_copied_ones(ranks):
    ddp, fsdp = (ranks[0][s, True] for s in ("ddp", "fsdp"))
    assert [row[:2] for row in ddp[3]] == [row[:2] for row in fsdp[3]]
    np.testing.assert_allclose([row[2] for row in ddp[3]], [row[2] for row in fsdp[3]], rtol=1e-3)
    for a, b in zip(ddp[1], fsdp[1]):
        np.testing.assert_allclose(
            [p for _, p in a["answers"][0][0]], [p for _, p in b["answers"][0][0]], rtol=1e-3
        )


def test_two_processes_count_the_tokens_of_both(ranks):
    for strategy in ("ddp", "fsdp"):
        first, second = ([i[1:] for i in r[strategy, True][2]] for r in ranks)
        assert first == second
        batches = []  # rows are dealt in turns: a step of two processes is two batches of one
        loader = Texts().train_dataloader()
        while len(batches) < 8:
            batches += list(loader)
        tokens = [
            sum(int((b["attention_mask"] > 0).sum()) for b in batches[2 * i : 2 * j])
            for i, j in ((1, 2), (2, 4))
        ]
        assert [i[0] for i in first] == tokens
        assert [i[1] for i in first] == [2 * 4 * 32, 4 * 4 * 32]
