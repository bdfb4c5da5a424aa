"""What all tests share: kernels run without a GPU, and the gate skips nothing for want of a package."""

from __future__ import annotations

import os
import re

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this when a kernel is defined, so it must be set before any test imports one.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A missing package is a reason to skip for a person; where CI=true it is a failure of set-up."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and call.excinfo:
        reason = str(call.excinfo.value)
        if re.search("not installed|could not import", reason):
            report.outcome = "failed"
            report.longrepr = f"skipped in CI, where everything must be installed: {reason}"
    return report
