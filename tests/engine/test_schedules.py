"""Random schedules on a model of integers: every request says what it says alone, and no page is lost."""

from __future__ import annotations

import random

import pytest

from engine.toy import ToyRunner, alone
from openk3.engine.core import BudgetClass, Engine, Limits


def schedule(seed: int) -> dict[str, int]:
    draw = random.Random(seed)
    unit = draw.choice([1, 2, 4, 16])
    page = unit * draw.choice([1, 2, 3, 8])
    groups = draw.choice([1, 2, 3])
    longest = draw.choice([20, 60, 200])
    pages = draw.choice([1, 1, 2, 5]) * (-(-(longest + 20) // page) + groups) + draw.randrange(10)
    limits = Limits(
        unit=unit,
        step_tokens=draw.choice([1, 17, 64, 512, 10_000]),
        piece_tokens=draw.choice([1, 17, 64, 512, 10_000]),
        running=draw.choice([1, 3, 100]),
        checkpoint_share=draw.choice([0.0, 0.3, 1.0]),
        classes=draw.choice(
            [(BudgetClass(1 << 30, 1 << 30),), (BudgetClass(16, 40), BudgetClass(1 << 30, 100))]
        ),
        cache=draw.random() < 0.9,
    )
    engine = Engine(ToyRunner(pages, page, groups), pages, lambda request, token: token, limits)
    prefixes = [[draw.randrange(97) for _ in range(draw.randrange(1, longest // 2))] for _ in range(3)]
    live, finished, hits = {}, 0, 0
    left = draw.randrange(1, 14)
    while left or live:
        if left and draw.random() < 0.4:
            left -= 1
            base = list(draw.choice(prefixes))[: draw.randrange(1, longest // 2)]
            prompt = base + [draw.randrange(97) for _ in range(draw.randrange(longest - len(base)))]
            count, stop = draw.randrange(1, 20), frozenset(draw.sample(range(97), 3))
            turns = [draw.randrange(len(prompt) + 1) for _ in range(draw.randrange(3))]
            request = engine.add(prompt, count, stop=stop, turns=turns)
            live[request] = alone(prompt, count, stop, groups)
            if draw.random() < 0.5:
                prefixes[draw.randrange(3)] = (prompt + live[request])[: longest - 1]
        if live and draw.random() < 0.05:
            gone = draw.choice(list(live))
            engine.abort(gone)
            assert gone.made == live.pop(gone)[: len(gone.made)]
        ended = engine.step()
        engine.check()
        for request in ended:
            assert request.made == live.pop(request), f"seed {seed}: request {request.id}"
            finished += 1
            hits += request.cached
        assert engine.runner.steps < 100_000
    assert not engine.running and not engine.waiting
    assert engine.pool.promised == 0
    return {"finished": finished, "hits": hits, "evicted": engine.cache.counts.pages_evicted}


@pytest.mark.parametrize(
    ("first", "count"), [(0, 1000), (1000, 1000), pytest.param(2000, 48_000, marks=pytest.mark.slow)]
)
def test_random_schedules_say_what_each_request_says_alone(first, count):
    total = {"finished": 0, "hits": 0, "evicted": 0}
    for seed in range(first, first + count):
        try:
            for name, number in schedule(seed).items():
                total[name] += number
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    assert all(number > 100 for number in total.values()), total  # they did what they are for


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_prompt_of_whole_units_and_its_neighbours_are_reused(extra):
    engine = Engine(ToyRunner(100, 32, 2), 100, lambda request, token: token, Limits(unit=8))
    prompt = list(range(48 + extra))
    for expected in (0, (len(prompt) - 1) // 8 * 8):
        request = engine.add(prompt, 4)
        while request.finish is None:
            engine.step()
        assert request.cached == expected
