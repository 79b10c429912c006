"Budgets: a clock that the test winds, and a batch whose growth is followed token by token."

import io
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_on_ranks

from bertlab.optim.budgets import (
    BatchSizeWarmup,
    TimeBudgetSchedule,
    TimeBudgetLR,
    steps_for_tokens,
    tokens_at_step,
)


class HandClock:
    "A clock that goes on when it is told to."

    def __init__(self, now: float = 1000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def an_optimizer(*rates) -> torch.optim.Optimizer:
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates or (1.0,)
    ]
    return torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1)


def follow(scheduler: TimeBudgetLR, seconds: list[float]) -> list[list[float]]:
    "The rates of the updates, each of which takes some seconds."
    rates = []
    for took in seconds:
        rates.append([group["lr"] for group in scheduler.optimizer.param_groups])
        scheduler.clock_of_the_test.now += took
        scheduler.optimizer.step()
        scheduler.step()
    return rates


def a_scheduler(optimizer, *requested, now: float = 1000.0) -> TimeBudgetLR:
    clock = HandClock(now)
    scheduler = TimeBudgetLR(optimizer, *requested, clock=clock)
    scheduler.clock_of_the_test = clock
    return scheduler


# The clock.


@pytest.mark.parametrize(
    "base, fall", [(0.25, 0.25), (0.5, 0.25), (0.0, 0.5), (1.0, 0.1), (0.3, 0.9)]
)
def test_the_triangle_is_two_straight_lines(base, fall):
    triangle = TimeBudgetSchedule(200, base, fall)
    seconds = np.linspace(0, 260, 521)
    expected = np.interp(seconds, [0, 200 * (1 - fall), 200, 260], [base, 1, 0, 0])
    np.testing.assert_allclose([triangle(s) for s in seconds], expected, atol=1e-12)
    width = np.diff(seconds)
    area = ((expected[1:] + expected[:-1]) / 2 * width).sum() / 200
    assert triangle.area == pytest.approx(area, abs=1e-3)


def test_the_triangle_by_hand():
    triangle = TimeBudgetSchedule("100s")
    assert [triangle(s) for s in (0, 37.5, 75, 87.5, 100, 10**9)] == [0.25, 0.625, 1, 0.5, 0, 0]
    assert triangle(-5) == 0.25  # a clock that is set back does not lower the start
    assert triangle.area == 0.59375 and TimeBudgetSchedule("2h30m").seconds == 9000.0


def test_the_rate_follows_the_clock_and_not_the_updates():
    fast, slow = a_scheduler(an_optimizer(2.0), 100), a_scheduler(an_optimizer(2.0), 100)
    quick = follow(fast, [5.0] * 20)
    assert follow(slow, [25.0] * 4) == quick[::5] == [[0.5], [1.0], [1.5], [2.0]]
    assert fast.get_last_lr() == slow.get_last_lr() == [0.0]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(0, 50), min_size=1, max_size=30),
    st.floats(0, 1),
    st.floats(0.01, 0.99),
    st.lists(st.floats(1e-5, 10), min_size=1, max_size=3),
)
def test_every_rate_is_the_triangle_at_its_time_for_every_group(seconds, base, fall, peaks):
    rates = follow(a_scheduler(an_optimizer(*peaks), 100, base, fall), seconds)
    spent = np.concatenate([[0], np.cumsum(seconds)[:-1]])
    factors = np.interp(spent, [0, 100 * (1 - fall), 100], [base, 1, 0])
    np.testing.assert_allclose(rates, np.outer(factors, peaks), rtol=1e-6, atol=1e-9)
    assert np.min(rates) >= 0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.floats(0, 20), min_size=2, max_size=20), st.integers(0, 19), st.floats(0, 1e6))
def test_a_resumed_run_has_the_same_rates_however_long_it_was_away(seconds, stop, away):
    stop = min(stop, len(seconds) - 1)
    uninterrupted = follow(a_scheduler(an_optimizer(1.0, 0.1), 100), seconds)
    first = a_scheduler(an_optimizer(1.0, 0.1), 100)
    assert follow(first, seconds[:stop]) == uninterrupted[:stop]
    second = a_scheduler(an_optimizer(1.0, 0.1), 100, now=away)
    second.load_state_dict(first.state_dict())
    np.testing.assert_allclose(
        follow(second, seconds[stop:]), np.reshape(uninterrupted[stop:], (-1, 2)), atol=1e-7
    )


def test_the_state_is_two_numbers_and_survives_a_safe_load():
    scheduler = a_scheduler(an_optimizer(), 100)
    follow(scheduler, [5.0, 5.0])
    scheduler.clock_of_the_test.now += 1.5  # a checkpoint is written some time after the update
    buffer = io.BytesIO()
    torch.save(scheduler.state_dict(), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == {"last_epoch": 2, "elapsed": 11.5}


def test_a_tensor_rate_is_written_in_place_and_a_float_stays_a_float():
    rate = torch.tensor(2.0)
    optimizer = an_optimizer(rate, 2.0)
    scheduler = a_scheduler(optimizer, 100)
    follow(scheduler, [75.0])
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 2.0
    scheduler.load_state_dict({"last_epoch": 4, "elapsed": 87.5})
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 1.0
    assert type(optimizer.param_groups[1]["lr"]) is float and optimizer.param_groups[1]["lr"] == 1.0


def rates_of_a_process(folder: str) -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    clock = HandClock(0.0)
    scheduler, rates = TimeBudgetLR(an_optimizer(), 100, clock=clock), []
    for _ in range(4):
        rates.append(scheduler.get_last_lr()[0])
        clock.now += 10 + 20 * rank  # the second process's clock runs three times as fast
        scheduler.optimizer.step()
        scheduler.step()
    torch.save(rates, f"{folder}/{rank}.pt")
    torch.distributed.barrier()  # gloo's threads abort where the other process leaves first
    torch.distributed.destroy_process_group()


def test_two_processes_follow_the_clock_of_the_first(tmp_path):
    run_on_ranks(rates_of_a_process, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first == second == [TimeBudgetSchedule(100)(s) for s in (0, 10, 20, 30)]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"budget": 0}, ["budget", "0"]),
        ({"budget": -5}, ["budget", "-5"]),
        ({"budget": "10%"}, ["budget", "'10%'"]),
        ({"budget": "2h30"}, ["budget", "'2h30'", "'2h30m'"]),
        ({"budget": math.inf}, ["budget", "inf"]),
        ({"budget": None}, ["budget", "None"]),
        ({"budget": 9, "base": 1.5}, ["base", "1.5", "[0, 1]"]),
        ({"budget": 9, "base": -0.1}, ["base", "-0.1"]),
        ({"budget": 9, "fall": 0}, ["fall", "0"]),
        ({"budget": 9, "fall": 1.0}, ["fall", "1.0"]),
        ({"budget": 9, "fall": math.nan}, ["fall", "nan"]),
    ],
)
def test_a_mistake_in_a_time_budget_names_its_argument(arguments, words):
    with pytest.raises(ValueError) as error:
        TimeBudgetLR(an_optimizer(), **arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


# The batch.


def modernbert_size(tokens: int, low: int, high: int, own_tokens: int) -> int:
    "The published rule, walked through size by size in exact fractions."
    if tokens >= own_tokens:
        return high
    reached = 0
    for size in range(low, high):
        reached += size
        if tokens < math.ceil(Fraction(own_tokens * reached, sum(range(low, high)))):
            return size
    return high


growths = st.tuples(st.integers(1, 12), st.integers(0, 12), st.integers(1, 5000), st.integers(1, 4))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(growths, st.lists(st.integers(0, 6000), max_size=20))
def test_the_size_by_tokens_is_modernberts(drawn, seen):
    low, extra, warmup_tokens, world = drawn
    growth = BatchSizeWarmup(low, low + extra, warmup_tokens, 1, world)
    local = math.ceil(warmup_tokens / world)
    for tokens in [*seen, *growth.thresholds, *(t - 1 for t in growth.thresholds)]:
        assert growth.at_tokens(tokens) == modernbert_size(tokens, low, low + extra, local)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(growths, st.integers(1, 40))
def test_the_size_by_step_is_what_counting_tokens_gives(drawn, per_micro_batch):
    low, extra, warmup_tokens, world = drawn
    warmup = BatchSizeWarmup(low, low + extra, warmup_tokens, per_micro_batch, world)
    tokens = 0
    for step in range(200):
        assert warmup(step) == warmup.at_tokens(tokens)
        assert tokens_at_step(warmup, step) == tokens * world
        tokens += warmup(step) * per_micro_batch


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 50), st.integers(1, 64), st.integers(1, 4)
)
def test_a_warmup_that_divides_evenly_is_a_staircase_of_equal_steps(
    low, extra, each, per_micro_batch, world
):
    tokens = each * per_micro_batch * world * sum(range(low, low + extra))
    warmup = BatchSizeWarmup(low, low + extra, tokens, per_micro_batch, world)
    expected = [min(low + extra, low + step // each) for step in range(each * extra + 5)]
    assert [warmup(step) for step in range(each * extra + 5)] == expected
    assert tokens_at_step(warmup, each * extra) == tokens
    assert steps_for_tokens(warmup, tokens) == each * extra


@settings(max_examples=200, deadline=None, derandomize=True)
@given(growths, st.integers(1, 40), st.integers(0, 20000))
def test_a_budget_of_tokens_is_reached_by_its_last_update_and_not_before(
    drawn, per_micro_batch, budget
):
    low, extra, warmup_tokens, world = drawn
    warmup = BatchSizeWarmup(low, low + extra, warmup_tokens, per_micro_batch, world)
    steps = steps_for_tokens(warmup, budget)
    assert tokens_at_step(warmup, steps) >= budget
    assert steps == 0 or tokens_at_step(warmup, steps - 1) < budget


def test_the_batch_warmup_by_hand():
    # 2 + 3 + 4 micro-batches of 10 tokens, 5 updates each: 450 tokens on one process, 900 on two.
    warmup = BatchSizeWarmup(2, 5, "900 tokens", 10, 2)
    assert warmup.thresholds == [100, 250, 450] and warmup.starts == (
        [0, 5, 10, 15],
        [0, 100, 250, 450],
    )
    assert [warmup(s) for s in (0, 4, 5, 9, 10, 14, 15, 10**9)] == [2, 2, 3, 3, 4, 4, 5, 5]
    assert tokens_at_step(warmup, 7) == 2 * (100 + 2 * 30)
    assert steps_for_tokens(warmup, 900) == 15 and steps_for_tokens(warmup, "1k") == 16
    assert steps_for_tokens(warmup, 0) == 0 and steps_for_tokens(warmup, 1) == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((0, 4, 100, 10), ["min_size", "0"]),
        ((5, 4, 100, 10), ["min_size=5", "max_size=4"]),
        ((1, 4, -100, 10), ["warmup_tokens", "-100"]),
        ((1, 4, "2h", 10), ["warmup_tokens", "'2h'"]),
        ((1, 4, "100", 10), ["warmup_tokens", "'100'"]),
        ((1, 4, 100, 10, 0), ["world_size", "0"]),
        ((1, 4, 100, -3), ["tokens_per_micro_batch", "-3"]),
    ],
)
def test_a_mistake_in_a_batch_warmup_names_its_argument(arguments, words):
    with pytest.raises(ValueError) as error:
        BatchSizeWarmup(*arguments)
    assert all(word in str(error.value) for word in words), str(error.value)
