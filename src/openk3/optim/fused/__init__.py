"""The update on a GPU: many parameters a launch, and nothing that the host waits for.

The same rules as `openk3.optim.muon` and `openk3.optim.adamw`, which are the reference. What decides a step,
its learning rate and the factor on its gradients, stays on the device; so does the outcome, that is which
blocks of Muon have no gradient, and whether the step is skipped. Master and compute copy are written in one
pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from openk3.ops.dispatch import Kernel
from openk3.optim.fused.tables import ALIGNMENT
from openk3.optim.slots import Slot

KERNELS = (Kernel("Optimizer.step", takes="fp32 masters on one device", checked_on="H200 (sm_90)"),)


def problem(slots: Sequence[Slot]) -> str | None:
    """Why the kernels do not take these parameters, or None if they do."""
    if len({slot.master.device for slot in slots}) != 1:
        return "the parameters are not on one device"
    wrong = [slot.name for slot in slots if slot.master.dtype != torch.float32]
    if wrong:
        return f"the kernels compute in fp32; {wrong[0]} is wider"
    if len({slot.parameter.dtype for slot in slots if slot.owns_master}) > 1:
        return "parameters are of two half precisions"
    apart = [slot.name for slot in slots if not slot.parameter.is_contiguous()]
    if apart:
        return f"{apart[0]} is not contiguous"
    odd = [slot.name for slot in slots if slot.parameter.data_ptr() % ALIGNMENT]
    if odd:
        return f"{odd[0]} does not begin on a multiple of {ALIGNMENT} bytes"
    return None
