"""SiTU-GLU on the GPU; the kernels are those of all gated units."""

from __future__ import annotations

import torch

from openk3.ops.gated_unit_kernels import gated_unit


def situ_glu(gate: torch.Tensor, up: torch.Tensor, gate_cap: float, up_cap: float) -> torch.Tensor:
    """See `openk3.ops.situ.situ_glu`."""
    return gated_unit(gate, up, "situ", gate_cap, up_cap)
