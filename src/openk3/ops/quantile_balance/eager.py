"""The required-bias histogram on any device: subtract, divide, count, a slice of tokens at a time."""

from __future__ import annotations

import torch

from openk3.ops.quantile_balance.bins import bin_range

# Scores in flight: few enough for a CPU's cache, enough on a GPU to hide the launches.
CPU_SLICE, GPU_SLICE = 1 << 16, 1 << 24


def required_bias_histogram(
    scores: torch.Tensor, cutoff: torch.Tensor, bias: torch.Tensor, token_mask: torch.Tensor | None, bins: int
) -> torch.Tensor:
    """See `openk3.ops.quantile_balance.required_bias_histogram`."""
    T, E = scores.shape
    low, width = bin_range(bias, bins)
    first_bin = torch.arange(E, device=scores.device) * bins
    counted = scores.new_ones(T, dtype=torch.int64) if token_mask is None else token_mask.long()
    histogram = torch.zeros(E * bins, dtype=torch.int64, device=scores.device)
    tokens = max(1, (CPU_SLICE if scores.device.type == "cpu" else GPU_SLICE) // E)
    for s, c, n in zip(*(torch.split(x, tokens) for x in (scores, cutoff, counted)), strict=True):
        # One rounding a step and no fused multiply-add, which a vector loop may use and its scalar tail may
        # not: a value's bin must not depend on where in a shard it stands.
        place = (c[:, None] - s).sub_(low).div_(width)
        # Rounding at the two ends stays inside. A NaN counts in bin 0: stopping there is the trainer's part.
        place = place.nan_to_num_(nan=0.0).clamp_(0, bins - 1)
        histogram.scatter_add_(0, (place.long() + first_bin).flatten(), n[:, None].expand_as(s).flatten())
    return histogram.view(E, bins)
