"""The gradient of the state, back through the chunks of each sequence (report §2.1.1 eq. 4).

The serial part of the backward of `scan`. With dS the gradient of the state that leaves a chunk, everything
transposed as in the forward, and D the chunk's gradient to what it read (values less predictions), which is
also the gradient to its values:

    D^T = (dO^T A + dS ke^T) X        dS <- dS diag(decay) + dO^T qd - D^T kd

What is parallel over chunks is left to `intra_backward`, which reads D and each dS again. Where heads are
few, programs share a sequence: see `openk3.ops.kda.kernels.pieces`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from openk3.ops.kda.hopper import hopper_fits
from openk3.ops.kda.kernels.cards import generation
from openk3.ops.kda.kernels.plan import CHUNK, ChunkPlan
from openk3.ops.kda.kernels.prepare import Prepared
from openk3.ops.kda.kernels.scan import Pieces


@triton.jit
def _scan_backward(
    d_o, qd, kd, ke, inverse, attention, decay, d_final_state,
    d_v, d_states, d_initial_state, cu_seqlens, first_chunk, first_piece, piece_sequence, piece_length,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    FINAL: tl.constexpr, FRAGMENTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part, h, p = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    n = p
    if piece_length is not None:
        n = tl.load(piece_sequence + p).to(tl.int64)
        if n < 0:
            return
    OPERAND = kd.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if kd.dtype.element_ty == tl.float32 else "tf32"
    first = tl.load(first_chunk + n).to(tl.int64)
    chunks = (tl.load(first_chunk + n + 1) - first).to(tl.int32)
    start = tl.load(cu_seqlens + n).to(tl.int64)
    end = tl.load(cu_seqlens + n + 1)
    skipped = 0
    last = True
    if piece_length is not None:
        skipped = (p - tl.load(first_piece + n)).to(tl.int32) * piece_length
        if FRAGMENTS and skipped == 0:
            return
        first += skipped
        start += skipped * CHUNK
        last = chunks - skipped <= piece_length
        chunks = tl.minimum(chunks - skipped, piece_length)
    r, d, e = tl.arange(0, CHUNK), tl.arange(0, K), part * BV + tl.arange(0, BV)
    of_sequence = (n * H + h) * V * K + e[:, None] * K + d[None, :]
    of_piece = (p * H + h) * V * K + e[:, None] * K + d[None, :]
    dS = tl.zeros([BV, K], tl.float32)
    if FRAGMENTS:
        if FINAL and last:
            dS = tl.load(d_final_state + of_sequence)
    elif FINAL:
        dS = tl.load(d_final_state + of_piece)
    for later in tl.range(0, chunks, num_stages=STAGES):
        c = chunks - 1 - later
        chunk = (first + c) * H + h
        tile = chunk * CHUNK * K + r[:, None] * K + d[None, :]
        pairs = chunk * CHUNK * CHUNK + r[:, None] * CHUNK + r[None, :]
        token = start + c * CHUNK + r
        values = (token[:, None] * H + h) * V + e[None, :]
        inside = (token < end)[:, None]
        dO = tl.trans(tl.load(d_o + values, mask=inside, other=0.0))
        leaving = dS.to(OPERAND)
        if not FRAGMENTS:
            tl.store(d_states + chunk * V * K + e[:, None] * K + d[None, :], leaving)
        D = tl.dot(leaving, tl.trans(tl.load(ke + tile)), input_precision=PRECISION)
        D = tl.dot(dO, tl.load(attention + pairs), D, input_precision=PRECISION)
        # Rows of the inverse may cancel nearly all of what they take: in two parts, no digit of fp32 is lost.
        inverse_tile = tl.load(inverse + pairs)
        rounded = D.to(OPERAND)
        rest = (D - rounded.to(tl.float32)).to(OPERAND)
        D = tl.dot(rounded, inverse_tile, input_precision=PRECISION)
        if kd.dtype.element_ty != tl.float32:
            D = tl.dot(rest, inverse_tile, D, input_precision=PRECISION)
        D = D.to(OPERAND)
        if not FRAGMENTS:
            tl.store(d_v + values, tl.trans(D).to(d_v.dtype.element_ty), mask=inside)
        dS *= tl.load(decay + chunk * K + d)[None, :]
        dS = tl.dot(dO, tl.load(qd + tile), dS, input_precision=PRECISION)
        dS = tl.dot(-D, tl.load(kd + tile), dS, input_precision=PRECISION)
    if FRAGMENTS:
        tl.store(d_initial_state + of_piece, dS)
    elif skipped == 0:
        tl.store(d_initial_state + of_sequence, dS)


@dataclass(frozen=True)
class ScanBackwardTiles:
    """How the reverse scan is cut: rows of V a program takes, its warps, and chunks in flight."""

    BV: int
    num_warps: int
    stages: int


def scan_backward_tiles(d_o: torch.Tensor) -> ScanBackwardTiles:
    """For the plain kernel: whole heads, in 97 KB, or 193 on sm_90; halves on sm_100, where whole ones want
    544 columns of tensor memory and there are 512."""
    V = d_o.shape[-1]
    if generation(d_o) == 10:
        return ScanBackwardTiles(BV=64, num_warps=4, stages=2)
    return ScanBackwardTiles(BV=V, num_warps=V // 16, stages=2)


def hopper_tiles(programs: int) -> ScanBackwardTiles:
    """For V = 128 and `programs` sequences times heads: whole heads, or halves where those leave SMs idle."""
    return ScanBackwardTiles(128, 8, 2) if programs > 66 else ScanBackwardTiles(64, 4, 3)


class ScannedBack(NamedTuple):
    d_v: torch.Tensor  # [T, H, V]
    d_states: torch.Tensor  # [NC, H, V, K], of what leaves each chunk, in the operands' dtype
    d_initial_state: torch.Tensor  # [N, H, V, K] fp32


def scan_backward(
    d_o: torch.Tensor,
    prepared: Prepared,
    plan: ChunkPlan,
    d_final_state: torch.Tensor | None,
    *,
    tiles: ScanBackwardTiles | None = None,
    hopper: bool | None = None,
    pieces: Pieces | None = None,
    fragments: torch.Tensor | None = None,
) -> ScannedBack:
    """Takes the gradient of the states back through prepared chunks.

    Args:
        d_o: gradient to the outputs, `[T, H, V]` contiguous, in the operands' dtype.
        prepared: the chunks that the forward scan went through.
        d_final_state: `[N, H, V, K]` fp32 contiguous, or None for zero.
        hopper: which of the two kernels; by default Hopper's where it fits (bf16, K = V = 128, sm_90).
        pieces: those of the forward scan, so that several programs share a sequence.
        fragments: with `pieces`, the forward scan's, for what they say of each piece's transition.
    """
    T, H, V = d_o.shape
    N, K = plan.sequences, prepared.kd.shape[-1]
    if hopper is None:  # its copies need a token at least
        hopper = T > 0 and hopper_fits(d_o, K)
    result = ScannedBack(
        d_v=torch.empty_like(d_o),
        d_states=prepared.kd.new_empty(plan.chunks, H, V, K),
        d_initial_state=d_o.new_empty(N, H, V, K, dtype=torch.float32),
    )
    programs = N * H
    if pieces is not None:
        from openk3.ops.kda.kernels.pieces import leaving_gradients

        assert fragments is not None
        d_final_state = leaving_gradients(
            d_o, prepared, plan, pieces, fragments, d_final_state, result.d_initial_state, hopper
        )
        programs = len(pieces.piece_sequence) * H
    tiles = tiles or (hopper_tiles(programs) if hopper else scan_backward_tiles(d_o))
    launch(d_o, prepared, plan, d_final_state, result, tiles, hopper, pieces)
    return result


def launch(
    d_o: torch.Tensor,
    prepared: Prepared,
    plan: ChunkPlan,
    d_final_state: torch.Tensor | None,
    result: ScannedBack,
    tiles: ScanBackwardTiles,
    hopper: bool,
    pieces: Pieces | None,
    fragments: bool = False,
) -> None:
    """Fills `result`; with `fragments`, its d_initial_state with L of each piece and nothing else.

    `d_final_state` is of pieces where there are any, but of sequences with `fragments`.
    """
    _, H, V = d_o.shape
    flags = {
        "FINAL": d_final_state is not None, "FRAGMENTS": fragments, "STAGES": tiles.stages,
        "num_warps": tiles.num_warps,
    }  # fmt: skip
    cut = pieces or (None, None, None)
    grid = V // tiles.BV, H, plan.sequences if pieces is None else len(pieces.piece_sequence)
    outputs = result.d_v, result.d_states, result.d_initial_state
    where = plan.cu_seqlens, plan.first_chunk, *cut
    p = prepared
    if hopper:
        from openk3.ops.kda.kernels.scan_backward_hopper import (
            decay_descriptor,
            scan_backward_hopper,
            token_descriptor,
        )
        from openk3.ops.kda.kernels.scan_hopper import descriptor

        tiles_of = (descriptor(x) for x in (p.qd, p.kd, p.ke, p.inverse, p.attention))
        scan_backward_hopper[grid](
            d_o, token_descriptor(d_o, tiles.BV), *tiles_of, decay_descriptor(p.decay), d_final_state,
            *outputs, *where, H=H, V=V, BV=tiles.BV, **flags,
        )  # fmt: skip
    else:
        _scan_backward[grid](
            d_o, p.qd, p.kd, p.ke, p.inverse, p.attention, p.decay, d_final_state, *outputs, *where,
            H=H, K=p.kd.shape[-1], V=V, BV=tiles.BV, CHUNK=CHUNK, **flags,
        )  # fmt: skip
