"""Learning rate over the run: a pure function from a step to a factor of the peak (report §3.2, §3.3)."""

from __future__ import annotations

import math

from openk3.errors import InvalidInput
from openk3.optim.config import ScheduleConfig


def lr_factor(step: int, total_steps: int, config: ScheduleConfig) -> float:
    """Factor of the peak learning rate at a step.

    Args:
        step: counted from 0. The last step of the warm-up is the first at the peak; step
            `total_steps` - 1 and all later ones are at the minimum.
        total_steps: length of the run.

    Raises:
        InvalidInput: a negative step, or a run without steps.
    """
    if step < 0 or total_steps < 1:
        raise InvalidInput(f"lr_factor: step {step} of {total_steps}; step must be >= 0, total_steps >= 1")
    peak, last = max(math.ceil(config.warmup * total_steps), 1) - 1, total_steps - 1
    if step <= peak:
        return (step + 1) / (peak + 1)
    if step >= last:
        return config.minimum
    match config.kind:
        case "cosine":
            height = 0.5 * (1 + math.cos(math.pi * (step - peak) / (last - peak)))
        case "wsd":
            decay_steps = min(math.ceil(config.decay * total_steps), last - peak)
            height = min(1.0, (last - step) / decay_steps)
    return config.minimum + (1 - config.minimum) * height
