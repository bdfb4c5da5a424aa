"""`openk3 profile`: where a training step's time goes, and how far each part is from its floor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

# Before torch is loaded: its profiler tells of itself on the terminal otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from openk3.cli.progress import TerminalProgress
from openk3.errors import InvalidInput
from openk3.train.allocator import keep_freed_memory
from openk3.train.data import open_data
from openk3.train.profile import Item, Profile, load, predict, profile, save
from openk3.train.recipes import load_recipe, parse_overrides, recipe_names

app = typer.Typer()


@app.command("profile", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def profile_(
    context: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            help=f"Recipe of the package ({', '.join(recipe_names())}), a TOML file, or a profile that "
            "--json wrote, which is shown again."
        ),
    ],
    steps: Annotated[
        int | None, typer.Option(help="Steps to record; by default 3 on a GPU and 1 on a CPU.")
    ] = None,
    real_data: Annotated[
        bool, typer.Option("--real-data", help="Read the recipe's data, not made-up documents of its size.")
    ] = False,
    floors: Annotated[
        str | None, typer.Option(help="Run nothing: print the floors on this device, such as H200.")
    ] = None,
    pieces: Annotated[int, typer.Option(help="Also list the kernels (or operators) that take most.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers there; `openk3 profile FILE` reads it.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw stacked bars there, as PNG and as SVG: the step and its floor.")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="An earlier --json file: shown as what was before, also by --plot.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Keep the profiler's trace there, for a viewer of Chrome traces.")
    ] = None,
) -> None:
    """Say what each part of the model takes of a training step, and the least that it could take.

    Runs a few steps of the recipe as `openk3 train` does, optimizer and balancing included, on the device it
    would train on. On a GPU time is that of kernels, each counted once; where two run at once both have half.
    On a CPU it is that of operators on the main thread, without what they call.

    floor: the time of the bytes and operations that a part needs, whichever takes longer on this device; each
    input read and each output written once. x: how many floors it took. A part at 1.3 is done; one at 10 is
    where time can be won, if it has a share worth winning. idle: nothing ran; on a GPU the host was too slow.

    The recipe's fields can be set after it, by their dotted names:

    openk3 profile r1 --train.micro_batch_tokens 65536 --json before.json

    openk3 profile r1 --compare before.json --plot step.png

    openk3 profile r1 --floors H200
    """
    console = Console(highlight=False)
    before = load(compare) if compare else None
    if recipe.endswith(".json"):
        _refuse(context.args, steps=steps, real_data=real_data, floors=floors, trace=trace)
        found = load(recipe)
    else:
        config = load_recipe(recipe, parse_overrides(context.args))
        name = Path(recipe).stem
        if floors is not None:
            _refuse((), steps=steps, real_data=real_data, trace=trace)
            found = predict(config, name, floors)
        else:
            keep_freed_memory()
            data = None
            if real_data:
                with TerminalProgress() as progress:
                    data = open_data(config, progress.preparing)
            found = profile(config, name, data=data, steps=steps, trace=trace)
    _print(console, found, before)
    if pieces:
        _print_pieces(console, found, pieces)
    if json_file:
        save(found, json_file)
        console.print(Text(f"numbers: {json_file}"), soft_wrap=True)
    if plot:
        from openk3.train.profile.plot import draw

        both = {"before": before, "after": found} if before else {"step": found}
        console.print(Text("pictures: {} {}".format(*draw(both, plot))), soft_wrap=True)


def _refuse(words: Sequence[str], **options: object) -> None:
    """Options that say how to run make no sense where nothing runs."""
    given = [*words, *(f"--{name.replace('_', '-')}" for name, value in options.items() if value)]
    if given:
        raise InvalidInput(f"{given[0]}: says how to run a recipe, and nothing is run here")


def _print(console: Console, found: Profile, before: Profile | None) -> None:
    console.print(Text(f"{found.recipe} on {found.device}: {found.shape}", style="bold"), soft_wrap=True)
    timed = found.measured is not None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("part", no_wrap=True)
    columns = ["floor", "forward", "backward", "GB", "TFLOP"]
    if timed:
        columns = ["ms", "before" if before else "share", "forward", "backward", "floor", "x"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    earlier = _by_part(before) if before else {}
    rows = _by_part(found)
    for part in [*earlier, *rows]:
        rows.setdefault(part, [])
    whole = found.measured.whole if found.measured else sum(_floor(items) or 0.0 for items in rows.values())
    for part, of_part in sorted(rows.items(), key=lambda row: -(_time(row[1]) or _floor(row[1]) or 0.0)):
        table.add_row(part, *_cells(of_part, whole, timed, earlier.get(part, []) if before else None))
    if found.measured:
        idle = found.measured.idle
        cells = [_ms(idle), _share(idle, whole)]
        if before:
            cells[1] = _ms(before.measured.idle) if before.measured else ""
        table.add_row("idle" if found.counted == "kernels" else "outside operators", *cells, style="dim")
    console.print(table)
    _print_summary(console, found, before, whole)


def _cells(items: list[Item], whole: float, timed: bool, before: list[Item] | None) -> list[str]:
    time, floor = _time(items), _floor(items)
    forward, backward = ([i for i in items if i.phase == phase] for phase in ("forward", "backward"))
    if timed:
        return [
            _ms(time),
            _share(time or 0.0, whole) if before is None else _ms(_time(before)),
            _ms(_time(forward)),
            _ms(_time(backward)),
            _ms(floor),
            f"{time / floor:.1f}" if time and floor else "",
        ]
    moved, flops = ([getattr(item, name) or 0 for item in items] for name in ("bytes", "flops"))
    return [
        _ms(floor),
        _ms(_floor(forward)),
        _ms(_floor(backward)),
        f"{sum(moved) / 1e9:,.3g}" if any(moved) else "",
        f"{sum(flops) / 1e12:,.3g}" if any(flops) else "",
    ]


def _print_summary(console: Console, found: Profile, before: Profile | None, whole: float) -> None:
    floor = sum(item.floor or 0.0 for item in found.items)
    lines = []
    if m := found.measured:
        lines.append(
            f"a step: {_ms(m.whole)} ms of the device's time, {found.tokens / m.whole:,.0f} tokens/s; "
            f"{_ms(m.plain)} ms without a profiler (mean of {m.steps})"
        )
        if before and before.measured:
            lines.append(
                f"before: {_ms(before.measured.whole)} ms, "
                f"{before.measured.whole / m.whole:.2f} times as long"
            )
        if m.overlapped:
            lines.append(f"several kernels at once: {_ms(m.overlapped)} ms")
        if m.unknown:
            lines.append(
                f"launched from where the trace does not say: {_ms(m.unknown)} ms, in the parts above"
            )
        if found.peaks:
            lines.append(f"all floors: {_ms(floor)} ms, {floor / whole:.1%} of the step" if whole else "")
    else:
        lines.append(f"all floors: {_ms(floor)} ms, {found.tokens / floor:,.0f} tokens/s at most")
    lines.append(f"operations of the model: {found.model_flops / 1e12:,.4g} TFLOP a step")
    lines.append(f"floors by {found.peaks}" if found.peaks else "no figures of this device, so no floors")
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _print_pieces(console: Console, found: Profile, most: int) -> None:
    if found.measured is None:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("ms", "a step"):
        table.add_column(column, justify="right")
    table.add_column("part", no_wrap=True)
    table.add_column(found.counted[:-1], overflow="ellipsis", no_wrap=True)
    for piece in found.measured.largest[:most]:
        table.add_row(_ms(piece.seconds), f"{piece.count:,.0f}", piece.part, Text(piece.name))
    console.print(table)


def _by_part(found: Profile) -> dict[str, list[Item]]:
    rows: dict[str, list[Item]] = {}
    for item in found.items:
        if item.seconds or item.floor:
            rows.setdefault(item.part, []).append(item)
    return rows


def _time(items: Sequence[Item]) -> float | None:
    known = [item.seconds for item in items if item.seconds is not None]
    return sum(known) if known else None


def _floor(items: Sequence[Item]) -> float | None:
    known = [item.floor for item in items if item.floor is not None]
    return sum(known) if known else None


def _share(seconds: float, whole: float) -> str:
    return f"{seconds / whole:.1%}" if whole else ""


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return ""
    ms = 1e3 * seconds
    return f"{ms:,.1f}" if ms >= 100 else f"{ms:.2f}"
