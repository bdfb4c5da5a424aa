"""TOML in: every recipe and model file is read here, so that a wrong one is refused in the same words.

Knows the format; knows nothing of fields.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from openk3.errors import InvalidInput

DEEPEST = 64
"""Tables in tables that are read; a configuration has four."""


def parse_toml(content: bytes, source: str) -> dict[str, Any]:
    """`content` as a table; a byte order mark is no part of it.

    Args:
        source: where it came from, for messages.

    Raises:
        InvalidInput: not UTF-8, not TOML, or nested too deeply; says where in the text.
    """
    try:
        values = tomllib.loads(content.decode("utf-8-sig"))
    except ValueError as error:  # not UTF-8, not TOML, or a number of thousands of digits
        raise InvalidInput(f"{source}: not TOML: {error}") from None
    except RecursionError:
        raise InvalidInput(f"{source}: not TOML that can be read: it is nested too deeply") from None
    _check_depth(values, source)
    return values


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a file.

    Raises:
        InvalidInput: no such file, it cannot be read, or as `parse_toml`.
    """
    try:
        if not path.is_file():
            raise InvalidInput(f"{path}: no such file")
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path}: cannot read: {error.strerror or error}") from None
    return parse_toml(content, str(path))


def _check_depth(values: dict[str, Any], source: str) -> None:
    level: list[Any] = [values]
    for _ in range(DEEPEST):
        level = [inner for node in level for inner in _inside(node)]
        if not level:
            return
    raise InvalidInput(f"{source}: tables are nested more than {DEEPEST} deep")


def _inside(node: Any) -> list[Any]:
    """What a table or a list holds."""
    return [*node.values()] if isinstance(node, dict) else node if isinstance(node, list) else []
