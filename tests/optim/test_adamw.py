"""AdamW, against torch.optim.AdamW."""

from __future__ import annotations

import pytest
import torch
from tiny_k3 import parameters, set_gradients, tiny_config

from openk3.optim import OptimConfig, Optimizer, describe
from openk3.optim.rules import assign


def torch_adamw(named, config, lr):
    """torch's optimizer with one group per parameter, so that decay and scale are each parameter's own."""
    treatments = assign({n: tuple(p.shape) for n, p in named.items()}, config, tiny_config())
    groups = [
        {"params": [p], "lr": lr * treatments[n].lr_scale, "weight_decay": treatments[n].weight_decay}
        for n, p in named.items()
    ]
    return torch.optim.AdamW(groups, betas=config.betas, eps=config.eps)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_every_parameter_moves_as_under_torch_adamw(dtype, limit):
    config = OptimConfig(
        optimizer="adamw", betas=(0.8, 0.97), eps=1e-6, weight_decay=0.2,
        embedding_lr_scale=0.3, vector_lr_scale=2.0,
    )  # fmt: skip
    start, ours, theirs = (parameters(tiny_config(), dtype) for _ in range(3))
    optimizer, peer = Optimizer(ours.items(), config, tiny_config()), torch_adamw(theirs, config, 0.01)
    for seed in range(6):
        for named in (ours, theirs):
            set_gradients(named, seed=seed)
            if seed in (0, 3):  # sits out steps, among them the first: its bias correction must lag
                named["mtp.eh_proj.weight"].grad = None
        optimizer.step(0.01)
        peer.step()
    for name, p in start.items():
        moved, expected = ours[name] - p, theirs[name] - p
        assert (moved - expected).norm() <= limit * expected.norm(), name


def test_under_muon_tables_and_vectors_still_move_as_under_torch_adamw():
    config = OptimConfig()
    start, ours, theirs = (parameters(tiny_config(), torch.float64) for _ in range(3))
    optimizer, peer = Optimizer(ours.items(), config, tiny_config()), torch_adamw(theirs, config, 0.01)
    for seed in range(3):
        set_gradients(ours, seed=seed)
        set_gradients(theirs, seed=seed)
        optimizer.step(0.01)
        peer.step()
    patterns = {
        row.pattern for row in describe(start.items(), config, tiny_config()) if row.method == "adamw"
    }
    treatments = assign({n: tuple(p.shape) for n, p in start.items()}, config, tiny_config())
    same = {n for n in start if torch.allclose(ours[n], theirs[n], rtol=1e-12, atol=1e-15)}
    assert same == {n for n, treatment in treatments.items() if treatment.rule.pattern in patterns}
