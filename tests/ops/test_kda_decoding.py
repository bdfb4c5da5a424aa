"""Decoding through a KDA layer: the kernels and the composition of operators against the layer in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from closeness import relative_error

from openk3.errors import InvalidInput
from openk3.ops.dispatch import triton_problem
from openk3.ops.kda.decoding import DraftWindow, MixerWeights, kda_decode, kda_verify

NO_TRITON = triton_problem("cpu")
needs_triton = pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
BOTH = ["eager", pytest.param("triton", marks=needs_triton)]
BOUNDS = [-5.0, None]
SLOTS = 4


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def layer(H, K, bound):
    return MixerWeights(
        taps=torch.randn(4, 3 * H * K),
        A_log=torch.randn(H),
        dt_bias=torch.randn(H, K),
        norm_weight=torch.rand(K) + 0.5,
        norm_eps=1e-5,
        lower_bound=bound,
    )


def pools(H, K, dtype=torch.float32):
    return torch.randn(SLOTS, H, K, K).to(torch.float32), torch.randn(SLOTS, 3, 3 * H * K).to(dtype)


def tokens(rows, H, K, dtype=torch.float32):
    """qkv, z, b and gate logits; keys differ between channels and decays reach from slow to the bound."""
    shapes = [(3 * H * K,), (H, K), (H,), (H, K)]
    return [(2 * torch.randn(*rows, *shape)).to(dtype) for shape in shapes]


def by_equations(x, state, tail, weights):
    """One token of one sequence, in float64 (report §2.1.1 eq. 1-6): o `[H, V]`, new state and tail."""
    (qkv, z, b, gate), w = [t.double() for t in x], weights
    H, K = z.shape
    seen = torch.cat([tail.double(), qkv[None]])
    q, k, v = torch.nn.functional.silu((seen * w.taps.double()).sum(0)).view(3, H, K)
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    rate, u = w.A_log.double().exp()[:, None], z + w.dt_bias.double()
    g = -rate * torch.log1p(u.exp()) if w.lower_bound is None else w.lower_bound * torch.sigmoid(rate * u)
    S = state.double() * g.exp()[:, None]
    error = torch.sigmoid(b)[:, None] * (v - torch.einsum("hvk,hk->hv", S, k))
    S = S + error[..., None] * k[:, None]
    o = torch.einsum("hvk,hk->hv", S, q) * K**-0.5
    o = o / (o.square().mean(-1, keepdim=True) + w.norm_eps).sqrt() * w.norm_weight.double()
    return o * torch.sigmoid(gate), S, seen[1:]


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(("H", "K"), [(2, 64), (1, 128)])
def test_a_token_goes_through_the_layer_and_only_its_slot_changes(implementation, bound, H, K):
    weights, (state, tail), slots = layer(H, K, bound), pools(H, K), [3, -1, 0]
    x = tokens((3,), H, K)
    before = state.clone(), tail.clone()
    o = kda_decode(
        *x, state, tail, torch.tensor(slots, dtype=torch.int32), weights, implementation=implementation
    )
    for n, slot in enumerate(slots):
        if slot < 0:
            assert not o[n].any()
            continue
        expected, S, new_tail = by_equations([t[n] for t in x], before[0][slot], before[1][slot], weights)
        assert relative_error(o[n], expected.flatten()) < 2e-6
        assert relative_error(state[slot], S) < 1e-6
        assert torch.equal(tail[slot], new_tail.float())
    for slot in {0, 1, 2, 3} - set(slots):
        assert torch.equal(state[slot], before[0][slot]) and torch.equal(tail[slot], before[1][slot])


@needs_triton
def test_a_row_does_not_depend_on_its_place_or_its_neighbours():
    H, K = 2, 64
    weights, x = layer(H, K, -5.0), tokens((3,), H, K)
    state, tail = pools(H, K)
    order = torch.tensor([2, 0, 1])
    slots = torch.tensor([3, 1, 0], dtype=torch.int32)
    mine, shuffled = (state, tail), (state.clone(), tail.clone())
    o = kda_decode(*x, *mine, slots, weights, implementation="triton")
    again = kda_decode(*(t[order] for t in x), *shuffled, slots[order], weights, implementation="triton")
    assert torch.equal(again, o[order])
    assert all(torch.equal(a, b) for a, b in zip(mine, shuffled, strict=True))


@needs_triton
def test_bf16_in_and_out():
    H, K = 1, 64
    weights, x = layer(H, K, -5.0), tokens((1,), H, K, torch.bfloat16)
    state, tail = pools(H, K, torch.bfloat16)
    expected, S, new_tail = by_equations([t[0] for t in x], state[2], tail[2], weights)
    o = kda_decode(*x, state, tail, torch.tensor([2], dtype=torch.int32), weights, implementation="triton")
    assert o.dtype == torch.bfloat16 and relative_error(o[0], expected.flatten()) < 1e-2
    assert relative_error(state[2], S) < 1e-6  # nothing is rounded on the way
    assert torch.equal(tail[2], new_tail.bfloat16())


def sequential(x, accepted, slots, state, tail, weights, implementation):
    """Decodes the first accepted[n] tokens of each row's window, in place."""
    outputs = []
    for t in range(x[0].shape[1]):
        now = torch.where(t < accepted, slots, -1)
        row = [y[:, t].contiguous() for y in x]
        outputs.append(kda_decode(*row, state, tail, now, weights, implementation=implementation))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize(("H", "K", "W", "bound"), [(1, 64, 8, -5.0), (1, 128, 4, None), (2, 64, 1, -5.0)])
def test_replay_is_sequential_decoding_after_every_accepted_length(implementation, H, K, W, bound):
    """Rows of one batch accept 0 to W tokens of their first window; one row has no sequence."""
    weights, N = layer(H, K, bound), W + 2
    slots = torch.cat([torch.randperm(N - 1), torch.tensor([-1])]).int()
    accepted = torch.arange(N, dtype=torch.int32).clamp(max=W)
    state, tail = torch.randn(N, H, K, K), torch.randn(N, 3, 3 * H * K)
    state[-1] = torch.nan  # the slot of nobody
    past = DraftWindow.empty(N, W, H, K, torch.float32, "cpu")
    first, second = tokens((N, W), H, K), tokens((N, W), H, K)
    by_decoding = state.clone(), tail.clone()

    nothing, untouched = torch.zeros(N, dtype=torch.int32), state.clone()
    kda_verify(*first, state, tail, past, nothing, slots, weights, implementation=implementation)
    assert torch.equal(state[:-1], untouched[:-1]) and torch.equal(tail, by_decoding[1])

    o = kda_verify(*second, state, tail, past, accepted, slots, weights, implementation=implementation)
    sequential(first, accepted, slots, *by_decoding, weights, implementation)
    assert torch.equal(state[:-1], by_decoding[0][:-1]) and torch.equal(tail, by_decoding[1])
    assert state[-1].isnan().all()
    everything = torch.full_like(accepted, W)
    expected = sequential(second, everything, slots, *by_decoding, weights, implementation)
    assert relative_error(o, expected) < 2e-6 and not o[-1].any()


@needs_triton
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # Triton interpreted by NumPy
@pytest.mark.parametrize("z", [-30.0, 0.0, 30.0, 3000.0])
@pytest.mark.parametrize("bound", BOUNDS)
def test_a_window_is_finite_and_right_however_slow_or_fast_the_decay(z, bound):
    H, K, W = 1, 64, 8
    weights = replace(layer(H, K, bound), A_log=torch.ones(H))
    x, (state, tail) = tokens((1, W), H, K), pools(H, K)
    x[1] = x[1] + z
    slots, none = torch.tensor([1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    past = DraftWindow.empty(SLOTS, W, H, K, torch.float32, "cpu")
    o = kda_verify(*x, state, tail, past, none, slots, weights, implementation="triton")
    S, seen = state[1], tail[1]
    for t in range(W):
        expected, S, seen = by_equations([y[0, t].clamp(max=700) for y in x], S, seen, weights)
        assert relative_error(o[0, t], expected.flatten()) < 1e-5


@needs_triton
def test_a_later_draft_changes_no_earlier_output():
    H, K, W = 1, 64, 4
    weights, x, (state, tail) = layer(H, K, None), tokens((1, W), H, K), pools(H, K)
    slots, none = torch.tensor([1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    past = DraftWindow.empty(SLOTS, W, H, K, torch.float32, "cpu")

    def outputs():
        return kda_verify(*x, state, tail, past, none, slots, weights, implementation="triton")

    o = outputs()
    for y in x:
        y[:, 2:] = 3 - y[:, 2:]
    changed = outputs()
    assert torch.equal(changed[:, :2], o[:, :2]) and not torch.equal(changed[:, 2:], o[:, 2:])


@needs_triton
def test_windows_may_be_shorter_than_the_room_for_them():
    H, K = 1, 64
    weights, (state, tail), past = (
        layer(H, K, -5.0),
        pools(H, K),
        DraftWindow.empty(4, 4, 1, 64, torch.float32, "cpu"),
    )
    x = tokens((1, 2), H, K)
    slots = torch.tensor([1], dtype=torch.int32)
    by_decoding = state.clone(), tail.clone()
    for accepted in (0, 2):
        count = torch.tensor([accepted], dtype=torch.int32)
        kda_verify(*x, state, tail, past, count, slots, weights, implementation="triton")
    sequential(x, torch.tensor([2]), slots, *by_decoding, weights, "triton")
    assert torch.equal(state, by_decoding[0]) and torch.equal(tail, by_decoding[1])


@needs_triton
def test_custom_ops_are_well_behaved():
    from openk3.ops.kda.kernels.decode import decode
    from openk3.ops.kda.kernels.replay import verify

    H, K, W = 1, 64, 2
    w, (state, tail), slots = layer(H, K, -5.0), pools(H, K), torch.tensor([1], dtype=torch.int32)
    layers = (w.taps, w.A_log, w.dt_bias, w.norm_weight, w.norm_eps, w.lower_bound, K**-0.5)
    past = DraftWindow.empty(SLOTS, W, H, K, torch.float32, "cpu")
    kept = [torch.zeros_like(t) for t in (past.qkv, past.z, past.b)]
    torch.library.opcheck(decode, (*tokens((1,), H, K), state, tail, slots, *layers))
    accepted = torch.ones(1, dtype=torch.int32)
    torch.library.opcheck(verify, (*tokens((1, W), H, K), state, tail, *kept, accepted, slots, *layers))


@pytest.mark.parametrize("implementation", BOTH)
def test_no_sequences_is_fine(implementation):
    weights, (state, tail) = layer(1, 64, -5.0), pools(1, 64)
    none = torch.empty(0, dtype=torch.int32)
    o = kda_decode(*tokens((0,), 1, 64), state, tail, none, weights, implementation=implementation)
    assert o.shape == (0, 64)


def test_what_does_not_fit_is_named():
    weights, (state, tail), x = layer(1, 64, -5.0), pools(1, 64), tokens((2,), 1, 64)
    slots = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(InvalidInput, match="head size must be one of"):
        kda_decode(*tokens((2,), 1, 32), state, tail, slots, weights)
    with pytest.raises(InvalidInput, match=r"state must be \(4, 1, 64, 64\) torch.float32.*got.*float16"):
        kda_decode(*x, state.half(), tail, slots, weights)
    with pytest.raises(InvalidInput, match=r"slots must be \(2,\) torch.int32"):
        kda_decode(*x, state, tail, slots.long(), weights)
    with pytest.raises(InvalidInput, match=r"tail must be.*contiguous"):
        kda_decode(*x, state, tail.mT.contiguous().mT, slots, weights)
    with pytest.raises(InvalidInput, match="lower_bound in"):
        kda_decode(*x, state, tail, slots, replace(weights, lower_bound=-6.0))
    for implementation in ("eager", "triton"):
        no_bound = replace(weights, lower_bound=0.0)
        with pytest.raises(InvalidInput, match=r"kda_decode: .*lower_bound in"):
            kda_decode(*x, state, tail, slots, no_bound, implementation=implementation)
    with pytest.raises(InvalidInput, match=r"weights.A_log must be \(1,\) floating point"):
        kda_decode(*x, state, tail, slots, replace(weights, A_log=weights.A_log.int()))
    for z in (torch.tensor(1.0), x[1][0, 0]):
        with pytest.raises(InvalidInput, match="z must have 3 axes"):
            kda_decode(x[0], z, *x[2:], state, tail, slots, weights)
    with pytest.raises(InvalidInput, match="state 4, got"):
        kda_decode(*x, torch.tensor(1.0), tail, slots, weights)
    past, window = DraftWindow.empty(SLOTS, 2, 1, 64, torch.float32, "cpu"), tokens((2, 3), 1, 64)
    with pytest.raises(InvalidInput, match="got 3 and room for 2"):
        kda_verify(*window, state, tail, past, slots, slots, weights)
    with pytest.raises(InvalidInput, match=r"past.qkv \[slots, P, C\]"):
        kda_verify(*window, state, tail, replace(past, qkv=past.qkv[0, 0]), slots, slots, weights)
    with pytest.raises(InvalidInput, match="accepted must be"):
        kda_verify(*tokens((2, 2), 1, 64), state, tail, past, slots.long(), slots, weights)
