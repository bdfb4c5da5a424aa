"""The routed experts from MXFP4 weights in plain PyTorch: expert after expert, each decoded for its rows."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional as F

from openk3.ops.activation import Activation
from openk3.ops.moe import reference
from openk3.ops.moe.combine import combine
from openk3.ops.moe.mx import MxExperts
from openk3.ops.moe.plan import DispatchPlan

Tensor = torch.Tensor


def mx_expert_ffn(
    x: Tensor, weights: Tensor, plan: DispatchPlan, experts: MxExperts, activation: Activation
) -> Tensor:
    """See `openk3.ops.moe.mx_expert_ffn`. It asks for the counts: a GPU is waited for."""
    out = x.new_empty(len(plan.tokens), x.shape[1])
    offsets = plan.offsets.tolist()
    for e, (first, last) in enumerate(pairwise(offsets)):
        if first == last:
            continue
        w1, w3, w2 = experts.decoded(e, x.dtype)
        rows = x[plan.tokens[first:last]]
        hidden = activation.forward(F.linear(rows, w1), F.linear(rows, w3))
        out[first:last] = F.linear(hidden, w2)
    return combine(out, plan, weights).to(x.dtype)


def mx_expert_ffn_reference(
    x: Tensor, weights: Tensor, plan: DispatchPlan, experts: MxExperts, activation: Activation
) -> Tensor:
    """See `openk3.ops.moe.mx_expert_ffn`: every expert on every token, by decoded weights."""
    decoded = [experts.decoded(e, x.dtype) for e in range(len(experts.w13))]
    w1, w3, w2 = (torch.stack(w) for w in zip(*decoded, strict=True))
    return reference.expert_ffn(x, weights, plan, w1, w3, w2, activation)
