"""Append-only logs of one JSON object per line, such as `metrics.jsonl`.

A run that is killed at step 57 and resumed from its checkpoint of step 50 has logged steps 51 to 57 once and
would log them again: opening the log at step 50 takes them out first, so that each step is there exactly
once. For that a row must be in the file before the checkpoint of its step is published: append everything
about a step, `sync`, then save. The module knows of a row only that it has a `step`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from openk3.checkpoint.atomic import atomic_write_bytes, storage_errors, sync_folder
from openk3.errors import CheckpointError, InvalidInput


class JsonlLog:
    """The log of one run, open for appending; close it or use it as a context manager.

    Args:
        path: the file, created when missing in a folder that exists.
        step: the step that the run starts from: rows of later steps are removed, and so is a half-written
            last line. What stays keeps its bytes. A new run starts from 0.

    Raises:
        CheckpointError: a finished line is not a JSON object with an integer `step`.
        StorageError: the system refused a write.
    """

    def __init__(self, path: str | Path, step: int) -> None:
        self.path = Path(path)
        with storage_errors(self.path):
            if self.path.exists():
                old = self.path.read_bytes()
                kept = b"".join(line for line, row in _rows(self.path, old) if row["step"] <= step)
                if kept != old:
                    atomic_write_bytes(self.path, kept)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            sync_folder(self.path.parent)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row, which outlives this process from here on (a power cut only after `sync`).

        JSON has no NaN and no infinity: such numbers are written as null.

        Raises:
            InvalidInput: the row has no integer `step`, or holds what JSON cannot.
            StorageError: the disk is full; the rows before it are untouched and whole.
        """
        if type(row.get("step")) is not int:
            raise InvalidInput(f"{self.path}: a row needs an integer 'step', got {row.get('step')!r}")
        try:
            line = json.dumps(_finite(row), allow_nan=False).encode() + b"\n"
        except TypeError as error:
            raise InvalidInput(f"{self.path}: step {row['step']}: {error}") from error
        with storage_errors(self.path):
            end = os.fstat(self._file).st_size
            try:
                while line:  # a full disk takes a part of the line before it refuses
                    line = line[os.write(self._file, line) :]
            except OSError:
                os.ftruncate(self._file, end)
                raise

    def sync(self) -> None:
        """Make every row durable; call it before the checkpoint that counts on them."""
        with storage_errors(self.path):
            os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a log, also of one that is being written: a half-written last line is not a row yet.

    Raises:
        CheckpointError: a finished line is not a JSON object with an integer `step`.
    """
    path = Path(path)
    with storage_errors(path, "read"):
        return [row for _, row in _rows(path, path.read_bytes())]


def _rows(path: Path, data: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each row beside the bytes of its line, line end included."""
    *finished, rest = data.split(b"\n")
    for number, line in enumerate(finished, start=1):
        row = _row(line)
        if row is None:
            raise CheckpointError(f"{path}: line {number} is not a JSON object with an integer 'step'")
        yield line + b"\n", row
    if (row := _row(rest)) is not None:  # whole, only its line end was lost
        yield rest + b"\n", row


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
