"""The short convolution, sequence by sequence, tap by tap (report §2.1.1 eq. 2). The oracle for `eager`."""

from __future__ import annotations

from itertools import pairwise

import torch

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
