"""The feed-forward layers for a few rows (report §2.3)."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from openk3.model.decoding.projections import Projections
from openk3.model.decoding.slots import Rows
from openk3.model.ffn import GatedFfn
from openk3.model.moe import LatentMoe
from openk3.ops.dispatch import Implementation, choose
from openk3.ops.moe import Routing, expert_ffn, expert_ffn_few, plan
from openk3.ops.moe.route import KERNEL as ROUTE
from openk3.ops.moe.route import decide
from openk3.ops.norm import rms_norm
from openk3.ops.precision import cast, wide, widen

Tensor = torch.Tensor


class Dense:
    """`GatedFfn`."""

    def __init__(self, layer: GatedFfn, implementation: Implementation | None) -> None:
        self.inputs = Projections(layer.gate_proj.weight, layer.up_proj.weight)
        self.down, self.activation = layer.down_proj.weight, layer.activation
        self.implementation = implementation

    def __call__(self, projected: list[Tensor], rows: Rows) -> Tensor:
        gate, up = projected
        return F.linear(self.activation(gate, up, implementation=self.implementation), self.down)


class Moe:
    """`LatentMoe`."""

    def __init__(self, layer: LatentMoe, implementation: Implementation | None) -> None:
        self.config, self.activation = layer.gate.config, layer.activation
        self.bias, self.implementation = layer.gate.e_score_correction_bias, implementation
        latent = layer.latent
        weights = [layer.routed_expert_down_proj.weight] if latent else []
        self.shared = layer.shared_experts.down_proj.weight if layer.shared_experts is not None else None
        if layer.shared_experts is not None:
            weights += [layer.shared_experts.gate_proj.weight, layer.shared_experts.up_proj.weight]
        self.inputs = Projections(*weights, precise=layer.gate.weight, keep=not latent)
        self.latent = latent
        self.up = layer.routed_expert_up_proj.weight if latent else None
        self.norm = layer.routed_expert_norm if layer.normed else None
        self.experts = layer.experts()

    def __call__(self, projected: list[Tensor], rows: Rows) -> Tensor:
        z, *shared = projected if self.latent else [projected.pop(), *projected]
        logits = shared.pop()
        u = self._experts(z, self._route(logits))
        if self.norm is not None:
            u = rms_norm(u, self.norm.weight, self.norm.eps, implementation=self.implementation)
        routed = u if self.up is None else F.linear(u, self.up)
        if self.shared is None:
            return routed
        hidden = self.activation(*shared, implementation=self.implementation)
        return routed + F.linear(hidden, self.shared)

    def _route(self, logits: Tensor) -> Routing:
        c, chosen = self.config, None
        by_kernel = choose("route", logits, self.implementation, by_default=ROUTE.checked) == "triton"
        if not by_kernel:
            # The same choice without a look at ties from the host, which a captured step cannot take.
            ordered = (torch.sigmoid(logits) + self.bias).sort(dim=1, descending=True, stable=True)
            chosen = ordered.indices[:, : c.experts_per_token], ordered.values[:, -1]
        return decide(
            logits,
            self.bias,
            c.experts_per_token,
            c.routed_scaling,
            c.renormalize,
            chosen,
            self.implementation,
        )

    def _experts(self, z: Tensor, routing: Routing) -> Tensor:
        w, activation = self.experts, self.activation
        if choose("expert_ffn", z, self.implementation, by_default=False) == "triton":
            table = plan(routing.ids, len(w.w1), implementation="triton")
            return expert_ffn(
                z, routing.weights, table, w.w1, w.w3, w.w2, activation, implementation="triton"
            )
        if z.device.type == "cpu":
            return expert_ffn_few(z, routing, w.w1, w.w3, w.w2, activation)
        # Each row's experts copied together: several times the bytes, but on the device alone.
        ids = routing.ids
        gate, up = (torch.einsum("nl,nkfl->nkf", z, weight[ids]) for weight in (w.w1, w.w3))
        out = torch.einsum("nkf,nklf->nkl", activation(gate, up), w.w2[ids])
        p = cast(routing.weights, wide(z.dtype))
        return (widen(out) * p.unsqueeze(-1)).sum(1).to(z.dtype)
