"""The required-bias histogram on the GPU: scores read once, each counted where it belongs.

Counts are added to one table in the cache by integer atomics, whose order changes no bit. The arithmetic is
that of the eager form, a rounding a step and an exact division, so that both count alike.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from openk3.ops.kernel_operator import kernel_operator
from openk3.ops.quantile_balance.bins import bin_range

Tensor = torch.Tensor

BLOCK = {"ROWS": 8, "SIZE": 2048, "num_warps": 4}  # tokens of a program, scores it takes at most


@triton.jit(do_not_specialize=["T", "bins"])
def _count(
    scores, cutoff, mask, low, width, counts, T, E, bins,
    MASKED: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    counted = t < T
    c = tl.load(cutoff + t, mask=counted, other=0.0)
    if MASKED:
        counted = counted & (tl.load(mask + t, mask=counted, other=0) != 0)
    inside = counted[:, None] & (e < E)[None, :]
    s = tl.load(scores + t[:, None] * E + e[None, :], mask=inside, other=0.0)
    place = tl.div_rn((c[:, None] - s) - tl.load(low), tl.load(width) + tl.zeros([ROWS, EXPERTS], tl.float32))
    place = tl.where(place == place, place, 0.0)
    # As a float it is clamped first: what is beyond an integer's range has none.
    place = tl.minimum(tl.maximum(place, 0.0), bins - 1.0).to(tl.int32)
    tl.atomic_add(counts + e.to(tl.int64)[None, :] * bins + place, 1, mask=inside, sem="relaxed")


@kernel_operator("openk3::required_bias_histogram")
def _histogram(scores: Tensor, cutoff: Tensor, bias: Tensor, token_mask: Tensor | None, bins: int) -> Tensor:
    T, E = scores.shape
    counts = torch.zeros(E, bins, dtype=torch.int32, device=scores.device)
    if T * E:
        low, width = bin_range(bias, bins)
        mask = None if token_mask is None else token_mask.contiguous().view(torch.uint8)
        EXPERTS = min(BLOCK["SIZE"] // BLOCK["ROWS"], triton.next_power_of_2(E))
        _count[(triton.cdiv(T, BLOCK["ROWS"]), triton.cdiv(E, EXPERTS))](
            scores.contiguous(), cutoff.contiguous(), mask, low, width, counts, T, E, bins,
            MASKED=mask is not None, ROWS=BLOCK["ROWS"], EXPERTS=EXPERTS, num_warps=BLOCK["num_warps"],
        )  # fmt: skip
    return counts.long()


@_histogram.register_fake
def _(scores: Tensor, cutoff: Tensor, bias: Tensor, token_mask: Tensor | None, bins: int) -> Tensor:
    return scores.new_empty(scores.shape[1], bins, dtype=torch.int64)


def required_bias_histogram(
    scores: Tensor, cutoff: Tensor, bias: Tensor, token_mask: Tensor | None, bins: int
) -> Tensor:
    """See `openk3.ops.quantile_balance.required_bias_histogram`; all float32."""
    counts: Tensor = torch.ops.openk3.required_bias_histogram(scores, cutoff, bias, token_mask, bins)
    return counts
