"""Attention over depth, as in the report (§2.2 eq. 8-9), on stacked sources. The oracle of eager.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from openk3.ops.precision import widen


def attnres_mix(
    sources: Sequence[torch.Tensor], query: torch.Tensor, key_gain: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = sum_i softmax_i(query . RMSNorm(V_i; key_gain)) V_i; also the softmax, `[T, S]`."""
    values = widen(torch.stack(list(sources), dim=1))  # [T, S, d]
    keys = values / torch.sqrt(values.square().mean(-1, keepdim=True) + eps) * key_gain
    weights = torch.einsum("tsd,d->ts", keys, query.to(keys.dtype)).softmax(-1)
    mixed = torch.einsum("ts,tsd->td", weights, values)
    return mixed.to(sources[0].dtype), weights.detach()
