"""Quantile Balancing with all margins at hand: eq. 14, Algorithm 1, and the histogram by its definition.

What the histogram estimates and what it is tested against. Needs every score of the step in one place,
which a large run never has (report §2.3.3, Appendix C).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from openk3.errors import InvalidInput
from openk3.ops.inputs import check_floating
from openk3.ops.moe.route import select_experts
from openk3.ops.quantile_balance.bins import bin_edges


def exact_bias(scores: torch.Tensor, cutoff: torch.Tensor, k: int) -> torch.Tensor:
    """The mean-centred bias that gives each expert its target load at fixed cut-offs (eq. 14).

    -b_j is the (q+1)-th largest margin s_ij - cutoff_i, with q = m k / n. Where q is not whole, floor(q)
    takes its place: without ties exactly floor(q) margins lie above, less than one away from the target.

    Margins at their own cut-offs do tie: where expert j is a token's (k+1)-th, the margin is minus j's old
    bias, which happens m / n times on average. An expert that lacks fewer tokens than that keeps its bias.

    Args:
        scores: `[m, n]`, unbiased; cutoff: `[m]`, as `route` returns it.
        k: experts per token, k < n.

    Returns:
        `[n]` in the scores' dtype.

    Raises:
        InvalidInput: a shape, dtype or device does not fit, there is no token, or k is not in [1, n).
    """
    m, n = scores.shape if scores.dim() == 2 else (-1, -1)
    if cutoff.shape != (m,):
        raise InvalidInput(
            f"exact_bias: scores are {tuple(scores.shape)}, cutoff is {tuple(cutoff.shape)}; "
            "want [m, n] and [m]"
        )
    check_floating("exact_bias", scores=scores, cutoff=cutoff)
    if m == 0 or not 1 <= k < n:
        raise InvalidInput(f"exact_bias: {m} tokens, {n} experts, k = {k}; want m >= 1 and 1 <= k < n")
    margins = scores - cutoff[:, None]
    rank = m * k // n + 1  # among the largest; kthvalue counts from the smallest
    bias = -margins.kthvalue(m - rank + 1, dim=0).values
    return bias - bias.mean()


@dataclass(frozen=True)
class BalancedAssignment:
    """What `alternating_solver` found.

    bias: `[n]` mean-centred, -beta of Algorithm 1.
    loads: `[n]` int64, tokens per expert when each token takes the top k of scores + bias.
    iterations: how many updates were made.
    converged: whether every load is within 1 of q = m k / n.
    """

    bias: torch.Tensor
    loads: torch.Tensor
    iterations: int
    converged: bool


def alternating_solver(
    scores: torch.Tensor, k: int, iterations: int, *, between: float = 0.5
) -> BalancedAssignment:
    """Algorithm 1: minimise the dual of the balanced assignment by turns over tokens and experts.

    Any alpha_i from the (k+1)-th to the k-th largest biased score is an exact minimiser (Appendix C). The
    report takes the lower end, between = 0, where the ties that `exact_bias` describes stop the turns some
    tokens short of balance. The middle has no such ties and usually arrives within twenty turns.

    Args:
        scores: `[m, n]`, m >= 1; k: experts per token, 1 <= k < n.
        iterations: the most updates to make, >= 0; stops early once every load is within 1 of the target.
        between: where alpha_i lies from the (k+1)-th (0) to the k-th (1) largest biased score.

    Raises:
        InvalidInput: scores are not `[m, n]` floating point, there is no token, k is not in [1, n), or
            iterations is negative.
    """
    m, n = scores.shape if scores.dim() == 2 else (0, 0)
    if m == 0 or not 1 <= k < n or iterations < 0:
        raise InvalidInput(
            f"alternating_solver: scores are {tuple(scores.shape)}, k = {k}, {iterations} iterations; want "
            "[m, n] with m >= 1, 1 <= k < n and no negative count"
        )
    check_floating("alternating_solver", scores=scores)
    bias, done = scores.new_zeros(n), 0
    while True:
        biased = scores + bias
        ids, cutoff = select_experts(biased, k)
        loads = torch.bincount(ids.flatten(), minlength=n)
        converged = bool(((loads * n - m * k).abs() <= n).all())
        if converged or done == iterations:
            return BalancedAssignment(bias, loads, done, converged)
        last_chosen = biased.gather(1, ids[:, -1:]).squeeze(1)
        bias, done = exact_bias(scores, cutoff.lerp(last_chosen, between), k), done + 1


def required_bias_histogram(
    scores: torch.Tensor, cutoff: torch.Tensor, bias: torch.Tensor, token_mask: torch.Tensor | None, bins: int
) -> torch.Tensor:
    """Expert by expert, how many required biases lie between two edges; the outer bins have no outer edge."""
    if token_mask is not None:
        scores, cutoff = scores[token_mask], cutoff[token_mask]
    inner = bin_edges(bias, bins)[1:-1]
    columns = [torch.bucketize(cutoff - column, inner, right=True) for column in scores.unbind(1)]
    return torch.stack([torch.bincount(column, minlength=bins) for column in columns])
