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
rounding). Blocks join to 32 rows, these to the chunk. In a join a row is a reader or a writer, never both,
and its factor as the other is 0. Blocks of 16 rows, not the forward's 32: gradients may be as small as the
loss's scale makes them, and 2^-116 of that would leave fp32.

Anchors and boundaries are rounded to integers, so that these factors are powers of two and the operands of
all products are the same bf16 numbers up to exponent. Multiplied with them, the gradient to log decays of a
pair enters at its reader and leaves at its writer as the same number: the reverse cumulative sum cancels
pairs that do not span a row to fp32 rounding, however small the rest. The pair of a row with itself has no
decay and stays out of it.

Sums over K are taken on the side of V, where they are the same by the chain rule, and K falls into
independent slices:

    q . dq = dO . O          k . dk = D . (2E - V), with the part through w          w . dw = E . D

For beta, which has beta dbeta = w . dw, both sides are at hand. They round different numbers: half of each.

Two kernels. `_pairs_backward` works on the side of V, a program a chunk: dA and dL, cut to the rows that meet
in each join, and those sums. `_intra_backward` does the rest, a program a chunk and slice of K. Tensor cores
take a loaded left operand from shared memory, where it costs no registers, but one that a program computes
from registers; hence pairs go through memory.

That is for the bounded gate. Without a bound 16 rows may span any range, and `intra_backward_unbounded`, in
the second kernel's place, goes on joining halves down to single rows.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from openk3.ops.kda.kernels.cards import generation
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
def _times_power(x, exponent):
    """Rows `[64, F]` times 2^exponent `[4, F]` of their block, in two steps: the factor alone may be too
    small for fp32 where the product is not."""
    half = tl.floor(0.5 * exponent)
    x = _by_block(x) * tl.exp2(half)[:, None, :] * tl.exp2(exponent - half)[:, None, :]
    return tl.reshape(x, [BLOCKS * BLOCK, x.shape[2]])


@triton.jit
def _laid_out(x, identity, PRECISION: tl.constexpr):
    """x `[64, F]` in fp32, exactly, with the threads that hold rows of products: one product hands it over,
    where the compiler would else move each intermediate from the layout of loads to that of products."""
    return tl.dot(identity, x, input_precision=PRECISION)


@triton.jit
def _sums(which, x, PRECISION: tl.constexpr):
    """Sums `[64, F]` of the rows of x that `which` `[64, 64]` (0 and 1) selects. Tensor cores add across
    threads; two bf16 terms hold 16 bits of x, and sums are fp32."""
    high = x.to(which.dtype)
    low = (x - high.to(tl.float32)).to(which.dtype)
    return tl.dot(which, low, tl.dot(which, high, input_precision=PRECISION), input_precision=PRECISION)


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _sigmoid_and_slope(x):
    """sigmoid(x) and its derivative, from one exponential that cannot overflow."""
    small = tl.exp(-tl.abs(x))
    large = 1.0 / (1.0 + small)
    return tl.where(x >= 0, large, small * large), small * large * large


@triton.jit
def _diagonal(x, row, column):
    """`[64]`, the diagonal of a product: sums over its inner axis, row by row."""
    return tl.sum(tl.where(row == column, x, 0.0), 1)


@triton.jit
def _scaled(rows, factor):
    """Operand rows times their block's power of two, or zero: exact."""
    return _times(rows.to(tl.float32), factor).to(rows.dtype)


@triton.jit
def _pairs_backward(
    q, k, v, o, d_o, d_v, errors, pairs, rows, cu_seqlens, first_chunk, chunk_sequence,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, EPS: tl.constexpr,
    WIDTHS: tl.constexpr,
):  # fmt: skip
    c, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    n = tl.load(chunk_sequence + c)
    if n < 0:
        return
    OPERAND = errors.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if errors.dtype.element_ty == tl.float32 else "tf32"
    i, d, e = tl.arange(0, CHUNK), tl.arange(0, K)[None, :], tl.arange(0, V)[None, :]
    row, column = i[:, None], i[None, :]
    start = (tl.load(cu_seqlens + n) + (c - tl.load(first_chunk + n)) * CHUNK).to(tl.int64)
    valid = i < tl.load(cu_seqlens + n + 1) - start
    inside = valid[:, None]
    chunk = c * H + h
    out = (start * H + h) * V
    values = row * (H * V) + e
    dO = tl.load(d_o + out + values, mask=inside, other=0.0)
    E = tl.load(errors + chunk * CHUNK * V + row * V + e)
    D = tl.load(d_v + out + values, mask=inside, other=0.0)
    D_q = tl.dot(dO, tl.trans(E), input_precision=PRECISION)
    D_k = -tl.dot(D, tl.trans(E), input_precision=PRECISION)
    own = _diagonal(D_q, row, column)
    along_w = -_diagonal(D_k, row, column)
    outputs = tl.load(o + out + values, mask=inside, other=0.0)
    along_q = _diagonal(tl.dot(dO, tl.trans(outputs), input_precision=PRECISION), row, column)
    v += start * stride_vt + h * stride_vh
    value = tl.load(v + row * stride_vt + e, mask=inside, other=0.0)
    along_v = _diagonal(tl.dot(D, tl.trans(value), input_precision=PRECISION), row, column)
    q += start * stride_qt + h * stride_qh
    wide = tl.load(q + row * stride_qt + d, mask=inside, other=0.0)
    q_norm = _diagonal(tl.dot(wide, tl.trans(wide), input_precision=PRECISION), row, column)
    k += start * stride_kt + h * stride_kh
    wide = tl.load(k + row * stride_kt + d, mask=inside, other=0.0)
    k_norm = _diagonal(tl.dot(wide, tl.trans(wide), input_precision=PRECISION), row, column)
    # What each row needs of these: its own pair, q . dq, k . dk, the inverse norms of q and k, and E . dE.
    rows += chunk * (6 * CHUNK) + i
    tl.store(rows, own)
    tl.store(rows + CHUNK, along_q)
    tl.store(rows + 2 * CHUNK, 2.0 * along_w - along_v)
    tl.store(rows + 3 * CHUNK, tl.rsqrt(q_norm + EPS))
    tl.store(rows + 4 * CHUNK, tl.rsqrt(k_norm + EPS))
    tl.store(rows + 5 * CHUNK, along_w)
    pairs += chunk * (2 * WIDTHS * CHUNK * CHUNK) + row * CHUNK + column
    apart = row ^ column  # below 2^n: in the same 2^n rows
    # dA and dL inside 64, 32, 16 rows; of the wider two a join uses the part that its factors leave.
    for level in tl.static_range(WIDTHS):
        inner = (row > column) & (apart < (CHUNK >> level))
        tl.store(pairs + 2 * level * CHUNK * CHUNK, tl.where(inner, D_q, 0.0).to(OPERAND))
        tl.store(pairs + (2 * level + 1) * CHUNK * CHUNK, tl.where(inner, D_k, 0.0).to(OPERAND))


@triton.jit
def _intra_backward(
    q, k, z, b, d_o, d_v, states, d_states, errors, A_log, dt_bias, pairs, rows, selections,
    d_q, d_k, d_z, d_b, d_A_log, d_bias, cu_seqlens, first_chunk, chunk_sequence,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_zt, stride_zh, stride_b, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr,
    BOUND: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = K // BK
    c, h = (tl.program_id(0) // SLICES).to(tl.int64), tl.program_id(1).to(tl.int64)
    part = tl.program_id(0) % SLICES
    n = tl.load(chunk_sequence + c)
    if n < 0:
        return
    OPERAND = states.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if states.dtype.element_ty == tl.float32 else "tf32"
    i, d, e = tl.arange(0, CHUNK), part * BK + tl.arange(0, BK), tl.arange(0, V)
    row, column = i[:, None], i[None, :]
    start = (tl.load(cu_seqlens + n) + (c - tl.load(first_chunk + n)) * CHUNK).to(tl.int64)
    valid = i < tl.load(cu_seqlens + n + 1) - start
    inside = valid[:, None]
    chunk = c * H + h
    square = row * CHUNK + column
    selections += square
    identity, onward = tl.load(selections), tl.load(selections + CHUNK * CHUNK)
    before = tl.load(selections + 2 * CHUNK * CHUNK)
    pairs += chunk * (6 * CHUNK * CHUNK) + square

    z += start * stride_zt + h * stride_zh
    z_rows = tl.load(z + row * stride_zt + d[None, :], mask=inside, other=0.0).to(OPERAND)
    q += start * stride_qt + h * stride_qh
    q_rows = tl.load(q + row * stride_qt + d[None, :], mask=inside, other=0.0).to(OPERAND)
    k += start * stride_kt + h * stride_kh
    k_rows = tl.load(k + row * stride_kt + d[None, :], mask=inside, other=0.0).to(OPERAND)
    tile = chunk * V * K + e[:, None] * K + d[None, :]
    S = tl.load(states + tile)
    dS = tl.load(d_states + tile)
    S_dS = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
    bias = tl.load(dt_bias + h * K + d).to(tl.float32)[None, :]
    rate = tl.exp(tl.minimum(tl.load(A_log + h).to(tl.float32), 60.0))
    rows += chunk * (6 * CHUNK) + row
    q_norm, k_norm = tl.load(rows + 3 * CHUNK), tl.load(rows + 4 * CHUNK)
    beta = tl.load(b + (start + row) * stride_b + h, mask=inside, other=0.0)
    beta = tl.sigmoid(beta.to(tl.float32))
    block = tl.arange(0, BLOCKS)[:, None]
    odd, upper = block % 2 == 1, block >= 2

    # Gate, anchors and operands.
    gate, _ = _sigmoid_and_slope(rate * (_laid_out(z_rows, identity, PRECISION) + bias))
    a = tl.where(inside, (BOUND * LOG2_E) * gate, 0.0)
    spans = tl.sum(_by_block(a), 1)
    end_0, end_1, end_2, G_end = tl.reduce(
        (
            tl.where(block < 1, spans, 0.0),
            tl.where(block < 2, spans, 0.0),
            tl.where(block < 3, spans, 0.0),
            spans,
        ),
        0,
        _add4,
    )
    starts = tl.where(block == 1, end_0[None, :], tl.where(block == 2, end_1[None, :], end_2[None, :]))
    starts = tl.where(block == 0, 0.0, starts)
    middle = tl.floor(starts + 0.5 * spans)
    G = _by_block(a - _sums(onward, a, PRECISION)) + (G_end[None, :] - middle)[:, None, :]
    G = tl.reshape(G, [CHUNK, BK])
    up = tl.exp2(G)
    unit_k = _laid_out(k_rows, identity, PRECISION) * k_norm
    readers_q = (_laid_out(q_rows, identity, PRECISION) * q_norm * scale * up).to(OPERAND)
    readers_k = (unit_k * up).to(OPERAND)
    writers = (unit_k * beta * tl.exp2(-G)).to(OPERAND)

    # Through the pairs: between blocks, then inside each.
    D_q, D_k = tl.load(pairs), tl.load(pairs + CHUNK * CHUNK)
    factor = tl.exp2(-tl.abs(middle - tl.floor(end_1)[None, :]))
    read, write = tl.where(upper, factor, 0.0), tl.where(upper, 0.0, factor)
    from_w = _scaled(writers, write)
    d_readers_q = _times(tl.dot(D_q, from_w, input_precision=PRECISION), read)
    d_readers_k = _times(tl.dot(D_k, from_w, input_precision=PRECISION), read)
    to_w = tl.dot(tl.trans(D_q), _scaled(readers_q, read), input_precision=PRECISION)
    to_w = tl.dot(tl.trans(D_k), _scaled(readers_k, read), to_w, input_precision=PRECISION)
    d_writers = _times(to_w, write)
    D_q, D_k = tl.load(pairs + 2 * CHUNK * CHUNK), tl.load(pairs + 3 * CHUNK * CHUNK)
    factor = tl.where(upper, end_2[None, :], end_0[None, :])
    factor = tl.exp2(-tl.abs(middle - tl.floor(factor)))
    read, write = tl.where(odd, factor, 0.0), tl.where(odd, 0.0, factor)
    from_w = _scaled(writers, write)
    d_readers_q += _times(tl.dot(D_q, from_w, input_precision=PRECISION), read)
    d_readers_k += _times(tl.dot(D_k, from_w, input_precision=PRECISION), read)
    to_w = tl.dot(tl.trans(D_q), _scaled(readers_q, read), input_precision=PRECISION)
    to_w = tl.dot(tl.trans(D_k), _scaled(readers_k, read), to_w, input_precision=PRECISION)
    d_writers += _times(to_w, write)
    D_q, D_k = tl.load(pairs + 4 * CHUNK * CHUNK), tl.load(pairs + 5 * CHUNK * CHUNK)
    d_readers_q = tl.dot(D_q, writers, d_readers_q, input_precision=PRECISION)
    d_readers_k = tl.dot(D_k, writers, d_readers_k, input_precision=PRECISION)
    d_writers = tl.dot(tl.trans(D_q), readers_q, d_writers, input_precision=PRECISION)
    d_writers = tl.dot(tl.trans(D_k), readers_k, d_writers, input_precision=PRECISION)
    d_G = -writers.to(tl.float32) * d_writers

    # Through the states. A row's write into the leaving state spans the rows after it: summed as such, as the
    # last row's, which spans none, may be far larger than all that do.
    values = (start * H + h) * V + row * (H * V) + e[None, :]
    dO = tl.load(d_o + values, mask=inside, other=0.0)
    D = tl.load(d_v + values, mask=inside, other=0.0)
    E = tl.load(errors + chunk * CHUNK * V + row * V + e[None, :])
    d_readers_q += _times_power(tl.dot(dO, S, input_precision=PRECISION), middle)
    d_readers_k -= _times_power(tl.dot(D, S, input_precision=PRECISION), middle)
    to_end = _times_power(tl.dot(E, dS, input_precision=PRECISION), G_end[None, :] - middle)
    d_g = _sums(before, writers.to(tl.float32) * to_end, PRECISION) + (tl.exp2(G_end) * S_dS)[None, :]
    d_writers += to_end

    # A row's own pair, beta, and the norms. The barrier parts these loads from the first ones: what is read
    # again from the cache need not stay in registers.
    tl.debug_barrier()
    z_rows = tl.load(z + row * stride_zt + d[None, :], mask=inside, other=0.0).to(OPERAND)
    q_rows = tl.load(q + row * stride_qt + d[None, :], mask=inside, other=0.0).to(OPERAND)
    k_rows = tl.load(k + row * stride_kt + d[None, :], mask=inside, other=0.0).to(OPERAND)
    down = 1.0 / up
    unit_q = _laid_out(q_rows, identity, PRECISION) * q_norm
    unit_k = _laid_out(k_rows, identity, PRECISION) * k_norm
    writes = unit_k * beta
    at = (start * H + h) * K + row * (H * K) + d[None, :]
    own, along_q, along_k = tl.load(rows), tl.load(rows + CHUNK), tl.load(rows + 2 * CHUNK)
    d_rows = scale * (d_readers_q * up + own * writes)
    d_rows = q_norm * (d_rows - along_q * unit_q)
    tl.store(d_q + at, d_rows.to(d_q.dtype.element_ty), mask=inside)
    d_rows = d_writers * down + (scale * own) * unit_q
    along_w = tl.load(rows + 5 * CHUNK, mask=row + part * CHUNK < CHUNK, other=0.0)
    d_beta = 0.5 * (1.0 - beta) * (beta * tl.sum(unit_k * d_rows, 1)[:, None] + along_w)
    tl.store(d_b + ((start + row) * H + h) * SLICES + part, d_beta, mask=inside)
    d_rows = k_norm * (beta * d_rows + d_readers_k * up - along_k * unit_k)
    tl.store(d_k + at, d_rows.to(d_k.dtype.element_ty), mask=inside)

    # The gate.
    d_G += (unit_q * scale * up).to(OPERAND).to(tl.float32) * d_readers_q
    d_G += (unit_k * up).to(OPERAND).to(tl.float32) * d_readers_k
    d_g += _sums(onward, d_G, PRECISION)
    logits = rate * (_laid_out(z_rows, identity, PRECISION) + bias)
    _, slope = _sigmoid_and_slope(logits)
    d_logits = tl.where(inside, BOUND * slope * d_g, 0.0)
    tl.store(d_A_log + chunk * SLICES + part, tl.sum(tl.sum(d_logits * logits, 1), 0))
    d_logits *= rate
    tl.store(d_bias + chunk * K + d, tl.sum(d_logits, 0))
    tl.store(d_z + at, d_logits.to(d_z.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class IntraTiles:
    """How a chunk is cut: columns of K a program takes, and its warps."""

    BK: int
    num_warps: int


@functools.cache
def _selections(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`[3, 64, 64]`: for each row itself, itself and those after it, those before it."""
    ones = torch.ones(CHUNK, CHUNK, dtype=dtype, device=device)
    return torch.stack([ones.triu().tril(), ones.triu(), ones.tril(-1)])


def intra_tiles(q: torch.Tensor) -> IntraTiles:
    """Slices of 16 columns: with mma.sync, those of 32 hold more than ten times as many registers in memory.

    On sm_90 and sm_100 two warps, too few for products of a warpgroup. With four, ptxas 12.8 makes addresses
    of right operands from one register taken for both words: in the last product of the bounded gate's
    kernel at K = 64, and in that of the gate without a bound at any size, which then gave gradients that were
    wrong by orders of magnitude. For sm_100, Triton 3.6 fails.
    """
    if not q.is_cuda:
        return IntraTiles(BK=32, num_warps=4)
    return IntraTiles(BK=16, num_warps=2 if generation(q) in (9, 10) else 4)


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
    lower_bound: float | None,
    scale: float,
    *,
    tiles: IntraTiles | None = None,
) -> InputGradients:
    """From the scans' results to the gradients of the raw inputs.

    Args:
        q, k, z: raw `[T, H, K]`, v `[T, H, V]`, last axis contiguous; b `[T, H]`; A_log `[H]` and dt_bias
            `[H, K]` fp32.
        o: the outputs `[T, H, V]`, d_o their gradient, d_v the values' (of `scan_backward`); contiguous.
        states: S entering each chunk, d_states the gradient to what leaves it, `[NC, H, V, K]` contiguous.
        errors: E `[NC, H, 64, V]`.

    Returns:
        The gradients, each contiguous. Those of b, A_log and dt_bias are summed over slices and chunks in a
        fixed order.
    """
    T, H, K = q.shape
    V = v.shape[-1]
    tiles = tiles or intra_tiles(q)
    d_q, d_k, d_z = (x.new_empty(T, H, K) for x in (q, k, z))
    slices = K // tiles.BK
    d_b = q.new_empty(T, H, slices, dtype=torch.float32)
    d_A_log = q.new_zeros(plan.chunks, H, slices, dtype=torch.float32)
    d_bias = q.new_zeros(plan.chunks, H, K, dtype=torch.float32)
    # Joining halves takes all pairs and finds those of its levels, where blocks have them stored apart.
    widths = 1 if lower_bound is None else 3
    pairs = states.new_empty(plan.chunks, H, 2 * widths, CHUNK, CHUNK)
    rows = q.new_empty(plan.chunks, H, 6, CHUNK, dtype=torch.float32)
    tables = plan.cu_seqlens, plan.first_chunk, plan.chunk_sequence
    _pairs_backward[(plan.chunks, H)](
        q, k, v, o, d_o, d_v, errors, pairs, rows, *tables,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        H=H, K=K, V=V, CHUNK=CHUNK, EPS=L2_EPS, WIDTHS=widths, num_warps=4,
    )  # fmt: skip
    gradients = d_q, d_k, d_z, d_b, d_A_log, d_bias
    inputs = q, k, z, b, d_o, d_v, states, d_states, errors, A_log, dt_bias, pairs, rows
    strides = *q.stride()[:2], *k.stride()[:2], *z.stride()[:2], b.stride(0)
    sizes = {"H": H, "K": K, "V": V, "BK": tiles.BK, "CHUNK": CHUNK, "num_warps": tiles.num_warps}
    if lower_bound is None:
        from openk3.ops.kda.kernels.halves import spans_table
        from openk3.ops.kda.kernels.intra_backward_unbounded import intra_backward_unbounded

        intra_backward_unbounded[(plan.chunks * slices, H)](
            *inputs, spans_table(states.dtype, states.device), *gradients, *tables, *strides, scale, **sizes
        )
    else:
        _intra_backward[(plan.chunks * slices, H)](
            *inputs, _selections(states.dtype, states.device), *gradients, *tables, *strides, scale,
            BOUND=lower_bound, **sizes,
        )  # fmt: skip
    return InputGradients(d_q, d_k, d_z, d_b.sum(2).to(b.dtype), d_A_log.sum((0, 2)), d_bias.sum(0))
