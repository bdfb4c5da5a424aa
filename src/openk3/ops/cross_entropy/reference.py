"""Cross-entropy of whole logits. The oracle for eager.py."""

from __future__ import annotations

import torch

from openk3.ops.precision import widen


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """-sum over the valid tokens of log softmax(hidden weight^T)[target]."""
    log_p = (widen(hidden[valid]) @ widen(weight).T).log_softmax(-1)
    return -log_p.gather(1, targets[valid, None]).sum()
