"""What the operator tests share: distances to an oracle, and what an operator keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable

import torch


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`, in float64."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-300))


def worst_element(actual: torch.Tensor, expected: torch.Tensor, neighbours: int = 31) -> float:
    """The largest error of an element, relative to the largest of its neighbours along the last axis.

    A norm hides small elements and a plain ratio divides by nothing at a zero crossing; this does neither.
    """
    actual, expected = actual.detach().double(), expected.detach().double()
    flat = expected.abs().reshape(1, -1, expected.shape[-1])
    scale = torch.nn.functional.max_pool1d(flat, neighbours, stride=1, padding=neighbours // 2)
    return float(((actual - expected).abs() / scale.reshape(expected.shape)).max())


def kept_by(forward: Callable[[], object]) -> list[torch.Tensor]:
    """The tensors that `forward` saves for its backward."""
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        forward()
    return kept
