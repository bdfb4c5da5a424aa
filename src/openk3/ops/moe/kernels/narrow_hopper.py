"""The kernels of `narrow` for Hopper (Gluon): SiTU, whole slabs, l of 64, 128 or 256.

The same as their twins `narrow._forward` and `narrow._backward` in another order, so that what does not need
the matrix unit runs beside it, and the copies of later slabs beside all of this one:

    forward     matrix unit   out += w2 A of the slab before | gate, up of the next slab
                beside                                       | unit
    backward    matrix unit   gate, up | dA' = w2^T G  | d x += w1^T d gate + w3^T d up
                beside                 | d unit        | what is stored, and <dA', A>

The backward stores from where the products left it: beside both kinds of rows and two stages of weights no
shared memory is left for turning tiles into whole lines. A product leaves a lane columns 2t, 2t + 1 of every
8; its weights are packed in such an order of features that those 8 of a slab's 32 are 16 bytes of a row.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openk3.ops.moe.kernels.plan import most_tiles, tile_at, tile_starts
from openk3.ops.moe.kernels.units import SITU_PARTIALS, SITU_PARTIALS_SHORT, unit
from openk3.ops.triton_math import LOG2E

Tensor = torch.Tensor

ROWS = gl.constexpr(128)
SLAB = gl.constexpr(32)
STAGES = gl.constexpr(2)


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    """Of a matrix of 16-bit numbers, in blocks."""
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor.from_tensor(x, block, layout)


@triton.jit
def _pack(w1, w3, w2, w13, w2_rows, F, SLAB: tl.constexpr, WIDTH: tl.constexpr):
    """A slab of `w13 [E slabs 2 SLAB, WIDTH]` and `w2_rows [E slabs SLAB, WIDTH]`, in the order of lanes."""
    slab = tl.program_id(0)
    e = tl.program_id(1).to(tl.int64)
    n = tl.arange(0, SLAB)
    f = slab * SLAB + n // 2 % 4 * 8 + n // 8 * 2 + n % 2
    c = tl.arange(0, WIDTH)
    source = (e * F + f)[:, None] * WIDTH + c[None, :]
    row = e * (F // SLAB) + slab
    target = w13 + (row * (2 * SLAB) + n)[:, None] * WIDTH + c[None, :]
    tl.store(target, tl.load(w1 + source))
    tl.store(target + SLAB * WIDTH, tl.load(w3 + source))
    down = tl.load(w2 + (e * WIDTH + c)[:, None] * F + f[None, :])
    tl.store(w2_rows + (row * SLAB + n)[:, None] * WIDTH + c[None, :], tl.trans(down))


@gluon.jit
def _fetch(w13, w2, w13_tile, w2_tile, ready, e, slabs, s, wanted, WIDTH: gl.constexpr):
    """Starts the copies of a slab if `wanted`."""
    mbarrier.expect(ready, 3 * SLAB * WIDTH * 2, wanted)
    tma.async_copy_global_to_shared(w13, [(e * slabs + s) * (2 * SLAB), 0], ready, w13_tile, wanted)
    tma.async_copy_global_to_shared(w2, [(e * slabs + s) * SLAB, 0], ready, w2_tile, wanted)


@gluon.jit
def _lines(x, LINES: gl.constexpr):
    """From the order of lanes to that of features; nothing moves."""
    rows: gl.constexpr = x.shape[0]
    x = gl.permute(gl.reshape(x, [rows, 4, 4, 2]), [0, 2, 1, 3])
    return gl.convert_layout(gl.reshape(x, [rows, SLAB]), LINES)


@gluon.jit
def _activation(both, gate_cap, up_cap):
    """SiTU of the left and the right columns, as `units.unit` makes it for bf16."""
    gate, up = gl.split(gl.permute(gl.reshape(both, [both.shape[0], 2, SLAB]), [0, 2, 1]))
    return unit(gate, up, gate_cap, up_cap, "situ", True)


@gluon.jit
def _partials(gate, up, gate_cap, up_cap, SHORT: gl.constexpr):
    """SiTU and its derivatives by gate and up."""
    scale = -2 * LOG2E if SHORT else 1.0
    ptx: gl.constexpr = SITU_PARTIALS_SHORT if SHORT else SITU_PARTIALS
    arguments = [gate, up, scale / gate_cap, scale / up_cap, gate_cap, up_cap]
    return gl.inline_asm_elementwise(
        ptx, "=&f,=&f,=&f,f,f,f,f,f,f", arguments,
        dtype=(gl.float32, gl.float32, gl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _start(w, tile, ready, first, second, wanted, BYTES: gl.constexpr):
    """Starts the copy of one tile if `wanted`."""
    mbarrier.expect(ready, BYTES, wanted)
    tma.async_copy_global_to_shared(w, [first, second], ready, tile, wanted)


@gluon.jit
def forward_hopper(
    x, tokens, w13, w2, out, offsets, starts, E, F, gate_cap, up_cap,
    WIDTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    TYPE: gl.constexpr = x.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 2 * SLAB, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TOTAL, 2)
    LANES: gl.constexpr = WIDTH // 8
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], TYPE)
    RIGHT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * SLAB, WIDTH], TYPE)
    DOWN: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WIDTH, SLAB], TYPE)
    SLAB_BYTES: gl.constexpr = SLAB * WIDTH * 2

    tile = gl.program_id(0)
    if tile >= gl.load(starts + E):
        return
    e, row, count = tile_at(tile, starts, offsets, E, ROWS)
    slabs = F // SLAB
    gate_up = e * slabs * (2 * SLAB)

    w13_tiles = gl.allocate_shared_memory(TYPE, [STAGES, 2 * SLAB, WIDTH], RIGHT)
    w2_tiles = gl.allocate_shared_memory(TYPE, [STAGES, WIDTH, SLAB], DOWN)
    x_tile = gl.allocate_shared_memory(TYPE, [ROWS, WIDTH], TILE)
    w13_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w2_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(w13_ready.index(s), count=1)
        mbarrier.init(w2_ready.index(s), count=1)
    fence_async_shared()
    gl.thread_barrier()
    for s in gl.static_range(STAGES):
        _start(
            w13, w13_tiles.index(s), w13_ready.index(s), gate_up + s * (2 * SLAB), 0, s < slabs,
            2 * SLAB_BYTES,
        )  # fmt: skip
        if s < STAGES - 1:
            _start(w2, w2_tiles.index(s), w2_ready.index(s), e * WIDTH, s * SLAB, s < slabs, SLAB_BYTES)

    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, WHOLE))
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, WHOLE))
    own = (r < count)[:, None]
    place = row.to(gl.int64) + r
    token = gl.load(tokens + place, mask=r < count, other=0)
    x_tile.store(gl.load(x + token[:, None] * WIDTH + c[None, :], mask=own, other=0.0))
    fence_async_shared()
    gl.thread_barrier()

    none = gl.zeros([ROWS, 2 * SLAB], gl.float32, layout=BOTH)
    left = gl.zeros([ROWS, SLAB], TYPE, layout=LEFT)
    mbarrier.wait(w13_ready.index(0), 0)
    both = warpgroup_mma(x_tile, w13_tiles.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
    both = warpgroup_mma_wait(0, deps=(both,))
    total = warpgroup_mma_init(gl.zeros([ROWS, WIDTH], gl.float32, layout=TOTAL))
    for s in range(0, slabs - 1):
        stage = s % STAGES
        ahead = s + 1
        mbarrier.wait(w13_ready.index(ahead % STAGES), (ahead // STAGES) & 1)
        following = warpgroup_mma(
            x_tile, w13_tiles.index(ahead % STAGES).permute((1, 0)), none, use_acc=False, is_async=True
        )
        total, left = warpgroup_mma_wait(1, deps=(total, left))
        # Every warp is past gate and up of this slab and w2 of the one before: copies overwrite them.
        gl.thread_barrier()
        later = s + STAGES
        _start(
            w13, w13_tiles.index(stage), w13_ready.index(stage), gate_up + later * (2 * SLAB), 0,
            later < slabs, 2 * SLAB_BYTES,
        )  # fmt: skip
        later = s + STAGES - 1
        slot = later % STAGES
        _start(
            w2, w2_tiles.index(slot), w2_ready.index(slot), e * WIDTH, later * SLAB, later < slabs,
            SLAB_BYTES,
        )  # fmt: skip
        left = gl.convert_layout(_activation(both, gate_cap, up_cap).to(TYPE), LEFT)
        mbarrier.wait(w2_ready.index(stage), (s // STAGES) & 1)
        total = warpgroup_mma(left, w2_tiles.index(stage).permute((1, 0)), total, is_async=True)
        both = warpgroup_mma_wait(1, deps=(following,))
    s = slabs - 1
    total, left = warpgroup_mma_wait(0, deps=(total, left))
    left = gl.convert_layout(_activation(both, gate_cap, up_cap).to(TYPE), LEFT)
    mbarrier.wait(w2_ready.index(s % STAGES), (s // STAGES) & 1)
    total = warpgroup_mma(left, w2_tiles.index(s % STAGES).permute((1, 0)), total, is_async=True)
    total = warpgroup_mma_wait(0, deps=(total,))
    x_tile.store(total.to(TYPE))
    gl.thread_barrier()
    gl.store(out + place[:, None] * WIDTH + c[None, :], x_tile.load(WHOLE), mask=own)


@gluon.jit
def backward_hopper(
    x, d_u, tokens, w13, w2, weights, order, rows, d_out, hidden, d_gate, d_up, d_rows, d_p, offsets, starts,
    E, F, gate_cap, up_cap, WIDTH: gl.constexpr, SHORT: gl.constexpr,
):  # fmt: skip
    TYPE: gl.constexpr = x.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 2 * SLAB, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SLAB, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TOTAL, 2)
    LINES: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[ROWS, SLAB],
    )
    LANES: gl.constexpr = WIDTH // 8
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], TYPE)

    tile = gl.program_id(0)
    if tile >= gl.load(starts + E):
        return
    e, row, count = tile_at(tile, starts, offsets, E, ROWS)
    slabs = F // SLAB

    w13_tiles = gl.allocate_shared_memory(TYPE, [STAGES, 2 * SLAB, WIDTH], TILE)
    w2_tiles = gl.allocate_shared_memory(TYPE, [STAGES, SLAB, WIDTH], TILE)
    x_tile = gl.allocate_shared_memory(TYPE, [ROWS, WIDTH], TILE)
    g_tile = gl.allocate_shared_memory(TYPE, [ROWS, WIDTH], TILE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    gl.thread_barrier()
    _fetch(w13, w2, w13_tiles.index(0), w2_tiles.index(0), ready.index(0), e, slabs, 0, True, WIDTH)

    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, WHOLE))
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, WHOLE))
    own = (r < count)[:, None]
    place = row.to(gl.int64) + r
    token = gl.load(tokens + place, mask=r < count, other=0)
    source = token[:, None] * WIDTH + c[None, :]
    whole = place[:, None] * WIDTH + c[None, :]
    values = gl.load(x + source, mask=own, other=0.0)
    x_tile.store(values)
    gl.store(rows + whole, values, mask=own)
    values = gl.load(d_u + source, mask=own, other=0.0)
    g_tile.store(values)
    gl.store(d_out + whole, values, mask=own)
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, HALF))
    mine = r < count
    p_place = row.to(gl.int64) + r
    p = gl.load(weights + gl.load(order + p_place, mask=mine, other=0), mask=mine, other=0.0)[:, None]
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LINES))
    f = gl.arange(0, SLAB, layout=gl.SliceLayout(0, LINES))
    line = (row.to(gl.int64) + r)[:, None] * F + f[None, :]
    whose = (r < count)[:, None]
    fence_async_shared()
    gl.thread_barrier()

    total = warpgroup_mma_init(gl.zeros([ROWS, WIDTH], gl.float32, layout=TOTAL))
    by_p = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, HALF))
    left = gl.zeros([ROWS, 2 * SLAB], TYPE, layout=LEFT)
    none = gl.zeros([ROWS, 2 * SLAB], gl.float32, layout=BOTH)
    nothing = gl.zeros([ROWS, SLAB], gl.float32, layout=HALF)
    for s in range(0, slabs):
        stage = s % STAGES
        mbarrier.wait(ready.index(stage), (s // STAGES) & 1)
        w = w13_tiles.index(stage)
        both = warpgroup_mma(x_tile, w.permute((1, 0)), none, use_acc=False, is_async=True)
        by_hidden = warpgroup_mma(
            g_tile, w2_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        total, left = warpgroup_mma_wait(2, deps=(total, left))
        # Every warp is past the slab before, whose tiles the copies overwrite.
        gl.thread_barrier()
        other = (s + 1) % STAGES
        _fetch(
            w13, w2, w13_tiles.index(other), w2_tiles.index(other), ready.index(other), e, slabs, s + 1,
            s + 1 < slabs, WIDTH,
        )  # fmt: skip
        both = warpgroup_mma_wait(1, deps=(both,))
        gate, up = gl.split(gl.permute(gl.reshape(both, [ROWS, 2, SLAB]), [0, 2, 1]))
        gate = gl.convert_layout(gate, HALF)
        up = gl.convert_layout(up, HALF)
        act, by_gate, by_up = _partials(gate, up, gate_cap, up_cap, SHORT)
        # Passed at once. The assembler moves no arithmetic over it: the unit's stays beside dA'.
        mbarrier.wait(ready.index(stage), (s // STAGES) & 1)
        by_hidden = warpgroup_mma_wait(0, deps=(by_hidden,))
        weighted = by_hidden * p
        to_gate = (by_gate * weighted).to(TYPE)
        to_up = (by_up * weighted).to(TYPE)
        sides = gl.reshape(gl.permute(gl.join(to_gate, to_up), [0, 2, 1]), [ROWS, 2 * SLAB])
        left = gl.convert_layout(sides, LEFT)
        total = warpgroup_mma(left, w, total, is_async=True)
        by_p += gl.sum(by_hidden * act, 1)
        at = line + s * SLAB
        gl.store(hidden + at, _lines((act * p).to(TYPE), LINES), mask=whose)
        gl.store(d_gate + at, _lines(to_gate, LINES), mask=whose)
        gl.store(d_up + at, _lines(to_up, LINES), mask=whose)
    total = warpgroup_mma_wait(0, deps=(total,))
    gl.store(d_p + p_place, by_p, mask=mine)
    x_tile.store(total.to(TYPE))
    gl.thread_barrier()
    gl.store(d_rows + whole, x_tile.load(WHOLE), mask=own)


def pack(w1: Tensor, w3: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """`[E, F, l]` twice, `[E, l, F]` -> `[2 E F, l]` and `[E F, l]`, by slabs, in the order of lanes."""
    E, F, K = w1.shape
    w13, w2_rows = w1.new_empty(2 * E * F, K), w1.new_empty(E * F, K)
    _pack[(F // SLAB.value, E)](w1, w3, w2, w13, w2_rows, F, SLAB=SLAB.value, WIDTH=K, num_warps=8)
    return w13, w2_rows


def forward(
    x: Tensor, tokens: Tensor, w13: Tensor, w2: Tensor, out: Tensor, offsets: Tensor, gate_cap: float,
    up_cap: float,
) -> None:  # fmt: skip
    """Writes `out`, what `narrow.forward` returns; `w13` is packed by slabs of `SLAB` features."""
    E, K, F = w2.shape
    starts = tile_starts(offsets, ROWS.value)
    forward_hopper[(most_tiles(len(tokens), E, ROWS.value),)](
        x, tokens,
        _descriptor(w13, [2 * SLAB.value, K]), _descriptor(w2.view(E * K, F), [K, SLAB.value]),
        out, offsets, starts, E, F, gate_cap, up_cap, WIDTH=K, STAGES=3, num_warps=8,
    )  # fmt: skip


def backward(
    x: Tensor, d_u: Tensor, tokens: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, weights: Tensor,
    order: Tensor, made: tuple[Tensor, ...], offsets: Tensor, gate_cap: float, up_cap: float, short: bool,
) -> None:  # fmt: skip
    """Writes `made`, the gradients of `narrow.backward`. `short`: by the short form of the unit's slopes."""
    E, K, F = w2.shape
    w13, w2_rows = pack(w1, w3, w2)
    starts = tile_starts(offsets, ROWS.value)
    backward_hopper[(most_tiles(len(tokens), E, ROWS.value),)](
        x, d_u, tokens,
        _descriptor(w13, [2 * SLAB.value, K]), _descriptor(w2_rows, [SLAB.value, K]),
        weights, order, *made, offsets, starts, E, F, gate_cap, up_cap, WIDTH=K, SHORT=short, num_warps=8,
    )  # fmt: skip
