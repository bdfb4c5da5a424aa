"""From a trace to pieces of work, each with its part of the model, forward or backward, exactly once.

A piece is a kernel, copy or fill of a device. Without a device it is time of the host in which one operator
runs and none inside it: what operators call is theirs, so nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from openk3.train.profile.parts import MODEL_PARTS, part_of
from openk3.train.profile.trace import HostSpan, Trace

Phase = Literal["forward", "backward", "step"]
"""A model's parts have two; what happens once per step is "step"."""


@dataclass(frozen=True)
class Work:
    """From `start` to `end`, ns.

    Attributes:
        known: it is known what launched it.
        begins: False of the rest of an operator that called another in between, so that it counts once.
    """

    name: str
    part: str
    phase: Phase
    start: int
    end: int
    known: bool = True
    begins: bool = True


def device_work(trace: Trace) -> list[Work]:
    """All that the device did, in order of start."""
    found: list[Work] = []
    for span in trace.device:
        around, backward = _around(trace, span.launched_in)
        part = part_of(span.name, around, copy=span.kind != "kernel")
        known = span.launched_in is not None
        found.append(Work(span.name, part, _phase(part, backward), span.start, span.end, known))
    return found


def host_work(trace: Trace) -> list[Work]:
    """What the thread with the most operators did, in order of start. Other threads work beside it."""
    if not trace.threads:
        return []
    busiest = max(trace.threads.values(), key=lambda spans: sum(1 for span in spans for _ in _below(span)))
    found: list[Work] = []
    for outermost in busiest:
        for span in _below(outermost):
            if span.kind != "operator":
                continue
            around, backward = _around(trace, span)
            part = part_of(span.name, around)
            phase = _phase(part, backward)
            for i, (start, end) in enumerate(list(_own(span)) or [(span.start, span.start)]):
                found.append(Work(span.name, part, phase, start, end, begins=i == 0))
    return sorted(found, key=lambda work: work.start)


def _around(trace: Trace, span: HostSpan | None) -> tuple[Sequence[str], bool]:
    """Names of `span` and all around it, innermost first, and whether it is part of the backward.

    At a backward operator that is tied to a forward one the way goes on from there: around the backward there
    is nothing but the loop.
    """
    names: list[str] = []
    backward = False
    while span is not None:
        names.append(span.name)
        if span.forward_thread is not None or "AccumulateGrad" in span.name:
            backward = True
            if (forward := trace.forward(span)) is not None:
                span = forward
                names.append(span.name)
        span = span.parent
    return names, backward


def _phase(part: str, backward: bool) -> Phase:
    if part not in MODEL_PARTS:
        return "step"
    return "backward" if backward else "forward"


def _below(span: HostSpan) -> Iterator[HostSpan]:
    """`span` and all in it."""
    waiting = [span]
    while waiting:
        span = waiting.pop()
        yield span
        waiting.extend(span.children)


def _own(span: HostSpan) -> Iterator[tuple[int, int]]:
    """The times of `span` in which no operator inside it runs; scopes and calls in it are its own."""
    at = span.start
    for child in _operators_in(span):
        if child.start > at:
            yield at, child.start
        at = max(at, child.end)
    if span.end > at:
        yield at, span.end


def _operators_in(span: HostSpan) -> Iterator[HostSpan]:
    for child in span.children:
        if child.kind == "operator":
            yield child
        else:
            yield from _operators_in(child)
