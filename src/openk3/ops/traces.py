"""Functions by name in a profiler's trace: what work belongs to is then read off it, backward too.

Without a profiler that is one read of a flag. `openk3.train.profile` knows what the names mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

P = ParamSpec("P")
R = TypeVar("R")

PREFIX = "openk3."


def named(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, under a profiler in a scope "openk3." + its qualified name."""
    name = PREFIX + function.__qualname__

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not profiler._is_profiler_enabled:
            return function(*args, **kwargs)
        with profiler.record_function(name):
            return function(*args, **kwargs)

    return run
