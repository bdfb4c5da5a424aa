"""From raw inputs to what the scan over chunks needs: norms, gate, and all pairs of tokens inside each chunk.

For a chunk of 64 tokens, with a the log2 decays, G their sum from the chunk's first row through a row, and
w_j = beta_j k_j (report §2.1.1 eq. 3-5):

    qd_i = q_i 2^G_i          kd_i = k_i 2^G_i          ke_j = w_j 2^(G_end - G_j)         decay = 2^G_end
    A_ij = q_i . w_j 2^(G_i - G_j), i >= j              L_ij = k_i . w_j 2^(G_i - G_j), i > j
    X = (I + L)^-1

Pairs are formed by dense products on tiles of 32 rows. With the gate bounded by -5, G spans at most 231 in a
tile, so 2^(G + 115) and 2^(-G - 115) stay within bf16's exponents, and their products are exact in scale.
Between the two tiles, the later's rows count from its start, the earlier's to its end: no factor exceeds 1.
No row reads a later row's gate, so that results are bitwise causal. Without a bound no shift is safe:
`prepare_unbounded` joins halves instead.

X is made by joining diagonal blocks of h = 1, 2, 4, ... rows: X <- X - X L_h X with L_h the blocks of L below
the diagonal that this level joins. That is forward substitution by blocks: no entry ever exceeds 1.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from openk3.ops.kda.hopper import hopper_fits
from openk3.ops.kda.kernels.plan import CHUNK, ChunkPlan

L2_EPS = 1e-6
LOG2_E = tl.constexpr(1.4426950408889634)
TILE = tl.constexpr(32)


@dataclass(frozen=True)
class Prepared:
    """Chunks `[NC, H, ...]`, in the plan's numbering; rows beyond a sequence's end are zero."""

    qd: torch.Tensor  # [NC, H, 64, K]
    kd: torch.Tensor  # [NC, H, 64, K]
    ke: torch.Tensor  # [NC, H, 64, K]
    inverse: torch.Tensor  # X [NC, H, 64, 64]
    attention: torch.Tensor  # A [NC, H, 64, 64]
    decay: torch.Tensor  # [NC, H, K] fp32


@triton.jit
def inverse_norm(rows, EPS: tl.constexpr):
    """1 / sqrt(sum x^2 + eps) of each row."""
    return tl.rsqrt(tl.sum(rows * rows, 1) + EPS)


@triton.jit
def log2_decay(z, exp_A, bias, BOUND: tl.constexpr):
    return (BOUND * LOG2_E) * tl.sigmoid(exp_A * (z + bias))


@triton.jit
def _tile(
    q, k, z, b, token, end, exp_A, bias, column, stride_q, stride_k, stride_z, stride_b, scale,
    BOUND: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """One tile of 32 rows: pairs' operands with the symmetric shift, rows from its start and to its end."""
    SHIFT: tl.constexpr = -(TILE // 2) * BOUND * LOG2_E
    valid = token < end
    inside = valid[:, None]
    z_rows = tl.load(z + token[:, None] * stride_z + column[None, :], mask=inside, other=0.0).to(tl.float32)
    k_rows = tl.load(k + token[:, None] * stride_k + column[None, :], mask=inside, other=0.0).to(tl.float32)
    q_rows = tl.load(q + token[:, None] * stride_q + column[None, :], mask=inside, other=0.0).to(tl.float32)
    beta = tl.sigmoid(tl.load(b + token * stride_b, mask=valid, other=0.0).to(tl.float32))
    a = tl.where(inside, log2_decay(z_rows, exp_A, bias[None, :], BOUND), 0.0)
    G = tl.cumsum(a, 0)
    total = tl.sum(a, 0)
    G += SHIFT
    up = tl.exp2(G)
    k_rows *= inverse_norm(k_rows, EPS)[:, None]
    left_q = q_rows * (inverse_norm(q_rows, EPS) * scale)[:, None] * up
    left_k = k_rows * up
    # Without the write strength, which may be small: where gates are near 0 no exponents are left for it.
    right = k_rows * tl.exp2(-G)
    to_end = right * tl.exp2(total + SHIFT)[None, :] * beta[:, None]
    right = right.to(OPERAND)
    i = tl.arange(0, TILE)
    PRECISION: tl.constexpr = "ieee" if OPERAND == tl.float32 else "tf32"
    A = tl.dot(left_q.to(OPERAND), tl.trans(right), input_precision=PRECISION)
    L = tl.dot(left_k.to(OPERAND), tl.trans(right), input_precision=PRECISION)
    A = tl.where(i[:, None] >= i[None, :], A * beta[None, :], 0.0)
    L = tl.where(i[:, None] > i[None, :], L * beta[None, :], 0.0)
    DOWN: tl.constexpr = 2.0**-SHIFT
    return left_q * DOWN, left_k * DOWN, to_end, tl.exp2(total), A, L


@triton.jit
def _inverse(L, PRODUCT: tl.constexpr):
    """(I + L)^-1 of a strictly lower `[32, 32]`."""
    PRECISION: tl.constexpr = "ieee" if PRODUCT == tl.float32 else "tf32"
    i = tl.arange(0, TILE)[:, None]
    j = tl.arange(0, TILE)[None, :]
    X = tl.where(i == j, 1.0, tl.where((i // 2 == j // 2) & (i > j), -L, 0.0))
    for level in tl.static_range(1, 5):
        joined = (i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level)
        below = tl.where(joined, L, 0.0).to(PRODUCT)
        before = X.to(PRODUCT)
        X -= tl.dot(
            tl.dot(before, below, input_precision=PRECISION).to(PRODUCT), before, input_precision=PRECISION
        )
    return X


@triton.jit
def _prepare(
    q, k, z, b, A_log, dt_bias, cu_seqlens, first_chunk, chunk_sequence,
    qd, kd, ke, inverse, attention, decay,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_zt, stride_zh, stride_b, scale,
    H: tl.constexpr, K: tl.constexpr, BOUND: tl.constexpr, EPS: tl.constexpr,
    OPERAND: tl.constexpr, PRODUCT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    c, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    n = tl.load(chunk_sequence + c)
    if n < 0:
        return
    start = tl.load(cu_seqlens + n) + (c - tl.load(first_chunk + n)) * CHUNK
    end = tl.load(cu_seqlens + n + 1)
    i, d = tl.arange(0, TILE), tl.arange(0, K)
    exp_A = tl.exp(tl.minimum(tl.load(A_log + h).to(tl.float32), 60.0))
    bias = tl.load(dt_bias + h * K + d).to(tl.float32)
    q += h * stride_qh
    k += h * stride_kh
    z += h * stride_zh
    b += h
    q0, k0, e0, p0, A0, L0 = _tile(
        q, k, z, b, start + i, end, exp_A, bias, d, stride_qt, stride_kt, stride_zt, stride_b, scale,
        BOUND, K, EPS, OPERAND,
    )  # fmt: skip
    q1, k1, e1, p1, A1, L1 = _tile(
        q, k, z, b, start + TILE + i, end, exp_A, bias, d, stride_qt, stride_kt, stride_zt, stride_b, scale,
        BOUND, K, EPS, OPERAND,
    )  # fmt: skip
    PRECISION: tl.constexpr = "ieee" if OPERAND == tl.float32 else "tf32"
    earlier = tl.trans(e0.to(OPERAND))
    A10 = tl.dot(q1.to(OPERAND), earlier, input_precision=PRECISION)
    L10 = tl.dot(k1.to(OPERAND), earlier, input_precision=PRECISION)

    chunk = c * H + h
    rows = chunk * CHUNK * K + i[:, None] * K + d[None, :]
    tl.store(qd + rows, q0.to(OPERAND))
    tl.store(kd + rows, k0.to(OPERAND))
    tl.store(ke + rows, (e0 * p1[None, :]).to(OPERAND))
    rows += TILE * K
    tl.store(qd + rows, (q1 * p0[None, :]).to(OPERAND))
    tl.store(kd + rows, (k1 * p0[None, :]).to(OPERAND))
    tl.store(ke + rows, e1.to(OPERAND))
    tl.store(decay + chunk * K + d, p0 * p1)

    j = tl.arange(0, TILE)
    block = chunk * CHUNK * CHUNK + i[:, None] * CHUNK + j[None, :]
    zero = tl.zeros([TILE, TILE], OPERAND)
    tl.store(attention + block, A0.to(OPERAND))
    tl.store(attention + block + TILE, zero)
    tl.store(attention + block + TILE * CHUNK, A10.to(OPERAND))
    tl.store(attention + block + TILE * CHUNK + TILE, A1.to(OPERAND))
    X0 = _inverse(L0, PRODUCT)
    X1 = _inverse(L1, PRODUCT)
    P: tl.constexpr = "ieee" if PRODUCT == tl.float32 else "tf32"
    below = tl.dot(X1.to(PRODUCT), L10.to(PRODUCT), input_precision=P)
    X10 = -tl.dot(below.to(PRODUCT), X0.to(PRODUCT), input_precision=P)
    tl.store(inverse + block, X0.to(OPERAND))
    tl.store(inverse + block + TILE, zero)
    tl.store(inverse + block + TILE * CHUNK, X10.to(OPERAND))
    tl.store(inverse + block + TILE * CHUNK + TILE, X1.to(OPERAND))


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    plan: ChunkPlan,
    lower_bound: float | None,
    scale: float,
    *,
    hopper: bool | None = None,
) -> Prepared:
    """Raw q, k, z `[T, H, K]` (last axis contiguous) and b `[T, H]` to chunks, in q's dtype.

    `lower_bound`: of the gate; None for the gate without one, which has a kernel of its own for every card.
    `hopper`: which of the bounded gate's two; by default Hopper's where it fits (bf16, K = 128, sm_90).
    """
    _, H, K = q.shape
    qd, kd, ke = (q.new_empty(plan.chunks, H, CHUNK, K) for _ in range(3))
    inverse, attention = (q.new_empty(plan.chunks, H, CHUNK, CHUNK) for _ in range(2))
    decay = q.new_empty(plan.chunks, H, K, dtype=torch.float32)
    half = q.dtype == torch.bfloat16
    inputs = q, k, z, b, A_log, dt_bias, plan.cu_seqlens, plan.first_chunk, plan.chunk_sequence
    outputs = qd, kd, ke, inverse, attention, decay
    strides = *q.stride()[:2], *k.stride()[:2], *z.stride()[:2], b.stride(0)
    types = {"OPERAND": tl.bfloat16 if half else tl.float32, "PRODUCT": tl.float16 if half else tl.float32}
    if hopper is None:
        hopper = hopper_fits(q, K)
    if lower_bound is None:
        from openk3.ops.kda.kernels.halves import spans_table
        from openk3.ops.kda.kernels.prepare_unbounded import prepare_unbounded

        prepare_unbounded[(plan.chunks, H)](
            *inputs, spans_table(q.dtype, q.device), *outputs, *strides, scale,
            H=H, K=K, BK=32 if half else 16, EPS=L2_EPS, **types, CHUNK=CHUNK, num_warps=4, num_stages=1,
        )  # fmt: skip
    elif hopper:
        from openk3.ops.kda.kernels.prepare_hopper import prepare_hopper

        prepare_hopper[(plan.chunks, H)](
            *inputs, *outputs, scale, *strides, H=H, BOUND=lower_bound, EPS=L2_EPS, num_warps=4
        )
    else:
        _prepare[(plan.chunks, H)](
            *inputs, *outputs, *strides, scale, H=H, K=K, BOUND=lower_bound, EPS=L2_EPS, **types,
            CHUNK=CHUNK, num_warps=4, num_stages=1,
        )  # fmt: skip
    return Prepared(*outputs)
