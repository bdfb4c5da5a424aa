"""Questions and answers from docstrings: what a brief fine-tuning on sources alone can use.

Each public function, class and module of a Python source asks what it is for and is answered by the first
paragraph of its docstring. Knows sources; knows nothing of chat formats or token ids.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from openk3.data.documents import Document

_LONGEST_ANSWER = 240  # characters: longer first paragraphs are cut at a sentence's end, or left out
_SHORTEST_ANSWER = 20

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Exchange(NamedTuple):
    """A question and its answer, both plain text."""

    question: str
    answer: str


def exchanges(sources: Iterable[Document]) -> Iterator[Exchange]:
    """The exchanges of Python sources whose `source` is a path relative to the import root.

    A file that this Python cannot parse has no docstrings for it and gives none.
    """
    for document in sources:
        module = module_name(document.source)
        if module is None:
            continue
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError):  # a template, or a source of another version
            continue
        yield from _of_node(tree, module)


def module_name(path: str) -> str | None:
    """`collections/abc.py` is `collections.abc`; None for what is not importable or private."""
    parts = path.removesuffix(".py").split("/")
    if parts[-1] == "__init__":
        parts = parts[:-1]
    if not path.endswith(".py") or not parts or not all(_public(part) for part in parts):
        return None
    return ".".join(parts)


def _of_node(node: Documented, name: str) -> Iterator[Exchange]:
    answer = first_paragraph(ast.get_docstring(node) or "")
    if answer is not None:
        yield Exchange(_question(node, name), answer)
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and _public(child.name):
            yield from _of_node(child, f"{name}.{child.name}")


def _question(node: Documented, name: str) -> str:
    if isinstance(node, ast.Module):
        return f"What is the module {name} for?"
    if isinstance(node, ast.ClassDef):
        return f"What is {name}?"
    return f"What does {name} do?"


def first_paragraph(docstring: str) -> str | None:
    """The first paragraph on one line, whole sentences only; None if there is nothing fit to answer with."""
    text = " ".join(docstring.strip().split("\n\n")[0].split())
    if len(text) > _LONGEST_ANSWER:
        text = text[: text.rfind(". ", 0, _LONGEST_ANSWER) + 1]
    return text if len(text) >= _SHORTEST_ANSWER else None


def _public(name: str) -> bool:
    return name.isidentifier() and not name.startswith("_")
