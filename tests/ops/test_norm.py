"""RMSNorm, gated RMSNorm and L2 norm: eager passes and kernels against the equations in float64."""

from __future__ import annotations

import pytest
import torch
from closeness import kept_by, relative_error, worst_element

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.dispatch import triton_problem
from openk3.ops.norm import gated_rms_norm, l2_norm, rms_norm

LIMITS = [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)]

# name: (operator on (x, gate_logits, weight), which of the three it takes)
OPERATORS = {
    "rms_norm": (lambda x, gate, weight, **kw: rms_norm(x, weight, 1e-5, **kw), "xw"),
    "rms_norm without gain": (lambda x, gate, weight, **kw: rms_norm(x, None, 1e-5, **kw), "x"),
    "gated_rms_norm": (lambda x, gate, weight, **kw: gated_rms_norm(x, gate, weight, 1e-5, **kw), "xgw"),
    "l2_norm": (lambda x, gate, weight, **kw: l2_norm(x, **kw), "x"),
}
NO_TRITON = triton_problem("cpu")
needs_triton = pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
fast = pytest.mark.parametrize("implementation", ["eager", pytest.param("triton", marks=needs_triton)])
every_operator = pytest.mark.parametrize("name", OPERATORS)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def inputs(shape, dtype=torch.float64) -> dict[str, torch.Tensor]:
    x, gate = (2 * torch.randn(shape, dtype=torch.float64) for _ in range(2))
    weight = 1 + 0.3 * torch.randn(shape[-1], dtype=torch.float64)
    return {"x": x.to(dtype), "g": gate.to(dtype), "w": weight.to(dtype)}


def run(name, tensors, d_y, **options):
    """Output and the gradients of the inputs that the operator takes."""
    operator, takes = OPERATORS[name]
    leaves = {key: value.detach().clone().requires_grad_() for key, value in tensors.items()}
    y = operator(*leaves.values(), **options)
    return [y, *torch.autograd.grad(y, [leaves[key] for key in takes], d_y)]


@every_operator
@fast
@pytest.mark.parametrize(("dtype", "limit"), LIMITS)
@pytest.mark.parametrize("shape", [(1, 5), (7, 33), (3, 5, 128), (4,), (2, 3, 2, 6)])
def test_output_and_gradients_equal_the_equation(name, implementation, dtype, limit, shape):
    if implementation == "triton" and dtype != torch.float32:
        limit *= 2.5  # the interpreter truncates to half precisions
    tensors, d_y = inputs(shape, dtype), torch.randn(shape, dtype=torch.float64).to(dtype)
    exact = {key: value.double() for key, value in tensors.items()}
    expected = run(name, exact, d_y.double(), implementation="reference")
    actual = run(name, tensors, d_y, implementation=implementation)
    for mine, oracle in zip(actual, expected, strict=True):
        assert mine.dtype == dtype
        assert relative_error(mine, oracle) < limit


@every_operator
@fast
def test_rows_are_accurate_over_twelve_decades_of_length(name, implementation):
    tensors, d_y = inputs((200, 64)), torch.randn(200, 64)
    tensors["x"] *= torch.logspace(-6, 6, 200, dtype=torch.float64)[:, None]
    tensors = {key: value.float() for key, value in tensors.items()}
    exact = {key: value.double() for key, value in tensors.items()}
    expected = run(name, exact, d_y.double(), implementation="reference")
    actual = run(name, tensors, d_y, implementation=implementation)
    for mine, oracle in zip(actual, expected, strict=True):
        error = (mine.double() - oracle).norm(dim=-1) / oracle.norm(dim=-1)
        assert error.max() < 2e-6


@fast
def test_the_gate_gradient_keeps_its_digits_where_the_gate_saturates(implementation):
    """Against normed * sig(g) sig(-g); autograd on the equation has 1 - sig(g), which float64 loses too."""
    points = torch.cat([-torch.logspace(1.6, -3, 500), torch.logspace(-3, 1.6, 500)])
    tensors = {"x": torch.ones(1, 1000), "g": points[None], "w": torch.ones(1000)}
    _, _, mine, _ = run("gated_rms_norm", tensors, torch.ones(1, 1000), implementation=implementation)
    g = points.double()[None]
    assert worst_element(mine, torch.sigmoid(g) * torch.sigmoid(-g) / (1 + 1e-5) ** 0.5) < 2e-6


@every_operator
def test_gradcheck(name):
    operator, takes = OPERATORS[name]
    tensors = inputs((4, 3))
    leaves = [value.requires_grad_(key in takes) for key, value in tensors.items()]
    assert torch.autograd.gradcheck(lambda *args: operator(*args, implementation="eager"), leaves)


@every_operator
def test_any_layout_gives_the_result_of_the_contiguous_one(name):
    tensors, d_y = inputs((6, 5, 8)), torch.randn(8, dtype=torch.float64)
    strided = dict(tensors)
    for key in "xg":
        strided[key] = tensors[key].transpose(0, 1).contiguous().transpose(0, 1)
    for mine, oracle in zip(
        run(name, strided, d_y.expand(6, 5, 8)), run(name, tensors, d_y.expand(6, 5, 8).clone()), strict=True
    ):
        torch.testing.assert_close(mine, oracle, rtol=1e-12, atol=1e-14)


def test_an_fp32_gain_on_bf16_rows_keeps_each_dtype():
    tensors = inputs((9, 16), torch.bfloat16)
    tensors["w"] = tensors["w"].float()
    y, d_x, d_gate, d_weight = run("gated_rms_norm", tensors, torch.ones(9, 16, dtype=torch.bfloat16))
    assert (y.dtype, d_x.dtype, d_gate.dtype, d_weight.dtype) == (*[torch.bfloat16] * 3, torch.float32)


def test_l2_rows_have_length_one_and_a_zero_row_stays_zero():
    x = torch.randn(5, 64)
    x[2] = 0
    lengths = l2_norm(x).norm(dim=-1)
    assert torch.allclose(lengths, torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]), atol=1e-6)


@every_operator
def test_backward_keeps_the_inputs_and_one_scalar_a_row(name):
    operator, takes = OPERATORS[name]
    tensors = {key: value.float().requires_grad_() for key, value in inputs((50, 32)).items()}
    kept = kept_by(lambda: operator(*tensors.values(), implementation="eager"))
    given = {tensors[key].data_ptr() for key in takes}
    assert {t.data_ptr() for t in kept} >= given
    assert [t.numel() for t in kept if t.data_ptr() not in given] == [50]


@every_operator
@fast
def test_no_rows_is_fine(name, implementation):
    y, *grads = run(name, inputs((0, 8), torch.float32), torch.zeros(0, 8), implementation=implementation)
    assert y.shape == (0, 8)
    assert all(not grad.any() for grad in grads)


def test_wrong_inputs_are_named():
    x = torch.zeros(2, 4)
    with pytest.raises(InvalidInput, match=r"weight is \(3,\).*must be \(4,\)"):
        rms_norm(x, torch.ones(3), 1e-5)
    with pytest.raises(InvalidInput, match=r"gate_logits is \(2, 3\), must be \(2, 4\)"):
        gated_rms_norm(x, torch.zeros(2, 3), torch.ones(4), 1e-5)
    with pytest.raises(InvalidInput, match="eps must be positive, got 0"):
        l2_norm(x, 0.0)
    with pytest.raises(InvalidInput, match="int64"):
        l2_norm(torch.zeros(2, 4, dtype=torch.int64))


@every_operator
@pytest.mark.parametrize(("shape", "dtype"), [((1, 8193), torch.float32), ((2, 4), torch.float64)])
def test_asking_for_a_kernel_that_does_not_exist_is_an_error(name, shape, dtype):
    with pytest.raises(KernelUnavailable, match="no Triton kernel"):
        OPERATORS[name][0](*inputs(shape, dtype).values(), implementation="triton")
