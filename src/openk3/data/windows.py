"""Documents as an endless stream of fixed windows: how pretraining reads a corpus.

Each epoch puts the documents in its own order, one after another; epochs follow each other without a gap,
and sample i is tokens [i * context, (i + 1) * context) of that stream. Nothing is cropped and nothing is
padded: every token is read exactly once per epoch, and a document that reaches over the end of a window goes
on in the next window as a sequence of its own. Its context is cut there, its targets are not: a window reads
one token further for the target of its last. Sample i is a pure function of (seed, i), found in O(log n).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from openk3.data.batch import IGNORED
from openk3.errors import InvalidInput


class Documents(Protocol):
    """Token documents by number, none empty; `openk3.data.shards.TokenSplit` is one."""

    @property
    def lengths(self) -> NDArray[np.int64]: ...

    def tokens(self, document: int) -> NDArray[np.uint32]: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """A few packed sequences, before they become part of a batch.

    Attributes:
        tokens, targets, mask: `[t]`, as in `Batch`.
        lengths: of its sequences, which sum to t.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    lengths: list[int]
    mask: NDArray[np.bool_] | None = None


class Windows:
    """Windows of `context` tokens over shuffled documents; see the module. Implements `loader.Stream`.

    Raises:
        InvalidInput: no tokens to read, or `context` is not positive.
    """

    def __init__(self, documents: Documents, context: int, seed: int) -> None:
        self.tokens_per_sample = context
        self.seed = seed
        self.n_tokens = int(documents.lengths.sum())
        if context < 1 or self.n_tokens < 1:
            raise InvalidInput(
                f"windows of {context} tokens over a corpus of {self.n_tokens}: both must be positive"
            )
        self._documents = documents
        self._epoch = functools.lru_cache(maxsize=2)(self._new_epoch)

    def sample(self, index: int) -> Sample:
        """Window `index` of the stream: exactly `context` tokens."""
        start = index * self.tokens_per_sample
        stop = start + self.tokens_per_sample
        parts = []
        while start < stop:
            epoch, offset = divmod(start, self.n_tokens)
            end = min(offset + stop - start, self.n_tokens)
            parts.append(self._epoch(epoch).read(offset, end))
            start += end - offset
        return join(parts)

    def epoch(self, index: int) -> int:
        """The epoch in which sample `index` starts."""
        return index * self.tokens_per_sample // self.n_tokens

    def identity(self) -> dict[str, int]:
        """What must not change between saving a position and going on from it."""
        return {"seed": self.seed, "context": self.tokens_per_sample, "corpus_tokens": self.n_tokens}

    def split_fraction(self, epoch: int = 0) -> float:
        """The share of documents that reach over the end of a window in an epoch."""
        ends = self._epoch(epoch).ends + epoch * self.n_tokens
        starts = ends - self._epoch(epoch).lengths
        return float(np.mean(starts // self.tokens_per_sample != (ends - 1) // self.tokens_per_sample))

    def _new_epoch(self, epoch: int) -> OrderedDocuments:
        order = permutation(len(self._documents.lengths), self.seed, epoch)
        return OrderedDocuments(self._documents, order)


class ShuffledWindows:
    """The windows of a stream in an order of their own. Implements `loader.Stream`.

    In the order of documents neighbouring windows are mostly of one document, and so is a small batch: its
    gradient is that document's. Here each run of as many windows as an epoch fills is shuffled within itself;
    every window is still read once, and sample i is still a pure function of (seed, i).
    """

    def __init__(self, windows: Windows) -> None:
        self.tokens_per_sample = windows.tokens_per_sample
        self._windows = windows
        self._run = max(1, windows.n_tokens // windows.tokens_per_sample)
        self._order = functools.lru_cache(maxsize=2)(self._new_order)

    def sample(self, index: int) -> Sample:
        """Window `index` in this order: exactly `context` tokens."""
        run, place = divmod(index, self._run)
        return self._windows.sample(run * self._run + int(self._order(run)[place]))

    def epoch(self, index: int) -> int:
        """How often as many tokens as the corpus has were read before sample `index`."""
        return self._windows.epoch(index)

    def identity(self) -> dict[str, int]:
        """What must not change between saving a position and going on from it."""
        return {**self._windows.identity(), "shuffled": self._run}

    def _new_order(self, run: int) -> NDArray[np.int64]:
        # Seeds of runs are below 2^63: the complement is no seed of an order of documents.
        return permutation(self._run, 2**64 - 1 - self._windows.seed, run)


class OrderedDocuments:
    """Documents in an order, as one run of tokens: `ends[j]` is where the document in place j ends."""

    def __init__(self, documents: Documents, order: NDArray[np.int64]) -> None:
        self._documents, self._order = documents, order
        self.lengths = documents.lengths[order]
        self.ends = np.cumsum(self.lengths)

    def read(self, start: int, stop: int) -> Sample:
        """Tokens [start, stop) of the run, a sequence per document in it."""
        tokens = np.empty(stop - start, np.int64)
        targets = np.full(stop - start, IGNORED, np.int64)
        lengths = []
        place = int(np.searchsorted(self.ends, start, side="right"))
        filled = 0
        while filled < stop - start:
            document = self._documents.tokens(int(self._order[place]))
            first = start + filled - int(self.ends[place] - self.lengths[place])
            piece = document[first : first + stop - start - filled]
            following = document[first + 1 : first + 1 + len(piece)]  # one short at the document's end
            tokens[filled : filled + len(piece)] = piece
            targets[filled : filled + len(following)] = following
            lengths.append(len(piece))
            filled += len(piece)
            place += 1
        return Sample(tokens, targets, lengths)


def permutation(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """An order of n things for (seed, epoch): int64 `[n]`, the same on every machine and in every version.

    Sorts by a hash: splitmix64 is a bijection, so no two keys tie.
    """
    stream = _splitmix64(_splitmix64(np.array([seed], np.uint64)) ^ np.uint64(epoch))
    return np.argsort(_splitmix64(stream ^ np.arange(n, dtype=np.uint64)), kind="stable")


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def join(samples: Sequence[Sample]) -> Sample:
    """Samples one after another; borders between them stay borders."""
    if len(samples) == 1:
        return samples[0]
    masks = [np.ones(len(s.tokens), np.bool_) if s.mask is None else s.mask for s in samples]
    return Sample(
        np.concatenate([s.tokens for s in samples]),
        np.concatenate([s.targets for s in samples]),
        [length for s in samples for length in s.lengths],
        np.concatenate(masks) if any(s.mask is not None for s in samples) else None,
    )
