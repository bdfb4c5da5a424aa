"""Gated units act(gate) * up on any device in plain PyTorch: formulas given, everything else here.

Autograd on a formula would keep up to six fp32 tensors of the widest shape in the model; a unit keeps its two
inputs. Its temporaries, the widened halves among them, are pieces that stay in cache, never whole tensors.
Knows nothing of any one formula: `ops.situ` and `ops.glu` bring those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from openk3.ops.precision import cast, own_dtypes, widen

Tensor = torch.Tensor

CPU_PIECE = 1 << 17  # elements; 0.5 MB in fp32 (measured: 1.2 to 1.3 times faster than whole tensors)


class GatedUnit(NamedTuple):
    """Two formulas, elementwise, from at least fp32 to new tensors of the same dtype."""

    value: Callable[[Tensor, Tensor], Tensor]
    partials: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]  # value, d value/d gate, d value/d up

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """`[..., F]` twice to `[..., F]` in their dtype, with autograd."""
        out: Tensor = _Apply.apply(gate, up, self)  # type: ignore[no-untyped-call]
        return out

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """The same without autograd, for those who write their own backward."""
        if gate.numel() <= CPU_PIECE:
            return cast(self.value(widen(gate), widen(up)), gate.dtype)
        (out,) = _in_pieces(lambda g, u: (self.value(widen(g), widen(u)),), 1, gate, up)
        return out

    def backward(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`partials` of whole tensors: three new tensors in the inputs' dtype."""
        out, by_gate, by_up = _in_pieces(lambda g, u: self.partials(widen(g), widen(u)), 3, gate, up)
        return out, by_gate, by_up


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, unit: GatedUnit) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.unit = unit
        return unit.forward(gate, up)

    @staticmethod
    @own_dtypes
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        def chain(gate: Tensor, up: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
            _, by_gate, by_up = ctx.unit.partials(widen(gate), widen(up))
            return by_gate.mul_(d_out), by_up.mul_(d_out)

        d_gate, d_up = _in_pieces(chain, 2, *ctx.saved_tensors, d_out)
        return d_gate, d_up, None


def _in_pieces(
    formula: Callable[..., tuple[Tensor, ...]], outputs: int, *inputs: Tensor
) -> tuple[Tensor, ...]:
    """Evaluates an elementwise formula piece by piece into `outputs` new tensors like the first input."""
    first = inputs[0]
    results = tuple(torch.empty(first.shape, dtype=first.dtype, device=first.device) for _ in range(outputs))
    size = CPU_PIECE if first.device.type == "cpu" else max(1, first.numel())
    flat_inputs = [torch.split(x.reshape(-1), size) for x in inputs]
    flat_results = [torch.split(x.view(-1), size) for x in results]
    for piece, targets in zip(zip(*flat_inputs, strict=True), zip(*flat_results, strict=True), strict=True):
        for target, value in zip(targets, formula(*piece), strict=True):
            target.copy_(value)
    return results
