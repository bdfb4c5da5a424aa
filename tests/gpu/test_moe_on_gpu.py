"""The routed experts on a GPU: against float64, to the bit, without waiting, and inside a CUDA graph.

Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

import pytest
import torch

from openk3.ops.dispatch import Implementation
from openk3.ops.moe import Activation, expert_ffn, plan, route
from openk3.ops.quantile_balance import required_bias_histogram
from ops.closeness import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = ("u", "dx", "dp", "dw1", "dw3", "dw2")
# T, k, E, l, F
SHAPES = {
    "r1's widths": (900, 6, 16, 256, 416),
    "many rows an expert": (3000, 2, 4, 128, 96),
    "tokens < experts": (20, 2, 64, 72, 40),
    "one token": (1, 2, 3, 64, 136),
    "no token": (0, 2, 4, 64, 64),
    "one expert": (333, 1, 1, 64, 64),
}


def distinct_ids(T: int, k: int, E: int) -> torch.Tensor:
    return torch.rand(T, E, device="cuda").argsort(dim=1)[:, :k].contiguous()


def case(T: int, k: int, E: int, width: int, F: int) -> list[torch.Tensor]:
    """x, weights, w1, w3, w2."""
    x, p = torch.randn(T, width, device="cuda").bfloat16(), torch.rand(T, k, device="cuda")
    shapes = ((F, width), (F, width), (width, F))
    return [x, p, *((torch.randn(E, *s, device="cuda") / s[1] ** 0.5).bfloat16() for s in shapes)]


def results(
    ids: torch.Tensor,
    inputs: list[torch.Tensor],
    implementation: Implementation = "triton",
    dtype: torch.dtype | None = None,
    kind: str = "situ",
) -> list[torch.Tensor]:
    leaves = [x.to(dtype or x.dtype).detach().requires_grad_() for x in inputs]
    make = torch.Generator("cuda").manual_seed(1)
    d_u = torch.randn(inputs[0].shape, device="cuda", generator=make).bfloat16().to(leaves[0].dtype)
    routes = plan(ids, len(leaves[2]), implementation="triton")
    u = expert_ffn(*leaves[:2], routes, *leaves[2:], Activation(kind), implementation=implementation)
    return [u.detach(), *torch.autograd.grad(u, leaves, d_u)]


def assert_right(ids: torch.Tensor, inputs: list[torch.Tensor], kind: str = "situ") -> None:
    """Within twice the eager form's rounding, or 6e-3."""
    exact = results(ids, inputs, "reference", torch.float64, kind)
    eager = results(ids, inputs, "eager", kind=kind)
    for name, mine, peer, oracle in zip(NAMES, results(ids, inputs, kind=kind), eager, exact, strict=True):
        assert relative_error(mine, oracle) <= max(2 * relative_error(peer, oracle), 6e-3), name


@pytest.mark.parametrize("kind", ["situ", "swiglu", "glu"])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients_are_as_close_to_float64_as_the_eager_form(shape, kind):
    T, k, E, width, F = SHAPES[shape]
    assert_right(distinct_ids(T, k, E), case(T, k, E, width, F), kind)


@pytest.mark.parametrize("rows", [127, 128, 129, 160, 161, 192, 193, 700])
def test_one_expert_with_all_tokens(rows):
    assert_right(torch.full((rows, 1), 3, device="cuda"), case(rows, 1, 6, 128, 192))


@pytest.fixture(params=["by product", "rows stay", "rows stay, Gluon"])
def form(request, monkeypatch):
    """Each form of the products, whatever would be chosen."""
    from openk3.ops.moe.kernels import narrow

    monkeypatch.setattr(narrow, "suits", lambda rows, w1: request.param != "by product")
    monkeypatch.setattr(narrow, "HOPPER", "Gluon" in request.param)


# The first has r1's widths, the next other widths of the backward in Gluon, then F and l that fill no slab.
@pytest.mark.parametrize(("width", "F"), [(256, 416), (128, 96), (64, 32), (256, 136), (72, 40)])
@pytest.mark.usefixtures("form")
def test_every_form_is_right(width, F):
    assert_right(distinct_ids(2000, 3, 7), case(2000, 3, 7, width, F))


@pytest.mark.parametrize("rows", [1, 128, 129])
@pytest.mark.usefixtures("form")
def test_every_form_is_right_where_most_experts_have_no_rows(rows):
    assert_right(torch.full((rows, 1), 3, device="cuda"), case(rows, 1, 6, 256, 416))


@pytest.mark.usefixtures("form")
def test_every_form_gives_equal_bits_and_takes_fp16():
    ids = distinct_ids(3000, 6, 16)
    inputs = [x.half() if x.dtype == torch.bfloat16 else x for x in case(3000, 6, 16, 256, 416)]
    first = results(ids, inputs)
    assert all(all(map(torch.equal, first, results(ids, inputs))) for _ in range(3))
    exact = results(ids, inputs, "eager", torch.float64)
    assert max(map(relative_error, first, exact)) < 2e-3


@pytest.mark.usefixtures("form")
def test_every_form_is_right_over_many_tiles_a_program():
    """Ten a processor, ragged ones among them: what runs on from tile to tile, no wait for the host."""
    ids, inputs = distinct_ids(24000, 6, 60), case(24000, 6, 60, 256, 416)
    assert_right(ids, inputs)
    first = results(ids, inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [results(ids, inputs) for _ in range(5)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for other in again:
        assert all(map(torch.equal, first, other))


@pytest.mark.usefixtures("form")
def test_no_form_leaks_rows_of_other_experts():
    """A token that is not finite spoils its own output and the gradients of its experts' weights, no more."""
    ids, inputs = torch.arange(3, device="cuda").repeat(500)[:, None], case(1500, 1, 3, 256, 416)
    inputs[0][1::3] = torch.inf  # those of expert 1
    u, d_x, _, *d_w = results(ids, inputs)
    fine = ids[:, 0] != 1
    assert u[fine].isfinite().all() and d_x[fine].isfinite().all()
    assert all(gradient[[0, 2]].isfinite().all() for gradient in d_w)


@pytest.fixture
def wide_tiles(monkeypatch):
    from openk3.ops.moe.kernels import wide

    monkeypatch.setattr(wide, "suits", lambda rows, w1: rows > 0)


# 1b's widths, then those that fill no tile.
@pytest.mark.parametrize(("width", "F"), [(1024, 512), (640, 768), (520, 136), (72, 40)])
@pytest.mark.parametrize("kind", ["situ", "swiglu"])
@pytest.mark.usefixtures("wide_tiles")
def test_wide_tiles_are_right(width, F, kind):
    assert_right(distinct_ids(2000, 3, 7), case(2000, 3, 7, width, F), kind)


@pytest.mark.parametrize("rows", [1, 128, 129, 1000])
@pytest.mark.usefixtures("wide_tiles")
def test_wide_tiles_are_right_where_most_experts_have_no_rows(rows):
    assert_right(torch.full((rows, 1), 3, device="cuda"), case(rows, 1, 6, 512, 512))


@pytest.mark.usefixtures("wide_tiles")
def test_wide_tiles_give_equal_bits_and_leak_no_rows_of_other_experts():
    ids, inputs = distinct_ids(3000, 6, 16), case(3000, 6, 16, 1024, 512)
    first = results(ids, inputs)
    assert all(all(map(torch.equal, first, results(ids, inputs))) for _ in range(3))
    ids, inputs = torch.arange(3, device="cuda").repeat(500)[:, None], case(1500, 1, 3, 512, 512)
    inputs[0][1::3] = torch.inf  # those of expert 1
    u, d_x, _, *d_w = results(ids, inputs)
    fine = ids[:, 0] != 1
    assert u[fine].isfinite().all() and d_x[fine].isfinite().all()
    assert all(gradient[[0, 2]].isfinite().all() for gradient in d_w)


@pytest.mark.parametrize("seed", range(25))
def test_any_shape_is_right(seed):
    make = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=make))  # noqa: E731
    E = draw(1, 40)
    k = draw(1, min(E, 8) + 1)
    T, width, F = draw(0, 600), 8 * draw(1, 60), 8 * draw(1, 60)
    ids = distinct_ids(T, k, E)
    if k == 1 and seed % 2:
        ids = ids // 3  # two thirds of the experts without tokens
    assert_right(ids, case(T, k, E, width, F))


def test_equal_calls_give_equal_bits_and_never_wait():
    ids, inputs = distinct_ids(3000, 4, 24), case(3000, 4, 24, 256, 416)
    first = results(ids, inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [results(ids, inputs) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for other in again:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize(("T", "k", "E"), [(131072, 6, 256), (8192, 16, 896), (5, 3, 7), (1000, 1, 1)])
def test_the_plan_by_counting_is_the_stable_sort(T, k, E):
    ids = torch.randint(E, (T, k), device="cuda")
    made, wanted = plan(ids, E, implementation="triton"), plan(ids.cpu(), E)
    for name in ("order", "tokens", "rows", "offsets"):
        assert torch.equal(getattr(made, name).cpu(), getattr(wanted, name)), name


@pytest.mark.parametrize(("T", "k", "E"), [(4096, 6, 256), (2048, 16, 896), (5, 7, 7), (100, 1, 3)])
@pytest.mark.parametrize("tied", [False, True])
def test_the_router_chooses_as_on_a_cpu_ties_included(T, k, E, tied):
    """Logits of a coarse grid tie by the thousand; scores are compared where they were made."""
    logits = torch.randn(T, E, device="cuda")
    logits = logits.mul(4).round().div(4) if tied else logits
    bias = torch.randn(E, device="cuda").mul(2).round() / 8
    torch.cuda.set_sync_debug_mode("error")
    try:
        mine = route(logits, bias, k, implementation="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    from openk3.ops.moe.route import select_experts

    ids, cutoff = select_experts((mine.scores + bias).cpu(), k)
    assert torch.equal(mine.ids.cpu(), ids)
    assert torch.equal(mine.cutoff.cpu(), cutoff)


@pytest.mark.parametrize(("T", "E"), [(20000, 256), (3000, 896), (77, 5), (0, 4)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_histogram_counts_as_the_eager_form(T, E, masked):
    scores, bias = torch.rand(T, E, device="cuda"), torch.randn(E, device="cuda") / 8
    cutoff = torch.rand(T, device="cuda")
    mask = torch.rand(T, device="cuda") < 0.7 if masked else None
    mine, eager = (
        required_bias_histogram(scores, cutoff, bias, token_mask=mask, implementation=implementation)
        for implementation in ("triton", "eager")
    )
    assert torch.equal(mine, eager)


def test_a_graph_replays_another_routing():
    E, inputs, triton = 12, case(400, 3, 12, 128, 160), {"implementation": "triton"}
    ids, other = distinct_ids(400, 3, E), distinct_ids(400, 3, E)
    x, p, *w = inputs
    with torch.no_grad():
        run = lambda: expert_ffn(x, p, plan(ids, E, **triton), *w, Activation(), **triton)  # noqa: E731
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        ids.copy_(other)
        graph.replay()
        assert torch.equal(out, run())


def test_compiled_without_a_break():
    E, inputs = 6, case(200, 2, 6, 64, 96)

    def layer(x, logits, *w):
        routing = route(logits, torch.zeros(E, device="cuda"), 2, implementation="triton")
        routes = plan(routing.ids, E, implementation="triton")
        return expert_ffn(x, routing.weights, routes, *w, Activation(), implementation="triton")

    logits = torch.randn(200, E, device="cuda")
    compiled = torch.compile(layer, fullgraph=True)
    x, _, *w = inputs
    assert relative_error(compiled(x, logits, *w), layer(x, logits, *w)) < 1e-3
