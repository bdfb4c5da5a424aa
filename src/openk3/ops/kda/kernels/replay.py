"""Speculative verification of one KDA layer by replay: one read and one write of the state (report §5.4.2).

A window is what the target model sees in one step of speculation: the bonus token, which is known to be
right, and the drafts after it. Only once the outputs are sampled is it known how many of its tokens stay. So
a step writes none of its window into the state; it keeps the window's raw projections, and the next step,
told how many tokens were accepted, replays those first:

    S -> replay of the accepted tokens, as `decode` does it -> S written -> outputs of the new window

The replay is the arithmetic of `decode`, token by token, so the state is the same to the bit. The window
needs outputs only. With S the state before it, G_i the sum of log2 decays through token i, kd_i = k_i 2^G_i and
qd_i = q_i 2^G_i (the chunkwise form, report §2.1.1 eq. 4):

    L_ij = beta_j k_i . k_j 2^(G_i - G_j), i > j          A_ij = beta_j q_i . k_j 2^(G_i - G_j), i >= j
    E = (I + L)^-1 (V - kd S^T)                           O = qd S^T + A E

with a few tensor-core products, each in three terms: what they drop is 2^-16 of the outputs, and outputs are
rounded to 2^-9. Pairs take each token's log decay as at least -20: what that adds is below e^-20 of a value,
and 2^(G_i - G_j) splits into two factors that fp32 holds.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from openk3.ops.kda.kernels.decode import NORM_EPS, against, head_rate, log_decay, projected

Tensor = torch.Tensor

LONGEST_WINDOW = 8
PAIR_FLOOR = tl.constexpr(-20.0)  # natural log; 7 tokens of it, halved by the shift, stay within e^+-70
LOG2_E = tl.constexpr(1.4426950408889634)
ROWS = tl.constexpr(16)  # a window padded to the smallest tile of a product
LAUNCH = {
    128: {"num_warps": 4, "enable_fp_fusion": False},
    64: {"num_warps": 4, "enable_fp_fusion": False},
}


@triton.jit
def _convolved(new, old, taps, C, W: tl.constexpr):
    """Convolution and SiLU of the window, `[ROWS, K]`, zero beyond W; pointers are `[1, K]`, one kind's."""
    r = tl.arange(0, ROWS)[:, None]
    y = tl.load(taps) * 0.0 + r * 0.0
    for t in tl.static_range(4):
        i = r + (t - 3)
        x = tl.load(new + i * C, (i >= 0) & (r < W), 0.0) + tl.load(old + (i + 3) * C, (i < 0) & (r < W), 0.0)
        y = tl.fma(x.to(tl.float32), tl.load(taps + t * C).to(tl.float32), y)
    return y * tl.sigmoid(y)


@triton.jit
def _product(x, y):
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def _inverse(L):
    """(I + L)^-1 `[ROWS, ROWS]` for strictly lower L with 8 rows: blocks of 1, 2 and 4 rows joined."""
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, ROWS)[None, :]
    X = tl.where(i == j, 1.0, 0.0)
    for level in tl.static_range(3):
        below = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
        X -= _product(X, _product(tl.where(below, L, 0.0), X))
    return X


@triton.jit
def _verify(
    qkv,  # [N, W, 3 H K]
    z,  # [N, W, H, K]
    b,  # [N, W, H]
    gate,  # [N, W, H, V]
    state,  # [slots, H, V, K]
    tail,  # [slots, 3, 3 H K]
    past_qkv,  # [slots, P, 3 H K]
    past_z,  # [slots, P, H, K]
    past_b,  # [slots, P, H]
    accepted,  # [N]
    slots,  # [N]
    taps,  # [4, 3 H K]
    A_log,  # [H]
    dt_bias,  # [H, K]
    norm_weight,  # [V]
    out,  # [N, W, H V]
    scale,
    lower_bound,
    norm_eps,
    l2_eps,
    H: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    i = tl.arange(0, K)
    r = tl.arange(0, ROWS)
    live = r < W
    cell = ((n * W + r[:, None]) * H + h) * K + i[None, :]  # of z, gate and out
    slot = tl.load(slots + n).to(tl.int64)
    if slot < 0:
        tl.store(out + cell, tl.zeros([ROWS, K], out.dtype.element_ty), live[:, None])
        return
    cells = state + (slot * H + h) * (K * K) + i[:, None] * K + i[None, :]
    S = tl.load(cells)

    # The accepted tokens of the past window, in the arithmetic of `decode`; loads run one token ahead.
    C: tl.constexpr = 3 * H * K
    kind = tl.arange(0, 4)[:, None]
    channel = (kind * H + h) * K + i[None, :]
    known = kind < 3
    old = tail + slot * (3 * C) + channel
    w0 = tl.load(taps + channel, known, 0.0).to(tl.float32)
    w1 = tl.load(taps + C + channel, known, 0.0).to(tl.float32)
    w2 = tl.load(taps + 2 * C + channel, known, 0.0).to(tl.float32)
    w3 = tl.load(taps + 3 * C + channel, known, 1.0).to(tl.float32)
    x0 = tl.load(old, known, 0.0)
    x1 = tl.load(old + C, known, 0.0)
    x2 = tl.load(old + 2 * C, known, 0.0)
    gain = tl.load(norm_weight + i).to(tl.float32)[None, :]
    bias = tl.load(dt_bias + h * K + i).to(tl.float32)
    rate = head_rate(A_log, h)
    past_row = slot * P
    next_x = tl.load(past_qkv + past_row * C + channel, known, 0.0)
    next_z = tl.load(past_z + (past_row * H + h) * K + i)
    next_b = tl.load(past_b + past_row * H + h)
    count = tl.minimum(tl.load(accepted + n), P)
    for t in range(count):
        x3, u, beta = next_x, next_z.to(tl.float32) + bias, tl.sigmoid(next_b.to(tl.float32))
        following = past_row + tl.minimum(t + 1, P - 1)
        next_x = tl.load(past_qkv + following * C + channel, known, 0.0)
        next_z = tl.load(past_z + (following * H + h) * K + i)
        next_b = tl.load(past_b + following * H + h)
        _, k, v, _ = projected(x0, x1, x2, x3, w0, w1, w2, w3, gain, scale, l2_eps, K)
        S = S * tl.exp(log_decay(u, rate, lower_bound, BOUNDED))[None, :]
        error = beta * (v - against(S, k, K))
        S = tl.fma(error[:, None], k[None, :], S)
        x0, x1, x2 = x1, x2, x3
    if count > 0:
        tl.store(cells, S)

    # The window takes the place of the past one; all threads must have read that, and see the tail, first.
    row = n * W + r
    raw_z = tl.load(z + cell, live[:, None], 0.0)
    raw_b = tl.load(b + row * H + h, live, 0.0)
    tl.debug_barrier()
    tl.store(old, x0, known)
    tl.store(old + C, x1, known)
    tl.store(old + 2 * C, x2, known)
    tl.debug_barrier()
    for w in tl.static_range(W):
        x = tl.load(qkv + (n * W + w) * C + channel, known, 0.0)
        tl.store(past_qkv + (past_row + w) * C + channel, x, known)
    tl.store(past_z + ((past_row + r[:, None]) * H + h) * K + i[None, :], raw_z, live[:, None])
    tl.store(past_b + (past_row + r) * H + h, raw_b, live)

    q_channel = h * K + i[None, :]
    new = qkv + n * W * C + q_channel
    before = tail + slot * (3 * C) + q_channel
    q = _convolved(new, before, taps + q_channel, C, W)
    k = _convolved(new + H * K, before + H * K, taps + H * K + q_channel, C, W)
    v = _convolved(new + 2 * H * K, before + 2 * H * K, taps + 2 * H * K + q_channel, C, W)
    q = q * (scale * tl.rsqrt(tl.sum(q * q, 1) + l2_eps))[:, None]
    k = k * tl.rsqrt(tl.sum(k * k, 1) + l2_eps)[:, None]
    beta = tl.sigmoid(raw_b.to(tl.float32))
    g = log_decay(raw_z.to(tl.float32) + bias[None, :], rate, lower_bound, BOUNDED)
    g = tl.where(live[:, None], g, 0.0)
    decay = tl.exp2(tl.cumsum(g, 0) * LOG2_E)

    # Relative to the first token, shifted by half of what later ones can add at most: no token's gate.
    floor = tl.maximum(lower_bound, PAIR_FLOOR)
    half = -0.5 * (W - 1) * floor
    since_first = tl.cumsum(tl.where(r[:, None] == 0, 0.0, tl.maximum(g, floor)), 0) + half
    left = tl.exp2(since_first * LOG2_E)
    right = tl.trans(k * tl.exp2(-since_first * LOG2_E))
    L = tl.where(r[:, None] > r[None, :], _product(k * left, right) * beta[None, :], 0.0)
    A = tl.where(r[:, None] >= r[None, :], _product(q * left, right) * beta[None, :], 0.0)

    unexpected = tl.trans(v) - _product(S, tl.trans(k * decay))
    errors = _product(unexpected, tl.trans(_inverse(L)))
    o = _product(S, tl.trans(q * decay)) + _product(errors, tl.trans(A))
    o = tl.trans(o * tl.rsqrt(tl.sum(o * o, 0) / K + norm_eps)[None, :])
    y = o * gain * tl.sigmoid(tl.load(gate + cell, live[:, None], 0.0).to(tl.float32))
    tl.store(out + cell, y.to(out.dtype.element_ty), live[:, None])


@torch.library.custom_op("openk3::kda_verify", mutates_args=("state", "tail", "past_qkv", "past_z", "past_b"))
def verify(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    gate: Tensor,
    state: Tensor,
    tail: Tensor,
    past_qkv: Tensor,
    past_z: Tensor,
    past_b: Tensor,
    accepted: Tensor,
    slots: Tensor,
    taps: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    lower_bound: float | None,
    scale: float,
) -> Tensor:
    """See `openk3.ops.kda.decoding.kda_verify`."""
    N, W, H, K = z.shape
    out = qkv.new_empty(N, W, H * K)
    if N:
        _verify[(N, H)](
            qkv, z, b, gate, state, tail, past_qkv, past_z, past_b, accepted, slots,
            taps, A_log, dt_bias, norm_weight, out,
            scale, float("-inf") if lower_bound is None else lower_bound, norm_eps, NORM_EPS,
            H=H, K=K, W=W, P=past_qkv.shape[1], BOUNDED=lower_bound is not None, **LAUNCH[K],
        )  # fmt: skip
    return out


@verify.register_fake
def _(
    qkv, z, b, gate, state, tail, past_qkv, past_z, past_b, accepted, slots,
    taps, A_log, dt_bias, norm_weight, norm_eps, lower_bound, scale,
):  # fmt: skip
    N, W, H, K = z.shape
    return qkv.new_empty(N, W, H * K)
