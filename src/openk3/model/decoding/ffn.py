"""The feed-forward layers for a few rows (report §2.3)."""

from __future__ import annotations

import torch

from openk3.model.decoding.slots import Rows
from openk3.model.ffn import GatedFfn
from openk3.model.moe import LatentMoe
from openk3.ops.decoding import ExpertLists, Joined, choose_experts, expert_sums, experts_into, products_into
from openk3.ops.dispatch import Implementation

Tensor = torch.Tensor


class Dense:
    """`GatedFfn`."""

    def __init__(self, layer: GatedFfn, implementation: Implementation | None) -> None:
        self.inputs = Joined.of(layer.gate_proj.weight, layer.up_proj.weight)
        self.down, self.activation = layer.down_proj.weight, layer.activation
        self.implementation = implementation

    def __call__(self, projected: list[Tensor], rows: Rows, out: Tensor, add: bool) -> None:
        gate, up = projected
        unit = gate, up, self.activation
        products_into(out, self.down, None, add=add, unit=unit, implementation=self.implementation)


class Moe:
    """`LatentMoe`; without a latent width it needs what its products read, as the last of `projected`."""

    def __init__(self, layer: LatentMoe, number: int, implementation: Implementation | None) -> None:
        self.number = number
        self.config, self.activation = layer.gate.config, layer.activation
        self.bias, self.implementation = layer.gate.e_score_correction_bias, implementation
        self.latent, shared = layer.latent, layer.shared_experts
        inputs: list[Tensor] = [layer.routed_expert_down_proj.weight] if layer.latent else []
        outputs: list[Tensor] = [layer.routed_expert_up_proj.weight] if layer.latent else []
        if shared is not None:
            inputs += [shared.gate_proj.weight, shared.up_proj.weight]
            outputs.append(shared.down_proj.weight)
        self.has_shared = shared is not None
        self.inputs = Joined.of(*inputs, precise=layer.gate.weight)
        self.outputs = torch.cat(outputs, 1) if outputs else None
        self.norm = (layer.routed_expert_norm.weight, layer.routed_expert_norm.eps) if layer.normed else None
        self.experts = layer.experts()

    def __call__(self, projected: list[Tensor], rows: Rows, out: Tensor, add: bool) -> None:
        c, chosen = self.config, self.implementation
        z = projected[0 if self.latent else -1]
        shared = projected[1:3] if self.latent else projected[:2]
        logits = projected[-1 if self.latent else -2]
        lists = None
        if rows.counts is not None and self.latent:
            counts = rows.counts[self.number]
            lists = ExpertLists(counts.new_empty(len(counts), len(z)), counts)
        ids, weights = choose_experts(
            logits, self.bias, c.experts_per_token, scaling_factor=c.routed_scaling,
            renormalize=c.renormalize, lists=lists, implementation=chosen,
        )  # fmt: skip
        w, act = self.experts, self.activation
        pair = (shared[0], shared[1]) if self.has_shared else None
        if self.latent:
            assert self.outputs is not None
            experts_into(
                out, self.outputs, z, ids, weights, w.w1, w.w3, w.w2, act,
                add=add, norm=self.norm, shared=pair, lists=lists, implementation=chosen,
            )  # fmt: skip
            return
        u = expert_sums(z, ids, weights, w.w1, w.w3, w.w2, act, implementation=chosen)
        out.copy_(out + u if add else u)
        if pair is not None and self.outputs is not None:
            unit = *pair, act
            products_into(out, self.outputs, None, add=True, unit=unit, implementation=chosen)
