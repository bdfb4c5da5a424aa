"""Draws against the published generator, and against what even chances give."""

from __future__ import annotations

import numpy as np
import pytest

from openk3.data.draws import Draws


def test_draws_below_a_bound_reach_every_number_and_a_subset_has_no_repeats():
    draws = Draws(1, 2, 3)
    counts = np.bincount(draws.below(7, 21000), minlength=7)
    assert ((counts - 3000) ** 2 / 3000).sum() < 24  # 6 degrees of freedom: mean 6, deviation 3.5
    for _ in range(50):
        subset = draws.subset(20, 8)
        assert len(set(subset.tolist())) == 8
        assert 0 <= subset.min() <= subset.max() < 20
    assert sorted(draws.subset(9, 9)) == list(range(9))


@pytest.mark.parametrize("name", [(0,), (1, 2, 3), (2**63 - 1, 0, 8192, 10**9)])
def test_draws_are_those_of_the_published_generator(name):
    """PCG64 (XSL-RR), in whole numbers, from the state that NumPy's seeding gives."""
    state = np.random.PCG64(np.random.SeedSequence(name)).state["state"]
    at, raw = state["state"], []
    for _ in range(20):
        at = (at * 0x2360ED051FC65DA44385DF649FCCF645 + state["inc"]) % 2**128
        mixed, turn = (at >> 64) ^ (at % 2**64), at >> 122
        raw.append((mixed >> turn | mixed << (64 - turn)) % 2**64)
    assert Draws(*name).below(1000, 20).tolist() == [bits % 1000 for bits in raw]
    assert Draws(*name).subset(20, 20).tolist() == sorted(range(20), key=lambda i: raw[i])
