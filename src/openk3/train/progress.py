"""How a run tells of itself while it goes on. The library is silent; a command line brings a display."""

from __future__ import annotations

from typing import Any, Protocol


class Progress(Protocol):
    """Hears of a run, on its own thread, in order."""

    def preparing(self, stage: str, done: int, total: int) -> None:
        """A corpus is being prepared (total 0: unknown)."""
        ...

    def begins(self, step: int, total_steps: int) -> None:
        """The session starts after `step` finished steps."""
        ...

    def stepped(self, row: dict[str, Any]) -> None:
        """A step is finished; see `openk3.train.metrics`."""
        ...

    def notes(self, text: str) -> None:
        """Something worth a line: a skipped step, a checkpoint, a first loss that looks wrong."""
        ...


class Silent:
    """Tells nothing."""

    def preparing(self, stage: str, done: int, total: int) -> None:
        pass

    def begins(self, step: int, total_steps: int) -> None:
        pass

    def stepped(self, row: dict[str, Any]) -> None:
        pass

    def notes(self, text: str) -> None:
        pass
