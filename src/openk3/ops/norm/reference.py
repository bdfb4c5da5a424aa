"""The three normalisations as the report writes them. The oracle for eager.py."""

from __future__ import annotations

import torch

from openk3.ops.precision import widen


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps), times the gain."""
    wide_x = widen(x)
    normed = wide_x / torch.sqrt(wide_x.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor, gate_logits: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm(x) * sigmoid(gate_logits)."""
    return (rms_norm(widen(x), weight, eps) * torch.sigmoid(widen(gate_logits))).to(x.dtype)


def l2_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(sum(x^2) + eps)."""
    wide_x = widen(x)
    return (wide_x / torch.sqrt(wide_x.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
