"""Several streams as one, in fixed proportions of tokens.

Sample i belongs to a source by a table that repeats: a source with weight w has its whole number of places
in each period, spread so evenly that it is never a full sample ahead of its share. So the assignment is a
pure function of i, and random access costs one look-up. A source that cannot deliver is an error: leaving it
out and sharing its weight among the others would be another mixture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from openk3.data.loader import Stream
from openk3.data.windows import Sample
from openk3.errors import InvalidInput

PERIOD = 4096  # samples in the repeating table: weights are exact to 1/4096


class Mixture:
    """Streams by name with weights; implements `loader.Stream`.

    Args:
        weights: one positive number per stream, of any scale.

    Raises:
        InvalidInput: names of streams and weights differ, a weight is not positive or less than half a place
            of the table, or the streams' samples differ in size.
    """

    def __init__(self, streams: Mapping[str, Stream], weights: Mapping[str, float]) -> None:
        if not streams or set(streams) != set(weights):
            raise InvalidInput(
                f"mixture: weights are given for {sorted(weights)}, there is data for {sorted(streams)}; "
                "they must be the same sources"
            )
        sizes = {name: stream.tokens_per_sample for name, stream in streams.items()}
        if len(set(sizes.values())) > 1:
            raise InvalidInput(f"mixture: samples differ in size ({sizes}); give all sources one context")
        self.tokens_per_sample = next(iter(sizes.values()))
        self._names = list(streams)
        self._streams = dict(streams)
        self._places = _places({name: weights[name] for name in self._names})
        self._table = spread(self._places)
        # Which of its source's samples within the period each place is.
        self._turn = np.zeros(PERIOD, np.int64)
        for source, count in enumerate(self._places):
            self._turn[self._table == source] = np.arange(count)

    def locate(self, index: int) -> tuple[str, int]:
        """The source of sample `index`, and which of that source's samples it is."""
        period, place = divmod(index, PERIOD)
        source = self._table[place]
        return self._names[source], period * self._places[source] + int(self._turn[place])

    def sample(self, index: int) -> Sample:
        """Sample `index` of the mixture."""
        name, position = self.locate(index)
        return self._streams[name].sample(position)

    def epoch(self, index: int) -> int:
        """The epoch of the source that has been read most often by sample `index`."""
        period, place = divmod(index, PERIOD)
        read = period * np.array(self._places) + np.bincount(self._table[:place], minlength=len(self._places))
        return max(self._streams[name].epoch(int(n)) for name, n in zip(self._names, read, strict=True))

    def identity(self) -> dict[str, int]:
        """What must not change between saving a position and going on from it."""
        identity = {}
        for name, places in zip(self._names, self._places, strict=True):
            identity[f"{name}.places"] = places
            identity |= {f"{name}.{key}": value for key, value in self._streams[name].identity().items()}
        return identity


def _places(weights: Mapping[str, float]) -> list[int]:
    """Places of each source in the table: its share of PERIOD, rounded by largest remainder."""
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight > 0):
            raise InvalidInput(
                f"mixture: weight of {name!r} is {weight}; weights must be positive (leave it out?)"
            )
    total = math.fsum(weights.values())
    shares = [PERIOD * weight / total for weight in weights.values()]
    places = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (places[i] - shares[i], i))
    for i in by_remainder[: PERIOD - sum(places)]:
        places[i] += 1
    for name, count in zip(weights, places, strict=True):
        if count == 0:
            raise InvalidInput(
                f"mixture: weight of {name!r} is under half of 1/{PERIOD} of the total; too small to keep"
            )
    return places


def spread(places: list[int]) -> NDArray[np.int64]:
    """A table with `places[s]` entries s, each place given to the source that is furthest behind its share.

    Deficits sum to one place before each choice and only the largest shrinks, so none falls to -1 or below:
    after the last place they are whole numbers above -1 that sum to 0, and each source has exactly its
    places.
    """
    period = sum(places)
    shares = np.array(places, np.int64)
    given = np.zeros(len(places), np.int64)
    table = np.empty(period, np.int64)
    for place in range(period):
        source = int(np.argmax(shares * (place + 1) - given * period))
        table[place] = source
        given[source] += 1
    return table
