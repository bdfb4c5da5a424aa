"""The decay map on plain PyTorch, keeping its inputs and nothing else for the backward.

Written so that no step loses digits or overflows: sigmoid(-x) stands for 1 - sigmoid(x), -logsigmoid(-u) for
softplus(u) (which torch cuts to u above 20), and what can reach infinity before it meets a zero is clamped
to the largest finite number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from openk3.ops.precision import own_dtypes

Tensor = torch.Tensor


class _KdaGate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, A_log: Tensor, dt_bias: Tensor | None, lower_bound: float | None
    ) -> Tensor:
        ctx.save_for_backward(z, A_log, dt_bias)
        ctx.lower_bound = lower_bound
        u, rate = _logits(z, A_log, dt_bias)
        if lower_bound is None:
            return F.logsigmoid(u.neg_()).mul_(rate)
        return _finite(u.mul_(rate)).sigmoid_().mul_(lower_bound)

    @staticmethod
    @own_dtypes
    @once_differentiable
    def backward(ctx: Any, d_g: Tensor) -> tuple[Tensor | None, ...]:
        z, A_log, dt_bias = ctx.saved_tensors
        u, rate = _logits(z, A_log, dt_bias)
        if ctx.lower_bound is None:
            # g = -rate softplus(u): dg/dA_log = g, dg/du = -rate sigmoid(u).
            d_rate_log = F.logsigmoid(-u).mul_(d_g)
            d_u = u.sigmoid_().mul_(d_g).neg_()
        else:
            # g = bound sigmoid(x), x = rate u: dg/dA_log = x dg/dx, dg/du = rate dg/dx.
            x = _finite(u.mul_(rate))
            d_u = torch.sigmoid(x).mul_(torch.sigmoid(-x)).mul_(d_g).mul_(ctx.lower_bound)
            d_rate_log = x.mul_(d_u)
        d_u.mul_(rate)
        d_A_log = d_rate_log.sum((0, 2))
        if ctx.lower_bound is None:
            d_A_log.mul_(rate.squeeze(1))
        d_dt_bias = None if dt_bias is None else d_u.sum(0).to(dt_bias.dtype)
        return d_u.to(z.dtype), d_A_log.to(A_log.dtype), d_dt_bias, None


def _logits(z: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """u = z + dt_bias `[T, H, K]` in a new buffer, and exp(A_log) `[H, 1]`."""
    dtype = torch.promote_types(torch.promote_types(z.dtype, A_log.dtype), torch.float32)
    if dt_bias is None:
        u = z.to(dtype, copy=True)
    else:
        dtype = torch.promote_types(dtype, dt_bias.dtype)
        u = z.to(dtype) + dt_bias.to(dtype)
    return u, _finite(A_log.to(dtype).exp()).unsqueeze(1)


def _finite(x: Tensor) -> Tensor:
    """`x` with infinities replaced by the largest number, in place, so that 0 * x stays 0."""
    largest = torch.finfo(x.dtype).max
    return x.clamp_(-largest, largest)


def kda_gate(z: Tensor, A_log: Tensor, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """See `openk3.ops.kda_gate.kda_gate`."""
    g: Tensor = _KdaGate.apply(z, A_log, dt_bias, lower_bound)  # type: ignore[no-untyped-call]
    return g
