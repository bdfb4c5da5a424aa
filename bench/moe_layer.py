"""One LatentMoE layer of r1 in training on a GPU, at 16,384 tokens (a micro-batch) and 131,072 (a step).

    PYTHONPATH=src python bench/moe_layer.py [h200]              correct first, then rows
    PYTHONPATH=src python bench/moe_layer.py [h200] --pieces     each piece, its floor, its peers; not merged
    PYTHONPATH=src python bench/moe_layer.py [h200] --variants   block sizes of the entry's products

The entry is the router and the latent projection with all that the logits are read for; its peer is the same
in torch, with fp32 logits by an fp32 product. The layer is run with the entry's kernels, with shared experts
on a stream of their own, and with the peer's entry; the routed experts are our kernels everywhere.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from gpu_timing import Ceilings, ceilings, milliseconds
from rows import row
from steps import Steps, add_options
from torch.nn import functional as F

from openk3.config import preset
from openk3.model.layers import At
from openk3.model.moe import LatentMoe
from openk3.model.protocols import LOCAL, Seams
from openk3.model.record import ForwardRecord
from openk3.model.streams import SideStream
from openk3.ops import activation as units
from openk3.ops import moe, norm, situ
from openk3.ops.activation import Activation
from openk3.ops.dispatch import Implementation, Kernel
from openk3.ops.moe import Counted, DispatchPlan, Entry, entry, expert_ffn, plan, route_and_project
from openk3.ops.moe.kernels import choice
from openk3.ops.moe.kernels import entry_products as products
from openk3.ops.moe.kernels.plan import plan_of_counts

Tensor = torch.Tensor
Call = Callable[[], object]
STEP, MICRO = 131072, 16384
d, E, L, K, WIDTH, BINS = 512, 256, 256, 6, 832, 1000  # of r1; WIDTH of both shared experts together
LIMIT = 6e-3  # relative L2: results are rounded to bf16


def draw(T: int) -> list[Tensor]:
    """x, router, down, bias."""
    normal = lambda *shape: torch.randn(*shape, device="cuda")  # noqa: E731
    weights = (normal(rows, d).mul(d**-0.5).bfloat16() for rows in (E, L))
    return [normal(T, d).bfloat16(), *weights, normal(E) / 64]


def through(inputs: list[Tensor], implementation: Implementation) -> Entry:
    return route_and_project(*inputs, K, counted=Counted(None, BINS), implementation=implementation)


def gradients(inputs: list[Tensor], forward: Callable[[list[Tensor]], tuple[Tensor, Tensor]]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = forward([*leaves, inputs[3]])
    seed = torch.Generator("cuda").manual_seed(1)
    d_out = [torch.randn(o.shape, device="cuda", generator=seed).bfloat16().to(o.dtype) for o in out]
    return [*(o.detach() for o in out), *torch.autograd.grad(out, leaves, d_out)]


def check(T: int) -> None:
    """Right, the same twice, and never waiting for the device; raises if not."""
    inputs = draw(T)
    made = through(inputs, "triton")
    ids = made.routing.ids

    def equations(leaves: list[Tensor], ids: Tensor = ids) -> tuple[Tensor, Tensor]:
        chosen = torch.sigmoid(leaves[0] @ leaves[1].T).gather(1, ids)
        return leaves[0] @ leaves[2].T, chosen / chosen.sum(1, keepdim=True)

    def mine(leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        made = through(leaves, "triton")
        return made.latent, made.routing.weights

    def eager(leaves: list[Tensor], decision: object = (ids, made.routing.cutoff)) -> tuple[Tensor, Tensor]:
        made = route_and_project(*leaves, K, chosen=decision, implementation="eager")  # type: ignore[arg-type]
        return made.latent, made.routing.weights

    exact = gradients([x.double() for x in inputs], equations)
    gradients(inputs, mine)
    torch.cuda.set_sync_debug_mode("error")
    first, again = gradients(inputs, mine), gradients(inputs, mine)
    torch.cuda.set_sync_debug_mode("default")
    errors = [
        [distance(a, b) for a, b in zip(r, exact, strict=True)] for r in (first, gradients(inputs, eager))
    ]
    print(f"T={T}: errors of latent, weights, dx, drouter, ddown, then of eager:")
    print("  ", *(f"{e:.1e}" for e in errors[0]), "|", *(f"{e:.1e}" for e in errors[1]))
    peer = through(inputs, "eager")
    other = int((peer.routing.ids != ids).any(1).sum())
    moved = int((peer.histogram - made.histogram).cumsum(1).abs().sum())  # type: ignore[operator]
    print(f"   tokens routed otherwise than eager: {other}; values counted in another bin: {moved}")
    counted = torch.equal(made.load, torch.bincount(ids.flatten(), minlength=E))  # type: ignore[arg-type]
    sorts = same_plan(plan(ids, E, counts=made.routing.counts), plan(ids, E, implementation="eager"))
    repeats = all(map(torch.equal, first, again))
    if not (max(errors[0]) < LIMIT and errors[0][1] < 3e-6 and counted and sorts and repeats):
        raise RuntimeError(f"wrong: counted {counted}, sorted {sorts}, the same twice {repeats}")
    if other > 1e-3 * T + 1 or moved > 1e-3 * T * E:
        raise RuntimeError("the choice or the histogram is not the eager one's")


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm().clamp_min(1e-300))


def same_plan(a: DispatchPlan, b: DispatchPlan) -> bool:
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("order", "tokens", "rows", "offsets"))


def attempt(name: str, call: Call) -> float | None:
    """Median ms of `call`, or None with the reason printed."""
    try:
        return milliseconds(call, 25, 100)
    except Exception:  # noqa: BLE001
        print(f"{name} failed:\n{traceback.format_exc(limit=3)}")
        return None


def show(name: str, floor: float, ours: Call, **peers: Call) -> None:
    times = {peer: attempt(f"{name}, {peer}", call) for peer, call in {"ours": ours, **peers}.items()}
    text = ", ".join(f"{peer} {t:.4f}" for peer, t in times.items() if t is not None)
    print(f"{name}: {text}; floor {floor:.4f} ms", flush=True)


def both_ways(inputs: list[Tensor], implementation: Implementation) -> Call:
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    d_latent = torch.randn(len(inputs[0]), L, device="cuda").bfloat16()
    d_weights = torch.randn(len(inputs[0]), K, device="cuda")

    def run() -> object:
        made = through([*leaves, inputs[3]], implementation)
        return torch.autograd.grad([made.latent, made.routing.weights], leaves, [d_latent, d_weights])

    return run


def entry_floor(limits: Ceilings, T: int) -> float:
    """Forward and backward: x read twice, the latent written, its gradient read twice, dX written."""
    return limits.floor(2 * T * (3 * d + 3 * L), 3 * 2 * T * d * (E + L))


def pieces(limits: Ceilings, T: int) -> None:
    inputs = draw(T)
    x, router, down, bias = inputs
    logits, latent = products.forward(x, router, down)
    made = choice.decide(logits, bias, None, K, 1.0, True, True, BINS)
    ids, scores = made.ids, made.scores
    values = choice.logit_gradients(torch.randn_like(scores), scores, 1.0, True)
    d_latent = torch.randn_like(latent)
    dense = torch.zeros(T, E, device="cuda").scatter_(1, ids, values)
    product = 2 * T * d * (E + L)
    span = K * choice.tokens_of_block(E, K)
    print(f"T = {T}")
    with torch.no_grad():
        show(
            "products forward", limits.floor(2 * T * d + 4 * T * E + 2 * T * L, product),
            lambda: products.forward(x, router, down),
            mm=lambda: (torch.mm(x, router.T, out_dtype=torch.float32), x @ down.T),
            fp32=lambda: (F.linear(x.float(), router.float()), x @ down.T),
        )  # fmt: skip
        show(
            "decide, load, histogram", limits.floor(4 * T * E + 16 * T * K, 0),
            lambda: choice.decide(logits, bias, None, K, 1.0, True, True, BINS),
            without_histogram=lambda: choice.decide(logits, bias, None, K, 1.0, True, True, 0),
            uncounted=lambda: choice.decide(logits, bias, None, K, 1.0, True, False, 0),
            choice_alone=lambda: choice.select_experts(logits, K),
        )  # fmt: skip
        show(
            "plan", limits.floor(32 * T * K, 0), lambda: plan_of_counts(ids, made.counts, span),
            own_counts=lambda: plan(ids, E, implementation="triton"),
            eager=lambda: plan(ids, E, implementation="eager"),
        )  # fmt: skip
        show("logit gradients", limits.floor(12 * T * K, 0),
             lambda: choice.logit_gradients(scores, scores, 1.0, True))  # fmt: skip
        show(
            "dX", limits.floor(2 * T * (d + L), product),
            lambda: products.input_gradient(ids, values, router, d_latent, down),
            mm=lambda: dense.bfloat16() @ router + d_latent @ down,
            fp32=lambda: (dense @ router.float()).bfloat16() + d_latent @ down,
        )  # fmt: skip
        show(
            "dW", limits.floor(2 * T * (d + L), product),
            lambda: products.weight_gradients(ids, values, d_latent, x, E),
            mm=lambda: (dense.bfloat16().T @ x, d_latent.T @ x),
            fp32=lambda: (dense.T @ x.float(), d_latent.T @ x),
        )  # fmt: skip
        show("entry forward", limits.floor(2 * T * (d + L), product), lambda: through(inputs, "triton"),
             eager=lambda: through(inputs, "eager"))  # fmt: skip
    show(
        "entry both ways",
        entry_floor(limits, T),
        both_ways(inputs, "triton"),
        eager=both_ways(inputs, "eager"),
    )
    shared(limits, x)


def shared(limits: Ceilings, x: Tensor) -> None:
    """Gate, up and their unit of the shared experts, then with the down projection and all gradients."""
    T, unit = len(x), Activation()
    wide = lambda: torch.randn(WIDTH, d, device="cuda").mul(d**-0.5).bfloat16().requires_grad_()  # noqa: E731
    gate, up, rows = wide(), wide(), x.detach().requires_grad_()
    down = torch.randn(d, WIDTH, device="cuda").mul(WIDTH**-0.5).bfloat16().requires_grad_()
    every = DispatchPlan(*(torch.arange(T, device="cuda") for _ in range(2)),
                         torch.arange(T, device="cuda")[:, None],
                         torch.tensor([0, T], dtype=torch.int32, device="cuda"))  # fmt: skip
    ones = torch.ones(T, 1, device="cuda")

    def joint() -> Tensor:
        both = F.linear(rows, torch.cat([gate, up]))
        return F.linear(unit.of_halves(both, implementation="triton"), down)

    def apart() -> Tensor:
        return F.linear(unit(F.linear(rows, gate), F.linear(rows, up), implementation="triton"), down)

    def as_an_expert() -> Tensor:
        weights = gate[None], up[None], down[None]
        return expert_ffn(rows, ones, every, *weights, unit, implementation="triton")

    d_out = torch.randn_like(x)
    calls = {"apart": apart, "as_an_expert": as_an_expert}
    back = lambda f: lambda: torch.autograd.grad(f(), [rows, gate, up, down], d_out)  # noqa: E731
    forward = limits.floor(2 * T * (2 * d + 6 * WIDTH), 6 * T * d * WIDTH)
    with torch.no_grad():
        show("shared experts forward", forward, joint, **calls)
    floor = limits.floor(2 * T * (5 * d + 15 * WIDTH), 18 * T * d * WIDTH)
    show("shared experts both ways", floor, back(joint), **{n: back(f) for n, f in calls.items()})


@contextmanager
def kernels_by_default(but: tuple[str, ...] = ()) -> Iterator[None]:
    """As if a card had run all kernels of the layer; `but`: leave the entry's or the halves' out."""
    here: Callable[[Kernel], Kernel] = lambda kernel: replace(kernel, checked_on="this card")  # noqa: E731
    plan_module = sys.modules["openk3.ops.moe.plan"]
    with ExitStack() as stack:
        for module, name in ((moe, "KERNEL"), (plan_module, "KERNEL"), (entry, "KERNEL"), (units, "HALVES")):
            if module.__name__.rsplit(".", 1)[1] not in but:
                stack.enter_context(patch.object(module, name, here(getattr(module, name))))
        for module in (situ, norm):
            stack.enter_context(patch.object(module, "KERNELS", tuple(map(here, module.KERNELS))))
        yield


def layer_call(T: int, seams: Seams) -> Call:
    """One layer forward and backward, counting, with a gradient to its input."""
    config = preset("r1")
    assert config.moe is not None
    layer = LatentMoe(config, config.moe, 1, seams, At(torch.bfloat16, torch.device("cuda"))).train()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.fill_(1) if "norm" in name else parameter.normal_(std=parameter.shape[-1] ** -0.5)
    x = torch.randn(T, config.hidden_size, device="cuda").bfloat16().requires_grad_()
    d_out = torch.randn_like(x)
    leaves = [x, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(x, ForwardRecord()), leaves, d_out)


def time_layer(limits: Ceilings, T: int) -> tuple[float, dict[str, float], float]:
    """ms of our layer, of others, and the floor by its products alone."""
    ways: dict[str, tuple[Seams, tuple[str, ...]]] = {
        "ours": (LOCAL, ()),
        "shared experts on a side stream": (replace(LOCAL, overlap=SideStream()), ()),
        "gate and up by two products": (LOCAL, ("activation",)),
        "entry in torch": (LOCAL, ("entry", "activation")),
    }
    times = {}
    for name, (seams, but) in ways.items():
        with kernels_by_default(but):
            time = attempt(name, layer_call(T, seams))
        print(f"layer both ways, T = {T}, {name}: {time} ms", flush=True)
        if time is not None:
            times[name] = time
    routed = 2 * 3 * T * K * 3 * L * 416
    flops = routed + 3 * 2 * T * (d * (E + L) + L * d + 3 * d * WIDTH)
    return times.pop("ours"), times, limits.floor(0, flops)


def try_variants(steps: Steps) -> None:
    x, router, down, bias = draw(STEP)
    logits, _ = products.forward(x, router, down)
    for size in ((128, 128, 64, 4, 3), (128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (64, 256, 64, 4, 3)):
        if steps.passed():
            print(f"forward {size}: out of time", flush=True)
            break
        with patch.object(products, "FORWARD", products.Blocks(*size)):
            time = attempt("forward", lambda: products.forward(x, router, down))
            print(f"forward {size}: {time} ms", flush=True)
    for size, warps in ((4096, 8), (8192, 8), (4096, 4), (2048, 4), (1024, 1)):
        with patch.dict(choice.DECIDE, {"SIZE": size, "num_warps": warps}):
            run = lambda: choice.decide(logits, bias, None, K, 1.0, True, True, BINS)  # noqa: E731
            print(f"decide {size} {warps}: {attempt('decide', run)} ms", flush=True)


def entry_row(limits: Ceilings, steps: Steps, T: int) -> None:
    inputs = draw(T)
    ours, eager = (milliseconds(both_ways(inputs, i), 25, 100) for i in ("triton", "eager"))
    shape = f"T={T} d={d} E={E} k={K} l={L} bf16, {BINS} bins, forward and all gradients"
    steps.keep(row(f"moe_entry_fwdbwd_r1_{T}", ours, "ms", "lower", peers={"torch": eager},
                   floor=entry_floor(limits, T), shape=shape))  # fmt: skip


def layer_row(limits: Ceilings, steps: Steps, T: int) -> None:
    ours, others, floor = time_layer(limits, T)
    shape = f"T={T}, a LatentMoE layer of r1 with router, record and shared experts, all gradients"
    work = f"moe_layer_fwdbwd_r1_{T}"
    steps.keep(row(work, ours, "ms", "lower", peers=others, floor=floor, shape=shape))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="h200", help="names the file of results")
    parser.add_argument("--pieces", action="store_true", help="each piece, its floor, its peers instead")
    parser.add_argument("--variants", action="store_true", help="try block sizes instead")
    add_options(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/moe_layer.py needs a CUDA device")
        return 0
    torch.manual_seed(0)
    steps = Steps(None if options.ours_alone else options.device, options.budget)
    for T in (5000, 77):
        steps.check(f"errors of {T} tokens", lambda T=T: check(T))  # type: ignore[misc]
        return steps.status()
    limits = ceilings()
    if options.variants:
        steps("variants", lambda: try_variants(steps))
        return steps.status()
    if options.pieces:
        for T in (STEP, MICRO):
            steps(f"pieces of {T} tokens", lambda T=T: pieces(limits, T))  # type: ignore[misc]
        return steps.status()
    for T in (STEP, MICRO):
        steps(f"entry of {T} tokens", lambda T=T: entry_row(limits, steps, T))  # type: ignore[misc]
        steps(f"layer of {T} tokens", lambda T=T: layer_row(limits, steps, T))  # type: ignore[misc]
    return steps.status()


if __name__ == "__main__":
    sys.exit(main())
