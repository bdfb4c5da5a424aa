"""Which implementation of an operator runs.

Knows devices and what is importable; knows nothing about any operator. There is no silent fallback: asking
for an implementation that cannot run here is an error that says why.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Literal

import torch

from openk3.errors import InvalidInput, KernelUnavailable

Implementation = Literal["reference", "eager", "triton"]


def _by_default(said: str) -> bool:
    if said not in ("on", "off"):
        raise InvalidInput(f"OPENK3_KERNELS={said!r}: must be on or off")
    return said == "on"


# Looked up once, where torch.compile does not follow.
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
# OPENK3_KERNELS=off: GPU kernels run only where "triton" is asked for; to compare, and to find faults.
BY_DEFAULT = _by_default(os.environ.get("OPENK3_KERNELS", "on"))


NOWHERE = "none yet"


@dataclass(frozen=True)
class Kernel:
    """What an operator's package says of its GPU kernels, in `KERNELS`, for people to read."""

    function: str  # that they run behind
    takes: str  # inputs; others run as eager by default, and are refused where "triton" is forced
    checked_on: str  # devices and their compute capabilities
    compiles_for: tuple[str, ...] = ()  # others that it was only compiled for (tools/compile_kernels.py)

    @property
    def checked(self) -> bool:
        """Whether a card has run it; if none has, it runs only where it is asked for."""
        return self.checked_on != NOWHERE


def triton_problem(device_type: str) -> str | None:
    """Why Triton kernels cannot run on `device_type`, or None if they can."""
    if not TRITON_INSTALLED:
        return "the triton package is not installed"
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton does not run on {device_type} (set TRITON_INTERPRET=1 to interpret kernels in tests)"
    return None


def choose(
    operator: str,
    x: torch.Tensor,
    wanted: Implementation | None,
    *,
    kernels: bool = True,
    by_default: bool = True,
) -> Implementation:
    """The implementation that will run `operator` on `x`: `wanted`, or the fastest for its device.

    `kernels` is False where no GPU kernel takes the inputs: the default is "eager" on every device then. No
    kernel takes float64, the precision of oracles. `by_default` is False where no card has checked the
    kernels: they run only if "triton" is forced. With OPENK3_KERNELS=off in the environment none does by
    default.
    """
    kernels = kernels and x.dtype != torch.float64
    chosen = wanted or ("triton" if x.is_cuda and kernels and by_default and BY_DEFAULT else "eager")
    if chosen == "triton" and not kernels:
        raise KernelUnavailable(f"{operator}: has no Triton kernel for this; ask for implementation='eager'")
    if chosen == "triton" and (problem := triton_problem(x.device.type)):
        raise KernelUnavailable(
            f"{operator}: needs Triton, but {problem}; ask for implementation='eager' to go on"
        )
    return chosen
