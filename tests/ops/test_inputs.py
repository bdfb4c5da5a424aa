"""Tensors of another kind or device are refused by name, before anything broadcasts or casts them."""

from __future__ import annotations

import pytest
import torch

from openk3.errors import InvalidInput
from openk3.ops.attnres import attnres_mix
from openk3.ops.inputs import check_floating
from openk3.ops.kda_gate import kda_gate
from openk3.ops.moe import Activation, expert_ffn, plan, route
from openk3.ops.norm import gated_rms_norm, rms_norm
from openk3.ops.quantile_balance import (
    alternating_solver,
    bias_from_histogram,
    exact_bias,
    required_bias_histogram,
    sign_update,
)
from openk3.ops.short_conv import short_conv

T, E, K, L, F = 6, 4, 2, 5, 3
IDS = torch.tensor([[0, 1], [1, 2], [2, 3], [0, 3], [1, 3], [0, 2]])
CALLS = {
    route: {"logits": torch.rand(T, E), "bias": torch.rand(E), "k": K},
    expert_ffn: {
        "x": torch.rand(T, L),
        "weights": torch.rand(T, K),
        "plan": plan(IDS, E),
        "w1": torch.rand(E, F, L),
        "w3": torch.rand(E, F, L),
        "w2": torch.rand(E, L, F),
        "activation": Activation("situ"),
    },
    required_bias_histogram: {
        "scores": torch.rand(T, E),
        "cutoff": torch.rand(T),
        "bias": torch.rand(E),
    },
    exact_bias: {"scores": torch.rand(T, E), "cutoff": torch.rand(T), "k": K},
    sign_update: {"bias": torch.rand(E), "load": torch.arange(E), "step": 0.1},
    kda_gate: {"z": torch.rand(T, 2, 3), "A_log": torch.rand(2), "dt_bias": torch.rand(2, 3)},
    rms_norm: {"x": torch.rand(T, L), "weight": torch.rand(L), "eps": 1e-5},
    gated_rms_norm: {
        "x": torch.rand(T, L),
        "gate_logits": torch.rand(T, L),
        "weight": torch.rand(L),
        "eps": 1e-5,
    },
    attnres_mix: {
        "sources": [torch.rand(T, L)],
        "query": torch.rand(L),
        "key_gain": torch.rand(L),
    },
    short_conv: {
        "x": torch.rand(T, L),
        "weight": torch.rand(L, 4),
        "cu_seqlens": torch.tensor([0, T], dtype=torch.int32),
    },
}
FLOATS = [
    (operator, name)
    for operator, arguments in CALLS.items()
    for name, value in arguments.items()
    if isinstance(value, torch.Tensor) and value.is_floating_point()
]


@pytest.mark.parametrize(("operator", "name"), FLOATS)
@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.complex64, "meta"])
def test_every_floating_input_must_be_one_on_the_same_device(operator, name, kind):
    arguments = CALLS[operator]
    operator(**arguments)
    with pytest.raises(InvalidInput, match=name):
        operator(**arguments | {name: arguments[name].to(kind)})


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (exact_bias, {"scores": torch.rand(T, E), "cutoff": torch.rand(1), "k": K}),
        (exact_bias, {"scores": torch.rand(T, E), "cutoff": torch.rand(T, 1), "k": K}),
        (sign_update, {"bias": torch.rand(1), "load": torch.arange(E), "step": 0.1}),
        (sign_update, {"bias": torch.rand(E), "load": torch.tensor(3), "step": 0.1}),
        (bias_from_histogram, {"histogram": torch.ones(E, dtype=torch.int64), "bias": torch.rand(E), "k": K}),
        (bias_from_histogram, {"histogram": torch.rand(E, 9), "bias": torch.rand(E), "k": K}),
        (alternating_solver, {"scores": torch.rand(T), "k": 1, "iterations": 3}),
        (alternating_solver, {"scores": torch.rand(T, E), "k": 0, "iterations": 3}),
        (alternating_solver, {"scores": torch.rand(T, E), "k": K, "iterations": -1}),
        (
            short_conv,
            {
                "x": torch.rand(T, L),
                "weight": torch.rand(L, 4),
                "cu_seqlens": torch.tensor([0, T], dtype=torch.int32, device="meta"),
            },
        ),
    ],
)
def test_shapes_that_would_broadcast_or_hang_are_refused(operator, arguments):
    with pytest.raises(InvalidInput, match=operator.__name__):
        operator(**arguments)


def test_an_argument_that_was_not_given_is_passed_over():
    check_floating("op", x=torch.rand(2), state=None)
