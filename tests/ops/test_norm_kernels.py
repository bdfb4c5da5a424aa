"""The norms' kernels in Triton's interpreter: rows of any length and layout, repeats, and what torch asks."""

from __future__ import annotations

import pytest
import torch
from closeness import kept_by, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from test_norm import OPERATORS, every_operator, inputs, run

from openk3.ops.dispatch import triton_problem
from openk3.ops.norm import gated_rms_norm, rms_norm

pytestmark = pytest.mark.skipif(
    triton_problem("cpu") is not None or torch.cuda.is_available(), reason="for Triton's interpreter"
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def assert_equals_the_equation(name, tensors, d_y, limit=2e-6):
    exact = {key: value.double() for key, value in tensors.items()}
    expected = run(name, exact, d_y.double(), implementation="reference")
    for mine, oracle in zip(run(name, tensors, d_y, implementation="triton"), expected, strict=True):
        assert relative_error(mine, oracle) < limit


@settings(max_examples=15, deadline=None)
@given(name=st.sampled_from([*OPERATORS]), rows=st.integers(1, 40), d=st.integers(8, 600))
def test_any_number_of_rows_of_any_length(name, rows, d):
    """Up to 40 rows of 8 to 600: tiles that are not full, and programs that walk over several."""
    tensors = inputs((rows, d), torch.float32)
    assert_equals_the_equation(name, tensors, torch.randn(rows, d), limit=5e-6)


@every_operator
@pytest.mark.parametrize("d", [1, 3584, 7168, 8192])
def test_the_shortest_and_the_longest_rows(name, d):
    tensors, d_y = inputs((7, d), torch.float32), torch.randn(7, d)
    if d == 1:  # the gradient of x is the difference of two numbers that are nearly the same
        exact = {key: value.double() for key, value in tensors.items()}
        y = run(name, tensors, d_y, implementation="triton")[0]
        assert relative_error(y, run(name, exact, d_y.double(), implementation="reference")[0]) < 2e-6
    else:
        assert_equals_the_equation(name, tensors, d_y)


@every_operator
def test_rows_of_heads_are_taken_where_they_lie(name):
    """x, gate and the incoming gradient are each a part of every head of a wider tensor."""
    wide = {key: torch.randn(5, 3, 40) for key in ("x", "g", "d")}
    tensors = {"x": wide["x"][:, :, 8:24], "g": wide["g"][:, 1:, :16].expand(5, 2, 16), "w": torch.randn(16)}
    tensors["x"] = tensors["x"][:, :2]
    d_y = wide["d"].transpose(0, 1)[:2, :, :16].transpose(0, 1)
    assert_equals_the_equation(name, tensors, d_y)


@every_operator
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :12],
        lambda x: x[:, ::2],
        lambda x: x.t(),
        lambda x: x.view(6, 2, 4, 3).transpose(0, 2),
        lambda x: x[:1].expand(5, 24),
        lambda x: x[0],
    ],
    ids=["slices of rows", "every second value", "transposed", "four axes", "one row repeated", "one row"],
)
def test_any_layout_gives_the_result_of_the_contiguous_one(name, view):
    x, g, d_y = (view(torch.randn(6, 24)) for _ in range(3))
    w = torch.randn(2, x.shape[-1]).t()[:, 0]
    tensors = {"x": x, "g": g, "w": w}
    plain = {key: value.contiguous() for key, value in tensors.items()}
    expected = run(name, plain, d_y.contiguous(), implementation="triton")
    for mine, same in zip(run(name, tensors, d_y, implementation="triton"), expected, strict=True):
        assert mine.is_contiguous() and torch.equal(mine, same)


def test_each_input_keeps_its_dtype():
    x = torch.randn(9, 16).bfloat16()
    leaves = [t.requires_grad_() for t in (x, torch.randn(9, 16).half(), torch.randn(16))]
    y = gated_rms_norm(*leaves, 1e-5, implementation="triton")
    dtypes = [t.dtype for t in (y, *torch.autograd.grad(y.float().sum(), leaves))]
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]


def test_a_zero_row_and_what_is_not_a_number():
    x = torch.zeros(3, 8)
    x[2, 4] = float("nan")
    y = rms_norm(x, torch.ones(8), 1e-5, implementation="triton")
    assert not y[:2].any() and y[2].isnan().all()


@every_operator
def test_the_same_inputs_give_the_same_bits(name):
    tensors, d_y = inputs((200, 33), torch.float32), torch.randn(200, 33)
    first, second = (run(name, tensors, d_y, implementation="triton") for _ in range(2))
    assert all(map(torch.equal, first, second))


@every_operator
def test_the_backward_keeps_the_inputs_and_nothing_else(name):
    operator, takes = OPERATORS[name]
    tensors = {key: value.requires_grad_() for key, value in inputs((50, 32), torch.float32).items()}
    kept = kept_by(lambda: operator(*tensors.values(), implementation="triton"))
    assert {t.data_ptr() for t in kept} == {tensors[key].data_ptr() for key in takes}


@pytest.mark.parametrize(("with_weight", "with_gate"), [(True, True), (True, False), (False, False)])
def test_the_operators_pass_opcheck(with_weight, with_gate):
    x, gate, d_y = (torch.randn(3, 4, 5, requires_grad=i < 2) for i in range(3))
    weight = torch.randn(5, requires_grad=True) if with_weight else None
    gate = gate if with_gate else None
    import openk3.ops.norm.kernels  # noqa: F401 - registers the operators

    torch.library.opcheck(torch.ops.openk3.row_norm.default, (x, weight, gate, 1e-5, True))
    plain = [None if t is None else t.detach() for t in (x, weight, gate)]
    torch.library.opcheck(torch.ops.openk3.row_norm_backward.default, (*plain, 1e-5, True, d_y))


def test_torch_compile_sees_one_graph():
    def loss(x, weight):
        return (rms_norm(x + 1, weight, 1e-5, implementation="triton") ** 2).sum()

    leaves = [torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for mine, same in zip(torch.autograd.grad(compiled(*leaves), leaves), expected, strict=True):
        torch.testing.assert_close(mine, same, rtol=1e-6, atol=1e-6)


@every_operator
def test_a_row_does_not_depend_on_the_others(name):
    """To the bit: whatever is beside it in the batch, and wherever its tile begins."""
    tensors, d_y = inputs((90, 48), torch.float32), torch.randn(90, 48)
    few = {key: value if key == "w" else value[37:40] for key, value in tensors.items()}
    everything = run(name, tensors, d_y, implementation="triton")
    alone = run(name, few, d_y[37:40], implementation="triton")
    for mine, all_rows in zip(alone, everything, strict=True):
        if all_rows.dim() == 2:  # the gain's gradient does depend on all
            assert torch.equal(mine, all_rows[37:40])
