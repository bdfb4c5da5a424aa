"""KDA from raw projections: kernels (interpreted) against the recurrence in float64, and their promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import relative_error

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.kda.gated import gated_kda

Tensor = torch.Tensor
# As raw decay logits: gates near 0, anywhere, and at the bound.
REGIMES = {"slow": -6.0, "any": 0.0, "fast": 8.0}


def _inputs(lengths: list[int], H: int, K: int, *, shift: float = 0.0, seed: int = 0) -> dict[str, Any]:
    make = torch.Generator().manual_seed(seed)
    T = sum(lengths)
    draw = lambda *shape: torch.randn(*shape, generator=make, dtype=torch.float64)  # noqa: E731
    return {
        "q": draw(T, H, K),
        "k": draw(T, H, K),
        "v": draw(T, H, K),
        "z": draw(T, H, K) + shift,
        "b": draw(T, H),
        "A_log": 0.3 * draw(H),
        "dt_bias": 0.5 * draw(H, K),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "initial_state": draw(len(lengths), H, K, K),
    }


def _single(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(("lengths", "K"), [([70, 1, 0, 64], 64), ([33], 128)])
def test_kernels_equal_the_recurrence(regime, lengths, K):
    inputs = _single(_inputs(lengths, 2, K, shift=REGIMES[regime]))
    exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    o, S = gated_kda(**inputs, implementation="triton")
    expected_o, expected_S = gated_kda(**exact, implementation="reference")
    assert relative_error(o, expected_o) < 5e-6
    assert relative_error(S, expected_S) < 5e-6
    assert S.dtype == torch.float32


def test_gradients_equal_those_of_the_recurrence():
    inputs = _single(_inputs([70, 1, 0], 1, 64))
    leaves = [name for name, x in inputs.items() if x.is_floating_point()]
    grads = []
    for dtype, implementation in ((torch.float32, "triton"), (torch.float64, "reference")):
        own = {n: x.to(dtype).requires_grad_() if n in leaves else x for n, x in inputs.items()}
        o, S = gated_kda(**own, implementation=implementation)
        weights = torch.Generator().manual_seed(1)
        loss = (o * torch.randn(o.shape, generator=weights)).sum() + (
            S * torch.randn(S.shape, generator=weights)
        ).sum()
        grads.append(torch.autograd.grad(loss, [own[n] for n in leaves]))
    for name, mine, oracle in zip(leaves, *grads, strict=True):
        assert relative_error(mine, oracle) < 1e-4, name


@pytest.mark.parametrize("logit", [-14.0, -22.0])
def test_small_writes_between_slow_decays_keep_their_digits(logit):
    inputs = _single(_inputs([64], 1, 64, shift=-6.0)) | {"initial_state": None}
    inputs["b"] = torch.full_like(inputs["b"], logit)
    exact = {n: x.double() if x is not None and x.is_floating_point() else x for n, x in inputs.items()}
    actual = gated_kda(**inputs, implementation="triton")
    for x, y in zip(actual, gated_kda(**exact, implementation="eager"), strict=True):
        assert relative_error(x, y) < 1e-5


def test_identical_keys_with_slow_decay_and_full_writes_stay_finite_and_right():
    """(I + L) of equal keys is all ones below the diagonal: a Neumann series of it overflows."""
    inputs = _single(_inputs([80], 1, 64, shift=-9.0))
    inputs["k"][:] = inputs["k"][0]
    inputs["b"][:] = 9.0
    exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    o, _ = gated_kda(**inputs, implementation="triton")
    assert relative_error(o, gated_kda(**exact, implementation="reference")[0]) < 1e-5


@pytest.mark.parametrize("scale", [1e-30, 1e18])
def test_extreme_inputs_give_finite_outputs(scale):
    inputs = _single(_inputs([40], 1, 64))
    for name in ("q", "k", "z", "b"):
        inputs[name] *= scale
    inputs["A_log"][:] = 80.0
    o, S = gated_kda(**inputs, implementation="triton")
    assert torch.isfinite(o).all() and torch.isfinite(S).all()


@pytest.mark.parametrize("scale", [1e-9, -3e-4, 0.0])
def test_a_small_scale_takes_no_digits_from_outputs_and_gradients(scale):
    """Gates at the bound: behind 32 tokens of it the factors of queries are 2^-116."""
    inputs = _single(_inputs([64], 1, 64, shift=20.0)) | {"initial_state": None}
    results = []
    for dtype, implementation in ((torch.float32, "triton"), (torch.float64, "reference")):
        own = {n: x.to(dtype) if x is not None and n != "cu_seqlens" else x for n, x in inputs.items()}
        q = own["q"].requires_grad_()
        o, _ = gated_kda(**own, scale=scale, implementation=implementation)
        results.append((o, torch.autograd.grad(o.sum(), q)[0]))
    for mine, oracle in zip(*results, strict=True):
        for t in range(64):
            assert relative_error(mine[t], oracle[t]) < 1e-5 if scale else not mine[t].any(), t


def test_a_checkpoint_is_bitwise_the_state_of_a_call_that_ends_there_and_continues_bitwise():
    inputs = _single(_inputs([20, 150], 1, 64))
    at = torch.tensor([20, 20 + 64, 20 + 128, 170], dtype=torch.int32)
    o, S, states = gated_kda(**inputs, checkpoint_at=at, implementation="triton")
    assert torch.equal(states[3], S[1]) and torch.equal(states[0], S[0])
    tokens = ("q", "k", "v", "z", "b")
    for m, end in enumerate((84, 148), start=1):
        before = inputs | {n: inputs[n][20:end] for n in tokens}
        before["cu_seqlens"] = torch.tensor([0, end - 20], dtype=torch.int32)
        before["initial_state"] = inputs["initial_state"][1:]
        assert torch.equal(gated_kda(**before, implementation="triton")[1][0], states[m])
        after = inputs | {n: inputs[n][end:] for n in tokens}
        after["cu_seqlens"] = torch.tensor([0, 170 - end], dtype=torch.int32)
        after["initial_state"] = states[m : m + 1]
        o_after, S_after = gated_kda(**after, implementation="triton")
        assert torch.equal(o_after, o[end:]) and torch.equal(S_after[0], S[1])


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_all_implementations_agree_on_checkpoints(implementation):
    inputs = _single(_inputs([70, 10], 1, 64))
    at = torch.tensor([64, 70, 80], dtype=torch.int32)
    states = gated_kda(**inputs, checkpoint_at=at, implementation=implementation)[2]
    assert relative_error(states, gated_kda(**inputs, checkpoint_at=at, implementation="eager")[2]) < 1e-5


def test_nothing_depends_on_a_later_token_not_even_its_last_bit():
    inputs = _single(_inputs([100], 1, 64))
    o, _ = gated_kda(**inputs, implementation="triton")
    for cut in (1, 40, 64, 99):
        changed = {n: x.clone() for n, x in inputs.items()}
        for name in ("q", "k", "v", "z", "b"):
            changed[name][cut:] = 7.0 * changed[name][cut:] - 1.0
        assert torch.equal(gated_kda(**changed, implementation="triton")[0][:cut], o[:cut])


def test_a_sequence_is_bitwise_the_same_alone_and_packed():
    inputs = _single(_inputs([5, 90, 3], 1, 64))
    o, S = gated_kda(**inputs, implementation="triton")
    alone = {n: x[5:95] for n, x in inputs.items() if n in ("q", "k", "v", "z", "b")}
    alone |= {"A_log": inputs["A_log"], "dt_bias": inputs["dt_bias"]}
    alone |= {"cu_seqlens": torch.tensor([0, 90], dtype=torch.int32)}
    alone |= {"initial_state": inputs["initial_state"][1:2]}
    o_alone, S_alone = gated_kda(**alone, implementation="triton")
    assert torch.equal(o_alone, o[5:95]) and torch.equal(S_alone[0], S[1])


def test_inputs_may_be_views_of_one_projection():
    inputs = _single(_inputs([50], 2, 64))
    together = torch.stack([inputs["q"], inputs["k"], inputs["v"]], dim=1)
    views = dict(zip("qkv", together.unbind(1), strict=True))
    o, S = gated_kda(**inputs, implementation="triton")
    o_views, S_views = gated_kda(**(inputs | views), implementation="triton")
    assert torch.equal(o, o_views) and torch.equal(S, S_views)


@pytest.mark.parametrize("name", ["A_log", "cu_seqlens", "checkpoint_at"])
def test_a_vector_may_be_a_column_of_a_table(name):
    inputs = _single(_inputs([5, 4], 2, 64))
    inputs["checkpoint_at"] = torch.tensor([5, 9], dtype=torch.int32)
    column = torch.stack([inputs[name], torch.zeros_like(inputs[name])], 1)[:, 0]
    for x, y in zip(
        gated_kda(**(inputs | {name: column}), implementation="triton"),
        gated_kda(**inputs, implementation="triton"),
        strict=True,
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "initial_state"])
def test_kernels_take_nothing_in_float64(name):
    inputs = _single(_inputs([3], 1, 64))
    with pytest.raises(KernelUnavailable, match="gated_kda"):
        gated_kda(**(inputs | {name: inputs[name].double()}), implementation="triton")


def test_more_sequences_than_a_grid_has_programs_are_not_for_kernels():
    inputs = _single(_inputs([1], 1, 64)) | {"initial_state": None}
    inputs["cu_seqlens"] = torch.tensor([0] + [1] * 65536, dtype=torch.int32)
    with pytest.raises(KernelUnavailable, match="gated_kda"):
        gated_kda(**inputs, implementation="triton")


def test_a_state_is_refused_alike_with_and_without_kernels():
    inputs = _single(_inputs([3], 1, 64))
    for state in (inputs["initial_state"].bfloat16(), inputs["initial_state"].to("meta")):
        for implementation in ("eager", "triton"):
            with pytest.raises(InvalidInput, match="gated_kda: initial_state"):
                gated_kda(**(inputs | {"initial_state": state}), implementation=implementation)


def test_a_checkpoint_off_the_grid_is_refused_or_not_a_number():
    inputs = _single(_inputs([70], 1, 64))
    for end in (0, 30, 71):
        at = torch.tensor([end], dtype=torch.int32)
        with pytest.raises(InvalidInput, match="checkpoint_at"):
            gated_kda(**inputs, checkpoint_at=at, implementation="eager")
        assert gated_kda(**inputs, checkpoint_at=at, implementation="triton")[2].isnan().all()


def test_shapes_that_do_not_fit_are_named():
    inputs = _single(_inputs([4], 1, 64))
    with pytest.raises(InvalidInput, match=r"dt_bias \(1, 63\)"):
        gated_kda(**(inputs | {"dt_bias": inputs["dt_bias"][:, 1:]}))
    with pytest.raises(InvalidInput, match="initial_state"):
        gated_kda(**(inputs | {"initial_state": inputs["initial_state"][:, :, 1:]}))
    with pytest.raises(KernelUnavailable, match="gated_kda"):
        gated_kda(**(inputs | {"v": inputs["v"][:, :, :32], "initial_state": None}), implementation="triton")


def test_the_operator_passes_opcheck():
    from openk3.ops.kda.kernels.operator import _forward

    inputs = _single(_inputs([3], 1, 64))
    *tensors, cu_seqlens, state = inputs.values()
    tensors = [x.requires_grad_() for x in tensors]
    torch.library.opcheck(_forward, (*tensors, cu_seqlens, state, None, -5.0, 0.125, True))


def test_gradients_of_the_gate_have_the_dtypes_of_its_weights():
    from openk3.ops.kda.kernels.operator import _backward

    inputs = _single(_inputs([3], 1, 64))
    *tensors, cu_seqlens, state = inputs.values()
    tensors = [*tensors[:5], *(x.bfloat16() for x in tensors[5:])]
    o = torch.ones_like(inputs["v"])
    arguments = (*tensors, cu_seqlens, state, o, o, state, -5.0, 0.125, True)
    torch.library.opcheck(_backward, arguments, test_utils="test_faketensor")


def test_no_head_is_nothing_to_do():
    inputs = _single(_inputs([5, 0], 0, 64))
    o, S = gated_kda(**inputs)
    assert (o.shape, S.shape) == ((5, 0, 64), (2, 0, 64, 64))
    with pytest.raises(KernelUnavailable):
        gated_kda(**inputs, implementation="triton")
