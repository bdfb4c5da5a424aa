"""The gated units (report §2.3.2, figure 4) and their derivatives, on tiles of fp32 in registers.

A tile's unit runs while little else does, so it must be short. SiTU in bf16 takes the card's tanh, as
`ops.gated_unit_kernels` does and with its bound. Its derivatives are PTX for one element at a time, with
e = exp(-2 |x|), tanh x = +-(1 - e) / (1 + e): of the same in Triton's operations, which go over a whole tile
one after the other, the compiler keeps so many halves that they do not fit into registers. The interpreter
has no PTX and runs the twin in plain Triton; fp16, swiglu and glu are plain Triton everywhere.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

import struct

import triton
import triton.language as tl

from openk3.ops.triton_math import LOG2E, PTX, coarse_tanh, short_sigmoid, sigmoid_pair


def _number(x: float) -> str:
    """An fp32 constant as PTX writes it."""
    return "0f" + struct.pack(">f", x).hex().upper()


def _tanh(n: str, d: str, e: str, x: str, cap: str) -> str:
    """PTX for e = exp(-2 |x / cap|), d = 1 + e and tanh(x / cap) = n / d; `cap` holds 1 / cap.

    1 - e cancels near zero: there the odd series is exact to fp32.
    """
    return f"""
        mul.ftz.f32 a, {x}, {cap};
        abs.ftz.f32 {e}, a;
        mul.ftz.f32 {e}, {e}, {_number(-2 * LOG2E.value)};
        ex2.approx.ftz.f32 {e}, {e};
        add.ftz.f32 {d}, {e}, {_number(1)};
        sub.ftz.f32 t, {_number(1)}, {e};
        copysign.f32 t, a, t;
        mul.ftz.f32 s, a, a;
        fma.rn.ftz.f32 {n}, s, {_number(2 / 15)}, {_number(-1 / 3)};
        fma.rn.ftz.f32 {n}, {n}, s, {_number(1)};
        mul.ftz.f32 a, a, {d};
        mul.ftz.f32 {n}, {n}, a;
        setp.lt.f32 near, s, {_number(1e-3)};
        selp.f32 {n}, {n}, t, near;"""


def _sigmoid_pair(larger: str, smaller: str, x: str) -> str:
    """PTX for sigmoid(|x|) and sigmoid(-|x|), neither as 1 - the other."""
    return f"""
        abs.ftz.f32 {smaller}, {x};
        mul.ftz.f32 {smaller}, {smaller}, {_number(-LOG2E.value)};
        ex2.approx.ftz.f32 {smaller}, {smaller};
        add.ftz.f32 {larger}, {smaller}, {_number(1)};
        rcp.approx.ftz.f32 {larger}, {larger};
        mul.ftz.f32 {smaller}, {smaller}, {larger};"""


_REGISTERS = "{ .reg .f32 a, s, t, n, d, e, m, f, g, o, q; .reg .pred near;"
# $0 <- unit($3 gate, $4 up), $1 and $2 <- its derivatives by gate and up; $5, $6 the inverse caps, $7, $8 the
# caps. tanh' = 4 e / d^2: 1 - tanh^2 would cancel. o and q are sigmoid(+-gate).
SITU_PARTIALS = tl.constexpr(
    f"""{_REGISTERS}
    {_tanh("n", "d", "e", "$3", "$5")}
    {_tanh("m", "f", "g", "$4", "$6")}
    {_sigmoid_pair("t", "s", "$3")}
        setp.lt.f32 near, $3, {_number(0)};
        selp.f32 o, s, t, near;
        selp.f32 q, t, s, near;
        rcp.approx.ftz.f32 d, d;
        rcp.approx.ftz.f32 f, f;
        mul.ftz.f32 n, n, d;
        mul.ftz.f32 n, n, $7;
        mul.ftz.f32 m, m, f;
        mul.ftz.f32 m, m, $8;
        mul.ftz.f32 e, e, d;
        mul.ftz.f32 e, e, d;
        mul.ftz.f32 q, q, n;
        fma.rn.ftz.f32 q, e, {_number(4)}, q;
        mul.ftz.f32 s, m, o;
        mul.ftz.f32 $1, q, s;
        mul.ftz.f32 g, g, f;
        mul.ftz.f32 g, g, f;
        mul.ftz.f32 g, g, {_number(4)};
        mul.ftz.f32 n, n, o;
        mul.ftz.f32 $2, n, g;
        mul.ftz.f32 $0, n, m;
    }}"""
)


def _power(e: str, x: str, factor: str) -> str:
    """PTX for e = 2^(x factor), at most 2^40. A NaN stays one."""
    return f"""
        mul.ftz.f32 {e}, {x}, {factor};
        min.NaN.ftz.f32 {e}, {e}, {_number(40)};
        ex2.approx.ftz.f32 {e}, {e};"""


# The same with the sign left to e = exp(-2 x / cap): of n = 2 / (1 + e), tanh is n - 1 and tanh' is e n^2, so
# that nothing is selected, and both tanh share a reciprocal. Near zero tanh keeps 2^-23 of 1, not of itself:
# for results in bf16. $5, $6 hold -2 log2(e) / cap; n, k are for gate and up, o and s sigmoid(+-gate).
SITU_PARTIALS_SHORT = tl.constexpr(
    f"""{{ .reg .f32 e, g, s, d, f, o, n, k;
    {_power("e", "$3", "$5")}
    {_power("g", "$4", "$6")}
    {_power("s", "$3", _number(-LOG2E.value))}
        fma.rn.ftz.f32 d, e, {_number(0.5)}, {_number(0.5)};
        fma.rn.ftz.f32 f, g, {_number(0.5)}, {_number(0.5)};
        add.ftz.f32 o, s, {_number(1)};
        rcp.approx.ftz.f32 o, o;
        mul.ftz.f32 n, d, f;
        rcp.approx.ftz.f32 n, n;
        mul.ftz.f32 k, n, d;
        mul.ftz.f32 n, n, f;
        mul.ftz.f32 e, e, n;
        mul.ftz.f32 e, e, n;
        mul.ftz.f32 e, e, o;
        mul.ftz.f32 g, g, k;
        mul.ftz.f32 g, g, k;
        mul.ftz.f32 s, s, o;
        neg.ftz.f32 d, $7;
        fma.rn.ftz.f32 n, n, $7, d;
        neg.ftz.f32 f, $8;
        fma.rn.ftz.f32 k, k, $8, f;
        mul.ftz.f32 n, n, o;
        fma.rn.ftz.f32 e, n, s, e;
        mul.ftz.f32 $1, e, k;
        mul.ftz.f32 $2, n, g;
        mul.ftz.f32 $0, n, k;
    }}"""
)


@triton.jit
def _tanh_parts(x):
    """n, d and e of `_tanh`."""
    e = tl.exp(-2.0 * tl.abs(x))
    s = x * x
    series = x * (1.0 - s * (1 / 3 - s * (2 / 15))) * (1.0 + e)
    return tl.where(s < 1e-3, series, tl.where(x < 0.0, e - 1.0, 1.0 - e)), 1.0 + e, e


@triton.jit
def _situ(gate, up, gate_cap, up_cap):
    n_gate, d_gate, _ = _tanh_parts(gate * (1.0 / gate_cap))
    n_up, d_up, _ = _tanh_parts(up * (1.0 / up_cap))
    return (gate_cap * up_cap) * (n_gate * n_up) / (d_gate * d_up * (1.0 + tl.exp(-gate)))


@triton.jit
def _situ_partials(gate, up, gate_cap, up_cap):
    sig, off = tl.sigmoid(gate), tl.sigmoid(-gate)
    n_gate, d_gate, e_gate = _tanh_parts(gate * (1.0 / gate_cap))
    n_up, d_up, e_up = _tanh_parts(up * (1.0 / up_cap))
    act = gate_cap * n_gate / d_gate * sig
    capped_up = up_cap * n_up / d_up
    by_gate = capped_up * (sig * 4.0 * e_gate / (d_gate * d_gate) + act * off)
    return act * capped_up, by_gate, act * 4.0 * e_up / (d_up * d_up)


@triton.jit
def unit(gate, up, gate_cap, up_cap, UNIT: tl.constexpr, COARSE: tl.constexpr):
    """SiTU, silu(gate) up or sigmoid(gate) up. `COARSE` is right where the result is rounded to bf16."""
    if UNIT == "situ" and COARSE and PTX:
        capped = coarse_tanh(gate * (1.0 / gate_cap)) * coarse_tanh(up * (1.0 / up_cap))
        return capped * (short_sigmoid(gate) * (gate_cap * up_cap))
    if UNIT == "situ":
        return _situ(gate, up, gate_cap, up_cap)
    if UNIT == "swiglu":
        return gate * short_sigmoid(gate) * up
    return short_sigmoid(gate) * up


@triton.jit
def unit_partials(gate, up, gate_cap, up_cap, UNIT: tl.constexpr):
    """(unit, its derivative by gate, by up)."""
    if UNIT == "situ" and PTX:
        arguments = [gate, up, 1.0 / gate_cap, 1.0 / up_cap, gate_cap, up_cap]
        return tl.inline_asm_elementwise(
            SITU_PARTIALS, "=&f,=&f,=&f,f,f,f,f,f,f", arguments,
            dtype=(tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    if UNIT == "situ":
        return _situ_partials(gate, up, gate_cap, up_cap)
    sig, off = sigmoid_pair(gate)
    if UNIT == "swiglu":
        return gate * sig * up, up * sig * (1.0 + gate * off), gate * sig
    return sig * up, up * sig * off, sig
