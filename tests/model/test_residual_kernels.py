"""The residual stream through kernels: rows of the bank go from reader to reader, gradients meet there."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from model.tiny import built, changed, packed
from openk3.config import AttnResConfig
from openk3.model import residual
from openk3.ops.attnres import attnres_add_mix_norm
from openk3.ops.dispatch import triton_problem
from ops.closeness import relative_error

pytestmark = pytest.mark.skipif(
    triton_problem("cpu") is not None or torch.cuda.is_available(), reason="for Triton's interpreter"
)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "blocks", [AttnResConfig(kind="full"), AttnResConfig(block_size=1)], ids=["full", "1"]
)
def test_gradients_of_a_model_whose_rows_are_handed_on(monkeypatch, blocks, recompute):
    """Over two micro-batches, beside the same model in float64 that hands on nothing."""
    config = changed(attn_res=blocks, num_layers=3, moe=None, dense_layers=3)
    calls = []

    def by_kernels(bank, *arguments, **options):
        made = attnres_add_mix_norm(bank, *arguments, **options, implementation="triton")
        calls.append((bank, made.bank))
        return made

    def gradients(dtype):
        model = built(config, dtype=dtype, recompute=recompute)
        model.load_state_dict(built(config).state_dict())  # each dtype draws numbers of its own
        for seed in (0, 1):
            tokens, cu = packed([5, 4], 61, seed)
            model.loss(tokens, tokens.roll(-1), cu).total.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    exact = gradients(torch.float64)
    monkeypatch.setattr(residual, "attnres_add_mix_norm", by_kernels)
    mine = gradients(torch.float32)
    mixes = 2 * 3  # all sublayers but the first, and the output
    assert len(calls) == 2 * (mixes + (mixes - 1 if recompute else 0))
    for (_, handed), (taken, _) in pairwise(calls[:mixes]):
        assert all(a is b for a, b in zip(handed, taken, strict=False))
    assert mine.keys() == exact.keys()
    for name, gradient in exact.items():
        assert relative_error(mine[name], gradient) < 2e-4, name
