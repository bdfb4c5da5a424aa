"""Examples with a loss mask, packed by best fit into fixed budgets: how fine-tuning reads its data.

An example is never divided. Each epoch takes the examples in its own order and puts each into the fullest
pack that still has room; what stays free at the end of a pack is padding, a sequence of its own that carries
no loss and is masked. The packs of epoch e + 1 follow those of epoch e.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from openk3.data.batch import IGNORED
from openk3.data.windows import Sample, permutation
from openk3.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids, and which of them the model is to learn to write; the first cannot be learned."""

    tokens: Sequence[int]
    loss_mask: Sequence[bool]


class _Fitted(NamedTuple):
    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]


class Examples:
    """Packs of `budget` tokens over shuffled examples; see the module. Implements `loader.Stream`.

    Args:
        too_long: what to do with an example of more than `budget` tokens: refuse it, or keep its beginning.

    Attributes:
        truncated, truncated_tokens: how many examples lost their end, and how many tokens that was in all.

    Raises:
        InvalidInput: no examples, one without tokens, with a mask of another length, or too long.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        budget: int,
        seed: int,
        *,
        pad_id: int,
        too_long: Literal["error", "truncate"] = "error",
    ) -> None:
        if not examples or budget < 1:
            raise InvalidInput(f"{len(examples)} examples in packs of {budget} tokens: both must be positive")
        self.tokens_per_sample = budget
        self.seed = seed
        self.truncated = self.truncated_tokens = 0
        self._pad_id, self._too_long = pad_id, too_long
        self._fitted = [self._fit(number, example) for number, example in enumerate(examples)]
        self._packs = functools.lru_cache(maxsize=2)(self._new_epoch)
        self._pack_ends: list[int] = []  # the last pack of each epoch, as far as anyone has asked

    def _fit(self, number: int, example: Example) -> _Fitted:
        length, budget = len(example.tokens), self.tokens_per_sample
        if length == 0 or length != len(example.loss_mask):
            raise InvalidInput(
                f"example {number}: {length} tokens and a loss mask of {len(example.loss_mask)}; they must "
                "agree and not be empty"
            )
        if length > budget:
            if self._too_long == "error":
                raise InvalidInput(
                    f"example {number}: {length} tokens, the budget is {budget}; raise the budget, shorten "
                    'the example, or set too_long = "truncate"'
                )
            self.truncated += 1
            self.truncated_tokens += length - budget
        tokens = np.array(example.tokens[:budget], np.int64)
        learned = np.array(example.loss_mask[1:budget], np.bool_)
        return _Fitted(tokens, np.append(np.where(learned, tokens[1:], IGNORED), IGNORED))

    def sample(self, index: int) -> Sample:
        """Pack `index` of the stream: exactly `budget` tokens, padding included."""
        budget, epoch = self.tokens_per_sample, self.epoch(index)
        pack = self._packs(epoch)[index - (self._pack_ends[epoch - 1] if epoch else 0)]
        tokens = np.full(budget, self._pad_id, np.int64)
        targets = np.full(budget, IGNORED, np.int64)
        lengths = []
        used = 0
        for number in pack:
            fitted = self._fitted[number]
            length = len(fitted.tokens)
            tokens[used : used + length] = fitted.tokens
            targets[used : used + length] = fitted.targets
            lengths.append(length)
            used += length
        if used < budget:
            lengths.append(budget - used)
        return Sample(tokens, targets, lengths, np.arange(budget) < used)

    def epoch(self, index: int) -> int:
        """The epoch that pack `index` belongs to."""
        while not self._pack_ends or self._pack_ends[-1] <= index:
            before = self._pack_ends[-1] if self._pack_ends else 0
            self._pack_ends.append(before + len(self._packs(len(self._pack_ends))))
        return bisect.bisect_right(self._pack_ends, index)

    def packs_per_epoch(self, epoch: int = 0) -> int:
        """How many packs an epoch takes; it differs a little from one to the next."""
        return len(self._packs(epoch))

    def padding_fraction(self, epoch: int = 0) -> float:
        """The share of an epoch's tokens that is padding."""
        return 1 - self._total_tokens() / (self.packs_per_epoch(epoch) * self.tokens_per_sample)

    def identity(self) -> dict[str, int]:
        """What must not change between saving a position and going on from it."""
        return {"seed": self.seed, "context": self.tokens_per_sample, "corpus_tokens": self._total_tokens()}

    def _total_tokens(self) -> int:
        return sum(len(fitted.tokens) for fitted in self._fitted)

    def _new_epoch(self, epoch: int) -> list[list[int]]:
        order = permutation(len(self._fitted), self.seed, epoch).tolist()
        packs = best_fit([len(self._fitted[number].tokens) for number in order], self.tokens_per_sample)
        return [[order[place] for place in pack] for pack in packs]


def best_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Put things of these lengths, in order, each into the fullest pack with room for it, else a new one.

    Returns:
        The positions in each pack. Every length must be in 1..budget.
    """
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, pack) of the packs that are not full, sorted
    for position, length in enumerate(lengths):
        fitting = bisect.bisect_left(room, (length, 0))
        if fitting < len(room):
            free, pack = room.pop(fitting)
        else:
            free, pack = budget, len(packs)
            packs.append([])
        packs[pack].append(position)
        if free > length:
            bisect.insort(room, (free - length, pack))
    return packs
