"""The numbers of finished runs: from a run folder's metrics to one flat row for each place in the tables.

Reads what the trainer wrote and adds nothing to it. Means over runs are made in `summary`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openk3.checkpoint.atomic import storage_errors
from openk3.checkpoint.jsonl import read_jsonl
from openk3.model.sizes import count
from openk3.train.ablation.config import Equal
from openk3.train.ablation.plan import Entry, Run
from openk3.train.ablation.runner import run_folder
from openk3.train.probe import RESULT

END = 0.1
"""Share of a run's steps that its last values are averaged over: those of one step jump."""

ACCURACY = "accuracy at "
"""Begins the name of a probe's accuracy; the length of the sequences follows."""

Measured = Mapping[str, float]
"""By name. Of every run: `train_loss` (nats per token over the last steps), `spikes` (steps refused),
`tokens`, `flops` (of the model), `seconds` (in steps; evaluation and start left out). With routed experts:
`maxvio` and `dead_experts`, means over layers and the last steps. With held-out text: `val_loss` and
`bits_per_byte` on all of it. Of a probe: accuracies by length."""


@dataclass(frozen=True)
class Result:
    """One run in one place of the tables.

    Attributes:
        folder: name of the run's folder.
        parameters, active: of the model, in total and for one token.
    """

    group: str
    variant: str
    equal: Equal
    seed: int
    folder: str
    parameters: int
    active: int
    measured: Measured


def results(entries: Iterable[Entry], folder: Path, failed: Iterable[str]) -> list[Result]:
    """The results of all runs but those that failed, given by digest."""
    known: dict[str, tuple[str, int, int, Measured]] = {}
    failed = set(failed)
    found = []
    for entry in entries:
        run = entry.run
        if run.digest in failed:
            continue
        if run.digest not in known:
            own = run_folder(run, folder)
            sizes = count(run.config.model)
            known[run.digest] = own.name, sizes.total, sizes.active, measured(run, own)
        found.append(Result(entry.group, entry.variant, entry.equal, entry.seed, *known[run.digest]))
    return found


def measured(run: Run, folder: Path) -> Measured:
    """What a finished run's folder says of it.

    Raises:
        CheckpointError, StorageError: the folder cannot be read.
    """
    rows = read_jsonl(folder / "metrics.jsonl")
    end = rows[-max(1, round(END * len(rows))) :]
    last = rows[-1]
    values = {
        "train_loss": statistics.fmean(row["loss"] for row in end),
        "spikes": float(sum(row["skipped"] for row in rows)),
        "tokens": float(last["tokens"]),
        "flops": float(sum(row["flops"] for row in rows)),
        "seconds": sum(row["step_seconds"] for row in rows),
    }
    values |= {name: _over_layers(end, name) for name in ("maxvio", "dead_experts") if name in last}
    values |= {name: last[name] for name in ("val_loss", "bits_per_byte") if name in last}
    if run.is_probe:
        values |= {f"{ACCURACY}{r['length']}": r["accuracy"] for r in _probed(folder / RESULT)["recalled"]}
    return values


def score(values: Measured) -> tuple[str, float]:
    """What a variant is judged by, and its value; lower is better. Bits per byte, or 1 - mean accuracy."""
    if "bits_per_byte" in values:
        return "bits_per_byte", values["bits_per_byte"]
    accuracies = [value for name, value in values.items() if name.startswith(ACCURACY)]
    if accuracies:
        return "errors", 1 - statistics.fmean(accuracies)
    return "train_loss", values["train_loss"]


def _over_layers(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.fmean(statistics.fmean(row[name].values()) for row in rows)


def _probed(path: Path) -> Any:
    with storage_errors(path, "read"):
        return json.loads(path.read_bytes())
