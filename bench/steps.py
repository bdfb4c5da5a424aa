"""The steps of a benchmark under one budget of seconds; what a step measured is written before the next one.

A step that fails costs its own rows alone. A check that fails is written beside every row measured after it.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable

import torch
from rows import merge


def add_options(parser: argparse.ArgumentParser, budget: float = 120) -> None:
    """Those that every script with steps takes."""
    parser.add_argument("--budget", type=float, default=budget, metavar="SECONDS", help="start nothing later")
    parser.add_argument("--ours-alone", action="store_true", help="without peers; nothing is merged")


class Steps:
    """Runs steps, prints what each took, and merges rows as they come.

    Args:
        device: names the file of results; None merges nothing.
        budget: seconds after which no step begins.
    """

    def __init__(self, device: str | None, budget: float) -> None:
        self._device, self._budget, self._began = device, budget, time.monotonic()
        self._wrong: list[str] = []
        self._problems = 0

    def passed(self) -> bool:
        """Whether the budget is spent."""
        return time.monotonic() - self._began > self._budget

    def check(self, name: str, call: Callable[[], object]) -> bool:
        """Whether it ran without an exception; rows say so if not."""
        if not self(name, call):
            self._wrong.append(name)
        return name not in self._wrong

    def __call__(self, name: str, call: Callable[[], object]) -> bool:
        """Whether it began in time and raised nothing."""
        if self.passed():
            print(f"{name}: NOT STARTED, out of time", flush=True)
            self._problems += 1
            return False
        began = time.monotonic()
        try:
            call()
            ended = "took"
        except Exception:  # noqa: BLE001 - one step must not cost the others
            torch.cuda.set_sync_debug_mode("default")
            traceback.print_exc()
            ended = "FAILED after"
            self._problems += 1
        now = time.monotonic()
        print(f"[{now - self._began:.1f} s] {name} {ended} {now - began:.1f} s", flush=True)
        torch.cuda.empty_cache()
        return ended == "took"

    def keep(self, made: dict[str, object]) -> None:
        """Prints a row and merges it."""
        if self._wrong:
            made = made | {"shape": f"{made['shape']}; CHECK FAILED: {', '.join(self._wrong)}"}
        floor = f", floor {made['floor']}" if made["floor"] else ""
        print(f"{made['work']}: {made['ours']} {made['unit']}, peers {made['peers']}{floor}", flush=True)
        if self._device:
            merge([made], self._device)

    def status(self) -> int:
        """For the shell: 1 if anything failed or was not started."""
        print(f"{time.monotonic() - self._began:.1f} s in all, {self._problems} problems", flush=True)
        return 1 if self._problems else 0
