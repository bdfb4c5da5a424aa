"""The backward of `one_query` with a token's rows in shared memory (Gluon): each is read from memory once.

Its twin there reads rows twice, the second time from the caches, and while it does and writes gradients, few
of the next token's rows are on their way. Here a row stays where it was copied to until its gradient is made,
and then the same place is given to that row of the program's next token. So copies never stop, and with rows
out of the registers there are twice as many warps to hide the sums of a token.

Sources are taken from the last to the first, in every pass: the copy that is asked for first is needed first.
All products of a gradient with the rows are summed over the program four at a time; without a norm behind the
mix they are all that is asked of the rows before gradients, since g . h is their weighted sum.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated, misc"
from __future__ import annotations

from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.ampere import async_copy  # type: ignore[import-untyped]


@gluon.jit
def add_two(a, b, c, d):
    return a + c, b + d


@gluon.jit
def add_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@gluon.jit
def _at(x, row, d, col):
    return x + row.to(gl.int64) * d + col


@gluon.jit
def _fetch(source, token, d, place, col):
    """Starts the copy of a row; its end is waited for by how many were started later."""
    async_copy.async_copy_global_to_shared(place, _at(source, token, d, col), mask=col < d)
    async_copy.commit_group()


@gluon.jit
def _taken(ring, j: gl.constexpr, S: gl.constexpr, ROW: gl.constexpr, WAIT: gl.constexpr):
    """The j-th row from the last, in fp32."""
    if WAIT:
        async_copy.wait_group(S - 1 - j)
    return ring.index(S - 1 - j).load(ROW).to(gl.float32)


@gluon.jit
def _products(g, ring, S: gl.constexpr, ROW: gl.constexpr, WAIT: gl.constexpr):
    """g times each row, from the last to the first."""
    found = ()
    for i in gl.static_range(S // 4):
        a = g * _taken(ring, 4 * i, S, ROW, WAIT)
        b = g * _taken(ring, 4 * i + 1, S, ROW, WAIT)
        c = g * _taken(ring, 4 * i + 2, S, ROW, WAIT)
        e = g * _taken(ring, 4 * i + 3, S, ROW, WAIT)
        a, b, c, e = gl.reduce((a, b, c, e), 0, add_four)
        found = found + (a, b, c, e)  # noqa: RUF005
    if S % 4 >= 2:
        a = g * _taken(ring, S // 4 * 4, S, ROW, WAIT)
        b = g * _taken(ring, S // 4 * 4 + 1, S, ROW, WAIT)
        a, b = gl.reduce((a, b), 0, add_two)
        found = found + (a, b)  # noqa: RUF005
    if S % 2 == 1:
        found = found + (gl.sum(g * _taken(ring, S - 1, S, ROW, WAIT), 0),)  # noqa: RUF005
    return found


@gluon.jit
def _scalars(scalars, token, S: gl.constexpr):
    """Scores and 1 / rms of a token."""
    scores = ()
    inverses = ()
    for i in gl.static_range(S):
        at = scalars + 2 * (token.to(gl.int64) * S + i)
        scores = scores + (gl.load(at),)  # noqa: RUF005
        inverses = inverses + (gl.load(at + 1),)  # noqa: RUF005
    return scores, inverses


@gluon.jit(do_not_specialize=["T"])
def backward_ring(
    sources,
    d_sources,
    direction,  # [d] fp32, query * key_gain
    norm_gain,
    scalars,
    d_mixed,
    d_normed,
    d_bank,  # what reaches the sources through later readers: all but the last, and the last; None: nothing
    d_last,
    d_direction,  # [programs, d] fp32
    d_norm_gain,  # [programs, d] fp32
    T,
    d,
    norm_eps,
    S: gl.constexpr,
    D: gl.constexpr,
    MIX: gl.constexpr,
    NORM: gl.constexpr,
    BANK: gl.constexpr,
    LAST: gl.constexpr,
):
    ROW: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    PLACE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [0])
    dtype: gl.constexpr = sources[0].dtype.element_ty
    # Rows that are added to gradients, in the order of those.
    BEGIN: gl.constexpr = 0 if LAST else 1
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
    ring = gl.allocate_shared_memory(dtype, [S, D], PLACE)
    for j in gl.static_range(S):
        _fetch(sources[S - 1 - j], first, d, ring.index(S - 1 - j), col)
    m = gl.load(direction + col, mask=inside, other=0.0)
    d_m = gl.zeros([D], gl.float32, layout=ROW)
    given = gl.load(_at(d_normed if NORM else d_mixed, first, d, col), mask=inside, other=0.0)
    scores, inverses = _scalars(scalars, first, S)
    for index in range(first, T, step):
        token = first * 0 + index
        after = gl.minimum(token + step, T - 1)
        top = scores[0]
        for i in gl.static_range(1, S):
            top = gl.maximum(top, scores[i])
        share = top * 0.0
        for i in gl.static_range(S):
            share += gl.exp(scores[i] - top)
        weights = ()
        for i in gl.static_range(S):
            weights = weights + (gl.exp(scores[i] - top) / share,)  # noqa: RUF005
        g = given.to(gl.float32)
        if NORM:
            mix = _taken(ring, 0, S, ROW, True) * weights[S - 1]
            for j in gl.static_range(1, S):
                mix += _taken(ring, j, S, ROW, True) * weights[S - 1 - j]
            scaled = g * gl.load(norm_gain + col, mask=inside, other=0.0).to(gl.float32)
            square, along = gl.reduce((mix * mix, scaled * mix), 0, add_two)
            scale = gl.rsqrt(square / d + norm_eps)
            # Kept in the cache: there are no registers for it.
            d_gain = g * mix * scale
            if token > first:
                d_gain += gl.load(_at(d_norm_gain, first, d, col), mask=inside, other=0.0)
            gl.store(_at(d_norm_gain, first, d, col), d_gain, mask=inside)
            g = scale * (scaled - mix * (scale * scale * along / d))
            # g . mix: all but the share of eps cancels, since the norm is blind to the size of the mix.
            common = along * scale * scale * scale * norm_eps
            if MIX:
                more = gl.load(_at(d_mixed, token, d, col), mask=inside, other=0.0).to(gl.float32)
                common += gl.sum(more * mix, 0)
                g += more
            products = _products(g, ring, S, ROW, False)
        else:
            products = _products(g, ring, S, ROW, True)
            common = products[0] * weights[S - 1]
            for j in gl.static_range(1, S):
                common += products[j] * weights[S - 1 - j]
        queue = ()
        for n in gl.static_range(2 if ADDED > 2 else ADDED):
            queue = queue + (gl.load(_at(added[n], token, d, col), mask=inside, other=0.0),)  # noqa: RUF005
        given = gl.load(_at(d_normed if NORM else d_mixed, after, d, col), mask=inside, other=0.0)
        next_scores, next_inverses = _scalars(scalars, after, S)
        for j in gl.static_range(S):
            v = _taken(ring, j, S, ROW, False)
            weight = weights[S - 1 - j]
            r = inverses[S - 1 - j]
            along_m = weight * (products[j] - common) * r if S > 1 else common * 0.0
            d_v = weight * g + along_m * m - (along_m * scores[S - 1 - j] * r / d) * v
            d_m += along_m * v
            _fetch(sources[S - 1 - j], after, d, ring.index(S - 1 - j), col)
            if j >= BEGIN and j < BEGIN + ADDED:
                d_v += queue[0].to(gl.float32)
                queue = queue[1:]
                if j - BEGIN + 2 < ADDED:
                    row = _at(added[j - BEGIN + 2], token, d, col)
                    queue = queue + (gl.load(row, mask=inside, other=0.0),)  # noqa: RUF005
            gl.store(_at(d_sources[S - 1 - j], token, d, col), d_v.to(dtype), mask=inside)
        scores = next_scores
        inverses = next_inverses
    async_copy.wait_group(0)
    gl.store(_at(d_direction, first, d, col), d_m, mask=inside)
