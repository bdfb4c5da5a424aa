"""Where the kernels in Hopper's layouts fit: one rule for all of them. Imports no triton."""

from __future__ import annotations

import torch


def on_hopper(x: torch.Tensor) -> bool:
    """Whether x lies on a card of compute capability 9.0."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0)


def hopper_fits(x: torch.Tensor, head_size: int) -> bool:
    """Whether heads of `head_size` = K = V in x's dtype, where x lies, have kernels in Hopper's layouts."""
    return x.dtype == torch.bfloat16 and head_size == 128 and on_hopper(x)
