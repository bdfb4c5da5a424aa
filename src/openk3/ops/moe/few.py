"""The routed experts for a few tokens, as in decoding: expert after expert, each weight read where it lies.

Grouping rows by expert pays when experts have many rows; for one token it costs several times its products.
Forward only, for the CPU, where the choice of experts can be looked at for nothing.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from openk3.ops.activation import Activation
from openk3.ops.moe.route import Routing
from openk3.ops.precision import cast, own_dtypes, wide

Tensor = torch.Tensor


@own_dtypes
def expert_ffn_few(
    x: Tensor, routing: Routing, w1: Tensor, w3: Tensor, w2: Tensor, activation: Activation
) -> Tensor:
    """`expert_ffn` without a plan and without gradients: `[T, l]` to `[T, l]`.

    As there the sum over slots runs in at least fp32.
    """
    if not len(x):
        return torch.empty_like(x)
    p = cast(routing.weights, wide(x.dtype))
    rows = []
    for t, chosen in enumerate(routing.ids.tolist()):
        row = x[t : t + 1]
        gate = torch.cat([F.linear(row, w1[e]) for e in chosen])
        up = torch.cat([F.linear(row, w3[e]) for e in chosen])
        hidden = activation.forward(gate, up)
        out = torch.cat([F.linear(hidden[slot : slot + 1], w2[e]) for slot, e in enumerate(chosen)])
        rows.append(p[t : t + 1] @ cast(out, p.dtype))
    return cast(rows[0] if len(rows) == 1 else torch.cat(rows), x.dtype)
