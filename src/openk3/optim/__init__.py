"""How K3 is optimised: per-head Muon, AdamW, QK-clip, clipping, schedules (report §2.5, §3.2, §3.3)."""

from __future__ import annotations

from openk3.optim.clipping import clip_grad_norm, clip_scale, global_norm, grad_norm, nonfinite_gradients
from openk3.optim.config import OptimConfig, ScheduleConfig
from openk3.optim.describe import Row, describe
from openk3.optim.newton_schulz import COEFFICIENTS, orthogonalize
from openk3.optim.optimizer import Optimizer
from openk3.optim.qk_clip import check_factors, clip_factors, scale_logits
from openk3.optim.rules import RULES, assign
from openk3.optim.schedule import lr_factor

__all__ = [
    "COEFFICIENTS",
    "RULES",
    "OptimConfig",
    "Optimizer",
    "Row",
    "ScheduleConfig",
    "assign",
    "check_factors",
    "clip_factors",
    "clip_grad_norm",
    "clip_scale",
    "describe",
    "global_norm",
    "grad_norm",
    "lr_factor",
    "nonfinite_gradients",
    "orthogonalize",
    "scale_logits",
]
