"""The kernels of `narrow` for Hopper (Gluon): SiTU, whole slabs, l of 64, 128 or 256.

Programs stay, each of two warpgroups that do not wait for each other:

    warpgroup    64 rows of a tile of 128 through all slabs; the second begins a product later than the first
    slabs        lie in a ring; the second warpgroup, who is past one last, starts the copy of another there

Where both warpgroups march in step they multiply at one time and compute units at one time, and either the
matrix unit or everything else rests. Here one is in its units while the other multiplies. The ring runs on
from tile to tile. Tiles are listed before, so that a program finds its next in one look.

A third partition that only copies would leave the warpgroups 240 registers by `setmaxnreg`, and with that
ptxas makes all products wait for each other (C7512).

The backward stores from where the products left it: beside both kinds of rows and two stages of weights no
shared memory is left for turning tiles into whole lines. A product leaves a lane columns 2t, 2t + 1 of every
8; weights are packed in such an order of features that those 8 of a slab's 32 are 16 bytes of a row.
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

from openk3.ops.moe.kernels.few import list_tiles
from openk3.ops.moe.kernels.plan import most_tiles
from openk3.ops.moe.kernels.units import SITU_PARTIALS_SHORT, unit
from openk3.ops.triton_math import LOG2E

Tensor = torch.Tensor

SLAB = gl.constexpr(32)
HALF = gl.constexpr(64)  # rows of a warpgroup
WARPS = gl.constexpr(4)  # of a warpgroup
FORWARD_STAGES = gl.constexpr(3)
BACKWARD_STAGES = gl.constexpr(2)
REGISTERS = gl.constexpr(256)  # of a thread of the second warpgroup; the first gets as many


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
def _partials(gate, up, gate_cap, up_cap):
    """SiTU and its derivatives by gate and up, by the short form of `units`."""
    scale = -2 * LOG2E
    arguments = [gate, up, scale / gate_cap, scale / up_cap, gate_cap, up_cap]
    return gl.inline_asm_elementwise(
        SITU_PARTIALS_SHORT, "=&f,=&f,=&f,f,f,f,f,f,f", arguments,
        dtype=(gl.float32, gl.float32, gl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _ring(STAGES: gl.constexpr):
    """Barriers: a slab has come, a slab is free, and the first warpgroup's first product is done."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    begun = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    mbarrier.init(begun.index(0), count=1)
    fence_async_shared()
    gl.thread_barrier()
    return full, empty, begun


@gluon.jit
def _half_of(tiles, most, tile, SECOND: gl.constexpr, WHOLE: gl.constexpr, WIDTH: gl.constexpr):
    """The first row of a warpgroup's half of a tile, how many rows it has, and the indices of both axes.

    Looked up again where they are needed again: kept through the slabs they would take 50 registers.
    """
    first = gl.load(tiles + most + tile).to(gl.int64) + SECOND * HALF
    count = gl.load(tiles + 2 * most + tile) - SECOND * HALF
    r = gl.arange(0, HALF, layout=gl.SliceLayout(1, WHOLE))
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, WHOLE))
    return first, count, r, c


@gluon.jit
def _fetch_ahead(weights, ring, m, wanted, WIDTH: gl.constexpr, STAGES: gl.constexpr):
    """Starts the copies of slab m, counted through all tiles of the program, if `wanted` and there is one."""
    w13, w2, tiles, most, slabs = weights
    w13_tiles, w2_tiles, full = ring[:3]
    tile = gl.program_id(0) + m // slabs * gl.num_programs(0)
    wanted = wanted & (tile < gl.load(tiles + 3 * most))
    e = gl.load(tiles + tile, mask=wanted, other=0)
    stage = m % STAGES
    w13_tile, w2_tile = w13_tiles.index(stage), w2_tiles.index(stage)
    _fetch(w13, w2, w13_tile, w2_tile, full.index(stage), e, slabs, m % slabs, wanted, WIDTH)


@gluon.jit
def _give_back(weights, ring, n, wanted, SECOND: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr):
    """This warpgroup is past slab n: the second, who is past it last, copies another one there."""
    empty = ring[3]
    gl.thread_barrier()
    if SECOND:
        mbarrier.wait(empty.index(n % STAGES), (n // STAGES) & 1, pred=wanted)
        _fetch_ahead(weights, ring, n + STAGES, wanted, WIDTH, STAGES)
    else:
        mbarrier.arrive(empty.index(n % STAGES), pred=wanted)


@gluon.jit
def _forward_half(
    given, slab_weights, x_tile, ring, begun, SECOND: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr
):  # fmt: skip
    x, tokens, out, gate_cap, up_cap = given
    tiles, most, slabs = slab_weights[2:]
    w13_tiles, w2_tiles, full = ring[:3]
    TYPE: gl.constexpr = x.dtype.element_ty
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 2 * SLAB, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TOTAL, 2)
    LANES: gl.constexpr = WIDTH // 8
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    none = gl.zeros([HALF, 2 * SLAB], gl.float32, layout=BOTH)
    if SECOND:
        for m in gl.static_range(STAGES):
            _fetch_ahead(slab_weights, ring, m, slabs > 0, WIDTH, STAGES)
    n = 0
    for tile in range(gl.program_id(0), gl.load(tiles + 3 * most), gl.num_programs(0)):
        first, count, r, c = _half_of(tiles, most, tile, SECOND, WHOLE, WIDTH)
        token = gl.load(tokens + first + r, mask=r < count, other=0)
        values = gl.load(x + token[:, None] * WIDTH + c[None, :], mask=(r < count)[:, None], other=0.0)
        # Every warp has stored its part of the tile before.
        gl.thread_barrier()
        x_tile.store(values)
        fence_async_shared()
        gl.thread_barrier()

        left = gl.zeros([HALF, SLAB], TYPE, layout=LEFT)
        total = warpgroup_mma_init(gl.zeros([HALF, WIDTH], gl.float32, layout=TOTAL))
        if SECOND:
            mbarrier.wait(begun.index(0), 0)
        mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)
        w = w13_tiles.index(n % STAGES).permute((1, 0))
        both = warpgroup_mma(x_tile, w, none, use_acc=False, is_async=True)
        both = warpgroup_mma_wait(0, deps=(both,))
        if not SECOND:
            mbarrier.arrive(begun.index(0), pred=n == 0)
        for s in range(0, slabs - 1):
            ahead = n + 1
            mbarrier.wait(full.index(ahead % STAGES), (ahead // STAGES) & 1)
            w = w13_tiles.index(ahead % STAGES).permute((1, 0))
            following = warpgroup_mma(x_tile, w, none, use_acc=False, is_async=True)
            total, left = warpgroup_mma_wait(1, deps=(total, left))
            _give_back(slab_weights, ring, n - 1, s > 0, SECOND, WIDTH, STAGES)
            left = gl.convert_layout(_activation(both, gate_cap, up_cap).to(TYPE), LEFT)
            total = warpgroup_mma(left, w2_tiles.index(n % STAGES), total, is_async=True)
            both = warpgroup_mma_wait(1, deps=(following,))
            n = ahead
        total, left = warpgroup_mma_wait(0, deps=(total, left))
        _give_back(slab_weights, ring, n - 1, slabs > 1, SECOND, WIDTH, STAGES)
        left = gl.convert_layout(_activation(both, gate_cap, up_cap).to(TYPE), LEFT)
        total = warpgroup_mma(left, w2_tiles.index(n % STAGES), total, is_async=True)
        total = warpgroup_mma_wait(0, deps=(total,))
        _give_back(slab_weights, ring, n, slabs > 0, SECOND, WIDTH, STAGES)
        n += 1
        x_tile.store(total.to(TYPE))
        gl.thread_barrier()
        first, count, r, c = _half_of(tiles, most, tile, SECOND, WHOLE, WIDTH)
        whole = (first + r)[:, None] * WIDTH + c[None, :]
        gl.store(out + whole, x_tile.load(WHOLE), mask=(r < count)[:, None])


@gluon.jit(do_not_specialize=["most"])
def forward_hopper(x, tokens, w13, w2, out, tiles, most, F, gate_cap, up_cap, WIDTH: gl.constexpr):
    TYPE: gl.constexpr = x.dtype.element_ty
    STAGES: gl.constexpr = FORWARD_STAGES
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, WIDTH], TYPE)
    slabs = F // SLAB
    w13_tiles = gl.allocate_shared_memory(TYPE, [STAGES, 2 * SLAB, WIDTH], TILE)
    w2_tiles = gl.allocate_shared_memory(TYPE, [STAGES, SLAB, WIDTH], TILE)
    x_tiles = gl.allocate_shared_memory(TYPE, [2, HALF, WIDTH], TILE)
    full, empty, begun = _ring(STAGES)
    given = (x, tokens, out, gate_cap, up_cap)
    slab_weights = (w13, w2, tiles, most, slabs)
    ring = (w13_tiles, w2_tiles, full, empty)
    gl.warp_specialize(
        [
            (_forward_half, (given, slab_weights, x_tiles.index(0), ring, begun, 0, STAGES, WIDTH)),
            (_forward_half, (given, slab_weights, x_tiles.index(1), ring, begun, 1, STAGES, WIDTH)),
        ],
        [WARPS],
        [REGISTERS],
    )


@gluon.jit
def _backward_half(
    given, slab_weights, F, x_tile, g_tile, ring, begun,
    SECOND: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    x, d_u, tokens, weights, order, rows, d_out, hidden, d_gate, d_up, d_rows, d_p = given[:12]
    gate_cap, up_cap = given[12:]
    tiles, most, slabs = slab_weights[2:]
    w13_tiles, w2_tiles, full = ring[:3]
    TYPE: gl.constexpr = x.dtype.element_ty
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 2 * SLAB, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SLAB, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TOTAL, 2)
    LANES: gl.constexpr = WIDTH // 8
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    LINES: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[HALF, SLAB],
    )
    none = gl.zeros([HALF, 2 * SLAB], gl.float32, layout=BOTH)
    nothing = gl.zeros([HALF, SLAB], gl.float32, layout=NARROW)
    if SECOND:
        for m in gl.static_range(STAGES):
            _fetch_ahead(slab_weights, ring, m, slabs > 0, WIDTH, STAGES)
    n = 0
    for tile in range(gl.program_id(0), gl.load(tiles + 3 * most), gl.num_programs(0)):
        first, count, r, c = _half_of(tiles, most, tile, SECOND, WHOLE, WIDTH)
        own = (r < count)[:, None]
        token = gl.load(tokens + first + r, mask=r < count, other=0)
        source = token[:, None] * WIDTH + c[None, :]
        whole = (first + r)[:, None] * WIDTH + c[None, :]
        # Every warp has stored its part of the tile before.
        gl.thread_barrier()
        values = gl.load(x + source, mask=own, other=0.0)
        x_tile.store(values)
        gl.store(rows + whole, values, mask=own)
        values = gl.load(d_u + source, mask=own, other=0.0)
        g_tile.store(values)
        gl.store(d_out + whole, values, mask=own)
        r = gl.arange(0, HALF, layout=gl.SliceLayout(1, NARROW))
        mine = r < count
        p = gl.load(weights + gl.load(order + first + r, mask=mine, other=0), mask=mine, other=0.0)[:, None]
        r = gl.arange(0, HALF, layout=gl.SliceLayout(1, LINES))
        f = gl.arange(0, SLAB, layout=gl.SliceLayout(0, LINES))
        line = (first + r)[:, None] * F + f[None, :]
        whose = (r < count)[:, None]
        fence_async_shared()
        gl.thread_barrier()

        total = warpgroup_mma_init(gl.zeros([HALF, WIDTH], gl.float32, layout=TOTAL))
        by_p = gl.zeros([HALF], gl.float32, layout=gl.SliceLayout(1, NARROW))
        left = gl.zeros([HALF, 2 * SLAB], TYPE, layout=LEFT)
        if SECOND:
            mbarrier.wait(begun.index(0), 0)
        for s in range(0, slabs):
            stage = n % STAGES
            mbarrier.wait(full.index(stage), (n // STAGES) & 1)
            w = w13_tiles.index(stage)
            both = warpgroup_mma(x_tile, w.permute((1, 0)), none, use_acc=False, is_async=True)
            by_hidden = warpgroup_mma(
                g_tile, w2_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            total, left = warpgroup_mma_wait(2, deps=(total, left))
            _give_back(slab_weights, ring, n - 1, s > 0, SECOND, WIDTH, STAGES)
            both = warpgroup_mma_wait(1, deps=(both,))
            if not SECOND:
                mbarrier.arrive(begun.index(0), pred=n == 0)
            gate, up = gl.split(gl.permute(gl.reshape(both, [HALF, 2, SLAB]), [0, 2, 1]))
            gate = gl.convert_layout(gate, NARROW)
            up = gl.convert_layout(up, NARROW)
            act, by_gate, by_up = _partials(gate, up, gate_cap, up_cap)
            # Passed at once. The assembler moves no arithmetic over it: the unit's stays beside dA'.
            mbarrier.wait(full.index(stage), (n // STAGES) & 1)
            by_hidden = warpgroup_mma_wait(0, deps=(by_hidden,))
            weighted = by_hidden * p
            to_gate = (by_gate * weighted).to(TYPE)
            to_up = (by_up * weighted).to(TYPE)
            sides = gl.reshape(gl.permute(gl.join(to_gate, to_up), [0, 2, 1]), [HALF, 2 * SLAB])
            left = gl.convert_layout(sides, LEFT)
            total = warpgroup_mma(left, w, total, is_async=True)
            by_p += gl.sum(by_hidden * act, 1)
            at = line + s * SLAB
            gl.store(hidden + at, _lines((act * p).to(TYPE), LINES), mask=whose)
            gl.store(d_gate + at, _lines(to_gate, LINES), mask=whose)
            gl.store(d_up + at, _lines(to_up, LINES), mask=whose)
            n += 1
        total = warpgroup_mma_wait(0, deps=(total,))
        _give_back(slab_weights, ring, n - 1, slabs > 0, SECOND, WIDTH, STAGES)
        first, count, r, c = _half_of(tiles, most, tile, SECOND, WHOLE, WIDTH)
        x_tile.store(total.to(TYPE))
        gl.thread_barrier()
        whole = (first + r)[:, None] * WIDTH + c[None, :]
        gl.store(d_rows + whole, x_tile.load(WHOLE), mask=(r < count)[:, None])
        r = gl.arange(0, HALF, layout=gl.SliceLayout(1, NARROW))
        gl.store(d_p + first + r, by_p, mask=r < count)


@gluon.jit(do_not_specialize=["most"])
def backward_hopper(
    x, d_u, tokens, w13, w2, weights, order, rows, d_out, hidden, d_gate, d_up, d_rows, d_p, tiles, most, F,
    gate_cap, up_cap, WIDTH: gl.constexpr,
):  # fmt: skip
    TYPE: gl.constexpr = x.dtype.element_ty
    STAGES: gl.constexpr = BACKWARD_STAGES
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, WIDTH], TYPE)
    w13_tiles = gl.allocate_shared_memory(TYPE, [STAGES, 2 * SLAB, WIDTH], TILE)
    w2_tiles = gl.allocate_shared_memory(TYPE, [STAGES, SLAB, WIDTH], TILE)
    x_tiles = gl.allocate_shared_memory(TYPE, [2, HALF, WIDTH], TILE)
    g_tiles = gl.allocate_shared_memory(TYPE, [2, HALF, WIDTH], TILE)
    full, empty, begun = _ring(STAGES)
    ring = (w13_tiles, w2_tiles, full, empty)
    given = (
        x, d_u, tokens, weights, order, rows, d_out, hidden, d_gate, d_up, d_rows, d_p, gate_cap, up_cap,
    )  # fmt: skip
    slab_weights = (w13, w2, tiles, most, F // SLAB)
    gl.warp_specialize(
        [
            (
                _backward_half,
                (given, slab_weights, F, x_tiles.index(0), g_tiles.index(0), ring, begun, 0, STAGES, WIDTH),
            ),
            (
                _backward_half,
                (given, slab_weights, F, x_tiles.index(1), g_tiles.index(1), ring, begun, 1, STAGES, WIDTH),
            ),
        ],
        [WARPS],
        [REGISTERS],
    )


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    """Of a matrix of 16-bit numbers, in blocks."""
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor.from_tensor(x, block, layout)


def pack(w1: Tensor, w3: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """`[E, F, l]` twice, `[E, l, F]` -> `[2 E F, l]` and `[E F, l]`, by slabs, in the order of lanes."""
    E, F, K = w1.shape
    w13, w2_rows = w1.new_empty(2 * E * F, K), w1.new_empty(E * F, K)
    _pack[(F // SLAB.value, E)](w1, w3, w2, w13, w2_rows, F, SLAB=SLAB.value, WIDTH=K, num_warps=8)
    return w13, w2_rows


def _programs(device: torch.device, most: int) -> int:
    """One a processor: a program takes nearly all of its shared memory."""
    return min(most, torch.cuda.get_device_properties(device).multi_processor_count)


def _slabs(w1: Tensor, w3: Tensor, w2: Tensor) -> list[TensorDescriptor]:
    """Weights as `pack` puts them, in slabs."""
    w13, w2_rows = pack(w1, w3, w2)
    K = w2.shape[1]
    return [_descriptor(w13, [2 * SLAB.value, K]), _descriptor(w2_rows, [SLAB.value, K])]


def forward(
    x: Tensor, tokens: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, out: Tensor, offsets: Tensor,
    gate_cap: float, up_cap: float,
) -> None:  # fmt: skip
    """Writes `out`, what `narrow.forward` returns."""
    (E, K, F), R, height = w2.shape, len(tokens), 2 * HALF.value
    most = most_tiles(R, E, height)
    forward_hopper[(_programs(x.device, most),)](
        x, tokens, *_slabs(w1, w3, w2), out, list_tiles(offsets, R, height), most, F, gate_cap, up_cap,
        WIDTH=K, num_warps=WARPS.value,
    )  # fmt: skip


def backward(
    x: Tensor, d_u: Tensor, tokens: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, weights: Tensor,
    order: Tensor, made: tuple[Tensor, ...], offsets: Tensor, gate_cap: float, up_cap: float,
) -> None:  # fmt: skip
    """Writes `made`, the gradients of `narrow.backward`."""
    (E, K, F), R, height = w2.shape, len(tokens), 2 * HALF.value
    most = most_tiles(R, E, height)
    backward_hopper[(_programs(x.device, most),)](
        x, d_u, tokens, *_slabs(w1, w3, w2), weights, order, *made, list_tiles(offsets, R, height), most, F,
        gate_cap, up_cap, WIDTH=K, num_warps=WARPS.value,
    )  # fmt: skip
