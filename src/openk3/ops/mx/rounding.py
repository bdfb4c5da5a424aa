"""Quantise and dequantise in one step: what a tensor is after MXFP4 or MXFP8 (report §4.1.4).

In groups of 32 along the last axis. MXFP4, as weights are stored: scales by the EVEN rule, E2M1. MXFP8, as
activations are: the scale is 2^(floor(log2 largest) - 8) (OCP Microscaling 1.0), elements are E4M3, those
beyond 448 times the scale become that. Both round ties to the even code and keep the sign of zeros.
"""

from __future__ import annotations

import torch

from openk3.errors import InvalidInput
from openk3.ops.dispatch import Implementation, Kernel, choose
from openk3.ops.precision import own_dtypes

Tensor = torch.Tensor

GROUP = 32
KERNEL = Kernel("mxfp4_rounded, mxfp8_rounded", takes="bf16, fp16 or fp32", checked_on="H200 (sm_90)")


def mxfp4_rounded(x: Tensor, *, implementation: Implementation | None = None) -> Tensor:
    """x `[..., in]` as decoding its encoding gives it, in x's dtype, exactly.

    For the forward alone: how gradients pass is for the caller to say.

    Args:
        x: floating, in a multiple of 32. Elements that are not finite give their group no meaning.

    Raises:
        InvalidInput: the shape or dtype does not fit, or x requires a gradient.
    """
    return _rounded("mxfp4_rounded", x, 4, implementation)


def mxfp8_rounded(x: Tensor, *, implementation: Implementation | None = None) -> Tensor:
    """The same for MXFP8."""
    return _rounded("mxfp8_rounded", x, 8, implementation)


@own_dtypes
def _rounded(operator: str, x: Tensor, bits: int, implementation: Implementation | None) -> Tensor:
    if not x.is_floating_point() or x.dim() == 0 or x.shape[-1] % GROUP:
        raise InvalidInput(
            f"{operator}: x is {x.dtype} {tuple(x.shape)}; "
            f"want floating point with a last axis that is a multiple of {GROUP}"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise InvalidInput(f"{operator}: x requires a gradient, but there is no backward; detach it")
    match choose(operator, x, implementation, by_default=KERNEL.checked):
        case "reference":
            from openk3.ops.mx.reference import rounded as run
        case "triton":
            from openk3.ops.mx.kernels import rounded as run
        case _:
            from openk3.ops.mx.eager import rounded as run
    return run(x, bits)
