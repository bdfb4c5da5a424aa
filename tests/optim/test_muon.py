"""Muon: against torch.optim.Muon, against its own parts one by one, and head against head."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tiny_k3 import parameters, set_gradients, tiny_config

from openk3.model import K3, initialise
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


# Blocks without a gradient: experts that no token chose.

EXPERTS = "layers.1.block_sparse_moe.experts.w1"


def expert_steps(
    config: OptimConfig, absent: list[set[int]]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The experts' weights and momenta before and after each step; in step i `absent[i]` have no gradient."""
    p = parameters(tiny_config(), torch.float64)[EXPERTS]
    optimizer = Optimizer([(EXPERTS, p)], config, tiny_config())
    momentum = optimizer.state_dict()[EXPERTS]["momentum"]
    weights, momenta = [p.detach().clone()], [momentum.clone()]
    for seed, experts in enumerate(absent):
        set_gradients({EXPERTS: p}, seed=seed)
        p.grad[list(experts)] = 0
        optimizer.step(0.01)
        weights.append(p.detach().clone())
        momenta.append(momentum.clone())
    return weights, momenta


@pytest.mark.parametrize("nesterov", [True, False])
def test_an_expert_without_a_gradient_neither_moves_nor_decays_and_its_momentum_fades(nesterov):
    config = OptimConfig(nesterov=nesterov, weight_decay=0.3)
    weights, momenta = expert_steps(config, [set(), {3, 7}, {3}, set()])
    moved = [[not torch.equal(a[e], b[e]) for a, b in pairwise(weights)] for e in (0, 3, 7)]
    assert moved == [[True] * 4, [True, False, False, True], [True, False, True, True]]
    for step in (1, 2):
        assert torch.allclose(momenta[step + 1][3], 0.95 * momenta[step][3], rtol=1e-12)


def test_the_other_experts_move_bitwise_as_if_all_had_a_gradient():
    weights, _ = expert_steps(OptimConfig(), [set(), {3, 7}])
    everyone, _ = expert_steps(OptimConfig(), [set(), set()])
    same = [torch.equal(a, b) for a, b in zip(weights[-1], everyone[-1], strict=True)]
    assert same == [expert not in (3, 7) for expert in range(25)]


def test_an_expert_that_returns_follows_its_new_gradient():
    """After 100 steps away 0.6% of the momentum is left, a tenth of what one new gradient brings."""
    p = parameters(tiny_config(), torch.float64)[EXPERTS]
    optimizer = Optimizer([(EXPERTS, p)], OptimConfig(weight_decay=0.0), tiny_config())
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randn(p.shape, generator=generator, dtype=p.dtype) for _ in range(2))
    for gradient in [old] * 50 + [torch.zeros_like(p)] * 100 + [new]:
        before, p.grad = p.detach().clone(), gradient
        optimizer.step(0.01)
    moved = (before - p.detach()).flatten(1)
    toward_new, toward_old = (
        torch.cosine_similarity(moved, orthogonalize([gradient])[0].flatten(1)) for gradient in (new, old)
    )
    assert toward_new.min() > 0.95
    assert toward_old.abs().max() < 0.3


def test_experts_of_a_model_that_are_not_routed_to_stay_as_they_are():
    """The whole way: a router that never chooses an expert, its exact zeros, the optimizer's step."""
    model = K3(tiny_config())
    initialise(model, seed=0)
    optimizer = Optimizer(model.named_parameters(), OptimConfig(), tiny_config())
    moe = model.layers[1].block_sparse_moe
    tokens, cu_seqlens = torch.arange(40) % 50, torch.tensor([0, 40], dtype=torch.int32)
    history = []
    for chosen in (True, False, False):
        moe.gate.e_score_correction_bias[4] = 2.0 if chosen else -2.0  # scores lie in (0, 1)
        loss = model.loss(tokens, tokens.roll(-1), cu_seqlens)
        (loss.next_token / loss.count).backward()
        optimizer.step(0.01)
        optimizer.zero_grad()
        history.append([w.detach().clone() for w in (moe.experts.w1, moe.experts.w2, moe.experts.w3)])
    for before, after in pairwise(history):
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a[4], b[4])
            assert not torch.equal(a, b)
