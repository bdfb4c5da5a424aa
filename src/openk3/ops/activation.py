"""Which gated unit a feed-forward network uses, as one small value that config, dense FFN and experts share.

Knows the three units of report §2.3.2 (figure 4); knows nothing of projections, routing or devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from openk3.errors import InvalidInput
from openk3.ops.dispatch import Implementation, Kernel, choose
from openk3.ops.glu import glu, swiglu
from openk3.ops.glu.eager import glu_forward, glu_partials, swiglu_forward, swiglu_partials
from openk3.ops.situ import situ_glu
from openk3.ops.situ.eager import situ_forward, situ_partials

Kind = Literal["situ", "swiglu", "glu"]
KERNEL = Kernel("Activation.of_halves", takes="any shape; bf16, fp16 or fp32", checked_on="H200 (sm_90)")
KERNELS = (KERNEL,)


@dataclass(frozen=True)
class Activation:
    """A gated unit act(gate) * up.

    kind: "situ" (K3, eq. 12), "swiglu" (silu(gate) * up) or "glu" (sigmoid(gate) * up).
    gate_cap, up_cap: the caps of "situ" (beta_1, beta_2 of eq. 12); the other kinds ignore them.
    """

    kind: Kind = "situ"
    gate_cap: float = 4.0
    up_cap: float = 25.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InvalidInput(f"Activation: kind is {self.kind!r}; it must be one of {get_args(Kind)}")
        if not (self.gate_cap > 0 and self.up_cap > 0):
            raise InvalidInput(
                f"Activation: caps must be positive, got gate_cap={self.gate_cap}, up_cap={self.up_cap}"
            )

    def __call__(
        self, gate: torch.Tensor, up: torch.Tensor, *, implementation: Implementation | None = None
    ) -> torch.Tensor:
        """`[..., F]` twice -> `[..., F]` in their dtype, with autograd; the backward keeps the two inputs."""
        match self.kind:
            case "situ":
                return situ_glu(
                    gate, up, gate_cap=self.gate_cap, up_cap=self.up_cap, implementation=implementation
                )
            case "swiglu":
                return swiglu(gate, up, implementation=implementation)
            case "glu":
                return glu(gate, up, implementation=implementation)

    def of_halves(self, both: torch.Tensor, *, implementation: Implementation | None = None) -> torch.Tensor:
        """The same of gate and up side by side, `[..., 2F]` -> `[..., F]`, as one product makes them.

        By default the kernels where `takes_halves`; they write the two gradients side by side too.

        Raises:
            InvalidInput: the last axis is odd.
            KernelUnavailable: the forced implementation cannot run here.
        """
        if both.dim() == 0 or both.shape[-1] % 2:
            raise InvalidInput(f"Activation: both is {tuple(both.shape)}; its last axis must have halves")
        if choose("activation", both, implementation, by_default=KERNEL.checked) == "triton":
            from openk3.ops.gated_unit_kernels import gated_unit_halves

            return gated_unit_halves(both, self.kind, self.gate_cap, self.up_cap)
        gate, up = both.chunk(2, dim=-1)
        return self(gate, up, implementation=implementation)

    def takes_halves(self, x: torch.Tensor) -> bool:
        """Whether gate and up are best made by one product of x: where kernels read them from there."""
        return choose("activation", x, None, by_default=KERNEL.checked) == "triton"

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The same without autograd, for those who write their own backward."""
        match self.kind:
            case "situ":
                return situ_forward(gate, up, self.gate_cap, self.up_cap)
            case "swiglu":
                return swiglu_forward(gate, up)
            case "glu":
                return glu_forward(gate, up)

    def partials(
        self, gate: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(out, d out / d gate, d out / d up), each `[..., F]` in the inputs' dtype."""
        match self.kind:
            case "situ":
                return situ_partials(gate, up, self.gate_cap, self.up_cap)
            case "swiglu":
                return swiglu_partials(gate, up)
            case "glu":
                return glu_partials(gate, up)
