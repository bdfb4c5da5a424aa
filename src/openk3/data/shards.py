"""Token shards: a prepared corpus as memory-mapped uint32 files with a manifest.

A prepared folder holds, for each split (`train`, `validation`):

    SPLIT-00000.tokens   uint32, little-endian: whole documents back to back, each ending in [EOS]
    SPLIT.documents.npy  int64 [n, 2]: tokens (with [EOS]) and UTF-8 bytes (without) of each document
    SPLIT.sources.jsonl  the source of each document, one JSON string a line

and `tiktoken.model` and `manifest.json` for all. The folder appears whole or not at all. What it was made
from is recorded here, not interpreted.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from openk3.chat import Tokenizer
from openk3.chat.tokenizer import FILE_NAME
from openk3.checkpoint.atomic import atomic_folder, atomic_write_json, make_folder
from openk3.checkpoint.manifest import digest_files
from openk3.config import StrictModel, parse
from openk3.data.corpus import SourceReport
from openk3.data.recipe import Recipe
from openk3.errors import InvalidInput

MANIFEST = "manifest.json"
SHARD_TOKENS = 2**26  # 256 MiB a file
_TOKEN = np.dtype("<u4")

SplitName = Literal["train", "validation"]
SPLITS: tuple[SplitName, ...] = ("train", "validation")


class EncodedDocument(NamedTuple):
    """A document ready to be written: ids without [EOS], UTF-8 bytes of its text, and where it came from."""

    ids: list[int]
    bytes: int
    source: str


class FileRecord(StrictModel):
    """What a file of the folder must be."""

    bytes: int
    sha256: str


class SplitRecord(StrictModel):
    """Totals of one split."""

    documents: int = Field(ge=1)
    tokens: int = Field(ge=1)
    bytes: int = Field(ge=0)  # of UTF-8 text
    shards: tuple[str, ...]


class Provenance(StrictModel):
    """What a prepared corpus was made from, and by what."""

    recipe: Recipe
    corpus_sha256: str
    sources: dict[str, SourceReport]
    cleaning: dict[str, int]
    deduplication: dict[str, int]
    versions: dict[str, str]


class Manifest(StrictModel):
    """The content of `manifest.json`. The same corpus, recipe and versions give the same bytes."""

    format: Literal[1]
    provenance: Provenance
    vocab_size: int
    eos_id: int
    tokenizer_sha256: str
    splits: dict[SplitName, SplitRecord]
    files: dict[str, FileRecord]

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        for name in SPLITS:
            if name not in self.splits:
                raise ValueError(f"splits has no {name}")
            if missing := {*self.splits[name].shards, *_tables(name), FILE_NAME} - self.files.keys():
                raise ValueError(f"files lacks {', '.join(sorted(missing))}")
        if wrong := [name for name in self.files if Path(name).name != name]:
            raise ValueError(f"files names {wrong[0]!r}, which does not lie in this folder")
        return self

    @property
    def content_sha256(self) -> str:
        """Hash of what training reads: the same wherever the folder lies and whatever it is called."""
        hashes = json.dumps({name: record.sha256 for name, record in sorted(self.files.items())})
        return hashlib.sha256(hashes.encode()).hexdigest()


def _tables(split: str) -> tuple[str, str]:
    """The files of a split beside its tokens."""
    return f"{split}.documents.npy", f"{split}.sources.jsonl"


def write_dataset(
    folder: str | Path,
    tokenizer: Tokenizer,
    splits: Mapping[SplitName, Iterable[EncodedDocument]],
    provenance: Provenance,
    *,
    shard_tokens: int = SHARD_TOKENS,
) -> Manifest:
    """Write a prepared corpus under a free name.

    Args:
        shard_tokens: a token file is closed before it would exceed this; a longer document has its own.

    Raises:
        InvalidInput: a split has no documents.
        StorageError: `folder` exists, or a write failed; nothing is left behind.
    """
    folder = Path(folder)
    make_folder(folder.parent)
    with atomic_folder(folder) as building:
        tokenizer.save(building / FILE_NAME)
        records = {
            name: _write_split(building, name, splits[name], tokenizer.eos_id, shard_tokens)
            for name in SPLITS
        }
        names = sorted(path.name for path in building.iterdir())
        manifest = Manifest(
            format=1,
            provenance=provenance,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            tokenizer_sha256=tokenizer.sha256,
            splits=records,
            files={
                name: FileRecord(**digest._asdict()) for name, digest in digest_files(building, names).items()
            },
        )
        atomic_write_json(building / MANIFEST, manifest.model_dump(mode="json"))
    return manifest


def _write_split(
    folder: Path, name: str, documents: Iterable[EncodedDocument], eos: int, shard_tokens: int
) -> SplitRecord:
    lengths: list[tuple[int, int]] = []
    shards: list[str] = []
    with (folder / f"{name}.sources.jsonl").open("w", encoding="utf-8") as sources:
        for number, shard in itertools.groupby(_numbered(documents, shard_tokens), itemgetter(0)):
            shards.append(f"{name}-{number:05d}.tokens")
            with (folder / shards[-1]).open("wb") as file:
                for _, document in shard:
                    np.array([*document.ids, eos], _TOKEN).tofile(file)
                    lengths.append((len(document.ids) + 1, document.bytes))
                    sources.write(json.dumps(document.source) + "\n")
    if not lengths:
        raise InvalidInput(f"{folder.name}: the {name} split has no documents")
    table = np.array(lengths, np.int64)
    np.save(folder / f"{name}.documents.npy", table)
    tokens, size = table.sum(axis=0).tolist()
    return SplitRecord(documents=len(lengths), tokens=tokens, bytes=size, shards=tuple(shards))


def _numbered(
    documents: Iterable[EncodedDocument], shard_tokens: int
) -> Iterator[tuple[int, EncodedDocument]]:
    """Each document with the number of the shard it goes to."""
    shard = held = 0
    for document in documents:
        size = len(document.ids) + 1
        if held and held + size > shard_tokens:
            shard, held = shard + 1, 0
        held += size
        yield shard, document


class TokenSplit:
    """One split of a prepared corpus; nothing is read until a document is asked for.

    Attributes:
        lengths: int64 `[n]`, tokens of each document, the closing [EOS] included.
        byte_counts: int64 `[n]`, UTF-8 bytes of each document's text.
    """

    def __init__(self, folder: Path, name: str, record: SplitRecord, vocab_size: int) -> None:
        self.folder, self.name = folder, name
        try:
            with (folder / f"{name}.documents.npy").open("rb") as file:
                table: NDArray[np.int64] = np.lib.format.read_array(file, allow_pickle=False)
            self._shards = [np.memmap(folder / shard, _TOKEN, mode="r") for shard in record.shards]
        except ValueError as error:
            raise InvalidInput(f"{folder}: a file of the {name} split is damaged: {error}") from error
        _check_table(table, record, sum(map(len, self._shards)), f"{folder}: the {name} split")
        self.lengths, self.byte_counts = table[:, 0], table[:, 1]
        self.n_tokens, self.n_bytes = record.tokens, record.bytes
        self._vocab_size = vocab_size
        shard_ends = np.cumsum([len(shard) for shard in self._shards])
        starts = np.cumsum(self.lengths) - self.lengths
        # Documents fill the shards in order, so a document's shard is the first that ends behind its start.
        self._shard_of = np.searchsorted(shard_ends, starts, side="right")
        self._offsets = starts - np.concatenate([[0], shard_ends])[self._shard_of]

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, document: int) -> NDArray[np.uint32]:
        """Ids of a document with its [EOS]: a view of the mapped file, uint32 `[lengths[document]]`.

        Raises:
            InvalidInput: one of them is outside the vocabulary, so the file is damaged.
        """
        start = self._offsets[document]
        number = self._shard_of[document]
        shard: NDArray[np.uint32] = self._shards[number]
        ids = shard[start : start + self.lengths[document]]
        if (largest := int(ids.max())) >= self._vocab_size:
            raise InvalidInput(
                f"{self.folder}: shard {number} of the {self.name} split is damaged: document {document} "
                f"holds token {largest}, the vocabulary has {self._vocab_size}; prepare the corpus again"
            )
        return ids

    def sources(self) -> list[str]:
        """Where each document came from."""
        lines = (self.folder / f"{self.name}.sources.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]


@dataclass(frozen=True)
class TokenDataset:
    """A prepared corpus, opened."""

    folder: Path
    manifest: Manifest
    train: TokenSplit
    validation: TokenSplit

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""
        return Tokenizer.load(self.folder)

    def text(self, split: SplitName, document: int) -> bytes:
        """The text of a document, exactly as it was after cleaning, in UTF-8."""
        tokens = getattr(self, split).tokens(document)
        return self.tokenizer.decode_bytes(tokens[:-1].tolist())

    def validation_bytes(self) -> bytes:
        """All validation texts back to back: the held-out bytes that compressors are compared on."""
        return b"".join(self.text("validation", i) for i in range(len(self.validation)))


def open_dataset(folder: str | Path, *, vocab_size: int | None = None, verify: bool = False) -> TokenDataset:
    """Open a prepared corpus.

    Args:
        vocab_size: of the model that will read it; a different one is refused.
        verify: also compare the hashes of the token files with the manifest; the small ones always are.

    Raises:
        InvalidInput: no prepared corpus here, a file of it is missing, damaged or of another size, or its
            vocabulary is not the model's.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    if vocab_size is not None and vocab_size != manifest.vocab_size:
        raise InvalidInput(
            f"{folder}: prepared for a vocabulary of {manifest.vocab_size}, the model has {vocab_size}; "
            "prepare the corpus with the model's tokenizer, or set the model's vocab_size"
        )
    for name, record in manifest.files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != record.bytes:
            found = "is missing" if size is None else f"has {size} bytes, the manifest says {record.bytes}"
            raise InvalidInput(f"{path}: {found}; prepare the corpus again")
    small = {file for name in SPLITS for file in _tables(name)} | {FILE_NAME}
    for name, digest in digest_files(folder, manifest.files if verify else small).items():
        if digest.sha256 != manifest.files[name].sha256:
            raise InvalidInput(f"{folder / name}: is not what was written (sha256); prepare the corpus again")
    train, validation = (
        TokenSplit(folder, name, manifest.splits[name], manifest.vocab_size) for name in SPLITS
    )
    return TokenDataset(folder, manifest, train, validation)


def _check_table(table: NDArray[np.int64], record: SplitRecord, stored_tokens: int, where: str) -> None:
    """Whether the table of documents, the manifest's totals and the token files agree."""
    if table.dtype != np.int64 or table.shape != (record.documents, 2) or (table < [1, 0]).any():
        raise InvalidInput(
            f"{where}: its table of documents is {table.dtype} {list(table.shape)}, not one of "
            f"{record.documents} documents with at least a token each; prepare the corpus again"
        )
    totals = (*table.sum(axis=0).tolist(), stored_tokens)
    if totals != (record.tokens, record.bytes, record.tokens):
        raise InvalidInput(
            f"{where}: documents of {totals[0]} tokens and {totals[1]} bytes and shards of {stored_tokens} "
            f"tokens, the manifest says {record.tokens} tokens and {record.bytes} bytes; prepare the corpus "
            "again"
        )


def _read_manifest(folder: Path) -> Manifest:
    file = folder / MANIFEST
    if not file.is_file():
        raise InvalidInput(
            f"{folder}: no prepared corpus here; `openk3 data prepare RECIPE --out {folder}` makes one"
        )
    try:
        values: Any = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidInput(f"{file}: expected a JSON object")
    return parse(Manifest, values, str(file))
