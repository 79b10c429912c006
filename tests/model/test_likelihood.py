"The bound against every order, its error against its scatter, and counts worked out by hand."

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bertlab.data.diffusion import NOISE_SCHEDULES, DiffusionConfig, elbo_weight, mask_probability
from bertlab.data.rows import Vocabulary
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.likelihood import diffusion_nll_bound

TABLE = torch.from_numpy(np.random.default_rng(3).normal(size=(5**5, 5, 9))).float() * 1.5
TOY = Vocabulary(9, pad_token_id=0, mask_token_id=4, special_token_ids=(1, 2, 3))
PLACES = torch.tensor([625, 125, 25, 5, 1])


class Tables(torch.nn.Module):
    "Scores of five places from a random table of all states, masks included."

    def forward(self, input_ids, attention_mask=None):
        return SimpleNamespace(logits=TABLE[((input_ids - 4).clamp(min=0) * PLACES).sum(1)])


def cost(state: list, position: int, word: int) -> float:
    scores = TABLE[int(((torch.tensor(state) - 4) * PLACES).sum()), position, 5:].double()
    return -(scores[word - 5] - scores.logsumexp(0)).item()


def all_orders(text: list[int]) -> float:  # nats: mean over 120 orders of the chain rule
    total = 0.0
    for order in itertools.permutations(range(5)):
        state = [4] * 5
        for position in order:
            total += cost(state, position, text[position])
            state[position] = text[position]
    return total / 120


TEXT = [6, 8, 5, 6, 7]


@pytest.mark.parametrize("schedule", NOISE_SCHEDULES)
def test_the_training_loss_integrates_to_the_mean_over_orders(schedule):
    # Every set of masked tokens at every time of a fine grid, weighted as `noise_batch` does.
    config = DiffusionConfig(noise_eps=0.0, sampling_eps=0.0, schedule=schedule)
    costs = {}
    for masked in itertools.product([False, True], repeat=5):
        state = [4 if is_masked else word for is_masked, word in zip(masked, TEXT)]
        costs[masked] = sum(cost(state, i, TEXT[i]) for i in range(5) if masked[i])
    times = (np.arange(20_000) + 0.5) / 20_000
    share = mask_probability(times, config.noise_eps, schedule)
    weight = elbo_weight(times, schedule)
    total = sum(
        c * (weight * share ** sum(masked) * (1 - share) ** (5 - sum(masked))).mean()
        for masked, c in costs.items()
    )
    assert total == pytest.approx(all_orders(TEXT), abs=1e-4)


def test_the_bound_is_the_mean_over_orders_within_its_error():
    truth, rows = all_orders(TEXT), torch.tensor([TEXT] * 8)
    results = [diffusion_nll_bound(Tables(), rows, TOY, num_draws=8, seed=n) for n in range(60)]
    means = np.array([result.nats.mean() for result in results])
    errors = np.array([result.standard_error * 5 for result in results])
    scatter = means.std(ddof=1)
    assert abs(means.mean() - truth) < 4 * scatter / math.sqrt(60)
    # The scatter of 60 means is known to about 9 %; four times that, and the error's own scatter.
    assert 0.6 < scatter / math.sqrt((errors**2).mean()) < 1.45


class Uniform(torch.nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, input_ids, attention_mask=None):
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, self.vocab_size))


def test_padding_and_special_tokens_cost_nothing():
    ids = torch.tensor([[1, 6, 7, 8, 2, 0, 0], [1, 5, 2, 0, 0, 0, 0]])
    result = diffusion_nll_bound(Uniform(9), ids, TOY, (ids > 0).long(), num_draws=8)
    assert result.num_tokens.tolist() == [3, 1]
    assert result.nats == pytest.approx(np.array([3, 1]) * math.log(4))  # four words


def test_bits_per_byte_by_hand():
    tokenizer = train_tokenizer(["the cat sat"] * 9, vocab_size=60)
    size, special = len(tokenizer), tuple(tokenizer.all_special_ids)
    vocabulary = Vocabulary(size, 0, tokenizer.mask_token_id, special)
    ids = tokenizer("the cat", return_tensors="pt").input_ids
    result = diffusion_nll_bound(Uniform(size), ids, vocabulary, tokenizer=tokenizer, num_draws=4)
    bits = result.num_tokens[0] * math.log2(size - len(special))
    assert result.num_bytes == 6 and result.bits_per_byte == pytest.approx(bits / 6)


@pytest.mark.parametrize(
    "num_draws, text, name", [(3, TEXT, "num_draws=3"), (4, [1] * 5, "text 1")]
)
def test_wrong_arguments_are_named(num_draws, text, name):
    with pytest.raises(ValueError, match=name):
        diffusion_nll_bound(Tables(), torch.tensor([TEXT, text]), TOY, num_draws=num_draws)
