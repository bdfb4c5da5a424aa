"""Gated units and norms on a GPU: against float64, and what they promise to the bit.

Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

import pytest
import torch

from openk3.ops.activation import Activation
from openk3.ops.norm import gated_rms_norm, l2_norm, rms_norm
from ops.closeness import relative_error, worst_element

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

UNIT = {"situ": Activation("situ"), "swiglu": Activation("swiglu"), "glu": Activation("glu")}
# On (x, gate logits, gain); KDA's L2 norm takes the first alone.
NORM = {
    "rms": lambda x, g, w, **how: rms_norm(x, w, 1e-5, **how),
    "gated": lambda x, g, w, **how: gated_rms_norm(x, g, w, 1e-5, **how),
    "l2": lambda x, g, w, **how: l2_norm(x, **how),
}
LIMIT = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}  # relative L2


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


FORCED = {"implementation": "triton"}


def gradients(call, leaves, d_y):
    """Output and the gradients of the leaves that it depends on."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    y = call(*leaves)
    found = torch.autograd.grad(y, leaves, d_y, allow_unused=True)
    return [y.detach(), *(g for g in found if g is not None)]


def assert_equals_float64(call, inputs, d_y, limit):
    exact = gradients(
        lambda *x: call(*x, implementation="reference"), [x.double() for x in inputs], d_y.double()
    )
    mine = gradients(lambda *x: call(*x, implementation="triton"), inputs, d_y)
    again = gradients(lambda *x: call(*x, implementation="triton"), inputs, d_y)
    for one, same, oracle in zip(mine, again, exact, strict=True):
        assert torch.equal(one, same)
        assert relative_error(one, oracle) < limit


@pytest.mark.parametrize("kind", UNIT)
@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(("T", "F"), [(2, 9), (300, 3072), (37, 416), (5, 33)])
def test_gated_units_on_halves_of_one_tensor_and_on_two(kind, dtype, T, F):
    both = (3 * torch.randn(T, 2 * F, device="cuda")).to(dtype)
    d_y = torch.randn(T, F, device="cuda").to(dtype)
    for inputs in (both.chunk(2, dim=1), [x.contiguous() for x in both.chunk(2, dim=1)]):
        assert_equals_float64(UNIT[kind], inputs, d_y, LIMIT[dtype])


def test_every_element_of_situ_is_within_what_its_tanh_and_bf16_allow():
    """Each tanh to 2^-11, the result rounded to 2^-8; all of it relative, from 2^-20 to saturated."""
    points = torch.logspace(-6, 1.6, 1500, device="cuda")
    points = torch.cat([-points.flip(0), points]).bfloat16()
    gate, up = torch.meshgrid(points, points, indexing="ij")
    exact = UNIT["situ"](gate.double(), up.double(), implementation="reference")
    mine = UNIT["situ"](gate, up, implementation="triton").double()
    assert ((mine - exact).abs() <= exact.abs() * (2**-8 + 1.01 * 2**-10)).all()
    assert mine.abs().max() <= 100


def test_every_element_of_situ_in_fp32_is_within_a_few_roundings():
    points = torch.logspace(-6, 1.6, 2000, device="cuda")
    points = torch.cat([-points.flip(0), points])
    inputs = points, points.flip(0)
    ones = torch.ones_like(points)
    exact = gradients(
        lambda *x: UNIT["situ"](*x, implementation="reference"), [x.double() for x in inputs], ones.double()
    )
    mine = gradients(lambda *x: UNIT["situ"](*x, implementation="triton"), inputs, ones)
    for one, oracle in zip(mine, exact, strict=True):
        assert worst_element(one, oracle) < 5e-6


def test_situ_at_the_ends_of_the_range():
    ends = torch.tensor([-3e38, -1e4, -100.0, 0.0, 100.0, 1e4, 3e38], device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        gate, up = (x.contiguous().to(dtype) for x in torch.meshgrid(ends, ends, indexing="ij"))
        assert_equals_float64(UNIT["situ"], (gate, up), torch.ones_like(gate), LIMIT[dtype])
        nan = torch.full_like(gate, float("nan"))
        assert UNIT["situ"](nan, up).isnan().all() and UNIT["situ"](gate, nan).isnan().all()


@pytest.mark.parametrize("name", NORM)
@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("shape", [(1, 40), (5000, 512), (500, 7168), (700, 96, 128), (999, 100), (9, 8192)])
def test_norms_of_rows_of_any_length(name, dtype, shape):
    inputs = [torch.randn(shape, device="cuda").to(dtype) for _ in range(2)]
    inputs.append(torch.rand(shape[-1], device="cuda") + 0.5)
    assert_equals_float64(NORM[name], inputs, torch.randn(shape, device="cuda").to(dtype), LIMIT[dtype])


@pytest.mark.parametrize("name", NORM)
def test_norms_of_parts_of_heads(name):
    wide = torch.randn(200, 12, 384, device="cuda").bfloat16()
    x, gate = wide[:, :, :128], wide[:, :, 200:328]
    d_y = torch.randn(12, 200, 128, device="cuda").bfloat16().transpose(0, 1)
    assert_equals_float64(NORM[name], [x, gate, torch.randn(128, device="cuda")], d_y, 4e-3)


def test_offsets_beyond_32_bits():
    T, F = 360_000, 3072
    both = torch.empty(T, 2 * F, device="cuda", dtype=torch.bfloat16).normal_()
    gate, up = both.chunk(2, dim=1)
    end = slice(T - 100, T)
    y = UNIT["situ"](gate, up, **FORCED)
    assert torch.equal(y[end], UNIT["situ"](gate[end], up[end], **FORCED))
    d_gate, d_up = torch.ops.openk3.gated_unit_backward(gate, up, y, "situ", 4.0, 25.0)
    last = torch.ops.openk3.gated_unit_backward(gate[end], up[end], y[end], "situ", 4.0, 25.0)
    assert torch.equal(d_gate[end], last[0]) and torch.equal(d_up[end], last[1])
    normed = rms_norm(both, None, 1e-5, **FORCED)
    assert torch.equal(normed[end], rms_norm(both[end], None, 1e-5, **FORCED))
    d_x = torch.ops.openk3.row_norm_backward(both, None, None, 1e-5, True, both)[0]
    last = torch.ops.openk3.row_norm_backward(both[end], None, None, 1e-5, True, both[end])[0]
    assert torch.equal(d_x[end], last)


def network(x, gate, gain):
    """A loss through all of them."""
    y = UNIT["situ"](gated_rms_norm(x, gate, gain, 1e-5, **FORCED), gate, **FORCED)
    return (rms_norm(y, gain, 1e-5, **FORCED) ** 2).sum()


def leaves():
    shape = (64, 4, 128)
    made = [torch.randn(shape, device="cuda").bfloat16(), torch.randn(shape, device="cuda").bfloat16()]
    return [x.requires_grad_() for x in (*made, torch.rand(128, device="cuda") + 0.5)]


def test_a_graph_repeats_the_call():
    inputs = leaves()
    expected = torch.autograd.grad(network(*inputs), inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(network(*inputs), inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, expected))


def test_torch_compile_sees_one_graph():
    inputs = leaves()
    expected = torch.autograd.grad(network(*inputs), inputs)
    actual = torch.autograd.grad(torch.compile(network, fullgraph=True)(*inputs), inputs)
    for mine, same in zip(actual, expected, strict=True):
        assert relative_error(mine, same) < 4e-3
