"""Recall probes: made sequences whose answers stand in their own past, so that they can be checked.

`recall`  pairs of a key and a value, then every key again in random order: which value was it?
`copy`    a random string, then the same string again.
`needle`  a few such pairs hidden in filler; at the end every key is asked for.

What is asked can be answered from the sequence alone and from nothing else: keys, values and places are drawn
anew for each. Targets are `IGNORED` but where the next token is an answer, and an answer is read on as the
next token, as in text. A sequence is a pure function of (seed, what for, index). Knows no model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from openk3.config.base import Size, StrictModel
from openk3.data.batch import IGNORED
from openk3.data.draws import Draws
from openk3.data.windows import Sample, join
from openk3.errors import InvalidInput

START = 0
"""Opens every sequence, as often as it takes to fill its length."""
AGAIN = 1
"""Between the string to copy and its copy."""
MARKS = 2
"""The first id that is neither."""

TRAINING, MEASURED = 0, 1
"""What sequences are drawn for: the same seed gives different ones for each."""


class ProbeSequence(NamedTuple):
    """`tokens`, `targets`: int64 `[length]`, as in `openk3.data.Batch`."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]


class _Probe(StrictModel):
    """What all probes share: answers are drawn from `values` symbols, each equally likely."""

    values: Size = 64
    """Symbols that an answer can be."""

    @property
    def chance(self) -> float:
        """Share of answers that a guess right out of the alphabet gets right."""
        return 1 / self.values

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @abstractmethod
    def check(self, length: int) -> None:
        """Raises InvalidInput where there can be no sequence of `length` tokens."""

    @abstractmethod
    def answers(self, length: int) -> int:
        """Answers asked for in a sequence of `length` tokens; as many values were shown before."""

    @abstractmethod
    def sequence(self, draws: Draws, length: int) -> ProbeSequence:
        """A sequence of exactly `length` tokens.

        Raises:
            InvalidInput: there can be none.
        """

    def unbound(self, length: int) -> float:
        """Share of answers right for one who knows *which* values were shown but not *where*.

        It names any of the m values not given yet: the right one in 1/m of the cases, and one that happens to
        be equal in 1/values of the others. The mean over m = 1..answers. Above this line something was bound.
        """
        shown = np.arange(1, self.answers(length) + 1)
        return float(np.mean(1 / shown + (1 - 1 / shown) / self.values))


class Recall(_Probe):
    """Associative recall with several queries: `length // 4` pairs, all of them asked for.

    `START k1 v1 k2 v2 .. k2 v2 k1`, the last answer a target only. More length is more pairs to hold.
    """

    kind: Literal["recall"] = "recall"
    keys: Size = 128
    """Symbols that a key can be; a sequence has each at most once as a key."""

    @property
    def vocab_size(self) -> int:
        return MARKS + self.keys + self.values

    def answers(self, length: int) -> int:
        return length // 4

    def check(self, length: int) -> None:
        if not 4 <= length < 4 * (self.keys + 1):
            raise InvalidInput(
                f"recall: {length} tokens hold {length // 4} pairs with different keys, and there are "
                f"{self.keys} keys: the length must lie in 4..{4 * self.keys + 3}, or `keys` be larger"
            )

    def sequence(self, draws: Draws, length: int) -> ProbeSequence:
        self.check(length)
        return _pairs(draws, length, self.answers(length), self.keys, self.values, filler=0)


class Copy(_Probe):
    """Copying: a random string of `(length - 1) // 2` symbols, the mark, and the string again.

    `START a b c AGAIN a b`, the last answer a target only. More length is a longer string.
    """

    kind: Literal["copy"] = "copy"

    @property
    def vocab_size(self) -> int:
        return MARKS + self.values

    def answers(self, length: int) -> int:
        return (length - 1) // 2

    def check(self, length: int) -> None:
        if length < 3:
            raise InvalidInput(
                f"copy: a sequence of {length} tokens has no room for a string; 3 is the least"
            )

    def sequence(self, draws: Draws, length: int) -> ProbeSequence:
        self.check(length)
        n = self.answers(length)
        string = MARKS + draws.below(self.values, n)
        tokens, targets = _blank(length)
        tokens[-2 * n : -n] = string
        tokens[-n] = AGAIN
        tokens[length - n + 1 :] = string[:-1]
        targets[-n:] = string
        return ProbeSequence(tokens, targets)


class Needle(_Probe):
    """Needles in a haystack: pairs at random places between filler, all asked for at the end.

    `START f f k1 v1 f f f k2 v2 f .. k2 v2 k1`. More length is more filler, once it holds all `needles`.
    """

    kind: Literal["needle"] = "needle"
    keys: Size = 64
    """Symbols that a key can be; a sequence has each at most once as a key."""
    filler: Size = 64
    """Symbols of the haystack."""
    needles: Size = 8
    """Pairs in a sequence of at least four times as many tokens; a shorter one has `length // 4`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.needles > self.keys:
            raise ValueError(f"{self.needles} needles need as many keys, there are {self.keys}")
        return self

    @property
    def vocab_size(self) -> int:
        return MARKS + self.keys + self.values + self.filler

    def answers(self, length: int) -> int:
        return min(self.needles, length // 4)

    def check(self, length: int) -> None:
        if length < 4:
            raise InvalidInput(f"needle: {length} tokens have no room for a pair and its question, 4 have")

    def sequence(self, draws: Draws, length: int) -> ProbeSequence:
        self.check(length)
        return _pairs(draws, length, self.answers(length), self.keys, self.values, self.filler)


Probe = Annotated[Recall | Copy | Needle, Field(discriminator="kind")]


def _blank(length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.full(length, START, np.int64), np.full(length, IGNORED, np.int64)


def _pairs(draws: Draws, length: int, n: int, keys: int, values: int, filler: int) -> ProbeSequence:
    """START, n pairs between filler symbols, then the n keys in another order, a value after each.

    The alphabets follow the marks: keys, values, filler. Without filler the spare tokens are START.
    """
    key = MARKS + draws.subset(keys, n)
    value = MARKS + keys + draws.below(values, n)
    tokens, targets = _blank(length)

    asked = 2 * n - 1  # tokens of the questions: the last answer is not read on
    spare = length - 1 - 2 * n - asked
    if filler:
        tokens[1 : length - asked] = MARKS + keys + values + draws.below(filler, spare + 2 * n)
        # Each of n out of spare + n slots becomes a pair, which pushes the later slots on by one token.
        place = 1 + np.sort(draws.subset(spare + n, n)) + np.arange(n)
    else:
        place = 1 + spare + 2 * np.arange(n)
    tokens[place], tokens[place + 1] = key, value

    order = draws.subset(n, n)
    tokens[length - asked :: 2] = key[order]
    tokens[length - asked + 1 :: 2] = value[order[:-1]]
    targets[length - asked :: 2] = value[order]
    return ProbeSequence(tokens, targets)


class ProbeStream:
    """Endless samples of `context` tokens of a probe. Implements `openk3.data.loader.Stream`.

    Args:
        lengths: of sequences. A sample holds sequences of one of them, drawn with equal chance, as many as
            fill it: short ones are learned first, and the long ones with what was learned there.

    Raises:
        InvalidInput: no length, one that the probe cannot have, or that does not divide `context`.
    """

    def __init__(self, probe: Probe, lengths: Sequence[int], context: int, seed: int) -> None:
        if not lengths:
            raise InvalidInput("probe: no length of training sequences is given")
        for length in lengths:
            probe.check(length)
            if context % length:
                raise InvalidInput(
                    f"probe: sequences of {length} tokens do not fill a context of {context}; "
                    "each length must divide it"
                )
        self.tokens_per_sample = context
        self._probe, self._lengths, self._seed = probe, tuple(lengths), seed

    def sample(self, index: int) -> Sample:
        """Sample `index`: exactly `context` tokens."""
        draws = Draws(self._seed, TRAINING, index)
        length = self._lengths[int(draws.below(len(self._lengths), 1)[0])]
        sequences = (self._probe.sequence(draws, length) for _ in range(self.tokens_per_sample // length))
        return join([Sample(tokens, targets, [length]) for tokens, targets in sequences])

    def epoch(self, index: int) -> int:
        """Nothing is read twice: always 0."""
        return 0

    def identity(self) -> dict[str, int]:
        """What must not change between saving a position and going on from it."""
        return {"seed": self._seed, "context": self.tokens_per_sample}


def measured_sequence(probe: Probe, length: int, seed: int, index: int) -> ProbeSequence:
    """Sequence `index` of those that a model is measured on, whatever it was trained on.

    Raises:
        InvalidInput: the probe has no sequences of that length.
    """
    return probe.sequence(Draws(seed, MEASURED, length, index), length)
