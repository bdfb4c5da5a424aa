"""Products of one input for a few rows, prepared once: weights joined, or multiplied with each other.

With few rows a product takes as long as its weights take to read, and small ones as long as a launch. So what
reads one input becomes one matrix, and two small matrices in a row become one where that reads little more.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from openk3.ops.precision import widen

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


class Projections:
    """x `[n, d]` to one output `[n, width]`, contiguous, for each of `weights` `[width, d]`.

    precise: a further one, whose output comes last and in at least fp32.
    keep: x itself is wanted too, at the very end.
    """

    def __init__(self, *weights: Tensor, precise: Tensor | None = None, keep: bool = False) -> None:
        self.joined = torch.cat(weights) if len(weights) > 1 else weights[0] if weights else None
        self.widths = [len(weight) for weight in weights]
        self.precise = None if precise is None else widen(precise)
        self.keep = keep

    def __call__(self, x: Tensor) -> list[Tensor]:
        outputs = []
        if self.joined is not None:
            outputs = [
                out.contiguous() for out in torch.split_with_sizes(F.linear(x, self.joined), self.widths, 1)
            ]
        if self.precise is not None:
            outputs.append(F.linear(x.to(self.precise.dtype), self.precise))
        return [*outputs, x] if self.keep else outputs
