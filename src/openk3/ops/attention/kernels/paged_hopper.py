"""`attend_part` for Hopper (Gluon), in bf16: the same function as its plain twin in `paged`.

Cached tokens are the rows of both products and queries their columns, so that 96 heads are not padded to 128:

    logits   S^T [64 tokens, N] = latents q^T       mix   O^T [R, N] += latents^T P^T

A program has N = 64 queries, the last one of a window N = 32 or 16 if that is enough: 96 heads are two
programs, next to each other in the grid, so that the second finds latents in the L2 cache. Two warpgroups
share the columns of S^T and the rows of O^T, which lives in registers (512 x 64 fp32: 128 a thread). Queries
and two tiles of latents lie in shared memory; products of the next tile with the queries run while
exponentials are taken, and each block of 128 columns of a tile is replaced as soon as the mix has used it.

What exponentials are taken against follows the largest logit of a query only when that has grown by more than
a factor of 2^8, so that O^T is rarely scaled. It depends on that query's logits alone.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch
from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-untyped]
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore[import-untyped]

TOKENS = gl.constexpr(64)
BLOCK = gl.constexpr(128)  # columns of a latent that move together
SLACK = gl.constexpr(8.0)
LN2 = gl.constexpr(0.6931471805599453)
WIDE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


def boxes(cache: torch.Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """For latents and shared dims of `[pages, page_size, D]`: rows of a tile, or of a page that has fewer.

    Whole tiles move by 128 columns of a latent, parts of tiles by 64, which lie together in shared memory.
    """
    rows = cache.view(-1, cache.shape[2])
    count = min(cache.shape[1], TOKENS.value)
    columns = BLOCK.value if count == TOKENS.value else 64
    latents = TensorDescriptor.from_tensor(rows, [count, columns], WIDE.value)
    return latents, TensorDescriptor.from_tensor(rows, [count, 64], WIDE.value)


@gluon.jit
def either(x, y):
    return x | y


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def weights_layout(n):
    return gl.NVMMASharedLayout.get_default_for([64, n], gl.bfloat16)


@gluon.constexpr_function
def logits_layout(n):
    """Of S^T `[64, n]`: two warpgroups share the columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, n // 2, 16])


@gluon.constexpr_function
def mix_layout(n):
    """Of a block of O^T `[128, n]`: they share the rows."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, n, 16])


@gluon.jit
def _pages(table, t, end, PAGE: gl.constexpr):
    """Pages of the tile at t; past the end, pages that there are."""
    pages = ()
    t = gl.where(t < end, t, 0)
    for i in gl.static_range(TOKENS // PAGE if PAGE < TOKENS else 1):
        token = t + i * PAGE
        token = gl.where(token < end, token, t)
        pages = pages + (gl.load(table + token // PAGE),)  # type: ignore[assignment]  # noqa: RUF005
    return pages


@gluon.jit
def _fetch(cells, pages, t, column, buffer, ready, COLUMNS: gl.constexpr, PAGE: gl.constexpr, wanted):
    """Starts the copy of COLUMNS of the tile at t to `buffer` `[64, COLUMNS]`; boxes are as in `boxes`."""
    mbarrier.expect(ready, TOKENS * COLUMNS * 2, pred=wanted)
    if PAGE >= TOKENS:
        row = pages[0] * PAGE + t % PAGE
        tma.async_copy_global_to_shared(cells, [row, column], ready, buffer, pred=wanted)
    else:
        halves = buffer._reinterpret(gl.bfloat16, [COLUMNS // 64, TOKENS, 64], WIDE)
        for half in gl.static_range(COLUMNS // 64):
            for i in gl.static_range(TOKENS // PAGE):
                part = halves.index(half).slice(i * PAGE, PAGE)
                place = [pages[i] * PAGE, column + 64 * half]
                tma.async_copy_global_to_shared(cells, place, ready, part, pred=wanted)


@gluon.jit
def _copy_queries(
    q, stride_t, stride_h, n, first, W, H, buffer, block: gl.constexpr, D: gl.constexpr, N: gl.constexpr
):  # fmt: skip
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    row = first + gl.arange(0, N, layout=gl.SliceLayout(1, COPY))
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, COPY))
    cells = q + ((n * W + row // H) * stride_t + (row % H) * stride_h)[:, None] + c[None, :]
    for b in gl.static_range(D // 64):
        async_copy.async_copy_global_to_shared(
            buffer.index(block + b), cells + 64 * b, mask=(row < W * H)[:, None]
        )


@gluon.jit(do_not_specialize=["max_length", "queries", "W", "H", "SPLIT"])
def attend_part_hopper(
    q_latent, q_shared, latents, shared_dims, block_table, lengths, out, lse, scale, max_length, queries,
    stride_lt, stride_lh, stride_st, stride_sh, stride_table, W, H, SPLIT,
    R: gl.constexpr, PAGE: gl.constexpr, ONE_PART: gl.constexpr, SEVERAL: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """All but the last of the SEVERAL programs of a window have 64 queries each, that has up to LAST."""
    if not ONE_PART:  # noqa: SIM102 - known when it is compiled
        if gl.program_id(2) * SPLIT >= gl.minimum(gl.load(lengths + gl.program_id(1)), max_length):
            return
    arguments = (
        q_latent, q_shared, latents, shared_dims, block_table, lengths, out, lse, scale, max_length, queries,
        stride_lt, stride_lh, stride_st, stride_sh, stride_table, W, H, SPLIT, gl.program_id(0) * 64,
    )  # fmt: skip
    if SEVERAL:  # noqa: SIM102
        if gl.program_id(0) < gl.num_programs(0) - 1:
            _attend(arguments, R, PAGE, ONE_PART, 64)
            return
    _attend(arguments, R, PAGE, ONE_PART, LAST)


@gluon.jit
def _attend(arguments, R: gl.constexpr, PAGE: gl.constexpr, ONE_PART: gl.constexpr, N: gl.constexpr):
    (
        q_latent, q_shared, latents, shared_dims, block_table, lengths, out, lse, scale, max_length, queries,
        stride_lt, stride_lh, stride_st, stride_sh, stride_table, W, H, SPLIT, first,
    ) = arguments  # fmt: skip
    BLOCKS: gl.constexpr = R // BLOCK
    LOGITS: gl.constexpr = logits_layout(N)
    MIX: gl.constexpr = mix_layout(N)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LOGITS)
    n = gl.program_id(1).to(gl.int64)
    part = gl.program_id(2).to(gl.int64)
    length = gl.minimum(gl.load(lengths + n), max_length)
    start = gl.program_id(2) * SPLIT
    least = length - W + 1 + first // H  # what the first query sees, and then the last
    seen = length - W + 1 + gl.minimum(first + N - 1, W * H - 1) // H
    end = seen
    if not ONE_PART:
        end = gl.minimum(seen, start + SPLIT)

    ring = gl.allocate_shared_memory(gl.bfloat16, [2 * BLOCKS, TOKENS, BLOCK], WIDE)
    shared = gl.allocate_shared_memory(gl.bfloat16, [2, TOKENS, 64], WIDE)
    query = gl.allocate_shared_memory(gl.bfloat16, [R // 64 + 1, N, 64], WIDE)
    weights = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, N], weights_layout(N))
    ready = gl.allocate_shared_memory(gl.int64, [2 * BLOCKS, 1], mbarrier.MBarrierLayout())
    shared_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(2 * BLOCKS):
        mbarrier.init(ready.index(s), count=1)
    for s in gl.static_range(2):
        mbarrier.init(shared_ready.index(s), count=1)
    fence_async_shared()
    gl.thread_barrier()

    table = block_table + n * stride_table
    for s in gl.static_range(2):
        t = start + s * TOKENS
        pages = _pages(table, t, end, PAGE)
        _fetch(shared_dims, pages, t, R, shared.index(s), shared_ready.index(s), 64, PAGE, t < end)
        for b in gl.static_range(BLOCKS):
            slot = s * BLOCKS + b
            _fetch(latents, pages, t, b * BLOCK, ring.index(slot), ready.index(slot), BLOCK, PAGE, t < end)
    pages = _pages(table, start + 2 * TOKENS, end, PAGE)
    _copy_queries(q_latent, stride_lt, stride_lh, n, first, W, H, query, 0, R, N)
    _copy_queries(q_shared, stride_st, stride_sh, n, first, W, H, query, R // 64, 64, N)
    async_copy.commit_group()
    O = ()  # noqa: E741
    for _ in gl.static_range(BLOCKS):
        O = O + (gl.zeros([BLOCK, N], gl.float32, layout=MIX),)  # type: ignore[assignment]  # noqa: RUF005, E741
    zero = gl.zeros([TOKENS, N], gl.float32, layout=LOGITS)
    reference = gl.full([N], float("-inf"), gl.float32, layout=COLUMN)
    total = gl.sum(gl.reshape(zero, [4, 2, 8, N]), 1)  # of the rows of each thread
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    S = _start_logits(zero, query, shared, shared_ready, 0, BLOCKS, start < end)
    S = _add_logits(S, query, ring, ready, 0, 0, BLOCKS, BLOCKS, start < end)
    S = warpgroup_mma_wait(0, deps=(S,))
    gl.thread_barrier()  # all are done with the shared dims

    for t in range(start, end, TOKENS):
        tile = (t - start) // TOKENS
        half = tile % 2
        ahead = t + 2 * TOKENS < end
        # Past the last tile this multiplies what lies there; nobody reads the product.
        more = t + TOKENS < end
        following = _start_logits(zero, query, shared, shared_ready, tile + 1, BLOCKS, more)
        following = _add_logits(following, query, ring, ready, tile + 1, 0, BLOCKS // 2, BLOCKS, more)
        _fetch(
            shared_dims,
            pages,
            t + 2 * TOKENS,
            R,
            shared.index(half),
            shared_ready.index(half),
            64,
            PAGE,
            ahead,
        )
        later_pages = _pages(table, t + 3 * TOKENS, end, PAGE)

        S *= scale
        if t + TOKENS > least:
            j = t + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, LOGITS))
            row = gl.minimum(first + gl.arange(0, N, layout=COLUMN), W * H - 1)
            S = gl.where(j[:, None] < (length - W + 1 + row // H)[None, :], S, float("-inf"))
        above = gl.where(S > (reference + SLACK)[None, :], 1, 0)
        if gl.reduce(gl.reshape(above, [TOKENS * N]), 0, either) != 0:
            top = gl.max(S, 0)
            larger = gl.where(top > reference + SLACK, top, reference)
            shrink = gl.where(larger > reference, exp2(reference - larger), 1.0)
            reference = larger
            of_total = gl.convert_layout(shrink, gl.SliceLayout(0, gl.SliceLayout(1, total.type.layout)))
            total *= gl.expand_dims(gl.expand_dims(of_total, 0), 1)
            of_mix = gl.convert_layout(shrink, gl.SliceLayout(0, MIX))[None, :]
            scaled = ()
            for b in gl.static_range(BLOCKS):
                scaled = scaled + (O[b] * of_mix,)  # type: ignore[assignment]  # noqa: RUF005
            O = scaled  # noqa: E741
        P = exp2(S - gl.where(reference == float("-inf"), 0.0, reference)[None, :])
        total += gl.sum(gl.reshape(P, [4, 2, 8, N]), 1)
        weights.store(P.to(gl.bfloat16))
        if t + TOKENS > end:
            # Zeros past the end: what lies there may be no number.
            CLEAR: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
            j = t + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, CLEAR))
            for b in gl.static_range(BLOCKS):
                buffer = ring.index(half * BLOCKS + b)
                buffer.store(gl.where((j < end)[:, None], buffer.load(CLEAR), 0.0))
        # The last blocks arrive late: each was waited for by the mix of the tile before the one before.
        following = _add_logits(following, query, ring, ready, tile + 1, BLOCKS // 2, BLOCKS, BLOCKS, more)
        fence_async_shared()
        gl.thread_barrier()

        mixing = ()
        for b in gl.static_range(BLOCKS):
            values = ring.index(half * BLOCKS + b).permute((1, 0))
            mixing = mixing + (warpgroup_mma(values, weights, O[b], is_async=True),)  # type: ignore[assignment]  # noqa: RUF005
        S = warpgroup_mma_wait(BLOCKS, deps=(following,))
        O = ()  # noqa: E741
        for b in gl.static_range(BLOCKS):
            O = O + (warpgroup_mma_wait(BLOCKS - 1 - b, deps=(mixing[b],)),)  # type: ignore[assignment]  # noqa: RUF005, E741
            gl.thread_barrier()  # all are done with the block
            slot = half * BLOCKS + b
            _fetch(
                latents,
                pages,
                t + 2 * TOKENS,
                b * BLOCK,
                ring.index(slot),
                ready.index(slot),
                BLOCK,
                PAGE,
                ahead,
            )
        pages = later_pages

    sums = gl.sum(gl.sum(total, 0), 0)
    sums = gl.convert_layout(sums, COLUMN)
    row = first + gl.arange(0, N, layout=COLUMN)
    logs = gl.where(sums > 0, reference + gl.log2(sums), float("-inf"))
    if ONE_PART:
        logs = logs * LN2
    place = part * queries + n * (W * H)
    written = W * H
    if not ONE_PART:
        written = gl.where(start < end, W * H, 0)
    gl.store(lse + place + row, logs, mask=row < written)
    inverse = gl.convert_layout(gl.where(sums > 0, 1.0 / sums, 0.0), gl.SliceLayout(0, MIX))[None, :]
    row = first + gl.arange(0, N, layout=gl.SliceLayout(0, MIX))
    c = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, MIX))
    target = out + (place + row)[None, :] * R + c[:, None]
    for b in gl.static_range(BLOCKS):
        y = (O[b] * inverse).to(out.dtype.element_ty)
        gl.store(target + b * BLOCK, y, mask=(row < written)[None, :])


@gluon.jit
def _start_logits(zero, query, shared, ready, tile, BLOCKS: gl.constexpr, wanted):
    """Starts the shared dims of a tile times those of the queries."""
    half = tile % 2
    mbarrier.wait(ready.index(half), (tile // 2) & 1, pred=wanted)
    keys = query.index(2 * BLOCKS).permute((1, 0))
    return warpgroup_mma(shared.index(half), keys, zero, use_acc=False, is_async=True)


@gluon.jit
def _add_logits(
    S, query, ring, ready, tile, FROM: gl.constexpr, TO: gl.constexpr, BLOCKS: gl.constexpr, wanted
):  # fmt: skip
    """Adds blocks FROM to TO of its latents, each when it has arrived."""
    for b in gl.static_range(FROM, TO):
        slot = tile % 2 * BLOCKS + b
        mbarrier.wait(ready.index(slot), (tile // 2) & 1, pred=wanted)
        halves = ring.index(slot)._reinterpret(gl.bfloat16, [2, TOKENS, 64], WIDE)
        for column in gl.static_range(2):
            keys = query.index(2 * b + column).permute((1, 0))
            S = warpgroup_mma(halves.index(column), keys, S, is_async=True)
    return S
