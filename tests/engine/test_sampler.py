"""Draws against the distribution that its definition in plain numbers gives, knob by knob and mixed."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from openk3.engine.sampler import SamplingParams, choose, draw, probabilities
from openk3.errors import InvalidInput

SCORES = torch.tensor([2.0, 1.5, 1.5, 0.3, -0.2, -1.0, -3.0, 0.9], dtype=torch.float64)
PROMPT, WRITTEN = [3, 3, 5], [0, 0, 7]
KNOBS = {
    "nothing": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 3},
    "top_k of equals": {"top_k": 2},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.7},
    "bias": {"logit_bias": {6: 5.0, 0: -10.0}},
    "top_k and top_p": {"top_k": 4, "top_p": 0.7},
    "all": {
        "temperature": 1.3,
        "top_k": 6,
        "top_p": 0.9,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.4,
        "repetition_penalty": 0.8,
        "logit_bias": {2: 0.7},
    },
}


def by_definition(knobs: dict) -> list[float]:
    """In plain numbers, one token at a time."""
    x = SCORES.tolist()
    for token, bias in knobs.get("logit_bias", {}).items():
        x[token] += bias
    penalty = knobs.get("repetition_penalty", 1.0)
    for token in {*PROMPT, *WRITTEN}:
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token, times in Counter(WRITTEN).items():
        x[token] -= knobs.get("presence_penalty", 0.0) + knobs.get("frequency_penalty", 0.0) * times
    weights = [math.exp(value / knobs.get("temperature", 1.0)) for value in x]
    ranked = sorted(range(len(x)), key=lambda token: -weights[token])
    if knobs.get("top_k"):
        ranked = ranked[: knobs["top_k"]]
    total, kept, sum_before = sum(weights[token] for token in ranked), [], 0.0
    for token in ranked:
        if sum_before < knobs.get("top_p", 1.0) * total:
            kept.append(token)
        sum_before += weights[token]
    most = max(weights[token] for token in kept)
    kept = [token for token in kept if weights[token] >= knobs.get("min_p", 0.0) * most]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(x))]


@pytest.mark.parametrize("name", KNOBS)
def test_the_distribution_is_that_of_the_definition(name):
    made = probabilities(SCORES, SamplingParams(**KNOBS[name]), PROMPT, WRITTEN)
    torch.testing.assert_close(made, torch.tensor(by_definition(KNOBS[name]), dtype=torch.float64))


@pytest.mark.parametrize("name", KNOBS)
def test_draws_follow_it(name):
    """Chi-square over 10^5 draws; by chance it fails once in 10^6."""
    expected = by_definition(KNOBS[name])
    p = probabilities(SCORES, SamplingParams(**KNOBS[name]), PROMPT, WRITTEN)
    sums = p.cumsum(0)
    numbers = torch.tensor([draw(11, place) for place in range(100_000)], dtype=torch.float64)
    counts = (
        torch.searchsorted(sums, numbers * sums[-1], right=True).bincount(minlength=len(expected)).tolist()
    )
    assert all(not count for count, share in zip(counts, expected, strict=True) if share == 0)
    cells = [(count, 1e5 * share) for count, share in zip(counts, expected, strict=True) if share > 0]
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in cells)
    freedom = len(cells) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 15


def test_a_draw_is_of_its_seed_and_place_alone():
    params = [SamplingParams(seed=seed, temperature=2.0) for seed in range(50)]
    made = [[choose(SCORES, p, written=[1] * place) for place in range(20)] for p in params]
    again = [
        [choose(SCORES, p, written=[1] * place) for place in reversed(range(20))] for p in reversed(params)
    ]
    assert made == [row[::-1] for row in reversed(again)]
    assert len({tuple(row) for row in made}) == 50
    assert len({draw(seed, place) for seed in range(100) for place in range(100)}) == 10_000


def test_the_most_likely_is_the_first_of_equals():
    assert choose(torch.tensor([0.0, 3.0, 3.0]), SamplingParams(temperature=0.0)) == 1


def test_nothing_outside_of_what_may_be_drawn():
    scores = torch.full((50,), -torch.inf)
    scores[7], scores[31] = 0.0, 1.0
    made = {choose(scores, SamplingParams(seed=seed)) for seed in range(200)}
    assert made == {7, 31}


@pytest.mark.parametrize("scores", [[-math.inf] * 3, [0.0, math.nan], [math.inf, 0.0]])
def test_scores_that_say_nothing_are_refused(scores):
    with pytest.raises(InvalidInput, match="the largest score is"):
        choose(torch.tensor(scores), SamplingParams())


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": 2},
        {"presence_penalty": 3},
        {"frequency_penalty": math.nan},
        {"repetition_penalty": 0},
        {"seed": -1},
        {"logit_bias": {1: math.inf}},
    ],
)
def test_what_is_out_of_range_is_named(wrong):
    with pytest.raises(InvalidInput, match=f"sampling: {next(iter(wrong))}"):
        SamplingParams(**wrong)
