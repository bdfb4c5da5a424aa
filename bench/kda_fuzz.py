"""Random shapes, scales and gates through the KDA kernels on one GPU, against the chunked form in float64.

    PYTHONPATH=src python bench/kda_fuzz.py h200 [--cases 10000] [--seed 0] [--jobs 4] [--budget SECONDS]

Each case is packed sequences of awkward lengths with inputs of random magnitudes, in bf16 with fp32 gate
parameters and states; in every fourth or so the gate has no bound. Outputs and final states must be finite
and close; every eighth case asks the same of all gradients.

Close: the error is at most a hundredth plus SLACK times what the exact results change when what enters
products in bf16 (q, k, v, the state, and the gradients given to a backward) is rounded at random, the largest
of 32 tries where the first is not enough. No kernel does better for a scalar that nearly cancels, and one
that sums 64 such roundings does up to 8 times worse.

The summary goes to `results/kda-fuzz-<device>.json`; the exit status is 1 if any case failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from openk3.ops.kda.gated import gated_kda

Tensor = torch.Tensor
NAMES = ("q", "k", "v", "z", "b", "A_log", "dt_bias", "initial_state")
SLACK, TRIES = 10.0, 32
# Beside it: results are stored in bf16, and a scalar may happen to sway by little; what fp32 does not hold.
RELATIVE, ABSOLUTE = 0.01, 1e-30


def _case(rng: random.Random, seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    H, K = rng.choice([1, 2]), rng.choice([64, 128])
    lengths = [
        rng.choice([0, 1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, rng.randrange(1, 400)])
        for _ in range(rng.randrange(1, 6))
    ]
    if not sum(lengths):
        lengths.append(1)
    T = sum(lengths)
    make = torch.Generator(device="cuda").manual_seed(seed)

    def draw(
        *shape: int, scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        return (torch.randn(*shape, device="cuda", generator=make) * scale + shift).to(dtype)

    def magnitude() -> float:
        return float(10 ** rng.uniform(-4, 4))

    traits: dict[str, Any] = {
        "lengths": lengths, "H": H, "K": K, "gate": rng.uniform(-12, 12), "write": rng.uniform(-8, 8),
        "A_log": rng.uniform(-2, 3), "q": magnitude(), "k": magnitude(), "v": magnitude(),
        "equal_keys": rng.random() < 0.1, "state": rng.choice([None, magnitude()]),
        "lower_bound": rng.choice([-5.0, -5.0, -5.0, None]),
    }  # fmt: skip
    inputs = {
        "q": draw(T, H, K, scale=traits["q"]),
        "k": draw(T, H, K, scale=traits["k"]),
        "v": draw(T, H, K, scale=traits["v"]),
        "z": draw(T, H, K, shift=traits["gate"]),
        "b": draw(T, H, shift=traits["write"]),
        "A_log": draw(H, scale=0.5, shift=traits["A_log"], dtype=torch.float32),
        "dt_bias": draw(H, K, dtype=torch.float32),
    }
    if traits["equal_keys"]:
        inputs["k"] = inputs["k"][:1].expand(T, H, K).contiguous()
    if traits["state"] is not None:
        inputs["initial_state"] = draw(len(lengths), H, K, K, scale=traits["state"], dtype=torch.float32)
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    return inputs | {"cu_seqlens": cu_seqlens}, traits


def _results(
    inputs: dict[str, Tensor],
    lower_bound: float | None,
    implementation: str | None,
    seeds: tuple[Tensor, Tensor] | None,
) -> list[Tensor]:
    """Output, final states and, given gradients to both, those of all inputs."""
    own = {n: x.clone() for n, x in inputs.items()}
    leaves = [own[n].requires_grad_(seeds is not None) for n in NAMES if n in own]
    o, state = gated_kda(**own, lower_bound=lower_bound, implementation=implementation)  # type: ignore[call-overload]
    if seeds is None:
        return [o, state]
    grads = torch.autograd.grad(
        [o, state], leaves, [d.to(x.dtype) for d, x in zip(seeds, (o, state), strict=True)]
    )
    return [o.detach(), state.detach(), *grads]


def _round(x: Tensor) -> Tensor:
    """x in float64 as if rounded to bf16 at random: off by up to half a unit of the last place."""
    return x * (1 + 2.0**-8 * (torch.rand_like(x) - 0.5))


def _rounded(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: _round(x) if n in ("q", "k", "v", "initial_state") else x for n, x in inputs.items()}


def _compare(
    inputs: dict[str, Tensor], bound: float | None, gradients: bool
) -> list[tuple[str, float, float]]:
    """For each result its relative error, and the error over what it may be, infinite if not finite."""
    seeds: tuple[Tensor, Tensor] | None = None
    exact = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    expected = _results(exact, bound, "eager", None)
    if gradients:
        # Gradients of the two outputs in the size that each output has.
        d_o, d_state = (torch.randn_like(x) * (x.std(correction=0) + 1e-30) for x in expected)
        seeds = d_o.bfloat16().double(), d_state.float().double()
        expected = _results(exact, bound, "eager", seeds)
    names = ["o", "final_state", *(f"d {n}" for n in NAMES if n in inputs)]
    actual = _results(inputs, bound, None, seeds)
    found, sways = [], [0.0] * len(actual)
    for tries in (1, TRIES - 1):
        for _ in range(tries):
            given = seeds and (_round(seeds[0]), _round(seeds[1]))
            near = _results(_rounded(exact), bound, "eager", given)
            sways = [max(w, float((x - y).norm())) for w, x, y in zip(sways, near, expected, strict=True)]
        found = []
        for name, x, y, sway in zip(names, actual, expected, sways, strict=False):
            error, size = float((x.double() - y).norm()), float(y.norm())
            allowed = SLACK * sway + RELATIVE * size + ABSOLUTE * x.numel() ** 0.5
            finite = bool(torch.isfinite(x).all())
            found.append((name, error / max(size, ABSOLUTE), error / allowed if finite else math.inf))
        if all(share <= 1 for *_, share in found):
            break
    return found


def _fuzz(job: tuple[int, list[int], float]) -> dict[str, Any]:
    """Cases of one process."""
    seed, cases, until = job
    largest: dict[str, tuple[float, float, dict[str, Any]]] = {}
    failures, done, with_gradients = [], 0, 0
    for case in cases:
        if time.time() > until:
            break
        inputs, traits = _case(random.Random(f"{seed} {case}"), seed * 1_000_003 + case)
        torch.manual_seed(case)
        for name, error, share in _compare(inputs, traits["lower_bound"], case % 8 == 0):
            if share > largest.get(name, (-1.0, 0.0, {}))[0]:
                largest[name] = share, error, traits | {"case": case}
            if not share <= 1:
                failures.append({"what": name, "error": error, "share": share, "case": case, **traits})
        done, with_gradients = done + 1, with_gradients + (case % 8 == 0)
    return {"done": done, "gradients": with_gradients, "failures": failures, "largest": largest}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="h200", help="names the file of results")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=4, help="processes that share the card")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/kda_fuzz.py needs a CUDA device")
        return
    begun = time.time()
    until = begun + arguments.budget
    # In runs of eight, of which the first has gradients.
    shares = [
        [case for case in range(arguments.cases) if case // 8 % arguments.jobs == job]
        for job in range(arguments.jobs)
    ]
    jobs = [(arguments.seed, share, until) for share in shares]
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
        parts = list(pool.map(_fuzz, jobs))
    done, with_gradients = (sum(part[key] for part in parts) for key in ("done", "gradients"))
    failures = sorted((f for part in parts for f in part["failures"]), key=lambda f: f["case"])
    largest = {
        name: max((part["largest"][name] for part in parts if name in part["largest"]), key=lambda x: x[0])
        for name in dict.fromkeys(name for part in parts for name in part["largest"])
    }
    for name, (share, error, traits) in largest.items():
        print(f"{name:18s} {share:.2f} of what it may be; relative {error:.1e}  {traits}")
    seconds = time.time() - begun
    print(f"{done} cases, {with_gradients} with gradients, {len(failures)} failures, {seconds:.0f} s")
    for failure in failures[:40]:
        print("FAILED", failure)
    summary = {
        "cases": done, "with_gradients": with_gradients, "failures": len(failures), "seed": arguments.seed,
        "slack": SLACK, "largest share": {name: share for name, (share, _, _) in largest.items()},
        "torch": torch.__version__, "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    path = Path(__file__).parent / "results" / f"kda-fuzz-{arguments.device}.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
