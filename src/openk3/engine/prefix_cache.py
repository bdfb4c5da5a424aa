"""Which prefixes can be gone on from: latents in units, states of KDA at few of their ends (report §5.4.1).

A prefix is reused at a boundary where both are: latents of all units before it, and a checkpoint, a copy of
the running state in each KDA group. Latents are registered unit by unit, in pages that are partly filled too.
What is registered is never written to again: who goes on from the middle of a page copies it first.

Nothing here knows when a step runs. It is told of latents and checkpoints after the step that wrote them, so
nothing can be found in the step that writes it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from openk3.engine.pool import PagePool


@dataclass(eq=False)
class Checkpoint:
    """A copy of the running state after `position` tokens, a page in each group."""

    hash: bytes
    position: int
    pages: tuple[int, ...]
    moving: bool  # to be superseded by the next one of the same request


@dataclass
class Counts:
    """Since the engine was made."""

    looked_up: int = 0  # tokens
    hit: int = 0
    checkpoints_kept: int = 0
    checkpoints_refused: int = 0  # there was no memory for them
    checkpoints_superseded: int = 0
    checkpoints_evicted: int = 0
    pages_evicted: int = 0


class Hit(NamedTuple):
    """What a request goes on from; all of it is held until `release`.

    boundary: tokens that need not be computed. pages: whole pages of latents before it. partial: the page
    that the boundary lies in, to be copied from; None where it lies between pages. checkpoint: None at 0.
    junction: how far latents reach: beyond the boundary, prompts have parted there without a checkpoint.
    """

    boundary: int
    pages: list[int]
    partial: int | None
    checkpoint: Checkpoint | None
    junction: int


@dataclass
class _Page:
    """Registered units of a page of latents: their hashes by place."""

    hashes: dict[int, bytes] = field(default_factory=dict)


class PrefixCache:
    """The index of what a pool's pages hold for reuse.

    Args:
        pool: whose kept pages are those that only this index refers to.
        unit: tokens of a hash.
        page: tokens of a page of latents, a multiple of `unit`.
        checkpoint_pages: that all checkpoints together may take.
    """

    def __init__(self, pool: PagePool, *, unit: int, page: int, checkpoint_pages: int) -> None:
        assert page % unit == 0
        self.pool, self.unit, self.page = pool, unit, page
        self.counts = Counts()
        self._most = checkpoint_pages
        self._units: dict[bytes, tuple[int, int]] = {}  # hash: page, place of the unit in it
        self._pages: dict[int, _Page] = {}
        self._checkpoints: dict[bytes, Checkpoint] = {}
        self._of_page: dict[int, Checkpoint] = {}
        # Kept pages and checkpoints, the longest unused first. A checkpoint stands for all of its pages.
        self._unused: OrderedDict[int | bytes, None] = OrderedDict()
        pool.give_up = self._give_up

    # look-up

    def look_up(self, hashes: Sequence[bytes], length: int) -> Hit:
        """The deepest boundary for a prompt of `length` tokens, of which at least the last is computed."""
        most = min(len(hashes), (length - 1) // self.unit)
        reached = 0
        while reached < most and hashes[reached] in self._units:
            reached += 1
        units = reached
        while units and hashes[units - 1] not in self._checkpoints:
            units -= 1
        boundary = units * self.unit
        per_page = self.page // self.unit
        whole = units // per_page
        # A unit's page may be another than its neighbour's: any that holds the last unit of a page holds all.
        pages = [self._units[hashes[(i + 1) * per_page - 1]][0] for i in range(whole)]
        partial = self._units[hashes[units - 1]][0] if units % per_page else None
        checkpoint = self._checkpoints[hashes[units - 1]] if units else None
        self.pool.hold(pages)
        if partial is not None:
            self.pool.hold([partial])
        if checkpoint is not None:
            self.pool.hold(checkpoint.pages)
            self._unused.pop(checkpoint.hash, None)
        for page in [*pages, *([] if partial is None else [partial])]:
            self._unused.pop(page, None)
        return Hit(boundary, pages, partial, checkpoint, reached * self.unit)

    def release(self, pages: Sequence[int]) -> None:
        """Pages of latents that a request holds no longer, in their order: the deepest is given up first."""
        for page in reversed(pages):
            self.pool.drop([page], self._pages.__contains__)
            if self.pool.kept(page):
                self._unused[page] = None

    def release_checkpoint(self, checkpoint: Checkpoint) -> None:
        """After its copy has landed, or will not."""
        self.pool.drop(checkpoint.pages, self._of_page.__contains__)
        if self.pool.kept(checkpoint.pages[0]):
            self._unused[checkpoint.hash] = None

    # registration

    def register(self, hash: bytes, page: int, place: int) -> None:
        """A unit of latents lies at `place` of `page`, and all units of that page before it with it."""
        if hash not in self._units:
            self._units[hash] = page, place
            self._pages.setdefault(page, _Page()).hashes[place] = hash

    def add_checkpoint(
        self, hash: bytes, position: int, pages: Sequence[int], *, moving: bool
    ) -> Checkpoint | None:
        """The running state was copied to `pages`, which the caller hands over; None if one was there."""
        known = self._checkpoints.get(hash)
        if known is not None:
            known.moving = known.moving and moving
            self.pool.drop(pages, lambda page: False)
            return None
        made = Checkpoint(hash, position, tuple(pages), moving)
        self._checkpoints[hash] = made
        for page in made.pages:
            self._of_page[page] = made
        self.release_checkpoint(made)
        self.counts.checkpoints_kept += 1
        while len(self._of_page) > self._most and self._evict_checkpoint():
            pass
        return made if hash in self._checkpoints else None

    def supersede(self, checkpoint: Checkpoint) -> None:
        """A moving checkpoint whose request has a later one is given up, if nobody reads it."""
        known = self._checkpoints.get(checkpoint.hash) is checkpoint
        if checkpoint.moving and known and self.pool.kept(checkpoint.pages[0]):
            self._forget(checkpoint)
            self.counts.checkpoints_superseded += 1

    # eviction

    def _give_up(self, missing: int) -> None:
        while missing > 0 and self._unused:
            oldest = next(iter(self._unused))
            if isinstance(oldest, bytes):
                checkpoint = self._checkpoints[oldest]
                missing -= len(checkpoint.pages)
                self._forget(checkpoint)
                self.counts.checkpoints_evicted += 1
            else:
                missing -= 1
                del self._unused[oldest]
                for hash in self._pages.pop(oldest).hashes.values():
                    del self._units[hash]
                self.pool.free(oldest)
                self.counts.pages_evicted += 1

    def _evict_checkpoint(self) -> bool:
        for name in self._unused:
            if isinstance(name, bytes):
                self._forget(self._checkpoints[name])
                self.counts.checkpoints_evicted += 1
                return True
        return False

    def _forget(self, checkpoint: Checkpoint) -> None:
        """All groups at once: without one of its pages a checkpoint is nothing."""
        self._unused.pop(checkpoint.hash, None)
        del self._checkpoints[checkpoint.hash]
        for page in checkpoint.pages:
            del self._of_page[page]
            self.pool.free(page)

    def check(self) -> None:
        """Whatever is indexed is held or kept, and what is kept is indexed."""
        for hash, (page, place) in self._units.items():
            assert self._pages[page].hashes[place] == hash
            assert self.pool.held(page) or page in self._unused
        for page, checkpoint in self._of_page.items():
            assert page in checkpoint.pages and self._checkpoints[checkpoint.hash] is checkpoint
            assert self.pool.held(page) or checkpoint.hash in self._unused
            assert page not in self._pages, "a page of two kinds"
        for name in self._unused:
            pages = self._checkpoints[name].pages if isinstance(name, bytes) else (name,)
            assert all(self.pool.kept(page) for page in pages)
        kept = sum(self.pool.kept(page) for page in range(self.pool.count))
        counted = sum(len(self._checkpoints[n].pages) if isinstance(n, bytes) else 1 for n in self._unused)
        assert kept == counted, "a kept page that nobody could give up"
