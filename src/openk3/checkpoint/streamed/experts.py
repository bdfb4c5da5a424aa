"""Routed experts in a fixed number of slots; the one unused for longest makes room.

The slots are one slab. An expert's matrices lie in a slot as they are stored, MXFP4 or not. Experts that are
in memory come first, while the others are on their way, several at once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Executor, Future

import torch
from torch.nn import functional as F

from openk3.checkpoint.official.folder import PACKED, SCALE, OfficialFolder
from openk3.checkpoint.streamed.memory import Layout, allocate
from openk3.checkpoint.streamed.usage import Usage
from openk3.errors import CheckpointError, InvalidInput
from openk3.ops.mx import mxfp4_linear

Tensor = torch.Tensor
Key = tuple[int, int]
"""Layer and expert, both 0-based."""

ROWS = 256
"""Rows of a matrix in another dtype that are widened at once."""


class Expert:
    """One expert in its slot: products with its matrices "w1", "w2" and "w3"."""

    def __init__(self, name: str, stacks: Mapping[str, Tensor], slot: int) -> None:
        """`stacks`: each tensor of an expert, of all slots, `[slots, ...]`."""
        self._name = name
        self._stacks = stacks
        self._slot = slot

    def stored(self, label: str) -> Tensor:
        """The tensor called `label`, as `w1.weight_packed`, in its slot."""
        return self._stacks[label][self._slot]

    def times(self, x: Tensor, matrix: str) -> Tensor:
        """x `[M, in]` times the transposed matrix: `[M, out]`, in blocks of rows if it is not in x's dtype.

        Raises:
            CheckpointError: the stored scales are none.
        """
        if matrix + PACKED in self._stacks:
            try:
                return mxfp4_linear(x, self.stored(matrix + PACKED), self.stored(matrix + SCALE))
            except InvalidInput as error:
                raise CheckpointError(f"{self._name}{matrix}: {error}") from None
        weight = self.stored(matrix + ".weight")
        if weight.dtype == x.dtype:
            return F.linear(x, weight)
        return torch.cat([F.linear(x, rows.to(x.dtype)) for rows in torch.split(weight, ROWS)], dim=1)


class ExpertSlots:
    """The experts of all layers, as many as there are slots in memory at a time.

    Args:
        readers: run the reads.

    Attributes:
        slot_bytes: of one slot, 0 for a model without experts.
        count: how many experts there are.
    """

    def __init__(self, folder: OfficialFolder, readers: Executor, usage: Usage) -> None:
        self._folder = folder
        self._readers = readers
        self._usage = usage
        self._stems: dict[int, str] = {}  # of a layer's experts' names, up to the expert's number
        first: dict[str, tuple[str, str, tuple[int, ...]]] = {}
        self.count = 0
        for name, spec in folder.specs.items():
            if spec.expert is None or spec.layer is None or spec.layer >= folder.config.num_layers:
                continue
            stem, _, label = name.rpartition(f".{spec.expert}.")
            if spec.layer not in self._stems:
                self._stems[spec.layer] = stem
                self.count += folder.config.moe.num_experts if folder.config.moe else 0
            stored = folder.tensors[name]
            first.setdefault(label, (label, stored.dtype, stored.shape))
        self._layout = Layout(first.values())  # every expert of a model has the same shapes
        self.slot_bytes = self._layout.bytes
        self._slab = allocate(0)
        self._stacks: dict[str, Tensor] = {}
        self._free: list[int] = []
        self._held: OrderedDict[Key, int] = OrderedDict()  # slot of each expert in memory, oldest use first

    def hold(self, slots: int) -> None:
        """Make room for `slots` experts, at least one where there are any."""
        self._slab = allocate(slots * self.slot_bytes).view(slots, self.slot_bytes)
        pieces = self._layout.pieces
        self._stacks = {label: piece.tensor(self._slab) for label, piece in pieces.items()}
        self._free = list(range(slots))

    def each(self, layer: int, experts: Sequence[int]) -> Generator[tuple[int, Expert], None, None]:
        """Each of `experts` once, in the order in which they become ready; valid until the next is asked for.

        Raises:
            CheckpointError: a file ends early, cannot be read, or is damaged.
        """
        ready = deque(e for e in experts if (layer, e) in self._held)
        missing = deque(e for e in experts if (layer, e) not in self._held)
        reading: deque[tuple[int, int, Future[None]]] = deque()
        needed = {(layer, e) for e in ready}
        self._usage.current.hits += len(ready)
        self._usage.current.misses += len(missing)
        try:
            while ready or missing or reading:
                while missing and (slot := self._vacate(needed)) is not None:
                    expert = missing.popleft()
                    reading.append((expert, slot, self._read((layer, expert), slot)))
                if ready:
                    expert = ready.popleft()
                else:
                    expert, slot, read = reading[0]
                    read.result()
                    reading.popleft()
                    self._held[layer, expert] = slot
                key = layer, expert
                self._held.move_to_end(key)
                needed.add(key)
                yield expert, Expert(self._name(key), self._stacks, self._held[key])
                needed.remove(key)
        finally:
            for _, slot, read in reading:  # given up: the slots are free once nobody writes there
                read.exception()
                self._free.append(slot)

    def _vacate(self, needed: set[Key]) -> int | None:
        """A slot to read into; None while all hold what is still needed."""
        if self._free:
            return self._free.pop()
        for key in self._held:
            if key not in needed:
                return self._held.pop(key)
        return None

    def _read(self, key: Key, slot: int) -> Future[None]:
        self._usage.current.bytes += self._layout.stored
        return self._readers.submit(self._layout.read, self._folder.reader, self._slab[slot], self._name(key))

    def _name(self, key: Key) -> str:
        layer, expert = key
        return f"{self._stems[layer]}.{expert}."
