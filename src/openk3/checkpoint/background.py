"""Checkpoints that are written while training goes on.

What is saved is first copied into host memory, during which the caller waits; a thread then publishes the
copy through the store, in the same order of steps as ever. So the host needs room for one state beside what
it has, and a kill loses what was being written but never the last published checkpoint.

The thread is our own, where torch has `async_save`: what that writes is not published yet. Hashes, the rename
and the removal of old checkpoints come behind it, and they would stop training too.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from openk3.checkpoint.train_state import CheckpointStore
from openk3.errors import OpenK3Error


class BackgroundSaves:
    """One save at a time into `store`, behind the caller's back; a context that ends after the last of them.

    An error of a save is raised by the next `save`, `check` or `finish`, or at the end of the context; where
    an exception already ends that, the error is added to it as a note.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="openk3-checkpoint")
        self._writing: Future[Path] | None = None

    def save(self, step: int, state: Mapping[str, Any], *, config: Mapping[str, Any]) -> None:
        """Begin what `CheckpointStore.save` does, once the save before has ended; `state` may change after.

        Raises:
            StorageError, InvalidInput: the save before failed.
        """
        self.finish()
        self._writing = self._thread.submit(self._store.save, step, _copied(state), config=config)

    def check(self) -> None:
        """Raise what the last save raised, if it has ended; never waits."""
        if self._writing is not None and self._writing.done():
            self.finish()

    def settle(self) -> None:
        """Wait until the last save has ended, well or not."""
        if self._writing is not None:
            wait([self._writing])

    def finish(self) -> None:
        """Wait until the last save has ended; raise what it raised, once."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def __enter__(self) -> BackgroundSaves:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.finish()
        except OpenK3Error as failure:
            if error is None:
                raise
            error.add_note(f"and the checkpoint that was being written is lost: {failure}")
        finally:
            self._thread.shutdown()


def _copied(node: Any) -> Any:
    """A tree that nothing else holds: tensors in host memory, containers of values anew."""
    if isinstance(node, torch.Tensor):
        return node.detach().to("cpu", copy=True)
    if isinstance(node, Mapping):
        return {key: _copied(leaf) for key, leaf in node.items()}
    if isinstance(node, list):
        return [_copied(leaf) for leaf in node]
    return node
