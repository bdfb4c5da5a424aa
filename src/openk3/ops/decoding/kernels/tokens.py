"""The most likely token of each row: parts of a row first, by many programs, then their best."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from openk3.ops.kernel_operator import kernel_operator

Tensor = torch.Tensor

PIECE = 8192  # numbers of a row that a program looks at


@triton.jit
def _rising(value):
    """Whole numbers in the order of value, NaN above all."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.where(value != value, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def _largest_of_piece(logits, keys, indices, V, pieces, PIECE: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    value = tl.load(logits + n * V + i, mask=i < V, other=float("-inf")).to(tl.float32)
    key = _rising(value)
    best = tl.max(key, 0)
    place = n * pieces + tl.program_id(1)
    tl.store(keys + place, best)
    tl.store(indices + place, tl.min(tl.where((key == best) & (i < V), i, 0x7FFFFFFF), 0))


@triton.jit
def _largest_of_row(keys, indices, tokens, pieces, PIECES: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, PIECES)
    key = tl.load(keys + n * pieces + p, mask=p < pieces, other=-(2**31))
    index = tl.load(indices + n * pieces + p, mask=p < pieces, other=0x7FFFFFFF)
    best = tl.max(key, 0)
    first = tl.min(tl.where(key == best, index, 0x7FFFFFFF), 0)
    finite = (best < 0x7F800000) & (best > -0x7F800001)
    tl.store(tokens + n, tl.where(finite, first, -1).to(tl.int64))


@kernel_operator("openk3::most_likely")
def most_likely(logits: Tensor) -> Tensor:
    """See `openk3.ops.decoding.most_likely`."""
    n, V = logits.shape
    logits = logits.contiguous()
    pieces = triton.cdiv(V, PIECE)
    keys, indices = (torch.empty(n, pieces, dtype=torch.int32, device=logits.device) for _ in range(2))
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n:
        _largest_of_piece[(n, pieces)](logits, keys, indices, V, pieces, PIECE=PIECE, num_warps=8)
        PIECES = triton.next_power_of_2(pieces)
        _largest_of_row[(n,)](keys, indices, tokens, pieces, PIECES=PIECES, num_warps=1)
    return tokens


@most_likely.register_fake
def _(logits):
    return torch.empty(len(logits), dtype=torch.int64, device=logits.device)
