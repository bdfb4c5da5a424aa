"""From decay logits to KDA's log decay: K3's bounded map, Kimi Linear's unbounded one (§2.1.1 eq. 5)."""

from __future__ import annotations

import torch

from openk3.errors import InvalidInput
from openk3.ops.dispatch import Implementation, choose
from openk3.ops.inputs import check_floating
from openk3.ops.precision import own_dtypes

__all__ = ["kda_gate"]


@own_dtypes
def kda_gate(
    z: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    *,
    lower_bound: float | None = -5.0,
    implementation: Implementation | None = None,
) -> torch.Tensor:
    """The log decay g of each token, head and channel; the decay itself is exp(g).

    With u = z + dt_bias: g = lower_bound * sigmoid(exp(A_log) * u); without bound, -exp(A_log) * softplus(u).

    Args:
        z: `[T, H, K]` decay logits.
        A_log: `[H]` log scale of each head.
        dt_bias: `[H, K]`, or None for no bias.
        lower_bound: in [-5, 0), the limit of g (-5 in K3); None for the unbounded map.
        implementation: force "reference" or "eager"; by default the fastest for the device.

    Returns:
        g `[T, H, K]` in the widest dtype among the inputs, at least fp32; within [lower_bound, 0], or <= 0.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit, or the bound is outside [-5, 0).
        KernelUnavailable: the forced implementation cannot run here.
    """
    if z.dim() != 3 or A_log.shape != z.shape[1:2] or (dt_bias is not None and dt_bias.shape != z.shape[1:]):
        raise InvalidInput(
            f"kda_gate: z must be [T, H, K], A_log [H] and dt_bias [H, K], got {tuple(z.shape)}, "
            f"{tuple(A_log.shape)} and {None if dt_bias is None else tuple(dt_bias.shape)}"
        )
    check_floating("kda_gate", z=z, A_log=A_log, dt_bias=dt_bias)
    if lower_bound is not None and not -5.0 <= lower_bound < 0.0:
        raise InvalidInput(f"kda_gate: lower_bound must be in [-5, 0) or None, got {lower_bound}")
    match choose("kda_gate", z, implementation, kernels=False):
        case "reference":
            from openk3.ops.kda_gate.reference import kda_gate as run
        case _:
            from openk3.ops.kda_gate.eager import kda_gate as run
    return run(z, A_log, dt_bias, lower_bound)
