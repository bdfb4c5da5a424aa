"""A run as the report reads it: its resolved configuration and its metric rows, whatever of them is there.

Rows come from `metrics.jsonl` as `openk3.train.metrics` writes them: numbers by name, and dictionaries of
numbers by layer. A run may be young, killed, or have parts switched off: what is absent is an empty series.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openk3.checkpoint.jsonl import read_jsonl
from openk3.config import read_toml
from openk3.errors import InvalidInput

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """A metric over steps."""

    steps: Numbers
    values: Numbers

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float:
        return float(self.values[-1])

    def binned(self, most: int) -> Series:
        """At most `most` points, each the mean of its neighbours: a page must not grow with the run."""
        if len(self) <= most:
            return self
        edges = np.linspace(0, len(self), most + 1).astype(int)[:-1]
        sizes = np.diff(np.append(edges, len(self)))
        return Series(np.add.reduceat(self.steps, edges) / sizes, np.add.reduceat(self.values, edges) / sizes)

    def smoothed(self, share: float = 0.02) -> Series:
        """Running mean over about this share of the run."""
        width = max(1, round(share * len(self)))
        total = np.concatenate([[0.0], np.cumsum(self.values)])
        ends = np.arange(1, len(self) + 1)
        starts = np.maximum(ends - width, 0)
        return Series(self.steps, (total[ends] - total[starts]) / (ends - starts))


@dataclass(frozen=True)
class Run:
    """What a run folder says."""

    folder: Path
    config: dict[str, Any]
    rows: list[dict[str, Any]]

    def series(self, key: str) -> Series:
        """The finite values of `key`, or of `key/layer` inside a dictionary by layer; of a list, its mean."""
        name, _, layer = key.partition("/")
        steps, values = [], []
        for row in self.rows:
            value = row.get(name)
            if layer and isinstance(value, dict):
                value = value.get(layer)
            if isinstance(value, list) and value:
                value = sum(value) / len(value)
            if isinstance(value, int | float) and np.isfinite(value):
                steps.append(row["step"])
                values.append(value)
        return Series(np.array(steps, np.float64), np.array(values, np.float64))

    def by_layer(self, key: str) -> dict[str, Series]:
        """The series of every layer that `key` has values for, in layer order."""
        names = {name for row in self.rows for name in (row.get(key) or {})}
        every = {name: self.series(f"{key}/{name}") for name in sorted(names, key=int)}
        return {name: series for name, series in every.items() if len(series)}

    def snapshots(self, key: str) -> list[tuple[int, dict[str, Any]]]:
        """Step and dictionary of each row that carries `key`, in order."""
        return [(row["step"], row[key]) for row in self.rows if row.get(key)]


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        InvalidInput: there is no run in it.
        CheckpointError: its metrics are not what a run writes.
    """
    metrics, config = folder / "metrics.jsonl", folder / "config.toml"
    if not metrics.is_file():
        raise InvalidInput(f"{folder} is not a run folder: it has no metrics.jsonl")
    return Run(
        folder=folder,
        config=read_toml(config) if config.is_file() else {},
        rows=read_jsonl(metrics),
    )
