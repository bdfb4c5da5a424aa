"""Schedules: where they start, peak and end, and that nothing jumps on the way."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from openk3.errors import InvalidInput
from openk3.optim import OptimConfig, ScheduleConfig, lr_factor


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_it_warms_up_to_the_peak_and_ends_at_the_minimum(kind):
    config = ScheduleConfig(kind=kind, warmup=0.01, minimum=0.1)
    factors = [lr_factor(step, 1000, config) for step in range(1010)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(factors) == factors[9] == 1.0
    assert factors[999:] == [0.1] * 11


def test_cosine_follows_the_cosine():
    config = ScheduleConfig(warmup=0.0, minimum=0.2)
    for share in (0.25, 0.5, 0.75):
        expected = 0.2 + 0.8 * (1 + math.cos(math.pi * share)) / 2
        assert lr_factor(round(share * 400), 401, config) == pytest.approx(expected, abs=1e-12)


def test_wsd_is_constant_then_falls_in_a_line():
    config = ScheduleConfig(kind="wsd", warmup=0.01, minimum=0.0, decay=0.2)
    factors = [lr_factor(step, 1000, config) for step in range(1000)]
    assert set(factors[9:800]) == {1.0}
    assert factors[799:] == pytest.approx([1 - i / 200 for i in range(201)])


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(1, 300),
    kind=st.sampled_from(["cosine", "wsd"]),
    warmup=st.floats(0, 1),
    minimum=st.floats(0, 1),
    decay=st.floats(0.01, 1),
)
def test_it_rises_then_falls_within_bounds_and_without_jumps(total, kind, warmup, minimum, decay):
    config = ScheduleConfig(kind=kind, warmup=warmup, minimum=minimum, decay=decay)
    factors = [lr_factor(step, total, config) for step in range(total)]
    assert all(0 < f <= 1 for f in factors) or minimum == 0
    peak = factors.index(max(factors))
    assert factors[peak] == 1.0
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    rise = 1 / (peak + 1)
    length = total - 1 - peak if kind == "cosine" else min(math.ceil(decay * total), total - 1 - peak)
    fall = (math.pi / 2 if kind == "cosine" else 1) * (1 - minimum) / max(length, 1)
    steps = [abs(b - a) for a, b in itertools.pairwise(factors)]
    assert all(step <= max(rise, fall) + 1e-12 for step in steps)


def test_a_run_without_steps_and_a_negative_step_are_refused():
    with pytest.raises(InvalidInput, match="step 0 of 0"):
        lr_factor(0, 0, ScheduleConfig())
    with pytest.raises(InvalidInput, match="step -1 of 5"):
        lr_factor(-1, 5, ScheduleConfig())


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (lambda: ScheduleConfig(warm_up=0.1), "warm_up"),
        (lambda: ScheduleConfig(warmup=1.5), "warmup"),
        (lambda: OptimConfig(lr=0.0), "lr"),
        (lambda: OptimConfig(betas=(0.9, 1.0)), "betas"),
        (lambda: OptimConfig(momentum=1.0), "momentum"),
        (lambda: OptimConfig(coefficients="jordon"), "coefficients"),
    ],
)
def test_a_setting_that_is_unknown_or_out_of_range_is_named(config, field):
    with pytest.raises(ValidationError, match=field):
        config()
