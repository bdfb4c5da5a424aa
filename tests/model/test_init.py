"""Initialisation: nothing is left as allocated, and the check sees it when something is."""

from __future__ import annotations

import math

import pytest
import torch

from model.tiny import BASE, VARIANTS, changed
from openk3.config import PRESETS
from openk3.errors import InvalidInput
from openk3.model import K3, check, initialise
from openk3.ops.kda_gate import kda_gate


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_of_every_variant_starts_as_the_table_says(variant):
    model = K3(VARIANTS[variant])
    assert len(check(model)) >= len(list(model.parameters()))  # all NaN before
    initialise(model, 0)
    assert check(model) == []


@pytest.mark.parametrize("name", ["nano", "micro"])
def test_presets_pass_their_own_check(name):
    model = K3(PRESETS[name])
    for seed in range(3):
        initialise(model, seed)
        assert check(model) == []


@pytest.mark.parametrize(
    ("name", "spoil", "finding"),
    [
        ("layers.0.self_attn.dt_bias", lambda t: t.zero_(), "dt_bias: mean 0"),
        ("layers.1.self_attn.A_log", lambda t: t.fill_(float("nan")), "not finite"),
        ("layers.3.self_attn.kv_b_proj.weight", lambda t: t.mul_(3), "should be normal"),
        ("layers.2.mlp_res_proj.weight", lambda t: t.normal_(0, 0.02), "should be 0"),
        ("norm.weight", lambda t: t[0].zero_(), "should be 1"),
        ("layers.1.block_sparse_moe.experts.w2", lambda t: t[1:].zero_(), "should be normal"),
        ("layers.1.block_sparse_moe.gate.e_score_correction_bias", lambda t: t.add_(0.1), "should be 0"),
    ],
)
def test_a_spoiled_tensor_is_named(name, spoil, finding):
    model = K3(BASE)
    initialise(model, 0)
    with torch.no_grad():
        spoil(model.state_dict()[name])
    (line,) = check(model)
    assert line.startswith(name)
    assert finding in line


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_the_initial_step_is_log_uniform_under_the_gate_in_use(gate):
    """With no input, -g at A = 0 is the step itself: between 1e-3 and 1e-1, uniform in its logarithm."""
    config = changed(kda__gate=gate, kda__num_heads=64, kda__head_dim=64)
    model = K3(config)
    initialise(model, 0)
    bias = model.layers[0].self_attn.dt_bias.view(64, 64)
    bound = config.kda.gate_lower_bound if gate == "bounded" else None
    steps = -kda_gate(torch.zeros(1, 64, 64), torch.zeros(64), bias, lower_bound=bound).detach()
    position = (steps.log() - math.log(1e-3)) / math.log(100)
    assert float(position.min()) > -1e-3
    assert float(position.max()) < 1 + 1e-3
    expected = (torch.arange(4096) + 0.5) / 4096
    assert float((position.flatten().sort().values - expected).abs().max()) < 0.04  # Kolmogorov-Smirnov


def test_values_depend_on_seed_and_name_alone():
    whole, shallow = K3(BASE), K3(changed(num_layers=4, mla_layers=(4,)))
    initialise(whole, 3)
    torch.rand(7)  # the global stream plays no part
    initialise(shallow, 3)
    a, b = whole.state_dict(), shallow.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in b)
    other = K3(BASE)
    initialise(other, 4)
    assert not torch.equal(other.embed_tokens.weight, whole.embed_tokens.weight)


def test_an_experts_values_do_not_depend_on_how_many_there_are():
    """A rank that holds some of the experts starts them as one that holds all."""
    few, many = K3(changed(moe__num_experts=4)), K3(changed(moe__num_experts=9))
    for model in (few, many):
        initialise(model, 1)
    name = "layers.2.block_sparse_moe.experts.w3"
    assert torch.equal(few.state_dict()[name], many.state_dict()[name][:4])
    assert not torch.equal(few.state_dict()[name][0], few.state_dict()[name][1])


def test_a_tensor_without_a_rule_is_an_error():
    model = K3(BASE)
    model.register_parameter("stray", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(InvalidInput, match=r"no rule says how stray \(3,\) starts"):
        initialise(model, 0)
