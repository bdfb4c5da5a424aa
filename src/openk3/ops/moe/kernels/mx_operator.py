"""The routed experts from MXFP4 weights as one operator, forward only: products, then the sum over slots."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch

from openk3.ops.activation import Activation
from openk3.ops.kernel_operator import kernel_operator
from openk3.ops.moe.kernels import few, mx_many
from openk3.ops.moe.kernels.rows import combine, gather
from openk3.ops.moe.mx import MxExperts
from openk3.ops.moe.plan import DispatchPlan

Tensor = torch.Tensor


FEW = 12  # mean rows of an expert up to which the kernels for a few are taken


def forward_rows(
    x: Tensor, tokens: Tensor | None, offsets: Tensor, experts: MxExperts,
    unit: str, gate_cap: float, up_cap: float,
) -> Tensor:  # fmt: skip
    """`x[tokens]`, or rows that are grouped already, each through its expert: `[R, l]`."""
    R, E, w = len(x if tokens is None else tokens), len(experts.w13), experts
    if R <= FEW * E:
        few_size = few.MX[few.height(R, E)]
        tiles = few.list_tiles(offsets, R, few_size.rows)
        hidden = few.few_product(
            x, tokens, w.w13, w.w13, w.s13, w.features, R, tiles, few_size, unit, gate_cap, up_cap
        )
        return few.few_product(hidden, None, w.w2, w.w2, w.s2, w.width, R, tiles, few_size)
    size = mx_many.TILES
    tiles = few.list_tiles(offsets, R, size.height)
    rows = x if tokens is None else gather(x, tokens)
    hidden = mx_many.many_product(rows, w.w13, w.s13, w.features, tiles, size, unit, gate_cap, up_cap)
    return mx_many.many_product(hidden, w.w2, w.s2, w.width, tiles, size)


@kernel_operator("openk3::mx_expert_ffn")
def _mx_expert_ffn(
    x: Tensor, weights: Tensor, tokens: Tensor, rows_of: Tensor, offsets: Tensor,
    w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor,
    width: int, features: int, unit: str, gate_cap: float, up_cap: float,
) -> Tensor:  # fmt: skip
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    experts = MxExperts(w13, s13, w2, s2, width, features)
    rows = forward_rows(x, tokens, offsets, experts, unit, gate_cap, up_cap)
    return combine(rows, rows_of, weights.to(torch.float32).contiguous(), x.dtype)


@_mx_expert_ffn.register_fake
def _(
    x: Tensor, weights: Tensor, tokens: Tensor, rows_of: Tensor, offsets: Tensor,
    w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor,
    width: int, features: int, unit: str, gate_cap: float, up_cap: float,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape)


def mx_expert_ffn(
    x: Tensor, weights: Tensor, plan: DispatchPlan, experts: MxExperts, activation: Activation
) -> Tensor:
    """See `openk3.ops.moe.mx_expert_ffn`."""
    out: Tensor = torch.ops.openk3.mx_expert_ffn(
        x, weights, plan.tokens, plan.rows, plan.offsets,
        experts.w13, experts.s13, experts.w2, experts.s2, experts.width, experts.features,
        activation.kind, activation.gate_cap, activation.up_cap,
    )  # fmt: skip
    return out
