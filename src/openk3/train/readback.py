"""Small results on their way from the device to the host, and the time that their making took.

To read a tensor of a GPU is to wait for all work before it. Here the copy is put behind that work and the
host goes on; it waits when it asks for the values, and by then has given the device more to do.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

import torch

Tensor = torch.Tensor
Key = TypeVar("Key", bound=Hashable)


class Readback(Generic[Key]):
    """Values of `tensors`, which may be few and small: all are copied at once, as float64.

    Integers up to 2^53 and all floating dtypes come back as they were.
    """

    def __init__(self, tensors: Mapping[Key, Tensor]) -> None:
        self._forms = {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
        flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors.values()])
        self._arrived: torch.cuda.Event | None = None
        self._host = flat
        if flat.is_cuda:
            self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
            self._arrived = torch.cuda.current_stream(flat.device).record_event()

    def wait(self) -> dict[Key, Tensor]:
        """The values on the host, in their shapes and dtypes."""
        if self._arrived is not None:
            self._arrived.synchronize()
        pieces = self._host.split([shape.numel() for shape, _ in self._forms.values()])
        return {
            key: piece.view(shape).to(dtype)
            for piece, (key, (shape, dtype)) in zip(pieces, self._forms.items(), strict=True)
        }


class Lap:
    """The time from its making to `stop`, on the clock of `device`: a GPU works while its host is elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = self._now()

    def stop(self) -> None:
        self._stopped = self._now()

    def seconds(self) -> float:
        """Of a GPU only when what was launched before `stop` is known to be done."""
        if isinstance(self._started, float):
            assert isinstance(self._stopped, float)
            return self._stopped - self._started
        return self._started.elapsed_time(self._stopped) / 1e3

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
