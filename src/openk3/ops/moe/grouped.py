"""Matrix products over groups of rows, one weight matrix a group, without a loop over groups in Python.

`torch.nn.functional.grouped_mm` does it for float32, bfloat16 and float16 when every row of its operands is a
multiple of 16 bytes. For float64 and for odd widths the groups are padded to the longest one and go through
`bmm`: as exact, but its memory grows with E times the longest group.
"""

from __future__ import annotations

import torch
from torch.nn.functional import grouped_mm


def rows_by_weight(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`rows [R, K]`, `weight [E, K, N]` (or a transposed view), `offsets int32 [E+1]` -> `[R, N]`."""
    if _fits_grouped_mm(rows, weight):
        return grouped_mm(rows, weight, offs=offsets[1:])
    padding = _Padding(offsets, rows.shape[0])
    return padding.take(torch.bmm(padding.put(rows), weight))


def rows_by_rows(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`left [R, M]`, `right [R, N]` -> `[E, M, N]`: left^T right over each group's rows; no rows give 0."""
    if _fits_grouped_mm(left, right):
        return grouped_mm(left.t(), right, offs=offsets[1:])
    padding = _Padding(offsets, left.shape[0])
    return torch.bmm(padding.put(left).transpose(1, 2), padding.put(right))


def _fits_grouped_mm(*operands: torch.Tensor) -> bool:
    """Right dtype, and 16 bytes divide every start and stride except one unit stride for each operand."""
    return operands[0].dtype != torch.float64 and all(
        sum(steps * x.element_size() % 16 != 0 for steps in (x.storage_offset(), *x.stride())) <= 1
        for x in operands
    )


class _Padding:
    """Row r of group e <-> place (e, r - offsets[e]) of `[E, longest, width]`; the other places are zero."""

    def __init__(self, offsets: torch.Tensor, rows: int) -> None:
        starts, counts = offsets[:-1].long(), offsets.diff().long()
        self.experts, self.longest = counts.numel(), int(counts.max())
        first_place = torch.arange(self.experts, device=offsets.device) * self.longest
        self.places = torch.arange(rows, device=offsets.device)
        self.places += (first_place - starts).repeat_interleave(counts)

    def put(self, x: torch.Tensor) -> torch.Tensor:
        padded = x.new_zeros(self.experts * self.longest, x.shape[1])
        return padded.index_copy_(0, self.places, x).view(self.experts, self.longest, x.shape[1])

    def take(self, padded: torch.Tensor) -> torch.Tensor:
        return padded.flatten(0, 1).index_select(0, self.places)
