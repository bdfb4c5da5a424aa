"""Paged MLA decoding on a GPU: against the expanded attention in float64, and what it promises to the bit.

Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.ops.attention.paged import mla_append, mla_decode
from ops.closeness import relative_error
from ops.paged_cases import Case, draw, expanded, projected

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = 6e-3  # relative L2 that rounding queries, weights and mixes to bf16 explains, with room
K3: dict[str, Any] = {"H": 96, "R": 512, "S": 64, "page_size": 64}
R1: dict[str, Any] = {"H": 8, "R": 256, "S": 64, "page_size": 64}


def run(case: Case, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    mixed, lse = mla_decode(
        *case.inputs, scale=case.scale, return_lse=True, implementation="triton", **options
    )
    assert lse is not None
    return mixed, lse


def check(case: Case, limit: float = BF16, **options: Any) -> torch.Tensor:
    mixed, lse = run(case, **options)
    out, expected_lse = expanded(case)
    assert relative_error(projected(case, mixed), out) < limit
    seen = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert torch.equal(mixed[~seen], torch.zeros_like(mixed[~seen]))
    if bool(seen.any()):
        # Against the same rounded queries: their rounding alone may move a large logit by more.
        wide = (x.double() if x.is_floating_point() else x for x in case.inputs)
        _, exact = mla_decode(*wide, scale=case.scale, return_lse=True, implementation="eager")
        assert exact is not None and float((lse[seen].double() - exact[seen]).abs().max()) < 2e-3
    assert torch.equal(run(case, **options)[0], mixed)
    return mixed


@pytest.mark.parametrize("shape", [K3, R1, K3 | {"H": 32}, K3 | {"H": 128}, {"H": 1, "R": 64, "S": 32}])
@pytest.mark.parametrize("W", [1, 2, 4, 8])
@pytest.mark.parametrize("split", [None, 128])
def test_the_kernels_agree_with_float64(shape, W, split):
    case = draw([300, 0, 64, 1, 1027], W=W, dtype=torch.bfloat16, device="cuda", **shape)
    check(case, split=split)


@pytest.mark.parametrize("shape", [K3, R1])
@pytest.mark.parametrize("least", [1, 1000], ids=["Hopper", "plain"])
def test_either_kernel_agrees_with_float64(monkeypatch, shape, least):
    """Whichever is chosen by default."""
    monkeypatch.setattr("openk3.ops.attention.kernels.paged_operator.HOPPER_HEADS", least)
    check(draw([300, 0, 64, 1027], W=2, dtype=torch.bfloat16, device="cuda", **shape), split=128)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193])
def test_ends_at_and_beside_borders_of_pages_and_tiles(page_size, length):
    """Cells past the end hold no numbers."""
    check(draw([length, 40], dtype=torch.bfloat16, device="cuda", **K3 | {"page_size": page_size}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype):
    case = draw([300, 5], W=2, dtype=dtype, device="cuda", **R1)
    check(case, limit=1e-5 if dtype == torch.float32 else 2e-3)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 1500), min_size=1, max_size=5),
    W=st.integers(1, 8),
    H=st.sampled_from([1, 3, 8, 16, 32, 48, 64, 80, 96, 112, 128]),
    R=st.sampled_from([64, 128, 256, 512]),
    S=st.sampled_from([32, 64]),
    page_size=st.sampled_from([16, 32, 64, 128]),
    split=st.sampled_from([None, 64, 320, 512]),
    seed=st.integers(0, 999),
)
def test_random_shapes(lengths, W, H, R, S, page_size, split, seed):
    case = draw(
        lengths, W=W, H=H, R=R, S=S, page_size=page_size, dtype=torch.bfloat16, device="cuda", seed=seed
    )
    check(case, split=split)


@pytest.mark.parametrize("shape", [K3, R1])
def test_what_a_query_gets_depends_on_neither_neighbours_nor_window(shape):
    W, split = 4, 256
    case = draw([900, 3, 2000], W=W, dtype=torch.bfloat16, device="cuda", **shape)
    together, _ = run(case, split=split)
    for n in range(3):
        for w in range(W):
            alone, _ = mla_decode(
                case.q_latent[n : n + 1, w : w + 1], case.q_shared[n : n + 1, w : w + 1], case.cache,
                case.block_table[n : n + 1], case.lengths[n : n + 1] - W + 1 + w,
                scale=case.scale, split=split, implementation="triton",
            )  # fmt: skip
            assert torch.equal(alone[0, 0], together[n, w])


@pytest.mark.parametrize("growth", [1.0, 30.0])
def test_logits_that_grow_with_every_token(growth):
    """The largest logit moves on again and again: what was summed before is scaled each time."""
    case = draw([700], dtype=torch.bfloat16, device="cuda", **K3)
    ramp = torch.linspace(0.1, growth, 64 * case.cache.shape[0], device="cuda").view(-1, 64, 1)
    table = case.block_table[0, :11].long()
    direction = torch.randn(case.cache.shape[2], device="cuda").bfloat16()
    case.cache[table[:10]] = (ramp[:10] * direction).bfloat16()
    case.cache[table[10], :60] = (ramp[10, :60] * direction).bfloat16()
    check(case, limit=2e-2, split=None)
    check(case, limit=2e-2, split=128)


def test_one_captured_graph_follows_lengths_tables_and_appended_tokens():
    """Nothing waits for the device; a replay reads what lies in the same memory then."""
    W = 2
    options: dict[str, Any] = {"W": W, "max_pages": 12, "dtype": torch.bfloat16, "device": "cuda", **K3}
    held = list(draw([700, 700, 700], **options).inputs)
    new = torch.randn(3 * W, 576, device="cuda").bfloat16()
    slots = torch.full((3 * W,), -1, dtype=torch.int64, device="cuda")
    scale = draw([1], **options).scale

    def step() -> torch.Tensor:
        mla_append(new, held[2], slots, implementation="triton")
        return mla_decode(*held, scale=scale, implementation="triton")[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([500, 64, 0], [3, 700, 129], [0, 0, 1]):
        case = draw(lengths, seed=sum(lengths), **options)
        held[2][: len(case.cache)] = case.cache
        for i in (0, 1, 3, 4):
            held[i].copy_(case.inputs[i])
        slots.fill_(-1)
        if lengths[0] >= W:  # the graph writes the window's own tokens
            at = torch.arange(lengths[0] - W, lengths[0], device="cuda")
            slots[:W] = case.block_table[0, at // 64].long() * 64 + at % 64
            case.cache.view(-1, 576)[slots[:W]] = new[:W]
        graph.replay()
        expected, _ = expanded(case)
        assert relative_error(projected(case, out), expected) < BF16


def test_it_compiles_without_a_graph_break():
    case = draw([300, 20], dtype=torch.bfloat16, device="cuda", **R1)
    step = torch.compile(
        lambda *inputs: mla_decode(*inputs, scale=case.scale, implementation="triton")[0] * 2, fullgraph=True
    )
    assert torch.equal(step(*case.inputs), run(case)[0] * 2)
