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
from bertlab.model.heads import BertLabForCausalLM
from bertlab.model.config import modernbert_tiny
from bertlab.model.likelihood import (
    causal_nll,
    diffusion_nll_bound,
    generative_perplexity,
    repetition_stats,
)

torch.set_num_threads(1)
TABLE = torch.from_numpy(np.random.default_rng(3).normal(size=(5**5, 5, 9))).float() * 1.5
TOY = Vocabulary(9, pad_token_id=0, mask_token_id=4, special_token_ids=(1, 2, 3))
PLACES = torch.tensor([625, 125, 25, 5, 1])


class Tables(torch.nn.Module):
    "Scores of five places from a random table of all states, masks included."

    def forward(self, input_ids, attention_mask=None):
        return SimpleNamespace(logits=TABLE[((input_ids - 4).clamp(min=0) * PLACES).sum(1)])


def cost(state: list, place: int, word: int) -> float:
    scores = TABLE[int(((torch.tensor(state) - 4) * PLACES).sum()), place, 5:].double()
    return -(scores[word - 5] - scores.logsumexp(0)).item()


def all_orders(text: list[int]) -> float:  # nats: mean over 120 orders of the chain rule
    total = 0.0
    for order in itertools.permutations(range(5)):
        state = [4] * 5
        for place in order:
            total += cost(state, place, text[place])
            state[place] = text[place]
    return total / 120


ALL = [[6, 8, 5, 6, 7], [5, 5, 5, 5, 5], [8, 7, 6, 5, 8]]


def test_the_bound_is_the_mean_over_all_orders():
    result = diffusion_nll_bound(Tables(), torch.tensor(ALL), TOY, num_draws=None)
    assert result.nats == pytest.approx([all_orders(text) for text in ALL], abs=1e-4)
    assert (result.variance == 0).all() and result.num_tokens.tolist() == [5, 5, 5]


@pytest.mark.parametrize("schedule", NOISE_SCHEDULES)
def test_the_training_loss_integrates_to_the_same_bound(schedule):
    # Every set of hidden tokens at every time of a fine grid, weighed as `noise_batch` does.
    rule, text = DiffusionConfig(noise_eps=0.0, sampling_eps=0.0, schedule=schedule), ALL[0]
    costs = {}
    for hidden in itertools.product([False, True], repeat=5):
        state = [4 if h else word for h, word in zip(hidden, text)]
        costs[hidden] = sum(cost(state, i, text[i]) for i in range(5) if hidden[i])
    times = (np.arange(20_000) + 0.5) / 20_000
    share, weight = mask_probability(times, rule.noise_eps, schedule), elbo_weight(times, schedule)
    total = sum(
        c * (weight * share ** sum(h) * (1 - share) ** (5 - sum(h))).mean()
        for h, c in costs.items()
    )
    assert total == pytest.approx(all_orders(text), abs=1e-4)


def test_drawn_sets_are_unbiased_with_a_true_error():
    truth, result = all_orders(ALL[0]), []
    for seed in range(60):
        result.append(
            diffusion_nll_bound(Tables(), torch.tensor(ALL[:1] * 8), TOY, num_draws=8, seed=seed)
        )
    means = np.array([one.nats.mean() for one in result])
    said = np.array([one.standard_error * 5 for one in result])
    assert abs(means.mean() - truth) < 4 * means.std(ddof=1) / math.sqrt(60)
    # The scatter of 60 means is known to about 9 %; four times that, and the error's own scatter.
    assert 0.6 < means.std(ddof=1) / math.sqrt((said**2).mean()) < 1.45


def test_padding_and_special_tokens_cost_nothing():
    class Uniform(torch.nn.Module):
        def forward(self, input_ids, attention_mask=None):
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 9))

    ids = torch.tensor([[1, 6, 7, 8, 2, 0, 0], [1, 5, 2, 0, 0, 0, 0]])
    for draws in (None, 8):
        result = diffusion_nll_bound(Uniform(), ids, TOY, (ids > 0).long(), num_draws=draws)
        assert result.num_tokens.tolist() == [3, 1]
        assert result.nats == pytest.approx(np.array([3, 1]) * math.log(4))  # four words


def test_bits_per_byte_by_hand():
    tokenizer = train_tokenizer(["the cat sat"] * 9, vocab_size=60)

    class Uniform(torch.nn.Module):
        def forward(self, input_ids, attention_mask=None):
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, len(tokenizer)))

    ids = tokenizer("the cat", return_tensors="pt").input_ids
    words = Vocabulary(len(tokenizer), 0, tokenizer.mask_token_id, tuple(tokenizer.all_special_ids))
    result = diffusion_nll_bound(Uniform(), ids, words, tokenizer=tokenizer, num_draws=4)
    ordinary = len(tokenizer) - len(tokenizer.all_special_ids)
    assert result.num_bytes == 6 and result.bits_per_byte == pytest.approx(
        result.num_tokens[0] * math.log2(ordinary) / 6
    )


@pytest.mark.parametrize(
    "options, said", [(dict(num_draws=3), "num_draws"), (dict(num_draws=2), "num_draws")]
)
def test_a_number_of_draws_that_gives_no_variance_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        diffusion_nll_bound(Tables(), torch.tensor(ALL), TOY, **options)


def test_long_texts_are_not_enumerated_and_empty_ones_refused():
    with pytest.raises(ValueError, match="at most 12"):
        diffusion_nll_bound(Tables(), torch.full((1, 13), 6), TOY, num_draws=None)
    with pytest.raises(ValueError, match="text 1 has no token"):
        diffusion_nll_bound(Tables(), torch.tensor([[5] * 5, [1] * 5]), TOY)


def test_a_causal_reader_adds_up_its_scores_of_words():
    torch.manual_seed(0)
    twin = BertLabForCausalLM(modernbert_tiny(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                              num_attention_heads=1, initializer_range=0.5)).eval()  # fmt: skip
    ids = torch.tensor([[1, 6, 7, 2, 0], [1, 8, 8, 5, 2]])
    result = causal_nll(twin, ids, TOY, (ids > 0).long())
    with torch.no_grad():
        alone = [
            twin(row[None]).logits[0, :, 5:].double().log_softmax(-1)
            for row in (ids[0, :4], ids[1])
        ]
    by_hand = [
        -(alone[0][1, 1] + alone[0][2, 2]).item(),
        -(alone[1][1, 3] + alone[1][2, 3] + alone[1][3, 0]).item(),
    ]
    assert result.nats == pytest.approx(by_hand, abs=1e-4) and result.num_tokens.tolist() == [2, 3]
    assert generative_perplexity(twin, ids, TOY, (ids > 0).long()) == pytest.approx(
        math.exp(sum(by_hand) / 5), rel=1e-4
    )


def test_repeats_by_hand():
    result = repetition_stats([[1, 2, 1, 2, 1, 2], [3, 3]])
    assert (
        result["distinct_1"] == 3 / 8
        and result["distinct_2"] == 3 / 6
        and result["distinct_3"] == 2 / 4
    )
    assert result["repeated_4"] == 1 / 3  # 1212 2121 1212
    assert result["stutter"] == 1 / 6
    p = np.array([3, 3, 2]) / 8
    assert result["entropy"] == pytest.approx(-(p * np.log(p)).sum())
    assert math.isnan(repetition_stats([[1]])["distinct_2"])
    with pytest.raises(ValueError, match="no token"):
        repetition_stats([[], []])
