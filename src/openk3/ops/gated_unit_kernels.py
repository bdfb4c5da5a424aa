"""Gated units act(gate) * up on the GPU: SiTU-GLU, SwiGLU and GLU, one pass forward and one backward.

The forward moves 6 bytes an element in bf16, the backward 10, and either is meant to take no longer than that:
what counts is special functions (16 a clock and SM, of which memory leaves time for about five forward) and
instructions. So SiTU-GLU is made of two exponentials and one reciprocal:

    A = e^(-2|g|/cap_g),  E = e^-|g|,  C = e^(-2|u|/cap_u)
    |y| = cap_g cap_u (1 - A)(1 - C) [E if g < 0] / ((1 + A)(1 + E)(1 + C))

where E = A^2 at the released cap of 4, and 1/x is rsqrt(x)^2, x being between 1 and 8. It is within 1e-6 of
the equation in relative terms at every element; where 1 - A would cancel, a series takes over.

gate and up are two tensors, as the feed-forward networks and the experts hold them, or the halves of one: rows
may lie apart, and are not copied for that. The backward keeps those two and nothing else.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _reciprocal(x):
    """1 / x of a positive x that is far from the ends of fp32: one special function, no range to look at."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def _one_minus(decay, z):
    """1 - e^-z given decay = e^-z, z >= 0."""
    series = z * (1.0 - z * (1 / 2 - z * (1 / 6 - z * (1 / 24 - z * (1 / 120)))))
    return tl.where(z < 0.125, series, 1.0 - decay)


@triton.jit
def _with_sign_of(x, magnitude):
    """`magnitude` >= 0 with the sign bit of x."""
    bits = magnitude.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -2147483648)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _sigmoid_parts(g):
    """e^-|g| and the numerators of sigmoid(g) and sigmoid(-g) over 1 + e^-|g|."""
    decay = tl.exp2(tl.abs(g) * -LOG2E)
    return decay, tl.where(g < 0, decay, 1.0), tl.where(g < 0, 1.0, decay)


@triton.jit
def _situ_parts(g, u, gate_cap, up_cap, CAP_4: tl.constexpr):
    z, w = tl.abs(g) * (2.0 / gate_cap), tl.abs(u) * (2.0 / up_cap)
    A, C = tl.exp2(z * -LOG2E), tl.exp2(w * -LOG2E)
    E = A * A if CAP_4 else tl.exp2(tl.abs(g) * -LOG2E)
    return A, C, E, _one_minus(A, z), _one_minus(C, w)


@triton.jit
def _value(g, u, gate_cap, up_cap, UNIT: tl.constexpr, CAP_4: tl.constexpr):
    if UNIT == "situ":
        A, C, E, less_A, less_C = _situ_parts(g, u, gate_cap, up_cap, CAP_4)
        ratio = less_A * less_C * tl.where(g < 0, E, 1.0) * _reciprocal((1.0 + A) * (1.0 + C) * (1.0 + E))
        # Rounding must not exceed the bound; a NaN stays one.
        ratio = tl.minimum(ratio, 1.0, propagate_nan=tl.PropagateNan.ALL)
        sign = (g.to(tl.int32, bitcast=True) ^ u.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        y = _with_sign_of(sign, ratio * (gate_cap * up_cap))
    else:
        decay, numerator, _ = _sigmoid_parts(g)
        y = numerator * _reciprocal(1.0 + decay) * u
        if UNIT == "swiglu":
            y *= g
    return y


@triton.jit
def _gradients(g, u, d, gate_cap, up_cap, UNIT: tl.constexpr, CAP_4: tl.constexpr):
    """d y/d gate and d y/d up, times d. No term is a difference that could cancel, but sums of SwiGLU's."""
    if UNIT == "situ":
        A, C, E, less_A, less_C = _situ_parts(g, u, gate_cap, up_cap, CAP_4)
        over_A, over_C, over_E = _reciprocal(1.0 + A), _reciprocal(1.0 + C), _reciprocal(1.0 + E)
        capped_gate = gate_cap * _with_sign_of(g, less_A * over_A)
        capped_up = up_cap * _with_sign_of(u, less_C * over_C)
        d_sig = d * (tl.where(g < 0, E, 1.0) * over_E)  # sig(g)
        # d/dg [cap tanh(g/cap) sig(g)] = sig(g) (tanh'(g/cap) + cap tanh(g/cap) sig(-g))
        slope = 4.0 * A * (over_A * over_A) + capped_gate * (tl.where(g < 0, 1.0, E) * over_E)
        return d_sig * capped_up * slope, d_sig * capped_gate * (4.0 * C * (over_C * over_C))
    else:
        decay, of_g, of_minus_g = _sigmoid_parts(g)
        over = _reciprocal(1.0 + decay)
        sig, complement = of_g * over, of_minus_g * over
        if UNIT == "swiglu":
            return d * u * sig * (1.0 + g * complement), d * sig * g
        else:
            return d * u * sig * complement, d * sig


@triton.jit
def _places(T, F, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows `[ROWS, 1]` in 64 bits, columns `[1, COLS]`, and which of them there are."""
    slices = tl.cdiv(F, COLS)
    row = (tl.program_id(0) // slices).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (tl.program_id(0) % slices).to(tl.int64) * COLS + tl.arange(0, COLS)[None, :]
    return row, col, (row < T) & (col < F)


@triton.jit(do_not_specialize=["T"])
def _forward(
    gate, gate_row: tl.int64, up, up_row: tl.int64, out, T, F, gate_cap, up_cap,
    UNIT: tl.constexpr, CAP_4: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, col, inside = _places(T, F, ROWS, COLS)
    g = tl.load(gate + row * gate_row + col, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + col, mask=inside, other=0.0).to(tl.float32)
    y = _value(g, u, gate_cap, up_cap, UNIT, CAP_4)
    tl.store(out + row * F + col, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _backward(
    gate, gate_row: tl.int64, up, up_row: tl.int64, d_out, d_out_row: tl.int64, d_gate, d_up, T, F, gate_cap, up_cap,
    UNIT: tl.constexpr, CAP_4: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, col, inside = _places(T, F, ROWS, COLS)
    g = tl.load(gate + row * gate_row + col, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + col, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(d_out + row * d_out_row + col, mask=inside, other=0.0).to(tl.float32)
    by_gate, by_up = _gradients(g, u, d, gate_cap, up_cap, UNIT, CAP_4)
    tl.store(d_gate + row * F + col, by_gate.to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_up + row * F + col, by_up.to(d_up.dtype.element_ty), mask=inside)


# A program's tile: 8 warps x 32 lanes x 8 values, 16 bytes of bf16. Rows side by side are one long row.
ONE_ROW = {"ROWS": 1, "COLS": 2048, "num_warps": 8}
APART = {"ROWS": 8, "COLS": 256, "num_warps": 8}


def _rows(*tensors: Tensor) -> tuple[list[Tensor], dict[str, int]]:
    """Each as `[T, F]` with adjacent columns, and the tile for them."""
    if all(x.is_contiguous() for x in tensors):
        return [x.view(1, -1) for x in tensors], ONE_ROW
    rows = [x.reshape(-1, x.shape[-1]) for x in tensors]
    return [x if x.stride(1) == 1 else x.contiguous() for x in rows], APART


def _programs(x: Tensor, tile: dict[str, int]) -> tuple[int]:
    return (triton.cdiv(x.shape[0], tile["ROWS"]) * triton.cdiv(x.shape[1], tile["COLS"]),)


@torch.library.custom_op("openk3::gated_unit", mutates_args=())
def _gated_unit(gate: Tensor, up: Tensor, unit: str, gate_cap: float, up_cap: float) -> Tensor:
    out = gate.new_empty(gate.shape)
    if gate.numel():
        (g, u), tile = _rows(gate, up)
        _forward[_programs(g, tile)](
            g, g.stride(0), u, u.stride(0), out, *g.shape, gate_cap, up_cap,
            UNIT=unit, CAP_4=gate_cap == 4, **tile,
        )  # fmt: skip
    return out


@_gated_unit.register_fake
def _(gate: Tensor, up: Tensor, unit: str, gate_cap: float, up_cap: float) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("openk3::gated_unit_backward", mutates_args=())
def _gated_unit_backward(
    gate: Tensor, up: Tensor, d_out: Tensor, unit: str, gate_cap: float, up_cap: float
) -> tuple[Tensor, Tensor]:
    d_gate, d_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    if gate.numel():
        (g, u, d), tile = _rows(gate, up, d_out)
        _backward[_programs(g, tile)](
            g, g.stride(0), u, u.stride(0), d, d.stride(0), d_gate, d_up, *g.shape, gate_cap, up_cap,
            UNIT=unit, CAP_4=gate_cap == 4, **tile,
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
