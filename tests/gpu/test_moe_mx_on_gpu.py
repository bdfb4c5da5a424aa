"""Experts in MXFP4 on a GPU: every value to the bit, outputs against float64, repeatable, in a CUDA graph.

Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

import pytest
import torch

from openk3.ops.dispatch import Implementation
from openk3.ops.moe import Activation, MxExperts, mx_expert_ffn, plan
from openk3.ops.mx import encode_mxfp4
from ops.closeness import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# T, k, E, l, F
SHAPES = {
    "one token": (1, 16, 64, 512, 384),
    "tokens < experts": (20, 2, 64, 96, 160),
    "few rows an expert": (64, 6, 32, 256, 416),
    "many rows an expert": (3000, 2, 16, 256, 192),
    "widths across steps": (900, 4, 12, 288, 416),
    "no token": (0, 2, 4, 64, 64),
    "one expert": (333, 1, 1, 64, 64),
}


def distinct_ids(T: int, k: int, E: int) -> torch.Tensor:
    return torch.rand(T, E, device="cuda").argsort(dim=1)[:, :k].contiguous()


def some_experts(E: int, width: int, F: int) -> MxExperts:
    stored = []
    for rows, columns in ((F, width), (F, width), (width, F)):
        weight = torch.randn(E, rows, columns, device="cuda") / columns**0.5
        stored += encode_mxfp4(weight * 2.0 ** torch.randint(-3, 4, (E, rows, 1), device="cuda"))
    return MxExperts.from_checkpoint(*stored)


def outputs(
    ids: torch.Tensor, x: torch.Tensor, p: torch.Tensor, experts: MxExperts, implementation: Implementation
) -> torch.Tensor:
    routes = plan(ids, len(experts.w13), implementation="triton")
    return mx_expert_ffn(x, p, routes, experts, Activation(), implementation=implementation)


def assert_right(ids: torch.Tensor, experts: MxExperts) -> None:
    """Within twice the eager form's rounding, or 6e-3; and the same bits twice."""
    x = torch.randn(len(ids), experts.width, device="cuda").bfloat16()
    p = torch.rand(ids.shape, device="cuda")
    exact = outputs(ids, x.double(), p.double(), experts, "reference")
    eager = relative_error(outputs(ids, x, p, experts, "eager"), exact)
    mine, again = (outputs(ids, x, p, experts, "triton") for _ in range(2))
    assert torch.equal(mine, again)
    assert relative_error(mine, exact) <= max(2 * eager, 6e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_output_is_as_close_to_float64_as_the_eager_form(shape):
    T, k, E, width, F = SHAPES[shape]
    assert_right(distinct_ids(T, k, E), some_experts(E, width, F))


@pytest.mark.parametrize("rows", [15, 16, 17, 32, 33, 127, 128, 129, 160, 161, 192, 193, 700])
def test_one_expert_with_all_tokens(rows):
    assert_right(torch.full((rows, 1), 3, device="cuda"), some_experts(6, 128, 192))


@pytest.mark.parametrize("seed", range(25))
def test_any_shape_is_right(seed):
    make = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=make))  # noqa: E731
    E = draw(1, 40)
    k = draw(1, min(E, 8) + 1)
    T, width, F = draw(0, 600), 32 * draw(1, 15), 32 * draw(1, 15)
    ids = distinct_ids(T, k, E)
    if k == 1 and seed % 2:
        ids = ids // 3  # two thirds of the experts without tokens
    assert_right(ids, some_experts(E, width, F))


@pytest.mark.parametrize("many", [False, True])
def test_every_code_under_every_scale_is_exact(many):
    """Rows of the identity bring the down projection out: all 256 bytes, scales 0 to 128."""
    from openk3.ops.moe.kernels import few, mx_many
    from openk3.ops.mx import decode_mxfp4

    width, F = 512, 512
    packed = torch.arange(256, device="cuda").to(torch.uint8).expand(1, width, 256).contiguous()
    scale = (torch.arange(width * 16, device="cuda").view(1, width, 16) % 129).to(torch.uint8)
    gate = torch.zeros(1, F, width // 2, dtype=torch.uint8, device="cuda")
    empty = torch.zeros(1, F, width // 32, dtype=torch.uint8, device="cuda")
    experts = MxExperts.from_checkpoint(gate, empty, gate, empty, packed, scale)
    rows, offsets = torch.eye(F, device="cuda").bfloat16(), torch.tensor([0, F], device="cuda").int()
    if many:
        size = mx_many.TILES
        tiles = few.list_tiles(offsets, F, size.height)
        out = mx_many.many_product(rows, experts.w2, experts.s2, width, tiles, size)
    else:
        few_size = few.MX[32]
        tiles = few.list_tiles(offsets, F, few_size.rows)
        out = few.few_product(rows, None, experts.w2, experts.w2, experts.s2, width, F, tiles, few_size)
    exact = decode_mxfp4(packed, scale)[0].T
    normal = exact.abs() >= 2.0**-126  # the matrix unit may flush what is smaller
    assert torch.equal(out[normal], exact[normal])
    assert (out[~normal] - exact[~normal]).abs().max() < 2.0**-126


@pytest.mark.parametrize("T", [5, 2000])
def test_a_graph_replays_another_routing_and_nothing_waits(T):
    E, experts = 12, some_experts(12, 128, 160)
    x, p = torch.randn(T, 128, device="cuda").bfloat16(), torch.rand(T, 3, device="cuda")
    ids, other = distinct_ids(T, 3, E), distinct_ids(T, 3, E)
    with torch.no_grad():
        outputs(ids, x, p, experts, "triton")
        torch.cuda.set_sync_debug_mode("error")
        try:
            outputs(ids, x, p, experts, "triton")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = outputs(ids, x, p, experts, "triton")
        ids.copy_(other)
        graph.replay()
        assert torch.equal(out, outputs(ids, x, p, experts, "triton"))


def test_compiled_without_a_break():
    experts, ids = some_experts(6, 64, 96), distinct_ids(40, 2, 6)
    x, p = torch.randn(40, 64, device="cuda").bfloat16(), torch.rand(40, 2, device="cuda")
    routes = plan(ids, 6, implementation="triton")
    run = lambda x: mx_expert_ffn(x, p, routes, experts, Activation(), implementation="triton") * 2  # noqa: E731
    assert relative_error(torch.compile(run, fullgraph=True)(x), run(x)) < 1e-3


@pytest.mark.parametrize(
    ("T", "k", "E", "width", "F"), [(1, 6, 256, 256, 416), (256, 6, 64, 256, 416), (9, 2, 5, 72, 40)]
)
def test_plain_weights_through_the_kernel_for_few_rows(T, k, E, width, F):
    from openk3.ops.moe.kernels.operator import forward_few

    routes = plan(distinct_ids(T, k, E), E, implementation="triton")
    x = torch.randn(T, width, device="cuda").bfloat16()
    w1, w3, w2 = (
        (torch.randn(E, *s, device="cuda") / s[1] ** 0.5).bfloat16()
        for s in ((F, width), (F, width), (width, F))
    )
    out = forward_few(x, routes.tokens, routes.offsets, w1, w3, w2, "situ", 4.0, 25.0)
    rows, offsets = x[routes.tokens].double(), routes.offsets.tolist()
    exact = torch.cat(
        [
            Activation()(r @ w1[e].double().T, r @ w3[e].double().T) @ w2[e].double().T
            for e in range(E)
            for r in [rows[offsets[e] : offsets[e + 1]]]
        ]
    )
    assert relative_error(out, exact) < 6e-3
