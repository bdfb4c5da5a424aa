"""SwiGLU's and GLU's two formulas for `GatedUnit`, written so that no element loses its digits."""

from __future__ import annotations

import torch

from openk3.ops.gated_unit import GatedUnit

Tensor = torch.Tensor


def _swiglu_value(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate).mul_(up)


def _swiglu_partials(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    act = torch.nn.functional.silu(gate)
    # up * d/dg [g sig(g)] = up * sig(g) (1 + g (1 - sig(g))): here the 1 beside it covers what 1 - sig loses
    by_gate = torch.ops.aten.silu_backward(up, gate)
    return act * up, by_gate, act


def _glu_value(gate: Tensor, up: Tensor) -> Tensor:
    return torch.sigmoid(gate).mul_(up)


def _glu_partials(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    act = torch.sigmoid(gate)
    value = act * up
    # d/dg sig(g) = sig(g) sig(-g); the usual 1 - sig(g) has no digits left where g is large
    return value, gate.neg().sigmoid_().mul_(value), act


swiglu = GatedUnit(_swiglu_value, _swiglu_partials)
glu = GatedUnit(_glu_value, _glu_partials)
swiglu_forward, swiglu_partials = swiglu.forward, swiglu.backward
glu_forward, glu_partials = glu.forward, glu.backward
