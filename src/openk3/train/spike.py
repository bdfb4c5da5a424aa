"""The spike guard: which updates are applied, decided from gradient norms alone.

A step whose gradient norm stands far above the recent ones is skipped: weights, moments and balance biases
stay what they were, and the run goes on with the next data. Skipped norms do not enter the history, or a
series of spikes would become the norm. A run that only skips has diverged.

A pure state machine: norms go in, decisions come out. Norms must be reduced over all ranks before they come
here, or ranks would decide differently and hold weights of different steps.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from pydantic import Field

from openk3.config import Count, StrictModel


class SpikeConfig(StrictModel):
    """When a gradient is a spike."""

    multiple: float = Field(default=10.0, gt=1.0, allow_inf_nan=True)
    """Of the running median above which a norm is a spike; inf skips no finite one."""
    window: Count = 64
    """Accepted steps that the median is taken over."""
    history: Count = 16
    """Accepted steps before anything is judged: the first gradients of a run have no typical size yet."""
    patience: Count = 20
    """Skipped steps in a row after which the run has diverged."""


class SpikeGuard:
    """Decides step by step; `state` and `restore` carry it through a checkpoint."""

    def __init__(self, config: SpikeConfig) -> None:
        self.config = config
        self.recent: list[float] = []
        self.skipped = 0
        self.skipped_in_a_row = 0

    @property
    def limit(self) -> float:
        """The norm above which the next step will be skipped."""
        if len(self.recent) < self.config.history:
            return math.inf
        return self.config.multiple * statistics.median(self.recent)

    @property
    def exhausted(self) -> bool:
        """Whether so many steps in a row were skipped that the run has diverged."""
        return self.skipped_in_a_row >= self.config.patience

    def admits(self, grad_norm: float) -> bool:
        """Whether to apply the update of a gradient of this norm. One that is not finite never is."""
        if math.isfinite(grad_norm) and grad_norm <= self.limit:
            self.recent = [*self.recent, grad_norm][-self.config.window :]
            self.skipped_in_a_row = 0
            return True
        self.skipped += 1
        self.skipped_in_a_row += 1
        return False

    def state(self) -> dict[str, Any]:
        """What `restore` needs, JSON-able."""
        return {
            "recent": list(self.recent),
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.recent = list(state["recent"])
        self.skipped = state["skipped"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
