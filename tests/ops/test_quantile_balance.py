"""Quantile Balancing: what the histogram estimates, how far it may be off, and that counting is exact.

The oracle is a sort of all margins in float64; the promises are of report §2.3.3 and Appendices C and D.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.moe import route
from openk3.ops.quantile_balance import (
    alternating_solver,
    average_bias,
    bias_from_histogram,
    bin_edges,
    exact_bias,
    required_bias_histogram,
    sign_update,
)

FIGURE_5 = (8, 4, 1)  # m tokens, n experts, top k of the report's figure 5
SIZES = [FIGURE_5, (100, 10, 3), (37, 8, 3), (5, 64, 6), (4096, 32, 4), (2000, 96, 8), (50, 3, 2), (1, 4, 3)]


def router(m: int, n: int, k: int, seed: int = 0, dtype: torch.dtype = torch.float64):
    """Scores with experts of unequal popularity, a bias that is not zero, and the cut-offs both imply."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(m, n, generator=generator, dtype=torch.float64)
    logits += torch.randn(n, generator=generator, dtype=torch.float64)
    bias = 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)
    routing = route(logits.to(dtype), (bias - bias.mean()).to(dtype), k)
    return routing.scores, routing.cutoff, (bias - bias.mean()).to(dtype)


def uncentred(bias_like: torch.Tensor, histogram: torch.Tensor, old: torch.Tensor, k: int) -> torch.Tensor:
    """The estimate before centring, from the mean that a plain reading of Appendix D's formula gives."""
    n, bins = histogram.shape
    low, high = float(old.double().min()) - 1, float(old.double().max()) + 1
    raw = []
    for row in histogram.tolist():
        q, before, b = sum(row) * k / n, 0, 0
        while before + row[b] < math.ceil(q):
            before, b = before + row[b], b + 1
        raw.append(low + (b + min(max((q - before) / row[b], 0), 1)) * (high - low) / bins)
    expected = torch.tensor(raw, dtype=torch.float64)
    torch.testing.assert_close(bias_like.double(), expected - expected.mean(), rtol=0, atol=1e-6)
    return expected


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@pytest.mark.parametrize("bins", [1000, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_histogram_bias_is_within_one_bin_of_the_exact_order_statistic(m, n, k, bins, dtype):
    scores, cutoff, old = router(m, n, k, dtype=dtype)
    histogram = required_bias_histogram(scores, cutoff, old, bins=bins)
    estimate = uncentred(bias_from_histogram(histogram, old, k), histogram, old, k)

    required = (cutoff[:, None].double() - scores.double()).sort(dim=0).values
    exact = required[math.ceil(m * k / n) - 1]
    width = (old.max() - old.min() + 2).double() / bins
    rounding = 4 * torch.finfo(dtype).eps
    assert ((estimate - exact).abs() <= width + rounding).all()


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@pytest.mark.parametrize("bins", [1000, 40, 1])
def test_at_the_old_cutoffs_each_load_misses_its_target_by_at_most_the_selected_bin(m, n, k, bins):
    scores, cutoff, old = router(m, n, k, seed=1)
    histogram = required_bias_histogram(scores, cutoff, old, bins=bins)
    estimate = uncentred(bias_from_histogram(histogram, old, k), histogram, old, k)

    load = (scores + estimate > cutoff[:, None]).sum(0)
    selected = (histogram.cumsum(1) < math.ceil(m * k / n)).sum(1, keepdim=True)
    assert ((load - m * k / n).abs() <= histogram.gather(1, selected)[:, 0]).all()


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_exact_bias_puts_floor_q_margins_above_the_old_cutoffs(m, n, k):
    scores, cutoff, _ = router(m, n, k, seed=2)
    cutoff = cutoff - 1e-3 * torch.rand(m, dtype=torch.float64)  # at its own cut-offs a router ties
    bias = exact_bias(scores, cutoff, k)
    ranked = (scores - cutoff[:, None]).sort(dim=0, descending=True).values
    raw = -ranked[m * k // n]  # the (q+1)-th largest, counted from zero
    torch.testing.assert_close(bias, raw - raw.mean())
    load = (scores - cutoff[:, None] > -raw).sum(0)
    assert (load == m * k // n).all()


@pytest.mark.parametrize("between", [0.0, 0.5])
@pytest.mark.parametrize(("m", "n", "k"), [(8, 4, 1), (512, 16, 2), (2048, 64, 6), (777, 24, 4), (300, 7, 3)])
def test_algorithm_1_balances_a_fixed_batch_or_says_that_it_did_not(m, n, k, between):
    scores, _, _ = router(m, n, k, seed=3)
    result = alternating_solver(scores, k, iterations=60, between=between)
    order = (scores + result.bias).argsort(dim=1, descending=True, stable=True)[:, :k]
    loads = torch.bincount(order.flatten(), minlength=n)
    assert torch.equal(loads, result.loads)
    assert result.converged == bool(((loads - m * k / n).abs() <= 1).all())
    assert result.converged or between == 0.0
    assert result.bias.mean().abs() < 1e-12


def test_algorithm_1_reaches_the_best_balanced_assignment():
    """Eq. 20 for a tiny batch, by trying every assignment with the right loads."""
    scores, _, _ = router(8, 4, 1, seed=9)
    best = max(
        sum(float(scores[i, j]) for i, j in enumerate(experts))
        for experts in itertools.product(range(4), repeat=8)
        if all(experts.count(j) == 2 for j in range(4))
    )
    result = alternating_solver(scores, 1, iterations=100)
    # Within 1 of the target the loads may still be (3, 2, 2, 1): weak duality bounds the value from above.
    alpha = (scores + result.bias).max(1).values
    dual = float(alpha.sum()) - 2 * float(result.bias.sum())
    assert result.converged
    assert dual >= best - 1e-12
    if result.loads.tolist() == [2, 2, 2, 2]:
        assert abs(dual - best) < 1e-12


def test_the_lower_end_of_the_cutoff_ties_at_the_old_bias_and_stalls_there():
    scores, _, _ = router(2048, 64, 6, seed=3)
    lower = alternating_solver(scores, 6, iterations=60, between=0.0)
    middle = alternating_solver(scores, 6, iterations=60, between=0.5)
    assert (lower.converged, middle.converged) == (False, True)
    biased = scores + lower.bias
    cutoff = biased.topk(7, dim=1).values[:, 6:]
    tied = ((cutoff - biased).abs() < 1e-12).sum(0)
    short = 2048 * 6 / 64 - lower.loads
    assert short.max() > 1
    assert (short < tied).all()  # whoever lacks less than ties at its old bias keeps that bias


def test_algorithm_1_reports_that_too_few_iterations_did_not_converge():
    scores, _, _ = router(512, 16, 2, seed=3)
    result = alternating_solver(scores, 2, iterations=0)
    assert not result.converged
    assert result.iterations == 0
    assert (result.bias == 0).all()


def test_algorithm_1_on_tied_scores_does_not_claim_balance():
    """All tokens alike: they all go to the same experts whatever the bias is."""
    result = alternating_solver(torch.rand(1, 8, dtype=torch.float64).expand(64, 8), 2, iterations=50)
    assert not result.converged
    assert torch.isfinite(result.bias).all()
    assert sorted(result.loads.tolist()) == [0] * 6 + [64] * 2


@pytest.mark.parametrize("levels", [1, 2, 5])
def test_ties_stay_finite_centred_and_deterministic(levels):
    generator = torch.Generator().manual_seed(4)
    scores = torch.randint(levels, (400, 12), generator=generator) / 8 + 0.25
    bias = torch.zeros(12)
    for _ in range(5):
        cutoff = route(scores.logit(), bias, 3).cutoff
        update = [
            bias_from_histogram(required_bias_histogram(scores, cutoff, bias), bias, 3) for _ in range(2)
        ]
        assert torch.equal(*update)
        assert torch.equal(exact_bias(scores, cutoff, 3), exact_bias(scores, cutoff, 3))
        for new in (update[0], exact_bias(scores, cutoff, 3)):
            assert torch.isfinite(new).all()
            assert new.mean().abs() < 1e-6
        bias = update[0]
    if levels == 1:
        assert (bias == 0).all()


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.sampled_from([(3, 1), (17, 4), (64, 6)]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_histograms_over_any_split_of_the_tokens_add_up_to_the_pooled_one(sizes, experts, dtype, seed):
    n, k = experts
    scores, cutoff, old = router(sum(sizes), n, k, seed, dtype)
    mask = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(seed)) < 0.7
    shards = zip(*(x.split(sizes) for x in (scores, cutoff, mask)), strict=True)
    parts = [required_bias_histogram(s.clone(), c.clone(), old, token_mask=t) for s, c, t in shards]
    pooled = required_bias_histogram(scores, cutoff, old, token_mask=mask)
    assert torch.equal(sum(parts), pooled)
    assert torch.equal(bias_from_histogram(sum(parts), old, k), bias_from_histogram(pooled, old, k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_several_routers_together_get_what_each_gets_alone(dtype):
    made = [router(n, 32, 4, seed=n, dtype=dtype) for n in (40, 300, 7)]
    histograms = [required_bias_histogram(*one) for one in made] + [torch.zeros(32, 1000, dtype=torch.int64)]
    biases = [bias for _, _, bias in made] + [torch.randn(32, dtype=dtype)]
    alone = torch.stack([bias_from_histogram(h, b, 4) for h, b in zip(histograms, biases, strict=True)])
    together = bias_from_histogram(torch.stack(histograms), torch.stack(biases), 4)
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-7)
    assert torch.equal(together[-1], biases[-1])


def test_slicing_for_the_cache_changes_no_count(monkeypatch):
    scores, cutoff, old = router(300, 32, 4, dtype=torch.float32)
    whole = required_bias_histogram(scores, cutoff, old)
    monkeypatch.setattr("openk3.ops.quantile_balance.eager.CPU_SLICE", 7 * 32)
    assert torch.equal(required_bias_histogram(scores, cutoff, old), whole)


@pytest.mark.parametrize("bins", [1, 2, 999, 1000])
def test_histogram_equals_the_definition_by_edges(bins):
    scores, cutoff, old = router(500, 20, 3)
    mask = torch.arange(500) % 3 != 0
    fast = required_bias_histogram(scores, cutoff, old, token_mask=mask, bins=bins)
    slow = required_bias_histogram(
        scores, cutoff, old, token_mask=mask, bins=bins, implementation="reference"
    )
    assert torch.equal(fast, slow)


def test_float32_moves_a_value_by_at_most_one_bin_and_only_near_a_border():
    scores, cutoff, old = router(20_000, 8, 2, dtype=torch.float32)
    fast = required_bias_histogram(scores, cutoff, old)
    exact = required_bias_histogram(scores.double(), cutoff.double(), old.double())
    # The running counts differ only by the values that crossed the border between two bins.
    assert (fast.cumsum(1) - exact.cumsum(1)).abs().max() <= 2
    assert (fast - exact).abs().sum() < 1e-3 * fast.sum()


def test_each_counted_token_is_in_each_row_once_and_a_masked_one_in_none():
    scores, cutoff, old = router(200, 16, 4)
    mask = torch.arange(200) < 130
    histogram = required_bias_histogram(scores, cutoff, old, token_mask=mask)
    assert histogram.dtype == torch.int64
    assert (histogram.sum(1) == 130).all()
    assert torch.equal(histogram, required_bias_histogram(scores[:130], cutoff[:130], old))
    scores[130:], cutoff[130:] = torch.nan, torch.nan
    assert torch.equal(histogram, required_bias_histogram(scores, cutoff, old, token_mask=mask))


def test_values_on_and_beyond_the_ends_of_the_range_fall_into_the_outer_bins():
    old = torch.tensor([-0.25, 0.25])
    scores = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5], [0.5, 0.5]])
    cutoff = torch.tensor([1.25, -0.25, 1e30, -torch.inf])
    histogram = required_bias_histogram(scores, cutoff, old, bins=10)
    assert histogram[0, [0, 9]].tolist() == [2, 2]  # -1.25 and -inf; 1.25 and 1e30
    assert (histogram.sum(1) == 4).all()


@pytest.mark.parametrize("implementation", ["reference", "eager"])
def test_a_value_on_a_border_belongs_to_the_bin_above(implementation):
    scores = torch.tensor([[0.5, 0.75]])
    histogram = required_bias_histogram(
        scores, torch.tensor([0.5]), torch.zeros(2), bins=8, implementation=implementation
    )
    assert histogram.argmax(1).tolist() == [4, 3]  # required 0 and -0.25 of [-1, 1] in eighths


def test_a_diverged_token_does_not_break_the_count():
    scores = torch.full((3, 4), torch.nan)
    histogram = required_bias_histogram(scores, scores[:, 0], torch.zeros(4))
    assert histogram[:, 0].tolist() == [3] * 4


def test_nothing_counted_keeps_the_old_bias_bit_for_bit():
    old = torch.tensor([0.3, -0.1, 0.7, 0.05])  # not centred, so that centring would show
    empty = required_bias_histogram(torch.empty(0, 4), torch.empty(0), old)
    assert empty.shape == (4, 1000)
    assert torch.equal(bias_from_histogram(empty, old, 2), old)
    masked = required_bias_histogram(
        torch.rand(5, 4), torch.rand(5), old, token_mask=torch.zeros(5, dtype=torch.bool)
    )
    assert torch.equal(bias_from_histogram(masked, old, 2), old)


def test_an_expert_whose_own_row_is_empty_keeps_its_place_among_the_others():
    old = torch.tensor([0.0, 0.2, -0.2])
    histogram = torch.zeros(3, 10, dtype=torch.int64)
    histogram[0, 4], histogram[1, 5] = 8, 8
    new = bias_from_histogram(histogram, old, 1)
    assert torch.isfinite(new).all()
    raw = torch.tensor([-1.2 + (4 + 1 / 3) * 0.24, -1.2 + (5 + 1 / 3) * 0.24, -0.2])
    torch.testing.assert_close(new, raw - raw.mean())


def test_counts_beyond_32_bits_are_exact():
    histogram = torch.zeros(2, 4, dtype=torch.int64)
    histogram[:, 1], histogram[:, 2] = 2**40, 2**40
    new = bias_from_histogram(histogram, torch.zeros(2, dtype=torch.float64), 1)
    assert (new == 0).all()
    histogram[0, 1] += 2  # q is 2**40 + 1 for expert 0: still inside bin 1; for expert 1 just at its end
    low = bias_from_histogram(histogram, torch.zeros(2, dtype=torch.float64), 1)
    assert low[0] < low[1]


def test_one_update_balances_a_skewed_router_that_the_sign_rule_has_barely_moved():
    scores, _, _ = router(8192, 64, 4, seed=5)
    bias = torch.zeros(64, dtype=torch.float64)

    def maxvio(bias: torch.Tensor) -> float:
        ids = (scores + bias).topk(4, dim=1).indices
        return float(torch.bincount(ids.flatten(), minlength=64).max()) / (8192 * 4 / 64) - 1

    cutoff = scores.topk(5, dim=1).values[:, 4]
    quantile = bias_from_histogram(required_bias_histogram(scores, cutoff, bias), bias, 4)
    ids = scores.topk(4, dim=1).indices
    sign = sign_update(bias, torch.bincount(ids.flatten(), minlength=64), 1e-3)
    assert maxvio(bias) > 2
    assert maxvio(sign) > 0.9 * maxvio(bias)
    assert maxvio(quantile) < 0.5


def test_sign_update_moves_each_bias_one_step_toward_the_mean_load():
    new = sign_update(torch.zeros(4), torch.tensor([5, 4, 4, 3]), 0.1)
    torch.testing.assert_close(new, torch.tensor([-0.1, 0.0, 0.0, 0.1]))
    odd = sign_update(torch.zeros(3), torch.tensor([2**60, 2**60, 2**60 - 1]), 0.1)
    torch.testing.assert_close(odd, torch.tensor([-0.1, -0.1, 0.1]))


def test_moving_average_starts_with_the_first_bias_and_stays_centred():
    biases = torch.randn(50, 16, dtype=torch.float64)
    biases -= biases.mean(1, keepdim=True)
    average = torch.zeros(16, dtype=torch.float64)
    for step, bias in enumerate(biases):
        previous, average = average, average_bias(average, bias, step, 0.9)
        if step == 0:
            assert torch.equal(average, bias)
        if step == 2:
            torch.testing.assert_close(average, (biases[0] + 2 * biases[1] + 3 * biases[2]) / 6)
        if step >= 18:
            torch.testing.assert_close(average, 0.9 * previous + 0.1 * bias)
    assert average.mean().abs() < 1e-14
    assert torch.equal(average_bias(average, biases[0], 7, 0.0), biases[0])


def test_bin_edges_span_the_range_that_the_bias_implies():
    old = torch.tensor([-0.5, 0.1, 0.4], dtype=torch.float64)
    edges = bin_edges(old, 29)
    torch.testing.assert_close(edges, torch.linspace(-1.5, 1.4, 30, dtype=torch.float64))


def test_bad_input_is_named():
    scores, cutoff, bias = torch.rand(4, 3), torch.rand(4), torch.zeros(3)
    with pytest.raises(InvalidInput, match=r"cutoff is \(3,\)"):
        required_bias_histogram(scores, cutoff[:3], bias)
    with pytest.raises(InvalidInput, match=r"token_mask is \(4,\) torch.float32"):
        required_bias_histogram(scores, cutoff, bias, token_mask=torch.ones(4))
    with pytest.raises(InvalidInput, match="bins is 0"):
        required_bias_histogram(scores, cutoff, bias, bins=0)
    with pytest.raises(InvalidInput, match="want 1 <= k < E"):
        bias_from_histogram(torch.zeros(3, 10, dtype=torch.int64), bias, 3)
    with pytest.raises(InvalidInput, match="0 tokens"):
        exact_bias(torch.empty(0, 3), torch.empty(0), 1)
    with pytest.raises(InvalidInput, match="decay is 1"):
        average_bias(bias, bias, 0, 1.0)
    with pytest.raises(KernelUnavailable, match="no Triton kernel"):
        required_bias_histogram(scores.double(), cutoff, bias, implementation="triton")
