"""From the rows of the experts back to tokens: a weighted sum, always in the order of the slots."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding_bag

from openk3.ops.moe.plan import DispatchPlan
from openk3.ops.precision import own_dtypes, widen


@own_dtypes
def combine(rows: torch.Tensor, plan: DispatchPlan, weights: torch.Tensor | None = None) -> torch.Tensor:
    """u_t = sum_s weights[t, s] rows[plan.rows[t, s]], slot 0 first; `rows [R, l]` -> `[T, l]` at least fp32.

    Without weights the plain sum: the adjoint of gathering `x[plan.tokens]`.
    """
    rows = widen(rows)
    # An embedding bag is "gather k rows, scale, add in order" in one pass, without a [T, k, l] in between.
    scale = None if weights is None else weights.to(rows.dtype)
    return embedding_bag(plan.rows, rows, mode="sum", per_sample_weights=scale)
