"""LatentMoE as a layer: what a record is left with, what its seams see, and the same by kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model.tiny import BASE, VARIANTS, built, changed, packed
from openk3.model.protocols import LOCAL
from openk3.model.record import ForwardRecord
from openk3.ops.activation import Activation
from openk3.ops.dispatch import triton_problem
from openk3.ops.moe import entry
from ops.closeness import relative_error

interpreted = pytest.mark.skipif(
    triton_problem("cpu") is not None or torch.cuda.is_available(), reason="for Triton's interpreter"
)


def trained(model, tokens, cu, mask=None):
    """Loss, gradients by name, and the record."""
    record = ForwardRecord(token_mask=mask)
    model.zero_grad()
    loss = model.loss(tokens, tokens, cu, record=record).total
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, record


@pytest.mark.parametrize("name", ["released form", "kimi-linear form"])
def test_shared_experts_may_run_beside_the_routed_ones(name):
    """Whoever answers the seam, and in which order: the same bits."""
    calls = []

    def reversed_order(x, first, second):
        calls.append(x)
        beside = second(x)
        return first(x), beside

    tokens, cu = packed([7, 5], 61)
    loss, gradients, _ = trained(built(VARIANTS[name]).train(), tokens, cu)
    model = built(VARIANTS[name], seams=replace(LOCAL, overlap=reversed_order)).train()
    other, others, _ = trained(model, tokens, cu)
    assert len(calls) == sum(layer.sparse for layer in model.layers)
    assert torch.equal(loss, other)
    for n, gradient in gradients.items():
        assert relative_error(others[n], gradient) < 1e-6, n


def test_gate_and_up_by_one_product_compute_the_same(monkeypatch):
    tokens, cu = packed([7, 5], 61)
    model = built(BASE).train()
    loss, gradients, _ = trained(model, tokens, cu)
    taken = []
    monkeypatch.setattr(Activation, "takes_halves", lambda self, x: taken.append(x) or True)
    other, others, _ = trained(model, tokens, cu)
    assert taken
    assert relative_error(other, loss) < 1e-6
    for n, gradient in gradients.items():
        assert relative_error(others[n], gradient) < 1e-5, n


@interpreted
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("balancing", ["qb", "sign"])
def test_by_kernels_a_record_holds_the_same(monkeypatch, balancing, recompute):
    config = changed(moe__balancing=balancing, num_layers=2)
    tokens, cu = packed([9, 7], 61)
    mask = torch.arange(16) % 4 > 0
    loss, gradients, record = trained(
        built(config, dtype=torch.float32, recompute=recompute).train(), tokens, cu, mask
    )
    chosen = []
    monkeypatch.setattr(entry, "choose", lambda *_, **__: chosen.append(1) or "triton")
    other, others, mine = trained(
        built(config, dtype=torch.float32, recompute=recompute).train(), tokens, cu, mask
    )
    assert len(chosen) == (2 if recompute else 1) * len(record.load)
    assert mine.load.keys() == record.load.keys() and mine.histogram.keys() == record.histogram.keys()
    for layer, load in record.load.items():
        assert torch.equal(mine.load[layer], load)
        assert torch.equal(mine.chosen[layer][0], record.chosen[layer][0])
        assert (mine.chosen[layer][1] - record.chosen[layer][1]).abs().max() < 1e-6
    for layer, histogram in record.histogram.items():
        assert mine.histogram[layer].dtype == histogram.dtype
        moved = (mine.histogram[layer] - histogram).cumsum(1).abs()
        assert torch.equal(mine.histogram[layer].sum(1), histogram.sum(1)) and moved.sum() <= 1
    assert relative_error(other, loss) < 1e-6
    for n, gradient in gradients.items():
        assert relative_error(others[n], gradient) < 1e-4, n
