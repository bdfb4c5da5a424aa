"""The Python API on a small random model: the same text by every way, and answers that follow the grammar."""

from __future__ import annotations

import json

import pytest
import torch

from engine.test_model_schedules import CONFIG
from model.tiny import built
from openk3.chat import Answer, Tokenizer, encode, render
from openk3.engine.llm import LLM
from openk3.engine.naive import NaiveEngine
from openk3.engine.sampler import SamplingParams, choose
from openk3.errors import InvalidInput


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer([bytes([i]) for i in range(256)])


@pytest.fixture(scope="module")
def model(tokenizer):
    made = built(CONFIG.model_copy(update={"vocab_size": tokenizer.vocab_size}))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.ndim >= 2 and "norm" not in name:
                weight.mul_(6.0)
    return made.eval()


def test_texts_are_those_of_the_naive_engine_alone_and_together(model, tokenizer):
    llm = LLM(model, tokenizer, tokens=2000, unit=8)
    prompts = ["To be, or not to be", "To be", "x", "To be, or not to be: that"]
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5)
    together = llm.generate(prompts, 12, params)
    again = llm.generate(prompts, 12, params)
    assert [c.tokens for c in again] == [c.tokens for c in together]
    assert sum(c.cached for c in again) > 0
    allowed = torch.zeros(tokenizer.vocab_size, dtype=torch.bool)
    allowed[[*range(256), tokenizer.eos_id, tokenizer.end_of_msg_id]] = True
    naive = NaiveEngine(
        model,
        lambda r, scores: choose(
            scores.masked_fill(~allowed, -torch.inf), params, r.tokens[: r.prompt], r.made
        ),
    )
    for prompt, made in zip(prompts, together, strict=True):
        request = naive.add(tokenizer.encode(prompt), 12, stop={tokenizer.eos_id, tokenizer.end_of_msg_id})
        while request.finish is None:
            naive.step()
        assert request.made == made.tokens and request.finish == made.finish


def test_an_answer_is_what_its_tokens_say_and_its_history_is_reused(model, tokenizer):
    llm = LLM(model, tokenizer, tokens=4000, unit=8)
    messages = [{"role": "user", "content": "hi"}]
    params = SamplingParams(seed=3)
    events = list(llm.stream(messages, max_new_tokens=40, params=params, thinking=False))
    streamed = Answer()
    streamed.add(events)
    whole = llm.chat(messages, max_new_tokens=40, params=params, thinking=False)
    assert streamed == whole and whole.finish_reason is not None
    before = llm.engine.cache.counts.hit
    llm.chat(
        [*messages, whole.message(), {"role": "user", "content": "and?"}], max_new_tokens=5, thinking=False
    )
    assert (
        llm.engine.cache.counts.hit - before
        >= len(encode(render(messages, thinking=False), tokenizer)) // 8 * 8 - 8
    )
    assert not llm.engine.running and not llm._asked


def test_a_constrained_answer_calls_the_tool_as_its_schema_says(model, tokenizer):
    llm = LLM(model, tokenizer, tokens=4000, unit=8)
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}, "e": {"enum": ["a", "b"]}},
        "required": ["n", "e"],
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for seed in range(3):
        bias = {
            tokenizer.close_id: 8.0,
            tokenizer.end_of_msg_id: 8.0,
        }  # a random model finds no end by itself
        answer = llm.chat(
            [{"role": "user", "content": "go"}],
            tools=[tool],
            tool_choice="required",
            thinking=False,
            constrained=True,
            max_new_tokens=3000,
            params=SamplingParams(seed=seed, logit_bias=bias),
        )
        assert answer.finish_reason == "tool_calls"
        for call in answer.tool_calls:
            arguments = json.loads(call.arguments)
            assert 1 <= arguments["n"] <= 9 and arguments["e"] in ("a", "b")


def test_a_stream_that_is_left_gives_its_memory_back(model, tokenizer):
    llm = LLM(model, tokenizer, tokens=2000, unit=8)
    stream = llm.stream([{"role": "user", "content": "hi"}], max_new_tokens=100)
    next(stream)
    assert llm.engine.running
    stream.close()
    assert not llm.engine.running
    llm.engine.check()


def test_a_tokenizer_of_another_model_is_refused(model):
    with pytest.raises(InvalidInput, match="the tokenizer has 513 tokens, the model 512"):
        LLM(model, Tokenizer([*(bytes([i]) for i in range(256)), b"ab"]))


def test_what_is_no_token_is_refused_and_costs_nobody_else(model, tokenizer):
    llm = LLM(model, tokenizer, tokens=2000, unit=8)
    with pytest.raises(InvalidInput, match=r"token 512 is not in 0\.\.511"):
        llm.generate(["hi", [1, 512]])
    assert not llm.engine.waiting and not llm._asked
    with pytest.raises(InvalidInput, match="needs a prompt"):
        llm.generate([""])
    assert llm.generate(["hi"], 3)[0].finish in ("stop", "length")
