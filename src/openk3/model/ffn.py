"""The gated feed-forward network of the dense layer and of the shared experts (report §2.3.2)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

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
        if self.activation.takes_halves(x):
            # One product forward and one for dX, which then needs no sum of two. The weights are put together
            # for each call: 8 F d bytes moved in bf16, beside the 2 T (d + 2 F) of the product.
            both = F.linear(x, torch.cat([self.gate_proj.weight, self.up_proj.weight]))
            hidden = self.activation.of_halves(both)
        else:
            hidden = self.activation(self.gate_proj(x), self.up_proj(x))
        out: Tensor = self.down_proj(hidden)
        return out
