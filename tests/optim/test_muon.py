"""Muon: against torch.optim.Muon, against its own parts one by one, and head against head."""

from __future__ import annotations

import pytest
import torch
from tiny_k3 import parameters, set_gradients, tiny_config

from openk3.optim import COEFFICIENTS, OptimConfig, Optimizer, muon, orthogonalize
from openk3.optim.rules import assign

JORDAN = COEFFICIENTS["jordan"].triples[0]
WHOLE = ["layers.0.mlp.gate_proj.weight", "layers.0.mlp.down_proj.weight", "layers.0.self_attn.o_proj.weight"]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def steps_of(optimizer_step, named, count=5):
    for i in range(count):
        set_gradients(named, seed=i)
        optimizer_step()


def copy_of(named):
    return {name: torch.nn.Parameter(p.detach().clone()) for name, p in named.items()}


def whole_matrices(dtype):
    return {name: p for name, p in parameters(tiny_config(), dtype).items() if name in WHOLE}


def against_torch(dtype, config, nesterov=True):
    """Movement of each whole matrix over five steps: ours, torch.optim.Muon's."""
    start = whole_matrices(dtype)
    ours, theirs = copy_of(start), copy_of(start)
    optimizer = Optimizer(ours.items(), config, tiny_config())
    peer = torch.optim.Muon(
        theirs.values(), lr=0.02, weight_decay=0.1, ns_coefficients=JORDAN, nesterov=nesterov,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    steps_of(lambda: optimizer.step(0.02), ours)
    steps_of(peer.step, theirs)
    return [(ours[name] - start[name], theirs[name] - start[name]) for name in WHOLE]


def test_a_whole_matrix_moves_as_under_torch_muon_within_bfloat16():
    """torch rounds the norm to bfloat16 as well, so the two agree to a few of its steps."""
    for ours, theirs in against_torch(torch.float32, OptimConfig(ns_dtype="bfloat16")):
        assert relative_error(ours, theirs) < 0.03


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_whole_matrix_moves_as_under_torch_muon_in_float64(nesterov, monkeypatch):
    """The same algorithm to the last digits, once torch's cast to bfloat16 is taken out of the way."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    for ours, theirs in against_torch(torch.float64, OptimConfig(nesterov=nesterov), nesterov):
        assert relative_error(ours, theirs) < 1e-12


@pytest.mark.parametrize("nesterov", [True, False])
def test_every_block_moves_by_the_equation(nesterov):
    """W <- W - lr (0.2 sqrt(max(R, C)) O + decay W) with O from M, block by block, two steps, in float64."""
    model, config = tiny_config(), OptimConfig(nesterov=nesterov, weight_decay=0.3)
    named = parameters(model, torch.float64)
    expected = copy_of(named)
    splits = {n: t.split for n, t in assign({n: p.shape for n, p in named.items()}, config, model).items()}
    momentum = {name: torch.zeros_like(p) for name, p in named.items()}
    optimizer = Optimizer(named.items(), config, model)
    for seed in range(2):
        set_gradients(named, seed=seed)
        optimizer.step(0.01)
        for name, split in splits.items():
            if split is None:
                continue
            grad, M = named[name].grad, momentum[name]
            M.mul_(0.95).add_(0.05 * grad)
            direction = 0.95 * M + 0.05 * grad if nesterov else M
            with torch.no_grad():
                expected[name] *= 1 - 0.01 * 0.3
                for W, D in zip(split.blocks(expected[name].data), split.blocks(direction), strict=True):
                    for w, d in zip(W, D, strict=True):
                        w -= 0.01 * 0.2 * max(w.shape) ** 0.5 * orthogonalize([d[None]])[0][0]
    for name, split in splits.items():
        if split is not None:
            assert relative_error(named[name], expected[name]) < 1e-13


@pytest.mark.parametrize("model", [tiny_config(), tiny_config(q_lora_rank=16, low_rank_gate=True)])
@pytest.mark.parametrize(
    "config", [OptimConfig(), OptimConfig(ns_dtype="bfloat16"), OptimConfig(per_head=False)]
)
def test_all_parameters_together_move_bitwise_as_each_alone(model, config):
    start = parameters(model)
    together, alone = copy_of(start), copy_of(start)
    optimizers = [Optimizer(together.items(), config, model)]
    for _ in range(3):
        set_gradients(together, seed=5)
        optimizers[0].step(0.01)
    singles = [Optimizer([item], config, model) for item in alone.items()]
    for _ in range(3):
        set_gradients(alone, seed=5)
        for single in singles:
            single.step(0.01)
    assert all(torch.equal(together[name], alone[name]) for name in start)
    assert any(not torch.equal(together[name], start[name]) for name in start)


def test_heads_together_move_bitwise_as_a_loop_over_heads():
    """The update of a per-head parameter, rebuilt with one Newton-Schulz call per head."""
    model, name = tiny_config(), "layers.3.self_attn.kv_b_proj.weight"
    named = {name: parameters(model)[name]}
    start = named[name].detach().clone()
    set_gradients(named, seed=1)
    Optimizer(named.items(), OptimConfig(weight_decay=0.0, momentum=0.0), model).step(0.5)
    for head in range(4):
        rows = slice(24 * head, 24 * head + 10), slice(24 * head + 10, 24 * head + 24)
        for band in rows:
            factor = orthogonalize([named[name].grad[None, band].clone()])[0][0]
            expected = start[band].add(factor, alpha=-0.5 * 0.2 * 20**0.5)
            assert torch.equal(named[name][band], expected)


def test_the_size_of_a_bucket_changes_no_bit(monkeypatch):
    start = parameters(tiny_config())
    results = []
    for elements in (2**27, 5000, 1):
        monkeypatch.setattr(muon, "BUCKET_ELEMENTS", elements)
        named = copy_of(start)
        optimizer = Optimizer(named.items(), OptimConfig(), tiny_config())
        steps_of(lambda optimizer=optimizer: optimizer.step(0.01), named, 2)
        results.append(torch.cat([p.detach().flatten() for p in named.values()]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def head_norms(config: OptimConfig, gradient: torch.Tensor) -> torch.Tensor:
    """Norm of each head's update of a KDA key projection."""
    model, name = tiny_config(), "layers.0.self_attn.k_proj.weight"
    p = torch.nn.Parameter(torch.zeros(36, 40))
    p.grad = gradient.view(36, 40)
    Optimizer([(name, p)], config, model).step(1.0)
    return p.detach().view(3, -1).norm(dim=1)


@pytest.mark.parametrize("shared", [False, True], ids=["independent heads", "heads that want the same"])
def test_one_head_with_a_hundred_times_the_gradient_does_not_drown_the_others(shared):
    torch.manual_seed(0)
    gradient = torch.randn(3, 12, 40)
    if shared:  # all heads read the same few input directions, as trained attention does
        gradient = torch.randn(3, 12, 6) @ torch.randn(6, 40) + 0.05 * gradient
    gradient[1] *= 100
    per_head, full = head_norms(OptimConfig(), gradient), head_norms(OptimConfig(per_head=False), gradient)
    ratio, full_ratio = float(per_head.max() / per_head.min()), float(full.max() / full.min())
    figures = f"largest over smallest head update: per head {ratio:.3f}, full matrix {full_ratio:.3f}"
    print(figures)  # noqa: T201  the contrast is for the reader
    assert ratio < 1.5, figures
    assert full_ratio > 10 or not shared, figures


def test_a_head_moves_by_adamws_rms():
    """Moonlight's scale: with the exact factor, every block's update has RMS 0.2 lr where it is wide."""
    torch.manual_seed(0)
    config = OptimConfig(coefficients="exact")
    norms = head_norms(config, torch.randn(3, 12, 40))
    assert torch.allclose(norms / (12 * 40) ** 0.5, torch.tensor(0.2), rtol=1e-4)
