"""A mixture's entry and its shared experts' stream on a GPU: against float64, to the bit, without waiting.

Run with `pytest -m gpu tests/gpu/test_router_on_gpu.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from model.tiny import changed
from openk3.model import K3, initialise
from openk3.model.protocols import LOCAL
from openk3.model.streams import SideStream
from openk3.ops.activation import Activation
from openk3.ops.moe import Counted, Entry, plan, route, route_and_project
from openk3.ops.quantile_balance import required_bias_histogram
from ops.closeness import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = ("latent", "weights", "dx", "drouter", "ddown")
# T, d, E, l, k
SHAPES = {
    "r1": (3000, 512, 256, 256, 6),
    "K3's widths": (300, 7168, 896, 3584, 16),
    "ragged tiles": (333, 72, 37, 40, 5),
    "no latent": (500, 128, 64, None, 4),
    "every expert": (100, 64, 8, 16, 8),
    "one expert a token": (200, 64, 9, 16, 1),
    "one token": (1, 512, 256, 256, 6),
    "no token": (0, 64, 16, 32, 2),
}


def draw(T: int, d: int, E: int, width: int | None, seed: int = 0) -> list[Any]:
    """x, router, down, bias."""
    make = torch.Generator("cuda").manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, device="cuda", generator=make)  # noqa: E731
    down = None if width is None else normal(width, d).div(d**0.5).bfloat16()
    return [normal(T, d).bfloat16(), normal(E, d).div(d**0.5).bfloat16(), down, normal(E) / 16]


def run(inputs: list[Any], k: int, **options: Any) -> Entry:
    return route_and_project(*inputs, k, implementation="triton", scaling_factor=2.5, **options)


def with_gradients(inputs: list[Any], forward: Any) -> list[torch.Tensor]:
    """latent, weights, and gradients of a fixed random projection of both."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs[:3]]
    latent, weights = forward([*leaves, inputs[3]])
    make = torch.Generator("cuda").manual_seed(7)
    d_outs = [
        torch.randn(o.shape, device="cuda", generator=make).bfloat16().to(o.dtype) for o in (latent, weights)
    ]
    wanted = [leaf for leaf in leaves if leaf is not None]
    return [latent.detach(), weights.detach(), *torch.autograd.grad([latent, weights], wanted, d_outs)]


def mine(inputs: list[Any], k: int, **options: Any) -> list[torch.Tensor]:
    def forward(leaves: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        entry = run(leaves, k, **options)
        return entry.latent, entry.routing.weights

    return with_gradients(inputs, forward)


def exact(inputs: list[Any], ids: torch.Tensor) -> list[torch.Tensor]:
    def forward(leaves: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        x, router, down, _ = leaves
        chosen = torch.sigmoid(x @ router.T).gather(1, ids)
        return x if down is None else x @ down.T, 2.5 * chosen / chosen.sum(1, keepdim=True)

    return with_gradients([None if x is None else x.double() for x in inputs], forward)


def assert_right(inputs: list[Any], k: int) -> None:
    ids = run(inputs, k).routing.ids
    for name, a, b in zip(NAMES, mine(inputs, k), exact(inputs, ids), strict=False):
        # What is rounded to bf16 at the end, and weights, which are not.
        limit = 3e-6 if name == "weights" else 4e-3
        assert relative_error(a, b) < limit or (a.double() - b).abs().max() < 1e-5, name


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_are_those_of_the_equations(shape):
    T, d, E, width, k = SHAPES[shape]
    assert_right(draw(T, d, E, width), k)


@pytest.mark.parametrize("seed", range(25))
def test_any_shape_is_right(seed):
    make = torch.Generator().manual_seed(seed)
    pick = lambda low, high: int(torch.randint(low, high, (1,), generator=make))  # noqa: E731
    E = pick(2, 400)
    assert_right(draw(pick(0, 700), 8 * pick(1, 80), E, 8 * pick(1, 60), seed), pick(1, min(E, 20) + 1))


def test_the_gradient_of_the_router_keeps_more_digits_than_bf16():
    """Of one token and one expert dW_r = d logit x: in two terms, it is rounded once, at the end."""
    inputs = draw(64, 512, 256, 256)
    ids = run(inputs, 6).routing.ids
    assert (
        relative_error(mine(inputs, 6)[3], exact(inputs, ids)[3]) < 2e-3
    )  # one rounding: 1.65e-3, two: 2.3e-3


@pytest.mark.parametrize("shape", ["r1", "K3's widths", "ragged tiles", "every expert"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_choice_is_the_equations_where_it_is_clear_and_counts_are_of_the_choice(shape, masked):
    T, d, E, width, k = SHAPES[shape]
    near = 1e-6 * max(1, d / 1024)  # logits are sums of d products in fp32
    inputs = draw(T, d, E, width)
    x, router, _, bias = inputs
    mask = torch.rand(T, device="cuda") < 0.7 if masked else None
    entry = run(inputs, k, counted=Counted(mask, 500))
    routing = entry.routing
    scores = torch.sigmoid(x.double() @ router.double().T)
    biased = scores + bias
    wanted = route(x.double() @ router.double().T, bias.double(), k)
    chosen = biased.gather(1, routing.ids)
    assert (chosen - biased.gather(1, wanted.ids)).abs().max() < near
    assert (chosen[:, 1:] <= chosen[:, :-1] + near).all()
    assert (routing.ids.sort(1).values.diff(dim=1) > 0).all()
    assert (routing.cutoff - wanted.cutoff).nan_to_num(nan=0).abs().max() < near
    counted = routing.ids if mask is None else routing.ids[mask]
    assert torch.equal(entry.load, torch.bincount(counted.flatten(), minlength=E))
    histogram = required_bias_histogram(
        scores.float(), routing.cutoff, bias, token_mask=mask, bins=500, implementation="eager"
    )
    assert torch.equal(entry.histogram.sum(1), histogram.sum(1))
    moved = (entry.histogram - histogram).cumsum(1).abs().sum()
    assert moved <= 200 * near * T * E + 1
    made, sorted_ = plan(routing.ids, E, counts=routing.counts), plan(routing.ids.cpu(), E)
    for name in ("order", "tokens", "rows", "offsets"):
        assert torch.equal(getattr(made, name).cpu(), getattr(sorted_, name)), name


def test_equal_scores_fall_to_the_lower_expert():
    x, router, down, _ = draw(500, 64, 40, 32)
    routing = run(
        [x, router[:1].expand(40, 64).contiguous(), down, torch.zeros(40, device="cuda")], 5
    ).routing
    assert (routing.ids == torch.arange(5, device="cuda")).all()


def test_an_earlier_decision_is_taken_with_the_same_bits():
    inputs = draw(3000, 512, 256, 256)
    first = run(inputs, 6)
    decision = first.routing.ids, first.routing.cutoff
    again = run([*inputs[:3], -inputs[3]], 6, chosen=decision)
    assert torch.equal(again.routing.weights, first.routing.weights)
    assert torch.equal(again.latent, first.latent)
    assert all(map(torch.equal, mine(inputs, 6), mine(inputs, 6, chosen=decision)))


def test_equal_calls_give_equal_bits_and_never_wait():
    inputs = draw(5000, 512, 256, 256)
    options = {"counted": Counted(torch.rand(5000, device="cuda") < 0.7, 1000)}
    first = mine(inputs, 6, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [mine(inputs, 6, **options) for _ in range(3)]
        entry = run(inputs, 6, **options)
        plan(entry.routing.ids, 256, counts=entry.routing.counts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for other in again:
        assert all(map(torch.equal, first, other))


def test_a_graph_replays_other_rows():
    inputs, other = draw(700, 128, 32, 64), draw(700, 128, 32, 64, seed=1)

    def forward() -> tuple[torch.Tensor, ...]:
        entry = run(inputs, 4, counted=Counted(None, 100))
        routes = plan(entry.routing.ids, 32, counts=entry.routing.counts)
        return entry.latent, entry.routing.weights, entry.load, entry.histogram, routes.rows

    with torch.no_grad():
        forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = forward()
        inputs[0].copy_(other[0])
        graph.replay()
        assert all(map(torch.equal, out, forward()))


def test_compiled_without_a_break():
    inputs = draw(400, 128, 32, 64)

    def layer(x: torch.Tensor, router: torch.Tensor, down: torch.Tensor, bias: torch.Tensor) -> Any:
        entry = run([x, router, down, bias], 4, counted=Counted(None, 100))
        return entry.latent, entry.routing.weights, entry.load, entry.histogram

    compiled = torch.compile(layer, fullgraph=True)
    assert all(map(torch.equal, compiled(*inputs), layer(*inputs)))


@pytest.mark.parametrize("kind", ["situ", "swiglu", "glu"])
def test_one_tensor_of_gate_and_up_gives_the_result_of_its_halves(kind):
    both = torch.randn(1000, 2 * 832, device="cuda").bfloat16().requires_grad_()
    d_out = torch.randn(1000, 832, device="cuda").bfloat16()
    out = Activation(kind).of_halves(both, implementation="triton")
    gate, up = both.chunk(2, dim=1)
    wanted = Activation(kind)(gate, up, implementation="triton")
    assert torch.equal(out, wanted)
    assert all(
        map(torch.equal, torch.autograd.grad(out, both, d_out), torch.autograd.grad(wanted, both, d_out))
    )


def small_model(**seams: Any) -> K3:
    config = changed(hidden_size=128, moe__latent_width=64, moe__expert_width=64, moe__num_experts=16)
    model = K3(config, dtype=torch.float32, device="cuda", seams=replace(LOCAL, **seams))
    initialise(model, 0)
    return model.train()


def trained(model: K3, tokens: torch.Tensor, cu: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model.loss(tokens, tokens, cu).total
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_shared_experts_on_a_side_stream_compute_the_same_forward_and_backward():
    """Ten times, with memory in between that a freed tensor's would be given to, if it were given early."""
    tokens = torch.randint(61, (4096,), device="cuda")
    cu = torch.tensor([0, 2000, 4096], dtype=torch.int32, device="cuda")
    plain = trained(small_model(), tokens, cu)
    model = small_model(overlap=SideStream())
    for _ in range(10):
        for a, b in zip(trained(model, tokens, cu), plain, strict=True):
            assert relative_error(a, b) < 1e-5
        torch.full((1 << 24,), torch.nan, device="cuda")


def test_a_graph_captures_both_branches():
    side, w = SideStream(), torch.randn(64, 64, device="cuda")
    x = torch.randn(256, 64, device="cuda")
    forward = lambda: sum(side(x, lambda x: x @ w, lambda x: F.silu(x @ w.T)))  # noqa: E731
    with torch.no_grad():
        forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = forward()
        x.normal_()
        graph.replay()
        assert torch.equal(out, x @ w + F.silu(x @ w.T))
