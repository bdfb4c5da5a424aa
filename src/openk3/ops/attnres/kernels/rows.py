"""Rows of the stream in a kernel: in words of two numbers while they wait, in fp32 while they are worked on.

The compiler gives a half-precision number that lives across a loop a whole register. Words of two numbers
keep a queue of rows as small as it is in memory; fp32 takes the same path in words of 64 bits. A row of d
numbers, d even, takes `D` columns, a power of two; those past d are zero.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_words(x, row, d, D: tl.constexpr):
    """Row `row` of x `[., d]` as D / 2 words."""
    if x.dtype.element_ty == tl.float32:
        words = x.to(tl.pointer_type(tl.int64))
    else:
        words = x.to(tl.pointer_type(tl.int32))
    col = tl.arange(0, D // 2)
    return tl.load(words + row.to(tl.int64) * (d // 2) + col, mask=col < d // 2, other=0)


@triton.jit
def no_words(dtype: tl.constexpr, D: tl.constexpr):
    if dtype == tl.float32:
        words = tl.zeros([D // 2], tl.int64)
    else:
        words = tl.zeros([D // 2], tl.int32)
    return words


@triton.jit
def unpack(words, dtype: tl.constexpr):
    """Words of two numbers of `dtype` as fp32, twice as many."""
    if dtype == tl.float32:
        even = words.to(tl.int32).to(tl.float32, bitcast=True)
        odd = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    elif dtype == tl.bfloat16:
        even = (words << 16).to(tl.float32, bitcast=True)
        odd = (words & -65536).to(tl.float32, bitcast=True)
    else:
        even = words.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        odd = (words >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return tl.reshape(tl.join(even, odd), [2 * words.shape[0]])


@triton.jit
def load_row(x, row, d, D: tl.constexpr):
    """Row `row` of x `[., d]` in fp32."""
    col = tl.arange(0, D)
    return tl.load(x + row.to(tl.int64) * d + col, mask=col < d, other=0.0).to(tl.float32)


@triton.jit
def store_row(x, row, value, d, D: tl.constexpr):
    """Rounded to x's dtype."""
    col = tl.arange(0, D)
    tl.store(x + row.to(tl.int64) * d + col, value.to(x.dtype.element_ty), mask=col < d)


@triton.jit
def queued(rows, n: tl.constexpr, token, step, T, d, D: tl.constexpr):
    """Row n, counted from the first of `token` on through this program's tokens; past T, a row unused."""
    R: tl.constexpr = len(rows)
    return load_words(rows[n % R], tl.minimum(token + step * (n // R), T - 1), d, D)


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d
