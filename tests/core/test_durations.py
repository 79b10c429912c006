"Durations: a table of cases worked out by hand, what is refused, and exact arithmetic."

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.core.durations import Duration, exact_steps, parse_duration, parse_amount, to_steps

CASES = [
    (1000, 1000, "steps"),
    (0, 0, "steps"),
    (np.int64(7), 7, "steps"),
    ("1000", 1000, "steps"),
    ("1_000_000", 1_000_000, "steps"),
    (" 1 step ", 1, "steps"),
    ("10k steps", 10_000, "steps"),
    ("10B", 10_000_000_000, "tokens"),
    ("2.5M tokens", 2_500_000, "tokens"),
    ("2.5Mtokens", 2_500_000, "tokens"),
    ("512 tokens", 512, "tokens"),
    ("1.5k", 1_500, "tokens"),
    ("1.1T", 1_100_000_000_000, "tokens"),  # 1.1 * 10**12 in floats is not whole
    ("0.3B", 300_000_000, "tokens"),
    ("1e9 tokens", 10**9, "tokens"),
    ("10%", Fraction(1, 10), "run"),
    ("0.5 %", Fraction(1, 200), "run"),
    ("100%", 1, "run"),
    (0.1, Fraction(1, 10), "run"),
    (1 / 3, Fraction(1, 3), "run"),
    (1 - 0.9, Fraction(1, 10), "run"),
    (1.0, 1, "run"),
    (0.0, 0, "run"),
    ("0.25", Fraction(1, 4), "run"),
    ("1.0", 1, "run"),
    ("2h30m", 9_000, "seconds"),
    ("1d", 86_400, "seconds"),
    ("90s", 90, "seconds"),
    ("1d 2h 3m 4s", 93_784, "seconds"),
    ("1.5h", 5_400, "seconds"),
    ("45 min", 2_700, "seconds"),
    ("0.5s", Fraction(1, 2), "seconds"),
    ("10m", 600, "seconds"),  # minutes; millions are a capital M
    ("10M", 10_000_000, "tokens"),
    ("0s", 0, "seconds"),
]


@pytest.mark.parametrize("value, amount, unit", CASES, ids=repr)
def test_the_table_of_cases(value, amount, unit):
    duration = parse_duration(value)
    assert (duration.value, duration.unit) == (amount, unit)
    assert type(duration.value) in (int, Fraction)
    assert parse_duration(duration) is duration


REFUSED = [
    "", "h", "two hours", "10b", "2h30", "30m2h", "2:30", "1,000", "1_", "10%%", "inf", "1e-5 tokens", "1.", "２h",
    True, None, math.nan, [1], -1, "-5", 1.5, "110%", 1000.0, "1.5 steps", "0.5 tokens",
]  # fmt: skip


@pytest.mark.parametrize("value", REFUSED, ids=repr)
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match="warmup"):
        parse_duration(value, "warmup")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 999), min_size=4, max_size=4).filter(any), st.sampled_from(["", " "])
)
def test_a_clock_text_loses_no_part(parts, gap):
    written = gap.join(f"{n}{unit}" for n, unit in zip(parts, "dhms") if n)
    days, hours, minutes, seconds = parts
    assert parse_duration(written) == Duration(
        ((days * 24 + hours) * 60 + minutes) * 60 + seconds, "seconds"
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 1000), st.integers(1, 10**7))
def test_a_share_in_thousandths_is_exact_in_every_spelling(thousandths, total):
    expected = thousandths * total // 1000
    assert (
        to_steps(thousandths / 1000, total) == to_steps(f"{thousandths / 10}%", total) == expected
    )


def test_updates_by_hand():
    assert to_steps(7) == to_steps("7", total_steps=3) == 7
    assert to_steps("10%", total_steps=105) == 10 and exact_steps(
        "10%", total_steps=105
    ) == Fraction(21, 2)
    assert to_steps("1M", tokens_per_step=4096) == 244
    assert to_steps(0.29, total_steps=100) == 29
    assert to_steps("4095 tokens", tokens_per_step=4096) == 0


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("10%",), ["warmup", "0.1 of the run", "total_steps"]),
        (("3M",), ["warmup", "3,000,000 tokens", "tokens_per_step"]),
        (("3M", None, 0), ["warmup", "tokens_per_step"]),
        (("3M", None, -4), ["tokens_per_step", "-4"]),
        (("3M", None, 2.5), ["tokens_per_step", "2.5"]),
        (("2h30m", 100, 100), ["warmup", "9,000 seconds", "TimeBudgetLR"]),
    ],
)
def test_a_missing_number_is_named(arguments, words):
    arguments = (*arguments, None, None)[:3]
    with pytest.raises(ValueError) as error:
        exact_steps(*arguments, name="warmup")
    assert all(word in str(error.value) for word in words), str(error.value)


def test_an_argument_with_a_unit_takes_plain_numbers():
    assert parse_amount(3_000_000, "tokens", "warmup_tokens") == 3_000_000
    assert parse_amount(3e6, "tokens", "warmup_tokens") == 3_000_000
    assert parse_amount("3M", "tokens", "warmup_tokens") == 3_000_000
    assert parse_amount(1, "run", "warmup_pct") == 1
    assert parse_amount(0.1, "run", "warmup_pct") == Fraction(1, 10)
    assert (
        parse_amount(9000, "seconds", "budget")
        == parse_amount("2h30m", "seconds", "budget")
        == 9000
    )
    assert parse_amount(0.5, "seconds", "budget") == Fraction(1, 2)
    assert parse_amount(Duration(9, "seconds"), "seconds", "budget") == 9


@pytest.mark.parametrize(
    "value, unit, words",
    [
        ("2h30m", "tokens", ["budget", "'2h30m'", "tokens"]),
        ("10%", "seconds", ["budget", "'10%'", "seconds"]),
        ("100", "seconds", ["budget", "'100'", "seconds"]),
        (0.5, "tokens", ["budget", "0.5", "whole"]),
        (10, "run", ["budget", "10", "[0, 1]"]),
        (-1, "seconds", ["budget", "-1", "negative"]),
        (math.nan, "seconds", ["budget", "nan"]),
        (True, "tokens", ["budget", "True"]),
        (None, "tokens", ["budget", "None"]),
    ],
)
def test_another_unit_is_refused(value, unit, words):
    with pytest.raises(ValueError) as error:
        parse_amount(value, unit, "budget")
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_duration_prints_its_unit():
    assert str(Duration(1000, "steps")) == "1,000 steps"
    assert str(Duration(Fraction(1, 10), "run")) == "0.1 of the run"
