"""`openk3.ops.decoding` in plain PyTorch, operator by operator as the model has them. No look at a value."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from openk3.ops.activation import Activation
from openk3.ops.attnres.eager import attnres_mix
from openk3.ops.decoding import Joined, StreamMix
from openk3.ops.moe.few import expert_ffn_few
from openk3.ops.moe.route import Routing, decide
from openk3.ops.norm.eager import rms_norm
from openk3.ops.precision import wide, widen

Tensor = torch.Tensor


def mixed_products(
    bank: Tensor, mix: StreamMix | None, gain: Tensor, eps: float, joined: Joined
) -> list[Tensor]:
    """See `openk3.ops.decoding.mixed_products`."""
    x = bank[0] if len(bank) == 1 else None
    if x is None:
        assert mix is not None
        x, _ = attnres_mix(list(bank.unbind(0)), mix.query, mix.key_gain, mix.eps)
    return products(rms_norm(x, gain, eps), joined)


def products(x: Tensor, joined: Joined) -> list[Tensor]:
    """W x for each matrix W."""
    outputs, start = [], 0
    for index, width in enumerate(joined.widths):
        matrix = joined.matrix[start : start + width]
        start += width + -width % 16
        precise = joined.precise and index == len(joined.widths) - 1
        dtype = wide(x.dtype) if precise else x.dtype
        outputs.append(F.linear(x.to(dtype), matrix.to(dtype)))
    return outputs


def products_into(
    out: Tensor,
    weight: Tensor,
    x: Tensor | None,
    add: bool,
    norm: tuple[Tensor, float] | None,
    gate: Tensor | None,
    unit: tuple[Tensor, Tensor, Activation] | None,
) -> None:
    """See `openk3.ops.decoding.products_into`."""
    parts = []
    if x is not None:
        if norm is not None:
            x = rms_norm(x, *norm)
        if gate is not None:
            x = (widen(x) * torch.sigmoid(widen(gate))).to(out.dtype)
        parts.append(x)
    if unit is not None:
        gate_rows, up_rows, activation = unit
        parts.append(activation.forward(gate_rows, up_rows))
    y = F.linear(parts[0] if len(parts) == 1 else torch.cat(parts, 1), weight)
    if add:
        out += y
    else:
        out.copy_(y)


def choose_experts(
    logits: Tensor, bias: Tensor, k: int, scaling_factor: float, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """See `openk3.ops.decoding.choose_experts`."""
    # A stable sort, for a look at ties would be one from the host.
    ordered = (torch.sigmoid(logits) + bias).sort(dim=1, descending=True, stable=True)
    chosen = ordered.indices[:, :k], ordered.values[:, -1]
    routing = decide(logits, bias, k, scaling_factor, renormalize, chosen)
    return routing.ids, routing.weights


def list_experts(ids: Tensor, rows: Tensor, counts: Tensor) -> None:
    """Fills `openk3.ops.decoding.ExpertLists`."""
    expert = ids.flatten()
    mine = torch.arange(len(counts), device=ids.device)[:, None] == expert  # [E, n k]
    counts.copy_(mine.sum(1))
    assignment = torch.arange(len(expert), dtype=torch.int32, device=ids.device)
    rows[expert, (mine.cumsum(1) - 1)[expert, assignment]] = assignment


def expert_sums(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, activation: Activation
) -> Tensor:
    """See `openk3.ops.decoding.expert_sums`."""
    if x.device.type == "cpu":
        return expert_ffn_few(x, Routing(ids, weights, weights, weights), w1, w3, w2, activation)
    # Each row's experts copied together: several times the bytes, but without a look at ids.
    gate, up = (torch.einsum("nl,nkfl->nkf", x, weight[ids]) for weight in (w1, w3))
    out = torch.einsum("nkf,nklf->nkl", activation.forward(gate, up), w2[ids])
    p = weights.to(wide(x.dtype)).unsqueeze(-1)
    return (widen(out) * p).sum(1).to(x.dtype)


def append_latents(
    compressed: Tensor, gain: Tensor, eps: float, latents: Tensor, places: Tensor, seen: Tensor
) -> None:
    """See `openk3.ops.decoding.append_latents`."""
    r = len(gain)
    latent = rms_norm(compressed[:, :r], gain, eps)
    latents[places, seen.clamp(max=latents.shape[1] - 1)] = torch.cat([latent, compressed[:, r:]], 1)


def start_step(
    tokens: Tensor, slots: Tensor, embedding: Tensor, lengths: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `openk3.ops.decoding.start_step`."""
    out.copy_(F.embedding(tokens, embedding))
    live = slots >= 0
    places = torch.where(live, slots, len(lengths) - 1).long()
    seen = lengths[places]
    lengths.index_add_(0, places, live.long())
    return places, seen, torch.where(live, seen + 1, 0).int()
