"""Experts' products for Hopper (Gluon): a few programs that go on, with a queue of weights on their way.

The bytes of weights are what a step of many sequences costs. A kernel with a program for each tile of them
starts each with an empty memory system: list, rows, weights, one after the other. Here a program takes an
equal share of all tiles that have rows, one after the other, and the copy engine always has STAGES of them
under way, which needs no registers and no threads:

    item    up to 16 rows of an expert; its rows lie in registers for all its tiles
    tile    32 rows of the expert's matrices, `[32, 256]` twice: of w1 and w3, or both halves of w2's columns

The same kernel makes units and what goes down from them. The latter is started while units are being made: it
asks for its first tiles before it waits for them.

Which column of a product a row gets changes none of its sums, so equal calls give equal bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openk3.ops.decoding.kernels.early import early
from openk3.ops.moe.kernels.units import unit

Tensor = torch.Tensor

ROWS = gl.constexpr(16)
SLAB = gl.constexpr(32)
WIDTH = gl.constexpr(256)
# Programs on a processor, and tiles of 32 KB on their way to each.
UNITS = DOWNS = (1, 4)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _cumulated(x):
    return gl.associative_scan(x, 0, _add)


@gluon.jit
def _expert_of(ends, item):
    """The expert of an item, and how many items come before its first; past the last item, no expert."""
    passed = ends <= item
    return gl.sum(passed.to(gl.int32), 0), gl.max(gl.where(passed, ends, 0), 0)


@gluon.jit
def _ask(first, second, tiles, ready, stage, e, slab, height, wanted, DOWN: gl.constexpr):
    """Starts the copies of a tile."""
    bar = ready.index(stage)
    row = e * height + slab * SLAB
    mbarrier.expect(bar, 2 * SLAB * WIDTH * 2, wanted)
    tma.async_copy_global_to_shared(first, [row, 0], bar, tiles.index(2 * stage), wanted)
    column: gl.constexpr = WIDTH if DOWN else 0
    tma.async_copy_global_to_shared(second, [row, column], bar, tiles.index(2 * stage + 1), wanted)


@gluon.jit
def _following(ends, item, e, slab, slabs):
    """Item, expert and slab of the tile after one."""
    slab = slab + 1
    if slab == slabs:
        slab = slab * 0
        item = item + 1
        e, _ = _expert_of(ends, item)
    return item, e, slab


@gluon.jit(do_not_specialize=["N"])
def stream(
    source, first, second, out, N, E, width, height, lists, counts, gate_cap, up_cap,
    k: gl.constexpr, DOWN: gl.constexpr, UNIT: gl.constexpr, COARSE: gl.constexpr, EXPERTS: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """out `[N k, height]`: of each assignment in the lists its expert's matrices times its row of source.

    Units: source `[N, width]`, matrices w1 and w3 of `height` rows. DOWN: source `[N k, width]`, both w2.
    """
    TYPE: gl.constexpr = source.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    OVER: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [WARPS], [0])  # each warp has all
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SLAB, WIDTH], TYPE)
    BOTH: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], TYPE)
    if EARLY:
        if DOWN:
            gdc_launch_dependents()  # counts are there: units let this start only when they had waited
        else:
            gdc_wait()
            gdc_launch_dependents()

    tiles = gl.allocate_shared_memory(TYPE, [2 * STAGES, SLAB, WIDTH], TILE)
    rows = gl.allocate_shared_memory(TYPE, [2 if DOWN else 1, ROWS, WIDTH], BOTH)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()

    expert = gl.arange(0, EXPERTS, layout=OVER)
    count = gl.load(counts + expert, mask=expert < E, other=0)
    ends = _cumulated((count + (ROWS - 1)) // ROWS)
    slabs = (height + SLAB - 1) // SLAB
    steps = gl.max(ends, 0) * slabs
    begin = steps * gl.program_id(0) // gl.num_programs(0)
    end = steps * (gl.program_id(0) + 1) // gl.num_programs(0)
    item = begin // slabs
    slab = begin % slabs
    next_item = item
    next_slab = slab
    next_e, _ = _expert_of(ends, item)
    for i in gl.static_range(STAGES):
        _ask(first, second, tiles, ready, i, next_e, next_slab, height, begin + i < end, DOWN)
        next_item, next_e, next_slab = _following(ends, next_item, next_e, next_slab, slabs)
    if EARLY and DOWN:
        gdc_wait()

    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPY))
    own = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
    feature = gl.arange(0, SLAB, layout=gl.SliceLayout(0, SUMS))
    zero = gl.zeros([ROWS, SLAB], gl.float32, layout=SUMS)
    step = begin
    while step < end:
        e, before = _expert_of(ends, item)
        start = (item - before) * ROWS
        here = lists + (e.to(gl.int64) * N + start)  # asked for beside the count
        row = gl.load(here + r, mask=start + r < N, other=0)
        target = gl.load(here + own, mask=start + own < N, other=0).to(gl.int64) * height
        left = gl.load(counts + e) - start
        row = gl.where(r < left, row, 0) // (1 if DOWN else k)
        cells = source + (row.to(gl.int64) * width)[:, None] + c[None, :]
        inside = (r < left)[:, None]
        values = gl.load(cells, mask=inside & (c < width)[None, :], other=0.0)
        rows.index(0).store(values)
        if DOWN:
            values = gl.load(cells + WIDTH, mask=inside & (c + WIDTH < width)[None, :], other=0.0)
            rows.index(1).store(values)
        gl.thread_barrier()
        one = rows.index(0).load(LEFT)
        other = one
        if DOWN:
            other = rows.index(1).load(LEFT)
        last = gl.minimum(slab + (end - step), slabs)
        for s in range(slab, last):
            done = step - begin
            stage = done % STAGES
            mbarrier.wait(ready.index(stage), (done // STAGES) & 1)
            w = tiles.index(2 * stage).permute((1, 0)).load(RIGHT)
            v = tiles.index(2 * stage + 1).permute((1, 0)).load(RIGHT)
            gl.thread_barrier()  # all have the tile and, of an item's first, its rows
            _ask(first, second, tiles, ready, stage, next_e, next_slab, height, step + STAGES < end, DOWN)
            next_item, next_e, next_slab = _following(ends, next_item, next_e, next_slab, slabs)
            y = mma_v2(one, w, zero)  # two chains of products at once
            z = mma_v2(other, v, zero)
            y = y + z if DOWN else unit(y, z, gate_cap, up_cap, UNIT, COARSE)
            column = s * SLAB + feature
            wanted = (own < left)[:, None] & (column < height)[None, :]
            gl.store(out + target[:, None] + column[None, :], y.to(out.dtype.element_ty), mask=wanted)
            step = step + 1
        item = item + 1
        slab = slab * 0


def _tiles(w: Tensor) -> TensorDescriptor:
    """Of matrices below each other."""
    block = [SLAB.value, WIDTH.value]
    kind = gl.float16 if w.dtype == torch.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(block, kind)
    return TensorDescriptor.from_tensor(w.flatten(0, 1), block, layout)


def stream_experts(
    x: Tensor, lists: Tensor, counts: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, k: int,
    kind: str, gate_cap: float, up_cap: float,
) -> Tensor:  # fmt: skip
    """The same as `experts.listed_experts`."""
    (n, L), (E, F, _) = x.shape, w1.shape
    hidden, out = x.new_empty(n * k, F), x.new_empty(n * k, L)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    options = {
        "k": k, "UNIT": kind, "COARSE": x.dtype == torch.bfloat16, "num_warps": 4,
        "EXPERTS": max(32, triton.next_power_of_2(E)), **early(x),
    }  # fmt: skip
    lists_and_caps = lists, counts, gate_cap, up_cap
    programs, stages = UNITS
    stream[(programs * processors,)](
        x, _tiles(w1), _tiles(w3), hidden, n, E, L, F, *lists_and_caps, DOWN=False, STAGES=stages, **options
    )
    programs, stages = DOWNS
    down = _tiles(w2)
    stream[(programs * processors,)](
        hidden, down, down, out, n, E, F, L, *lists_and_caps, DOWN=True, STAGES=stages, **options
    )
    return out
