"""Sequences cut into pieces inside one card: the same function, and fragments that others can join."""

from __future__ import annotations

import pytest
import torch
from closeness import relative_error

from openk3.ops.kda.kernels.pieces import cut_pieces, fragments, pieces_that_fill
from openk3.ops.kda.kernels.plan import ChunkPlan, plan_chunks
from openk3.ops.kda.kernels.prepare import Prepared, prepare
from openk3.ops.kda.kernels.scan import scan

H, K = 1, 64


def _prepared(lengths: list[int]) -> tuple[torch.Tensor, Prepared, ChunkPlan, torch.Tensor]:
    torch.manual_seed(0)
    T = sum(lengths)
    q, k, v, z = (torch.randn(T, H, K) for _ in range(4))
    plan = plan_chunks(torch.tensor([0, *lengths]).cumsum(0).int(), T)
    chunks = prepare(q, k, z - 4, torch.randn(T, H), torch.zeros(H), torch.randn(H, K), plan, -5.0, K**-0.5)
    return v, chunks, plan, torch.randn(len(lengths), H, K, K)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_pieces_give_what_whole_sequences_give(length):
    v, chunks, plan, state = _prepared([300, 0, 1, 140])
    for initial_state in (state, None):
        whole = scan(v, chunks, plan, initial_state, store_states=True, store_errors=True)
        cut = scan(
            v, chunks, plan, initial_state, store_states=True, store_errors=True,
            pieces=cut_pieces(plan, length),
        )  # fmt: skip
        used = int(plan.first_chunk[-1])
        assert relative_error(cut.o, whole.o) < 1e-6
        assert relative_error(cut.final_state, whole.final_state) < 1e-6
        assert relative_error(cut.states[:used], whole.states[:used]) < 1e-6
        assert relative_error(cut.errors[:used], whole.errors[:used]) < 1e-6
        assert initial_state is None or torch.equal(cut.final_state[1], initial_state[1])


def test_a_fragment_says_what_its_piece_does_to_any_state():
    v, chunks, plan, state = _prepared([300])
    both = fragments(v, chunks, plan, cut_pieces(plan, 2), hopper=False)
    L, M = both[0, 0, :K], both[0, 0, K:]
    after_two_chunks = scan(v, chunks, plan, state, store_states=True).states[2, 0]
    assert relative_error(state[0, 0] @ M + L, after_two_chunks) < 1e-6


def test_pieces_follow_their_sequences():
    _, _, plan, _ = _prepared([300, 0, 1, 140])  # 5, 0, 1 and 3 chunks
    pieces = cut_pieces(plan, 2)
    assert pieces.first_piece.tolist() == [0, 3, 3, 4, 6]
    assert pieces.piece_sequence.tolist()[:6] == [0, 0, 0, 2, 3, 3]
    assert set(pieces.piece_sequence.tolist()[6:]) <= {-1}


def test_a_card_is_filled_where_heads_are_few_and_sequences_long():
    long = plan_chunks(torch.tensor([0, 65536], dtype=torch.int32), 65536)
    pieces = pieces_that_fill(long, heads=12, V=128, processors=132)
    assert pieces is not None
    assert 200 <= int(pieces.first_piece[-1]) * 12 * 2 <= 264
    assert pieces_that_fill(long, heads=96, V=128, processors=132) is None
    short = plan_chunks(torch.tensor([0, 1024], dtype=torch.int32), 1024)
    assert pieces_that_fill(short, heads=2, V=128, processors=132) is None
