"""The router: which k experts a token visits, with what weight, and how high the first one left out stood.

Sigmoid scores, selection by score + bias, weights by score alone: the bias steers the load and never the
mixture (report §2.3.3 eq. 13). One top-(k+1) gives the route and the cut-off that Quantile Balancing needs.
Knows nothing about how the bias is updated or how experts compute.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from openk3.errors import InvalidInput
from openk3.ops.dispatch import Implementation, Kernel, choose
from openk3.ops.inputs import check_floating
from openk3.ops.moe.plan import BlockCounts
from openk3.ops.precision import own_dtypes, wide

WIDEST_CHOICE = 4096  # experts that a program of the kernel holds
KERNEL = Kernel("route", takes="float32 logits, at most 4,096 experts", checked_on="H200 (sm_90)")


class Routing(NamedTuple):
    """What the router decided for T tokens.

    ids: `[T, k]` int64, distinct within a row, by falling score + bias; ties go to the lower expert index.
    weights: `[T, k]` in the logits' dtype, differentiable to the logits.
    scores: `[T, E]` sigmoid of the logits, differentiable; None where kernels chose, which keep none.
    cutoff: `[T]` the (k+1)-th largest of scores + bias, detached; -inf where every expert is chosen.
    counts: for `plan`, where the kernel that chose made them.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    scores: torch.Tensor | None
    cutoff: torch.Tensor
    counts: BlockCounts | None = None


@own_dtypes
def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    *,
    scaling_factor: float = 1.0,
    renormalize: bool = True,
    chosen: tuple[torch.Tensor, torch.Tensor] | None = None,
    implementation: Implementation | None = None,
) -> Routing:
    """Choose k of E experts for each token (report §2.3.3 eq. 13).

    Args:
        logits: `[T, E]` float32 or float64. Half precision is refused: rounded scores tie.
        bias: `[E]` float32 or float64, the balancing bias. It takes part in the selection and the cut-off
            only, and gets no gradient.
        k: experts per token, 1 <= k <= E.
        scaling_factor: multiplies the weights.
        renormalize: divide the chosen scores by their sum (+ 1e-20); otherwise the weights are the scores.
        chosen: an earlier decision (ids, cutoff) for the same tokens, to be taken instead of choosing anew: a
            recomputed layer must route as it did.
        implementation: of the choice alone, "eager" or "triton"; the experts chosen are the same.

    Raises:
        InvalidInput: shapes or dtypes do not fit, or k is out of range.
    """
    if logits.dim() != 2 or bias.shape != logits.shape[1:]:
        raise InvalidInput(
            f"route: logits are {tuple(logits.shape)} and bias is {tuple(bias.shape)}; want [T, E] and [E]"
        )
    check_floating("route", logits=logits, bias=bias)
    if wide(logits.dtype) != logits.dtype or wide(bias.dtype) != bias.dtype:
        raise InvalidInput(f"route: logits are {logits.dtype}, bias is {bias.dtype}; want float32 or float64")
    if not 1 <= k <= logits.shape[1]:
        raise InvalidInput(f"route: k is {k}; it must lie between 1 and the {logits.shape[1]} experts")
    if chosen is not None and [*chosen[0].shape, *chosen[1].shape] != [len(logits), k, len(logits)]:
        raise InvalidInput(
            f"route: chosen ids are {tuple(chosen[0].shape)}, chosen cutoff is {tuple(chosen[1].shape)}; "
            f"want {(len(logits), k)} and {(len(logits),)}"
        )
    return decide(logits, bias, k, scaling_factor, renormalize, chosen, implementation)


def decide(
    logits: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    scaling_factor: float,
    renormalize: bool,
    chosen: tuple[torch.Tensor, torch.Tensor] | None = None,
    implementation: Implementation | None = None,
) -> Routing:
    """`route` for arguments that fit."""
    scores = torch.sigmoid(logits)
    ids, cutoff = chosen or select_experts((scores + bias).detach(), k, implementation)
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    if scaling_factor != 1:
        weights = weights * scaling_factor
    return Routing(ids, weights, scores, cutoff)


def select_experts(
    biased: torch.Tensor, k: int, implementation: Implementation | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[T, E]` -> the k best experts of each row `[T, k]` and the (k+1)-th best value `[T]`.

    Equal values by rising expert index, on every device.
    """
    T, E = biased.shape
    fits = 0 < E <= WIDEST_CHOICE
    if choose("route", biased, implementation, kernels=fits, by_default=KERNEL.checked) == "triton":
        from openk3.ops.moe.kernels import choice

        ids, cutoff = choice.select_experts(biased, k)
        return ids, cutoff
    values, ids = biased.topk(min(k + 1, E), dim=1)
    # topk breaks ties as it likes, differently on each device. Ties are rare in fp32: sort those rows only.
    equal = values[:, 1:] == values[:, :-1]
    if equal.any():
        tied = equal.any(1)
        ids[tied] = biased[tied].sort(dim=1, descending=True, stable=True).indices[:, : ids.shape[1]]
    cutoff = values[:, k] if k < E else values.new_full((T,), -torch.inf)
    return ids[:, :k], cutoff
