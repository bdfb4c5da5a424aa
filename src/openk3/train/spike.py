"""The spike guard: which updates are applied, decided from each step's loss and gradient norm alone.

A step whose gradient norm or loss stands far above the recent ones is skipped: weights, moments and balance
biases stay what they were, and the run goes on with the next data. Skipped steps do not enter the history,
or a series of spikes would become the norm. A run that only skips has diverged.

A pure state machine: numbers go in, decisions come out. They must be reduced over all ranks before they come
here, or ranks would decide differently and hold weights of different steps.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from pydantic import Field

from openk3.config import Count, StrictModel


class SpikeConfig(StrictModel):
    """When a step is a spike."""

    multiple: float = Field(default=10.0, gt=1.0, allow_inf_nan=True)
    """Of the norms' running median, above which a gradient is a spike; inf skips no finite one."""
    loss_rise: float = Field(default=3.0, gt=0.0, allow_inf_nan=True)
    """Nats per token above the losses' running median, from which a loss is a spike; inf skips none."""
    window: Count = 64
    """Accepted steps that the medians are taken over."""
    history: Count = 16
    """Accepted steps before anything is judged: the first gradients of a run have no typical size yet."""
    patience: Count = 20
    """Skipped steps in a row after which the run has diverged."""


class SpikeGuard:
    """Decides step by step; `state` and `restore` carry it through a checkpoint."""

    def __init__(self, config: SpikeConfig) -> None:
        self.config = config
        self.norms: list[float] = []
        self.losses: list[float] = []
        self.skipped = 0
        self.skipped_in_a_row = 0

    @property
    def limit(self) -> float:
        """The gradient norm above which the next step will be skipped."""
        if len(self.norms) < self.config.history:
            return math.inf
        return self.config.multiple * statistics.median(self.norms)

    @property
    def loss_limit(self) -> float:
        """The loss above which the next step will be skipped."""
        if len(self.losses) < self.config.history:
            return math.inf
        return statistics.median(self.losses) + self.config.loss_rise

    @property
    def exhausted(self) -> bool:
        """Whether so many steps in a row were skipped that the run has diverged."""
        return self.skipped_in_a_row >= self.config.patience

    def admits(self, grad_norm: float, loss: float) -> bool:
        """Whether to apply the update of a step with this gradient norm and loss (nats per token).

        A gradient that is not finite never is.
        """
        if math.isfinite(grad_norm) and grad_norm <= self.limit and loss <= self.loss_limit:
            self.norms = [*self.norms, grad_norm][-self.config.window :]
            self.losses = [*self.losses, loss][-self.config.window :]
            self.skipped_in_a_row = 0
            return True
        self.skipped += 1
        self.skipped_in_a_row += 1
        return False

    def state(self) -> dict[str, Any]:
        """What `restore` needs, JSON-able."""
        return {
            "norms": list(self.norms),
            "losses": list(self.losses),
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.norms, self.losses = list(state["norms"]), list(state["losses"])
        self.skipped = state["skipped"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
