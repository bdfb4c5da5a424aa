"""The root of the `openk3` command and its one rule for failures: one line on stderr, exit code 2.

Only the subcommand that was called is imported, so that `openk3 --help` does not load torch.
"""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from openk3 import __version__
from openk3.errors import OpenK3Error

COMMANDS = {
    "quickstart": "Train the nano model on text that is already on this machine, then talk to it.",
    "train": "Train a model from a recipe; an interrupted run resumes by itself.",
    "profile": "Say where a training step's time goes, and how far each part is from its floor.",
    "ablate": "Say what a part is worth: a set of training runs, several seeds each, into a table.",
    "generate": "Continue a text with a trained model.",
    "chat": "Talk to a trained model on the terminal.",
    "convert": "Write a checkpoint in another form: ours, or the released layout in BF16 or MXFP4.",
    "inspect": "Say what a checkpoint holds, and whether it will load, without loading it.",
    "params": "Count the parameters of a configuration, or list its tensors.",
    "tokenizer": "Train, inspect and use tokenizers.",
    "data": "Prepare corpora into token shards, and look into them.",
    "report": "Turn a run's metrics into one HTML page.",
    "doctor": "Say what this machine has and which implementations will run.",
}

RESUMING = ("quickstart", "train", "ablate")
INTERRUPTED = 130


def root(called: str | None) -> typer.Typer:
    """The command tree, with the subcommand `called` loaded and the others present by name and one line."""
    app = typer.Typer(
        name="openk3",
        help="The whole Kimi K3 system, open: train, inspect and run models of this architecture.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name, line in COMMANDS.items():
        if name != called:
            app.command(name, help=line)(_named_only)
            continue
        sub: typer.Typer = importlib.import_module(f"openk3.cli.{name}").app
        if len(sub.registered_commands) == 1 and sub.registered_callback is None:
            (single,) = sub.registered_commands
            single.name = name
            app.registered_commands.append(single)
        else:
            app.add_typer(sub, name=name, help=line)
    app.callback()(_root_options)
    return app


def _named_only() -> None:
    """Stands for a subcommand that was not called."""


def _print_version(asked: bool) -> None:
    if asked:
        print(f"openk3 {__version__}")
        raise typer.Exit


def _root_options(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
    ),
) -> None:
    """Options of `openk3` itself; typer acts on them."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; never returns normally.

    Exit codes: 0 done, 1 a bug (with its traceback), 2 wrong input or environment, 130 interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    called = next((word for word in words if not word.startswith("-")), None)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character gets its number
            stream.reconfigure(errors="backslashreplace")
    try:
        root(called if called in COMMANDS else None)(words, prog_name="openk3")
    except OpenK3Error as error:
        _refuse(str(error))
    except SystemExit as end:
        if end.code == INTERRUPTED:
            goes_on = "; the same command goes on where it stopped" if called in RESUMING else ""
            print(f"openk3: interrupted{goes_on}", file=sys.stderr)
        raise
    except OSError as error:  # the system refused what no part of the package has words for
        _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _refuse(reason: str) -> NoReturn:
    line = "".join(c if c.isprintable() else " " for c in " ".join(reason.split()))
    print(f"openk3: error: {line}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
