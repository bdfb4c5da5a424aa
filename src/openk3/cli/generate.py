"""`openk3 generate`: continue a text with a trained model, in memory or streamed from disk."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from openk3.cli.talking import Speaker

app = typer.Typer()

GB = 10**9


@app.command()
def generate(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to continue; '-' reads it from stdin.")],
    run: Annotated[
        Path | None,
        typer.Argument(help="A run folder, one of its checkpoints, or a folder in the released layout."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="Most new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Draw from the smallest set with this probability.")] = 0.95,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k most likely.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; by default cuda where there is one, then in bf16.")
    ] = None,
    stream_weights: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Instead of RUN: a folder in the released layout, read as needed."),
    ] = None,
    budget_gb: Annotated[
        float | None,
        typer.Option(help="Memory for streamed weights, in 10^9 bytes; by default half of what is free."),
    ] = None,
) -> None:
    """Continue a text. The prompt is printed first, then the continuation as it is written.

    With --stream-weights the checkpoint may be larger than memory; a last line on stderr says what was read.

    Example: openk3 generate runs/quickstart/pretrain --prompt "import os"
    """
    from openk3.cli.standard_input import read_text
    from openk3.cli.talking import write_stream
    from openk3.model.generate import Sampling

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    with _speaker(run, stream_weights, budget_gb, device) as speaker:
        text = read_text() if prompt == "-" else prompt
        ids = speaker.tokenizer.encode(text)
        print(text, end="", flush=True)
        write_stream(speaker, ids, tokens, sampling)


@contextmanager
def _speaker(
    run: Path | None, streamed: Path | None, budget_gb: float | None, device: str | None
) -> Iterator[Speaker]:
    """Who writes: a model in memory, or one whose weights stay in `streamed`, which reports at the end."""
    from openk3.checkpoint.official.folder import OfficialFolder
    from openk3.checkpoint.streamed.budget import half_of_free_memory
    from openk3.checkpoint.streamed.model import StreamedK3
    from openk3.cli.talking import device_named, load, with_tokenizer
    from openk3.errors import InvalidInput

    if run is not None and streamed is None and budget_gb is None:
        yield load(run, device_named(device))
        return
    if run is not None or streamed is None:
        raise InvalidInput(
            "generate: give either a run folder or --stream-weights DIR; --budget-gb is for that"
        )
    if device not in (None, "cpu"):
        raise InvalidInput("generate: streamed weights run on the CPU; leave out --device")
    if budget_gb is not None and not 0 < budget_gb * GB < math.inf:
        raise InvalidInput(f"generate: --budget-gb must be a positive number, got {budget_gb}")
    budget = half_of_free_memory() if budget_gb is None else int(budget_gb * GB)
    with OfficialFolder.open(streamed) as folder, StreamedK3(folder, budget) as model:
        yield with_tokenizer(model, streamed)
        held = f"held {model.division.held / GB:.3g} of {budget / GB:.3g} GB"
        print(f"{held}; {model.usage.line()}", file=sys.stderr)
