"""SiTU-GLU and the norms on one GPU, beside torch.compile, torch and fla 0.6.0: errors, then times.

    PYTHONPATH=src python bench/elementwise.py h200              rows, merged into results/h200.json
    PYTHONPATH=src python bench/elementwise.py h200 --variants   times of other tiles, nothing merged

All in bf16, gains in fp32. The floor is every input read and every output written once: forward, and forward
with the gradients of all inputs. torch.compile is given the equations of `reference.py`. Times are medians by
CUDA events, L2 cache flushed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from unittest.mock import patch

import torch
import triton
from gpu_timing import Ceilings, ceilings, milliseconds
from kda_fla import compile_candidates_together
from rows import merge, row

from openk3.ops import gated_unit_kernels
from openk3.ops.norm import gated_rms_norm, rms_norm
from openk3.ops.norm import kernels as norm_kernels
from openk3.ops.norm.reference import gated_rms_norm as plain_gated
from openk3.ops.norm.reference import rms_norm as plain_norm
from openk3.ops.precision import widen
from openk3.ops.situ import situ_glu
from openk3.ops.situ.reference import situ_glu as plain_situ

Tensor = torch.Tensor
Call = Callable[..., Tensor]
EPS = 1e-5
LIMIT = 4e-3  # relative L2 that rounding results to bf16 explains, with room


@dataclass(frozen=True)
class Work:
    name: str
    shape: tuple[int, ...]
    draw: Callable[..., list[Tensor]]  # inputs of such a shape
    ours: Call
    plain: Call  # the equation
    peers: Callable[[], dict[str, Call]]
    passes: tuple[int, int]  # over one tensor of the output's size: forward, with gradients


def halves(T: int, F: int) -> list[Tensor]:
    """gate and up as a product leaves them in one tensor `[T, F]`."""
    return [*(3 * torch.randn(T, F, device="cuda")).bfloat16().chunk(2, dim=1)]


def rows_and_gain(*shape: int) -> list[Tensor]:
    return [torch.randn(*shape, device="cuda").bfloat16(), torch.rand(shape[-1], device="cuda") + 0.5]


def rows_gate_and_gain(*shape: int) -> list[Tensor]:
    x, gain = rows_and_gain(*shape)
    return [x, torch.randn(*shape, device="cuda").bfloat16(), gain]


def norm_peers() -> dict[str, Call]:
    def of_torch(x: Tensor, gain: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), gain.to(x.dtype), EPS)

    def of_fla(x: Tensor, gain: Tensor) -> Tensor:
        from fla.modules.norm.layernorm import rms_norm as run

        return run(x, gain, None, eps=EPS)  # type: ignore[no-any-return]

    return {"torch": of_torch, "fla": of_fla}


def gated_peers() -> dict[str, Call]:
    def of_fla(x: Tensor, gate: Tensor, gain: Tensor) -> Tensor:
        from fla.modules.norm.fused_norm_gate import rms_norm_gated as run

        return run(x, gate, gain, None, activation="sigmoid", eps=EPS)  # type: ignore[no-any-return]

    return {"fla": of_fla}


def our_norm(x: Tensor, gain: Tensor) -> Tensor:
    return rms_norm(x, gain, EPS, implementation="triton")


def our_gated(x: Tensor, gate: Tensor, gain: Tensor) -> Tensor:
    return gated_rms_norm(x, gate, gain, EPS, implementation="triton")


def our_situ(gate: Tensor, up: Tensor) -> Tensor:
    return situ_glu(gate, up, implementation="triton")


def situ_equation(gate: Tensor, up: Tensor) -> Tensor:
    return plain_situ(widen(gate), widen(up), 4.0, 25.0).to(gate.dtype)


def norm_equation(x: Tensor, gain: Tensor) -> Tensor:
    return plain_norm(x, gain, EPS)


def gated_equation(x: Tensor, gate: Tensor, gain: Tensor) -> Tensor:
    return plain_gated(x, gate, gain, EPS)


def norm_work(T: int, d: int) -> Work:
    return Work(
        f"rms_norm_{{}}_{T}x{d}", (T, d), rows_and_gain, our_norm, norm_equation, norm_peers, passes=(2, 5)
    )


WORKS = [
    Work("situ_{}_131072x6144", (131072, 6144), halves, our_situ, situ_equation, dict, passes=(3, 8)),
    norm_work(8192, 7168),
    norm_work(131072, 512),
    Work(
        "gated_rms_norm_{}_8192x96x128", (8192, 96, 128), rows_gate_and_gain, our_gated, gated_equation,
        gated_peers, passes=(3, 8),
    ),
]  # fmt: skip


def results(call: Call, inputs: list[Tensor]) -> list[Tensor]:
    """Output and the gradients of all inputs, for a fixed random gradient."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = call(*leaves)
    seed = torch.Generator("cuda").manual_seed(1)
    d_y = torch.randn(y.shape, device="cuda", generator=seed).bfloat16().to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, d_y)]


def errors(call: Call, work: Work, inputs: list[Tensor]) -> list[float]:
    exact = results(work.plain, [x.double() for x in inputs])
    mine = results(call, inputs)
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(mine, exact, strict=True)]


def check(work: Work) -> None:
    """Right, the same twice, and never waiting for the device; raises if not."""
    inputs = work.draw(301, *work.shape[1:])
    results(work.ours, inputs)
    torch.cuda.set_sync_debug_mode("error")
    mine, again = results(work.ours, inputs), results(work.ours, inputs)
    torch.cuda.set_sync_debug_mode("default")
    found = errors(work.ours, work, inputs)
    print(work.name.format("..."), "errors of the output and the gradients:", *(f"{e:.1e}" for e in found))
    for name, peer in {"the equation, in torch": work.plain, **work.peers()}.items():
        with reported(f"errors of {name}"):
            print(f"  {name}:", *(f"{e:.1e}" for e in errors(peer, work, inputs)))
    if not max(found) < LIMIT or not all(map(torch.equal, mine, again)):
        raise RuntimeError("the kernels are wrong, or differ from one run to the next")


def times(call: Call, inputs: list[Tensor]) -> tuple[float, float]:
    """Of the forward, and of it with all gradients."""
    with torch.no_grad():
        forward = milliseconds(lambda: call(*inputs))
    leaves = [x.detach().requires_grad_() for x in inputs]
    d_y = torch.randn_like(call(*leaves))
    return forward, milliseconds(lambda: torch.autograd.grad(call(*leaves), leaves, d_y))


def measure(work: Work, limits: Ceilings) -> list[dict[str, object]]:
    inputs = work.draw(*work.shape)
    ours = times(work.ours, inputs)
    calls = {"torch.compile": torch.compile(work.plain, dynamic=False), **work.peers()}
    peers = {}
    for name, call in calls.items():
        with reported(f"{work.name}: {name}"):
            peers[name] = times(call, inputs)
    rows = []
    shape = f"{'x'.join(map(str, work.shape))} bf16" + ", halves of one tensor" * (work.draw is halves)
    for i, kind in enumerate(("fwd", "fwdbwd")):
        floor = limits.floor(work.passes[i] * inputs[0].numel() * 2, 0)
        name, beside = work.name.format(kind), {peer: both[i] for peer, both in peers.items()}
        listed = ", ".join(f"{peer} {time:.4g}" for peer, time in beside.items())
        print(
            f"{name}: ours {ours[i]:.4g} ms, {listed}, floor {floor:.4g}, x{ours[i] / floor:.2f}", flush=True
        )
        rows.append(row(name, ours[i], "ms", "lower", peers=beside, floor=floor, shape=shape))
    return rows


def try_situ_tiles(limits: Ceilings) -> None:
    """Each pass alone, on halves of one tensor and on two."""
    operators, caps = torch.ops.openk3, ("situ", 4.0, 25.0)
    gate, up = halves(131072, 6144)
    two = [gate.contiguous(), up.contiguous()]
    d_y = torch.randn_like(two[0])

    def show_passes(tile: str) -> None:
        floor = limits.floor(d_y.numel() * 2, 0)
        show(f"situ forward, halves {tile}", lambda: operators.gated_unit(gate, up, *caps), 3 * floor)
        show(f"situ forward, two {tile}", lambda: operators.gated_unit(*two, *caps), 3 * floor)
        show(f"situ backward {tile}", lambda: operators.gated_unit_backward(*two, d_y, *caps), 5 * floor)

    with patch.object(gated_unit_kernels, "coarse", lambda dtype: False), reported("the exact forward"):
        show_passes("without tanh.approx")
    for per_thread, warps in product((8, 16), (4, 8, 16)):
        values = per_thread * 32 * warps
        tiles = {
            "APART": {"ROWS": values // 256, "COLS": 256, "num_warps": warps},
            "ONE_ROW": {"ROWS": 1, "COLS": values, "num_warps": warps},
        }
        with patch.multiple(gated_unit_kernels, **tiles), reported(f"{values} values, {warps} warps"):
            show_passes(f"{values} values, {warps} warps")


def try_norm_tiles(work: Work, limits: Ceilings) -> None:
    """Each pass alone."""
    operators = torch.ops.openk3
    x, *logits, gain = work.draw(*work.shape)
    arguments = x, gain, logits[0] if logits else None, EPS, True
    forward, both = (limits.floor(n * x.numel() * 2, 0) for n in work.passes)
    D = triton.next_power_of_2(x.shape[-1])
    for values, warps in product((2048, 4096, 8192), (4, 8, 16)):
        if (values < D and values != 2048) or not 4 <= max(values, D) // (32 * warps) <= 32:
            continue
        tile = {"ROWS": max(1, values // D), "D": D, "num_warps": warps}
        what = f"{work.name.format('')} {tile}"
        with patch.object(norm_kernels, "tile_of", lambda *_, tile=tile: tile), reported(what):
            show(f"forward {what}", lambda: operators.row_norm(*arguments), forward)
            show(f"backward {what}", lambda: operators.row_norm_backward(*arguments, x), both - forward)


def show(what: str, call: Callable[[], object], floor: float) -> None:
    time = milliseconds(call, 5, 20)
    print(f"{what}: {time:.4f} ms, {time / floor:.2f} of the floor", flush=True)


@contextmanager
def reported(what: str) -> Iterator[None]:
    """One failure costs one line, not the run."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        print(f"FAILED {what}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="h200", help="names the file of results")
    parser.add_argument("--variants", action="store_true", help="try tiles instead")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/elementwise.py needs a CUDA device")
        return 0
    compile_candidates_together()
    good = []
    for work in WORKS:
        with reported(f"{work.name}: check"):
            check(work)
            good.append(work)
    limits = ceilings()
    if arguments.variants:
        try_situ_tiles(limits)
        for work in WORKS[1:]:
            try_norm_tiles(work, limits)
        return 0
    rows = []
    for work in good:
        with reported(work.name):
            rows += measure(work, limits)
    print("merged into", merge(rows, arguments.device))
    return 0 if len(rows) == 2 * len(WORKS) else 1


if __name__ == "__main__":
    sys.exit(main())
