"""Random models under the grammar: what they write is read without a fault, and is what the schemas say."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import xgrammar

from openk3.chat import Answer, Parser, Tokenizer, encode, render
from openk3.chat.grammar import Format, Grammars, answer_grammar
from openk3.errors import InvalidInput

KEYS = ["a", "key", 'q"uo', "&amp;", "é", "with space", "<|open|>", "$ref"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes, and tokens that run over borders of the language's words."""
    more = [b"think", b"respon", b'="', b'"}', b", ", b"true", b"12", b"</", b'call tool="']
    return Tokenizer([bytes([i]) for i in range(256)] + more)


@pytest.fixture(scope="module")
def grammars(tokenizer) -> Grammars:
    return Grammars(tokenizer)


def written(grammars: Grammars, tokenizer: Tokenizer, grammar: Format, seed: int) -> list[int]:
    """By a model that knows nothing but likes to come to an end."""
    draw, matcher = random.Random(seed), grammars.matcher(grammar)
    mask = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)
    ends = {tokenizer.close_id, tokenizer.end_of_msg_id, ord('"'), ord("]"), ord("}"), ord(",")}
    ids: list[int] = []
    while not matcher.is_terminated():
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.view(torch.uint8).numpy()[0], bitorder="little")[: tokenizer.vocab_size]
        # 0xED and 0xF4 could begin what UTF-8 does not know: one character for xgrammar, three for a reader.
        allowed = [token for token in np.flatnonzero(bits).tolist() if token not in (0xED, 0xF4)]
        assert allowed, f"nothing may follow {tokenizer.decode(ids)!r}"
        liked = [token for token in allowed if token in ends]
        chosen = draw.choice(liked if liked and draw.random() < 0.4 else allowed)
        assert matcher.accept_token(chosen)
        ids.append(chosen)
        assert len(ids) < 20_000
    return ids


def answered(tokenizer: Tokenizer, ids: list[int], thinking: bool) -> Answer:
    parser = Parser(tokenizer, thinking=thinking)
    answer = Answer()
    answer.add([*parser.feed(ids), *parser.end()])
    assert set(parser.recoveries) <= {"a call with another index"}
    assert parser.finished and ids[-1] == tokenizer.end_of_msg_id
    return answer


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "pattern", "length", "any of", "types"]
    match draw.choice(kinds + (["array", "object"] if depth < 2 else [])):
        case "integer":
            least = draw.randrange(-50, 50)
            return {"type": "integer", "minimum": least, "maximum": least + draw.randrange(100)}
        case "enum":
            values = ["x", 'a "b"', "", 3, 1.5, True, None, [1, {"k": "v"}], {"o": []}]
            return {"enum": draw.sample(values, draw.randrange(1, 4))}
        case "pattern":
            return {
                "type": "string",
                "pattern": draw.choice(["^[a-c]{2,5}$", "b+", "^x", r"\d$", "^(ab|cd)$"]),
            }
        case "length":
            least = draw.randrange(4)
            return {"type": "string", "minLength": least, "maxLength": least + draw.randrange(4)}
        case "any of":
            return {"anyOf": [random_schema(draw, depth + 1) for _ in range(draw.randrange(1, 3))]}
        case "types":
            return {"type": draw.sample(["string", "integer", "boolean", "null"], draw.randrange(1, 4))}
        case "array":
            return {"type": "array", "items": random_schema(draw, depth + 1), "maxItems": draw.randrange(3)}
        case "object":
            return random_object(draw, depth + 1)
        case kind:
            return {"type": kind}


def random_object(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    keys = draw.sample(KEYS if depth == 0 else ["a", "b", "key"], draw.randrange(4 if depth == 0 else 3))
    properties = {key: random_schema(draw, depth) for key in keys}
    required = [key for key in keys if draw.random() < 0.5]
    made: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if depth or draw.random() < 0.5:
        made["additionalProperties"] = False
    return made


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_calls_of_a_thousand_random_schemas_are_read_and_valid(tokenizer, grammars):
    for seed in range(1000):
        draw = random.Random(seed)
        schemas = {name: random_object(draw) for name in draw.sample(["f", "get_weather", 'na"me', "é"], 2)}
        tools = [tool(name, schema) for name, schema in schemas.items()]
        thinking = draw.random() < 0.5
        grammar = answer_grammar(tokenizer, thinking=thinking, tools=tools, tool_choice="required")
        answer = answered(tokenizer, written(grammars, tokenizer, grammar, seed), thinking)
        assert answer.finish_reason == "tool_calls" and answer.tool_calls
        for call in answer.tool_calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])


def test_what_is_rendered_is_allowed(tokenizer, grammars):
    """The template's own answers, with their spaces, in the order of the schema."""
    schema = {
        "type": "object",
        "properties": {"s": {"type": "string"}, "l": {"type": "array"}, "o": {"type": "object"}, "n": {}},
        "required": ["s"],
    }
    arguments = {"s": 'a "b" <|close|>', "l": [1, {"k": [None]}], "o": {"x": {"y": 1}}, "n": -1.5e3}
    call = {"function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "reasoning_content": "r", "content": "c", "tool_calls": [call]}
    opening = len(encode(render([], thinking_effort=None), tokenizer))
    ids = encode(render([message], thinking_effort=None, add_generation_prompt=False), tokenizer)[opening:]
    matcher = grammars.matcher(answer_grammar(tokenizer, thinking=True, tools=[tool("f", schema)]))
    assert all(matcher.accept_token(token) for token in ids) and matcher.is_terminated()


@pytest.mark.parametrize("text", ["<|close|>response<|sep|>", '<|open|>call tool="f" index="1"<|sep|>'])
def test_a_marker_in_letters_is_text_and_ends_nothing(tokenizer, grammars, text):
    matcher = grammars.matcher(answer_grammar(tokenizer, thinking=False))
    assert all(matcher.accept_token(token) for token in tokenizer.encode(text))
    assert not matcher.accept_token(tokenizer.end_of_msg_id)
    assert matcher.accept_token(tokenizer.close_id)


@pytest.mark.parametrize("parallel", [True, False])
def test_how_many_calls_there_are(tokenizer, grammars, parallel):
    counts = set()
    for seed in range(40):
        options = {"tools": [tool("f", {})], "tool_choice": "required", "parallel_tool_calls": parallel}
        grammar = answer_grammar(tokenizer, thinking=False, **options)
        counts.add(len(answered(tokenizer, written(grammars, tokenizer, grammar, seed), False).tool_calls))
    assert (counts == {1}) == (not parallel) and min(counts) == 1


def test_which_tools_may_be_called(tokenizer, grammars):
    tools, called = [tool("f", {}), tool("g", {})], {}
    for choice in ("auto", "none", "required", "g"):
        grammar = answer_grammar(tokenizer, thinking=False, tools=tools, tool_choice=choice)
        called[choice] = set()
        for seed in range(40):
            answer = answered(tokenizer, written(grammars, tokenizer, grammar, seed), False)
            called[choice].add(frozenset(call.name for call in answer.tool_calls))
    assert called["none"] == {frozenset()} and called["g"] == {frozenset("g")}
    assert frozenset() in called["auto"] and len(called["auto"]) > 1
    assert frozenset() not in called["required"] and {"f", "g"} <= set().union(*called["required"])


def test_a_response_of_json_or_calls_behind_an_empty_one(tokenizer, grammars):
    schema = {
        "type": "object",
        "properties": {"m": {"type": "number"}},
        "required": ["m"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "t", "schema": schema}}
    seen = set()
    for seed in range(40):
        grammar = answer_grammar(tokenizer, thinking=True, tools=[tool("f", {})], response_format=wanted)
        answer = answered(tokenizer, written(grammars, tokenizer, grammar, seed), True)
        seen.add(bool(answer.tool_calls))
        if answer.tool_calls:
            assert answer.content == ""
        else:
            jsonschema.validate(json.loads(answer.content), schema)
    assert seen == {True, False}
    grammar = answer_grammar(tokenizer, thinking=False, response_format={"type": "json_object"})
    for seed in range(10):
        assert isinstance(
            json.loads(answered(tokenizer, written(grammars, tokenizer, grammar, seed), False).content), dict
        )


def test_references_and_combinations_are_followed(tokenizer, grammars):
    schema = {
        "$defs": {
            "port": {"type": "string", "enum": ["Brest", "Lorient"]},
            "tree": {
                "type": "object",
                "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
            },
            "base": {"properties": {"port": {"$ref": "#/$defs/port"}}, "required": ["port"]},
        },
        "type": "object",
        "allOf": [{"$ref": "#/$defs/base"}],
        "oneOf": [
            {"properties": {"day": {"type": "integer"}}, "required": ["day"]},
            {"properties": {"tree": {"$ref": "#/$defs/tree"}}, "required": ["tree"]},
        ],
    }
    seen = set()
    for seed in range(60):
        grammar = answer_grammar(tokenizer, thinking=False, tools=[tool("f", schema)], tool_choice="f")
        for call in answered(tokenizer, written(grammars, tokenizer, grammar, seed), False).tool_calls:
            arguments = json.loads(call.arguments)
            jsonschema.validate(arguments, schema)
            seen.add(frozenset(arguments))
    assert seen == {frozenset({"port", "day"}), frozenset({"port", "tree"})}


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"tools": [{}]}, "tools[0].function.name is missing"),
        ({"tools": [tool("f", {}), tool("f", {})]}, "tools[1].function.name: there is another tool 'f'"),
        ({"tools": [tool("f", {"type": "string"})]}, "tools: f.parameters.type is 'string'"),
        ({"tools": [tool("f", {"properties": {"a": False}})]}, "f.parameters.a: false is no schema"),
        ({"tools": [tool("f", {"properties": {"a": {"type": "int"}}})]}, "f.parameters.a.type is 'int'"),
        ({"tools": [tool("f", {"properties": {"a": {"$ref": "#/x"}}})]}, "$ref '#/x' names nothing"),
        ({"tools": [tool("f", {"$ref": "#"})]}, "# refers to itself"),
        ({"tools": [tool("f", {"minProperties": 1})]}, "minProperties is 1"),
        ({"tool_choice": "required"}, "the request has no tools"),
        ({"tool_choice": "g"}, "'g', which is no tool"),
        ({"response_format": {"type": "xml"}}, "response_format.type is 'xml'"),
    ],
)
def test_what_cannot_be_said_and_where(tokenizer, options, where):
    with pytest.raises(InvalidInput) as told:
        answer_grammar(tokenizer, thinking=False, **options)
    assert where in str(told.value)


def test_a_schema_that_xgrammar_refuses_is_wrong_input(tokenizer, grammars):
    grammar = answer_grammar(
        tokenizer, thinking=False, tools=[tool("f", {"properties": {"a": {"pattern": "("}}})]
    )
    with pytest.raises(InvalidInput, match="cannot be made a grammar"):
        grammars.matcher(grammar)
