"""The short causal convolution before q, k and v (report §2.1.1 eq. 2), on packed sequences.

Depthwise and without bias. Knows neither what the channels mean nor where a sequence's earlier tokens are:
the last W - 1 of them come in as a state and go out as one.
"""

from __future__ import annotations

from typing import Literal

import torch

from openk3.errors import InvalidInput
from openk3.ops.dispatch import Implementation, choose
from openk3.ops.inputs import check_floating
from openk3.ops.packed import sequence_bounds

__all__ = ["short_conv"]


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    activation: Literal["silu"] | None = "silu",
    implementation: Implementation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y_t = act(sum_j weight[:, j] * x_{t - (W - 1) + j}); inputs before the sequence come from its state.

    Computed in the widest dtype among the inputs, at least fp32.

    Args:
        x: `[T, C]`.
        weight: `[C, W]`, the last tap at the current token.
        cu_seqlens: int32 `[N + 1]` from 0 to T, non-decreasing; sequences may be empty.
        initial_state: `[N, W - 1, C]`, the inputs before each sequence, oldest first; zeros by default.
        activation: "silu", or None for the bare convolution.
        implementation: force "reference" or "eager"; by default the fastest for the device.

    Returns:
        y `[T, C]` and the final state `[N, W - 1, C]`, the last W - 1 inputs of each sequence, both in x's
        dtype. A sequence shorter than that still holds the newest rows of its initial state. Both are
        differentiable in all tensor inputs, once.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit, the offsets are not those of a packing, or the
            activation is not known.
        KernelUnavailable: the forced implementation cannot run here.
    """
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] < 1:
        raise InvalidInput(
            f"short_conv: x must be [T, C] and weight [C, W >= 1], "
            f"got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if activation not in ("silu", None):
        raise InvalidInput(f"short_conv: activation must be 'silu' or None, got {activation!r}")
    bounds = sequence_bounds("short_conv: cu_seqlens", cu_seqlens, len(x))
    expected = (len(bounds) - 1, weight.shape[1] - 1, x.shape[1])
    if initial_state is None:
        initial_state = x.new_zeros(expected)
    elif initial_state.shape != expected:
        raise InvalidInput(
            f"short_conv: initial_state must be [N, W - 1, C] = {expected}, got {tuple(initial_state.shape)}"
        )
    check_floating("short_conv", x=x, weight=weight, initial_state=initial_state)
    match choose("short_conv", x, implementation, kernels=False):
        case "reference":
            from openk3.ops.short_conv.reference import short_conv as run
        case _:
            from openk3.ops.short_conv.eager import short_conv as run
    return run(x, weight, bounds, initial_state, activation == "silu")
