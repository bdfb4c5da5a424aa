"""The short causal convolution before q, k and v (report §2.1.1 eq. 2), on packed sequences.

Depthwise and without bias. Knows neither what the channels mean nor where a sequence's earlier tokens are:
the last W - 1 of them come in as a state and go out as one.
"""

from __future__ import annotations

from typing import Literal, overload

import torch

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.dispatch import Implementation, Kernel, choose
from openk3.ops.inputs import check_floating
from openk3.ops.packed import check_offsets, sequence_bounds
from openk3.ops.precision import own_dtypes

__all__ = ["short_conv"]

KERNELS = (
    Kernel(
        "short_conv",
        takes="2 to 8 taps, bf16, fp16 or fp32",
        checked_on="H200 (sm_90)",
        compiles_for=("sm_80", "sm_86", "sm_89", "sm_100", "sm_120"),
    ),
)


@overload
def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = ...,
    activation: Literal["silu"] | None = ...,
    checkpoint_at: None = ...,
    implementation: Implementation | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = ...,
    activation: Literal["silu"] | None = ...,
    checkpoint_at: torch.Tensor,
    implementation: Implementation | None = ...,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@own_dtypes
def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    activation: Literal["silu"] | None = "silu",
    checkpoint_at: torch.Tensor | None = None,
    implementation: Implementation | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y_t = act(sum_j weight[:, j] * x_{t - (W - 1) + j}); inputs before the sequence come from its state.

    Computed in the widest dtype among the inputs, at least fp32.

    Args:
        x: `[T, C]`; rows may lie apart, as when q, k and v are a part of one projection.
        weight: `[C, W]`, the last tap at the current token.
        cu_seqlens: int32 `[N + 1]` from 0 to T, non-decreasing; sequences may be empty. "triton" leaves its
            values unchecked, and those of checkpoint_at: to read them on the host is to wait for all work on
            the device. Wrong ones there mean wrong results, or accesses out of bounds.
        initial_state: `[N, W - 1, C]`, the inputs before each sequence, oldest first; zeros by default.
        activation: "silu", or None for the bare convolution.
        checkpoint_at: int32 `[M]` packed end offsets in [1, T]: also return the states there, each of the
            sequence of the token before it.
        implementation: force "reference", "eager" or "triton" (W from 2 to 8, not float64); by default the
            fastest that takes the inputs on their device.

    Returns:
        y `[T, C]` and the final state `[N, W - 1, C]`, the last W - 1 inputs of each sequence, both in x's
        dtype. A sequence shorter than that still holds the newest rows of its initial state. Both are
        differentiable in all tensor inputs, once. With `checkpoint_at` also states `[M, W - 1, C]`, bitwise
        the final states of calls that end there; they carry no gradient.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit, the activation is not known, or, on the host, the
            offsets are not those of a packing.
        KernelUnavailable: the forced implementation cannot run here.
    """
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] < 1:
        raise InvalidInput(
            f"short_conv: x must be [T, C] and weight [C, W >= 1], "
            f"got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if activation not in ("silu", None):
        raise InvalidInput(f"short_conv: activation must be 'silu' or None, got {activation!r}")
    check_offsets("short_conv", x, cu_seqlens=cu_seqlens, checkpoint_at=checkpoint_at)
    expected = (len(cu_seqlens) - 1, weight.shape[1] - 1, x.shape[1])
    if initial_state is not None and initial_state.shape != expected:
        raise InvalidInput(
            f"short_conv: initial_state must be [N, W - 1, C] = {expected}, got {tuple(initial_state.shape)}"
        )
    check_floating("short_conv", x=x, weight=weight, initial_state=initial_state)
    silu = activation == "silu"
    problem = _kernel_problem(x, weight)
    if implementation == "triton" and problem:
        raise KernelUnavailable(f"short_conv: {problem}; ask for implementation='eager'")
    chosen = choose("short_conv", x, implementation, kernels=problem is None)
    if chosen == "triton":
        from openk3.ops.short_conv import kernels

        out = kernels.short_conv(x, weight, cu_seqlens, initial_state, silu)
        if checkpoint_at is None:
            return out
        return *out, kernels.states_at(x, weight, cu_seqlens, initial_state, checkpoint_at)
    bounds = sequence_bounds("short_conv: cu_seqlens", cu_seqlens, len(x))
    state = x.new_zeros(expected) if initial_state is None else initial_state
    if chosen == "reference":
        from openk3.ops.short_conv.reference import short_conv as run
    else:
        from openk3.ops.short_conv.eager import short_conv as run
    out = run(x, weight, bounds, state, silu)
    if checkpoint_at is None:
        return out
    from openk3.ops.short_conv.reference import states_at

    return *out, states_at(x, bounds, state, checkpoint_at)


def _kernel_problem(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """Why the kernels do not take these inputs, or None if they do."""
    if not 2 <= weight.shape[1] <= 8:
        return f"the Triton kernel takes widths 2 to 8, got {weight.shape[1]}"
    if torch.float64 in (x.dtype, weight.dtype):
        return "the Triton kernel computes in fp32, not float64"
    return None
