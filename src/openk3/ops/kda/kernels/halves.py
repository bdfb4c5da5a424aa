"""All pairs of a chunk's rows by joining halves, for a gate without a bound, where no fixed shift is safe.

At level l rows fall into blocks of n = 2^l, two of which join. The pair of a row i of the later block with a
row j of the earlier meets at the boundary between them:

    read_i . write_j 2^(sum of a over j+1 .. i) = (read_i 2^e_i) . (write_j 2^e_j)
    e_i = sum of a from the later block's first row through i        e_j = from j + 1 through the earlier's last

with a <= 0 the log2 decays. Every pair of different rows has one level, where one is in the later block, the
reader, and one in the earlier, the writer; so at each level each row has one exponent, e = spans a with spans
the 0 and 1 of who lies between a row and the boundary. No factor exceeds 1, none is a quotient, and e is a sum
of just the gates that it spans: no digits are lost to gates elsewhere, and a later row's gate is never read.
Level 6 would join the chunk with the next: there all its rows are writers, spans runs to the chunk's end.

Backwards the gradient to a is the transpose of the same sums, of the gradients to e. It adds what spans a row
and nothing that must cancel.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from openk3.ops.kda.kernels.decode import log_decay

LOG2_E = tl.constexpr(1.4426950408889634)
LEVELS = tl.constexpr(6)  # of a chunk of 64 rows
# 2^LOWEST is 0, and 64 times LOWEST is finite: 0 of `spans` times it stays 0.
LOWEST = tl.constexpr(-(2.0**14))


@triton.jit
def unbounded_log2_decay(u, rate):
    """-rate softplus(u) in units of log 2, kept finite; u = z + dt_bias."""
    a = log_decay(u, rate, 0.0, False) * LOG2_E
    return tl.maximum(a, LOWEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def meets(row, column, level):
    """Whether at this level `row` reads what `column` wrote."""
    return ((row ^ column) >> level == 1) & (row > column)


@triton.jit
def spans(row, column, level):
    """Whether the gate of `column` lies between `row` and the boundary at which its block is joined."""
    reader = (row >> level) & 1
    return ((row ^ column) >> level == 0) & (reader == (column <= row).to(tl.int32))


@triton.jit
def sums(which, x, OPERAND: tl.constexpr):
    """Sums `[R, F]` of the rows of x `[R, F]` that `which` `[R, R]` selects, on tensor cores.

    Two bf16 terms hold 16 bits of x, and sums are fp32.
    """
    PRECISION: tl.constexpr = "ieee" if OPERAND == tl.float32 else "tf32"
    which = which.to(OPERAND)
    high = x.to(OPERAND)
    total = tl.dot(which, high, input_precision=PRECISION)
    if OPERAND != tl.float32:
        low = (x - high.to(tl.float32)).to(OPERAND)
        total = tl.dot(which, low, total, input_precision=PRECISION)
    return total
