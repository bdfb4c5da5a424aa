"""The kernels of `one_query` with a token's rows in shared memory (Gluon): each is read from memory once.

There, rows go by one after the other, and warps wait for each other at the sums of each row. Here a token's
rows lie side by side, so all its sums cross the program in one exchange: each warp leaves its share, a lane a
source takes them up, and what is made of scores is made for all sources at once. That is a few barriers a
token, for any number of sources.

A row's place is given to the program's next token as soon as nothing reads it any more. The first DOUBLE rows
have two places each, so that copies are under way while a token's sums are made.

The gradient through a norm needs no sums of its own. With s = d_normed * norm_gain and h the mix,

    g = scale (s - c h)      g . V_i = scale (s . V_i - c h . V_i)
    s . h = sum w_i s . V_i      h . h = sum w_i h . V_i

so products of s and of h with the sources are all that is summed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated, misc"
from __future__ import annotations

from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.ampere import async_copy  # type: ignore[import-untyped]


@gluon.jit
def _at(x, row, d, col):
    return x + row.to(gl.int64) * d + col


@gluon.jit
def _places(dtype: gl.constexpr, R: gl.constexpr, D: gl.constexpr, DOUBLE: gl.constexpr):
    """A place for each row, two for the first DOUBLE. Apart, so that the compiler knows that they are."""
    PLACE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [0])
    places = ()
    for i in gl.static_range(R):
        places = places + (gl.allocate_shared_memory(dtype, [2 if i < DOUBLE else 1, D], PLACE),)  # noqa: RUF005
    return places


@gluon.jit
def _fetch(rows, places, token, turn, d, col, FIRST: gl.constexpr, END: gl.constexpr, DOUBLE: gl.constexpr):
    """Starts the copies of rows FIRST to END - 1."""
    for i in gl.static_range(FIRST, END):
        place = places[i].index(turn if i < DOUBLE else 0)
        async_copy.async_copy_global_to_shared(place, _at(rows[i], token, d, col), mask=col < d)


@gluon.jit
def _words(x, row, d, D: gl.constexpr):
    """A row of x in global memory, in words of two numbers: as small in registers as it is in memory."""
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    col = gl.arange(0, D // 2, layout=WORDS)
    return gl.load(_at(x.to(gl.pointer_type(gl.int32)), row, d // 2, col), mask=col < d // 2, other=0)


@gluon.jit
def _row(places, turn, i: gl.constexpr, DOUBLE: gl.constexpr):
    """Row i of the token, in words."""
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    PLACE: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [0])
    place = places[i].index(turn if i < DOUBLE else 0)
    return place._reinterpret(gl.int32, [place.shape[0] // 2], PLACE).load(WORDS)


@gluon.jit
def _wide(words, dtype: gl.constexpr, ROW: gl.constexpr):
    """Words of two numbers of dtype as fp32, twice as many."""
    if dtype == gl.bfloat16:
        even = (words << 16).to(gl.float32, bitcast=True)
        odd = (words & -65536).to(gl.float32, bitcast=True)
    else:
        even = words.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
        odd = (words >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    row = gl.reshape(gl.join(even, odd), [2 * words.shape[0]])
    return gl.convert_layout(row, ROW, assert_trivial=True)


@gluon.jit
def _group(
    places,
    turn,
    R: gl.constexpr,
    group: gl.constexpr,
    GROUP: gl.constexpr,
    DOUBLE: gl.constexpr,
):
    """Rows of a group, which are counted from the last to the first, as they lie."""
    taken = ()
    for n in gl.static_range(group * GROUP, group * GROUP + GROUP if group * GROUP + GROUP < R else R):
        taken = taken + (_row(places, turn, R - 1 - n, DOUBLE),)  # noqa: RUF005
    return taken


@gluon.jit
def _fetch_group(
    rows,
    places,
    token,
    d,
    col,
    R: gl.constexpr,
    group: gl.constexpr,
    GROUP: gl.constexpr,
    DOUBLE: gl.constexpr,
):
    """Those of the group that have one place."""
    for n in gl.static_range(group * GROUP, group * GROUP + GROUP if group * GROUP + GROUP < R else R):
        if R - 1 - n >= DOUBLE:
            _fetch(rows, places, token, 0, d, col, R - 1 - n, R - n, DOUBLE)


@gluon.jit
def _by_warp(x, WARPS: gl.constexpr):
    """`[D]` summed to `[WARPS]`."""
    lines = gl.reshape(x, [x.shape[0] // (256 * WARPS), WARPS, 256])
    return gl.sum(gl.sum(lines, 0), 1)


@gluon.jit
def _side_by_side(shares, SOURCES: gl.constexpr):
    """Tensors `[WARPS]` as one `[WARPS, SOURCES]`, with zeros for those that are not there."""
    WARPS: gl.constexpr = shares[0].shape[0]
    for _ in gl.static_range(len(shares), SOURCES):
        shares = shares + (gl.zeros_like(shares[0]),)  # noqa: RUF005
    for level in gl.static_range(5 if SOURCES == 32 else 4):
        joined = ()
        for k in gl.static_range(SOURCES >> (level + 1)):
            joined = joined + (gl.join(shares[k], shares[k + (SOURCES >> (level + 1))]),)  # noqa: RUF005
        shares = joined
    return gl.reshape(shares[0], [WARPS, SOURCES])


@gluon.jit
def _sums_place(SOURCES: gl.constexpr):
    PLACE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [gl.num_warps(), SOURCES], PLACE)


@gluon.jit
def _softmax(scores, has):
    scores = gl.where(has, scores, float("-inf"))
    weights = gl.exp(scores - gl.max(scores, 0))
    return weights * (1.0 / gl.sum(weights, 0))


@gluon.jit
def _numbers(SOURCES: gl.constexpr):
    """A place for a number of each source; all threads read them one by one."""
    return gl.allocate_shared_memory(gl.float32, [SOURCES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _keep(place, x, SOURCES: gl.constexpr):
    PLACE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    place._reinterpret(gl.float32, [SOURCES], PLACE).store(x)


@gluon.jit(do_not_specialize=["T"])
def forward_ring(
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
    S: gl.constexpr,
    D: gl.constexpr,
    DOUBLE: gl.constexpr,
    GROUP: gl.constexpr,
    ADD: gl.constexpr,
    MERGE: gl.constexpr,
    MIX: gl.constexpr,
    NORM: gl.constexpr,
):
    R: gl.constexpr = len(rows)
    WARPS: gl.constexpr = gl.num_warps()
    SOURCES: gl.constexpr = 16 if S <= 16 else 32
    ROW: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    LANES: gl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [0, 1])
    dtype: gl.constexpr = rows[0].dtype.element_ty
    step = gl.num_programs(0)
    first = gl.program_id(0)
    col = gl.arange(0, D, layout=ROW)
    inside = col < d
    lane = gl.arange(0, SOURCES, layout=gl.SliceLayout(0, LANES))
    has = lane < S
    places = _places(dtype, R, D, DOUBLE)
    alongs = _sums_place(SOURCES)
    squares = _sums_place(SOURCES)
    weights = _numbers(SOURCES)
    _fetch(rows, places, first, 0, d, col, 0, R, DOUBLE)
    async_copy.commit_group()
    m = gl.load(query + col, mask=inside, other=0.0).to(gl.float32)
    m = m * gl.load(key_gain + col, mask=inside, other=0.0).to(gl.float32)
    turn = first * 0
    for index in range(first, T, step):
        token = first * 0 + index
        after = gl.minimum(token + step, T - 1)
        _fetch(rows, places, after, 1 - turn, d, col, 0, DOUBLE, DOUBLE)
        async_copy.commit_group()
        async_copy.wait_group(1)
        if ADD:
            summed = _wide(_row(places, turn, R - 1, DOUBLE), dtype, ROW)
            summed = (summed + _wide(_row(places, turn, R - 2, DOUBLE), dtype, ROW)).to(dtype)
            gl.store(_at(total, token, d, col), summed, mask=inside)
            places[R - 1].index(turn if R - 1 < DOUBLE else 0).store(summed)
        with_m = ()
        with_itself = ()
        for i in gl.static_range(S):
            v = _wide(_row(places, turn, i if i < S - 1 else R - 1, DOUBLE), dtype, ROW)
            with_m = with_m + (_by_warp(v * m, WARPS),)  # noqa: RUF005
            with_itself = with_itself + (_by_warp(v * v, WARPS),)  # noqa: RUF005
        alongs.store(_side_by_side(with_m, SOURCES))
        squares.store(_side_by_side(with_itself, SOURCES))
        inverses = gl.rsqrt(gl.sum(squares.load(LANES), 0) / d + eps)
        scores = gl.sum(alongs.load(LANES), 0) * inverses
        if MERGE:
            scores = gl.where(lane == 0, gl.load(lse + token), scores)
            inverses = gl.where(lane == 0, 0.0, inverses)
        kept = scalars + 2 * (token.to(gl.int64) * S + lane)
        gl.store(kept, scores, mask=has)
        gl.store(kept + 1, inverses, mask=has)
        _keep(weights, _softmax(scores, has), SOURCES)
        mix = gl.zeros([D], gl.float32, layout=ROW)
        for group in gl.static_range((R + GROUP - 1) // GROUP):
            taken = _group(places, turn, R, group, GROUP, DOUBLE)
            _fetch_group(rows, places, after, d, col, R, group, GROUP, DOUBLE)
            for n in gl.static_range(len(taken)):
                if R - 1 - group * GROUP - n < S - 1:
                    weight = weights.index(R - 1 - group * GROUP - n).load(ROW)
                    mix += _wide(taken[n], dtype, ROW) * weight
                elif group + n == 0:
                    mix += _wide(taken[n], dtype, ROW) * weights.index(S - 1).load(ROW)
        async_copy.commit_group()
        if MIX:
            gl.store(_at(mixed, token, d, col), mix.to(dtype), mask=inside)
        if NORM:
            gain = gl.load(norm_gain + col, mask=inside, other=0.0).to(gl.float32)
            scale = gl.rsqrt(gl.sum(mix * mix, 0) / d + norm_eps)
            gl.store(_at(normed, token, d, col), (mix * scale * gain).to(dtype), mask=inside)
        turn = 1 - turn
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["T"])
def backward_ring(
    sources,
    d_sources,
    direction,  # [d] fp32, query * key_gain
    norm_gain,
    scalars,
    d_mixed,  # this or d_normed
    d_normed,
    d_bank,  # what reaches the sources through later readers: all but the last, and the last; None: nothing
    d_last,
    d_lse,  # [T] fp32, with MERGE
    d_direction,  # [programs, d] fp32
    d_norm_gain,  # [programs, d] fp32
    T,
    d,
    norm_eps,
    S: gl.constexpr,
    D: gl.constexpr,
    DOUBLE: gl.constexpr,
    GROUP: gl.constexpr,
    MERGE: gl.constexpr,
    NORM: gl.constexpr,
    BANK: gl.constexpr,
    LAST: gl.constexpr,
):
    WARPS: gl.constexpr = gl.num_warps()
    SOURCES: gl.constexpr = 16 if S <= 16 else 32
    ROW: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    LANES: gl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [0, 1])
    dtype: gl.constexpr = sources[0].dtype.element_ty
    # Rows that are added to gradients, in the order of those.
    BEFORE: gl.constexpr = 0 if LAST else 1
    added = ()
    if LAST:
        added = added + (d_last,)  # noqa: RUF005
    if BANK:
        for j in gl.static_range(1, S):
            added = added + (d_bank[S - 1 - j],)  # noqa: RUF005
    ADDED: gl.constexpr = (1 if LAST else 0) + (S - 1 if BANK else 0)
    step = gl.num_programs(0)
    first = gl.program_id(0)
    col = gl.arange(0, D, layout=ROW)
    inside = col < d
    lane = gl.arange(0, SOURCES, layout=gl.SliceLayout(0, LANES))
    has = lane < S
    places = _places(dtype, S, D, DOUBLE)
    of_given = _sums_place(SOURCES)
    of_mix = _sums_place(SOURCES)
    weights = _numbers(SOURCES)
    alongs = _numbers(SOURCES)
    radials = _numbers(SOURCES)
    _fetch(sources, places, first, 0, d, col, 0, S, DOUBLE)
    async_copy.commit_group()
    m = gl.load(direction + col, mask=inside, other=0.0)
    d_m = gl.zeros([D], gl.float32, layout=ROW)
    given = _words(d_normed if NORM else d_mixed, first, d, D)
    kept = scalars + 2 * (first.to(gl.int64) * S + lane)
    scores = gl.load(kept, mask=has, other=0.0)
    inverses = gl.load(kept + 1, mask=has, other=0.0)
    turn = first * 0
    for index in range(first, T, step):
        token = first * 0 + index
        after = gl.minimum(token + step, T - 1)
        _fetch(sources, places, after, 1 - turn, d, col, 0, DOUBLE, DOUBLE)
        async_copy.commit_group()
        weight = _softmax(scores, has)
        _keep(weights, weight, SOURCES)
        queue = ()
        for n in gl.static_range(2 if ADDED > 2 else ADDED):
            queue = queue + (_words(added[n], token, d, D),)  # noqa: RUF005
        async_copy.wait_group(1)
        g = _wide(given, dtype, ROW)
        with_given = ()
        if NORM:
            gain = gl.load(norm_gain + col, mask=inside, other=0.0).to(gl.float32)
            s = g * gain
            mix = gl.zeros([D], gl.float32, layout=ROW)
            for i in gl.static_range(S):
                v = _wide(_row(places, turn, i, DOUBLE), dtype, ROW)
                mix += v * weights.index(i).load(ROW)
                with_given = with_given + (_by_warp(s * v, WARPS),)  # noqa: RUF005
            gl.thread_barrier()  # or the compiler keeps all rows in registers until they are read again
            with_mix = ()
            for i in gl.static_range(S):
                v = _wide(_row(places, turn, i, DOUBLE), dtype, ROW)
                with_mix = with_mix + (_by_warp(mix * v, WARPS),)  # noqa: RUF005
            of_mix.store(_side_by_side(with_mix, SOURCES))
        else:
            for i in gl.static_range(S):
                v = _wide(_row(places, turn, i, DOUBLE), dtype, ROW)
                with_given = with_given + (_by_warp(g * v, WARPS),)  # noqa: RUF005
        of_given.store(_side_by_side(with_given, SOURCES))
        products = gl.sum(of_given.load(LANES), 0)
        common = gl.sum(weight * products, 0)
        if NORM:
            products_mix = gl.sum(of_mix.load(LANES), 0)
            scale = gl.rsqrt(gl.sum(weight * products_mix, 0) / d + norm_eps)
            c = scale * scale * common / d
            products = scale * (products - c * products_mix)
            # Kept in the cache: there are no registers for it.
            d_gain = g * mix * scale
            if token > first:
                d_gain += gl.load(_at(d_norm_gain, first, d, col), mask=inside, other=0.0)
            gl.store(_at(d_norm_gain, first, d, col), d_gain, mask=inside)
            g = scale * (s - c * mix)
            # g . mix: all but the share of eps cancels, since the norm is blind to the size of the mix.
            common = common * scale * scale * scale * norm_eps
        d_scores = weight * (products - common) if S > 1 else weight * 0.0
        if MERGE:  # 1 / rms of a mix is kept as zero
            gl.store(d_lse + token + lane, d_scores, mask=lane == 0)
        along = d_scores * inverses
        _keep(alongs, along, SOURCES)
        _keep(radials, along * scores * inverses / d, SOURCES)
        given = _words(d_normed if NORM else d_mixed, after, d, D)
        kept = scalars + 2 * (after.to(gl.int64) * S + lane)
        scores = gl.load(kept, mask=has, other=0.0)
        inverses = gl.load(kept + 1, mask=has, other=0.0)
        for group in gl.static_range((S + GROUP - 1) // GROUP):
            taken = _group(places, turn, S, group, GROUP, DOUBLE)
            _fetch_group(sources, places, after, d, col, S, group, GROUP, DOUBLE)
            for n in gl.static_range(len(taken)):
                v = _wide(taken[n], dtype, ROW)
                along_m = alongs.index(S - 1 - group * GROUP - n).load(ROW)
                d_v = weights.index(S - 1 - group * GROUP - n).load(ROW) * g + along_m * m
                d_v -= radials.index(S - 1 - group * GROUP - n).load(ROW) * v
                d_m += along_m * v
                if group * GROUP + n >= BEFORE and group * GROUP + n < BEFORE + ADDED:
                    d_v += _wide(queue[0], dtype, ROW)
                    queue = queue[1:]
                    if group * GROUP + n - BEFORE + 2 < ADDED:
                        more = added[group * GROUP + n - BEFORE + 2]
                        queue = queue + (_words(more, token, d, D),)  # noqa: RUF005
                place = _at(d_sources[S - 1 - group * GROUP - n], token, d, col)
                gl.store(place, d_v.to(dtype), mask=inside)
        async_copy.commit_group()
        turn = 1 - turn
    async_copy.wait_group(0)
    gl.store(_at(d_direction, first, d, col), d_m, mask=inside)
