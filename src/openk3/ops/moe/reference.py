"""The routed experts as the report writes them (§2.3 eq. 11): every expert on every token. The oracle."""

from __future__ import annotations

import torch

from openk3.ops.activation import Activation
from openk3.ops.moe.plan import DispatchPlan


def expert_ffn(
    x: torch.Tensor,
    weights: torch.Tensor,
    plan: DispatchPlan,
    w1: torch.Tensor,
    w3: torch.Tensor,
    w2: torch.Tensor,
    activation: Activation,
) -> torch.Tensor:
    """u = sum_e p_e E_e(x), p_e = 0 for a token that did not choose e; in the inputs' own dtype."""
    u = torch.zeros_like(x)
    for e in range(w1.shape[0]):
        first, last = plan.offsets[e], plan.offsets[e + 1]
        chose_e = (plan.rows >= first) & (plan.rows < last)  # [T, k]
        p_e = (weights * chose_e).sum(1, keepdim=True).to(x.dtype)
        u = u + p_e * (activation(x @ w1[e].T, x @ w3[e].T, implementation="reference") @ w2[e].T)
    return u
