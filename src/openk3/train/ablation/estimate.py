"""How long a set will take on this machine, from a few steps of its first run, taken here and now.

As many copies run at a time as later will, so that what they cost each other is in the numbers. From the
first run to the others time is scaled by model FLOPs, which is rough: an estimate, not a promise.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openk3.checkpoint.jsonl import read_jsonl
from openk3.errors import InvalidInput
from openk3.train.ablation.config import with_steps
from openk3.train.ablation.plan import Run, step_flops
from openk3.train.ablation.runner import RunsProgress, Workers, run_all, run_folder

STEPS, WARM_UP = 6, 2


@dataclass(frozen=True)
class Pace:
    """Attributes:
    flops_per_second: of the model, in the steps of one run among others.
    overhead: seconds of a run outside its steps: start, the last evaluation, the last checkpoint.
    """

    flops_per_second: float
    overhead: float

    def seconds(self, runs: Sequence[Run], jobs: int) -> float:
        """For all of `runs`, so many at a time."""
        return sum(self.overhead + run.flops / self.flops_per_second for run in runs) / min(jobs, len(runs))


def measure(run: Run, workers: Workers, progress: RunsProgress) -> Pace:
    """The pace of `run`, whose data is prepared, beside as many copies of itself as there will be runs.

    Raises:
        InvalidInput: a copy failed; says why.
    """
    short = with_steps(run.config, STEPS)
    loops = [short.train.model_copy(update={"seed": seed}) for seed in range(workers.jobs)]
    copies = [Run("pace", short.model_copy(update={"train": loop})) for loop in loops]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        failures = run_all(copies, Path(folder), workers, progress)
        wall = time.perf_counter() - began
        if failures:
            raise InvalidInput(f"cannot measure the pace: {next(iter(failures.values()))}")
        rows = [read_jsonl(run_folder(copy, Path(folder)) / "metrics.jsonl") for copy in copies]
    seconds = [[row["step_seconds"] for row in own] for own in rows]
    step = statistics.fmean(statistics.median(own[WARM_UP:]) for own in seconds)
    return Pace(step_flops(short) / step, max(0.0, wall - max(sum(own) for own in seconds)))
