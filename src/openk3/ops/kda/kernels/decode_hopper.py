"""`decode` and `replay` for Hopper at K = 128 in bf16, in explicit layouts (Gluon), beside their twins.

A row of the state lies with 4 lanes, 32 columns each: a sum over a row is 8 fused steps in a lane, then two
exchanges. What a token needs besides (convolution, norms, gates) is done once, a warp to each of its q, k, v
and decay, all tokens in turn and before the state has arrived, and goes through shared memory.

What both kernels share is written once and in one layout, so that replayed states equal decoded ones to the
bit. A window meets the state on the tensor cores: what a lane holds of a row are operands of mma.m16n8k8 as
they are, columns in another order. Operands are rounded to TF32, to within 2^-12 of each. While the state is
on its way, pairs of the window's tokens are formed and solved for what errors add to outputs, one `[8, 8]`,
so that the rest is two products.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2  # type: ignore[import-untyped]

from openk3.ops.kda.kernels.hopper_math import add, exp2, reciprocal

LOG2_E = gl.constexpr(1.4426950408889634)
K = gl.constexpr(128)
# Natural log: below it a decay counts as it in a window's outputs, which adds 3e-7 of a value.
PAIR_FLOOR = gl.constexpr(-15.0)
FLAT1 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FLAT3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
FLAT4 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
FLAT2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# 16-byte units of 8 neighbouring rows lie in different banks.
ROWS8 = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
# So do two neighbours' 64 bytes, which 8 lanes read at once in `rows_layout`.
ROWS2 = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 2, [1, 0]))


@gluon.constexpr_function
def rows_layout(rows, warps):
    """`[rows, 128]`, 16 rows a warp, 4 lanes a row, 4 columns at a time; repeated where rows are fewer."""
    reg = [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]]
    spread = [[16 << bit if 16 << bit < rows else 0, 0] for bit in range(warps.bit_length() - 1)]
    row = 16 * warps
    while row < rows:
        reg.append([row, 0])
        row *= 2
    if rows == 8:
        reg.remove([8, 0])
    return gl.DistributedLinearLayout(reg, [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], spread, [], [rows, 128])


@gluon.constexpr_function
def tokens_layout(warps):
    """`[groups, 4, 128]`: a warp has one of a token's q, k, v and decay, a lane 4 channels of it."""
    return gl.BlockedLayout([1, 1, 4], [1, 1, 32], [warps // 4, 4, 1], [2, 1, 0])


@gluon.jit
def _sigmoid(x):
    """Of x log2(e)."""
    return reciprocal(1.0 + exp2(-x))


@gluon.jit
def _rsqrt(x):
    return gl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _offsets(LAYOUT: gl.constexpr):
    """Of a head's state `[K, K]` in memory."""
    v = gl.arange(0, K, layout=gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, K, layout=gl.SliceLayout(0, LAYOUT))
    return v[:, None] * K + c[None, :]


@gluon.jit
def _head(taps, A_log, dt_bias, scale, h, kind, i, H: gl.constexpr):
    """What does not change from token to token, beside the channels: taps, and what `_token` needs."""
    channel = (kind * H + h) * K + i
    known = kind < 3
    C: gl.constexpr = 3 * H * K
    w0 = gl.load(taps + channel, mask=known, other=0.0).to(gl.float32)
    w1 = gl.load(taps + C + channel, mask=known, other=0.0).to(gl.float32)
    w2 = gl.load(taps + 2 * C + channel, mask=known, other=0.0).to(gl.float32)
    w3 = gl.load(taps + 3 * C + channel, mask=known, other=0.0).to(gl.float32)
    bias = gl.load(dt_bias + h * K + i, mask=kind == 3, other=0.0).to(gl.float32)
    rate = gl.minimum(exp2(LOG2_E * gl.load(A_log + h).to(gl.float32)), 1e38)
    slope = LOG2_E * gl.where(kind == 3, rate, 1.0)
    factor = gl.where(kind == 0, scale, 1.0)
    return w0, w1, w2, w3, bias, slope, factor


@gluon.jit
def _token(x, s: gl.constexpr, head, kind, decayed, lower_bound, l2_eps, BOUNDED: gl.constexpr):
    """q, k, v and decay (where `decayed`, or else its log2) `[G, 4, 128]`, from the raw inputs x[s:s + 4]."""
    w0, w1, w2, w3, bias, slope, factor = head
    x3 = x[s + 3].to(gl.float32)
    y = gl.fma(x[s + 1].to(gl.float32), w1, x[s].to(gl.float32) * w0)
    y = gl.fma(x3, w3, gl.fma(x[s + 2].to(gl.float32), w2, y))
    u = gl.where(kind == 3, x3 + bias, y)
    if BOUNDED:
        y = gl.where(kind == 3, lower_bound, u) * _sigmoid(u * slope)
    else:
        e = exp2(-LOG2_E * gl.abs(u))
        log1p = gl.where(e < 0.01, e * (1.0 - e * (0.5 - e * (1 / 3))), gl.log(1.0 + e))
        softplus = gl.maximum(u, 0.0) + log1p
        y = gl.where(kind == 3, softplus * (slope * (-1 / LOG2_E)), u * _sigmoid(u * LOG2_E))
    log_decay = y * LOG2_E
    y = gl.where(kind == 3, gl.where(decayed, exp2(log_decay), log_decay), y)
    norm = _rsqrt(gl.expand_dims(gl.sum(y * y, 2), 2) + l2_eps)
    return y * gl.where(kind < 2, norm * factor, 1.0)


@gluon.jit
def _columns(x, N: gl.constexpr):
    """Left and right half of `[K, N]`; nothing moves."""
    return gl.split(gl.permute(gl.reshape(x, [K, 2, N // 2]), (0, 2, 1)))


@gluon.jit
def _eighths(x):
    left, right = _columns(x, 128)
    a, b = _columns(left, 64)
    c, d = _columns(right, 64)
    a0, a1 = _columns(a, 32)
    b0, b1 = _columns(b, 32)
    c0, c1 = _columns(c, 32)
    d0, d1 = _columns(d, 32)
    return a0, a1, b0, b1, c0, c1, d0, d1


@gluon.jit
def _against(S, x):
    """S x `[128]`: fused along the eighths of a row, then over the 16 sums."""
    x, _ = gl.broadcast(gl.expand_dims(x, 0), S)
    S0, S1, S2, S3, S4, S5, S6, S7 = _eighths(S)
    x0, x1, x2, x3, x4, x5, x6, x7 = _eighths(x)
    y = gl.fma(S1, x1, S0 * x0)
    y = gl.fma(S3, x3, gl.fma(S2, x2, y))
    y = gl.fma(S5, x5, gl.fma(S4, x4, y))
    y = gl.fma(S7, x7, gl.fma(S6, x6, y))
    return gl.convert_layout(gl.sum(y, 1), gl.SliceLayout(1, S.type.layout))


@gluon.jit
def _advance(S, rows, q, beta):
    """The state after the token whose q is row q of `[rows, 128]` in shared memory; k, v, decay follow it."""
    ROW: gl.constexpr = gl.SliceLayout(0, S.type.layout)
    S = S * gl.expand_dims(rows.index(q + 3).load(ROW), 0)
    k = rows.index(q + 1).load(ROW)
    error = beta * (rows.index(q + 2).load(gl.SliceLayout(1, S.type.layout)) - _against(S, k))
    return gl.fma(gl.expand_dims(error, 1), gl.expand_dims(k, 0), S)


@gluon.jit
def decode_hopper(
    qkv, z, b, gate, state, tail, slots, taps, A_log, dt_bias, norm_weight, out,
    scale, lower_bound, norm_eps, l2_eps, H: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    STATE: gl.constexpr = rows_layout(128, WARPS)
    TOKENS: gl.constexpr = tokens_layout(WARPS)
    OUT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    C: gl.constexpr = 3 * H * K
    n = gl.program_id(0).to(gl.int64)
    h = gl.program_id(1)
    slot = gl.load(slots + n).to(gl.int64)
    e = gl.arange(0, K, layout=OUT)
    row = (n * H + h) * K
    if slot < 0:
        gl.store(out + row + e, gl.zeros([K], out.dtype.element_ty, layout=OUT))
        return
    v = gl.arange(0, K, layout=gl.SliceLayout(1, STATE))
    c = gl.arange(0, K, layout=gl.SliceLayout(0, STATE))
    cells = state + (slot * H + h) * (K * K) + v[:, None] * K + c[None, :]

    kind = gl.expand_dims(
        gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, TOKENS))), 0), 2
    )
    i = gl.expand_dims(
        gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, gl.SliceLayout(1, TOKENS))), 0), 1
    )
    head = _head(taps, A_log, dt_bias, scale, h, kind, i, H)
    channel = (kind * H + h) * K + i
    known = kind < 3
    old = tail + slot * (3 * C) + channel
    x0 = gl.load(old, mask=known, other=0.0)
    x1 = gl.load(old + C, mask=known, other=0.0)
    x2 = gl.load(old + 2 * C, mask=known, other=0.0)
    x3 = gl.where(
        known,
        gl.load(qkv + n * C + channel, mask=known, other=0.0),
        gl.load(z + row + i, mask=kind == 3, other=0.0),
    )
    logits = gl.load(gate + row + e).to(gl.float32)
    gain = gl.load(norm_weight + e).to(gl.float32)
    beta = _sigmoid(gl.load(b + n * H + h).to(gl.float32) * LOG2_E)

    S = gl.load(cells)
    gl.thread_barrier()  # several may hold the same channels: all have asked for the tail before it moves on
    gl.store(old, x1, mask=known)
    gl.store(old + C, x2, mask=known)
    gl.store(old + 2 * C, x3, mask=known)

    token = _token((x0, x1, x2, x3), 0, head, kind, kind == 3, lower_bound, l2_eps, BOUNDED)
    ready = gl.allocate_shared_memory(gl.float32, [1, 4, K], FLAT3)
    ready.store(token)
    rows = ready._reinterpret(gl.float32, [4, K], FLAT1)
    S = _advance(S, rows, 0, beta)
    o = _against(S, rows.index(0).load(gl.SliceLayout(0, STATE)))
    gl.store(cells, S)
    outputs = gl.allocate_shared_memory(gl.float32, [K], FLAT1)
    outputs.store(o)
    o = outputs.load(OUT)
    y = o * _rsqrt(gl.sum(o * o, 0) / K + norm_eps) * gain * _sigmoid(logits * LOG2_E)
    gl.store(out + row + e, y.to(out.dtype.element_ty))


@gluon.jit
def _rounded(x):
    """To TF32, of which mma reads the leading bits."""
    return ((x.to(gl.int32, bitcast=True) + 0x1000) & -0x2000).to(gl.float32, bitcast=True)


@gluon.jit
def _operand(x, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """`[ROWS, 128]` in `rows_layout` as an operand, columns in the order of lanes."""
    x = gl.reshape(gl.permute(gl.reshape(x, [ROWS, 8, 4, 4]), (0, 1, 3, 2)), [ROWS, K])
    if LAYOUT.operand_index == 1:
        x = gl.permute(x, (1, 0))
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _product(left, right, M: gl.constexpr, N: gl.constexpr, ACC: gl.constexpr):
    """left `[M, 128]` times right^T `[N, 128]`, both in `rows_layout` and rounded."""
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 1)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 1)
    y = gl.zeros([M, N], gl.float32, layout=ACC)
    return mma_v2(_operand(left, M, A), _operand(right, N, B), y, input_precision="tf32")


@gluon.jit
def _stack(x):
    """Tensors `[G, 4, K]` of 4 or 8 tokens as one `[T, G, 4, K]`."""
    y = gl.join(gl.join(x[0], x[1]), gl.join(x[2], x[3]))
    if len(x) == 4:
        y = gl.permute(y, (4, 3, 0, 1, 2))
    else:
        y = gl.join(y, gl.join(gl.join(x[4], x[5]), gl.join(x[6], x[7])))
        y = gl.permute(y, (5, 4, 3, 0, 1, 2))
    return gl.reshape(y, [len(x), y.shape[-3], 4, K])


@gluon.jit
def _outputs_of_errors(pairs, W: gl.constexpr, LAYOUT: gl.constexpr):
    """What errors add to outputs, A (I + L)^-1 transposed, `[16, 8]` as an operand, column by column.

    pairs `[16, 8]` in shared memory: rows j are A_ij, rows 8 + j are L_ij; token i is column
    2 (i % 4) + i // 4 there and in the result, whose rows are tokens j. Rows and columns beyond W are zero.
    """
    ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    n = gl.arange(0, 8, layout=ROW)
    i = n // 2 + n % 2 * 4
    j = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    y = gl.zeros([16, 8], gl.float32, layout=LAYOUT)
    columns = ()
    for now in gl.static_range(W - 1, -1, -1):
        column = gl.where((i >= now) & (i < W), pairs.index(now).load(ROW), 0.0)
        for later in gl.static_range(W - 1, now, -1):
            L = pairs.index(8 + now).slice(later % 4 * 2 + later // 4, 1).load(ROW)
            column = gl.fma(-columns[W - 1 - later], L, column)
        columns = columns + (column,)  # type: ignore[assignment]  # noqa: RUF005
        y = gl.where(j == now, gl.expand_dims(column, 0), y)
    return y


@gluon.jit
def verify_hopper(
    qkv, z, b, gate, state, tail, past_qkv, past_z, past_b, accepted, slots,
    taps, A_log, dt_bias, norm_weight, out, scale, lower_bound, norm_eps, l2_eps,
    H: gl.constexpr, W: gl.constexpr, P: gl.constexpr, BOUNDED: gl.constexpr, SHIFT: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    T: gl.constexpr = 4 if P <= 4 else 8  # rows for tokens
    STATE: gl.constexpr = rows_layout(128, WARPS)
    TOKENS: gl.constexpr = tokens_layout(WARPS)
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8]
    )
    OUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    SMALL: gl.constexpr = gl.BlockedLayout([1, 1], [32 // T, T], [WARPS, 1], [1, 0])
    C: gl.constexpr = 3 * H * K
    n = gl.program_id(0).to(gl.int64)
    h = gl.program_id(1)
    slot = gl.load(slots + n).to(gl.int64)
    e = gl.arange(0, K, layout=gl.SliceLayout(0, OUT))[None, :]
    r = gl.arange(0, T, layout=gl.SliceLayout(1, OUT))[:, None]
    row = ((n * W + r) * H + h) * K + e  # of gate and out
    if slot < 0:
        gl.store(out + row, gl.zeros([T, K], out.dtype.element_ty, layout=OUT), mask=r < W)
        return
    count = gl.minimum(gl.load(accepted + n), P)
    # The state waits in shared memory: in registers it would leave none for the tokens.
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    cells = state + (slot * H + h) * (K * K)
    entered = gl.allocate_shared_memory(gl.float32, [K, K], ROWS2)
    async_copy.async_copy_global_to_shared(entered, cells + _offsets(COPY))
    async_copy.commit_group()

    # Two groups side by side: the past window after the tail, and the new one after what stays of those.
    group = gl.expand_dims(
        gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, TOKENS))), 1), 2
    )
    kind = gl.expand_dims(
        gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, TOKENS))), 0), 2
    )
    i = gl.expand_dims(
        gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, gl.SliceLayout(1, TOKENS))), 0), 1
    )
    head = _head(taps, A_log, dt_bias, scale, h, kind, i, H)
    everywhere = (group + kind) * 0
    channel = (kind * H + h) * K + i + everywhere
    of_z = h * K + i + everywhere
    known = kind < 3
    new = group == 1
    old = tail + slot * (3 * C) + channel
    past_row = slot * P
    x = ()
    for s in gl.static_range(3):
        position = gl.where(new, count, 0) + (s - 3)
        from_past = gl.load(
            past_qkv + (past_row + position) * C + channel, mask=known & (position >= 0), other=0.0
        )
        from_tail = gl.load(old + (position + 3) * C, mask=known & (position < 0), other=0.0)
        x = x + (gl.where(position < 0, from_tail, from_past),)  # type: ignore[assignment]  # noqa: RUF005
    for s in gl.static_range(T):
        stays = ~new & (s < count)
        a = gl.load(past_qkv + (past_row + s) * C + channel, mask=known & stays, other=0.0)
        d = gl.load(past_z + (past_row + s) * (H * K) + of_z, mask=(kind == 3) & stays, other=0.0)
        y = gl.where(known, a, d)
        if s < W:
            a = gl.load(qkv + (n * W + s) * C + channel, mask=known & new, other=0.0)
            d = gl.load(z + (n * W + s) * (H * K) + of_z, mask=(kind == 3) & new, other=0.0)
            y = gl.where(new, gl.where(known, a, d), y)
        x = x + (y,)  # type: ignore[assignment]  # noqa: RUF005
    g2 = gl.arange(0, 2, layout=gl.SliceLayout(1, SMALL))[:, None]
    t2 = gl.arange(0, T, layout=gl.SliceLayout(0, SMALL))[None, :]
    past_logits = gl.load(past_b + (past_row + t2) * H + h + g2 * 0, mask=(g2 == 0) & (t2 < count), other=0.0)
    new_logits = gl.load(b + (n * W + t2) * H + h + g2 * 0, mask=(g2 == 1) & (t2 < W), other=0.0)
    logits = gl.load(gate + row, mask=r < W, other=0.0).to(gl.float32)
    gain = gl.load(norm_weight + e).to(gl.float32)
    betas = gl.allocate_shared_memory(gl.float32, [2 * T, 1], FLAT1)
    beta = _sigmoid(gl.where(g2 == 0, past_logits, new_logits).to(gl.float32) * LOG2_E)
    betas._reinterpret(gl.float32, [2, T], FLAT2).store(beta)

    gl.thread_barrier()  # the window takes the place of the past one, for which all threads have asked
    for s in gl.static_range(3):
        gl.store(old + s * C, x[s], mask=known & new)
    for s in gl.static_range(W):
        gl.store(past_qkv + (past_row + s) * C + channel, x[s + 3], mask=known & new)
        gl.store(past_z + (past_row + s) * (H * K) + of_z, x[s + 3], mask=(kind == 3) & new)
    gl.store(past_b + (past_row + t2) * H + h + g2 * 0, new_logits, mask=(g2 == 1) & (t2 < W))

    tokens = gl.allocate_shared_memory(gl.float32, [T, 2, 4, K], FLAT4)
    every = ()
    for s in gl.static_range(T):
        every = every + (_token(x, s, head, kind, ~new, lower_bound, l2_eps, BOUNDED),)  # type: ignore[assignment]  # noqa: RUF005
    tokens.store(_stack(every))

    # Operands of the window's products: `entering`, rows (token, q or k), decayed to the token and shifted by
    # half of what decays add up to; `right`, rows of k, which undoes the decay, times beta. Rows beyond the
    # tokens' (not written, or the same again) give products that are not read.
    WINDOW: gl.constexpr = gl.BlockedLayout([T, 1, 1, 1], [1, 1, 1, 32], [1, 1, 2, WARPS // 2], [3, 2, 1, 0])
    window = tokens.slice(1, 1, dim=1)
    kq = window.slice(0, 2, dim=2).load(WINDOW)
    floor = gl.maximum(lower_bound, PAIR_FLOOR) * LOG2_E
    log_decay = gl.maximum(window.slice(3, 1, dim=2).load(WINDOW), floor)
    log_decay = gl.associative_scan(log_decay, 0, add) + SHIFT
    window_betas = betas._reinterpret(gl.float32, [2 * T, 1, 1, 1], FLAT4).slice(T, T)
    entering = gl.allocate_shared_memory(gl.float32, [16, K], ROWS8)
    right = gl.allocate_shared_memory(gl.float32, [8, K], ROWS8)
    entering.slice(0, 2 * T).store(_rounded(gl.reshape(kq * exp2(log_decay), [2 * T, K])))
    undone = window.slice(1, 1, dim=2).load(WINDOW) * exp2(-log_decay) * window_betas.load(WINDOW)
    if T == 4:
        undone = gl.permute(gl.join(undone, undone), (4, 0, 1, 2, 3))
    right.store(_rounded(gl.reshape(undone, [8, K])))
    product = _product(entering.load(rows_layout(16, WARPS)), right.load(rows_layout(8, WARPS)), 16, 8, ACC)
    pairs = gl.allocate_shared_memory(gl.float32, [2, 8, 4, 2], FLAT4)
    pairs.store(gl.permute(gl.reshape(product, [2, 4, 2, 8]), (2, 3, 1, 0)))
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 1)
    of_errors = _rounded(_outputs_of_errors(pairs._reinterpret(gl.float32, [16, 8], FLAT1), W, B))

    async_copy.wait_group(0)
    S = entered.load(STATE)
    rows = tokens._reinterpret(gl.float32, [T * 8, K], FLAT1)
    for t in range(count):
        S = _advance(S, rows, t * 8, betas.index(t).load(gl.SliceLayout(1, STATE)))
    if count > 0:
        gl.store(cells + _offsets(STATE), S)

    operand = entering.slice(0, 2 * T).load(rows_layout(2 * T, WARPS))
    read = _product(_rounded(S), operand, 128, 2 * T, ACC)
    o, known_part = gl.split(gl.reshape(read * (2.0**-SHIFT), [K, T, 2]))
    LEFT: gl.constexpr = o.type.layout
    values = window.slice(2, 1, dim=2)
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1], [4, 1, 1, 8], [1, 1, 1, WARPS], [3, 2, 1, 0])
    values = gl.permute(gl.reshape(values.load(SPREAD), [T, K]), (1, 0))
    errors = _rounded(gl.convert_layout(values, LEFT) - known_part)
    for columns in gl.static_range(T.bit_length(), 5):  # zeros up to 16, the least that mma_v2 takes
        zeros = gl.zeros_like(errors)
        errors = gl.reshape(gl.permute(gl.join(errors, zeros), (0, 2, 1)), [K, 1 << columns])
    errors = gl.convert_layout(errors, gl.DotOperandLayout(0, ACC, 1), assert_trivial=True)
    added = mma_v2(errors, of_errors, gl.zeros([K, 8], gl.float32, layout=ACC), input_precision="tf32")
    added = gl.reshape(added, [K, 4, 2])
    if T == 4:
        added, _ = gl.split(added)
    else:
        added = gl.reshape(gl.permute(added, (0, 2, 1)), [K, 8])
    o += gl.convert_layout(added, LEFT, assert_trivial=True)
    outputs = gl.allocate_shared_memory(gl.float32, [T, K], FLAT2)
    outputs.permute((1, 0)).store(o)
    o = outputs.load(OUT)
    y = o * gl.expand_dims(_rsqrt(gl.sum(o * o, 1) / K + norm_eps), 1) * gain * _sigmoid(logits * LOG2_E)
    gl.store(out + row, y.to(out.dtype.element_ty), mask=r < W)
