"""One query's mix on the GPU, with the addition before it and the norm behind it: one pass each way.

A program takes whole tokens, one after the other, and asks for rows several ahead, across tokens too, so that
memory has work while rows are reduced. Sources are separate tensors and stay so: the kernel takes their
addresses as a tuple. Forward, one loop goes over the rows of all tokens, and the compiler turns its load into
a ring of asynchronous copies; two programs share a processor, so that one computes while the other waits for
its sums. Backward, where registers allow one program only, the rows of a token are unrolled, and those asked
for wait in registers.

Forward, a source is read once: its score, then the online softmax. Backward, let h be the mix and g its
gradient: with c = g . h each source's gradient needs nothing of the other sources,

    ds_i = a_i (g . V_i - c)        dV_i = a_i g + ds_i r_i m - (ds_i s_i r_i^2 / d) V_i

so the first pass over a token's rows makes h again (a sum, without reductions) and what the norm behind it
asks for, and the second, which finds the rows in the caches, writes gradients. What reaches a source through
its later readers waits in the same queue, behind the source, and is added before that. Each program sums
gradients to query and gains over its tokens; the sums of programs are added up afterwards, in their order.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment, misc"
from __future__ import annotations

import triton
import triton.language as tl

from openk3.ops.attnres.kernels.rows import (
    add_pairs,
    load_row,
    load_words,
    no_words,
    queued,
    store_row,
    unpack,
)


@triton.jit
def _start_of(rows, i):
    """rows[i] for an i that is not known when the kernel is compiled."""
    start = rows[0]
    for n in tl.static_range(1, len(rows)):
        start = tl.where(i == n, rows[n], start)
    return start


@triton.jit(do_not_specialize=["T"])
def forward(
    rows,  # S sources; with ADD what is added to the last comes before it
    query,
    key_gain,
    norm_gain,
    lse,  # [T], with MERGE: the score of source 0, itself a mix
    total,  # [T, d], with ADD: the last source after the addition
    mixed,
    normed,
    scalars,  # [T, S, 2] fp32: score and 1 / rms of each source
    T,
    d,
    eps,
    norm_eps,
    S: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
    ADD: tl.constexpr,
    MERGE: tl.constexpr,
    MIX: tl.constexpr,
    NORM: tl.constexpr,
):
    R: tl.constexpr = len(rows)
    FIRST: tl.constexpr = R - S if S == 1 else 0
    dtype: tl.constexpr = rows[0].dtype.element_ty
    step = tl.num_programs(0)
    first = tl.program_id(0)
    m = load_row(query, first * 0, d, D) * load_row(key_gain, first * 0, d, D)
    mix = tl.zeros([D], tl.float32)
    top = 0.0
    share = 0.0
    before = no_words(dtype, D)
    for index in tl.range(0, tl.cdiv(T - first, step) * R, num_stages=STAGES):
        n = first * 0 + index  # Triton's interpreter counts in Python's integers
        token = first + step * (n // R)
        n = n % R
        words = load_words(_start_of(rows, n), token, d, D)
        v = unpack(words, dtype)
        if ADD:
            if n == R - 1:
                summed = (unpack(before, dtype) + v).to(dtype)
                store_row(total, token, summed, d, D)
                v = summed.to(tl.float32)
            before = words
        along, square = tl.reduce((v * m, v * v), 0, add_pairs)
        r = tl.rsqrt(square / d + eps)
        score = along * r
        if MERGE:  # noqa: SIM102 - a constant, which decides what is compiled
            if n == FIRST:
                score = tl.load(lse + token)
                r = 0.0
        if ADD:  # What is added is no source. The last source writes over what it leaves.
            score = tl.where(n == R - 2, float("-inf"), score)
        at = scalars + 2 * (token.to(tl.int64) * S + tl.minimum(n, S - 1))
        tl.store(at, score)
        tl.store(at + 1, r)
        if n == FIRST:
            mix = v
            top = score
            share = 1.0
        else:
            if score > top:
                old = tl.exp(top - score)
                mix = mix * old
                share = share * old
                top = score
            new = tl.exp(score - top)
            mix += v * new
            share += new
        if n == R - 1:
            mix = mix * (1.0 / share)
            if MIX:
                store_row(mixed, token, mix, d, D)
            if NORM:
                scale = tl.rsqrt(tl.sum(mix * mix, 0) / d + norm_eps)
                store_row(normed, token, mix * scale * load_row(norm_gain, token * 0, d, D), d, D)


@triton.jit
def _scores(scalars, token, S: tl.constexpr):
    scores = ()
    for i in tl.static_range(S):
        scores = scores + (tl.load(scalars + 2 * (token.to(tl.int64) * S + i)),)  # noqa: RUF005
    return scores


@triton.jit(do_not_specialize=["T"])
def backward(
    sources,
    d_sources,
    direction,  # [d] fp32, query * key_gain
    norm_gain,
    scalars,
    d_mixed,
    d_normed,
    d_bank,  # what reaches the sources through later readers, added to their gradients: all but the last,
    d_last,  # and the last; None where nothing does
    d_lse,  # [T] fp32, with MERGE
    d_direction,  # [programs, d] fp32, sums over a program's tokens
    d_norm_gain,  # [programs, d] fp32
    T,
    d,
    norm_eps,
    S: tl.constexpr,
    D: tl.constexpr,
    AHEAD: tl.constexpr,
    MERGE: tl.constexpr,
    MIX: tl.constexpr,
    NORM: tl.constexpr,
    BANK: tl.constexpr,
    LAST: tl.constexpr,
):
    dtype: tl.constexpr = sources[0].dtype.element_ty
    tl.static_assert(
        S == 1 or AHEAD >= (3 if BANK or LAST else 2), "a pair of sources is in the queue together"
    )
    # Twice each: backwards the second time, so that the latest come first.
    # Behind each then comes what reaches it, where anything does.
    AT: tl.constexpr = S + AHEAD  # what is asked for when the first source of the second pass is done
    rows = sources + (sources[S - 1],)  # noqa: RUF005
    if LAST:
        rows = rows + (d_last,)  # noqa: RUF005
    for j in tl.static_range(1, S):
        rows = rows + (sources[S - 1 - j],)  # noqa: RUF005
        if BANK:
            rows = rows + (d_bank[S - 1 - j],)  # noqa: RUF005
    step = tl.num_programs(0)
    first = tl.program_id(0)
    d_m = tl.zeros([D], tl.float32)
    queue = ()
    for n in tl.static_range(AHEAD):
        queue = queue + (queued(rows, n, first, step, T, d, D),)  # noqa: RUF005
    scores = _scores(scalars, first, S)
    for index in range(first, T, step):
        token = first * 0 + index  # Triton's interpreter counts in Python's integers
        here = scalars + 2 * token.to(tl.int64) * S
        given = load_words(d_normed if NORM else d_mixed, token, d, D)
        top = scores[0]
        for i in tl.static_range(1, S):
            top = tl.maximum(top, scores[i])
        share = 0.0
        for i in tl.static_range(S):
            share += tl.exp(scores[i] - top)
        mix = d_m
        for i in tl.static_range(S):
            weight = tl.exp(scores[i] - top) / share
            v = unpack(queue[0], dtype)
            mix = v * weight if i == 0 else mix + v * weight
            # Or the assembler takes all loads of this pass to its top, and has no registers for them.
            tl.debug_barrier()
            queue = queue[1:] + (queued(rows, i + AHEAD, token, step, T, d, D),)  # noqa: RUF005
        if NORM:
            g = unpack(given, dtype)
            scaled = g * load_row(norm_gain, token * 0, d, D)
            square, along = tl.reduce((mix * mix, scaled * mix), 0, add_pairs)
            scale = tl.rsqrt(square / d + norm_eps)
            # Kept in the cache: there are no registers for it.
            d_gain = g * mix * scale
            if token > first:
                d_gain += load_row(d_norm_gain, first, d, D)
            store_row(d_norm_gain, first, d_gain, d, D)
            g = scale * (scaled - mix * (scale * scale * along / d))
            # g . mix: all but the share of eps cancels, since the norm is blind to the size of the mix.
            common = along * scale * scale * scale * norm_eps
            if MIX:
                more = load_row(d_mixed, token, d, D)
                common += tl.sum(more * mix, 0)
                g += more
        else:
            g = unpack(given, dtype)
            common = tl.sum(g * mix, 0)
        for j in tl.static_range(S):
            # Two sources a sum over the program: its warps wait half as often.
            if j % 2 == 0:
                if j + 1 < S:
                    second = unpack(queue[1 + (LAST if j == 0 else BANK)], dtype)
                    product, next_product = tl.reduce((g * unpack(queue[0], dtype), g * second), 0, add_pairs)
                else:
                    product = tl.sum(g * unpack(queue[0], dtype), 0)
            else:
                product = next_product
            v = unpack(queue[0], dtype)
            m = load_row(direction, token * 0, d, D)
            score = tl.load(here + 2 * (S - 1 - j))
            weight = tl.exp(score - top) / share
            if j == S - 1:
                scores = _scores(scalars, tl.minimum(token + step, T - 1), S)
            d_score = weight * (product - common) if S > 1 else common * 0.0
            if MERGE and j == S - 1:
                tl.store(d_lse + token, d_score)
                d_v = weight * g
            else:
                r = tl.load(here + 2 * (S - 1 - j) + 1)
                along_m = d_score * r
                d_v = weight * g + along_m * m - (along_m * score * r / d) * v
                d_m += along_m * v
            queue = queue[1:] + (  # noqa: RUF005
                queued(rows, AT + j * (1 + BANK) + (LAST - BANK if j > 0 else 0), token, step, T, d, D),
            )
            if LAST if j == 0 else BANK:
                d_v += unpack(queue[0], dtype)
                queue = queue[1:] + (  # noqa: RUF005
                    queued(
                        rows, AT + 1 + j * (1 + BANK) + (LAST - BANK if j > 0 else 0), token, step, T, d, D
                    ),
                )
            store_row(d_sources[S - 1 - j], token, d_v, d, D)
    store_row(d_direction, first, d_m, d, D)
