"""The spike guard as a state machine."""

from __future__ import annotations

import json
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.train.spike import SpikeConfig, SpikeGuard

CONFIG = SpikeConfig(multiple=5.0, window=8, history=4, patience=3)
LOSS = 2.0


def warm(norms=(1.0, 1.2, 0.9, 1.1)):
    guard = SpikeGuard(CONFIG)
    for norm in norms:
        assert guard.admits(norm, LOSS)
    return guard


def test_a_norm_above_the_multiple_of_the_median_is_refused_and_the_next_normal_one_is_not():
    guard = warm()
    median = statistics.median([1.0, 1.2, 0.9, 1.1])
    assert not guard.admits(5 * median * 1.001, LOSS)
    assert guard.admits(5 * median, LOSS)
    assert guard.skipped == 1


def test_nothing_is_refused_before_there_is_a_history_except_what_is_not_finite():
    guard = SpikeGuard(CONFIG)
    assert guard.admits(1.0, LOSS)
    assert guard.admits(1e6, LOSS)
    for norm in (math.nan, math.inf):
        assert not guard.admits(norm, LOSS)


def test_refused_norms_do_not_move_the_limit():
    guard = warm()
    limit = guard.limit
    for _ in range(2):
        guard.admits(1e9, LOSS)
    assert guard.limit == limit


def test_too_many_spikes_in_a_row_exhaust_it_and_one_normal_step_forgives():
    guard = warm()
    for _ in range(CONFIG.patience - 1):
        guard.admits(1e9, LOSS)
    assert not guard.exhausted
    guard.admits(1.0, LOSS)
    for _ in range(CONFIG.patience):
        assert not guard.exhausted
        guard.admits(1e9, LOSS)
    assert guard.exhausted


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.01, 100) | st.just(math.inf), max_size=40), st.integers(0, 40))
def test_a_restored_guard_decides_as_the_one_that_went_on(norms, cut):
    through = SpikeGuard(CONFIG)
    decisions = [through.admits(norm, LOSS) for norm in norms]

    first = SpikeGuard(CONFIG)
    before = [first.admits(norm, LOSS) for norm in norms[:cut]]
    second = SpikeGuard(CONFIG)
    second.restore(json.loads(json.dumps(first.state())))
    assert before + [second.admits(norm, LOSS) for norm in norms[cut:]] == decisions
    assert second.state() == through.state()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=40))
def test_the_limit_is_the_multiple_of_the_median_of_the_last_accepted(norms):
    guard, accepted = SpikeGuard(CONFIG), []
    for norm in norms:
        recent = accepted[-CONFIG.window :]
        expected = CONFIG.multiple * statistics.median(recent) if len(recent) >= CONFIG.history else math.inf
        assert guard.limit == pytest.approx(expected)
        if guard.admits(norm, LOSS):
            accepted.append(norm)


def test_a_loss_far_above_the_median_is_refused_whatever_its_gradient():
    guard = SpikeGuard(CONFIG)
    for loss in (2.0, 2.4, 1.8, 2.2):
        assert guard.admits(1.0, loss)
    assert not guard.admits(1.0, 2.1 + CONFIG.loss_rise + 1e-6)
    assert guard.losses == [2.0, 2.4, 1.8, 2.2]
    assert guard.admits(1.0, 2.1 + CONFIG.loss_rise)
