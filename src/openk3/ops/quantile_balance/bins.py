"""Where the bins of the required-bias histogram lie (report Appendix D, "bin range")."""

from __future__ import annotations

import torch


def bin_range(bias: torch.Tensor, bins: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(lowest edge, bin width) for the routing bias `[..., E]`: `[...]` each, on its device and in its dtype.

    A score lies in (0, 1) and a cut-off, some expert's biased score, in (b_min, 1 + b_max). So every
    required bias cutoff - score lies in [b_min - 1, b_max + 1], whatever the tokens are.
    """
    low, high = bias.amin(-1) - 1, bias.amax(-1) + 1
    return low, (high - low) / bins


def bin_edges(bias: torch.Tensor, bins: int = 1000) -> torch.Tensor:
    """The bins + 1 edges in rising order; bin b holds edges[b] <= required bias < edges[b+1]."""
    low, width = bin_range(bias, bins)
    return low + width * torch.arange(bins + 1, dtype=bias.dtype, device=bias.device)
