"""Which chunk belongs to which sequence, found on the device.

Each sequence is cut into chunks of CHUNK tokens from its own start, so that nothing depends on how sequences
are packed. Chunks of all sequences are numbered one after the other. How many there are is known only on the
device; the host knows a bound, T // CHUNK + N, launches that many programs, and those beyond return at once.

Knows nothing of KDA.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

CHUNK = 64


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks of N packed sequences."""

    cu_seqlens: torch.Tensor  # int32 [N + 1]
    first_chunk: torch.Tensor  # int32 [N + 1]: sequence n has chunks first_chunk[n] to first_chunk[n + 1]
    chunk_sequence: torch.Tensor  # int32 [chunks]: the sequence of each chunk, -1 beyond the last
    chunks: int  # the host's bound

    @property
    def sequences(self) -> int:
        return len(self.first_chunk) - 1


@triton.jit(do_not_specialize=["chunks"])
def _plan(cu_seqlens, first_chunk, chunk_sequence, chunks, run, BLOCK: tl.constexpr):
    n = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK], tl.int32)
    for m in range(0, n, BLOCK):
        earlier = m + i < n
        start = tl.load(cu_seqlens + m + i, mask=earlier, other=0)
        end = tl.load(cu_seqlens + m + i + 1, mask=earlier, other=0)
        counts += (end - start + run - 1) // run
    first = tl.sum(counts, 0)
    last = first + (tl.load(cu_seqlens + n + 1) - tl.load(cu_seqlens + n) + run - 1) // run
    tl.store(first_chunk + n, first)
    for c in range(first, last, BLOCK):
        tl.store(chunk_sequence + c + i, n, mask=c + i < last)
    if n == tl.num_programs(0) - 1:
        tl.store(first_chunk + n + 1, last)
        for c in range(last, chunks, BLOCK):
            tl.store(chunk_sequence + c + i, -1, mask=c + i < chunks)


def cut(offsets: torch.Tensor, length: int, run: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences between `offsets` int32 `[N + 1]`, `length` elements in all, cut into runs from their starts.

    Returns the first run of each sequence, `[N + 1]`, and the sequence of each run, -1 beyond the last.
    """
    N = len(offsets) - 1
    runs = length // run + N
    first, sequence = torch.empty_like(offsets), offsets.new_empty(runs)
    _plan[(N,)](offsets, first, sequence, runs, run, BLOCK=256)
    return first, sequence


def plan_chunks(cu_seqlens: torch.Tensor, tokens: int) -> ChunkPlan:
    """The chunks of `tokens` packed tokens; `cu_seqlens` int32 `[N + 1]`, N >= 1, is not read on the host."""
    first_chunk, chunk_sequence = cut(cu_seqlens, tokens, CHUNK)
    return ChunkPlan(cu_seqlens, first_chunk, chunk_sequence, len(chunk_sequence))


@triton.jit(do_not_specialize=["N"])
def _mark(checkpoint_at, cu_seqlens, first_chunk, checkpoint_of_chunk, N, CHUNK: tl.constexpr):
    m = tl.program_id(0)
    end = tl.load(checkpoint_at + m)
    low, high = 0, N  # the sequence with start < end <= stop: the last whose start lies below
    while high - low > 1:
        middle = (low + high) // 2
        below = tl.load(cu_seqlens + middle) < end
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    start, stop = tl.load(cu_seqlens + low), tl.load(cu_seqlens + low + 1)
    tokens = end - start
    fits = (end <= stop) & (tokens > 0) & ((tokens % CHUNK == 0) | (end == stop))
    tl.store(checkpoint_of_chunk + tl.load(first_chunk + low) + (tokens - 1) // CHUNK, m, mask=fits)


def mark_checkpoints(plan: ChunkPlan, checkpoint_at: torch.Tensor) -> torch.Tensor:
    """int32 `[NC]`: which checkpoint is the state after each chunk, or -1.

    `checkpoint_at` int32 `[M]` holds packed end offsets; one that ends no chunk marks nothing.
    """
    marks = torch.full_like(plan.chunk_sequence, -1)
    if M := len(checkpoint_at):
        _mark[(M,)](checkpoint_at, plan.cu_seqlens, plan.first_chunk, marks, plan.sequences, CHUNK=CHUNK)
    return marks
