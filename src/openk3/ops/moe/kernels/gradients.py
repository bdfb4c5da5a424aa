"""The grouped products of the backward; nothing of the forward was kept: gate and up are made again.

    hidden_gradients   gate, up and dA' = w2^T G of a tile side by side, then in registers
                       p A, p dA' d unit (bf16), and <dA', A>, the gradient of p, a partial sum a slab
    row_gradients      w1^T d gate + w3^T d up, added in fp32
    weight_gradients   left^T right over an expert's rows, fp32 sums in the order of the rows

Rows of another expert never enter a sum: tiles mask what they store, and the last step over rows is masked.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from openk3.ops.moe.kernels.plan import most_tiles, tile_at
from openk3.ops.moe.kernels.products import Tiles
from openk3.ops.moe.kernels.units import unit_partials

Tensor = torch.Tensor


@triton.jit
def leave_hidden(
    gate, up, by_hidden, weights, order, hidden, d_gate, d_up, d_p, row, count, first, slab, R, F,
    gate_cap, up_cap, UNIT: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """What follows from gate, up and dA', `[FEATURES, ROWS]` each: p A, p dA' d unit, and <dA', A>."""
    act, by_gate, by_up = unit_partials(gate, up, gate_cap, up_cap, UNIT)
    r = tl.arange(0, ROWS)
    f = first + tl.arange(0, FEATURES)
    own = r < count
    place = row.to(tl.int64) + r
    product = tl.where((f < F)[:, None], by_hidden * act, 0.0)
    tl.store(d_p + slab.to(tl.int64) * R + place, tl.sum(product, 0), mask=own)
    p = tl.load(weights + tl.load(order + place, mask=own, other=0), mask=own, other=0.0)[None, :]
    by_hidden *= p
    inside = own[:, None] & (f < F)[None, :]
    place = place[:, None] * F + f[None, :]
    tl.store(hidden + place, (act * p).to(hidden.dtype.element_ty).T, mask=inside)
    tl.store(d_gate + place, (by_gate * by_hidden).to(d_gate.dtype.element_ty).T, mask=inside)
    tl.store(d_up + place, (by_up * by_hidden).to(d_up.dtype.element_ty).T, mask=inside)


@triton.jit(do_not_specialize=["R"])
def _hidden(
    x, d_out, w1, w3, w2, weights, order, hidden, d_gate, d_up, d_p, offsets, starts, R, E, F, K,
    gate_cap, up_cap, UNIT: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    slabs = tl.cdiv(F, FEATURES)
    tile = tl.program_id(0) // slabs
    slab = tl.program_id(0) % slabs
    if tile >= tl.load(starts + E):
        return
    e, row, count = tile_at(tile, starts, offsets, E, ROWS)
    first = slab * FEATURES
    gate = tl.zeros([FEATURES, ROWS], tl.float32)
    up = tl.zeros([FEATURES, ROWS], tl.float32)
    by_hidden = tl.zeros([FEATURES, ROWS], tl.float32)
    for d in range(0, K, DEPTH):
        right = x.load([row, d]).T
        gate = tl.dot(w1.load([e * F + first, d]), right, gate, input_precision="ieee")
        up = tl.dot(w3.load([e * F + first, d]), right, up, input_precision="ieee")
        right = d_out.load([row, d]).T
        by_hidden = tl.dot(w2.load([e * K + d, first]).T, right, by_hidden, input_precision="ieee")
    leave_hidden(
        gate, up, by_hidden, weights, order, hidden, d_gate, d_up, d_p, row, count, first, slab, R, F,
        gate_cap, up_cap, UNIT, ROWS, FEATURES,
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
    # Two sums: the compiler waits between products that add to one.
    by_gate = tl.zeros([FEATURES, ROWS], tl.float32)
    by_up = tl.zeros([FEATURES, ROWS], tl.float32)
    for d in range(0, F, DEPTH):
        left = w1.load([e * F + d, first]).T
        by_gate = tl.dot(left, d_gate.load([row, d]).T, by_gate, input_precision="ieee")
        left = w3.load([e * F + d, first]).T
        by_up = tl.dot(left, d_up.load([row, d]).T, by_up, input_precision="ieee")
    total = by_gate + by_up
    r = tl.arange(0, ROWS)
    c = first + tl.arange(0, FEATURES)
    place = d_rows + (row.to(tl.int64) + r)[:, None] * K + c[None, :]
    tl.store(place, total.to(d_rows.dtype.element_ty).T, mask=(r < count)[:, None] & (c < K)[None, :])


@triton.jit
def _masked(x, row, first, count, width, DEPTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The last rows of an expert, `[DEPTH, COLUMNS]`, zero from `count` on."""
    r = tl.arange(0, DEPTH)
    c = first + tl.arange(0, COLUMNS)
    place = x + (row.to(tl.int64) + r)[:, None] * width + c[None, :]
    return tl.load(place, mask=(r < count)[:, None] & (c < width)[None, :], other=0.0)


@triton.jit
def _store_block(out, value, e, first, second, M, N, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    m = first + tl.arange(0, HEIGHT)
    n = second + tl.arange(0, WIDTH)
    place = out + (e.to(tl.int64) * M + m)[:, None] * N + n[None, :]
    tl.store(place, value.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _weights(
    left_a, left_b, right, left_a_rows, left_b_rows, right_rows, out_a, out_b, offsets, M, N,
    NEIGHBOURS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Two blocks: of two gradients at one place, or with NEIGHBOURS one below the other of one gradient."""
    e = tl.program_id(1)
    columns = tl.cdiv(N, WIDTH)
    second = (tl.program_id(0) % columns) * WIDTH
    first = (tl.program_id(0) // columns) * (2 * HEIGHT if NEIGHBOURS else HEIGHT)
    other = first + (HEIGHT if NEIGHBOURS else 0)
    row = tl.load(offsets + e)
    end = tl.load(offsets + e + 1)
    a = tl.zeros([HEIGHT, WIDTH], tl.float32)
    b = tl.zeros([HEIGHT, WIDTH], tl.float32)
    whole = row + (end - row) // DEPTH * DEPTH
    for r in range(row, whole, DEPTH):
        factor = right.load([r, second])
        a = tl.dot(left_a.load([r, first]).T, factor, a, input_precision="ieee")
        b = tl.dot(left_b.load([r, other]).T, factor, b, input_precision="ieee")
    if whole < end:
        factor = _masked(right_rows, whole, second, end - whole, N, DEPTH, WIDTH)
        left = _masked(left_a_rows, whole, first, end - whole, M, DEPTH, HEIGHT)
        a = tl.dot(left.T, factor, a, input_precision="ieee")
        left = _masked(left_b_rows, whole, other, end - whole, M, DEPTH, HEIGHT)
        b = tl.dot(left.T, factor, b, input_precision="ieee")
    _store_block(out_a, a, e, first, second, M, N, HEIGHT, WIDTH)
    _store_block(out_b, b, e, other, second, M, N, HEIGHT, WIDTH)


@dataclass(frozen=True)
class Blocks:
    """Block sizes of a gradient to weights: two of height x width, rows of a step."""

    height: int
    width: int
    depth: int
    warps: int
    stages: int


# Two programs an SM, one in its products while the other is in its units. With 128 rows, 64 features and 8
# warps ptxas makes the three products wait for each other (C7515).
HIDDEN = Tiles(rows=64, tail=0, features=64, depth=64, warps=4, stages=2)
ROWS = Tiles(rows=128, tail=0, features=128, depth=64, warps=8, stages=2)
# Blocks of 64 leave less of r1's 416 features empty than blocks of 128.
TWO_WEIGHTS = Blocks(height=64, width=256, depth=64, warps=8, stages=3)
ONE_WEIGHT = Blocks(height=128, width=128, depth=64, warps=8, stages=3)


def hidden_gradients(
    x: Tensor, d_out: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, weights: Tensor, order: Tensor,
    offsets: Tensor, starts: Tensor, unit: str, gate_cap: float, up_cap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """p A, d gate and d up, `[R, F]` in x's dtype, and the gradient of each row's p, fp32 `[R]`.

    `x`, `d_out`: `[R, l]`, dispatched. `weights`: `[T, k]` fp32, `order` `[R]` from rows to it. `starts` are
    those of `HIDDEN`.
    """
    (R, K), (E, F, _), t = x.shape, w1.shape, HIDDEN
    slabs = triton.cdiv(F, t.features)
    hidden, d_gate, d_up = (x.new_empty(R, F) for _ in range(3))
    d_p = x.new_empty(slabs, R, dtype=torch.float32)
    block, wide = [t.features, t.depth], [t.rows, t.depth]
    _hidden[(most_tiles(R, E, t.rows) * slabs,)](
        TensorDescriptor.from_tensor(x, wide), TensorDescriptor.from_tensor(d_out, wide),
        TensorDescriptor.from_tensor(w1.view(E * F, K), block),
        TensorDescriptor.from_tensor(w3.view(E * F, K), block),
        TensorDescriptor.from_tensor(w2.view(E * K, F), [t.depth, t.features]),
        weights, order, hidden, d_gate, d_up, d_p, offsets, starts, R, E, F, K, gate_cap, up_cap,
        UNIT=unit, ROWS=t.rows, FEATURES=t.features, DEPTH=t.depth, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return hidden, d_gate, d_up, d_p.sum(0)


def row_gradients(
    d_gate: Tensor, d_up: Tensor, w1: Tensor, w3: Tensor, offsets: Tensor, starts: Tensor
) -> Tensor:
    """w1^T d gate + w3^T d up of each row: `[R, F]` twice -> `[R, l]`. `starts` are those of `ROWS`."""
    (R, F), (E, _, K), t = d_gate.shape, w1.shape, ROWS
    d_rows = d_gate.new_empty(R, K)
    block, wide = [t.depth, t.features], [t.rows, t.depth]
    _rows[(most_tiles(R, E, t.rows) * triton.cdiv(K, t.features),)](
        TensorDescriptor.from_tensor(d_gate, wide), TensorDescriptor.from_tensor(d_up, wide),
        TensorDescriptor.from_tensor(w1.view(E * F, K), block),
        TensorDescriptor.from_tensor(w3.view(E * F, K), block),
        d_rows, offsets, starts, E, F, K,
        ROWS=t.rows, FEATURES=t.features, DEPTH=t.depth, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return d_rows


def weight_gradients(
    left_a: Tensor, left_b: Tensor | None, right: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """left^T right over each expert's rows, `[R, M]` (one or two) and `[R, N]` -> `[E, M, N]` each; an expert
    without rows gets 0. With one `left` both results are the same tensor."""
    M, N, E = left_a.shape[1], right.shape[1], len(offsets) - 1
    neighbours = left_b is None
    t = ONE_WEIGHT if neighbours else TWO_WEIGHTS
    left_b = left_a if left_b is None else left_b
    out_a = right.new_empty(E, M, N)
    out_b = out_a if neighbours else torch.empty_like(out_a)
    left_block = [t.depth, t.height]
    grid = (triton.cdiv(M, t.height * (1 + neighbours)) * triton.cdiv(N, t.width), E)
    _weights[grid](
        TensorDescriptor.from_tensor(left_a, left_block), TensorDescriptor.from_tensor(left_b, left_block),
        TensorDescriptor.from_tensor(right, [t.depth, t.width]),
        left_a, left_b, right, out_a, out_b, offsets, M, N,
        NEIGHBOURS=neighbours, HEIGHT=t.height, WIDTH=t.width, DEPTH=t.depth,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out_a, out_b
