"""Causal packed attention: the tiled eager path against a float64 loop over single queries."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from closeness import kept_by, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.attention import attention, eager

IMPLEMENTATIONS = ["reference", "eager"]
# bf16 inputs are exact, o stays fp32, and only the gradients are rounded back, once each.
LIMITS = [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 3e-3)]
# (queries, keys) of each sequence
PACKINGS = {
    "equal windows": [(64, 64)] * 3,
    "ragged": [(5, 5), (70, 70), (1, 1), (133, 133)],
    "equal and ragged": [(40, 40), (7, 7), (40, 40), (0, 0), (90, 90), (40, 40)],
    "cached prefixes": [(1, 30), (4, 4), (65, 100), (1, 30), (3, 200)],
    "nothing to see": [(3, 0), (0, 4), (5, 2), (2, 2)],
    "one token": [(1, 1)],
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def offsets(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def tensors(pairs, heads=2, dk=12, dv=8, dtype=torch.float64):
    """q, k, v, d_o, cu_seqlens_q, cu_seqlens_k; logits spread wide enough for a peaked softmax."""
    n_q, n_k = (sum(lengths) for lengths in zip(*pairs, strict=True)) if pairs else (0, 0)
    q, k, v, d_o = (
        torch.randn(shape, dtype=torch.float64)
        for shape in ((n_q, heads, dk), (n_k, heads, dk), (n_k, heads, dv), (n_q, heads, dv))
    )
    cu_q, cu_k = offsets([p[0] for p in pairs]), offsets([p[1] for p in pairs])
    return (2 * q).to(dtype), k.to(dtype), v.to(dtype), d_o, cu_q, cu_k


def one_query_at_a_time(q, k, v, cu_q, cu_k, scale):
    """The definition: softmax over the keys that each query sees; also the largest logit of each head."""
    q, k, v = q.double(), k.double(), v.double()
    rows, largest = [], torch.full((q.shape[1],), -math.inf, dtype=torch.float64)
    for i in range(len(cu_q) - 1):
        start, n_q, n_k = int(cu_k[i]), int(cu_q[i + 1] - cu_q[i]), int(cu_k[i + 1] - cu_k[i])
        for j in range(n_q):
            seen = max(0, j + 1 + n_k - n_q)
            logits = scale * (q[int(cu_q[i]) + j] * k[start : start + seen]).sum(-1)  # [seen, H]
            rows.append((logits.softmax(0)[..., None] * v[start : start + seen]).sum(0))
            if seen:
                largest = torch.maximum(largest, logits.detach().amax(0))
    return torch.stack(rows) if rows else v.new_zeros(0, *v.shape[1:]), largest


def run(function, q, k, v, d_o):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o, largest = function(*leaves)
    return [o, *torch.autograd.grad(o, leaves, d_o.to(o.dtype))], largest


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "limit"), LIMITS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_output_gradients_and_largest_logit_equal_the_definition(implementation, dtype, limit, packing):
    q, k, v, d_o, cu_q, cu_k = tensors(PACKINGS[packing], dtype=dtype)
    scale = 12**-0.5
    exact = [x.double() for x in (q, k, v)]
    expected, largest = run(lambda q, k, v: one_query_at_a_time(q, k, v, cu_q, cu_k, scale), *exact, d_o)
    actual, max_logit = run(
        lambda q, k, v: attention(q, k, v, cu_q, cu_k, return_max_logit=True, implementation=implementation),
        q, k, v, d_o,
    )  # fmt: skip
    assert actual[0].dtype == torch.promote_types(dtype, torch.float32)
    for mine, oracle in zip(actual, expected, strict=True):
        assert relative_error(mine, oracle) < limit
    torch.testing.assert_close(max_logit.double(), largest, rtol=2e-6, atol=0)
    assert not max_logit.requires_grad


@pytest.mark.parametrize("packing", ["ragged", "cached prefixes"])
def test_released_head_sizes(packing):
    q, k, v, d_o, cu_q, cu_k = tensors(PACKINGS[packing], heads=2, dk=192, dv=128, dtype=torch.float32)
    exact = [x.double() for x in (q, k, v)]
    expected, _ = run(lambda *x: attention(*x, cu_q, cu_k, implementation="reference"), *exact, d_o)
    actual, max_logit = run(lambda *x: attention(*x, cu_q, cu_k), q, k, v, d_o)
    assert max_logit is None
    for mine, oracle in zip(actual, expected, strict=True):
        assert relative_error(mine, oracle) < 2e-6


@pytest.mark.parametrize("packing", ["equal and ragged", "cached prefixes", "nothing to see"])
def test_gradcheck(packing):
    pairs = [(min(n_q, 6), min(n_k, 9)) for n_q, n_k in PACKINGS[packing]]
    q, k, v, _, cu_q, cu_k = tensors(pairs, heads=2, dk=3, dv=2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *x: attention(*x, cu_q, cu_k, implementation="eager")[0], leaves)


@settings(deadline=None, max_examples=20)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=6),
    tile=st.sampled_from([(1, 1), (2, 16), (4, 30), (64, 1 << 18)]),
)
def test_packed_equals_one_by_one_for_random_splits_and_tiles(pairs, tile):
    """Each (n, c): a sequence of n queries over n + c keys."""
    pairs = [(n, n + cached) for n, cached in pairs]
    q, k, v, d_o, cu_q, cu_k = tensors(pairs, heads=2, dk=4, dv=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "CPU_TILE", tile)
        patch.setattr(eager, "MIN_QUERIES", 1)
        packed, largest = run(lambda *x: attention(*x, cu_q, cu_k, return_max_logit=True), q, k, v, d_o)
    singles, maxima = [[torch.zeros_like(x[:0])] for x in packed], [torch.full((2,), -math.inf).double()]
    for i, (n_q, n_k) in enumerate(pairs):
        of_q, of_k = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        whole = partial(
            attention, cu_seqlens_q=offsets([n_q]), cu_seqlens_k=offsets([n_k]), return_max_logit=True
        )
        single, one_max = run(whole, q[of_q], k[of_k], v[of_k], d_o[of_q])
        for parts, part in zip(singles, single, strict=True):
            parts.append(part)
        maxima.append(one_max)
    for mine, parts in zip(packed, singles, strict=True):
        torch.testing.assert_close(mine, torch.cat(parts), rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(largest, torch.stack(maxima).amax(0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "pairs", [[], [(0, 0)], [(0, 0), (0, 0)]], ids=["no sequence", "one empty", "two empty"]
)
def test_no_token_at_all_gives_no_output_and_no_largest_logit(implementation, pairs):
    q, k, v, _, cu_q, cu_k = tensors(pairs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, largest = attention(*leaves, cu_q, cu_k, return_max_logit=True, implementation=implementation)
    assert o.shape == (0, 2, 8)
    assert (largest == -math.inf).all()
    if pairs:
        grads = torch.autograd.grad(o.sum(), leaves)
        assert [g.shape for g in grads] == [(0, 2, 12), (0, 2, 12), (0, 2, 8)]


def test_huge_logits_stay_finite_and_pick_the_largest():
    """exp overflows fp32 at 89; the softmax must not."""
    q, k, v, d_o, cu_q, cu_k = tensors([(50, 50)], dtype=torch.float32)
    actual, largest = run(lambda *x: attention(*x, cu_q, cu_k, return_max_logit=True), 1e4 * q, k, v, d_o)
    assert all(x.isfinite().all() for x in actual)
    assert largest.min() > 1e3


def test_strided_inputs_and_an_expanded_gradient_are_fine():
    q, k, v, d_o, cu_q, cu_k = tensors(PACKINGS["equal and ragged"])
    fused = torch.cat([k, v], dim=-1)
    strided = [q.transpose(0, 1).contiguous().transpose(0, 1), *fused.split([12, 8], dim=-1)]
    d_o = d_o[0, 0].expand_as(d_o)
    expected, _ = run(lambda *x: attention(*x, cu_q, cu_k), q, k, v, d_o.clone())
    leaves = [x.detach().requires_grad_() for x in strided]
    o, _ = attention(*leaves, cu_q, cu_k)
    for mine, oracle in zip([o, *torch.autograd.grad(o, leaves, d_o)], expected, strict=True):
        torch.testing.assert_close(mine, oracle, rtol=1e-12, atol=1e-13)


def test_backward_keeps_queries_keys_values_and_output_and_no_square():
    q, k, v, _, cu_q, cu_k = tensors([(300, 300)], heads=1, dk=4, dv=4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = []
    kept = kept_by(lambda: out.append(attention(*leaves, cu_q, cu_k, return_max_logit=True)[0]))
    assert {t.data_ptr() for t in kept} == {x.data_ptr() for x in (*leaves, out[0])}
    assert max(t.numel() for t in kept) < 300 * 300


class _Largest(TorchDispatchMode):
    """The largest tensor that any operation returns, and how many numbers matrix products returned."""

    def __init__(self):
        super().__init__()
        self.numel, self.products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
                self.products += x.numel() if func is torch.ops.aten.bmm.default else 0
        return result


def test_scores_never_exist_whole_and_masked_blocks_are_never_computed():
    n, heads, d = 1024, 2, 4
    q, k, v, d_o, cu_q, cu_k = tensors([(n, n)], heads=heads, dk=d, dv=d, dtype=torch.float32)
    with _Largest() as seen:
        run(lambda *x: attention(*x, cu_q, cu_k), q, k, v, d_o)
    assert seen.numel <= eager.CPU_TILE[1] < heads * n * n
    triangle = heads * n * (n + 1) / 2
    # scores in the forward, scores and their gradient in the backward: three triangles, not three squares
    assert seen.products < 3.5 * triangle


def test_the_largest_logit_costs_no_second_product():
    q, k, v, _, cu_q, cu_k = tensors([(200, 200)], dtype=torch.float32)
    counts = []
    for wanted in (False, True):
        with _Largest() as seen:
            attention(q, k, v, cu_q, cu_k, return_max_logit=wanted)
        counts.append(seen.products)
    assert counts[0] == counts[1] > 0


def test_wrong_inputs_are_named():
    q, k, v, _, cu_q, cu_k = tensors([(3, 5), (2, 2)])
    with pytest.raises(InvalidInput, match=r"cu_seqlens_k must go from 0 to the 7 tokens, got 0 to 5"):
        attention(q, k, v, cu_q, cu_q)
    with pytest.raises(InvalidInput, match=r"cu_seqlens_q must never fall, but sequence 1 runs from 6 to 5"):
        attention(q, k, v, torch.tensor([0, 6, 5]), cu_k)
    with pytest.raises(InvalidInput, match="cu_seqlens_q holds 1 sequences, cu_seqlens_k 2"):
        attention(q, k, v, torch.tensor([0, 5]), cu_k)
    with pytest.raises(InvalidInput, match="must share one floating dtype"):
        attention(q, k.float(), v, cu_q, cu_k)
    with pytest.raises(InvalidInput, match=r"q \(5, 2, 12\), k \(7, 2, 11\)"):
        attention(q, k[..., 1:], v, cu_q, cu_k)
    with pytest.raises(InvalidInput, match=r"must be \[T, H, D\]"):
        attention(q[0], k, v, cu_q, cu_k)
    with pytest.raises(InvalidInput, match=r"int32 \[N \+ 1\]"):
        attention(q, k, v, cu_q.double(), cu_k)
    with pytest.raises(KernelUnavailable, match="no Triton kernel"):
        attention(q, k, v, cu_q, cu_k, implementation="triton")
