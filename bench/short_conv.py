"""The short convolution's kernels on one GPU, beside fla 0.6.0's: errors against float64, then times.

    PYTHONPATH=src python bench/short_conv.py h200              rows, merged into results/h200.json
    PYTHONPATH=src python bench/short_conv.py h200 --variants   times of other block sizes, nothing merged

Width 4 with SiLU on bf16. The floor is x read and y written once; with the backward also x and d_y read and
d_x written. Times are medians by CUDA events, L2 cache flushed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product

import torch
from gpu_timing import Ceilings, ceilings, milliseconds
from kda_fla import compile_candidates_together
from rows import merge, row

from openk3.ops.dispatch import Implementation
from openk3.ops.short_conv import short_conv

W = 4
WORKS = [
    ("short_conv_t8192_h96", (8192,), 96),
    ("short_conv_8x1024_h96", (1024,) * 8, 96),
    ("short_conv_t65536_h12", (65536,), 12),
]
LIMIT = 4e-3  # relative L2 that rounding results to bf16 explains, with room
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def draw(lengths: Sequence[int], C: int) -> Inputs:
    """x `[T, C]`, weight fp32 `[C, W]`, offsets, states."""
    offsets = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    x = torch.randn(sum(lengths), C, device="cuda").bfloat16()
    state = torch.randn(len(lengths), W - 1, C, device="cuda").bfloat16()
    return x, torch.randn(C, W, device="cuda"), offsets, state


def results(
    inputs: Inputs, implementation: Implementation, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Both outputs and the gradients to x, weight and state."""
    x, weight, offsets, state = inputs
    leaves = [part.to(dtype or part.dtype).detach().requires_grad_() for part in (x, weight, state)]
    x, weight, state = leaves
    y, final = short_conv(x, weight, offsets, initial_state=state, implementation=implementation)
    seed = torch.Generator("cuda").manual_seed(1)
    seeds = [torch.randn(o.shape, device="cuda", generator=seed).bfloat16().to(o.dtype) for o in (y, final)]
    return [y.detach(), final.detach(), *torch.autograd.grad([y, final], leaves, seeds)]


def check() -> None:
    """Right, the same twice, and never waiting for the device; raises if not."""
    for lengths in ((1000,), (0, 1, 2, 3, 64, 0, 65, 511, 1, 127, 128, 129, 0)):
        inputs = draw(lengths, 1000)
        exact = results(inputs, "eager", torch.float64)
        results(inputs, "triton")
        torch.cuda.set_sync_debug_mode("error")
        mine, again = results(inputs, "triton"), results(inputs, "triton")
        torch.cuda.set_sync_debug_mode("default")
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(mine, exact, strict=True)]
        print(
            "lengths", lengths, "errors of y, state, d x, d weight, d state:", *(f"{e:.1e}" for e in errors)
        )
        if not max(errors) < LIMIT or not all(map(torch.equal, mine, again)):
            raise RuntimeError("the kernels are wrong, or differ from one run to the next")


def times(inputs: Inputs, peer: bool) -> dict[str, float]:
    """Of the forward and of both passes, ours and the peer's."""
    x, weight, offsets, _ = inputs
    leaves = [part.detach().requires_grad_() for part in (x, weight)]
    d_y = torch.randn_like(x)

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return short_conv(x, weight, offsets, implementation="triton")[0]

    def fla(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        from fla.modules.causal_conv1d import causal_conv1d

        packed = {} if len(offsets) == 2 else {"cu_seqlens": long_offsets}
        return causal_conv1d(x[None], weight, activation="silu", **packed)[0][0]  # type: ignore[no-any-return]

    long_offsets = offsets.long()
    measured = {}
    for name, run in (("ours", ours), ("fla", fla))[: 1 + peer]:
        with torch.no_grad():
            measured[name] = milliseconds(lambda run=run: run(x, weight))  # type: ignore[misc]
        measured[f"{name} both"] = milliseconds(
            lambda run=run: torch.autograd.grad(run(*leaves), leaves, d_y)  # type: ignore[misc]
        )
    return measured


def measure(limits: Ceilings) -> list[dict[str, object]]:
    rows = []
    for work, lengths, heads in WORKS:
        x, *rest = draw(lengths, 3 * heads * 128)
        t = times((x, *rest), peer=True)  # type: ignore[arg-type]
        shape = f"T={len(x)} in {len(lengths)} sequences, C={x.shape[1]} W={W} bf16, SiLU"
        size = x.numel() * x.element_size()
        for suffix, key, passes in (("fwd", "", 2), ("fwdbwd", " both", 5)):
            floor, name = limits.floor(passes * size, 0), f"{work}_{suffix}"
            ours, fla = t[f"ours{key}"], t[f"fla{key}"]
            print(f"{name}: ours {ours:.4g} ms, fla {fla:.4g} ms, floor {floor:.4g} ms, x{ours / floor:.2f}")
            rows.append(row(name, ours, "ms", "lower", peers={"fla": fla}, floor=floor, shape=shape))
    return rows


def try_variants(limits: Ceilings) -> None:
    """Each pass alone, over block sizes."""
    from openk3.ops.short_conv import kernels

    x, weight, offsets, _ = draw((8192,), 3 * 96 * 128)
    d_y, size = torch.randn_like(x), x.numel() * x.element_size()
    operators = torch.ops.openk3
    passes = {
        "FORWARD": (2, lambda: operators.short_conv(x, weight, offsets, None, True)),
        "BACKWARD": (3, lambda: operators.short_conv_backward(x, weight, offsets, None, True, d_y, None)),
    }
    for name, (count, call) in passes.items():
        floor = limits.floor(count * size, 0)
        for tokens, (channels, warps), rows in product((64, 128), ((128, 1), (256, 1), (256, 2)), (4, 8)):
            sizes = {"TOKENS": tokens, "CHANNELS": channels, "ROWS": rows, "num_warps": warps}
            setattr(kernels, name, sizes)
            time = milliseconds(call, 5, 20)
            print(f"{name} {sizes}: {time:.4f} ms, {time / floor:.2f} of the floor", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="h200", help="names the file of results")
    parser.add_argument("--variants", action="store_true", help="try block sizes instead")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/short_conv.py needs a CUDA device")
        return 0
    check()
    limits = ceilings()
    if arguments.variants:
        try_variants(limits)
        return 0
    compile_candidates_together()
    print("merged into", merge(measure(limits), arguments.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
