"""AdamW with one kernel; the rule is that of `openk3.optim.adamw`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from openk3.optim.config import OptimConfig
from openk3.optim.fused import kernels
from openk3.optim.fused.tables import Addresses, Rates, aligned
from openk3.optim.slots import Slot

Tensor = torch.Tensor


class FusedAdamW:
    """The update rule and its state: two moments and a step count per parameter, all on the device.

    Publishes into the compute copies.
    """

    def __init__(self, slots: Sequence[Slot], config: OptimConfig) -> None:
        self._config = config
        self.state: dict[str, dict[str, Tensor]] = {}
        self._pieces: list[tuple[Tensor, bool]] = []
        if not slots:
            return
        device = slots[0].master.device
        self._counts = torch.zeros(len(slots), dtype=torch.int64, device=device)
        for slot, count in zip(slots, self._counts, strict=True):
            moments = {name: torch.zeros_like(slot.master) for name in ("exp_avg", "exp_avg_sq")}
            self.state[slot.name] = {**moments, "step": count}
        states = [self.state[slot.name] for slot in slots]
        self._addresses = Addresses(slots, [[s["exp_avg"], s["exp_avg_sq"]] for s in states])
        self._rates = Rates(slots, device)
        self._half = next((slot.parameter.dtype for slot in slots if slot.owns_master), torch.bfloat16)
        for is_aligned in (True, False):
            pieces = [
                (index, start, min(kernels.ADAMW["TILE"], slot.master.numel() - start))
                for index, slot in enumerate(slots)
                if aligned(0, slot.master.numel()) == is_aligned
                for start in range(0, slot.master.numel(), kernels.ADAMW["TILE"])
            ]
            if pieces:
                table = torch.tensor(pieces, dtype=torch.int64, device=device)
                self._pieces.append((table, is_aligned))

    def find_gradients(self) -> list[Tensor]:
        """As in `FusedMuon`."""
        return self._addresses.refresh() if self._pieces else []

    @torch.no_grad()
    def launch(self, lr: Tensor, scale: Tensor) -> None:
        """As `AdamW.step`, on gradients times `scale`; arguments as in `FusedMuon.launch`."""
        if not self._pieces:
            return
        beta1, beta2 = self._config.betas
        goes = scale.isfinite() & (scale != 0)
        self._counts += (self._addresses.table[:, 0] != 0) & goes
        steps = self._counts.double()
        keep, own = self._rates.of(lr)
        # A slot that never had a gradient has 0 / 0 here, and no kernel reads it.
        size, root = own / (1 - beta1**steps), (1 - beta2**steps).sqrt()
        rates = torch.stack([keep, size, root], dim=1).float()
        for pieces, is_aligned in self._pieces:
            kernels.adamw(
                pieces, self._addresses.table, rates, scale,
                betas=(beta1, beta2), eps=self._config.eps, half=self._half, aligned=is_aligned,
            )  # fmt: skip
