"""`openk3 convert`: a checkpoint in another form."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


class Form(StrEnum):
    """What a checkpoint can be written as."""

    OURS = "ours"
    BF16 = "bf16"
    MXFP4 = "mxfp4"


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(help="A run folder, one of its checkpoints, or a folder in the released layout.")
    ],
    target: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    to: Annotated[
        Form,
        typer.Option(
            help="bf16, mxfp4: the released layout, with routed experts in that format. "
            "ours: weights that train, generate and chat read like a run's."
        ),
    ] = Form.BF16,
    fp32: Annotated[
        bool, typer.Option("--fp32", help="From a run: keep its weights in float32 instead of bfloat16.")
    ] = False,
) -> None:
    """Write a checkpoint in another form. The tokenizer and other small files come along.

    Examples:

    openk3 convert runs/nano exported

    openk3 convert Kimi-K3 Kimi-K3-bf16 --to bf16

    openk3 convert exported unpacked --to ours
    """
    import os

    from openk3.checkpoint.official.folder import is_official_folder
    from openk3.errors import InvalidInput

    if os.path.lexists(target):
        raise InvalidInput(f"{target}: exists already; give the name of a new folder")
    official = is_official_folder(source)
    if fp32 and (official or to is Form.OURS):
        raise InvalidInput("--fp32 is for a run that is written in the released layout")
    if to is Form.OURS:
        _to_ours(source, target, official)
    elif official:
        _rewrite(source, target, to)
    else:
        _export(source, target, to, fp32)
    print(f"{target}: written; look into it with: openk3 inspect {target}")


def _rewrite(source: Path, target: Path, to: Form) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from openk3.checkpoint.official.convert import convert_official, converted_dtype
    from openk3.checkpoint.official.folder import WEIGHTS, OfficialFolder
    from openk3.checkpoint.official.layout import official_tensors
    from openk3.checkpoint.official.save import with_experts

    with OfficialFolder.open(source) as folder:
        config, weights = with_experts(folder.config, to.value), WEIGHTS[converted_dtype(folder)]
        total = sum(spec.bytes for spec in official_tensors(config, weights=weights))
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(escape(f"writing {target}"), total=total)
            convert_official(
                folder, target, experts=to.value, progress=lambda done: progress.advance(task, done)
            )


def _export(source: Path, target: Path, to: Form, fp32: bool) -> None:
    from openk3.checkpoint.official.save import save_official
    from openk3.cli.talking import tokenizer_file
    from openk3.train.weights import load_model

    save_official(
        load_model(source),
        target,
        experts=to.value,
        dtype="float32" if fp32 else "bfloat16",
        companions=[tokenizer_file(source)],
    )


def _to_ours(source: Path, target: Path, official: bool) -> None:
    import shutil

    import torch

    from openk3.chat.tokenizer import FILE_NAME
    from openk3.checkpoint.atomic import atomic_folder, make_folder
    from openk3.checkpoint.official.config_reading import weights_dtype
    from openk3.checkpoint.official.folder import OfficialFolder
    from openk3.checkpoint.official.load import load_official
    from openk3.errors import InvalidInput
    from openk3.train.weights import describe_run, save_weights

    if not official:
        describe_run(source)
        raise InvalidInput(f"{source}: is no folder in the released layout; what train wrote is ours already")
    with OfficialFolder.open(source) as folder:
        wide = weights_dtype(folder.table) != "bfloat16"
    model = load_official(source, dtype=torch.float32 if wide else torch.bfloat16)
    make_folder(target.parent)
    with atomic_folder(target) as partial:
        save_weights(model, partial)
        if (source / FILE_NAME).is_file():
            shutil.copyfile(source / FILE_NAME, partial / FILE_NAME)
