"""SwiGLU and GLU, the plain gated units that K3's SiTU-GLU replaces (report §2.3.2)."""

from __future__ import annotations

import torch

from openk3.errors import InvalidInput
from openk3.ops.dispatch import Implementation, Kernel, choose
from openk3.ops.precision import own_dtypes

__all__ = ["glu", "swiglu"]

KERNELS = tuple(
    Kernel(
        function,
        takes="any shape, rows may lie apart; bf16, fp16 or fp32",
        checked_on="H200 (sm_90)",
        compiles_for=("sm_80", "sm_86", "sm_89", "sm_100", "sm_120"),
    )
    for function in __all__
)


@own_dtypes
def swiglu(
    gate: torch.Tensor, up: torch.Tensor, *, implementation: Implementation | None = None
) -> torch.Tensor:
    """silu(gate) * up.

    Args:
        gate, up: `[..., F]`, one shape, one floating dtype, one device. Computed in fp32 for half precisions.
        implementation: force "reference", "eager" or "triton" (not float64); by default the fastest for the
            device.

    Returns:
        `[..., F]` in the inputs' dtype. The backward keeps the two inputs.

    Raises:
        InvalidInput: shapes, dtypes or devices differ.
        KernelUnavailable: the forced implementation cannot run here.
    """
    _check("swiglu", gate, up)
    match choose("swiglu", gate, implementation, by_default=KERNELS[0].checked):
        case "reference":
            from openk3.ops.glu import reference

            return reference.swiglu(gate, up)
        case "eager":
            from openk3.ops.glu import eager

            return eager.swiglu(gate, up)
        case "triton":
            from openk3.ops.glu import kernels

            return kernels.swiglu(gate, up)


@own_dtypes
def glu(
    gate: torch.Tensor, up: torch.Tensor, *, implementation: Implementation | None = None
) -> torch.Tensor:
    """sigmoid(gate) * up; arguments, result and errors as in `swiglu`."""
    _check("glu", gate, up)
    match choose("glu", gate, implementation, by_default=KERNELS[0].checked):
        case "reference":
            from openk3.ops.glu import reference

            return reference.glu(gate, up)
        case "eager":
            from openk3.ops.glu import eager

            return eager.glu(gate, up)
        case "triton":
            from openk3.ops.glu import kernels

            return kernels.glu(gate, up)


def _check(operator: str, gate: torch.Tensor, up: torch.Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device:
        raise InvalidInput(
            f"{operator}: gate is {tuple(gate.shape)} {gate.dtype} on {gate.device}, "
            f"up is {tuple(up.shape)} {up.dtype} on {up.device}; they must match"
        )
