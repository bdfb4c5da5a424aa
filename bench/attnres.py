"""AttnRes kernels on one GPU, beside fla 0.6.0's and torch.compile: errors against float64, then times.

    PYTHONPATH=src python bench/attnres.py h200              rows, merged into results/h200.json
    PYTHONPATH=src python bench/attnres.py h200 --variants   times of other launches, nothing merged
    PYTHONPATH=src python bench/attnres.py h200 --chain      r1's stream, both ways to add up gradients

9 sources in bf16 at K3's width. Floors are bytes: each source read once and each output written once; with
the backward also sources and the gradient read, and gradients to sources written. Times are medians by CUDA
events, L2 cache flushed; those of few tokens are medians in CUDA graphs over rotating data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import triton
from gpu_timing import Ceilings, ceilings, milliseconds, milliseconds_in_graph
from kda_fla import compile_candidates_together
from rows import row
from steps import Steps, add_options

from openk3.ops.attnres import BankMix, attnres_add_mix_norm, attnres_bank_mixes, attnres_mix

S, T, D, Q = 9, 8192, 7168, 12
LIMIT = 6e-3  # relative L2 that rounding results to bf16 explains, with room
Tensor = torch.Tensor
Call = Callable[[], Any]


def draw(sources: int, tokens: int, d: int, queries: int = 1) -> tuple[list[Tensor], Tensor, Tensor]:
    """Sources `[T, d]`, queries and gains `[Q, d]`, all bf16."""
    rows = [torch.randn(tokens, d, device="cuda").bfloat16() for _ in range(sources)]
    query = (torch.randn(queries, d, device="cuda") * 3 / d**0.5).bfloat16()
    return rows, query, (1 + 0.3 * torch.randn(queries, d, device="cuda")).bfloat16()


def fla(rows: list[Tensor], query: Tensor, gain: Tensor, norm_gain: Tensor | None = None) -> Tensor:
    from fla.ops.attnres import fused_attnres

    return fused_attnres(query, rows, gain, norm_gain, rms_eps=1e-5)  # type: ignore[no-any-return]


def eager(rows: list[Tensor], query: Tensor, gain: Tensor) -> Tensor:
    """In plain torch, as one would write it for torch.compile."""
    values = torch.stack(rows, 1).float()
    keys = torch.nn.functional.rms_norm(values, (values.shape[-1],), gain.float(), 1e-5)
    return ((keys @ query.float()).softmax(1)[..., None] * values).sum(1).to(rows[0].dtype)


def one_query(run: Callable[..., Tensor], rows: list[Tensor], query: Tensor, gain: Tensor) -> list[Tensor]:
    """The mix, and the gradients to sources, query and gain."""
    leaves = [x.detach().clone().requires_grad_() for x in (*rows, query, gain)]
    h = run(leaves[:-2], *leaves[-2:])
    seed = torch.Generator("cuda").manual_seed(1)
    d_h = torch.randn(h.shape, device="cuda", generator=seed).bfloat16().to(h.dtype)
    return [h.detach(), *torch.autograd.grad(h, leaves, d_h)]


def ours(rows: list[Tensor], query: Tensor, gain: Tensor) -> Tensor:
    return attnres_mix(rows, query, gain, implementation="triton")[0]


def reference(rows: list[Tensor], query: Tensor, gain: Tensor) -> Tensor:
    return attnres_mix(rows, query, gain, implementation="reference")[0]


def error(mine: Tensor, exact: Tensor) -> float:
    return float((mine.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def check() -> None:
    """Right, the same twice, and never waiting for the device; raises if not."""
    for sources, tokens, d in ((9, 500, 7168), (1, 33, 96), (5, 1000, 512), (17, 129, 4096)):
        rows, query, gain = draw(sources, tokens, d)
        exact = one_query(reference, [x.double() for x in rows], *(x[0].double() for x in (query, gain)))
        one_query(ours, rows, query[0], gain[0])
        torch.cuda.set_sync_debug_mode("error")
        mine, again = (one_query(ours, rows, query[0], gain[0]) for _ in range(2))
        torch.cuda.set_sync_debug_mode("default")
        errors = [error(a, b) for a, b in zip(mine, exact, strict=True) if b.norm() > 1e-9]
        print(f"S={sources} T={tokens} d={d}: h {errors[0]:.1e}, worst gradient {max(errors[1:]):.1e}")
        if not max(errors) < LIMIT or not all(map(torch.equal, mine, again)):
            raise RuntimeError("the kernels are wrong, or differ from one run to the next")
    rows, query, gain = draw(S, 500, D, Q)
    exact_mixes = attnres_bank_mixes(
        [x.double() for x in rows], query.double(), gain.double(), implementation="reference"
    )
    mixes = attnres_bank_mixes(rows, query, gain, implementation="triton")
    worst = max(error(a.values, b.values) for a, b in zip(mixes, exact_mixes, strict=True))
    sums = max(float((a.lse - b.lse).abs().max()) for a, b in zip(mixes, exact_mixes, strict=True))
    print(f"{Q} queries: mixes {worst:.1e}, sums {sums:.1e}")
    if not (worst < LIMIT and sums < 1e-4):
        raise RuntimeError("the kernels of all queries are wrong")


def timed(name: str, call: Call, timer: Callable[[Call], float] = milliseconds) -> dict[str, float]:
    """By name; nothing where a peer fails, which is printed."""
    try:
        return {name: timer(call)}
    except Exception as problem:  # noqa: BLE001 - whatever a peer raises
        print(f"{name} failed: {type(problem).__name__}: {problem}", flush=True)
        return {}


PASS = T * D * 2  # bytes


def keep(
    limits: Ceilings, steps: Steps, work: str, moved: int, shape: str, measured: dict[str, float]
) -> None:
    """The row, where ours ran."""
    if "ours" not in measured:
        raise RuntimeError(f"{work}: ours did not run")
    peers = {name: time for name, time in measured.items() if name != "ours"}
    floor = limits.floor(moved, 0)
    steps.keep(row(work, measured["ours"], "ms", "lower", peers=peers, floor=floor, shape=shape))


Run = Callable[..., Any]


def table(limits: Ceilings, steps: Steps, peer: bool) -> None:
    sources, queries, gains = draw(S, T, D, Q)
    query, gain = queries[0], gains[0]
    leaves = [x.detach().requires_grad_() for x in (*sources, query, gain)]
    d_h = torch.randn_like(sources[0])
    shape = f"S={S} T={T} d={D} bf16"
    found: dict[str, dict[str, float]] = {"fwd": {}, "fwdbwd": {}}
    moved = {"fwd": (S + 1) * PASS, "fwdbwd": (3 * S + 2) * PASS}

    def forward(name: str, run: Run) -> None:
        with torch.no_grad():
            found["fwd"] |= timed(name, lambda: run(sources, query, gain))
        keep(limits, steps, f"attnres_fwd_{S}x{T}x{D}", moved["fwd"], shape, found["fwd"])

    def both_ways(name: str, run: Run) -> None:
        call = lambda: torch.autograd.grad(run(leaves[:-2], *leaves[-2:]), leaves, d_h)  # noqa: E731
        found["fwdbwd"] |= timed(name, call)
        keep(limits, steps, f"attnres_fwdbwd_{S}x{T}x{D}", moved["fwdbwd"], shape, found["fwdbwd"])

    def against_fla(work: str, moved: int, shape: str, mine: Call, theirs: Call | None) -> None:
        with torch.no_grad():
            measured = timed("ours", mine)
            if peer and theirs:
                measured |= timed("fla", theirs)
        keep(limits, steps, work, moved, shape, measured)

    def all_queries() -> None:
        against_fla(
            f"attnres_{Q}query_{S}x{T}x{D}", (S + Q) * PASS, f"{shape}, {Q} queries",
            lambda: attnres_bank_mixes(sources, queries, gains, implementation="triton"),
            lambda: [fla(sources, q, g) for q, g in zip(queries, gains, strict=True)],
        )  # fmt: skip

    bank, prefix, output = sources[:-1], sources[-1], torch.randn_like(sources[0])

    def fused() -> None:
        against_fla(
            f"attnres_add_mix_norm_{S}x{T}x{D}", (S + 3) * PASS, f"{shape}, sum and norm written",
            lambda: attnres_add_mix_norm(
                bank, prefix, output, query, gain, gains[1], implementation="triton"
            ),
            lambda: fla([*bank, prefix + output], query, gain, gains[1]),
        )  # fmt: skip

    def merged() -> None:
        mix = BankMix(bank[0], torch.randn(T, device="cuda"))
        against_fla(
            f"attnres_merge_{T}x{D}", 5 * PASS, f"T={T} d={D} bf16, a mix of the bank for the bank",
            lambda: attnres_add_mix_norm(mix, prefix, output, query, gain, gains[1], implementation="triton"),
            None,
        )  # fmt: skip

    def few(tokens: int) -> None:
        sets = [draw(S, tokens, D) for _ in range(max(2, min(24, 2048 // tokens)))]
        measured: dict[str, float] = {}
        with torch.no_grad():
            for name, run in {"ours": ours, **({"fla": fla} if peer else {})}.items():
                calls = [lambda x=x, run=run: run(x[0], x[1][0], x[2][0]) for x in sets]  # type: ignore[misc]
                measured |= timed(name, calls[0], lambda _, calls=calls: milliseconds_in_graph(calls))  # type: ignore[misc]
        work, label = f"attnres_fwd_{S}x{tokens}x{D}", f"S={S} T={tokens} d={D} bf16, in a CUDA graph"
        keep(limits, steps, work, (S + 1) * tokens * D * 2, label, measured)

    steps("forward", lambda: forward("ours", ours))
    steps("both ways", lambda: both_ways("ours", ours))
    if peer:
        steps("fla's kernels", compile_candidates_together)
        steps("forward of fla", lambda: forward("fla", fla))
        steps("both ways of fla", lambda: both_ways("fla", fla))
    steps("all queries", all_queries)
    steps("add, mix, norm", fused)
    steps("merge", merged)
    for tokens in (1, 32, 256):
        steps(f"{tokens} tokens", lambda tokens=tokens: few(tokens))  # type: ignore[misc]
    if peer:  # last: it compiles for long
        compiled = torch.compile(eager)
        steps("forward of torch.compile", lambda: forward("torch.compile", compiled))
        steps("both ways of torch.compile", lambda: both_ways("torch.compile", compiled))


def chain(x: Tensor, vectors: list[Tensor], layers: int, passed_on: bool) -> Tensor:
    """The stream of `layers` layers in blocks of one, each sublayer the identity: nothing but AttnRes."""
    bank, prefix, output = [x], vectors[0] * x, None
    for sublayer in range(1, 2 * layers):
        made = attnres_add_mix_norm(bank, prefix, output, *vectors, implementation="triton")
        bank, prefix, output = [*(made.bank if passed_on else bank)], made.prefix, made.normed
        if sublayer % 2 == 0:
            bank, prefix, output = [*bank, prefix], made.normed, None
    made = attnres_add_mix_norm(bank, prefix, output, *vectors, implementation="triton")
    assert made.normed is not None
    return made.normed


def compare_chains() -> None:
    """r1's stream, forward and backward: gradients to rows added by autograd, and by the operators."""
    T, d, layers = 131_072, 512, 12
    x = torch.randn(T, d, device="cuda").bfloat16().requires_grad_()
    vectors = [torch.randn(d, device="cuda").bfloat16().div_(8).requires_grad_() for _ in range(3)]
    seed = torch.randn(T, d, device="cuda").bfloat16()
    found = {}
    for passed_on in (False, True):

        def step(passed_on: bool = passed_on) -> tuple[Tensor, ...]:
            return torch.autograd.grad(chain(x, vectors, layers, passed_on), [x, *vectors], seed)

        found[passed_on] = step()
        torch.cuda.reset_peak_memory_stats()
        spent = milliseconds(step)
        peak = torch.cuda.max_memory_allocated() / 1e9
        print(
            f"chain of {layers} layers, handed on {passed_on}: {spent:.2f} ms, peak {peak:.2f} GB", flush=True
        )
    apart = [error(a, b.double()) for a, b in zip(found[True], found[False], strict=True)]
    print("apart, relative L2:", *(f"{e:.1e}" for e in apart), flush=True)


def tensors(made: Any) -> list[Tensor]:
    """All that an operator made, without what is empty."""
    flat = [x for part in made for x in (part if isinstance(part, list | tuple) else [part])]
    return [x for x in flat if x.numel()]


def in_registers(rows: Any) -> None:
    """Instead of `operator.ring_launch`: the kernels for rows that it does not take."""


def try_variants(limits: Ceilings, steps: Steps) -> None:
    """Each kernel alone, over launches and forms; K3's width, then r1's."""
    from openk3.ops.attnres.kernels import operator

    rings = [
        {**operator.RING, **changed}
        for changed in ({}, {"GROUP": 1}, {"GROUP": 4}, {"columns_wide": 512, "warps_wide": 16})
    ]
    products = [
        {"COLUMNS": columns, "STAGES": stages, "num_warps": warps}
        for columns, stages, warps in (
            (128, 3, 4),
            (64, 3, 4),
            (64, 4, 4),
            (64, 5, 4),
            (128, 2, 4),
            (256, 2, 8),
        )
    ]
    mixes = [
        {"COLUMNS": columns, "STAGES": stages, "num_warps": warps}
        for columns, stages, warps in (
            (256, 4, 4),
            (128, 4, 4),
            (128, 6, 4),
            (256, 3, 4),
            (256, 6, 4),
            (512, 3, 8),
        )
    ]

    def one_by_one(label: str, settings: list[dict[str, Any]], passes: int, of: Case, call: Call) -> None:
        floor = limits.floor(passes * of.rows[0].numel() * 2, 0)
        right = tensors(call())
        for changed in settings:
            if steps.passed():
                print(f"{label}: out of time", flush=True)
                return
            with patch.multiple(operator, **changed):
                told = (f"{k} = {'None' if callable(v) else v}" for k, v in changed.items())
                name = f"{label}: {', '.join(told)}"
                try:
                    pairs = zip(tensors(call()), right, strict=True)
                    apart = max(error(a, b.double()) for a, b in pairs)
                    torch.cuda.synchronize()
                except (RuntimeError, triton.CompilationError) as problem:
                    print(f"{name}: {str(problem)[:200]}", flush=True)
                    continue
                name += f", {apart:.1e} apart"
                for time in timed(name, call, lambda call: milliseconds(call, 5, 20)).values():
                    print(f"{name}: {time:.4f} ms, {time / floor:.2f} of the floor", flush=True)

    for S_, T_, d_ in ((S, T, D), (13, 131_072, 512), (7, 131_072, 512)):
        case = Case(S_, T_, d_)
        where = f"S={S_} d={d_}"
        if d_ == D:
            both = [{"PRODUCTS": choice} for choice in products] + [{"MIXES": choice} for choice in mixes]
            both += [{"SLICES": slices} for slices in (4, 14, 28)]
            one_by_one(f"{where} all queries", both, S_ + Q, case, case.all_queries)
        for name, passes, call in (
            ("forward", S_ + 1, case.plain),
            ("forward, add and norm", S_ + 3, case.whole),
            ("backward", 2 * S_ + 1, case.plain_backward),
            ("backward, add and norm", 2 * S_ + 2, case.whole_backward),
            ("backward, handed on", 3 * S_ + 1, case.chained_backward),
        ):
            forms: list[dict[str, Any]] = [{"ring_launch": in_registers}, *({"RING": ring} for ring in rings)]
            one_by_one(f"{where} {name}", forms, passes, case, call)


class Case:
    """One query over S sources, and calls of its operators."""

    def __init__(self, S: int, T: int, d: int) -> None:
        self.rows = [torch.randn(T, d, device="cuda").bfloat16() for _ in range(S)]
        self.output, self.d_h = (torch.randn(T, d, device="cuda").bfloat16() for _ in range(2))
        self.query, self.gain = torch.randn(d, device="cuda") * d**-0.5, torch.ones(d, device="cuda")
        self.later = [torch.randn_like(row) for row in self.rows[:-1]]
        self.queries, self.gains = (torch.randn(Q, d, device="cuda") for _ in range(2))
        self.scalars = self.plain()[3]

    def all_queries(self) -> Any:
        return torch.ops.openk3.attnres_bank_mixes(self.rows, self.queries, self.gains, 1e-5)

    def plain(self) -> Any:
        *bank, last = self.rows
        return torch.ops.openk3.attnres(bank, last, None, self.query, self.gain, None, None, 1e-5, 1e-5, True)

    def whole(self) -> Any:
        *bank, last = self.rows
        more = self.output, self.query, self.gain, self.gain, None
        return torch.ops.openk3.attnres(bank, last, *more, 1e-5, 1e-5, False)

    def _backward(self, *more: Any) -> Any:
        given = self.rows, self.query, self.gain
        return torch.ops.openk3.attnres_backward(*given, *more, 1e-5, False)

    def plain_backward(self) -> Any:
        return self._backward(None, self.scalars, self.d_h, None, [], None)

    def whole_backward(self) -> Any:
        return self._backward(self.gain, self.scalars, None, self.d_h, [], self.output)

    def chained_backward(self) -> Any:
        return self._backward(self.gain, self.scalars, None, self.d_h, self.later, self.output)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="h200", help="names the file of results")
    parser.add_argument("--variants", action="store_true", help="try launches instead")
    add_options(parser)
    parser.add_argument("--chain", action="store_true", help="the mixes of r1 behind each other instead")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/attnres.py needs a CUDA device")
        return 0
    torch.manual_seed(0)
    steps = Steps(None if arguments.ours_alone else arguments.device, arguments.budget)
    steps.check("errors", check)
    if arguments.chain:
        compare_chains()
        return 0
    limits = ceilings()
    if arguments.variants:
        steps("variants", lambda: try_variants(limits, steps))
        return steps.status()
    table(limits, steps, peer=not arguments.ours_alone)
    return steps.status()


if __name__ == "__main__":
    sys.exit(main())
