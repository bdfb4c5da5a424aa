"""Where tests find the published tables of the released checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ASSETS = Path(os.environ.get("OPENK3_K3_ASSETS", Path(__file__).parents[2].parent / "shared" / "k3"))


def asset(name: str) -> Path:
    """The file `name`; the test is skipped where it is not."""
    path = ASSETS / name
    if not path.exists():
        pytest.skip(f"{path} is not here: set OPENK3_K3_ASSETS to the folder with the released tables")
    return path
