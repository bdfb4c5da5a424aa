"""One token of each sequence through a KDA layer, between its projections: one kernel (report §2.1.1).

Convolution and SiLU, L2 norm, gate, beta, recurrence and gated RMSNorm. A program is one head of one sequence
and holds that head's state whole, since the norm at the end needs every value channel: 64 KB in registers,
read and written once, which is nearly all the traffic. Its loads are issued first, and what can be done
without them is done while they are under way.

What replaying drafts must repeat to the bit is written here once, for `replay` to share: every product that
is added is an explicit fma (kernels are compiled without contraction) and every sum over channels takes the
order of `halving_sum`, so that no rounding depends on how the compiler lays a tensor out.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from openk3.ops.kda.hopper import hopper_fits
from openk3.ops.kernel_operator import kernel_operator

Tensor = torch.Tensor

NORM_EPS = 1e-6  # of the L2 norm, as in openk3.ops.norm.l2_norm
# At K = 128, two programs an SM, so that one loads while the other computes.
LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
HOPPER = {"num_warps": 8, "maxnreg": 128, "enable_fp_fusion": False}


@triton.jit
def halving_sum(x, ROWS: tl.constexpr, N: tl.constexpr):
    """`[ROWS, N]` to `[ROWS]`: neighbours twice, then halves. Two numbers add up the same in any layout."""
    x = tl.sum(tl.reshape(x, [ROWS, N // 2, 2]), 2)
    x = tl.sum(tl.reshape(x, [ROWS, N // 4, 2]), 2)
    for step in tl.static_range(3, 8):
        if N >> step > 0:
            x = tl.sum(tl.reshape(x, [ROWS, 2, N >> step]), 1)
    return tl.reshape(x, [ROWS])


@triton.jit
def projected(x0, x1, x2, x3, w0, w1, w2, w3, scale, l2_eps, K: tl.constexpr):
    """One token's q, k and v, `[K]` each, from tiles `[4, K]` with a row for each of them and one to spare.

    x0 to x3 are raw inputs of the convolution, oldest first, w0 to w3 its taps. As a tile, all threads share
    the work; what has fewer elements than there are threads is computed again wherever it is read.
    """
    x0, x1, x2, x3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    y = tl.fma(x3, w3, tl.fma(x2, w2, tl.fma(x1, w1, x0 * w0)))
    y *= tl.sigmoid(y)
    kind = tl.arange(0, 4)[:, None]
    inv = tl.rsqrt(halving_sum(y * y, 4, K) + l2_eps)[:, None]
    y *= tl.where(kind == 0, scale * inv, tl.where(kind == 1, inv, 1.0))
    q_v, k_spare = tl.split(tl.reshape(tl.trans(y), [K, 2, 2]))
    q, v = tl.split(q_v)
    k, _ = tl.split(k_spare)
    return q, k, v


@triton.jit
def gates(logits, bias, gain, rate, lower_bound, BOUNDED: tl.constexpr):
    """A token's decay and its output gate times gain, `[K]` each; logits and bias are `[2, K]`, of both."""
    u = logits.to(tl.float32) + bias
    decay = tl.exp(log_decay(u, rate, lower_bound, BOUNDED))
    both = tl.where(tl.arange(0, 2)[:, None] == 0, decay, gain * tl.sigmoid(u))
    return tl.split(tl.trans(both))


@triton.jit
def head_rate(A_log, h):
    """exp(A_log), finite, so that 0 * rate stays 0."""
    return tl.minimum(tl.exp(tl.load(A_log + h).to(tl.float32)), 3.4e38)


@triton.jit
def log_decay(u, rate, lower_bound, BOUNDED: tl.constexpr):
    """The natural log of the decay from u = z + dt_bias, as openk3.ops.kda_gate.kda_gate has it."""
    if BOUNDED:
        return lower_bound * tl.sigmoid(tl.minimum(tl.maximum(u * rate, -3.4e38), 3.4e38))
    e = tl.exp(-tl.abs(u))
    log1p = tl.where(e < 0.01, e * (1.0 - e * (0.5 - e * (1 / 3))), tl.log(1.0 + e))
    return -rate * (tl.maximum(u, 0.0) + log1p)


@triton.jit
def state_cells(state, slot, h, H: tl.constexpr, K: tl.constexpr):
    """Pointers to one head's state as `[V, K / 32, 32]`: laid out so, eight lanes read 128 bytes of a row,
    a warp has four rows at a time, and to sum a row takes three exchanges, not five.
    """
    v = tl.arange(0, K)[:, None, None]
    j = tl.arange(0, K // 32)[None, :, None]
    c = tl.arange(0, 32)[None, None, :]
    return state + (slot * H + h) * (K * K) + v * K + j * 32 + c


@triton.jit
def along_rows(x, K: tl.constexpr):
    """`[K]` laid along the rows of such a state."""
    return tl.reshape(x, [1, K // 32, 32])


@triton.jit
def against(S, x, K: tl.constexpr):
    """S x `[V]` for x `[K]`."""
    return halving_sum(tl.reshape(S * along_rows(x, K), [K, K]), K, K)


@triton.jit
def _decode(
    qkv,  # [N, 3 H K]
    z,  # [N, H, K]
    b,  # [N, H]
    gate,  # [N, H, V]
    state,  # [slots, H, V, K]
    tail,  # [slots, 3, 3 H K]
    slots,  # [N]
    taps,  # [4, 3 H K]
    A_log,  # [H]
    dt_bias,  # [H, K]
    norm_weight,  # [V]
    out,  # [N, H V]
    scale,
    lower_bound,
    norm_eps,
    l2_eps,
    H: tl.constexpr,
    K: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)  # neighbours in the grid share a head and with it the weights
    h = tl.program_id(1)
    i = tl.arange(0, K)
    row = (n * H + h) * K + i
    slot = tl.load(slots + n).to(tl.int64)
    if slot < 0:
        tl.store(out + row, tl.zeros([K], out.dtype.element_ty))
        return
    cells = state_cells(state, slot, h, H, K)
    S = tl.load(cells)
    tl.debug_barrier()  # to save registers, the compiler would put these loads off

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
    x3 = tl.load(qkv + n * C + channel, known, 0.0)
    which = tl.arange(0, 2)[:, None]
    logits = tl.load(z + row[None, :], which == 0, 0.0) + tl.load(gate + row[None, :], which == 1, 0.0)
    bias = tl.load(dt_bias + h * K + i[None, :], which == 0, 0.0).to(tl.float32)
    gain = tl.load(norm_weight + i[None, :], which == 1, 0.0).to(tl.float32)
    rate = head_rate(A_log, h)
    beta = tl.sigmoid(tl.load(b + n * H + h).to(tl.float32))
    q, k, v = projected(x0, x1, x2, x3, w0, w1, w2, w3, scale, l2_eps, K)
    decay, output_gate = gates(logits, bias, gain, rate, lower_bound, BOUNDED)

    S = S * along_rows(decay, K)
    error = beta * (v - against(S, k, K))
    o = against(S, q, K) + error * tl.sum(q * k)
    S = tl.fma(error[:, None, None], along_rows(k, K), S)
    tl.store(cells, S)

    y = o * tl.rsqrt(tl.sum(o * o) / K + norm_eps) * output_gate
    tl.store(out + row, y.to(out.dtype.element_ty))

    # Threads may hold copies of these channels: all must have read the tail before any moves it on.
    tl.debug_barrier()
    tl.store(old, x1, known)
    tl.store(old + C, x2, known)
    tl.store(old + 2 * C, x3, known)


@kernel_operator("openk3::kda_decode", mutates_args=("state", "tail"))
def decode(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    gate: Tensor,
    state: Tensor,
    tail: Tensor,
    slots: Tensor,
    taps: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    lower_bound: float | None,
    scale: float,
) -> Tensor:
    """See `openk3.ops.kda.decoding.kda_decode`."""
    N, H, K = z.shape
    out = qkv.new_empty(N, H * K)
    if N and hopper_fits(qkv, K):
        from openk3.ops.kda.kernels.decode_hopper import decode_hopper

        decode_hopper[(N, H)](
            qkv, z, b, gate, state, tail, slots, taps, A_log, dt_bias, norm_weight, out,
            scale, lower_bound or 0.0, norm_eps, NORM_EPS, H=H, BOUNDED=lower_bound is not None, **HOPPER,
        )  # fmt: skip
    elif N:
        _decode[(N, H)](
            qkv, z, b, gate, state, tail, slots, taps, A_log, dt_bias, norm_weight, out,
            scale, lower_bound or 0.0, norm_eps, NORM_EPS,
            H=H, K=K, BOUNDED=lower_bound is not None, **LAUNCH,
        )  # fmt: skip
    return out


@decode.register_fake
def _(qkv, z, b, gate, state, tail, slots, taps, A_log, dt_bias, norm_weight, norm_eps, lower_bound, scale):
    return qkv.new_empty(qkv.shape[0], z.shape[1] * z.shape[2])
