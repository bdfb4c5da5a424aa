"""The KDA recurrence as the report writes it (§2.1.1 eq. 1), token by token. The oracle for the other files.

States are `[K, V]` here, as in the report, and transposed at the door: V-first is everyone else's layout.
"""

from __future__ import annotations

from itertools import pairwise

import torch


def kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    bounds: list[int],
    scale: float,
    initial_state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S <- (I - beta k k^T) Diag(exp g) S + beta k v^T;  o = scale S^T q. See `openk3.ops.kda.kda`."""
    out_dtype = v.dtype
    tokens = list(zip(*(x.to(initial_state.dtype).unbind() for x in (q, k, v, g, beta)), strict=True))
    outputs, finals = [], []
    for n, (start, end) in enumerate(pairwise(bounds)):
        S = initial_state[n].mT  # [H, K, V]
        for q_t, k_t, v_t, g_t, beta_t in tokens[start:end]:
            S = g_t.exp()[..., None] * S
            error = v_t - torch.einsum("hkv,hk->hv", S, k_t)
            S = S + torch.einsum("h,hk,hv->hkv", beta_t, k_t, error)
            outputs.append(scale * torch.einsum("hkv,hk->hv", S, q_t))
        finals.append(S.mT)
    o = torch.stack(outputs) if outputs else torch.zeros_like(v)
    final_state = torch.stack(finals) if finals else initial_state
    return o.to(out_dtype), final_state
