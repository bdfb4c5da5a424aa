"""`openk3 train`: a recipe into a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from openk3.cli.progress import TerminalProgress
from openk3.errors import InvalidInput
from openk3.train.allocator import keep_freed_memory
from openk3.train.config import ProbeData
from openk3.train.loop import RunResult, run
from openk3.train.probe import ProbeResult, run_probe
from openk3.train.recipes import load_recipe, parse_overrides, recipe_names

app = typer.Typer()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(help=f"Recipe of the package ({', '.join(recipe_names())}) or a TOML file.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Run folder; by default runs/ and the recipe's name.")
    ] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(help="Start from the weights of this run or checkpoint, not from new ones."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Save and stop after so many, at the end of a step; start it again to go on."),
    ] = None,
) -> None:
    """Train a model. An interrupted run goes on by itself when it is started again.

    Every field of the recipe can be set after it, by its dotted name:

    openk3 train nano --optim.lr 2e-3 --model.attn_res.kind none --train.steps 500 --out runs/plain
    """
    config = load_recipe(recipe, parse_overrides(context.args))
    keep_freed_memory()
    folder = out or Path("runs") / Path(recipe).stem
    if isinstance(config.data, ProbeData):
        if init_from is not None:
            raise InvalidInput("--init-from: a recall probe is trained from new weights")
        if seconds is not None:
            raise InvalidInput("--seconds: a recall probe is trained to its end, and then asked")
        with TerminalProgress() as progress:
            _print_answers(run_probe(config, folder, progress=progress))
        return
    with TerminalProgress() as progress:
        result = run(config, folder, init_from=init_from, progress=progress, seconds=seconds)
    _print_summary(result)


def _print_answers(result: ProbeResult) -> None:
    console = Console(highlight=False)
    for at in result.recalled:
        console.print(
            f"{result.probe} at {at.length:,} tokens: {at.accuracy:.1%} of {at.answers:,} answers right "
            f"(guessing: {at.chance:.1%}, knowing what was shown but not where: {at.unbound:.1%})"
        )


def _print_summary(result: RunResult) -> None:
    console, last = Console(highlight=False, markup=False), result.last
    measured = f"loss {last['loss']:.3f}"
    if "bits_per_byte" in last:
        measured += (
            f", validation {last['val_loss']:.3f} nats per token, {last['bits_per_byte']:.3f} bits per byte"
        )
    console.print(
        f"{last['step']:,} steps, {last['tokens']:,} tokens in {last['seconds']:,.0f} s: {measured}"
    )
    console.print(f"everything is in {result.folder}; see it with: openk3 report {result.folder}")
