"""Mixtures: shares that hold from the start on, sources in their own order, no silent renormalising."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import numbered_documents

from openk3.data.mixing import PERIOD, Mixture, spread
from openk3.data.windows import Windows
from openk3.errors import InvalidInput

WEIGHTS = st.lists(st.floats(0.01, 10), min_size=1, max_size=5)


def streams(n: int, context: int = 4) -> dict[str, Windows]:
    return {f"s{i}": Windows(numbered_documents([5 + i, 7, 9]), context, seed=i) for i in range(n)}


@settings(max_examples=40, deadline=None)
@given(WEIGHTS)
def test_every_stretch_from_the_start_has_its_shares_within_one_sample(weights):
    names = [f"s{i}" for i in range(len(weights))]
    mixture = Mixture(streams(len(weights)), dict(zip(names, weights, strict=True)))
    counts = dict.fromkeys(names, 0)
    for index in range(2 * PERIOD):
        name, position = mixture.locate(index)
        assert position == counts[name]  # each source is read from its start, in order, without gaps
        counts[name] += 1
        for name, weight in zip(names, weights, strict=True):
            due = (index + 1) * weight / sum(weights)
            # one sample of the rounding of shares per period, and the bounds of the largest deficit
            assert due - counts[name] < len(weights) + 1 + index / PERIOD
            assert counts[name] - due < 1 + 1 + index / PERIOD


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_the_table_gives_each_source_exactly_its_places(places):
    table = spread(places).tolist()
    assert [table.count(source) for source in range(len(places))] == places
    counts = [0] * len(places)
    for place, source in enumerate(table):
        counts[source] += 1
        for count, share in zip(counts, places, strict=True):
            assert count - share * (place + 1) / sum(places) < 1


def test_a_sample_of_the_mixture_is_the_sample_of_its_source():
    parts = streams(3)
    mixture = Mixture(parts, {"s0": 1, "s1": 2, "s2": 4})
    for index in [0, 1, 2, 100, PERIOD - 1, PERIOD, 12345]:
        name, position = mixture.locate(index)
        assert mixture.sample(index).tokens.tolist() == parts[name].sample(position).tokens.tolist()


def test_the_epoch_of_a_mixture_is_that_of_the_source_read_most_often():
    parts = {
        "small": Windows(numbered_documents([8]), 4, 0),
        "large": Windows(numbered_documents([8000]), 4, 0),
    }
    mixture = Mixture(parts, {"small": 1, "large": 1})
    assert [mixture.epoch(index) for index in (0, 2, 3, 8, 4 * 1000)] == [0, 0, 1, 2, 1000]


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        (2, {"s0": 1.0}, "weights are given for"),
        (1, {"s0": 1.0, "gone": 1.0}, "weights are given for .*gone"),
        (0, {}, "weights are given for"),
        (2, {"s0": 1.0, "s1": 0.0}, "weight of 's1' is 0.0; weights must be positive"),
        (2, {"s0": 1.0, "s1": -1.0}, "weight of 's1' is -1.0"),
        (2, {"s0": 1.0, "s1": float("nan")}, "weight of 's1' is nan"),
        (2, {"s0": 1.0, "s1": 1e-5}, "'s1' is under half of 1/4096"),
    ],
)
def test_a_source_that_is_missing_or_weightless_is_refused(names, weights, message):
    with pytest.raises(InvalidInput, match=message):
        Mixture(streams(names), weights)


def test_sources_with_samples_of_different_sizes_are_refused():
    parts = {"a": Windows(numbered_documents([9]), 4, 0), "b": Windows(numbered_documents([9]), 8, 0)}
    with pytest.raises(InvalidInput, match=r"samples differ in size .*'a': 4, 'b': 8"):
        Mixture(parts, {"a": 1, "b": 1})
