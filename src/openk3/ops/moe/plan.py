"""From (token, slot) -> expert to rows grouped by expert, and back: integers only.

The plan is all that dispatch, grouped products and combine share. Its order is total, by (expert, token,
slot): the same routes always give the same rows and the same sums. Knows nothing about ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from openk3.errors import InvalidInput
from openk3.ops.dispatch import Implementation, Kernel, choose
from openk3.ops.traces import named

KERNEL = Kernel("plan", takes="any ids", checked_on="H200 (sm_90)")


@dataclass(frozen=True)
class DispatchPlan:
    """Where each of the R = T k assignments goes; assignment number `token * k + slot`.

    order: `[R]` int64, the assignment in each row. Rows of one expert are adjacent, experts rise.
    tokens: `[R]` int64, the token in each row, order // k.
    rows: `[T, k]` int64, the row of each assignment, the inverse of `order`.
    offsets: `[E+1]` int32; rows offsets[e]:offsets[e+1] belong to expert e.
    """

    order: torch.Tensor
    tokens: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor

    @property
    def load(self) -> torch.Tensor:
        """`[E]` int64, how many tokens each expert received."""
        return self.offsets.diff().long()


class BlockCounts(NamedTuple):
    """What a kernel that chose the experts counted on its way: half of the work of sorting them.

    table: int32 `[E, blocks]`, of each block of assignments how many go to each expert.
    span: assignments of a block.
    ids: the very tensor that was counted.
    """

    table: torch.Tensor
    span: int
    ids: torch.Tensor


@named
def plan(
    ids: torch.Tensor,
    experts: int,
    *,
    counts: BlockCounts | None = None,
    implementation: Implementation | None = None,
) -> DispatchPlan:
    """Group the assignments `ids` (`[T, k]` int64, each in [0, experts)) by expert.

    counts: with them the kernels run; those of another tensor, as where a rank keeps its own experts' ids
        alone, are left unused.
    implementation: force "eager" or "triton"; the plan is the same.

    Raises:
        InvalidInput: ids are not `[T, k]` int64, or one is out of range. Only a CPU looks at the range: on
            a GPU the look would stall the stream.
    """
    if ids.dim() != 2 or ids.dtype != torch.int64:
        raise InvalidInput(f"plan: ids are {tuple(ids.shape)} {ids.dtype}; want [T, k] int64")
    counts = counts if counts is not None and counts.ids is ids else None
    wanted = implementation or (None if counts is None else "triton")
    if choose("plan", ids, wanted, by_default=KERNEL.checked) == "triton":
        from openk3.ops.moe.kernels.plan import plan_of_counts, plan_tensors

        if counts is not None:
            return DispatchPlan(*plan_of_counts(ids, counts.table, counts.span))
        return DispatchPlan(*plan_tensors(ids, experts))
    T, k = ids.shape
    by_expert, order = ids.reshape(-1).sort(stable=True)
    if ids.device.type == "cpu" and T * k:
        lowest, highest = int(by_expert[0]), int(by_expert[-1])
        if lowest < 0 or highest >= experts:
            raise InvalidInput(f"plan: ids reach from {lowest} to {highest}; want 0 to {experts - 1}")
    rows = torch.empty_like(order)
    rows[order] = torch.arange(T * k, device=ids.device)
    offsets = torch.searchsorted(by_expert, torch.arange(experts + 1, device=ids.device), out_int32=True)
    return DispatchPlan(order, order // k, rows.view(T, k), offsets)
