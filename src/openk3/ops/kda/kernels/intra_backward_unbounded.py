"""The second kernel of `intra_backward` for the gate without a bound: pairs by joining halves, as in `halves`.

A program a chunk and slice of K. At each level a row's operand is x 2^e, with x its read or its write and e
the log2 decays from the row to the boundary; the gradient to e, in units of log 2, is the operand times its
own gradient. A row is a reader or a writer, so one product with the transpose of `spans` takes both to the
gates between. What the states bring is two more such levels: from the chunk's start, and to its end.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from openk3.ops.kda.kernels.decode import head_rate
from openk3.ops.kda.kernels.halves import LEVELS, LOG2_E, meets, spans, sums, unbounded_log2_decay


@triton.jit
def intra_backward_unbounded(
    q, k, z, b, d_o, d_v, states, d_states, errors, A_log, dt_bias, pairs, rows,
    d_q, d_k, d_z, d_A_log, d_bias, cu_seqlens, first_chunk, chunk_sequence,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_zt, stride_zh, stride_b, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = K // BK
    c, h = (tl.program_id(0) // SLICES).to(tl.int64), tl.program_id(1).to(tl.int64)
    part = tl.program_id(0) % SLICES
    n = tl.load(chunk_sequence + c)
    if n < 0:
        return
    OPERAND: tl.constexpr = states.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if OPERAND == tl.float32 else "tf32"
    i, d, e = tl.arange(0, CHUNK), part * BK + tl.arange(0, BK), tl.arange(0, V)
    row, column = i[:, None], i[None, :]
    start = (tl.load(cu_seqlens + n) + (c - tl.load(first_chunk + n)) * CHUNK).to(tl.int64)
    inside = (i < tl.load(cu_seqlens + n + 1) - start)[:, None]
    chunk = c * H + h
    rows += chunk * (5 * CHUNK) + row
    own, along_q, along_k = tl.load(rows), tl.load(rows + CHUNK), tl.load(rows + 2 * CHUNK)
    q_norm, k_norm = tl.load(rows + 3 * CHUNK), tl.load(rows + 4 * CHUNK)
    beta = tl.load(b + (start + row) * stride_b + h, mask=inside, other=0.0)
    beta = tl.sigmoid(beta.to(tl.float32))

    q += start * stride_qt + h * stride_qh
    k += start * stride_kt + h * stride_kh
    z += start * stride_zt + h * stride_zh
    z_rows = tl.load(z + row * stride_zt + d[None, :], mask=inside, other=0.0).to(tl.float32)
    q_rows = tl.load(q + row * stride_qt + d[None, :], mask=inside, other=0.0).to(tl.float32)
    k_rows = tl.load(k + row * stride_kt + d[None, :], mask=inside, other=0.0).to(tl.float32)
    u = z_rows + tl.load(dt_bias + h * K + d).to(tl.float32)[None, :]
    rate = head_rate(A_log, h)
    a = tl.where(inside, unbounded_log2_decay(u, rate), 0.0)
    reads_q = q_rows * q_norm * scale
    reads_k = k_rows * k_norm
    writes = reads_k * beta

    # Through the states: reads from the chunk's start, writes to its end, and the decay over all of it.
    values = (start * H + h) * V + row * (H * V) + e[None, :]
    tile = chunk * V * K + e[:, None] * K + d[None, :]
    S, dS = tl.load(states + tile), tl.load(d_states + tile)
    dO = tl.load(d_o + values, mask=inside, other=0.0)
    D = tl.load(d_v + values, mask=inside, other=0.0)
    E = tl.load(errors + chunk * CHUNK * V + row * V + e[None, :])
    factor = tl.exp2(sums(row >= column, a, OPERAND))
    d_reads_q = factor * tl.dot(dO, S, input_precision=PRECISION)
    d_reads_k = -factor * tl.dot(D, S, input_precision=PRECISION)
    d_g = sums(row <= column, reads_q * d_reads_q + reads_k * d_reads_k, OPERAND)
    factor = tl.exp2(sums(spans(row, column, LEVELS), a, OPERAND))
    d_writes = factor * tl.dot(E, dS, input_precision=PRECISION)
    d_g += sums(spans(column, row, LEVELS), writes * d_writes, OPERAND)
    d_g += (tl.exp2(tl.sum(a, 0)) * tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0))[None, :]

    # Through the pairs.
    pairs += chunk * (2 * CHUNK * CHUNK) + row * CHUNK + column
    for level in range(LEVELS):
        factor = tl.exp2(sums(spans(row, column, level), a, OPERAND))
        from_q, from_k = (reads_q * factor).to(OPERAND), (reads_k * factor).to(OPERAND)
        to_w = (writes * factor).to(OPERAND)
        joined = meets(row, column, level)
        D_q = tl.where(joined, tl.load(pairs), 0.0)
        D_k = tl.where(joined, tl.load(pairs + CHUNK * CHUNK), 0.0)
        d_q_row = tl.dot(D_q, to_w, input_precision=PRECISION)
        d_k_row = tl.dot(D_k, to_w, input_precision=PRECISION)
        d_w_row = tl.dot(tl.trans(D_q), from_q, input_precision=PRECISION)
        d_w_row = tl.dot(tl.trans(D_k), from_k, d_w_row, input_precision=PRECISION)
        d_e = from_q.to(tl.float32) * d_q_row + from_k.to(tl.float32) * d_k_row
        d_e += to_w.to(tl.float32) * d_w_row
        d_g += sums(spans(column, row, level), d_e, OPERAND)
        d_reads_q += factor * d_q_row
        d_reads_k += factor * d_k_row
        d_writes += factor * d_w_row

    # A row's own pair, beta, and the norms.
    at = (start * H + h) * K + row * (H * K) + d[None, :]
    d_rows = q_norm * (scale * (d_reads_q + own * writes) - along_q * (q_rows * q_norm))
    tl.store(d_q + at, d_rows.to(d_q.dtype.element_ty), mask=inside)
    d_rows = k_norm * (d_reads_k + beta * (d_writes + own * reads_q) - along_k * reads_k)
    tl.store(d_k + at, d_rows.to(d_k.dtype.element_ty), mask=inside)

    # The gate: g = -rate softplus(u) has dg/dA_log = g and dg/du = -rate sigmoid(u).
    d_g = tl.where(inside, d_g, 0.0)
    tl.store(d_A_log + chunk * SLICES + part, tl.sum(tl.sum(a * d_g, 1), 0) / LOG2_E)
    d_u = -tl.sigmoid(u) * d_g * rate
    tl.store(d_bias + chunk * K + d, tl.sum(d_u, 0))
    tl.store(d_z + at, d_u.to(d_z.dtype.element_ty), mask=inside)
