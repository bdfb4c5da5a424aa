"""Where tensors lie in a buffer that we own, and how they get there.

Buffers are plain allocations that files are read into; nothing is mapped, so that what is held is what was
allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from openk3.checkpoint.official.shard import DTYPES, TensorReader, bytes_of

Tensor = torch.Tensor

ALIGNMENT = 64
"""Bytes. A matrix product may sum in another order when an operand starts elsewhere in a cache line."""


def aligned(count: int) -> int:
    """`count` bytes up to the next aligned place."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def allocate(count: int) -> Tensor:
    """`count` bytes, aligned. Untouched pages of it cost nothing yet."""
    buffer = torch.empty(count, dtype=torch.uint8)
    assert buffer.data_ptr() % ALIGNMENT == 0  # torch promises as much on a CPU
    return buffer


@dataclass(frozen=True)
class Piece:
    """One tensor's place. `dtype` is a safetensors name."""

    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return bytes_of(self.dtype, self.shape)

    def raw(self, buffer: Tensor) -> Tensor:
        """Its bytes in `buffer` `[..., bytes]`."""
        return buffer[..., self.offset : self.offset + self.bytes]

    def tensor(self, buffer: Tensor) -> Tensor:
        """It, as a view of `buffer`; of each buffer of a stack, `[..., *shape]`, when there are several."""
        return self.raw(buffer).view(DTYPES[self.dtype]).view(*buffer.shape[:-1], *self.shape)


class Layout:
    """Tensors one behind the other, each from an aligned place on.

    Attributes:
        pieces: by name.
        bytes: of a buffer that holds them all.
        stored: bytes of the tensors alone, what reading them reads.
    """

    def __init__(self, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> None:
        """`tensors`: name, safetensors dtype and shape of each."""
        pieces: dict[str, Piece] = {}
        end = 0
        for name, dtype, shape in tensors:
            pieces[name] = Piece(end, dtype, shape)
            end += aligned(pieces[name].bytes)
        self.pieces: Mapping[str, Piece] = pieces
        self.bytes = end
        self.stored = sum(piece.bytes for piece in pieces.values())

    def read(self, reader: TensorReader, buffer: Tensor, prefix: str = "") -> None:
        """Fill `buffer` with every tensor, called `prefix` + its name in the files.

        Raises:
            CheckpointError: a file ends early, cannot be read, or is damaged.
        """
        for name, piece in self.pieces.items():
            reader.read_into(prefix + name, piece.raw(buffer))
