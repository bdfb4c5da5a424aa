"""TensorBoard event files, written in the caller's thread, so that a disk that refuses is the caller's error.

tensorboardX's own `SummaryWriter` writes from a thread: on a full disk that thread dies, and the run that
feeds it stops at a full queue or ends with a traceback at exit. Knows tags and numbers, not what they mean.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter  # type: ignore[import-untyped]
from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboardX.summary import Summary  # type: ignore[import-untyped]

from openk3.checkpoint.atomic import make_folder, storage_errors


class EventFile:
    """One more event file in `folder`.

    Args:
        step: the step that a session goes on from: TensorBoard drops what older files say of later steps.

    Raises:
        StorageError: the system refused; so do `write`, `flush` and `close`.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._path = make_folder(folder)
        with storage_errors(folder):
            # The process makes names differ that share a second.
            self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}.{step}")
            if step:
                self._add(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, scalars: Iterable[tuple[str, float]]) -> None:
        """Add numbers by tag for a step."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars]
        with storage_errors(self._path):
            self._add(Event(step=step, summary=Summary(value=values)))

    def flush(self) -> None:
        """Make everything durable."""
        with storage_errors(self._path):
            self._writer.flush()

    def close(self) -> None:
        """The end of the file."""
        with storage_errors(self._path):
            self._writer.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.write_event(event)
