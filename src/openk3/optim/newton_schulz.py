"""Newton-Schulz: the orthogonal factor of many matrices at once, by matrix products alone (report §2.5).

A matrix G = U S V^T becomes U p(S) V^T, where p is an odd polynomial that takes (0, 1] close to 1. Knows
nothing about parameters, heads or experts: it is given blocks, and stacks those of one shape.

On a CPU a block's result does not depend on what it is stacked with, bit for bit. Two things make it so
(MKL): each row begins on a 64-byte line, since other alignments take other kernels; and fp32 and float64
blocks are multiplied one at a time, since threads may cut a lone product otherwise than a batch of them
(seen for float64 on AMD, for fp32 on Intel). bfloat16 products go through oneDNN, which does not: they are
batched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from openk3.ops.traces import named

CoefficientName = Literal["jordan", "quintic", "polar-express", "exact"]

Triples = tuple[tuple[float, float, float], ...]

_LINE = 64  # bytes


class Coefficients(NamedTuple):
    """X <- a X + (b A + c A^2) X with A = X X^T, one (a, b, c) per iteration.

    A singular value of at least `floor` times the Frobenius norm ends within `bound` of 1.
    """

    triples: Triples
    floor: float
    bound: float


COEFFICIENTS: dict[CoefficientName, Coefficients] = {
    # K. Jordan's Muon (2024), also Moonlight's and K2's. Steepest at zero: singular values end spread over
    # 0.68 ... 1.21 and never settle; in training that does as well as the exact factor.
    "jordan": Coefficients(((3.4445, -4.7750, 2.0315),) * 5, floor=2e-3, bound=0.32),
    # You Jiacheng (2025). Five distinct steps found by search: tight, but only from 1% of the norm on.
    "quintic": Coefficients(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        floor=1e-2,
        bound=0.033,
    ),
    # Polar Express (Amsel et al., arXiv 2505.16932). Minimax over five steps; safety factor 2e-2, cushion 2.
    "polar-express": Coefficients(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        floor=1e-3,
        bound=0.142,
    ),
    # The Taylor polynomial of degree 5. It does settle at 1, for three times the work: for ablations.
    "exact": Coefficients(((15 / 8, -10 / 8, 3 / 8),) * 16, floor=1e-3, bound=1e-5),
}


@named
def orthogonalize(
    blocks: Sequence[torch.Tensor],
    coefficients: CoefficientName = "jordan",
    *,
    dtype: torch.dtype | None = None,
    eps: float = 1e-7,
) -> list[torch.Tensor]:
    """The (nearly) orthogonal factor of every matrix; all matrices of one shape go through together.

    Args:
        blocks: `[M, R, C]` each, at least fp32, any M, R, C; a tall matrix is treated as its transpose.
        coefficients: a row of `COEFFICIENTS`.
        dtype: of the products; None = bfloat16 on a GPU, the block's own on a CPU. float64 stays float64.
        eps: a matrix of smaller Frobenius norm is not scaled up to norm 1, so zero stays zero.

    Returns:
        One tensor per block, in its shape and dtype.
    """
    alike: dict[tuple[int, int, torch.dtype], list[int]] = {}
    for index, block in enumerate(blocks):
        rows, cols = block.shape[-2:]
        alike.setdefault((min(rows, cols), max(rows, cols), block.dtype), []).append(index)

    factors = list(blocks)
    for members in alike.values():
        wide = [_transposed_if_tall(blocks[i]) for i in members]
        for i, factor in zip(members, _polar_factors(wide, coefficients, dtype, eps), strict=True):
            factors[i] = factor.mT if blocks[i].shape[-2] > blocks[i].shape[-1] else factor
    return factors


def _transposed_if_tall(block: torch.Tensor) -> torch.Tensor:
    return block.mT if block.shape[-2] > block.shape[-1] else block


def _polar_factors(
    wide: list[torch.Tensor], coefficients: CoefficientName, dtype: torch.dtype | None, eps: float
) -> tuple[torch.Tensor, ...]:
    """`[m, R, C]` blocks of one R <= C, stacked to `[M, R', C']` for the iteration and apart again.

    R' and C' are padded with zeros to whole lines; the iteration keeps them zero.
    """
    given, (rows, cols), counts = wide[0].dtype, wide[0].shape[-2:], [len(w) for w in wide]
    if given == torch.float64:
        dtype = given
    elif dtype is None:
        dtype = torch.bfloat16 if wide[0].is_cuda else given
    line = _LINE // dtype.itemsize
    x = wide[0].new_zeros(sum(counts), -(-rows // line) * line, -(-cols // line) * line)
    for part, w in zip(torch.split(x, counts), wide, strict=True):
        part[:, :rows, :cols] = w

    # The norm of the row norms: each row is summed by one thread, however many matrices there are.
    norm = torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=-1), dim=-1)
    x = x.div_(norm.clamp_min(eps)[:, None, None]).to(dtype)
    triples = COEFFICIENTS[coefficients].triples
    if not x.is_cuda and dtype in (torch.float32, torch.float64):
        x = torch.cat([_iterate(matrix, triples) for matrix in torch.split(x, 1)])
    else:
        x = _iterate(x, triples)
    return torch.split(x[:, :rows, :cols].to(given), counts)


def _iterate(x: torch.Tensor, triples: Triples) -> torch.Tensor:
    for a, b, c in triples:
        gram = torch.bmm(x, x.mT)
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, poly, x, beta=a)
    return x
