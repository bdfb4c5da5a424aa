"""`choice.decide` by programs of one warp, which take a few tokens at a time.

The same bits with half of the instructions a token. A token's experts lie in one warp, so the largest key is
one instruction of it instead of shuffles and an exchange between warps. Keys have 32 bits, the index of equal
ones is looked for after. Scores stay for the histogram. A division by the bins' width, equal for all, is a
product with its reciprocal and two roundings that make it exact.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

import triton
import triton.language as tl

from openk3.ops.moe.kernels.choice import _weigh
from openk3.ops.triton_math import LOG2E, PTX, short_exp2

TURN = 1024  # logits at a time: 32 of a lane


@triton.jit
def _inverse(x):
    """1 / x for x of 1 to 2^126, the bits of `tl.div_rn`; that of 2^126 for what is larger."""
    if PTX:
        # As the assembler makes the rounded reciprocal, without its branch for other numbers.
        asm: tl.constexpr = """{ .reg .f32 d, n, r, e;
            min.NaN.f32 d, $1, 0f7E800000;
            neg.f32 n, d;
            rcp.approx.ftz.f32 r, d;
            fma.rn.f32 e, n, r, 0f3F800000;
            fma.rn.f32 $0, r, e, r; }"""
        return tl.inline_asm_elementwise(asm, "=f,f", [x], tl.float32, True, 1)
    x = tl.where(x > 2.0**126, 2.0**126, x)
    return tl.div_rn(x * 0.0 + 1.0, x)


@triton.jit
def _sigmoid(x):
    """The bits of `choice._sigmoid`, but 2^-126 for what is less."""
    decay = short_exp2(x * -LOG2E) if PTX else tl.exp(-x)
    return _inverse(1.0 + decay)


@triton.jit
def _rising(value):
    """int32 above -2^31 that rise with `value`; NaN first, as in topk."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0 and 0 tie
    return tl.where(value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit(do_not_specialize=["T", "blocks", "bins"])
def decide_by_turns(
    logits, bias, mask, low, width, ids, weights, scores, cutoff, counts, table, T, E, k, blocks, bins, scale,
    RENORMALIZE: tl.constexpr, COUNTED: tl.constexpr, BINNED: tl.constexpr, MASKED: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    LOWEST: tl.constexpr = -(2**31)
    block = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    slot = tl.arange(0, SLOTS)
    raised = tl.load(bias + e, mask=e < E, other=0.0)[None, :]
    row = table + e.to(tl.int64) * (bins + 1)
    count = tl.zeros([EXPERTS], tl.int32)
    load = tl.zeros([EXPERTS], tl.int32)
    if BINNED:
        first = tl.load(low)
        across = tl.load(width)
        inverse = tl.div_rn(1.0, across)
    for turn in range(0, TOKENS, TURN):
        t = block.to(tl.int64) * TOKENS + turn + tl.arange(0, TURN)
        inside = (t < T)[:, None] & (e < E)[None, :]
        own_score = _sigmoid(tl.load(logits + t[:, None] * E + e[None, :], mask=inside, other=0.0))
        key = tl.where(inside, _rising(own_score + raised), LOWEST)
        chosen = tl.zeros([TURN, SLOTS], tl.int32)
        for s in range(k):
            best = tl.max(key, 1)[:, None]
            at = tl.min(tl.where(key == best, e[None, :], EXPERTS), 1)[:, None]
            chosen = tl.where(slot[None, :] == s, at, chosen)
            key = tl.where(e[None, :] == at, LOWEST, key)
        taken = (key == LOWEST) & inside
        best = tl.max(key, 1)
        cut = (best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        cut = tl.where(k < E, cut, -float("inf"))
        tl.store(cutoff + t, cut, mask=t < T)

        real = (t < T)[:, None] & (slot < k)[None, :]
        own = tl.load(logits + t[:, None] * E + chosen, mask=real, other=0.0)
        score, weight = _weigh(own, real, slot, k, scale, RENORMALIZE)
        place = t[:, None] * k + slot[None, :]
        tl.store(ids + place, chosen.to(tl.int64), mask=real)
        tl.store(scores + place, score, mask=real)
        tl.store(weights + place, weight, mask=real)

        count += tl.sum(taken.to(tl.int32), 0)
        if COUNTED:
            counted = t < T
            if MASKED:
                counted = counted & (tl.load(mask + t, mask=t < T, other=0) != 0)
                load += tl.sum((taken & counted[:, None]).to(tl.int32), 0)
            if BINNED:
                value = (cut[:, None] - own_score) - first
                bin = value * inverse
                bin = tl.fma(tl.fma(-bin, across, value), inverse, bin)
                bin = tl.where(bin == bin, bin, 0.0)
                bin = tl.minimum(tl.maximum(bin, 0.0), bins - 1.0).to(tl.int32)
                tl.atomic_add(row[None, :] + bin, 1, mask=inside & counted[:, None], sem="relaxed")
    tl.store(counts + e.to(tl.int64) * blocks + block, count, mask=e < E)
    if COUNTED:
        tl.atomic_add(row + bins, load if MASKED else count, mask=e < E, sem="relaxed")
