"""The most likely token of each row, without a look from the host."""

from __future__ import annotations

import torch

from openk3.errors import InvalidInput
from openk3.ops.dispatch import NOWHERE, Implementation, Kernel, choose
from openk3.ops.inputs import check_floating

Tensor = torch.Tensor

MOST_LIKELY = Kernel("most_likely", takes="rows of up to 2^31 - 1; bf16, fp16 or fp32", checked_on=NOWHERE)


def most_likely(logits: Tensor, *, implementation: Implementation | None = None) -> Tensor:
    """The index of the largest logit of each row; of equal ones one of them, the lowest by the kernel.

    Args:
        logits: `[n, V]`, V at least 1.
        implementation: "eager" or "triton"; by default the fastest that a card has run.

    Returns:
        int64 `[n]`; -1 where the largest is not finite, NaN counting as the largest.

    Raises:
        InvalidInput: logits are not `[n, V]`, or not floating.
        KernelUnavailable: the forced implementation cannot run here.
    """
    check_floating("most_likely", logits=logits)
    if logits.dim() != 2 or not logits.shape[1]:
        raise InvalidInput(f"most_likely: logits are {tuple(logits.shape)}; want [n, V], V at least 1")
    if choose("most_likely", logits, implementation, by_default=MOST_LIKELY.checked) == "triton":
        from openk3.ops.decoding.kernels.tokens import most_likely as run

        tokens: Tensor = run(logits)
        return tokens
    best = logits.argmax(-1, keepdim=True)
    return torch.where(logits.gather(1, best).isfinite(), best, -1).squeeze(1)
