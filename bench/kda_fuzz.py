"""Random shapes, scales and gates through the KDA kernels on one GPU, against the chunked form in float64.

    PYTHONPATH=src python bench/kda_fuzz.py h200 [--cases 10000] [--seed 0] [--budget SECONDS]

Each case is packed sequences of awkward lengths with inputs of random magnitudes, in bf16 with fp32 gate
parameters and states. Outputs and final states must be finite and close; every eighth case asks the same of
all gradients. The summary goes to `results/kda-fuzz-<device>.json`; the exit status is 1 if any case failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from openk3.ops.kda.gated import gated_kda

Tensor = torch.Tensor
NAMES = ("q", "k", "v", "z", "b", "A_log", "dt_bias", "initial_state")
# bf16 has 8 bits: an output sums hundreds of products of rounded operands.
LIMITS = {"o": 0.02, "final_state": 0.02, "gradients": 0.05}


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

    traits = {
        "lengths": lengths, "H": H, "K": K, "gate": rng.uniform(-12, 12), "write": rng.uniform(-8, 8),
        "A_log": rng.uniform(-2, 3), "q": magnitude(), "k": magnitude(), "v": magnitude(),
        "equal_keys": rng.random() < 0.1, "state": rng.choice([None, magnitude()]),
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


def _error(actual: Tensor, expected: Tensor) -> float:
    if not torch.isfinite(actual).all():
        return math.inf
    size = float(expected.norm())
    return float((actual.double() - expected).norm()) / size if size else float(actual.double().norm())


def _run(
    inputs: dict[str, Tensor], implementation: str | None, dtype: torch.dtype | None, grads: bool
) -> list[Tensor]:
    own = {n: x.to(dtype) if dtype and x.is_floating_point() else x.clone() for n, x in inputs.items()}
    leaves = [own[n].requires_grad_(grads) for n in NAMES if n in own]
    o, state = gated_kda(**own, implementation=implementation)  # type: ignore[call-overload]
    if not grads:
        return [o, state]
    make = torch.Generator(device="cuda").manual_seed(1)
    d_o = torch.randn(o.shape, device="cuda", generator=make).bfloat16().to(o.dtype)
    d_state = torch.randn(state.shape, device="cuda", generator=make).to(state.dtype)
    # Gradients of the two outputs in the size that each output has.
    d_o, d_state = (
        d_o * float(o.detach().float().std() + 1e-30),
        d_state * float(state.detach().std() + 1e-30),
    )
    return [o, state, *torch.autograd.grad([o, state], leaves, [d_o, d_state])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="h200", help="names the file of results")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/kda_fuzz.py needs a CUDA device")
        return
    rng, begun = random.Random(arguments.seed), time.monotonic()
    worst: dict[str, tuple[float, object]] = {}
    failures, done, with_gradients = [], 0, 0
    for case in range(arguments.cases):
        if time.monotonic() - begun > arguments.budget:
            break
        inputs, traits = _case(rng, arguments.seed * 1_000_003 + case)
        grads = case % 8 == 0
        actual = _run(inputs, None, None, grads)
        expected = _run(inputs, "eager", torch.float64, grads)
        names = ["o", "final_state", *(f"d {n}" for n in NAMES if n in inputs)]
        for name, mine, oracle in zip(names, actual, expected, strict=False):
            error = _error(mine.detach(), oracle.detach())
            if error > worst.get(name, (-1.0, None))[0]:
                worst[name] = (error, traits | {"case": case})
            if not error < LIMITS.get(name, LIMITS["gradients"]):
                failures.append({"what": name, "error": error, "case": case, **traits})
        done, with_gradients = done + 1, with_gradients + grads
    for name, (error, traits_of) in worst.items():
        print(f"{name:18s} {error:.2e}  {traits_of}")
    print(
        f"{done} cases, {with_gradients} with gradients, {len(failures)} failures, "
        f"{time.monotonic() - begun:.0f} s"
    )
    for failure in failures[:20]:
        print("FAILED", failure)
    summary = {
        "cases": done, "with_gradients": with_gradients, "failures": len(failures), "seed": arguments.seed,
        "limits": LIMITS, "largest": {name: error for name, (error, _) in worst.items()},
        "torch": torch.__version__, "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    path = Path(__file__).parent / "results" / f"kda-fuzz-{arguments.device}.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
