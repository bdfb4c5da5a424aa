"""The plain loop: it draws what the distribution says, from the state it carries, and stops where told."""

from __future__ import annotations

import pytest
import torch

from model.tiny import BASE, built
from openk3.errors import InvalidInput
from openk3.model.generate import Sampling, draw, generate

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def model():
    return built(BASE).eval()


def test_greedy_tokens_are_the_argmax_of_a_fresh_forward_each_time(model):
    prompt = [3, 1, 4, 1, 5]
    written = list(generate(model, prompt, 12, sampling=GREEDY))
    sequence = list(prompt)
    for token in written:
        cu = torch.tensor([0, len(sequence)], dtype=torch.int32)
        logits = model.logits(model(torch.tensor(sequence), cu).hidden[-1:])
        assert token == int(logits.argmax())
        sequence.append(token)
    assert len(written) == 12


def test_generation_ends_before_the_first_stop_token(model):
    free = list(generate(model, [2, 7], 10, sampling=GREEDY))
    stop = free[4]
    assert list(generate(model, [2, 7], 10, sampling=GREEDY, stop={stop})) == free[: free.index(stop)]


def test_only_allowed_tokens_are_drawn(model):
    allowed = torch.zeros(BASE.vocab_size, dtype=torch.bool)
    allowed[[5, 9]] = True
    assert set(generate(model, [2], 30, allowed=allowed)) <= {5, 9}


def test_equal_seeds_draw_equal_texts(model):
    texts = [tuple(generate(model, [8], 20, sampling=Sampling(seed=seed))) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_draws_follow_the_tempered_truncated_distribution():
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])
    generator = torch.Generator().manual_seed(0)
    n = 20_000
    counts = torch.zeros(5)
    for _ in range(n):
        counts[draw(logits, Sampling(temperature=0.7, top_p=0.9, top_k=3), generator)] += 1
    p = torch.softmax(logits / 0.7, 0)
    p[2:] = 0  # the first two already reach 0.9
    p = p / p.sum()
    assert float((counts / n - p).abs().max()) < 4 * 0.5 / n**0.5


def test_top_k_of_one_is_greedy_at_any_temperature():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, generator=generator)
    sampling = Sampling(temperature=3.0, top_k=1)
    assert {draw(logits, sampling, generator) for _ in range(20)} == {int(logits.argmax())}


def test_wrong_requests_are_named(model):
    with pytest.raises(InvalidInput, match="prompt has no tokens"):
        next(generate(model, [], 3))
    with pytest.raises(InvalidInput, match="token 99 is outside the model's vocabulary of 61"):
        next(generate(model, [1, 99], 3))
    with pytest.raises(InvalidInput, match="temperature"):
        Sampling(temperature=-1)
    with pytest.raises(InvalidInput, match="top_p"):
        Sampling(top_p=0)
    with pytest.raises(InvalidInput, match="top_k"):
        Sampling(top_k=0)


@pytest.mark.parametrize("temperature", [1e-300, 1e-6])
def test_the_smallest_temperatures_draw_the_most_likely_token(temperature):
    logits = torch.tensor([1.0, 4.0, -2.0, 3.9])
    generator = torch.Generator().manual_seed(0)
    assert {draw(logits, Sampling(temperature=temperature), generator) for _ in range(20)} == {1}


@pytest.mark.parametrize("wrong", [{"temperature": float("inf")}, {"seed": -1}, {"seed": 2**64}])
def test_a_sampling_that_cannot_be_drawn_is_refused(wrong):
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        Sampling(**wrong)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error_and_no_token(temperature, value):
    logits = torch.zeros(8)
    logits[3] = value
    with pytest.raises(InvalidInput, match="largest logit is"):
        draw(logits, Sampling(temperature=temperature), torch.Generator())
