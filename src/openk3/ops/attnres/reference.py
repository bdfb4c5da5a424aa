"""Attention over depth, as in the report (§2.2 eq. 8-9), on stacked sources. The oracle of all others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from openk3.ops.norm.reference import rms_norm
from openk3.ops.precision import widen

Tensor = torch.Tensor


def attnres_mix(
    sources: Sequence[Tensor], query: Tensor, key_gain: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """h = sum_i softmax_i(query . RMSNorm(V_i; key_gain)) V_i; also the softmax, `[T, S]`."""
    values = widen(torch.stack(list(sources), dim=1))  # [T, S, d]
    weights = _scores(values, query, key_gain, eps).softmax(-1)
    mixed = torch.einsum("ts,tsd->td", weights, values)
    return mixed.to(sources[0].dtype), weights.detach()


def attnres_add_mix_norm(
    bank: Sequence[Tensor],
    prefix: Tensor,
    output: Tensor | None,
    query: Tensor,
    key_gain: Tensor,
    norm_gain: Tensor | None,
    lse: Tensor | None,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """The mix, its norm, the new prefix and the weights; lse makes the bank a mix itself."""
    prefix = prefix if output is None else prefix + output
    if lse is None:
        mixed, weights = attnres_mix([*bank, prefix], query, key_gain, eps)
    else:
        values = widen(torch.stack([*bank, prefix], dim=1))
        own = _scores(values[:, 1:], query, key_gain, eps)
        weights = torch.cat([lse[:, None].to(own.dtype), own], 1).softmax(-1)
        mixed = torch.einsum("ts,tsd->td", weights, values).to(prefix.dtype)
    return (
        mixed,
        None if norm_gain is None else rms_norm(mixed, norm_gain, norm_eps),
        prefix,
        weights.detach(),
    )


def attnres_bank_mixes(
    bank: Sequence[Tensor], queries: Tensor, key_gains: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Each query's mix of the bank alone `[Q, T, d]`, and the log of the sum of its exponentials `[Q, T]`."""
    values = widen(torch.stack(list(bank), dim=1))
    mixes, sums = [], []
    for query, gain in zip(queries, key_gains, strict=True):
        scores = _scores(values, query, gain, eps)
        mixes.append(torch.einsum("ts,tsd->td", scores.softmax(-1), values))
        sums.append(scores.logsumexp(-1))
    return torch.stack(mixes).to(bank[0].dtype), torch.stack(sums)


def _scores(values: Tensor, query: Tensor, key_gain: Tensor, eps: float) -> Tensor:
    keys = values / torch.sqrt(values.square().mean(-1, keepdim=True) + eps) * key_gain
    return torch.einsum("tsd,d->ts", keys, query.to(keys.dtype))
