"""Instruct-mode conversations in K3's chat language: text messages in, segments out (report Appendix F).

A segment is text and whether control markers in it count; each is tokenised alone, so that nothing a person
writes can become structure. Reasoning, tools and option messages are not rendered here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from openk3.chat.tokenizer import Tokenizer


class Segment(NamedTuple):
    """Text that is tokenised on its own; control markers in it are control tokens only if `markers`."""

    text: str
    markers: bool


@dataclass(frozen=True)
class Message:
    """One turn of plain text."""

    role: Literal["system", "user", "assistant"]
    content: str


def render(messages: Sequence[Message], *, prompt: bool = True) -> list[Segment]:
    """The conversation as segments; with `prompt`, followed by the opening of the assistant's answer."""
    segments: list[Segment] = []
    for message in messages:
        segments.append(Segment(_open(message.role), markers=True))
        segments.append(Segment(message.content, markers=False))
        segments.append(Segment(_close(message.role), markers=True))
    if prompt:
        segments.append(Segment(_open("assistant"), markers=True))
    return [segment for segment in segments if segment.text]


def encode(segments: Sequence[Segment], tokenizer: Tokenizer) -> list[int]:
    """Token ids of segments, each tokenised alone."""
    return [t for text, markers in segments for t in tokenizer.encode(text, allow_special=markers)]


def example(question: str, answer: str, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """One exchange for supervised training: ids, and which of them the model is to learn to write.

    Learned is everything the model writes itself: the answer, the closing of its message, and the stop token.
    """
    asked = encode(render([Message("user", question)]), tokenizer)
    answered = encode([Segment(answer, markers=False), Segment(_close("assistant"), markers=True)], tokenizer)
    return asked + answered, [False] * len(asked) + [True] * len(answered)


def _open(role: str) -> str:
    head = f'<|open|>message role="{role}"<|sep|>'
    return f"{head}<|open|>response<|sep|>" if role == "assistant" else head


def _close(role: str) -> str:
    tail = "<|close|>message<|sep|><|end_of_msg|>"
    return f"<|close|>response<|sep|>{tail}" if role == "assistant" else tail
