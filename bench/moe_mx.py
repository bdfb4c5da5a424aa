"""The routed experts of K3 from MXFP4 weights, decoding and prefill, beside torch's grouped products in bf16.

    python bench/moe_mx.py [h200] [--variants]

`moe_decode_mxfp4_N` is one layer for N tokens, 16 of 896 experts each, from a plan to the sum over slots, in
a CUDA graph that goes through eight batches, so that weights come from memory. `moe_fwd_mxfp4_8192x16of896`
is the grouped products with SiTU between them, from rows that are grouped already. The peer is one grouped
product of gate and up together, compiled SiTU, one grouped product, from grouped rows, with weights in bf16.
Floors count the bytes of the experts that have tokens, and FLOPs. `--variants` tries block sizes.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from gpu_timing import Ceilings, ceilings, milliseconds, milliseconds_in_graph
from rows import row
from steps import Steps, add_options

from openk3.ops.activation import Activation
from openk3.ops.moe import DispatchPlan, MxExperts, expert_ffn, mx_expert_ffn, plan
from openk3.ops.mx import decode_mxfp4, encode_mxfp4, mxfp4_rounded, mxfp8_rounded

Tensor = torch.Tensor
ACTIVATION = Activation()
LIMIT = 1e-2  # relative L2: hidden rows and results are rounded to bf16
k, E, WIDTH, F = 16, 896, 3584, 3072
DECODE = (1, 32, 256)
T = 8192
BYTES = 3 * WIDTH * F * 17 // 32  # of an expert


def draw(tokens: int) -> tuple[Tensor, Tensor, DispatchPlan]:
    """x, router weights and a plan of random distinct experts."""
    ids = torch.rand(tokens, E, device="cuda").argsort(dim=1)[:, :k].contiguous()
    x = torch.randn(tokens, WIDTH, device="cuda").bfloat16()
    return x, torch.rand(tokens, k, device="cuda"), plan(ids, E, implementation="triton")


def any_experts() -> MxExperts:
    """All of a layer's: any word is eight codes, and scales are as in the release."""

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, (E, *shape, 2, 64, 16), device="cuda", dtype=torch.int32)

    def scales(*shape: int) -> Tensor:
        drawn = torch.randint(236, 246, (E, *shape, 2, 64, 4), device="cuda", dtype=torch.uint8)
        return drawn.view(torch.int32).squeeze(-1)

    half, whole = (F // 64, WIDTH // 128), (WIDTH // 128, F // 128)
    return MxExperts(words(*half), scales(*half), words(*whole), scales(*whole), WIDTH, F)


def by_expert(rows: Tensor, experts: MxExperts, e: int) -> Tensor:
    """Rows of one expert in float64."""
    w1, w3, w2 = experts.decoded(e, torch.float64)
    return ACTIVATION(rows.double() @ w1.T, rows.double() @ w3.T) @ w2.T


def check_small() -> None:
    """From a checkpoint's tensors to outputs, experts without tokens among them; raises if wrong."""
    for tokens, chosen, count, width, features in (
        (1, 3, 8, 256, 128),
        (50, 4, 9, 288, 416),
        (900, 2, 3, 128, 64),
    ):
        stored = []
        for shape in ((features, width), (features, width), (width, features)):
            stored += encode_mxfp4(torch.randn(count, *shape, device="cuda") / shape[1] ** 0.5)
        experts = MxExperts.from_checkpoint(*stored)
        ids = torch.rand(tokens, count, device="cuda").argsort(dim=1)[:, :chosen].contiguous()
        x, p = torch.randn(tokens, width, device="cuda").bfloat16(), torch.rand(tokens, chosen, device="cuda")
        routes = plan(ids, count, implementation="triton")
        exact = mx_expert_ffn(x.double(), p.double(), routes, experts, ACTIVATION, implementation="reference")
        mine, again = (
            mx_expert_ffn(x, p, routes, experts, ACTIVATION, implementation="triton") for _ in "ab"
        )
        eager = mx_expert_ffn(x, p, routes, experts, ACTIVATION, implementation="eager")
        errors = [float((out.double() - exact).norm() / exact.norm()) for out in (mine, eager)]
        print(
            f"T={tokens} k={chosen} E={count} l={width} F={features}: "
            f"error {errors[0]:.1e}, eager {errors[1]:.1e}"
        )
        if not errors[0] < LIMIT or not torch.equal(mine, again):
            raise RuntimeError("the kernels are wrong, or differ from one run to the next")


def check_rows(out: Tensor, rows: Tensor, routes: DispatchPlan, experts: MxExperts, label: str) -> None:
    """Some experts' rows `[R, l]` against float64."""
    offsets = routes.offsets.tolist()
    busy = [e for e in range(E) if offsets[e + 1] > offsets[e]]
    for e in {busy[0], busy[len(busy) // 2], busy[-1]}:
        mine = slice(offsets[e], offsets[e + 1])
        exact = by_expert(rows[mine], experts, e)
        error = float((out[mine].double() - exact).norm() / exact.norm())
        print(f"{label}: expert {e}, {len(exact)} rows, error {error:.1e}")
        if not error < LIMIT:
            raise RuntimeError("the products are wrong")


def peer_rows(w13: Tensor, w2: Tensor, rows: Tensor, offsets: Tensor, situ: Any) -> Tensor:
    grouped_mm = torch.nn.functional.grouped_mm
    ends = offsets[1:]
    return grouped_mm(situ(grouped_mm(rows, w13.mT, offs=ends)), w2.mT, offs=ends)  # type: ignore[no-any-return]


def peer_weights() -> tuple[Tensor, Tensor]:
    w13 = torch.empty(E, 2 * F, WIDTH, device="cuda", dtype=torch.bfloat16).normal_(std=WIDTH**-0.5)
    w2 = torch.empty(E, WIDTH, F, device="cuda", dtype=torch.bfloat16).normal_(std=F**-0.5)
    return w13, w2


def decode(experts: MxExperts, limits: Ceilings, steps: Steps, alone: bool) -> None:
    from openk3.ops.moe.kernels.mx_operator import forward_rows

    with torch.no_grad():
        batches = {tokens: [draw(tokens) for _ in range(8)] for tokens in DECODE}
        for tokens in DECODE:
            x, _, routes = batches[tokens][0]
            out = forward_rows(x, routes.tokens, routes.offsets, experts, "situ", 4.0, 25.0)
            check_rows(out, x[routes.tokens], routes, experts, f"moe_decode_mxfp4_{tokens}")

        def call(x: Tensor, p: Tensor, routes: DispatchPlan) -> Callable[[], object]:
            return lambda: mx_expert_ffn(x, p, routes, experts, ACTIVATION, implementation="triton")

        ours = {}

        def keep(tokens: int, peer: float | None) -> None:
            active = sum(int((r.load > 0).sum()) for _, _, r in batches[tokens]) / 8
            floor = limits.floor(active * BYTES + 4 * tokens * WIDTH, 6 * tokens * k * WIDTH * F)
            shape = (
                f"T={tokens} k={k} E={E} l={WIDTH} F={F}, {active:.0f} experts active, MXFP4 weights, bf16"
            )
            report(steps, f"moe_decode_mxfp4_{tokens}", ours[tokens], peer, floor, shape)

        for tokens in DECODE:
            ours[tokens] = milliseconds_in_graph([call(*batch) for batch in batches[tokens]])
            keep(tokens, None)
        if alone:
            return
        weights = peer_weights()
        situ = torch.compile(lambda x: ACTIVATION(x[:, :F], x[:, F:], implementation="eager"), dynamic=True)
        for tokens in DECODE:
            calls = [
                lambda rows=x[r.tokens], offsets=r.offsets: peer_rows(*weights, rows, offsets, situ)
                for x, _, r in batches[tokens]
            ]
            keep(tokens, attempt("grouped_mm", lambda calls=calls: milliseconds_in_graph(calls)))  # type: ignore[misc]


def prefill(experts: MxExperts, limits: Ceilings, steps: Steps, alone: bool) -> None:
    from openk3.ops.moe.kernels.mx_operator import forward_rows

    _, _, routes = draw(T)
    rows = torch.randn(T * k, WIDTH, device="cuda").bfloat16()

    def ours() -> Tensor:
        return forward_rows(rows, None, routes.offsets, experts, "situ", 4.0, 25.0)

    with torch.no_grad():
        check_rows(ours(), rows, routes, experts, "moe_fwd_mxfp4_8192x16of896")
        mine = milliseconds(ours, 100, 400)
        first = limits.floor(2 * E * BYTES // 3 + 2 * T * k * (WIDTH + F), 4 * T * k * F * WIDTH)
        second = limits.floor(E * BYTES // 3 + 2 * T * k * (WIDTH + F), 2 * T * k * F * WIDTH)
        shape = (
            f"T={T} k={k} E={E} l={WIDTH} F={F}, MXFP4 weights, bf16, SiTU, from grouped rows to grouped rows"
        )
        work = "moe_fwd_mxfp4_8192x16of896"
        report(steps, work, mine, None, first + second, shape)
        if alone:
            return
        weights = peer_weights()
        situ = torch.compile(lambda x: ACTIVATION(x[:, :F], x[:, F:], implementation="eager"))
        peer = attempt(
            "grouped_mm",
            lambda: milliseconds(lambda: peer_rows(*weights, rows, routes.offsets, situ), 100, 400),
        )
        report(steps, work, mine, peer, first + second, shape)


def r1_decode(limits: Ceilings) -> None:
    """A layer of r1 in bf16 for 1, 64 and 256 tokens by either kernel, in a graph; prints, makes no rows."""
    from openk3.ops.moe.kernels import operator

    count, chosen, width, features = 256, 6, 256, 416
    w = [
        (torch.randn(12, count, *s, device="cuda") / s[1] ** 0.5).bfloat16()
        for s in ((features, width), (features, width), (width, features))
    ]
    for tokens in (1, 64, 256):
        x, p = torch.randn(tokens, width, device="cuda").bfloat16(), torch.rand(tokens, chosen, device="cuda")
        ids = torch.rand(tokens, count, device="cuda").argsort(dim=1)[:, :chosen].contiguous()
        routes = plan(ids, count, implementation="triton")

        def layer(
            i: int, x: Tensor = x, p: Tensor = p, routes: DispatchPlan = routes
        ) -> Callable[[], object]:
            return lambda: expert_ffn(x, p, routes, *(t[i] for t in w), ACTIVATION, implementation="triton")

        times = []
        with torch.no_grad():
            for limit in (0, 1 << 30):
                operator.FEW = limit
                times.append(milliseconds_in_graph([layer(i) for i in range(12)]))
        operator.FEW = 0
        floor = limits.floor(6 * int((routes.load > 0).sum()) * width * features, 0)
        print(f"r1 layer, {tokens} tokens: {times[0]:.4f} ms, for few rows {times[1]:.4f}, floor {floor:.4f}")


def formats(limits: Ceilings) -> None:
    """Encode, decode and rounding of the rows of a prefill; prints, and makes no rows."""
    x = torch.randn(T * 16, WIDTH, device="cuda").bfloat16()
    packed, scale = encode_mxfp4(x, implementation="triton")
    n = x.numel()
    for name, moved, call in (
        ("encode", 2 + 17 / 32, lambda: encode_mxfp4(x, implementation="triton")),
        ("decode", 2 + 17 / 32, lambda: decode_mxfp4(packed, scale, implementation="triton")),
        ("MXFP4 rounded", 4, lambda: mxfp4_rounded(x, implementation="triton")),
        ("MXFP8 rounded", 4, lambda: mxfp8_rounded(x, implementation="triton")),
    ):
        time = milliseconds(call)
        print(f"{name} of {T * 16} x {WIDTH}: {time:.3f} ms, floor {limits.floor(moved * n, 0):.3f} ms")


def report(steps: Steps, work: str, ours: float, peer: float | None, floor: float, shape: str) -> None:
    known = {} if peer is None else {"torch grouped_mm, bf16 weights": peer}
    steps.keep(row(work, ours, "ms", "lower", peers=known, floor=floor, shape=shape))


def attempt(name: str, call: Callable[[], Any]) -> Any:
    """What `call` returns, or None with the reason printed."""
    try:
        return call()
    except Exception:  # noqa: BLE001
        print(f"{name} failed:\n{traceback.format_exc(limit=3)}")
        return None


def time_pair(
    label: str, first: Callable[[], Tensor], second: Callable[[], Tensor], R: int, active: int
) -> None:
    """Both products, with the bytes of weights and the FLOPs that they reach."""
    for name, call, share in (("gate and up", first, 2 / 3), ("down", second, 1 / 3)):
        time = attempt(f"{label} {name}", lambda call=call: milliseconds(call, 5, 20))  # type: ignore[misc]
        if time is not None:
            reached = share * active * BYTES / time / 1e9, share * 6 * R * WIDTH * F / time / 1e9
            print(
                f"{label} {name}: {time:.4f} ms, {reached[0]:.2f} TB/s, {reached[1]:.0f} TFLOP/s", flush=True
            )


def try_few(tokens: int, experts: MxExperts, steps: Steps) -> None:
    from openk3.ops.moe.kernels import few

    x, _, routes = draw(tokens)
    R, active = tokens * k, int((routes.load > 0).sum())
    hidden = torch.randn(R, F, device="cuda").bfloat16()
    w = experts

    def attempt_size(size: few.Few) -> None:
        tiles = few.list_tiles(routes.offsets, R, size.rows)
        time_pair(
            f"decode {tokens}, {active} experts, {size}",
            lambda: few.few_product(
                x, routes.tokens, w.w13, w.w13, w.s13, F, R, tiles, size, "situ", 4.0, 25.0
            ),
            lambda: few.few_product(hidden, None, w.w2, w.w2, w.s2, WIDTH, R, tiles, size),
            R,
            active,
        )

    for rows, stages, turn in (
        (16, 2, 1), (16, 3, 1), (16, 4, 1), (16, 5, 1), (16, 2, 2), (16, 3, 2), (16, 4, 2), (16, 2, 4),
        (32, 3, 1), (32, 4, 1), (32, 3, 2),
    ):  # fmt: skip
        if steps.passed():
            print(f"decode {tokens}: out of time", flush=True)
            return
        attempt_size(few.Few(rows, 64, 128, 4, stages, turn))


def try_many(experts: MxExperts, steps: Steps) -> None:
    from openk3.ops.moe.kernels import few, mx_many
    from openk3.ops.moe.kernels.products import Tiles

    _, _, routes = draw(T)
    R = T * k
    x, hidden = (torch.randn(R, width, device="cuda").bfloat16() for width in (WIDTH, F))
    w = experts

    def attempt_size(size: Tiles) -> None:
        tiles = few.list_tiles(routes.offsets, R, size.height)
        time_pair(
            f"prefill {size}",
            lambda: mx_many.many_product(x, w.w13, w.s13, F, tiles, size, "situ", 4.0, 25.0),
            lambda: mx_many.many_product(hidden, w.w2, w.s2, WIDTH, tiles, size),
            R,
            E,
        )

    for rows, tail, features, warps, stages in (
        (128, 32, 128, 8, 3), (128, 32, 128, 8, 4), (128, 32, 128, 8, 2), (128, 64, 128, 8, 3),
        (128, 0, 128, 8, 3), (64, 0, 128, 8, 4), (256, 0, 64, 8, 3), (128, 32, 64, 4, 2),
        (64, 0, 64, 4, 3), (64, 32, 128, 8, 4),
    ):  # fmt: skip
        if steps.passed():
            print("prefill: out of time", flush=True)
            return
        attempt_size(Tiles(rows, tail, features, 128, warps, stages))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="h200", help="names the file of results")
    parser.add_argument("--variants", action="store_true", help="try block sizes instead")
    add_options(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/moe_mx.py needs a CUDA device")
        return 0
    alone = arguments.ours_alone
    steps = Steps(None if alone else arguments.device, arguments.budget)
    steps.check("small shapes", check_small)
    limits, experts = ceilings(), any_experts()
    if arguments.variants:
        with torch.no_grad():
            for tokens in DECODE:
                steps(f"variants of {tokens}", lambda tokens=tokens: try_few(tokens, experts, steps))  # type: ignore[misc]
            steps("variants of prefill", lambda: try_many(experts, steps))
        return steps.status()
    steps("decode", lambda: decode(experts, limits, steps, True))
    steps("prefill", lambda: prefill(experts, limits, steps, True))
    steps("a layer of r1", lambda: r1_decode(limits))
    steps("formats", lambda: formats(limits))
    if not alone:  # last: the peer compiles, and its weights are 59 GB
        steps("decode beside its peer", lambda: decode(experts, limits, steps, False))
        steps("prefill beside its peer", lambda: prefill(experts, limits, steps, False))
    return steps.status()


if __name__ == "__main__":
    sys.exit(main())
