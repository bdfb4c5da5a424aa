"""Tables through which one launch reaches many tensors: their addresses, and each parameter's step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from openk3.optim.slots import Slot

Tensor = torch.Tensor

ALIGNMENT = 16
"""Bytes that every tensor begins on a multiple of."""
LANE = 16
"""Elements: where all pieces begin and end on multiples of it, kernels move 16 bytes at a time."""


class Addresses:
    """Row by slot: addresses of gradient, master, compute copy and the tensors of its state; 0 for none.

    The gradients' change from step to step where they are freed in between. A table is uploaded only then,
    from pinned memory, so that the host does not wait.
    """

    def __init__(self, slots: Sequence[Slot], state: Sequence[Sequence[Tensor]]) -> None:
        self._slots = slots
        self._state = [[tensor.data_ptr() for tensor in tensors] for tensors in state]
        columns = 3 + len(self._state[0])
        self.table = torch.zeros(len(slots), columns, dtype=torch.int64, device=slots[0].master.device)
        self._host: Tensor | None = None  # kept: the copy from it may not have run yet
        self._uploaded: list[list[int]] = []

    def refresh(self) -> list[Tensor]:
        """Point the table at the present gradients; hold what it returns until the kernels are launched."""
        held = [_as_kernels_read(slot.grad()) for slot in self._slots]
        rows = [
            [
                0 if grad is None else grad.data_ptr(),
                slot.master.data_ptr(),
                slot.parameter.data_ptr() if slot.owns_master else 0,
                *state,
            ]
            for slot, grad, state in zip(self._slots, held, self._state, strict=True)
        ]
        if rows != self._uploaded:
            host = torch.tensor(rows, dtype=torch.int64)
            self._host = host.pin_memory() if self.table.is_cuda else host
            self.table.copy_(self._host, non_blocking=True)
            self._uploaded = rows
        return [grad for grad in held if grad is not None]


def _as_kernels_read(grad: Tensor | None) -> Tensor | None:
    """Contiguous, from a multiple of 16 bytes on: a copy where the gradient lies otherwise."""
    if grad is None or (grad.is_contiguous() and grad.data_ptr() % ALIGNMENT == 0):
        return grad
    return grad.clone(memory_format=torch.contiguous_format)


class Rates:
    """lr and weight decay of each slot, float64 `[n]` on the device, from the step's learning rate there."""

    def __init__(self, slots: Sequence[Slot], device: torch.device) -> None:
        scales = [slot.treatment.lr_scale for slot in slots]
        decays = [slot.treatment.weight_decay for slot in slots]
        self._scale = torch.tensor(scales, dtype=torch.float64, device=device)
        self._decay = torch.tensor(decays, dtype=torch.float64, device=device)

    def of(self, lr: Tensor) -> tuple[Tensor, Tensor]:
        """The factor that a decaying weight keeps, and the slot's own learning rate."""
        own = lr * self._scale
        return 1 - own * self._decay, own


def aligned(start: int, elements: int) -> bool:
    return start % LANE == 0 and elements % LANE == 0
