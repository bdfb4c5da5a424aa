"""Readers: files in, `Document`s out. Knows encodings and file formats, not what a text is good for.

A document's source names it for people and for the split, so it is unique in its corpus and the same on
every machine: a path relative to what was read, `file:line` for a row. Files that end in `.gz` or `.dz` are
unpacked.
"""

from __future__ import annotations

import fnmatch
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from openk3.errors import InvalidInput, MissingDependency

Errors = Literal["strict", "replace"]


@dataclass(frozen=True, slots=True)
class Document:
    """One text and where it came from."""

    text: str
    source: str


def read_text(path: Path, source: str | None = None, *, errors: Errors = "strict") -> Document:
    """A whole file as one document, line ends as they are.

    Raises:
        InvalidInput: no such file, or not UTF-8 (names the byte offset) while `errors` is "strict".
    """
    return Document(_decode(_content(path), str(path), 0, errors), source or path.name)


def read_jsonl(path: Path, field: str = "text", *, errors: Errors = "strict") -> Iterator[Document]:
    """One document per line: the string under `field` of a JSON object. Blank lines are skipped.

    Raises:
        InvalidInput: a line is not UTF-8, not JSON, or has no string there (names the line).
    """
    offset = 0
    for number, raw in enumerate(_content(path).split(b"\n"), start=1):
        line = _decode(raw, f"{path}: line {number}", offset, errors)
        offset += len(raw) + 1
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidInput(
                f"{path}: line {number}: not JSON: {error.msg} (column {error.colno})"
            ) from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists
            raise InvalidInput(f"{path}: line {number}: not JSON that can be read: {error}") from error
        text = row.get(field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            has = f"it has {sorted(row)}" if isinstance(row, dict) else "it is not a JSON object"
            raise InvalidInput(f"{path}: line {number}: no string field {field!r}; {has}")
        yield Document(_scalar_values(text, f"{path}: line {number}", errors), f"{path.name}:{number}")


def read_parquet(path: Path, column: str = "text", *, errors: Errors = "strict") -> Iterator[Document]:
    """One document per row of a string column.

    Raises:
        InvalidInput: not a parquet file, no such string column, or a row that is null or not UTF-8.
        MissingDependency: the pyarrow package is not installed.
    """
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependency(
            "reading parquet needs the pyarrow package; install the extra: pip install openk3[data]"
        ) from error
    _require_file(path)
    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise InvalidInput(f"{path}: not a parquet file: {error}") from error
    schema = file.schema_arrow
    if column not in schema.names or not _is_text(pyarrow, schema.field(column).type):
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        raise InvalidInput(f"{path}: no string column {column!r}; its columns are {columns}")
    row = 0
    for batch in file.iter_batches(columns=[column]):
        # As bytes, because arrow does not check that a string column is UTF-8.
        for value in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
            where = f"{path}: row {row}"
            if value is None:
                raise InvalidInput(f"{where}: column {column!r} is null; drop such rows")
            yield Document(_decode(value, where, 0, errors), f"{path.name}:{row}")
            row += 1


def read_tree(
    folder: Path, include: Sequence[str] = ("*",), exclude: Sequence[str] = (), *, errors: Errors = "strict"
) -> Iterator[Document]:
    """Each file below a folder as one document, in order of relative path. Links are not followed.

    Args:
        include, exclude: patterns on the relative path with `/`, where `*` also matches `/`.

    Raises:
        InvalidInput: no such folder, no file that matches, or a file that is not UTF-8.
    """
    if not folder.is_dir():
        raise InvalidInput(f"{folder}: no such folder")
    found = False
    for relative, path in sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        if matches(relative, include) and not matches(relative, exclude):
            found = True
            yield read_text(path, relative, errors=errors)
    if not found:
        raise InvalidInput(f"{folder}: no file matches {list(include)} without {list(exclude)}")


def matches(relative: str, patterns: Sequence[str]) -> bool:
    """Whether a relative path matches one of the patterns; `*` also matches `/`."""
    return any(fnmatch.fnmatchcase(relative, pattern) for pattern in patterns)


def cut(document: Document, characters: int) -> Iterator[Document]:
    """Cut a long document into parts of at most `characters`, at blank lines if there are any, else at lines.

    Nothing is lost: the parts joined are the document. Part n is called `source#n`.
    """
    text, start, part = document.text, 0, 0
    while len(text) - start > characters:
        end = text.rfind("\n\n", start + characters // 2, start + characters)
        end = end + 2 if end >= 0 else text.rfind("\n", start, start + characters) + 1
        end = end if end > start else start + characters
        yield Document(text[start:end], f"{document.source}#{part}")
        start, part = end, part + 1
    yield Document(text[start:], f"{document.source}#{part}") if part else document


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise InvalidInput(f"{path}: no such file")


def _content(path: Path) -> bytes:
    _require_file(path)
    if path.suffix not in (".gz", ".dz"):
        return path.read_bytes()
    try:
        with gzip.open(path) as stream:
            return stream.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InvalidInput(f"{path}: damaged gzip file: {error}") from error


def _decode(raw: bytes, where: str, offset: int, errors: Errors) -> str:
    try:
        return raw.decode("utf-8", errors=errors)
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{where}: byte {offset + error.start} (0x{raw[error.start]:02x}) is not UTF-8: {error.reason}; "
            'convert the file, or read it with errors = "replace"'
        ) from error


def _scalar_values(text: str, where: str, errors: Errors) -> str:
    r"""JSON escapes such as \ud800 can spell lone surrogates, which UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if errors == "strict":
            raise InvalidInput(
                f"{where}: character {error.start} is a lone surrogate (U+{ord(text[error.start]):04X}); "
                'repair the escape, or read with errors = "replace"'
            ) from error
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _is_text(pyarrow: Any, kind: Any) -> bool:
    types = pyarrow.types
    return bool(types.is_string(kind) or types.is_large_string(kind))
