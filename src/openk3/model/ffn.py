"""The gated feed-forward network of the dense layer and of the shared experts (report §2.3.2)."""

from __future__ import annotations

import torch
from torch import nn

from openk3.config import ActivationConfig
from openk3.model.layers import At, Linear
from openk3.ops.activation import Activation

Tensor = torch.Tensor


def activation_of(config: ActivationConfig) -> Activation:
    """The operator that `config` names."""
    return Activation(config.kind, gate_cap=config.gate_cap, up_cap=config.up_cap)


class GatedFfn(nn.Module):
    """down(act(gate(x), up(x))): `[T, d]` to `[T, d]`."""

    def __init__(self, hidden_size: int, width: int, activation: Activation, at: At) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = Linear(hidden_size, width, at)
        self.up_proj = Linear(hidden_size, width, at)
        self.down_proj = Linear(width, hidden_size, at)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))
        return out
