"""All queries of a block against the bank, which is read from memory once.

`bank` reads it twice, since a mix needs scores of whole rows and those do not fit on a processor beside all
queries. Here a row is cut into SLICES and a few tokens at a time are a tile. A program adds up its slice's
part of a tile's products, says so, waits until all of the tile's slices are there, and mixes the same slice
again from the L2 cache, where it still lies: with 9 sources all programs together have 37 tiles of 7 tokens
under way, 33 MB at width 7,168.

A tile's rows, of all its tokens and sources, make one product of 64 rows with the queries, which are cut into
three bf16 parts as there. Mixes are products too, of weights in two parts with the rows of a token.

Programs that wait for each other must all be on the card: the launch is a cooperative one. As two launches
(PHASE 1, 2) nobody waits, and the second reads the bank from memory again.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment, misc"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _starts(bank, source):
    """Where each row's source begins."""
    start = bank[0] + source * 0
    for i in tl.static_range(1, len(bank)):
        start = tl.where(source == i, bank[i], start)
    return start


@triton.jit
def _slice_products(
    bank,
    parts,
    products,
    squares,
    tile,
    part,
    T,
    d,
    Q,
    one,
    S: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of the rows of a tile with all queries, and with themselves, in one slice of columns."""
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
def bank_once(
    bank,
    parts,
    products,  # [tiles, SLICES, 64, QUERIES] fp32
    squares,  # [tiles, SLICES, 64] fp32
    weights,
    arrived,  # [tiles] int32, zeros: slices of a tile whose products are there
    values,
    lse,
    T,
    d,
    Q,
    eps,
    one,
    PHASE: tl.constexpr,  # 0: both, waiting in between; 1: products; 2: mixes
    S: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MIX_COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    MIX_STAGES: tl.constexpr,
):
    zero = tl.program_id(0) * 0  # Triton's interpreter counts in Python's integers
    for work in range(tl.program_id(0), tl.cdiv(T, TOKENS) * SLICES, tl.num_programs(0)):
        tile = (zero + work) // SLICES
        part = (zero + work) % SLICES
        if PHASE != 2:
            _slice_products(
                bank, parts, products, squares, tile, part, T, d, Q, one,
                S, QUERIES, TOKENS, COLUMNS, SLICES, STAGES,
            )  # fmt: skip
        if PHASE == 0:
            tl.debug_barrier()
            seen = tl.atomic_add(arrived + tile, 1, sem="release", scope="gpu") + 1
            while seen < SLICES:
                seen = tl.atomic_add(arrived + tile, 0, sem="acquire", scope="gpu")
            tl.debug_barrier()
        if PHASE != 1:
            _tile_weights(
                products, squares, weights, lse, tile, T, d, Q, eps, part == 0, S, QUERIES, TOKENS, SLICES
            )
            tl.debug_barrier()
            _mixes(
                bank, weights, values, tile, part, T, d, Q,
                S, QUERIES, TOKENS, MIX_COLUMNS, SLICES, MIX_STAGES,
            )  # fmt: skip
