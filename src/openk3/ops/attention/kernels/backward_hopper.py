"""The backward's two large kernels for Hopper (Gluon), for bf16 and the released head sizes: 128 + 64, 128.

Same functions as their twins in `backward`, same order of sums. What the twins cannot say: the second product
of the scores does not wait for the first, d_o V^T runs while exponentials are taken, and products with keys'
gradients run on into the next step.

Every operand is a box of a matrix `[T, columns]`, in which a head is a range of columns.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-untyped]
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore[import-untyped]

from openk3.ops.attention.kernels.blocks import place
from openk3.ops.triton_math import short_exp2

K = gl.constexpr(128)  # and V
SHARED = gl.constexpr(64)
DTYPE = gl.constexpr(gl.bfloat16)


def boxes(x: torch.Tensor, tokens: int, columns: int) -> TensorDescriptor:
    """Boxes of an aligned `x` `[T, H, D]` or `[T, D]`, seen as a matrix with a row for each token."""
    width = sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True)) + 1
    return TensorDescriptor(x, [len(x), width], [x.stride(0), 1], [tokens, columns], _layout(tokens, columns))


@functools.cache
def _layout(tokens: int, columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([tokens, columns], gl.bfloat16)


@gluon.jit
def _fetch(wide, narrow, other, wide_tile, narrow_tile, other_tile, ready, t, at, at_narrow, at_other):
    """Starts the copies of one stage: channels of the head's own, shared ones, and those of values or d_o."""
    mbarrier.expect(ready, wide.block_type.nbytes + narrow.block_type.nbytes + other.block_type.nbytes)
    tma.async_copy_global_to_shared(wide, [t, at], ready, wide_tile)
    tma.async_copy_global_to_shared(narrow, [t, at_narrow], ready, narrow_tile)
    tma.async_copy_global_to_shared(other, [t, at_other], ready, other_tile)


@gluon.jit(do_not_specialize=["Tq"])
def key_backward_hopper(
    q, q_shared, own, own_shared, d_o, lse, delta, cu_seqlens_q, cu_seqlens_k, table, d_kv, d_shared,
    factor, scale, q_head, kv_head, Tq, H, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `key_backward`."""
    slot, h = gl.program_id(0), gl.program_id(1)
    if gl.load(table + 2 * slot) < 0:
        return
    WARPS: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SHARED, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    LEFT_NARROW: gl.constexpr = gl.DotOperandLayout(0, NARROW, 2)

    block, first_q, n_q, first_k, n_k = place(table, slot, cu_seqlens_q, cu_seqlens_k)
    block = (n_k + KEYS - 1) // KEYS - 1 - block  # the first keys are seen by the most queries
    ahead = n_k - n_q
    begin = gl.maximum(block * KEYS - ahead, 0) // ROWS * ROWS
    steps = (gl.maximum(n_q - begin, 0) + ROWS - 1) // ROWS
    t_q, t_k = (first_q + begin).to(gl.int32), (first_k + block * KEYS).to(gl.int32)
    lse += h.to(gl.int64) * Tq + first_q
    delta += h.to(gl.int64) * Tq + first_q

    own_k = gl.allocate_shared_memory(DTYPE, [KEYS, K], own.layout)
    own_v = gl.allocate_shared_memory(DTYPE, [KEYS, K], own.layout)
    own_s = gl.allocate_shared_memory(DTYPE, [KEYS, SHARED], own_shared.layout)
    q_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, K], q.layout)
    s_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, SHARED], q_shared.layout)
    d_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, K], d_o.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES + 1):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    gl.thread_barrier()

    mbarrier.expect(ready.index(STAGES), 2 * own.block_type.nbytes + own_shared.block_type.nbytes)
    tma.async_copy_global_to_shared(own, [t_k, h * kv_head], ready.index(STAGES), own_k)
    tma.async_copy_global_to_shared(own, [t_k, h * kv_head + K], ready.index(STAGES), own_v)
    tma.async_copy_global_to_shared(own_shared, [t_k, 0], ready.index(STAGES), own_s)
    for s in gl.static_range(STAGES - 1):
        if s < steps:
            _fetch(
                q, q_shared, d_o, q_tiles.index(s), s_tiles.index(s), d_tiles.index(s), ready.index(s),
                t_q + s * ROWS, h * q_head, h * q_head + K, h * K,
            )  # fmt: skip
    mbarrier.wait(ready.index(STAGES), 0)

    key = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, SCORES))
    dK = warpgroup_mma_init(gl.zeros([KEYS, K], gl.float32, layout=WIDE))
    dV = warpgroup_mma_init(gl.zeros([KEYS, K], gl.float32, layout=WIDE))
    dK_shared = warpgroup_mma_init(gl.zeros([KEYS, SHARED], gl.float32, layout=NARROW))
    zero = gl.zeros([KEYS, ROWS], gl.float32, layout=SCORES)
    for i in range(0, steps):
        stage = i % STAGES
        row = begin + i * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, SCORES))
        row_lse = gl.load(lse + row, mask=row < n_q, other=float("inf"))
        row_delta = gl.load(delta + row, mask=row < n_q, other=0.0)
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        Q, Q_shared, D = q_tiles.index(stage), s_tiles.index(stage), d_tiles.index(stage)
        S = warpgroup_mma(own_k, Q.permute((1, 0)), zero, use_acc=False, is_async=True)
        S = warpgroup_mma(own_s, Q_shared.permute((1, 0)), S, is_async=True)
        dP = warpgroup_mma(own_v, D.permute((1, 0)), zero, use_acc=False, is_async=True)
        S = warpgroup_mma_wait(1, deps=(S,))
        # All products of the step before are done too, so that its stage may be written again.
        gl.thread_barrier()
        later = i + STAGES - 1
        if later < steps:
            slot_ = later % STAGES
            _fetch(
                q, q_shared, d_o, q_tiles.index(slot_), s_tiles.index(slot_), d_tiles.index(slot_),
                ready.index(slot_), t_q + later * ROWS, h * q_head, h * q_head + K, h * K,
            )  # fmt: skip
        P = short_exp2(S * factor - row_lse[None, :])
        P = gl.where(key[:, None] <= row[None, :] + ahead, P, 0.0)
        weights = gl.convert_layout(P.to(DTYPE), LEFT)
        dV = warpgroup_mma(weights, D, dV, is_async=True)
        dP = warpgroup_mma_wait(1, deps=(dP,))
        dS = (P * (dP - row_delta[None, :])).to(DTYPE)
        dK = warpgroup_mma(gl.convert_layout(dS, LEFT), Q, dK, is_async=True)
        dK_shared = warpgroup_mma(gl.convert_layout(dS, LEFT_NARROW), Q_shared, dK_shared, is_async=True)
    dK, dV, dK_shared = warpgroup_mma_wait(0, deps=(dK, dV, dK_shared))

    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    token = first_k + block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, OUT))
    inside = (token < first_k + n_k)[:, None]
    c = gl.arange(0, K, layout=gl.SliceLayout(0, OUT))
    to = d_kv + (token[:, None] * H + h) * (2 * K) + c[None, :]
    gl.store(to, gl.convert_layout((dK * scale).to(DTYPE), OUT), mask=inside)
    gl.store(to + K, gl.convert_layout(dV.to(DTYPE), OUT), mask=inside)
    c_shared = gl.arange(0, SHARED, layout=gl.SliceLayout(0, OUT))
    to = d_shared + (token[:, None] * H + h) * SHARED + c_shared[None, :]
    gl.store(to, gl.convert_layout(dK_shared * scale, OUT), mask=inside)


@gluon.jit(do_not_specialize=["Tq"])
def query_backward_hopper(
    own, own_shared, own_d_o, kv, shared, lse, delta, cu_seqlens_q, cu_seqlens_k, table, d_q,
    factor, scale, q_head, kv_head, Tq, H, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `query_backward`."""
    slot, h = gl.program_id(0), gl.program_id(1)
    if gl.load(table + 2 * slot) < 0:
        return
    WARPS: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SHARED, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    LEFT_NARROW: gl.constexpr = gl.DotOperandLayout(0, NARROW, 2)

    block, first_q, n_q, first_k, n_k = place(table, slot, cu_seqlens_q, cu_seqlens_k)
    ahead = n_k - n_q
    end = gl.minimum((block + 1) * ROWS, n_q) + ahead  # keys that the last query of the block sees
    steps = (gl.maximum(end, 0) + KEYS - 1) // KEYS
    t_q, t_k = (first_q + block * ROWS).to(gl.int32), first_k.to(gl.int32)

    own_q = gl.allocate_shared_memory(DTYPE, [ROWS, K], own.layout)
    own_s = gl.allocate_shared_memory(DTYPE, [ROWS, SHARED], own_shared.layout)
    own_d = gl.allocate_shared_memory(DTYPE, [ROWS, K], own_d_o.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, K], kv.layout)
    s_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, SHARED], shared.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, K], kv.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES + 1):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    gl.thread_barrier()

    _fetch(
        own, own_shared, own_d_o, own_q, own_s, own_d, ready.index(STAGES),
        t_q, h * q_head, h * q_head + K, h * K,
    )  # fmt: skip
    for s in gl.static_range(STAGES - 1):
        if s < steps:
            _fetch(
                kv, shared, kv, k_tiles.index(s), s_tiles.index(s), v_tiles.index(s), ready.index(s),
                t_k + s * KEYS, h * kv_head, 0, h * kv_head + K,
            )  # fmt: skip
    row = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    of_head = h.to(gl.int64) * Tq + first_q + row
    row_lse = gl.load(lse + of_head, mask=row < n_q, other=float("inf"))
    row_delta = gl.load(delta + of_head, mask=row < n_q, other=0.0)
    mbarrier.wait(ready.index(STAGES), 0)

    dQ = gl.zeros([ROWS, K], gl.float32, layout=WIDE)
    dQ_shared = gl.zeros([ROWS, SHARED], gl.float32, layout=NARROW)
    zero = gl.zeros([ROWS, KEYS], gl.float32, layout=SCORES)
    for i in range(0, steps):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        Kt, Ks, Vt = k_tiles.index(stage), s_tiles.index(stage), v_tiles.index(stage)
        S = warpgroup_mma(own_q, Kt.permute((1, 0)), zero, use_acc=False, is_async=True)
        S = warpgroup_mma(own_s, Ks.permute((1, 0)), S, is_async=True)
        dP = warpgroup_mma(own_d, Vt.permute((1, 0)), zero, use_acc=False, is_async=True)
        S = warpgroup_mma_wait(1, deps=(S,))
        # Every warp is done with the step before, so that its stage may be written again.
        gl.thread_barrier()
        later = i + STAGES - 1
        if later < steps:
            slot_ = later % STAGES
            _fetch(
                kv, shared, kv, k_tiles.index(slot_), s_tiles.index(slot_), v_tiles.index(slot_),
                ready.index(slot_), t_k + later * KEYS, h * kv_head, 0, h * kv_head + K,
            )  # fmt: skip
        P = short_exp2(S * factor - row_lse[:, None])
        key = i * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        P = gl.where(key[None, :] <= row[:, None] + ahead, P, 0.0)
        dP = warpgroup_mma_wait(0, deps=(dP,))
        dS = (P * (dP - row_delta[:, None])).to(DTYPE)
        dQ = warpgroup_mma(gl.convert_layout(dS, LEFT), Kt, dQ, is_async=True)
        dQ_shared = warpgroup_mma(gl.convert_layout(dS, LEFT_NARROW), Ks, dQ_shared, is_async=True)
        # Left running into the next step, ptxas 12.8 would make all products wait for each other (C7515).
        dQ, dQ_shared = warpgroup_mma_wait(0, deps=(dQ, dQ_shared))

    # As they lie in registers: shared memory has no room left to turn them around.
    own_row = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
    c = gl.arange(0, K, layout=gl.SliceLayout(0, WIDE))
    to = d_q + ((first_q + own_row)[:, None] * H + h) * (K + SHARED) + c[None, :]
    gl.store(to, (dQ * scale).to(DTYPE), mask=(own_row < n_q)[:, None])
    own_row = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, NARROW))
    c = gl.arange(0, SHARED, layout=gl.SliceLayout(0, NARROW))
    to = d_q + ((first_q + own_row)[:, None] * H + h) * (K + SHARED) + K + c[None, :]
    gl.store(to, (dQ_shared * scale).to(DTYPE), mask=(own_row < n_q)[:, None])
