"""Both ends of the model: rows of the embedding, read one by one, and the head, in memory or block by block.

The head is multiplied in the same blocks of rows wherever they come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future

import torch
from torch.nn import functional as F

from openk3.checkpoint.official.shard import DTYPES, StoredTensor, TensorReader
from openk3.checkpoint.streamed.memory import ALIGNMENT, allocate
from openk3.checkpoint.streamed.usage import Usage
from openk3.ops.precision import wide

Tensor = torch.Tensor

BLOCK_BYTES = 4 << 20
"""Of the head, what is read and multiplied at once."""


def embedding_rows(
    name: str, stored: StoredTensor, tokens: Tensor, reader: TensorReader, usage: Usage
) -> Tensor:
    """`[T, d]` as stored, for token ids `[T]`: each distinct row is read once."""
    distinct, places = torch.unique(tokens, return_inverse=True)
    rows = torch.empty(len(distinct), stored.shape[1], dtype=DTYPES[stored.dtype])
    raw = rows.view(torch.uint8)
    for row, token in enumerate(distinct.tolist()):
        reader.read_rows_into(name, token, raw[row])
    usage.current.bytes += raw.numel()
    return rows[places]


class Head:
    """Logits by the stored matrix `[V, d]`.

    Attributes:
        bytes: of all of it; `block_bytes`: of a block.
    """

    def __init__(
        self, name: str, stored: StoredTensor, reader: TensorReader, ahead: Executor, usage: Usage
    ) -> None:
        self._name = name
        self._stored = stored
        self._reader = reader
        self._ahead = ahead
        self._usage = usage
        row = stored.bytes // stored.shape[0]
        # Whole cache lines a block, so that blocks of the whole head are aligned as those read alone are.
        self._rows = max(ALIGNMENT, BLOCK_BYTES // row // ALIGNMENT * ALIGNMENT)
        self.bytes = stored.bytes
        self.block_bytes = min(stored.bytes, self._rows * row)
        self._whole: Tensor | None = None
        self._buffers: tuple[Tensor, Tensor] | None = None

    def hold(self, pinned: bool) -> None:
        """Read it whole now and keep it, or keep two blocks' room."""
        if pinned:
            self._whole = allocate(self.bytes)
            self._usage.current.bytes += self.bytes
            self._reader.read_into(self._name, self._whole)
        else:
            self._buffers = allocate(self.block_bytes), allocate(self.block_bytes)

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden` `[M, d]` to `[M, V]` in at least fp32."""
        blocks = self._pinned_blocks() if self._whole is not None else self._read_blocks()
        products = [F.linear(hidden, self._weights(raw).to(hidden.dtype)) for raw in blocks]
        return torch.cat(products, dim=1).to(wide(hidden.dtype))

    def _pinned_blocks(self) -> Iterable[Tensor]:
        assert self._whole is not None
        return torch.split(self._whole, self.block_bytes)

    def _read_blocks(self) -> Iterator[Tensor]:
        """Each block, valid until the next, which is read meanwhile."""
        assert self._buffers is not None
        total = self._stored.shape[0]
        reading = self._read(0)
        for index in range(-(-total // self._rows)):
            raw = reading.result()
            if (index + 1) * self._rows < total:
                reading = self._read(index + 1)
            yield raw

    def _read(self, index: int) -> Future[Tensor]:
        assert self._buffers is not None
        first = index * self._rows
        count = min(self._rows, self._stored.shape[0] - first) * (self.bytes // self._stored.shape[0])
        raw = self._buffers[index % 2][:count]
        self._usage.current.bytes += count

        def read() -> Tensor:
            self._reader.read_rows_into(self._name, first, raw)
            return raw

        return self._ahead.submit(read)

    def _weights(self, raw: Tensor) -> Tensor:
        return raw.view(DTYPES[self._stored.dtype]).view(-1, self._stored.shape[1])
