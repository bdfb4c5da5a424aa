"""The routed experts on any device in plain PyTorch: gather, three grouped products, one weighted sum.

    u_t = sum_s p_ts w2_e act(w1_e x_t, w3_e x_t),  e = ids_ts           (report §2.3 eq. 11)

What the backward keeps is what came in: x, p, the expert weights and the plan. It gathers the rows again and,
with `recompute`, multiplies gate and up out again: two products in eleven, for 2 k F numbers a token.

The gradient of p needs no expert output. With A a row of act(..), Y = w2 A its output and G = dL/du_t:

    dp = <G, Y> = <w2^T G, A> = <dA', A>,   dA' the gradient of A for p = 1,   dA = p dA'

which is an inner product of two rows of width F that the backward has anyway. Starting from dA instead of dA'
would divide by p, which may be 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from openk3.ops.activation import Activation
from openk3.ops.moe.combine import combine
from openk3.ops.moe.grouped import rows_by_rows, rows_by_weight
from openk3.ops.moe.plan import DispatchPlan
from openk3.ops.precision import own_dtypes, widen

Tensor = torch.Tensor


class _ExpertFFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [T, l]
        weights: Tensor,  # [T, k]
        plan: DispatchPlan,
        w1: Tensor,  # [E, F, l]
        w3: Tensor,  # [E, F, l]
        w2: Tensor,  # [E, l, F]
        activation: Activation,
        recompute: bool,
    ) -> Tensor:
        gate, up = _gate_and_up(x.index_select(0, plan.tokens), w1, w3, plan)
        ctx.save_for_backward(x, weights, w1, w3, w2, *(() if recompute else (gate, up)))
        ctx.plan, ctx.activation = plan, activation
        hidden = activation.forward(gate, up)  # [R, F]
        out = rows_by_weight(hidden, w2.transpose(1, 2), plan.offsets)  # [R, l]
        return combine(out, plan, weights).to(x.dtype)

    @staticmethod
    @own_dtypes
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, w1, w3, w2, *kept = ctx.saved_tensors
        plan: DispatchPlan = ctx.plan
        rows = x.index_select(0, plan.tokens)  # [R, l]
        gate, up = kept or _gate_and_up(rows, w1, w3, plan)
        hidden, by_gate, by_up = ctx.activation.partials(widen(gate), widen(up))

        d_out = grads[0].index_select(0, plan.tokens)  # [R, l], G: p is not in it yet
        d_hidden = widen(rows_by_weight(d_out, w2, plan.offsets))  # [R, F], dA'
        d_weights = (d_hidden * hidden).sum(1)[plan.rows].to(weights.dtype)

        p = weights.to(hidden.dtype).flatten()[plan.order].unsqueeze(1)  # [R, 1]
        d_w2 = rows_by_rows(d_out, hidden.mul_(p).to(x.dtype), plan.offsets)
        d_hidden = d_hidden.mul_(p)  # dA
        d_gate = by_gate.mul_(d_hidden).to(x.dtype)
        d_up = by_up.mul_(d_hidden).to(x.dtype)
        d_w1 = rows_by_rows(d_gate, rows, plan.offsets)
        d_w3 = rows_by_rows(d_up, rows, plan.offsets)

        d_rows = widen(rows_by_weight(d_gate, w1, plan.offsets))
        d_rows += rows_by_weight(d_up, w3, plan.offsets)
        d_x = combine(d_rows, plan).to(x.dtype)
        return d_x, d_weights, None, d_w1, d_w3, d_w2, None, None


def _gate_and_up(rows: Tensor, w1: Tensor, w3: Tensor, plan: DispatchPlan) -> tuple[Tensor, Tensor]:
    """Both input projections of each row's own expert, `[R, l]` -> two of `[R, F]`."""
    gate = rows_by_weight(rows, w1.transpose(1, 2), plan.offsets)
    return gate, rows_by_weight(rows, w3.transpose(1, 2), plan.offsets)


def expert_ffn(
    x: Tensor,
    weights: Tensor,
    plan: DispatchPlan,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    activation: Activation,
    recompute: bool,
) -> Tensor:
    """See `openk3.ops.moe.expert_ffn`."""
    out: Tensor = _ExpertFFN.apply(x, weights, plan, w1, w3, w2, activation, recompute)  # type: ignore[no-untyped-call]
    return out
