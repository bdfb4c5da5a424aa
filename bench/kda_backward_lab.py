"""The backward kernels of KDA on one GPU: errors against float64, then ms of each kernel by variant.

    PYTHONPATH=src python bench/kda_backward_lab.py

Errors are those of all gradients against autograd through the token recurrence in float64 (T = 256, H = 2,
three sequences). Times are medians at T = 8192, H = 96, K = V = 128, bf16, one sequence, on what the forward
kernels hand over.
"""

from __future__ import annotations

import torch
import triton

from openk3.ops.kda import kda
from openk3.ops.kda.kernels.intra_backward import IntraTiles, intra_backward
from openk3.ops.kda.kernels.intra_backward_hopper import intra_backward_hopper
from openk3.ops.kda.kernels.plan import plan_chunks
from openk3.ops.kda.kernels.prepare import prepare
from openk3.ops.kda.kernels.scan import scan
from openk3.ops.kda.kernels.scan_backward import ScanBackwardTiles, scan_backward
from openk3.ops.kda_gate import kda_gate
from openk3.ops.norm import l2_norm

BOUND = -5.0
NAMES = ("q", "k", "v", "z", "b", "A_log", "dt_bias")
SCANS = [
    ScanBackwardTiles(BV, num_warps, stages)
    for BV, num_warps, stages in [(128, 8, 2), (64, 4, 2), (64, 4, 1)]
]
INTRAS = [IntraTiles(BK, num_warps) for BK, num_warps in [(32, 4), (32, 8)]]


def draw(T: int, H: int, K: int, V: int, gate: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Raw inputs in `dtype` with decay logits around `gate`; A_log and dt_bias fp32."""

    def normal(*shape):
        return torch.randn(*shape, device="cuda")

    inputs = {
        "q": normal(T, H, K),
        "k": normal(T, H, K),
        "v": normal(T, H, V),
        "z": gate + normal(T, H, K),
        "b": normal(T, H),
    }
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    return inputs | {"A_log": 0.3 * normal(H), "dt_bias": normal(H, K)}


def forward(inputs, cu_seqlens, initial_state):
    T, _, K = inputs["q"].shape
    plan = plan_chunks(cu_seqlens, T)
    raw = [inputs[name] for name in ("q", "k", "z", "b", "A_log", "dt_bias")]
    prepared = prepare(*raw, plan, BOUND, K**-0.5)
    scanned = scan(inputs["v"], prepared, plan, initial_state, store_states=True, store_errors=True)
    return plan, prepared, scanned


def errors(gate: float) -> dict[str, dict[str, float]]:
    """Relative L2 error of every gradient, by kernel and scale of the gradients."""
    lengths, H, K, V = [130, 1, 125], 2, 128, 128
    T = sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    inputs = draw(T, H, K, V, gate, torch.bfloat16)
    initial_state = torch.randn(len(lengths), H, V, K, device="cuda")
    d_o = torch.randn(T, H, V, device="cuda").to(torch.bfloat16)
    d_final = torch.randn_like(initial_state)

    leaves = {name: x.double().requires_grad_() for name, x in inputs.items()}
    leaves["initial_state"] = initial_state.double().requires_grad_()
    g = kda_gate(
        leaves["z"], leaves["A_log"], leaves["dt_bias"], lower_bound=BOUND, implementation="reference"
    )
    q, k = (l2_norm(leaves[name], implementation="reference") for name in ("q", "k"))
    outputs = kda(
        q,
        k,
        leaves["v"],
        g,
        leaves["b"].sigmoid(),
        cu_seqlens,
        initial_state=leaves["initial_state"],
        implementation="reference",
    )
    expected = dict(
        zip(
            leaves,
            torch.autograd.grad(outputs, list(leaves.values()), [d_o.double(), d_final.double()]),
            strict=True,
        )
    )

    plan, prepared, scanned = forward(inputs, cu_seqlens, initial_state)
    found = {}
    for d_scale in (1.0, 2.0**-20):
        d_v, d_states, d_initial = scan_backward(d_scale * d_o, prepared, plan, d_scale * d_final)
        for run in (intra_backward, intra_backward_hopper):
            grads = run(
                *(inputs[name] for name in NAMES),
                scanned.o,
                d_scale * d_o,
                d_v,
                scanned.states,
                d_states,
                scanned.errors,
                plan,
                BOUND,
                K**-0.5,
            )
            actual = {**grads._asdict(), "v": d_v, "initial_state": d_initial}
            found[f"{run.__name__}, gradients of {d_scale:g}"] = {
                name: float((actual[name].double() / d_scale - x).norm() / x.norm().clamp_min(1e-300))
                for name, x in expected.items()
            }
    return found


def times(T=8192, H=96, K=128, V=128) -> None:
    cu_seqlens = torch.tensor([0, T], device="cuda", dtype=torch.int32)
    inputs = draw(T, H, K, V, -2.0, torch.bfloat16)
    plan, prepared, scanned = forward(inputs, cu_seqlens, None)
    d_o = torch.randn(T, H, V, device="cuda").to(torch.bfloat16)

    def report(name, run):
        try:
            print(
                f"{name:60s} {triton.testing.do_bench(run, warmup=10, rep=60, return_mode='median'):8.3f} ms"
            )
        except triton.runtime.errors.OutOfResources as error:
            print(f"{name:60s} {error}")

    for tiles in SCANS:
        report(str(tiles), lambda tiles=tiles: scan_backward(d_o, prepared, plan, None, tiles=tiles))
    d_v, d_states, _ = scan_backward(d_o, prepared, plan, None)
    arguments = (
        *(inputs[name] for name in NAMES),
        scanned.o,
        d_o,
        d_v,
        scanned.states,
        d_states,
        scanned.errors,
        plan,
        BOUND,
        K**-0.5,
    )
    for tiles in INTRAS:
        report(f"pairs and {tiles}", lambda tiles=tiles: intra_backward(*arguments, tiles=tiles))
    report("intra_backward_hopper", lambda: intra_backward_hopper(*arguments))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        intra_backward(*arguments)
        torch.cuda.synchronize()
    for event in sorted(profile.key_averages(), key=lambda e: -e.device_time_total)[:6]:
        print(f"{event.key[:60]:60s} {event.device_time_total / 1000:8.3f} ms")


def main() -> None:
    if not torch.cuda.is_available():
        print("bench/kda_backward_lab.py needs a CUDA device")
        return
    torch.manual_seed(0)
    for name, gate in [("open", -8.0), ("middle", 0.0), ("at the bound", 12.0)]:
        for kernel, found in errors(gate).items():
            row = "  ".join(f"{key} {value:.1e}" for key, value in found.items())
            print(f"gate {name}, {kernel}: {row}")
    times()


if __name__ == "__main__":
    main()
