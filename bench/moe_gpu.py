"""The routed experts on a GPU in training and prefill, beside torch's grouped and batched products.

    python bench/moe_gpu.py [h200] [--forms] [--pieces] [--variants] [--shape r1|1b]

`moe_fwd_8192x16of896` is the grouped products with SiTU between them, from rows that are grouped already, as
its peer is: one grouped product of gate and up together, compiled SiTU, one grouped product.
`moe_fwdbwd_r1` begins with ids: plan, dispatch, products, combine and all gradients. Its peers pad each
expert's rows to the longest and multiply in batches, or are our eager form on grouped products.
`--forms` checks and times the forms of the products of r1, or of a micro-batch of 1b, `--pieces` times each
kernel alone against its floor, `--variants` kernels over their sizes.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from gpu_timing import Ceilings, ceilings, milliseconds
from rows import row
from steps import Steps, add_options

from openk3.ops.activation import Activation
from openk3.ops.dispatch import Implementation
from openk3.ops.moe import DispatchPlan, expert_ffn, plan, route
from openk3.ops.quantile_balance import required_bias_histogram

Tensor = torch.Tensor
Result = TypeVar("Result")
ACTIVATION = Activation()
LIMIT = 1e-2  # relative L2: operands, hidden rows and results are rounded to bf16
# T, k, E, l, F
K3 = 8192, 16, 896, 3584, 3072
R1 = 131072, 6, 256, 256, 416
ONE_B = 32768, 8, 128, 1024, 512
SHAPES = {"r1": R1, "1b": ONE_B}


def choose(T: int, k: int, E: int) -> tuple[Tensor, Tensor]:
    """ids and router weights of random logits."""
    ids, weights, *_ = route(
        torch.randn(T, E, device="cuda"), torch.zeros(E, device="cuda"), k, implementation="triton"
    )
    return ids, weights


def draw(T: int, k: int, E: int, width: int, F: int) -> tuple[Tensor, list[Tensor]]:
    """ids, and x, router weights, w1, w3, w2."""
    ids, weights = choose(T, k, E)
    x = torch.randn(T, width, device="cuda").bfloat16()
    w = [
        torch.empty(E, *shape, device="cuda", dtype=torch.bfloat16).normal_(std=shape[1] ** -0.5)
        for shape in ((F, width), (F, width), (width, F))
    ]
    return ids, [x, weights, *w]


def results(
    ids: Tensor, inputs: list[Tensor], implementation: Implementation, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """u and the gradients to all inputs."""
    leaves = [part.to(dtype or part.dtype).detach().requires_grad_() for part in inputs]
    seed = torch.Generator("cuda").manual_seed(1)
    d_u = torch.randn(inputs[0].shape, device="cuda", generator=seed).bfloat16().to(leaves[0].dtype)
    u = expert_ffn(
        *leaves[:2],
        plan(ids, len(leaves[2]), implementation="triton"),
        *leaves[2:],
        ACTIVATION,
        implementation=implementation,
    )
    return [u.detach(), *torch.autograd.grad(u, leaves, d_u)]


def check() -> None:
    """Right, the same twice, and never waiting for the device; raises if not."""
    few, many = torch.zeros(700, 1, dtype=torch.int64), torch.arange(400)[:, None] % 2 * 6
    for T, k, E, width, F, forced in (
        (300, 3, 7, 256, 416, None),
        (4000, 6, 16, 256, 416, None),
        (2000, 4, 5, 128, 96, None),
        (20, 2, 64, 72, 40, None),
        (700, 1, 9, 64, 136, few),
        (400, 1, 7, 256, 128, many),
    ):
        ids, inputs = draw(T, k, E, width, F)
        ids = ids if forced is None else forced.cuda()
        exact = results(ids, inputs, "eager", torch.float64)
        peer = results(ids, inputs, "eager")
        results(ids, inputs, "triton")
        torch.cuda.set_sync_debug_mode("error")
        mine, again = results(ids, inputs, "triton"), results(ids, inputs, "triton")
        torch.cuda.set_sync_debug_mode("default")
        both = [
            [
                float((a.double() - b).norm() / b.norm().clamp_min(1e-300))
                for a, b in zip(r, exact, strict=True)
            ]
            for r in (mine, peer)
        ]
        print(f"T={T} k={k} E={E} l={width} F={F}: errors of u, dx, dp, dw1, dw3, dw2, then of eager:")
        print("  ", *(f"{e:.1e}" for e in both[0]), "|", *(f"{e:.1e}" for e in both[1]))
        if not max(both[0]) < LIMIT or not all(map(torch.equal, mine, again)):
            raise RuntimeError("the kernels are wrong, or differ from one run to the next")


def padded(x: Tensor, weights: Tensor, ids: Tensor, w: list[Tensor], longest: int, unit: Any) -> Tensor:
    """Each expert's rows in a batch of its own, padded to the longest: what people write with `bmm`."""
    E, (T, k) = len(w[0]), ids.shape
    expert, order = ids.flatten().sort(stable=True)
    first = torch.searchsorted(expert, torch.arange(E, device="cuda"))
    place = expert * longest + torch.arange(T * k, device="cuda") - first[expert]
    rows = x.new_zeros(E * longest, x.shape[1]).index_copy(0, place, x[order // k]).view(E, longest, -1)
    hidden = unit(rows @ w[0].transpose(1, 2), rows @ w[1].transpose(1, 2))
    out = (hidden @ w[2].transpose(1, 2)).flatten(0, 1)
    place_of = torch.empty_like(order).index_copy(0, order, place).view(T, k)
    return (out[place_of] * weights[:, :, None]).sum(1).to(x.dtype)


def r1(limits: Ceilings, steps: Steps, alone: bool) -> None:
    T, k, E, width, F = R1
    ids, inputs = draw(*R1)
    leaves = [part.detach().requires_grad_() for part in inputs]
    d_u = torch.randn_like(inputs[0])
    longest = int(plan(ids, E, implementation="triton").load.max())
    unit = torch.compile(lambda gate, up: ACTIVATION(gate, up, implementation="eager"))

    def through(implementation: Implementation) -> Tensor:
        return expert_ffn(
            *leaves[:2],
            plan(ids, E, implementation="triton"),
            *leaves[2:],
            ACTIVATION,
            implementation=implementation,
        )

    def both_ways(forward: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(), leaves, d_u)

    rows = T * k
    floor = limits.floor(2 * 2 * 3 * E * F * width + 4 * 2 * T * width, 2 * 9 * rows * F * width)
    shape = f"T={T} k={k} E={E} l={width} F={F} bf16, SiTU, from ids to all gradients"
    ours = milliseconds(both_ways(lambda: through("triton")), 50, 200)
    peers: dict[str, float | None] = {}
    report(steps, "moe_fwdbwd_r1", ours, peers, floor, shape)
    with torch.no_grad():
        print(f"r1 forward alone: {milliseconds(lambda: through('triton')):.3f} ms", flush=True)
    for name, forward in (
        ("torch grouped_mm", lambda: through("eager")),
        ("torch bmm, padded", lambda: padded(leaves[0], leaves[1], ids, leaves[2:], longest, unit)),
    ):
        if alone:
            break
        peers[name] = attempt(name, lambda forward=forward: milliseconds(both_ways(forward), 50, 200))  # type: ignore[misc]
        report(steps, "moe_fwdbwd_r1", ours, peers, floor, shape)


def k3(limits: Ceilings, steps: Steps, alone: bool) -> None:
    from openk3.ops.moe.kernels.operator import forward_rows

    T, k, E, width, F = K3
    ids, _ = choose(T, k, E)
    routes = plan(ids, E, implementation="triton")
    rows = torch.randn(T * k, width, device="cuda").bfloat16()
    w13 = torch.empty(E, 2 * F, width, device="cuda", dtype=torch.bfloat16).normal_(std=width**-0.5)
    w2 = torch.empty(E, width, F, device="cuda", dtype=torch.bfloat16).normal_(std=F**-0.5)
    w1, w3 = w13[:, :F].contiguous(), w13[:, F:].contiguous()
    situ = torch.compile(lambda x: ACTIVATION(x[:, :F], x[:, F:], implementation="eager"))
    grouped_mm = torch.nn.functional.grouped_mm
    ends = routes.offsets[1:]

    def peer() -> Tensor:
        return grouped_mm(situ(grouped_mm(rows, w13.mT, offs=ends)), w2.mT, offs=ends)  # type: ignore[no-any-return]

    def ours() -> Tensor:
        return forward_rows(rows, routes.offsets, w1, w3, w2, "situ", 4.0, 25.0)

    with torch.no_grad():
        out, offsets = ours(), routes.offsets.tolist()
        for e in (0, 17, E - 1):
            mine = slice(offsets[e], offsets[e + 1])
            x = rows[mine].double()
            exact = ACTIVATION(x @ w1[e].double().T, x @ w3[e].double().T) @ w2[e].double().T
            error = float((out[mine].double() - exact).norm() / exact.norm())
            print(f"moe_fwd_8192x16of896: expert {e}, {len(x)} rows, error {error:.1e}")
            if not error < LIMIT:
                raise RuntimeError("the products are wrong")
        mine_ms = milliseconds(ours, 100, 400)
        first = limits.floor(2 * (2 * E * F * width + T * k * (width + F)), 4 * T * k * F * width)
        second = limits.floor(2 * (E * F * width + T * k * (width + F)), 2 * T * k * F * width)
        shape = f"T={T} k={k} E={E} l={width} F={F} bf16, SiTU, from grouped rows to grouped rows"
        times: dict[str, float | None] = {}
        report(steps, "moe_fwd_8192x16of896", mine_ms, times, first + second, shape)
        if not alone:
            times["torch grouped_mm"] = attempt("grouped_mm", lambda: milliseconds(peer, 100, 400))
            report(steps, "moe_fwd_8192x16of896", mine_ms, times, first + second, shape)


def report(
    steps: Steps, work: str, ours: float, peers: dict[str, float | None], floor: float, shape: str
) -> None:
    known = {name: value for name, value in peers.items() if value is not None}
    steps.keep(row(work, ours, "ms", "lower", peers=known, floor=floor, shape=shape))


def attempt(name: str, call: Callable[[], Result]) -> Result | None:
    """What `call` returns, or None with the reason printed."""
    try:
        return call()
    except Exception:  # noqa: BLE001
        print(f"{name} failed:\n{traceback.format_exc(limit=3)}")
        return None


def pieces(limits: Ceilings, size: tuple[int, ...]) -> dict[str, tuple[float, Callable[[], object]]]:
    """Every kernel of one layer, by name, with its floor in ms."""
    from openk3.ops.moe.kernels import choice, gradients, narrow, products, wide
    from openk3.ops.moe.kernels.plan import plan_tensors, tile_starts
    from openk3.ops.moe.kernels.rows import combine, gather

    T, k, E, width, F = size
    R = T * k
    logits = torch.randn(T, E, device="cuda")
    scores = logits.sigmoid()
    ids, (x, weights, w1, w3, w2) = draw(*size)
    routes: DispatchPlan = plan(ids, E, implementation="triton")
    offsets = routes.offsets
    rows, hidden = gather(x, routes.tokens), torch.randn(R, F, device="cuda").bfloat16()

    def grouped(
        w_a: Tensor, w_b: Tensor, source: Tensor, unit: str, tiles: products.Tiles | None = None
    ) -> Tensor:
        tiles = tiles or products.tiles_for(R, E)
        starts = tile_starts(offsets, tiles.height)
        return products.product(source, w_a, w_b, offsets, starts, tiles, unit, 4.0, 25.0)

    def hidden_gradients() -> object:
        starts = tile_starts(offsets, gradients.HIDDEN.rows)
        return gradients.hidden_gradients(
            rows, rows, w1, w3, w2, weights, routes.order, offsets, starts, "situ", 4.0, 25.0
        )

    def row_gradients() -> Tensor:
        starts = tile_starts(offsets, gradients.ROWS.rows)
        return gradients.row_gradients(hidden, hidden, w1, w3, offsets, starts)

    matrix, flops = 2 * E * F * width, 2 * R * F * width
    r_l, r_f, t_l = 2 * R * width, 2 * R * F, 2 * T * width
    made: dict[str, tuple[float, Callable[[], object]]] = {
        "choice": (limits.floor(4 * T * E, 0), lambda: choice.select_experts(logits, k)),
        "histogram": (
            limits.floor(4 * T * E, 0),
            lambda: required_bias_histogram(
                scores, scores[:, 0], scores.new_zeros(E), implementation="triton"
            ),
        ),
        "histogram, eager": (
            limits.floor(4 * T * E, 0),
            lambda: required_bias_histogram(
                scores, scores[:, 0], scores.new_zeros(E), implementation="eager"
            ),
        ),
        "plan": (limits.floor(32 * R, 0), lambda: plan_tensors(ids, E)),
        "gather": (limits.floor(t_l + r_l, 0), lambda: gather(x, routes.tokens)),
        "gate and up": (
            limits.floor(2 * matrix + r_l + r_f, 2 * flops),
            lambda: grouped(w1, w3, rows, "situ"),
        ),
        "down": (limits.floor(matrix + r_l + r_f, flops), lambda: grouped(w2, w2, hidden, "")),
        "combine": (limits.floor(r_l + t_l, 0), lambda: combine(rows, routes.rows, weights, x.dtype)),
        "hidden gradients": (limits.floor(3 * matrix + 2 * r_l + 3 * r_f, 3 * flops), hidden_gradients),
        "weight gradients, gate and up": (
            limits.floor(2 * matrix + r_l + 2 * r_f, 2 * flops),
            lambda: gradients.weight_gradients(hidden, hidden, rows, offsets),
        ),
        "weight gradients, down": (
            limits.floor(matrix + r_l + r_f, flops),
            lambda: gradients.weight_gradients(rows, None, hidden, offsets),
        ),
        "row gradients": (limits.floor(2 * matrix + r_l + 2 * r_f, 2 * flops), row_gradients),
    }
    if width <= narrow.WIDEST:
        made |= {
            "packing": (limits.floor(4 * matrix, 0), lambda: narrow.pack(w1, w3, 32)),
            "rows stay, forward": (
                limits.floor(3 * matrix + t_l + r_l, 3 * flops),
                lambda: narrow.forward(x, routes.tokens, w1, w3, w2, offsets, "situ", 4.0, 25.0),
            ),
            "rows stay, backward": (
                limits.floor(3 * matrix + 2 * t_l + 3 * r_l + 3 * r_f, 5 * flops),
                lambda: narrow.backward(
                    x, x, routes.tokens, w1, w3, w2, weights, routes.order, offsets, "situ", 4.0, 25.0
                ),
            ),
        }
    if min(width, F) >= 512:
        made |= {
            "wide: hidden gradients": (
                made["hidden gradients"][0],
                lambda: wide.hidden_gradients(
                    rows, rows, w1, w3, w2, weights, routes.order, offsets, "situ", 4.0, 25.0
                ),
            ),
            "wide: row gradients": (
                made["row gradients"][0],
                lambda: wide.row_gradients(hidden, hidden, w1, w3, offsets),
            ),
        }
    return made


def time_pieces(limits: Ceilings, shape: str) -> None:
    for name, (floor, call) in pieces(limits, SHAPES[shape]).items():
        time = attempt(name, lambda call=call: milliseconds(call))  # type: ignore[misc]
        print(f"{shape} {name}: {time} ms, floor {floor:.4f} ms", flush=True)


def forms(shape: str) -> None:
    """Each form of the products, right at these widths first, then all from ids to gradients in it."""
    from openk3.ops.moe.kernels import narrow, wide

    known: dict[str, dict[str, list[tuple[Any, str, Any]]]] = {
        "r1": {
            "by product": [(narrow, "FEWEST", 1 << 30)],
            "rows stay": [(narrow, "HOPPER", False)],
            "rows stay, in Gluon": [],
        },
        "1b": {
            "by product": [(wide, "LEAST", None)],
            "wide tiles": [(wide, "LEAST", 512)],
        },
    }
    _, k, E, width, F = SHAPES[shape]
    small, large = draw(4000, k, 16, width, F), draw(*SHAPES[shape])
    exact = results(*small, "eager", torch.float64)
    leaves = [part.detach().requires_grad_() for part in large[1]]
    d_u = torch.randn_like(leaves[0])

    def both_ways() -> object:
        routes = plan(large[0], E, implementation="triton")
        u = expert_ffn(*leaves[:2], routes, *leaves[2:], ACTIVATION, implementation="triton")
        return torch.autograd.grad(u, leaves, d_u)

    call = {
        name: call
        for name, (_, call) in pieces(ceilings(), SHAPES[shape]).items()
        if name.startswith("rows stay")
    }
    for name, changes in known[shape].items():
        with ExitStack() as stack:
            for change in changes:
                stack.enter_context(patch.object(*change))
            made = attempt(name, lambda: results(*small, "triton"))
            if made is None:
                continue
            errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(made, exact, strict=True)]
            again = results(*small, "triton")
            right = max(errors) < LIMIT and all(map(torch.equal, made, again))
            print(name, "is right:" if right else "IS WRONG:", *(f"{e:.1e}" for e in errors), flush=True)
            if right:
                times = {f"moe_fwdbwd_{shape}": both_ways} | ({} if name == "by product" else call)
                for what, run in times.items():
                    ms = attempt(name, lambda run=run: milliseconds(run, 20, 100))  # type: ignore[misc]
                    print(f"   {what}: {ms} ms", flush=True)


def try_variants(limits: Ceilings, steps: Steps, shape: str) -> None:
    """Kernels over their sizes: of r1, and of K3 with an eighth of its tokens and experts; or of 1b."""
    from openk3.ops.moe.kernels import gradients, narrow, products, wide

    T, k, E, width, F = K3
    few = [
        products.Tiles(*t)
        for t in ((128, 64, 128, 64, 8, 4), (128, 64, 128, 64, 8, 3), (128, 32, 128, 64, 8, 4))
    ]
    blocks = [gradients.Blocks(*b) for b in ((64, 256, 64, 8, 3), (64, 256, 64, 8, 4), (128, 128, 64, 8, 3))]
    slabs = [narrow.Slabs(*sizes) for sizes in ((128, 32, 8, 3), (128, 32, 8, 2), (64, 32, 4, 2))]
    one_slab = [narrow.Slabs(*sizes) for sizes in ((128, 32, 8, 2), (64, 32, 4, 2))]
    attempts: dict[tuple[int, ...], list[tuple[str, Any, str, list[Any]]]] = {
        R1: [
            ("rows stay, forward", narrow, "FORWARD", slabs),
            ("rows stay, backward", narrow, "BACKWARD", one_slab),
            ("weight gradients, gate and up", gradients, "TWO_WEIGHTS", blocks),
            ("weight gradients, down", gradients, "ONE_WEIGHT", blocks),
        ],
        (T // 8, k, E // 8, width, F): [
            ("gate and up", products, "FEW", few),
            ("down", products, "FEW", few),
        ],
    }
    if shape == "1b":
        tiles = products.Tiles
        attempts = {
            ONE_B: [
                ("wide: hidden gradients", wide, "HIDDEN", [wide.HIDDEN, tiles(128, 0, 128, 64, 8, 3)]),
                ("wide: row gradients", wide, "ROWS", [wide.ROWS, tiles(256, 0, 128, 64, 8, 4)]),
                ("weight gradients, gate and up", gradients, "TWO_WEIGHTS", blocks),
                ("weight gradients, down", gradients, "ONE_WEIGHT", blocks),
            ]
        }
    for size, kernels in attempts.items():
        made = pieces(limits, size)
        for name, module, setting, variants in kernels:
            floor, call = made[name]
            for variant in variants:
                if steps.passed():
                    print(f"E={size[2]} {name} {variant}: out of time", flush=True)
                    break
                with patch.object(module, setting, variant):
                    time = attempt(f"{name} {variant}", lambda call=call: milliseconds(call, 5, 20))  # type: ignore[misc]
                if time is not None:
                    what = f"E={size[2]} {name}, {setting} = {variant}"
                    print(f"{what}: {time:.4f} ms, {time / floor:.2f} of the floor", flush=True)
        del made
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="h200", help="names the file of results")
    parser.add_argument("--pieces", action="store_true", help="time each kernel instead")
    parser.add_argument("--forms", action="store_true", help="check and time the forms of products instead")
    parser.add_argument("--variants", action="store_true", help="try tile sizes instead")
    parser.add_argument("--shape", choices=SHAPES, default="r1", help="of these three")
    add_options(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/moe_gpu.py needs a CUDA device")
        return 0
    steps = Steps(None if arguments.ours_alone else arguments.device, arguments.budget)
    if arguments.forms:
        steps("forms", lambda: forms(arguments.shape))
    steps.check("errors", check)
    limits = ceilings()
    if arguments.pieces:
        steps("pieces", lambda: time_pieces(limits, arguments.shape))
    if arguments.variants:
        steps("variants", lambda: try_variants(limits, steps, arguments.shape))
    if not (arguments.forms or arguments.pieces or arguments.variants):
        steps("r1", lambda: r1(limits, steps, True))
        steps("K3", lambda: k3(limits, steps, True))
        if not arguments.ours_alone:  # last: the peers compile
            steps("r1 beside its peers", lambda: r1(limits, steps, False))
            steps("K3 beside its peer", lambda: k3(limits, steps, False))
    return steps.status()


if __name__ == "__main__":
    sys.exit(main())
