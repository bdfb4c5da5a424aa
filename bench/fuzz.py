"""Random shapes and magnitudes through the GPU kernels of every operator but KDA, against float64.

    PYTHONPATH=src python bench/fuzz.py h200 [--cases 200] [--only FAMILY ...] [--jobs 6] [--budget SECONDS]
    PYTHONPATH=src python bench/fuzz.py h200 --only experts --first 17 --cases 1      repeats one case

A case draws inputs, runs the kernels twice, and the operator's own float64 form (families are in
bench/fuzz_cases.py; KDA has bench/kda_fuzz.py). Results must be finite, equal to the bit both times, and
close: the error is at most RELATIVE of the result's norm, by the inputs' dtype, plus SLACK times what the
exact results change when inputs are rounded to their dtype at random, plus what fp32 does not resolve beside
the largest of the case's results. So results that nearly cancel are judged by what any kernel could know of
them. Choices (experts, plans, codes) must be exact.

Each family has its own process at a time. The summary goes to `results/fuzz-<device>.json`, family by family;
the exit status is 1 if a case failed, and what repeats it is printed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import os
import random
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from fuzz_cases import FAMILIES, Case

Tensor = torch.Tensor
RELATIVE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
SLACK, BESIDE = 8.0, 1e-6
ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-22}


def _double(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}


def _swayed(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """In float64, as if rounded to their dtype at random."""
    return {
        n: x.double() * (1 + ULP[x.dtype] * (torch.rand(x.shape, device=x.device, dtype=torch.float64) - 0.5))
        if x.is_floating_point()
        else x
        for n, x in inputs.items()
    }


def _results(
    case: Case, inputs: dict[str, Tensor], implementation: str, seeds: dict[str, Tensor] | None
) -> dict[str, Tensor]:
    """Outputs by name and, given what reaches them, gradients to what the case wants."""
    leaves = {n: x.detach().clone().requires_grad_(n in case.wanted) for n, x in inputs.items()}
    outputs = case.call(leaves, implementation)
    results = {n: x.detach() for n, x in outputs.items()}
    reached = [n for n, x in outputs.items() if x.requires_grad]
    if seeds is not None and case.wanted and reached:
        grads = torch.autograd.grad(
            [outputs[n] for n in reached],
            [leaves[n] for n in case.wanted],
            [seeds[n].to(outputs[n].dtype) for n in reached],
        )
        results |= {f"d {n}": g for n, g in zip(case.wanted, grads, strict=True)}
    return results


def judge(case: Case) -> tuple[dict[str, float], list[str]]:
    """Each result's error over what it may be, and what is wrong."""
    exact = _double(case.inputs)
    plain = _results(case, exact, "eager", None)
    seeds = {n: torch.randn_like(x).bfloat16().double() for n, x in plain.items() if x.is_floating_point()}
    expected = _results(case, exact, "eager", seeds)
    sway = _results(case, _swayed(case.inputs), "eager", seeds)
    mine, again = (_results(case, case.inputs, "triton", seeds) for _ in range(2))
    largest = max((float(x.double().norm()) for x in expected.values()), default=0.0)
    relative = max((RELATIVE.get(x.dtype, 0.0) for x in case.inputs.values()), default=0.0)
    shares, wrong = {}, []
    for name, oracle in expected.items():
        x = mine[name]
        if not torch.equal(x.nan_to_num(nan=7.0), again[name].nan_to_num(nan=7.0)):
            wrong.append(f"{name}: two runs differ")
        infinite = ~oracle.isfinite()
        if bool((x.isfinite() == infinite).any()):
            wrong.append(f"{name}: not finite")
            continue
        oracle, x, near = (y.double().masked_fill(infinite, 0) for y in (oracle, x, sway[name]))
        allowed = relative * oracle.norm() + SLACK * (near - oracle).norm() + BESIDE * largest + 1e-30
        shares[name] = float((x - oracle).norm() / allowed)
        if not shares[name] <= 1:
            wrong.append(f"{name}: {shares[name]:.3g} of what its error may be")
    return shares, wrong + (case.facts() if case.facts else [])


def run_family(job: tuple[str, int, int, float, str]) -> dict[str, Any]:
    """Cases of one family, in this process."""
    family, first, count, until, device = job
    torch.set_num_threads(1)
    largest: dict[str, float] = {}
    failures: list[dict[str, Any]] = []
    done = 0
    for number in range(first, first + count):
        if time.time() > until:
            break
        torch.manual_seed(number)
        rng = random.Random(f"{family} {number}")
        traits: Any = None
        try:
            case = FAMILIES[family](rng, device)
            traits = case.traits
            shares, wrong = judge(case)
        except Exception:  # noqa: BLE001 - one case must not cost the others; it is counted as a failure
            shares, wrong = {}, [traceback.format_exc()]
        largest = {n: max(largest.get(n, 0.0), shares.get(n, 0.0)) for n in {**largest, **shares}}
        done += 1
        if wrong:
            failures.append({"case": number, "wrong": wrong, "traits": traits})
    return {"family": family, "done": done, "failures": failures, "largest": largest}


def merge(parts: list[dict[str, Any]], path: Path) -> None:
    """Write families into the summary; those of other runs stay."""
    known = json.loads(path.read_text()) if path.exists() else {}
    for part in parts:
        known[part["family"]] = {
            "cases": part["done"],
            "failures": len(part["failures"]),
            "largest share": {n: float(f"{x:.3g}") for n, x in sorted(part["largest"].items())},
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
        }
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    os.replace(fresh, path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="h200", help="names the file of results")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--cases", type=int, default=200, help="of each family")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--jobs", type=int, default=6, help="processes that share the card")
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="SECONDS", help="begin nothing later"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/fuzz.py needs a CUDA device")
        return 0
    begun = time.time()
    families = arguments.only or list(FAMILIES)
    jobs = [(f, arguments.first, arguments.cases, begun + arguments.budget, "cuda") for f in families]
    failed = 0
    path = Path(__file__).parent / "results" / f"fuzz-{arguments.device}.json"
    with ProcessPoolExecutor(
        arguments.jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        for future in as_completed([pool.submit(run_family, job) for job in jobs]):
            part = future.result()
            worst = max(part["largest"].items(), key=lambda item: item[1], default=("", 0.0))
            print(
                f"{part['family']:14s} {part['done']:5} cases, {len(part['failures'])} failures; largest: "
                f"{worst[0]} {worst[1]:.2f} of what it may be ({time.time() - begun:.0f} s)",
                flush=True,
            )
            for failure in part["failures"][:5]:
                print("  FAILED", failure["traits"], *failure["wrong"], sep="\n    ")
                again = f"--only {part['family']} --first {failure['case']} --cases 1"
                print(f"    again: python bench/fuzz.py {again}")
            failed += len(part["failures"])
            if arguments.first == 0:
                merge([part], path)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
