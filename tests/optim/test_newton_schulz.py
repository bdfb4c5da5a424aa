"""Newton-Schulz: against the singular value decomposition, and against itself in other company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.optim import COEFFICIENTS, orthogonalize

DTYPES = [torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def with_singular_values(values: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """`[rows, cols]` with the given singular values and random singular vectors, float64."""
    left = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(cols, len(values), dtype=torch.float64))[0]
    return left @ values.diag() @ right.T


def spectrum(smallest: float, count: int) -> torch.Tensor:
    """Singular values of Frobenius norm 1, from `smallest` up, evenly in the logarithm."""
    small = torch.logspace(torch.tensor(smallest).log10().item(), -1.5, count - 1, dtype=torch.float64)
    return torch.cat([small, (1 - small.square().sum()).sqrt()[None]])


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(24, 60), (60, 24), (24, 24)])
def test_singular_values_end_near_one_and_singular_vectors_stay(name, shape):
    row = COEFFICIENTS[name]
    block = 37.0 * with_singular_values(spectrum(row.floor, 24), *shape)
    factor = orthogonalize([block[None]], name)[0][0]
    left, _, right = torch.linalg.svd(block, full_matrices=False)
    # In the singular vectors of the block the factor is diagonal; the polar factor would be the identity.
    error = left.T @ factor @ right.T - torch.eye(24, dtype=torch.float64)
    assert torch.linalg.matrix_norm(error, 2) <= row.bound
    assert (error - error.diagonal().diag()).abs().max() < 1e-9


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_bounds_of_the_table_are_tight_and_hold_on_the_whole_interval(name):
    """The iteration acts on each singular value alone, as a scalar polynomial: bound that on a fine grid."""
    row = COEFFICIENTS[name]
    x = torch.logspace(torch.tensor(row.floor).log10().item(), 0, 200_001, dtype=torch.float64)
    for a, b, c in row.triples:
        x = a * x + b * x**3 + c * x**5
    worst = float((x - 1).abs().max())
    assert 0.75 * row.bound < worst <= row.bound or worst < 1e-6


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_the_matrix_iteration_is_the_scalar_polynomial_of_each_singular_value(name):
    values = spectrum(1e-4, 16)
    expected = values
    for a, b, c in COEFFICIENTS[name].triples:
        expected = a * expected + b * expected**3 + c * expected**5
    factor = orthogonalize([with_singular_values(values, 16, 30)[None]], name)[0][0]
    assert torch.allclose(torch.linalg.svdvals(factor).sort()[0], expected.sort()[0], atol=1e-10)


@pytest.mark.parametrize(("products", "limit"), [(None, 1e-5), (torch.bfloat16, 0.06)])
def test_lower_precisions_stay_near_float64(products, limit):
    block = torch.randn(3, 40, 96, dtype=torch.float64)
    exact = orthogonalize([block])[0]
    rounded = orthogonalize([block.float()], dtype=products)[0]
    assert rounded.dtype == torch.float32
    assert (rounded.double() - exact).norm() / exact.norm() < limit


def test_float64_stays_float64_whatever_is_asked():
    block = torch.randn(2, 8, 8, dtype=torch.float64)
    assert torch.equal(orthogonalize([block], dtype=torch.bfloat16)[0], orthogonalize([block])[0])


@settings(max_examples=25, deadline=None)
@given(
    matrices=st.integers(2, 9),
    rows=st.integers(1, 80),
    cols=st.integers(1, 80),
    dtype=st.sampled_from(DTYPES),
    products=st.sampled_from([None, torch.bfloat16]),
)
def test_a_batch_equals_a_loop_bitwise(matrices, rows, cols, dtype, products):
    block = torch.randn(matrices, rows, cols, dtype=dtype)
    together = orthogonalize([block], dtype=products)[0]
    alone = [orthogonalize([matrix[None].clone()], dtype=products)[0] for matrix in block]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(3, 5, 1000), (4, 33, 77), (12, 64, 160), (5, 128, 192), (2, 192, 384), (7, 137, 159), (9, 16, 416)],
)
def test_a_batch_equals_a_loop_bitwise_at_the_shapes_that_tempt_a_library(shape, dtype, threads):
    """Shapes for which a plain batched product gave other bits than single ones, on one thread or two."""
    block = torch.randn(shape, dtype=dtype)
    alone = [orthogonalize([matrix[None].clone()])[0] for matrix in block]
    assert torch.equal(orthogonalize([block])[0], torch.cat(alone))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_batch_equals_a_loop_bitwise_at_random_shapes(seed, threads):
    torch.manual_seed(seed)
    for _ in range(100):
        matrices, rows, cols = (int(torch.randint(1, top, ())) for top in (33, 200, 600))
        for dtype, products in [
            (torch.float32, None),
            (torch.float64, None),
            (torch.float32, torch.bfloat16),
        ]:
            block = torch.randn(min(matrices, 1 + 40_000 // (rows * cols)), rows, cols, dtype=dtype)
            alone = [orthogonalize([matrix[None].clone()], dtype=products)[0] for matrix in block]
            assert torch.equal(orthogonalize([block], dtype=products)[0], torch.cat(alone)), (
                block.shape,
                dtype,
            )


def test_blocks_of_any_shapes_come_back_in_their_places():
    shapes = [(2, 5, 9), (1, 9, 5), (3, 5, 9), (4, 7, 7), (2, 9, 5)]
    blocks = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    factors = orthogonalize(blocks, "exact")
    for block, factor in zip(blocks, factors, strict=True):
        left, _, right = torch.linalg.svd(block, full_matrices=False)
        assert torch.allclose(factor, left @ right, atol=1e-6)


def test_views_of_a_larger_tensor_are_read_not_written():
    whole = torch.randn(6, 20, 8)
    before = whole.clone()
    factor = orthogonalize([whole[:, 3:11]])[0]
    assert torch.equal(whole, before)
    assert torch.equal(factor, orthogonalize([whole[:, 3:11].contiguous()])[0])


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e4, 1e15])
def test_the_scale_of_a_block_does_not_matter(scale):
    block = torch.randn(2, 6, 10, dtype=torch.float64)
    assert torch.allclose(orthogonalize([scale * block])[0], orthogonalize([block])[0], atol=1e-9)


def test_a_zero_block_stays_zero():
    assert torch.equal(orthogonalize([torch.zeros(2, 4, 6)])[0], torch.zeros(2, 4, 6))


def test_no_blocks_and_no_matrices_are_fine():
    assert orthogonalize([]) == []
    assert orthogonalize([torch.zeros(0, 4, 6)])[0].shape == (0, 4, 6)
