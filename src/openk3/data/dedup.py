"""Exact and near deduplication. The first of several alike is kept, so the caller's order is the priority.

Two texts are exact duplicates if they agree after Unicode compatibility folding, case folding and collapsing
of white space. They are near duplicates if the Jaccard similarity of their sets of word shingles reaches the
threshold: MinHash with locality-sensitive hashing (datasketch) proposes pairs, the exact similarity decides.
So no text is dropped by an estimate; some pairs are missed (at the default 14 bands of 8 rows and similarity
0.75, 23%; at 0.9, 0.04%). A text inside a much longer one is not a near duplicate.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from openk3.data.recipe import DeduplicationRules
from openk3.errors import MissingDependency

_WORD = re.compile(r"\w+")
_SEED = 1  # of the MinHash permutations


def exact_duplicates(texts: Iterable[str]) -> dict[int, int]:
    """Position of each text that repeats an earlier one -> position of the first of its kind."""
    first: dict[bytes, int] = {}
    repeats: dict[int, int] = {}
    for position, text in enumerate(texts):
        normal = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
        kept = first.setdefault(hashlib.sha256(normal.encode()).digest(), position)
        if kept != position:
            repeats[position] = kept
    return repeats


def near_duplicates(texts: Sequence[str], rules: DeduplicationRules) -> dict[int, int]:
    """Position of each text that nearly repeats a kept earlier one -> position of that one.

    Texts of fewer words than a shingle are left alone.

    Raises:
        MissingDependency: the datasketch package is not installed.
    """
    try:
        from datasketch import MinHash, MinHashLSH  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDependency(
            "near deduplication needs the datasketch package; install the extra: pip install openk3[data], "
            "or set deduplication.near = false in the recipe"
        ) from error
    hashed = _WordHashes()
    permutations = rules.bands * rules.rows
    empty = MinHash(num_perm=permutations, seed=_SEED, hashfunc=int)  # shingles come hashed
    index = MinHashLSH(num_perm=permutations, params=(rules.bands, rules.rows))
    repeats: dict[int, int] = {}
    for position, text in enumerate(texts):
        shingles = _shingles(text, rules.shingle_words, hashed)
        if not len(shingles):
            continue
        sketch = empty.copy()
        sketch.update_batch((shingles >> np.uint64(32)).tolist())
        for other in sorted(index.query(sketch)):
            if jaccard(shingles, _shingles(texts[other], rules.shingle_words, hashed)) >= rules.jaccard:
                repeats[position] = other
                break
        else:
            index.insert(position, sketch)
    return repeats


def jaccard(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> float:
    """|a and b| / |a or b| of two sets, given as arrays of distinct values that are not both empty."""
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / (len(a) + len(b) - common)


class _WordHashes(dict[str, int]):
    """64-bit hash of each word, remembered: the same on every machine, unlike Python's own."""

    def __missing__(self, word: str) -> int:
        value = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        self[word] = value
        return value


def _shingles(text: str, words: int, hashed: _WordHashes) -> NDArray[np.uint64]:
    """The distinct runs of `words` words, each as a 64-bit hash that depends on the words and their order."""
    found = _WORD.findall(text.lower())
    values = np.fromiter((hashed[word] for word in found), np.uint64, len(found))
    count = len(values) - words + 1
    if count <= 0:
        return values[:0]
    combined = np.zeros(count, np.uint64)
    for i in range(words):
        combined = _mix(combined ^ values[i : i + count])
    return np.unique(combined)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: a bijection in which every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
