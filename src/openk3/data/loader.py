"""From a stream of samples to batches: who reads what in which step, and where to go on after a restart.

Step s of a run reads samples [s * n, (s + 1) * n) of the stream. Rank r of w takes the r-th w-th part of
them, in order, and cuts it into micro-batches. So the samples of a step, and the state, which is the number
of the next sample, do not depend on the number of ranks, and a run may go on with more or fewer. Does not
know what samples are made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from openk3.data.batch import Batch
from openk3.data.windows import Documents, OrderedDocuments, Sample, join
from openk3.errors import InvalidInput


class Stream(Protocol):
    """An endless sequence of samples of one size, each a pure function of its index."""

    @property
    def tokens_per_sample(self) -> int: ...

    def sample(self, index: int) -> Sample: ...

    def epoch(self, index: int) -> int: ...

    def identity(self) -> dict[str, int]: ...


class Loader:
    """Iterates over the steps of a run: each item is this rank's micro-batches of one step.

    Args:
        stream: `Windows`, `Examples` or a `Mixture`.
        samples_per_step: of all ranks together.
        samples_per_batch: in one micro-batch, which has `stream.tokens_per_sample` tokens for each.

    Raises:
        InvalidInput: a step cannot be shared evenly by ranks and micro-batches.
    """

    def __init__(
        self, stream: Stream, samples_per_step: int, samples_per_batch: int, *, rank: int = 0, world: int = 1
    ) -> None:
        if min(samples_per_step, samples_per_batch) < 1 or not 0 <= rank < world:
            raise InvalidInput(
                f"loader: {samples_per_step} samples a step, {samples_per_batch} a micro-batch, rank {rank} "
                f"of {world}: counts must be positive and the rank below the number of ranks"
            )
        if samples_per_step % (world * samples_per_batch):
            raise InvalidInput(
                f"loader: {samples_per_step} samples a step cannot be shared evenly by {world} ranks in "
                f"micro-batches of {samples_per_batch}; make it a multiple of {world * samples_per_batch}"
            )
        self.stream = stream
        self.next_sample = 0
        self.batches_per_step = samples_per_step // (world * samples_per_batch)
        self._per_step, self._per_batch, self._rank = samples_per_step, samples_per_batch, rank

    def __iter__(self) -> Iterator[tuple[Batch, ...]]:
        return self

    def __next__(self) -> tuple[Batch, ...]:
        batches = self.at(self.next_sample)
        self.advance()
        return batches

    def at(self, sample: int) -> tuple[Batch, ...]:
        """This rank's micro-batches of the step that starts at `sample`, without taking them."""
        first = sample + self._rank * self.batches_per_step * self._per_batch
        starts = range(first, first + self.batches_per_step * self._per_batch, self._per_batch)
        return tuple(
            collate([self.stream.sample(i) for i in range(start, start + self._per_batch)])
            for start in starts
        )

    def advance(self) -> int:
        """The present step is taken; returns where the next one starts."""
        self.next_sample += self._per_step
        return self.next_sample

    def state_dict(self) -> dict[str, int]:
        """Where the next step starts, as plain integers, the same on every rank."""
        epoch = self.stream.epoch(self.next_sample)
        return {"sample": self.next_sample, "epoch": epoch, **self.stream.identity()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a saved state, also with another number of ranks or another batch size.

        Raises:
            InvalidInput: the state is of another corpus, seed or context (named), where going on would
            repeat some
                tokens and skip others.
        """
        expected = {"sample": None, "epoch": None, **self.stream.identity()}
        if state.keys() != expected.keys():
            raise InvalidInput(f"loader: a state has {sorted(expected)}, this one {sorted(state)}")
        for key, value in self.stream.identity().items():
            if state[key] != value:
                raise InvalidInput(
                    f"loader: the saved run had {key} {state[key]}, this one has {value}; its place in the "
                    "data means nothing here"
                )
        self.next_sample = state["sample"]


def collate(samples: Sequence[Sample]) -> Batch:
    """Samples one after another as a batch."""
    joined = join(samples)
    borders = np.cumsum([0, *joined.lengths], dtype=np.int32)
    mask = None if joined.mask is None else torch.from_numpy(joined.mask)
    return Batch(
        torch.from_numpy(joined.tokens), torch.from_numpy(joined.targets), torch.from_numpy(borders), mask
    )


def validation_batches(
    documents: Documents, context: int, windows_per_batch: int, *, rank: int = 0, world: int = 1
) -> Iterator[Batch]:
    """Every token of the documents exactly once over all ranks, in order, in windows of `context`.

    The last windows are shorter or absent: a batch may have fewer tokens, also none, but every rank gets the
    same number of batches, so that ranks that must meet in each forward do.

    Raises:
        InvalidInput: a count is not positive.
    """
    if min(context, windows_per_batch) < 1:
        raise InvalidInput(
            f"validation: context {context}, {windows_per_batch} windows a batch: must be positive"
        )
    run = OrderedDocuments(documents, np.arange(len(documents.lengths)))
    total = int(documents.lengths.sum())
    for round_start in range(0, total, context * windows_per_batch * world):
        first = round_start + rank * windows_per_batch * context
        starts = (min(first + i * context, total) for i in range(windows_per_batch))
        yield collate([run.read(start, min(start + context, total)) for start in starts])
