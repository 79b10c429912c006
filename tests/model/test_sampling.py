"Samplers: each one's law on a toy is the one that is enumerated by hand; addresses, steps, ends, refusals."

import itertools
import math
from collections import defaultdict
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
    schedule_steps,
    unmask,
)

torch.set_num_threads(1)
MASK, END, WORDS = 4, 3, (5, 6, 7)
TOY = Vocabulary(8, pad_token_id=0, mask_token_id=MASK, special_token_ids=(1, 2, 3))
TABLE = torch.from_numpy(np.random.default_rng(7).normal(size=(9**3, 3, 8))).float() * 1.3


class Tables(torch.nn.Module):
    "Scores of three places from a random table of all states: no two conditionals fit together."

    def __init__(self):
        super().__init__()
        self.calls, self.rows = 0, 0

    def forward(self, input_ids, attention_mask=None):
        self.calls, self.rows = self.calls + 1, self.rows + len(input_ids)
        codes = (input_ids * torch.tensor([81, 9, 1])).sum(1)
        return SimpleNamespace(logits=TABLE[codes])


def pi(state: tuple) -> np.ndarray:  # (3, 3): of each place, of each word, in double precision
    code = state[0] * 81 + state[1] * 9 + state[2]
    scores = np.exp(TABLE[code].double().numpy()[:, 5:])
    return scores / scores.sum(1, keepdims=True)


def open_share(rule: SamplingConfig, k: int, steps: int) -> float:
    t = 1 - k / steps
    return t if rule.schedule == "linear" else 1 - math.cos(t * math.pi / 2)


def law_of(p: np.ndarray, rule: SamplingConfig, state: tuple) -> np.ndarray:
    "What a word is drawn from: penalty, temperature, the fewest that carry top_p."
    p = np.array([v / rule.repetition_penalty if w in state else v for v, w in zip(p, WORDS)])
    p = p ** (1 / rule.temperature)
    p = p / p.sum()
    kept, mass = np.zeros(3), 0.0
    for i in sorted(range(3), key=lambda i: -p[i]):
        if mass < rule.top_p:
            kept[i] = p[i]
        mass += p[i]
    return kept / kept.sum()


def enumerated(rule: SamplingConfig, start: tuple) -> dict[tuple, float]:
    "The law of the finished text, by adding up every way to it."
    gaps = [i for i in range(3) if start[i] == MASK]
    size = rule.block_size or len(gaps)
    blocks = [gaps[i : i + size] for i in range(0, len(gaps), size)]
    chain = {(start, (None,) * 3): 1.0}
    for b, block in enumerate(blocks):
        steps = (b + 1) * rule.num_steps // len(blocks) - b * rule.num_steps // len(blocks)
        for k in range(steps):
            before, after = open_share(rule, k, steps), open_share(rule, k + 1, steps)
            chain = one_step(chain, rule, start, block, before, after)
    law = defaultdict(float)
    for (state, _), p in chain.items():
        law[state] += p
    return law


def one_step(chain, rule, start, block, before, after):
    new = defaultdict(float)
    for (state, sure), mass in chain.items():
        p = pi(state)
        if rule.guidance:
            blind = pi(tuple(MASK if v in WORDS and s == v else v for v, s in zip(state, start)))
            p = p ** (1 + rule.guidance) / blind**rule.guidance
            p = p / p.sum(1, keepdims=True)
        closed = [i for i in block if state[i] != MASK]
        still = [i for i in block if state[i] == MASK]
        law = {i: law_of(p[i], rule, state) for i in still}
        if rule.sampler in ("ancestral", "remask", "remask_doubtful"):
            most = min(1.0, after / (1 - before)) if before < 1 else 1.0
            sigma = 0.0 if rule.sampler == "ancestral" else rule.remask * most
            shown = (
                (1 - after) - (1 - (sigma if rule.sampler == "remask" else 0)) * (1 - before)
            ) / before
            ways = []
            for i in still:
                ways.append(
                    [(i, MASK, None, 1 - shown)]
                    + [(i, w, p[i][j], shown * law[i][j]) for j, w in enumerate(WORDS)]
                )
            for i in closed:
                back = sigma * (1 - sure[i] if rule.sampler == "remask_doubtful" else 1)
                ways.append([(i, MASK, None, back), (i, state[i], sure[i], 1 - back)])
            for way in itertools.product(*ways):
                chance = math.prod(w[3] for w in way)
                if chance:
                    s, c = list(state), list(sure)
                    for i, word, confidence, _ in way:
                        s[i], c[i] = word, confidence
                    new[tuple(s), tuple(c)] += mass * chance
            continue
        quota = len(still) - math.floor(len(block) * after + 0.5)
        for picks in itertools.product(range(3), repeat=len(still)):
            chance = math.prod(law[i][j] for i, j in zip(still, picks))
            if not chance:
                continue
            if rule.sampler == "random":
                chosen = list(itertools.combinations(range(len(still)), quota))
            else:

                def value(n):
                    i, j = still[n], picks[n]
                    ranked = np.sort(p[i])[::-1]
                    return {"confidence": p[i][j], "entropy": (p[i] * np.log(p[i])).sum(),
                            "margin": ranked[0] - ranked[1], "left_to_right": -i}[rule.sampler]  # fmt: skip

                chosen = [sorted(range(len(still)), key=lambda n: (-value(n), n))[:quota]]
            for some in chosen:
                s, c = list(state), list(sure)
                for n in some:
                    s[still[n]], c[still[n]] = WORDS[picks[n]], p[still[n]][picks[n]]
                new[tuple(s), tuple(c)] += mass * chance / len(chosen)
    return new


def check_law(rule: SamplingConfig, start=(MASK,) * 3, n=12_000):
    law = enumerated(rule, start)
    assert math.isclose(sum(law.values()), 1) and all(MASK not in state for state in law)
    last = unmask(Tables(), torch.tensor([start] * n), TOY, rule)
    counts = defaultdict(int)
    for row in map(tuple, last.tolist()):
        counts[row] += 1
    assert set(counts) <= {state for state, p in law.items() if p > 0}
    # Chi-square with rare texts in one cell; five standard deviations of its law above its mean.
    common = [s for s, p in law.items() if n * p >= 5]
    cells = [(counts[s], n * law[s]) for s in common]
    rest = n - sum(e for _, e in cells)
    if rest >= 5:
        cells.append((n - sum(c for c, _ in cells), rest))
    freedom = len(cells) - 1
    assert sum((c - e) ** 2 / e for c, e in cells) < freedom + 5 * math.sqrt(2 * freedom) + 1e-9


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_samplers_law_is_the_enumerated_one(sampler, num_steps):
    check_law(SamplingConfig(sampler, num_steps=num_steps, remask=0.6, seed=num_steps))


@pytest.mark.parametrize("sampler, options", [
    ("confidence", dict(temperature=0.6)), ("ancestral", dict(temperature=1.7)),
    ("entropy", dict(top_p=0.6)), ("remask", dict(top_p=0.8, remask=1.0)),
    ("left_to_right", dict(repetition_penalty=3.0)), ("margin", dict(schedule="cosine")),
    ("ancestral", dict(schedule="cosine", num_steps=4)),
    ("random", dict(block_size=2)), ("remask_doubtful", dict(block_size=2, num_steps=5, remask=1.0)),
    ("confidence", dict(block_size=1)),
])  # fmt: skip
def test_the_law_holds_with_every_option(sampler, options):
    check_law(SamplingConfig(sampler, **{"num_steps": 3, "seed": 11, **options}))


@pytest.mark.parametrize("sampler", ["confidence", "ancestral"])
def test_guidance_goes_beyond_the_model_away_from_the_blind_one(sampler):
    check_law(SamplingConfig(sampler, num_steps=2, guidance=0.8), start=(6, MASK, MASK))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_prompt_is_answered_alike_in_batches_of_any_size(sampler):
    rule = SamplingConfig(sampler, num_steps=3, seed=5, remask=0.5)
    whole = unmask(Tables(), torch.full((12, 3), MASK), TOY, rule)
    for size in (1, 5):
        parts = [unmask(Tables(), torch.full((len(n), 3), MASK), TOY, rule, prompt_numbers=n)
                 for n in (range(i, min(i + size, 12)) for i in range(0, 12, size))]  # fmt: skip
        assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(
        whole,
        unmask(
            Tables(), torch.full((12, 3), MASK), TOY, SamplingConfig(sampler, num_steps=3, seed=6)
        ),
    )


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
    most = max(-(-n // size) if size else 1 for n in (ids == MASK).sum(1).tolist())
    rule = SamplingConfig(
        sampler, num_steps=num_steps, block_size=size, temperature=heat, remask=0.7
    )
    model, before = Flat(), ids.clone()
    if most > num_steps:
        with pytest.raises(ValueError, match="num_steps="):
            unmask(model, ids, TOY, rule)
        return
    states = list(iterate_unmasking(model, ids, TOY, rule))
    assert len(states) == num_steps + 1 and torch.equal(ids, before)
    last, given_BL = states[-1].ids_BL, before != MASK
    assert torch.equal(last[given_BL], before[given_BL]) and (last[~given_BL] >= 5).all()
    assert model.calls == sum(s.asked for s in states) <= num_steps
    for old, new in zip(states, states[1:]):
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
    assert [s.asked for s in steps] == [c > 0 for c in counts]


def test_blocks_are_finished_from_left_to_right():
    rule = SamplingConfig("confidence", num_steps=6, block_size=4)
    for step in iterate_unmasking(Flat(), torch.full((2, 12), MASK), TOY, rule):
        for row in (step.ids_BL == MASK).int().tolist():
            blocks = [sum(row[i : i + 4]) for i in (0, 4, 8)]
            assert all(left == 0 or right == 4 for left, right in zip(blocks, blocks[1:]))
    assert [p[:2] for p in schedule_steps(12, rule)] == [
        (0, 4),
        (0, 4),
        (4, 8),
        (4, 8),
        (8, 12),
        (8, 12),
    ]


def test_an_ended_gap_has_only_ends_to_its_right():
    ids = torch.tensor([[2, *[MASK] * 9, 6, MASK, MASK]] * 60)
    for sampler in SAMPLERS:
        last = unmask(
            Flat(end=0.3),
            ids,
            TOY,
            SamplingConfig(sampler, num_steps=11, late_ends=False),
            end_token_id=END,
        )
        if sampler.startswith("remask"):  # ends are taken back like words
            assert (last != MASK).all()
            continue
        for row in last.tolist():
            first = row[1:10]
            if sampler == "left_to_right" and END in first:
                assert set(first[first.index(END) :]) == {END}
            assert MASK not in row and row[10] == 6
    assert (unmask(Flat(end=0.3), ids, TOY, SamplingConfig(num_steps=9)) != END).all()


def test_late_ends_let_the_words_come_first():
    ids = torch.full((200, 8), MASK)
    share = {late: (unmask(Flat(end=0.65), ids, TOY, SamplingConfig("confidence", num_steps=8, late_ends=late),
                               end_token_id=END) == END).double().mean().item() for late in (True, False)}  # fmt: skip
    assert share[True] < share[False] - 0.2


@pytest.mark.parametrize("changes, said", [
    (dict(sampler="confidense"), "did you mean 'confidence'"), (dict(num_steps=0), "num_steps"),
    (dict(num_steps=True), "num_steps"), (dict(temperature=-1), "temperature"),
    (dict(temperature=None), "temperature"), (dict(guidance="1"), "guidance"), (dict(top_p="1"), "top_p"),
    (dict(remask=None), "remask"),
    (dict(temperature=float("nan")), "temperature"), (dict(top_p=0), "top_p"),
    (dict(repetition_penalty=0.5), "repetition_penalty"), (dict(guidance=-1), "guidance"),
    (dict(block_size=0), "block_size"), (dict(remask=1.1), "remask"),
    (dict(schedule="sine"), "schedule='sine' is unknown"), (dict(seed=-1), "seed"),
])  # fmt: skip
def test_a_rule_that_cannot_be_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        SamplingConfig(**changes)


@pytest.mark.parametrize("changes, said", [
    ({"input_ids": torch.tensor([MASK])}, r"input_ids must be \(B, L\)"),
    ({"input_ids": torch.tensor([[5, 6, 7]])}, r"no \[MASK\]"),
    ({"attention_mask": torch.tensor([[1, 1, 0]])}, "padding"),
    ({"prompt_numbers": [1, 2]}, "prompt_numbers"),
    ({"vocabulary": Vocabulary(30, 0, MASK)}, "the model scores only 8"),
])  # fmt: skip
def test_what_cannot_be_filled_is_refused(changes, said):
    arguments = {
        "model": Tables(),
        "input_ids": torch.full((1, 3), MASK),
        "vocabulary": TOY,
        **changes,
    }
    with pytest.raises(ValueError, match=said):
        unmask(**arguments)
