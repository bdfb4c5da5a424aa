"""A step of n rows as one CUDA graph: captured once, then replayed with other tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor


class Captured:
    """`step(tokens [n], slots [n])` as a graph. It must not read values on the host.

    Captured with rows of no sequence, so that warming up, which runs the step, moves no state.

    Args:
        before: an earlier graph of the same device, to share its memory with: they never run at once.
    """

    def __init__(
        self,
        step: Callable[[Tensor, Tensor], Tensor],
        n: int,
        device: torch.device,
        before: Captured | None = None,
    ) -> None:
        self._tokens = torch.zeros(n, dtype=torch.int64, device=device)
        self._slots = torch.full((n,), -1, dtype=torch.int32, device=device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):  # whose stream captures, whatever device is current
            side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):  # compiles kernels and lets libraries allocate what they keep
                for _ in range(2):
                    step(self._tokens, self._slots)
            torch.cuda.current_stream(device).wait_stream(side)
            pool = None if before is None else before._graph.pool()
            with torch.cuda.graph(self._graph, pool=pool, stream=side):
                self._logits = step(self._tokens, self._slots)

    def __call__(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """The graph's own logits, which its next replay writes over."""
        self._tokens.copy_(tokens)
        self._slots.copy_(slots)
        self._graph.replay()
        return self._logits
