"""Sequences of equal length become one batch. Knows packed offsets and row indices; knows no attention."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from openk3.ops.precision import widen


@dataclass(frozen=True)
class Group:
    """G packed sequences with equally many queries and equally many keys.

    Rows count the flattened `[T * H, D]` tensors, in the order (sequence, head, token) of the batch.
    """

    n_q: int
    n_k: int
    q_rows: torch.Tensor  # int64 [G * H * n_q]
    k_rows: torch.Tensor  # int64 [G * H * n_k]


def group_by_length(
    cu_seqlens_q: list[int], cu_seqlens_k: list[int], heads: int, device: torch.device
) -> list[Group]:
    """The groups of a packing, longest first. Queries that see no key (n_q > n_k) belong to none."""
    starts: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for i in range(len(cu_seqlens_q) - 1):
        n_k = cu_seqlens_k[i + 1] - cu_seqlens_k[i]
        n_q = min(cu_seqlens_q[i + 1] - cu_seqlens_q[i], n_k)
        if n_q:
            starts[n_q, n_k].append((cu_seqlens_q[i + 1] - n_q, cu_seqlens_k[i]))
    groups = []
    for (n_q, n_k), pairs in sorted(starts.items(), reverse=True):
        q_starts, k_starts = torch.tensor(pairs, device=device).unbind(1)
        groups.append(Group(n_q, n_k, _rows(q_starts, n_q, heads), _rows(k_starts, n_k, heads)))
    return groups


def _rows(starts: torch.Tensor, length: int, heads: int) -> torch.Tensor:
    tokens = starts[:, None, None] + torch.arange(length, device=starts.device)  # [G, 1, n]
    head = torch.arange(heads, device=starts.device)[:, None]  # [H, 1]
    return (tokens * heads + head).flatten()


def gather(x: torch.Tensor, rows: torch.Tensor, length: int) -> torch.Tensor:
    """Rows of `[T, H, D]` as an own contiguous batch `[G * H, length, D]`, at least fp32."""
    return widen(x.reshape(-1, x.shape[-1]).index_select(0, rows)).view(-1, length, x.shape[-1])


def scatter(target: torch.Tensor, rows: torch.Tensor, batch: torch.Tensor) -> None:
    """Writes a batch `[G * H, length, D]` to its rows of the contiguous `target` `[T, H, D]`."""
    flat = target.view(-1, target.shape[-1])
    flat.index_copy_(0, rows, batch.reshape(-1, target.shape[-1]).to(target.dtype))
