"""SwiGLU and GLU: eager formulas and kernels against the equations in float64, element by element too."""

from __future__ import annotations

import pytest
import torch
from closeness import kept_by, relative_error, worst_element

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.dispatch import triton_problem
from openk3.ops.gated_unit import CPU_PIECE
from openk3.ops.glu import glu, swiglu
from openk3.ops.glu.eager import glu_forward, glu_partials, swiglu_forward, swiglu_partials

LIMITS = [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)]
NO_TRITON = triton_problem("cpu")
needs_triton = pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
fast = pytest.mark.parametrize("implementation", ["eager", pytest.param("triton", marks=needs_triton)])
every_unit = pytest.mark.parametrize("unit", [swiglu, glu])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def run(unit, gate, up, d_out, implementation):
    leaves = [x.clone().requires_grad_() for x in (gate, up)]
    out = unit(*leaves, implementation=implementation)
    return [out, *torch.autograd.grad(out, leaves, d_out)]


@every_unit
@fast
@pytest.mark.parametrize(("dtype", "limit"), LIMITS)
@pytest.mark.parametrize("shape", [(1,), (7, 33), (3, CPU_PIECE // 2)], ids=["one", "small", "pieces"])
def test_output_and_gradients_equal_the_equation(unit, implementation, dtype, limit, shape):
    if implementation == "triton" and dtype == torch.bfloat16:
        limit = 1e-2  # the interpreter truncates
    gate, up, d_out = ((4 * torch.randn(shape)).to(dtype) for _ in range(3))
    expected = run(unit, gate.double(), up.double(), d_out.double(), "reference")
    for mine, oracle in zip(run(unit, gate, up, d_out, implementation), expected, strict=True):
        assert mine.dtype == dtype
        assert relative_error(mine, oracle) < limit


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # Triton interpreted by NumPy
@every_unit
@fast
def test_every_element_is_accurate_from_tiny_to_saturated(unit, implementation):
    """Against the derivatives written out in float64: autograd has 1 - sig(g), which loses its digits."""
    magnitudes = torch.logspace(-6, 1.6, 2000, dtype=torch.float64)
    gate = torch.cat([-magnitudes.flip(0), magnitudes]).float()
    up = gate.flip(0)
    out, d_gate, d_up = run(unit, gate, up, torch.ones_like(gate), implementation)
    g, u = gate.double(), up.double()
    sig, rest = torch.sigmoid(g), torch.sigmoid(-g)
    act, slope = (g * sig, sig * (1 + g * rest)) if unit is swiglu else (sig, sig * rest)
    for mine, oracle in ((out, act * u), (d_gate, slope * u), (d_up, act)):
        assert worst_element(mine, oracle) < 3e-6


@every_unit
def test_gradcheck(unit):
    leaves = [torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda g, u: unit(g, u, implementation="eager"), leaves)


@pytest.mark.parametrize(
    ("unit", "forward", "partials"),
    [(swiglu, swiglu_forward, swiglu_partials), (glu, glu_forward, glu_partials)],
    ids=["swiglu", "glu"],
)
def test_forward_and_partials_without_autograd_agree_with_autograd(unit, forward, partials):
    gate, up = (torch.randn(5, 9, dtype=torch.float64) for _ in range(2))
    expected = run(unit, gate, up, torch.ones_like(gate), "reference")
    for mine, oracle in zip((forward(gate, up), *partials(gate, up)), (expected[0], *expected), strict=True):
        torch.testing.assert_close(mine, oracle.detach(), rtol=1e-12, atol=1e-14)


@every_unit
def test_strided_inputs_and_an_expanded_gradient_are_fine(unit):
    fused, d_out = torch.randn(6, 20, dtype=torch.float64), torch.randn(10, dtype=torch.float64).expand(6, 10)
    gate, up = fused.chunk(2, dim=-1)
    expected = run(unit, gate.contiguous(), up.contiguous(), d_out, "reference")
    for mine, oracle in zip(run(unit, gate, up, d_out, "eager"), expected, strict=True):
        torch.testing.assert_close(mine, oracle, rtol=1e-12, atol=1e-14)


@every_unit
def test_backward_keeps_the_inputs_and_nothing_else(unit):
    gate, up = (torch.randn(64, requires_grad=True) for _ in range(2))
    kept = kept_by(lambda: unit(gate, up, implementation="eager"))
    assert {t.data_ptr() for t in kept} == {gate.data_ptr(), up.data_ptr()}


@every_unit
def test_no_elements_is_fine(unit):
    out, *grads = run(unit, torch.empty(0, 8), torch.empty(0, 8), torch.empty(0, 8), "eager")
    assert [x.shape for x in (out, *grads)] == [(0, 8)] * 3


@every_unit
def test_wrong_requests_are_named(unit):
    with pytest.raises(InvalidInput, match=r"gate is \(2, 3\).*up is \(2, 4\)"):
        unit(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(KernelUnavailable, match="no Triton kernel"):  # for float64
        unit(*torch.zeros(2, 2, dtype=torch.float64), implementation="triton")
