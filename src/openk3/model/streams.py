"""The seam `Overlap` on a GPU: one of two computations on a stream of its own.

Fork and join are events between streams: nothing waits on the host, and a CUDA graph captures both branches.
The backward overlaps by itself: autograd runs each operator's backward on the stream of its forward, and puts
events between streams where gradients cross them (PyTorch, "CUDA semantics", stream semantics of backward
passes).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor


class SideStream:
    """Runs `second` on a side stream of `device`, and `first` meanwhile on the caller's.

    It owns the stream. Both are in the caller's order again when it returns. Only for a CUDA device.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._stream = torch.cuda.Stream(torch.device(device))  # type: ignore[no-untyped-call]

    def __call__(
        self, x: Tensor, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """See `openk3.model.protocols.Overlap`."""
        ours, side = torch.cuda.current_stream(x.device), self._stream
        side.wait_stream(ours)
        # Each tensor belongs to the stream it was made on. The allocator must not hand its memory out again
        # before the other stream is done: in the forward, and in the backward, which saves x on both.
        x.record_stream(side)
        with torch.cuda.stream(side):
            beside = second(x)
        own = first(x)
        ours.wait_stream(side)
        beside.record_stream(ours)
        return own, beside
