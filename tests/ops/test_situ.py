"""SiTU-GLU: each implementation against the equation in float64, and the properties the report proves."""

from __future__ import annotations

import pytest
import torch
from closeness import kept_by, relative_error, worst_element

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.dispatch import triton_problem
from openk3.ops.gated_unit import CPU_PIECE
from openk3.ops.situ import situ_glu
from openk3.ops.situ.eager import situ_forward, situ_partials

NO_TRITON = triton_problem("cpu")
FAST = [
    "eager",
    pytest.param("triton", marks=pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))),
]
# bf16 rounds to 8 bits; Triton's CPU interpreter truncates fp32 to bf16 instead of rounding, hence 1e-2.
LIMITS = [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize(("dtype", "limit"), LIMITS)
@pytest.mark.parametrize("shape", [(1,), (7, 33), (3, CPU_PIECE // 2)], ids=["one", "small", "pieces"])
def test_output_and_gradients_equal_the_equation(implementation, dtype, limit, shape):
    gate, up, d_out = (10 * torch.randn(shape, dtype=torch.float64) for _ in range(3))
    gate, up, d_out = (x.to(dtype) for x in (gate, up, d_out))
    exact = [x.double().requires_grad_() for x in (gate, up)]
    fast = [x.clone().requires_grad_() for x in (gate, up)]

    expected = situ_glu(*exact, implementation="reference")
    actual = situ_glu(*fast, implementation=implementation)
    expected.backward(d_out.double())
    actual.backward(d_out)

    assert actual.dtype == dtype
    assert relative_error(actual, expected) < limit
    for mine, oracle in zip(fast, exact, strict=True):
        assert relative_error(mine.grad, oracle.grad) < limit


@pytest.mark.parametrize("implementation", FAST)
def test_every_element_is_accurate_from_tiny_to_saturated(implementation):
    """A norm hides small elements; this looks at each one, over seven decades and both signs."""
    magnitudes = torch.logspace(-6, 1.6, 2000, dtype=torch.float64)
    points = torch.cat([-magnitudes.flip(0), magnitudes]).float()
    exact = [points.double().requires_grad_(), points.double().flip(0).requires_grad_()]
    fast = [points.clone().requires_grad_(), points.flip(0).clone().requires_grad_()]
    expected = situ_glu(*exact, implementation="reference")
    actual = situ_glu(*fast, implementation=implementation)
    expected.sum().backward()
    actual.sum().backward()
    for mine, oracle in [(actual, expected), *((m.grad, o.grad) for m, o in zip(fast, exact, strict=True))]:
        assert worst_element(mine, oracle) < 5e-6


def test_gradcheck_of_the_cpu_path():
    inputs = [torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda g, u: situ_glu(g, u, implementation="eager"), inputs)


def test_forward_and_partials_without_autograd_agree_with_autograd():
    gate, up = (3 * torch.randn(5, 9, dtype=torch.float64) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (gate, up)]
    out = situ_glu(*leaves, implementation="reference")
    expected = [out.detach(), *torch.autograd.grad(out.sum(), leaves)]
    actual = situ_partials(gate, up, 4.0, 25.0)
    torch.testing.assert_close(situ_forward(gate, up, 4.0, 25.0), expected[0], rtol=1e-12, atol=1e-14)
    for mine, oracle in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, oracle, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # Triton interpreted by NumPy
@pytest.mark.parametrize("implementation", ["reference", *FAST])
def test_output_is_bounded_by_the_product_of_the_caps(implementation):
    huge = torch.tensor([-1e30, -1e4, 0.0, 1e4, 1e30])
    gate, up = torch.meshgrid(huge, huge, indexing="ij")
    out = situ_glu(gate.contiguous(), up.contiguous(), implementation=implementation)
    assert torch.isfinite(out).all()
    assert out.abs().max() <= 4.0 * 25.0


def test_small_inputs_follow_swiglu_to_third_order():
    gate, up = (1e-2 * torch.randn(1000, dtype=torch.float64) for _ in range(2))
    swiglu = torch.nn.functional.silu(gate) * up
    assert (situ_glu(gate, up, implementation="reference") - swiglu).abs().max() < 1e-7


def test_backward_keeps_the_inputs_and_nothing_else():
    gate, up = (torch.randn(64, requires_grad=True) for _ in range(2))
    kept = kept_by(lambda: situ_glu(gate, up, implementation="eager"))
    assert {t.data_ptr() for t in kept} == {gate.data_ptr(), up.data_ptr()}


@pytest.mark.parametrize("implementation", FAST)
def test_no_elements_is_fine(implementation):
    assert situ_glu(torch.empty(0, 8), torch.empty(0, 8), implementation=implementation).shape == (0, 8)


def test_mismatched_inputs_are_named():
    with pytest.raises(InvalidInput, match=r"gate is \(2, 3\).*up is \(2, 4\)"):
        situ_glu(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(InvalidInput, match="caps must be positive"):
        situ_glu(torch.zeros(2), torch.zeros(2), gate_cap=0.0)


def test_a_kernel_that_cannot_run_is_an_error_not_a_fallback(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KernelUnavailable, match=r"TRITON_INTERPRET|triton package is not installed"):
        situ_glu(torch.zeros(2), torch.zeros(2), implementation="triton")
