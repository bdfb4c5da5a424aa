"""A whole study, in order: the corpus once, the searches, the runs, and what they come to.

All of it can be interrupted and started again; what is finished stays. The folder of a study:

runs/           a run folder for each distinct run
results.csv     a line for each run in each place of the tables
results.json    the same with means, searches, failures, and how it was made
table.md        the tables
overview.png    every variant's difference to its baseline
group-*.png     a picture of each group
"""

from __future__ import annotations

import dataclasses
import datetime
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openk3 import __version__
from openk3.checkpoint.atomic import (
    atomic_write_bytes,
    atomic_write_json,
    atomic_write_text,
    make_folder,
)
from openk3.checkpoint.lock import only_writer
from openk3.train.ablation.config import AblationSet
from openk3.train.ablation.plan import Entry, Run, Trial, distinct, entries, first_choices, trials
from openk3.train.ablation.results import ACCURACY, Result, measured, results
from openk3.train.ablation.runner import RunsProgress, Workers, run_all, run_folder
from openk3.train.ablation.summary import Choice, Line, choose, chosen, summarise
from openk3.train.ablation.table import csv_text, markdown
from openk3.train.data import Preparing, open_data

RUNS = "runs"


@dataclass(frozen=True)
class Study:
    """A finished study. `failures`: why runs failed, by label."""

    folder: Path
    lines: tuple[Line, ...]
    choices: tuple[Choice, ...]
    failures: Mapping[str, str]

    @property
    def table(self) -> Path:
        return self.folder / "table.md"


def study(
    ablation: AblationSet,
    out: str | Path,
    workers: Workers,
    *,
    progress: RunsProgress,
    preparing: Preparing,
    announce: Callable[[str], None],
) -> Study:
    """Do what is left of a set in `out`, and write its tables and pictures.

    A failed run is in `failures` and missing in the means; it is tried again the next time.

    Args:
        preparing: hears of a corpus being prepared. announce: told of each stage in a sentence.

    Raises:
        InvalidInput: the data is wrong. StorageError: a write failed, or another process is at work in `out`.
    """
    folder = make_folder(out)
    with only_writer(folder):
        searches = trials(ablation)
        to_come: list[Trial | Entry] = [*searches, *entries(ablation, first_choices(ablation))]
        data = prepare_data(distinct(to_come), preparing)
        below = make_folder(folder / RUNS)
        failures: dict[str, str] = {}

        def run(runs: Sequence[Run], what: str) -> dict[str, str]:
            announce(f"{what}: {len(runs)} runs, {workers.jobs} at a time")
            failed = run_all(runs, below, workers, progress, keep_checkpoints=ablation.keep_checkpoints)
            failures.update({r.label: failed[r.digest] for r in runs if r.digest in failed})
            return failed

        choices: tuple[Choice, ...] = ()
        if searches:
            runs = distinct(searches)
            failed = run(runs, "searching")
            found = {r.digest: measured(r, run_folder(r, below)) for r in runs if r.digest not in failed}
            choices = choose(searches, found)
        places = entries(ablation, chosen(choices))
        failed = run(distinct(places), "comparing")
        rows = results(places, below, failed)
        done = Study(folder, summarise(ablation, rows), choices, failures)
        on_cpu = all(run.config.train.device == "cpu" for run in distinct(places))
        _write(done, ablation, rows, _made(workers, on_cpu), data)
    return done


def _write(
    done: Study,
    ablation: AblationSet,
    rows: Sequence[Result],
    made: Mapping[str, str],
    data: Sequence[Mapping[str, Any]],
) -> None:
    record = {
        "set": ablation.model_dump(mode="json"),
        "made": made,
        "data": data,
        "searches": [dataclasses.asdict(choice) for choice in done.choices],
        "lines": [dataclasses.asdict(line) for line in done.lines],
        "results": [dataclasses.asdict(row) for row in rows],
        "failures": done.failures,
    }
    atomic_write_json(done.folder / "results.json", record)
    atomic_write_text(done.folder / "results.csv", csv_text(rows))
    atomic_write_text(done.table, markdown(ablation, done.lines, done.choices, done.failures, made))
    _draw(done.folder, ablation, done.lines, rows)


def prepare_data(runs: Iterable[Run], preparing: Preparing) -> list[Mapping[str, Any]]:
    """Open the data of all runs, so that a corpus is prepared once and no two processes prepare the same.

    Returns:
        What each distinct data is, by hashes.

    Raises:
        InvalidInput: it is missing, wrong or does not fit the model.
    """
    seen: dict[str, Mapping[str, Any]] = {}
    for run in runs:
        key = f"{run.config.data!r} {run.config.model.vocab_size}"
        if key not in seen:
            seen[key] = open_data(run.config, preparing).identity
    return list(seen.values())


def _draw(folder: Path, ablation: AblationSet, lines: Sequence[Line], rows: Sequence[Result]) -> None:
    # matplotlib is slow to import, and only needed here
    from openk3.train.ablation.curves import curves_picture
    from openk3.train.ablation.plot import group_picture, overview_picture

    for group in ablation.groups:
        own = [line for line in lines if line.group == group.name]
        if own:
            probed = any(name.startswith(ACCURACY) for name in own[0].values)
            picture = (curves_picture if probed else group_picture)(ablation, group, lines, rows)
            atomic_write_bytes(folder / f"group-{group.name}.png", picture)
    if (overview := overview_picture(ablation, lines, rows)) is not None:
        atomic_write_bytes(folder / "overview.png", overview)


def _made(workers: Workers, on_cpu: bool) -> dict[str, str]:
    where = _cpu_name() if on_cpu or not torch.cuda.is_available() else torch.cuda.get_device_name()
    return {
        "openk3": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "on": f"{where}: {workers.jobs} runs at a time of {workers.threads} CPU threads",
        "finished": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _cpu_name() -> str:
    """As the kernel gives it, where it does."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
