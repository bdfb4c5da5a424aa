"""The two plain gated units that SiTU is compared with (report §2.3.2). The oracle for eager.py."""

from __future__ import annotations

import torch


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate * sigmoid(gate) * up, in the inputs' own dtype."""
    return gate * torch.sigmoid(gate) * up


def glu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """sigmoid(gate) * up, in the inputs' own dtype."""
    return torch.sigmoid(gate) * up
