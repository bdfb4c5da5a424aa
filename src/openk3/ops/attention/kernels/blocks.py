"""Which program takes which block of rows: a table made on the device, so that no offset is read on the host.

A block is a few dozen neighbouring rows of one sequence. The later a block, the more keys its queries see and
the longer its program takes. All blocks of the highest index come first, whatever their sequence, so that
the last programs to run are short ones.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"

from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor


@triton.jit(do_not_specialize=["slots", "N"])
def _order(cu_seqlens, table, slots, N, ROWS: tl.constexpr, BLOCKS: tl.constexpr, SEQUENCES: tl.constexpr):
    """A program per sequence finds the slot of each of its blocks; the last program marks slots without one.

    Before block j of sequence n come all blocks of a higher index, and block j of sequences before n.
    """
    n = tl.program_id(0)
    other = tl.arange(0, SEQUENCES)
    if n < N:
        own = tl.cdiv(tl.load(cu_seqlens + n + 1) - tl.load(cu_seqlens + n), ROWS).to(tl.int32)
        for first in range(0, own, BLOCKS):
            j = first + tl.arange(0, BLOCKS)
            slot = tl.zeros([BLOCKS], tl.int32)
            for start in range(0, N, SEQUENCES):
                s = start + other
                ends = tl.load(cu_seqlens + s + 1, mask=s < N, other=0)
                blocks = tl.cdiv(ends - tl.load(cu_seqlens + s, mask=s < N, other=0), ROWS).to(tl.int32)
                higher = tl.maximum(blocks[:, None] - j[None, :] - 1, 0)
                level = (blocks[:, None] > j[None, :]) & (s[:, None] < n)
                slot += tl.sum(higher + level.to(tl.int32), 0)
            tl.store(table + 2 * slot, n, mask=j < own)
            tl.store(table + 2 * slot + 1, j, mask=j < own)
    else:
        total = 0
        for start in range(0, N, SEQUENCES):
            s = start + other
            ends = tl.load(cu_seqlens + s + 1, mask=s < N, other=0)
            blocks = tl.cdiv(ends - tl.load(cu_seqlens + s, mask=s < N, other=0), ROWS).to(tl.int32)
            total += tl.sum(blocks, 0)
        for start in range(total, slots, SEQUENCES):
            tl.store(table + 2 * (start + other), -1, mask=start + other < slots)


def order_blocks(cu_seqlens: Tensor, tokens: int, rows: int) -> Tensor:
    """int32 `[slots, 2]`: sequence and block of each slot, longest first; -1 for a slot without a block.

    Slots are as many as `tokens` rows in `len(cu_seqlens) - 1` sequences could need.
    """
    N = len(cu_seqlens) - 1
    table = torch.empty(tokens // rows + N, 2, dtype=torch.int32, device=cu_seqlens.device)
    if len(table):
        _order[(N + 1,)](cu_seqlens, table, len(table), N, ROWS=rows, BLOCKS=16, SEQUENCES=128, num_warps=4)
    return table


@triton.jit
def place(table, slot, cu_seqlens_q, cu_seqlens_k):
    """Of a slot with a block: the block's index, then first token and length of its queries and its keys."""
    n, block = tl.load(table + 2 * slot), tl.load(table + 2 * slot + 1)
    first_q, first_k = tl.load(cu_seqlens_q + n).to(tl.int64), tl.load(cu_seqlens_k + n).to(tl.int64)
    n_q = (tl.load(cu_seqlens_q + n + 1) - first_q).to(tl.int32)
    n_k = (tl.load(cu_seqlens_k + n + 1) - first_k).to(tl.int32)
    return block, first_q, n_q, first_k, n_k
