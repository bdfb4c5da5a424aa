"""A sequence continued token by token on the CPU: the layers' wiring once more, prepared for one token.

For one token the products are small. What `K3.forward` does around them (look-ups of modules, the checks of
every operator, plans for many rows, bookkeeping for a backward) takes several times as long. Here weights are
looked up and small ones joined once, states are this object's own, and MLA attends to latents. The oracle is
`K3.forward`. Knows one sequence, no gradients, no seams, no half precision.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch.nn import functional as F

from openk3.model.decoder import K3, DecoderLayer
from openk3.model.ffn import GatedFfn
from openk3.model.kda import KdaAttention
from openk3.model.layers import Linear, RmsNorm
from openk3.model.mla import MlaAttention
from openk3.model.moe import LatentMoe
from openk3.model.protocols import LOCAL
from openk3.model.residual import Stream
from openk3.model.state import DecodeState, KdaState, LayerState, MlaState
from openk3.ops.kda.step import step as kda_step
from openk3.ops.moe import expert_ffn_few
from openk3.ops.moe.route import decide

Tensor = torch.Tensor

JOIN_BYTES = 1 << 22
"""Weights of one input are copied into one matrix up to this size; beyond it a call is short beside them."""


class Stepper:
    """Continues the one sequence whose state a `K3` returned.

    Weights must not change while it is used.
    """

    def __init__(self, model: K3, state: DecodeState) -> None:
        self._embedding, self._head = model.embed_tokens.weight, model.head_weight
        self._layers = [
            _Layer(layer, before)  # type: ignore[arg-type]  # a ModuleList forgets its kind
            for layer, before in zip(model.layers, state.layers, strict=True)
        ]
        self._mix = _Mix(model.output_attn_res_proj, model.output_attn_res_norm)
        self._norm = _Norm(model.norm)

    @staticmethod
    def suits(model: object) -> TypeGuard[K3]:
        """Whether `model` is one that a stepper can stand for."""
        return (
            isinstance(model, K3)
            and model.seams is LOCAL
            and model.device.type == "cpu"
            and model.embed_tokens.weight.dtype in (torch.float32, torch.float64)
            and not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
        )

    def __call__(self, token: int) -> Tensor:
        """Logits `[V]` after `token`. To be called in inference mode."""
        stream = Stream((), self._embedding[token].unsqueeze(0))
        for layer in self._layers:
            stream = layer(stream)
        return F.linear(self._norm(self._mix(stream)), self._head)[0]


class _Layer:
    def __init__(self, layer: DecoderLayer, state: LayerState) -> None:
        self.opens = layer.opens
        self.mixes = (
            _Mix(layer.self_attention_res_proj, layer.self_attention_res_norm),
            _Mix(layer.mlp_res_proj, layer.mlp_res_norm),
        )
        self.norms = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self.attention: _Kda | _Mla
        if isinstance(layer.self_attn, MlaAttention):
            assert isinstance(state, MlaState)
            self.attention = _Mla(layer.self_attn, state)
        else:
            assert isinstance(state, KdaState)
            self.attention = _Kda(layer.self_attn, state)
        self.ffn = _Moe(layer.block_sparse_moe) if layer.sparse else _Ffn(layer.mlp)

    def __call__(self, stream: Stream) -> Stream:
        for mix, opens, norm, sublayer in zip(
            self.mixes, self.opens, self.norms, (self.attention, self.ffn), strict=True
        ):
            x = norm(mix(stream))
            stream = (stream.opened() if opens else stream).plus(sublayer(x))
        return stream


class _Kda:
    """`KdaAttention`."""

    def __init__(self, layer: KdaAttention, state: KdaState) -> None:
        c = layer.config
        H, K = c.num_heads, c.head_dim
        self.shape = H, K
        low_rank = c.output_gate == "low_rank"
        self.inputs = _Products(
            (layer.q_proj, layer.k_proj, layer.v_proj),
            (layer.f_a_proj,),
            (layer.b_proj,),
            (layer.g_a_proj if low_rank else layer.g_proj,),
        )
        self.g_b = layer.g_b_proj.weight if low_rank else None
        self.f_b, self.out = layer.f_b_proj.weight, layer.o_proj.weight
        taps = torch.cat([layer.q_conv1d.weight, layer.k_conv1d.weight, layer.v_conv1d.weight])
        self.taps = taps.squeeze(1).t().contiguous()  # [W, 3 H K]
        self.window = F.pad(state.conv[0], (0, 0, 1, 0))  # the last W inputs
        self.rate = layer.A_log.exp().clamp(max=torch.finfo(layer.A_log.dtype).max).unsqueeze(1)
        self.dt_bias, self.S = layer.dt_bias.view(H, K), state.S
        self.bound = c.gate_lower_bound if c.gate == "bounded" else None
        self.l2_eps, self.norm = _scalar(1e-6, self.S), _Norm(layer.o_norm)

    def __call__(self, x: Tensor) -> Tensor:
        H, K = self.shape
        qkv, f, b, gate = self.inputs(x)
        self.window = torch.cat([self.window[1:], qkv])
        qkv = F.silu((self.window * self.taps).sum(0)).view(1, 3, H, K)
        qk = qkv[:, :2]
        length = torch.linalg.vector_norm(qk, dim=-1, keepdim=True)
        q, k = (qk * torch.addcmul(self.l2_eps, length, length).rsqrt_()).unbind(1)
        u = F.linear(f, self.f_b).view(1, H, K) + self.dt_bias
        if self.bound is None:
            g = F.logsigmoid(u.neg_()).mul_(self.rate)
        else:
            g = u.mul_(self.rate).sigmoid_().mul_(self.bound)
        out, self.S = kda_step(q, k, qkv[:, 2], g, torch.sigmoid(b), self.S, K**-0.5)
        logits = gate if self.g_b is None else F.linear(gate, self.g_b)
        gated = self.norm(out).mul_(torch.sigmoid(logits.view(1, H, K)))
        return F.linear(gated.view(1, -1), self.out)


class _Mla:
    """`MlaAttention` without expanding keys and values.

    A key is W c for its latent c, and q (W c) = (q W) c: it is the query that goes through W. A value is
    W' c: it is the mixed latent that goes through W'.
    """

    def __init__(self, layer: MlaAttention, state: MlaState) -> None:
        c = layer.config
        self.heads, self.r, self.nope = c.num_heads, c.kv_lora_rank, c.qk_nope_head_dim
        self.scale = c.qk_head_dim**-0.5
        direct = c.q_lora_rank is None
        queries, gates = layer.q_proj if direct else layer.q_a_proj, (layer.g_proj,) if c.gated else ()
        self.inputs = _Products((queries,), (layer.kv_a_proj_with_mqa,), *((gate,) for gate in gates))
        self.q_norm = None if direct else _Norm(layer.q_a_layernorm)
        self.q_b = None if direct else layer.q_b_proj.weight
        self.kv_norm, self.out = _Norm(layer.kv_a_layernorm), layer.o_proj.weight
        expand = layer.kv_b_proj.weight.view(c.num_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        self.to_keys, self.to_values = expand[:, : self.nope], expand[:, self.nope :].mT
        self.count = len(state.latents)
        self.latents = state.latents.new_empty(0, state.latents.shape[1])
        self._make_room(state.latents)

    def __call__(self, x: Tensor) -> Tensor:
        q, compressed, *gate = self.inputs(x)
        if self.q_norm is not None and self.q_b is not None:
            q = F.linear(self.q_norm(q), self.q_b)
        seen = self._append(self.kv_norm(compressed[:, : self.r]), compressed[:, self.r :])
        q = q.view(self.heads, 1, -1)
        queries = torch.cat([torch.bmm(q[..., : self.nope], self.to_keys), q[..., self.nope :]], 2)
        weights = torch.softmax(queries.squeeze(1).mul_(self.scale) @ seen.t(), -1)  # [H, tokens]
        out = torch.bmm((weights @ seen[:, : self.r]).unsqueeze(1), self.to_values).view(1, -1)
        return F.linear(out.mul_(torch.sigmoid(gate[0])) if gate else out, self.out)

    def _append(self, latent: Tensor, shared: Tensor) -> Tensor:
        """All latents `[tokens, r + shared]`, the new one the last."""
        if self.count == len(self.latents):
            self._make_room(self.latents)
        torch.cat([latent, shared], 1, out=self.latents[self.count : self.count + 1])
        self.count += 1
        return self.latents[: self.count]

    def _make_room(self, latents: Tensor) -> None:
        """Twice as much, so that a token's share of the copies is that of two."""
        self.latents = latents.new_empty(2 * len(latents) + 64, latents.shape[1])
        self.latents[: len(latents)] = latents


class _Moe:
    """`LatentMoe`."""

    def __init__(self, layer: LatentMoe) -> None:
        self.router, self.bias = layer.gate.weight, layer.gate.e_score_correction_bias
        self.config, self.activation = layer.gate.config, layer.activation
        self.down = layer.routed_expert_down_proj.weight if layer.latent else None
        self.up = layer.routed_expert_up_proj.weight if layer.latent else None
        self.norm = _Norm(layer.routed_expert_norm) if layer.normed else None
        self.experts = layer.experts()
        self.shared = _Ffn(layer.shared_experts) if layer.shared_experts is not None else None

    def __call__(self, x: Tensor) -> Tensor:
        c, w = self.config, self.experts
        routing = decide(
            F.linear(x, self.router), self.bias, c.experts_per_token, c.routed_scaling, c.renormalize
        )
        z = x if self.down is None else F.linear(x, self.down)
        u = expert_ffn_few(z, routing, w.w1, w.w3, w.w2, self.activation)
        u = u if self.norm is None else self.norm(u)
        routed = u if self.up is None else F.linear(u, self.up)
        return routed if self.shared is None else routed + self.shared(x)


class _Ffn:
    """`GatedFfn`."""

    def __init__(self, layer: GatedFfn) -> None:
        self.inputs = _Products((layer.gate_proj,), (layer.up_proj,))
        self.down, self.activation = layer.down_proj.weight, layer.activation

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.inputs(x)
        return F.linear(self.activation.forward(gate, up), self.down)


class _Mix:
    """What a sublayer reads from the stream: `openk3.model.residual.enter`, but the norm."""

    def __init__(self, proj: Linear | None, norm: RmsNorm | None) -> None:
        if proj is None or norm is None:
            return  # then no block ever opens
        self.direction = proj.weight[0] * norm.weight
        self.eps, self.share = _scalar(norm.eps, norm.weight), 1 / len(norm.weight)

    def __call__(self, stream: Stream) -> Tensor:
        if not stream.bank:
            (only,) = stream.sources
            return only
        rows = torch.cat(stream.sources)  # [S, d]
        length = torch.linalg.vector_norm(rows, dim=1)
        inverse = torch.addcmul(self.eps, length, length, value=self.share).rsqrt_()
        return (torch.softmax((rows @ self.direction).mul_(inverse), 0) @ rows).unsqueeze(0)


class _Norm:
    """`RmsNorm` in five operations."""

    def __init__(self, norm: RmsNorm) -> None:
        self.gain = norm.weight
        self.eps, self.share = _scalar(norm.eps, norm.weight), 1 / len(norm.weight)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(self.eps, length, length, value=self.share).rsqrt_()).mul_(self.gain)


class _Products:
    """Several groups of projections of one input; each group's outputs lie side by side."""

    def __init__(self, *groups: tuple[Linear, ...]) -> None:
        self.groups: list[list[Tensor]] = [[linear.weight for linear in group] for group in groups]
        weights = [weight for group in self.groups for weight in group]
        joined = sum(weight.numel() * weight.element_size() for weight in weights) <= JOIN_BYTES
        self.joined = torch.cat(weights) if joined else None
        self.sizes = [sum(len(weight) for weight in group) for group in self.groups]

    def __call__(self, x: Tensor) -> list[Tensor]:
        """`[1, d]` to one `[1, width]` a group."""
        if self.joined is not None:
            return list(torch.split_with_sizes(F.linear(x, self.joined), self.sizes, 1))
        return [torch.cat([F.linear(x, weight) for weight in group], 1) for group in self.groups]


def _scalar(value: float, like: Tensor) -> Tensor:
    """Of a Python number torch makes a tensor at every call, which takes as long as adding it."""
    return torch.tensor(value, dtype=like.dtype)
