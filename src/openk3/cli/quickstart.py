"""`openk3 quickstart`: what `make run` calls."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()

PROMPTS = (
    "What does os.path.join do?",
    "What is collections.OrderedDict?",
    "What is the module json for?",
)
OPENING = "def "


@app.command()
def quickstart(
    out: Annotated[
        Path, typer.Option(help="Where everything goes; an interrupted quickstart resumes.")
    ] = Path("runs/quickstart"),
    minutes: Annotated[float, typer.Option(min=1, help="Time to aim for; more time, a better model.")] = 7.0,
    smoke: Annotated[bool, typer.Option("--smoke", help="A few steps only, to see that all works.")] = False,
) -> None:
    """Train the nano model on text that is already on this machine, fine-tune it, and let it answer.

    Nothing is downloaded. The corpus is this Python's standard library and its documentation; the answers
    come from docstrings. Held-out text is measured in bits per byte beside gzip -9 and xz -9.
    """
    from rich.console import Console

    from openk3.chat.template import encode, render
    from openk3.checkpoint.atomic import atomic_write_json
    from openk3.cli.progress import TerminalProgress
    from openk3.cli.talking import load, write_stream
    from openk3.model.generate import Sampling
    from openk3.train.allocator import keep_freed_memory
    from openk3.train.quickstart import quickstart as train

    began = time.perf_counter()
    keep_freed_memory()
    console = Console()

    def announce(text: str) -> None:
        console.print(f"[bold]{time.perf_counter() - began:5.0f} s[/]  {text}", highlight=False)

    with TerminalProgress(console) as display:
        trained = train(out, minutes=minutes, smoke=smoke, announce=announce, progress=display)

    writer = load(trained.pretrained.folder)
    console.rule("the pretrained model continues a text")
    print(OPENING, end="", flush=True)
    write_stream(writer, writer.tokenizer.encode(OPENING), 120, Sampling(temperature=0.7, top_p=0.9))

    speaker = load(trained.finetuned.folder)
    console.rule("the fine-tuned model answers")
    answers = []
    for question in PROMPTS:
        print(f"> {question}")
        prompt = encode(render([{"role": "user", "content": question}], thinking=False), speaker.tokenizer)
        answers.append({"question": question, "answer": write_stream(speaker, prompt, 80, Sampling(0.0))})

    last = trained.pretrained.last
    summary = {
        "seconds": round(time.perf_counter() - began, 1),
        "train_tokens": last["tokens"],
        "val_bits_per_byte": last["bits_per_byte"],
        "gzip_bits_per_byte": trained.gzip_bits_per_byte,
        "xz_bits_per_byte": trained.xz_bits_per_byte,
        "answers": answers,
    }
    atomic_write_json(out / "summary.json", summary)
    console.rule("done")
    console.print(
        f"held-out text, bits per byte: [bold]{last['bits_per_byte']:.3f}[/] this model, "
        f"{trained.gzip_bits_per_byte:.3f} gzip -9, {trained.xz_bits_per_byte:.3f} xz -9",
        highlight=False,
    )
    console.print(f"{last['tokens']:,} tokens trained on, {summary['seconds']} s in all", highlight=False)
    openk3 = _program()
    pretrained, finetuned = (shlex.quote(f"{out}/{run}") for run in ("pretrain", "finetune"))
    console.print(
        f"""everything lies in {out}: corpus/, pretrain/, finetune/, summary.json
next:  {openk3} chat {finetuned}
       {openk3} generate {pretrained} --prompt 'import '
       {openk3} report {pretrained}
       {openk3} train nano            (a longer run: an hour on two cores)""",
        highlight=False,
        markup=False,
        soft_wrap=True,  # commands to copy stay in one piece
    )


def _program() -> str:
    """What to type to come here again: set-up puts `openk3` into .venv, which need not be on the path."""
    called = Path(sys.argv[0])
    return shlex.quote(str(called)) if called.name == "openk3" and not shutil.which("openk3") else "openk3"
