"The estimate counts what a real step allocates, and moves nothing."

import copy
import json
import re
import resource
from collections import Counter
from dataclasses import replace
from functools import partial, wraps

import pytest
import torch

from bertlab.cli.main import call
from bertlab.model.activation_checkpointing import MemoryTracker
from bertlab.model.config import bert_tiny, modernbert_tiny
from bertlab.optim.optimizers import (
    OPTIMIZERS,
    backward_options,
    forward_context,
    optimizer_state_bytes,
)
from bertlab.train.checkpoints import rng_state
from bertlab.core.devices import available_memory_bytes
from bertlab.train.estimate import MemoryEstimate, StepMemory, _grown
from bertlab.train.estimate import estimate_memory
from bertlab.train.modules import PretrainingModule, build_optimizer

SHAPE = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2,
             max_position_embeddings=64)  # fmt: skip
CASES = {
    "plain": dict(),
    "bert": dict(
        model_config_kwargs=bert_tiny(
            **SHAPE, hidden_dropout=0.0, attention_dropout=0.0
        ).to_diff_dict()
    ),
    "recomputed": dict(gradient_checkpointing="full"),
    "embeddings frozen": dict(freeze="embeddings"),
    "lion": dict(optimizer_class="lion"),
    "in chunks": dict(loss_kwargs={"chunk_size": 16}),
}


def real_peak(module, rows, length, num_labels, with_states=False):
    "The most bytes of a real step's tensors, counted while they live; and of the optimizer's states."
    with MemoryTracker() as ledger:
        module.configure_model()
        num_bytes = sum(p.numel() * p.element_size() for p in module.model.parameters())
        base = ledger.now - num_bytes
        ledger.history.clear()
        optimizer = build_optimizer(module.model, module.hparams, 1000)["optimizer"]
        for _ in range(2):
            ids = torch.randint(5, 300, (rows, length))
            places = torch.rand(rows, length).argsort(1)[:, :num_labels]
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids,
                     "position_ids": torch.arange(length).expand(rows, -1).clone(), "label_positions": places}  # fmt: skip
            module.model.train()
            module.train()
            backward = backward_options(optimizer)
            with forward_context(optimizer):
                loss = module.label_loss(batch).loss_sum
            loss.backward(**backward)
            del loss
            optimizer.step()
            optimizer.zero_grad()
    peak = max(ledger.history) - base
    projectors = [s["projector"].ortho_matrix for s in optimizer.state.values() if "projector" in s]
    states = optimizer_state_bytes(optimizer) + sum(matrix.nbytes for matrix in projectors)
    return (peak, states) if with_states else peak


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_within_a_tenth_of_a_real_step(name):
    options = {"model_config_kwargs": modernbert_tiny(**SHAPE).to_diff_dict(), **CASES[name]}
    module = PretrainingModule(**copy.deepcopy(options))
    message = estimate_memory(module, 12, 64, 0.25, "32-true", find_largest=False)
    real = real_peak(module, 12, 64, 16)
    assert abs(message.step.peak / real - 1) < 0.1, (message.step, real)


WIDE = dict(vocab_size=700, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=64)  # fmt: skip


# Its step needs numbers, which weights without memory do not have: what passes is not counted.
STEPPED_ON_REAL_WEIGHTS = {"adafactor"}


@pytest.mark.parametrize("name, options", [
    *((name, {"momentum": 0.9} if name == "sgd" else {}) for name in OPTIMIZERS),
    ("soap", {"max_precondition_dim": 512}), ("galore", {"rank": 4}),
])  # fmt: skip
def test_states_are_counted_on_a_table_of_many_rows(name, options):
    "Statistics of SOAP grow with the square of the rows, up to a bound of its own."
    module = PretrainingModule(modernbert_tiny(**WIDE).to_diff_dict(), optimizer_class=name, optimizer_kwargs=options,
                               learning_rate=1e-3)  # fmt: skip
    estimate = estimate_memory(module, 2, 64, 0.25, "32-true", find_largest=False).step
    real, states = real_peak(module, 2, 64, 16, with_states=True)
    assert states <= estimate.states < states + 2**12
    if name not in STEPPED_ON_REAL_WEIGHTS:
        assert abs(estimate.peak / real - 1) < 0.02, (estimate, real)


def test_states_of_8_bits_are_two_bytes_a_weight():
    pytest.importorskip("bitsandbytes")
    module = PretrainingModule(modernbert_tiny(**SHAPE).to_diff_dict(), optimizer_quantized=True)
    step = estimate_memory(module, 2, 64, 0.25, "32-true", find_largest=False).step
    assert step.states == step.weights / 2


def test_an_adapter_saves_gradients_and_states():
    pytest.importorskip("peft")
    kwargs = modernbert_tiny(**SHAPE).to_diff_dict()
    full, thin = (estimate_memory(PretrainingModule(copy.deepcopy(kwargs), adapter=adapter), 2, 64,
                                  precision="32-true", find_largest=False).step for adapter in (None, {"r": 2}))  # fmt: skip
    assert thin.states < full.states / 5 and thin.weights >= full.weights


def test_nothing_moves_and_nothing_is_allocated():
    module = PretrainingModule(modernbert_tiny(vocab_size=50_000, hidden_size=1024, num_attention_heads=16,
                                               intermediate_size=2048, num_hidden_layers=8).to_diff_dict())  # fmt: skip
    before, states = available_memory_bytes(), rng_state()["torch"].clone()
    message = estimate_memory(module, 64, 512, precision="32-true", find_largest=False)
    assert message.step.peak > 2**34  # which this process never held
    assert torch.equal(states, rng_state()["torch"]) and module.model is None
    assert before is None or available_memory_bytes() > before - 2**31


def test_the_largest_micro_batch_fits_and_more_does_not(monkeypatch):
    import bertlab.train.estimate as estimate

    module = PretrainingModule(modernbert_tiny(**SHAPE).to_diff_dict())
    room = 40 * 2**20
    monkeypatch.setattr(estimate, "_process_bytes", lambda: 0)
    monkeypatch.setattr(estimate, "HEAP_OVERHEAD", 1.0)
    monkeypatch.setattr(estimate, "available_memory_bytes", lambda device="cpu": room)
    message = estimate_memory(module, 4, 64, precision="32-true", saves_models=False)
    peak = lambda rows: (
        estimate_memory(module, rows, 64, precision="32-true", find_largest=False).step.peak
    )
    assert peak(message.largest_rows) <= room < peak(message.largest_rows + 2)


@pytest.mark.parametrize("options, word", [
    ({"rows": 0}, "rows"), ({"length": 65}, "length"), ({"label_rate": 0.0}, "label_rate"),
    ({"precision": "64-true"}, "precision"),
])  # fmt: skip
def test_what_cannot_be_estimated_is_refused(options, word):
    module = PretrainingModule(modernbert_tiny(**SHAPE).to_diff_dict())
    with pytest.raises(ValueError, match=word):
        estimate_memory(module, **{"rows": 2, "length": 64, "precision": "32-true", **options})


@pytest.mark.parametrize(
    "short, full_name",
    [(32, "32-true"), ("32", "32-true"), ("bf16", "bf16-mixed"), (16, "16-mixed")],
)
def test_a_precision_may_be_as_short_as_a_run_takes_it(short, full_name):
    module = PretrainingModule(modernbert_tiny(**SHAPE).to_diff_dict())
    result = [
        estimate_memory(module, 2, 64, precision=name, find_largest=False).step.peak
        for name in (short, full_name)
    ]
    assert result[0] == result[1] > 0


def test_a_run_that_fits_is_measured_by_a_few_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shape = {k: v for k, v in SHAPE.items() if k != "vocab_size"}
    words = ["text.txt", "--estimate", "--data.train_batch_size", "4", "--data.max_sequence_length", "64",
             "--trainer.accelerator", "cpu", "--trainer.max_steps", "60", "--run.vocab_size", "300",
             "--model.model_config_kwargs", json.dumps(shape)]  # fmt: skip
    (tmp_path / "text.txt").write_text("not read")
    call("pretrain", words)
    printed = capsys.readouterr().out
    assert "measured in a few steps" in printed and "training takes" in printed
    assert "largest micro-batch" in printed and [p.name for p in tmp_path.iterdir()] == ["text.txt"]
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    peak = float(re.search(r"peak +([\d,]+) MiB", printed)[1].replace(",", ""))
    assert abs(peak / resident - 1) < 0.15


def test_a_heap_is_expected_to_grow_but_not_the_libraries_nor_a_gpu():
    assert _grown(peak=300, process=100) == 320 and _grown(300, 0) == 300


@pytest.mark.parametrize("command", ["finetune", "embed finetune"])
def test_runs_with_rows_are_estimated_by_their_own_batches(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = [" ".join(f"w{n * k % 50}" for k in range(3 + n % 20)) for n in range(80)]
    header, ends = (
        ("text,label", "ab") if command == "finetune" else ("query,positive", texts[::-1])
    )
    rows = [f"{text},{ends[n % len(ends)]}" for n, text in enumerate(texts)]
    (tmp_path / "rows.csv").write_text("\n".join([header, *rows]) + "\n")
    (tmp_path / "text.txt").write_text("\n".join(texts))
    call("tokenizer train", ["text.txt", "--output", "vocabulary", "--vocab_size", "60"])
    shape = json.dumps({k: v for k, v in SHAPE.items() if k != "vocab_size"})
    tokenizer = "data" if command == "finetune" else "model"
    words = ["rows.csv", "--estimate", "--trainer.accelerator", "cpu", "--data.train_batch_size", "8",
             "--data.max_sequence_length", "32", "--model.model_config_kwargs", shape,
             f"--{tokenizer}.pretrained_tokenizer_name_or_path", "vocabulary"]  # fmt: skip
    before = sorted(tmp_path.iterdir())
    call(command, words)
    printed = capsys.readouterr().out
    mib = lambda part: float(
        re.search(rf"^{part} +([\d,]+) MiB", printed, re.M)[1].replace(",", "")
    )  # noqa: E731
    assert abs(mib("states") - 2 * mib("weights")) <= 2 and "training takes" in printed
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_that_does_not_fit_takes_no_step(monkeypatch):
    monkeypatch.setattr("bertlab.train.estimate.available_memory_bytes", lambda device: 2**20)
    module = PretrainingModule(modernbert_tiny(**SHAPE).to_diff_dict())
    trainer = {"max_steps": 4, "accumulate_grad_batches": 1, "accelerator": "cpu"}
    estimate = estimate_memory(module, 2, 64, precision="32-true", trainer=trainer)
    assert estimate.measured is estimate.minutes is None and not estimate.fits
    assert module.model is None and "does not fit" in estimate.describe()


def test_measured_steps_differ_and_are_validated_and_saved(monkeypatch):
    "Sizes that differ, a validation and a saved model make the heap of a run larger."
    calls, sizes = Counter(), set()

    def count(name):
        original = getattr(PretrainingModule, name)

        @wraps(original)
        def counted(self, *args, **kwargs):
            calls[name] += 1
            if name == "training_step":
                sizes.add(int((args[0]["labels"] != -100).sum()))
            return original(self, *args, **kwargs)

        monkeypatch.setattr(PretrainingModule, name, counted)

    for name in ("training_step", "validation_step", "save_directory"):
        count(name)
    module, trainer = (
        PretrainingModule(modernbert_tiny(**SHAPE).to_diff_dict()),
        {"max_steps": 100, "accelerator": "cpu"},
    )
    estimate_memory(module, 2, 64, 0.3, "32-true", find_largest=False, trainer=trainer, val_rows=3)
    assert calls["validation_step"] == 4 and calls["save_directory"] == 1
    assert calls["training_step"] >= 4 and len(sizes) > 1


@pytest.fixture
def estimate_of(monkeypatch):
    from called import config_of

    from bertlab.cli import models

    measures = partial(estimate_memory, find_largest=False)
    untrained = lambda *args, trainer, **options: measures(*args, **options)  # noqa: E731
    monkeypatch.setattr(models, "estimate_memory", untrained)
    words = ["text.txt", "--trainer.accelerator", "cpu", "--trainer.precision", "32-true",
             "--data.train_batch_size", "2", "--data.max_sequence_length", "64"]  # fmt: skip
    return lambda *options: models.estimate_run(config_of("pretrain", [*words, *options]))


def test_an_estimate_names_what_a_strategy_divides(estimate_of):
    shape = json.dumps({k: v for k, v in SHAPE.items() if k != "vocab_size"})
    options = ["--model.model_config_kwargs", shape, "--trainer.devices", "4"]
    estimate = estimate_of("--trainer.strategy", "tensor:2", *options)
    step = estimate.step
    mib = (step.weights + step.gradients + step.states) / 2**20
    assert estimate.shares == 4 and f"4 will divide the {mib:,.0f} MiB" in estimate.describe()
    assert estimate_of("--trainer.strategy", "ddp", *options).shares == 1


def test_the_command_estimates_the_model_of_a_bare_run(estimate_of):
    built = PretrainingModule({**modernbert_tiny().to_diff_dict(), "vocab_size": 4096})
    built.configure_model()
    assert estimate_of().step.weights == 4 * sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize("peak_of", [
    lambda n: 100 + 3 * n, lambda n: max(100 + n, 7 * n, 40 * n - 9_000), lambda n: 100 + n + n * n // 50,
], ids=["even", "with kinks", "growing"])  # fmt: skip
@pytest.mark.parametrize("room", [99, 104, 900, 20_000, 10**9])
def test_the_search_for_the_largest_batch_ends_beside_the_edge_in_a_few_traces(peak_of, room):
    from bertlab.train.estimate import _largest_fitting

    tried = []

    def counted(n):
        tried.append(n)
        return peak_of(n)

    result = _largest_fitting(counted, 4, 100, room)
    assert result == 0 or peak_of(result) <= room
    assert peak_of(result + max(1, result // 50)) > room
    assert len(tried) <= 40


def test_an_estimate_says_nothing_of_micro_batches_that_nobody_looked_for():
    module = PretrainingModule(
        modernbert_tiny(
            vocab_size=128, hidden_size=32, intermediate_size=32, num_attention_heads=1
        ).to_diff_dict()
    )
    message = replace(
        estimate_memory(module, 2, 16, precision="32-true", find_largest=False), available=2**40
    )
    assert (
        message.largest_rows is None
        and "micro-batch" not in message.describe()
        and "it fits" in message.describe()
    )
    assert "no micro-batch fits" in replace(message, largest_rows=0).describe()
    assert "largest micro-batch: 7 rows" in replace(message, largest_rows=7).describe()


def test_only_what_a_step_frees_grows_in_the_heap(monkeypatch):
    "Weights and states of a wide model are allocated once; they are most of its memory."
    step = StepMemory(weights=500, gradients=100, states=1000, activations=800, head=50, passing=50)
    estimate = MemoryEstimate(step, 400, 0, None, 8, 128, None, "cpu")
    monkeypatch.setattr("sys.platform", "linux")
    assert estimate.peak == 400 + 1500 + 2300
    assert replace(estimate, measured=3900).peak == 3900
    assert replace(estimate, device="cuda").peak == 400 + step.peak
