"""`intra_backward` for Hopper at K = V = 128, in explicit layouts (Gluon). The same function as its twin, on
tiles of 32 rows instead of blocks of 16.

Eight warps a chunk, half of the channels at a time. With Gc the log2 decays summed from the chunk's start and
M the integer in the middle of its range over a tile, by channel, rows keep

    up = 2^(Gc - M)      left = read up      right = w / up                   exponents within +-116

Pairs of one tile multiply these as they are. For those between the tiles, whose operands are the same, the
factor 2^(M_1 - M_0) belongs to the channel and not to the rows, so that it is taken out of the product. Being
powers of two, the factors leave each pair's share in the gate's gradient the same number at its reader and at
its writer: the reverse sum over rows cancels pairs that do not span a row to fp32 rounding. Writes into the
leaving state are summed apart, from the rows before.

dA is kept in two bf16 parts: where keys repeat, its roundings add up along one direction. The second part
takes the place of half of q, which is copied again.

Where gates lie at their bound, operands use up the exponents of fp32, and small gradients times small
operands would vanish. So gradients to pairs are brought to one size by a power of two for each chunk.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch
from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-untyped]
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openk3.ops.kda.kernels.hopper_math import add, exp2, reciprocal
from openk3.ops.kda.kernels.intra_backward import InputGradients
from openk3.ops.kda.kernels.plan import ChunkPlan
from openk3.ops.kda.kernels.prepare import L2_EPS

LOG2_E = gl.constexpr(1.4426950408889634)
CHUNK = gl.constexpr(64)
TILE = gl.constexpr(32)
K = gl.constexpr(128)
HALF = gl.constexpr(64)
WARPS = gl.constexpr(8)
# Rows of a channel that one thread holds, and how many such groups a chunk has.
GROUP = gl.constexpr(8)
COUNT = gl.constexpr(8)

COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # [rows, 64]
WIDE_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))  # [rows, 128]
VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
ROWS = gl.constexpr(gl.BlockedLayout([8, 2], [1, 32], [8, 1], [1, 0]))  # [64, 64]
GROUPS = gl.constexpr(gl.BlockedLayout([1, 8, 2], [1, 1, 32], [8, 1, 1], [2, 1, 0]))  # [8, 8, 64]
SUMS = gl.constexpr(gl.SliceLayout(1, GROUPS))  # [8, 64], by group and channel
# [of, group, channel]: a thread has what all groups contribute to its own.
OF_GROUPS = gl.constexpr(gl.BlockedLayout([8, 1, 2], [1, 1, 32], [1, 8, 1], [2, 1, 0]))
BY_GROUP = gl.constexpr(gl.SliceLayout(1, OF_GROUPS))  # [8, 64]
CHANNEL = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(0, GROUPS)))  # [64]
EVERY = gl.constexpr(gl.BlockedLayout([8], [32], [8], [0]))  # [8], all in every thread
STATE = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0]))  # [128, 64]
# [8, 8, 32]: one value of the two channels of a thread
PAIRS = gl.constexpr(
    gl.SliceLayout(3, gl.BlockedLayout([1, 8, 1, 2], [1, 1, 32, 1], [8, 1, 1, 1], [3, 2, 1, 0]))
)
ROW = gl.constexpr(gl.SliceLayout(2, GROUPS))  # [8, 8]
# Products, [64, 64].
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Between products and groups, fp32: conflicts neither where products are stored nor where rows are read.
STAGED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
SQUARE = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16])
)


@gluon.jit
def _load(tile):
    """`[64, 64]` in shared memory by groups, in fp32: a thread's rows of its channels."""
    return gl.convert_layout(gl.reshape(tile.load(ROWS), [COUNT, GROUP, HALF]), GROUPS).to(gl.float32)


@gluon.jit
def _store(tile, x):
    tile.store(gl.convert_layout(gl.reshape(x.to(gl.bfloat16), [CHUNK, HALF]), ROWS))


@gluon.jit
def _largest(x, y):
    return gl.maximum(x, y)


@gluon.jit
def _append(before_x, x, before_y, y):
    return before_x + x + before_y, y


@gluon.jit
def _sums_before(x, AXIS: gl.constexpr):
    """For each element the sum of those before it."""
    return gl.associative_scan((gl.zeros_like(x), x), AXIS, _append)[0]


@gluon.jit
def _sum(by_group):
    """Sums over groups, beside every row of their channel."""
    sums = gl.convert_layout(gl.sum(by_group, 0), CHANNEL)
    return gl.expand_dims(gl.expand_dims(sums, 0), 0)


@gluon.jit
def _sum_of(by_group, those):
    """For each group the sum of `those`, `[8, 8, 1]`, beside its rows."""
    sums = gl.sum(gl.where(those, gl.expand_dims(by_group, 1), 0.0), 0)
    return gl.expand_dims(gl.convert_layout(sums, SUMS), 1)


@gluon.jit
def _diagonal(x, own):
    """`[2, 64]`: the diagonal of a product, summed within each warp."""
    return gl.permute(gl.sum(gl.reshape(gl.where(own, x, 0.0), [CHUNK, 2, TILE]), 2), (1, 0))


@gluon.jit
def _largest_by_warp(x):
    """`[8]`: the largest element of a product in each warp."""
    return gl.reshape(gl.reduce(gl.reduce(gl.reshape(x, [4, 16, 2, TILE]), 3, _largest), 1, _largest), [8])


@gluon.jit
def _power_of_two(largest):
    """What brings `largest`, not negative, to between 16 and 32, and its inverse.

    Not further than 2^64 up: rows' products with the state, of any size beside the pairs', take part. From
    2^64 on they leave fp32 where all pairs of the chunk lie below 2^-60, which takes states of that size
    that the keys of the chunk do not see.
    """
    exponent = (largest.to(gl.int32, bitcast=True) >> 23) & 255
    exponent = gl.minimum(gl.maximum(exponent, 67), 250)
    scale = ((258 - exponent) << 23).to(gl.float32, bitcast=True)
    return scale, ((exponent - 4) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _opaque_zero():
    """Zero, unknown to the compiler: what is computed from it is computed again, not kept in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _copy(buffer, x, rows, stride, LAYOUT: gl.constexpr):
    """Starts the copy of rows of `buffer`'s shape, zeros from row `rows` on."""
    i = gl.arange(0, buffer.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, buffer.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    async_copy.async_copy_global_to_shared(
        buffer, x + i[:, None] * stride + d[None, :], mask=(i < rows)[:, None]
    )


@gluon.jit
def _load_rows(x, rows, stride):
    i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, COPY))
    d = gl.arange(0, HALF, layout=gl.SliceLayout(0, COPY))
    return gl.load(x + i[:, None] * stride + d[None, :], mask=(i < rows)[:, None], other=0.0)


@gluon.jit
def _row_dots(x_0, x_1, tile):
    """`[64]`: products of rows, by halves, with those in shared memory, summed."""
    y_0, y_1 = tile.slice(0, HALF, 1).load(COPY), tile.slice(HALF, HALF, 1).load(COPY)
    return gl.sum(x_0.to(gl.float32) * y_0.to(gl.float32) + x_1.to(gl.float32) * y_1.to(gl.float32), 1)


@gluon.jit
def _inverse_norms(buffers, EPS: gl.constexpr):
    x, y = buffers.index(0).load(COPY).to(gl.float32), buffers.index(1).load(COPY).to(gl.float32)
    return gl.rsqrt(gl.sum(x * x + y * y, 1) + EPS)


@gluon.jit
def _product(left, right, acc):
    return warpgroup_mma(left, right, acc, is_async=True)


@gluon.jit
def _first_product(left, right):
    zero = gl.zeros([CHUNK, HALF], gl.float32, layout=SQUARE)
    return warpgroup_mma(left, right, zero, use_acc=False, is_async=True)


@gluon.jit
def _per_row(buffer):
    """`[64]` in shared memory, by groups."""
    return buffer._reinterpret(gl.float32, [COUNT, GROUP], PLAIN).load(ROW)


@gluon.jit
def _per_row_of_two(buffer):
    """`[2, 64]` in shared memory, summed, by groups."""
    halves = buffer._reinterpret(gl.float32, [2, CHUNK], FLAT)
    return _per_row(halves.index(0)) + _per_row(halves.index(1))


@gluon.jit
def _per_channel(buffer):
    """`[64]` in shared memory beside every row of its channel."""
    return gl.expand_dims(gl.expand_dims(buffer.load(CHANNEL), 0), 0)


@gluon.jit
def _beside(buffer):
    """`[64]` in shared memory as a row of products."""
    return buffer.load(gl.SliceLayout(0, SQUARE))[None, :]


@gluon.jit
def _scaled(x, exponent):
    """x 2^exponent, in two steps: the factor alone may be too small for fp32 where the product is not."""
    half = gl.floor(0.5 * exponent)
    return x * exp2(half) * exp2(exponent - half)


@gluon.jit
def _between(x, anchor_0, anchor_1):
    """x 2^(M_1 - M_0)."""
    return _scaled(x, _beside(anchor_1) - _beside(anchor_0))


@gluon.jit
def _intra_backward_hopper(
    q, k, v, z, b, o, d_o, d_v, states, d_states, errors, A_log, dt_bias,
    d_q, d_k, d_z, d_b, d_A_log, d_bias, cu_seqlens, first_chunk, chunk_sequence, scale,
    stride_qt: gl.constexpr, stride_qh: gl.constexpr, stride_kt: gl.constexpr, stride_kh: gl.constexpr,
    stride_vt: gl.constexpr, stride_vh: gl.constexpr, stride_zt: gl.constexpr, stride_zh: gl.constexpr,
    stride_b: gl.constexpr, H: gl.constexpr, BOUND: gl.constexpr, EPS: gl.constexpr,
):  # fmt: skip
    c, h = gl.program_id(0).to(gl.int64), gl.program_id(1).to(gl.int64)
    n = gl.load(chunk_sequence + c)
    if n < 0:
        return
    start = gl.load(cu_seqlens + n) + (c - gl.load(first_chunk + n)) * CHUNK
    rows = gl.minimum(gl.load(cu_seqlens + n + 1) - start, CHUNK).to(gl.int32)
    chunk = c * H + h
    at = (start * H + h) * K
    q += start * stride_qt + h * stride_qh
    k += start * stride_kt + h * stride_kh
    v += start * stride_vt + h * stride_vh
    z += start * stride_zt + h * stride_zh
    b += start * stride_b + h

    dO_tiles = gl.allocate_shared_memory(gl.bfloat16, [1, CHUNK, K], SWIZZLED)
    dO_tile = dO_tiles.index(0)
    D_tiles = gl.allocate_shared_memory(gl.bfloat16, [1, CHUNK, K], SWIZZLED)
    D_tile = D_tiles.index(0)
    E_tiles = gl.allocate_shared_memory(gl.bfloat16, [1, CHUNK, K], SWIZZLED)
    E_tile = E_tiles.index(0)
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, HALF], SWIZZLED)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, HALF], SWIZZLED)
    z_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, HALF], SWIZZLED)
    S_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, K, HALF], SWIZZLED)
    dS_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, K, HALF], SWIZZLED)
    states += chunk * K * K
    d_states += chunk * K * K
    _copy(dO_tile, d_o + at, rows, H * K, WIDE_COPY)
    _copy(D_tile, d_v + at, rows, H * K, WIDE_COPY)
    _copy(E_tile, errors + chunk * CHUNK * K, CHUNK, K, WIDE_COPY)
    async_copy.commit_group()
    for half in gl.static_range(2):
        _copy(q_tiles.index(half), q + half * HALF, rows, stride_qt, COPY)
        _copy(k_tiles.index(half), k + half * HALF, rows, stride_kt, COPY)
        _copy(z_tiles.index(half), z + half * HALF, rows, stride_zt, COPY)
    _copy(S_tiles.index(0), states, K, K, COPY)
    _copy(dS_tiles.index(0), d_states, K, K, COPY)
    async_copy.commit_group()
    _copy(S_tiles.index(1), states + HALF, K, K, COPY)
    _copy(dS_tiles.index(1), d_states + HALF, K, K, COPY)
    async_copy.commit_group()
    o_0, o_1 = _load_rows(o + at, rows, H * K), _load_rows(o + at + HALF, rows, H * K)
    v_0, v_1 = _load_rows(v, rows, stride_vt), _load_rows(v + HALF, rows, stride_vt)
    t = gl.arange(0, CHUNK, layout=VECTOR)
    beta_logits = gl.load(b + t * stride_b, mask=t < rows, other=0.0).to(gl.float32)

    # The gradients to pairs, and what is summed over all channels.
    async_copy.wait_group(2)
    fence_async_shared()
    dA_pairs = _first_product(dO_tile, E_tile.permute((1, 0)))
    dL_pairs = _first_product(D_tile, E_tile.permute((1, 0)))
    along_q = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT)
    along_v = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT)
    along_q.store(_row_dots(o_0, o_1, dO_tile))
    along_v.store(_row_dots(v_0, v_1, D_tile))
    async_copy.wait_group(1)
    q_norms = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT)
    k_norms = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT)
    betas = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT)
    q_norms.store(_inverse_norms(q_tiles, EPS))
    k_norms.store(_inverse_norms(k_tiles, EPS))
    betas.store(reciprocal(1.0 + exp2(-LOG2_E * beta_logits)))
    dA_pairs, dL_pairs = warpgroup_mma_wait(0, deps=(dA_pairs, dL_pairs))
    i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, SQUARE))[None, :]
    own_pair = gl.allocate_shared_memory(gl.float32, [2, CHUNK], PLAIN)
    along_w = gl.allocate_shared_memory(gl.float32, [2, CHUNK], PLAIN)
    largest = gl.allocate_shared_memory(gl.float32, [8], FLAT)
    own_pair.store(_diagonal(dA_pairs, i == j))
    along_w.store(_diagonal(dL_pairs, i == j))
    largest.store(_largest_by_warp(gl.maximum(gl.abs(dA_pairs), gl.abs(dL_pairs))))
    up_scale, down_scale = _power_of_two(gl.reduce(largest.load(EVERY), 0, _largest))
    dAs = gl.allocate_shared_memory(gl.bfloat16, [1, CHUNK, CHUNK], SWIZZLED)
    dA = dAs.index(0)
    dA_rest = q_tiles.index(1)  # whose norms are taken: the half of q comes again into the place of the first
    dLs = gl.allocate_shared_memory(gl.bfloat16, [1, CHUNK, CHUNK], SWIZZLED)
    dL = dLs.index(0)
    dA_pairs = gl.where(i > j, dA_pairs * up_scale, 0.0)
    dA_rounded = dA_pairs.to(gl.bfloat16)
    dA.store(dA_rounded)
    dA_rest.store((dA_pairs - dA_rounded.to(gl.float32)).to(gl.bfloat16))
    dL.store(gl.where(i > j, dL_pairs * -up_scale, 0.0).to(gl.bfloat16))

    group = gl.arange(0, COUNT, layout=gl.SliceLayout(1, ROW))[:, None]
    row = group * GROUP + gl.arange(0, GROUP, layout=gl.SliceLayout(0, ROW))[None, :]
    member = gl.expand_dims(gl.arange(0, GROUP, layout=gl.SliceLayout(0, ROW))[None, :], 2)
    group, row = gl.expand_dims(group, 2).to(gl.int64), gl.expand_dims(row, 2)
    channel = gl.arange(0, HALF, layout=CHANNEL)
    channel = gl.expand_dims(gl.expand_dims(channel, 0), 0)
    of = gl.arange(0, COUNT, layout=gl.SliceLayout(1, BY_GROUP))
    own_group = gl.arange(0, COUNT, layout=gl.SliceLayout(0, gl.SliceLayout(2, OF_GROUPS)))
    in_first_tile = (of < COUNT // 2)[:, None]
    of, own_group = gl.expand_dims(of[:, None], 1), gl.expand_dims(own_group, 0)[:, :, None]
    inside = row < rows
    rate = gl.exp(gl.minimum(gl.load(A_log + h).to(gl.float32), 60.0))
    sums = gl.allocate_shared_memory(gl.float32, [COUNT, HALF], PLAIN)
    leaving_sums = gl.allocate_shared_memory(gl.float32, [COUNT, HALF], PLAIN)
    S_dS = gl.allocate_shared_memory(gl.float32, [COUNT, HALF], PLAIN)
    rate_sums = gl.allocate_shared_memory(gl.float32, [COUNT], FLAT)
    staged = gl.allocate_shared_memory(gl.float32, [CHUNK, HALF], STAGED)
    logit_sums = staged.slice(0, COUNT)
    staged_S = S_tiles._reinterpret(gl.float32, [2, CHUNK, HALF], STAGED)
    staged_dS = dS_tiles._reinterpret(gl.float32, [2, CHUNK, HALF], STAGED)
    anchor_0 = gl.allocate_shared_memory(gl.float32, [HALF], FLAT)
    anchor_1 = gl.allocate_shared_memory(gl.float32, [HALF], FLAT)
    total = gl.allocate_shared_memory(gl.float32, [HALF], FLAT)
    left_qs = gl.allocate_shared_memory(gl.bfloat16, [1, CHUNK, HALF], SWIZZLED)
    left_q = left_qs.index(0)
    left_ks = gl.allocate_shared_memory(gl.bfloat16, [1, CHUNK, HALF], SWIZZLED)
    left_k = left_ks.index(0)
    rights = gl.allocate_shared_memory(gl.bfloat16, [1, CHUNK, HALF], SWIZZLED)
    right = rights.index(0)
    d_beta = gl.zeros([COUNT, GROUP, HALF // 2], gl.float32, layout=PAIRS)
    d_rate = gl.zeros([COUNT, HALF], gl.float32, layout=SUMS)
    for half in range(2):
        # Through the states.
        fence_async_shared()
        zero = _opaque_zero()
        dO_tile = dO_tiles.index(zero)
        D_tile = D_tiles.index(zero)
        E_tile = E_tiles.index(zero)
        dA = dAs.index(zero)
        dL = dLs.index(zero)
        left_q = left_qs.index(zero)
        left_k = left_ks.index(zero)
        right = rights.index(zero)
        q_tile, dA_rest = q_tiles.index(zero), q_tiles.index(1 + zero)
        S_tile, dS_tile = S_tiles.index(half), dS_tiles.index(half)
        y_q = _first_product(dO_tile, S_tile)
        y_k = _first_product(D_tile, S_tile)
        to_state = _first_product(E_tile, dS_tile)
        bias = gl.load(dt_bias + h * K + half * HALF + channel).to(gl.float32)
        products = S_tile.load(STATE).to(gl.float32) * dS_tile.load(STATE).to(gl.float32)
        S_dS.store(gl.sum(gl.sum(gl.reshape(products, [8, 8, 2, HALF]), 0), 1))

        # Gate, anchors, and operands of the pairs.
        u = rate * (_load(z_tiles.index(half)) + bias)
        a = (BOUND * LOG2_E) * reciprocal(1.0 + exp2(-LOG2_E * u))
        a = gl.where(inside, a, 0.0)
        async_copy.wait_group(1)
        sums.store(gl.sum(a, 1))
        by_group = sums.load(BY_GROUP)
        both_tiles = _sum(by_group)
        first_tile = _sum(gl.where(in_first_tile, by_group, 0.0))
        first_anchor = gl.floor(0.5 * first_tile)
        second_anchor = gl.floor(0.5 * (first_tile + both_tiles))
        Gc = gl.associative_scan(a, 1, add) + _sum_of(by_group, of < own_group)
        up = exp2(Gc - gl.where(group < COUNT // 2, first_anchor, second_anchor))
        anchor_0.store(gl.reshape(first_anchor, [HALF]))
        anchor_1.store(gl.reshape(second_anchor, [HALF]))
        total.store(gl.reshape(both_tiles, [HALF]))
        q_norm = gl.expand_dims(_per_row(q_norms), 2)
        k_norm = gl.expand_dims(_per_row(k_norms), 2)
        beta = gl.expand_dims(_per_row(betas), 2)
        unit_k = _load(k_tiles.index(half)) * k_norm
        _store(left_k, unit_k * up)
        _store(right, unit_k * beta * reciprocal(up))
        _store(left_q, _load(q_tile) * q_norm * (scale * up))
        fence_async_shared()

        # Through the pairs: first those whose writer, or reader, is in the other tile for one of the tiles.
        p_q = _first_product(dA.slice(0, TILE, 1), right.slice(0, TILE))
        p_q = _product(dA_rest.slice(0, TILE, 1), right.slice(0, TILE), p_q)
        p_k = _first_product(dL.slice(0, TILE, 1), right.slice(0, TILE))
        to_pairs = _first_product(dA.slice(TILE, TILE).permute((1, 0)), left_q.slice(TILE, TILE))
        to_pairs = _product(dA_rest.slice(TILE, TILE).permute((1, 0)), left_q.slice(TILE, TILE), to_pairs)
        to_pairs = _product(dL.slice(TILE, TILE).permute((1, 0)), left_k.slice(TILE, TILE), to_pairs)
        y_q, y_k, to_state, p_q, p_k, to_pairs = warpgroup_mma_wait(
            0, deps=(y_q, y_k, to_state, p_q, p_k, to_pairs)
        )
        early = i < TILE
        anchor = gl.where(early, _beside(anchor_0), _beside(anchor_1))
        # The scale first: together the factors may leave fp32.
        y_q = _scaled(y_q * up_scale, anchor) + gl.where(early, p_q, _between(p_q, anchor_0, anchor_1))
        y_k = gl.where(early, p_k, _between(p_k, anchor_0, anchor_1)) - _scaled(y_k * up_scale, anchor)
        to_pairs = gl.where(early, _between(to_pairs, anchor_0, anchor_1), to_pairs)
        y_q = _product(dA.slice(TILE, TILE, 1), right.slice(TILE, TILE), y_q)
        y_q = _product(dA_rest.slice(TILE, TILE, 1), right.slice(TILE, TILE), y_q)
        y_k = _product(dL.slice(TILE, TILE, 1), right.slice(TILE, TILE), y_k)
        to_pairs = _product(dA.slice(0, TILE).permute((1, 0)), left_q.slice(0, TILE), to_pairs)
        to_pairs = _product(dA_rest.slice(0, TILE).permute((1, 0)), left_q.slice(0, TILE), to_pairs)
        to_pairs = _product(dL.slice(0, TILE).permute((1, 0)), left_k.slice(0, TILE), to_pairs)
        staged.store(_scaled(to_state * up_scale, _beside(total) - anchor))
        to_state = _load(staged)
        y_q, y_k, to_pairs = warpgroup_mma_wait(0, deps=(y_q, y_k, to_pairs))
        # Every warp is through with this half of the states: it has read what was staged behind them.
        staged_S.index(half).store(y_q)
        staged_dS.index(half).store(y_k)
        staged.store(to_pairs)

        # To the rows.
        y_q, y_k, to_pairs = _load(staged_S.index(half)), _load(staged_dS.index(half)), _load(staged)
        w = _load(right)
        to_leaving = w * to_state
        d_G = -w * to_pairs
        q_norm = gl.expand_dims(_per_row(q_norms), 2)
        k_norm = gl.expand_dims(_per_row(k_norms), 2)
        beta = gl.expand_dims(_per_row(betas), 2)
        unit_k = _load(k_tiles.index(half)) * k_norm
        unit_q = _load(q_tile) * q_norm
        own = scale * gl.expand_dims(_per_row_of_two(own_pair), 2)
        out = at + (half * HALF + channel) + group * (GROUP * H * K) + member * (H * K)
        d_G += _load(left_q) * y_q
        d_rows = scale * (up * y_q * down_scale) + own * beta * unit_k
        d_rows = q_norm * (d_rows - gl.expand_dims(_per_row(along_q), 2) * unit_q)
        gl.store(d_q + out, d_rows.to(d_q.dtype.element_ty), mask=inside)
        down = reciprocal(up)
        d_writes = down * (to_pairs + to_state) * down_scale + own * unit_q
        d_beta += gl.sum(gl.reshape(unit_k * d_writes, [COUNT, GROUP, HALF // 2, 2]), 3)
        d_G += _load(left_k) * y_k
        d_rows = up * y_k * down_scale + beta * d_writes
        along_k = gl.expand_dims(2.0 * _per_row_of_two(along_w) - _per_row(along_v), 2)
        d_rows = k_norm * (d_rows - along_k * unit_k)
        gl.store(d_k + out, d_rows.to(d_k.dtype.element_ty), mask=inside)

        # To the gate: what spans a row. Pairs and reads of the entering state: behind the row and not before
        # it. Writes into the leaving state: those before it, summed as such, as the row's own may be far
        # larger.
        group_sum = gl.sum(d_G, 1)
        sums.store(group_sum)
        leaving_sums.store(gl.sum(to_leaving, 1))
        d_g = gl.expand_dims(group_sum, 1) - gl.associative_scan(d_G, 1, add) + d_G
        d_g += _sum_of(sums.load(BY_GROUP), of > own_group)
        # Every warp has read this half of q: the other one comes in its place.
        _copy(q_tile, q + HALF, gl.where(half == 0, rows, 0), stride_qt, COPY)
        async_copy.commit_group()
        async_copy.commit_group()  # of nothing, so that each half waits for the same number
        d_g += _sums_before(to_leaving, 1) + _sum_of(leaving_sums.load(BY_GROUP), of < own_group)
        d_g = d_g * down_scale + exp2(_per_channel(total)) * _sum(S_dS.load(BY_GROUP))
        u = rate * (_load(z_tiles.index(half)) + bias)
        e = exp2(-LOG2_E * u)
        gate = reciprocal(1.0 + e)
        slope = gate * gl.where(e < 1.0, e * gate, 1.0 - gate)
        d_u = gl.where(inside, BOUND * slope * d_g, 0.0)
        d_logits = d_u * rate
        gl.store(d_z + out, d_logits.to(d_z.dtype.element_ty), mask=inside)
        u = gl.minimum(gl.maximum(u, -1e30), 1e30)
        d_rate += gl.sum(d_u * u, 1)
        logit_sums.store(gl.sum(d_logits, 1))
        async_copy.wait_group(2)
        d = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, BY_GROUP))
        gl.store(d_bias + chunk * K + d, gl.sum(logit_sums.load(BY_GROUP), 0))
    async_copy.wait_group(0)
    rate_sums.store(gl.sum(d_rate, 1))
    gl.store(d_A_log + chunk, gl.sum(rate_sums.load(EVERY), 0))
    d_beta = gl.convert_layout(gl.sum(d_beta, 2), ROW)
    i = gl.sum(row, 2)
    beta = _per_row(betas)
    d_logits = 0.5 * (1.0 - beta) * (beta * d_beta + _per_row_of_two(along_w))
    gl.store(d_b + (start + i) * H + h, d_logits.to(d_b.dtype.element_ty), mask=i < rows)


def intra_backward_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    o: torch.Tensor,
    d_o: torch.Tensor,
    d_v: torch.Tensor,
    states: torch.Tensor,
    d_states: torch.Tensor,
    errors: torch.Tensor,
    plan: ChunkPlan,
    lower_bound: float,
    scale: float,
) -> InputGradients:
    """See `intra_backward.intra_backward`; bf16, K = V = 128."""
    T, H, K = q.shape
    d_q, d_k, d_z = (x.new_empty(T, H, K) for x in (q, k, z))
    d_b = b.new_empty(T, H)
    d_A_log = q.new_zeros(plan.chunks, H, dtype=torch.float32)
    d_bias = q.new_zeros(plan.chunks, H, K, dtype=torch.float32)
    _intra_backward_hopper[(plan.chunks, H)](
        q, k, v, z, b, o, d_o, d_v, states, d_states, errors, A_log, dt_bias,
        d_q, d_k, d_z, d_b, d_A_log, d_bias, plan.cu_seqlens, plan.first_chunk, plan.chunk_sequence, scale,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *z.stride()[:2], b.stride(0),
        H=H, BOUND=lower_bound, EPS=L2_EPS, num_warps=WARPS.value,
    )  # fmt: skip
    return InputGradients(d_q, d_k, d_z, d_b, d_A_log.sum(0), d_bias.sum(0))
