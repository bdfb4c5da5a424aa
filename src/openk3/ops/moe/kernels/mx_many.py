"""The grouped products for many rows an expert, as in prefill: MXFP4 weights against bf16 rows.

As `products`, weights are the left operand and an expert's rows, in tiles of some and a tail, the right one,
but the left operand is made in registers, while the products of the one before run. A program takes two
blocks of 128 features, so that the rows, which every program of a tile reads again, fit through the cache.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from openk3.ops.moe.kernels.mx_values import mx_values
from openk3.ops.moe.kernels.products import Tiles
from openk3.ops.moe.kernels.units import unit
from openk3.ops.moe.mx import INPUTS

Tensor = torch.Tensor


@triton.jit
def _at(n, UNIT: tl.constexpr, SIDE: tl.constexpr, steps, pairs):
    """Where features `n` lie in the first step, in rows of tiles; beyond the last pair the last again."""
    if UNIT != "":
        return (tl.minimum(n // 64, pairs - 1) * (2 * steps) + SIDE) * 64 + n % 64
    else:  # noqa: RET505 - the compiler follows both ways otherwise
        return (tl.minimum(n // 128, pairs - 1) * (2 * steps) + n // 64 % 2) * 64 + n % 64


@triton.jit
def _products(
    x, x_tail, words, scales, at_a, at_b, row, K, ROWS: tl.constexpr, TAIL: tl.constexpr,
    FEATURES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    w = tl.arange(0, 16)
    words_a, words_b = words + at_a[:, None] * 16 + w[None, :], words + at_b[:, None] * 16 + w[None, :]
    scales_a, scales_b = scales + at_a, scales + at_b
    a = tl.zeros([FEATURES, ROWS], tl.float32)
    b = tl.zeros([FEATURES, ROWS], tl.float32)
    if TAIL:
        a_tail = tl.zeros([FEATURES, TAIL], tl.float32)
        b_tail = tl.zeros([FEATURES, TAIL], tl.float32)
    for d in range(0, K, 128):
        right = x.load([row, d]).T
        if TAIL:
            tail = x_tail.load([row + ROWS, d]).T
        left = mx_values(tl.load(words_a), tl.load(scales_a), FEATURES, DTYPE)
        a = tl.dot(left, right, a, input_precision="ieee")
        if TAIL:
            a_tail = tl.dot(left, tail, a_tail, input_precision="ieee")
        left = mx_values(tl.load(words_b), tl.load(scales_b), FEATURES, DTYPE)
        b = tl.dot(left, right, b, input_precision="ieee")
        if TAIL:
            b_tail = tl.dot(left, tail, b_tail, input_precision="ieee")
        words_a += 2 * 64 * 16
        words_b += 2 * 64 * 16
        scales_a += 2 * 64
        scales_b += 2 * 64
    if TAIL:
        return a, b, a_tail, b_tail
    else:  # noqa: RET505 - the compiler follows both ways otherwise
        return a, b, a, b


@triton.jit
def _store(out, value, row, count, first, N, ROWS: tl.constexpr, FEATURES: tl.constexpr):
    r = row + tl.arange(0, ROWS)
    f = first + tl.arange(0, FEATURES)
    place = out + r[:, None] * N + f[None, :]
    tl.store(place, value.to(out.dtype.element_ty).T, mask=(r < count)[:, None] & (f < N)[None, :])


@triton.jit
def _finish(
    out, a, b, row, count, slab, N, gate_cap, up_cap,
    UNIT: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    if UNIT == "":
        _store(out, a, row, count, slab * 2 * FEATURES, N, ROWS, FEATURES)
        _store(out, b, row, count, slab * 2 * FEATURES + FEATURES, N, ROWS, FEATURES)
    else:
        value = unit(a, b, gate_cap, up_cap, UNIT, out.dtype.element_ty == tl.bfloat16)
        _store(out, value, row, count, slab * FEATURES, N, ROWS, FEATURES)


@triton.jit(do_not_specialize=["most"])
def _many(
    x, x_tail, words, scales, out, tiles, most, N, K, gate_cap, up_cap,
    UNIT: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = FEATURES if UNIT != "" else 2 * FEATURES  # output columns of a program
    DTYPE: tl.constexpr = out.dtype.element_ty
    slabs = tl.cdiv(N, WIDTH)
    tile = tl.program_id(0) // slabs
    slab = tl.program_id(0) % slabs
    if tile >= tl.load(tiles + 3 * most):
        return
    e = tl.load(tiles + tile).to(tl.int64)
    row = tl.load(tiles + most + tile)
    count = tl.load(tiles + 2 * most + tile)
    steps = tl.cdiv(K, 128)
    pairs = tl.cdiv(N, 64 if UNIT != "" else 128)
    words += e * pairs * steps * (2 * 64 * 16)
    scales += e * pairs * steps * (2 * 64)
    n = slab * WIDTH + tl.arange(0, FEATURES)
    at_a = _at(n, UNIT, 0, steps, pairs)
    at_b = _at(n + (WIDTH - FEATURES), UNIT, 1, steps, pairs)
    out += row.to(tl.int64) * N
    if TAIL == 0:
        a, b, _, _ = _products(x, x, words, scales, at_a, at_b, row, K, ROWS, 0, FEATURES, DTYPE)
        _finish(out, a, b, 0, count, slab, N, gate_cap, up_cap, UNIT, ROWS, FEATURES)
    elif count > ROWS:
        a, b, c, d = _products(x, x_tail, words, scales, at_a, at_b, row, K, ROWS, TAIL, FEATURES, DTYPE)
        _finish(out, a, b, 0, count, slab, N, gate_cap, up_cap, UNIT, ROWS, FEATURES)
        _finish(out, c, d, ROWS, count, slab, N, gate_cap, up_cap, UNIT, TAIL, FEATURES)
    elif count > TAIL:
        a_rows, b_rows, _0, _1 = _products(x, x, words, scales, at_a, at_b, row, K, ROWS, 0, FEATURES, DTYPE)
        _finish(out, a_rows, b_rows, 0, count, slab, N, gate_cap, up_cap, UNIT, ROWS, FEATURES)
    else:
        a_tail, b_tail, _2, _3 = _products(
            x_tail, x_tail, words, scales, at_a, at_b, row, K, TAIL, 0, FEATURES, DTYPE
        )
        _finish(out, a_tail, b_tail, 0, count, slab, N, gate_cap, up_cap, UNIT, TAIL, FEATURES)


# One program an SM; a tile and its tail hold the rows of nearly every expert of 8,192 tokens, 146 on average.
TILES = Tiles(rows=128, tail=32, features=128, depth=INPUTS, warps=8, stages=3)


def many_product(
    x: Tensor, words: Tensor, scales: Tensor, N: int, tiles: Tensor, size: Tiles,
    unit: str = "", gate_cap: float = 0.0, up_cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Each row of `x [R, K]` by its expert's weights, as `openk3.ops.moe.mx` stores them -> `[R, N]`.

    With a unit's name the weights are gate and up and N is F. `tiles` are of `size.height` rows.
    """
    (R, K), most = x.shape, (len(tiles) - 1) // 3
    out = x.new_empty(R, N)
    if R == 0:
        return out
    slabs = triton.cdiv(N, size.features if unit else 2 * size.features)
    _many[(most * slabs,)](
        TensorDescriptor.from_tensor(x, [size.rows, INPUTS]),
        TensorDescriptor.from_tensor(x, [size.tail or size.rows, INPUTS]),
        words, scales, out, tiles, most, N, K, gate_cap, up_cap,
        UNIT=unit, ROWS=size.rows, TAIL=size.tail, FEATURES=size.features,
        num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip
    return out
