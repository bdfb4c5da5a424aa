"""SwiGLU and GLU on the GPU; the kernels are those of all gated units."""

from __future__ import annotations

import torch

from openk3.ops.gated_unit_kernels import gated_unit


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See `openk3.ops.glu.swiglu`."""
    return gated_unit(gate, up, "swiglu")


def glu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See `openk3.ops.glu.glu`."""
    return gated_unit(gate, up, "glu")
