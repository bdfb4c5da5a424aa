"""`ModelConfig`: every switch of the architecture, checked once.

Knows shapes and names of choices; knows nothing of tensors, training or files. The report's sections stand at
each block; defaults are the report's choices, so that a config states sizes and deviations only.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from pydantic import Field, PositiveFloat, model_validator

from openk3.config.base import Count, Size, StrictModel


class KdaConfig(StrictModel):
    """Kimi Delta Attention (report §2.1.1). Key and value heads have one size."""

    num_heads: Size
    head_dim: Size
    conv_width: Size = 4
    gate: Literal["bounded", "softplus"] = "bounded"
    """"bounded" is eq. 5; "softplus" is Kimi-Linear's unbounded map."""
    gate_lower_bound: float = Field(default=-5.0, ge=-5.0, lt=0.0)
    """g_min, natural-log units per token; used by the bounded gate only."""
    output_gate: Literal["full", "low_rank"] = "full"
    """Rank of the output gate; the low-rank form goes through `head_dim` channels."""


class MlaConfig(StrictModel):
    """Multi-head latent attention without position encoding (report §2.1.2)."""

    num_heads: Size
    q_lora_rank: Size | None = None
    """Rank of the query's latent; None projects queries directly."""
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    """Key dims shared by all heads. They are not rotated, but take part in the logit."""
    v_head_dim: Size
    gated: bool = True
    """Sigmoid output gate, eq. 7."""
    latent_norm_eps: PositiveFloat = 1e-6
    """The released modules use 1e-6 for the latent norms; some engines use `rms_norm_eps`."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class MoeConfig(StrictModel):
    """Stable LatentMoE (report §2.3)."""

    num_experts: Size
    experts_per_token: Size
    num_shared_experts: int = Field(default=2, ge=0, le=2**10)
    """Fused into one feed-forward network of width num_shared_experts * expert_width."""
    expert_width: Size
    latent_width: Size | None = None
    """Width that routed experts work in; None is the plain form at hidden_size."""
    latent_norm: bool = True
    """RMSNorm between combine and up-projection (§2.3.1); needs latent_width."""
    renormalize: bool = True
    routed_scaling: PositiveFloat = 1.0
    balancing: Literal["qb", "sign", "none"] = "qb"
    qb_bins: int = Field(default=1000, ge=2, le=2**20)
    """Bins of the margin histogram (Appendix D)."""
    qb_ema: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the old bias kept at each update; 0 is no averaging."""
    sign_step: PositiveFloat = 1e-3
    """Step of the sign rule (only `balancing="sign"`)."""

    @model_validator(mode="after")
    def _check(self) -> MoeConfig:
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than num_experts {self.num_experts}"
            )
        if self.balancing == "qb" and self.experts_per_token == self.num_experts:
            raise ValueError(
                "balancing 'qb' needs experts_per_token < num_experts; use 'none' when all are chosen"
            )
        return self


class AttnResConfig(StrictModel):
    """Attention residuals (report §2.2)."""

    kind: Literal["none", "full", "block"] = "block"
    """"full": every sublayer output is a source; "block": their sums over `block_size` decoder layers are;
    "none": the plain residual stream."""
    block_size: Size = 12
    """Decoder layers (attention and feed-forward) in a block; only `kind="block"`."""


class ActivationConfig(StrictModel):
    """Gate of the feed-forward networks (report §2.3.2)."""

    kind: Literal["situ", "swiglu", "glu"] = "situ"
    gate_cap: PositiveFloat = 4.0
    up_cap: PositiveFloat = 25.0


class VisionConfig(StrictModel):
    """Sizes of the released vision tower and projector (report §2.4), which name and shape its tensors."""

    hidden_size: Size
    num_layers: Size
    num_heads: Size
    qkv_width: Size
    intermediate_size: Size
    patch_size: Size = 14
    position_grid: Size = 64
    merge: Size = 2


class ModelConfig(StrictModel):
    """A K3-family text model.

    Layers are counted from 1 in `mla_layers`, as in the release; every other layer is KDA.
    """

    vocab_size: Size
    hidden_size: Size
    num_layers: int = Field(ge=1, le=4096)
    mla_layers: tuple[int, ...] | None = None
    """1-based layers with MLA; None is the report's pattern: every fourth, and the last."""
    kda: KdaConfig | None = None
    mla: MlaConfig | None = None
    moe: MoeConfig | None = None
    dense_layers: int = Field(default=1, ge=0)
    """Leading layers with a dense feed-forward network; the others are MoE (all are dense without `moe`)."""
    dense_width: Size
    activation: ActivationConfig = ActivationConfig()
    attn_res: AttnResConfig = AttnResConfig()
    rms_norm_eps: PositiveFloat = 1e-5
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of weight matrices at step 0."""
    tie_embeddings: bool = False
    mtp_layers: int = Field(default=0, ge=0, le=1)
    """Multi-token prediction layers (an MLA + MoE layer that predicts one token further)."""
    max_context: Count = 4096
    """Tokens of a sequence the model is meant for (nothing in the architecture depends on it)."""
    expert_format: Literal["bf16", "mxfp4"] = "bf16"
    """How routed experts are stored in the released layout."""
    vision: VisionConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        layers = self.mla_layers
        if layers is not None:
            if list(layers) != sorted(set(layers)):
                raise ValueError(f"mla_layers must be ascending without repeats, got {list(layers)}")
            if layers and not (layers[0] >= 1 and layers[-1] <= self.num_layers):
                raise ValueError(f"mla_layers must lie in 1..{self.num_layers}, got {list(layers)}")
        mla_layers = self.mla_layer_numbers
        if mla_layers and self.mla is None:
            raise ValueError(f"layers {mla_layers} are MLA, so `mla` must be given")
        if len(mla_layers) < self.num_layers and self.kda is None:
            raise ValueError("some layers are KDA, so `kda` must be given")
        if self.dense_layers > self.num_layers:
            raise ValueError(f"dense_layers {self.dense_layers} is more than num_layers {self.num_layers}")
        if self.dense_layers < self.num_layers and self.moe is None:
            raise ValueError(f"layers after dense_layers={self.dense_layers} are MoE, so `moe` must be given")
        if self.mtp_layers and (self.mla is None or self.moe is None):
            raise ValueError("an MTP layer is an MLA + MoE layer: it needs `mla` and `moe`")
        if self.moe and self.moe.latent_norm and self.moe.latent_width is None:
            raise ValueError(
                "moe.latent_norm needs moe.latent_width; set latent_norm = false for the plain form"
            )
        return self

    @property
    def mla_layer_numbers(self) -> tuple[int, ...]:
        """1-based numbers of the MLA layers."""
        if self.mla_layers is not None:
            return self.mla_layers
        return tuple(n for n in range(1, self.num_layers + 1) if n % 4 == 0 or n == self.num_layers)

    def is_mla(self, index: int) -> bool:
        """Whether layer `index` (0-based) attends globally."""
        return index + 1 in self.mla_layer_numbers

    def is_moe(self, index: int) -> bool:
        """Whether layer `index` (0-based) has routed experts."""
        return index >= self.dense_layers


def digest(config: StrictModel) -> str:
    """sha256 of the config's canonical JSON: equal configs, equal digests."""
    canonical = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
