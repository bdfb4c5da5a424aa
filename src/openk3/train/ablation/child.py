"""The process of a run: `openk3` with the given words, which ends when the process that started it does.

A parent that is killed cannot stop its children, so the kernel is asked to (Linux; elsewhere they go on).

Called as `python -m openk3.train.ablation.child PARENT WORDS...`, with the parent's process id.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1
"""From Linux's <sys/prctl.h>: the signal that a process gets when the thread that started it ends."""


def end_with(parent: int) -> None:
    """Have this process terminated when `parent`, which started it, ends; at once if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    runpy.run_module("openk3", run_name="__main__", alter_sys=True)
