"""The experts of few rows: their choice, and their sums.

Up to FEW rows share few experts: each row reads its own. Of more rows each expert reads its own list, and its
weights once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment, misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from openk3.ops.activation import Activation
from openk3.ops.decoding.kernels.early import FEW, early, let_next, stages, wait, warps
from openk3.ops.kernel_operator import kernel_operator
from openk3.ops.moe.kernels.units import unit as gated_unit
from openk3.ops.triton_math import PTX

Tensor = torch.Tensor

LISTED = 128  # assignments that a warp looks through
LIST = {"ROWS": 16, "FEATURES": 64, "DEPTH": 64, "num_warps": 4}


@triton.jit(do_not_specialize=["N"])
def _choose_experts(
    logits, bias, ids, weights, lists, counts, N, E, scaling_factor, k: tl.constexpr,
    RENORMALIZE: tl.constexpr, LISTS: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_next(EARLY)
    wait(EARLY)
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    score = tl.sigmoid(tl.load(logits + t * E + e, mask=e < E, other=0.0))
    value = score + tl.load(bias + e, mask=e < E, other=0.0)
    # The larger value first, of equal ones the lower index, NaN before all: as openk3.ops.moe.kernels.choice.
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    rising = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    rising = tl.where(value != value, 0x7FFFFFFF, rising)
    lowest: tl.constexpr = -(2**31)
    rising = tl.where(e < E, rising, lowest)
    slot = tl.arange(0, K)
    chosen = tl.zeros([K], tl.int32)
    for s in tl.static_range(k):
        best = tl.min(tl.where(rising == tl.max(rising, 0), e, EXPERTS), 0)
        chosen = tl.where(slot == s, best, chosen)
        rising = tl.where(e == best, lowest, rising)
    if LISTS:  # in whatever order rows come: a row's products do not depend on its place
        place = tl.atomic_add(counts + chosen, 1, mask=slot < k, sem="relaxed")
        entry = lists + chosen.to(tl.int64) * N + place
        tl.store(entry, (t * k + slot).to(tl.int32), mask=slot < k)
    weight = tl.sigmoid(tl.load(logits + t * E + chosen))
    weight = tl.where(slot < k, weight, 0.0)
    if RENORMALIZE:
        weight /= tl.sum(weight, 0) + 1e-20
    tl.store(ids + t * k + slot, chosen.to(tl.int64), mask=slot < k)
    tl.store(weights + t * k + slot, weight * scaling_factor, mask=slot < k)


@triton.jit
def _expert_units(
    x, ids, w1, w3, hidden, F, L, gate_cap, up_cap,
    k: tl.constexpr, UNIT: tl.constexpr, COARSE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    let_next(EARLY)  # only now: the sums read ids and weights before they wait
    pair = tl.program_id(0).to(tl.int64)
    e = tl.load(ids + pair)
    feature = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    col = tl.arange(0, WIDTH)[None, :]
    place = (e * F + feature) * L + col
    inside = (feature < F) & (col < L)
    gate = tl.load(w1 + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(w3 + place, mask=inside, other=0.0).to(tl.float32)
    row = tl.load(x + pair // k * L + col, mask=col < L, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    g = tl.sum(gate * row, 1, keep_dims=True)
    u = tl.sum(up * row, 1, keep_dims=True)
    y = gated_unit(g, u, gate_cap, up_cap, UNIT, COARSE)
    tl.store(hidden + pair * F + feature, y.to(dtype), mask=feature < F)


@triton.jit
def _expert_sums(
    hidden, ids, weights, w2, out, F, L,
    k: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next(EARLY)
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    feature = tl.arange(0, WIDTH)[None, :]
    inside = (c < L) & (feature < F)
    matrices = ()
    shares = ()
    for s in tl.static_range(k):
        e = tl.load(ids + t * k + s)
        matrices = matrices + (tl.load(w2 + (e * L + c) * F + feature, mask=inside, other=0.0),)  # noqa: RUF005
        shares = shares + (tl.load(weights + t * k + s),)  # noqa: RUF005
    wait(EARLY)
    products = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for s in tl.static_range(k):
        row = tl.load(hidden + (t * k + s) * F + feature, mask=feature < F, other=0.0).to(tl.float32)
        products += matrices[s].to(tl.float32) * (row * shares[s])
    total = tl.sum(products, 1, keep_dims=True)
    tl.store(out + t * L + c, total.to(out.dtype.element_ty), mask=c < L)


@triton.jit(do_not_specialize=["N"])
def _lists(ids, lists, counts, N, k: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The assignments (token * k + slot) that go to an expert, in their order, and how many they are."""
    let_next(EARLY)
    wait(EARLY)
    e = tl.program_id(0)
    count = e * 0
    for first in range(0, N * k, BLOCK):
        a = first + tl.arange(0, BLOCK)
        mine = tl.load(ids + a, mask=a < N * k, other=-1).to(tl.int32) == e
        place = count + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(lists + e.to(tl.int64) * N + place, a, mask=mine)
        count += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts + e, count)


@triton.jit(do_not_specialize=["N"])
def _list_units(
    x, lists, counts, w1, w3, hidden, N, F, L, gate_cap, up_cap,
    k: tl.constexpr, UNIT: tl.constexpr, COARSE: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next(EARLY)
    wait(EARLY)
    e = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + e)
    dtype: tl.constexpr = x.dtype.element_ty
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)[:, None]
    rows_at = (e * F + feature) * L
    for first in range(0, count, ROWS):
        r = first + tl.arange(0, ROWS)[None, :]
        a = tl.load(lists + e * N + r, mask=r < count, other=0).to(tl.int64)
        gate = tl.zeros([FEATURES, ROWS], tl.float32)
        up = tl.zeros([FEATURES, ROWS], tl.float32)
        for depth in range(0, L, DEPTH):
            across = depth + tl.arange(0, DEPTH)[None, :]
            down = depth + tl.arange(0, DEPTH)[:, None]
            row = tl.load(x + a // k * L + down, mask=(r < count) & (down < L), other=0.0)
            inside = (feature < F) & (across < L)
            gate = tl.dot(
                tl.load(w1 + rows_at + across, mask=inside, other=0.0), row, gate, input_precision="ieee"
            )
            up = tl.dot(
                tl.load(w3 + rows_at + across, mask=inside, other=0.0), row, up, input_precision="ieee"
            )
        y = gated_unit(gate, up, gate_cap, up_cap, UNIT, COARSE)
        tl.store(hidden + a * F + feature, y.to(dtype), mask=(r < count) & (feature < F))


@triton.jit(do_not_specialize=["N"])
def _list_downs(
    hidden, lists, counts, w2, out, N, F, L,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next(EARLY)
    wait(EARLY)
    e = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + e)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    rows_at = (e * L + column) * F
    for first in range(0, count, ROWS):
        r = first + tl.arange(0, ROWS)[None, :]
        a = tl.load(lists + e * N + r, mask=r < count, other=0).to(tl.int64)
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        for depth in range(0, F, DEPTH):
            across = depth + tl.arange(0, DEPTH)[None, :]
            down = depth + tl.arange(0, DEPTH)[:, None]
            row = tl.load(hidden + a * F + down, mask=(r < count) & (down < F), other=0.0)
            w = tl.load(w2 + rows_at + across, mask=(column < L) & (across < F), other=0.0)
            total = tl.dot(w, row, total, input_precision="ieee")
        tl.store(out + a * L + column, total.to(out.dtype.element_ty), mask=(r < count) & (column < L))


@triton.jit
def _weighted_sums(rows, weights, out, L, k: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr):
    let_next(EARLY)
    wait(EARLY)
    t = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for s in tl.static_range(k):
        row = tl.load(rows + (t * k + s) * L + col, mask=col < L, other=0.0).to(tl.float32)
        total += row * tl.load(weights + t * k + s)
    tl.store(out + t * L + col, total.to(out.dtype.element_ty), mask=col < L)


def list_rows(ids: Tensor, E: int) -> tuple[Tensor, Tensor]:
    """Lists int32 `[E * n]` of assignments to E experts, of which the first `counts` `[E]` of each n count.

    An expert has no row twice, so no list is longer than n.
    """
    n, k = ids.shape
    lists, counts = (torch.empty(size, dtype=torch.int32, device=ids.device) for size in (E * n, E))
    BLOCK = min(4096, triton.next_power_of_2(n * k))
    _lists[(E,)](
        ids, lists, counts, n, k=k, BLOCK=BLOCK, num_warps=min(BLOCK // LISTED or 1, 16), **early(ids)
    )
    return lists, counts


def listed_experts(
    x: Tensor, lists: Tensor, counts: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, k: int,
    kind: str, gate_cap: float, up_cap: float,
) -> Tensor:  # fmt: skip
    """What each assignment gives, `[n k, L]`, not yet weighted; lists and counts are those of `list_rows`."""
    (n, L), (E, F, _), coarse = x.shape, w1.shape, bool(PTX) and x.dtype == torch.bfloat16
    hidden, rows = x.new_empty(n * k, F), x.new_empty(n * k, L)
    _list_units[(E, triton.cdiv(F, LIST["FEATURES"]))](
        x, lists, counts, w1, w3, hidden, n, F, L, gate_cap, up_cap, k=k, UNIT=kind, COARSE=coarse,
        **LIST, num_stages=stages(x), **early(x),
    )  # fmt: skip
    _list_downs[(E, triton.cdiv(L, LIST["FEATURES"]))](
        hidden, lists, counts, w2, rows, n, F, L, ROWS=LIST["ROWS"], COLUMNS=LIST["FEATURES"],
        DEPTH=LIST["DEPTH"], num_warps=LIST["num_warps"], num_stages=stages(x), **early(x),
    )  # fmt: skip
    return rows


@kernel_operator("openk3::choose_experts")
def choose_experts(
    logits: Tensor, bias: Tensor, k: int, scaling_factor: float, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """See `openk3.ops.decoding.choose_experts`."""
    return _choose(logits, bias, k, scaling_factor, renormalize, None, None)


@choose_experts.register_fake
def _(logits, bias, k, scaling_factor, renormalize):
    n = logits.shape[0]
    return logits.new_empty(n, k, dtype=torch.int64), logits.new_empty(n, k)


@kernel_operator("openk3::choose_and_list_experts", mutates_args=("lists", "counts"))
def choose_and_list_experts(
    logits: Tensor,
    bias: Tensor,
    k: int,
    scaling_factor: float,
    renormalize: bool,
    lists: Tensor,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same with what `list_rows` returns, an expert's assignments in any order; counts `[E]` are zero."""
    return _choose(logits, bias, k, scaling_factor, renormalize, lists, counts)


@choose_and_list_experts.register_fake
def _(logits, bias, k, scaling_factor, renormalize, lists, counts):
    n = logits.shape[0]
    return logits.new_empty(n, k, dtype=torch.int64), logits.new_empty(n, k)


def _choose(
    logits: Tensor, bias: Tensor, k: int, scaling_factor: float, renormalize: bool,
    lists: Tensor | None, counts: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    n, E = logits.shape
    ids = torch.empty(n, k, dtype=torch.int64, device=logits.device)
    weights = logits.new_empty(n, k)
    if n:
        _choose_experts[(n,)](
            logits.contiguous(), bias.contiguous(), ids, weights, lists, counts, n, E, scaling_factor, k=k,
            RENORMALIZE=renormalize, LISTS=lists is not None, EXPERTS=max(32, triton.next_power_of_2(E)),
            K=triton.next_power_of_2(k), num_warps=1, **early(logits),
        )  # fmt: skip
    return ids, weights


def expert_sums(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, activation: Activation
) -> Tensor:
    """See `openk3.ops.decoding.expert_sums`."""
    out: Tensor = torch.ops.openk3.expert_sums(
        x, ids, weights, w1, w3, w2, activation.kind, activation.gate_cap, activation.up_cap
    )
    return out


@kernel_operator("openk3::expert_sums")
def _expert_sums_op(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor,
    kind: str, gate_cap: float, up_cap: float,
) -> Tensor:  # fmt: skip
    (n, L), k, (E, F, _) = x.shape, ids.shape[1], w1.shape
    out = torch.empty_like(x)
    if not n:
        return out
    if n <= FEW:
        coarse, hidden = bool(PTX) and x.dtype == torch.bfloat16, x.new_empty(n * k, F)
        _expert_units[(n * k, triton.cdiv(F, 16))](
            x, ids, w1, w3, hidden, F, L, gate_cap, up_cap, k=k, UNIT=kind, COARSE=coarse,
            WIDTH=triton.next_power_of_2(L), COLUMNS=16, num_warps=warps(16 * L), **early(x),
        )  # fmt: skip
        _expert_sums[(n, triton.cdiv(L, 4))](
            hidden, ids, weights, w2, out, F, L,
            k=k, WIDTH=triton.next_power_of_2(F), COLUMNS=4, num_warps=4, **early(x),
        )  # fmt: skip
        return out
    lists, counts = list_rows(ids, E)
    rows = listed_experts(x, lists, counts, w1, w3, w2, k, kind, gate_cap, up_cap)
    WIDTH = triton.next_power_of_2(L)
    _weighted_sums[(n,)](rows, weights, out, L, k=k, WIDTH=WIDTH, num_warps=warps(WIDTH), **early(x))
    return out


@_expert_sums_op.register_fake
def _(x, ids, weights, w1, w3, w2, kind, gate_cap, up_cap):
    return torch.empty_like(x)
