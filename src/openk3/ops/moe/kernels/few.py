"""The grouped products for a few rows an expert, as in decoding: a stream of weights, MXFP4 or plain.

A program takes one tile of an expert's rows, 16 or 32, through two blocks of 64 features: gate and up, or
neighbours of the down projection. It reads those weights once, from memory that nobody else reads, and the
rows from the cache, where they lie in the input: nothing is gathered before. Features are the left operand
of the matrix unit, so few rows cost little. `tiles` lists the experts that have rows; others cost nothing.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from openk3.ops.moe.kernels.mx_values import mx_values
from openk3.ops.moe.kernels.plan import most_tiles
from openk3.ops.moe.kernels.units import unit
from openk3.ops.moe.mx import FEATURES, INPUTS
from openk3.ops.triton_math import PTX

Tensor = torch.Tensor


@triton.jit(do_not_specialize=["most"])
def _tiles(offsets, tiles, most, E, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    e = tl.arange(0, EXPERTS)
    first = tl.load(offsets + e, mask=e < E, other=0)
    rows = tl.load(offsets + e + 1, mask=e < E, other=0) - first
    own = (rows + ROWS - 1) // ROWS
    last = tl.cumsum(own, 0)
    tl.store(tiles + 3 * most, tl.sum(own, 0))
    for i in range(tl.max(own, 0)):
        place = tiles + last - own + i
        tl.store(place, e, mask=i < own)
        tl.store(place + most, first + i * ROWS, mask=i < own)
        tl.store(place + 2 * most, tl.minimum(rows - i * ROWS, ROWS), mask=i < own)


def list_tiles(offsets: Tensor, rows: int, height: int) -> Tensor:
    """int32 `[3 n + 1]`, n = `most_tiles`: expert, first row, rows of each tile; last, how many there are."""
    E = len(offsets) - 1
    most = most_tiles(rows, E, height)
    tiles = torch.empty(3 * most + 1, dtype=torch.int32, device=offsets.device)
    EXPERTS = max(32, triton.next_power_of_2(E))
    _tiles[(1,)](offsets, tiles, most, E, ROWS=height, EXPERTS=EXPERTS, num_warps=4)
    return tiles


@triton.jit
def _plus(total, product):
    """Their sum, of a product that is whole: added up inside of it, each of its parts waits for the last."""
    if PTX:
        asm: tl.constexpr = "add.f32 $0, $1, $2;"
        return tl.inline_asm_elementwise(asm, "=f,f,f", [total, product], tl.float32, True, 1)
    return total + product


@triton.jit
def _plain(w, feature, inputs, N, K, EVEN: tl.constexpr):
    """A block of weights `[FEATURES, DEPTH]` from `w`, its expert's first."""
    place = w + feature.to(tl.int64)[:, None] * K + inputs[None, :]
    if EVEN:
        return tl.load(place)
    return tl.load(place, mask=(feature < N)[:, None] & (inputs < K)[None, :], other=0.0)


@triton.jit(do_not_specialize=["most"])
def _few(
    x, tokens, wa, wb, scales, out, tiles, most, N, K, gate_cap, up_cap,
    UNIT: tl.constexpr, MX: tl.constexpr, GATHER: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = FEATURES if UNIT != "" else 2 * FEATURES  # output columns of a program
    DTYPE: tl.constexpr = x.dtype.element_ty
    slabs = tl.cdiv(N, WIDTH)
    tile = tl.program_id(0) // slabs
    slab = tl.program_id(0) % slabs
    if tile >= tl.load(tiles + 3 * most):
        return
    e = tl.load(tiles + tile).to(tl.int64)
    row = tl.load(tiles + most + tile).to(tl.int64)
    count = tl.load(tiles + 2 * most + tile)
    r = tl.arange(0, ROWS)
    source = row + tl.where(r < count, r, 0)
    if GATHER:
        source = tl.load(tokens + source)
    f = tl.arange(0, FEATURES)
    c = tl.arange(0, DEPTH)
    source_at = x + source[:, None] * K + c[None, :]
    steps = tl.cdiv(K, DEPTH)
    a = tl.zeros([FEATURES, ROWS], tl.float32)
    b = tl.zeros([FEATURES, ROWS], tl.float32)
    if MX:
        PAIR: tl.constexpr = 2 * FEATURES * (DEPTH // 8)  # words of a step
        before = (e * slabs + slab) * steps
        words_at = wa + before * PAIR + f[:, None] * (DEPTH // 8) + tl.arange(0, DEPTH // 8)[None, :]
        scales_at = scales + before * (2 * FEATURES) + f
    else:
        wa += e * N * K
        wb += e * N * K
        f_a = slab * WIDTH + f
        f_b = f_a if UNIT != "" else f_a + FEATURES
    for first in range(0, steps, TURN):
        for i in tl.static_range(TURN):
            step = first + i
            if EVEN:
                rows = tl.load(source_at + i * DEPTH).T
            else:
                rows = tl.load(source_at + i * DEPTH, mask=(step * DEPTH + c < K)[None, :], other=0.0).T
            if MX:
                at = words_at + i * PAIR
                left = mx_values(tl.load(at), tl.load(scales_at + i * 2 * FEATURES), FEATURES, DTYPE)
                a = _plus(a, tl.dot(left, rows, input_precision="ieee"))
                scale_b = tl.load(scales_at + (i * 2 + 1) * FEATURES)
                left = mx_values(tl.load(at + PAIR // 2), scale_b, FEATURES, DTYPE)
                b = _plus(b, tl.dot(left, rows, input_precision="ieee"))
            else:
                left = _plain(wa, f_a, step * DEPTH + c, N, K, EVEN)
                left_b = _plain(wb, f_b, step * DEPTH + c, N, K, EVEN)
                a = tl.dot(left, rows, a, input_precision="ieee")
                b = tl.dot(left_b, rows, b, input_precision="ieee")
        source_at += TURN * DEPTH
        if MX:
            words_at += TURN * PAIR
            scales_at += TURN * 2 * FEATURES
    if UNIT != "":
        a = unit(a, b, gate_cap, up_cap, UNIT, DTYPE == tl.bfloat16)
    place = out + (row + r)[None, :] * N + (slab * WIDTH + f)[:, None]
    inside = (r < count)[None, :] & (slab * WIDTH + f < N)[:, None]
    tl.store(place, a.to(DTYPE), mask=inside)
    if UNIT == "":
        inside = (r < count)[None, :] & (slab * WIDTH + FEATURES + f < N)[:, None]
        tl.store(place + FEATURES, b.to(DTYPE), mask=inside)


@dataclass(frozen=True)
class Few:
    """Rows of a tile; features of a block and depth of a step, which MXFP4 tiles fix at 64 and 128; steps of
    a turn of the loop, where it divides them."""

    rows: int
    features: int
    depth: int
    warps: int
    stages: int
    turn: int = 1


MX = {rows: Few(rows, FEATURES, INPUTS, warps=4, stages=4) for rows in (16, 32)}
PLAIN = {rows: Few(rows, features=64, depth=64, warps=4, stages=4) for rows in (16, 32)}


def height(rows: int, experts: int) -> int:
    """Of a tile, by the mean number of rows of an expert: 16 hold them all up to there, nearly always."""
    return 16 if rows <= 6 * experts else 32


def few_product(
    x: Tensor, tokens: Tensor | None, wa: Tensor, wb: Tensor, scales: Tensor | None, N: int, rows: int,
    tiles: Tensor, size: Few, unit: str = "", gate_cap: float = 0.0, up_cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Each row by its expert's weights -> `[rows, N]`; with a unit's name wa, wb are gate and up.

    Rows are those of `x`, through `tokens` if given. Weights: `[E, N, K]` each, one of them twice without a
    unit; with `scales` the words of `openk3.ops.moe.mx`, in both places. `tiles` are of `size.rows` rows.
    """
    K, most = x.shape[1], (len(tiles) - 1) // 3
    out = x.new_empty(rows, N)
    if rows == 0:
        return out
    even = K % size.depth == 0 and (scales is not None or N % (size.features * (1 if unit else 2)) == 0)
    slabs = triton.cdiv(N, size.features if unit else 2 * size.features)
    turn = 1 if triton.cdiv(K, size.depth) % size.turn else size.turn
    _few[(most * slabs,)](
        x, tokens, wa, wb, scales, out, tiles, most, N, K, gate_cap, up_cap,
        UNIT=unit, MX=scales is not None, GATHER=tokens is not None, EVEN=even,
        ROWS=size.rows, FEATURES=size.features, DEPTH=size.depth, TURN=turn,
        num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip
    return out
