"""Sequences cut into pieces inside one card: the same function, and fragments that others can join."""

from __future__ import annotations

import pytest
import torch
from closeness import relative_error

from openk3.ops.kda.gated import gated_kda
from openk3.ops.kda.kernels import operator
from openk3.ops.kda.kernels.pieces import cut_pieces, fragments, pieces_that_fill, reverse_fragments
from openk3.ops.kda.kernels.plan import ChunkPlan, plan_chunks
from openk3.ops.kda.kernels.prepare import Prepared, prepare
from openk3.ops.kda.kernels.scan import scan
from openk3.ops.kda.kernels.scan_backward import scan_backward

K = 64


def _prepared(lengths: list[int], H: int = 1) -> tuple[torch.Tensor, Prepared, ChunkPlan, torch.Tensor]:
    torch.manual_seed(0)
    T = sum(lengths)
    q, k, v, z = (torch.randn(T, H, K) for _ in range(4))
    plan = plan_chunks(torch.tensor([0, *lengths]).cumsum(0).int(), T)
    # So slow that a state is still felt several pieces on.
    chunks = prepare(q, k, z - 8, torch.randn(T, H), torch.zeros(H), torch.randn(H, K), plan, -5.0, K**-0.5)
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


@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_gradients_of_pieces_are_those_of_whole_sequences(length):
    v, chunks, plan, d_final_state = _prepared([300, 0, 1, 140], H=2)
    d_o, used = torch.randn_like(v), int(plan.first_chunk[-1])
    pieces = cut_pieces(plan, length)
    both = fragments(v, chunks, plan, pieces, hopper=False)
    for final in (d_final_state, None):
        whole = scan_backward(d_o, chunks, plan, final)
        cut = scan_backward(d_o, chunks, plan, final, pieces=pieces, fragments=both)
        assert relative_error(cut.d_v, whole.d_v) < 1e-6
        assert relative_error(cut.d_states[:used], whole.d_states[:used]) < 1e-6
        assert relative_error(cut.d_initial_state, whole.d_initial_state) < 1e-6
        handed_on = torch.zeros_like(d_final_state[1]) if final is None else final[1]
        assert torch.equal(cut.d_initial_state[1], handed_on)


def test_the_way_back_takes_from_the_way_there_the_transitions_of_inner_pieces_alone():
    v, chunks, plan, _ = _prepared([300, 130])  # 5 and 3 chunks
    d_o, pieces = torch.randn_like(v), cut_pieces(plan, 1)
    both = fragments(v, chunks, plan, pieces, hopper=False)
    least = torch.full_like(both, float("nan"))
    inner = [1, 2, 3, 6]
    least[inner, :, K:] = both[inner, :, K:]
    whole = scan_backward(d_o, chunks, plan, None)
    cut = scan_backward(d_o, chunks, plan, None, pieces=pieces, fragments=least)
    assert relative_error(cut.d_v, whole.d_v) < 1e-6
    least[inner] *= 0.9
    cut = scan_backward(d_o, chunks, plan, None, pieces=pieces, fragments=least)
    assert relative_error(cut.d_v, whole.d_v) > 1e-3


def test_a_reverse_fragment_says_what_its_piece_does_to_any_gradient():
    v, chunks, plan, d_final_state = _prepared([300])
    d_o, pieces = torch.randn_like(v), cut_pieces(plan, 2)
    M = fragments(v, chunks, plan, pieces, hopper=False)[1, 0, K:]
    d_states = scan_backward(d_o, chunks, plan, d_final_state).d_states  # of what leaves each of 5 chunks
    L = reverse_fragments(d_o, chunks, plan, pieces, d_final_state, hopper=False)
    assert relative_error(d_states[3, 0] @ M.mT + L[1, 0], d_states[1, 0]) < 1e-6
    assert relative_error(L[2], d_states[3]) < 1e-6


@pytest.mark.parametrize("length", [1, 2])
def test_the_operator_in_pieces_has_the_gradients_of_the_eager_form_in_float64(length, monkeypatch):
    monkeypatch.setattr(operator, "_pieces", lambda v, plan, split: cut_pieces(plan, length))
    torch.manual_seed(0)
    T, H, N = 331, 2, 4
    cu_seqlens = torch.tensor([0, 200, 200, 201, T], dtype=torch.int32)
    shapes = [(T, H, K)] * 3 + [(T, H, K), (T, H), (H,), (H, K), (N, H, K, K)]
    q, k, v, z, b, A_log, dt_bias, state = (torch.randn(shape) for shape in shapes)
    leaves = [q, k, v, z - 8, b, 0.3 * A_log, dt_bias, state]
    d_o, d_state = torch.randn(T, H, K), torch.randn(N, H, K, K)
    grads = []
    for dtype, implementation in ((torch.float32, "triton"), (torch.float64, "eager")):
        own = [x.to(dtype).requires_grad_() for x in leaves]
        o, S = gated_kda(*own[:-1], cu_seqlens, initial_state=own[-1], implementation=implementation)
        grads.append(torch.autograd.grad([o, S], own, [d_o.to(dtype), d_state.to(dtype)]))
    errors = [relative_error(mine, oracle) for mine, oracle in zip(*grads, strict=True)]
    assert max(errors) < 1e-4, errors
    assert torch.equal(grads[0][-1][1], d_state[1])  # of the empty sequence


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
    one_head = pieces_that_fill(long, heads=1, V=128, processors=132)
    assert one_head is not None
    assert int(one_head.first_piece[-1]) <= one_head.length
    assert pieces_that_fill(long, heads=96, V=128, processors=132) is None
    short = plan_chunks(torch.tensor([0, 1024], dtype=torch.int32), 1024)
    assert pieces_that_fill(short, heads=2, V=128, processors=132) is None
