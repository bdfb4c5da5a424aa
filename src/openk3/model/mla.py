"""Gated multi-head latent attention without positions (report §2.1.2).

The 64 "rope" dims keep their released name; they are shared by all heads and never rotated.
"""

from __future__ import annotations

import torch
from torch import nn

from openk3.config import MlaConfig
from openk3.model.layers import At, Linear, RmsNorm
from openk3.model.protocols import Seams
from openk3.model.state import MlaState
from openk3.ops.attention import gated_mla

Tensor = torch.Tensor


class MlaAttention(nn.Module):
    """x `[T, d]` to `[T, d]`; its state is one latent of `kv_lora_rank + qk_rope_head_dim` values per
    token."""

    def __init__(self, hidden_size: int, config: MlaConfig, seams: Seams, at: At) -> None:
        super().__init__()
        self.config = config
        self.seams = seams
        H = config.num_heads
        if config.q_lora_rank is None:
            self.q_proj = Linear(hidden_size, H * config.qk_head_dim, at)
        else:
            self.q_a_proj = Linear(hidden_size, config.q_lora_rank, at)
            self.q_a_layernorm = RmsNorm(config.q_lora_rank, config.latent_norm_eps, at)
            self.q_b_proj = Linear(config.q_lora_rank, H * config.qk_head_dim, at)
        self.kv_a_proj_with_mqa = Linear(hidden_size, config.kv_lora_rank + config.qk_rope_head_dim, at)
        self.kv_a_layernorm = RmsNorm(config.kv_lora_rank, config.latent_norm_eps, at)
        self.kv_b_proj = Linear(config.kv_lora_rank, H * (config.qk_nope_head_dim + config.v_head_dim), at)
        if config.gated:
            self.g_proj = Linear(hidden_size, H * config.v_head_dim, at)
        self.o_proj = Linear(H * config.v_head_dim, hidden_size, at)

    def forward(
        self, x: Tensor, cu_seqlens: Tensor, state: MlaState | None, *, want_max_logit: bool
    ) -> tuple[Tensor, MlaState, Tensor | None]:
        """`x`: `[T, d]`, normed. Returns output `[T, d]`, the grown state, and the largest logit per head
        `[H]`."""
        c, tag = self.config, self.seams.tag
        H, r = c.num_heads, c.kv_lora_rank
        q = self._queries(x).view(-1, H, c.qk_head_dim)
        compressed = self.kv_a_proj_with_mqa(x)  # [T, r + shared]
        latents = torch.cat([self.kv_a_layernorm(compressed[:, :r]), compressed[:, r:]], dim=-1)
        new = self.seams.context.latents(tag(latents, "mla.latents"), cu_seqlens, state)

        kv = self.kv_b_proj(new.latents[:, :r]).view(-1, H, c.qk_nope_head_dim + c.v_head_dim)
        gate = self.g_proj(x).view(-1, H, c.v_head_dim) if c.gated else None
        out, max_logit = gated_mla(
            q, kv, new.latents[:, r:], gate, cu_seqlens, new.cu_seqlens, return_max_logit=want_max_logit
        )
        return self.o_proj(tag(out, "mla.out").view(-1, H * c.v_head_dim)), new, max_logit

    def _queries(self, x: Tensor) -> Tensor:
        """`[T, H * qk_head_dim]`."""
        if self.config.q_lora_rank is None:
            q: Tensor = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return q
