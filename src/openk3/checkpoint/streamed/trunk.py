"""The layers without their routed experts: some pinned, the others read one use ahead.

While a streamed layer computes in one buffer, the next streamed one is read into the other, the first of the
next pass behind the last of this one. Knows nothing of budgets or of what a layer computes.
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


class LayerWeights:
    """One layer's tensors in a buffer as stored, and as the layer wants them.

    Attributes:
        stored: the buffer's layout.
        widened: where those go that the layer wants in another dtype.
    """

    def __init__(self, layer: DecoderLayer, folder: OfficialFolder, specs: Sequence[TensorSpec]) -> None:
        """`specs`: of the layer's tensors but its routed experts'; `layer` may be on the meta device."""
        self._folder = folder
        wanted = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        prefix = f"layers.{layer.index}."
        self._wanted = {spec.name: (spec.ours or "").removeprefix(prefix) for spec in specs}
        self.stored = Layout(
            (s.name, folder.tensors[s.name].dtype, folder.tensors[s.name].shape) for s in specs
        )
        shapes = {stored: wanted[ours] for stored, ours in self._wanted.items()}
        self.widened = Layout(
            (name, _NAMES[tensor.dtype], tuple(tensor.shape))
            for name, tensor in shapes.items()
            if folder.tensors[name].dtype != _NAMES[tensor.dtype]
        )

    def tensors(self, buffer: Tensor, working: Tensor) -> dict[str, Tensor]:
        """By the layer's own names, views of `buffer` where the dtype is right and of `working` elsewhere."""
        found = {}
        for name, ours in self._wanted.items():
            tensor = self.stored.pieces[name].tensor(buffer)
            if ours.endswith(".A_log"):
                tensor = unpadded(tensor, self._folder, name)
            if name in self.widened.pieces:
                tensor = self.widened.pieces[name].tensor(working).copy_(tensor)
            found[ours] = tensor
        return found


class Trunk:
    """All layers' tensors, each to be asked for in the order of use.

    Args:
        ahead: runs the reads; one thread suffices, and leaves the disk to reads that someone waits for.
    """

    def __init__(
        self, layers: Sequence[LayerWeights], folder: OfficialFolder, ahead: Executor, usage: Usage
    ) -> None:
        self._layers = layers
        self._folder = folder
        self._ahead = ahead
        self._usage = usage
        self._pinned: dict[int, Tensor] = {}
        self._streamed: tuple[int, ...] = ()
        self._in_use = self._other = allocate(0)
        self._reading: tuple[int, Future[None]] | None = None
        self._working = allocate(max(layer.widened.bytes for layer in layers))

    @property
    def working_bytes(self) -> int:
        """What widening takes, held from the start."""
        return self._working.numel()

    def hold(self, streamed: Sequence[int]) -> None:
        """Read all layers but `streamed` now and keep them."""
        self._streamed = tuple(streamed)
        for index in range(len(self._layers)):
            if index not in self._streamed:
                self._pinned[index] = allocate(self._layers[index].stored.bytes)
                self._read(index, self._pinned[index]).result()
        if self._streamed:
            largest = max(self._layers[index].stored.bytes for index in self._streamed)
            self._in_use, self._other = allocate(largest), allocate(largest)
            self._reading = self._streamed[0], self._read(self._streamed[0], self._other)

    def weights(self, index: int) -> dict[str, Tensor]:
        """The tensors of layer `index` by its own names, until the next call.

        Raises:
            CheckpointError: a file ends early, cannot be read, or is damaged.
        """
        layer = self._layers[index]
        if index in self._pinned:
            return layer.tensors(self._pinned[index], self._working)
        assert self._reading is not None
        expected, read = self._reading
        self._reading = index, read  # whatever comes of it, the next call waits for nothing twice
        if expected == index:
            read.result()
        else:  # an earlier pass ended early
            read.exception()
            self._read(index, self._other).result()
        self._in_use, self._other = self._other, self._in_use
        following = self._streamed[(self._streamed.index(index) + 1) % len(self._streamed)]
        self._reading = following, self._read(following, self._other)
        return layer.tensors(self._in_use, self._working)

    def _read(self, index: int, buffer: Tensor) -> Future[None]:
        layout = self._layers[index].stored
        self._usage.current.bytes += layout.stored
        return self._ahead.submit(layout.read, self._folder.reader, buffer)
