"""The short convolution, sequence by sequence, tap by tap (report §2.1.1 eq. 2). The oracle for `eager`."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import torch

from openk3.errors import InvalidInput
from openk3.ops.precision import widen


def short_conv(
    x: torch.Tensor, weight: torch.Tensor, bounds: list[int], initial_state: torch.Tensor, silu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `openk3.ops.short_conv.short_conv`."""
    W = weight.shape[1]
    outputs, finals = [widen(x)[:0]], []
    for n, (start, end) in enumerate(pairwise(bounds)):
        length = end - start
        seen = torch.cat([initial_state[n], x[start:end]])  # [W - 1 + length, C]
        taps = [widen(weight)[:, j] * widen(seen)[j : j + length] for j in range(W)]
        outputs.append(torch.stack(taps).sum(0))
        finals.append(seen[length:])
    y = torch.cat(outputs)
    final_state = torch.stack(finals) if finals else initial_state
    return (torch.nn.functional.silu(y) if silu else y).to(x.dtype), final_state.to(x.dtype)


@torch.no_grad()
def states_at(
    x: torch.Tensor, bounds: list[int], initial_state: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """The last W - 1 inputs before each offset, `[M, W - 1, C]` in x's dtype. For eager too: they are few."""
    S = initial_state.shape[1]
    states = []
    for end in offsets.tolist():
        if not 1 <= end <= len(x):
            raise InvalidInput(f"short_conv: checkpoint_at must lie in [1, {len(x)}], got {end}")
        n = bisect_left(bounds, end, lo=1) - 1  # the sequence of token end - 1
        seen = torch.cat([initial_state[n], x[bounds[n] : end]])
        states.append(seen[len(seen) - S :])
    return torch.stack(states).to(x.dtype) if states else x.new_empty(0, S, x.shape[1])
