"""`openk3 tokenizer`: train, inspect and use tokenizers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from openk3.chat import Tokenizer
from openk3.chat.tokenizer import CONTROL_NAMES
from openk3.cli.standard_input import read_text
from openk3.errors import InvalidInput

app = typer.Typer(
    no_args_is_help=True,
    help="Train, inspect and use tokenizers.\n\n"
    "A tokenizer is one file in tiktoken's format (`tiktoken.model`): the byte string of each rank. 256 "
    "control ids follow the ranks. The file of the released K3 works as it is.",
)

Where = Annotated[Path, typer.Argument(help="A tiktoken.model, or a folder that holds one.")]


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="Corpus: a recipe by name (such as stdlib) or a TOML file.")],
    out: Annotated[Path, typer.Option(help="The file to write, or a folder that exists.")],
    vocab_size: Annotated[int, typer.Option(help="Size of the vocabulary, control ids included.")] = 4096,
    cache: Annotated[Path | None, typer.Option(help="Where fetched packages are kept.")] = None,
) -> None:
    """Learn byte-level BPE from the training documents of a corpus.

    `openk3 data prepare` does this too; train one apart to share it between corpora.
    Example: openk3 tokenizer train stdlib --vocab-size 2048 --out tiktoken.model
    """
    from openk3.chat.train_tokenizer import train_tokenizer
    from openk3.cli.data import progress_bars
    from openk3.data.preparation import select
    from openk3.data.recipe import load_recipe

    with progress_bars() as report:
        documents = select(load_recipe(recipe), cache=cache, progress=report).train
        report("training the tokenizer", 0, 0)
        tokenizer = train_tokenizer((document.text for document in documents), vocab_size)
    _print_info(tokenizer, tokenizer.save(out))


@app.command()
def info(path: Where) -> None:
    """Print sizes, hash, control ids and the longest tokens."""
    _print_info(Tokenizer.load(path), path)


@app.command()
def encode(
    path: Where,
    text: Annotated[str, typer.Argument(help="The text, or - to read it from standard input.")] = "-",
    special: Annotated[
        bool, typer.Option("--special", help="Names of control tokens in the text are control tokens.")
    ] = False,
    pieces: Annotated[bool, typer.Option("--pieces", help="Print each token's text beside its id.")] = False,
) -> None:
    """Print the ids of a text on one line, or one token per line with --pieces.

    Example: openk3 tokenizer encode tiktoken.model "def f(x): return x" --pieces
    """
    tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode(read_text() if text == "-" else text, allow_special=special)
    if pieces:
        for token in ids:
            print(token, repr(tokenizer.decode_bytes([token]))[1:])
    else:
        print(*ids)


@app.command()
def decode(
    path: Where,
    ids: Annotated[
        list[str] | None, typer.Argument(help="Ids; without any they are read from standard input.")
    ] = None,
) -> None:
    """Print the text of ids, byte for byte: what encode printed comes back as it was.

    Example: openk3 tokenizer decode tiktoken.model 100 101 102
    """
    words = ids or read_text().split()
    if wrong := next((word for word in words if not word.isdecimal()), None):
        raise InvalidInput(f"tokenizer decode: {wrong!r} is not an id; ids are whole numbers apart by spaces")
    sys.stdout.buffer.write(Tokenizer.load(path).decode_bytes([int(word) for word in words]) + b"\n")


def _print_info(tokenizer: Tokenizer, path: Path) -> None:
    console = Console()
    console.print(
        f"{path}: vocabulary {tokenizer.vocab_size:,} = {tokenizer.n_ranks:,} ranks + 256 control ids"
    )
    console.print(f"sha256 {tokenizer.sha256}")
    table = Table(title="named control ids", title_justify="left")
    table.add_column("id", justify="right")
    table.add_column("name")
    for name, token in tokenizer.control_tokens.items():
        if token - tokenizer.n_ranks in CONTROL_NAMES:
            table.add_row(str(token), name.replace("[", r"\["))
    console.print(table)
    longest = sorted(range(tokenizer.n_ranks), key=tokenizer.byte_lengths().__getitem__)[-8:]
    shown = ", ".join(repr(tokenizer.decode([token])) for token in reversed(longest))
    console.print(f"longest tokens: {shown}", markup=False)
