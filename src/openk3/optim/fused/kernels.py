"""Kernels of the fused update: Muon's direction and update, AdamW, and A A^T for Newton-Schulz.

A program serves one block of Muon, or one piece of a tensor of AdamW. It finds its tensors in a table of
addresses (`openk3.optim.fused.tables`), and whether there is anything to do in the factor on the gradients:
where that is 0, inf or NaN, or the gradient is missing, it leaves memory as it is. Every element belongs to
one program, which computes in fp32.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

# Elements of a tile, warps.
DIRECTION = {"TILE": 8192, "num_warps": 32}
UPDATE = {"TILE": 4096, "num_warps": 8}
UPDATE_PARTS = 4  # programs to a block of Muon
ADAMW = {"TILE": 2048, "num_warps": 4}
SYMMETRIC = {"EDGE": 128, "DEPTH": 64, "num_warps": 8, "num_stages": 3}
SYMMETRIC_WIDE = {"EDGE": 64, "DEPTH": 32, "num_warps": 8, "num_stages": 2}  # fp32, no matrix unit

_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _number(at, ALIGNED: tl.constexpr):
    """A count of elements, a multiple of what 16-byte accesses need if ALIGNED."""
    value = tl.load(at)
    if ALIGNED:
        value = tl.multiple_of(value, 16)
    return value


@triton.jit
def _tensor(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer that an entry of the table of addresses is; the compiler is told that it is aligned."""
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _goes(grad, scale):
    """Whether there is a gradient and a finite factor other than 0; inf - inf and NaN - NaN are NaN."""
    return (grad != 0) & (scale != 0.0) & (scale - scale == 0.0)


@triton.jit
def _direction(
    blocks, addresses, scale, x, moves, renewed, eps,
    COLUMNS: tl.constexpr, NESTEROV: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Advance a block's momentum, and write its direction at norm 1 (Frobenius), or zero for a zero gradient.

    The direction is written before its norm is known, and scaled in a second pass by those who wrote it.
    """
    row = blocks + tl.program_id(0).to(tl.int64) * 4
    slot = tl.load(row) * COLUMNS
    start = _number(row + 1, ALIGNED)
    elements = _number(row + 2, ALIGNED)
    x += _number(row + 3, ALIGNED)
    factor = tl.load(scale)
    grad_address = tl.load(addresses + slot)
    moving = tl.zeros([], tl.int32)
    if _goes(grad_address, factor):
        grad = _tensor(grad_address, tl.float32, ALIGNED) + start
        momentum = _tensor(tl.load(addresses + slot + 3), tl.float32, ALIGNED) + start
        squares = tl.zeros([TILE], tl.float32)
        nonzero = tl.zeros([TILE], tl.int32)
        for first in range(0, elements, TILE):
            place = first + tl.arange(0, TILE)
            inside = place < elements
            g = tl.load(grad + place, mask=inside, other=0.0, eviction_policy="evict_first") * factor
            m = tl.load(momentum + place, mask=inside, other=0.0, eviction_policy="evict_first")
            m += (g - m) * renewed
            tl.store(momentum + place, m, mask=inside, eviction_policy="evict_first")
            d = m
            if NESTEROV:
                d = m - (m - g) * renewed
            squares += d * d
            nonzero |= (g != 0.0).to(tl.int32)
            tl.store(x + place, d.to(x.dtype.element_ty), mask=inside)
        moving = tl.max(nonzero, 0)
        norm = tl.sqrt_rn(tl.sum(squares, 0))
        share = tl.where(moving > 0, 1.0 / tl.maximum(norm, eps), 0.0)
        tl.debug_barrier()
        for first in range(0, elements, TILE):
            place = first + tl.arange(0, TILE)
            inside = place < elements
            d = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            tl.store(x + place, (d * share).to(x.dtype.element_ty), mask=inside)
    tl.store(moves + tl.program_id(0), moving)


@triton.jit
def _muon_update(
    blocks, sizes, addresses, rates, moves, x,
    COLUMNS: tl.constexpr, WEIGHT: tl.constexpr, ALIGNED: tl.constexpr,
    PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Decay a block that moves and add its factor; the compute copy is written along."""
    block = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    row = blocks + block.to(tl.int64) * 4
    slot = tl.load(row)
    start = _number(row + 1, ALIGNED)
    elements = _number(row + 2, ALIGNED)
    x += _number(row + 3, ALIGNED)
    if tl.load(moves + block) != 0:
        keep = tl.load(rates + slot * 2)
        step = tl.load(rates + slot * 2 + 1) * tl.load(sizes + block)
        master = _tensor(tl.load(addresses + slot * COLUMNS + 1), tl.float32, ALIGNED) + start
        weight_address = tl.load(addresses + slot * COLUMNS + 2)
        weight = _tensor(weight_address, WEIGHT, ALIGNED) + start
        for first in range(part * TILE, elements, PARTS * TILE):
            place = first + tl.arange(0, TILE)
            inside = place < elements
            p = tl.load(master + place, mask=inside, other=0.0, eviction_policy="evict_first")
            factor = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            p = p * keep - factor * step
            tl.store(master + place, p, mask=inside)
            if weight_address != 0:
                tl.store(weight + place, p.to(WEIGHT), mask=inside)


@triton.jit
def _adamw(
    pieces, addresses, rates, scale, renewed1, renewed2, kept2, eps,
    COLUMNS: tl.constexpr, WEIGHT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """AdamW on one piece of a tensor. rates `[n, 3]`: factor kept, step size, root of 1 - beta2^step."""
    row = pieces + tl.program_id(0).to(tl.int64) * 3
    slot = tl.load(row)
    start = _number(row + 1, ALIGNED)
    elements = _number(row + 2, ALIGNED)
    factor = tl.load(scale)
    entry = addresses + slot * COLUMNS
    grad_address = tl.load(entry)
    if _goes(grad_address, factor):
        keep = tl.load(rates + slot * 3)
        step = tl.load(rates + slot * 3 + 1)
        root = tl.load(rates + slot * 3 + 2)
        weight_address = tl.load(entry + 2)
        grad = _tensor(grad_address, tl.float32, ALIGNED) + start
        master = _tensor(tl.load(entry + 1), tl.float32, ALIGNED) + start
        weight = _tensor(weight_address, WEIGHT, ALIGNED) + start
        first = _tensor(tl.load(entry + 3), tl.float32, ALIGNED) + start
        second = _tensor(tl.load(entry + 4), tl.float32, ALIGNED) + start
        place = tl.arange(0, TILE)
        inside = place < elements
        g = tl.load(grad + place, mask=inside, other=0.0) * factor
        p = tl.load(master + place, mask=inside, other=0.0)
        m = tl.load(first + place, mask=inside, other=0.0)
        v = tl.load(second + place, mask=inside, other=0.0)
        m += (g - m) * renewed1
        v = v * kept2 + g * g * renewed2
        p = p * keep - step * m / (tl.sqrt_rn(v) / root + eps)
        tl.store(first + place, m, mask=inside)
        tl.store(second + place, v, mask=inside)
        tl.store(master + place, p, mask=inside)
        if weight_address != 0:
            tl.store(weight + place, p.to(WEIGHT), mask=inside)


@triton.jit
def _symmetric(
    a, out, batch_stride: tl.int64, row_stride, k_stride, n, K, alpha, beta, diagonal,
    HAS_BETA: tl.constexpr, EDGE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out = alpha A A^T + beta A + diagonal I: tiles up to the diagonal; the others are their mirrors."""
    tiles = tl.cdiv(n, EDGE)
    i = tl.program_id(0) // tiles
    j = tl.program_id(0) % tiles
    if j <= i:
        a += tl.program_id(1) * batch_stride
        out += tl.program_id(1).to(tl.int64) * n * n
        rows = i * EDGE + tl.arange(0, EDGE)
        cols = j * EDGE + tl.arange(0, EDGE)
        k = tl.arange(0, DEPTH)
        left = a + rows[:, None] * row_stride + k[None, :] * k_stride
        right = a + cols[None, :] * row_stride + k[:, None] * k_stride
        total = tl.zeros([EDGE, EDGE], tl.float32)
        for first in range(0, K, DEPTH):
            here = first + k < K
            l_tile = tl.load(left, mask=(rows[:, None] < n) & here[None, :], other=0.0)
            r_tile = tl.load(right, mask=(cols[None, :] < n) & here[:, None], other=0.0)
            total = tl.dot(l_tile, r_tile, total, input_precision="ieee")
            left += DEPTH * k_stride
            right += DEPTH * k_stride
        total *= alpha
        inside = (rows[:, None] < n) & (cols[None, :] < n)
        if HAS_BETA:
            own = tl.load(a + rows[:, None] * row_stride + cols[None, :] * k_stride, mask=inside, other=0.0)
            total += beta * own.to(tl.float32)
            total += tl.where(rows[:, None] == cols[None, :], diagonal, 0.0)
        result = total.to(out.dtype.element_ty)
        tl.store(out + rows[:, None] * n + cols[None, :], result, mask=inside)
        if i != j:
            mirror = (cols[:, None] < n) & (rows[None, :] < n)
            tl.store(out + cols[:, None] * n + rows[None, :], tl.trans(result), mask=mirror)


def direction(
    blocks: Tensor, addresses: Tensor, scale: Tensor, x: Tensor, moves: Tensor,
    *, share: float, nesterov: bool, eps: float, aligned: bool,
) -> None:  # fmt: skip
    """See `_direction`.

    Args:
        blocks: int64 `[B, 4]`: slot, first element in the slot's tensors, elements, first element in x.
        x: out, the directions; moves: out, int32 `[B]`, 1 for a block whose gradient is not zero.
    """
    _direction[(len(blocks),)](
        blocks, addresses, scale, x, moves, 1 - share, eps,
        COLUMNS=addresses.shape[1], NESTEROV=nesterov, ALIGNED=aligned, **DIRECTION,
    )  # fmt: skip


def muon_update(
    blocks: Tensor, sizes: Tensor, addresses: Tensor, rates: Tensor, moves: Tensor, x: Tensor,
    *, half: torch.dtype, aligned: bool,
) -> None:  # fmt: skip
    """See `_muon_update`. sizes: fp32 `[B]`, of an update in learning rates; half: of the compute copies."""
    _muon_update[(len(blocks) * UPDATE_PARTS,)](
        blocks, sizes, addresses, rates, moves, x,
        COLUMNS=addresses.shape[1], WEIGHT=_TRITON[half], ALIGNED=aligned, PARTS=UPDATE_PARTS, **UPDATE,
    )  # fmt: skip


def adamw(
    pieces: Tensor, addresses: Tensor, rates: Tensor, scale: Tensor,
    *, betas: tuple[float, float], eps: float, half: torch.dtype, aligned: bool,
) -> None:  # fmt: skip
    """See `_adamw`. pieces: int64 `[P, 3]`: slot, first element, elements (at most the tile)."""
    _adamw[(len(pieces),)](
        pieces, addresses, rates, scale, 1 - betas[0], 1 - betas[1], betas[1], eps,
        COLUMNS=addresses.shape[1], WEIGHT=_TRITON[half], ALIGNED=aligned, **ADAMW,
    )  # fmt: skip


def symmetric_product(
    a: Tensor, out: Tensor, alpha: float = 1.0, beta: float = 0.0, diagonal: float = 0.0
) -> None:
    """out = alpha A A^T + beta A + diagonal I for each matrix; beta and diagonal need square symmetric A.

    Args:
        a: `[m, n, K]`, whole matrices apart by one stride; out: `[m, n, n]`, contiguous, m below 65,536.
    """
    m, n, K = a.shape
    tile = {**(SYMMETRIC if a.dtype == torch.bfloat16 else SYMMETRIC_WIDE)}
    edge = tile["EDGE"] = min(tile["EDGE"], max(16, triton.next_power_of_2(n)))
    _symmetric[(triton.cdiv(n, edge) ** 2, m)](
        a, out, *a.stride(), n, K, alpha, beta, diagonal, HAS_BETA=beta != 0.0 or diagonal != 0.0, **tile
    )
