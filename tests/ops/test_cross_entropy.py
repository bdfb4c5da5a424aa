"""Chunked cross-entropy of a linear head: against whole logits in float64, and that those never exist."""

from __future__ import annotations

import pytest
import torch
from closeness import kept_by, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.cross_entropy import IGNORE_INDEX, eager, linear_cross_entropy

IMPLEMENTATIONS = ["reference", "eager"]
# The loss is fp32 from exact bf16 inputs; gradients are rounded back to bf16 once.
LIMITS = [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 4e-3)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def inputs(T, d, V, dtype=torch.float64, ignored=0.3):
    hidden, weight = (2 * torch.randn(n, d, dtype=torch.float64) / d**0.25 for n in (T, V))
    hidden, weight = hidden.to(dtype), weight.to(dtype)  # logits of size 4
    targets = torch.randint(V, (T,)).masked_fill(torch.rand(T) < ignored, IGNORE_INDEX)
    return hidden, weight, targets


def run(hidden, weight, targets, upstream=1.0, **options):
    """loss, count, and the gradients of upstream * loss to hidden and weight."""
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    loss, count = linear_cross_entropy(*leaves, targets, **options)
    return [loss, *torch.autograd.grad(loss * upstream, leaves)], count


def whole_logits(hidden, weight, targets, upstream=1.0):
    leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    loss = F.cross_entropy(leaves[0] @ leaves[1].T, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return [loss, *torch.autograd.grad(loss * upstream, leaves)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "limit"), LIMITS)
@pytest.mark.parametrize(("T", "d", "V"), [(1, 3, 5), (50, 16, 100), (300, 32, 1000)])
def test_loss_count_and_gradients_equal_those_of_whole_logits(implementation, dtype, limit, T, d, V):
    hidden, weight, targets = inputs(T, d, V, dtype, ignored=0.0 if T == 1 else 0.3)
    expected = whole_logits(hidden, weight, targets, upstream=0.37)
    actual, count = run(hidden, weight, targets, upstream=0.37, implementation=implementation)
    assert actual[0].dtype == torch.promote_types(dtype, torch.float32)
    assert [x.dtype for x in actual[1:]] == [dtype, dtype]
    assert (count.dtype, int(count)) == (torch.int64, int((targets != IGNORE_INDEX).sum()))
    # a confident token's loss is the difference of two logits: its error is absolute, in nats per token
    assert abs(actual[0].double() - expected[0]) < min(limit, 2e-6) * max(T, float(expected[0].detach()))
    for mine, oracle in zip(actual[1:], expected[1:], strict=True):
        assert relative_error(mine, oracle) < limit


@settings(deadline=None, max_examples=20)
@given(T=st.integers(0, 12), chunk_tokens=st.integers(1, 15), ignored=st.sampled_from([0.0, 0.5, 1.0]))
def test_chunks_do_not_change_the_result(T, chunk_tokens, ignored):
    hidden, weight, targets = inputs(T, 4, 7, ignored=ignored)
    expected = whole_logits(hidden, weight, targets)
    actual, _ = run(hidden, weight, targets, chunk_tokens=chunk_tokens)
    for mine, oracle in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, oracle, rtol=1e-10, atol=1e-12)


def test_gradcheck():
    hidden, weight, targets = inputs(5, 3, 4)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets, chunk_tokens=2, implementation="eager")[0], leaves
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("T", [0, 6])
def test_no_target_at_all_gives_zero_loss_and_zero_gradients(implementation, T):
    hidden, weight, targets = inputs(T, 4, 7, torch.float32, ignored=1.0)
    (loss, *grads), count = run(hidden, weight, targets, implementation=implementation)
    assert (float(loss.detach()), int(count)) == (0.0, 0)
    assert [g.shape for g in grads] == [hidden.shape, weight.shape]
    assert not any(g.any() for g in grads)


def test_tokens_without_a_target_may_hold_anything():
    hidden, weight, targets = inputs(20, 4, 7)
    hidden[targets == IGNORE_INDEX] = float("nan")
    (loss, d_hidden, d_weight), _ = run(hidden, weight, targets, chunk_tokens=3)
    kept = targets != IGNORE_INDEX
    expected = whole_logits(hidden[kept], weight, targets[kept])
    for mine, oracle in zip((loss, d_hidden[kept], d_weight), expected, strict=True):
        torch.testing.assert_close(mine, oracle, rtol=1e-10, atol=1e-12)
    assert not d_hidden[~kept].any()


def test_a_target_of_vanishing_probability_has_a_finite_loss():
    """exp(-200) is zero in fp32; the loss is 200 all the same, and its gradient the whole row difference."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [200.0]])
    (loss, d_hidden, _), _ = run(hidden, weight, torch.tensor([0]))
    assert float(loss.detach()) == pytest.approx(200.0)
    assert float(d_hidden) == pytest.approx(200.0)


def test_logits_of_thousands_do_not_overflow():
    hidden, weight, targets = inputs(30, 8, 50, torch.float32)
    actual, _ = run(1e3 * hidden, weight, targets)
    for mine, oracle in zip(actual, whole_logits(1e3 * hidden, weight, targets), strict=True):
        assert relative_error(mine, oracle) < 1e-5


def test_the_weight_gradient_of_half_precisions_accumulates_in_fp32():
    """Summed chunk by chunk in bf16, 2,000 equal steps would stall at 256 of them."""
    T = 2000
    hidden, weight = torch.ones(T, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    (_, _, d_weight), _ = run(hidden, weight, torch.zeros(T, dtype=torch.int64), chunk_tokens=1)
    assert d_weight.tolist() == [[-T / 2], [T / 2]]


class _Sizes(TorchDispatchMode):
    """The largest tensor that any operation returns, and the matrix products it takes."""

    def __init__(self):
        super().__init__()
        self.numel, self.products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return result


def test_logits_over_k3s_vocabulary_never_exist_whole():
    T, d, V = 160, 8, 163840
    hidden, weight, targets = inputs(T, d, V, torch.float32, ignored=0.0)
    with _Sizes() as seen:
        run(hidden, weight, targets)
    assert V * d < seen.numel <= eager.MIN_TOKENS * V < T * V
    with _Sizes() as seen:
        run(hidden, weight, targets, chunk_tokens=4)
    assert seen.numel == V * d  # chunks of 4 are smaller than the weight


def test_a_chunk_of_logits_fits_the_stated_budget():
    hidden, weight, targets = inputs(3000, 4, 2048, torch.float32, ignored=0.0)
    with _Sizes() as seen:
        run(hidden, weight, targets)
    assert seen.numel == eager.CPU_CHUNK < hidden.shape[0] * 2048


def test_without_gradients_only_the_logits_are_computed():
    hidden, weight, targets = inputs(10, 4, 7, torch.float32)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    expected = whole_logits(hidden.detach(), weight.detach(), targets)[0]
    with torch.no_grad(), _Sizes() as seen:
        loss, _ = linear_cross_entropy(*leaves, targets)
    assert seen.products == 1
    assert not loss.requires_grad
    assert relative_error(loss, expected) < 1e-6


def test_a_frozen_head_gets_no_gradient_and_costs_no_product_for_it():
    hidden, weight, targets = inputs(10, 4, 7, torch.float32)
    with _Sizes() as seen:
        loss, _ = linear_cross_entropy(hidden.requires_grad_(), weight, targets)
        loss.backward()
    assert seen.products == 2
    assert weight.grad is None


def test_the_backward_may_run_twice():
    hidden, weight, targets = inputs(10, 4, 7)
    loss, _ = linear_cross_entropy(hidden.requires_grad_(), weight, targets)
    first = torch.autograd.grad(loss, hidden, torch.tensor(2.0, dtype=torch.float64), retain_graph=True)[0]
    second = torch.autograd.grad(loss, hidden, torch.tensor(3.0, dtype=torch.float64))[0]
    torch.testing.assert_close(first * 1.5, second)


def test_forward_keeps_the_two_gradients_and_nothing_else():
    hidden, weight, targets = inputs(30, 4, 50)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    kept = kept_by(lambda: linear_cross_entropy(*leaves, targets))
    assert sorted(t.shape for t in kept) == sorted([hidden.shape, weight.shape])


def test_wrong_inputs_are_named():
    hidden, weight, targets = inputs(6, 4, 7, ignored=0.0)
    for position, value in ((4, 7), (2, -1), (5, -101)):
        wrong = targets.clone()
        wrong[position] = value
        with pytest.raises(InvalidInput, match=rf"targets\[{position}\] is {value}; it must be in \[0, 7\)"):
            linear_cross_entropy(hidden, weight, wrong)
    with pytest.raises(InvalidInput, match=r"hidden is \(6, 4\), weight is \(7, 3\)"):
        linear_cross_entropy(hidden, weight[:, 1:], targets)
    with pytest.raises(InvalidInput, match=r"targets is \(5,\).*must be \(6,\) int64"):
        linear_cross_entropy(hidden, weight, targets[1:])
    with pytest.raises(InvalidInput, match="int32"):
        linear_cross_entropy(hidden, weight, targets.int())
    with pytest.raises(InvalidInput, match=r"hidden is torch\.float32, weight is torch\.float64"):
        linear_cross_entropy(hidden.float(), weight, targets)
    with pytest.raises(InvalidInput, match="chunk_tokens must be positive, got 0"):
        linear_cross_entropy(hidden, weight, targets, chunk_tokens=0)
    with pytest.raises(KernelUnavailable, match="no Triton kernel"):
        linear_cross_entropy(hidden, weight, targets, implementation="triton")
