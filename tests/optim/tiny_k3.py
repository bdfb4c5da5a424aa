"""A K3 of a few thousand parameters for the optimizer's tests: real names and shapes, random values."""

from __future__ import annotations

import torch

from openk3.config import AttnResConfig, KdaConfig, MlaConfig, ModelConfig, MoeConfig
from openk3.model import K3

MLA_LAYER = 3  # 0-based; the tiny model's only MLA layer beside the MTP layer


def tiny_config(*, q_lora_rank: int | None = None, low_rank_gate: bool = False) -> ModelConfig:
    """Every kind of parameter, sizes that are no multiples of 16, more experts than rows in one."""
    return ModelConfig(
        vocab_size=50,
        hidden_size=40,
        num_layers=4,
        kda=KdaConfig(num_heads=3, head_dim=12, output_gate="low_rank" if low_rank_gate else "full"),
        mla=MlaConfig(
            num_heads=4,
            q_lora_rank=q_lora_rank,
            kv_lora_rank=20,
            qk_nope_head_dim=10,
            qk_rope_head_dim=6,
            v_head_dim=14,
        ),
        moe=MoeConfig(num_experts=25, experts_per_token=2, expert_width=18, latent_width=22),
        dense_width=52,
        attn_res=AttnResConfig(block_size=2),
        mtp_layers=1,
    )


def parameters(
    config: ModelConfig, dtype: torch.dtype = torch.float32, *, seed: int = 0
) -> dict[str, torch.nn.Parameter]:
    """The model's parameters by name, drawn from N(0, 0.1), each in the dtype the model would give it."""
    generator = torch.Generator().manual_seed(seed)
    model = K3(config, device="meta", dtype=dtype)
    return {
        name: torch.nn.Parameter((0.1 * torch.randn(p.shape, generator=generator)).to(p.dtype))
        for name, p in model.named_parameters()
    }


def set_gradients(named: dict[str, torch.nn.Parameter], *, seed: int) -> None:
    """Random gradients, each parameter's of a scale of its own over four decades."""
    generator = torch.Generator().manual_seed(seed)
    for p in named.values():
        scale = 10 ** float(torch.empty(()).uniform_(-4, 0, generator=generator))
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)
