"""The state through the chunks of each sequence, and the outputs with it (report §2.1.1 eq. 4).

With S `[V, K]` the state that enters a chunk, everything transposed so that products chain in registers:

    E^T = (v^T - S kd^T) X^T        o^T = S qd^T + E^T A^T        S <- S diag(decay) + E^T ke

A program walks one sequence for one head and a slice of V. Rows of V do not mix, so slices are independent.
Each left operand is a result of the step before, in the registers where it arose; each right operand is a
tile that was loaded while earlier chunks were computed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from openk3.ops.kda.hopper import hopper_fits
from openk3.ops.kda.kernels.cards import LARGE, shared_kilobytes
from openk3.ops.kda.kernels.plan import CHUNK, ChunkPlan
from openk3.ops.kda.kernels.prepare import Prepared


class Pieces(NamedTuple):
    """Sequences cut into runs of `length` chunks from their starts, one program each."""

    first_piece: torch.Tensor  # int32 [N + 1]: sequence n has pieces first_piece[n] to first_piece[n + 1]
    piece_sequence: torch.Tensor  # int32 [P]: the sequence of each piece, -1 beyond the last
    length: int


@dataclass(frozen=True)
class Scanned:
    o: torch.Tensor  # [T, H, V]
    final_state: torch.Tensor  # [N, H, V, K] fp32
    states: torch.Tensor | None  # [NC, H, V, K], that enter each chunk, in the operands' dtype
    errors: torch.Tensor | None  # E [NC, H, 64, V], in the operands' dtype
    checkpoints: torch.Tensor | None  # [M, H, V, K] fp32
    fragments: torch.Tensor | None = None  # [P, H, V + K, K] fp32: see `pieces.fragments`


@triton.jit
def _scan(
    v, qd, kd, ke, inverse, attention, decay, initial_state,
    o, final_state, states, errors, checkpoints, checkpoint_of_chunk,
    cu_seqlens, first_chunk, first_piece, piece_sequence, piece_length, stride_vt, stride_vh,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    INITIAL: tl.constexpr, STATES: tl.constexpr, ERRORS: tl.constexpr, CHECKPOINTS: tl.constexpr,
    OUTPUT: tl.constexpr, FRAGMENTS: tl.constexpr, STAGES: tl.constexpr,
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
    chunks = tl.load(first_chunk + n + 1) - first
    start = tl.load(cu_seqlens + n).to(tl.int64)
    end = tl.load(cu_seqlens + n + 1)
    last = True
    if piece_length is not None:
        skipped = (p - tl.load(first_piece + n)) * piece_length
        first += skipped
        start += skipped * CHUNK
        last = chunks - skipped <= piece_length
        if FRAGMENTS and last:
            return
        chunks = tl.minimum(chunks - skipped, piece_length)
    r, d, e = tl.arange(0, CHUNK), tl.arange(0, K), part * BV + tl.arange(0, BV)
    state = e[:, None] * K + d[None, :]
    if FRAGMENTS:
        S = tl.where(e[:, None] - V == d[None, :], 1.0, 0.0)
        end = tl.where(part * BV < V, end, 0)
    elif INITIAL:
        S = tl.load(initial_state + (p * H + h) * V * K + state)
    else:
        S = tl.zeros([BV, K], tl.float32)
    for c in tl.range(0, chunks.to(tl.int32), num_stages=STAGES):
        chunk = (first + c) * H + h
        tile = chunk * CHUNK * K + r[:, None] * K + d[None, :]
        pairs = chunk * CHUNK * CHUNK + r[:, None] * CHUNK + r[None, :]
        token = start + c * CHUNK + r
        values = tl.load(
            v + token[None, :] * stride_vt + h * stride_vh + (e % V)[:, None],
            mask=(token < end)[None, :],
            other=0.0,
        )
        entering = S.to(OPERAND)
        if STATES:
            tl.store(states + chunk * V * K + e[:, None] * K + d[None, :], entering)
        known = tl.dot(entering, tl.trans(tl.load(kd + tile)), input_precision=PRECISION)
        E = tl.dot(
            (values.to(tl.float32) - known).to(OPERAND),
            tl.trans(tl.load(inverse + pairs)),
            input_precision=PRECISION,
        ).to(OPERAND)
        if ERRORS:
            tl.store(errors + chunk * CHUNK * V + r[None, :] * V + e[:, None], E)
        if OUTPUT:
            out = tl.dot(entering, tl.trans(tl.load(qd + tile)), input_precision=PRECISION)
            out = tl.dot(E, tl.trans(tl.load(attention + pairs)), out, input_precision=PRECISION)
            tl.store(
                o + (token[None, :] * H + h) * V + e[:, None],
                out.to(o.dtype.element_ty),
                mask=(token < end)[None, :],
            )
        S *= tl.load(decay + chunk * K + d)[None, :]
        S = tl.dot(E, tl.load(ke + tile), S, input_precision=PRECISION)
        if CHECKPOINTS:
            m = tl.load(checkpoint_of_chunk + first + c).to(tl.int64)
            if m >= 0:
                tl.store(checkpoints + (m * H + h) * V * K + e[:, None] * K + d[None, :], S)
    if FRAGMENTS:
        tl.store(final_state + (p * H + h) * (V + K) * K + state, S)
    elif last:
        tl.store(final_state + (n * H + h) * V * K + state, S)


@dataclass(frozen=True)
class ScanTiles:
    """How a scan is cut: rows of V a program takes, its warps, and chunks in flight."""

    BV: int
    num_warps: int
    stages: int


def scan_tiles(v: torch.Tensor) -> ScanTiles:
    """For the plain kernel, by what compiles without spills (K = 128): 131 KB where a program may have 227;
    73 KB elsewhere, two programs on sm_80.

    Operands in fp32 take one chunk at a time. On a card their products are sums a thread makes alone, and of
    the tiles for those this one spills least: 126 registers loaded again, where BV = 32 has 8,500.
    """
    if v.dtype == torch.float32:
        return (
            ScanTiles(BV=16, num_warps=8, stages=1) if v.is_cuda else ScanTiles(BV=32, num_warps=4, stages=1)
        )
    return ScanTiles(BV=64 if shared_kilobytes(v) >= LARGE else 32, num_warps=4, stages=2)


def hopper_tiles(programs: int) -> ScanTiles:
    """For V = 128 and `programs` sequences times heads: whole heads, or halves where those leave SMs idle."""
    return (
        ScanTiles(BV=128, num_warps=8, stages=2) if programs > 66 else ScanTiles(BV=64, num_warps=4, stages=3)
    )


def scan(
    v: torch.Tensor,
    prepared: Prepared,
    plan: ChunkPlan,
    initial_state: torch.Tensor | None,
    *,
    store_states: bool = False,
    store_errors: bool = False,
    output: bool = True,
    checkpoint_of_chunk: torch.Tensor | None = None,
    checkpoints: int = 0,
    tiles: ScanTiles | None = None,
    hopper: bool | None = None,
    pieces: Pieces | None = None,
) -> Scanned:
    """Values v `[T, H, V]` (last axis contiguous) through prepared chunks, from `initial_state`
    `[N, H, V, K]` fp32 contiguous or zero.

    `checkpoint_of_chunk` int32 `[NC]` names for each chunk the checkpoint that is the state after it, or -1.
    `pieces` cuts sequences so that several programs share one: see `openk3.ops.kda.kernels.pieces`.
    """
    T, H, V = v.shape
    N, K = plan.sequences, prepared.kd.shape[-1]
    hopper = hopper_fits(v, K) if hopper is None else hopper
    operand = prepared.kd.dtype
    kept = None
    if checkpoint_of_chunk is not None:
        kept = v.new_full((checkpoints, H, V, K), float("nan"), dtype=torch.float32)
    both = None
    if pieces is not None:
        from openk3.ops.kda.kernels.pieces import entering_states, fragments

        both = fragments(v, prepared, plan, pieces, hopper)
    result = Scanned(
        o=v.new_empty(T if output else 0, H, V),
        final_state=v.new_empty(N, H, V, K, dtype=torch.float32),
        states=v.new_empty(plan.chunks, H, V, K, dtype=operand) if store_states else None,
        errors=v.new_empty(plan.chunks, H, CHUNK, V, dtype=operand) if store_errors else None,
        checkpoints=kept,
        fragments=both,
    )
    programs = N * H
    if both is not None and pieces is not None:
        initial_state = entering_states(both, plan, pieces, initial_state, result.final_state)
        programs = len(pieces.piece_sequence) * H
    tiles = tiles or (hopper_tiles(programs) if hopper else scan_tiles(v))
    launch(v, prepared, plan, initial_state, result, tiles, hopper, pieces, checkpoint_of_chunk, output)
    return result


def launch(
    v: torch.Tensor,
    prepared: Prepared,
    plan: ChunkPlan,
    initial_state: torch.Tensor | None,
    result: Scanned,
    tiles: ScanTiles,
    hopper: bool,
    pieces: Pieces | None,
    checkpoint_of_chunk: torch.Tensor | None = None,
    output: bool = False,
    fragments: bool = False,
) -> None:
    """Fills `result`; with `fragments`, its final_state with [L; M] of each piece and nothing else."""
    _, H, V = v.shape
    K = prepared.kd.shape[-1]
    flags = {
        "INITIAL": initial_state is not None, "STATES": result.states is not None,
        "ERRORS": result.errors is not None, "CHECKPOINTS": result.checkpoints is not None, "OUTPUT": output,
        "FRAGMENTS": fragments, "STAGES": tiles.stages, "num_warps": tiles.num_warps,
    }  # fmt: skip
    cut = pieces or (None, None, None)
    count = plan.sequences if pieces is None else len(pieces.piece_sequence)
    grid = (V + K if fragments else V) // tiles.BV, H, count
    outputs = result.o, result.final_state, result.states, result.errors, result.checkpoints
    where = checkpoint_of_chunk, plan.cu_seqlens, plan.first_chunk, *cut, *v.stride()[:2]
    p = prepared
    if hopper:
        from openk3.ops.kda.kernels.scan_hopper import descriptor, scan_hopper

        chunks = (descriptor(x) for x in (p.qd, p.kd, p.ke, p.inverse, p.attention))
        scan_hopper[grid](
            v, *chunks, p.decay, initial_state, *outputs, *where, H=H, V=V, BV=tiles.BV, **flags
        )
    else:
        _scan[grid](
            v, p.qd, p.kd, p.ke, p.inverse, p.attention, p.decay, initial_state, *outputs, *where,
            H=H, K=K, V=V, BV=tiles.BV, CHUNK=CHUNK, **flags,
        )  # fmt: skip
