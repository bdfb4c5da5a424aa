"""Linear head and cross-entropy over K3's vocabulary on one GPU, beside PyTorch in chunks.

    PYTHONPATH=src python bench/cross_entropy.py h200              the row, merged into results/h200.json
    PYTHONPATH=src python bench/cross_entropy.py h200 --variants   dtypes, chunks and blocks; nothing merged

Forward and backward of 131,072 tokens of width 512, hidden and weight bf16, loss fp32. Every peer takes the
same chunks of tokens with logits in bf16 and softmax in fp32, forms a chunk's gradient at once, so that it
neither keeps nor recomputes logits, and adds the weight's gradient up in fp32. "torch chunked" does so by
autograd through `F.cross_entropy` of widened logits, "by hand" with the derivative written out and in place,
"torch.compile" as the first with the chunk's loss compiled; fla 0.6.0's fused loss has as many chunks. The
floor is three products' FLOPs. Times are medians by CUDA events.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import TypeVar

import torch
from gpu_timing import Ceilings, ceilings, milliseconds, peak_gib
from rows import merge, row
from torch.nn import functional as F

from openk3.ops.cross_entropy import IGNORE_INDEX, kernels, linear_cross_entropy

Tensor = torch.Tensor
R = TypeVar("R")
Result = tuple[Tensor, Tensor, Tensor]  # loss, d hidden, d weight
Run = Callable[[Tensor, Tensor, Tensor, int], Result]

T, D, V, CHUNK = 131072, 512, 163840, 8192
# Relative L2. In gradients the rounding of logits to bf16 shows, sizes being 4 and some 16; else softmax's.
LIMITS = {None: 4e-2, torch.float32: 5e-3}


def draw(tokens: int, width: int, vocabulary: int, ignored: float = 0.1) -> Result:
    """hidden `[T, d]` and weight `[V, d]` whose logits are of size 4, and targets."""
    make = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (
        (2 * torch.randn(n, width, device="cuda", generator=make) / width**0.25).bfloat16()
        for n in (tokens, vocabulary)
    )
    targets = torch.randint(vocabulary, (tokens,), device="cuda", generator=make)
    dropped = torch.rand(tokens, device="cuda", generator=make) < ignored
    return hidden, weight, targets.masked_fill(dropped, IGNORE_INDEX)


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int | None) -> Result:
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    loss, _ = linear_cross_entropy(*leaves, targets, chunk_tokens=chunk, implementation="triton")
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def chunk_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (x @ weight.T).float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")


compiled_loss = torch.compile(chunk_loss, dynamic=False)


def by_autograd(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, loss_of: Callable[..., Tensor] = chunk_loss
) -> Result:
    total = hidden.new_zeros((), dtype=torch.float32)
    d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
    weight = weight.detach().requires_grad_()
    for start in range(0, len(hidden), chunk):
        x = hidden[start : start + chunk].detach().requires_grad_()
        loss = loss_of(x, weight, targets[start : start + chunk])
        d_hidden[start : start + chunk], d_chunk = torch.autograd.grad(loss, (x, weight))
        d_weight += d_chunk
        total += loss.detach()
    return total, d_hidden, d_weight.bfloat16()


def by_compiled(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Result:
    return by_autograd(hidden, weight, targets, chunk, compiled_loss)


def by_hand(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Result:
    total = hidden.new_zeros((), dtype=torch.float32)
    d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
    for start in range(0, len(hidden), chunk):
        x, target = hidden[start : start + chunk], targets[start : start + chunk, None]
        valid = target != IGNORE_INDEX
        target = target.clamp(min=0)
        log_p = torch.log_softmax(x @ weight.T, 1, dtype=torch.float32)
        total -= (log_p.gather(1, target) * valid).sum()
        p = log_p.exp_()
        p.scatter_add_(1, target, p.new_full((1, 1), -1.0).expand_as(target))
        gradient = p.mul_(valid).bfloat16()
        d_hidden[start : start + chunk] = gradient @ weight
        torch.addmm(d_weight, gradient.T, x, out_dtype=torch.float32, out=d_weight)
    return total, d_hidden, d_weight.bfloat16()


def by_fla(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Result:
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    chunks = -(-len(hidden) // chunk)
    loss = fused_linear_cross_entropy_loss(
        leaves[0], targets, leaves[1], num_chunks=chunks, reduction="sum", ignore_index=IGNORE_INDEX
    )
    return loss.detach(), *torch.autograd.grad(loss, leaves)


PEERS: dict[str, Run] = {
    "torch chunked": by_autograd,
    "torch chunked by hand": by_hand,
    "torch.compile chunked": by_compiled,
    "fla": by_fla,
}


def exact(hidden: Tensor, weight: Tensor, targets: Tensor) -> Result:
    """In float64, logits whole."""
    leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    loss = F.cross_entropy(leaves[0] @ leaves[1].T, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def check() -> None:
    """Right, the same twice, and never waiting for the device; raises if not. Peers' errors beside."""
    for shape, chunk in (((600, D, V), 256), ((777, 72, 50257), 300), ((5, 16, 7), None)):
        inputs = draw(*shape)
        truth = exact(*inputs)
        for dtype, limit in LIMITS.items():
            kernels.LOGITS = dtype
            ours(*inputs, chunk)
            torch.cuda.set_sync_debug_mode("error")
            mine, again = ours(*inputs, chunk), ours(*inputs, chunk)
            torch.cuda.set_sync_debug_mode("default")
            report(f"{shape} ours, logits {dtype or 'bf16'}", mine, truth)
            if not max(errors(mine, truth)) < limit or not all(map(torch.equal, mine, again)):
                raise RuntimeError("the kernel is wrong, or differs from one run to the next")
        kernels.LOGITS = None
        if shape[2] == V:
            for name, peer in PEERS.items():
                result = attempt(name, partial(peer, *inputs, chunk))
                if result is not None:
                    report(name, result, truth)


def errors(result: Result, truth: Result) -> list[float]:
    """Relative L2 of loss, d hidden and d weight."""
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(result, truth, strict=True)]


def report(name: str, result: Result, truth: Result) -> None:
    print(f"{name}: errors of loss, d hidden, d weight", *(f"{e:.1e}" for e in errors(result, truth)))


def attempt(name: str, call: Callable[[], R]) -> R | None:
    """What `call` returns; a failure is printed, since one peer's must not hide the others."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001
        print(f"{name} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return None


def timed(name: str, call: Callable[[], object], floor: float) -> float:
    call()
    time, peak = milliseconds(call, 1, 1500), peak_gib(call)
    print(f"{name}: {time:.1f} ms, {time / floor:.2f} of the floor, peak {peak:.2f} GiB", flush=True)
    return time


def measure(limits: Ceilings) -> list[dict[str, object]]:
    inputs = draw(T, D, V, ignored=0.0)
    floor = limits.floor(0, 3 * 2 * T * D * V)
    time = timed("ours", partial(ours, *inputs, None), floor)
    with torch.no_grad():
        timed(
            "ours, forward alone", partial(linear_cross_entropy, *inputs, implementation="triton"), floor / 3
        )
    kernels.LOGITS = torch.float32
    timed("ours, logits fp32", partial(ours, *inputs, None), floor)
    kernels.LOGITS = None
    peers = {}
    for name, peer in PEERS.items():
        taken = attempt(name, partial(timed, name, partial(peer, *inputs, CHUNK), floor))
        if taken is not None:
            peers[name] = taken
            print(f"    ours takes {time / taken:.2f} of it")
    shape = f"T={T} d={D} V={V} bf16, logits bf16, loss fp32, chunks of {CHUNK}"
    return [row(f"linear_ce_{T}x{D}x{V}", time, "ms", "lower", peers=peers, floor=floor, shape=shape)]


def products(hidden: Tensor, weight: Tensor, chunk: int, dtype: torch.dtype) -> dict[str, float]:
    """Each of the three products over all chunks, in ms."""
    x = hidden[:chunk]
    logits = torch.empty(chunk, V, device="cuda", dtype=dtype)
    gradient = torch.randn(chunk, V, device="cuda", dtype=torch.bfloat16)
    d_x, d_weight = (torch.zeros_like(y, dtype=torch.float32) for y in (x, weight))
    calls = {
        "logits": partial(kernels._multiply, x, weight.T, logits),
        "d hidden": partial(kernels._multiply, gradient, weight, d_x),
        "d weight": partial(kernels._multiply, gradient.T, x, d_weight, add=True),
    }
    return {name: milliseconds(call, 5, 40) * T / chunk for name, call in calls.items()}


def rows_alone(targets: Tensor, dtype: torch.dtype, sizes: dict[str, int]) -> float:
    """The kernel over one chunk, in ms for all tokens."""
    logits = torch.randn(CHUNK, V, device="cuda", dtype=dtype)
    gradient = logits if dtype == torch.bfloat16 else torch.empty_like(logits, dtype=torch.bfloat16)
    losses = torch.empty(CHUNK, device="cuda")

    def call() -> None:
        kernels._softmax_rows[(CHUNK,)](
            logits, targets[:CHUNK], losses, gradient, V, WITH_GRADIENT=True, **sizes
        )

    return milliseconds(call, 5, 30) * T / CHUNK


def try_variants(limits: Ceilings) -> None:
    hidden, weight, targets = draw(T, D, V, ignored=0.0)
    for dtype, chunk in product((torch.bfloat16, torch.float32), (2048, 4096, 8192, 16384)):
        parts = attempt("products", partial(products, hidden, weight, chunk, dtype)) or {}
        print(f"logits {dtype}, {chunk} tokens:", *(f"{name} {t:.1f} ms;" for name, t in parts.items()))
    blocks = ((4096, 8), (4096, 16), (8192, 8), (8192, 16), (8192, 32), (16384, 16), (16384, 32))
    for dtype, (block, warps), turned in product((torch.bfloat16, torch.float32), blocks, (True, False)):
        sizes = {"BLOCK": block, "REVERSED": turned, "num_warps": warps}
        floor = limits.floor(T * V * (2 * dtype.itemsize + 2), 0)
        time = attempt(str(sizes), partial(rows_alone, targets, dtype, sizes))
        if time is not None:
            print(f"rows of {dtype} {sizes}: {time:.1f} ms, {time / floor:.2f} of two reads and a write")
    floor = limits.floor(0, 3 * 2 * T * D * V)
    for kept, chunk in product((None, torch.float32), (4096, 8192, 16384)):
        kernels.LOGITS = kept
        name = f"all, logits {kept or 'bf16'}, {chunk} tokens"
        attempt(name, partial(timed, name, partial(ours, hidden, weight, targets, chunk), floor))
    kernels.LOGITS = None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="h200", help="names the file of results")
    parser.add_argument("--variants", action="store_true", help="try dtypes, chunks and blocks instead")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/cross_entropy.py needs a CUDA device")
        return 0
    check()
    limits = ceilings()
    if arguments.variants:
        try_variants(limits)
        return 0
    print("merged into", merge(measure(limits), arguments.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
