"""One token of each sequence through the model, as in decoding: the layers' wiring once more, little else.

For one token the products are small. What `K3.forward` does around them (the checks of every operator, plans
for many rows, bookkeeping for a backward) costs several times as much. Here the eager operators are called
directly, on arguments that `K3.forward` has checked, and MLA attends in the space of its latents. Forward
only, on the CPU, with local seams: `K3.forward` comes here by itself, and its other path is the oracle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from openk3.model.ffn import GatedFfn
from openk3.model.kda import KdaAttention
from openk3.model.layers import RmsNorm
from openk3.model.mla import MlaAttention
from openk3.model.moe import LatentMoe
from openk3.model.residual import Stream
from openk3.model.state import DecodeState, KdaState, LayerState, MlaState
from openk3.ops.attnres.eager import mixed
from openk3.ops.kda.step import step as kda_step
from openk3.ops.kda_gate.eager import gate
from openk3.ops.moe import MOST_ROWS, expert_ffn_few
from openk3.ops.moe.route import decide
from openk3.ops.norm.eager import gated_normed, normed
from openk3.ops.precision import cast, widen
from openk3.ops.short_conv.eager import step as conv_step

if TYPE_CHECKING:
    from openk3.model.decoder import K3, DecoderLayer

Tensor = torch.Tensor


def step(model: K3, tokens: Tensor, state: DecodeState) -> tuple[Tensor, Tensor, tuple[LayerState, ...]]:
    """The next token of each sequence, `[N]`: outputs `[N, d]` after and before the norm, and new states."""
    stream = Stream((), torch.embedding(_weight(model, "embed_tokens"), tokens))
    states = []
    for layer, before in zip(model.layers, state.layers, strict=True):
        stream, after = _layer(layer, stream, before)  # type: ignore[arg-type]  # a ModuleList forgets its kind
        states.append(after)
    out = _mix(model, "output_attn_res", stream)
    return _norm(model, "norm", out), out, tuple(states)


def _layer(layer: DecoderLayer, stream: Stream, state: LayerState) -> tuple[Stream, LayerState]:
    h = _mix(layer, "self_attention_res", stream)
    stream = stream.opened() if layer.opens[0] else stream
    h = _norm(layer, "input_layernorm", h)
    after: LayerState
    if isinstance(layer.self_attn, MlaAttention):
        assert isinstance(state, MlaState)
        out, after = _mla(layer.self_attn, h, state)
    else:
        assert isinstance(state, KdaState)
        out, after = _kda(layer.self_attn, h, state)
    stream = stream.plus(out)

    h = _mix(layer, "mlp_res", stream)
    stream = stream.opened() if layer.opens[1] else stream
    h = _norm(layer, "post_attention_layernorm", h)
    return stream.plus(_moe(layer.block_sparse_moe, h) if layer.sparse else _ffn(layer.mlp, h)), after


def _mix(layer: nn.Module, name: str, stream: Stream) -> Tensor:
    if not stream.bank:
        (only,) = stream.sources
        return only
    norm = layer._modules[f"{name}_norm"]
    assert isinstance(norm, RmsNorm)
    return mixed(stream.sources, _weight(layer, f"{name}_proj")[0], norm.weight, norm.eps)


def _kda(layer: KdaAttention, x: Tensor, state: KdaState) -> tuple[Tensor, KdaState]:
    c = layer.config
    H, K = c.num_heads, c.head_dim
    qkv = torch.cat([_times(layer, "q_proj", x), _times(layer, "k_proj", x), _times(layer, "v_proj", x)], 1)
    taps = torch.cat([_weight(layer, conv) for conv in ("q_conv1d", "k_conv1d", "v_conv1d")]).squeeze(1)
    qkv, conv = conv_step(qkv, taps, state.conv, silu=True)
    qkv = qkv.view(-1, 3, H, K)
    q, k = normed(qkv[:, :2], None, eps=1e-6, divisor=1).unbind(1)
    z = _times(layer, "f_b_proj", _times(layer, "f_a_proj", x)).view(-1, H, K)
    bound = c.gate_lower_bound if c.gate == "bounded" else None
    g = gate(z, layer.A_log, layer.dt_bias.view(H, K), bound)
    beta = torch.sigmoid(widen(_times(layer, "b_proj", x)))
    out, S = kda_step(q, k, qkv[:, 2], g, beta, state.S, K**-0.5)
    if c.output_gate == "full":
        logits = _times(layer, "g_proj", x)
    else:
        logits = _times(layer, "g_b_proj", _times(layer, "g_a_proj", x))
    gated = gated_normed(out, logits.view(-1, H, K), _weight(layer, "o_norm"), layer.o_norm.eps)
    return _times(layer, "o_proj", gated.view(-1, H * K)), KdaState(S, conv)


def _mla(layer: MlaAttention, x: Tensor, state: MlaState) -> tuple[Tensor, MlaState]:
    """Keys and values are never expanded. A key is W c for its latent c, and q (W c) = (q W) c: it is the
    query that goes through W. A value is W' c: it is the mixed latent that goes through W'."""
    c = layer.config
    H, r, nope, v = c.num_heads, c.kv_lora_rank, c.qk_nope_head_dim, c.v_head_dim
    if c.q_lora_rank is None:
        q = _times(layer, "q_proj", x)
    else:
        q = _times(layer, "q_b_proj", _norm(layer, "q_a_layernorm", _times(layer, "q_a_proj", x)))
    q = q.view(-1, H, c.qk_head_dim).transpose(0, 1)  # [H, N, nope + shared]
    compressed = _times(layer, "kv_a_proj_with_mqa", x)  # [N, r + shared]
    latents = torch.cat([_norm(layer, "kv_a_layernorm", compressed[:, :r]), compressed[:, r:]], 1)
    new = state.extended(latents, torch.arange(len(x) + 1, dtype=torch.int32))

    expand = _weight(layer, "kv_b_proj").view(H, nope + v, r)
    queries = torch.cat([torch.bmm(q[..., :nope], expand[:, :nope]), q[..., nope:]], 2) * c.qk_head_dim**-0.5
    bounds = new.cu_seqlens.tolist()
    read = []
    for n in range(len(x)):
        seen = widen(new.latents[bounds[n] : bounds[n + 1]])  # [keys, r + shared]
        weights = torch.softmax(widen(queries[:, n]) @ seen.t(), -1)  # [H, keys]
        read.append(weights @ seen[:, :r])
    out = torch.bmm(torch.stack(read, 1), widen(expand[:, nope:].mT))  # [H, N, v]
    out = out.transpose(0, 1).reshape(-1, H * v)
    if c.gated:
        out = out * torch.sigmoid(widen(_times(layer, "g_proj", x)))
    return _times(layer, "o_proj", cast(out, x.dtype)), new


def _moe(layer: LatentMoe, x: Tensor) -> Tensor:
    router, experts = layer.gate, layer.experts
    c = router.config
    logits = F.linear(widen(x), widen(router.weight))
    bias = router.e_score_correction_bias
    routing = decide(logits, bias, c.experts_per_token, c.routed_scaling, c.renormalize)
    z = _times(layer, "routed_expert_down_proj", x) if layer.latent else x
    if routing.ids.numel() <= MOST_ROWS:
        u = expert_ffn_few(z, routing, experts.w1, experts.w3, experts.w2, layer.activation)
    else:
        u = layer.seams.dispatch(z, routing, experts(), layer.activation)
    if layer.normed:
        u = _norm(layer, "routed_expert_norm", u)
    routed = _times(layer, "routed_expert_up_proj", u) if layer.latent else u
    return routed if layer.shared_experts is None else routed + _ffn(layer.shared_experts, x)


def _ffn(layer: GatedFfn, x: Tensor) -> Tensor:
    hidden = layer.activation.forward(_times(layer, "gate_proj", x), _times(layer, "up_proj", x))
    return _times(layer, "down_proj", hidden)


def _times(layer: nn.Module, projection: str, x: Tensor) -> Tensor:
    return F.linear(x, _weight(layer, projection))


def _norm(layer: nn.Module, name: str, x: Tensor) -> Tensor:
    norm = layer._modules[name]
    assert isinstance(norm, RmsNorm)
    return normed(x, _weight(layer, name), norm.eps, x.shape[-1])


def _weight(layer: nn.Module, module: str) -> Tensor:
    """`layer.<module>.weight`, past the look-ups of `nn.Module`, which take as long as a small operation."""
    weight: Tensor = layer._modules[module]._parameters["weight"]  # type: ignore[union-attr, assignment]
    return weight
