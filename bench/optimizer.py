"""The optimizer's step on r1's parameters on one GPU, beside per-tensor paths: errors, then times.

    PYTHONPATH=src python bench/optimizer.py h200              rows, merged into results/h200.json
    PYTHONPATH=src python bench/optimizer.py h200 --variants   other tiles and chunks, nothing merged

Random bf16 parameters with fp32 masters, random fp32 gradients, as the trainer has them. A step is the
global norm, the clip, Muon and AdamW, compute copies written. Floors: of the experts' products their FLOPs,
each product whole; of a step those and its bytes, one after the other (the norm reads the gradients once
more, directions go out and come in as bf16). Times are medians by CUDA events.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
from gpu_timing import Ceilings, ceilings, milliseconds, peak_gib
from rows import row
from steps import Steps, add_options

from openk3.config import ModelConfig, preset
from openk3.model import K3
from openk3.optim import (
    COEFFICIENTS,
    OptimConfig,
    Optimizer,
    clip_scale,
    global_norm,
    grad_norm,
    orthogonalize,
)
from openk3.optim import newton_schulz as plain
from openk3.optim.fused import kernels, muon, newton_schulz

Tensor = torch.Tensor
Named = dict[str, torch.nn.Parameter]
TRIPLES = COEFFICIENTS["jordan"].triples
EXPERTS = (2816, (416, 256), (256, 416))  # matrices of each of w1, w2, w3 in r1: 11 layers of 256
LIMIT = 0.03  # relative L2 of a bf16 factor


def r1(model: ModelConfig) -> Named:
    """r1's parameters by name, random, with gradients."""
    named = {}
    for name, p in K3(model, device="meta", dtype=torch.bfloat16).named_parameters():
        made = torch.nn.Parameter(torch.empty(p.shape, device="cuda", dtype=p.dtype).normal_(std=0.02))
        made.grad_dtype = torch.float32  # type: ignore[attr-defined]
        made.grad = torch.empty(p.shape, device="cuda").normal_(std=1e-4)
        named[name] = made
    return named


def update(optimizer: Optimizer, named: Named) -> None:
    optimizer.step(1e-3, clip_scale(global_norm(named.items()), 1.0))


def matrices(count: int, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    x = torch.empty(count, *shape, device="cuda", dtype=dtype).normal_()
    return x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32))


def ns_flops(count: int, shape: tuple[int, int]) -> float:
    """Of five iterations, all three products whole."""
    R, C = sorted(shape)
    return 5.0 * count * (4 * R * R * C + 2 * R**3)


def check() -> None:
    """The factors against float64, and the same twice; raises if not."""
    for shape in ((256, 416), (416, 256), (128, 512), (512, 512)):
        x = matrices(40, shape, torch.float32)
        exact = orthogonalize([x.double()])[0]
        mine, again = x.bfloat16(), x.bfloat16()
        newton_schulz.iterate_(mine, TRIPLES)
        newton_schulz.iterate_(again, TRIPLES)
        peer = orthogonalize([x])[0]
        error, beside = (float((y.double() - exact).norm() / exact.norm()) for y in (mine, peer))
        print(f"Newton-Schulz {shape}: error {error:.1e}, per-tensor path {beside:.1e}", flush=True)
        if not error < LIMIT or not torch.equal(mine, again):
            raise RuntimeError("Newton-Schulz is wrong, or differs from one run to the next")


def check_step(named: Named, optimizer: Optimizer) -> None:
    """Experts and a vector against the rule in float64; then an update in which the host never waits."""
    chosen = ["layers.3.block_sparse_moe.experts.w1", "layers.3.block_sparse_moe.experts.w2", "norm.weight"]
    torch.cuda.synchronize()
    scale = float(clip_scale(global_norm(named.items()), 1.0))
    exact = {}
    for name in chosen:
        exact[name] = torch.nn.Parameter(named[name].detach().double())
        exact[name].grad = named[name].grad.double() * scale  # type: ignore[union-attr]
    Optimizer(exact.items(), OptimConfig(), preset("r1"), implementation="eager").step(1e-3)
    start = {name: named[name].detach().double() for name in chosen}
    update(optimizer, named)
    state = optimizer.state_dict()
    moved = {n: state[n].get("master", named[n].detach()).double() - start[n] for n in chosen}
    for name in chosen:
        wanted = exact[name].detach() - start[name]
        error = float((moved[name] - wanted).norm() / wanted.norm())
        print(f"movement of {name}: error {error:.1e}", flush=True)
        if not error < LIMIT:
            raise RuntimeError("the update is wrong")
    torch.cuda.set_sync_debug_mode("error")
    update(optimizer, named)
    torch.cuda.set_sync_debug_mode("default")


def by_kernel(call: Callable[[], None]) -> None:
    """GPU time of one call by kernel, and how many launches."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    kernels_only = (e for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA)
    found = sorted(kernels_only, key=lambda e: -e.self_device_time_total)
    for event in found[:14]:
        print(f"  {event.self_device_time_total / 1e3:8.3f} ms {event.count:5d} x {event.key[:90]}")
    total = sum(event.self_device_time_total for event in found) / 1e3
    print(f"  {total:8.3f} ms {sum(event.count for event in found):5d} in all", flush=True)


def enqueueing(call: Callable[[], None]) -> float:
    """Time in ms that the host takes to launch it."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    took = 1e3 * (time.perf_counter() - began)
    torch.cuda.synchronize()
    return took


def measure_step(limits: Ceilings, steps: Steps, peer: bool) -> None:
    model = preset("r1")
    named = r1(model)
    optimizer = Optimizer(named.items(), OptimConfig(), model, implementation="triton")
    steps.check("movement against float64", lambda: check_step(named, optimizer))
    muon_elements = sum(named[n].numel() for n, e in optimizer.state_dict().items() if "momentum" in e)
    everything = sum(p.numel() for p in named.values())
    ours = milliseconds(lambda: update(optimizer, named), 100, 500)
    moved = 4 * everything + 26 * muon_elements + 30 * (everything - muon_elements)
    products = ns_flops(2 * EXPERTS[0], EXPERTS[1]) + ns_flops(EXPERTS[0], EXPERTS[2])
    floor = limits.floor(moved, 0) + limits.floor(0, products)
    shape = f"{everything} bf16 parameters with fp32 masters, {muon_elements} by Muon; norm and clip included"
    peers: dict[str, float] = {}

    def keep() -> None:
        steps.keep(row("optimizer_step_r1", ours, "ms", "lower", peers=peers, floor=floor, shape=shape))

    keep()
    steps("the norm", lambda: measure_norm(named, limits, steps))
    steps("what the step is made of", lambda: take_apart(optimizer, named))
    for name, measure in {"per tensor": per_tensor, "torch AdamW(fused), all in fp32": torch_adamw}.items():
        if not peer or steps.passed():
            break
        with reported(name):
            peers[name] = measure(named)
            keep()
        torch.cuda.empty_cache()


def measure_norm(named: Named, limits: Ceilings, steps: Steps) -> None:
    everything = sum(p.numel() for p in named.values())
    norm = milliseconds(lambda: global_norm(named.items()))
    peers = {"one by one": milliseconds(lambda: grad_norm(named.items()), 25, 100)}
    floor, shape = limits.floor(4 * everything, 0), f"{everything} fp32 gradients, {len(named)} tensors"
    steps.keep(row("global_norm_r1", norm, "ms", "lower", peers=peers, floor=floor, shape=shape))


def take_apart(optimizer: Optimizer, named: Named) -> None:
    def ours() -> None:
        update(optimizer, named)

    print(f"host {enqueueing(ours):.1f} ms; peak {peak_gib(ours):.2f} GiB")
    with reported("the profile"):
        by_kernel(ours)
    with reported("a CUDA graph"):
        print(f"the step from a graph: {graphed(optimizer, named):.2f} ms", flush=True)


def per_tensor(named: Named) -> float:
    optimizer = Optimizer(named.items(), OptimConfig(), preset("r1"), implementation="eager")
    return milliseconds(lambda: update(optimizer, named), 50, 200)


def torch_adamw(named: Named) -> float:
    """Of all parameters as fp32 tensors, without a norm."""
    whole = [torch.nn.Parameter(p.detach().float()) for p in named.values()]
    for mine, p in zip(whole, named.values(), strict=True):
        mine.grad = p.grad
    return milliseconds(torch.optim.AdamW(whole, lr=1e-3, fused=True).step, 50, 200)


def graphed(optimizer: Optimizer, named: Named) -> float:
    update(optimizer, named)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update(optimizer, named)
    return milliseconds(graph.replay, 50, 300)


def measure_products(limits: Ceilings, steps: Steps) -> None:
    """All experts' Newton-Schulz, from normalised bf16 directions to factors."""
    count, tall, wide = EXPERTS
    groups = [matrices(2 * count, tall), matrices(count, wide)]
    flops = ns_flops(2 * count, tall) + ns_flops(count, wide)

    def ours() -> None:
        for x in groups:
            newton_schulz.iterate_(x, TRIPLES)

    def batched() -> None:
        for x in groups:
            for part in x.split(2**27 // x[0].numel()):
                plain._iterate(part.mT if part.shape[1] > part.shape[2] else part, TRIPLES)

    mine, peer = milliseconds(ours, 50, 300), milliseconds(batched, 50, 200)
    shape = f"{2 * count} x 416x256 and {count} x 256x416 bf16, 5 iterations, {flops / 1e12:.2f} TFLOP"
    steps.keep(row("newton_schulz_r1", mine, "ms", "lower", peers={"torch.baddbmm": peer},
                   floor=limits.floor(0, flops), shape=shape))  # fmt: skip


def measure_muon(limits: Ceilings, steps: Steps) -> None:
    """One parameter of experts, beside torch's on as many."""
    stacked = torch.nn.Parameter(torch.randn(256, 416, 256, device="cuda"))
    stacked.grad = torch.randn_like(stacked)
    named = [("layers.3.block_sparse_moe.experts.w1", stacked)]
    optimizer = Optimizer(named, OptimConfig(), preset("r1"), implementation="triton")
    mine = milliseconds(lambda: optimizer.step(1e-3), 50, 300)
    peers = {}
    with reported("torch.optim.Muon"):
        one_by_one = [torch.nn.Parameter(torch.randn(416, 256, device="cuda")) for _ in range(256)]
        for p in one_by_one:
            p.grad = torch.randn_like(p)
        peer_step = torch.optim.Muon(one_by_one, lr=1e-3, adjust_lr_fn="match_rms_adamw").step
        peers["torch Muon"] = milliseconds(peer_step, 50, 300)
    floor = limits.floor(256 * 416 * 256 * 24, 0) + limits.floor(0, ns_flops(256, EXPERTS[1]))
    shape = "256 fp32 matrices 416x256, one parameter (torch: 256)"
    steps.keep(row("muon_256x416x256", mine, "ms", "lower", peers=peers, floor=floor, shape=shape))


def try_whole(steps: Steps) -> None:
    """One program a matrix (`polar_hopper`) beside three products an iteration: products, then the step."""
    count, tall, wide = EXPERTS
    groups = {"416x256": matrices(2 * count, tall), "256x416": matrices(count, wide)}
    model = preset("r1")
    named = r1(model)
    optimizer = Optimizer(named.items(), OptimConfig(), model, implementation="triton")
    for whole in (False, True):
        with patch.object(newton_schulz, "WHOLE", whole):
            if whole:
                check()
            for name, x in groups.items():
                call = partial(newton_schulz.iterate_, x, TRIPLES)
                show(steps, f"{len(x)} x {name}, whole matrices {whole}", call)
            show(steps, f"the step, whole matrices {whole}", lambda: update(optimizer, named))
            by_kernel(lambda: update(optimizer, named))


def try_products(steps: Steps) -> None:
    count, tall, wide = EXPERTS
    groups = [matrices(2 * count, tall), matrices(count, wide)]

    def products() -> None:
        for x in groups:
            newton_schulz.iterate_(x, TRIPLES)

    for log in (22, 23, 24, 25, 27):
        for name, symmetric in {"": kernels.symmetric_product, ", A A^T by cuBLAS": by_cublas}.items():
            with (
                patch.object(newton_schulz, "CHUNK_ELEMENTS", 2**log),
                patch.object(kernels, "symmetric_product", symmetric),
            ):
                show(steps, f"chunks of 2^{log} elements{name}", products)
    for edge, depth, warps, stages in (
        (128, 64, 8, 3), (128, 64, 4, 3), (128, 64, 8, 4), (128, 32, 8, 4), (128, 32, 4, 4), (128, 128, 8, 2),
        (64, 64, 4, 3), (64, 64, 4, 4),
    ):  # fmt: skip
        tile = {"EDGE": edge, "DEPTH": depth, "num_warps": warps, "num_stages": stages}
        with patch.object(kernels, "SYMMETRIC", tile):
            show(steps, f"{tile}", products)


def try_passes(steps: Steps) -> None:
    """The step without its products."""
    model = preset("r1")
    optimizer = Optimizer(r1(model).items(), OptimConfig(), model, implementation="triton")

    def passes() -> None:
        optimizer.step(1e-3)

    with patch.object(muon, "iterate_", lambda *_: None):
        for tile, warps in ((8192, 32), (4096, 16), (8192, 16), (16384, 32), (4096, 8)):
            with patch.object(kernels, "DIRECTION", {"TILE": tile, "num_warps": warps}):
                show(steps, f"all but products, direction in {tile}, {warps} warps", passes)
        for tile, warps, parts in ((2048, 4, 4), (4096, 8, 8), (4096, 4, 4), (8192, 16, 2)):
            new = {"UPDATE": {"TILE": tile, "num_warps": warps}, "UPDATE_PARTS": parts}
            with patch.multiple(kernels, **new):
                show(steps, f"all but products, {new}", passes)


def show(steps: Steps, what: str, call: Callable[[], None]) -> None:
    if steps.passed():
        print(f"{what}: out of time", flush=True)
        return
    with reported(what):
        print(f"{what}: {milliseconds(call, 20, 100):.2f} ms, host {enqueueing(call):.1f}", flush=True)


OWN = kernels.symmetric_product


def by_cublas(a: Tensor, out: Tensor, alpha: float = 1.0, beta: float = 0.0, diagonal: float = 0.0) -> None:
    """The first of the two products; the polynomial stays with the kernel that adds to it."""
    if beta:
        OWN(a, out, alpha, beta, diagonal)
        return
    torch.bmm(a, a.mT, out=out)


@contextmanager
def reported(what: str) -> Iterator[None]:
    """One failure costs one line, not the run."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        torch.cuda.set_sync_debug_mode("default")
        print(f"FAILED {what}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="h200", help="names the file of results")
    parser.add_argument("--variants", action="store_true", help="try tiles and chunks instead")
    add_options(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/optimizer.py needs a CUDA device")
        return 0
    steps = Steps(None if arguments.ours_alone else arguments.device, arguments.budget)
    steps.check("Newton-Schulz against float64", check)
    if arguments.variants:
        steps("one program a matrix", lambda: try_whole(steps))
        steps("tiles and chunks of products", lambda: try_products(steps))
        steps("tiles of the passes", lambda: try_passes(steps))
        return steps.status()
    limits = ceilings()
    steps("the products", lambda: measure_products(limits, steps))
    steps("Muon of one parameter", lambda: measure_muon(limits, steps))
    steps("the step", lambda: measure_step(limits, steps, peer=not arguments.ours_alone))
    return steps.status()


if __name__ == "__main__":
    sys.exit(main())
