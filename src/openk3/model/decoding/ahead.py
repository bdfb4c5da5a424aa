"""What a sublayer reads, for the last kernel of the one in front of it to ask for.

Between the large reads of a step, kernels of few rows leave the memory idle. The L2 cache then takes a part
of what comes next: `ahead` of `openk3.ops.decoding.products_into`. Nothing depends on it but time.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

AHEAD_BYTES = 24 << 20  # about half of the L2 cache, and what 6 us bring


def part(*tensors: Tensor, last: bool = False) -> list[Tensor]:
    """Rows of each tensor, first or last ones, AHEAD_BYTES in all."""
    rows = [AHEAD_BYTES // len(tensors) // max(1, x[:1].numel() * x.element_size()) for x in tensors]
    return [x[max(0, len(x) - n) :] if last else x[:n] for x, n in zip(tensors, rows, strict=True)]
