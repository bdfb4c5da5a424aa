"""Muon with kernels; the rule is that of `openk3.optim.muon`.

Blocks of one shape, from all parameters, lie side by side. They are taken in waves of a bounded size: one
kernel advances the momenta of a wave and writes its directions, Newton-Schulz replaces those by their factors
shape by shape, one kernel applies them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from openk3.optim.config import OptimConfig
from openk3.optim.fused import kernels
from openk3.optim.fused.newton_schulz import iterate_
from openk3.optim.fused.tables import Addresses, Rates, aligned
from openk3.optim.muon import ADAMW_RMS
from openk3.optim.newton_schulz import COEFFICIENTS
from openk3.optim.rules import Split
from openk3.optim.slots import Slot

Tensor = torch.Tensor

WAVE_ELEMENTS = 2**27
"""Elements whose directions are held at a time: 256 MiB in bf16."""
EPS = 1e-7
"""As in `orthogonalize`: a direction of smaller norm is not scaled up to norm 1."""


@dataclass(frozen=True)
class _Block:
    slot: int
    start: int  # its first element in the slot's tensors
    rows: int
    cols: int

    @property
    def elements(self) -> int:
        return self.rows * self.cols

    @property
    def is_aligned(self) -> bool:
        return aligned(self.start, self.elements)


@dataclass(frozen=True)
class _Wave:
    """Blocks for one launch. runs: first element in the wave's directions, and `[m, R, C]`, of each shape."""

    table: Tensor
    sizes: Tensor
    runs: list[tuple[int, tuple[int, int, int]]]
    elements: int
    is_aligned: bool


class FusedMuon:
    """The update rule and its state: a momentum per parameter. Publishes into the compute copies."""

    def __init__(self, slots: Sequence[tuple[Slot, Split]], config: OptimConfig) -> None:
        self._config = config
        plain = [slot for slot, _ in slots]
        self.state = {slot.name: {"momentum": torch.zeros_like(slot.master)} for slot in plain}
        if not plain:
            self._waves: list[_Wave] = []
            return
        device = plain[0].master.device
        self._addresses = Addresses(plain, [[self.state[slot.name]["momentum"]] for slot in plain])
        self._rates = Rates(plain, device)
        self._half = next((slot.parameter.dtype for slot in plain if slot.owns_master), torch.bfloat16)
        on_gpu = config.ns_dtype == "auto" and device.type == "cuda"
        self._dtype = torch.bfloat16 if on_gpu or config.ns_dtype == "bfloat16" else torch.float32
        self._waves = [_wave(blocks, device) for blocks in _cut(_blocks(slots))]

    def find_gradients(self) -> list[Tensor]:
        """What the host does before a step; hold what it returns until the step is launched."""
        return self._addresses.refresh() if self._waves else []

    @torch.no_grad()
    def launch(self, lr: Tensor, scale: Tensor) -> None:
        """As `Muon.step`, on gradients times `scale` fp32 `[]`; nothing changes where that is 0, inf or NaN.

        Args:
            lr: float64 `[]`. Both on the parameters' device, unread by the host.
        """
        if not self._waves:
            return
        table = self._addresses.table
        rates = torch.stack(self._rates.of(lr), dim=1).float()
        room = torch.empty(max(w.elements for w in self._waves), dtype=self._dtype, device=table.device)
        for wave in self._waves:
            moves = torch.empty(len(wave.table), dtype=torch.int32, device=table.device)
            kernels.direction(
                wave.table, table, scale, room, moves,
                share=self._config.momentum, nesterov=self._config.nesterov, eps=EPS, aligned=wave.is_aligned,
            )  # fmt: skip
            for first, shape in wave.runs:
                matrices = room[first : first + math.prod(shape)].view(shape)
                iterate_(matrices, COEFFICIENTS[self._config.coefficients].triples)
            kernels.muon_update(
                wave.table, wave.sizes, table, rates, moves, room, half=self._half, aligned=wave.is_aligned
            )


def _blocks(slots: Sequence[tuple[Slot, Split]]) -> list[_Block]:
    """Every block, those of one shape together, aligned ones first, and larger before smaller ones."""
    found = []
    for index, (slot, split) in enumerate(slots):
        cols, row = slot.master.shape[-1], 0
        for _ in range(split.groups):
            for band in split.bands:
                found.append(_Block(index, row * cols, band, cols))
                row += band
    return sorted(found, key=lambda b: (not b.is_aligned, -b.elements, b.rows))


def _cut(blocks: list[_Block]) -> Iterator[list[_Block]]:
    """Runs of at most `WAVE_ELEMENTS`, aligned or not; a larger block has one to itself."""
    wave: list[_Block] = []
    size = 0
    for block in blocks:
        if wave and (size + block.elements > WAVE_ELEMENTS or block.is_aligned != wave[0].is_aligned):
            yield wave
            wave, size = [], 0
        wave.append(block)
        size += block.elements
    if wave:
        yield wave


def _wave(blocks: list[_Block], device: torch.device) -> _Wave:
    rows, runs, size = [], [], 0
    counts: dict[tuple[int, int], int] = {}
    for block in blocks:
        rows.append((block.slot, block.start, block.elements, size))
        size += block.elements
        shape = block.rows, block.cols
        counts[shape] = counts.get(shape, 0) + 1
    first = 0
    for (height, width), count in counts.items():
        runs.append((first, (count, height, width)))
        first += count * height * width
    sizes = [ADAMW_RMS * math.sqrt(max(block.rows, block.cols)) for block in blocks]
    return _Wave(
        table=torch.tensor(rows, dtype=torch.int64, device=device),
        sizes=torch.tensor(sizes, dtype=torch.float32, device=device),
        runs=runs,
        elements=size,
        is_aligned=blocks[0].is_aligned,
    )
