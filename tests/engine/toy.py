"""A model of integers behind the runner's interface: any wrong restore, copy or page changes what it says."""

from __future__ import annotations

from collections.abc import Sequence

from openk3.engine.runner import Work

M = (1 << 61) - 1
FACTORS = (6364136223846793005 % M, 1442695040888963407 % M, 3935559000370003845 % M)
VOCABULARY = 97


def scores_of(states: Sequence[int], latents: Sequence[int]) -> int:
    """The next token."""
    mixed = sum((i + 1) * state for i, state in enumerate(states)) % M
    for latent in latents:
        mixed = (mixed * 31 + latent) % M
    return mixed % VOCABULARY


def advanced(states: Sequence[int], token: int, position: int) -> tuple[list[int], int]:
    """KDA's states behind a token, and its latent."""
    after = [(state * FACTORS[g] + token + 1 + g) % M for g, state in enumerate(states)]
    return after, (after[0] * 7 + token * 13 + position) % M


def alone(prompt: Sequence[int], count: int, stop: frozenset[int], groups: int) -> list[int]:
    """What a request says by itself, without pages."""
    states, latents, tokens, made = [0] * groups, [], list(prompt), []
    for position, token in enumerate(tokens):
        states, latent = advanced(states, token, position)
        latents.append(latent)
    while len(made) < count:
        token = scores_of(states, latents)
        made.append(token)
        if token in stop:
            break
        states, latent = advanced(states, token, len(latents))
        latents.append(latent)
    return made


class ToyRunner:
    """Checks what it is asked for: pages are of one kind, and nobody writes what others read."""

    def __init__(self, pages: int, page: int, groups: int) -> None:
        self.page, self.groups = page, groups
        self.latents: list[list[int | None]] = [[None] * page for _ in range(pages)]
        self.states: list[int | None] = [None] * pages
        self.steps = 0

    def execute(self, works: Sequence[Work]) -> dict[int, int]:
        self.steps += 1
        read = [
            page
            for work in works
            for page in (*(work.restore or ()), *([work.copy.source] if work.copy else ()))
        ]
        states: dict[int, list[int]] = {}
        for work in works:
            assert work.tokens and len(work.state) == self.groups
            assert len(work.pages) == -(-(work.start + len(work.tokens)) // self.page)
            assert len({*work.pages, *work.state, *(work.save or ())}) == len(work.pages) + len(
                work.state
            ) + len(work.save or ())
            source = work.restore if work.restore is not None else work.state
            found = [0 if work.start == 0 else self.states[page] for page in source]
            assert None not in found, "a state is read that is none"
            states[work.request] = found  # type: ignore[assignment]
        copies = [
            (work.copy, list(self.latents[work.copy.source][: work.copy.tokens]))
            for work in works
            if work.copy is not None
        ]
        for copy, content in copies:
            self._of_latents(copy.target)[: copy.tokens] = content
        said = {}
        for work in works:
            state = states[work.request]
            for position, token in enumerate(work.tokens, start=work.start):
                state, latent = advanced(state, token, position)
                self._of_latents(work.pages[position // self.page])[position % self.page] = latent
            for page, value in zip(work.state, state, strict=True):
                self._of_state(page, value)
            for page, value in zip(work.save or (), state, strict=False):
                assert page not in read, "a checkpoint is written over what is read in this step"
                self._of_state(page, value)
            if work.scores:
                end = work.start + len(work.tokens)
                latents = [self.latents[work.pages[i // self.page]][i % self.page] for i in range(end)]
                assert None not in latents, "latents are read that were never written"
                said[work.request] = scores_of(state, latents)  # type: ignore[arg-type]
        return said

    def _of_latents(self, page: int) -> list[int | None]:
        if self.states[page] is not None:
            self.states[page], self.latents[page] = None, [None] * self.page
        return self.latents[page]

    def _of_state(self, page: int, value: int) -> None:
        if any(latent is not None for latent in self.latents[page]):
            self.latents[page] = [None] * self.page
        self.states[page] = value
