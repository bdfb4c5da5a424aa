"""The forward pass for Hopper (Gluon), for bf16 and the released head sizes: 128 + 64 and 128.

Same function as its twin in `forward`. What the twin cannot say: scores of the next tile are under way before
the values of the last one are added up, and that runs while exponentials are taken.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-untyped]
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openk3.ops.attention.kernels.backward_hopper import DTYPE, SHARED, K
from openk3.ops.attention.kernels.blocks import place
from openk3.ops.triton_math import short_exp2, short_sigmoid


@gluon.jit
def _fetch_keys(kv, shared, tile, shared_tile, ready, t, at):
    mbarrier.expect(ready, kv.block_type.nbytes + shared.block_type.nbytes)
    tma.async_copy_global_to_shared(kv, [t, at], ready, tile)
    tma.async_copy_global_to_shared(shared, [t, 0], ready, shared_tile)


@gluon.jit
def _fetch_values(kv, tile, ready, t, at):
    mbarrier.expect(ready, kv.block_type.nbytes)
    tma.async_copy_global_to_shared(kv, [t, at], ready, tile)


@gluon.jit
def _blank(tile, start, n_k, KEYS: gl.constexpr):
    """Zero for what lies behind the sequence: weights of zero would not undo a NaN there."""
    if start + KEYS > n_k:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
        key = start + gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
        kept = gl.where((key < n_k)[:, None], tile.load(LAYOUT), 0.0)
        gl.thread_barrier()
        tile.store(kept.to(DTYPE))
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def _softmax(S, m, start, row, whole, n_k, ahead, factor, KEYS: gl.constexpr, SCORES: gl.constexpr):
    """Weights under the new largest logits, those, and the decay of what was summed before."""
    if start + KEYS > whole:
        key = start + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        seen = (key[None, :] <= row[:, None] + ahead) & (key[None, :] < n_k)
        S = gl.where(seen, S, float("-inf"))
    largest = gl.maximum(m, gl.max(S, 1))
    shift = gl.where(largest == float("-inf"), 0.0, largest) * factor
    return short_exp2(S * factor - shift[:, None]), largest, short_exp2(m * factor - shift)


@gluon.jit(do_not_specialize=["Tq"])
def attention_forward_hopper(
    own, own_shared, kv, shared, gate, cu_seqlens_q, cu_seqlens_k, table, y, o, lse, largest, factor, scale,
    q_head, kv_head, gate_token, gate_head, Tq, H, GATED: gl.constexpr, KEEP: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `attention_forward`."""
    slot, h = gl.program_id(0), gl.program_id(1)
    if gl.load(table + 2 * slot) < 0:
        gl.store(largest + slot * H + h, float("-inf"))
        return
    WARPS: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, WIDE)

    block, first_q, n_q, first_k, n_k = place(table, slot, cu_seqlens_q, cu_seqlens_k)
    ahead = n_k - n_q
    whole = gl.minimum(block * ROWS + 1 + ahead, n_k)  # keys that every query of the block sees
    end = gl.minimum((block + 1) * ROWS, n_q) + ahead  # and those that its last query sees
    steps = gl.maximum((gl.maximum(end, 0) + KEYS - 1) // KEYS, 1)
    t_q, t_k = (first_q + block * ROWS).to(gl.int32), first_k.to(gl.int32)

    own_q = gl.allocate_shared_memory(DTYPE, [ROWS, K], own.layout)
    own_s = gl.allocate_shared_memory(DTYPE, [ROWS, SHARED], own_shared.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, K], kv.layout)
    s_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, SHARED], shared.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, K], kv.layout)
    # Of q; keys; values: the last values are wanted a step after the last keys.
    ready = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 1, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(2 * STAGES + 1):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    gl.thread_barrier()

    mbarrier.expect(ready.index(2 * STAGES), own.block_type.nbytes + own_shared.block_type.nbytes)
    tma.async_copy_global_to_shared(own, [t_q, h * q_head], ready.index(2 * STAGES), own_q)
    tma.async_copy_global_to_shared(own_shared, [t_q, h * q_head + K], ready.index(2 * STAGES), own_s)
    at_k, at_v = h * kv_head, h * kv_head + K
    for s in gl.static_range(STAGES):
        if s < steps:
            t = t_k + s * KEYS
            _fetch_keys(kv, shared, k_tiles.index(s), s_tiles.index(s), ready.index(s), t, at_k)
            _fetch_values(kv, v_tiles.index(s), ready.index(STAGES + s), t, at_v)
    row = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    mbarrier.wait(ready.index(2 * STAGES), 0)
    mbarrier.wait(ready.index(0), 0)

    zero = gl.zeros([ROWS, KEYS], gl.float32, layout=SCORES)
    S = warpgroup_mma(own_q, k_tiles.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    S = warpgroup_mma(own_s, s_tiles.index(0).permute((1, 0)), S, is_async=True)
    S = warpgroup_mma_wait(0, deps=(S,))
    gl.thread_barrier()
    if STAGES < steps:
        t = t_k + STAGES * KEYS
        _fetch_keys(kv, shared, k_tiles.index(0), s_tiles.index(0), ready.index(0), t, at_k)
    m = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    P, m, _ = _softmax(S, m, 0, row, whole, n_k, ahead, factor, KEYS, SCORES)
    total = gl.sum(P, 1)
    weights = gl.convert_layout(P.to(DTYPE), LEFT)
    acc = gl.zeros([ROWS, K], gl.float32, layout=WIDE)
    for i in range(1, steps):
        stage, before = i % STAGES, (i - 1) % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        S = warpgroup_mma(own_q, k_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        S = warpgroup_mma(own_s, s_tiles.index(stage).permute((1, 0)), S, is_async=True)
        mbarrier.wait(ready.index(STAGES + before), ((i - 1) // STAGES) & 1)
        summed = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
        S = warpgroup_mma_wait(1, deps=(S,))
        P, m, decay = _softmax(S, m, i * KEYS, row, whole, n_k, ahead, factor, KEYS, SCORES)
        total = total * decay + gl.sum(P, 1)
        summed, weights = warpgroup_mma_wait(0, deps=(summed, weights))
        # Every warp is done with these keys, and with the values before them.
        gl.thread_barrier()
        later = i + STAGES
        if later < steps:
            t = t_k + later * KEYS
            _fetch_keys(kv, shared, k_tiles.index(stage), s_tiles.index(stage), ready.index(stage), t, at_k)
        if later - 1 < steps:
            t = t_k + (later - 1) * KEYS
            _fetch_values(kv, v_tiles.index(before), ready.index(STAGES + before), t, at_v)
        acc = summed * gl.convert_layout(decay, ROW)[:, None]
        weights = gl.convert_layout(P.to(DTYPE), LEFT)
    stage = (steps - 1) % STAGES
    mbarrier.wait(ready.index(STAGES + stage), ((steps - 1) // STAGES) & 1)
    _blank(v_tiles.index(stage), (steps - 1) * KEYS, n_k, KEYS)
    acc = warpgroup_mma(weights, v_tiles.index(stage), acc, is_async=True)
    acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))

    any_nan = gl.max(gl.where((total != total) & (row < n_q), 1, 0), 0)  # gl.max passes NaN over
    most = scale * gl.max(gl.where(row < n_q, m, float("-inf")), 0)
    gl.store(largest + slot * H + h, gl.where(any_nan == 1, float("nan"), most))
    blind = total == 0.0
    total = gl.where(blind, 1.0, total)
    acc = acc / gl.convert_layout(total, ROW)[:, None]
    own_row = block * ROWS + gl.arange(0, ROWS, layout=ROW)
    inside = (own_row < n_q)[:, None]
    c = gl.arange(0, K, layout=gl.SliceLayout(0, WIDE))
    token = (first_q + own_row)[:, None]
    at = (token * H + h) * K + c[None, :]
    if KEEP:
        gl.store(o + at, acc, mask=inside)
        log_sum = gl.where(blind, float("inf"), m * factor + gl.log2(total))
        gl.store(lse + h.to(gl.int64) * Tq + first_q + row, log_sum, mask=row < n_q)
    if GATED:
        at_gate = gate + token * gate_token + h.to(gl.int64) * gate_head + c[None, :]
        acc *= short_sigmoid(gl.load(at_gate, mask=inside, other=0.0).to(gl.float32))
    gl.store(y + at, acc.to(DTYPE), mask=inside)
