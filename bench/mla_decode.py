"""Paged MLA decoding on one GPU: errors against float64, then times beside torch.

    PYTHONPATH=src python bench/mla_decode.py h200              rows, merged into results/h200.json
    PYTHONPATH=src python bench/mla_decode.py h200 --variants   times of other launches, nothing merged
    ... --plain                                                 without the kernel in Hopper's layouts

Floors are bytes or FLOPs, whichever take longer: each cached latent read once, queries read and mixes
written once; 2 (2 R + S) FLOPs for each query head and token. Peers get what makes them fastest, a cache
without pages and sequences of one length, and absorbed queries like ours: "torch bmm" multiplies, takes the
softmax and multiplies again; "sdpa" is torch's attention with one key head for all. In a window they mask
nothing. Long contexts are medians by CUDA events with the L2 cache flushed, short ones medians in CUDA graphs
over rotating caches.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpu_timing import Ceilings, ceilings, milliseconds, milliseconds_in_graph
from rows import row
from steps import Steps, add_options

from openk3.ops.attention.kernels import paged_operator as operator
from openk3.ops.attention.paged import mla_append, mla_decode

HOPPER_HEADS = operator.HOPPER_HEADS
LIMIT = 6e-3  # relative L2 that rounding results and weights to bf16 explains, with room
Tensor = torch.Tensor
Call = Callable[[], Any]


@dataclass
class Case:
    q_latent: Tensor
    q_shared: Tensor
    cache: Tensor
    block_table: Tensor
    lengths: Tensor
    scale: float
    max_length: int

    def ours(self, **options: Any) -> tuple[Tensor, Tensor | None]:
        return mla_decode(
            self.q_latent, self.q_shared, self.cache, self.block_table, self.lengths,
            scale=self.scale, max_length=self.max_length,
            **{"implementation": "triton"} | options,
        )  # fmt: skip

    def exact(self) -> tuple[Tensor, Tensor | None]:
        """By the eager form in float64, which tests hold against the expanded attention."""
        return mla_decode(
            self.q_latent.double(), self.q_shared.double(), self.cache.double(), self.block_table,
            self.lengths, scale=self.scale, max_length=self.max_length, return_lse=True,
            implementation="eager",
        )  # fmt: skip


def draw(
    lengths: list[int], *, W: int = 1, H: int = 96, R: int = 512, S: int = 64, page_size: int = 64
) -> Case:
    N, longest = len(lengths), max(lengths)
    max_pages = max(1, -(-longest // page_size))
    needed = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(needed) + 1, device="cuda", dtype=torch.int32)
    table = torch.zeros(N, max_pages, dtype=torch.int32, device="cuda")
    used = 0
    for n, pages in enumerate(needed):
        table[n, :pages] = order[used : used + pages]
        used += pages
    cache = torch.empty(len(order), page_size, R + S, device="cuda", dtype=torch.bfloat16).normal_()
    q_latent = torch.randn(N, W, H, R, device="cuda").bfloat16()
    q_shared = torch.randn(N, W, H, S, device="cuda").bfloat16()
    at = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return Case(q_latent, q_shared, cache, table, at, 2 / math.sqrt(R + S), max(1, longest))


def error(mine: Tensor, exact: Tensor) -> float:
    return float((mine.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def check() -> None:
    """Right, the same twice, independent of neighbours, and never waiting for the device; raises if not."""
    cases: list[tuple[str, dict[str, Any], list[int]]] = [
        ("K3", {}, [5000, 0, 1, 64, 4096, 3001]),
        ("K3, window of 4", {"W": 4, "page_size": 16}, [300, 2, 0, 1025]),
        ("K3, window of 2, pages of 128", {"W": 2, "page_size": 128}, [777, 129]),
        ("48B", {"H": 32, "page_size": 32}, [1000, 77]),
        ("r1", {"H": 8, "R": 256}, [2048, 1, 100]),
        ("r1, window of 8", {"H": 8, "R": 256, "W": 8}, [500, 4]),
        ("128 heads", {"H": 128}, [200, 513]),
        ("one head", {"H": 1, "R": 64, "S": 32, "page_size": 16}, [90]),
    ]
    problems = [problem for case in cases for problem in problems_of(*case)]
    if operator.HOPPER_HEADS == HOPPER_HEADS:  # the choice of kernels is the default: the other ones too
        for least, case in ((1000, cases[0]), (1, cases[4])):
            operator.HOPPER_HEADS = least
            problems += problems_of(f"{case[0]}, the other kernel", *case[1:])
        operator.HOPPER_HEADS = HOPPER_HEADS
    latents, slots = torch.randn(33, 576, device="cuda").bfloat16(), torch.arange(33, device="cuda") - 1
    cache = torch.zeros(4, 16, 576, device="cuda", dtype=torch.bfloat16)
    mla_append(latents, cache, slots, implementation="triton")
    if not torch.equal(cache.view(-1, 576)[:32], latents[1:]):
        problems.append("latents were not appended where they belong")
    if problems:
        raise RuntimeError("; ".join(problems))


def problems_of(name: str, shape: dict[str, Any], lengths: list[int]) -> list[str]:
    """Prints the errors of one case, and says what is wrong."""
    case, found = draw(lengths, **shape), []
    expected, expected_lse = case.exact()
    assert expected_lse is not None
    seen = expected_lse.isfinite()
    for split in (None, 256):
        mine, lse = case.ours(split=split, return_lse=True)
        assert lse is not None
        torch.cuda.set_sync_debug_mode("error")
        again, _ = case.ours(split=split)
        torch.cuda.set_sync_debug_mode("default")
        worst, of_lse = error(mine, expected), float((lse[seen].double() - expected_lse[seen]).abs().max())
        print(f"{name}, split {split}: mixes {worst:.1e}, sums {of_lse:.1e}", flush=True)
        if not (worst < LIMIT and of_lse < 2e-3 and torch.equal(lse.isfinite(), seen)):
            found.append(f"{name}: wrong")
        if not torch.equal(mine, again):
            found.append(f"{name}: differs from one run to the next")
        if bool(mine[~seen].any()):
            found.append(f"{name}: not zero where nothing is seen")
    alone = Case(
        case.q_latent[:1, -1:], case.q_shared[:1, -1:], case.cache, case.block_table[:1], case.lengths[:1],
        case.scale, case.max_length,
    ).ours(split=256)[0]  # fmt: skip
    if not torch.equal(alone[0, 0], mine[0, -1]):
        found.append(f"{name}: depends on neighbours")
    return found


def without_pages(case: Case) -> tuple[Tensor, Tensor]:
    """Queries `[N, W H, D]` and one cache `[N, length, D]`, for sequences of one length."""
    q = torch.cat([case.q_latent, case.q_shared], -1).flatten(1, 2)
    return q, case.cache[case.block_table.long()].flatten(1, 2)[:, : case.max_length].contiguous()


def torch_bmm(q: Tensor, cache: Tensor, case: Case) -> Tensor:
    logits = torch.bmm(q, cache.mT) * case.scale
    return torch.bmm(logits.softmax(-1), cache[..., : case.q_latent.shape[-1]])


def torch_sdpa(q: Tensor, cache: Tensor, case: Case) -> Tensor:
    """All heads as queries of one head: they share its keys and values."""
    return torch.nn.functional.scaled_dot_product_attention(
        q[:, None], cache[:, None], cache[:, None, :, : case.q_latent.shape[-1]], scale=case.scale
    )


def timed(name: str, call: Call, timer: Callable[[Call], float] = milliseconds) -> dict[str, float]:
    """By name; nothing where it fails, which is printed."""
    try:
        return {name: timer(call)}
    except Exception as problem:  # noqa: BLE001 - whatever a peer raises
        print(f"{name} failed: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
        torch.cuda.empty_cache()
        return {}


def work(case: Case) -> tuple[int, int]:
    """Bytes and FLOPs; sequences of one length, one query token."""
    N, W, H, R = case.q_latent.shape
    D = case.cache.shape[2]
    return 2 * (N * case.max_length * D + N * W * H * (D + R)), 2 * N * W * H * case.max_length * (R + D)


LONG: list[tuple[str, int, int, dict[str, int]]] = [
    ("mla_decode_32x64k", 32, 65536, {}),
    ("mla_verify4_32x64k", 32, 65536, {"W": 4}),
    ("mla_decode_4x64k", 4, 65536, {}),
    ("mla_decode_48b_32x64k", 32, 65536, {"H": 32}),
]


def keep(
    limits: Ceilings, steps: Steps, name: str, case: Case, shape: str, measured: dict[str, float]
) -> None:
    """The row, where ours ran."""
    peers = {peer: time for peer, time in measured.items() if peer != "ours"}
    if "ours" not in measured:
        raise RuntimeError(f"{name}: ours did not run")
    floor = limits.floor(*work(case))
    steps.keep(row(name, measured["ours"], "ms", "lower", peers=peers, floor=floor, shape=shape))


def long(
    limits: Ceilings, steps: Steps, name: str, N: int, length: int, options: dict[str, int], alone: bool
) -> None:
    case = draw([length] * N, **options)
    shape = (
        f"N={N} x {length} tokens, W={options.get('W', 1)} H={options.get('H', 96)}, 512+64, pages of 64, "
        "bf16"
    )
    fast = lambda call: milliseconds(call, 10, 60)  # noqa: E731
    measured = timed("ours", case.ours, fast)
    keep(limits, steps, name, case, shape, measured)
    if alone:
        return
    q, cache = without_pages(case)
    for peer, run in (("torch bmm", torch_bmm), ("sdpa", torch_sdpa)):
        measured |= timed(peer, lambda run=run: run(q, cache, case), fast)  # type: ignore[misc]
    keep(limits, steps, name, case, shape, measured)


def short(limits: Ceilings, steps: Steps, N: int, alone: bool) -> None:
    sets = [draw([2048] * N, H=8, R=256) for _ in range(max(2, min(24, 96 // N)))]
    name, shape = (
        f"mla_decode_r1_{N}x2k",
        f"N={N} x 2048 tokens, W=1 H=8, 256+64, pages of 64, bf16, in a CUDA graph",
    )
    measured = timed("ours", sets[0].ours, lambda _: milliseconds_in_graph([c.ours for c in sets]))
    keep(limits, steps, name, sets[0], shape, measured)
    if alone:
        return
    flat = [(*without_pages(case), case) for case in sets]
    calls = [lambda x=x: torch_bmm(*x) for x in flat]  # type: ignore[misc]
    measured |= timed("torch bmm", calls[0], lambda _: milliseconds_in_graph(calls))
    keep(limits, steps, name, sets[0], shape, measured)


def try_variants(limits: Ceilings, steps: Steps) -> None:
    """Both kernels over sizes of parts, the plain one over tiles too."""
    cases = [
        ("32 x 64k, 96 heads", draw([65536] * 32), (2048, 4096, 8192), (64, 32)),
        ("64 x 2k, 8 heads", draw([2048] * 64, H=8, R=256), (128, 256, 512), (16,)),
        ("1 x 2k, 8 heads", draw([2048], H=8, R=256), (64, 128, 256), (16,)),
    ]
    launch, heads = operator.launch, operator.HOPPER_HEADS
    kernels = [("plain", 1000)] if heads > 128 else [("Hopper", 1), ("plain", 1000)]

    def show(label: str, case: Case, split: int | None) -> None:
        if steps.passed():
            print(f"{label}: out of time", flush=True)
            return
        floor = limits.floor(*work(case))
        for time in timed(
            label, lambda: case.ours(split=split), lambda call: milliseconds(call, 2, 15)
        ).values():
            print(f"{label}: {time:.4f} ms, {time / floor:.2f} of the floor", flush=True)

    for name, case, splits, row_choices in cases:
        for kernel, least in kernels:
            operator.HOPPER_HEADS = least
            for split in (None, *splits):
                show(f"{name}, {kernel}, split {split}", case, split)
        for choice in (
            operator.Launch(rows, tokens, warps, stages)
            for rows in row_choices
            for tokens in (32, 64)
            for warps in (4, 8)
            for stages in (2, 3)
            if (tokens, stages) != (64, 3) or case.cache.shape[2] < 576
        ):
            operator.launch = lambda *_, choice=choice: choice  # type: ignore[misc]
            show(f"{name}, plain, {choice}, split {splits[1]}", case, splits[1])
        operator.launch, operator.HOPPER_HEADS = launch, heads


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="h200", help="names the file of results")
    parser.add_argument("--variants", action="store_true", help="try launches instead")
    parser.add_argument("--plain", action="store_true", help="leave out the kernel in Hopper's layouts")
    add_options(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/mla_decode.py needs a CUDA device")
        return 0
    torch.manual_seed(0)
    if arguments.plain:
        operator.HOPPER_HEADS = 1000
    alone = arguments.ours_alone
    steps = Steps(None if alone else arguments.device, arguments.budget)
    steps.check("errors", check)
    limits = ceilings()
    if arguments.variants:
        steps("variants", lambda: try_variants(limits, steps))
        return steps.status()
    for name, N, length, options in LONG:
        steps(
            name,
            lambda n=name, N=N, length=length, o=options: long(limits, steps, n, N, length, o, alone),  # type: ignore[misc]
        )
    for N in (1, 64, 256):
        steps(f"mla_decode_r1_{N}x2k", lambda N=N: short(limits, steps, N, alone))  # type: ignore[misc]
    return steps.status()


if __name__ == "__main__":
    sys.exit(main())
