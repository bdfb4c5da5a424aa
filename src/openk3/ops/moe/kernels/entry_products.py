"""The product at a mixture's entry, x [W_r; W_d]^T: router and latent projection of the same rows.

Products of bf16 numbers are exact in fp32, and are added there: logits are what fp32 rows and weights of the
same values would give. The kernel is ours and not cuBLAS's, which chooses by T: a token's logits must not
depend on how many others there are.
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
