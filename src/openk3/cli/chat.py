"""`openk3 chat`: talk to a fine-tuned model on the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def chat(
    run: Annotated[Path, typer.Argument(help="Run folder of a fine-tuned model, or one of its checkpoints.")],
    system: Annotated[str | None, typer.Option(help="A system message that stays first.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the smallest set with this probability.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; by default cuda where there is one, then in bf16.")
    ] = None,
) -> None:
    """Talk to a model, one line at a time. /reset forgets the conversation, /quit or end of input leaves.

    Example: openk3 chat runs/quickstart/finetune
    """
    from openk3.chat.template import encode, render
    from openk3.cli.standard_input import read_line
    from openk3.cli.talking import device_named, load, write_stream
    from openk3.model.generate import Sampling

    model = load(run, device_named(device))
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    opening = [{"role": "system", "content": system}] if system else []
    history = list(opening)
    interactive = sys.stdin.isatty()
    while True:
        if interactive:
            print("> ", end="", flush=True)
        line = read_line()
        question = line.strip()
        if not line or question == "/quit":
            return
        if question == "/reset":
            history = list(opening)
            continue
        if not question:
            continue
        history.append({"role": "user", "content": question})
        prompt = encode(render(history, thinking=False), model.tokenizer)
        answer = write_stream(model, prompt, tokens, sampling)
        history.append({"role": "assistant", "content": answer})
