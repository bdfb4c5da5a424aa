"""Causal softmax attention with whole score matrices, sequence by sequence. The oracle for eager.py."""

from __future__ import annotations

import math

import torch

from openk3.ops.precision import wide, widen


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: list[int],
    cu_seqlens_k: list[int],
    scale: float,
    return_max_logit: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o_i = sum_j softmax_j(scale q_i . k_j) v_j over the keys j <= i + n_k - n_q of i's sequence."""
    outputs = [v.new_empty(0, *v.shape[1:], dtype=wide(v.dtype))]
    max_logit = q.new_full(q.shape[1:2], -math.inf, dtype=wide(q.dtype))
    for i in range(len(cu_seqlens_q) - 1):
        of_q = slice(cu_seqlens_q[i], cu_seqlens_q[i + 1])
        of_k = slice(cu_seqlens_k[i], cu_seqlens_k[i + 1])
        logits = scale * torch.einsum("qhd,khd->hqk", widen(q[of_q]), widen(k[of_k]))
        n_q, n_k = logits.shape[1:]
        allowed = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device).tril(n_k - n_q)
        logits = logits.masked_fill(~allowed, -math.inf)
        # A query that sees no key would be 0/0: its output is zero.
        weights = torch.where(allowed.any(-1, keepdim=True), logits, 0.0).softmax(-1) * allowed
        outputs.append(torch.einsum("hqk,khd->qhd", weights, widen(v[of_k])))
        if logits.numel():
            max_logit = torch.maximum(max_logit, logits.detach().amax((1, 2)))
    return torch.cat(outputs), max_logit if return_max_logit else None
