"""The words of K3's chat language (report Appendix F): one table for renderer, parser and grammar.

    element   <|open|> tag { SP key="value" } <|sep|> body <|close|> tag <|sep|>
    message   an element `message`, then <|end_of_msg|>

Markers are control tokens; everything else, tag names and attributes too, is ordinary text. Bodies are never
escaped: a marker that somebody typed is text, because it is encoded as such.
"""

from __future__ import annotations

from typing import Any, Literal

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD = (
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
)

MESSAGE, THINK, RESPONSE, TOOLS, CALL, ARGUMENT, JSON = (
    "message",
    "think",
    "response",
    "tools",
    "call",
    "argument",
    "json",
)
CHANNELS = (THINK, RESPONSE, TOOLS)
"""What an assistant's message is made of, in this order."""

Effort = Literal["low", "high", "max"]
EFFORTS: tuple[Effort, ...] = ("low", "high", "max")

STRING = "string"
JSON_TYPES = (STRING, "number", "boolean", "null", "object", "array")
"""Values of an argument's `type`. A string's body is the text itself, any other's is JSON."""


def json_type(value: Any) -> str:
    """The `type` of an argument, of a value as `json.loads` gives it."""
    match value:
        case str():
            return STRING
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case None:
            return "null"
        case dict():
            return "object"
        case list() | tuple():
            return "array"
    raise TypeError(f"{type(value).__name__} is not a JSON type")


def escaped(value: str) -> str:
    """An attribute's value as it stands between its quotes."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescaped(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


# Bodies of the messages that carry options. They are part of the protocol, letter by letter.
TOOLS_DECLARED = "# Tools\nHere are the available tools, described in JSONSchema."
TOOLS_ADDED = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools."
)
THINKING_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response "
    "channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
TOOL_CHOICE = {
    "required": (
        "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message."
    ),
    "none": (
        "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message."
    ),
}
RESPONSE_FORMAT = (
    "The system is invoked with `response_format={kind}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
RESPONSE_SCHEMA = "\nThe JSON data must match the following schema:\n"
FENCE = "```"
