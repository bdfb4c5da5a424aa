"""`openk3 report`: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from openk3.train.report import write_report

app = typer.Typer()


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run folder, of a finished or of a running training.")],
) -> None:
    """Write report.html into a run folder: curves, expert load, attention residuals, configuration.

    The page needs nothing else: no script, no network. Example: openk3 report runs/nano
    """
    print(write_report(run))
