"""Pages of equal size for everything an engine keeps of sequences: who holds them, and which are free.

A page holds latents of MLA layers or a state of KDA layers; here it is a number. What is in it, and in which
order unheld pages are given up, its owner knows: see `prefix_cache`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable


class PagePool:
    """`count` pages, each free, held (by as many as hold it), or kept: held by nobody, but not given up yet.

    Pages may be promised: promised ones are taken by whom they were promised to, and by nobody else.

    Attributes:
        give_up: called with a number of pages that are missing; makes as many kept ones free as it can.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.promised = 0
        self.give_up: Callable[[int], None] = lambda missing: None
        self._free = deque(range(count))
        self._holders = [0] * count
        self._kept: set[int] = set()

    def available(self) -> int:
        """Pages that can be had now by whom none were promised to."""
        return len(self._free) + len(self._kept) - self.promised

    def promise(self, count: int) -> bool:
        """Whether so many more are promised from now on."""
        if count > self.available():
            return False
        self.promised += count
        return True

    def release_promise(self, count: int) -> None:
        assert 0 <= count <= self.promised, "more is released than was promised"
        self.promised -= count

    def take(self, count: int, *, promised: bool) -> list[int] | None:
        """So many pages, each held once; None, and nothing taken, if there are not enough."""
        if promised:
            self.release_promise(count)
        elif count > self.available():
            return None
        if count > len(self._free):
            self.give_up(count - len(self._free))
        assert count <= len(self._free), "promised or available pages are not there"
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Once more; also what is only kept."""
        for page in pages:
            assert self._holders[page] or page in self._kept, f"page {page} is free"
            self._holders[page] += 1
            self._kept.discard(page)

    def drop(self, pages: Iterable[int], keep: Callable[[int], bool]) -> None:
        """Once less; what nobody holds any more is kept if `keep` says so, or else free."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is held by nobody"
            self._holders[page] -= 1
            if not self._holders[page]:
                if keep(page):
                    self._kept.add(page)
                else:
                    self._free.append(page)

    def free(self, page: int) -> None:
        """A kept page is given up."""
        self._kept.remove(page)
        self._free.append(page)

    def held(self, page: int) -> bool:
        return self._holders[page] > 0

    def kept(self, page: int) -> bool:
        return page in self._kept

    def check(self) -> None:
        """Every page is in one of the three states, and promises can be met."""
        free = list(self._free)
        assert len(free) == len(set(free)), "a page is free twice"
        held = {page for page, holders in enumerate(self._holders) if holders}
        assert not held & set(free) and not held & self._kept and not self._kept & set(free)
        assert len(free) + len(held) + len(self._kept) == self.count, "a page is lost"
        assert 0 <= self.promised <= len(free) + len(self._kept), "more is promised than there is"
