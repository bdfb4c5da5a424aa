"""Many prompts at once write what each writes alone; a token falls where its own number says."""

from __future__ import annotations

import pytest
import torch

from model.tiny import BASE, built
from openk3.errors import InvalidInput
from openk3.model.decoding.batch import generate_batch
from openk3.model.decoding.choice import NO_TOKEN, choose_tokens
from openk3.model.generate import Sampling, generate

GREEDY = Sampling(temperature=0)
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3], [58, 9], [7, 7, 7, 7]]


@pytest.fixture(scope="module")
def model():
    return built(BASE).eval()


def texts(model, prompts, most, **options) -> list[list[int]]:
    written = [[] for _ in prompts]
    for number, token in generate_batch(model, prompts, most, **options):
        written[number].append(token)
    return written


@pytest.mark.parametrize("at_once", [1, 2, 3, 64])
def test_greedy_texts_are_those_of_one_prompt_at_a_time(model, at_once):
    alone = [list(generate(model, prompt, 12, sampling=GREEDY)) for prompt in PROMPTS]
    assert texts(model, PROMPTS, 12, sampling=GREEDY, at_once=at_once) == alone


def test_each_text_ends_before_its_stop_token_and_its_slot_goes_to_the_next(model):
    free = [list(generate(model, prompt, 12, sampling=GREEDY)) for prompt in PROMPTS]
    stop = {free[0][3], free[2][5]}
    alone = [list(generate(model, prompt, 12, sampling=GREEDY, stop=stop)) for prompt in PROMPTS]
    assert texts(model, PROMPTS, 12, sampling=GREEDY, stop=stop, at_once=2) == alone
    assert len({len(text) for text in alone}) > 1


def test_only_allowed_tokens_are_drawn(model):
    allowed = torch.zeros(BASE.vocab_size, dtype=torch.bool)
    allowed[[5, 9]] = True
    written = texts(model, PROMPTS, 9, allowed=allowed)
    assert {token for text in written for token in text} == {5, 9}


def test_what_a_prompt_draws_depends_on_no_other(model):
    together = texts(model, PROMPTS, 9, sampling=Sampling(temperature=0.8, seed=4), at_once=3)
    for number, prompt in enumerate(PROMPTS):
        sampling = Sampling(temperature=0.8, seed=4 + number)
        assert texts(model, [prompt], 9, sampling=sampling) == [together[number]]
    assert len({tuple(text) for text in texts(model, [[3]] * 4, 9)}) == 4


def test_no_prompt_and_no_token_is_no_text(model):
    assert list(generate_batch(model, [], 5)) == []
    assert list(generate_batch(model, PROMPTS, 0)) == []


def test_wrong_requests_are_named(model):
    with pytest.raises(InvalidInput, match="prompt has no tokens"):
        next(generate_batch(model, [[1], []], 3))
    with pytest.raises(InvalidInput, match="token 99 is outside"):
        next(generate_batch(model, [[1], [1, 99]], 3))
    with pytest.raises(InvalidInput, match="at_once"):
        next(generate_batch(model, [[1]], 3, at_once=0))
    nothing = torch.zeros(BASE.vocab_size, dtype=torch.bool)
    with pytest.raises(InvalidInput, match="largest logit is -inf"):
        next(generate_batch(model, [[1]], 3, allowed=nothing))


def test_prompts_beyond_what_is_read_at_once_are_read_in_turn(model, monkeypatch):
    from openk3.model.decoding import batch

    together = texts(model, PROMPTS, 5, sampling=GREEDY)
    monkeypatch.setattr(batch, "PREFILL_TOKENS", 4)
    assert texts(model, PROMPTS, 5, sampling=GREEDY) == together


def test_a_token_is_where_its_number_falls_in_the_kept_probabilities():
    logits = torch.tensor([2.0, -3.0, 1.0, 0.5, -1.0])
    p = torch.softmax(logits.double() / 0.7, 0)
    kept = [0, 2, 3]  # the first of these, in this order, that reach 0.97
    share = p[kept].cumsum(0) / p[kept].sum()
    sampling = Sampling(temperature=0.7, top_p=0.97)
    assert float(p[[0, 2]].sum()) < 0.97 <= float(p[kept].sum())
    numbers, right = [0.0], [0]
    for border, before, after in zip(share.tolist()[:2], [0, 2], [2, 3], strict=True):
        numbers += [border - 1e-9, border + 1e-9]
        right += [before, after]
    numbers, right = [*numbers, 1 - 1e-16], [*right, 3]
    chosen = choose_tokens(
        logits.expand(len(numbers), 5), torch.tensor(numbers, dtype=torch.float64), sampling
    )
    assert chosen.tolist() == right


def test_top_k_and_the_smallest_temperature_keep_what_they_say():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    almost_one = torch.full((4,), 1 - 1e-12, dtype=torch.float64)
    third = logits.topk(3).indices[:, 2]
    assert torch.equal(choose_tokens(logits, almost_one, Sampling(top_k=3)), third)
    assert torch.equal(choose_tokens(logits, almost_one, Sampling(temperature=1e-300)), logits.argmax(1))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_no_numbers_choose_no_token(temperature):
    logits = torch.zeros(3, 8)
    logits[0, 3], logits[2, 5] = float("nan"), float("inf")
    logits[1, 6] = 50.0
    chosen = choose_tokens(logits, torch.zeros(3).double(), Sampling(temperature=temperature))
    assert chosen.tolist() == [NO_TOKEN, 6, NO_TOKEN]
