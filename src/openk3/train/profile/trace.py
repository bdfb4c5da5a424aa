"""A profiler's trace as two forests: what the host called, and what a device did and who launched it.

Reads the events of torch's Chrome trace, whose categories have kept their names for years. A user's scope
also comes back as an event of the device ("gpu_user_annotation"), and so do waits between streams: neither is
work, and counting them counts kernels twice. Times are whole nanoseconds on the trace's clock.

Knows nothing of models. The link from a backward operator to its forward is autograd's sequence number.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

HOST = {"cpu_op": "operator", "user_annotation": "scope", "cuda_runtime": "call", "cuda_driver": "call"}
DEVICE = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "fill"}

Event = Mapping[str, Any]


@dataclass(eq=False)
class HostSpan:
    """An operator, a scope, or a call of the driver, and what it was called from on its thread.

    Attributes:
        sequence: autograd's number: of a forward operator the one that the next node got, of a backward one
            that of its node; None elsewhere.
        forward_thread: of a backward operator, the forward's thread in autograd's own numbering.
    """

    name: str
    kind: Literal["operator", "scope", "call"]
    thread: Any
    start: int
    end: int
    sequence: int | None = None
    forward_thread: int | None = None
    parent: HostSpan | None = None
    children: list[HostSpan] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class DeviceSpan:
    """A kernel, copy or fill on a device. `launched_in`: the innermost host span known of its launch."""

    name: str
    kind: Literal["kernel", "copy", "fill"]
    start: int
    end: int
    launched_in: HostSpan | None


@dataclass(frozen=True)
class Trace:
    """`threads`: the outermost host spans of each thread, in order. `forward_of`: see `forward`."""

    threads: Mapping[Any, Sequence[HostSpan]]
    device: Sequence[DeviceSpan]
    forward_of: Mapping[tuple[int, int], HostSpan]

    def forward(self, span: HostSpan) -> HostSpan | None:
        """The forward operator whose node a backward one runs, if the trace has it."""
        if span.forward_thread is None or span.sequence is None:
            return None
        return self.forward_of.get((span.forward_thread, span.sequence))


def read_trace(events: Iterable[Event]) -> Trace:
    """From "traceEvents" of a Chrome trace that `torch.profiler` exported."""
    events = list(events)
    spans: dict[Any, list[HostSpan]] = {}
    by_external: dict[int, HostSpan] = {}
    by_correlation: dict[int, HostSpan] = {}
    for event in events:
        kind = HOST.get(str(event.get("cat")))
        if kind is None or event.get("ph") != "X":
            continue
        span = _host_span(event, kind)
        spans.setdefault(span.thread, []).append(span)
        arguments = event.get("args", {})
        if kind == "call":
            by_correlation[arguments.get("correlation", 0)] = span
        elif external := arguments.get("External id"):
            by_external[external] = span
    threads = {thread: _nested(found) for thread, found in spans.items()}
    device = []
    for event in events:
        kind = DEVICE.get(str(event.get("cat")))
        if kind is None or event.get("ph") != "X":
            continue
        arguments = event.get("args", {})
        # The call lies inside scopes too; the id names an operator, or nothing where a kernel was launched
        # without one.
        launched_in = by_correlation.get(arguments.get("correlation"))
        if launched_in is None:
            launched_in = by_external.get(arguments.get("External id"))
        start, end = _times(event)
        device.append(DeviceSpan(event["name"], kind, start, end, launched_in))  # type: ignore[arg-type]
    return Trace(threads, sorted(device, key=lambda d: d.start), _links(events, spans))


def _times(event: Event) -> tuple[int, int]:
    start = round(1e3 * float(event["ts"]))
    return start, start + round(1e3 * float(event["dur"]))


def _host_span(event: Event, kind: str) -> HostSpan:
    arguments = event.get("args", {})
    start, end = _times(event)
    thread = (event.get("pid"), event.get("tid"))
    return HostSpan(
        name=event["name"],
        kind=kind,  # type: ignore[arg-type]
        thread=thread,
        start=start,
        end=end,
        sequence=arguments.get("Sequence number"),
        forward_thread=arguments.get("Fwd thread id") or None,
    )


def _nested(spans: list[HostSpan]) -> list[HostSpan]:
    """Tie spans of one thread to their parents and return the outermost. Sorts `spans` by start."""
    spans.sort(key=lambda span: (span.start, -span.end))  # stable: of equal ones the first is the outer
    outermost: list[HostSpan] = []
    open_: list[HostSpan] = []
    for span in spans:
        while open_ and open_[-1].end <= span.start:
            open_.pop()
        if open_:
            span.parent = open_[-1]
            span.end = min(span.end, span.parent.end)  # rounded apart by a nanosecond
            span.parent.children.append(span)
        else:
            outermost.append(span)
        open_.append(span)
    return outermost


def _links(events: Sequence[Event], spans: Mapping[Any, list[HostSpan]]) -> dict[tuple[int, int], HostSpan]:
    """(forward thread, sequence number) of every backward operator to the forward operator of its node.

    Of the forward operators with one number on one thread it is the last to start: numbers are read when an
    operator begins and grow when a node is made. Threads have two numberings, the system's and autograd's;
    the arrows of the trace ("fwdbwd") tell them together, and are not there for every pair.
    """
    last: dict[tuple[Any, int], HostSpan] = {}
    wanted: set[tuple[int, int]] = set()
    for thread, found in spans.items():
        for span in found:
            if span.sequence is None or span.kind != "operator":
                continue
            if span.forward_thread is None:
                last[thread, span.sequence] = span  # in order of start
            else:
                wanted.add((span.forward_thread, span.sequence))
    system = _system_threads(events, spans)
    links = {}
    for key in wanted:
        number, sequence = key
        threads = [system[number]] if number in system else list(spans)
        candidates = [last[thread, sequence] for thread in threads if (thread, sequence) in last]
        if len(candidates) == 1:
            links[key] = candidates[0]
    return links


def _system_threads(events: Sequence[Event], spans: Mapping[Any, list[HostSpan]]) -> dict[int, Any]:
    """Autograd's number of a forward thread to the trace's."""
    arrows: dict[Any, dict[str, Event]] = {}
    for event in events:
        if event.get("cat") == "fwdbwd":
            arrows.setdefault(event.get("id"), {})[str(event.get("ph"))] = event
    starts = {thread: [span.start for span in found] for thread, found in spans.items()}
    system: dict[int, Any] = {}
    for ends in arrows.values():
        if "s" not in ends or "f" not in ends:
            continue
        thread = (ends["f"].get("pid"), ends["f"].get("tid"))
        at = round(1e3 * float(ends["f"]["ts"]))
        found = starts.get(thread, [])
        for i in range(bisect.bisect_left(found, at), bisect.bisect_right(found, at)):
            if (number := spans[thread][i].forward_thread) is not None:
                system[number] = (ends["s"].get("pid"), ends["s"].get("tid"))
    return system
