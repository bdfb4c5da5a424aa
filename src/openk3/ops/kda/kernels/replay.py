"""Speculative verification of one KDA layer by replay: one read and one write of the state (report §5.4.2).

A window is what the target model sees in one step of speculation: the bonus token, which is known to be
right, and the drafts after it. Only once the outputs are sampled is it known how many of its tokens stay. So
a step writes none of its window into the state; it keeps the window's raw projections, and the next step,
told how many tokens were accepted, replays those first:

    S -> replay of the accepted tokens, as `decode` does it -> S written -> outputs of the new window

The replay is the arithmetic of `decode`, token by token, so the state is the same to the bit. The window
needs outputs only. With S the state before it, G_i the sum of log2 decays through token i, kd_i = k_i 2^G_i
and qd_i = q_i 2^G_i (the chunkwise form, report §2.1.1 eq. 4):

    L_ij = beta_j k_i . k_j 2^(G_i - G_j), i > j          A_ij = beta_j q_i . k_j 2^(G_i - G_j), i >= j
    E = (I + L)^-1 (V - kd S^T)                           O = qd S^T + A E

with one product for all pairs and one against the state, each in three bf16 terms: what these drop is 2^-16
of a value, and outputs are rounded to 2^-9. E is found by forward substitution. Pairs take each token's log
decay as at least -20: what that adds is below e^-20 of a value, and 2^(G_i - G_j) splits into two factors
that fp32 holds.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from openk3.ops.kda.hopper import hopper_fits
from openk3.ops.kda.kernels.decode import (
    NORM_EPS,
    against,
    along_rows,
    gates,
    head_rate,
    log_decay,
    projected,
    state_cells,
)
from openk3.ops.kernel_operator import kernel_operator

Tensor = torch.Tensor

LONGEST_WINDOW = 8
PAIR_FLOOR = tl.constexpr(-20.0)  # natural log; 7 tokens of it, halved by the shift, stay within e^+-70
LOG2_E = tl.constexpr(1.4426950408889634)
ROWS = tl.constexpr(LONGEST_WINDOW)
LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
# A few registers less than two programs an SM leave: windows of 8 tokens in 0.173 ms and not 0.184.
HOPPER = LAUNCH | {"maxnreg": 248}


@triton.jit
def _convolved(new, old, taps, r, C, W: tl.constexpr):
    """Convolution and SiLU of a window, zero beyond W. Pointers to the channels of each row, r its token."""
    y = r * 0.0
    for t in tl.static_range(4):
        i = r + (t - 3)
        x = tl.load(new + i * C, (i >= 0) & (r < W), 0.0) + tl.load(old + (i + 3) * C, (i < 0) & (r < W), 0.0)
        y = tl.fma(x.to(tl.float32), tl.load(taps + t * C).to(tl.float32), y)
    return y * tl.sigmoid(y)


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
    DOT: tl.constexpr,
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
    cells = state_cells(state, slot, h, H, K)
    S = tl.load(cells)
    tl.debug_barrier()  # as in `decode`

    # The accepted tokens of the past window, in the arithmetic of `decode`; loads run one token ahead.
    C: tl.constexpr = 3 * H * K
    kind = tl.arange(0, 4)[:, None]
    channel = (kind * H + h) * K + i[None, :]
    known = kind < 3
    old = tail + slot * (3 * C) + channel
    w0 = tl.load(taps + channel, known, 0.0).to(tl.float32)
    w1 = tl.load(taps + C + channel, known, 0.0).to(tl.float32)
    w2 = tl.load(taps + 2 * C + channel, known, 0.0).to(tl.float32)
    w3 = tl.load(taps + 3 * C + channel, known, 0.0).to(tl.float32)
    x0 = tl.load(old, known, 0.0)
    x1 = tl.load(old + C, known, 0.0)
    x2 = tl.load(old + 2 * C, known, 0.0)
    decays = tl.arange(0, 2)[:, None] == 0  # the other row would be the output gate
    bias = tl.load(dt_bias + h * K + i[None, :], decays, 0.0).to(tl.float32)
    rate = head_rate(A_log, h)
    past_row = slot * P
    next_x = tl.load(past_qkv + past_row * C + channel, known, 0.0)
    next_z = tl.load(past_z + (past_row * H + h) * K + i[None, :], decays, 0.0)
    next_b = tl.load(past_b + past_row * H + h)
    count = tl.minimum(tl.load(accepted + n), P)
    for t in range(count):
        x3, logits, beta = next_x, next_z, tl.sigmoid(next_b.to(tl.float32))
        following = past_row + tl.minimum(t + 1, P - 1)
        next_x = tl.load(past_qkv + following * C + channel, known, 0.0)
        next_z = tl.load(past_z + (following * H + h) * K + i[None, :], decays, 0.0)
        next_b = tl.load(past_b + following * H + h)
        _, k, v = projected(x0, x1, x2, x3, w0, w1, w2, w3, scale, l2_eps, K)
        decay, _ = gates(logits, bias, 0.0, rate, lower_bound, BOUNDED)
        S = S * along_rows(decay, K)
        error = beta * (v - against(S, k, K))
        S = tl.fma(error[:, None, None], along_rows(k, K), S)
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

    # Keys and queries go together, `[2, ROWS, K]`: both meet the state, and the keys by their decay.
    which = tl.arange(0, 2)[:, None, None]
    token = r[None, :, None]
    key_query = ((1 - which) * H + h) * K + i[None, None, :]
    new = qkv + n * W * C
    before = tail + slot * (3 * C)
    kq = _convolved(new + key_query, before + key_query, taps + key_query, token + which * 0, C, W)
    inv = tl.rsqrt(tl.sum(kq * kq, 2) + l2_eps)[:, :, None]
    kq = kq * tl.where(which == 1, scale * inv, inv)
    value = (2 * H + h) * K + i[None, :]
    v = _convolved(new + value, before + value, taps + value, r[:, None], C, W)
    beta = tl.sigmoid(raw_b.to(tl.float32))
    u = raw_z.to(tl.float32) + tl.load(dt_bias + h * K + i[None, :]).to(tl.float32)
    g = log_decay(u, rate, lower_bound, BOUNDED)
    g = tl.where(live[:, None], g, 0.0) * LOG2_E

    # Relative to the first token, shifted by half of what later ones can add at most: no token's gate.
    floor = tl.maximum(lower_bound, PAIR_FLOOR) * LOG2_E
    shift = -0.5 * (W - 1) * floor
    since_first = tl.cumsum(tl.where(r[:, None] == 0, 0.0, tl.maximum(g, floor)), 0) + shift
    left = tl.reshape(kq * tl.exp2(since_first)[None, :, :], [2 * ROWS, K])
    right = tl.sum(tl.where(which == 0, kq, 0.0), 0) * tl.exp2(-since_first)
    pairs = tl.reshape(tl.dot(left, tl.trans(right), input_precision=DOT), [2, ROWS, ROWS])
    pairs *= beta[None, None, :]
    L = tl.sum(tl.where((which == 0) & (token > r[None, None, :]), pairs, 0.0), 0)
    A = tl.sum(tl.where((which == 1) & (token >= r[None, None, :]), pairs, 0.0), 0)

    entering = tl.reshape(kq * tl.exp2(tl.cumsum(g, 0))[None, :, :], [2 * ROWS, K])
    read = tl.dot(tl.reshape(S, [K, K]), tl.trans(entering), input_precision=DOT)
    from_k, o = tl.split(tl.permute(tl.reshape(read, [K, 2, ROWS]), [0, 2, 1]))
    errors = tl.trans(v) - from_k
    for j in tl.static_range(W):  # forward substitution
        error = tl.sum(tl.where(r[None, :] == j, errors, 0.0), 1)[:, None]
        errors -= error * tl.sum(tl.where(r[None, :] == j, L, 0.0), 1)[None, :]
        o += error * tl.sum(tl.where(r[None, :] == j, A, 0.0), 1)[None, :]
    o = tl.trans(o * tl.rsqrt(tl.sum(o * o, 0) / K + norm_eps)[None, :])
    gain = tl.load(norm_weight + i[None, :]).to(tl.float32)
    y = o * gain * tl.sigmoid(tl.load(gate + cell, live[:, None], 0.0).to(tl.float32))
    tl.store(out + cell, y.to(out.dtype.element_ty), live[:, None])


@kernel_operator("openk3::kda_verify", mutates_args=("state", "tail", "past_qkv", "past_z", "past_b"))
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
    if N and hopper_fits(qkv, K):
        from openk3.ops.kda.kernels.decode_hopper import PAIR_FLOOR, verify_hopper

        P = past_qkv.shape[1]
        bound = float("-inf") if lower_bound is None else lower_bound
        span = -max(bound, PAIR_FLOOR.value) * math.log2(math.e) * (4 if P <= 4 else 8)
        verify_hopper[(N, H)](
            qkv, z, b, gate, state, tail, past_qkv, past_z, past_b, accepted, slots,
            taps, A_log, dt_bias, norm_weight, out, scale, bound, norm_eps, NORM_EPS,
            H=H, W=W, P=P, BOUNDED=lower_bound is not None, SHIFT=math.ceil(span / 2), **HOPPER,
        )  # fmt: skip
    elif N:
        _verify[(N, H)](
            qkv, z, b, gate, state, tail, past_qkv, past_z, past_b, accepted, slots,
            taps, A_log, dt_bias, norm_weight, out,
            scale, float("-inf") if lower_bound is None else lower_bound, norm_eps, NORM_EPS,
            H=H, K=K, W=W, P=past_qkv.shape[1], BOUNDED=lower_bound is not None,
            DOT="bf16x3" if qkv.is_cuda else "ieee", **LAUNCH,  # the interpreter knows no bf16x3
        )  # fmt: skip
    return out


@verify.register_fake
def _(
    qkv, z, b, gate, state, tail, past_qkv, past_z, past_b, accepted, slots,
    taps, A_log, dt_bias, norm_weight, norm_eps, lower_bound, scale,
):  # fmt: skip
    N, W, H, K = z.shape
    return qkv.new_empty(N, W, H * K)
