"""The KDA layer (report §2.1.1): projections, short convolution, gated recurrence, gated norm.

Composes operators; the mathematics is theirs. Where the sequence before this slice lives is the context's
matter.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from openk3.config import KdaConfig
from openk3.model.layers import At, Linear, RmsNorm, weight
from openk3.model.protocols import Seams
from openk3.model.state import KdaState
from openk3.ops.norm import gated_rms_norm
from openk3.ops.short_conv import short_conv

Tensor = torch.Tensor


class Conv1d(nn.Module):
    """Weight holder of one depthwise convolution: `[C, 1, W]`, fp32, last tap at the current token."""

    def __init__(self, channels: int, width: int, at: At) -> None:
        super().__init__()
        self.weight = weight(at, channels, 1, width)


class KdaAttention(nn.Module):
    """x `[T, d]` to `[T, d]`, with a state of fixed size per sequence."""

    def __init__(self, hidden_size: int, config: KdaConfig, norm_eps: float, seams: Seams, at: At) -> None:
        super().__init__()
        self.config = config
        self.seams = seams
        H, K = config.num_heads, config.head_dim
        precise = at.precise
        self.q_proj = Linear(hidden_size, H * K, at)
        self.k_proj = Linear(hidden_size, H * K, at)
        self.v_proj = Linear(hidden_size, H * K, at)
        self.q_conv1d = Conv1d(H * K, config.conv_width, precise)
        self.k_conv1d = Conv1d(H * K, config.conv_width, precise)
        self.v_conv1d = Conv1d(H * K, config.conv_width, precise)
        self.A_log = weight(precise, H)
        self.dt_bias = weight(precise, H * K)
        self.f_a_proj = Linear(hidden_size, K, at)
        self.f_b_proj = Linear(K, H * K, at)
        self.b_proj = Linear(hidden_size, H, at)
        if config.output_gate == "full":
            self.g_proj = Linear(hidden_size, H * K, at)
        else:
            self.g_a_proj = Linear(hidden_size, K, at)
            self.g_b_proj = Linear(K, H * K, at)
        self.o_norm = RmsNorm(K, norm_eps, precise)
        self.o_proj = Linear(H * K, hidden_size, at)

    def forward(self, x: Tensor, cu_seqlens: Tensor, state: KdaState | None) -> tuple[Tensor, KdaState]:
        """`x`: `[T, d]`, normed. Returns the output `[T, d]` and each sequence's state after its last
        token."""
        H, K = self.config.num_heads, self.config.head_dim
        context, tag = self.seams.context, self.seams.tag
        qkv = self._qkv(x)
        taps = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight]).squeeze(1)
        tail = context.rows_before(qkv, cu_seqlens, self.config.conv_width - 1, state.conv if state else None)
        qkv, conv = short_conv(tag(qkv, "kda.qkv"), taps, cu_seqlens, initial_state=tail)
        q, k, v = qkv.view(-1, 3, H, K).unbind(1)  # each [T, H, K]
        z, b = self.f_b_proj(self.f_a_proj(x)).view(-1, H, K), self.b_proj(x)
        bound = self.config.gate_lower_bound if self.config.gate == "bounded" else None
        before = state.S if state else None
        out, S = context.kda(q, k, v, z, b, self.A_log, self.dt_bias.view(H, K), bound, cu_seqlens, before)
        gated = gated_rms_norm(
            tag(out, "kda.out"), self._output_gate(x).view(-1, H, K), self.o_norm.weight, self.o_norm.eps
        )
        return self.o_proj(gated.view(-1, H * K)), KdaState(S, conv)

    def _qkv(self, x: Tensor) -> Tensor:
        """`[T, 3 H K]`: one product, whose weights are small beside many tokens; three where they are not."""
        projections = self.q_proj, self.k_proj, self.v_proj
        if x.shape[0] < x.shape[1]:
            return torch.cat([project(x) for project in projections], dim=1)
        return F.linear(x, torch.cat([project.weight for project in projections]))

    def _output_gate(self, x: Tensor) -> Tensor:
        """Logits of the output gate, `[T, H V]`."""
        if self.config.output_gate == "full":
            logits: Tensor = self.g_proj(x)
        else:
            logits = self.g_b_proj(self.g_a_proj(x))
        return logits
