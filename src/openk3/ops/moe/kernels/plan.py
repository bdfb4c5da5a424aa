"""The dispatch plan by counting, and the tiles of the grouped products. Integers only.

    count    each block of assignments: how many go to each expert, `[E, blocks]`
    cumsum   over experts, then blocks: the first row of each block's assignments to each expert
    place    row = that + how many earlier assignments of the block go to the same expert

That is a stable sort by expert: the order of rows is (expert, token, slot), whatever runs first.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from openk3.ops.kernel_operator import kernel_operator

Tensor = torch.Tensor

BLOCK = 256  # assignments of a program; ranking them takes BLOCK^2 comparisons
TURN = 16  # of them compared at a time


@triton.jit(do_not_specialize=["R", "blocks"])
def _count(ids, counts, R, E, blocks, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    a = b * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + a, mask=a < R, other=0).to(tl.int32)
    e = tl.arange(0, EXPERTS)
    count = tl.histogram(expert, EXPERTS)
    beyond = tl.maximum((b + 1) * BLOCK - R, 0)  # those were counted to expert 0
    count -= tl.where(e == 0, beyond, 0)
    tl.store(counts + e.to(tl.int64) * blocks + b, count, mask=e < E)


@triton.jit(do_not_specialize=["R", "blocks"])
def _place(
    ids, ends, order, tokens, rows, R, k, blocks, span, BLOCK: tl.constexpr, TURN: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    a = b * span + i
    inside = (i < span) & (a < R)
    expert = tl.load(ids + a, mask=inside, other=0).to(tl.int32)
    earlier = tl.zeros([BLOCK], tl.int32)
    for first in range(0, BLOCK, TURN):
        j = first + tl.arange(0, TURN)
        other = tl.load(ids + b * span + j, mask=b * span + j < R, other=-1).to(tl.int32)
        # Lanes lie along the last axis: a sum over the first one stays within each.
        same = (other[:, None] == expert[None, :]) & (j[:, None] < i[None, :])
        earlier += tl.sum(same.to(tl.int32), 0)
    # `ends` is the inclusive sum: what came before this block and expert is the entry before.
    place = expert.to(tl.int64) * blocks + b
    base = tl.load(ends + place - 1, mask=inside & (place > 0), other=0)
    row = (base + earlier).to(tl.int64)
    tl.store(rows + a, row, mask=inside)
    tl.store(order + row, a.to(tl.int64), mask=inside)
    tl.store(tokens + row, (a // k).to(tl.int64), mask=inside)


def _place_all(ids: Tensor, counts: Tensor, span: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (T, k), (experts, blocks), R = ids.shape, counts.shape, ids.numel()
    order, tokens = (torch.empty(R, dtype=torch.int64, device=ids.device) for _ in range(2))
    rows = torch.empty(T, k, dtype=torch.int64, device=ids.device)
    if R == 0:
        return order, tokens, rows, torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    ends = counts.view(-1).cumsum(0, dtype=torch.int32)
    _place[(blocks,)](
        ids, ends, order, tokens, rows, R, k, blocks, span,
        BLOCK=max(TURN, triton.next_power_of_2(span)), TURN=TURN, num_warps=4,
    )  # fmt: skip
    return order, tokens, rows, pad(ends.view(experts, blocks)[:, -1], (1, 0))


@kernel_operator("openk3::dispatch_plan")
def plan_tensors(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """order, tokens `[T k]`, rows `[T, k]`, all int64, and offsets int32 `[E+1]`, of ids `[T, k]` int64."""
    ids, R = ids.contiguous(), ids.numel()
    blocks = triton.cdiv(R, BLOCK)
    counts = torch.empty(experts, blocks, dtype=torch.int32, device=ids.device)
    if R:
        EXPERTS = max(32, triton.next_power_of_2(experts))
        _count[(blocks,)](ids, counts, R, experts, blocks, EXPERTS=EXPERTS, BLOCK=BLOCK, num_warps=4)
    return _place_all(ids, counts, BLOCK)


@kernel_operator("openk3::dispatch_plan_of_counts")
def plan_of_counts(ids: Tensor, counts: Tensor, span: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`plan_tensors` where the first pass was made already: int32 counts `[E, blocks]` of each `span`
    assignments."""
    return _place_all(ids.contiguous(), counts.contiguous(), span)


@plan_tensors.register_fake
def _(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    flat = ids.new_empty(ids.numel())
    return flat, torch.empty_like(flat), torch.empty_like(ids), ids.new_empty(experts + 1, dtype=torch.int32)


@plan_of_counts.register_fake
def _(ids: Tensor, counts: Tensor, span: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    flat = ids.new_empty(ids.numel())
    offsets = ids.new_empty(counts.shape[0] + 1, dtype=torch.int32)
    return flat, torch.empty_like(flat), ids.new_empty(ids.shape), offsets


@triton.jit
def _tile_starts(offsets, starts, E, tile, EXPERTS: tl.constexpr):
    e = tl.arange(0, EXPERTS)
    first = tl.load(offsets + e, mask=e < E, other=0)
    last = tl.load(offsets + e + 1, mask=e < E, other=0)
    tiles = (last - first + tile - 1) // tile
    tl.store(starts, 0)
    tl.store(starts + 1 + e, tl.cumsum(tiles, 0), mask=e < E)


def tile_starts(offsets: Tensor, tile: int) -> Tensor:
    """int32 `[E+1]`: the first tile of each expert where tiles hold `tile` rows of one expert each."""
    E = len(offsets) - 1
    starts = torch.empty_like(offsets)
    _tile_starts[(1,)](offsets, starts, E, tile, EXPERTS=max(32, triton.next_power_of_2(E)), num_warps=4)
    return starts


def most_tiles(rows: int, experts: int, tile: int) -> int:
    """A bound on the number of tiles that needs no look at the counts."""
    return rows // tile + min(experts, rows)


@triton.jit
def tile_at(tile, starts, offsets, E, ROWS: tl.constexpr):
    """(expert, first row, rows) of a tile."""
    e = tile * 0
    beyond = e + E
    while beyond - e > 1:
        middle = (e + beyond) // 2
        starts_before = tl.load(starts + middle) <= tile
        e = tl.where(starts_before, middle, e)
        beyond = tl.where(starts_before, beyond, middle)
    row = tl.load(offsets + e) + (tile - tl.load(starts + e)) * ROWS
    return e, row, tl.minimum(tl.load(offsets + e + 1) - row, ROWS)
