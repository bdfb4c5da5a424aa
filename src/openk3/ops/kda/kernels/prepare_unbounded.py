"""`prepare` for the gate without a bound: pairs by joining halves, as `halves` has it.

Whole chunks, K in slices: pairs add up over slices, and registers hold one slice of rows beside them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from openk3.ops.kda.kernels.decode import head_rate
from openk3.ops.kda.kernels.halves import (
    FROM_START,
    FULL,
    LEVELS,
    TO_END,
    decays,
    meets,
    split,
    unbounded_log2_decay,
)


@triton.jit
def _squares(x, inside, K: tl.constexpr, BK: tl.constexpr):
    """Sums of squares of the rows that the pointers x `[R, BK]` begin."""
    total = tl.zeros([x.shape[0]], tl.float32)
    for first in tl.static_range(0, K, BK):
        part = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(part * part, 1)
    return total


@triton.jit(do_not_specialize=["H"])
def prepare_unbounded(
    q, k, z, b, A_log, dt_bias, cu_seqlens, first_chunk, chunk_sequence, spans,
    qd, kd, ke, inverse, attention, decay,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_zt, stride_zh, stride_b, scale,
    H, K: tl.constexpr, BK: tl.constexpr, EPS: tl.constexpr,
    OPERAND: tl.constexpr, PRODUCT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    c, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    n = tl.load(chunk_sequence + c)
    if n < 0:
        return
    i, d = tl.arange(0, CHUNK), tl.arange(0, BK)
    row, column = i[:, None], i[None, :]
    start = (tl.load(cu_seqlens + n) + (c - tl.load(first_chunk + n)) * CHUNK).to(tl.int64)
    valid = i < tl.load(cu_seqlens + n + 1) - start
    inside = valid[:, None]
    rate = head_rate(A_log, h)
    beta = tl.sigmoid(tl.load(b + (start + i) * stride_b + h, mask=valid, other=0.0).to(tl.float32))
    q += start * stride_qt + h * stride_qh + row * stride_qt + d[None, :]
    k += start * stride_kt + h * stride_kh + row * stride_kt + d[None, :]
    z += start * stride_zt + h * stride_zh + row * stride_zt + d[None, :]
    q_norm = (tl.rsqrt(_squares(q, inside, K, BK) + EPS) * scale)[:, None]
    k_norm = tl.rsqrt(_squares(k, inside, K, BK) + EPS)[:, None]
    chunk = c * H + h
    square = row * CHUNK + column
    spans += square
    rows = chunk * CHUNK * K + row * K + d[None, :]

    A = tl.zeros([CHUNK, CHUNK], tl.float32)
    L = tl.zeros([CHUNK, CHUNK], tl.float32)
    own = tl.zeros([CHUNK], tl.float32)
    for first in range(0, K, BK):
        bias = tl.load(dt_bias + h * K + first + d).to(tl.float32)[None, :]
        u = tl.load(z + first, mask=inside, other=0.0).to(tl.float32) + bias
        a = tl.where(inside, unbounded_log2_decay(u, rate), 0.0)
        high, low = split(a, OPERAND)
        reads_q = tl.load(q + first, mask=inside, other=0.0).to(tl.float32) * q_norm
        reads_k = tl.load(k + first, mask=inside, other=0.0).to(tl.float32) * k_norm
        writes = reads_k * beta[:, None]
        own += tl.sum(reads_q * writes, 1)
        for level in range(LEVELS):
            factor = decays(tl.load(spans + level * CHUNK * CHUNK), high, low, OPERAND)
            joined = meets(row, column, level)
            written = tl.trans((writes * factor).to(OPERAND))
            pairs = tl.dot((reads_q * factor).to(OPERAND), written, input_precision=FULL)
            A += tl.where(joined, pairs, 0.0)
            pairs = tl.dot((reads_k * factor).to(OPERAND), written, input_precision=FULL)
            L += tl.where(joined, pairs, 0.0)
        factor = decays(tl.load(spans + FROM_START * CHUNK * CHUNK), high, low, OPERAND)
        tl.store(qd + rows + first, (reads_q * factor).to(OPERAND))
        tl.store(kd + rows + first, (reads_k * factor).to(OPERAND))
        factor = decays(tl.load(spans + TO_END * CHUNK * CHUNK), high, low, OPERAND)
        tl.store(ke + rows + first, (writes * factor).to(OPERAND))
        tl.store(decay + chunk * K + first + d, tl.exp2(tl.sum(a, 0)))

    square += chunk * CHUNK * CHUNK
    tl.store(attention + square, tl.where(row == column, own[:, None], A).to(OPERAND))
    # (I + L)^-1, as in `prepare`.
    X = tl.where(row == column, 1.0, tl.where(meets(row, column, 0), -L, 0.0))
    for level in tl.static_range(1, LEVELS):
        below = tl.where(meets(row, column, level), L, 0.0).to(PRODUCT)
        before = X.to(PRODUCT)
        X -= tl.dot(tl.dot(before, below, input_precision=FULL).to(PRODUCT), before, input_precision=FULL)
    tl.store(inverse + square, X.to(OPERAND))
