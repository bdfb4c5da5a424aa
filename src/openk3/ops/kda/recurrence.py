"""The recurrence of KDA by itself, over packed sequences or for one token (report §2.1.1 eq. 1-4).

The caller normalises q and k and makes the gate; `openk3.ops.kda.gated_kda` does that too.
"""

from __future__ import annotations

from functools import reduce

import torch

from openk3.errors import InvalidInput
from openk3.ops.dispatch import Implementation, choose
from openk3.ops.inputs import check_floating
from openk3.ops.kda.step import step
from openk3.ops.packed import sequence_bounds
from openk3.ops.precision import own_dtypes

__all__ = ["kda", "kda_step"]


@own_dtypes
def kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence over packed sequences, each from its own state.

    Computed in the widest dtype among the inputs, at least fp32. Any g <= 0 is safe, however low.

    Args:
        q, k: `[T, H, K]`, L2-normalised by the caller.
        v: `[T, H, V]`.
        g: `[T, H, K]` log decay, <= 0, at least fp32.
        beta: `[T, H]` write strength in [0, 1], at least fp32.
        cu_seqlens: int32 `[N + 1]` from 0 to T, non-decreasing; sequences may be empty.
        scale: factor of the outputs; K**-0.5 by default.
        initial_state: `[N, H, V, K]`, at least fp32; zeros by default. Empty sequences hand it on.
        chunk_size: tokens handled in parallel, counted from each sequence's start; any positive number gives
            the same function. By default what is fastest for the implementation (eager: 32).
        implementation: force "reference" or "eager"; by default the fastest for the device.

    Returns:
        o `[T, H, V]` in v's dtype, and each sequence's state after its last token, `[N, H, V, K]`, in the
        compute dtype. Both are differentiable in all tensor inputs, once.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit, the offsets are not those of a packing, or
            chunk_size is not positive.
        KernelUnavailable: the forced implementation cannot run here.
    """
    _check("kda", ("T", "H"), q, k, v, g, beta)
    bounds = sequence_bounds("kda: cu_seqlens", cu_seqlens, len(q))
    H, K, V = *k.shape[1:], v.shape[2]
    N = len(bounds) - 1
    if chunk_size is not None and chunk_size < 1:
        raise InvalidInput(f"kda: chunk_size must be positive, got {chunk_size}")
    if initial_state is None:
        initial_state = v.new_zeros(N, H, V, K, dtype=_compute_dtype(q, k, v, g, beta))
    else:
        check_state("kda: initial_state", initial_state, (N, H, V, K), q.device)
        initial_state = initial_state.to(_compute_dtype(q, k, v, g, beta, initial_state))
    scale = K**-0.5 if scale is None else scale
    match choose("kda", q, implementation, kernels=False):
        case "reference":
            from openk3.ops.kda.reference import kda as recurrence

            return recurrence(q, k, v, g, beta, bounds, scale, initial_state)
        case _:
            from openk3.ops.kda.eager import kda as chunked

            return chunked(q, k, v, g, beta, bounds, scale, initial_state, chunk_size)


@own_dtypes
def kda_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of N sequences: `kda` for decoding.

    Args:
        q, k, g: `[N, H, K]`, v: `[N, H, V]`, beta: `[N, H]`, with the dtypes and meaning they have in `kda`.
        state: `[N, H, V, K]`, at least fp32. Not modified.
        scale: factor of the outputs; K**-0.5 by default.

    Returns:
        o `[N, H, V]` in v's dtype, and the new state `[N, H, V, K]` in the compute dtype.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit.
    """
    _check("kda_step", ("N", "H"), q, k, v, g, beta)
    check_state("kda_step: state", state, (*v.shape, k.shape[2]), q.device)
    state = state.to(_compute_dtype(q, k, v, g, beta, state))
    return step(q, k, v, g, beta, state, k.shape[2] ** -0.5 if scale is None else scale)


def _compute_dtype(*inputs: torch.Tensor) -> torch.dtype:
    return reduce(torch.promote_types, (x.dtype for x in inputs), torch.float32)


def _check(
    operator: str,
    axes: tuple[str, str],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> None:
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    if (
        k.dim() != 3
        or v.dim() != 3
        or not q.shape == k.shape == g.shape
        or not k.shape[:2] == v.shape[:2] == beta.shape
    ):
        first, second = axes
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())
        raise InvalidInput(
            f"{operator}: q, k, g must be [{first}, {second}, K], v [{first}, {second}, V], "
            f"beta [{first}, {second}]; got {shapes}"
        )
    check_head_sizes(operator, k, v)
    check_floating(operator, **named)
    for name in ("g", "beta"):
        _check_precise(f"{operator}: {name}", named[name])


def check_head_sizes(operator: str, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse heads without a channel."""
    if not k.shape[2] or not v.shape[2]:
        raise InvalidInput(f"{operator}: K and V must be at least 1, got {k.shape[2]} and {v.shape[2]}")


def check_state(name: str, state: torch.Tensor, expected: tuple[int, ...], device: torch.device) -> None:
    """Refuse a state of another shape or device, or of less than fp32."""
    if state.shape != expected or state.device != device:
        raise InvalidInput(
            f"{name} must be [N, H, V, K] = {expected} on {device}, "
            f"got {tuple(state.shape)} on {state.device}"
        )
    _check_precise(name, state)


def _check_precise(name: str, x: torch.Tensor) -> None:
    if not x.is_floating_point() or torch.promote_types(x.dtype, torch.float32) != x.dtype:
        raise InvalidInput(f"{name} must be at least float32, got {x.dtype}")
