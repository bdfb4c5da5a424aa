"""A parameter, its master copy and its treatment: what the update rules work on.

The model computes with the parameter, the update rules change the master. The two share memory unless the
parameter is of half precision: then the master is an fp32 copy, owned here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from openk3.ops.precision import wide
from openk3.optim.rules import Treatment


@dataclass(frozen=True)
class Slot:
    """One trained parameter."""

    name: str
    parameter: torch.nn.Parameter
    master: torch.Tensor
    treatment: Treatment

    @classmethod
    def of(cls, name: str, parameter: torch.nn.Parameter, treatment: Treatment) -> Slot:
        data = parameter.detach()
        return cls(name, parameter, data.to(wide(data.dtype)), treatment)

    @property
    def owns_master(self) -> bool:
        return self.master.dtype != self.parameter.dtype

    def grad(self, factor: float = 1.0) -> torch.Tensor | None:
        """The gradient in the master's dtype, times `factor`; None where the last backward did not reach."""
        if self.parameter.grad is None:
            return None
        grad = self.parameter.grad.to(self.master.dtype)
        return grad if factor == 1 else grad * factor

    @torch.no_grad()
    def publish(self) -> None:
        """Round the master into the parameter that the model computes with."""
        if self.owns_master:
            self.parameter.copy_(self.master)
