"""From a recipe to documents: reads every source and records what was found where.

A document's source becomes `name/...` with the name of its recipe source. The hash of a source is over the
list of its documents (source and sha256 of the text, in order), taken before cleaning: two machines that
agree on it have the same corpus.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from openk3.config import StrictModel
from openk3.data.debian import UnpackedPackage, debian_package
from openk3.data.documents import Document, cut, read_jsonl, read_parquet, read_text, read_tree
from openk3.data.recipe import DebianSource, Recipe, Source
from openk3.data.stdlib import package_documents, stdlib_documents, topic_documents
from openk3.errors import InvalidInput

Progress = Callable[[str, int, int], None]  # stage, done, total (0: unknown)
DebianPackage = Callable[[str, Path], UnpackedPackage]


def silent(stage: str, done: int, total: int) -> None:
    """The progress callback that does nothing."""


class SourceReport(StrictModel):
    """What one source of a recipe held, before cleaning."""

    documents: int
    bytes: int  # of UTF-8
    sha256: str  # over the list of its documents
    package: str = ""  # for Debian packages: name, version and sha256 of the file


@dataclass(frozen=True)
class Corpus:
    """Documents as read, and where they came from."""

    documents: list[Document]
    sources: dict[str, SourceReport]


def gather(
    recipe: Recipe,
    cache: Path,
    *,
    progress: Progress = silent,
    package: DebianPackage = debian_package,
) -> Corpus:
    """Read every source of a recipe, all in memory.

    Args:
        cache: where Debian packages are kept.

    Raises:
        InvalidInput: a source is missing, empty, or holds what is not UTF-8 text.
    """
    documents: list[Document] = []
    sources: dict[str, SourceReport] = {}
    for source in recipe.sources:
        unpacked = package(source.package, cache) if isinstance(source, DebianSource) else None
        found: list[Document] = []
        for document in _cut(_read(source, unpacked), source.document_characters):
            found.append(replace(document, source=f"{source.name}/{document.source}"))
            progress(f"reading {source.name}", len(found), 0)
        if not found:
            raise InvalidInput(f"recipe {recipe.name}: source {source.name!r} holds no documents")
        documents += found
        origin = f"{unpacked.name} {unpacked.version} {unpacked.sha256}" if unpacked else ""
        sources[source.name] = SourceReport(
            documents=len(found),
            bytes=sum(len(document.text.encode()) for document in found),
            sha256=document_list_hash(found),
            package=origin,
        )
    return Corpus(documents, sources)


def document_list_hash(documents: Iterable[Document]) -> str:
    """sha256 over one `source NUL sha256(text) newline` per document."""
    digest = hashlib.sha256()
    for document in documents:
        content = hashlib.sha256(document.text.encode()).hexdigest()
        digest.update(f"{document.source}\0{content}\n".encode())
    return digest.hexdigest()


def _read(source: Source, unpacked: UnpackedPackage | None) -> Iterator[Document]:
    match source.kind:
        case "text":
            yield read_text(source.path, errors=source.errors)
        case "jsonl":
            yield from read_jsonl(source.path, source.field, errors=source.errors)
        case "parquet":
            yield from read_parquet(source.path, source.column, errors=source.errors)
        case "tree":
            yield from read_tree(source.path, source.include, source.exclude, errors=source.errors)
        case "python-stdlib":
            yield from stdlib_documents(errors=source.errors)
        case "python-packages":
            yield from package_documents(errors=source.errors)
        case "pydoc-topics":
            yield from topic_documents()
        case "debian":
            assert unpacked is not None
            yield from read_tree(unpacked.folder, source.include, source.exclude, errors=source.errors)


def _cut(documents: Iterable[Document], characters: int | None) -> Iterator[Document]:
    for document in documents:
        if characters is None:
            yield document
        else:
            yield from cut(document, characters)
