"""The two maps as the report writes them (§2.1.1 eq. 5 and the text before it). The oracle for `eager`."""

from __future__ import annotations

import torch

from openk3.ops.precision import widen


def kda_gate(
    z: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor | None, lower_bound: float | None
) -> torch.Tensor:
    """g_min sigmoid(e^A u) or -e^A softplus(u), with u = z + dt_bias."""
    u = widen(z) if dt_bias is None else widen(z) + widen(dt_bias)
    rate = widen(A_log).exp()[:, None]
    if lower_bound is None:
        return -rate * torch.log1p(torch.exp(-u.abs())) - rate * u.clamp(min=0)
    return lower_bound * torch.sigmoid(rate * u)
