"""Packed tokens laid out as chunks that a scan can walk (report §2.1.1, the chunkwise parallel form).

Each sequence is cut into chunks from its own start, so no chunk holds two sequences and no result depends on
the neighbours in the batch. A tile is one chunk of one head. Work inside tiles is batched over tiles; the
recurrence between chunks is batched over sequences: step j advances every sequence that has a chunk j. To
make that a slice, sequences take lanes from the one with most chunks to the one with fewest, and tiles are
ordered step by step:

    lengths 5, 2, 9 in chunks of 4     step 0 | sequence 2 | sequence 0 | sequence 1
                                       step 1 | sequence 2 | sequence 0
                                       step 2 | sequence 2

Tiles are handled in this order, one slab of them after the other. A slab fits the cache, so that the many
passes over it do not go to memory, and no pass needs a temporary of the whole batch.

Knows nothing of KDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

Steps = tuple[tuple[slice, slice], ...]


@dataclass(frozen=True)
class Slab:
    """A run of B tiles of R rows, R a power of two. Rows beyond a chunk's tokens are zero."""

    steps: Steps  # of the scan: (tiles within the slab, rows of the lane state)
    rows: int
    token: torch.Tensor  # int64 [B * R]: the row of the packed `[T * H, F]` that a tile row holds
    padding: torch.Tensor  # int64: the tile rows that hold none; `token` means nothing there
    filled: torch.Tensor  # int64: the others

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """`[T * H, F]` to `[B, R, F]`, a copy."""
        tiles = x.index_select(0, self.token).index_fill_(0, self.padding, 0)
        return tiles.view(-1, self.rows, x.shape[1])

    def scatter(self, tiles: torch.Tensor, out: torch.Tensor) -> None:
        """`[B, R, F]` to this slab's rows of `out` `[T * H, F]`, rounded to its dtype."""
        rows = tiles.reshape(-1, out.shape[1]).index_select(0, self.filled)
        out.index_copy_(0, self.token[self.filled], rows.to(out.dtype))


@dataclass(frozen=True)
class ChunkLayout:
    """Where everything goes: the slabs in the order of the scan, and the lanes."""

    heads: int
    slabs: tuple[Slab, ...]
    lane: torch.Tensor  # int64 [N]: of each sequence
    sequence: torch.Tensor  # int64 [N]: in each lane

    @classmethod
    def build(
        cls, bounds: list[int], chunk_size: int, heads: int, slab_rows: int, device: torch.device
    ) -> ChunkLayout:
        """For the sequences between `bounds`, N + 1 offsets from 0 to T, in slabs of `slab_rows` rows."""
        starts = torch.tensor(bounds)
        lengths = starts.diff()
        chunk_size = min(chunk_size, max([1, *lengths.tolist()]))  # no rows that no sequence would fill
        rows = 1 << (chunk_size - 1).bit_length()
        chunks = (lengths + chunk_size - 1) // chunk_size
        sequence = torch.argsort(chunks, descending=True, stable=True)
        lane = torch.argsort(sequence)
        active = len(lengths) - torch.bincount(chunks).cumsum(0)[:-1]  # sequences that have a chunk j
        edges = [0, *accumulate((active * heads).tolist())]  # step j owns tiles [edges[j], edges[j + 1])

        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        step, row = _divmod(torch.arange(bounds[-1]) - starts[owner], chunk_size)
        tile = (torch.tensor(edges)[step] + lane[owner] * heads)[:, None] + torch.arange(heads)
        token = torch.full((edges[-1] * rows,), -1)
        token[(tile * rows + row[:, None]).flatten()] = torch.arange(bounds[-1] * heads)

        size = max(1, slab_rows // rows)
        slabs = []
        for n, steps in enumerate(_split(edges, size)):
            held = token[n * size * rows : (n + 1) * size * rows]
            slabs.append(
                Slab(
                    steps=steps,
                    rows=rows,
                    token=held.clamp(min=0).to(device),
                    padding=(held < 0).nonzero().flatten().to(device),
                    filled=(held >= 0).nonzero().flatten().to(device),
                )
            )
        return cls(heads, tuple(slabs), lane.to(device), sequence.to(device))

    def to_lanes(self, state: torch.Tensor) -> torch.Tensor:
        """`[N, H, V, K]` by sequence to `[N * H, V, K]` by lane: a copy, which a scan may overwrite."""
        return state.index_select(0, self.sequence).flatten(0, 1)

    def to_sequences(self, state: torch.Tensor) -> torch.Tensor:
        """`[N * H, V, K]` by lane to `[N, H, V, K]` by sequence."""
        return state.view(len(self.lane), self.heads, *state.shape[1:]).index_select(0, self.lane)


def _split(edges: list[int], size: int) -> list[Steps]:
    """The steps, or parts of steps, in each run of `size` tiles."""
    runs: list[list[tuple[slice, slice]]] = [[] for _ in range(0, edges[-1], size)]
    for first, end in pairwise(edges):
        for n in range(first // size, -(-end // size)):
            low, high = max(first, n * size), min(end, (n + 1) * size)
            runs[n].append((slice(low - n * size, high - n * size), slice(low - first, high - first)))
    return [tuple(run) for run in runs]


def _divmod(x: torch.Tensor, y: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x // y, x % y
