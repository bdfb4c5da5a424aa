"""The corpus that a Python carries: its standard library, the texts behind `help()`, installed packages.

The file list leaves out what differs between installations of one version (tests, IDLE, site-packages,
generated build data), so that machines agree as far as their Pythons do; the manifest records the rest.
"""

from __future__ import annotations

import importlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from openk3.data.documents import Document, Errors, read_tree
from openk3.errors import InvalidInput

_EXCLUDED_FOLDERS = (
    "test",
    "tests",
    "idlelib",
    "turtledemo",
    "site-packages",
    "dist-packages",
    "config-*",  # build configuration of this machine
)
_EXCLUDED = (
    *(f"{folder}/*" for folder in _EXCLUDED_FOLDERS),
    *(f"*/{folder}/*" for folder in _EXCLUDED_FOLDERS),
    "_sysconfigdata*",
    "pydoc_data/topics.py",  # its texts come as documents of their own
)


def stdlib_documents(folder: Path | None = None, *, errors: Errors = "strict") -> Iterator[Document]:
    """Each source file of the standard library (by default that of the running Python)."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    if not (folder / "os.py").is_file():
        raise InvalidInput(f"{folder}: no standard library sources here (is it inside a zip file?)")
    return read_tree(folder, ("*.py",), _EXCLUDED, errors=errors)


def package_documents(folder: Path | None = None, *, errors: Errors = "strict") -> Iterator[Document]:
    """Each Python file of the installed packages: below `folder`, by default the running Python's own.

    What that is differs from machine to machine; nothing is left out.
    """
    return read_tree(folder or Path(sysconfig.get_path("purelib")), ("*.py",), errors=errors)


def topic_documents() -> Iterator[Document]:
    """Each chapter of the language reference that CPython carries in `pydoc_data.topics`."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError as error:
        raise InvalidInput(
            "this Python has no pydoc_data.topics (Debian has it in libpython3.X-stdlib)"
        ) from error
    for name, text in sorted(topics.items()):
        yield Document(text, f"{name}.txt")
