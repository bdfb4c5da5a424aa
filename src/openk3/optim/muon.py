"""Muon over blocks: momentum, the orthogonal factor of each block, Moonlight's scale (report §2.5).

A block is one head's rows, one expert, or a whole matrix, as `openk3.optim.rules` cuts it. Blocks of one
shape from all parameters go through Newton-Schulz together.

The orthogonal factor has one size however small its matrix is. So a block whose gradient is exactly zero, an
expert that no token chose, would be pushed along what is left of its momentum as far as by a real gradient,
and for as long as any of it is left. Such a block sits the step out: it neither moves nor decays, or experts
that are not routed to would shrink to nothing. Its momentum takes the zero in like any gradient: it is an
average over steps, and what it held fades until the expert has tokens again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from openk3.optim.config import OptimConfig
from openk3.optim.newton_schulz import orthogonalize
from openk3.optim.rules import Split
from openk3.optim.slots import Slot

ADAMW_RMS = 0.2
"""RMS of a typical AdamW update (Moonlight, arXiv 2502.16982). An orthogonal [R, C] block has RMS
1 / sqrt(max(R, C)); at this times sqrt(max(R, C)) one learning rate serves both optimizers."""

BUCKET_ELEMENTS = 2**27
"""Elements in flight at a time, which bounds the extra memory of a step to about 3 GB in fp32."""

_NS_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Muon:
    """The update rule and its state: a momentum per parameter, in the master's shape and dtype."""

    def __init__(self, slots: Sequence[tuple[Slot, Split]], config: OptimConfig) -> None:
        self._config = config
        by_shape = sorted(slots, key=lambda item: (item[1].bands, item[0].master.shape[-1]))
        self._buckets = _buckets(by_shape)
        self.state = {slot.name: {"momentum": torch.zeros_like(slot.master)} for slot, _ in slots}

    @torch.no_grad()
    def step(self, lr: float, factor: float = 1.0) -> None:
        """Update the master of every parameter that has a gradient, but for its blocks where that is zero.

        Args:
            factor: multiplies the gradients.
        """
        for bucket in self._buckets:
            self._step(bucket, lr, factor)

    def _step(self, bucket: list[tuple[Slot, Split]], lr: float, factor: float) -> None:
        directions: list[torch.Tensor] = []
        targets: list[tuple[torch.Tensor, float]] = []  # a view of a master, its learning rate
        for slot, split in bucket:
            grad = slot.grad(factor)
            if grad is None:
                continue
            own_lr = lr * slot.treatment.lr_scale
            direction = self._direction(grad, self.state[slot.name]["momentum"])
            parts = (split.blocks(x) for x in (grad, direction, slot.master))
            for g, d, block in zip(*parts, strict=True):
                moves = g.ne(0).flatten(1).any(dim=1)[:, None, None]  # stays on the device
                directions.append(d * moves)  # the factor of zero is zero
                kept = torch.ones_like(moves, dtype=block.dtype)
                block.mul_(kept.masked_fill_(moves, 1 - own_lr * slot.treatment.weight_decay))
                targets.append((block, own_lr))
        factors = orthogonalize(
            directions, self._config.coefficients, dtype=_NS_DTYPES[self._config.ns_dtype]
        )
        for (block, own_lr), polar in zip(targets, factors, strict=True):
            block.add_(polar, alpha=-own_lr * ADAMW_RMS * math.sqrt(max(block.shape[-2:])))

    def _direction(self, grad: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        """The running average of gradients, advanced in place; with Nesterov, seen one gradient ahead."""
        momentum.lerp_(grad, 1 - self._config.momentum)
        return grad.lerp(momentum, self._config.momentum) if self._config.nesterov else momentum


def _buckets(slots: list[tuple[Slot, Split]]) -> list[list[tuple[Slot, Split]]]:
    """Cut into runs of at most `BUCKET_ELEMENTS`; a larger parameter has one to itself."""
    buckets: list[list[tuple[Slot, Split]]] = []
    room = 0
    for slot, split in slots:
        size = slot.master.numel()
        if not buckets or size > room:
            buckets.append([])
            room = BUCKET_ELEMENTS
        buckets[-1].append((slot, split))
        room -= size
    return buckets
