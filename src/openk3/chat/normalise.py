"""Conversations as clients send them, brought into one form: what the template says of its input.

Messages are dicts in OpenAI's shape and are never changed; `normalised` of what it returned is the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from openk3.errors import InvalidInput

Message = Mapping[str, Any]
ROLES = ("system", "user", "assistant", "tool")


def normalised(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The same conversation with every field in its one form.

    - `developer` is `system`; content is a string or a list of parts, "" for none.
    - `reasoning_content`, else `reasoning`, is `reasoning_content`: "" if it is blank.
    - Arguments of a call are a dict, or stay a string if they are no JSON. An empty string is {}.
    - Results of tools that all name a call of the assistant's last message stand in the order of its calls
      and have their names; `index` counts results since that message, from 1.

    Raises:
        InvalidInput: a message is not of that shape, arguments are JSON but no object, or a result names no
            tool; the text says where.
    """
    found = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    done: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    index = 0
    at = 0
    while at < len(found):
        if found[at]["role"] != "tool":
            if found[at]["role"] == "assistant":
                calls, index = found[at]["tool_calls"], 0
            done.append(found[at])
            at += 1
            continue
        run = []
        while at < len(found) and found[at]["role"] == "tool":
            run.append((f"messages[{at}]", found[at]))
            at += 1
        for where, result in _in_call_order(run, calls):
            index += 1
            name = result["tool"] or (calls[index - 1]["function"]["name"] if index <= len(calls) else "")
            if not name:
                raise InvalidInput(f"{where}: names no tool, and there is no call that it could answer")
            done.append(result | {"tool": name, "index": index})
    return done


def _message(message: Message, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidInput(f"{where} is a {type(message).__name__}; a message is an object")
    role = message.get("role")
    if role == "developer":
        role = "system"
    if role not in ROLES:
        raise InvalidInput(f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}, developer")
    made: dict[str, Any] = {"role": role, "content": _content(message.get("content"), f"{where}.content")}
    if role == "tool":
        made["tool_call_id"] = _text(message, ("tool_call_id", "id"), where)
        made["tool"] = _text(message, ("tool", "name"), where)
        return made
    made["name"] = _text(message, ("name",), where)
    if role == "system" and message.get("tools"):
        made["tools"] = message["tools"]
    if role == "assistant":
        reasoning = _text(message, ("reasoning_content", "reasoning"), where)
        made["reasoning_content"] = reasoning if reasoning.strip() else ""
        calls = message.get("tool_calls") or []
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise InvalidInput(f"{where}.tool_calls is a {type(calls).__name__}; it must be a list")
        made["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return made


def _text(message: Message, names: Sequence[str], where: str) -> str:
    """The first of these fields that is there, or ""."""
    for name in names:
        value = message.get(name)
        if value is None or value == "":
            continue
        if not isinstance(value, str):
            raise InvalidInput(f"{where}.{name} is a {type(value).__name__}; it must be a string")
        return value
    return ""


def _content(content: Any, where: str) -> Any:
    """A string, or a list of `{"type": "image"}` and `{"type": "text", "text": ...}`."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidInput(f"{where} is a {type(content).__name__}; it must be a string or a list of parts")
    parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("image", "image_url"):
            parts.append({"type": "image"})
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise InvalidInput(f"{where}[{i}] is neither text nor an image")
    return parts


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidInput(f"{where}.function.name is missing; a call names its tool")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    name = function["name"]
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _arguments(arguments: Any, where: str) -> dict[str, Any] | str:
    if arguments is None:
        return {}
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
    else:
        value = arguments
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{where} is a JSON {type(value).__name__}; arguments are an object")
    return dict(value)


def _in_call_order(
    run: Sequence[tuple[str, dict[str, Any]]], calls: Sequence[Mapping[str, Any]]
) -> list[tuple[str, dict[str, Any]]]:
    """Results that stand together, sorted by the calls that they answer if every one answers one."""
    places: dict[str, int] = {}
    for place, call in enumerate(calls):
        if call["id"]:
            places.setdefault(call["id"], place)
    if any(result["tool_call_id"] not in places for _, result in run):
        return list(run)
    ordered = sorted(run, key=lambda item: places[item[1]["tool_call_id"]])
    names = [calls[places[result["tool_call_id"]]]["function"]["name"] for _, result in ordered]
    return [(where, result | {"tool": name}) for (where, result), name in zip(ordered, names, strict=True)]
