"""Checkpoints that are written while training goes on.

What is saved is first copied into host memory, during which the caller waits; a thread then publishes the
copy through the store, in the same order of steps as ever. So the host needs room for one state beside what
it has, and a kill loses what was being written but never the last published checkpoint.

From a GPU a copy into pinned memory goes at the speed of the bus, but such memory takes long to get. With
`PINNED` the thread gets it before the first save, and keeps it. Each tensor has room for a power of two.

The thread is our own, where torch has `async_save`: what that writes is not published yet. Hashes, the rename
and the removal of old checkpoints come behind it, and they would stop training too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any

import torch

from openk3.checkpoint.train_state import CheckpointStore
from openk3.errors import OpenK3Error

PINNED = False
"""Whether tensors of a GPU are copied into pinned memory."""


class BackgroundSaves:
    """One save at a time into `store`, behind the caller's back; a context that ends after the last of them.

    An error of a save is raised by the next `save`, `check` or `finish`, or at the end of the context; where
    an exception already ends that, the error is added to it as a note.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="openk3-checkpoint")
        self._working: Future[Any] | None = None

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Get the memory that saves of such a state will need, while the caller goes on."""
        if PINNED:
            self.finish()
            self._working = self._thread.submit(_mapped, state, _room_for)

    def save(self, step: int, state: Mapping[str, Any], *, config: Mapping[str, Any]) -> None:
        """Begin what `CheckpointStore.save` does, once the save before has ended; `state` may change after.

        Raises:
            StorageError, InvalidInput: the save before failed.
        """
        self.finish()
        self._working = self._thread.submit(self._store.save, step, _copied(state), config=config)

    def check(self) -> None:
        """Raise what the last save raised, if it has ended; never waits."""
        if self._working is not None and self._working.done():
            self.finish()

    def settle(self) -> None:
        """Wait until the last save has ended, well or not."""
        if self._working is not None:
            wait([self._working])

    def finish(self) -> None:
        """Wait until the last save has ended; raise what it raised, once."""
        working, self._working = self._working, None
        if working is not None:
            working.result()

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


def _copied(state: Mapping[str, Any]) -> Any:
    """A tree that nothing else holds: tensors in host memory, containers of values anew."""
    devices: set[torch.device] = set()

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        room = _room_for(tensor)
        room.copy_(tensor.detach(), non_blocking=True)
        if tensor.is_cuda:
            devices.add(tensor.device)
        return room

    tree = _mapped(state, copy)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return tree


def _room_for(tensor: torch.Tensor) -> torch.Tensor:
    """In host memory. What was pinned and is gone stays pinned, and is found again by what comes next."""
    return torch.empty_like(tensor, device="cpu", pin_memory=PINNED and tensor.is_cuda)


def _mapped(node: Any, of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The tree with `of` each tensor in its place, and new containers."""
    if isinstance(node, torch.Tensor):
        return of(node)
    if isinstance(node, Mapping):
        return {key: _mapped(leaf, of) for key, leaf in node.items()}
    if isinstance(node, list):
        return [_mapped(leaf, of) for leaf in node]
    return node
