"""How the time of a device divides among parts, to the nanosecond: shares and idle time sum to the whole.

Where n pieces run at once, on several streams, each has an n-th of that time: a sum of durations would be
more than the clock says.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from openk3.train.profile.attribution import Phase, Work


@dataclass(frozen=True)
class Division:
    """Nanoseconds from the first piece's start to the last one's end.

    Attributes:
        whole: all of it. idle: in which nothing ran. overlapped: in which more than one piece did.
        shares: by part and phase. pieces: how many there were.
        by_name: (time, how many) of pieces by part and name.
        unknown: of pieces whose launch is not in the trace; within `shares`.
    """

    whole: float
    idle: float
    overlapped: float
    shares: dict[tuple[str, Phase], float]
    pieces: Counter[tuple[str, Phase]]
    by_name: dict[tuple[str, str], tuple[float, int]]
    unknown: float


def divide(work: Sequence[Work]) -> Division:
    """Divide the time of `work`, in any order."""
    edges = sorted(
        [(piece.start, 1, i) for i, piece in enumerate(work)]
        + [(piece.end, 0, i) for i, piece in enumerate(work)]
    )
    running: set[int] = set()
    of_piece = [0.0] * len(work)
    idle = overlapped = 0.0
    before = edges[0][0] if edges else 0
    for at, starts, i in edges:
        length = at - before
        if length and not running:
            idle += length
        for j in running if length else ():
            of_piece[j] += length / len(running)
        overlapped += length if len(running) > 1 else 0
        before = at
        if starts:
            if work[i].end > work[i].start:
                running.add(i)
        else:
            running.discard(i)
    shares: defaultdict[tuple[str, Phase], float] = defaultdict(float)
    by_name: dict[tuple[str, str], tuple[float, int]] = {}
    for piece, own in zip(work, of_piece, strict=True):
        shares[piece.part, piece.phase] += own
        so_far, count = by_name.get((piece.part, piece.name), (0.0, 0))
        by_name[piece.part, piece.name] = so_far + own, count + piece.begins
    return Division(
        whole=edges[-1][0] - edges[0][0] if edges else 0,
        idle=idle,
        overlapped=overlapped,
        shares=dict(shares),
        pieces=Counter((piece.part, piece.phase) for piece in work if piece.begins),
        by_name=by_name,
        unknown=sum(own for piece, own in zip(work, of_piece, strict=True) if not piece.known),
    )
