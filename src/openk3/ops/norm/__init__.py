"""RMSNorm, sigmoid-gated RMSNorm (report §2.1.1 eq. 6) and the L2 norm of KDA's queries and keys.

Each normalises the last axis in at least fp32 and keeps its inputs and one scalar a row for the backward.
Which layer uses which eps is the model's business.
"""

from __future__ import annotations

import torch

from openk3.errors import InvalidInput
from openk3.ops.dispatch import Implementation, Kernel, choose
from openk3.ops.inputs import check_floating
from openk3.ops.precision import own_dtypes

__all__ = ["gated_rms_norm", "l2_norm", "rms_norm"]

KERNELS = tuple(
    Kernel(
        function,
        takes="rows of 1 to 8192 values, which may lie apart; bf16, fp16 or fp32",
        checked_on="H200 (sm_90)",
        compiles_for=("sm_80", "sm_86", "sm_89", "sm_100", "sm_120"),
    )
    for function in __all__
)


@own_dtypes
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    implementation: Implementation | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis.

    Args:
        x: `[..., d]`, floating.
        weight: gain `[d]`, floating (its dtype may differ from x's), or None for no gain.
        eps: added to the mean square; positive (1e-5 in the release, 1e-6 in the MLA latents).
        implementation: force "reference", "eager" or "triton" (rows of 1 to 8192 values, not float64); by
            default the fastest that takes the inputs on their device.

    Returns:
        `[..., d]` in x's dtype.

    Raises:
        InvalidInput: x has no axis, weight is not `[d]`, or eps is not positive.
        KernelUnavailable: the forced implementation cannot run here.
    """
    _check("rms_norm", x, weight, eps)
    match _choose("rms_norm", implementation, x, weight):
        case "reference":
            from openk3.ops.norm.reference import rms_norm as run
        case "eager":
            from openk3.ops.norm.eager import rms_norm as run
        case "triton":
            from openk3.ops.norm.kernels import rms_norm as run
    return run(x, weight, eps)


@own_dtypes
def gated_rms_norm(
    x: torch.Tensor,
    gate_logits: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    implementation: Implementation | None = None,
) -> torch.Tensor:
    """RMSNorm(x) * weight * sigmoid(gate_logits): the output gate of KDA (report §2.1.1 eq. 6).

    Args:
        x: `[..., V]`, floating.
        gate_logits: `[..., V]`, the gate before its sigmoid; same shape, its dtype may differ from x's.
        weight: gain `[V]`.
        eps: as in `rms_norm`.
        implementation: as in `rms_norm`.

    Returns:
        `[..., V]` in x's dtype.

    Raises:
        InvalidInput: as in `rms_norm`, or gate_logits has another shape than x.
        KernelUnavailable: the forced implementation cannot run here.
    """
    _check("gated_rms_norm", x, weight, eps)
    check_floating("gated_rms_norm", x=x, gate_logits=gate_logits)
    if gate_logits.shape != x.shape:
        raise InvalidInput(
            f"gated_rms_norm: gate_logits is {tuple(gate_logits.shape)}, must be {tuple(x.shape)} as x"
        )
    match _choose("gated_rms_norm", implementation, x, gate_logits, weight):
        case "reference":
            from openk3.ops.norm.reference import gated_rms_norm as run
        case "eager":
            from openk3.ops.norm.eager import gated_rms_norm as run
        case "triton":
            from openk3.ops.norm.kernels import gated_rms_norm as run
    return run(x, gate_logits, weight, eps)


@own_dtypes
def l2_norm(
    x: torch.Tensor, eps: float = 1e-6, *, implementation: Implementation | None = None
) -> torch.Tensor:
    """x / sqrt(sum(x^2) + eps), over the last axis: KDA's queries and keys (report §2.1.1).

    Args:
        x: `[..., K]`, floating.
        eps: added to the sum of squares; positive (1e-6 in the release).
        implementation: as in `rms_norm`.

    Returns:
        `[..., K]` in x's dtype, each row of length at most 1.

    Raises:
        InvalidInput: x has no axis, or eps is not positive.
        KernelUnavailable: the forced implementation cannot run here.
    """
    _check("l2_norm", x, None, eps)
    match _choose("l2_norm", implementation, x):
        case "reference":
            from openk3.ops.norm.reference import l2_norm as run
        case "eager":
            from openk3.ops.norm.eager import l2_norm as run
        case "triton":
            from openk3.ops.norm.kernels import l2_norm as run
    return run(x, eps)


def _choose(
    operator: str, wanted: Implementation | None, x: torch.Tensor, *others: torch.Tensor | None
) -> Implementation:
    return choose(operator, x, wanted, kernels=_kernels_take(x, *others), by_default=KERNELS[0].checked)


def _kernels_take(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """What KERNELS says in words; rows are counted in 32 bits."""
    d = x.shape[-1]
    return (
        1 <= d <= 8192 and x.numel() < d << 30 and all(y is None or y.dtype != torch.float64 for y in others)
    )


def _check(operator: str, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    if x.dim() == 0 or not x.is_floating_point():
        raise InvalidInput(f"{operator}: x must be floating [..., d], got {tuple(x.shape)} {x.dtype}")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise InvalidInput(
            f"{operator}: weight is {tuple(weight.shape)}, x is {tuple(x.shape)}; "
            f"weight must be ({x.shape[-1]},)"
        )
    check_floating(operator, x=x, weight=weight)
    if not eps > 0:
        raise InvalidInput(f"{operator}: eps must be positive, got {eps}")
