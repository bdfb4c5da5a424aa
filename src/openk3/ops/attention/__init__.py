"""Causal softmax attention over packed sequences: the core of Gated MLA (report §2.1.2).

Knows no latents or positions (K3's attention has none): the caller brings per-head keys and values. Key and
value head sizes may differ (192 and 128 in the release). The output stays in at least fp32, as the report
keeps it in training. `attention` is the plain operator; `gated_mla` is what a layer calls: with the part of
the keys that heads share, the output gate, and GPU kernels.
"""

from __future__ import annotations

import torch

from openk3.errors import InvalidInput
from openk3.ops.attention.gated import KERNELS as GATED_KERNELS
from openk3.ops.attention.gated import gated_mla
from openk3.ops.attention.paged import KERNELS as PAGED_KERNELS
from openk3.ops.attention.paged import mla_append, mla_decode
from openk3.ops.dispatch import Implementation, choose
from openk3.ops.packed import sequence_bounds
from openk3.ops.precision import own_dtypes

__all__ = ["KERNELS", "attention", "gated_mla", "mla_append", "mla_decode"]

KERNELS = (*GATED_KERNELS, *PAGED_KERNELS)


@own_dtypes
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    scale: float | None = None,
    return_max_logit: bool = False,
    implementation: Implementation | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """softmax(scale q k^T) v, causal inside each sequence.

    Sequences may have more keys than queries (a cached prefix): query i of n_q then sees the keys
    j <= i + n_k - n_q, so that the last query sees them all. A query that sees no key gives zero.

    Args:
        q: `[Tq, H, Dk]`, k: `[Tk, H, Dk]`, v: `[Tk, H, Dv]`; one floating dtype, one device.
        cu_seqlens_q, cu_seqlens_k: int32 `[N + 1]`, from 0 to Tq and to Tk, non-decreasing.
        scale: factor of the logits; Dk**-0.5 by default.
        return_max_logit: also return the largest logit of each head, which QK-clip wants. It is read from the
            scores on the way.
        implementation: force "reference" or "eager"; by default the fastest for the device.

    Returns:
        o `[Tq, H, Dv]` in at least fp32, and max_logit `[H]` in at least fp32: the largest scale * q.k over
        the allowed pairs, -inf when there are none, without gradient (None unless asked for).
        The backward keeps q, k, v and o.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit, or the offsets are not those of a packing.
        KernelUnavailable: the forced implementation cannot run here.
    """
    _check_tensors(q, k, v)
    offsets_q = sequence_bounds("attention: cu_seqlens_q", cu_seqlens_q, len(q))
    offsets_k = sequence_bounds("attention: cu_seqlens_k", cu_seqlens_k, len(k))
    if len(offsets_q) != len(offsets_k):
        raise InvalidInput(
            f"attention: cu_seqlens_q holds {len(offsets_q) - 1} sequences, "
            f"cu_seqlens_k {len(offsets_k) - 1}; they must match"
        )
    match choose("attention", q, implementation, kernels=False):
        case "reference":
            from openk3.ops.attention.reference import attention as run
        case _:
            from openk3.ops.attention.eager import attention as run
    return run(
        q, k, v, offsets_q, offsets_k, q.shape[-1] ** -0.5 if scale is None else scale, return_max_logit
    )


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise InvalidInput(f"attention: q, k and v must be [T, H, D], got {shapes}")
    if q.shape[1:] != k.shape[1:] or k.shape[:2] != v.shape[:2]:
        raise InvalidInput(
            f"attention: got {shapes}; heads must match everywhere, tokens of k and v, head sizes of q and k"
        )
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point() and q.device == k.device == v.device):
        kinds = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise InvalidInput(f"attention: q, k and v must share one floating dtype and one device, got {kinds}")
