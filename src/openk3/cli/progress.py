"""A training run on the terminal: one live line, or plain lines where nobody watches (a file, a pipe)."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

PLAIN_SECONDS = 15.0
"""Between plain lines; evaluations and the last step always have theirs."""

Row = dict[str, Any]


class TerminalProgress:
    """Implements `openk3.train.progress.Progress`; use as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._watched = self._console.is_terminal
        self._printed = 0.0
        self._stage = ""
        self._first_step = self._total = 0
        self._began = time.monotonic()
        self._bits_per_byte: float | None = None

    def __enter__(self) -> Self:
        if self._watched:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watched:
            self._live.stop()

    def preparing(self, stage: str, done: int, total: int) -> None:
        if self._watched:
            count = f" {done:,} of {total:,}" if total else f" {done:,}" if done else ""
            self._live.update(Text(f"{stage}{count}", style="dim"), refresh=True)
        elif stage != self._stage:
            self._console.print(Text(stage))
        self._stage = stage

    def begins(self, step: int, total_steps: int) -> None:
        self._first_step, self._total, self._began = step, total_steps, time.monotonic()
        self._bits_per_byte = None
        if step >= total_steps:
            self._console.print(f"all {total_steps:,} steps are done already")
        elif step:
            self._console.print(f"going on from the checkpoint of step {step:,}")

    def stepped(self, row: Row) -> None:
        self._bits_per_byte = row.get("bits_per_byte", self._bits_per_byte)
        line = self._line(row)
        kept = "val_loss" in row or row["step"] == self._total
        if self._watched:
            self._live.update(Text.from_markup(line), refresh=True)
        if kept or (not self._watched and time.monotonic() - self._printed > PLAIN_SECONDS):
            self._console.print(line)
            self._printed = time.monotonic()
        if row.get("warning"):
            self.notes(row["warning"])
        if row["skipped"]:
            numbers = f"loss {row['loss']:.3f}, gradient norm {row['grad_norm']:.3g}"
            self.notes(f"step {row['step']:,}: {numbers}: a spike, skipped")

    def notes(self, text: str) -> None:
        self._console.print(Text(text, style="yellow"))

    def _line(self, row: Row) -> str:
        parts = [f"step [bold]{row['step']:>{len(str(self._total))}}[/]/{self._total}"]
        parts.append(f"loss [bold]{row['loss']:.3f}[/]")
        if self._bits_per_byte is not None:
            parts.append(f"bpb [bold]{self._bits_per_byte:.3f}[/]")
        parts += [f"lr {row['lr']:.2e}", f"{_short(row['tokens_per_second'])} tok/s"]
        if "mfu" in row:
            parts.append(f"mfu {row['mfu']:.1%}")
        return "  ".join([*parts, f"[dim]eta {self._eta(row['step'])}[/]"])

    def _eta(self, step: int) -> str:
        seconds = (time.monotonic() - self._began) / max(step - self._first_step, 1) * (self._total - step)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _short(value: float) -> str:
    return (
        f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"
    )
