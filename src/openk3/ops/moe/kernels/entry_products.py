"""The products at a mixture's entry: router and latent projection of the same rows, and their gradients.

    forward        logits (fp32) and latent, tile by tile of x [W_r; W_d]^T
    input          dX = D W_r + dZ W_d, one sum over experts and then latent columns
    weights        dW_r = D^T x and dW_d = dZ^T x, pieces of the tokens in fp32, then the pieces in order

D `[T, E]`, the gradient of the logits, is zero but for the k chosen experts of a token. It is never in
memory: a tile of it is made in registers from k ids and k values a token. Its fp32 values go through the
matrix unit as two bf16 terms, within 2^-16 of themselves. Products of bf16 numbers are exact in fp32, and are
added there: logits are what fp32 rows and weights of the same values would give.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

Tensor = torch.Tensor


@dataclass(frozen=True)
class Blocks:
    """Block sizes of a product: rows, columns, depth of a step."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


FORWARD = Blocks(rows=128, columns=128, depth=64, warps=4, stages=3)
INPUT = Blocks(rows=128, columns=128, depth=64, warps=4, stages=3)
WEIGHTS = Blocks(rows=64, columns=128, depth=64, warps=4, stages=3)
PROGRAMS = 396  # that pieces of the tokens should make of the weights' gradients: three an SM of an H200


@triton.jit
def _store(out, value, row, first, T, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = row + tl.arange(0, ROWS)
    c = first + tl.arange(0, COLUMNS)
    place = out + r.to(tl.int64)[:, None] * N + c[None, :]
    tl.store(place, value.to(out.dtype.element_ty), mask=(r < T)[:, None] & (c < N)[None, :])


@triton.jit
def _rows_by_weight(x, w, row, first, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for d in range(0, K, DEPTH):
        total = tl.dot(x.load([row, d]), w.load([first, d]).T, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["T"])
def _forward(
    x, router, down, logits, latent, T, E, L, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    of_router = tl.cdiv(E, COLUMNS)
    slabs = of_router + tl.cdiv(L, COLUMNS)
    row = tl.program_id(0) // slabs * ROWS
    slab = tl.program_id(0) % slabs
    if slab < of_router:
        total = _rows_by_weight(x, router, row, slab * COLUMNS, K, ROWS, COLUMNS, DEPTH)
        _store(logits, total, row, slab * COLUMNS, T, E, ROWS, COLUMNS)
    else:
        first = (slab - of_router) * COLUMNS
        total = _rows_by_weight(x, down, row, first, K, ROWS, COLUMNS, DEPTH)
        _store(latent, total, row, first, T, L, ROWS, COLUMNS)


@triton.jit
def _terms(value, like):
    """`value` as the sum of two numbers of the dtype that `like` points to; fp32 needs one."""
    high = value.to(like)
    return high, (value - high.to(tl.float32)).to(like)


@triton.jit(do_not_specialize=["T"])
def _input(
    ids, values, router, d_latent, down, d_x, T, E, L, N,
    k: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    slabs = tl.cdiv(N, COLUMNS)
    row = tl.program_id(0) // slabs * ROWS
    first = tl.program_id(0) % slabs * COLUMNS
    t = row + tl.arange(0, ROWS)
    place = t.to(tl.int64) * k
    # D is the right operand, which always lies in shared memory: as the left one, in registers, it spills.
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for e in range(0, E, DEPTH):
        expert = e + tl.arange(0, DEPTH)
        value = tl.zeros([DEPTH, ROWS], tl.float32)
        for s in tl.static_range(k):
            chosen = tl.load(ids + place + s, mask=t < T, other=-1).to(tl.int32)
            own = tl.load(values + place + s, mask=t < T, other=0.0)
            value = tl.where(chosen[None, :] == expert[:, None], own[None, :], value)
        high, low = _terms(value, d_x.dtype.element_ty)
        weight = router.load([e, first]).T
        total = tl.dot(weight, high, total, input_precision="ieee")
        total = tl.dot(weight, low, total, input_precision="ieee")
    for c in range(0, L, DEPTH):
        left = down.load([c, first]).T
        total = tl.dot(left, d_latent.load([row, c]).T, total, input_precision="ieee")
    _store(d_x, total.T, row, first, T, N, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["T", "span"])
def _weights(
    ids, values, d_latent, x, pieces, T, span, E, L, N,
    k: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Piece p of the tokens, `[E + L, N]` of it after another; a block of rows of one weight, and columns.

    D is the right operand here too: as the left one, in registers, the products wait for each other (C7515).
    """
    across = tl.cdiv(N, COLUMNS)
    of_router = tl.cdiv(E, ROWS)
    blocks = (of_router + tl.cdiv(L, ROWS)) * across
    piece = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks // across
    column = tl.program_id(0) % across * COLUMNS
    begin = piece * span
    end = tl.minimum(begin + span, T)
    out = pieces + piece.to(tl.int64) * (E + L) * N
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    if block < of_router:
        first = block * ROWS
        expert = first + tl.arange(0, ROWS)
        for row in range(begin, end, DEPTH):
            t = row + tl.arange(0, DEPTH)
            place = t.to(tl.int64) * k
            value = tl.zeros([ROWS, DEPTH], tl.float32)
            for s in tl.static_range(k):
                chosen = tl.load(ids + place + s, mask=t < T, other=-1).to(tl.int32)
                own = tl.load(values + place + s, mask=t < T, other=0.0)
                value = tl.where(chosen[None, :] == expert[:, None], own[None, :], value)
            high, low = _terms(value, x.dtype)
            left = x.load([row, column]).T
            total = tl.dot(left, high.T, total, input_precision="ieee")
            total = tl.dot(left, low.T, total, input_precision="ieee")
        _store(out, total.T, first, column, E, N, ROWS, COLUMNS)
    else:
        first = (block - of_router) * ROWS
        for row in range(begin, end, DEPTH):
            left = x.load([row, column]).T
            total = tl.dot(left, d_latent.load([row, first]), total, input_precision="ieee")
        _store(out + E * N, total.T, first, column, L, N, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["count"])
def _add_pieces(pieces, d_router, d_down, count, of_router, size, SIZE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    place = pieces + i
    for _ in range(count):
        total += tl.load(place, mask=i < size, other=0.0)
        place += size
    value = total.to(d_router.dtype.element_ty)
    tl.store(d_router + i, value, mask=i < of_router)
    tl.store(d_down + i - of_router, value, mask=(i >= of_router) & (i < size))


def _described(x: Tensor, rows: int, columns: int, instead: Tensor) -> TensorDescriptor:
    """Tiles of `x`; of `instead`, never looked at, where `x` has no columns or rows."""
    return TensorDescriptor.from_tensor(x if x.numel() else instead, [rows, columns])


def forward(x: Tensor, router: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """`x [T, d]`, `router [E, d]`, `down [l, d]` -> logits `[T, E]` fp32, latent `[T, l]`; l may be 0."""
    (T, K), E, L, b = x.shape, len(router), len(down), FORWARD
    logits, latent = x.new_empty(T, E, dtype=torch.float32), x.new_empty(T, L)
    if T:
        slabs = triton.cdiv(E, b.columns) + triton.cdiv(L, b.columns)
        _forward[(triton.cdiv(T, b.rows) * slabs,)](
            TensorDescriptor.from_tensor(x, [b.rows, b.depth]),
            TensorDescriptor.from_tensor(router, [b.columns, b.depth]),
            _described(down, b.columns, b.depth, router),
            logits, latent, T, E, L, K, ROWS=b.rows, COLUMNS=b.columns, DEPTH=b.depth,
            num_warps=b.warps, num_stages=b.stages,
        )  # fmt: skip
    return logits, latent


def input_gradient(ids: Tensor, values: Tensor, router: Tensor, d_latent: Tensor, down: Tensor) -> Tensor:
    """dX `[T, d]` of D, given by `ids` int64 and `values` fp32 `[T, k]`, and `d_latent [T, l]`."""
    (T, k), (E, N), L, b = ids.shape, router.shape, len(down), INPUT
    d_x = router.new_empty(T, N)
    if T:
        _input[(triton.cdiv(T, b.rows) * triton.cdiv(N, b.columns),)](
            ids, values, TensorDescriptor.from_tensor(router, [b.depth, b.columns]),
            _described(d_latent, b.rows, b.depth, router), _described(down, b.depth, b.columns, router),
            d_x, T, E, L, N, k=k, ROWS=b.rows, COLUMNS=b.columns, DEPTH=b.depth,
            num_warps=b.warps, num_stages=b.stages,
        )  # fmt: skip
    return d_x


def weight_gradients(
    ids: Tensor, values: Tensor, d_latent: Tensor, x: Tensor, experts: int
) -> tuple[Tensor, Tensor]:
    """dW_r `[E, d]` and dW_d `[l, d]` in x's dtype; fp32 sums whose order T, d, E and l decide."""
    (T, k), N, L, b = ids.shape, x.shape[1], d_latent.shape[1], WEIGHTS
    d_router, d_down = x.new_zeros(experts, N), x.new_zeros(L, N)
    if T:
        blocks = (triton.cdiv(experts, b.rows) + triton.cdiv(L, b.rows)) * triton.cdiv(N, b.columns)
        steps = triton.cdiv(T, b.depth)
        span = triton.cdiv(steps, max(1, PROGRAMS // blocks)) * b.depth
        count = triton.cdiv(T, span)
        pieces = x.new_empty(count, experts + L, N, dtype=torch.float32)
        _weights[(count * blocks,)](
            ids, values, _described(d_latent, b.depth, b.rows, x),
            TensorDescriptor.from_tensor(x, [b.depth, b.columns]),
            pieces, T, span, experts, L, N, k=k, ROWS=b.rows, COLUMNS=b.columns, DEPTH=b.depth,
            num_warps=b.warps, num_stages=b.stages,
        )  # fmt: skip
        size = (experts + L) * N
        _add_pieces[(triton.cdiv(size, 1024),)](
            pieces, d_router, d_down, count, experts * N, size, SIZE=1024, num_warps=4
        )  # fmt: skip
    return d_router, d_down
