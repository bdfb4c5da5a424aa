"""Launches that are the same in every step, given to the device as one CUDA graph.

What changes from step to step must come through memory that stays: a learning rate and a factor are copied to
where the graph reads them, gradients are found through tables. Knows nothing about what is launched.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor


class Replay:
    """`launch`: the first call runs it, as it may compile, the second captures it, and all others repeat.

    The graph keeps the memory that `launch` takes. Other threads may use the device meanwhile.
    """

    def __init__(self, launch: Callable[[Tensor, Tensor], None]) -> None:
        self._launch = launch
        self._compiled = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, lr: Tensor, scale: Tensor) -> None:
        if not self._compiled:
            self._launch(lr, scale)
            self._compiled = True
            return
        if self._graph is None:
            self._lr, self._scale = lr.clone(), scale.clone()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._launch(self._lr, self._scale)
        self._lr.copy_(lr)
        self._scale.copy_(scale)
        self._graph.replay()
