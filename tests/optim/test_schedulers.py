"Schedules: against formulas written by other means, and properties that hold for all of them."

import io
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.optim.schedulers import (
    InverseSqrtScheduler,
    SCHEDULE_KINDS,
    Schedule,
    ScheduledLR,
    get_scheduler,
    get_single_scheduler,
)


def an_optimizer(*rates: float) -> torch.optim.Optimizer:
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (1.0,)
    ]
    return torch.optim.SGD(groups)


def follow(scheduler, num_steps: int) -> list[float]:
    "The rates that the first group's next updates use."
    rates = []
    for _ in range(num_steps):
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


# The same curves by other means: numpy's own spacings, and the papers' formulas in their own letters.


def ramp(shape: str, start: float, end: float, length: int) -> np.ndarray:
    "The factors at progress 0/length ... length/length."
    if shape == "constant":
        return np.full(length + 1, start)
    if shape == "linear":
        return np.interp(np.arange(length + 1), [0, length], [start, end])
    if shape == "exponential":
        return np.geomspace(start, end, length + 1)
    if shape == "cosine":  # half a turn, by degrees; the vertical way from its highest point
        angle = np.deg2rad(np.linspace(0, 180, length + 1))
        return start + (end - start) * np.sin(angle / 2) ** 2
    n, total, cooldown = np.arange(length + 1), length, length
    floor = end / start
    return start * (floor + (1 - floor) * (1 - ((n - (total - cooldown)) / cooldown) ** 0.5))


def by_other_means(
    s: Schedule, warmup: int, training: int, cooldown: int, num_steps: int
) -> np.ndarray:
    rise = ramp(s.warmup_kind, s.warmup_decay, 1.0, warmup)[1:] if warmup else []
    stay = ramp(s.training_kind, 1.0, s.training_decay, training)[:-1] if training else []
    level = s.training_decay if training else 1.0
    fall = ramp(s.cooldown_kind, level, s.cooldown_decay, cooldown)[:-1] if cooldown else []
    planned = np.concatenate([rise, stay, fall])
    last = s.cooldown_decay if cooldown else level
    return np.concatenate([planned, np.full(num_steps - len(planned), last)])


@pytest.mark.parametrize("kinds", list(itertools.product(*SCHEDULE_KINDS.values())), ids="-".join)
@pytest.mark.parametrize(
    "warmup, training, cooldown", [(5, 20, 8), (1, 1, 1), (0, 7, 3), (4, 0, 6)]
)
def test_every_kind_equals_its_formula_at_every_step(kinds, warmup, training, cooldown):
    decay = 1.0 if kinds[1] == "constant" else 0.4
    floor = 0.05 if kinds[2] != "constant" else decay if training else 1.0  # where training left it
    schedule = Schedule(kinds[0], warmup, 0.1, kinds[1], training, decay, kinds[2], cooldown, floor)
    expected = by_other_means(schedule, warmup, training, cooldown, 50)
    np.testing.assert_allclose(schedule.curve(50), expected, rtol=1e-12)


def test_warmup_stable_decay_by_hand():
    schedule = Schedule(warmup_steps=2, cooldown_steps=4, total_steps=9)
    np.testing.assert_allclose(schedule.curve(11), [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0])
    assert schedule.area() == pytest.approx(7.0)


def test_training_steps_of_minus_one_are_the_rest_of_the_run():
    remaining = Schedule(
        warmup_steps=3, training_kind="cosine", training_decay=0.2, cooldown_steps=4, total_steps=20
    )
    message = Schedule(
        warmup_steps=3,
        training_kind="cosine",
        training_steps=13,
        training_decay=0.2,
        cooldown_steps=4,
    )
    assert remaining.curve(30) == message.curve(30)
    assert remaining.lengths == (3, 13, 4) and remaining.num_steps == message.num_steps == 20


def test_an_open_end_trains_at_the_peak_for_ever():
    schedule = Schedule(warmup_steps=2)
    assert schedule.curve(4) == [0.5, 1.0, 1.0, 1.0] and schedule(10**9) == 1.0
    with pytest.raises(ValueError, match="num_steps"):
        schedule.curve()
    with pytest.raises(ValueError, match="num_steps"):
        schedule.area()


@st.composite
def schedules(draw) -> tuple[Schedule, int, int, int]:
    "Every kind, with lengths that may be 0; only the jump that is asked for by name is left out."
    warmup_kind = draw(
        st.sampled_from([shape for shape in SCHEDULE_KINDS["warmup"] if shape != "constant"])
    )
    training_kind, cooldown_kind = (
        draw(st.sampled_from(SCHEDULE_KINDS[p])) for p in ("training", "cooldown")
    )
    lengths = warmup, training, cooldown = [draw(st.integers(0, 60)) for _ in range(3)]
    factor = st.floats(0, 1)
    positive, far = st.floats(1e-3, 1), st.floats(1e-3, 0.9)  # an exponential near 1 is refused
    start = draw(far if warmup_kind == "exponential" else factor)
    level = (
        1.0
        if training_kind == "constant"
        else draw(far if training_kind == "exponential" else positive)
    )
    lowest = st.floats(1e-3, min(level, 0.9))
    floor = draw(lowest if cooldown_kind == "exponential" else st.floats(0, level))
    if cooldown_kind == "constant":
        floor = level if training else 1.0
    is_known = draw(st.booleans()) and sum(lengths) > 0
    schedule = Schedule(
        warmup_kind, warmup, start, training_kind, -1 if is_known else training, level,
        cooldown_kind, cooldown, floor, sum(lengths) if is_known else None,
    )  # fmt: skip
    return schedule, warmup, training, cooldown


def steepest_step(schedule: Schedule, warmup: int, training: int, cooldown: int) -> float:
    "The largest change that one step may make, from the slopes of the shapes."
    level = schedule.training_decay if training else 1.0
    phases = [
        (schedule.warmup_kind, schedule.warmup_decay, 1.0, warmup),
        (schedule.training_kind, 1.0, schedule.training_decay, training),
        (schedule.cooldown_kind, level, schedule.cooldown_decay, cooldown),
    ]
    largest = 0.0
    for shape, start, end, length in phases:
        if length and shape != "constant":
            height = abs(end - start)
            step = {
                "linear": height / length,
                "cosine": height * min(1, math.pi / 2 / length),
                "1-sqrt": height / math.sqrt(length),
                # The steepest step is the one at the higher end.
                "exponential": max(start, end)
                * (1 - (min(start, end) / max(start, end)) ** (1 / length)),
            }[shape]
            largest = max(largest, step)
    return largest


@settings(max_examples=300, deadline=None, derandomize=True)
@given(schedules())
def test_a_schedule_makes_no_jump_larger_than_its_steepest_step(drawn):
    schedule, warmup, training, cooldown = drawn
    curve = np.array(schedule.curve(warmup + training + cooldown + 3))
    start = [schedule.warmup_decay] if warmup else []
    jumps = np.abs(np.diff(np.concatenate([start, curve])))
    assert jumps.max() <= steepest_step(*drawn) + 1e-12


@settings(max_examples=300, deadline=None, derandomize=True)
@given(schedules())
def test_phases_are_monotone_and_rates_stay_between_zero_and_the_peak(drawn):
    schedule, warmup, training, cooldown = drawn
    curve = np.array(schedule.curve(warmup + training + cooldown + 3))
    assert (curve >= 0).all() and (curve <= 1 + 1e-12).all()
    assert (np.diff(curve[:warmup]) >= -1e-12).all()
    assert (np.diff(curve[max(warmup - 1, 0) :]) <= 1e-12).all()
    if warmup:
        assert curve[warmup - 1] == pytest.approx(1)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(schedules(), st.integers(0, 200), st.integers(1, 40))
def test_a_run_resumed_from_its_step_alone_has_the_same_rates(drawn, stop, extra_steps):
    schedule = drawn[0]
    full = follow(ScheduledLR(an_optimizer(3e-4), schedule), stop + extra_steps)
    first, second = (ScheduledLR(an_optimizer(3e-4), schedule) for _ in range(2))
    assert follow(first, stop) == full[:stop]
    second.load_state_dict(first.state_dict())
    assert (
        follow(second, extra_steps)
        == full[stop:]
        == [3e-4 * schedule(s) for s in range(stop, stop + extra_steps)]
    )


def test_each_parameter_group_keeps_its_own_peak():
    optimizer = an_optimizer(1e-3, 5e-2)
    scheduler = get_scheduler(optimizer, warmup_steps=2, cooldown_steps=2, total_steps=6)
    seen = []
    for _ in range(6):
        seen.append([group["lr"] for group in optimizer.param_groups])
        assert scheduler.get_last_lr() == seen[-1]
        optimizer.step()
        scheduler.step()
    np.testing.assert_allclose(np.array(seen), np.outer([0.5, 1, 1, 1, 1, 0.5], [1e-3, 5e-2]))


def test_state_is_the_step_and_survives_a_safe_load():
    scheduler = get_scheduler(an_optimizer(), warmup_steps=5)
    follow(scheduler, 3)
    buffer = io.BytesIO()
    torch.save(scheduler.state_dict(), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == {"last_epoch": 3}


def test_a_longer_run_resumes_a_finished_one():
    finished = get_scheduler(an_optimizer(), cooldown_steps=2, total_steps=5)
    follow(finished, 5)
    longer = get_scheduler(an_optimizer(), cooldown_steps=2, total_steps=10)
    longer.load_state_dict(finished.state_dict())
    assert follow(longer, 5) == [1, 1, 1, 1, 0.5]


def test_a_new_peak_holds_from_the_first_resumed_update():
    finished = get_scheduler(an_optimizer(1.0), warmup_steps=4)
    follow(finished, 2)
    resumed_optimizer = an_optimizer(10.0)
    resumed = get_scheduler(resumed_optimizer, warmup_steps=4)
    resumed_optimizer.load_state_dict(finished.optimizer.state_dict())  # brings the old rate along
    resumed.load_state_dict(finished.state_dict())
    assert follow(resumed, 3) == [7.5, 10.0, 10.0]


def test_inverse_sqrt_of_bertblocks_is_one_minus_the_root():
    scheduler = InverseSqrtScheduler(an_optimizer(0.5), cooldown_steps=9)
    by_old_name = get_single_scheduler(an_optimizer(), "inverse-sqrt", 9, direction="decrease")
    assert (
        by_old_name.schedule == scheduler.schedule and scheduler.schedule.cooldown_kind == "1-sqrt"
    )
    expected = [0.5 * (1 - math.sqrt(n / 9)) for n in range(9)] + [0.0, 0.0]
    np.testing.assert_allclose(follow(scheduler, 11), expected)
    assert (
        scheduler.lr_lambda(0) == 1.0 and scheduler.lr_lambda(9) == scheduler.lr_lambda(1000) == 0.0
    )


@pytest.mark.parametrize("shape", SCHEDULE_KINDS["warmup"])
def test_a_single_increase_is_the_warmup_alone(shape):
    scheduler = get_single_scheduler(an_optimizer(), shape, 4, 0.5, "increase")
    np.testing.assert_allclose(follow(scheduler, 6), [*ramp(shape, 0.5, 1, 4)[1:], 1, 1])


@pytest.mark.parametrize(
    "shape", [shape for shape in SCHEDULE_KINDS["cooldown"] if shape != "constant"]
)
def test_a_single_decrease_is_the_cooldown_alone(shape):
    scheduler = get_single_scheduler(an_optimizer(), shape, 4, 0.5, "decrease")
    np.testing.assert_allclose(follow(scheduler, 6), [*ramp(shape, 1, 0.5, 4), 0.5])


@pytest.mark.parametrize("arguments, words", [
    ({"warmup_kind": "ramp"}, ["warmup_kind", "'ramp'"]), ({"training_kind": "1-sqrt"}, ["training_kind"]),
    ({"cooldown_kind": "sqrt"}, ["cooldown_kind", "'sqrt'"]), ({"warmup_steps": -1}, ["warmup_steps", "-1"]),
    ({"training_steps": -2}, ["training_steps", "-2"]), ({"total_steps": 0}, ["total_steps", "0"]),
    ({"warmup_decay": -0.1}, ["warmup_decay", "-0.1"]), ({"training_decay": math.nan}, ["training_decay", "nan"]),
    ({"cooldown_steps": 3}, ["cooldown_steps=3"]), ({"training_kind": "cosine"}, ["training_kind='cosine'"]),
    ({"warmup_steps": 11, "total_steps": 10}, ["warmup_steps=11", "total_steps=10"]),
    ({"warmup_steps": 6, "cooldown_steps": 6, "total_steps": 10}, ["cooldown_steps=6", "total_steps=10"]),
    ({"training_decay": 0.5}, ["training_decay=0.5"]), ({"warmup_kind": "constant", "warmup_steps": 3}, ["warmup_decay"]),
    ({"cooldown_kind": "exponential", "cooldown_steps": 3, "total_steps": 9}, ["cooldown_decay"]),
    ({"cooldown_kind": "constant", "cooldown_steps": 3, "total_steps": 9}, ["cooldown_decay=1.0"]),
    ({"warmup_ratio": 0.1}, ["'warmup_ratio'"]), ({"warmup_steps": "10%"}, ["warmup_steps", "total_steps"]),
    ({"warmup_steps": "110%", "total_steps": 100}, ["warmup_steps", "'110%'"]),
    ({"warmup_steps": "3M tokens"}, ["warmup_steps", "tokens_per_step"]),
    ({"warmup_steps": "2h30m", "tokens_per_step": 3}, ["warmup_steps"]),
    ({"total_steps": "10 tokens", "tokens_per_step": 30}, ["total_steps='10 tokens'"]),
])  # fmt: skip
def test_a_mistake_names_its_argument(arguments, words):
    with pytest.raises(ValueError) as error:
        get_scheduler(an_optimizer(), **arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


# Lengths in other units.


def test_shares_of_the_run_by_hand():
    schedule = Schedule(warmup_steps=0.01, cooldown_steps="10%", total_steps=1000)
    assert schedule.lengths == (10, 890, 100)
    # 0.29 * 100 < 29 in floats
    assert Schedule(warmup_steps=0.29, total_steps=100).lengths == (29, 71, 0)
    assert Schedule(warmup_steps=1 / 3, total_steps=300).lengths == (100, 200, 0)
    assert Schedule(warmup_steps="100%", total_steps=7).lengths == (7, 0, 0)
    assert Schedule(warmup_steps=0.01, total_steps=20).lengths == (0, 20, 0)


def test_tokens_by_hand():
    run = dict(total_steps="10M tokens", tokens_per_step=500_000)
    schedule = Schedule(warmup_steps="3M", cooldown_steps="2_000_000 tokens", **run)
    assert schedule.lengths == (6, 10, 4) and schedule.num_steps == 20
    # 25 tokens are 2.5 updates: each phase ends with the last whole update before its end.
    lengths = {f"{phase}_steps": "25 tokens" for phase in SCHEDULE_KINDS}
    assert Schedule(**lengths, tokens_per_step=10).lengths == (2, 3, 2)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 10**6), min_size=3, max_size=3).filter(any),
    st.integers(1, 10**5),
)
def test_phases_that_fill_the_run_in_tokens_fill_it_in_updates(tokens, tokens_per_step):
    if sum(tokens) < tokens_per_step:
        return
    lengths = {f"{phase}_steps": f"{n} tokens" for phase, n in zip(SCHEDULE_KINDS, tokens)}
    schedule = Schedule(
        **lengths, total_steps=f"{sum(tokens)} tokens", tokens_per_step=tokens_per_step
    )
    assert sum(schedule.lengths) == schedule.run_steps == sum(tokens) // tokens_per_step
    assert all(abs(n - t / tokens_per_step) < 1 for n, t in zip(schedule.lengths, tokens))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 10**6))
def test_shares_that_fit_into_the_run_fit_in_updates(warmup, decay, total):
    shares = dict(warmup_steps=f"{warmup}%", cooldown_steps=f"{decay}%")
    if warmup + decay > 100:
        with pytest.raises(ValueError, match="warmup_steps"):
            # A single update can hold two shares that overlap, so try a long run.
            Schedule(**shares, total_steps=100 * total)
        return
    schedule = Schedule(**shares, total_steps=total)
    assert sum(schedule.lengths) == total and min(schedule.lengths) >= 0
    assert schedule.lengths[0] == warmup * total // 100
    assert schedule.lengths[2] == -(-decay * total // 100)


# What a compiler sees.


@pytest.mark.parametrize("index", [float, np.float32, np.float64])
def test_the_rate_stays_a_python_float(index):
    optimizer = an_optimizer(1.0, 1)
    scheduler = get_scheduler(
        optimizer, warmup_steps=2, warmup_decay=index(0.5), training_kind="linear",
        training_decay=index(0.5), cooldown_steps=2, cooldown_decay=index(0.25), total_steps=6,
    )  # fmt: skip
    for _ in range(8):
        assert [type(group["lr"]) for group in optimizer.param_groups] == [float, float]
        follow(scheduler, 1)
    scheduler.load_state_dict({"last_epoch": 3})
    assert [type(group["lr"]) for group in optimizer.param_groups] == [float, float]


def test_a_tensor_rate_is_written_in_place():
    rates = [torch.tensor(1.0), torch.tensor(0.5)]
    optimizer = torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    )
    scheduler = get_scheduler(optimizer, warmup_steps=4)
    seen = []
    for _ in range(5):
        assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates))
        seen.append([rate.item() for rate in rates])
        optimizer.step()
        scheduler.step()
    np.testing.assert_allclose(np.array(seen), np.outer([0.25, 0.5, 0.75, 1, 1], [1, 0.5]))
    scheduler.load_state_dict({"last_epoch": 1})
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates))
    assert [rate.item() for rate in rates] == [0.5, 0.25]


def halves(step, every=1):
    return 0.5 ** (step // every)


def held(step, warmup_steps=10, cooldown_decay=0.0):
    return 0.5 if step < warmup_steps else cooldown_decay


class Ramp:
    def __init__(self, total_steps):
        self.total_steps = total_steps

    def __call__(self, step):
        return 1 - step / self.total_steps


def test_a_users_own_schedule_is_a_function_a_class_an_object_or_its_name(monkeypatch, tmp_path):
    (tmp_path / "my_rates.py").write_text("def flat(step):\n    return 0.25\n")
    monkeypatch.chdir(tmp_path)
    makes = {
        "function": (dict(schedule=halves, every=2), [1, 1, 0.5, 0.5]),
        "class": (dict(schedule=Ramp, total_steps=4), [1, 0.75, 0.5, 0.25]),
        "object": (dict(schedule=Ramp(2)), [1, 0.5, 0, -0.5]),
        "name": (dict(schedule="my_rates.flat"), [0.25] * 4),
        "torch": (
            dict(schedule="torch.optim.lr_scheduler.StepLR", step_size=2, gamma=0.1),
            [1, 1, 0.1, 0.1],
        ),
        "names of phases": (
            dict(schedule=held, warmup_steps=1, cooldown_decay=0.2),
            [0.5, 0.2, 0.2, 0.2],
        ),
    }
    for options, rates in makes.values():
        np.testing.assert_allclose(follow(get_scheduler(an_optimizer(), **options), 4), rates)
    budget = get_scheduler(an_optimizer(), schedule="time_budget", budget="1h")
    assert budget.triangle.seconds == 3600
    for wrong, words in (
        ("cosin", "time_budget"),
        ("my_rates.steep", "steep"),
        (3, "neither a name nor a class"),
    ):
        with pytest.raises(ValueError, match=words):
            get_scheduler(an_optimizer(), schedule=wrong)
    with pytest.raises(ValueError, match="budget"):
        get_scheduler(an_optimizer(), schedule="time_budget", hours=2)
    for unknown in ({"warmup_steps": 3}, {"evry": 3}):  # said here, before the first step
        with pytest.raises(ValueError, match=f"halves.*{next(iter(unknown))}.*every"):
            get_scheduler(an_optimizer(), schedule=halves, **unknown)
    with pytest.raises(ValueError, match="halves.*cooldown_steps"):
        get_scheduler(
            an_optimizer(), "linear", 0, 0.0, "constant", -1, 1.0, "linear", 5, schedule=halves
        )
