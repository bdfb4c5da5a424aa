"""Prefixes of token sequences as chains of hashes, one for each unit of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


class HashChain:
    """Hashes of a growing sequence's prefixes of 1, 2, ... units; each covers all that is before it.

    Args:
        unit: tokens of a hash.
        salt: what else must be equal for states to be, such as the model.
    """

    def __init__(self, unit: int, salt: bytes = b"") -> None:
        self.unit = unit
        self.hashes: list[bytes] = []
        self._last = hashlib.blake2b(salt, digest_size=16).digest()

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Hash all whole units of `tokens`, of which the first ones were hashed before."""
        known = len(self.hashes) * self.unit
        whole = len(tokens) // self.unit * self.unit
        if whole <= known:
            return
        data = np.ascontiguousarray(tokens[known:whole], dtype=np.int32).tobytes()
        size = 4 * self.unit
        for start in range(0, len(data), size):
            self._last = hashlib.blake2b(self._last + data[start : start + size], digest_size=16).digest()
            self.hashes.append(self._last)
