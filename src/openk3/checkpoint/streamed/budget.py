"""One budget of bytes divided: which layers stay, whether the head does, and how many experts find a slot.

Integers only. What every token reads is worth its bytes in full, so that layers and the head are held before
more experts, which are read by chance; but a token's own choice of experts comes first, since that many reads
at once keep a disk busy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from openk3.errors import InvalidInput

BUFFERS = 2
"""Of each kind that is read ahead: one in use, one being read."""


@dataclass(frozen=True)
class Needs:
    """What a model would hold, in bytes.

    Attributes:
        always: held at every budget: final norms, and what a layer's weights are widened and joined in.
        layers: each layer without its routed experts.
        head: the whole head; `head_block`: of it, what is read at once.
        expert: a slot; `experts`: how many experts there are in all; `chosen`: by one token in one layer.
    """

    always: int
    layers: tuple[int, ...]
    head: int
    head_block: int
    expert: int
    experts: int
    chosen: int

    @property
    def fewest_slots(self) -> int:
        return min(BUFFERS, self.experts)


@dataclass(frozen=True)
class Division:
    """What is held.

    Attributes:
        streamed: the layers that are read for each use, ascending; the others are pinned.
        head_pinned: whether the head is.
        slots: for experts.
        held: bytes of all of it.
    """

    streamed: tuple[int, ...]
    head_pinned: bool
    slots: int
    held: int


def divide(budget: int, needs: Needs) -> Division:
    """The best use of `budget` bytes.

    Raises:
        InvalidInput: it is too small; the text says how many bytes would do.
    """
    trunks = list(_trunks(needs.layers))
    least_streamed, least_trunk = min(trunks, key=lambda trunk: trunk[1])
    head_blocks = min(needs.head, BUFFERS * needs.head_block)
    slots = needs.fewest_slots
    held = needs.always + least_trunk + head_blocks + slots * needs.expert
    if held > budget:
        raise InvalidInput(
            f"budget: {budget:,} bytes are too few; this checkpoint needs at least {held:,}: "
            f"{needs.always:,} to work in, {least_trunk:,} for layers, {head_blocks:,} for the head, "
            f"{slots * needs.expert:,} for experts"
        )
    streamed, head_pinned = least_streamed, False

    def more_slots(most: int) -> int:
        return max(0, min(most - slots, (budget - held) // needs.expert)) if needs.expert else 0

    added = more_slots(min(needs.chosen, needs.experts))
    slots, held = slots + added, held + added * needs.expert
    if held - head_blocks + needs.head <= budget:
        head_pinned, held = True, held - head_blocks + needs.head
    for candidate, cost in trunks:  # fewest streamed first
        if held - least_trunk + cost <= budget:
            streamed, held = candidate, held - least_trunk + cost
            break
    added = more_slots(needs.experts)
    return Division(streamed, head_pinned, slots + added, held + added * needs.expert)


def _trunks(layers: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Choices of streamed layers with their bytes: none, then ever more, evenly spread over the depth.

    Spread, since the layers between two streamed ones are the time in which the second is read.
    """
    total = len(layers)
    yield (), sum(layers)
    for count in range(BUFFERS + 1, total + 1):
        streamed = tuple((2 * i + 1) * total // (2 * count) for i in range(count))
        pinned = sum(layers) - sum(layers[i] for i in streamed)
        yield streamed, pinned + BUFFERS * max(layers[i] for i in streamed)


def half_of_free_memory() -> int:
    """Half the bytes that the system could give to a new process now.

    Raises:
        InvalidInput: the system does not say.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 // 2
    raise InvalidInput("budget: this system does not say how much memory is free; give a budget")
