"""The one layout of tokens: packed sequences and their offsets (docs/structure.md).

Knows what a valid `cu_seqlens` is and how to read it on the host; knows no operator.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from openk3.errors import InvalidInput


def sequence_bounds(name: str, cu_seqlens: torch.Tensor, tokens: int) -> list[int]:
    """The offsets of `tokens` packed tokens as N + 1 Python integers; waits for the device they live on.

    Args:
        name: how the caller's caller knows the argument, as in "kda: cu_seqlens"; it opens the error.
        cu_seqlens: integer `[N + 1]`; sequence n holds tokens [cu_seqlens[n], cu_seqlens[n + 1]), maybe none.

    Raises:
        InvalidInput: not one axis of integers that starts at 0, never falls, and ends at `tokens`.
    """
    if cu_seqlens.is_meta:
        raise InvalidInput(f"{name} must lie where it can be read, got a meta tensor")
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or not len(cu_seqlens):
        raise InvalidInput(f"{name} must be int32 [N + 1], got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}")
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != tokens:
        raise InvalidInput(f"{name} must go from 0 to the {tokens} tokens, got {bounds[0]} to {bounds[-1]}")
    for n, (start, end) in enumerate(pairwise(bounds)):
        if end < start:
            raise InvalidInput(f"{name} must never fall, but sequence {n} runs from {start} to {end}")
    return bounds


def check_offsets(
    operator: str, x: torch.Tensor, *, cu_seqlens: torch.Tensor, checkpoint_at: torch.Tensor | None
) -> None:
    """What can be known of offsets into `x` without reading them, which would wait for the device.

    Raises:
        InvalidInput: not integers on one axis, cu_seqlens without an element, or on another device than an x
            on a GPU.
    """
    for name, offsets in (("cu_seqlens", cu_seqlens), ("checkpoint_at", checkpoint_at)):
        if offsets is None:
            continue
        if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
            raise InvalidInput(
                f"{operator}: {name} must be int32 on one axis, got {offsets.dtype} {tuple(offsets.shape)}"
            )
        if x.is_cuda and offsets.device != x.device:
            raise InvalidInput(f"{operator}: {name} must be on {x.device}, got {offsets.device}")
    if not len(cu_seqlens):
        raise InvalidInput(f"{operator}: cu_seqlens must be [N + 1], got no element")


def one_token_each(bounds: list[int]) -> bool:
    """Whether every sequence has exactly one token, as in decoding."""
    return bounds == list(range(len(bounds)))
