"""A profile as numbers: what a step's time divides into, beside floors; to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from openk3.checkpoint.atomic import atomic_write_text
from openk3.errors import InvalidInput
from openk3.train.profile.attribution import Phase
from openk3.train.profile.floors import Costs
from openk3.train.profile.peaks import Peaks
from openk3.train.profile.timeline import Division

PHASES: tuple[Phase, ...] = ("forward", "backward", "step")
VERSION = 1


@dataclass(frozen=True)
class Item:
    """One part in one phase, per step.

    Attributes:
        seconds: measured; None where nothing was. pieces: kernels and copies, or operators on a CPU.
        bytes, flops: at least; None where nobody counted them. floor: seconds that those take at best, None
            also where nothing is known of the device. bound: which of the two decides, "bytes" or "FLOPs".
    """

    part: str
    phase: Phase
    seconds: float | None = None
    pieces: float = 0.0
    bytes: int | None = None
    flops: int | None = None
    floor: float | None = None
    bound: str = ""


@dataclass(frozen=True)
class Piece:
    """All kernels (or operators) of one name in one part: seconds and how many per step."""

    name: str
    part: str
    seconds: float
    count: float


@dataclass(frozen=True)
class Measured:
    """The time of a step on a device, in seconds per step.

    Attributes:
        steps: that were measured.
        whole: from the first piece of work to the last; idle: in which the device did nothing, or the host of
            a CPU was outside operators. The items and idle sum to `whole`.
        overlapped: in which several pieces ran at once.
        unknown: of pieces whose launch the trace does not hold; part of the items.
        plain: of as many steps without a profiler, by the clock.
        largest: the names that took most of it.
    """

    steps: int
    whole: float
    idle: float
    overlapped: float
    unknown: float
    plain: float
    largest: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Profile:
    """What a training step takes, and what it takes at least.

    Attributes:
        recipe: what ran. device: its name. counted: what time was counted of, "kernels" or "operators".
        shape: of a step, for people. tokens: of a step. model_flops: of a step, by `openk3.train.flops`.
        peaks: where the floors' figures are from; "" where there are none.
        measured: None where nothing ran.
    """

    recipe: str
    device: str
    counted: str
    shape: str
    tokens: int
    model_flops: int
    items: tuple[Item, ...]
    peaks: str = ""
    measured: Measured | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


def items(costs: Costs, peaks: Peaks | None, division: Division | None = None, steps: int = 1) -> list[Item]:
    """Every part and phase that took time or costs something; shares of `division` are of `steps` steps."""
    shares = division.shares if division else {}
    pieces = division.pieces if division else {}
    found = []
    for key in dict.fromkeys([*shares, *costs]):
        cost = costs.get(key)
        floor = bound = None
        if cost is not None and peaks is not None:
            floor = peaks.floor(cost.bytes, cost.flops)
            bound = "FLOPs" if cost.flops / peaks.flops > cost.bytes / peaks.bandwidth else "bytes"
        part, phase = key
        found.append(
            Item(
                part,
                phase,
                seconds=shares.get(key, 0.0) / 1e9 / steps if division else None,
                pieces=pieces.get(key, 0) / steps,
                bytes=None if cost is None else cost.bytes,
                flops=None if cost is None else cost.flops,
                floor=floor,
                bound=bound or "",
            )
        )
    return found


def measured(division: Division, steps: int, plain: float, largest: int = 40) -> Measured:
    """What `division`, in nanoseconds of `steps` steps, says of one."""
    scale = 1 / 1e9 / steps
    most = sorted(division.by_name.items(), key=lambda item: -item[1][0])[:largest]
    return Measured(
        steps=steps,
        whole=division.whole * scale,
        idle=division.idle * scale,
        overlapped=division.overlapped * scale,
        unknown=division.unknown * scale,
        plain=plain,
        largest=tuple(Piece(name, part, ns * scale, n / steps) for (part, name), (ns, n) in most),
    )


def save(profile: Profile, path: str | Path) -> None:
    """Write it as JSON; what was there is replaced at once."""
    atomic_write_text(Path(path), json.dumps({"version": VERSION, **asdict(profile)}, indent=1) + "\n")


def load(path: str | Path) -> Profile:
    """What `save` wrote.

    Raises:
        InvalidInput: there is no such file, or it is no profile.
    """
    try:
        table = json.loads(Path(path).read_text())
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}") from None
    except ValueError:
        raise InvalidInput(f"{path}: is no profile, which is JSON written by --json") from None
    return _read(table, str(path))


def _read(table: Any, where: str) -> Profile:
    if not isinstance(table, dict) or table.pop("version", None) != VERSION:
        raise InvalidInput(f"{where}: is no profile of version {VERSION}; write one with --json")
    try:
        table["items"] = tuple(Item(**item) for item in table["items"])
        if (found := table["measured"]) is not None:
            found["largest"] = tuple(Piece(**piece) for piece in found["largest"])
            table["measured"] = Measured(**found)
        return Profile(**table)
    except (KeyError, TypeError) as error:
        raise InvalidInput(f"{where}: is a damaged profile: {error}") from None
