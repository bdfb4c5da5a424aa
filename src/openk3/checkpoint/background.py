"""Checkpoints that are written while training goes on.

What is saved is first copied, during which the caller waits; a thread then publishes the copy through the
store, in the same order of steps as ever. A kill loses what was being written but never the last published
checkpoint.

The copy of a GPU's tensors stays on the card where that has room for it, so that the caller does not wait for
the bus; the thread brings it to the host on a stream of its own, beside the steps. Without such room the
caller waits for the copy to the host. The host needs room for one state in any case.

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

SPARE = 2 << 30
"""Bytes of a card that a copy leaves free, beyond the most that was in use."""


class BackgroundSaves:
    """One save at a time into `store`, behind the caller's back; a context that ends after the last of them.

    An error of a save is raised by the next `save`, `check` or `finish`, or at the end of the context; where
    an exception already ends that, the error is added to it as a note.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="openk3-checkpoint")
        self._working: Future[Any] | None = None

    def save(self, step: int, state: Mapping[str, Any], *, config: Mapping[str, Any]) -> None:
        """Begin what `CheckpointStore.save` does, once the save before has ended; `state` may change after.

        Raises:
            StorageError, InvalidInput: the save before failed.
        """
        self.finish()
        kept = _Kept(state)
        self._working = self._thread.submit(lambda: self._store.save(step, kept.on_the_host(), config=config))

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


class _Kept:
    """A tree that nothing else holds: copies of tensors, containers of values anew."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        sizes: dict[torch.device, int] = {}

        def count(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_cuda:
                sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.nbytes
            return tensor

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.detach()
            return tensor.clone() if tensor.device in self._copied or tensor.is_cpu else tensor.cpu()

        _mapped(state, count)
        self._copied: dict[torch.device, torch.cuda.Event] = {
            device: torch.cuda.Event()  # type: ignore[no-untyped-call]
            for device, size in sizes.items()
            if _has_room(device, size)
        }
        self._tree = _mapped(state, copy)
        for device, event in self._copied.items():
            event.record(torch.cuda.current_stream(device))

    def on_the_host(self) -> Any:
        """The tree in host memory; once, since what lay on a card is let go."""
        streams = {
            device: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for device in self._copied
        }
        for device, stream in streams.items():
            stream.wait_event(self._copied[device])

        def fetched(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device not in streams:
                return tensor
            with torch.cuda.stream(streams[tensor.device]):
                return tensor.cpu()  # waits for its own stream alone

        tree, self._tree = _mapped(self._tree, fetched), None
        return tree


def _has_room(device: torch.device, size: int) -> bool:
    """Whether the card can hold `size` bytes beside the most that torch had in use, and what others use."""
    free, _ = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return free + ours >= size + size // 16 + SPARE


def _mapped(node: Any, of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The tree with `of` each tensor in its place, and new containers."""
    if isinstance(node, torch.Tensor):
        return of(node)
    if isinstance(node, Mapping):
        return {key: _mapped(leaf, of) for key, leaf in node.items()}
    if isinstance(node, list):
        return [_mapped(leaf, of) for leaf in node]
    return node
