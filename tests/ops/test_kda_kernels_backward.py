"""The backward kernels of KDA, interpreted, against autograd through the recurrence in float64.

What the forward kernels would hand over is made here from its definition, in float64.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from closeness import relative_error

from openk3.ops.dispatch import triton_problem
from openk3.ops.kda import kda
from openk3.ops.kda_gate import kda_gate
from openk3.ops.norm import l2_norm

if (problem := triton_problem("cpu")) is not None:
    pytest.skip(problem, allow_module_level=True)

from openk3.ops.kda.kernels.backward import backward
from openk3.ops.kda.kernels.plan import CHUNK, plan_chunks
from openk3.ops.kda.kernels.prepare import Prepared

Tensors = dict[str, torch.Tensor]
H = 2


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def draw(lengths: list[int], gate: float, K=64, V=64) -> Tensors:
    """Raw inputs in float64, with decay logits around `gate`."""
    T, N = sum(lengths), len(lengths)
    return {
        "q": 3 * torch.randn(T, H, K, dtype=torch.float64),
        "k": torch.randn(T, H, K, dtype=torch.float64),
        "v": torch.randn(T, H, V, dtype=torch.float64),
        "z": gate + torch.randn(T, H, K, dtype=torch.float64),
        "b": torch.randn(T, H, dtype=torch.float64),
        "A_log": 0.3 * torch.randn(H, dtype=torch.float64),
        "dt_bias": torch.randn(H, K, dtype=torch.float64),
        "initial_state": torch.randn(N, H, V, K, dtype=torch.float64),
    }


def packed(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def by_the_recurrence(inputs: Tensors, lengths: list[int], bound: float, d_o, d_final) -> Tensors:
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    g = kda_gate(
        leaves["z"], leaves["A_log"], leaves["dt_bias"], lower_bound=bound, implementation="reference"
    )
    o, final = kda(
        l2_norm(leaves["q"], implementation="reference"),
        l2_norm(leaves["k"], implementation="reference"),
        leaves["v"],
        g,
        leaves["b"].sigmoid(),
        packed(lengths),
        initial_state=leaves["initial_state"],
        implementation="reference",
    )
    grads = torch.autograd.grad([o, final], list(leaves.values()), [d_o, d_final])
    return {"o": o.detach(), **dict(zip(leaves, grads, strict=True))}


def forward_results(inputs: Tensors, lengths: list[int], bound: float):
    """`Prepared`, entering states and errors of every chunk by their definition, in float64."""
    q, k = (l2_norm(inputs[name], implementation="reference") for name in ("q", "k"))
    q = q * q.shape[-1] ** -0.5
    w = k * inputs["b"].sigmoid()[..., None]
    a = kda_gate(
        inputs["z"], inputs["A_log"], inputs["dt_bias"], lower_bound=bound, implementation="reference"
    )
    results: dict[str, list[torch.Tensor]] = {}
    bounds = packed(lengths).tolist()
    for n, (start, end) in enumerate(pairwise(bounds)):
        S = inputs["initial_state"][n]
        for first in range(start, end, CHUNK):
            rows = min(CHUNK, end - first)
            qc, kc, wc, vc, ac = (
                torch.nn.functional.pad(x[first : first + rows].transpose(0, 1), (0, 0, 0, CHUNK - rows))
                for x in (q, k, w, inputs["v"], a)
            )
            G = ac.cumsum(1)
            between = (G[:, :, None] - G[:, None]).clamp(max=0).exp()  # [H, i, j, K]
            A = torch.einsum("hik,hjk,hijk->hij", qc, wc, between).tril()
            L = torch.einsum("hik,hjk,hijk->hij", kc, wc, between).tril(-1)
            chunk = {
                "qd": qc * G.exp(),
                "kd": kc * G.exp(),
                "ke": wc * (G[:, -1:] - G).exp(),
                "inverse": torch.linalg.inv(torch.eye(CHUNK, dtype=L.dtype) + L),
                "attention": A,
                "decay": G[:, -1].exp(),
                "states": S,
            }
            chunk["errors"] = chunk["inverse"] @ (vc - chunk["kd"] @ S.mT)
            S = S * chunk["decay"][:, None] + chunk["errors"].mT @ chunk["ke"]
            for name, x in chunk.items():
                results.setdefault(name, []).append(x)
    return {name: torch.stack(x) for name, x in results.items()}


def by_the_kernels(inputs, lengths, bound, d_o, d_final, o, dtype=torch.float32) -> Tensors:
    plan = plan_chunks(packed(lengths), sum(lengths))
    results = {name: x.to(dtype) for name, x in forward_results(inputs, lengths, bound).items()}
    results["decay"] = results["decay"].float()
    states, errors = results.pop("states"), results.pop("errors")
    raw = [inputs[name].to(dtype) for name in ("q", "k", "v", "z", "b")]
    raw += [inputs[name].float() for name in ("A_log", "dt_bias")]
    scale = raw[0].shape[-1] ** -0.5
    grads = backward(
        *raw,
        o.to(dtype),
        Prepared(**results),
        states,
        errors,
        d_o.to(dtype),
        None if d_final is None else d_final.float(),
        plan,
        bound,
        scale,
    )
    return {**grads.inputs._asdict(), "v": grads.v, "initial_state": grads.initial_state}


@pytest.mark.parametrize("gate", [-8.0, 0.0, 12.0], ids=["open", "middle", "at the bound"])
def test_gradients_equal_those_of_the_recurrence(gate):
    lengths = [70, 1, 0, 64]
    inputs = draw(lengths, gate)
    d_o, d_final = torch.randn_like(inputs["v"]), torch.randn_like(inputs["initial_state"])
    expected = by_the_recurrence(inputs, lengths, -5.0, d_o, d_final)
    actual = by_the_kernels(inputs, lengths, -5.0, d_o, d_final, expected["o"])
    errors = {name: relative_error(x, expected[name]) for name, x in actual.items()}
    assert max(errors.values()) < 1e-4, errors


def test_small_gradients_are_as_exact_as_large_ones():
    """The loss's scale may make them tiny; at the bound, exponents inside a block are largest."""
    lengths = [40]
    inputs = draw(lengths, 12.0)
    d_o, d_final = torch.randn_like(inputs["v"]), torch.randn_like(inputs["initial_state"])
    expected = by_the_recurrence(inputs, lengths, -5.0, 1e-12 * d_o, 1e-12 * d_final)
    actual = by_the_kernels(inputs, lengths, -5.0, 1e-12 * d_o, 1e-12 * d_final, expected["o"])
    errors = {name: relative_error(x, expected[name]) for name, x in actual.items()}
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # Triton interpreted by NumPy
def test_a_large_state_is_read_behind_decays_whose_factor_alone_is_too_small_for_fp32():
    """Of rows 16 to 31 the middle lies 2^-159 below the start, but what they read 2^-68 to 2^-135."""
    inputs = draw([32], 0.0)
    inputs["A_log"].zero_(), inputs["dt_bias"].zero_()
    inputs["z"][:] = 40.0
    inputs["z"][14:16] = -60.0
    inputs["v"].zero_()
    inputs["initial_state"] *= 2.0**40
    d_o, d_final = torch.randn_like(inputs["v"]), torch.randn_like(inputs["initial_state"])
    expected = by_the_recurrence(inputs, [32], -5.0, d_o, d_final)
    actual = by_the_kernels(inputs, [32], -5.0, d_o, d_final, expected["o"])
    for name in ("q", "k"):
        for t in range(16, 22):
            assert relative_error(actual[name][t], expected[name][t]) < 1e-3, (name, t)


def test_a_gate_that_is_all_or_nothing_has_no_gradient_and_spoils_no_other():
    lengths = [40]
    inputs = draw(lengths, 0.0)
    inputs["A_log"] = torch.full_like(inputs["A_log"], 90.0)
    d_o = torch.randn_like(inputs["v"])
    nothing = torch.zeros_like(inputs["initial_state"])
    expected = by_the_recurrence(inputs, lengths, -5.0, d_o, nothing)
    actual = by_the_kernels(inputs, lengths, -5.0, d_o, None, expected["o"])
    for name in ("z", "A_log", "dt_bias"):
        assert torch.equal(actual.pop(name), torch.zeros_like(inputs[name], dtype=torch.float32))
    errors = {name: relative_error(x, expected[name]) for name, x in actual.items()}
    assert max(errors.values()) < 1e-4, errors
