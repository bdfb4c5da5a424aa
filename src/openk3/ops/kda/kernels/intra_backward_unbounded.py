"""The second kernel of `intra_backward` for the gate without a bound: pairs by joining halves; see `halves`.

A program a chunk and slice of K. At each level a row's operand is x 2^e, with x its read or its write and e
the log2 decays from the row to the boundary. The gradient to ln 2^e, a natural log as g is, is the operand
times its own gradient, or x times what the level adds to the gradient of x. A row is a reader or a writer, so
one product with the transpose of `spans` takes both to the gates between. What the states bring is two more
such levels: from the chunk's start, and to its end.
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
    LOG2_E,
    TO_END,
    decays,
    meets,
    split,
    unbounded_log2_decay,
)


@triton.jit(do_not_specialize=["H"])
def intra_backward_unbounded(
    q, k, z, b, d_o, d_v, states, d_states, errors, A_log, dt_bias, pairs, rows, spans,
    d_q, d_k, d_z, d_b, d_A_log, d_bias, cu_seqlens, first_chunk, chunk_sequence,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_zt, stride_zh, stride_b, scale,
    H, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = K // BK
    c, h = (tl.program_id(0) // SLICES).to(tl.int64), tl.program_id(1).to(tl.int64)
    part = tl.program_id(0) % SLICES
    n = tl.load(chunk_sequence + c)
    if n < 0:
        return
    OPERAND: tl.constexpr = states.dtype.element_ty
    i, d, e = tl.arange(0, CHUNK), part * BK + tl.arange(0, BK), tl.arange(0, V)
    row, column = i[:, None], i[None, :]
    start = (tl.load(cu_seqlens + n) + (c - tl.load(first_chunk + n)) * CHUNK).to(tl.int64)
    inside = (i < tl.load(cu_seqlens + n + 1) - start)[:, None]
    chunk = c * H + h
    rows += chunk * (6 * CHUNK) + row
    q_norm, k_norm = tl.load(rows + 3 * CHUNK), tl.load(rows + 4 * CHUNK)
    beta = tl.load(b + (start + row) * stride_b + h, mask=inside, other=0.0)
    beta = tl.sigmoid(beta.to(tl.float32))

    q += start * stride_qt + h * stride_qh + row * stride_qt + d[None, :]
    k += start * stride_kt + h * stride_kh + row * stride_kt + d[None, :]
    z += start * stride_zt + h * stride_zh + row * stride_zt + d[None, :]
    bias = tl.load(dt_bias + h * K + d).to(tl.float32)[None, :]
    rate = head_rate(A_log, h)
    u = tl.load(z, mask=inside, other=0.0).to(tl.float32) + bias
    a = tl.where(inside, unbounded_log2_decay(u, rate), 0.0)
    high, low = split(a, OPERAND)
    read_q = tl.load(q, mask=inside, other=0.0).to(tl.float32) * (q_norm * scale)
    read_k = tl.load(k, mask=inside, other=0.0).to(tl.float32) * k_norm

    square = row * CHUNK + column
    spans += square
    pairs += chunk * (2 * CHUNK * CHUNK) + square

    # Through the states: reads from the chunk's start, writes to its end, and the decay over all of it.
    values = (start * H + h) * V + row * (H * V) + e[None, :]
    tile = chunk * V * K + e[:, None] * K + d[None, :]
    S, dS = tl.load(states + tile), tl.load(d_states + tile)
    through = tl.exp2(tl.sum(a, 0)) * tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
    dO = tl.load(d_o + values, mask=inside, other=0.0)
    D = tl.load(d_v + values, mask=inside, other=0.0)
    E = tl.load(errors + chunk * CHUNK * V + row * V + e[None, :])
    between = tl.load(spans + FROM_START * CHUNK * CHUNK)
    factor = decays(between, high, low, OPERAND)
    d_read_q = factor * tl.dot(dO, S, input_precision=FULL)
    d_key = -factor * tl.dot(D, S, input_precision=FULL)
    d_e = read_q * d_read_q + read_k * d_key
    d_g = tl.dot(tl.trans(between), d_e.to(OPERAND), input_precision=FULL) + through[None, :]
    between = tl.load(spans + TO_END * CHUNK * CHUNK)
    factor = beta * decays(between, high, low, OPERAND)
    d_written = factor * tl.dot(E, dS, input_precision=FULL)
    d_e = read_k * d_written
    along_w = tl.sum(d_e, 1)
    d_g = tl.dot(tl.trans(between), d_e.to(OPERAND), d_g, input_precision=FULL)
    d_key += d_written

    # Through the pairs.
    for level in range(LEVELS):
        tl.debug_barrier()  # else all pairs would be loaded before the loop, and held
        between = tl.load(spans + level * CHUNK * CHUNK)
        factor = decays(between, high, low, OPERAND)
        from_q, from_k = (read_q * factor).to(OPERAND), (read_k * factor).to(OPERAND)
        to_w = (read_k * factor * beta).to(OPERAND)
        joined = meets(row, column, level)
        D_q = tl.where(joined, tl.load(pairs), 0.0)
        D_k = tl.where(joined, tl.load(pairs + CHUNK * CHUNK), 0.0)
        d_from_q = tl.dot(D_q, to_w, input_precision=FULL)
        d_from_k = tl.dot(D_k, to_w, input_precision=FULL)
        d_to_w = tl.dot(tl.trans(D_q), from_q, input_precision=FULL)
        d_to_w = tl.dot(tl.trans(D_k), from_k, d_to_w, input_precision=FULL)
        d_from_q = factor * d_from_q
        d_to_w *= factor * beta
        along_w += tl.sum(read_k * d_to_w, 1)
        d_from_k = factor * d_from_k + d_to_w
        d_e = read_q * d_from_q + read_k * d_from_k
        d_g = tl.dot(tl.trans(between), d_e.to(OPERAND), d_g, input_precision=FULL)
        d_read_q += d_from_q
        d_key += d_from_k

    # A row's own pair, and the norms. The barrier parts these loads from the first ones: what is read again
    # from the cache need not stay in registers.
    tl.debug_barrier()
    own, along_q, along_k = tl.load(rows), tl.load(rows + CHUNK), tl.load(rows + 2 * CHUNK)
    unit_q = tl.load(q, mask=inside, other=0.0).to(tl.float32) * q_norm
    unit_k = tl.load(k, mask=inside, other=0.0).to(tl.float32) * k_norm
    own *= scale
    at = (start * H + h) * K + row * (H * K) + d[None, :]
    d_rows = q_norm * (scale * d_read_q + own * beta * unit_k - along_q * unit_q)
    tl.store(d_q + at, d_rows.to(d_q.dtype.element_ty), mask=inside)
    d_beta = along_w[:, None] + beta * own * tl.sum(unit_q * unit_k, 1)[:, None]
    d_beta += tl.load(rows + 5 * CHUNK, mask=row + part * CHUNK < CHUNK, other=0.0)
    d_beta *= 0.5 * (1.0 - beta)
    tl.store(d_b + ((start + row) * H + h) * SLICES + part, d_beta, mask=inside)
    d_rows = k_norm * (d_key + own * beta * unit_q - along_k * unit_k)
    tl.store(d_k + at, d_rows.to(d_k.dtype.element_ty), mask=inside)

    # The gate: g = -rate softplus(u) has dg/dA_log = g and dg/du = -rate sigmoid(u).
    u = tl.load(z, mask=inside, other=0.0).to(tl.float32) + bias
    d_g = tl.where(inside, d_g, 0.0)
    a = unbounded_log2_decay(u, rate)
    tl.store(d_A_log + chunk * SLICES + part, tl.sum(tl.sum(a * d_g, 1), 0) / LOG2_E)
    d_u = -tl.sigmoid(u) * d_g * rate
    tl.store(d_bias + chunk * K + d, tl.sum(d_u, 0))
    tl.store(d_z + at, d_u.to(d_z.dtype.element_ty), mask=inside)
