"""The backward of chunkwise KDA: the reverse scan, then everything inside chunks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from openk3.ops.kda.hopper import hopper_fits
from openk3.ops.kda.kernels.intra_backward import InputGradients, intra_backward
from openk3.ops.kda.kernels.plan import ChunkPlan
from openk3.ops.kda.kernels.prepare import Prepared
from openk3.ops.kda.kernels.scan import Pieces
from openk3.ops.kda.kernels.scan_backward import scan_backward


class Gradients(NamedTuple):
    inputs: InputGradients  # of q, k, z, b, A_log, dt_bias
    v: torch.Tensor  # [T, H, V]
    initial_state: torch.Tensor  # [N, H, V, K] fp32


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    o: torch.Tensor,
    prepared: Prepared,
    states: torch.Tensor,
    errors: torch.Tensor,
    d_o: torch.Tensor,
    d_final_state: torch.Tensor | None,
    plan: ChunkPlan,
    lower_bound: float | None,
    scale: float,
    pieces: Pieces | None = None,
    fragments: torch.Tensor | None = None,
) -> Gradients:
    """All gradients of the operator, with either gate.

    Args:
        q, k, z: raw inputs `[T, H, K]`, v `[T, H, V]`, last axis contiguous; b `[T, H]`; A_log `[H]` and
            dt_bias `[H, K]` fp32.
        o: the forward's outputs `[T, H, V]` contiguous; d_o their gradient, likewise.
        prepared: the chunks of `prepare`.
        states: that enter each chunk, `[NC, H, V, K]`, and errors `[NC, H, 64, V]`: of `scan`.
        d_final_state: `[N, H, V, K]` fp32 contiguous, or None for zero.
        pieces, fragments: of `scan`, where it had sequences cut into pieces.

    Returns:
        The gradients in the dtypes of their inputs.
    """
    d_v, d_states, d_initial_state = scan_backward(
        d_o, prepared, plan, d_final_state, pieces=pieces, fragments=fragments
    )
    tensors = q, k, v, z, b, A_log, dt_bias, o, d_o, d_v, states, d_states, errors
    if lower_bound is not None and hopper_fits(q, q.shape[-1]):
        from openk3.ops.kda.kernels.intra_backward_hopper import intra_backward_hopper

        inputs = intra_backward_hopper(*tensors, plan, lower_bound, scale)
    else:
        inputs = intra_backward(*tensors, plan, lower_bound, scale)
    return Gradients(inputs, d_v, d_initial_state)
