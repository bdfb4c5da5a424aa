"""A step on a card is taken apart completely: every kernel has a part, and parts and idle time sum up."""

from __future__ import annotations

import pytest
import torch

from openk3.train.profile import parts, profile
from openk3.train.recipes import load_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("recompute", ["false", "true"])
def test_every_kernel_of_a_step_has_a_part(recompute):
    fields = {"train.device": "cuda", "train.precision": "bf16", "train.recompute": recompute}
    found = profile(load_recipe("nano", fields), "nano", steps=2)
    seconds = {(item.part, item.phase): item.seconds for item in found.items}
    measured = found.measured
    assert sum(seconds.values()) + measured.idle == pytest.approx(measured.whole, rel=1e-6)
    for part in set(parts.MODEL_PARTS) - {parts.RESIDUAL, parts.MTP}:
        assert seconds.get((part, "forward")), part
        if part != parts.EXPERT_DISPATCH:  # its gradients are taken by the experts' and the router's kernels
            assert seconds.get((part, "backward")), part
    for part in (parts.CLIPPING, parts.NEWTON_SCHULZ, parts.UPDATE, parts.BALANCE):
        assert seconds.get((part, "step")), part
    busy = measured.whole - measured.idle
    assert measured.unknown < 0.01 * busy + seconds.get((parts.COPIES, "step"), 0.0)
    assert seconds.get((parts.OTHER, "step"), 0.0) < 0.1 * busy
