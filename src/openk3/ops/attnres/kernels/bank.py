"""All queries of a block against the bank: scores by matrix products, then every mix from one more read.

Bytes decide the cut. With U one pass over `[T, d]`, S rows and Q queries, the second phase of each sublayer
either reads the bank again with weights known (S + 2 U a query, no better than the one-query kernel), or a
mix made here (3 U). So mixes are made here: S + Q U at least. A query's mix needs its scores, and those need
whole rows, which do not fit on a processor beside all queries; so the bank is read twice: 2 S + Q U.

    slice_products    a tile of a few tokens with all sources, a slice of the columns: products with queries
    slice_mixes       the same tile and slice again: weights from all slices' products, then all mixes

A tile's rows, of all its tokens and sources, make one product of 64 rows with the queries. Mixes are products
too, of weights in two parts with the rows of a token.

Half-precision rows go through tensor cores as they are. The queries are cut into three bf16 parts, which add
up to the fp32 number to its last bit or nearly: products are exact. Tensor cores cut their sums off where
fp32 would round them, thousands of times to one side along a row; so a sum there is of one block of columns,
and blocks are added outside.

Measured on an H200 with 9 sources of 7,168 columns and 12 queries: the second read served by the L2 cache, by
programs that wait for each other, took longer (1.17 ms for 1.03).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment, misc"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def directions(queries, key_gains, parts, d, Q, QUERIES: tl.constexpr, COLUMNS: tl.constexpr):
    """query * key_gain in 3 parts of bf16, or in one of fp32: `[parts, QUERIES, d]`, zeros past Q."""
    q = tl.program_id(0)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (col < d) & (q + col * 0 < Q)
    at = q.to(tl.int64) * d + col
    query = tl.load(queries + at, mask=inside, other=0.0).to(tl.float32)
    rest = query * tl.load(key_gains + at, mask=inside, other=0.0).to(tl.float32)
    if parts.dtype.element_ty == tl.float32:
        tl.store(parts + at, rest, mask=col < d)
    else:
        for part in tl.static_range(3):
            rounded = rest.to(tl.bfloat16)
            tl.store(parts + part * QUERIES * d + at, rounded, mask=col < d)
            rest -= rounded.to(tl.float32)


@triton.jit
def _starts(bank, source):
    """Where each row's source begins."""
    start = bank[0] + source * 0
    for i in tl.static_range(1, len(bank)):
        start = tl.where(source == i, bank[i], start)
    return start


@triton.jit(do_not_specialize=["T"])
def slice_products(
    bank,
    parts,
    products,  # [tiles, SLICES, 64, QUERIES] fp32
    squares,  # [tiles, SLICES, 64] fp32
    T,
    d,
    Q,
    one,  # 1.0: a factor that keeps the compiler from adding inside of the product
    S: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = tl.program_id(0) // SLICES
    part = tl.program_id(0) % SLICES
    row = tl.arange(0, 64)
    query = tl.arange(0, QUERIES)
    token = tile * TOKENS + row // S
    there = (row < TOKENS * S) & (token < T)
    start = _starts(bank, row % S) + tl.minimum(token, T - 1).to(tl.int64) * d
    width = tl.cdiv(d, SLICES * COLUMNS) * COLUMNS
    product = tl.zeros([64, QUERIES], tl.float32)
    square = tl.zeros([64, COLUMNS // 8], tl.float32)
    for first in tl.range(part * width, tl.minimum(part * width + width, d), COLUMNS, num_stages=STAGES):
        col = first + tl.arange(0, COLUMNS)
        v = tl.load(start[:, None] + col[None, :], mask=there[:, None] & (col < d)[None, :], other=0.0)
        at = parts + query[:, None] * d + col[None, :]
        inside = (query < Q)[:, None] & (col < d)[None, :]
        high = tl.load(at, mask=inside, other=0.0)
        wide = v.to(tl.float32)
        if parts.dtype.element_ty == tl.float32:
            block = tl.dot(wide, tl.trans(high), input_precision="ieee")
        else:
            middle = tl.load(at + QUERIES * d, mask=inside, other=0.0)
            low = tl.load(at + 2 * QUERIES * d, mask=inside, other=0.0)
            block = tl.dot(v, tl.trans(low))
            block = tl.dot(v, tl.trans(middle), block)
            block = tl.dot(v, tl.trans(high), block)
        product += block * one
        square += tl.sum(tl.reshape(wide * wide, [64, COLUMNS // 8, 8]), 2)
    of_slice = (tile * SLICES + part).to(tl.int64) * 64 + row
    tl.store(products + of_slice[:, None] * QUERIES + query[None, :], product)
    tl.store(squares + of_slice, tl.sum(square, 1))


@triton.jit
def _tile_weights(
    products,
    squares,
    weights,  # [tiles, TOKENS, 2 or 1 parts, QUERIES, SOURCES] of the rows' dtype
    lse,  # [Q, T] fp32
    tile,
    T,
    d,
    Q,
    eps,
    keep_lse,
    S: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Of each token's sources, by query, made by every program of the tile for itself."""
    PLACES: tl.constexpr = 8
    SOURCES: tl.constexpr = 16 if S <= 16 else 32
    place = tl.arange(0, PLACES)[:, None]
    source = tl.arange(0, SOURCES)[None, :]
    query = tl.arange(0, QUERIES)
    there = (place < TOKENS) & (source < S)
    product = tl.zeros([PLACES, SOURCES, QUERIES], tl.float32)
    square = tl.zeros([PLACES, SOURCES], tl.float32)
    for part in tl.static_range(SLICES):
        at = (tile * SLICES + part).to(tl.int64) * 64 + place * S + source
        square += tl.load(squares + at, mask=there, other=0.0, cache_modifier=".cg")
        product += tl.load(
            products + at[:, :, None] * QUERIES + query[None, None, :],
            mask=there[:, :, None] & (query < Q)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
    score = product * tl.rsqrt(square / d + eps)[:, :, None]
    score = tl.where((source < S)[:, :, None], score, float("-inf"))
    top = tl.max(score, 1)
    weight = tl.exp(score - top[:, None, :])
    share = tl.sum(weight, 1)
    weight = weight / share[:, None, :]
    token = tile * TOKENS + tl.arange(0, PLACES)
    PARTS: tl.constexpr = 1 if weights.dtype.element_ty == tl.float32 else 2
    at = ((tile * TOKENS + place).to(tl.int64) * PARTS)[:, :, None] * QUERIES + query[None, None, :]
    at = at * SOURCES + source[:, :, None]
    for n in tl.static_range(PARTS):
        rounded = weight.to(weights.dtype.element_ty)
        tl.store(weights + at + n * QUERIES * SOURCES, rounded, mask=(place < TOKENS)[:, :, None])
        weight -= rounded.to(tl.float32)
    if keep_lse:
        known = ((tl.arange(0, PLACES) < TOKENS) & (token < T))[:, None] & (query < Q)[None, :]
        tl.store(lse + query.to(tl.int64)[None, :] * T + token[:, None], top + tl.log(share), mask=known)


@triton.jit
def _mixes(
    bank,
    weights,
    values,  # [Q, T, d]
    tile,
    part,
    T,
    d,
    Q,
    S: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All mixes of a tile's tokens in one slice of columns."""
    SOURCES: tl.constexpr = 16 if S <= 16 else 32
    PARTS: tl.constexpr = 1 if weights.dtype.element_ty == tl.float32 else 2
    source = tl.arange(0, SOURCES)
    query = tl.arange(0, QUERIES)
    start = _starts(bank, source)
    width = tl.cdiv(d, SLICES * COLUMNS) * COLUMNS
    steps = tl.cdiv(tl.minimum(width, d - part * width), COLUMNS)
    tokens = tl.minimum(TOKENS, T - tile * TOKENS)
    for step in tl.range(0, tl.maximum(steps, 0) * tokens, num_stages=STAGES):
        token = (tile * TOKENS + step // steps).to(tl.int64)
        col = part * width + (step % steps) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (source < S)[:, None] & (col < d)[None, :]
        v = tl.load(start[:, None] + token * d + col[None, :], mask=inside, other=0.0)
        at = weights + (token * PARTS * QUERIES + query)[:, None] * SOURCES + source[None, :]
        v = v.to(weights.dtype.element_ty)
        mixed = tl.dot(tl.load(at), v, input_precision="ieee")
        if PARTS == 2:
            mixed = tl.dot(tl.load(at + QUERIES * SOURCES), v, mixed)
        out = values + (query.to(tl.int64)[:, None] * T + token) * d + col[None, :]
        tl.store(out, mixed.to(values.dtype.element_ty), mask=(query < Q)[:, None] & (col < d)[None, :])


@triton.jit(do_not_specialize=["T"])
def slice_mixes(
    bank,
    products,
    squares,
    weights,
    values,
    lse,
    T,
    d,
    Q,
    eps,
    S: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = tl.program_id(0) // SLICES
    part = tl.program_id(0) % SLICES
    _tile_weights(products, squares, weights, lse, tile, T, d, Q, eps, part == 0, S, QUERIES, TOKENS, SLICES)
    tl.debug_barrier()
    _mixes(bank, weights, values, tile, part, T, d, Q, S, QUERIES, TOKENS, COLUMNS, SLICES, STAGES)
