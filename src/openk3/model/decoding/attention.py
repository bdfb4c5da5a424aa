"""The attention layers for one token of each of n sequences, on states in slots (report §2.1)."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from openk3.model.decoding.projections import fold
from openk3.model.decoding.slots import KdaSlots, MlaSlots, Rows
from openk3.model.kda import KdaAttention
from openk3.model.mla import MlaAttention
from openk3.ops.attention import mla_decode
from openk3.ops.decoding import Joined, append_latents, products_into
from openk3.ops.dispatch import Implementation, choose
from openk3.ops.kda import kda_step
from openk3.ops.kda.decoding import HEAD_SIZES, MixerWeights, kda_decode
from openk3.ops.kda_gate import kda_gate
from openk3.ops.norm import gated_rms_norm, l2_norm, rms_norm
from openk3.ops.precision import widen

Tensor = torch.Tensor


class Kda:
    """`KdaAttention`: between its projections one kernel, where there is one for its sizes."""

    def __init__(self, layer: KdaAttention, memory: KdaSlots, implementation: Implementation | None) -> None:
        c = layer.config
        H, K = self.shape = c.num_heads, c.head_dim
        self.memory, self.implementation = memory, implementation
        decay = fold(layer.f_b_proj.weight, layer.f_a_proj.weight)
        self.decay = layer.f_b_proj.weight if decay is None else None
        low_rank = c.output_gate == "low_rank"
        gate = fold(layer.g_b_proj.weight, layer.g_a_proj.weight) if low_rank else layer.g_proj.weight
        self.gate = layer.g_b_proj.weight if gate is None else None
        self.inputs = Joined.of(
            torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]),
            layer.f_a_proj.weight if decay is None else decay,
            layer.b_proj.weight,
            layer.g_a_proj.weight if gate is None else gate,
        )
        taps = torch.cat([layer.q_conv1d.weight, layer.k_conv1d.weight, layer.v_conv1d.weight])
        self.weights = MixerWeights(
            taps=taps.squeeze(1).t().contiguous(),
            A_log=layer.A_log,
            dt_bias=layer.dt_bias.view(H, K),
            norm_weight=layer.o_norm.weight,
            norm_eps=layer.o_norm.eps,
            lower_bound=c.gate_lower_bound if c.gate == "bounded" else None,
        )
        self.kernel_fits = K in HEAD_SIZES and c.conv_width == 4
        self.out = layer.o_proj.weight

    def __call__(self, projected: list[Tensor], rows: Rows, out: Tensor, add: bool) -> None:
        qkv, z, b, gate = projected
        z = z if self.decay is None else F.linear(z, self.decay)
        gate = gate if self.gate is None else F.linear(gate, self.gate)
        z, gate = z.view(-1, *self.shape), gate.view(-1, *self.shape)
        chosen = choose("kda_decode", qkv, self.implementation, kernels=self.kernel_fits)
        if chosen == "triton":
            S, conv = self.memory.S, self.memory.conv
            mixed = kda_decode(qkv, z, b, gate, S, conv, rows.slots, self.weights, implementation=chosen)
        else:
            mixed = self._mixed(qkv, z, b, gate, rows.places)
        products_into(out, self.out, mixed, add=add, implementation=self.implementation)

    def _mixed(self, qkv: Tensor, z: Tensor, b: Tensor, gate: Tensor, places: Tensor) -> Tensor:
        """`kda_decode` for any sizes, for rows of no sequence too, without looking at values."""
        w, memory = self.weights, self.memory
        window = torch.cat([memory.conv[places], qkv.unsqueeze(1)], 1)  # [n, W, 3 H K]
        memory.conv[places] = window[:, 1:]
        y = F.silu((widen(window) * w.taps).sum(1)).to(qkv.dtype)
        q, k, v = y.view(-1, 3, *self.shape).unbind(1)
        g = kda_gate(z, w.A_log, w.dt_bias, lower_bound=w.lower_bound)
        beta = torch.sigmoid(widen(b))
        o, S = kda_step(l2_norm(q), l2_norm(k), v, g, beta, memory.S[places], scale=q.shape[-1] ** -0.5)
        memory.S[places] = S
        return gated_rms_norm(o, gate, w.norm_weight, w.norm_eps).flatten(1)


class Mla:
    """`MlaAttention` on latents: queries go through the keys' half of `kv_b_proj`, mixed latents through the
    values'."""

    def __init__(self, layer: MlaAttention, memory: MlaSlots, implementation: Implementation | None) -> None:
        c = layer.config
        self.memory, self.implementation = memory, implementation
        self.heads, self.r, self.nope = c.num_heads, c.kv_lora_rank, c.qk_nope_head_dim
        self.scale = c.qk_head_dim**-0.5
        expand = layer.kv_b_proj.weight.view(c.num_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        to_keys, self.to_values = expand[:, : self.nope].mT, expand[:, self.nope :].mT.contiguous()
        direct = c.q_lora_rank is None
        self.q_norm = None if direct else layer.q_a_layernorm
        last: Tensor = (layer.q_proj if direct else layer.q_b_proj).weight
        per_head = last.view(c.num_heads, c.qk_head_dim, -1)
        content = fold(to_keys, per_head[:, : self.nope])  # [H, r, d]
        self.to_keys = None if content is not None else to_keys.mT.contiguous()
        if content is not None:
            last = torch.cat([content, per_head[:, self.nope :]], 1).flatten(0, 1)
        self.q_b = None if direct else last
        gates = (layer.g_proj.weight,) if c.gated else ()
        first = last if direct else layer.q_a_proj.weight
        self.inputs = Joined.of(first, layer.kv_a_proj_with_mqa.weight, *gates)
        self.kv_norm, self.out = layer.kv_a_layernorm, layer.o_proj.weight

    def __call__(self, projected: list[Tensor], rows: Rows, out: Tensor, add: bool) -> None:
        q, compressed, *gate = projected
        n, norm = len(q), self.kv_norm
        if self.q_norm is not None and self.q_b is not None:
            q = rms_norm(q, self.q_norm.weight, self.q_norm.eps, implementation=self.implementation)
            q = F.linear(q, self.q_b)
        q = q.view(n, self.heads, -1)
        if self.to_keys is not None:
            content = torch.bmm(q[..., : self.nope].transpose(0, 1), self.to_keys).transpose(0, 1)
            q = torch.cat([content, q[..., self.nope :]], -1)
        append_latents(
            compressed, norm.weight, norm.eps, self.memory.latents, rows.places, rows.seen,
            implementation=self.implementation,
        )  # fmt: skip
        r, pages = self.r, self.memory.pages
        mixed, _ = mla_decode(
            q[:, None, :, :r], q[:, None, :, r:], pages, rows.pages, rows.filled,
            scale=self.scale, implementation=self.implementation,
        )  # [n, 1, H, r]  # fmt: skip
        values = mixed.new_empty(n, self.heads, self.to_values.shape[2])
        torch.bmm(mixed[:, 0].transpose(0, 1), self.to_values, out=values.transpose(0, 1))
        gate_logits = gate[0] if gate else None
        products_into(
            out, self.out, values.flatten(1), add=add, gate=gate_logits, implementation=self.implementation
        )
