"""Exponential, reciprocal, sigmoid and tanh for Triton kernels, by the card's own instructions.

Triton's interpreter runs no PTX: there the same names compute with what it has.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

import os

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@triton.jit
def short_exp2(x):
    """2^x, zero below 2^-126: one instruction, where tl.exp2 takes four for the numbers below."""
    if PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return tl.exp2(x)


@triton.jit
def short_reciprocal(x):
    """1 / x within 2^-23 of itself."""
    if PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return 1.0 / x


@triton.jit
def short_sigmoid(x):
    """sigmoid(x), zero below 2^-126."""
    return short_reciprocal(1.0 + short_exp2(x * -LOG2E))


@triton.jit
def sigmoid_pair(x):
    """sigmoid(x) and sigmoid(-x), neither as 1 - the other."""
    decay = short_exp2(tl.abs(x) * -LOG2E)
    larger = short_reciprocal(1.0 + decay)
    smaller = decay * larger
    return tl.where(x < 0, smaller, larger), tl.where(x < 0, larger, smaller)


@triton.jit
def coarse_tanh(x):
    """tanh within 2^-11 of itself (PTX ISA, tanh.approx.f32). Not in the interpreter."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
