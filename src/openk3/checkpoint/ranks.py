"""One process, or the ranks of a process group, behind the same two calls, so that no caller asks which.

An error that openk3 raises on purpose on one rank is raised on every rank: none is left waiting. A bug is not
caught here; it ends its own rank, and the launcher ends the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from openk3.errors import OpenK3Error

T = TypeVar("T")


class Ranks:
    """The ranks of `group` (a gloo group: objects travel), or this process alone for None."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def gather(self, action: Callable[[], T]) -> list[T]:
        """Every rank's result of `action`, in rank order, on every rank."""
        if self.group is None:
            return [action()]
        outcomes: list[T | OpenK3Error] = [self._outcome(action)] * self.size
        dist.all_gather_object(outcomes, outcomes[0], group=self.group)
        return [_result(outcome) for outcome in outcomes]

    def lead(self, action: Callable[[], T]) -> T:
        """The result of `action` on the first rank, which alone runs it, on every rank."""
        if self.group is None:
            return action()
        outcomes: list[Any] = [self._outcome(action) if self.rank == 0 else None]
        dist.broadcast_object_list(outcomes, src=dist.get_global_rank(self.group, 0), group=self.group)
        result: T = _result(outcomes[0])
        return result

    def _outcome(self, action: Callable[[], T]) -> T | OpenK3Error:
        try:
            return action()
        except OpenK3Error as error:
            return error


def _result(outcome: T | OpenK3Error) -> T:
    if isinstance(outcome, OpenK3Error):
        raise outcome
    return outcome
