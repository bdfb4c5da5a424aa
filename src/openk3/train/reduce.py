"""Every quantity of a step that is defined on the global batch, and how it comes together over ranks.

The rule: reduce before use, on every path. Each place where the loop uses a global quantity goes through one
method here, so that a run on many ranks differs from a run on one in this file's implementation only, and a
test can compare the two quantity by quantity. What is decided from reduced values alone (skipping a spike,
setting a bias) is then the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from openk3.optim import global_norm

Tensor = torch.Tensor
NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


class Reduction(Protocol):
    """What the trainer asks of the ranks that share a step."""

    rank: int
    ranks: int

    def token_count(self, local: int) -> int:
        """Tokens with a target in the whole step: the loss's divisor, known before the first backward."""
        ...

    def gradients(self, parameters: NamedParameters) -> None:
        """Sum `.grad` over ranks in place, after the last backward; it is divided by the global count."""
        ...

    def gradient_norm(self, parameters: NamedParameters) -> Tensor:
        """L2 norm of the global gradient, float64 `[]` on its device, for spike guard and clipping."""
        ...

    def sums(self, values: Tensor) -> Tensor:
        """float64 `[n]` on the model's device summed over ranks: losses, tokens seen, model FLOPs."""
        ...

    def counts(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """int64 counts summed over ranks, by layer: expert loads and margin histograms."""
        ...

    def maxima(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Largest values over ranks, by layer: attention logits per head, for QK-clip."""
        ...


class OneProcess:
    """The whole step is this process's."""

    rank = 0
    ranks = 1

    def token_count(self, local: int) -> int:
        return local

    def gradients(self, parameters: NamedParameters) -> None:
        pass

    def gradient_norm(self, parameters: NamedParameters) -> Tensor:
        return global_norm(parameters)

    def sums(self, values: Tensor) -> Tensor:
        return values

    def counts(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return dict(values)

    def maxima(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return dict(values)
