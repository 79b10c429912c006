"Metrics: values by hand, and by numpy."

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bertlab.model.metrics import bits_per_byte, perplexity, unigram_counts, unigram_entropy

NOTEBOOK = Path(__file__).parents[2] / "nbs/model/05_metrics.ipynb"


def test_entropy_of_equal_counts_is_the_logarithm_of_their_number():
    assert unigram_entropy(torch.full((8,), 3)) == pytest.approx(math.log(8))


def test_entropy_of_two_one_one_is_one_and_a_half_bits():
    assert unigram_entropy(torch.tensor([2, 0, 1, 1])) == pytest.approx(1.5 * math.log(2))


def test_a_text_of_one_word_has_no_entropy():
    assert all(unigram_entropy(torch.tensor([0, n, 0])) == 0.0 for n in (1, 3, 7, 1000, 12_345_679))


def test_an_empty_text_is_answered():
    with pytest.raises(ValueError, match="no token"):
        unigram_entropy(torch.zeros(4, dtype=torch.int64))


def test_counts_beyond_the_precision_of_float32_are_exact():
    counts = torch.tensor([2**30 + 1, 2**30 - 1, 1])
    p = counts.double().numpy() / counts.sum().item()
    assert unigram_entropy(counts) == pytest.approx(-(p * np.log(p)).sum(), rel=1e-12)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30).filter(any), st.randoms())
def test_entropy_lies_between_zero_and_the_uniform_and_no_constant_beats_it(counts, random):
    p = np.array(counts) / sum(counts)
    entropy = unigram_entropy(torch.tensor(counts))
    seen = np.count_nonzero(counts)
    assert 0 <= entropy <= math.log(seen) + 1e-12
    q = np.array([random.random() + 1e-3 for _ in counts])
    assert -(p * np.log(q / q.sum())).sum() >= entropy - 1e-12


def test_special_tokens_and_ignored_labels_are_not_counted():
    batch = torch.tensor([[0, 5, 3, 3, 1], [0, 4, 1, 2, 2]])
    assert unigram_counts(batch, 6, excluded_ids=[0, 1, 2]).tolist() == [0, 0, 0, 2, 1, 1]
    labels = torch.tensor([[-100, 5, -100], [-100, -100, -100]])
    assert unigram_counts(labels, 6).tolist() == [0, 0, 0, 0, 0, 1]


def test_counts_add_up_over_batches():
    ids = torch.randint(7, (10, 5), generator=torch.Generator().manual_seed(0))
    parts = sum(unigram_counts(part, 7, (2,)) for part in ids.split(3))
    assert torch.equal(parts, unigram_counts(ids, 7, (2,)))


def test_an_empty_batch_counts_nothing():
    assert unigram_counts(torch.empty(0, dtype=torch.int64), 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "ids, excluded, word",
    [([6], (), "ids must lie in 0 ... 5"), ([-1], (), "got -1"), ([1], (6,), "excluded_ids"), ([1], (-1,), "excluded_ids")],
)  # fmt: skip
def test_ids_outside_the_vocabulary_are_answered(ids, excluded, word):
    with pytest.raises(ValueError, match=word):
        unigram_counts(torch.tensor(ids), 6, excluded)


def test_perplexity_of_a_uniform_guess_is_the_number_of_choices():
    assert perplexity(math.log(30_522)) == pytest.approx(30_522)
    assert perplexity(0.0) == 1.0
    assert perplexity(1e4) == math.inf


def test_bits_per_byte_by_hand():
    # Four tokens at two bits each, over the five bytes of "héla".
    assert bits_per_byte(4 * math.log(4), len("héla".encode())) == pytest.approx(8 / 5)
    with pytest.raises(ValueError, match="num_bytes"):
        bits_per_byte(1.0, 0)


def test_the_folded_solution_passes_its_check():
    cells = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]]
    exercise = next(text for text in cells if "def check_cross_entropy" in text)
    folded = next(text for text in cells if "<summary>Solution</summary>" in text)
    names = {"torch": torch, "math": math}
    exec(exercise, names)
    assert names["check_cross_entropy"]() == "not attempted"
    exec(folded.split("```python")[1].split("```")[0], names)
    assert names["check_cross_entropy"]() == "right"
