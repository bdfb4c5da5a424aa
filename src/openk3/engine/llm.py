"""A model as a Python object that answers: prompts or conversations in, text or answers out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from openk3.chat import Answer, Parser, Tokenizer, encode, render
from openk3.chat.normalise import Message
from openk3.chat.parse import Event
from openk3.engine.core import Engine, Finish, Limits, Request
from openk3.engine.model_runner import ModelRunner
from openk3.engine.sampler import SamplingParams, choose
from openk3.errors import InvalidInput
from openk3.model.decoder import K3

Tensor = torch.Tensor
PLAIN = SamplingParams()


@dataclass(frozen=True)
class Completion:
    """What followed a prompt. `cached`: tokens of the prompt that were not computed anew."""

    text: str
    tokens: list[int]
    finish: Finish
    cached: int


@dataclass
class _Asked:
    """What a request wants of its tokens."""

    params: SamplingParams
    grammar: Any = None  # an xgrammar matcher


class LLM:
    """Answers from `model`, in the calling thread.

    Args:
        model: in the dtype and on the device that it runs in.
        tokenizer: its own.
        tokens: of context that its memory holds, of all requests together and what is kept for reuse.
        unit: tokens of a hash; prompts are reused in multiples of it.
        limits: other limits of the engine; `unit` is this one.

    Raises:
        InvalidInput: the tokenizer is another model's, or the model is none that an engine runs.
    """

    def __init__(
        self,
        model: K3,
        tokenizer: Tokenizer,
        *,
        tokens: int = 65_536,
        unit: int = 64,
        limits: Limits | None = None,
    ) -> None:
        if tokenizer.vocab_size != model.config.vocab_size:
            raise InvalidInput(
                f"LLM: the tokenizer has {tokenizer.vocab_size} tokens, the model {model.config.vocab_size}"
            )
        self.model, self.tokenizer = model, tokenizer
        probe = ModelRunner(model, 1, unit)
        pages = -(-tokens // probe.page) + 8 * probe.groups
        limits = replace(limits or Limits(), unit=unit)
        self.engine = Engine(ModelRunner(model, pages, unit), pages, self._choose, limits)
        self._asked: dict[int, _Asked] = {}
        self._grammars: Any = None
        ordinary = torch.zeros(tokenizer.vocab_size, dtype=torch.bool)
        ordinary[: tokenizer.n_ranks] = True
        ends = [tokenizer.eos_id, tokenizer.end_of_msg_id]
        self._of_text = ordinary.clone()
        self._of_text[ends] = True
        self._of_chat = self._of_text.clone()
        self._of_chat[[tokenizer.open_id, tokenizer.close_id, tokenizer.sep_id]] = True

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        max_new_tokens: int = 256,
        params: SamplingParams = PLAIN,
    ) -> list[Completion]:
        """What follows each prompt, all of them together, up to the end of the text.

        Raises:
            InvalidInput: a prompt is empty or too long, or holds what is no token; or scores say nothing.
        """
        ids = [
            self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts
        ]
        stop = {self.tokenizer.eos_id, self.tokenizer.end_of_msg_id}
        requests: list[Request] = []
        try:
            requests.extend(self._add(prompt, max_new_tokens, stop, _Asked(params)) for prompt in ids)
            while any(request.finish is None for request in requests):
                self.engine.step()
        finally:
            for request in requests:
                self.engine.abort(request)
                del self._asked[request.id]
        return [self._completed(request) for request in requests]

    def chat(
        self,
        messages: Sequence[Message],
        *,
        max_new_tokens: int = 1024,
        params: SamplingParams = PLAIN,
        **options: Any,
    ) -> Answer:
        """The answer to a conversation. Options are those of `stream`."""
        answer = Answer()
        for event in self.stream(messages, max_new_tokens=max_new_tokens, params=params, **options):
            answer.add([event])
        return answer

    def stream(
        self,
        messages: Sequence[Message],
        *,
        max_new_tokens: int = 1024,
        params: SamplingParams = PLAIN,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = True,
        constrained: bool = False,
        **options: Any,
    ) -> Iterator[Event]:
        """The answer's events as they are certain.

        Args:
            tools, thinking, options: as of `openk3.chat.render`.
            constrained: only what the chat language, the tools' schemas and the response format allow; needs
                the extra `serve`.
        """
        segments = render(messages, tools=tools, thinking=thinking, **options)
        prompt = encode(segments, self.tokenizer)
        asked = _Asked(params)
        if constrained:
            asked.grammar = self._matcher(tools or (), thinking, options)
        request = self._add(
            prompt, max_new_tokens, {self.tokenizer.end_of_msg_id}, asked, self._turns(prompt)
        )
        parser = Parser(self.tokenizer, thinking=thinking)
        read = request.prompt
        try:
            while request.finish is None:
                self.engine.step()
                new, read = request.tokens[read:], len(request.tokens)
                yield from parser.feed(new)
            if request.error is not None:
                raise request.error
            yield from parser.end()
        finally:
            self.engine.abort(request)
            self._asked.pop(request.id, None)

    def _matcher(self, tools: Sequence[Mapping[str, Any]], thinking: bool, options: Mapping[str, Any]) -> Any:
        from openk3.chat.grammar import Grammars, answer_grammar

        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer)
        wanted = {key: options[key] for key in ("tool_choice", "response_format") if key in options}
        return self._grammars.matcher(
            answer_grammar(self.tokenizer, thinking=thinking, tools=tools, **wanted)
        )

    def _turns(self, prompt: Sequence[int]) -> list[int]:
        """Ends of messages."""
        return [i + 1 for i, token in enumerate(prompt) if token == self.tokenizer.end_of_msg_id]

    def _add(
        self, prompt: list[int], most: int, stop: set[int], asked: _Asked, turns: Sequence[int] = ()
    ) -> Request:
        wrong = [token for token in prompt if not 0 <= token < self.tokenizer.vocab_size]
        if wrong:
            raise InvalidInput(f"LLM: token {wrong[0]} is not in 0..{self.tokenizer.vocab_size - 1}")
        request = self.engine.add(prompt, most, stop=stop, turns=turns)
        self._asked[request.id] = asked
        return request

    def _completed(self, request: Request) -> Completion:
        if request.error is not None:
            raise request.error
        assert request.finish is not None
        made = request.made[:-1] if request.finish == "stop" else request.made
        return Completion(self.tokenizer.decode(made), request.made, request.finish, request.cached)

    def _choose(self, request: Request, scores: Tensor) -> int:
        asked = self._asked[request.id]
        if asked.grammar is None:
            chat = self.tokenizer.eos_id not in request.stop
            allowed = self._of_chat if chat else self._of_text
        else:
            allowed = _allowed(asked.grammar, len(scores))
        scores = scores.masked_fill(~allowed.to(scores.device), -torch.inf)
        token = choose(scores, asked.params, request.tokens[: request.prompt], request.made)
        if asked.grammar is not None and not asked.grammar.accept_token(token):
            raise AssertionError("the grammar refuses a token that its mask allows")
        return token


def _allowed(matcher: Any, count: int) -> Tensor:
    """bool `[count]`: the tokens that a matcher's mask allows."""
    import xgrammar  # type: ignore[import-not-found,unused-ignore]

    mask = xgrammar.allocate_token_bitmask(1, count)
    matcher.fill_next_token_bitmask(mask)
    bits: Tensor = mask[0][:, None] >> torch.arange(32, dtype=torch.int32) & 1
    return bits.flatten()[:count].bool()
