"""One token of each sequence through the KDA recurrence: what decoding does (report §2.1.1 eq. 1)."""

from __future__ import annotations

import torch

from openk3.ops.precision import cast

Tensor = torch.Tensor


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See `openk3.ops.kda.kda_step`. Computes in the dtype of `state`.

    Products over so little are fastest as multiply and sum.
    """
    out_dtype = v.dtype
    q, k, v, g, beta = (cast(x, state.dtype) for x in (q, k, v, g, beta))
    k = k.unsqueeze(2)  # [N, H, 1, K], beside a state [N, H, V, K]
    state = state * g.exp().unsqueeze(2)
    error = v - (state * k).sum(-1)
    state = torch.addcmul(state, error.unsqueeze(-1), beta[:, :, None, None] * k)
    o = (state * q.unsqueeze(2)).sum(-1) * scale
    return cast(o, out_dtype), state
