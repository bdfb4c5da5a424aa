"""Gradients of a wide model's experts with many rows each: one program an SM, tiles that fill its registers.

    hidden_gradients   128 rows by 128 features: first dA' = w2^T G, then gate and up made again
    row_gradients      128 rows by 256 columns: first w1^T d gate, then w3^T d up on top of it

What bounds these products is what passes from the L2 cache to the processors. A step of 64 inputs reads 48 KB
for 87 operations a byte (80 KB and 79 in the hidden gradients), where the tiles of `products` and `gradients`
make 64 (39). One product after the other instead of side by side: each has a loop of its own that brings its
operands four steps ahead, and one sum takes both terms of a row's gradient.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from openk3.ops.moe.kernels.gradients import leave_hidden
from openk3.ops.moe.kernels.plan import most_tiles, tile_at, tile_starts
from openk3.ops.moe.kernels.products import Tiles

Tensor = torch.Tensor


@triton.jit
def _halves(x, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The left and the right columns; every thread has as many of both."""
    return tl.split(tl.permute(tl.reshape(x, [HEIGHT, 2, WIDTH // 2]), [0, 2, 1]))


@triton.jit
def _leave_parts(
    gate, up, by_hidden, weights, order, hidden, d_gate, d_up, d_p, row, count, first, slab, R, F,
    gate_cap, up_cap, UNIT: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """`leave_hidden` for one part of the rows after the other: of all at once, the units would not fit into
    the registers beside the products."""
    if PARTS == 1:
        leave_hidden(
            gate, up, by_hidden, weights, order, hidden, d_gate, d_up, d_p, row, count, first, slab, R, F,
            gate_cap, up_cap, UNIT, ROWS, FEATURES,
        )  # fmt: skip
    else:
        HALF: tl.constexpr = ROWS // 2
        FEWER: tl.constexpr = PARTS // 2
        gate_a, gate_b = _halves(gate, FEATURES, ROWS)
        up_a, up_b = _halves(up, FEATURES, ROWS)
        by_hidden_a, by_hidden_b = _halves(by_hidden, FEATURES, ROWS)
        _leave_parts(
            gate_a, up_a, by_hidden_a, weights, order, hidden, d_gate, d_up, d_p, row, count, first, slab,
            R, F, gate_cap, up_cap, UNIT, HALF, FEATURES, FEWER,
        )  # fmt: skip
        _leave_parts(
            gate_b, up_b, by_hidden_b, weights, order, hidden, d_gate, d_up, d_p, row + HALF, count - HALF,
            first, slab, R, F, gate_cap, up_cap, UNIT, HALF, FEATURES, FEWER,
        )  # fmt: skip


@triton.jit(do_not_specialize=["R"])
def _hidden(
    x, d_out, w1, w3, w2, weights, order, hidden, d_gate, d_up, d_p, offsets, starts, R, E, F, K,
    gate_cap, up_cap,
    UNIT: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    slabs = tl.cdiv(F, FEATURES)
    tile = tl.program_id(0) // slabs
    slab = tl.program_id(0) % slabs
    if tile >= tl.load(starts + E):
        return
    e, row, count = tile_at(tile, starts, offsets, E, ROWS)
    first = slab * FEATURES
    by_hidden = tl.zeros([FEATURES, ROWS], tl.float32)
    for d in range(0, K, DEPTH):
        left = w2.load([e * K + d, first]).T
        by_hidden = tl.dot(left, d_out.load([row, d]).T, by_hidden, input_precision="ieee")
    gate = tl.zeros([FEATURES, ROWS], tl.float32)
    up = tl.zeros([FEATURES, ROWS], tl.float32)
    for d in range(0, K, DEPTH):
        right = x.load([row, d]).T
        gate = tl.dot(w1.load([e * F + first, d]), right, gate, input_precision="ieee")
        up = tl.dot(w3.load([e * F + first, d]), right, up, input_precision="ieee")
    _leave_parts(
        gate, up, by_hidden, weights, order, hidden, d_gate, d_up, d_p, row, count, first, slab, R, F,
        gate_cap, up_cap, UNIT, ROWS, FEATURES, PARTS,
    )  # fmt: skip


@triton.jit
def _rows(
    d_gate, d_up, w1, w3, d_rows, offsets, starts, E, F, K,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    slabs = tl.cdiv(K, FEATURES)
    tile = tl.program_id(0) // slabs
    slab = tl.program_id(0) % slabs
    if tile >= tl.load(starts + E):
        return
    e, row, count = tile_at(tile, starts, offsets, E, ROWS)
    first = slab * FEATURES
    total = tl.zeros([ROWS, FEATURES], tl.float32)
    for d in range(0, F, DEPTH):
        total = tl.dot(d_gate.load([row, d]), w1.load([e * F + d, first]), total, input_precision="ieee")
    for d in range(0, F, DEPTH):
        total = tl.dot(d_up.load([row, d]), w3.load([e * F + d, first]), total, input_precision="ieee")
    r = tl.arange(0, ROWS)
    c = first + tl.arange(0, FEATURES)
    place = d_rows + (row.to(tl.int64) + r)[:, None] * K + c[None, :]
    tl.store(place, total.to(d_rows.dtype.element_ty), mask=(r < count)[:, None] & (c < K)[None, :])


LEAST: int | None = 512  # of both widths of an expert; None: never
FEWEST = 256  # rows of an expert on average: from there on a tile that is not full costs little
HIDDEN = Tiles(rows=128, tail=0, features=128, depth=64, warps=8, stages=4)
PARTS = 8  # of HIDDEN's rows; their units follow each other, or they would not fit into the registers
ROWS = Tiles(rows=128, tail=0, features=256, depth=64, warps=8, stages=4)


def suits(rows: int, w1: Tensor) -> bool:
    """Whether these tiles are for so many rows through experts `w1 [E, F, l]`."""
    return LEAST is not None and min(w1.shape[1:]) >= LEAST and rows > FEWEST * len(w1)


def hidden_gradients(
    x: Tensor, d_out: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, weights: Tensor, order: Tensor,
    offsets: Tensor, unit: str, gate_cap: float, up_cap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `gradients.hidden_gradients`."""
    (R, K), (E, F, _), t = x.shape, w1.shape, HIDDEN
    slabs = triton.cdiv(F, t.features)
    hidden, d_gate, d_up = (x.new_empty(R, F) for _ in range(3))
    d_p = x.new_empty(slabs, R, dtype=torch.float32)
    block, tall = [t.features, t.depth], [t.rows, t.depth]
    _hidden[(most_tiles(R, E, t.rows) * slabs,)](
        TensorDescriptor.from_tensor(x, tall), TensorDescriptor.from_tensor(d_out, tall),
        TensorDescriptor.from_tensor(w1.view(E * F, K), block),
        TensorDescriptor.from_tensor(w3.view(E * F, K), block),
        TensorDescriptor.from_tensor(w2.view(E * K, F), [t.depth, t.features]),
        weights, order, hidden, d_gate, d_up, d_p, offsets, tile_starts(offsets, t.rows), R, E, F, K,
        gate_cap, up_cap,
        UNIT=unit, ROWS=t.rows, FEATURES=t.features, DEPTH=t.depth, PARTS=PARTS,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return hidden, d_gate, d_up, d_p.sum(0)


def row_gradients(d_gate: Tensor, d_up: Tensor, w1: Tensor, w3: Tensor, offsets: Tensor) -> Tensor:
    """As `gradients.row_gradients`."""
    (R, F), (E, _, K), t = d_gate.shape, w1.shape, ROWS
    d_rows = d_gate.new_empty(R, K)
    block, tall = [t.depth, t.features], [t.rows, t.depth]
    _rows[(most_tiles(R, E, t.rows) * triton.cdiv(K, t.features),)](
        TensorDescriptor.from_tensor(d_gate, tall), TensorDescriptor.from_tensor(d_up, tall),
        TensorDescriptor.from_tensor(w1.view(E * F, K), block),
        TensorDescriptor.from_tensor(w3.view(E * F, K), block),
        d_rows, offsets, tile_starts(offsets, t.rows), E, F, K,
        ROWS=t.rows, FEATURES=t.features, DEPTH=t.depth, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return d_rows
