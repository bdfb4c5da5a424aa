"""What lies in an engine's pages: latents of MLA layers, states of KDA layers, in pages of the same bytes.

There are as many places in a page as MLA layers. A page of latents has those of all MLA layers for some
tokens; a page of a state has that of one group of KDA layers, as many as there are places. So one number
stands for a page of any kind, and what a page was before is never read: a sequence reads what it, or whom it
copied from, has written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from openk3.config import ModelConfig
from openk3.errors import InvalidInput
from openk3.model.state import KdaState
from openk3.ops.precision import wide

Tensor = torch.Tensor
ALIGNMENT = 16


class PageMemory:
    """`pages` pages for one model.

    Args:
        config: a model with KDA and MLA layers.
        pages: how many.
        unit: a page of latents has the fewest multiples of it that are as large as a state.

    Attributes:
        page: tokens of a page of latents.
        groups: of KDA layers.
        bytes: of all pages.

    Raises:
        InvalidInput: the model has only one kind of layers.
    """

    def __init__(
        self, config: ModelConfig, pages: int, unit: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layers = range(config.num_layers)
        self._mla = [index for index in layers if config.is_mla(index)]
        self._kda = [index for index in layers if not config.is_mla(index)]
        if config.kda is None or config.mla is None or not self._mla or not self._kda:
            raise InvalidInput("engine: the model must have KDA and MLA layers")
        places = len(self._mla)
        self.groups = -(-len(self._kda) // places)
        H, K, W = config.kda.num_heads, config.kda.head_dim, config.kda.conv_width
        self._state, self._tail = (H, K, K), (W - 1, 3 * H * K)
        self.width = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
        self._dtype, self._wide = dtype, wide(dtype)
        state = _aligned(H * K * K * self._wide.itemsize) + _aligned((W - 1) * 3 * H * K * dtype.itemsize)
        self.page = unit * -(-state // (unit * self.width * dtype.itemsize))
        size = _aligned(max(state, self.page * self.width * dtype.itemsize))
        self._bytes = torch.zeros(places, pages, size, dtype=torch.uint8, device=device)
        self.bytes = self._bytes.numel()

    def latents(self, layer: int) -> Tensor:
        """`[pages, page, r + shared]` of an MLA layer."""
        data = self._bytes[self._mla.index(layer)][:, : self.page * self.width * self._dtype.itemsize]
        return _shaped(data, self._dtype, (self.page, self.width))

    def group(self, layer: int) -> int:
        """Of a KDA layer: which of a sequence's pages of state its state is in."""
        return self._kda.index(layer) // len(self._mla)

    def states(self, layer: int) -> KdaState:
        """`[pages, H, V, K]` and `[pages, W - 1, 3 H K]` of a KDA layer."""
        data = self._bytes[self._kda.index(layer) % len(self._mla)]
        H, V, K = self._state
        cut = H * V * K * self._wide.itemsize
        tail = _aligned(cut) + self._tail[0] * self._tail[1] * self._dtype.itemsize
        S = _shaped(data[:, :cut], self._wide, self._state)
        return KdaState(S, _shaped(data[:, _aligned(cut) : tail], self._dtype, self._tail))

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Whole pages."""
        self._bytes[:, list(target)] = self._bytes[:, list(source)]


def _shaped(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Bytes `[pages, size]` as `[pages, *shape]`, in place."""
    values = data.view(dtype)
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return values.as_strided((len(values), *shape), (values.stride(0), *strides), values.storage_offset())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
