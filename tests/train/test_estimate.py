"The estimate counts what a real step allocates, and moves nothing."

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from bertlab.model.activation_checkpointing import MemoryTracker
from bertlab.model.config import bert_tiny, modernbert_tiny
from bertlab.optim.optimizers import (
    OPTIMIZERS,
    backward_options,
    forward_context,
    optimizer_state_bytes,
)
from bertlab.train.checkpoints import rng_state
from bertlab.train.estimate import available_bytes, estimate_memory
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
        made = sum(p.numel() * p.element_size() for p in module.model.parameters())
        base = ledger.now - made
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
    return (peak, optimizer_state_bytes(optimizer)) if with_states else peak


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_within_a_tenth_of_a_real_step(name):
    options = {"model_config_kwargs": modernbert_tiny(**SHAPE).to_diff_dict(), **CASES[name]}
    module = PretrainingModule(**copy.deepcopy(options))
    said = estimate_memory(module, 12, 64, 0.25, "32-true", find_largest=False)
    real = real_peak(module, 12, 64, 16)
    assert abs(said.step.peak / real - 1) < 0.1, (said.step, real)


WIDE = dict(vocab_size=700, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=64)  # fmt: skip


@pytest.mark.parametrize("name, options", [
    *((name, {"momentum": 0.9} if name == "sgd" else {}) for name in OPTIMIZERS),
    ("soap", {"max_precondition_dim": 512}), ("splus", {"max_dim": 512}), ("shampoo", {"preconditioning_compute_steps": 2}),
])  # fmt: skip
def test_states_of_every_optimizer_are_counted_on_a_table_of_many_rows(name, options):
    "Statistics of Shampoo, SOAP and SPlus grow with the square of the rows, up to a bound of theirs."
    module = PretrainingModule(modernbert_tiny(**WIDE).to_diff_dict(), optimizer_class=name, optimizer_kwargs=options,
                               learning_rate=1e-3)  # fmt: skip
    said = estimate_memory(module, 2, 64, 0.25, "32-true", find_largest=False).step
    real, states = real_peak(module, 2, 64, 16, with_states=True)
    # A projection of GaLore is an object, into which `optimizer_state_bytes` does not look.
    assert states <= said.states < states + (2**15 if name == "galore" else 2**12)
    assert abs(said.peak / real - 1) < 0.02, (said, real)


@pytest.mark.parametrize("name, share", [("adamw", 2), ("lion", 1), ("adagrad", 1)])
def test_states_of_8_bits_are_tried_on_real_weights(name, share):
    pytest.importorskip("bitsandbytes")
    shape = {**SHAPE, "vocab_size": 1500}
    module = PretrainingModule(modernbert_tiny(**shape).to_diff_dict(), optimizer_class=name, learning_rate=1e-3,
                               optimizer_quantized=True)  # fmt: skip
    said = estimate_memory(module, 2, 64, 0.25, "32-true", find_largest=False).step
    _, states = real_peak(module, 2, 64, 16, with_states=True)
    assert states < 0.3 * share * said.weights and states <= said.states < 1.1 * states


def test_an_adapter_saves_gradients_and_states():
    pytest.importorskip("peft")
    kwargs = modernbert_tiny(**SHAPE).to_diff_dict()
    full, thin = (estimate_memory(PretrainingModule(copy.deepcopy(kwargs), adapter=adapter), 2, 64,
                                  precision="32-true", find_largest=False).step for adapter in (None, {"r": 2}))  # fmt: skip
    assert thin.states < full.states / 5 and thin.weights >= full.weights


def test_nothing_moves_and_nothing_is_allocated():
    module = PretrainingModule(modernbert_tiny(vocab_size=50_000, hidden_size=1024, num_attention_heads=16,
                                               intermediate_size=2048, num_hidden_layers=8).to_diff_dict())  # fmt: skip
    before, states = available_bytes(), rng_state()["torch"].clone()
    said = estimate_memory(module, 64, 512, precision="32-true", find_largest=False)
    assert said.step.peak > 2**34  # which this process never held
    assert torch.equal(states, rng_state()["torch"]) and module.model is None
    assert before is None or available_bytes() > before - 2**31


def test_the_largest_micro_batch_fits_and_more_does_not(monkeypatch):
    import bertlab.train.estimate as estimate

    module = PretrainingModule(modernbert_tiny(**SHAPE).to_diff_dict())
    room = 40 * 2**20
    monkeypatch.setattr(estimate, "process_bytes", lambda: 0)
    monkeypatch.setattr(estimate, "available_bytes", lambda device="cpu": room)
    said = estimate_memory(module, 4, 64, precision="32-true", saves_models=False)
    peak = lambda rows: (
        estimate_memory(module, rows, 64, precision="32-true", find_largest=False).step.peak
    )
    assert peak(said.largest_rows) <= room < peak(said.largest_rows + 2)


@pytest.mark.parametrize("options, word", [
    ({"rows": 0}, "rows"), ({"length": 65}, "length"), ({"label_rate": 0.0}, "label_rate"),
    ({"precision": "64-true"}, "precision"),
])  # fmt: skip
def test_what_cannot_be_estimated_is_refused(options, word):
    module = PretrainingModule(modernbert_tiny(**SHAPE).to_diff_dict())
    with pytest.raises(ValueError, match=word):
        estimate_memory(module, **{"rows": 2, "length": 64, "precision": "32-true", **options})


@pytest.mark.parametrize(
    "short, whole", [(32, "32-true"), ("32", "32-true"), ("bf16", "bf16-mixed"), (16, "16-mixed")]
)
def test_a_precision_may_be_as_short_as_a_run_takes_it(short, whole):
    module = PretrainingModule(modernbert_tiny(**SHAPE).to_diff_dict())
    found = [
        estimate_memory(module, 2, 64, precision=name, find_largest=False).step.peak
        for name in (short, whole)
    ]
    assert found[0] == found[1] > 0


def test_the_command_says_what_a_run_needs_and_writes_nothing(tmp_path):
    words = ["pretrain", "--estimate", "--run.output", str(tmp_path / "run"), "--data.train_batch_size", "4",
             "--data.max_sequence_length", "64", "--trainer.accelerator", "cpu", "--model.model_config_kwargs",
             json.dumps({k: v for k, v in SHAPE.items() if k != "vocab_size"})]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "bertlab.cli.main", *words], capture_output=True, text=True,
                          env=os.environ, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "largest micro-batch" in done.stdout and not (tmp_path / "run").exists()


@pytest.mark.parametrize("strategy, devices, shares", [("tensor:2", 4, 4), ("ddp", 8, 1)])
def test_an_estimate_says_what_a_strategy_that_divides_weights_will_divide(
    strategy, devices, shares
):
    from called import config_of

    from bertlab.cli.models import estimate_run

    words = ["text.txt", "--trainer.accelerator", "cpu", "--trainer.precision", "32-true", "--data.train_batch_size", "2",
             "--data.max_sequence_length", "64", "--trainer.strategy", strategy, "--trainer.devices", str(devices),
             "--model.model_config_kwargs",
             json.dumps({k: v for k, v in SHAPE.items() if k != "vocab_size"})]  # fmt: skip
    found = estimate_run(config_of("pretrain", words))
    step = found.step
    said = f"{shares} will divide the {(step.weights + step.gradients + step.states) / 2**20:,.0f} MiB of weights"
    assert found.shares == shares and (said in found.describe()) == (shares > 1)


@pytest.mark.parametrize("objective", ["mlm", "diffusion"])
def test_the_command_estimates_the_model_that_a_bare_run_would_build(objective):
    from called import config_of

    from bertlab.cli.models import estimate_run
    from bertlab.train.run import complete_config, resolve_config

    words = ["text.txt", "--model.objective", objective, "--trainer.accelerator", "cpu",
             "--data.train_batch_size", "2", "--data.max_sequence_length", "64"]  # fmt: skip
    config = resolve_config(complete_config(config_of("pretrain", words)))
    size = {"vocab_size": config["run"]["vocab_size"]}
    built = PretrainingModule(config["model"]["model_config_kwargs"] | size)
    built.configure_model()
    said = estimate_run(config_of("pretrain", words))
    assert said.step.weights == 4 * sum(p.numel() for p in built.parameters()) < 80e6


@pytest.mark.parametrize("peak_of", [
    lambda n: 100 + 3 * n, lambda n: max(100 + n, 7 * n, 40 * n - 9_000), lambda n: 100 + n + n * n // 50,
], ids=["even", "with kinks", "growing"])  # fmt: skip
@pytest.mark.parametrize("room", [99, 104, 900, 20_000, 10**9])
def test_the_search_for_the_largest_batch_ends_beside_the_edge_in_a_few_traces(peak_of, room):
    from bertlab.train.estimate import _largest_fitting

    asked = []

    def counted(n):
        asked.append(n)
        return peak_of(n)

    found = _largest_fitting(counted, 4, 100, room)
    assert found == 0 or peak_of(found) <= room
    assert peak_of(found + max(1, found // 50)) > room
    assert len(asked) <= 40


def test_an_estimate_says_nothing_of_micro_batches_that_nobody_looked_for():
    module = PretrainingModule(
        modernbert_tiny(
            vocab_size=128, hidden_size=32, intermediate_size=32, num_attention_heads=1
        ).to_diff_dict()
    )
    said = replace(
        estimate_memory(module, 2, 16, precision="32-true", find_largest=False), available=2**40
    )
    assert (
        said.largest_rows is None
        and "micro-batch" not in said.describe()
        and "it fits" in said.describe()
    )
    assert "no micro-batch fits" in replace(said, largest_rows=0).describe()
    assert "largest micro-batch: 7 rows" in replace(said, largest_rows=7).describe()
