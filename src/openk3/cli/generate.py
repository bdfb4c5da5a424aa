"""`openk3 generate`: continue a text with a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="A run folder, or one of its checkpoints.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to continue; '-' reads it from stdin.")],
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="Most new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Draw from the smallest set with this probability.")] = 0.95,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k most likely.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
) -> None:
    """Continue a text. The prompt is printed first, then the continuation as it is written.

    Example: openk3 generate runs/quickstart/pretrain --prompt "import os"
    """
    from openk3.cli.standard_input import read_text
    from openk3.cli.talking import load, write_stream
    from openk3.model.generate import Sampling

    model = load(run)
    text = read_text() if prompt == "-" else prompt
    ids = model.tokenizer.encode(text)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    print(text, end="", flush=True)
    write_stream(model, ids, tokens, sampling)
