"""What a model is: `ModelConfig` and the presets. No torch here."""

from openk3.config.base import Count, StrictModel, parse
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
from openk3.config.toml import parse_toml, read_toml

__all__ = [
    "PRESETS",
    "ActivationConfig",
    "AttnResConfig",
    "Count",
    "KdaConfig",
    "MlaConfig",
    "ModelConfig",
    "MoeConfig",
    "StrictModel",
    "VisionConfig",
    "digest",
    "parse",
    "parse_toml",
    "preset",
    "read_toml",
]
