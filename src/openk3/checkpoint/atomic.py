"""Files and folders that appear whole or not at all, whatever kills the writer.

Every write goes beside its target, is synced, and only then takes the target's name by one rename, which a
POSIX file system does at once: a reader sees the old content or the new, never a mixture. The order matters:

1. contents are synced before the rename, or a power cut could leave the new name on an empty file;
2. the folder that holds the name is synced after it, or a power cut could take the name back after the caller
   was told that the write is done.

A failed write removes what it built and raises `StorageError`; a killed one leaves `NAME.partial-*` behind,
which nobody reads and `remove_partials` clears away. This module knows nothing about what is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openk3.errors import StorageError

_PARTIAL = ".partial-"


@contextlib.contextmanager
def storage_errors(path: Path, action: str = "write") -> Iterator[None]:
    """Raise an `OSError` of the block as a `StorageError` that names `path` and the system's reason."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{path}: cannot {action}: {error.strerror or error}") from error


def atomic_write_bytes(path: str | Path, data: bytes) -> None:
    """Make `path` hold exactly `data`, durably; its folder must exist.

    Raises:
        StorageError: nothing was written and the old content is still there.
    """
    path = Path(path)
    partial = _beside(path)
    with storage_errors(path):
        try:
            with partial.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            with contextlib.suppress(OSError):  # gone after the rename; never hides the first error
                partial.unlink()
        sync_folder(path.parent)


def atomic_write_text(path: str | Path, text: str) -> None:
    """`atomic_write_bytes` of `text` in UTF-8, line ends as they are."""
    atomic_write_bytes(path, text.encode())


def atomic_write_json(path: str | Path, value: Any) -> None:
    """`atomic_write_text` of `value` as indented JSON."""
    atomic_write_text(path, json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Build a folder: yields an empty one beside `path`, which takes that name, durably, when the block ends.

    If the block raises, everything built is removed and `path` is untouched. `path` must not exist: a folder
    that holds something cannot be replaced in one step.

    Raises:
        StorageError: `path` exists, or the system refused a write (an `OSError` of the block included).
    """
    path = Path(path)
    partial = _beside(path)
    with storage_errors(path):
        if os.path.lexists(path):
            raise StorageError(f"{path}: exists already; a folder is only built under a free name")
        try:
            partial.mkdir()
            yield partial
            _sync_tree(partial)
            os.rename(partial, path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # gone after the rename
        sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder so that its name disappears at once: no reader ever finds it half empty."""
    with storage_errors(path):
        doomed = _beside(path)
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)  # what stays is a leftover like any other


def remove_partials(folder: Path) -> None:
    """Clear away what killed writers left in `folder`. Only its one writer may call this, between writes."""
    with storage_errors(folder):
        for entry in os.scandir(folder):
            if _PARTIAL in entry.name:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    os.unlink(entry)


def make_folder(path: str | Path) -> Path:
    """Create a folder and its parents where they are missing, durably.

    Raises:
        StorageError: something that is not a folder is in the way, or the system refused.
    """
    path = Path(path)
    with storage_errors(path):
        missing = [p for p in (path, *path.parents) if not p.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            file = next(p for p in (path, *path.parents) if os.path.lexists(p) and not p.is_dir())
            what = "a file" if file.exists() else "a link that leads nowhere"
            raise StorageError(f"{file}: is {what} where a folder is needed") from error
        for created in reversed(missing):
            sync_folder(created.parent)
    return path


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    """Contents first, then the names that lead to them, from the leaves up."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            with open(os.path.join(parent, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(parent))


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}{_PARTIAL}{uuid.uuid4().hex[:12]}")
