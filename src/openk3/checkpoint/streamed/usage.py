"""What a streamed run read, found in memory, and spent: counted where it happens, said in one line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Phase:
    """Sums over a part of a run. `tokens` passed through the model; `hits` and `misses` are of experts."""

    tokens: int = 0
    seconds: float = 0.0
    hits: int = 0
    misses: int = 0
    bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of uses of experts that found theirs in memory; 1 without any use."""
        uses = self.hits + self.misses
        return self.hits / uses if uses else 1.0


@dataclass
class Usage:
    """The phases of a run: what was read before the first token, prompts, and tokens one by one."""

    start: Phase = field(default_factory=Phase)
    prompt: Phase = field(default_factory=Phase)
    decode: Phase = field(default_factory=Phase)

    def __post_init__(self) -> None:
        self.current = self.start
        """Where readers count."""

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Count towards `phase` from now on; its clock runs inside the block."""
        self.current = phase
        began = time.perf_counter()
        try:
            yield
        finally:
            phase.seconds += time.perf_counter() - began

    def line(self) -> str:
        """One line for people; of single tokens where there were any, of the prompt otherwise."""
        phase, per = (self.decode, "token") if self.decode.tokens else (self.prompt, "prompt token")
        count = max(phase.tokens, 1)
        return (
            f"{phase.seconds / count:.3g} s/{per}; experts: {phase.hit_rate:.1%} of "
            f"{phase.hits + phase.misses} found in memory; read {_bytes(phase.bytes / count)}/{per}, "
            f"{_bytes(self.start.bytes + self.prompt.bytes + self.decode.bytes)} in all"
        )


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
