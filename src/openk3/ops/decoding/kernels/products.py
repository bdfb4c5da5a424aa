"""Products of few rows: of a mix of the stream, and into the stream.

Few rows leave a product bound by its weights and by launches, so what comes before a product is made again by
every program of it: mix and norm of the stream for up to FEW rows (of more, that costs more than a launch),
the norm, gate or unit of what is multiplied always. Sums are fp32's and in one order: no atomics, so that
equal calls give equal bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment, misc"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from openk3.ops.activation import Activation
from openk3.ops.decoding import BLOCK, Joined, StreamMix
from openk3.ops.decoding.kernels.early import (
    FEW,
    early,
    let_next,
    narrow,
    stages,
    wait,
    warps,
)
from openk3.ops.kernel_operator import kernel_operator
from openk3.ops.moe.kernels.units import unit as gated_unit
from openk3.ops.precision import wide
from openk3.ops.triton_math import PTX, short_sigmoid

Tensor = torch.Tensor

WIDEST_PIECE = 2048  # of what a program multiplies with in one piece
DEPTH = 128  # of a step of a product
WIDEST_MIX = 1024  # of a row of which a program holds all sources
MIXED = 512  # rows up to which each is mixed by a program of its own; more have work for programs that go on


class Tile(NamedTuple):
    """Of a product of more rows than FEW."""

    ROWS: int
    COLUMNS: int


# By the number of rows: the first that has as many. Small tiles start and end sooner, large ones read less.
TILES = ((64, Tile(64, 16)), (2**31, Tile(64, 64)))
WIDE_TILE = Tile(64, 16)  # of fp32
# Into the stream: a program asks for all of its depth at once, weights before the rows are there, and each
# warp multiplies a part of the depth; of more rows, or wider, it goes in steps.
WHOLE = ((64, Tile(16, 16)),)
WIDEST_WHOLE = 1152  # deeper ones do not fit into registers
SHARE = 128  # of the depth for a warp, or more


@triton.jit
def _store_block(out, precise, blocks, block, rows, N, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y `[ROWS, COLUMNS]` of one block to its place: outputs `[N, width]` lie one behind the other."""
    before = tl.load(blocks + 4 * block)
    width = tl.load(blocks + 4 * block + 1)
    column = tl.load(blocks + 4 * block + 2) + tl.arange(0, COLUMNS)[None, :]
    place = (before.to(tl.int64) * N) + rows.to(tl.int64) * width + column
    inside = (rows < N) & (column < width)
    if tl.load(blocks + 4 * block + 3) == 1:
        tl.store(precise + place, y.to(precise.dtype.element_ty), mask=inside)
    else:
        tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _outputs(blocks, total, first, COLUMNS: tl.constexpr):
    """Of each 16 of columns from `first` on, of `total`, its entry in `Joined.blocks`; zeros past the end."""
    entries = ()
    for i in tl.static_range(COLUMNS // 16):
        column = first + 16 * i
        entry = blocks + column // 16 * 4
        for field in tl.static_range(4):
            entries = entries + (tl.load(entry + field, mask=column < total, other=0),)  # noqa: RUF005
    return entries


@triton.jit
def _store_columns(out, precise, entries, rows, N, y, COLUMNS: tl.constexpr):
    """y `[ROWS, COLUMNS]` to its places, by what `_outputs` returns."""
    column = tl.arange(0, COLUMNS)[None, :]
    before, width, own, exact = entries[0], entries[1], entries[2], entries[3] + column * 0
    for i in tl.static_range(1, COLUMNS // 16):
        here = column // 16 == i
        before = tl.where(here, entries[4 * i], before)
        width = tl.where(here, entries[4 * i + 1], width)
        own = tl.where(here, entries[4 * i + 2], own)
        exact = tl.where(here, entries[4 * i + 3], exact)
    own += column % 16
    place = before.to(tl.int64) * N + rows.to(tl.int64) * width + own
    inside = (rows < N) & (own < width)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside & (exact == 0))
    tl.store(precise + place, y.to(precise.dtype.element_ty), mask=inside & (exact == 1))


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["N", "S"])
def _mixed_rows(
    bank, query, key_gain, gain, out, N, S, d, mix_eps, eps,
    SOURCES: tl.constexpr, D: tl.constexpr, MIX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A row of the stream's mix, normed; all its sources are asked for at once."""
    let_next(EARLY)
    n = tl.program_id(0).to(tl.int64)
    source = tl.arange(0, SOURCES)[:, None]
    col = tl.arange(0, D)[None, :]
    g = tl.load(gain + col, mask=col < d, other=0.0).to(tl.float32)
    if MIX:
        m = tl.load(query + col, mask=col < d, other=0.0).to(tl.float32)
        m *= tl.load(key_gain + col, mask=col < d, other=0.0).to(tl.float32)
    wait(EARLY)
    place = (source.to(tl.int64) * N + n) * d + col
    v = tl.load(bank + place, mask=(source < S) & (col < d), other=0.0).to(tl.float32)
    if MIX:
        score, square = tl.reduce((v * m, v * v), 1, _both, keep_dims=True)
        score = tl.where(source < S, score * tl.rsqrt(square / d + mix_eps), float("-inf"))
        share = tl.exp(score - tl.max(score, 0, keep_dims=True))
        v *= share / tl.sum(share, 0, keep_dims=True)
    x = tl.sum(v, 0, keep_dims=True)
    x *= tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / d + eps) * g
    tl.store(out + n * d + col, x.to(out.dtype.element_ty), mask=col < d)


@triton.jit
def _part(x, row, width, start: tl.constexpr, inside, SPLIT: tl.constexpr, DEPTH: tl.constexpr):
    """`[SPLIT, rows, DEPTH]` of rows `[1, rows, 1]`, from column `start` on: each warp its share of them."""
    column = start + tl.arange(0, SPLIT)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, None, :]
    return tl.load(x + row.to(tl.int64) * width + column, mask=inside & (column < width), other=0.0)


@triton.jit
def _gated(x, logits):
    return (x.to(tl.float32) * short_sigmoid(logits.to(tl.float32))).to(x.dtype)


@triton.jit(do_not_specialize=["N"])
def _whole_into(
    out, weight, x, gate, N, d, a, ADD: tl.constexpr, GATE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SPLIT: tl.constexpr, DEPTH: tl.constexpr, REST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next(EARLY)
    first, start = tl.program_id(1) * ROWS, tl.program_id(0) * COLUMNS
    row = first + tl.arange(0, ROWS)[None, :, None]
    column = start + tl.arange(0, COLUMNS)[None, :, None]
    w = _part(weight, column, a, 0, column < d, SPLIT, DEPTH)
    if REST:
        w_rest = _part(weight, column, a, SPLIT * DEPTH, column < d, SPLIT, REST)
    wait(EARLY)
    v = _part(x, row, a, 0, row < N, SPLIT, DEPTH)
    if GATE:
        logits = _part(gate, row, a, 0, row < N, SPLIT, DEPTH)
    if REST:
        v_rest = _part(x, row, a, SPLIT * DEPTH, row < N, SPLIT, REST)
        if GATE:
            v_rest = _gated(v_rest, _part(gate, row, a, SPLIT * DEPTH, row < N, SPLIT, REST))
    rows, columns = first + tl.arange(0, ROWS)[:, None], start + tl.arange(0, COLUMNS)[None, :]
    target, inside = out + rows.to(tl.int64) * d + columns, (rows < N) & (columns < d)
    if ADD:
        before = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    if GATE:
        v = _gated(v, logits)
    sums = tl.dot(v, tl.permute(w, 0, 2, 1), input_precision="ieee")
    if REST:
        sums = tl.dot(v_rest, tl.permute(w_rest, 0, 2, 1), sums, input_precision="ieee")
    y = tl.sum(sums, 0).to(out.dtype.element_ty)
    if ADD:
        y = (y.to(tl.float32) + before).to(out.dtype.element_ty)
    tl.store(target, y, mask=inside)


@triton.jit(do_not_specialize=["N", "S"])
def _mixed_products(
    bank, query, key_gain, gain, matrix, blocks, out, precise, N, S, d, mix_eps, eps,
    SOURCES: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, MIX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next(EARLY)
    block = tl.program_id(0)
    source = tl.arange(0, SOURCES)[:, None]
    col = tl.arange(0, D)[None, :]
    row = block.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    w = tl.load(matrix + row * d + col, mask=col < d, other=0.0)
    g = tl.load(gain + col, mask=col < d, other=0.0).to(tl.float32)
    if MIX:
        m = tl.load(query + col, mask=col < d, other=0.0).to(tl.float32)
        m *= tl.load(key_gain + col, mask=col < d, other=0.0).to(tl.float32)
    wait(EARLY)
    for index in range(N):
        n = block * 0 + index  # Triton's interpreter counts in Python's integers
        place = (source.to(tl.int64) * N + n) * d + col
        v = tl.load(bank + place, mask=(source < S) & (col < d), other=0.0).to(tl.float32)
        if MIX:
            score = tl.sum(v * m, 1, keep_dims=True)
            score *= tl.rsqrt(tl.sum(v * v, 1, keep_dims=True) / d + mix_eps)
            score = tl.where(source < S, score, float("-inf"))
            share = tl.exp(score - tl.max(score, 0, keep_dims=True))
            v *= share / tl.sum(share, 0, keep_dims=True)
        x = tl.sum(v, 0, keep_dims=True)
        x *= tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / d + eps) * g
        x = x.to(bank.dtype.element_ty).to(tl.float32)
        y = tl.reshape(tl.sum(w.to(tl.float32) * x, 1), [1, COLUMNS])
        _store_block(out, precise, blocks, block, tl.full([1, 1], 0, tl.int32) + n, N, y, 1, COLUMNS)


@triton.jit(do_not_specialize=["N"])
def _products(
    x, matrix, blocks, out, precise, N, total, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next(EARLY)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    entries = _outputs(blocks, total, tl.program_id(0) * COLUMNS, COLUMNS)
    wait(EARLY)
    y = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, d, DEPTH):
        across = start + tl.arange(0, DEPTH)[None, :]
        down = start + tl.arange(0, DEPTH)[:, None]
        a = tl.load(x + rows.to(tl.int64) * d + across, mask=(rows < N) & (across < d), other=0.0)
        w = tl.load(matrix + column.to(tl.int64) * d + down, mask=(column < total) & (down < d), other=0.0)
        y = tl.dot(a, w, y, input_precision="ieee")
    _store_columns(out, precise, entries, rows, N, y, COLUMNS)


@triton.jit(do_not_specialize=["N"])
def _products_into(
    out, weight, x, gain, gate, unit_gate, unit_up, N, d, a, b, eps, gate_cap, up_cap,
    ADD: tl.constexpr, X: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, UNIT: tl.constexpr,
    COARSE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_next(EARLY)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    row = rows.to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    wait(EARLY)
    dtype: tl.constexpr = weight.dtype.element_ty
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    matrix = weight + column.to(tl.int64) * (a + b)
    if NORM:
        squares = tl.zeros([ROWS, 1], tl.float32)
        for start in range(0, a, DEPTH):
            across = start + tl.arange(0, DEPTH)[None, :]
            v = tl.load(x + row * a + across, mask=(rows < N) & (across < a), other=0.0).to(tl.float32)
            squares += tl.sum(v * v, 1, keep_dims=True)
        scale = tl.rsqrt(squares / a + eps)
    if X:
        for start in range(0, a, DEPTH):
            across = start + tl.arange(0, DEPTH)[None, :]
            down = start + tl.arange(0, DEPTH)[:, None]
            inside = (rows < N) & (across < a)
            v = tl.load(x + row * a + across, mask=inside, other=0.0)
            if NORM:
                factor = tl.load(gain + across, mask=across < a, other=0.0).to(tl.float32)
                v = (v.to(tl.float32) * scale * factor).to(dtype)
            if GATE:
                logits = tl.load(gate + row * a + across, mask=inside, other=0.0).to(tl.float32)
                v = (v.to(tl.float32) * short_sigmoid(logits)).to(dtype)
            w = tl.load(matrix + down, mask=(down < a) & (column < d), other=0.0)
            total = tl.dot(v, w, total, input_precision="ieee")
    if UNIT != "none":
        for start in range(0, b, DEPTH):
            across = start + tl.arange(0, DEPTH)[None, :]
            down = start + tl.arange(0, DEPTH)[:, None]
            inside = (rows < N) & (across < b)
            g = tl.load(unit_gate + row * b + across, mask=inside, other=0.0).to(tl.float32)
            u = tl.load(unit_up + row * b + across, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(matrix + a + down, mask=(down < b) & (column < d), other=0.0)
            v = gated_unit(g, u, gate_cap, up_cap, UNIT, COARSE).to(dtype)
            total = tl.dot(v, w, total, input_precision="ieee")
    place = out + row * d + column
    inside = (rows < N) & (column < d)
    if ADD:
        total = total.to(dtype).to(tl.float32) + tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, total.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["N"])
def _few_products_into(
    out, weight, x, gain, gate, unit_gate, unit_up, N, d, a, b, eps, gate_cap, up_cap,
    ADD: tl.constexpr, X: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, UNIT: tl.constexpr,
    COARSE: tl.constexpr, COLUMNS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next(EARLY)
    block = tl.program_id(0)
    column = block * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    dtype: tl.constexpr = weight.dtype.element_ty
    matrix = weight + column.to(tl.int64) * (a + b)
    across = tl.arange(0, A)[None, :]
    further = tl.arange(0, B)[None, :]
    if X:
        w = tl.load(matrix + across, mask=(column < d) & (across < a), other=0.0)
    if NORM:
        factor = tl.load(gain + across, mask=across < a, other=0.0).to(tl.float32)
    if UNIT != "none":
        w_unit = tl.load(matrix + a + further, mask=(column < d) & (further < b), other=0.0)
    wait(EARLY)
    for index in range(N):
        n = (block * 0 + index).to(tl.int64)  # Triton's interpreter counts in Python's integers
        total = tl.zeros([COLUMNS, 1], tl.float32)
        if X:
            v = tl.load(x + n * a + across, mask=across < a, other=0.0).to(tl.float32)
            if NORM:
                v *= tl.rsqrt(tl.sum(v * v, 1, keep_dims=True) / a + eps) * factor
            if GATE:
                v *= short_sigmoid(tl.load(gate + n * a + across, mask=across < a, other=0.0).to(tl.float32))
            v = v.to(dtype).to(tl.float32)
            total += tl.sum(w.to(tl.float32) * v, 1, keep_dims=True)
        if UNIT != "none":
            g = tl.load(unit_gate + n * b + further, mask=further < b, other=0.0).to(tl.float32)
            u = tl.load(unit_up + n * b + further, mask=further < b, other=0.0).to(tl.float32)
            v = gated_unit(g, u, gate_cap, up_cap, UNIT, COARSE).to(dtype).to(tl.float32)
            total += tl.sum(w_unit.to(tl.float32) * v, 1, keep_dims=True)
        place = out + n * d + column
        if ADD:
            total = total.to(dtype).to(tl.float32)
            total += tl.load(place, mask=column < d, other=0.0).to(tl.float32)
        tl.store(place, total.to(dtype), mask=column < d)


def mixed_products(
    bank: Tensor, mix: StreamMix | None, gain: Tensor, eps: float, joined: Joined
) -> list[Tensor]:
    """See `openk3.ops.decoding.mixed_products`."""
    query, key_gain, mix_eps = (gain, gain, 0.0) if mix is None else mix
    ordinary, precise = torch.ops.openk3.mixed_products(
        bank, query, key_gain, mix_eps, mix is not None and len(bank) > 1, gain, eps,
        joined.matrix, joined.blocks, *_totals(joined),
    )  # fmt: skip
    return _apart(ordinary, precise, joined, bank.shape[1])


def products(x: Tensor, joined: Joined) -> list[Tensor]:
    """See `openk3.ops.decoding.products`."""
    ordinary, precise = torch.ops.openk3.joined_products(x, joined.matrix, joined.blocks, *_totals(joined))
    return _apart(ordinary, precise, joined, len(x))


def _totals(joined: Joined) -> tuple[int, int]:
    """Widths of the ordinary outputs together, and of the precise one."""
    precise = joined.widths[-1] if joined.precise else 0
    return sum(joined.widths) - precise, precise


def _apart(ordinary: Tensor, precise: Tensor, joined: Joined, n: int) -> list[Tensor]:
    outputs, start = [], 0
    for width in joined.widths[: len(joined.widths) - joined.precise]:
        outputs.append(ordinary[start * n : (start + width) * n].view(n, width))
        start += width
    return [*outputs, precise.view(n, joined.widths[-1])] if joined.precise else outputs


@kernel_operator("openk3::mixed_products")
def _mixed_products_op(
    bank: Tensor, query: Tensor, key_gain: Tensor, mix_eps: float, mixes: bool, gain: Tensor, eps: float,
    matrix: Tensor, blocks: Tensor, ordinary: int, precise: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    S, n, d = bank.shape
    out, exact = bank.new_empty(n * ordinary), bank.new_empty(n * precise, dtype=wide(bank.dtype))
    if not n:
        return out, exact
    if n <= FEW and d <= 1024:
        D, SOURCES = triton.next_power_of_2(d), max(2, triton.next_power_of_2(S))
        _mixed_products[(len(blocks),)](
            bank, query, key_gain, gain, matrix, blocks, out, exact, n, S, d, mix_eps, eps,
            SOURCES=SOURCES, D=D, COLUMNS=BLOCK, MIX=mixes, num_warps=warps(max(SOURCES, BLOCK) * D),
            **early(bank),
        )  # fmt: skip
        return out, exact
    if n <= MIXED and d <= WIDEST_MIX:
        D, SOURCES = triton.next_power_of_2(d), max(2, triton.next_power_of_2(S))
        x = bank.new_empty(n, d)
        _mixed_rows[(n,)](
            bank, query, key_gain, gain, x, n, S, d, mix_eps, eps,
            SOURCES=SOURCES, D=D, MIX=mixes, num_warps=max(1, SOURCES * D // 4096), **early(bank),
        )  # fmt: skip
    elif mixes:
        from openk3.ops.attnres.kernels.operator import attnres

        *rows, last = bank.unbind(0)
        _, x, _, _ = attnres(rows, last, None, query, key_gain, gain, None, mix_eps, eps, False)
    else:
        from openk3.ops.norm.kernels import rms_norm

        x = rms_norm(bank[0], gain, eps)
    _launch_products(x, matrix, blocks, out, exact)
    return out, exact


def _launch_products(x: Tensor, matrix: Tensor, blocks: Tensor, out: Tensor, exact: Tensor) -> None:
    n, d = x.shape
    tile = next(tile for most, tile in TILES if n <= most) if narrow(x) else WIDE_TILE
    count = stages(x) if tile.COLUMNS == BLOCK else min(3, stages(x))  # two programs on a processor
    _products[triton.cdiv(len(matrix), tile.COLUMNS), triton.cdiv(n, tile.ROWS)](
        x, matrix, blocks, out, exact, n, len(matrix), d,
        **tile._asdict(), DEPTH=DEPTH, num_warps=4, num_stages=count, **early(x),
    )  # fmt: skip


def _shares(depth: int) -> dict[str, int]:
    """Warps, how much of the largest power of two of the depth each multiplies, and how much of the rest."""
    most = max(16, 1 << depth.bit_length() - 1)
    count = max(1, min(most // SHARE, 8))
    rest = max(0, depth - most)
    share = max(16, triton.next_power_of_2(triton.cdiv(rest, count))) if rest else 0
    return {"SPLIT": count, "DEPTH": most // count, "REST": share, "num_warps": count}


@_mixed_products_op.register_fake
def _(bank, query, key_gain, mix_eps, mixes, gain, eps, matrix, blocks, ordinary, precise):
    n = bank.shape[1]
    return bank.new_empty(n * ordinary), bank.new_empty(n * precise, dtype=wide(bank.dtype))


@kernel_operator("openk3::joined_products")
def _joined_products_op(
    x: Tensor, matrix: Tensor, blocks: Tensor, ordinary: int, precise: int
) -> tuple[Tensor, Tensor]:
    n = len(x)
    out, exact = x.new_empty(n * ordinary), x.new_empty(n * precise, dtype=wide(x.dtype))
    if n:
        _launch_products(x, matrix, blocks, out, exact)
    return out, exact


@_joined_products_op.register_fake
def _(x, matrix, blocks, ordinary, precise):
    n = x.shape[0]
    return x.new_empty(n * ordinary), x.new_empty(n * precise, dtype=wide(x.dtype))


def products_into(
    out: Tensor,
    weight: Tensor,
    x: Tensor | None,
    add: bool,
    norm: tuple[Tensor, float] | None,
    gate: Tensor | None,
    unit: tuple[Tensor, Tensor, Activation] | None,
) -> None:
    """See `openk3.ops.decoding.products_into`."""
    gain, eps = norm or (None, 0.0)
    unit_gate, unit_up, activation = unit or (None, None, Activation())
    torch.ops.openk3.products_into(
        out, weight, x, add, gain, eps, gate, unit_gate, unit_up,
        activation.kind, activation.gate_cap, activation.up_cap,
    )  # fmt: skip


@kernel_operator("openk3::products_into", mutates_args=("out",))
def _products_into_op(
    out: Tensor, weight: Tensor, x: Tensor | None, add: bool, gain: Tensor | None, eps: float,
    gate: Tensor | None, unit_gate: Tensor | None, unit_up: Tensor | None,
    kind: str, gate_cap: float, up_cap: float,
) -> None:  # fmt: skip
    n, d = out.shape
    if not n:
        return
    a, b = 0 if x is None else x.shape[1], 0 if unit_gate is None else unit_gate.shape[1]
    if n > FEW and x is not None and gain is None and unit_gate is None:
        launch_into(out, weight, x, gate, add)
        return
    unit_of = "none" if unit_gate is None else kind
    coarse = bool(PTX) and out.dtype == torch.bfloat16
    if n <= FEW and max(a, b) <= WIDEST_PIECE:
        A, B = (max(16, triton.next_power_of_2(width)) for width in (a, b))
        _few_products_into[(triton.cdiv(d, 4),)](
            out, weight, x, gain, gate, unit_gate, unit_up, n, d, a, b, eps, gate_cap, up_cap,
            ADD=add, X=x is not None, NORM=gain is not None, GATE=gate is not None, UNIT=unit_of,
            COARSE=coarse, COLUMNS=4, A=A, B=B, num_warps=4, **early(out),
        )  # fmt: skip
        return
    _products_into_in_steps(
        out, weight, x, add, gain, eps, gate, unit_gate, unit_up, unit_of, gate_cap, up_cap
    )


def launch_into(out: Tensor, weight: Tensor, x: Tensor, gate: Tensor | None, add: bool) -> None:
    """out (+)= x weight^T, of x * sigmoid(gate) where there is a gate."""
    (n, d), a = out.shape, x.shape[1]
    tile = next((tile for most, tile in WHOLE if n <= most), None)
    if tile is None or not narrow(x) or a > WIDEST_WHOLE:
        _products_into_in_steps(out, weight, x, add, None, 0.0, gate, None, None, "none", 0.0, 0.0)
        return
    _whole_into[triton.cdiv(d, tile.COLUMNS), triton.cdiv(n, tile.ROWS)](
        out, weight, x, gate, n, d, a,
        ADD=add, GATE=gate is not None, **tile._asdict(), **_shares(a), **early(out),
    )  # fmt: skip


def _products_into_in_steps(
    out: Tensor, weight: Tensor, x: Tensor | None, add: bool, gain: Tensor | None, eps: float,
    gate: Tensor | None, unit_gate: Tensor | None, unit_up: Tensor | None,
    unit_of: str, gate_cap: float, up_cap: float,
) -> None:  # fmt: skip
    (n, d), coarse = out.shape, bool(PTX) and out.dtype == torch.bfloat16
    a, b = 0 if x is None else x.shape[1], 0 if unit_gate is None else unit_gate.shape[1]
    tiles = triton.cdiv(n, 16)
    COLUMNS = 16 if tiles <= 4 else 64  # each column block makes what it multiplies again
    _products_into[(triton.cdiv(d, COLUMNS), tiles)](
        out, weight, x, gain, gate, unit_gate, unit_up, n, d, a, b, eps, gate_cap, up_cap,
        ADD=add, X=x is not None, NORM=gain is not None, GATE=gate is not None,
        UNIT=unit_of, COARSE=coarse, ROWS=16, COLUMNS=COLUMNS, DEPTH=DEPTH, num_warps=4,
        num_stages=stages(out), **early(out),
    )  # fmt: skip


@_products_into_op.register_fake
def _(out, weight, x, add, gain, eps, gate, unit_gate, unit_up, kind, gate_cap, up_cap):
    return None
