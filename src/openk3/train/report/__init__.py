"""`report.html`: one static page that shows a run (curves, expert load, AttnRes weights, configuration).

`run`     reads a run folder
`charts`  draws series and matrices as SVG
`html`    the elements of the page
`page`    what is shown, in which order
"""

from __future__ import annotations

from pathlib import Path

from openk3.checkpoint.atomic import atomic_write_text

__all__ = ["write_report"]


def write_report(folder: str | Path) -> Path:
    """Write `report.html` into a run folder and return its path.

    Raises:
        InvalidInput: there is no run in `folder`.
        StorageError: the page cannot be written.
    """
    from openk3.train.report.page import page  # matplotlib is slow to import, and only needed here
    from openk3.train.report.run import read_run

    folder = Path(folder)
    path = folder / "report.html"
    atomic_write_text(path, page(read_run(folder)))
    return path
