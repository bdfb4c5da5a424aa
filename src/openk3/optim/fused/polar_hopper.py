"""Newton-Schulz for Hopper (Gluon): one program takes one matrix through all iterations, in place.

For matrices with an edge of 256, as experts have them. By `newton_schulz._iterate_chunk` A = X X^T and the
polynomial go through memory, and three programs a product read the same X again; here X alone does:

    A    in registers from X, in shared memory as bf16     three blocks of 128 x 128, the fourth is a mirror
    P    a I + b A + c A^2, in A's place
    X    P X, chunk by chunk of 64 along the long side, in its own place in memory

Chunks are taken upwards for A and downwards for X: at each turn the last four are still in shared memory,
so that of seven chunks three are read again. What is beyond the long side's end is zero, and not stored.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

from functools import lru_cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openk3.optim.newton_schulz import Triples

Tensor = torch.Tensor

EDGE = 256
HALF = gl.constexpr(128)
LONG = gl.constexpr(64)
SLOTS = gl.constexpr(4)  # chunks in shared memory: 128 KB, beside 96 KB of A
WARPS = 8


@gluon.jit
def _written():
    """Waits until what this thread stored by the copy engine can be read back by it."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;",
        "=r,~{memory}",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _tile(tiles, slot, TALL: gl.constexpr):
    """Half a chunk as `[LONG, HALF]`, whichever way round it lies."""
    if TALL:
        return tiles.index(slot).reshape([LONG, HALF])
    else:  # noqa: RET505  (Triton compiles what follows a return)
        return tiles.index(slot).reshape([HALF, LONG]).permute((1, 0))


@gluon.jit
def _fetch(x, left, right, ready, matrix, c, wanted, TALL: gl.constexpr):
    """Starts the copy of chunk c if `wanted`."""
    slot = c % SLOTS
    at = c * LONG
    mbarrier.expect(ready.index(slot), 2 * LONG * HALF * 2, wanted)
    if TALL:
        tma.async_copy_global_to_shared(x, [matrix, at, 0], ready.index(slot), left.index(slot), wanted)
        tma.async_copy_global_to_shared(x, [matrix, at, HALF], ready.index(slot), right.index(slot), wanted)
    else:
        tma.async_copy_global_to_shared(x, [matrix, 0, at], ready.index(slot), left.index(slot), wanted)
        tma.async_copy_global_to_shared(x, [matrix, HALF, at], ready.index(slot), right.index(slot), wanted)


@gluon.jit
def _replace(x, left, right, matrix, c, new_left, new_right, TALL: gl.constexpr):
    """Puts a chunk's new values in its place in shared memory, and starts the copy from there."""
    slot = c % SLOTS
    at = c * LONG
    _tile(left, slot, TALL).store(new_left)
    _tile(right, slot, TALL).store(new_right)
    fence_async_shared()
    gl.thread_barrier()
    if TALL:
        tma.async_copy_shared_to_global(x, [matrix, at, 0], left.index(slot))
        tma.async_copy_shared_to_global(x, [matrix, at, HALF], right.index(slot))
    else:
        tma.async_copy_shared_to_global(x, [matrix, 0, at], left.index(slot))
        tma.async_copy_shared_to_global(x, [matrix, HALF, at], right.index(slot))


@gluon.jit
def _wait(ready, c, turn, CHUNKS: gl.constexpr):
    """Waits for chunk c. A turn visits a slot's chunks in its direction, and copies all but the first."""
    slot = c % SLOTS
    chunks = (CHUNKS - slot + SLOTS - 1) // SLOTS
    visit = c // SLOTS
    if turn % 2 == 1:
        visit = chunks - 1 - visit
    mbarrier.wait(ready.index(slot), (turn * (chunks - 1) + visit) & 1)


@gluon.jit
def _polynomial(block, square, a, b, c, DIAGONAL: gl.constexpr, LAYOUT: gl.constexpr):
    """a I + b A + c A^2 of a block of A."""
    total = c * square + b * block.load(LAYOUT).to(gl.float32)
    if DIAGONAL:
        row = gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
        column = gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
        total = gl.where(row[:, None] == column[None, :], total + a, total)
    return total.to(block.dtype)


@gluon.jit
def polar_hopper(x, triples, iterations, CHUNKS: gl.constexpr, TALL: gl.constexpr):
    """x: `[m, R, C]` in boxes of half a chunk. triples: fp32 `[iterations, 3]`."""
    TYPE: gl.constexpr = x.dtype
    SQUARE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, HALF, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HALF // 2, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, HALF], TYPE)
    BOX: gl.constexpr = [SLOTS, 1, x.block_type.shape[1], x.block_type.shape[2]]
    matrix = gl.program_id(0)

    left = gl.allocate_shared_memory(TYPE, BOX, x.layout)
    right = gl.allocate_shared_memory(TYPE, BOX, x.layout)
    blocks = gl.allocate_shared_memory(TYPE, [3, HALF, HALF], BLOCK)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(SLOTS):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    gl.thread_barrier()
    for s in gl.static_range(SLOTS):
        _fetch(x, left, right, ready, matrix, s, True, TALL)  # no matrix has fewer chunks
    A00, A10, A11 = blocks.index(0), blocks.index(1), blocks.index(2)
    nothing = gl.zeros([HALF, HALF], gl.float32, layout=SQUARE)
    none = gl.zeros([LONG, HALF], gl.float32, layout=OUT)

    for i in range(iterations):
        s00, s10, s11 = nothing, nothing, nothing
        for c in range(CHUNKS):
            _wait(ready, c, 2 * i, CHUNKS)
            X0, X1 = _tile(left, c % SLOTS, TALL), _tile(right, c % SLOTS, TALL)
            s00 = warpgroup_mma(X0.permute((1, 0)), X0, s00, is_async=True)
            s10 = warpgroup_mma(X1.permute((1, 0)), X0, s10, is_async=True)
            s11 = warpgroup_mma(X1.permute((1, 0)), X1, s11, is_async=True)
            s00, s10, s11 = warpgroup_mma_wait(3, deps=(s00, s10, s11))
            # Every warp is done with the chunk before; its new values, if any, are in memory.
            gl.thread_barrier()
            _written()
            later = c - 1 + SLOTS
            _fetch(x, left, right, ready, matrix, later, (c > 0) & (later < CHUNKS), TALL)
        s00, s10, s11 = warpgroup_mma_wait(0, deps=(s00, s10, s11))

        A00.store(s00.to(TYPE))
        A10.store(s10.to(TYPE))
        A11.store(s11.to(TYPE))
        fence_async_shared()
        gl.thread_barrier()
        a = gl.load(triples + 3 * i)
        b = gl.load(triples + 3 * i + 1)
        c2 = gl.load(triples + 3 * i + 2)
        s00 = warpgroup_mma(A00, A00, s00, use_acc=False, is_async=True)
        s00 = warpgroup_mma(A10.permute((1, 0)), A10, s00, is_async=True)
        s10 = warpgroup_mma(A10, A00, s10, use_acc=False, is_async=True)
        s10 = warpgroup_mma(A11, A10, s10, is_async=True)
        s11 = warpgroup_mma(A10, A10.permute((1, 0)), s11, use_acc=False, is_async=True)
        s11 = warpgroup_mma(A11, A11, s11, is_async=True)
        # A block is made beside the products of those behind it, but they read all of A.
        s00 = warpgroup_mma_wait(4, deps=(s00,))
        P00 = _polynomial(A00, s00, a, b, c2, True, SQUARE)
        s10 = warpgroup_mma_wait(2, deps=(s10,))
        P10 = _polynomial(A10, s10, a, b, c2, False, SQUARE)
        s11 = warpgroup_mma_wait(0, deps=(s11,))
        P11 = _polynomial(A11, s11, a, b, c2, True, SQUARE)
        gl.thread_barrier()
        A00.store(P00)
        A10.store(P10)
        A11.store(P11)
        fence_async_shared()
        gl.thread_barrier()

        new0 = none.to(TYPE)
        new1 = none.to(TYPE)
        for k in range(CHUNKS):
            c = CHUNKS - 1 - k
            _wait(ready, c, 2 * i + 1, CHUNKS)
            X0 = _tile(left, c % SLOTS, TALL).load(LEFT)
            X1 = _tile(right, c % SLOTS, TALL).load(LEFT)
            y0 = warpgroup_mma(X0, A00, none, use_acc=False, is_async=True)
            y1 = warpgroup_mma(X0, A10.permute((1, 0)), none, use_acc=False, is_async=True)
            y0 = warpgroup_mma(X1, A10, y0, is_async=True)
            y1 = warpgroup_mma(X1, A11, y1, is_async=True)
            # Beside the products: the chunk two before has left its slot, the one before takes its place.
            tma.store_wait(0)
            later = c + 2 - SLOTS
            _fetch(x, left, right, ready, matrix, later, (k > 1) & (later >= 0), TALL)
            if k > 0:
                _replace(x, left, right, matrix, c + 1, new0, new1, TALL)
            y0, y1, X0, X1 = warpgroup_mma_wait(0, deps=(y0, y1, X0, X1))
            new0 = y0.to(TYPE)
            new1 = y1.to(TYPE)
            gl.thread_barrier()  # every warp has loaded what these replace
        _replace(x, left, right, matrix, 0, new0, new1, TALL)
    tma.store_wait(0)


def takes(x: Tensor) -> bool:
    """Whether `polar_` can: bf16 `[m, R, C]` on a Hopper GPU whose shorter side is 256."""
    return (
        x.is_cuda
        and torch.cuda.get_device_capability(x.device) == (9, 0)
        and x.dtype == torch.bfloat16
        and x.is_contiguous()
        and min(x.shape[1:]) == EDGE
        and x.shape[2] % 8 == 0
        and x.data_ptr() % 16 == 0
    )


@lru_cache
def _table(triples: Triples, device: torch.device) -> Tensor:
    return torch.tensor(triples, dtype=torch.float32, device=device)


def polar_(x: Tensor, triples: Triples) -> None:
    """As `newton_schulz.iterate_`, of what `takes` allows."""
    tall = x.shape[1] > x.shape[2]
    box = [1, LONG.value, HALF.value] if tall else [1, HALF.value, LONG.value]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
    chunks = triton.cdiv(max(x.shape[1:]), LONG.value)
    polar_hopper[(len(x),)](
        TensorDescriptor.from_tensor(x, box, layout), _table(triples, x.device), len(triples),
        CHUNKS=chunks, TALL=tall, num_warps=WARPS,
    )  # fmt: skip
