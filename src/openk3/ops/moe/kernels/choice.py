"""The k + 1 best experts of each token, in one pass over the scores and without looking back to the host.

A score and its expert become one 64-bit integer: the float's bits, made to rise with its value, above the
inverted index. All keys differ, so the largest is one expert, ties fall to the lower index, and removing it
is one comparison. k + 1 rounds of that cost less than a sort as long as k is a few.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from openk3.ops.kernel_operator import kernel_operator

Tensor = torch.Tensor


@triton.jit
def _select(biased, ids, cutoff, E, k, EXPERTS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    value = tl.load(biased + t * E + e, mask=e < E, other=0.0)
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0 and 0 tie
    rising = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    rising = tl.where(value != value, 0x7FFFFFFF, rising)  # NaN first, as in topk
    lowest = tl.full([EXPERTS], -(2**63), tl.int64)
    key = tl.where(e < E, rising.to(tl.int64) * 4294967296 + (EXPERTS - 1 - e), lowest)
    for s in range(k):
        best = tl.max(key, 0)
        tl.store(ids + t * k + s, EXPERTS - 1 - (best & 0xFFFFFFFF))
        key = tl.where(key == best, lowest, key)
    best = tl.max(key, 0)
    last = tl.sum(tl.where(key == best, value, 0.0), 0)
    tl.store(cutoff + t, tl.where(k < E, last, -float("inf")))


@kernel_operator("openk3::select_experts")
def select_experts(biased: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `openk3.ops.moe.route.select_experts`; `biased` float32."""
    biased = biased.contiguous()
    T, E = biased.shape
    ids = torch.empty(T, k, dtype=torch.int64, device=biased.device)
    cutoff = biased.new_empty(T)
    if T:
        EXPERTS = max(32, triton.next_power_of_2(E))
        _select[(T,)](biased, ids, cutoff, E, k, EXPERTS=EXPERTS, num_warps=1)
    return ids, cutoff


@select_experts.register_fake
def _(biased: Tensor, k: int) -> tuple[Tensor, Tensor]:
    T = biased.shape[0]
    return biased.new_empty(T, k, dtype=torch.int64), biased.new_empty(T)
