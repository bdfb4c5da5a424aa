"""Text from standard input, in UTF-8 whatever the locale is; what is not is an error that names the byte."""

from __future__ import annotations

import sys

from openk3.errors import InvalidInput


def read_text() -> str:
    """All of it.

    Raises:
        InvalidInput: it is not UTF-8; names the first wrong byte.
    """
    return _decoded(sys.stdin.buffer.read(), "standard input")


def read_line() -> str:
    """The next line with its line end; empty at the end of input. Raises as `read_text`."""
    return _decoded(sys.stdin.buffer.readline(), "standard input, this line")


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{where}: byte {error.start} (0x{raw[error.start]:02x}) is not UTF-8: {error.reason}"
        ) from error
