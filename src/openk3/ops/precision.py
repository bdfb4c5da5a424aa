"""The house rule for half precisions: compute in at least fp32. Shared by the operators, knows none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from openk3.ops.traces import named

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32 for half precisions; float32 and float64 stay what they are."""
    return torch.promote_types(dtype, torch.float32)


def widen(x: torch.Tensor) -> torch.Tensor:
    """`x` in its compute dtype; no copy when it is there already."""
    return cast(x, wide(x.dtype))


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x.to(dtype)`; where that is nothing, without a call of torch, which is a tenth of decoding a token."""
    return x if x.dtype == dtype else x.to(dtype)


def own_dtypes(operator: Callable[P, R]) -> Callable[P, R]:
    """`operator` with `torch.autocast` off inside, which would round what it means to keep in fp32.

    A profiler sees it by its name.
    """
    operator = named(operator)

    @functools.wraps(operator)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return run(*args, **kwargs)
        return operator(*args, **kwargs)

    return run
