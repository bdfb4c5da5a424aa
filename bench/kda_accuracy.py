"""Errors of our KDA kernels and of fla's on the same inputs, against the recurrence in float64.

Relative L2 of outputs, final states and the gradient of every input, bf16 in and out, over heads and draws of
the inputs together: a few numbers of A_log alone, or of the last token's beta, would tell luck. The truth is
the token by token recurrence with autograd; for long sequences the chunked form in float64, which is checked
against it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import kda_fla
import torch
from kda_chunkwise import Operator, ours
from kda_inputs import Chunkwise, Tokens
from rows import RESULTS

from openk3.ops.dispatch import Implementation
from openk3.ops.kda import kda
from openk3.ops.kda_gate import kda_gate
from openk3.ops.norm import l2_norm

RECURRENT = 256  # longest sequences that the loop over tokens is asked to do
FORMS_AGREE = 1e-10  # the two float64 forms, which differ by rounding alone

Results = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    lengths: tuple[int, ...]
    gate: float = 0.0  # around which decay logits lie: -6 keeps nearly all, 6 is at the bound
    K: int = 128
    identical: bool = False  # all tokens of a sequence share one key, decay slowly and write fully
    heads: int = 32
    draws: int = 2

    def draw(self, seed: int = 0) -> Chunkwise:
        T, N = sum(self.lengths), len(self.lengths)
        tokens = Tokens.draw(T, self.heads, self.K, seed=2 * seed + 3, gate=self.gate)
        if self.identical:
            one_each = torch.cat([torch.full((n,), i) for i, n in enumerate(self.lengths)]).cuda()
            tokens = replace(tokens, k=tokens.k[one_each], b=torch.full_like(tokens.b, 8.0))
        state = torch.randn(
            N,
            self.heads,
            self.K,
            self.K,
            device="cuda",
            generator=torch.Generator("cuda").manual_seed(2 * seed + 4),
        )
        return Chunkwise.pack(self.lengths, tokens, state)


EDGES = (0, 1, 0, 63, 1, 64, 65, 0, 130, 1, 0)
CASES = [
    Case("gates_near_0", (1023,), gate=-6.0),
    Case("gates_in_the_middle", (1023,)),
    Case("gates_at_the_bound", (1023,), gate=6.0),
    Case("16_identical_tokens", (16,) * 8, gate=-8.0, identical=True),
    Case("empty_and_one_token", EDGES),
    Case("k64_gates_near_0", (1023,), gate=-6.0, K=64),
    Case("k64_gates_in_the_middle", (777, 200), K=64),
    Case("k64_gates_at_the_bound", (1023,), gate=6.0, K=64),
    Case("t131072", (131072,), gate=-2.0, heads=8, draws=4),
]


def in_float64(implementation: Implementation) -> Operator:
    """The same function from the operators that have float64."""

    def run(x: Chunkwise) -> tuple[torch.Tensor, torch.Tensor]:
        g = kda_gate(x.z, x.A_log, x.dt_bias, lower_bound=x.lower_bound, implementation="reference")
        q, k = (l2_norm(part, implementation="reference") for part in (x.q, x.k))
        return kda(
            q, k, x.v, g, x.b.sigmoid(), x.cu_seqlens,
            initial_state=x.initial_state, implementation=implementation,
        )  # fmt: skip

    return run


def results(operator: Operator, x: Chunkwise) -> Results:
    """Output, final states, and the gradients of one random linear function of both."""
    x = x.asking_for_gradients()
    o, state = operator(x)
    assert state is not None
    seed = torch.Generator("cuda").manual_seed(5)
    d_o = torch.randn(o.shape, device="cuda", generator=seed).bfloat16().to(o.dtype)
    d_state = torch.randn(state.shape, device="cuda", generator=seed).to(state.dtype)
    leaves = x.leaves()
    gradients = torch.autograd.grad([o, state], list(leaves.values()), [d_o, d_state])
    named = {f"d {name}": d for name, d in zip(leaves, gradients, strict=True)}
    return {"o": o.detach(), "final state": state.detach(), **named}


def relative_errors(pairs: Sequence[tuple[Results, Results]]) -> dict[str, float]:
    """Of all pairs of actual and exact results together."""

    def norm(parts: Iterable[torch.Tensor]) -> float:
        return math.hypot(*(float(x.norm()) for x in parts))

    return {
        name: norm(a[name].double() - x[name] for a, x in pairs) / norm(x[name] for _, x in pairs)
        for name in pairs[0][1]
    }


def truth(x: Chunkwise) -> Results:
    exact = replace(x, **{name: part.double() for name, part in x.leaves().items()})
    return results(in_float64("eager" if max(x.lengths) > RECURRENT else "reference"), exact)


def check_the_chunked_form() -> None:
    """What stands in for the recurrence at long sequences has to be the same function."""
    x = Case("", (300, 0, 211)).draw()
    exact = replace(x, **{name: part.double() for name, part in x.leaves().items()})
    errors = relative_errors([(results(in_float64("eager"), exact), results(in_float64("reference"), exact))])
    print(
        f"float64: chunked form differs from the recurrence by {max(errors.values()):.1e} at most", flush=True
    )
    if not max(errors.values()) < FORMS_AGREE:
        raise RuntimeError(f"the two float64 forms differ: {errors}")


def report(device: str, only: Sequence[str] | None, out_of_time: Callable[[], bool], peer: bool) -> int:
    """Print all errors, write them as CSV case by case; how many cases failed or were not finite."""
    if unknown := set(only or ()) - {case.name for case in CASES}:
        raise SystemExit(f"no such case: {', '.join(sorted(unknown))}; {', '.join(c.name for c in CASES)}")
    check_the_chunked_form()
    lines: list[tuple[str, str, float, float]] = []
    failed = 0
    for case in CASES:
        if only and case.name not in only:
            continue
        if out_of_time():
            print(f"{case.name}: not started, out of time")
            failed += 1
            continue
        drawn = [case.draw(seed) for seed in range(case.draws)]
        exact = [truth(x) for x in drawn]
        mine = relative_errors([(results(ours, x), y) for x, y in zip(drawn, exact, strict=True)])
        theirs = _peer_errors(drawn, exact) if peer else {}
        for name, error in mine.items():
            lines.append((case.name, name, error, theirs.get(name, float("nan"))))
            print("{:26s} {:16s} ours {:.2e}   fla {:.2e}".format(*lines[-1]), flush=True)
        failed += not all(error < 1 for error in mine.values())  # NaN included
        if peer:
            _write(RESULTS / f"kda-accuracy-{device}.csv", lines)
        del exact
        torch.cuda.empty_cache()
    above = [line for line in lines if line[2] > line[3]]
    print(
        f"{len(lines)} errors, {len(above)} above fla's:",
        *(f"\n  {c}: {n} {a:.2e} > {b:.2e}" for c, n, a, b in above),
    )
    return failed


def _write(path: Path, lines: Sequence[tuple[str, str, float, float]]) -> None:
    """Cases that were measured replace those of the file, in the order of `CASES`."""
    new = [(c, n, f"{a:.3g}", f"{b:.3g}") for c, n, a, b in lines]
    measured = {line[0] for line in new}
    kept: list[tuple[str, ...]] = []
    if path.exists():
        with path.open(newline="") as file:
            kept = [tuple(line) for line in csv.reader(file)][1:]
    order = [case.name for case in CASES]
    every = [line for line in kept if line[0] not in measured and line[0] in order] + new
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["case", "quantity", "ours", "fla 0.6.0"])
        writer.writerows(sorted(every, key=lambda line: order.index(line[0])))


def _peer_errors(drawn: Sequence[Chunkwise], exact: Sequence[Results]) -> dict[str, float]:
    """Empty where the peer cannot do the case, which is said."""

    def fla(x: Chunkwise) -> tuple[torch.Tensor, torch.Tensor | None]:
        return kda_fla.chunkwise(x, final_state=True)

    try:
        return relative_errors([(results(fla, x), y) for x, y in zip(drawn, exact, strict=True)])
    except Exception as problem:  # noqa: BLE001 - whatever it is, it is the peer's
        print(f"fla fails: {type(problem).__name__}: {str(problem)[:200]}")
        return {}
