"""All pairs of a chunk's rows by joining halves, for a gate without a bound, where no fixed shift is safe.

At level l rows fall into blocks of n = 2^l, two of which join. The pair of a row i of the later block with a
row j of the earlier meets at the boundary between them:

    read_i . write_j 2^(sum of a over j+1 .. i) = (read_i 2^e_i) . (write_j 2^e_j)
    e_i = sum of a from the later block's first row through i      e_j = from j + 1 through the earlier's last

with a <= 0 the log2 decays. Every pair of different rows has one level, where one is in the later block, the
reader, and one in the earlier, the writer; so at each level each row has one exponent, e = spans a with
`spans` the 0 and 1 of who lies between a row and the boundary. No factor exceeds 1, none is a quotient, and e
is a sum of just the gates that it spans: no digits are lost to gates elsewhere, and a later row's gate is
never read.

Level 6 would join the chunk with the next: there all its rows are writers, with e to the chunk's end. For the
state that enters, all are readers, with e from its start.

Backwards the gradients to e go to a through the transposes of the same sums. A gate gets what spans it, and
nothing is added that must cancel; so here one bf16 term will do where a, whose sums are exponents, has two.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import functools

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from openk3.ops.kda.kernels.decode import log_decay
from openk3.ops.kda.kernels.plan import CHUNK

LOG2_E = tl.constexpr(1.4426950408889634)
LEVELS = tl.constexpr(6)  # of a chunk of 64 rows
TO_END, FROM_START = tl.constexpr(6), tl.constexpr(7)  # in `spans_table`, after the levels
# Of products with fp32 operands: three on tensor cores, which come near fp32's own. Says nothing to bf16.
FULL = tl.constexpr("tf32x3")
# 2^LOWEST is 0, and 64 times LOWEST is finite: 0 of `spans` times it stays 0.
LOWEST = tl.constexpr(-(2.0**14))


@triton.jit
def unbounded_log2_decay(u, rate):
    """-rate softplus(u) in units of log 2, kept finite; u = z + dt_bias."""
    a = log_decay(u, rate, 0.0, False) * LOG2_E
    return tl.maximum(a, LOWEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def meets(row, column, level):
    """Whether at this level `row` reads what `column` wrote: blocks side by side, the earlier's number even.

    As in `spans`, all but the last step is on single rows and columns, which registers hold.
    """
    earlier = column >> level
    return row >> level == tl.where(earlier & 1 == 0, earlier + 1, -1)


@functools.cache
def spans_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`spans` of each level, then of the chunk's end and its start, `[8, 64, 64]` of 0 and 1: by row, whose
    gates lie between it and the boundary where its block is joined. Loaded rather than computed, since tensor
    cores take a left operand from memory, where it costs no registers.
    """
    row, column = torch.arange(CHUNK, device=device)[:, None], torch.arange(CHUNK, device=device)
    tables = []
    for level in range(7):
        same_block, is_reader = (row ^ column) >> level == 0, (row >> level) % 2 == 1
        tables.append(same_block & (is_reader == (column <= row)))
    return torch.stack([*tables, column <= row]).to(dtype)


@triton.jit
def split(x, OPERAND: tl.constexpr):
    """x as two terms of the operands' type, which hold 16 bits of it in bf16."""
    high = x.to(OPERAND)
    return high, (x - high.to(tl.float32)).to(OPERAND)


@triton.jit
def decays(between, high, low, OPERAND: tl.constexpr):
    """2^e `[64, F]` in fp32: e sums the rows of log2 decays `[64, F]`, `split`, that `between` selects."""
    e = tl.dot(between, high, input_precision=FULL)
    if OPERAND != tl.float32:
        e = tl.dot(between, low, e)
    return tl.exp2(e)
