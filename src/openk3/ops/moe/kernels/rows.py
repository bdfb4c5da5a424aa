"""Between tokens and rows of experts: a gather, and the weighted sum back in the order of the slots."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

# Elements of a program, and the columns it takes of a row at most.
GATHER = {"SIZE": 4096, "COLUMNS": 1024, "num_warps": 4}
COMBINE = {"SIZE": 1024, "COLUMNS": 512, "num_warps": 4}


@triton.jit(do_not_specialize=["R"])
def _gather(x, tokens, out, R, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.load(tokens + r, mask=r < R, other=0)
    inside = (r < R)[:, None] & (c < width)[None, :]
    tl.store(out + r[:, None] * width + c, tl.load(x + token[:, None] * width + c, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _combine(
    rows_of, rows, weights, out, T, width, k: tl.constexpr, WEIGHTED: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (t < T)[:, None] & (c < width)[None, :]
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for s in tl.static_range(k):
        row = tl.load(rows_of + t * k + s, mask=t < T, other=0)
        part = tl.load(rows + row[:, None] * width + c, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            part *= tl.load(weights + t * k + s, mask=t < T, other=0.0)[:, None]
        total += part
    tl.store(out + t[:, None] * width + c, total.to(out.dtype.element_ty), mask=inside)


def _shape(size: dict[str, int], width: int) -> tuple[int, int]:
    """Rows and columns of a program's tile."""
    columns = min(size["COLUMNS"], triton.next_power_of_2(width))
    return max(1, size["SIZE"] // columns), columns


def gather(x: Tensor, tokens: Tensor) -> Tensor:
    """`x[tokens]`: `[T, l]`, `[R]` -> `[R, l]`."""
    R, width = len(tokens), x.shape[1]
    out = x.new_empty(R, width)
    if R:
        ROWS, COLUMNS = _shape(GATHER, width)
        grid = (triton.cdiv(R, ROWS), triton.cdiv(width, COLUMNS))
        _gather[grid](x, tokens, out, R, width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=GATHER["num_warps"])
    return out


def combine(rows: Tensor, rows_of: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """sum_s weights[t, s] rows[rows_of[t, s]] in fp32, slot 0 first; `[R, l]`, `[T, k]` -> `[T, l]`."""
    (T, k), width = rows_of.shape, rows.shape[1]
    out = rows.new_empty(T, width, dtype=dtype)
    if T:
        TOKENS, COLUMNS = _shape(COMBINE, width)
        grid = (triton.cdiv(T, TOKENS), triton.cdiv(width, COLUMNS))
        _combine[grid](
            rows_of, rows, weights, out, T, width, k=k, WEIGHTED=weights is not None,
            TOKENS=TOKENS, COLUMNS=COLUMNS, num_warps=COMBINE["num_warps"],
        )  # fmt: skip
    return out
