"""The scan for Hopper (Gluon). Same function as its twin `scan._scan`, bf16, K = 128.

What the twin cannot say: the tiles of a chunk arrive by the copy engine, one or two chunks ahead; and
products that the next chunk does not wait for run while the serial chain goes on:

    chain    S kd^T -> E^T = (v^T - .) X^T -> S diag(decay) + E^T ke -> ...
    beside          S qd^T                           E^T A^T

A warpgroup holds 64 rows of the state. With V = 128 in one program two of them share every tile.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch
from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-untyped]
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore[import-untyped]

CHUNK = gl.constexpr(64)
K = gl.constexpr(128)
WIDE = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16))
SQUARE = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16))


def descriptor(tiles: torch.Tensor) -> TensorDescriptor:
    """For `[NC, H, 64, F]` contiguous, a tile at a time."""
    columns = tiles.shape[-1]
    return TensorDescriptor.from_tensor(
        tiles.view(-1, columns), [64, columns], WIDE.value if columns == 128 else SQUARE.value
    )


@gluon.jit
def _fetch(
    kd, qd, ke, inverse, attention, decay, v, kd_tile, qd_tile, ke_tile, inverse_tile, attention_tile,
    decay_tile, v_tile, ready, chunk, rows, stride_v, BV: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a chunk, with OUTPUT of qd and A too; v from row `rows` on as zeros."""
    mbarrier.expect(ready, (3 if OUTPUT else 2) * CHUNK * K * 2 + (2 if OUTPUT else 1) * CHUNK * CHUNK * 2)
    row = (chunk * CHUNK).to(gl.int32)
    tma.async_copy_global_to_shared(kd, [row, 0], ready, kd_tile)
    tma.async_copy_global_to_shared(inverse, [row, 0], ready, inverse_tile)
    tma.async_copy_global_to_shared(ke, [row, 0], ready, ke_tile)
    if OUTPUT:
        tma.async_copy_global_to_shared(qd, [row, 0], ready, qd_tile)
        tma.async_copy_global_to_shared(attention, [row, 0], ready, attention_tile)
    LANES: gl.constexpr = BV // 8
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, COPY))
    e = gl.arange(0, BV, layout=gl.SliceLayout(0, COPY))
    async_copy.async_copy_global_to_shared(
        v_tile, v + i[:, None] * stride_v + e[None, :], mask=(i < rows)[:, None]
    )
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    d = gl.arange(0, K, layout=FLAT)
    async_copy.async_copy_global_to_shared(decay_tile, decay + chunk * K + d)
    async_copy.commit_group()


@gluon.jit
def scan_hopper(
    v, qd, kd, ke, inverse, attention, decay, initial_state,
    o, final_state, states, errors, checkpoints, checkpoint_of_chunk, cu_seqlens, first_chunk,
    first_piece, piece_sequence, piece_length, stride_vt: gl.constexpr, stride_vh: gl.constexpr,
    H: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, INITIAL: gl.constexpr, STATES: gl.constexpr,
    ERRORS: gl.constexpr, CHECKPOINTS: gl.constexpr, OUTPUT: gl.constexpr, FRAGMENTS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 128, 16]
    )
    ACC_R: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 64, 16]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC_R, 2)
    LEFT_S: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    STATE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    LANES: gl.constexpr = BV // 8
    TOKENS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])

    part, h, p = gl.program_id(0), gl.program_id(1).to(gl.int64), gl.program_id(2).to(gl.int64)
    n = p
    if piece_length is not None:
        n = gl.load(piece_sequence + p).to(gl.int64)
        if n < 0:
            return
    first = gl.load(first_chunk + n).to(gl.int64)
    chunks = (gl.load(first_chunk + n + 1) - first).to(gl.int32)
    start = gl.load(cu_seqlens + n).to(gl.int64)
    length = (gl.load(cu_seqlens + n + 1) - start).to(gl.int32)
    last = True
    if piece_length is not None:
        skipped = (p - gl.load(first_piece + n)).to(gl.int32) * piece_length
        first += skipped
        start += skipped * CHUNK
        length -= skipped * CHUNK
        last = chunks - skipped <= piece_length
        chunks = gl.minimum(chunks - skipped, piece_length)
    if FRAGMENTS:
        if last:
            return
        length = gl.where(part * BV < V, length, 0)  # the identity's rows see no values

    kd_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, K], WIDE)
    ke_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, K], WIDE)
    inverse_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, CHUNK], SQUARE)
    if OUTPUT:
        qd_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, K], WIDE)
        attention_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, CHUNK], SQUARE)
    else:  # stand-ins that nothing touches
        qd_tiles, attention_tiles = kd_tiles, inverse_tiles
    V_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, BV], gl.bfloat16)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, BV], V_TILE)
    decay_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    gl.thread_barrier()

    v += start * stride_vt + h * stride_vh + (part % (V // BV)) * BV
    for s in gl.static_range(STAGES - 1):
        if s < chunks:
            _fetch(
                kd, qd, ke, inverse, attention, decay, v + s * CHUNK * stride_vt,
                kd_tiles.index(s), qd_tiles.index(s), ke_tiles.index(s), inverse_tiles.index(s),
                attention_tiles.index(s), decay_tiles.index(s), v_tiles.index(s), ready.index(s),
                (first + s) * H + h, length - s * CHUNK, stride_vt, BV, OUTPUT,
            )  # fmt: skip
        else:
            async_copy.commit_group()

    e = part * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, STATE))
    d = gl.arange(0, K, layout=gl.SliceLayout(0, STATE))
    tile = e[:, None] * K + d[None, :]
    if FRAGMENTS:
        S = gl.convert_layout(gl.where(e[:, None] - V == d[None, :], 1.0, 0.0), ACC)
    elif INITIAL:
        S = gl.convert_layout(gl.load(initial_state + (p * H + h) * V * K + tile), ACC)
    else:
        S = gl.zeros([BV, K], gl.float32, layout=ACC)

    for c in range(0, chunks):
        stage = c % STAGES
        # Before the copies below overwrite the tiles of the chunk before, every warp is done with them.
        gl.thread_barrier()
        ahead = c + STAGES - 1
        if ahead < chunks:
            slot = ahead % STAGES
            _fetch(
                kd, qd, ke, inverse, attention, decay, v + ahead.to(gl.int64) * CHUNK * stride_vt,
                kd_tiles.index(slot), qd_tiles.index(slot), ke_tiles.index(slot), inverse_tiles.index(slot),
                attention_tiles.index(slot), decay_tiles.index(slot), v_tiles.index(slot), ready.index(slot),
                (first + ahead) * H + h, length - ahead * CHUNK, stride_vt, BV, OUTPUT,
            )  # fmt: skip
        else:
            async_copy.commit_group()
        chunk = (first + c) * H + h
        entering = S.to(gl.bfloat16)
        left = gl.convert_layout(entering, LEFT)
        async_copy.wait_group(STAGES - 1)
        mbarrier.wait(ready.index(stage), (c // STAGES) & 1)
        zero = gl.zeros([BV, CHUNK], gl.float32, layout=ACC_R)
        known = warpgroup_mma(left, kd_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        gl.thread_barrier()  # v and decay, which all threads copied
        values = v_tiles.index(stage).permute((1, 0)).load(ACC_R).to(gl.float32)
        S *= decay_tiles.index(stage).load(gl.SliceLayout(0, ACC))[None, :]
        if STATES:
            gl.store(states + chunk * V * K + tile, gl.convert_layout(entering, STATE))
        known, left = warpgroup_mma_wait(0, deps=(known, left))
        unknown = gl.convert_layout((values - known).to(gl.bfloat16), LEFT)
        E = warpgroup_mma(
            unknown, inverse_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        if OUTPUT:
            out = warpgroup_mma(
                left, qd_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            E, unknown = warpgroup_mma_wait(1, deps=(E, unknown))
        else:
            E, unknown = warpgroup_mma_wait(0, deps=(E, unknown))
        E = E.to(gl.bfloat16)
        left_E = gl.convert_layout(E, LEFT)
        written = gl.convert_layout(E, LEFT_S)
        S = warpgroup_mma(written, ke_tiles.index(stage), S, is_async=True)
        if OUTPUT:
            out = warpgroup_mma(left_E, attention_tiles.index(stage).permute((1, 0)), out, is_async=True)
        i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, TOKENS))
        f = part * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, TOKENS))
        if ERRORS:
            rows = gl.convert_layout(gl.permute(E, (1, 0)), TOKENS)
            gl.store(errors + chunk * CHUNK * V + i[:, None] * V + f[None, :], rows)
        if OUTPUT:
            out, S, left, left_E, written = warpgroup_mma_wait(0, deps=(out, S, left, left_E, written))
            rows = gl.convert_layout(gl.permute(out.to(gl.bfloat16), (1, 0)), TOKENS)
            gl.store(
                o + ((start + c * CHUNK + i)[:, None] * H + h) * V + f[None, :],
                rows,
                mask=(c * CHUNK + i < length)[:, None],
            )
        else:
            S, written = warpgroup_mma_wait(0, deps=(S, written))
        if CHECKPOINTS:
            m = gl.load(checkpoint_of_chunk + first + c).to(gl.int64)
            if m >= 0:
                gl.store(checkpoints + (m * H + h) * V * K + tile, gl.convert_layout(S, STATE))
    if FRAGMENTS:
        gl.store(final_state + (p * H + h) * (V + K) * K + tile, gl.convert_layout(S, STATE))
    elif last:
        gl.store(final_state + (n * H + h) * V * K + tile, gl.convert_layout(S, STATE))
