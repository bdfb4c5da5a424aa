"""Gradient norm and clipping, against one concatenated float64 vector."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_k3 import parameters, set_gradients, tiny_config

from openk3.errors import InvalidInput, TrainingDiverged
from openk3.optim import clip_grad_norm, clip_scale, global_norm, grad_norm, nonfinite_gradients


def exact_norm(named) -> float:
    return float(torch.cat([p.grad.double().flatten() for p in named.values() if p.grad is not None]).norm())


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-13), (torch.bfloat16, 1e-6)]
)
def test_the_norm_is_that_of_all_gradients_as_one_vector(dtype, limit):
    named = parameters(tiny_config(), dtype)
    set_gradients(named, seed=1)
    named["mtp.eh_proj.weight"].grad = None
    assert grad_norm(named.items()) == pytest.approx(exact_norm(named), rel=limit)


def test_half_precision_gradients_do_not_overflow_the_sum():
    p = torch.nn.Parameter(torch.zeros(4096, dtype=torch.float16))
    p.grad = torch.full_like(p, 6e4)
    assert grad_norm([("p", p)]) == pytest.approx(6e4 * 64, rel=1e-3)


def test_larger_gradients_are_scaled_to_the_bound_and_keep_their_direction():
    named = parameters(tiny_config(), torch.float64)
    set_gradients(named, seed=1)
    before = {name: p.grad.clone() for name, p in named.items()}
    exact = exact_norm(named)
    norm = clip_grad_norm(named.items(), 0.5)
    assert norm == pytest.approx(exact, rel=1e-12)
    assert norm > 0.5
    assert exact_norm(named) == pytest.approx(0.5, rel=1e-12)
    for name, p in named.items():
        assert torch.allclose(p.grad, before[name] * (0.5 / norm), rtol=1e-12, atol=0)


def test_smaller_gradients_keep_every_bit():
    named = parameters(tiny_config())
    set_gradients(named, seed=1)
    before = {name: p.grad.clone() for name, p in named.items()}
    norm = clip_grad_norm(named.items(), 1e6)
    assert norm < 1e6
    assert clip_grad_norm(named.items(), math.inf) == norm
    assert all(torch.equal(p.grad, before[name]) for name, p in named.items())


def test_a_norm_known_from_elsewhere_is_taken_as_it_is():
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    p.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert clip_grad_norm([("p", p)], 1.0, norm=10.0) == 10.0
    assert torch.allclose(p.grad, torch.tensor([0.3, 0.4], dtype=torch.float64))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_named_and_nothing_is_touched(bad):
    named = parameters(tiny_config())
    set_gradients(named, seed=1)
    culprit = "layers.2.self_attn.k_proj.weight"
    named[culprit].grad[0, 0] = bad
    before = {name: p.grad.clone() for name, p in named.items()}
    assert not math.isfinite(grad_norm(named.items()))
    assert nonfinite_gradients(named.items()) == [culprit]
    with pytest.raises(TrainingDiverged, match=culprit):
        clip_grad_norm(named.items(), 1.0)
    assert all(torch.equal(p.grad.nan_to_num(), before[name].nan_to_num()) for name, p in named.items())


def test_no_gradients_have_norm_zero():
    assert clip_grad_norm(parameters(tiny_config()).items(), 1.0) == 0.0


def test_a_bound_that_is_not_positive_is_refused():
    with pytest.raises(InvalidInput, match="max_norm must be positive, got 0"):
        clip_grad_norm([], 0.0)


def test_the_norm_and_the_clip_as_tensors_are_those_of_the_host_to_the_bit():
    named = parameters(tiny_config())
    set_gradients(named, seed=1)
    norm = global_norm(named.items())
    assert norm.dtype == torch.float64 and float(norm) == grad_norm(named.items())
    assert float(clip_scale(norm, 0.5)) == 0.5 / grad_norm(named.items())
    assert float(global_norm([])) == 0


@pytest.mark.parametrize(
    ("norm", "most", "scale"),
    [(0.0, 1.0, 1.0), (0.5, 1.0, 1.0), (4.0, 1.0, 0.25), (4.0, math.inf, 1.0), (math.inf, 1.0, 0.0)],
)
def test_the_clip_of_a_norm(norm, most, scale):
    assert float(clip_scale(torch.tensor(norm), most)) == scale


def test_the_clip_of_a_norm_that_is_not_finite_skips():
    for norm, most in ((math.nan, 1.0), (math.nan, math.inf), (math.inf, math.inf)):
        assert math.isnan(clip_scale(torch.tensor(norm), most))
    with pytest.raises(InvalidInput, match="must be positive"):
        clip_scale(torch.tensor(1.0), 0.0)
