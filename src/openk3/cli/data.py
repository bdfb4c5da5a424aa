"""`openk3 data`: corpora into token shards, and looks into them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from openk3.chat import Tokenizer
from openk3.data.corpus import Progress as Report
from openk3.data.preparation import prepare
from openk3.data.recipe import load_recipe, recipe_names
from openk3.data.shards import SPLITS, SplitName, TokenDataset, open_dataset
from openk3.data.windows import Windows, permutation
from openk3.errors import InvalidInput

app = typer.Typer(
    no_args_is_help=True,
    help="Prepare corpora into token shards, and look into them.\n\n"
    "A prepared folder holds tokens, the tokenizer that made them, and a manifest that says where every byte "
    "came from. `openk3 train` reads such folders.",
)


@app.command("prepare")
def prepare_corpus(
    recipe: Annotated[
        str,
        typer.Argument(help=f"Recipe of the package ({', '.join(recipe_names())}) or a TOML file of yours."),
    ],
    out: Annotated[Path, typer.Option(help="The folder to make; it must not exist.")],
    vocab_size: Annotated[
        int, typer.Option(help="Size of the tokenizer to train on the corpus, control ids included.")
    ] = 4096,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Use this tokenizer (a tiktoken.model or its folder); train none.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Where fetched packages are kept (default: $OPENK3_CACHE, ~/.cache).")
    ] = None,
) -> None:
    """Read a corpus, clean it, drop duplicates, hold out a validation part, and write token shards.

    Example: openk3 data prepare stdlib --out corpora/stdlib
    """
    with progress_bars() as report:
        prepare(
            load_recipe(recipe),
            out,
            tokenizer=Tokenizer.load(tokenizer) if tokenizer else vocab_size,
            cache=cache,
            progress=report,
        )
    _print_info(open_dataset(out))


@app.command()
def info(
    folder: Annotated[Path, typer.Argument(help="A prepared folder.")],
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file with its hash.")] = False,
    context: Annotated[
        int | None, typer.Option(help="Also say how many documents windows of this many tokens divide.")
    ] = None,
) -> None:
    """Say what a prepared corpus holds, where it came from, and what was dropped on the way."""
    dataset = open_dataset(folder, verify=verify)
    _print_info(dataset)
    if context is not None:
        share = Windows(dataset.train, context, seed=0).split_fraction()
        Console().print(f"windows of {context} tokens divide {share:.1%} of the training documents")


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="A prepared folder.")],
    number: Annotated[int, typer.Option("-n", help="How many documents.", min=1)] = 3,
    split: Annotated[str, typer.Option(help="train or validation.")] = "train",
    seed: Annotated[int, typer.Option(help="Which ones: another seed shows others.", min=0)] = 0,
    characters: Annotated[int, typer.Option(help="How much of each.", min=1)] = 400,
) -> None:
    """Print the beginning of a few documents as they come back from their tokens."""
    dataset = open_dataset(folder)
    name = _split_name(split)
    documents = getattr(dataset, name)
    sources = documents.sources()
    console = Console()
    for document in permutation(len(documents), seed, 0)[:number].tolist():
        text = dataset.text(name, document).decode()
        tokens, size = documents.lengths[document], documents.byte_counts[document]
        console.rule(f"{sources[document]}: {size:,} bytes, {tokens:,} tokens", align="left")
        console.print(Text(text[:characters] + ("..." if len(text) > characters else "")))


@contextlib.contextmanager
def progress_bars() -> Iterator[Report]:
    """A bar on the terminal for each stage that reports."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, int] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for finished in bars.tasks:
                    bars.update(finished.id, total=finished.completed or 1, completed=finished.completed or 1)
                tasks[stage] = bars.add_task(stage, total=total or None)
            bars.update(bars.task_ids[tasks[stage]], completed=done)

        yield report


def _split_name(split: str) -> SplitName:
    for name in SPLITS:
        if name == split:
            return name
    raise InvalidInput(f"--split {split}: must be one of {', '.join(SPLITS)}")


def _print_info(dataset: TokenDataset) -> None:
    manifest, origin = dataset.manifest, dataset.manifest.provenance
    console = Console()
    table = Table(title=f"{dataset.folder}: recipe {origin.recipe.name}", title_justify="left")
    table.add_column("split")
    for column in ("documents", "bytes", "tokens", "bytes per token"):
        table.add_column(column, justify="right")
    for name, split in manifest.splits.items():
        row = (f"{n:,}" for n in (split.documents, split.bytes, split.tokens))
        table.add_row(name, *row, f"{split.bytes / split.tokens:.3f}")
    console.print(table)
    for source_name, source in origin.sources.items():
        package = f" from {' '.join(source.package.split()[:2])}" if source.package else ""
        console.print(
            f"source {source_name}: {source.documents:,} documents, {source.bytes:,} bytes{package}"
        )
    console.print(f"cleaning: {_counts(origin.cleaning)}")
    console.print(f"deduplication: {_counts(origin.deduplication)}")
    console.print(f"vocabulary {manifest.vocab_size:,}, tokenizer {manifest.tokenizer_sha256[:12]}")
    console.print(f"corpus {origin.corpus_sha256[:12]}")


def _counts(counts: dict[str, int]) -> str:
    return (
        ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items() if count) or "none"
    )
