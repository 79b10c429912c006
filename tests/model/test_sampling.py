"Samplers: each one's law on a toy is the one that is enumerated by hand; addresses, steps, ends, refusals."

import itertools
import math
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.data.rows import Vocabulary
from bertlab.model.sampling import (
    SAMPLERS,
    SamplingConfig,
    iterate_unmasking,
    unmask,
)

MASK, END, WORDS = 4, 3, (5, 6, 7)
TOY = Vocabulary(8, pad_token_id=0, mask_token_id=MASK, special_token_ids=(1, 2, 3))
TABLE = torch.from_numpy(np.random.default_rng(7).normal(size=(9**3, 3, 8))).float() * 1.3


class Tables(torch.nn.Module):
    "Scores of three positions from a random table of all states: no two conditionals fit together."

    def forward(self, input_ids, attention_mask=None):
        return SimpleNamespace(logits=TABLE[(input_ids * torch.tensor([81, 9, 1])).sum(1)])


def pi(state: tuple) -> np.ndarray:  # (3, 3): of each place, of each word, in double precision
    code = state[0] * 81 + state[1] * 9 + state[2]
    scores = np.exp(TABLE[code].double().numpy()[:, 5:])
    return scores / scores.sum(1, keepdims=True)


def open_share(rule: SamplingConfig, k: int, steps: int) -> float:
    t = 1 - k / steps
    return t if rule.schedule == "linear" else 1 - math.cos(t * math.pi / 2)


def law_of(p: np.ndarray, rule: SamplingConfig, state: tuple) -> np.ndarray:
    "Return what a token is drawn from: penalty, temperature, the fewest that make up top_p."
    p = np.array([v / rule.repetition_penalty if w in state else v for v, w in zip(p, WORDS)])
    p = p ** (1 / rule.temperature)
    p = p / p.sum()
    likely, mass = np.zeros(3), 0.0
    for i in sorted(range(3), key=lambda i: -p[i]):
        if mass < rule.top_p:
            likely[i] = p[i]
        mass += p[i]
    return likely / likely.sum()


def enumerated(rule: SamplingConfig, start: tuple) -> dict[tuple, float]:
    "Return the distribution of the finished text, by adding up every way to it."
    gaps = [i for i in range(3) if start[i] == MASK]
    size = rule.block_size or len(gaps)
    blocks = [gaps[i : i + size] for i in range(0, len(gaps), size)]
    chain = {start: 1.0}
    for b, block in enumerate(blocks):
        steps = (b + 1) * rule.num_steps // len(blocks) - b * rule.num_steps // len(blocks)
        for k in range(steps):
            before, after = open_share(rule, k, steps), open_share(rule, k + 1, steps)
            chain = one_step(chain, rule, start, block, before, after)
    return chain


def one_step(chain, rule, start, block, before, after):
    new = defaultdict(float)
    for state, mass in chain.items():
        p = pi(state)
        if rule.guidance:
            blind = pi(tuple(MASK if v in WORDS and s == v else v for v, s in zip(state, start)))
            p = p ** (1 + rule.guidance) / blind**rule.guidance
            p = p / p.sum(1, keepdims=True)
        open_gaps = [i for i in block if state[i] == MASK]
        law = {i: law_of(p[i], rule, state) for i in open_gaps}
        if rule.sampler in ("ancestral", "remask"):
            outcomes = coins(rule, state, block, law, before, after)
        else:
            quota = len(open_gaps) - math.floor(len(block) * after + 0.5)
            outcomes = ordered(rule, state, open_gaps, law, p, quota)
        for new_state, chance in outcomes:
            new[new_state] += mass * chance
    return new


def coins(rule, state, block, law, before, after):
    "Yield states with their probability where each gap has a coin of its own."
    most = min(1.0, after / (1 - before)) if before < 1 else 1.0
    sigma = rule.remask * most if rule.sampler == "remask" else 0.0
    share_shown = ((1 - after) - (1 - sigma) * (1 - before)) / before
    choices = []
    for i in block:
        if state[i] == MASK:
            words = [(i, word, share_shown * law[i][j]) for j, word in enumerate(WORDS)]
            choices.append([(i, MASK, 1 - share_shown), *words])
        else:
            choices.append([(i, MASK, sigma), (i, state[i], 1 - sigma)])
    for choice in itertools.product(*choices):
        new = list(state)
        for i, word, _ in choice:
            new[i] = word
        yield tuple(new), math.prod(chance for *_, chance in choice)


def ordered(rule, state, open_gaps, law, p, quota):
    "Yield states with their probability where the best candidates are kept."
    for picks in itertools.product(range(3), repeat=len(open_gaps)):
        chance = math.prod(law[i][j] for i, j in zip(open_gaps, picks))

        def value(n):
            i, ranked = open_gaps[n], np.sort(p[open_gaps[n]])[::-1]
            return {"confidence": p[i][picks[n]], "entropy": (p[i] * np.log(p[i])).sum(),
                    "margin": ranked[0] - ranked[1], "left_to_right": -i}[rule.sampler]  # fmt: skip

        gaps = range(len(open_gaps))
        if rule.sampler == "random":
            subsets = list(itertools.combinations(gaps, quota))
        else:
            subsets = [sorted(gaps, key=lambda n: (-value(n), n))[:quota]]
        for subset in subsets:
            new = list(state)
            for n in subset:
                new[open_gaps[n]] = WORDS[picks[n]]
            yield tuple(new), chance / len(subsets)


def check_law(rule: SamplingConfig, start=(MASK,) * 3, n=12_000):
    law = enumerated(rule, start)
    assert math.isclose(sum(law.values()), 1)
    last = unmask(Tables(), torch.tensor([start] * n), TOY, rule)
    counts = Counter(map(tuple, last.tolist()))
    assert set(counts) <= {state for state, p in law.items() if p > 0}
    # Chi-square with rare texts in one cell; five standard deviations of its law above its mean.
    common = [state for state, p in law.items() if n * p >= 5]
    cells = [(counts[state], n * law[state]) for state in common]
    rare = n - sum(expected for _, expected in cells)
    if rare >= 5:
        cells.append((n - sum(count for count, _ in cells), rare))
    freedom = len(cells) - 1
    assert sum((c - e) ** 2 / e for c, e in cells) < freedom + 5 * math.sqrt(2 * freedom) + 1e-9


@pytest.mark.parametrize("num_steps", [1, 2, 4])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_samplers_law_is_the_enumerated_one(sampler, num_steps):
    check_law(SamplingConfig(sampler, num_steps=num_steps, remask=0.6, seed=num_steps))


@pytest.mark.parametrize("sampler, options", [
    ("confidence", dict(temperature=0.6)), ("ancestral", dict(temperature=1.7)),
    ("entropy", dict(top_p=0.6)), ("remask", dict(top_p=0.8, remask=1.0)),
    ("left_to_right", dict(repetition_penalty=3.0)), ("margin", dict(schedule="cosine")),
    ("ancestral", dict(schedule="cosine", num_steps=4)),
    ("random", dict(block_size=2)), ("remask", dict(block_size=2, num_steps=5, remask=1.0)),
    ("confidence", dict(block_size=1)),
])  # fmt: skip
def test_the_law_holds_with_every_option(sampler, options):
    check_law(SamplingConfig(sampler, **{"num_steps": 3, "seed": 11, **options}))


@pytest.mark.parametrize("sampler", ["confidence", "ancestral"])
def test_guidance_goes_beyond_the_model_away_from_the_blind_one(sampler):
    check_law(SamplingConfig(sampler, num_steps=2, guidance=0.8), start=(6, MASK, MASK))


class Flat(torch.nn.Module):
    "The same distribution everywhere; counts how often it is requested."

    def __init__(self, end=0.0):
        super().__init__()
        self.calls = 0
        p = torch.full((8,), 1e-9)
        p[5:] = torch.tensor([0.6, 0.3, 0.1])
        p[END] = end
        self.logits = p.log()

    def forward(self, input_ids, attention_mask=None):
        self.calls += 1
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, 8))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(list(SAMPLERS)), st.integers(1, 9), st.integers(1, 12), st.sampled_from([None, 1, 3]),
       st.sampled_from([0.0, 0.7, 1.0]), st.lists(st.sampled_from([MASK, 5, 1]), min_size=7, max_size=7))  # fmt: skip
def test_all_gaps_are_filled_and_the_prompt_stays(sampler, num_steps, gaps, size, heat, mixed):
    ids = torch.tensor([[MASK] * gaps + [1] * (12 - gaps) + mixed, [5] * 12 + [MASK] + [6] * 6])
    num_blocks = max(-(-n // size) if size else 1 for n in (ids == MASK).sum(1).tolist())
    config = SamplingConfig(
        sampler, num_steps=num_steps, block_size=size, temperature=heat, remask=0.7
    )
    model, before = Flat(), ids.clone()
    if num_blocks > num_steps:
        with pytest.raises(ValueError, match="num_steps="):
            unmask(model, ids, TOY, config)
        return
    states = list(iterate_unmasking(model, ids, TOY, config))
    assert len(states) == num_steps + 1 and torch.equal(ids, before)
    last, given_BL = states[-1].ids_BL, before != MASK
    assert torch.equal(last[given_BL], before[given_BL]) and (last[~given_BL] >= 5).all()
    assert model.calls == sum(bool(step.revealed_BL.any()) for step in states)
    for old, new in itertools.pairwise(states):
        changed = old.ids_BL != new.ids_BL
        assert not (changed & ~(new.revealed_BL | new.taken_back_BL)).any()
        assert (new.ids_BL[new.taken_back_BL] == MASK).all()
        assert (new.confidence_BL.isnan() == ((new.ids_BL == MASK) | given_BL)).all()


@pytest.mark.parametrize("sampler", ["random", "confidence", "left_to_right"])
@pytest.mark.parametrize(
    "gaps, num_steps, counts", [(8, 4, [2, 2, 2, 2]), (5, 2, [2, 3]), (2, 4, [0, 1, 0, 1])]
)
def test_ordered_samplers_write_an_even_number_in_each_step(sampler, gaps, num_steps, counts):
    rule = SamplingConfig(sampler, num_steps=num_steps)
    steps = list(iterate_unmasking(Flat(), torch.full((3, gaps), MASK), TOY, rule))[1:]
    assert [s.revealed_BL.sum(1).tolist() for s in steps] == [[c] * 3 for c in counts]


def test_an_ended_gap_has_only_ends_to_its_right():
    ids = torch.tensor([[2, *[MASK] * 9, 6, MASK, MASK]] * 60)
    for sampler in ("left_to_right", "confidence", "ancestral"):
        config = SamplingConfig(sampler, num_steps=11, late_ends=False)
        last = unmask(Flat(end=0.3), ids, TOY, config, end_token_id=END)
        assert MASK not in last and (last[:, 10] == 6).all()
        for gap in last[:, 1:10].tolist() if sampler == "left_to_right" else ():
            assert END not in gap or {*gap[gap.index(END) :]} == {END}
    assert (unmask(Flat(end=0.3), ids, TOY, SamplingConfig(num_steps=9)) != END).all()


def test_late_ends_let_the_words_come_first():
    ids, share = torch.full((200, 8), MASK), {}
    for late in (True, False):
        config = SamplingConfig("confidence", num_steps=8, late_ends=late)
        last = unmask(Flat(end=0.65), ids, TOY, config, end_token_id=END)
        share[late] = (last == END).double().mean().item()
    assert share[True] < share[False] - 0.2


@pytest.mark.parametrize("changes, name", [
    (dict(sampler="confidense"), "did you mean 'confidence'"), (dict(num_steps=0), "num_steps"),
    (dict(temperature=-1), "temperature"), (dict(temperature=float("nan")), "temperature"),
    (dict(top_p=0), "top_p"), (dict(repetition_penalty=0.5), "repetition_penalty"),
    (dict(guidance=-1), "guidance"), (dict(block_size=0), "block_size"), (dict(remask=1.1), "remask"),
    (dict(schedule="sine"), "schedule='sine'"), (dict(seed=-1), "seed"),
])  # fmt: skip
def test_wrong_options_are_named(changes, name):
    with pytest.raises(ValueError, match=name):
        SamplingConfig(**changes)


@pytest.mark.parametrize("ids, mask, name", [
    ([5, 6, 7], None, r"no \[MASK\]"), ([MASK] * 3, torch.tensor([[1, 1, 0]]), "padding"),
])  # fmt: skip
def test_rows_without_a_gap_to_fill_are_refused(ids, mask, name):
    with pytest.raises(ValueError, match=name):
        unmask(Tables(), torch.tensor([ids]), TOY, attention_mask=mask)
