"""`prepare` for Hopper at K = 128, in explicit layouts (Gluon). The same function as `prepare._prepare`.

Four warps a chunk. A thread owns two channels of all 32 rows of one tile, so that the sum of gates down the
rows stays in its registers, and nothing is exchanged between threads but operands of products, which are
written over the raw inputs in shared memory:

    - row norms are the diagonal of a 64 x 64 product of the raw rows with themselves, exact in fp32;
    - pairs of both tiles come from one 64 x 64 product, of which the diagonal blocks count; those between the
      tiles from the same left operand, whose shift by a power of two is taken out of the result;
    - both diagonal blocks are inverted at once, one a warp, in registers. The transpose is carried along: in
      the layouts of mma.m16n8k16 the accumulators of M^T are the right operand M.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-untyped]
    async_copy,
    fence_async_shared,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openk3.ops.kda.kernels.hopper_math import add, exp2, reciprocal

LOG2_E = gl.constexpr(1.4426950408889634)
TILE = gl.constexpr(32)
CHUNK = gl.constexpr(64)
K = gl.constexpr(128)
# Half of the largest sum of 32 gates in log2, 115.4, up to an integer: shifts are exact.
SHIFT = gl.constexpr(116.0)
DOWN = gl.constexpr(2.0**-116)

ROWS = gl.constexpr(gl.BlockedLayout([32, 2], [1, 32], [2, 2], [1, 0]))  # [64, 128]
TILES = gl.constexpr(
    gl.BlockedLayout([1, 32, 2], [1, 1, 32], [2, 1, 2], [2, 1, 0])
)  # the same as [2, 32, 128]
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
ROW = gl.constexpr(gl.SliceLayout(1, ROWS))
SQUARE = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
)
HALF = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16]))
# Two diagonal blocks, one a warp (warps 2 and 3 repeat them), and the block below them, on all four.
BLOCKS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8])
)
BELOW = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 2], instr_shape=[16, 8]))


@gluon.jit
def _tiles(x):
    return gl.convert_layout(gl.reshape(x, [2, TILE, K]), TILES)


@gluon.jit
def _rows(x):
    return gl.convert_layout(gl.reshape(x, [CHUNK, K]), ROWS)


@gluon.jit
def _copy(buffer, x, start, rows, stride):
    """Starts the copy of `[64, 128]`, zeros from row `rows` on."""
    i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, COPY))
    d = gl.arange(0, K, layout=gl.SliceLayout(0, COPY))
    x += start * stride
    async_copy.async_copy_global_to_shared(
        buffer, x + i[:, None] * stride + d[None, :], mask=(i < rows)[:, None]
    )


@gluon.jit
def _product(left, right, LAYOUT: gl.constexpr, COLUMNS: gl.constexpr):
    """Starts left `[64, 128]` times right^T `[COLUMNS, 128]`, both in shared memory."""
    zero = gl.zeros([CHUNK, COLUMNS], gl.float32, layout=LAYOUT)
    return warpgroup_mma(left, right.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _inverse_norms(squares, EPS: gl.constexpr):
    i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, SQUARE))
    j = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, SQUARE))
    return gl.rsqrt(gl.sum(gl.where(i[:, None] == j[None, :], squares, 0.0), 1) + EPS)


@gluon.jit
def _per_row(buffer):
    """`[64]` in shared memory beside every channel of its row: `[2, 32, 1]`."""
    values = gl.expand_dims(buffer.load(ROW), 1)
    return gl.convert_layout(gl.reshape(values, [2, TILE, 1]), TILES)


@gluon.jit
def _lower(own, between, DIAGONAL: gl.constexpr):
    """Masked: own pairs of each tile, and those of the later with the earlier in rows 32-63."""
    i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, SQUARE))[None, :]
    return gl.where((i // TILE == j // TILE) & (i >= j + (1 - DIAGONAL)), own, 0.0), between * DOWN


@gluon.jit
def _blocks(first, second):
    """Two `[32, 32]` in shared memory as one `[2, 32, 32]`, one a warp."""
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    both = gl.permute(gl.join(first.load(SPREAD), second.load(SPREAD)), (2, 0, 1))
    return gl.convert_layout(both, BLOCKS).to(gl.float32)


@gluon.jit
def _blocks_product(left, right_transposed):
    A: gl.constexpr = gl.DotOperandLayout(0, BLOCKS, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, BLOCKS, 2)
    right = gl.convert_layout(gl.permute(right_transposed, (0, 2, 1)).to(gl.float16), B, assert_trivial=True)
    zero = gl.zeros([2, TILE, TILE], gl.float32, layout=BLOCKS)
    return mma_v2(gl.convert_layout(left.to(gl.float16), A, assert_trivial=True), right, zero)


@gluon.jit
def _inverses(L, L_t):
    """(I + L)^-1 of two strictly lower `[2, 32, 32]`; L_t is L^T. See `prepare._inverse`."""
    MATRIX: gl.constexpr = gl.SliceLayout(0, BLOCKS)
    i = gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(1, MATRIX))[:, None], 0)
    j = gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(0, MATRIX))[None, :], 0)
    one = gl.where(i == j, 1.0, 0.0)
    X = one - gl.where((i >> 1 == j >> 1) & (i > j), L, 0.0)
    X_t = one - gl.where((i >> 1 == j >> 1) & (j > i), L_t, 0.0)
    for level in gl.static_range(1, 5):
        near = i >> (level + 1) == j >> (level + 1)
        below = gl.where(near & (i >> level > j >> level), L, 0.0)
        above = gl.where(near & (j >> level > i >> level), L_t, 0.0)
        step = _blocks_product(_blocks_product(X, above), X_t)
        step_t = _blocks_product(_blocks_product(X_t, below), X)
        X -= step
        X_t -= step_t
    return X


@gluon.jit
def prepare_hopper(
    q, k, z, b, A_log, dt_bias, cu_seqlens, first_chunk, chunk_sequence,
    qd, kd, ke, inverse, attention, decay,
    scale, stride_qt: gl.constexpr, stride_qh: gl.constexpr, stride_kt: gl.constexpr, stride_kh: gl.constexpr,
    stride_zt: gl.constexpr, stride_zh: gl.constexpr, stride_b: gl.constexpr,
    H: gl.constexpr, BOUND: gl.constexpr, EPS: gl.constexpr,
):  # fmt: skip
    c, h = gl.program_id(0).to(gl.int64), gl.program_id(1).to(gl.int64)
    n = gl.load(chunk_sequence + c)
    if n < 0:
        return
    start = gl.load(cu_seqlens + n) + (c - gl.load(first_chunk + n)) * CHUNK
    rows = gl.minimum(gl.load(cu_seqlens + n + 1) - start, CHUNK).to(gl.int32)

    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, K], gl.bfloat16)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    left_q = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, K], WIDE)
    left_k = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, K], WIDE)
    right = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, K], WIDE)
    _copy(left_q, q + h * stride_qh, start, rows, stride_qt)
    _copy(left_k, k + h * stride_kh, start, rows, stride_kt)
    async_copy.commit_group()
    _copy(right, z + h * stride_zh, start, rows, stride_zt)
    async_copy.commit_group()

    t = gl.arange(0, CHUNK, layout=VECTOR)
    logits = gl.load(b + h + (start + t) * stride_b, mask=t < rows, other=0.0).to(gl.float32)
    betas = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT)
    betas.store(reciprocal(1.0 + exp2(-LOG2_E * logits)))
    # sigmoid(exp(A) (z + bias)) = 1 / (1 + 2^(slope z + offset))
    d = gl.arange(0, K, layout=gl.SliceLayout(0, gl.SliceLayout(0, TILES)))
    slope = -LOG2_E * gl.exp(gl.minimum(gl.load(A_log + h).to(gl.float32), 60.0))
    offset = slope * gl.load(dt_bias + h * K + d).to(gl.float32)

    async_copy.wait_group(1)
    fence_async_shared()
    squares_q = _product(left_q, left_q, SQUARE, CHUNK)
    squares_k = _product(left_k, left_k, SQUARE, CHUNK)
    squares_q, squares_k = warpgroup_mma_wait(0, deps=(squares_q, squares_k))
    norms_q = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT)
    norms_k = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT)
    norms_q.store(_inverse_norms(squares_q, EPS) * scale)
    norms_k.store(_inverse_norms(squares_k, EPS))
    async_copy.wait_group(0)
    i = gl.arange(0, TILE, layout=gl.SliceLayout(1, gl.SliceLayout(0, TILES)))
    i = gl.expand_dims(gl.expand_dims(i, 1), 0)
    tile = gl.expand_dims(
        gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, TILES))), 1), 2
    )
    channel = gl.expand_dims(gl.expand_dims(d, 0), 0)
    slope_z = _tiles(right.load(ROWS).to(gl.float32)) * slope + gl.expand_dims(gl.expand_dims(offset, 0), 0)
    a = (BOUND * LOG2_E) * reciprocal(1.0 + exp2(slope_z))
    a = gl.where(tile * TILE + i < rows, a, 0.0)
    G = gl.associative_scan(a, 1, add)
    total = gl.expand_dims(gl.sum(a, 1), 1)  # [2, 1, 128]
    own_decay = exp2(total)
    decays = gl.allocate_shared_memory(gl.float32, [2, K], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    decays.store(
        gl.convert_layout(gl.reshape(own_decay, [2, K]), gl.BlockedLayout([1, 2], [1, 32], [2, 2], [1, 0]))
    )
    up = exp2(G + SHIFT)
    p0 = decays.slice(0, 1).load(gl.BlockedLayout([1, 2], [1, 32], [2, 2], [1, 0]))
    p1 = decays.slice(1, 1).load(gl.BlockedLayout([1, 2], [1, 32], [2, 2], [1, 0]))
    p0 = gl.convert_layout(gl.reshape(p0, [1, 1, K]), TILES)
    p1 = gl.convert_layout(gl.reshape(p1, [1, 1, K]), TILES)
    from_start = gl.where(tile == 1, p0, 1.0) * DOWN
    to_end = gl.where(tile == 0, p1, 1.0)

    chunk = c * H + h
    out = chunk * CHUNK * K + (tile * TILE + i) * K + channel
    x = _tiles(left_q.load(ROWS).to(gl.float32)) * _per_row(norms_q) * up
    left_q.store(_rows(x.to(gl.bfloat16)))
    gl.store(qd + out, (x * from_start).to(gl.bfloat16))
    # Without the write strength, which may be small: where gates are near 0 no exponents are left for it.
    x = _tiles(left_k.load(ROWS).to(gl.float32)) * _per_row(norms_k) * reciprocal(up)
    right.store(_rows(x.to(gl.bfloat16)))
    x *= exp2(total + SHIFT) * _per_row(betas)
    earlier = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, K], WIDE)
    earlier.store(_rows(x.to(gl.bfloat16)))
    gl.store(ke + out, (x * to_end).to(gl.bfloat16))
    x = _tiles(left_k.load(ROWS).to(gl.float32)) * _per_row(norms_k) * up
    left_k.store(_rows(x.to(gl.bfloat16)))
    gl.store(kd + out, (x * from_start).to(gl.bfloat16))
    gl.store(decay + chunk * K + channel, p0 * p1)

    fence_async_shared()
    first = earlier.slice(0, TILE)
    own_A = _product(left_q, right, SQUARE, CHUNK)
    between_A = _product(left_q, first, HALF, TILE)
    own_L = _product(left_k, right, SQUARE, CHUNK)
    between_L = _product(left_k, first, HALF, TILE)
    own_A, between_A, own_L, between_L = warpgroup_mma_wait(0, deps=(own_A, between_A, own_L, between_L))
    r = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, SQUARE))[:, None]
    s = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, SQUARE))[None, :]
    r_half = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, HALF))[:, None]
    s_half = gl.arange(0, TILE, layout=gl.SliceLayout(0, HALF))[None, :]
    pairs = chunk * CHUNK * CHUNK
    beside = betas.load(gl.SliceLayout(0, SQUARE))[None, :]
    own_A *= beside
    own_L *= beside
    own, between = _lower(own_A, between_A, 1)
    gl.store(attention + pairs + r * CHUNK + s, own.to(gl.bfloat16), mask=(r < TILE) | (s >= TILE))
    gl.store(attention + pairs + r_half * CHUNK + s_half, between.to(gl.bfloat16), mask=r_half >= TILE)

    own, between = _lower(own_L, between_L, 0)
    L = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], PLAIN)
    L10 = gl.allocate_shared_memory(gl.float16, [CHUNK, TILE], PLAIN)
    L.store(own.to(gl.float16))
    L10.store(between.to(gl.float16))
    L0 = L.slice(0, TILE, 0).slice(0, TILE, 1)
    L1 = L.slice(TILE, TILE, 0).slice(TILE, TILE, 1)
    X = _inverses(_blocks(L0, L1), _blocks(L0.permute((1, 0)), L1.permute((1, 0))))
    inverses = gl.allocate_shared_memory(gl.float16, [CHUNK, TILE], PLAIN)
    inverses.store(gl.reshape(X.to(gl.float16), [CHUNK, TILE]))
    BELOW_A: gl.constexpr = gl.DotOperandLayout(0, BELOW, 2)
    BELOW_B: gl.constexpr = gl.DotOperandLayout(1, BELOW, 2)
    zero = gl.zeros([TILE, TILE], gl.float32, layout=BELOW)
    product = gl.allocate_shared_memory(gl.float16, [TILE, TILE], PLAIN)
    step = mma_v2(inverses.slice(TILE, TILE).load(BELOW_A), L10.slice(TILE, TILE).load(BELOW_B), zero)
    product.store(step.to(gl.float16))
    below = 0.0 - mma_v2(product.load(BELOW_A), inverses.slice(0, TILE).load(BELOW_B), zero)

    MATRIX: gl.constexpr = gl.SliceLayout(0, BLOCKS)
    r = gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(1, MATRIX))[:, None], 0)
    s = gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(0, MATRIX))[None, :], 0)
    block = gl.expand_dims(
        gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, BLOCKS))), 1), 2
    )
    gl.store(inverse + pairs + block * (TILE * CHUNK + TILE) + r * CHUNK + s, X.to(gl.bfloat16))
    r = gl.arange(0, TILE, layout=gl.SliceLayout(1, BELOW))[:, None]
    s = gl.arange(0, TILE, layout=gl.SliceLayout(0, BELOW))[None, :]
    gl.store(inverse + pairs + TILE * CHUNK + r * CHUNK + s, below.to(gl.bfloat16))
    gl.store(inverse + pairs + TILE + r * CHUNK + s, gl.zeros([TILE, TILE], gl.bfloat16, layout=BELOW))
