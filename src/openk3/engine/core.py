"""The engine's step: which tokens of which requests, in which pages, and what is known when they are there.

A request waits, then holds what it needs until its end: pages for all it may become are promised when it is
admitted, so that whatever was admitted can finish. A step computes one token of each request that writes,
then pieces of prompts, oldest first. Pieces end where the state is to be kept. What the host does for a step
does not depend on how long contexts are.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from openk3.engine.hashing import HashChain
from openk3.engine.pool import PagePool
from openk3.engine.prefix_cache import Checkpoint, Hit, PrefixCache
from openk3.engine.runner import Copy, Runner, Work
from openk3.errors import InvalidInput, OpenK3Error

Finish = Literal["stop", "length", "abort", "error"]
Choose = Callable[["Request", Any], int]


@dataclass(frozen=True)
class BudgetClass:
    """Requests with up to `most` tokens to compute share `tokens` of them at a time; one is always let in."""

    most: int
    tokens: int


@dataclass(frozen=True)
class Limits:
    """How an engine divides its steps and its memory.

    unit: tokens of a hash. step_tokens: that a step computes at most. piece_tokens: of them, of one prompt
    where several wait for theirs. running: requests at a time. checkpoint_share: of the pool's pages, for
    checkpoints. classes: by tokens to compute, ascending; what is above the last belongs to it.
    """

    unit: int = 512
    step_tokens: int = 2048
    piece_tokens: int = 1024
    running: int = 256
    checkpoint_share: float = 0.5
    classes: tuple[BudgetClass, ...] = (BudgetClass(2048, 1 << 20), BudgetClass(1 << 30, 1 << 20))
    cache: bool = True


@dataclass(eq=False)
class Request:
    """A sequence and what it holds. `turns`: positions in the prompt whose states are worth keeping."""

    id: int
    tokens: list[int]
    prompt: int
    most: int
    stop: frozenset[int]
    turns: tuple[int, ...]
    finish: Finish | None = None
    error: OpenK3Error | None = None  # why there is no next token
    cached: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    state: list[int] = field(default_factory=list)
    promised: int = 0
    hit: Hit | None = None  # until what it names was copied
    marks: list[int] = field(default_factory=list)
    registered: int = 0
    moving: Checkpoint | None = None
    budget: int = 0  # its class
    uncached: int = 0

    @classmethod
    def asked(
        cls, id: int, prompt: Sequence[int], max_new_tokens: int, stop: Collection[int], turns: Sequence[int]
    ) -> Request:
        """A request that nothing was done for.

        Raises:
            InvalidInput: nothing to compute or to write.
        """
        if not prompt or max_new_tokens < 1:
            raise InvalidInput("engine: a request needs a prompt and a token to write")
        return cls(id, list(prompt), len(prompt), len(prompt) + max_new_tokens, frozenset(stop), tuple(turns))

    @property
    def writes(self) -> bool:
        return self.computed >= self.prompt

    @property
    def made(self) -> list[int]:
        return self.tokens[self.prompt :]


class Engine:
    """Runs requests on a runner.

    Args:
        runner: the model; owns what is in the pages.
        pages: of its pool.
        choose: the next token of a request from its scores.
        salt: what states depend on beside tokens.
    """

    def __init__(
        self, runner: Runner, pages: int, choose: Choose, limits: Limits = Limits(), salt: bytes = b""
    ) -> None:
        if runner.page % limits.unit:
            raise InvalidInput(
                f"engine: a page of {runner.page} tokens is no multiple of the unit, {limits.unit}"
            )
        self.runner, self.limits, self.choose = runner, limits, choose
        self.pool = PagePool(pages)
        most = int(pages * limits.checkpoint_share)
        self.cache = PrefixCache(self.pool, unit=limits.unit, page=runner.page, checkpoint_pages=most)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._salt = salt
        self._chains: dict[int, HashChain] = {}
        self._ids = itertools.count()
        self._outstanding = [0] * len(limits.classes)
        self._blocked = False  # nobody who waits can be let in before somebody ends

    # requests

    def add(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        stop: Collection[int] = (),
        turns: Sequence[int] = (),
    ) -> Request:
        """A request that waits.

        Raises:
            InvalidInput: nothing to compute or to write, or more than the whole pool holds.
        """
        request = Request.asked(next(self._ids), prompt, max_new_tokens, stop, turns)
        needed = self._needed(request, whole=0)
        if needed > self.pool.count:
            raise InvalidInput(
                f"engine: {request.most} tokens need {needed} pages, there are {self.pool.count}"
            )
        chain = HashChain(self.limits.unit, self._salt)
        chain.extend(request.tokens)
        self._chains[request.id] = chain
        self.waiting.append(request)
        self._blocked = False
        return request

    def abort(self, request: Request) -> None:
        """In any phase, between steps; what it held is free or kept for others."""
        if request.finish is None:
            self._end(request, "abort")

    def _end(self, request: Request, finish: Finish) -> None:
        request.finish = finish
        self._blocked = False
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._outstanding[request.budget] -= request.uncached
            self._release_hit(request)
            self.cache.release(request.pages)
            self.pool.drop(request.state, lambda page: False)
            self.pool.release_promise(request.promised)
            if request.moving is not None:
                request.moving.moving = False  # the end of a turn, as near as its state was kept
        request.pages, request.state, request.promised = [], [], 0
        del self._chains[request.id]

    def _needed(self, request: Request, whole: int) -> int:
        """Pages beside `whole` ones that it shares: for all latents, and its state."""
        return -(-request.most // self.runner.page) - whole + self.runner.groups

    # a step

    def step(self) -> list[Request]:
        """Compute something of every request that has its turn; those that ended by it."""
        works = self._planned()
        if not works:
            return []
        scores = self.runner.execute([work for _, work in works])
        ended = []
        for request, work in works:
            self._release_hit(request)
            request.computed = work.start + len(work.tokens)
            self._register(request, work)
            if work.scores and (finish := self._written(request, scores[request.id])):
                self._end(request, finish)
                ended.append(request)
        return ended

    def _written(self, request: Request, scores: Any) -> Finish | None:
        """One token more; whether that was the last. What is wrong with one request is no other's end."""
        try:
            request.tokens.append(self.choose(request, scores))
        except OpenK3Error as error:
            request.error = error
            return "error"
        self._chains[request.id].extend(request.tokens)
        if request.tokens[-1] in request.stop:
            return "stop"
        return "length" if len(request.tokens) >= request.most else None

    def _planned(self) -> list[tuple[Request, Work]]:
        left = self.limits.step_tokens
        works = []
        for request in self.running:
            if request.writes and left:
                works.append((request, self._work(request, 1)))
                left -= 1
        prompts = [request for request in self.running if not request.writes]
        while left and (prompts or self._admit_one(prompts)):
            request = prompts.pop(0)
            several = bool(prompts) or bool(self.waiting)
            most = min(left, self.limits.piece_tokens) if several else left
            count = min(most, self._to_mark(request))
            works.append((request, self._work(request, count)))
            left -= count
        return works

    def _to_mark(self, request: Request) -> int:
        """Tokens up to where its state is to be kept, or its prompt ends."""
        place = bisect.bisect_right(request.marks, request.computed)
        end = request.marks[place] if place < len(request.marks) else request.prompt
        return end - request.computed

    def _work(self, request: Request, count: int) -> Work:
        start, end = request.computed, request.computed + count
        missing = -(-end // self.runner.page) - len(request.pages)
        if missing > 0:
            request.pages += self._promised(request, missing)
        hit, restore, copy = request.hit, None, None
        if hit is not None and hit.checkpoint is not None:
            restore = hit.checkpoint.pages
            if hit.partial is not None:
                copy = Copy(hit.partial, request.pages[len(hit.pages)], hit.boundary % self.runner.page)
        wanted = (
            end in request.marks
            if end <= request.prompt
            else self.limits.cache and end % self.limits.unit == 0
        )
        save = self.pool.take(self.runner.groups, promised=False) if wanted else None
        self.cache.counts.checkpoints_refused += wanted and save is None
        return Work(
            request.id, request.tokens[start:end], start, list(request.pages), list(request.state), restore,
            copy, save, scores=end >= request.prompt,
        )  # fmt: skip

    def _promised(self, request: Request, count: int) -> list[int]:
        pages = self.pool.take(count, promised=True)
        assert pages is not None
        request.promised -= count
        return pages

    def _release_hit(self, request: Request) -> None:
        """What was only to be copied from."""
        hit, request.hit = request.hit, None
        if hit is None:
            return
        if hit.partial is not None:
            self.cache.release([hit.partial])
        if hit.checkpoint is not None:
            self.cache.release_checkpoint(hit.checkpoint)

    def _register(self, request: Request, work: Work) -> None:
        """What this step wrote can be found from now on."""
        unit, page = self.limits.unit, self.runner.page
        hashes = self._chains[request.id].hashes
        if self.limits.cache:
            for i in range(request.registered, request.computed // unit):
                self.cache.register(hashes[i], request.pages[i * unit // page], i % (page // unit))
            request.registered = max(request.registered, request.computed // unit)
        if work.save is None:
            return
        end = request.computed
        moving = end > request.prompt
        made = self.cache.add_checkpoint(hashes[end // unit - 1], end, work.save, moving=moving)
        if moving:
            if request.moving is not None:
                self.cache.supersede(request.moving)
            request.moving = made

    # admission

    def _admit_one(self, prompts: list[Request]) -> bool:
        """The oldest waiting request whose class has budget, and for which there is memory."""
        if self._blocked or len(self.running) >= self.limits.running:
            return False
        full = set()
        for request in self.waiting:
            hashes = self._chains[request.id].hashes if self.limits.cache else []
            hit = self.cache.look_up(hashes, request.prompt)
            request.hit, request.pages = hit, list(hit.pages)
            uncached = request.prompt - hit.boundary
            budget = self._class_of(uncached)
            fits = not self._outstanding[budget] or (
                self._outstanding[budget] + uncached <= self.limits.classes[budget].tokens
            )
            needed = self._needed(request, whole=len(hit.pages))
            if budget in full or not fits or not self.pool.promise(needed):
                self._release_hit(request)
                self.cache.release(request.pages)
                request.pages = []
                full.add(budget)
                continue
            request.promised = needed
            request.state = self._promised(request, self.runner.groups)
            request.cached = request.computed = hit.boundary
            request.registered = hit.boundary // self.limits.unit
            request.uncached, request.budget = uncached, budget
            request.marks = self._marks(request, hit)
            self._outstanding[budget] += uncached
            self.waiting.remove(request)
            self.running.append(request)
            prompts.append(request)
            self.cache.counts.looked_up += request.prompt
            self.cache.counts.hit += hit.boundary
            return True
        self._blocked = True
        return False

    def _class_of(self, uncached: int) -> int:
        classes = self.limits.classes
        return next((i for i, each in enumerate(classes) if uncached <= each.most), len(classes) - 1)

    def _marks(self, request: Request, hit: Hit) -> list[int]:
        """Ends of units in the prompt at which the state is kept: the last that the same prompt and a longer
        one could go on from, those before turns, and where prompts have parted."""
        if not self.limits.cache:
            return []
        unit = self.limits.unit
        places = {request.prompt // unit, (request.prompt - 1) // unit, hit.junction // unit}
        places |= {turn // unit for turn in request.turns if turn <= request.prompt}
        return sorted(place * unit for place in places if place * unit > hit.boundary)

    def check(self) -> None:
        """What must hold between steps."""
        self.pool.check()
        self.cache.check()
        private = [page for request in self.running for page in request.state]
        assert len(private) == len(set(private)), "two requests share a running state"
        assert sum(request.promised for request in self.running) == self.pool.promised
        if not self.running:
            assert not any(self.pool.held(page) for page in range(self.pool.count)), "a page has leaked"
