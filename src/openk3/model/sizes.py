"""How many parameters a configuration has, which of them a token uses, and where they are.

Counted from the model itself on the meta device, so that a table cannot disagree with the code. "Active" is
what one token's forward multiplies by: everything but the routed experts that were not chosen. The balance
bias counts as stored, since it is in the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from openk3.config import ModelConfig
from openk3.model.decoder import K3


@dataclass(frozen=True)
class Part:
    """Parameters of one part of the model, over all layers."""

    total: int = 0
    active: int = 0


@dataclass(frozen=True)
class Sizes:
    """Parameter counts.

    Attributes:
        total, active: with every table. Tied embeddings count once.
        embedding: the look-up table and, if separate, the output head.
        lookup: the look-up table where it does no matrix product (0 when it is also the head).
        parts: by part; their sums are `total` and `active`.
    """

    total: int
    active: int
    embedding: int
    lookup: int
    parts: dict[str, Part]

    @property
    def active_non_embedding(self) -> int:
        return self.active - self.embedding

    @property
    def active_without_lookup(self) -> int:
        return self.active - self.lookup


def count(config: ModelConfig) -> Sizes:
    """Count `config`'s text model; seconds at any size, nothing is allocated."""
    model = K3(config, device="meta", dtype=torch.bfloat16)
    parts: dict[str, Part] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        n = tensor.numel()
        active = n
        if ".experts." in name:
            assert config.moe is not None
            active = n * config.moe.experts_per_token // config.moe.num_experts
        part = _part(name, config)
        before = parts.get(part, Part())
        parts[part] = Part(before.total + n, before.active + active)
    embed = model.embed_tokens.weight.numel()
    return Sizes(
        total=sum(p.total for p in parts.values()),
        active=sum(p.active for p in parts.values()),
        embedding=embed if config.tie_embeddings else 2 * embed,
        lookup=0 if config.tie_embeddings else embed,
        parts=parts,
    )


def _part(name: str, config: ModelConfig) -> str:
    if name.startswith("embed_tokens"):
        return "embedding (also head)" if config.tie_embeddings else "embedding"
    if name.startswith("lm_head"):
        return "head"
    if name.startswith("mtp."):
        return "multi-token prediction"
    if "_res_" in name:
        return "attention residuals"
    if ".self_attn." in name:
        return "MLA" if config.is_mla(int(name.split(".")[1])) else "KDA"
    if ".experts." in name:
        return "routed experts"
    if ".shared_experts." in name:
        return "shared experts"
    if ".gate." in name:
        return "router"
    if ".routed_expert_" in name:
        return "latent projections"
    if ".mlp." in name:
        return "dense feed-forward"
    return "norms"
