"""The experts of many rows, into the stream: weights are asked for before it is known whose rows they meet.

The bytes of weights are what such a step costs, so a program asks for all of its own at once, into registers,
and then for the list of its rows, which the kernels before it are still making. Programs that start only when
others have ended look at their list first, for many experts may have no row. Each weight is read once.

Sums are fp32's and in one order, so that equal calls give equal bits; what a row gets depends on how many
rows there are and on itself, not on which others share its experts.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment, misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from openk3.ops.activation import Activation
from openk3.ops.decoding.kernels.early import FEW, early, let_next, narrow, wait
from openk3.ops.decoding.kernels.experts import expert_sums, list_rows
from openk3.ops.decoding.kernels.products import launch_into, products_into
from openk3.ops.kernel_operator import kernel_operator
from openk3.ops.moe.kernels.units import unit as gated_unit
from openk3.ops.triton_math import PTX

Tensor = torch.Tensor

MOST = 512  # rows; more keep the matrix unit busy enough for kernels that go through their weights in steps
WIDEST = 512  # of a row of weights
UNITS = {"ROWS": 16, "FEATURES": 32, "num_warps": 4}
DOWNS = {"ROWS": 16, "COLUMNS": 32, "num_warps": 4}
AHEAD = 528  # programs that ask for weights first: four on each of an H200's processors
ALL_HIT = 4  # times as many choices as experts leave few experts without a row: all programs ask first


@triton.jit
def _list(lists, counts, e, N, ROWS: tl.constexpr):
    """How many rows expert e has, and the first of its list, `[1, ROWS]`; both asked for at once."""
    r = tl.arange(0, ROWS)[None, :]
    a = tl.load(lists + e * N + r, mask=r < N, other=0)
    count = tl.load(counts + e)
    return count, tl.where(r < count, a, 0).to(tl.int64)


@triton.jit
def _as_columns(x, row, count, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Those of the first `count` rows, as columns `[WIDTH, ROWS]`."""
    down = tl.arange(0, WIDTH)[:, None]
    inside = (tl.arange(0, ROWS)[None, :] < count) & (down < width)
    return tl.load(x + row * width + down, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["N"])
def _units(
    x, lists, counts, w1, w3, hidden, N, F, L, gate_cap, up_cap,
    k: tl.constexpr, UNIT: tl.constexpr, COARSE: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
    WIDTH: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next(EARLY)
    e = tl.program_id(1).to(tl.int64)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)[:, None]
    across = tl.arange(0, WIDTH)[None, :]
    place = (e * F + feature) * L + across
    inside = (feature < F) & (across < L)
    if tl.program_id(1) * tl.num_programs(0) + tl.program_id(0) < AHEAD:
        by_gate = tl.load(w1 + place, mask=inside, other=0.0, eviction_policy="evict_first")
        by_up = tl.load(w3 + place, mask=inside, other=0.0, eviction_policy="evict_first")
        wait(EARLY)
        count, a = _list(lists, counts, e, N, ROWS)
        row = _as_columns(x, a // k, count, L, ROWS, WIDTH)
    else:
        wait(EARLY)
        count, a = _list(lists, counts, e, N, ROWS)
        inside = (feature < tl.where(count > 0, F, 0)) & (across < L)
        by_gate = tl.load(w1 + place, mask=inside, other=0.0, eviction_policy="evict_first")
        by_up = tl.load(w3 + place, mask=inside, other=0.0, eviction_policy="evict_first")
        row = _as_columns(x, a // k, count, L, ROWS, WIDTH)
    dtype: tl.constexpr = x.dtype.element_ty
    r = tl.arange(0, ROWS)[None, :]
    for first in range(0, count, ROWS):
        gate = tl.dot(by_gate, row, input_precision="ieee")
        up = tl.dot(by_up, row, input_precision="ieee")
        y = gated_unit(gate, up, gate_cap, up_cap, UNIT, COARSE)
        tl.store(hidden + a * F + feature, y.to(dtype), mask=(first + r < count) & (feature < F))
        more = first + ROWS + r < count
        a = tl.load(lists + e * N + first + ROWS + r, mask=more, other=0).to(tl.int64)
        row = _as_columns(x, a // k, count - first - ROWS, L, ROWS, WIDTH)


@triton.jit(do_not_specialize=["N"])
def _downs(
    hidden, lists, counts, w2, rows, N, F, L,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next(EARLY)
    e = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    across = tl.arange(0, WIDTH)[None, :]
    place = (e * L + column) * F + across
    inside = (column < L) & (across < F)
    if tl.program_id(1) * tl.num_programs(0) + tl.program_id(0) < AHEAD:
        w = tl.load(w2 + place, mask=inside, other=0.0, eviction_policy="evict_first")
        wait(EARLY)
        count, a = _list(lists, counts, e, N, ROWS)
        row = _as_columns(hidden, a, count, F, ROWS, WIDTH)
    else:
        wait(EARLY)
        count, a = _list(lists, counts, e, N, ROWS)
        inside = (column < tl.where(count > 0, L, 0)) & (across < F)
        w = tl.load(w2 + place, mask=inside, other=0.0, eviction_policy="evict_first")
        row = _as_columns(hidden, a, count, F, ROWS, WIDTH)
    r = tl.arange(0, ROWS)[None, :]
    for first in range(0, count, ROWS):
        y = tl.dot(w, row, input_precision="ieee")
        tl.store(rows + a * L + column, y.to(rows.dtype.element_ty), mask=(first + r < count) & (column < L))
        more = first + ROWS + r < count
        a = tl.load(lists + e * N + first + ROWS + r, mask=more, other=0).to(tl.int64)
        row = _as_columns(hidden, a, count - first - ROWS, F, ROWS, WIDTH)


@triton.jit
def _joined_rows(
    rows, weights, gain, unit_gate, unit_up, out, L, b, eps, gate_cap, up_cap,
    k: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, B: tl.constexpr, NORM: tl.constexpr,
    UNIT: tl.constexpr, COARSE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """[norm(sum_s weights_s rows_s); act(gate, up)] of a row, all asked for at once."""
    let_next(EARLY)
    col = tl.arange(0, WIDTH)[None, :]
    s = tl.arange(0, K)[:, None]
    further = tl.arange(0, B)
    if NORM:
        factor = tl.load(gain + col, mask=col < L, other=0.0).to(tl.float32)
    wait(EARLY)
    t = tl.program_id(0).to(tl.int64)
    parts = tl.load(rows + (t * k + s) * L + col, mask=(s < k) & (col < L), other=0.0)
    shares = tl.load(weights + t * k + s, mask=s < k, other=0.0)
    if UNIT != "none":
        g = tl.load(unit_gate + t * b + further, mask=further < b, other=0.0).to(tl.float32)
        u = tl.load(unit_up + t * b + further, mask=further < b, other=0.0).to(tl.float32)
    total = tl.sum(parts.to(tl.float32) * shares, 0, keep_dims=True)
    if NORM:
        total *= tl.rsqrt(tl.sum(total * total, 1, keep_dims=True) / L + eps) * factor
    tl.store(out + t * (L + b) + col, total.to(out.dtype.element_ty), mask=col < L)
    if UNIT != "none":
        y = gated_unit(g, u, gate_cap, up_cap, UNIT, COARSE)
        tl.store(out + t * (L + b) + L + further, y.to(out.dtype.element_ty), mask=further < b)


def experts_into(
    out: Tensor,
    weight: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    activation: Activation,
    add: bool,
    norm: tuple[Tensor, float] | None,
    shared: tuple[Tensor, Tensor] | None,
    ahead: list[Tensor],
) -> None:
    """See `openk3.ops.decoding.experts_into`."""
    if not FEW < len(x) <= MOST or max(w1.shape[1:]) > WIDEST or not narrow(x):
        u = expert_sums(x, ids, weights, w1, w3, w2, activation)
        unit = None if shared is None else (*shared, activation)
        products_into(out, weight, u, add, norm, None, unit, ahead)
        return
    gain, eps = norm or (None, 0.0)
    gate, up = shared or (None, None)
    torch.ops.openk3.experts_into(
        out, weight, x, ids, weights, w1, w3, w2, add, gain, eps, gate, up,
        activation.kind, activation.gate_cap, activation.up_cap, ahead,
    )  # fmt: skip


@kernel_operator("openk3::experts_into", mutates_args=("out",))
def _experts_into_op(
    out: Tensor, weight: Tensor, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor,
    add: bool, gain: Tensor | None, eps: float, gate: Tensor | None, up: Tensor | None,
    kind: str, gate_cap: float, up_cap: float, ahead: list[Tensor],
) -> None:  # fmt: skip
    (n, L), k, (E, F, _) = x.shape, ids.shape[1], w1.shape
    if not n:
        return
    b = 0 if gate is None else gate.shape[1]
    coarse, options = bool(PTX) and x.dtype == torch.bfloat16, early(x)
    lists, counts = list_rows(ids, E)
    hidden, rows, joined = x.new_empty(n * k, F), x.new_empty(n * k, L), x.new_empty(n, L + b)
    ahead_of_lists = AHEAD if n * k < ALL_HIT * E else 2**30
    _units[(triton.cdiv(F, UNITS["FEATURES"]), E)](
        x, lists, counts, w1, w3, hidden, n, F, L, gate_cap, up_cap, k=k, UNIT=kind, COARSE=coarse,
        WIDTH=max(16, triton.next_power_of_2(L)), AHEAD=ahead_of_lists, **UNITS, **options,
    )  # fmt: skip
    _downs[(triton.cdiv(L, DOWNS["COLUMNS"]), E)](
        hidden, lists, counts, w2, rows, n, F, L,
        WIDTH=max(16, triton.next_power_of_2(F)), AHEAD=ahead_of_lists, **DOWNS, **options,
    )  # fmt: skip
    WIDTH, K, B = (triton.next_power_of_2(max(1, size)) for size in (L, k, b))
    _joined_rows[(n,)](
        rows, weights, gain, gate, up, joined, L, b, eps, gate_cap, up_cap,
        k=k, K=K, WIDTH=WIDTH, B=B, NORM=gain is not None, UNIT="none" if gate is None else kind,
        COARSE=coarse, num_warps=max(1, K * WIDTH // 4096), **options,
    )  # fmt: skip
    launch_into(out, weight, joined, None, add, ahead)


@_experts_into_op.register_fake
def _(out, weight, x, ids, weights, w1, w3, w2, add, gain, eps, gate, up, kind, gate_cap, up_cap, ahead):
    return None
