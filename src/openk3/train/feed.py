"""The steps of a loader on the device that computes, made one step ahead where that is a GPU.

There a thread makes the next step's micro-batches while the present one computes, and copies them from pinned
memory on a stream of its own. What was made ahead is known by the sample it starts at, and the loader's place
moves when a step is taken: a checkpoint knows nothing of it, and a loader that was set elsewhere is obeyed.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from openk3.data import IGNORED, Batch, Loader

__all__ = ["Fed", "Feed"]


@dataclass(frozen=True)
class Fed:
    """A micro-batch where it is computed and on the host, so that nobody asks the device for its borders.

    Attributes:
        valid: tokens with a target. tokens: those that are no padding.
    """

    local: Batch
    host: Batch
    valid: int
    tokens: int

    @classmethod
    def of(cls, local: Batch, host: Batch) -> Fed:
        """`host` and its copy."""
        mask = host.token_mask
        tokens = len(host.tokens) if mask is None else int(mask.sum())
        return cls(local, host, int((host.targets != IGNORED).sum()), tokens)


@dataclass(frozen=True)
class _Step:
    batches: tuple[Fed, ...]
    copied: torch.cuda.Event | None


class Feed:
    """Iterates over the steps of `loader`, as `loader` does. A context manager, which ends its thread."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._ahead: tuple[int, Future[_Step]] | None = None
        gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if gpu else None  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, "loader") if gpu else None

    def __next__(self) -> tuple[Fed, ...]:
        at = self._loader.next_sample
        step = self._ahead[1].result() if self._ahead and self._ahead[0] == at else self._make(at)
        following = self._loader.advance()
        if self._thread is not None:
            self._ahead = following, self._thread.submit(self._make, following)
        if step.copied is not None:
            self._hand_over(step, step.copied)
        return step.batches

    def _make(self, sample: int) -> _Step:
        host = self._loader.at(sample)
        if self._stream is None:
            return _Step(tuple(map(Fed.of, host, host)), None)
        with torch.cuda.stream(self._stream):
            local = [batch.pinned().to(self._device, non_blocking=True) for batch in host]
            copied = self._stream.record_event()
        return _Step(tuple(map(Fed.of, local, host)), copied)

    def _hand_over(self, step: _Step, copied: torch.cuda.Event) -> None:
        """From the stream that copied to the one that computes."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(copied)
        for fed in step.batches:
            local = fed.local
            for tensor in (local.tokens, local.targets, local.cu_seqlens, local.token_mask):
                if tensor is not None:
                    tensor.record_stream(computing)  # its memory is not the copying stream's again before

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
