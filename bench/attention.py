"""Attention of MLA on one GPU, beside torch's cuDNN and flash attention: errors against float64, then times.

    PYTHONPATH=src python bench/attention.py h200              rows, merged into results/h200.json
    PYTHONPATH=src python bench/attention.py h200 --variants   times by kernel and tile, nothing merged

Head sizes of K3: keys 128 + 64 shared, values 128, bf16. Ours takes the shared part where it lies, gates its
output, keeps fp32 and finds the largest logit. Peers do the attention alone: they are given whole keys, and
their output is bf16. flash wants equal head sizes: its values are padded to 192. Floors are FLOPs: two
products forward, five backward, of the pairs that the causal mask leaves. Times are medians by CUDA events,
L2 cache flushed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu_timing import Ceilings, ceilings, milliseconds
from rows import row
from steps import Steps, add_options
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from openk3.ops.attention import gated_mla

K, S, V = 128, 64, 128
LIMIT = 8e-3  # relative L2 that rounding inputs of products and results to bf16 explains, with room
FORWARD_FLOPS, BACKWARD_FLOPS = 2 * (K + S + V), 2 * (3 * (K + S) + 2 * V)  # for each pair and head
Tensor = torch.Tensor


def documents(windows: int, length: int) -> list[int]:
    """Lengths of documents that follow each other, cut at windows: medians of some hundred tokens."""
    make = torch.Generator().manual_seed(0)
    lengths, room = [], length
    while windows:
        wanted = int(torch.randn(1, generator=make).mul(1.2).add(6.8).exp()) + 1
        lengths.append(min(wanted, room))
        room -= lengths[-1]
        if not room:
            windows, room = windows - 1, length
    return lengths


def draw(lengths: Sequence[int], heads: int) -> tuple[list[Tensor], Tensor]:
    """q, kv, shared and gate in bf16, and the offsets."""
    T = sum(lengths)
    make = torch.Generator("cuda").manual_seed(T)
    shapes = (T, heads, K + S), (T, heads, K + V), (T, S), (T, heads, V)
    tensors = [torch.randn(shape, device="cuda", generator=make).bfloat16() for shape in shapes]
    return tensors, torch.tensor([0, *lengths]).cumsum(0).int().cuda()


def ours(tensors: Sequence[Tensor], offsets: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    options = {"implementation": "triton", "return_max_logit": True} | options
    return gated_mla(*tensors, offsets, offsets, **options)  # type: ignore[arg-type]


def results(tensors: Sequence[Tensor], offsets: Tensor, **options: Any) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    y, largest = ours(leaves, offsets, **options)
    assert largest is not None
    seed = torch.Generator("cuda").manual_seed(1)
    d_y = torch.randn(y.shape, device="cuda", generator=seed).bfloat16().to(y.dtype)
    names = ("y", "largest logit", "d q", "d kv", "d shared", "d gate")
    return dict(zip(names, (y.detach(), largest, *torch.autograd.grad(y, leaves, d_y)), strict=True))


def check(kernels: str) -> None:
    """Right, the same twice, and never waiting for the device; raises if not."""
    print(f"{kernels} kernels")
    for lengths in ((1000,), (300, 1, 0, 64, 147, 700)):
        tensors, offsets = draw(lengths, 3)
        exact = results([x.double() for x in tensors], offsets, implementation="reference")
        results(tensors, offsets)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        mine, again = results(tensors, offsets), results(tensors, offsets)
        torch.cuda.set_sync_debug_mode("default")
        errors = {n: float((mine[n].double() - x).norm() / x.norm()) for n, x in exact.items()}
        print("lengths", lengths, "errors:", *(f"{n} {e:.1e};" for n, e in errors.items()), flush=True)
        if not max(errors.values()) < LIMIT or not all(torch.equal(mine[n], again[n]) for n in mine):
            raise RuntimeError("the kernels are wrong, or differ from one run to the next")


def whole_keys(tensors: Sequence[Tensor]) -> list[Tensor]:
    """q, k and v as peers take them, `[T, H, D]`."""
    q, kv, shared, _ = tensors
    k = torch.cat([kv[..., :K], shared[:, None].expand(-1, kv.shape[1], -1)], -1)
    return [q, k, kv[..., K:].contiguous()]


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True)


def flash(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, pad(v, (0, K + S - V)), offsets, offsets, longest, longest, 0.0, True, False
    )[0][..., :V]
    return out


def times(run: Callable[..., Tensor], tensors: Sequence[Tensor]) -> tuple[float, float]:
    """Of the forward, and of both passes."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    with torch.no_grad():
        forward = milliseconds(lambda: run(*leaves), 25, 150)
    d_y = torch.randn_like(run(*leaves))
    return forward, milliseconds(lambda: torch.autograd.grad(run(*leaves), leaves, d_y), 50, 250)


CASES = ("8192_h96", lambda: [8192], 96), ("r1", lambda: documents(32, 4096), 8)


def measure(
    limits: Ceilings, steps: Steps, name: str, lengths: Sequence[int], heads: int, alone: bool
) -> None:
    tensors, offsets = draw(lengths, heads)
    pairs = heads * sum(n * (n + 1) // 2 for n in lengths)
    floors = [limits.floor(0, pairs * f) for f in (FORWARD_FLOPS, FORWARD_FLOPS + BACKWARD_FLOPS)]
    mine = times(lambda *x: ours(x, offsets)[0], tensors)
    shape = (
        f"T={sum(lengths)} in {len(lengths)} sequences of {max(lengths)} at most, H={heads}, keys 128 + 64 "
        "shared, values 128, bf16; ours with gate, fp32 output kept, largest logit; peers without"
    )
    of_peers: dict[str, tuple[float, float]] = {}

    def keep() -> None:
        for i, kind in enumerate(("fwd", "fwdbwd")):
            found = {peer: t[i] for peer, t in of_peers.items()}
            work = f"attention_{kind}_{name}"
            steps.keep(row(work, mine[i], "ms", "lower", peers=found, floor=floors[i], shape=shape))

    keep()
    if alone:
        return
    whole, longest = whole_keys(tensors), max(lengths)
    peers: dict[str, Callable[..., Tensor]] = {"flash": lambda *x: flash(*x, offsets, longest)}
    if len(lengths) == 1:
        peers["cudnn"] = cudnn
    for peer, run in peers.items():
        try:
            of_peers[peer] = times(run, whole)
        except Exception as error:  # noqa: BLE001 - whatever a peer raises
            print(f"{name}: {peer} fails: {str(error)[:200]}", flush=True)
    keep()


def try_variants(steps: Steps) -> None:
    """Each pass alone over kernels and tiles, in ms; QUERIES and KEYS are times of the whole backward."""
    from openk3.ops.attention.kernels import operator

    operators = torch.ops.openk3
    plain = {
        "FORWARD": [(128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2)],
        "QUERIES": [(128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3)],
        "KEYS": [(32, 128, 8, 2), (32, 64, 4, 2), (64, 64, 8, 2)],
    }
    hopper = {
        "FORWARD": [(128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4)],
        "QUERIES": [(128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 4)],
        "KEYS": [(32, 128, 8, 4), (32, 128, 8, 3), (32, 64, 4, 3)],
    }
    for name, lengths, heads in CASES:
        tensors, offsets = draw(lengths(), heads)
        scale = (K + S) ** -0.5
        places = *tensors, offsets, offsets
        y, _, o, lse = operators.gated_mla(*places, scale, True, True)
        calls = {
            "FORWARD": lambda p=places, s=scale: operators.gated_mla(*p, s, True, True),
            "BACKWARD": lambda p=places, o=o, lse=lse, s=scale, y=y: operators.gated_mla_backward(
                *p, o, lse, s, y
            ),
        }
        for kernels, tried in (("plain", plain), ("hopper", hopper)):
            operator.HOPPER = set() if kernels == "plain" else {"forward", "keys", "queries"}
            for part, sizes in tried.items():
                table = getattr(operator, part) if kernels == "plain" else vars(operator)
                key = "large" if kernels == "plain" else f"{part}_HOPPER"
                best = table[key]
                for rows_, keys, warps, stages in sizes:
                    if steps.passed():
                        print(f"{name} {kernels} {part}: out of time", flush=True)
                        break
                    tile = {"ROWS": rows_, "KEYS": keys, "num_warps": warps}
                    tile["num_stages" if kernels == "plain" else "STAGES"] = stages
                    table[key] = tile
                    try:
                        time = milliseconds(calls["FORWARD" if part == "FORWARD" else "BACKWARD"], 5, 50)
                        print(f"{name} {kernels} {part} {tile}: {time:.4g} ms", flush=True)
                    except Exception as error:  # noqa: BLE001
                        print(f"{name} {kernels} {part} {tile} fails: {str(error)[:200]}", flush=True)
                table[key] = best


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="h200", help="names the file of results")
    parser.add_argument("--variants", action="store_true", help="try tiles instead")
    add_options(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/attention.py needs a CUDA device")
        return 0
    from openk3.ops.attention.kernels import operator

    steps = Steps(None if arguments.ours_alone else arguments.device, arguments.budget)
    hopper = set(operator.HOPPER)
    operator.HOPPER = set()
    steps.check("plain kernels", lambda: check("plain"))
    operator.HOPPER = hopper
    if not steps.check("hopper kernels (plain ones are measured)", lambda: check("hopper")):
        operator.HOPPER = set()
    if arguments.variants:
        steps("variants", lambda: try_variants(steps))
        return steps.status()
    limits = ceilings()
    for name, lengths, heads in CASES:
        steps(
            name,
            lambda n=name, ls=lengths, h=heads: measure(limits, steps, n, ls(), h, arguments.ours_alone),  # type: ignore[misc]
        )
    return steps.status()


if __name__ == "__main__":
    sys.exit(main())
