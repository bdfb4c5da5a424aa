"""What a model wrote, token by token, as events: one parser for streamed and unstreamed answers.

It reads token ids, so a marker that somebody typed is text, and no border between two reads can split one.
It is total: any list of integers is an answer, and what is wrong in it is counted in `recoveries`. Events do
not depend on how the ids are cut into calls of `feed`.

    think      -> Reasoning
    response   -> Content
    call       -> CallOpened, Arguments..., CallClosed; or CallDropped

An answer is taken as what the model seems to have meant: any channel that opens ends the one before. The
first marker of a thinking answer decides whether the text in front of it was reasoning (the channel closes,
or another opens) or the answer itself (the response or the message closes); then `ReasoningWasContent` says
so.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

from openk3.chat.language import (
    ARGUMENT,
    CALL,
    CHANNELS,
    JSON,
    JSON_TYPES,
    MESSAGE,
    RESPONSE,
    STRING,
    THINK,
    TOOLS,
    unescaped,
)

if TYPE_CHECKING:
    from openk3.chat.tokenizer import Tokenizer

Finish = Literal["stop", "tool_calls", "length"]


class Reasoning(NamedTuple):
    text: str


class ReasoningWasContent(NamedTuple):
    """All that came as reasoning is the answer; it follows once more, as `Content`."""


class Content(NamedTuple):
    text: str


class CallOpened(NamedTuple):
    """`call` counts calls from 0, dropped ones too."""

    call: int
    name: str


class Arguments(NamedTuple):
    """A piece of the call's arguments as JSON; all pieces together are one object, or what stood for it."""

    call: int
    text: str


class CallClosed(NamedTuple):
    call: int


class CallDropped(NamedTuple):
    """The answer ended inside of the call: it is none."""

    call: int


class Finished(NamedTuple):
    """Nothing follows. `length`: the answer was cut off before its end."""

    reason: Finish


Event = (
    Reasoning | ReasoningWasContent | Content | CallOpened | Arguments | CallClosed | CallDropped | Finished
)

_TAG = re.compile(r'(\w+)((?: [\w-]+="[^"]*")*)\Z')
_ATTRIBUTE = re.compile(r' ([\w-]+)="([^"]*)"')


class Parser:
    """Reads one answer.

    Args:
        tokenizer: of the ids.
        thinking: whether the prompt ended by opening the channel of thinking, or else the response.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool) -> None:
        self.recoveries: Counter[str] = Counter()
        """How often which fault was met."""
        self._tokenizer = tokenizer
        self._markers = {
            tokenizer.open_id: "open",
            tokenizer.close_id: "close",
            tokenizer.sep_id: "sep",
            tokenizer.end_of_msg_id: "end",
        }
        self._text = _Utf8()
        self._channel: str | None = THINK if thinking else RESPONSE
        self._undecided = thinking  # no marker yet: what came may be the answer itself
        self._reasoning: list[str] = []
        self._tag: tuple[str, list[int]] | None = None  # a tag under way: "open" or "close", and its ids
        self._call: _Call | None = None
        self._calls = 0
        self._complete = 0
        self._closed = False  # the message is
        self._events: list[Event] = []
        self.finished = False

    def feed(self, ids: Iterable[int]) -> list[Event]:
        """The events that these ids make certain."""
        for token in ids:
            if not self.finished:
                self._read(token)
        return self._taken()

    def end(self) -> list[Event]:
        """The events of an answer that ends here, by its own end or cut off; then there are none any more."""
        if not self.finished:
            self._finish(cut=not self._closed)
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # tokens

    def _read(self, token: int) -> None:
        marker = self._markers.get(token)
        if marker is None:
            if not 0 <= token < self._tokenizer.n_ranks:
                self.recoveries["a control token in text"] += 1
            elif self._tag is not None:
                self._tag[1].append(token)
            else:
                self._write(self._text.decode(self._tokenizer.decode_bytes([token])))
            return
        if marker == "sep":
            if self._tag is None:
                self.recoveries["a separator without a tag"] += 1
                return
            kind, ids = self._tag
            self._tag = None
            self._element(kind, self._tokenizer.decode(ids))
            return
        if self._tag is not None:
            self.recoveries["a tag without its end"] += 1
            self._tag = None
        if marker == "end":
            self._finish(cut=False)
        else:
            self._flush()
            self._tag = marker, []

    def _element(self, kind: str, written: str) -> None:
        found = _TAG.match(written)
        if found is None:
            self.recoveries["a tag that cannot be read"] += 1
            return
        tag = found[1]
        if self._closed:
            self.recoveries["an element after the message"] += 1
        elif kind == "close":
            self._close(tag)
        else:
            attributes = {key: unescaped(value) for key, value in _ATTRIBUTE.findall(found[2])}
            self._open(tag, attributes)

    # structure

    def _open(self, tag: str, attributes: dict[str, str]) -> None:
        if tag in CHANNELS:
            self._decide(content=False)
            if self._call is not None:
                self._drop_call()
            if self._channel is not None:
                self.recoveries["a channel that was not closed"] += 1
            self._channel = tag
        elif tag == CALL and self._channel == TOOLS:
            if self._call is not None:
                self._drop_call()
            self._open_call(attributes)
        elif tag in (ARGUMENT, JSON) and self._call is not None:
            self._call.open(tag, attributes, self)
        elif tag == MESSAGE:
            self.recoveries["another message"] += 1
            self._finish(cut=False)
        else:
            self.recoveries["an element out of place"] += 1

    def _close(self, tag: str) -> None:
        if tag == MESSAGE:
            self._decide(content=True)
            self._end_of_message()
        elif tag == THINK and self._channel == THINK:
            self._decide(content=False)
            self._channel = None
        elif tag == RESPONSE and (self._channel == RESPONSE or self._undecided):
            self._decide(content=True)
            self._channel = None
        elif tag == TOOLS and self._channel == TOOLS:
            if self._call is not None:
                self._drop_call()
            self._channel = None
        elif tag == CALL and self._call is not None:
            self._call.close(self)
            self._call = None
        elif tag in (ARGUMENT, JSON) and self._call is not None:
            self._call.close_element(tag, self)
        else:
            self.recoveries["a closing without an opening"] += 1

    def _decide(self, *, content: bool) -> None:
        """The first marker has come: whether the text before it is the answer."""
        if not self._undecided:
            return
        self._undecided = False
        if content:
            self.recoveries["an answer in the channel of thinking"] += 1
            self._channel = RESPONSE
            if self._reasoning:
                self._events.append(ReasoningWasContent())
                self._events.extend(Content(text) for text in self._reasoning)
        self._reasoning = []

    def _open_call(self, attributes: dict[str, str]) -> None:
        index, self._calls = self._calls, self._calls + 1
        name = attributes.get("tool", "")
        if attributes.get("index") != str(index + 1):
            self.recoveries["a call with another index"] += 1
        if not name:
            self.recoveries["a call without a name"] += 1
        self._call = _Call(index, named=bool(name))
        if name:
            self._events.append(CallOpened(index, name))

    def _drop_call(self) -> None:
        assert self._call is not None
        self.recoveries["a call without its end"] += 1
        if self._call.named:
            self._events.append(CallDropped(self._call.index))
        self._call = None

    def _end_of_message(self) -> None:
        self._closed = True
        if self._call is not None:
            self._drop_call()
        if self._channel is not None:
            self.recoveries["a channel that was not closed"] += 1
        self._channel = None

    def _finish(self, *, cut: bool) -> None:
        if self._tag is not None:
            self.recoveries["a tag without its end"] += 1
            self._tag = None
        self._flush()
        if not cut:
            self._decide(content=True)
        if not cut and not self._closed:
            self._end_of_message()
        if self._call is not None:
            self._drop_call()
        self.finished = True
        reason: Finish = "length" if cut else "tool_calls" if self._complete else "stop"
        self._events.append(Finished(reason))

    # text

    def _flush(self) -> None:
        self._write(self._text.flush())

    def _write(self, text: str) -> None:
        if not text:
            return
        if self._closed:
            self.recoveries["text after the message"] += 1
        elif self._channel == THINK:
            if self._undecided:
                self._reasoning.append(text)
            self._events.append(Reasoning(text))
        elif self._channel == TOOLS:
            if self._call is not None and self._call.key is not None:
                self._call.write(text, self)
            elif text.strip():
                self.recoveries["text between calls"] += 1
        elif self._channel == RESPONSE:
            self._events.append(Content(text))
        elif text.strip():  # between channels: the answer goes on where it should have been opened
            self.recoveries["text outside of a channel"] += 1
            self._channel = RESPONSE
            self._events.append(Content(text))


class _Call:
    """A call under way: its arguments, written out as JSON while they come."""

    def __init__(self, index: int, named: bool) -> None:
        self.index, self.named = index, named
        self.key: str | None = None  # of the argument that is open; "" in the element `json`
        self._tag = ""
        self._type = STRING
        self._body: list[str] = []  # of an argument that is JSON: nothing is certain before its end
        self._written = False
        self._whole = False  # `json` has said what the arguments are

    def open(self, tag: str, attributes: dict[str, str], parser: Parser) -> None:
        if self.key is not None:
            parser.recoveries["an argument that was not closed"] += 1
            self.close_element(self._tag, parser)
        if self._whole or (tag == JSON and self._written):
            parser.recoveries["arguments beside `json`"] += 1
            return
        self._tag, self.key, self._body = tag, "" if tag == JSON else attributes.get("key", ""), []
        self._type = attributes.get("type", STRING)
        if tag == JSON:
            return
        if self._type not in JSON_TYPES:
            parser.recoveries["an argument of another type"] += 1
            self._type = STRING
        if self._type == STRING:
            self._say(f'{self._lead()}{json.dumps(self.key, ensure_ascii=False)}: "', parser)

    def write(self, text: str, parser: Parser) -> None:
        if self._tag == ARGUMENT and self._type == STRING:
            self._say(json.dumps(text, ensure_ascii=False)[1:-1], parser)
        else:
            self._body.append(text)

    def close_element(self, tag: str, parser: Parser) -> None:
        if self.key is None or tag != self._tag:
            parser.recoveries["a closing without an opening"] += 1
            return
        body = "".join(self._body)
        if tag == JSON:
            self._whole = True
            self._say(body, parser)
        elif self._type == STRING:
            self._say('"', parser)
        else:
            if not _is_json(body):
                parser.recoveries["an argument that is no JSON"] += 1
                body = json.dumps(body, ensure_ascii=False)
            self._say(f"{self._lead()}{json.dumps(self.key, ensure_ascii=False)}: {body}", parser)
        self.key = None

    def close(self, parser: Parser) -> None:
        if self.key is not None:
            parser.recoveries["an argument that was not closed"] += 1
            self.close_element(self._tag, parser)
        if not self.named:
            return
        if not self._whole:
            self._say("}" if self._written else "{}", parser)
        parser._events.append(CallClosed(self.index))
        parser._complete += 1

    def _lead(self) -> str:
        lead = ", " if self._written else "{"
        self._written = True
        return lead

    def _say(self, text: str, parser: Parser) -> None:
        if self.named and text:
            parser._events.append(Arguments(self.index, text))


class _Utf8:
    """Bytes to text, whole characters at a time."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def flush(self) -> str:
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def _is_json(text: str) -> bool:
    """Whether it is a JSON value by the standard: NaN and infinities are none."""
    try:
        json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return False
    return True


def _refused(name: str) -> None:
    raise ValueError(name)
