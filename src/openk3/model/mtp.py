"""The multi-token prediction layer: an MLA + LatentMoE layer that predicts one token further than the trunk.

At token t it reads t's embedding and the trunk's mixed hidden state of t - 1, and predicts t + 1 as the trunk
does at t: one token further than that hidden state was trained for. It has ordinary residuals and no AttnRes,
as the published draft-only checkpoints load it; embedding and head are the trunk's.

A sequence's first token has no t - 1. It enters as zeros, predicts nothing and does not count in the router:
all its scores are equal, and a block of such ties is one that no bias can divide among experts.
"""

from __future__ import annotations

import torch
from torch import nn

from openk3.config import ModelConfig
from openk3.model.layers import At, Linear, RmsNorm
from openk3.model.mla import MlaAttention
from openk3.model.moe import LatentMoe
from openk3.model.protocols import Seams
from openk3.model.record import ForwardRecord

Tensor = torch.Tensor

IGNORED = -100


class MtpBlock(nn.Module):
    """MLA and LatentMoE with plain residuals: `[T, d]` to `[T, d]`."""

    def __init__(self, config: ModelConfig, seams: Seams, at: At) -> None:
        super().__init__()
        assert config.mla is not None
        assert config.moe is not None
        d, eps = config.hidden_size, config.rms_norm_eps
        self.index = config.num_layers
        self.input_layernorm = RmsNorm(d, eps, at)
        self.self_attn = MlaAttention(d, config.mla, seams, at)
        self.post_attention_layernorm = RmsNorm(d, eps, at)
        self.block_sparse_moe = LatentMoe(config, config.moe, self.index, seams, at)

    def forward(self, x: Tensor, cu_seqlens: Tensor, record: ForwardRecord | None) -> Tensor:
        attended, _, max_logit = self.self_attn(
            self.input_layernorm(x), cu_seqlens, None, want_max_logit=record is not None
        )
        if record is not None and max_logit is not None:
            record.max_logit[self.index] = max_logit
        x = x + attended
        out: Tensor = x + self.block_sparse_moe(self.post_attention_layernorm(x), record)
        return out


class MtpLayer(nn.Module):
    """x_t = W_eh [norm(embedding of t) ; norm(hidden of t - 1)], then a block, then a norm for the shared
    head."""

    def __init__(self, config: ModelConfig, seams: Seams, at: At) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.context = seams.context
        self.enorm = RmsNorm(d, eps, at)
        self.hnorm = RmsNorm(d, eps, at)
        self.eh_proj = Linear(2 * d, d, at)
        self.layer = MtpBlock(config, seams, at)
        self.norm = RmsNorm(d, eps, at)

    def forward(
        self,
        embedded: Tensor,
        mixed: Tensor,
        targets: Tensor,
        cu_seqlens: Tensor,
        record: ForwardRecord | None,
    ) -> tuple[Tensor, Tensor]:
        """Hidden states `[T, d]` for the head, and their targets.

        Args:
            embedded: `[T, d]`, token embeddings.
            mixed: `[T, d]`, the trunk's output before its final norm.
            targets: int64 `[T]`, the trunk's.
        """
        continued = self.context.continued(cu_seqlens)
        rows = self.context.rows_before(mixed, cu_seqlens, 1, None)
        before = torch.cat([mixed[:1], mixed[:-1]])
        if continued is None and rows is None:
            # An empty sequence starts where the next one does, or behind the last token.
            starts = torch.zeros(embedded.shape[0] + 1, dtype=torch.bool, device=embedded.device)
            first = starts.index_fill(0, cu_seqlens[:-1].long(), True)[:-1]
            before = before.masked_fill(first[:, None], 0)
        else:
            first, before = self._joined(before, cu_seqlens, continued, rows)
        now = embedded.masked_fill(first[:, None], 0)
        x = self.eh_proj(torch.cat([self.enorm(now), self.hnorm(before)], dim=-1))
        hidden = self.layer(x, cu_seqlens, record.counting(~first) if record is not None else None)
        return self.norm(hidden), targets.masked_fill(first, IGNORED)

    def _joined(
        self, before: Tensor, cu_seqlens: Tensor, continued: Tensor | None, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Which tokens have none before them, and `before` with what precedes local sequences put in."""
        filled = cu_seqlens.diff() > 0
        starts = cu_seqlens[:-1][filled].long()
        first = torch.zeros(before.shape[0], dtype=torch.bool, device=before.device)
        first[starts] = True if continued is None else ~continued[filled]
        at_starts = before.new_zeros(len(starts), before.shape[1]) if rows is None else rows[filled, 0]
        return first, before.index_copy(0, starts, at_starts)
