"""One safetensors file: a header that says where each tensor lies, then their bytes.

Reading trusts nothing: the header is bounded, complete and free of overlaps before a byte of data is
touched. Data is read by `pread` into memory that the caller owns; nothing is mapped, so that what a process
holds is what it allocated. Writing takes one tensor at a time. Knows nothing of models.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from openk3.errors import CheckpointError

Tensor = torch.Tensor

MOST_HEADER_BYTES = 100_000_000
"""Longest header that the format allows."""

MOST_AXES = 32
"""Of a tensor: torch has 64, and the product of a million numbers takes hours."""

DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""The format's names for element types."""


def bytes_of(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor of `shape` in the format's `dtype`."""
    return math.prod(shape) * DTYPES[dtype].itemsize


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies. `offset` counts from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class Header:
    """A file's tensors in the order of their bytes, and the checksum of the header itself."""

    tensors: Mapping[str, StoredTensor]
    crc32: int
    file_bytes: int


def read_header(path: Path) -> Header:
    """The header of the file at `path`, checked against the file's size.

    Raises:
        CheckpointError: not a whole, well-formed safetensors file; names the file and what is wrong.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if len(start) < 8 or not 2 <= length <= min(size - 8, MOST_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: truncated or no safetensors file: {size} bytes, the header claims {length}"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read: {error.strerror or error}") from None
    try:
        tensors = dict(_entries(path, _parse(raw), 8 + length))
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged header: {error}") from None
    end = 8 + length
    for name, stored in tensors.items():
        if stored.offset != end:
            raise CheckpointError(
                f"{path}: damaged header: {name} starts at {stored.offset} instead of {end}"
            )
        end += stored.bytes
    if end != size:
        what = "truncated" if size < end else "longer than its header says"
        raise CheckpointError(f"{path}: {what}: {size} bytes instead of {end}")
    return Header(tensors, zlib.crc32(start + raw), size)


def _parse(raw: bytes) -> dict[str, Any]:
    """The header's table without its free-form metadata.

    Raises:
        ValueError: not JSON, no table, or a name appears twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise ValueError("a name appears twice")
        return table

    try:
        table = json.loads(raw.decode(), object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not raw.startswith(b"{") or not isinstance(table, dict):
        raise ValueError("it is no JSON object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("__metadata__ is no table of texts")
    return table


def _entries(path: Path, table: Mapping[str, Any], start: int) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors in the order of their bytes, each consistent with itself."""
    found = []
    for name, entry in table.items():
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]} if len(entry) == 3:
                pass
            case _:
                raise ValueError(f"{name!r} has not just dtype, shape and data_offsets")
        if not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, end)):
            raise ValueError(f"{name!r} has a shape or an offset that is no count")
        if len(shape) > MOST_AXES:
            raise ValueError(f"{name!r} has {len(shape)} axes, {MOST_AXES} are the most")
        if dtype not in DTYPES:
            raise ValueError(f"{name!r} has the unknown dtype {dtype!r}")
        if bytes_of(dtype, shape) != end - begin:
            raise ValueError(f"{name!r} is {dtype} {shape} and cannot have {end - begin} bytes")
        found.append((begin, end, name, StoredTensor(path, dtype, tuple(shape), start + begin, end - begin)))
    for _, _, name, stored in sorted(found, key=lambda item: item[:2]):
        yield name, stored


class TensorReader:
    """Reads tensors of one or many files; each file is opened once. Safe to call from several threads.

    Args:
        checksums: CRC-32 of tensors by name; what is read of those is compared.
    """

    def __init__(
        self, tensors: Mapping[str, StoredTensor], checksums: Mapping[str, int] | None = None
    ) -> None:
        self._tensors = tensors
        self._checksums = checksums or {}
        self._files: dict[Path, int] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. A later read opens them again."""
        while self._files:
            os.close(self._files.popitem()[1])

    def read(self, name: str) -> Tensor:
        """The tensor called `name`, in memory of its own, as stored."""
        stored = self._tensors[name]
        out = torch.empty(stored.bytes, dtype=torch.uint8)
        self.read_into(name, out)
        return out.view(DTYPES[stored.dtype]).reshape(stored.shape)

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill `out`, contiguous uint8 on the CPU, with the tensor's bytes.

        Raises:
            CheckpointError: the file ends early, cannot be read, or holds other bytes than were written.
        """
        stored = self._tensors[name]
        if out.numel() != stored.bytes:
            raise ValueError(f"{name} has {stored.bytes} bytes, the buffer {out.numel()}")
        self._fill(name, stored, stored.offset, out)
        if name in self._checksums and zlib.crc32(out.numpy().data) != self._checksums[name]:
            raise CheckpointError(
                f"{stored.file}: damaged: {name} is not what was written (its checksum differs; "
                "if another tool changed the shard since, its checksum is stale and can be removed)"
            )

    def read_rows_into(self, name: str, first: int, out: Tensor) -> None:
        """Fill `out` (uint8, whole rows of the first axis) from row `first`; no checksum covers that."""
        stored = self._tensors[name]
        row = stored.bytes // stored.shape[0]
        if out.numel() % row or not 0 <= first * row <= stored.bytes - out.numel():
            raise ValueError(f"{name} has no {out.numel()} bytes of whole rows from row {first}")
        self._fill(name, stored, stored.offset + first * row, out)

    def _fill(self, name: str, stored: StoredTensor, offset: int, out: Tensor) -> None:
        view = out.numpy().data
        done = 0
        try:
            file = self._descriptor(stored.file)
            while done < len(view):
                count = os.preadv(file, [view[done:]], offset + done)
                if count == 0:
                    raise CheckpointError(f"{stored.file}: truncated inside {name}")
                done += count
        except OSError as error:
            raise CheckpointError(f"{stored.file}: cannot read {name}: {error.strerror or error}") from None

    def _descriptor(self, path: Path) -> int:
        file = self._files.get(path)
        if file is None:
            opened = os.open(path, os.O_RDONLY)
            file = self._files.setdefault(path, opened)
            if file != opened:  # another thread was first
                os.close(opened)
        return file


class ShardWriter:
    """Writes one file: the header from what is announced, then each tensor in that order.

    Args:
        tensors: `(name, dtype, shape)` of all, in the order in which they will be written.
    """

    def __init__(self, file: BinaryIO, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> None:
        self._file = file
        self._announced = list(tensors)
        self._next = 0
        self.crc32: dict[str, int] = {}
        """CRC-32 of the tensors written so far, by name."""
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, dtype, shape in self._announced:
            begin, end = end, end + bytes_of(dtype, shape)
            table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        raw = json.dumps(table, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        header = struct.pack("<Q", len(raw)) + raw
        self.header_crc32 = zlib.crc32(header)
        file.write(header)

    def write(self, tensor: Tensor) -> None:
        """Append the next tensor; it must be the announced one."""
        name, dtype, shape = self._announced[self._next]
        if tuple(tensor.shape) != shape or tensor.dtype != DTYPES[dtype]:
            raise ValueError(
                f"{name} was announced as {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        self.crc32[name] = zlib.crc32(data)
        self._file.write(data)
        self._next += 1

    def finish(self) -> None:
        """Check that everything announced was written."""
        if self._next != len(self._announced):
            raise ValueError(f"{len(self._announced) - self._next} announced tensors were not written")
