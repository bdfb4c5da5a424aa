"""Weights prepared for a few rows: two small matrices in a row become one."""

from __future__ import annotations

import torch

Tensor = torch.Tensor

FOLDED_ELEMENTS = 1 << 20
"""Of the most that two matrices are multiplied into: 2 MB of bf16 take half a microsecond to read, a launch
takes longer."""


def fold(second: Tensor, first: Tensor) -> Tensor | None:
    """The matrix of x -> second (first x), rounded once, or None where it would be large.

    second: `[..., m, l]`, first: `[..., l, d]`.
    """
    if second[..., :1].numel() * first.shape[-1] > FOLDED_ELEMENTS:
        return None
    precise = torch.float64
    return (second.to(precise) @ first.to(precise)).to(first.dtype)
