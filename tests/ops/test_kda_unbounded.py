"""The gate without a bound through interpreted kernels: against the recurrence in float64, and promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import relative_error

from openk3.ops.dispatch import triton_problem
from openk3.ops.kda.gated import gated_kda

if (problem := triton_problem("cpu")) is not None:
    pytest.skip(problem, allow_module_level=True)

from openk3.ops.kda.kernels.halves import spans_table

Inputs = dict[str, Any]
TOKENS = ("q", "k", "v", "z", "b")
# Decay logits as shift + spread * normal: decays near 1; anywhere; e^-20 a token; some 1, some e^-80, mixed;
# logits so large that the log decays themselves overflow fp32 where A_log is large too.
REGIMES = {"weak": (-7, 1), "middle": (0, 1), "strong": (20, 1), "mixed": (0, 80), "extreme": (0, 1e4)}
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, of inf


def draw(lengths: list[int], regime: str = "mixed", H: int = 1, K: int = 64, seed: int = 0) -> Inputs:
    make = torch.Generator().manual_seed(seed)
    shift, spread = REGIMES[regime]
    T = sum(lengths)
    normal = lambda *shape: torch.randn(*shape, generator=make)  # noqa: E731
    return {
        "q": 3 * normal(T, H, K),
        "k": normal(T, H, K),
        "v": normal(T, H, K),
        "z": shift + spread * normal(T, H, K),
        "b": normal(T, H),
        "A_log": 0.3 * normal(H),
        "dt_bias": normal(H, K),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "initial_state": normal(len(lengths), H, K, K),
    }


def run(inputs: Inputs, **options: Any) -> Any:
    return gated_kda(**inputs, lower_bound=None, implementation="triton", **options)


def oracle(inputs: Inputs) -> Any:
    exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    return gated_kda(**exact, lower_bound=None, implementation="reference")


def gradients(inputs: Inputs, dtype: torch.dtype, implementation: Any, weight: float = 1.0) -> Inputs:
    leaves = {n: x.to(dtype).requires_grad_() for n, x in inputs.items() if x.is_floating_point()}
    o, S = gated_kda(**(inputs | leaves), lower_bound=None, implementation=implementation)
    make = torch.Generator().manual_seed(1)
    d_o, d_S = (weight * torch.randn(x.shape, generator=make).to(dtype) for x in (o, S))
    return dict(zip(leaves, torch.autograd.grad([o, S], list(leaves.values()), [d_o, d_S]), strict=True))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(("lengths", "K"), [([70, 1, 0, 64], 64), ([33], 128)])
def test_outputs_and_states_equal_those_of_the_recurrence(regime, lengths, K):
    inputs = draw(lengths, regime, K=K)
    o, S = run(inputs)
    expected_o, expected_S = oracle(inputs)
    assert relative_error(o, expected_o) < 2e-6
    assert relative_error(S, expected_S) < 2e-6


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(("lengths", "K"), [([70, 1, 0, 30], 64), ([33], 128)])
def test_gradients_equal_those_of_the_recurrence(regime, lengths, K):
    inputs = draw(lengths, regime, K=K)
    actual = gradients(inputs, torch.float32, "triton")
    expected = gradients(inputs, torch.float64, "reference")
    errors = {name: relative_error(x, expected[name]) for name, x in actual.items()}
    assert max(errors.values()) < 5e-6, errors


def test_small_gradients_are_as_exact_as_large_ones():
    inputs = draw([40])
    actual = gradients(inputs, torch.float32, "triton", weight=1e-12)
    expected = gradients(inputs, torch.float64, "reference", weight=1e-12)
    errors = {name: relative_error(x, expected[name]) for name, x in actual.items()}
    assert max(errors.values()) < 5e-6, errors


def test_a_row_that_forgets_all_costs_the_rows_around_it_no_digits():
    """A sum from the chunk's start would hold 2^-13 of a later log decay beside such a row's -2^14."""
    inputs = draw([64], "weak")
    inputs["z"][[9, 40]] = 1e4
    o, S = run(inputs)
    expected_o, expected_S = oracle(inputs)
    for rows in (slice(0, 9), slice(9, 40), slice(40, 64)):
        assert relative_error(o[rows], expected_o[rows]) < 2e-6
    assert relative_error(S, expected_S) < 2e-6
    actual = gradients(inputs, torch.float32, "triton")["z"]
    expected = gradients(inputs, torch.float64, "reference")["z"]
    for rows in (slice(0, 9), slice(10, 40), slice(41, 64)):
        assert relative_error(actual[rows], expected[rows]) < 5e-6


@pytest.mark.parametrize("A_log", [-80.0, 30.0, 88.0])
def test_no_scale_of_the_gate_gives_other_than_finite_numbers(A_log):
    inputs = draw([40], "extreme")
    inputs["A_log"][:] = A_log
    o, S = run(inputs)
    expected_o, expected_S = oracle(inputs)
    assert relative_error(o, expected_o) < 2e-6 and relative_error(S, expected_S) < 2e-6
    for name, x in gradients(inputs, torch.float32, "triton").items():
        assert torch.isfinite(x).all(), name


@pytest.mark.parametrize("scale", [1e-30, 1e18])
def test_extreme_inputs_give_finite_outputs_and_gradients(scale):
    inputs = draw([40], "middle")
    for name in ("q", "k", "z", "b"):
        inputs[name] *= scale
    inputs["A_log"][:] = 80.0
    o, S = run(inputs)
    assert torch.isfinite(o).all() and torch.isfinite(S).all()
    for name, x in gradients(inputs, torch.float32, "triton").items():
        assert torch.isfinite(x).all(), name


def test_a_decay_of_zero_has_no_gradient():
    inputs = draw([20], "extreme")
    inputs["z"].abs_().add_(1e3)
    found = gradients(inputs, torch.float32, "triton")
    for name in ("z", "A_log", "dt_bias", "initial_state"):
        assert torch.equal(found[name], torch.zeros_like(found[name])), name


def test_a_small_softplus_times_a_large_rate_is_a_decay():
    """e^80 softplus(-80) is 1: the rate is not cut short of fp32's range."""
    inputs = draw([30])
    inputs["z"] = inputs["z"] / 80 - 80
    inputs["A_log"][:] = 80.0
    o, _ = run(inputs)
    assert relative_error(o, oracle(inputs)[0]) < 1e-5


def test_a_checkpoint_is_bitwise_the_state_of_a_call_that_ends_there_and_continues_bitwise():
    inputs = draw([20, 150])
    at = torch.tensor([20, 20 + 64, 20 + 128, 170], dtype=torch.int32)
    o, S, states = run(inputs, checkpoint_at=at)
    assert torch.equal(states[3], S[1]) and torch.equal(states[0], S[0])
    before = inputs | {n: inputs[n][20:148] for n in TOKENS}
    before |= {"cu_seqlens": torch.tensor([0, 128]).int(), "initial_state": inputs["initial_state"][1:]}
    assert torch.equal(run(before)[1][0], states[2])
    after = inputs | {n: inputs[n][148:] for n in TOKENS}
    after |= {"cu_seqlens": torch.tensor([0, 22]).int(), "initial_state": states[2:3]}
    o_after, S_after = run(after)
    assert torch.equal(o_after, o[148:]) and torch.equal(S_after[0], S[1])


def test_nothing_depends_on_a_later_token_not_even_its_last_bit():
    inputs = draw([100])
    o, _ = run(inputs)
    for cut in (1, 31, 64, 99):
        changed = {n: x.clone() for n, x in inputs.items()}
        for name in TOKENS:
            changed[name][cut:] = 7.0 * changed[name][cut:] - 1.0
        assert torch.equal(run(changed)[0][:cut], o[:cut])


def test_a_sequence_is_bitwise_the_same_alone_and_packed():
    inputs = draw([5, 90, 3])
    o, S = run(inputs)
    alone = inputs | {n: inputs[n][5:95] for n in TOKENS}
    alone |= {"cu_seqlens": torch.tensor([0, 90]).int(), "initial_state": inputs["initial_state"][1:2]}
    o_alone, S_alone = run(alone)
    assert torch.equal(o_alone, o[5:95]) and torch.equal(S_alone[0], S[1])


def test_every_pair_of_rows_meets_at_one_level_over_the_gates_between_them():
    spans = spans_table(torch.int32, torch.device("cpu"))
    row, column = torch.arange(64)[:, None], torch.arange(64)
    assert torch.equal(spans[6], (column > row).int()) and torch.equal(spans[7], (column <= row).int())
    for i in range(64):
        for j in range(i):
            level = (i ^ j).bit_length() - 1  # of the highest bit in which they differ
            between = spans[level, i] + spans[level, j]
            assert between.tolist() == [int(j < t <= i) for t in range(64)]


def test_the_operator_passes_opcheck_without_a_bound():
    from openk3.ops.kda.kernels.operator import _forward

    *tensors, cu_seqlens, state = draw([3]).values()
    tensors = [x.requires_grad_() for x in tensors]
    torch.library.opcheck(_forward, (*tensors, cu_seqlens, state, None, None, 0.125, True))
