"""A whole answer, from the parser's events or from token ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from openk3.chat.parse import (
    Arguments,
    CallClosed,
    CallDropped,
    CallOpened,
    Content,
    Event,
    Finish,
    Finished,
    Parser,
    Reasoning,
    ReasoningWasContent,
)

if TYPE_CHECKING:
    from openk3.chat.tokenizer import Tokenizer


@dataclass
class ToolCall:
    """`arguments` is JSON as the model wrote it, as a client expects it: text."""

    name: str
    arguments: str = ""


@dataclass
class Answer:
    """What the events so far add up to. `finish_reason` is None while more may come."""

    reasoning: str = ""
    content: str = ""
    finish_reason: Finish | None = None
    calls: dict[int, ToolCall] = field(default_factory=dict)
    """By the index of their events; calls that are not closed yet are among them."""

    @classmethod
    def of(cls, ids: Iterable[int], tokenizer: Tokenizer, *, thinking: bool) -> Answer:
        """All that `ids` say, as of an answer that ends with them."""
        parser = Parser(tokenizer, thinking=thinking)
        answer = cls()
        answer.add([*parser.feed(ids), *parser.end()])
        return answer

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Reasoning(text):
                    self.reasoning += text
                case ReasoningWasContent():
                    self.reasoning = ""
                case Content(text):
                    self.content += text
                case CallOpened(index, name):
                    self.calls[index] = ToolCall(name)
                case Arguments(index, text):
                    self.calls[index].arguments += text
                case CallDropped(index):
                    del self.calls[index]
                case Finished(reason):
                    self.finish_reason = reason
                case CallClosed():
                    pass

    @property
    def tool_calls(self) -> list[ToolCall]:
        return list(self.calls.values())

    def message(self) -> dict[str, Any]:
        """As a message of the conversation, for the next prompt. Calls have ids by their place."""
        made: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.calls:
            made["tool_calls"] = [
                {
                    "id": f"call_{index}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for index, call in self.calls.items()
            ]
        return made
