"""SwiGLU's and GLU's two formulas for `GatedUnit`.

They take sig(-g) for 1 - sig(g), which loses its digits where g is large.
"""

from __future__ import annotations

import torch

from openk3.ops.gated_unit import GatedUnit

Tensor = torch.Tensor


def _swiglu_value(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate).mul_(up)


def _swiglu_partials(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sig = torch.sigmoid(gate)
    # d/dg [g sig(g)] = sig(g) (1 + g sig(-g))
    by_gate = gate.neg().sigmoid_().mul_(gate).add_(1).mul_(sig).mul_(up)
    act = sig.mul_(gate)
    return act * up, by_gate, act


def _glu_value(gate: Tensor, up: Tensor) -> Tensor:
    return torch.sigmoid(gate).mul_(up)


def _glu_partials(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    act = torch.sigmoid(gate)
    value = act * up
    return value, gate.neg().sigmoid_().mul_(value), act


swiglu = GatedUnit(_swiglu_value, _swiglu_partials)
glu = GatedUnit(_glu_value, _glu_partials)
swiglu_forward, swiglu_partials = swiglu.forward, swiglu.backward
glu_forward, glu_partials = glu.forward, glu.backward
