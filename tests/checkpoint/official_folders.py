"""Small checkpoint folders in the released layout, and what tests do to them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch

from model.tiny import built, changed
from openk3.checkpoint.official.save import save_official
from openk3.config import ActivationConfig, AttnResConfig, ModelConfig
from openk3.model import K3

K3_FORM = changed(
    vocab_size=300,
    num_layers=3,
    hidden_size=32,
    moe__num_experts=4,
    moe__latent_width=32,
    moe__expert_width=32,
)
LINEAR_FORM = changed(
    vocab_size=300,
    num_layers=2,
    hidden_size=32,
    kda__gate="softplus",
    kda__output_gate="low_rank",
    mla__q_lora_rank=None,
    mla__gated=False,
    moe__latent_width=None,
    moe__latent_norm=False,
    moe__num_experts=3,
    moe__num_shared_experts=1,
    moe__expert_width=32,
    moe__balancing="sign",
    activation=ActivationConfig(kind="swiglu"),
    attn_res=AttnResConfig(kind="none"),
)


def random_model(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> K3:
    """With every tensor random, zeros of the initialisation included."""
    return built(config, dtype=dtype, seed=3)


def saved(path: Path, config: ModelConfig = K3_FORM, **options) -> Path:
    """A checkpoint of a random model."""
    return save_official(random_model(config), path, **options)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def header_of(shard: Path) -> tuple[dict, bytes]:
    """The header as a table, and the bytes behind it."""
    raw = shard.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_shard(shard: Path, header: dict | bytes, data: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    shard.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
