"""`openk3 params`: what a configuration amounts to, counted on the meta device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from openk3.config import PRESETS, ModelConfig, parse, preset, read_toml

if TYPE_CHECKING:
    from openk3.model.sizes import Sizes

app = typer.Typer()

FLOPS_CONTEXT = 4096
"""Longest sequences that operations are counted for: attention adds to them with the square of the length."""


@app.command()
def params(
    model: Annotated[str, typer.Argument(help=f"Preset ({', '.join(PRESETS)}) or a TOML file of a model.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print counts as one JSON object.")] = False,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Print every checkpoint tensor as TSV, in the released naming.")
    ] = False,
) -> None:
    """Count a model's parameters: in total, used per token, and by part. Nothing is allocated.

    Examples: openk3 params nano; openk3 params k3 --json; openk3 params k3 --tensors > k3.tsv
    """
    config = named_or_file(model)
    if tensors:
        _print_tensors(config)
        return
    from openk3.model.sizes import count

    sizes = count(config)
    if as_json:
        print(json.dumps(_as_dict(sizes)))
    else:
        _print_table(model, config, sizes)


def named_or_file(model: str) -> ModelConfig:
    """The preset called `model`, or the configuration in the TOML file at that path."""
    if not model.endswith(".toml"):
        return preset(model)
    return parse(ModelConfig, read_toml(Path(model)), model)


def _as_dict(sizes: Sizes) -> dict[str, object]:
    return {
        "total": sizes.total,
        "active": sizes.active,
        "active_non_embedding": sizes.active_non_embedding,
        "embedding": sizes.embedding,
        "parts": {name: {"total": part.total, "active": part.active} for name, part in sizes.parts.items()},
    }


def _print_tensors(config: ModelConfig) -> None:
    from openk3.checkpoint.official.layout import official_tensors

    print("name\tshape\tdtype\tbytes")
    for tensor in official_tensors(config):
        print(f"{tensor.name}\t{list(tensor.shape)}\t{tensor.dtype}\t{tensor.bytes}")


def _print_table(name: str, config: ModelConfig, sizes: Sizes) -> None:
    from rich.console import Console
    from rich.table import Table

    from openk3.train.flops import model_flops

    table = Table(title=f"{name}: parameters", title_justify="left")
    table.add_column("part")
    for column in ("total", "active per token", "share of total"):
        table.add_column(column, justify="right")
    for part, size in sorted(sizes.parts.items(), key=lambda item: -item[1].total):
        table.add_row(part, f"{size.total:,}", f"{size.active:,}", f"{size.total / sizes.total:.1%}")
    table.add_section()
    table.add_row("all", f"{sizes.total:,}", f"{sizes.active:,}", "")
    console = Console(highlight=False)
    console.print(table)
    console.print(f"total                            {_billions(sizes.total)}")
    console.print(f"embedding, look-up and head      {_billions(sizes.embedding)}")
    console.print(f"active, every table counted      {_billions(sizes.active)}")
    console.print(f"active, without the look-up      {_billions(sizes.active_without_lookup)}")
    console.print(f"active, without any embedding    {_billions(sizes.active_non_embedding)}")
    length = min(config.max_context, FLOPS_CONTEXT)
    flops = model_flops(config, [length], mtp=bool(config.mtp_layers)).total // length
    console.print(f"operations to train on a token   {_billions(flops)} in sequences of {length:,}")
    console.print(f"6 x active, for comparison       {_billions(6 * sizes.active)}")


def _billions(n: int) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.4g}{unit} ({n:,})"
    return f"{n:,}"
