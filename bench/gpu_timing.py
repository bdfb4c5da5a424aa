"""Times on a CUDA device, and the two ceilings that floors are made of. Times in ms."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from triton.testing import do_bench

Call = Callable[[], object]


@dataclass(frozen=True)
class Ceilings:
    """What the device does at best: bytes a second of a copy, read and written, FLOPs of a bf16 product."""

    bandwidth: float
    flops: float

    def floor(self, moved: float, flops: float) -> float:
        """The least time in ms for so many bytes and FLOPs."""
        return 1e3 * max(moved / self.bandwidth, flops / self.flops)


def ceilings() -> Ceilings:
    """Of a 2 GiB copy and of an 8192^3 product."""
    return Ceilings(_copy_bandwidth(), _product_flops())


def _copy_bandwidth(size: int = 1 << 31) -> float:
    source = torch.randint(0, 255, (size,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * size / milliseconds(lambda: target.copy_(source), 50, 200) * 1e3


def _product_flops(edge: int = 8192) -> float:
    """For long enough that the power limit counts, as it does in training."""
    a, b = (torch.randn(edge, edge, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * edge**3 / milliseconds(lambda: a @ b, 100, 400) * 1e3


def milliseconds(call: Call, warm_up: int = 25, repeat: int = 200) -> float:
    """Median by CUDA events with the L2 cache flushed before each call; both arguments in ms of calls."""
    return float(do_bench(call, warmup=warm_up, rep=repeat, return_mode="median"))


def milliseconds_in_graph(calls: Sequence[Call], least: int = 24, replays: int = 20) -> float:
    """Median time of one call, `calls` being repeated in turn, at least `least` in all, in one CUDA graph.

    Nothing flushes the cache: calls must rotate over data of several times its size.
    """
    calls = [*calls] * -(-least // len(calls))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and allocates what the first call allocates
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    return median(times)


def peak_gib(call: Call) -> float:
    """Memory that `call` allocates beyond what is allocated before it, at most, in GiB."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before) / 2**30


def first_call_seconds(call: Call) -> float:
    """Wall time of `call`: of the first one, compilation is nearly all."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start
