"""Quantile Balancing: the bias that gives every expert its share (report §2.3.3, Appendices C and D).

A step counts `required_bias_histogram` over its tokens, sums it over micro-batches and ranks, and sets
`bias_from_histogram` for the next step. `exact_bias` and `alternating_solver` are what this estimates;
`sign_update` is the rule that it replaces.
"""

from __future__ import annotations

import torch

from openk3.errors import InvalidInput
from openk3.ops.dispatch import Implementation, Kernel, choose
from openk3.ops.inputs import check_floating
from openk3.ops.quantile_balance.bins import bin_edges
from openk3.ops.quantile_balance.reference import BalancedAssignment, alternating_solver, exact_bias
from openk3.ops.quantile_balance.update import average_bias, bias_from_histogram, sign_update

__all__ = [
    "BalancedAssignment",
    "alternating_solver",
    "average_bias",
    "bias_from_histogram",
    "bin_edges",
    "exact_bias",
    "required_bias_histogram",
    "sign_update",
]


KERNELS = (Kernel("required_bias_histogram", takes="float32", checked_on="H200 (sm_90)"),)


def required_bias_histogram(
    scores: torch.Tensor,
    cutoff: torch.Tensor,
    bias: torch.Tensor,
    *,
    token_mask: torch.Tensor | None = None,
    bins: int = 1000,
    implementation: Implementation | None = None,
) -> torch.Tensor:
    """Count, for each expert, the bias that would put it exactly at each token's cut-off (report Appendix D).

    Counts add: the sum of the histograms of any split of the tokens is the histogram of all, bit for bit,
    as long as they were made with the same bias. Call it once for each token of a training step, never in
    evaluation or in a recomputed forward.

    Args:
        scores: `[T, E]` float32 or float64, without bias (`Routing.scores`); detached here.
        cutoff: `[T]` (k+1)-th largest biased score, finite (`Routing.cutoff` with k < E).
        bias: `[E]` the bias that routed these tokens; it fixes the bins.
        token_mask: `[T]` bool, True = counted. Padding and masked tokens must not shift the quantile.
        bins: number of equal bins over [min bias - 1, max bias + 1].
        implementation: force "reference", "eager" or "triton" (float32 alone); by default the fastest for the
            device.

    Returns:
        `[E, bins]` int64; each row sums to the number of counted tokens. Float rounding can move a value
        that lies on a bin border into the bin next to it: about 1e-4 of a bin in float32.

    Raises:
        InvalidInput: a shape, dtype or device does not fit, or bins < 1.
        KernelUnavailable: the forced implementation cannot run here.
    """
    T, E = scores.shape if scores.dim() == 2 else (-1, -1)
    if cutoff.shape != (T,) or bias.shape != (E,):
        raise InvalidInput(
            f"required_bias_histogram: scores are {tuple(scores.shape)}, cutoff is {tuple(cutoff.shape)}, "
            f"bias is {tuple(bias.shape)}; want [T, E], [T] and [E]"
        )
    check_floating("required_bias_histogram", scores=scores, cutoff=cutoff, bias=bias)
    if token_mask is not None and (token_mask.shape != (T,) or token_mask.dtype != torch.bool):
        raise InvalidInput(
            f"required_bias_histogram: token_mask is {tuple(token_mask.shape)} {token_mask.dtype}; "
            f"want ({T},) torch.bool"
        )
    if bins < 1:
        raise InvalidInput(f"required_bias_histogram: bins is {bins}; want at least 1")
    kernels = all(x.dtype == torch.float32 for x in (scores, cutoff, bias))
    match choose(
        "required_bias_histogram", scores, implementation, kernels=kernels, by_default=KERNELS[0].checked
    ):
        case "reference":
            from openk3.ops.quantile_balance.reference import required_bias_histogram as run
        case "triton":
            from openk3.ops.quantile_balance.kernels import required_bias_histogram as run
        case _:
            from openk3.ops.quantile_balance.eager import required_bias_histogram as run
    return run(scores.detach(), cutoff.detach(), bias.detach(), token_mask, bins)
