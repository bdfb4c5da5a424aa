"""Runs a list of training runs, each in a process and a folder of its own, several at a time.

A run that is finished is not run again, one that was interrupted goes on from its checkpoint (the trainer's
own resume), and one that fails is told of and loses no other. Processes are those of `openk3 train`, with the
interpreter and the package that run this, and end with it (see `child`). Knows nothing of what runs are
compared for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import openk3
from openk3.checkpoint.atomic import atomic_write_text, make_folder, remove_folder, storage_errors
from openk3.train.ablation.plan import Run
from openk3.train.probe import RESULT
from openk3.train.recipes import as_toml
from openk3.train.weights import CHECKPOINTS

POLL = 0.2
"""Seconds between looks at the processes."""
PATIENCE = 10.0
"""Seconds that a process is given to end before it is killed."""
TAIL = 1 << 16
"""Bytes from the end of a log that are read for its last line."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class RunsProgress(Protocol):
    """Hears of the runs, on the thread that calls `run_all`."""

    def begins(self, runs: Sequence[Run], finished: Sequence[Run]) -> None:
        """These are to be done; those of them that are `finished` already are only read."""
        ...

    def advanced(self, run: Run, step: int) -> None:
        """A run has so many finished steps."""
        ...

    def finished(self, run: Run) -> None: ...

    def failed(self, run: Run, reason: str) -> None: ...


@dataclass(frozen=True)
class Workers:
    """How many runs go on at a time, the CPU threads of each, and the GPUs they share, by number."""

    jobs: int
    threads: int
    gpus: tuple[str, ...] = ()


@dataclass
class _Child:
    run: Run
    folder: Path
    slot: int
    process: subprocess.Popen[bytes]


def run_all(
    runs: Sequence[Run],
    folder: Path,
    workers: Workers,
    progress: RunsProgress,
    *,
    keep_checkpoints: bool = False,
) -> dict[str, str]:
    """Do what is left of `runs` in folders below `folder`. However it ends, no process is left behind.

    Returns:
        Why a run failed, by its digest; empty when all are finished.

    Raises:
        StorageError: a folder cannot be made or removed.
    """
    finished = [run for run in runs if is_finished(run, run_folder(run, folder))]
    done = {run.digest for run in finished}
    progress.begins(runs, finished)
    waiting = deque(run for run in runs if run.digest not in done)
    children: list[_Child] = []
    failures: dict[str, str] = {}
    try:
        while waiting or children:
            while waiting and len(children) < workers.jobs:
                slot = min(set(range(workers.jobs)) - {child.slot for child in children})
                children.append(_start(waiting.popleft(), folder, slot, workers))
            time.sleep(POLL)
            for child in list(children):
                progress.advanced(child.run, last_step(child.folder))
                if child.process.poll() is None:
                    continue
                children.remove(child)
                if child.process.returncode == 0 and is_finished(child.run, child.folder):
                    if not keep_checkpoints and (child.folder / CHECKPOINTS).exists():
                        remove_folder(child.folder / CHECKPOINTS)
                    progress.finished(child.run)
                else:
                    failures[child.run.digest] = _reason(child)
                    progress.failed(child.run, failures[child.run.digest])
    finally:
        _stop(children)
    return failures


def run_folder(run: Run, folder: Path) -> Path:
    """Where a run is, or will be: an earlier plan may have had another label for it."""
    return next(folder.glob(f"*-{run.digest}"), folder / f"{run.label}-{run.digest}")


def is_finished(run: Run, folder: Path) -> bool:
    """Whether all numbers of the run are there."""
    return (folder / RESULT).exists() if run.is_probe else last_step(folder) == run.steps


def last_step(folder: Path) -> int:
    """The step of the last row in a run's metrics, also while it is being written; 0 before the first."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    with storage_errors(path, "read"), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        lines = file.read().split(b"\n")[:-1]  # what follows the last line end is not a row yet
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _start(run: Run, below: Path, slot: int, workers: Workers) -> _Child:
    folder = make_folder(run_folder(run, below))
    recipe = folder / "config.toml"  # the trainer writes the same
    atomic_write_text(recipe, as_toml(run.config))
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, str(workers.threads))
    package = str(Path(openk3.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    if workers.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = workers.gpus[slot % len(workers.gpus)]
    command = [sys.executable, "-m", "openk3.train.ablation.child", str(os.getpid())]
    command += ["train", str(recipe), "--out", str(folder)]
    with storage_errors(folder), (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
    return _Child(run, folder, slot, process)


def _stop(children: Sequence[_Child]) -> None:
    for child in children:
        child.process.terminate()
    for child in children:
        try:
            child.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def _reason(child: _Child) -> str:
    """The last line that the process had to say."""
    code = child.process.returncode
    log = child.folder / "log.txt"
    with storage_errors(log, "read"):
        lines = log.read_bytes()[-TAIL:].decode(errors="replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    ended = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{said.removeprefix('openk3: error: ')} ({ended}; see {log})"
