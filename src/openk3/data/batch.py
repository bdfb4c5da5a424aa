"""What the model is fed: packed tokens with their targets and the borders between sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

IGNORED = -100  # a target that carries no loss


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed sequences of one micro-batch, T tokens in N sequences.

    Attributes:
        tokens: int64 `[T]`.
        targets: int64 `[T]`, the next token of the same document, -100 where there is nothing to learn.
        cu_seqlens: int32 `[N+1]`; sequence i is `tokens[cu_seqlens[i]:cu_seqlens[i+1]]`.
        token_mask: bool `[T]`, False for padding; None if there is none.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor
    token_mask: torch.Tensor | None = None

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The batch on another device; `non_blocking` does not wait for a copy from `pinned` memory."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pinned(self) -> Batch:
        """The batch in memory of the host that a GPU copies from on its own."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        mask = None if self.token_mask is None else change(self.token_mask)
        return Batch(change(self.tokens), change(self.targets), change(self.cu_seqlens), mask)
