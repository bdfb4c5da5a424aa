"""Stable LatentMoE (report §2.3 eq. 11): router, routed experts in a latent space, full-width shared experts.

The router's balance bias is a buffer: the trainer sets it between steps from the counts left in the record.
It is in no optimizer and has no gradient.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from openk3.config import ModelConfig, MoeConfig
from openk3.model.ffn import GatedFfn, activation_of
from openk3.model.layers import At, Linear, RmsNorm, weight
from openk3.model.protocols import ExpertWeights, Seams
from openk3.model.record import ForwardRecord
from openk3.ops.moe import Counted, Routing, route_and_project

Tensor = torch.Tensor


class Router(nn.Module):
    """fp32 sigmoid scores, top-k of score + bias, weights without the bias (eq. 13)."""

    e_score_correction_bias: Tensor

    def __init__(self, hidden_size: int, config: MoeConfig, layer: int, at: At) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.weight = weight(at, config.num_experts, hidden_size)
        bias = torch.zeros(config.num_experts, dtype=at.precise.dtype, device=at.device)
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor, down: Tensor | None, record: ForwardRecord | None) -> tuple[Routing, Tensor]:
        """`x` `[T, d]` to its routes and to what its experts read: `[T, l]` by `down` `[l, d]`, or x itself.

        A record that already holds this layer's decision is obeyed and not counted into again.
        """
        c = self.config
        chosen = record.chosen.get(self.layer) if record else None
        counted = None
        if record is not None and self.training and chosen is None:
            counted = Counted(record.token_mask, c.qb_bins if c.balancing == "qb" else None)
        entry = route_and_project(
            x,
            self.weight,
            down,
            self.e_score_correction_bias,
            c.experts_per_token,
            scaling_factor=c.routed_scaling,
            renormalize=c.renormalize,
            chosen=chosen,
            counted=counted,
        )
        if record is not None and entry.load is not None:
            record.chosen[self.layer] = entry.routing.ids, entry.routing.cutoff
            record.load[self.layer] = entry.load
            if entry.histogram is not None:
                record.histogram[self.layer] = entry.histogram
        return entry.routing, entry.latent


class Experts(nn.Module):
    """The routed experts' weights, stacked: `w1`, `w3` `[E, F, l]`, `w2` `[E, l, F]`."""

    def __init__(self, config: MoeConfig, width: int, at: At) -> None:
        super().__init__()
        E, F_ = config.num_experts, config.expert_width
        self.w1 = weight(at, E, F_, width)
        self.w3 = weight(at, E, F_, width)
        self.w2 = weight(at, E, width, F_)

    def forward(self) -> ExpertWeights:
        return ExpertWeights(self.w1, self.w3, self.w2)


class LatentMoe(nn.Module):
    """y = shared(x) + up(norm(sum_i p_i E_i(down(x)))): `[T, d]` to `[T, d]`. Plain MoE without a latent
    width."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, layer: int, seams: Seams, at: At) -> None:
        super().__init__()
        d = config.hidden_size
        self.seams = seams
        self.activation = activation_of(config.activation)
        self.gate = Router(d, moe, layer, at)
        self.latent = moe.latent_width is not None
        width = moe.latent_width or d
        if self.latent:
            self.routed_expert_down_proj = Linear(d, width, at)
            self.routed_expert_up_proj = Linear(width, d, at)
        self.normed = moe.latent_norm
        if self.normed:
            self.routed_expert_norm = RmsNorm(width, config.rms_norm_eps, at)
        self.experts = Experts(moe, width, at)
        self.shared_experts = (
            GatedFfn(d, moe.num_shared_experts * moe.expert_width, self.activation, at)
            if moe.num_shared_experts
            else None
        )

    def forward(self, x: Tensor, record: ForwardRecord | None) -> Tensor:
        routed = partial(self._routed, record=record)
        if self.shared_experts is None:
            return routed(x)
        out, shared = self.seams.overlap(x, routed, self.shared_experts)
        return out + shared

    def _routed(self, x: Tensor, record: ForwardRecord | None) -> Tensor:
        tag = self.seams.tag
        routing, z = self.gate(x, self.routed_expert_down_proj.weight if self.latent else None, record)
        u = self.seams.dispatch(tag(z, "moe.latent"), routing, self.experts(), self.activation)
        if self.normed:
            u = self.routed_expert_norm(tag(u, "moe.combined"))
        routed: Tensor = self.routed_expert_up_proj(u) if self.latent else u
        return routed
