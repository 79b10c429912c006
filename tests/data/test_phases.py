"Options that change within a run: closed forms of the step, whatever the workers and the stops."

import os
from itertools import islice

import numpy as np
import pytest
import torch
from called import config_of, pretrain
from ranks import run_on_ranks
from test_data import TOKENIZER, make_module, make_texts, original_ids, set_up, write_lines
from test_training import Stop, Texts, assert_resumes, train

from bertlab.cli.models import estimate_run
from bertlab.data.mixing import MixedDataset
from bertlab.data.module import phase_steps
from bertlab.data.packing import PackedDataset

LONGER = {
    3: {"mlm_probability": 0.15},
    5: {"max_sequence_length": 64, "mlm_probability": 0.05},
    9: {"max_sequence_length": 32},
}
SHARES = {
    4: {"mixture_weights": [1, 3], "mlm_probability": 0.15},
    9: {"mixture_weights": [1, 1], "max_sequence_length": 64},
}


def write_two(folder):
    "A source of the words w0 to w44, and one of the others."
    numbers = [[int(word[1:]) for word in text.split()] for text in make_texts(400)]
    low = [" ".join(f"w{n % 45}" for n in row) for row in numbers[:200]]
    high = [" ".join(f"w{45 + n % 45}" for n in row) for row in numbers[200:]]
    return [write_lines(folder / "low.txt", low), write_lines(folder / "high.txt", high)]


def make_phased(folder, dataset_type, **options):
    if dataset_type == "longer":
        source = write_lines(folder / "a.txt", make_texts(300))
        return set_up(source, phases=LONGER, **options)
    stream = {"streaming": True} if dataset_type == "stream" else {}
    kwargs = {"mixture_weights": [3, 1]}
    if dataset_type == "mixture":
        kwargs["max_repetition"] = 4
    else:
        kwargs["buffer_size"] = 900
    return set_up(write_two(folder), phases=SHARES, data_kwargs=kwargs, **stream, **options)


def share_of_high(batch):
    ids = original_ids(batch)
    is_high = torch.isin(
        ids, torch.tensor(TOKENIZER.convert_tokens_to_ids([f"w{n}" for n in range(45, 90)]))
    )
    return is_high.sum() / (ids > 4).sum()


def same_batches(first, second):
    return len(first) == len(second) and all(
        torch.equal(a[name], b[name]) for a, b in zip(first, second) for name in a
    )


def test_each_phase_has_its_rate_and_its_rows(tmp_path):
    data = make_phased(tmp_path, "longer")
    batches = list(islice(data.train_dataloader(), 60))
    sizes = [tuple(batch["input_ids"].shape) for batch in batches]
    assert sizes == [(4, 32)] * 5 + [(2, 64)] * 4 + [(4, 32)] * 51
    for phase, rate in ((batches[:3], 0.3), (batches[3:5], 0.15), (batches[5:], 0.05)):
        ordinary = sum((original_ids(batch) > 4).sum() for batch in phase)
        labels = sum((batch["labels"] >= 0).sum() for batch in phase)
        assert abs(labels / ordinary - rate) < 5 * (rate * (1 - rate) / ordinary) ** 0.5
    assert data.collator.rule.mlm_probability == 0.05 and data.val_dataset.capacity == 32


@pytest.mark.parametrize("dataset_type", ["mixture", "stream"])
def test_each_phase_has_its_mixture(tmp_path, dataset_type):
    batches = list(islice(make_phased(tmp_path, dataset_type).train_dataloader(), 17))
    for phase, share in ((batches[:4], 0.25), (batches[4:9], 0.75), (batches[9:], 0.5)):
        assert abs(torch.stack([share_of_high(batch) for batch in phase]).mean() - share) < 0.2


def test_no_row_of_a_mixture_comes_twice_after_a_phase_ends():
    special = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
    sources = {name: PackedDataset([[n] for n in range(9, 209)], 3, **special) for name in "ab"}
    first = MixedDataset(sources, [3, 1], max_repetition=2)
    visits = [first.locate(0, index) for index in range(100)]
    second = MixedDataset(sources, [1, 3], max_repetition=2).starting_at(1, first.passes(0, 100))
    visits += [second.locate(1, index) for index in range(100)]
    assert len(set(visits)) == 200


@pytest.mark.parametrize("dataset_type", ["longer", "mixture", "stream"])
def test_workers_and_stops_change_no_batch(tmp_path, dataset_type):
    make = lambda **options: make_phased(tmp_path, dataset_type, **options).train_dataloader()
    expected = list(islice(make(), 14))
    assert same_batches(list(islice(make(num_workers=2), 14)), expected)
    for stop in (2, 4, 5, 9, 11):  # before, at and after a phase begins
        stopped = make()
        iterator = iter(stopped)
        assert same_batches([next(iterator) for _ in range(stop)], expected[:stop])
        resumed = make()
        resumed.load_state_dict(stopped.state_dict())
        assert same_batches(list(islice(resumed, 14 - stop)), expected[stop:])


class Phased(Texts):
    def __init__(self, **options):
        super().__init__(
            phases={"40%": {"mlm_probability": 0.1}, 6: {"max_sequence_length": 64}}, **options
        )


PHASED_OPTIONS = {"accumulate_grad_batches": 2, "val_check_steps": 3}


@pytest.fixture(scope="module")
def undisturbed():
    return train(Phased(), 10, **PHASED_OPTIONS)


@pytest.mark.parametrize("stop_at", [4, 5, 6, 7])
def test_a_run_stopped_at_a_phase_is_bit_identical(undisturbed, tmp_path, stop_at):
    stop = Stop(tmp_path / "last.ckpt", stop_at, every_n_steps=1000)
    history = assert_resumes(undisturbed, Phased, 10, stop, **PHASED_OPTIONS)
    np.testing.assert_array_equal(history.column("phase"), [1] * 4 + [2] * 2 + [3] * 4)
    np.testing.assert_allclose(history.column("mlm_probability"), [0.3] * 4 + [0.1] * 6)
    np.testing.assert_array_equal(history.column("max_sequence_length"), [32] * 6 + [64] * 4)


def test_phases_begin_at_steps_and_at_shares_of_the_run():
    phases = {100: {"mlm_probability": 0.2}, "60%": {"mlm_probability": 0.1}, 0.9: {}}
    assert phase_steps(make_module("a.txt", phases=phases).config, 1000) == [0, 100, 600, 900]


@pytest.mark.parametrize("phases, words", [
    ({9: {}, 5: {}}, ["phases", "[9, 5]"]),
    ({"60%": {}, 0.5: {}}, ["phases", "60%", "0.5"]),
    ({0: {}}, ["phases", "[0]"]),
    ({"2h": {}}, ["phases", "2h"]),
    ({"soon": {}}, ["phases", "soon"]),
    ({5: {"mlm_probability": 1.2}}, ["after 5", "mlm_probability=1.2"]),
    ({5: {"mlm_probability": 0}}, ["after 5", "mlm_probability=0"]),
    ({5: {"mlm_probabilty": 0.1}}, ["after 5", "mlm_probabilty", "mlm_probability"]),
    ({5: {"max_sequence_length": 4}}, ["after 5", "max_sequence_length", "4"]),
    ({5: {"max_sequence_length": 48}}, ["after 5", "max_sequence_length=48", "train_batch_size"]),
    ({5: {"mixture_weights": {"a.txt": 1, "c.txt": 1}}}, ["after 5", "c.txt", "b.txt"]),
    ({5: {"mixture_weights": [1, -1]}}, ["after 5", "mixture_weights", "-1"]),
])  # fmt: skip
def test_a_wrong_phase_is_named_before_anything_is_read(phases, words):
    options = {"data_kwargs": {"mixture_weights": [1, 1]}, "phases": phases}
    with pytest.raises(ValueError) as error:
        make_module(["a.txt", "b.txt"], **options)
    assert all(word in str(error.value) for word in words)


def test_phases_of_a_run_need_its_length_and_order():
    config = make_module("a.txt", phases={600: {}, "50%": {}}).config
    for max_steps, word in ((None, "50%"), (1000, "[600, 500]")):
        with pytest.raises(ValueError, match="phases") as error:
            phase_steps(config, max_steps)
        assert word in str(error.value)


def test_phases_in_tokens_count_those_of_all_processes():
    phases = {
        "1024 tokens": {"max_sequence_length": 64},
        "2K tokens": {"train_batch_size": 4},
        "4096 tokens": {"mlm_probability": 0.1},
        40: {},
    }
    config = make_module("a.txt", phases=phases).config  # steps of 128 and then 256 positions
    assert phase_steps(config, None) == [0, 8, 15, 23, 40]
    assert phase_steps(config, None, num_batches=2) == [0, 4, 7, 11, 40]


def train_on_rank(folder):
    weights, history = train(Phased(batch_size=2), 8, dropout=0.0, devices=2, strategy="ddp")
    if os.environ["RANK"] == "0":
        torch.save((weights, history.column("train_loss")), folder / "two.pt")


def test_two_processes_with_phases_are_one(tmp_path):
    run_on_ranks(train_on_rank, tmp_path)
    weights, losses = torch.load(tmp_path / "two.pt", weights_only=False)
    expected, history = train(Phased(), 8, dropout=0.0)
    np.testing.assert_allclose(losses, history.column("train_loss"), rtol=1e-5)
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)


def test_a_phase_longer_than_the_positions_is_refused(tmp_path):
    source = write_lines(tmp_path / "a.txt", make_texts(40))
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
             "max_position_embeddings": 32}  # fmt: skip
    words = [source, "--data.max_sequence_length", "32", "--data.phases", "{3: {max_sequence_length: 64}}",
             "--model.model_config_kwargs", str(shape), "--run.output", tmp_path / "run"]  # fmt: skip
    with pytest.raises(ValueError, match="max_sequence_length=64 .* 32"):
        pretrain(words)


def test_the_estimate_is_that_of_the_longest_phase():
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    words = ["--trainer.accelerator", "cpu", "--trainer.max_steps", "9", "--run.vocab_size", "99",
             "--model.model_config_kwargs", str(shape)]  # fmt: skip
    sizes = lambda rows, length: [
        "--data.train_batch_size",
        rows,
        "--data.max_sequence_length",
        length,
    ]
    phases = "{2: {max_sequence_length: 64}, 6: {max_sequence_length: 16}}"
    phased = estimate_run(config_of("pretrain", [*words, *sizes(4, 32), "--data.phases", phases]))
    longest = estimate_run(config_of("pretrain", [*words, *sizes(2, 64)]))
    assert (phased.rows, phased.length) == (2, 64) and phased.step == longest.step
