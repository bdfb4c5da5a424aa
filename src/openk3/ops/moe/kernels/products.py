"""The grouped products of the forward: tiles of one expert's rows against slabs of its features.

Weights are the left operand and rows the right one: features fill the 64-row instructions exactly, and an
expert's rows, 146 on average where 8,192 tokens visit 16 of 896 experts, by tiles of 128, 160 or 192 columns,
where a left operand would be padded to 192 or 256. All slabs of a tile follow each other, so an expert's
weights are read from memory once and the rows stay in the cache.

A program holds two products of one tile: gate and up of the same features, which meet in registers, or two
neighbouring slabs of the down projection.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from openk3.ops.moe.kernels.plan import most_tiles, tile_at
from openk3.ops.moe.kernels.units import unit

Tensor = torch.Tensor


@triton.jit
def _two(x, wa, wb, row, a_row, b_row, K, ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr):
    """wa rows^T and wb rows^T, `[FEATURES, ROWS]` each."""
    a = tl.zeros([FEATURES, ROWS], tl.float32)
    b = tl.zeros([FEATURES, ROWS], tl.float32)
    for d in range(0, K, DEPTH):
        right = x.load([row, d]).T
        a = tl.dot(wa.load([a_row, d]), right, a, input_precision="ieee")
        b = tl.dot(wb.load([b_row, d]), right, b, input_precision="ieee")
    return a, b


@triton.jit
def _four(
    x, x_tail, wa, wb, row, a_row, b_row, K,
    ROWS: tl.constexpr, TAIL: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same for ROWS rows and the TAIL after them."""
    a = tl.zeros([FEATURES, ROWS], tl.float32)
    b = tl.zeros([FEATURES, ROWS], tl.float32)
    a_tail = tl.zeros([FEATURES, TAIL], tl.float32)
    b_tail = tl.zeros([FEATURES, TAIL], tl.float32)
    for d in tl.range(0, K, DEPTH, num_stages=STAGES):
        right = x.load([row, d]).T
        tail = x_tail.load([row + ROWS, d]).T
        left = wa.load([a_row, d])
        a = tl.dot(left, right, a, input_precision="ieee")
        a_tail = tl.dot(left, tail, a_tail, input_precision="ieee")
        left = wb.load([b_row, d])
        b = tl.dot(left, right, b, input_precision="ieee")
        b_tail = tl.dot(left, tail, b_tail, input_precision="ieee")
    return a, b, a_tail, b_tail


@triton.jit
def _store(out, value, row, count, first, N, ROWS: tl.constexpr, FEATURES: tl.constexpr):
    """`value` `[FEATURES, ROWS]` into rows of `out`, features side by side."""
    r = tl.arange(0, ROWS)
    f = first + tl.arange(0, FEATURES)
    place = out + (row.to(tl.int64) + r)[:, None] * N + f[None, :]
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


@triton.jit
def _finish_four(
    out, a, b, a_tail, b_tail, row, count, slab, N, gate_cap, up_cap,
    UNIT: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    _finish(out, a, b, row, ROWS, slab, N, gate_cap, up_cap, UNIT, ROWS, FEATURES)
    _finish(out, a_tail, b_tail, row + ROWS, count - ROWS, slab, N, gate_cap, up_cap, UNIT, TAIL, FEATURES)


@triton.jit
def _product(
    x, x_tail, x_half, wa, wb, out, offsets, starts, E, N, K, gate_cap, up_cap,
    UNIT: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = FEATURES if UNIT != "" else 2 * FEATURES  # output columns of a program
    HALF: tl.constexpr = TAIL // 2
    slabs = tl.cdiv(N, WIDTH)
    tile = tl.program_id(0) // slabs
    slab = tl.program_id(0) % slabs
    if tile >= tl.load(starts + E):
        return
    e, row, count = tile_at(tile, starts, offsets, E, ROWS + TAIL)
    a_row = e * N + slab * WIDTH
    b_row = a_row if UNIT != "" else a_row + FEATURES
    if TAIL == 0:
        a, b = _two(x, wa, wb, row, a_row, b_row, K, ROWS, FEATURES, DEPTH)
        _finish(out, a, b, row, count, slab, N, gate_cap, up_cap, UNIT, ROWS, FEATURES)
    elif count > ROWS + HALF:
        a, b, a_tail, b_tail = _four(
            x, x_tail, wa, wb, row, a_row, b_row, K, ROWS, TAIL, FEATURES, DEPTH, STAGES - 1
        )
        _finish_four(
            out, a, b, a_tail, b_tail, row, count, slab, N, gate_cap, up_cap, UNIT, ROWS, TAIL, FEATURES
        )
    elif count > ROWS:
        a, b, a_tail, b_tail = _four(
            x, x_half, wa, wb, row, a_row, b_row, K, ROWS, HALF, FEATURES, DEPTH, STAGES
        )
        _finish_four(
            out, a, b, a_tail, b_tail, row, count, slab, N, gate_cap, up_cap, UNIT, ROWS, HALF, FEATURES
        )
    else:
        a, b = _two(x, wa, wb, row, a_row, b_row, K, ROWS, FEATURES, DEPTH)
        _finish(out, a, b, row, count, slab, N, gate_cap, up_cap, UNIT, ROWS, FEATURES)


@dataclass(frozen=True)
class Tiles:
    """Block sizes of a grouped product: rows of an expert and their tail, features, depth of a step.

    Half a tail is taken where that is enough. A whole one costs a stage.
    """

    rows: int
    tail: int
    features: int
    depth: int
    warps: int
    stages: int

    @property
    def height(self) -> int:
        return self.rows + self.tail


# Few rows an expert: what passes from the L2 cache counts, so one tile holds all rows. Many: two programs an
# SM hide the ends of their short loops behind each other.
FEW = Tiles(rows=128, tail=64, features=128, depth=64, warps=8, stages=4)
MANY = Tiles(rows=128, tail=0, features=64, depth=64, warps=4, stages=3)


def tiles_for(rows: int, experts: int) -> Tiles:
    """By the mean number of rows, which is known without looking at the counts."""
    return FEW if rows <= 256 * experts else MANY


def product(
    x: Tensor, wa: Tensor, wb: Tensor, offsets: Tensor, starts: Tensor, tiles: Tiles,
    unit: str = "", gate_cap: float = 0.0, up_cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Each row of `x [R, K]` by its expert's weight, `[E, N, K]` -> `[R, N]`.

    With a unit's name wa and wb are gate and up and the result is unit(gate, up); without, both are one
    weight. `starts` are those of tiles of `tiles.height` rows.
    """
    (R, K), (E, N, _) = x.shape, wa.shape
    out = x.new_empty(R, N)
    if R == 0:
        return out
    tail, half = (
        TensorDescriptor.from_tensor(x, [rows or tiles.rows, tiles.depth])
        for rows in (tiles.tail, tiles.tail // 2)
    )
    block = [tiles.features, tiles.depth]
    slabs = triton.cdiv(N, tiles.features if unit else 2 * tiles.features)
    _product[(most_tiles(R, E, tiles.height) * slabs,)](
        TensorDescriptor.from_tensor(x, [tiles.rows, tiles.depth]), tail, half,
        TensorDescriptor.from_tensor(wa.view(E * N, K), block),
        TensorDescriptor.from_tensor(wb.view(E * N, K), block),
        out, offsets, starts, E, N, K, gate_cap, up_cap,
        UNIT=unit, ROWS=tiles.rows, TAIL=tiles.tail, FEATURES=tiles.features, DEPTH=tiles.depth,
        STAGES=tiles.stages, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
