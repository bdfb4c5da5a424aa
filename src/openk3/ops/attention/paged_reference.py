"""Paged MLA decoding query by query, head by head. The oracle for paged_eager.py and the kernels."""

from __future__ import annotations

import math

import torch

from openk3.ops.precision import wide, widen

Tensor = torch.Tensor


def mla_decode(
    q_latent: Tensor, q_shared: Tensor, cache: Tensor, block_table: Tensor, lengths: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """u_h = sum_j softmax_j(scale q_h . c_j) c_j[:R] over the tokens that a query sees."""
    N, W, H, R = q_latent.shape
    page_size = cache.shape[1]
    mixed = q_latent.new_zeros(N, W, H, R, dtype=wide(q_latent.dtype))
    lse = mixed.new_full((N, W, H), -math.inf)
    for n in range(N):
        for w in range(W):
            seen = int(lengths[n]) - W + 1 + w
            if seen <= 0:
                continue
            tokens = torch.arange(seen, device=cache.device)
            keys = widen(cache[block_table[n, tokens // page_size].long(), tokens % page_size])
            for h in range(H):
                query = widen(torch.cat([q_latent[n, w, h], q_shared[n, w, h]]))
                logits = scale * (keys @ query)
                lse[n, w, h] = logits.logsumexp(0)
                mixed[n, w, h] = logits.softmax(0) @ keys[:, :R]
    return mixed.to(q_latent.dtype), lse
