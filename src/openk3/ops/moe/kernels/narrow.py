"""Experts of a narrow model with many rows each: a program keeps its rows in shared memory.

    forward     x of a tile's tokens stays; slab after slab of features: gate and up, their unit, and what w2
                makes of it is added in registers
    backward    x and G of a tile's tokens stay; slab after slab: gate, up and dA' = w2^T G, then p A and
                p dA' d unit, which are stored for the gradients of the weights; w1^T d gate + w3^T d up and
                <dA', A>, the gradient of p, are added in registers

What bounds these products is not the matrix unit but what passes from the L2 cache to the processors, and
rows that stay are read once instead of once a slab. Tokens are gathered on the way; the backward leaves the
gathered rows for the gradients of the weights. Gate and up of a slab are packed side by side first, so that
one product makes both: a left operand is read from shared memory once for 64 columns instead of twice for 32.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment"
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import TensorDescriptor

from openk3.ops.moe.kernels.plan import most_tiles, tile_at, tile_starts
from openk3.ops.moe.kernels.units import unit, unit_partials
from openk3.ops.triton_math import PTX

Tensor = torch.Tensor


@triton.jit
def _halves(both, ROWS: tl.constexpr, SLAB: tl.constexpr):
    """The left and the right columns of `[ROWS, 2 SLAB]`; every thread has both of a pair."""
    return tl.split(tl.permute(tl.reshape(both, [ROWS, 2, SLAB]), [0, 2, 1]))


@triton.jit
def _side_by_side(a, b, ROWS: tl.constexpr, SLAB: tl.constexpr):
    return tl.reshape(tl.permute(tl.join(a, b), [0, 2, 1]), [ROWS, 2 * SLAB])


@triton.jit
def _forward(
    x, tokens, w13, w2, out, offsets, starts, E, F, K, gate_cap, up_cap,
    UNIT: tl.constexpr, ROWS: tl.constexpr, SLAB: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile >= tl.load(starts + E):
        return
    e, row, count = tile_at(tile, starts, offsets, E, ROWS)
    r = tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    inside = (r < count)[:, None] & (c < K)[None, :]
    place = row.to(tl.int64) + r
    token = tl.load(tokens + place, mask=r < count, other=0)
    left = tl.load(x + token[:, None] * K + c[None, :], mask=inside, other=0.0)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    slabs = tl.cdiv(F, SLAB)
    for s in range(0, slabs):
        both = tl.dot(left, w13.load([(e * slabs + s) * (2 * SLAB), 0]).T, input_precision="ieee")
        gate, up = _halves(both, ROWS, SLAB)
        act = unit(gate, up, gate_cap, up_cap, UNIT, out.dtype.element_ty == tl.bfloat16)
        right = w2.load([e * K, s * SLAB]).T
        total = tl.dot(act.to(out.dtype.element_ty), right, total, input_precision="ieee")
    tl.store(out + place[:, None] * K + c[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _store(out, place, value, mask):
    """As `tl.store`, from the registers that a product of 16-bit numbers is in, two columns at a time.

    Where the rows stay, no shared memory is left for turning a tile into whole lines first.
    """
    value = value.to(out.dtype.element_ty)
    if PTX:
        wanted = tl.broadcast_to(mask, value.shape).to(tl.int32)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $4, 0; @p st.global.b32 [$1], $3; mov.b32 $0, 0; }",
            "=r,l,l,r,r,r", [(out + place).to(tl.int64), value, wanted], tl.int16, False, 2,
        )  # fmt: skip
    else:
        tl.store(out + place, value, mask=mask)


@triton.jit
def _backward(
    x, d_u, tokens, w13, w2, weights, order, rows, d_out, hidden, d_gate, d_up, d_rows, d_p, offsets, starts,
    E, F, K, gate_cap, up_cap,
    UNIT: tl.constexpr, ROWS: tl.constexpr, SLAB: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile >= tl.load(starts + E):
        return
    e, row, count = tile_at(tile, starts, offsets, E, ROWS)
    r = tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    own = r < count
    inside = own[:, None] & (c < K)[None, :]
    place = row.to(tl.int64) + r
    token = tl.load(tokens + place, mask=own, other=0)
    left = tl.load(x + token[:, None] * K + c[None, :], mask=inside, other=0.0)
    tl.store(rows + place[:, None] * K + c[None, :], left, mask=inside)
    d_left = tl.load(d_u + token[:, None] * K + c[None, :], mask=inside, other=0.0)
    tl.store(d_out + place[:, None] * K + c[None, :], d_left, mask=inside)
    p = tl.load(weights + tl.load(order + place, mask=own, other=0), mask=own, other=0.0)[:, None]
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    by_p = tl.zeros([ROWS], tl.float32)
    slabs = tl.cdiv(F, SLAB)
    for s in range(0, slabs):
        w = w13.load([(e * slabs + s) * (2 * SLAB), 0])
        both = tl.dot(left, w.T, input_precision="ieee")
        by_hidden = tl.dot(d_left, w2.load([e * K, s * SLAB]), input_precision="ieee")
        gate, up = _halves(both, ROWS, SLAB)
        act, by_gate, by_up = unit_partials(gate, up, gate_cap, up_cap, UNIT)
        by_p += tl.sum(by_hidden * act, 1)
        by_hidden *= p
        to_gate = (by_gate * by_hidden).to(d_gate.dtype.element_ty)
        to_up = (by_up * by_hidden).to(d_up.dtype.element_ty)
        f = s * SLAB + tl.arange(0, SLAB)
        mine = own[:, None] & (f < F)[None, :]
        at = place[:, None] * F + f[None, :]
        _store(hidden, at, act * p, mine)
        _store(d_gate, at, to_gate, mine)
        _store(d_up, at, to_up, mine)
        total = tl.dot(_side_by_side(to_gate, to_up, ROWS, SLAB), w, total, input_precision="ieee")
    tl.store(d_p + place, by_p, mask=own)
    tl.store(d_rows + place[:, None] * K + c[None, :], total.to(d_rows.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Slabs:
    """Block sizes: rows of an expert that stay, features of a slab."""

    rows: int
    features: int
    warps: int
    stages: int


# r1 is 13 slabs of 32. Slabs of 64 do not fit: 64 KB a stage beside 64 KB of each kind of rows.
FORWARD = Slabs(rows=128, features=32, warps=8, stages=3)
BACKWARD = Slabs(rows=128, features=32, warps=8, stages=2)
WIDEST = 256  # columns of rows that stay
FEWEST = 256  # rows of an expert on average that pay for the packing
HOPPER = True  # the kernels in Gluon where they can be; by bench/moe_gpu.py --forms the fastest on an H200


def suits(rows: int, w1: Tensor) -> bool:
    """Whether these kernels take so many rows through experts `w1 [E, F, l]`."""
    return (
        w1.shape[2] <= WIDEST and rows > FEWEST * len(w1) and w1.dtype.itemsize == 2 and _has_room(w1.device)
    )


def _has_room(device: torch.device) -> bool:
    """For the shared memory of data-centre cards, of which a program of these takes nearly all."""
    if device.type != "cuda":
        return True
    card = torch.cuda.get_device_properties(device)
    return bool(getattr(card, "shared_memory_per_block_optin", card.shared_memory_per_block) >= 227 * 1024)


def pack(w1: Tensor, w3: Tensor, features: int) -> Tensor:
    """`[E, F, l]` twice -> `[E slabs 2 features, l]`: gate of a slab, up of the slab; zeros beyond F."""
    E, F, K = w1.shape
    if beyond := -F % features:
        w1, w3 = (pad(w, (0, 0, 0, beyond)) for w in (w1, w3))
    return torch.stack([w.view(E, -1, features, K) for w in (w1, w3)], 2).view(-1, K)


def _hopper_takes(x: Tensor, F: int, unit: str) -> bool:
    """SiTU in whole slabs and rows of whole warps' accesses, on compute capability 9."""
    if not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] != 9:
        return False
    return unit == "situ" and F % 32 == 0 and x.shape[1] in (64, 128, 256)


def _columns(width: int) -> int:
    return max(16, int(triton.next_power_of_2(width)))


def forward(
    x: Tensor, tokens: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, offsets: Tensor,
    unit: str, gate_cap: float, up_cap: float,
) -> Tensor:  # fmt: skip
    """w2 unit(w1 x, w3 x) of each row, `[R, l]`; `x [T, l]`, `tokens [R]`."""
    (E, F, K), R, t = w1.shape, len(tokens), FORWARD
    out = x.new_empty(R, K)
    if R == 0:
        return out
    if HOPPER and x.dtype == torch.bfloat16 and _hopper_takes(x, F, unit):
        from openk3.ops.moe.kernels import narrow_hopper

        narrow_hopper.forward(x, tokens, w1, w3, w2, out, offsets, gate_cap, up_cap)
        return out
    WIDTH = _columns(K)
    _forward[(most_tiles(R, E, t.rows),)](
        x, tokens,
        TensorDescriptor.from_tensor(pack(w1, w3, t.features), [2 * t.features, WIDTH]),
        TensorDescriptor.from_tensor(w2.view(E * K, F), [WIDTH, t.features]),
        out, offsets, tile_starts(offsets, t.rows), E, F, K, gate_cap, up_cap,
        UNIT=unit, ROWS=t.rows, SLAB=t.features, WIDTH=WIDTH, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out


class Gradients(NamedTuple):
    """Of each row: x and G `[R, l]`; p A, d gate and d up `[R, F]`; d x `[R, l]`; d p, fp32 `[R]`."""

    rows: Tensor
    d_out: Tensor
    hidden: Tensor
    d_gate: Tensor
    d_up: Tensor
    d_rows: Tensor
    d_p: Tensor


def backward(
    x: Tensor, d_u: Tensor, tokens: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, weights: Tensor,
    order: Tensor, offsets: Tensor, unit: str, gate_cap: float, up_cap: float,
) -> Gradients:  # fmt: skip
    """`x`, `d_u`: `[T, l]`. `weights`: `[T, k]` fp32, `order` `[R]` from rows to it."""
    (E, F, K), R, t = w1.shape, len(tokens), BACKWARD
    rows, d_out, d_rows = (x.new_empty(R, K) for _ in range(3))
    hidden, d_gate, d_up = (x.new_empty(R, F) for _ in range(3))
    made = Gradients(rows, d_out, hidden, d_gate, d_up, d_rows, x.new_empty(R, dtype=torch.float32))
    if HOPPER and _hopper_takes(x, F, unit):
        from openk3.ops.moe.kernels import narrow_hopper

        narrow_hopper.backward(x, d_u, tokens, w1, w3, w2, weights, order, made, offsets, gate_cap, up_cap)
        return made
    WIDTH = _columns(K)
    _backward[(most_tiles(R, E, t.rows),)](
        x, d_u, tokens,
        TensorDescriptor.from_tensor(pack(w1, w3, t.features), [2 * t.features, WIDTH]),
        TensorDescriptor.from_tensor(w2.view(E * K, F), [WIDTH, t.features]),
        weights, order, *made, offsets, tile_starts(offsets, t.rows), E, F, K, gate_cap, up_cap,
        UNIT=unit, ROWS=t.rows, SLAB=t.features, WIDTH=WIDTH, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return made
