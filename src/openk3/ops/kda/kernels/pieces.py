"""Context parallelism inside a card: pieces of a sequence at a time, where whole ones leave the card idle.

What a run of chunks does to the state is affine, S_out = S_in M + L with M `[K, K]` and L `[V, K]`: the scan
from an identity, without values, and from zero. So fragments [L; M] of all pieces are made at once; a short
walk over them gives the state that enters each piece; and all pieces are scanned at once from there.
Fragments and the walk are fp32. The same fragments join slices of a sequence on several devices (report
§5.1.2).

The sums are the unbroken scan's in another order: results agree to rounding, not to the bit.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from openk3.ops.kda.kernels.plan import ChunkPlan, cut
from openk3.ops.kda.kernels.prepare import Prepared
from openk3.ops.kda.kernels.scan import Pieces, Scanned, ScanTiles, launch, scan_tiles

# Pieces shorter than this spend more on fragments than they win.
SHORTEST = 16


def cut_pieces(plan: ChunkPlan, length: int) -> Pieces:
    """Pieces of `length` chunks."""
    first_piece, piece_sequence = cut(plan.first_chunk, plan.chunks, length)
    return Pieces(first_piece, piece_sequence, length)


def pieces_that_fill(plan: ChunkPlan, heads: int, V: int, processors: int) -> Pieces | None:
    """Pieces for two waves over `processors`, or None where whole sequences occupy half of them or are short.

    Decides from what the host knows: the number of sequences and the bound on chunks.
    """
    programs = heads * max(1, V // 64)
    if 2 * plan.sequences * programs > processors or plan.chunks < 2 * SHORTEST * plan.sequences:
        return None
    waves = 2 * processors // programs
    return cut_pieces(plan, max(SHORTEST, -(-plan.chunks // waves)))


def fragments(
    v: torch.Tensor, prepared: Prepared, plan: ChunkPlan, pieces: Pieces, hopper: bool
) -> torch.Tensor:
    """[L; M] of each piece but each sequence's last, `[P, H, V + K, K]` fp32."""
    _, H, V = v.shape
    K = prepared.kd.shape[-1]
    both = v.new_empty(len(pieces.piece_sequence), H, V + K, K, dtype=torch.float32)
    tiles = ScanTiles(BV=128, num_warps=8, stages=2) if hopper else scan_tiles(v)
    nothing = Scanned(v.new_empty(0, H, V), both, None, None, None)
    launch(v, prepared, plan, None, nothing, tiles, hopper, pieces, fragments=True)
    return both


@triton.jit
def _walk(
    fragments, initial_state, entering, final_state, first_piece,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, INITIAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    part, h, n = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first = tl.load(first_piece + n).to(tl.int64)
    count = (tl.load(first_piece + n + 1) - first).to(tl.int32)
    d, e = tl.arange(0, K), part * BV + tl.arange(0, BV)
    rows = e[:, None] * K + d[None, :]
    if INITIAL:
        S = tl.load(initial_state + (n * H + h) * V * K + rows)
    else:
        S = tl.zeros([BV, K], tl.float32)
    for p in range(0, count):
        piece = (first + p) * H + h
        tl.store(entering + piece * V * K + rows, S)
        if p + 1 < count:
            own = fragments + piece * (V + K) * K
            M = tl.load(own + V * K + d[:, None] * K + d[None, :])
            S = tl.dot(S, M, tl.load(own + rows), input_precision=PRECISION)
    if count == 0:
        tl.store(final_state + (n * H + h) * V * K + rows, S)


def entering_states(
    v: torch.Tensor,
    prepared: Prepared,
    plan: ChunkPlan,
    pieces: Pieces,
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor,
    hopper: bool,
) -> torch.Tensor:
    """The state that enters each piece, `[P, H, V, K]` fp32; hands empty sequences' on to `final_state`."""
    _, H, V = v.shape
    K = prepared.kd.shape[-1]
    entering = v.new_empty(len(pieces.piece_sequence), H, V, K, dtype=torch.float32)
    _walk[(V // 16, H, plan.sequences)](
        fragments(v, prepared, plan, pieces, hopper), initial_state, entering, final_state,
        pieces.first_piece,
        H=H, K=K, V=V, BV=16, INITIAL=initial_state is not None,
        PRECISION="tf32x3" if v.is_cuda else "ieee", num_warps=4,
    )  # fmt: skip
    return entering
