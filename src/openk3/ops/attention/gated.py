"""What a Gated MLA layer computes between its projections (report §2.1.2 eq. 7), in one call.

A head's key is a part of its own and a part that all heads share; its output is gated. In plain PyTorch the
key is put together, and the output of `attention` multiplied by the gate. The kernels make neither pass, and
read no offset on the host.
"""

from __future__ import annotations

import math

import torch

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.dispatch import Implementation, Kernel, choose
from openk3.ops.inputs import check_floating
from openk3.ops.packed import check_offsets
from openk3.ops.precision import own_dtypes, wide

KERNELS = (
    Kernel(
        "gated_mla",
        takes="K, shared and V in {16, 32, 64, 128}, one of bf16, fp16 or fp32 for all",
        checked_on="H200 (sm_90)",
        compiles_for=("sm_80", "sm_86", "sm_89", "sm_100", "sm_120"),
    ),
)
SIZES = (16, 32, 64, 128)

Tensor = torch.Tensor


@own_dtypes
def gated_mla(
    q: Tensor,
    kv: Tensor,
    shared: Tensor,
    gate: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    scale: float | None = None,
    return_max_logit: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor | None]:
    """sigmoid(gate) * attention(q, [k | shared], v), with the k and v of `kv`; see `attention`.

    Args:
        q: `[Tq, H, K + S]`; its last S channels meet the shared part of the keys.
        kv: `[Tk, H, K + V]`: keys before values, as one projection gives them.
        shared: `[Tk, S]`, the part of the key that all heads share.
        gate: `[Tq, H, V]` before the sigmoid, or None for no gate.
        cu_seqlens_q, cu_seqlens_k: int32 `[N + 1]`, as in `attention`. "triton" leaves their values
            unchecked, because to read them on the host is to wait for all work on the device. Wrong ones
            there mean wrong results, or accesses out of bounds.
        scale: positive factor of the logits; (K + S)**-0.5 by default.
        return_max_logit: also return the largest logit of each head, read from the scores on the way.
        implementation: force "reference", "eager" or "triton"; by default the fastest that takes the inputs
            on their device.

    Returns:
        y `[Tq, H, V]` in q's dtype: attention and gate are computed in at least fp32, and rounded once. And
        max_logit `[H]` in at least fp32, as `attention` gives it (None unless asked for). The backward of the
        kernels keeps the inputs, the output of attention in fp32 (report §2.1.2), and one number for each
        query and head; it adds nothing atomically, and gives the same bits each time.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit, scale is not positive, or, on the host, the
            offsets are not those of a packing.
        KernelUnavailable: the forced implementation cannot run here.
    """
    _check_shapes(q, kv, shared, gate)
    check_floating("gated_mla", q=q, kv=kv, shared=shared, gate=gate)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not 0 < scale < math.inf:
        raise InvalidInput(f"gated_mla: scale must be positive and finite, got {scale}")
    problem = _kernel_problem(q, kv, shared, gate)
    if implementation == "triton" and problem:
        raise KernelUnavailable(f"gated_mla: {problem}; ask for implementation='eager'")
    chosen = choose("gated_mla", q, implementation, kernels=problem is None, by_default=KERNELS[0].checked)
    if chosen == "triton":
        for offsets in (cu_seqlens_q, cu_seqlens_k):
            check_offsets("gated_mla", q, cu_seqlens=offsets, checkpoint_at=None)
        if len(cu_seqlens_q) != len(cu_seqlens_k):
            raise InvalidInput(
                f"gated_mla: cu_seqlens_q holds {len(cu_seqlens_q) - 1} sequences, "
                f"cu_seqlens_k {len(cu_seqlens_k) - 1}; they must match"
            )
        from openk3.ops.attention.kernels.operator import gated_mla as run

        return run(q, kv, shared, gate, cu_seqlens_q, cu_seqlens_k, scale, return_max_logit)
    from openk3.ops.attention import attention

    K = q.shape[-1] - shared.shape[-1]
    k, v = torch.split(kv, [K, kv.shape[-1] - K], dim=-1)
    k = torch.cat([k, shared[:, None].expand(-1, k.shape[1], -1)], dim=-1)
    o, max_logit = attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k,
        scale=scale, return_max_logit=return_max_logit, implementation=chosen,
    )  # fmt: skip
    if gate is not None:
        o = o * torch.sigmoid(gate.to(wide(gate.dtype)))
    return o.to(q.dtype), max_logit


def _check_shapes(q: Tensor, kv: Tensor, shared: Tensor, gate: Tensor | None) -> None:
    shapes = f"q {tuple(q.shape)}, kv {tuple(kv.shape)}, shared {tuple(shared.shape)}"
    if q.dim() != 3 or kv.dim() != 3 or shared.dim() != 2:
        raise InvalidInput(f"gated_mla: q and kv must be [T, H, D] and shared [T, S], got {shapes}")
    K = q.shape[2] - shared.shape[1]
    if q.shape[1] != kv.shape[1] or len(kv) != len(shared) or not 0 <= K <= kv.shape[2]:
        raise InvalidInput(
            f"gated_mla: got {shapes}; heads of q and kv must match, tokens of kv and shared, "
            f"and kv must hold the {K} channels of q that shared does not, and values"
        )
    expected = (*q.shape[:2], kv.shape[2] - K)
    if gate is not None and gate.shape != expected:
        raise InvalidInput(f"gated_mla: gate must be [Tq, H, V] = {expected}, got {tuple(gate.shape)}")


def _kernel_problem(q: Tensor, kv: Tensor, shared: Tensor, gate: Tensor | None) -> str | None:
    """Why the kernels do not take these inputs, or None if they do."""
    K, S = q.shape[2] - shared.shape[1], shared.shape[1]
    V = kv.shape[2] - K
    if not {K, S, V} <= set(SIZES):
        return f"the kernels take head sizes {SIZES}, got K = {K}, shared {S}, V = {V}"
    dtypes = {x.dtype for x in (q, kv, shared, gate) if x is not None}
    if len(dtypes) > 1 or torch.float64 in dtypes:
        return f"the kernels take one dtype of bf16, fp16 and fp32, got {', '.join(map(str, dtypes))}"
    return None
