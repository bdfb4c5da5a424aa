"""Checkpoints of any size with random numbers, written without a model, for tests and benchmarks."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from openk3.checkpoint.official.layout import TensorSpec
from openk3.checkpoint.official.save import write_folder
from openk3.config import AttnResConfig, KdaConfig, MlaConfig, ModelConfig, MoeConfig


def shaped_like_k3(
    *, hidden: int, layers: int, experts: int, chosen: int, width: int, latent: int, vocab: int
) -> ModelConfig:
    """The released architecture at reduced width; most bytes are in its MXFP4 experts."""
    heads = hidden // 64
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        kda=KdaConfig(num_heads=heads, head_dim=64),
        mla=MlaConfig(
            num_heads=heads,
            q_lora_rank=hidden // 4,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
        ),
        moe=MoeConfig(
            num_experts=experts,
            experts_per_token=chosen,
            num_shared_experts=1,
            expert_width=width,
            latent_width=latent,
        ),
        dense_width=2 * hidden,
        attn_res=AttnResConfig(block_size=2),
        expert_format="mxfp4",
    )


SMALL = shaped_like_k3(hidden=256, layers=8, experts=128, chosen=6, width=384, latent=256, vocab=2048)
"""About 155 MB, 90% of it experts."""


def write_synthetic(path: Path, config: ModelConfig, seed: int = 0) -> Path:
    """A checkpoint of `config` at `path`."""
    return write_folder(path, config, _RandomNumbers(config, seed))


class _RandomNumbers:
    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._heads = config.kda.num_heads
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, spec: TensorSpec) -> torch.Tensor:
        g, shape = self._generator, spec.shape
        if spec.dtype == "U8":
            # Codes have a root mean square of 2.9: the scale makes products keep the size of their input.
            unit = 127 - round(math.log2(2.9 * math.sqrt(2 * shape[-1])))
            scales = spec.name.endswith("scale")
            low, high = (unit - 3, unit + 1) if scales else (0, 256)
            return torch.randint(low, high, shape, dtype=torch.uint8, generator=g)
        value = torch.randn(shape, generator=g)
        if "norm" in spec.name:
            value = 1 + 0.1 * value
        elif spec.name.endswith("A_log"):
            value[self._heads :] = 0
        elif spec.name.endswith(".e_score_correction_bias"):
            value *= 0.05
        elif value.dim() == 2 and "embed" not in spec.name:
            value /= math.sqrt(shape[1])
        elif "conv1d" in spec.name:
            value /= 2
        return value.to(torch.float32 if spec.dtype == "F32" else torch.bfloat16)
