"""The cross-entropy's kernel in Triton's interpreter: small blocks, so that a row is several of them."""

from __future__ import annotations

import pytest
import torch
from closeness import kept_by, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cross_entropy import inputs, run, whole_logits

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.cross_entropy import IGNORE_INDEX, KERNELS, linear_cross_entropy
from openk3.ops.dispatch import triton_problem

pytestmark = pytest.mark.skipif(
    triton_problem("cpu") is not None or torch.cuda.is_available(), reason="for Triton's interpreter"
)

FP32 = 2e-6
TRITON = {"implementation": "triton"}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _small_blocks():
    from openk3.ops.cross_entropy import kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "ROWS", {"BLOCK": 8, "REVERSED": True, "num_warps": 1})
        yield


@pytest.fixture
def products(monkeypatch):
    """The shapes that matrix products wrote, in order."""
    from openk3.ops.cross_entropy import kernels

    shapes = []
    multiply = kernels._multiply

    def count(a, b, out, *, add=False):
        shapes.append(tuple(out.shape))
        multiply(a, b, out, add=add)

    monkeypatch.setattr(kernels, "_multiply", count)
    return shapes


def assert_close(actual, expected, limit=FP32):
    for mine, oracle in zip(actual, expected, strict=True):
        assert mine.shape == oracle.shape
        assert (mine.double() - oracle).norm() <= limit * max(1.0, float(oracle.detach().norm()))


@settings(max_examples=15, deadline=None)
@given(
    T=st.integers(0, 9),
    V=st.sampled_from([1, 7, 8, 21, 32]),
    chunk_tokens=st.one_of(st.none(), st.integers(1, 10)),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    upstream=st.sampled_from([1.0, -0.37]),
)
def test_loss_count_and_gradients_equal_those_of_whole_logits(T, V, chunk_tokens, ignored, upstream):
    hidden, weight, targets = inputs(T, 3, V, torch.float32, ignored=ignored)
    actual, count = run(hidden, weight, targets, upstream, chunk_tokens=chunk_tokens, **TRITON)
    assert_close(actual, whole_logits(hidden, weight, targets, upstream), limit=5 * FP32)
    assert int(count) == int((targets != IGNORE_INDEX).sum())


@pytest.mark.parametrize("in_reverse", [True, False])
@pytest.mark.parametrize("block", [4, 16, 32])
def test_blocks_and_their_order_do_not_change_the_result(monkeypatch, block, in_reverse):
    from openk3.ops.cross_entropy import kernels

    monkeypatch.setattr(kernels, "ROWS", {"BLOCK": block, "REVERSED": in_reverse, "num_warps": 1})
    hidden, weight, targets = inputs(5, 4, 21, torch.float32)
    assert_close(run(hidden, weight, targets, **TRITON)[0], whole_logits(hidden, weight, targets))


@pytest.mark.parametrize("logits", [None, torch.float32])
def test_half_precision_goes_in_and_comes_out(monkeypatch, logits):
    """Logits up to 8 in bf16 are wrong by 2^-9 of that; and the interpreter truncates where it stores."""
    from openk3.ops.cross_entropy import kernels

    monkeypatch.setattr(kernels, "LOGITS", logits)
    hidden, weight, targets = inputs(12, 4, 21, torch.bfloat16)
    actual, _ = run(hidden, weight, targets, chunk_tokens=5, **TRITON)
    expected = whole_logits(hidden, weight, targets)
    assert [x.dtype for x in actual] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert relative_error(actual[0], expected[0]) < (FP32 if logits else 4e-3)
    for mine, oracle in zip(actual[1:], expected[1:], strict=True):
        assert relative_error(mine, oracle) < 2e-2


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_extreme_logits(scale):
    """One logit at the scale, at each side of a block's border; the others near zero."""
    hidden = torch.ones(4, 1)
    for at in (0, 7, 8, 20):
        weight = torch.randn(21, 1)
        weight[at] = scale
        targets = torch.tensor([at, 0, 8, IGNORE_INDEX])
        assert_close(run(hidden, weight, targets, **TRITON)[0], whole_logits(hidden, weight, targets))


def test_all_logits_extreme():
    hidden, weight, targets = inputs(6, 4, 21, torch.float32)
    actual, _ = run(1e4 * hidden, weight, targets, **TRITON)
    for mine, oracle in zip(actual, whole_logits(1e4 * hidden, weight, targets), strict=True):
        assert torch.isfinite(mine).all()
        assert relative_error(mine, oracle) < 1e-5


def test_a_target_of_vanishing_probability_has_a_finite_loss():
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [200.0]])
    (loss, d_hidden, _), _ = run(hidden, weight, torch.tensor([0]), **TRITON)
    assert float(loss.detach()) == pytest.approx(200.0)
    assert float(d_hidden) == pytest.approx(200.0)


@pytest.mark.parametrize("T", [0, 6])
def test_no_target_at_all_gives_what_eager_gives(T):
    hidden, weight, targets = inputs(T, 4, 21, torch.float32, ignored=1.0)
    expected, _ = run(hidden, weight, targets, implementation="eager")
    actual, count = run(hidden, weight, targets, **TRITON)
    assert int(count) == 0
    assert all(map(torch.equal, actual, expected))


def test_tokens_without_a_target_may_hold_anything():
    hidden, weight, targets = inputs(9, 4, 21, torch.float32)
    targets[:2] = IGNORE_INDEX
    hidden[targets == IGNORE_INDEX] = float("nan")
    (loss, d_hidden, d_weight), _ = run(hidden, weight, targets, chunk_tokens=4, **TRITON)
    kept = targets != IGNORE_INDEX
    assert_close((loss, d_hidden[kept], d_weight), whole_logits(hidden[kept], weight, targets[kept]))
    assert not d_hidden[~kept].any()


def test_the_same_twice_to_the_bit():
    hidden, weight, targets = inputs(9, 4, 21, torch.float32)
    first, second = (run(hidden, weight, targets, chunk_tokens=4, **TRITON)[0] for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_rows_and_columns_may_lie_apart():
    hidden, weight, targets = inputs(6, 4, 21, torch.float32)
    apart = torch.randn(6, 9)[:, 1::2].copy_(hidden), weight.T.contiguous().T
    expected = whole_logits(hidden, weight, targets)
    assert_close(run(*apart, torch.stack((targets, targets), 1)[:, 0], **TRITON)[0], expected)
    loss, _ = linear_cross_entropy(*apart, torch.stack((targets, targets), 1)[:, 0], **TRITON)
    assert relative_error(loss, expected[0].detach()) < FP32


def test_the_weight_gradient_of_half_precisions_accumulates_in_fp32():
    """Summed chunk by chunk in bf16, 400 steps of a half would stall at 256 of them."""
    T = 400
    hidden, weight = torch.ones(T, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    (_, _, d_weight), _ = run(hidden, weight, torch.zeros(T, dtype=torch.int64), chunk_tokens=1, **TRITON)
    assert d_weight.tolist() == [[-T / 2], [T / 2]]


def test_without_gradients_only_the_logits_are_computed_and_never_whole(products):
    hidden, weight, targets = inputs(6, 4, 21, torch.float32)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    with torch.no_grad():
        loss, _ = linear_cross_entropy(*leaves, targets, chunk_tokens=4, **TRITON)
    assert products == [(4, 21), (2, 21)]
    assert not loss.requires_grad
    assert relative_error(loss, whole_logits(hidden.detach(), weight.detach(), targets)[0]) < FP32


def test_a_frozen_head_gets_no_gradient_and_costs_no_product_for_it(products):
    hidden, weight, targets = inputs(6, 4, 21, torch.float32)
    loss, _ = linear_cross_entropy(hidden.requires_grad_(), weight, targets, **TRITON)
    loss.backward()
    assert products == [(6, 21), (6, 4)]
    assert weight.grad is None
    assert relative_error(hidden.grad, whole_logits(hidden.detach(), weight, targets)[1]) < FP32


def test_the_backward_may_run_twice_and_has_no_derivative():
    hidden, weight, targets = inputs(6, 4, 21, torch.float32)
    loss, _ = linear_cross_entropy(hidden.requires_grad_(), weight, targets, **TRITON)
    first = torch.autograd.grad(loss, hidden, torch.tensor(2.0), retain_graph=True)[0]
    second = torch.autograd.grad(loss, hidden, torch.tensor(4.0), create_graph=True)[0]
    assert torch.equal(first * 2, second)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(second.sum(), hidden)


def test_forward_keeps_the_two_gradients_and_nothing_else():
    hidden, weight, targets = inputs(6, 4, 21, torch.float32)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    kept = kept_by(lambda: linear_cross_entropy(*leaves, targets, **TRITON))
    assert sorted(t.shape for t in kept) == sorted([hidden.shape, weight.shape])


@pytest.mark.parametrize("value", [21, -1, -101, 1 << 40])
def test_a_target_out_of_range_is_refused_where_it_can_be_read_and_else_makes_nan(value):
    hidden, weight, targets = inputs(4, 3, 21, torch.float32, ignored=0.0)
    targets[2] = value
    with pytest.raises(InvalidInput, match=rf"targets\[2\] is {value}; it must be in \[0, 21\)"):
        linear_cross_entropy(hidden, weight, targets, **TRITON)
    loss, d_hidden, d_weight = torch.ops.openk3.linear_cross_entropy(
        hidden, weight, targets, None, True, True
    )
    assert loss.isnan() and d_weight.isnan().all()
    assert d_hidden.isnan().all(1).tolist() == [False, False, True, False]


def test_it_takes_what_it_declares():
    assert KERNELS[0].takes == "bf16 or fp32"
    for dtype, taken in ((torch.bfloat16, 1), (torch.float32, 1), (torch.float16, 0), (torch.float64, 0)):
        hidden, weight, targets = inputs(2, 3, 5, dtype)
        if taken:
            assert linear_cross_entropy(hidden, weight, targets, **TRITON)[0].isfinite()
        else:
            with pytest.raises(KernelUnavailable, match="no Triton kernel"):
                linear_cross_entropy(hidden, weight, targets, **TRITON)


def test_a_chunk_of_logits_fits_the_stated_budget():
    from openk3.ops.cross_entropy.kernels import LOGIT_BYTES, _default_chunk

    assert LOGIT_BYTES == 2.5 * 2**30
    assert _default_chunk(163840, 2) == 8192
    assert _default_chunk(163840, 4) == 4096
    assert _default_chunk(1 << 30, 2) == 128


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True), (False, False)])
def test_the_operator_passes_opcheck(needed):
    hidden, weight, targets = inputs(5, 3, 21, torch.float32)
    leaves = [x.requires_grad_(wanted) for x, wanted in zip((hidden, weight), needed, strict=True)]
    torch.library.opcheck(torch.ops.openk3.linear_cross_entropy.default, (*leaves, targets, 2, *needed))


def test_the_scaling_passes_opcheck():
    arguments = torch.randn(3, 2), torch.tensor(0.5), torch.empty(0, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.openk3.linear_cross_entropy_scaled.default, arguments)


def test_compiled_without_a_graph_break(monkeypatch):
    """As on a GPU, where targets are not read."""
    from openk3.ops import cross_entropy

    monkeypatch.setattr(cross_entropy, "_check_range", lambda *_: None)
    hidden, weight, targets = inputs(5, 3, 21, torch.float32)
    leaves = [x.requires_grad_() for x in (hidden, weight)]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(hidden, weight, targets):
        return linear_cross_entropy(hidden, weight, targets, chunk_tokens=2, **TRITON)

    loss, count = compiled(*leaves, targets)
    gradients = torch.autograd.grad(loss, leaves)
    assert int(count) == int((targets != IGNORE_INDEX).sum())
    expected = whole_logits(hidden.detach(), weight.detach(), targets)
    assert_close([loss, *gradients], expected)
