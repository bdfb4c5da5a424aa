"""The kernels of SiTU-GLU, SwiGLU and GLU in Triton's interpreter: layouts, repeats, and what torch asks."""

from __future__ import annotations

import pytest
import torch
from closeness import kept_by, relative_error, worst_element

from openk3.errors import InvalidInput
from openk3.ops.activation import Activation
from openk3.ops.dispatch import triton_problem

pytestmark = [
    pytest.mark.skipif(
        triton_problem("cpu") is not None or torch.cuda.is_available(), reason="for Triton's interpreter"
    ),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # of NumPy, which interprets
]
every_kind = pytest.mark.parametrize("kind", ["situ", "swiglu", "glu"])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def run(kind, gate, up, d_out, implementation="triton", **caps):
    """Output and the gradients of what gate and up are views of, or of themselves."""
    leaves = [x.detach().requires_grad_() for x in (gate, up)]
    out = Activation(kind, **caps)(*leaves, implementation=implementation)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def exact(kind, gate, up, d_out, **caps):
    return run(kind, gate.double(), up.double(), d_out.double(), "reference", **caps)


@every_kind
@pytest.mark.parametrize(("T", "F"), [(1, 300), (19, 5), (9, 256), (0, 4), (3, 0)])
def test_halves_of_one_tensor_are_taken_where_they_lie(kind, T, F):
    both = 3 * torch.randn(T, 2 * F)
    gate, up = both.chunk(2, dim=1)
    d_out = torch.randn(T, F)
    actual, expected = run(kind, gate, up, d_out), exact(kind, gate, up, d_out)
    for mine, oracle in zip(actual, expected, strict=True):
        assert mine.shape == (T, F) and mine.is_contiguous()
        assert relative_error(mine, oracle) < 1e-6


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(7, 12),
        lambda x: x.view(7, 3, 4)[:, :, 1:],
        lambda x: x.view(7, 3, 4).transpose(0, 1),
        lambda x: x[0, 0],
    ],
    ids=[
        "transposed",
        "every second column",
        "one row repeated",
        "parts of heads",
        "heads first",
        "a scalar",
    ],
)
def test_any_layout_gives_the_result_of_the_contiguous_one(view):
    gate, up, d_out = (view(2 * torch.randn(7, 12)) for _ in range(3))
    expected = run("situ", gate.contiguous(), up.contiguous(), d_out.contiguous())
    for mine, same in zip(run("situ", gate, up, d_out), expected, strict=True):
        assert torch.equal(mine, same)


@pytest.mark.parametrize("caps", [(4.0, 25.0), (3.0, 7.0), (0.25, 1e4)])
def test_other_caps_than_the_released_ones(caps):
    caps = dict(zip(("gate_cap", "up_cap"), caps, strict=True))
    points = torch.logspace(-6, 1.6, 500)
    gate = torch.cat([-points.flip(0), points])
    inputs = gate, gate.flip(0), torch.ones(1000)
    for mine, oracle in zip(run("situ", *inputs, **caps), exact("situ", *inputs, **caps), strict=True):
        assert worst_element(mine, oracle) < 5e-6


@every_kind
def test_what_is_not_a_number_stays_so(kind):
    nan, one = torch.tensor([float("nan")]), torch.ones(1)
    for gate, up in ((nan, one), (one, nan)):
        assert run(kind, gate, up, one)[0].isnan().all()


def test_gradients_are_finite_at_the_ends_of_the_range():
    ends = torch.tensor([-3e38, -1e4, -88.0, 0.0, 88.0, 1e4, 3e38])
    gate, up = (x.contiguous() for x in torch.meshgrid(ends, ends, indexing="ij"))
    actual = run("situ", gate, up, torch.ones(7, 7))
    assert all(x.isfinite().all() for x in actual)
    for mine, oracle in zip(actual, exact("situ", gate, up, torch.ones(7, 7)), strict=True):
        assert relative_error(mine, oracle) < 1e-6


@every_kind
def test_the_backward_keeps_the_inputs_and_nothing_else(kind):
    gate, up = (torch.randn(64, requires_grad=True) for _ in range(2))
    kept = kept_by(lambda: Activation(kind)(gate, up, implementation="triton"))
    assert {t.data_ptr() for t in kept} == {gate.data_ptr(), up.data_ptr()}


@every_kind
def test_the_same_inputs_give_the_same_bits(kind):
    inputs = [torch.randn(9, 300) for _ in range(3)]
    assert all(map(torch.equal, run(kind, *inputs), run(kind, *inputs)))


@every_kind
def test_the_operators_pass_opcheck(kind):
    both = torch.randn(3, 10, requires_grad=True)
    gate, up = both.chunk(2, dim=1)
    torch.library.opcheck(torch.ops.openk3.gated_unit.default, (gate, up, kind, 4.0, 25.0))
    plain = gate.detach(), up.detach(), torch.randn(3, 5), kind, 4.0, 25.0
    torch.library.opcheck(torch.ops.openk3.gated_unit_backward.default, plain)


def test_torch_compile_sees_one_graph():
    def loss(gate, up):
        return (2 * Activation("situ")(gate + 1, up, implementation="triton")).sum()

    leaves = [torch.randn(4, 6, requires_grad=True) for _ in range(2)]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for mine, same in zip(torch.autograd.grad(compiled(*leaves), leaves), expected, strict=True):
        assert torch.equal(mine, same)


@every_kind
@pytest.mark.parametrize(("T", "F"), [(1, 300), (19, 5), (9, 256), (4, 1), (0, 4), (3, 0)])
def test_one_tensor_of_both_gives_the_result_of_its_halves(kind, T, F):
    both, d_out = 3 * torch.randn(T, 2 * F), torch.randn(T, F)
    leaf = both.clone().requires_grad_()
    out = Activation(kind).of_halves(leaf, implementation="triton")
    (d_both,) = torch.autograd.grad(out, leaf, d_out)
    wanted, d_gate, d_up = run(kind, *both.chunk(2, dim=1), d_out)
    assert torch.equal(out, wanted)
    assert d_both.is_contiguous() and torch.equal(d_both, torch.cat([d_gate, d_up], dim=1))
    assert [
        t.data_ptr() for t in kept_by(lambda: Activation(kind).of_halves(leaf, implementation="triton"))
    ] == [leaf.data_ptr()]


def test_halves_need_an_even_axis_and_pass_opcheck():
    with pytest.raises(InvalidInput, match="halves"):
        Activation().of_halves(torch.ones(2, 3))
    both = torch.randn(3, 8).requires_grad_()
    assert torch.equal(Activation().of_halves(both), Activation()(both[:, :4], both[:, 4:]))  # eager
    torch.library.opcheck(torch.ops.openk3.gated_unit_halves.default, (both, "situ", 4.0, 25.0))
    plain = both.detach(), both.detach()[:, :4], "situ", 4.0, 25.0
    torch.library.opcheck(torch.ops.openk3.gated_unit_halves_backward.default, plain)
