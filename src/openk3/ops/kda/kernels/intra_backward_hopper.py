"""`intra_backward` for Hopper at K = V = 128, in explicit layouts (Gluon). The same function as its twin, on
tiles of 32 rows instead of blocks of 16.

Eight warps a chunk. With Gc the log2 decays summed from the chunk's start and M the integer in the middle of
its range over a tile, by channel, rows keep

    up = 2^(Gc - M)      left = read up      right = w / up                   exponents within +-116

Pairs of one tile multiply these as they are. For those between the tiles, whose operands are the same, the
factor 2^(M_1 - M_0) belongs to the channel and not to the rows, so that it is taken out of the product. Being
powers of two, the factors leave each pair's share in the gate's gradient the same number at its reader and at
its writer: the reverse sum over rows cancels pairs that do not span a row to fp32 rounding.

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
K = gl.constexpr(128)
WARPS = gl.constexpr(8)
# Rows of a channel that one thread holds, and how many such groups a chunk has.
GROUP = gl.constexpr(16)
COUNT = gl.constexpr(4)

COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
ROWS = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [4, 2], [1, 0]))  # [64, 128]
GROUPS = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 2], [2, 1, 0]))  # [4, 16, 128]
SUMS = gl.constexpr(gl.SliceLayout(1, GROUPS))  # [4, 128], by group and channel
CHANNELS = gl.constexpr(gl.BlockedLayout([4, 1], [1, 32], [1, 8], [1, 0]))  # all groups in a thread
ROW = gl.constexpr(gl.SliceLayout(1, ROWS))
WIDE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 64, 16]))
SQUARE = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16])
)


@gluon.jit
def _groups(x):
    return gl.convert_layout(gl.reshape(x, [COUNT, GROUP, K]), GROUPS)


@gluon.jit
def _rows(x):
    return gl.convert_layout(gl.reshape(x, [CHUNK, K]), ROWS)


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
def _power_of_two(x):
    """What brings the largest element of `[64, 64]`, not negative, to between 16 and 32, and its inverse.

    Not further than 2^64 up: rows' products with the state, of any size beside the pairs', take part.
    """
    largest = gl.reduce(gl.reduce(x, 1, _largest), 0, _largest)
    exponent = (largest.to(gl.int32, bitcast=True) >> 23) & 255
    exponent = gl.minimum(gl.maximum(exponent, 67), 250)
    scale = ((258 - exponent) << 23).to(gl.float32, bitcast=True)
    return scale, ((exponent - 4) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _copy(buffer, x, rows, stride, ROWS_OF: gl.constexpr):
    """Starts the copy of `[ROWS_OF, 128]` rows, zeros from row `rows` on."""
    i = gl.arange(0, ROWS_OF, layout=gl.SliceLayout(1, COPY))
    d = gl.arange(0, K, layout=gl.SliceLayout(0, COPY))
    async_copy.async_copy_global_to_shared(
        buffer, x + i[:, None] * stride + d[None, :], mask=(i < rows)[:, None]
    )


@gluon.jit
def _load_rows(x, rows, stride):
    i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, COPY))
    d = gl.arange(0, K, layout=gl.SliceLayout(0, COPY))
    return gl.load(x + i[:, None] * stride + d[None, :], mask=(i < rows)[:, None], other=0.0)


@gluon.jit
def _row_dots(x, buffer):
    """`[64]`: products of rows with those in shared memory, summed."""
    return gl.sum(x.to(gl.float32) * buffer.load(COPY).to(gl.float32), 1)


@gluon.jit
def _inverse_norms(buffer, EPS: gl.constexpr):
    x = buffer.load(COPY).to(gl.float32)
    return gl.rsqrt(gl.sum(x * x, 1) + EPS)


@gluon.jit
def _product(left, right, acc):
    return warpgroup_mma(left, right, acc, is_async=True)


@gluon.jit
def _first_product(left, right, LAYOUT: gl.constexpr, COLUMNS: gl.constexpr):
    zero = gl.zeros([CHUNK, COLUMNS], gl.float32, layout=LAYOUT)
    return warpgroup_mma(left, right, zero, use_acc=False, is_async=True)


@gluon.jit
def _per_row(buffer):
    """`[64]` in shared memory beside every channel of its row."""
    values = gl.expand_dims(buffer.load(ROW), 1)
    return gl.convert_layout(gl.reshape(values, [COUNT, GROUP, 1]), GROUPS)


@gluon.jit
def _per_channel(buffer):
    """`[128]` in shared memory beside every row of its channel."""
    values = buffer.load(gl.SliceLayout(0, gl.SliceLayout(0, GROUPS)))
    return gl.expand_dims(gl.expand_dims(values, 0), 0)


@gluon.jit
def _beside(buffer):
    """`[128]` in shared memory as a row of products."""
    return buffer.load(gl.SliceLayout(0, WIDE))[None, :]


@gluon.jit
def _anchor(anchor_0, anchor_1):
    """M of each row's tile."""
    r = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, WIDE))[:, None]
    return gl.where(r < 32, _beside(anchor_0), _beside(anchor_1))


@gluon.jit
def _between(x, anchor_0, anchor_1):
    """x 2^(M_1 - M_0), in two steps: the factor alone may be too small for fp32 where the product is not."""
    apart = _beside(anchor_1) - _beside(anchor_0)
    half = gl.floor(0.5 * apart)
    return x * exp2(half) * exp2(apart - half)


@gluon.jit
def _from_start(anchor_0, anchor_1):
    return exp2(_anchor(anchor_0, anchor_1))


@gluon.jit
def _to_end(anchor_0, anchor_1, total):
    return exp2(_beside(total) - _anchor(anchor_0, anchor_1))


@gluon.jit
def _unit(tile, norms):
    """Normalised rows of raw ones."""
    return _groups(tile.load(ROWS).to(gl.float32)) * _per_row(norms)


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

    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, K], gl.bfloat16)
    PAIRS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], gl.bfloat16)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TABLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    dO_tile = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, K], TILE)
    D_tile = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, K], TILE)
    E_tile = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, K], TILE)
    S_tile = gl.allocate_shared_memory(gl.bfloat16, [K, K], TILE)
    dS_tile = gl.allocate_shared_memory(gl.bfloat16, [K, K], TILE)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, K], TILE)
    k_tile = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, K], TILE)
    z_tile = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, K], TILE)
    _copy(dO_tile, d_o + at, rows, H * K, CHUNK)
    _copy(D_tile, d_v + at, rows, H * K, CHUNK)
    _copy(E_tile, errors + chunk * CHUNK * K, CHUNK, K, CHUNK)
    _copy(S_tile, states + chunk * K * K, K, K, K)
    _copy(dS_tile, d_states + chunk * K * K, K, K, K)
    async_copy.commit_group()
    _copy(q_tile, q, rows, stride_qt, CHUNK)
    _copy(k_tile, k, rows, stride_kt, CHUNK)
    _copy(z_tile, z, rows, stride_zt, CHUNK)
    async_copy.commit_group()

    o_rows = _load_rows(o + at, rows, H * K)
    v_rows = _load_rows(v, rows, stride_vt)
    t = gl.arange(0, CHUNK, layout=VECTOR)
    beta_logits = gl.load(b + t * stride_b, mask=t < rows, other=0.0).to(gl.float32)

    # Through the entering state, the gradients to pairs, and sums over K.
    async_copy.wait_group(1)
    fence_async_shared()
    dA = _first_product(dO_tile, E_tile.permute((1, 0)), SQUARE, CHUNK)
    dL = _first_product(D_tile, E_tile.permute((1, 0)), SQUARE, CHUNK)
    y_q = _first_product(dO_tile, S_tile, WIDE, K)
    y_k = _first_product(D_tile, S_tile, WIDE, K)
    along_q = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT)
    along_v = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT)
    along_q.store(_row_dots(o_rows, dO_tile))
    along_v.store(_row_dots(v_rows, D_tile))
    S_dS = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    S_dS.store(gl.sum(S_tile.load(COPY).to(gl.float32) * dS_tile.load(COPY).to(gl.float32), 0))
    dA, dL, y_q, y_k = warpgroup_mma_wait(0, deps=(dA, dL, y_q, y_k))
    i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, SQUARE))[None, :]
    own_pair = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT)
    along_w = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT)
    own_pair.store(gl.sum(gl.where(i == j, dA, 0.0), 1))
    along_w.store(gl.sum(gl.where(i == j, dL, 0.0), 1))
    up_scale, down_scale = _power_of_two(gl.maximum(gl.abs(dA), gl.abs(dL)))
    dA *= up_scale
    dL *= -up_scale
    same, later = (i // 32 == j // 32) & (i > j), i // 32 > j // 32
    dA_own = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], PAIRS)
    dA_across = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], PAIRS)
    dL_own = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], PAIRS)
    dL_across = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], PAIRS)
    dA_own.store(gl.where(same, dA, 0.0).to(gl.bfloat16))
    dA_across.store(gl.where(later, dA, 0.0).to(gl.bfloat16))
    dL_own.store(gl.where(same, dL, 0.0).to(gl.bfloat16))
    dL_across.store(gl.where(later, dL, 0.0).to(gl.bfloat16))

    # Gate, anchors, norms.
    async_copy.wait_group(0)
    q_norms = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT)
    k_norms = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT)
    betas = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT)
    q_norms.store(_inverse_norms(q_tile, EPS))
    k_norms.store(_inverse_norms(k_tile, EPS))
    beta = reciprocal(1.0 + exp2(-LOG2_E * beta_logits))
    betas.store(beta)
    gl.store(
        d_b + start * H + h + t * H,
        ((1.0 - beta) * along_w.load(VECTOR)).to(d_b.dtype.element_ty),
        mask=t < rows,
    )
    group = gl.arange(0, COUNT, layout=gl.SliceLayout(1, gl.SliceLayout(2, GROUPS)))
    group = gl.expand_dims(gl.expand_dims(group, 1), 2)
    row = gl.arange(0, GROUP, layout=gl.SliceLayout(1, gl.SliceLayout(0, GROUPS)))
    row = group * GROUP + gl.expand_dims(gl.expand_dims(row, 1), 0)
    d = gl.arange(0, K, layout=gl.SliceLayout(0, gl.SliceLayout(0, GROUPS)))
    rate = gl.exp(gl.minimum(gl.load(A_log + h).to(gl.float32), 60.0))
    inside = row < rows
    bias = gl.load(dt_bias + h * K + d).to(gl.float32)
    channel = gl.expand_dims(gl.expand_dims(d, 0), 0)
    bias = gl.expand_dims(gl.expand_dims(bias, 0), 0)
    u = rate * (_groups(z_tile.load(ROWS).to(gl.float32)) + bias)
    a = (BOUND * LOG2_E) * reciprocal(1.0 + exp2(-LOG2_E * u))
    a = gl.where(inside, a, 0.0)
    sums = gl.allocate_shared_memory(gl.float32, [COUNT, K], TABLE)
    anchor_0 = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    anchor_1 = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    total = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    sums.store(gl.sum(a, 1))
    by_group = sums.load(CHANNELS)
    of = gl.arange(0, COUNT, layout=gl.SliceLayout(1, CHANNELS))[:, None]
    first_tile = gl.sum(gl.where(of < COUNT // 2, by_group, 0.0), 0)
    both_tiles = gl.sum(by_group, 0)
    anchor_0.store(gl.floor(0.5 * first_tile))
    anchor_1.store(gl.floor(0.5 * (first_tile + both_tiles)))
    total.store(both_tiles)
    sums.store(gl.associative_scan(by_group, 0, add) - by_group)
    Gc = gl.associative_scan(a, 1, add) + gl.expand_dims(sums.load(SUMS), 1)
    M = gl.where(group < COUNT // 2, _per_channel(anchor_0), _per_channel(anchor_1))
    up = exp2(Gc - M)
    # Operands of the pairs.
    right = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, K], TILE)
    left_q = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, K], TILE)
    left_k = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, K], TILE)
    unit = _unit(k_tile, k_norms)
    left_k.store(_rows((unit * up).to(gl.bfloat16)))
    right.store(_rows((unit * _per_row(betas) * reciprocal(up)).to(gl.bfloat16)))
    left_q.store(_rows((_unit(q_tile, q_norms) * (scale * up)).to(gl.bfloat16)))
    fence_async_shared()

    # To q.
    across = _first_product(dA_across, right, WIDE, K)
    across = warpgroup_mma_wait(0, deps=(across,))
    y_q = y_q * (up_scale * _from_start(anchor_0, anchor_1)) + _between(across, anchor_0, anchor_1)
    y_q = _product(dA_own, right, y_q)
    y = _groups(gl.convert_layout(warpgroup_mma_wait(0, deps=(y_q,)), ROWS))
    d_G = _groups(left_q.load(ROWS).to(gl.float32)) * y
    writes = _unit(k_tile, k_norms) * _per_row(betas)
    d_unit = scale * (up * y * down_scale + _per_row(own_pair) * writes)
    out = at + row * (H * K) + channel
    d_rows = _per_row(q_norms) * (d_unit - _per_row(along_q) * _unit(q_tile, q_norms))
    gl.store(d_q + out, d_rows.to(d_q.dtype.element_ty), mask=inside)

    # To k as a reader.
    across = _first_product(dL_across, right, WIDE, K)
    across = warpgroup_mma_wait(0, deps=(across,))
    y_k = _between(across, anchor_0, anchor_1) - y_k * (up_scale * _from_start(anchor_0, anchor_1))
    y_k = _product(dL_own, right, y_k)
    y = _groups(gl.convert_layout(warpgroup_mma_wait(0, deps=(y_k,)), ROWS))
    d_G += _groups(left_k.load(ROWS).to(gl.float32)) * y
    d_unit = up * y * down_scale

    # To w = beta k.
    y = _first_product(E_tile, dS_tile, WIDE, K)
    across = _first_product(dA_across.permute((1, 0)), left_q, WIDE, K)
    across = _product(dL_across.permute((1, 0)), left_k, across)
    y, across = warpgroup_mma_wait(0, deps=(y, across))
    across = _product(dA_own.permute((1, 0)), left_q, _between(across, anchor_0, anchor_1))
    across = _product(dL_own.permute((1, 0)), left_k, across)
    to_state = _groups(gl.convert_layout(y * _to_end(anchor_0, anchor_1, total), ROWS))
    to_pairs = _groups(gl.convert_layout(warpgroup_mma_wait(0, deps=(across,)), ROWS))
    w = _groups(right.load(ROWS).to(gl.float32))
    d_G -= w * to_pairs
    to_leaving = w * to_state
    down = reciprocal(up)
    d_writes = down * to_pairs * down_scale + down * to_state
    d_writes += (scale * _per_row(own_pair)) * _unit(q_tile, q_norms)
    d_unit += _per_row(betas) * d_writes
    along_k = 2.0 * _per_row(along_w) - _per_row(along_v)
    d_rows = _per_row(k_norms) * (d_unit - along_k * _unit(k_tile, k_norms))
    gl.store(d_k + out, d_rows.to(d_k.dtype.element_ty), mask=inside)

    # To the gate: what spans a row. Pairs and reads of the entering state: behind the row and not before it.
    # Writes into the leaving state: those before it, summed as such, as the row's own may be far larger.
    group_sum = gl.sum(d_G, 1)
    sums.store(group_sum)
    by_group = sums.load(CHANNELS)
    sums.store(gl.expand_dims(gl.sum(by_group, 0), 0) - gl.associative_scan(by_group, 0, add))
    d_g = gl.expand_dims(group_sum, 1) - gl.associative_scan(d_G, 1, add) + d_G
    d_g = (d_g + gl.expand_dims(sums.load(SUMS), 1)) * down_scale
    sums.store(gl.sum(to_leaving, 1))
    sums.store(_sums_before(sums.load(CHANNELS), 0))
    d_g += _sums_before(to_leaving, 1) + gl.expand_dims(sums.load(SUMS), 1)
    d_g += exp2(_per_channel(total)) * _per_channel(S_dS)
    u = rate * (_groups(z_tile.load(ROWS).to(gl.float32)) + bias)
    e = exp2(-LOG2_E * u)
    gate = reciprocal(1.0 + e)
    slope = gate * gl.where(e < 1.0, e * gate, 1.0 - gate)
    d_u = gl.where(inside, BOUND * slope * d_g, 0.0)
    d_logits = d_u * rate
    gl.store(d_z + out, d_logits.to(d_z.dtype.element_ty), mask=inside)
    u = gl.minimum(gl.maximum(u, -1e30), 1e30)
    gl.store(d_A_log + chunk, gl.sum(gl.sum(gl.sum(d_u * u, 1), 1), 0))
    sums.store(gl.sum(d_logits, 1))
    d = gl.arange(0, K, layout=gl.SliceLayout(0, CHANNELS))
    gl.store(d_bias + chunk * K + d, gl.sum(sums.load(CHANNELS), 0))


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
