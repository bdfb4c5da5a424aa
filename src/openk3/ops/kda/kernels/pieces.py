"""Context parallelism inside a card: pieces of a sequence at a time, where whole ones leave the card idle.

What a run of chunks does to the state is affine, and so is what it does to the gradient of the state, on its
way back, with the same transition:

    S_out = S_in M + L            dS_in = dS_out M^T + L'

M `[K, K]` is the scan from an identity, without values; L `[V, K]` the scan from zero, and L' `[V, K]` the
reverse scan from zero. So fragments of all pieces are made at once; a short walk over them gives the state
that enters each piece, or the gradient that leaves it; and all pieces are scanned at once from there. The way
back makes L' alone and takes M from the way there. Fragments and walks are fp32. The same fragments join
slices of a sequence on several devices (report §5.1.2).

The sums are the unbroken scan's in another order: results agree to rounding, not to the bit.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from math import isqrt

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from openk3.ops.kda.kernels.plan import ChunkPlan, cut
from openk3.ops.kda.kernels.prepare import Prepared
from openk3.ops.kda.kernels.scan import Pieces, Scanned, ScanTiles, launch, scan_tiles
from openk3.ops.kda.kernels.scan_backward import ScannedBack, hopper_tiles, scan_backward_tiles
from openk3.ops.kda.kernels.scan_backward import launch as launch_backward

# Pieces shorter than this spend more on fragments than they win.
SHORTEST = 16


def cut_pieces(plan: ChunkPlan, length: int) -> Pieces:
    """Pieces of `length` chunks."""
    first_piece, piece_sequence = cut(plan.first_chunk, plan.chunks, length)
    return Pieces(first_piece, piece_sequence, length)


def pieces_that_fill(plan: ChunkPlan, heads: int, V: int, processors: int) -> Pieces | None:
    """Pieces for two waves over `processors`, or None where whole sequences occupy half of them or are short.

    Decides from what the host knows: the number of sequences and the bound on chunks. The walk is serial too,
    so on average a sequence has no more pieces than a piece has chunks.
    """
    programs = heads * max(1, V // 64)
    if 2 * plan.sequences * programs > processors or plan.chunks < 2 * SHORTEST * plan.sequences:
        return None
    waves = 2 * processors // programs
    balanced = isqrt(plan.chunks // plan.sequences) + 1
    return cut_pieces(plan, max(SHORTEST, balanced, -(-plan.chunks // waves)))


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


def reverse_fragments(
    d_o: torch.Tensor,
    prepared: Prepared,
    plan: ChunkPlan,
    pieces: Pieces,
    d_final_state: torch.Tensor | None,
    hopper: bool,
) -> torch.Tensor:
    """L' of each piece but each sequence's first, `[P, H, V, K]` fp32, as L in the first rows of `fragments`.

    It goes with the same M, transposed: from dS_out, the gradient of the state that leaves a piece, comes
    dS_in = dS_out M^T + L' of the state that enters it. Each sequence's last piece, whose M nobody makes,
    starts from `d_final_state` instead (None for zero) and gives dS_in itself.
    """
    _, H, V = d_o.shape
    count = len(pieces.piece_sequence)
    L = d_o.new_empty(count, H, V, prepared.kd.shape[-1], dtype=torch.float32)
    nothing = ScannedBack(d_o.new_empty(0, H, V), d_o.new_empty(0), L)
    tiles = hopper_tiles(count * H) if hopper else scan_backward_tiles(d_o)
    launch_backward(d_o, prepared, plan, d_final_state, nothing, tiles, hopper, pieces, fragments=True)
    return L


@triton.jit
def _walk(
    added, fragments, state, handed, passed, first_piece,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, GIVEN: tl.constexpr,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes to `handed` the state that enters each piece or, if REVERSE, the gradient that leaves it.

    `state` is a sequence's own, if GIVEN; sequences without pieces pass it on to `passed`. L is in `added`.
    """
    part, h, n = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first = tl.load(first_piece + n).to(tl.int64)
    count = (tl.load(first_piece + n + 1) - first).to(tl.int32)
    d, e = tl.arange(0, K), part * BV + tl.arange(0, BV)
    rows = e[:, None] * K + d[None, :]
    if GIVEN:
        S = tl.load(state + (n * H + h) * V * K + rows)
    else:
        S = tl.zeros([BV, K], tl.float32)
    if count == 0:
        tl.store(passed + (n * H + h) * V * K + rows, S)
    last = ((first + count - 1) * H + h) * V * K
    if REVERSE and count > 0:
        tl.store(handed + last + rows, S)
        count -= 1  # the last piece's own gradient is whole
        if count > 0:
            S = tl.load(added + last + rows)
    for i in tl.range(0, count - 1, num_stages=STAGES):
        piece = (first + (count - 1 - i if REVERSE else i)) * H + h
        tl.store(handed + piece * V * K + rows, S)
        M = fragments + (piece * (V + K) + V) * K
        if REVERSE:
            transition = tl.load(M + d[:, None] + d[None, :] * K)
            L = tl.load(added + piece * V * K + rows)
        else:
            transition = tl.load(M + d[:, None] * K + d[None, :])
            L = tl.load(added + piece * (V + K) * K + rows)
        S = tl.dot(S, transition, L, input_precision=PRECISION)
    if count > 0:
        piece = (first + (0 if REVERSE else count - 1)) * H + h
        tl.store(handed + piece * V * K + rows, S)


def entering_states(
    fragments: torch.Tensor,
    plan: ChunkPlan,
    pieces: Pieces,
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor,
) -> torch.Tensor:
    """The state that enters each piece, `[P, H, V, K]` fp32; hands empty sequences' on to `final_state`."""
    return _handed(fragments, fragments, plan, pieces, initial_state, final_state, reverse=False)


def leaving_gradients(
    d_o: torch.Tensor,
    prepared: Prepared,
    plan: ChunkPlan,
    pieces: Pieces,
    fragments: torch.Tensor,
    d_final_state: torch.Tensor | None,
    d_initial_state: torch.Tensor,
    hopper: bool,
) -> torch.Tensor:
    """The gradient of the state that leaves each piece, `[P, H, V, K]` fp32; `fragments` are the forward's.

    Hands empty sequences' on to `d_initial_state`.
    """
    L = reverse_fragments(d_o, prepared, plan, pieces, d_final_state, hopper)
    return _handed(L, fragments, plan, pieces, d_final_state, d_initial_state, reverse=True)


def _handed(
    added: torch.Tensor,
    fragments: torch.Tensor,
    plan: ChunkPlan,
    pieces: Pieces,
    state: torch.Tensor | None,
    passed: torch.Tensor,
    *,
    reverse: bool,
) -> torch.Tensor:
    P, H, rows, K = fragments.shape
    V = rows - K
    handed = fragments.new_empty(P, H, V, K)
    _walk[(V // 16, H, plan.sequences)](
        added, fragments, state, handed, passed, pieces.first_piece,
        H=H, K=K, V=V, BV=16, GIVEN=state is not None, REVERSE=reverse,
        PRECISION="tf32x3" if fragments.is_cuda else "ieee", STAGES=2, num_warps=8,
    )  # fmt: skip
    return handed
