"""KDA's decay maps: the eager path against the equations in float64, from tiny to saturated logits."""

from __future__ import annotations

import pytest
import torch
from closeness import kept_by, relative_error, worst_element

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.kda_gate import kda_gate

BOUNDS = [-5.0, -0.5, None]
every_bound = pytest.mark.parametrize("lower_bound", BOUNDS)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def inputs(T=50, H=3, K=8, dtype=torch.float64) -> dict[str, torch.Tensor]:
    made = {"z": 4 * torch.randn(T, H, K), "A_log": torch.randn(H), "dt_bias": torch.randn(H, K)}
    return {name: x.to(dtype) for name, x in made.items()}


def run(tensors, d_g, **options):
    """g and the gradients to the inputs that were given."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    g = kda_gate(leaves["z"], leaves["A_log"], leaves.get("dt_bias"), **options)
    return {"g": g, **dict(zip(leaves, torch.autograd.grad(g, list(leaves.values()), d_g), strict=True))}


@every_bound
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_gate_and_gradients_equal_the_equation(lower_bound, with_bias, dtype, limit):
    tensors = inputs(dtype=dtype)
    if not with_bias:
        del tensors["dt_bias"]
    exact = {name: x.double() for name, x in tensors.items()}
    d_g = torch.randn(50, 3, 8)
    expected = run(exact, d_g.double(), lower_bound=lower_bound, implementation="reference")
    actual = run(tensors, d_g, lower_bound=lower_bound, implementation="eager")
    assert actual.pop("g").dtype == torch.float32
    for name, mine in actual.items():
        assert mine.dtype == dtype
        assert relative_error(mine, expected[name]) < limit, name


@every_bound
@pytest.mark.parametrize("A_log", [0.0, 2.0])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 5e-6), (torch.float64, 1e-13)])
def test_every_element_is_accurate_from_tiny_to_saturated(lower_bound, A_log, dtype, limit):
    """Over nine decades of logits and both signs, so that g comes near 0 and near its bound.

    The oracle is written without a function that could share a weakness: exp and log1p of float64.
    """
    magnitudes = torch.logspace(-7, 1.6, 2000, dtype=torch.float64)
    z = torch.cat([-magnitudes.flip(0), magnitudes]).to(dtype)
    rate = torch.tensor([A_log], dtype=torch.float64).exp()
    tensors = {"z": z[:, None, None], "A_log": torch.tensor([A_log], dtype=dtype)}
    actual = run(tensors, torch.ones(len(z), 1, 1, dtype=dtype), lower_bound=lower_bound)
    u = z.double()
    if lower_bound is None:
        g = -rate * torch.where(u > 0, u + torch.log1p(torch.exp(-u)), torch.log1p(torch.exp(u)))
        d_z = -rate / (1 + torch.exp(-u))
    else:
        g = lower_bound / (1 + torch.exp(-rate * u))
        # exp(-|x|) / (1 + exp(-|x|))^2 is the sigmoid's slope on both sides of zero.
        tail = torch.exp(-(rate * u).abs())
        d_z = lower_bound * rate * tail / (1 + tail) ** 2
    visible = g.abs() > 1e-30  # below lie fp32's subnormal numbers
    assert worst_element(actual["g"].flatten()[visible], g[visible]) < limit
    visible = d_z.abs() > 1e-30
    assert worst_element(actual["z"].flatten()[visible], d_z[visible]) < limit


@every_bound
def test_gradcheck_of_the_cpu_path(lower_bound):
    leaves = [x.requires_grad_() for x in inputs(T=3, H=2, K=2).values()]
    assert torch.autograd.gradcheck(lambda *x: kda_gate(*x, lower_bound=lower_bound), leaves)


@pytest.mark.parametrize("implementation", ["reference", "eager"])
def test_the_bound_holds_whatever_the_logits(implementation):
    z = torch.tensor([-1e30, -1e4, 0.0, 1e4, 1e30])[:, None, None]
    g = kda_gate(z, torch.zeros(1), None, implementation=implementation)
    assert (g >= -5.0).all()
    assert (g <= 0.0).all()


@every_bound
@pytest.mark.parametrize("A_log", [-100.0, 100.0])
def test_extreme_scales_give_finite_gradients_where_the_gate_is_saturated(lower_bound, A_log):
    """exp(100) is infinite in fp32, and an infinity that meets a zero is not a number."""
    tensors = {
        "z": torch.tensor([-1e20, -50.0, 0.0, 50.0, 1e20])[:, None, None],
        "A_log": torch.tensor([A_log]),
    }
    out = run(tensors, torch.ones(5, 1, 1), lower_bound=lower_bound)
    assert not any(x.isnan().any() for x in out.values())
    if lower_bound is not None and A_log > 0:
        assert out["g"].flatten().tolist() == [0.0, 0.0, lower_bound / 2, lower_bound, lower_bound]
        assert out["z"].flatten()[[0, 1, 3, 4]].tolist() == [0.0] * 4


def test_backward_keeps_the_inputs_and_nothing_else():
    tensors = {name: x.requires_grad_() for name, x in inputs().items()}
    kept = kept_by(lambda: kda_gate(*tensors.values()))
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in tensors.values()}


@every_bound
def test_no_tokens_is_fine(lower_bound):
    out = run(inputs(T=0), torch.zeros(0, 3, 8, dtype=torch.float64), lower_bound=lower_bound)
    assert out["g"].shape == (0, 3, 8)
    assert out["A_log"].tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"A_log": torch.zeros(2)}, r"A_log \[H\].*got \(50, 3, 8\), \(2,\)"),
        ({"dt_bias": torch.zeros(8)}, r"dt_bias \[H, K\].*\(8,\)"),
        ({"z": torch.zeros(50, 3, 8, dtype=torch.int64)}, "z is torch.int64"),
        ({"lower_bound": -6.0}, r"lower_bound must be in \[-5, 0\) or None, got -6.0"),
        ({"lower_bound": 0.0}, r"got 0.0"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(InvalidInput, match=message):
        kda_gate(**(inputs() | change))


def test_a_kernel_that_does_not_exist_is_an_error_not_a_fallback():
    with pytest.raises(KernelUnavailable, match="kda_gate"):
        kda_gate(**inputs(), implementation="triton")
