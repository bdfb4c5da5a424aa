"""Between chunks: the state goes from one to the next, all sequences side by side (report §2.1.1 eq. 4).

With S `[V, K]` the state that enters a chunk:

    E     = (I + L)^-1 (V - left_k S^T)      prediction errors; diag(beta) E are the report's pseudo-values
    S_out = S diag(decay) + E^T right        so S_out is affine in S
    O     = left_q S^T + A E

The first two lines are the serial part, a few small products a chunk; the third is for all chunks at once.
Knows neither what is inside chunks nor which sequence a lane holds.
"""

from __future__ import annotations

import torch

from openk3.ops.kda.halving import Chunks
from openk3.ops.kda.layout import Steps

Tensor = torch.Tensor


def scan(chunks: Chunks, values: Tensor, steps: Steps, state: Tensor) -> tuple[Tensor, Tensor]:
    """Takes `state` `[lanes, V, K]` through the chunks, in place.

    Returns the errors `[B, R, V]` and the state that entered each chunk `[B, V, K]`. Overwrites `values`
    `[B, R, V]`.
    """
    B, _, V = values.shape
    errors, entering = torch.empty_like(values), values.new_empty(B, V, chunks.right.shape[-1])
    for tiles, lanes in steps:
        S = state[lanes]
        entering[tiles] = S
        unexpected = values[tiles].baddbmm_(chunks.left[tiles, 0], S.mT, alpha=-1)
        torch.bmm(chunks.inverse[tiles], unexpected, out=errors[tiles])
        S.mul_(chunks.decay[tiles, None]).baddbmm_(errors[tiles].mT, chunks.right[tiles])
    return errors, entering


def errors_again(chunks: Chunks, values: Tensor, entering: Tensor) -> Tensor:
    """The errors of all chunks at once, now that the entering states are known. Overwrites `values`."""
    return chunks.inverse @ values.baddbmm_(chunks.left[:, 0], entering.mT, alpha=-1)


def outputs(chunks: Chunks, errors: Tensor, entering: Tensor, scale: float) -> Tensor:
    """`[B, R, V]`: scale * (left_q S^T + A E)."""
    from_before = chunks.left[:, 1] @ entering.mT
    return from_before.baddbmm_(chunks.attention, errors, beta=scale, alpha=scale)


def scan_backward(chunks: Chunks, d_out: Tensor, steps: Steps, d_state: Tensor) -> tuple[Tensor, Tensor]:
    """Takes `d_state` `[lanes, V, K]` back through the chunks, in place. `d_out` `[B, R, V]` is the gradient
    to left_q S^T + A E.

    Returns what the other gradients are made of: that to what each row read, left_k S^T + L E and
    left_q S^T + A E, `[B, 2, R, V]`; and that to the state that leaves each chunk, `[B, V, K]`.
    """
    B, R, V = d_out.shape
    K = chunks.right.shape[-1]
    d_read, d_leaving = d_out.new_empty(B, 2, R, V), d_out.new_empty(B, V, K)
    d_read[:, 1] = d_out
    d_errors = chunks.attention.mT @ d_out
    d_read_rows, left_rows = d_read.view(B, 2 * R, V), chunks.left.view(B, 2 * R, K)
    for tiles, lanes in reversed(steps):
        dS = d_state[lanes]
        d_leaving[tiles] = dS
        d_error = d_errors[tiles].baddbmm_(chunks.right[tiles], dS.mT)
        torch.neg(chunks.inverse[tiles].mT @ d_error, out=d_read[tiles, 0])
        dS.mul_(chunks.decay[tiles, None]).baddbmm_(d_read_rows[tiles].mT, left_rows[tiles])
    return d_read, d_leaving
