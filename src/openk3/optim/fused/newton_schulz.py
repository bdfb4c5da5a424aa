"""Newton-Schulz in place, on many matrices of one shape, with no elementwise pass.

X <- (a I + b A + c A^2) X with A = X X^T: a is added to the diagonal before the polynomial is rounded, so
that the third product has nothing to add. A tall X takes A = X^T X from the other side and is never
transposed in memory. A and its polynomial are symmetric: tiles above the diagonal are copies.
"""

from __future__ import annotations

import torch

from openk3.ops.traces import named
from openk3.optim.fused import kernels
from openk3.optim.newton_schulz import Triples

CHUNK_ELEMENTS = 2**24
"""About the elements of X at a time: what its products hand on stays near the L2 cache, launches stay few."""

WHOLE = True
"""Whether a program takes a whole matrix where `polar_hopper` can."""
FEWEST = 66
"""Matrices from which on it does: with fewer, more than half of a card would have none."""


@named
def iterate_(x: torch.Tensor, triples: Triples) -> None:
    """Replace each matrix of `[m, R, C]`, of Frobenius norm at most 1, by its (nearly) orthogonal factor."""
    if WHOLE and len(x) >= FEWEST:
        from openk3.optim.fused import polar_hopper

        if polar_hopper.takes(x):
            polar_hopper.polar_(x, triples)
            return
    chunks = max(1, round(x.numel() / CHUNK_ELEMENTS), -(-len(x) // 65_535))
    # Alike: what is left over for a few matrices would take as many launches.
    for chunk in torch.tensor_split(x, min(chunks, len(x))):
        _iterate_chunk(chunk, triples)


def _iterate_chunk(x: torch.Tensor, triples: Triples) -> None:
    tall = x.shape[1] > x.shape[2]
    edge = min(x.shape[1:])
    gram, poly = (x.new_empty(len(x), edge, edge) for _ in range(2))
    spare = [torch.empty_like(x) for _ in range(2)]
    source = x
    for i, (a, b, c) in enumerate(triples):
        kernels.symmetric_product(source.mT if tall else source, gram)
        kernels.symmetric_product(gram, poly, alpha=c, beta=b, diagonal=a)
        target = x if i == len(triples) - 1 and i > 0 else spare[i % 2]
        torch.bmm(*((source, poly) if tall else (poly, source)), out=target)
        source = target
    if source is not x:
        x.copy_(source)
