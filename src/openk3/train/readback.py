"""Small results on their way from the device to the host, and the time that their making took.

To read a tensor of a GPU is to wait for all work before it. Here the copy is put behind that work and the
host goes on; it waits when it asks for the values, and by then has given the device more to do.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

Tensor = torch.Tensor
Name = tuple[str, str]
"""What a tensor is, and of which layer or part."""


class Readback:
    """Values of `tensors`, which may be few and small: all are copied at once, as float64.

    Integers up to 2^53 and all floating dtypes come back as they were.
    """

    def __init__(self, tensors: Mapping[Name, Tensor]) -> None:
        self._order = list(tensors)
        self._forms: dict[Name, tuple[torch.Size, torch.dtype]] = {}
        parts: list[Tensor] = []
        # To float64 one dtype at a time: one tensor at a time, each would be a launch.
        for dtype in {tensor.dtype: None for tensor in tensors.values()}:
            alike = {key: tensor.detach() for key, tensor in tensors.items() if tensor.dtype == dtype}
            self._forms |= {key: (tensor.shape, dtype) for key, tensor in alike.items()}
            parts.append(torch.cat([tensor.flatten() for tensor in alike.values()]).double())
        flat = torch.cat(parts)
        self._arrived: torch.cuda.Event | None = None
        self._host = flat
        if flat.is_cuda:
            self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
            self._arrived = torch.cuda.current_stream(flat.device).record_event()

    def wait(self) -> dict[Name, Tensor]:
        """The values on the host, in their shapes and dtypes."""
        if self._arrived is not None:
            self._arrived.synchronize()
        pieces = torch.split(self._host, [shape.numel() for shape, _ in self._forms.values()])
        values = {
            key: piece.view(shape).to(dtype)
            for piece, (key, (shape, dtype)) in zip(pieces, self._forms.items(), strict=True)
        }
        return {key: values[key] for key in self._order}


class Lap:
    """The time from its making to `stop`, on the clock of `device`: a GPU works while its host goes on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends: list[float | torch.cuda.Event] = []
        self.stop()

    def stop(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._ends.append(event)
        else:
            self._ends.append(time.perf_counter())

    def seconds(self) -> float:
        """Of a GPU only when what was launched before `stop` is known to be done."""
        match self._ends:
            case [float() as start, float() as end]:
                return end - start
            case [torch.cuda.Event() as start, torch.cuda.Event() as end]:
                return float(start.elapsed_time(end)) / 1e3
        raise AssertionError("a lap is started and stopped once")
