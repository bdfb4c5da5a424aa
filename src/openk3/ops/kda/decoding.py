"""A KDA layer between its projections when it generates: one token a sequence, or a window of drafts.

Convolution with SiLU, L2 norm, gate, recurrence and gated norm in one call (report §2.1.1 eq. 1-6), on states
that live in pools and are addressed by slot. Knows neither projections nor who owns a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from openk3.errors import InvalidInput
from openk3.ops.dispatch import Implementation, choose
from openk3.ops.kda import kda_step
from openk3.ops.kda_gate import kda_gate
from openk3.ops.norm import gated_rms_norm, l2_norm
from openk3.ops.precision import own_dtypes, widen
from openk3.ops.short_conv import short_conv

__all__ = ["DraftWindow", "MixerWeights", "kda_decode", "kda_verify"]

Tensor = torch.Tensor

LONGEST_WINDOW = 8
HEAD_SIZES = (64, 128)


@dataclass(frozen=True)
class MixerWeights:
    """What a layer holds between its projections. C = 3 H K: the channels of q, of k, of v; here K = V."""

    taps: Tensor  # [4, C], of the convolution, the last at the current token
    A_log: Tensor  # [H]
    dt_bias: Tensor  # [H, K]
    norm_weight: Tensor  # [V]
    norm_eps: float
    lower_bound: float | None = -5.0  # of the gate; None for the unbounded map


@dataclass(frozen=True)
class DraftWindow:
    """Raw projections of each slot's last window of up to P tokens, until it is known which of them stay."""

    qkv: Tensor  # [slots, P, C]
    z: Tensor  # [slots, P, H, K]
    b: Tensor  # [slots, P, H]

    @classmethod
    def empty(
        cls,
        slots: int,
        longest: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> DraftWindow:
        """Memory for windows of up to `longest` tokens (1 to 8), not initialised: start with accepted = 0."""

        def rows(*shape: int) -> Tensor:
            return torch.empty(slots, longest, *shape, dtype=dtype, device=device)

        return cls(rows(3 * heads * head_dim), rows(heads, head_dim), rows(heads))


@own_dtypes
def kda_decode(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    gate_logits: Tensor,
    state: Tensor,
    tail: Tensor,
    slots: Tensor,
    weights: MixerWeights,
    *,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Tensor:
    """One token of each of N sequences; moves their states and tails on, in place.

    The kernel keeps fp32 from the convolution to the output; "eager" rounds to qkv's dtype between operators,
    as the same layer does on a prompt.

    Args:
        qkv: `[N, C]` inputs of the convolution, C = 3 H K.
        z: `[N, H, K]` decay logits. b: `[N, H]` beta logits. gate_logits: `[N, H, V]`, V = K in {64, 128}.
            All in qkv's dtype.
        state: `[slots, H, V, K]` fp32, contiguous.
        tail: `[slots, 3, C]` the last inputs of the convolution, oldest first, in qkv's dtype, contiguous.
        slots: int32 `[N]`, no slot twice; a negative one marks a row without a sequence: nothing is read or
            written for it and its output is zero. Slots beyond the pool are not checked.
        scale: factor of the queries; K**-0.5 by default.
        implementation: force "eager" or "triton"; by default the fastest for the device.

    Returns:
        o `[N, H V]` in qkv's dtype.

    Raises:
        InvalidInput: shapes, dtypes, devices or strides do not fit.
        KernelUnavailable: the forced implementation cannot run here.
    """
    _check("kda_decode", (z.shape[0] if z.dim() else 0,), qkv, z, b, gate_logits, state, tail, slots, weights)
    scale = z.shape[-1] ** -0.5 if scale is None else scale
    if choose("kda_decode", qkv, implementation) == "triton":
        from openk3.ops.kda.kernels.decode import decode

        w = weights
        out: Tensor = decode(
            qkv, z, b, gate_logits, state, tail, slots,
            w.taps, w.A_log, w.dt_bias, w.norm_weight, w.norm_eps, w.lower_bound, scale,
        )  # fmt: skip
        return out
    return _decode(qkv, z, b, gate_logits, state, tail, slots, weights, scale)


@own_dtypes
def kda_verify(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    gate_logits: Tensor,
    state: Tensor,
    tail: Tensor,
    past: DraftWindow,
    accepted: Tensor,
    slots: Tensor,
    weights: MixerWeights,
    *,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Tensor:
    """A window of W tokens of each of N sequences, after what stays of their past windows.

    A window is the bonus token, sampled at the end of the step before, and the drafts after it. Its outputs
    are computed, its projections kept in `past`, and nothing of it enters the state: that waits for the next
    call, which is told how many of its tokens were accepted and first takes state and tail through those, in
    place and to the bit as `kda_decode` would. A last call of W = 1 so leaves one token outstanding.

    Args:
        qkv: `[N, W, C]`, z `[N, W, H, K]`, b `[N, W, H]`, gate_logits `[N, W, H, V]`, 1 <= W <= P <= 8;
            otherwise as in `kda_decode`, like state, tail, slots and scale.
        past: each slot's last window. Replaced by this one.
        accepted: int32 `[N]` tokens of the past window that stay, its bonus token counted, so 1 to its
            length; 0 where there was none.

    Returns:
        o `[N, W, H V]` in qkv's dtype. The kernel's differs from that of sequential decoding by about 1e-4
        (Hopper's in TF32, and then by up to 1e-3) of each row's largest element before rounding to bf16.

    Raises:
        InvalidInput: shapes, dtypes, devices or strides do not fit.
        KernelUnavailable: the forced implementation cannot run here.
    """
    if z.dim() != 4 or past.qkv.dim() != 3:
        raise InvalidInput(
            f"kda_verify: z must be [N, W, H, K] and past.qkv [slots, P, C], "
            f"got {tuple(z.shape)} and {tuple(past.qkv.shape)}"
        )
    N, W = z.shape[:2]
    _check("kda_verify", (N, W), qkv, z, b, gate_logits, state, tail, slots, weights)
    _check_window(past, accepted, W, qkv, state)
    scale = z.shape[-1] ** -0.5 if scale is None else scale
    if choose("kda_verify", qkv, implementation) == "triton":
        from openk3.ops.kda.kernels.replay import verify

        w = weights
        out: Tensor = verify(
            qkv, z, b, gate_logits, state, tail, past.qkv, past.z, past.b, accepted, slots,
            w.taps, w.A_log, w.dt_bias, w.norm_weight, w.norm_eps, w.lower_bound, scale,
        )  # fmt: skip
        return out
    live = slots >= 0
    index = slots[live].long()
    for t in range(past.qkv.shape[1]):
        stays = torch.where(t < accepted, slots, -1)
        pool = slots.clamp(min=0).long()
        token = past.qkv[pool, t], past.z[pool, t], past.b[pool, t], gate_logits[:, 0]
        _decode(*token, state, tail, stays, weights, scale)
    state, tail = state[slots.clamp(min=0).long()], tail[slots.clamp(min=0).long()]
    own = torch.where(live, torch.arange(N, dtype=torch.int32, device=slots.device), -1)
    for kept, x in ((past.qkv, qkv), (past.z, z), (past.b, b)):
        kept[index, :W] = x[live]
    o = [
        _decode(qkv[:, t], z[:, t], b[:, t], gate_logits[:, t], state, tail, own, weights, scale)
        for t in range(W)
    ]
    return torch.stack(o, 1)


def _decode(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    gate_logits: Tensor,
    state: Tensor,
    tail: Tensor,
    slots: Tensor,
    weights: MixerWeights,
    scale: float,
) -> Tensor:
    """`kda_decode` from the operators that the layer uses on a prompt."""
    out = qkv.new_zeros(len(qkv), state.shape[1] * state.shape[2])
    live = slots >= 0
    index = slots[live].long()
    n, (H, K) = len(index), z.shape[1:]
    one_each = torch.arange(n + 1, dtype=torch.int32, device=qkv.device)
    y, tail[index] = short_conv(qkv[live], weights.taps.T, one_each, initial_state=tail[index])
    q, k, v = y.view(n, 3, H, K).unbind(1)
    g = kda_gate(z[live], weights.A_log, weights.dt_bias, lower_bound=weights.lower_bound)
    beta = torch.sigmoid(widen(b[live]))
    o, state[index] = kda_step(l2_norm(q), l2_norm(k), v, g, beta, state[index], scale=scale)
    out[live] = gated_rms_norm(o, gate_logits[live], weights.norm_weight, weights.norm_eps).flatten(1)
    return out


def _check(
    operator: str,
    rows: tuple[int, ...],
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    gate_logits: Tensor,
    state: Tensor,
    tail: Tensor,
    slots: Tensor,
    weights: MixerWeights,
) -> None:
    axes = len(rows) + 2
    if z.dim() != axes or state.dim() != 4:
        raise InvalidInput(
            f"{operator}: z must have {axes} axes and state 4, got {tuple(z.shape)} and {tuple(state.shape)}"
        )
    H, K = z.shape[-2:]
    C, pool, dtype, fp32 = 3 * H * K, len(state), qkv.dtype, torch.float32
    if K not in HEAD_SIZES:
        raise InvalidInput(f"{operator}: the head size must be one of {HEAD_SIZES}, z is {tuple(z.shape)}")
    bound = weights.lower_bound
    if not qkv.is_floating_point() or not (bound is None or -5 <= bound < 0):
        raise InvalidInput(
            f"{operator}: qkv must be floating point and lower_bound in [-5, 0) or None, "
            f"got {qkv.dtype} and {bound}"
        )
    expected: dict[str, tuple[Tensor, tuple[int, ...], torch.dtype | None]] = {
        "qkv": (qkv, (*rows, C), dtype),
        "z": (z, (*rows, H, K), dtype),
        "b": (b, (*rows, H), dtype),
        "gate_logits": (gate_logits, (*rows, H, K), dtype),
        "state": (state, (pool, H, K, K), torch.promote_types(dtype, fp32)),
        "tail": (tail, (pool, 3, C), dtype),
        "slots": (slots, rows[:1], torch.int32),
        "weights.taps": (weights.taps, (4, C), None),
        "weights.A_log": (weights.A_log, (H,), None),
        "weights.dt_bias": (weights.dt_bias, (H, K), None),
        "weights.norm_weight": (weights.norm_weight, (K,), None),
    }
    _check_each(operator, expected, qkv.device)


def _check_window(past: DraftWindow, accepted: Tensor, W: int, qkv: Tensor, state: Tensor) -> None:
    P = past.qkv.shape[1]
    if not 1 <= W <= P <= LONGEST_WINDOW:
        raise InvalidInput(
            f"kda_verify: a window must have 1 to {LONGEST_WINDOW} tokens and fit the one kept, "
            f"got {W} and room for {P}"
        )
    pool, H, _, K = state.shape
    expected: dict[str, tuple[Tensor, tuple[int, ...], torch.dtype | None]] = {
        "past.qkv": (past.qkv, (pool, P, 3 * H * K), qkv.dtype),
        "past.z": (past.z, (pool, P, H, K), qkv.dtype),
        "past.b": (past.b, (pool, P, H), qkv.dtype),
        "accepted": (accepted, (len(qkv),), torch.int32),
    }
    _check_each("kda_verify", expected, qkv.device)


def _check_each(
    operator: str,
    expected: dict[str, tuple[Tensor, tuple[int, ...], torch.dtype | None]],
    device: torch.device,
) -> None:
    for name, (x, shape, dtype) in expected.items():
        fits = x.is_floating_point() if dtype is None else x.dtype == dtype
        if x.shape != shape or not fits or x.device != device or not x.is_contiguous():
            raise InvalidInput(
                f"{operator}: {name} must be {shape} {dtype or 'floating point'} on {device}, contiguous; "
                f"got {tuple(x.shape)} {x.dtype} on {x.device}, strides {x.stride()}"
            )
