"""The routed experts as one operator that torch.compile and checkpointing see, with its backward.

    forward    gather -> gate and up with their unit -> down -> sum over slots
    backward   gather x and G -> gate, up, w2^T G and what follows from them -> gradients of rows and weights

Narrow experts with many rows do all but the sum and the gradients of weights in one kernel (`narrow`), wide
ones have larger tiles for most gradients (`wide`).
Kept for the backward: what came in, and the plan. The gradient of p needs no expert output (see `eager`).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Any

import torch

from openk3.ops.activation import Activation
from openk3.ops.kernel_operator import kernel_operator
from openk3.ops.moe.kernels import few, gradients, narrow, wide
from openk3.ops.moe.kernels.plan import tile_starts
from openk3.ops.moe.kernels.products import product, tiles_for
from openk3.ops.moe.kernels.rows import combine, gather
from openk3.ops.moe.plan import DispatchPlan

Tensor = torch.Tensor


FEW = 0  # mean rows of an expert up to which the kernels for a few are taken; none: not shown to be faster


def _aligned(x: Tensor) -> Tensor:
    """Contiguous from a 16-byte word on, as the copy engine wants it."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _router_weights(weights: Tensor) -> Tensor:
    return weights.to(torch.float32).contiguous()


def forward_rows(
    rows: Tensor,
    offsets: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    unit: str,
    gate_cap: float,
    up_cap: float,
) -> Tensor:
    """Each row through its expert, `[R, l]` -> `[R, l]`: w2 unit(w1 x, w3 x)."""
    tiles = tiles_for(len(rows), len(w1))
    starts = tile_starts(offsets, tiles.height)
    hidden = product(rows, w1, w3, offsets, starts, tiles, unit, gate_cap, up_cap)
    return product(hidden, w2, w2, offsets, starts, tiles)


def forward_few(
    x: Tensor, tokens: Tensor, offsets: Tensor, w1: Tensor, w3: Tensor, w2: Tensor,
    unit: str, gate_cap: float, up_cap: float,
) -> Tensor:  # fmt: skip
    """The same for `x[tokens]`, which is not gathered before: for a few rows an expert."""
    R, (E, F, width) = len(tokens), w1.shape
    size = few.PLAIN[few.height(R, E)]
    tiles = few.list_tiles(offsets, R, size.rows)
    hidden = few.few_product(x, tokens, w1, w3, None, F, R, tiles, size, unit, gate_cap, up_cap)
    return few.few_product(hidden, None, w2, w2, None, width, R, tiles, size)


@kernel_operator("openk3::expert_ffn")
def _expert_ffn(
    x: Tensor, weights: Tensor, order: Tensor, tokens: Tensor, rows_of: Tensor, offsets: Tensor,
    w1: Tensor, w3: Tensor, w2: Tensor, unit: str, gate_cap: float, up_cap: float,
) -> Tensor:  # fmt: skip
    w1, w3, w2 = (_aligned(w) for w in (w1, w3, w2))
    if 0 < len(tokens) <= FEW * len(w1):
        out = forward_few(_aligned(x), tokens, offsets, w1, w3, w2, unit, gate_cap, up_cap)
    elif narrow.suits(len(tokens), w1):
        out = narrow.forward(x.contiguous(), tokens, w1, w3, w2, offsets, unit, gate_cap, up_cap)
    else:
        out = forward_rows(gather(x.contiguous(), tokens), offsets, w1, w3, w2, unit, gate_cap, up_cap)
    return combine(out, rows_of, _router_weights(weights), x.dtype)


@_expert_ffn.register_fake
def _(
    x: Tensor, weights: Tensor, order: Tensor, tokens: Tensor, rows_of: Tensor, offsets: Tensor,
    w1: Tensor, w3: Tensor, w2: Tensor, unit: str, gate_cap: float, up_cap: float,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape)


@kernel_operator("openk3::expert_ffn_backward")
def _expert_ffn_backward(
    x: Tensor, weights: Tensor, order: Tensor, tokens: Tensor, rows_of: Tensor, offsets: Tensor,
    w1: Tensor, w3: Tensor, w2: Tensor, unit: str, gate_cap: float, up_cap: float, d_u: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients to x, weights, w1, w3 and w2."""
    if len(tokens) == 0:
        zeros = (torch.zeros_like(g, memory_format=torch.contiguous_format) for g in (x, weights, w1, w3, w2))
        return tuple(zeros)  # type: ignore[return-value]
    w1, w3, w2 = (_aligned(w) for w in (w1, w3, w2))
    x, d_u, p = x.contiguous(), d_u.contiguous(), _router_weights(weights)
    if narrow.suits(len(tokens), w1):
        rows, d_out, hidden, d_gate, d_up, d_rows, d_p = narrow.backward(
            x, d_u, tokens, w1, w3, w2, p, order, offsets, unit, gate_cap, up_cap
        )
    elif wide.suits(len(tokens), w1):
        rows, d_out = gather(x, tokens), gather(d_u, tokens)
        hidden, d_gate, d_up, d_p = wide.hidden_gradients(
            rows, d_out, w1, w3, w2, p, order, offsets, unit, gate_cap, up_cap
        )
        d_rows = wide.row_gradients(d_gate, d_up, w1, w3, offsets)
    else:
        rows, d_out = gather(x, tokens), gather(d_u, tokens)
        starts = tile_starts(offsets, gradients.HIDDEN.rows)
        hidden, d_gate, d_up, d_p = gradients.hidden_gradients(
            rows, d_out, w1, w3, w2, p, order, offsets, starts, unit, gate_cap, up_cap
        )
        starts = tile_starts(offsets, gradients.ROWS.rows)
        d_rows = gradients.row_gradients(d_gate, d_up, w1, w3, offsets, starts)
    d_w1, d_w3 = gradients.weight_gradients(d_gate, d_up, rows, offsets)
    d_w2, _ = gradients.weight_gradients(d_out, None, hidden, offsets)
    return combine(d_rows, rows_of, None, x.dtype), d_p[rows_of].to(weights.dtype), d_w1, d_w3, d_w2


@_expert_ffn_backward.register_fake
def _(
    x: Tensor, weights: Tensor, order: Tensor, tokens: Tensor, rows_of: Tensor, offsets: Tensor,
    w1: Tensor, w3: Tensor, w2: Tensor, unit: str, gate_cap: float, up_cap: float, d_u: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return tuple(g.new_empty(g.shape) for g in (x, weights, w1, w3, w2))  # type: ignore[return-value]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.unit = inputs[9:]


def _differentiate(ctx: Any, d_u: Tensor) -> tuple[Tensor | None, ...]:
    d_x, d_p, *d_w = torch.ops.openk3.expert_ffn_backward(*ctx.saved_tensors, *ctx.unit, d_u)
    return d_x, d_p, None, None, None, None, *d_w, None, None, None


_expert_ffn.register_autograd(_differentiate, setup_context=_keep)


def expert_ffn(
    x: Tensor, weights: Tensor, plan: DispatchPlan, w1: Tensor, w3: Tensor, w2: Tensor, activation: Activation
) -> Tensor:
    """See `openk3.ops.moe.expert_ffn`."""
    out: Tensor = torch.ops.openk3.expert_ffn(
        x, weights, plan.order, plan.tokens, plan.rows, plan.offsets, w1, w3, w2,
        activation.kind, activation.gate_cap, activation.up_cap,
    )  # fmt: skip
    return out
