"""AttnRes mixing in plain PyTorch: no stack of sources, two scalars per token and source for the backward.

The report wraps this computation in a checkpoint (§5.2.2). A backward by hand comes to the same: it holds on
to the sources, which live anyway, and computes with them again. With m = key_gain * query and
r_i = 1 / rms(V_i):

    s_i = r_i (m . V_i)        a = softmax(s)        h = sum_i a_i V_i
    da_i = dh . V_i            ds_i = a_i (da_i - sum_j a_j da_j)
    dV_i = a_i dh + ds_i r_i m - (ds_i s_i r_i^2 / d) V_i        dm = sum over tokens and i of ds_i r_i V_i

Memory traffic is all that counts here, so each piece of a source is read from cache after its first use.
Scalars are `[S, T]`: one source's are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from openk3.ops.norm.eager import rms_norm
from openk3.ops.precision import own_dtypes, wide, widen

CPU_PIECE = 1 << 18  # elements of one source; 1 MB in fp32


def _pieces(x: torch.Tensor) -> Iterator[slice]:
    T, d = x.shape
    rows = max(1, CPU_PIECE // d) if x.device.type == "cpu" else max(1, T)
    return (slice(start, min(start + rows, T)) for start in range(0, T, rows))


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, direction: torch.Tensor, eps: float, *sources: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (T, d), S = sources[0].shape, len(sources)
        h = torch.empty(T, d, dtype=sources[0].dtype, device=direction.device)
        scores, inv, weights = (direction.new_empty(S, T) for _ in range(3))
        for rows in _pieces(sources[0]):
            values = [widen(source[rows]) for source in sources]
            s, r = scores[:, rows], inv[:, rows]
            for i, value in enumerate(values):
                torch.linalg.vector_norm(value, dim=-1, out=r[i])
                torch.mv(value, direction, out=s[i])
            r.square_().div_(d).add_(eps).rsqrt_()
            a = torch.softmax(s.mul_(r), 0)
            mixed = values[0] * a[0, :, None]
            for value, weight in zip(values[1:], a[1:], strict=True):
                mixed.addcmul_(value, weight[:, None])
            h[rows], weights[:, rows] = mixed, a
        ctx.save_for_backward(direction, scores, inv, *sources)
        ctx.mark_non_differentiable(weights)
        return h, weights

    @staticmethod
    @own_dtypes
    @once_differentiable
    def backward(ctx: Any, d_h: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        direction, scores, inv, *sources = ctx.saved_tensors
        d_sources = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in sources]
        d_direction = torch.zeros_like(direction)
        for rows in _pieces(d_h):
            values, g = [widen(source[rows]) for source in sources], widen(d_h[rows])
            s, r = scores[:, rows], inv[:, rows]
            a = torch.softmax(s, 0)
            d_a, product = torch.empty_like(a), torch.empty_like(g)
            for i, value in enumerate(values):
                torch.sum(torch.mul(g, value, out=product), -1, out=d_a[i])
            along_m = a * (d_a - (a * d_a).sum(0)) * r
            along_v = along_m * s * r / -d_h.shape[1]
            for i, value in enumerate(values):
                d_value = along_m[i, :, None] * direction
                d_value.addcmul_(g, a[i, :, None]).addcmul_(value, along_v[i, :, None])
                d_sources[i][rows] = d_value
                d_direction.addmv_(value.t(), along_m[i])
        return d_direction, None, *d_sources


def attnres_mix(
    sources: Sequence[torch.Tensor], query: torch.Tensor, key_gain: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `openk3.ops.attnres.attnres_mix`; the weights `[T, S]` are always returned."""
    dtype = wide(sources[0].dtype)
    h, weights = _Mix.apply(query.to(dtype) * key_gain.to(dtype), eps, *sources)  # type: ignore[no-untyped-call]
    return h, weights.t()


def attnres_add_mix_norm(
    bank: Sequence[torch.Tensor],
    prefix: torch.Tensor,
    output: torch.Tensor | None,
    query: torch.Tensor,
    key_gain: torch.Tensor,
    norm_gain: torch.Tensor | None,
    lse: torch.Tensor | None,
    eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """See `openk3.ops.attnres.attnres_add_mix_norm`: the mix, its norm, the new prefix, weights."""
    prefix = prefix if output is None else prefix + output
    weights = None
    if lse is None:
        mixed, weights = attnres_mix([*bank, prefix], query, key_gain, eps)
    else:
        value, values = widen(bank[0]), widen(prefix)
        score = _scores(values, (query.to(values.dtype) * key_gain)[None], eps)[:, 0]
        share = torch.sigmoid(score - lse)[:, None]  # the softmax of two
        mixed = torch.lerp(value, values, share).to(prefix.dtype)
    return mixed, None if norm_gain is None else rms_norm(mixed, norm_gain, norm_eps), prefix, weights


def attnres_bank_mixes(
    bank: Sequence[torch.Tensor], queries: torch.Tensor, key_gains: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `openk3.ops.attnres.attnres_bank_mixes`: mixes `[Q, T, d]` and sums `[Q, T]`."""
    dtype = wide(bank[0].dtype)
    directions = queries.to(dtype) * key_gains.to(dtype)
    scores = torch.stack([_scores(widen(source), directions, eps) for source in bank])  # [S, T, Q]
    weights = scores.softmax(0)
    mixes = []
    for q in range(len(queries)):
        mixed = widen(bank[0]) * weights[0, :, q, None]
        for source, weight in zip(bank[1:], weights[1:, :, q], strict=True):
            mixed = mixed.addcmul(widen(source), weight[:, None])
        mixes.append(mixed.to(bank[0].dtype))
    return torch.stack(mixes), scores.logsumexp(0).t()


def _scores(values: torch.Tensor, directions: torch.Tensor, eps: float) -> torch.Tensor:
    """Of each row against each of `[Q, d]`: `[T, Q]`."""
    inv = (values.square().mean(-1, keepdim=True) + eps).rsqrt()
    return values @ directions.t() * inv
