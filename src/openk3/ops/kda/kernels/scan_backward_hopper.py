"""The reverse scan for Hopper (Gluon). Same as its twin `scan_backward._scan_backward`, bf16, K = V = 128.

As in `scan_hopper`, the copy engine brings the tiles of a chunk one or two chunks ahead, and products that
the chain does not wait for run beside it. `leaving` is dS as it comes from the later chunk, D the values'
gradient:

    chain    leaving ke^T -> D^T = (. + dO^T A) X -> dS - D^T kd -> ...
    beside   dO^T A          dS diag(decay) + dO^T qd

dO of the next chunk goes to registers while D^T kd runs, so that dO^T A is under way before dS is known.

Only the last chunk of a sequence may have fewer than CHUNK tokens. It is the first here, of the sequence or
of its last piece: the dO that a program begins with is read under a mask before the loop, and the copies in
the loop are of whole chunks.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch
from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-untyped]
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore[import-untyped]

from openk3.ops.kda.kernels.scan_hopper import CHUNK, SQUARE, WIDE, K

ROW = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2))


def decay_descriptor(decay: torch.Tensor) -> TensorDescriptor:
    """For `[NC, H, K]` fp32, a row at a time."""
    return TensorDescriptor.from_tensor(decay.view(-1, K.value), [1, K.value], ROW.value)


def token_descriptor(x: torch.Tensor, columns: int) -> TensorDescriptor:
    """For `[T, H, V]` bf16 contiguous, CHUNK tokens by `columns` of one head at a time."""
    return TensorDescriptor.from_tensor(
        x.flatten(1), [CHUNK.value, columns], WIDE.value if columns == 128 else SQUARE.value
    )


@gluon.jit
def _fetch(
    qd, kd, ke, inverse, attention, decay, d_o, qd_tile, kd_tile, ke_tile, inverse_tile, attention_tile,
    decay_tile, dO_tile, ready, chunk, token, column, wanted, BV: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a chunk if `wanted`, with TOKENS those of its dO too."""
    mbarrier.expect(
        ready, 3 * CHUNK * K * 2 + 2 * CHUNK * CHUNK * 2 + K * 4 + (CHUNK * BV * 2 if TOKENS else 0), wanted
    )
    row = (chunk * CHUNK).to(gl.int32)
    tma.async_copy_global_to_shared(ke, [row, 0], ready, ke_tile, wanted)
    tma.async_copy_global_to_shared(decay, [chunk.to(gl.int32), 0], ready, decay_tile, wanted)
    tma.async_copy_global_to_shared(inverse, [row, 0], ready, inverse_tile, wanted)
    tma.async_copy_global_to_shared(qd, [row, 0], ready, qd_tile, wanted)
    tma.async_copy_global_to_shared(kd, [row, 0], ready, kd_tile, wanted)
    tma.async_copy_global_to_shared(attention, [row, 0], ready, attention_tile, wanted)
    if TOKENS:
        tma.async_copy_global_to_shared(d_o, [token.to(gl.int32), column], ready, dO_tile, wanted)


@gluon.jit
def scan_backward_hopper(
    d_o, d_o_tiled, qd, kd, ke, inverse, attention, decay, d_final_state,
    d_v, d_states, d_initial_state, cu_seqlens, first_chunk, first_piece, piece_sequence, piece_length,
    H: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, FINAL: gl.constexpr,
    FRAGMENTS: gl.constexpr, STAGES: gl.constexpr,
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
    # Each warp has its rows of ACC: values change lanes only within four, and a lane holds 16 bytes in a row.
    STATE: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]] if BV == 64 else [[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[BV, K],
    )
    COLUMNS: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2, transposed=True)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
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
    skipped = 0
    ends = True
    if piece_length is not None:
        skipped = (p - gl.load(first_piece + n)).to(gl.int32) * piece_length
        first += skipped
        start += skipped * CHUNK
        length -= skipped * CHUNK
        ends = chunks - skipped <= piece_length
        chunks = gl.minimum(chunks - skipped, piece_length)
    if FRAGMENTS and skipped == 0:
        return
    last = gl.maximum(chunks - 1, 0)
    column = (h * V + part * BV).to(gl.int32)

    qd_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, K], WIDE)
    kd_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, K], WIDE)
    ke_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, K], WIDE)
    inverse_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, CHUNK], SQUARE)
    attention_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, CHUNK], SQUARE)
    dO_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, BV], WIDE if BV == 128 else SQUARE)
    decay_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, K], ROW)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    gl.thread_barrier()
    for s in gl.static_range(STAGES - 1):
        _fetch(
            qd, kd, ke, inverse, attention, decay, d_o_tiled, qd_tiles.index(s), kd_tiles.index(s),
            ke_tiles.index(s), inverse_tiles.index(s), attention_tiles.index(s), decay_tiles.index(s),
            dO_tiles.index(s), ready.index(s), (first + last - s) * H + h, start + (last - s) * CHUNK,
            column, s < chunks, BV, s > 0,
        )  # fmt: skip

    e = part * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, ACC))
    d = gl.arange(0, K, layout=gl.SliceLayout(0, ACC))
    of_sequence = (n * H + h) * V * K + e[:, None] * K + d[None, :]
    of_piece = (p * H + h) * V * K + e[:, None] * K + d[None, :]
    if FINAL and FRAGMENTS:
        dS = gl.load(d_final_state + of_sequence, mask=ends, other=0.0)
    elif FINAL:
        dS = gl.load(d_final_state + of_piece)
    else:
        dS = gl.zeros([BV, K], gl.float32, layout=ACC)
    i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, TOKENS))
    f = part * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, TOKENS))
    values = gl.load(
        d_o + ((start + last * CHUNK + i)[:, None] * H + h) * V + f[None, :],
        mask=(last * CHUNK + i < length)[:, None],
        other=0.0,
    )
    dO = gl.convert_layout(gl.permute(values, (1, 0)), LEFT)
    mbarrier.wait(ready.index(0), 0, pred=chunks > 0)
    factor = decay_tiles.index(0)._reinterpret(gl.float32, [K], FLAT).load(gl.SliceLayout(0, ACC))

    e = part * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, STATE))
    d = gl.arange(0, K, layout=gl.SliceLayout(0, STATE))
    tile = e[:, None] * K + d[None, :]
    for later in range(0, chunks):
        stage = later % STAGES
        c = last - later
        chunk = (first + c) * H + h
        zero = gl.zeros([BV, CHUNK], gl.float32, layout=ACC_R)
        dE = warpgroup_mma(dO, attention_tiles.index(stage), zero, use_acc=False, is_async=True)
        # Nothing to wait for, but without it the assembler waits for this product before the next dE.
        dO = warpgroup_mma_wait(1, deps=(dO,))
        leaving = dS.to(gl.bfloat16)
        left = gl.convert_layout(leaving, LEFT)
        dS *= factor[None, :]
        dE = warpgroup_mma(left, ke_tiles.index(stage).permute((1, 0)), dE, is_async=True)
        # Every warp is past the chunk before, whose tiles the copies overwrite.
        gl.thread_barrier()
        ahead = later + STAGES - 1
        slot = ahead % STAGES
        _fetch(
            qd, kd, ke, inverse, attention, decay, d_o_tiled, qd_tiles.index(slot), kd_tiles.index(slot),
            ke_tiles.index(slot), inverse_tiles.index(slot), attention_tiles.index(slot),
            decay_tiles.index(slot), dO_tiles.index(slot), ready.index(slot),
            (first + last - ahead) * H + h, start + (last - ahead) * CHUNK, column, ahead < chunks, BV, True,
        )  # fmt: skip
        dE, left, dO = warpgroup_mma_wait(0, deps=(dE, left, dO))
        # Rows of the inverse may cancel nearly all of what they take: in two parts, no digit of fp32 is lost.
        rounded = dE.to(gl.bfloat16)
        rest = gl.convert_layout((dE - rounded.to(gl.float32)).to(gl.bfloat16), LEFT)
        dE = gl.convert_layout(rounded, LEFT)
        D = warpgroup_mma(dE, inverse_tiles.index(stage), zero, use_acc=False, is_async=True)
        D = warpgroup_mma(rest, inverse_tiles.index(stage), D, is_async=True)
        dO_left = gl.convert_layout(dO, LEFT_S)
        dS = warpgroup_mma(dO_left, qd_tiles.index(stage), dS, is_async=True)
        if not FRAGMENTS:
            gl.store(d_states + chunk * V * K + tile, gl.convert_layout(leaving, STATE))
        D, dE, rest = warpgroup_mma_wait(1, deps=(D, dE, rest))
        minus = gl.convert_layout((-D).to(gl.bfloat16), LEFT_S)
        dS = warpgroup_mma(minus, kd_tiles.index(stage), dS, is_async=True)
        if not FRAGMENTS:
            rows = gl.allocate_shared_memory(gl.bfloat16, [BV, CHUNK], COLUMNS, D.to(gl.bfloat16))
            gl.store(
                d_v + ((start + c * CHUNK + i)[:, None] * H + h) * V + f[None, :],
                rows.permute((1, 0)).load(TOKENS),
                mask=(c * CHUNK + i < length)[:, None],
            )
        # After the last chunk nothing comes, and what is read here is not used.
        following = (later + 1) % STAGES
        mbarrier.wait(ready.index(following), ((later + 1) // STAGES) & 1, pred=later + 1 < chunks)
        dO = dO_tiles.index(following).permute((1, 0)).load(LEFT)
        factor = decay_tiles.index(following)._reinterpret(gl.float32, [K], FLAT).load(gl.SliceLayout(0, ACC))
        dS, dO_left, minus = warpgroup_mma_wait(0, deps=(dS, dO_left, minus))
    if FRAGMENTS:
        gl.store(d_initial_state + of_piece, dS)
    elif skipped == 0:
        gl.store(d_initial_state + of_sequence, dS)
