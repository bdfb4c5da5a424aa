"""QK-clip: after a step, shrink the MLA heads whose logits grew past tau (report §3.3; Kimi K2's rule).

With gamma = min(1, tau / S_max) per head, a head's own query rows and key rows take sqrt(gamma) each. Its
other query dims meet a key that all heads share: the query alone takes gamma there, and the shared key
nothing. They are not rotated in K3 but are part of the logit all the same; left alone, they could hold it
above tau. So every logit of the head scales by exactly gamma. Values, gate and momentum stay as they are. KDA
needs none of this: its queries and keys have unit norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from openk3.config import MlaConfig
from openk3.errors import InvalidInput, TrainingDiverged


def clip_factors(max_logits: Mapping[int, torch.Tensor], tau: float = 100.0) -> dict[int, torch.Tensor]:
    """gamma `[H]` of each layer: tau / S_max for a head above tau, exactly 1 for the others.

    Args:
        max_logits: by layer, `[H]`: the largest scaled logit of each head in this step, over all tokens,
            micro-batches and ranks; -inf for a head that saw no pair.
        tau: the largest logit to leave.

    Raises:
        TrainingDiverged: a logit is NaN or +inf; the text names layer and head.
        InvalidInput: tau is not positive.
    """
    gammas = quiet_factors(max_logits, tau)
    worst = [logits.max() for logits in max_logits.values()]  # NaN if one is NaN
    for layer, logit in zip(max_logits, torch.stack(worst).tolist() if worst else [], strict=True):
        if not logit < torch.inf:
            head = int(max_logits[layer].argmax())
            raise TrainingDiverged(f"largest attention logit of layer {layer}, head {head} is {logit}")
    return gammas


def quiet_factors(max_logits: Mapping[int, torch.Tensor], tau: float = 100.0) -> dict[int, torch.Tensor]:
    """`clip_factors` that reads no value: NaN where the logit is NaN or +inf. See `check_factors`."""
    if not tau > 0:
        raise InvalidInput(f"clip_factors: tau must be positive, got {tau}")
    return {
        layer: torch.where(
            logits < torch.inf,
            torch.where(logits > tau, tau / logits, torch.ones_like(logits)),
            torch.full_like(logits, torch.nan),
        )
        for layer, logits in max_logits.items()
    }


def check_factors(gammas: Mapping[int, torch.Tensor]) -> None:
    """Read what `Optimizer.qk_clip` returned on a GPU; the host waits for it.

    Raises:
        TrainingDiverged: a gamma is NaN, its logit was NaN or +inf; the text names layer and head.
    """
    sums = [gamma.sum() for gamma in gammas.values()]
    for layer, total in zip(gammas, torch.stack(sums).tolist() if sums else [], strict=True):
        if math.isnan(total):
            head = int(gammas[layer].isnan().int().argmax())
            raise TrainingDiverged(f"largest attention logit of layer {layer}, head {head} is not finite")


@torch.no_grad()
def scale_logits(query: torch.Tensor, kv_b: torch.Tensor, gamma: torch.Tensor, mla: MlaConfig) -> None:
    """Scale the logits of head h by gamma[h], in place. A head with gamma 1 keeps every bit.

    Args:
        query: `[H * (nope + rope), in]`, the weight of `q_proj` or `q_b_proj`.
        kv_b: `[H * (nope + v), r]`, the weight of `kv_b_proj`.
        gamma: `[H]`, in (0, 1].

    Raises:
        InvalidInput: a shape is not that of the heads.
    """
    heads, nope = mla.num_heads, mla.qk_nope_head_dim
    wanted = {"query": (query, heads * mla.qk_head_dim), "kv_b": (kv_b, heads * (nope + mla.v_head_dim))}
    for name, (tensor, rows) in {**wanted, "gamma": (gamma, heads)}.items():
        if tensor.shape[0] != rows:
            raise InvalidInput(
                f"scale_logits: {name} is {list(tensor.shape)}, {heads} heads need {rows} rows"
            )
    gamma = gamma[:, None, None]
    queries = query.view(heads, mla.qk_head_dim, -1)
    queries[:, :nope] *= gamma.sqrt()
    queries[:, nope:] *= gamma
    kv_b.view(heads, nope + mla.v_head_dim, -1)[:, :nope] *= gamma.sqrt()
