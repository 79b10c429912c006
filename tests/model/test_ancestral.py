"Ancestral sampling: known distributions, schedules, fixed words, and what a step may see."

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.data.rows import Vocabulary
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.config import modernbert_tiny
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.sampling import SamplingConfig, iterate_unmasking

torch.set_num_threads(1)
PAD, MASK = 0, 4
WORDS = Vocabulary(
    9, pad_token_id=PAD, mask_token_id=MASK, special_token_ids=(1, 2, 3)
)  # words 5 to 8
P = np.array([0.5, 0.3, 0.15, 0.05])  # of the words 5 to 8


class Known(torch.nn.Module):
    "The same known distribution at every position; special ids and padded ids score far higher."

    def __init__(self, padded: int = 3):
        super().__init__()
        special, beyond = torch.full((5,), 50.0), torch.full((padded,), 90.0)
        self.logits_V = torch.cat((special, torch.tensor(P).log().float(), beyond))
        self.calls = 0

    def forward(self, input_ids, attention_mask=None):
        self.calls += 1
        return SimpleNamespace(logits=self.logits_V.expand(*input_ids.shape, -1))


class AfterNeighbour(torch.nn.Module):
    "Position i is the word after position i - 1's (5 6 7 8 5 ...), where that is known, else any word."

    def forward(self, input_ids, attention_mask=None):
        left = input_ids.roll(1, dims=1)
        following = torch.where(left >= 5, (left - 5 + 1) % 4 + 5, torch.full_like(left, MASK))
        return SimpleNamespace(logits=40.0 * torch.nn.functional.one_hot(following, 9))


def sample(model, input_ids, attention_mask=None, words=WORDS, **options) -> list[torch.Tensor]:
    "All states: the input first, the finished text last."
    rule = SamplingConfig("ancestral", **options)
    return [
        step.ids_BL for step in iterate_unmasking(model, input_ids, words, rule, attention_mask)
    ]


def gaps(rows: int, length: int) -> torch.Tensor:
    return torch.full((rows, length), MASK)


@pytest.mark.parametrize("num_steps", [1, 5, 40])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_words_are_drawn_as_often_as_the_model_says(num_steps, temperature):
    n = 8000
    last = sample(Known(), gaps(200, n // 200), num_steps=num_steps, temperature=temperature)[-1]
    expected = P ** (1 / temperature) / (P ** (1 / temperature)).sum()
    measured = np.bincount(last.flatten(), minlength=9)[5:] / n
    # 9 x 4 comparisons at 4 standard errors: a right sampler fails all of them with odds of 1 in 400
    assert (np.abs(measured - expected) < 4 * np.sqrt(expected * (1 - expected) / n)).all()


def test_words_of_one_step_do_not_depend_on_each_other():
    last = sample(Known(), gaps(6000, 2), num_steps=1)[-1] - 5
    joint = np.zeros((4, 4))
    np.add.at(joint, (last[:, 0].numpy(), last[:, 1].numpy()), 1 / 6000)
    expected = np.outer(P, P)
    assert (np.abs(joint - expected) < 4.5 * np.sqrt(expected * (1 - expected) / 6000)).all()


@pytest.mark.parametrize("num_steps", [1, 3, 10])
def test_after_step_k_a_share_of_1_minus_k_over_n_is_hidden(num_steps):
    n = 6000
    states = sample(Known(), gaps(100, n // 100), num_steps=num_steps, seed=3)
    assert len(states) == num_steps + 1
    for step, state in enumerate(states):
        share = 1 - step / num_steps
        band = 4 * (share * (1 - share) / n) ** 0.5
        assert abs((state == MASK).float().mean().item() - share) <= band + 1e-9


def test_every_place_and_every_row_is_as_likely_to_be_first():
    revealed = sample(Known(), gaps(4000, 8), num_steps=4)[1].numpy() != MASK
    band = 4.5 * (0.25 * 0.75 / 4000) ** 0.5
    assert (np.abs(revealed.mean(0) - 0.25) < band).all()
    together = (revealed[:, 0] & revealed[:, 1]).mean()  # no coin knows its neighbour's
    assert abs(together - 1 / 16) < 4 * (1 / 16 * 15 / 16 / 4000) ** 0.5


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([1, 2, MASK, 5, 8]), min_size=6, max_size=6),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 12),
    st.sampled_from([0, 0.7, 1.0, 5.0]),
    st.integers(0, 2**40),
)
def test_fixed_tokens_stay_and_nothing_is_hidden_again_and_all_is_filled(
    rows, num_steps, temperature, seed
):
    ids = torch.tensor([*rows, [MASK] * 6])
    before = ids.clone()
    states = sample(Known(), ids, num_steps=num_steps, temperature=temperature, seed=seed)
    assert torch.equal(ids, before) and torch.equal(states[0], before)
    for earlier, later in zip(states, states[1:]):
        told = earlier != MASK
        assert torch.equal(later[told], earlier[told])
    drawn = states[-1][before == MASK]
    assert ((drawn >= 5) & (drawn <= 8)).all()


def test_temperature_0_takes_the_best_word_that_is_not_special_whatever_the_seed():
    for seed in range(3):
        last = sample(Known(), gaps(3, 20), num_steps=4, temperature=0, seed=seed)[-1]
        assert (last == 5).all()


def test_the_seed_decides_and_only_the_seed():
    draw = lambda seed: torch.stack(sample(Known(), gaps(4, 30), num_steps=6, seed=seed))
    torch.manual_seed(1)
    first = draw(0)
    torch.manual_seed(2)
    np.random.seed(2)
    assert torch.equal(first, draw(0))
    assert not torch.equal(first, draw(1))


def test_a_row_is_the_same_alone_and_in_a_padded_batch():
    row = torch.tensor([[1, MASK, 5, MASK, MASK, MASK]])
    batch = torch.tensor([[1, MASK, 5, MASK, MASK, MASK, PAD, PAD], [MASK] * 8])
    alone = sample(Known(), row, num_steps=5)
    padded = sample(Known(), batch, attention_mask=(batch != PAD).long(), num_steps=5)
    for a, b in zip(alone, padded, strict=True):
        assert torch.equal(a[0], b[0, :6])


def test_rows_of_a_batch_differ():
    last = sample(Known(), gaps(2, 60), num_steps=3)[-1]
    assert not torch.equal(last[0], last[1])


def test_more_steps_than_masks_run_the_model_once_per_mask_at_most():
    model = Known()
    states = sample(model, gaps(1, 3), num_steps=500)
    assert len(states) == 501 and 1 <= model.calls <= 3 and MASK not in states[-1]


def test_words_revealed_earlier_are_seen_by_later_ones():
    ring = gaps(100, 8)
    ring[:, 0] = 5
    wrong = []
    for num_steps in (1, 2000):
        last = sample(AfterNeighbour(), ring, num_steps=num_steps)[-1]
        wrong.append(((last[:, 1:] - last[:, :-1]) % 4 != 1).float().mean().item())
    # all at once, 6 of 7 gaps guess among 4 words; one by one, a gap whose left is open guesses too
    assert wrong[0] == pytest.approx(6 / 7 * 3 / 4, abs=0.08)
    assert wrong[1] < wrong[0] - 0.1


def test_a_model_of_the_library_writes_text_without_special_tokens_and_stays_in_its_mode():
    tokenizer = train_tokenizer(
        ["the cat sat on the mat", "the dog sat on the log"] * 20, vocab_size=80
    )
    shape = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2)
    model = BertLabForMaskedLM(
        modernbert_tiny(vocab_size=len(tokenizer), max_position_embeddings=24, **shape)
    )
    words = Vocabulary(
        len(tokenizer),
        tokenizer.pad_token_id,
        tokenizer.mask_token_id,
        tuple(tokenizer.all_special_ids),
    )
    ids = tokenizer("the [MASK] [MASK] on [MASK]", return_tensors="pt").input_ids
    last = sample(model, ids, words=words, num_steps=8)[-1]
    gap = ids == tokenizer.mask_token_id
    assert torch.equal(last[~gap], ids[~gap]) and not set(last[gap].tolist()) & set(
        tokenizer.all_special_ids
    )
    assert model.training


def test_scores_of_half_precision_are_drawn_in_double():
    class Half(Known):
        def forward(self, input_ids, attention_mask=None):
            return SimpleNamespace(logits=super().forward(input_ids).logits.bfloat16())

    last = sample(Half(), gaps(400, 50), num_steps=1)[-1]
    measured = np.bincount(last.flatten(), minlength=9)[5:] / 20_000
    assert np.abs(measured - P).max() < 0.02  # bfloat16 rounds the scores themselves by 0.4 %
