"""Gated units act(gate) * up on the GPU: SiTU-GLU, SwiGLU and GLU, one pass forward and one backward.

In bf16 the forward moves 6 bytes an element and the backward 10. While memory does that, an SM of an H200 has
time for 5 and 9 special functions an element, and for 45 and 75 instructions: a formula must stay well below.

SiTU-GLU in bf16 takes the card's tanh, whose relative error is 2^-11 at most (PTX ISA, tanh.approx.f32): an
element is then within 2^-10 of the equation before it is rounded, by up to 2^-8. Other dtypes and all
gradients are within 5e-6, made of exponentials of negative numbers, so that nothing overflows or cancels:

    A = e^(-2|g|/cap_g),  E = e^-|g|,  C = e^(-2|u|/cap_u)
    |y| = cap_g cap_u (1 - A)(1 - C) [E if g < 0] / ((1 + A)(1 + E)(1 + C))

E is A^2 at the released cap of 4; a series stands for 1 - A where it is small. What is below 2^-126 is zero.

gate and up are two tensors, as the feed-forward networks and the experts hold them, or the halves of one:
rows may lie apart, and are not copied for that. The backward keeps those two and nothing else.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from openk3.ops.kernel_operator import kernel_operator
from openk3.ops.triton_math import (
    LOG2E,
    PTX,
    coarse_tanh,
    short_exp2,
    short_reciprocal,
    short_sigmoid,
    sigmoid_pair,
)

Tensor = torch.Tensor


@triton.jit
def _one_minus(decay, z):
    """1 - e^-z given decay = e^-z, z >= 0."""
    series = z * (1.0 - z * (1 / 2 - z * (1 / 6 - z * (1 / 24 - z * (1 / 120)))))
    return tl.where(z < 0.125, series, 1.0 - decay)


@triton.jit
def _with_sign(bits, magnitude):
    """`magnitude` >= 0 with the sign bit of the int32 `bits`."""
    return (magnitude.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _situ_parts(g, u, gate_cap, up_cap, CAP_4: tl.constexpr):
    z, w = tl.abs(g) * (2.0 / gate_cap), tl.abs(u) * (2.0 / up_cap)
    A, C = short_exp2(z * -LOG2E), short_exp2(w * -LOG2E)
    E = A * A if CAP_4 else short_exp2(tl.abs(g) * -LOG2E)
    return A, C, E, _one_minus(A, z), _one_minus(C, w)


@triton.jit
def _value(g, u, gate_cap, up_cap, UNIT: tl.constexpr, CAP_4: tl.constexpr, COARSE: tl.constexpr):
    """`COARSE` is right where the result is rounded to bf16."""
    if UNIT == "situ":
        if COARSE:
            capped = coarse_tanh(g * (1.0 / gate_cap)) * coarse_tanh(u * (1.0 / up_cap))
            return capped * (short_sigmoid(g) * (gate_cap * up_cap))
        A, C, E, less_A, less_C = _situ_parts(g, u, gate_cap, up_cap, CAP_4)
        over = short_reciprocal((1.0 + A) * (1.0 + C) * (1.0 + E))
        ratio = less_A * less_C * tl.where(g < 0, E, 1.0) * over
        # Rounding must not exceed the bound; a NaN stays one.
        ratio = tl.minimum(ratio, 1.0, propagate_nan=tl.PropagateNan.ALL)
        signs = g.to(tl.int32, bitcast=True) ^ u.to(tl.int32, bitcast=True)
        return _with_sign(signs, ratio * (gate_cap * up_cap))
    if UNIT == "swiglu":
        return g * short_sigmoid(g) * u
    return short_sigmoid(g) * u


@triton.jit
def _gradients(g, u, d, gate_cap, up_cap, UNIT: tl.constexpr, CAP_4: tl.constexpr):
    """The gradients of gate and up, d being that of the output."""
    if UNIT == "situ":
        A, C, E, less_A, less_C = _situ_parts(g, u, gate_cap, up_cap, CAP_4)
        over_A, over_C, over_E = (
            short_reciprocal(1.0 + A),
            short_reciprocal(1.0 + C),
            short_reciprocal(1.0 + E),
        )
        capped_gate = _with_sign(g.to(tl.int32, bitcast=True), less_A * over_A) * gate_cap
        capped_up = _with_sign(u.to(tl.int32, bitcast=True), less_C * over_C) * up_cap
        d_sig = d * (tl.where(g < 0, E, 1.0) * over_E)  # times sig(g)
        # d/dg [cap tanh(g/cap) sig(g)] = sig(g) (tanh'(g/cap) + cap tanh(g/cap) sig(-g))
        slope = 4.0 * A * (over_A * over_A) + capped_gate * (tl.where(g < 0, 1.0, E) * over_E)
        return d_sig * capped_up * slope, d_sig * capped_gate * (4.0 * C * (over_C * over_C))
    sig, complement = sigmoid_pair(g)
    if UNIT == "swiglu":
        return d * u * sig * (1.0 + g * complement), d * sig * g
    return d * u * sig * complement, d * sig


@triton.jit
def _places(T, F, SLICES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows `[ROWS, 1]` and columns `[1, COLS]` of a program in 64 bits, and which of them there are."""
    program = tl.program_id(0).to(tl.int64)
    if SLICES == 0:
        first_row, first_col = program * 0, program * COLS
    else:
        first_row, first_col = program // SLICES * ROWS, program % SLICES * COLS
    row = first_row + tl.arange(0, ROWS)[:, None]
    col = first_col + tl.arange(0, COLS)[None, :]
    return row, col, (row < T) & (col < F)


@triton.jit(do_not_specialize=["T"])
def _forward(
    gate, gate_row: tl.int64, up, up_row: tl.int64, out, T, F, gate_cap, up_cap,
    UNIT: tl.constexpr, CAP_4: tl.constexpr, COARSE: tl.constexpr,
    SLICES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, col, inside = _places(T, F, SLICES, ROWS, COLS)
    g = tl.load(gate + row * gate_row + col, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + col, mask=inside, other=0.0).to(tl.float32)
    y = _value(g, u, gate_cap, up_cap, UNIT, CAP_4, COARSE)
    tl.store(out + row * F + col, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _backward(
    gate, gate_row: tl.int64, up, up_row: tl.int64, d_out, d_out_row: tl.int64, d_gate, d_up, d_row: tl.int64,
    T, F, gate_cap, up_cap, UNIT: tl.constexpr, CAP_4: tl.constexpr,
    SLICES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, col, inside = _places(T, F, SLICES, ROWS, COLS)
    g = tl.load(gate + row * gate_row + col, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + col, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(d_out + row * d_out_row + col, mask=inside, other=0.0).to(tl.float32)
    by_gate, by_up = _gradients(g, u, d, gate_cap, up_cap, UNIT, CAP_4)
    tl.store(d_gate + row * d_row + col, by_gate.to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_up + row * d_row + col, by_up.to(d_up.dtype.element_ty), mask=inside)


# A program's tile: 8 warps x 32 lanes x 8 values, 16 bytes of bf16. Rows side by side are one long row.
ONE_ROW = {"ROWS": 1, "COLS": 2048, "num_warps": 8}
APART = {"ROWS": 8, "COLS": 256, "num_warps": 8}


def coarse(dtype: torch.dtype) -> bool:
    """Whether results in `dtype` may be made with the card's tanh."""
    return bool(PTX) and dtype == torch.bfloat16


def _rows(*tensors: Tensor) -> tuple[list[Tensor], tuple[int], dict[str, int]]:
    """Each as `[T, F]` with adjacent columns; the grid over them, and its tile."""
    if all(x.is_contiguous() for x in tensors):
        rows, tile = [x.view(1, -1) for x in tensors], ONE_ROW
    else:
        rows, tile = [x.reshape(-1, x.shape[-1]) for x in tensors], APART
        rows = [x if x.stride(1) == 1 else x.contiguous() for x in rows]
    T, F = rows[0].shape
    slices = triton.cdiv(F, tile["COLS"])
    return rows, (triton.cdiv(T, tile["ROWS"]) * slices,), {**tile, "SLICES": 0 if T == 1 else slices}


@kernel_operator("openk3::gated_unit")
def _gated_unit(gate: Tensor, up: Tensor, unit: str, gate_cap: float, up_cap: float) -> Tensor:
    out = gate.new_empty(gate.shape)
    if gate.numel():
        (g, u), grid, tile = _rows(gate, up)
        _forward[grid](
            g, g.stride(0), u, u.stride(0), out, *g.shape, gate_cap, up_cap,
            UNIT=unit, CAP_4=gate_cap == 4, COARSE=coarse(gate.dtype), **tile,
        )  # fmt: skip
    return out


@_gated_unit.register_fake
def _(gate: Tensor, up: Tensor, unit: str, gate_cap: float, up_cap: float) -> Tensor:
    return gate.new_empty(gate.shape)


@kernel_operator("openk3::gated_unit_backward")
def _gated_unit_backward(
    gate: Tensor, up: Tensor, d_out: Tensor, unit: str, gate_cap: float, up_cap: float
) -> tuple[Tensor, Tensor]:
    d_gate, d_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    if gate.numel():
        (g, u, d), grid, tile = _rows(gate, up, d_out)
        _backward[grid](
            g, g.stride(0), u, u.stride(0), d, d.stride(0), d_gate, d_up, g.shape[1], *g.shape,
            gate_cap, up_cap, UNIT=unit, CAP_4=gate_cap == 4, **tile,
        )  # fmt: skip
    return d_gate, d_up


@_gated_unit_backward.register_fake
def _(
    gate: Tensor, up: Tensor, d_out: Tensor, unit: str, gate_cap: float, up_cap: float
) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    gate, up, *ctx.unit = inputs
    ctx.save_for_backward(gate, up)


def _differentiate(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    gate, up = ctx.saved_tensors
    d_gate, d_up = torch.ops.openk3.gated_unit_backward(gate, up, d_out, *ctx.unit)
    return d_gate, d_up, None, None, None


_gated_unit.register_autograd(_differentiate, setup_context=_keep)


def gated_unit(gate: Tensor, up: Tensor, unit: str, gate_cap: float = 1.0, up_cap: float = 1.0) -> Tensor:
    """`[..., F]` twice to `[..., F]` in their dtype, with autograd; `unit` is "situ", "swiglu" or "glu"."""
    out: Tensor = torch.ops.openk3.gated_unit(gate, up, unit, gate_cap, up_cap)
    return out


@kernel_operator("openk3::gated_unit_halves")
def _gated_unit_halves(both: Tensor, unit: str, gate_cap: float, up_cap: float) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return _gated_unit(gate, up, unit, gate_cap, up_cap)  # type: ignore[no-any-return]


@_gated_unit_halves.register_fake
def _(both: Tensor, unit: str, gate_cap: float, up_cap: float) -> Tensor:
    return both.new_empty(*both.shape[:-1], both.shape[-1] // 2)


@kernel_operator("openk3::gated_unit_halves_backward")
def _gated_unit_halves_backward(
    both: Tensor, d_out: Tensor, unit: str, gate_cap: float, up_cap: float
) -> Tensor:
    d_both = both.new_empty(both.shape)
    if both.numel():
        (g, u, d), grid, tile = _rows(*both.chunk(2, dim=-1), d_out)
        F = g.shape[1]
        d_rows = d_both.view(-1, 2 * F)
        _backward[grid](
            g, g.stride(0), u, u.stride(0), d, d.stride(0), d_rows, d_rows[:, F:], 2 * F, *g.shape,
            gate_cap, up_cap, UNIT=unit, CAP_4=gate_cap == 4, **tile,
        )  # fmt: skip
    return d_both


@_gated_unit_halves_backward.register_fake
def _(both: Tensor, d_out: Tensor, unit: str, gate_cap: float, up_cap: float) -> Tensor:
    return both.new_empty(both.shape)


def _keep_halves(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    both, *ctx.unit = inputs
    ctx.save_for_backward(both)


def _differentiate_halves(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    (both,) = ctx.saved_tensors
    return torch.ops.openk3.gated_unit_halves_backward(both, d_out, *ctx.unit), None, None, None


_gated_unit_halves.register_autograd(_differentiate_halves, setup_context=_keep_halves)


def gated_unit_halves(both: Tensor, unit: str, gate_cap: float = 1.0, up_cap: float = 1.0) -> Tensor:
    """`gated_unit` of gate and up side by side in one tensor, `[..., 2F]` to `[..., F]`.

    So is their gradient, which the product that made both then reads as it is.
    """
    out: Tensor = torch.ops.openk3.gated_unit_halves(both, unit, gate_cap, up_cap)
    return out
