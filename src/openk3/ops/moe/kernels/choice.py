"""The k + 1 best experts of each token, in one pass over the scores and without looking back to the host.

A score and its expert become one 64-bit integer: the float's bits, made to rise with its value, above the
inverted index. All keys differ, so the largest is one expert, ties fall to the lower index, and removing it
is one comparison. k + 1 rounds of that cost less than a sort as long as k is a few.

`decide` does all that a router's logits are read for in that pass: scores, choice, weights, the load and the
histogram of required biases, and how many tokens of each block go to each expert, where sorting them starts.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from openk3.ops.kernel_operator import kernel_operator
from openk3.ops.quantile_balance.bins import bin_range

Tensor = torch.Tensor

# Logits of a program, and the assignments it makes at most: ranking those takes their square of comparisons.
DECIDE = {"SIZE": 4096, "ASSIGNMENTS": 256, "num_warps": 8}


@triton.jit
def _keys(value, e, EXPERTS: tl.constexpr):
    """int64 that rise with `value` and, where it is equal, with falling `e`."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0 and 0 tie
    rising = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    rising = tl.where(value != value, 0x7FFFFFFF, rising)  # NaN first, as in topk
    return rising.to(tl.int64) * 4294967296 + (EXPERTS - 1 - e)


@triton.jit
def _select(biased, ids, cutoff, E, k, EXPERTS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    value = tl.load(biased + t * E + e, mask=e < E, other=0.0)
    lowest = tl.full([EXPERTS], -(2**63), tl.int64)
    key = tl.where(e < E, _keys(value, e, EXPERTS), lowest)
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


@triton.jit
def _sigmoid(x):
    return tl.div_rn(x * 0.0 + 1.0, 1.0 + tl.exp(-x))


@triton.jit
def _weigh(chosen_logits, real, slot, k, scale, RENORMALIZE: tl.constexpr):
    """Scores and weights of the chosen, `[TOKENS, SLOTS]`; slots that are not `real` are 0."""
    score = tl.where(real, _sigmoid(chosen_logits), 0.0)
    weight = score
    if RENORMALIZE:
        total = tl.zeros_like(score)
        for s in range(k):  # in this order, whatever the layout: a recomputed layer must have the same bits
            total += tl.sum(tl.where(slot[None, :] == s, score, 0.0), 1)[:, None]
        weight = tl.div_rn(score, total + 1e-20)
    return score, weight * scale


@triton.jit(do_not_specialize=["T", "blocks", "bins"])
def _decide(
    logits, bias, mask, low, width, ids, weights, scores, cutoff, counts, table, T, E, k, blocks, bins, scale,
    RENORMALIZE: tl.constexpr, COUNTED: tl.constexpr, BINNED: tl.constexpr, MASKED: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    t = block.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    inside = (t < T)[:, None] & (e < E)[None, :]
    place = logits + t[:, None] * E + e[None, :]
    biased = _sigmoid(tl.load(place, mask=inside, other=0.0))
    biased += tl.load(bias + e, mask=e < E, other=0.0)[None, :]
    lowest = tl.full([TOKENS, EXPERTS], -(2**63), tl.int64)
    key = tl.where(inside, _keys(biased, e[None, :], EXPERTS), lowest)

    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([TOKENS, SLOTS], tl.int32)
    for s in range(k):
        best = tl.max(key, 1)[:, None]
        chosen = tl.where(slot[None, :] == s, EXPERTS - 1 - (best & 0xFFFFFFFF).to(tl.int32), chosen)
        key = tl.where(key == best, lowest, key)
    taken = (key == lowest) & inside
    rising = (tl.max(key, 1) >> 32).to(tl.int32)
    cut = tl.where(rising < 0, rising ^ 0x7FFFFFFF, rising).to(tl.float32, bitcast=True)
    cut = tl.where(k < E, cut, -float("inf"))
    tl.store(cutoff + t, cut, mask=t < T)

    real = (t < T)[:, None] & (slot < k)[None, :]
    own = tl.load(logits + t[:, None] * E + chosen, mask=real, other=0.0)
    score, weight = _weigh(own, real, slot, k, scale, RENORMALIZE)
    place = t[:, None] * k + slot[None, :]
    tl.store(ids + place, chosen.to(tl.int64), mask=real)
    tl.store(scores + place, score, mask=real)
    tl.store(weights + place, weight, mask=real)

    count = tl.sum(taken.to(tl.int32), 0)
    tl.store(counts + e.to(tl.int64) * blocks + block, count, mask=e < E)
    if COUNTED:
        counted = t < T
        if MASKED:
            counted = counted & (tl.load(mask + t, mask=t < T, other=0) != 0)
            count = tl.sum((taken & counted[:, None]).to(tl.int32), 0)
        row = table + e.to(tl.int64) * (bins + 1)
        tl.atomic_add(row + bins, count, mask=e < E, sem="relaxed")
        if BINNED:
            # As `quantile_balance.kernels` has it. Read again: the scores would not fit beside the keys.
            inside = inside & counted[:, None]
            score = _sigmoid(tl.load(logits + t[:, None] * E + e[None, :], mask=inside, other=0.0))
            bin = (cut[:, None] - score) - tl.load(low)
            bin = tl.div_rn(bin, tl.load(width) + tl.zeros([TOKENS, EXPERTS], tl.float32))
            bin = tl.where(bin == bin, bin, 0.0)
            bin = tl.minimum(tl.maximum(bin, 0.0), bins - 1.0).to(tl.int32)
            tl.atomic_add(row[None, :] + bin, 1, mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["T"])
def _weigh_chosen(
    logits, ids, weights, scores, T, E, k, scale,
    RENORMALIZE: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.arange(0, SLOTS)
    real = (t < T)[:, None] & (slot < k)[None, :]
    place = t[:, None] * k + slot[None, :]
    chosen = tl.load(ids + place, mask=real, other=0)
    own = tl.load(logits + t[:, None] * E + chosen, mask=real, other=0.0)
    score, weight = _weigh(own, real, slot, k, scale, RENORMALIZE)
    tl.store(scores + place, score, mask=real)
    tl.store(weights + place, weight, mask=real)


@triton.jit(do_not_specialize=["T"])
def _logit_gradients(
    d_weights, scores, values, T, k, scale,
    RENORMALIZE: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.arange(0, SLOTS)
    real = (t < T)[:, None] & (slot < k)[None, :]
    place = t[:, None] * k + slot[None, :]
    score = tl.load(scores + place, mask=real, other=0.0)
    d = tl.load(d_weights + place, mask=real, other=0.0).to(tl.float32) * scale
    if RENORMALIZE:
        # p = s / S: dL/ds = (dL/dp - sum_r dL/dp_r s_r / S) / S
        total = tl.sum(score, 1) + 1e-20
        mean = tl.div_rn(tl.sum(d * score, 1), total)
        d = tl.div_rn(d - mean[:, None], total[:, None] + tl.zeros_like(score))
    tl.store(values + place, d * score * (1.0 - score), mask=real)


def _slots(k: int) -> dict[str, int]:
    """The tile of kernels that see the chosen experts alone."""
    SLOTS = triton.next_power_of_2(k)
    return {"SLOTS": SLOTS, "TOKENS": max(1, 1024 // SLOTS), "num_warps": 4}


class Decision(NamedTuple):
    """ids int64, weights and scores of the chosen fp32, `[T, k]`; cutoff fp32 `[T]`.

    counts: int32 `[E, blocks]`, of a block of `tokens_of_block` tokens how many go to each expert.
    table: int32 `[E, bins + 1]`, histogram of required biases and load; no rows where none is counted.
    """

    ids: Tensor
    weights: Tensor
    scores: Tensor
    cutoff: Tensor
    counts: Tensor
    table: Tensor


def tokens_of_block(experts: int, k: int) -> int:
    """Tokens that one program of `decide` sees: a power of two."""
    most = min(DECIDE["SIZE"] // max(32, triton.next_power_of_2(experts)), DECIDE["ASSIGNMENTS"] // k)
    return 1 << max(0, int(most).bit_length() - 1)


def decide(
    logits: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    k: int,
    scale: float,
    renormalize: bool,
    counted: bool,
    bins: int,
) -> Decision:
    """All that `logits` fp32 `[T, E]` are read for. `counted` tokens (those of `mask`, or all) go into the
    load, and with `bins` > 0 into that many bins."""
    T, E = logits.shape
    tokens = tokens_of_block(E, k)
    blocks = triton.cdiv(T, tokens)
    empty = lambda *shape, dtype=torch.float32: torch.empty(*shape, dtype=dtype, device=logits.device)  # noqa: E731
    made = Decision(
        empty(T, k, dtype=torch.int64),
        empty(T, k),
        empty(T, k),
        empty(T),
        empty(E, blocks, dtype=torch.int32),
        torch.zeros(E if counted else 0, bins + 1, dtype=torch.int32, device=logits.device),
    )
    if T:
        low, width = bin_range(bias, bins) if bins else (bias, bias)
        arguments = (
            logits, bias, None if mask is None else mask.contiguous().view(torch.uint8), low, width,
            *made, T, E, k, blocks, bins, scale,
        )  # fmt: skip
        EXPERTS = max(32, triton.next_power_of_2(E))
        sizes = {"TOKENS": tokens, "EXPERTS": EXPERTS, "SLOTS": triton.next_power_of_2(k)}
        kinds = {"RENORMALIZE": renormalize, "COUNTED": counted, "BINNED": bins > 0}
        kinds["MASKED"] = mask is not None
        _decide[(blocks,)](*arguments, **kinds, **sizes, num_warps=DECIDE["num_warps"])
    return made


def weigh(logits: Tensor, ids: Tensor, scale: float, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Weights and scores `[T, k]` of experts chosen before: the bits that `decide` gives."""
    (T, k), E = ids.shape, logits.shape[1]
    weights, scores, tile = logits.new_empty(T, k), logits.new_empty(T, k), _slots(k)
    if T:
        _weigh_chosen[(triton.cdiv(T, tile["TOKENS"]),)](
            logits, ids, weights, scores, T, E, k, scale, RENORMALIZE=renormalize, **tile
        )
    return weights, scores


def logit_gradients(d_weights: Tensor, scores: Tensor, scale: float, renormalize: bool) -> Tensor:
    """The gradient of the chosen experts' logits, fp32 `[T, k]`; that of the others is 0."""
    (T, k), tile = scores.shape, _slots(scores.shape[1])
    values = torch.empty_like(scores)
    if T:
        _logit_gradients[(triton.cdiv(T, tile["TOKENS"]),)](
            d_weights, scores, values, T, k, scale, RENORMALIZE=renormalize, **tile
        )
    return values
