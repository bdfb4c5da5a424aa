"""The layers without their routed experts: some pinned, the others read one use ahead.

Every layer's parameters are views of one working buffer. Before a layer runs, its stored tensors are widened
into it, from where they are pinned or were read to. While a streamed layer runs, the next streamed one is
read into the second of two buffers, the first of the next pass behind the last of this one. Knows nothing of
budgets, or of what a layer computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future

import torch

from openk3.checkpoint.official.folder import OfficialFolder
from openk3.checkpoint.official.layout import TensorSpec
from openk3.checkpoint.official.load import unpadded
from openk3.checkpoint.official.shard import DTYPES
from openk3.checkpoint.streamed.memory import Layout, allocate
from openk3.checkpoint.streamed.usage import Usage
from openk3.model.decoder import DecoderLayer

Tensor = torch.Tensor
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class StoredLayer:
    """Where a layer's tensors lie as stored, and as it computes with them.

    Attributes:
        stored: the layout of a buffer that the files are read into.
        working: that of the buffer which the layer's parameters are views of, by the layer's names.
    """

    def __init__(self, layer: DecoderLayer, folder: OfficialFolder, specs: Sequence[TensorSpec]) -> None:
        """`layer`: without weights, on the meta device. `specs`: of its tensors but the routed experts'."""
        prefix = f"layers.{layer.index}."
        self._layer = layer
        self._folder = folder
        self._names = {spec.name: (spec.ours or "").removeprefix(prefix) for spec in specs}
        places = {name: folder.tensors[name] for name in self._names}
        self.stored = Layout((name, place.dtype, place.shape) for name, place in places.items())
        own = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        self.working = Layout(
            (name, _NAMES[own[name].dtype], tuple(own[name].shape)) for name in self._names.values()
        )

    def live_in(self, working: Tensor) -> None:
        """Make the layer's parameters views of `working`."""
        self._tensors = {name: piece.tensor(working) for name, piece in self.working.pieces.items()}
        self._layer.load_state_dict(self._tensors, strict=False, assign=True)

    @torch.no_grad()
    def bring(self, buffer: Tensor) -> None:
        """Fill the parameters from `buffer`."""
        for name, piece in self.stored.pieces.items():
            tensor, own = piece.tensor(buffer), self._names[name]
            if own.endswith(".A_log"):
                tensor = unpadded(tensor, self._folder, name)
            self._tensors[own].copy_(tensor)


class Trunk:
    """All layers, each to be brought in the order of use.

    Args:
        ahead: runs the reads; one thread suffices, and leaves the disk to reads that someone waits for.
    """

    def __init__(
        self, layers: Sequence[StoredLayer], folder: OfficialFolder, ahead: Executor, usage: Usage
    ) -> None:
        self._layers = layers
        self._folder = folder
        self._ahead = ahead
        self._usage = usage
        self._pinned: dict[int, Tensor] = {}
        self._streamed: tuple[int, ...] = ()
        self._free = allocate(0)
        self._reading: tuple[int, Tensor, Future[None]] | None = None

    @property
    def working_bytes(self) -> int:
        """Of the buffer that layers compute from."""
        return max(layer.working.bytes for layer in self._layers)

    def hold(self, streamed: Sequence[int]) -> None:
        """Read all layers but `streamed` now and keep them."""
        working = allocate(self.working_bytes)
        for layer in self._layers:
            layer.live_in(working)
        self._streamed = tuple(streamed)
        for index in range(len(self._layers)):
            if index not in self._streamed:
                self._pinned[index] = allocate(self._layers[index].stored.bytes)
                self._read(index, self._pinned[index]).result()
        if self._streamed:
            largest = max(self._layers[index].stored.bytes for index in self._streamed)
            self._free = allocate(largest)
            self._read_ahead(self._streamed[0], allocate(largest))

    def bring(self, index: int) -> None:
        """Give layer `index` its weights, until the next call.

        Raises:
            CheckpointError: a file ends early, cannot be read, or is damaged.
        """
        if index in self._pinned:
            self._layers[index].bring(self._pinned[index])
            return
        assert self._reading is not None
        ahead, buffer, read = self._reading
        if ahead != index or read.exception() is not None:  # the pass before ended early, or the file was bad
            read.exception()
            read = self._read_ahead(index, buffer)
        read.result()
        following = self._streamed[(self._streamed.index(index) + 1) % len(self._streamed)]
        self._read_ahead(following, self._free)
        self._free = buffer  # from the next call on
        self._layers[index].bring(buffer)

    def _read_ahead(self, index: int, buffer: Tensor) -> Future[None]:
        read = self._read(index, buffer)
        self._reading = index, buffer, read
        return read

    def _read(self, index: int, buffer: Tensor) -> Future[None]:
        layout = self._layers[index].stored
        self._usage.current.bytes += layout.stored
        return self._ahead.submit(layout.read, self._folder.reader, buffer)
