"""The short convolution against its definition, and what the borders of sequences may not let through."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from closeness import kept_by, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.short_conv import short_conv


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def packed(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def draw(lengths: list[int], W=4, C=5, dtype=torch.float64) -> dict[str, torch.Tensor]:
    made = {
        "x": torch.randn(sum(lengths), C, dtype=torch.float64),
        "weight": torch.randn(C, W, dtype=torch.float64),
        "initial_state": torch.randn(len(lengths), W - 1, C, dtype=torch.float64),
    }
    return {name: x.to(dtype) for name, x in made.items()}


def by_definition(x, weight, cu_seqlens, initial_state, activation="silu"):
    """Token by token and tap by tap, reading either the sequence or its state."""
    W = weight.shape[1]
    y, final_state = [], []
    for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):

        def read(position, n=n, start=start):
            return x[start + position] if position >= 0 else initial_state[n, position]

        y += [sum(weight[:, j] * read(t - (W - 1) + j) for j in range(W)) for t in range(end - start)]
        final_state += [read(end - start - (W - 1) + j) for j in range(W - 1)]
    y = torch.stack(y) if y else x
    final_state = torch.stack(final_state).view_as(initial_state) if final_state else initial_state
    return (torch.nn.functional.silu(y) if activation else y), final_state


def results(run, inputs, lengths, **options) -> dict[str, torch.Tensor]:
    """Both outputs, and the gradients of one random linear loss of both."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    y, final_state = run(cu_seqlens=packed(lengths), **leaves, **options)
    seed = torch.Generator().manual_seed(1)
    loss = sum((out * torch.randn(out.shape, generator=seed).to(out.dtype)).sum() for out in (y, final_state))
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    filled = (
        torch.zeros_like(x) if d is None else d for d, x in zip(gradients, leaves.values(), strict=True)
    )
    return {"y": y, "final_state": final_state, **dict(zip(leaves, filled, strict=True))}


def assert_agree(actual, expected, limit) -> None:
    errors = {name: relative_error(actual[name], oracle) for name, oracle in expected.items()}
    assert max(errors.values()) < limit, errors


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    W=st.integers(1, 5),
    activation=st.sampled_from(["silu", None]),
    implementation=st.sampled_from(["reference", "eager"]),
)
def test_outputs_states_and_gradients_equal_the_definition(lengths, W, activation, implementation):
    """Short and empty sequences included: they hand the newest rows of their state on."""
    inputs = draw(lengths, W)
    actual = results(short_conv, inputs, lengths, activation=activation, implementation=implementation)
    expected = results(by_definition, inputs, lengths, activation=activation)
    assert_agree(actual, expected, limit=1e-13)


@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[1], [1] * 5])
def test_one_token_of_each_sequence_equals_the_definition(lengths, W):
    inputs = draw(lengths, W)
    assert_agree(results(short_conv, inputs, lengths), results(by_definition, inputs, lengths), limit=1e-13)


def test_long_sequences_equal_the_definition():
    """Longer than the blocks in which the gradient to the weight is summed."""
    inputs, lengths = draw([700, 3, 640]), [700, 3, 640]
    assert_agree(results(short_conv, inputs, lengths), results(by_definition, inputs, lengths), limit=1e-12)


def test_it_is_the_library_convolution_on_one_sequence():
    inputs = draw([40])
    y, _ = short_conv(inputs["x"], inputs["weight"], packed([40]), activation=None)
    channels_first = torch.nn.functional.pad(inputs["x"].t(), (3, 0))
    expected = torch.nn.functional.conv1d(channels_first, inputs["weight"][:, None], groups=5).t()
    torch.testing.assert_close(y, expected)


def test_without_an_initial_state_a_sequence_starts_from_zeros():
    inputs = draw([6, 0, 2])
    expected = short_conv(**(inputs | {"initial_state": torch.zeros(3, 3, 5)}), cu_seqlens=packed([6, 0, 2]))
    del inputs["initial_state"]
    for mine, oracle in zip(short_conv(**inputs, cu_seqlens=packed([6, 0, 2])), expected, strict=True):
        assert torch.equal(mine, oracle)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), length=st.integers(0, 12))
def test_the_final_state_of_one_part_starts_the_next(data, length):
    middle = data.draw(st.integers(0, length))

    def in_two(x, weight, cu_seqlens, initial_state):
        first, state = short_conv(x[:middle], weight, packed([middle]), initial_state=initial_state)
        second, state = short_conv(x[middle:], weight, packed([length - middle]), initial_state=state)
        return torch.cat([first, second]), state

    inputs = draw([length])
    assert_agree(results(in_two, inputs, [length]), results(short_conv, inputs, [length]), limit=1e-13)


def test_a_sequence_never_meets_another_not_even_its_nans():
    lengths = [7, 9, 2, 5]
    inputs = draw(lengths, dtype=torch.float32)
    clean = results(short_conv, inputs, lengths)
    inputs["x"][7:16], inputs["initial_state"][1] = float("nan"), float("nan")
    dirty = results(short_conv, inputs, lengths)
    tokens, sequences = [*range(7), *range(16, 23)], [0, 2, 3]
    for name, kept in [
        ("y", tokens),
        ("x", tokens),
        ("final_state", sequences),
        ("initial_state", sequences),
    ]:
        assert torch.equal(dirty[name][kept], clean[name][kept]), name


@pytest.mark.parametrize("implementation", ["reference", "eager"])
def test_half_precision_is_computed_in_fp32(implementation):
    """With an fp32 weight, as the release stores it; y and the state come back in x's dtype."""
    inputs = draw([50, 30], C=64)
    inputs = {name: x.to(torch.float32 if name == "weight" else torch.bfloat16) for name, x in inputs.items()}
    actual = results(short_conv, inputs, [50, 30], implementation=implementation)
    exact = results(by_definition, {name: x.double() for name, x in inputs.items()}, [50, 30])
    assert actual["y"].dtype == actual["final_state"].dtype == actual["x"].dtype == torch.bfloat16
    assert actual["weight"].dtype == torch.float32
    assert_agree(actual, exact, limit=4e-3)


def test_fp32_is_accurate():
    inputs = draw([300, 212], C=64, dtype=torch.float32)
    exact = results(by_definition, {name: x.double() for name, x in inputs.items()}, [300, 212])
    assert_agree(results(short_conv, inputs, [300, 212]), exact, limit=1e-6)


@pytest.mark.parametrize("activation", ["silu", None])
def test_gradcheck_of_the_cpu_path(activation):
    lengths = [5, 0, 2, 4]

    def run(x, weight, initial_state):
        return short_conv(x, weight, packed(lengths), initial_state=initial_state, activation=activation)

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in draw(lengths, C=2).values()])


def test_a_gradient_that_comes_in_is_left_alone():
    """Without an activation the incoming gradient could be changed in place, under its owner's hands."""
    inputs = {name: x.requires_grad_() for name, x in draw([6]).items()}
    y, _ = short_conv(**inputs, cu_seqlens=packed([6]), activation=None)
    d_y = torch.ones_like(y)
    y.backward(d_y)
    assert torch.equal(d_y, torch.ones_like(y))


def test_backward_keeps_the_inputs_and_nothing_else():
    inputs = {name: x.requires_grad_() for name, x in draw([8, 3]).items()}
    kept = kept_by(lambda: short_conv(**inputs, cu_seqlens=packed([8, 3])))
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in inputs.values()}


@pytest.mark.parametrize("implementation", ["reference", "eager"])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_without_tokens_the_state_passes_through(lengths, implementation):
    inputs = draw(lengths)
    y, final_state = short_conv(**inputs, cu_seqlens=packed(lengths), implementation=implementation)
    assert y.shape == (0, 5)
    assert torch.equal(final_state, inputs["initial_state"])


@pytest.mark.parametrize("implementation", ["reference", "eager"])
def test_a_state_at_a_checkpoint_is_the_final_state_of_a_call_that_ends_there(implementation):
    """Inside sequences, at their ends, closer to the start than W - 1, twice the same."""
    lengths, offsets = [0, 6, 0, 2, 4], [1, 4, 4, 6, 7, 8, 12]
    inputs = draw(lengths)
    states = short_conv(
        **inputs,
        cu_seqlens=packed(lengths),
        checkpoint_at=torch.tensor(offsets, dtype=torch.int32),
        implementation=implementation,
    )[2]
    assert torch.equal(states, states_one_by_one(inputs, lengths, offsets))


def states_one_by_one(inputs, lengths, offsets) -> torch.Tensor:
    bounds = packed(lengths).tolist()
    states = []
    for end in offsets:
        n = next(i for i, bound in enumerate(bounds[1:]) if bound >= end)
        part = inputs["x"][bounds[n] : end]
        before = inputs["initial_state"][n : n + 1]
        states.append(short_conv(part, inputs["weight"], packed([len(part)]), initial_state=before)[1])
    return torch.cat(states)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(4, 4)}, r"x must be \[T, C\].*got \(4, 5\) and \(4, 4\)"),
        ({"initial_state": torch.zeros(1, 4, 5)}, r"\[N, W - 1, C\] = \(1, 3, 5\), got \(1, 4, 5\)"),
        ({"x": torch.zeros(4, 5, dtype=torch.int64)}, "x is torch.int64"),
        ({"activation": "relu"}, "activation must be 'silu' or None, got 'relu'"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "from 0 to the 4 tokens, got 0 to 5"),
        ({"cu_seqlens": torch.tensor([1, 4])}, "got 1 to 4"),
        ({"cu_seqlens": torch.tensor([], dtype=torch.int32)}, r"must be \[N \+ 1\], got no element"),
        (
            {"checkpoint_at": torch.tensor([2.0])},
            "checkpoint_at must be int32 on one axis, got torch.float32",
        ),
        ({"checkpoint_at": torch.tensor([2, 5])}, r"checkpoint_at must lie in \[1, 4\], got 5"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(InvalidInput, match=message):
        short_conv(**(draw([4]) | {"cu_seqlens": packed([4])} | change))


@pytest.mark.parametrize(
    ("change", "message"), [({}, "computes in fp32"), ({"W": 9}, "widths 2 to 8, got 9")]
)
def test_what_the_kernel_cannot_do_is_an_error_not_a_fallback(change, message):
    inputs = draw([4], **({"dtype": torch.float64} | change))
    with pytest.raises(KernelUnavailable, match=f"short_conv: .*{message}"):
        short_conv(**inputs, cu_seqlens=packed([4]), implementation="triton")


@pytest.mark.parametrize("implementation", ["reference", "eager"])
def test_no_channel_is_nothing_to_do(implementation):
    x = torch.ones(5, 0, requires_grad=True)
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    y, state = short_conv(x, torch.ones(0, 4), cu_seqlens, implementation=implementation)
    assert (y.shape, state.shape) == ((5, 0), (2, 3, 0))
    assert torch.autograd.grad(y.sum() + state.sum(), x)[0].shape == (5, 0)
