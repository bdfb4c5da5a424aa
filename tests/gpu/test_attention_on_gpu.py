"""Attention of MLA on a GPU: against float64 at real head sizes, and what it promises to the bit.

Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from openk3.ops.attention import gated_mla
from ops.closeness import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Relative L2 that rounding inputs of products and results explains, with room.
LIMITS = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 1e-5}
TRITON: dict[str, Any] = {"implementation": "triton", "return_max_logit": True}
NAMES = ("q", "kv", "shared", "gate")
RELEASED = 128, 64, 128
# (queries, keys) of each sequence
PACKINGS = {
    "one": [(1000, 1000)],
    "ragged": [(300, 300), (1, 1), (0, 0), (64, 64), (147, 147), (129, 129)],
    "cached prefixes": [(1, 700), (128, 300), (70, 257), (1, 1)],
    "nothing to see": [(40, 0), (0, 9), (200, 130), (3, 3)],
}


@pytest.fixture(autouse=True, params=["plain", "hopper"])
def _kernels(request, monkeypatch):
    """Every test with plain Triton alone, and with Hopper's own kernels where they fit."""
    from openk3.ops.attention.kernels import operator

    if request.param == "plain":
        monkeypatch.setattr(operator, "HOPPER", set())


def packed(pairs: list[tuple[int, int]]) -> list[torch.Tensor]:
    lengths = [[n for n, _ in pairs], [n for _, n in pairs]]
    return [torch.tensor([0, *one]).cumsum(0).int().cuda() for one in lengths]


def draw(pairs, H=3, sizes=RELEASED, dtype=torch.bfloat16, gated=True) -> dict[str, Any]:
    K, S, V = sizes
    make = torch.Generator("cuda").manual_seed(len(pairs) + H + K)
    n_q, n_k = (sum(lengths) for lengths in zip(*pairs, strict=True))
    shapes = (n_q, H, K + S), (n_k, H, K + V), (n_k, S), (n_q, H, V)
    drawn = [torch.randn(shape, device="cuda", generator=make).to(dtype) for shape in shapes]
    inputs = dict(zip(NAMES, drawn, strict=True))
    return inputs if gated else inputs | {"gate": None}


def results(inputs, pairs, **options) -> dict[str, torch.Tensor]:
    own = {n: None if x is None else x.detach().requires_grad_() for n, x in inputs.items()}
    y, largest = gated_mla(*own.values(), *(options.pop("offsets", None) or packed(pairs)), **options)
    seed = torch.Generator("cuda").manual_seed(1)
    d_y = torch.randn(y.shape, device="cuda", generator=seed).bfloat16().to(y.dtype)
    leaves = {n: x for n, x in own.items() if x is not None}
    gradients = torch.autograd.grad(y, list(leaves.values()), d_y)
    named = dict(zip((f"d_{n}" for n in leaves), gradients, strict=True))
    return {"y": y.detach(), "largest": largest} | named


def exact(inputs, pairs) -> dict[str, torch.Tensor]:
    wide = {n: None if x is None else x.double() for n, x in inputs.items()}
    return results(wide, pairs, implementation="reference", return_max_logit=True)


def assert_agree(actual, expected, limit: float) -> None:
    for name, oracle in expected.items():
        if name == "largest":
            torch.testing.assert_close(actual[name].double(), oracle, rtol=1e-5, atol=1e-5)
        else:
            assert relative_error(actual[name], oracle) < limit, name


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("gated", [True, False])
def test_released_head_sizes_against_float64(packing, gated):
    inputs = draw(PACKINGS[packing], gated=gated)
    actual = results(inputs, PACKINGS[packing], **TRITON)
    assert_agree(actual, exact(inputs, PACKINGS[packing]), LIMITS[torch.bfloat16])


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("sizes", [(64, 32, 64), (16, 16, 16), (128, 128, 128), (32, 16, 128), RELEASED])
def test_other_head_sizes_and_dtypes_against_float64(sizes, dtype):
    pairs = [(200, 200), (70, 133)]
    inputs = draw(pairs, H=2, sizes=sizes, dtype=dtype)
    assert_agree(results(inputs, pairs, **TRITON), exact(inputs, pairs), LIMITS[dtype])


def test_random_packings_against_float64():
    choose = random.Random(0)
    for _ in range(20):
        pairs = []
        for _ in range(choose.randint(1, 8)):
            n = choose.choice([0, 1, choose.randint(1, 64), choose.randint(1, 500)])
            pairs.append((n, max(0, n + choose.choice([0, 0, choose.randint(-3, 300)]))))
        pairs.append((64, 64))  # alone, sequences of one token have no gradient of q to be relative to
        inputs = draw(pairs, H=choose.randint(1, 4))
        assert_agree(results(inputs, pairs, **TRITON), exact(inputs, pairs), LIMITS[torch.bfloat16])


def test_parts_of_wider_rows_as_in_a_layer():
    pairs = [(200, 200), (57, 57)]
    inputs = draw(pairs)
    apart = {n: torch.cat([x, x], -1)[..., : x.shape[-1]] for n, x in inputs.items()}
    actual, expected = results(apart, pairs, **TRITON), results(inputs, pairs, **TRITON)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def test_the_same_twice_and_no_wait_for_the_device():
    pairs = PACKINGS["ragged"]
    inputs, offsets = draw(pairs, H=8), packed(pairs)
    results(inputs, pairs, offsets=offsets, **TRITON)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        once, again = (results(inputs, pairs, offsets=offsets, **TRITON) for _ in range(2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_a_sequence_is_the_same_alone_and_among_others():
    pairs = [(333, 333), (500, 500), (64, 64)]
    inputs = draw(pairs)
    offsets = packed(pairs)
    y, _ = gated_mla(*inputs.values(), *offsets, implementation="triton")
    alone, _ = gated_mla(*(x[333:833] for x in inputs.values()), *packed(pairs[1:2]), implementation="triton")
    assert torch.equal(alone, y[333:833])


def test_a_nan_stays_in_its_sequence_in_the_forward_and_shows_in_the_largest_logit():
    pairs = [(100, 100), (300, 300)]
    inputs = draw(pairs)
    for name in ("q", "kv", "shared"):
        inputs[name][100:] = math.nan
    y, largest = gated_mla(*inputs.values(), *packed(pairs), **TRITON)
    assert y[:100].isfinite().all() and y[100:].isnan().all()
    assert largest.isnan().all()


def test_replay_in_a_graph_and_compile_without_a_break():
    pairs = PACKINGS["ragged"]
    inputs, offsets = draw(pairs), packed(pairs)
    expected, _ = gated_mla(*inputs.values(), *offsets, **TRITON)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gated_mla(*inputs.values(), *offsets, **TRITON)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = gated_mla(*inputs.values(), *offsets, **TRITON)
    graph.replay()
    assert torch.equal(y, expected)
    compiled = torch.compile(lambda *x: gated_mla(*x, **TRITON)[0], fullgraph=True)
    assert torch.equal(compiled(*inputs.values(), *offsets), expected)
