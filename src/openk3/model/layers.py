"""The three small modules that hold weights. They allocate and apply; `model.init` fills.

Weights start as NaN, so that one that no rule fills cannot go unseen.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from openk3.ops.norm import rms_norm

Tensor = torch.Tensor


def weight(*shape: int, dtype: torch.dtype, device: torch.device | None) -> nn.Parameter:
    """A parameter of NaN."""
    return nn.Parameter(torch.full(shape, float("nan"), dtype=dtype, device=device))


class Linear(nn.Module):
    """x `[..., in]` to `[..., out]` by weight `[out, in]`; no bias anywhere in this family."""

    def __init__(self, inputs: int, outputs: int, *, dtype: torch.dtype, device: torch.device | None) -> None:
        super().__init__()
        self.weight = weight(outputs, inputs, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """Token ids `[T]` to rows `[T, d]` of weight `[V, d]`."""

    def __init__(self, rows: int, width: int, *, dtype: torch.dtype, device: torch.device | None) -> None:
        super().__init__()
        self.weight = weight(rows, width, dtype=dtype, device=device)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class RmsNorm(nn.Module):
    """RMSNorm over the last axis with gain `[width]`."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: torch.device | None) -> None:
        super().__init__()
        self.weight = weight(width, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
