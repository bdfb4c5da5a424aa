"""`openk3 inspect`: what a checkpoint holds, and whether it will load."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from openk3.checkpoint.official.folder import Findings, OfficialFolder
    from openk3.checkpoint.official.summary import Summary

app = typer.Typer()


@app.command()
def inspect(
    path: Annotated[
        Path, typer.Argument(help="A folder in the released layout, a run folder, or one of its checkpoints.")
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Also read every byte and compare it with the checksums.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a checkpoint holds and whether it will load, without loading it.

    Reads config, index and headers only: seconds, whatever its size. Ends with exit code 2 and everything
    that is wrong when it will not load.

    Examples: openk3 inspect exported; openk3 inspect Kimi-K3 --json; openk3 inspect exported --verify
    """
    from openk3.checkpoint.official.folder import OfficialFolder, is_official_folder, survey
    from openk3.checkpoint.official.summary import summarise

    if not is_official_folder(path):
        _inspect_run(path, as_json)
        return

    found = survey(path)
    summary = summarise(found)
    if as_json:
        print(json.dumps({**asdict(summary), "bytes": summary.bytes, "parameters": summary.parameters}))
    else:
        _print(path, found, summary)
    folder = OfficialFolder(found)  # raises with everything that is wrong
    if verify:
        _verify(folder)
        if not as_json:
            print(_verdict(summary))


def _print(path: Path, found: Findings, summary: Summary) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    table = Table(title=Text(f"{path}: {summary.form or 'unknown form'}"), title_justify="left")
    table.add_column("part")
    for column in ("tensors", "parameters", "bytes"):
        table.add_column(column, justify="right")
    for name, part in summary.parts.items():
        table.add_row(name, f"{part.tensors:,}", f"{part.parameters:,}", f"{part.bytes:,}")
    table.add_section()
    tensors = sum(part.tensors for part in summary.parts.values())
    table.add_row("all", f"{tensors:,}", f"{summary.parameters:,}", f"{summary.bytes:,}")
    console.print(table)
    if (config := found.config) is not None:
        mla = len(config.mla_layer_numbers)
        kinds = f"{config.num_layers - mla} KDA, {mla} MLA"
        console.print(f"layers     {config.num_layers}: {kinds}, width {config.hidden_size}")
        if config.moe is not None:
            console.print(
                f"experts    {config.moe.num_experts}, {config.moe.experts_per_token} a token, "
                f"stored as {summary.expert_format}"
            )
        console.print(f"vocabulary {config.vocab_size:,}, context {config.max_context:,}")
    stored = ", ".join(f"{name} {size:,} bytes" for name, size in summary.dtypes.items())
    console.print(f"stored     {summary.shards} shards; {stored or 'nothing'}")
    console.print(f"checksums  {'beside the shards' if summary.checked else 'none: damaged data would load'}")
    console.print(f"will load  {'no' if summary.problems else 'yes'}")


def _verify(folder: OfficialFolder) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from openk3.checkpoint.official.summary import verify

    total = sum(stored.bytes for stored in folder.tensors.values())
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with folder, bar as progress:
        task = progress.add_task("reading", total=total)
        verify(folder, lambda done: progress.advance(task, done))


def _verdict(summary: Summary) -> str:
    if summary.checked:
        return "verified   every byte is what was written"
    return "verified   every byte could be read; there are no checksums to compare with"


def _inspect_run(path: Path, as_json: bool) -> None:
    from openk3.model.sizes import count
    from openk3.train.weights import describe_run

    store, step, config = describe_run(path)
    sizes = count(config)
    content = {
        "form": "run",
        "step": step,
        "steps": store.steps(),
        "parameters": sizes.total,
        "active": sizes.active,
    }
    if as_json:
        print(json.dumps(content))
        return
    print(f"{path}: checkpoints of a training run at step {', '.join(map(str, store.steps()))}")
    print(f"parameters {sizes.total:,}, of which {sizes.active:,} are used per token")
    print(f"will load  yes, step {step}: every byte is what was written")
