"""The short convolution's kernels in Triton's interpreter: small blocks, so that sequences cross them."""

from __future__ import annotations

import pytest
import torch
from closeness import relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from test_short_conv import assert_agree, by_definition, draw, packed, results, states_one_by_one

from openk3.errors import InvalidInput
from openk3.ops.dispatch import triton_problem
from openk3.ops.short_conv import short_conv

pytestmark = pytest.mark.skipif(
    triton_problem("cpu") is not None or torch.cuda.is_available(), reason="for Triton's interpreter"
)

FP32 = 1e-6


@pytest.fixture(autouse=True, scope="module")
def _small_blocks():
    """Blocks of a few tokens and channels: the borders that matter come soon, and interpreting is slow."""
    from openk3.ops.short_conv import kernels

    with pytest.MonkeyPatch.context() as patch:
        small = {"CHANNELS": 8, "num_warps": 1}
        patch.setattr(kernels, "FORWARD", {"TOKENS": 8, "ROWS": 2, **small})
        patch.setattr(kernels, "BACKWARD", {"TOKENS": 8, "ROWS": 2, **small})
        patch.setattr(kernels, "TAILS", small)
        yield


@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    W=st.integers(2, 5),
    activation=st.sampled_from(["silu", None]),
)
def test_outputs_states_and_gradients_equal_the_definition(lengths, W, activation):
    inputs = draw(lengths, W, C=3, dtype=torch.float32)
    actual = results(short_conv, inputs, lengths, activation=activation, implementation="triton")
    exact = {name: x.double() for name, x in inputs.items()}
    assert_agree(actual, results(by_definition, exact, lengths, activation=activation), limit=FP32)


@pytest.mark.parametrize(
    ("lengths", "W", "C"),
    [([0, 1, 7, 8, 0, 0, 3], 4, 11), ([2, 0, 17], 8, 2)],
    ids=["borders on blocks, two slices of channels", "widest, sequence shorter than its state"],
)
def test_borders_of_sequences_on_borders_of_blocks(lengths, W, C):
    inputs = draw(lengths, W, C, dtype=torch.float32)
    exact = {name: x.double() for name, x in inputs.items()}
    actual = results(short_conv, inputs, lengths, implementation="triton")
    assert_agree(actual, results(by_definition, exact, lengths), limit=FP32)


def test_without_a_state_and_with_rows_that_lie_apart():
    """As in the layer: x and the incoming gradient are parts of wider rows; only y has a gradient."""
    inputs = draw([5, 4], C=3, dtype=torch.float32)
    wide = torch.randn(9, 7)
    wide[:, 2:5] = inputs["x"]
    leaves = [wide.requires_grad_(), inputs["weight"].requires_grad_()]
    expected_y, _ = short_conv(wide[:, 2:5].detach(), inputs["weight"], packed([5, 4]))
    d_y = torch.randn(9, 6)[:, ::2]
    y, _ = short_conv(wide[:, 2:5], inputs["weight"], packed([5, 4]), implementation="triton")
    gradients = torch.autograd.grad(y, leaves, d_y)
    expected = torch.autograd.grad(short_conv(wide[:, 2:5], inputs["weight"], packed([5, 4]))[0], leaves, d_y)
    assert relative_error(y, expected_y) < FP32
    for mine, oracle in zip(gradients, expected, strict=True):
        assert relative_error(mine, oracle) < FP32


def test_offsets_may_be_columns_of_a_table():
    x, weight = torch.randn(10, 3), torch.randn(3, 4)
    cu_seqlens, at = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 4, 10], [2, 10]))
    columns = [torch.stack([ends, ends + 1], 1)[:, 0] for ends in (cu_seqlens, at)]
    expected = short_conv(x, weight, cu_seqlens, checkpoint_at=at, implementation="triton")
    actual = short_conv(x, weight, columns[0], checkpoint_at=columns[1], implementation="triton")
    for found, wanted in zip(actual, expected, strict=True):
        assert torch.equal(found, wanted)


def test_half_precision_goes_in_and_comes_out():
    """Within what truncation instead of rounding costs: the interpreter stores bf16 so."""
    inputs = {name: x.bfloat16() for name, x in draw([6, 5], C=3, dtype=torch.float32).items()}
    inputs["weight"] = inputs["weight"].float()
    actual = results(short_conv, inputs, [6, 5], implementation="triton")
    exact = results(by_definition, {name: x.double() for name, x in inputs.items()}, [6, 5])
    assert {actual[name].dtype for name in ("y", "final_state", "x", "initial_state")} == {torch.bfloat16}
    assert actual["weight"].dtype == torch.float32
    assert_agree(actual, exact, limit=1e-2)


def test_a_state_at_a_checkpoint_is_the_final_state_of_a_call_that_ends_there():
    lengths, offsets = [0, 6, 0, 2, 4], [1, 4, 4, 6, 7, 8, 12]
    inputs = draw(lengths, C=3, dtype=torch.float32)
    at = torch.tensor(offsets, dtype=torch.int32)
    states = short_conv(**inputs, cu_seqlens=packed(lengths), checkpoint_at=at, implementation="triton")[2]
    assert torch.equal(states, states_one_by_one(inputs, lengths, offsets))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_without_tokens_the_state_passes_through_and_its_gradient_comes_back(lengths):
    inputs = draw(lengths, dtype=torch.float32)
    actual = results(short_conv, inputs, lengths, implementation="triton")
    expected = results(short_conv, inputs, lengths)
    for name in ("y", "final_state", "initial_state", "weight"):
        assert torch.equal(actual[name], expected[name]), name


def test_offsets_are_not_read_on_the_host():
    """A tensor that cannot be read stands for one whose reading would wait; shapes are still checked."""
    x, weight = torch.zeros(4, 2, device="meta"), torch.zeros(2, 4, device="meta")
    offsets = torch.zeros(3, dtype=torch.int32, device="meta")
    y, state = torch.ops.openk3.short_conv(x, weight, offsets, None, True)
    assert y.shape == (4, 2) and state.shape == (2, 3, 2)
    with pytest.raises(InvalidInput, match="cu_seqlens must be int32 on one axis"):
        short_conv(torch.zeros(4, 2), torch.zeros(2, 4), torch.zeros(2), implementation="triton")


@pytest.mark.parametrize("with_state", [True, False])
def test_the_operators_pass_opcheck(with_state):
    inputs = draw([3, 2], C=2, dtype=torch.float32)
    x, weight = inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()
    state = inputs["initial_state"].requires_grad_() if with_state else None
    offsets = packed([3, 2])
    torch.library.opcheck(torch.ops.openk3.short_conv.default, (x, weight, offsets, state, True))
    at = torch.tensor([2, 5], dtype=torch.int32)
    plain = (x.detach(), offsets, None if state is None else state.detach(), at, 4)
    torch.library.opcheck(torch.ops.openk3.short_conv_states_at.default, plain)
