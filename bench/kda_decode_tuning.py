"""KDA decoding and verification on one GPU: correct first, then timed.

    PYTHONPATH=src python bench/kda_decode_tuning.py [--only decode|verify]

Outputs and states are compared with the layer in float64, replayed states with decoded ones to the bit, both
inside a CUDA graph. Times are those of `kda_decode.py` (medians over graph replays that rotate over pools of
states), beside the floor: all that must move (states, projections, tails, windows and outputs) at the speed
of a copy.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from gpu_timing import _copy_bandwidth, milliseconds_in_graph
from kda_decode import DECODE, HEADS, VERIFY, C, K, Work, _our_step, _our_window, _projections, _weights

from openk3.ops.kda.decoding import DraftWindow, MixerWeights, kda_decode, kda_verify

Tensor = torch.Tensor


def by_equations(
    x: list[Tensor], state: Tensor, tail: Tensor, w: MixerWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """A token of each of N sequences in float64 (report §2.1.1 eq. 1-6): o `[N, H V]`, states, tails."""
    qkv, z, b, gate = (t.double() for t in x)
    seen = torch.cat([tail.double(), qkv[:, None]], 1)
    q, k, v = torch.nn.functional.silu((seen * w.taps.double()).sum(1)).view(len(z), 3, HEADS, K).unbind(1)
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    rate, u = w.A_log.double().exp()[:, None], z + w.dt_bias.double()
    assert w.lower_bound is not None
    S = state.double() * (w.lower_bound * torch.sigmoid(rate * u)).exp()[:, :, None]
    error = torch.sigmoid(b)[..., None] * (v - (S @ k[..., None])[..., 0])
    S = S + error[..., None] * k[:, :, None]
    o = (S @ q[..., None])[..., 0] * K**-0.5
    o = o / (o.square().mean(-1, keepdim=True) + w.norm_eps).sqrt() * w.norm_weight.double()
    return (o * torch.sigmoid(gate)).flatten(1), S, seen[:, 1:]


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def in_graph(call: Any) -> Tensor:
    """The output of one replay; `call` has been run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    torch.cuda.synchronize()
    return out  # type: ignore[no-any-return]


def check_decode() -> None:
    """One token against float64, with an inactive row."""
    torch.manual_seed(0)
    x, w = _projections((5,), 1), _weights()
    slots = torch.tensor([4, -1, 0, 5, 2], device="cuda", dtype=torch.int32)
    state, tail = torch.randn(6, HEADS, K, K, device="cuda"), torch.randn(6, 3, C, device="cuda").bfloat16()
    first = state.clone(), tail.clone()
    kda_decode(*x, state, tail, slots, w)
    state.copy_(first[0])
    tail.copy_(first[1])
    o = in_graph(lambda: kda_decode(*x, state, tail, slots, w))
    live = slots >= 0
    index = slots[live].long()
    exact, S, seen = by_equations([t[live] for t in x], first[0][index], first[1][index], w)
    errors = error(o[live], exact), error(state[index], S)
    assert errors[0] < 3e-3 and errors[1] < 3e-6, errors
    assert not o[1].any() and torch.equal(tail[index], seen.bfloat16())
    for slot in (1, 3):
        assert torch.equal(state[slot], first[0][slot]) and torch.equal(tail[slot], first[1][slot])
    print(f"decode: error of outputs {errors[0]:.2e} (bf16 rounding included), of states {errors[1]:.2e}")


def check_verify(W: int) -> None:
    """Every accepted length against sequential decoding, and outputs against float64."""
    torch.manual_seed(0)
    N, w = W + 2, _weights()
    first, second = _projections((N, W), 2), _projections((N, W), 3)
    slots = torch.cat([torch.randperm(N - 1), torch.tensor([-1])]).int().cuda()
    accepted = torch.arange(N, device="cuda", dtype=torch.int32).clamp(max=W)
    state, tail = torch.randn(N, HEADS, K, K, device="cuda"), torch.randn(N, 3, C, device="cuda").bfloat16()
    decoded = state.clone(), tail.clone()
    past = DraftWindow.empty(N, W, HEADS, K, torch.bfloat16, "cuda")
    for kept in (past.qkv, past.z, past.b):
        kept.fill_(float("nan"))
    kda_verify(*first, state, tail, past, torch.zeros_like(accepted), slots, w)
    state.copy_(decoded[0])
    o = in_graph(lambda: kda_verify(*second, state, tail, past, accepted, slots, w))
    for t in range(W):
        now = torch.where(t < accepted, slots, -1)
        kda_decode(*(y[:, t].contiguous() for y in first), *decoded, now, w)
    assert torch.equal(state, decoded[0]), f"states differ by {(state - decoded[0]).abs().max():.3e}"
    assert torch.equal(tail, decoded[1])
    index, worst = slots[:-1].long(), 0.0
    S, seen = decoded[0][index], decoded[1][index]
    for t in range(W):
        exact, S, seen = by_equations([y[:-1, t] for y in second], S, seen, w)
        worst = max(worst, error(o[:-1, t], exact))
    assert worst < 3e-3 and not o[-1].any(), worst
    print(f"verify W={W}: states equal to the bit, error of outputs {worst:.2e} (bf16 rounding included)")


def moved(work: Work) -> float:
    """Bytes: state and tail both ways, projections in, output out; a window also kept and read again."""
    N, W, token = work.sequences, work.window, 2 * (C + 2 * HEADS * K + HEADS)
    kept = 2 * (C + HEADS * K + HEADS)
    replays = N * W * kept + N * (W + 1) / 2 * kept if work in VERIFY else 0
    return 2 * N * (HEADS * K * K * 4 + 3 * C * 2) + N * W * (token + 2 * HEADS * K) + replays


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["decode", "verify"])
    only = parser.parse_args().only
    if not torch.cuda.is_available():
        print("bench/kda_decode_tuning.py needs a CUDA device")
        return
    bandwidth = _copy_bandwidth()
    if only != "verify":
        check_decode()
        show_times(DECODE, bandwidth)
    if only != "decode":
        for W in (4, 8):
            check_verify(W)
        show_times(VERIFY, bandwidth)


def show_times(works: list[Work], bandwidth: float) -> None:
    for work in works:
        step = _our_window if work in VERIFY else _our_step
        ms = milliseconds_in_graph([step(work, seed) for seed in range(work.pools)], replays=10)
        floor = 1e3 * moved(work) / bandwidth
        print(f"{work.name}: {ms:.4f} ms, {moved(work) / ms / 1e6:.0f} GB/s, {ms / floor:.2f}x", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
