"""`openk3 profile`: where the time of a training step goes."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from openk3.train.profile import Profile, profile_training
from openk3.train.recipes import load_recipe, parse_overrides, recipe_names

app = typer.Typer()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def profile(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(help=f"Recipe of the package ({', '.join(recipe_names())}) or a TOML file.")
    ],
    warm: Annotated[int, typer.Option(min=1, help="Steps before the one that is taken apart.")] = 3,
    bandwidth: Annotated[float, typer.Option(help="Of the device, GB per second read or written.")] = 4250,
    flops: Annotated[float, typer.Option(help="Of the device, TFLOP per second in products.")] = 680,
) -> None:
    """Train new weights on made text, and take one step apart by kernels (on a CPU: by operators).

    Any field of the recipe can be set after it, as for `openk3 train`. In the last two columns stand the
    least ms that a part could take: its bytes and its FLOPs, at rates that by default are an H200's.
    """
    _print(profile_training(load_recipe(recipe, parse_overrides(context.args)), warm=warm), bandwidth, flops)


def _print(found: Profile, bandwidth: float, rate: float) -> None:
    table = Table(Column("part", no_wrap=True), box=None)
    for column in ("ms", "share", "forward", "backward", "count", "bytes", "FLOPs"):
        table.add_column(column, justify="right")
    whole = sum(at.seconds for at in found.parts.values())
    for name, at in found.parts.items():
        floor = found.floors.get(name)
        least = (
            ("", "")
            if floor is None
            else (f"{floor.bytes / bandwidth / 1e6:.3g}", f"{floor.flops / rate / 1e9:.3g}")
        )
        times = (f"{1e3 * seconds:.4g}" for seconds in (at.forward, at.backward))
        table.add_row(
            name, f"{1e3 * at.seconds:.4g}", f"{at.seconds / whole:.1%}", *times, f"{at.count:,}", *least
        )
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(f"{1e3 * whole:,.1f} ms in all; the step before took {1e3 * found.seconds:,.1f} ms")
    console.print(f"{found.tokens:,} tokens; least times at {bandwidth:,.0f} GB/s and {rate:,.0f} TFLOP/s")
