"""How kernels of a decoding step follow each other, and what their launches share.

On Hopper a kernel starts before the one in front of it has ended (programmatic dependent launch): it lets the
next one start at once, asks for its weights, which no kernel writes, and only then waits for all before it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment, misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openk3.ops.decoding import FEW as FEW
from openk3.ops.triton_math import PTX

Tensor = torch.Tensor

OVERLAP = True  # start early on Hopper


@triton.jit
def let_next(EARLY: tl.constexpr):
    """The next kernel may start."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait(EARLY: tl.constexpr):
    """Until all kernels before have ended; what they write may be read from here on, and be written over."""
    if EARLY:
        gdc_wait()


def early(x: Tensor) -> dict[str, bool]:
    """Options of a launch beside x."""
    if OVERLAP and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


def narrow(x: Tensor) -> bool:
    """Whether whole rows of weights fit into registers: fp32 does not. The interpreter has no end of them."""
    return x.element_size() == 2 or not PTX


def warps(values: int) -> int:
    """So that a thread has up to 64 of them."""
    return int(min(max(triton.next_power_of_2(values) // 2048, 4), 16))


def stages(x: Tensor) -> int:
    """Steps of a product that are on their way at once: fp32 takes twice the memory."""
    return 2 if x.dtype == torch.float32 else 4
