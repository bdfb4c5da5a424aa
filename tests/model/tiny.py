"""Small random configurations that together cover every switch of the architecture."""

from __future__ import annotations

import torch

from openk3.config import (
    ActivationConfig,
    AttnResConfig,
    KdaConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
)
from openk3.model import K3, initialise

BASE = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    num_layers=5,
    kda=KdaConfig(num_heads=2, head_dim=8),
    mla=MlaConfig(
        num_heads=3, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
    ),
    moe=MoeConfig(num_experts=6, experts_per_token=2, expert_width=8, latent_width=16, qb_bins=100),
    dense_width=20,
    attn_res=AttnResConfig(block_size=2),
    initializer_range=0.3,
)


def changed(**fields) -> ModelConfig:
    """BASE with some fields replaced; nested fields as `kda__gate=...`."""
    values = BASE.model_dump()
    for name, value in fields.items():
        *path, last = name.split("__")
        target = values
        for step in path:
            target = target[step]
        target[last] = value.model_dump() if hasattr(value, "model_dump") else value
    return ModelConfig.model_validate(values)


VARIANTS = {
    "released form": BASE,
    "kimi-linear form": changed(
        kda__gate="softplus",
        kda__output_gate="low_rank",
        mla__q_lora_rank=None,
        mla__gated=False,
        moe__latent_width=None,
        moe__latent_norm=False,
        moe__num_shared_experts=1,
        moe__routed_scaling=2.446,
        moe__balancing="sign",
        activation=ActivationConfig(kind="swiglu"),
        attn_res=AttnResConfig(kind="none"),
    ),
    "full attention residuals": changed(attn_res=AttnResConfig(kind="full"), tie_embeddings=True),
    "blocks of one layer": changed(attn_res=AttnResConfig(block_size=1), num_layers=3),
    "one block": changed(attn_res=AttnResConfig(block_size=9)),
    "softmax attention only": changed(mla_layers=(1, 2, 3, 4, 5)),
    "KDA only": changed(mla_layers=(), kda__conv_width=2),
    "plain GLU, no shared experts": changed(
        activation=ActivationConfig(kind="glu"), moe__num_shared_experts=0, moe__renormalize=False
    ),
    "dense only": changed(dense_layers=5, moe=None, kda__gate_lower_bound=-1.0),
    "latent without norm": changed(moe__latent_norm=False, moe__balancing="none", dense_layers=0),
    "with MTP": changed(mtp_layers=1),
}


def built(config: ModelConfig, *, dtype=torch.float64, seed=0, **options) -> K3:
    """A model whose zeros (queries, balance bias) are random too, so that nothing hides behind them."""
    model = K3(config, dtype=dtype, **options)
    initialise(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "_res_proj" in name or "e_score_correction_bias" in name or "A_log" in name:
                tensor.normal_(0, 0.2, generator=generator)
            elif "norm" in name:
                tensor.uniform_(0.5, 1.5, generator=generator)
    return model


def packed(lengths, vocab, seed=0):
    """Random tokens `[T]` and `cu_seqlens` for sequences of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return torch.randint(0, vocab, (int(cu[-1]),), generator=generator), cu
