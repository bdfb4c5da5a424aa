"""The norms on the GPU: RMSNorm, with and without a sigmoid gate, and the L2 norm; fp32 inside.

y = x * inv * weight * sigmoid(gate), inv = (sum(x^2) / divisor + eps)^-1/2, without weight or gate where
there is none. A program holds whole rows in registers, several where they are short: each direction is one
pass. The backward keeps the inputs alone: it has each row in registers anyway, so that making inv again
costs no byte, and a kept one costs 4 a row twice.

The backward runs as many programs as the card holds at once. Each walks over its rows with the next ones on
their way, and adds up the gradient of the gain; those sums are then added in one order. Nothing adds
atomically. Rows may lie apart, on up to two axes, as heads of a wider projection do.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from openk3.ops.kernel_operator import kernel_operator
from openk3.ops.triton_math import short_sigmoid

Tensor = torch.Tensor

# Values of a program that has several rows: 8 warps x 32 lanes x 16 bytes of bf16, twice in the forward.
FORWARD_TILE, BACKWARD_TILE = 4096, 2048


@triton.jit
def _load(x, outer: tl.int64, inner: tl.int64, row, B, col, inside):
    """The tile at `[ROWS, 1]` rows of `[A, B, d]` and `[1, D]` columns, as it is stored."""
    place = (row // B).to(tl.int64) * outer + (row % B).to(tl.int64) * inner
    return tl.load(x + place + col, mask=inside, other=0.0)


@triton.jit
def _inverse_norm(x, d, eps, MEAN: tl.constexpr):
    squares = tl.sum(x * x, 1, keep_dims=True)
    return tl.rsqrt((squares / d if MEAN else squares) + eps)


@triton.jit(do_not_specialize=["R"])
def _forward(
    x, x_outer: tl.int64, x_inner: tl.int64, gate, gate_outer: tl.int64, gate_inner: tl.int64, weight, y,
    R, B, d, eps, MEAN: tl.constexpr, GAIN: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, D)[None, :]
    inside = (row < R) & (col < d)
    v = _load(x, x_outer, x_inner, row, B, col, inside).to(tl.float32)
    if GATED:
        logits = _load(gate, gate_outer, gate_inner, row, B, col, inside).to(tl.float32)
    if GAIN:
        gain = tl.load(weight + col, mask=col < d, other=0.0).to(tl.float32)
    out = v * _inverse_norm(v, d, eps, MEAN)
    if GAIN:
        out *= gain
    if GATED:
        out *= short_sigmoid(logits)
    tl.store(y + row.to(tl.int64) * d + col, out.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"])
def _backward(
    x, x_outer: tl.int64, x_inner: tl.int64, gate, gate_outer: tl.int64, gate_inner: tl.int64, weight,
    d_y, d_y_outer: tl.int64, d_y_inner: tl.int64, d_x, d_gate, d_gain,
    R, B, d, eps, MEAN: tl.constexpr, GAIN: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, D)[None, :]
    lane = tl.arange(0, ROWS)[:, None]
    step, first = tl.num_programs(0) * ROWS, tl.program_id(0) * ROWS
    if GAIN:
        gain = tl.load(weight + col, mask=col < d, other=0.0).to(tl.float32)
        gain_sum = tl.zeros([ROWS, D], tl.float32)

    row = first + lane
    inside = (row < R) & (col < d)
    x_next = _load(x, x_outer, x_inner, row, B, col, inside)
    d_next = _load(d_y, d_y_outer, d_y_inner, row, B, col, inside)
    if GATED:
        gate_next = _load(gate, gate_outer, gate_inner, row, B, col, inside)
    for start in range(first, R, step):
        row = start + lane
        here = (row < R) & (col < d)
        v, d_out = x_next.to(tl.float32), d_next.to(tl.float32)
        if GATED:
            logits = gate_next.to(tl.float32)
        row_next = row + step
        inside = (row_next < R) & (col < d)
        x_next = _load(x, x_outer, x_inner, row_next, B, col, inside)
        d_next = _load(d_y, d_y_outer, d_y_inner, row_next, B, col, inside)
        if GATED:
            gate_next = _load(gate, gate_outer, gate_inner, row_next, B, col, inside)

        inv = _inverse_norm(v, d, eps, MEAN)
        normed = v * inv
        if GATED:
            # 1 - sigmoid would lose its digits where the gate saturates.
            complement = tl.sigmoid(-logits)
            d_out *= short_sigmoid(logits)
        if GAIN:
            gain_sum += d_out * normed
            d_out *= gain
        along = tl.sum(d_out * normed, 1, keep_dims=True)
        if MEAN:
            along /= d
        place = row.to(tl.int64) * d + col
        tl.store(d_x + place, (inv * (d_out - normed * along)).to(d_x.dtype.element_ty), mask=here)
        if GATED:
            d_logits = d_out * normed * complement
            tl.store(d_gate + place, d_logits.to(d_gate.dtype.element_ty), mask=here)
    if GAIN:
        place = d_gain + tl.program_id(0).to(tl.int64) * d + tl.arange(0, D)
        tl.store(place, tl.sum(gain_sum, 0), mask=tl.arange(0, D) < d)


def tile_of(d: int, values: int) -> dict[str, int]:
    """Rows and columns of a program, and its warps."""
    D = triton.next_power_of_2(d)
    return {"ROWS": max(1, values // D), "D": D, "num_warps": 8 if D <= 4096 else 16}


def programs_at_once(x: Tensor, tile: dict[str, int]) -> int:
    """How many programs of the backward the card holds: 24 warps an SM at 80 registers, 16 at 128."""
    if not x.is_cuda:
        return 3  # in the interpreter: so that a program walks over several tiles
    warps = 24 if tile["ROWS"] * tile["D"] <= BACKWARD_TILE else 16
    on_each = max(1, warps // tile["num_warps"])
    return on_each * torch.cuda.get_device_properties(x.device).multi_processor_count


def _rows(*tensors: Tensor | None) -> tuple[list[Tensor | None], int, int]:
    """Each as `[A, B, d]` with adjacent columns, the number of rows, and B: 1 if rows are adjacent."""
    given = [x for x in tensors if x is not None]
    shape: tuple[int, ...] = (-1, 1, given[0].shape[-1])
    if given[0].dim() > 2 and not all(x.is_contiguous() for x in given):
        shape = (-1, *given[0].shape[-2:])
    rows = [x if x is None else x.reshape(shape) for x in tensors]
    rows = [x if x is None or x.stride(2) == 1 else x.contiguous() for x in rows]
    return rows, given[0].numel() // given[0].shape[-1], shape[1]


def _strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


@kernel_operator("openk3::row_norm")
def _row_norm(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, mean: bool) -> Tensor:
    y = x.new_empty(x.shape)
    if x.numel():
        (v, logits), R, B = _rows(x, gate)
        d, tile = x.shape[-1], tile_of(x.shape[-1], FORWARD_TILE)
        weight = None if weight is None else weight.contiguous()
        _forward[(triton.cdiv(R, tile["ROWS"]),)](
            v, *_strides(v), logits, *_strides(logits), weight, y, R, B, d, eps,
            MEAN=mean, GAIN=weight is not None, GATED=gate is not None, **tile,
        )  # fmt: skip
    return y


@_row_norm.register_fake
def _(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, mean: bool) -> Tensor:
    return x.new_empty(x.shape)


@kernel_operator("openk3::row_norm_backward")
def _row_norm_backward(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, mean: bool, d_y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to x, weight and gate; the last two are empty where there is none."""
    d = x.shape[-1]
    d_x = x.new_empty(x.shape)
    d_gate = x.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    if not x.numel():
        return d_x, x.new_empty(0) if weight is None else torch.zeros_like(weight), d_gate
    (v, logits, d_out), R, B = _rows(x, gate, d_y)
    tile = tile_of(d, BACKWARD_TILE)
    programs = min(triton.cdiv(R, tile["ROWS"]), programs_at_once(x, tile))
    d_gain = x.new_empty(0 if weight is None else programs, d, dtype=torch.float32)
    weight = None if weight is None else weight.contiguous()
    _backward[(programs,)](
        v, *_strides(v), logits, *_strides(logits), weight, d_out, *_strides(d_out), d_x, d_gate, d_gain,
        R, B, d, eps, MEAN=mean, GAIN=weight is not None, GATED=gate is not None, **tile,
    )  # fmt: skip
    return d_x, x.new_empty(0) if weight is None else d_gain.sum(0).to(weight.dtype), d_gate


@_row_norm_backward.register_fake
def _(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, mean: bool, d_y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    d_weight = x.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    return x.new_empty(x.shape), d_weight, x.new_empty(0) if gate is None else gate.new_empty(gate.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, gate, ctx.eps, ctx.mean = inputs
    ctx.save_for_backward(x, weight, gate)


def _differentiate(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, gate = ctx.saved_tensors
    d_x, d_weight, d_gate = torch.ops.openk3.row_norm_backward(x, weight, gate, ctx.eps, ctx.mean, d_y)
    return d_x, None if weight is None else d_weight, None if gate is None else d_gate, None, None


_row_norm.register_autograd(_differentiate, setup_context=_keep)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See `openk3.ops.norm.rms_norm`."""
    y: Tensor = torch.ops.openk3.row_norm(x, weight, None, eps, True)
    return y


def gated_rms_norm(x: Tensor, gate_logits: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `openk3.ops.norm.gated_rms_norm`."""
    y: Tensor = torch.ops.openk3.row_norm(x, weight, gate_logits, eps, True)
    return y


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """See `openk3.ops.norm.l2_norm`."""
    y: Tensor = torch.ops.openk3.row_norm(x, None, None, eps, False)
    return y
