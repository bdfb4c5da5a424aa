"""Where the released tokenizer and the published prompts are, if they are on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def k3_assets() -> Path:
    """A folder with `tiktoken.model` and `chat-template-goldens.json` of the release."""
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "k3"
    folder = Path(os.environ.get("OPENK3_K3_ASSETS", beside))
    if not (folder / "tiktoken.model").is_file():
        pytest.skip("released files are not here; set OPENK3_K3_ASSETS to a folder with tiktoken.model")
    return folder
