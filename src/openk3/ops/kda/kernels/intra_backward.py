"""The gradients inside each chunk, all chunks at once (report §2.1.1 eq. 3-5).

Comes after the scans: S enters the chunk, dS is the gradient to the state that leaves it, E are the
prediction errors, dO and D the gradients to outputs and values. With G the log2 decays summed from the
chunk's start, w_j = beta_j k_j, and read for either of q and k:

    d(q 2^G) = dO S      d(k 2^G) = -D S      d(w 2^(G_end - G)) = E dS      dA = dO E^T      dL = -D E^T

A pair of rows j < i, read_i . w_j 2^(G_i - G_j), is differentiated on blocks of 16 rows. A block has an
anchor m in the middle of its range of G; its rows keep

    up = 2^(G - m)      down = 2^(m - G)      read * up      w * down           exponents within +-58

Pairs inside a block multiply these as they are. Pairs of two blocks meet at the boundary between them: the
later block's rows times 2^(m - boundary), the earlier's times 2^(boundary - m), neither above 1 (to
rounding). Blocks join to 32 rows, these to the chunk. As a row is a reader or a writer in a join but never
both, one symmetric product serves both sides: rows of the later block gather from writers, of the earlier
from readers.

Anchors and boundaries are rounded to integers, so that these factors are powers of two and the operands of
all products are the same bf16 numbers up to exponent. Multiplied with them, the gradient to log decays of a
pair enters at its reader and leaves at its writer as the same number: the reverse cumulative sum cancels
pairs that do not span a row to fp32 rounding, however small the rest. The pair of a row with itself has no
decay and stays out of it.

Sums over K are taken on the side of V, where they are the same by the chain rule, and K falls into
independent slices:

    q . dq = dO . O          k . dk + w . dw = D . (2E - V)          w . dw = E . D

Knows the bounded gate only: without a bound, 16 rows may span any range, and pairs inside a block would go on
joining halves down to single rows, as between blocks.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from openk3.ops.kda.kernels.plan import CHUNK, ChunkPlan
from openk3.ops.kda.kernels.prepare import L2_EPS

LOG2_E = tl.constexpr(1.4426950408889634)
BLOCKS = tl.constexpr(4)
BLOCK = tl.constexpr(16)


class InputGradients(NamedTuple):
    """Of the raw inputs: q, k, z `[T, H, K]`, b `[T, H]`, A_log `[H]`, dt_bias `[H, K]`."""

    q: torch.Tensor
    k: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor


@triton.jit
def _by_block(x):
    """`[64, F]` as `[4, 16, F]`."""
    return tl.reshape(x, [BLOCKS, BLOCK, x.shape[1]])


@triton.jit
def _times(x, factor):
    """Rows `[64, F]` times the factor `[4, F]` of their block."""
    return tl.reshape(_by_block(x) * factor[:, None, :], [BLOCKS * BLOCK, x.shape[1]])


@triton.jit
def _sigmoid_and_slope(x):
    """sigmoid(x) and its derivative, from one exponential that cannot overflow."""
    small = tl.exp(-tl.abs(x))
    large = 1.0 / (1.0 + small)
    return tl.where(x >= 0, large, small * large), small * large * large


@triton.jit
def _joined(D_q, D_k, readers_q, readers_k, writers, factor, later, mask, PRECISION: tl.constexpr):
    """Gradients to readers of q, of k, and to writers, from pairs of blocks that `mask` selects."""
    OPERAND = D_q.dtype
    zero = tl.zeros(D_q.shape, OPERAND)
    rows_q = _times(tl.where(later, readers_q, writers).to(tl.float32), factor)
    rows_k = _times(tl.where(later, readers_k, writers).to(tl.float32), factor)
    from_q = tl.dot(tl.where(mask, D_q, zero), rows_q.to(OPERAND), input_precision=PRECISION)
    from_k = tl.dot(tl.where(mask, D_k, zero), rows_k.to(OPERAND), input_precision=PRECISION)
    from_q = _times(from_q, factor)
    from_k = _times(from_k, factor)
    return tl.where(later, from_q, 0.0), tl.where(later, from_k, 0.0), tl.where(later, 0.0, from_q + from_k)


@triton.jit
def _intra_backward(
    q, k, v, z, b, o, d_o, d_v, states, d_states, errors, A_log, dt_bias,
    d_q, d_k, d_z, d_b, d_A_log, d_bias, cu_seqlens, first_chunk, chunk_sequence,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_zt, stride_zh, stride_b, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr,
    BOUND: tl.constexpr, EPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    c, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    n = tl.load(chunk_sequence + c)
    if n < 0:
        return
    OPERAND = states.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if states.dtype.element_ty == tl.float32 else "tf32"
    i, all_d, e = tl.arange(0, CHUNK), tl.arange(0, K), tl.arange(0, V)
    row, column = i[:, None], i[None, :]
    token = tl.load(cu_seqlens + n) + (c - tl.load(first_chunk + n)) * CHUNK + i
    valid = token < tl.load(cu_seqlens + n + 1)
    inside = valid[:, None]
    chunk = c * H + h
    q += h * stride_qh
    k += h * stride_kh
    z += h * stride_zh

    # On the side of V: sums over K, and the gradients to the pairs.
    values = (token[:, None] * H + h) * V + e[None, :]
    dO = tl.load(d_o + values, mask=inside, other=0.0)
    D = tl.load(d_v + values, mask=inside, other=0.0)
    E = tl.load(errors + chunk * CHUNK * V + row * V + e[None, :])
    out = tl.load(o + values, mask=inside, other=0.0)
    value = tl.load(v + token[:, None] * stride_vt + h * stride_vh + e[None, :], mask=inside, other=0.0)
    beta = tl.sigmoid(tl.load(b + token * stride_b + h, mask=valid, other=0.0).to(tl.float32))
    dO_wide, D_wide, E_wide = dO.to(tl.float32), D.to(tl.float32), E.to(tl.float32)
    along_q = tl.sum(dO_wide * out.to(tl.float32), 1)
    along_w = tl.sum(D_wide * E_wide, 1)
    along_k = 2.0 * along_w - tl.sum(D_wide * value.to(tl.float32), 1)
    own = tl.sum(dO_wide * E_wide, 1)
    tl.store(d_b + token * H + h, ((1.0 - beta) * along_w).to(d_b.dtype.element_ty), mask=valid)
    zero = tl.zeros([CHUNK, CHUNK], OPERAND)
    below = tl.dot(dO, tl.trans(E), input_precision=PRECISION)
    above = tl.dot(E, tl.trans(dO), input_precision=PRECISION)
    D_q = tl.where(row > column, below, above).to(OPERAND)
    below = tl.dot(D, tl.trans(E), input_precision=PRECISION)
    above = tl.dot(E, tl.trans(D), input_precision=PRECISION)
    D_k = -tl.where(row > column, below, above).to(OPERAND)

    keys = token[:, None] * stride_kt + all_d[None, :]
    wide = tl.load(k + keys, mask=inside, other=0.0).to(tl.float32)
    k_norm = tl.rsqrt(tl.sum(wide * wide, 1) + EPS)
    wide = tl.load(q + token[:, None] * stride_qt + all_d[None, :], mask=inside, other=0.0).to(tl.float32)
    q_norm = tl.rsqrt(tl.sum(wide * wide, 1) + EPS)

    rate = tl.exp(tl.minimum(tl.load(A_log + h).to(tl.float32), 60.0))
    block = tl.arange(0, BLOCKS)[:, None]
    d_rate = 0.0
    for first in tl.range(0, K, BK, num_stages=STAGES):
        d = first + tl.arange(0, BK)
        # Gate and anchors.
        bias = tl.load(dt_bias + h * K + d).to(tl.float32)
        logits = tl.load(z + token[:, None] * stride_zt + d[None, :], mask=inside, other=0.0).to(tl.float32)
        logits = rate * (logits + bias[None, :])
        gate, slope = _sigmoid_and_slope(logits)
        a = _by_block(tl.where(inside, (BOUND * LOG2_E) * gate, 0.0))
        spans = tl.sum(a, 1)
        ends = tl.cumsum(spans, 0)
        G_end = tl.sum(spans, 0)
        starts = ends - spans
        middle = tl.floor(starts + 0.5 * spans)
        halfway = tl.floor(tl.sum(tl.where(block < 2, spans, 0.0), 0))[None, :]
        boundary = tl.floor(tl.where(block % 2 == 1, starts, ends))
        to_16 = tl.exp2(tl.where(block % 2 == 1, middle - boundary, boundary - middle))
        to_32 = tl.exp2(tl.where(block >= 2, middle - halfway, halfway - middle))
        G = tl.reshape(tl.cumsum(a, 1) + (starts - middle)[:, None, :], [CHUNK, BK])
        up, down = tl.exp2(G), tl.exp2(-G)

        unit_q = tl.load(q + token[:, None] * stride_qt + d[None, :], mask=inside, other=0.0).to(tl.float32)
        unit_q *= q_norm[:, None]
        unit_k = tl.load(k + token[:, None] * stride_kt + d[None, :], mask=inside, other=0.0).to(tl.float32)
        unit_k *= k_norm[:, None]
        writes = unit_k * beta[:, None]
        readers_q = (unit_q * scale * up).to(OPERAND)
        readers_k = (unit_k * up).to(OPERAND)
        writers = (writes * down).to(OPERAND)

        # Through the states.
        tile = chunk * V * K + e[:, None] * K + d[None, :]
        S = tl.load(states + tile)
        from_start = tl.exp2(middle)
        d_readers_q = _times(tl.dot(dO, S, input_precision=PRECISION), from_start)
        d_readers_k = _times(tl.dot(D, S, input_precision=PRECISION), -from_start)
        dS = tl.load(d_states + tile)
        d_writers = _times(tl.dot(E, dS, input_precision=PRECISION), tl.exp2(G_end[None, :] - middle))
        d_G_end = tl.exp2(G_end) * tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
        d_G_end += tl.sum(d_writers * writers.to(tl.float32), 0)

        # Through the pairs: between blocks, then inside each.
        to_q, to_k, to_w = _joined(
            D_q, D_k, readers_q, readers_k, writers, to_32, row >= 32, row // 32 != column // 32, PRECISION
        )
        d_readers_q += to_q
        d_readers_k += to_k
        d_writers += to_w
        to_q, to_k, to_w = _joined(
            D_q, D_k, readers_q, readers_k, writers, to_16, row // 16 % 2 == 1,
            (row // 32 == column // 32) & (row // 16 != column // 16), PRECISION,
        )  # fmt: skip
        d_readers_q += to_q
        d_readers_k += to_k
        d_writers += to_w
        reads = (row // 16 == column // 16) & (row > column)
        written = (row // 16 == column // 16) & (row < column)
        d_readers_q = tl.dot(tl.where(reads, D_q, zero), writers, d_readers_q, input_precision=PRECISION)
        d_readers_k = tl.dot(tl.where(reads, D_k, zero), writers, d_readers_k, input_precision=PRECISION)
        d_writers = tl.dot(tl.where(written, D_q, zero), readers_q, d_writers, input_precision=PRECISION)
        d_writers = tl.dot(tl.where(written, D_k, zero), readers_k, d_writers, input_precision=PRECISION)

        # The gate.
        d_G = readers_q.to(tl.float32) * d_readers_q + readers_k.to(tl.float32) * d_readers_k
        d_G -= writers.to(tl.float32) * d_writers
        d_G = _by_block(d_G)
        sums = tl.sum(d_G, 1)
        later = tl.sum(sums, 0)[None, :] - tl.cumsum(sums, 0) + d_G_end[None, :]
        d_g = tl.reshape(tl.cumsum(d_G, 1, reverse=True) + later[:, None, :], [CHUNK, BK])
        d_logits = tl.where(inside, BOUND * slope * d_g, 0.0)
        d_rate += tl.sum(tl.sum(d_logits * logits, 1), 0)
        d_logits *= rate
        tl.store(d_bias + chunk * K + d, tl.sum(d_logits, 0))
        at = (token[:, None] * H + h) * K + d[None, :]
        tl.store(d_z + at, d_logits.to(d_z.dtype.element_ty), mask=inside)

        # A row's own pair, beta, and the norms.
        d_unit_q = scale * (d_readers_q * up + own[:, None] * writes)
        d_writes = d_writers * down + (scale * own)[:, None] * unit_q
        d_unit_k = d_readers_k * up + beta[:, None] * d_writes
        d_q_rows = q_norm[:, None] * (d_unit_q - along_q[:, None] * unit_q)
        d_k_rows = k_norm[:, None] * (d_unit_k - along_k[:, None] * unit_k)
        tl.store(d_q + at, d_q_rows.to(d_q.dtype.element_ty), mask=inside)
        tl.store(d_k + at, d_k_rows.to(d_k.dtype.element_ty), mask=inside)
    tl.store(d_A_log + chunk, d_rate)


@dataclass(frozen=True)
class IntraTiles:
    """How a program walks its chunk: columns of K at a time, its warps, and slices in flight."""

    BK: int
    num_warps: int
    stages: int


INTRA_TILES = IntraTiles(BK=32, num_warps=4, stages=1)


def intra_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    o: torch.Tensor,
    d_o: torch.Tensor,
    d_v: torch.Tensor,
    states: torch.Tensor,
    d_states: torch.Tensor,
    errors: torch.Tensor,
    plan: ChunkPlan,
    lower_bound: float,
    scale: float,
    *,
    tiles: IntraTiles = INTRA_TILES,
) -> InputGradients:
    """From the scans' results to the gradients of the raw inputs.

    Args:
        q, k, z: raw `[T, H, K]`, v `[T, H, V]`, last axis contiguous; b `[T, H]`; A_log `[H]` and dt_bias
            `[H, K]` fp32.
        o: the outputs `[T, H, V]`, d_o their gradient, d_v the values' (of `scan_backward`); contiguous.
        states: S entering each chunk, d_states the gradient to what leaves it, `[NC, H, V, K]` contiguous.
        errors: E `[NC, H, 64, V]`.

    Returns:
        The gradients, each contiguous. Those of A_log and dt_bias are summed over chunks in a fixed order.
    """
    T, H, K = q.shape
    V = v.shape[-1]
    d_q, d_k, d_z = (x.new_empty(T, H, K) for x in (q, k, z))
    d_b = b.new_empty(T, H)
    d_A_log = q.new_zeros(plan.chunks, H, dtype=torch.float32)
    d_bias = q.new_zeros(plan.chunks, H, K, dtype=torch.float32)
    _intra_backward[(plan.chunks, H)](
        q, k, v, z, b, o, d_o, d_v, states, d_states, errors, A_log, dt_bias,
        d_q, d_k, d_z, d_b, d_A_log, d_bias, plan.cu_seqlens, plan.first_chunk, plan.chunk_sequence,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *z.stride()[:2], b.stride(0), scale,
        H=H, K=K, V=V, BK=tiles.BK, CHUNK=CHUNK, BOUND=lower_bound, EPS=L2_EPS, STAGES=tiles.stages,
        num_warps=tiles.num_warps,
    )  # fmt: skip
    return InputGradients(d_q, d_k, d_z, d_b, d_A_log.sum(0), d_bias.sum(0))
