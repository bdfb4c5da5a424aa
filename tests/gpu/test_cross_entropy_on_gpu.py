"""The linear cross-entropy on a GPU: against float64, and what it promises of memory, waiting and bits.

Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from openk3.ops.cross_entropy import IGNORE_INDEX, linear_cross_entropy
from ops.closeness import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [(1, 8, 5), (300, 64, 1000), (513, 72, 50257), (256, 512, 163840)]


def draw(T: int, d: int, V: int, dtype: torch.dtype = torch.bfloat16, ignored: float = 0.2):
    """hidden and weight whose logits are of size 4, and targets."""
    make = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (
        (2 * torch.randn(n, d, device="cuda", generator=make) / d**0.25).to(dtype) for n in (T, V)
    )
    targets = torch.randint(V, (T,), device="cuda", generator=make)
    dropped = torch.rand(T, device="cuda", generator=make) < ignored
    return hidden, weight, targets.masked_fill(dropped, IGNORE_INDEX)


def run(hidden, weight, targets, **options):
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    loss, _ = linear_cross_entropy(*leaves, targets, implementation="triton", **options)
    return [loss.detach(), *torch.autograd.grad(0.37 * loss, leaves)]


def exact(hidden, weight, targets):
    leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    loss = F.cross_entropy(leaves[0] @ leaves[1].T, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return [loss.detach(), *torch.autograd.grad(0.37 * loss, leaves)]


# Logits of 4, some of 16, are wrong by 2^-9 of themselves in bf16; where they are fp32, softmax is rounded
# once and so is the result.
@pytest.mark.parametrize(
    ("dtype", "logits", "loss_limit", "limit"),
    [
        (torch.bfloat16, None, 2e-3, 4e-2),
        (torch.bfloat16, torch.float32, 1e-5, 5e-3),
        (torch.float32, None, 1e-5, 1e-5),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradients_equal_those_of_whole_logits(monkeypatch, shape, dtype, logits, loss_limit, limit):
    from openk3.ops.cross_entropy import kernels

    monkeypatch.setattr(kernels, "LOGITS", logits)
    inputs = draw(*shape, dtype, ignored=0.0 if shape[0] == 1 else 0.2)
    expected = exact(*inputs)
    for chunk_tokens in (None, 100):
        actual = run(*inputs, chunk_tokens=chunk_tokens)
        assert relative_error(actual[0], expected[0]) < loss_limit
        for mine, oracle in zip(actual[1:], expected[1:], strict=True):
            assert mine.dtype == dtype
            assert relative_error(mine, oracle) < limit


def test_the_same_twice_to_the_bit_and_without_waiting():
    inputs = draw(513, 64, 5000)
    run(*inputs, chunk_tokens=128)
    torch.cuda.set_sync_debug_mode("error")
    try:
        first, second = (run(*inputs, chunk_tokens=128) for _ in range(2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("T", [0, 6])
def test_no_target_at_all_gives_zeros(T):
    hidden, weight, targets = draw(T, 64, 1000, ignored=1.1)
    hidden.fill_(float("nan"))
    assert not any(x.any() for x in run(hidden, weight, targets))


def test_a_target_out_of_range_makes_nan():
    hidden, weight, targets = draw(20, 64, 1000)
    for value in (1000, -1, 1 << 40):
        targets[7] = value
        loss, d_hidden, d_weight = run(hidden, weight, targets)
        assert loss.isnan() and d_weight.isnan().all()
        assert d_hidden.isnan().all(1).nonzero().tolist() == [[7]]


def test_captured_in_a_graph():
    hidden, weight, targets = draw(300, 64, 5000)
    other = hidden.roll(1, 0)
    expected = run(other, weight, targets, chunk_tokens=128)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(hidden, weight, targets, chunk_tokens=128)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(hidden, weight, targets, chunk_tokens=128)
    hidden.copy_(other)
    graph.replay()
    for mine, oracle in zip(captured, expected, strict=True):  # another cuBLAS workspace may split otherwise
        assert relative_error(mine, oracle) < 5e-3


def test_logits_never_exist_whole():
    T, d, V = 16384, 64, 163840
    inputs = draw(T, d, V)
    run(*inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(*inputs)
    used = torch.cuda.max_memory_allocated() - before
    gradients = (T + V) * d * 6  # fp32, and the result
    assert used < 2.5 * 2**30 + gradients + 2**26 < T * V * 2


def test_compiled_without_a_graph_break():
    hidden, weight, targets = draw(200, 64, 1000)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    call = torch.compile(lambda *x: linear_cross_entropy(*x, implementation="triton")[0], fullgraph=True)
    loss = call(*leaves, targets)
    compiled = [loss.detach(), *torch.autograd.grad(0.37 * loss, leaves)]
    assert all(map(torch.equal, compiled, run(hidden, weight, targets)))
