"""All queries of a block against the bank: scores by matrix products, then every mix from one more read.

Bytes decide the cut. With U one pass over `[T, d]`, S rows and Q queries, the second phase of each sublayer
either reads the bank again with weights known (S + 2 U a query, no better than the one-query kernel), or a
mix made here (3 U). So mixes are made here: S + Q U at least. A query's mix needs its scores, and those need
whole rows, which do not fit on a processor beside all queries; so the bank is read twice, by a kernel that is
a matrix product of few columns and by one that is a sum: 2 S + Q U.

Half-precision rows go through tensor cores as they are. The queries are cut into three bf16 parts, which add
up to the fp32 number to its last bit or nearly: products are exact. Tensor cores cut their sums off where
fp32 would round them, thousands of times to one side along a row; so a sum there is of one block of columns,
and blocks are added outside.
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


@triton.jit(do_not_specialize=["T"])
def weigh(
    bank,
    parts,
    weights,  # [T, Q, S] fp32
    lse,  # [Q, T] fp32
    T,
    d,
    Q,
    eps,
    one,  # 1.0: a factor that keeps the compiler from adding inside of the product
    S: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    query = tl.arange(0, QUERIES)
    row = tl.minimum(token, T - 1).to(tl.int64)[:, None] * d
    along = ()
    square = ()
    for _ in tl.static_range(S):
        along = along + (tl.zeros([TOKENS, QUERIES], tl.float32),)  # noqa: RUF005
        square = square + (tl.zeros([TOKENS], tl.float32),)  # noqa: RUF005
    for start in range(0, d, COLUMNS):
        col = start + tl.arange(0, COLUMNS)
        inside = (col < d)[None, :]
        at = parts + query[:, None] * d + col[None, :]
        high = tl.load(at, mask=inside, other=0.0)
        if parts.dtype.element_ty != tl.float32:
            middle = tl.load(at + QUERIES * d, mask=inside, other=0.0)
            low = tl.load(at + 2 * QUERIES * d, mask=inside, other=0.0)
        for i in tl.static_range(S):
            v = tl.load(bank[i] + row + col[None, :], mask=inside, other=0.0)
            wide = v.to(tl.float32)
            if parts.dtype.element_ty == tl.float32:
                block = tl.dot(wide, tl.trans(high), input_precision="ieee")
            else:
                block = tl.dot(v, tl.trans(low))
                block = tl.dot(v, tl.trans(middle), block)
                block = tl.dot(v, tl.trans(high), block)
            along = along[1:] + (along[0] + block * one,)  # noqa: RUF005
            square = square[1:] + (square[0] + tl.sum(wide * wide, 1),)  # noqa: RUF005
    scores = ()
    top = along[0] * tl.rsqrt(square[0] / d + eps)[:, None]
    for i in tl.static_range(S):
        score = along[i] * tl.rsqrt(square[i] / d + eps)[:, None]
        scores = scores + (score,)  # noqa: RUF005
        top = tl.maximum(top, score)
    share = tl.zeros([TOKENS, QUERIES], tl.float32)
    for i in tl.static_range(S):
        share += tl.exp(scores[i] - top)
    there = (token < T)[:, None] & (query < Q)[None, :]
    at = token.to(tl.int64)[:, None] * Q + query[None, :]
    for i in tl.static_range(S):
        tl.store(weights + at * S + i, tl.exp(scores[i] - top) / share, mask=there)
    at = query.to(tl.int64)[None, :] * T + token[:, None]
    tl.store(lse + at, top + tl.log(share), mask=there)


@triton.jit(do_not_specialize=["T"])
def mix(bank, weights, values, T, d, Q, S: tl.constexpr, COLUMNS: tl.constexpr):
    slices = tl.cdiv(d, COLUMNS)
    token = (tl.program_id(0) // slices).to(tl.int64)
    col = (tl.program_id(0) % slices) * COLUMNS + tl.arange(0, COLUMNS)
    inside = col < d
    rows = ()
    for i in tl.static_range(S):
        rows = rows + (tl.load(bank[i] + token * d + col, mask=inside, other=0.0).to(tl.float32),)  # noqa: RUF005
    for q in range(Q):
        at = weights + (token * Q + q) * S
        mixed = rows[0] * tl.load(at)
        for i in tl.static_range(1, S):
            mixed += rows[i] * tl.load(at + i)
        out = values + ((token * 0 + q) * T + token) * d + col
        tl.store(out, mixed.to(values.dtype.element_ty), mask=inside)
