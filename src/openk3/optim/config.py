"""What can be set about the optimizer and the learning-rate schedule (report §2.5, §3.2, §3.3)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from openk3.config import StrictModel
from openk3.optim.newton_schulz import CoefficientName

Share = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveOrInf = Annotated[float, Field(gt=0.0, allow_inf_nan=True)]


class OptimConfig(StrictModel):
    """Per-head Muon for matrices, AdamW for the rest. Which parameter is which: `openk3.optim.rules`."""

    optimizer: Literal["muon", "adamw"] = "muon"
    """"adamw" trains every parameter with AdamW; weight decay and the scales below stay as they are."""
    lr: PositiveFloat = 3e-3
    """Peak learning rate, in AdamW's units: Muon's update is scaled to AdamW's usual RMS of 0.2."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled: a step multiplies a decaying parameter by 1 - lr * weight_decay."""

    momentum: Share = 0.95
    """Muon: share of the running average of gradients kept at each step."""
    nesterov: bool = True
    """Muon: orthogonalise the average advanced by one gradient, instead of the average."""
    coefficients: CoefficientName = "jordan"
    """Muon: the row of `openk3.optim.newton_schulz.COEFFICIENTS` to iterate with."""
    ns_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Muon: dtype of the Newton-Schulz products; auto is bfloat16 on a GPU and float32 on a CPU."""
    per_head: bool = True
    """Muon: orthogonalise attention projections head by head; False is the full-matrix ablation."""
    per_head_gates: bool = True
    """Muon: gate and forget projections head by head too (the report names Q, K and V only)."""

    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW: shares of the running first and second moments kept at each step."""
    eps: PositiveFloat = 1e-8
    """AdamW: added to the root of the second moment, in units of the gradient."""
    embedding_lr_scale: PositiveFloat = 1.0
    """Embedding and output head train at lr times this."""
    vector_lr_scale: PositiveFloat = 1.0
    """Norms, convolutions, decay rates, pseudo-queries and beta rows train at lr times this."""

    grad_clip: PositiveOrInf = 1.0
    """Largest global L2 norm of the gradient; inf switches clipping off."""
    qk_clip_tau: PositiveOrInf = 100.0
    """Largest logit of an MLA head (scaled, before the softmax) that a step leaves; inf switches it off."""


class ScheduleConfig(StrictModel):
    """Learning rate over the run, as a factor of the peak. The report prefers cosine to WSD (§3.2)."""

    kind: Literal["cosine", "wsd"] = "cosine"
    """"cosine": warm-up, half a cosine. "wsd": warm-up, constant, linear decay."""
    warmup: float = Field(default=0.01, ge=0.0, le=1.0)
    """Length of the linear warm-up, as a share of all steps."""
    minimum: float = Field(default=0.1, ge=0.0, le=1.0)
    """Factor of the peak at the last step, and after it."""
    decay: float = Field(default=0.2, gt=0.0, le=1.0)
    """Length of WSD's decay, as a share of all steps; shorter when the warm-up leaves less room."""
