"""Paged MLA decoding on any card: a kernel for the parts of sequences, one that mixes them, one that appends.

A program takes one part, `SPLIT` tokens from a multiple of it on, of one sequence for up to ROWS queries, a
query being a head of one token of the window. It reads each latent once, for logits and for the mix. Where
parts begin and the order within them depend on positions alone, and so what a query gets.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["max_length", "queries", "W", "H", "SPLIT"])
def attend_part(
    q_latent,  # [N W, H, R]
    q_shared,  # [N W, H, S]
    cache,  # [pages, PAGE, R + S]
    block_table,  # [N, max_pages]
    lengths,  # [N]
    out,  # [parts, N W H, R], each a mix
    lse,  # [parts, N W H], base 2 where there are several parts, natural where there is one
    scale,  # times log2(e)
    max_length,
    queries,  # N W H
    stride_lt: tl.int64,
    stride_lh: tl.int64,
    stride_st: tl.int64,
    stride_sh: tl.int64,
    stride_table: tl.int64,
    W,
    H,
    SPLIT,
    R: tl.constexpr,
    S: tl.constexpr,
    PAGE: tl.constexpr,
    ONE_PART: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    n = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2).to(tl.int64)
    length = tl.minimum(tl.load(lengths + n), max_length)
    start = tl.program_id(2) * SPLIT
    # Of the last query of this program; others see less.
    seen = length - W + 1 + tl.minimum(first + ROWS - 1, W * H - 1) // H
    end = seen
    if not ONE_PART:
        end = tl.minimum(seen, start + SPLIT)
        if start >= end:
            return

    row = first + tl.arange(0, ROWS)
    inside = row < W * H
    token, head = n * W + row // H, row % H
    seen_by_row = length - W + 1 + row // H
    c = tl.arange(0, R)
    d = tl.arange(0, S)
    latent_cells = q_latent + (token * stride_lt + head * stride_lh)[:, None] + c[None, :]
    shared_cells = q_shared + (token * stride_st + head * stride_sh)[:, None] + d[None, :]
    query = tl.load(latent_cells, mask=inside[:, None], other=0.0)
    query_shared = tl.load(shared_cells, mask=inside[:, None], other=0.0)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, R], tl.float32)
    for t in range(start, end, TOKENS):
        j = t + tl.arange(0, TOKENS)
        page = tl.load(block_table + n * stride_table + j // PAGE, mask=j < end, other=0).to(tl.int64)
        cells = cache + ((page * PAGE + j % PAGE) * (R + S))[:, None]
        # Zeros past the end: what lies there may be no number.
        latent = tl.load(cells + c[None, :], mask=(j < end)[:, None], other=0.0)
        shared = tl.load(cells + (R + d)[None, :], mask=(j < end)[:, None], other=0.0)
        logits = tl.dot(query, tl.trans(latent), input_precision=PRECISION)
        logits = tl.dot(query_shared, tl.trans(shared), logits, input_precision=PRECISION) * scale
        logits = tl.where(j[None, :] < seen_by_row[:, None], logits, float("-inf"))
        larger = tl.maximum(largest, tl.max(logits, 1))
        reference = tl.where(larger == float("-inf"), 0.0, larger)  # nothing seen yet: not 0/0
        weights = tl.exp2(logits - reference[:, None])
        shrink = tl.exp2(largest - reference)
        total = total * shrink + tl.sum(weights, 1)
        mixed *= shrink[:, None]
        mixed = tl.dot(weights.to(latent.dtype), latent, mixed, input_precision=PRECISION)
        largest = larger

    mixed /= tl.where(total > 0.0, total, 1.0)[:, None]
    sums = largest + tl.log2(total)
    if ONE_PART:
        sums *= LN2
    place = part * queries + n * (W * H) + row
    tl.store(out + place[:, None] * R + c[None, :], mixed.to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(lse + place, sums, mask=inside)


@triton.jit(do_not_specialize=["max_length", "queries", "W", "H", "SPLIT"])
def mix_parts(
    part_out,  # [parts, N W H, R] fp32
    part_lse,  # [parts, N W H], base 2
    lengths,  # [N]
    out,  # [N W H, R]
    lse,  # [N W H], natural
    max_length,
    queries,
    W,
    H,
    SPLIT,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One query, COLUMNS of its mix. Parts in groups of PARTS, counted from the sequence's start."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    n = row // (W * H)
    w = (row // H % W).to(tl.int32)
    seen = tl.minimum(tl.load(lengths + n), max_length) - W + 1 + w
    count = (tl.maximum(seen, 0) + SPLIT - 1) // SPLIT

    largest = float("-inf")
    total = 0.0
    mixed = tl.zeros([COLUMNS], tl.float32)
    for p in range(0, count, PARTS):
        part = p + tl.arange(0, PARTS)
        place = part.to(tl.int64) * queries + row
        sums = tl.load(part_lse + place, mask=part < count, other=float("-inf"))
        mixes = tl.load(part_out + place[:, None] * R + c[None, :], mask=(part < count)[:, None], other=0.0)
        larger = tl.maximum(largest, tl.max(sums, 0))
        weights = tl.exp2(sums - larger)
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, 0)
        mixed = mixed * shrink + tl.sum(weights[:, None] * mixes, 0)
        largest = larger

    tl.store(out + row * R + c, (mixed / tl.where(total > 0.0, total, 1.0)).to(out.dtype.element_ty))
    if tl.program_id(1) == 0:
        tl.store(lse + row, (largest + tl.log2(total)) * LN2)


@triton.jit
def append_rows(latents, stride: tl.int64, slots, cache, room, D: tl.constexpr, COLUMNS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t).to(tl.int64)
    if (slot < 0) | (slot >= room):
        return
    for first in tl.static_range(0, D, COLUMNS):
        c = first + tl.arange(0, COLUMNS)
        tl.store(cache + slot * D + c, tl.load(latents + t * stride + c, mask=c < D), mask=c < D)
