"""Normalisations in plain PyTorch, forward and backward by hand, keeping the inputs and one scalar a row.

These operators are bound by memory traffic, so both directions count passes over [rows, d]: two forward, four
backward, in place on one own buffer; what reduces a row is a norm or a matrix-vector product, which make no
temporaries. All three are one formula: y = x * inv * weight with inv = (sum(x^2) / divisor + eps)^-1/2, where
divisor is d for RMSNorm and 1 for the L2 norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from openk3.ops.precision import own_dtypes, wide, widen


def _inverse_norm(x: torch.Tensor, eps: float, divisor: int) -> torch.Tensor:
    """(sum(x^2) / divisor + eps)^-1/2 of each row: `[..., 1]`, at least fp32."""
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide(x.dtype))
    return norm.square_().div_(divisor).add_(eps).rsqrt_()


def _scaled(x: torch.Tensor, inv: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """x * inv * weight in inv's dtype, in a new buffer."""
    y = x * inv
    return y if weight is None else y.mul_(weight)


def _backward(
    d_y: torch.Tensor,
    x: torch.Tensor,
    product: torch.Tensor,
    weight: torch.Tensor | None,
    inv: torch.Tensor,
    divisor: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients to x and weight, given product = d_y * x, which both of them reduce.

    dx = inv * d_y * weight - x * inv^3 / divisor * sum(product * weight)
    dweight = sum over rows of product * inv
    """
    rows = product.view(-1, x.shape[-1])
    if weight is None:
        along, d_weight = product.sum(-1, keepdim=True), None
    else:
        along = torch.mv(rows, weight.to(rows.dtype)).view(inv.shape)
        d_weight = torch.mv(rows.t(), inv.view(-1)).to(weight.dtype)
    d_x = _scaled(d_y, inv, weight)
    d_x.addcmul_(x, along.mul_(inv**3), value=-1 / divisor)
    return d_x, d_weight


class _RowNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float, divisor: int
    ) -> torch.Tensor:
        inv = _inverse_norm(x, eps, divisor)
        ctx.save_for_backward(x, weight, inv)
        ctx.divisor = divisor
        return _scaled(x, inv, weight).to(x.dtype)

    @staticmethod
    @own_dtypes
    @once_differentiable
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        x, weight, inv = ctx.saved_tensors
        wide_x, d_y = widen(x), widen(d_y)
        product = (d_y * wide_x).contiguous()
        d_x, d_weight = _backward(d_y, wide_x, product, weight, inv, ctx.divisor)
        return d_x.to(x.dtype), d_weight, None, None


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate_logits: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        inv = _inverse_norm(x, eps, x.shape[-1])
        ctx.save_for_backward(x, gate_logits, weight, inv)
        return _scaled(x, inv, weight).mul_(torch.sigmoid(widen(gate_logits))).to(x.dtype)

    @staticmethod
    @own_dtypes
    @once_differentiable
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None]:
        x, gate_logits, weight, inv = ctx.saved_tensors
        wide_x, logits = widen(x), widen(gate_logits)
        d_normed = torch.sigmoid(logits).mul_(d_y)
        product = (d_normed * wide_x).contiguous()
        d_x, d_weight = _backward(d_normed, wide_x, product, weight, inv, x.shape[-1])
        # d_gate = d_y * normed * sig(l) sig(-l), and product * inv * weight is all of it but sig(-l),
        # which 1 - sig(l) would give without digits where the gate saturates.
        d_gate = product.mul_(inv).mul_(weight).mul_(logits.neg().sigmoid_())
        return d_x.to(x.dtype), d_gate.to(gate_logits.dtype), d_weight, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See `openk3.ops.norm.rms_norm`."""
    y: torch.Tensor = _RowNorm.apply(x, weight, eps, x.shape[-1])  # type: ignore[no-untyped-call]
    return y


def gated_rms_norm(
    x: torch.Tensor, gate_logits: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See `openk3.ops.norm.gated_rms_norm`."""
    y: torch.Tensor = _GatedRmsNorm.apply(x, gate_logits, weight, eps)  # type: ignore[no-untyped-call]
    return y


def l2_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """See `openk3.ops.norm.l2_norm`."""
    y: torch.Tensor = _RowNorm.apply(x, None, eps, 1)  # type: ignore[no-untyped-call]
    return y
