"""Random choices that are a pure function of whole numbers, for data that is made and never stored."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Draws:
    """Random choices named by whole numbers: the same on every machine and with every version of NumPy.

    Built on the raw stream of PCG64, which NumPy promises to keep, not on its distributions, which it may
    change.
    """

    def __init__(self, *name: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(name))

    def below(self, n: int, count: int) -> NDArray[np.int64]:
        """`[count]` independent numbers in `[0, n)`, each equally likely up to n / 2^64."""
        return (self._bits.random_raw(count) % np.uint64(n)).astype(np.int64)

    def subset(self, n: int, count: int) -> NDArray[np.int64]:
        """`[count]` different numbers in `[0, n)` in random order: a permutation where `count` is n."""
        return np.argsort(self._bits.random_raw(n), kind="stable")[:count].astype(np.int64)
