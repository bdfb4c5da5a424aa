"""K3's chat template (report Appendix F): a conversation and its options as segments, segments as ids.

A segment is text and whether control markers in it count; each is tokenised alone, so that nothing a person,
a tool or a schema says can become structure. One attribute is four segments, since the border between two
texts is a border between tokens.

What changes least comes first: tools, then the effort of thinking, then the conversation. What a single
request asks for, a choice of tools or a format, comes last, behind all that a cache could hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from openk3.chat.language import (
    ARGUMENT,
    CALL,
    CLOSE,
    EFFORTS,
    END,
    FENCE,
    JSON,
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    MESSAGE,
    OPEN,
    RESPONSE,
    RESPONSE_FORMAT,
    RESPONSE_SCHEMA,
    SEP,
    STRING,
    THINK,
    THINKING_EFFORT,
    TOOL_CHOICE,
    TOOLS,
    TOOLS_ADDED,
    TOOLS_DECLARED,
    Effort,
    escaped,
    json_type,
)
from openk3.chat.normalise import Message, normalised
from openk3.errors import InvalidInput

if TYPE_CHECKING:
    from openk3.chat.tokenizer import Tokenizer

PLACEHOLDER = "<|kimi_image_placeholder|>"
"""In a text, where the next image goes; it is no token."""

Attribute = tuple[str, str]


class Segment(NamedTuple):
    """Text that is tokenised on its own; control markers in it are control tokens only if `markers`."""

    text: str
    markers: bool


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    thinking_effort: Effort | None = "max",
    tool_choice: Literal["auto", "none", "required"] = "auto",
    response_format: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    images: Sequence[tuple[int, int]] = (),
) -> list[Segment]:
    """The prompt as segments, none of them empty.

    Args:
        messages: in OpenAI's shape, see `normalised`; they are not changed.
        tools: in OpenAI's shape; shown whole, their keys sorted.
        thinking: whether the answer begins by thinking. Without, reasoning of earlier turns is left out.
        thinking_effort: None writes no such message; only with `thinking`.
        tool_choice: "auto" writes nothing.
        response_format: `{"type": "text" | "json_object" | "json_schema", ...}`; text writes nothing.
        add_generation_prompt: end with the opening of the assistant's answer.
        images: width and height in pixels, as they were, of each image in order.

    Raises:
        InvalidInput: see `normalised`; or an option is not one of those, or images and their places differ in
            number.
    """
    if thinking_effort is not None and thinking_effort not in EFFORTS:
        raise InvalidInput(f"thinking_effort is {thinking_effort!r}; it must be one of {', '.join(EFFORTS)}")
    if tool_choice not in ("auto", *TOOL_CHOICE):
        raise InvalidInput(f"tool_choice is {tool_choice!r}; it must be auto, none or required")
    pictures = _Images(images)
    segments: list[Segment] = []
    if tools:
        segments += _option("tool-declare", _declared(TOOLS_DECLARED, tools))
    if thinking and thinking_effort is not None:
        segments += _option("thinking-effort", THINKING_EFFORT.format(effort=thinking_effort))
    for message in normalised(messages):
        segments += _message(message, thinking, pictures)
    if tool_choice in TOOL_CHOICE:
        segments += _option("tool-choice", TOOL_CHOICE[tool_choice])
    if response_format is not None and (body := _response_format(response_format)):
        segments += _option("response-format", body)
    pictures.check_all_placed()
    if add_generation_prompt:
        segments += [*_open(MESSAGE, ("role", "assistant")), *_open(THINK if thinking else RESPONSE)]
    return [segment for segment in segments if segment.text]


def encode(segments: Sequence[Segment], tokenizer: Tokenizer) -> list[int]:
    """Token ids of segments, each tokenised alone."""
    return [t for text, markers in segments for t in tokenizer.encode(text, allow_special=markers)]


def prompt_tokens(ids: Sequence[int], *, thinking: bool) -> int:
    """`usage.prompt_tokens` of a prompt that ends with the opening of an answer, as Kimi's API counts.

    The three tokens that open the channel of thinking are not the caller's; the message's opening is.
    """
    return len(ids) - 3 if thinking else len(ids)


def example(question: str, answer: str, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """One exchange for supervised training, without thinking: ids, and which of them the model is to learn.

    Learned is everything the model writes itself: the answer, the closing of its message, and the stop token.
    """
    asked = encode(render([{"role": "user", "content": question}], thinking=False), tokenizer)
    answered = encode([Segment(answer, False), *_close(RESPONSE), *_close(MESSAGE), _mark(END)], tokenizer)
    return asked + answered, [False] * len(asked) + [True] * len(answered)


def _mark(text: str) -> Segment:
    return Segment(text, markers=True)


def _open(tag: str, *attributes: Attribute) -> list[Segment]:
    pieces = [piece for key, value in attributes for piece in (f" {key}", '="', escaped(value), '"')]
    return [_mark(OPEN), Segment(tag, False), *(Segment(piece, False) for piece in pieces), _mark(SEP)]


def _close(tag: str) -> list[Segment]:
    return [_mark(CLOSE), Segment(tag, False), _mark(SEP)]


def _element(tag: str, body: Sequence[Segment], *attributes: Attribute) -> list[Segment]:
    return [*_open(tag, *attributes), *body, *_close(tag)]


def _option(kind: str, body: str) -> list[Segment]:
    attributes = ("role", "system"), ("type", kind)
    return [*_element(MESSAGE, [Segment(body.strip(), False)], *attributes), _mark(END)]


def _message(message: Mapping[str, Any], thinking: bool, images: _Images) -> Iterator[Segment]:
    role = message["role"]
    if "tools" in message:
        yield from _option("tool-declare", _declared(TOOLS_ADDED, message["tools"]))
        return
    attributes = [("role", role)]
    if role == "tool":
        attributes += [("tool", message["tool"]), ("index", str(message["index"]))]
    elif message["name"]:
        attributes.append(("name", message["name"]))
    body = list(images.placed(message["content"]))
    if role == "assistant":
        body = _answer(message, body, thinking)
    yield from _element(MESSAGE, body, *attributes)
    yield _mark(END)


def _answer(message: Mapping[str, Any], content: list[Segment], thinking: bool) -> list[Segment]:
    channels: list[Segment] = []
    if thinking:
        channels += _element(THINK, [Segment(message["reasoning_content"], False)])
    channels += _element(RESPONSE, content)
    if message["tool_calls"]:
        calls = [
            segment
            for index, call in enumerate(message["tool_calls"], start=1)
            for segment in _call(call["function"], index)
        ]
        channels += _element(TOOLS, calls)
    return channels


def _call(function: Mapping[str, Any], index: int) -> list[Segment]:
    arguments, body = function["arguments"], []
    if isinstance(arguments, str):
        body = _element(JSON, [Segment(arguments, False)], ("type", "object"))
    else:
        for key, value in arguments.items():
            try:
                kind = json_type(value)
                # With spaces, as the model has seen them; declarations are compact.
                text = value if kind == STRING else json.dumps(value, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidInput(f"argument {key!r} of {function['name']}: {error}") from error
            body += _element(ARGUMENT, [Segment(text, False)], ("key", str(key)), ("type", kind))
    return _element(CALL, body, ("tool", function["name"]), ("index", str(index)))


def compact(value: Any, where: str) -> str:
    """JSON without spaces, keys sorted at every depth, so that two clients' orders make one prompt."""
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} cannot be written as JSON: {error}") from error


def _declared(heading: str, tools: Any) -> str:
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise InvalidInput(f"tools is a {type(tools).__name__}; it must be a list of tools")
    return f"{heading}\n\n{FENCE}json\n{compact(list(tools), 'tools')}\n{FENCE}"


def _response_format(wanted: Mapping[str, Any]) -> str:
    kind = wanted.get("type")
    if kind == "text":
        return ""
    if kind == "json_object":
        return RESPONSE_FORMAT.format(kind=kind)
    if kind != "json_schema":
        raise InvalidInput(f"response_format.type is {kind!r}; it must be text, json_object or json_schema")
    schema = compact(response_schema(wanted), "response_format")
    return f"{RESPONSE_FORMAT.format(kind=kind)}{RESPONSE_SCHEMA}{FENCE}json\n{schema}\n{FENCE}"


def response_schema(wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a response format: under `json_schema.schema`, `schema`, or `json_schema` itself.

    Raises:
        InvalidInput: it is in none of these places.
    """
    inside = wanted.get("json_schema")
    found = inside.get("schema", inside) if isinstance(inside, Mapping) else wanted.get("schema")
    if not isinstance(found, Mapping):
        raise InvalidInput("response_format.json_schema.schema is missing; it must be an object")
    return found


class _Images:
    """Images in the order of their places."""

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        self._sizes, self._placed = list(sizes), 0

    def placed(self, content: Any) -> Iterator[Segment]:
        """The body of a message, with an image in each of its places."""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            if part["type"] == "image":
                yield from self._next()
                continue
            first, *others = part["text"].split(PLACEHOLDER) if self._sizes else [part["text"]]
            yield Segment(first, False)
            for text in others:
                yield from self._next()
                yield Segment(text, False)

    def _next(self) -> Iterator[Segment]:
        self._placed += 1
        if self._placed > len(self._sizes):
            return
        width, height = self._sizes[self._placed - 1]
        yield _mark(MEDIA_BEGIN)
        yield Segment(f"image {width}x{height}", False)
        yield _mark(MEDIA_CONTENT + MEDIA_PAD + MEDIA_END)

    def check_all_placed(self) -> None:
        if self._placed != len(self._sizes):
            raise InvalidInput(
                f"the conversation has places for {self._placed} images, and {len(self._sizes)} are given"
            )
