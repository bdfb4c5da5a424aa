"""KDA from raw projections: norms, gate, write strength and recurrence in one (report §2.1.1 eq. 1-5).

What `openk3.ops.kda` takes ready-made is made here, so that kernels can read the projections once. Short
convolution, output norm and output gate are the layer's.
"""

from __future__ import annotations

from itertools import pairwise
from typing import overload

import torch

from openk3.errors import InvalidInput
from openk3.ops.dispatch import Implementation, choose
from openk3.ops.inputs import check_floating
from openk3.ops.kda import kda
from openk3.ops.kda_gate import kda_gate
from openk3.ops.norm import l2_norm
from openk3.ops.packed import sequence_bounds
from openk3.ops.precision import wide

__all__ = ["CHECKPOINT_GRID", "gated_kda"]

# Tokens from a sequence's start between positions whose state can be asked for: the chunk of the kernels.
CHECKPOINT_GRID = 64

Tensor = torch.Tensor


@overload
def gated_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    *,
    lower_bound: float | None = ...,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    checkpoint_at: None = ...,
    implementation: Implementation | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def gated_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    *,
    lower_bound: float | None = ...,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    checkpoint_at: Tensor,
    implementation: Implementation | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
def gated_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    *,
    lower_bound: float | None = -5.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    checkpoint_at: Tensor | None = None,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """`kda` of l2_norm(q), l2_norm(k), v, kda_gate(z, A_log, dt_bias) and sigmoid(b).

    Args:
        q, k: `[T, H, K]`, not normalised.
        v: `[T, H, V]`.
        z: `[T, H, K]` decay logits.
        b: `[T, H]` logits of the write strength.
        A_log: `[H]`, dt_bias `[H, K]`: of the gate, at least fp32.
        cu_seqlens: int32 `[N + 1]` from 0 to T, non-decreasing; sequences may be empty. Kernels do not check
            it: reading it on the host would stall the device.
        lower_bound: of the log decay, in [-5, 0); None for the unbounded gate.
        scale: factor of the outputs; K**-0.5 by default.
        initial_state: `[N, H, V, K]`, at least fp32; zeros by default. Empty sequences hand it on.
        checkpoint_at: int32 `[M]`, ascending packed end offsets, each a positive multiple of CHECKPOINT_GRID
            tokens from its sequence's start, or its end: also return the states there. An offset that is
            none gives NaN where the kernels run, since nobody looks on the host, and an error elsewhere.
        implementation: force "reference", "eager" or "triton"; by default the fastest for the device.

    Returns:
        o `[T, H, V]` in v's dtype, each sequence's last state `[N, H, V, K]` in the compute dtype, and with
        `checkpoint_at` the states `[M, H, V, K]`, which carry no gradient. o and the last state are
        differentiable, once. From "triton", a checkpoint is bitwise the last state of a call that ends
        there, and a call that starts from it goes on bitwise as the unbroken one did.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit; without kernels, also offsets that are not those of
            a packing.
        KernelUnavailable: the forced implementation cannot run here.
    """
    _check(q, k, v, z, b, A_log, dt_bias)
    N, H, K, V = len(cu_seqlens) - 1, *k.shape[1:], v.shape[2]
    if initial_state is not None and initial_state.shape != (N, H, V, K):
        raise InvalidInput(
            f"gated_kda: initial_state must be [N, H, V, K] = {(N, H, V, K)}, "
            f"got {tuple(initial_state.shape)}"
        )
    scale = K**-0.5 if scale is None else scale
    chosen = choose("gated_kda", q, implementation, kernels=_has_kernel(q, v, lower_bound))
    if chosen == "triton":
        from openk3.ops.kda.kernels.operator import gated_kda as kernels

        assert lower_bound is not None
        return kernels(
            q, k, v, z, b, A_log, dt_bias, cu_seqlens, initial_state, checkpoint_at, lower_bound, scale
        )
    g = kda_gate(z, A_log, dt_bias, lower_bound=lower_bound, implementation=chosen)
    beta = torch.sigmoid(b.to(wide(b.dtype)))
    q, k = l2_norm(q), l2_norm(k)

    def recurrence(rows: slice, cu_seqlens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return kda(
            q[rows], k[rows], v[rows], g[rows], beta[rows], cu_seqlens,
            scale=scale, initial_state=state, implementation=chosen,
        )  # fmt: skip

    o, S = recurrence(slice(None), cu_seqlens, initial_state)
    if checkpoint_at is None:
        return o, S
    bounds = sequence_bounds("gated_kda: cu_seqlens", cu_seqlens, len(q))
    states = []
    with torch.no_grad():
        for end in checkpoint_at.tolist():
            n, start = _sequence_of(end, bounds)
            prefix = torch.tensor([0, end - start], dtype=torch.int32, device=q.device)
            before = None if initial_state is None else initial_state[n : n + 1]
            states.append(recurrence(slice(start, end), prefix, before)[1])
    return o, S, torch.cat(states) if states else S.new_empty(0, H, V, K)


def _has_kernel(q: Tensor, v: Tensor, lower_bound: float | None) -> bool:
    return lower_bound is not None and q.shape[2] == v.shape[2] and q.shape[2] in (64, 128)


def _sequence_of(end: int, bounds: list[int]) -> tuple[int, int]:
    """The sequence that a checkpoint at packed offset `end` belongs to, and where it starts."""
    for n, (start, stop) in enumerate(pairwise(bounds)):
        if start < end <= stop:
            if end == stop or (end - start) % CHECKPOINT_GRID == 0:
                return n, start
            raise InvalidInput(
                f"gated_kda: checkpoint_at {end} is {end - start} tokens into sequence {n}; "
                f"must be a multiple of {CHECKPOINT_GRID} or its end, {stop}"
            )
    raise InvalidInput(f"gated_kda: checkpoint_at {end} is in no sequence of {bounds[-1]} tokens")


def _check(q: Tensor, k: Tensor, v: Tensor, z: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> None:
    fits = k.dim() == v.dim() == 3 and q.shape == k.shape == z.shape and k.shape[:2] == v.shape[:2] == b.shape
    if not fits or A_log.shape != k.shape[1:2] or dt_bias.shape != k.shape[1:]:
        named = {"q": q, "k": k, "v": v, "z": z, "b": b, "A_log": A_log, "dt_bias": dt_bias}
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())
        raise InvalidInput(
            f"gated_kda: q, k, z must be [T, H, K], v [T, H, V], b [T, H], A_log [H], dt_bias [H, K]; "
            f"got {shapes}"
        )
    check_floating("gated_kda", q=q, k=k, v=v, z=z, b=b, A_log=A_log, dt_bias=dt_bias)
