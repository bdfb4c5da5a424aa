"""Paged MLA decoding in plain PyTorch, sequence by sequence, reading no length on the host."""

from __future__ import annotations

import math

import torch

from openk3.ops.precision import wide, widen

Tensor = torch.Tensor


def mla_decode(
    q_latent: Tensor,
    q_shared: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    max_length: int,
) -> tuple[Tensor, Tensor]:
    """See `openk3.ops.attention.paged.mla_decode`."""
    N, W, H, R = q_latent.shape
    pages, page_size, D = cache.shape
    token = torch.arange(-(-max_length // page_size) * page_size, device=cache.device)
    window = torch.arange(W, device=cache.device)[:, None, None]
    mixed = q_latent.new_empty(N, W, H, R, dtype=wide(q_latent.dtype))
    lse = mixed.new_empty(N, W, H)
    table = block_table[:, : len(token) // page_size].clamp(0, pages - 1).long()
    for n in range(N):
        length = lengths[n].clamp(max=max_length)
        # Zeros past the end: what lies there may be no number.
        keys = widen(cache[table[n]].view(-1, D)).where((token < length)[:, None], 0.0)
        query = widen(torch.cat([q_latent[n], q_shared[n]], -1))
        seen = length - W + 1 + window
        logits = (scale * (query @ keys.mT)).masked_fill(token >= seen, -math.inf)
        lse[n] = logits.detach().logsumexp(-1)
        # Nothing to see would be 0/0.
        mixed[n] = (torch.where(seen > 0, logits, 0.0).softmax(-1) * (seen > 0)) @ keys[:, :R]
    return mixed.to(q_latent.dtype), lse


def mla_append(latents: Tensor, cache: Tensor, slots: Tensor) -> None:
    """See `openk3.ops.attention.paged.mla_append`."""
    if not len(slots):
        return
    rows = cache.view(-1, cache.shape[-1])
    # One outside repeats what the largest inside writes; if there is none, what is there.
    places = torch.where(slots < len(rows), slots, -1).long()
    source = torch.where(places >= 0, torch.arange(len(slots), device=slots.device), places.argmax())
    places = places[source]
    rows[places.clamp(min=0)] = torch.where((places >= 0)[:, None], latents[source], rows[0])
