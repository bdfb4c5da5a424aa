"""The list of what a checkpoint consists of: each file's size and SHA-256.

It is written last, so that a folder with a manifest was complete once, and read first, so that a copy that
lost a file, a truncated shard or a flipped bit is named before anything is loaded from it. It guards against
accidents, not against people: whoever can change a shard can change the manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from openk3.checkpoint.atomic import atomic_write_json
from openk3.errors import CheckpointError

MANIFEST = "manifest.json"
# Raised when an older openk3 could misread what a newer one writes.
FORMAT = 1


class FileDigest(NamedTuple):
    bytes: int
    sha256: str


def digest_files(folder: Path, names: Iterable[str]) -> dict[str, FileDigest]:
    """Size and SHA-256 of the files `names` of `folder`."""
    return {name: FileDigest((folder / name).stat().st_size, _sha256(folder / name)) for name in names}


def write_manifest(folder: Path, files: Mapping[str, FileDigest], *, writer: str) -> None:
    """Close a checkpoint of `files`, written by openk3 version `writer`."""
    listing = {name: digest._asdict() for name, digest in sorted(files.items())}
    atomic_write_json(folder / MANIFEST, {"format": FORMAT, "openk3": writer, "files": listing})


def check_manifest(folder: Path, *, contents: bool) -> None:
    """Compare `folder` with its manifest: presence and sizes, and with `contents` every byte.

    Raises:
        CheckpointError: the folder is incomplete, damaged, or of a newer format; names every bad file.
    """
    if bad := [*_problems(folder, _read_manifest(folder), contents=contents)]:
        raise CheckpointError(f"{folder}: damaged or incomplete: {'; '.join(bad)}")


def _problems(folder: Path, files: Mapping[str, FileDigest], *, contents: bool) -> Iterator[str]:
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif (size := path.stat().st_size) != digest.bytes:
            yield f"{name} has {size} bytes instead of {digest.bytes}"
        elif contents and _sha256(path) != digest.sha256:
            yield f"{name} is not what was written (its SHA-256 differs)"


def _read_manifest(folder: Path) -> dict[str, FileDigest]:
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder}: damaged or incomplete: {MANIFEST} is missing")
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{folder}: has format {manifest['format']!r}, written by openk3 {manifest.get('openk3')}; "
                f"this version reads format {FORMAT}: update openk3"
            )
        return {name: FileDigest(**digest) for name, digest in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder}: damaged or incomplete: {MANIFEST} is not readable") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
