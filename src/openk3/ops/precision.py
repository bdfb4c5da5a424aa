"""The house rule for half precisions: compute in at least fp32. Shared by the operators, knows none."""

from __future__ import annotations

import functools

import torch


@functools.cache
def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32 for half precisions; float32 and float64 stay what they are."""
    return torch.promote_types(dtype, torch.float32)


def widen(x: torch.Tensor) -> torch.Tensor:
    """`x` in its compute dtype; no copy when it is there already."""
    return cast(x, wide(x.dtype))


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x.to(dtype)`; where that is nothing, without a call of torch, which is a tenth of decoding a token."""
    return x if x.dtype == dtype else x.to(dtype)
