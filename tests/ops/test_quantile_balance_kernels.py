"""The histogram's kernel in Triton's interpreter: every count as in the eager form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_quantile_balance import router

from openk3.ops.dispatch import triton_problem
from openk3.ops.quantile_balance import required_bias_histogram

pytestmark = pytest.mark.skipif(
    triton_problem("cpu") is not None or torch.cuda.is_available(), reason="for Triton's interpreter"
)


def both(scores, cutoff, bias, **options):
    return [
        required_bias_histogram(scores, cutoff, bias, implementation=implementation, **options)
        for implementation in ("triton", "eager")
    ]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 40), st.integers(2, 20), st.sampled_from([1, 7, 100]), st.booleans())
def test_counts_are_those_of_the_eager_form(T, E, bins, masked):
    scores, cutoff, bias = router(T, E, 1, dtype=torch.float32)
    mask = torch.rand(T, generator=torch.Generator().manual_seed(T)) < 0.5 if masked else None
    mine, eager = both(scores, cutoff, bias, token_mask=mask, bins=bins)
    assert mine.dtype == torch.int64 and torch.equal(mine, eager)


def test_what_is_not_finite_is_counted_as_in_the_eager_form():
    scores, cutoff, bias = router(6, 5, 2, dtype=torch.float32)
    cutoff[0], cutoff[1], cutoff[2] = torch.nan, torch.inf, -torch.inf
    scores[3, 2] = torch.nan
    assert torch.equal(*both(scores, cutoff, bias, bins=10))


def test_scores_that_lie_apart_change_nothing():
    scores, cutoff, bias = router(20, 6, 2, dtype=torch.float32)
    wide = torch.stack([scores, scores], dim=2)[:, :, 0]
    assert torch.equal(both(wide, cutoff, bias)[0], both(scores, cutoff, bias)[1])


def test_the_operator_passes_opcheck():
    from openk3.ops.quantile_balance import kernels  # noqa: F401

    scores, cutoff, bias = (x.detach() for x in router(6, 4, 2, dtype=torch.float32))
    for mask in (None, torch.tensor([True, False] * 3)):
        torch.library.opcheck(
            torch.ops.openk3.required_bias_histogram.default, (scores, cutoff, bias, mask, 10)
        )
