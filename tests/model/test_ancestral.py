"Ancestral sampling: known distributions, schedules, fixed words, and what a step may see."

from types import SimpleNamespace

import numpy as np
import pytest
import torch

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


@pytest.mark.parametrize("num_steps", [1, 3, 10])
def test_after_step_k_a_share_of_1_minus_k_over_n_is_hidden(num_steps):
    n = 6000
    states = sample(Known(), gaps(100, n // 100), num_steps=num_steps, seed=3)
    assert len(states) == num_steps + 1
    for step, state in enumerate(states):
        share = 1 - step / num_steps
        band = 4 * (share * (1 - share) / n) ** 0.5
        assert abs((state == MASK).float().mean().item() - share) <= band + 1e-9


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


def test_a_bertlab_model_writes_no_special_tokens():
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
