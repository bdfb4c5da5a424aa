"""AdamW on many tensors per call, with the numbers of torch.optim.AdamW (Loshchilov and Hutter 2019)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from openk3.optim.config import OptimConfig
from openk3.optim.slots import Slot


class AdamW:
    """The update rule and its state: two moments and a step count per parameter.

    The count is per parameter because a parameter without a gradient sits the step out.
    """

    def __init__(self, slots: Sequence[Slot], config: OptimConfig) -> None:
        self._config = config
        self._slots = slots
        self.state = {
            slot.name: {
                "exp_avg": torch.zeros_like(slot.master),
                "exp_avg_sq": torch.zeros_like(slot.master),
                "step": torch.zeros((), dtype=torch.int64, device="cpu"),
            }
            for slot in slots
        }

    @torch.no_grad()
    def step(self, lr: float, factor: float = 1.0) -> None:
        """Update the master of every parameter that has a gradient, which `factor` multiplies."""
        active = [(slot, grad) for slot in self._slots if (grad := slot.grad(factor)) is not None]
        if not active:
            return
        beta1, beta2 = self._config.betas
        masters, grads = [slot.master for slot, _ in active], [grad for _, grad in active]
        states = [self.state[slot.name] for slot, _ in active]
        first, second = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        steps = [int(s["step"].add_(1)) for s in states]
        lrs = [lr * slot.treatment.lr_scale for slot, _ in active]
        keep = [1 - own * slot.treatment.weight_decay for own, (slot, _) in zip(lrs, active, strict=True)]

        torch._foreach_mul_(masters, keep)
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        # Both moments started at zero: 1 - beta^step makes up for it, in the root and in the step size.
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, [(1 - beta2**step) ** 0.5 for step in steps])
        torch._foreach_add_(roots, self._config.eps)
        sizes = [-own / (1 - beta1**step) for own, step in zip(lrs, steps, strict=True)]
        torch._foreach_addcdiv_(masters, first, roots, sizes)
