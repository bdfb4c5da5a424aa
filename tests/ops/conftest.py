"""Every kernel operator is known to torch, whichever test runs first: operators import their kernels late."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import openk3
from openk3.ops.dispatch import TRITON_INSTALLED

PACKAGE = Path(openk3.__file__).parent


@pytest.fixture(autouse=True, scope="session")
def _operators_are_registered():
    if TRITON_INSTALLED:
        for path in (PACKAGE / "ops").rglob("*.py"):
            if "@kernel_operator(" in path.read_text():
                name = path.relative_to(PACKAGE.parent).with_suffix("")
                importlib.import_module(".".join(name.parts))
