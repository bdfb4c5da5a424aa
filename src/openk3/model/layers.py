"""The three small modules that hold weights. They allocate and apply; `model.init` fills.

Weights start as NaN, so that one that no rule fills cannot go unseen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from openk3.ops.norm import rms_norm
from openk3.ops.precision import wide

Tensor = torch.Tensor


class At(NamedTuple):
    """The dtype and device that weights are allocated in; `precise` is what stays at least fp32."""

    dtype: torch.dtype
    device: torch.device | None

    @property
    def precise(self) -> At:
        return At(wide(self.dtype), self.device)


def weight(at: At, *shape: int) -> nn.Parameter:
    """A parameter of NaN."""
    return nn.Parameter(torch.full(shape, float("nan"), dtype=at.dtype, device=at.device))


class Linear(nn.Module):
    """x `[..., in]` to `[..., out]` by weight `[out, in]`; no bias anywhere in this family."""

    def __init__(self, inputs: int, outputs: int, at: At) -> None:
        super().__init__()
        self.weight = weight(at, outputs, inputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """Token ids `[T]` to rows `[T, d]` of weight `[V, d]`."""

    def __init__(self, rows: int, width: int, at: At) -> None:
        super().__init__()
        self.weight = weight(at, rows, width)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class RmsNorm(nn.Module):
    """RMSNorm over the last axis with gain `[width]`."""

    def __init__(self, width: int, eps: float, at: At) -> None:
        super().__init__()
        self.weight = weight(at, width)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
