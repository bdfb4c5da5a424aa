"""What users of public servers reported of prefix caches on hybrid models, each as a test.

On the model of integers, where any state or latent out of place changes the text.
"""

from __future__ import annotations

import random

import pytest

from engine.toy import ToyRunner, alone
from openk3.engine.core import Engine, Limits, Request
from openk3.errors import InvalidInput

UNIT, PAGE = 8, 64


def engine_of(pages: int = 200, unit: int = UNIT, **limits) -> Engine:
    return Engine(ToyRunner(pages, PAGE, 3), pages, lambda request, token: token, Limits(unit=unit, **limits))


def finished(engine: Engine, *prompts: list[int], count: int = 5) -> list[Request]:
    requests = [engine.add(prompt, count) for prompt in prompts]
    while any(request.finish is None for request in requests):
        engine.step()
        engine.check()
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.made == alone(prompt, count, frozenset(), 3)
    return requests


def text(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(97) for _ in range(length)]


def test_the_same_prompt_again_is_reused():
    engine, prompt = engine_of(), text(500)
    assert finished(engine, prompt)[0].cached == 0
    assert finished(engine, prompt)[0].cached == 499 // UNIT * UNIT
    assert engine.cache.counts.hit == 496


@pytest.mark.parametrize("length", [UNIT + 1, 2 * UNIT, PAGE - 1])
def test_prompts_shorter_than_a_page_are_reused(length):
    engine, prompt = engine_of(), text(length)
    finished(engine, prompt)
    assert finished(engine, prompt)[0].cached == (length - 1) // UNIT * UNIT > 0


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1])
def test_lengths_around_a_page_are_reused_and_a_token_is_always_computed(length):
    engine, prompt = engine_of(), text(length)
    finished(engine, prompt)
    assert finished(engine, prompt)[0].cached == (length - 1) // UNIT * UNIT


def test_where_prompts_part_the_third_is_reused():
    """Nobody said where the system prompt ends."""
    engine, system = engine_of(), text(300)
    cached = [finished(engine, system + text(100, seed))[0].cached for seed in (1, 2, 3)]
    assert cached == [0, 0, 300 // UNIT * UNIT]


def test_where_a_turn_ends_the_second_is_reused():
    engine, system = engine_of(), text(300)
    for seed, expected in ((1, 0), (2, 300 // UNIT * UNIT)):
        request = engine.add(system + text(100, seed), 3, turns=[len(system)])
        while request.finish is None:
            engine.step()
        assert request.cached == expected


def test_eight_at_once_with_prefixes_of_their_own_and_a_storm_of_aborts():
    engine = engine_of(pages=120, step_tokens=100, piece_tokens=17)
    shared = [text(130, seed) for seed in range(3)]
    for turn in range(4):
        finished(engine, *(shared[i % 3] + text(20, 100 * turn + i) for i in range(8)))
    storm = [engine.add(shared[i % 3] + text(50, i), 20) for i in range(30)]
    for request in storm[::2]:
        engine.abort(request)
    for _ in range(3):
        engine.step()
    for request in storm:
        engine.abort(request)
    engine.check()
    assert not engine.running and not engine.waiting and engine.pool.available() == engine.pool.count
    finished(engine, *(prefix + text(9, 7) for prefix in shared))


def test_what_is_wrong_with_one_request_is_no_others_end():
    engine = engine_of()
    spoiled = engine.add(text(70, 1), 10)

    def refusing(request: Request, token: int) -> int:
        if request is spoiled and len(request.made) == 3:
            raise InvalidInput("sampling: the largest score is nan")
        return token

    engine.choose = refusing
    finished(engine, text(80, 2), text(70, 1))
    while spoiled.finish is None:
        engine.step()
    assert spoiled.finish == "error" and "nan" in str(spoiled.error) and len(spoiled.made) == 3
    engine.check()


def test_a_conversation_goes_on_from_its_last_answer():
    engine, history, before = engine_of(), text(90), 0
    for turn in range(6):
        request = engine.add(history, 50)
        while request.finish is None:
            engine.step()
        assert request.cached >= before // UNIT * UNIT
        before = len(request.tokens) - 1
        history = [*request.tokens, *text(30, turn)]
        assert len(engine.cache._checkpoints) <= 4 * (turn + 1)


def test_an_admitted_request_can_always_finish():
    """Memory for one and a half: the second waits, whatever the cache holds."""
    engine = engine_of(pages=9 + 3)
    requests = [engine.add(text(400, seed), 100) for seed in range(5)]
    while any(request.finish is None for request in requests):
        assert len(engine.running) <= 1
        engine.step()
        engine.check()
    assert [request.finish for request in requests] == ["length"] * 5
