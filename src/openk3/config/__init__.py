"""What a model is: `ModelConfig` and the presets. No torch here."""

from openk3.config.base import StrictModel, parse
from openk3.config.model import (
    ActivationConfig,
    AttnResConfig,
    KdaConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    VisionConfig,
    digest,
)
from openk3.config.presets import PRESETS, preset

__all__ = [
    "PRESETS",
    "ActivationConfig",
    "AttnResConfig",
    "KdaConfig",
    "MlaConfig",
    "ModelConfig",
    "MoeConfig",
    "StrictModel",
    "VisionConfig",
    "digest",
    "parse",
    "preset",
]
