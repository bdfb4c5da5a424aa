"""Recall probes against solvers that read from left to right and know nothing of how a sequence was made."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from openk3.config import parse
from openk3.data import IGNORED, Loader
from openk3.data.probes import (
    AGAIN,
    MARKS,
    START,
    Copy,
    Needle,
    Probe,
    ProbeStream,
    Recall,
    measured_sequence,
)
from openk3.errors import InvalidInput

SEEDS = st.integers(0, 2**63 - 1)


@st.composite
def recalls(draw):
    keys = draw(st.integers(1, 40))
    return Recall(keys=keys, values=draw(st.integers(1, 20))), draw(st.integers(4, 4 * keys + 3))


@st.composite
def copies(draw):
    return Copy(values=draw(st.integers(1, 20))), draw(st.integers(3, 120))


@st.composite
def needles(draw):
    keys = draw(st.integers(1, 20))
    hidden = draw(st.integers(1, keys))
    probe = Needle(
        keys=keys, values=draw(st.integers(1, 20)), filler=draw(st.integers(1, 20)), needles=hidden
    )
    return probe, draw(st.integers(4, 4 * hidden + 200))


PROBES = st.one_of(recalls(), copies(), needles())


def is_key(probe, token: int) -> bool:
    return MARKS <= token < MARKS + probe.keys


def is_value(probe, token: int) -> bool:
    first = MARKS + (0 if isinstance(probe, Copy) else probe.keys)
    return first <= token < first + probe.values


def solve(probe, tokens: list[int]) -> list[int | None]:
    """What the next token must be, where the past decides it: a dictionary, or a copy."""
    answers: list[int | None] = []
    if isinstance(probe, Copy):
        for t in range(len(tokens)):
            past = tokens[: t + 1]
            string = [token for token in past[: past.index(AGAIN)] if token != START] if AGAIN in past else []
            done = len(past) - past.index(AGAIN) - 1 if AGAIN in past else 0
            answers.append(string[done] if done < len(string) else None)
        return answers
    known: dict[int, int] = {}
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        answers.append(known.get(token))
        if is_key(probe, token) and token not in known and after is not None:
            known[token] = after
    return answers


@settings(max_examples=200, deadline=None)
@given(PROBES, SEEDS, st.integers(0, 10**9))
def test_every_answer_follows_from_the_past_alone_and_everything_that_follows_is_asked(case, seed, index):
    probe, length = case
    tokens, targets = measured_sequence(probe, length, seed, index)
    assert (tokens.shape, targets.shape, tokens.dtype, targets.dtype) == (
        (length,),
        (length,),
        np.int64,
        np.int64,
    )
    expected = [IGNORED if answer is None else answer for answer in solve(probe, tokens.tolist())]
    assert targets.tolist() == expected
    assert (targets != IGNORED).sum() == probe.answers(length)
    assert all(is_value(probe, answer) for answer in targets[targets != IGNORED].tolist())
    assert tokens[0] == START
    assert 0 <= tokens.min() <= tokens.max() < probe.vocab_size


@settings(max_examples=100, deadline=None)
@given(PROBES, SEEDS)
def test_an_answer_is_read_on_as_the_next_token_but_for_the_last(case, seed):
    probe, length = case
    tokens, targets = measured_sequence(probe, length, seed, 0)
    asked = np.flatnonzero(targets != IGNORED)
    assert asked[-1] == length - 1
    assert tokens[asked[:-1] + 1].tolist() == targets[asked[:-1]].tolist()


@settings(max_examples=100, deadline=None)
@given(recalls(), SEEDS)
def test_recall_shows_pairs_with_different_keys_and_asks_each_key_once(case, seed):
    probe, length = case
    tokens = measured_sequence(probe, length, seed, 0).tokens
    n = length // 4
    told, asked = tokens[length - 4 * n + 1 : length - 2 * n + 1], tokens[length - 2 * n + 1 :]
    assert set(tokens[: length - 4 * n + 1]) == {START}
    assert len(told) == 2 * n
    assert len(set(told[::2])) == n
    assert all(is_key(probe, key) for key in told[::2])
    assert all(is_value(probe, value) for value in told[1::2])
    assert sorted(asked[::2]) == sorted(told[::2])


@settings(max_examples=100, deadline=None)
@given(copies(), SEEDS)
def test_the_copy_is_the_string(case, seed):
    probe, length = case
    tokens, targets = measured_sequence(probe, length, seed, 0)
    (mark,) = np.flatnonzero(tokens == AGAIN)
    opening = length - 2 * ((length - 1) // 2)
    assert set(tokens[:opening]) == {START}
    assert tokens[opening:mark].tolist() == targets[mark:].tolist()


@settings(max_examples=100, deadline=None)
@given(needles(), SEEDS)
def test_each_needle_stands_once_in_the_haystack_and_all_else_there_is_filler(case, seed):
    probe, length = case
    tokens, _ = measured_sequence(probe, length, seed, 0)
    n = min(probe.needles, length // 4)
    haystack, asked = tokens[1 : length - 2 * n + 1].tolist(), tokens[length - 2 * n + 1 :].tolist()
    found = [at for at, token in enumerate(haystack) if is_key(probe, token)]
    assert sorted(haystack[at] for at in found) == sorted(asked[::2])
    assert len(set(asked[::2])) == n
    for at in found:
        assert is_value(probe, haystack[at + 1])
    pairs = {at for start in found for at in (start, start + 1)}
    assert len(pairs) == 2 * n
    first_filler = MARKS + probe.keys + probe.values
    others = [token for at, token in enumerate(haystack) if at not in pairs]
    assert all(first_filler <= token < probe.vocab_size for token in others)


def chi_square(counts: np.ndarray) -> float:
    """In standard deviations above its mean, for equal chances."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def test_a_needle_comes_to_every_place_of_the_haystack_equally_often():
    probe, length = Needle(keys=1, values=1, filler=1, needles=1), 43
    places = [int(np.argmax(measured_sequence(probe, length, 5, i).tokens == MARKS)) for i in range(8000)]
    counts = np.bincount(places, minlength=length)
    assert set(np.flatnonzero(counts)) == set(range(1, 41))  # the pair, then the question, in 42 tokens
    assert chi_square(counts[1:41]) < 5


def test_values_and_the_order_of_questions_are_drawn_evenly():
    probe, length = Recall(keys=5, values=5), 20
    values, turns = np.zeros((5, 5)), np.zeros((5, 5))  # value by place; place told by turn asked
    for index in range(4000):
        tokens = measured_sequence(probe, length, 5, index).tokens
        told, asked = tokens[1:11], tokens[11::2]
        values[np.arange(5), told[1::2] - MARKS - 5] += 1
        turns[[told[::2].tolist().index(key) for key in asked], np.arange(5)] += 1
    assert chi_square(values) < 5
    assert chi_square(turns) < 5


@pytest.mark.parametrize(
    ("probe", "length"),
    [(Recall(keys=16, values=7), 64), (Copy(values=5), 41), (Needle(keys=9, values=4, needles=3), 90)],
)
def test_chance_and_the_unbound_level_are_what_such_guesses_get(probe, length):
    """One guesser knows the alphabet, the other which values were shown and which of them were given back."""
    chance = random.Random(0)
    alphabet = range(MARKS + getattr(probe, "keys", 0), MARKS + getattr(probe, "keys", 0) + probe.values)
    blind = unbound = total = 0
    for index in range(1500):
        tokens, targets = measured_sequence(probe, length, 0, index)
        answers = targets[targets != IGNORED].tolist()
        shown = [token for token in tokens.tolist() if token in alphabet][: len(answers)]
        assert sorted(shown) == sorted(answers)
        for answer in answers:
            blind += chance.choice(alphabet) == answer
            unbound += chance.choice(shown) == answer
            shown.remove(answer)
        total += len(answers)
    deviation = math.sqrt(0.25 / total)
    assert abs(blind / total - probe.chance) < 5 * deviation
    assert abs(unbound / total - probe.unbound(length)) < 5 * deviation


def test_one_value_shown_needs_no_binding():
    assert Needle(needles=1, values=64).unbound(100) == 1.0


@pytest.mark.parametrize("probe", [Recall(), Copy(), Needle()])
def test_seed_index_and_length_name_a_sequence_and_equal_names_give_equal_ones(probe):
    drawn = {
        (seed, index): tuple(measured_sequence(probe, 64, seed, index).tokens)
        for seed in range(5)
        for index in range(5)
    }
    assert len(set(drawn.values())) == 25
    assert drawn == {
        name: tuple(measured_sequence(probe, 64, *name).tokens) for name in reversed(list(drawn))
    }


def test_what_is_measured_is_not_what_is_trained():
    probe = Copy()
    trained = {tuple(ProbeStream(probe, [64], 64, seed=0).sample(i).tokens) for i in range(100)}
    measured = {tuple(measured_sequence(probe, 64, 0, i).tokens) for i in range(100)}
    assert len(trained) == len(measured) == 100
    assert not trained & measured


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.integers(0, 10**9))
def test_a_sample_of_the_stream_is_filled_with_sequences_of_one_length(seed, index):
    probe = Recall(keys=32)
    stream = ProbeStream(probe, [16, 32, 64], 64, seed)
    sample = stream.sample(index)
    assert len(sample.tokens) == len(sample.targets) == sum(sample.lengths) == stream.tokens_per_sample == 64
    assert len(set(sample.lengths)) == 1
    expected, parts = [], np.split(sample.tokens, np.cumsum(sample.lengths)[:-1])
    for part in parts:
        expected += [IGNORED if answer is None else answer for answer in solve(probe, part.tolist())]
    assert sample.targets.tolist() == expected
    assert len({tuple(part) for part in parts}) == len(parts)
    again = ProbeStream(probe, [16, 32, 64], 64, seed).sample(index)
    assert np.array_equal(again.tokens, sample.tokens)


def test_the_lengths_of_training_are_drawn_equally_often():
    stream = ProbeStream(Copy(), [16, 32, 64], 64, seed=3)
    counts = np.bincount([stream.sample(i).lengths[0] for i in range(3000)])
    assert chi_square(counts[counts > 0]) < 5
    assert set(np.flatnonzero(counts)) == {16, 32, 64}


def test_a_loader_reads_the_stream_and_goes_on_where_it_was():
    def loader():
        return Loader(ProbeStream(Needle(needles=2), [32], 32, seed=1), 4, 2)

    whole, part = loader(), loader()
    steps = [next(whole) for _ in range(4)]
    next(part)
    next(part)
    resumed = loader()
    resumed.load_state_dict(part.state_dict())
    for expected, found in zip(steps[2], next(resumed), strict=True):
        assert expected.tokens.equal(found.tokens)
        assert expected.cu_seqlens.tolist() == found.cu_seqlens.tolist() == [0, 32, 64]


def test_a_probe_is_read_from_a_table_by_its_kind():
    read = TypeAdapter(Probe).validate_python
    assert read({"kind": "copy", "values": 3}) == Copy(values=3)
    assert read({"kind": "needle", "needles": 2, "keys": 5}) == Needle(needles=2, keys=5)
    assert read({"kind": "recall", "keys": 9}) == Recall(keys=9)


@pytest.mark.parametrize(
    ("probe", "length", "why"),
    [
        (Recall(keys=8), 3, r"length must lie in 4\.\.35"),
        (Recall(keys=8), 36, "9 pairs with different keys, and there are 8"),
        (Copy(), 2, "no room for a string"),
        (Needle(), 3, "no room for a pair"),
    ],
)
def test_a_length_that_cannot_be_is_refused_with_what_would_be_right(probe, length, why):
    with pytest.raises(InvalidInput, match=why):
        measured_sequence(probe, length, 0, 0)
    with pytest.raises(InvalidInput, match=why):
        ProbeStream(probe, [length], length, 0)


def test_more_needles_than_keys_are_refused():
    with pytest.raises(InvalidInput, match="9 needles need as many keys, there are 8"):
        parse(Needle, {"needles": 9, "keys": 8}, "here")


@pytest.mark.parametrize(("lengths", "why"), [([], "no length"), ([16, 24], "sequences of 24 tokens do not")])
def test_a_stream_needs_lengths_that_fill_its_samples(lengths, why):
    with pytest.raises(InvalidInput, match=why):
        ProbeStream(Copy(), lengths, 64, 0)
