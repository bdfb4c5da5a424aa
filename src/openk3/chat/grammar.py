"""What an answer may be, as a grammar that masks tokens while it is written: tools by their schemas, formats.

The grammar is of token ids, from the words that the renderer and the parser use: a marker is its control
token and no other spelling of it, and no text holds one. Tools' arguments are typed elements, a string's body
is raw. It begins where the prompt ends and allows what the parser reads without a recovery, but for the
`index` of a call, which it leaves to the model.

`answer_grammar` describes it as a structural tag of xgrammar, without importing that; `Grammars` compiles.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from openk3.chat.language import (
    ARGUMENT,
    CALL,
    JSON_TYPES,
    MESSAGE,
    RESPONSE,
    STRING,
    THINK,
    TOOLS,
    escaped,
    json_type,
)
from openk3.chat.template import response_schema
from openk3.errors import InvalidInput, MissingDependency

if TYPE_CHECKING:
    from openk3.chat.tokenizer import Tokenizer

Format = dict[str, Any]
WHITESPACE = 2
"""The most of it at one place of a JSON value: a model that likes spaces must come to an end."""
CHARACTER = r"[\s\S]"


def answer_grammar(
    tokenizer: Tokenizer,
    *,
    thinking: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str = "auto",
    parallel_tool_calls: bool = True,
    response_format: Mapping[str, Any] | None = None,
) -> Format:
    """The structural tag of an answer to a prompt of `render`, up to the token that ends its message.

    Args:
        tokenizer: of the model.
        thinking: as the prompt ends; what is thought is free.
        tools: all that may be called, dynamic ones too, in OpenAI's shape.
        tool_choice: "auto", "none", "required", or the name of the one tool to call.
        parallel_tool_calls: whether several calls are allowed.
        response_format: with a JSON format the response is such JSON, or calls follow an empty response.

    Raises:
        InvalidInput: tools or the choice of one are not of that shape, or a schema cannot be said in this
            language; the text says where.
    """
    words = _Words(tokenizer)
    by_name = _parameters_by_name(tools)
    if tool_choice not in ("auto", "none", "required"):
        if tool_choice not in by_name:
            raise InvalidInput(f"tool_choice is {tool_choice!r}, which is no tool of this request")
        by_name = {tool_choice: by_name[tool_choice]}
    must_call = tool_choice not in ("auto", "none")
    if must_call and not by_name:
        raise InvalidInput("tool_choice is 'required', and the request has no tools")
    content = _content(words, response_format)
    calls = None
    if by_name and tool_choice != "none":
        each = [words.call(name, schema, f"tools: {name}.parameters") for name, schema in by_name.items()]
        calls = words.element(
            TOOLS, {"type": "plus", "content": _one_of(each)} if parallel_tool_calls else _one_of(each)
        )
    if calls is None:
        body = [words.body_of(RESPONSE, content)]
    elif must_call:
        body = [words.body_of(RESPONSE, words.text if response_format is None else _nothing()), calls]
    elif content == words.text:
        body = [words.body_of(RESPONSE, content), {"type": "optional", "content": calls}]
    else:
        called = _sequence([words.body_of(RESPONSE, _nothing()), calls])
        body = [_one_of([words.body_of(RESPONSE, content), called])]
    thought = [words.body_of(THINK, words.text), words.opening(RESPONSE)] if thinking else []
    return {"type": "structural_tag", "format": _sequence([*thought, *body, words.closing(MESSAGE)])}


class Grammars:
    """Compiled grammars of one vocabulary, kept by what they say.

    Raises:
        MissingDependency: xgrammar is not installed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            import xgrammar  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise MissingDependency(
                "constrained answers need xgrammar: install openk3 with its extra `serve`"
            ) from error
        self._xgrammar = xgrammar
        info = xgrammar.TokenizerInfo(
            _spelled(tokenizer),
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=tokenizer.vocab_size,
            stop_token_ids=[tokenizer.end_of_msg_id],
        )
        self._compiler = xgrammar.GrammarCompiler(info)

    def matcher(self, grammar: Format) -> Any:
        """A fresh `xgrammar.GrammarMatcher` of what `answer_grammar` returned.

        Raises:
            InvalidInput: xgrammar refuses a schema; the text is its own.
        """
        try:
            compiled = self._compiler.compile_structural_tag(json.dumps(grammar))
        except (RuntimeError, ValueError) as error:
            raise InvalidInput(f"the schemas cannot be made a grammar: {error}") from error
        return self._xgrammar.GrammarMatcher(compiled)


def _spelled(tokenizer: Tokenizer) -> list[bytes]:
    """Each id's bytes, as the grammar sees them.

    A marker must be a token of its own, which its id alone can be: it has bytes that no text has. The other
    control tokens have none, and are never allowed.
    """
    markers = {tokenizer.open_id, tokenizer.close_id, tokenizer.sep_id}
    first = tokenizer.n_ranks
    ranks = [tokenizer.decode_bytes([rank]) for rank in range(first)]
    control = range(first, tokenizer.vocab_size)
    return ranks + [b"\xff" + bytes([token - first]) if token in markers else b"" for token in control]


class _Words:
    """Elements of the language as formats."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._open, self._close, self._sep = (
            {"type": "token", "token": token}
            for token in (tokenizer.open_id, tokenizer.close_id, tokenizer.sep_id)
        )
        markers = [tokenizer.open_id, tokenizer.close_id, tokenizer.sep_id, tokenizer.end_of_msg_id]
        self.text: Format = {"type": "any_tokens", "exclude_tokens": markers}

    def opening(self, tag: str, *attributes: tuple[str, str]) -> Format:
        written = tag + "".join(f' {key}="{escaped(value)}"' for key, value in attributes)
        return _sequence([self._open, _const(written), self._sep])

    def closing(self, tag: str) -> Format:
        return _sequence([self._close, _const(tag), self._sep])

    def body_of(self, tag: str, body: Format) -> Format:
        """What follows the opening of an element."""
        return _sequence([body, self.closing(tag)])

    def element(self, tag: str, body: Format, *attributes: tuple[str, str]) -> Format:
        return _sequence([self.opening(tag, *attributes), self.body_of(tag, body)])

    def call(self, name: str, parameters: Any, where: str) -> Format:
        head = [
            self._open,
            _const(f'{CALL} tool="{escaped(name)}" index="'),
            _regex("[1-9][0-9]?"),
            _const('"'),
            self._sep,
        ]
        arguments = _one_of([self._arguments(form, where) for form in _objects(parameters, where)])
        return _sequence([*head, arguments, self.closing(CALL)])

    def _arguments(self, form: _Object, where: str) -> Format:
        elements = []
        for key, schema in form.properties.items():
            each = [
                self.element(ARGUMENT, self._value(kind, part), ("key", key), ("type", kind))
                for kind, part in _variants(schema, form.root, f"{where}.{key}")
            ]
            element = _one_of(each)
            elements.append(element if key in form.required else {"type": "optional", "content": element})
        return _sequence(elements) if elements else _nothing()

    def _value(self, kind: str, schema: Mapping[str, Any]) -> Format:
        if kind != STRING:
            return _json(schema)
        if "enum" in schema:
            return _one_of([_const(value) for value in schema["enum"]])
        if "pattern" in schema:
            return _regex(schema["pattern"])
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if least or most is not None:
            return _regex(f"{CHARACTER}{{{least},{'' if most is None else most}}}")
        return self.text


def _content(words: _Words, wanted: Mapping[str, Any] | None) -> Format:
    """Of the response, by `response_format`."""
    kind = "text" if wanted is None else wanted.get("type")
    if kind == "text":
        return words.text
    if kind == "json_object":
        schema: Mapping[str, Any] = {"type": "object"}
    elif kind == "json_schema" and wanted is not None:
        schema = response_schema(wanted)
    else:
        raise InvalidInput(f"response_format.type is {kind!r}; it must be text, json_object or json_schema")
    return _json(schema)


def _parameters_by_name(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name or not isinstance(function, Mapping):
            raise InvalidInput(f"tools[{i}].function.name is missing")
        if name in found:
            raise InvalidInput(f"tools[{i}].function.name: there is another tool {name!r}")
        found[name] = function.get("parameters") or {}
    return found


# --- formats -------------------------------------------------------------------------------------------


def _sequence(elements: Sequence[Format]) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _one_of(formats: Sequence[Format]) -> Format:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text} if text else _nothing()


def _regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def _json(schema: Mapping[str, Any]) -> Format:
    return {"type": "json_schema", "json_schema": _said(schema), "max_whitespace_cnt": WHITESPACE}


def _said(schema: Any) -> Any:
    """A schema with lengths of strings as patterns: by a length alone xgrammar 0.2.9 lets control characters
    stand in JSON as they are. What must be escaped is in no such string then."""
    if isinstance(schema, list):
        return [_said(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: _said(value) for key, value in schema.items()}
    least, most = made.get("minLength"), made.get("maxLength")
    if isinstance(least, int) or isinstance(most, int):
        rest = {key: value for key, value in made.items() if key not in ("minLength", "maxLength")}
        return {"pattern": f"^.{{{least or 0},{'' if most is None else most}}}$"} | rest
    return made


def _nothing() -> Format:
    return {"type": "const_string", "value": ""}


# --- schemas -------------------------------------------------------------------------------------------


class _Object:
    """One way in which parameters may be: properties in their order, those that must be there."""

    def __init__(self, schema: Mapping[str, Any], root: Mapping[str, Any], where: str) -> None:
        self.root = root
        properties = schema.get("properties", {})
        if not isinstance(properties, Mapping):
            raise InvalidInput(f"{where}.properties is a {type(properties).__name__}; it must be an object")
        self.required = set(schema.get("required", ()))
        self.properties: dict[str, Any] = dict(properties)
        self.properties |= {key: {} for key in schema.get("required", ()) if key not in properties}
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        if least > len(self.properties):
            raise InvalidInput(
                f"{where}: minProperties is {least}, but only {len(self.properties)} are named"
            )
        if least > len(self.required):
            self.required = set(self.properties)
        if most is not None and most < len(self.properties):
            self.properties = {key: value for key, value in self.properties.items() if key in self.required}
            if most < len(self.properties):
                raise InvalidInput(
                    f"{where}: maxProperties is {most}, and {len(self.properties)} are required"
                )


def _objects(schema: Any, where: str) -> list[_Object]:
    """The ways in which a tool's parameters may be."""
    if not isinstance(schema, Mapping):
        raise InvalidInput(f"{where} is a {type(schema).__name__}; it must be a JSON schema of an object")
    made = []
    for plain in _plain(schema, schema, where):
        kinds = _kinds(plain) if "type" in plain else ["object"]
        if "object" not in kinds:
            raise InvalidInput(f"{where}.type is {plain['type']!r}; parameters are an object")
        made.append(_Object(plain, schema, where))
    return made


def _plain(
    schema: Any, root: Mapping[str, Any], where: str, seen: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """The schema without references and combinations at its top: one of these must hold."""
    if schema is True:
        return [{}]
    if not isinstance(schema, Mapping):
        raise InvalidInput(f"{where}: {json.dumps(schema, default=str)} is no schema that a value could meet")
    rest = {key: value for key, value in schema.items() if key not in ("$ref", "allOf", "anyOf", "oneOf")}
    found = [rest]
    if (reference := schema.get("$ref")) is not None:
        if reference in seen:
            raise InvalidInput(f"{where}: {reference} refers to itself")
        target = _resolved(reference, root, where)
        found = _both(found, _plain(target, root, where, (*seen, reference)))
    for part in schema.get("allOf", ()):
        found = _both(found, _plain(part, root, where, seen))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            options = [plain for part in schema[key] for plain in _plain(part, root, where, seen)]
            found = _both(found, options)
    return found


def _both(ones: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each of the ones together with each of the others."""
    made = []
    for one in ones:
        for other in others:
            joined = one | other
            if "properties" in one and "properties" in other:
                joined["properties"] = one["properties"] | other["properties"]
            if "required" in one and "required" in other:
                joined["required"] = [*one["required"], *other["required"]]
            if "type" in one and "type" in other:
                kinds = _kinds(other)
                joined["type"] = [kind for kind in _kinds(one) if kind in kinds]
            made.append(joined)
    return made


def _resolved(reference: Any, root: Mapping[str, Any], where: str) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise InvalidInput(
            f"{where}: $ref {reference!r} is outside of the schema; only #/... can be followed"
        )
    at: Any = root
    for step in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(at, Mapping) or step not in at:
            raise InvalidInput(f"{where}: $ref {reference!r} names nothing in the schema")
        at = at[step]
    return at


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """Types that a schema without combinations allows, `integer` as it is."""
    given = schema.get("type")
    if given is None:
        return list(JSON_TYPES)
    return [given] if isinstance(given, str) else list(given)


_ANCHORS = re.compile(r"\A\^|\$\Z")


def _variants(schema: Any, root: Mapping[str, Any], where: str) -> list[tuple[str, dict[str, Any]]]:
    """An argument's types, and the schema of its value in each."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    made: list[tuple[str, dict[str, Any]]] = []
    for plain in _plain(schema, root, where):
        kinds = _kinds(plain)
        if "const" in plain or "enum" in plain:
            values = [plain["const"]] if "const" in plain else list(plain["enum"])
            for kind in JSON_TYPES:
                mine = [value for value in values if json_type(value) == kind]
                if mine:
                    made.append((kind, {"enum": mine}))
            continue
        for kind in kinds:
            if kind == STRING:
                keys = ("minLength", "maxLength", "pattern")
                body: dict[str, Any] = {key: plain[key] for key in keys if key in plain}
                if "pattern" in body:
                    body["pattern"] = _searched(body["pattern"])
                made.append((STRING, body))
            elif kind in (*JSON_TYPES, "integer"):
                name = "number" if kind == "integer" else kind
                made.append((name, {**plain, "type": kind, **definitions}))
            else:
                raise InvalidInput(
                    f"{where}.type is {kind!r}; it must be one of {', '.join(JSON_TYPES)}, integer"
                )
    if not made:
        raise InvalidInput(f"{where}: no value could meet this schema")
    return made


@functools.lru_cache(maxsize=1024)
def _searched(pattern: str) -> str:
    """The expression of whole texts in which `pattern` is found, as JSON schemas mean it."""
    before = "" if pattern.startswith("^") else f"{CHARACTER}*"
    after = "" if pattern.endswith("$") and not pattern.endswith(r"\$") else f"{CHARACTER}*"
    return f"{before}({_ANCHORS.sub('', pattern)}){after}"
