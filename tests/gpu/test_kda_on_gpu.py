"""KDA, the short convolution and decoding on a GPU: against float64, and what they promise to the bit.

Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from openk3.ops.kda import DraftWindow, MixerWeights, gated_kda, kda_decode, kda_step, kda_verify
from openk3.ops.kda_gate import kda_gate
from openk3.ops.norm import gated_rms_norm, l2_norm
from openk3.ops.short_conv import short_conv
from ops.closeness import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = [300, 1, 0, 64, 147]
TOKENS = ("q", "k", "v", "z", "b")
# As raw decay logits: gates near 0, anywhere, and at the bound.
REGIMES = {"slow": -6.0, "any": 0.0, "fast": 8.0}


def draw(K: int, shift: float = 0.0, H: int = 3, lengths: list[int] = LENGTHS) -> dict[str, Any]:
    make = torch.Generator("cuda").manual_seed(0)
    T, N = sum(lengths), len(lengths)
    shapes = {"q": (T, H, K), "k": (T, H, K), "v": (T, H, K), "z": (T, H, K), "b": (T, H)}
    inputs = {
        name: torch.randn(*shape, device="cuda", generator=make).add(shift * (name == "z")).bfloat16()
        for name, shape in shapes.items()
    }
    inputs["A_log"] = 0.3 * torch.randn(H, device="cuda", generator=make)
    inputs["dt_bias"] = 0.5 * torch.randn(H, K, device="cuda", generator=make)
    inputs["cu_seqlens"] = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    inputs["initial_state"] = torch.randn(N, H, K, K, device="cuda", generator=make)
    return inputs


def results(inputs: dict[str, Any], size: float = 1.0, **options: Any) -> dict[str, torch.Tensor]:
    """o, S and the gradients of a fixed random projection of both, `size` times."""
    own = {n: x.detach().clone().requires_grad_(x.is_floating_point()) for n, x in inputs.items()}
    o, S = gated_kda(**own, **options)
    make = torch.Generator("cuda").manual_seed(1)
    d_o = (size * torch.randn(o.shape, device="cuda", generator=make)).bfloat16()
    d_S = size * torch.randn(S.shape, device="cuda", generator=make)
    leaves = [n for n, x in own.items() if x.requires_grad]
    gradients = torch.autograd.grad([o, S], [own[n] for n in leaves], [d_o.to(o.dtype), d_S.to(S.dtype)])
    return {"o": o, "S": S} | {f"d_{n}": g for n, g in zip(leaves, gradients, strict=True)}


def sliced(inputs: dict[str, Any], start: int, end: int, state: torch.Tensor) -> dict[str, Any]:
    """One sequence of the tokens from `start` to `end`, from `state` `[1, H, V, K]`."""
    own = inputs | {n: inputs[n][start:end] for n in TOKENS}
    return own | {"cu_seqlens": inputs["cu_seqlens"].new_tensor([0, end - start]), "initial_state": state}


@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("bound", [-5.0, None])
def test_outputs_and_gradients_in_bf16_are_near_float64_and_the_same_in_every_run(bound, regime, K):
    inputs = draw(K, REGIMES[regime])
    exact = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    first, second = (results(inputs, lower_bound=bound) for _ in range(2))
    oracle = results(exact, lower_bound=bound, implementation="eager")
    for name, x in first.items():
        assert torch.equal(x, second[name]), name
    errors = {name: relative_error(x, oracle[name]) for name, x in first.items()}
    too_far = {n: e for n, e in errors.items() if not e < (8e-3 if n in ("o", "S") else 1.5e-2)}
    assert not too_far, f"{too_far} of {errors}"


def test_a_sequence_in_pieces_has_the_gradients_of_a_whole_one():
    """Decays so slow that the transitions of inner pieces are felt; 65 chunks in pieces of 16."""
    inputs = draw(128, shift=-10.0, H=2, lengths=[4099, 0])
    exact = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    cut, again, whole = results(inputs), results(inputs), results(inputs, split_sequences=False)
    oracle = results(exact, implementation="eager")
    assert not torch.equal(cut["d_v"], whole["d_v"])
    for name, x in cut.items():
        assert torch.equal(x, again[name]), name
        error, of_whole = relative_error(x, oracle[name]), relative_error(whole[name], oracle[name])
        luck = 1.2 if x.numel() > 1000 else 4.0  # A_log has two numbers
        assert error < luck * of_whole + 1e-4, f"{name}: {error} in pieces, {of_whole} whole"
    assert torch.equal(cut["d_initial_state"][1], whole["d_initial_state"][1])


@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("logit", [-7.0, -12.0])
def test_small_writes_between_slow_decays_keep_their_digits(logit, K):
    inputs = draw(K, REGIMES["slow"])
    inputs["b"] = torch.full_like(inputs["b"], logit)
    del inputs["initial_state"]
    exact = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    mine, oracle = results(inputs), results(exact, implementation="eager")
    errors = {name: relative_error(mine[name], oracle[name]) for name in ("o", "S", "d_v", "d_b")}
    assert max(errors.values()) < 1.5e-2, errors


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e6, 1e12])
@pytest.mark.parametrize("regime", REGIMES)
def test_gradients_of_any_size_are_near_float64(regime, size):
    """At the bound rows carry factors of up to 2^116 either way; states and pairs may be of far sizes."""
    inputs = draw(128, REGIMES[regime])
    inputs["v"] = (1e-3 * inputs["v"].float()).bfloat16()
    exact = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    mine, oracle = results(inputs, size), results(exact, size, implementation="eager")
    errors = {name: relative_error(x, oracle[name]) for name, x in mine.items()}
    too_far = {n: e for n, e in errors.items() if not e < 1.5e-2}
    assert not too_far, f"{too_far} of {errors}"


@pytest.mark.parametrize("K", [64, 128])
def test_a_checkpoint_is_a_last_state_and_goes_on_to_the_bit(K):
    inputs = draw(K)
    ends = [64, 256, 300, 301, 365, 429, 512]
    at = torch.tensor(ends, dtype=torch.int32, device="cuda")
    o, S, states = gated_kda(**inputs, checkpoint_at=at, split_sequences=False)
    for m, (n, start, stop) in zip((0, 1, 5), ((0, 0, 300), (0, 0, 300), (4, 365, 512)), strict=True):
        end, state = ends[m], inputs["initial_state"][n : n + 1]
        before = gated_kda(**sliced(inputs, start, end, state), split_sequences=False)
        assert torch.equal(before[1][0], states[m]) and torch.equal(before[0], o[start:end])
        after = gated_kda(**sliced(inputs, end, stop, states[m : m + 1]), split_sequences=False)
        assert torch.equal(after[0], o[end:stop]) and torch.equal(after[1][0], S[n])
    assert torch.equal(states[[2, 3, 4, 6]], S[[0, 1, 3, 4]])


@pytest.mark.parametrize("K", [64, 128])
def test_nothing_depends_on_a_later_token_not_even_its_last_bit(K):
    inputs = draw(K)
    o, _ = gated_kda(**inputs)
    for cut in (1, 40, 64, 200, 299):
        changed = inputs | {n: inputs[n].clone() for n in TOKENS}
        for name in TOKENS:
            changed[name][cut:300] = 7.0 * changed[name][cut:300] - 1.0
        ours, _ = gated_kda(**changed)
        assert torch.equal(ours[:cut], o[:cut]) and torch.equal(ours[300:], o[300:])
        assert not torch.equal(ours[cut:300], o[cut:300])


def conv_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = draw(64)
    weight = torch.randn(192, 4, device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    return torch.cat([inputs[n][:, 0] for n in "qkv"], 1), weight, inputs["cu_seqlens"]


def test_the_convolution_in_bf16_is_near_float64_forward_and_backward():
    x, weight, cu = conv_inputs()
    found = []
    for dtype, implementation in ((torch.bfloat16, None), (torch.float64, "eager")):
        own = [x.to(dtype, copy=True), weight.to(torch.promote_types(dtype, torch.float32), copy=True)]
        own = [leaf.requires_grad_() for leaf in own]
        y, tail = short_conv(*own, cu, implementation=implementation)
        found.append((y, tail, *torch.autograd.grad(y, own, x.flip(0).to(dtype))))
    for mine, oracle in zip(*found, strict=True):
        assert relative_error(mine, oracle) < 8e-3


@pytest.mark.parametrize("K", [64, 128])
def test_the_forward_can_be_captured_and_replayed_on_other_inputs(K):
    inputs, other = draw(K), draw(K, shift=1.0)
    other |= {n: other[n].flip(0) for n in TOKENS}
    x, weight, cu = conv_inputs()
    expected = gated_kda(**other), short_conv(-x, weight, cu)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and fills the allocator
        gated_kda(**inputs), short_conv(x, weight, cu)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gated_kda(**inputs), short_conv(x, weight, cu)
    for name in TOKENS:
        inputs[name].copy_(other[name])
    x.neg_()
    graph.replay()
    for mine, oracle in zip([*captured[0], *captured[1]], [*expected[0], *expected[1]], strict=True):
        assert torch.equal(mine, oracle)


def test_torch_compile_sees_one_graph():
    inputs = draw(128)
    x, weight, cu = conv_inputs()
    leaves = [inputs["q"].requires_grad_(), x.requires_grad_()]

    def together(inputs, x):
        o, S = gated_kda(**(inputs | {"q": 2.0 * inputs["q"]}))
        y, _ = short_conv(2.0 * x, weight, cu)
        return o.float().square().sum() + S.sum() + y.float().square().sum()

    expected, actual = together(inputs, x), torch.compile(together, fullgraph=True)(inputs, x)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=0)
    gradients = zip(torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves), strict=True)
    for mine, oracle in gradients:
        assert relative_error(mine, oracle) < 1e-2


@pytest.mark.parametrize("K", [64, 128])
def test_decoding_a_token_is_a_step_of_the_recurrence_between_its_neighbours(K):
    H, N = 3, 4
    make = torch.Generator("cuda").manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=make)

    qkv, z, b, gate = (random(N, *s).bfloat16() for s in ((3 * H * K,), (H, K), (H,), (H, K)))
    state, tail = random(N, H, K, K), random(N, 3, 3 * H * K).bfloat16()
    w = MixerWeights(random(4, 3 * H * K), 0.3 * random(H), 0.5 * random(H, K), random(K), 1e-5)
    cu = torch.arange(N + 1, dtype=torch.int32, device="cuda")
    y, new_tail = short_conv(
        qkv.double(), w.taps.T.double(), cu, initial_state=tail.double(), implementation="eager"
    )
    q, k, v = y.view(N, 3, H, K).unbind(1)
    g, beta = kda_gate(z.double(), w.A_log.double(), w.dt_bias.double()), b.double().sigmoid()
    o, S = kda_step(l2_norm(q), l2_norm(k), v, g, beta, state.double())
    expected = gated_rms_norm(o, gate.double(), w.norm_weight.double(), w.norm_eps).flatten(1)
    actual = kda_decode(qkv, z, b, gate, state, tail, cu[:N], w)
    assert relative_error(actual, expected) < 8e-3
    assert relative_error(state, S) < 1e-4
    assert torch.equal(tail, new_tail.bfloat16())


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_a_packing_without_tokens_hands_states_and_their_gradients_on(lengths):
    inputs = draw(128)
    own = inputs | {n: inputs[n][:0] for n in TOKENS}
    own["cu_seqlens"] = inputs["cu_seqlens"].new_zeros(len(lengths) + 1)
    own["initial_state"] = inputs["initial_state"][: len(lengths)].clone().requires_grad_()
    o, S = gated_kda(**own)
    assert o.shape == (0, 3, 128) and torch.equal(S, own["initial_state"])
    (d,) = torch.autograd.grad(S.sum(), own["initial_state"])
    assert torch.equal(d, torch.ones_like(S))


@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("W", [1, 4, 8])
def test_replay_is_sequential_decoding_inside_a_graph_after_every_accepted_length(W, K):
    H, N = 3, W + 2  # one sequence for each count of accepted tokens, 0 to W, and an inactive row
    make = torch.Generator("cuda").manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=make)

    def window() -> tuple[torch.Tensor, ...]:
        return tuple(random(N, W, *s).bfloat16() for s in ((3 * H * K,), (H, K), (H,), (H, K)))

    w = MixerWeights(random(4, 3 * H * K), 0.3 * random(H), 0.5 * random(H, K), random(K), 1e-5)
    state, tail = random(N, H, K, K), random(N, 3, 3 * H * K).bfloat16()
    decoded = state.clone(), tail.clone()
    slots = torch.cat([torch.randperm(N - 1), torch.tensor([-1])]).int().cuda()
    accepted = torch.arange(N, device="cuda", dtype=torch.int32).clamp(max=W)
    past = DraftWindow.empty(N, W, H, K, torch.bfloat16, "cuda")
    for kept in (past.qkv, past.z, past.b):
        kept.fill_(float("nan"))  # of slots that never had a window
    first, second = window(), window()
    kda_verify(*first, state, tail, past, torch.zeros_like(accepted), slots, w)
    assert torch.equal(state, decoded[0]) and torch.equal(tail, decoded[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = kda_verify(*second, state, tail, past, accepted, slots, w)
    assert torch.equal(state, decoded[0])  # captured, not run
    graph.replay()
    for t in range(W):
        kda_decode(*(x[:, t].contiguous() for x in first), *decoded, torch.where(t < accepted, slots, -1), w)
    assert torch.equal(state, decoded[0]) and torch.equal(tail, decoded[1])
    for t in range(W):
        expected = kda_decode(*(x[:, t].contiguous() for x in second), *decoded, slots, w)
        assert relative_error(o[:, t], expected.double()) < 4e-3
    assert not o[-1].any()
