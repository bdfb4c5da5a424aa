"""The parser: what was rendered comes back, every cut gives the same events, nothing makes it raise."""

from __future__ import annotations

import itertools
import json
import random
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.chat import Answer, Parser, Tokenizer, encode, render
from openk3.chat.parse import (
    Arguments,
    CallClosed,
    CallDropped,
    CallOpened,
    Content,
    Event,
    Finished,
    Reasoning,
    ReasoningWasContent,
)

WORDS = [
    "a ",
    "é",
    "日本",
    " the",
    "\n",
    "🜂",
    "x=",
    '"',
    "&quot;",
    "<|open|>",
    "{",
    "}",
    "0",
    "\\",
    "<|sep|>",
    "\u2028",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Single bytes and a few words, so that characters are cut between tokens as well as not."""
    words = [bytes([i]) for i in range(256)]
    more = [
        b"message",
        b"think",
        b"response",
        b"tools",
        b"call",
        b"argument",
        b" role",
        b'="',
        b"the",
        b" the",
    ]
    return Tokenizer(words + [word for word in more if word not in words])


def events_of(
    tokenizer: Tokenizer, ids: list[int], *, thinking: bool, cuts: list[int] | None = None
) -> list[Event]:
    parser = Parser(tokenizer, thinking=thinking)
    made: list[Event] = []
    borders = [0, *sorted(cuts or []), len(ids)]
    for start, end in itertools.pairwise(borders):
        made += parser.feed(ids[start:end])
    return made + parser.end()


def written(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of what a model would have written, markers in it as control tokens."""
    return tokenizer.encode(text, allow_special=True)


# --- round trips ---------------------------------------------------------------------------------------


def random_text(draw: random.Random, most: int = 6) -> str:
    return "".join(draw.choice(WORDS) for _ in range(draw.randrange(most)))


def random_value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(5 if depth > 1 else 7)
    match kind:
        case 0:
            return random_text(draw)
        case 1:
            return draw.randrange(-(10**12), 10**12)
        case 2:
            return draw.uniform(-1e6, 1e6)
        case 3:
            return draw.random() < 0.5
        case 4:
            return None
        case 5:
            return [random_value(draw, depth + 1) for _ in range(draw.randrange(3))]
        case _:
            return {random_text(draw, 3): random_value(draw, depth + 1) for _ in range(draw.randrange(3))}


def random_answer(draw: random.Random, *, verbatim: bool = True) -> dict[str, Any]:
    calls = []
    for number in range(draw.choice([0, 0, 1, 2, 3])):
        arguments = {random_text(draw, 4): random_value(draw) for _ in range(draw.randrange(4))}
        name = draw.choice(["f", "a.b", "get_weather", 'q"uo&te', "日本"])
        function = {"name": name, "arguments": arguments}
        if verbatim and draw.random() < 0.1:
            function["arguments"] = '{"cut": "o' + random_text(draw)
        calls.append({"id": f"c{number}", "type": "function", "function": function})
    return {
        "role": "assistant",
        "reasoning_content": random_text(draw, 9),
        "content": random_text(draw, 9),
        "tool_calls": calls,
    }


def assert_comes_back(tokenizer: Tokenizer, message: dict[str, Any], thinking: bool) -> None:
    """After what the template says of its input: blank reasoning is none, arguments are one object."""
    options: dict[str, Any] = {"thinking": thinking, "thinking_effort": None}
    opening = encode(render([], **options), tokenizer)
    whole = encode(render([message], add_generation_prompt=False, **options), tokenizer)
    assert whole[: len(opening)] == opening
    parser = Parser(tokenizer, thinking=thinking)
    answer = Answer()
    answer.add([*parser.feed(whole[len(opening) :]), *parser.end()])
    assert not parser.recoveries
    reasoning = message["reasoning_content"]
    assert answer.reasoning == (reasoning if thinking and reasoning.strip() else "")
    assert answer.content == message["content"]
    assert len(answer.tool_calls) == len(message["tool_calls"])
    for mine, asked in zip(answer.tool_calls, message["tool_calls"], strict=True):
        function = asked["function"]
        assert mine.name == function["name"]
        if isinstance(function["arguments"], str):
            assert mine.arguments == function["arguments"]
        else:
            assert json.loads(mine.arguments) == function["arguments"]
    assert answer.finish_reason == ("tool_calls" if message["tool_calls"] else "stop")


def test_ten_thousand_random_messages_come_back(tokenizer):
    for seed in range(10_000):
        draw = random.Random(seed)
        assert_comes_back(tokenizer, random_answer(draw), draw.random() < 0.7)


def test_messages_come_back_in_the_released_vocabulary(k3_assets):
    released = Tokenizer.load(k3_assets)
    for seed in range(300):
        assert_comes_back(released, random_answer(random.Random(seed)), seed % 3 > 0)


# --- events --------------------------------------------------------------------------------------------

THOUGHT = "why<|close|>think<|sep|><|open|>response<|sep|>"
CALL = '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
DONE = "<|close|>message<|sep|><|end_of_msg|>"
STRING_ARGUMENT = '<|open|>argument key="k" type="string"<|sep|>a"b<|close|>argument<|sep|>'


def number(body: str) -> str:
    return f'<|open|>argument key="n" type="number"<|sep|>{body}<|close|>argument<|sep|>'


def joined(events: list[Event]) -> list[Event]:
    """Neighbouring pieces of one text as one."""
    made: list[Event] = []
    for event in events:
        last = made[-1] if made else None
        if isinstance(event, Reasoning | Content) and type(last) is type(event):
            made[-1] = type(event)(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments) and last.call == event.call:
            made[-1] = Arguments(event.call, last.text + event.text)
        else:
            made.append(event)
    return made


def test_events_of_an_answer_in_order(tokenizer):
    ids = written(
        tokenizer,
        f"{THOUGHT}yes<|close|>response<|sep|>{CALL}{STRING_ARGUMENT}<|close|>call<|sep|>"
        f"<|close|>tools<|sep|>{DONE}",
    )
    assert joined(events_of(tokenizer, ids, thinking=True)) == [
        Reasoning("why"),
        Content("yes"),
        CallOpened(0, "f"),
        Arguments(0, '{"k": "a\\"b"}'),
        CallClosed(0),
        Finished("tool_calls"),
    ]


def test_text_of_a_string_argument_is_told_as_it_comes(tokenizer):
    parser = Parser(tokenizer, thinking=False)
    parser.feed(written(tokenizer, CALL + '<|open|>argument key="k" type="string"<|sep|>'))
    for character in "ab":
        assert parser.feed(written(tokenizer, character)) == [Arguments(0, character)]


def test_a_character_of_several_tokens_is_one_piece(tokenizer):
    ids = written(tokenizer, "é")
    assert len(ids) == 2
    parser = Parser(tokenizer, thinking=False)
    assert parser.feed(ids[:1]) == [] and parser.feed(ids[1:]) == [Content("é")]
    parser.feed(ids[:1])
    assert parser.end() == [Content("\ufffd"), Finished("length")]


# What the notes say of malformed answers: (thinking, written, reasoning, content, calls, finish).
MALFORMED = {
    "cut while it thinks": (True, "hm", "hm", "", [], "length"),
    "only text, ended": (True, "hi<|end_of_msg|>", "", "hi", [], "stop"),
    "thinking skipped": (True, f"hi<|close|>response<|sep|>{DONE}", "", "hi", [], "stop"),
    "thinking skipped, response not closed": (True, f"hi{DONE}", "", "hi", [], "stop"),
    "response opens in thinking": (True, f"hm<|open|>response<|sep|>hi{DONE}", "hm", "hi", [], "stop"),
    "tools open in thinking": (
        True,
        f"hm{CALL}<|close|>call<|sep|><|close|>tools<|sep|>{DONE}",
        "hm",
        "",
        [("f", "{}")],
        "tool_calls",
    ),
    "response not closed": (False, f"hi{DONE}", "", "hi", [], "stop"),
    "no call completes": (
        False,
        f"hi<|close|>response<|sep|>{CALL}{STRING_ARGUMENT}{DONE}",
        "",
        "hi",
        [],
        "stop",
    ),
    "cut inside of a call": (
        False,
        f'hi<|close|>response<|sep|>{CALL}<|close|>call<|sep|><|open|>call tool="g" index="2"<|sep|>',
        "",
        "hi",
        [("f", "{}")],
        "length",
    ),
    "no name": (
        False,
        f'{CALL[:21]}<|open|>call tool="" index="1"<|sep|>{STRING_ARGUMENT}<|close|>call<|sep|>{DONE}',
        "",
        "",
        [],
        "stop",
    ),
    "an argument that is no JSON": (
        False,
        f"{CALL}{number('3 kg')}<|close|>call<|sep|>{DONE}",
        "",
        "",
        [("f", '{"n": "3 kg"}')],
        "tool_calls",
    ),
    "not a number by the standard": (
        False,
        f"{CALL}{number('NaN')}<|close|>call<|sep|>{DONE}",
        "",
        "",
        [("f", '{"n": "NaN"}')],
        "tool_calls",
    ),
    "arguments as json": (
        False,
        f'<|close|>response<|sep|>{CALL}<|open|>json type="object"<|sep|>{{"a": 1}}<|close|>json<|sep|>'
        f"<|close|>call<|sep|><|close|>tools<|sep|>{DONE}",
        "",
        "",
        [("f", '{"a": 1}')],
        "tool_calls",
    ),
    "another index": (
        False,
        f'<|open|>tools<|sep|><|open|>call tool="f" index="7"<|sep|><|close|>call<|sep|>{DONE}',
        "",
        "",
        [("f", "{}")],
        "tool_calls",
    ),
    "an argument not closed": (
        False,
        f'{CALL}<|open|>argument key="a" type="string"<|sep|>x<|open|>argument key="b" type="number"<|sep|>1'
        f"<|close|>call<|sep|>{DONE}",
        "",
        "",
        [("f", '{"a": "x", "b": 1}')],
        "tool_calls",
    ),
    "text between channels": (True, "hm<|close|>think<|sep|>hi<|end_of_msg|>", "hm", "hi", [], "stop"),
    "text after the message": (
        False,
        "hi<|close|>message<|sep|>more<|open|>response<|sep|>x",
        "",
        "hi",
        [],
        "stop",
    ),
    "another message": (False, 'hi<|open|>message role="user"<|sep|>x', "", "hi", [], "stop"),
    "an unknown element": (
        False,
        "a<|open|>b<|sep|>c<|close|>b<|sep|>d<|end_of_msg|>",
        "",
        "acd",
        [],
        "stop",
    ),
    "a tag cut by a marker": (
        False,
        "a<|open|>to<|close|>response<|sep|><|end_of_msg|>",
        "",
        "a",
        [],
        "stop",
    ),
    "a separator alone": (False, "a<|sep|>b<|end_of_msg|>", "", "ab", [], "stop"),
    "control tokens in text": (False, "a[EOS]b<|media_pad|><|end_of_msg|>", "", "ab", [], "stop"),
    "nothing": (True, "", "", "", [], "length"),
    "nothing but the end": (True, "<|end_of_msg|>", "", "", [], "stop"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_answers(tokenizer, case):
    thinking, text, reasoning, content, calls, finish = MALFORMED[case]
    answer = Answer.of(written(tokenizer, text), tokenizer, thinking=thinking)
    assert (answer.reasoning, answer.content, answer.finish_reason) == (reasoning, content, finish)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == calls


def test_faults_are_counted(tokenizer):
    for case, (thinking, text, *_) in MALFORMED.items():
        parser = Parser(tokenizer, thinking=thinking)
        parser.feed(written(tokenizer, text))
        parser.end()
        whole = case in ("cut while it thinks", "arguments as json", "nothing")
        assert bool(parser.recoveries) != whole, (case, parser.recoveries)


def test_what_was_told_as_reasoning_and_was_the_answer_is_told_again(tokenizer):
    parser = Parser(tokenizer, thinking=True)
    assert parser.feed(written(tokenizer, "hi")) == [Reasoning("h"), Reasoning("i")]
    assert parser.feed([tokenizer.end_of_msg_id]) == [
        ReasoningWasContent(),
        Content("h"),
        Content("i"),
        Finished("stop"),
    ]


def streams(tokenizer: Tokenizer) -> list[tuple[bool, list[int]]]:
    """500 answers, whole, cut off, and broken at random."""
    made = [(case[0], written(tokenizer, case[1])) for case in MALFORMED.values()]
    control = list(tokenizer.control_tokens.values())[:8]
    for seed in range(500 - len(made)):
        draw = random.Random(seed)
        thinking = draw.random() < 0.7
        options: dict[str, Any] = {"thinking": thinking, "thinking_effort": None}
        opening = encode(render([], **options), tokenizer)
        ids = encode(
            render([random_answer(draw, verbatim=False)], add_generation_prompt=False, **options), tokenizer
        )[len(opening) :]
        if seed % 3 == 1:
            ids = ids[: draw.randrange(len(ids))]
        if seed % 3 == 2:
            for _ in range(draw.randrange(1, 6)):
                at = draw.randrange(len(ids))
                match draw.randrange(3):
                    case 0:
                        del ids[at : at + draw.randrange(1, 4)]
                    case 1:
                        ids.insert(at, draw.choice(control))
                    case _:
                        ids[at:at] = ids[draw.randrange(len(ids)) :][:9]
                if not ids:
                    break
        made.append((thinking, ids))
    return made


def test_every_cut_of_500_streams_gives_the_same_events(tokenizer):
    for thinking, ids in streams(tokenizer):
        whole = events_of(tokenizer, ids, thinking=thinking)
        one_by_one = events_of(tokenizer, ids, thinking=thinking, cuts=list(range(len(ids))))
        assert one_by_one == whole
        for cut in range(len(ids)):
            assert events_of(tokenizer, ids, thinking=thinking, cuts=[cut]) == whole


def test_calls_that_open_end_one_way_and_indices_count_up(tokenizer):
    for thinking, ids in streams(tokenizer):
        events = events_of(tokenizer, ids, thinking=thinking)
        assert isinstance(events[-1], Finished) and sum(isinstance(e, Finished) for e in events) == 1
        opened = [e.call for e in events if isinstance(e, CallOpened)]
        ended = [e.call for e in events if isinstance(e, CallClosed | CallDropped)]
        assert opened == sorted(set(opened)) and ended == opened
        assert all(
            "<|open|>message" not in getattr(e, "text", "") for e in events if isinstance(e, Reasoning)
        )
        answer = Answer()
        answer.add(events)
        for call in answer.tool_calls:
            assert call.name
            json.loads(call.arguments)


@pytest.mark.parametrize("lists", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_no_list_of_tokens_makes_it_raise(tokenizer, lists):
    draw = random.Random(lists)
    control = [tokenizer.open_id, tokenizer.close_id, tokenizer.sep_id]
    tags = [
        written(tokenizer, text)
        for text in (
            "think",
            "response",
            "tools",
            'call tool="f" index="1"',
            'argument key="k" type="object"',
            'json type="object"',
            "message",
        )
    ]
    for _ in range(lists):
        ids: list[int] = []
        for _ in range(draw.randrange(1, 12)):
            match draw.randrange(6):
                case 0:
                    ids += [tokenizer.open_id, *draw.choice(tags), tokenizer.sep_id]
                case 1:
                    ids += [tokenizer.close_id, *draw.choice(tags), tokenizer.sep_id]
                case 2:
                    ids.append(draw.choice(control))
                case 3:
                    ids.append(draw.randrange(-3, tokenizer.vocab_size + 3))
                case 4:
                    ids.append(ord(draw.choice(string.printable)))
                case _:
                    ids.append(tokenizer.end_of_msg_id if draw.random() < 0.1 else draw.randrange(256))
        answer = Answer.of(ids, tokenizer, thinking=draw.random() < 0.5)
        assert answer.finish_reason is not None


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(-5, 600)), st.booleans())
def test_what_hypothesis_finds(ids, thinking):
    words = Tokenizer([bytes([i]) for i in range(256)])
    assert events_of(words, ids, thinking=thinking, cuts=list(range(len(ids)))) == events_of(
        words, ids, thinking=thinking
    )
