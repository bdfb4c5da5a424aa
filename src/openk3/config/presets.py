"""Named model sizes, from a laptop's to the release's."""

from __future__ import annotations

import difflib

from openk3.config.model import (
    ActivationConfig,
    AttnResConfig,
    KdaConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    VisionConfig,
)
from openk3.errors import InvalidInput

# The ratios of the release where they can be had: 3 KDA to 1 MLA, dense first layer, latent experts.
NANO = ModelConfig(
    vocab_size=4096,
    hidden_size=128,
    num_layers=4,
    kda=KdaConfig(num_heads=2, head_dim=64),
    mla=MlaConfig(num_heads=2, kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64),
    moe=MoeConfig(
        num_experts=16,
        experts_per_token=4,
        num_shared_experts=2,
        expert_width=96,
        latent_width=64,
        qb_ema=0.9,
    ),
    dense_width=384,
    attn_res=AttnResConfig(block_size=1),
    tie_embeddings=True,
    max_context=1024,
)

MICRO = ModelConfig(
    vocab_size=8192,
    hidden_size=256,
    num_layers=8,
    kda=KdaConfig(num_heads=4, head_dim=64),
    mla=MlaConfig(num_heads=4, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64),
    moe=MoeConfig(
        num_experts=24,
        experts_per_token=4,
        num_shared_experts=2,
        expert_width=128,
        latent_width=128,
        qb_ema=0.9,
    ),
    dense_width=768,
    attn_res=AttnResConfig(block_size=2),
    tie_embeddings=True,
    max_context=2048,
)

# The nearest form to a published one-GPU run: 1.024B total, 145.3M active, 61.4M of them non-embedding.
R1 = ModelConfig(
    vocab_size=163840,
    hidden_size=512,
    num_layers=12,
    kda=KdaConfig(num_heads=4, head_dim=128),
    mla=MlaConfig(num_heads=8, kv_lora_rank=256, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    moe=MoeConfig(
        num_experts=256, experts_per_token=6, num_shared_experts=2, expert_width=416, latent_width=256
    ),
    dense_width=832,
    attn_res=AttnResConfig(block_size=1),
    tie_embeddings=True,
    max_context=4096,
)

# For one card of 139 GiB, with masters and moments: 3.88B total, 1.051B active (the table once, as the head),
# 0.715B of them non-embedding. The release's ratios, latent of half the width included, in widths that 128
# divides; the recipe 1b.toml says why these.
ONE_B = ModelConfig(
    vocab_size=163840,
    hidden_size=2048,
    num_layers=16,
    kda=KdaConfig(num_heads=16, head_dim=128),
    mla=MlaConfig(num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    moe=MoeConfig(
        num_experts=128, experts_per_token=8, num_shared_experts=2, expert_width=512, latent_width=1024
    ),
    dense_width=5632,
    attn_res=AttnResConfig(block_size=4),
    tie_embeddings=True,
    max_context=4096,
)

LINEAR_48B = ModelConfig(
    vocab_size=163840,
    hidden_size=2304,
    num_layers=27,
    kda=KdaConfig(num_heads=32, head_dim=128, gate="softplus", output_gate="low_rank"),
    mla=MlaConfig(
        num_heads=32, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, gated=False
    ),
    moe=MoeConfig(
        num_experts=256,
        experts_per_token=8,
        num_shared_experts=1,
        expert_width=1024,
        latent_norm=False,
        routed_scaling=2.446,
        balancing="sign",
    ),
    dense_width=9216,
    activation=ActivationConfig(kind="swiglu"),
    attn_res=AttnResConfig(kind="none"),
    max_context=1048576,
)

K3 = ModelConfig(
    vocab_size=163840,
    hidden_size=7168,
    num_layers=93,
    kda=KdaConfig(num_heads=96, head_dim=128),
    mla=MlaConfig(
        num_heads=96,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    moe=MoeConfig(num_experts=896, experts_per_token=16, expert_width=3072, latent_width=3584),
    dense_width=33792,
    attn_res=AttnResConfig(block_size=12),
    max_context=1048576,
    expert_format="mxfp4",
    vision=VisionConfig(
        hidden_size=1024, num_layers=27, num_heads=12, qkv_width=1536, intermediate_size=4096
    ),
)

PRESETS: dict[str, ModelConfig] = {
    "nano": NANO,
    "micro": MICRO,
    "r1": R1,
    "1b": ONE_B,
    "linear-48b": LINEAR_48B,
    "k3": K3,
}


def preset(name: str) -> ModelConfig:
    """The preset called `name`.

    Raises:
        InvalidInput: there is none; the text lists what there is and the nearest name.
    """
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(str(name), PRESETS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InvalidInput(f"model preset {name!r} does not exist (there are {', '.join(PRESETS)}){hint}")
