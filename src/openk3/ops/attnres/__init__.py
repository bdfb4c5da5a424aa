"""Attention Residuals: attention over depth, in place of the residual sum (report §2.2 eq. 8-10).

One operator: mix the sources that a sublayer sees. Which sources those are (the bank of finished blocks and
the running prefix) is the model's protocol; eq. 9 and eq. 10 differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from openk3.errors import InvalidInput
from openk3.ops.dispatch import Implementation, choose
from openk3.ops.inputs import check_floating

__all__ = ["attnres_mix"]


def attnres_mix(
    sources: Sequence[torch.Tensor],
    query: torch.Tensor,
    key_gain: torch.Tensor,
    *,
    eps: float = 1e-5,
    return_weights: bool = False,
    implementation: Implementation | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """h = sum_i a_i V_i with a = softmax_i(query . RMSNorm(V_i; key_gain)), for each token on its own.

    Scores, softmax and sum are computed in at least fp32. A zero query gives the plain average.

    Args:
        sources: S >= 1 tensors `[T, d]` of one floating dtype and device: the bank's rows, then the prefix.
        query: pseudo-query `[d]`, the layer's own parameter (`*_res_proj.weight` of the release).
        key_gain: gain `[d]` of the keys' RMSNorm (`*_res_norm.weight`).
        eps: of that norm; positive.
        return_weights: also return the softmax.
        implementation: force "reference" or "eager"; by default the fastest for the device.

    Returns:
        h `[T, d]` in the sources' dtype, and the weights `[T, S]` in at least fp32, without gradient (None
        unless asked for). The backward keeps the given sources and two scalars per token and source.

    Raises:
        InvalidInput: no source, or shapes, dtypes or devices that do not fit.
        KernelUnavailable: the forced implementation cannot run here.
    """
    _check(sources, query, key_gain, eps)
    match choose("attnres_mix", sources[0], implementation, kernels=False):
        case "reference":
            from openk3.ops.attnres.reference import attnres_mix as run
        case _:
            from openk3.ops.attnres.eager import attnres_mix as run
    h, weights = run(sources, query, key_gain, eps)
    return h, weights if return_weights else None


def _check(sources: Sequence[torch.Tensor], query: torch.Tensor, key_gain: torch.Tensor, eps: float) -> None:
    if not sources:
        raise InvalidInput("attnres_mix: got no source; it needs the prefix at least")
    first = sources[0]
    if first.dim() != 2 or not first.is_floating_point():
        raise InvalidInput(
            f"attnres_mix: sources must be floating [T, d], got {tuple(first.shape)} {first.dtype}"
        )
    for i, source in enumerate(sources):
        if source.shape != first.shape or source.dtype != first.dtype or source.device != first.device:
            raise InvalidInput(
                f"attnres_mix: source {i} is {tuple(source.shape)} {source.dtype} on {source.device}, "
                f"source 0 is {tuple(first.shape)} {first.dtype} on {first.device}; they must match"
            )
    check_floating("attnres_mix", sources=first, query=query, key_gain=key_gain)
    for name, vector in (("query", query), ("key_gain", key_gain)):
        if vector.shape != first.shape[1:]:
            raise InvalidInput(
                f"attnres_mix: {name} is {tuple(vector.shape)}, must be ({first.shape[1]},) as the sources"
            )
    if not eps > 0:
        raise InvalidInput(f"attnres_mix: eps must be positive, got {eps}")
