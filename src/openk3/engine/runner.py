"""What an engine asks of a model: one step over pieces of several sequences. The other side of the pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Copy:
    """`tokens` first tokens' latents of page `source` to page `target`."""

    source: int
    target: int
    tokens: int


@dataclass(frozen=True)
class Work:
    """One sequence's part in a step. In this order:

    restore: pages of a checkpoint that become the running state; None where the state goes on, or is zero
        because `start` is 0.
    copy: latents that the sequence goes on behind, in a page of its own.
    tokens: to be computed, from position `start` on, which is what the state has seen.
    pages: of latents, for all tokens up to the last of these.
    state: pages of the running state, written in place.
    save: fresh pages that get a copy of the state behind these tokens; None for none.
    scores: whether the scores of the token behind the last one are wanted.
    """

    request: int
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    state: Sequence[int]
    restore: Sequence[int] | None = None
    copy: Copy | None = None
    save: Sequence[int] | None = None
    scores: bool = False


class Runner(Protocol):
    """A model over a pool's pages.

    Attributes:
        groups: KDA groups, each with a page for a state; a checkpoint takes so many pages.
        page: tokens of a page of latents.
    """

    groups: int
    page: int

    def execute(self, works: Sequence[Work]) -> dict[int, Any]:
        """Do all of it; scores `[V]` by request, for those that want them. No page is read after another
        work of the same call wrote it."""
        ...
