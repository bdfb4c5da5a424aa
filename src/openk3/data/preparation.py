"""From a recipe to token shards: gather, clean, split, deduplicate, tokenise, write. Each step is a module.

Documents are held out by a hash of their source, so that a document stays on its side when others come or go.
Training documents come first in deduplication: of two that agree across the border the validation copy is
dropped, and what a model is tested on is not what it was trained on. The tokenizer is trained on training
documents only. A corpus is held in memory while it is prepared.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import platform
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from openk3 import __version__
from openk3.chat import Tokenizer
from openk3.chat.train_tokenizer import train_tokenizer
from openk3.data.cleaning import Cleaner
from openk3.data.corpus import Corpus, Progress, document_list_hash, gather, silent
from openk3.data.debian import default_cache
from openk3.data.dedup import exact_duplicates, near_duplicates
from openk3.data.documents import Document
from openk3.data.recipe import Recipe, SplitRules
from openk3.data.shards import EncodedDocument, Manifest, Provenance, write_dataset
from openk3.errors import InvalidInput, StorageError

_PACKAGES = ("tiktoken", "tokenizers", "datasketch", "numpy")
_ENCODED_TOGETHER = 256  # documents


@dataclass(frozen=True)
class Selection:
    """The documents that a recipe comes to, and how."""

    train: list[Document]
    validation: list[Document]
    provenance: Provenance


def prepare(
    recipe: Recipe,
    out: str | Path,
    *,
    tokenizer: Tokenizer | int,
    cache: Path | None = None,
    progress: Progress = silent,
) -> Manifest:
    """Prepare a corpus for training under a free name.

    Args:
        out: the folder to make.
        tokenizer: a finished one, or the vocabulary size of one to be trained on the training documents.
        cache: where fetched packages are kept; by default `openk3.data.debian.default_cache()`.
        progress: called with (stage, done, total) as work goes on.

    Raises:
        InvalidInput: a source is wrong, or nothing is left of the corpus or of one side of the split.
        MissingDependency: a step needs a package of the data extra.
        StorageError: `out` exists or cannot be written; nothing is left behind.
    """
    out = Path(out)
    if out.exists():
        raise StorageError(f"{out}: exists already; remove it or choose another name")
    chosen = select(recipe, cache=cache, progress=progress)
    if isinstance(tokenizer, int):
        progress("training the tokenizer", 0, 0)
        tokenizer = train_tokenizer((document.text for document in chosen.train), tokenizer)
    encoded = _Encoder(tokenizer, len(chosen.train) + len(chosen.validation), progress)
    return write_dataset(
        out,
        tokenizer,
        {"train": encoded(chosen.train), "validation": encoded(chosen.validation)},
        chosen.provenance,
    )


def select(recipe: Recipe, *, cache: Path | None = None, progress: Progress = silent) -> Selection:
    """Gather, clean, split and deduplicate; arguments and errors as in `prepare`."""
    corpus = gather(recipe, cache or default_cache(), progress=progress)
    cleaner = Cleaner(recipe.cleaning)
    train, validation = split(_clean(corpus, cleaner, progress), recipe.split)
    sides = _Sides(train + validation, len(train))
    progress("deduplicating", 0, 0)
    sides.drop("exact", exact_duplicates(document.text for document in sides.documents))
    if recipe.deduplication.near:
        texts = [document.text for document in sides.documents]
        sides.drop("near", near_duplicates(texts, recipe.deduplication))
    train, validation = sides.documents[: sides.border], sides.documents[sides.border :]
    for side, left in (("training", train), ("validation", validation)):
        if not left:
            raise InvalidInput(
                f"recipe {recipe.name}: of {len(corpus.documents)} documents read, none is left for {side} "
                f"(cleaning: {cleaner.counts}; deduplication: {sides.counts})"
            )
    provenance = Provenance(
        recipe=recipe,
        corpus_sha256=document_list_hash(corpus.documents),
        sources=corpus.sources,
        cleaning=cleaner.counts,
        deduplication=sides.counts,
        versions=_versions(),
    )
    return Selection(train, validation, provenance)


def split(documents: Sequence[Document], rules: SplitRules) -> tuple[list[Document], list[Document]]:
    """Training and validation documents, each in the given order.

    Held out are the documents whose source hashes into the lowest `validation_share`, lowest first, as long
    as they fit into `validation_bytes`; where there are none, the one lowest document of at least two.
    """
    ranked = sorted((_place(document.source), i) for i, document in enumerate(documents))
    held_out: set[int] = set()
    room = rules.validation_bytes
    for place, i in ranked:
        size = len(documents[i].text.encode())
        if place >= rules.validation_share or size > room:
            break
        held_out.add(i)
        room -= size
    if not held_out and len(ranked) > 1:
        held_out = {ranked[0][1]}
    train = [document for i, document in enumerate(documents) if i not in held_out]
    return train, [documents[i] for i in sorted(held_out)]


def _place(source: str) -> float:
    """A number in [0, 1) that depends on the source alone."""
    return int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "big") / 2**64


def _clean(corpus: Corpus, cleaner: Cleaner, progress: Progress) -> list[Document]:
    kept = []
    for i, document in enumerate(corpus.documents):
        if (text := cleaner(document.text)) is not None:
            kept.append(Document(text, document.source))
        progress("cleaning", i + 1, len(corpus.documents))
    return kept


@dataclass
class _Sides:
    """Training documents, then from `border` on validation documents, as duplicates drop out of both."""

    documents: list[Document]
    border: int
    counts: dict[str, int] = field(default_factory=dict)

    def drop(self, kind: str, repeats: Mapping[int, int]) -> None:
        """Drop the keys of `repeats` (copy -> original) and count them."""
        train = sum(copy < self.border for copy in repeats)
        self.counts |= {
            f"{kind}_train": train,
            f"{kind}_validation": len(repeats) - train,
            f"{kind}_across": sum(original < self.border <= copy for copy, original in repeats.items()),
            f"{kind}_bytes": sum(len(self.documents[copy].text.encode()) for copy in repeats),
        }
        self.documents = [document for i, document in enumerate(self.documents) if i not in repeats]
        self.border -= train


class _Encoder:
    """Encodes documents as they are written, and says how far it is."""

    def __init__(self, tokenizer: Tokenizer, total: int, progress: Progress) -> None:
        self._tokenizer, self._total, self._progress = tokenizer, total, progress
        self._done = 0

    def __call__(self, documents: Sequence[Document]) -> Iterator[EncodedDocument]:
        for start in range(0, len(documents), _ENCODED_TOGETHER):
            group = documents[start : start + _ENCODED_TOGETHER]
            ids = self._tokenizer.encode_batch([document.text for document in group])
            for document, tokens in zip(group, ids, strict=True):
                yield EncodedDocument(tokens, len(document.text.encode()), document.source)
            self._done += len(group)
            self._progress("encoding", self._done, self._total)


def _versions() -> dict[str, str]:
    versions = {
        "openk3": __version__,
        "python": platform.python_version(),
        "unicode": unicodedata.unidata_version,
    }
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
