"""Memory that training frees and asks for again a moment later stays with the process.

glibc hands large blocks back to the kernel, which must clear them again for the next step: a few percent of
a CPU step. Called by command lines; the library does not change its host's allocator on its own.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def keep_freed_memory() -> bool:
    """Ask glibc to keep freed blocks of up to 32 MiB; whether there was a glibc to ask."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_MMAP_THRESHOLD: 1 << 25, _TRIM_THRESHOLD: (1 << 31) - 1, _TOP_PAD: 1 << 26}
    answers = [mallopt(name, value) for name, value in settings.items()]
    return all(answers)
