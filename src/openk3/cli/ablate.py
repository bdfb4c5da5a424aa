"""`openk3 ablate`: a set of training runs into a table with error bars."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from openk3.errors import OpenK3Error
from openk3.train.ablation.config import AblationSet, load_set, set_names
from openk3.train.ablation.plan import Run, distinct, entries, first_choices, trials
from openk3.train.ablation.runner import Workers
from openk3.train.ablation.summary import Line, comparisons
from openk3.train.ablation.table import headline
from openk3.train.recipes import parse_overrides

app = typer.Typer()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def ablate(
    context: typer.Context,
    set_: Annotated[
        str,
        typer.Argument(
            metavar="SET", help=f"Set of the package ({', '.join(set_names())}) or a TOML file of one."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the study; by default runs/ablations/ and the set's name.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; by default one for each core.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of a run; by default cores / jobs.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="So many seeds instead of the set's.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the runs and how long they would take.")
    ] = False,
) -> None:
    """Run a set of ablations and write its tables and pictures. An interrupted set goes on where it stopped.

    Every field of the set's base recipe can be set after it, by its dotted name:

    openk3 ablate nano --seeds 5 --train.tokens 4000000 --jobs 16
    """
    from openk3.train.ablation.study import study

    ablation = load_set(set_, parse_overrides(context.args), seeds)
    workers = _workers(ablation, jobs, threads)
    console = Console(highlight=False)
    with _ends_when_told(), Display(console) as display:
        if dry_run:
            _print_plan(ablation, workers, display, console)
            return
        done = study(
            ablation,
            out or Path("runs") / "ablations" / ablation.name,
            workers,
            progress=display,
            preparing=display.preparing,
            announce=console.print,
        )
    _print_lines(ablation, done.lines, console)
    console.print(
        Text(f"everything is in {done.folder}: table.md, results.csv, results.json, pictures, runs/")
    )
    if done.failures:
        label, reason = next(iter(done.failures.items()))
        raise OpenK3Error(
            f"failed runs: {len(done.failures)}; the others are in the table. The first, {label}: {reason}"
        )


class Display:
    """A bar for all runs on a terminal, a line for each finished one. Implements `RunsProgress`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[running]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task: TaskID | None = None
        self._stage = ""
        self._total = self._done = 0
        self._flops: dict[str, float] = {}
        self._steps: dict[str, str] = {}
        self._began = 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def preparing(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._console.print(Text(stage))
        self._stage = stage

    def begins(self, runs: Sequence[Run], finished: Sequence[Run]) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._total, self._done = len(runs), len(finished)
        self._flops, self._steps, self._began = {}, {}, time.monotonic()
        done = {run.digest for run in finished}
        left = sum(run.flops for run in runs if run.digest not in done)
        self._task = self._bar.add_task("", total=float(left), running="")
        self._show()
        if finished:
            self._console.print(f"{len(finished)} of {len(runs)} runs are finished already")

    def advanced(self, run: Run, step: int) -> None:
        self._flops[run.digest] = run.flops * step / run.steps
        self._steps[run.digest] = f"{run.label} {step}/{run.steps}"
        self._show()

    def finished(self, run: Run) -> None:
        self._ended(run, "finished")

    def failed(self, run: Run, reason: str) -> None:
        self._ended(run, f"[red]failed[/]: {escape(reason)}")

    def _ended(self, run: Run, how: str) -> None:
        self._done += 1
        self._flops[run.digest] = float(run.flops)
        self._steps.pop(run.digest, None)
        self._console.print(
            f"{time.monotonic() - self._began:6.0f} s  {self._done}/{self._total}  {run.label}  {how}",
            soft_wrap=True,
        )
        self._show()

    def _show(self) -> None:
        if self._task is not None:
            self._bar.update(
                self._task,
                description=f"{self._done}/{self._total} runs",
                completed=sum(self._flops.values()),
                running=", ".join(self._steps.values()),
            )


def _print_lines(ablation: AblationSet, lines: Sequence[Line], console: Console) -> None:
    """What the tables say, in short."""
    for group in ablation.groups:
        own = [line for line in lines if line.group == group.name]
        equals = comparisons(group, own)
        for equal in equals:
            meant = [equal] if len(equals) > 1 else group.equal
            console.print(f"[bold]{group.name}[/], at equal {' and '.join(meant)}")
            for line in own:
                if line.equal == equal:
                    console.print(Text(f"  {line.variant}: {headline(line)}"), soft_wrap=True)


@contextlib.contextmanager
def _ends_when_told() -> Iterator[None]:
    """A supervisor's SIGTERM unwinds as an interrupt does: no run may outlive this process."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _workers(ablation: AblationSet, jobs: int | None, threads: int | None) -> Workers:
    """Runs share the cores evenly; where there are several GPUs, they take turns on them."""
    cores = len(os.sched_getaffinity(0))
    runs = [*distinct(trials(ablation)), *distinct(entries(ablation, first_choices(ablation)))]
    jobs = min(jobs or cores, len(runs))
    return Workers(jobs, threads or max(1, cores // jobs), _gpus(runs))


def _gpus(runs: Sequence[Run]) -> tuple[str, ...]:
    import torch

    if all(run.config.train.device == "cpu" for run in runs) or not torch.cuda.is_available():
        return ()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(named.split(",")) if named else tuple(map(str, range(torch.cuda.device_count())))


def _print_plan(ablation: AblationSet, workers: Workers, display: Display, console: Console) -> None:
    from openk3.train.ablation.estimate import measure
    from openk3.train.ablation.study import prepare_data

    searches, compared = trials(ablation), entries(ablation, first_choices(ablation))
    runs = [*distinct(searches), *distinct(compared)]
    table = Table(title=f"{ablation.name}: {len(runs)} runs", title_justify="left")
    table.add_column("what")
    for heading in ("runs", "steps of each", "tokens", "model FLOPs"):
        table.add_column(heading, justify="right")
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(run.label.rpartition("-seed")[0], []).append(run)
    for what, own in alike.items():
        table.add_row(what, f"{len(own)}", f"{own[0].steps:,}", *_sums(own))
    table.add_section()
    table.add_row("all", f"{len(runs)}", "", *_sums(runs))
    console.print(table)
    if searches:
        console.print("runs that depend on a search are listed with its first candidate")
    prepare_data(runs, display.preparing)
    console.print(f"measuring the pace: a few steps of {compared[0].run.label}, {workers.jobs} times at once")
    pace = measure(compared[0].run, workers, display)
    minutes = pace.seconds(runs, workers.jobs) / 60
    console.print(
        f"about {minutes:.0f} minutes at {workers.jobs} runs at a time of {workers.threads} CPU threads: "
        f"{pace.flops_per_second:.3g} model FLOPs per second in each, {pace.overhead:.0f} s beside its steps"
    )


def _sums(runs: Sequence[Run]) -> tuple[str, str]:
    return f"{sum(run.tokens for run in runs):,}", f"{sum(run.flops for run in runs):.3g}"
